//! Attached programs that do not stop when they are asked to, NICs that die meanwhile, and an attacher that misses
//! events: no connection is lost by that, and each comes to the NIC in the end.

use crate::attach::{ANSWERS, Killed, attach, echo as echo_server, listed};
use crate::common::{SetsAtEnd, wait_until};
use crate::entries::{PYTHON, echo, serve};
use crate::fuse::{FuseFile, READ};
use crate::kernel_only::sleeps_in;
use crate::scratch::{Scratch, agent_socket, text};
use crate::stopped::in_time;
use crate::stopped_attacher::{Program, SERVER};
use baton_client::tool::Tool;
use baton_linux::freeze::Frozen;
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_protocol::program::{Place, Statistics};
use serde_json::Value;
use std::io::ErrorKind::ConnectionReset;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Echoes what comes on a connection. At a line a thread of it reads its file 3, and does not stop before that answers.
const RESTLESS: &str = "
import os, select, socket, sys, threading
def read():
    try:
        os.pread(3, 1, 0)
    except OSError:
        pass
listener = socket.create_server(('127.0.0.1', 0))
print(listener.getsockname()[1], flush=True)
one = listener.accept()[0]
one.setblocking(False)
poll = select.poll()
poll.register(0, select.POLLIN)
poll.register(one, select.POLLIN)
while True:
    ready = dict(poll.poll())
    if 0 in ready:
        if not sys.stdin.readline():
            os._exit(0)
        threading.Thread(target=read, daemon=True).start()
    if one.fileno() in ready:
        one.send(one.recv(1000))
";

fn statistics(scratch: &Scratch) -> Statistics {
    let socket = agent_socket(scratch).expect("an agent");
    Tool::connect(&socket).and_then(|mut tool| tool.statistics()).expect("statistics")
}

fn count_on_nic(scratch: &Scratch) -> usize {
    match agent_socket(scratch) {
        Some(_) => listed(scratch).iter().filter(|one| one.place == Place::Nic).count(),
        None => 0,
    }
}

/// Such a program, its attacher, and a peer of it.
struct Bed {
    host: Namespace,
    scratch: Scratch,
    program: Child,
    peer: TcpStream,
}

impl Bed {
    fn new(file: &FuseFile) -> Bed {
        let (host, scratch) = (Namespace::new().expect("a namespace"), Scratch::new("restless"));
        let mut command = file.held_by(0, PYTHON);
        let (program, port) = serve(&host, command.args(["-c", RESTLESS]));
        let mut peer = host.run(|| TcpStream::connect(("127.0.0.1", port))).expect("a connection");
        echo(&mut peer);
        Bed { host, scratch, program, peer }
    }

    fn attach(&self) -> Child {
        attach(&self.host, &self.scratch, &["--after", "0", &self.program.id().to_string()])
    }

    /// From now on it does not stop, until the file is dropped.
    fn keep_going(&mut self, file: &mut FuseFile) {
        writeln!(self.program.stdin.as_mut().expect("its input")).expect("a line");
        file.until_waited_for();
    }

    fn until_on_nic(&mut self) {
        wait_until("it is on the NIC", || {
            echo(&mut self.peer);
            count_on_nic(&self.scratch) == 1
        });
    }

    fn end(mut self, mut attacher: Child) {
        drop(self.program.stdin.take());
        self.program.wait().expect("its end");
        assert!(attacher.wait().expect("its end").success());
    }
}

/// The NIC dies while a thread of an attached program does not stop: its connection goes on when it does.
#[test]
fn a_nic_may_die_while_a_program_does_not_stop() {
    let Some(mut file) = FuseFile::new(&[READ]) else { return };
    let mut bed = Bed::new(&file);
    let attacher = bed.attach();
    bed.until_on_nic();
    bed.keep_going(&mut file);
    process::signal(statistics(&bed.scratch).nic_process, libc::SIGKILL).expect("a signal");
    let status = format!("/proc/{}/status", bed.program.id());
    wait_until("its first thread is stopped", || {
        std::fs::read_to_string(&status).is_ok_and(|text| text.contains("tracing stop"))
    });
    // Waits: several times as long as a thread is waited for at once (50 ms).
    std::thread::sleep(Duration::from_millis(300));
    drop(file);
    bed.until_on_nic();
    bed.end(attacher);
}

/// If that takes too long the connection is reset, and nobody waits for it.
#[test]
fn what_could_not_be_restored_is_reset() {
    let Some(mut file) = FuseFile::new(&[READ]) else { return };
    let mut bed = Bed::new(&file);
    let mut attacher = bed.attach();
    bed.until_on_nic();
    bed.keep_going(&mut file);
    let before = statistics(&bed.scratch);
    process::signal(before.nic_process, libc::SIGKILL).expect("a signal");
    wait_until("it is lost", || statistics(&bed.scratch).lost > before.lost);
    drop(file);
    bed.peer.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
    // What has been sent is acknowledged by nobody but a reset.
    let _ = bed.peer.write_all(b"hello");
    let ended = bed.peer.read(&mut [0; 5]);
    assert!(matches!(&ended, Ok(0)) || ended.as_ref().is_err_and(|error| error.kind() == ConnectionReset), "{ended:?}");
    drop(bed.program.stdin.take());
    bed.program.wait().expect("its end");
    attacher.wait().expect("its end");
}

/// A program that does not stop for seconds is attached to when it does.
#[test]
fn a_program_that_does_not_stop_for_long_is_attached_to_later() {
    let Some(mut file) = FuseFile::new(&[READ]) else { return };
    let mut bed = Bed::new(&file);
    bed.keep_going(&mut file);
    let attacher = bed.attach();
    wait_until("there is an agent", || agent_socket(&bed.scratch).is_some());
    for _ in 0..10 {
        // That it carries bytes is reported once, so it is used up.
        echo(&mut bed.peer);
        // Waits: in all longer than a hundred attempts of an attacher that makes no pauses.
        std::thread::sleep(Duration::from_secs(1));
    }
    assert_eq!(count_on_nic(&bed.scratch), 0, "it does not stop");
    drop(file);
    bed.until_on_nic();
    bed.end(attacher);
}

/// The NIC dies while the connections of a running program are registered and moved: all of them come to the next one.
#[test]
fn a_nic_may_die_while_connections_are_attached() {
    const MANY: usize = 300;
    let (host, scratch) = (Namespace::new().expect("a namespace"), Scratch::new("attaching"));
    let (server, _port, mut peers) = many(&host, MANY);
    let attacher = attach(&host, &scratch, &["--after", "0", &server.child.0.id().to_string()]);
    wait_until("some are on the NIC", || count_on_nic(&scratch) > 0);
    process::signal(statistics(&scratch).nic_process, libc::SIGKILL).expect("a signal");
    wait_until("all are on the NIC", || count_on_nic(&scratch) == MANY);
    exchange_during(&mut peers, || detach(attacher));
}

/// Has a connection in blocking mode, which stays in the kernel, and another one, on which it echoes. At a line it
/// closes the first.
const CLOSES_ONE: &str = "
import select, socket, sys
listener = socket.create_server(('127.0.0.1', 0))
print(listener.getsockname()[1], flush=True)
first, second = [listener.accept()[0] for _ in range(2)]
second.setblocking(False)
while True:
    ready = select.select([sys.stdin, second], [], [])[0]
    if sys.stdin in ready:
        if not sys.stdin.readline():
            break
        first.close()
    if second in ready:
        second.send(second.recv(1000))
";

/// The NIC dies, and the agent asks for the descriptors of its connections just before it is asked to forget another
/// one, which it refuses meanwhile. It is asked again: nothing is left of that connection.
#[test]
fn what_the_agent_does_not_forget_at_once_it_forgets_later() {
    let (host, scratch) = (Namespace::new().expect("a namespace"), Scratch::new("forget"));
    let (program, port) = serve(&host, Command::new(PYTHON).args(["-c", CLOSES_ONE]));
    let mut program = Killed(program);
    let mut peers = [(); 2].map(|()| host.run(|| TcpStream::connect(("127.0.0.1", port))).expect("a connection"));
    let attacher = attach(&host, &scratch, &["--after", "0", &program.0.id().to_string()]);
    wait_until("one is on the NIC, and the other one in the kernel", || {
        echo(&mut peers[1]);
        count_on_nic(&scratch) == 1 && listed(&scratch).iter().any(|one| one.reason == "blocking socket")
    });
    let before = statistics(&scratch);
    // The agent finds both when it goes on: first the NIC's end, then the request.
    let held = Frozen::freeze(&[before.agent_process]).expect("a tracer");
    process::signal(before.nic_process, libc::SIGKILL).expect("a signal");
    wait_until("the NIC has ended", || !process::lives(before.nic_process));
    writeln!(program.0.stdin.as_mut().expect("its input")).expect("a line");
    wait_until("the attacher waits for an answer", || sleeps_in(attacher.id()) == Some(libc::SYS_recvmsg));
    drop(held);
    wait_until("nothing is left of what was closed", || listed(&scratch).len() == 1);
    wait_until("the other one is on the NIC", || {
        echo(&mut peers[1]);
        count_on_nic(&scratch) == 1
    });
    drop(program.0.stdin.take());
    program.0.wait().expect("its end");
    let ended = attacher.wait_with_output().expect("its output");
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let summary: Value = serde_json::from_slice(&ended.stdout).expect("JSON");
    assert!(summary["stayed"]["the NIC does not answer"].as_u64() >= Some(1), "the agent has refused nothing: {summary}");
}

/// Connections that each carry a byte, so many that the attacher has no room for an event of each.
fn flood(host: &Namespace) {
    const MORE_THAN_FIT: usize = 12_000;
    let flooded = host.run(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let at = listener.local_addr().expect("its address");
        for _ in 0..MORE_THAN_FIT {
            let mut one = TcpStream::connect(at).expect("a connection");
            one.write_all(b"x").expect("sent");
            let (mut other, _) = listener.accept().expect("its other end");
            other.read_exact(&mut [0]).expect("a byte");
        }
        Ok(())
    });
    flooded.expect("connections");
}

/// Stops an attacher while its program does not stand still for it.
fn stop_between_moves(attacher: u32, program: u32) {
    let is = |process: u32, state: &str| {
        std::fs::read_to_string(format!("/proc/{process}/status")).is_ok_and(|status| status.contains(state))
    };
    wait_until("the program runs while its attacher is stopped", || {
        process::signal(attacher, libc::SIGSTOP).expect("a signal");
        wait_until("the attacher is stopped", || is(attacher, "(stopped)"));
        let stands_still = is(program, "(tracing stop)");
        if stands_still {
            process::signal(attacher, libc::SIGCONT).expect("a signal");
        }
        !stands_still
    });
}

/// A connection that is made while the attacher misses events is found.
#[test]
fn what_an_attacher_misses_it_looks_for() {
    let (host, scratch) = (Namespace::new().expect("a namespace"), Scratch::new("missed"));
    let port = echo_server(&host, 2);
    let mut command = Command::new(PYTHON);
    command.args(["-c", ANSWERS, &port.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = host.spawn(&mut command).expect("python3");
    let mut input = program.stdin.take().expect("its input");
    let mut lines = BufReader::new(program.stdout.take().expect("its output")).lines().map_while(Result::ok);
    let mut open = || {
        writeln!(input, "connect").expect("it reads");
        assert_eq!(lines.next().as_deref(), Some("connect"));
    };
    open();
    let mut attacher = attach(&host, &scratch, &["--after", "0", &program.id().to_string()]);
    wait_until("its connection is on the NIC", || count_on_nic(&scratch) == 1);
    stop_between_moves(attacher.id(), program.id());
    flood(&host);
    open();
    process::signal(attacher.id(), libc::SIGCONT).expect("a signal");
    wait_until("both are on the NIC", || count_on_nic(&scratch) == 2);
    drop(input);
    program.wait().expect("its end");
    attacher.wait().expect("its end");
}

/// Exchanges different bytes over all connections while something is done; each byte is compared.
fn exchange_during(peers: &mut [TcpStream], act: impl FnOnce()) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let exchanges = scope.spawn(|| {
            let mut round = 0u32;
            while !over.load(Ordering::Relaxed) {
                round += 1;
                let of = |at: usize| [round.to_be_bytes(), (at as u32).to_be_bytes()].concat();
                for (at, peer) in peers.iter_mut().enumerate() {
                    peer.write_all(&of(at)).expect("sent");
                }
                for (at, peer) in peers.iter_mut().enumerate() {
                    let mut got = [0; 8];
                    peer.read_exact(&mut got).expect("an echo");
                    assert_eq!(got.as_slice(), of(at), "connection {at}, round {round}");
                }
            }
        });
        let ends = SetsAtEnd(&over);
        act();
        drop(ends);
        exchanges.join().expect("every byte is right");
    });
}

/// A server with many connections, its port, and their other ends.
fn many(host: &Namespace, connections: usize) -> (Program, String, Vec<TcpStream>) {
    let mut server = Program::start(host, SERVER, &[]);
    let port = server.line();
    let at = ("127.0.0.1", port.parse::<u16>().expect("a port"));
    let peers =
        host.run(|| (0..connections).map(|_| TcpStream::connect(at)).collect::<std::io::Result<Vec<_>>>()).expect("connections");
    for peer in &peers {
        peer.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
    }
    (server, port, peers)
}

/// Ends an attacher as Ctrl-C does.
fn detach(mut attacher: Child) {
    process::signal(attacher.id(), libc::SIGINT).expect("our child");
    let ended = in_time("its end", move || attacher.wait());
    assert!(ended.expect("its end").success());
}

/// Somebody attaches to a program to which another one is attached, with a Baton of his own: its connections stay where
/// they are, and no byte is wrong.
#[test]
fn a_second_attacher_disturbs_nothing() {
    let host = Namespace::new().expect("a namespace");
    let (server, _port, mut peers) = many(&host, 30);
    let program = server.child.0.id().to_string();
    let scratches = [(); 2].map(|()| Scratch::new("second"));
    exchange_during(&mut peers, || {
        let first = attach(&host, &scratches[0], &["--after", "0", &program]);
        wait_until("all are on the NIC", || count_on_nic(&scratches[0]) == 30);
        for _ in 0..3 {
            let second = attach(&host, &scratches[1], &["--after", "0", &program]);
            let refused = |one: &baton_protocol::program::ConnectionInfo| one.reason.contains("attached by another");
            wait_until("it leaves all to the first one", || {
                listed(&scratches[1]).iter().filter(|one| refused(one)).count() == 30
            });
            detach(second);
        }
        assert_eq!(count_on_nic(&scratches[0]), 30);
        detach(first);
    });
}

/// Whoever attaches to a port stops no process that has nothing there, least of all one of Baton's.
#[test]
fn an_attacher_to_a_port_ends_when_it_is_asked_to() {
    let host = Namespace::new().expect("a namespace");
    let (_server, port, mut peers) = many(&host, 30);
    let scratch = Scratch::new("to-a-port");
    exchange_during(&mut peers, || {
        for _ in 0..4 {
            let attacher = attach(&host, &scratch, &["--after", "0", "--port", &port]);
            wait_until("all are on the NIC", || count_on_nic(&scratch) == 30);
            detach(attacher);
        }
    });
}
