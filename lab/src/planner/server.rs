//! The program that the planner measures: it reads requests, each of which says how long it and its answer are, and
//! answers what it has read together in as few writes as the kernel takes. It knows nothing of Baton.

use anyhow::Result;
use baton_bed::clients::{self, Client, read};
use baton_linux::process::raise_descriptor_limit;
use mio::net::TcpStream;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;

/// Bytes of a request's head: its length, the head included, its answer's, and calls on the socket that the program is
/// to make besides; all little endian.
pub const HEAD: usize = 12;
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

/// A client and its requests.
#[derive(Default)]
struct Requests {
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
    clients::serve(address, PIECE, Requests::default)
}

impl Client for Requests {
    fn serve(&mut self, stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<()> {
        self.write(stream, buffer)?;
        while let Some(got) = read(stream, buffer)? {
            self.take(stream, &buffer[..got])?;
            self.write(stream, buffer)?;
        }
        Ok(())
    }

    fn waits(&self) -> bool {
        self.owed > 0
    }
}

impl Requests {
    /// Takes note of the requests in what has come.
    fn take(&mut self, stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
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
                    stream.set_nodelay(true)?;
                }
            }
            if self.missing == 0 {
                self.owed += u64::from(std::mem::take(&mut self.answer));
            }
        }
        Ok(())
    }

    /// Writes answers as far as there is room.
    fn write(&mut self, stream: &mut TcpStream, buffer: &[u8]) -> io::Result<()> {
        while self.owed > 0 {
            let length = self.owed.min(buffer.len() as u64) as usize;
            let Some(written) = clients::write(stream, &buffer[..length])? else { return Ok(()) };
            self.owed -= written as u64;
        }
        Ok(())
    }
}
