//! Every socket option of SOL_SOCKET, IP, IPV6 and TCP, and what a move does to it. `docs/reference/socket-options.md`
//! is generated from this table, and the tests take every row that is kept, carried or read-only across a move both
//! ways.

use std::fmt::Write;

/// What a move does to an option.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It stays with the socket, which is the same before, during and after.
    Kept,
    /// The NIC acts on it, or a move has to put it back: it is in the image, or saved beside it.
    Carried,
    /// A connection that uses it stays in the kernel.
    Stays,
    /// It can only be read, and reads the same wherever the connection is.
    ReadOnly,
    /// It is answered by the connection's owner: by the NIC while the NIC has the connection.
    Owners,
    /// It has no meaning for a connected TCP socket, or is an action and not a state.
    NoMeaning,
}

/// One option.
#[derive(Clone, Copy, Debug)]
pub struct SocketOption {
    /// The constant's name in the C headers.
    pub name: &'static str,
    /// First argument after the descriptor of setsockopt (SOL_SOCKET is 1, IP 0, IPV6 41, TCP 6).
    pub level: i32,
    /// Second argument after the descriptor of setsockopt.
    pub number: i32,
    /// What a move does to it.
    pub fate: Fate,
    /// A value other than the default, which the test sets.
    pub value: Option<i32>,
}

const fn row(name: &'static str, level: i32, number: i32, fate: Fate, value: Option<i32>) -> SocketOption {
    SocketOption { name, level, number, fate, value }
}

use Fate::{Carried, Kept, NoMeaning, Owners, ReadOnly, Stays};

/// All options, by level and number (Linux 6.18).
pub const OPTIONS: &[SocketOption] = &[
    row("SO_DEBUG", 1, 1, Kept, Some(1)),
    row("SO_REUSEADDR", 1, 2, Carried, Some(1)),
    row("SO_TYPE", 1, 3, ReadOnly, None),
    row("SO_ERROR", 1, 4, ReadOnly, None),
    row("SO_DONTROUTE", 1, 5, Carried, Some(1)),
    row("SO_BROADCAST", 1, 6, Kept, Some(1)),
    row("SO_SNDBUF", 1, 7, Kept, Some(100_000)),
    row("SO_RCVBUF", 1, 8, Kept, Some(100_000)),
    row("SO_KEEPALIVE", 1, 9, Carried, Some(1)),
    row("SO_OOBINLINE", 1, 10, Kept, Some(1)),
    row("SO_NO_CHECK", 1, 11, Kept, Some(1)),
    row("SO_PRIORITY", 1, 12, Stays, Some(3)),
    row("SO_LINGER", 1, 13, Kept, None),
    row("SO_BSDCOMPAT", 1, 14, NoMeaning, None),
    row("SO_REUSEPORT", 1, 15, Kept, Some(1)),
    row("SO_PASSCRED", 1, 16, NoMeaning, None),
    row("SO_PEERCRED", 1, 17, NoMeaning, None),
    row("SO_RCVLOWAT", 1, 18, Kept, Some(7)),
    row("SO_SNDLOWAT", 1, 19, ReadOnly, None),
    row("SO_RCVTIMEO", 1, 20, Kept, None),
    row("SO_SNDTIMEO", 1, 21, Kept, None),
    row("SO_BINDTODEVICE", 1, 25, Carried, None),
    row("SO_ATTACH_FILTER", 1, 26, Carried, None),
    row("SO_DETACH_FILTER", 1, 27, NoMeaning, None),
    row("SO_PEERNAME", 1, 28, NoMeaning, None),
    row("SO_TIMESTAMP", 1, 29, Kept, Some(1)),
    row("SO_ACCEPTCONN", 1, 30, ReadOnly, None),
    row("SO_PEERSEC", 1, 31, NoMeaning, None),
    row("SO_SNDBUFFORCE", 1, 32, NoMeaning, None),
    row("SO_RCVBUFFORCE", 1, 33, NoMeaning, None),
    row("SO_PASSSEC", 1, 34, NoMeaning, None),
    row("SO_TIMESTAMPNS", 1, 35, Kept, Some(1)),
    row("SO_MARK", 1, 36, Stays, None),
    row("SO_TIMESTAMPING", 1, 37, Kept, Some(8)),
    row("SO_PROTOCOL", 1, 38, ReadOnly, None),
    row("SO_DOMAIN", 1, 39, ReadOnly, None),
    row("SO_RXQ_OVFL", 1, 40, Kept, Some(1)),
    row("SO_WIFI_STATUS", 1, 41, Kept, Some(1)),
    row("SO_PEEK_OFF", 1, 42, Stays, None),
    row("SO_NOFCS", 1, 43, Kept, None),
    row("SO_LOCK_FILTER", 1, 44, Stays, None),
    row("SO_SELECT_ERR_QUEUE", 1, 45, Kept, Some(1)),
    row("SO_BUSY_POLL", 1, 46, Kept, Some(10)),
    row("SO_MAX_PACING_RATE", 1, 47, Stays, Some(1_000_000)),
    row("SO_BPF_EXTENSIONS", 1, 48, ReadOnly, None),
    row("SO_INCOMING_CPU", 1, 49, Owners, None),
    row("SO_ATTACH_BPF", 1, 50, Stays, None),
    row("SO_ATTACH_REUSEPORT_CBPF", 1, 51, NoMeaning, None),
    row("SO_ATTACH_REUSEPORT_EBPF", 1, 52, NoMeaning, None),
    row("SO_CNX_ADVICE", 1, 53, NoMeaning, None),
    row("SO_MEMINFO", 1, 55, NoMeaning, None),
    row("SO_INCOMING_NAPI_ID", 1, 56, NoMeaning, None),
    row("SO_COOKIE", 1, 57, ReadOnly, None),
    row("SO_PEERGROUPS", 1, 59, NoMeaning, None),
    row("SO_ZEROCOPY", 1, 60, Kept, Some(1)),
    row("SO_TXTIME", 1, 61, NoMeaning, None),
    row("SO_BINDTOIFINDEX", 1, 62, Carried, None),
    row("SO_DETACH_REUSEPORT_BPF", 1, 68, NoMeaning, None),
    row("SO_PREFER_BUSY_POLL", 1, 69, Kept, Some(1)),
    row("SO_BUSY_POLL_BUDGET", 1, 70, Kept, Some(16)),
    row("SO_NETNS_COOKIE", 1, 71, ReadOnly, None),
    row("SO_BUF_LOCK", 1, 72, Kept, Some(3)),
    row("SO_RESERVE_MEM", 1, 73, Kept, None),
    row("SO_TXREHASH", 1, 74, Kept, Some(0)),
    row("SO_RCVMARK", 1, 75, Kept, Some(1)),
    row("SO_PASSPIDFD", 1, 76, NoMeaning, None),
    row("SO_PEERPIDFD", 1, 77, NoMeaning, None),
    row("IP_TOS", 0, 1, Carried, Some(0x20)),
    row("IP_TTL", 0, 2, Carried, Some(33)),
    row("IP_HDRINCL", 0, 3, NoMeaning, None),
    row("IP_OPTIONS", 0, 4, NoMeaning, None),
    row("IP_ROUTER_ALERT", 0, 5, NoMeaning, None),
    row("IP_RECVOPTS", 0, 6, Kept, Some(1)),
    row("IP_RETOPTS", 0, 7, Kept, Some(1)),
    row("IP_PKTINFO", 0, 8, Kept, Some(1)),
    row("IP_PKTOPTIONS", 0, 9, NoMeaning, None),
    row("IP_MTU_DISCOVER", 0, 10, Stays, Some(0)),
    row("IP_RECVERR", 0, 11, Kept, Some(1)),
    row("IP_RECVTTL", 0, 12, Kept, Some(1)),
    row("IP_RECVTOS", 0, 13, Kept, Some(1)),
    row("IP_MTU", 0, 14, ReadOnly, None),
    row("IP_FREEBIND", 0, 15, Kept, Some(1)),
    row("IP_IPSEC_POLICY", 0, 16, NoMeaning, None),
    row("IP_XFRM_POLICY", 0, 17, NoMeaning, None),
    row("IP_PASSSEC", 0, 18, Kept, Some(1)),
    row("IP_TRANSPARENT", 0, 19, Kept, Some(1)),
    row("IP_RECVORIGDSTADDR", 0, 20, Kept, Some(1)),
    row("IP_MINTTL", 0, 21, Stays, Some(1)),
    row("IP_NODEFRAG", 0, 22, NoMeaning, None),
    row("IP_CHECKSUM", 0, 23, Kept, Some(1)),
    row("IP_BIND_ADDRESS_NO_PORT", 0, 24, Kept, Some(1)),
    row("IP_RECVERR_RFC4884", 0, 25, Kept, Some(1)),
    row("IP_MULTICAST_IF", 0, 32, NoMeaning, None),
    row("IP_MULTICAST_TTL", 0, 33, NoMeaning, None),
    row("IP_MULTICAST_LOOP", 0, 34, NoMeaning, None),
    row("IP_MULTICAST_ALL", 0, 49, Kept, Some(0)),
    row("IP_UNICAST_IF", 0, 50, NoMeaning, None),
    row("IP_LOCAL_PORT_RANGE", 0, 51, Kept, Some(0)),
    row("IP_PROTOCOL", 0, 52, NoMeaning, None),
    row("IPV6_ADDRFORM", 41, 1, NoMeaning, None),
    row("IPV6_UNICAST_HOPS", 41, 16, Carried, Some(33)),
    row("IPV6_MULTICAST_IF", 41, 17, NoMeaning, None),
    row("IPV6_MULTICAST_HOPS", 41, 18, NoMeaning, None),
    row("IPV6_MULTICAST_LOOP", 41, 19, NoMeaning, None),
    row("IPV6_ROUTER_ALERT", 41, 22, NoMeaning, None),
    row("IPV6_MTU_DISCOVER", 41, 23, Stays, Some(0)),
    row("IPV6_MTU", 41, 24, ReadOnly, None),
    row("IPV6_RECVERR", 41, 25, Kept, Some(1)),
    row("IPV6_V6ONLY", 41, 26, ReadOnly, None),
    row("IPV6_MULTICAST_ALL", 41, 29, Kept, Some(0)),
    row("IPV6_RECVERR_RFC4884", 41, 31, Kept, Some(1)),
    row("IPV6_FLOWINFO_SEND", 41, 33, Carried, Some(1)),
    row("IPV6_IPSEC_POLICY", 41, 34, NoMeaning, None),
    row("IPV6_XFRM_POLICY", 41, 35, NoMeaning, None),
    row("IPV6_HDRINCL", 41, 36, NoMeaning, None),
    row("IPV6_RECVPKTINFO", 41, 49, Kept, Some(1)),
    row("IPV6_PKTINFO", 41, 50, NoMeaning, None),
    row("IPV6_RECVHOPLIMIT", 41, 51, Kept, Some(1)),
    row("IPV6_HOPLIMIT", 41, 52, NoMeaning, None),
    row("IPV6_RECVHOPOPTS", 41, 53, Kept, Some(1)),
    row("IPV6_HOPOPTS", 41, 54, NoMeaning, None),
    row("IPV6_RTHDRDSTOPTS", 41, 55, NoMeaning, None),
    row("IPV6_RECVRTHDR", 41, 56, Kept, Some(1)),
    row("IPV6_RTHDR", 41, 57, NoMeaning, None),
    row("IPV6_RECVDSTOPTS", 41, 58, Kept, Some(1)),
    row("IPV6_DSTOPTS", 41, 59, NoMeaning, None),
    row("IPV6_RECVPATHMTU", 41, 60, Kept, Some(1)),
    row("IPV6_PATHMTU", 41, 61, ReadOnly, None),
    row("IPV6_DONTFRAG", 41, 62, Kept, Some(1)),
    row("IPV6_RECVTCLASS", 41, 66, Kept, Some(1)),
    row("IPV6_TCLASS", 41, 67, Carried, Some(0x20)),
    row("IPV6_AUTOFLOWLABEL", 41, 70, Carried, Some(0)),
    row("IPV6_ADDR_PREFERENCES", 41, 72, Kept, Some(2)),
    row("IPV6_MINHOPCOUNT", 41, 73, Stays, Some(1)),
    row("IPV6_RECVORIGDSTADDR", 41, 74, Kept, Some(1)),
    row("IPV6_TRANSPARENT", 41, 75, Kept, Some(1)),
    row("IPV6_UNICAST_IF", 41, 76, NoMeaning, None),
    row("IPV6_RECVFRAGSIZE", 41, 77, Kept, Some(1)),
    row("IPV6_FREEBIND", 41, 78, Kept, Some(1)),
    row("TCP_NODELAY", 6, 1, Carried, Some(0)),
    row("TCP_MAXSEG", 6, 2, Carried, None),
    row("TCP_CORK", 6, 3, Carried, Some(1)),
    row("TCP_KEEPIDLE", 6, 4, Carried, Some(77)),
    row("TCP_KEEPINTVL", 6, 5, Carried, Some(78)),
    row("TCP_KEEPCNT", 6, 6, Carried, Some(5)),
    row("TCP_SYNCNT", 6, 7, Kept, Some(4)),
    row("TCP_LINGER2", 6, 8, Kept, Some(9)),
    row("TCP_DEFER_ACCEPT", 6, 9, NoMeaning, None),
    row("TCP_WINDOW_CLAMP", 6, 10, Carried, Some(50_000)),
    row("TCP_INFO", 6, 11, NoMeaning, None),
    row("TCP_QUICKACK", 6, 12, NoMeaning, None),
    row("TCP_CONGESTION", 6, 13, Stays, None),
    row("TCP_MD5SIG", 6, 14, Stays, None),
    row("TCP_THIN_LINEAR_TIMEOUTS", 6, 16, Kept, Some(1)),
    row("TCP_THIN_DUPACK", 6, 17, NoMeaning, None),
    row("TCP_USER_TIMEOUT", 6, 18, Carried, Some(30_000)),
    row("TCP_REPAIR", 6, 19, NoMeaning, None),
    row("TCP_REPAIR_QUEUE", 6, 20, NoMeaning, None),
    row("TCP_QUEUE_SEQ", 6, 21, NoMeaning, None),
    row("TCP_REPAIR_OPTIONS", 6, 22, NoMeaning, None),
    row("TCP_FASTOPEN", 6, 23, NoMeaning, None),
    row("TCP_TIMESTAMP", 6, 24, NoMeaning, None),
    row("TCP_NOTSENT_LOWAT", 6, 25, Stays, Some(12_345)),
    row("TCP_CC_INFO", 6, 26, NoMeaning, None),
    row("TCP_SAVE_SYN", 6, 27, NoMeaning, None),
    row("TCP_SAVED_SYN", 6, 28, NoMeaning, None),
    row("TCP_REPAIR_WINDOW", 6, 29, NoMeaning, None),
    row("TCP_FASTOPEN_CONNECT", 6, 30, NoMeaning, None),
    row("TCP_ULP", 6, 31, Stays, None),
    row("TCP_MD5SIG_EXT", 6, 32, Stays, None),
    row("TCP_FASTOPEN_KEY", 6, 33, NoMeaning, None),
    row("TCP_FASTOPEN_NO_COOKIE", 6, 34, NoMeaning, None),
    row("TCP_ZEROCOPY_RECEIVE", 6, 35, NoMeaning, None),
    row("TCP_INQ", 6, 36, Kept, Some(1)),
    row("TCP_TX_DELAY", 6, 37, NoMeaning, None),
    row("TCP_AO_ADD_KEY", 6, 38, Stays, None),
    row("TCP_AO_DEL_KEY", 6, 39, Stays, None),
    row("TCP_AO_INFO", 6, 40, Stays, None),
    row("TCP_AO_GET_KEYS", 6, 41, Stays, None),
    row("TCP_AO_REPAIR", 6, 42, Stays, None),
    row("TCP_IS_MPTCP", 6, 43, Stays, None),
    row("TCP_RTO_MAX_MS", 6, 44, Kept, Some(20_000)),
    row("TCP_RTO_MIN_US", 6, 45, Carried, Some(100_000)),
    row("TCP_DELACK_MAX_US", 6, 46, Carried, Some(50_000)),
];

/// The text of `docs/reference/socket-options.md`.
pub fn markdown() -> String {
    let mut text = String::from(
        "# Socket options across a move\n\n\
         For people who run programs under Baton: what a move between kernel and NIC does to each socket\n\
         option. Made by `baton options`. `bin/baton/tests/live/options.rs` takes every row that is\n\
         kept, carried or read-only across moves both ways.\n\n\
         | word | what it means |\n|---|---|\n\
         | kept | stays with the socket, which is the same one |\n\
         | carried | the NIC acts on it, or a move puts it back |\n\
         | stays | a connection that uses it stays in the kernel |\n\
         | read-only | cannot be set, and reads the same |\n\
         | owner's | answered by the connection's owner: by the NIC while the NIC has the connection |\n\
         | – | no meaning for a connected TCP socket, or an action |\n\n\
         While the NIC has the connection its socket is empty and in repair mode, which a few options show:\n\
         TCP_QUICKACK reads 1, SO_GET_FILTER returns a filter of one instruction, and TCP_REPAIR_QUEUE,\n\
         TCP_QUEUE_SEQ and TCP_REPAIR_WINDOW are answered although the program has not set TCP_REPAIR.\n\n\
         | option | |\n|---|---|\n",
    );
    for option in OPTIONS {
        let fate = match option.fate {
            Fate::Kept => "kept",
            Fate::Carried => "carried",
            Fate::Stays => "stays",
            Fate::ReadOnly => "read-only",
            Fate::Owners => "owner's",
            Fate::NoMeaning => "–",
        };
        let _ = writeln!(text, "| {} | {fate} |", option.name);
    }
    text
}
