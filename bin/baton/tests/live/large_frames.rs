//! Large frames beside the kernel, whose payload goes between a packet socket and session memory without a copy of the NIC's.

use crate::common::{Scene, scene_at};
use baton_abi::layout::Counter;
use baton_lab::testbed::TestbedSettings;
use baton_linux::socket;
use baton_protocol::program::Place;
use std::os::fd::AsFd;
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
