//! Terminals.

use std::os::fd::AsFd;

/// Columns of a terminal. None if the descriptor is of something else, or of a terminal that does not say.
pub fn columns(fd: impl AsFd) -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(fd).ok()?;
    (size.ws_col > 0).then_some(usize::from(size.ws_col))
}
