//! `baton metrics`: what it says is right and well-formed, and nobody can keep it from saying it.

use crate::common::{Scene, scene, wait_for, wait_until};
use baton_bed::testbed::TestbedSettings;
use baton_linux::process::signal;
use baton_protocol::program::Place;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

const BATON: &str = env!("CARGO_BIN_EXE_baton");

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Values by name and labels, and the type of each family.
#[derive(Debug)]
struct Parsed {
    values: BTreeMap<String, f64>,
    types: HashMap<String, String>,
}

/// Labels between braces, checked for their form. Returns them and what follows.
fn labels(line: &str) -> (Vec<(String, String)>, &str) {
    let Some(mut rest) = line.strip_prefix('{') else { return (Vec::new(), line) };
    let mut found = Vec::new();
    loop {
        let (name, behind) = rest.split_once("=\"").unwrap_or_else(|| panic!("no label: {line}"));
        assert!(!name.is_empty() && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_'), "{line}");
        let (mut value, mut letters) = (String::new(), behind.char_indices());
        let end = loop {
            match letters.next().unwrap_or_else(|| panic!("no end: {line}")) {
                (at, '"') => break at + 1,
                (_, '\\') => match letters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, letter @ ('\\' | '"'))) => value.push(letter),
                    other => panic!("an escape {other:?}: {line}"),
                },
                (_, letter) => value.push(letter),
            }
        };
        assert!(found.iter().all(|(known, _)| known != name), "a label twice: {line}");
        found.push((name.to_owned(), value));
        match behind[end..].strip_prefix(',') {
            Some(next) => rest = next,
            None => return (found, behind[end..].strip_prefix('}').unwrap_or_else(|| panic!("no end: {line}"))),
        }
    }
}

/// Parses a format strictly: each family in one piece, its metadata first, no series twice, names and units by the
/// rules, buckets in order and cumulative.
fn parse(text: &str, open: bool) -> Parsed {
    assert!(text.ends_with('\n') && text.ends_with("# EOF\n") == open, "the end");
    let mut parsed = Parsed { values: BTreeMap::new(), types: HashMap::new() };
    let (mut helped, mut family, mut buckets) = (HashSet::new(), String::new(), BTreeMap::<String, Vec<(f64, f64)>>::new());
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(metadata) = line.strip_prefix("# ") {
            let (kind, rest) = metadata.split_once(' ').expect("metadata");
            let (name, what) = rest.split_once(' ').expect("a name");
            match kind {
                "HELP" => {
                    assert!(helped.insert(name.to_owned()) && what.ends_with('.'), "{line}");
                    family = name.to_owned();
                }
                "TYPE" => {
                    assert!(name == family && ["counter", "gauge", "histogram"].contains(&what), "{line}");
                    assert!(parsed.types.insert(name.to_owned(), what.to_owned()).is_none(), "{line}");
                    assert_eq!(name.ends_with("_total"), what == "counter" && !open, "{line}");
                }
                "UNIT" => assert!(open && name == family && name.ends_with(&format!("_{what}")), "{line}"),
                _ => panic!("{line}"),
            }
            continue;
        }
        let end = line.find(['{', ' ']).expect("a name");
        let (mut labels, rest) = labels(&line[end..]);
        let value: f64 = rest.strip_prefix(' ').expect("a value").parse().expect("a number");
        let suffix = line[..end].strip_prefix(&family).unwrap_or_else(|| panic!("{line} is not of {family}"));
        let kind = parsed.types[&family].as_str();
        let suffixes: &[&str] = match (kind, open) {
            ("counter", true) => &["_total"],
            ("histogram", _) => &["_sum", "_count", "_bucket"],
            _ => &[""],
        };
        assert!(suffixes.contains(&suffix) && value >= 0.0, "{line}");
        if suffix == "_bucket" {
            let place = labels.iter().position(|(name, _)| name == "le").unwrap_or_else(|| panic!("no le: {line}"));
            let (le, bound) = labels.remove(place);
            let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().expect("a bound") };
            buckets.entry(format!("{family}{labels:?}")).or_default().push((bound, value));
            labels.push((le, bound.to_string()));
        } else if suffix == "_count" {
            buckets.entry(format!("{family}{labels:?} count")).or_default().push((f64::INFINITY, value));
        }
        labels.retain(|(name, _)| name != "baton");
        let shown: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        // By the same name in both formats.
        let name = format!("{}{{{}}}", &line[..end], shown.join(","));
        assert!(parsed.values.insert(name, value).is_none(), "twice: {line}");
    }
    assert_eq!(helped, parsed.types.keys().cloned().collect(), "a family without type");
    for (series, bounds) in buckets.iter().filter(|(series, _)| !series.ends_with(" count")) {
        assert!(bounds.is_sorted_by(|one, next| one.0 < next.0 && one.1 <= next.1), "{series}: {bounds:?}");
        assert_eq!(bounds.last(), buckets[&format!("{series} count")].first(), "{series}");
    }
    parsed
}

impl Parsed {
    fn of(&self, name: &str) -> f64 {
        *self.values.get(name).unwrap_or_else(|| panic!("no {name} in {:#?}", self.values))
    }

    /// The sum over all labels.
    fn sum(&self, name: &str) -> f64 {
        self.values.iter().filter(|(known, _)| known.split('{').next() == Some(name)).map(|(_, value)| value).sum()
    }

    /// Everything that may only grow.
    fn growing(&self) -> impl Iterator<Item = (&String, f64)> {
        let grows = |name: &str| ["_total", "_bucket", "_count", "_sum"].iter().any(|end| name.ends_with(end));
        self.values
            .iter()
            .filter(move |(name, _)| grows(name.split('{').next().unwrap_or_default()))
            .map(|(name, value)| (name, *value))
    }
}

fn once(scene: &Scene, open: bool) -> Parsed {
    let format = if open { "openmetrics" } else { "text" };
    let mut command = Command::new(BATON);
    command.args(["metrics", "--once", "--format", format, "--socket"]).arg(scene.bed.socket());
    let ran = command.env_remove("BATON_SOCKET").output().expect("baton metrics");
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    parse(&text(&ran.stdout), open)
}

/// Looks until what connections have carried is counted: that is polled.
fn until(scene: &Scene, what: &str, holds: impl Fn(&Parsed) -> bool) -> Parsed {
    let mut last = once(scene, false);
    wait_until(what, || {
        let now = once(scene, false);
        let earlier = std::mem::replace(&mut last, now);
        for (name, value) in earlier.growing().filter(|(name, _)| !name.starts_with("baton_exporter")) {
            assert!(last.values.get(name).is_some_and(|now| *now >= value), "{name} was {value}, is {:?}", last.values.get(name));
        }
        holds(&last)
    });
    last
}

/// Moves, bytes, blackouts and deaths are counted, and no counter of an agent ever falls, though NICs die.
#[test]
fn what_happens_is_in_the_metrics() {
    let mut scene = scene(TestbedSettings::default());
    let first = once(&scene, false);
    assert_eq!((first.of("baton_up{}"), first.of("baton_moves_total{}")), (1.0, 0.0));
    assert_eq!(first.sum("baton_program_connections"), 1.0);
    scene.move_to(Place::Nic);
    scene.fill(300_000);
    scene.drain();
    let [sent, received] = [scene.sent[0], scene.received[0]].map(|bytes| bytes as f64);
    let carried = |now: &Parsed, sent: f64, received: f64| {
        now.of("baton_nic_sent_bytes_total{nic=0}") >= sent && now.of("baton_nic_received_bytes_total{nic=0}") >= received
    };
    let one = until(&scene, "what went over the NIC is counted", |now| carried(now, sent, received));
    assert!(one.of("baton_nic_sent_bytes_total{nic=0}") <= sent + 2.0, "{one:#?}");
    assert!(one.sum("baton_rtt_seconds_count") >= 1.0 && one.sum("baton_rtt_seconds_sum") > 0.0, "{one:#?}");
    assert_eq!(one.of("baton_move_blackout_seconds_count{to=nic}"), 1.0);
    assert!(one.of("baton_move_blackout_seconds_sum{to=nic}") > 0.0);
    assert_eq!(one.sum("baton_program_moves_to_nic_total"), 1.0);
    assert_eq!(one.of("baton_nic_connections{nic=0,worker=0}"), 1.0);
    assert!(one.values.keys().any(|name| name.starts_with("baton_program_connections{") && name.ends_with("place=nic}")));
    // In the kernel the NIC carries nothing.
    scene.move_to(Place::Kernel);
    scene.fill(300_000);
    scene.drain();
    let two = until(&scene, "the return is counted", |now| now.of("baton_move_blackout_seconds_count{to=kernel}") == 1.0);
    assert!(two.of("baton_nic_sent_bytes_total{nic=0}") <= sent + 2.0, "{two:#?}");
    assert_eq!(two.sum("baton_program_returns_total"), 1.0);
    scene.exchange(10_000, Place::Nic);
    // What the NIC counts in its own memory begins anew with the next one, and the metric does not.
    let before = until(&scene, "the worker has worked", |now| now.sum("baton_nic_busy_seconds_total") > 0.0);
    let statistics = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics");
    signal(statistics.nic_process, libc::SIGKILL).expect("it lives");
    let dead = until(&scene, "the death is counted", |now| now.of("baton_nic_deaths_total{nic=0,cause=killed}") == 1.0);
    let after = until(&scene, "it is restored", |now| now.sum("baton_recovery_blackout_seconds_count") == 1.0);
    for (name, value) in before.growing().filter(|(name, _)| !name.starts_with("baton_exporter")) {
        assert!(
            dead.of(name) >= value && after.of(name) >= dead.of(name),
            "{name}: {value}, {}, {}",
            dead.of(name),
            after.of(name)
        );
    }
    assert_eq!(after.of("baton_nic_starts_total{}"), 2.0);
    scene.exchange(10_000, Place::Kernel);
    // The other format says the same, under the same names.
    let open = once(&scene, true);
    assert_eq!(open.values.keys().collect::<Vec<_>>(), once(&scene, false).values.keys().collect::<Vec<_>>());
}

/// An exporter that runs.
struct Exporter {
    _child: Ends,
    address: SocketAddr,
}

/// A child that ends with this, however that comes.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Exporter {
    fn start(agent: &Path) -> Exporter {
        let mut command = Command::new(BATON);
        command.args(["metrics", "--listen", "127.0.0.1:0", "--socket"]).arg(agent).env_remove("BATON_SOCKET");
        let mut child = Ends(command.stdout(Stdio::piped()).spawn().expect("baton metrics"));
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("metrics at http://").and_then(|line| line.strip_suffix("/metrics"));
        let address = address.unwrap_or_else(|| panic!("{line}")).parse().expect("its address");
        Exporter { _child: child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
        stream
    }

    /// The answer's head and body.
    fn ask(&self, request: &[u8]) -> (String, String) {
        let mut stream = self.connect();
        stream.write_all(request).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {answer:?}"));
        (head.to_owned(), body.to_owned())
    }

    fn scrape(&self) -> Parsed {
        let (head, body) = self.ask(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("text/plain; version=0.0.4"), "{head}");
        parse(&body, false)
    }
}

/// The format is negotiated; an agent that dies is down for a moment, and the next one is found.
#[test]
fn the_exporter_outlives_agents() {
    let scene = scene(TestbedSettings::default());
    let exporter = Exporter::start(&scene.bed.socket());
    assert_eq!(exporter.scrape().of("baton_up{}"), 1.0);
    let (head, body) = exporter.ask(b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0\r\n\r\n");
    assert!(head.contains("Content-Type: application/openmetrics-text; version=1.0.0"), "{head}");
    parse(&body, true);
    let (head, body) = exporter.ask(b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200") && body.is_empty(), "{head}");
    let statistics = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics");
    signal(statistics.agent_process, libc::SIGKILL).expect("it lives");
    let process = statistics.agent_process;
    wait_until("another agent is there", || {
        scene.bed.tool().and_then(|mut tool| tool.statistics()).is_ok_and(|now| now.agent_process != process)
    });
    wait_until("the next agent is up", || exporter.scrape().of("baton_up{}") == 1.0);
    drop(scene);
    // Nobody listens any more; the exporter goes on.
    wait_until("it is down", || exporter.scrape().of("baton_up{}") == 0.0);
}

/// Clients that ask nothing, never read, or send garbage keep nobody else from an answer.
#[test]
fn no_client_harms_another() {
    let scene = scene(TestbedSettings::default());
    let exporter = Exporter::start(&scene.bed.socket());
    let idle: Vec<TcpStream> = (0..100).map(|_| exporter.connect()).collect();
    let deaf: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = exporter.connect();
            // The oldest ones are cut off, perhaps before they can ask.
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
            stream
        })
        .collect();
    assert_eq!(exporter.scrape().of("baton_up{}"), 1.0);
    for (garbage, status) in [
        (&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], "400"),
        (b"GET /nothing HTTP/1.1\r\n\r\n", "404"),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", "405"),
    ] {
        let (head, _) = exporter.ask(garbage);
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
    }
    let mut long = exporter.connect();
    // It need not read to the end.
    let _ = long.write_all(&vec![b'x'; 1 << 20]);
    drop(long);
    drop((idle, deaf));
    // One that asks too slowly is cut off.
    let mut slow = exporter.connect();
    slow.write_all(b"GET /metr").expect("it reads");
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).expect("it is closed");
    assert!(rest.is_empty());
    wait_for(Duration::from_secs(60), "it is counted", || {
        let now = exporter.scrape();
        now.of("baton_exporter_clients_cut_off_total{}") >= 69.0 && now.of("baton_exporter_requests_refused_total{}") >= 3.0
    });
}

fn metrics(arguments: &[&str]) -> Output {
    Command::new(BATON).arg("metrics").args(arguments).env("BATON_SOCKET", "/nowhere/agent.sock").output().expect("baton")
}

/// A Unix socket, which is there as long as the exporter runs; and without any Baton that it is down.
#[test]
fn a_unix_socket_serves() {
    let path = std::env::temp_dir().join(format!("baton-metrics-live-{}.sock", std::process::id()));
    let place = format!("unix:{}", path.display());
    let mut command = Command::new(BATON);
    command.args(["metrics", "--listen", &place]).env("BATON_SOCKET", "/nowhere/agent.sock").stdout(Stdio::piped());
    let mut child = Ends(command.spawn().expect("baton metrics"));
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    assert!(line.contains("curl --unix-socket"), "{line}");
    let taken = metrics(&["--listen", &place]);
    assert!(
        taken.status.code() == Some(2) && text(&taken.stderr).contains("another process listens at"),
        "{}",
        text(&taken.stderr)
    );
    let mut stream = UnixStream::connect(&path).expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let parsed = parse(answer.split_once("\r\n\r\n").expect("a body").1, false);
    assert_eq!(parsed.of("baton_up{}"), 0.0);
    signal(child.0.id(), libc::SIGTERM).expect("it lives");
    assert!(child.0.wait().expect("its end").success());
    assert!(!Path::new(&path).exists(), "its socket is left");
}

#[test]
fn errors_say_what_to_type() {
    let cases: [(&[&str], &str); 4] = [
        (&["--listen", "0.0.0.0:9464"], "--expose"),
        (&["--listen", "9464"], "127.0.0.1:9464"),
        (&["--listen", "unix:/nowhere/metrics.sock"], "the directory must be there"),
        (&["--listen", "192.0.2.1:9464", "--expose"], "ip address"),
    ];
    for (arguments, said) in cases {
        let ran = metrics(arguments);
        assert_eq!(ran.status.code(), Some(2), "{arguments:?}");
        assert!(text(&ran.stderr).contains(said), "{arguments:?}: {}", text(&ran.stderr));
    }
    let down = metrics(&["--once"]);
    assert!(down.status.success() && text(&down.stdout).contains("baton_up{baton=\"/nowhere/agent.sock\"} 0"));
}

/// Whoever is not root sees programs of its own.
#[test]
fn an_ordinary_user_sees_its_own_programs() {
    let mut scene = scene(TestbedSettings::default());
    scene.exchange(1000, Place::Nic);
    let program: PathBuf = BATON.into();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(program);
    command.args(["metrics", "--once", "--socket"]).arg(scene.bed.socket()).env_remove("BATON_SOCKET");
    let ran = command.output().expect("setpriv (Debian's package util-linux)");
    let own = parse(&text(&ran.stdout), false);
    assert_eq!(own.of("baton_up{}"), 1.0, "{}", text(&ran.stderr));
    assert_eq!(own.sum("baton_program_moves_to_nic_total"), 0.0, "{own:#?}");
    assert_eq!(once(&scene, false).sum("baton_program_moves_to_nic_total"), 1.0);
}
