//! Sending from a program's own buffers: the NIC takes the bytes from there, again if need be, until the peer has
//! acknowledged them (the send queue of (address, length) pairs, handoff paper, section 4.3).

use crate::buffer::{Block, Buffer, Store};
use crate::connection::Connection;
use crate::shared::{Shared, send_from, takes_buffers};
use baton_abi::layout::{BUFFERS_SENT, Owner, session};
use baton_ring::Token;
use baton_shm::Region;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes that are copied at a time if the NIC cannot take them from the buffer.
const PIECE: usize = 1 << 16;

/// The session's table of sends from buffers, which is made at the first such send.
#[derive(Debug, Default)]
pub(crate) struct Table {
    at: Option<u32>,
    /// There was no memory for it.
    refused: bool,
}

impl Table {
    fn get(&mut self, store: &Store) -> Option<u32> {
        if self.at.is_none() && !self.refused {
            self.at = store.table();
            self.refused = self.at.is_none();
        }
        self.at
    }

    /// Clears entries of the previous connection with this number.
    pub fn clear(&self, memory: &Region, connection: u32) {
        let Some(table) = self.at else { return };
        (0..BUFFERS_SENT).for_each(|entry| clear(memory, table, connection, entry));
    }
}

/// Offset of an entry.
fn entry_at(table: u32, connection: u32, entry: usize) -> usize {
    table as usize + connection as usize * session::BUFFERS_SENT_BYTES + 16 * entry
}

fn clear(memory: &Region, table: u32, connection: u32, entry: usize) {
    memory.word32(entry_at(table, connection, entry) + 8).store(0, Ordering::Release);
}

/// Bytes that were queued by one call.
#[derive(Debug)]
struct Part {
    /// The sequence number behind the last of them.
    end: u32,
    /// Its entry of the table, and the buffer's memory; None if the bytes were copied.
    entry: Option<(usize, Arc<Block>)>,
}

/// What one connection has sent from buffers.
#[derive(Debug, Default)]
pub(crate) struct Sends {
    /// In order; those on the NIC.
    parts: VecDeque<Part>,
    /// Moves that the connection had made when they were queued. Once the connection has moved since, their bytes are
    /// in send memory or in the kernel.
    moves: u32,
    /// Number of calls whose bytes are no longer needed and that [`Sends::take_done`] has not returned yet.
    done: usize,
}

impl Sends {
    /// The number of calls, in their order, whose bytes were released since the last call of this function.
    pub fn take_done(&mut self) -> usize {
        std::mem::take(&mut self.done)
    }

    /// Whether the NIC may still read from a buffer.
    pub fn any(&self) -> bool {
        self.parts.iter().any(|part| part.entry.is_some())
    }

    /// Releases the bytes that the peer has acknowledged, and all if the connection has moved, or has ended on the NIC.
    pub fn release(&mut self, shared: &Shared, table: &Table, connection: &Connection, token: Token) {
        if self.parts.is_empty() {
            return;
        }
        let owner = connection.owner();
        if owner == Owner::Moving {
            return;
        }
        let readiness = shared.readiness(connection, token);
        let all = owner != Owner::Nic || connection.moves() != self.moves || readiness.ended.is_some();
        let acknowledged = connection.queued.load(Ordering::Relaxed).wrapping_sub(readiness.queued);
        while let Some(part) = self.parts.front() {
            if !all && (acknowledged.wrapping_sub(part.end) as i32) < 0 {
                break;
            }
            if let (Some((entry, _)), Some(table)) = (&part.entry, table.at) {
                clear(shared.memory(), table, connection.number(), *entry);
            }
            self.parts.pop_front();
            self.done += 1;
        }
    }

    /// Queues a part of a buffer, as much as there is room for. Returns how much. The caller has entered the
    /// connection, which is on the NIC. The bytes are copied if the NIC cannot take them from the buffer.
    pub fn send(
        &mut self,
        (shared, store, table): (&Shared, &Store, &mut Table),
        connection: &Connection,
        token: Token,
        buffer: &Buffer,
        range: Range<usize>,
    ) -> io::Result<usize> {
        self.release(shared, table, connection, token);
        self.moves = connection.moves();
        let used = |entry: &usize| self.parts.iter().any(|part| part.entry.as_ref().is_some_and(|(used, _)| used == entry));
        let free = (0..BUFFERS_SENT).find(|entry| !used(entry)).filter(|_| takes_buffers(shared));
        let Some((entry, table)) = free.zip(table.get(store)) else {
            let sent = copied(buffer, range, |bytes| shared.send(connection, token, bytes))?;
            self.parts.push_back(Part { end: connection.queued.load(Ordering::Relaxed), entry: None });
            return Ok(sent);
        };
        let address = buffer.address() + range.start as u32;
        let note = |seq: u32, length: u32| {
            let at = entry_at(table, connection.number(), entry);
            for (word, value) in [seq, address, length].into_iter().enumerate() {
                shared.memory().word32(at + 4 * word).store(value, Ordering::Release);
            }
        };
        let sent = send_from(shared, connection, token, (address, range.len()), note)?;
        let end = connection.queued.load(Ordering::Relaxed);
        self.parts.push_back(Part { end, entry: Some((entry, buffer.block())) });
        Ok(sent)
    }

    /// As `send`, for a connection in the kernel; the argument `send` writes to its socket.
    pub fn send_in_kernel(
        &mut self,
        buffer: &Buffer,
        range: Range<usize>,
        send: impl FnOnce(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let sent = copied(buffer, range, send)?;
        self.done += 1;
        Ok(sent)
    }
}

/// Copies the first bytes of a part of a buffer and passes them to `send`.
fn copied(buffer: &Buffer, range: Range<usize>, send: impl FnOnce(&[u8]) -> io::Result<usize>) -> io::Result<usize> {
    let mut bytes = vec![0; range.len().min(PIECE)];
    buffer.read(range.start, &mut bytes);
    send(&bytes)
}
