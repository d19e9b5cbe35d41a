//! Behaviour of sockets, case by case: the same in the kernel, on the NIC, when the connection moves in between, and
//! when the NIC has made it. Each case is played with one version of IP, drawn from `BATON_FUZZ_SEED` (1); with both if
//! `BATON_EVERY_CASE` is set.

use crate::common::hosts;
use crate::full::count;
use crate::scratch::{Scratch, agent_socket, script};
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings, address_a, address_b};
use baton_client::tool::Tool;
use baton_linux::namespace::Namespace;
use baton_protocol::program::{Ask, Place, Reply};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Command, Stdio};

/// Cases by their names, with their results.
type Cases = Vec<(String, Value)>;

/// Runs the cases in one column, on `host`. Each request of the program is answered with what `answer` makes of its
/// words.
fn run(host: &Namespace, command: &mut Command, file: &str, mut answer: impl FnMut(&[&str]) -> String) -> Cases {
    command.env_remove("BATON_SOCKET").env_remove("BATON_RUN").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = host.spawn(command).expect("the program");
    let (mut answers, requests) = (child.stdin.take().expect("its input"), child.stdout.take().expect("its output"));
    for request in BufReader::new(requests).lines() {
        let request = request.expect("a line");
        writeln!(answers, "{}", answer(&request.split(' ').collect::<Vec<_>>())).expect("an answer");
    }
    assert!(child.wait().expect("the program").success(), "{command:?}");
    let text = std::fs::read_to_string(file).expect("cases");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Runs the cases in one column, on the loopback address. Returns each result, and how many moves were requested and
/// made.
fn on_loopback(column: &str, family: &str) -> (Cases, usize, usize) {
    let scratch = Scratch::new(&format!("conformance-{column}-{family}"));
    let file = scratch.file("cases");
    let mut command = if column == "kernel" {
        Command::new("python3")
    } else {
        // Registered, but only this test moves connections.
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--flip", "100000000..100000000", "--log", &scratch.file("log"), "--", "python3"]);
        command
    };
    command.args([&script("conformance.py"), column, family, &file]).env("TMPDIR", &scratch.0);
    let mut tool = None;
    let (mut asked, mut made) = (0, 0);
    let cases = run(&Namespace::new().expect("a namespace"), &mut command, &file, |words| {
        let ["PLACE", place, port] = words[..] else { panic!("{words:?}") };
        let to = if place == "nic" { Place::Nic } else { Place::Kernel };
        let tool = tool.get_or_insert_with(|| Tool::connect(&agent_socket(&scratch).expect("a socket")).expect("the agent"));
        asked += 1;
        made += usize::from(relocate(tool, port.parse().expect("a port"), to));
        "ok".into()
    });
    let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
    assert!(log.is_empty(), "{log}");
    (cases, asked, made)
}

/// Runs the cases in one column, on host A with the peers on host B.
fn on_two_hosts(bed: &Testbed, column: &str, family: &str) -> Cases {
    let scratch = Scratch::new(&format!("conformance-hosts-{column}-{family}"));
    let file = scratch.file("cases");
    let mut command = Command::new(if column == "kernel" { "python3" } else { env!("CARGO_BIN_EXE_baton") });
    if column != "kernel" {
        command.arg("run").arg("--socket").arg(bed.socket()).args(["--offload", "full", "--", "python3"]);
    }
    let namespace = format!("/proc/{}/fd/{}", std::process::id(), bed.host_b.as_fd().as_raw_fd());
    let [host, peers] = [address_a, address_b].map(|address| address(family == "6").to_string());
    command.args([&script("conformance.py"), column, family, &file, &host, &peers, &namespace]).env("TMPDIR", &scratch.0);
    run(&bed.host_a, &mut command, &file, |_| count(bed, Counter::Made).to_string())
}

/// Moves the connection with this local port. Returns whether it is there now. One that has ended stays where it is.
fn relocate(tool: &mut Tool, port: u16, to: Place) -> bool {
    let list = tool.connections().expect("a list");
    let local = |text: &str| text.parse::<SocketAddr>().expect("an address").port();
    let Some(found) = list.iter().find(|info| local(&info.local) == port) else { return false };
    let (session, connection) = (found.session, found.connection);
    matches!(tool.ask(Ask::MoveAny { session, connection, to, nic: None }).expect("an answer"), Reply::Done)
}

/// The cases of a column that the kernel's has not, in any of its runs.
fn different(kernel: &[Cases], column: &str, cases: &Cases) -> Vec<String> {
    let first = &kernel[0];
    assert!(first.len() >= 300, "only {} cases", first.len());
    assert_eq!(cases.len(), first.len());
    (0..cases.len())
        .filter(|at| kernel.iter().all(|run| run[*at] != cases[*at]))
        .map(|at| format!("{}\n  kernel {}\n  {column:6} {}", first[at].0, first[at].1, cases[at].1))
        .collect()
}

fn compare_moved(family: &str) {
    let (kernel, ..) = on_loopback("kernel", family);
    for column in ["nic", "moved", "returned"] {
        let (cases, asked, made) = on_loopback(column, family);
        let different = different(std::slice::from_ref(&kernel), column, &cases);
        assert!(different.is_empty(), "{} of {} cases differ:\n{}", different.len(), cases.len(), different.join("\n"));
        // Connections that have been reset cannot move.
        assert!(made * 10 >= asked * 8, "{column}: {made} of {asked} moves were made");
    }
}

/// The NIC makes each case's connection. Across a wire the kernel may report an edge once or twice, as its other
/// processor receives while the program looks, so it runs up to three times.
fn compare_made(family: &str) {
    let bed = hosts(TestbedSettings::default());
    let mut kernel = vec![on_two_hosts(&bed, "kernel", family)];
    assert_eq!(count(&bed, Counter::Made), 0);
    let cases = on_two_hosts(&bed, "made", family);
    let made = count(&bed, Counter::Made);
    assert!(made >= cases.len() as u64, "the NIC made {made} connections in {} cases", cases.len());
    while kernel.len() < 3 && !different(&kernel, "made", &cases).is_empty() {
        let before = count(&bed, Counter::Made);
        kernel.push(on_two_hosts(&bed, "kernel", family));
        assert_eq!(count(&bed, Counter::Made), before);
    }
    let different = different(&kernel, "made", &cases);
    assert!(different.is_empty(), "{} of {} cases differ:\n{}", different.len(), cases.len(), different.join("\n"));
}

#[test]
fn sockets_are_the_same_wherever_they_are_v4() {
    compare_moved("4");
}

#[test]
fn sockets_are_the_same_wherever_they_are_v6() {
    compare_moved("6");
}

#[test]
fn sockets_are_the_same_when_the_nic_makes_them_v4() {
    compare_made("4");
}

#[test]
fn sockets_are_the_same_when_the_nic_makes_them_v6() {
    compare_made("6");
}
