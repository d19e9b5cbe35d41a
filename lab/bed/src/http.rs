//! A load of HTTP requests from ordinary sockets that checks every byte: `GET /KEY/LENGTH` returns the first LENGTH
//! bytes of stream KEY.

use anyhow::{Context, Result, bail};
use baton_linux::events::{Poller, Trigger, monotonic_micros};
use baton_linux::socket;
use baton_sim::stream;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Counters that a load shares with its observer.
#[derive(Default)]
pub struct LoadCounters {
    /// Requests answered and checked.
    pub requests: AtomicU64,
    /// Body bytes checked.
    pub bytes: AtomicU64,
    /// Bytes that were wrong.
    pub mismatches: AtomicU64,
    /// Connections that broke.
    pub broken: AtomicU64,
    /// Whether new requests are made.
    pub active: AtomicBool,
    /// Whether the load is to end.
    pub stop: AtomicBool,
    /// Whether latencies are recorded.
    pub timing: AtomicBool,
}

/// One client connection: one request at a time.
struct Client {
    socket: TcpStream,
    key: u64,
    asked_at: u64,
    received: Vec<u8>,
    /// Bytes of the answer's head and body.
    expected: Option<(usize, usize)>,
    alive: bool,
    /// Whether it has no request under way.
    idle: bool,
}

/// Keys of the streams: from 0 on.
pub const KEYS: u64 = 256;

/// While it is active, requests `length` bytes again and again on each of `connections` connections to `server`, one
/// request at a time on each. Returns latencies in microseconds. Runs in the calling thread's namespace until the
/// counters say stop.
///
/// # Errors
/// If it cannot connect. What breaks later is counted.
pub fn load(
    server: SocketAddr,
    connections: usize,
    length: usize,
    counters: &LoadCounters,
    latencies: &std::sync::Mutex<Vec<u32>>,
) -> Result<()> {
    let poller = Poller::new()?;
    let mut clients = Vec::new();
    for at in 0..connections {
        let socket = TcpStream::connect_timeout(&server, Duration::from_secs(10)).context("connecting to the server")?;
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        socket::use_cubic(socket.as_fd())?;
        poller.add(socket.as_fd(), at as u64, Trigger::Edge)?;
        clients.push(Client {
            socket,
            key: at as u64,
            asked_at: 0,
            received: Vec::new(),
            expected: None,
            alive: true,
            idle: true,
        });
    }
    let mut buffer = vec![0u8; 65536];
    let mut active = false;
    let mut tokens = Vec::new();
    let mut times = Vec::new();
    while !counters.stop.load(Ordering::Relaxed) {
        poller.wait(Some(Duration::from_millis(20)), &mut tokens)?;
        if active != counters.active.load(Ordering::Relaxed) {
            active = !active;
            if active {
                clients.iter_mut().filter(|client| client.alive && client.idle).for_each(|client| client.ask(length));
            }
        }
        for token in tokens.drain(..) {
            let Some(client) = clients.get_mut(token as usize) else { continue };
            if client.alive
                && let Err(error) = client.advance(length, &mut buffer, counters, &mut times)
            {
                client.alive = false;
                eprintln!("connection {token} broke: {error:#}");
                counters.broken.fetch_add(1, Ordering::Relaxed);
            }
        }
        if counters.timing.load(Ordering::Relaxed) {
            if times.len() > 256
                && let Ok(mut all) = latencies.lock()
            {
                all.append(&mut times);
            }
        } else {
            times.clear();
        }
    }
    Ok(())
}

impl Client {
    fn ask(&mut self, length: usize) {
        self.idle = false;
        self.key = (self.key + 1) % KEYS;
        self.asked_at = monotonic_micros();
        let request = format!("GET /{}/{length} HTTP/1.1\r\nHost: a\r\n\r\n", self.key);
        // One small request fits an empty send queue.
        self.alive &= socket::send(self.socket.as_fd(), request.as_bytes()).is_ok_and(|sent| sent == request.len());
    }

    fn advance(&mut self, length: usize, buffer: &mut [u8], counters: &LoadCounters, times: &mut Vec<u32>) -> Result<()> {
        loop {
            match socket::receive(self.socket.as_fd(), buffer) {
                Ok(0) => bail!("the server closed"),
                Ok(got) => self.received.extend_from_slice(&buffer[..got]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            if self.expected.is_none()
                && let Some(end) = self.received.windows(4).position(|window| window == b"\r\n\r\n")
            {
                self.expected = Some((end + 4, length));
            }
            let Some((head, body)) = self.expected.filter(|(head, body)| self.received.len() >= head + body) else { continue };
            times.push((monotonic_micros() - self.asked_at) as u32);
            let wrong = stream::mismatches(self.key, 0, &self.received[head..head + body]);
            counters.mismatches.fetch_add(wrong + (self.received.len() - head - body) as u64, Ordering::Relaxed);
            counters.bytes.fetch_add(body as u64, Ordering::Relaxed);
            counters.requests.fetch_add(1, Ordering::Relaxed);
            self.received.clear();
            self.expected = None;
            if !counters.active.load(Ordering::Relaxed) {
                self.idle = true;
                return Ok(());
            }
            self.ask(length);
        }
    }
}
