//! Random calls of libfabric at two endpoints of this process that talk over loopback.
//!
//! A step is a call: a send, a receive, FI_PEEK with and without FI_CLAIM and FI_DISCARD, what is claimed, fi_cancel(),
//! a read of a completion queue, a change of an address vector, or that an endpoint and what belongs to it are closed
//! in any order and opened anew. Arguments are good and bad; only pointers are always good. Each operation ends at most
//! once and, unless an endpoint was closed, as it should; each message comes once, and none before an earlier one.

mod model;
mod rma;
pub mod side;

use crate::abi::{ADDR_UNSPEC, caps, errno, flags};
use crate::info::{INJECT, PARTS};
use baton_fuzz::{Choice, Fuzzer, World, note};
use baton_linux::events::monotonic_micros;
use baton_messages::MAX_LENGTH;
use model::{CLASS, Model, Selector, UNTOUCHED, What, byte, context};
use side::{Side, Target, call, expect};
use std::net::UdpSocket;
use std::time::Duration;

/// Longest message, in bits of its length.
const LONGEST: u64 = 17;
/// How long what must end may take, in microseconds.
const PATIENCE: u64 = 10_000_000;
/// Flags that mean something to a receive.
const RECEIVING: u64 = flags::PEEK | flags::CLAIM | flags::DISCARD | caps::MULTI_RECV;

struct Calls {
    sides: [Side; 2],
    nobody: UdpSocket,
    model: Model,
    /// Copies are sent to those whom nobody answers for.
    copies_for_nobody: bool,
}

/// The parts of a buffer, `count` of them.
fn parts(buffer: &[u8], length: usize, count: usize, choice: &mut Choice) -> Vec<libc::iovec> {
    let mut at = 0;
    let part = |part: usize| {
        let here = if part + 1 == count { length - at } else { choice.below((length - at).min(5000) as u64 + 1) as usize };
        let start = buffer.as_ptr().wrapping_add(at);
        at += here;
        libc::iovec { iov_base: start.cast_mut().cast(), iov_len: here }
    };
    (0..count).map(part).collect()
}

impl Calls {
    fn side(&self, at: usize) -> (usize, u32) {
        (at, self.sides[at].life)
    }

    fn lives(&self, target: Target) -> bool {
        matches!(target, Target::Side(at, life) if self.sides[at].life == life)
    }

    fn tag(choice: &mut Choice) -> u64 {
        choice.below(3)
    }

    fn send(&mut self, choice: &mut Choice) {
        let at = choice.below(2) as usize;
        let (place, target) = self.sides[at].place(choice);
        let number = self.model.messages.len();
        let tag = choice.one_in(2).then(|| (number as u64) << 8 | Self::tag(choice));
        let length = match choice.below(32) {
            0 => usize::MAX >> choice.below(20),
            1 => INJECT + choice.below(2) as usize,
            2..5 => choice.magnitude(LONGEST) as usize,
            _ => choice.magnitude(11) as usize,
        };
        let bytes: Vec<u8> = (0..length.min(1 << LONGEST)).map(|at| byte(number, at)).collect();
        // A copy for nobody cannot be taken back, and whoever closes waits for it.
        let lost = target.is_some_and(|target| !self.lives(target)) && !self.copies_for_nobody;
        let inject = choice.one_in(4) && !lost;
        let extra = if choice.one_in(2) { choice.word() & !(flags::REMOTE_CQ_DATA | flags::INJECT) } else { flags::COMPLETION };
        let count = if choice.one_in(8) { choice.below(12) as usize } else { 1 };
        let (form, many) = (choice.below(4), count != 1 && length <= 1 << LONGEST);
        let length = if many && count == 0 { 0 } else { length };
        let form = if many || lost { 3 } else { form };
        let extra = if lost { extra | flags::DELIVERY_COMPLETE } else { extra };
        let all_flags = extra | flags::REMOTE_CQ_DATA | if inject { flags::INJECT } else { 0 };
        let injected = matches!(form, 0) || form == 3 && inject;
        let silent = form == 0;
        let reported = !silent && (!self.sides[at].selective || form == 3 && all_flags & flags::COMPLETION != 0);
        let to = target.unwrap_or(Target::Nobody);
        let what = What::Send { to, message: number };
        let selector = Selector { source: None, tag: tag.map(|tag| (tag, 0)) };
        let operation = self.model.enter(self.side(at), what, selector, bytes, reported);
        let (ep, start) = (self.sides[at].ep, self.model.operations[operation].buffer.as_ptr().cast());
        let (name, data) = (context(operation), number as u64);
        let result = match (form, tag) {
            (0, Some(tag)) => call!(ep, tagged => inject(start, length, place, tag)),
            (0, None) => call!(ep, msg => injectdata(start, length, data, place)),
            (1, Some(tag)) => call!(ep, tagged => send(start, length, std::ptr::null_mut(), place, tag, name)),
            (1 | 2, None) => call!(ep, msg => senddata(start, length, std::ptr::null_mut(), data, place, name)),
            (2, Some(tag)) => call!(ep, tagged => senddata(start, length, std::ptr::null_mut(), data, place, tag, name)),
            _ if many => {
                let iov = parts(&self.model.operations[operation].buffer, length, count, choice);
                self.sides[at].send(tag, &iov, place, name, data, all_flags)
            }
            _ => {
                let iov = [libc::iovec { iov_base: start.cast_mut().cast(), iov_len: length }];
                self.sides[at].send(tag, &iov, place, name, data, all_flags)
            }
        };
        note!("{operation}: {at} sends {number} of {length} bytes, tag {tag:?}, to {to:?}, form {form}, {count} parts: {result}");
        let refusals = [
            (target.is_none(), errno::EINVAL),
            (many && count > PARTS, errno::EINVAL),
            (injected && length > INJECT || length as u64 > MAX_LENGTH, errno::EMSGSIZE),
        ];
        expect(result, &refusals);
        let message = model::Message { from: self.side(at), to, tag, length, taken: None };
        if result == 0 {
            self.model.messages.push(message);
        }
        // A copied message (inject) has no completion of its own.
        self.model.operations[operation].ended = result != 0 || silent;
    }

    fn selector(&self, at: usize, choice: &mut Choice) -> (Selector, u64, bool) {
        let (place, target) = if choice.one_in(2) { self.sides[at].place(choice) } else { (ADDR_UNSPEC, None) };
        let ignore = if choice.one_in(3) { u64::MAX } else { !CLASS };
        let tag = choice.one_in(2).then(|| (Self::tag(choice), ignore));
        let source = if place == ADDR_UNSPEC { None } else { target };
        (Selector { source, tag }, place, place != ADDR_UNSPEC && target.is_none())
    }

    fn receive(&mut self, choice: &mut Choice) {
        let at = choice.below(2) as usize;
        let (selector, place, unknown) = self.selector(at, choice);
        let several = choice.one_in(8);
        let huge = !several && choice.one_in(32);
        let capacity = if choice.one_in(4) { choice.magnitude(LONGEST) } else { choice.magnitude(12) } as usize;
        let length = if huge { usize::MAX >> choice.below(24) } else { capacity };
        let room = if huge { 1 << LONGEST } else { capacity };
        let unknown_flags = if choice.one_in(2) { choice.word() & !RECEIVING } else { 0 };
        let all_flags = unknown_flags | flags::COMPLETION | if several { caps::MULTI_RECV } else { 0 };
        // What comes is always reported: a message that was received without a word would be missed.
        let form = if several || self.sides[at].selective { 2 } else { choice.below(3) };
        let count = if choice.one_in(8) && !huge && form == 2 && !several { choice.below(12) as usize } else { 1 };
        let length = if count == 0 { 0 } else { length };
        // Where a buffer has several parts, completions name the first; it lies in one piece all the same.
        let what = What::Receive { capacity: if huge { length } else { length.min(room) }, filled: 0, several };
        let operation = self.model.enter(self.side(at), what, selector, vec![UNTOUCHED; room], true);
        let (ep, name) = (self.sides[at].ep, context(operation));
        let start = self.model.operations[operation].buffer.as_mut_ptr();
        let result = match (form, selector.tag) {
            (0, Some((tag, ignore))) => {
                call!(ep, tagged => recv(start.cast(), length, std::ptr::null_mut(), place, tag, ignore, name))
            }
            (0, None) => call!(ep, msg => recv(start.cast(), length, std::ptr::null_mut(), place, name)),
            (1, tag) => {
                let iov = [libc::iovec { iov_base: start.cast(), iov_len: length }];
                match tag {
                    Some((tag, ignore)) => {
                        call!(ep, tagged => recvv(iov.as_ptr(), std::ptr::null_mut(), 1, place, tag, ignore, name))
                    }
                    None => call!(ep, msg => recvv(iov.as_ptr(), std::ptr::null_mut(), 1, place, name)),
                }
            }
            _ => {
                let iov = match count {
                    1 => vec![libc::iovec { iov_base: start.cast(), iov_len: length }],
                    _ => parts(&self.model.operations[operation].buffer, length, count, choice),
                };
                self.sides[at].receive(selector.tag, &iov, place, name, all_flags)
            }
        };
        note!("{operation}: {at} receives {length} bytes, {selector:?}, several {several}, {count} parts: {result}");
        let refusals = [(unknown, errno::EINVAL), (count > PARTS, errno::EINVAL), (length as u64 > MAX_LENGTH, errno::EMSGSIZE)];
        expect(result, &refusals);
        self.model.operations[operation].ended = result != 0;
    }

    /// FI_PEEK, or FI_CLAIM of what was claimed or was not.
    fn peek(&mut self, choice: &mut Choice) {
        let at = choice.below(2) as usize;
        let (selector, place, unknown) = self.selector(at, choice);
        let (claim, discard) = (choice.one_in(2), choice.one_in(3));
        let all_flags =
            flags::PEEK | flags::COMPLETION | if claim { flags::CLAIM } else { 0 } | if discard { flags::DISCARD } else { 0 };
        let what = What::Peek { claim: claim && !discard, takes: claim || discard };
        let operation = self.model.enter(self.side(at), what, selector, Vec::new(), true);
        let result = self.sides[at].receive(selector.tag, &[], place, context(operation), all_flags);
        note!("{operation}: {at} looks for {selector:?}, claim {claim}, discard {discard}: {result}");
        expect(result, &[(unknown, errno::EINVAL)]);
        self.model.operations[operation].ended = result != 0;
    }

    fn claim(&mut self, operation: usize, choice: &mut Choice) {
        let (side, selector) = (self.model.operations[operation].side, self.model.operations[operation].selector);
        let discard = choice.one_in(3);
        let all_flags = flags::CLAIM | flags::COMPLETION | if discard { flags::DISCARD } else { 0 };
        let capacity = choice.magnitude(LONGEST) as usize;
        let entry = &mut self.model.operations[operation];
        let claimed = match entry.what {
            What::Claimed(message) => Some(message),
            _ => None,
        };
        if claimed.is_some() {
            entry.buffer = vec![UNTOUCHED; capacity];
        }
        let mut spare = vec![UNTOUCHED; capacity];
        let start = if claimed.is_some() { entry.buffer.as_mut_ptr() } else { spare.as_mut_ptr() };
        let iov = [libc::iovec { iov_base: start.cast(), iov_len: capacity }];
        let result = self.sides[side.0].receive(selector.tag, &iov, ADDR_UNSPEC, context(operation), all_flags);
        note!("{operation}: {} claims {claimed:?} into {capacity} bytes, discard {discard}: {result}", side.0);
        let entry = &mut self.model.operations[operation];
        match claimed {
            Some(_) if self.model.is_broken && result == -(errno::ENOMSG as isize) => entry.ended = true,
            Some(message) => {
                assert_eq!(result, 0, "what was claimed can be had");
                (entry.what, entry.reported) = (What::Claim { message, capacity, discard }, true);
            }
            None => assert_eq!(result, -(errno::EINVAL as isize), "nothing was claimed with this context"),
        }
    }

    fn cancel(&mut self, operation: usize) {
        let (at, life) = self.model.operations[operation].side;
        if self.sides[at].life != life {
            return;
        }
        let result = self.sides[at].cancel(context(operation));
        note!("{operation}: cancelled: {result}");
        let entry = &mut self.model.operations[operation];
        match result {
            0 => {
                assert!(!entry.ended && !entry.cancelled, "{operation} is cancelled when it has ended");
                assert!(matches!(entry.what, What::Send { .. } | What::Receive { .. }), "{operation} cannot be cancelled");
                entry.cancelled = true;
                if let What::Send { message, .. } = entry.what {
                    self.model.messages[message].taken = Some((0, false));
                }
            }
            _ => assert_eq!(result, -(errno::ENOENT as isize)),
        }
    }

    fn read(&mut self, at: usize, choice: &mut Choice) {
        for (entry, place, failed) in self.sides[at].read(choice) {
            let source = self.sides[at].places.get(&place).copied().filter(|_| !self.sides[at].has_removed);
            self.model.complete(self.side(at), &entry, (place, source), failed);
        }
    }

    fn insert(&mut self, at: usize, of: u64) {
        let (address, target) = match of {
            0 | 1 => (self.sides[of as usize].address, Target::Side(of as usize, self.sides[of as usize].life)),
            _ => (self.nobody.local_addr().expect("it is bound"), Target::Nobody),
        };
        self.sides[at].insert(address, target);
    }

    /// Closes an endpoint and what belongs to it in some order, and opens it anew.
    fn reopen(&mut self, choice: &mut Choice) {
        let at = choice.below(2) as usize;
        // Whoever closes waits some seconds for what was sent to be taken.
        let waits = self
            .model
            .messages
            .iter()
            .any(|message| message.from == self.side(at) && message.taken.is_none() && self.lives(message.to));
        if waits && !choice.one_in(64) {
            return;
        }
        self.cancel_lost();
        note!("{at} is closed and opened anew");
        let mut order = [0, 1, 2, 3, 4];
        (1..5).for_each(|last| order.swap(last, choice.below(last as u64 + 1) as usize));
        order.iter().for_each(|which| self.sides[at].close_one(*which));
        let (life, before) = (self.sides[at].life + 1, self.sides[at].address);
        // The address of one that is gone stays nobody's.
        let mut spare = Side::open(life, choice);
        while spare.address == before {
            spare = Side::open(life, choice);
        }
        self.sides[at] = spare;
        self.model.is_broken = true;
        (0..3).for_each(|of| self.insert(at, of));
        self.insert(1 - at, at as u64);
    }

    /// Takes back what nobody will ever answer, so that nothing waits until the peer counts as dead.
    fn cancel_lost(&mut self) {
        for operation in self.outstanding(|operation| matches!(operation.what, What::Send { to, .. } if !self.lives(to))) {
            self.cancel(operation);
        }
    }

    /// Reads until something holds.
    fn settle(&mut self, what: &str, mut holds: impl FnMut(&mut Calls) -> bool) {
        let until = monotonic_micros() + PATIENCE;
        let mut choice = Choice::new(0);
        while !holds(self) {
            (0..2).for_each(|at| self.read(at, &mut choice));
            assert!(monotonic_micros() < until, "{what}: {}", self.left());
        }
    }

    fn left(&self) -> String {
        let left = self.model.operations.iter().enumerate().filter(|(_, operation)| self.is_due(operation));
        let left: Vec<_> = left.map(|(at, operation)| (at, operation.what, operation.selector)).collect();
        let lost: Vec<_> = self.model.messages.iter().filter(|message| self.is_undelivered(message)).collect();
        format!("operations that do not end: {left:?}; messages that do not come: {lost:?}")
    }

    fn is_due(&self, operation: &model::Operation) -> bool {
        let silent = !operation.reported && !operation.cancelled;
        !operation.ended
            && self.side(operation.side.0) == operation.side
            && !silent
            && !matches!(operation.what, What::Claimed(_))
    }

    fn is_undelivered(&self, message: &model::Message) -> bool {
        message.taken.is_none() && self.lives(message.to) && self.side(message.from.0) == message.from
    }

    /// Posts a receive for whatever comes, on each side and channel from which something is missing and for which none
    /// waits.
    fn catch_all(&mut self) {
        for (at, tag) in [(0, None), (1, None), (0, Some((0, u64::MAX))), (1, Some((0, u64::MAX)))] {
            let missing = |message: &model::Message| {
                self.is_undelivered(message)
                    && message.tag.is_some() == tag.is_some()
                    && message.to == Target::Side(at, self.sides[at].life)
            };
            let waits = |operation: &model::Operation| {
                operation.side == self.side(at)
                    && !operation.ended
                    && operation.selector.source.is_none()
                    && operation.selector.tag == tag
                    && operation.reported
                    && !operation.cancelled
                    && matches!(operation.what, What::Receive { several: false, .. })
            };
            if !self.model.messages.iter().any(missing) || self.model.operations.iter().any(waits) {
                continue;
            }
            let (room, selector) = (1 << LONGEST, Selector { source: None, tag });
            let what = What::Receive { capacity: room, filled: 0, several: false };
            let operation = self.model.enter(self.side(at), what, selector, vec![UNTOUCHED; room], true);
            let start = self.model.operations[operation].buffer.as_mut_ptr();
            let iov = [libc::iovec { iov_base: start.cast(), iov_len: room }];
            assert_eq!(self.sides[at].receive(tag, &iov, ADDR_UNSPEC, context(operation), flags::COMPLETION), 0);
        }
    }

    fn outstanding(&self, wanted: impl Fn(&model::Operation) -> bool) -> Vec<usize> {
        let all = self.model.operations.iter().enumerate();
        let all = all.filter(|(_, operation)| !operation.ended && self.side(operation.side.0) == operation.side);
        all.filter(|(_, operation)| wanted(operation)).map(|(at, _)| at).collect()
    }
}

impl World for Calls {
    const LONGEST: u64 = 400;
    const PLAYS: usize = 60;

    fn new(word: u64) -> Calls {
        let mut choice = Choice::new(word);
        let sides = [0, 1].map(|_| Side::open(0, &mut choice));
        let nobody = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let mut calls = Calls { sides, nobody, model: Model::default(), copies_for_nobody: choice.one_in(512) };
        (0..2).for_each(|at| (0..3).for_each(|of| calls.insert(at, of)));
        calls
    }

    fn step(&mut self, word: u64) -> bool {
        let choice = &mut Choice::new(word);
        let any = choice.below(self.model.operations.len().max(1) as u64) as usize;
        let side = choice.below(2) as usize;
        match choice.below(200) {
            0..60 => self.send(choice),
            60..110 => self.receive(choice),
            110..125 => self.peek(choice),
            125..135 => {
                let claimed = self.outstanding(|operation| matches!(operation.what, What::Claimed(_)));
                if !claimed.is_empty() {
                    self.claim(choice.of(&claimed), choice);
                }
            }
            135..138 if any < self.model.operations.len() => {
                let operation = &self.model.operations[any];
                if operation.ended && operation.side == self.side(operation.side.0) {
                    self.claim(any, choice);
                }
            }
            138..150 if any < self.model.operations.len() => self.cancel(any),
            150 => assert_eq!(self.sides[side].cancel(context(1 << 40)), -(errno::ENOENT as isize)),
            151..155 => self.insert(side, choice.below(3)),
            155 => self.sides[side].insert_bad(choice),
            156 => self.sides[side].remove(choice),
            // Waits: other moments in each run; the result is the same.
            157 => std::thread::sleep(Duration::from_micros(choice.below(2000))),
            158 if choice.one_in(4) => self.reopen(choice),
            _ => self.read(side, choice),
        }
        true
    }

    fn end(mut self) {
        let mut choice = Choice::new(0);
        // What was looked for and not read yet may be claimed.
        let peeked = |operation: &model::Operation| matches!(operation.what, What::Peek { .. });
        self.settle("what was looked for", |calls| calls.outstanding(peeked).is_empty());
        for operation in self.outstanding(|operation| matches!(operation.what, What::Claimed(_))) {
            self.claim(operation, &mut choice);
        }
        self.cancel_lost();
        self.settle("messages", |calls| {
            calls.catch_all();
            let sends = calls
                .model
                .operations
                .iter()
                .any(|operation| calls.is_due(operation) && !matches!(operation.what, What::Receive { .. }));
            !sends && !calls.model.messages.iter().any(|message| calls.is_undelivered(message))
        });
        for operation in self.outstanding(|operation| matches!(operation.what, What::Receive { .. })) {
            self.cancel(operation);
        }
        self.settle("receives", |calls| !calls.model.operations.iter().any(|operation| calls.is_due(operation)));
        // Nothing more comes.
        (0..64).for_each(|read| self.read(read % 2, &mut choice));
        if !self.model.is_broken {
            self.model.check_order();
        }
    }
}

#[test]
fn each_operation_ends_once_whatever_is_called() {
    // SAFETY: tests of this program read the environment by the standard library only, which has a lock for it.
    unsafe { std::env::set_var("FI_RMPP_NIC", "never") };
    Fuzzer { name: "provider", corpus: include_str!("corpus.txt") }.run::<Calls>();
}
