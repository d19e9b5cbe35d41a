//! A web server on this machine, some of whose connections are on NICs: what a request costs whom, and which messages
//! cross between host and NIC (Figures 7 and 8). The NICs are beside the kernel.

use crate::bars::Bar;
use crate::papers::Run;
use crate::papers::report::{Cell, Report, Row, Table};
use crate::web_load::{self, Keep, Progress, Url, WebLoad, files as file_set};
use anyhow::{Context, Result, anyhow, ensure};
use baton_abi::layout::Counter;
use baton_bed::server::{Files, Program, Server};
use baton_bed::statistics::quantile;
use baton_bed::testbed::{self, Hosts, Testbed, TestbedSettings, address_a};
use baton_client::tool::Tool;
use baton_linux::events::{monotonic_micros, process_nanos};
use baton_linux::process;
use baton_offloads::{Limits, Offloads, WhenFull};
use baton_protocol::program::{Ask, Place, Reply};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The server's port.
const PORT: u16 = 8094;
/// Clients, each with one connection, as in Figure 7's SPECweb99.
const CONNECTIONS: usize = 64;
/// Directories of the file set: 51 MB.
const DIRECTORIES: usize = 10;
/// Rounds of each division of the connections, in turn, and seconds of each that are measured; in a short run one, and
/// so many.
const ROUNDS: usize = 3;
const SECONDS: f64 = 4.0;
const SHORT: f64 = 0.5;
/// Seconds before a measurement; after which no further connection is expected on a NIC; and of a load at most.
const WARMING: f64 = 0.5;
const PLACING: f64 = 15.0;
const LONGEST: f64 = 60.0;

/// Where the connections are.
struct Division {
    name: &'static str,
    /// Connections that each NIC has room for. Without one there is no Baton either.
    nics: &'static [u32],
}

const NONE: usize = 0;
const PART: usize = 1;
const ALL: usize = 2;
const DIVISIONS: [Division; 4] = [
    Division { name: "OS 64//NIC 0", nics: &[] },
    Division { name: "OS 48//NIC 16", nics: &[16] },
    Division { name: "OS 0//NIC 64", nics: &[64] },
    Division { name: "OS 0//NIC1 32//NIC2 32", nics: &[32, 32] },
];

/// Messages of transfers, by kind; then the others.
const TRANSFERS: usize = 5;
const KINDS: [(&str, Counter); 10] = [
    ("nic_send", Counter::ProgramSend),
    ("nic_recvd", Counter::ProgramRecvd),
    ("nic_post", Counter::ProgramPost),
    ("os_recv", Counter::ToProgramRecv),
    ("os_ack", Counter::ToProgramAck),
    ("nic_ctrl, program", Counter::ProgramControl),
    ("os_ctrl, program", Counter::ToProgramControl),
    ("nic_handoff", Counter::AgentHandoff),
    ("nic_ctrl, agent", Counter::AgentControl),
    ("os_ctrl, agent", Counter::ToAgentControl),
];

/// A round's figures. Times are CPU microseconds of a request.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    on_nics: f64,
    rate: f64,
    server: f64,
    nics: f64,
    /// The client, the agent, and the kernel's threads for frames.
    others: f64,
    /// Messages of a request, by kind.
    messages: [f64; KINDS.len()],
}

impl Round {
    fn machine(&self) -> f64 {
        self.server + self.nics + self.others
    }

    fn transfers(&self) -> f64 {
        self.messages[..TRANSFERS].iter().sum()
    }

    /// The median of each figure.
    fn medians(rounds: &[Round]) -> Round {
        let median = |figure: &dyn Fn(&Round) -> f64| quantile(&mut rounds.iter().map(figure).collect::<Vec<_>>(), 0.5);
        Round {
            on_nics: median(&|round| round.on_nics),
            rate: median(&|round| round.rate),
            server: median(&|round| round.server),
            nics: median(&|round| round.nics),
            others: median(&|round| round.others),
            messages: std::array::from_fn(|kind| median(&|round| round.messages[kind])),
        }
    }
}

/// CPU times in nanoseconds, and what was counted, at a moment.
struct Snapshot {
    micros: u64,
    requests: u64,
    server: u64,
    nics: u64,
    others: u64,
    messages: [u64; KINDS.len()],
}

/// What happened between two moments.
fn between(before: &Snapshot, after: &Snapshot, on_nics: usize) -> Result<Round> {
    ensure!(after.requests > before.requests, "the server answered nothing");
    let requests = (after.requests - before.requests) as f64;
    // An agent or a NIC may have been replaced meanwhile.
    let each = |of: fn(&Snapshot) -> u64| of(after).saturating_sub(of(before)) as f64 / requests / 1e3;
    Ok(Round {
        on_nics: on_nics as f64,
        rate: requests * 1e6 / (after.micros - before.micros) as f64,
        server: each(|one| one.server),
        nics: each(|one| one.nics),
        others: each(|one| one.others),
        messages: std::array::from_fn(|kind| (after.messages[kind] - before.messages[kind]) as f64 / requests),
    })
}

/// Whose CPU time counts, beside that of the clients, which is this process's.
struct Parties {
    server: Server,
    tool: Option<Tool>,
}

impl Parties {
    /// Waits until the connections are where they are to be, and measures a stretch of the load.
    fn measure(&mut self, division: &Division, progress: &Progress, seconds: f64) -> Result<Round> {
        let deadline = monotonic_micros() + (PLACING * 1e6) as u64;
        while progress.requests.load(Ordering::Relaxed) == 0 {
            ensure!(monotonic_micros() < deadline, "the server has answered nothing in {PLACING} s");
            std::thread::sleep(Duration::from_millis(10));
        }
        let on_nics = match &mut self.tool {
            Some(tool) => place(tool, division.nics)?,
            None => 0,
        };
        std::thread::sleep(Duration::from_secs_f64(WARMING));
        let mut kernel = process::KernelThreads::new();
        let before = self.snapshot(progress, &mut kernel)?;
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let after = self.snapshot(progress, &mut kernel)?;
        between(&before, &after, on_nics)
    }

    fn snapshot(&mut self, progress: &Progress, kernel: &mut process::KernelThreads) -> Result<Snapshot> {
        let statistics = self.tool.as_mut().map(Tool::statistics).transpose()?.unwrap_or_default();
        let cpu = |process: u32| process::cpu_nanos(process).unwrap_or(0);
        let agent = if self.tool.is_some() { cpu(statistics.agent_process) } else { 0 };
        let count = |counter: Counter| statistics.counters.get(counter as usize).copied().unwrap_or(0);
        Ok(Snapshot {
            micros: monotonic_micros(),
            requests: progress.requests.load(Ordering::Relaxed),
            server: self.server.cpu().context("the server has ended")?,
            nics: statistics.nics.iter().map(|nic| cpu(nic.process)).sum(),
            others: process_nanos() + agent + kernel.nanos(),
            messages: KINDS.map(|(_, counter)| count(counter)),
        })
    }
}

/// Connections in the kernel, and the NIC that each is to be moved to: as many for each NIC as that has room for. The
/// first NIC gets connections by itself, since the device is its own, but not those that another one was asked for,
/// whose place somebody else has taken meanwhile.
fn to_be_moved(connections: &[(Place, Option<u32>)], nics: &[u32]) -> Vec<(usize, u32)> {
    let on = |nic: u32| connections.iter().filter(|one| **one == (Place::Nic, Some(nic))).count();
    let mut elsewhere = connections.iter().enumerate().filter(|(_, (place, _))| *place == Place::Kernel).map(|(at, _)| at);
    let mut moves = Vec::new();
    for (nic, room) in (0..).zip(nics) {
        let free = (*room as usize).saturating_sub(on(nic));
        moves.extend(elsewhere.by_ref().take(free).map(|at| (at, nic)));
    }
    moves
}

/// Waits until each NIC has as many connections as it has room for, and returns how many there are on all.
fn place(tool: &mut Tool, nics: &[u32]) -> Result<usize> {
    let wanted = (nics.iter().sum::<u32>() as usize).min(CONNECTIONS);
    let (deadline, mut why) = (monotonic_micros() + (PLACING * 1e6) as u64, String::new());
    loop {
        let all = tool.connections()?;
        let placed = all.iter().filter(|info| info.place == Place::Nic).count();
        if placed >= wanted {
            return Ok(placed);
        }
        ensure!(
            monotonic_micros() < deadline,
            "{placed} of {wanted} connections are on NICs, no other comes in {PLACING} s: {why}"
        );
        let places: Vec<_> = all.iter().map(|info| (info.place, info.nic)).collect();
        for (at, nic) in to_be_moved(&places, nics) {
            let (session, connection) = (all[at].session, all[at].connection);
            let ask = Ask::MoveAny { session, connection, to: Place::Nic, nic: Some(nic) };
            // One that stays, since it is being moved or ends, is tried again.
            if let Reply::Stayed { reason, .. } | Reply::Failed { reason } = tool.ask(ask)? {
                why = reason;
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Runs the load once on hosts of its own.
fn run_once(division: &Division, files: &Files, seconds: f64) -> Result<Round> {
    let address = SocketAddr::new(address_a(false), PORT);
    // Whoever is on a NIC stays there: how the agent chooses is not measured here.
    let limits = Limits { connections: division.nics.first().copied(), when_full: WhenFull::Refuse, ..Limits::default() };
    let settings = TestbedSettings {
        beside: true,
        spin: 100,
        nic_cores: Vec::new(),
        agent_core: None,
        nics: division.nics.len().max(1),
        offloads: Offloads { limits, ..Offloads::default() },
        ..TestbedSettings::default()
    };
    let (hosts, agent, tool) = if division.nics.is_empty() {
        (Hosts::Without(testbed::without_baton(&settings)?), None, None)
    } else {
        let bed = Testbed::new(&settings)?;
        let (agent, tool) = (bed.socket(), bed.tool()?);
        (Hosts::Baton(Box::new(bed)), Some(agent), Some(tool))
    };
    let [host_a, host_b] = hosts.both();
    let words = Program::find().command(files, address, false)?;
    let mut server = Server::start(host_a, &words, files.root(), agent.as_deref())?;
    server.listens(host_b, address)?;
    // Ends before the hosts do.
    let mut parties = Parties { server, tool };
    let load = WebLoad {
        url: format!("http://{address}").parse::<Url>().map_err(|what| anyhow!(what))?,
        connections: CONNECTIONS,
        threads: 1,
        seconds: LONGEST,
        rate: f64::INFINITY,
        dynamic: 0.0,
        dynamic_path: None,
        directories: DIRECTORIES,
        keep: Keep::Always,
        seed: 1,
    };
    let progress = Progress::default();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| host_b.run(|| Ok(web_load::observed(&load, &progress))));
        let measured = parties.measure(division, &progress, seconds);
        progress.stop.store(true, Ordering::Relaxed);
        let report = running.join().map_err(|_| anyhow!("the load panicked"))???;
        ensure!(report.errors == 0, "requests failed: {:?}", report.faults);
        measured
    })
}

/// Runs the load on each division of the connections, in turn, for some two minutes, and reports it.
///
/// # Errors
/// If the hosts cannot be made, the server does not start, or a request fails.
pub fn run(report: &mut Report, how: Run, say: &mut dyn FnMut(&str)) -> Result<()> {
    let (rounds, seconds) = if how.short { (1, SHORT) } else { (ROUNDS, SECONDS) };
    process::raise_descriptor_limit();
    let files = Files::new()?;
    file_set::make(files.root(), DIRECTORIES)?;
    let mut all = DIVISIONS.map(|_| Vec::new());
    for round in 1..=rounds {
        for (division, results) in DIVISIONS.iter().zip(&mut all) {
            say(&format!("handoff: {}, round {round} of {rounds}", division.name));
            results.push(run_once(division, &files, seconds).context(division.name)?);
        }
    }
    add(report, &all.map(|rounds| Round::medians(&rounds)));
    Ok(())
}

/// Adds the medians of each division to a report.
fn add(report: &mut Report, medians: &[Round; DIVISIONS.len()]) {
    let row = |(division, round): (&Division, &Round)| {
        let figures = [round.on_nics, round.rate, round.server, round.nics, round.others, round.machine()];
        Row { name: division.name.into(), cells: figures.map(Cell::live).into() }
    };
    report.tables.push(Table {
        title: "Figure 7, live: a web server, CPU of a request".into(),
        columns: ["on NICs", "requests/s", "server, µs", "NICs, µs", "others, µs", "machine, µs"].map(String::from).into(),
        rows: DIVISIONS.iter().zip(medians).map(row).collect(),
        note: "64 connections without a limit of rate, static files of SPECweb99's mix. Others: clients, agent, the kernel's threads for \
               frames. A NIC is a process that also polls; with none no Baton runs."
            .into(),
    });
    let row = |(kind, (name, _)): (usize, &(&str, Counter))| {
        let cells = medians.iter().map(|round| Cell::live(round.messages[kind])).collect();
        Row { name: (*name).into(), cells }
    };
    report.tables.push(Table {
        title: "Figure 8, live: messages of a request by kind".into(),
        columns: DIVISIONS.iter().map(|division| division.name.into()).collect(),
        rows: KINDS.iter().enumerate().map(row).collect(),
        note: "Of all requests, those of connections in the kernel among them. Not of a packet: on a veth frames are of up to 64 KB.".into(),
    });
    let [none, part, all] = [NONE, PART, ALL].map(|at| medians[at]);
    let change = 100.0 * (all.server / none.server - 1.0);
    report.measured("handoff.fig7.web", change, "CPU time of the server's process for a request, all 64 on the NIC over none");
    report.bar(Bar::most("handoff.live.server_all_over_none", 1.0, all.server / none.server));
    report.bar(Bar::most("handoff.live.server_all_over_part", 1.0, all.server / part.server));
    report.bar(Bar::most("handoff.live.messages_part_over_all", 1.0, part.transfers() / all.transfers()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::papers::report::Comparison;

    #[test]
    fn a_stretch_is_what_grew_for_each_request() {
        let moment = |times: u64| Snapshot {
            micros: 1_000_000 * times,
            requests: 500 * times,
            server: 5_000_000 * times,
            nics: 2_000_000 * times,
            others: 1_000_000 * times,
            messages: [1000 * times; KINDS.len()],
        };
        let round = between(&moment(3), &moment(5), 16).unwrap();
        assert_eq!((round.on_nics, round.rate, round.server, round.machine()), (16.0, 500.0, 10.0, 16.0));
        assert_eq!(round.transfers(), 10.0);
        assert!(between(&moment(3), &moment(3), 16).is_err());
    }

    /// Whichever NIC has room is asked for, the first one, too: a connection that was asked for another one, which is
    /// full by now, does not come to it by itself.
    #[test]
    fn no_place_of_a_nic_is_left_free() {
        let on = |nic: u32, count: usize| vec![(Place::Nic, Some(nic)); count];
        let kernel = |count: usize| vec![(Place::Kernel, None); count];
        let all = [on(0, 29), kernel(2), on(1, 32), kernel(1)].concat();
        assert_eq!(to_be_moved(&all, &[32, 32]), [(29, 0), (30, 0), (63, 0)]);
        let both = [on(0, 31), kernel(4), on(1, 30)].concat();
        assert_eq!(to_be_moved(&both, &[32, 32]), [(31, 0), (32, 1), (33, 1)]);
        assert!(to_be_moved(&kernel(3), &[]).is_empty() && to_be_moved(&on(0, 16), &[16]).is_empty());
    }

    #[test]
    fn what_was_measured_is_in_the_report() {
        let round = |server, messages| Round { server, messages: [messages; KINDS.len()], ..Round::default() };
        let mut report = Report::default();
        report.show(Comparison::new("handoff.fig7.web", "web", "%", -54.0, -59.0));
        add(&mut report, &[round(100.0, 0.0), round(90.0, 1.0), round(60.0, 4.0), round(70.0, 4.0)]);
        assert_eq!(report.comparisons[0].live.map(f64::round), Some(-40.0));
        assert_eq!(
            report.tables.iter().map(|table| (table.rows.len(), table.columns.len())).collect::<Vec<_>>(),
            [(4, 6), (10, 4)]
        );
        assert!(report.holds() && report.bars.len() == 3, "{:?}", report.bars);
    }
}
