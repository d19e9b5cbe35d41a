//! Section V.B: 64 connections are set up while those that are established already keep the copy engine busy. Virtual
//! time in microseconds.

use super::requests::{Order, Requests};
use baton_copy::Kind;
use std::collections::BTreeMap;

/// Connections, as in Figure 13.
pub const CONNECTIONS: usize = 64;
/// Largest number of segments in flight: a window of 64 KB.
const WINDOW: u32 = 45;
/// How long a client tries: SYNs at 0, 1 and 3 s.
pub const PATIENCE: u64 = 4_000_000;

/// Numbers of the model.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Receiving threads, each with a queue.
    pub workers: usize,
    /// A transfer to the host, and the further microseconds of a byte.
    pub copy: (f64, f64),
    /// A round trip without queues.
    pub round_trip: u64,
    /// A SYN is sent again after this time, then after twice as long.
    pub timeout: u64,
}

#[derive(Clone, Copy)]
struct Frame {
    connection: usize,
    sets_up: bool,
}

impl Frame {
    fn bytes(self) -> usize {
        if self.sets_up { 74 } else { 1514 }
    }

    fn kind(self) -> Kind {
        Kind { sets_up: self.sets_up, connection: self.connection as u32 + 1 }
    }
}

enum Event {
    Arrives(Frame),
    Copied(Frame),
    TimesOut(usize, u64),
}

struct World {
    settings: Settings,
    requests: Requests<Frame>,
    events: BTreeMap<(u64, u64), Event>,
    entered: u64,
    now: u64,
    busy: bool,
    established: Vec<Option<u64>>,
    window: Vec<u32>,
}

impl World {
    fn after(&mut self, micros: u64, event: Event) {
        self.entered += 1;
        self.events.insert((self.now + micros, self.entered), event);
    }

    fn send(&mut self, connection: usize, segments: u32) {
        for _ in 0..segments {
            self.after(self.settings.round_trip / 2, Event::Arrives(Frame { connection, sets_up: false }));
        }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Arrives(frame) => {
                let worker = frame.connection % self.settings.workers;
                if self.requests.push(worker, frame, frame.bytes(), frame.kind()).is_err() && !frame.sets_up {
                    // The sender finds the loss after a while and sends again.
                    self.window[frame.connection] = (self.window[frame.connection] / 2).max(2);
                    self.after(200_000, Event::Arrives(frame));
                }
            }
            Event::Copied(frame) => {
                self.busy = false;
                let at = frame.connection;
                if frame.sets_up && self.established[at].is_none() {
                    self.established[at] = Some(self.now);
                    self.send(at, self.window[at]);
                } else if !frame.sets_up {
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
        if !self.busy
            && let Some(frame) = self.requests.pop()
        {
            self.busy = true;
            let (each, byte) = self.settings.copy;
            self.after((each + byte * frame.bytes() as f64) as u64, Event::Copied(frame));
        }
    }
}

/// When each connection's SYN has reached the host, in microseconds and in this order; None for one that never did.
pub fn run(settings: Settings, order: Order) -> Vec<Option<u64>> {
    let mut world = World {
        settings,
        requests: Requests::new(order, settings.workers),
        events: BTreeMap::new(),
        entered: 0,
        now: 0,
        busy: false,
        established: vec![None; CONNECTIONS],
        window: vec![10; CONNECTIONS],
    };
    for connection in 0..CONNECTIONS {
        // A client needs some microseconds for each.
        world.after(5 * connection as u64, Event::Arrives(Frame { connection, sets_up: true }));
        world.after(5 * connection as u64 + settings.timeout, Event::TimesOut(connection, settings.timeout));
    }
    while let Some((&key, _)) = world.events.first_key_value().filter(|(key, _)| key.0 <= PATIENCE)
        && world.established.contains(&None)
    {
        world.now = key.0;
        if let Some(event) = world.events.remove(&key) {
            world.step(event);
        }
    }
    let mut all = world.established;
    all.sort_by_key(|established| established.unwrap_or(u64::MAX));
    all
}
