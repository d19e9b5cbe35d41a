//! A NIC that has not room for all: it says what it has room for, the agent keeps to that, and the busiest connections
//! are there.

use crate::common::{answered, hosts, wait_until};
use crate::full::{ECHO, Program, address, connect, exchange};
use crate::nics::Scene;
use baton_abi::layout::Counter;
use baton_bed::testbed::TestbedSettings;
use baton_client::tool::Tool;
use baton_protocol::program::{Ask, ConnectionInfo, Place, Reply};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

fn beside() -> TestbedSettings {
    TestbedSettings { beside: true, ..TestbedSettings::default() }
}

/// Sets what the NIC has room for.
fn set(scene: &Scene, settings: &[&str]) {
    let done = answered(&scene.bed, |tool: &mut Tool| {
        let Reply::Offloads(mut offloads) = tool.ask(Ask::Offloads { nic: 0 })? else { anyhow::bail!("no settings") };
        settings.iter().for_each(|setting| offloads.set(setting).expect("a setting"));
        tool.ask(Ask::SetOffloads { nic: 0, offloads })
    });
    assert!(matches!(done, Reply::Done), "{done:?}");
}

/// Makes connections that are wanted on the NIC, as far as there is room.
fn connections(bed: TestbedSettings, settings: &[&str], number: usize) -> Scene {
    let mut scene = Scene::on(hosts(bed), None);
    set(&scene, settings);
    for at in 0..number {
        scene.connect(0);
        // It may have to stay; it is wanted there then.
        let _ = scene.session.move_to(scene.pairs[at].id, Place::Nic);
    }
    scene
}

/// Which of the pairs are on the NIC.
fn on_nic(scene: &Scene) -> BTreeSet<usize> {
    let listed = scene.all();
    let is_there = |id| listed.iter().any(|info: &ConnectionInfo| info.connection == id && info.place == Place::Nic);
    (0..scene.pairs.len()).filter(|at| is_there(scene.pairs[*at].id)).collect()
}

/// Loads these pairs until those on the NIC are as expected.
fn load_until(scene: &mut Scene, load: std::ops::Range<usize>, what: &str, holds: impl Fn(&BTreeSet<usize>) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds(&on_nic(scene)) {
        assert!(Instant::now() < deadline, "{what}: not within thirty seconds; {:?}", scene.all());
        for _ in 0..50 {
            if load.clone().map(|at| scene.step(at, 4096)).sum::<usize>() == 0 {
                scene.wait_a_little();
            }
        }
    }
}

fn counter(scene: &Scene, counter: Counter) -> u64 {
    scene.statistics().counters[counter as usize]
}

/// `limit` has room for four.
fn the_busiest_are_there(bed: TestbedSettings, limit: &str) {
    let mut scene = connections(bed, &[limit], 12);
    load_until(&mut scene, 8..12, "the last four are the busiest", |there| *there == (8..12).collect());
    load_until(&mut scene, 2..6, "others are the busiest", |there| *there == (2..6).collect());
    let waits = scene.all().into_iter().filter(|info| info.place == Place::Kernel);
    let reasons: BTreeSet<String> = waits.map(|info| info.reason).collect();
    assert!(reasons.iter().all(|reason| reason.contains("the NIC is full")), "{reasons:?}");
    scene.drain();
    assert_eq!(counter(&scene, Counter::Exceeded), 0);
    let statistics = scene.statistics();
    assert!(statistics.full >= 8 && statistics.colder >= 4, "{statistics:?}");
}

#[test]
fn the_busiest_are_on_a_nic_beside_the_kernel() {
    the_busiest_are_there(beside(), "connections=4");
}

#[test]
fn the_busiest_are_on_an_inline_nic_of_two_workers() {
    the_busiest_are_there(TestbedSettings { workers: 2, ..TestbedSettings::default() }, "pairs=70");
}

/// An unmodified program's connections, of which others become busy than were at first. What they carry in the kernel
/// is counted by the preloaded library.
#[test]
fn an_unmodified_programs_busiest_connections_come() {
    let bed = hosts(beside());
    let socket = bed.socket();
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--eager", "--rule", "established", "--socket"]).arg(&socket);
    command.args(["--", "python3", "-c", ECHO]);
    let _server = Program(bed.host_a.spawn(&mut command).expect("baton run"));
    let at = address(false, 7000);
    crate::lifecycle::wait_for("the server", || connect(&bed, at).is_ok());
    let settings = |tool: &mut Tool| {
        let Reply::Offloads(mut offloads) = tool.ask(Ask::Offloads { nic: 0 })? else { anyhow::bail!("no settings") };
        offloads.set("connections=3").expect("a setting");
        tool.ask(Ask::SetOffloads { nic: 0, offloads })
    };
    assert!(matches!(answered(&bed, settings), Reply::Done));
    let clients: Vec<TcpStream> = (0..9).map(|_| connect(&bed, at).expect("a connection")).collect();
    for busy in [0..3, 5..8] {
        let expected: BTreeSet<String> =
            clients[busy.clone()].iter().map(|client| client.local_addr().expect("its address").to_string()).collect();
        crate::lifecycle::wait_for("the busiest are on the NIC", || {
            // Hardly anything on the others.
            clients.iter().for_each(|mut client| _ = (client.write_all(b"x"), client.read_exact(&mut [0])));
            (0..20).for_each(|_| clients[busy.clone()].iter().for_each(|client| exchange(client, 7)));
            let listed = answered(&bed, Tool::connections);
            let there = listed.into_iter().filter(|info| info.place == Place::Nic).map(|info| info.peer);
            there.collect::<BTreeSet<String>>() == expected
        });
    }
    let counters = answered(&bed, Tool::statistics).counters;
    assert_eq!(counters[Counter::Exceeded as usize], 0);
}

#[test]
fn who_is_there_stays_if_that_is_asked_for() {
    let mut scene = connections(beside(), &["connections=4", "when-full=refuse"], 8);
    assert_eq!(on_nic(&scene), (0..4).collect());
    let began = Instant::now();
    // Waits: that nothing happens shows only after a time in which it would have.
    load_until(&mut scene, 4..8, "the load", |_| began.elapsed() > Duration::from_secs(3));
    assert_eq!(on_nic(&scene), (0..4).collect());
    scene.session.move_to(scene.pairs[1].id, Place::Kernel).expect("a move");
    load_until(&mut scene, 4..6, "one place is free", |there| there.len() == 4 && !there.contains(&1));
    scene.drain();
}

#[test]
fn a_lowered_limit_returns_what_is_too_much() {
    let mut scene = connections(beside(), &[], 10);
    load_until(&mut scene, 6..8, "all are on the NIC", |there| there.len() == 10);
    for (limit, expected) in [("connections=2", 2), ("connections=0", 0), ("connections=7", 7), ("connections=all", 10)] {
        set(&scene, &[limit]);
        load_until(&mut scene, 6..8, limit, |there| there.len() == expected);
        assert!(expected < 2 || on_nic(&scene).is_superset(&(6..8).collect()), "the busiest stay: {:?}", on_nic(&scene));
    }
    scene.drain();
    assert_eq!(counter(&scene, Counter::Exceeded), 0);
}

/// With `when-full=drop` what a lower limit leaves no room for is reset, and what comes later waits in the kernel.
#[test]
fn what_is_too_much_is_dropped_if_that_is_asked_for() {
    let mut scene = connections(beside(), &["when-full=drop"], 6);
    load_until(&mut scene, 4..6, "all are on the NIC", |there| there.len() == 6);
    set(&scene, &["connections=2"]);
    wait_until("four are dropped", || {
        (4..6).for_each(|at| _ = scene.step(at, 4096));
        scene.statistics().dropped == 4
    });
    for at in 0..4 {
        wait_until("a reset", || {
            let got = scene.pairs[at].peer.read(&mut [0]);
            got.is_err_and(|error| error.raw_os_error() == Some(libc::ECONNRESET))
        });
    }
    scene.connect(0);
    let error = scene.session.move_to(scene.pairs[6].id, Place::Nic).expect_err("the NIC is full");
    assert!(error.to_string().contains("the NIC is full"), "{error}");
    let statistics = scene.statistics();
    assert_eq!((statistics.dropped, statistics.colder, statistics.lost), (4, 0, 0));
    assert_eq!(counter(&scene, Counter::Exceeded), 0);
}

#[test]
fn memory_has_a_limit() {
    let mut scene = connections(beside(), &[], 8);
    load_until(&mut scene, 0..8, "all are on the NIC", |there| there.len() == 8);
    set(&scene, &["memory=1M"]);
    load_until(&mut scene, 0..8, "some return", |there| there.len() < 8);
    let mut scene = {
        scene.drain();
        scene
    };
    set(&scene, &["memory=0"]);
    load_until(&mut scene, 0..8, "all return", |there| there.is_empty());
    set(&scene, &["memory=all"]);
    load_until(&mut scene, 0..8, "all are there again", |there| there.len() == 8);
    scene.drain();
    assert_eq!(counter(&scene, Counter::Exceeded), 0);
}

#[test]
fn a_busy_processor_takes_no_more() {
    let mut scene = connections(beside(), &["processor=1"], 2);
    // The first two come before the NIC is busy.
    load_until(&mut scene, 0..2, "the NIC is busy", |_| true);
    while counter(&scene, Counter::TooBusy) == 0 {
        load_until(&mut scene, 0..2, "load", |_| true);
        for _ in 0..200 {
            (0..2).for_each(|at| _ = scene.step(at, 16384));
        }
    }
    scene.drain();
    set(&scene, &["processor=all"]);
    scene.connect(0);
    scene.session.move_to(scene.pairs[2].id, Place::Nic).expect("there is room again");
    assert_eq!(counter(&scene, Counter::Exceeded), 0);
}

#[test]
fn limits_outlive_nic_and_agent() {
    let mut scene = connections(beside(), &["connections=3"], 6);
    for victim in ["nic", "agent"] {
        let statistics = scene.statistics();
        let process = if victim == "nic" { statistics.nic_process } else { statistics.agent_process };
        baton_linux::process::signal(process, 9).expect("a kill");
        // The next one answers.
        load_until(&mut scene, 0..3, victim, |_| true);
        load_until(&mut scene, 0..3, "three are there again", |there| there.len() == 3);
    }
    scene.drain();
    assert_eq!(counter(&scene, Counter::Exceeded), 0);
}
