//! Connections that the NIC makes itself: handshakes with listeners' clients, and connections that programs open.
//!
//! A connection that has been made is an image in a slot, and its frames are held there, as for a connection that has
//! just left the kernel. The agent hands it off from there. Segments that do not belong to a handshake go to the
//! kernel, which has the listening socket, too.

use super::connections::Wheel;
use super::{Worker, room};
use crate::custody::{Custody, Refusal, Slot};
use crate::held::HeldFrames;
use crate::listeners::{FIRST_WINDOW, ListenerSettings, Opening};
use crate::peers::Call;
use baton_abi::layout::{Counter, nic, scratch, slot as at};
use baton_abi::{Cid, Control, Message, Operation};
use baton_device::{Checksum, Device};
use baton_image::{Image, MAX_ENCODED};
use baton_tcp::{Config, Connection, EndReason, Instant, Segment, State};
use baton_wire::frame::Link;
use baton_wire::{Flags, Flow, FlowKey, TcpFrame};

/// Offsets of the addresses in an Ethernet header.
const DESTINATION: core::ops::Range<usize> = 0..6;
const SOURCE: core::ops::Range<usize> = 6..12;

/// The device of listeners' connections: listeners that are bound to a device stay in the kernel.
pub(super) const ANY_DEVICE: u32 = 0;

/// Most retransmissions of a SYN (Linux's limit of TCP_SYNCNT).
const MOST_RETRIES: u32 = 127;

impl<H: Device, W: Device> Worker<H, W> {
    /// Adds a listener, or changes its settings. The NIC answers its clients once it has been granted slots, until then
    /// the kernel.
    pub fn listen(&mut self, settings: ListenerSettings) {
        self.broadcast(|| Call::Listen(Box::new(settings.clone())));
        self.listeners.add(settings);
    }

    /// Removes a listener: from now on the kernel answers its clients.
    pub fn stop_listening(&mut self, id: u32) {
        self.broadcast(|| Call::StopListening(id));
        self.listeners.remove(id);
    }

    /// Accepts a slot for a connection with a client of listener `id`.
    pub(super) fn grant(&mut self, cid: Cid, id: u32) -> Result<u32, Refusal> {
        if self.connections.slots[cid.slot() as usize].is_some() {
            return Err(Refusal::WrongState);
        }
        self.listeners.get_mut(id).ok_or(Refusal::NotYours)?.grant(cid);
        Ok(0)
    }

    /// Takes a segment from the wire that belongs to no connection of this worker, if it is part of a handshake with a
    /// listener. With several workers the front worker has all handshakes, so that a listener has one accept queue and
    /// no handshake moves with a bucket; segments that belong to no handshake come back ([`Worker::look_up`]).
    #[cold]
    pub(super) fn take_handshake(&mut self, parsed: &TcpFrame, now: Instant) -> bool {
        let Some(listener) = self.listeners.at(&parsed.flow.local) else { return false };
        // If the client has a connection by another device, the segment goes to the kernel, which can
        // distinguish the two.
        if self.connections.overlaps(&FlowKey::from(&parsed.flow.by(ANY_DEVICE))) {
            return false;
        }
        let (id, full, open) = (listener.settings.id, listener.granted.is_empty(), listener.open);
        let has_room = self.resources.has_connection();
        if !self.is_front() {
            self.forward_handshake();
            return true;
        }
        if self.frame.checksum == Checksum::Unknown && !parsed.checksum_holds(self.frame.bytes()) {
            self.counters.add(Counter::BadChecksum, 1);
            return true;
        }
        let segment = Segment::from(parsed);
        let known = self.listeners.find(&FlowKey::from(&parsed.flow));
        let is_syn = segment.flags.contains(Flags::SYN) && !segment.flags.intersects(Flags::ACK | Flags::RST | Flags::FIN);
        let is_ack = segment.flags.contains(Flags::ACK) && !segment.flags.intersects(Flags::SYN | Flags::RST);
        if is_syn && (!open || known.is_none() && !has_room) {
            // Before the first slot was granted, and when the NIC is full, the kernel answers clients.
            return false;
        }
        let is_clients = |index| self.listeners.handshake(index).is_some_and(|one| one.opening.tcp.snd_nxt() == segment.ack);
        if full && (is_syn || is_ack && known.is_some_and(is_clients)) {
            // The client sends it again.
            self.counters.add(Counter::AcceptQueueFull, 1);
            return true;
        }
        match known {
            Some(index) => self.continue_handshake(index, &segment, parsed, now),
            None if is_syn => {
                self.begin_handshake(id, &segment, parsed, now);
                true
            }
            None => is_ack && self.take_cookie(id, &segment, parsed, now),
        }
    }

    /// Answers a SYN.
    fn begin_handshake(&mut self, id: u32, syn: &Segment, parsed: &TcpFrame, now: Instant) {
        let remembered = self.listeners.has_room();
        let Some(listener) = self.listeners.at(&parsed.flow.local) else { return };
        let (config, ttl) = (listener.config(parsed.flow.is_v4()), listener.settings.ttl);
        let config = if remembered { config } else { config.of_cookie(syn) };
        let flow = parsed.flow.by(ANY_DEVICE);
        let numbers = self.listeners.secret.answer(&flow, syn, &config, now);
        let Some(tcp) = Connection::accept(config, syn, numbers.isn, numbers.ts_offset, now) else { return };
        let mut opening = Opening { tcp, flow, link: self.way_back(ttl) };
        self.output.send_handshake(&mut opening, &self.counters, now);
        if self.listeners.remember(id, opening, now).is_none() {
            self.counters.add(Counter::SynCookies, 1);
        }
        self.wake_at(self.listeners.due());
    }

    /// The link header of an answer to the frame that is being processed.
    fn way_back(&self, ttl: u8) -> Link {
        let bytes = self.frame.bytes();
        let address = |range| <[u8; 6]>::try_from(&bytes[range]).unwrap_or_default();
        let interface = self.came_by();
        Link { source: address(DESTINATION), destination: address(SOURCE), ttl, tos: 0, flow_label: 0, interface }
    }

    /// Processes a segment of a handshake that is remembered. False if it acknowledges bytes that the NIC has not sent:
    /// then it goes to the kernel. The kernel may have a connection with this 4-tuple; if it has none, it answers with
    /// the RST of RFC 9293 section 3.10.7.4, since its socket listens. The handshake continues, since anyone can send
    /// such a segment.
    fn continue_handshake(&mut self, index: u32, segment: &Segment, parsed: &TcpFrame, now: Instant) -> bool {
        let Some(handshake) = self.listeners.handshake(index) else { return false };
        let tcp = &mut handshake.opening.tcp;
        if segment.flags.contains(Flags::ACK) && segment.ack != tcp.snd_nxt() {
            return false;
        }
        tcp.input(&without_data(segment), now);
        match tcp.state() {
            State::SynReceived => {
                self.output.send_handshake(&mut handshake.opening, &self.counters, now);
                return true;
            }
            State::Closed => {
                self.listeners.forget(index);
                return true;
            }
            _ => {}
        }
        if let Some(handshake) = self.listeners.forget(index) {
            self.finish_handshake(handshake.listener, &handshake.opening, parsed, handshake.by_cookie, now);
        }
        true
    }

    /// Makes a connection from the acknowledgement of a SYN-ACK that is not remembered, if there is a slot for it. If
    /// there is none the handshake is remembered: the client's further segments do not acknowledge the cookie, and the
    /// kernel, which has no state of the connection, would reset it. False if it is no such acknowledgement.
    fn take_cookie(&mut self, id: u32, segment: &Segment, parsed: &TcpFrame, now: Instant) -> bool {
        if !self.listeners.accepts_cookies(now) {
            return false;
        }
        let flow = parsed.flow.by(ANY_DEVICE);
        let Some((syn, numbers)) = self.listeners.secret.syn_of(&flow, segment, now) else { return false };
        let Some(listener) = self.listeners.at(&parsed.flow.local) else { return false };
        let is_full = listener.granted.is_empty();
        let (config, ttl) = (listener.config(parsed.flow.is_v4()).of_cookie(&syn), listener.settings.ttl);
        let Some(mut tcp) = Connection::accept(config, &syn, numbers.isn, numbers.ts_offset, now) else { return false };
        // The SYN-ACK as it was sent.
        let _ = tcp.poll_transmit(now, 0);
        if !is_full {
            tcp.input(&without_data(segment), now);
        }
        let opening = Opening { tcp, flow, link: self.way_back(ttl) };
        if !is_full {
            self.finish_handshake(id, &opening, parsed, true, now);
            return true;
        }
        // The client sends it again.
        self.counters.add(Counter::AcceptQueueFull, 1);
        if self.listeners.has_room()
            && let Some(index) = self.listeners.remember(id, opening, now)
            && let Some(handshake) = self.listeners.handshake(index)
        {
            handshake.by_cookie = true;
            self.wake_at(self.listeners.due());
        }
        true
    }

    /// Puts a connection that has been made into one of the listener's slots, and notifies the agent. Data that came
    /// with the last segment of the handshake is held with it.
    fn finish_handshake(&mut self, id: u32, opening: &Opening, parsed: &TcpFrame, by_cookie: bool, now: Instant) {
        let Some(cid) = self.listeners.get_mut(id).and_then(|listener| listener.granted.pop()) else { return };
        if !self.write_image(cid, opening, by_cookie, now) {
            return;
        }
        let key = FlowKey::from(&opening.flow);
        let mut slot = Slot::new(key, cid, Custody::Held);
        slot.held = HeldFrames::of_made();
        if parsed.payload_length > 0 || parsed.flags.contains(Flags::FIN) {
            slot.held.push(parsed, &self.frame);
        }
        self.place_made(slot, now);
        self.counters.add(Counter::Made, 1);
        self.send_to_agent(Message::control(Operation::OsControl, Control::Made, cid, id, u32::from(by_cookie)));
    }

    /// Writes the image and the 4-tuple of a connection that has been made into its slot. Returns whether it could.
    fn write_image(&self, cid: Cid, opening: &Opening, by_cookie: bool, now: Instant) -> bool {
        let template = Image { link: opening.link, ..Image::open(opening.flow) };
        let Some(mut image) = opening.tcp.to_image(&template, now) else { return false };
        if by_cookie {
            // The round trip is unknown, since the time at which the SYN-ACK was sent is not remembered.
            (image.srtt, image.rttvar, image.min_rtt) = (0, 0, 0);
        }
        let mut bytes = [0u8; MAX_ENCODED];
        let encoded = image.encode(&mut bytes).is_ok();
        let base = nic::slot(cid.slot());
        let _ = self.nic_memory.write(base + at::FLOW, &opening.flow.to_bytes());
        let _ = self.nic_memory.write(nic::scratch(cid.slot()) + scratch::IMAGE, &bytes);
        encoded
    }

    /// Resets the peer of a connection that has been made and will not be accepted.
    pub(super) fn reset_made(&mut self, cid: Cid, now: Instant) {
        let mut bytes = [0u8; MAX_ENCODED];
        let read = self.nic_memory.read(nic::scratch(cid.slot()) + scratch::IMAGE, &mut bytes);
        let Some(image) = read.ok().and_then(|()| Image::decode(&bytes).ok()) else { return };
        let mut opening =
            Opening { tcp: Connection::from_image(&image, None, FIRST_WINDOW, now), flow: image.flow, link: image.link };
        opening.tcp.abort();
        self.output.send_handshake(&mut opening, &self.counters, now);
    }

    /// Opens the connection whose 4-tuple and image are in the slot (RFC 9293 section 3.5). The SYN is sent again
    /// `retries` times at most, 0 for the default.
    pub(super) fn connect(&mut self, cid: Cid, retries: u32, now: Instant) -> Result<u32, Refusal> {
        let index = cid.slot();
        if self.connections.slots[index as usize].is_some() {
            return Err(Refusal::WrongState);
        }
        let mut bytes = [0u8; MAX_ENCODED];
        let _ = self.nic_memory.read(nic::scratch(index) + scratch::IMAGE, &mut bytes);
        let image = Image::decode(&bytes).map_err(|_| Refusal::BadImage)?;
        let (flow, key) = (image.flow, FlowKey::from(&image.flow));
        if self.connections.overlaps(&key) {
            return Err(Refusal::AlreadyHere);
        }
        let begin = self.reopen(&key).ok_or(Refusal::AlreadyHere)?;
        let default = Config::default();
        let config = Config {
            receive_buffer: FIRST_WINDOW,
            receive_limit: self.limits(index)[0],
            mtu: image.mtu,
            ip_header: if flow.is_v4() { 20 } else { 40 },
            user_timeout: image.user_timeout,
            syn_retries: if retries == 0 { default.syn_retries } else { retries.min(MOST_RETRIES) as u8 },
            ..default
        };
        let numbers = self.listeners.secret.numbers(&flow, now);
        let tcp = Connection::connect(config, numbers.isn, numbers.ts_offset, now);
        let mut opening = Box::new(Opening { tcp, flow, link: image.link });
        let mut scheduled = u64::MAX;
        if begin <= now {
            self.output.send_handshake(&mut opening, &self.counters, now);
        } else {
            scheduled = self.connections.wheel.enter(index, begin.0);
            self.wake_at(self.connections.wheel.next_tick());
        }
        let mut slot = Slot::new(key, cid, Custody::Opening(opening));
        slot.scheduled = scheduled;
        self.connections.slots[index as usize] = Some(slot);
        self.connections.lookup.insert(&key, index);
        self.connections.count += 1;
        self.follow_opening(index);
        Ok(0)
    }

    /// Enters the time-out of a connection that is being opened into the wheel.
    pub(super) fn follow_opening(&mut self, index: u32) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Opening(opening) = &slot.custody else { return };
        let wanted = opening.tcp.next_timeout();
        if wanted != Instant::NEVER && Wheel::tick_of(wanted.0) < slot.scheduled {
            slot.scheduled = self.connections.wheel.enter(index, wanted.0);
            self.due = self.due.min(self.connections.wheel.next_tick());
        }
    }

    /// Sends the SYN of a connection that is being opened, for the first time or once more, or gives it up.
    pub(super) fn expire_opening(&mut self, index: u32, now: Instant) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Opening(opening) = &mut slot.custody else { return };
        if opening.tcp.next_timeout() <= now {
            opening.tcp.on_timeout(now);
        }
        self.output.send_handshake(opening, &self.counters, now);
        self.settle_opening(index, now);
    }

    /// Processes a segment of a connection that is being opened. Data that comes with the last one is held.
    pub(super) fn continue_opening(&mut self, index: u32, parsed: &TcpFrame, now: Instant) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Opening(opening) = &mut slot.custody else { return };
        opening.tcp.input(&without_data(&Segment::from(parsed)), now);
        self.output.send_handshake(opening, &self.counters, now);
        let is_open = opening.tcp.state() == State::Established;
        if is_open && (parsed.payload_length > 0 || parsed.flags.contains(Flags::FIN)) {
            slot.held.push(parsed, &self.frame);
        }
        self.settle_opening(index, now);
    }

    /// Notifies the agent if a connection that was being opened is established, or has failed.
    fn settle_opening(&mut self, index: u32, now: Instant) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let (Custody::Opening(opening), cid) = (&mut slot.custody, slot.cid) else { return };
        match opening.tcp.state() {
            State::Established => {
                let Custody::Opening(opening) = std::mem::replace(&mut slot.custody, Custody::Held) else { return };
                if self.write_image(cid, &opening, false, now) {
                    self.counters.add(Counter::Made, 1);
                    self.send_to_agent(Message::control(Operation::OsControl, Control::Made, cid, 0, 0));
                }
            }
            State::Closed => {
                let error = error_of(&opening.tcp);
                self.give_up_opening(cid, error);
            }
            _ => self.follow_opening(index),
        }
    }

    /// Gives up a connection that is being opened; `error` is Linux's error number.
    fn give_up_opening(&mut self, cid: Cid, error: u32) {
        room::free_slot(self, cid);
        self.count_connections();
        self.send_to_agent(Message::control(Operation::OsControl, Control::NotMade, cid, error, 0));
    }

    /// Gives up a connection that is being opened because an ICMP message says that its SYN did not reach the peer, as
    /// Linux does. For an established connection the message is ignored, and the segment is retransmitted (RFC 5461
    /// section 2).
    pub(super) fn on_unreachable(&mut self, flow: &Flow, seq: u32, error: u32) {
        let Some(index) = self.connections.find(&FlowKey::from(flow)) else { return };
        let Some(Some(slot)) = self.connections.slots.get(index as usize) else { return };
        let Custody::Opening(opening) = &slot.custody else { return };
        // The message is valid only if it is about the SYN in flight (RFC 5927 section 4.1).
        if seq == opening.tcp.snd_una() {
            self.give_up_opening(slot.cid, error);
        }
    }

    /// Sends SYN-ACKs again that were not acknowledged in time.
    pub(super) fn expire_handshakes(&mut self, now: Instant) {
        if self.listeners.due() > now.0 {
            return;
        }
        for index in self.listeners.expired(now) {
            let Some(handshake) = self.listeners.handshake(index) else { continue };
            handshake.opening.tcp.on_timeout(now);
            if handshake.opening.tcp.state() == State::Closed {
                self.listeners.forget(index);
            } else {
                self.output.send_handshake(&mut handshake.opening, &self.counters, now);
            }
        }
        self.listeners.set_due();
    }
}

/// Linux's error number for a connection that could not be opened.
fn error_of(tcp: &Connection) -> u32 {
    const ETIMEDOUT: u32 = 110;
    const ECONNREFUSED: u32 = 111;
    if tcp.end_reason() == Some(EndReason::Refused) { ECONNREFUSED } else { ETIMEDOUT }
}

/// A segment without its data and FIN, which are processed when the connection has memory.
fn without_data(segment: &Segment) -> Segment {
    Segment { length: 0, flags: Flags(segment.flags.0 & !(Flags::FIN | Flags::PSH).0), ..*segment }
}
