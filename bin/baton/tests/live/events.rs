//! Events that epoll reports for connections that move: only for sockets in the set, at most once per call, and only
//! true ones.

use crate::compiled::build;
use crate::scratch::{Scratch, script, text};
use baton_linux::namespace::Namespace;
use std::process::{Command, Stdio};

/// Runs a program with these arguments of `baton run`. Returns its output.
fn run(scratch: &Scratch, arguments: &[&str], program: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--log", &scratch.file("log")]).args(arguments).arg("--").args(program);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = Namespace::new().expect("a namespace").spawn(&mut command).expect("baton").wait_with_output().expect("its output");
    let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
    assert!(ran.status.success() && log.is_empty(), "{arguments:?} {program:?}: {}{}{log}", text(&ran.stdout), text(&ran.stderr));
    text(&ran.stdout)
}

/// Under every rule and under random moves: no event of a socket that is not in the set, or that has reported and was
/// not armed again; none twice in a call; and a socket that is reported as readable can be read.
fn expect_nothing_wrong(name: &str, way: &str, connections: [&str; 2], others: &str) {
    let scratch = Scratch::new(name);
    let program = build(&scratch, "cc", "events", "events.c", &["-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
    let rules = ["bytes:5000", "accepted", "connected", "established"].map(|rule| vec!["--eager", "--rule", rule]);
    for arguments in rules.into_iter().chain([vec!["--flip", "10..40"]]) {
        // Each end of each connection moves. With more connections the agent's speed would be tested instead.
        let connections = connections[usize::from(arguments[0] == "--flip")];
        let printed = run(&scratch, &arguments, &[&program.to_string_lossy(), way, "0.5", connections, others]);
        let words: Vec<&str> = printed.split_whitespace().collect();
        let ["requests", requests, "outside", outside, "twice", twice, "empty", empty, "late", _] = words[..] else {
            panic!("{printed}")
        };
        assert_ne!(requests, "0", "{arguments:?}");
        assert_eq!([outside, twice, empty], ["0"; 3], "{arguments:?}: {printed}");
    }
}

/// A server that removes each reported socket from its set, and adds it again when it has answered.
#[test]
fn removed_sockets_are_not_reported() {
    expect_nothing_wrong("churn", "churn", ["48", "12"], "0");
}

/// As in Apache: one thread waits and removes sockets, others answer and add them again.
#[test]
fn sockets_that_other_threads_add_are_reported_once() {
    expect_nothing_wrong("workers", "churn", ["48", "12"], "3");
}

/// Several threads wait with one set, and each event is for one thread (EPOLLONESHOT).
#[test]
fn one_shot_events_reach_one_thread() {
    expect_nothing_wrong("oneshot", "oneshot", ["48", "12"], "3");
}

/// Clients like wrk and redis: a false EPOLLIN is an error for them.
#[test]
fn clients_get_only_true_events() {
    expect_nothing_wrong("clients", "client", ["32", "8"], "2");
}

/// A child that shares its parent's set closes everything and ends: the parent's set still reports its sockets, old and
/// new. This also holds before any connection has moved.
#[test]
fn children_leave_their_parents_sets_alone() {
    let scratch = Scratch::new("children");
    for arguments in [&["--rule", "never"][..], &["--rule", "established"], &["--flip", "1..5"]] {
        run(&scratch, arguments, &["python3", &script("children.py")]);
    }
}
