//! Our own code on the paper's caches, counted by callgrind: the host's half, whose TCP has some connections and whose
//! program announces what it sends to the NIC for the others; and the NIC's half, the real worker.
//!
//! The other half of each is a few instructions that answer at once, outside of what is counted.

use super::host::Tally;
use super::memory::shuffled;
use super::nic::{flow, image};
use super::numbers as n;
use super::simulated::TIMING;
use crate::bars::Bar;
use crate::callgrind;
use crate::papers::report::{Cell, Report, Row, Table};
use anyhow::{Context, Result, ensure};
use baton_abi::layout::session;
use baton_abi::{Cid, Message, Operation};
use baton_ring::{Consumer, Producer};
use baton_shm::{Region, RingWords};
use baton_sim::Rng;
use baton_tcp::segment::Segment;
use baton_tcp::{Connection, Instant, Transmit};
use baton_wire::Flags;
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

/// Packets before those that are counted, and these: a tenth of the paper's (section 5.2), as in the model.
const WARM_UP: u64 = 40_000;
const PACKETS: u64 = 20_000;
/// Figure 7's divisions: connections of the host, and of the NIC.
const DIVISIONS: [(usize, usize); 8] = [(1, 0), (0, 1), (256, 0), (0, 256), (512, 0), (256, 256), (1024, 0), (768, 256)];
/// Connections of the NIC's half.
const NIC: [usize; 4] = [1, 256, 512, 1024];

/// What a program knows of a connection on the NIC.
struct Program {
    cid: Cid,
    written: u32,
    pending: u32,
}

/// The host's half.
struct Host {
    connections: Vec<Connection>,
    programs: Vec<Program>,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
}

impl Host {
    /// The program writes a segment: the host's TCP sends it, or the NIC gets a message. Callgrind finds this function
    /// and the next two by their names.
    #[inline(never)]
    fn measured_write(&mut self, at: usize, now: Instant) -> Option<Transmit> {
        let Some(number) = at.checked_sub(self.connections.len()) else {
            let connection = &mut self.connections[at];
            connection.queue(n::SEGMENT);
            return connection.poll_transmit(now, 0);
        };
        let program = &mut self.programs[number];
        let message = Message::new(Operation::NicSend, program.cid, program.written & 0xffff, n::SEGMENT);
        program.written = program.written.wrapping_add(n::SEGMENT);
        program.pending += n::SEGMENT;
        // The NIC reads it at once.
        let _ = self.commands.push(message.to_words());
        self.commands.publish();
        None
    }

    /// An acknowledgement reaches the host's TCP.
    #[inline(never)]
    fn measured_receive(&mut self, at: usize, segment: &Segment, now: Instant) -> u32 {
        self.connections[at].input(segment, now).acked
    }

    /// The NIC's events reach the program.
    #[inline(never)]
    fn measured_events(&mut self) -> u32 {
        let mut acknowledged = 0;
        while let Some(message) = self.events.pop().and_then(Message::from_words) {
            if let Some(program) = self.programs.get_mut(message.cid.slot() as usize) {
                program.pending -= message.length;
                acknowledged += message.length;
            }
        }
        self.events.release();
        acknowledged
    }
}

/// The host's half sends segments evenly over its own connections and the NIC's, and each is acknowledged: so many
/// packets both ways.
///
/// # Errors
/// If it does not send, or its memory cannot be had.
pub fn workload(host: usize, nic: usize, packets: u64) -> Result<()> {
    let mut now = 1_000_000;
    let connection = |at: usize| Connection::from_image(&image(flow(at)), None, 64 << 10, Instant(now));
    let program = |at: usize| Program { cid: Cid::new(at as u32, 1), written: 0, pending: 0 };
    let memory = Arc::new(Region::private(session::HEAP)?);
    let mut half = Host {
        connections: (0..host).map(connection).collect(),
        programs: (0..nic).map(program).collect(),
        commands: Producer::new(memory.ring(session::COMMANDS)),
        events: Consumer::new(memory.ring(session::EVENTS)),
    };
    let (mut taken, mut given) = (Consumer::new(memory.ring(session::COMMANDS)), Producer::new(memory.ring(session::EVENTS)));
    let order = shuffled(&mut Rng::new(7), (host + nic) as u64);
    let period = (f64::from(n::SEGMENT) * 8e6 / n::RATE) as u64;
    for at in order.iter().cycle().take((packets / 2) as usize) {
        let at = *at as usize;
        now += period;
        let acknowledged = if let Some(Transmit { seq, ack, length, .. }) = half.measured_write(at, Instant(now)) {
            let answer =
                Segment { seq: ack, ack: seq.wrapping_add(length), flags: Flags::ACK, window: u16::MAX, ..Segment::default() };
            half.measured_receive(at, &answer, Instant(now + 2 * n::DELAY))
        } else {
            let message = taken.pop().and_then(Message::from_words).context("nothing was sent")?;
            taken.release();
            let _ = given.push(Message::new(Operation::OsAck, message.cid, 0, message.length).to_words());
            given.publish();
            half.measured_events()
        };
        ensure!(acknowledged == n::SEGMENT, "{acknowledged} bytes of a segment are acknowledged");
    }
    Ok(())
}

/// Callgrind's events of a profile, by name: all of what was collected.
fn events(profile: &str) -> Option<BTreeMap<String, u64>> {
    let line = |name: &str| profile.lines().find_map(|line| line.strip_prefix(name));
    let totals = line("totals: ")?.split_whitespace().map(|number| number.parse().ok()).collect::<Option<Vec<u64>>>()?;
    Some(line("events: ")?.split_whitespace().map(str::to_owned).zip(totals.into_iter().chain(std::iter::repeat(0))).collect())
}

/// What of this program, run with these arguments, happens in functions whose names contain `measured_`, on the caches
/// of Table 1.
///
/// # Errors
/// If valgrind is missing, or the program fails.
fn count(arguments: &[String]) -> Result<Tally> {
    let cache = |name: &str, of: super::cache::Geometry| format!("--{name}={},{},64", of.bytes, of.ways);
    let mut valgrind = Command::new("valgrind");
    valgrind.args([cache("I1", n::FIRST), cache("D1", n::FIRST), cache("LL", n::SECOND)]).arg("--cache-sim=yes");
    let all = events(&callgrind::profile(valgrind, "*measured_*", arguments)?).context("callgrind's output cannot be parsed")?;
    Ok(tally(&all))
}

/// Instructions, and where their data accesses were served.
fn tally(events: &BTreeMap<String, u64>) -> Tally {
    let of = |names: [&str; 2]| names.iter().filter_map(|name| events.get(*name)).sum::<u64>() as f64;
    let (accesses, misses, memory) = (of(["Dr", "Dw"]), of(["D1mr", "D1mw"]), of(["DLmr", "DLmw"]));
    Tally { instructions: of(["Ir", ""]), first: accesses - misses, second: misses - memory, memory }
}

/// The same for a packet, once the caches are warm. The arguments depend on the number of packets.
fn per_packet(arguments: impl Fn(u64) -> Vec<String>) -> Result<Tally> {
    let (cold, all) = (count(&arguments(WARM_UP))?, count(&arguments(WARM_UP + PACKETS))?);
    let each = |of: fn(&Tally) -> f64| (of(&all) - of(&cold)) / PACKETS as f64;
    Ok(Tally {
        instructions: each(|tally| tally.instructions),
        first: each(|tally| tally.first),
        second: each(|tally| tally.second),
        memory: each(|tally| tally.memory),
    })
}

fn named(command: &str, numbers: &[(&str, u64)]) -> Vec<String> {
    let options = numbers.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]);
    std::iter::once(command.to_owned()).chain(options).collect()
}

/// Counts both halves, and adds them to a report.
///
/// # Errors
/// If valgrind is missing, or a workload fails.
pub fn run(report: &mut Report) -> Result<()> {
    let host = |(host, nic): (usize, usize)| {
        let numbers = [("--host", host as u64), ("--nic", nic as u64)];
        per_packet(|packets| named("bench-host-workload", &[&numbers[..], &[("--packets", packets)]].concat()))
    };
    let nic = |connections: usize| {
        let numbers = [("--connections", connections as u64), ("--size", n::SEGMENT.into()), ("--burst", 16)];
        per_packet(|packets| named("bench-workload", &[&numbers[..], &[("--segments", packets)]].concat()))
    };
    let hosts = DIVISIONS.into_iter().map(host).collect::<Result<Vec<_>>>()?;
    let nics = NIC.into_iter().map(nic).collect::<Result<Vec<_>>>()?;
    add(report, &hosts, &nics);
    Ok(())
}

fn table(title: &str, rows: impl Iterator<Item = (String, Tally)>, note: &str) -> Table {
    let row = |(name, tally): (String, Tally)| {
        let cells = [tally.cycles(TIMING), tally.instructions, tally.accesses(), tally.second, tally.memory];
        Row { name, cells: cells.map(Cell::model).into() }
    };
    let columns = ["cycles", "instructions", "data accesses", "L2 hits", "L2 misses"].map(String::from).to_vec();
    Table { title: title.into(), columns, rows: rows.map(row).collect(), note: note.into() }
}

/// Adds what was counted: the host's half by division, the NIC's by connections.
fn add(report: &mut Report, hosts: &[Tally], nics: &[Tally]) {
    let rows = DIVISIONS.iter().zip(hosts).map(|((host, nic), tally)| (format!("OS {host}//NIC {nic}"), *tally));
    let note = "Callgrind, on Table 1's caches without prefetch; cycles by its latencies. A packet is a segment of 1460 bytes or its ACK. Our TCP \
                and our rings: no system call, no driver, no lower layers, and data is not touched.";
    report.tables.push(table("Figure 7, our code: the host's half, a packet", rows, note));
    let rows = NIC.iter().zip(nics).map(|(connections, tally)| (format!("{connections} connections"), *tally));
    let note = "The real worker receives segments of 1460 bytes, 16 at once, and acknowledges them.";
    report.tables.push(table("Figure 7, our code: the NIC's half, a segment", rows, note));
    let of = |division: (usize, usize)| {
        let at = DIVISIONS.iter().position(|one| *one == division);
        at.and_then(|at| hosts.get(at)).copied().unwrap_or_default()
    };
    let cycles = |division| of(division).cycles(TIMING);
    let gain = |without, with| 1.0 - cycles(with) / cycles(without);
    let gains = [gain((256, 0), (0, 256)), gain((512, 0), (256, 256)), gain((1024, 0), (768, 256))];
    report.bar(Bar::least("handoff.ours.rises", 1.0, cycles((1024, 0)) / cycles((1, 0))));
    report.bar(Bar::most("handoff.ours.misses_all_256", 0.5, of((0, 256)).memory));
    report.bar(Bar::least("handoff.ours.gain_256_over_512", 1.0, gains[0] / gains[1]));
    report.bar(Bar::least("handoff.ours.gain_512_over_1024", 1.0, gains[1] / gains[2]));
    report.bar(Bar::most("handoff.ours.bypass", 140.0, of((0, 256)).instructions));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_segment_of_both_kinds_of_connections_is_acknowledged() {
        for (host, nic) in [(1, 0), (0, 1), (3, 5)] {
            workload(host, nic, 400).unwrap();
        }
    }

    #[test]
    fn a_profiles_events_are_read_by_name() {
        let profile =
            "version: 1\nevents: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw\nfn=(1) f\n1 2 3\ntotals: 1000 300 200 9 40 10 1 5\n";
        let found = tally(&events(profile).unwrap());
        assert_eq!(found, Tally { instructions: 1000.0, first: 450.0, second: 45.0, memory: 5.0 });
        assert_eq!(events("events: Ir\n"), None);
    }

    #[test]
    fn what_was_counted_is_in_the_report() {
        let tally = |memory: f64| Tally { instructions: 100.0, first: 50.0, second: 1.0, memory };
        // Misses of the host's half: more with more connections, fewer with some on the NIC.
        let hosts = [0.0, 0.0, 4.0, 0.1, 6.0, 4.0, 8.0, 7.0].map(tally);
        let mut report = Report::default();
        add(&mut report, &hosts, &[0.0, 1.0, 2.0, 3.0].map(tally));
        assert_eq!(report.tables.iter().map(|table| table.rows.len()).collect::<Vec<_>>(), [8, 4]);
        assert_eq!(report.tables[0].rows[3].name, "OS 0//NIC 256");
        assert!(report.holds() && report.bars.len() == 5, "{:?}", report.bars);
    }
}
