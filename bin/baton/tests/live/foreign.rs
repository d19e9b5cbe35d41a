//! Descriptors that take long to close: those who have sent them, or died with them, hold up nobody else.

use crate::blocked::{PROMISED, Program};
use crate::common::{answered, connect, hosts, wait_until};
use crate::fuse::{FuseFile, NEVER_FLUSHED};
use crate::hostile_client::{Hostile, NeverReads};
use crate::stopped::{in_time, listed, registered};
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::tool::Tool;
use baton_client::{Listener, Shared};
use baton_linux::control::Channel;
use baton_linux::{process, socket, starter};
use baton_protocol::program::{Answer, Ask, Opening, Reply, Request};
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

/// Makes a socket linger for a thousand seconds, with as much unsent data as there is room for.
fn linger(stream: &TcpStream) {
    stream.set_nonblocking(true).expect("a socket");
    while (&*stream).write(&[7; 65536]).is_ok() {}
    let value = [1i32.to_ne_bytes(), 1000i32.to_ne_bytes()].concat();
    socket::set_bytes(stream.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &value).expect("SO_LINGER");
}

/// Threads of a process.
fn threads(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/task")).expect("a process").count()
}

fn agent(bed: &Testbed) -> u32 {
    bed.tool().expect("a tool").statistics().expect("statistics").agent_process
}

/// A program dies with sockets that linger, and whose peers do not read. Agent and keeper, which have the last
/// descriptors, go on; each peer gets everything and the FIN when it reads.
#[test]
fn a_dead_programs_sockets_that_linger_hold_up_nobody() {
    let bed = hosts(TestbedSettings::default());
    let (other, connection, _streams) = registered(&bed, 8000);
    let pairs: Vec<(TcpStream, TcpStream)> = (0..40).map(|at| connect(&bed, false, 9000 + at)).collect();
    let shared = Shared::connect(&bed.socket(), Opening::alone(), Listener(Box::new(|_| ()))).expect("a session");
    for (ours, _) in &pairs {
        linger(ours);
        shared.register(ours.as_fd(), false).expect("a registration");
    }
    let peers: Vec<TcpStream> = pairs.into_iter().map(|(_, peer)| peer).collect();
    // Its control connection hangs up: for agent and keeper it has died.
    drop(shared);
    in_time("another program's close", move || other.forget(&connection, Duration::ZERO)).expect("forgotten");
    wait_until("their connections' end", || listed(&bed) == 0);
    assert!(threads(agent(&bed)) < 20, "{} threads", threads(agent(&bed)));
    in_time("the end of their connections", move || {
        for mut peer in peers {
            peer.set_nonblocking(false).expect("a socket");
            peer.set_read_timeout(Some(Duration::from_secs(15))).expect("a time-out");
            let mut bytes = Vec::new();
            peer.read_to_end(&mut bytes).expect("everything, and the FIN");
            assert!(!bytes.is_empty() && bytes.iter().all(|byte| *byte == 7));
        }
    });
}

/// Files of FUSE, sent along with requests that need none, hold up nobody: closing each would wait for its server.
/// Their user is turned away meanwhile.
#[test]
fn files_that_do_not_close_hold_up_nobody() {
    let bed = hosts(TestbedSettings::default());
    let (other, connection, _streams) = registered(&bed, 8000);
    let Some(file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let before = agent(&bed);
    for _ in 0..8 {
        let Ok(channel) = Channel::connect(&bed.socket()) else { continue };
        let descriptors = [file.fd(); 16];
        for tag in 1..3 {
            // It may have been turned away by now.
            let _ = channel.try_send(&Request { tag, body: Ask::Attachers }, &descriptors);
        }
        let _ = in_time("an answer, or the end", move || channel.receive::<Answer>().map(drop));
        // Not root's own tool, which is of the same user here.
        assert!(threads(before) < 20, "{} threads", threads(before));
    }
    // Here it is of the same user, which has been turned away; it is not held up.
    let _ = in_time("another program's close", move || other.forget(&connection, Duration::ZERO));
    // The server answers at last: what waits for it goes on.
    drop(file);
    wait_until("a list", || bed.tool().and_then(|mut tool| tool.connections()).is_ok());
    assert_eq!(agent(&bed), before);
}

/// Files that do not close count as their user's when they come in place of sockets, too: it is turned away, and others
/// are served.
#[test]
fn files_in_place_of_sockets_are_their_users() {
    let bed = hosts(TestbedSettings::default());
    let (other, connection, _streams) = registered(&bed, 8000);
    let Some(file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let before = agent(&bed);
    let mut hostile = Hostile::start_with(&bed.host_a, &bed.socket(), "", ("files for sockets", 100), Some(file));
    hostile.await_attack();
    in_time("another program's close", move || other.forget(&connection, Duration::ZERO)).expect("forgotten");
    assert_eq!((agent(&bed), listed(&bed)), (before, 0));
}

/// Another user's program has died with a thousand such sockets, and yet another of its programs sends a hundred files
/// that do not close. A closed socket of root's sends its FIN as soon as without them, and agent and keeper have few
/// threads.
#[test]
fn a_thousand_sockets_and_a_hundred_files_hold_up_nobody() {
    let Some(file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
    let mut program = Program::start(&bed);
    let mut longest = || program.calls().into_iter().max_by_key(|(_, time)| *time).expect("calls");
    let agent = agent(&bed);
    let keeper = process::parent(agent).expect("the keeper");
    let most = || threads(agent).max(threads(keeper));
    let alone = (longest(), most());
    let server = NeverReads::start(&bed);
    let peer = server.address().to_string();
    // Of several programs, which die one after the other.
    let mut dying: Vec<Hostile> =
        (0..4).map(|_| Hostile::start_with(&bed.host_a, &bed.socket(), &peer, ("lingers", 250), None)).collect();
    dying.iter_mut().for_each(|hostile| drop(hostile.await_attack()));
    let mut sending = Hostile::start_with(&bed.host_a, &bed.socket(), "", ("files", 112), Some(file));
    sending.await_attack();
    let mut beside = (longest(), most());
    dying.into_iter().for_each(Hostile::expect_success);
    // While all of them are closed, and afterwards.
    let mut rounds = 0;
    while rounds < 20 || listed(&bed) > 1 {
        let now = (longest(), most());
        beside = (if now.0.1 > beside.0.1 { now.0 } else { beside.0 }, beside.1.max(now.1));
        rounds += 1;
    }
    println!("longest call and threads: {alone:?}, {beside:?} beside them, in {rounds} rounds");
    assert!(beside.0.1 < alone.0.1 + PROMISED, "{beside:?}, {alone:?} without them");
    // Eight close sockets, one for each user closes files, and no more.
    assert!(beside.1 <= alone.1 + 16, "{beside:?} threads, {alone:?} without them");
    assert_eq!(self::agent(&bed), agent);
}

/// Another user's program sends sockets that linger, and files that do not close, to every socket of agent and NIC that
/// it can reach, in such a way that nobody receives them: whoever drops them closes them. Root's program goes on, and
/// lists come, as without them.
#[test]
fn what_nobody_has_received_holds_up_nobody() {
    for attack in ["unreceived", "unreceived files"] {
        let file = if attack == "unreceived" { None } else { FuseFile::new(&NEVER_FLUSHED) };
        if attack != "unreceived" && file.is_none() {
            return;
        }
        let bed = hosts(TestbedSettings::default());
        let mut program = Program::start(&bed);
        let processes = || {
            let now = bed.tool().expect("a tool").statistics().expect("statistics");
            (now.agent_process, now.nic_process)
        };
        let mut longest = || {
            listed(&bed);
            program.calls().into_iter().max_by_key(|(_, time)| *time).expect("calls")
        };
        let (before, alone) = (processes(), (0..20).map(|_| longest()).max_by_key(|(_, time)| *time).expect("calls"));
        let server = NeverReads::start(&bed);
        let peer = server.address().to_string();
        let mut hostile = Hostile::start_with(&bed.host_a, &bed.socket(), &peer, (attack, 1), file);
        let sends = std::thread::spawn(move || {
            hostile.await_attack();
            hostile
        });
        let mut beside = vec![longest()];
        while !sends.is_finished() {
            beside.push(longest());
        }
        let hostile = sends.join().expect("it has sent them");
        beside.extend((0..10).map(|_| longest()));
        if attack == "unreceived" {
            hostile.expect_success();
        } else {
            drop(hostile);
        }
        beside.extend((0..10).map(|_| longest()));
        let worst = beside.into_iter().max_by_key(|(_, time)| *time).expect("calls");
        println!("{attack}: the longest call takes {worst:?}, {alone:?} alone");
        assert!(worst.1 < alone.1 + PROMISED, "{attack}: {worst:?}, {alone:?} alone");
        assert_eq!(processes(), before, "{attack}");
    }
}

/// A socket of another control group is made by a process in that group, which has no copy of a file that this process
/// has: at its end it would have to close it, and stay in the group as long as the file's server likes.
#[test]
fn a_file_that_does_not_close_keeps_no_process_in_a_group() {
    // Before this process has the file.
    starter::begin().expect("the thread that starts processes");
    let Some(file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    let mut words = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mount = words.find(|words| words[2] == "cgroup2").expect("cgroup2 is mounted")[1];
    let group = format!("{mount}/baton-file-{}", std::process::id());
    std::fs::create_dir(&group).expect("a control group");
    let directory = File::open(&group).expect("the group");
    let _held = file.fd();
    starter::socket_of_group(directory.as_fd(), false).expect("a socket");
    wait_until("the end of the group's process", || std::fs::remove_dir(&group).is_ok());
}

/// A report's file whose server does not answer delays the report and nothing else.
#[test]
fn a_reports_file_that_never_answers_holds_up_nobody() {
    let bed = hosts(TestbedSettings::default());
    let (other, connection, _streams) = registered(&bed, 8000);
    let Some(file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let channel = Channel::connect(&bed.socket()).expect("the agent");
    channel.send(&Request { tag: 1, body: Ask::Group { flip: None } }, &[file.fd()]).expect("a request");
    in_time("a group", move || channel.receive::<Answer>().map(drop)).expect("an answer");
    in_time("another program's close", move || other.forget(&connection, Duration::ZERO)).expect("forgotten");
    assert_eq!(listed(&bed), 0);
}

/// An agent is killed that has a report's file which does not close: its process cannot end. The next agent serves, and
/// `baton ls` answers.
#[test]
fn an_agent_that_cannot_close_a_file_is_followed_by_another() {
    let bed = hosts(TestbedSettings::default());
    let Some(file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let channel = Channel::connect(&bed.socket()).expect("the agent");
    channel.send(&Request { tag: 1, body: Ask::Group { flip: None } }, &[file.fd()]).expect("a request");
    in_time("a group", move || channel.receive::<Answer>().map(drop)).expect("an answer");
    let before = agent(&bed);
    process::signal(before, libc::SIGKILL).expect("the agent");
    assert_ne!(answered(&bed, Tool::statistics).agent_process, before);
    assert_eq!(listed(&bed), 0);
    assert!(process::lives(before), "the file was closed");
}

/// The answer to a program's last request comes when its group's report has been written, however late that is: whoever
/// reads the report when the program has ended finds it.
#[test]
fn a_program_that_ends_waits_for_its_own_report_alone() {
    let bed = hosts(TestbedSettings::default());
    let Some(file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let tool = Channel::connect(&bed.socket()).expect("the agent");
    tool.send(&Request { tag: 1, body: Ask::Group { flip: None } }, &[file.fd()]).expect("a request");
    let Reply::Grouped { group } = tool.receive::<Answer>().expect("an answer").0.body else { panic!("no group") };
    let program = Channel::connect(&bed.socket()).expect("the agent");
    let opening = Opening { group, ..Opening::alone() };
    program.send(&Request { tag: 1, body: Ask::Open(opening) }, &[]).expect("a request");
    assert!(matches!(program.receive::<Answer>().expect("an answer").0.body, Reply::Opened { .. }));
    program.send(&Request { tag: 2, body: Ask::Goodbye }, &[]).expect("a request");
    // The agent has read the request by then.
    (0..20).for_each(|_| assert_eq!(listed(&bed), 0));
    let early = program.try_receive::<Answer>().map(|(answer, _)| answer);
    assert!(early.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "{early:?}");
    drop(file);
    let (answer, _) = in_time("an answer", move || program.receive::<Answer>()).expect("an answer");
    assert!(answer.tag == 2 && matches!(answer.body, Reply::Done), "{answer:?}");
}
