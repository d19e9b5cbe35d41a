//! `baton run --offload full`: the NIC makes the connections of unmodified programs.

use crate::common::hosts;
use crate::scratch::{Scratch, text};
use baton_abi::layout::Counter;
use baton_lab::testbed::{Testbed, TestbedSettings, address_a};
use baton_protocol::program::{Ask, ConnectionInfo, Place, Reply, Statistics};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A program of host A's, which ends with this.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program on host A whose connections the NIC makes.
fn start(bed: &Testbed, arguments: &[&str]) -> Program {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("run").arg("--socket").arg(bed.socket()).args(["--offload", "full", "--"]).args(arguments);
    command.env_remove("BATON_RUN").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    Program(bed.host_a.spawn(&mut command).expect("baton run"))
}

fn on_b(bed: &Testbed, command: &[&str]) -> Output {
    let mut command_line = Command::new(command[0]);
    command_line.args(&command[1..]).stdout(Stdio::piped()).stderr(Stdio::piped());
    bed.host_b.spawn(&mut command_line).expect(command[0]).wait_with_output().expect("its output")
}

fn statistics(bed: &Testbed) -> Statistics {
    match bed.tool().expect("a tool").ask(Ask::Statistics).expect("an answer") {
        Reply::Statistics(statistics) => *statistics,
        other => panic!("{other:?}"),
    }
}

fn count(bed: &Testbed, counter: Counter) -> u64 {
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

fn address(ipv6: bool, port: u16) -> SocketAddr {
    SocketAddr::new(address_a(ipv6), port)
}

/// An unmodified Python server answers curl through connections that the NIC has made, by both families.
#[test]
fn the_nic_makes_the_connections_of_a_server() {
    let bed = hosts(TestbedSettings::default());
    let scratch = Scratch::new("full");
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(scratch.file("content"), &content).expect("a file");
    for ipv6 in [false, true] {
        let at = address(ipv6, 8000);
        let directory = scratch.0.to_string_lossy().into_owned();
        let bind = at.ip().to_string();
        let _server = start(&bed, &["python3", "-m", "http.server", "8000", "--bind", &bind, "--directory", &directory]);
        wait_for_server(&bed, at);
        let before = count(&bed, Counter::Made);
        for _ in 0..5 {
            let answer = on_b(&bed, &["curl", "-sS", "-m", "20", &format!("http://{at}/content")]);
            assert!(answer.status.success(), "{}", text(&answer.stderr));
            assert!(answer.stdout == content, "{} bytes of {} arrived right", answer.stdout.len(), content.len());
        }
        assert_eq!(count(&bed, Counter::Made), before + 5, "each of the five was made by the NIC");
    }
    let end = statistics(&bed);
    assert_eq!((end.failed_moves, end.lost), (0, 0));
}

/// A connection that the NIC has made is shown as such, is on the NIC, and goes to the kernel and back like any other.
#[test]
fn what_the_nic_has_made_can_move() {
    const ECHO: &str = "
import socket
listener = socket.create_server(('', 7000))
while True:
    server, _ = listener.accept()
    while data := server.recv(65536): server.sendall(data)
    server.close()
";
    let bed = hosts(TestbedSettings::default());
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
        let moved = tool.ask(Ask::MoveAny { session: one.session, connection: one.connection, to }).expect("an answer");
        assert!(matches!(moved, Reply::Done), "{moved:?}");
        assert_eq!(ours().place, to);
        exchange(n);
    }
}
