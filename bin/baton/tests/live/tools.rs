//! The tools, used as a person uses them.

use crate::common::{hosts, scene};
use baton_bed::testbed::TestbedSettings;
use baton_linux::control::Channel;
use baton_protocol::program::{Answer, Ask, Opening, Place, Reply, Request};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

fn baton(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_baton")).args(arguments).env_remove("BATON_SOCKET").output().expect("baton")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn connections_are_listed_and_moved() {
    let mut scene = scene(TestbedSettings::default());
    let socket = scene.bed.socket();
    let socket = ["--socket", socket.to_str().expect("a path")];
    let listed = text(&baton(&[&["ls"][..], &socket].concat()).stdout);
    assert!(listed.contains("kernel") && listed.contains("10.77.0.1:8080"), "{listed}");
    let moved = baton(&[&["move", "nic", ":8080"][..], &socket].concat());
    assert_eq!((moved.status.code(), text(&moved.stdout).trim()), (Some(0), "1 moved, 0 stayed"), "{}", text(&moved.stderr));
    assert_eq!(scene.settled_place(), Some(Place::Nic));
    let listed: serde_json::Value =
        serde_json::from_slice(&baton(&[&["ls", "--json"][..], &socket].concat()).stdout).expect("JSON");
    assert_eq!((&listed[0]["place"], &listed[0]["moves"]), (&"nic".into(), &1.into()), "{listed}");
    scene.exchange(10_000, Place::Nic);
    assert_eq!(baton(&[&["move", "kernel", "all"][..], &socket].concat()).status.code(), Some(0));
    assert_eq!(scene.settled_place(), Some(Place::Kernel));
    scene.exchange(10_000, Place::Kernel);
    let nobody = baton(&[&["move", "nic", ":1"][..], &socket].concat());
    assert_eq!(nobody.status.code(), Some(2));
    assert!(text(&nobody.stderr).contains("none of the 1 connections matches"), "{}", text(&nobody.stderr));
}

/// Without a path `ls` finds every Baton, and says of each connection where its agent listens.
#[test]
fn every_baton_is_found() {
    let mut scenes = [(); 2].map(|()| scene(TestbedSettings::default()));
    let listed: serde_json::Value = serde_json::from_slice(&baton(&["ls", "--json"]).stdout).expect("JSON");
    for scene in &mut scenes {
        let socket = scene.bed.socket();
        let mut here = listed.as_array().expect("a list").iter().filter(|one| one["socket"] == *socket.to_string_lossy());
        assert_eq!(here.next().map(|one| &one["place"]), Some(&"kernel".into()), "{socket:?} is not in {listed}");
    }
    let unclear = baton(&["move", "nic", "all"]);
    assert_eq!(unclear.status.code(), Some(2));
    assert!(text(&unclear.stderr).contains("Batons run here; say which one"), "{}", text(&unclear.stderr));
}

#[test]
fn errors_name_the_cause() {
    let absent = baton(&["ls", "--socket", "/nowhere/agent.sock"]);
    assert_eq!(absent.status.code(), Some(2));
    assert!(text(&absent.stderr).contains("no agent at /nowhere/agent.sock: start Baton (baton up)"), "{}", text(&absent.stderr));
    let filter = baton(&["move", "nic", "nginx"]);
    assert_eq!(filter.status.code(), Some(2));
    assert!(text(&filter.stderr).contains("a local port as `:80`"), "{}", text(&filter.stderr));
}

/// A full disk is said like other errors.
#[test]
fn output_that_cannot_be_written_is_an_error() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("/dev/full");
    let ran = Command::new(env!("CARGO_BIN_EXE_baton")).args(["doctor", "--json"]).stdout(full).output().expect("baton");
    let said = text(&ran.stderr);
    assert_eq!((ran.status.code(), said.lines().count()), (Some(2), 1), "{said}");
    assert!(said.contains("No space left on device"), "{said}");
}

/// Every finding says what it is needed for, and, if something is missing, what to do.
#[test]
fn the_doctor_examines_this_machine() {
    let ran = baton(&["doctor", "--json"]);
    let findings: serde_json::Value = serde_json::from_slice(&ran.stdout).expect("JSON");
    let findings = findings.as_array().expect("findings");
    assert!(findings.len() >= 8);
    let broken: Vec<_> = findings.iter().filter(|finding| finding["works"] != true).collect();
    assert!(broken.iter().all(|finding| finding["advice"].is_string()), "{broken:?}");
    assert_eq!(ran.status.code(), Some(if broken.is_empty() { 0 } else { 1 }));
    assert!(broken.is_empty(), "these tests need all of it: {broken:?}");
}

/// Large receive in front of devices needs TAPs. Nothing is said of drivers where it cannot be at all.
#[test]
fn the_doctor_misses_the_tun_device() {
    let script = "mount -t tmpfs none /dev/net && exec \"$0\" doctor --json";
    let mut command = Command::new("unshare");
    let ran = command.args(["-m", "sh", "-c", script, env!("CARGO_BIN_EXE_baton")]).output().expect("unshare");
    let findings: Vec<serde_json::Value> = serde_json::from_slice(&ran.stdout).expect("JSON");
    let of_attach: Vec<_> = findings.iter().filter(|finding| finding["needed_for"] == "nic attach").collect();
    assert_eq!(of_attach.len(), 1, "{of_attach:?}");
    assert_eq!(of_attach[0]["works"], false, "{of_attach:?}");
    assert!(of_attach[0]["advice"].as_str().is_some_and(|advice| advice.contains("/dev/net/tun")), "{of_attach:?}");
}

/// The program's exit status and output are its own, the peer's command runs on the other host, and nothing is left
/// behind.
#[test]
fn a_program_runs_on_one_of_two_hosts() {
    let script = "test -S $BATON_SOCKET || exit 9; echo $BATON_SOCKET; timeout 10 ping -c 1 -W 5 $BATON_B >&2 || exit 8; exit 7";
    let ran = baton(&["hosts", "--peer", "ping -c 1 $BATON_A >&2; sleep 1000", "--", "sh", "-c", script]);
    assert_eq!(ran.status.code(), Some(7), "{}", text(&ran.stderr));
    let socket = text(&ran.stdout).trim().to_string();
    assert!(socket.ends_with("agent.sock") && !std::path::Path::new(&socket).exists(), "left behind: {socket:?}");
}

/// A command on a test bed's host does not outlive who started it, however that ends.
#[test]
fn a_command_on_a_host_ends_with_who_started_it() {
    let bed = hosts(TestbedSettings::default());
    let mut child = std::thread::scope(|scope| {
        scope.spawn(|| bed.host_a.spawn(Command::new("sleep").arg("1000")).expect("sleep")).join().expect("a child")
    });
    assert_eq!(child.wait().expect("its end").signal(), Some(libc::SIGTERM));
}

/// Who asks for the NIC while a move there is being called off gets what it asked for, and not the answer to the wish
/// before.
#[test]
fn a_wish_counts_that_comes_while_a_move_is_called_off() {
    let mut scene = scene(TestbedSettings::default());
    let mut tool = scene.bed.tool().expect("a tool");
    for round in 0..200 {
        let wishes = [Place::Nic, Place::Kernel, Place::Nic];
        let tags = wishes.map(|to| {
            let ask = Ask::MoveAny { session: scene.session.number(), connection: scene.id, to, nic: None };
            tool.send(ask).expect("a request")
        });
        let mut answers: Vec<_> = tags.iter().map(|_| tool.receive().expect("an answer")).collect();
        answers.sort_by_key(|answer| tags.iter().position(|tag| *tag == answer.tag));
        assert!(matches!(answers[2].body, Reply::Done), "round {round}: {answers:?}");
        assert_eq!(scene.settled_place(), Some(Place::Nic), "round {round}");
        scene.move_to(Place::Kernel);
    }
}

/// A tool of root's may move any connection. A program that has opened a session may not, whoever it was then: it may
/// have changed its user or its root directory since, and keeps the session.
#[test]
fn a_programs_session_has_no_rights_over_others() {
    let scene = scene(TestbedSettings::default());
    let channel = Channel::connect(&scene.bed.socket()).expect("the agent");
    let ask = |body| {
        channel.send(&Request { tag: 7, body }, &[]).expect("a request");
        loop {
            let answer = channel.receive::<Answer>().expect("an answer").0;
            if answer.tag == 7 {
                return answer.body;
            }
        }
    };
    let any = |to| Ask::MoveAny { session: scene.session.number(), connection: scene.id, to, nic: None };
    let moved = ask(any(Place::Nic));
    assert_eq!(scene.settled_place(), Some(Place::Nic), "{moved:?}");
    let opened = ask(Ask::Open(Opening::alone()));
    assert!(!matches!(opened, Reply::Failed { .. }), "{opened:?}");
    let refused = ask(any(Place::Kernel));
    assert!(matches!(&refused, Reply::Failed { reason } if reason.contains("belongs to another")), "{refused:?}");
    assert_eq!(scene.settled_place(), Some(Place::Nic));
    let refused = ask(Ask::SetOffloads { nic: 0, offloads: Box::default() });
    assert!(matches!(&refused, Reply::Failed { reason } if reason.contains("only this agent's user and root")), "{refused:?}");
}
