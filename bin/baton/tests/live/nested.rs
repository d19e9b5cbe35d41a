//! Sets of epoll that are watched themselves, by poll and select and by other sets, report what they report natively:
//! whether their connections are in the kernel, on the NIC, or between the two.

use crate::compiled::compile;
use crate::library::{as_natively, finish};
use crate::scratch::{Scratch, text};
use baton_linux::namespace::Namespace;
use std::process::Command;

#[test]
fn sets_in_sets_report_as_natively() {
    let cases = ["polled", "edge inside", "one shot inside", "level", "edge", "one shot", "two deep", "two deep, edge"];
    as_natively("nested", &cases);
    as_natively("nested", &["added late", "closed", "asleep"]);
}

/// A set that a message passes on (SCM_RIGHTS) reports what it reports natively, to whoever has it.
#[test]
fn a_set_that_is_passed_on_reports_as_natively() {
    as_natively("nested", &["passed on"]);
}

/// Threads that sleep for a set, or for one that it is in, while its connection moves all the time: they are woken by
/// what arrives, and by nothing else.
#[test]
fn who_sleeps_for_a_set_does_not_notice_moves() {
    let scratch = Scratch::new("nested-moving");
    let program = compile("nested", &scratch);
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--flip", "0..1", "--log", &scratch.file("log"), "--"]).arg(&program).args(["asleep", "moving"]);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
    let ran = finish(&Namespace::new().expect("a namespace"), command);
    let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
    assert!(ran.status.success() && log.is_empty(), "{} {}{log}", ran.status, text(&ran.stderr));
}
