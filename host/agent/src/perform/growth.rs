//! Enlarges the memory of a connection on the NIC, or returns the pages of its memory to the system. The connection
//! rests while its bytes are copied: the program is kept out, frames that arrive are held. Until it continues both
//! memories hold the same bytes, so a recovery may use either.

use super::Performer;
use super::offload::write_block;
use crate::connection::{Memory, Wants};
use crate::journal;
use crate::memory;
use crate::memory::Growing;
use crate::record::{read_image, read_ranges, read_record, unread_by_program};
use baton_abi::layout::{block, nic, scratch, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_handoff::send_buffer;
use baton_image::Image;
use baton_linux::buffers::{Buffer, Side};
use baton_linux::events::monotonic_micros;
use baton_moves::{Action, Outcome, Refusal};
use baton_protocol::events::What;
use baton_recovery::{empty_memory, sends_of};
use baton_shm::{Circle, Region};
use std::sync::atomic::Ordering;

/// Largest piece copied at a time, in bytes.
const PIECE: usize = 1 << 16;

impl Performer<'_> {
    /// Allocates larger receive memory, send memory or both. If only pages are to be returned, the memory stays the
    /// same.
    pub(super) fn enlarge(&mut self) -> Result<(), Refusal> {
        let cid = self.cid()?;
        let on_nic = self.connection.on_nic.as_deref().ok_or(Refusal::NoRoom)?;
        let old = on_nic.memory();
        let Wants::Larger(receive, send) = self.connection.wants() else {
            self.connection.extra().growing = Some(Growing { cid, unused: [None; 2], larger: old, copied: None });
            return Ok(());
        };
        let limits = memory::Limits::of(self.connection.fd()?, self.ground.known);
        let larger_receive = memory::enlarge(&mut self.open.heap, old.receive.1, receive, limits.receive);
        let larger_send = memory::enlarge(&mut self.open.heap, old.send.1, send, limits.send);
        let unused = [larger_receive, larger_send];
        // With as much memory as before there may be more that it may use.
        let window = memory::largest_window(self.ground.nic_memory, cid);
        let uses_more = receive > 0 && window < old.receive.1.min(limits.receive) || (1..=old.send.1).contains(&send);
        if unused == [None; 2] && !uses_more {
            return Err(Refusal::NoRoom);
        }
        let larger = Memory { receive: larger_receive.unwrap_or(old.receive), send: larger_send.unwrap_or(old.send) };
        if !self.ground.nic().promise_memory(cid, larger) {
            unused.into_iter().flatten().for_each(|block| memory::give_block(self.open, block));
            return Err(Refusal::NoRoom);
        }
        let copied = self.copy_ahead(nic::slot(cid.slot()), old.send, larger.send);
        self.connection.extra().growing = Some(Growing { cid, unused, larger, copied });
        Ok(())
    }

    /// Copies the send queue of a connection that is still active: queued bytes do not change until they are
    /// acknowledged. So only those that the program queues from now on are left for the time of rest, which the peer
    /// sees as a delay. Returns the sequence number behind the last byte copied.
    /// None where some of it lies in buffers of the program's: the NIC moves them to send memory when it rests.
    fn copy_ahead(&self, base: usize, old: (u32, u32), new: (u32, u32)) -> Option<u32> {
        if !sends_of(&self.open.memory, self.connection.number()).is_empty() {
            return None;
        }
        let record = read_record(self.ground.nic_memory, base).filter(|_| new != old)?;
        let (from, to) = (self.open.memory.circle(old.0, old.1)?, self.open.memory.circle(new.0, new.1)?);
        let queued = record.snd_end.wrapping_sub(record.snd_una);
        (queued <= from.length()).then(|| copy_bytes(&from, &to, record.snd_una, queued))?;
        Some(record.snd_end)
    }

    /// Frees the memory that is not in use, and returns its pages to the system: connections seldom grow, and what one
    /// has outgrown may not be needed again for long.
    pub(super) fn shrink(&mut self) {
        if let Some(cid) = self.connection.cid {
            self.ground.nic().room.keep_memory(cid.slot());
        }
        for block in self.connection.extra().growing.take().into_iter().flat_map(|growing| growing.unused.into_iter().flatten()) {
            self.open.memory.discard(block.0 as usize, block.1 as usize);
            memory::give_block(self.open, block);
        }
    }

    /// Copies the contents of the old memory, and records where the larger one is.
    pub(super) fn grow(&mut self) -> Result<(), Refusal> {
        let cid = self.cid()?;
        let (Some(growing), Some(on_nic)) = (self.connection.growing(), &self.connection.on_nic) else {
            return Err(Refusal::NicGone);
        };
        let (nic_memory, base) = (self.ground.nic_memory, nic::slot(cid.slot()));
        // A NIC that writes an invalid image, or refuses what follows, must not continue.
        let image = read_image(nic_memory, cid).map_err(|_| Refusal::NicGone)?;
        let (old, new, next) = (on_nic.memory(), growing.larger, cid.next_generation());
        let replaced = [(old.receive != new.receive).then_some(old.receive), (old.send != new.send).then_some(old.send)];
        let returns = matches!(self.connection.wants(), Wants::NoPages);
        if returns {
            self.return_pages(cid, &image, old);
        }
        self.copy_over(cid, &image, old, growing).ok_or(Refusal::NicGone)?;
        journal::note_next_name(nic_memory, next.next_generation());
        journal::grown(nic_memory, cid.slot(), next, new);
        self.connection.cid = Some(next);
        if let Some(growing) = &mut self.connection.extra().growing {
            growing.unused = replaced;
        }
        if returns {
            self.connection.count_to((image.rcv_nxt, image.snd_una));
        }
        if let Some(on_nic) = &mut self.connection.on_nic {
            if !on_nic.move_to(new) {
                return Err(Refusal::NicGone);
            }
            if returns {
                on_nic.idleness.note_returned(&image);
            }
        }
        if new != old {
            let (now, sizes) = (monotonic_micros(), [new.receive.1, new.send.1].map(|size| size.ilog2() as u8));
            let grown = What::Grown(sizes[0], sizes[1]);
            self.connection.events.note(now, grown, Some(cid.nic() as u8), None, now.saturating_sub(self.began));
        }
        // Queued messages with the old cid are about the same connection: they get the new one.
        self.ground.nic().inbox.rename(cid, next);
        if let Wants::Larger(receive, send) = self.connection.wants() {
            self.use_more(&image, old, new, [receive > 0, send > 0], send);
        }
        self.write_location(base, &image, new, next);
        Ok(())
    }

    /// Lets the connection use what it has got. The shell's buffers grow as they would if the kernel ran the
    /// connection: it goes on with them after a restore, and reports their sizes to the program. `wants`: receive
    /// memory, send memory; `wanted` is how much of the latter.
    fn use_more(&mut self, image: &Image, old: Memory, new: Memory, wants: [bool; 2], wanted: u32) {
        let (Some(cid), Ok(fd)) = (self.connection.cid, self.connection.fd()) else { return };
        let limits = memory::Limits::of(fd, self.ground.known);
        let b = &self.connection.block;
        let mut flags = b.load(block::FLAGS);
        let mut window = memory::largest_window(self.ground.nic_memory, cid);
        if wants[0] {
            window = window.max(new.receive.1.min(limits.receive));
            if let Ok(buffer) = Buffer::read(fd, Side::Receive)
                && !buffer.fixed
                && let size = memory::buffer_for(window).min(limits.receive)
                && buffer.size < size
            {
                let _ = buffer.resize(fd, size);
            }
            flags = flags & !(block::REPORT_MASK << block::REPORT_SHIFT) | memory::report_bits(window);
        }
        limits.write(window, self.ground.nic_memory, cid);
        if wants[1]
            && let Ok(buffer) = send_buffer::of(fd)
        {
            let before = block::most_queued(flags);
            let expanded = send_buffer::expanded(fd, &buffer, image.cwnd, image.mss, limits.send);
            let buffer = match expanded.map(|size| buffer.resize(fd, size)) {
                Some(Ok(())) => send_buffer::of(fd).unwrap_or(buffer),
                _ => buffer,
            };
            let most = memory::most_queued(&buffer);
            // More memory than that is for a connection whose data flows, so that its program is woken less often.
            let flows = !buffer.fixed && wanted > before.max(old.send.1);
            let most = if flows { most.max(new.send.1) } else { most };
            flags = flags & !(block::QUEUE_MASK << block::QUEUE_SHIFT) | block::queue_bits(most);
        }
        b.set_flags(flags);
    }

    /// Returns the pages of a resting connection's empty memory, and of its slot's scratch, to the system. Nobody can
    /// write there now: the program is kept out, and the NIC holds the frames that arrive.
    fn return_pages(&self, cid: Cid, image: &Image, memory: Memory) {
        let nic_memory = self.ground.nic_memory;
        let ranges = ranges_of(nic_memory, cid);
        let unread = unread_by_program(self.connection, image.read_seq().wrapping_add(image.unread), image.unread);
        let (receive, send) = empty_memory(image, unread, ranges.as_deref());
        for (offset, size) in [receive.then_some(memory.receive), send.then_some(memory.send)].into_iter().flatten() {
            self.open.memory.discard(offset as usize, size as usize);
        }
        if ranges.is_none_or(|ranges| ranges.is_empty()) {
            journal::return_scratch(nic_memory, cid.slot());
        }
    }

    /// Copies the bytes of a resting connection: unread ones, out-of-order ones, unacknowledged and unsent ones that
    /// have not been copied yet.
    fn copy_over(&self, cid: Cid, image: &Image, old: Memory, growing: &Growing) -> Option<()> {
        let new = growing.larger;
        let circle = |(offset, size)| self.open.memory.circle(offset, size);
        if new.receive != old.receive {
            let (from, to) = (circle(old.receive)?, circle(new.receive)?);
            copy_bytes(&from, &to, image.read_seq(), image.unread);
            let ranges = ranges_of(self.ground.nic_memory, cid).unwrap_or_default();
            if ranges.len() == scratch::MOST_RANGES {
                // The NIC may hold more ranges than the table.
                copy_bytes(&from, &to, image.read_seq(), from.length());
            }
            for (left, right) in ranges {
                copy_bytes(&from, &to, left, right.wrapping_sub(left).min(from.length()));
            }
        }
        if new.send != old.send {
            let queue = image.send_queue();
            let copied = growing.copied.map_or(0, |end| end.wrapping_sub(image.snd_una));
            // All that was copied may have been acknowledged meanwhile.
            let done = if copied <= queue { copied } else { 0 };
            copy_bytes(&circle(old.send)?, &circle(new.send)?, image.snd_una.wrapping_add(done), queue - done);
        }
        Some(())
    }

    /// Writes the location of the connection's memory and its sequence numbers into its slot, for the NIC, and its
    /// block, for the program.
    fn write_location(&mut self, base: usize, image: &Image, memory: Memory, cid: Cid) {
        let nic_memory = self.ground.nic_memory;
        for (at, value) in [memory.receive.0, memory.receive.1, memory.send.0, memory.send.1].into_iter().enumerate() {
            nic_memory.word32(base + slot::PARAMETERS + 4 + 4 * at).store(value, Ordering::Release);
        }
        let b = &self.connection.block;
        nic_memory.word32(base + slot::READ).store(b.load(block::READ_SEQ), Ordering::Release);
        write_block(self.connection, image, memory, cid);
        let fins = u32::from(image.state.fin_received()) | u32::from(image.state.fin_queued()) << 1;
        b.set_flags(b.load(block::FLAGS) & !3 | fins);
        self.connection.block.count_move();
        self.connection.block.note_moves();
    }

    /// Makes the NIC continue in the larger memory. The old one is free when it has.
    pub(super) fn resume(&mut self) -> Outcome {
        let (Some(next), Some(growing)) = (self.connection.cid, self.connection.growing()) else {
            return Outcome::Refused(Refusal::NicGone);
        };
        let command = Message::control(Operation::NicControl, Control::Resume, growing.cid, next.0, 0);
        // Notifications with the new cid may reach the program before the answer comes.
        self.open.note_move(self.connection.number());
        self.send(&Action::Resume, command)
    }
}

/// What the NIC has received out of order. None if it never published a record.
fn ranges_of(nic_memory: &Region, cid: Cid) -> Option<Vec<(u32, u32)>> {
    let record = read_record(nic_memory, nic::slot(cid.slot()))?;
    Some(read_ranges(nic_memory, cid.slot(), &record))
}

fn copy_bytes(from: &Circle, to: &Circle, mut seq: u32, length: u32) {
    let mut piece = [0u8; PIECE];
    let mut left = length as usize;
    while left > 0 {
        let part = &mut piece[..left.min(PIECE)];
        from.read(seq, part);
        to.write(seq, part);
        seq = seq.wrapping_add(part.len() as u32);
        left -= part.len();
    }
}
