//! The kernel's own connections through the NIC, with large sends, large receive and moderated deliveries, over a link
//! that reorders: every byte is compared, and frames that are not TCP cross unchanged.

use crate::common::{SetsAtEnd, hosts};
use crate::scratch::Scratch;
use baton_abi::layout::Counter;
use baton_backends::VnetDevice;
use baton_bed::testbed::connect_pairs;
use baton_bed::testbed::{Testbed, TestbedSettings, address_a, address_b};
use baton_device::{Device, Frame, MAX_FRAME};
use baton_linux::events::{Poller, Trigger};
use baton_linux::namespace::Namespace;
use baton_linux::{interface, process, rtnetlink, socket};
use baton_lro::{Mode, Push};
use baton_moderation::Mode as Moderation;
use baton_offloads::Offloads;
use baton_protocol::nic::LinkSettings;
use baton_sim::frames::of_every_kind;
use baton_sim::stream;
use std::io;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BYTES: u64 = 6_000_000;

/// One direction of a connection: what has been sent and received.
struct Direction<'a> {
    from: &'a TcpStream,
    to: &'a TcpStream,
    key: u64,
    sent: u64,
    received: u64,
}

impl Direction<'_> {
    /// Sends and receives what it can. Returns whether that was anything.
    fn advance(&mut self, buffer: &mut [u8]) -> bool {
        let piece = buffer.len().min((BYTES - self.sent) as usize);
        stream::fill(self.key, self.sent, &mut buffer[..piece]);
        let sent = if piece == 0 { 0 } else { later(socket::send(self.from.as_fd(), &buffer[..piece])) };
        self.sent += sent as u64;
        let got = later(socket::receive(self.to.as_fd(), buffer));
        assert_eq!(stream::mismatches(self.key, self.received, &buffer[..got]), 0, "wrong bytes after {}", self.received);
        self.received += got as u64;
        sent + got > 0
    }
}

fn later(result: io::Result<usize>) -> usize {
    match result {
        Ok(count) => count,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(error) => panic!("the connection broke: {error}"),
    }
}

/// Sends bytes both ways over several connections until all have arrived.
fn exchange(bed: &Testbed, ipv6: bool) {
    let (servers, clients) = connect_pairs(bed, 3, ipv6).expect("connections");
    let pairs = servers.iter().zip(&clients);
    let mut directions: Vec<Direction<'_>> = pairs
        .flat_map(|(server, client)| [(server, client), (client, server)])
        .enumerate()
        .map(|(key, (from, to))| Direction { from, to, key: key as u64 + 1, sent: 0, received: 0 })
        .collect();
    let mut buffer = vec![0; 1 << 16];
    let mut progress = Instant::now();
    while directions.iter().any(|direction| direction.received < BYTES) {
        let moved = directions.iter_mut().fold(false, |moved, direction| direction.advance(&mut buffer) || moved);
        if moved {
            progress = Instant::now();
        } else {
            assert!(progress.elapsed() < Duration::from_secs(20), "nothing moves any more");
            // Waits: between two looks.
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Sends datagrams that fit, and some that must be fragmented, both ways.
fn datagrams(bed: &Testbed, ipv6: bool) {
    let bound = |host: &Namespace, address| host.run(|| UdpSocket::bind(SocketAddr::new(address, 0)));
    let a = bound(&bed.host_a, address_a(ipv6)).expect("a socket");
    let b = bound(&bed.host_b, address_b(ipv6)).expect("a socket");
    let mut buffer = vec![0; 1 << 16];
    for length in [1, 100, 1400, 4000, 20_000] {
        for (from, to) in [(&a, &b), (&b, &a)] {
            to.set_read_timeout(Some(Duration::from_secs(5))).expect("a limit");
            let mut sent = vec![0; length];
            stream::fill(length as u64, 0, &mut sent);
            from.send_to(&sent, to.local_addr().expect("an address")).expect("a datagram");
            let (got, _) = to.recv_from(&mut buffer).unwrap_or_else(|error| panic!("{length} bytes never came: {error}"));
            assert_eq!(buffer[..got], sent, "a datagram of {length} bytes");
        }
    }
}

/// A packet socket on a host's interface.
fn raw(host: &Namespace, name: &str) -> VnetDevice {
    let opened = host.run(|| {
        let link = rtnetlink::link(&rtnetlink::open()?, name)?;
        interface::open_packet_socket(link.index)
    });
    VnetDevice::new(opened.expect("a packet socket"), false)
}

/// Sends frames of every other kind both ways, which must arrive unchanged.
fn everything_else(bed: &Testbed) {
    let mut ends = [raw(&bed.host_a, "baton0"), raw(&bed.host_b, "eth0")];
    let mut buffer = Frame::with_capacity(MAX_FRAME);
    for (number, sent) in of_every_kind().into_iter().enumerate() {
        // The kernel removes the outermost tag before it shows a frame.
        let tagged = matches!(sent.get(12..14), Some([0x81, 0x00] | [0x88, 0xa8]));
        let untagged = if tagged { [&sent[..12], &sent[16..]].concat() } else { sent.clone() };
        for _ in 0..2 {
            ends.rotate_left(1);
            let [from, to] = &mut ends;
            buffer.fill(&sent);
            assert!(from.transmit(&mut buffer), "kind {number} was not sent");
            let poller = Poller::new().expect("a poller");
            poller.add(to.fd(), 0, Trigger::Readable).expect("epoll");
            let deadline = Instant::now() + Duration::from_secs(10);
            loop {
                if !to.receive(&mut buffer) {
                    poller.wait(Some(Duration::from_millis(100)), &mut Vec::new()).expect("epoll");
                } else if buffer.bytes() == sent || buffer.bytes() == untagged {
                    break;
                }
                assert!(Instant::now() < deadline, "kind {number} never came: {sent:02x?}");
            }
        }
    }
}

#[test]
fn streams_and_datagrams_survive_every_setting() {
    let mut ipv6 = false;
    for mode in [Mode::Off, Mode::InOrder, Mode::Reorder] {
        for (large_sends, moderation) in
            [(false, Moderation::Off), (true, Moderation::Adaptive), (true, Moderation::Static { time: 100, frames: 16 })]
        {
            let link = LinkSettings { delay: 50, reorder: 20_000, hold: 300, seed: 3, ..LinkSettings::default() };
            let lro = baton_lro::LroSettings { mode, push: Push::Bulk, ..Default::default() };
            // Jumbo frames in one row of three.
            let mtu = if moderation == Moderation::Adaptive { 9000 } else { 1500 };
            let bed = hosts(TestbedSettings {
                mtu,
                link,
                offloads: Offloads { large_sends, lro, moderation, active_ack: ipv6, ..Offloads::default() },
                ..TestbedSettings::default()
            });
            exchange(&bed, ipv6);
            datagrams(&bed, ipv6);
            everything_else(&bed);
            let counters = bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").counters;
            let count = |counter: Counter| counters[counter as usize];
            let seen = format!("{mode:?}, large sends {large_sends}, {moderation:?}: {counters:?}");
            assert_eq!(count(Counter::Merged) > 1000, mode != Mode::Off, "{seen}");
            assert_eq!(count(Counter::Reordered) > 10, mode == Mode::Reorder, "{seen}");
            assert_eq!(count(Counter::CutSegments) > 1000, large_sends, "{seen}");
            assert_eq!(count(Counter::Uncut), 0, "{seen}");
            ipv6 = !ipv6;
        }
    }
}

/// `baton nic set` on host A's Baton.
fn set(bed: &Testbed, settings: &[&str]) -> std::process::Output {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["nic", "set"]).args(settings).env("BATON_SOCKET", bed.socket());
    command.output().expect("baton")
}

/// Settings change while bytes flow, and while the agent dies; only the counters show it.
#[test]
fn settings_change_under_load() {
    let link = LinkSettings { delay: 50, reorder: 20_000, hold: 300, seed: 3, ..LinkSettings::default() };
    let bed = hosts(TestbedSettings { link, ..TestbedSettings::default() });
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for settings in [
                    &["lro=reorder", "tso=on", "adaptive-rx=on", "active-ack=on"][..],
                    &["lro=in-order", "rx-usecs=50", "rx-frames=8"],
                    &["lro=off", "tso=off", "rx-usecs=0", "active-ack=off"],
                    &["lro=reorder", "lro-push=bulk", "lro-bytes=9000", "lro-gap-usecs=10", "rx-usecs=200"],
                ] {
                    let done = set(&bed, settings);
                    assert!(done.status.success(), "{settings:?}: {}", String::from_utf8_lossy(&done.stderr));
                }
            }
        });
        let _over = SetsAtEnd(&over);
        for ipv6 in [false, true, false] {
            exchange(&bed, ipv6);
            datagrams(&bed, ipv6);
            everything_else(&bed);
        }
    });
    assert!(set(&bed, &["lro=in-order", "rx-usecs=77"]).status.success());
    let agent = bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").agent_process;
    baton_linux::process::signal(agent, 9).expect("a signal");
    let listed = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_baton"));
        let shown = command.args(["nic", "show", "--json"]).env("BATON_SOCKET", bed.socket()).output().expect("baton");
        String::from_utf8_lossy(&shown.stdout).into_owned()
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    let next = loop {
        match bed.tool().and_then(|mut tool| tool.statistics()) {
            Ok(statistics) if statistics.agent_process != agent => break listed(),
            _ => assert!(Instant::now() < deadline, "there is no next agent"),
        }
    };
    assert!(next.contains("\"lro\":\"in-order\"") && next.contains("\"rx-usecs\":\"77\""), "{next}");
    exchange(&bed, false);
}

#[test]
fn wrong_settings_are_explained() {
    let bed = hosts(TestbedSettings::default());
    for (wrong, says) in [
        ("lro=yes", "off, in-order, reorder"),
        ("rings=4", "unknown setting"),
        ("queues=4", "this NIC has 1"),
        ("rx-usecs", "KEY=VALUE"),
    ] {
        let refused = set(&bed, &["tso=on", wrong]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && text.contains(says), "{wrong}: {text}");
    }
    let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
    let refused = set(&bed, &["lro=reorder"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("beside the kernel"), "{refused:?}");
}

/// Sender and receiver of `baton ntttcp` on the two hosts: with large receive and moderation there are many packets per
/// interrupt.
#[test]
fn ntttcp_measures_both_sides() {
    let link = LinkSettings { delay: 20, ..LinkSettings::default() };
    let lro = baton_lro::LroSettings { mode: Mode::InOrder, ..Default::default() };
    let offloads = Offloads { lro, moderation: Moderation::Adaptive, large_sends: true, ..Offloads::default() };
    let bed = hosts(TestbedSettings { link, offloads, ..TestbedSettings::default() });
    let start = |host: &Namespace, arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_baton"));
        command.arg("ntttcp").args(arguments).args(["-P", "2", "-t", "0.7", "-w", "0.2", "--json"]);
        command.env("BATON_SOCKET", bed.socket()).stdout(std::process::Stdio::piped());
        host.spawn(&mut command).expect("baton")
    };
    let receiver = start(&bed.host_a, &["receive", "--nic"]);
    let sender = start(&bed.host_b, &["send", &address_a(false).to_string()]);
    let [received, sent] = [receiver, sender].map(|child| {
        let output = child.wait_with_output().expect("its output");
        assert!(output.status.success());
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON")
    });
    let figure =
        |report: &serde_json::Value, name: &str| report[name].as_f64().unwrap_or_else(|| panic!("no {name} in {report}"));
    for report in [&received, &sent] {
        assert!(figure(report, "megabits") > 100.0 && figure(report, "cycles_per_byte") > 0.0, "{report}");
    }
    assert!(received["of_the_nic"] == true && figure(&received, "average_frame") > 5000.0, "{received}");
    assert!(figure(&received, "interrupts_per_second") > 10.0, "{received}");
    assert!(figure(&sent, "average_frame") > 1000.0, "{sent}");
}

/// The receiver's turns on the processor that it is bound to are in the trace, and interrupts.
#[test]
fn ntttcp_traces_a_processor() {
    let bed = hosts(TestbedSettings { threaded_napi: true, ..TestbedSettings::default() });
    let scratch = Scratch::new("trace");
    let (file, core) = (scratch.file("trace"), process::allowed_cpus().into_iter().max().expect("a processor").to_string());
    let start = |host: &Namespace, arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_baton"));
        command.arg("ntttcp").args(arguments).args(["-t", "0.5", "-w", "0.2"]).stdout(std::process::Stdio::piped());
        host.spawn(&mut command).expect("baton")
    };
    let receiver = start(&bed.host_a, &["receive", "--core", &core, "--trace", &file]);
    let (number, sender) = (receiver.id(), start(&bed.host_b, &["send", &address_a(false).to_string()]));
    let [received, sent] = [receiver, sender].map(|child| child.wait_with_output().expect("its output"));
    assert!(received.status.success() && sent.status.success());
    let table = String::from_utf8_lossy(&received.stdout).into_owned();
    assert!(table.contains(&format!("Processor {core} ")) && table.contains(&format!("({number})")), "{table}");
    let trace = std::fs::read_to_string(&file).expect("the trace");
    let samples: Vec<serde_json::Value> = trace.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(samples.len() >= 2, "{trace}");
    let own = |sample: &serde_json::Value| {
        let processes = sample["processes"].as_array().expect("processes");
        processes.iter().any(|one| one["process"] == number && one["sum_us"].as_f64() > Some(0.0))
    };
    assert!(samples.iter().any(own), "{trace}");
    assert!(samples.iter().any(|sample| sample["halves"].as_object().is_some_and(|halves| !halves.is_empty())), "{trace}");
}
