//! Two endpoints, a link between them, and a clock that jumps to the next thing that happens.

use crate::link::{Carried, Counters, Impairments, Link};
use crate::stream;
use baton_image::Image;
use baton_tcp::segment::{Segment, Transmit};
use baton_tcp::{Config, Connection, Events, Instant, State};
use baton_wire::{Endpoint, Flow};

/// A segment on the simulated link, with its payload.
#[derive(Clone, Debug)]
pub struct Packet {
    /// The header.
    pub segment: Segment,
    payload: Vec<u8>,
    damaged: bool,
}

impl Carried for Packet {
    fn size(&self) -> usize {
        66 + self.payload.len()
    }

    /// A damaged packet fails its checksum and is dropped by the receiver.
    fn corrupt(&mut self, _random: u64) {
        self.damaged = true;
    }
}

/// What is sent, as it arrives if nobody marks it.
pub fn arriving(transmit: &Transmit) -> Segment {
    let Transmit { seq, ack, flags, window, options, length, .. } = *transmit;
    Segment { seq, ack, flags, window, options, congestion_experienced: false, length }
}

/// One end: a connection, its memory, and a program that sends a known stream and checks what it gets.
pub struct End {
    /// The connection.
    pub connection: Connection,
    /// What came over all segments.
    pub events: Events,
    /// Bytes of the stream that the program has checked.
    pub verified: u64,
    /// Bytes that were not the stream's.
    pub mismatches: u64,
    /// Whether the program reads what arrives.
    pub reads: bool,
    /// Bytes that it reads before it reports them to the connection.
    pub reports_every: u32,
    /// Bytes that it has read since then.
    unreported: u32,
    key: u64,
    peer_key: u64,
    /// Sequence number of the first byte sent, and how many the program has queued and wants to queue.
    first: u32,
    queued: u64,
    wanted: u64,
    send_room: u64,
    close_after: bool,
    memory: Vec<u8>,
    flow: Flow,
}

impl End {
    /// Wants `bytes` more of the stream to be sent, and a FIN behind them if `close`.
    pub fn send(&mut self, bytes: u64, close: bool) {
        self.wanted += bytes;
        self.close_after |= close;
    }

    /// Bytes that the peer has acknowledged.
    pub fn acknowledged(&self) -> u64 {
        let unacknowledged = self.connection.unacknowledged();
        if self.connection.state() == State::Closed { self.queued } else { self.queued.saturating_sub(u64::from(unacknowledged)) }
    }

    fn run_program(&mut self) {
        let open = !matches!(self.connection.state(), State::SynSent | State::SynReceived);
        let unacknowledged = u64::from(self.connection.unacknowledged());
        let room = self.send_room.saturating_sub(unacknowledged);
        let amount = (self.wanted - self.queued).min(room);
        if open && amount > 0 && self.connection.queue(amount as u32) {
            self.queued += amount;
        }
        if open && self.close_after && self.queued == self.wanted {
            self.connection.shutdown();
        }
        if self.reads {
            self.read();
        }
    }

    /// Reads and checks everything that is readable.
    pub fn read(&mut self) {
        let readable = self.connection.readable();
        let seq = self.connection.rcv_read();
        for at in self.unreported..readable {
            let value = self.memory[seq.wrapping_add(at) as usize & (self.memory.len() - 1)];
            self.mismatches += u64::from(value != stream::byte(self.peer_key, self.verified));
            self.verified += 1;
        }
        self.unreported = readable;
        if readable >= self.reports_every {
            assert!(self.connection.consumed(readable));
            self.unreported = 0;
        }
    }

    fn receive(&mut self, packet: &Packet, now: Instant) {
        if packet.damaged {
            return;
        }
        let received = self.connection.input(&packet.segment, now);
        let reach = received.place_seq.wrapping_add(received.place).wrapping_sub(self.connection.rcv_read());
        assert!(received.place == 0 || reach as usize <= self.memory.len(), "received beyond the memory");
        let mask = self.memory.len() - 1;
        let bytes = &packet.payload[received.skip as usize..][..received.place as usize];
        for (at, value) in bytes.iter().enumerate() {
            self.memory[received.place_seq.wrapping_add(at as u32) as usize & mask] = *value;
        }
        self.events |= received.events;
    }

    fn packet(&self, transmit: &Transmit) -> Packet {
        let mut payload = vec![0u8; transmit.length as usize];
        // Position in the stream: what is queued, less how far the segment begins before the queue's end.
        let back = u64::from(self.first.wrapping_add(self.queued as u32).wrapping_sub(transmit.seq));
        stream::fill(self.key, self.queued.wrapping_sub(back), &mut payload);
        Packet { segment: arriving(transmit), payload, damaged: false }
    }

    /// Ends the connection in an image and starts a new one from it: a move, as far as the protocol sees it. Between
    /// NICs all of the connection's state moves; through a kernel, which `by_kernel` stands for, only what the image
    /// itself has. What was received out of order goes beside the image.
    pub fn move_through_image(&mut self, by_kernel: bool, now: Instant) -> bool {
        let template = self.template();
        let Some(image) = self.connection.to_image(&template, now) else { return false };
        let nic = (!by_kernel).then(|| self.connection.nic_state(now));
        let mut bytes = [0u8; baton_image::MAX_ENCODED];
        let length = image.encode_with(nic.as_ref(), &mut bytes).expect("an image fits its room");
        let (image, nic) = Image::decode_with(&bytes[..length]).expect("an image that was written reads back");
        let ranges: Vec<(u32, u32)> = self.connection.out_of_order().collect();
        let fin = self.connection.fin_behind_hole();
        self.connection = Connection::from_image(&image, nic.as_ref(), self.memory.len() as u32, now);
        self.connection.hold(ranges.into_iter(), fin);
        true
    }

    fn template(&self) -> Image {
        Image::open(self.flow)
    }
}

/// The world: two ends, two directions, one clock in microseconds.
pub struct Pair {
    /// The end that connects, then the one that accepts.
    pub ends: [End; 2],
    /// The time.
    pub now: Instant,
    links: [Link<Packet>; 2],
}

impl Pair {
    /// Two ends whose handshake is about to begin.
    pub fn new(configs: [Config; 2], impairments: Impairments, seed: u64) -> Pair {
        let now = Instant(1_000_000);
        let isn = [seed as u32 ^ 0xffff_f000, (seed >> 7) as u32];
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 1), remote: Endpoint::v4([10, 0, 0, 2], 2), device: 0 };
        let end = |at: usize, connection| End {
            connection,
            events: Events::empty(),
            verified: 0,
            mismatches: 0,
            reads: true,
            reports_every: 1,
            unreported: 0,
            key: seed + at as u64,
            peer_key: seed + 1 - at as u64,
            first: isn[at].wrapping_add(1),
            queued: 0,
            wanted: 0,
            send_room: 64 << 20,
            close_after: false,
            memory: vec![0; configs[at].receive_buffer as usize],
            flow: if at == 0 { flow } else { flow.reversed() },
        };
        let mut pair = Pair {
            ends: [
                end(0, Connection::connect(configs[0], isn[0], 77, now)),
                end(1, Connection::connect(configs[1], isn[1], 99, now)),
            ],
            now,
            links: [Link::new(impairments, seed), Link::new(impairments, seed ^ 0x5555)],
        };
        let syn = pair.carry_syn();
        pair.ends[1].connection =
            Connection::accept(configs[1], &syn.segment, isn[1], 99, pair.now).expect("a SYN makes a connection");
        pair
    }

    /// Runs until the SYN has arrived at the other end.
    fn carry_syn(&mut self) -> Packet {
        loop {
            while let Some(transmit) = self.ends[0].connection.poll_transmit(self.now, 0) {
                let packet = self.ends[0].packet(&transmit);
                self.links[0].push(packet, self.now.0);
            }
            let timer = self.ends[0].connection.next_timeout().0;
            self.now = Instant(self.links[0].next_arrival().map_or(timer, |arrival| arrival.min(timer)).max(self.now.0));
            self.ends[0].connection.on_timeout(self.now);
            if let Some(packet) = self.links[0].pop(self.now.0).filter(|packet| !packet.damaged) {
                return packet;
            }
        }
    }

    /// Runs one round: programs, transmissions, then jumps to the next arrival or time-out and delivers it. False when
    /// nothing is left.
    pub fn step(&mut self) -> bool {
        for at in 0..2 {
            self.ends[at].run_program();
            while let Some(transmit) = self.ends[at].connection.poll_transmit(self.now, 0) {
                let packet = self.ends[at].packet(&transmit);
                self.links[at].push(packet, self.now.0);
            }
        }
        let arrivals = self.links.iter().filter_map(Link::next_arrival);
        let timers = self.ends.iter().map(|end| end.connection.next_timeout().0);
        let Some(next) = arrivals.chain(timers).min().filter(|next| *next < u64::MAX) else { return false };
        self.now = Instant(self.now.0.max(next));
        for at in 0..2 {
            while let Some(packet) = self.links[at].pop(self.now.0) {
                self.ends[1 - at].receive(&packet, self.now);
                if self.ends[1 - at].reads {
                    self.ends[1 - at].read();
                }
            }
            if self.ends[at].connection.next_timeout() <= self.now {
                let events = self.ends[at].connection.on_timeout(self.now);
                self.ends[at].events |= events;
            }
        }
        true
    }

    /// Runs until `done` holds or `limit` microseconds have passed. Whether it held.
    pub fn run_until(&mut self, limit: u64, mut done: impl FnMut(&mut Pair) -> bool) -> bool {
        let end = self.now.after(limit);
        loop {
            if done(self) {
                return true;
            }
            if self.now > end || !self.step() {
                return done(self);
            }
        }
    }

    /// Counters of the link from end `at`.
    pub fn counters(&self, at: usize) -> Counters {
        self.links[at].counters()
    }
}
