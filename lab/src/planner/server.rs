//! The program that the planner measures: it reads requests, each of which says how long it and its answer are, and
//! answers what it has read together in as few writes as the kernel takes. It knows nothing of Baton.

use anyhow::{Context, Result};
use baton_linux::process::raise_descriptor_limit;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;

/// Bytes of a request's head: its length, the head included, its answer's, and calls on the socket that the program is
/// to make besides; all little endian.
pub const HEAD: usize = 12;
const LISTENER: Token = Token(usize::MAX);
/// Bytes that are read and written at once.
const PIECE: usize = 256 << 10;

/// A request's head.
pub fn head(request: u32, answer: u32, calls: u32) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    for (place, number) in head.chunks_exact_mut(4).zip([request, answer, calls]) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    head
}

struct Client {
    stream: TcpStream,
    /// What has come of a head.
    head: Vec<u8>,
    /// Bytes of a request that are still to come, and of its answer.
    missing: u32,
    answer: u32,
    /// Bytes of answers that are still to be written.
    owed: u64,
}

/// Serves at `address` until it is killed.
///
/// # Errors
/// If it cannot listen.
pub fn run(address: SocketAddr) -> Result<()> {
    raise_descriptor_limit();
    let mut poll = Poll::new()?;
    let mut listener = TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    let mut clients: HashMap<Token, Client> = HashMap::new();
    let (mut events, mut buffer, mut next) = (Events::with_capacity(256), vec![0; PIECE], 0);
    loop {
        match poll.poll(&mut events, None) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            polled => polled?,
        }
        for event in &events {
            if event.token() == LISTENER {
                while let Ok((mut stream, _)) = listener.accept() {
                    let token = Token(next);
                    next += 1;
                    let _ = stream.set_nodelay(true);
                    poll.registry().register(&mut stream, token, Interest::READABLE)?;
                    clients.insert(token, Client { stream, head: Vec::new(), missing: 0, answer: 0, owed: 0 });
                }
            } else if let Some(client) = clients.get_mut(&event.token()) {
                let owed = client.owed > 0;
                if client.serve(&mut buffer).is_err() {
                    clients.remove(&event.token());
                } else if owed != (client.owed > 0) {
                    // Only who has to wait asks to be told of room.
                    let interest = if owed { Interest::READABLE } else { Interest::READABLE | Interest::WRITABLE };
                    poll.registry().reregister(&mut client.stream, event.token(), interest)?;
                }
            }
        }
    }
}

impl Client {
    /// Reads and answers until there is nothing to read, or no room to write.
    fn serve(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        self.write(buffer)?;
        loop {
            match self.stream.read(buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(got) => {
                    self.take(&buffer[..got])?;
                    self.write(buffer)?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes note of the requests in what has come.
    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.missing > 0 {
                let skipped = bytes.len().min(self.missing as usize);
                bytes = &bytes[skipped..];
                self.missing -= skipped as u32;
            } else {
                let taken = bytes.len().min(HEAD - self.head.len());
                self.head.extend_from_slice(&bytes[..taken]);
                bytes = &bytes[taken..];
                let Ok(head) = <[u8; HEAD]>::try_from(&self.head[..]) else { return Ok(()) };
                self.head.clear();
                let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
                self.missing = number(0).checked_sub(HEAD as u32).ok_or(ErrorKind::InvalidData)?;
                self.answer = number(4);
                for _ in 0..number(8) {
                    self.stream.set_nodelay(true)?;
                }
            }
            if self.missing == 0 {
                self.owed += u64::from(std::mem::take(&mut self.answer));
            }
        }
        Ok(())
    }

    /// Writes answers as far as there is room.
    fn write(&mut self, buffer: &[u8]) -> io::Result<()> {
        while self.owed > 0 {
            let length = self.owed.min(buffer.len() as u64) as usize;
            match self.stream.write(&buffer[..length]) {
                Ok(written) => self.owed -= written as u64,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
