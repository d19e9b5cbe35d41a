//! Loads from ordinary sockets: requests that each wait for the answers before, or one direction as fast as it goes.
//! They count while they run, so that any stretch of them can be measured.

use anyhow::{Context, Result, ensure};
use baton_bed::statistics::Percentiles;
use baton_linux::events::{Poller, Trigger, monotonic_nanos};
use baton_linux::socket;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Waiting times that are recorded together: of many connections, and of one that waits for each answer.
const KEPT: usize = 1024;
const KEPT_OF_ONE: usize = 32;
/// After so long a call for bulk data returns, so that it is seen whether it has to stop.
const PATIENCE: Duration = Duration::from_millis(100);

/// What a load shares with whoever measures it.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests answered, or bytes transferred.
    pub done: AtomicU64,
    /// Whether waiting times are recorded.
    pub timing: AtomicBool,
    /// Waiting times in nanoseconds.
    pub times: Mutex<Vec<u32>>,
    /// Whether the load is to end.
    pub stop: AtomicBool,
    /// Process of a client that is another program; 0 for none.
    pub client_process: AtomicU32,
    /// Set to start that client anew: what it has measured by then does not count.
    pub anew: AtomicBool,
    /// The waiting times that it has measured, in milliseconds.
    pub waits: Mutex<Option<Percentiles>>,
}

impl Progress {
    /// Records a load's waiting times, if they are to be recorded, when there are so many.
    fn keep(&self, times: &mut Vec<u32>, many: usize) {
        if !self.timing.load(Ordering::Relaxed) {
            times.clear();
        } else if times.len() >= many
            && let Ok(mut all) = self.times.lock()
        {
            all.append(times);
        }
    }
}

/// Sets a flag for which other threads look, however this one ends.
pub struct SetsAtEnd<'a>(pub &'a AtomicBool);

impl Drop for SetsAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Requests of one kind, whose answers all have one length.
#[derive(Clone, Debug)]
pub struct Requests {
    /// Connections.
    pub connections: usize,
    /// Requests that are sent at once on a connection.
    pub depth: usize,
    /// One request.
    pub request: Vec<u8>,
    /// Bytes of an answer.
    pub answer: usize,
}

/// Sends one request and returns the number of bytes of its answer, as `complete` finds it.
///
/// # Errors
/// If the server does not answer.
pub fn answer_length(server: SocketAddr, request: &[u8], complete: impl Fn(&[u8]) -> Option<usize>) -> Result<usize> {
    let mut stream = TcpStream::connect_timeout(&server, Duration::from_secs(10)).context("connecting to the server")?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(request)?;
    let (mut received, mut buffer) = (Vec::new(), [0u8; 4096]);
    loop {
        let got = stream.read(&mut buffer).context("waiting for the server's first answer")?;
        ensure!(got > 0, "the server closed the connection: {:?}", String::from_utf8_lossy(&received));
        received.extend_from_slice(&buffer[..got]);
        if let Some(length) = complete(&received) {
            return Ok(length);
        }
    }
}

fn connect(server: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&server, Duration::from_secs(10)).context("connecting to the server")?;
    socket::use_cubic(stream.as_fd())?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Nanoseconds since a moment.
fn since(moment: u64) -> u32 {
    u32::try_from(monotonic_nanos() - moment).unwrap_or(u32::MAX)
}

struct Client {
    socket: TcpStream,
    since: u64,
    /// Bytes of answers that are still to come.
    missing: usize,
}

impl Requests {
    /// Runs until it has to stop.
    ///
    /// # Errors
    /// If a connection breaks or an answer is too long.
    pub fn run(&self, server: SocketAddr, progress: &Progress) -> Result<()> {
        let batch = self.request.repeat(self.depth);
        let poller = Poller::new()?;
        let mut clients = Vec::new();
        for at in 0..self.connections {
            let socket = connect(server)?;
            socket.set_nonblocking(true)?;
            poller.add(socket.as_fd(), at as u64, Trigger::Edge)?;
            clients.push(Client { socket, since: 0, missing: 0 });
        }
        for client in &mut clients {
            self.ask(client, &batch)?;
        }
        let (mut tokens, mut buffer) = (Vec::new(), vec![0u8; 1 << 16]);
        let mut times = Vec::new();
        while !progress.stop.load(Ordering::Relaxed) {
            poller.wait(Some(Duration::from_millis(20)), &mut tokens)?;
            for token in tokens.drain(..) {
                let client = &mut clients[token as usize];
                if self.answered(client, &mut buffer)? {
                    progress.done.fetch_add(self.depth as u64, Ordering::Relaxed);
                    times.push(since(client.since));
                    self.ask(client, &batch)?;
                }
            }
            progress.keep(&mut times, KEPT);
        }
        Ok(())
    }

    fn ask(&self, client: &mut Client, batch: &[u8]) -> Result<()> {
        (client.since, client.missing) = (monotonic_nanos(), self.answer * self.depth);
        let sent = socket::send(client.socket.as_fd(), batch).context("sending a request")?;
        ensure!(sent == batch.len(), "requests do not fit the send queue");
        Ok(())
    }

    /// Reads what has come. Whether nothing is missing any more.
    fn answered(&self, client: &mut Client, buffer: &mut [u8]) -> Result<bool> {
        while client.missing > 0 {
            match socket::receive(client.socket.as_fd(), buffer) {
                Ok(0) => anyhow::bail!("the server closed a connection"),
                Ok(got) => {
                    ensure!(got <= client.missing, "an answer is longer than the first one was");
                    client.missing -= got;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error).context("a connection broke"),
            }
        }
        Ok(true)
    }
}

/// Sends or receives on one connection until it has to stop, or the other side ends.
///
/// # Errors
/// If it cannot connect, or the connection breaks before it has to stop.
pub fn bulk(mut stream: TcpStream, sends: bool, progress: &Progress) -> Result<()> {
    socket::use_cubic(stream.as_fd())?;
    // The other side may be gone without a word.
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut buffer = vec![0x5a; 1 << 17];
    while !progress.stop.load(Ordering::Relaxed) {
        let moved = if sends { stream.write(&buffer) } else { stream.read(&mut buffer) };
        match moved {
            Ok(0) => break,
            Ok(count) => progress.done.fetch_add(count as u64, Ordering::Relaxed),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error).context("the connection broke"),
        };
    }
    Ok(())
}

/// How often a program that shares its processor looks in vain before it offers that to the other.
const LOOKS: u32 = 8;

/// When a program that never sleeps yields the processor that it shares with its partner. After a send it yields at
/// once: the answer cannot come before the partner has run. Otherwise it yields after [`LOOKS`] polls that found
/// nothing, because data may also come from a third process that runs elsewhere.
#[derive(Debug)]
pub struct Patience {
    shares: bool,
    left: u32,
}

impl Patience {
    /// With `shares` false it never offers the processor.
    pub fn new(shares: bool) -> Patience {
        Patience { shares, left: LOOKS }
    }

    /// After a look that found nothing, or one after which it has answered.
    pub fn looked(&mut self, answered: bool) {
        self.left = if answered { 0 } else { self.left.saturating_sub(1) };
        if self.shares && self.left == 0 {
            std::thread::yield_now();
            self.left = LOOKS;
        }
    }
}

/// Sends a message of `size` bytes and waits for as many, again and again until it has to stop. It never sleeps. With
/// `shares` it offers the processor as [`Patience`] says.
///
/// # Errors
/// If it cannot connect, or the connection breaks.
pub fn ping_pong(server: SocketAddr, size: usize, shares: bool, progress: &Progress) -> Result<()> {
    let mut stream = connect(server)?;
    stream.set_nonblocking(true)?;
    let (message, mut buffer, mut times) = (vec![0x5a; size], vec![0; size], Vec::new());
    let mut patience = Patience::new(shares);
    while !progress.stop.load(Ordering::Relaxed) {
        let sent = monotonic_nanos();
        stream.write_all(&message).context("sending a message")?;
        patience.looked(true);
        let mut missing = size;
        while missing > 0 && !progress.stop.load(Ordering::Relaxed) {
            match stream.read(&mut buffer[..missing]) {
                Ok(0) => anyhow::bail!("the echo closed the connection"),
                Ok(got) => missing -= got,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => patience.looked(false),
                Err(error) => return Err(error).context("the connection broke"),
            }
        }
        times.push(since(sent));
        progress.done.fetch_add(1, Ordering::Relaxed);
        progress.keep(&mut times, KEPT_OF_ONE);
    }
    Ok(())
}
