//! `baton load web`: a load like SPECweb99's on nginx, natively and with its connections on the NIC, and on servers
//! that are wrong.

use crate::common::{hosts, wait_until};
use crate::full::Program;
use crate::library::{finish, set_up_loopback};
use crate::scratch::{Scratch, text};
use baton_abi::layout::Counter;
use baton_bed::testbed::{TestbedSettings, address_a, without_baton};
use baton_linux::namespace::Namespace;
use serde_json::Value;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

const PORT: u16 = 8100;
const CLIENTS: u64 = 16;

/// `baton load web` on a host.
fn load(host: &Namespace, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["load", "web"]).args(arguments).env_remove("BATON_SOCKET");
    finish(host, command)
}

fn json(ran: &Output) -> Value {
    serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("no JSON: {}{}", text(&ran.stdout), text(&ran.stderr)))
}

/// A file set of two directories.
fn file_set(scratch: &Scratch) -> PathBuf {
    let root = scratch.0.join("files");
    let host = Namespace::new().expect("a namespace");
    let made = load(&host, &["--make-files", &root.to_string_lossy(), "--directories", "2", "--json"]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert_eq!(json(&made)["made"]["written"], 72);
    root
}

/// nginx with a file set on a host, under `baton run` with these options or natively. `/get?PATH` is its program, which
/// answers with that file.
fn nginx(scratch: &Scratch, host: &Namespace, options: Option<&[&str]>) -> Program {
    let address = SocketAddr::new(address_a(false), PORT);
    let places = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let places: String = places.iter().map(|name| format!("{name}_temp_path {}/t; ", scratch.0.display())).collect();
    let configuration = format!(
        "daemon off; master_process off; pid {0}/pid; error_log stderr crit; events {{ worker_connections 1024; }}
         http {{ access_log off; sendfile on; {places}
                 server {{ listen {address}; root {0}/files; location = /get {{ try_files $args =404; }} }} }}",
        scratch.0.display()
    );
    std::fs::write(scratch.file("nginx.conf"), configuration).expect("a file");
    let mut command = Command::new("nginx");
    if let Some(options) = options {
        command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.arg("run").args(options).args(["--", "nginx"]);
    }
    command.args(["-e", "stderr", "-c", &scratch.file("nginx.conf")]).env_remove("BATON_RUN").stdin(Stdio::null());
    Program(host.spawn(&mut command).expect("nginx (Debian's package nginx-light)"))
}

/// Runs a load from a host when the server listens, and checks that all was answered, and rightly.
fn is_served(host: &Namespace) -> Value {
    let address = SocketAddr::new(address_a(false), PORT);
    wait_until("the server listens", || host.run(|| TcpStream::connect(address)).is_ok());
    let (url, clients) = (format!("http://{address}"), CLIENTS.to_string());
    let one = ["--url", &url, "--connections", &clients, "--directories", "2", "--seconds", "3", "--json"];
    let ran = load(host, &[&one[..], &["--dynamic-path", "/get", "--dynamic", "30%"]].concat());
    assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    let report = json(&ran);
    assert_eq!((&report["errors"], &report["wrong_bytes"]), (&0.into(), &0.into()), "{report}");
    let number = |name: &str| report[name].as_u64().expect("a number");
    assert!(number("requests") > CLIENTS && number("dynamic_requests") > 0 && number("opened") >= CLIENTS, "{report}");
    assert!(number("conforming") <= CLIENTS, "{report}");
    // All lines together carry no more than this, and one piece of 20 kb for each client.
    assert!(report["megabits"].as_f64() <= Some(CLIENTS as f64 * 0.42), "{report}");
    println!("{} of {CLIENTS} conform, {} requests/s", report["conforming"], report["requests_per_second"]);
    report
}

#[test]
fn nginx_is_loaded_natively() {
    let scratch = Scratch::new("web-load");
    file_set(&scratch);
    let [a, b] = without_baton(&TestbedSettings::default()).expect("two test hosts (root is needed)");
    let _server = nginx(&scratch, &a, None);
    is_served(&b);
}

fn nginx_on_the_nic(beside: bool) {
    let scratch = Scratch::new("web-load");
    file_set(&scratch);
    let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
    let socket = bed.socket().display().to_string();
    let _server = nginx(&scratch, &bed.host_a, Some(&["--socket", &socket, "--rule", "accepted", "--eager"]));
    let report = is_served(&bed.host_b);
    let statistics = bed.tool().expect("a tool").statistics().expect("statistics");
    let segments = statistics.counters[Counter::Segments as usize];
    assert!(segments >= report["requests"].as_u64().expect("a number"), "the NIC had {segments} segments: {report}");
    assert_eq!(statistics.lost, 0, "{report}");
}

#[test]
fn nginx_is_loaded_with_its_connections_on_an_inline_nic() {
    nginx_on_the_nic(false);
}

#[test]
fn nginx_is_loaded_with_its_connections_on_a_nic_beside_the_kernel() {
    nginx_on_the_nic(true);
}

/// Serves files, and changes one bit of each in class 1.
const SPOILS: &str = "
import functools, http.server, sys
class Spoils(http.server.SimpleHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def copyfile(self, source, out):
        content = bytearray(source.read())
        if '/class1_' in self.path: content[77] ^= 1
        out.write(content)
    def log_message(self, *_): pass
handler = functools.partial(Spoils, directory=sys.argv[1])
http.server.ThreadingHTTPServer(('127.0.0.1', 8100), handler).serve_forever()
";

#[test]
fn wrong_bytes_are_found_and_named() {
    let scratch = Scratch::new("web-load");
    let root = file_set(&scratch);
    let host = Namespace::new().expect("a namespace");
    set_up_loopback(&host);
    let mut command = Command::new("python3");
    command.args(["-c", SPOILS]).arg(root).stdin(Stdio::null());
    let _server = Program(host.spawn(&mut command).expect("python3"));
    let address = SocketAddr::from(([127, 0, 0, 1], PORT));
    wait_until("the server listens", || host.run(|| TcpStream::connect(address)).is_ok());
    let url = format!("http://{address}");
    let arguments = ["--url", &url, "--connections", "16", "--directories", "2", "--seconds", "3", "--rate", "2M"];
    let ran = load(&host, &[&arguments[..], &["--json"]].concat());
    assert_eq!(ran.status.code(), Some(1), "{}{}", text(&ran.stdout), text(&ran.stderr));
    let report = json(&ran);
    let spoiled = &report["classes"][1];
    assert!(spoiled.as_u64() > Some(0), "{report}");
    assert_eq!((&report["wrong_bytes"], &report["faults"][0]["count"]), (spoiled, spoiled), "{report}");
    assert_eq!(report["faults"][0]["what"], "wrong bytes", "{report}");
    let shown = load(&host, &arguments);
    assert_eq!(shown.status.code(), Some(1), "{}", text(&shown.stderr));
    assert!(text(&shown.stdout).contains(" wrong bytes: /dir0000"), "{}", text(&shown.stdout));
}

#[test]
fn what_cannot_be_is_refused() {
    let scratch = Scratch::new("web-load");
    let host = Namespace::new().expect("a namespace");
    set_up_loopback(&host);
    let refuses = |arguments: &[&str], what: &str| {
        let ran = load(&host, arguments);
        let said = text(&ran.stderr);
        assert!(ran.status.code() == Some(2) && said.contains(what), "{arguments:?}: {said}");
    };
    let here = ["--url", "http://127.0.0.1:8100"];
    refuses(&[], "--url");
    refuses(&["--url", "https://127.0.0.1"], "only HTTP without TLS is known");
    refuses(&["--url", "127.0.0.1:80"], "http://HOST[:PORT][/PATH]");
    refuses(&here, "connecting to 127.0.0.1:8100");
    refuses(&[&here[..], &["--rate", "5"]].concat(), "from 1k to 1000G");
    refuses(&[&here[..], &["--seconds", "0"]].concat(), "from 0.1 to 86400");
    refuses(&[&here[..], &["--connections", "0"]].concat(), "1..=60000");
    refuses(&[&here[..], &["--directories", "2001"]].concat(), "1..=2000");
    refuses(&[&here[..], &["--dynamic", "30%"]].concat(), "--dynamic-path");
    refuses(&[&here[..], &["--dynamic-path", "get"]].concat(), "must begin with /");
    refuses(&[&here[..], &["--keep-alive", "often"]].concat(), "always");
    // A server without the files, and files of somebody else's.
    let empty = scratch.0.join("empty");
    std::fs::create_dir(&empty).expect("a directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    let _server = Program(host.spawn(command.args(["serve-files", "127.0.0.1:8100"]).arg(&empty)).expect("a server"));
    let address = SocketAddr::from(([127, 0, 0, 1], PORT));
    wait_until("the server listens", || host.run(|| TcpStream::connect(address)).is_ok());
    refuses(&here, "--make-files DIRECTORY --directories 90");
    let foreign = scratch.file("foreign");
    std::fs::create_dir_all(scratch.0.join("foreign/dir00000")).expect("a directory");
    std::fs::write(scratch.0.join("foreign/dir00000/class2_3"), "mine").expect("a file");
    let make = ["--make-files", &foreign, "--directories", "1"];
    refuses(&make, "nothing is overwritten");
    assert_eq!(std::fs::read_to_string(scratch.0.join("foreign/dir00000/class2_3")).expect("the file"), "mine");
    refuses(&[&make[..], &here].concat(), "cannot be used with");
}
