//! Two machines, the cable between them, and the order of what happens.

use super::hardware::Hardware;
use super::machine::{Happening, Machine, Outcome};
use baton_rmpp::{Halves, Outgoing, PeerId, Region, Request};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::HashMap;

/// A moment in nanoseconds, and the order of what happens at the same moment.
type Moment = (u64, u64);

/// The experiment's two machines.
pub struct Cable {
    /// Ping and pong.
    pub machines: [Machine; 2],
    /// The time in microseconds.
    pub now: f64,
    hardware: Hardware,
    peers: [PeerId; 2],
    /// When the wire from each machine is free.
    wire: [f64; 2],
    order: BinaryHeap<Reverse<Moment>>,
    happenings: HashMap<Moment, (usize, Happening)>,
    count: u64,
}

impl Cable {
    /// Two machines with these halves on their NICs, and RSMs sent `early` packets early.
    pub fn new(hardware: Hardware, on_nic: Halves, early: u8) -> Cable {
        let mut machines = [0, 1].map(|number| Machine::new(number, hardware, on_nic, early));
        let peers = [0, 1].map(|at: usize| {
            let address = machines[at].peer();
            machines[at].policy.open(address, 1 - at as u16).expect("there is room for one peer")
        });
        let mut cable = Cable {
            machines,
            now: 0.0,
            hardware,
            peers,
            wire: [0.0; 2],
            order: BinaryHeap::new(),
            happenings: HashMap::default(),
            count: 0,
        };
        for at in 0..2 {
            cable.proceed(at);
        }
        cable
    }

    /// Machine `at` sends `length` bytes.
    pub fn send(&mut self, at: usize, length: u64) {
        let region = Region { offset: 0, length };
        let outgoing = Outgoing { peer: self.peers[at], context: 0, tag: 0, data: 0, region, token: 0 };
        let now = self.now as u64;
        self.machines[at].policy.send(outgoing, now).expect("the program sends one message at a time");
        self.proceed(at);
    }

    /// Machine `at` posts a receive of `length` bytes.
    pub fn receive(&mut self, at: usize, length: u64) {
        let region = Region { offset: length, length };
        let request = Request { source: Some(self.peers[at]), context: 0, tag: 0, ignore: 0, region, token: 0 };
        let now = self.now as u64;
        let machine = &mut self.machines[at];
        machine.policy.post(request, now, &mut machine.memory[..]).expect("the program posts one receive at a time");
        self.proceed(at);
    }

    /// Lets machine `at` know the time at `when`.
    pub fn wake(&mut self, at: usize, when: f64) {
        self.enter(at, when, Happening::Program);
    }

    fn enter(&mut self, at: usize, when: f64, happening: Happening) {
        self.count += 1;
        let moment = ((when.max(self.now) * 1000.0).round() as u64, self.count);
        self.order.push(Reverse(moment));
        self.happenings.insert(moment, (at, happening));
    }

    fn proceed(&mut self, at: usize) {
        let mut outcomes = Vec::new();
        self.machines[at].start(self.now, &mut outcomes);
        self.take(at, outcomes);
    }

    fn take(&mut self, at: usize, outcomes: Vec<Outcome>) {
        for outcome in outcomes {
            match outcome {
                Outcome::Later(when, happening) => self.enter(at, when, happening),
                Outcome::Wire(when, frame) => {
                    self.wire[at] = self.wire[at].max(when) + self.hardware.wire(frame.len());
                    self.enter(1 - at, self.wire[at], Happening::Arrival(frame));
                }
            }
        }
    }

    /// Lets the next thing happen. The machine at which it happened.
    pub fn step(&mut self) -> usize {
        let Reverse(moment) = self.order.pop().expect("a machine with messages has something to do");
        let (at, happening) = self.happenings.remove(&moment).expect("what is in the order happens");
        self.now = moment.0 as f64 / 1000.0;
        let mut outcomes = Vec::new();
        self.machines[at].happen(happening, self.now, &mut outcomes);
        self.take(at, outcomes);
        at
    }
}
