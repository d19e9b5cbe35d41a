//! What the kernel would accept from a program for sending: its send buffer, and how that grows with the congestion
//! window. The NIC accepts as much.

use baton_linux::buffers::{Buffer, Side};
use baton_linux::socket;
use std::io;
use std::os::fd::BorrowedFd;

/// Payload of one buffer of the kernel's queue, in bytes, to a peer that has never offered more than its first windows:
/// half of the largest of them (tcp_bound_to_half_wnd).
const PIECE: u32 = 46_336;
/// Bytes that the kernel counts for one more of them (sk_buff and its head).
const BOOKKEEPING: u32 = 1_280;
/// Segments for which there is room at least (Linux's TCP_INIT_CWND).
const FIRST_WINDOW: u32 = 10;
/// What the kernel counts for a segment beside its payload: the structure sk_buff, and within the head, whose size is a
/// power of two, headers and skb_shared_info. The latter depend on what the kernel was built with.
const SEGMENT: u32 = 256;
const HEADS: [u32; 2] = [640, 576];

/// Most bytes that may be queued with this SO_SNDBUF. The kernel checks the limit only when it begins a new buffer of
/// its queue, and then fills that buffer. And of the first of several buffers about half is usually acknowledged, which
/// no longer counts.
pub fn queue_limit(size: u32) -> u32 {
    let pieces = size.div_ceil(PIECE + BOOKKEEPING).max(1);
    let acknowledged = if pieces > 1 { PIECE / 2 } else { PIECE / 4 };
    let limit = pieces.saturating_mul(PIECE).saturating_add(acknowledged);
    // Memory comes in powers of two, and a few bytes are not worth twice as much.
    let power = 1 << limit.ilog2();
    if limit - power < power / 16 { power } else { limit }
}

/// The size that the kernel would give a send buffer which the program has not fixed once the congestion window is
/// `cwnd` segments, if that is more than `buffer` has (tcp_sndbuf_expand). `mss` is the peer's maximum segment size,
/// `most` the maximum of tcp_wmem.
pub fn expanded(fd: BorrowedFd<'_>, buffer: &Buffer, cwnd: u32, mss: u16, most: u32) -> Option<u32> {
    let mut name = [0u8; 16];
    let bbr = socket::get_bytes(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, &mut name).is_ok() && name.starts_with(b"bbr");
    let size = size_for(cwnd, mss, if bbr { 3 } else { 2 }, buffer.size).min(most);
    (!buffer.fixed && size > buffer.size).then_some(size)
}

/// The same by numbers. `windows`: how many congestion windows are to have room. `now`, an earlier result of the
/// kernel's, shows what it counts for a segment.
fn size_for(cwnd: u32, mss: u16, windows: u32, now: u32) -> u32 {
    let [larger, smaller] = HEADS.map(|head| windows * ((u32::from(mss) + head).next_power_of_two() + SEGMENT));
    let window = if now.is_multiple_of(larger) { larger } else { smaller };
    cwnd.max(FIRST_WINDOW).saturating_mul(window)
}

/// The send buffer of a connection's socket.
///
/// # Errors
/// The failed system call's.
pub fn of(fd: BorrowedFd<'_>) -> io::Result<Buffer> {
    Buffer::read(fd, Side::Send)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SO_SNDBUF, and how many bytes Linux 6.18 had queued when it accepted no more, over Ethernet, in the middle of
    /// several writes.
    const SEEN: [(u32, u32); 9] = [
        (8_192, 46_336),
        (131_072, 157_832),
        (200_000, 228_440),
        (300_000, 311_640),
        (400_000, 404_312),
        (524_288, 543_320),
        (800_000, 787_712),
        (2_097_152, 2_085_120),
        (4_194_304, 4_163_072),
    ];

    #[test]
    fn the_limit_is_what_the_kernel_accepts() {
        // What the peer's receive buffer takes, too.
        const PEER: u32 = 120_000;
        for (size, seen) in SEEN {
            let ratio = f64::from(queue_limit(size) + PEER) / f64::from(seen + PEER);
            assert!((0.93..1.1).contains(&ratio), "{size}: {} bytes, and the kernel {seen}", queue_limit(size));
        }
        assert!(queue_limit(u32::MAX) >= 1 << 31 && queue_limit(0) >= PIECE);
    }

    #[test]
    fn the_buffer_grows_as_the_kernels_does() {
        // BBR over loopback and over Ethernet, CUBIC over Ethernet, with the heads of this kernel and larger ones.
        assert_eq!(size_for(10, 65_483, 3, 0), 3_939_840);
        assert_eq!(size_for(96, 1460, 3, 69_120), 663_552);
        assert_eq!(size_for(68, 1460, 2, 46_080), 313_344);
        assert_eq!(size_for(10, 1460, 2, 87_040), 87_040);
        assert_eq!(size_for(1, 1460, 2, 46_080), 46_080);
    }
}
