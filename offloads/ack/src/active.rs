//! The acknowledging of frames from the wire, and the rewriting of frames from the kernel.

use crate::before;
use crate::entry::{AckEntry, Peer};
use crate::rewrite;
use crate::store::{self, RING, Store};
use alloc::vec::Vec;
use baton_device::{Checksum, Frame};
use baton_tables::{Lookup, Wheel};
use baton_wire::frame::{ECN_CE, ECN_MASK, ETHERNET, Header, Link, MAX_HEADER, TCP, TCP_CHECKSUM, Template};
use baton_wire::offset::{ethernet, ipv4, ipv6};
use baton_wire::{Flags, FlowKey, TcpFrame, TcpOptions};
use core::mem;

/// Microseconds after which data is acknowledged that has waited for a second segment, or for the kernel's
/// acknowledgement.
const ACK_DELAY: u64 = 500;

/// Number of segments that are acknowledged together (RFC 9293 section 3.8.6.3).
const SEGMENTS_PER_ACK: u32 = 2;

/// Microseconds after which the kernel gets data again that it has not acknowledged, at first and at most (it doubles):
/// more than the kernel's delayed acknowledgement and than large receive's waits.
const MIN_REDELIVERY: u64 = 300_000;
const MAX_REDELIVERY: u64 = 4_000_000;

/// Number of duplicate acknowledgements of the kernel's after which it gets the missing data again at once.
const DUPLICATES: u32 = 2;

/// Largest payload of a segment that is delivered to the kernel again.
const PIECE: usize = 1400;

/// Most entries that are examined in the search for an entry that can be freed.
const CANDIDATES: usize = 8;

/// Segments with any of these flags are left to the kernel to acknowledge.
const LEFT_TO_KERNEL: Flags = Flags::SYN.union(Flags::FIN).union(Flags::RST).union(Flags::URG).union(Flags::CWR);

/// The counters.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Acknowledgements that the NIC has sent.
    pub sent: u64,
    /// Frames of the kernel's that were given the NIC's greater acknowledgement.
    pub raised: u64,
    /// Segments that were delivered to the kernel again.
    pub redelivered: u64,
    /// Data segments left to the kernel to acknowledge: unacceptable, out of order, too many for the buffer or the
    /// window, or not plain data.
    pub left: u64,
}

/// The active acknowledgements of one worker's connections.
pub struct ActiveAck<S> {
    store: S,
    on: bool,
    table: Lookup,
    entries: Vec<Option<AckEntry>>,
    free: Vec<u32>,
    /// Free buffers of this worker.
    buffers: Vec<usize>,
    /// Index at which the search for an entry that can be freed continues.
    hand: usize,
    wheel: Wheel<128>,
    expired: Vec<u32>,
    scratch: Frame,
    counters: Counters,
}

impl<S: Store> ActiveAck<S> {
    /// Makes it over `store`, in which it may use the buffers with the numbers `buffers`, and takes over data that an
    /// earlier NIC has left in them.
    pub fn new(store: S, buffers: &[usize], hash_key: [u64; 4], on: bool, now: u64) -> ActiveAck<S> {
        let count = store.buffers();
        let mut active = ActiveAck {
            table: Lookup::new(count, hash_key),
            entries: (0..count).map(|_| None).collect(),
            free: (0..count as u32).rev().collect(),
            buffers: Vec::new(),
            hand: 0,
            wheel: Wheel::new(now),
            expired: Vec::new(),
            scratch: Frame::with_capacity(MAX_HEADER + PIECE),
            counters: Counters::default(),
            store,
            on,
        };
        for &buffer in buffers {
            match store::recover(&active.store, buffer) {
                Some(mut entry) => {
                    // It is delivered to the kernel as soon as frames flow.
                    (entry.redelivery_due, entry.redelivery_interval) = (now, MIN_REDELIVERY);
                    active.insert(entry);
                }
                None => {
                    store::release(&active.store, buffer);
                    active.buffers.push(buffer);
                }
            }
        }
        active
    }

    /// Sets whether new data is acknowledged. Data acknowledged before is kept in any case until the kernel has it.
    pub fn set(&mut self, on: bool) {
        self.on = on;
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    fn find(&self, key: &FlowKey) -> Option<u32> {
        self.table.find(key, |at| matches!(self.entries.get(at as usize), Some(Some(entry)) if entry.key == *key))
    }

    fn insert(&mut self, entry: AckEntry) -> Option<u32> {
        let at = self.free.pop()?;
        self.table.insert(&entry.key, at);
        self.entries[at as usize] = Some(entry);
        self.schedule(at);
        Some(at)
    }

    /// Makes an entry, with a buffer, for a connection whose handshake has been seen.
    fn track(&mut self, flow: baton_wire::Flow) -> Option<u32> {
        let key = FlowKey::from(&flow);
        if let Some(at) = self.find(&key) {
            return Some(at);
        }
        if self.buffers.is_empty() || self.free.is_empty() {
            self.reclaim();
        }
        let buffer = self.buffers.pop()?;
        let at = self.insert(AckEntry::new(buffer, flow));
        if at.is_none() {
            self.buffers.push(buffer);
        }
        at
    }

    /// Frees an entry that holds no data; preferably one that is not established, since a flood of SYNs makes many of
    /// these.
    fn reclaim(&mut self) {
        let mut free = None;
        for _ in 0..CANDIDATES {
            self.hand = (self.hand + 1) % self.entries.len().max(1);
            match self.entries.get(self.hand) {
                Some(Some(entry)) if !entry.established && !entry.holds() => return self.forget(self.hand as u32),
                Some(Some(entry)) if !entry.holds() => free = free.or(Some(self.hand as u32)),
                _ => {}
            }
        }
        if let Some(at) = free {
            self.forget(at);
        }
    }

    fn remove(&mut self, at: u32) -> Option<AckEntry> {
        let entry = self.entries[at as usize].take()?;
        let entries = &self.entries;
        let key_of = |other: u32| entries[other as usize].as_ref().map_or(entry.key, |found| found.key);
        self.table.remove(&entry.key, at, key_of);
        self.free.push(at);
        Some(entry)
    }

    fn forget(&mut self, at: u32) {
        if let Some(entry) = self.remove(at) {
            store::release(&self.store, entry.buffer);
            self.buffers.push(entry.buffer);
        }
    }

    /// Ends the active acknowledgements of a connection that is about to leave the kernel. False, and nothing changes,
    /// while the kernel has not acknowledged everything that the NIC has.
    pub fn end(&mut self, key: &FlowKey) -> bool {
        let Some(at) = self.find(key) else { return true };
        if self.entries[at as usize].as_ref().is_some_and(AckEntry::holds) {
            return false;
        }
        self.forget(at);
        true
    }

    /// Removes connections, for another worker.
    pub fn take(&mut self, mut which: impl FnMut(&AckEntry) -> bool) -> Vec<AckEntry> {
        let matching = |(at, entry): (usize, &Option<AckEntry>)| entry.as_ref().filter(|entry| which(entry)).map(|_| at as u32);
        let slots: Vec<u32> = self.entries.iter().enumerate().filter_map(matching).collect();
        slots.into_iter().filter_map(|at| self.remove(at)).collect()
    }

    /// Inserts connections that another worker has removed.
    pub fn adopt(&mut self, entries: Vec<AckEntry>) {
        for mut entry in entries {
            entry.scheduled = u64::MAX;
            self.insert(entry);
        }
    }

    /// Examines a frame from the wire, before it is changed by anything else. Acknowledgements go to `to_wire`. A
    /// segment that the kernel will not accept changes nothing.
    pub fn from_wire(&mut self, frame: &Frame, now: u64, to_wire: &mut impl FnMut(&mut Frame)) {
        let Ok(parsed) = TcpFrame::parse(frame.bytes(), 0) else { return };
        let Some(at) = self.find(&FlowKey::from(&parsed.flow)) else { return };
        if !parsed.flags.contains(Flags::ACK) || !self.is_intact(frame, &parsed) {
            return;
        }
        if parsed.flags.contains(Flags::SYN) {
            return self.peers_handshake(at, &parsed, frame);
        }
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        if !entry.accepts(&parsed) {
            self.counters.left += u64::from(parsed.payload_length > 0);
            return;
        }
        if parsed.flags.contains(Flags::RST) {
            // The kernel takes none but that with the very next number (RFC 5961 section 3.2).
            if !entry.holds() && parsed.seq == entry.next {
                self.forget(at);
            }
            return;
        }
        entry.note_peer(&parsed);
        if self.on && parsed.payload_length > 0 {
            self.on_data(at, frame, &parsed, now, to_wire);
        }
    }

    /// Whether the segment's checksum is right.
    fn is_intact(&self, frame: &Frame, parsed: &TcpFrame) -> bool {
        frame.checksum != Checksum::Unknown || parsed.checksum_holds(frame.bytes())
    }

    /// Notes the peer's SYN-ACK. Its options are final once the kernel's next segment has come.
    fn peers_handshake(&mut self, at: u32, parsed: &TcpFrame, frame: &Frame) {
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        if entry.synchronized || parsed.ack != entry.snd_nxt {
            return;
        }
        if has_other_options(frame.bytes(), parsed) {
            return self.forget(at);
        }
        entry.peer_scales = Some(parsed.options.window_scale.is_some());
        let timestamps = parsed.options.timestamps.filter(|_| entry.ts_value.is_some());
        let (ack, window, window_seq) = (parsed.ack, parsed.window, parsed.seq);
        entry.peer = Peer { ack, window, timestamps, window_seq };
        entry.ts_recent = timestamps.map_or(0, |(value, _)| value);
    }

    /// Stores a data segment, and acknowledges it now or later, if it is plain and in order.
    fn on_data(&mut self, at: u32, frame: &Frame, parsed: &TcpFrame, now: u64, to_wire: &mut impl FnMut(&mut Frame)) {
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        let end = parsed.seq.wrapping_add(parsed.payload_length as u32);
        // The kernel may refuse a segment without timestamps where both ends use them (RFC 7323 section 3.2).
        let stamped = entry.peer.timestamps.is_none() || parsed.options.timestamps.is_some();
        let plain = !parsed.flags.intersects(LEFT_TO_KERNEL)
            && parsed.ecn != ECN_CE
            && stamped
            && !has_other_options(frame.bytes(), parsed);
        let room = end.wrapping_sub(entry.una) as usize <= RING && !before(entry.rcv_adv, end);
        if !entry.established || entry.scale().is_none() || !plain || parsed.seq != entry.next || !room {
            self.counters.left += 1;
            return;
        }
        store::write_data(&self.store, entry.buffer, parsed.seq, parsed.payload(frame.bytes()));
        if !before(entry.acked, parsed.seq)
            && let Some((value, _)) = entry.peer.timestamps
        {
            entry.ts_recent = value;
        }
        if !entry.holds() {
            (entry.redelivery_due, entry.redelivery_interval) = (now + MIN_REDELIVERY, MIN_REDELIVERY);
        }
        entry.next = end;
        entry.segments_since_ack += 1;
        store::store_range(&self.store, entry);
        if entry.segments_since_ack >= SEGMENTS_PER_ACK {
            self.acknowledge(at, to_wire);
        } else {
            entry.ack_due = entry.ack_due.min(now + ACK_DELAY);
        }
        self.schedule(at);
    }

    /// Acknowledges everything that is held to the peer.
    fn acknowledge(&mut self, at: u32, to_wire: &mut impl FnMut(&mut Frame)) {
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        (entry.segments_since_ack, entry.ack_due) = (0, u64::MAX);
        if !before(entry.acked, entry.next) {
            return;
        }
        entry.acked = entry.next;
        let timestamps = entry.ts_value.map(|value| (value, entry.ts_recent));
        let options = TcpOptions { timestamps, ..TcpOptions::default() };
        let flags = if entry.ece { Flags::ACK | Flags::ECE } else { Flags::ACK };
        let window = entry.window_at(entry.acked);
        let header = Header { seq: entry.snd_nxt, ack: entry.acked, flags, window, options: &options, ecn: 0, ident: 0 };
        emit(&mut self.scratch, &Template::new(&entry.flow, &entry.link, false), &header, |_| {}, 0);
        self.counters.sent += 1;
        to_wire(&mut self.scratch);
    }

    /// Examines a frame of the kernel's before it goes to the wire, and rewrites it if it acknowledges too little. Data
    /// that the kernel lacks goes to `to_kernel`.
    pub fn from_kernel(&mut self, frame: &mut Frame, now: u64, to_kernel: &mut impl FnMut(&mut Frame)) {
        let Ok(parsed) = TcpFrame::parse(frame.bytes(), 0) else { return };
        let flow = parsed.flow.reversed();
        if parsed.flags.contains(Flags::SYN) {
            if self.on {
                self.kernels_handshake(flow, &parsed, frame);
            }
            return;
        }
        let Some(at) = self.find(&FlowKey::from(&flow)) else { return };
        if parsed.flags.contains(Flags::RST) {
            return self.forget(at);
        }
        if !parsed.flags.contains(Flags::ACK) {
            return;
        }
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        let repeats = parsed.payload_length == 0 && !parsed.flags.contains(Flags::FIN);
        let released = update(entry, &parsed, frame.bytes(), repeats, now);
        if released {
            store::store_range(&self.store, entry);
        }
        let is_behind = entry.duplicate_acks >= DUPLICATES && !entry.answered_duplicates;
        if before(parsed.ack, entry.acked) {
            rewrite::raise(frame, &parsed, entry);
            self.counters.raised += 1;
        }
        if is_behind {
            entry.answered_duplicates = true;
            self.redeliver(at, now, to_kernel);
        }
        self.schedule(at);
    }

    /// Notes the kernel's SYN or SYN-ACK. A repeated one changes only the timestamp: the kernel repeats its SYN-ACK
    /// while its accept queue is full, and for late SYNs.
    fn kernels_handshake(&mut self, flow: baton_wire::Flow, parsed: &TcpFrame, frame: &Frame) {
        let key = FlowKey::from(&flow);
        let answers = parsed.flags.contains(Flags::ACK);
        let known = self.find(&key);
        if let Some(entry) = known.and_then(|at| self.entries[at as usize].as_mut())
            && entry.iss == parsed.seq
            && (entry.synchronized || !answers)
        {
            if !entry.established {
                entry.ts_value = parsed.options.timestamps.map(|(value, _)| value);
            }
            return;
        }
        // The SYN of a connection that the kernel opens does not show yet which options both ends will use.
        if answers && has_other_options(frame.bytes(), parsed) {
            known.into_iter().for_each(|at| self.forget(at));
            return;
        }
        let Some(at) = self.track(flow) else { return };
        let Some(old) = self.entries[at as usize].as_ref() else { return };
        let mut entry = AckEntry::new(old.buffer, flow);
        entry.iss = parsed.seq;
        entry.our_scale = Some(parsed.options.window_scale);
        entry.link = link_of(frame.bytes());
        entry.snd_nxt = parsed.seq.wrapping_add(1);
        // The peer has acknowledged nothing yet; the SYN will be the first that it acknowledges.
        entry.peer.ack = entry.snd_nxt;
        entry.ts_value = parsed.options.timestamps.map(|(value, _)| value);
        if answers {
            // A SYN-ACK has the options that the SYN had (RFC 7323 section 2.2 and 3.2), and its window is not scaled.
            entry.peer_scales = Some(parsed.options.window_scale.is_some());
            (entry.una, entry.next, entry.acked, entry.synchronized) = (parsed.ack, parsed.ack, parsed.ack, true);
            entry.rcv_adv = parsed.ack.wrapping_add(u32::from(parsed.window));
            entry.peer.timestamps = parsed.options.timestamps.map(|(value, echo)| (echo, value));
            entry.peer.window_seq = parsed.ack.wrapping_sub(1);
            entry.ts_recent = parsed.options.timestamps.map_or(0, |(_, echo)| echo);
        }
        entry.scheduled = old.scheduled;
        store::claim(&self.store, &entry);
        self.entries[at as usize] = Some(entry);
    }

    /// Delivers everything to the kernel again that it has not acknowledged.
    fn redeliver(&mut self, at: u32, now: u64, to_kernel: &mut impl FnMut(&mut Frame)) {
        let Some(entry) = self.entries[at as usize].as_mut() else { return };
        entry.duplicate_acks = 0;
        entry.redelivery_due = if entry.holds() { now + entry.redelivery_interval } else { u64::MAX };
        entry.redelivery_interval = (2 * entry.redelivery_interval).clamp(MIN_REDELIVERY, MAX_REDELIVERY);
        let link = Link { source: entry.link.destination, destination: entry.link.source, ..entry.link };
        let Peer { ack, window, .. } = entry.peer;
        let template = Template::new(&entry.flow.reversed(), &link, false);
        let options = TcpOptions { timestamps: entry.timestamps_again(), ..TcpOptions::default() };
        let (mut seq, buffer) = (entry.una, entry.buffer);
        while before(seq, entry.next) {
            let length = (entry.next.wrapping_sub(seq) as usize).min(PIECE);
            let header = Header { seq, ack, flags: Flags::ACK, window, options: &options, ecn: 0, ident: seq as u16 };
            emit(&mut self.scratch, &template, &header, |out| store::read_data(&self.store, buffer, seq, out), length);
            self.counters.redelivered += 1;
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

    /// Time before which [`ActiveAck::expire`] has nothing to do, in microseconds; never later than
    /// [`ActiveAck::next_expiry`].
    pub fn next_tick(&self) -> u64 {
        self.wheel.next_tick()
    }

    /// When something may be due, in microseconds; None if nothing waits.
    pub fn next_expiry(&self) -> Option<u64> {
        self.wheel.next_expiry()
    }

    /// Does the work that is due: sends acknowledgements to the wire, and delivers data to the kernel again.
    pub fn expire(&mut self, now: u64, to_wire: &mut impl FnMut(&mut Frame), to_kernel: &mut impl FnMut(&mut Frame)) {
        let mut expired = mem::take(&mut self.expired);
        while let Some(tick) = self.wheel.expire(now, &mut expired) {
            for at in expired.drain(..) {
                let Some(entry) = self.entries[at as usize].as_mut().filter(|entry| entry.scheduled == tick) else { continue };
                entry.scheduled = u64::MAX;
                let (ack, again) = (entry.ack_due <= now, entry.redelivery_due <= now);
                if ack {
                    self.acknowledge(at, to_wire);
                }
                if again {
                    self.redeliver(at, now, to_kernel);
                }
                self.schedule(at);
            }
        }
        self.expired = expired;
    }
}

/// Updates an entry from a frame of the kernel's. Returns whether the kernel has acknowledged held data. `repeats` says
/// that the frame would count as a duplicate acknowledgement: it has neither data nor FIN.
fn update(entry: &mut AckEntry, parsed: &TcpFrame, bytes: &[u8], repeats: bool, now: u64) -> bool {
    let fin = u32::from(parsed.flags.contains(Flags::FIN));
    let end = parsed.seq.wrapping_add(parsed.payload_length as u32).wrapping_add(fin);
    if !entry.synchronized {
        (entry.una, entry.next, entry.acked) = (parsed.ack, parsed.ack, parsed.ack);
        (entry.rcv_adv, entry.synchronized, entry.snd_nxt) = (parsed.ack, true, end);
        entry.link = link_of(bytes);
    }
    entry.established = true;
    if before(entry.snd_nxt, end) {
        entry.snd_nxt = end;
    }
    let released = before(entry.una, parsed.ack);
    let edge = parsed.ack.wrapping_add(u32::from(parsed.window) << entry.scale().unwrap_or(0));
    let opened = before(entry.rcv_adv, edge);
    if released {
        entry.una = parsed.ack;
        if before(entry.next, parsed.ack) {
            entry.next = parsed.ack;
        }
        if before(entry.acked, parsed.ack) {
            entry.acked = parsed.ack;
        }
        if entry.acked == entry.next {
            (entry.segments_since_ack, entry.ack_due) = (0, u64::MAX);
        }
        (entry.duplicate_acks, entry.answered_duplicates) = (0, false);
        entry.redelivery_interval = MIN_REDELIVERY;
        entry.redelivery_due = if entry.holds() { now + MIN_REDELIVERY } else { u64::MAX };
    } else if repeats && !opened && parsed.ack == entry.una && entry.holds() {
        entry.duplicate_acks += 1;
    }
    if opened {
        entry.rcv_adv = edge;
    }
    if let Some((value, echo)) = parsed.options.timestamps {
        entry.ts_value = Some(value);
        // The echo is the kernel's TS.Recent; the NIC's own value is newer only through data that the kernel does not
        // have.
        if !entry.holds() || before(entry.ts_recent, echo) {
            entry.ts_recent = echo;
        }
    }
    entry.ece = parsed.flags.contains(Flags::ECE);
    released
}

/// Whether a segment has options other than those of RFC 9293, RFC 7323 and RFC 2018. The NIC's own segments cannot
/// carry them: signatures (RFC 2385, RFC 5925), without which the ends refuse a segment, or mappings (RFC 8684),
/// without which they cannot use its data.
fn has_other_options(bytes: &[u8], parsed: &TcpFrame) -> bool {
    let mut area = &bytes[parsed.tcp_offset + TCP..parsed.payload_offset];
    loop {
        let length = match *area {
            [] | [0, ..] => return false,
            [1, ..] => 1,
            [2..=5 | 8, length, ..] if length >= 2 => usize::from(length),
            _ => return true,
        };
        let Some(rest) = area.get(length..) else { return true };
        area = rest;
    }
}

/// The link addresses, type of service and TTL of a frame of the kernel's.
fn link_of(bytes: &[u8]) -> Link {
    let mut link = Link { ttl: 64, ..Link::default() };
    link.destination.copy_from_slice(&bytes[..ethernet::SOURCE]);
    link.source.copy_from_slice(&bytes[ethernet::SOURCE..ethernet::TYPE]);
    match bytes[ETHERNET] >> 4 {
        4 => (link.tos, link.ttl) = (bytes[ETHERNET + ipv4::TOS] & !ECN_MASK, bytes[ETHERNET + ipv4::TTL]),
        _ => link.ttl = bytes[ETHERNET + ipv6::HOP_LIMIT],
    }
    link
}

/// Writes a segment into `frame`, with a partial checksum; `fill` writes its payload.
fn emit(frame: &mut Frame, template: &Template, header: &Header<'_>, fill: impl FnOnce(&mut [u8]), payload: usize) {
    if frame.capacity() < MAX_HEADER + payload {
        // A device may have exchanged the frame for another of its frames.
        *frame = Frame::with_capacity(MAX_HEADER + PIECE);
    }
    frame.set_length(MAX_HEADER + payload);
    let length = template.emit(header, payload, frame.bytes_mut());
    frame.set_length(length + payload);
    fill(&mut frame.bytes_mut()[length..]);
    let start = template.tcp_offset() as u16;
    frame.checksum = Checksum::Partial { start, offset: TCP_CHECKSUM as u16 };
    (frame.segmentation, frame.interface) = (None, 0);
}
