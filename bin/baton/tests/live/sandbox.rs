//! Programs that filter their system calls, in C (`c/sandbox.c`): each case succeeds natively, and under `baton run`, whether its
//! connections have moved when the filter is set or not.

use crate::library::{finish, set_up_loopback};
use crate::scratch::{Scratch, text};
use crate::waits::compile;
use baton_linux::namespace::Namespace;
use std::process::Command;

/// How each case is run: the options of `baton run`, natively without any, and whether its connections have moved before the filter.
const WAYS: [(&[&str], bool); 4] = [
    (&[], false),
    (&["--eager", "--rule", "accepted"], false),
    (&["--eager", "--rule", "accepted"], true),
    (&["--flip", "1..5"], true),
];

fn as_natively(case: &str) {
    let scratch = Scratch::new("sandbox");
    let compiled = compile("sandbox", &scratch);
    for (how, moved) in WAYS {
        let namespace = Namespace::new().expect("a namespace");
        let mut command = if how.is_empty() {
            set_up_loopback(&namespace);
            Command::new(&compiled)
        } else {
            let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
            command.args(["run", "--log", &scratch.file("log")]).args(how).arg("--").arg(&compiled);
            command
        };
        command.arg(case).args(moved.then_some("moved")).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
        let ran = finish(&namespace, command);
        let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
        let said = format!("{}{}{log}", text(&ran.stdout), text(&ran.stderr));
        assert!(ran.status.success() && log.is_empty(), "{case}, {how:?}, moved: {moved}: {} {said}", ran.status);
    }
}

/// A server goes on with accept, read, write and poll alone, whichever way it sets its filter.
#[test]
fn a_server_filters_its_calls() {
    for case in ["prctl", "seccomp"] {
        as_natively(case);
    }
}

/// The filter is there before the first connection.
#[test]
fn a_server_filters_its_calls_before_its_first_connection() {
    as_natively("before the first");
}

/// The strict mode lets through read and write only.
#[test]
fn a_server_enters_the_strict_mode() {
    as_natively("strict mode");
}

/// A set keeps what is registered there, with the program's data.
#[test]
fn an_epoll_set_outlives_a_filter() {
    as_natively("epoll");
}

/// Threads sleep in calls of each kind when another one sets a filter, for itself or for all of them.
#[test]
fn threads_sleep_while_a_filter_is_set() {
    for case in ["one thread", "all threads"] {
        as_natively(case);
    }
}

/// Each intercepted call is the system call of its name, and no other.
#[test]
fn a_filtered_program_makes_its_own_calls_alone() {
    as_natively("calls");
}

/// A process with a filter forks.
#[test]
fn a_filtered_program_forks() {
    as_natively("forks");
}
