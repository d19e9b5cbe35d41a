//! Large frames beside the kernel, whose payload goes between a packet socket and session memory without a copy of the
//! NIC's.

use crate::common::{Scene, hosts, scene_at, scene_in};
use baton_abi::layout::Counter;
use baton_bed::testbed::{INTERFACE_B, TestbedSettings, counter};
use baton_linux::socket;
use baton_protocol::program::Place;
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

/// BIG TCP: a peer that sends frames of up to 200 or 512 KB, without a length field that could tell it. They are not
/// lost, and connections move while they come: they are mirrored, held and replayed like any other.
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
            eprintln!("IPv6: {ipv6}, {most}: {frames} frames in {parts} parts, {took:?}, natively {natively:?}");
            // Waits: what is lost and sent again after time-outs, and split, takes a hundred times as long; a machine
            // that runs other tests, too, a few times as long.
            assert!(took < 10 * natively + Duration::from_secs(2), "IPv6: {ipv6}, {most}: {took:?}, natively {natively:?}");
            assert!(parts > frames, "{frames} frames in {parts} parts: the peer sends no large ones");
            let again = again(&scene) - before.0;
            assert!(again < frames / 10, "IPv6: {ipv6}, {most}: of {frames} frames {again} segments were sent again");
            for to in [Place::Kernel, Place::Nic, Place::Kernel, Place::Nic] {
                scene.exchange(4 << 20, to);
            }
        }
    }
}
