//! Buffers that the NIC puts received bytes into, without a copy by the program.

use crate::connection::Connection;
use crate::heap::Heap;
use crate::shared::Shared;
use baton_abi::layout::{POSTS, session};
use baton_ring::Token;
use baton_shm::Region;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that are copied at a time where there is no way around that.
const PIECE: usize = 1 << 14;

/// The part of session memory that is for buffers.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    heap: Arc<Mutex<Heap>>,
    memory: Arc<Region>,
}

impl Store {
    pub fn new(memory: Arc<Region>) -> Store {
        let heap = Heap::new(session::heap_end(memory.len()), memory.len());
        Store { heap: Arc::new(Mutex::new(heap)), memory }
    }

    fn heap(&self) -> std::sync::MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn buffer(&self, length: usize) -> io::Result<Buffer> {
        let length =
            u32::try_from(length).ok().filter(|length| (1..=1 << 28).contains(length)).ok_or(io::ErrorKind::InvalidInput)?;
        let block = self.heap().take(length).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Buffer { store: self.clone(), block, length })
    }
}

/// Memory that the NIC can write into, for [`crate::Session::post`].
#[derive(Debug)]
pub struct Buffer {
    store: Store,
    block: (u32, u32),
    length: u32,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.store.heap().give(self.block.0, self.block.1);
    }
}

impl Buffer {
    /// Its bytes. The NIC can reach them at any time, so they are atomics: the length never changes, and what a buffer holds that was given
    /// back ([`crate::Session::take_posted`]) a sound NIC leaves alone.
    pub fn bytes(&self) -> &[AtomicU8] {
        self.store.memory.bytes(self.block.0 as usize, self.length as usize).unwrap_or_default()
    }

    /// Copies bytes out, as many as there are from `at` on.
    pub fn read(&self, at: usize, out: &mut [u8]) {
        for (to, from) in out.iter_mut().zip(self.bytes().get(at..).unwrap_or_default()) {
            *to = from.load(Ordering::Relaxed);
        }
    }

    fn write(&self, at: u32, bytes: &[u8]) {
        let _ = self.store.memory.write((self.block.0 + at) as usize, bytes);
    }
}

/// A buffer that was posted, and has what it will get.
#[derive(Debug)]
pub struct Filled {
    /// The buffer.
    pub buffer: Buffer,
    /// Bytes received into it: fewer than it has only at the end of the stream.
    pub length: usize,
    /// How many of them the NIC has put there itself. The others were copied: they had come before the buffer was posted, or the kernel had
    /// the connection, or the NIC had no room for another buffer.
    pub placed: usize,
}

#[derive(Debug)]
struct Post {
    filled: Filled,
    /// The NIC knows of it.
    told: bool,
    /// The first sequence number that the NIC puts into it, once it has said so.
    start: Option<u32>,
}

/// The buffers that are posted on a connection, in order.
#[derive(Debug, Default)]
pub(crate) struct Posts {
    list: VecDeque<Post>,
    /// The moves that the connection had made when the NIC was told.
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
        self.list.push_back(Post { filled: Filled { buffer, length: 0, placed: 0 }, told: false, start: None });
    }

    /// Tells the NIC of as many buffers as it takes, and hears what it says of them. The connection must be entered, and the NIC's.
    pub fn tell(&mut self, shared: &Shared, connection: &Connection, token: Token) -> io::Result<()> {
        if self.moves != connection.moves() {
            // Another NIC, or the same one after the kernel: it knows of none.
            self.moves = connection.moves();
            self.list.iter_mut().for_each(|post| (post.told, post.start) = (false, None));
        }
        for post in self.list.iter_mut().take(POSTS).filter(|post| !post.told) {
            let Filled { buffer, length, .. } = &post.filled;
            shared.post(connection, token, buffer.block.0 + *length as u32, buffer.length - *length as u32)?;
            post.told = true;
        }
        let mut answers = connection.posted.lock().unwrap_or_else(PoisonError::into_inner);
        for post in self.list.iter_mut().filter(|post| post.told && post.start.is_none()) {
            post.start = answers.pop_front();
        }
        Ok(())
    }

    /// Takes what has come on the NIC. The first buffer, if it is full, or the stream is over.
    pub fn advance(&mut self, shared: &Shared, connection: &Connection, token: Token) -> io::Result<Filled> {
        self.tell(shared, connection, token)?;
        shared.catch_up(token);
        // Again: the answers may just have come.
        self.tell(shared, connection, token)?;
        let readiness = shared.readiness(connection, token);
        let Some(post) = self.list.front_mut() else { return Err(io::ErrorKind::InvalidInput.into()) };
        let Some(start) = post.start else { return Err(would_block()) };
        let Filled { buffer, length, placed } = &mut post.filled;
        let mut left = readiness.unread.min(buffer.length - *length as u32);
        let over = left == 0;
        // What came before the buffer was known lies where it always does.
        let mut early = start.wrapping_sub(connection.read_seq());
        early = if early < 1 << 31 { early.min(left) } else { 0 };
        let mut bytes = [0; PIECE];
        while early > 0 {
            let piece = &mut bytes[..PIECE.min(early as usize)];
            let got = shared.receive(connection, token, piece)?;
            buffer.write(*length as u32, &piece[..got]);
            (*length, early, left) = (*length + got, early - got as u32, left - got as u32);
        }
        if left > 0 {
            shared.consume(connection, token, left)?;
            (*length, *placed) = (*length + left as usize, *placed + left as usize);
        }
        if *length == buffer.length as usize {
            shared.tell_all(connection, token)?;
            return self.take();
        }
        if over {
            // Nothing more comes, for what reason the next call that receives tells.
            return if readiness.fin || readiness.ended.is_some() { self.take() } else { Err(would_block()) };
        }
        Err(would_block())
    }

    /// The same from the kernel's socket.
    pub fn advance_in_kernel(&mut self, mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<Filled> {
        let mut bytes = [0; PIECE];
        loop {
            let Some(post) = self.list.front_mut() else { return Err(io::ErrorKind::InvalidInput.into()) };
            let Filled { buffer, length, .. } = &mut post.filled;
            let got = receive(&mut bytes[..PIECE.min(buffer.length as usize - *length)])?;
            buffer.write(*length as u32, &bytes[..got]);
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
