//! The path of a frame: filter, order, merge.

use crate::aggregate::Aggregate;
use crate::counters::{Counters, Reason};
use crate::descriptor::Descriptor;
use crate::filter::{self, Test, Verdict};
use crate::out_of_order::{Island, Relation};
use crate::{LroSettings, Mode};
use alloc::vec::Vec;
use baton_device::{Frame, MAX_FRAME};
use baton_tables::{Lookup, Wheel};
use baton_wire::{Flags, FlowKey, TcpFrame};
use core::mem;

/// Number of islands that may be built in the full-sized buffers of their first segments. Beyond it each held segment
/// is copied to a buffer of its own, so that it does not occupy 64 KB.
const MAX_ISLAND_BUFFERS: usize = 128;
/// Bytes of a buffer for such a copy, unless the segment is larger; and how many free ones are kept.
const SMALL_BUFFER: usize = 2048;
const MAX_SMALL_BUFFERS: usize = 1024;

/// An island of up to this many segments is copied into the open aggregate; a longer one closes the aggregate and opens
/// its own. Copying fewer makes smaller aggregates; copying more costs the NIC what larger aggregates would save the
/// kernel.
const MAX_ISLAND_COPY: u32 = 32;

/// Number of descriptors that are examined in the search for an idle one.
const CANDIDATES: usize = 8;

/// Large receive offload for one worker.
pub struct Lro {
    settings: LroSettings,
    /// The paper's ConnectionTable: the index of each connection's descriptor.
    table: Lookup,
    flows: Vec<Option<Descriptor>>,
    /// Indices of free descriptors, the paper's preallocated queue.
    free: Vec<u32>,
    /// Free buffers for aggregates.
    spares: Vec<Frame>,
    /// Free full-sized buffers, which replace buffers in which islands are built, and the number that may still be
    /// allocated.
    island_buffers: Vec<Frame>,
    island_buffers_left: usize,
    /// Free buffers for copies of held segments.
    small_buffers: Vec<Frame>,
    wheel: Wheel<16>,
    expired: Vec<u32>,
    /// Index at which the search for an idle descriptor continues.
    hand: usize,
    held_bytes: usize,
    /// See [`Lro::missing_some_after`].
    idle: u64,
    counters: Counters,
}

/// Whether a connection continues after a segment.
#[derive(PartialEq, Eq)]
enum Progress {
    Continues,
    /// It carried FIN: the connection's descriptor is freed.
    Ends,
}

impl Lro {
    /// Makes it with all its memory.
    pub fn new(settings: LroSettings, now: u64) -> Lro {
        let on = settings.mode != Mode::Off;
        let (connections, aggregates) = if on { (settings.connections.max(1), settings.aggregates) } else { (0, 0) };
        Lro {
            table: Lookup::new(connections, settings.hash_key),
            flows: (0..connections).map(|_| None).collect(),
            free: (0..connections as u32).rev().collect(),
            spares: (0..aggregates).map(|_| Frame::with_capacity(MAX_FRAME)).collect(),
            island_buffers: Vec::new(),
            island_buffers_left: MAX_ISLAND_BUFFERS,
            small_buffers: Vec::new(),
            wheel: Wheel::new(now),
            expired: Vec::new(),
            hand: 0,
            held_bytes: 0,
            idle: u64::MAX,
            counters: Counters::default(),
            settings,
        }
    }

    /// Makes it fit for a path that does not carry all segments: when a connection has nothing waiting and was idle for
    /// `idle` microseconds, some of its segments may have taken another route, so missing ones are not waited for.
    pub fn missing_some_after(self, idle: u64) -> Lro {
        Lro { idle, ..self }
    }

    /// Changes the settings. All segments that wait go out first. Memory is kept where its size stays the same.
    pub fn set(&mut self, settings: LroSettings, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        self.flush_all(now, deliver);
        let size = |settings: &LroSettings| (settings.mode != Mode::Off, settings.connections, settings.aggregates);
        if size(&settings) == size(&self.settings) {
            self.settings = settings;
        } else {
            *self = Lro { counters: self.counters, idle: self.idle, ..Lro::new(settings, now) };
        }
    }

    /// The current settings.
    pub fn settings(&self) -> &LroSettings {
        &self.settings
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Number of bytes held out of order at present.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Takes a frame at `now` microseconds. The frame, or an aggregate that it completes, goes to `deliver`. If the
    /// frame is kept, `frame` is another buffer of the same size afterwards.
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
                self.pass_on(&parsed, test, frame, now, deliver);
            }
            Verdict::Data(parsed) => self.on_data(&parsed, frame, now, deliver),
        }
    }

    fn find(&self, key: &FlowKey) -> Option<u32> {
        self.table.find(key, |at| matches!(self.flows.get(at as usize), Some(Some(flow)) if flow.key == *key))
    }

    /// Passes on a segment that is never merged, after the segments of its connection that wait.
    fn pass_on(&mut self, parsed: &TcpFrame, test: Test, frame: &mut Frame, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        let Some(at) = self.find(&FlowKey::from(&parsed.flow)) else { return deliver(frame) };
        let ends = parsed.flags.intersects(Flags::SYN | Flags::RST | Flags::FIN);
        if parsed.payload_length == 0 && !ends && test == Test::Data {
            // A pure acknowledgement does not wait for missing data, and missing data is still waited for.
            self.close_aggregate(at, Reason::Other, deliver);
            return deliver(frame);
        }
        self.flush_at(at, Reason::Other, now, deliver);
        deliver(frame);
        if ends {
            return self.remove(at);
        }
        if let Some(flow) = self.flows[at as usize].as_mut() {
            let end = flow.unwrapped(parsed.seq) + parsed.payload_length as u64;
            flow.next = flow.next.max(Some(end));
        }
    }

    /// Orders and merges a data segment.
    fn on_data(&mut self, parsed: &TcpFrame, frame: &mut Frame, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        let key = FlowKey::from(&parsed.flow);
        let Some(at) = self.find(&key).or_else(|| self.insert(key, now)) else {
            self.counters.short_of_memory += 1;
            return deliver(frame);
        };
        let reorders = self.settings.mode == Mode::Reorder;
        let Some(flow) = self.flows[at as usize].as_mut() else { return deliver(frame) };
        if now.saturating_sub(flow.last_arrival) >= self.idle && flow.is_idle() {
            flow.next = None;
        }
        flow.arrived(now);
        let seq = flow.unwrapped(parsed.seq);
        let expected = flow.next.unwrap_or(seq);
        let progress = if !reorders || seq == expected {
            let mut progress = self.accept(at, parsed, frame, now, deliver);
            if progress == Progress::Continues && reorders {
                progress = self.accept_held(at, now, deliver);
            }
            progress
        } else if seq < expected {
            self.counters.old += 1;
            self.close_aggregate(at, Reason::Other, deliver);
            deliver(frame);
            Progress::Continues
        } else {
            self.hold(at, seq, parsed, frame, now, deliver);
            Progress::Continues
        };
        match progress {
            Progress::Continues => self.schedule(at),
            Progress::Ends => {
                self.flush_at(at, Reason::Fin, now, deliver);
                self.remove(at);
            }
        }
    }

    /// Merges the next segment in order, or passes it on.
    fn accept(
        &mut self,
        at: u32,
        parsed: &TcpFrame,
        frame: &mut Frame,
        now: u64,
        deliver: &mut impl FnMut(&mut Frame),
    ) -> Progress {
        let settings = self.settings;
        let Some(flow) = self.flows[at as usize].as_mut() else { return Progress::Continues };
        flow.next = Some(flow.unwrapped(parsed.seq) + parsed.payload_length as u64);
        let pushed = flow.is_pushed(parsed, &settings);
        let fin = parsed.flags.contains(Flags::FIN);
        let progress = if fin { Progress::Ends } else { Progress::Continues };
        if let Some(open) = flow.aggregate.as_mut() {
            if open.takes(frame.bytes(), parsed, &settings) {
                open.append(frame.bytes(), parsed);
                if let Some(reason) = open.ends_with(parsed, pushed, &settings) {
                    self.close_aggregate(at, reason, deliver);
                }
                return progress;
            }
            self.close_aggregate(at, Reason::Other, deliver);
        }
        if fin || pushed || !self.open_aggregate(at, parsed, frame, now) {
            self.counters.alone += 1;
            deliver(frame);
        }
        progress
    }

    /// Opens an aggregate with a segment, whose frame is exchanged for another. False if there is no buffer.
    fn open_aggregate(&mut self, at: u32, parsed: &TcpFrame, frame: &mut Frame, now: u64) -> bool {
        let (Some(mut spare), Some(flow)) = (self.spares.pop(), self.flows[at as usize].as_mut()) else {
            self.counters.short_of_memory += 1;
            return false;
        };
        if frame.capacity() < MAX_FRAME {
            // A copied segment's buffer has no room for more.
            spare.copy_from(frame);
        } else {
            mem::swap(&mut spare, frame);
        }
        flow.aggregate = Some(Aggregate::new(spare, *parsed, now));
        true
    }

    /// Merges the held islands that are next in order.
    fn accept_held(&mut self, at: u32, now: u64, deliver: &mut impl FnMut(&mut Frame)) -> Progress {
        loop {
            let Some(flow) = self.flows[at as usize].as_mut() else { return Progress::Continues };
            let next = flow.next.unwrap_or(0);
            let Some((seq, island)) = flow.held.pop(next) else { return Progress::Continues };
            // The wait for the next gap begins.
            flow.gap_since = now;
            flow.next = Some(next.max(seq + island.length()));
            self.held_bytes -= island.bytes();
            self.counters.held -= u64::from(island.aggregate.count);
            let progress = if seq < next {
                // It overlaps data that has gone out.
                self.counters.old += u64::from(island.aggregate.count);
                self.close_aggregate(at, Reason::Other, deliver);
                self.deliver_island(at, island.aggregate, Reason::Other, deliver);
                Progress::Continues
            } else {
                self.counters.reordered += u64::from(island.aggregate.count);
                self.append_island(at, island, now, deliver)
            };
            if progress == Progress::Ends {
                return progress;
            }
        }
    }

    /// Merges an island that is next in order. A single segment is treated as if it arrived now; a few are copied to
    /// the open aggregate if they fit; many become the open aggregate.
    fn append_island(&mut self, at: u32, island: Island, now: u64, deliver: &mut impl FnMut(&mut Frame)) -> Progress {
        let Island { mut aggregate, sealed, .. } = island;
        if aggregate.count == 1 {
            let (mut frame, parsed) = aggregate.into_segment();
            let progress = self.accept(at, &parsed, &mut frame, now, deliver);
            self.recycle(frame);
            return progress;
        }
        let progress = if sealed == Some(Reason::Fin) { Progress::Ends } else { Progress::Continues };
        let settings = self.settings;
        if let Some(open) = self.flows[at as usize].as_mut().and_then(|flow| flow.aggregate.as_mut())
            && aggregate.count <= MAX_ISLAND_COPY
            && open.takes_all(&aggregate, &settings)
        {
            open.append_all(&aggregate);
            let full = (!open.has_room(&settings)).then_some(Reason::Full);
            if let Some(reason) = sealed.or(full) {
                self.close_aggregate(at, reason, deliver);
            }
            self.recycle(aggregate.frame);
            return progress;
        }
        self.close_aggregate(at, Reason::Other, deliver);
        let may_grow = sealed.is_none() && aggregate.frame.capacity() >= MAX_FRAME;
        match (self.flows[at as usize].as_mut(), self.spares.pop()) {
            (Some(flow), Some(spare)) if may_grow => {
                // The island's buffer now counts as a buffer for aggregates, and one of those takes its place.
                self.island_buffers.push(spare);
                aggregate.since = now;
                flow.aggregate = Some(aggregate);
            }
            (_, spare) => {
                self.spares.extend(spare);
                self.deliver_island(at, aggregate, sealed.unwrap_or(Reason::Other), deliver);
            }
        }
        progress
    }

    /// Delivers an island as an aggregate of its own.
    fn deliver_island(&mut self, at: u32, aggregate: Aggregate, reason: Reason, deliver: &mut impl FnMut(&mut Frame)) {
        let mut frame = self.finish(at, aggregate, reason);
        deliver(&mut frame);
        self.recycle(frame);
    }

    /// Takes a segment to be held: with its buffer, for which `frame` gets another, or as a copy.
    fn take_segment(&mut self, frame: &mut Frame) -> Frame {
        if frame.capacity() >= MAX_FRAME {
            let island_buffers = self.island_buffers.pop().or_else(|| {
                self.island_buffers_left = self.island_buffers_left.checked_sub(1)?;
                Some(Frame::with_capacity(MAX_FRAME))
            });
            if let Some(island_buffers) = island_buffers {
                return mem::replace(frame, island_buffers);
            }
        }
        let length = frame.length();
        let reused = self.small_buffers.pop().filter(|small| small.capacity() >= length);
        let mut copy = reused.unwrap_or_else(|| Frame::with_capacity(length.max(SMALL_BUFFER)));
        copy.copy_from(frame);
        copy
    }

    /// Keeps the buffer of a held segment for further use.
    fn recycle(&mut self, frame: Frame) {
        if frame.capacity() >= MAX_FRAME {
            self.island_buffers.push(frame);
        } else if frame.capacity() <= 2 * SMALL_BUFFER && self.small_buffers.len() < MAX_SMALL_BUFFERS {
            self.small_buffers.push(frame);
        }
    }

    /// Holds a segment that is behind a gap.
    fn hold(&mut self, at: u32, seq: u64, parsed: &TcpFrame, frame: &mut Frame, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        let LroSettings { held_segments, held_bytes, .. } = self.settings;
        let Some(flow) = self.flows[at as usize].as_mut() else { return deliver(frame) };
        let length = frame.length();
        let full = flow.held.segments() >= held_segments || self.held_bytes + length > held_bytes;
        if full {
            // The peer sends more segments out of order than the caps allow, so its segments are passed on as they
            // come.
            self.counters.short_of_memory += 1;
            self.flush_at(at, Reason::Other, now, deliver);
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
            Relation::Overlaps => {
                self.counters.old += 1;
                return deliver(frame);
            }
            Relation::Follows(island) if island.sealed.is_none() && island.aggregate.takes(frame.bytes(), parsed, &settings) => {
                island.aggregate.append(frame.bytes(), parsed);
                island.sealed = island.aggregate.ends_with(parsed, pushed, &settings);
                flow.held.count();
                self.held_bytes += parsed.payload_length;
            }
            Relation::Follows(_) | Relation::Apart => {
                let aggregate = Aggregate::new(self.take_segment(frame), *parsed, now);
                let island = Island { sealed: aggregate.ends_with(parsed, pushed, &settings), aggregate };
                if let Some(flow) = self.flows[at as usize].as_mut() {
                    flow.held.insert(seq, island);
                }
                self.held_bytes += length;
            }
        }
        self.counters.held += 1;
    }

    /// Delivers the open aggregate.
    fn close_aggregate(&mut self, at: u32, reason: Reason, deliver: &mut impl FnMut(&mut Frame)) {
        let Some(flow) = self.flows[at as usize].as_mut() else { return };
        let Some(open) = flow.aggregate.take() else { return };
        let mut frame = self.finish(at, open, reason);
        deliver(&mut frame);
        // A device may have exchanged the frame for another of its frames.
        self.spares.push(if frame.capacity() < MAX_FRAME { Frame::with_capacity(MAX_FRAME) } else { frame });
    }

    /// Finishes an aggregate and counts it.
    fn finish(&mut self, at: u32, aggregate: Aggregate, reason: Reason) -> Frame {
        if let Some(flow) = self.flows[at as usize].as_mut() {
            flow.last_count = aggregate.count;
        }
        let count = u64::from(aggregate.count);
        let frame = aggregate.finish();
        if count > 1 {
            self.counters.merged += count;
            self.counters.aggregates += 1;
            self.counters.bytes += (frame.length() - baton_wire::frame::ETHERNET) as u64;
        } else {
            self.counters.alone += 1;
        }
        self.counters.flushed[reason as usize] += 1;
        frame
    }

    /// Delivers everything that a connection has waiting, in order. Gaps are not waited for any longer.
    fn flush_at(&mut self, at: u32, reason: Reason, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        self.close_aggregate(at, reason, deliver);
        while let Some(flow) = self.flows[at as usize].as_mut()
            && let Some(seq) = flow.held.first()
        {
            self.counters.gaps += 1;
            flow.next = Some(seq);
            self.accept_held(at, now, deliver);
            self.close_aggregate(at, reason, deliver);
        }
    }

    /// Enters a connection into the timing wheel, unless an entry that is early enough exists.
    fn schedule(&mut self, at: u32) {
        let Some(flow) = self.flows[at as usize].as_mut() else { return };
        if let Some(due) = flow.due(&self.settings)
            && Wheel::<16>::tick_of(due) < flow.scheduled
        {
            flow.scheduled = self.wheel.enter(at, due);
        }
    }

    /// Time before which [`Lro::expire`] has nothing to do, in microseconds; cheaper than [`Lro::next_expiry`], and
    /// never later.
    #[inline]
    pub fn next_tick(&self) -> u64 {
        if self.settings.mode == Mode::Off { u64::MAX } else { self.wheel.next_tick() }
    }

    /// When something may have to go out, in microseconds; None if nothing waits.
    pub fn next_expiry(&self) -> Option<u64> {
        if self.settings.mode == Mode::Off { None } else { self.wheel.next_expiry() }
    }

    /// Delivers everything whose time is up.
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
            if gap {
                self.flush_at(at, Reason::Timeout, now, deliver)
            } else {
                self.close_aggregate(at, Reason::Timeout, deliver)
            }
        }
        self.schedule(at);
    }

    /// Delivers everything that a connection has waiting, and forgets the connection.
    pub fn flush(&mut self, key: &FlowKey, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        if let Some(at) = self.find(key) {
            self.flush_at(at, Reason::Requested, now, deliver);
            self.remove(at);
        }
    }

    /// Delivers everything that waits.
    pub fn flush_all(&mut self, now: u64, deliver: &mut impl FnMut(&mut Frame)) {
        for at in 0..self.flows.len() as u32 {
            self.flush_at(at, Reason::Requested, now, deliver);
        }
    }

    /// Takes a descriptor for a connection: a free one, or that of an idle connection.
    fn insert(&mut self, key: FlowKey, now: u64) -> Option<u32> {
        let at = self.free.pop().or_else(|| self.reclaim())?;
        self.flows[at as usize] = Some(Descriptor::new(key, now, &self.settings));
        self.table.insert(&key, at);
        Some(at)
    }

    /// Frees the descriptor of an idle connection, if one is found soon.
    fn reclaim(&mut self) -> Option<u32> {
        for _ in 0..CANDIDATES {
            self.hand = (self.hand + 1) % self.flows.len();
            if self.flows[self.hand].as_ref().is_some_and(Descriptor::is_idle) {
                self.remove(self.hand as u32);
                return self.free.pop();
            }
        }
        None
    }

    fn remove(&mut self, at: u32) {
        let Some(flow) = self.flows[at as usize].take() else { return };
        let flows = &self.flows;
        let key_of = |other: u32| flows[other as usize].as_ref().map_or(flow.key, |found| found.key);
        self.table.remove(&flow.key, at, key_of);
        self.free.push(at);
    }
}
