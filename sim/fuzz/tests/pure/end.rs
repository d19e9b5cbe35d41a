//! One end of a connection in a world: the connection, its memory, and a program that checks what it reads.

use baton_fuzz::{Choice, note};
use baton_image::{Image, MAX_ENCODED, TS_RECENT_LASTS};
use baton_tcp::{Config, Connection, EndReason, Instant, Received, Segment, State, Transmit};
use baton_wire::{Endpoint, Fields, Flags, Flow};

/// Microseconds without an answer after which a connection may end.
const GIVES_UP: u64 = 60_000_000;
/// Segments that may come out of a connection at once.
const MOST_AT_ONCE: usize = 10_000;

pub fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

fn later(a: u32, b: u32) -> u32 {
    if before(a, b) { b } else { a }
}

/// The byte at a sequence number of the stream with this key.
pub fn byte(key: u8, seq: u32) -> u8 {
    (seq.wrapping_mul(0x9e37_79b1) >> 24) as u8 ^ key
}

/// A segment as it leaves.
pub fn segment_of(transmit: &Transmit) -> Segment {
    let Transmit { seq, ack, flags, window, options, length, .. } = *transmit;
    Segment { seq, ack, flags, window, options, length, congestion_experienced: false }
}

pub struct End {
    pub tcp: Connection,
    memory: Vec<u8>,
    /// Keys of the stream that is sent and of the one that comes.
    pub keys: [u8; 2],
    /// Bytes that the program has read and not reported.
    unreported: u32,
    /// Bytes that the program has queued and read.
    pub queued: u64,
    pub read: u64,
    /// Window scale that was offered, shift of the other end's windows and of ours.
    pub offered: Option<u8>,
    pub shifts: [u8; 2],
    /// The other end's right edge as far as it was ever advertised.
    furthest: Option<u32>,
    /// Our right edge as far as it was ever advertised.
    pub edge: Option<u32>,
    /// The timestamp that was sent last and when, and the one that is echoed.
    stamped: Option<(u32, Instant)>,
    echoed: Option<u32>,
    /// When a segment last came. After a long pause, or a time in the kernel, timestamps from before prove nothing old.
    fed_at: Instant,
    unproven: bool,
    /// The program has closed, and does not wait for the end.
    pub orphan: bool,
    /// The program or an option may end the connection before all has arrived.
    pub impatient: bool,
    /// When something last came from the other end, and when it last acknowledged something or had nothing to.
    heard_at: Instant,
    progress_at: (Instant, u32),
}

impl End {
    pub fn new(tcp: Connection, config: &Config, keys: [u8; 2], now: Instant) -> End {
        End {
            progress_at: (now, tcp.snd_una()),
            tcp,
            memory: vec![0; config.receive_buffer as usize],
            keys,
            unreported: 0,
            queued: 0,
            read: 0,
            offered: None,
            shifts: [0; 2],
            furthest: None,
            edge: None,
            stamped: None,
            echoed: None,
            fed_at: now,
            unproven: false,
            orphan: false,
            impatient: false,
            heard_at: now,
        }
    }

    /// Lets two ends know the shifts of their windows, as far as both have offered a scale.
    pub fn note_scales(first: &mut End, second: &mut End) {
        let scales = first.offered.zip(second.offered);
        (first.shifts, second.shifts) = scales.map_or(([0; 2], [0; 2]), |(first, second)| ([second, first], [first, second]));
    }

    pub fn is_closed(&self) -> bool {
        self.tcp.state() == State::Closed
    }

    /// Bytes that wait to be acknowledged.
    pub fn waiting(&self) -> u32 {
        // An acknowledged FIN lies behind the last byte.
        if before(self.tcp.snd_una(), self.tcp.snd_end()) { self.tcp.snd_end().wrapping_sub(self.tcp.snd_una()) } else { 0 }
    }

    /// Feeds a segment that the other end has sent, `fast` by header prediction if that is possible.
    pub fn receive(&mut self, segment: &Segment, payload: Option<&[u8]>, fast: bool, now: Instant) -> Option<Transmit> {
        // An old sequence number, as the other end's own probes have, is no answer.
        if !before(segment.end(), self.tcp.rcv_nxt()) {
            self.heard_at = now;
        }
        self.input(segment, payload, fast, now)
    }

    /// Feeds any segment. Without payload it has that of the other end's stream. Returns the acknowledgement that
    /// header prediction has made.
    pub fn input(&mut self, segment: &Segment, payload: Option<&[u8]>, fast: bool, now: Instant) -> Option<Transmit> {
        let opening = matches!(self.tcp.state(), State::SynSent | State::SynReceived);
        let (una, nxt) = (self.tcp.snd_una(), self.tcp.snd_nxt());
        let valid = segment.flags.contains(Flags::ACK) && !before(segment.ack, una) && !before(nxt, segment.ack);
        let shift = if segment.flags.contains(Flags::SYN) { 0 } else { self.shifts[0] };
        let right = segment.ack.wrapping_add(u32::from(segment.window) << shift);
        let (received, acknowledgement) =
            if fast && !opening { self.predict(segment, now) } else { (self.tcp.input(segment, now), None) };
        self.unproven |= now.since(self.fed_at) > TS_RECENT_LASTS / 2;
        self.fed_at = now;
        assert!(received.place == 0 || !self.is_stale(segment), "{segment:?} is older than what was echoed: {:?}", self.echoed);
        if valid {
            self.furthest = Some(self.furthest.map_or(right, |furthest| later(furthest, right)));
        }
        self.place(segment, payload, &received);
        self.check(now);
        acknowledgement
    }

    /// Whether PAWS (RFC 7323 section 5.3) refuses the data of a segment, as far as the last echo says.
    fn is_stale(&self, segment: &Segment) -> bool {
        !self.unproven && segment.options.timestamps.zip(self.echoed).is_some_and(|((value, _), echoed)| before(value, echoed))
    }

    /// The fast paths of a worker. What comes of them is what comes of the slow one.
    fn predict(&mut self, segment: &Segment, now: Instant) -> (Received, Option<Transmit>) {
        let (plain, Segment { seq, length, .. }) = (segment.plain(), *segment);
        let ordinary = segment.flags.0 & !Flags::PSH.0 == Flags::ACK.0;
        if !ordinary || segment.congestion_experienced || !segment.options.sack.is_empty() {
            return (self.tcp.input(segment, now), None);
        }
        let mut slow = self.tcp.clone();
        let all = Received { place: length, place_seq: seq, delivered: length, ..Received::default() };
        let acknowledgement = if self.tcp.enable_prediction()
            && let Some(acknowledgement) = Fields::of(&plain).and_then(|fields| self.tcp.predict_data(&fields, now, now.millis()))
        {
            self.tcp.disable_prediction();
            acknowledgement
        } else {
            self.tcp.disable_prediction();
            if !self.tcp.expects(&plain) {
                return (self.tcp.input(segment, now), None);
            }
            let predicted = self.tcp.predict(&plain, now);
            let Some(acknowledgement) = predicted.acknowledgement else {
                return (Received { acked: predicted.acked, events: predicted.events, ..all }, None);
            };
            acknowledgement
        };
        let transmit = Transmit {
            seq: acknowledgement.seq,
            ack: acknowledgement.ack,
            flags: Flags::ACK,
            window: acknowledgement.window,
            options: baton_wire::TcpOptions { timestamps: acknowledgement.timestamps, ..Default::default() },
            ..Transmit::default()
        };
        slow.input(segment, now);
        assert_eq!(slow.poll_transmit(now, 0), Some(transmit), "the slow path says something else");
        assert_eq!((slow.info(), slow.next_timeout()), (self.tcp.info(), self.tcp.next_timeout()), "the slow path is elsewhere");
        (all, Some(transmit))
    }

    fn place(&mut self, segment: &Segment, payload: Option<&[u8]>, received: &Received) {
        if received.place == 0 {
            return;
        }
        assert!(received.skip + received.place <= segment.length, "more than there is");
        let reach = received.place_seq.wrapping_add(received.place).wrapping_sub(self.tcp.rcv_read());
        assert!(reach as usize <= self.memory.len(), "beyond receive memory: {:?}", self.tcp);
        let (from, mask) = (segment.seq.wrapping_add(received.skip), self.memory.len() - 1);
        // The data of a SYN lies behind its sequence number; none has any here.
        for at in 0..received.place {
            let value = match payload {
                Some(payload) => payload[(received.skip + at) as usize],
                None => byte(self.keys[1], from.wrapping_add(at)),
            };
            self.memory[received.place_seq.wrapping_add(at) as usize & mask] = value;
        }
    }

    /// What must hold at any time.
    pub fn check(&mut self, now: Instant) {
        let tcp = &self.tcp;
        assert!(!before(tcp.snd_nxt(), tcp.snd_una()), "{tcp:?}");
        assert!(tcp.readable() <= tcp.receive_memory(), "{tcp:?}");
        let una = tcp.snd_una();
        if una != self.progress_at.1 || una == tcp.snd_nxt() {
            self.progress_at = (now, una);
        }
        if tcp.state() == State::Closed {
            assert_eq!(tcp.next_timeout(), Instant::NEVER);
            return;
        }
        // The first byte that is not acknowledged is in flight or waits, and something will bring it on.
        let waits = una != tcp.snd_end().wrapping_add(u32::from(tcp.fin_queued())) && una != tcp.snd_nxt();
        assert!(!waits || tcp.next_timeout() != Instant::NEVER, "it waits without a timer: {tcp:?}");
    }

    /// What must hold when a connection has ended by itself.
    pub fn may_have_ended(&self, now: Instant) {
        if self.tcp.end_reason() == Some(EndReason::TimedOut) && !self.orphan && !self.impatient {
            let silent = now.since(self.heard_at).max(now.since(self.progress_at.0));
            assert!(silent >= GIVES_UP, "it has given up after {silent} µs: {:?}", self.tcp);
        }
    }

    /// The segments that go out now.
    pub fn send(&mut self, most: u32, now: Instant, mut each: impl FnMut(&Transmit)) {
        let mut count = 0;
        while let Some(transmit) = self.tcp.poll_transmit(now, most) {
            self.check_sent(&transmit, now);
            each(&transmit);
            count += 1;
            assert!(count < MOST_AT_ONCE, "it never stops sending: {:?}", self.tcp);
        }
        self.check(now);
    }

    pub fn check_sent(&mut self, transmit: &Transmit, now: Instant) {
        let Transmit { seq, ack, flags, window, length, .. } = *transmit;
        if flags.contains(Flags::SYN) {
            self.offered = transmit.options.window_scale;
            return;
        }
        if let Some((value, echo)) = transmit.options.timestamps {
            // Milliseconds in 32 bits, of which 31 are compared.
            let last = self.stamped.filter(|(_, at)| now.since(*at) < 1000 << 30);
            assert!(last.is_none_or(|(last, _)| !before(value, last)), "{transmit:?} is stamped before {last:?}");
            self.stamped = Some((value, now));
            self.echoed = (echo != 0).then_some(echo);
        }
        let end = seq.wrapping_add(length);
        if length > 0 {
            assert!(!before(self.tcp.snd_end(), end), "{transmit:?} is more than was queued");
            let open = self.furthest.is_some_and(|furthest| !before(furthest, end));
            assert!(open, "{transmit:?} is beyond the window, which ends at {:?}", self.furthest);
        }
        if flags.contains(Flags::ACK) && !flags.contains(Flags::RST) {
            let edge = ack.wrapping_add(u32::from(window) << self.shifts[1]);
            // RFC 7323 section 2.4: less than a unit may be lost by rounding.
            let kept = self.edge.is_none_or(|before| (edge.wrapping_sub(before) as i32) > -(1 << self.shifts[1]));
            assert!(kept, "the window shrinks from {:?} to {edge}: {:?}", self.edge, self.tcp);
            self.edge = Some(self.edge.map_or(edge, |before| later(before, edge)));
        }
    }

    /// The program reads, and reports it to the connection now or later.
    pub fn program_reads(&mut self, most: u32, tells: bool) {
        let (readable, seq, mask) = (self.tcp.readable(), self.tcp.rcv_read(), self.memory.len() - 1);
        let end = readable.min(self.unreported + most);
        for at in self.unreported..end {
            let seq = seq.wrapping_add(at);
            assert_eq!(self.memory[seq as usize & mask], byte(self.keys[1], seq), "another byte at {seq} of {:?}", self.tcp);
        }
        self.read += u64::from(end - self.unreported);
        self.unreported = end;
        if tells && end > 0 {
            assert!(self.tcp.consumed(end));
            self.unreported = 0;
        }
    }

    pub fn program_writes(&mut self, bytes: u32) {
        if self.tcp.queue(bytes) {
            self.queued += u64::from(bytes);
        }
    }

    /// Receive memory grows, as a program's session lets it.
    pub fn grow(&mut self, most: u32) {
        let (old, size) = (self.memory.len(), (self.memory.len() * 2).min(1 << 18));
        let mut memory = vec![0; size];
        let first = self.tcp.rcv_read();
        for at in 0..old as u32 {
            let seq = first.wrapping_add(at) as usize;
            memory[seq & (size - 1)] = self.memory[seq & (old - 1)];
        }
        self.memory = memory;
        self.tcp.set_receive_memory(size as u32, most);
    }

    /// From NIC to NIC, or by way of the kernel.
    pub fn moves(&mut self, by_kernel: bool, now: Instant) {
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 1), remote: Endpoint::v4([10, 0, 0, 2], 2), device: 0 };
        let Some(image) = self.tcp.to_image(&Image::open(flow), now) else { return };
        note!("{now:?} moves, by the kernel: {by_kernel}");
        let nic = (!by_kernel).then(|| self.tcp.nic_state(now));
        let mut bytes = [0; MAX_ENCODED];
        let length = image.encode_with(nic.as_ref(), &mut bytes).expect("an image fits its room");
        let (image, nic) = Image::decode_with(&bytes[..length]).expect("an image that was written reads back");
        let (ranges, fin): (Vec<_>, _) = (self.tcp.out_of_order().collect(), self.tcp.fin_behind_hole());
        self.tcp = Connection::from_image(&image, nic.as_ref(), self.memory.len() as u32, now);
        self.tcp.hold(ranges.into_iter(), fin);
        if by_kernel {
            // It does not show what it has seen.
            self.unproven = true;
        }
        self.check(now);
    }

    /// A program or host changes something.
    pub fn changes(&mut self, choice: &mut Choice, now: Instant) {
        let on = choice.one_in(2);
        match choice.below(12) {
            0 | 1 => self.tcp.set_nodelay(on),
            2 => self.tcp.set_cork(on),
            3 => self.tcp.set_quick_ack(on),
            4 => self.tcp.limit_window(choice.of(&[1, 700, 2304, 5000, u32::MAX])),
            5 | 6 => self.tcp.limit_window(u32::MAX),
            7 => self.tcp.on_mtu_change(choice.of(&[68, 296, 552, 1280, 1500, 9000]), now),
            8 => self.tcp.set_max_segment(choice.of(&[0, 0, 88, 536, 1000])),
            9 => self.grow(choice.of(&[700, u32::MAX])),
            10 if choice.one_in(8) => {
                self.impatient = true;
                self.tcp.set_user_timeout(choice.of(&[1, 1000, 60_000]));
            }
            11 if choice.one_in(4) => {
                self.impatient = true;
                self.tcp.set_keepalive(on, choice.of(&[1, 60, 7200]), choice.of(&[1, 75]), choice.of(&[1, 9, 127]), now);
            }
            _ => {}
        }
    }
}
