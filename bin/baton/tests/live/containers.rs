//! Baton in a container: its connections come through a published port, which another namespace translates, and pass a
//! firewall that drops invalid packets.

use crate::common::{SetsAtEnd, until_moved};
use crate::scratch::{Scratch, agent_socket, script};
use baton_linux::namespace::Namespace;
use baton_linux::{rtnetlink, socket};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How often each connection moves while it is used.
const MOVES: u32 = 10;

/// Each of these tests keeps both cores of a small machine busy, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Rules of the containers' host: port 8080 is the container's, and what conntrack calls invalid is counted and
/// dropped.
const RULES: &str = "table ip nat {
  chain prerouting { type nat hook prerouting priority -100; tcp dport 8080 dnat to 10.88.0.2:PORT; }
  chain postrouting { type nat hook postrouting priority 100; oifname c0 masquerade; }
}
table ip filter {
  counter invalid { }
  chain forward { type filter hook forward priority 0; ct state invalid counter name invalid drop; }
}";

/// A client, the host that publishes the port, and a container.
struct Network {
    client: Namespace,
    gateway: Namespace,
    container: Namespace,
}

fn shell(namespace: &Namespace, text: &str) -> String {
    let mut command = Command::new("/bin/sh");
    command.args(["-ec", text]).stdout(Stdio::piped());
    let ran = namespace.spawn(&mut command).expect("a shell").wait_with_output().expect("its output");
    assert!(ran.status.success(), "{text}");
    crate::scratch::text(&ran.stdout)
}

impl Network {
    fn new() -> Network {
        let made = || Namespace::new().expect("a namespace (root is needed)");
        let (client, gateway, container) = (made(), made(), made());
        for (name, other) in [("b0", &client), ("c0", &container)] {
            gateway.run(|| rtnetlink::add_veth(&rtnetlink::open()?, name, "eth0", other.as_fd())).expect("a veth pair");
        }
        shell(&gateway, "ip addr add 10.87.0.1/24 dev b0; ip addr add 10.88.0.1/24 dev c0; ip link set b0 up; ip link set c0 up");
        shell(&client, "ip addr add 10.87.0.2/24 dev eth0; ip link set eth0 up; ip route add default via 10.87.0.1");
        shell(&container, "ip addr add 10.88.0.2/24 dev eth0; ip link set eth0 up; ip route add default via 10.88.0.1");
        // The setting is that of the writing thread's namespace.
        gateway.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")).expect("forwarding");
        Network { client, gateway, container }
    }

    fn publish(&self, port: u16) {
        shell(&self.gateway, &format!("nft '{}'", RULES.replace("PORT", &port.to_string())));
    }

    /// Frames that the firewall dropped.
    fn invalid(&self) -> u64 {
        let text = shell(&self.gateway, "nft -j list counters");
        let listed: Value = serde_json::from_str(&text).expect("JSON");
        let counters = listed["nftables"].as_array().expect("a list");
        counters.iter().find_map(|entry| entry["counter"]["packets"].as_u64()).expect("the counter")
    }
}

/// Exchanges bytes over `count` connections to the published port until each has moved often enough; every byte is
/// compared.
fn talk(network: &Network, count: usize, socket: impl Fn() -> Option<PathBuf>) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = SetsAtEnd(&over);
        for number in 0..count {
            let over = over.0;
            scope.spawn(move || {
                let connect = || TcpStream::connect_timeout(&([10, 87, 0, 1], 8080).into(), Duration::from_secs(10));
                let mut stream = network.client.run(connect).expect("a connection to the published port");
                stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a time-out");
                let mut rng = baton_sim::Rng::new(number as u64);
                let mut position = 0;
                while !over.load(Ordering::Relaxed) {
                    let mut sent = vec![0; 1 + rng.below(20_000) as usize];
                    baton_sim::stream::fill(number as u64, position, &mut sent);
                    position += sent.len() as u64;
                    let mut got = vec![0; sent.len()];
                    stream.write_all(&sent).expect("sent");
                    stream.read_exact(&mut got).expect("an echo");
                    assert!(sent == got, "an echo came wrong");
                }
            });
        }
        until_moved(socket, count, MOVES);
    });
}

fn listening_port(server: &mut Child) -> u16 {
    let mut line = String::new();
    BufReader::new(server.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    line.trim().parse().expect("a port")
}

fn report(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).expect("a report")).expect("JSON")
}

/// A server in a container, under `baton run`.
fn run(network: &Network, scratch: &Scratch, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--flip", "1..20"]).args(arguments).args(["--", "python3", &script("echo.py"), "10.88.0.2"]);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
    let mut server = network.container.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped())).expect("baton");
    network.publish(listening_port(&mut server));
    server
}

fn end(server: &mut Child) {
    drop(server.stdin.take());
    assert!(server.wait().expect("the server").success());
}

fn expect_moves(report: &Value, network: &Network) {
    assert!(report["moves"].as_u64() >= Some(2 * u64::from(MOVES)), "{report}");
    assert_eq!((&report["resets"], &report["errors"]), (&0.into(), &0.into()), "{report}");
    assert_eq!(network.invalid(), 0, "the firewall has dropped frames");
}

#[test]
fn a_published_port_leads_to_moving_connections() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (network, scratch) = (Network::new(), Scratch::new("published"));
    let mut server = run(&network, &scratch, &["--flip-report", &scratch.file("report")]);
    talk(&network, 4, || agent_socket(&scratch));
    end(&mut server);
    expect_moves(&report(&scratch.file("report")), &network);
}

#[test]
fn a_published_port_leads_to_attached_connections() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (network, scratch) = (Network::new(), Scratch::new("published-attached"));
    let mut command = Command::new("python3");
    command.args([&script("echo.py"), "10.88.0.2"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut server = network.container.spawn(&mut command).expect("python3");
    network.publish(listening_port(&mut server));
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["attach", "--flip", "5..20", "--flip-report", &scratch.file("report"), &server.id().to_string()]);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stderr(Stdio::piped());
    let mut attacher = network.container.spawn(&mut command).expect("baton");
    talk(&network, 4, || agent_socket(&scratch));
    end(&mut server);
    let mut said = String::new();
    attacher.stderr.take().expect("its messages").read_to_string(&mut said).expect("text");
    assert!(attacher.wait().expect("the attacher").success(), "{said}");
    expect_moves(&report(&scratch.file("report")), &network);
}

/// A Baton goes on when nobody reads its messages any more.
#[test]
fn a_closed_log_ends_no_baton() {
    let (host, other, scratch) =
        (Namespace::new().expect("a namespace"), Namespace::new().expect("one more"), Scratch::new("log"));
    let socket = scratch.file("agent.sock");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["up", "--socket", &socket, "--namespaces", "1"]).stderr(Stdio::piped());
    let mut up = host.spawn(&mut command).expect("baton");
    let mut said = String::new();
    BufReader::new(up.stderr.take().expect("its messages")).read_line(&mut said).expect("a line");
    assert!(said.contains("is up"), "{said}");
    for _ in 0..2 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--socket", &socket, "--", "true"]).stderr(Stdio::piped());
        let refused = other.spawn(&mut command).and_then(|child| child.wait_with_output()).expect("baton run");
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(error.contains("1 network namespaces are served already"), "{error}");
    }
    baton_linux::process::signal(up.id(), libc::SIGTERM).expect("our child");
    assert!(up.wait().expect("baton").success());
}

/// One Baton for the machine: the programs of two containers find it at the same path.
#[test]
fn one_baton_serves_two_containers() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (host, networks, scratch) =
        (Namespace::new().expect("a namespace"), [Network::new(), Network::new()], Scratch::new("up"));
    let socket = scratch.file("agent.sock");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["up", "--socket", &socket]).stderr(Stdio::piped());
    let mut up = host.spawn(&mut command).expect("baton");
    let mut said = String::new();
    let mut messages = BufReader::new(up.stderr.take().expect("its messages"));
    messages.read_line(&mut said).expect("a line");
    assert!(said.contains("is up"), "{said}");
    let reports = ["report0", "report1"].map(|name| scratch.file(name));
    // The agent of a network namespace.
    let agent = |at: usize| {
        let made = networks[at].container.run(|| socket::namespace(TcpListener::bind("127.0.0.1:0")?.as_fd()));
        PathBuf::from(format!("{socket}.{}", made.expect("its number")))
    };
    let start = |at: usize| run(&networks[at], &scratch, &["--socket", &socket, "--flip-report", &reports[at]]);
    let mut servers = [start(0), start(1)];
    std::thread::scope(|scope| {
        for (at, network) in networks.iter().enumerate() {
            let agent = agent(at);
            scope.spawn(move || talk(network, 2, || Some(agent.clone())));
        }
    });
    servers.iter_mut().for_each(end);
    for (network, path) in networks.iter().zip(&reports) {
        expect_moves(&report(path), network);
    }
    baton_linux::process::signal(up.id(), libc::SIGTERM).expect("our child");
    assert!(up.wait().expect("baton").success());
    messages.read_to_string(&mut said).expect("text");
    assert_eq!(said.lines().count(), 1, "{said}");
    let left: Vec<_> = std::fs::read_dir(&scratch.0).expect("the directory").flatten().map(|entry| entry.file_name()).collect();
    assert!(left.iter().all(|name| name.to_string_lossy().starts_with("report")), "{left:?}");
}
