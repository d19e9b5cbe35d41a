//! Send and receive memory of connections: initial sizes, limits of growth, and allocation from the session's heap.

use crate::connection::Memory;
use crate::known::Known;
use crate::session::OpenSession;
use baton_abi::Cid;
use baton_abi::layout::{self, block, nic, slot};
use baton_client::heap::Heap;
use baton_handoff::send_buffer::queue_limit;
use baton_image::Image;
use baton_linux::buffers::{Buffer, Side};
use baton_shm::Region;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

/// An enlargement of a connection's memory that is under way, or a return of its pages.
pub(crate) struct Growing {
    /// The cid before it, by which the NIC knows the connection until it is resumed.
    pub cid: Cid,
    /// Memory blocks (offset, size) that are not in use: the larger ones until the bytes have been copied, the old ones
    /// afterwards.
    pub unused: [Option<(u32, u32)>; 2],
    /// The larger memory; the same as before if only pages are returned.
    pub larger: Memory,
    /// Sequence number up to which the send queue was copied while the connection was still active. None if nothing
    /// was.
    pub copied: Option<u32>,
}

/// Initial size of send and of receive memory in bytes, unless the connection needs more.
const BEGINNING: u32 = 1 << 18;
/// Initial size in bytes once more than half of the session's memory is taken, so that thousands of connections find
/// room.
const BEGINNING_LATE: u32 = 1 << 16;
/// Least size in bytes, if there is no more.
const LEAST: u32 = 1 << 14;
/// Greatest size in bytes.
const MOST: u32 = 1 << 26;
/// Divisor: one growth gets at most the bytes left for growth divided by this.
const SHARE: u64 = 4;

/// Most bytes of receive and of send memory that a connection may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Limits {
    pub receive: u32,
    pub send: u32,
}

impl Limits {
    /// Returns the maxima of the host's tcp_rmem and tcp_wmem, or what the program has set by SO_RCVBUF and SO_SNDBUF,
    /// as in the kernel.
    pub fn of(fd: BorrowedFd<'_>, known: &mut Known) -> Limits {
        let fixed = |side| Buffer::read(fd, side).ok().filter(|buffer| buffer.fixed).map(|buffer| buffer.size);
        // Options of SOL_SOCKET, which are read without the socket's lock.
        let [receive, send] = known.buffers();
        let receive = fixed(Side::Receive).or(receive).unwrap_or(BEGINNING);
        let send = fixed(Side::Send).map(queue_limit).or(send).unwrap_or(BEGINNING);
        Limits { receive: receive.clamp(1 << 12, MOST), send: send.clamp(1 << 12, MOST) }
    }

    /// The largest window that a connection may begin with on the NIC: what the kernel's receive buffer would hold, and
    /// at least what it has advertised and not read yet.
    pub fn first_window(self, fd: Option<BorrowedFd<'_>>, image: &Image) -> u32 {
        let buffer = fd.and_then(|fd| Buffer::read(fd, Side::Receive).ok()).filter(|buffer| !buffer.fixed);
        let advertised = image.rcv_adv.wrapping_sub(image.read_seq());
        buffer.map_or(self.receive, |buffer| window_of(buffer.size).max(advertised).min(self.receive))
    }

    /// Writes the limits into the slot, for the NIC, before a handoff or a resumption: `window` is the largest that it
    /// may advertise.
    pub fn write(self, window: u32, nic_memory: &Region, cid: Cid) {
        let grows = if window < self.receive { slot::MAY_GROW } else { 0 };
        for (at, value) in [window | grows, self.send].into_iter().enumerate() {
            nic_memory.word32(nic::slot(cid.slot()) + slot::LIMITS + 4 * at).store(value, Ordering::Release);
        }
    }
}

/// The largest window that the kernel advertises with a receive buffer of `size` bytes, of which about an eighth is for
/// its bookkeeping if segments are large.
fn window_of(size: u32) -> u32 {
    size - size / 8
}

/// The receive buffer that [`window_of`] needs for a window.
pub(crate) fn buffer_for(window: u32) -> u32 {
    window.saturating_add(window.div_ceil(7))
}

/// The largest window that a connection on the NIC may advertise.
pub(crate) fn largest_window(nic_memory: &Region, cid: Cid) -> u32 {
    let word = nic_memory.word32(nic::slot(cid.slot()) + slot::LIMITS).load(Ordering::Acquire);
    (word & !slot::MAY_GROW).min(MOST)
}

/// What [`block::REPORT_SHIFT`] says of how often the program must report what it has read: after an eighth of the
/// window, which may be much smaller than its memory.
pub(crate) fn report_bits(window: u32) -> u32 {
    (window / 8).max(2).ilog2() << block::REPORT_SHIFT
}

/// The most bytes that the program may queue on the NIC: what the kernel would accept with the send buffer that the
/// shell has. The initial send memory may be used in any case, unless the program has fixed the buffer: a connection
/// that has just begun would fill less within a round trip.
pub(crate) fn most_queued(buffer: &Buffer) -> u32 {
    let most = queue_limit(buffer.size);
    if buffer.fixed { most } else { most.max(BEGINNING) }
}

/// Allocates memory for the queues of a connection that moves to the NIC: enough for their bytes, for the advertised
/// window, and for as much in flight as its path holds; at least the initial size, and at most its limits.
pub(crate) fn take(session: &mut OpenSession, image: &Image, limits: Limits) -> Option<Memory> {
    let window = image.rcv_adv.wrapping_sub(image.rcv_nxt);
    // One unit of the window is left free for rounding, and one there must be for a window.
    let received = image.unread.checked_add(window)?.checked_add(2 << image.rcv_wscale)?;
    let in_flight = image.cwnd.saturating_mul(u32::from(image.mss)).saturating_mul(2);
    let scarce = session.heap.free_bytes() < session.heap.bytes() / 2;
    let beginning = if scarce { BEGINNING_LATE } else { BEGINNING };
    let receive = take_between(&mut session.heap, received, beginning.min(limits.receive))?;
    // Where memory is scarce, a connection that could use more gets it when it requests more.
    let sent = if scarce { beginning } else { beginning.max(in_flight) }.min(limits.send);
    let Some(send) = take_between(&mut session.heap, image.send_queue(), sent) else {
        session.heap.give(receive.0, receive.1);
        return None;
    };
    Some(Memory { receive, send })
}

/// Allocates `wished` bytes, or less, but at least `needed`.
fn take_between(heap: &mut Heap, needed: u32, wished: u32) -> Option<(u32, u32)> {
    let needed = needed.max(LEAST.min(wished));
    if needed > MOST {
        return None;
    }
    let mut size = wished.max(needed);
    loop {
        // Blocks larger than the initial size come only from what is left for growth.
        if (size <= BEGINNING || size <= needed.next_power_of_two() || fits_growth(heap, size))
            && let Some(block) = heap.take(size)
        {
            return Some(block);
        }
        if size <= needed {
            return None;
        }
        size = (size / 2).max(needed);
    }
}

/// Whether a block of `size` bytes fits the share of one growth. Half of the heap is reserved for connections that are
/// still to come.
fn fits_growth(heap: &Heap, size: u32) -> bool {
    let left = heap.free_bytes().saturating_sub(heap.bytes() / 2);
    u64::from(size.next_power_of_two()) <= left / SHARE
}

/// Allocates a block larger than `now` bytes, as near to `wanted` as there is room for. None if there is no room, or
/// nothing is wanted.
pub(crate) fn enlarge(heap: &mut Heap, now: u32, wanted: u32, most: u32) -> Option<(u32, u32)> {
    let mut size = wanted.min(most).min(MOST).next_power_of_two();
    while size > now {
        if fits_growth(heap, size)
            && let Some(block) = heap.take(size)
        {
            return Some(block);
        }
        size /= 2;
    }
    None
}

/// Whether no thread of the program is inside an operation on the connection of this number, or on an earlier one that
/// had it.
pub(crate) fn is_left(session: &Region, number: u32) -> bool {
    session.word32(layout::session::block(number) + block::BUSY).load(Ordering::Acquire) == 0
}

/// Frees the memory of a connection that its program has closed, when the last thread is out of it: what that one still
/// copies would be in another connection's memory otherwise.
pub(crate) fn give_when_left(session: &mut OpenSession, number: u32, memory: Memory) {
    session.late.push((number, memory));
    give_what_was_left(session);
}

/// Frees what [`give_when_left`] could not free.
pub(crate) fn give_what_was_left(session: &mut OpenSession) {
    let region = session.memory.clone();
    let left: Vec<_> = session.late.extract_if(.., |(number, _)| is_left(&region, *number)).collect();
    left.into_iter().for_each(|(_, memory)| give(session, memory));
}

/// Frees a connection's memory.
pub(crate) fn give(session: &mut OpenSession, memory: Memory) {
    give_block(session, memory.receive);
    give_block(session, memory.send);
}

/// Frees one block.
pub(crate) fn give_block(session: &mut OpenSession, (offset, size): (u32, u32)) {
    // Pages of ordinary buffers are soon used again; those of large ones are returned to the system at once.
    if size > 1 << 21 {
        session.memory.discard(offset as usize, size as usize);
    } else {
        session.released.note((offset, size));
    }
    session.heap.give(offset, size);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However many connections request the most, half of the heap is left for later ones, and each of those gets what
    /// it needs.
    #[test]
    fn growth_leaves_room_for_others() {
        let mut heap = Heap::new(0, 64 << 20);
        let grown: Vec<u32> = std::iter::from_fn(|| enlarge(&mut heap, BEGINNING, MOST, MOST)).map(|block| block.1).collect();
        assert_eq!(grown[0], 8 << 20, "a quarter of a half");
        assert!(grown.windows(2).all(|pair| pair[0] >= pair[1]) && grown.iter().all(|size| *size > BEGINNING));
        assert!(heap.free_bytes() >= 32 << 20);
        let begun = std::iter::from_fn(|| take_between(&mut heap, 1000, BEGINNING)).count();
        assert!(begun >= 128, "{begun} connections begin");
        assert_eq!(heap.free_bytes(), 0, "the last ones with less");
    }

    #[test]
    fn a_window_fits_the_buffer_made_for_it() {
        assert_eq!(window_of(131_072), 114_688);
        for window in [0, 1, 65_535, 262_144, 2_096_896, 1 << 30] {
            assert!((window..=window + 1).contains(&window_of(buffer_for(window))), "{window}");
        }
    }

    #[test]
    fn what_is_there_is_needed() {
        let mut heap = Heap::new(0, 64 << 20);
        assert_eq!(take_between(&mut heap, 5 << 20, BEGINNING).map(|block| block.1), Some(8 << 20));
        assert_eq!(take_between(&mut heap, 100, 5000).map(|block| block.1), Some(8192));
        assert_eq!(take_between(&mut heap, MOST + 1, BEGINNING), None);
    }
}
