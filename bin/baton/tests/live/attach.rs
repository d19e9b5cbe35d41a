//! `baton attach`: programs that run already, on the machine's own loopback device, in a namespace of their own.

use crate::common::{until_moved, wait_until};
use crate::compiled::{build, compile};
use crate::scratch::{Scratch, agent_socket, script, text};
use baton_client::tool::Tool;
use baton_fuzz::setting;
use baton_linux::freeze::Frozen;
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_protocol::program::Place;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// An attacher, in the namespace of its program.
pub fn attach(host: &Namespace, scratch: &Scratch, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["attach", "--log", &scratch.file("log"), "--json"]).args(arguments);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
    host.spawn(&mut command).expect("baton")
}

/// The summary that it prints at its end.
fn summary(attacher: Child, scratch: &Scratch) -> Value {
    let ended = attacher.wait_with_output().expect("its output");
    let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
    assert!(ended.status.success() && log.is_empty(), "{}{log}", text(&ended.stderr));
    serde_json::from_slice(&ended.stdout).expect("JSON")
}

/// Both ends of connections move while every byte is compared, in every way to wait for a socket. Those of blocking
/// sockets stay.
#[test]
fn running_programs_do_not_notice() {
    for way in ["threads", "select", "poll", "epoll", "edge", "asyncio"] {
        for family in ["4", "6"] {
            let scratch = Scratch::new(&format!("attach-{way}{family}"));
            let host = Namespace::new().expect("a namespace");
            let mut program = Command::new("python3");
            program.args([&script("itself.py"), "-", family, way]).stdin(Stdio::piped()).stderr(Stdio::piped());
            let mut program = host.spawn(&mut program).expect("python3");
            let report = scratch.file("report");
            let attacher = attach(&host, &scratch, &["--flip", "5..50", "--flip-report", &report, &program.id().to_string()]);
            if way == "threads" {
                let stay = |list: Vec<baton_protocol::program::ConnectionInfo>| {
                    list.len() == 6 && list.iter().all(|one| one.reason.contains("blocking"))
                };
                wait_until("connections in blocking mode stay", || stay(listed(&scratch)));
            } else {
                until_moved(|| agent_socket(&scratch), 6, 10);
            }
            drop(program.stdin.take());
            let ended = program.wait_with_output().expect("the program");
            assert!(ended.status.success(), "{way}{family}: {}", text(&ended.stderr));
            let summary = summary(attacher, &scratch);
            assert_eq!(summary["connections"], 6, "{way}{family}: {summary}");
            if way == "threads" {
                assert_eq!((&summary["moves"], &summary["stayed"]["blocking socket"]), (&0.into(), &6.into()), "{summary}");
                continue;
            }
            let report: Value = serde_json::from_str(&std::fs::read_to_string(report).expect("a report")).expect("JSON");
            let least =
                report["connections_by_moves"].as_object().expect("counts").keys().filter_map(|key| key.parse::<u32>().ok());
            assert!(least.min() >= Some(10), "{way}{family}: a connection hardly moved: {report}");
            assert_eq!((&report["resets"], &report["errors"]), (&0.into(), &0.into()), "{report}");
        }
    }
}

/// A server whose connections are on the NIC as soon as they carry a byte.
struct Server {
    host: Namespace,
    scratch: Scratch,
    program: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    port: u16,
    attacher: Option<Child>,
}

impl Server {
    fn start(name: &str) -> Server {
        let scratch = Scratch::new(name);
        let host = Namespace::new().expect("a namespace");
        let mut command = Command::new("python3");
        command.arg(script("closes.py")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = host.spawn(&mut command).expect("python3");
        let (input, output) = (program.stdin.take().expect("its input"), program.stdout.take().expect("its output"));
        let (input, output) = (Some(input), BufReader::new(output));
        let mut server = Server { host, scratch, program, input, output, port: 0, attacher: None };
        server.port = server.line().parse().expect("a port");
        server.attacher = Some(attach(&server.host, &server.scratch, &["--after", "0", &server.program.id().to_string()]));
        server.wait_for(|server| agent_socket(&server.scratch).is_some());
        server
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim().to_string()
    }

    fn wait_for(&mut self, mut what: impl FnMut(&mut Server) -> bool) {
        wait_until("it comes about", || what(self));
    }

    fn connections(&self) -> Vec<baton_protocol::program::ConnectionInfo> {
        let connect = || Tool::connect(&agent_socket(&self.scratch)?).ok();
        connect().map(|mut tool| tool.connections().expect("a list")).unwrap_or_default()
    }

    /// A client's connection, whose server end is on the NIC.
    fn connection(&mut self) -> TcpStream {
        let port = self.port;
        let client = self.host.run(move || TcpStream::connect(("127.0.0.1", port))).expect("a connection");
        client.set_read_timeout(Some(Duration::from_secs(10))).expect("a time-out");
        let mut echoed = [0; 5];
        self.wait_for(|server| {
            (&client).write_all(b"hello").expect("sent");
            (&client).read_exact(&mut echoed).expect("an echo");
            server.connections().iter().any(|info| info.place == Place::Nic)
        });
        client
    }

    /// A closed connection must leave nothing behind.
    fn expect_nothing_left(&mut self) {
        self.wait_for(|server| server.connections().is_empty());
    }

    fn end(mut self) -> Value {
        self.input = None;
        let _ = self.program.kill();
        let _ = self.program.wait();
        summary(self.attacher.take().expect("an attacher"), &self.scratch)
    }
}

impl Drop for Server {
    /// Ends the programs even if the test fails.
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
        if let Some(mut attacher) = self.attacher.take() {
            let _ = attacher.kill();
            let _ = attacher.wait();
        }
    }
}

fn everything(mut client: &TcpStream) -> (usize, Option<std::io::ErrorKind>) {
    let (mut total, mut piece) = (0, [0; 65536]);
    loop {
        match client.read(&mut piece) {
            Ok(0) => return (total, None),
            Ok(got) => total += got,
            Err(error) => return (total, Some(error.kind())),
        }
    }
}

/// Closing a socket whose connection is on the NIC means what it always meant, and causes no later event.
#[test]
fn closing_on_the_nic_is_close() {
    let mut server = Server::start("attach-close");
    for _ in 0..5 {
        let client = server.connection();
        (&client).write_all(b"close\n").expect("sent");
        assert_eq!(everything(&client), (100_000, None), "all that was sent, then a FIN");
        assert_eq!(server.line(), "closed");
        drop(client);
        server.expect_nothing_left();

        let client = server.connection();
        (&client).write_all(b"linger\n").expect("sent");
        assert_eq!(everything(&client), (0, Some(std::io::ErrorKind::ConnectionReset)));
        assert_eq!(server.line(), "closed");
        server.expect_nothing_left();

        let client = server.connection();
        (&client).write_all(b"unread\n").expect("sent");
        assert_eq!(server.line(), "reading no more");
        (&client).write_all(b"nobody reads this").expect("sent");
        server.wait_for(|server| server.connections().iter().any(|info| info.detail.unread == 17));
        server.input.as_mut().expect("its input").write_all(b"\n").expect("written");
        assert_eq!(everything(&client), (0, Some(std::io::ErrorKind::ConnectionReset)), "unread data makes a close a reset");
        assert_eq!(server.line(), "closed");
        server.expect_nothing_left();
    }
    // If epoll had reported a closed socket, the server would have ended.
    drop(server.connection());
    let summary = server.end();
    assert!(summary["moves"].as_u64() >= Some(16), "{summary}");
}

/// Either side shuts down one half; the other half goes on.
#[test]
fn halves_are_shut_down() {
    let mut server = Server::start("attach-halves");
    let client = server.connection();
    (&client).write_all(b"shutdown\n").expect("sent");
    assert_eq!(everything(&client), (100_000, None));
    client.shutdown(Shutdown::Write).expect("shut down");
    assert_eq!(server.line(), "closed");
    server.expect_nothing_left();
    let client = server.connection();
    client.shutdown(Shutdown::Write).expect("shut down");
    assert_eq!(everything(&client), (0, None));
    assert_eq!(server.line(), "closed");
    server.expect_nothing_left();
    // The connection ends before its program closes the socket, so the close is no event.
    let client = server.connection();
    (&client).write_all(b"late\n").expect("sent");
    assert_eq!(everything(&client), (100_000, None));
    client.shutdown(Shutdown::Write).expect("shut down");
    server.expect_nothing_left();
    server.input.as_mut().expect("its input").write_all(b"\n").expect("written");
    assert_eq!(server.line(), "closed");
    server.end();
}

/// A program that ends still sends what it has written, and its FIN; a program that is detached from goes on.
#[test]
fn ends_are_orderly() {
    let mut server = Server::start("attach-exit");
    let client = server.connection();
    (&client).write_all(b"exit\n").expect("sent");
    assert_eq!(everything(&client), (100_000, None));
    let summary = server.end();
    assert_eq!(summary["connections"], 1, "{summary}");

    let mut server = Server::start("attach-detach");
    let client = server.connection();
    let socket = agent_socket(&server.scratch).expect("a socket");
    let mut detach = Command::new(env!("CARGO_BIN_EXE_baton"));
    detach.arg("detach").arg("--socket").arg(socket).arg(server.program.id().to_string());
    assert!(detach.status().expect("baton").success());
    let mut echoed = [0; 5];
    (&client).write_all(b"still").expect("sent");
    (&client).read_exact(&mut echoed).expect("an echo");
    assert_eq!(&echoed, b"still");
    server.end();
}

/// Nobody reads any more what an attacher prints: it attaches and detaches all the same.
#[test]
fn an_attacher_outlives_its_reader() {
    let scratch = Scratch::new("attach-unread");
    let host = Namespace::new().expect("a namespace");
    let port = echo(&host, 1);
    let socket = OwnedFd::from(host.run(|| TcpStream::connect(("127.0.0.1", port))).expect("a connection"));
    let mut sleeper = host.spawn(Command::new("sleep").arg("1000").stdin(socket)).expect("sleep");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["attach", "--log", &scratch.file("log"), &sleeper.id().to_string()]);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(writer).stderr(Stdio::piped());
    let attacher = host.spawn(&mut command).expect("baton");
    drop(command);
    wait_until("it is attached", || !listed(&scratch).is_empty());
    process::signal(sleeper.id(), libc::SIGKILL).expect("our child");
    sleeper.wait().expect("our child");
    let ended = attacher.wait_with_output().expect("its output");
    assert!(ended.status.success(), "{:?}: {}", ended.status, text(&ended.stderr));
}

/// The error for a target that cannot be attached to says why, and nothing is left behind.
#[test]
fn refusals_are_explained() {
    let scratch = Scratch::new("attach-refusals");
    let host = Namespace::new().expect("a namespace");
    let refused = |arguments: &[&str]| {
        let ended = attach(&host, &scratch, arguments).wait_with_output().expect("its output");
        assert_eq!(ended.status.code(), Some(2), "{arguments:?}");
        text(&ended.stderr)
    };
    assert!(refused(&["4194305"]).contains("there is no process 4194305"));
    assert!(refused(&["--port", "9"]).contains("no process here listens at port 9"));
    assert!(refused(&["--cgroup", "/no/such/group"]).contains("no process is in control group"));
    // A process that is traced already cannot be attached to. (This test's own process is traced by nobody.)
    let mut sleeper = Command::new("sleep").arg("30").spawn().expect("sleep");
    let frozen = baton_linux::freeze::Frozen::freeze(&[sleeper.id()]).expect("frozen");
    let said = refused(&[&sleeper.id().to_string()]);
    assert!(said.contains("cannot attach to"), "{said}");
    drop(frozen);
    process::signal(sleeper.id(), libc::SIGKILL).expect("our child");
    sleeper.wait().expect("our child");
}

/// A program that has set the least receive buffer there is, and reads in small pieces without ever answering.
const READER: &str = "
import select
import socket
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
listener.bind(('127.0.0.1', 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
connection = listener.accept()[0]
connection.setblocking(False)
read = 0
piece = b'begin'
while piece:
    try:
        piece = connection.recv(100)
        read += len(piece)
    except BlockingIOError:
        select.select([connection], [], [])
print(read, flush=True)
";

/// What such a program reads opens the window again, though few of its reads are reported.
#[test]
fn small_reads_open_a_small_window() {
    let scratch = Scratch::new("attach-reader");
    let host = Namespace::new().expect("a namespace");
    let mut program = Command::new("python3");
    program.args(["-c", READER]).stdout(Stdio::piped());
    let mut program = Killed(host.spawn(&mut program).expect("python3"));
    let output = BufReader::new(program.0.stdout.take().expect("its output"));
    let mut lines = output.lines().map(|line| line.expect("a line"));
    let port: u16 = lines.next().and_then(|line| line.parse().ok()).expect("a port");
    let mut client = host.run(move || TcpStream::connect(("127.0.0.1", port))).expect("a connection");
    client.set_write_timeout(Some(Duration::from_secs(10))).expect("a time-out");
    let attacher = attach(&host, &scratch, &["--after", "0", &program.0.id().to_string()]);
    let deadline = Instant::now() + Duration::from_secs(40);
    let place = || {
        let mut tool = Tool::connect(&agent_socket(&scratch)?).ok()?;
        Some(tool.connections().ok()?.first()?.place)
    };
    // More than the queues between hold, so that a window that stays closed is noticed here.
    let (mut sent, mut on_nic, piece) = (0, 0, [7; 65536]);
    while on_nic < 8 << 20 {
        assert!(Instant::now() < deadline, "{sent} bytes sent, {on_nic} of them on the NIC");
        client.write_all(&piece).expect("the window opens again");
        sent += piece.len();
        on_nic += if place() == Some(Place::Nic) { piece.len() } else { 0 };
    }
    client.shutdown(Shutdown::Write).expect("shut down");
    assert_eq!(lines.next().as_deref(), Some(sent.to_string().as_str()));
    assert!(program.0.wait().expect("the program").success());
    assert_eq!(summary(attacher, &scratch)["connections"], 1);
}

/// An attacher keeps no descriptors of processes that have ended, of which a server may have one for each client: it
/// would run out of them, and find nothing of a later process with the same number.
#[test]
fn an_attacher_keeps_nothing_of_processes_that_have_ended() {
    let scratch = Scratch::new("attach-processes");
    let host = Namespace::new().expect("a namespace");
    let mut program = Command::new("python3");
    program.arg(script("process_each.py")).stdout(Stdio::piped());
    let mut program = Killed(host.spawn(&mut program).expect("python3"));
    let mut line = String::new();
    BufReader::new(program.0.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    let port: u16 = line.trim().parse().expect("a port");
    let attacher = attach(&host, &scratch, &["--after", "0", &program.0.id().to_string()]);
    wait_until("it attaches", || agent_socket(&scratch).is_some());
    for _ in 0..8 {
        let mut client = host.run(move || TcpStream::connect(("127.0.0.1", port))).expect("a connection");
        client.set_read_timeout(Some(Duration::from_secs(10))).expect("a time-out");
        let mut echoed = [0; 5];
        wait_until("its connection is found", || {
            client.write_all(b"hello").expect("sent");
            client.read_exact(&mut echoed).expect("an echo");
            listed(&scratch).len() == 1
        });
        drop(client);
        wait_until("its connection is forgotten", || listed(&scratch).is_empty());
    }
    let descriptors = format!("/proc/{}/fd", attacher.id());
    let of_processes = || {
        let all = std::fs::read_dir(&descriptors).expect("its descriptors").flatten();
        all.filter_map(|entry| std::fs::read_link(entry.path()).ok()).filter(|to| to.to_string_lossy().contains("pidfd")).count()
    };
    // Besides that of the program, one may be in use just now.
    wait_until("those of processes that have ended are left", || of_processes() <= 2);
    drop(program);
    assert_eq!(summary(attacher, &scratch)["connections"], 8);
}

/// How long programs run attached, in seconds: BATON_ATTACH_SECONDS, for a long comparison.
fn seconds() -> u64 {
    setting("BATON_ATTACH_SECONDS", 3)
}

/// A server that sends back what it gets, to so many clients. Returns its port; it ends with its clients.
pub fn echo(host: &Namespace, clients: usize) -> u16 {
    let listener = host.run(|| TcpListener::bind("127.0.0.1:0")).expect("a listener");
    let port = listener.local_addr().expect("its address").port();
    std::thread::spawn(move || {
        for socket in listener.incoming().take(clients).flatten() {
            std::thread::spawn(move || std::io::copy(&mut &socket, &mut &socket));
        }
    });
    port
}

/// What `baton ls` says of the connections.
pub fn listed(scratch: &Scratch) -> Vec<baton_protocol::program::ConnectionInfo> {
    let connect = || Tool::connect(&agent_socket(scratch)?).ok();
    connect().and_then(|mut tool| tool.connections().ok()).unwrap_or_default()
}

/// Asks over a connection, in pieces of all sizes, until the end; every byte that comes back is compared. Returns the
/// number of questions.
fn ask_until(end: Instant, client: &TcpStream, seed: u64) -> u64 {
    client.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
    let (mut questions, mut at) = (0, 0);
    while questions < 3 || Instant::now() < end {
        let mut piece = vec![0; 1 + (questions * 7919 % 200_000) as usize];
        baton_sim::stream::fill(seed, at, &mut piece);
        let mut back = vec![0; piece.len()];
        std::thread::scope(|scope| {
            scope.spawn(|| (&mut &*client).write_all(&piece).expect("sent"));
            (&mut &*client).read_exact(&mut back).expect("all of it comes back");
        });
        assert!(back == piece, "other bytes in question {questions}");
        at += piece.len() as u64;
        questions += 1;
    }
    questions
}

/// Go copies between connections by splice(2), which does not find what comes by the map of sockets: its connections go
/// back, and stay.
#[test]
fn a_proxy_that_splices_is_left_in_the_kernel() {
    const CLIENTS: usize = 3;
    let scratch = Scratch::new("attach-splice");
    let host = Namespace::new().expect("a namespace");
    let binary = scratch.file("proxy");
    let mut compiler = Command::new("go");
    // Go's library is compiled with it, once for all runs. What it calls does not depend on how well that is optimised.
    compiler.args(["build", "-gcflags=all=-N -l", "-o", &binary, &script("proxy.go")]).env("CGO_ENABLED", "0");
    compiler.env("GOCACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/go")).env("GOFLAGS", "-mod=mod");
    let compiled = match compiler.output() {
        Ok(compiled) => compiled,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return eprintln!("skipped: go: {error}");
        }
    };
    assert!(compiled.status.success(), "{}", text(&compiled.stderr));
    let backend = echo(&host, CLIENTS);
    let mut program = Command::new(&binary);
    program.arg(format!("127.0.0.1:{backend}")).stdout(Stdio::piped());
    let mut program = Killed(host.spawn(&mut program).expect("the proxy"));
    let mut line = String::new();
    BufReader::new(program.0.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    let port: u16 = line.trim().parse().expect("a port");
    let clients: Vec<TcpStream> =
        (0..CLIENTS).map(|_| host.run(move || TcpStream::connect(("127.0.0.1", port))).expect("a connection")).collect();
    let attacher = attach(&host, &scratch, &["--after", "0", &program.0.id().to_string()]);
    let process = program.0.id();
    let of_it = || listed(&scratch).into_iter().filter(|info| info.process == process).collect::<Vec<_>>();
    wait_until("nothing is attached", || of_it().len() == 2 * CLIENTS);
    let end = Instant::now() + Duration::from_secs(seconds());
    std::thread::scope(|scope| {
        for (number, client) in clients.iter().enumerate() {
            scope.spawn(move || ask_until(end, client, number as u64));
        }
    });
    let stay = |info: &baton_protocol::program::ConnectionInfo| info.place == Place::Kernel && info.reason == "splice";
    wait_until("they do not stay for their reason", || of_it().len() == 2 * CLIENTS && of_it().iter().all(stay));
    drop(clients);
    drop(program);
    let summary = summary(attacher, &scratch);
    assert_eq!(summary["connections"], 2 * CLIENTS, "{summary}");
}

/// A client in C that waits in recv while its children end and timers expire, with SA_RESTART: as in the kernel no call
/// fails.
#[test]
fn a_blocking_client_with_signals_does_not_notice() {
    let scratch = Scratch::new("attach-signals");
    let host = Namespace::new().expect("a namespace");
    let binary = build(&scratch, "cc", "signals", "signals.c", &["-O1", "-Wall", "-Werror"]);
    let backend = echo(&host, 1);
    let mut program = Command::new(&binary);
    program.arg(backend.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut program = host.spawn(&mut program).expect("the client");
    let attacher = attach(&host, &scratch, &["--after", "0", &program.id().to_string()]);
    wait_until("it does not say why it stays", || listed(&scratch).iter().any(|info| info.reason == "blocking socket"));
    let mut input = program.stdin.take().expect("its input");
    input.write_all(format!("{}\n", seconds()).as_bytes()).expect("written");
    // As a shell's Ctrl-Z and fg.
    process::signal(program.id(), libc::SIGSTOP).expect("our child");
    process::signal(program.id(), libc::SIGCONT).expect("our child");
    let ended = program.wait_with_output().expect("the client");
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let figures: Vec<u64> = text(&ended.stdout).split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(matches!(figures[..], [rounds, alarms, children] if rounds > 10 && alarms > 10 && children > 10), "{figures:?}");
    let summary = summary(attacher, &scratch);
    assert_eq!((&summary["moves"], &summary["stayed"]["blocking socket"]), (&0.into(), &1.into()), "{summary}");
}

/// A client in blocking mode that sends back what it receives.
const SENDS_BACK: &str = "
import socket, sys
client = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
while piece := client.recv(100):
    client.sendall(piece)
";

/// A debugger stops a client that waits in recv, lets it wait on, stops it again and leaves, as gdb does and as strace
/// does: as in the kernel the call goes on.
#[test]
fn a_blocking_client_does_not_notice_a_debugger() {
    let scratch = Scratch::new("attach-debugger");
    let host = Namespace::new().expect("a namespace");
    let debugger = compile("debugger", &scratch);
    let listener = host.run(|| TcpListener::bind("127.0.0.1:0")).expect("a listener");
    let port = listener.local_addr().expect("its address").port();
    let mut command = Command::new("python3");
    let mut program = Killed(host.spawn(command.args(["-c", SENDS_BACK, &port.to_string()])).expect("python3"));
    let (mut server, _) = listener.accept().expect("its connection");
    server.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
    let process = program.0.id().to_string();
    let attacher = attach(&host, &scratch, &["--after", "0", &process]);
    wait_until("it is attached to", || {
        listed(&scratch).iter().any(|info| info.place == Place::Nic || info.reason == "blocking socket")
    });
    for way in ["attach", "seize"].repeat(5) {
        let mut command = Command::new(&debugger);
        let mut debugs = host.spawn(command.args([process.as_str(), way])).expect("the debugger");
        assert!(debugs.wait().expect("its end").success(), "{way}");
        let mut back = [0; 5];
        let answered = server.write_all(b"hello").and_then(|()| server.read_exact(&mut back));
        answered.unwrap_or_else(|error| panic!("the client does not go on after {way}: {error}"));
        assert_eq!(&back, b"hello");
    }
    drop(server);
    assert!(program.0.wait().expect("the client").success());
    assert_eq!(summary(attacher, &scratch)["connections"], 1);
}

/// A Python program that echoes each line of its standard input. On the line "connect" it first opens a connection to
/// the port in its first argument, exchanges a byte, and makes the socket non-blocking.
/// Opens a connection at the line that asks for it, exchanges a byte, and prints each line when it is done.
pub const ANSWERS: &str = "
import socket, sys
kept = []
for line in sys.stdin:
    if line == 'connect\\n':
        kept.append(socket.create_connection(('127.0.0.1', int(sys.argv[1]))))
        kept[-1].sendall(b'x')
        kept[-1].recv(1)
        kept[-1].setblocking(False)
    print(line, end='', flush=True)
";

/// A debugger stops the agent, then an attached program opens a connection. The attacher stops the program to register
/// the connection; it lets the program run again after 0.8 s without an answer, and the connection moves to the NIC
/// once the agent runs again.
#[test]
fn an_agent_that_is_held_does_not_stop_an_attached_program() {
    let scratch = Scratch::new("attach-held");
    let host = Namespace::new().expect("a namespace");
    let port = echo(&host, 2);
    let mut command = Command::new("python3");
    command.args(["-c", ANSWERS, &port.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = host.spawn(&mut command).expect("python3");
    let mut input = program.stdin.take().expect("its input");
    let mut output = BufReader::new(program.stdout.take().expect("its output"));
    let mut tell = |line: &str| {
        let begun = Instant::now();
        writeln!(input, "{line}").expect("it reads");
        let mut answer = String::new();
        output.read_line(&mut answer).expect("its answer");
        assert_eq!(answer.trim_end(), line);
        begun.elapsed()
    };
    tell("connect");
    let attacher = attach(&host, &scratch, &["--after", "0", &program.id().to_string()]);
    let on_nic = || match agent_socket(&scratch) {
        Some(_) => listed(&scratch).iter().filter(|one| one.place == Place::Nic).count(),
        None => 0,
    };
    wait_until("its connection is on the NIC", || on_nic() == 1);
    let socket = agent_socket(&scratch).expect("an agent");
    let agent = Tool::connect(&socket).expect("a tool").statistics().expect("statistics").agent_process;
    let (held, is_held) = std::sync::mpsc::channel();
    let debugger = std::thread::spawn(move || {
        let frozen = Frozen::freeze(&[agent]).expect("a tracer");
        held.send(()).expect("it waits");
        // Waits: much longer than the limit of 0.8 s, so that a program that waits for the agent exceeds the bound
        // below.
        std::thread::sleep(Duration::from_secs(5));
        drop(frozen);
    });
    is_held.recv().expect("it is held");
    let mut longest = tell("connect");
    while !debugger.is_finished() {
        longest = longest.max(tell("go on"));
    }
    debugger.join().expect("no panic");
    println!("it stood still for {longest:?}");
    // Waits: 0.8 s for the agent.
    assert!(longest < Duration::from_secs(3), "it stood still for {longest:?}");
    wait_until("its connections are on the NIC", || on_nic() == 2);
    drop(input);
    assert!(program.wait().expect("the program").success());
    println!("{}", summary(attacher, &scratch));
}

/// A Python program that echoes lines, and sets its socket to blocking or non-blocking mode on request.
const MODES: &str = "
import select
import socket
import sys
import threading
listener = socket.socket()
listener.bind(('127.0.0.1', 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
connection = listener.accept()[0]
connection.setblocking(False)
def obey():
    for line in sys.stdin:
        connection.setblocking(line == 'blocking\\n')
threading.Thread(target=obey, daemon=True).start()
while True:
    select.select([connection], [], [])
    try:
        piece = connection.recv(100)
    except BlockingIOError:
        continue
    if not piece:
        break
    connection.sendall(piece)
";

/// A connection leaves the NIC when its socket becomes blocking, and comes back when it is not any more.
#[test]
fn a_connection_follows_the_mode_of_its_socket() {
    let scratch = Scratch::new("attach-modes");
    let host = Namespace::new().expect("a namespace");
    let mut program = Command::new("python3");
    program.args(["-c", MODES]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = Killed(host.spawn(&mut program).expect("python3"));
    let mut input = program.0.stdin.take().expect("its input");
    let mut line = String::new();
    BufReader::new(program.0.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    let port: u16 = line.trim().parse().expect("a port");
    let mut client = host.run(move || TcpStream::connect(("127.0.0.1", port))).expect("a connection");
    client.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
    let attacher = attach(&host, &scratch, &["--after", "0", &program.0.id().to_string()]);
    let mut expect = |place: Place| {
        let mut echoed = [0; 5];
        wait_until(&format!("it is not at {place:?}"), || {
            client.write_all(b"hello").expect("sent");
            client.read_exact(&mut echoed).expect("an echo");
            listed(&scratch).iter().any(|info| info.place == place && (place == Place::Nic || info.reason == "blocking socket"))
        });
    };
    expect(Place::Nic);
    for _ in 0..3 {
        input.write_all(b"blocking\n").expect("written");
        expect(Place::Kernel);
        input.write_all(b"not\n").expect("written");
        expect(Place::Nic);
    }
    drop(client);
    assert!(program.0.wait().expect("the program").success());
    summary(attacher, &scratch);
}

/// A running program's MPTCP connection stays in the kernel, and the list says so.
#[test]
fn an_mptcp_connection_is_listed_with_its_program() {
    const PROGRAM: &str = "
import socket, sys
listener, client = [socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262) for _ in range(2)]
listener.bind(('127.0.0.1', 0))
listener.listen()
client.connect(listener.getsockname())
server = listener.accept()[0]
for end in (client, server):
    end.setblocking(False)
print('there', flush=True)
sys.stdin.read()
";
    let scratch = Scratch::new("attach-mptcp");
    let host = Namespace::new().expect("a namespace");
    let mut program = Command::new("python3");
    program.args(["-c", PROGRAM]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = Killed(host.spawn(&mut program).expect("python3"));
    let mut line = String::new();
    BufReader::new(program.0.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    assert_eq!(line, "there\n");
    let attacher = attach(&host, &scratch, &["--after", "0", &program.0.id().to_string()]);
    wait_until("a line about it", || {
        let mut list = Command::new(env!("CARGO_BIN_EXE_baton"));
        let listed = list.arg("ls").env_remove("BATON_SOCKET").output().expect("baton");
        let line = format!("python3/{} has connections that stay in the kernel (asked 2 times): it is an MPTCP", program.0.id());
        text(&listed.stdout).contains(&line)
    });
    drop(program.0.stdin.take());
    assert!(program.0.wait().expect("the program").success());
    assert_eq!(summary(attacher, &scratch)["connections"], 0);
}

/// A program that is killed when this is dropped.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
