//! `baton run`: unmodified programs, on the loopback device, in a network namespace of their own.

use crate::awaited::{is_on_nic, python, run_awaited};
use crate::common::{until_moved, wait_until};
use crate::compiled::build;
use crate::scratch::{Scratch, agent_socket, script, text};
use baton_client::tool::Tool;
use baton_linux::control::Listener;
use baton_linux::events::{Poller, Trigger};
use baton_linux::namespace::Namespace;
use baton_protocol::program::{Answer, Reply, Request};
use serde_json::Value;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// `baton run` with these arguments, in a network namespace of its own, and with its temporary files in `scratch`.
fn baton_run(scratch: &Scratch, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("run").args(["--log", &scratch.file("log")]).args(arguments);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
    Namespace::new().expect("a namespace").spawn(&mut command).expect("baton").wait_with_output().expect("its output")
}

/// Runs a program under random moves, until each of its connections has moved so often, and then ends it. Returns its
/// report, after it has ended with success.
fn flip(name: &str, program: &[&str], connections: usize, moves: u32) -> Value {
    let scratch = Scratch::new(name);
    let report = scratch.file("report");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("run").args(["--log", &scratch.file("log"), "--flip", "1..20", "--flip-report", &report, "--"]).args(program);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Namespace::new().expect("a namespace").spawn(&mut command).expect("baton");
    until_moved(|| agent_socket(&scratch), connections, moves);
    drop(child.stdin.take());
    let ran = child.wait_with_output().expect("its output");
    let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
    assert!(ran.status.success() && log.is_empty(), "{program:?}: {}{}{log}", text(&ran.stdout), text(&ran.stderr));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(report).expect("a report")).expect("JSON");
    assert_eq!((&report["resets"], &report["errors"]), (&0.into(), &0.into()), "{report}");
    report
}

/// Moves of the connection that moved least.
fn least_moves(report: &Value) -> Option<u32> {
    report["connections_by_moves"].as_object().expect("counts").keys().filter_map(|key| key.parse().ok()).min()
}

/// With `--if-up` a program starts beside an agent that takes no program, one of another version for example; its unit
/// must not fail for that.
#[test]
fn a_program_starts_beside_an_agent_of_another_version() {
    let scratch = Scratch::new("another");
    let socket = scratch.file("agent.sock");
    let listener = Listener::bind(Path::new(&socket)).expect("a listener");
    let agent = std::thread::spawn(move || {
        // Whoever only looks whether there is an agent asks for nothing.
        while let Ok(client) = listener.accept() {
            let asks = Poller::new()?;
            asks.add(client.as_fd(), 0, Trigger::Readable)?;
            asks.wait(None, &mut Vec::new())?;
            if client.try_receive_foreign::<Request>().is_ok() {
                let reason = "the agent cannot read this request".into();
                return client.send(&Answer { tag: 0, body: Reply::Failed { reason } }, &[]);
            }
        }
        Ok(())
    });
    let ran = baton_run(&scratch, &["--if-up", "--socket", &socket, "--", "echo", "started"]);
    assert_eq!((ran.status.code(), text(&ran.stdout).trim()), (Some(0), "started"), "{}", text(&ran.stderr));
    assert!(text(&ran.stderr).contains("runs without Baton: the agent cannot read"), "{}", text(&ran.stderr));
    agent.join().expect("the agent").expect("its answer");
}

/// Both ends move: a program with connections to itself, every way to wait for a socket, IPv4 and IPv6. The program
/// compares every byte.
#[test]
fn programs_that_talk_to_themselves_do_not_notice() {
    let program = script("itself.py");
    for way in ["threads", "select", "poll", "epoll", "edge", "asyncio"] {
        for family in ["4", "6"] {
            let report = flip(&format!("{way}{family}"), &["python3", &program, "-", family, way], 6, 10);
            assert!(least_moves(&report) >= Some(10), "a connection hardly moved: {report}");
            assert_eq!(report["connections"], 6, "{way} {family}: {report}");
            assert_eq!(report["given_back"], serde_json::json!({}), "{way} {family}: {report}");
        }
    }
}

/// A tool that the program calls shows the program's Baton, also if others run.
#[test]
fn tools_in_a_program_ask_its_own_baton() {
    let scratch = Scratch::new("own-baton");
    let baton = env!("CARGO_BIN_EXE_baton");
    let [up, end] = ["up", "end"].map(|name| scratch.file(name));
    let other =
        format!("env -u LD_PRELOAD -u BATON_RUN -u BATON_SOCKET unshare --net {baton} run -- sh -c 'echo > {up}; cat {end}'");
    let outer = format!(
        "mkfifo {up} {end} && {{ {other} & }}; cat {up}; {baton} nic show --json; shown=$?; echo > {end}; wait; exit $shown"
    );
    let ran = baton_run(&scratch, &["--", "sh", "-c", &outer]);
    assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
}

/// A Baton that was started for a program ends with it, also while a tool looks at it again and again, as `baton page`
/// does for as long as somebody has the page open.
#[test]
fn a_tool_keeps_no_baton() {
    let scratch = Scratch::new("looked-at");
    let mut run = Command::new(env!("CARGO_BIN_EXE_baton"));
    run.args(["run", "--log", &scratch.file("log"), "--", "cat"]).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
    let mut run = run.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("baton");
    let mut tool = None;
    wait_until("its Baton", || {
        tool = agent_socket(&scratch).and_then(|path| Tool::connect(&path).ok());
        tool.is_some()
    });
    let mut tool = tool.expect("a tool");
    tool.statistics().expect("its agent answers");
    drop(run.stdin.take());
    assert!(run.wait().expect("our child").success());
    wait_until("the end of its Baton", || tool.has_ended());
}

/// A server that sets a small receive buffer on a connection before the NIC has it, and is sent 200,000 bytes then.
const UPLOAD: &str = "
import os, socket, subprocess, sys, threading, time
size, baton = int(sys.argv[1]), sys.argv[2]
outside = {name: value for name, value in os.environ.items() if name != 'LD_PRELOAD'}
listener = socket.socket()
listener.bind(('127.0.0.1', 0))
listener.listen()
def upload():
    client = socket.create_connection(listener.getsockname())
    client.recv(1)
    client.sendall(bytes(200000))
    client.shutdown(socket.SHUT_WR)
    client.recv(1)
threading.Thread(target=upload, daemon=True).start()
server = listener.accept()[0]
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
until = time.monotonic() + 30
while '\"place\":\"nic\"' not in subprocess.run([baton, 'ls', '--json'], capture_output=True, text=True, env=outside).stdout:
    assert time.monotonic() < until, 'the NIC does not get the connection'
server.sendall(b'!')
server.settimeout(15)
received = 0
while piece := server.recv(65536):
    received += len(piece)
print(received)
";

/// Programs report to the NIC what they have read after a part of the window, however small SO_RCVBUF makes it: the
/// peer's data goes on. Whoever waits for a window that nobody opens probes it ever less often, and after 15 seconds
/// here the upload counts as stuck.
#[test]
fn an_upload_into_a_small_receive_buffer_goes_on() {
    for size in ["1", "2304", "3000", "20000"] {
        let scratch = Scratch::new("small-buffer");
        let ran = baton_run(&scratch, &["--rule", "accepted", "--", "python3", "-c", UPLOAD, size, env!("CARGO_BIN_EXE_baton")]);
        assert!(ran.status.success(), "a buffer of {size}: {}{}", text(&ran.stdout), text(&ran.stderr));
        assert_eq!(text(&ran.stdout).trim(), "200000", "a buffer of {size}");
    }
}

/// What one call sends leaves as one piece, whether it is in several buffers or wraps around the end of send memory:
/// nothing waits for an acknowledgement that the peer's kernel delays. A program that gets no processor for 40 ms lets
/// its kernel send one, too, with Baton or without.
#[test]
fn one_call_leaves_as_one_piece() {
    const ROUNDS: u64 = 400;
    let scratch = Scratch::new("rounds");
    let delayed = |ran: Output| -> u64 {
        assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
        text(&ran.stdout).trim().parse().expect("a number")
    };
    let program = [script("rounds.py"), ROUNDS.to_string()];
    let mut natively = Command::new("python3");
    natively.args(&program).stdout(Stdio::piped()).stderr(Stdio::piped());
    let host = Namespace::new().expect("a namespace");
    host.run(|| baton_linux::rtnetlink::set_up(&baton_linux::rtnetlink::open()?, 1, None, None)).expect("the loopback device");
    let natively = delayed(host.spawn(&mut natively).expect("python3").wait_with_output().expect("its output"));
    let moved = delayed(baton_run(&scratch, &["--rule", "accepted", "--", "python3", &program[0], &program[1]]));
    println!("of {ROUNDS} rounds {natively} with a delayed acknowledgement natively, {moved} on the NIC");
    assert!(moved < natively + ROUNDS / 10, "{moved} acknowledgements were delayed, and {natively} natively");
}

/// A connection is back in the kernel before its process forks, whatever signals come meanwhile.
#[test]
fn signals_do_not_disturb_forks() {
    let scratch = Scratch::new("forks");
    for arguments in [&["--rule", "accepted"][..], &["--rule", "established"], &["--flip", "1..2"]] {
        let program = ["--", "python3", &script("forks.py"), "1.5"];
        let ran = baton_run(&scratch, &[arguments, &program].concat());
        let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
        assert!(ran.status.success() && log.is_empty(), "{arguments:?}: {}{}{log}", text(&ran.stdout), text(&ran.stderr));
    }
}

/// A BPF program at the connection's control group that drops its packets stops it; once it is detached the connection
/// goes on.
#[test]
fn programs_at_control_groups_count() {
    let scratch = Scratch::new("cgroup");
    let program = ["--rule", "established", "--", "python3", &script("cgroup.py"), env!("CARGO_BIN_EXE_baton")];
    let ran = baton_run(&scratch, &program);
    assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    let printed = text(&ran.stdout);
    let (took, there) = printed.trim().split_once(' ').expect("two numbers");
    println!("it took {took} ms");
    assert_eq!(there, "2", "connections on the NIC");
}

/// Runs a program in a control group with BPF programs, and checks that neither policy nor connections were harmed.
fn policy_holds(case: &str) {
    let scratch = Scratch::new(&case.replace(' ', "-"));
    let program = ["--rule", "established", "--", "python3", &script("policies.py"), case, env!("CARGO_BIN_EXE_baton")];
    let ran = baton_run(&scratch, &program);
    let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
    assert!(ran.status.success(), "{}{}{log}", text(&ran.stdout), text(&ran.stderr));
    assert_eq!(text(&ran.stdout).trim(), "ok", "{}{log}", text(&ran.stderr));
}

/// A group whose programs refuse a connect(2) keeps its connections in the kernel: a move would be refused half-way.
#[test]
fn a_group_that_refuses_a_connect_keeps_its_connections() {
    policy_holds("refused");
}

#[test]
fn a_group_that_allows_a_connect_lets_its_connections_go() {
    policy_holds("allowed");
}

/// Connections that a group's programs would not let come back go on on the NIC, and come back when they may.
#[test]
fn connections_that_may_not_come_back_wait_on_the_nic() {
    policy_holds("refused later");
}

/// A filter that judges by a map keeps its group's connections in the kernel: the map can change at any time.
#[test]
fn a_filter_with_a_map_judges_every_packet() {
    policy_holds("map");
}

#[test]
fn a_filter_with_a_map_that_cannot_change_keeps_nothing() {
    policy_holds("fixed map");
}

/// A BPF program that swallows options keeps its group's connections in the kernel: the NIC would act on what the
/// kernel has not set.
#[test]
fn a_program_that_swallows_options_keeps_its_connections() {
    policy_holds("options");
}

/// A BPF program that follows connections' states keeps them in the kernel: each move would look like a new connection.
#[test]
fn a_program_that_follows_states_keeps_its_connections() {
    policy_holds("states");
}

/// Process id, exit status, signals and standard streams are the program's own.
#[test]
fn the_process_is_the_program() {
    let scratch = Scratch::new("itself");
    let ran = baton_run(&scratch, &["--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((ran.status.code(), text(&ran.stdout), text(&ran.stderr)), (Some(7), "out\n".into(), "err\n".into()));
    let killed = baton_run(&scratch, &["--", "sh", "-c", "kill -9 $$"]);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&killed.status), Some(9));
    let absent = baton_run(&scratch, &["--", "/no/such/program"]);
    assert_eq!(absent.status.code(), Some(127));
    assert!(text(&absent.stderr).contains("/no/such/program"), "{}", text(&absent.stderr));
    let seen = baton_run(&scratch, &["--", "python3", "-c", "import os; print(os.getppid())"]);
    assert_eq!(text(&seen.stdout).trim(), std::process::id().to_string(), "the program's parent is baton's");
}

/// A connection that is handed over after its first request, and whose requests all have one length: an edge-triggered
/// set reports each.
#[test]
fn edges_are_reported_across_the_handover() {
    const PROGRAM: &str = "
import select, socket, threading, time
listener = socket.create_server(('127.0.0.1', 0))
def serve():
    server, _ = listener.accept()
    server.setblocking(False)
    epoll = select.epoll()
    epoll.register(server, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
    while True:
        epoll.poll()
        try:
            while True:
                data = server.recv(4096)
                if not data: return
                server.sendall(data)
        except BlockingIOError: pass
thread = threading.Thread(target=serve, daemon=True)
thread.start()
client = socket.create_connection(listener.getsockname(), timeout=10)
n, end = 0, time.monotonic() + 1
while n < 2000 or time.monotonic() < end:
    client.sendall(bytes([n % 256]) * 70)
    data = b''
    while len(data) < 70: data += client.recv(70) or exit('the end')
    assert data == bytes([n % 256]) * 70
    n += 1
client.close()
thread.join()
";
    for rule in ["requests:1", "requests:3", "bytes:1000"] {
        let scratch = Scratch::new("edges");
        let report = scratch.file("report");
        let ran = baton_run(&scratch, &["--rule", rule, "--flip-report", &report, "--", "python3", "-c", PROGRAM]);
        assert!(ran.status.success(), "{rule}: {}", text(&ran.stderr));
        let report: Value = serde_json::from_str(&std::fs::read_to_string(report).expect("a report")).expect("JSON");
        assert!(report["moves"].as_u64() >= Some(2), "{rule}: {report}");
    }
}

/// The first connections of a listener close soon, so the next ones are not worth a move: hardly any of them is handed
/// to the agent. A connection that lives on is.
#[test]
fn short_connections_stay_in_the_kernel() {
    const PROGRAM: &str = "
import socket
listener = socket.create_server(('127.0.0.1', 0))
def exchange(client, server):
    client.sendall(b'request'); server.recv(7)
    server.sendall(b'answer'); client.recv(6)
for n in range(300):
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    exchange(client, server)
    server.close(); client.close()
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
go_on(lambda: exchange(client, server), server)
";
    let scratch = Scratch::new("short");
    let (report, _) = run_awaited(&scratch, &["--rule", "accepted", "--", "python3", "-c", &python(PROGRAM)], is_on_nic);
    assert!((1..=30).contains(&report["connections"].as_u64().unwrap_or(0)), "{report}");
    let still_there = report["connections_by_moves"].as_object().expect("counts").keys().any(|moves| moves != "0");
    assert!(still_there, "the last one never moved: {report}");
}

/// A program that changes its user has its connections moved nevertheless.
#[test]
fn programs_may_change_their_user() {
    const PROGRAM: &str = "
import encodings.idna, os, socket
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
def exchange():
    client.sendall(b'x' * 1000)
    assert server.recv(1000, socket.MSG_WAITALL) == b'x' * 1000
go_on(exchange, server)
";
    let scratch = Scratch::new("user");
    // The new user may not be able to read the library where this test runs; it is loaded before.
    let (report, _) = run_awaited(&scratch, &["--rule", "accepted", "--", "python3", "-c", &python(PROGRAM)], is_on_nic);
    assert_eq!((&report["connections"], &report["resets"]), (&1.into(), &0.into()), "{report}");
    assert!(report["moves"].as_u64() >= Some(1), "{report}");
}

/// The error for a wrong configuration has its line and what is allowed.
#[test]
fn wrong_configurations_are_explained() {
    let scratch = Scratch::new("config");
    let config = scratch.file("baton.toml");
    let explain = |content: &str| {
        std::fs::write(&config, content).expect("a file");
        let ran = baton_run(&scratch, &["--config", &config, "--", "true"]);
        assert_eq!(ran.status.code(), Some(2), "{content}");
        text(&ran.stderr)
    };
    let said = explain("[[rule]]\nwhen = \"soon\"\n");
    assert!(said.contains("line 2") && said.contains("established, accepted"), "{said}");
    let said = explain("[[rule]]\nwhen = \"never\"\nport = 80\n");
    assert!(said.contains("line 3") && said.contains("local-port"), "{said}");
    let printed = baton_run(&scratch, &["--print-config"]);
    std::fs::write(&config, printed.stdout).expect("a file");
    assert!(baton_run(&scratch, &["--config", &config, "--", "true"]).status.success());
    assert_eq!(baton_run(&scratch, &["--flip", "5", "--", "true"]).status.code(), Some(2));
}

/// Nothing is left when the program has ended: no process, no socket.
#[test]
fn nothing_is_left() {
    let scratch = Scratch::new("left");
    let listed = baton_run(&scratch, &["--rule", "established", "--", "sh", "-c", "ls $TMPDIR"]);
    let directory = text(&listed.stdout).lines().find(|line| line.starts_with("baton-run-")).expect("a directory").to_string();
    let gone = || !scratch.0.join(&directory).exists();
    // The keeper notices the program's end; it is a child of init, so this test cannot wait for it.
    wait_until(&format!("{directory} is removed"), gone);
}

/// A server that leaves the agent's reach before its first connection: its root directory is another one, and its user,
/// too. The library has asked for Baton before.
#[test]
fn programs_that_confine_themselves_are_offloaded() {
    let scratch = Scratch::new("confined");
    let program = build(&scratch, "cc", "confined", "confined.c", &["-O1", "-Wall", "-Wextra", "-Werror"]);
    let (program, empty) = (program.to_string_lossy().into_owned(), scratch.file("empty"));
    std::fs::create_dir(&empty).expect("an empty directory");
    for (name, words) in [("chroot", &[&program[..], &empty][..]), ("setuid", &[&program, &empty, "65534"])] {
        let report = flip(name, words, 2, 1);
        assert_eq!(report["connections"], 2, "{name}: {report}");
        assert!(least_moves(&report) >= Some(1), "{name}: {report}");
    }
}

/// BATON_SOCKET names a Baton, or none: where nobody listens one is started, and an empty value names none.
#[test]
fn a_socket_without_an_agent_is_no_obstacle() {
    let scratch = Scratch::new("nobody");
    let ended = scratch.file("ended.sock");
    drop(std::os::unix::net::UnixListener::bind(&ended).expect("a socket"));
    let run = |socket: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--log", &scratch.file("log"), "--", env!("CARGO_BIN_EXE_baton"), "nic", "show"]);
        command.env("TMPDIR", &scratch.0).env("BATON_SOCKET", socket).stdout(Stdio::piped()).stderr(Stdio::piped());
        Namespace::new().expect("a namespace").spawn(&mut command).expect("baton").wait_with_output().expect("its output")
    };
    for socket in ["/nowhere/agent.sock", &ended, ""] {
        let ran = run(socket);
        assert!(ran.status.success(), "{socket:?}: {}", text(&ran.stderr));
    }
    let ran = Command::new(env!("CARGO_BIN_EXE_baton")).args(["ls"]).env("BATON_SOCKET", "").output().expect("baton");
    assert!(ran.status.success() || !text(&ran.stderr).contains("a value is required"), "{}", text(&ran.stderr));
    let named = scratch.file("named.sock");
    let ran = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["run", "--socket", &named, "--", "true"])
        .env("BATON_SOCKET", "")
        .output()
        .expect("baton");
    assert_eq!(ran.status.code(), Some(2), "one that is asked for by name has to be there");
    assert!(text(&ran.stderr).contains(&format!("no agent at {named}")), "{}", text(&ran.stderr));
}

/// A program that lists its own Baton when it has done what keeps it, or its connection, in the kernel.
const KEPT_NATIVE: &str = "
import ctypes, os, socket, subprocess, sys
what, baton = sys.argv[1:]
def open_polled_ring():
    # IORING_SETUP_SQPOLL.
    parameters = ctypes.create_string_buffer(bytes(8) + b'\\x02', 120)
    assert ctypes.CDLL(None).syscall(425, 4, parameters) >= 0
if what == 'io_uring before':
    open_polled_ring()
if what == 'limited':
    import resource
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (12 << 20), hard))
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server = listener.accept()[0]
if what == 'inq':
    for end in (client, server):
        end.setsockopt(socket.IPPROTO_TCP, 36, 1)
def exchange():
    client.sendall(b'question')
    server.recv(100)
    server.sendall(b'answer')
    client.recv(100)
for _ in range(20):
    exchange()
if what == 'io_uring':
    open_polled_ring()
if what == 'limited':
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
# Waits: until the list no longer has what a connection waits for first.
for _ in range(500):
    said = subprocess.run([baton, 'ls'], capture_output=True, text=True).stdout
    if 'it waits until' not in said:
        break
    exchange()
print(said)
";

/// A list says why a connection is in the kernel, and has what the agent has no connection of, with the reason.
#[test]
fn what_is_served_natively_says_why() {
    let scratch = Scratch::new("natively");
    let baton = env!("CARGO_BIN_EXE_baton");
    let ring = ("runs without Baton", "io_uring: ");
    let cases = [
        ("inq", "127.0.0.1:", "TCP_INQ"),
        ("io_uring", ring.0, ring.1),
        ("io_uring before", ring.0, ring.1),
        ("limited", "has connections that stay in the kernel", "address space: its program may map only "),
    ];
    for (what, says, why) in cases {
        let arguments = ["--rule", "established", "--eager", "--", "python3", "-c", KEPT_NATIVE, what, baton];
        let said = text(&baton_run(&scratch, &arguments).stdout);
        assert!(said.lines().any(|line| line.contains(says) && line.contains(why)), "{what}: {said}");
    }
    // A statically linked program: its source waits for the end of its input.
    let (source, program) = (scratch.file("waits.c"), scratch.file("waits"));
    std::fs::write(&source, "#include <unistd.h>\nint main(void) { char c; return read(0, &c, 1); }\n").expect("its source");
    let compiled = Command::new("cc").args(["-static", "-o", &program, &source]).status().expect("a C compiler");
    assert!(compiled.success());
    let mut run = Command::new(baton);
    run.args(["run", "--log", &scratch.file("log"), "--", &program]).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
    let mut run = run.stdin(Stdio::piped()).spawn().expect("baton");
    wait_until("a line about it", || {
        let listed = Command::new(baton).arg("ls").env_remove("BATON_SOCKET").output().expect("baton");
        let line = format!("waits/{} runs without Baton: it is statically linked", run.id());
        text(&listed.stdout).contains(&line)
    });
    drop(run.stdin.take());
    assert!(run.wait().expect("our child").success());
}

/// A program that first does what the test says (such as chroot), then makes its connection, and keeps it until its
/// standard input ends.
const KEPT_SILENT: &str = "
import ctypes, os, socket, sys
what, empty = sys.argv[1:]
libc = ctypes.CDLL(None)
if what in ('chroot', 'chroot /'):
    os.chroot(empty if what == 'chroot' else '/')
if what == 'user namespace':
    assert libc.unshare(0x10000000) == 0
if what == 'seccomp':
    # One instruction: everything is allowed.
    instruction = ctypes.create_string_buffer(bytes([6, 0, 0, 0, 0, 0, 0xff, 0x7f]), 8)
    class Program(ctypes.Structure):
        _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_void_p)]
    program = Program(1, ctypes.addressof(instruction))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program)) == 0
MPTCP = 262
ends = {'MPTCP': (MPTCP, MPTCP), 'MPTCP client': (0, MPTCP), 'MPTCP server': (MPTCP, 0)}.get(what, (0, 0))
listener, client = [socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) for protocol in ends]
listener.bind(('127.0.0.1', 0))
listener.listen()
client.connect(listener.getsockname())
server = listener.accept()[0]
client.sendall(b'question')
assert server.recv(100) == b'question'
print('there', flush=True)
sys.stdin.read()
";

/// `baton ls` names what can never move, and says why: a program that can no longer reach the agent, or has set a
/// seccomp filter, before it has a TCP socket; and MPTCP connections. A program that can still reach the agent moves,
/// and so does a connection from a TCP client to an MPTCP listener.
#[test]
fn what_the_agent_would_never_hear_of_says_why() {
    let scratch = Scratch::new("silent");
    let empty = scratch.file("empty");
    std::fs::create_dir(&empty).expect("an empty directory");
    let (program, connections) = ("runs without Baton: ", "has connections that stay in the kernel (asked 1 times): MPTCP: ");
    let cases = [
        ("chroot", format!("{program}out of reach: ")),
        ("user namespace", format!("{program}out of reach: ")),
        ("seccomp", format!("{program}seccomp: ")),
        ("MPTCP", connections.to_string()),
        ("MPTCP client", connections.to_string()),
        ("MPTCP server", String::new()),
        ("chroot /", String::new()),
    ];
    for (what, says) in cases {
        let mut run = Command::new(env!("CARGO_BIN_EXE_baton"));
        run.args(["run", "--rule", "established", "--eager", "--log", &scratch.file("log"), "--"]);
        run.args(["python3", "-c", KEPT_SILENT, what, &empty]).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
        let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("baton");
        let mut there = String::new();
        let mut output = std::io::BufReader::new(run.stdout.take().expect("a pipe"));
        std::io::BufRead::read_line(&mut output, &mut there).expect("its output");
        assert_eq!(there, "there\n", "{what}");
        let process = run.id();
        let is_its = |line: &&str| line.contains(&format!("/{process} "));
        wait_until(&format!("{what}: a line that says {says:?}, or two that have moved"), || {
            let listed = Command::new(env!("CARGO_BIN_EXE_baton")).args(["ls", "-p"]).env_remove("BATON_SOCKET").output();
            let listed = text(&listed.expect("baton").stdout).to_owned();
            let its: Vec<&str> = listed.lines().filter(is_its).collect();
            let moved = its.iter().filter(|line| line.split_whitespace().nth(1) == Some("nic")).count();
            let said = its.iter().filter(|line| line.contains(" runs without ") || line.contains(" has connections ")).count();
            if says.is_empty() { (moved, said) == (2, 0) } else { said == 1 && its.iter().any(|line| line.contains(&says)) }
        });
        drop(run.stdin.take());
        assert!(run.wait().expect("our child").success(), "{what}");
    }
}
