//! Flags of calls that receive and send, and signals for input: as natively, wherever the connection is.

use crate::arguments::{compare, play};
use crate::compiled::compile;
use crate::library::as_natively;
use crate::scratch::Scratch;

/// Every set of MSG_PEEK, MSG_WAITALL, MSG_TRUNC and MSG_DONTWAIT, with what is asked for there, partly, or not, before
/// the end of the stream or a reset; blocking or not, with a time limit or a negative one, with a low-water mark: the
/// kernel's results, bytes and rests.
#[test]
fn flags_mean_together_what_they_mean_natively() {
    let scratch = Scratch::new("flags");
    let program = compile("flags", &scratch);
    let native = play(&program, &scratch, None, &[]);
    for (rule, arguments) in [("never", &[][..]), ("bytes:65536", &[]), ("established", &["moved"])] {
        compare(rule, arguments, &native, &play(&program, &scratch, Some(rule), arguments));
    }
}

/// MSG_MORE: what does not fill a segment waits for what comes next, or for 200 ms.
#[test]
fn what_is_sent_with_more_behind_it_waits() {
    as_natively("more", &["next", "alone", "much"]);
}

/// O_ASYNC by fcntl and ioctl, for a process, a thread and a group, with SIGIO and with a signal of the program's
/// choice; SIGURG.
#[test]
fn signals_for_input_come_however_they_are_asked_for() {
    as_natively("input_signals", &["fcntl", "thread", "ioctl", "group", "urgent"]);
}
