//! Behaviour of sockets, case by case: the same in the kernel, on the NIC, and when the connection moves in between.

use crate::scratch::{Scratch, agent_socket, script};
use baton_client::tool::Tool;
use baton_linux::namespace::Namespace;
use baton_protocol::program::{Ask, Place, Reply};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Command, Stdio};

/// Runs all cases in one column. Returns each result, and how many moves were requested and made.
fn run(column: &str, family: &str) -> (Vec<(String, Value)>, usize, usize) {
    let scratch = Scratch::new(&format!("conformance-{column}-{family}"));
    let file = scratch.file("cases");
    let program = [script("conformance.py"), column.into(), family.into(), file.clone()];
    let mut command = if column == "kernel" {
        Command::new("python3")
    } else {
        // Registered, but only this test moves connections.
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--flip", "100000000..100000000", "--log", &scratch.file("log"), "--", "python3"]);
        command
    };
    command.args(program).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = Namespace::new().expect("a namespace").spawn(&mut command).expect("the program");
    let (mut answers, requests) = (child.stdin.take().expect("its input"), child.stdout.take().expect("its output"));
    let mut tool = None;
    let (mut asked, mut made) = (0, 0);
    for request in BufReader::new(requests).lines() {
        let request = request.expect("a line");
        let words: Vec<&str> = request.split(' ').collect();
        let ["PLACE", place, port] = words[..] else { panic!("{request:?}") };
        let to = if place == "nic" { Place::Nic } else { Place::Kernel };
        let tool = tool.get_or_insert_with(|| Tool::connect(&agent_socket(&scratch).expect("a socket")).expect("the agent"));
        asked += 1;
        made += usize::from(relocate(tool, port.parse().expect("a port"), to));
        answers.write_all(b"ok\n").expect("an answer");
    }
    assert!(child.wait().expect("the program").success(), "{column} {family}");
    let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
    assert!(log.is_empty(), "{log}");
    let text = std::fs::read_to_string(file).expect("cases");
    (text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect(), asked, made)
}

/// Moves the connection with this local port. Returns whether it is there now. One that has ended stays where it is.
fn relocate(tool: &mut Tool, port: u16, to: Place) -> bool {
    let list = tool.connections().expect("a list");
    let local = |text: &str| text.parse::<SocketAddr>().expect("an address").port();
    let Some(found) = list.iter().find(|info| local(&info.local) == port) else { return false };
    let (session, connection) = (found.session, found.connection);
    matches!(tool.ask(Ask::MoveAny { session, connection, to }).expect("an answer"), Reply::Done)
}

fn compare(family: &str) {
    let (kernel, ..) = run("kernel", family);
    assert!(kernel.len() >= 300, "only {} cases", kernel.len());
    for column in ["nic", "moved", "returned"] {
        let (cases, asked, made) = run(column, family);
        assert_eq!(cases.len(), kernel.len());
        let different: Vec<String> = kernel
            .iter()
            .zip(&cases)
            .filter(|(expected, got)| expected != got)
            .map(|((name, expected), (_, got))| format!("{name}\n  kernel {expected}\n  {column:6} {got}"))
            .collect();
        assert!(different.is_empty(), "{} of {} cases differ:\n{}", different.len(), kernel.len(), different.join("\n"));
        // Connections that have been reset cannot move.
        assert!(made * 10 >= asked * 8, "{column}: {made} of {asked} moves were made");
    }
}

#[test]
fn sockets_are_the_same_wherever_they_are_v4() {
    compare("4");
}

#[test]
fn sockets_are_the_same_wherever_they_are_v6() {
    compare("6");
}
