//! Arguments of calls: what the kernel refuses is refused with its errno, wherever the connection is, and nothing else
//! happens.

use crate::compiled::compile;
use crate::library::{as_natively, finish, set_up_loopback};
use crate::scratch::{Scratch, text};
use baton_linux::namespace::Namespace;
use std::path::Path;
use std::process::Command;

/// Calls that differ on the NIC, each with a reason.
const DIFFERENCES: &[(&str, &str)] = &[
    ("recvmmsg(fd, several(one(buffer, 2), one(", "the kernel keeps an error of a later message for the next call"),
    ("recvmmsg(fd, several(one(buffer, 2), one(buffer, 1)), -1,", "the same: the memory behind the array is no message"),
];

/// What the program prints, a line a call.
pub(crate) fn play(program: &Path, scratch: &Scratch, how: Option<&str>, arguments: &[&str]) -> Vec<String> {
    let namespace = Namespace::new().expect("a namespace");
    let mut command = match how {
        None => {
            set_up_loopback(&namespace);
            Command::new(program)
        }
        Some(rule) => {
            let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
            command.args(["run", "--eager", "--log", &scratch.file("log"), "--rule", rule, "--"]).arg(program);
            command
        }
    };
    command.args(arguments).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
    let ran = finish(&namespace, command);
    let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
    let lines: Vec<String> = text(&ran.stdout).lines().map(str::to_owned).collect();
    assert!(
        ran.status.success() && log.is_empty(),
        "{how:?} {arguments:?}: {} after {:?}{}{log}",
        ran.status,
        lines.last(),
        text(&ran.stderr)
    );
    assert!(lines.len() > 400, "{} calls", lines.len());
    lines
}

pub(crate) fn compare(how: &str, arguments: &[&str], native: &[String], ours: &[String]) {
    let on_nic = arguments.contains(&"moved");
    let is_known = |line: &str| on_nic && DIFFERENCES.iter().any(|(call, _)| line.contains(call));
    let different = native.iter().zip(ours).filter(|(native, ours)| native != ours && !is_known(native));
    let different: Vec<_> = different.map(|(native, ours)| format!("natively {native}\n    here {ours}")).collect();
    assert!(different.is_empty() && native.len() == ours.len(), "{how} {arguments:?}:\n{}", different.join("\n"));
}

/// Five hundred calls with bad pointers, lengths, counts, limits and flags: natively, on a socket that is no TCP
/// connection, on a connection in the kernel and on one on the NIC; in a program without a handler for SIGSEGV, and in
/// one with.
#[test]
fn arguments_are_judged_as_by_the_kernel() {
    let scratch = Scratch::new("arguments");
    let program = compile("arguments", &scratch);
    let native = |arguments: &[&str]| play(&program, &scratch, None, arguments);
    let (connection, socket) = (native(&[]), native(&["pass"]));
    for caught in [None, Some("caught")] {
        for (rule, place, native) in [
            ("never", Some("pass"), &socket),
            ("never", None, &connection),
            ("bytes:65536", None, &connection),
            ("established", Some("moved"), &connection),
        ] {
            let arguments: Vec<&str> = caught.into_iter().chain(place).collect();
            compare(rule, &arguments, native, &play(&program, &scratch, Some(rule), &arguments));
        }
    }
}

/// The signals that a bad address raises are the program's: its handlers see its own faults, and it sees its own
/// actions. A valid call raises none.
#[test]
fn faults_are_the_programs() {
    as_natively("faults", &["sigaction", "SIGBUS", "profiler", "ends", "near the stack", "nulls"]);
}
