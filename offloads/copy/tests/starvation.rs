//! The paper's test: clients set up many connections at once, and send as soon as each is established, through an
//! engine that is the bottleneck. With requests in a stack a few connections run and the others time out; with queues
//! in turn all are established at once.
//!
//! A model in virtual time. Engine and hosts take microseconds. A sender's window grows by one segment for each segment
//! that arrives, and an unanswered SYN is sent again after the time-out of RFC 6298.

use baton_copy::{CopySettings, Engine, Kind};
use std::collections::BTreeMap;

const WORKERS: usize = 13;
const CONNECTIONS: usize = 64;
/// Microseconds of a round trip without queues; microseconds of a copy, and bytes copied per further microsecond.
const ROUND_TRIP: u64 = 100;
const EACH: u64 = 10;
const BYTES_A_MICRO: usize = 600;
const SEGMENT: usize = 1514;
const SYN: usize = 74;
/// Largest number of segments in flight: the 64 KB of a window without scale.
const WINDOW: u32 = 45;
/// Time-out of a SYN, doubled each time; and the time after which a client gives up (as the paper's clients did;
/// Linux's do after seven SYNs).
const TIMEOUT: u64 = 1_000_000;
const PATIENCE: u64 = 10_000_000;
/// Number of requests that the engine holds.
const ROOM: usize = 4096;

#[derive(Clone, Copy)]
struct Frame {
    connection: usize,
    sets_up: bool,
}

impl Frame {
    fn bytes(self) -> usize {
        if self.sets_up { SYN } else { SEGMENT }
    }
}

/// Takes the workers' frames. `push` returns false if the frame found no room and is lost.
trait Order {
    fn push(&mut self, worker: usize, frame: Frame) -> bool;
    fn pop(&mut self) -> Option<Frame>;
}

/// The paper's first: last in, first out.
struct Stack(Vec<Frame>);

impl Order for Stack {
    fn push(&mut self, _: usize, frame: Frame) -> bool {
        let room = self.0.len() < ROOM;
        if room {
            self.0.push(frame);
        }
        room
    }

    fn pop(&mut self) -> Option<Frame> {
        self.0.pop()
    }
}

impl Order for Engine<Frame> {
    fn push(&mut self, worker: usize, frame: Frame) -> bool {
        let kind = Kind { sets_up: frame.sets_up, connection: frame.connection as u32 + 1 };
        Engine::push(self, worker, frame, frame.bytes(), kind).is_ok()
    }

    fn pop(&mut self) -> Option<Frame> {
        Engine::pop(self).map(|(_, frame)| frame)
    }
}

enum Event {
    Arrives(Frame),
    Copied(Frame),
    TimesOut(usize, u64),
}

struct Model<O> {
    order: O,
    events: BTreeMap<(u64, u64), Event>,
    entered: u64,
    now: u64,
    busy: bool,
    /// When each connection was established, and its window in segments.
    established: Vec<Option<u64>>,
    window: Vec<u32>,
    delivered: Vec<u64>,
}

impl<O: Order> Model<O> {
    fn new(order: O) -> Model<O> {
        let mut model = Model {
            order,
            events: BTreeMap::new(),
            entered: 0,
            now: 0,
            busy: false,
            established: vec![None; CONNECTIONS],
            window: vec![10; CONNECTIONS],
            delivered: vec![0; CONNECTIONS],
        };
        for connection in 0..CONNECTIONS {
            // Not all at once: a client needs some microseconds for each.
            model.after(5 * connection as u64, Event::Arrives(Frame { connection, sets_up: true }));
            model.after(5 * connection as u64 + TIMEOUT, Event::TimesOut(connection, TIMEOUT));
        }
        model
    }

    fn after(&mut self, micros: u64, event: Event) {
        self.entered += 1;
        self.events.insert((self.now + micros, self.entered), event);
    }

    fn send(&mut self, connection: usize, segments: u32) {
        for _ in 0..segments {
            self.after(ROUND_TRIP / 2, Event::Arrives(Frame { connection, sets_up: false }));
        }
    }

    fn start_copy(&mut self) {
        if !self.busy
            && let Some(frame) = self.order.pop()
        {
            self.busy = true;
            self.after(EACH + (frame.bytes() / BYTES_A_MICRO) as u64, Event::Copied(frame));
        }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Arrives(frame) => {
                if !self.order.push(frame.connection % WORKERS, frame) && !frame.sets_up {
                    // The sender finds the loss after a while, halves its window and sends again.
                    self.window[frame.connection] = (self.window[frame.connection] / 2).max(2);
                    self.after(200_000, Event::Arrives(frame));
                }
            }
            Event::Copied(frame) => {
                self.busy = false;
                let at = frame.connection;
                if frame.sets_up {
                    if self.established[at].is_none() {
                        self.established[at] = Some(self.now);
                        let window = self.window[at];
                        self.send(at, window);
                    }
                } else {
                    self.delivered[at] += 1;
                    let grows = u32::from(self.window[at] < WINDOW);
                    self.window[at] += grows;
                    self.send(at, 1 + grows);
                }
            }
            Event::TimesOut(connection, timeout) => {
                if self.established[connection].is_none() {
                    self.step(Event::Arrives(Frame { connection, sets_up: true }));
                    self.after(2 * timeout, Event::TimesOut(connection, 2 * timeout));
                }
            }
        }
        self.start_copy();
    }

    fn run(mut self) -> Model<O> {
        while let Some((&(at, number), _)) = self.events.first_key_value().filter(|(key, _)| key.0 <= PATIENCE) {
            self.now = at;
            if let Some(event) = self.events.remove(&(at, number)) {
                self.step(event);
            }
        }
        self
    }

    /// Number of connections that were never established, and of those established only after a SYN was sent again.
    fn starved(&self) -> (usize, usize) {
        let never = self.established.iter().filter(|established| established.is_none()).count();
        (never, self.established.iter().flatten().filter(|established| **established >= TIMEOUT).count())
    }
}

#[test]
fn a_stack_starves_new_connections_and_the_engine_does_not() {
    let stack = Model::new(Stack(Vec::with_capacity(ROOM))).run();
    let (never, late) = stack.starved();
    let idle = stack.delivered.iter().filter(|delivered| **delivered < 1000).count();
    println!("stack: {never} of {CONNECTIONS} never established, {late} not before a SYN was sent again, {idle} hardly sent");

    let engine = Model::new(Engine::new(WORKERS, CopySettings { room: ROOM / WORKERS, ..CopySettings::default() })).run();
    let slowest = engine.established.iter().flatten().max().copied().unwrap_or(0);
    let (least, most) = (engine.delivered.iter().min().unwrap(), engine.delivered.iter().max().unwrap());
    println!("engine: {:?} so, the last established after {slowest} µs, {least} to {most} segments each", engine.starved());

    assert!(never + late > CONNECTIONS / 2 && idle > CONNECTIONS / 2);
    assert_eq!(engine.starved(), (0, 0));
    assert!(slowest < 2000, "{slowest} µs");
    assert!(*least * 3 > *most * 2, "{least} to {most} segments");
}
