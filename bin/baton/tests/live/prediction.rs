//! `baton doctor PROGRAM`: what it says of a program's connections is what a Baton then does.

use crate::common::{hosts, start_python};
use baton_bed::testbed::{Testbed, TestbedSettings, address_b};
use baton_protocol::program::Place;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

/// Makes connections, some with options that keep them in the kernel, and sends on each when a line comes.
const PROGRAM: &str = "
import socket, sys
all = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(7)]
all[0].setsockopt(socket.IPPROTO_TCP, 25, 4096)
all[1].setsockopt(socket.IPPROTO_TCP, 25, 4096)
all[2].setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 5)
all[3].setsockopt(socket.SOL_SOCKET, 36, 7)
for one in all[:6]: one.setblocking(False)
others = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
print('ready', flush=True)
sys.stdin.readline()
";

/// How long an attacher may take to have tried all connections.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn doctor(bed: &Testbed, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("doctor").args(arguments).env_remove("BATON_SOCKET");
    bed.host_a
        .spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
        .expect("baton")
        .wait_with_output()
        .expect("its output")
}

fn reasons(of: &Value) -> BTreeMap<String, u64> {
    serde_json::from_value(of.clone()).expect("counts")
}

#[test]
fn a_prediction_is_what_an_attacher_does() {
    let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
    let listener = bed.host_b.run(|| TcpListener::bind((address_b(false), 0))).expect("a listener");
    let at = listener.local_addr().expect("its address");
    let (mut program, _lines) = start_python(&bed, PROGRAM, at, false);
    let peers: Vec<_> = (0..7).map(|_| listener.accept().expect("a connection")).collect();
    let process = program.id().to_string();
    // From another network namespace, too.
    let mut elsewhere = Command::new(env!("CARGO_BIN_EXE_baton"));
    let elsewhere = elsewhere.args(["doctor", &process, "--seconds", "1", "--json"]).output().expect("baton");
    for ran in [doctor(&bed, &[&process, "--seconds", "1", "--json"]), elsewhere] {
        assert!(ran.status.success(), "{}", text(&ran.stderr));
        let said: Value = serde_json::from_slice(&ran.stdout).expect("JSON");
        assert_eq!((&said["connections"], &said["would_move"]), (&7.into(), &3.into()), "{said}");
        assert_eq!((&said["saving"], &said["unknown"]), (&Value::Null, &serde_json::json!({})), "{said}");
        let predicted = reasons(&said["would_stay"]);
        assert_eq!(predicted.values().sum::<u64>(), 4, "{said}");
        assert!(predicted.keys().any(|why| why.contains("TCP_NOTSENT_LOWAT")), "{said}");
    }
    let said: Value = serde_json::from_slice(&doctor(&bed, &[&process, "--seconds", "1", "--json"]).stdout).expect("JSON");
    // What an attacher does with them, which has to say so on its output.
    let mut attach = Command::new(env!("CARGO_BIN_EXE_baton"));
    attach.arg("attach").arg(&process).env("BATON_SOCKET", bed.socket());
    let mut attacher = bed.host_a.spawn(attach.stdout(Stdio::piped())).expect("baton");
    let mut line = String::new();
    let mut said_by_attacher = std::io::BufReader::new(attacher.stdout.take().expect("its output"));
    said_by_attacher.read_line(&mut line).expect("a line");
    assert!(line.contains(": 7 connections"), "{line}");
    assert_eq!(said["blocking"], 1, "{said}");
    let mut predicted = reasons(&said["would_stay"]);
    predicted.insert("blocking socket".into(), 1);
    let (mut stayed, mut on_nic) = (BTreeMap::new(), 0);
    let deadline = std::time::Instant::now() + PATIENCE;
    while (on_nic, &stayed) != (2, &predicted) && std::time::Instant::now() < deadline {
        (stayed, on_nic) = (BTreeMap::new(), 0);
        for one in bed.tool().and_then(|mut tool| tool.connections()).expect("a list") {
            match one.place {
                Place::Nic => on_nic += 1,
                Place::Kernel => *stayed.entry(one.reason).or_default() += 1,
            }
        }
    }
    assert_eq!((on_nic, stayed), (2, predicted));
    baton_linux::process::signal(attacher.id(), libc::SIGTERM).expect("SIGTERM");
    attacher.wait().expect("its end");
    writeln!(program.stdin.take().expect("its input")).expect("a line");
    program.wait().expect("its end");
    drop(peers);
}

/// Ctrl-C gives what is known so far.
#[test]
fn an_interrupted_doctor_says_what_it_has_seen() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    let own = std::process::id().to_string();
    command.args(["doctor", &own, "--seconds", "3600", "--json"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("baton");
    // It has taken the signal for itself before it starts who looks.
    crate::common::wait_until("it looks", || !baton_linux::process::children(child.id()).is_empty());
    baton_linux::process::signal(child.id(), libc::SIGINT).expect("SIGINT");
    let ran = child.wait_with_output().expect("its output");
    assert!(ran.status.success(), "{}: {}", ran.status, text(&ran.stderr));
    let said: Value = serde_json::from_slice(&ran.stdout).expect("JSON");
    assert_eq!(said["interrupted"], true, "{said}");
}

#[test]
fn what_cannot_be_watched_is_said() {
    let bed = hosts(TestbedSettings::default());
    let cases: [(&[&str], &str); 5] = [
        (&["4194304"], "there is no process 4194304"),
        (&["--port", "1"], "nobody listens at port 1 "),
        (&["no-such-unit-of-baton"], "no process number"),
        (&["1", "--port", "2"], "cannot be used with"),
        (&["1", "--seconds", "0"], "--seconds"),
    ];
    for (arguments, says) in cases {
        let ran = doctor(&bed, arguments);
        assert_eq!(ran.status.code(), Some(2), "{arguments:?}");
        let said = text(&ran.stderr);
        assert!(said.contains(says) || said.contains("there is no unit"), "{arguments:?}: {said}");
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", env!("CARGO_BIN_EXE_baton"), "doctor"]);
    let ran = command.arg(std::process::id().to_string()).output().expect("setpriv");
    assert!(text(&ran.stderr).contains("belongs to user 0: run baton doctor as root"), "{}", text(&ran.stderr));
}
