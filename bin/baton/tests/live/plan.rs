//! `baton plan`: what is measured here is saved, planned with, and used by `baton doctor`; what cannot be is refused.

use crate::common::{SetsAtEnd, hosts, wait_until};
use crate::scratch::{Scratch, text};
use baton_bed::testbed::{Testbed, TestbedSettings, address_a};
use baton_protocol::program::Place;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a request and of its answer.
const SIZE: u32 = 640;

fn baton(bed: Option<&Testbed>, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = match bed {
        Some(bed) => bed.host_a.spawn(&mut command),
        None => command.spawn(),
    };
    started.expect("baton").wait_with_output().expect("its output")
}

fn json(ran: &Output) -> Value {
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    serde_json::from_slice(&ran.stdout).expect("JSON")
}

/// Runs the planner's program at a port of host A, under `baton run` if wanted, and exchanges while `meanwhile` runs,
/// which gets the program's process and the number of exchanges so far.
fn at_work(bed: &Testbed, port: u16, under_baton: bool, meanwhile: impl FnOnce(u32, &AtomicU64)) {
    let (address, program) = (SocketAddr::new(address_a(false), port), env!("CARGO_BIN_EXE_baton"));
    let mut command = Command::new(program);
    if under_baton {
        command.arg("run").arg("--socket").arg(bed.socket()).args(["--rule", "established", "--", program]);
    }
    let mut server = bed.host_a.spawn(command.arg("serve-plan").arg(address.to_string())).expect("the program");
    wait_until("the program listens", || bed.host_b.run(|| TcpStream::connect(address)).is_ok());
    let (ends, count) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _ends = SetsAtEnd(&ends);
        let running = scope.spawn(|| {
            let mut stream = bed.host_b.run(|| TcpStream::connect(address)).expect("a connection");
            let mut request = [SIZE, SIZE, 0].map(u32::to_le_bytes).concat();
            request.resize(SIZE as usize, 0);
            while !ends.load(Ordering::Relaxed) {
                stream.write_all(&request).expect("sent");
                stream.read_exact(&mut [0; SIZE as usize]).expect("answered");
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        meanwhile(server.id(), &count);
        ends.store(true, Ordering::Relaxed);
        running.join().expect("the client");
    });
    server.kill().expect("its end");
    server.wait().expect("its status");
}

#[test]
fn this_machine_is_measured_and_planned_with() {
    let scratch = Scratch::new("plan");
    let (saved, load) = (scratch.file("here.toml"), scratch.file("load.toml"));
    std::fs::write(&load, "connections = 5000\nsizes = [{ request = 64, answer = 4096 }]\npeer_here = true\n").expect("a file");
    let planned = json(&baton(None, &["plan", "--save", &saved, "--load", &load, "--json"]));
    let rows = planned["rows"].as_array().expect("rows");
    let degrees: Vec<&str> = rows.iter().filter_map(|row| row["degree"].as_str()).collect();
    assert_eq!(degrees, ["none", "stateless", "partial", "handoff", "full"]);
    assert!(rows.iter().all(|row| row["machine"].as_f64() > Some(0.0) && row["rate"].as_f64() > Some(0.0)), "{planned}");
    assert!(planned["rows"][3]["note"].as_str().is_some_and(|note| note.contains("room for 4096 of 5000")), "{planned}");
    // The same again, without measuring.
    let again = json(&baton(None, &["plan", "--host", &saved, "--nic", &saved, "--load", &load, "--json"]));
    assert_eq!(again["rows"], planned["rows"]);

    let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
    let socket = bed.socket().display().to_string();
    let record = ["plan", "--host", &saved, "--nic", &saved, "--load", "record", "--seconds", "1", "--socket", &socket, "--json"];
    let idle = baton(None, &record);
    assert!(idle.status.code() == Some(2) && text(&idle.stderr).contains("carried nothing in 1 s"), "{}", text(&idle.stderr));
    at_work(&bed, 8101, false, |process, count| {
        wait_until("the client is at work", || count.load(Ordering::Relaxed) > 100);
        let said = json(&baton(Some(&bed), &["doctor", &process.to_string(), "--seconds", "1", "--plan", &saved, "--json"]));
        assert!(said["saving"]["exchanges_per_second"].as_f64() > Some(10.0), "{said}");
        assert_eq!(said["saving"]["connections"], 1, "{said}");
    });
    at_work(&bed, 8102, true, |_, count| {
        let mut tool = bed.tool().expect("a tool");
        wait_until("the connection is on the NIC", || {
            tool.connections().expect("a list").iter().any(|info| info.place == Place::Nic && info.detail.received > Some(0))
        });
        let before = count.load(Ordering::Relaxed);
        wait_until("the client is at work", || count.load(Ordering::Relaxed) > before + 100);
        let said = json(&baton(None, &record));
        let size = &said["load"]["sizes"][0];
        for bytes in [&size["request"], &size["answer"]] {
            let bytes = bytes.as_f64().expect("bytes");
            // Frames of others and acknowledgements without data count as exchanges.
            assert!((f64::from(SIZE) * 0.4..=f64::from(SIZE) * 1.1).contains(&bytes), "{said}");
        }
        assert_eq!(said["load"]["connections"], 1, "{said}");
    });
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let scratch = Scratch::new("plan");
    let (here, load) = (scratch.file("host.toml"), scratch.file("load.toml"));
    let refuses = |arguments: &[&str], what: &str| {
        let ran = baton(None, &[&["plan"], arguments].concat());
        let said = text(&ran.stderr);
        assert!(ran.status.code() == Some(2) && said.contains(what), "{arguments:?}: {said}");
    };
    let with_load = |text: &str, what: &str| {
        std::fs::write(&load, text).expect("a file");
        refuses(&["--load", &load], what);
    };
    with_load("connections = 1\ndepth = 0.5\nsizes = [{ request = 1, answer = 1 }]", "load.depth is 0.5");
    with_load("connections = 0\nsizes = [{ request = 1, answer = 1 }]", "load.connections is 0");
    with_load("connections = 1\nsizes = []\nrequets = 3", "unknown field `requets`");
    with_load("connections = 1\nsizes = [{ request = 1, answer = 1 }]\nrequests = 0", "load.requests is 0");
    refuses(&["--load", "/nowhere/load.toml"], "reading /nowhere/load.toml");
    refuses(&[], "--load");
    std::fs::write(&here, "[nic]\nabout = ''\n").expect("a file");
    std::fs::write(&load, "connections = 1\nsizes = [{ request = 1, answer = 1 }]").expect("a file");
    refuses(&["--host", &here, "--nic", &here, "--load", &load], "missing field");
}
