//! `baton run --offload full`: the NIC makes the connections of unmodified programs.

use crate::common::hosts;
use crate::scratch::{Scratch, text};
use baton_abi::layout::Counter;
use baton_lab::testbed::{Testbed, TestbedSettings, address_a};
use baton_linux::events::{Poller, Trigger};
use baton_linux::process;
use baton_protocol::program::{Ask, ConnectionInfo, Place, Reply, Statistics};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A program of host A's, which ends with this.
pub(crate) struct Program(pub(crate) Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Program {
    /// Asks it to end, as whoever has processes of its own needs to be: they would stay without it.
    fn ends(&mut self) -> std::io::Result<()> {
        let process = process::open_process(self.0.id())?;
        process::signal(self.0.id(), libc::SIGTERM)?;
        let poller = Poller::new()?;
        poller.add(process.as_fd(), 0, Trigger::Readable)?;
        let mut ended = Vec::new();
        poller.wait(Some(Duration::from_secs(20)), &mut ended)?;
        assert!(!ended.is_empty(), "it does not end");
        Ok(())
    }
}

/// Two hosts, the first with a NIC between kernel and wire, or beside the kernel.
fn bed(beside: bool) -> Testbed {
    hosts(TestbedSettings { beside, ..TestbedSettings::default() })
}

/// Each of these tests with a NIC between kernel and wire, and with one beside the kernel.
macro_rules! in_both_shapes {
    ($($test:ident)*) => {
        mod inline {
            $(#[test] fn $test() { super::$test(false) })*
        }
        mod beside {
            $(#[test] fn $test() { super::$test(true) })*
        }
    };
}

in_both_shapes! {
    the_nic_makes_the_connections_of_a_server
    what_the_nic_has_made_can_move
    listeners_are_there_again_after_a_death
    listeners_are_the_kernels_while_there_are_rules
    what_has_moved_to_the_kernel_is_its_own
    a_flood_of_syns_leaves_room_for_honest_clients
    servers_of_all_kinds_are_served
    the_nic_closes_what_it_has_made
    a_death_while_the_nic_closes_loses_nothing
    connecting_fails_as_natively
}

/// Starts a program on host A whose connections the NIC makes.
pub(crate) fn start(bed: &Testbed, arguments: &[&str]) -> Program {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("run").arg("--socket").arg(bed.socket()).args(["--offload", "full", "--"]).args(arguments);
    command.env_remove("BATON_RUN").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    Program(bed.host_a.spawn(&mut command).expect("baton run"))
}

pub(crate) fn on_b(bed: &Testbed, command: &[&str]) -> Output {
    let mut command_line = Command::new(command[0]);
    command_line.args(&command[1..]).stdout(Stdio::piped()).stderr(Stdio::piped());
    bed.host_b.spawn(&mut command_line).expect(command[0]).wait_with_output().expect("its output")
}

pub(crate) fn statistics(bed: &Testbed) -> Statistics {
    match bed.tool().expect("a tool").ask(Ask::Statistics).expect("an answer") {
        Reply::Statistics(statistics) => *statistics,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn count(bed: &Testbed, counter: Counter) -> u64 {
    statistics(bed).counters[counter as usize]
}

fn connections(bed: &Testbed) -> Vec<ConnectionInfo> {
    match bed.tool().expect("a tool").ask(Ask::List { from: (0, 0) }).expect("an answer") {
        Reply::Connections(list) => list,
        other => panic!("{other:?}"),
    }
}

fn connect(bed: &Testbed, address: SocketAddr) -> std::io::Result<TcpStream> {
    bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(10)))
}

/// Waits until the NIC makes the connections of a server: a client's connection is one of them.
fn wait_for_server(bed: &Testbed, address: SocketAddr) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let before = count(bed, Counter::Made);
    while connect(bed, address).is_err() || count(bed, Counter::Made) == before {
        assert!(Instant::now() < deadline, "the NIC makes no connections of {address}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn address(ipv6: bool, port: u16) -> SocketAddr {
    SocketAddr::new(address_a(ipv6), port)
}

/// An unmodified Python server answers curl through connections that the NIC has made, by both families.
fn the_nic_makes_the_connections_of_a_server(beside: bool) {
    let bed = bed(beside);
    let scratch = Scratch::new("full");
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(scratch.file("content"), &content).expect("a file");
    for ipv6 in [false, true] {
        let at = address(ipv6, 8000);
        let directory = scratch.0.to_string_lossy().into_owned();
        let bind = at.ip().to_string();
        let _server = start(&bed, &["python3", "-m", "http.server", "8000", "--bind", &bind, "--directory", &directory]);
        wait_for_server(&bed, at);
        let fetch = || {
            let answer = on_b(&bed, &["curl", "-sS", "-m", "20", &format!("http://{at}/content")]);
            assert!(answer.status.success(), "{}", text(&answer.stderr));
            assert!(answer.stdout == content, "{} bytes of {} arrived right", answer.stdout.len(), content.len());
        };
        fetch();
        let before = count(&bed, Counter::Made);
        (0..5).for_each(|_| fetch());
        assert_eq!(count(&bed, Counter::Made), before + 5, "each of the five was made by the NIC");
    }
    let end = statistics(&bed);
    assert_eq!((end.failed_moves, end.lost), (0, 0));
}

/// A connection that the NIC has made is shown as such, is on the NIC, and goes to the kernel and back like any other.
fn what_the_nic_has_made_can_move(beside: bool) {
    const ECHO: &str = "
import socket
listener = socket.create_server(('', 7000))
while True:
    server, _ = listener.accept()
    while data := server.recv(65536): server.sendall(data)
    server.close()
";
    let bed = bed(beside);
    let _server = start(&bed, &["python3", "-c", ECHO]);
    wait_for_server(&bed, address(false, 7000));
    let mut client = connect(&bed, address(false, 7000)).expect("a connection");
    client.set_read_timeout(Some(Duration::from_secs(10))).expect("a limit");
    let local = client.local_addr().expect("its address").to_string();
    let mut exchange = |byte: u8| {
        let sent = vec![byte; 50_000];
        client.write_all(&sent).expect("room");
        let mut received = vec![0; sent.len()];
        client.read_exact(&mut received).expect("the echo");
        assert!(received == sent);
    };
    exchange(1);
    let ours = || connections(&bed).into_iter().find(|one| one.peer == local).expect("the connection");
    assert_eq!((ours().made_by, ours().place), (Place::Nic, Place::Nic));
    for (n, to) in [(2, Place::Kernel), (3, Place::Nic), (4, Place::Kernel)] {
        let one = ours();
        let mut tool = bed.tool().expect("a tool");
        wait_until("the move", || {
            match tool.ask(Ask::MoveAny { session: one.session, connection: one.connection, to }).expect("an answer") {
                Reply::Done => true,
                Reply::Stayed { transient: true, .. } => false,
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(ours().place, to);
        exchange(n);
    }
}

/// A server that accepts one connection for each line that it is sent on standard input, and then echoes.
const ON_DEMAND: &str = "
import socket, sys, select, threading
listener = socket.create_server(('', 7000), backlog=20)
select.select([listener], [], [])
def echo(server):
    while data := server.recv(65536): server.sendall(data)
    server.close()
for line in sys.stdin:
    server, _ = listener.accept()
    threading.Thread(target=echo, args=(server,), daemon=True).start()
";

fn exchange(client: &mut TcpStream, byte: u8) {
    try_exchange(client, byte).expect("the echo");
}

fn try_exchange(client: &mut TcpStream, byte: u8) -> std::io::Result<()> {
    client.set_read_timeout(Some(Duration::from_secs(20)))?;
    let sent = vec![byte; 20_000];
    client.write_all(&sent)?;
    let mut received = vec![0; sent.len()];
    client.read_exact(&mut received)?;
    assert!(received == sent);
    Ok(())
}

pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within twenty seconds");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// NIC or agent is killed: connections go on, also one that waits to be accepted with data, and later ones are made by the next
/// NIC.
fn listeners_are_there_again_after_a_death(beside: bool) {
    for agent_dies in [false, true] {
        let bed = bed(beside);
        let at = address(false, 7000);
        let mut server = start(&bed, &["python3", "-c", ON_DEMAND]);
        let mut orders = server.0.stdin.take().expect("its input");
        wait_for_server(&bed, at);
        // It has not accepted any yet.
        let mut waiting = connect(&bed, at).expect("a connection");
        waiting.write_all(&[7; 1000]).expect("room");
        wait_until("the NIC's connection", || count(&bed, Counter::Made) >= 2);
        let first = statistics(&bed);
        let process = if agent_dies { first.agent_process } else { first.nic_process };
        baton_linux::process::signal(process, 9).expect("a signal");
        // It sends its SYN again until there is a NIC.
        let mut in_between = connect(&bed, at).expect("a connection");
        wait_until("the next NIC", || {
            let answer = bed.tool().and_then(|mut tool| tool.ask(Ask::Statistics));
            matches!(answer, Ok(Reply::Statistics(now)) if now.nic_process != first.nic_process)
        });
        for _ in 0..50 {
            writeln!(orders, "accept").expect("a server");
        }
        waiting.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
        let mut received = [0; 1000];
        waiting.read_exact(&mut received).expect("the echo");
        assert_eq!(received, [7; 1000]);
        exchange(&mut waiting, 2);
        exchange(&mut in_between, 4);
        let made = count(&bed, Counter::Made);
        let mut next = connect(&bed, at).expect("a connection");
        exchange(&mut next, 3);
        assert!(count(&bed, Counter::Made) > made);
        let local = next.local_addr().expect("its address").to_string();
        assert!(connections(&bed).iter().any(|one| one.peer == local && one.made_by == Place::Nic));
        assert_eq!(statistics(&bed).lost, 0);
    }
}

/// While the firewall has chains that may judge a connection's first packets the kernel makes the connections: it alone can ask
/// them.
fn listeners_are_the_kernels_while_there_are_rules(beside: bool) {
    let bed = bed(beside);
    let at = address(false, 7000);
    let mut server = start(&bed, &["python3", "-c", ON_DEMAND]);
    let mut orders = server.0.stdin.take().expect("its input");
    wait_for_server(&bed, at);
    for _ in 0..1000 {
        writeln!(orders, "accept").expect("a server");
    }
    let nft = |line: &str| {
        let mut command = Command::new("nft");
        command.args(line.split(' '));
        assert!(bed.host_a.spawn(&mut command).expect("nft").wait().expect("its end").success(), "nft {line}");
    };
    // None: its handshake was under way when the listener changed hands, and the kernel knows nothing of it.
    let made_by_nic = || {
        let mut client = connect(&bed, at).ok()?;
        try_exchange(&mut client, 1).ok()?;
        let local = client.local_addr().expect("its address").to_string();
        Some(connections(&bed).iter().any(|one| one.peer == local && one.made_by == Place::Nic))
    };
    assert_eq!(made_by_nic(), Some(true));
    nft("add table inet guard");
    nft("add chain inet guard in { type filter hook input priority 0 ; }");
    wait_until("the kernel's connections", || made_by_nic() == Some(false));
    nft("delete table inet guard");
    wait_until("the NIC's connections", || made_by_nic() == Some(true));
}

/// Sends SYNs from forged addresses: how many, to which address and port.
const FLOOD: &str = "
import random, socket, struct, sys
count, address, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
def checksum(data):
    total = sum(struct.unpack('!%dH' % (len(data) // 2), data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
destination = socket.inet_aton(address)
for n in range(count):
    source = struct.pack('!BBH', 10, 77, n & 0xffff)
    options = bytes([2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7])
    tcp = struct.pack('!HHIIBBHHH', random.randrange(1024, 65536), port, random.getrandbits(32), 0, 10 << 4, 2, 65535, 0, 0) + options
    pseudo = source + destination + struct.pack('!BBH', 0, 6, len(tcp))
    tcp = tcp[:16] + struct.pack('!H', checksum(pseudo + tcp)) + tcp[18:]
    ip = struct.pack('!BBHHHBBH', 0x45, 0, 20 + len(tcp), n & 0xffff, 0, 64, 6, 0) + source + destination
    raw.sendto(ip + tcp, (address, 0))
";

/// A connection that the NIC has made, and that has moved to the kernel, is not disturbed by a SYN with its addresses and ports, as
/// somebody may forge one; nor does the NIC get its segments then. Clients of the same host are served, too.
fn what_has_moved_to_the_kernel_is_its_own(beside: bool) {
    let bed = bed(beside);
    let at = address(false, 7000);
    let _server = start(&bed, &["python3", "-c", ASYNCIO]);
    wait_for_server(&bed, at);
    let mut client = connect(&bed, at).expect("a connection");
    exchange(&mut client, 1);
    let local = client.local_addr().expect("its address");
    let ours = || connections(&bed).into_iter().find(|one| one.peer == local.to_string()).expect("the connection");
    assert_eq!(ours().made_by, Place::Nic);
    let mut tool = bed.tool().expect("a tool");
    wait_until("the move", || {
        let one = ours();
        let ask = Ask::MoveAny { session: one.session, connection: one.connection, to: Place::Kernel };
        matches!(tool.ask(ask).expect("an answer"), Reply::Done)
    });
    let forge = FLOOD
        .replace("struct.pack('!BBH', 10, 77, n & 0xffff)", &format!("socket.inet_aton('{}')", local.ip()))
        .replace("random.randrange(1024, 65536)", &local.port().to_string());
    let segments = count(&bed, Counter::Segments);
    for byte in 2..5 {
        let sent = on_b(&bed, &["python3", "-c", &forge, "5", &at.ip().to_string(), "7000"]);
        assert!(sent.status.success(), "{}", text(&sent.stderr));
        exchange(&mut client, byte);
    }
    assert_eq!(ours().place, Place::Kernel);
    // Some of the connection with which the server was waited for, which ends meanwhile.
    let segments = count(&bed, Counter::Segments) - segments;
    assert!(segments < 20, "the NIC has had {segments} segments of 60,000 bytes there and back");
    let made = count(&bed, Counter::Made);
    exchange(&mut connect(&bed, at).expect("a connection"), 5);
    assert_eq!(count(&bed, Counter::Made), made + 1, "the listener is the NIC's as before");
    let mut neighbour = bed.host_a.run(|| TcpStream::connect_timeout(&at, Duration::from_secs(10))).expect("a connection");
    exchange(&mut neighbour, 6);
}

/// Resident memory of a process, in bytes.
fn resident(process: u32) -> u64 {
    let pages = std::fs::read_to_string(format!("/proc/{process}/statm")).expect("a process");
    pages.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("a number") * 4096
}

/// Ten thousand SYNs from forged addresses: most are answered and not remembered, an honest client connects nevertheless, with
/// window scaling and SACK, and the NIC's memory does not grow with their number.
fn a_flood_of_syns_leaves_room_for_honest_clients(beside: bool) {
    let bed = bed(beside);
    let at = address(false, 7000);
    let mut server = start(&bed, &["python3", "-c", ON_DEMAND]);
    let mut orders = server.0.stdin.take().expect("its input");
    wait_for_server(&bed, at);
    for _ in 0..50 {
        writeln!(orders, "accept").expect("a server");
    }
    let flood = |count: &str| {
        let sent = on_b(&bed, &["python3", "-c", FLOOD, count, &at.ip().to_string(), "7000"]);
        assert!(sent.status.success(), "{}", text(&sent.stderr));
    };
    let nic = statistics(&bed).nic_process;
    // A machine that has other work drops some of them before the NIC receives them.
    wait_until("a full table of handshakes", || {
        flood("1000");
        count(&bed, Counter::SynCookies) > 0
    });
    let (before, cookies) = (resident(nic), count(&bed, Counter::SynCookies));
    wait_until("10,000 answers", || {
        flood("10000");
        count(&bed, Counter::SynCookies) >= cookies + 10_000
    });
    let after = resident(nic);
    assert!(after < before + (1 << 20), "the NIC has grown from {before} to {after} bytes");
    let mut client = connect(&bed, at).expect("an honest client");
    exchange(&mut client, 1);
    let local = client.local_addr().expect("its address").to_string();
    let ours = connections(&bed).into_iter().find(|one| one.peer == local).expect("its connection");
    assert_eq!(ours.made_by, Place::Nic);
    let info = baton_linux::tcp_info::TcpInfo::read(std::os::fd::AsFd::as_fd(&client)).expect("TCP_INFO");
    assert!(info.snd_wscale > 0 && info.options & baton_linux::tcp_info::OPTION_SACK != 0);
}

/// With several workers every connection is made, whichever worker owns its bucket, and goes on while buckets change hands.
#[test]
fn several_workers_make_connections() {
    let bed = hosts(TestbedSettings { workers: 3, nic_cores: Vec::new(), ..TestbedSettings::default() });
    let at = address(false, 7000);
    let _server = start(&bed, &["python3", "-c", ASYNCIO]);
    wait_for_server(&bed, at);
    for indirection in ["rss-indir=0", "rss-indir=012", "rss-indir=21", "rss-indir=1"] {
        let mut set = Command::new(env!("CARGO_BIN_EXE_baton"));
        set.args(["nic", "set", "--socket"]).arg(bed.socket()).arg(indirection);
        let set = set.output().expect("baton");
        assert!(set.status.success(), "{}", text(&set.stderr));
        let before = count(&bed, Counter::Made);
        let ran = on_b(&bed, &["python3", "-c", ECHO_CLIENTS, &at.ip().to_string(), "7000", "30"]);
        assert!(ran.status.success() && ran.stdout == b"right", "{}{}", text(&ran.stdout), text(&ran.stderr));
        assert_eq!(count(&bed, Counter::Made), before + 30, "each of the thirty was made by the NIC");
    }
    let end = statistics(&bed);
    assert_eq!((end.failed_moves, end.lost), (0, 0));
}

/// Programs of host A, each with a client's script for host B, which is given the address and compares what it gets.
const ASYNCIO: &str = "
import asyncio
async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    async with await asyncio.start_server(serve, '', 7000) as server:
        await server.serve_forever()
asyncio.run(main())
";

const ECHO_CLIENTS: &str = "
import hashlib, socket, sys, threading
def client(n):
    one = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20)
    for round in range(20):
        data = hashlib.sha256(b'%d %d' % (n, round)).digest() * 1000
        sender = threading.Thread(target=one.sendall, args=(data,))
        sender.start()
        got = b''
        while len(got) < len(data): got += one.recv(65536) or sys.exit('the end')
        sender.join()
        assert got == data, 'wrong bytes'
    one.close()
threads = [threading.Thread(target=client, args=(n,)) for n in range(int(sys.argv[3]))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print('right', end='')
";

const REDIS_CLIENT: &str = "
import os, socket, sys
def read_line(stream): return stream.readline().rstrip(b'\\r\\n')
for n in range(20):
    one = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20)
    stream = one.makefile('rb')
    value = os.urandom(100_000)
    one.sendall(b'SET key%d ' % n + b'' + b'x\\r\\n')
    assert read_line(stream) == b'+OK'
    one.sendall(b'*3\\r\\n$3\\r\\nSET\\r\\n$1\\r\\nv\\r\\n$%d\\r\\n' % len(value) + value + b'\\r\\n')
    assert read_line(stream) == b'+OK'
    one.sendall(b'GET v\\r\\n')
    assert read_line(stream) == b'$%d' % len(value)
    assert stream.read(len(value)) == value and stream.read(2) == b'\\r\\n'
    one.close()
print('right', end='')
";

const MEMCACHED_CLIENT: &str = "
import os, socket, sys
for n in range(20):
    one = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20)
    stream = one.makefile('rb')
    value = os.urandom(100_000)
    one.sendall(b'set v 0 0 %d\\r\\n' % len(value) + value + b'\\r\\n')
    assert stream.readline() == b'STORED\\r\\n'
    one.sendall(b'get v\\r\\n')
    assert stream.readline() == b'VALUE v 0 %d\\r\\n' % len(value)
    assert stream.read(len(value)) == value and stream.readline() == b'\\r\\n' and stream.readline() == b'END\\r\\n'
    one.close()
print('right', end='')
";

const HTTP_CLIENTS: &str = "
import hashlib, subprocess, sys
url = 'http://%s:%s/content' % (sys.argv[1], sys.argv[2])
for n in range(5):
    fetched = [subprocess.Popen(['curl', '-sS', '-m', '30', url, url], stdout=subprocess.PIPE) for _ in range(8)]
    for one in fetched:
        content = one.communicate()[0]
        half = len(content) // 2
        assert one.returncode == 0 and content[:half] == content[half:] and hashlib.sha256(content[:half]).hexdigest() == sys.argv[3]
print('right', end='')
";

/// Unmodified servers of different kinds: an event loop, several processes that share a listener, threads.
fn servers_of_all_kinds_are_served(beside: bool) {
    let bed = bed(beside);
    let scratch = Scratch::new("servers");
    let content: Vec<u8> = (0..500_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(scratch.file("content"), &content).expect("a file");
    let digest = on_b(&bed, &["sha256sum", &scratch.file("content")]);
    let digest = text(&digest.stdout).split_whitespace().next().expect("a digest").to_owned();
    let nginx = format!(
        "daemon off; worker_processes 2; user root; pid {0}/pid; error_log {0}/errors; events {{}}
         http {{ access_log off; server {{ listen 7002; root {0}; }} }}",
        scratch.0.display()
    );
    std::fs::write(scratch.file("nginx.conf"), nginx).expect("a file");
    let address_of_a = address(false, 0).ip().to_string();
    let configuration = scratch.file("nginx.conf");
    let redis = ["redis-server", "--port", "7001", "--save", "", "--protected-mode", "no", "--bind", &address_of_a];
    let servers: [(&[&str], &str, &str, &str); 4] = [
        (&["python3", "-c", ASYNCIO], "7000", ECHO_CLIENTS, "20"),
        (&redis, "7001", REDIS_CLIENT, ""),
        (&["nginx", "-c", &configuration], "7002", HTTP_CLIENTS, &digest),
        (&["memcached", "-u", "root", "-p", "7003", "-t", "2"], "7003", MEMCACHED_CLIENT, ""),
    ];
    for (server, port, client, more) in servers {
        let mut running = start(&bed, server);
        wait_for_server(&bed, SocketAddr::new(address_a(false), port.parse().expect("a port")));
        let before = count(&bed, Counter::Made);
        let ran = on_b(&bed, &["python3", "-c", client, &address_of_a, port, more]);
        assert!(ran.status.success() && ran.stdout == b"right", "{server:?}: {}{}", text(&ran.stdout), text(&ran.stderr));
        assert!(count(&bed, Counter::Made) >= before + 20, "{server:?}: the NIC made {}", count(&bed, Counter::Made) - before);
        let now = statistics(&bed);
        assert_eq!((now.failed_moves, now.lost), (0, 0), "{server:?}");
        running.ends().expect("its end");
    }
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
        let listener = bed
            .host_b
            .run(|| std::net::TcpListener::bind(SocketAddr::new(baton_lab::testbed::address_b(ipv6), 6000)))
            .expect("a listener");
        std::thread::spawn(move || {
            for one in listener.incoming().flatten() {
                std::thread::spawn(move || std::io::copy(&mut one.try_clone()?, &mut &one));
            }
        });
        let address = baton_lab::testbed::address_b(ipv6).to_string();
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
        assert!(made >= 75, "the NIC opened {made} (IPv6 {ipv6}); {:?}", statistics(bed));
    }
    let end = statistics(bed);
    assert_eq!((end.failed_moves, end.lost), (0, 0));
}

/// Where the NIC cannot make connections the program runs as with handoff, and one line says why.
#[test]
fn a_nic_that_makes_no_connections_is_announced() {
    let scratch = Scratch::new("beside");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--offload", "full", "--", "python3", "-c"]).arg(
        "import socket
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
client.sendall(b'hello')
print(server.recv(5).decode())",
    );
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").env_remove("BATON_RUN");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let host = baton_linux::namespace::Namespace::new().expect("a namespace");
    let mut rules = Command::new("nft");
    rules.arg("add table inet guard; add chain inet guard in { type filter hook input priority 0; }");
    assert!(host.spawn(&mut rules).expect("nft").wait().expect("its end").success());
    let ran = host.spawn(&mut command).expect("baton").wait_with_output().expect("its output");
    assert!(ran.status.success() && ran.stdout == b"hello\n", "{}", text(&ran.stderr));
    let said = text(&ran.stderr);
    assert!(said.lines().count() == 1 && said.contains("the firewall has chains"), "{said}");
}

/// A program whose connections the NIC makes and one of the kernel's take the same port at the same moment, one port after the other:
/// each is had by exactly one of them.
fn race_for_ports(count: u16) {
    const TAKE: &str = "
import select, socket, sys
for line in sys.stdin:
    one = socket.socket()
    try:
        one.bind(('', int(line)))
        one.listen()
        poll = select.poll()
        poll.register(one, select.POLLIN)
        poll.poll(0)
        print('taken', flush=True)
    except OSError: print('lost', flush=True)
    sys.stdin.readline()
    one.close()
";
    let bed = hosts(TestbedSettings::default());
    let baton = env!("CARGO_BIN_EXE_baton");
    let socket = bed.socket().to_string_lossy().into_owned();
    let under_baton = [baton, "run", "--socket", &socket, "--offload", "full", "--", "python3", "-c", TAKE];
    let plain = ["python3", "-c", TAKE];
    let mut both: Vec<Program> = [&under_baton[..], &plain]
        .into_iter()
        .map(|line| {
            let mut command = Command::new(line[0]);
            command.args(&line[1..]).env_remove("BATON_RUN").stdin(Stdio::piped()).stdout(Stdio::piped());
            Program(bed.host_a.spawn(&mut command).expect("a program"))
        })
        .collect();
    let mut outputs: Vec<_> = both.iter_mut().map(|one| BufReader::new(one.0.stdout.take().expect("output")).lines()).collect();
    let mut wins = [0u16; 2];
    for port in 20_000..20_000 + count {
        // Who is told first has a little more time.
        let first = usize::from(port) % 2;
        for which in [first, 1 - first] {
            writeln!(both[which].0.stdin.as_mut().expect("input"), "{port}").expect("room");
        }
        let taken: Vec<bool> = outputs.iter_mut().map(|lines| lines.next().expect("a line").expect("text") == "taken").collect();
        assert!(taken[0] != taken[1], "port {port} was had by both, or by nobody: {taken:?}");
        wins[usize::from(taken[1])] += 1;
        both.iter_mut().for_each(|one| writeln!(one.0.stdin.as_mut().expect("input")).expect("room"));
    }
    println!("of {count} ports {} went to the NIC's program and {} to the kernel's", wins[0], wins[1]);
    assert!(wins.iter().all(|wins| *wins > 0), "nobody raced: {wins:?}");
}

#[test]
fn a_port_is_had_by_one_of_two() {
    race_for_ports(400);
}

#[test]
#[ignore = "takes a minute: --ignored"]
fn each_of_ten_thousand_ports_is_had_by_one_of_two() {
    race_for_ports(10_000);
}

/// A server that sends what it is asked for, so many bytes, and closes at once.
const SEND_AND_CLOSE: &str = "
import socket, threading
listener = socket.create_server(('', 7000), backlog=100)
def serve(one):
    length = int(one.makefile('rb').readline())
    one.sendall(bytes(n * 7 & 255 for n in range(256)) * (length // 256))
    one.close()
while True: threading.Thread(target=serve, args=(listener.accept()[0],)).start()
";

/// Asks such a server for so many bytes.
fn ask_for(bed: &Testbed, length: usize) -> TcpStream {
    let mut client = connect(bed, address(false, 7000)).expect("a connection");
    client.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
    writeln!(client, "{length}").expect("room");
    client
}

/// Reads to the end of the stream, and compares.
fn read_all(mut client: TcpStream, length: usize) {
    let mut received = Vec::new();
    client.read_to_end(&mut received).expect("an orderly end");
    assert_eq!(received.len(), length);
    assert!(received.iter().enumerate().all(|(at, byte)| *byte == (at * 7) as u8));
}

fn kernels_sockets(bed: &Testbed, filter: &str) -> String {
    let mut command = Command::new("ss");
    command.arg("-Htan").args(filter.split(' ')).stdout(Stdio::piped());
    text(&bed.host_a.spawn(&mut command).expect("ss").wait_with_output().expect("its output").stdout).to_owned()
}

/// The NIC closes what it has made: no connection goes to the kernel for that, and none waits there.
fn the_nic_closes_what_it_has_made(beside: bool) {
    let bed = bed(beside);
    let _server = start(&bed, &["python3", "-c", SEND_AND_CLOSE]);
    wait_for_server(&bed, address(false, 7000));
    let before = statistics(&bed);
    let resets = crate::moves::resets_sent(&bed.host_a);
    for _ in 0..300 {
        read_all(ask_for(&bed, 10_240), 10_240);
    }
    let closes_late = ask_for(&bed, 10_240);
    read_all(closes_late.try_clone().expect("a descriptor"), 10_240);
    wait_until("the end of all connections", || connections(&bed).iter().all(|one| one.made_by != Place::Nic));
    drop(closes_late);
    // One more, behind the FIN.
    read_all(ask_for(&bed, 2560), 2560);
    assert_eq!(crate::moves::resets_sent(&bed.host_a) - resets, 0, "segments of the NIC's connections have reached the kernel");
    let now = statistics(&bed);
    assert_eq!(now.counters[Counter::Made as usize], before.counters[Counter::Made as usize] + 302);
    assert_eq!((now.failed_moves, now.lost), (0, 0));
    // To the NIC, when they are accepted.
    assert!(now.moves - before.moves < 310, "{} moves", now.moves - before.moves);
    assert_eq!(kernels_sockets(&bed, "state time-wait sport = :7000"), "");
    // The same 4-tuple at once: the NIC lets it follow one that waits (RFC 6191).
    let from = SocketAddr::new(baton_lab::testbed::address_b(false), 33_000);
    for _ in 0..3 {
        let mut client = None;
        // The last one's end may be on its way to host B.
        wait_until("the next connection", || {
            client = bed.host_b.run(|| connect_from(from, address(false, 7000))).ok();
            client.is_some()
        });
        let mut client = client.expect("a connection");
        client.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
        writeln!(client, "2560").expect("room");
        read_all(client, 2560);
    }
}

/// Connects from an address and port.
fn connect_from(from: SocketAddr, to: SocketAddr) -> std::io::Result<TcpStream> {
    use std::os::fd::AsFd;
    const SOL_SOCKET: i32 = 1;
    const SO_REUSEADDR: i32 = 2;
    let socket = baton_linux::socket::stream(false, 0)?;
    baton_linux::socket::set(socket.as_fd(), SOL_SOCKET, SO_REUSEADDR, 1)?;
    baton_linux::socket::bind(socket.as_fd(), from)?;
    baton_linux::socket::connect(socket.as_fd(), to)?;
    Ok(TcpStream::from(socket))
}

/// A program closes, and the NIC or the agent dies before the peer has everything: the kernel sends the rest and the FIN.
fn a_death_while_the_nic_closes_loses_nothing(beside: bool) {
    for agent_dies in [false, true] {
        let bed = bed(beside);
        let _server = start(&bed, &["python3", "-c", SEND_AND_CLOSE]);
        wait_for_server(&bed, address(false, 7000));
        // More than the peer's window, so that the rest waits at the NIC until it is read.
        let length = 4 << 20;
        let clients: Vec<TcpStream> = (0..4).map(|_| ask_for(&bed, length)).collect();
        let closed = || connections(&bed).iter().filter(|one| one.reason.contains("closed")).count();
        // Each server's thread has sent all when it closes; what the peer's window does not hold lies in send memory.
        let deadline = Instant::now() + Duration::from_secs(10);
        while closed() < 4 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let first = statistics(&bed);
        baton_linux::process::signal(if agent_dies { first.agent_process } else { first.nic_process }, 9).expect("a signal");
        wait_until("the next NIC", || {
            let answer = bed.tool().and_then(|mut tool| tool.ask(Ask::Statistics));
            matches!(answer, Ok(Reply::Statistics(now)) if now.nic_process != first.nic_process)
        });
        for client in clients {
            read_all(client, length);
        }
        wait_until("the end of all connections", || connections(&bed).is_empty());
        assert_eq!(statistics(&bed).lost, 0);
        read_all(ask_for(&bed, 2560), 2560);
    }
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
held = [attempt((peer, 6000)) for _ in range(9)]
print(' '.join(sorted(why for _, why in held)))
held.pop(next(at for at, one in enumerate(held) if one[1] == 'open'))[0].close()
";

/// ICMP messages while the NIC opens a connection, TCP_SYNCNT, and the end of the ports: as natively.
fn connecting_fails_as_natively(beside: bool) {
    let bed = bed(beside);
    let listener = bed
        .host_b
        .run(|| std::net::TcpListener::bind(SocketAddr::new(baton_lab::testbed::address_b(false), 6000)))
        .expect("a listener");
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
    let address = baton_lab::testbed::address_b(false).to_string();
    let run = |prefix: &[&str]| {
        let line: Vec<&str> = prefix.iter().copied().chain(["python3", "-c", ERRORS, &address]).collect();
        let mut command = Command::new(line[0]);
        command.args(&line[1..]).env_remove("BATON_RUN").stdout(Stdio::piped()).stderr(Stdio::piped());
        let ran = bed.host_a.spawn(&mut command).expect("a program").wait_with_output().expect("its output");
        assert!(ran.status.success(), "{}", text(&ran.stderr));
        text(&ran.stdout).to_owned()
    };
    let made = count(&bed, Counter::Made);
    let socket = bed.socket().to_string_lossy().into_owned();
    let ours = run(&[env!("CARGO_BIN_EXE_baton"), "run", "--socket", &socket, "--offload", "full", "--"]);
    assert_eq!(count(&bed, Counter::Made), made + 8, "{ours}");
    let opens = ["open"; 8].join(" ");
    assert_eq!(ours, format!("EHOSTUNREACH\nEHOSTUNREACH\nECONNREFUSED\nETIMEDOUT\nin time\nEADDRNOTAVAIL {opens}\n"));
    drop(listener);
}
