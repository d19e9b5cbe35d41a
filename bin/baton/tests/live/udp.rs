//! `baton run --offload full`: UDP sockets of unmodified programs, whose datagrams the NIC receives and sends.

use crate::common::hosts;
use crate::compiled::compile;
use crate::full::{Program, address, count, on_b, start, start_printing, statistics, wait_until};
use crate::scratch::{Scratch, text};
use crate::stopped::{hold_agent, in_time};
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings, address_b};
use std::io::Write;
use std::process::{Command, Stdio};

/// Echoes every datagram, in a way to wait that is its argument.
const ECHO: &str = "
import asyncio, select, socket, sys
way, family = sys.argv[1], socket.AF_INET6 if ':' in sys.argv[2] else socket.AF_INET
one = socket.socket(family, socket.SOCK_DGRAM)
one.bind((sys.argv[2], 7000))
def again(wait):
    one.setblocking(False)
    while True:
        wait()
        try:
            while True:
                data, peer = one.recvfrom(65536)
                one.sendto(data, peer)
        except BlockingIOError:
            pass
if way == 'blocking':
    while True:
        data, _, flags, peer = one.recvmsg(65536)
        assert flags == 0
        assert one.sendmsg([data[:3], data[3:]], [], 0, peer) == len(data)
if way == 'select': again(lambda: select.select([one], [], []))
poll = select.poll()
poll.register(one, select.POLLIN)
if way == 'poll': again(poll.poll)
epoll = select.epoll()
epoll.register(one, select.EPOLLIN | (select.EPOLLET if way == 'edge' else 0))
if way in ('epoll', 'edge'): again(epoll.poll)
class Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport): self.transport = transport
    def datagram_received(self, data, peer): self.transport.sendto(data, peer)
async def serve():
    await asyncio.get_running_loop().create_datagram_endpoint(Echo, sock=one)
    await asyncio.Event().wait()
one.setblocking(False)
asyncio.run(serve())
";

/// Sends datagrams of all lengths to an echo server, some at a time, and repeats what gets no answer. `fragments`: also
/// some that are longer than the link carries.
const CLIENT: &str = "
import os, socket, sys
at = (sys.argv[1], 7000)
family = socket.AF_INET6 if ':' in at[0] else socket.AF_INET
one = socket.socket(family, socket.SOCK_DGRAM)
# Waits: datagrams may be lost, so one without an answer is sent again; who waits too short sends more.
one.settimeout(0.3)
def exchange(many):
    waiting = set(many)
    # Waits: see above; forty are far more than are lost.
    for attempt in range(40):
        for data in waiting: one.sendto(data, at)
        try:
            while waiting:
                data, peer = one.recvfrom(65536)
                assert peer[:2] == at, peer
                waiting.discard(data)
            return
        except TimeoutError:
            pass
    sys.exit('%d of %d have no answer' % (len(waiting), len(many)))
exchange([b'begin'])
for length in range(0, 1400, 50):
    exchange([os.urandom(8) + bytes(length) for _ in range(8)])
for length in (1232 - 8, 1233 - 8, 1472 - 8, 1473 - 8, 9000) if sys.argv[2] == 'fragments' else ():
    exchange([os.urandom(8) + bytes(length)])
print('right', end='')
";

fn exchange(bed: &Testbed, at: &str, fragments: &str) {
    let ran = on_b(bed, &["python3", "-c", CLIENT, at, fragments]);
    assert!(ran.status.success() && ran.stdout == b"right", "{at}: {}{}", text(&ran.stdout), text(&ran.stderr));
}

/// Datagrams of all lengths are echoed, by both families, in every way to wait; nearly all by the NIC.
#[test]
fn datagrams_are_echoed() {
    let bed = hosts(TestbedSettings::default());
    for (way, ipv6) in [
        ("blocking", false),
        ("blocking", true),
        ("select", false),
        ("poll", true),
        ("epoll", false),
        ("edge", false),
        ("asyncio", true),
    ] {
        let at = address(ipv6, 7000).ip().to_string();
        let before = [Counter::DatagramsReceived, Counter::DatagramsSent].map(|counter| count(&bed, counter));
        let bound = if way == "blocking" { if ipv6 { "::" } else { "0.0.0.0" } } else { &at };
        let _server = start(&bed, &["python3", "-c", ECHO, way, bound]);
        exchange(&bed, &at, "fragments");
        let after = [Counter::DatagramsReceived, Counter::DatagramsSent].map(|counter| count(&bed, counter));
        for (before, after) in before.into_iter().zip(after) {
            assert!(after >= before + 200, "{way} at {at}: {} of 225 by the NIC", after - before);
        }
    }
}

/// As [`ECHO`], after the socket has been in a set that is closed. It answers otherwise if the set that has its number
/// now, in which nothing is, reports anything.
const CLOSES_SET: &str = "
import select, socket, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
first = select.epoll()
first.register(one, select.EPOLLIN)
number = first.fileno()
first.close()
second = select.epoll()
assert second.fileno() == number
one.bind((sys.argv[1], 7000))
while True:
    select.select([one], [], [])
    reported = second.poll(0)
    data, peer = one.recvfrom(65536)
    one.sendto(b'wrong' if reported else data, peer)
";

/// A socket gets its port, and comes to the NIC, when a set that has watched it is closed: another set that has the
/// number since has nothing to do with it.
#[test]
fn the_next_set_of_a_number_does_not_watch_the_last_ones_sockets() {
    let bed = hosts(TestbedSettings::default());
    let at = address(false, 7000).ip().to_string();
    let _server = start(&bed, &["python3", "-c", CLOSES_SET, &at]);
    exchange(&bed, &at, "");
    assert!(count(&bed, Counter::DatagramsReceived) >= 200);
}

/// A thread echoes every datagram until it receives nothing. At a line on standard input the socket is shut down, as
/// programs do that have such a thread end: the call fails, and wakes it.
const SHUTS: &str = "
import socket, sys, threading
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind((sys.argv[1], 7000))
def serve():
    while True:
        data, peer = one.recvfrom(65536)
        if not data: return print('the end', flush=True)
        one.sendto(data, peer)
serves = threading.Thread(target=serve)
serves.start()
sys.stdin.readline()
try: one.shutdown(socket.SHUT_RDWR)
except OSError: pass
serves.join()
";

/// A thread that sleeps in a receive comes back when another one shuts the socket down.
#[test]
fn a_socket_that_is_shut_down_ends_a_receive() {
    let bed = hosts(TestbedSettings::default());
    let at = address(false, 7000).ip().to_string();
    let (mut server, mut lines) = start_printing(&bed, &["python3", "-c", SHUTS, &at]);
    exchange(&bed, &at, "");
    assert!(count(&bed, Counter::DatagramsReceived) >= 200);
    writeln!(server.0.stdin.as_mut().expect("its input")).expect("a line");
    assert_eq!(in_time("a receive", move || lines.next()).expect("a line").expect("text"), "the end");
}

/// Echoes every datagram until there is a line on standard input. Then a program that gets the socket in a way which is
/// its argument does it.
const PASSES_ON: &str = "
import os, select, socket, subprocess, sys
way = sys.argv[2]
program = '''
import socket, sys
one = socket.socket(fileno=int(sys.argv[1]))
print('serves', flush=True)
while True:
    data, peer = one.recvfrom(65536)
    if data == b'end': sys.exit()
    one.sendto(data, peer)
'''
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind((sys.argv[1], 7000))
while True:
    if sys.stdin in select.select([one, sys.stdin], [], [])[0]: break
    data, peer = one.recvfrom(65536)
    one.sendto(data, peer)
run = [sys.executable, '-c', program]
if way == 'input': sys.exit(subprocess.run(run + ['0'], stdin=one).returncode)
one.set_inheritable(True)
run.append(str(one.fileno()))
if way == 'exec': os.execv(run[0], run)
if way == 'spawn': sys.exit(os.waitpid(os.posix_spawn(run[0], run, os.environ), 0)[1])
sys.exit(subprocess.run(run, close_fds=False).returncode)
";

/// Sends the datagram at which that program ends.
const SEND_END: &str = "
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'end', (sys.argv[1], 7000))
";

/// A program that is executed gets a socket that the NIC has: from then on its datagrams come to the kernel's socket.
#[test]
fn a_socket_that_another_program_gets_is_the_kernels() {
    let bed = hosts(TestbedSettings::default());
    let at = address(false, 7000).ip().to_string();
    for way in ["input", "exec", "spawn", "inherited"] {
        let before = count(&bed, Counter::DatagramsReceived);
        let (mut server, mut lines) = start_printing(&bed, &["python3", "-c", PASSES_ON, &at, way]);
        exchange(&bed, &at, "");
        assert!(count(&bed, Counter::DatagramsReceived) >= before + 200, "{way}");
        writeln!(server.0.stdin.as_mut().expect("its input")).expect("a line");
        assert_eq!(lines.next().expect("a line").expect("text"), "serves", "{way}");
        exchange(&bed, &at, "");
        assert!(on_b(&bed, &["python3", "-c", SEND_END, &at]).status.success());
        assert!(in_time("its end", move || server.0.wait()).expect("its end").success(), "{way}");
    }
}

/// Children of vfork that use a socket which the NIC has, and are killed, hold their parent up nowhere.
#[test]
fn a_killed_child_of_vfork_holds_no_socket_up() {
    let bed = hosts(TestbedSettings::default());
    let scratch = Scratch::new("killed");
    let program = compile("vforks", &scratch);
    let at = address(false, 7000).ip().to_string();
    let ran = start(&bed, &[program.to_str().expect("a path"), "killed", "kernel", &at]).0.wait().expect("its end");
    assert!(ran.success(), "{ran}");
}

/// With several workers datagrams come to sockets by whichever worker's bucket.
#[test]
fn datagrams_come_by_any_worker() {
    let bed = hosts(TestbedSettings { workers: 3, nic_cores: Vec::new(), ..TestbedSettings::default() });
    let at = address(false, 7000).ip().to_string();
    let _server = start(&bed, &["python3", "-c", ECHO, "epoll", &at]);
    (0..4).for_each(|_| exchange(&bed, &at, ""));
    assert!(count(&bed, Counter::DatagramsReceived) >= 700);
}

/// A socket goes on when the NIC dies, by the next NIC.
#[test]
fn a_socket_survives_nic_and_agent() {
    for agent_dies in [false, true] {
        let bed = hosts(TestbedSettings::default());
        let at = address(false, 7000).ip().to_string();
        let _server = start(&bed, &["python3", "-c", ECHO, "epoll", &at]);
        exchange(&bed, &at, "");
        let first = statistics(&bed);
        let process = if agent_dies { first.agent_process } else { first.nic_process };
        baton_linux::process::signal(process, 9).expect("a signal");
        exchange(&bed, &at, "");
        let before = count(&bed, Counter::DatagramsReceived);
        wait_until("datagrams by the next NIC", || {
            exchange(&bed, &at, "");
            count(&bed, Counter::DatagramsReceived) >= before + 100
        });
    }
}

/// Has a session for one socket, then receives from another one for the first time, without waiting, and echoes what
/// comes to it.
const LATE: &str = "
import socket, sys
def asked(port):
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind((sys.argv[1], port))
    one.setblocking(False)
    try: sys.exit('there is %r' % one.recv(1))
    except BlockingIOError: pass
    print(port, flush=True)
    return one
first = asked(7001)
sys.stdin.readline()
one = asked(7000)
one.setblocking(True)
while True:
    data, peer = one.recvfrom(65536)
    one.sendto(data, peer)
";

/// The agent is held while a program receives from a socket for the first time: the kernel has the socket then, and the
/// NIC later.
#[test]
fn a_socket_whose_agent_was_held_is_taken_later() {
    let bed = hosts(TestbedSettings::default());
    let at = address(false, 7000).ip().to_string();
    let (mut server, mut lines) = start_printing(&bed, &["python3", "-c", LATE, &at]);
    assert_eq!(lines.next().expect("a line").expect("text"), "7001");
    let agent = hold_agent(&bed);
    writeln!(server.0.stdin.as_mut().expect("its input")).expect("a line");
    assert_eq!(in_time("a receive", move || lines.next()).expect("a line").expect("text"), "7000");
    drop(agent);
    wait_until("datagrams by the NIC", || {
        let before = count(&bed, Counter::DatagramsReceived);
        exchange(&bed, &at, "");
        count(&bed, Counter::DatagramsReceived) >= before + 100
    });
}

/// Runs a program on host A whose UDP sockets the NIC has; it prints "right".
fn runs(bed: &Testbed, program: &str, arguments: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command
        .arg("run")
        .arg("--socket")
        .arg(bed.socket())
        .args(["--offload", "full", "--", "python3", "-c", program])
        .args(arguments);
    command.env_remove("BATON_RUN").stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = bed.host_a.spawn(&mut command).expect("baton").wait_with_output().expect("its output");
    assert!(ran.status.success() && ran.stdout == b"right\n", "{}{}", text(&ran.stdout), text(&ran.stderr));
}

/// A client of the peer's echo server, and of a port where nobody is.
const CONNECTED: &str = "
import array, errno, fcntl, select, socket, sys, termios
at = (sys.argv[1], int(sys.argv[2]))
family = socket.AF_INET6 if ':' in at[0] else socket.AF_INET
def connected(port):
    one = socket.socket(family, socket.SOCK_DGRAM)
    one.settimeout(20)
    one.connect((at[0], port))
    assert one.getpeername()[1] == port and one.getsockname()[1] != 0
    return one
one = connected(at[1])
for n in range(50):
    one.send(b'%d' % n)
    assert one.recv(100) == b'%d' % n
one.send(b'0123456789')
select.select([one], [], [])
length = array.array('i', [0])
fcntl.ioctl(one, termios.FIONREAD, length)
assert length[0] == 10
assert one.recv(4, socket.MSG_PEEK) == b'0123'
assert one.recv_into(bytearray(4), 4, socket.MSG_PEEK | socket.MSG_TRUNC) == 10
data, _, flags, _ = one.recvmsg(4)
assert data == b'0123' and flags == socket.MSG_TRUNC
one.setblocking(False)
try: sys.exit('there is %r' % one.recv(10))
except BlockingIOError: pass
for n in range(9):
    refused = connected(at[1] + 1)
    refused.send(b'x')
    poll = select.poll()
    poll.register(refused, select.POLLIN)
    assert poll.poll(20000)[0][1] & select.POLLERR
    way = n % 3
    try:
        if way == 0: sys.exit('there is %r' % refused.recv(10))
        if way == 1:
            assert refused.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
            raise ConnectionRefusedError
        refused.send(b'y')
        refused.send(b'z')
        sys.exit('no error')
    except ConnectionRefusedError: pass
    refused.send(b'once more')
    try: sys.exit('there is %r' % refused.recv(10))
    except ConnectionRefusedError: pass
    refused.close()
big = connected(at[1])
try: sys.exit(big.send(bytes(70000)))
except OSError as error: assert error.errno == errno.EMSGSIZE
print('right')
";

/// A connected socket exchanges datagrams, truncates them, looks at them, and reports errors, as in the kernel.
#[test]
fn connected_sockets_report_errors() {
    let bed = hosts(TestbedSettings::default());
    for ipv6 in [false, true] {
        let at = address_b(ipv6);
        let echo = bed.host_b.run(|| std::net::UdpSocket::bind((at, 6000))).expect("a socket");
        std::thread::spawn(move || {
            let mut buffer = [0; 65536];
            while let Ok((length, peer)) = echo.recv_from(&mut buffer) {
                let _ = echo.send_to(&buffer[..length], peer);
            }
        });
        // Else the peer sends few ICMP messages a second.
        let limit = if ipv6 { "ipv6/icmp/ratelimit" } else { "ipv4/icmp_ratelimit" };
        bed.host_b.run(|| std::fs::write(format!("/proc/sys/net/{limit}"), "0")).expect("no limit");
        let before = count(&bed, Counter::DatagramsSent);
        runs(&bed, CONNECTED, &[&at.to_string(), "6000"]);
        let sent = count(&bed, Counter::DatagramsSent) - before;
        assert!(sent >= 60, "the NIC sent {sent}");
    }
}

/// Reads nothing before a line comes on standard input; then prints how many datagrams there are, which must be in
/// order. With `fork` a child reads them.
const BURST: &str = "
import os, socket, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 60000)
one.bind((sys.argv[1], 7000))
data, peer = one.recvfrom(100)
one.sendto(data, peer)
sys.stdin.readline()
if sys.argv[2] == 'fork' and os.fork():
    os.wait()
    os._exit(0)
one.setblocking(False)
last, many = -1, 0
try:
    while True:
        data = one.recv(2000)
        if data == b'hello': continue
        n = int.from_bytes(data[:4], 'big')
        assert n > last, (n, last)
        last, many = n, many + 1
except BlockingIOError: pass
with open(sys.argv[3], 'w') as out: out.write(str(many))
";

const SEND_BURST: &str = "
import socket, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
# Waits: the server may not be there yet.
one.settimeout(0.3)
one.connect((sys.argv[1], 7000))
# Waits: until the server is there.
for attempt in range(60):
    try:
        one.send(b'hello')
        one.recv(100)
        break
    except OSError: pass
n = 0
for line in sys.stdin:
    for n in range(n, n + int(line)): one.send(n.to_bytes(4, 'big') + bytes(996))
    n += 1
";

/// What finds no room is dropped and counted; what is unread when the program forks goes to the kernel's socket, in
/// order.
#[test]
fn a_burst_is_bounded_and_stays_in_order() {
    for (way, pieces, piece) in [("alone", 20, 100), ("fork", 1, 20)] {
        let bed = hosts(TestbedSettings::default());
        let scratch = crate::scratch::Scratch::new("burst");
        let (at, out) = (address(false, 7000).ip().to_string(), scratch.file("many"));
        let mut program = start(&bed, &["python3", "-c", BURST, &at, way, &out]);
        let mut sender = Command::new("python3");
        sender.args(["-c", SEND_BURST, &at]).stdin(Stdio::piped());
        let mut sender = Program(bed.host_b.spawn(&mut sender).expect("python3"));
        let mut input = sender.0.stdin.take().expect("its input");
        let counted = || [Counter::DatagramsReceived, Counter::DatagramsDropped].map(|counter| count(&bed, counter));
        // In pieces that the link's queue has room for.
        for sent in 1..=pieces {
            writeln!(input, "{piece}").expect("a sender");
            wait_until("a piece of the burst", || counted().iter().sum::<u64>() >= sent * piece);
        }
        drop(input);
        assert!(sender.0.wait().expect("its end").success());
        writeln!(program.0.stdin.take().expect("its input"), "read").expect("a program");
        assert!(program.0.wait().expect("its end").success());
        let ([received, dropped], burst) = (counted(), pieces * piece);
        let many: u64 = std::fs::read_to_string(&out).expect("its count").parse().expect("a number");
        if way == "alone" {
            assert!(dropped > 1000 && received < 200, "{received} received, {dropped} dropped");
            // "hello" may have been repeated, and may have reached the kernel's socket before the NIC had it.
            assert!((many..many + 10).contains(&received), "{many} read, {received} received");
        } else {
            assert_eq!((many, dropped), (burst, 0), "all are in the kernel's socket");
        }
    }
}
