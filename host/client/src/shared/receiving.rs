//! A program's receives, and when they are reported to the NIC.

use super::events::catch_up_here;
use super::{RELAXED, Shared, bad_address, would_block};
use crate::connection::{Connection, Inside};
use baton_abi::{Message, Operation};
use baton_ring::Token;
use std::io;
use std::sync::atomic::{Ordering, fence};

/// Most bytes that are asked for at once (Linux, MAX_RW_COUNT): a call for more may be refused.
const LARGEST: usize = 0x7fff_f000;

/// The result of [`Shared::receive_at_once`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Received {
    /// As much as was asked for, at least a byte.
    All,
    /// So many bytes; 0 if the fast path does not serve the call.
    Some(usize),
}

#[inline(always)]
fn take_after_all(shared: &Shared, connection: &Connection, block: Inside<'_>, token: Token, out: &mut [u8]) -> usize {
    let read = connection.read.load(RELAXED);
    let unread = || connection.received.load(RELAXED).wrapping_sub(read) as usize;
    let mut length = out.len();
    if length > unread() {
        if length > LARGEST {
            return 0;
        }
        catch_up_here(shared, token);
        length = length.min(unread());
    }
    if length == 0 {
        return 0;
    }
    let (end, out) = (read.wrapping_add(length as u32), &mut out[..length]);
    if !should_report(connection, end)
        && let Some(is_written) = connection.receive_memory().read_straight(read, out)
    {
        if !is_written {
            return 0;
        }
        connection.note_read(block, end);
        return length;
    }
    shared.take_and_report(connection, block, token, out)
}

impl Shared {
    /// Fast path of [`Shared::enter`], [`Shared::receive`] and leaving: bytes have arrived, and some are wanted.
    /// `Some(0)`, with nothing received, in any other case, also if no bytes are wanted.
    #[inline(always)]
    pub fn receive_at_once(&self, connection: &Connection, token: Token, out: &mut [u8]) -> Received {
        let Some(block) = connection.step_in(token) else { return Received::Some(0) };
        let read = connection.read.load(RELAXED);
        let end = read.wrapping_add(out.len() as u32);
        let unread = connection.received.load(RELAXED).wrapping_sub(read) as usize;
        // After the copy only the block is needed, so fewer registers have to be saved. No bytes are as many as never
        // come.
        if out.len().wrapping_sub(1) < unread
            && !should_report(connection, end)
            && let Some(is_written) = connection.receive_memory().read_straight(read, out)
        {
            if !is_written {
                block.leave_unserved();
                return Received::Some(0);
            }
            connection.note_read(block, end);
            block.step_out();
            fence(Ordering::SeqCst);
            block.wake_mover();
            return Received::All;
        }
        Received::Some(self.receive_after_all(connection, block, token, out))
    }

    /// The slow part of [`Shared::receive_at_once`], if fewer bytes are known to have arrived than were asked for, they
    /// wrap around, or have to be reported to the NIC. Leaves the connection.
    #[cold]
    #[inline(never)]
    fn receive_after_all(&self, connection: &Connection, block: Inside<'_>, token: Token, out: &mut [u8]) -> usize {
        let done = take_after_all(self, connection, block, token, out);
        block.step_out();
        fence(Ordering::SeqCst);
        block.wake_mover();
        done
    }

    /// Receives bytes that have all arrived, but may wrap around the end of receive memory, or after which a report
    /// to the NIC is due.
    #[inline(never)]
    pub(super) fn take_and_report(&self, connection: &Connection, block: Inside<'_>, token: Token, out: &mut [u8]) -> usize {
        let read = connection.read.load(RELAXED);
        let end = read.wrapping_add(out.len() as u32);
        if connection.is_unmapped() || !connection.receive_memory().read(read, out) {
            return 0;
        }
        if should_report(connection, end) && self.report_read(connection, token, end).is_err() {
            return 0;
        }
        connection.note_read(block, end);
        out.len()
    }

    /// `nic_recvd`: reports that the program has read up to `read`.
    pub(super) fn report_read(&self, connection: &Connection, token: Token, read: u32) -> io::Result<()> {
        if self.has_ended() {
            return Ok(());
        }
        let length = read.wrapping_sub(connection.reported_read.load(RELAXED));
        let message = Message::new(Operation::NicRecvd, connection.cid(), 0, length);
        let lane = self.lane(connection);
        let Some(mut commands) = lane.commands.lock(token) else { return Err(would_block()) };
        lane.put(&mut commands, message)?;
        connection.note_reported(read);
        commands.publish();
        drop(commands);
        lane.ring_nic();
        Ok(())
    }

    /// Bytes that can be received now after the first `skip` unread ones, at most `wanted`; 0 at the end of the stream,
    /// or if none are wanted. The caller has entered the connection, which is on the NIC.
    #[inline(always)]
    pub(super) fn unread(&self, connection: &Connection, token: Token, skip: u32, wanted: usize) -> io::Result<usize> {
        let known = connection.received.load(RELAXED).wrapping_sub(connection.read.load(RELAXED)).saturating_sub(skip);
        if (known as usize) < wanted {
            return self.unread_after_all(connection, token, skip, wanted);
        }
        Ok(wanted)
    }

    #[inline(never)]
    pub(super) fn unread_after_all(&self, connection: &Connection, token: Token, skip: u32, wanted: usize) -> io::Result<usize> {
        self.catch_up(token);
        loop {
            // The end is read before the count: other threads handle the NIC's events, too, and the end comes after the
            // last byte.
            let over = connection.is_over();
            let unread = connection.received.load(RELAXED).wrapping_sub(connection.read.load(RELAXED)).saturating_sub(skip);
            if unread > 0 {
                return Ok(wanted.min(unread as usize));
            }
            if over {
                // The end of the stream comes before an error, which stays for the next call that writes (as in Linux).
                if connection.fin.load(RELAXED) {
                    return Ok(0);
                }
                return match connection.take_error() {
                    0 => Ok(0),
                    error => Err(io::Error::from_raw_os_error(error as i32)),
                };
            }
            if !connection.is_over() {
                return Err(would_block());
            }
        }
    }

    /// Receives bytes. Returns how many; 0 at the end of the stream. The caller has entered the connection, which is on
    /// the NIC.
    ///
    /// # Errors
    /// `WouldBlock` if none have arrived, EFAULT if they cannot be written there ([`baton_shm::guarded`]; they stay
    /// unread), else the error that ended the connection.
    #[inline(always)]
    pub fn receive(&self, connection: &Connection, token: Token, out: &mut [u8]) -> io::Result<usize> {
        let length = self.unread(connection, token, 0, out.len())?;
        if length == 0 {
            return Ok(0);
        }
        let read = connection.read.load(RELAXED);
        if !connection.receive_memory().read(read, &mut out[..length]) {
            return Err(bad_address());
        }
        self.consume(connection, token, length as u32)?;
        Ok(length)
    }

    /// Marks bytes as read that [`Shared::peek`] has returned. The caller has entered the connection, which is on the
    /// NIC.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full.
    #[inline(always)]
    pub fn consume(&self, connection: &Connection, token: Token, length: u32) -> io::Result<()> {
        let read = connection.read.load(RELAXED).wrapping_add(length);
        if should_report(connection, read) {
            self.report_read(connection, token, read)?;
        }
        connection.note_read(connection.inside(), read);
        Ok(())
    }

    /// As [`Shared::consume`], for a connection that is being moved, by the process that restores it.
    ///
    /// # Errors
    /// None.
    pub fn note_read(&self, connection: &Connection, length: u32) -> io::Result<()> {
        connection.note_read(connection.inside(), connection.read.load(RELAXED).wrapping_add(length));
        Ok(())
    }

    /// As [`Shared::receive`], but drops the bytes.
    ///
    /// # Errors
    /// See there.
    pub fn skip(&self, connection: &Connection, token: Token, most: usize) -> io::Result<usize> {
        let length = self.available(connection, token, 0, most)?;
        if length > 0 {
            self.consume(connection, token, length as u32)?;
        }
        Ok(length)
    }

    /// Bytes that [`Shared::peek`] would return.
    ///
    /// # Errors
    /// As [`Shared::receive`].
    pub fn available(&self, connection: &Connection, token: Token, skip: u32, most: usize) -> io::Result<usize> {
        self.unread(connection, token, skip, most)
    }

    /// As [`Shared::receive`], from `skip` bytes after the first unread one, and the bytes stay unread.
    ///
    /// # Errors
    /// See there.
    pub fn peek(&self, connection: &Connection, token: Token, skip: u32, out: &mut [u8]) -> io::Result<usize> {
        let length = self.unread(connection, token, skip, out.len())?;
        if length == 0 {
            return Ok(0);
        }
        let from = connection.read.load(RELAXED).wrapping_add(skip);
        if !connection.receive_memory().read(from, &mut out[..length]) {
            return Err(bad_address());
        }
        Ok(length)
    }
}

/// Whether reads up to `read` should be reported to the NIC: a small part of the memory opens no window.
/// After a move the next owner reads the position from the block.
#[inline(always)]
fn should_report(connection: &Connection, read: u32) -> bool {
    read.wrapping_sub(connection.report_at.load(RELAXED)) as i32 >= 0
}
