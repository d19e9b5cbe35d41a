//! Whether a connection can be offloaded, and if not, why it stays in the kernel.

use baton_linux::socket;
use baton_linux::tcp_info::TcpInfo;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// What of a socket keeps its connection in the kernel.
#[derive(Debug, thiserror::Error)]
pub enum Stay {
    /// Not a TCP socket.
    #[error("it is not a TCP connection")]
    NotTcp,
    /// Multipath TCP: the kernel offers no repair for it.
    #[error(
        "it is an MPTCP connection, which the kernel cannot export (start the program with MPTCP off, e.g. GODEBUG=multipathtcp=0)"
    )]
    Mptcp,
    /// TCP MD5 or TCP-AO signs its segments with a key that the kernel does not give out.
    #[error("its segments are signed (TCP MD5 or TCP-AO)")]
    Signed,
    /// Its socket is in another network namespace, where its addresses mean something else.
    #[error("its socket belongs to another network namespace")]
    OtherNamespace,
    /// Its program has shut down the receiving side, which an import could not restore.
    #[error("its program has shut down its receiving side")]
    ReceivingShut,
    /// Urgent data is pending.
    #[error("urgent data is pending")]
    Urgent,
    /// Its timestamp clock runs in microseconds.
    #[error("its timestamp clock runs in microseconds")]
    MicrosecondClock,
    /// It is in a state that cannot be moved.
    #[error("it is in state {0}, only ESTABLISHED to LAST-ACK can be moved")]
    State(&'static str),
    /// An upper layer protocol (kTLS, …) owns its payload.
    #[error("an upper layer protocol (TCP_ULP) is attached to it")]
    UpperLayer,
    /// Its program has set an option that the NIC does not act on.
    #[error("its {0} is set, which only the kernel acts on")]
    Option(&'static str),
    /// The program is inside an operation on it.
    #[error("its program is in the middle of an operation on it; try again")]
    Busy,
    /// The kernel refused a call.
    #[error("{0}: {1}")]
    System(&'static str, io::Error),
}

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

/// Examines a socket without changing it.
///
/// # Errors
/// The first reason for which the connection stays in the kernel.
pub fn examine(fd: BorrowedFd<'_>) -> Result<TcpInfo, Stay> {
    match socket::get(fd, libc::SOL_SOCKET, SO_PROTOCOL) {
        Ok(libc::IPPROTO_TCP) => {}
        Ok(IPPROTO_MPTCP) => {
            // An MPTCP socket that fell back to TCP still runs MPTCP's code.
            return Err(Stay::Mptcp);
        }
        _ => return Err(Stay::NotTcp),
    }
    if matches!(socket::get(fd, libc::IPPROTO_TCP, TCP_IS_MPTCP), Ok(1)) {
        return Err(Stay::Mptcp);
    }
    if !socket::is_of_this_namespace(fd).map_err(|error| Stay::System("SO_NETNS_COOKIE", error))? {
        return Err(Stay::OtherNamespace);
    }
    let info = TcpInfo::read(fd).map_err(|error| Stay::System("TCP_INFO", error))?;
    if !matches!(info.state, 1 | 4 | 5 | 8 | 9 | 11) {
        return Err(Stay::State(state_name(info.state)));
    }
    let mut name = [0u8; 16];
    if matches!(socket::get_bytes(fd, libc::IPPROTO_TCP, TCP_ULP, &mut name), Ok(length) if length > 0 && name[0] != 0) {
        return Err(Stay::UpperLayer);
    }
    let mut ao = [0u8; 64];
    if socket::get_bytes(fd, libc::IPPROTO_TCP, TCP_AO_INFO, &mut ao).is_ok() {
        return Err(Stay::Signed);
    }
    check_urgent(fd)?;
    check_receiving(fd)?;
    Ok(info)
}

/// Checks whether urgent data waits for the program.
///
/// # Errors
/// [`Stay::Urgent`] if so.
pub fn check_urgent(fd: BorrowedFd<'_>) -> Result<(), Stay> {
    if poll(fd) & libc::POLLPRI != 0 { Err(Stay::Urgent) } else { Ok(()) }
}

/// Checks whether the program has shut down the receiving side: poll(2) reports the end of the stream, though no FIN has come.
///
/// # Errors
/// [`Stay::ReceivingShut`] if so.
pub fn check_receiving(fd: BorrowedFd<'_>) -> Result<(), Stay> {
    let at_end = poll(fd) & libc::POLLRDHUP != 0;
    // ESTABLISHED, FIN-WAIT-1, FIN-WAIT-2.
    let no_fin = || TcpInfo::read(fd).is_ok_and(|info| matches!(info.state, 1 | 4 | 5));
    if at_end && no_fin() { Err(Stay::ReceivingShut) } else { Ok(()) }
}

/// poll(2)'s events of a socket now.
fn poll(fd: BorrowedFd<'_>) -> i16 {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLPRI | libc::POLLRDHUP, revents: 0 };
    // SAFETY: one live pollfd, no waiting.
    unsafe { libc::poll(&mut poll, 1, 0) };
    poll.revents
}
