//! Answers requests in one thread, with no more of HTTP than that takes: servers with a thread for each client, as
//! tiny_http, have no limit on their number and time.
//!
//! No client can hold up another one, or use more than a bounded amount of memory: there
//! are at most [`MOST`], each has a limited time, and the oldest one of the user who has most makes room for a new one.

use super::http::{self, Answer, Received, Request};
use super::listener::{Listener, Stream};
use anyhow::{Context, Result};
use baton_linux::events::{Poller, Trigger, monotonic_micros};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::Duration;

/// Most clients at a time.
const MOST: usize = 32;

/// Microseconds that a client has for its request, for taking the answer, and for ending the connection then.
const REQUEST: u64 = 5_000_000;
const ANSWER: u64 = 10_000_000;
const END: u64 = 1_000_000;

/// Most bytes that are read of a client after its request.
const MOST_BEHIND: usize = 1 << 16;

/// Tokens of the poller; those of clients follow.
const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const CLIENTS: u64 = 2;

/// The state of a client.
enum State {
    /// Sends its request.
    Asks(Vec<u8>),
    /// Takes the answer: its head, its body, and how much of both it has.
    Takes(Vec<u8>, Rc<str>, usize),
    /// Has all, and may have sent so many bytes more. A connection that is closed with unread bytes is reset, and the
    /// client may lose what it has not read.
    Ends(usize),
}

struct Client {
    stream: Stream,
    /// Whose it is ([`Stream::user`]).
    user: Option<u32>,
    state: State,
    until: u64,
}

/// What the server counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Clients that were cut off: they were too slow, or others needed the room.
    pub cut_off: u64,
    /// Requests that were refused.
    pub refused: u64,
}

/// What is served.
pub trait Site {
    /// Answers a request of a client that may see the connections of `user` ([`Stream::user`]).
    fn answer(&mut self, request: &Request, user: Option<u32>, counts: Counts) -> Answer;
}

/// The server.
pub struct Server<S> {
    listener: Listener,
    poller: Poller,
    site: S,
    /// By token, which grows: the first one is the oldest.
    clients: BTreeMap<u64, Client>,
    next: u64,
    counts: Counts,
}

impl<S: Site> Server<S> {
    /// Serves a site to the clients of a listener.
    ///
    /// # Errors
    /// The system's.
    pub fn new(listener: Listener, site: S) -> Result<Server<S>> {
        let poller = Poller::new()?;
        poller.add(listener.as_fd(), LISTENER, Trigger::Readable)?;
        Ok(Server { listener, poller, site, clients: BTreeMap::new(), next: CLIENTS, counts: Counts::default() })
    }

    /// Serves until `ends` is readable.
    ///
    /// # Errors
    /// The system's.
    pub fn run(&mut self, ends: BorrowedFd<'_>) -> Result<()> {
        self.poller.add(ends, SIGNALS, Trigger::Readable)?;
        let mut tokens = Vec::new();
        loop {
            let first = self.clients.values().map(|client| client.until).min();
            let wait = first.map(|until| Duration::from_micros(until.saturating_sub(monotonic_micros())));
            self.poller.wait(wait, &mut tokens)?;
            for token in tokens.drain(..) {
                match token {
                    SIGNALS => return Ok(()),
                    LISTENER => self.accept()?,
                    client => self.serve(client),
                }
            }
            let now = monotonic_micros();
            let late: Vec<u64> = self.clients.iter().filter(|(_, client)| client.until <= now).map(|(token, _)| *token).collect();
            late.into_iter().for_each(|token| self.cut_off(token));
        }
    }

    /// Takes the clients that wait, but no more than there is room for: the others come next time.
    fn accept(&mut self) -> Result<()> {
        for _ in 0..MOST {
            let stream = match self.listener.accept() {
                Ok(stream) => stream,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted) =>
                {
                    return Ok(());
                }
                // No descriptor is left, for example.
                Err(_) if !self.clients.is_empty() => {
                    self.make_room(None);
                    return Ok(());
                }
                Err(error) => return Err(error).context("accepting a client"),
            };
            let user = stream.user();
            if self.clients.len() >= MOST {
                self.make_room(Some(user));
            }
            let token = self.next;
            self.next += 1;
            self.poller.add(stream.as_fd(), token, Trigger::Edge)?;
            let client = Client { stream, user, state: State::Asks(Vec::new()), until: monotonic_micros() + REQUEST };
            self.clients.insert(token, client);
            self.serve(token);
        }
        Ok(())
    }

    /// Cuts a client off to make room for a newcomer, whose user is given if it is known already.
    fn make_room(&mut self, newcomer: Option<Option<u32>>) {
        let users = self.clients.iter().map(|(token, client)| (*token, client.user));
        if let Some(token) = makes_room(users, newcomer) {
            self.cut_off(token);
        }
    }

    /// Ends a client's connection, and counts it if the client has not got its answer.
    fn cut_off(&mut self, token: u64) {
        if let Some(client) = self.clients.remove(&token)
            && !matches!(client.state, State::Ends(_))
        {
            self.counts.cut_off += 1;
        }
    }

    /// Goes on with a client as far as that is possible now.
    fn serve(&mut self, token: u64) {
        let Some(mut client) = self.clients.remove(&token) else { return };
        loop {
            match client.go_on() {
                Ok(Step::Waits) => {
                    self.clients.insert(token, client);
                    return;
                }
                // The descriptor leaves the poller with its end.
                Ok(Step::Over) | Err(_) => return,
                Ok(Step::Asked(received)) => {
                    let (head, body) = self.answer(&received, client.user);
                    client.state = State::Takes(head.into_bytes(), body, 0);
                    client.until = monotonic_micros() + ANSWER;
                }
                Ok(Step::Answered) => {
                    client.stream.end_sending();
                    client.state = State::Ends(0);
                    client.until = monotonic_micros() + END;
                }
            }
        }
    }

    /// The head and the body of the answer.
    fn answer(&mut self, received: &Received, user: Option<u32>) -> (String, Rc<str>) {
        let (answer, only_head) = match received {
            Received::Whole(request) => (self.site.answer(request, user, self.counts), request.head),
            Received::Refused(status, why) => (Answer::line(status, why), false),
            Received::More => (Answer::line("400 Bad Request", "the request is not whole"), false),
        };
        if answer.status.starts_with('4') {
            self.counts.refused += 1;
        }
        (answer.head(), if only_head { Rc::from("") } else { answer.body })
    }
}

/// Which of these clients, by token and user and the oldest first, makes room: the oldest one of the user who has most
/// with the newcomer, so that nobody is cut off by a user who has more.
fn makes_room(mut clients: impl Iterator<Item = (u64, Option<u32>)> + Clone, newcomer: Option<Option<u32>>) -> Option<u64> {
    let mut counts: BTreeMap<Option<u32>, usize> = BTreeMap::new();
    for user in clients.clone().map(|(_, user)| user).chain(newcomer) {
        *counts.entry(user).or_default() += 1;
    }
    // The newcomer's user may have no other one.
    let most = clients.clone().filter_map(|(_, user)| counts.get(&user)).max()?;
    clients.find(|(_, user)| counts.get(user) == Some(most)).map(|(token, _)| token)
}

/// The result of serving a client once more.
enum Step {
    Waits,
    Asked(Received),
    Answered,
    Over,
}

/// None if it would block.
fn done(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(None),
        Err(error) => Err(error),
    }
}

impl Client {
    fn go_on(&mut self) -> io::Result<Step> {
        let mut room = [0u8; 2048];
        loop {
            match &mut self.state {
                State::Asks(request) => {
                    let most = room.len().min(http::MOST - request.len());
                    match done(self.stream.read(&mut room[..most]))? {
                        None => return Ok(Step::Waits),
                        Some(0) => return Ok(Step::Over),
                        Some(count) => request.extend_from_slice(&room[..count]),
                    }
                    match http::read(request) {
                        Received::More => {}
                        received => return Ok(Step::Asked(received)),
                    }
                }
                State::Takes(head, body, taken) => {
                    let left = match head.get(*taken..).filter(|left| !left.is_empty()) {
                        Some(left) => left,
                        None => &body.as_bytes()[*taken - head.len()..],
                    };
                    if left.is_empty() {
                        return Ok(Step::Answered);
                    }
                    match done(self.stream.write(left))? {
                        None => return Ok(Step::Waits),
                        Some(count) => *taken += count,
                    }
                }
                State::Ends(behind) => match done(self.stream.read(&mut room))? {
                    None => return Ok(Step::Waits),
                    Some(0) => return Ok(Step::Over),
                    Some(count) => {
                        *behind += count;
                        if *behind > MOST_BEHIND {
                            return Ok(Step::Over);
                        }
                    }
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_most_clients_makes_room() {
        let (one, other) = (Some(33), Some(65_534));
        let of = |users: &[Option<u32>], newcomer| makes_room((2..).zip(users.iter().copied()), newcomer);
        assert_eq!(of(&[], None), None);
        assert_eq!(of(&[one, one, one], Some(one)), Some(2), "the oldest one");
        assert_eq!(of(&[one, other, other, None], Some(other)), Some(3));
        // Each has half: whoever comes once more has more.
        assert_eq!((of(&[one, other], Some(other)), of(&[one, other], Some(one))), (Some(3), Some(2)));
        assert_eq!(of(&[one, other, other], None), Some(3));
        // One of many users with a client each.
        assert_eq!(of(&[one, other], Some(None)), Some(2));
    }
}
