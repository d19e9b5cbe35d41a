//! Random reads and writes of registered memory, fi_rma(3), at two endpoints of this process that talk over loopback,
//! or to themselves.
//!
//! A step is some reads and writes in any of their forms, a message, a registration or its end, a read of a completion
//! queue or counter, or that an endpoint is closed and opened anew. Keys, addresses, lengths and rights are good and
//! bad; only pointers are always good. Every operation ends once, as it should, with the right bytes; what is not
//! allowed changes nothing; counters count each, and a peer gets the completion of a write with immediate data once the
//! bytes are there.

mod model;

use super::model::{UNTOUCHED, byte, context};
use super::parts;
use super::side::{Side, Target, call, expect};
use crate::abi::{CntrAttr, CqEntry, FidCntr, MrAttr, MsgRma, RmaIov, caps, errno, flags, mr};
use crate::info::{INJECT, PARTS};
use baton_fuzz::{Choice, Fuzzer, World, note};
use baton_linux::events::monotonic_micros;
use model::{Access, Fate, Model, Region};
use std::ffi::c_int;
use std::ptr::null_mut;

/// Longest region and message, in bits of their length.
const LONGEST: u64 = 17;
/// Regions of a side that are open at once.
const MOST_REGIONS: usize = 8;
/// How long what must end may take, in microseconds.
const PATIENCE: u64 = 10_000_000;
/// What endpoints can do; with FI_RMA_EVENT writes of peers are counted.
const CAPS: u64 = caps::MSG | caps::TAGGED | caps::RMA | caps::SEND | caps::RECV | caps::READ | caps::WRITE;
/// What is counted, by counter.
const COUNTED: [u64; 4] = [caps::READ, caps::WRITE, caps::REMOTE_WRITE, caps::REMOTE_READ];
/// In the contexts of messages: the sender's, and the receiver's.
const SENT: usize = 1 << 40;
const RECEIVED: usize = 1 << 41;

struct Memories {
    sides: [Side; 2],
    counters: [[*mut FidCntr; 4]; 2],
    /// FI_RMA_EVENT.
    events: bool,
    mr_mode: c_int,
    model: Model,
    messages: Vec<Message>,
}

/// A message, of each end in turn: its buffer, whose it is, and whether its operation has ended.
struct Message {
    buffers: [Vec<u8>; 2],
    ends: [(usize, u32); 2],
    ended: [bool; 2],
}

/// A read or write as it is asked for.
#[derive(Clone, Copy, Debug)]
struct Wish {
    at: usize,
    to: u64,
    key: u64,
    address: u64,
    length: usize,
    form: u64,
    flags: u64,
    count: usize,
}

fn open(events: bool, mr_mode: c_int, life: u32, choice: &mut Choice) -> (Side, [*mut FidCntr; 4]) {
    let caps = CAPS | if events { caps::RMA_EVENT } else { 0 };
    let side = Side::with(caps, mr_mode, life, choice);
    let counters = COUNTED.map(|counted| {
        let (mut counter, attr) = (null_mut(), null_mut::<CntrAttr>());
        assert_eq!(call!(side.domain, ops => cntr_open(attr, &mut counter, null_mut())), 0);
        assert_eq!(call!(side.ep, fid.ops => bind(counter.cast(), counted)), 0);
        counter
    });
    (side, counters)
}

impl Memories {
    fn side(&self, at: usize) -> (usize, u32) {
        (at, self.sides[at].life)
    }

    /// The place of a side in the address vector of another, or its own.
    fn place(&self, at: usize, of: usize) -> u64 {
        let target = Target::Side(of, self.sides[of].life);
        let found = self.sides[at].places.iter().find(|(_, known)| **known == target);
        *found.expect("both are there").0
    }

    fn insert_all(&mut self) {
        for at in 0..2 {
            for of in 0..2 {
                let (address, target) = (self.sides[of].address, Target::Side(of, self.sides[of].life));
                self.sides[at].insert(address, target);
            }
        }
    }

    fn regions(&self, at: usize) -> Vec<usize> {
        let all = self.model.regions.iter().enumerate();
        all.filter(|(_, region)| region.owner == self.side(at)).map(|(number, _)| number).collect()
    }

    fn register(&mut self, at: usize, choice: &mut Choice) {
        let access = choice.of(&[
            caps::REMOTE_READ | caps::REMOTE_WRITE,
            caps::REMOTE_READ | caps::REMOTE_WRITE,
            caps::REMOTE_READ,
            caps::REMOTE_WRITE,
            0,
        ]);
        let owner = self.side(at);
        let mut region = Region::new(owner, choice.magnitude(LONGEST) as usize, access, self.model.regions.len());
        let (offset, key) = (choice.word() >> choice.below(64) >> 1, choice.of(&[0, 1, 2, 3, 4, 5, 6, 7, u64::MAX]));
        let ours = self.mr_mode & (mr::BASIC | mr::PROV_KEY) != 0;
        // Nothing on its way may meet another region than it was meant for.
        if !ours && self.model.accesses.iter().any(|access| !access.ended && access.target == owner && access.key == key) {
            return;
        }
        let (domain, start, length) = (self.sides[at].domain, region.bytes.as_ptr().cast(), region.bytes.len());
        let part = libc::iovec { iov_base: region.bytes.as_mut_ptr().cast(), iov_len: length };
        let (mut out, form) = (null_mut(), choice.below(4));
        let result = match form {
            0 => call!(domain, mr => reg(start, length, access, offset, key, 0, &mut out, null_mut())),
            1 => call!(domain, mr => regv(&part, 1, access, offset, key, 0, &mut out, null_mut())),
            2 => {
                let attr = MrAttr { iov: &part, iov_count: 1, access, offset, requested_key: key, context: null_mut() };
                call!(domain, mr => regattr(&attr, 0, &mut out))
            }
            _ => call!(domain, mr => regv(&part, choice.of(&[0, 2]), access, offset, key, 0, &mut out, null_mut())),
        };
        let has_key = |region: &Region| region.owner == owner && region.key == key && !region.mr.is_null();
        let expected = match form {
            3 => -errno::EINVAL,
            _ if !ours && self.model.regions.iter().any(has_key) => -errno::ENOKEY,
            _ => 0,
        };
        assert_eq!(result, expected, "a registration of form {form}");
        if result == 0 {
            region.base = if self.mr_mode & (mr::BASIC | mr::VIRT_ADDR) != 0 { start as u64 } else { offset };
            // SAFETY: the call has made it.
            (region.mr, region.key) = (out, unsafe { (*out).key });
            assert!(ours || region.key == key, "the key that was asked for");
            note!("{at} registers {length} bytes, access {access:#x}, key {:#x}, at {:#x}", region.key, region.base);
            self.model.regions.push(region);
        }
    }

    fn close_region(&mut self, number: usize) {
        let mr = self.model.regions[number].mr;
        if !mr.is_null() {
            note!("region {number} is closed");
            assert_eq!(call!(mr, fid.ops => close()), 0);
            self.model.close_region(number);
        }
    }

    /// What is asked for: a range of a region, as it should be or not.
    fn wish(&self, at: usize, of: usize, choice: &mut Choice) -> Wish {
        let regions = self.regions(of);
        let to = match choice.one_in(32) {
            true => choice.of(&[1000, 1 << 40, u64::MAX - 1, u64::MAX]),
            false => self.place(at, of),
        };
        let mut wish = Wish {
            at,
            to,
            key: 1 << 50 | choice.below(4),
            address: choice.word(),
            length: choice.magnitude(11) as usize,
            form: choice.below(6),
            flags: if choice.one_in(2) { choice.word() & !(flags::REMOTE_CQ_DATA | flags::INJECT) } else { flags::COMPLETION },
            count: if choice.one_in(8) { choice.below(12) as usize } else { 1 },
        };
        if regions.is_empty() || choice.one_in(16) {
            return wish;
        }
        let region = &self.model.regions[choice.of(&regions)];
        let size = region.bytes.len();
        let start = choice.below(size as u64 + 1) as usize;
        wish.key = region.key;
        wish.length = (choice.magnitude(LONGEST) as usize).min(size - start);
        wish.address = region.base.wrapping_add(start as u64);
        match choice.below(24) {
            0 => wish.length = size - start + 1 + choice.magnitude(8) as usize,
            1 => wish.address = region.base.wrapping_sub(1 + u64::from(choice.magnitude(8))),
            2 => wish.address = choice.of(&[u64::MAX, u64::MAX - 100, 0, 1 << 63]),
            _ => {}
        }
        wish
    }

    fn access(&mut self, choice: &mut Choice) {
        let at = choice.below(2) as usize;
        let of = if choice.one_in(4) { at } else { 1 - at };
        let write = choice.one_in(2);
        let mut wish = self.wish(at, of, choice);
        if wish.count == 0 {
            wish.length = 0;
        }
        let regions = self.regions(of).into_iter().filter(|number| self.model.regions[*number].key == wish.key);
        let mut found =
            regions.filter_map(|number| Some((number, self.model.regions[number].find(wish.address, wish.length, write)?)));
        let place = found.next();
        drop(found);
        if place.is_some_and(|(region, start)| !self.model.is_free(region, start, wish.length, write)) {
            return;
        }
        let number = self.model.accesses.len();
        let buffer = match write {
            true => (0..wish.length).map(|at| byte(number, at)).collect(),
            false => vec![UNTOUCHED; wish.length],
        };
        let data = write && (matches!(wish.form, 1 | 5) || wish.form == 4 && choice.one_in(2));
        let inject = write && (wish.form < 2 || wish.form == 4 && choice.one_in(4));
        if wish.form == 4 {
            wish.flags |= if data { flags::REMOTE_CQ_DATA } else { 0 } | if inject { flags::INJECT } else { 0 };
        }
        let named = !write || wish.form > 1;
        let is_message = if write { wish.form == 4 } else { wish.form > 3 };
        let reported = named && (!self.sides[at].selective || is_message && wish.flags & flags::COMPLETION != 0);
        let mut access = Access {
            side: self.side(at),
            target: self.side(of),
            write,
            key: wish.key,
            place,
            buffer,
            length: wish.length,
            reported,
            named,
            data,
            noticed: false,
            fate: if place.is_some() { Fate::Done } else { Fate::Refused },
            ended: false,
            told: false,
        };
        // Of a structure alone: another length than the peer's, or several parts of its.
        let crooked = is_message && choice.one_in(16);
        let several = is_message || if write { wish.form == 3 } else { wish.form > 1 };
        let result = if write {
            self.write(&wish, number, &access.buffer, crooked, choice)
        } else {
            self.read(&wish, number, &mut access.buffer, crooked, choice)
        };
        note!("{number}: {wish:?}, write {write}, {:?}, data {data}, inject {inject}: {result}", access.place);
        let refusals = [
            (!self.sides[at].places.contains_key(&wish.to), errno::EINVAL),
            (several && wish.count > PARTS || crooked, errno::EINVAL),
            (inject && wish.length > INJECT, errno::EMSGSIZE),
        ];
        expect(result, &refusals);
        if result == 0 {
            self.model.begin(access);
        }
    }

    fn write(&self, wish: &Wish, number: usize, buffer: &[u8], crooked: bool, choice: &mut Choice) -> isize {
        let Wish { at, to, key, address, length, form, .. } = *wish;
        let (ep, start, name) = (self.sides[at].ep, buffer.as_ptr().cast(), context(number));
        let data = number as u64;
        match form {
            0 => call!(ep, rma => inject(start, length, to, address, key)),
            1 => call!(ep, rma => injectdata(start, length, data, to, address, key)),
            2 => call!(ep, rma => write(start, length, null_mut(), to, address, key, name)),
            3 => {
                let iov = parts(buffer, length, wish.count, choice);
                call!(ep, rma => writev(iov.as_ptr(), null_mut(), iov.len(), to, address, key, name))
            }
            4 => self.described(wish, buffer, number, crooked, choice, |message| call!(ep, rma => writemsg(message, wish.flags))),
            _ => call!(ep, rma => writedata(start, length, null_mut(), data, to, address, key, name)),
        }
    }

    fn read(&self, wish: &Wish, number: usize, buffer: &mut [u8], crooked: bool, choice: &mut Choice) -> isize {
        let Wish { at, to, key, address, length, form, .. } = *wish;
        let (ep, name) = (self.sides[at].ep, context(number));
        match form {
            0 | 1 => call!(ep, rma => read(buffer.as_mut_ptr().cast(), length, null_mut(), to, address, key, name)),
            2 | 3 => {
                let iov = parts(buffer, length, wish.count, choice);
                call!(ep, rma => readv(iov.as_ptr(), null_mut(), iov.len(), to, address, key, name))
            }
            _ => self.described(wish, buffer, number, crooked, choice, |message| call!(ep, rma => readmsg(message, wish.flags))),
        }
    }

    /// The structure that describes a read or write.
    fn described(
        &self,
        wish: &Wish,
        buffer: &[u8],
        number: usize,
        crooked: bool,
        choice: &mut Choice,
        ask: impl FnOnce(&MsgRma) -> isize,
    ) -> isize {
        let iov = parts(buffer, wish.length, wish.count, choice);
        let (longer, several) = if choice.one_in(2) { (1, 1) } else { (0, choice.of(&[0, 2])) };
        let remote = RmaIov { addr: wish.address, len: wish.length + if crooked { longer } else { 0 }, key: wish.key };
        let remote = [remote; 2];
        ask(&MsgRma {
            iov: iov.as_ptr(),
            desc: null_mut(),
            iov_count: iov.len(),
            addr: wish.to,
            rma_iov: remote.as_ptr(),
            rma_iov_count: if crooked { several } else { 1 },
            context: context(number),
            data: number as u64,
        })
    }

    /// A message with a tag of its own, for which a receive is posted just before or after.
    fn message(&mut self, choice: &mut Choice) {
        let at = choice.below(2) as usize;
        let of = if choice.one_in(4) { at } else { 1 - at };
        let (number, length) = (self.messages.len(), choice.magnitude(LONGEST) as usize);
        let bytes = (0..length).map(|at| byte(number, at)).collect();
        let (buffers, ends) = ([bytes, vec![UNTOUCHED; length]], [self.side(at), self.side(of)]);
        self.messages.push(Message { buffers, ends, ended: [false; 2] });
        let to = self.place(at, of);
        let receive_first = choice.one_in(2);
        for receives in [receive_first, !receive_first] {
            let buffer = &mut self.messages[number].buffers[usize::from(receives)];
            let iov = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: length }];
            let tag = number as u64;
            let result = if receives {
                self.sides[of].receive(Some((tag, 0)), &iov, u64::MAX, context(RECEIVED + number), flags::COMPLETION)
            } else {
                let all_flags = flags::COMPLETION | flags::DELIVERY_COMPLETE;
                self.sides[at].send(Some(tag), &iov, to, context(SENT + number), 0, all_flags)
            };
            assert_eq!(result, 0, "a message");
        }
    }

    fn end_message(&mut self, side: (usize, u32), entry: &CqEntry, failed: Option<c_int>) {
        let context = entry.op_context.addr() - 1;
        let (end, number) = if context >= RECEIVED { (1, context - RECEIVED) } else { (0, context - SENT) };
        let lives = [0, 1].map(|at| self.side(at).1);
        let Message { buffers, ends, ended } = &mut self.messages[number];
        assert!(ends[end] == side && !std::mem::replace(&mut ended[end], true), "message {number} ends twice");
        let is_whole = ends.iter().all(|end| lives[end.0] == end.1);
        match failed {
            Some(error) => assert!(!is_whole, "message {number} fails with {error}"),
            None => assert!(end == 0 || buffers[0] == buffers[1], "the bytes of message {number}"),
        }
    }

    /// Takes what has ended. Returns whether anything has.
    fn read_queue(&mut self, at: usize, choice: &mut Choice) -> bool {
        let ended = self.sides[at].read(choice);
        let any = !ended.is_empty();
        for (entry, _, failed) in ended {
            let (side, failed) = (self.side(at), failed.map(|(error, _)| error));
            note!("  at {at}: {entry:?} {failed:?}");
            match entry.flags & caps::TAGGED {
                0 => self.model.complete(side, &entry, failed),
                _ => self.end_message(side, &entry, failed),
            }
        }
        any
    }

    /// Successes and failures of a kind that a side's counter has counted.
    fn counted(&self, at: usize, counter: usize) -> [u64; 2] {
        let counter = self.counters[at][counter];
        [call!(counter, ops => read()), call!(counter, ops => readerr())]
    }

    /// Whether all that a side has begun has ended, as its counters say.
    fn is_quiet(&mut self, at: usize) -> bool {
        let side = self.side(at);
        let quiet = [false, true].map(|write| {
            let counted: u64 = self.counted(at, usize::from(write)).iter().sum();
            let begun = |access: &&Access| access.side == side && access.write == write;
            let begun = self.model.accesses.iter().filter(begun).count() as u64;
            assert!(counted <= begun, "{at} has counted {counted} ends of {begun}");
            counted == begun
        });
        if quiet == [true; 2] {
            self.model.end_all(side);
        }
        quiet == [true; 2]
    }

    fn close_side(&mut self, at: usize, choice: &mut Choice) {
        let mut order = [0, 1, 2, 3, 4];
        (1..5).for_each(|last| order.swap(last, choice.below(last as u64 + 1) as usize));
        let early = choice.one_in(2);
        let regions = self.regions(at);
        // A region may be closed before its domain or behind it.
        if early {
            regions.iter().for_each(|number| self.close_region(*number));
        }
        order.iter().for_each(|which| self.sides[at].close_one(*which));
        regions.iter().for_each(|number| self.close_region(*number));
        self.counters[at].iter().for_each(|counter| assert_eq!(call!(*counter, fid.ops => close()), 0));
    }

    fn reopen(&mut self, at: usize, choice: &mut Choice) {
        note!("{at} is closed and opened anew");
        self.close_side(at, choice);
        self.model.close_side(at);
        let before = self.sides.each_ref().map(|side| side.address);
        let life = self.sides[at].life + 1;
        let (mut side, mut counters) = open(self.events, self.mr_mode, life, choice);
        while before.contains(&side.address) {
            counters.iter().for_each(|counter| assert_eq!(call!(*counter, fid.ops => close()), 0));
            (side, counters) = open(self.events, self.mr_mode, life, choice);
        }
        (self.sides[at], self.counters[at]) = (side, counters);
        self.insert_all();
    }

    /// What has not ended of what must.
    fn left(&self) -> Option<String> {
        let whole = |end: &(usize, u32)| self.sides[end.0].life == end.1;
        let due = |access: &Access| {
            !(access.ended && (access.told || !access.reported)) && self.sides[access.side.0].life == access.side.1
        };
        let access = self.model.accesses.iter().position(due);
        let untold = |access: &Access| {
            access.write && access.data && !access.noticed && access.fate == Fate::Done && self.model.is_whole(access)
        };
        let untold = self.model.accesses.iter().position(untold);
        let message = self.messages.iter().position(|message| message.ends.iter().all(whole) && message.ended != [true; 2]);
        let left = access.is_some() || untold.is_some() || message.is_some();
        left.then(|| format!("access {access:?} has not ended, nobody was told of {untold:?}, message {message:?} has not ended"))
    }

    /// What peers have done with a side's memory is counted.
    fn has_counted_peers(&self, at: usize) -> bool {
        let side = self.side(at);
        let of = |access: &Access, write: bool| access.target == side && access.write == write;
        [(2, true), (3, false)].into_iter().all(|(counter, write)| {
            let [counted, failed] = self.counted(at, counter);
            let expected = self.model.count(Fate::Done, |access| of(access, write));
            assert!(
                counted as usize <= *expected.end() && failed == 0,
                "{at} has counted {counted} and {failed}, not {expected:?}"
            );
            counted as usize >= *expected.start()
        })
    }
}

impl World for Memories {
    const LONGEST: u64 = 200;
    const PLAYS: usize = 60;

    fn new(word: u64) -> Memories {
        let mut choice = Choice::new(word);
        let events = !choice.one_in(3);
        let mr_mode =
            choice.of(&[0, mr::BASIC, mr::SCALABLE, mr::VIRT_ADDR, mr::PROV_KEY, mr::VIRT_ADDR | mr::PROV_KEY | mr::ALLOCATED]);
        let [(first, counted), (second, counted_too)] = [0, 1].map(|_| open(events, mr_mode, 0, &mut choice));
        let mut memories = Memories {
            sides: [first, second],
            counters: [counted, counted_too],
            events,
            mr_mode,
            model: Model::default(),
            messages: Vec::new(),
        };
        memories.insert_all();
        (0..4).for_each(|region| memories.register(region % 2, &mut choice));
        memories
    }

    fn step(&mut self, word: u64) -> bool {
        let choice = &mut Choice::new(word);
        let at = choice.below(2) as usize;
        match choice.below(100) {
            0..40 => {
                let bits = if choice.one_in(8) { 7 } else { 2 };
                let count = 1 + choice.magnitude(bits);
                (0..count).for_each(|_| self.access(choice));
            }
            40..48 => self.message(choice),
            48..54 => {
                let open = |number: &&usize| !self.model.regions[**number].mr.is_null();
                if self.regions(at).iter().filter(open).count() < MOST_REGIONS {
                    self.register(at, choice);
                }
            }
            54..57 => {
                let regions = self.regions(at);
                if !regions.is_empty() {
                    self.close_region(choice.of(&regions));
                }
            }
            57..60 => drop(self.is_quiet(at)),
            60 if choice.one_in(8) => self.reopen(at, choice),
            _ => drop(self.read_queue(at, choice)),
        }
        true
    }

    fn end(mut self) {
        let (mut choice, until) = (Choice::new(0), monotonic_micros() + PATIENCE);
        loop {
            let quiet = [0, 1].map(|at| {
                self.read_queue(at, &mut choice);
                self.is_quiet(at)
            });
            let counted = !self.events || self.model.lives != [0; 2] || (0..2).all(|at| self.has_counted_peers(at));
            let left = self.left();
            if quiet == [true; 2] && counted && left.is_none() {
                break;
            }
            assert!(monotonic_micros() < until, "quiet {quiet:?}, counted {counted}: {left:?}");
        }
        // All that has ended is read, and nothing more comes.
        let mut silence = 0;
        while silence < 64 {
            silence = if self.read_queue(silence % 2, &mut choice) { 0 } else { silence + 1 };
        }
        self.model.check_end();
        (0..2).for_each(|at| self.close_side(at, &mut choice));
    }
}

#[test]
fn memory_is_read_and_written_as_it_is_asked_for() {
    // SAFETY: tests of this program read the environment by the standard library only, which has a lock for it.
    unsafe { std::env::set_var("FI_RMPP_NIC", "never") };
    Fuzzer { name: "rma", corpus: include_str!("corpus.txt") }.run::<Memories>();
}
