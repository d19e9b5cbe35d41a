//! The program that is measured, and its peer: TTCP's transmit and receive over ordinary blocking sockets. All bytes
//! are checked.

use anyhow::{Context, Result, bail, ensure};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

/// Period of the data: byte `n` of the stream is `n` modulo this. It divides no message size, so a byte in the wrong
/// place shows.
const PERIOD: usize = 251;
/// Bytes that the peer reads at a time.
const PEER_READS: usize = 1 << 17;

/// The peer's messages to the program, each answered in kind before the measurement: wait, begin, end.
const WAIT: u8 = 1;
const BEGIN: u8 = 2;
const END: u8 = 3;

/// Direction of the data, as the program sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// The program sends.
    Transmit,
    /// The program receives.
    Receive,
}

/// Data of which any piece of up to `most` bytes can be cut out.
fn data(most: usize) -> Vec<u8> {
    (0..most + PERIOD).map(|at| (at % PERIOD) as u8).collect()
}

/// The piece of the stream that begins at `at`.
fn piece(data: &[u8], at: u64, length: usize) -> &[u8] {
    &data[(at % PERIOD as u64) as usize..][..length]
}

/// Sends `bytes` bytes in messages of `size`.
fn transmit(stream: &mut TcpStream, size: usize, bytes: u64) -> std::io::Result<()> {
    let data = data(size);
    let mut sent = 0;
    while sent < bytes {
        let length = size.min((bytes - sent) as usize);
        stream.write_all(piece(&data, sent, length))?;
        sent += length as u64;
    }
    Ok(())
}

/// Receives `bytes` bytes, at most `size` at a time, and compares them.
fn receive(stream: &mut TcpStream, size: usize, bytes: u64) -> Result<()> {
    let data = data(size);
    let mut buffer = vec![0; size];
    let mut received = 0;
    while received < bytes {
        let wanted = size.min((bytes - received) as usize);
        let got = stream.read(&mut buffer[..wanted])?;
        ensure!(got > 0, "the connection ended after {received} of {bytes} bytes");
        ensure!(buffer[..got] == *piece(&data, received, got), "wrong bytes between {received} and {}", received + got as u64);
        received += got as u64;
    }
    Ok(())
}

/// The program: connects, answers until the measurement begins, transfers, and ends when its peer says so. With
/// `no_delay` no send waits for others (TCP_NODELAY).
///
/// # Errors
/// If the connection fails, or a byte is wrong.
pub fn run(peer: SocketAddr, direction: Direction, size: usize, bytes: u64, no_delay: bool) -> Result<()> {
    let mut stream = TcpStream::connect(peer).with_context(|| format!("connecting to {peer}"))?;
    if no_delay {
        stream.set_nodelay(true)?;
    }
    let mut word = [0];
    loop {
        stream.read_exact(&mut word)?;
        match word[0] {
            WAIT => stream.write_all(&word)?,
            BEGIN => break,
            other => bail!("unexpected word {other} from the peer"),
        }
    }
    match direction {
        Direction::Transmit => transmit(&mut stream, size, bytes)?,
        Direction::Receive => {
            receive(&mut stream, size, bytes)?;
            stream.write_all(&[END])?;
        }
    }
    // Nothing is sent after this, so whatever the library keeps back has to leave by itself.
    stream.read_exact(&mut word)?;
    Ok(())
}

/// The other end of a program's connection.
pub struct Peer(pub TcpStream);

impl Peer {
    /// One round trip before the measurement, so that the connection has a reason to move.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn exchange(&mut self) -> Result<()> {
        self.0.write_all(&[WAIT])?;
        self.0.read_exact(&mut [0])?;
        Ok(())
    }

    /// The transfer. It returns when all bytes have arrived where they should.
    ///
    /// # Errors
    /// If the connection fails, or a byte is wrong.
    pub fn transfer(&mut self, direction: Direction, size: usize, bytes: u64) -> Result<()> {
        self.0.write_all(&[BEGIN])?;
        match direction {
            Direction::Transmit => receive(&mut self.0, PEER_READS, bytes),
            Direction::Receive => {
                transmit(&mut self.0, size, bytes)?;
                Ok(self.0.read_exact(&mut [0])?)
            }
        }
    }

    /// Lets the program end.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn end(&mut self) -> Result<()> {
        Ok(self.0.write_all(&[END])?)
    }
}
