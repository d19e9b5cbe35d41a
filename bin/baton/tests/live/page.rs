//! `baton page`, without a browser: what it says is right, and whom it says it to; agents and NICs die meanwhile.

use crate::common::{Scene, answered, scene, start_python, wait_until};
use crate::scratch::Scratch;
use baton_bed::testbed::{TestbedSettings, address_b};
use baton_linux::process::signal;
use baton_protocol::program::Place;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

const BATON: &str = env!("CARGO_BIN_EXE_baton");

/// A page that is served.
struct Page {
    child: Child,
    /// What it has printed of where it is.
    at: String,
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Page {
    fn start(agent: &Path, listen: &str) -> Page {
        let mut command = Command::new(BATON);
        command.args(["page", "--listen", listen, "--socket"]).arg(agent).env_remove("BATON_SOCKET");
        let mut child = command.stdout(Stdio::piped()).spawn().expect("baton page");
        let mut at = String::new();
        BufReader::new(child.stdout.take().expect("its output")).read_line(&mut at).expect("a line");
        Page { child, at }
    }

    fn address(&self) -> SocketAddr {
        let at = self.at.trim().strip_prefix("page at http://").and_then(|line| line.strip_suffix('/'));
        at.unwrap_or_else(|| panic!("{}", self.at)).parse().expect("its address")
    }

    /// Head and body of what is at a path on loopback.
    fn get(&self, path: &str) -> (String, String) {
        fetch(TcpStream::connect(self.address()).expect("it listens"), "127.0.0.1", path)
    }

    /// The state, as a query asks for it.
    fn state(&self, query: &str) -> Value {
        let (head, body) = self.get(&format!("/state?{query}"));
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("application/json"), "{head}: {body}");
        serde_json::from_str(&body).expect("JSON")
    }
}

fn fetch(mut stream: impl Read + Write, host: &str, path: &str) -> (String, String) {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {answer:?}"));
    (head.to_owned(), body.to_owned())
}

/// How many connections match, and the first one of the page.
fn first(state: &Value) -> (u64, Value) {
    let connections = &state["connections"];
    (connections["matching"].as_u64().expect("a number"), connections["rows"][0].clone())
}

#[test]
fn the_page_says_what_there_is() {
    let mut scene = scene(TestbedSettings::default());
    scene.exchange(10_000, Place::Nic);
    let page = Page::start(&scene.bed.socket(), "127.0.0.1:0");
    let state = page.state("");
    let (matching, row) = first(&state);
    let peer = scene.peer.local_addr().expect("its address").to_string();
    assert_eq!((matching, &row["local"], &row["peer"]), (1, &json!("10.77.0.1:8080"), &json!(peer)), "{state:#}");
    assert_eq!((&row["place"], &row["process"]), (&json!("nic"), &json!(std::process::id())), "{state:#}");
    assert_eq!((&state["sums"]["nic"], &state["sums"]["kernel"]), (&json!(1), &json!(0)), "{state:#}");
    assert_eq!((&state["programs"][0]["nic"], &state["programs"][0]["saved"]), (&json!(1), &Value::Null), "{state:#}");
    assert_eq!(state["workers"][0]["name"], json!("nic0"), "{state:#}");
    assert_eq!((&state["batons"][0]["moves"], &state["user"]), (&json!(1), &json!(0)), "{state:#}");
    // Rates need two looks, and something between them.
    wait_until("rates", || {
        scene.fill(50_000);
        scene.drain();
        let state = page.state("sort=rate");
        let (_, row) = first(&state);
        let sends = row["sent_per_second"].as_f64().is_some_and(|rate| rate > 0.0);
        sends && state["workers"][0]["connections"] == json!(1) && state["workers"][0]["frames"].as_f64() > Some(0.0)
    });
    scene.move_to(Place::Kernel);
    wait_until("it is seen in the kernel", || first(&page.state("filter=place+%3D+kernel+and+sport+%3D+%3A8080")).0 == 1);
    assert_eq!(first(&page.state("filter=place+%3D+nic&from=7")), (0, Value::Null));
    for (path, status) in [
        ("/state?filter=colour+%3D+red", "400"),
        ("/state?sort=colour", "400"),
        ("/report/../../etc/passwd", "404"),
        ("/page.js", "200"),
        ("/page.css", "200"),
    ] {
        let (head, body) = page.get(path);
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {head}: {body}");
    }
    let (head, body) = page.get("/");
    assert!(head.contains("Content-Security-Policy: default-src 'none'; script-src 'self'") && body.contains("<main>"), "{head}");
    // As a page from elsewhere would ask whose name leads here.
    let (head, body) = fetch(TcpStream::connect(page.address()).expect("it listens"), "evil.example:9465", "/state");
    assert!(head.starts_with("HTTP/1.1 421 ") && !body.contains("10.77.0.1"), "{head}: {body}");
}

/// NIC and agent die under a page that stays; then there is no Baton any more.
#[test]
fn the_page_outlives_agents() {
    let mut scene = scene(TestbedSettings::default());
    scene.exchange(10_000, Place::Nic);
    let page = Page::start(&scene.bed.socket(), "127.0.0.1:0");
    let processes = |state: &Value| (state["batons"][0]["agent"].clone(), state["batons"][0]["nics"][0]["process"].clone());
    let (agent, nic) = processes(&page.state(""));
    let statistics = answered(&scene.bed, |tool| tool.statistics());
    assert_eq!((&agent, &nic), (&json!(statistics.agent_process), &json!(statistics.nic_process)));
    let is_there = |state: &Value| first(state).0 == 1;
    signal(statistics.nic_process, libc::SIGKILL).expect("it lives");
    wait_until("the next NIC is seen", || {
        let state = page.state("");
        let (same, next) = processes(&state);
        is_there(&state) && same == agent && next.is_u64() && next != nic
    });
    signal(statistics.agent_process, libc::SIGKILL).expect("it lives");
    wait_until("the next agent is seen", || {
        let state = page.state("");
        let (next, _) = processes(&state);
        is_there(&state) && next.is_u64() && next != agent
    });
    drop(scene);
    wait_until("its end is seen", || {
        let state = page.state("");
        state["batons"] == json!([]) && first(&state).0 == 0 && state["troubles"][0].is_string()
    });
}

/// The state at a Unix socket, as the kernel says that this user asks.
fn as_nobody(socket: &str) -> Value {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "curl", "--silent", "--show-error", "--noproxy", "*"]);
    let ran = command
        .args(["--unix-socket", socket, "http://localhost/state"])
        .output()
        .expect("setpriv (Debian's package util-linux)");
    serde_json::from_slice(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {ran:?}"))
}

/// Root sees all at a Unix socket; another user its own, and nothing else.
#[test]
fn users_see_their_own_connections() {
    // It changes its user, as servers do that root starts.
    const PROGRAM: &str = "
import encodings.idna, os, socket, sys
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print('ready', flush=True)
sys.stdin.read()
";
    let scene: Scene = scene(TestbedSettings::default());
    let scratch = Scratch::new("page");
    std::fs::set_permissions(&scratch.0, PermissionsExt::from_mode(0o755)).expect("a mode");
    let socket = scratch.file("page.sock");
    let mut page = Page::start(&scene.bed.socket(), &format!("unix:{socket}"));
    assert!(page.at.contains("curl --unix-socket"), "{}", page.at);
    let as_root = || -> Value {
        let (_, body) = fetch(UnixStream::connect(&socket).expect("it listens"), "localhost", "/state");
        serde_json::from_str(&body).expect("JSON")
    };
    assert_eq!(first(&as_root()).0, 1);
    let none = as_nobody(&socket);
    assert_eq!((first(&none), &none["programs"], &none["user"]), ((0, Value::Null), &json!([]), &json!(65534)), "{none:#}");
    assert_eq!((&none["sums"]["kernel"], &none["troubles"]), (&json!(0), &json!([])), "{none:#}");
    // Its NICs are as much anybody's as for `baton top`.
    assert_eq!(none["workers"].as_array().map(Vec::len), Some(1), "{none:#}");
    let listener = scene.bed.host_b.run(|| TcpListener::bind((address_b(false), 0))).expect("a listener");
    let at = listener.local_addr().expect("its address");
    let (mut program, _lines) = start_python(&scene.bed, PROGRAM, at, true);
    let _peer = listener.accept().expect("a connection");
    wait_until("its own one", || first(&as_nobody(&socket)).0 == 1);
    let (_, row) = first(&as_nobody(&socket));
    assert_eq!(row["peer"], json!(at.to_string()), "{row:#}");
    wait_until("root sees both", || first(&as_root()).0 == 2);
    drop(program.stdin.take());
    assert!(program.wait().expect("its end").success());
    signal(page.child.id(), libc::SIGTERM).expect("it lives");
    assert!(page.child.wait().expect("its end").success());
    assert!(!Path::new(&socket).exists(), "its socket is left");
}

fn page(arguments: &[&str]) -> Output {
    Command::new(BATON).arg("page").args(arguments).env("BATON_SOCKET", "/nowhere/agent.sock").output().expect("baton")
}

#[test]
fn errors_of_the_page_say_what_to_type() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = listener.local_addr().expect("its address").to_string();
    let scratch = Scratch::new("page-errors");
    let file = scratch.file("page.sock");
    std::fs::write(&file, "text").expect("a file");
    let there = format!("unix:{file}");
    let cases: [(&[&str], &str); 6] = [
        (&["--listen", "0.0.0.0:9465"], "ssh -N -L 9465:127.0.0.1:9465"),
        (&["--listen", "9465"], "127.0.0.1:9464"),
        (&["--listen", "unix:/nowhere/page.sock"], "the directory must be there"),
        (&["--listen", &taken], "another process listens at"),
        (&["--listen", &there], "is no socket"),
        (&["--listen", "127.0.0.1:0", "--report", "/nowhere/bench.html"], "baton bench all --page /nowhere/bench.html"),
    ];
    for (arguments, said) in cases {
        let ran = page(arguments);
        let error = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(ran.status.code() == Some(2) && error.contains(said), "{arguments:?}: {error}");
    }
}

/// Clients that ask nothing keep nobody else from an answer.
#[test]
fn no_client_of_the_page_harms_another() {
    let page = Page::start(Path::new("/nowhere/agent.sock"), "127.0.0.1:0");
    let idle: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(page.address()).expect("it listens")).collect();
    let state = page.state("");
    assert!(state["troubles"][0].as_str().is_some_and(|text| text.contains("no agent at /nowhere/agent.sock")), "{state:#}");
    // The oldest ones were cut off for the others.
    let mut oldest = &idle[0];
    oldest.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    assert_eq!(oldest.read(&mut [0; 1]).expect("its end"), 0);
}

/// A user with any number of clients cuts off its own ones only.
#[test]
fn no_user_takes_all_places_of_the_page() {
    const CLIENTS: &str = "
import os, socket, sys
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
print('ready', flush=True)
clients = []
for line in sys.stdin:
    for _ in range(100):
        client = socket.socket(socket.AF_UNIX)
        client.connect(sys.argv[1])
        clients.append(client)
    print('connected', flush=True)
";
    let scratch = Scratch::new("page-places");
    std::fs::set_permissions(&scratch.0, PermissionsExt::from_mode(0o755)).expect("a mode");
    let socket = scratch.file("page.sock");
    let _page = Page::start(Path::new("/nowhere/agent.sock"), &format!("unix:{socket}"));
    let mut command = Command::new("python3");
    let mut others =
        command.args(["-c", CLIENTS, &socket]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3");
    let mut lines = BufReader::new(others.stdout.take().expect("its output")).lines();
    let mut says = |what: &str| assert_eq!(lines.next().expect("a line").expect("text"), what);
    says("ready");
    // The oldest client, which has not asked yet.
    let client = UnixStream::connect(&socket).expect("it listens");
    let mut asks = others.stdin.take().expect("its input");
    writeln!(asks, "connect").expect("it reads");
    says("connected");
    let (head, body) = fetch(client, "localhost", "/state");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}: {body}");
    drop(asks);
    assert!(others.wait().expect("its end").success());
}
