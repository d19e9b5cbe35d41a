//! Whether a connection can be offloaded, and if not, why it stays in the kernel.

use baton_linux::socket;
use baton_linux::tcp_info::TcpInfo;
use baton_moves::Refusal;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io;
use std::os::fd::BorrowedFd;

const TCP_AO_INFO: i32 = 40;
const TCP_ULP: i32 = 31;
const TCP_IS_MPTCP: i32 = 43;
const SO_PROTOCOL: i32 = 38;
const IPPROTO_MPTCP: i32 = 262;

/// The state's name as in RFC 9293.
pub fn state_name(state: u8) -> &'static str {
    match state {
        1 => "ESTABLISHED",
        2 => "SYN-SENT",
        3 => "SYN-RECEIVED",
        4 => "FIN-WAIT-1",
        5 => "FIN-WAIT-2",
        6 => "TIME-WAIT",
        7 => "CLOSED",
        8 => "CLOSE-WAIT",
        9 => "LAST-ACK",
        10 => "LISTEN",
        11 => "CLOSING",
        _ => "unknown",
    }
}

/// Refusal for a system call that failed.
pub fn system(call: &'static str, error: &io::Error) -> Refusal {
    match error.kind() {
        io::ErrorKind::NotConnected => Refusal::Closed(call),
        _ => Refusal::System(call, error.to_string()),
    }
}

/// Examines a socket without changing it. `namespace` is the cookie of the namespace that it has to be in
/// ([`socket::own_namespace`]).
///
/// # Errors
/// The first reason for which the connection stays in the kernel.
pub fn examine(fd: BorrowedFd<'_>, namespace: u64) -> Result<TcpInfo, Refusal> {
    match socket::get(fd, libc::SOL_SOCKET, SO_PROTOCOL) {
        Ok(libc::IPPROTO_TCP) => {}
        Ok(IPPROTO_MPTCP) => {
            // An MPTCP socket that fell back to TCP still runs MPTCP's code.
            return Err(Refusal::Mptcp);
        }
        _ => return Err(Refusal::NotTcp),
    }
    if matches!(socket::get(fd, libc::IPPROTO_TCP, TCP_IS_MPTCP), Ok(1)) {
        return Err(Refusal::Mptcp);
    }
    if socket::namespace(fd).map_err(|error| system("SO_NETNS_COOKIE", &error))? != namespace {
        return Err(Refusal::OtherNamespace);
    }
    let info = TcpInfo::read(fd).map_err(|error| system("TCP_INFO", &error))?;
    if !matches!(info.state, 1 | 4 | 5 | 8 | 9 | 11) {
        return Err(Refusal::State(state_name(info.state)));
    }
    let mut name = [0u8; 16];
    if matches!(socket::get_bytes(fd, libc::IPPROTO_TCP, TCP_ULP, &mut name), Ok(length) if length > 0 && name[0] != 0) {
        return Err(Refusal::UpperLayer);
    }
    let mut ao = [0u8; 64];
    if socket::get_bytes(fd, libc::IPPROTO_TCP, TCP_AO_INFO, &mut ao).is_ok() {
        return Err(Refusal::Signed);
    }
    check_urgent(fd)?;
    check_receiving(fd)?;
    Ok(info)
}

/// Checks whether urgent data waits for the program.
///
/// # Errors
/// [`Refusal::Urgent`] if so.
pub fn check_urgent(fd: BorrowedFd<'_>) -> Result<(), Refusal> {
    if poll(fd).contains(PollFlags::PRI) { Err(Refusal::Urgent) } else { Ok(()) }
}

/// Checks whether the receiving side is shut down: poll(2) reports the end of the stream, though no FIN has come.
///
/// # Errors
/// [`Refusal::ReceivingShut`] if so.
pub fn check_receiving(fd: BorrowedFd<'_>) -> Result<(), Refusal> {
    let at_end = poll(fd).contains(PollFlags::RDHUP);
    // ESTABLISHED, FIN-WAIT-1, FIN-WAIT-2.
    let no_fin = || TcpInfo::read(fd).is_ok_and(|info| matches!(info.state, 1 | 4 | 5));
    if at_end && no_fin() { Err(Refusal::ReceivingShut) } else { Ok(()) }
}

/// poll(2)'s events of a socket now.
fn poll(fd: BorrowedFd<'_>) -> PollFlags {
    const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut socket = [PollFd::from_borrowed_fd(fd, PollFlags::PRI | PollFlags::RDHUP)];
    let _ = rustix::event::poll(&mut socket, Some(&NOW));
    socket[0].revents()
}
