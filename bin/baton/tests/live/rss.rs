//! Several workers on real devices: the kernel's TAP driver hashes as the NIC does, and connections of the kernel's and
//! of the NIC's go on while the indirection table and the key change.

use crate::common::{Scene, SetsAtEnd, connect, scene};
use baton_abi::layout::Counter;
use baton_backends::VnetDevice;
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_device::{Device, Frame};
use baton_linux::events::{Poller, Trigger};
use baton_linux::interface::{self, TapOptions};
use baton_linux::namespace::Namespace;
use baton_linux::rtnetlink;
use baton_lro::Mode;
use baton_offloads::Offloads;
use baton_protocol::program::Place;
use baton_rss::{BUCKETS, From, Key, NIBBLES, Toeplitz};
use baton_shm::Region;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const QUEUES: usize = 4;

/// A frame of some kind, with all addresses and ports derived from `seed`.
fn frame(kind: usize, seed: u8) -> Vec<u8> {
    let mut frame = vec![0u8; 120];
    frame.iter_mut().enumerate().for_each(|(at, byte)| *byte = seed.wrapping_mul(37).wrapping_add((at * 11) as u8));
    let v4 = |frame: &mut Vec<u8>, protocol: u8, fragment: u16, words: u8| {
        frame[12..15].copy_from_slice(&[8, 0, 0x40 | words]);
        frame[20..22].copy_from_slice(&fragment.to_be_bytes());
        frame[23] = protocol;
    };
    match kind {
        0 => v4(&mut frame, 6, 0x4000, 5),
        1 => v4(&mut frame, 6, 0, 9),
        2 => v4(&mut frame, 6, 0x2000, 5),
        3 => v4(&mut frame, 6, 0x0009, 5),
        4 => v4(&mut frame, 17, 0, 5),
        5..8 => {
            frame[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
            frame[20] = [6, 17, 0][kind - 5];
        }
        8 => frame[12..14].copy_from_slice(&[8, 6]),
        // Cut off in the middle of headers.
        9 => {
            v4(&mut frame, 6, 0, 5);
            frame.truncate(36);
        }
        _ => {
            frame[12..14].copy_from_slice(&[0x86, 0xdd]);
            frame[20] = 6;
            frame.truncate(56);
        }
    }
    frame
}

#[test]
fn the_tap_driver_hashes_as_the_nic_does() {
    let host = Namespace::new().expect("a namespace (root is needed)");
    let cases =
        [(From::Wire, Key::MICROSOFT), (From::Host, Key::SYMMETRIC), (From::Host, Key(std::array::from_fn(|at| at as u8)))];
    // Each has a TAP of its own name: a process that another test starts may keep the last one's descriptors for a
    // moment.
    for (name, (from, key)) in ["rss0", "rss1", "rss2"].into_iter().zip(cases) {
        let registers = baton_steering::rss::registers(4 * (BUCKETS + 16 * NIBBLES)).expect("registers");
        let program = baton_steering::rss::distribute(registers.as_fd(), from).expect("a program that the kernel takes");
        let memory = Region::map_fixed(registers, 4 * (BUCKETS + 16 * NIBBLES)).expect("a mapping");
        let hash = Toeplitz::new(&key);
        let table: Vec<u32> = (0..BUCKETS as u32).map(|bucket| (bucket * bucket + bucket / 7) % QUEUES as u32).collect();
        for (at, word) in table.iter().copied().chain(hash.tables()).enumerate() {
            memory.word32(4 * at).store(word, Ordering::SeqCst);
        }
        let (mut queues, mut sender) = host
            .run(|| {
                let options = TapOptions { multi_queue: true, ..TapOptions::default() };
                let taps: Vec<_> = (0..QUEUES).map(|_| interface::open_tap(name, options)).collect::<std::io::Result<_>>()?;
                interface::set_steering(taps[0].as_fd(), program.as_fd())?;
                let netlink = rtnetlink::open()?;
                let link = rtnetlink::link(&netlink, name)?;
                // No IPv6, so that only the test's frames arrive.
                std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1")?;
                rtnetlink::set_up(&netlink, link.index, None, None)?;
                let sender = VnetDevice::new(interface::open_packet_socket(link.index)?, false);
                Ok::<_, std::io::Error>((taps, sender))
            })
            .expect("a TAP with several queues");
        let poller = Poller::new().expect("a poller");
        queues.iter().enumerate().for_each(|(at, tap)| poller.add(tap.as_fd(), at as u64, Trigger::Readable).expect("epoll"));
        let mut devices: Vec<VnetDevice> = queues.drain(..).map(|tap| VnetDevice::new(tap, false)).collect();
        let mut buffer = Frame::with_capacity(2048);
        let mut used = [0; QUEUES];
        let mut tokens = Vec::new();
        let early = frame(0, 0);
        // Frames that are sent before the kernel has the link up are lost.
        let deadline = Instant::now() + Duration::from_secs(20);
        while tokens.is_empty() {
            assert!(Instant::now() < deadline, "the link does not come up");
            buffer.fill(&early);
            sender.transmit(&mut buffer);
            poller.wait(Some(Duration::from_millis(10)), &mut tokens).expect("epoll");
        }
        for seed in 1..40 {
            for kind in 0..=10 {
                let sent = frame(kind, seed);
                buffer.fill(&sent);
                assert!(sender.transmit(&mut buffer), "kind {kind} was not sent");
                let queue = loop {
                    tokens.clear();
                    poller.wait(Some(Duration::from_millis(200)), &mut tokens).expect("epoll");
                    assert!(Instant::now() < deadline, "kind {kind} never came");
                    let Some(queue) = tokens.first().map(|token| *token as usize) else {
                        // Lost while the link came up.
                        buffer.fill(&sent);
                        sender.transmit(&mut buffer);
                        continue;
                    };
                    assert!(devices[queue].receive(&mut buffer));
                    // Earlier frames may be late.
                    if buffer.bytes()[..20] != sent[..20] {
                        continue;
                    }
                    let wanted = table[usize::from(hash.bucket(&sent, from))];
                    assert_eq!(queue as u32, wanted, "kind {kind}, seed {seed}, {from:?}");
                    break queue;
                };
                assert_eq!(buffer.bytes()[..sent.len()], sent);
                used[queue] += 1;
            }
        }
        assert!(used.iter().all(|count| *count > 20), "{used:?}");
    }
}

/// `baton nic set` on host A's Baton.
fn set(bed: &Testbed, settings: &[&str]) -> std::process::Output {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["nic", "set"]).args(settings).env("BATON_SOCKET", bed.socket());
    command.output().expect("baton")
}

fn goes_on_while_buckets_change_hands(card: bool) {
    // With other offloads for the kernel's connections, so that their state changes hands, too.
    let lro = baton_lro::LroSettings { mode: Mode::Reorder, ..Default::default() };
    let settings = TestbedSettings {
        workers: 3,
        card,
        nic_cores: Vec::new(),
        agent_core: None,
        offloads: Offloads { lro, active_ack: true, ..Offloads::default() },
        ..TestbedSettings::default()
    };
    let Scene { session, id, peer, bed, sent, received } = scene(settings);
    let mut others: Vec<_> = (0..16).map(|at| connect(&bed, false, 9000 + at)).collect();
    for stream in others.iter().flat_map(|(server, client)| [server, client]) {
        stream.set_nonblocking(false).expect("a blocking socket");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (over, changed) = (&over, bed.socket());
        let changes = scope.spawn(move || {
            let mut rounds = 0;
            while !over.load(Ordering::Relaxed) || rounds < 2 {
                for settings in [
                    &["rss-indir=0012", "active-ack=on", "lro=reorder"][..],
                    &["rss-indir=21", "rss-key=symmetric"],
                    &["queues=2", "rss-indir=even"],
                    &["queues=3", "rss-key=random", "rss-indir=1", "active-ack=off"],
                ] {
                    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_baton"));
                    let done = command.args(["nic", "set"]).args(settings).env("BATON_SOCKET", &changed).output().expect("baton");
                    assert!(done.status.success(), "{settings:?}: {}", String::from_utf8_lossy(&done.stderr));
                }
                rounds += 1;
            }
        });
        // The scene ends before the thread of changes does, however this function ends.
        let ends = SetsAtEnd(over);
        let mut scene = Scene { session, id, peer, bed, sent, received };
        let mut buffer = [0; 500];
        for round in 0..30 {
            for (server, client) in &mut others {
                client.write_all(&[round; 500]).expect("a message");
                server.read_exact(&mut buffer).expect("a message");
                assert_eq!(buffer, [round; 500]);
            }
            scene.exchange(300_000, if round % 2 == 0 { Place::Nic } else { Place::Kernel });
        }
        drop(ends);
        changes.join().expect("the changes");
        let statistics = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics");
        let count = |counter: Counter| statistics.counters[counter as usize];
        assert!(count(Counter::Buckets) > 200, "{} buckets changed hands", count(Counter::Buckets));
        assert_eq!((statistics.lost, statistics.failed_moves, count(Counter::Disordered)), (0, 0, 0));
        assert_eq!(count(Counter::BadMessages), 0, "{:?}", statistics.workers);
        let busy = statistics.workers.iter().filter(|worker| worker[Counter::WireReceived as usize] > 10).count();
        assert!(busy > 1, "{:?}", statistics.workers);
    });
}

#[test]
fn buckets_change_hands_with_a_queue_each() {
    goes_on_while_buckets_change_hands(true);
}

#[test]
fn buckets_change_hands_with_one_queue() {
    goes_on_while_buckets_change_hands(false);
}

#[test]
fn missing_workers_are_refused() {
    let bed = crate::common::hosts(TestbedSettings { workers: 2, ..TestbedSettings::default() });
    assert!(set(&bed, &["queues=2", "rss-key=microsoft", "rss-indir=01"]).status.success());
    let refused = set(&bed, &["queues=3"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && text.contains("this NIC has 2"), "{text}");
}
