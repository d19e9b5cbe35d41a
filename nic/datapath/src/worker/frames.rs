//! The path of a frame: from the wire to its connection or to the kernel, and from the kernel to the wire.

use super::Worker;
use crate::custody::{Custody, Slot};
use crate::fragments::{Fragment, Outcome};
use crate::icmp::{self, Report};
use crate::offloaded::Offloaded;
use crate::worker::programs::Unannounced;
use baton_abi::layout::{Counter, nic, slot as at};
use baton_abi::{Message, Operation, RestoreCause};
use baton_device::{Arrival, Checksum, Device};
use baton_tcp::seq::{at_or_before, before};
use baton_tcp::{Events, Instant, Segment, State};
use baton_wire::{Flags, FlowKey, Plain, TcpFrame, Usual};
use core::sync::atomic::Ordering;

/// Number of SACK blocks that fit into a header beside timestamps (RFC 2018 section 3).
const MAX_SACK_BLOCKS: usize = 3;

/// So many bytes of a huge frame count as one frame of the wire's turn. Acknowledgements and events wait for the end of
/// a round, and a huge frame takes long to copy: so a batch of 32 ends after half a megabyte of them.
const HUGE_SHARE: usize = 1 << 14;

impl<H: Device, W: Device> Worker<H, W> {
    /// Processes frames from any wire as long as it is its turn, unless the host device is busy. Returns whether there
    /// may be more to do.
    #[inline(never)]
    pub(super) fn poll_wire(&mut self, now: Instant) -> bool {
        if !self.to_kernel.device.is_ready() {
            self.turn = 0;
            return true;
        }
        let begun = self.turn;
        while self.turn > 0 {
            match self.output.wire.device.receive_or_show(&mut self.frame) {
                Arrival::Nothing => break,
                Arrival::Large => self.on_large_frame(None, now),
                Arrival::Huge(payload) => self.on_large_frame(Some(payload), now),
                Arrival::Frame if self.output.wire.admits(&mut self.frame) => on_gated_wire_frame(self, now),
                Arrival::Frame => {}
            }
            self.turn -= 1;
        }
        self.turn < begun
    }

    /// [`Worker::poll_wire`] for one where every frame passes and whose device computes checksums.
    #[inline(always)]
    pub(super) fn poll_usual_wire(&mut self, now: Instant) -> bool {
        let mut arrival = self.output.wire.device.receive_or_show(&mut self.frame);
        if arrival == Arrival::Nothing {
            return false;
        }
        let (mut unannounced, clock) = (Unannounced::NONE, now.millis());
        while arrival != Arrival::Nothing {
            if arrival != Arrival::Frame || !self.receive_usual(None, &mut unannounced, now, clock) {
                self.receive_other(arrival, &mut unannounced, now);
            }
            self.turn -= 1;
            if self.turn == 0 {
                break;
            }
            arrival = self.output.wire.device.receive_or_show(&mut self.frame);
        }
        if unannounced.any() {
            self.announce(&unannounced, now);
        }
        true
    }

    /// Processes a frame that is not of the usual kind, or is large.
    #[cold]
    #[inline(never)]
    pub(super) fn receive_other(&mut self, arrival: Arrival, unannounced: &mut Unannounced, now: Instant) {
        self.announce_and_clear(unannounced, now);
        match arrival {
            Arrival::Large => self.on_large_frame(None, now),
            Arrival::Huge(payload) => self.on_large_frame(Some(payload), now),
            Arrival::Frame | Arrival::Nothing => self.on_wire_frame(now),
        }
    }

    /// Receives the large frame that the wire's device shows. If it is the next data of a connection, its payload goes
    /// straight into receive memory, without the copy from the frame. `payload`: the length of a huge frame's payload.
    /// The caller counts one frame of the wire's turn.
    #[inline(never)]
    fn on_large_frame(&mut self, payload: Option<u32>, now: Instant) {
        if !self.output.wire.is_gated() && self.fast_path::<true>(payload, now) {
            self.counters.add(Counter::WireReceived, 1);
            self.counters.add(Counter::Segments, 1);
            let share = payload.map_or(0, |payload| payload as usize / HUGE_SHARE);
            self.turn = self.turn.saturating_sub(share).max(1);
        } else if self.output.wire.device.receive(&mut self.frame)
            && (!self.has_extras || self.output.wire.admits(&mut self.frame))
        {
            if self.output.wire.is_gated() {
                on_gated_wire_frame(self, now);
            } else {
                self.on_wire_frame(now);
            }
        }
    }

    /// Processes a batch of frames from the kernel. Returns whether there was any.
    #[inline]
    pub(super) fn poll_host(&mut self, now: Instant) -> bool {
        let any = self.to_kernel.device.receive(&mut self.frame);
        if any {
            self.on_host_frames(now);
        }
        any
    }

    /// Processes the frame that was received, and those that follow it in a batch.
    #[inline(never)]
    fn on_host_frames(&mut self, now: Instant) {
        self.on_host_frame(now);
        for _ in 1..self.settings.batch {
            if !self.to_kernel.device.receive(&mut self.frame) {
                return;
            }
            self.on_host_frame(now);
        }
    }

    /// The lookup layer: gives the frame from the wire to its connection, or to the kernel.
    #[inline(never)]
    pub(super) fn on_wire_frame(&mut self, now: Instant) {
        self.counters.add(Counter::WireReceived, 1);
        if self.fast_path::<false>(None, now) {
            self.counters.add(Counter::Segments, 1);
        } else {
            self.on_wire_frame_slow(now);
        }
    }

    /// Sets the gate's time for a round, and releases the frames that have waited there: those delayed by a limit, and
    /// answers to rejected frames of this host.
    #[cold]
    pub(super) fn begin_gated_round(&mut self, now: Instant) {
        self.output.wire.set_time(now.0);
        while self.output.wire.pass_held(&mut self.frame, &self.counters) {
            if self.crossbar.is_some() {
                self.dispatch_admitted(now);
            } else {
                on_gated_wire_frame(self, now);
            }
        }
    }

    /// The most usual case of the fast path, as code of its own: data over IPv4 with timestamps, whose checksum a
    /// device has verified, of a connection that sends nothing, to be acknowledged at once. Frames that differ only in
    /// the last two points continue on the general path. `found` is the slot if it was looked up before; it may be
    /// another connection's. False, and
    /// nothing is done, for any other frame.
    #[inline(always)]
    pub(super) fn receive_usual(&mut self, found: Option<u32>, unannounced: &mut Unannounced, now: Instant, clock: u32) -> bool {
        if self.frame.checksum == Checksum::Unknown {
            return false;
        }
        let Some(usual) = Usual::parse(self.frame.bytes()) else { return false };
        let key = usual.key(self.frame.interface);
        let Some(index) = found.or_else(|| self.connections.lookup.find_again(&key)) else { return false };
        self.output.make_free_for(index, &self.counters);
        let slot = self.connections.slots.get_mut(index as usize);
        let Some(Some(slot @ Slot { custody: Custody::Active(_), .. })) = slot else { return false };
        // The first slot with the same hash is nearly always the right one; the keys are compared here.
        if !slot.has_key(&key) {
            return false;
        }
        let Custody::Active(offloaded) = &mut slot.custody else { return false };
        let offloaded = &mut **offloaded;
        let fields = usual.fields();
        // Not if the slot has pending events, which have to be sent first. With posted buffers, or ranges out of order
        // in the record, no segment is predicted.
        let predicted = if slot.dirty { None } else { offloaded.tcp.predict_data(&fields, now, clock) };
        let Some(acknowledgement) = predicted else {
            let Some(plain) = usual.plain() else { return false };
            return self.receive_plain(unannounced, index, &plain, now);
        };
        let seq = acknowledgement.ack.wrapping_sub(fields.length);
        // Acknowledgement and record are written before the payload is copied, since the copy needs the registers.
        let earlier = unannounced.add(index, slot.cid, offloaded, seq, fields.length);
        self.output.prepare_usual(offloaded, &acknowledgement);
        offloaded.receive.write_plain(seq, usual.payload());
        self.output.acknowledge_usual(index, offloaded, &self.counters);
        if let Some(earlier) = earlier {
            self.announce_earlier(&earlier, now);
        }
        true
    }

    /// The fast path: processes a plain segment that is the next one in order, from the frame to the acknowledgement.
    /// The caller counts it. False, and nothing is done, for any other frame.
    ///
    /// With `SHOWN` the device shows the frame's beginning, and still has the payload (of a `huge` frame so many bytes,
    /// since its headers do not say how many). Then false also means that the frame may be lost.
    #[inline(always)]
    fn fast_path<const SHOWN: bool>(&mut self, huge: Option<u32>, now: Instant) -> bool {
        let bytes = self.frame.bytes();
        let verified = self.frame.checksum != Checksum::Unknown;
        let Some((key, mut plain, _)) = Plain::parse(bytes, verified, self.frame.interface) else { return false };
        // The first slot with the same hash is nearly always the right one; the keys are compared below.
        let Some(index) = self.connections.lookup.find(&key, |_| true) else { return false };
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return false };
        if !slot.has_key(&key) || !verified && !plain.checksum_holds(key, bytes) {
            return false;
        }
        let headers = plain.headers(key);
        if SHOWN {
            let Custody::Active(offloaded) = &slot.custody else { return false };
            let Offloaded { tcp, receive, .. } = &**offloaded;
            let complete = verified && headers + plain.length as usize == bytes.len();
            plain.length += huge.unwrap_or(0);
            let whole = complete && tcp.expects(&plain);
            let fast = !offloaded.is_on_fast_path() || tcp.is_fast(plain);
            // The places are free receive memory, so a frame that is lost half-way does no harm.
            let Some(places) = receive.places(plain.seq, plain.length).filter(|_| whole && fast) else { return false };
            if !self.output.wire.device.receive_apart(headers, places) {
                return false;
            }
        }
        self.take_plain::<SHOWN>(index, &plain, headers, now)
    }

    /// [`Worker::receive_usual`] for the general path.
    #[inline(never)]
    fn receive_plain(&mut self, unannounced: &mut Unannounced, index: u32, plain: &Plain, now: Instant) -> bool {
        self.announce_and_clear(unannounced, now);
        let taken = self.take_plain::<false>(index, plain, Usual::HEADERS, now);
        if taken {
            self.counters.add_to_each([Counter::WireReceived, Counter::Segments, Counter::Unpredicted], 1);
        }
        taken
    }

    /// The fast path after the lookup, for a plain segment of the connection in slot `index`. Its payload follows the
    /// first `headers` bytes of the frame or, if the frame was `SHOWN`, is in receive memory already.
    #[inline(always)]
    fn take_plain<const SHOWN: bool>(&mut self, index: u32, plain: &Plain, headers: usize, now: Instant) -> bool {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return false };
        let Custody::Active(offloaded) = &mut slot.custody else { return false };
        let offloaded = &mut **offloaded;
        if offloaded.is_on_fast_path() && !offloaded.tcp.is_fast(*plain) {
            return false;
        }
        let Offloaded { tcp, receive, pending, .. } = &mut *offloaded;
        if !tcp.expects(plain) {
            return false;
        }
        if plain.length > 0 {
            if !SHOWN {
                receive.write(plain.seq, &self.frame.bytes()[headers..][..plain.length as usize]);
            }
            pending.note_delivered(receive, plain.seq, plain.length);
        }
        let predicted = tcp.predict(plain, now);
        let concerns_program = predicted.concerns_program();
        if concerns_program {
            offloaded.note_acknowledged(predicted.acked, predicted.events);
        }
        // A pure acknowledgement starts no timer, and data that is sent does.
        let mut timers = concerns_program;
        match predicted.acknowledgement {
            Some(acknowledgement) => self.output.acknowledge(index, offloaded, &acknowledgement, &self.counters, now),
            None => {
                self.output.send_all(offloaded, &self.counters, now);
                timers = timers || !offloaded.tcp.no_timer();
            }
        }
        if !slot.dirty && offloaded.pending.any() {
            slot.dirty = true;
            self.programs.dirty.push(index);
        }
        if timers {
            self.follow_up(index, predicted.events);
        }
        true
    }

    /// Index of the device by which the frame arrived, or by which the kernel sends it; 0 inline, where there is one
    /// wire.
    pub(super) fn came_by(&self) -> u32 {
        if self.settings.beside { self.frame.interface } else { 0 }
    }

    /// The path of all other frames from the wire.
    #[cold]
    #[inline(never)]
    pub(super) fn on_wire_frame_slow(&mut self, now: Instant) {
        self.look_up(true, now);
    }

    /// Gives the frame to its connection, to the handshake that it `may_open` or continue, or to the kernel. `may_open`
    /// is false for a frame that the front worker has sent back, since it is part of no handshake, or follows one.
    pub(super) fn look_up(&mut self, may_open: bool, now: Instant) {
        if let Ok(parsed) = TcpFrame::parse(self.frame.bytes(), self.came_by()) {
            if let Some(slot) = self.connections.find(&FlowKey::from(&parsed.flow)) {
                if self.frame.checksum == Checksum::Unknown && !parsed.checksum_holds(self.frame.bytes()) {
                    self.counters.add(Counter::BadChecksum, 1);
                    return;
                }
                self.on_segment(slot, &parsed, now);
                return;
            }
            if !self.closed.is_empty() && self.take_closed(&parsed, now) {
                return;
            }
            if may_open && !self.listeners.is_empty() && self.take_handshake(&parsed, now) {
                return;
            }
        }
        if !self.addresses.is_none() && self.take_resolution(now) {
            return;
        }
        if !self.programs.message_ports.is_empty() && self.take_packet() {
            return;
        }
        if !self.datagrams.is_empty() && self.take_datagram() {
            return;
        }
        if !self.take_fragment(now) {
            self.deliver_to_kernel(now);
        }
    }

    /// Delivers a frame from the wire that belongs to no offloaded connection to the kernel. ICMP messages about an
    /// offloaded connection are used here, too.
    pub(super) fn deliver_to_kernel(&mut self, now: Instant) {
        if self.connections.count > 0
            && let Some(about) = icmp::about(self.frame.bytes(), self.came_by())
        {
            match about.report {
                Report::TooBig(mtu) => self.on_too_big(&about.flow, about.seq, mtu, now),
                Report::Unreachable(error) => self.on_unreachable(&about.flow, about.seq, error),
            }
        }
        if self.output.wire.is_gated() {
            self.output.wire.captures.is_kernels();
        }
        if self.settings.beside {
            self.give_back_to_kernel();
        } else {
            self.acknowledge_for_kernel(now);
            self.to_kernel.receive(&mut self.frame, &self.counters, now.0);
            self.due = self.due.min(self.to_kernel.delivery.due());
        }
    }

    /// Beside the kernel: gives the kernel a client's segment that was kept from it because of a listener, and belongs
    /// to no connection or handshake of the NIC's. Of other frames the kernel has its own copy, or needs none.
    fn give_back_to_kernel(&mut self) {
        if !self.listeners.is_empty()
            && let Ok(parsed) = TcpFrame::parse(self.frame.bytes(), self.came_by())
            && self.listeners.at(&parsed.flow.local).is_some()
        {
            self.to_kernel.transmit(&mut self.frame, &self.counters);
        }
    }

    /// Sends a frame to the kernel without delay.
    fn send_to_host(&mut self) {
        if !self.settings.beside {
            self.to_kernel.transmit(&mut self.frame, &self.counters);
        }
    }

    /// Processes a segment of the connection in slot `index`.
    pub(super) fn on_segment(&mut self, index: u32, parsed: &TcpFrame, now: Instant) {
        let Some(slot) = self.connections.slots[index as usize].as_mut() else { return };
        match &mut slot.custody {
            Custody::Active(offloaded) => {
                self.counters.add(Counter::Segments, 1);
                let segment = Segment::from(parsed);
                if offloaded.closing {
                    return self.on_segment_of_closing(index, &segment, now);
                }
                if let Some(cause) = needs_kernel(&segment, &offloaded.tcp) {
                    // One request is enough: the peer retransmits segments that are not answered.
                    let first = slot.held.is_empty();
                    slot.held.push(parsed, &self.frame);
                    let cid = slot.cid;
                    if first {
                        self.send_to_agent(Message::new(Operation::OsRestore, cid, cause as u32, 0));
                    }
                    return;
                }
                if offloaded.is_on_fast_path() && !offloaded.tcp.is_fast_segment(&segment) && self.lend(index, now) {
                    return self.give_to_host_tcp(index, parsed);
                }
                let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
                let Custody::Active(offloaded) = &mut slot.custody else { return };
                if segment.length > 0 && before(offloaded.tcp.rcv_nxt(), segment.seq) {
                    self.counters.add(Counter::Disordered, 1);
                }
                let received = offloaded.tcp.input(&segment, now);
                if received.place > 0 {
                    let payload = &parsed.payload(self.frame.bytes())[received.skip as usize..][..received.place as usize];
                    offloaded.receive.write(received.place_seq, payload);
                }
                offloaded.note(&received);
                self.output.send_all(offloaded, &self.counters, now);
                self.follow_up(index, received.events);
            }
            Custody::Dormant(_) => {
                if self.wake_connection(index) {
                    self.on_segment(index, parsed, now);
                }
            }
            Custody::Lent(_) => self.give_to_host_tcp(index, parsed),
            Custody::Opening(_) => self.continue_opening(index, parsed, now),
            Custody::Mirrored => {
                slot.held.push(parsed, &self.frame);
                self.output.wire.captures.is_kernels();
                self.send_to_host();
            }
            Custody::Held | Custody::Leaving(_) => {
                if self.settings.drop_during_moves || !slot.held.push(parsed, &self.frame) {
                    self.counters.add(Counter::Dropped, 1);
                }
            }
        }
    }

    /// Processes a frame from the kernel: drops it if the NIC owns its connection, else sends it to the wire.
    #[inline(never)]
    pub(super) fn on_host_frame(&mut self, now: Instant) {
        self.counters.add(Counter::HostReceived, 1);
        if !self.closed.is_empty() && self.is_too_early(now) {
            self.counters.add(Counter::Silenced, 1);
            return;
        }
        if self.connections.count > 0
            && let Ok(parsed) = TcpFrame::parse(self.frame.bytes(), self.came_by())
            && let Some(index) = self.connections.find(&FlowKey::from(&parsed.flow.reversed()))
            && let Some(slot) = self.connections.slots[index as usize].as_mut()
        {
            if !matches!(slot.custody, Custody::Mirrored) {
                self.counters.add(Counter::Silenced, 1);
                return;
            }
            let covered = mirror_covers(slot, &parsed);
            let word = self.nic_memory.word32(nic::slot(index) + at::COVERED);
            word.store(u32::from(covered), Ordering::Release);
        }
        if !self.settings.beside {
            self.raise_kernel_acknowledgement(now);
            self.output.forward(&mut self.frame, &self.counters);
        }
    }

    /// Lowers a connection's path MTU as an ICMP message says.
    fn on_too_big(&mut self, flow: &baton_wire::Flow, seq: u32, mtu: u32, now: Instant) {
        let Some(index) = self.connections.find(&FlowKey::from(flow)) else { return };
        if self.host_tcp.is_some() && self.pass_on_mtu(index, seq, mtu, now) {
            return;
        }
        self.lower_mtu(index, seq, mtu, now);
    }

    /// Lowers the path MTU of the connection in slot `index`, if a segment with this sequence number can have been too
    /// big.
    pub(super) fn lower_mtu(&mut self, index: u32, seq: u32, mtu: u32, now: Instant) {
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        if let Custody::Active(offloaded) = &mut slot.custody {
            // Only a segment in flight can have been too big (RFC 5927 section 7.2), and the MTU is only lowered.
            let offloaded = &mut **offloaded;
            let tcp = &offloaded.tcp;
            let plausible = at_or_before(tcp.snd_una(), seq) && before(seq, tcp.snd_nxt());
            if plausible && mtu < offloaded.image.mtu {
                offloaded.set_mtu(mtu);
                offloaded.tcp.on_mtu_change(mtu, now);
                self.output.send_all(offloaded, &self.counters, now);
                self.follow_up(index, Events::empty());
            }
        }
    }

    /// Takes the frame if it is a fragment that may belong to an offloaded connection. A datagram that it completes is
    /// processed as any frame, even if it belongs to another connection. False if the frame is no fragment.
    pub(super) fn take_fragment(&mut self, now: Instant) -> bool {
        let connections = self.crossbar.as_ref().map_or(self.connections.count, |crossbar| crossbar.peers.connections());
        if connections == 0 {
            return false;
        }
        let Some(fragment) = Fragment::parse(self.frame.bytes(), self.came_by()) else { return false };
        let mut given_up = Vec::new();
        let mut fragments = std::mem::take(&mut self.fragments);
        let outcome = fragments.take(&mut self.frame, fragment, now, |frame| given_up.push(frame));
        self.fragments = fragments;
        if outcome == Outcome::Whole {
            if self.crossbar.is_some() {
                self.dispatch_admitted(now);
            } else {
                self.on_wire_frame_slow(now);
            }
        }
        for frame in given_up {
            // To the kernel, which may still receive the missing fragments.
            self.frame.copy_from(&frame);
            self.deliver_to_kernel(now);
        }
        true
    }
}

/// Processes a frame from the wire, after showing it to captures.
#[cold]
#[inline(never)]
pub(super) fn on_gated_wire_frame<H: Device, W: Device>(worker: &mut Worker<H, W>, now: Instant) {
    worker.output.wire.note_received(&worker.frame);
    worker.on_wire_frame(now);
    worker.output.wire.captures.processed();
}

/// Whether a segment has to be processed by the kernel, and why: it is held, the connection is restored, and the kernel
/// gets the segment. The kernel knows best what a reset means to the program and its socket. The NIC has no urgent
/// data: a segment that announces some goes to the kernel before any of its bytes is accepted. In TIME-WAIT a reset
/// means nothing to the program: the connection has ended in order.
pub(super) fn needs_kernel(segment: &Segment, tcp: &baton_tcp::Connection) -> Option<RestoreCause> {
    if segment.flags.contains(Flags::RST) {
        return (segment.seq == tcp.rcv_nxt() && tcp.state() != State::TimeWait).then_some(RestoreCause::Reset);
    }
    let current = at_or_before(tcp.rcv_nxt(), segment.end()) && at_or_before(segment.seq, tcp.rcv_adv());
    (segment.flags.contains(Flags::URG) && current).then_some(RestoreCause::Urgent)
}

/// Whether the mirrored frames cover everything that the kernel holds out of order, judged by an acknowledgement of the
/// kernel's: it reports no SACK block, or fewer than a header has room for, so that these are all, and the frames cover
/// them.
fn mirror_covers(slot: &mut Slot, parsed: &TcpFrame) -> bool {
    if !parsed.flags.contains(Flags::ACK) {
        return false;
    }
    slot.held.acknowledged(parsed.ack);
    let blocks = parsed.options.sack.as_slice();
    let held = &slot.held;
    let beyond = || blocks.iter().filter(|block| before(parsed.ack, block.1));
    !held.overflowed() && beyond().count() < MAX_SACK_BLOCKS && beyond().all(|block| held.covers(block.0, block.1))
}
