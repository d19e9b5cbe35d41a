//! Programs that use rings of io_uring by the C library's `syscall` (`c/rings.c`): each case succeeds natively, and
//! under `baton run` before its connections have moved and after.

use crate::library::as_natively;

/// Entries that are epoll_ctl(2) count for sets whose connections are on the NIC: in a child, by several threads, and
/// those that fail.
#[test]
fn rings_register_connections_on_the_nic() {
    as_natively("rings", &["control", "forked", "together"]);
}

/// A connection that any other entry names is the kernel's, and no other one.
#[test]
fn what_rings_use_is_the_kernels() {
    as_natively("rings", &["transfer", "registered", "linked", "closed"]);
}

/// Where a ring's entries are not seen, or a ring waits for a set, every connection is the kernel's.
#[test]
fn rings_that_nobody_sees_keep_everything_in_the_kernel() {
    as_natively("rings", &["polled", "waited", "unknown"]);
}
