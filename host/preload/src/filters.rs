//! Before the process filters its system calls (seccomp), every connection is restored and the library withdraws: see
//! [`sections`](crate::sections).

use crate::{epoll, process, sections, table, thread, udp, waiter};
use baton_linux::process::Undisturbed;
use baton_protocol::program::Until;

/// Microseconds for which threads that are inside the library are waited for. Those that sleep there are woken.
const PATIENCE: u64 = 5_000_000;

/// Withdraws. For a child of vfork, whose memory is its parent's, nothing is done.
#[cold]
pub(crate) fn withdraw() {
    if sections::is_withdrawn() || process::plan().is_none() || !process::is_mine() {
        return;
    }
    let errno = thread::errno();
    {
        // A handler that uses a socket would wait for what it interrupts.
        let _undisturbed = Undisturbed::begin();
        // So that the agent learns why nothing moves.
        process::ask_while_possible();
        process::close_for_good(process::SECCOMP);
        sections::withdraw();
        let alone = sections::await_none(PATIENCE, waiter::wake_all);
        // What other threads were about to make when everything was restored.
        process::give_everything_back(process::SECCOMP, Until::Never);
        if alone {
            leave();
        }
    }
    thread::set_errno(errno);
}

/// Leaves nothing of the library's in the process. No thread is inside.
fn leave() {
    process::end();
    epoll::release_all();
    for (fd, file) in table::known(0, u32::MAX) {
        if matches!(file, table::File::Tcp(_)) {
            table::put(fd, None);
        }
    }
    udp::forget_all();
    udp::close_all();
    waiter::close_all();
}
