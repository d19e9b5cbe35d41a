//! A host with many devices, as one with many containers. At the first move the steering's programs are attached to
//! each, for which the kernel takes some milliseconds a device; nobody but that move waits for it.

use crate::common::{SetsAtEnd, before_others, connect, hosts, scene, session, wait_until};
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::tool::Tool;
use baton_protocol::program::Place;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Pairs of devices besides the bed's own.
const PAIRS: usize = 40;

/// Gives host A devices that could all receive a connection's packets.
fn add_devices(bed: &Testbed) {
    let pair = |at| format!("link add many{at} type veth peer name more{at}\nlink set many{at} up\nlink set more{at} up\n");
    let lines: String = (0..PAIRS).map(pair).collect();
    // Tests of this file run at the same time.
    static FILES: AtomicU32 = AtomicU32::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let file = std::env::temp_dir().join(format!("baton-many-{}-{number}", std::process::id()));
    std::fs::write(&file, lines).expect("a file of commands");
    let ran = bed.host_a.run(|| Command::new("ip").arg("-batch").arg(&file).output());
    let _ = std::fs::remove_file(&file);
    let ran = ran.expect("ip (Debian's package iproute2)");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

/// The longest time that the agent has taken for an answer, until the flag is set.
fn longest_answer(bed: &Testbed, over: &AtomicBool) -> Duration {
    let (mut tool, mut longest) = (bed.tool().expect("an agent"), Duration::ZERO);
    while !over.load(Ordering::Relaxed) {
        let asked = Instant::now();
        tool.connections().expect("an answer");
        tool.statistics().expect("an answer");
        longest = longest.max(asked.elapsed());
    }
    longest
}

/// Whether a thread of the agent is attaching to devices.
fn is_attaching(agent: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{agent}/task")).expect("the agent's threads");
    threads.flatten().any(|thread| std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name == "attach\n"))
}

/// Does what makes the agent attach to many devices. Returns how long that has taken, and the longest time for an
/// answer meanwhile.
fn meanwhile(bed: &Testbed, attach: impl FnOnce()) -> (Duration, Duration) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| before_others(|| longest_answer(bed, &over)));
        let _over = SetsAtEnd(&over);
        let begun = Instant::now();
        attach();
        let taken = begun.elapsed();
        over.store(true, Ordering::Relaxed);
        (taken, asking.join().expect("answers"))
    })
}

fn is_served_meanwhile((taken, longest): (Duration, Duration)) {
    println!("attaching has taken {taken:?}, the longest answer meanwhile {longest:?}");
    assert!(longest * 4 < taken, "attaching has taken {taken:?}, and an answer meanwhile {longest:?}");
}

#[test]
fn others_do_not_wait_for_the_first_move() {
    let bed = hosts(TestbedSettings { beside: true, ..Default::default() });
    add_devices(&bed);
    let (server, _peer) = connect(&bed, false, 8080);
    let mut session = session(&bed);
    let id = session.adopt(OwnedFd::from(server)).expect("adoption");
    is_served_meanwhile(meanwhile(&bed, || session.move_to(id, Place::Nic).expect("a move")));
    assert_eq!(session.place(id), Some(Place::Nic));
}

/// A list says what a connection waits for.
#[test]
fn a_list_says_that_a_connection_waits_for_devices() {
    let bed = hosts(TestbedSettings { beside: true, ..Default::default() });
    add_devices(&bed);
    let (server, _peer) = connect(&bed, false, 8080);
    let mut session = session(&bed);
    let id = session.adopt(OwnedFd::from(server)).expect("adoption");
    let mut tool = bed.tool().expect("an agent");
    let reason = |tool: &mut Tool| tool.connections().expect("a list").remove(0).reason;
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| session.move_to(id, Place::Nic));
        wait_until("it waits", || moved.is_finished() || reason(&mut tool).contains("until the NIC receives at all interfaces"));
        assert!(!moved.is_finished(), "nothing was said");
        moved.join().expect("no panic").expect("a move");
    });
    assert!(!reason(&mut tool).contains("waits"), "it does not wait any more");
}

#[test]
fn nobody_waits_for_devices_that_come_later() {
    let mut scene = scene(TestbedSettings { beside: true, ..Default::default() });
    scene.move_to(Place::Nic);
    let agent = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").agent_process;
    is_served_meanwhile(meanwhile(&scene.bed, || {
        add_devices(&scene.bed);
        wait_until("the agent attaches", || is_attaching(agent));
        wait_until("all are attached to", || !is_attaching(agent));
    }));
    scene.exchange(10_000, Place::Nic);
}
