//! The clients of one thread: an event loop over their sockets and their lines' times.

use super::answer::Answer;
use super::tally::Tally;
use super::{Progress, WebLoad, files};
use crate::web_mix::{Line, Mix, Request};
use anyhow::{Context, Result};
use baton_linux::events::{Poller, Trigger, monotonic_micros};
use baton_linux::{process, socket};
use baton_sim::stream;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Microseconds between the first connections of two clients, if the load is long enough: a server's queue of new
/// connections is short.
const BETWEEN_STARTS: u64 = 1000;
/// Of a load, the part in which all clients begin.
const STARTING: f64 = 0.2;
/// Microseconds after which a client that nothing comes for gives its connection up.
const SILENCE: u64 = 30_000_000;
/// Microseconds between two looks for those.
const LOOK: u64 = 1_000_000;
/// Microseconds that a client rests after something went wrong.
const REST: u64 = 100_000;
/// Seconds of its line that a client reads at once, and bytes at least and at most.
const PIECE: f64 = 0.05;
const PIECES: [f64; 2] = [1460.0, 65_536.0];
/// Reads of one client before it is the others' turn: a server may send without end what is no file.
const READS: usize = 16;
/// Bytes of a receive buffer where the line is limited: what waits there has crossed the network faster than the line
/// would have carried it.
const RECEIVE_BUFFER: i32 = 32 << 10;
/// The time of a client that waits for its socket alone.
const NEVER: u64 = u64::MAX;
/// Numbers of setsockopt(2).
const SOL_SOCKET: i32 = 1;
const SO_RCVBUF: i32 = 8;
/// Errors of a process, and of a machine, that has no more descriptors.
const EMFILE: i32 = 24;
const ENFILE: i32 = 23;

/// What a client waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Doing {
    /// The time of its next request.
    Pausing,
    Connecting,
    /// Room for the rest of its request.
    Asking,
    Receiving,
}

/// A client.
struct Client {
    doing: Doing,
    socket: Option<TcpStream>,
    /// Requests that this connection is still to carry, and those that it has carried.
    left: u64,
    carried: u64,
    /// The present request: what of it is not sent yet, and when it was made.
    request: Request,
    unsent: Vec<u8>,
    asked_at: u64,
    /// Its answer, the bytes of it that were compared, those that were wrong, and when the first one came.
    answer: Answer,
    compared: u64,
    wrong: u64,
    first_at: Option<u64>,
    line: Line,
    /// The socket may have something to read.
    readable: bool,
    /// When something has come or gone last, and when the client's own next step is.
    moved_at: u64,
    wakes_at: u64,
    /// When it began, and what it has had since.
    begun: Option<u64>,
    bytes: u64,
    requests: u64,
    errors: u64,
}

impl Client {
    fn new(rate: f64) -> Client {
        Client {
            doing: Doing::Pausing,
            socket: None,
            left: 0,
            carried: 0,
            request: Request { directory: 0, class: 0, file: 0, dynamic: false },
            unsent: Vec::new(),
            asked_at: 0,
            answer: Answer::default(),
            compared: 0,
            wrong: 0,
            first_at: None,
            line: Line::new(rate),
            readable: false,
            moved_at: 0,
            wakes_at: NEVER,
            begun: None,
            bytes: 0,
            requests: 0,
            errors: 0,
        }
    }

    /// Compares what has come of an answer. Whether it is whole.
    fn compare(&mut self, mut bytes: &[u8]) -> Result<bool, String> {
        loop {
            let piece = self.answer.body(&mut bytes)?;
            if !matches!(self.answer.status(), 0 | 200) {
                return Err(format!("status {}", self.answer.status()));
            }
            let Some(piece) = piece else { break };
            if piece.len() as u64 > self.request.bytes() - self.compared {
                return Err("an answer is longer than the file".to_owned());
            }
            self.wrong += stream::mismatches(files::key(&self.request), self.compared, piece);
            self.compared += piece.len() as u64;
        }
        if !self.answer.is_done() {
            return Ok(false);
        }
        if !bytes.is_empty() {
            return Err("bytes come behind an answer".to_owned());
        }
        self.is_file().map(|()| true)
    }

    /// Checks that an answer that is whole is not too short.
    fn is_file(&self) -> Result<(), String> {
        if self.compared < self.request.bytes() { Err("an answer is shorter than the file".to_owned()) } else { Ok(()) }
    }

    /// Whether it has got enough from its beginning until `now`.
    fn conforms(&self, least: f64, now: u64) -> bool {
        let Some(begun) = self.begun else { return false };
        let until = self.line.free_at().max(now).max(begun + 1);
        let rate = self.bytes as f64 * 8e6 / (until - begun) as f64;
        rate >= least && (self.errors == 0 || self.errors * 100 < self.requests)
    }
}

/// A thread's clients.
pub(super) struct Worker<'a> {
    load: &'a WebLoad,
    server: SocketAddr,
    progress: &'a Progress,
    poller: Poller,
    mix: Mix,
    /// The numbers of the clients among all of the load's.
    numbers: Vec<usize>,
    clients: Vec<Client>,
    /// Times at which clients go on. One is out of date if the client has another time by now.
    agenda: BinaryHeap<Reverse<(u64, usize)>>,
    tally: Tally,
    buffer: Vec<u8>,
}

impl<'a> Worker<'a> {
    /// The clients with these numbers.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn new(load: &'a WebLoad, server: SocketAddr, numbers: Vec<usize>, progress: &'a Progress) -> Result<Worker<'a>> {
        // A thread's requests differ from others' by its first client's number.
        let seed = load.seed.wrapping_add(numbers.first().map_or(0, |first| *first as u64) << 32);
        let piece = (load.rate / 8.0 * PIECE).clamp(PIECES[0], PIECES[1]) as usize;
        Ok(Worker {
            load,
            server,
            progress,
            poller: Poller::new()?,
            mix: Mix::over(load.directories, load.dynamic, seed),
            clients: numbers.iter().map(|_| Client::new(load.rate)).collect(),
            numbers,
            agenda: BinaryHeap::new(),
            tally: Tally::default(),
            buffer: vec![0; piece],
        })
    }

    /// Runs them from `begun` to `end`, or until the load is to end before.
    ///
    /// # Errors
    /// The system's. What goes wrong with a connection is counted.
    pub(super) fn run(mut self, begun: u64, end: u64) -> Result<Tally> {
        process::sleep_exactly();
        let apart = ((end - begun) as f64 * STARTING / self.load.connections as f64).min(BETWEEN_STARTS as f64);
        for at in 0..self.clients.len() {
            self.wake_at(at, begun + (self.numbers[at] as f64 * apart) as u64);
        }
        let (mut tokens, mut look_at) = (Vec::new(), begun + LOOK);
        loop {
            let now = monotonic_micros();
            if now >= end || self.progress.stop.load(Ordering::Relaxed) {
                break;
            }
            while let Some(Reverse((time, at))) = self.agenda.peek().copied()
                && time <= now
            {
                self.agenda.pop();
                if self.clients[at].wakes_at == time {
                    self.clients[at].wakes_at = NEVER;
                    self.wakes(at, now)?;
                }
            }
            if now >= look_at {
                look_at = now + LOOK;
                self.look_for_silence(now);
            }
            let next = self.agenda.peek().map_or(end, |Reverse((time, _))| *time).min(look_at).min(end);
            let wait = Duration::from_micros(next.saturating_sub(monotonic_micros()));
            self.poller.wait(Some(wait), &mut tokens)?;
            let now = monotonic_micros();
            for token in tokens.drain(..) {
                self.ready(token as usize, now);
            }
        }
        let (now, least) = (monotonic_micros(), self.load.least());
        self.tally.conforming = self.clients.iter().filter(|client| client.conforms(least, now)).count();
        self.tally.bytes = self.clients.iter().map(|client| client.bytes).sum();
        Ok(self.tally)
    }

    /// A client goes on at this time, and at no other that was set before.
    fn wake_at(&mut self, at: usize, time: u64) {
        // Each segment that comes while the line is busy asks for the same time again.
        if std::mem::replace(&mut self.clients[at].wakes_at, time) != time {
            self.agenda.push(Reverse((time, at)));
        }
    }

    /// A client's time has come.
    fn wakes(&mut self, at: usize, now: u64) -> Result<()> {
        match self.clients[at].doing {
            Doing::Pausing => self.go_on(at, now),
            Doing::Receiving => {
                self.receive(at, now);
                Ok(())
            }
            Doing::Connecting | Doing::Asking => Ok(()),
        }
    }

    /// A client's socket is readable, writable or closed. The event may be of one that the client has closed since;
    /// then there is nothing to do yet.
    fn ready(&mut self, at: usize, now: u64) {
        self.clients[at].readable = true;
        match self.clients[at].doing {
            Doing::Pausing => {}
            Doing::Connecting => self.connected(at, now),
            Doing::Asking => self.send(at, now),
            Doing::Receiving => self.receive(at, now),
        }
    }

    /// The next request, on the same connection if that is to carry another one.
    fn go_on(&mut self, at: usize, now: u64) -> Result<()> {
        let client = &mut self.clients[at];
        client.begun.get_or_insert(now);
        let Some(connection) = client.socket.as_ref().filter(|_| client.left > 0) else { return self.connect(at, now) };
        // A request on a connection that the server has closed meanwhile would be lost.
        match socket::receive(connection.as_fd(), &mut [0]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                client.readable = false;
                self.ask(at, now);
            }
            Err(error) => self.fault(at, now, broken(&error)),
            Ok(0) => {
                self.tally.closed_idle += 1;
                return self.connect(at, now);
            }
            Ok(_) => self.fault(at, now, "bytes come behind an answer".to_owned()),
        }
        Ok(())
    }

    fn connect(&mut self, at: usize, now: u64) -> Result<()> {
        // The old one's descriptor is free then.
        self.clients[at].socket = None;
        match self.open(at) {
            Ok(socket) => {
                let requests = self.load.keep.requests(&mut self.mix);
                let client = &mut self.clients[at];
                (client.socket, client.doing, client.readable) = (Some(socket), Doing::Connecting, false);
                (client.left, client.carried, client.moved_at) = (requests, 0, now);
            }
            Err(error) if matches!(error.raw_os_error(), Some(EMFILE | ENFILE)) => return Err(error).context("making a socket"),
            Err(error) => {
                self.clients[at].doing = Doing::Connecting;
                self.fault(at, now, format!("connecting: {error}"));
            }
        }
        Ok(())
    }

    /// Begins to connect.
    fn open(&self, at: usize) -> io::Result<TcpStream> {
        let connection = TcpStream::from(socket::stream(self.server.is_ipv6(), 0)?);
        connection.set_nodelay(true)?;
        if self.load.rate.is_finite() {
            socket::set(connection.as_fd(), SOL_SOCKET, SO_RCVBUF, RECEIVE_BUFFER)?;
        }
        socket::begin_connecting(connection.as_fd(), self.server)?;
        self.poller.add(connection.as_fd(), at as u64, Trigger::Edge)?;
        Ok(connection)
    }

    /// A connection is made, or is not, or not yet.
    fn connected(&mut self, at: usize, now: u64) {
        let Some(connection) = &self.clients[at].socket else { return };
        match connection.take_error() {
            Ok(None) if connection.peer_addr().is_err() => {}
            Ok(None) => {
                self.tally.opened += 1;
                self.ask(at, now);
            }
            Ok(Some(error)) | Err(error) => self.fault(at, now, format!("connecting: {error}")),
        }
    }

    fn ask(&mut self, at: usize, now: u64) {
        let request = self.mix.request();
        let client = &mut self.clients[at];
        client.left -= 1;
        client.unsent = self.load.text(&request, client.left == 0).into_bytes();
        (client.request, client.asked_at, client.moved_at) = (request, now, now);
        (client.answer, client.compared, client.wrong, client.first_at) = (Answer::default(), 0, 0, None);
        client.doing = Doing::Asking;
        self.send(at, now);
    }

    fn send(&mut self, at: usize, now: u64) {
        let client = &mut self.clients[at];
        let Some(connection) = &client.socket else { return };
        while !client.unsent.is_empty() {
            match socket::send(connection.as_fd(), &client.unsent) {
                Ok(sent) => {
                    client.unsent.drain(..sent);
                    client.moved_at = now;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => return self.fault(at, now, broken(&error)),
            }
        }
        client.doing = Doing::Receiving;
        self.receive(at, now);
    }

    /// Reads as much as the line can carry now, [`READS`] times at most.
    fn receive(&mut self, at: usize, now: u64) {
        for _ in 0..READS {
            let client = &mut self.clients[at];
            let Some(connection) = client.socket.as_ref().filter(|_| client.readable) else { return };
            if client.line.free_at() > now {
                let time = client.line.free_at();
                return self.wake_at(at, time);
            }
            let got = match socket::receive(connection.as_fd(), &mut self.buffer) {
                Ok(got) => got,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    client.readable = false;
                    return;
                }
                Err(error) => return self.fault(at, now, broken(&error)),
            };
            if got == 0 {
                return self.ended(at, now);
            }
            client.first_at.get_or_insert(now);
            client.moved_at = now;
            client.bytes += got as u64;
            client.line.carry(got as u64, now);
            self.progress.bytes.fetch_add(got as u64, Ordering::Relaxed);
            match client.compare(&self.buffer[..got]) {
                Ok(false) => {}
                Ok(true) => return self.answered(at, now),
                Err(what) => return self.fault(at, now, what),
            }
        }
        // Not `now`: those whose time has come by then are all run before anything else.
        self.wake_at(at, now + 1);
    }

    /// The server has closed a connection while the client waited for an answer.
    fn ended(&mut self, at: usize, now: u64) {
        let client = &mut self.clients[at];
        if client.answer.end() {
            return match client.is_file() {
                Ok(()) => self.answered(at, now),
                Err(what) => self.fault(at, now, what),
            };
        }
        if client.first_at.is_none() && client.carried > 0 {
            // It had closed it before it saw the request, as it may: another connection is to carry one.
            (client.doing, client.left) = (Doing::Pausing, 0);
            self.tally.closed_idle += 1;
            return self.wake_at(at, now);
        }
        self.fault(at, now, "the server closed a connection before its answer was whole".to_owned());
    }

    /// An answer is whole. The next request follows when the line has carried it.
    fn answered(&mut self, at: usize, now: u64) {
        let client = &mut self.clients[at];
        let free_at = client.line.free_at().max(now);
        let milliseconds = |time: u64| (time - client.asked_at) as f64 / 1e3;
        let times = (milliseconds(client.first_at.unwrap_or(now)), milliseconds(free_at));
        client.requests += 1;
        client.carried += 1;
        client.doing = Doing::Pausing;
        if !client.answer.keeps() {
            client.left = 0;
        }
        let (request, wrong) = (client.request, std::mem::take(&mut client.wrong));
        if wrong > 0 {
            client.errors += 1;
            self.tally.wrong_bytes += wrong;
            self.tally.fault("wrong bytes".to_owned(), Some(self.load.target(&request)));
            self.progress.errors.fetch_add(1, Ordering::Relaxed);
        }
        self.tally.answered(&request, times.0, times.1);
        self.progress.requests.fetch_add(1, Ordering::Relaxed);
        self.wake_at(at, free_at);
    }

    /// Counts what went wrong, and gives the connection up.
    fn fault(&mut self, at: usize, now: u64, what: String) {
        let client = &mut self.clients[at];
        let example = (client.doing != Doing::Connecting).then(|| self.load.target(&client.request));
        client.errors += 1;
        (client.socket, client.left, client.doing) = (None, 0, Doing::Pausing);
        let time = client.line.free_at().max(now) + REST;
        self.tally.wrong_bytes += std::mem::take(&mut client.wrong);
        self.tally.fault(what, example);
        self.progress.errors.fetch_add(1, Ordering::Relaxed);
        self.wake_at(at, time);
    }

    /// Gives up connections on which nothing comes.
    fn look_for_silence(&mut self, now: u64) {
        for at in 0..self.clients.len() {
            let client = &self.clients[at];
            // While the line is busy the client does not look.
            let since = client.moved_at.max(client.line.free_at());
            if client.doing != Doing::Pausing && now.saturating_sub(since) > SILENCE {
                self.fault(at, now, format!("nothing came for {} s", SILENCE / 1_000_000));
            }
        }
    }
}

/// What is said of a connection that broke: the same for the same error, so that it is counted together.
fn broken(error: &io::Error) -> String {
    format!("the connection broke: {error}")
}
