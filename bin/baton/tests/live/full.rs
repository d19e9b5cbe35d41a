//! `baton run --offload full`: the NIC makes the connections of unmodified programs.

use crate::common::hosts;
pub(crate) use crate::common::wait_until;
use crate::scratch::{Scratch, text};
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings, address_a};
use baton_linux::events::{Poller, Trigger};
use baton_linux::process;
use baton_protocol::program::{Ask, ConnectionInfo, Place, Reply, Statistics};
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
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
pub(crate) use in_both_shapes;

/// Echoes whatever comes over connections to port 7000.
pub(crate) const ECHO: &str = "
import socket, threading
listener = socket.create_server(('', 7000), backlog=20)
def echo(server):
    while data := server.recv(65536): server.sendall(data)
    server.close()
while True:
    server, _ = listener.accept()
    threading.Thread(target=echo, args=(server,), daemon=True).start()
";

mod accepting;
mod closing;
mod connecting;
mod held_agent;
mod ports;
mod scarce;
mod servers;

in_both_shapes! {
    the_nic_makes_the_connections_of_a_server
    what_the_nic_has_made_can_move
    listeners_are_there_again_after_a_death
    listeners_are_the_kernels_while_there_are_rules
    listeners_are_the_kernels_while_there_is_iptables_legacy
    listeners_are_the_kernels_while_there_are_ipsec_policies
    what_has_moved_to_the_kernel_is_its_own
    a_flood_of_syns_leaves_room_for_honest_clients
}

fn command(bed: &Testbed, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("run").arg("--socket").arg(bed.socket()).args(["--offload", "full", "--"]).args(arguments);
    command.env_remove("BATON_RUN").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Starts a program on host A whose connections the NIC makes.
pub(crate) fn start(bed: &Testbed, arguments: &[&str]) -> Program {
    Program(bed.host_a.spawn(&mut command(bed, arguments)).expect("baton run"))
}

/// As [`start`], with the lines that it prints.
pub(crate) fn start_printing(bed: &Testbed, arguments: &[&str]) -> (Program, Lines<BufReader<ChildStdout>>) {
    let mut child = bed.host_a.spawn(command(bed, arguments).stdout(Stdio::piped())).expect("baton run");
    let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    (Program(child), lines)
}

/// Runs a program on host A, which is to succeed. `line`: its name and its arguments.
fn on_a(bed: &Testbed, line: &str) {
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    assert!(bed.host_a.spawn(&mut command).expect(line).wait().expect("its end").success(), "{line}");
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

pub(crate) fn connections(bed: &Testbed) -> Vec<ConnectionInfo> {
    match bed.tool().expect("a tool").ask(Ask::List { from: (0, 0) }).expect("an answer") {
        Reply::Connections(list) => list,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn connect(bed: &Testbed, address: SocketAddr) -> std::io::Result<TcpStream> {
    bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(10)))
}

/// Waits until the NIC makes the connections of a server: a client's connection is one of them.
fn wait_for_server(bed: &Testbed, address: SocketAddr) {
    let before = count(bed, Counter::Made);
    wait_until("the NIC makes connections", || {
        // Waits: between two connections, since those that the kernel makes meanwhile fill the server's queue.
        std::thread::sleep(Duration::from_millis(20));
        connect(bed, address).is_ok() && count(bed, Counter::Made) > before
    });
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
            match tool.ask(Ask::MoveAny { session: one.session, connection: one.connection, to, nic: None }).expect("an answer") {
                Reply::Done => true,
                Reply::Stayed { transient: true, .. } => false,
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(ours().place, to);
        exchange(n);
    }
}

/// [`ECHO`] that accepts one connection for each line that it is sent on standard input.
fn on_demand() -> String {
    ECHO.replace("while True:", "import select, sys\nselect.select([listener], [], [])\nfor line in sys.stdin:")
}

/// Sends bytes to a server that echoes, and compares them. The connection stays open.
pub(crate) fn exchange(client: &TcpStream, byte: u8) {
    try_exchange(client, byte).expect("the echo");
}

fn try_exchange(mut client: &TcpStream, byte: u8) -> std::io::Result<()> {
    client.set_read_timeout(Some(Duration::from_secs(20)))?;
    let sent = vec![byte; 50_000];
    client.write_all(&sent)?;
    let mut received = vec![0; sent.len()];
    client.read_exact(&mut received)?;
    assert!(received == sent);
    Ok(())
}

/// NIC or agent is killed: connections go on, also one that waits to be accepted with data, and later ones are made by
/// the next NIC.
fn listeners_are_there_again_after_a_death(beside: bool) {
    for agent_dies in [false, true] {
        let bed = bed(beside);
        let at = address(false, 7000);
        let mut server = start(&bed, &["python3", "-c", &on_demand()]);
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
        let in_between = connect(&bed, at).expect("a connection");
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
        exchange(&waiting, 2);
        exchange(&in_between, 4);
        let made = count(&bed, Counter::Made);
        let next = connect(&bed, at).expect("a connection");
        exchange(&next, 3);
        assert!(count(&bed, Counter::Made) > made);
        let local = next.local_addr().expect("its address").to_string();
        assert!(connections(&bed).iter().any(|one| one.peer == local && one.made_by == Place::Nic));
        assert_eq!(statistics(&bed).lost, 0);
    }
}

/// Whether the NIC makes a client's connection to a server that echoes. None: its handshake was under way when the
/// listener changed hands, and the kernel knows nothing of it.
fn made_by_nic(bed: &Testbed, at: SocketAddr) -> Option<bool> {
    let client = connect(bed, at).ok()?;
    try_exchange(&client, 1).ok()?;
    let local = client.local_addr().expect("its address").to_string();
    Some(connections(bed).iter().any(|one| one.peer == local && one.made_by == Place::Nic))
}

/// While the firewall has chains that may judge a connection's first packets the kernel makes the connections: it alone
/// can ask them.
fn listeners_are_the_kernels_while_there_are_rules(beside: bool) {
    let bed = bed(beside);
    let at = address(false, 7000);
    let mut server = start(&bed, &["python3", "-c", &on_demand()]);
    let mut orders = server.0.stdin.take().expect("its input");
    wait_for_server(&bed, at);
    for _ in 0..1000 {
        writeln!(orders, "accept").expect("a server");
    }
    let nft = |line: &str| on_a(&bed, &format!("nft {line}"));
    let by_nic = || made_by_nic(&bed, at);
    assert_eq!(by_nic(), Some(true));
    nft("add table inet guard");
    nft("add chain inet guard in { type filter hook input priority 0 ; }");
    wait_until("the kernel's connections", || by_nic() == Some(false));
    let last = statistics(&bed).nic_process;
    process::signal(last, 9).expect("a signal");
    wait_until("the next NIC", || statistics(&bed).nic_process != last);
    assert_eq!(by_nic(), Some(false), "the rules are there still");
    nft("delete table inet guard");
    wait_until("the NIC's connections", || by_nic() == Some(true));
}

/// The same with tables of iptables-legacy, of which the kernel sends no notification: also if they only translate.
fn listeners_are_the_kernels_while_there_is_iptables_legacy(beside: bool) {
    for rule in ["-A INPUT -p tcp --dport 22 -j DROP", "-t nat -A PREROUTING -p tcp --dport 22 -j REDIRECT --to-ports 23"] {
        let bed = bed(beside);
        let at = address(false, 7000);
        let _server = start(&bed, &["python3", "-c", ECHO]);
        wait_for_server(&bed, at);
        assert_eq!(made_by_nic(&bed, at), Some(true));
        on_a(&bed, &format!("iptables-legacy {rule}"));
        wait_until("the kernel's connections", || made_by_nic(&bed, at) == Some(false));
    }
}

/// The same with IPsec policies, whomever they are about.
fn listeners_are_the_kernels_while_there_are_ipsec_policies(beside: bool) {
    let bed = bed(beside);
    let at = address(false, 7000);
    let _server = start(&bed, &["python3", "-c", ECHO]);
    wait_for_server(&bed, at);
    assert_eq!(made_by_nic(&bed, at), Some(true));
    on_a(&bed, "ip xfrm policy add dir in src 10.99.0.0/16 dst 0.0.0.0/0 action block");
    wait_until("the kernel's connections", || made_by_nic(&bed, at) == Some(false));
    on_a(&bed, "ip xfrm policy delete dir in src 10.99.0.0/16 dst 0.0.0.0/0");
    wait_until("the NIC's connections", || made_by_nic(&bed, at) == Some(true));
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

/// A connection that the NIC has made, and that has moved to the kernel, is not disturbed by a SYN with its addresses
/// and ports, as somebody may forge one; nor does the NIC get its segments then. Clients of the same host are served,
/// too.
fn what_has_moved_to_the_kernel_is_its_own(beside: bool) {
    let bed = bed(beside);
    let at = address(false, 7000);
    let _server = start(&bed, &["python3", "-c", servers::ASYNCIO]);
    wait_for_server(&bed, at);
    let client = connect(&bed, at).expect("a connection");
    exchange(&client, 1);
    let local = client.local_addr().expect("its address");
    let ours = || connections(&bed).into_iter().find(|one| one.peer == local.to_string()).expect("the connection");
    assert_eq!(ours().made_by, Place::Nic);
    let mut tool = bed.tool().expect("a tool");
    wait_until("the move", || {
        let one = ours();
        let ask = Ask::MoveAny { session: one.session, connection: one.connection, to: Place::Kernel, nic: None };
        matches!(tool.ask(ask).expect("an answer"), Reply::Done)
    });
    let forge = FLOOD
        .replace("struct.pack('!BBH', 10, 77, n & 0xffff)", &format!("socket.inet_aton('{}')", local.ip()))
        .replace("random.randrange(1024, 65536)", &local.port().to_string());
    let segments = count(&bed, Counter::Segments);
    for byte in 2..5 {
        let sent = on_b(&bed, &["python3", "-c", &forge, "5", &at.ip().to_string(), "7000"]);
        assert!(sent.status.success(), "{}", text(&sent.stderr));
        exchange(&client, byte);
    }
    assert_eq!(ours().place, Place::Kernel);
    // Some of the connection with which the server was waited for, which ends meanwhile.
    let segments = count(&bed, Counter::Segments) - segments;
    assert!(segments < 20, "the NIC has had {segments} segments of 60,000 bytes there and back");
    let made = count(&bed, Counter::Made);
    exchange(&connect(&bed, at).expect("a connection"), 5);
    assert_eq!(count(&bed, Counter::Made), made + 1, "the listener is the NIC's as before");
    let neighbour = bed.host_a.run(|| TcpStream::connect_timeout(&at, Duration::from_secs(10))).expect("a connection");
    exchange(&neighbour, 6);
}

/// Resident memory of a process, in bytes.
fn resident(process: u32) -> u64 {
    let pages = std::fs::read_to_string(format!("/proc/{process}/statm")).expect("a process");
    pages.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("a number") * 4096
}

/// Ten thousand SYNs from forged addresses: most are answered and not remembered, an honest client connects
/// nevertheless, with window scaling and SACK, and the NIC's memory does not grow with their number.
fn a_flood_of_syns_leaves_room_for_honest_clients(beside: bool) {
    let bed = bed(beside);
    let at = address(false, 7000);
    let mut server = start(&bed, &["python3", "-c", &on_demand()]);
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
    let client = connect(&bed, at).expect("an honest client");
    exchange(&client, 1);
    let local = client.local_addr().expect("its address").to_string();
    let ours = connections(&bed).into_iter().find(|one| one.peer == local).expect("its connection");
    assert_eq!(ours.made_by, Place::Nic);
    let options = |client: &TcpStream| {
        let info = baton_linux::tcp_info::TcpInfo::read(std::os::fd::AsFd::as_fd(client)).expect("TCP_INFO");
        (info.snd_wscale > 0, info.options & baton_linux::tcp_info::OPTION_SACK != 0)
    };
    assert_eq!(options(&client), (true, true));
    // One without timestamps gets what a cookie can restore without them. It is not promised more, so that what it
    // sends is not lost.
    on_b(&bed, &["sysctl", "-qw", "net.ipv4.tcp_timestamps=0"]);
    let mut plain = None;
    wait_until("a cookie for a client without timestamps", || {
        flood("1000");
        let client = connect(&bed, at).expect("an honest client");
        let has_cookie = options(&client) == (false, false);
        plain = has_cookie.then_some(client);
        has_cookie
    });
    let (plain, begun) = (plain.expect("a client"), Instant::now());
    (0..6).for_each(|byte| exchange(&plain, byte));
    assert!(begun.elapsed() < Duration::from_secs(10), "300 KB took {:?}", begun.elapsed());
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
