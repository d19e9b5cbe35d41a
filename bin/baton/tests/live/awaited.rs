//! Programs that go on until their connections are where they are to be, however long a busy machine takes for that.

use crate::common::wait_until;
use crate::scratch::{Scratch, agent_socket};
use baton_client::tool::Tool;
use baton_linux::namespace::Namespace;
use baton_protocol::program::{ConnectionInfo, Place};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// The beginning of such a program in Python. `go_on` names ends of connections, by their peers' ports, and makes
/// exchanges until the test answers.
const GO_ON: &str = "
import select, sys
def go_on(exchange, *ends):
    print(*(end.getpeername()[1] for end in ends), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]: exchange()
    sys.stdin.readline()
";

/// A program in Python that calls `go_on`.
pub fn python(program: &str) -> String {
    [GO_ON, program].concat()
}

/// What most programs wait for.
pub fn is_on_nic(one: &ConnectionInfo) -> bool {
    one.place == Place::Nic
}

/// `baton run` with these arguments, in a network namespace of its own. Answers the program when all connections that
/// it has named are as expected. Returns the report, when the program has ended with success, and the log.
pub fn run_awaited(scratch: &Scratch, arguments: &[&str], expected: impl Fn(&ConnectionInfo) -> bool) -> (Value, String) {
    let [log, report, said] = ["log", "report", "said"].map(|name| scratch.file(name));
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--log", &log, "--flip-report", &report]).args(arguments);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&said).expect("a file"));
    let mut child = Namespace::new().expect("a namespace").spawn(&mut command).expect("baton");
    let mut input = child.stdin.take().expect("its input");
    let output = BufReader::new(child.stdout.take().expect("its output"));
    for line in output.lines() {
        let line = line.expect("text");
        let list = || Tool::connect(&agent_socket(scratch)?).ok()?.connections().ok();
        let is_expected = |port: &str, listed: &[ConnectionInfo]| {
            listed.iter().any(|one| one.peer.ends_with(&format!(":{port}")) && expected(one))
        };
        wait_until(&format!("{arguments:?}: connections to {line} are as expected"), || {
            let all = list().is_some_and(|listed| line.split(' ').all(|port| is_expected(port, &listed)));
            // A program that has failed is not waited for.
            all || child.try_wait().expect("our child").is_some()
        });
        let _ = writeln!(input);
    }
    let status = child.wait().expect("its end");
    let [said, log] = [said, log].map(|file| std::fs::read_to_string(file).unwrap_or_default());
    assert!(status.success(), "{arguments:?}: {status} {said}{log}");
    let report = serde_json::from_str(&std::fs::read_to_string(report).expect("a report")).expect("JSON");
    (report, log)
}
