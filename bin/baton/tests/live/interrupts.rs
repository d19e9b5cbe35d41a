//! Signals that arrive while a thread sleeps in a call: the handler that has run decides whether the call goes on.

use crate::library::{as_natively, as_natively_while_moving};

/// One handler with SA_RESTART and one without, in the same program, and every call that sleeps; with a time limit,
/// too.
#[test]
fn the_handler_that_has_run_decides() {
    as_natively("interrupts", &["mixed", "limit"]);
}

/// Every way to set a handler, and what the program is shown of it.
#[test]
fn handlers_are_the_programs() {
    as_natively("interrupts", &["ways"]);
}

/// What has transferred something says so, whatever the handler's flags.
#[test]
fn an_interrupted_call_says_what_it_has_done() {
    as_natively("interrupts", &["partly"]);
}

/// A process that is stopped and goes on.
#[test]
fn a_stop_is_not_noticed() {
    as_natively("interrupts", &["stop"]);
}

/// A debugger stops a thread in its call, lets it go on, stops it again and leaves.
#[test]
fn a_debugger_is_not_noticed() {
    as_natively("interrupts", &["debugger"]);
}

/// A handler forks: the call that it has interrupted returns in parent and child alike, and what the child does there
/// is not done to the parent's connections and its count of sleeping threads.
#[test]
fn a_call_whose_handler_forks_returns_in_both() {
    as_natively_while_moving("interrupts", &["forks"]);
}

/// The same where the handler makes the child by clone(2) through the C library's syscall.
#[test]
fn a_call_whose_handler_clones_returns_in_both() {
    as_natively_while_moving("interrupts", &["clones"]);
}
