//! MSG_ZEROCOPY of unmodified programs: `c/zerocopy.c` reads the completions of its sends natively, where the kernel
//! makes them over loopback, and under `baton run`.

use crate::library::{FLIPS, as_natively, in_each};

/// In the kernel until 64 KiB have gone through it, and on the NIC from the first send on, where the connection stays.
#[test]
fn sends_without_a_copy_are_copied_and_complete() {
    as_natively("zerocopy", &["all"]);
}

/// The numbers go on wherever the connection is.
#[test]
fn moves_change_nothing_of_completions() {
    in_each("zerocopy", &["all"], &[FLIPS]);
}

/// Of a connection that never moves the kernel completes them.
#[test]
fn the_kernel_completes_what_stays_there() {
    in_each("zerocopy", &["all"], &[(&["--eager", "--rule", "never"], false)]);
}
