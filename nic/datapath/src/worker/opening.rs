//! Connections that the NIC makes itself: the handshakes of listeners' clients.
//!
//! A connection that has been made is an image in a slot, and its frames are held there, as for a connection that has just left
//! the kernel. The agent hands it off from there. What does not belong to a handshake goes to the kernel, which has the listening
//! socket, too.

use super::Worker;
use crate::custody::{Custody, Refusal, Slot};
use crate::held::HeldFrames;
use crate::listeners::{ListenerSettings, Opening};
use baton_abi::layout::{Counter, nic, slot as at};
use baton_abi::{Cid, Control, Message, Operation};
use baton_device::{Checksum, Device};
use baton_image::{Image, MAX_ENCODED};
use baton_tcp::{Connection, Instant, Segment, State};
use baton_wire::frame::Link;
use baton_wire::{Flags, FlowKey, TcpFrame};

/// Offsets of the addresses in an Ethernet header.
const DESTINATION: core::ops::Range<usize> = 0..6;
const SOURCE: core::ops::Range<usize> = 6..12;

impl<H: Device, W: Device> Worker<H, W> {
    /// Adds a listener, or changes its settings. The NIC answers its clients once it has been granted slots.
    pub fn listen(&mut self, settings: ListenerSettings) {
        self.listeners.add(settings);
    }

    /// Removes a listener: its clients are the kernel's.
    pub fn stop_listening(&mut self, id: u32) {
        self.listeners.remove(id);
    }

    /// Accepts a slot for a connection with a client of listener `id`.
    pub(super) fn grant(&mut self, cid: Cid, id: u32) -> Result<u32, Refusal> {
        if self.connections.slots[cid.slot() as usize].is_some() {
            return Err(Refusal::WrongState);
        }
        self.listeners.get_mut(id).ok_or(Refusal::NotYours)?.granted.push(cid);
        Ok(0)
    }

    /// Takes a segment from the wire that belongs to no connection on the NIC, if it is part of a handshake with a listener.
    #[cold]
    pub(super) fn take_handshake(&mut self, parsed: &TcpFrame, now: Instant) -> bool {
        let Some(listener) = self.listeners.at(&parsed.flow.local) else { return false };
        let (id, full) = (listener.settings.id, listener.granted.is_empty());
        if self.frame.checksum == Checksum::Unknown && !parsed.checksum_holds(self.frame.bytes()) {
            self.counters.add(Counter::BadChecksum, 1);
            return true;
        }
        let segment = Segment::from(parsed);
        let known = self.listeners.find(&FlowKey::from(&parsed.flow));
        let is_syn = segment.flags.contains(Flags::SYN) && !segment.flags.intersects(Flags::ACK | Flags::RST | Flags::FIN);
        let is_ack = segment.flags.contains(Flags::ACK) && !segment.flags.intersects(Flags::SYN | Flags::RST);
        if full && (is_syn || is_ack && known.is_some()) {
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
            None => is_ack && !full && self.take_cookie(id, &segment, parsed, now),
        }
    }

    /// Answers a SYN.
    fn begin_handshake(&mut self, id: u32, syn: &Segment, parsed: &TcpFrame, now: Instant) {
        let Some(listener) = self.listeners.at(&parsed.flow.local) else { return };
        let (config, ttl) = (listener.config(parsed.flow.is_v4()), listener.settings.ttl);
        let numbers = self.listeners.secret.answer(&parsed.flow, syn, now);
        let Some(tcp) = Connection::accept(config, syn, numbers.isn, numbers.ts_offset, now) else { return };
        let mut opening = Opening { tcp, flow: parsed.flow, link: self.way_back(ttl) };
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
        let interface = if self.settings.beside { self.frame.interface } else { 0 };
        Link { source: address(DESTINATION), destination: address(SOURCE), ttl, tos: 0, flow_label: 0, interface }
    }

    /// Processes a segment of a handshake that is remembered. False, and the handshake is forgotten, if it acknowledges what the
    /// NIC has not sent: the kernel may have a connection of this 4-tuple.
    fn continue_handshake(&mut self, index: u32, segment: &Segment, parsed: &TcpFrame, now: Instant) -> bool {
        let Some(handshake) = self.listeners.handshake(index) else { return false };
        let tcp = &mut handshake.opening.tcp;
        if segment.flags.contains(Flags::ACK) && segment.ack != tcp.snd_nxt() {
            self.listeners.forget(index);
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
            self.finish_handshake(handshake.listener, &handshake.opening, parsed, false, now);
        }
        true
    }

    /// Makes a connection from the acknowledgement of a SYN-ACK that is not remembered. False if it is none.
    fn take_cookie(&mut self, id: u32, segment: &Segment, parsed: &TcpFrame, now: Instant) -> bool {
        if !self.listeners.accepts_cookies(now) {
            return false;
        }
        let Some((syn, numbers)) = self.listeners.secret.syn_of(&parsed.flow, segment, now) else { return false };
        let Some(listener) = self.listeners.at(&parsed.flow.local) else { return false };
        let (config, ttl) = (listener.config(parsed.flow.is_v4()), listener.settings.ttl);
        let Some(mut tcp) = Connection::accept(config, &syn, numbers.isn, numbers.ts_offset, now) else { return false };
        // The answer that was sent already.
        let _ = tcp.poll_transmit(now, 0);
        tcp.input(&without_data(segment), now);
        let opening = Opening { tcp, flow: parsed.flow, link: self.way_back(ttl) };
        self.finish_handshake(id, &opening, parsed, true, now);
        true
    }

    /// Puts a connection that has been made into one of the listener's slots, and notifies the agent. Data that came with the
    /// last segment of the handshake is held with it.
    fn finish_handshake(&mut self, id: u32, opening: &Opening, parsed: &TcpFrame, by_cookie: bool, now: Instant) {
        let template = Image { link: opening.link, ..Image::open(opening.flow) };
        let Some(mut image) = opening.tcp.to_image(&template, now) else { return };
        if by_cookie {
            // When the SYN-ACK was sent is not known.
            (image.srtt, image.rttvar, image.min_rtt) = (0, 0, 0);
        }
        let mut bytes = [0u8; MAX_ENCODED];
        let Some(cid) = self.listeners.get_mut(id).and_then(|listener| listener.granted.pop()) else { return };
        if image.encode(&mut bytes).is_err() {
            return;
        }
        let base = nic::slot(cid.slot());
        let _ = self.nic_memory.write(base + at::FLOW, &opening.flow.to_bytes());
        let _ = self.nic_memory.write(base + at::IMAGE, &bytes);
        let key = FlowKey::from(&opening.flow);
        let mut held = HeldFrames::default();
        if parsed.payload_length > 0 || parsed.flags.contains(Flags::FIN) {
            held.push(parsed, &self.frame);
        }
        let slot = Slot { key, cid, flow: opening.flow, custody: Custody::Held, held, scheduled: u64::MAX, dirty: false };
        self.connections.slots[cid.slot() as usize] = Some(slot);
        self.connections.lookup.insert(&key, cid.slot());
        self.connections.count += 1;
        self.count_connections();
        self.counters.add(Counter::Made, 1);
        self.send_to_agent(Message::control(Operation::OsControl, Control::Made, cid, id, u32::from(by_cookie)));
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

/// A segment without its data and FIN, which are processed when the connection has memory.
fn without_data(segment: &Segment) -> Segment {
    Segment { length: 0, flags: Flags(segment.flags.0 & !(Flags::FIN | Flags::PSH).0), ..*segment }
}
