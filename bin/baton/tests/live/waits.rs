//! Programs whose threads sleep in system calls while their connections move: `c/waits.c` draws the calls at random and
//! compares every result with the kernel's.

use crate::awaited::{is_on_nic, python, run_awaited};
use crate::compiled::compile;
use crate::library::{finish, set_up_loopback};
use crate::scratch::{Scratch, text};
use baton_fuzz::setting;
use baton_linux::namespace::Namespace;
use baton_protocol::program::ConnectionInfo;
use serde_json::Value;
use std::process::{Command, Output, Stdio};

/// `baton run` with these arguments, in a network namespace of its own. Returns the program's output, and the report.
fn baton_run(scratch: &Scratch, arguments: &[&str]) -> (Output, Value) {
    baton_run_in(&Namespace::new().expect("a namespace"), scratch, arguments)
}

/// The same in this namespace.
fn baton_run_in(namespace: &Namespace, scratch: &Scratch, arguments: &[&str]) -> (Output, Value) {
    let report = scratch.file("report");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--eager", "--log", &scratch.file("log"), "--flip-report", &report]).args(arguments);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = namespace.spawn(&mut command).expect("baton").wait_with_output().expect("its output");
    let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
    if !ran.status.success() || !log.is_empty() {
        panic!("{arguments:?}: {}{}{log}{}", text(&ran.stdout), text(&ran.stderr), kernels_counters(namespace));
    }
    let report: Value = serde_json::from_str(&std::fs::read_to_string(report).expect("a report")).expect("JSON");
    assert_eq!((&report["resets"], &report["errors"]), (&0.into(), &0.into()), "{arguments:?}: {report}");
    (ran, report)
}

/// The same with a program that goes on until its connections are as expected.
fn baton_run_until(scratch: &Scratch, arguments: &[&str], expected: impl Fn(&ConnectionInfo) -> bool) -> Value {
    let (report, log) = run_awaited(scratch, &[&["--eager"][..], arguments].concat(), expected);
    assert!(log.is_empty(), "{arguments:?}: {log}");
    assert_eq!((&report["resets"], &report["errors"]), (&0.into(), &0.into()), "{arguments:?}: {report}");
    report
}

/// What the namespace's TCP has counted, as far as it is not 0: who reset a connection, and why.
fn kernels_counters(namespace: &Namespace) -> String {
    let read = |file| std::fs::read_to_string(format!("/proc/thread-self/net/{file}"));
    let texts = namespace.run(|| Ok([read("snmp")?, read("netstat")?])).expect("its counters");
    let lines: Vec<&str> = texts.iter().flat_map(|text| text.lines()).filter(|line| line.starts_with("Tcp")).collect();
    let counters = lines.chunks_exact(2).flat_map(|pair| pair[0].split(' ').zip(pair[1].split(' ')).skip(1));
    counters.filter(|(_, count)| *count != "0").map(|(name, count)| format!("{name} {count}\n")).collect()
}

/// A thread that the doorbell has woken leaves epoll_wait by a jump: others are woken by it afterwards.
#[test]
fn who_leaves_a_set_by_a_jump_leaves_the_doorbell_to_others() {
    let scratch = Scratch::new("bells");
    baton_run(&scratch, &["--rule", "accepted", "--", &compile("bells", &scratch).to_string_lossy()]);
}

/// Threads that receive, send and wait, each in a call of its own, on connections that are handed over and move
/// meanwhile: no call is disturbed, and none sleeps on. BATON_WAITS_MOVES sets the number of moves by each rule.
#[test]
fn blocked_threads_do_not_notice_moves() {
    let scratch = Scratch::new("waits");
    let program = compile("waits", &scratch);
    let wanted = setting("BATON_WAITS_MOVES", 20);
    let seconds = if wanted > 20 { "10" } else { "2" };
    for rule in [["--rule", "accepted"], ["--rule", "bytes:10500"], ["--rule", "requests:3"], ["--flip", "1..5"]] {
        let (mut moves, mut seed) = (0, 0);
        while moves < wanted {
            seed += 1;
            let program = ["--", &program.to_string_lossy(), seconds, &seed.to_string()];
            let (_, report) = baton_run(&scratch, &[&rule[..], &program].concat());
            moves += report["moves"].as_u64().expect("moves");
            // On a busy machine a run may be over before any connection is worth a move.
            assert!(moves > 0 || seed < 5, "{rule:?}, seed {seed}: {report}");
        }
        if wanted > 20 {
            println!("{rule:?}: {moves} moves, {seed} runs");
        }
    }
}

/// A thread sleeps in recv, and one in select, as long as the connection lives: it moves nevertheless.
#[test]
fn a_sleeping_reader_does_not_keep_its_connection_in_the_kernel() {
    const PROGRAM: &str = "
import select, socket, threading
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
ends = []
threads = [threading.Thread(target=lambda: ends.append(client.recv(1))),
           threading.Thread(target=lambda: ends.append(select.select([client], [], []) and b''))]
for thread in threads: thread.start()
def exchange():
    client.sendall(b'x' * 5000)
    data = server.recv(5000, socket.MSG_WAITALL)
    assert data == b'x' * 5000
go_on(exchange, client, server)
server.close()
for thread in threads: thread.join()
assert ends == [b'', b''], ends
";
    let scratch = Scratch::new("sleeping");
    let report = baton_run_until(&scratch, &["--rule", "bytes:10500", "--", "python3", "-c", &python(PROGRAM)], is_on_nic);
    assert!(report["connections_by_moves"].get("0").is_none(), "{report}");
}

/// shutdown(2) of receiving alone does not end what is sent, whenever the connection moves.
#[test]
fn receiving_is_shut_alone() {
    let scratch = Scratch::new("shutdowns");
    let program = compile("shutdowns", &scratch);
    assert!(Command::new(&program).arg("20").status().expect("the program").success(), "natively");
    let (_, report) = baton_run(&scratch, &["--flip", "0..1", "--", &program.to_string_lossy(), "1000"]);
    assert!(report["moves"].as_u64() > Some(0), "{report}");
}

/// A move waits until the agent is attached to the host's devices, of which there are many, and its program takes the
/// connection back for good meanwhile: the move is not made then.
#[test]
fn what_is_taken_back_for_good_does_not_move_when_the_devices_are_ready() {
    const PROGRAM: &str = "
import glob, os, socket, time
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
into, out = os.pipe()
def exchange(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        client.sendall(b'x' * 100)
        assert len(server.recv(100, socket.MSG_WAITALL)) == 100
here = os.stat('/proc/self/ns/net').st_ino
def attaches():
    for agent in glob.glob('/proc/[0-9]*'):
        try:
            if open(agent + '/comm').read() == 'baton-agent\\n' and os.stat(agent + '/ns/net').st_ino == here:
                return any(open(thread).read() == 'attach\\n' for thread in glob.glob(agent + '/task/*/comm'))
        except OSError:
            # It has ended meanwhile.
            pass
    return False
while not attaches():
    exchange(0.01)
exchange(0.05)
client.sendall(b'y')
assert os.splice(server.fileno(), out, 1) == 1 and attaches()
while attaches():
    exchange(0.01)
exchange(0.2)
";
    let scratch = Scratch::new("taken-back");
    let namespace = Namespace::new().expect("a namespace");
    let devices = "for at in $(seq 40); do echo link add many$at type veth peer name more$at; echo link set many$at up; echo link set more$at up; done | ip -batch -";
    let added = namespace.spawn(Command::new("sh").args(["-c", devices])).expect("a shell").wait().expect("its end");
    assert!(added.success());
    let (_, report) = baton_run_in(&namespace, &scratch, &["--flip", "0..1", "--", "python3", "-c", PROGRAM]);
    assert_eq!(report["connections_by_moves"]["0"], 1, "that of the accepting side: {report}");
}

/// Queries of a socket during a move return what they return before and after it.
#[test]
fn a_moving_socket_answers_as_before() {
    let scratch = Scratch::new("asks");
    let arguments = ["--flip", "0..1", "--", "python3", &crate::scratch::script("asks.py")];
    let report = baton_run_until(&scratch, &arguments, |one| one.moves > 50);
    assert!(report["moves"].as_u64() > Some(100), "{report}");
}

/// Two connections with full queues and a FIN after unsent data: neither a byte nor the FIN is lost, although the NIC's
/// command ring was full when the FIN was requested.
#[test]
fn a_fin_after_a_full_queue_is_sent() {
    const PROGRAM: &str = "
import socket, threading
listener = socket.create_server(('127.0.0.1', 0))
for round in range(10):
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    for _ in range(20):
        client.sendall(b'ping' * 1000)
        assert len(server.recv(4000, socket.MSG_WAITALL)) == 4000
    server.setblocking(False)
    sent = 0
    try:
        while True: sent += server.send(b'x' * 17)
    except BlockingIOError: pass
    server.shutdown(socket.SHUT_WR)
    client.settimeout(10)
    received = 0
    while data := client.recv(100000): received += len(data)
    assert received == sent, (received, sent)
    client.close(); server.close()
";
    let scratch = Scratch::new("fin");
    for way in [["--rule", "accepted"], ["--flip", "1..10"]] {
        let (_, report) = baton_run(&scratch, &[&way[..], &["--", "python3", "-c", PROGRAM]].concat());
        assert!(report["moves"].as_u64() > Some(5), "{way:?}: {report}");
    }
}

/// Urgent data arrives for a connection on the NIC: it is restored first, and the program sees what it sees in the
/// kernel.
#[test]
fn urgent_data_is_seen_as_such() {
    const PROGRAM: &str = "
import select, socket
for inline in (0, 1):
    listener = socket.create_server(('127.0.0.1', 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    server.settimeout(10)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, inline)
    def exchange():
        client.sendall(b'ping' * 1000)
        data = server.recv(4000, socket.MSG_WAITALL)
        assert data == b'ping' * 1000
    go_on(exchange, server)
    client.send(b'abc')
    client.send(b'!', socket.MSG_OOB)
    client.send(b'def')
    assert select.select([], [], [server], 10)[2], 'no urgent data'
    if not inline: assert server.recv(1, socket.MSG_OOB) == b'!'
    data = b''
    pieces = []
    while len(data) < 6 + inline:
        pieces.append(server.recv(100))
        data += pieces[-1]
    assert data == (b'abc!def' if inline else b'abcdef'), data
    assert pieces[0] == b'abc', pieces
";
    let scratch = Scratch::new("urgent");
    let report = baton_run_until(&scratch, &["--rule", "accepted", "--", "python3", "-c", &python(PROGRAM)], is_on_nic);
    assert_eq!((&report["connections"], report["moves"].as_u64() >= Some(4)), (&2.into(), true), "{report}");
}

/// A command that `system` or `popen` runs finds the program's connection in the kernel, and can use it.
#[test]
fn commands_of_the_shell_find_their_sockets() {
    const PROGRAM: &str = "
import ctypes, os, socket, time
libc = ctypes.CDLL(None)
libc.popen.restype = ctypes.c_void_p
libc.pclose.argtypes = [ctypes.c_void_p]
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
server.set_inheritable(True)
client.settimeout(10)
def exchange():
    client.sendall(b'ping' * 1000)
    assert len(server.recv(4000, socket.MSG_WAITALL)) == 4000
def talk():
    end = time.monotonic() + 0.2
    while time.monotonic() < end: exchange()
go_on(exchange, server)
assert libc.system(b'echo one >&%d' % server.fileno()) == 0
assert client.recv(4, socket.MSG_WAITALL) == b'one\\n'
talk()
stream = libc.popen(b'echo two >&%d' % server.fileno(), b'r')
assert libc.pclose(stream) == 0
assert client.recv(4, socket.MSG_WAITALL) == b'two\\n'
talk()
";
    let scratch = Scratch::new("system");
    let report = baton_run_until(&scratch, &["--rule", "accepted", "--", "python3", "-c", &python(PROGRAM)], is_on_nic);
    assert!(report["moves"].as_u64() >= Some(2), "{report}");
}

/// A program asks for more than the NIC's receive memory at a time (SO_RCVLOWAT): the connection becomes readable
/// nevertheless.
#[test]
fn a_low_water_mark_above_receive_memory_is_reached() {
    const PROGRAM: &str = "
import select, socket, threading
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
def exchange():
    client.sendall(b'ping' * 1000)
    assert len(server.recv(4000, socket.MSG_WAITALL)) == 4000
go_on(exchange, server)
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 20)
sender = threading.Thread(target=client.sendall, args=(b'x' * (4 << 20),))
sender.start()
poll = select.poll()
poll.register(server, select.POLLIN)
received = 0
while received < 3 << 20:
    assert poll.poll(10000), received
    received += len(server.recv(1 << 20))
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
while received < 4 << 20: received += len(server.recv(1 << 20))
sender.join()
";
    let scratch = Scratch::new("lowat");
    let report = baton_run_until(&scratch, &["--rule", "accepted", "--", "python3", "-c", &python(PROGRAM)], is_on_nic);
    assert!(report["moves"].as_u64() >= Some(1), "{report}");
}

/// With hardly a descriptor it does not start, and says in a line what to type.
#[test]
fn too_few_descriptors_are_said_in_a_line() {
    let scratch = Scratch::new("few");
    let baton = env!("CARGO_BIN_EXE_baton");
    for most in [6, 8, 12, 16, 20] {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {most}; exec {baton} run -- true")]);
        command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
        let ran = Namespace::new().expect("a namespace").spawn(&mut command).expect("sh").wait_with_output().expect("its output");
        let said = text(&ran.stderr);
        let advised = said.contains("`ulimit -n 1024`") && said.len() < 400 && !said.contains('\0');
        assert!(ran.status.success() || advised, "with {most}: {}, {said}", ran.status);
    }
}

/// A program that may have hardly a descriptor has as many of them as natively.
#[test]
fn the_last_descriptors_are_the_programs() {
    const PROGRAM: &str = "
import socket
listener = socket.create_server(('127.0.0.1', 0))
ends = []
try:
    while True:
        client = socket.socket()
        ends.append(client)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        ends.append(server)
        for _ in range(10):
            client.sendall(b'question')
            assert server.recv(100) == b'question'
            server.sendall(b'answer')
            assert client.recv(100) == b'answer'
except OSError as error: print(len(ends), error.errno)
";
    let scratch = Scratch::new("last");
    let run = |with_baton: bool| {
        let namespace = Namespace::new().expect("a namespace");
        let limited = ["sh", "-c", "ulimit -n 24; exec python3 -c \"$0\"", PROGRAM];
        let mut command = Command::new(if with_baton { env!("CARGO_BIN_EXE_baton") } else { "env" });
        if with_baton {
            command.args(["run", "--eager", "--rule", "established", "--"]);
        } else {
            set_up_loopback(&namespace);
        }
        command.args(limited).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
        let ran = finish(&namespace, command);
        assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
        text(&ran.stdout)
    };
    let natively = run(false);
    assert!(natively.ends_with(" 24\n"), "{natively}");
    assert_eq!(run(true), natively);
}

/// `baton run` under `baton run`; with few descriptors; and with a directory of that name in place already.
#[test]
fn it_starts_in_unusual_surroundings() {
    let scratch = Scratch::new("starts");
    let baton = env!("CARGO_BIN_EXE_baton");
    baton_run(&scratch, &["--", baton, "run", "--", "true"]);
    baton_run(&scratch, &["--", "sh", "-c", &format!("{baton} run -- true")]);
    let run = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let ran = Namespace::new().expect("a namespace").spawn(&mut command).expect("sh").wait_with_output().expect("its output");
        assert!(ran.status.success(), "{script}: {}{}", text(&ran.stdout), text(&ran.stderr));
    };
    run(&format!("ulimit -S -n 64; exec {baton} run -- true"));
    run(&format!("mkdir $TMPDIR/baton-run-$$; exec {baton} run -- true"));
}
