//! The sending half: a CTS is answered with data packets, the last of them but k with the RSM, and END (sections 4.3
//! and 4.4).

use super::{Data, DataConfig, Run};
use crate::counters::Drop;
use crate::handle;
use crate::interface::Command;
use crate::memory::{Memory, Region};
use crate::queue::take_first;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use baton_wire::Endpoint;
use baton_wire::rmpp::stream::{MAX_UNASKED, RunHeader};
use baton_wire::rmpp::{self, Body, Cts, Header, Kind, MAX_CLEARED, PacketFlags, Rts};

/// A message that is being sent.
#[derive(Clone, Copy, Debug)]
struct Message {
    handle: u32,
    peer: u16,
    number: u32,
    region: Region,
    /// Bytes that the RTS carries.
    first: u16,
    rts: Rts,
    early: u8,
    floor: u32,
    /// Data packets.
    packets: u32,
    /// The next data packet.
    next: u32,
    /// The first packet that is not cleared.
    limit: u32,
    /// The packet that carries the RSM of the current grant, if the message is longer than the grant.
    more_at: Option<u32>,
    grant: u16,
    /// The receiver's handle, from its CTS; 0 before the first.
    receiver: u32,
    /// The next data packet when it was last sent again.
    idle_at: Option<u32>,
    rts_pending: bool,
    end_pending: bool,
    /// The stream by which the current grant is answered; 0: by packets. Then `next` is the first packet that no run
    /// has.
    stream: u32,
    /// The first packet that this stream was given.
    streamed: u32,
    /// The message's first packets were given to the stream before a CTS had come.
    unasked: bool,
    /// It is in the queue of messages with something to send.
    queued: bool,
}

/// The messages that are being sent, by slot of their handle.
pub(super) struct Sending {
    messages: Box<[Option<Message>]>,
    count: usize,
    /// Handles of messages with something to send, in turn.
    ready: VecDeque<u32>,
}

impl Sending {
    pub fn new(messages: usize) -> Sending {
        Sending { messages: alloc::vec![None; messages].into(), count: 0, ready: VecDeque::with_capacity(messages) }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    fn find(&mut self, handle: u32) -> Option<&mut Message> {
        self.messages.get_mut(handle::slot(handle))?.as_mut().filter(|message| message.handle == handle)
    }

    /// Forgets a message, if it is known.
    pub fn release(&mut self, handle: u32) {
        if let Some(message) = self.find(handle) {
            if message.queued {
                self.ready.retain(|ready| *ready != handle);
            }
            self.messages[handle::slot(handle)] = None;
            self.count -= 1;
        }
    }

    /// Sends a message's RTS again, or its END if all of it was sent: the answer may have been lost. A receiver that
    /// clears nothing more may have been a NIC that has died, of whose CTS its policy never knew.
    pub fn resend(&mut self, handle: u32, floor: u32, anew: bool) {
        if let Some(message) = self.find(handle) {
            message.floor = floor;
            if anew {
                (message.next, message.limit, message.receiver) = (0, 0, 0);
                (message.more_at, message.end_pending, message.stream, message.unasked) = (None, false, 0, false);
            }
            message.rts_pending = message.receiver == 0 || message.idle_at == Some(message.next);
            message.idle_at = Some(message.next);
            message.end_pending |= message.receiver != 0 && message.next == message.packets;
            self.queue(handle);
        }
    }

    /// Whether a message is known.
    pub fn knows(&self, handle: u32) -> bool {
        self.messages.get(handle::slot(handle)).is_some_and(|place| place.is_some_and(|message| message.handle == handle))
    }

    /// Whether a message has something to send by a stream.
    pub fn has_run(&mut self, handle: u32, stream: u32) -> bool {
        self.find(handle).is_some_and(|message| message.stream == stream && message.next < message.limit)
    }

    /// The next packets of a message as a run of at most `most` packets: the header, except for the fields that the
    /// stream fills in, and the place of the bytes.
    pub fn next_run(&mut self, handle: u32, stream: u32, most: u32) -> Option<(RunHeader, Region)> {
        let message = self.find(handle).filter(|message| message.stream == stream && message.next < message.limit)?;
        let (first, fragment) = (message.next, u64::from(message.rts.fragment));
        // A run's length is counted in 32 bits, which is enough for as many packets of any length.
        let count = (message.limit - first).min(most);
        let end = first + count;
        let at = u64::from(message.first) + u64::from(first) * fragment;
        let length = (u64::from(count) * fragment).min(message.region.length.saturating_sub(at));
        message.next = end;
        let more = match message.receiver {
            // A receiver that has cleared only these packets must be asked to clear more.
            0 => (end < message.packets).then_some(end - 1),
            _ => message.more_at.filter(|more| (first..end).contains(more)),
        };
        let header = RunHeader {
            incarnations: [0; 2],
            stream,
            message: message.number,
            handle: message.receiver,
            grant: message.grant,
            first,
            count: count as u16,
            more,
            end: end == message.packets,
            length: length as u32,
        };
        Some((header, Region { offset: message.region.offset.saturating_add(at), length }))
    }

    /// Puts a message into the queue if it has something to send and is not in it.
    fn queue(&mut self, handle: u32) {
        if let Some(message) = self.find(handle)
            && message.has_packet()
            && !message.queued
        {
            message.queued = true;
            self.ready.push_back(handle);
        }
    }
}

impl Message {
    fn has_packet(&self) -> bool {
        self.rts_pending || self.has_data() || self.end_pending
    }

    /// Whether there are data packets to send.
    fn has_data(&self) -> bool {
        self.stream == 0 && self.next < self.limit
    }

    /// Checks a CTS.
    fn check_cts(&self, header: &Header) -> Result<(), Drop> {
        if header.packet + u32::from(header.count) > self.packets {
            return Err(Drop::ClearedTooMuch);
        }
        if self.receiver != 0 && (header.grant.wrapping_sub(self.grant) as i16) <= 0 {
            return Err(Drop::OldGrant);
        }
        Ok(())
    }

    /// Takes up a CTS that was checked, whose answer goes by a stream, or by packets if that is 0.
    fn clear(&mut self, header: &Header, receiver: u32, stream: u32) {
        if core::mem::take(&mut self.unasked) && (stream != self.stream || !header.flags.contains(PacketFlags::TAKEN)) {
            // The receiver has dropped or not received the run that was sent unasked: go on as if it had not been sent.
            (self.next, self.limit, self.stream) = (0, 0, 0);
        }
        // A receiver that believes our stream to be alive clears more than can be sent as packets.
        let count = if stream == 0 { header.count.min(MAX_CLEARED) } else { header.count };
        let (first, end) = (header.packet, header.packet + u32::from(count));
        let goes_on = stream != 0 && self.stream == stream && first >= self.streamed;
        if goes_on {
            // Data that this stream was given arrives, or the receiver notices that the stream has ended. Packets that
            // the receiver has cleared and the stream was not given are still to be sent, unless the receiver has them
            // already.
            if first > self.limit {
                self.next = first;
            }
        } else if first != self.limit {
            // A CTS that begins where the last one ended extends it; any other CTS replaces it.
            self.next = first;
        }
        let end = if goes_on { end.max(self.limit) } else { end };
        if !goes_on {
            self.streamed = self.next;
        }
        (self.limit, self.grant, self.receiver, self.stream) = (end, header.grant, receiver, stream);
        self.rts_pending = false;
        self.more_at = (end < self.packets).then(|| (end - 1).saturating_sub(self.early.into()).max(self.next.max(first)));
        self.end_pending = end == self.packets && stream == 0;
    }

    /// The header of the message's next packet, and the bytes of the message that it carries.
    fn next_packet(&mut self, [source, destination]: [u16; 2], incarnations: [u32; 2]) -> (Header, Region) {
        let header = |kind| Header { message: self.number, ..Header::new(kind, [source, destination], incarnations) };
        if self.rts_pending {
            self.rts_pending = false;
            let header = Header { packet: self.floor, ..header(Kind::Rts) };
            return (header, Region { offset: self.region.offset, length: self.first.into() });
        }
        let mut header = Header { grant: self.grant, handle: self.receiver, ..header(Kind::Data) };
        if !self.has_data() {
            self.end_pending = false;
            (header.kind, header.packet) = (Kind::End, self.packets);
            return (header, Region::default());
        }
        header.packet = self.next;
        if self.more_at == Some(self.next) {
            header.flags = PacketFlags::RSM;
        }
        let at = u64::from(self.first) + u64::from(self.next) * u64::from(self.rts.fragment);
        let length = u64::from(self.rts.fragment).min(self.region.length - at);
        self.next += 1;
        (header, Region { offset: self.region.offset.saturating_add(at), length })
    }
}

impl Data {
    /// Enters a message and sends its RTS. If the message is known already (the policy has its RTS sent again), only
    /// sends the RTS.
    pub(super) fn enter_send(&mut self, command: &Command) {
        let Command::Send { handle, peer, message: number, region, first, rts, early, floor } = *command else { return };
        let known = self.peers.get(usize::from(peer)).copied().flatten().is_some();
        let fits = u64::from(first) <= region.length && rts.length == region.length && rts.fragment > 0;
        let within = rts.fragment <= super::fragment(self.config.packet) && first <= super::first_bytes(self.config.packet);
        let packets =
            u32::try_from((region.length - u64::from(first).min(region.length)).div_ceil(u64::from(rts.fragment.max(1))));
        let place = self.sending.messages.get_mut(handle::slot(handle));
        let (Some(place), Ok(packets), true) = (place, packets, known && fits && within) else {
            return self.counters.drop(Drop::NoMessage);
        };
        match *place {
            Some(other) if other.handle == handle => return self.sending.resend(handle, floor, false),
            // The policy reuses a slot only after it has released it.
            Some(_) => return self.counters.drop(Drop::NoMessage),
            None => self.sending.count += 1,
        }
        *place = Some(Message {
            handle,
            peer,
            number,
            region,
            first,
            rts,
            early,
            floor,
            packets,
            next: 0,
            limit: 0,
            more_at: None,
            grant: 0,
            receiver: 0,
            idle_at: None,
            rts_pending: true,
            end_pending: false,
            stream: 0,
            streamed: 0,
            unasked: false,
            queued: false,
        });
        self.sending.queue(handle);
        self.send_unasked(handle, peer, region.length - u64::from(first));
    }

    /// Makes the stream to a peer send the first packets of a new message right after its RTS, if the stream would be
    /// idle until the CTS comes.
    fn send_unasked(&mut self, handle: u32, peer: u16, rest: u64) {
        if let Some(streams) = &mut self.streams
            && let Some(message) = self.sending.find(handle)
            && let Some(stream) = streams.may_send_unasked(peer, rest)
        {
            (message.stream, message.unasked) = (stream, true);
            message.limit = message.packets.min(MAX_UNASKED.into());
            streams.queue(peer, stream, handle);
        }
    }

    /// Takes up a CTS: its header names our handle, its body the receiver's.
    pub(super) fn receive_cts(&mut self, from: &Endpoint, header: &Header, cts: &Cts) -> Result<(), Drop> {
        let message = self.sending.find(header.handle).ok_or(Drop::NoMessage)?;
        let peer = self.peers.get(usize::from(message.peer)).copied().flatten().ok_or(Drop::NoMessage)?;
        if !peer.sent(from, header) || header.message != message.number {
            return Err(Drop::Stranger);
        }
        message.check_cts(header)?;
        let (number, DataConfig { endpoint, address, .. }) = (message.peer, self.config);
        let stream = self.streams.as_mut().map_or(0, |streams| streams.answer(number, &peer, cts, endpoint, &address));
        if let Some(streams) = self.streams.as_mut().filter(|_| message.unasked) {
            streams.note_unasked(number, header.flags.contains(PacketFlags::TAKEN));
        }
        message.clear(header, cts.handle, stream);
        match &mut self.streams {
            Some(streams) if stream != 0 => streams.queue(number, stream, header.handle),
            _ => self.sending.queue(header.handle),
        }
        Ok(())
    }

    /// Writes the next packets of the message whose turn it is, `most` at most.
    pub(super) fn transmit_message(&mut self, memory: &(impl Memory + ?Sized), out: &mut [u8], most: usize) -> Option<Run> {
        loop {
            let handle = take_first(&mut self.sending.ready)?;
            let (endpoint, address) = (self.config.endpoint, self.config.address);
            let Some(message) = self.sending.find(handle) else { continue };
            message.queued = false;
            let Some(peer) = self.peers.get(usize::from(message.peer)).copied().flatten() else { continue };
            let mut run = Run { to: peer.address, length: 0, segment: 0, packets: 0 };
            let mut read = true;
            while run.packets < most
                && message.has_packet()
                && run.has_room(out.len())
                && (run.packets == 0 || !message.rts_pending)
            {
                let (header, piece) = message.next_packet([endpoint, peer.endpoint], [peer.local, peer.remote]);
                let body = if header.kind == Kind::Rts { Body::Rts(message.rts, &[]) } else { Body::Empty };
                let packet = &mut out[run.length..];
                let written = rmpp::emit(&header, &body, packet);
                let length = written + piece.length as usize;
                read = memory.read(piece.offset, &mut packet[written..length]);
                if !read {
                    break;
                }
                rmpp::seal(&mut packet[..length], &address, &peer.address);
                run.add(length);
            }
            if read {
                self.sending.queue(handle);
            } else {
                // The program gave a region that it does not have: nothing of the message can be sent.
                self.counters.drop(Drop::Memory);
                self.sending.release(handle);
            }
            if run.packets > 0 {
                return Some(run);
            }
        }
    }
}

impl Run {
    /// Adds a packet.
    fn add(&mut self, length: usize) {
        self.segment = self.segment.max(length);
        (self.length, self.packets) = (self.length + length, self.packets + 1);
    }

    /// Whether another packet can follow in a buffer of `capacity` bytes: none can behind a shorter one.
    fn has_room(&self, capacity: usize) -> bool {
        self.length == self.packets * self.segment && self.length + self.segment <= capacity
    }
}
