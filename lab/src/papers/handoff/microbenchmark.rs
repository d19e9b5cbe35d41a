//! The paper's microbenchmark: a program that sends messages of 1460 bytes evenly across connections, some of them in
//! the operating system and some on NICs (sections 2 and 5.1).

use super::agenda::Agenda;
use super::host::{Data, Faults, Host, Layer, Profile, Timer, Timing};
use super::memory::shuffled;
use super::nic::{Counts, Messages, Nic, answer, flow, image};
use super::numbers as n;
use anyhow::Result;
use baton_sim::Rng;
use baton_sim::pair::arriving;
use baton_tcp::segment::Segment;
use baton_tcp::{Connection, Instant};
use std::collections::VecDeque;

/// One run.
#[derive(Clone, Debug)]
pub struct Load {
    /// Connections that the operating system handles.
    pub os: usize,
    /// Connections of each NIC.
    pub nics: Vec<usize>,
    /// Whether data is touched.
    pub data: Data,
    /// Microseconds that dummynet adds to a round trip.
    pub latency: u64,
    /// Whether the program keeps to 100 Mb/s, or writes to the NICs' connections whenever there is room.
    pub paced: bool,
    /// Messages to the NICs.
    pub messages: Messages,
    /// What is wrong on purpose.
    pub faults: Faults,
}

impl Load {
    /// Connections of the operating system alone, as in configuration C or D.
    pub fn os(connections: usize, faults: Faults) -> Load {
        let messages = Messages::Each;
        Load { os: connections, nics: Vec::new(), data: Data::UNTOUCHED, latency: 0, paced: true, messages, faults }
    }

    /// Connections of the operating system, and of NICs.
    pub fn shared(os: usize, nics: &[usize], faults: Faults) -> Load {
        Load { nics: nics.to_vec(), ..Load::os(os, faults) }
    }
}

/// What a run gives, for each packet that was sent or received.
#[derive(Clone, Debug)]
pub struct Measured {
    /// What the host's layers did.
    pub profile: Profile,
    /// Transmit and receive descriptors.
    pub descriptors: [f64; 2],
    /// Messages by kind.
    pub messages: Vec<(&'static str, f64)>,
    /// Megabits of data a second.
    pub rate: f64,
}

/// Packets before the profile is taken, and those that it is taken of: a tenth of the paper's (section 5.2).
const WARM_UP: u64 = 40_000;
const PACKETS: u64 = 20_000;

/// What happens at a time.
enum Happening {
    /// The program writes to the next connection.
    Write,
    /// A segment reaches the connection's peer.
    AtPeer(usize, Segment),
    /// A segment reaches the machine.
    AtMachine(usize, Segment),
    /// A NIC's processor is free.
    Nic(usize),
    /// A timer of a connection may have expired.
    Timer(usize),
}

/// A connection of the operating system and its peer.
struct Pair {
    machine: Connection,
    peer: Connection,
}

struct World<'a> {
    load: &'a Load,
    host: Host,
    pairs: Vec<Pair>,
    nics: Vec<Nic>,
    /// A NIC will be asked again.
    awake: Vec<bool>,
    /// Connections of NICs that may have room, and whether a connection is among them.
    queue: VecDeque<usize>,
    ready: Vec<bool>,
    agenda: Agenda<Happening>,
    now: u64,
    packets: u64,
    sent_bytes: u64,
    descriptors: [u64; 2],
}

impl World<'_> {
    /// The NIC of a connection, and its number there. Those of the operating system come first.
    fn place(&self, connection: usize) -> Option<(usize, usize)> {
        let mut number = connection.checked_sub(self.load.os)?;
        for (nic, connections) in self.load.nics.iter().enumerate() {
            if number < *connections {
                return Some((nic, number));
            }
            number -= connections;
        }
        None
    }

    fn connection(&self, nic: usize, number: usize) -> usize {
        self.load.os + self.load.nics[..nic].iter().sum::<usize>() + number
    }

    fn write(&mut self, connection: usize) {
        self.host.write(connection, n::SEGMENT.into(), self.load.data);
        self.sent_bytes += u64::from(n::SEGMENT);
        if let Some((nic, number)) = self.place(connection) {
            for _ in 0..self.nics[nic].write(number, n::SEGMENT) {
                self.host.command(connection);
            }
            self.wake(nic);
        } else {
            let before = self.pairs[connection].machine.next_timeout();
            self.pairs[connection].machine.queue(n::SEGMENT);
            self.transmit(connection, before);
        }
    }

    fn wake(&mut self, nic: usize) {
        if !std::mem::replace(&mut self.awake[nic], true) {
            self.agenda.enter(self.now.max(self.nics[nic].busy), Happening::Nic(nic));
        }
    }

    /// Sends what a connection of the operating system has to send, and follows its timer, which expired at `before`.
    fn transmit(&mut self, connection: usize, before: Instant) {
        while let Some(transmit) = self.pairs[connection].machine.poll_transmit(Instant(self.now), 0) {
            let segment = arriving(&transmit);
            self.host.send_segment(connection, segment.length.into(), self.load.data);
            self.descriptors[0] += 1 + u64::from(segment.length > 0);
            self.packets += 1;
            self.agenda.enter(self.now + n::DELAY, Happening::AtPeer(connection, segment));
        }
        let after = self.pairs[connection].machine.next_timeout();
        if after != before {
            let expires = (after != Instant::NEVER).then_some(after.0);
            self.host.set_timer(connection, Timer::Retransmit, expires, self.now);
            if let Some(expires) = expires {
                self.agenda.enter(expires, Happening::Timer(connection));
            }
        }
    }

    /// A segment reaches the operating system.
    fn receive(&mut self, connection: usize, segment: &Segment) {
        self.packets += 1;
        self.descriptors[1] += 1;
        let machine = &mut self.pairs[connection].machine;
        let before = machine.next_timeout();
        let received = machine.input(segment, Instant(self.now));
        self.host.receive_segment(connection, segment.length.into(), self.load.data, self.now);
        self.host.release(Layer::Tcp, connection, received.acked.into());
        self.transmit(connection, before);
    }

    /// A NIC's processor is free.
    fn run_nic(&mut self, nic: usize) {
        self.awake[nic] = false;
        let (mut out, mut events) = (Vec::new(), Vec::new());
        let before = self.nics[nic].segments;
        let worked = self.nics[nic].poll(self.now, &mut out, &mut events);
        let after = self.nics[nic].segments;
        self.packets += after[0] + after[1] - before[0] - before[1];
        for (number, segment) in out {
            let connection = self.connection(nic, number);
            self.agenda.enter(self.nics[nic].busy + n::DELAY, Happening::AtPeer(connection, segment));
        }
        for (number, bytes) in events {
            let connection = self.connection(nic, number);
            self.host.event(connection);
            self.host.release(Layer::Bypass, connection, bytes.into());
            if !self.load.paced && !self.ready[connection] {
                self.ready[connection] = true;
                self.queue.push_back(connection);
            }
        }
        self.fill();
        if worked {
            self.wake(nic);
        }
    }

    /// The program writes to the connections of NICs that have reported acknowledged data to it, in their order, as
    /// long as there is room.
    fn fill(&mut self) {
        while let Some(connection) = self.queue.front().copied() {
            let Some((nic, number)) = self.place(connection) else { return };
            let mut writable = self.nics[nic].accepts(number, n::LOW_WATER);
            if !writable && self.nics[nic].accepts(number, 0) {
                // Its next acknowledgement brings it back.
                self.queue.pop_front();
                self.ready[connection] = false;
                continue;
            }
            while std::mem::take(&mut writable) {
                self.write(connection);
                writable = self.nics[nic].accepts(number, n::SEGMENT);
            }
            if !self.nics[nic].accepts(number, 0) {
                // The ring is full: the NIC's next round makes room.
                return;
            }
            self.queue.pop_front();
            self.ready[connection] = false;
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Write => {}
            Happening::AtPeer(connection, segment) => {
                let answers = match self.place(connection) {
                    Some((nic, number)) => self.nics[nic].answer(number, &segment, self.now),
                    None => answer(&mut self.pairs[connection].peer, &segment, self.now),
                };
                for segment in answers {
                    let time = self.now + n::DELAY + self.load.latency;
                    self.agenda.enter(time, Happening::AtMachine(connection, segment));
                }
            }
            Happening::AtMachine(connection, segment) => match self.place(connection) {
                Some((nic, number)) => {
                    self.nics[nic].deliver(number, &segment);
                    self.wake(nic);
                }
                None => self.receive(connection, &segment),
            },
            Happening::Nic(nic) => self.run_nic(nic),
            Happening::Timer(connection) => {
                let machine = &mut self.pairs[connection].machine;
                let before = machine.next_timeout();
                if before.0 <= self.now {
                    machine.on_timeout(Instant(self.now));
                    self.transmit(connection, before);
                }
            }
        }
    }
}

/// What had been counted when the warm-up was over.
#[derive(Default)]
struct Counters {
    packets: u64,
    bytes: u64,
    time: u64,
    descriptors: [u64; 2],
    counts: Vec<Counts>,
}

/// Runs a load.
///
/// # Errors
/// If a NIC refuses a connection.
pub fn run(load: &Load) -> Result<Measured> {
    let start = 1_000_000;
    let connections = load.os + load.nics.iter().sum::<usize>();
    let pair = |at: usize| {
        let machine = Connection::from_image(&image(flow(at)), None, 64 << 10, Instant(start));
        let mut peer = Connection::from_image(&image(flow(at).reversed()), None, 64 << 10, Instant(start));
        peer.set_quick_ack(true);
        Pair { machine, peer }
    };
    let nics = load.nics.iter().map(|count| Nic::new(*count, load.messages, start)).collect::<Result<Vec<_>>>()?;
    let mut world = World {
        load,
        host: Host::new(connections, load.faults),
        pairs: (0..load.os).map(pair).collect(),
        awake: vec![false; nics.len()],
        nics,
        queue: VecDeque::new(),
        ready: vec![false; connections],
        agenda: Agenda::default(),
        now: start,
        packets: 0,
        sent_bytes: 0,
        descriptors: [0; 2],
    };
    let order = shuffled(&mut Rng::new(7), connections as u64);
    let period = f64::from(n::SEGMENT) * 8e6 / n::RATE;
    let mut written = 0u64;
    if load.paced {
        world.agenda.enter(start, Happening::Write);
    } else {
        world.ready.fill(true);
        world.queue.extend(order.iter().map(|connection| *connection as usize));
        world.fill();
    }
    let mut begun = Counters::default();
    let (mut end, mut measured) = (load.faults.of(WARM_UP), false);
    while world.packets < end {
        let Some((now, happening)) = world.agenda.next() else { break };
        world.now = now;
        if matches!(happening, Happening::Write) {
            world.write(order[(written % order.len() as u64) as usize] as usize);
            written += 1;
            world.agenda.enter(start + (written as f64 * period) as u64, Happening::Write);
        } else {
            world.happen(happening);
        }
        if world.packets >= end && !measured {
            measured = true;
            end = world.packets + load.faults.of(PACKETS);
            world.host.take_profile();
            let counts = world.nics.iter().map(|nic| nic.counts.clone()).collect();
            let (packets, bytes, time, descriptors) = (world.packets, world.sent_bytes, world.now, world.descriptors);
            begun = Counters { packets, bytes, time, descriptors, counts };
        }
    }
    let Counters { packets, bytes, time, descriptors, counts } = begun;
    let count = (world.packets - packets) as f64;
    let mut messages = Counts::new();
    for (nic, before) in world.nics.iter().zip(&counts) {
        for (name, number) in &nic.counts {
            *messages.entry(name).or_default() += number - before.get(name).copied().unwrap_or(0);
        }
    }
    Ok(Measured {
        profile: world.host.take_profile().per(count),
        descriptors: [0, 1].map(|at| (world.descriptors[at] - descriptors[at]) as f64 / count),
        messages: messages
            .into_iter()
            .filter(|(_, number)| *number > 0)
            .map(|(name, number)| (name, number as f64 / count))
            .collect(),
        rate: (world.sent_bytes - bytes) as f64 * 8.0 / (world.now - time) as f64,
    })
}

/// Cycles of an instruction on the prototype, calibrated at the 4295 cycles of configuration C. The first level's
/// latency is hidden behind other instructions.
pub fn calibrate(configuration_c: &Measured) -> Timing {
    let total = configuration_c.profile.total();
    let stalls = total.cycles(Timing { instruction: 0.0, first: 0.0 });
    Timing { instruction: (C_CYCLES - stalls) / total.instructions, first: 0.0 }
}

/// Cycles of a packet in configuration C (section 1).
pub const C_CYCLES: f64 = 4295.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_of_configuration_c_has_the_papers_instructions_and_descriptors() {
        let measured = run(&Load::os(1, Faults::default())).unwrap();
        let total = measured.profile.total();
        assert!((total.instructions - n::PACKET as f64).abs() < 1.0, "{total:?}");
        assert!((total.accesses() - 2300.0).abs() < 1.0, "{total:?}");
        assert!((measured.descriptors[0] - 1.0).abs() < 0.01 && (measured.descriptors[1] - 0.5).abs() < 0.01);
        assert!((measured.rate - 100.0).abs() < 0.5, "{}", measured.rate);
        assert!((total.cycles(calibrate(&measured)) - C_CYCLES).abs() < 1e-6);
    }

    /// A NIC that is asked for more than it can sends what it is calibrated at, and reports all of it.
    #[test]
    fn a_saturated_nic_sends_at_its_rate() {
        let load = Load { paced: false, ..Load::shared(0, &[64], Faults::default()) };
        let measured = run(&load).unwrap();
        assert!((measured.rate - 110.0).abs() < 5.0, "{}", measured.rate);
        let number = |kind: &str| measured.messages.iter().find(|(name, _)| *name == kind).map_or(0.0, |one| one.1);
        assert!((number("ch_nic_send") - 0.5).abs() < 0.05 && number("ch_os_ack") < 0.5, "{:?}", measured.messages);
    }

    /// At the microbenchmark's rate a message for each write, and one for each page that is acknowledged.
    #[test]
    fn acknowledged_data_is_reported_by_pages() {
        let measured = run(&Load::shared(0, &[64], Faults::default())).unwrap();
        let number = |kind: &str| measured.messages.iter().find(|(name, _)| *name == kind).map_or(0.0, |one| one.1);
        let pages = 0.5 * f64::from(n::SEGMENT) / n::PAGE as f64;
        assert!((number("ch_os_ack") / pages - 1.0).abs() < 0.05, "{:?}", measured.messages);
        assert!((number("ch_nic_send") - 0.5).abs() < 0.05 && (measured.rate - 100.0).abs() < 0.5, "{:?}", measured.messages);
    }

    #[test]
    fn larger_state_and_a_lookup_that_misses_cost_accesses() {
        let total = |faults| run(&Load::os(1024, faults)).unwrap().profile.total();
        let none = Faults::default();
        let whole = total(none);
        assert!(total(Faults { large_state: true, ..none }).memory > 1.2 * whole.memory);
        // What the lookup passes by are the first lines of other connections, most of which the second level holds.
        let served = |total: super::super::host::Tally| total.second + total.memory;
        assert!(served(total(Faults { lookup_misses: true, ..none })) > 1.5 * served(whole));
    }
}
