//! Connections that a program under full offload opens, and how that fails.

use super::{bed, connections, count, on_a, on_b, start_printing, statistics, wait_until};
use crate::common::{hosts, kernel_repeats};
use crate::scratch::{script, text};
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings, address_a, address_b};
use baton_linux::process;
use baton_protocol::program::{Ask, Place, Reply};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};

in_both_shapes! {
    connecting_fails_as_natively
    a_socket_that_was_refused_connects_again
    a_socket_that_was_refused_leaves_its_port_to_the_next
    each_connection_of_a_socket_has_its_edges
    connect_goes_on_with_what_it_has_begun
    a_negative_time_limit_lets_nothing_wait
    what_a_control_group_refuses_fails_as_natively
    what_a_dead_agent_was_opening_can_be_opened_again
    an_ipsec_policy_leaves_what_the_nic_is_opening_to_the_kernel
    the_hosts_retransmissions_are_those_of_what_the_nic_opens
    an_idle_window_is_the_hosts_where_the_nic_opens_a_connection
}

/// Connects in every way to an echo server (address and port), and to a port where nobody listens (the next one).
const CONNECTS: &str = "
import asyncio, errno, os, select, socket, sys
at = (sys.argv[1], int(sys.argv[2]))
def exchange(one):
    one.settimeout(20)
    data = os.urandom(100_000)
    sent = got = 0
    received = b''
    while len(received) < len(data):
        if sent < len(data): sent += one.send(data[sent:sent + 20000])
        received += one.recv(65536) or sys.exit('the end')
    assert received == data
def blocking():
    one = socket.socket()
    one.connect(at)
    assert one.getpeername() == at and one.getsockname()[1] != 0
    exchange(one)
    one.close()
def polling(wait):
    one = socket.socket()
    one.setblocking(False)
    assert one.connect_ex(at) == errno.EINPROGRESS
    wait(one)
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    exchange(one)
    one.close()
def by_select(one): assert select.select([], [one], [], 20)[1]
def by_poll(one):
    poll = select.poll()
    poll.register(one, select.POLLOUT)
    assert poll.poll(20000)[0][1] == select.POLLOUT
def by_epoll(one, edge=0):
    epoll = select.epoll()
    epoll.register(one, select.EPOLLOUT | edge)
    assert epoll.poll(20)[0][1] == select.EPOLLOUT
def by_edge(one): by_epoll(one, select.EPOLLET)
def refused():
    one = socket.socket()
    assert one.connect_ex((at[0], at[1] + 1)) == errno.ECONNREFUSED
    one.close()
    one = socket.socket()
    one.setblocking(False)
    assert one.connect_ex((at[0], at[1] + 1)) == errno.EINPROGRESS
    poll = select.poll()
    poll.register(one, select.POLLOUT)
    assert poll.poll(20000)[0][1] & select.POLLERR
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
    one.close()
async def client():
    reader, writer = await asyncio.open_connection(*at)
    data = os.urandom(300_000)
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    writer.close()
    await writer.wait_closed()
async def several(): await asyncio.gather(*(client() for _ in range(10)))
for n in range(5):
    blocking()
    for wait in by_select, by_poll, by_epoll, by_edge: polling(wait)
    refused()
    asyncio.run(several())
bound = socket.socket()
bound.bind(('', 0))
bound.connect(at)
exchange(bound)
later = socket.socket()
IP_BIND_ADDRESS_NO_PORT = 24
later.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
later.bind((bound.getsockname()[0], 0))
assert later.getsockname()[1] == 0
later.connect(at)
assert later.getsockname()[1] != 0 and later.getsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT) == 1
exchange(later)
print('right')
";

/// The NIC opens the connections of a client, in every way to connect and to wait.
#[test]
fn the_nic_opens_connections() {
    let several = TestbedSettings { workers: 3, nic_cores: Vec::new(), ..TestbedSettings::default() };
    let beside = TestbedSettings { beside: true, ..TestbedSettings::default() };
    for settings in [TestbedSettings::default(), several, beside] {
        opens_connections(&hosts(settings));
    }
}

fn opens_connections(bed: &Testbed) {
    for ipv6 in [false, true] {
        let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(ipv6), 6000))).expect("a listener");
        std::thread::spawn(move || {
            for one in listener.incoming().flatten() {
                std::thread::spawn(move || std::io::copy(&mut one.try_clone()?, &mut &one));
            }
        });
        let address = address_b(ipv6).to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        let program = if ipv6 {
            CONNECTS.replace("socket.socket()", "socket.socket(socket.AF_INET6)").replace("getpeername()", "getpeername()[:2]")
        } else {
            CONNECTS.into()
        };
        command.arg("run").arg("--socket").arg(bed.socket()).args([
            "--offload",
            "full",
            "--",
            "python3",
            "-c",
            &program,
            &address,
            "6000",
        ]);
        command.env_remove("BATON_RUN").stdout(Stdio::piped()).stderr(Stdio::piped());
        let before = count(bed, Counter::Made);
        let ran = bed.host_a.spawn(&mut command).expect("baton").wait_with_output().expect("its output");
        assert!(ran.status.success() && ran.stdout == b"right\n", "{}{}", text(&ran.stdout), text(&ran.stderr));
        let made = count(bed, Counter::Made) - before;
        assert!(made >= 76, "the NIC opened {made} (IPv6 {ipv6}); {:?}", statistics(bed));
    }
    let end = statistics(bed);
    assert_eq!((end.failed_moves, end.lost), (0, 0));
}

/// Connections to nowhere, with each error that Linux has for it; and more connections than there are ports.
const ERRORS: &str = "
import errno, socket, sys, time
def attempt(address, **options):
    one = socket.socket()
    for option, value in options.items(): one.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    one.settimeout(30)
    try: one.connect(address)
    except OSError as error: return one, errno.errorcode[error.errno]
    return one, 'open'
peer = sys.argv[1]
print(attempt((peer, 6001))[1])
print(attempt((peer, 6002))[1])
print(attempt((peer, 6003))[1])
begun = time.monotonic()
print(attempt((peer, 6004), TCP_SYNCNT=1)[1])
print('in time' if 2 < time.monotonic() - begun < 8 else 'after %f s' % (time.monotonic() - begun))
begun = time.monotonic()
print(attempt((peer, 6004), TCP_USER_TIMEOUT=1500)[1])
print('in time' if 1.4 < time.monotonic() - begun < 6 else 'after %f s' % (time.monotonic() - begun))
held = [attempt((peer, 6000)) for _ in range(9)]
print(' '.join(sorted(why for _, why in held)))
held.pop(next(at for at, one in enumerate(held) if one[1] == 'open'))[0].close()
";

/// Runs a program on host A, natively or under full offload, which succeeds. Returns its output.
fn run(bed: &Testbed, with_baton: bool, program: &[&str]) -> String {
    let socket = bed.socket().to_string_lossy().into_owned();
    let baton = [env!("CARGO_BIN_EXE_baton"), "run", "--socket", &socket, "--offload", "full", "--"];
    let line = [if with_baton { &baton[..] } else { &[] }, program].concat();
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).env_remove("BATON_RUN").stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = bed.host_a.spawn(&mut command).expect("a program").wait_with_output().expect("its output");
    assert!(ran.status.success(), "{program:?}: {}", text(&ran.stderr));
    text(&ran.stdout)
}

/// ICMP messages while the NIC opens a connection, TCP_SYNCNT, TCP_USER_TIMEOUT, and the end of the ports: as natively.
fn connecting_fails_as_natively(beside: bool) {
    let bed = bed(beside);
    let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 6000))).expect("a listener");
    let rules = [
        "add table inet wall",
        "add chain inet wall in { type filter hook input priority 0 ; }",
        "add rule inet wall in tcp dport 6001 reject with icmp type host-unreachable",
        "add rule inet wall in tcp dport 6002 reject with icmp type admin-prohibited",
        "add rule inet wall in tcp dport 6003 reject with icmp type port-unreachable",
        "add rule inet wall in tcp dport 6004 drop",
    ];
    for rule in rules {
        let words: Vec<&str> = ["nft"].into_iter().chain(rule.split(' ')).collect();
        let added = on_b(&bed, &words);
        assert!(added.status.success(), "{rule}: {}", text(&added.stderr));
    }
    let ports = bed.host_a.run(|| std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "42000 42007"));
    ports.expect("the range of ports");
    let address = address_b(false).to_string();
    let made = count(&bed, Counter::Made);
    let ours = run(&bed, true, &["python3", "-c", ERRORS, &address]);
    assert_eq!(count(&bed, Counter::Made), made + 8, "{ours}");
    let opens = ["open"; 8].join(" ");
    assert_eq!(
        ours,
        format!("EHOSTUNREACH\nEHOSTUNREACH\nECONNREFUSED\nETIMEDOUT\nin time\nETIMEDOUT\nin time\nEADDRNOTAVAIL {opens}\n")
    );
    drop(listener);
}

/// Connects sockets to a port where nobody listens, one after the other: half of them wait for the result.
const ALL_REFUSED: &str = "
import collections, errno, select, socket, sys
why = collections.Counter()
for at in range(200):
    with socket.socket() as one:
        one.setblocking(at % 2)
        error = one.connect_ex((sys.argv[1], 6001))
        if error == errno.EINPROGRESS:
            select.select([], [one], [])
            error = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        why[errno.errorcode[error]] += 1
print(why)
";

/// The only local port that there is belongs to the next socket when the last one is closed.
fn a_socket_that_was_refused_leaves_its_port_to_the_next(beside: bool) {
    let bed = bed(beside);
    let ports = bed.host_a.run(|| std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "42000 42000"));
    ports.expect("the range of ports");
    let ours = run(&bed, true, &["python3", "-c", ALL_REFUSED, &address_b(false).to_string()]);
    assert_eq!(ours, "Counter({'ECONNREFUSED': 200})\n");
    let kernels = bed.host_a.run(|| std::fs::read_to_string("/proc/thread-self/net/snmp")).expect("the kernel's counters");
    let mut tcp = kernels.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (mut names, mut counts) = (tcp.next().expect("names").split(' '), tcp.next().expect("counts").split(' '));
    let opens = names.position(|name| name == "ActiveOpens").and_then(|at| counts.nth(at));
    assert_eq!(opens, Some("0"), "the NIC opens all");
}

/// Connects each of two sockets to a port where nobody listens, and then to one where somebody does: one that waits for
/// the result, and one that asks for it by another connect(2), as Perl does.
const REFUSED_FIRST: &str = "
import errno, select, socket, sys
nobody, somebody = (sys.argv[1], 6001), (sys.argv[1], 6000)
one = socket.socket()
print([errno.errorcode.get(one.connect_ex(to)) for to in (nobody, nobody, somebody)], one.getpeername() == somebody)
other = socket.socket()
other.setblocking(False)
poll = select.poll()
for to in nobody, somebody:
    begun = other.connect_ex(to)
    poll.register(other, select.POLLOUT)
    assert poll.poll(20000)
    poll.unregister(other)
    print(errno.errorcode[begun], errno.errorcode.get(other.connect_ex(nobody)) if to == nobody else other.getpeername() == somebody)
";

/// A socket whose connection could not be opened opens another one, and says once why the last one failed.
fn a_socket_that_was_refused_connects_again(beside: bool) {
    let bed = bed(beside);
    let _listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 6000))).expect("a listener");
    let address = address_b(false).to_string();
    let program = ["python3", "-c", REFUSED_FIRST, &address];
    let natively = run(&bed, false, &program);
    assert_eq!(natively, "['ECONNREFUSED', 'ECONNREFUSED', None] True\nEINPROGRESS ECONNREFUSED\nEINPROGRESS True\n");
    let made = count(&bed, Counter::Made);
    assert_eq!(run(&bed, true, &program), natively);
    assert_eq!(count(&bed, Counter::Made), made + 2);
}

/// Connects a socket that is in a set already, edge-triggered, to a port where nobody listens, twice, and then to one
/// where somebody does, who ends the stream when a byte comes.
const BY_EDGE: &str = "
import errno, select, socket, sys
nobody, somebody = (sys.argv[1], 6001), (sys.argv[1], 6000)
one = socket.socket()
one.setblocking(False)
epoll = select.epoll()
epoll.register(one, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
def edges(): return [hex(events) for _, events in epoll.poll(20)]
def connect(to): return errno.errorcode.get(one.connect_ex(to), 'open')
print(edges())
for to in nobody, nobody, somebody:
    print(connect(to), edges(), one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    if to == nobody: print(connect(to), edges())
print(connect(somebody), connect(somebody))
one.send(b'x')
print(int(edges()[0], 16) & (select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP) == select.EPOLLIN | select.EPOLLRDHUP)
";

/// Of each connection that a socket gets, opened or not, a set reports what happens to it, whatever it has reported of
/// the socket before. A connect(2) says how the last attempt ended: ECONNABORTED where SO_ERROR has said why already,
/// and once that it is open.
fn each_connection_of_a_socket_has_its_edges(beside: bool) {
    let bed = bed(beside);
    let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 6000))).expect("a listener");
    std::thread::spawn(move || {
        for mut peer in listener.incoming().flatten() {
            let ended = peer.read_exact(&mut [0]).and_then(|()| peer.shutdown(Shutdown::Write));
            // Until the program ends, so that nothing else happens to the connection.
            let _ = ended.and_then(|()| std::io::copy(&mut peer, &mut std::io::sink()));
        }
    });
    let address = address_b(false).to_string();
    let program = ["python3", "-c", BY_EDGE, &address];
    let natively = run(&bed, false, &program);
    let refused = "EINPROGRESS ['0x201d'] 111\nECONNABORTED ['0x14']\n";
    assert_eq!(natively, format!("['0x14']\n{refused}{refused}EINPROGRESS ['0x4'] 0\nopen EISCONN\nTrue\n"));
    let made = count(&bed, Counter::Made);
    assert_eq!(run(&bed, true, &program), natively);
    assert_eq!(count(&bed, Counter::Made), made + 1);
}

/// Begins to connect where each first SYN is lost, with a time limit; and goes on without one.
const GOES_ON: &str = "
import errno, socket, struct, sys
def connect(one, to): return errno.errorcode.get(one.connect_ex(to), 'open')
def begin():
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack('ll', 0, 100_000))
    return one
slow = (sys.argv[1], 6004)
one = begin()
print(connect(one, slow), connect(one, slow), connect(one, ('127.0.0.1', 1)))
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack('ll', 0, 0))
print(connect(one, slow), connect(one, slow), one.getpeername() == slow)
";

/// A connect(2) that may wait waits for the connection that an earlier one has begun, whatever address it is given; one
/// that may not, or not long enough, says EALREADY.
fn connect_goes_on_with_what_it_has_begun(beside: bool) {
    let bed = bed(beside);
    let _listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 6004))).expect("a listener");
    let rules = "add table inet wall; add chain inet wall in { type filter hook input priority 0 ; }; \
                 add rule inet wall in tcp dport 6004 tcp flags & (syn | ack) == syn numgen inc mod 2 0 drop";
    let added = on_b(&bed, &["nft", rules]);
    assert!(added.status.success(), "{}", text(&added.stderr));
    let address = address_b(false).to_string();
    let program = ["python3", "-c", GOES_ON, &address];
    let natively = run(&bed, false, &program);
    assert_eq!(natively, "EINPROGRESS EALREADY EALREADY\nopen EISCONN True\n");
    let made = count(&bed, Counter::Made);
    assert_eq!(run(&bed, true, &program), natively);
    assert_eq!(count(&bed, Counter::Made), made + 1);
}

/// Sets negative time limits, and calls what would wait: connect(2) and recv(2) of a connection, accept(2), recv(2) of
/// a UDP socket. Each in a process that ends after a while if the call waits.
const NEGATIVE: &str = "
import errno, signal, socket, struct, sys
signal.alarm(20)
NEGATIVE = struct.pack('ll', -1, 0)
def attempt(call, *given):
    try: call(*given)
    except OSError as error: print(errno.errorcode[error.errno])
peer = (sys.argv[1], 6000)
one = socket.socket()
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, NEGATIVE)
attempt(one.connect, (sys.argv[1], 6004))
one = socket.create_connection(peer)
one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, NEGATIVE)
attempt(one.recv, 1)
attempt(one.dup().recv, 1)
print(one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16))
attempt(one.setsockopt, socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 1, 1_000_000))
attempt(one.recv, 1)
for kind, call in (socket.SOCK_STREAM, socket.socket.accept), (socket.SOCK_DGRAM, lambda one: one.recv(1)):
    one = socket.socket(type=kind)
    one.bind(('', 7000))
    if kind == socket.SOCK_STREAM: one.listen()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, NEGATIVE)
    attempt(call, one)
";

/// A negative time limit lets no call wait, although the kernel says of it that there is none.
fn a_negative_time_limit_lets_nothing_wait(beside: bool) {
    let bed = bed(beside);
    let _listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 6000))).expect("a listener");
    let rules = "add table inet wall; add chain inet wall in { type filter hook input priority 0 ; }; \
                 add rule inet wall in tcp dport 6004 drop";
    let added = on_b(&bed, &["nft", rules]);
    assert!(added.status.success(), "{}", text(&added.stderr));
    let address = address_b(false).to_string();
    let program = ["python3", "-c", NEGATIVE, &address];
    let natively = run(&bed, false, &program);
    assert_eq!(natively, "EINPROGRESS\nEAGAIN\nEAGAIN\nTrue\nEDOM\nEAGAIN\nEAGAIN\nEAGAIN\n");
    assert_eq!(run(&bed, true, &program), natively);
}

/// A BPF program at the control group refuses connect(2): the call fails with EPERM at once, and the NIC opens no
/// connection. Before that program is attached, and when it is gone, the NIC does.
fn what_a_control_group_refuses_fails_as_natively(beside: bool) {
    let bed = bed(beside);
    let at = SocketAddr::new(address_b(false), 6000);
    let _listener = bed.host_b.run(|| TcpListener::bind(at)).expect("a listener");
    let program = ["python3", &script("refused_connect.py"), &at.ip().to_string(), &at.port().to_string()];
    let natively = run(&bed, false, &program);
    assert_eq!(natively, "open EPERM EPERM open\n");
    let made = count(&bed, Counter::Made);
    assert_eq!(run(&bed, true, &program), natively);
    assert_eq!(count(&bed, Counter::Made), made + 2);
}

/// Connects, and sends when the test sends it a line. Prints how the connection ends.
const SILENCE: &str = "
import errno, socket, sys
one = socket.create_connection((sys.argv[1], 6000), 20)
print('open', flush=True)
sys.stdin.readline()
one.sendall(b'x')
try: one.recv(1)
except OSError as error: print(errno.errorcode.get(error.errno, 'nothing'), flush=True)
";

/// The host's limit for how long data is sent again (tcp_retries2) is also that of a connection that the NIC has opened
/// and that never moves: with three it ends within ten seconds, as `silence` reckons, by default after many minutes.
fn the_hosts_retransmissions_are_those_of_what_the_nic_opens(beside: bool) {
    let bed = bed(beside);
    bed.host_a.run(|| std::fs::write("/proc/sys/net/ipv4/tcp_retries2", "3")).expect("the limit");
    let address = address_b(false);
    let _listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address, 6000))).expect("a listener");
    let made = count(&bed, Counter::Made);
    let (mut program, mut lines) = start_printing(&bed, &["python3", "-c", SILENCE, &address.to_string()]);
    let mut said = || lines.next().and_then(Result::ok);
    assert_eq!(said().as_deref(), Some("open"));
    assert_eq!(count(&bed, Counter::Made), made + 1);
    let rules = "add table inet silent; add chain inet silent c { type filter hook prerouting priority -300; policy drop; }";
    let silent = on_b(&bed, &["nft", rules]);
    assert!(silent.status.success(), "{}", text(&silent.stderr));
    writeln!(program.0.stdin.as_mut().expect("its input"), "go on").expect("it reads");
    assert_eq!(said().as_deref(), Some("ETIMEDOUT"));
}

/// Connects, and sends as many bytes as each line says.
const SENDS: &str = "
import socket, sys
one = socket.create_connection((sys.argv[1], 6000), 20)
print('open', flush=True)
for line in sys.stdin:
    one.sendall(bytes(int(line)))
    print('sent', flush=True)
";

/// What the host says about idle connections (tcp_slow_start_after_idle) is also true of a connection that the NIC has
/// opened and that never moves: its window is worn down while nothing is sent, or is not.
fn an_idle_window_is_the_hosts_where_the_nic_opens_a_connection(beside: bool) {
    for worn_down in [true, false] {
        let bed = bed(beside);
        let setting = if worn_down { "1" } else { "0" };
        bed.host_a.run(|| std::fs::write("/proc/sys/net/ipv4/tcp_slow_start_after_idle", setting)).expect("the setting");
        let address = address_b(false);
        let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address, 6000))).expect("a listener");
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().expect("a connection");
            std::io::copy(&mut peer, &mut std::io::sink())
        });
        let made = count(&bed, Counter::Made);
        let (mut program, mut lines) = start_printing(&bed, &["python3", "-c", SENDS, &address.to_string()]);
        let mut said = || lines.next().and_then(Result::ok);
        assert_eq!(said().as_deref(), Some("open"));
        assert_eq!(count(&bed, Counter::Made), made + 1);
        let mut input = program.0.stdin.take().expect("its input");
        // Sends so many bytes, and waits until they are acknowledged. The window in segments then.
        let mut window_after = |bytes: u32| {
            writeln!(input, "{bytes}").expect("it reads");
            assert_eq!(said().as_deref(), Some("sent"));
            let mut window = 0;
            wait_until("all is acknowledged", || {
                let detail = connections(&bed)[0].detail;
                window = detail.cwnd;
                (detail.in_flight, detail.unsent) == (0, 0)
            });
            window
        };
        let mut before = 0;
        wait_until("a wide window", || {
            before = window_after(200_000);
            before > 20
        });
        // Several of the time-outs by which it is worn down.
        kernel_repeats(&bed, 8081, 4);
        let after = window_after(1);
        assert_eq!(after < before, worn_down, "{before} segments before, {after} after");
    }
}

/// Begins to connect from one port, gives that up when the test says so, and connects from that port again.
const AGAIN: &str = "
import socket, sys
def begin():
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind((sys.argv[1], 41000))
    return one
first = begin()
first.setblocking(False)
first.connect_ex((sys.argv[2], 6004))
print('begun', flush=True)
sys.stdin.readline()
first.close()
again = begin()
again.settimeout(20)
again.connect((sys.argv[2], 6004))
print('open', flush=True)
";

/// The agent dies while the NIC opens a connection: nobody has its 4-tuple any more, and another one can have it.
fn what_a_dead_agent_was_opening_can_be_opened_again(beside: bool) {
    let bed = bed(beside);
    let peer = SocketAddr::new(address_b(false), 6004);
    let _listener = bed.host_b.run(|| TcpListener::bind(peer)).expect("a listener");
    // The kernel knows the neighbour from then on.
    drop(bed.host_a.run(|| TcpStream::connect(peer)).expect("a connection"));
    put_wall_up(&bed);
    let [from, to] = [address_a(false), address_b(false)].map(|address| address.to_string());
    let (mut program, mut lines) = start_printing(&bed, &["python3", "-c", AGAIN, &from, &to]);
    let mut said = || lines.next().and_then(Result::ok);
    assert_eq!(said().as_deref(), Some("begun"));
    wait_until("the NIC opens it", || is_opened_by(&bed, Place::Nic));
    let first = statistics(&bed);
    process::signal(first.agent_process, libc::SIGKILL).expect("a signal");
    wait_until("the next NIC", || {
        let answer = bed.tool().and_then(|mut tool| tool.ask(Ask::Statistics));
        matches!(answer, Ok(Reply::Statistics(now)) if now.nic_process != first.nic_process)
    });
    nft_on_b(&bed, "delete table inet wall");
    writeln!(program.0.stdin.as_mut().expect("its input"), "go on").expect("it reads");
    assert_eq!(said().as_deref(), Some("open"));
}

/// Connects, and is patient.
const CONNECT: &str = "
import socket, sys
one = socket.create_connection((sys.argv[1], 6004), 60)
print('open', flush=True)
sys.stdin.readline()
";

/// An IPsec policy comes while the NIC opens a connection: only the kernel can ask it about the first packets, so it
/// opens the connection.
fn an_ipsec_policy_leaves_what_the_nic_is_opening_to_the_kernel(beside: bool) {
    let bed = bed(beside);
    let peer = SocketAddr::new(address_b(false), 6004);
    let _listener = bed.host_b.run(|| TcpListener::bind(peer)).expect("a listener");
    // The kernel knows the neighbour from then on.
    drop(bed.host_a.run(|| TcpStream::connect(peer)).expect("a connection"));
    put_wall_up(&bed);
    let (_program, mut lines) = start_printing(&bed, &["python3", "-c", CONNECT, &peer.ip().to_string()]);
    wait_until("the NIC opens it", || is_opened_by(&bed, Place::Nic));
    on_a(&bed, "ip xfrm policy add dir in src 10.99.0.0/16 dst 0.0.0.0/0 action block");
    wait_until("the kernel opens it", || is_opened_by(&bed, Place::Kernel));
    nft_on_b(&bed, "delete table inet wall");
    assert_eq!(lines.next().and_then(Result::ok).as_deref(), Some("open"));
}

/// Has host B drop what comes to port 6004.
fn put_wall_up(bed: &Testbed) {
    nft_on_b(bed, "add table inet wall");
    nft_on_b(bed, "add chain inet wall in { type filter hook input priority 0 ; }");
    nft_on_b(bed, "add rule inet wall in tcp dport 6004 drop");
}

fn nft_on_b(bed: &Testbed, line: &str) {
    let words: Vec<&str> = ["nft"].into_iter().chain(line.split(' ')).collect();
    let done = on_b(bed, &words);
    assert!(done.status.success(), "{line}: {}", text(&done.stderr));
}

/// Whether a connection to port 6004 is opened here.
fn is_opened_by(bed: &Testbed, place: Place) -> bool {
    connections(bed).iter().any(|one| one.peer.ends_with(":6004") && one.made_by == place)
}
