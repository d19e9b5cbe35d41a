//! Whether a connection can be offloaded, and if not, why it stays in the kernel.

use baton_linux::socket;
use baton_linux::tcp_info::TcpInfo;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Why a connection stays in the kernel.
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
    /// A socket filter that cannot be read back.
    #[error("it has a socket filter that cannot be saved")]
    Filter,
    /// There is no route to its peer.
    #[error("there is no route to its peer")]
    NoRoute,
    /// Its route does not lead through the NIC.
    #[error("its route leads through interface {0}, which is not the NIC's")]
    OtherInterface(u32),
    /// Its device has no Ethernet headers.
    #[error("its route leads through interface {0}, which is neither Ethernet nor loopback")]
    NotEthernet(u32),
    /// Its packets carry a mark, which the kernel's rules, queues and filters match.
    #[error("its packets carry a mark (SO_MARK {0}), and the NIC's do not: if no rule uses the mark, do not set it")]
    Marked(u32),
    /// It is bound to a device, and its route leads through another.
    #[error("it is bound to interface {0} (SO_BINDTODEVICE), and its route leads through interface {1}")]
    Bound(u32, u32),
    /// It belongs to a VRF.
    #[error("it belongs to a VRF (interface {0}), whose rules only the kernel follows")]
    Vrf(u32),
    /// Its route adds headers.
    #[error("its route adds headers of its own (ip route … encap), which only the kernel can")]
    Encapsulated,
    /// Its route has more equal paths than the NIC can receive on.
    #[error("its route has {0} equal paths, more than the NIC can receive on")]
    ManyPaths(usize),
    /// A firewall rule may judge it by something that changes from packet to packet, without a notification.
    #[error(
        "the firewall judges it by {0}, and only the kernel's packets count for that; a rule before it that accepts what is established \
         lets it move"
    )]
    Rules(String),
    /// There are rules whose changes cannot be observed.
    #[error(
        "there are rules of iptables-legacy, whose changes cannot be observed: use iptables-nft (update-alternatives --config iptables)"
    )]
    LegacyRules,
    /// A traffic control filter judges what comes in.
    #[error("filters of traffic control judge what comes in at interface {0} (tc filter show dev … ingress)")]
    Filtered(u32),
    /// IPsec covers it.
    #[error("an IPsec policy covers it (see ip xfrm policy)")]
    Policy,
    /// IPsec blocks it on the way out: the kernel could not take it back.
    #[error("an IPsec policy blocks it (see ip xfrm policy)")]
    PolicyBlocks,
    /// Its source address is not the host's any more.
    #[error("its source address {0} is not one of this host's any more")]
    SourceGone(std::net::IpAddr),
    /// Its link address is unknown.
    #[error("the link address of its next hop is not known yet")]
    NoNeighbour,
    /// The kernel holds data out of order that the NIC's mirror does not cover yet.
    #[error("it holds data out of order that the NIC could not copy in time; try again")]
    OutOfOrder,
    /// The program is inside an operation on it.
    #[error("its program is in the middle of an operation on it; try again")]
    Busy,
    /// The kernel does not have all data yet that the NIC has acknowledged for it.
    #[error("the kernel does not have all data yet that the NIC has acknowledged for it; try again")]
    Acknowledged,
    /// A restore was requested before its offload was finished.
    #[error("its restore was requested before its offload was finished")]
    CalledOff,
    /// Firewall or control group programs have changed, and none of its traffic has passed in the kernel since.
    #[error("the firewall has changed (or a program of its control group), and no traffic of it has been seen to pass since")]
    Unproved,
    /// This host translates its addresses (NAT).
    #[error("this host translates its addresses (NAT)")]
    Translated,
    /// Another process holds the same socket.
    #[error("another process holds the same socket")]
    Shared,
    /// Only its program has its descriptor.
    #[error("only its program has a descriptor of its socket")]
    Elsewhere,
    /// The NIC has no room.
    #[error("the NIC has no room for it")]
    NoRoom,
    /// The agent needs its remaining descriptors for itself.
    #[error(
        "the agent has no descriptor left for it: its limit is {0} (raise the hard limit, ulimit -Hn, where Baton is started)"
    )]
    NoDescriptors(u64),
    /// The NIC refused the command.
    #[error("the NIC refused it ({0})")]
    Refused(u32),
    /// The NIC does not answer.
    #[error("the NIC does not answer")]
    NicGone,
    /// The kernel refused a step of its import: the connection does not exist any more.
    #[error("it is lost: {0}: {1}")]
    Lost(&'static str, io::Error),
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
