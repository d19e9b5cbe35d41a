//! Reads and writes of another program's memory, made of messages.
//!
//! A request names an operation, key, address and length. What is read or written follows as a message of its own,
//! tagged with the operation's number, for which the side that gets it posts a receive. So both go by RTS and CTS, and
//! data is placed where it belongs without a copy.
//!
//! | | initiator | target |
//! |---|---|---|
//! | write | request, contents | receives the contents into its region |
//! | read | posts a receive, request | sends the contents from its region |
//! | a key, address or length that is not allowed | | refusal; the contents of a write are discarded |
//!
//! A write of no bytes has contents of one, so that they are not received whole where it is refused.

use crate::arena::{Buffer, Slot};
use crate::endpoint::{Channel, Completion, Endpoint, Keys, Kind, Outgoing, Payload, Purpose, Selector, Token};
use baton_rmpp::{Delivered, Error, Limit, PeerId, ReceiveId};
use std::collections::{HashMap, VecDeque};

/// Bytes of a request.
const REQUEST: usize = 48;
/// Bytes of the contents of a write of none.
const INSTEAD: usize = 1;
/// Requests that may come before the first of them is handled.
const RECEIVES: usize = 32;
/// In the tag of what is read. So numbers of both sides' operations do not meet.
const READ_TAG: u64 = 1 << 63;
/// More operations than begin in a microsecond, as a power of two.
const OPERATIONS: u32 = 12;

/// What a peer wants with memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// To read it.
    Read,
    /// To write it.
    Write,
}

/// The memory of the program that peers may reach.
pub trait Regions<B>: Send {
    /// The buffer of `length` bytes at `address` of the region with this key; None if a peer may not have it.
    fn find(&self, key: u64, address: u64, length: u64, access: Access) -> Option<B>;
}

/// Memory of a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remote {
    /// Whose it is.
    pub peer: PeerId,
    /// The region's key.
    pub key: u64,
    /// Where in the region.
    pub address: u64,
}

/// A read or write of a peer's memory.
#[derive(Debug)]
pub struct Transfer<B> {
    /// The peer's memory.
    pub remote: Remote,
    /// Ours.
    pub payload: Payload<B>,
    /// Passed to the peer with a write; bit 63 says that there is something.
    pub data: u64,
    /// The caller's name for it; None for no completion.
    pub token: Option<Token>,
}

/// What an operation of the endpoint on its own behalf is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// Receives a request.
    Request,
    /// Sends the contents of our write of `length` bytes.
    Write { operation: u64, length: u64 },
    /// Receives the contents of our read.
    Read(u64),
    /// Receives the contents of a peer's write of `length` bytes; `data` goes to the program.
    Written { data: u64, length: u64 },
    /// Sends what a peer reads.
    WasRead,
    /// Discards the contents of a write that was refused.
    Discard,
}

/// What a request is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
enum Verb {
    Write = 1,
    Read = 2,
    RefuseWrite = 3,
    RefuseRead = 4,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Request {
    verb: Verb,
    operation: u64,
    key: u64,
    address: u64,
    length: u64,
    data: u64,
}

impl Request {
    fn to_bytes(self) -> Vec<u8> {
        let words = [self.verb as u64, self.operation, self.key, self.address, self.length, self.data];
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    /// The message that takes it to a peer.
    fn to<B>(self, peer: PeerId) -> Outgoing<B> {
        let payload = Payload::Copied(self.to_bytes());
        Outgoing { peer, channel: Channel::Requests, tag: 0, data: 0, payload, token: None }
    }

    fn parse(bytes: &[u8]) -> Option<Request> {
        let word = |at: usize| Some(u64::from_be_bytes(bytes.get(8 * at..8 * at + 8)?.try_into().ok()?));
        let verb = [Verb::Write, Verb::Read, Verb::RefuseWrite, Verb::RefuseRead];
        let verb = verb.into_iter().find(|verb| word(0) == Some(*verb as u64))?;
        Some(Request { verb, operation: word(1)?, key: word(2)?, address: word(3)?, length: word(4)?, data: word(5)? })
    }
}

/// A read or write of ours that has not ended.
#[derive(Clone, Copy, Debug)]
struct Pending {
    token: Option<Token>,
    /// The receive of a read, and its place in the arena.
    receive: Option<ReceiveId>,
    refused: bool,
}

/// Reads and writes of both sides.
pub(crate) struct Rma<B> {
    regions: Box<dyn Regions<B>>,
    next: u64,
    pending: HashMap<u64, Pending, Keys>,
    /// Receives for requests that could not be posted again yet.
    unposted: usize,
    /// Requests of peers for which there was no room yet.
    waiting: VecDeque<(PeerId, Request)>,
}

impl<B> Rma<B> {
    /// `now` as for [`Endpoint::new`].
    pub fn new(regions: Box<dyn Regions<B>>, now: u64) -> Rma<B> {
        // An earlier endpoint of this address has used none of these numbers: a peer may still wait for the contents of
        // its last writes, and would take ours for them.
        let next = (now << OPERATIONS) & !READ_TAG | 1;
        Rma { regions, next, pending: HashMap::default(), unposted: 0, waiting: VecDeque::new() }
    }

    /// The peers whose requests wait.
    pub fn peers(&self) -> impl Iterator<Item = PeerId> {
        self.waiting.iter().map(|(peer, _)| *peer)
    }
}

impl<B: Buffer> Endpoint<B> {
    /// Begins to answer peers that read or write the program's memory.
    ///
    /// # Errors
    /// The limit that stands against it.
    pub fn enable_rma(&mut self, now: u64) -> Result<(), Limit> {
        (0..RECEIVES).try_for_each(|_| self.post_request(now))
    }

    /// Reads a peer's memory into the buffer of `transfer`, which must be borrowed.
    ///
    /// # Errors
    /// The limit that stands against it.
    pub fn read(&mut self, transfer: Transfer<B>, now: u64) -> Result<(), Limit> {
        let Payload::Borrowed(buffer) = transfer.payload else { return Err(Limit::Memory) };
        let (operation, length) = (self.rma.next, buffer.length());
        let Remote { peer, key, address } = transfer.remote;
        let slot = self.arena.insert(Slot::Program(buffer));
        let selector = Selector { peer: Some(peer), channel: Channel::Contents, tag: operation | READ_TAG, ignore: 0 };
        let receive = self.post(selector, self.arena.whole(slot), slot, now).inspect_err(|_| {
            self.arena.remove(slot);
        })?;
        self.set_purpose(slot, Purpose::Rma(Step::Read(operation)));
        let pending = Pending { token: transfer.token, receive: Some(receive), refused: false };
        self.rma.pending.insert(operation, pending);
        self.rma.next += 1;
        let request = Request { verb: Verb::Read, operation, key, address, length, data: 0 };
        self.send(request.to(peer), now).inspect_err(|_| {
            // The end of the receive is not reported.
            self.rma.pending.remove(&operation);
            self.policy.cancel(receive);
            self.collect(now);
        })
    }

    /// Writes to a peer's memory. Its completion says that the data is there.
    ///
    /// # Errors
    /// The limit that stands against it.
    pub fn write(&mut self, transfer: Transfer<B>, now: u64) -> Result<(), Limit> {
        let operation = self.rma.next;
        let Remote { peer, key, address } = transfer.remote;
        let length = match &transfer.payload {
            Payload::Borrowed(buffer) => buffer.length(),
            Payload::Copied(bytes) => bytes.len() as u64,
        };
        let payload = if length > 0 { transfer.payload } else { Payload::Copied(vec![0; INSTEAD]) };
        // Both messages go, or neither: without its contents a request would keep a receive at the peer for ever. So
        // nothing else that needs room happens between the two.
        self.make_room(now);
        if !self.arena.can_hold(length) {
            return Err(Limit::Memory);
        }
        if !self.policy.is_ready() {
            return Err(Limit::Commands);
        }
        if !self.has_room_for(2) || !self.arena.has_place([length.max(INSTEAD as u64), REQUEST as u64]) {
            return Err(Limit::Sends);
        }
        self.rma.next += 1;
        let request = Request { verb: Verb::Write, operation, key, address, length, data: transfer.data };
        self.begin_send(Purpose::Silent, request.to(peer), now)?;
        let (channel, tag) = (Channel::Contents, operation);
        let contents = Outgoing { peer, channel, tag, data: 0, payload, token: None };
        self.begin_send(Purpose::Rma(Step::Write { operation, length }), contents, now)?;
        self.rma.pending.insert(operation, Pending { token: transfer.token, receive: None, refused: false });
        self.transmit(now);
        Ok(())
    }

    fn post_request(&mut self, now: u64) -> Result<(), Limit> {
        let slot = self.arena.insert(Slot::Own(vec![0; REQUEST]));
        let selector = Selector { peer: None, channel: Channel::Requests, tag: 0, ignore: u64::MAX };
        match self.post(selector, self.arena.whole(slot), slot, now) {
            Ok(_) => {
                self.set_purpose(slot, Purpose::Rma(Step::Request));
                Ok(())
            }
            Err(limit) => {
                self.arena.remove(slot);
                Err(limit)
            }
        }
    }

    /// Posts the receives for requests that are missing, as far as there is room. To be tried again in each pass:
    /// without them peers' requests would wait for ever.
    pub(crate) fn post_missing_requests(&mut self, now: u64) {
        while self.rma.unposted > 0 && self.post_request(now).is_ok() {
            self.rma.unposted -= 1;
        }
    }

    pub(crate) fn finish_rma(&mut self, step: Step, slot: Slot<B>, result: Result<Delivered, Error>, now: u64) {
        match (step, result) {
            (Step::Request, result) => {
                self.rma.unposted += 1;
                self.post_missing_requests(now);
                if let (Ok(delivered), Slot::Own(bytes)) = (result, slot)
                    && delivered.placed == REQUEST as u64
                    && let Some(request) = Request::parse(&bytes)
                {
                    self.take_request(delivered.peer, request);
                }
            }
            (Step::Write { operation, length }, result) => {
                // The contents of a write that is refused are received into no memory, whether the refusal has come or
                // is late.
                let result = result.and_then(|sent| if sent.placed < sent.length { Err(Error::Aborted) } else { Ok(sent) });
                let result = result.map(|sent| Delivered { length, placed: length, ..sent });
                self.finish_pending(operation, Kind::Write, result);
            }
            (Step::Read(operation), result) => self.finish_pending(operation, Kind::Read, result),
            (Step::Written { data, length }, Ok(delivered)) => {
                let length = delivered.length.min(length);
                let result = Ok(Delivered { data, length, placed: length, ..delivered });
                self.completions.push_back(Completion { token: 0, kind: Kind::Written, result });
            }
            (Step::WasRead, Ok(delivered)) => {
                self.completions.push_back(Completion { token: 0, kind: Kind::WasRead, result: Ok(delivered) });
            }
            (Step::Written { .. } | Step::WasRead | Step::Discard, _) => {}
        }
    }

    fn finish_pending(&mut self, operation: u64, kind: Kind, result: Result<Delivered, Error>) {
        let Some(Pending { token: Some(token), refused, .. }) = self.rma.pending.remove(&operation) else { return };
        let result = if refused { Err(Error::Aborted) } else { result };
        self.completions.push_back(Completion { token, kind, result });
    }

    /// Answers the requests that have come, while there is room for the answers.
    pub(crate) fn answer_requests(&mut self, now: u64) -> bool {
        let mut any = false;
        self.post_missing_requests(now);
        while self.has_room_for(2)
            && self.policy.is_ready()
            && let Some((peer, request)) = self.rma.waiting.front().copied()
        {
            let length = if self.arena.can_hold(request.length) { request.length.max(INSTEAD as u64) } else { 0 };
            if !self.arena.has_place([length, REQUEST as u64]) {
                break;
            }
            self.rma.waiting.pop_front();
            any = true;
            // There is room: what fails now fails since the peer is gone, and its requests with it.
            let _ = if request.verb == Verb::Write {
                self.answer_write(peer, &request, now)
            } else {
                self.answer_read(peer, &request, now)
            };
        }
        any
    }

    /// A request has come. A refusal needs no answer, and counts at once: the operation that it is for may end next.
    fn take_request(&mut self, peer: PeerId, request: Request) {
        match request.verb {
            Verb::Write | Verb::Read => self.rma.waiting.push_back((peer, request)),
            Verb::RefuseWrite | Verb::RefuseRead => self.refused(&request),
        }
    }

    /// The memory that a request is for, if its sender may have it.
    fn find_region(&self, request: &Request, access: Access) -> Option<B> {
        let found = self.rma.regions.find(request.key, request.address, request.length, access);
        found.filter(|_| self.arena.can_hold(request.length))
    }

    fn answer_write(&mut self, peer: PeerId, request: &Request, now: u64) -> Result<(), Limit> {
        let (slot, step) = match self.find_region(request, Access::Write) {
            Some(region) => {
                let memory = if request.length > 0 { Slot::Program(region) } else { Slot::Own(vec![0; INSTEAD]) };
                (memory, Step::Written { data: request.data, length: request.length })
            }
            None => {
                self.send(Request { verb: Verb::RefuseWrite, ..*request }.to(peer), now)?;
                (Slot::Own(Vec::new()), Step::Discard)
            }
        };
        let slot = self.arena.insert(slot);
        let selector = Selector { peer: Some(peer), channel: Channel::Contents, tag: request.operation, ignore: 0 };
        match self.post(selector, self.arena.whole(slot), slot, now) {
            Ok(_) => {
                self.set_purpose(slot, Purpose::Rma(step));
                Ok(())
            }
            Err(limit) => {
                self.arena.remove(slot);
                Err(limit)
            }
        }
    }

    fn answer_read(&mut self, peer: PeerId, request: &Request, now: u64) -> Result<(), Limit> {
        let Some(region) = self.find_region(request, Access::Read) else {
            return self.send(Request { verb: Verb::RefuseRead, ..*request }.to(peer), now);
        };
        let (channel, tag) = (Channel::Contents, request.operation | READ_TAG);
        let contents = Outgoing { peer, channel, tag, data: 0, payload: Payload::Borrowed(region), token: None };
        self.send_for(Purpose::Rma(Step::WasRead), contents, now)
    }

    /// A peer does not allow one of our operations. A read ends when its receive has been cancelled, which the caller
    /// collects; a write when the peer has discarded its contents.
    fn refused(&mut self, request: &Request) {
        if let Some(pending) = self.rma.pending.get_mut(&request.operation) {
            pending.refused = true;
            if let Some(receive) = pending.receive {
                self.policy.cancel(receive);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;
    use crate::endpoint::Incoming;
    use crate::testing::endpoint;
    use baton_linux::events::monotonic_micros;
    use std::net::SocketAddr;

    struct Anything;

    impl Regions<Vec<u8>> for Anything {
        fn find(&self, _: u64, _: u64, length: u64, _: Access) -> Option<Vec<u8>> {
            Some(vec![0; length as usize])
        }
    }

    /// Drives two endpoints until something holds for the first.
    fn drive(target: &mut Endpoint<Vec<u8>>, other: &mut Endpoint<Vec<u8>>, done: impl Fn(&Endpoint<Vec<u8>>) -> bool) {
        let limit = monotonic_micros() + 20_000_000;
        while !done(target) {
            assert!(monotonic_micros() < limit, "it does not come to that: {}", target.report());
            target.progress(monotonic_micros());
            other.progress(monotonic_micros());
        }
    }

    /// A target whose peer died between the request and the contents of a write does not take the first write of the
    /// peer's successor, which has the same address, for these contents.
    #[test]
    fn a_write_is_not_taken_for_that_of_an_earlier_endpoint() {
        let made = |settings: &Settings, now| Endpoint::new(settings, Box::new(Anything), [7; 32], now).expect("an endpoint");
        let now = monotonic_micros();
        let settings = Settings { stream: false, ..Settings::default() };
        let mut target = made(&settings, now);
        target.enable_rma(now).expect("there is room");
        let mut first = made(&settings, now);
        let (address, peer) = (first.address(), first.peer(target.address(), |_| true).expect("a peer"));
        let operation = first.rma.next;
        let request = Request { verb: Verb::Write, operation, key: 1, address: 0, length: 8, data: 1 };
        first.send(request.to(peer), now).expect("there is room");
        drive(&mut target, &mut first, |target| target.policy.usage().2 > RECEIVES);
        drop(first);
        let mut second = made(&Settings { address, ..settings }, monotonic_micros() + 10_000);
        let peer = second.peer(target.address(), |_| true).expect("a peer");
        let (remote, payload) = (Remote { peer, key: 2, address: 0 }, Payload::Borrowed(vec![5; 8]));
        second.write(Transfer { remote, payload, data: 2, token: Some(9) }, now).expect("there is room");
        drive(&mut target, &mut second, |target| !target.completions.is_empty());
        let completion = target.poll_completion().expect("a write has ended");
        assert_eq!((completion.kind, completion.result.expect("its bytes are there").data), (Kind::Written, 2));
    }

    /// While the data half takes no commands, a write begins as a whole or not at all, and a peer's requests wait.
    #[test]
    fn a_request_does_not_leave_without_its_contents() {
        let mut end = endpoint(100);
        end.stop_data_half();
        let now = monotonic_micros();
        let refused = (1..1000u16).find_map(|port| {
            let peer = end.peer(SocketAddr::from(([127, 0, 0, 1], port)), |_| true).expect("there is room for it");
            let before = end.policy.usage().0;
            let (remote, payload) = (Remote { peer, key: 1, address: 0 }, Payload::Borrowed(vec![1; 8]));
            let begun = end.write(Transfer { remote, payload, data: 0, token: Some(port.into()) }, now);
            let messages = end.policy.usage().0 - before;
            assert_eq!(messages, if begun.is_ok() { 2 } else { 0 }, "{port}: {begun:?}");
            begun.err()
        });
        assert_eq!(refused, Some(Limit::Commands));
        // Nor is a peer's request lost that comes meanwhile.
        let request = Request { verb: Verb::Read, operation: 1, key: 1, address: 0, length: 8, data: 0 };
        end.take_request(PeerId(0), request);
        assert!(!end.answer_requests(now));
        assert_eq!(end.rma.waiting.len(), 1);
    }

    /// Receives for requests that cannot be posted again when they end, since the program's take all the room, are
    /// posted when there is room: else a peer's reads and writes would wait for ever once all of them are lost.
    #[test]
    fn receives_for_requests_are_posted_when_there_is_room_again() {
        let mut end = endpoint(RECEIVES as u16);
        let now = monotonic_micros();
        let receive = |token| Incoming {
            selector: Selector { peer: None, channel: Channel::Plain, tag: 0, ignore: u64::MAX },
            buffer: vec![0; 8],
            token,
        };
        let numbers: Vec<u32> =
            (0..RECEIVES as u64).map(|token| end.receive(receive(1 + token), now).expect("a receive")).collect();
        for _ in 0..RECEIVES {
            end.finish_rma(Step::Request, Slot::Own(vec![0; REQUEST]), Err(Error::PeerDead), now);
        }
        let posted = |end: &Endpoint<Vec<u8>>| end.policy.usage().2;
        end.progress(now);
        assert_eq!(posted(&end), RECEIVES, "the program's");
        for (token, number) in (1..).zip(&numbers).take(3) {
            assert!(end.cancel(*number, token, now));
        }
        // As when the next request comes.
        end.idle_until = 0;
        end.progress(now);
        assert_eq!((posted(&end), end.rma.unposted), (RECEIVES, RECEIVES - 3));
    }
}
