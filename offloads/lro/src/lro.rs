//! The way of a frame: filter, order, merge.

use crate::aggregate::Aggregate;
use crate::counters::{Counters, Reason};
use crate::filter::{self, Test, Verdict};
use crate::flow::Flow;
use crate::held::{Island, Place};
use crate::{Mode, Settings};
use alloc::vec::Vec;
use baton_device::{Frame, MAX_FRAME};
use baton_tables::{Lookup, Wheel};
use baton_wire::{Flags, Name, TcpFrame};
use core::mem;

/// Islands are made in the buffers that their first segments came in, so many of them; beyond that each held segment is copied to a buffer of
/// its own, lest it take 64 KB.
const MOST_WIDE: usize = 128;
/// Bytes of a buffer for such a copy, as far as those are not larger; and how many are kept.
const SMALL: usize = 2048;
const MOST_SMALL: usize = 1024;

/// Segments of an island that is rather copied to what is open than let that go out: copying fewer makes larger aggregates, copying more costs
/// the NIC what larger aggregates would save the kernel.
const COPIED: u32 = 32;

/// Descriptors that are looked at for one that can be used again.
const CANDIDATES: usize = 8;

/// Large receive offload for one worker.
pub struct Lro {
    settings: Settings,
    /// ConnectionTable.
    table: Lookup,
    flows: Vec<Option<Flow>>,
    /// The preallocated queue of free descriptors.
    free: Vec<u32>,
    /// Buffers for aggregates.
    spares: Vec<Frame>,
    /// Buffers to give for those in which islands are made, and how many there may still be made.
    wide: Vec<Frame>,
    unmade: usize,
    /// Buffers for copies, used again.
    small: Vec<Frame>,
    wheel: Wheel<16>,
    expired: Vec<u32>,
    /// Where the search for a descriptor that can be used again goes on.
    hand: usize,
    held_bytes: usize,
    counters: Counters,
}

/// Whether the descriptor of a connection stays.
#[derive(PartialEq, Eq)]
enum Goes {
    On,
    Away,
}

impl Lro {
    /// With all its memory.
    pub fn new(settings: Settings, now: u64) -> Lro {
        let on = settings.mode != Mode::Off;
        let (connections, aggregates) = if on { (settings.connections.max(1), settings.aggregates) } else { (0, 0) };
        Lro {
            table: Lookup::new(connections, settings.hash_key),
            flows: (0..connections).map(|_| None).collect(),
            free: (0..connections as u32).rev().collect(),
            spares: (0..aggregates).map(|_| Frame::with_capacity(MAX_FRAME)).collect(),
            wide: Vec::new(),
            unmade: MOST_WIDE,
            small: Vec::new(),
            wheel: Wheel::new(now),
            expired: Vec::new(),
            hand: 0,
            held_bytes: 0,
            counters: Counters::default(),
            settings,
        }
    }

    /// Goes on with other settings; everything that waits goes out first. Memory is kept where it has the size that is wanted.
    pub fn set(&mut self, settings: Settings, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        self.flush_all(now, deliver);
        let size = |settings: &Settings| (settings.mode != Mode::Off, settings.connections, settings.aggregates);
        if size(&settings) == size(&self.settings) {
            self.settings = settings;
        } else {
            *self = Lro { counters: self.counters, ..Lro::new(settings, now) };
        }
    }

    /// As it was set last.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What was done so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Bytes that are held out of order.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Takes a frame in at `now` microseconds. It, or others that it completes, go to `deliver`; where it is kept, `frame` is another buffer
    /// afterwards.
    pub fn receive(&mut self, frame: &mut Frame, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        if self.settings.mode == Mode::Off {
            return deliver(frame);
        }
        match filter::examine(frame) {
            Verdict::Foreign(test) => {
                self.counters.failed[test as usize] += 1;
                deliver(frame);
            }
            Verdict::Passes(parsed, test) => {
                self.counters.failed[test as usize] += 1;
                self.pass(&parsed, test, frame, now, deliver);
            }
            Verdict::Data(parsed) => self.data(&parsed, frame, now, deliver),
        }
    }

    fn find(&self, name: &Name) -> Option<u32> {
        self.table.find(name, |at| matches!(self.flows.get(at as usize), Some(Some(flow)) if flow.name == *name))
    }

    /// A segment that is never merged: what came before it goes out before it.
    fn pass(&mut self, parsed: &TcpFrame, test: Test, frame: &mut Frame, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        let Some(at) = self.find(&Name::from(&parsed.flow)) else { return deliver(frame) };
        let ends = parsed.flags.intersects(Flags::SYN | Flags::RST | Flags::FIN);
        if parsed.payload_length == 0 && !ends && test == Test::Data {
            // An acknowledgement does not wait for what is missing, nor does that for it.
            self.close(at, Reason::Other, deliver);
            return deliver(frame);
        }
        self.empty(at, Reason::Other, now, deliver);
        deliver(frame);
        if ends {
            return self.forget(at);
        }
        if let Some(flow) = self.flows[at as usize].as_mut() {
            let end = flow.unwrapped(parsed.seq) + parsed.payload_length as u64;
            flow.next = flow.next.max(Some(end));
        }
    }

    fn data(&mut self, parsed: &TcpFrame, frame: &mut Frame, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        let name = Name::from(&parsed.flow);
        let Some(at) = self.find(&name).or_else(|| self.make(name, now)) else {
            self.counters.short_of_memory += 1;
            return deliver(frame);
        };
        let reorders = self.settings.mode == Mode::Reorder;
        let Some(flow) = self.flows[at as usize].as_mut() else { return deliver(frame) };
        flow.arrived(now);
        let seq = flow.unwrapped(parsed.seq);
        let expected = flow.next.unwrap_or(seq);
        let goes = if !reorders || seq == expected {
            let mut goes = self.accept(at, parsed, frame, now, deliver);
            if goes == Goes::On && reorders {
                goes = self.accept_held(at, now, deliver);
            }
            goes
        } else if seq < expected {
            self.counters.old += 1;
            self.close(at, Reason::Other, deliver);
            deliver(frame);
            Goes::On
        } else {
            self.hold(at, seq, parsed, frame, now, deliver);
            Goes::On
        };
        match goes {
            Goes::On => self.schedule(at),
            Goes::Away => {
                self.empty(at, Reason::Fin, now, deliver);
                self.forget(at);
            }
        }
    }

    /// A segment that is the next one.
    fn accept(&mut self, at: u32, parsed: &TcpFrame, frame: &mut Frame, now: u64, deliver: &mut impl FnMut(&mut Frame)) -> Goes {
        let settings = self.settings;
        let Some(flow) = self.flows[at as usize].as_mut() else { return Goes::On };
        flow.next = Some(flow.unwrapped(parsed.seq) + parsed.payload_length as u64);
        let pushed = flow.is_pushed(parsed, &settings);
        let fin = parsed.flags.contains(Flags::FIN);
        let goes = if fin { Goes::Away } else { Goes::On };
        if let Some(open) = flow.aggregate.as_mut() {
            if open.takes(frame.bytes(), parsed, &settings) {
                open.append(frame.bytes(), parsed);
                if let Some(reason) = open.ends_with(parsed, pushed, &settings) {
                    self.close(at, reason, deliver);
                }
                return goes;
            }
            self.close(at, Reason::Other, deliver);
        }
        if fin || pushed || !self.open(at, parsed, frame, now) {
            self.counters.alone += 1;
            deliver(frame);
        }
        goes
    }

    /// Begins an aggregate with a segment; its frame is exchanged for another. False if there is no buffer.
    fn open(&mut self, at: u32, parsed: &TcpFrame, frame: &mut Frame, now: u64) -> bool {
        let (Some(mut spare), Some(flow)) = (self.spares.pop(), self.flows[at as usize].as_mut()) else {
            self.counters.short_of_memory += 1;
            return false;
        };
        if frame.capacity() < MAX_FRAME {
            // One that was held has no room for more.
            spare.copy_from(frame);
        } else {
            mem::swap(&mut spare, frame);
        }
        flow.aggregate = Some(Aggregate::new(spare, *parsed, now));
        true
    }

    /// What is held and follows now.
    fn accept_held(&mut self, at: u32, now: u64, deliver: &mut impl FnMut(&mut Frame)) -> Goes {
        loop {
            let Some(flow) = self.flows[at as usize].as_mut() else { return Goes::On };
            let next = flow.next.unwrap_or(0);
            let Some((seq, island)) = flow.held.pop(next) else { return Goes::On };
            // Another gap, another wait.
            flow.gap_since = now;
            flow.next = Some(next.max(seq + island.length()));
            self.held_bytes -= island.bytes();
            self.counters.held -= u64::from(island.aggregate.count);
            let goes = if seq < next {
                // It overlaps what has gone out.
                self.counters.old += u64::from(island.aggregate.count);
                self.close(at, Reason::Other, deliver);
                self.let_out(at, island.aggregate, Reason::Other, deliver);
                Goes::On
            } else {
                self.counters.reordered += u64::from(island.aggregate.count);
                self.join(at, island, now, deliver)
            };
            if goes == Goes::Away {
                return goes;
            }
        }
    }

    /// An island that is next: one segment as if it came now; a few are copied to what is open if they fit; many go on as they are.
    fn join(&mut self, at: u32, island: Island, now: u64, deliver: &mut impl FnMut(&mut Frame)) -> Goes {
        let Island { mut aggregate, sealed, .. } = island;
        if aggregate.count == 1 {
            let (mut frame, parsed) = aggregate.into_segment();
            let goes = self.accept(at, &parsed, &mut frame, now, deliver);
            self.keep(frame);
            return goes;
        }
        let goes = if sealed == Some(Reason::Fin) { Goes::Away } else { Goes::On };
        let settings = self.settings;
        if let Some(open) = self.flows[at as usize].as_mut().and_then(|flow| flow.aggregate.as_mut())
            && aggregate.count <= COPIED
            && open.takes_all(&aggregate, &settings)
        {
            open.append_all(&aggregate);
            let full = (!open.has_room(&settings)).then_some(Reason::Full);
            if let Some(reason) = sealed.or(full) {
                self.close(at, reason, deliver);
            }
            self.keep(aggregate.frame);
            return goes;
        }
        self.close(at, Reason::Other, deliver);
        let goes_on = sealed.is_none() && aggregate.frame.capacity() >= MAX_FRAME;
        match (self.flows[at as usize].as_mut(), self.spares.pop()) {
            (Some(flow), Some(spare)) if goes_on => {
                // Its buffer is one of the aggregates' from now on, and one of theirs takes its place.
                self.wide.push(spare);
                aggregate.since = now;
                flow.aggregate = Some(aggregate);
            }
            (_, spare) => {
                self.spares.extend(spare);
                self.let_out(at, aggregate, sealed.unwrap_or(Reason::Other), deliver);
            }
        }
        goes
    }

    /// An island goes out by itself.
    fn let_out(&mut self, at: u32, aggregate: Aggregate, reason: Reason, deliver: &mut impl FnMut(&mut Frame)) {
        let mut frame = self.finish(at, aggregate, reason);
        deliver(&mut frame);
        self.keep(frame);
    }

    /// Takes the segment out of its buffer, or with it.
    fn take(&mut self, frame: &mut Frame) -> Frame {
        if frame.capacity() >= MAX_FRAME {
            let wide = self.wide.pop().or_else(|| {
                self.unmade = self.unmade.checked_sub(1)?;
                Some(Frame::with_capacity(MAX_FRAME))
            });
            if let Some(wide) = wide {
                return mem::replace(frame, wide);
            }
        }
        let length = frame.bytes().len();
        let reused = self.small.pop().filter(|small| small.capacity() >= length);
        let mut copy = reused.unwrap_or_else(|| Frame::with_capacity(length.max(SMALL)));
        copy.copy_from(frame);
        copy
    }

    /// Keeps the buffer of what was held.
    fn keep(&mut self, frame: Frame) {
        if frame.capacity() >= MAX_FRAME {
            self.wide.push(frame);
        } else if frame.capacity() <= 2 * SMALL && self.small.len() < MOST_SMALL {
            self.small.push(frame);
        }
    }

    /// A segment behind a gap.
    fn hold(&mut self, at: u32, seq: u64, parsed: &TcpFrame, frame: &mut Frame, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        let Settings { held_segments, held_bytes, .. } = self.settings;
        let Some(flow) = self.flows[at as usize].as_mut() else { return deliver(frame) };
        let length = frame.bytes().len();
        let full = flow.held.segments() >= held_segments || self.held_bytes + length > held_bytes;
        if full {
            // Whoever sends so much out of order gets no order.
            self.counters.short_of_memory += 1;
            self.empty(at, Reason::Other, now, deliver);
            deliver(frame);
            if let Some(flow) = self.flows[at as usize].as_mut() {
                flow.next = flow.next.max(Some(seq + parsed.payload_length as u64));
            }
            return;
        }
        if flow.held.is_empty() {
            flow.gap_since = now;
        }
        let settings = self.settings;
        let pushed = flow.is_pushed(parsed, &settings);
        let place = flow.held.place(seq, seq + parsed.payload_length as u64);
        match place {
            Place::Overlaps => {
                self.counters.old += 1;
                return deliver(frame);
            }
            Place::Follows(island) if island.sealed.is_none() && island.aggregate.takes(frame.bytes(), parsed, &settings) => {
                island.aggregate.append(frame.bytes(), parsed);
                island.sealed = island.aggregate.ends_with(parsed, pushed, &settings);
                flow.held.count();
                self.held_bytes += parsed.payload_length;
            }
            Place::Follows(_) | Place::Apart => {
                let aggregate = Aggregate::new(self.take(frame), *parsed, now);
                let island = Island { sealed: aggregate.ends_with(parsed, pushed, &settings), aggregate };
                if let Some(flow) = self.flows[at as usize].as_mut() {
                    flow.held.insert(seq, island);
                }
                self.held_bytes += length;
            }
        }
        self.counters.held += 1;
    }

    /// The aggregate goes out.
    fn close(&mut self, at: u32, reason: Reason, deliver: &mut impl FnMut(&mut Frame)) {
        let Some(flow) = self.flows[at as usize].as_mut() else { return };
        let Some(open) = flow.aggregate.take() else { return };
        let mut frame = self.finish(at, open, reason);
        deliver(&mut frame);
        // A device may have exchanged it for one of its own.
        self.spares.push(if frame.capacity() < MAX_FRAME { Frame::with_capacity(MAX_FRAME) } else { frame });
    }

    fn finish(&mut self, at: u32, aggregate: Aggregate, reason: Reason) -> Frame {
        if let Some(flow) = self.flows[at as usize].as_mut() {
            flow.last_count = aggregate.count;
        }
        let count = u64::from(aggregate.count);
        let frame = aggregate.finish();
        if count > 1 {
            self.counters.merged += count;
            self.counters.aggregates += 1;
            self.counters.bytes += (frame.bytes().len() - baton_wire::frame::ETHERNET) as u64;
        } else {
            self.counters.alone += 1;
        }
        self.counters.flushed[reason as usize] += 1;
        frame
    }

    /// Everything of a connection goes out, in order; what is missing is waited for no longer.
    fn empty(&mut self, at: u32, reason: Reason, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        self.close(at, reason, deliver);
        while let Some(flow) = self.flows[at as usize].as_mut()
            && let Some(seq) = flow.held.first()
        {
            self.counters.gaps += 1;
            flow.next = Some(seq);
            self.accept_held(at, now, deliver);
            self.close(at, reason, deliver);
        }
    }

    fn schedule(&mut self, at: u32) {
        let Some(flow) = self.flows[at as usize].as_mut() else { return };
        if let Some(due) = flow.due(&self.settings)
            && Wheel::<16>::tick_of(due) < flow.scheduled
        {
            flow.scheduled = self.wheel.enter(at, due);
        }
    }

    /// When [`Lro::expire`] may have something to do, in microseconds.
    #[inline]
    pub fn next_tick(&self) -> u64 {
        if self.settings.mode == Mode::Off { u64::MAX } else { self.wheel.next_tick() }
    }

    /// When something may have to go out, in microseconds.
    pub fn next_expiry(&self) -> Option<u64> {
        if self.settings.mode == Mode::Off { None } else { self.wheel.next_expiry() }
    }

    /// Lets go out what has waited long enough.
    pub fn expire(&mut self, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        let mut expired = mem::take(&mut self.expired);
        while let Some(tick) = self.wheel.expire(now, &mut expired) {
            for at in expired.drain(..) {
                self.on_tick(at, tick, now, deliver);
            }
        }
        self.expired = expired;
    }

    fn on_tick(&mut self, at: u32, tick: u64, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        let Some(flow) = self.flows[at as usize].as_mut().filter(|flow| flow.scheduled == tick) else { return };
        flow.scheduled = u64::MAX;
        let gap = !flow.held.is_empty() && flow.gap_since + self.settings.gap <= now;
        if flow.due(&self.settings).is_some_and(|due| due <= now) {
            if gap { self.empty(at, Reason::Time, now, deliver) } else { self.close(at, Reason::Time, deliver) }
        }
        self.schedule(at);
    }

    /// Everything of a connection goes out now, and nothing more is known of it.
    pub fn flush(&mut self, name: &Name, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        if let Some(at) = self.find(name) {
            self.empty(at, Reason::Asked, now, deliver);
            self.forget(at);
        }
    }

    /// Everything goes out now.
    pub fn flush_all(&mut self, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        for at in 0..self.flows.len() as u32 {
            self.empty(at, Reason::Asked, now, deliver);
        }
    }

    /// A descriptor for a connection, be it one of another that has been quiet.
    fn make(&mut self, name: Name, now: u64) -> Option<u32> {
        let at = self.free.pop().or_else(|| self.reclaim())?;
        self.flows[at as usize] = Some(Flow::new(name, now, &self.settings));
        self.table.insert(&name, at);
        Some(at)
    }

    fn reclaim(&mut self) -> Option<u32> {
        for _ in 0..CANDIDATES {
            self.hand = (self.hand + 1) % self.flows.len();
            if self.flows[self.hand].as_ref().is_some_and(Flow::is_idle) {
                self.forget(self.hand as u32);
                return self.free.pop();
            }
        }
        None
    }

    fn forget(&mut self, at: u32) {
        let Some(flow) = self.flows[at as usize].take() else { return };
        let flows = &self.flows;
        let name_of = |other: u32| flows[other as usize].as_ref().map_or(flow.name, |found| found.name);
        self.table.remove(&flow.name, at, name_of);
        self.free.push(at);
    }
}
