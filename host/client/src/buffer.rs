//! Buffers into which the NIC puts received bytes, and from which it takes bytes to be sent, without a copy by the
//! program.

use crate::connection::Connection;
use crate::heap::Heap;
use crate::shared::Shared;
use baton_abi::layout::{POSTS, POSTS_UNANSWERED, session};
use baton_ring::Token;
use baton_shm::Region;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that are copied at a time from the kernel's socket.
const PIECE: usize = 1 << 14;

/// The part of session memory that is reserved for buffers.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    heap: Arc<Mutex<Heap>>,
    memory: Arc<Region>,
}

impl Store {
    /// The store of a session. The session's datagram rings take memory from it, too.
    pub fn new(shared: &Shared) -> Store {
        Store { heap: shared.buffers.clone(), memory: shared.memory().clone() }
    }

    fn heap(&self) -> std::sync::MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn buffer(&self, length: usize) -> io::Result<Buffer> {
        let length =
            u32::try_from(length).ok().filter(|length| (1..=1 << 28).contains(length)).ok_or(io::ErrorKind::InvalidInput)?;
        let block = self.heap().take(length).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Buffer { block: Arc::new(Block { store: self.clone(), block }), length })
    }

    /// Takes memory for the table of sends from buffers, which lives as long as the session. Returns its offset.
    pub fn table(&self) -> Option<u32> {
        let (at, size) = self.heap().take((session::MAX_CONNECTIONS * session::BUFFERS_SENT_BYTES) as u32)?;
        // Zeroed, since the memory may have been a buffer before, and an unused entry has to be zero.
        self.memory.discard(at as usize, size as usize);
        self.memory.word32(session::BUFFERS_SENT).store(at, Ordering::Release);
        Some(at)
    }
}

/// Memory that returns to the heap when its last user drops it.
#[derive(Debug)]
pub(crate) struct Block {
    store: Store,
    block: (u32, u32),
}

impl Drop for Block {
    fn drop(&mut self) {
        self.store.heap().give(self.block.0, self.block.1);
    }
}

/// Memory that the NIC can reach, for [`crate::Session::post`] and [`crate::Session::send_buffer`].
#[derive(Debug)]
pub struct Buffer {
    block: Arc<Block>,
    length: u32,
}

impl Buffer {
    /// Its bytes. The NIC can write them at any time, so they are atomics. Their number never changes, and a NIC that
    /// works correctly leaves a buffer alone once it was returned ([`crate::Session::take_posted`]).
    pub fn bytes(&self) -> &[AtomicU8] {
        self.block.store.memory.bytes(self.address() as usize, self.length as usize).unwrap_or_default()
    }

    /// Its offset in session memory.
    pub(crate) fn address(&self) -> u32 {
        self.block.block.0
    }

    /// Its memory, which is not given to another buffer while this is kept.
    pub(crate) fn block(&self) -> Arc<Block> {
        self.block.clone()
    }

    /// Copies bytes out, from `at` on, as many as there are.
    pub fn read(&self, at: usize, out: &mut [u8]) {
        for (to, from) in out.iter_mut().zip(self.bytes().get(at..).unwrap_or_default()) {
            *to = from.load(Ordering::Relaxed);
        }
    }

    /// Copies bytes in, from `at` on, as many as there is room for.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        let room = (self.length as usize).saturating_sub(at);
        let _ = self.block.store.memory.write(self.address() as usize + at, &bytes[..bytes.len().min(room)]);
    }
}

/// A buffer that was posted, and has all the bytes that it will get.
#[derive(Debug)]
pub struct Filled {
    /// The buffer.
    pub buffer: Buffer,
    /// Bytes received into it. Fewer than its length only at the end of the stream.
    pub length: usize,
    /// How many of them the NIC has put there itself. The others were copied: they had arrived before the buffer was
    /// posted, or the kernel had the connection, or the NIC had no room for another buffer.
    pub placed: usize,
}

#[derive(Debug)]
struct Post {
    filled: Filled,
    /// Whether the NIC was given the buffer.
    sent: bool,
    /// The first sequence number that the NIC puts into the buffer; None until the NIC has answered.
    start: Option<u32>,
}

/// The buffers posted on a connection, in order.
#[derive(Debug, Default)]
pub(crate) struct Posts {
    list: VecDeque<Post>,
    /// Moves that the connection had made when buffers were last given to the NIC.
    moves: u32,
}

fn would_block() -> io::Error {
    io::ErrorKind::WouldBlock.into()
}

impl Posts {
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub fn add(&mut self, buffer: Buffer) {
        self.list.push_back(Post { filled: Filled { buffer, length: 0, placed: 0 }, sent: false, start: None });
    }

    /// Reads the NIC's answers, and gives the NIC as many buffers as it accepts. The caller has entered the connection,
    /// which is on the NIC.
    pub fn sync(&mut self, shared: &Shared, connection: &Connection, token: Token) -> io::Result<()> {
        if self.moves != connection.moves() {
            // The connection has moved since, so its present NIC has none of the buffers.
            self.moves = connection.moves();
            self.list.iter_mut().for_each(|post| (post.sent, post.start) = (false, None));
        }
        shared.with_events(token, |round| {
            let mut answers = round.events.posted.get_mut(&connection.number());
            for post in self.list.iter_mut().filter(|post| post.sent && post.start.is_none()) {
                post.start = answers.as_mut().and_then(|answers| answers.pop_front());
            }
        });
        let unanswered = self.list.iter().filter(|post| post.sent && post.start.is_none()).count();
        let more = POSTS_UNANSWERED.saturating_sub(unanswered);
        for post in self.list.iter_mut().take(POSTS).filter(|post| !post.sent).take(more) {
            let Filled { buffer, length, .. } = &post.filled;
            shared.post(connection, token, buffer.address() + *length as u32, buffer.length - *length as u32)?;
            post.sent = true;
        }
        Ok(())
    }

    /// Fills the first buffer from the NIC. Returns it once it is full, or the stream has ended.
    pub fn advance(&mut self, shared: &Shared, connection: &Connection, token: Token) -> io::Result<Filled> {
        self.sync(shared, connection, token)?;
        shared.catch_up(token);
        // Again, since the answers may just have arrived.
        self.sync(shared, connection, token)?;
        let readiness = shared.readiness(connection, token);
        let Some(post) = self.list.front_mut() else { return Err(io::ErrorKind::InvalidInput.into()) };
        let Some(start) = post.start else { return Err(would_block()) };
        let Filled { buffer, length, placed } = &mut post.filled;
        let mut left = readiness.unread.min(buffer.length - *length as u32);
        let over = left == 0;
        // Bytes that arrived before the NIC had the buffer are in receive memory.
        let mut early = start.wrapping_sub(connection.read_seq());
        early = if early < 1 << 31 { early.min(left) } else { 0 };
        let mut bytes = [0; PIECE];
        while early > 0 {
            let piece = &mut bytes[..PIECE.min(early as usize)];
            let got = shared.receive(connection, token, piece)?;
            buffer.write(*length, &piece[..got]);
            (*length, early, left) = (*length + got, early - got as u32, left - got as u32);
        }
        if left > 0 {
            shared.consume(connection, token, left)?;
            (*length, *placed) = (*length + left as usize, *placed + left as usize);
        }
        if *length == buffer.length as usize {
            shared.report_all_read(connection, token)?;
            return self.take();
        }
        if over {
            // No more bytes will arrive. The next receiving call returns the reason.
            return if readiness.fin || readiness.ended.is_some() { self.take() } else { Err(would_block()) };
        }
        Err(would_block())
    }

    /// Fills the first buffer from the kernel's socket, as [`Posts::advance`] does from the NIC.
    pub fn advance_in_kernel(&mut self, mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<Filled> {
        let mut bytes = [0; PIECE];
        loop {
            let Some(post) = self.list.front_mut() else { return Err(io::ErrorKind::InvalidInput.into()) };
            let Filled { buffer, length, .. } = &mut post.filled;
            let got = receive(&mut bytes[..PIECE.min(buffer.length as usize - *length)])?;
            buffer.write(*length, &bytes[..got]);
            *length += got;
            if got == 0 || *length == buffer.length as usize {
                return self.take();
            }
        }
    }

    fn take(&mut self) -> io::Result<Filled> {
        self.list.pop_front().map(|post| post.filled).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }
}
