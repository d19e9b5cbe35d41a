//! The transmission of segments and of the kernel's frames to the wire, and the bookkeeping of a connection's events.

use crate::counters::Counters;
use crate::gate::{Gate, GatedWire};
use crate::listeners::Opening;
use crate::offloaded::Offloaded;
use baton_abi::layout::Counter;
use baton_device::{Capabilities, Checksum, Device, Frame, Parts, Segmentation};
use baton_tables::NO_SLOT;
use baton_tcp::{Events, Instant, Received, Transmit};
use baton_wire::frame::{self, ETHERNET, Header, IPV4, MAX_HEADER, TCP_CHECKSUM, Template};
use baton_wire::{Acknowledgement, Flags};

/// Payload bytes that a connection may send at once if the device does not cut large frames: about as many as a device
/// takes.
const RUN: u32 = 1 << 16;

/// The wire, and the buffer of the frame that is being built for it.
pub(crate) struct Output<W> {
    pub wire: GatedWire<W>,
    frame: Frame,
    capabilities: Capabilities,
    /// Slot of the connection whose acknowledgement is in the frame and has not been sent; else [`NO_SLOT`]. The
    /// connection's next one takes its place: segments that come together are acknowledged together, as the kernel does
    /// for an aggregate.
    held: u32,
    /// Whether acknowledgements are held until the end of a batch.
    holds: bool,
}

impl<W: Device> Output<W> {
    /// With `holds`, acknowledgements are held until something else is sent or [`Output::flush`] is called.
    pub fn new(wire: W, gate: Gate, frame_bytes: usize, holds: bool) -> Self {
        let capabilities = wire.capabilities();
        let wire = GatedWire::new(wire, gate, frame_bytes);
        Output { wire, frame: Frame::with_capacity(frame_bytes), capabilities, held: NO_SLOT, holds }
    }

    /// The buffer in which a frame is built for [`Output::transmit`].
    pub fn frame_mut(&mut self, counters: &Counters) -> &mut Frame {
        self.send_held(counters);
        &mut self.frame
    }

    /// Sends the acknowledgement that is held, if there is one.
    #[inline(always)]
    fn send_held(&mut self, counters: &Counters) {
        if self.held != NO_SLOT {
            self.end_hold(counters);
        }
    }

    #[cold]
    #[inline(never)]
    fn end_hold(&mut self, counters: &Counters) {
        self.held = NO_SLOT;
        self.send_frame(counters);
    }

    /// Sends the frame that was built.
    pub fn transmit(&mut self, counters: &Counters) {
        self.send_frame(counters);
    }

    #[inline(always)]
    fn send_frame(&mut self, counters: &Counters) {
        self.wire.transmit(&mut self.frame, counters);
    }

    /// Sends the held acknowledgement and all frames that the wire has gathered.
    #[inline]
    pub fn flush(&mut self, counters: &Counters) {
        self.send_held(counters);
        let lost = self.wire.device.flush();
        if lost > 0 {
            counters.add(Counter::Dropped, lost);
        }
    }

    /// Sends a frame of the kernel's, after the offloads that the wire's device does not do: segmentation, checksum.
    pub fn forward(&mut self, frame: &mut Frame, counters: &Counters) {
        self.send_held(counters);
        if frame.segmentation.is_some() && self.capabilities.segmentation == 0 {
            return self.cut(frame, counters);
        }
        if !self.capabilities.checksum
            && let Checksum::Partial { start, offset } = frame.checksum
        {
            frame::finish_checksum(frame.bytes_mut(), start.into(), offset.into());
            frame.checksum = Checksum::Unknown;
        }
        self.wire.forward(frame, counters);
    }

    /// Cuts a large frame into segments and sends them.
    fn cut(&mut self, large: &Frame, counters: &Counters) {
        let Ok(mut cut) = baton_tso::cut(large, self.capabilities.checksum) else {
            return counters.add(Counter::Uncut, 1);
        };
        counters.add(Counter::Cut, 1);
        while cut.next(&mut self.frame) {
            counters.add(Counter::CutSegments, 1);
            self.wire.forward(&mut self.frame, counters);
        }
    }

    /// Sends all segments that the connection may send now. The recovery record is published before each segment or run
    /// of segments, and once if there is none.
    #[inline(never)]
    pub fn send_all(&mut self, offloaded: &mut Offloaded, counters: &Counters, now: Instant) {
        let most = if self.capabilities.segmentation > 0 { self.capabilities.segmentation } else { RUN };
        let mut published = false;
        let before = offloaded.tcp.retransmissions();
        let fresh = offloaded.tcp.snd_nxt();
        while let Some(transmit) = offloaded.tcp.poll_transmit(now, most) {
            if !cfg!(feature = "sabotage-send-before-record") {
                offloaded.publish(now);
            }
            published = true;
            self.emit(offloaded, &transmit, counters);
            if cfg!(feature = "sabotage-send-before-record") {
                offloaded.publish(now);
            }
        }
        if cfg!(feature = "sabotage-drop-send-memory") {
            offloaded.drop_send_memory(fresh);
        }
        offloaded.consider_growth(now);
        if !published {
            offloaded.publish(now);
        } else if offloaded.tcp.retransmissions() != before {
            counters.add(Counter::Retransmitted, offloaded.tcp.retransmissions() - before);
        }
    }

    /// Sends the SYN, SYN-ACK or RST of a connection whose handshake is in progress. It has no program yet, and no
    /// record.
    pub fn send_handshake(&mut self, opening: &mut Opening, counters: &Counters, now: Instant) {
        self.send_held(counters);
        while let Some(transmit) = opening.tcp.poll_transmit(now, 0) {
            let header = transmit.header(transmit.seq as u16);
            let template = Template::new(&opening.flow, &opening.link, false);
            self.frame.set_length(MAX_HEADER);
            let length = template.emit(&header, 0, self.frame.bytes_mut());
            self.frame.set_length(length);
            self.frame.segmentation = None;
            complete(&mut self.frame, template.tcp_offset(), opening.link.interface, self.capabilities.checksum);
            self.send_frame(counters);
        }
    }

    /// Sends a pure acknowledgement of the connection in slot `index`, which has nothing out of order, after publishing
    /// the recovery record, or holds it.
    #[inline(always)]
    pub fn acknowledge(
        &mut self,
        index: u32,
        offloaded: &mut Offloaded,
        ack: &Acknowledgement,
        counters: &Counters,
        now: Instant,
    ) {
        self.make_free_for(index, counters);
        let frame = &mut *self.frame;
        let length = offloaded.template.acknowledge(ack, frame.front_mut());
        frame.set_length(length);
        frame.segmentation = None;
        complete(frame, offloaded.template.tcp_offset(), offloaded.template.interface(), self.capabilities.checksum);
        let clock = ack.timestamps.map(|(clock, _)| clock);
        if !cfg!(feature = "sabotage-ack-before-record") {
            offloaded.publish_in_order(clock.unwrap_or_else(|| offloaded.tcp.record(now).ts_clock));
        }
        if self.holds && !cfg!(feature = "sabotage-ack-before-record") {
            self.held = index;
        } else {
            self.send_frame(counters);
        }
        if cfg!(feature = "sabotage-ack-before-record") {
            offloaded.publish(now);
        }
    }

    /// Whether every frame passes, and the device computes checksums.
    #[inline(always)]
    pub fn is_usual(&self) -> bool {
        self.capabilities.checksum && !self.wire.is_gated()
    }

    /// Sends the held acknowledgement, unless it belongs to the connection in slot `index`, whose next one may replace
    /// it.
    #[inline(always)]
    pub fn make_free_for(&mut self, index: u32, counters: &Counters) {
        if self.held != NO_SLOT && self.held != index {
            self.end_hold(counters);
        }
    }

    /// Writes the acknowledgement of a predicted segment, and the record that covers it, without publishing that:
    /// [`Output::acknowledge`] over IPv4 with timestamps, where the wire [`Output::is_usual`] and no acknowledgement of
    /// another connection is held.
    #[inline(always)]
    pub fn prepare_usual(&mut self, offloaded: &Offloaded, ack: &Acknowledgement) {
        let timestamps = ack.timestamps.unwrap_or_default();
        let frame = &mut *self.frame;
        frame.segmentation = None;
        frame.interface = offloaded.template.interface();
        frame.checksum = Checksum::Partial { start: (ETHERNET + IPV4) as u16, offset: TCP_CHECKSUM as u16 };
        offloaded.template.acknowledge_usual(ack, timestamps, frame.begin(Template::USUAL_ACKNOWLEDGEMENT));
        offloaded.prepare_predicted(timestamps.0);
    }

    /// Publishes the record, and sends or holds the acknowledgement, that [`Output::prepare_usual`] has written for the
    /// connection in slot `index`. Counts the segment.
    #[inline(always)]
    pub fn acknowledge_usual(&mut self, index: u32, offloaded: &mut Offloaded, counters: &Counters) {
        if !cfg!(feature = "sabotage-ack-before-record") {
            offloaded.publish_predicted();
        }
        if self.holds && !cfg!(feature = "sabotage-ack-before-record") {
            self.held = index;
            counters.add_to_each([Counter::WireReceived, Counter::Segments], 1);
        } else {
            let sent = self.wire.device.transmit(&mut self.frame);
            let sent = if sent { Counter::WireSent } else { Counter::Dropped };
            counters.add_to_each([sent, Counter::WireReceived, Counter::Segments], 1);
        }
        if cfg!(feature = "sabotage-ack-before-record") {
            offloaded.publish_predicted();
        }
    }

    /// Builds a segment, or a run of segments, and sends it.
    #[inline(always)]
    fn emit(&mut self, offloaded: &mut Offloaded, transmit: &Transmit, counters: &Counters) {
        self.send_held(counters);
        let header = transmit.header(0);
        if transmit.segment_size == 0 {
            self.emit_segment(offloaded, &header, transmit.length, counters);
        } else if self.capabilities.segmentation == 0 {
            self.emit_run(offloaded, header, transmit, counters);
        } else {
            self.emit_large(offloaded, header, transmit, counters);
        }
    }

    /// Builds the segments of a run for a device that does not cut, and sends them. As a segmenting device does, it
    /// sets CWR only in the first segment, and PSH and FIN only in the last.
    #[inline(never)]
    fn emit_run(&mut self, offloaded: &mut Offloaded, mut header: Header<'_>, transmit: &Transmit, counters: &Counters) {
        const AT_END: u8 = Flags::PSH.0 | Flags::FIN.0;
        let size = u32::from(transmit.segment_size);
        let mut left = transmit.length;
        header.flags = Flags(transmit.flags.0 & !AT_END);
        while left > size {
            self.emit_segment(offloaded, &header, size, counters);
            header.flags = Flags(header.flags.0 & !Flags::CWR.0);
            header.seq = header.seq.wrapping_add(size);
            left -= size;
        }
        header.flags = Flags(header.flags.0 | transmit.flags.0 & AT_END);
        self.emit_segment(offloaded, &header, left, counters);
    }

    /// Builds one segment and sends it.
    #[inline(always)]
    fn emit_segment(&mut self, offloaded: &mut Offloaded, header: &Header<'_>, length: u32, counters: &Counters) {
        let frame = &mut *self.frame;
        let header = Header { ident: offloaded.next_ident(), ..*header };
        let headers = offloaded.template.emit(&header, length as usize, frame.front_mut::<MAX_HEADER>());
        frame.set_length(headers + length as usize);
        if length > 0 && !offloaded.fetch(header.seq, &mut frame.bytes_mut()[headers..]) {
            counters.add(Counter::BadMessages, 1);
            return;
        }
        frame.segmentation = None;
        complete(frame, offloaded.template.tcp_offset(), offloaded.template.interface(), self.capabilities.checksum);
        self.send_frame(counters);
    }

    /// Builds a frame that the device cuts, and sends it.
    #[inline(never)]
    fn emit_large(&mut self, offloaded: &mut Offloaded, header: Header<'_>, transmit: &Transmit, counters: &Counters) {
        let length = transmit.length as usize;
        let header = Header { ident: offloaded.next_ident(), ..header };
        // The device checksums and copies a large frame, so that its payload need not be in one piece with its headers.
        let apart = self.capabilities.checksum && self.wire.transmits_apart();
        let places = if apart { offloaded.places(transmit.seq, transmit.length) } else { None };
        let headers = offloaded.template.emit(&header, length, self.frame.front_mut::<MAX_HEADER>());
        self.frame.set_length(headers + length);
        if places.is_none() && !offloaded.fetch_pieces(transmit.seq, &mut self.frame.bytes_mut()[headers..]) {
            counters.add(Counter::BadMessages, 1);
            return;
        }
        self.frame.segmentation = Some(Segmentation {
            size: transmit.segment_size,
            headers: headers as u16,
            ipv6: !offloaded.image.flow.is_v4(),
            ecn: false,
            udp: false,
        });
        complete(&mut self.frame, offloaded.template.tcp_offset(), offloaded.template.interface(), self.capabilities.checksum);
        match places {
            Some(payload) => {
                self.frame.set_length(headers);
                self.wire.transmit_apart(&mut self.frame, payload, counters);
            }
            None => self.send_frame(counters),
        }
    }
}

/// Sets the interface of a frame that was built, whose TCP header is at offset `start`, and completes its checksum, or
/// leaves it to a device that does so (`by_device`).
#[inline(always)]
fn complete(frame: &mut Parts, start: usize, interface: u32, by_device: bool) {
    frame.interface = interface;
    if by_device {
        frame.checksum = Checksum::Partial { start: start as u16, offset: TCP_CHECKSUM as u16 };
    } else {
        frame::finish_checksum(frame.bytes_mut(), start, TCP_CHECKSUM);
        frame.checksum = Checksum::Unknown;
    }
}

impl Offloaded {
    /// Adds the events of a received segment to the program's pending events.
    pub fn note(&mut self, received: &Received) {
        if received.delivered > 0 {
            let end = self.tcp.rcv_nxt().wrapping_sub(u32::from(self.tcp.fin_received()));
            self.pending.note_delivered(&self.receive, end.wrapping_sub(received.delivered), received.delivered);
        }
        self.note_acknowledged(received.acked, received.events);
    }

    /// Notes that the peer has acknowledged `acked` bytes.
    pub fn note_acknowledged(&mut self, acked: u32, events: Events) {
        if acked > 0 {
            if !cfg!(feature = "sabotage-drop-send-memory") {
                self.pending.acked += acked;
            }
            self.drop_acked_pairs();
        }
        self.note_events(events);
    }

    /// Sabotage (see `Cargo.toml`): send memory counts as free once its bytes have been sent, from sequence number
    /// `fresh` on.
    fn drop_send_memory(&mut self, fresh: u32) {
        let end = self.tcp.snd_end();
        let sent = self.tcp.snd_nxt().wrapping_sub(fresh);
        self.pending.acked += sent.min(end.wrapping_sub(fresh) & (u32::MAX >> 1));
    }

    /// Notes the events that the program must know.
    pub fn note_events(&mut self, events: Events) {
        if events.contains(Events::FIN) {
            self.pending.fin = true;
        }
        if events.contains(Events::CLOSED) {
            self.pending.closed = true;
        }
        if events.contains(Events::ABORTED) {
            self.pending.closed = true;
            self.pending.error = self.error_number();
        }
    }

    /// Linux's error number for the end of the connection, for the program.
    pub fn error_number(&self) -> u32 {
        use baton_tcp::EndReason;
        const EPIPE: u32 = 32;
        const ECONNABORTED: u32 = 103;
        const ECONNRESET: u32 = 104;
        const ETIMEDOUT: u32 = 110;
        const ECONNREFUSED: u32 = 111;
        match self.tcp.end_reason() {
            None => 0,
            // In CLOSE-WAIT, as in Linux (tcp_reset): a program that continues to write gets the error of a pipe.
            Some(EndReason::Reset) if self.tcp.fin_received() && !self.tcp.fin_queued() => EPIPE,
            Some(EndReason::Reset) => ECONNRESET,
            Some(EndReason::Aborted) => ECONNABORTED,
            Some(EndReason::TimedOut) => ETIMEDOUT,
            Some(EndReason::Refused) => ECONNREFUSED,
        }
    }
}
