//! The rule `hot`: a connection is on the NIC while it carries much, whatever room there is.

use crate::attach::{Killed, attach, listed};
use crate::common::{answered, hosts, wait_until};
use crate::full::{ECHO, Program, address, connect};
use crate::scratch::{Scratch, script, text};
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::tool::Tool;
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_protocol::program::{Ask, ConnectionInfo, Place, Reply};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Sends bytes to a server that echoes, and receives them.
fn echo(mut client: &TcpStream, bytes: usize) {
    client.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    client.write_all(&vec![b'x'; bytes]).expect("sent");
    let mut echoed = vec![0; bytes];
    client.read_exact(&mut echoed).expect("the echo");
    assert!(echoed.iter().all(|byte| *byte == b'x'));
}

/// Much over some of these connections, hardly anything over the others.
fn exchange(clients: &[TcpStream], busy: &Range<usize>) {
    clients.iter().for_each(|client| echo(client, 1));
    (0..20).for_each(|_| clients[busy.clone()].iter().for_each(|client| echo(client, 4096)));
}

/// What is listed about these connections, in their order, if all of them are.
fn infos(clients: &[TcpStream], listed: Vec<ConnectionInfo>) -> Option<Vec<ConnectionInfo>> {
    let mut by_peer: BTreeMap<String, ConnectionInfo> = listed.into_iter().map(|info| (info.peer.clone(), info)).collect();
    let local = |client: &TcpStream| client.local_addr().expect("its address").to_string();
    clients.iter().map(|client| by_peer.remove(&local(client))).collect()
}

/// Whether those of this range are on the NIC, and the others wait until they are hot enough.
fn are_there(infos: &[ConnectionInfo], hot: &Range<usize>) -> bool {
    infos.iter().enumerate().all(|(at, info)| match info.place {
        Place::Nic => hot.contains(&at),
        Place::Kernel => !hot.contains(&at) && info.reason.contains("hot enough"),
    })
}

/// A server on host A, whose connections have to be hot, and clients on host B.
struct Scene {
    /// It ends before the hosts do.
    _server: Program,
    clients: Vec<TcpStream>,
    bed: Testbed,
}

impl Scene {
    fn new(clients: usize) -> Scene {
        let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--eager", "--rule", "hot:100K", "--socket"]).arg(bed.socket());
        command.args(["--", "python3", "-c", ECHO]);
        let server = Program(bed.host_a.spawn(&mut command).expect("baton run"));
        let at = address(false, 7000);
        wait_until("the server", || connect(&bed, at).is_ok());
        let clients = (0..clients).map(|_| connect(&bed, at).expect("a connection")).collect();
        Scene { _server: server, clients, bed }
    }

    fn infos(&self) -> Option<Vec<ConnectionInfo>> {
        infos(&self.clients, answered(&self.bed, Tool::connections))
    }

    /// Loads the connections of a range until it holds what is listed about all.
    fn load_until(&self, busy: &Range<usize>, what: &str, holds: impl Fn(&[ConnectionInfo]) -> bool) -> Vec<ConnectionInfo> {
        let mut found = None;
        wait_until(what, || {
            exchange(&self.clients, busy);
            found = self.infos().filter(|infos| holds(infos));
            found.is_some()
        });
        found.expect("it holds")
    }
}

#[test]
fn only_the_hot_are_on_the_nic() {
    let scene = Scene::new(6);
    let never_busy = |infos: &[ConnectionInfo]| {
        assert!(infos[4..].iter().all(|info| info.moves == 0), "{infos:?}");
    };
    for busy in [0..2, 2..4] {
        never_busy(&scene.load_until(&busy, "the hot are there", |infos| are_there(infos, &busy)));
    }
    // What they have to carry outlives NIC and agent.
    for victim in ["nic", "agent"] {
        let before = answered(&scene.bed, Tool::statistics);
        let killed = if victim == "nic" { before.nic_process } else { before.agent_process };
        process::signal(killed, 9).expect("a kill");
        let is_next = || answered(&scene.bed, Tool::statistics).nic_process != before.nic_process;
        let there = |infos: &[ConnectionInfo]| is_next() && are_there(infos, &(2..4));
        never_busy(&scene.load_until(&(2..4), victim, there));
    }
    // Somebody asks for one that is idle: it does not have to be hot any more.
    let idle = scene.infos().expect("all are listed").pop().expect("the last one");
    let ask = Ask::MoveAny { session: idle.session, connection: idle.connection, to: Place::Nic, nic: None };
    wait_until("it moves", || matches!(answered(&scene.bed, |tool| tool.ask(ask.clone())), Reply::Done));
    scene.load_until(&(2..4), "it is there, too", |infos| infos[5].place == Place::Nic && infos[5].reason == "asked to");
    // On a full NIC the hottest of the hot are.
    let set = |tool: &mut Tool| {
        let Reply::Offloads(mut offloads) = tool.ask(Ask::Offloads { nic: 0 })? else { anyhow::bail!("no settings") };
        offloads.set("connections=1").expect("a setting");
        tool.ask(Ask::SetOffloads { nic: 0, offloads })
    };
    assert!(matches!(answered(&scene.bed, set), Reply::Done));
    let there = |infos: &[ConnectionInfo]| (0..6).filter(|at| infos[*at].place == Place::Nic).collect::<Vec<usize>>();
    let infos = scene.load_until(&(2..4), "one is there", |infos| there(infos).len() == 1);
    assert!((2..4).contains(&there(&infos)[0]), "{infos:?}");
    let waits = &infos[if infos[2].place == Place::Nic { 3 } else { 2 }];
    assert!(waits.reason.contains("the NIC"), "it is hot enough, and there is no room: {waits:?}");
    assert_eq!(answered(&scene.bed, Tool::statistics).counters[Counter::Exceeded as usize], 0);
}

/// What an attached program's connections carry in the kernel is counted by the attacher's BPF programs.
#[test]
fn an_attached_programs_hot_connections_are_on_the_nic() {
    let scratch = Scratch::new("hot-attach");
    let host = Namespace::new().expect("a namespace");
    let mut command = Command::new("python3");
    command.arg(script("closes.py")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = Killed(host.spawn(&mut command).expect("python3"));
    let mut output = BufReader::new(program.0.stdout.take().expect("its output"));
    let mut line = String::new();
    output.read_line(&mut line).expect("a line");
    let port: u16 = line.trim().parse().expect("a port");
    let client = || host.run(|| TcpStream::connect(("127.0.0.1", port))).expect("a connection");
    let clients: Vec<TcpStream> = (0..4).map(|_| client()).collect();
    clients.iter().for_each(|client| echo(client, 1));
    let _attacher = Killed(attach(&host, &scratch, &["--rule", "hot:50K", &program.0.id().to_string()]));
    for busy in [0..1, 2..4] {
        wait_until("the hot are there", || {
            exchange(&clients, &busy);
            infos(&clients, listed(&scratch)).is_some_and(|infos| are_there(&infos, &busy))
        });
    }
}

#[test]
fn what_is_no_rate_is_refused() {
    let baton = |arguments: &[&str]| {
        let ran = Command::new(env!("CARGO_BIN_EXE_baton")).args(arguments).env_remove("BATON_SOCKET").output().expect("baton");
        (ran.status.code(), text(&ran.stderr))
    };
    for rule in ["hot:", "hot:0", "hot:fast", "hot:1.5M", "hot:4G"] {
        for command in [&["run", "--rule", rule, "--", "true"][..], &["attach", "--rule", rule, "1"]] {
            let (code, said) = baton(command);
            assert!(code == Some(2) && said.contains("hot:500K"), "{command:?}: {code:?}, {said}");
        }
    }
    let (code, said) = baton(&["attach", "--rule", "accepted", "1"]);
    assert!(code != Some(0) && said.contains("no moment of `baton attach`"), "{said}");
    let (code, said) = baton(&["attach", "--rule", "hot", "--after", "5", "1"]);
    assert!(code == Some(2) && said.contains("cannot be used with"), "{said}");
}
