//! Large frames beside the kernel, whose payload goes between a packet socket and session memory without a copy of the
//! NIC's.

use crate::common::{Scene, hosts, later, scene_at, scene_in};
use baton_abi::layout::Counter;
use baton_bed::testbed::{INTERFACE_B, TestbedSettings, counter};
use baton_client::{ConnectionId, Session};
use baton_linux::socket;
use baton_protocol::program::Place;
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of a transfer: many times those of receive and send memory.
const TRANSFER: u64 = 16 << 20;
/// Payload of a segment.
const SEGMENT: u64 = 1448;

/// Runs a transfer in one direction to its end. `send` and `receive` return the bytes that they could send and receive.
fn transfer(scene: &mut Scene, send: fn(&mut Scene, usize) -> usize, receive: fn(&mut Scene) -> usize) {
    let (mut to_send, mut to_receive) = (TRANSFER, TRANSFER);
    let (mut ready, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
    while to_receive > 0 {
        assert!(Instant::now() < deadline, "{to_receive} bytes have not come");
        let sent = send(scene, to_send.min(1 << 17) as usize) as u64;
        let received = receive(scene) as u64;
        (to_send, to_receive) = (to_send - sent, to_receive - received);
        if sent + received == 0 {
            scene.session.poll(Some(Duration::from_millis(1)), &mut ready).expect("poll");
        }
    }
}

#[test]
fn bulk_data_passes_in_large_frames_beside_the_kernel() {
    for ipv6 in [false, true] {
        let mut scene = scene_at(TestbedSettings { beside: true, ..TestbedSettings::default() }, ipv6, 8080);
        // Others send smaller frames to pace what they send.
        socket::set_bytes(scene.peer.as_fd(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").expect("reno");
        scene.move_to(Place::Nic);
        for (send, receive, counter) in [
            (
                Scene::peer_sends as fn(&mut Scene, usize) -> usize,
                Scene::receive as fn(&mut Scene) -> usize,
                Counter::WireReceived,
            ),
            (Scene::send, Scene::peer_receives, Counter::WireSent),
        ] {
            let mut tool = scene.bed.tool().expect("the agent");
            let mut frames = || tool.statistics().expect("statistics").counters[counter as usize];
            let before = frames();
            transfer(&mut scene, send, receive);
            let frames = frames() - before;
            assert!(frames < TRANSFER / SEGMENT / 3, "{frames} frames ({counter:?}, IPv6: {ipv6})");
        }
        for to in [Place::Kernel, Place::Nic, Place::Kernel, Place::Nic] {
            scene.exchange(1 << 20, to);
        }
    }
}

/// Bytes that a call sends or receives in a raw transfer, and such transfers one after the other.
const PIECE: usize = 1 << 19;
const RAW: usize = 5;

/// A transfer from the peer whose bytes nobody makes and checks, which would take longer than all else. The peer sends
/// from a thread of its own.
fn pour(session: &mut Session, id: ConnectionId, peer: &TcpStream) -> Duration {
    let (mut buffer, mut ready, mut left) = (vec![0u8; PIECE], Vec::new(), TRANSFER as usize);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (piece, mut peer) = (vec![7u8; PIECE], peer);
            (0..TRANSFER as usize / PIECE).for_each(|_| peer.write_all(&piece).expect("the peer sends"));
        });
        while left > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{left} bytes have not come");
            let received = later(session.receive(id, &mut buffer));
            left -= received;
            if received == 0 {
                session.poll(Some(Duration::from_secs(5)), &mut ready).expect("poll");
            }
        }
    });
    begun.elapsed()
}

/// What the NIC has done so far: frames received and sent, doorbells rung, microseconds of work, and page faults: pages
/// that it has touched for the first time.
fn work(scene: &Scene) -> [u64; 5] {
    let statistics = scene.bed.tool().expect("the agent").statistics().expect("statistics");
    let count = |counter: Counter| statistics.counters[counter as usize];
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", statistics.nic_process)).expect("the NIC's process");
    // Behind the name, the eighth number: faults that needed no disk.
    let pages: u64 = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(7)?.parse().ok()).expect("a number");
    let busy = count(Counter::BusyNanoseconds) / 1000;
    [count(Counter::WireReceived), count(Counter::WireSent), count(Counter::Doorbells), busy, pages]
}

/// For how long the peer has waited so far: for the other end's window, and for its own send buffer. The kernel counts
/// its ticks, 4 ms or less.
fn waited(peer: &TcpStream) -> [u64; 2] {
    let mut raw = [0u8; 192];
    let length = socket::get_bytes(peer.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut raw).expect("TCP_INFO");
    assert_eq!(length, raw.len(), "Linux before 4.10");
    // tcpi_rwnd_limited, tcpi_sndbuf_limited.
    [176_usize, 184].map(|at| u64::from_ne_bytes(std::array::from_fn(|byte| raw[at + byte])))
}

/// Prints how long raw transfers take in the kernel and on the NIC, one after the other in each place, and where the
/// time goes. It judges nothing: natively each byte is copied twice, here three times, by two ends and a NIC that may
/// have fewer processors than they are. The first transfer pays for the pages of fresh receive memory.
fn measure(scene: &mut Scene, what: &str) {
    scene.peer.set_nonblocking(false).expect("blocking");
    scene.peer.set_write_timeout(Some(Duration::from_secs(60))).expect("a limit");
    let mut fastest = [Duration::MAX; 2];
    for (place, fastest) in [Place::Kernel, Place::Nic].into_iter().zip(&mut fastest) {
        scene.move_to(place);
        let before = (work(scene), waited(&scene.peer));
        let Scene { session, id, peer, .. } = &mut *scene;
        let times: [Duration; RAW] = std::array::from_fn(|_| pour(session, *id, peer));
        *fastest = times.into_iter().fold(*fastest, Duration::min);
        let after = (work(scene), waited(&scene.peer));
        let [frames, acks, doorbells, busy, pages]: [u64; 5] = std::array::from_fn(|at| after.0[at] - before.0[at]);
        let [window, buffer]: [u64; 2] = std::array::from_fn(|at| after.1[at] - before.1[at]);
        eprintln!("raw, {what}, {place:?}: {times:?}; the peer waited {window} us for the window, {buffer} us for its buffer");
        eprintln!("  NIC: {frames} frames in, {acks} out, {doorbells} doorbells, {busy} us of work, {pages} pages");
    }
    let [natively, here] = fastest.map(|time| time.as_secs_f64());
    eprintln!("raw, {what}: {:.2} of the kernel's rate ({here:.4} s, natively {natively:.4} s)", natively / here);
    scene.peer.set_nonblocking(true).expect("non-blocking");
}

/// Sets the largest sends of a network device, of IPv6 and of IPv4, in bytes (RTM_NEWLINK: older versions of `ip` do
/// not know them all).
const BIG_TCP: &str = "
import socket, struct, sys
attributes = b''.join(struct.pack('=HHI', 8, kind, int(sys.argv[2])) for kind in (41, 58, 63, 64))
index = socket.if_nametoindex(sys.argv[1])
body = struct.pack('=BxHiII', 0, 0, index, 0, 0) + attributes
netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
netlink.send(struct.pack('=IHHII', 16 + len(body), 16, 5, 1, 0) + body)
error = struct.unpack_from('=i', netlink.recv(4096), 16)[0]
sys.exit(error and f'error {-error}')
";

/// BIG TCP: a peer that sends frames of up to 200 or 512 KB, without a length field large enough for that. They are not
/// lost, and connections move while they come: they are mirrored, held and replayed like any other. The next data of a
/// connection is received in one piece, however long it is. How fast that is without all else is printed.
#[test]
fn frames_of_more_than_64_kb_are_received() {
    for ipv6 in [true, false] {
        for most in ["200000", "524280"] {
            let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
            // A socket learns it when it is connected.
            let mut set = Command::new("python3");
            set.args(["-c", BIG_TCP, INTERFACE_B, most]);
            let set = bed.host_b.spawn(&mut set).and_then(|mut set| set.wait()).expect("python3");
            assert!(set.success(), "the device takes no frames of {most} bytes (Linux 6.3 is needed)");
            let mut scene = scene_in(bed, ipv6, 8080);
            socket::set_bytes(scene.peer.as_fd(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").expect("reno");
            let begun = Instant::now();
            transfer(&mut scene, Scene::peer_sends, Scene::receive);
            let natively = begun.elapsed();
            scene.move_to(Place::Nic);
            // Without loss probes: a busy machine's answer may come late (RFC 8985 section 7), and later than a
            // time-out now and then.
            let again = |scene: &Scene| {
                let probes = counter(&scene.bed.host_b, "netstat", "TcpExt:", "TCPLossProbes").expect("a counter");
                counter(&scene.bed.host_b, "snmp", "Tcp:", "RetransSegs").expect("a counter").saturating_sub(probes)
            };
            let sent = |scene: &Scene| {
                let read = || std::fs::read_to_string("/proc/thread-self/net/dev");
                let devices = scene.bed.host_b.run(read).expect("the devices");
                let line = devices.lines().find_map(|line| line.trim().strip_prefix(&format!("{INTERFACE_B}:")));
                // Behind eight columns of what was received: bytes, packets.
                let packets = line.and_then(|line| line.split_whitespace().nth(9)).and_then(|text| text.parse::<u64>().ok());
                packets.expect("a number")
            };
            let mut tool = scene.bed.tool().expect("the agent");
            let mut received = || tool.statistics().expect("statistics").counters[Counter::WireReceived as usize];
            let before = (again(&scene), sent(&scene), received());
            let begun = Instant::now();
            transfer(&mut scene, Scene::peer_sends, Scene::receive);
            let took = begun.elapsed();
            let (frames, parts) = (sent(&scene) - before.1, received() - before.2);
            let what = format!("IPv6: {ipv6}, {most}");
            eprintln!("{what}: {frames} frames in {parts} parts, {took:?}, natively {natively:?}");
            // Waits: what is lost and sent again after time-outs, and split, takes a hundred times as long; a machine
            // that runs other tests, too, a few times as long.
            assert!(took < 10 * natively + Duration::from_secs(2), "{what}: {took:?}, natively {natively:?}");
            assert!(frames < TRANSFER >> 16, "{what}: {frames} frames: the peer sends no large ones");
            // Those that come while the connection's memory grows are held in parts, up to nine of a frame. If all
            // were, there would be a part for each 64 KB at least.
            let whole = parts < (frames + (TRANSFER >> 16)) / 2;
            assert!(whole, "{what}: {frames} frames were received in {parts} parts");
            let again = again(&scene) - before.0;
            assert!(again < frames / 10, "{what}: of {frames} frames {again} segments were sent again");
            for to in [Place::Kernel, Place::Nic, Place::Kernel, Place::Nic] {
                scene.exchange(4 << 20, to);
            }
            measure(&mut scene, &what);
        }
    }
}
