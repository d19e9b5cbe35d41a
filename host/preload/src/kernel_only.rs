//! Calls that move bytes past this library, or let another process or the C library do so: splice, a descriptor passed
//! to another process, the C library's streams. If the connection is on the NIC, they would use the shell and lose
//! bytes, or find none. So such a call waits until the connection is in the kernel, even if the agent refuses to
//! restore it for a long time: because there is no route to the peer, the device has no carrier, or another thread is
//! in the middle of an operation and gets no processor.
//!
//! fork, exec and the entries of a ring do not wait so ([`Tcp::give_back`] tries some times): a fork would keep all
//! other threads from opening a session meanwhile, a child of vfork would keep its parent from running, and an entry
//! would keep the ring's lock.

use crate::few::Few;
use crate::sections::{self, Section};
use crate::signals::Mark;
use crate::tcp::Tcp;
use crate::{leaving, process, table, thread, wait};
use baton_protocol::program::Until;
use libc::c_int;

/// Microseconds of the first pause between two attempts, and of the longest; the pause doubles in between. The end of a
/// move ends a pause early.
const FIRST: u64 = 1_000;
const LONGEST: u64 = 100_000;

/// How long a call waits.
#[derive(Clone, Copy)]
pub(crate) enum Patience {
    /// It does not wait, and fails with EAGAIN.
    Never,
    /// Until this time, in microseconds of the monotonic clock; a signal may end it.
    Until(Option<u64>),
    /// It waits for as long as it takes: the call has no time limit and cannot be interrupted.
    Always,
}

impl Patience {
    /// How long a call on this socket waits: `option` is SO_RCVTIMEO or SO_SNDTIMEO; `never`: the call has a flag such
    /// as MSG_DONTWAIT.
    pub fn of(fd: c_int, option: c_int, never: bool) -> Patience {
        // SAFETY: F_GETFL takes no pointer.
        let nonblocking = || unsafe { crate::real::fcntl(fd, libc::F_GETFL, 0) } & libc::O_NONBLOCK != 0;
        if never || nonblocking() { Patience::Never } else { Patience::Until(wait::deadline(fd, option)) }
    }
}

/// Restores the connection of a descriptor for good, before a call of which the socket's options say how long it waits
/// (see [`Patience::of`]).
///
/// # Errors
/// errno, with which the call fails.
pub(crate) fn leave_to_kernel(fd: c_int, reason: &str, option: c_int, never: bool) -> Result<(), c_int> {
    match table::tcp(fd) {
        Some(tcp) => leave(tcp, reason, || Patience::of(fd, option, never)),
        None => Ok(()),
    }
}

/// Restores a connection for good, before a call that waits as `patience` says. The caller holds no lock.
///
/// # Errors
/// See [`leave_to_kernel`].
pub(crate) fn leave(tcp: &Tcp, reason: &str, patience: impl FnOnce() -> Patience) -> Result<(), c_int> {
    let Some(section) = Section::enter() else { return Ok(()) };
    if tcp.restore(reason, Until::Never) {
        if let Some((_, session)) = tcp.managed() {
            // If the connection was lost with its session, the call then finds it reset.
            session.leave_if_known_over();
        }
        return Ok(());
    }
    let errno = thread::errno();
    let done = match patience() {
        Patience::Never => {
            // A program that waits for an edge after EAGAIN gets one.
            tcp.rearm();
            Err(libc::EAGAIN)
        }
        Patience::Until(deadline) => await_kernel(tcp, reason, section.begun, deadline, true),
        Patience::Always => await_kernel(tcp, reason, section.begun, None, false),
    };
    thread::set_errno(errno);
    done
}

/// Tries until the connection is in the kernel. Err with errno, as [`wait::block`].
fn await_kernel(tcp: &Tcp, reason: &str, mut begun: Mark, deadline: Option<u64>, may_end: bool) -> Result<(), c_int> {
    let restarted = deadline.is_none();
    if restarted {
        begun.restart();
    }
    let (generation, mut pause) = (tcp.generation(), FIRST);
    loop {
        let (known, before) = (tcp.moves(), Mark::now());
        let limit = deadline.into_iter().chain([wait::now() + pause]).min();
        let ready = || tcp.moves() != known || tcp.generation() != generation || sections::is_withdrawn();
        let slept = wait::sleep(
            process::session(),
            wait::Watched { sockets: &[tcp], sets: &[] },
            (&mut Few::new(), 0),
            limit,
            std::ptr::null(),
            ready,
        );
        let is_interrupted = match slept {
            Ok(_) => begun.is_over(restarted),
            Err(libc::EINTR) => before.is_over_by_kernel(restarted) || begun.is_over(restarted),
            Err(number) => return Err(number),
        };
        match () {
            // The thread is leaving the call by a jump or its end; the result is not used.
            () if leaving::is_leaving() => return Err(libc::EINTR),
            // Also in a child of fork that a signal handler has made: the call ends there as in its parent.
            () if tcp.is_left(generation) && !(may_end && is_interrupted) => return Ok(()),
            () if tcp.is_left(generation) => return Err(libc::EINTR),
            () if tcp.generation() != generation => return Err(libc::EBADF),
            // The library has withdrawn, after it has restored what it could.
            () if sections::is_withdrawn() => return Ok(()),
            () if tcp.restore_once(reason, Until::Never) => return Ok(()),
            () if may_end && is_interrupted => return Err(libc::EINTR),
            () if deadline.is_some_and(|deadline| wait::now() >= deadline) => return Err(libc::EAGAIN),
            () => pause = (2 * pause).min(LONGEST),
        }
    }
}
