//! Programs that filter their system calls, in C (`c/sandbox.c`): each case succeeds natively, and under `baton run`,
//! whether its connections have moved when the filter is set or not.

use crate::compiled::compile;
use crate::library::{Way, finish, in_each, set_up_loopback};
use crate::scratch::{Scratch, agent_socket, text};
use baton_linux::namespace::Namespace;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// How each case is run: the options of `baton run`, natively without any, and whether its connections have moved
/// before the filter.
const WAYS: [Way; 4] = [
    (&[], false),
    (&["--eager", "--rule", "accepted"], false),
    (&["--eager", "--rule", "accepted"], true),
    (&["--flip", "1..5"], true),
];

fn as_natively(cases: &[&str]) {
    in_each("sandbox", cases, &WAYS);
}

/// A server goes on with accept, read, write and poll alone, whichever way it sets its filter.
#[test]
fn a_server_filters_its_calls() {
    as_natively(&["prctl", "seccomp"]);
}

/// A program may have taken everything else from itself before, as OpenSSH does: it gets no descriptor any more.
#[test]
fn a_server_has_nothing_left_when_it_filters_its_calls() {
    as_natively(&["limited"]);
}

/// The filter is there before the first connection.
#[test]
fn a_server_filters_its_calls_before_its_first_connection() {
    as_natively(&["before the first"]);
}

/// The strict mode lets through read and write only.
#[test]
fn a_server_enters_the_strict_mode() {
    as_natively(&["strict mode"]);
}

/// A set keeps what is registered there, with the program's data.
#[test]
fn an_epoll_set_outlives_a_filter() {
    as_natively(&["epoll"]);
}

/// Threads sleep in calls of each kind when another one sets a filter, for itself or for all of them.
#[test]
fn threads_sleep_while_a_filter_is_set() {
    as_natively(&["one thread", "all threads"]);
}

/// Each intercepted call is the system call of its name, and no other.
#[test]
fn a_filtered_program_makes_its_own_calls_alone() {
    as_natively(&["calls"]);
}

/// A process with a filter forks.
#[test]
fn a_filtered_program_forks() {
    as_natively(&["forks"]);
}

/// A child of a handler that has interrupted a call filters its calls.
#[test]
fn a_child_of_a_handler_filters_its_calls() {
    as_natively(&["in a handler"]);
}

/// A program that has filtered its calls gains nothing any more: `baton ls` says why as long as it runs.
#[test]
fn a_list_says_why_a_filtered_program_gains_nothing() {
    let scratch = Scratch::new("sandbox");
    let compiled = compile("sandbox", &scratch);
    let namespace = Namespace::new().expect("a namespace");
    let baton = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped());
        command
    };
    let mut command = baton();
    command
        .args(["run", "--eager", "--rule", "accepted", "--log", &scratch.file("log"), "--"])
        .arg(&compiled)
        .args(["stays", "moved"]);
    let mut program = namespace.spawn(command.stdin(Stdio::piped())).expect("baton");
    let mut line = String::new();
    BufReader::new(program.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    let socket = agent_socket(&scratch).expect("its Baton");
    let listed = baton().args(["ls", "--socket"]).arg(socket).output().expect("a list");
    drop(program.stdin.take());
    assert!(program.wait().expect("its end").success() && line == "ready\n", "{line}");
    let why = format!("sandbox/{} runs without Baton: seccomp: it filters its system calls\n", program.id());
    assert!(text(&listed.stdout).contains(&why), "{}{}", text(&listed.stdout), text(&listed.stderr));
}

/// Runs the server under a filter that it inherits, as `sandbox under` sets it: natively, with the filter inside of
/// `baton run` and around it. Returns what is written to standard error, of each.
fn under(list: &str, ways: &[Way]) -> Vec<String> {
    let scratch = Scratch::new("sandbox");
    let compiled = compile("sandbox", &scratch);
    let filtered = || {
        let mut command = Command::new(&compiled);
        command.args(["under", list]);
        command
    };
    let mut said = Vec::new();
    for (how, moved) in ways {
        let namespace = Namespace::new().expect("a namespace");
        let mut command = if how.is_empty() {
            set_up_loopback(&namespace);
            filtered()
        } else {
            let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
            command.args(["run", "--log", &scratch.file("log")]).args(*how).arg("--").arg(&compiled).args(["under", list]);
            command
        };
        command.arg(&compiled).arg("served").args(moved.then_some("moved")).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
        let ran = finish(&namespace, command);
        let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
        let error = text(&ran.stderr);
        assert!(ran.status.success() && log.is_empty(), "{list}, {how:?}: {} {error}{log}", ran.status);
        said.push(error);
    }
    said
}

/// Under the profiles that containers and services have, and with no more than what the library needs, connections
/// move.
#[test]
fn connections_move_under_usual_filters() {
    for list in ["docker", "podman", "system-service", "enough"] {
        let said = under(list, &[WAYS[0], WAYS[2], WAYS[3]]);
        assert!(said.iter().all(String::is_empty), "{list}: {said:?}");
    }
}

/// Under a filter that lets through less, the library stays out, and says so once.
#[test]
fn the_library_stays_out_under_narrow_filters() {
    for (list, why) in [
        ("fewer", "does not allow statx"),
        ("fewer, unseen", "is not known to allow what Baton needs"),
        ("no eventfd", "does not allow eventfd2"),
        ("no readlink", "does not allow readlink"),
    ] {
        let said = under(list, &[WAYS[0], WAYS[1]]);
        let line = format!("baton: this program runs without Baton: it was started under a seccomp filter that {why}\n");
        assert_eq!(said, ["", &line], "{list}");
    }
}

/// `baton run` itself is started under a filter, as in a container: it tries what its program needs.
#[test]
fn baton_run_tries_the_filter_that_it_is_under() {
    let scratch = Scratch::new("sandbox");
    let compiled = compile("sandbox", &scratch);
    let namespace = Namespace::new().expect("a namespace");
    set_up_loopback(&namespace);
    let socket = scratch.file("agent.sock");
    let mut up = Command::new(env!("CARGO_BIN_EXE_baton"));
    up.args(["up", "--socket", &socket]).env("TMPDIR", &scratch.0).stderr(Stdio::piped()).stdout(Stdio::null());
    let mut up = namespace.spawn(&mut up).expect("baton up");
    let mut lines = BufReader::new(up.stderr.take().expect("its messages")).lines();
    assert!(lines.any(|line| line.is_ok_and(|line| line.contains("is up"))), "baton up has ended");
    let run = |list: &str, moved: bool| {
        let mut command = Command::new(&compiled);
        command.args(["under", list, env!("CARGO_BIN_EXE_baton"), "run", "--eager", "--rule", "accepted", "--"]);
        command.arg(&compiled).arg("served").args(moved.then_some("moved")).env("BATON_SOCKET", &socket);
        let ran = finish(&namespace, command);
        assert!(ran.status.success(), "{list}: {} {}", ran.status, text(&ran.stderr));
        text(&ran.stderr)
    };
    for list in ["docker", "podman", "system-service"] {
        assert_eq!(run(list, true), "", "{list}");
    }
    let line = "baton: this program runs without Baton: the seccomp filter here does not allow eventfd2\n";
    assert_eq!(run("no eventfd", false), line);
    baton_linux::process::signal(up.id(), libc::SIGTERM).expect("our child");
    assert!(up.wait().is_ok());
}
