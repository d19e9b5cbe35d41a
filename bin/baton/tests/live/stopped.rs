//! A NIC or an agent that is stopped: it holds up nobody who does not need it, and whoever needs it only for a while.

use crate::common::{connect, hosts, start_python, start_python_with, wait_until};
use crate::lifecycle::kill_at_once;
use baton_bed::testbed::{Testbed, TestbedSettings, address_a, address_b};
use baton_client::{Connection, Listener, Shared};
use baton_linux::freeze::{Frozen, release_late};
use baton_linux::process;
use baton_protocol::program::{Ask, Opening, Place, Reply};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Longest time that anything here may take. What waits for the stopped process takes for ever.
const LIMIT: Duration = Duration::from_secs(20);

/// Stops the NIC as a debugger does: one that is stopped by a signal is ended soon.
pub fn hold_nic(bed: &Testbed) -> Frozen {
    Frozen::freeze(&[nic_process(bed)]).expect("a tracer")
}

/// Stops the agent as a debugger does: the keeper resumes one that is stopped by a signal.
pub fn hold_agent(bed: &Testbed) -> Frozen {
    Frozen::freeze(&[bed.tool().expect("a tool").statistics().expect("statistics").agent_process]).expect("a tracer")
}

/// Does something in a thread; fails if it takes too long.
pub fn in_time<T: Send + 'static>(what: &str, act: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, is_done) = channel();
    std::thread::spawn(move || done.send(act()));
    match is_done.recv_timeout(LIMIT) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("{what} is held up"),
        Err(RecvTimeoutError::Disconnected) => panic!("{what} has failed"),
    }
}

fn session(bed: &Testbed) -> std::io::Result<Shared> {
    Shared::connect(&bed.socket(), Opening::alone(), Listener(Box::new(|_| ())))
}

/// A program with a session and a connection in the kernel.
pub fn registered(bed: &Testbed, port: u16) -> (Arc<Shared>, Arc<Connection>, [TcpStream; 2]) {
    let (server, peer) = connect(bed, false, port);
    let shared = session(bed).expect("a session");
    let connection = shared.register(server.as_fd(), false).expect("a registration");
    (Arc::new(shared), connection, [server, peer])
}

/// The connections that a tool lists.
pub fn listed(bed: &Testbed) -> usize {
    let socket = bed.socket();
    in_time("a list", move || {
        let mut tool = baton_client::tool::Tool::connect(&socket).expect("a tool");
        tool.connections().expect("a list").len()
    })
}

pub fn nic_process(bed: &Testbed) -> u32 {
    bed.tool().expect("a tool").statistics().expect("statistics").nic_process
}

/// While the NIC is stopped a program that opens a session waits for it, and nobody else does.
#[test]
fn opening_a_session_at_a_stopped_nic_holds_up_no_other() {
    let bed = hosts(TestbedSettings::default());
    let (other, connection, _streams) = registered(&bed, 8000);
    let nic = hold_nic(&bed);
    let (opened, opens) = channel();
    let socket = bed.socket();
    std::thread::spawn(move || {
        let shared = Shared::connect(&socket, Opening::alone(), Listener(Box::new(|_| ())));
        opened.send(shared.map(|_| ()).map_err(|error| error.to_string()))
    });
    // The agent has its request by now, or gets it between two of these.
    for _ in 0..20 {
        assert_eq!(listed(&bed), 1);
    }
    in_time("a close", move || other.forget(&connection, Duration::ZERO)).expect("forgotten");
    drop(nic);
    match opens.recv_timeout(LIMIT).expect("an answer") {
        Ok(()) => {}
        Err(reason) => assert!(reason.contains("the NIC does not answer"), "{reason}"),
    }
    session(&bed).expect("a session");
}

/// Requests that need a stopped NIC are refused after a while, and served again when it goes on.
#[test]
fn what_needs_a_stopped_nic_is_refused_after_a_while() {
    let bed = hosts(TestbedSettings::default());
    let (other, connection, _streams) = registered(&bed, 8000);
    let process = nic_process(&bed);
    let listener = bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address_a(false), 9000))).expect("a listener");
    let listener = Arc::new(listener);
    let Reply::Offloads(offloads) = bed.tool().expect("a tool").ask(Ask::Offloads { nic: 0 }).expect("an answer") else {
        panic!("there are offloads");
    };
    let nic = hold_nic(&bed);
    let refused = |reason: String| assert!(reason.contains("the NIC does not answer"), "{reason}");
    let socket = bed.socket();
    let opens = in_time("a session", move || {
        Shared::connect(&socket, Opening::alone(), Listener(Box::new(|_| ()))).map(|_| ()).expect_err("no NIC has it")
    });
    refused(opens.to_string());
    let (shared, of) = (other.clone(), listener.clone());
    refused(in_time("a listener", move || shared.listen(of.as_fd()).map(|_| ()).expect_err("no NIC has it").to_string()));
    let (socket, set) = (bed.socket(), offloads.clone());
    let reply = in_time("offloads", move || {
        let mut tool = baton_client::tool::Tool::connect(&socket).expect("a tool");
        tool.ask(Ask::SetOffloads { nic: 0, offloads: set }).expect("an answer")
    });
    let Reply::Stayed { reason, .. } = reply else { panic!("{reply:?}") };
    refused(reason);
    assert_eq!(listed(&bed), 1);
    drop(nic);
    // What was refused has not been forgotten half-way: all of it works now.
    session(&bed).expect("a session");
    in_time("a listener", move || other.listen(listener.as_fd()).map(|_| other))
        .map(|other| {
            other.move_to(connection.number(), Place::Nic).expect("a move");
        })
        .expect("the NIC has it");
    let reply = bed.tool().expect("a tool").ask(Ask::SetOffloads { nic: 0, offloads }).expect("an answer");
    assert!(matches!(reply, Reply::Done), "{reply:?}");
    assert_eq!(nic_process(&bed), process);
}

/// A listener on the NIC has changed its options while the NIC is stopped, so that the agent's answer is late. When the
/// NIC goes on it makes the listener's connections, and the program gets them.
#[test]
fn a_late_refresh_leaves_a_listener_on_the_nic() {
    let bed = hosts(TestbedSettings::default());
    let shared = Arc::new(session(&bed).expect("a session"));
    let at = SocketAddr::new(address_a(false), 9000);
    let listener = Arc::new(bed.host_a.run(|| TcpListener::bind(at)).expect("a listener"));
    let (number, queue) = shared.listen(listener.as_fd()).expect("the NIC has it");
    let nic = hold_nic(&bed);
    let (asking, of) = (shared.clone(), listener.clone());
    let reason = in_time("a refresh", move || asking.listen(of.as_fd()).map(|_| ()).expect_err("no NIC has it").to_string());
    assert!(reason.contains("the NIC does not answer"), "{reason}");
    drop(nic);
    let _client = bed.host_b.run(|| TcpStream::connect_timeout(&at, LIMIT)).expect("a connection");
    let mut queue = UnixStream::from(queue);
    queue.set_read_timeout(Some(LIMIT)).expect("a limit");
    queue.read_exact(&mut [0]).expect("the NIC has made it");
    let mut fd = None;
    let accepted = shared.accept(number, 1, |accepted| {
        fd = Some(accepted);
        shared.unregistered()
    });
    assert!(accepted.expect("an answer").is_some() && fd.is_some());
}

/// While the agent is stopped a program's closes return, its new connections stay in the kernel, and a tool says what
/// does not answer. All that was asked for is done when the agent goes on.
#[test]
fn a_stopped_agent_holds_up_no_program_for_long() {
    let bed = hosts(TestbedSettings::default());
    let (shared, connection, _streams) = registered(&bed, 8000);
    let more: Vec<_> = (0..100).map(|at| connect(&bed, false, 9000 + at)).collect();
    let registered: Vec<_> = more.iter().map(|(ours, _)| shared.register(ours.as_fd(), false).expect("a registration")).collect();
    let (late, _peer) = connect(&bed, false, 8001);
    let agent = hold_agent(&bed);
    let (closing, closed) = (shared.clone(), registered.len());
    in_time("closes", move || {
        registered.iter().for_each(|connection| closing.forget(connection, Duration::ZERO).map(drop).expect("forgotten"))
    });
    let (registering, taken) = (shared.clone(), late.try_clone().expect("a descriptor"));
    let refused = in_time("a registration", move || registering.register(taken.as_fd(), false).map(drop)).expect_err("no answer");
    assert_eq!(refused.kind(), std::io::ErrorKind::TimedOut);
    shared.suggest(connection.number(), Place::Nic);
    let mut list = Command::new(env!("CARGO_BIN_EXE_baton"));
    let socket = bed.socket();
    let said = in_time("a list", move || list.args(["ls", "--socket"]).arg(socket).output().expect("baton ls"));
    let text = String::from_utf8_lossy(&said.stderr);
    assert!(!said.status.success() && text.contains("has not answered"), "{text}");
    drop(agent);
    // Until something comes from it, the agent counts as stopped.
    let again = loop {
        match shared.register(late.as_fd(), false) {
            Ok(connection) => break connection,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::TimedOut),
        }
    };
    let last = shared.clone();
    // The agent has each request before this one.
    in_time("what was asked for", move || last.forget(&again, Duration::ZERO)).expect("forgotten");
    // One is left, and nothing of what was withdrawn.
    wait_until(&format!("one is left of {closed} closed ones"), || listed(&bed) == 1);
}

/// A program asks the agent to adopt a connection while that does not answer: the connection goes on in the kernel, and
/// is adopted later.
#[test]
fn a_connection_that_is_not_adopted_in_time_goes_on() {
    let bed = hosts(TestbedSettings::default());
    let mut session = baton_client::Session::connect(&bed.socket()).expect("a session");
    let (server, mut peer) = connect(&bed, false, 8000);
    let agent = hold_agent(&bed);
    let (error, fd) = session.try_adopt(server.into()).expect_err("no answer");
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
    peer.write_all(b"on").expect("sent");
    let mut bytes = [0; 2];
    let mut server = TcpStream::from(fd);
    server.set_nonblocking(false).expect("a flag");
    server.read_exact(&mut bytes).expect("what was sent");
    assert_eq!(&bytes, b"on");
    server.set_nonblocking(true).expect("a flag");
    drop(agent);
    let mut left = Some(std::os::fd::OwnedFd::from(server));
    wait_until("it is adopted", || match session.try_adopt(left.take().expect("the descriptor")) {
        Ok(_) => true,
        Err((error, fd)) => {
            assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
            left = Some(fd);
            false
        }
    });
    assert_eq!(listed(&bed), 1);
}

/// An agent is held while a program closes connections, and then dies: the next one closes them.
#[test]
fn what_is_closed_while_an_agent_is_held_is_closed_by_the_next() {
    let bed = hosts(TestbedSettings::default());
    let (shared, first, [server, peer]) = registered(&bed, 8000);
    shared.move_to(first.number(), Place::Nic).expect("a move");
    let mut closing = vec![first];
    let (mut servers, mut peers) = (vec![server], vec![peer]);
    for at in 0..20 {
        let (server, peer) = connect(&bed, false, 9000 + at);
        closing.push(shared.register(server.as_fd(), false).expect("a registration"));
        servers.push(server);
        peers.push(peer);
    }
    let agent = bed.tool().expect("a tool").statistics().expect("statistics").agent_process;
    let held = hold_agent(&bed);
    let of = shared.clone();
    in_time("closes", move || {
        closing.iter().for_each(|connection| of.forget(connection, Duration::ZERO).map(drop).expect("forgotten"))
    });
    drop(servers);
    baton_linux::process::signal(agent, libc::SIGKILL).expect("a signal");
    drop(held);
    // Its tracer learns of its end before the keeper does.
    wait_until("it has ended", || !release_late());
    for mut peer in peers {
        wait_until("the FIN", || matches!(peer.read(&mut [0]), Ok(0)));
    }
    wait_until("nothing is left", || bed.tool().and_then(|mut tool| tool.connections()).is_ok_and(|all| all.is_empty()));
}

const CLIENT: &str = "
import socket, sys
one = socket.create_connection((sys.argv[1], int(sys.argv[2])))
one.sendall(b'x')
one.recv(1)
print('ready', flush=True)
sys.stdin.readline()
one.close()
print('closed', flush=True)
";

/// An unmodified program closes a connection that the NIC has while the agent is stopped: close(2) returns, the program
/// ends, and its peer gets the FIN when the agent goes on.
#[test]
fn a_program_closes_and_ends_while_the_agent_is_stopped() {
    let bed = hosts(TestbedSettings::default());
    let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 0))).expect("a listener");
    let at = listener.local_addr().expect("its address");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("run").arg("--socket").arg(bed.socket()).args([
        "--rule",
        "established",
        "--eager",
        "--",
        "python3",
        "-c",
        CLIENT,
    ]);
    command.args([at.ip().to_string(), at.port().to_string()]).env_remove("BATON_RUN");
    let mut program = bed.host_a.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped())).expect("baton run");
    let mut lines = BufReader::new(program.stdout.take().expect("its output")).lines();
    let (mut peer, _) = listener.accept().expect("a connection");
    let mut byte = [0];
    peer.read_exact(&mut byte).expect("a byte");
    peer.write_all(&byte).expect("an echo");
    assert_eq!(lines.next().expect("a line").expect("text"), "ready");
    let on_nic = || bed.tool().expect("a tool").connections().expect("a list").iter().any(|one| one.place == Place::Nic);
    while !on_nic() {
        std::thread::yield_now();
    }
    let agent = hold_agent(&bed);
    program.stdin.take().expect("its input").write_all(b"\n").expect("a line");
    let line = in_time("close(2)", move || lines.next());
    assert_eq!(line.expect("a line").expect("text"), "closed");
    assert!(in_time("the program's end", move || program.wait()).expect("its end").success());
    drop(agent);
    peer.set_read_timeout(Some(LIMIT)).expect("a time-out");
    assert_eq!(peer.read(&mut byte).expect("the FIN"), 0);
}

/// Whether a call fails since it would wait.
pub const WOULD_WAIT: &str = "
def would_wait(act):
    try:
        act()
        return False
    except BlockingIOError:
        return True
";

/// Fills the ring of messages by one connection, and uses two others by edges.
const EDGES: &str = "
import array, fcntl, select, socket, sys, termios
busy, sends, receives = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(3)]
for one in busy, sends, receives:
    one.sendall(b'y')
    assert one.recv(1) == b'y'
    one.setblocking(False)
print('ready', flush=True)
sys.stdin.readline()
unread = array.array('i', [0])
while unread[0] < 65536:
    fcntl.ioctl(receives, termios.FIONREAD, unread)
edges = select.epoll()
edges.register(sends, select.EPOLLOUT | select.EPOLLET)
edges.register(receives, select.EPOLLIN | select.EPOLLET)
seen = set()
while len(seen) < 2:
    seen.update(fd for fd, _ in edges.poll())
print('unread', flush=True)
sys.stdin.readline()
while not would_wait(lambda: busy.send(b'x')):
    pass
sent, received = not would_wait(lambda: sends.send(b'x')), 0
print('full', flush=True)
def receive():
    global received
    while received < 65536:
        received += len(receives.recv(65536))
would_wait(receive)
while not sent or received < 65536:
    for fd, _ in edges.poll():
        if fd == sends.fileno():
            sent = sent or not would_wait(lambda: sends.send(b'x'))
        else:
            would_wait(receive)
print('done', flush=True)
";

/// Starts a Python program, with these options of `baton run`, whose connections to host B come to be on the NIC. Each
/// peer has echoed a byte.
pub fn start_with_peers<const COUNT: usize>(
    bed: &Testbed,
    program: &str,
    options: &[&str],
) -> ((Child, BufReader<ChildStdout>), [TcpStream; COUNT]) {
    let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 0))).expect("a listener");
    let at = listener.local_addr().expect("its address");
    let accepting = std::thread::spawn(move || {
        let mut peers = [(); COUNT].map(|()| listener.accept().expect("a connection").0);
        for peer in &mut peers {
            let mut byte = [0];
            peer.read_exact(&mut byte).expect("a byte");
            peer.write_all(&byte).expect("an echo");
        }
        peers
    });
    let started = start_python_with(bed, program, at, Some(options));
    let peers = accepting.join().expect("its connections");
    let list = || bed.tool().expect("a tool").connections().expect("a list");
    wait_until("all are on the NIC", || list().iter().filter(|one| one.place == Place::Nic).count() == COUNT);
    (started, peers)
}

/// While the NIC stands still a program fills the ring of messages. Where another connection's call fails for that, and
/// nothing else happens to it, the program gets an edge when the NIC goes on.
#[test]
fn edges_follow_when_a_ring_was_full() {
    let bed = hosts(TestbedSettings::default());
    let ((mut program, mut lines), mut peers) = start_with_peers::<3>(&bed, &[WOULD_WAIT, EDGES].concat(), &[]);
    let mut input = program.stdin.take().expect("its input");
    let mut says = |wanted: &str| {
        let mut line = String::new();
        lines.read_line(&mut line).expect("a line");
        assert_eq!(line, wanted);
    };
    peers[2].write_all(&[1; 65536]).expect("sent");
    input.write_all(b"\n").expect("a line");
    says("unread\n");
    let nic = hold_nic(&bed);
    input.write_all(b"\n").expect("a line");
    says("full\n");
    drop(nic);
    let mut line = String::new();
    let end = in_time("the program's end", move || lines.read_line(&mut line).map(|_| line));
    assert_eq!(end.expect("a line"), "done\n");
    assert!(program.wait().expect("its end").success());
}

/// Fills the ring of messages by one connection, and makes the call that the test names on another one.
const FULL: &str = "
import array, fcntl, socket, sys, termios
busy, other = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(2)]
for one in busy, other:
    one.sendall(b'y')
    assert one.recv(1) == b'y'
print('ready', flush=True)
sys.stdin.readline()
unread = array.array('i', [0])
while unread[0] < 65536:
    fcntl.ioctl(other, termios.FIONREAD, unread)
print('unread', flush=True)
call = sys.stdin.readline().strip()
busy.setblocking(False)
try:
    while True: busy.send(b'x')
except BlockingIOError: pass
print('full', flush=True)
try:
    if call == 'recv': other.recv(65536)
    if call == 'shutdown': other.shutdown(socket.SHUT_WR)
    if call == 'setsockopt': other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
except OSError: pass
print('done', flush=True)
";

/// The ring of messages is full, and a call has a message for the NIC, when all of Baton is killed: it ends, too.
#[test]
fn a_call_that_waits_for_room_in_a_ring_ends_with_baton() {
    for call in ["recv", "shutdown", "setsockopt"] {
        let bed = hosts(TestbedSettings::default());
        let agent = bed.tool().expect("a tool").statistics().expect("statistics").agent_process;
        let keeper = process::parent(agent).expect("the keeper");
        let ((mut program, mut lines), mut peers) = start_with_peers::<2>(&bed, FULL, &[]);
        let mut input = program.stdin.take().expect("its input");
        let mut says = |wanted: &str| {
            let mut line = String::new();
            lines.read_line(&mut line).expect("a line");
            assert_eq!(line, wanted, "{call}");
        };
        peers[1].write_all(&[1; 65536]).expect("sent");
        input.write_all(b"\n").expect("a line");
        says("unread\n");
        let nic = hold_nic(&bed);
        writeln!(input, "{call}").expect("a line");
        says("full\n");
        kill_at_once(&[keeper, agent]);
        drop(nic);
        let mut line = String::new();
        let end = in_time(call, move || lines.read_line(&mut line).map(|_| line));
        assert_eq!(end.expect("a line"), "done\n", "{call}");
        let _ = program.kill();
        program.wait().expect("its end");
    }
}

/// Prints how long each of some calls takes, in milliseconds, then forks; parent and child use what they have.
const CALLS: &str = "
import os, socket, sys, time
where = (sys.argv[1], int(sys.argv[2]))
def exchange(one):
    one.sendall(b'y')
    assert one.recv(1) == b'y'
some = [socket.create_connection(where) for _ in range(8)]
for one in some:
    exchange(one)
print('ready', flush=True)
sys.stdin.readline()
def call(name, act):
    begun = time.monotonic()
    act()
    print(name, round(1000 * (time.monotonic() - begun)), flush=True)
call('exchange', lambda: exchange(some[0]))
call('option', lambda: some[0].setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))
call('close', some[1].close)
call('close', some[2].close)
call('connect', lambda: some.append(socket.create_connection(where)))
call('exchange', lambda: exchange(some[-1]))
call('close', some[-1].close)
call('shutdown', lambda: some[3].shutdown(socket.SHUT_WR))
assert some[3].recv(1) == b''
call('exchange', lambda: exchange(some[4]))
print('forks', flush=True)
child = os.fork()
exchange(some[5] if child else some[6])
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
exchange(some[6])
print('forked', flush=True)
";

/// An echo server on host B, for many connections.
fn echoes(bed: &Testbed) -> SocketAddr {
    let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 0))).expect("a listener");
    let at = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.expect("a connection");
            std::thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
        }
    });
    at
}

/// Runs [`CALLS`] and returns the milliseconds of each call. Under Baton a debugger stops the agent until the program
/// forks, because fork restores the program's connections, which the agent does.
fn times_of_calls(bed: &Testbed, at: SocketAddr, with_baton: bool) -> Vec<(String, u64)> {
    let (mut program, lines) = start_python(bed, CALLS, at, with_baton);
    let mut lines = lines.lines().map(|line| line.expect("text"));
    let on_nic =
        || bed.tool().expect("a tool").connections().expect("a list").iter().filter(|one| one.place == Place::Nic).count();
    let agent = with_baton.then(|| {
        wait_until("its connections are on the NIC", || on_nic() == 8);
        hold_agent(bed)
    });
    program.stdin.take().expect("its input").write_all(b"\n").expect("a line");
    let (lines, times) = in_time("its calls", move || {
        let times = lines.by_ref().take_while(|line| line != "forks").map(|line| {
            let (name, time) = line.split_once(' ').expect("name and time");
            (name.to_owned(), time.parse().expect("a number"))
        });
        let times = times.collect();
        (lines, times)
    });
    drop(agent);
    let mut lines = lines;
    assert_eq!(in_time("its fork", move || lines.next()).as_deref(), Some("forked"));
    assert!(in_time("its end", move || program.wait()).expect("its end").success());
    times
}

/// While the agent is stopped, calls that do not need it take at most a second longer than natively, all together: the
/// library waits for the agent once. No data is lost.
#[test]
fn a_programs_calls_do_without_an_agent_that_is_held() {
    let bed = hosts(TestbedSettings::default());
    let at = echoes(&bed);
    let native = times_of_calls(&bed, at, false);
    let here = times_of_calls(&bed, at, true);
    println!("natively {native:?}, with the agent held {here:?}");
    let all = |times: &[(String, u64)]| times.iter().map(|(_, time)| time).sum::<u64>();
    assert_eq!(here.len(), native.len());
    // Waits: 0.8 s for the agent, the first time; a second is promised, and the machine may be busy.
    assert!(all(&here) < all(&native) + 3_000, "{here:?}, natively {native:?}");
    wait_until("nothing is left", || listed(&bed) == 0);
}

/// Closes a connection when the test sends it a line.
const CLOSES: &str = "
import socket, sys
one = socket.create_connection((sys.argv[1], int(sys.argv[2])))
one.sendall(b'y')
assert one.recv(1) == b'y'
print('ready', flush=True)
sys.stdin.readline()
one.close()
print('closed', flush=True)
sys.stdin.readline()
";

/// The keeper has descriptors of all connections, and is stopped: a connection that its program closes ends for its
/// peer nevertheless.
#[test]
fn a_stopped_keeper_holds_up_no_end_of_a_connection() {
    const SIGSTOP: i32 = 19;
    const SIGCONT: i32 = 18;
    let bed = hosts(TestbedSettings::default());
    let ((mut program, mut lines), [mut peer]) = start_with_peers::<1>(&bed, CLOSES, &[]);
    let agent = bed.tool().expect("a tool").statistics().expect("statistics").agent_process;
    let keeper = process::parent(agent).expect("a keeper");
    process::signal(keeper, SIGSTOP).expect("a signal");
    program.stdin.as_mut().expect("its input").write_all(b"\n").expect("a line");
    let mut line = String::new();
    lines.read_line(&mut line).expect("a line");
    peer.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let end = peer.read(&mut [0]);
    process::signal(keeper, SIGCONT).expect("a signal");
    assert_eq!((line.as_str(), end.expect("the end")), ("closed\n", 0));
    drop(program.stdin.take());
    assert!(in_time("its end", move || program.wait()).expect("its end").success());
}

/// A program that gives its socket a port, waits for the peer's end, closes, and gives the next one the same port.
const PORT: &str = "
import socket, sys
def bound(port):
    one = socket.socket()
    one.bind(('0.0.0.0', port))
    return one
probe = bound(0)
port = probe.getsockname()[1]
probe.close()
one = bound(port)
one.connect((sys.argv[1], int(sys.argv[2])))
one.sendall(b'y')
assert one.recv(1) == b'y'
print('ready', flush=True)
sys.stdin.readline()
assert one.recv(1) == b''
one.close()
print('closed', flush=True)
bound(port)
print('bound', flush=True)
sys.stdin.readline()
";

/// The keeper closes its descriptor of a closed socket late: the socket that then binds its port waits for that.
#[test]
fn a_port_that_is_free_late_is_waited_for() {
    const SIGSTOP: i32 = 19;
    const SIGCONT: i32 = 18;
    let bed = hosts(TestbedSettings::default());
    let ((mut program, lines), [peer]) = start_with_peers::<1>(&bed, PORT, &[]);
    let agent = bed.tool().expect("a tool").statistics().expect("statistics").agent_process;
    let keeper = process::parent(agent).expect("a keeper");
    drop(peer);
    process::signal(keeper, SIGSTOP).expect("a signal");
    program.stdin.as_mut().expect("its input").write_all(b"\n").expect("a line");
    let mut lines = lines.lines();
    let closed = lines.next();
    process::signal(keeper, SIGCONT).expect("a signal");
    assert_eq!(closed.expect("a line").expect("a line"), "closed");
    assert_eq!(lines.next().expect("a line").expect("a line"), "bound");
    drop(program.stdin.take());
    assert!(in_time("its end", move || program.wait()).expect("its end").success());
}
