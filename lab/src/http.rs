//! A small HTTP server over the client library, and a load of HTTP requests from ordinary sockets that checks every byte.
//!
//! `GET /KEY/LENGTH` answers with the first LENGTH bytes of stream KEY, so that any answer can be checked by whoever asked.

use anyhow::{Context, Result, bail};
use baton_client::{ConnectionId, Session};
use baton_kernel::events::{Poller, Trigger, monotonic_micros};
use baton_kernel::socket;
use baton_sim::stream;
use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Largest answer.
const MAX_LENGTH: u64 = 1 << 30;

/// What is known of one connection of the server.
#[derive(Default)]
struct Conversation {
    request: Vec<u8>,
    /// Answer bytes that have been made and not sent.
    answer: Vec<u8>,
    sent: usize,
    /// Stream, position and end of a body that is still being made.
    body: Option<(u64, u64, u64)>,
    closing: bool,
}

impl Conversation {
    /// Makes answers for the requests that are complete.
    fn understand(&mut self) {
        while self.body.is_none() {
            let Some(end) = self.request.windows(4).position(|window| window == b"\r\n\r\n") else { return };
            let head = String::from_utf8_lossy(&self.request[..end]).into_owned();
            self.request.drain(..end + 4);
            self.closing |= head.lines().any(|line| line.eq_ignore_ascii_case("connection: close"));
            match parse_path(&head) {
                Some((key, length)) => {
                    let _ = write!(
                        self.answer,
                        "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nContent-Type: application/octet-stream\r\n\r\n"
                    );
                    self.body = Some((key, 0, length));
                    self.make_body();
                }
                None => self.answer.extend_from_slice(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
            }
        }
    }

    fn make_body(&mut self) {
        if let Some((key, position, end)) = &mut self.body {
            let step = (*end - *position).min(1 << 16) as usize;
            let start = self.answer.len();
            self.answer.resize(start + step, 0);
            stream::fill(*key, *position, &mut self.answer[start..]);
            *position += step as u64;
            if position == end {
                self.body = None;
            }
        }
    }
}

fn parse_path(head: &str) -> Option<(u64, u64)> {
    let path = head.strip_prefix("GET /")?.split_whitespace().next()?;
    let (key, length) = path.split_once('/')?;
    let (key, length) = (key.parse().ok()?, length.parse().ok()?);
    (length <= MAX_LENGTH).then_some((key, length))
}

/// Serves until the process is ended. Every connection that is accepted is the agent's to move.
///
/// # Errors
/// If it cannot listen, or there is no agent.
pub fn serve(listen: SocketAddr, agent: &Path) -> Result<()> {
    let listener = TcpListener::bind(listen).with_context(|| format!("listening on {listen}"))?;
    listener.set_nonblocking(true)?;
    socket::use_cubic(listener.as_fd())?;
    // Whoever started the server holds its input open; with it the server ends.
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(0);
    });
    let mut session = Session::connect(agent)?;
    session.watch(listener.as_fd())?;
    println!("{}", session.number());
    let mut conversations: HashMap<ConnectionId, Conversation> = HashMap::new();
    let mut ready = Vec::new();
    loop {
        session.poll(None, &mut ready)?;
        while let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let id = session.adopt(OwnedFd::from(stream))?;
            conversations.insert(id, Conversation::default());
        }
        for id in ready.drain(..) {
            let Some(conversation) = conversations.get_mut(&id) else { continue };
            match converse(&mut session, id, conversation) {
                Ok(true) => {}
                result @ (Ok(false) | Err(_)) => {
                    if let Err(error) = result {
                        eprintln!("demo server: connection {id} {:?}: {error}", session.place(id));
                    }
                    conversations.remove(&id);
                    // A peer that is gone leaves nothing to say.
                    let _ = session.close(id);
                }
            }
        }
    }
}

/// Reads and answers until both would block. False when the connection is over.
fn converse(session: &mut Session, id: ConnectionId, conversation: &mut Conversation) -> io::Result<bool> {
    let mut buffer = [0u8; 16384];
    loop {
        match session.receive(id, &mut buffer) {
            Ok(0) => return Ok(false),
            Ok(got) => conversation.request.extend_from_slice(&buffer[..got]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    conversation.understand();
    while conversation.sent < conversation.answer.len() {
        match session.send(id, &conversation.answer[conversation.sent..]) {
            Ok(sent) => conversation.sent += sent,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) => return Err(error),
        }
        if conversation.sent == conversation.answer.len() {
            conversation.answer.clear();
            conversation.sent = 0;
            conversation.make_body();
            conversation.understand();
        }
    }
    Ok(!conversation.closing)
}

/// Counters that a load shares with whoever watches it.
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
    /// The load shall end.
    pub stop: AtomicBool,
    /// Latencies are being taken.
    pub timing: AtomicBool,
}

/// One client connection: one request at a time.
struct Client {
    socket: TcpStream,
    key: u64,
    asked_at: u64,
    received: Vec<u8>,
    /// Bytes of head and body that the answer has.
    expected: Option<(usize, usize)>,
    alive: bool,
}

/// Asks `length` bytes again and again on each of `connections` connections to `server`, one request at a time on each, and returns
/// latencies in microseconds. Runs in the calling thread's namespace until the counters say stop.
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
        clients.push(Client { socket, key: at as u64, asked_at: 0, received: Vec::new(), expected: None, alive: true });
    }
    let mut buffer = vec![0u8; 65536];
    for client in &mut clients {
        client.ask(length);
    }
    let mut tokens = Vec::new();
    let mut times = Vec::new();
    while !counters.stop.load(Ordering::Relaxed) {
        poller.wait(Some(Duration::from_millis(20)), &mut tokens)?;
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
        self.key = self.key.wrapping_add(1 << 20);
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
            self.ask(length);
        }
    }
}
