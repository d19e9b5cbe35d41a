//! What is done with frames from either side.

use crate::entry::{Entry, Peer};
use crate::rewrite;
use crate::store::{self, RING, Store};
use alloc::vec::Vec;
use baton_device::{Checksum, Frame};
use baton_tables::{Lookup, Wheel};
use baton_wire::frame::{ETHERNET, Header, Link, MAX_HEADER, Template};
use baton_wire::{Flags, Name, TcpFrame, TcpOptions};
use core::mem;

/// Microseconds for which data waits for a second segment, or for the kernel, before it is acknowledged.
const DELAY: u64 = 500;

/// Segments that are acknowledged together (RFC 9293 section 3.8.6.3).
const TOGETHER: u32 = 2;

/// Microseconds after which the kernel is given what it has not acknowledged again, at first and at most: more than its delayed
/// acknowledgement and than large receive waits.
const PATIENCE: u64 = 300_000;
const MOST_PATIENCE: u64 = 4_000_000;

/// Acknowledgements of the kernel's that say nothing new after which it is given what it lacks at once.
const REPEATED: u32 = 2;

/// Payload of a segment that is given to the kernel again.
const PIECE: usize = 1400;

/// Descriptors that are looked at for one that can be used again.
const CANDIDATES: usize = 8;

/// The event in the middle of a connection that makes its data the kernel's business.
const SPECIAL: Flags = Flags(Flags::SYN.0 | Flags::FIN.0 | Flags::RST.0 | Flags::URG.0 | Flags::CWR.0);

/// What was done so far.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Acknowledgements of the NIC's own.
    pub sent: u64,
    /// Frames of the kernel's that got the NIC's acknowledgement.
    pub raised: u64,
    /// Segments that the kernel was given again.
    pub again: u64,
    /// Segments that did not come in order, were too many for the place or the window, or are the kernel's to acknowledge.
    pub left: u64,
}

fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// Active acknowledgements of one worker's connections.
pub struct Active<S> {
    store: S,
    on: bool,
    table: Lookup,
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    /// Places that are this worker's to give.
    places: Vec<usize>,
    hand: usize,
    wheel: Wheel<128>,
    expired: Vec<u32>,
    scratch: Frame,
    counters: Counters,
}

impl<S: Store> Active<S> {
    /// Over memory in which it may use these places, with what another NIC may have left there.
    pub fn new(store: S, places: &[usize], hash_key: [u64; 4], on: bool, now: u64) -> Active<S> {
        let count = store.places();
        let mut active = Active {
            table: Lookup::new(count, hash_key),
            entries: (0..count).map(|_| None).collect(),
            free: (0..count as u32).rev().collect(),
            places: Vec::new(),
            hand: 0,
            wheel: Wheel::new(now),
            expired: Vec::new(),
            scratch: Frame::with_capacity(MAX_HEADER + PIECE),
            counters: Counters::default(),
            store,
            on,
        };
        for &place in places {
            match store::recover(&active.store, place) {
                Some(mut entry) => {
                    // The kernel gets it as soon as frames flow.
                    (entry.again_due, entry.patience) = (now, PATIENCE);
                    active.enter(entry);
                }
                None => {
                    store::release(&active.store, place);
                    active.places.push(place);
                }
            }
        }
        active
    }

    /// Whether new data is acknowledged. What was acknowledged before is kept in any case until the kernel has it.
    pub fn set(&mut self, on: bool) {
        self.on = on;
    }

    /// What was done so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    fn find(&self, name: &Name) -> Option<u32> {
        self.table.find(name, |at| matches!(self.entries.get(at as usize), Some(Some(entry)) if entry.name == *name))
    }

    fn enter(&mut self, entry: Entry) -> Option<u32> {
        let at = self.free.pop()?;
        self.table.insert(&entry.name, at);
        self.entries[at as usize] = Some(entry);
        self.schedule(at);
        Some(at)
    }

    /// A place for a connection whose handshake is seen.
    fn make(&mut self, flow: baton_wire::Flow) -> Option<u32> {
        let name = Name::from(&flow);
        if let Some(at) = self.find(&name) {
            return Some(at);
        }
        if self.places.is_empty() || self.free.is_empty() {
            self.reclaim();
        }
        let place = self.places.pop()?;
        let at = self.enter(Entry::new(place, flow));
        if at.is_none() {
            self.places.push(place);
        }
        at
    }

    fn reclaim(&mut self) {
        for _ in 0..CANDIDATES {
            self.hand = (self.hand + 1) % self.entries.len().max(1);
            if self.entries.get(self.hand).is_some_and(|entry| entry.as_ref().is_some_and(|entry| !entry.holds())) {
                return self.forget(self.hand as u32);
            }
        }
    }

    fn remove(&mut self, at: u32) -> Option<Entry> {
        let entry = self.entries[at as usize].take()?;
        let entries = &self.entries;
        let name_of = |other: u32| entries[other as usize].as_ref().map_or(entry.name, |found| found.name);
        self.table.remove(&entry.name, at, name_of);
        self.free.push(at);
        Some(entry)
    }

    fn forget(&mut self, at: u32) {
        if let Some(entry) = self.remove(at) {
            store::release(&self.store, entry.place);
            self.places.push(entry.place);
        }
    }

    /// Ends for a connection, which is about to leave the kernel. False if the kernel has not got all that was acknowledged: not yet.
    pub fn end(&mut self, name: &Name) -> bool {
        let Some(at) = self.find(name) else { return true };
        if self.entries[at as usize].as_ref().is_some_and(Entry::holds) {
            return false;
        }
        self.forget(at);
        true
    }

    /// Takes connections out, for another worker.
    pub fn take(&mut self, mut which: impl FnMut(&Entry) -> bool) -> Vec<Entry> {
        let matching = |(at, entry): (usize, &Option<Entry>)| entry.as_ref().filter(|entry| which(entry)).map(|_| at as u32);
        let slots: Vec<u32> = self.entries.iter().enumerate().filter_map(matching).collect();
        slots.into_iter().filter_map(|at| self.remove(at)).collect()
    }

    /// Takes another worker's connections over.
    pub fn adopt(&mut self, entries: Vec<Entry>) {
        for mut entry in entries {
            entry.scheduled = u64::MAX;
            self.enter(entry);
        }
    }

    /// A frame from the wire, before anybody else changes it. Acknowledgements go to `to_wire`.
    pub fn from_wire(&mut self, frame: &Frame, now: u64, to_wire: &mut impl FnMut(&mut Frame)) {
        let Ok(parsed) = TcpFrame::parse(frame.bytes()) else { return };
        if parsed.flags.intersects(Flags::SYN) {
            if self.on && self.trusts(frame, &parsed) {
                self.handshake(&parsed);
            }
            return;
        }
        let Some(at) = self.find(&Name::from(&parsed.flow)) else { return };
        if !self.trusts(frame, &parsed) {
            return;
        }
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        if !before(parsed.ack, entry.peer.ack) {
            entry.peer = Peer { ack: parsed.ack, window: parsed.window, timestamps: parsed.options.timestamps };
        }
        if parsed.flags.contains(Flags::RST) && !entry.holds() {
            return self.forget(at);
        }
        if self.on && parsed.payload_length > 0 {
            self.data(at, frame, &parsed, now, to_wire);
        }
    }

    fn trusts(&self, frame: &Frame, parsed: &TcpFrame) -> bool {
        frame.checksum != Checksum::Unknown || parsed.checksum_holds(frame.bytes())
    }

    /// The peer's SYN, with or without ACK.
    fn handshake(&mut self, parsed: &TcpFrame) {
        let Some(at) = self.make(parsed.flow) else { return };
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        if parsed.flags.contains(Flags::ACK) == entry.our_scale.is_some() {
            entry.peer_scales = Some(parsed.options.window_scale.is_some());
        }
    }

    fn data(&mut self, at: u32, frame: &Frame, parsed: &TcpFrame, now: u64, to_wire: &mut impl FnMut(&mut Frame)) {
        const CONGESTED: u8 = 3;
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        let end = parsed.seq.wrapping_add(parsed.payload_length as u32);
        let plain = !parsed.flags.intersects(SPECIAL) && parsed.flags.contains(Flags::ACK) && parsed.ecn != CONGESTED;
        let room = end.wrapping_sub(entry.una) as usize <= RING && !before(entry.edge, end);
        if !entry.known || entry.scale().is_none() || !plain || parsed.seq != entry.next || !room {
            self.counters.left += 1;
            return;
        }
        store::put(&self.store, entry.place, parsed.seq, parsed.payload(frame.bytes()));
        if !before(entry.acked, parsed.seq)
            && let Some((value, _)) = parsed.options.timestamps
        {
            entry.recent = value;
        }
        if !entry.holds() {
            (entry.again_due, entry.patience) = (now + PATIENCE, PATIENCE);
        }
        entry.next = end;
        entry.waiting += 1;
        store::note_range(&self.store, entry);
        if entry.waiting >= TOGETHER {
            self.acknowledge(at, to_wire);
        } else {
            entry.ack_due = entry.ack_due.min(now + DELAY);
        }
        self.schedule(at);
    }

    /// Says to the peer what is held.
    fn acknowledge(&mut self, at: u32, to_wire: &mut impl FnMut(&mut Frame)) {
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        (entry.waiting, entry.ack_due) = (0, u64::MAX);
        if !before(entry.acked, entry.next) {
            return;
        }
        entry.acked = entry.next;
        let timestamps = entry.value.map(|value| (value, entry.recent));
        let options = TcpOptions { timestamps, ..TcpOptions::default() };
        let flags = if entry.echoes { Flags::ACK | Flags::ECE } else { Flags::ACK };
        let window = entry.window_at(entry.acked);
        let header = Header { seq: entry.snd_nxt, ack: entry.acked, flags, window, options: &options, ecn: 0, ident: 0 };
        emit(&mut self.scratch, &Template::new(&entry.flow, &entry.link, false), &header, |_| {}, 0);
        self.counters.sent += 1;
        to_wire(&mut self.scratch);
    }

    /// A frame of the kernel's, before it goes to the wire; it may be changed. What the kernel lacks goes to `to_kernel`.
    pub fn from_kernel(&mut self, frame: &mut Frame, now: u64, to_kernel: &mut impl FnMut(&mut Frame)) {
        let Ok(parsed) = TcpFrame::parse(frame.bytes()) else { return };
        let flow = parsed.flow.reversed();
        if parsed.flags.contains(Flags::SYN) {
            if self.on {
                self.kernels_handshake(flow, &parsed, frame);
            }
            return;
        }
        let Some(at) = self.find(&Name::from(&flow)) else { return };
        if parsed.flags.contains(Flags::RST) {
            return self.forget(at);
        }
        if !parsed.flags.contains(Flags::ACK) {
            return;
        }
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        let repeats = parsed.payload_length == 0 && !parsed.flags.contains(Flags::FIN);
        let released = learn(entry, &parsed, frame.bytes(), repeats, now);
        if released {
            store::note_range(&self.store, entry);
        }
        let lacks = entry.repeated >= REPEATED;
        if before(parsed.ack, entry.acked) {
            rewrite::raise(frame, &parsed, entry);
            self.counters.raised += 1;
        }
        if lacks {
            self.give_again(at, now, to_kernel);
        }
        self.schedule(at);
    }

    fn kernels_handshake(&mut self, flow: baton_wire::Flow, parsed: &TcpFrame, frame: &Frame) {
        let Some(at) = self.make(flow) else { return };
        let Some(old) = self.entries[at as usize].as_ref() else { return };
        // A connection of this name begins anew, unless this is the answer to the peer's SYN.
        let peer_scales = old.peer_scales.filter(|_| parsed.flags.contains(Flags::ACK));
        let mut entry = Entry::new(old.place, flow);
        entry.peer_scales = peer_scales;
        entry.our_scale = Some(parsed.options.window_scale);
        entry.link = link_of(frame.bytes());
        entry.snd_nxt = parsed.seq.wrapping_add(1);
        // The peer has acknowledged nothing yet, and will this first.
        entry.peer.ack = entry.snd_nxt;
        entry.value = parsed.options.timestamps.map(|(value, _)| value);
        if parsed.flags.contains(Flags::ACK) {
            // A SYN's window is never scaled (RFC 7323 section 2.2).
            (entry.una, entry.next, entry.acked, entry.known) = (parsed.ack, parsed.ack, parsed.ack, true);
            entry.edge = parsed.ack.wrapping_add(u32::from(parsed.window));
            entry.recent = parsed.options.timestamps.map_or(0, |(_, echo)| echo);
        }
        entry.scheduled = old.scheduled;
        store::claim(&self.store, &entry);
        self.entries[at as usize] = Some(entry);
    }

    /// Gives the kernel everything that it has not acknowledged.
    fn give_again(&mut self, at: u32, now: u64, to_kernel: &mut impl FnMut(&mut Frame)) {
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        entry.repeated = 0;
        entry.again_due = if entry.holds() { now + entry.patience } else { u64::MAX };
        entry.patience = (2 * entry.patience).clamp(PATIENCE, MOST_PATIENCE);
        let link = Link { source: entry.link.destination, destination: entry.link.source, ..entry.link };
        let Peer { ack, window, timestamps } = entry.peer;
        let template = Template::new(&entry.flow.reversed(), &link, false);
        let options = TcpOptions { timestamps, ..TcpOptions::default() };
        let (mut seq, place) = (entry.una, entry.place);
        while before(seq, entry.next) {
            let length = (entry.next.wrapping_sub(seq) as usize).min(PIECE);
            let header = Header { seq, ack, flags: Flags::ACK, window, options: &options, ecn: 0, ident: seq as u16 };
            emit(&mut self.scratch, &template, &header, |out| store::get(&self.store, place, seq, out), length);
            self.counters.again += 1;
            to_kernel(&mut self.scratch);
            seq = seq.wrapping_add(length as u32);
        }
    }

    fn schedule(&mut self, at: u32) {
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        if let Some(due) = entry.due()
            && Wheel::<128>::tick_of(due) < entry.scheduled
        {
            entry.scheduled = self.wheel.enter(at, due);
        }
    }

    /// When [`Active::expire`] may have something to do, in microseconds.
    pub fn next_tick(&self) -> u64 {
        self.wheel.next_tick()
    }

    /// When something may be due, in microseconds.
    pub fn next_expiry(&self) -> Option<u64> {
        self.wheel.next_expiry()
    }

    /// Does what is due: acknowledgements to the wire, data to the kernel again.
    pub fn expire(&mut self, now: u64, to_wire: &mut impl FnMut(&mut Frame), to_kernel: &mut impl FnMut(&mut Frame)) {
        let mut expired = mem::take(&mut self.expired);
        while let Some(tick) = self.wheel.expire(now, &mut expired) {
            for at in expired.drain(..) {
                let Some(entry) = self.entries[at as usize].as_mut().filter(|entry| entry.scheduled == tick) else { continue };
                entry.scheduled = u64::MAX;
                let (ack, again) = (entry.ack_due <= now, entry.again_due <= now);
                if ack {
                    self.acknowledge(at, to_wire);
                }
                if again {
                    self.give_again(at, now, to_kernel);
                }
                self.schedule(at);
            }
        }
        self.expired = expired;
    }
}

/// Takes down what the kernel's frame says. Whether something need be held no longer.
fn learn(entry: &mut Entry, parsed: &TcpFrame, bytes: &[u8], repeats: bool, now: u64) -> bool {
    let fin = u32::from(parsed.flags.contains(Flags::FIN));
    let end = parsed.seq.wrapping_add(parsed.payload_length as u32).wrapping_add(fin);
    if !entry.known {
        (entry.una, entry.next, entry.acked) = (parsed.ack, parsed.ack, parsed.ack);
        (entry.edge, entry.known, entry.snd_nxt) = (parsed.ack, true, end);
        entry.link = link_of(bytes);
    }
    if before(entry.snd_nxt, end) {
        entry.snd_nxt = end;
    }
    let released = before(entry.una, parsed.ack);
    let edge = parsed.ack.wrapping_add(u32::from(parsed.window) << entry.scale().unwrap_or(0));
    let opened = before(entry.edge, edge);
    if released {
        entry.una = parsed.ack;
        if before(entry.next, parsed.ack) {
            entry.next = parsed.ack;
        }
        if before(entry.acked, parsed.ack) {
            entry.acked = parsed.ack;
        }
        if entry.acked == entry.next {
            (entry.waiting, entry.ack_due) = (0, u64::MAX);
        }
        entry.repeated = 0;
        entry.patience = PATIENCE;
        entry.again_due = if entry.holds() { now + PATIENCE } else { u64::MAX };
    } else if repeats && !opened && parsed.ack == entry.una && entry.holds() {
        entry.repeated += 1;
    }
    if opened {
        entry.edge = edge;
    }
    entry.value = parsed.options.timestamps.map(|(value, _)| value);
    entry.echoes = parsed.flags.contains(Flags::ECE);
    released
}

/// The addresses of a frame of the kernel's.
fn link_of(bytes: &[u8]) -> Link {
    let mut link = Link { ttl: 64, ..Link::default() };
    link.destination.copy_from_slice(&bytes[..6]);
    link.source.copy_from_slice(&bytes[6..12]);
    match bytes[ETHERNET] >> 4 {
        4 => (link.tos, link.ttl) = (bytes[ETHERNET + 1] & !3, bytes[ETHERNET + 8]),
        _ => link.ttl = bytes[ETHERNET + 7],
    }
    link
}

fn emit(frame: &mut Frame, template: &Template, header: &Header<'_>, fill: impl FnOnce(&mut [u8]), payload: usize) {
    if frame.capacity() < MAX_HEADER + payload {
        // A device may have exchanged it for one of its own.
        *frame = Frame::with_capacity(MAX_HEADER + PIECE);
    }
    frame.set_length(MAX_HEADER + payload);
    let length = template.emit(header, payload, frame.bytes_mut());
    frame.set_length(length + payload);
    fill(&mut frame.bytes_mut()[length..]);
    let start = template.tcp_offset() as u16;
    frame.checksum = Checksum::Partial { start, offset: 16 };
    (frame.segmentation, frame.interface) = (None, 0);
}
