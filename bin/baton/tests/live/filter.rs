//! The NIC as a point of control: rules of the NIC's owner about the kernel's frames and those of connections on the
//! NIC, compared with what is captured on both sides; and a host whose root has turned against the owner.

use crate::common::{Scene, SetsAtEnd, bind_at_freed, connect, hosts, scene, wait_until};
use crate::fuse::{FuseFile, NEVER_FLUSHED};
use baton_backends::PacketDevice;
use baton_bed::testbed::{ControlPoint, Testbed, TestbedSettings, address_a, address_b};
use baton_device::{Device, Frame, MAX_FRAME};
use baton_filter::{Direction, parse};
use baton_keeper::Descriptor;
use baton_linux::control::PeerChannel;
use baton_linux::namespace::Namespace;
use baton_linux::{freeze, interface, process, rtnetlink};
use baton_protocol::filter::ToOwner;
use baton_protocol::program::Place;
use serde_json::Value;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const KEY: &[u8] = b"0123456789abcdef0123456789abcdef";

/// Settings of a test bed whose NIC has an owner with these rules. Frames are cut before they reach the wire, so that a
/// capture counts what the NIC counts.
fn settings(rules: &[&str]) -> TestbedSettings {
    let rules = rules.iter().map(|rule| parse(rule).expect(rule).to_string()).collect();
    let control_point = Some(ControlPoint { key: KEY.to_vec(), rules, contained: false });
    TestbedSettings { control_point, segmentation: false, ..TestbedSettings::default() }
}

/// Runs `baton nic filter`, with the owner's key.
fn filter(bed: &Testbed, arguments: &[&str]) -> Output {
    let key = bed.filter_socket().with_file_name("key");
    std::fs::write(&key, KEY).expect("a key");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["nic", "filter"]).args(arguments).arg("--key").arg(&key).arg("--socket").arg(bed.filter_socket());
    command.output().expect("baton")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// As [`filter`], which must succeed.
fn change(bed: &Testbed, arguments: &[&str]) -> Value {
    let ran = filter(bed, &[arguments, &["--json"]].concat());
    assert!(ran.status.success(), "{arguments:?}: {}", text(&ran.stderr));
    serde_json::from_slice(&ran.stdout).expect("JSON")
}

/// Packets and bytes that the rule at a place of the list has counted, and packets over its limit.
fn counted(bed: &Testbed, at: usize) -> [u64; 3] {
    let rule = &change(bed, &["list"])["rules"][at];
    ["packets", "bytes", "over"].map(|field| rule[field].as_u64().expect(field))
}

/// A capture at an interface, in both directions.
struct Capture(PacketDevice);

impl Capture {
    fn at(host: &Namespace, name: &str) -> Capture {
        Capture::of(host, name, false)
    }

    /// As [`Capture::at`], of what the interface receives only, if wanted.
    fn of(host: &Namespace, name: &str, only_received: bool) -> Capture {
        let open = || {
            let index = rtnetlink::link(&rtnetlink::open()?, name)?.index;
            interface::open_filtered_packet_socket(index, only_received, |_| Ok(()))
        };
        Capture(PacketDevice::new(host.run(open).expect("a capture"), false))
    }

    /// Counts the frames so far for which `wanted` holds, and their bytes.
    fn count(&mut self, mut wanted: impl FnMut(&[u8]) -> bool) -> [u64; 2] {
        let mut frame = Frame::with_capacity(MAX_FRAME);
        let mut sum = [0, 0];
        while self.0.receive(&mut frame) {
            assert!(frame.segmentation.is_none(), "a large frame counts as several");
            if wanted(frame.bytes()) {
                sum = [sum[0] + 1, sum[1] + frame.bytes().len() as u64];
            }
        }
        sum
    }
}

/// Whether a frame is of this IP protocol and has one of its ports; IPv4 or IPv6 without extensions.
fn has_port(frame: &[u8], protocol: u8, port: u16) -> bool {
    let at = match frame.get(12..14) {
        Some([8, 0]) if frame[23] == protocol => 34,
        Some([0x86, 0xdd]) if frame[20] == protocol => 54,
        _ => return false,
    };
    let port = port.to_be_bytes();
    frame.get(at..at + 2) == Some(&port) || frame.get(at + 2..at + 4) == Some(&port)
}

const TCP: u8 = 6;
const UDP: u8 = 17;

/// Sends `pieces` of 1000 bytes from one socket to the other, and closes the first.
fn transfer(mut from: TcpStream, mut to: TcpStream, pieces: usize) {
    [&from, &to].into_iter().for_each(|side| side.set_nonblocking(false).expect("blocking"));
    std::thread::scope(|scope| {
        scope.spawn(move || (0..pieces).for_each(|_| from.write_all(&[7; 1000]).expect("the sender")));
        let mut all = Vec::new();
        to.read_to_end(&mut all).expect("the receiver");
        assert_eq!(all.len(), pieces * 1000);
    });
}

/// Each rule has counted exactly what crossed the wire: TCP and UDP, IPv4 and IPv6, both directions, one and several
/// workers.
#[test]
fn counters_are_those_of_a_capture() {
    for workers in [1, 2] {
        let rules = [
            "tcp dport 7001 count",
            "out tcp sport 7001 state established accept",
            "in udp dport 7002 accept",
            "in ip6 tcp count",
        ];
        let bed = hosts(TestbedSettings { workers, ..settings(&rules) });
        let mut capture = Capture::at(&bed.host_b, "eth0");
        for ipv6 in [false, true] {
            let (server, client) = connect(&bed, ipv6, 7001);
            transfer(server, client, 3000);
            let (server, client) = connect(&bed, ipv6, 7003);
            transfer(client, server, 100);
            let send = || {
                let socket = UdpSocket::bind(SocketAddr::new(address_b(ipv6), 7004))?;
                (1..200).try_for_each(|length| {
                    socket.send_to(&[1; 500][..length], SocketAddr::new(address_a(ipv6), 7002)).map(|_| ())
                })
            };
            bed.host_b.run(send).expect("datagrams");
        }
        let mut frames: Vec<Vec<u8>> = Vec::new();
        let in_capture = |frames: &[Vec<u8>], wanted: &dyn Fn(&[u8]) -> bool| {
            let of = frames.iter().filter(|frame| wanted(frame));
            of.fold([0, 0, 0], |[packets, bytes, _], frame| [packets + 1, bytes + frame.len() as u64, 0])
        };
        let from_b = |frame: &[u8]| frame[6..12] == baton_bed::testbed::MAC_B;
        let port = |frame: &[u8], at: usize| {
            let at = if frame[12..14] == [8, 0] { 34 + at } else { 54 + at };
            u16::from_be_bytes([frame[at], frame[at + 1]])
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        let seen = loop {
            // The last acknowledgements are under way.
            let seen = [0, 1, 2, 3].map(|at| counted(&bed, at));
            capture.count(|frame| {
                frames.push(frame.to_vec());
                true
            });
            let to_server = in_capture(&frames, &|frame| has_port(frame, TCP, 7001) && port(frame, 2) == 7001);
            let from_server = in_capture(&frames, &|frame| has_port(frame, TCP, 7001) && port(frame, 0) == 7001);
            let datagrams = in_capture(&frames, &|frame| has_port(frame, UDP, 7002));
            let ipv6 = in_capture(&frames, &|frame| frame[12..14] == [0x86, 0xdd] && frame[20] == TCP && from_b(frame));
            let captured = [to_server, from_server, datagrams, ipv6];
            if seen == captured {
                break seen;
            }
            // A kernel that got no acknowledgement in time, on a busy machine, sends again what has arrived.
            assert!(Instant::now() < deadline, "{workers} workers: counted {seen:?}, captured {captured:?}");
        };
        assert!(seen[1][0] > 3000 && seen[2][0] == 398, "{seen:?}");
    }
}

/// Frames of 10 Mb/s get through, within 5 %, of more that is offered: TCP and UDP, in and out. A machine that is busy
/// with other things lets sender or NIC wait for tenths of a second; then nothing passes for that long, and the bucket
/// keeps its burst only. So the time between two frames counts up to the time of a burst. And TCP loses what passes
/// while it waits for a time-out.
#[test]
fn a_limit_holds() {
    const RATE: f64 = 10e6;
    const BURST: f64 = 0.1 * RATE;
    let seconds: f64 = std::env::var("BATON_TEST_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3.0);
    let rules =
        ["in tcp dport 7001 limit 10mbit", "out tcp dport 7001 limit 10mbit", "in udp limit 10mbit", "out udp limit 10mbit"];
    let bed = hosts(settings(&rules));
    let ways = [(TCP, Direction::In), (TCP, Direction::Out), (UDP, Direction::In), (UDP, Direction::Out)];
    for (rule, (protocol, direction)) in ways.into_iter().enumerate() {
        let (from, to, source, address, name) = match direction {
            Direction::In => (&bed.host_b, &bed.host_a, address_b(false), address_a(false), "baton0"),
            Direction::Out => (&bed.host_a, &bed.host_b, address_a(false), address_b(false), "eth0"),
        };
        let to_receiver = SocketAddr::new(address, 7001);
        let over = AtomicBool::new(false);
        let measured = std::thread::scope(|scope| {
            let _over = SetsAtEnd(&over);
            let over = &over;
            if protocol == TCP {
                let listener = to.run(|| TcpListener::bind(to_receiver)).expect("a listener");
                let mut sender = from.run(|| TcpStream::connect(to_receiver)).expect("a connection");
                let (mut receiver, _) = listener.accept().expect("its other end");
                baton_linux::socket::use_cubic(sender.as_fd()).expect("cubic");
                scope.spawn(move || while receiver.read(&mut [0; 65536]).is_ok_and(|got| got > 0) {});
                // Waits: until it looks whether the test is over.
                sender.set_write_timeout(Some(Duration::from_millis(300))).expect("a time limit");
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        let _ = sender.write(&[0; 65536]);
                    }
                });
            } else {
                let sender = from.run(|| UdpSocket::bind(SocketAddr::new(source, 0))).expect("a socket");
                scope.spawn(move || {
                    // Three times the limit, however late this thread gets its turn.
                    let (started, mut sent) = (Instant::now(), 0.0);
                    while !over.load(Ordering::Relaxed) {
                        // Waits: three times the limit is a rate of this clock.
                        while sent < started.elapsed().as_secs_f64() * 3.0 * RATE / 8.0 {
                            let _ = sender.send_to(&[0; 1400], to_receiver);
                            sent += 1400.0;
                        }
                        // Waits: between two rounds of a sender that catches up.
                        std::thread::sleep(Duration::from_micros(300));
                    }
                });
            }
            let mut capture = Capture::at(to, name);
            let wanted = |frame: &[u8]| has_port(frame, protocol, 7001) && frame.len() > 100;
            // The first burst is over, and what came before is taken from the capture.
            wait_until("the limit is reached", || counted(&bed, rule)[2] > 0);
            capture.count(wanted);
            let started = Instant::now();
            let (mut bits, mut flowing, mut last) = (0.0, 0.0, 0.0);
            while last < seconds {
                // Waits: between two looks at the capture.
                std::thread::sleep(Duration::from_millis(1));
                let got = 8.0 * capture.count(wanted)[1] as f64;
                // Waits: the limit is a rate of this clock; gaps of the sender do not count.
                let now = started.elapsed().as_secs_f64();
                if got > 0.0 {
                    bits += got;
                    flowing += (now - last).min(BURST / RATE);
                    last = now;
                }
            }
            (bits, flowing, last)
        });
        let (bits, flowing, took) = measured;
        let what = format!(
            "{}, {direction:?}: {bits:.0} bits in {took:.2} s, {flowing:.2} of them without a gap",
            if protocol == TCP { "TCP" } else { "UDP" }
        );
        println!("{what}");
        assert!(bits > 0.95 * RATE * flowing && bits < 1.05 * RATE * took + BURST, "{what}");
    }
}

/// Over 10 s datagrams of 10 Mb/s reach their receiver, within 5 %, of three times as many that are sent: in and out,
/// at the same time. They come in order, and none twice. A thread that has to wait for its turn sends, or reads, what
/// is due all the same.
#[test]
fn a_limit_of_datagrams_holds_over_ten_seconds() {
    const RATE: f64 = 10e6;
    const PAYLOAD: usize = 1400;
    /// Ethernet, IPv4 and UDP headers: limits count whole frames.
    const HEADERS: usize = 14 + 20 + 8;
    let bed = hosts(settings(&["in udp limit 10mbit", "out udp limit 10mbit"]));
    let over = AtomicBool::new(false);
    let measured: Vec<(f64, f64)> = std::thread::scope(|scope| {
        let _over = SetsAtEnd(&over);
        let ways = [
            (&bed.host_b, address_b(false), &bed.host_a, address_a(false)),
            (&bed.host_a, address_a(false), &bed.host_b, address_b(false)),
        ];
        let receivers = ways.map(|(from, source, to, address)| {
            let receiver = to.run(|| UdpSocket::bind(SocketAddr::new(address, 7001))).expect("a socket");
            receiver.set_read_timeout(Some(Duration::from_secs(5))).expect("a time limit");
            let sender = from.run(|| UdpSocket::bind(SocketAddr::new(source, 0))).expect("a socket");
            let over = &over;
            scope.spawn(move || {
                let (started, mut number) = (Instant::now(), 0u32);
                let mut datagram = [0; PAYLOAD];
                while !over.load(Ordering::Relaxed) {
                    // Waits: three times the limit is a rate of this clock.
                    while f64::from(number) * (PAYLOAD * 8) as f64 <= started.elapsed().as_secs_f64() * 3.0 * RATE {
                        number += 1;
                        datagram[..4].copy_from_slice(&number.to_be_bytes());
                        let _ = sender.send_to(&datagram, SocketAddr::new(address, 7001));
                    }
                    // Waits: between two rounds of a sender that catches up.
                    std::thread::sleep(Duration::from_micros(300));
                }
            });
            scope.spawn(move || {
                let (mut datagram, mut last) = ([0; PAYLOAD], 0);
                let mut receive = || {
                    assert_eq!(receiver.recv(&mut datagram).expect("a datagram"), PAYLOAD);
                    let number = u32::from_be_bytes(*datagram.first_chunk().expect("it is long enough"));
                    assert!(number > last, "datagram {number} after {last}");
                    last = number;
                };
                let await_for = |seconds: f64, receive: &mut dyn FnMut()| {
                    let (started, mut frames) = (Instant::now(), 0);
                    // Waits: the limit is a rate of this clock.
                    while started.elapsed().as_secs_f64() < seconds {
                        receive();
                        frames += 1;
                    }
                    // Waits: the limit is a rate of this clock.
                    (f64::from(frames) * ((PAYLOAD + HEADERS) * 8) as f64, started.elapsed().as_secs_f64())
                };
                // The first burst does not count.
                await_for(1.0, &mut receive);
                await_for(10.0, &mut receive)
            })
        });
        let measured = receivers.map(std::thread::ScopedJoinHandle::join);
        measured.map(|measured| measured.expect("the receiver")).into()
    });
    println!("in and out: {measured:.2?} (bits, seconds)");
    assert!(measured.iter().all(|(bits, took)| within(bits / took / RATE)), "in and out: {measured:.2?} (bits, seconds)");
}

/// Whether a ratio is 1 within 5 %.
fn within(ratio: f64) -> bool {
    (ratio - 1.0).abs() < 0.05
}

/// The error of a connection attempt.
fn attempt(host: &Namespace, to: SocketAddr, limit: Duration) -> io::Error {
    host.run(|| TcpStream::connect_timeout(&to, limit)).expect_err("the connection is filtered")
}

/// A SYN that a rule drops is sent again, and not answered.
fn expect_silence(bed: &Testbed, host: &Namespace, to: SocketAddr, rule: usize) {
    let before = counted(bed, rule)[0];
    let socket = host.run(|| {
        let socket = TcpStream::from(baton_linux::socket::stream(to.is_ipv6(), 0)?);
        socket.set_nonblocking(true)?;
        let begun = baton_linux::socket::connect(socket.as_fd(), to).expect_err("it waits for an answer");
        if begun.raw_os_error() == Some(libc::EINPROGRESS) { Ok(socket) } else { Err(begun) }
    });
    let socket = socket.expect("a socket that connects");
    wait_until("the SYN is sent again", || counted(bed, rule)[0] >= before + 2);
    assert!(socket.take_error().expect("its error").is_none() && socket.peer_addr().is_err(), "{to} has answered");
}

/// A rejected SYN is refused at once, in both directions and both families; a rejected datagram is reported to its
/// sender; a dropped SYN is not answered.
#[test]
fn rejected_is_refused_and_dropped_is_silent() {
    let rules = ["tcp dport 7001 reject", "udp dport 7001 reject", "tcp dport 7002 drop"];
    let bed = hosts(settings(&rules));
    let sides = [(&bed.host_b, address_a as fn(bool) -> _, &bed.host_a), (&bed.host_a, address_b, &bed.host_b)];
    for (host, address, other) in sides {
        for ipv6 in [false, true] {
            let address = address(ipv6);
            let _listeners =
                [7001, 7002].map(|port| other.run(|| TcpListener::bind(SocketAddr::new(address, port))).expect("a listener"));
            let refused = attempt(host, SocketAddr::new(address, 7001), Duration::from_secs(10));
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{refused}");
            expect_silence(&bed, host, SocketAddr::new(address, 7002), 2);
            let reported = host.run(|| {
                let socket = UdpSocket::bind(SocketAddr::new(if ipv6 { "::" } else { "0.0.0.0" }.parse().expect("any"), 0))?;
                socket.connect(SocketAddr::new(address, 7001))?;
                socket.set_read_timeout(Some(Duration::from_secs(10)))?;
                socket.send(b"?")?;
                socket.recv(&mut [0; 9])
            });
            let reported = reported.expect_err("an ICMP error").raw_os_error();
            // Linux's errors for ICMP's and ICMPv6's "administratively prohibited".
            assert_eq!(reported, Some(if ipv6 { libc::EACCES } else { libc::EHOSTUNREACH }));
        }
    }
}

fn offloaded(rules: &[&str]) -> Scene {
    let mut scene = scene(settings(rules));
    scene.exchange(100_000, Place::Nic);
    scene
}

/// Rules that come while a connection is on the NIC apply to its next segment, though its flow was accepted before.
#[test]
fn a_connection_on_the_nic_is_filtered() {
    for direction in ["in", "out"] {
        let mut scene = offloaded(&["tcp dport 8080 count"]);
        let matches = if direction == "in" { ["in", "tcp", "dport", "8080"] } else { ["out", "tcp", "sport", "8080"] };
        let added = change(&scene.bed, &[&["add"][..], &matches, &["drop"]].concat());
        let before = [scene.received[0], scene.received[1]];
        scene.peer_sends(5000);
        scene.send(5000);
        // The first time, and again.
        wait_until("the rule drops twice", || {
            scene.receive();
            scene.peer_receives();
            counted(&scene.bed, 1)[0] > 1
        });
        let arrived = [scene.received[0] - before[0], scene.received[1] - before[1]];
        assert_eq!(arrived[usize::from(direction == "out")], 0, "{direction}: {arrived:?}");
        assert_eq!(scene.settled_place(), Some(Place::Nic));
        change(&scene.bed, &["delete", &added["number"].to_string()]);
        scene.drain();
        scene.exchange(100_000, Place::Nic);
    }
}

/// Rejecting ends a connection on the NIC: the peer is reset, or, for what the NIC sends, the program.
#[test]
fn a_connection_on_the_nic_is_reset() {
    // An acknowledgement that was delayed may meet the rule first: then the send fails already.
    let scene = offloaded(&["tcp dport 8080 count"]);
    change(&scene.bed, &["add", "in", "tcp", "dport", "8080", "reject"]);
    let sent = baton_linux::socket::send(scene.peer.as_fd(), &[0; 10]);
    let receive = || baton_linux::socket::receive(scene.peer.as_fd(), &mut [0; 16]);
    assert_eq!(first_error(sent, receive), ErrorKind::ConnectionReset);

    let mut scene = offloaded(&["tcp dport 8080 count"]);
    change(&scene.bed, &["add", "out", "tcp", "sport", "8080", "reject"]);
    let sent = scene.session.send(scene.id, &[0; 10]);
    let receive = || scene.session.receive(scene.id, &mut [0; 16]);
    assert_eq!(first_error(sent, receive), ErrorKind::ConnectionReset);
}

/// The first error of a call that was made, or else of calls until one fails for good.
fn first_error(made: std::io::Result<usize>, mut call: impl FnMut() -> std::io::Result<usize>) -> ErrorKind {
    let (mut made, mut end) = (Some(made), None);
    wait_until("an error", || {
        let result = made.take().unwrap_or_else(&mut call);
        end = result.err().map(|error| error.kind()).filter(|kind| *kind != ErrorKind::WouldBlock);
        end.is_some()
    });
    end.expect("an error")
}

/// 10,000 rules are loaded at once, under traffic, and the last one decides.
#[test]
fn ten_thousand_rules_are_loaded() {
    let mut scene = offloaded(&[]);
    let file = scene.bed.filter_socket().with_file_name("rules");
    let mut rules: String =
        (0..9_999).map(|n| format!("in tcp dport {} ip saddr 10.{}.{}.0/24 drop\n", 1 + n % 500, n / 250, n % 250)).collect();
    rules += "in tcp dport 8081 drop # the last\n";
    std::fs::write(&file, &rules).expect("a file");
    let loaded = change(&scene.bed, &["load", file.to_str().expect("a path")]);
    assert_eq!(loaded["rules"], 10_000);
    scene.exchange(200_000, Place::Nic);
    let listed = change(&scene.bed, &["list"]);
    assert_eq!(listed["rules"].as_array().map(Vec::len), Some(10_000));
    assert!(listed["unmatched"]["packets"].as_u64() > Some(10));
    expect_silence(&scene.bed, &scene.bed.host_b, SocketAddr::new(address_a(false), 8081), 9_999);
    change(&scene.bed, &["flush"]);
    let refused = attempt(&scene.bed.host_b, SocketAddr::new(address_a(false), 8081), Duration::from_secs(10));
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "nobody listens there");
}

/// Each error says what is wrong, and changes nothing.
#[test]
fn errors_say_what_is_wrong() {
    let bed = hosts(settings(&["in tcp dport 22 drop"]));
    let file = bed.filter_socket().with_file_name("rules");
    std::fs::write(&file, "in drop\n\nout tcp dport http drop\n").expect("a file");
    for (arguments, why) in [
        (&["add", "in", "tcp", "dport", "99999", "drop"][..], "at most 65535"),
        (&["add", "ip", "saddr", "10.0.0.0/8", "ip6", "daddr", "fd00::1", "drop"], "two families"),
        (&["add", "tcp", "dport", "22", "in", "accept"], "rule 1, \"in tcp dport 22 drop\", has the same matches"),
        (&["add", "--before", "7", "in", "drop"], "no rule 7"),
        (&["delete", "9"], "no rule 9"),
        (&["load", file.to_str().expect("a path")], "line 3"),
        (&["load", "/nowhere/rules"], "/nowhere/rules"),
    ] {
        let ran = filter(&bed, arguments);
        assert!(ran.status.code() == Some(2) && text(&ran.stderr).contains(why), "{arguments:?}: {}", text(&ran.stderr));
    }
    assert_eq!(change(&bed, &["list"])["rules"].as_array().map(Vec::len), Some(1));
    let without = hosts(TestbedSettings::default());
    let ran = filter(&without, &["list"]);
    assert!(text(&ran.stderr).contains("started with --filter-key"), "{}", text(&ran.stderr));
}

/// Ports of the compromised host's test: what the rules forbid, and allow.
const FORBIDDEN: u16 = 6666;
const ALLOWED: u16 = 7777;

/// A Perl program that sends raw frames of UDP to the forbidden port: plain, with a VLAN tag, as fragments, and of an
/// EtherType that no rule allows. Its arguments are the index of the interface and the number of rounds.
const RAW_FRAMES: &str = r#"
my ($index, $rounds) = @ARGV;
socket(my $s, 17, 3, 0) or die "packet socket: $!";
my $to = pack("SnlSCCa8", 17, 0, $index, 0, 0, 6, "\x02\0\0\0\0\x0b");
my $macs = "\x02\0\0\0\0\x0b\x02\0\0\0\0\x0a";
my $udp = pack("nnnn", 5, 6666, 28, 0) . ("x" x 20);
my $ip = sub { pack("CCnnnCCna4a4", 0x45, 0, 20 + length $_[1], 7, $_[0], 64, 17, 0, pack("C4", 10,77,0,1), pack("C4", 10,77,0,2)) . $_[1] };
my @frames = (
  $macs . "\x08\0" . $ip->(0, $udp),
  $macs . "\x81\0\0\1\x08\0" . $ip->(0, $udp),
  $macs . "\x08\0" . $ip->(0x2000, substr $udp, 0, 16),
  $macs . "\x08\0" . $ip->(2, substr $udp, 16),
  $macs . "\x88\xb5" . "forbidden" x 6,
  $macs . "\x08\0" . "E",
);
# Waits: so that the rounds take a while.
for (1..$rounds) { send($s, $_, 0, $to) for @frames; select(undef, undef, undef, 0.001); }
"#;

/// Root of the host kills its agent and keeper, sends raw frames, and tries to change the rules. Nothing that the rules
/// forbid reaches the other side, nor this one, before, while and after; what they allow does, whenever there is an
/// agent.
#[test]
fn a_compromised_host_changes_nothing() {
    let rules = ["arp accept", "icmpv6 accept", "udp dport 7777 accept", "drop"];
    let control_point = settings(&rules).control_point.map(|control_point| ControlPoint { contained: true, ..control_point });
    let bed = hosts(TestbedSettings { control_point, ..settings(&rules) });
    let container = bed.container.as_ref().expect("a container");
    let index = bed.host_a.run(|| Ok(rtnetlink::link(&rtnetlink::open()?, "baton0")?.index)).expect("an interface").to_string();
    let root = |script: &str| {
        let ran = container.command("sh").args(["-c", script]).output().expect("a shell on the host");
        (ran.status.success(), text(&ran.stdout), text(&ran.stderr))
    };
    let mut captures = [Capture::of(&bed.host_b, "eth0", true), Capture::of(&bed.host_a, "baton0", true)];
    let over = AtomicBool::new(false);
    let owner = bed.owner.as_ref().expect("an owner").process();
    std::thread::scope(|scope| {
        let _over = SetsAtEnd(&over);
        let over = &over;
        // The other side sends all the time, too: what is forbidden, and what is allowed.
        let outside = bed.host_b.run(|| UdpSocket::bind(SocketAddr::new(address_b(false), 5))).expect("a socket");
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                for port in [FORBIDDEN, ALLOWED] {
                    let _ = outside.send_to(b"?", SocketAddr::new(address_a(false), port));
                }
                // Waits: this sender sends a thousand times a second.
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let mut attacker = container.command("perl");
        let mut attacker = attacker.args(["-e", RAW_FRAMES, &index, "4000"]).spawn().expect("perl on the host");
        for attack in 0..6 {
            expect_datagram(&bed);
            let before = process::children(owner);
            match attack {
                // The agent, then NIC and agent by the connection that the host has, then the NIC from outside.
                0..3 => wait_until("an agent is killed", || root("kill -9 $(pgrep -f [a]gent-process)").0),
                _ => before.iter().for_each(|nic| process::signal(*nic, libc::SIGKILL).expect("the NIC")),
            }
            wait_until("another NIC is started", || process::children(owner) != before);
        }
        expect_datagram(&bed);
        // The host's root sees neither owner nor NIC, has no descriptor of the wire, and no key.
        let (_, processes, _) = root("cat /proc/[0-9]*/cmdline | tr '\\0' ' '");
        assert!(processes.contains("keeper-process") && !processes.contains("nic-"), "{processes}");
        let (done, _, _) = root(&format!("kill -9 {owner}"));
        assert!(!done, "the owner can be killed");
        let baton = env!("CARGO_BIN_EXE_baton");
        let key = "head -c 32 /dev/urandom > /tmp/baton-no-key-$$";
        let socket = bed.filter_socket();
        let flush = format!(
            "{key}; {baton} nic filter flush --socket {} --key /tmp/baton-no-key-$$; c=$?; rm /tmp/baton-no-key-$$; exit $c",
            socket.display()
        );
        let (done, _, error) = root(&flush);
        assert!(!done && error.contains("not yours"), "{error}");
        // Everything on the host is killed: no agent is left, and nothing passes.
        root("kill -9 -1");
        let _ = attacker.wait();
        wait_until("the end of the agent", || !root("pgrep -f [a]gent-process").0);
        let mut last = container.command("perl");
        let status = last.args(["-e", RAW_FRAMES, &index, "100"]).status().expect("perl on the host");
        assert!(status.success());
    });
    let listed = change(&bed, &["list"]);
    let dropped = listed["rules"][3]["packets"].as_u64().expect("a count");
    assert!(dropped > 1000, "the attack never reached the NIC: {listed}");
    for (capture, mac) in captures.iter_mut().zip([baton_bed::testbed::MAC_A, baton_bed::testbed::MAC_B]) {
        let mut allowed = 0;
        let leaked = capture.count(|frame| {
            let datagram = has_port(frame, UDP, ALLOWED);
            allowed += u32::from(datagram && frame[6..12] == mac);
            // ARP, neighbour discovery, and reports of multicast groups, which are ICMPv6 behind hop-by-hop options.
            let upkeep = frame[12..14] == [8, 6] || frame[12..14] == [0x86, 0xdd] && matches!(frame[20], 0 | 58);
            frame[6..12] == mac && !datagram && !upkeep
        });
        assert_eq!(leaked, [0, 0], "frames from {mac:x?} got through");
        assert!(allowed > 0, "the capture of frames from {mac:x?} is blind");
    }
}

/// A host has sent its NIC's owner files that do not close. The next NIC is started without copies of them, which it
/// would have to close first.
#[test]
fn an_owner_starts_a_nic_beside_files_that_do_not_close() {
    let bed = hosts(settings(&[]));
    let Some(file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let agent = bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").agent_process;
    let keeper = process::open_process(process::parent(agent).expect("the keeper")).expect("the keeper");
    // In the wire's place the host has its way to the owner.
    let way = freeze::take_descriptor(keeper.as_fd(), Descriptor::Wire as i32).expect("the way to the owner");
    let way = PeerChannel::from_foreign(way).expect("a control connection");
    let owner = bed.owner.as_ref().expect("an owner").process();
    let before = process::children(owner);
    way.send(&(0u64, ToOwner::End), &[file.fd(); 8]).expect("a request");
    wait_until("another NIC is started", || process::children(owner) != before);
    expect_datagram(&bed);
}

/// Waits until a datagram to the allowed port gets from host A to host B.
fn expect_datagram(bed: &Testbed) {
    let to = SocketAddr::new(address_b(false), ALLOWED);
    let receiver = bind_at_freed(&bed.host_b, "the receiver's port", || UdpSocket::bind(to));
    receiver.set_nonblocking(true).expect("a socket that does not wait");
    let sender = bed.host_a.run(|| UdpSocket::bind(SocketAddr::new(address_a(false), 0))).expect("a socket");
    wait_until("something gets through", || {
        let _ = sender.send_to(b"allowed", to);
        receiver.recv(&mut [0; 16]).is_ok()
    });
}
