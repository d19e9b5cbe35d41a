//! `baton report`: what is in the archive, and what is not.

use crate::common::{scene, session};
use crate::stopped::in_time;
use baton_bed::testbed::TestbedSettings;
use baton_linux::freeze::Frozen;
use baton_protocol::program::Place;
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What a connection carries.
const MARKER: &str = "no-report-has-this-payload-in-it";

/// A directory for archives, which is removed in the end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("baton-report-test-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).expect("its rights");
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn report(socket: &Path, archive: &Path, further: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("report").arg("--socket").arg(socket).arg("-o").arg(archive).args(further);
    command.env_remove("BATON_SOCKET").output().expect("baton")
}

/// The files of an archive: their names without the directory, and their texts.
fn unpacked(archive: &Path) -> Vec<(String, String)> {
    let tar = |arguments: &[&str]| {
        let ran = Command::new("tar").args(arguments).arg("-zf").arg(archive).output().expect("tar");
        assert!(ran.status.success(), "{}", text(&ran.stderr));
        text(&ran.stdout)
    };
    let names: Vec<String> = tar(&["-t"]).lines().map(str::to_owned).collect();
    let file = |name: &String| {
        let ran = Command::new("tar").arg("-xzOf").arg(archive).arg(name).output().expect("tar");
        (name.split_once('/').expect("a directory").1.to_owned(), text(&ran.stdout))
    };
    names.iter().map(file).collect()
}

fn file<'a>(files: &'a [(String, String)], name: &str) -> &'a str {
    let found = files.iter().find(|(known, _)| known == name);
    &found.unwrap_or_else(|| panic!("there is no {name} in {:?}", files.iter().map(|(name, _)| name).collect::<Vec<_>>())).1
}

#[test]
fn a_report_has_events_and_no_payload() {
    let place = Directory::new("payload");
    let mut scene = scene(TestbedSettings::default());
    scene.move_to(Place::Nic);
    // Unread by the program, and by its peer.
    assert_eq!(scene.session.send(scene.id, MARKER.as_bytes()).expect("sending"), MARKER.len());
    std::io::Write::write_all(&mut scene.peer, MARKER.as_bytes()).expect("sending");
    let archive = place.0.join("one.tar.gz");
    let ran = report(&scene.bed.socket(), &archive, &["--json"]);
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let said: Value = serde_json::from_slice(&ran.stdout).expect("JSON");
    assert!(said["addresses_replaced"].as_u64().is_some_and(|count| count >= 2), "{said}");
    assert_eq!(std::fs::metadata(&archive).expect("the archive").permissions().mode() & 0o777, 0o600);
    let files = unpacked(&archive);
    let connections: Value = serde_json::from_str(file(&files, "agent-0/connections.json")).expect("JSON");
    assert_eq!(connections[0]["events"][0]["what"], "to_nic", "{connections}");
    let stats: Value = serde_json::from_str(file(&files, "agent-0/stats.json")).expect("JSON");
    assert_eq!(stats[0]["to_nic"], 1, "{stats}");
    let machine: Value = serde_json::from_str(file(&files, "machine.json")).expect("JSON");
    assert!(machine["kernel"].is_string() && machine["settings"]["net.ipv4.tcp_rmem"].is_string(), "{machine}");
    assert!(file(&files, "processes.txt").contains("Max open files"));
    assert!(file(&files, "agent-0/nic-0.json").contains("left out"), "the key of the distribution to workers");
    assert!(file(&files, "doctor.json").contains("TCP_REPAIR"));
    for (name, text) in &files {
        assert!(!text.contains(MARKER) && !text.contains("10.77.0."), "{name}: {text}");
    }
    let again = report(&scene.bed.socket(), &archive, &[]);
    assert_eq!(again.status.code(), Some(2));
    assert!(text(&again.stderr).contains("exists, and nothing is overwritten"), "{}", text(&again.stderr));
    let with = place.0.join("two.tar.gz");
    assert!(report(&scene.bed.socket(), &with, &["--addresses"]).status.success());
    assert!(file(&unpacked(&with), "agent-0/connections.json").contains("10.77.0.1:8080"));
}

/// What does not answer is named, and the rest is there.
#[test]
fn a_report_does_not_wait_for_an_agent() {
    let place = Directory::new("stopped");
    let scene = scene(TestbedSettings::default());
    let agent = scene.bed.tool().expect("a tool").statistics().expect("statistics").agent_process;
    let (socket, archive) = (scene.bed.socket(), place.0.join("one.tar.gz"));
    // A tracer: its keeper would resume one that is only stopped.
    let frozen = Frozen::freeze(&[agent]).expect("a tracer");
    let to = archive.clone();
    let ran = in_time("a report", move || report(&socket, &to, &[]));
    drop(frozen);
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    assert!(text(&ran.stdout).contains("has not answered in time"), "{}", text(&ran.stdout));
    let files = unpacked(&archive);
    assert!(file(&files, "missing.txt").contains("has not answered in time"));
    assert!(file(&files, "processes.txt").contains("Max open files"));
}

/// Whoever is not root gets a report, too.
#[test]
fn an_ordinary_user_gets_a_report() {
    let place = Directory::new("user");
    let scene = scene(TestbedSettings::default());
    drop(session(&scene.bed));
    let archive = place.0.join("one.tar.gz");
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        "--bounding-set",
        "-all",
        env!("CARGO_BIN_EXE_baton"),
    ]);
    command.arg("report").arg("--socket").arg(scene.bed.socket()).arg("-o").arg(&archive).env_remove("BATON_SOCKET");
    let ran = command.output().expect("setpriv");
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let files = unpacked(&archive);
    assert!(file(&files, "machine.json").contains("65534"));
    assert!(file(&files, "README.txt").contains("no bytes that connections have carried"));
}
