//! `baton nic --explain-placement`, `baton run --place`, and the NIC's settings at its start.

use crate::scratch::{Scratch, text};
use baton_bed::testbed::TestbedSettings;
use baton_linux::namespace::Namespace;
use baton_linux::{process, socket, topology};
use baton_protocol::program::Place;
use std::os::fd::AsFd;
use std::process::{Command, Output, Stdio};

fn baton(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_baton")).args(arguments).env_remove("BATON_SOCKET").output().expect("baton")
}

/// Two nodes of four processors; the second has no memory.
const TWO_NODES: &str = "
[[node]]
number = 0
cpus = [0, 1, 2, 3]
megabytes = 4000
distances = [10, 21]

[[node]]
number = 1
cpus = [4, 5, 6, 7]
megabytes = 0
distances = [21, 10]
";

#[test]
fn a_placement_is_explained() {
    let here = baton(&["nic", "--explain-placement"]);
    assert!(here.status.success() && text(&here.stdout).contains("worker 0: processor"), "{here:?}");
    let scratch = Scratch::new("topology");
    let file = scratch.file("machine.toml");
    std::fs::write(&file, TWO_NODES).expect("a file");
    let explain = |more: &[&str]| baton(&[&["nic", "--explain-placement", "--topology", &file], more].concat());
    let two = explain(&["--workers", "3", "--device-node", "1"]);
    let said = text(&two.stdout);
    for line in [
        "node 1: 4 processors (4-7), 0 MB, distances 21 10",
        "worker 0: processor 4, memory of node 0: node 1 is the device's; it has no memory, and node 0 is the nearest that has",
        "worker 2: processor 0, memory of node 0: node 1 is full with 2, and node 0 is the nearest with room (distance 21)",
        "programs of worker 0's connections: processors 6-7",
        "programs of worker 2's connections: processors 1-3",
    ] {
        assert!(said.lines().any(|found| found == line), "no line {line:?} in:\n{said}");
    }
    let json = explain(&["--workers", "2", "--device-node", "0", "--placement-json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(json["placement"]["workers"][1]["cpu"], 1);
    let wrong = explain(&["--device-node", "5"]);
    assert!(wrong.status.code() == Some(2) && text(&wrong.stderr).contains("there is no node 5"), "{wrong:?}");
    let wrong = explain(&["--interface", "nowhere0"]);
    let said = text(&wrong.stderr);
    assert!(wrong.status.code() == Some(2) && said.contains("nowhere0") && said.contains("ip link"), "{said}");
    std::fs::write(&file, "[[node]]\nnumber = 0\ncores = 4\n").expect("a file");
    let wrong = explain(&[]);
    let said = text(&wrong.stderr);
    assert!(wrong.status.code() == Some(2) && said.contains("machine.toml") && said.contains("cores"), "{said}");
}

#[test]
fn a_program_runs_near_its_nic() {
    let scratch = Scratch::new("near");
    let allowed = |place: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--place", place, "--", "grep", "Cpus_allowed_list", "/proc/self/status"]);
        command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
        let ran = Namespace::new().expect("a namespace").spawn(&mut command).expect("baton").wait_with_output().expect("output");
        assert!(ran.status.success(), "{ran:?}");
        text(&ran.stdout).trim().to_string()
    };
    let (anywhere, near) = (allowed("anywhere"), allowed("near-nic"));
    assert_eq!(anywhere != near, process::cores() > 1, "{anywhere:?}, {near:?}");
}

/// A program can ask for the processor of the NIC's worker while the NIC has its connection, and for that processor's
/// node.
#[test]
fn a_program_can_ask_where_its_connection_is() {
    let mut scene = crate::common::scene(TestbedSettings { nic_cores: vec![0], ..TestbedSettings::default() });
    scene.exchange(100_000, Place::Nic);
    assert_eq!(scene.session.processor(scene.id).expect("a processor"), Some(0));
    assert_eq!(scene.session.node(scene.id).expect("a node"), topology::node_of_cpu(0));
    scene.exchange(100_000, Place::Kernel);
    let fd = scene.session.release(scene.id).expect("the descriptor");
    let kernels = socket::get(fd.as_fd(), 1, 49).expect("SO_INCOMING_CPU");
    assert!((0..process::cores() as i32).contains(&kernels), "{kernels}");
}

/// One of the program's processors while the kernel has the connection, one of the NIC's while the NIC has it.
const ASKS: &str = "
import os, socket, time
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
mine, deadline = os.sched_getaffinity(0), time.monotonic() + 20
while time.monotonic() < deadline:
    client.sendall(b'x')
    server.recv(1)
    at = server.getsockopt(socket.SOL_SOCKET, socket.SO_INCOMING_CPU)
    if at >= 0 and at not in mine:
        print('elsewhere')
        break
";

#[test]
fn an_unmodified_program_can_ask_too() {
    let scratch = Scratch::new("asked");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--place", "near-nic", "--rule", "established", "--", "python3", "-c", ASKS]);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = Namespace::new().expect("a namespace").spawn(&mut command).expect("baton").wait_with_output().expect("output");
    let elsewhere = text(&ran.stdout).trim() == "elsewhere";
    assert!(ran.status.success() && elsewhere == (process::cores() > 1), "{ran:?}");
}

#[test]
fn a_nic_starts_with_its_settings() {
    let scratch = Scratch::new("settings");
    let file = scratch.file("baton.toml");
    std::fs::write(&file, "[nic]\nlro = \"in-order\"\ntso = true\nrx-usecs = 70\n").expect("a file");
    let me = env!("CARGO_BIN_EXE_baton");
    let options = ["--nic", "lro=reorder", "--nic", "memory=1G", "--during-moves", "drop", "--nic-connections", "7"];
    let options = [&options[..], &["--when-full", "drop", "--route-change", "drop"]].concat();
    let shown = baton(&[&["hosts", "--config", &file][..], &options[..], &["--", me, "nic", "show", "--json"]].concat());
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap_or_else(|_| panic!("{shown:?}"));
    let setting = |key: &str| shown["settings"][key].as_str().unwrap_or_default().to_string();
    assert_eq!([setting("lro"), setting("tso"), setting("rx-usecs")], ["reorder", "on", "70"]);
    let chosen = ["memory", "during-moves", "peer-fin", "connections", "processor"].map(setting);
    assert_eq!(chosen, ["1073741824", "drop", "keep", "7", "all"]);
    assert_eq!(["when-full", "route-change"].map(setting), ["drop", "drop"]);
    for (wrong, says) in
        [("[nic]\nlro = 7\n", "off, in-order, reorder"), ("[nic]\nspeed = 1\n", "unknown setting"), ("[card]\n", "card")]
    {
        std::fs::write(&file, wrong).expect("a file");
        let refused = baton(&["hosts", "--config", &file, "--", "true"]);
        let said = text(&refused.stderr);
        assert!(refused.status.code() == Some(2) && said.contains("baton.toml") && said.contains(says), "{wrong}: {said}");
    }
    let refused = baton(&["hosts", "--nic", "queues=4", "--", "true"]);
    assert!(text(&refused.stderr).contains("--workers"), "{refused:?}");
}
