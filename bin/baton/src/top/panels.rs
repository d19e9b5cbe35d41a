//! What `baton top` and `baton page` say of NICs and programs, from one look to the next. Without I/O.

use crate::list::row::{Rate, Row};
use baton_abi::layout::Counter;
use baton_protocol::program::{Place, Statistics};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

/// A worker of a NIC.
#[derive(Clone, Debug, PartialEq)]
pub struct Worker {
    /// NIC and worker; with several Batons also which.
    pub name: String,
    /// Share of a processor that was busy.
    pub busy: f64,
    /// Connections that it has.
    pub connections: u64,
    /// Frames from the wire per second.
    pub frames: f64,
    /// Doorbells rung per second.
    pub doorbells: f64,
}

/// A program.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Connections on the NIC, and in the kernel.
    pub connections: [usize; 2],
    /// Of all its connections.
    pub rate: Rate,
}

/// What is known of all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Panels {
    /// Batons that answer.
    pub batons: usize,
    /// Connections on NICs, and in the kernel.
    pub connections: [usize; 2],
    /// Moves made per second.
    pub moves: f64,
    /// One of them has several NICs, which are numbered.
    pub numbers: bool,
    /// Workers, NIC by NIC.
    pub workers: Vec<Worker>,
    /// Programs, those with the most bytes per second first.
    pub programs: Vec<Program>,
}

/// Counters of which rates are shown.
const COUNTERS: [Counter; 3] = [Counter::BusyNanoseconds, Counter::WireReceived, Counter::Doorbells];

/// What the last look has found.
#[derive(Default)]
pub struct Meter {
    at: u64,
    /// By Baton, NIC and worker.
    workers: HashMap<(usize, usize, usize), [u64; 3]>,
    /// Moves by Baton.
    moves: HashMap<usize, u64>,
}

impl Meter {
    /// Notes what a look at `now`, microseconds of the monotonic clock, has found: counters by Baton, and connections.
    pub fn note<'a>(&mut self, now: u64, batons: &[(usize, &Statistics)], rows: impl Iterator<Item = &'a Row>) -> Panels {
        let before = std::mem::replace(self, Meter { at: now, ..Meter::default() });
        let seconds = now.saturating_sub(before.at) as f64 / 1e6;
        let per_second = |now: u64, before: Option<u64>| match before {
            // A counter of a process that was started anew begins at 0.
            Some(before) if seconds > 0.0 => now.saturating_sub(before) as f64 / seconds,
            _ => 0.0,
        };
        let mut panels = Panels { batons: batons.len(), ..Panels::default() };
        for (at, (number, statistics)) in batons.iter().enumerate() {
            panels.numbers |= statistics.nics.len() > 1;
            self.moves.insert(*number, statistics.moves);
            panels.moves += per_second(statistics.moves, before.moves.get(number).copied());
            for (nic, of) in statistics.nics.iter().enumerate() {
                for (worker, counters) in of.workers.iter().enumerate() {
                    let count = |counter: Counter| counters.get(counter as usize).copied().unwrap_or(0);
                    let key = (*number, nic, worker);
                    let (new, old) = (COUNTERS.map(count), before.workers.get(&key));
                    self.workers.insert(key, new);
                    let rate = |at: usize| per_second(new[at], old.map(|old| old[at]));
                    let of_several = if batons.len() > 1 { format!("{at}: ") } else { String::new() };
                    let name = if of.workers.len() > 1 { format!("nic{nic}/{worker}") } else { format!("nic{nic}") };
                    panels.workers.push(Worker {
                        name: of_several + &name,
                        busy: rate(0) / 1e9,
                        connections: count(Counter::Connections),
                        frames: rate(1),
                        doorbells: rate(2),
                    });
                }
            }
        }
        count_programs(rows, &mut panels);
        panels
    }
}

/// Adds up the connections of each program.
pub fn count_programs<'a>(rows: impl Iterator<Item = &'a Row>, panels: &mut Panels) {
    let mut programs: BTreeMap<&str, Program> = BTreeMap::new();
    for row in rows {
        let side = usize::from(row.info.place == Place::Kernel);
        panels.connections[side] += 1;
        let program = programs.entry(&row.name).or_insert_with(|| Program {
            name: row.name.clone(),
            connections: [0; 2],
            rate: Rate::default(),
        });
        program.connections[side] += 1;
        let Rate { sent, received } = row.rate.unwrap_or_default();
        (program.rate.sent, program.rate.received) = (program.rate.sent + sent, program.rate.received + received);
    }
    panels.programs = programs.into_values().collect();
    panels
        .programs
        .sort_by_key(|program| (Reverse(program.rate.sum() as u64), Reverse(program.connections.iter().sum::<usize>())));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::row::tests::row;
    use baton_protocol::program::NicStatistics;

    #[test]
    fn rates_are_of_the_time_between_two_looks() {
        let counters = |busy: u64, frames: u64| {
            let mut counters = vec![0; Counter::Doorbells as usize + 1];
            (counters[Counter::BusyNanoseconds as usize], counters[Counter::WireReceived as usize]) = (busy, frames);
            counters
        };
        let statistics = |moves, busy, frames| {
            let nic = NicStatistics { workers: vec![counters(busy, frames)], ..NicStatistics::default() };
            Statistics { moves, nics: vec![nic], ..Statistics::default() }
        };
        let (mut meter, rows) = (Meter::default(), [row("10.0.0.1:1", "10.0.0.2:2"), row("10.0.0.1:1", "10.0.0.2:3")]);
        let first = meter.note(1_000_000, &[(4, &statistics(100, 7, 50))], rows.iter());
        assert_eq!((first.moves, first.workers[0].busy, first.connections), (0.0, 0.0, [0, 2]));
        let second = meter.note(3_000_000, &[(4, &statistics(120, 1_000_000_007, 250))], rows.iter());
        let worker = Worker { name: "nic0".into(), busy: 0.5, connections: 0, frames: 100.0, doorbells: 0.0 };
        assert_eq!((second.moves, second.workers), (10.0, vec![worker]));
        assert_eq!(second.programs, [Program { name: "server".into(), connections: [0, 2], rate: Rate::default() }]);
        let restarted = meter.note(4_000_000, &[(4, &statistics(0, 0, 0))], rows.iter());
        assert_eq!((restarted.moves, restarted.workers[0].busy), (0.0, 0.0));
    }
}
