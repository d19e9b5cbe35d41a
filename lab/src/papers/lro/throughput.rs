//! Figure 13: senders with full windows, a wire of 10 Gb/s, workers that the real hash spreads connections over, real
//! large receive, the real copy engine, and a host. In virtual time, nanoseconds inside.

use super::frames::{flow, template, write};
use baton_copy::{CopySettings, Engine, Kind};
use baton_device::Frame;
use baton_lro::{Lro, LroSettings, Mode, Push};
use baton_rss::{BUCKETS, Input, Key, Toeplitz, even};
use baton_wire::frame::{Header, MAX_HEADER, Template};
use baton_wire::{Flags, TcpOptions};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Bytes of data in a segment with timestamps.
pub const SEGMENT: usize = 1448;

/// The platform's numbers. Times in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Threads that receive.
    pub workers: usize,
    /// A worker's time for a frame.
    pub frame: f64,
    /// Bits per microsecond of the wire.
    pub link: f64,
    /// A transfer to the host: each, and for a byte.
    pub copy: (f64, f64),
    /// The host's time for a packet, and for a byte.
    pub host: (f64, f64),
    /// From a packet's end at the host to the first frame that it releases.
    pub round_trip: f64,
    /// Bytes of a window.
    pub window: usize,
    /// Whether segments are merged. Without, the NIC keeps nothing of connections, and any worker takes any frame.
    pub merges: bool,
    /// Whether all connections' frames go to one worker.
    pub one_queue: bool,
}

/// What came of a run.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Gb/s of data that the host has taken.
    pub gigabits: f64,
    /// Segments of a packet that the host got.
    pub segments: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    Arrives(usize),
    Processed(usize),
    Expires(usize),
    Copied,
    Taken,
    Released(usize, usize),
}

/// A packet on its way to the host: its connection and bytes of data.
type Packet = (usize, usize);

struct Worker {
    /// Connections of the frames that wait.
    queue: VecDeque<usize>,
    busy: bool,
    lro: Lro,
    /// When it looks at what has waited too long.
    expires: u64,
}

struct Connection {
    template: Template,
    worker: usize,
    /// Sequence number of the next segment that a worker processes.
    seq: u32,
}

struct World {
    settings: Settings,
    connections: Vec<Connection>,
    workers: Vec<Worker>,
    engine: Engine<Packet>,
    copying: Option<Packet>,
    host: VecDeque<Packet>,
    taking: Option<Packet>,
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    count: u64,
    now: u64,
    wire: u64,
    turn: usize,
    frame: Frame,
    /// Bytes and packets that the host has taken.
    taken: (usize, u64),
}

/// The worker of each connection.
pub fn spread(settings: &Settings, ports: u16, connections: usize) -> Vec<usize> {
    let (hash, table) = (Toeplitz::new(&Key::MICROSOFT), even(settings.workers));
    let of = |number| usize::from(table[hash.hash(Input::of_flow(&flow(ports, number)).bytes()) as usize % BUCKETS]);
    (0..connections).map(|number| if settings.one_queue { 0 } else { of(number) }).collect()
}

fn nanos(micros: f64) -> u64 {
    (micros * 1000.0) as u64
}

impl World {
    fn new(settings: Settings, ports: u16, connections: usize) -> World {
        // The paper: in any order, up to 64 KB, no regard for PSH, out after ten mean intervals.
        let lro = LroSettings {
            mode: if settings.merges { Mode::Reorder } else { Mode::Off },
            push: Push::Ignore,
            quiet: (1, 1_000_000),
            age: 1_000_000,
            connections,
            aggregates: connections,
            ..LroSettings::default()
        };
        let worker = |_| Worker { queue: VecDeque::new(), busy: false, lro: Lro::new(lro, 0), expires: u64::MAX };
        let connection = |(number, worker)| {
            let template = template(&flow(ports, number).reversed());
            Connection { template, worker, seq: 1 }
        };
        let mut world = World {
            connections: spread(&settings, ports, connections).into_iter().enumerate().map(connection).collect(),
            workers: (0..settings.workers).map(worker).collect(),
            engine: Engine::new(settings.workers, CopySettings { room: 1 << 15, ..CopySettings::default() }),
            copying: None,
            host: VecDeque::new(),
            taking: None,
            heap: BinaryHeap::new(),
            count: 0,
            now: 1000,
            wire: 0,
            turn: 0,
            frame: Frame::with_capacity(MAX_HEADER + SEGMENT),
            taken: (0, 0),
            settings,
        };
        for number in 0..connections {
            world.release(number, settings.window / SEGMENT);
        }
        world
    }

    fn enter(&mut self, at: u64, event: Event) {
        self.count += 1;
        self.heap.push(Reverse((at, self.count, event)));
    }

    /// A connection may send so many segments more.
    fn release(&mut self, connection: usize, segments: usize) {
        let each = nanos((SEGMENT + 66 + 24) as f64 * 8.0 / self.settings.link);
        for _ in 0..segments {
            self.wire = self.wire.max(self.now) + each;
            self.enter(self.wire, Event::Arrives(connection));
        }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Arrives(connection) => {
                let worker = if self.settings.merges {
                    self.connections[connection].worker
                } else {
                    self.turn = (self.turn + 1) % self.settings.workers;
                    self.turn
                };
                self.workers[worker].queue.push_back(connection);
                self.start(worker);
            }
            Event::Processed(worker) => {
                self.workers[worker].busy = false;
                self.process(worker);
                self.start(worker);
            }
            Event::Expires(worker) => {
                if self.workers[worker].expires == self.now {
                    self.workers[worker].expires = u64::MAX;
                    let now = self.now / 1000;
                    let mut out = Vec::new();
                    self.workers[worker].lro.expire(now, &mut |frame| out.push(data_of(frame)));
                    self.deliver(worker, &out);
                }
            }
            Event::Copied => {
                let packet = self.copying.take();
                self.host.extend(packet);
                self.take();
            }
            Event::Taken => {
                if let Some((connection, bytes)) = self.taking.take() {
                    self.taken = (self.taken.0 + bytes, self.taken.1 + 1);
                    self.enter(self.now + nanos(self.settings.round_trip), Event::Released(connection, bytes / SEGMENT));
                }
                self.take();
            }
            Event::Released(connection, segments) => self.release(connection, segments),
        }
        self.copy();
    }

    fn start(&mut self, at: usize) {
        let worker = &mut self.workers[at];
        if !worker.busy && !worker.queue.is_empty() {
            worker.busy = true;
            self.enter(self.now + nanos(self.settings.frame), Event::Processed(at));
        }
    }

    /// The frame goes through large receive.
    fn process(&mut self, at: usize) {
        let Some(number) = self.workers[at].queue.pop_front() else { return };
        let connection = &mut self.connections[number];
        let options = TcpOptions { timestamps: Some((1, 1)), ..TcpOptions::default() };
        let header = Header { seq: connection.seq, ack: 1, flags: Flags::ACK, window: 500, options: &options, ecn: 0, ident: 0 };
        write(&connection.template, &header, SEGMENT, &mut self.frame);
        connection.seq = connection.seq.wrapping_add(SEGMENT as u32);
        let mut out = Vec::new();
        self.workers[at].lro.receive(&mut self.frame, self.now / 1000, &mut |frame| out.push(data_of(frame)));
        self.deliver(at, &out);
    }

    /// Gives packets to the copy engine, and sees when the rest is due.
    fn deliver(&mut self, at: usize, out: &[(u16, usize)]) {
        let first = self.connections.first().map_or(0, |connection| port_of(&connection.template));
        for (port, bytes) in out {
            let number = usize::from(port.wrapping_sub(first));
            let kind = Kind { sets_up: false, connection: number as u32 + 1 };
            self.engine.push(at, (number, *bytes), bytes + 66, kind).expect("windows bound what waits");
        }
        let due = self.workers[at].lro.next_expiry().map_or(u64::MAX, |due| (due * 1000).max(self.now + 1000));
        if due < self.workers[at].expires {
            self.workers[at].expires = due;
            self.enter(due, Event::Expires(at));
        }
    }

    fn copy(&mut self) {
        if self.copying.is_none()
            && let Some((_, packet)) = self.engine.pop()
        {
            let (each, byte) = self.settings.copy;
            self.copying = Some(packet);
            self.enter(self.now + nanos(each + byte * packet.1 as f64), Event::Copied);
        }
    }

    fn take(&mut self) {
        if self.taking.is_none()
            && let Some(packet) = self.host.pop_front()
        {
            let (each, byte) = self.settings.host;
            self.taking = Some(packet);
            self.enter(self.now + nanos(each + byte * packet.1 as f64), Event::Taken);
        }
    }

    fn run(&mut self, until: u64) {
        while let Some(Reverse((at, _, event))) = self.heap.pop() {
            if at > until {
                self.heap.push(Reverse((at, 0, event)));
                return;
            }
            self.now = at;
            self.step(event);
        }
    }
}

/// The client's port and bytes of data of a frame.
fn data_of(frame: &Frame) -> (u16, usize) {
    let bytes = frame.bytes();
    let headers = 14 + 20 + 32;
    (u16::from_be_bytes([bytes[34], bytes[35]]), bytes.len() - headers)
}

fn port_of(template: &Template) -> u16 {
    let mut frame = Frame::with_capacity(MAX_HEADER);
    let options = TcpOptions::default();
    let header = Header { seq: 0, ack: 0, flags: Flags::ACK, window: 0, options: &options, ecn: 0, ident: 0 };
    write(template, &header, 0, &mut frame);
    u16::from_be_bytes([frame.bytes()[34], frame.bytes()[35]])
}

/// Microseconds that are not counted, and that are.
const WARMING: u64 = 20_000;
const COUNTED: u64 = 50_000;

/// Runs so many connections, whose client's ports begin at `ports`.
pub fn run(settings: Settings, ports: u16, connections: usize) -> Outcome {
    let mut world = World::new(settings, ports, connections);
    world.run(WARMING * 1000);
    let before = world.taken;
    world.run((WARMING + COUNTED) * 1000);
    let (bytes, packets) = (world.taken.0 - before.0, world.taken.1 - before.1);
    let gigabits = bytes as f64 * 8.0 / COUNTED as f64 / 1000.0;
    Outcome { gigabits, segments: bytes as f64 / SEGMENT as f64 / packets as f64 }
}
