//! Memory of connections on the NIC grows with what their paths hold, as the kernel's would.

use crate::common::{Scene, scene, scene_at};
use baton_agent::{Crash, Fault, Step};
use baton_bed::testbed::TestbedSettings;
use baton_handoff::send_buffer::queue_limit;
use baton_linux::socket;
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::Place;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// A test bed with a round trip of 20 ms.
fn long_path() -> TestbedSettings {
    let link = LinkSettings { delay: 10_000, ..LinkSettings::default() };
    TestbedSettings { link, peer_queue: Some(10_000), ..TestbedSettings::default() }
}

/// Sends this many bytes both ways, and checks each one.
fn transfer(scene: &mut Scene, bytes: u64) {
    let goal = [scene.sent[0] + bytes, scene.sent[1] + bytes];
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut ready = Vec::new();
    while scene.received[1] < goal[0] || scene.received[0] < goal[1] {
        assert!(Instant::now() < deadline, "stuck: sent {:?}, received {:?}", scene.sent, scene.received);
        let mut done = 0;
        if scene.sent[0] < goal[0] {
            done += scene.send((goal[0] - scene.sent[0]).min(1 << 16) as usize);
        }
        if scene.sent[1] < goal[1] {
            done += scene.peer_sends((goal[1] - scene.sent[1]).min(1 << 16) as usize);
        }
        done += scene.receive() + scene.peer_receives();
        if done == 0 {
            scene.session.poll(Some(Duration::from_millis(1)), &mut ready).expect("poll");
        }
    }
}

/// Bytes that the program's receive and send memory take while neither side reads.
fn memory(scene: &mut Scene) -> [u64; 2] {
    scene.fill(48 << 20);
    let queue = |request| u64::from(socket::queue_bytes(scene.peer.as_fd(), request).expect("a queue's bytes"));
    let received = scene.sent[1] - scene.received[0] - queue(socket::SIOCOUTQ);
    let sent = scene.sent[0] - scene.received[1] - queue(socket::SIOCINQ);
    [received, sent]
}

#[test]
fn windows_grow_with_the_path() {
    for ipv6 in [false, true] {
        let mut scene = scene_at(long_path(), ipv6, 8080);
        scene.move_to(Place::Nic);
        let mut taken = [0; 2];
        // Waits: until they have grown. Each transfer lets them grow further: on a busy machine round trips vary, and
        // the congestion window grows later.
        for _ in 0..10 {
            transfer(&mut scene, 20 << 20);
            assert_eq!(scene.settled_place(), Some(Place::Nic));
            taken = memory(&mut scene);
            scene.drain();
            if taken.iter().all(|bytes| *bytes > 900 << 10) {
                break;
            }
        }
        assert!(taken.iter().all(|bytes| *bytes > 900 << 10), "receive and send memory take {taken:?} bytes");
        scene.exchange(300_000, Place::Kernel);
        scene.exchange(300_000, Place::Nic);
    }
}

/// On a short path the first window is that of the kernel, and it grows only if peer and program wait for each other,
/// and not as far as on a long one.
#[test]
fn a_short_path_needs_less() {
    let first_window = |place| {
        let mut scene = scene(TestbedSettings::default());
        scene.move_to(place);
        let [received, _] = memory(&mut scene);
        (scene, received)
    };
    // The kernel's varies with how much each of its buffers holds.
    let in_kernel = [(); 3].map(|()| first_window(Place::Kernel).1);
    let (mut scene, on_nic) = first_window(Place::Nic);
    let ratios = in_kernel.map(|bytes| on_nic as f64 / bytes as f64);
    let similar = ratios.iter().any(|ratio| *ratio >= 0.9) && ratios.iter().any(|ratio| *ratio <= 1.1);
    assert!(similar, "{on_nic} bytes are received on the NIC, and {in_kernel:?} in the kernel");
    scene.drain();
    transfer(&mut scene, 20 << 20);
    let memory = memory(&mut scene);
    assert!((on_nic / 2..=1 << 21).contains(&memory[0]), "receive memory takes {memory:?} bytes");
    scene.drain();
}

/// Sizes that the program has set with SO_RCVBUF and SO_SNDBUF stay, as in the kernel.
#[test]
fn buffers_that_the_program_has_set_do_not_grow() {
    let mut scene = scene(long_path());
    for option in [libc::SO_RCVBUF, libc::SO_SNDBUF] {
        scene.session.set_option(scene.id, libc::SOL_SOCKET, option, 150_000).expect("a buffer");
    }
    scene.move_to(Place::Nic);
    transfer(&mut scene, 4 << 20);
    let memory = memory(&mut scene);
    assert!(memory.iter().all(|bytes| *bytes <= 1 << 19), "receive and send memory take {memory:?} bytes");
    scene.drain();
}

/// SO_SNDBUF on a connection that the NIC has limits what the program may queue at once, about as in the kernel, and no
/// longer does when it is set to more, there or in the kernel.
#[test]
fn a_send_buffer_set_on_the_nic_limits_what_is_queued() {
    let mut scene = scene(TestbedSettings::default());
    let set = |scene: &mut Scene, bytes| {
        scene.session.set_option(scene.id, libc::SOL_SOCKET, libc::SO_SNDBUF, bytes).expect("a send buffer");
        let set = scene.session.option(scene.id, libc::SOL_SOCKET, libc::SO_SNDBUF).expect("its size");
        u64::try_from(set).expect("a size")
    };
    // So that the peer's queue is soon full.
    socket::set(scene.peer.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, 20_000).expect("a small receive buffer");
    scene.move_to(Place::Nic);
    for bytes in [4096, 20_000] {
        let most = set(&mut scene, bytes);
        for place in [Place::Nic, Place::Kernel, Place::Nic] {
            scene.move_to(place);
            let queued = memory(&mut scene)[1];
            let most = u64::from(queue_limit(most as u32).next_multiple_of(1024));
            assert!(place == Place::Kernel || queued <= most, "{queued} bytes are queued, and {most} may be");
            scene.drain();
            transfer(&mut scene, 200_000);
        }
    }
    scene.move_to(Place::Kernel);
    set(&mut scene, 100_000);
    scene.move_to(Place::Nic);
    let queued = memory(&mut scene)[1];
    assert!(queued > 60_000, "{queued} bytes are queued");
    scene.exchange(300_000, Place::Kernel);
}

/// Bytes of session memory that have pages. The agent of the scene has one session.
fn session_bytes(scene: &Scene) -> u64 {
    let agent = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").agent_process;
    let descriptors = std::fs::read_dir(format!("/proc/{agent}/fd")).expect("the agent's descriptors");
    let is_session = |path: &Path| std::fs::read_link(path).is_ok_and(|name| name.to_string_lossy().contains("baton-session"));
    let mut paths = descriptors.flatten().map(|entry| entry.path());
    let path = paths.find(|path| is_session(path)).expect("the session's memory");
    std::fs::metadata(path).expect("its size").blocks() * 512
}

/// Waits until the session's memory has no more pages than these bytes.
fn pages_return(scene: &mut Scene, few: u64) {
    let used = session_bytes(scene);
    let deadline = Instant::now() + Duration::from_secs(20);
    while session_bytes(scene) > few {
        assert!(Instant::now() < deadline, "of {used} bytes {} are left, not {few}", session_bytes(scene));
        scene.session.poll(Some(Duration::from_millis(50)), &mut Vec::new()).expect("poll");
    }
}

/// The pages of an idle connection's memory go back to the system, also of memory that it has outgrown; the connection
/// goes on.
#[test]
fn an_idle_connection_returns_its_pages() {
    for settings in [TestbedSettings::default(), long_path()] {
        let mut scene = scene(settings);
        scene.move_to(Place::Nic);
        // Rings and the like take a few pages more as they are used.
        let few = session_bytes(&scene) + (160 << 10);
        for _ in 0..2 {
            transfer(&mut scene, 4 << 20);
            pages_return(&mut scene, few);
        }
        scene.exchange(300_000, Place::Kernel);
        scene.exchange(300_000, Place::Nic);
    }
}

/// So do the pages of a connection that has left the NIC.
#[test]
fn a_connection_that_leaves_returns_its_pages() {
    let mut scene = scene(TestbedSettings::default());
    let few = session_bytes(&scene) + (160 << 10);
    for _ in 0..2 {
        scene.move_to(Place::Nic);
        transfer(&mut scene, 4 << 20);
        scene.move_to(Place::Kernel);
        pages_return(&mut scene, few);
    }
    scene.exchange(300_000, Place::Nic);
}

/// The NIC or the agent dies when the bytes have been copied and the connection has not gone on yet: no byte is lost.
#[test]
fn deaths_while_memory_grows_lose_nothing() {
    for agent in [false, true] {
        let crash = Some(Crash { after: Step::Grown, fault: if agent { Fault::AgentDies } else { Fault::NicDies } });
        let mut scene = scene(TestbedSettings { crash, ..long_path() });
        scene.move_to(Place::Nic);
        let before = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics");
        transfer(&mut scene, 8 << 20);
        let after = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics");
        assert_ne!((after.nic_process, after.agent_process), (before.nic_process, before.agent_process), "nobody died");
        assert_eq!((after.agent_process != before.agent_process, after.lost), (agent, 0));
        // It goes back, and grows again.
        assert!(after.recovered >= 1);
        scene.exchange(300_000, Place::Nic);
        transfer(&mut scene, 4 << 20);
    }
}
