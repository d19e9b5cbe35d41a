//! Reports to the agent programs and connections that Baton cannot serve, so that `baton ls` can list them with the
//! reason. The agent has no session of such a program, or no entry for such a connection. There are three cases: the
//! program calls chroot or the like and can no longer reach the agent's socket; it sets a seccomp filter; or it uses
//! MPTCP.

use crate::process::{self, PATIENCE, Plan};
use crate::sections::Section;
use crate::thread;
use baton_linux::control::Channel;
use baton_protocol::native::Native;
use libc::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The process that has reported an MPTCP connection; 0 if none has.
static REPORTED_MPTCP: AtomicU32 = AtomicU32::new(0);
/// The program has made an MPTCP socket.
static HAS_MPTCP: AtomicBool = AtomicBool::new(false);

/// Connects to the agent without opening a session. None if the process has a session, may not have one, or cannot
/// reach the agent.
fn reach() -> Option<(&'static Plan, Channel)> {
    if process::session().is_some() || !process::is_mine() || process::is_closed_for_good() {
        return None;
    }
    let plan = process::plan()?;
    Some((plan, Channel::connect_within(&plan.run().socket, PATIENCE).ok()?))
}

/// Makes a call of the program's, such as chroot, after which it may not be able to reach the agent. A program that has
/// a TCP socket opens its session before the call. One that has none connects to the agent before the call; if it can
/// make no new connection afterwards, it reports that over the old one.
#[cold]
pub(crate) fn confine(call: impl FnOnce() -> c_int) -> c_int {
    process::ask_while_possible();
    let errno = thread::errno();
    let before = Section::enter().and_then(|_section| reach());
    thread::set_errno(errno);
    let done = call();
    if let Some((plan, channel)) = before
        && done == 0
        && let Some(_section) = Section::enter()
    {
        let errno = thread::errno();
        if reach().is_none() {
            process::say(plan, &channel, Native::OutOfReach);
        }
        drop(channel);
        thread::set_errno(errno);
    }
    done
}

/// Reports to the agent that the program is about to set a seccomp filter, if the program has no session.
pub(crate) fn filters_itself() {
    if let Some((plan, channel)) = reach() {
        process::say(plan, &channel, Native::Filters);
    }
}

/// Notes that the program has made a socket of this protocol.
pub(crate) fn made(protocol: c_int) {
    if protocol == libc::IPPROTO_MPTCP {
        HAS_MPTCP.store(true, Ordering::Relaxed);
    }
}

/// To be called after connect(2) on a socket that the library does not track: reports to the agent if it uses MPTCP.
pub(crate) fn connected(fd: c_int) {
    if HAS_MPTCP.load(Ordering::Relaxed) && crate::tcp::protocol(fd) == Some(libc::IPPROTO_MPTCP) {
        report_mptcp();
    }
}

/// Reports to the agent that this process has MPTCP connections, once.
#[cold]
pub(crate) fn report_mptcp() {
    let Some(_section) = Section::enter() else { return };
    let process = std::process::id();
    if REPORTED_MPTCP.swap(process, Ordering::Relaxed) == process {
        return;
    }
    let errno = thread::errno();
    if process::is_closed() || !process::tell(Native::Mptcp) {
        REPORTED_MPTCP.store(0, Ordering::Relaxed);
    }
    thread::set_errno(errno);
}
