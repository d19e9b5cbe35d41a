//! Lines that the library writes to standard error.
//!
//! It has descriptor 2 from the program, which may have put anything in its place: a connection with a client who would
//! get the line, or a file with data. So a line is written only while descriptor 2 is what `baton run` had there. A
//! program that has redirected its standard error does not say the line.
//!
//! Nothing here takes memory of the heap, or a lock: a child of vfork says something, too.

use baton_client::rules::Run;
use baton_linux::files::{self, Identity};
use baton_linux::report;
use std::io;
use std::os::fd::AsFd;
use std::sync::OnceLock;

/// What `baton run` had as its standard error.
static GIVEN: OnceLock<Identity> = OnceLock::new();

/// Remembers what `baton run` has said of its standard error.
pub(crate) fn remember(run: &Run) {
    if let Some(error) = run.error {
        let _ = GIVEN.set(error);
    }
}

/// Whether a line may be written. Where nothing is known of `baton run`'s standard error, it may be to a terminal or a
/// pipe.
pub(crate) fn may_be_written() -> bool {
    let Some(now) = files::identity(io::stderr().as_fd()) else { return false };
    GIVEN.get().map_or(!now.is_socket_or_file(), |given| *given == now)
}

/// Writes a line, with its end, as far as that may be and does not wait.
pub(crate) fn say(line: &[u8]) {
    if may_be_written() {
        report::write_now(line);
    }
}

/// The same under a filter of system calls, which may kill for any that the dynamic linker does not make, but write(2).
pub(crate) fn say_under_filter(line: &[u8]) {
    if may_be_written() {
        // SAFETY: the text is live. What cannot be written is lost.
        unsafe { crate::real::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
    }
}
