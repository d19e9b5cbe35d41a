//! Socket options that the NIC does not act on: a connection that uses one stays in the kernel.

use baton_linux::socket;
use baton_moves::Refusal;
use std::os::fd::BorrowedFd;

const SO_MAX_PACING_RATE: i32 = 47;
const TCP_CONGESTION: i32 = 13;
const TCP_NOTSENT_LOWAT: i32 = 25;
/// Values of IP_MTU_DISCOVER and IPV6_MTU_DISCOVER (WANT, DO) that mean "never fragment, and follow the path MTU", as
/// the NIC does.
const FOLLOWS_PATH_MTU: [i32; 2] = [1, 2];

/// Options of which some values keep a connection in the kernel, by level and number: SO_PRIORITY, SO_MAX_PACING_RATE,
/// SO_PEEK_OFF, IP_MTU_DISCOVER, IP_MINTTL, IPV6_MTU_DISCOVER, IPV6_MINHOPCOUNT, TCP_CONGESTION, TCP_NOTSENT_LOWAT.
const OPTIONS: [(i32, i32); 9] = [
    (1, libc::SO_PRIORITY),
    (1, SO_MAX_PACING_RATE),
    (1, libc::SO_PEEK_OFF),
    (0, 10),
    (0, 21),
    (41, 23),
    (41, 73),
    (6, TCP_CONGESTION),
    (6, TCP_NOTSENT_LOWAT),
];

/// The priority that IP_TOS sets (the kernel's `ip_tos2prio`), by the four bits of the type of service.
const PRIORITIES: [i32; 16] = [0, 0, 0, 0, 2, 2, 2, 2, 6, 6, 6, 6, 4, 4, 4, 4];

/// Whether some values of an option keep a connection in the kernel. Such an option is only set after the connection is
/// restored.
pub fn may_keep_in_kernel(level: i32, option: i32) -> bool {
    OPTIONS.contains(&(level, option))
}

/// Checks whether the program has set an option that the NIC does not act on.
///
/// # Errors
/// [`Refusal::Option`] with its name.
pub fn check(fd: BorrowedFd<'_>) -> Result<(), Refusal> {
    let mut rate = [0xff; 8];
    let paced = socket::get_bytes(fd, libc::SOL_SOCKET, SO_MAX_PACING_RATE, &mut rate)
        .is_ok_and(|length| rate[..length.min(8)].iter().any(|byte| *byte != 0xff));
    if paced {
        return Err(Refusal::Option("SO_MAX_PACING_RATE"));
    }
    // Queueing disciplines and VLANs go by the priority of the kernel's packets. Of what IP_TOS makes it, its bits say
    // the same.
    let of_class = socket::get(fd, libc::IPPROTO_IP, libc::IP_TOS).map_or(0, |class| PRIORITIES[(class as usize >> 1) & 15]);
    let priority = socket::get(fd, libc::SOL_SOCKET, libc::SO_PRIORITY).unwrap_or(0);
    if priority != 0 && priority != of_class {
        return Err(Refusal::Option("SO_PRIORITY"));
    }
    let get = |level, option| socket::get(fd, level, option).ok();
    // A look at what has come begins behind that of the last one, and so would the move's own, which reads the queue.
    if get(libc::SOL_SOCKET, libc::SO_PEEK_OFF).is_some_and(|offset| offset >= 0) {
        return Err(Refusal::Option("SO_PEEK_OFF"));
    }
    // For an IPv6 socket with a mapped peer address the IPv4 options count, too.
    for (level, option, name) in [(0, 10, "IP_MTU_DISCOVER"), (41, 23, "IPV6_MTU_DISCOVER")] {
        if get(level, option).is_some_and(|value| !FOLLOWS_PATH_MTU.contains(&value)) {
            return Err(Refusal::Option(name));
        }
    }
    for (level, option, name) in [(0, 21, "IP_MINTTL"), (41, 73, "IPV6_MINHOPCOUNT")] {
        if get(level, option).is_some_and(|value| value > 0) {
            return Err(Refusal::Option(name));
        }
    }
    // 0 and -1 limit nothing. The program's side does not see how much the NIC has sent.
    if get(libc::IPPROTO_TCP, TCP_NOTSENT_LOWAT).is_some_and(|lowat| !matches!(lowat, 0 | -1)) {
        return Err(Refusal::Option("TCP_NOTSENT_LOWAT"));
    }
    let mut raw = [0u8; 16];
    let length = socket::get_bytes(fd, libc::IPPROTO_TCP, TCP_CONGESTION, &mut raw).unwrap_or(0).min(raw.len());
    let name = raw[..length].split(|byte| *byte == 0).next().unwrap_or_default();
    if name.is_empty() || [&b"cubic"[..], b"reno"].contains(&name) {
        return Ok(());
    }
    // The host's default counts as not set by the program.
    let default = std::fs::read("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default();
    if default.trim_ascii() == name { Ok(()) } else { Err(Refusal::Option("TCP_CONGESTION")) }
}
