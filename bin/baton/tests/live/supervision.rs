//! What is wanted on the NIC goes there again after a death, a hang or a refusal; and what counts as a hang.

use crate::common::{connect, hosts, session, wait_until};
use crate::scratch::Scratch;
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::{ConnectionId, Session};
use baton_linux::freeze::Frozen;
use baton_linux::tasks::{self, Activity};
use baton_linux::{process, socket};
use baton_protocol::program::{Ask, ConnectionInfo, Place, Reply, Statistics};
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long something may take on a machine with much else to do.
const PATIENCE: Duration = Duration::from_secs(30);

/// A program with connections that are wanted on the NIC, their peers, and bytes that go there and back on each.
struct Scene {
    session: Session,
    ids: Vec<ConnectionId>,
    peers: Vec<TcpStream>,
    bed: Testbed,
    rounds: u8,
}

impl Scene {
    fn new(settings: TestbedSettings, connections: u16) -> Scene {
        let bed = hosts(settings);
        let mut session = session(&bed);
        let (mut ids, mut peers) = (Vec::new(), Vec::new());
        for at in 0..connections {
            let (server, peer) = connect(&bed, false, 8000 + at);
            ids.push(session.adopt(server.into()).expect("adoption"));
            peers.push(peer);
        }
        Scene { session, ids, peers, bed, rounds: 0 }
    }

    fn on_nic(settings: TestbedSettings, connections: u16) -> Scene {
        let mut scene = Scene::new(settings, connections);
        for id in scene.ids.clone() {
            let deadline = Instant::now() + PATIENCE;
            while let Err(error) = scene.session.move_to(id, Place::Nic) {
                assert!(error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline, "{error}");
            }
        }
        scene
    }

    /// Partial offload: there is a host's TCP.
    fn with_host_tcp() -> Scene {
        let bed = hosts(TestbedSettings::default());
        let mut session = Session::connect_for_fast_path(&bed.socket()).expect("a session");
        let (server, peer) = connect(&bed, false, 8000);
        let ids = vec![session.adopt(server.into()).expect("adoption")];
        session.move_to(ids[0], Place::Nic).expect("a move");
        Scene { session, ids, peers: vec![peer], bed, rounds: 0 }
    }

    fn statistics(&self) -> Statistics {
        crate::common::answered(&self.bed, |tool| tool.statistics())
    }

    fn list(&self) -> Vec<ConnectionInfo> {
        crate::common::answered(&self.bed, |tool| tool.connections())
    }

    /// Sends a byte on each connection there and back.
    fn carry(&mut self) {
        self.rounds = self.rounds.wrapping_add(1);
        let byte = [self.rounds];
        for (id, peer) in self.ids.iter().zip(&self.peers) {
            let deadline = Instant::now() + PATIENCE;
            let mut buffer = [0; 2];
            eventually(deadline, || socket::send(peer.as_fd(), &byte));
            assert_eq!(eventually(deadline, || self.session.receive(*id, &mut buffer)), 1);
            assert_eq!(buffer[0], byte[0]);
            eventually(deadline, || self.session.send(*id, &byte));
            assert_eq!(eventually(deadline, || socket::receive(peer.as_fd(), &mut buffer)), 1);
            assert_eq!(buffer[0], byte[0]);
        }
    }

    /// Goes on with traffic until something holds of the list.
    fn until(&mut self, what: &str, holds: impl Fn(&[ConnectionInfo]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.carry();
            let list = self.list();
            if holds(&list) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {list:#?}");
        }
    }

    fn until_back(&mut self) {
        let all = self.ids.len();
        self.until("all connections on the NIC", |list| places(list) == (0, all));
        self.carry();
    }
}

/// Connections in the kernel and on the NIC.
fn places(list: &[ConnectionInfo]) -> (usize, usize) {
    let on_nic = list.iter().filter(|connection| connection.place == Place::Nic).count();
    (list.len() - on_nic, on_nic)
}

fn eventually(deadline: Instant, mut call: impl FnMut() -> io::Result<usize>) -> usize {
    loop {
        match call() {
            Ok(count) => return count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => panic!("the connection broke: {error}"),
        }
        assert!(Instant::now() < deadline, "nothing comes any more");
        // Waits: between two looks; the deadline is far away.
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn beside() -> TestbedSettings {
    TestbedSettings { beside: true, ..TestbedSettings::default() }
}

#[test]
fn after_the_nics_death_its_connections_go_back_there() {
    for settings in [TestbedSettings::default(), beside()] {
        let mut scene = Scene::on_nic(settings, 8);
        let killed = scene.statistics().nic_process;
        process::signal(killed, libc::SIGKILL).expect("SIGKILL");
        scene.until_back();
        let after = scene.statistics();
        assert_ne!(after.nic_process, killed);
        assert_eq!((after.recovered, after.lost, after.failed_moves), (8, 0, 0));
    }
}

/// Only what is wanted there: what was asked into the kernel stays there.
#[test]
fn after_the_agents_death_the_next_one_puts_back_what_was_on_the_nic() {
    for settings in [TestbedSettings::default(), beside()] {
        let mut scene = Scene::on_nic(settings, 8);
        scene.session.move_to(scene.ids[0], Place::Kernel).expect("a move");
        let killed = scene.statistics().agent_process;
        process::signal(killed, libc::SIGKILL).expect("SIGKILL");
        scene.until("the seven on the NIC", |list| places(list) == (1, 7));
        assert_ne!(scene.statistics().agent_process, killed);
        assert_eq!(scene.session.place(scene.ids[0]), Some(Place::Kernel));
    }
}

/// The NIC has room for two. A third one comes when there is room.
#[test]
fn a_connection_that_was_refused_comes_later() {
    let mut scene = Scene::new(TestbedSettings { slots: 2, ..TestbedSettings::default() }, 3);
    let [first, second, third] = [scene.ids[0], scene.ids[1], scene.ids[2]];
    [first, second].into_iter().for_each(|id| scene.session.move_to(id, Place::Nic).expect("a move"));
    assert_eq!(scene.session.move_to(third, Place::Nic).expect_err("no room").kind(), io::ErrorKind::WouldBlock);
    scene.carry();
    assert_eq!(places(&scene.list()), (1, 2));
    scene.session.move_to(first, Place::Kernel).expect("a move");
    scene.until("the third one on the NIC", |list| places(list) == (1, 2));
    assert_eq!([first, second, third].map(|id| scene.session.place(id)), [Place::Kernel, Place::Nic, Place::Nic].map(Some));
}

/// A NIC that somebody stops for good, with no move under way, is ended, and its connections go on and back.
#[test]
fn a_nic_that_is_stopped_is_ended_and_its_connections_go_back() {
    for settings in [TestbedSettings::default(), beside()] {
        let mut scene = Scene::on_nic(settings, 8);
        let stopped = scene.statistics().nic_process;
        process::signal(stopped, libc::SIGSTOP).expect("SIGSTOP");
        scene.carry();
        scene.until_back();
        let after = scene.statistics();
        assert_ne!(after.nic_process, stopped);
        assert_eq!((after.recovered, after.lost, after.nics[0].hung), (8, 0, 1));
    }
}

/// Partial offload: the second process is watched, too.
#[test]
fn a_hosts_tcp_that_is_stopped_is_ended_and_its_connections_go_back() {
    let mut scene = Scene::with_host_tcp();
    let stopped = scene.statistics().host_tcp_process;
    process::signal(stopped, libc::SIGSTOP).expect("SIGSTOP");
    let deadline = Instant::now() + PATIENCE;
    while scene.statistics().host_tcp_process == stopped {
        assert!(Instant::now() < deadline, "it is not ended");
        // Waits: between two looks; the deadline is far away.
        std::thread::sleep(Duration::from_millis(5));
    }
    scene.until_back();
    assert_eq!(scene.statistics().nics[0].hung, 1);
}

/// Longer than the agent waits for a NIC's answer.
// Waits: nothing is to happen in it, and nothing shows that it does not.
const LONG: Duration = Duration::from_millis(2500);

/// A debugger holds the NIC while a move waits for its answer: it goes on as before, and so does the move.
#[test]
fn a_nic_that_is_traced_is_not_ended() {
    let mut scene = Scene::on_nic(TestbedSettings::default(), 2);
    let before = scene.statistics();
    let (session, connection) = (scene.session.number(), scene.ids[1]);
    let debugger = Frozen::freeze(&[before.nic_process]).expect("a tracer");
    let mut tool = scene.bed.tool().expect("a tool");
    let tag = tool.send(Ask::MoveAny { session, connection, to: Place::Kernel, nic: None }).expect("a request");
    // Waits: see LONG.
    std::thread::sleep(LONG);
    assert_eq!(scene.statistics().nic_process, before.nic_process);
    drop(debugger);
    let answer = tool.receive().expect("an answer");
    assert!(answer.tag == tag && matches!(answer.body, Reply::Done), "{answer:?}");
    scene.carry();
    let after = scene.statistics();
    assert_eq!((after.nic_process, after.nics[0].hung, after.recovered), (before.nic_process, 0, 0));
    assert_eq!(places(&scene.list()), (1, 1));
}

/// A process that gets a millisecond of each second, until this goes: its control group has no more. A program that
/// uses up a processor would keep the tests beside this one from it, too.
struct Throttled {
    process: u32,
    scratch: Scratch,
}

impl Throttled {
    fn new(process: u32) -> Throttled {
        let throttled = Throttled { process, scratch: Scratch::new("throttled") };
        let mount = |words: &[&str]| {
            let mut command = Command::new("mount");
            command.args(["-t", words[0]]).args(&words[1..]).arg("none").arg(throttled.mount());
            command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
        };
        std::fs::create_dir(throttled.mount()).expect("a directory");
        let old = mount(&["cgroup", "-o", "cpu"]);
        assert!(old || mount(&["cgroup2"]), "no control groups");
        let write = |path: PathBuf, text: &str| std::fs::write(&path, text).unwrap_or_else(|why| panic!("{path:?}: {why}"));
        if !old {
            write(throttled.mount().join("cgroup.subtree_control"), "+cpu");
        }
        let group = throttled.group();
        std::fs::create_dir(&group).expect("a control group");
        if old {
            write(group.join("cpu.cfs_period_us"), "1000000");
            write(group.join("cpu.cfs_quota_us"), "1000");
        } else {
            write(group.join("cpu.max"), "1000 1000000");
        }
        write(group.join("cgroup.procs"), &process.to_string());
        throttled
    }

    fn mount(&self) -> PathBuf {
        self.scratch.0.join("groups")
    }

    fn group(&self) -> PathBuf {
        self.mount().join(format!("baton-test-{}", self.process))
    }
}

impl Drop for Throttled {
    fn drop(&mut self) {
        let _ = std::fs::write(self.mount().join("cgroup.procs"), self.process.to_string());
        let _ = std::fs::remove_dir(self.group());
        let _ = Command::new("umount").arg(self.mount()).status();
    }
}

/// The NIC has work, and hardly gets a processor. That is counted.
#[test]
fn a_nic_that_gets_no_processor_is_counted_and_not_ended() {
    let mut scene = Scene::on_nic(TestbedSettings::default(), 2);
    let before = scene.statistics();
    let throttled = Throttled::new(before.nic_process);
    let begun = Instant::now();
    let (session, connection) = (scene.session.number(), scene.ids[1]);
    let mut to = Place::Kernel;
    while begun.elapsed() < LONG || scene.statistics().nics[0].starved == 0 {
        assert!(begun.elapsed() < PATIENCE, "it is never starved");
        let mut tool = scene.bed.tool().expect("a tool");
        tool.send(Ask::MoveAny { session, connection, to, nic: None }).expect("a request");
        to = if to == Place::Kernel { Place::Nic } else { Place::Kernel };
        // Waits: between two requests; the loop ends when the NIC was seen starved.
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(throttled);
    scene.carry();
    let after = scene.statistics();
    assert_eq!((after.nic_process, after.nics[0].hung, after.recovered), (before.nic_process, 0, 0));
}

/// The NIC crashes whenever one of four connections is there. That one stays in the kernel, with the reason in the
/// list; the others go on on the NIC.
#[test]
fn a_connection_that_kills_the_nic_stays_in_the_kernel() {
    let mut scene = Scene::on_nic(TestbedSettings::default(), 4);
    let deadline = Instant::now() + 2 * PATIENCE;
    loop {
        let nic = scene.statistics().nic_process;
        let list = scene.list();
        let poison = list.iter().find(|info| info.connection == scene.ids[0]).expect("it is listed");
        if poison.place == Place::Nic {
            // Already dead if it is not the one that had it.
            let _ = process::signal(nic, libc::SIGSEGV);
        } else if poison.reason.contains("died each time") && places(&list) == (1, 3) {
            break;
        }
        assert!(Instant::now() < deadline, "{list:#?}");
        scene.carry();
    }
    let refused = scene.session.move_to(scene.ids[0], Place::Nic).expect_err("it stays");
    assert!(refused.to_string().contains("died each time"), "{refused}");
    assert_eq!(scene.statistics().lost, 0);
    // The next agent knows.
    process::signal(scene.statistics().agent_process, libc::SIGKILL).expect("SIGKILL");
    scene.until("the others on the NIC", |list| places(list) == (1, 3));
    assert_eq!(scene.session.place(scene.ids[0]), Some(Place::Kernel));
}

/// The keeper lets an agent go on that somebody has stopped for good, and with it the NIC and the host's TCP, which
/// nobody else would end meanwhile. Nothing is ended.
#[test]
fn an_agent_that_is_stopped_goes_on_with_all_that_is_stopped_with_it() {
    for (settings, fast_path) in [(beside(), false), (TestbedSettings::default(), true)] {
        let mut scene = if fast_path { Scene::with_host_tcp() } else { Scene::on_nic(settings, 2) };
        let before = scene.statistics();
        let [agent, nic, host_tcp] = [before.agent_process, before.nic_process, before.host_tcp_process];
        assert_eq!(host_tcp != 0, fast_path);
        let sets = [vec![agent], vec![agent, nic], vec![agent, host_tcp], vec![agent, nic, host_tcp]];
        for set in sets.iter().filter(|set| !set.contains(&0)) {
            set.iter().for_each(|one| process::signal(*one, libc::SIGSTOP).expect("SIGSTOP"));
            scene.carry();
            wait_until("none is stopped any more", || set.iter().all(|one| tasks::activity(*one, *one) != Activity::Stopped));
            let after = scene.statistics();
            assert_eq!([after.agent_process, after.nic_process, after.host_tcp_process], [agent, nic, host_tcp]);
            assert_eq!((after.nics[0].hung, after.recovered), (0, 0));
        }
    }
}

/// The keeper ends an agent that somebody stops again and again; the next one puts back what was on the NIC.
#[test]
fn an_agent_that_is_kept_stopped_is_ended() {
    let mut scene = Scene::on_nic(TestbedSettings::default(), 2);
    let stopped = scene.statistics().agent_process;
    let deadline = Instant::now() + PATIENCE;
    // It has ended when its number is nobody's.
    while process::signal(stopped, libc::SIGSTOP).is_ok() {
        assert!(Instant::now() < deadline, "it is not ended");
        // Waits: shorter than the keeper takes from one look at it to the next.
        std::thread::sleep(Duration::from_millis(1));
    }
    scene.until_back();
    assert_ne!(scene.statistics().agent_process, stopped);
}

/// Agent and NIC stand still together for a second, as when somebody stops all of Baton: nobody is ended.
#[test]
fn agent_and_nic_that_are_stopped_together_for_a_second_are_not_ended() {
    let mut scene = Scene::on_nic(TestbedSettings::default(), 2);
    let before = scene.statistics();
    for _ in 0..3 {
        let both = [before.agent_process, before.nic_process];
        both.iter().for_each(|one| process::signal(*one, libc::SIGSTOP).expect("SIGSTOP"));
        // Waits: both processes are stopped for as long; a busy machine makes it longer, which ends nothing either.
        std::thread::sleep(Duration::from_secs(1));
        both.iter().rev().for_each(|one| process::signal(*one, libc::SIGCONT).expect("SIGCONT"));
        scene.carry();
    }
    let after = scene.statistics();
    assert_eq!((after.agent_process, after.nic_process), (before.agent_process, before.nic_process));
    assert_eq!((after.nics[0].hung, after.recovered), (0, 0));
}

/// The kernel deals out the processors among sessions first: agent and NIC have one each, as urgent as they are.
#[test]
fn agent_and_nic_are_urgent_among_sessions() {
    if !std::path::Path::new("/proc/self/autogroup").exists() {
        eprintln!("skipped: this kernel has no autogroups");
        assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
        return;
    }
    let bed = hosts(TestbedSettings::default());
    let statistics = bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics");
    let group = |process: u32| std::fs::read_to_string(format!("/proc/{process}/autogroup")).expect("its group");
    let groups = [std::process::id(), statistics.agent_process, statistics.nic_process].map(group);
    // A session as old as the machine, as that of a machine's init, has no group and so says nothing.
    let [ours, agent, nic] = groups.each_ref().map(|text| text.split_once(" nice ").unwrap_or(("", "0")));
    assert!(ours.0 != agent.0 && ours.0 != nic.0 && agent.0 != nic.0, "{groups:?}");
    let nice = |text: &str| text.trim().parse::<i32>().expect("a nice value");
    assert_eq!(nice(agent.1), -15, "{groups:?}");
    assert!(nice(nic.1) < nice(ours.1), "{groups:?}");
}
