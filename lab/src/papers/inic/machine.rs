//! A host and its card as two processors, a wire, and a peer that costs nothing. Our TCP runs on the one or on the
//! other; only its cost comes from the model. Virtual time in microseconds.

use baton_tcp::{Config, Connection, Instant, Segment, State, Transmit};
use baton_wire::Flags;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// What the card does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Nothing: TCP is the host's, which makes each packet and is interrupted for each acknowledgement and each packet
    /// that has left.
    Native,
    /// All of TCP: each message is a handshake between host and card, which joins small ones.
    Full,
    /// The fast path: the host hands over a whole message, the card cuts it and takes the acknowledgements.
    Partial {
        /// Whether small messages are joined.
        nagle: bool,
    },
}

/// The machine's numbers: times in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The host: a call of the program, a byte copied, a packet's way through the stack, an interrupt, a switch of
    /// threads, a handshake's accesses of the card.
    pub call: f64,
    /// See `call`.
    pub copy: f64,
    /// See `call`.
    pub host_packet: f64,
    /// See `call`.
    pub interrupt: f64,
    /// See `call`.
    pub switch: f64,
    /// See `call`.
    pub access: f64,
    /// The card: a message's handshake, a packet sent with all that belongs to it.
    pub handshake: f64,
    /// See `handshake`.
    pub nic_packet: f64,
    /// Bits per microsecond of the wire, and bytes of a frame around the segment's data.
    pub link: f64,
    /// See `link`.
    pub framing: u32,
    /// One way.
    pub delay: f64,
    /// Bytes of the socket's send buffer.
    pub buffer: u32,
    /// Whether the card joins small messages ([`Way::Full`]).
    pub nagle: bool,
}

/// What came of a run.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Mb/s of data that the peer has got.
    pub megabits: f64,
    /// Milliseconds of the host's processor for a MB.
    pub host: f64,
    /// Interrupts of the host for a MB.
    pub interrupts: f64,
    /// Thousands of cycles of the card for a packet.
    pub cycles: f64,
    /// Bytes of data in a packet.
    pub packet: f64,
}

/// Bytes of memory at the peer.
const RECEIVE: u32 = 1 << 18;
/// Packets whose acknowledgements it does not delay: the first.
const QUICK: u64 = 16;

#[derive(Debug)]
enum Work {
    /// The program's next piece of a message is copied, and queued or handed over.
    Send(u32),
    /// The card has taken a message; its answer wakes the program.
    Handshake(u32),
    Answer,
    /// A packet is made and goes to the wire.
    Packet(Segment, bool),
    /// A packet has left: the host is interrupted.
    Left,
    /// An acknowledgement has come.
    Acknowledgement(Segment),
}

/// A processor: one piece of work after the other.
#[derive(Default)]
struct Processor {
    waiting: VecDeque<(f64, Work)>,
    busy: bool,
    time: f64,
}

enum Event {
    /// A processor is done with this: 0 the host, 1 the card.
    Done(usize, Work),
    /// A segment reaches the peer.
    AtPeer(Segment),
    /// An acknowledgement reaches this side.
    AtCard(Segment),
    /// A timer of one of the connections may be due.
    Timer,
}

struct World {
    settings: Settings,
    way: Way,
    tcp: Connection,
    peer: Connection,
    processors: [Processor; 2],
    events: BinaryHeap<Reverse<(u64, u64)>>,
    what: std::collections::HashMap<u64, Event>,
    count: u64,
    now: f64,
    wire: f64,
    /// Bytes of messages that the program still wants to send, of its current message, and each message's.
    wanted: u64,
    rest: u32,
    size: u32,
    /// Bytes of a message that the card holds until the buffer has room.
    held: u32,
    /// Whether the program waits for room.
    blocked: bool,
    interrupts: u64,
    packets: u64,
    /// Packets that have reached the peer.
    arrived: u64,
    received: u64,
    timer: u64,
}

fn segment_of(transmit: &Transmit) -> Segment {
    let Transmit { seq, ack, flags, window, options, length, .. } = *transmit;
    Segment { seq, ack, flags, window, options, length, ..Segment::default() }
}

impl World {
    fn new(settings: Settings, way: Way, size: u32, bytes: u64) -> World {
        let nodelay = match way {
            Way::Native => false,
            Way::Full => !settings.nagle,
            Way::Partial { nagle } => !nagle,
        };
        // The time of the report: no timestamps, 1460 bytes in a packet.
        let config = Config { receive_buffer: RECEIVE, nodelay, timestamps: false, ..Config::default() };
        let start = Instant(1);
        let mut tcp = Connection::connect(config, 1, 0, start);
        let syn = segment_of(&tcp.poll_transmit(start, 0).expect("a SYN"));
        let mut peer = Connection::accept(config, &syn, 1, 0, start).expect("a SYN makes a connection");
        // The handshake costs nothing and takes no time: it is no part of the measurement.
        while tcp.state() != State::Established || peer.state() != State::Established {
            while let Some(transmit) = peer.poll_transmit(start, 0) {
                tcp.input(&segment_of(&transmit), start);
            }
            while let Some(transmit) = tcp.poll_transmit(start, 0) {
                peer.input(&segment_of(&transmit), start);
            }
        }
        let mut world = World {
            settings,
            way,
            tcp,
            peer,
            processors: Default::default(),
            events: BinaryHeap::new(),
            what: std::collections::HashMap::new(),
            count: 0,
            now: 1.0,
            wire: 0.0,
            wanted: bytes,
            rest: 0,
            size,
            held: 0,
            blocked: false,
            interrupts: 0,
            packets: 0,
            arrived: 0,
            received: 0,
            timer: u64::MAX,
        };
        world.program();
        world
    }

    fn enter(&mut self, at: f64, event: Event) {
        self.count += 1;
        self.events.push(Reverse(((at.max(self.now) * 1000.0).round() as u64, self.count)));
        self.what.insert(self.count, event);
    }

    fn at(&self) -> Instant {
        Instant(self.now as u64)
    }

    /// Adds work to a processor.
    fn work(&mut self, on: usize, cost: f64, work: Work) {
        self.processors[on].waiting.push_back((cost, work));
        self.proceed(on);
    }

    fn proceed(&mut self, on: usize) {
        let processor = &mut self.processors[on];
        if !processor.busy
            && let Some((cost, work)) = processor.waiting.pop_front()
        {
            processor.busy = true;
            processor.time += cost;
            self.enter(self.now + cost, Event::Done(on, work));
        }
    }

    fn room(&self) -> u32 {
        self.settings.buffer.saturating_sub(self.tcp.unacknowledged())
    }

    /// The program goes on: it sends what there is room for, or the next message.
    fn program(&mut self) {
        let mut cost = 0.0;
        if self.rest == 0 {
            if self.wanted == 0 {
                return;
            }
            self.rest = u64::from(self.size).min(self.wanted) as u32;
            self.wanted -= u64::from(self.rest);
            cost += self.settings.call;
        }
        if self.way == Way::Full {
            // The whole message is handed over, and the program waits for the answer.
            let bytes = std::mem::take(&mut self.rest);
            cost += self.settings.copy * f64::from(bytes) + self.settings.access + self.settings.switch;
            return self.work(0, cost, Work::Send(bytes));
        }
        let bytes = self.rest.min(self.room());
        self.blocked = bytes == 0;
        if self.blocked {
            return;
        }
        if matches!(self.way, Way::Partial { .. }) && cost > 0.0 {
            // The headers of the message, once.
            cost += self.settings.host_packet;
        }
        self.rest -= bytes;
        self.work(0, cost + self.settings.copy * f64::from(bytes), Work::Send(bytes));
    }

    /// Makes packets of what TCP has to send.
    fn transmit(&mut self) {
        while let Some(transmit) = self.tcp.poll_transmit(self.at(), 0) {
            let segment = segment_of(&transmit);
            // The last packet of a message of which the card reports that it has left.
            let last = transmit.length > 0 && self.tcp.unsent() == 0;
            match self.way {
                Way::Native => self.work(0, self.settings.host_packet, Work::Packet(segment, true)),
                Way::Full => self.work(1, self.settings.nic_packet, Work::Packet(segment, false)),
                Way::Partial { .. } => self.work(1, 0.0, Work::Packet(segment, last)),
            }
        }
    }

    /// The card queues a message as a whole once there is room, since its queue holds addresses and no bytes; then it
    /// answers.
    fn take_message(&mut self) {
        if self.room() == 0 {
            return;
        }
        let bytes = std::mem::take(&mut self.held);
        assert!(self.tcp.queue(bytes), "a message is shorter than the sequence space");
        self.transmit();
        self.interrupts += 1;
        self.work(0, self.settings.interrupt + self.settings.switch, Work::Answer);
    }

    fn done(&mut self, on: usize, work: Work) {
        match work {
            Work::Send(bytes) if self.way == Way::Full => self.work(1, self.settings.handshake, Work::Handshake(bytes)),
            Work::Send(bytes) => {
                assert!(self.tcp.queue(bytes), "there was room");
                self.transmit();
                self.program();
            }
            Work::Handshake(bytes) => {
                self.held = bytes;
                self.take_message();
            }
            Work::Answer => self.program(),
            Work::Packet(segment, reports) => {
                let bytes = segment.length + self.settings.framing;
                self.wire = self.wire.max(self.now) + f64::from(bytes) * 8.0 / self.settings.link;
                self.packets += u64::from(segment.length > 0);
                self.enter(self.wire + self.settings.delay, Event::AtPeer(segment));
                if reports {
                    self.interrupts += 1;
                    self.work(0, self.settings.interrupt, Work::Left);
                }
            }
            Work::Left => {}
            Work::Acknowledgement(segment) => {
                self.tcp.input(&segment, self.at());
                self.transmit();
                if self.held > 0 {
                    self.take_message();
                } else if self.blocked && self.room() > 0 {
                    self.blocked = false;
                    self.processors[0].time += 2.0 * self.settings.switch;
                    self.program();
                }
            }
        }
        self.processors[on].busy = false;
        self.proceed(on);
    }

    fn answer(&mut self) {
        let readable = self.peer.readable();
        if readable > 0 {
            assert!(self.peer.consumed(readable));
            self.received += u64::from(readable);
        }
        while let Some(transmit) = self.peer.poll_transmit(self.at(), 0) {
            let wire = f64::from(self.settings.framing.max(84)) * 8.0 / self.settings.link;
            self.enter(self.now + wire + self.settings.delay, Event::AtCard(segment_of(&transmit)));
        }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Done(on, work) => self.done(on, work),
            Event::AtPeer(segment) => {
                // A peer of the time delays acknowledgements, also of what it will not answer, and whatever a segment
                // ends.
                let segment = Segment { flags: segment.flags | Flags::PSH, ..segment };
                self.arrived += 1;
                if self.arrived > QUICK {
                    self.peer.set_quick_ack(false);
                }
                self.peer.input(&segment, self.at());
                self.answer();
            }
            Event::AtCard(segment) => match self.way {
                Way::Native => {
                    self.interrupts += 1;
                    let cost = self.settings.interrupt + self.settings.host_packet;
                    self.work(0, cost, Work::Acknowledgement(segment));
                }
                Way::Full | Way::Partial { .. } => self.work(1, 0.0, Work::Acknowledgement(segment)),
            },
            Event::Timer => {
                self.timer = u64::MAX;
                let now = self.at();
                if self.tcp.next_timeout() <= now {
                    self.tcp.on_timeout(now);
                    self.transmit();
                }
                if self.peer.next_timeout() <= now {
                    self.peer.on_timeout(now);
                    self.answer();
                }
            }
        }
        let next = self.tcp.next_timeout().0.min(self.peer.next_timeout().0);
        if next < self.timer {
            self.timer = next;
            self.enter(next as f64, Event::Timer);
        }
    }
}

/// Sends `bytes` in messages of `size`.
pub fn run(settings: Settings, way: Way, size: u32, bytes: u64) -> Outcome {
    let mut world = World::new(settings, way, size, bytes);
    while world.received < bytes
        && let Some(Reverse((at, number))) = world.events.pop()
    {
        world.now = at as f64 / 1000.0;
        if let Some(event) = world.what.remove(&number) {
            world.step(event);
        }
    }
    let megabytes = bytes as f64 / 1e6;
    Outcome {
        megabits: bytes as f64 * 8.0 / world.now,
        host: world.processors[0].time / 1000.0 / megabytes,
        interrupts: world.interrupts as f64 / megabytes,
        // 100 cycles a microsecond.
        cycles: world.processors[1].time / 10.0 / world.packets as f64,
        packet: bytes as f64 / world.packets as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            call: 2.0,
            copy: 0.005,
            host_packet: 13.0,
            interrupt: 8.0,
            switch: 4.0,
            access: 6.0,
            handshake: 50.0,
            nic_packet: 170.0,
            link: 100.0,
            framing: 78,
            delay: 10.0,
            buffer: 16 << 10,
            nagle: true,
        }
    }

    /// Every byte arrives once: a run ends when the peer has all of them, and no packet is sent again.
    #[test]
    fn interrupts_are_counted_by_messages_or_by_packets() {
        let bytes = 4_000_000;
        let full = run(settings(), Way::Full, 8000, bytes);
        assert!((full.interrupts - 125.0).abs() < 1.0, "one a message: {full:?}");
        let native = run(settings(), Way::Native, 8000, bytes);
        let a_packet = native.interrupts * native.packet / 1e6;
        assert!((a_packet - 1.5).abs() < 0.1, "one for each packet and one for every second one's acknowledgement: {native:?}");
        assert!(native.packet > 1400.0 && full.packet > 1300.0, "{native:?} {full:?}");
        assert!(full.megabits < 1460.0 * 8.0 / 170.0 && native.megabits > 90.0, "{native:?} {full:?}");
    }

    /// Without the algorithm of Nagle a small message is a packet of its own, but for those that waited for the window.
    #[test]
    fn nagle_joins_messages() {
        let [alone, joined] = [false, true].map(|nagle| run(settings(), Way::Partial { nagle }, 100, 400_000));
        assert!(alone.packet < 120.0 && joined.packet > 1000.0, "{alone:?} {joined:?}");
    }
}
