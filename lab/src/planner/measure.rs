//! Measures what small operations cost here: the planner's program and its client exchange few sizes, one exchange
//! at a time and some, over the kernel's TCP and over a NIC beside it, each on a bed of its own.

use super::costs::{Exchange, Host, Line, Nic, SIZES};
use super::load::Size;
use super::traffic::{Progress, Traffic};
use anyhow::{Context, Result, ensure};
use baton_abi::layout::Counter;
use baton_bed::server::{Files, Server};
use baton_bed::testbed::{self, Hosts, Testbed, TestbedSettings, address_a};
use baton_client::tool::Tool;
use baton_linux::events::{monotonic_micros, process_nanos};
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_protocol::program::Place;
use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The program's port.
const PORT: u16 = 8093;
/// Connections that exchange at the same time: enough to share the cost of wake-ups, and fewer than the loads that are
/// predicted have.
const SOME: usize = 24;
/// Seconds after which no further connection is expected to move.
const MOVING: f64 = 15.0;
/// Seconds before each measurement.
const WARMING: f64 = 0.1;
/// Connections that a NIC of a bed holds.
const SLOTS: u32 = 4096;

/// On which way the frames go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The kernel's, without a NIC.
    Kernel,
    /// The kernel's, with a NIC between it and the wire.
    Passed,
    /// The NIC's.
    Offloaded,
}

/// Two hosts and the program on one. What runs on them ends first.
pub struct Bed {
    parties: Parties,
    hosts: Hosts,
}

/// Whose CPU time counts, beside that of the client, which is this process's.
struct Parties {
    way: Way,
    server: Server,
    tool: Option<Tool>,
    /// Nanoseconds of the agent's CPU in which connections came and moved, and moves in that time.
    moving: (u64, u64),
}

/// What was used in a stretch of a load, nanoseconds of CPU for each request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Used {
    /// Requests.
    pub done: f64,
    /// The client's process.
    pub peer: f64,
    /// The program's.
    pub program: f64,
    /// Of this, in user space.
    pub own: f64,
    /// The NIC's.
    pub nic: f64,
    /// The agent's, and the kernel's threads for frames.
    pub others: f64,
    /// Segments that the NIC has sent again, for each request.
    pub again: f64,
}

impl Used {
    /// Of the whole machine.
    pub fn machine(&self) -> f64 {
        self.peer + self.program + self.nic + self.others
    }
}

struct Snapshot {
    done: u64,
    peer: u64,
    program: u64,
    own: u64,
    nic: u64,
    others: u64,
    again: u64,
}

/// Where the program listens.
pub fn address() -> SocketAddr {
    SocketAddr::new(address_a(false), PORT)
}

/// Nanoseconds that a process has run in user space, of which the kernel counts hundredths of a second.
fn user_nanos(process: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let ticks = text.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(11)?.parse::<u64>().ok());
    ticks.unwrap_or(0) * 10_000_000
}

impl Bed {
    /// Makes the hosts, and starts the program.
    ///
    /// # Errors
    /// If something is missing; the message says what to do.
    pub fn new(way: Way, files: &Files) -> Result<Bed> {
        let program = std::env::current_exe()?.into_os_string();
        Bed::with(way, files, &[program, "serve-plan".into(), address().to_string().into()])
    }

    /// The same with another program, which listens at [`address`] as well.
    ///
    /// # Errors
    /// If something is missing; the message says what to do.
    pub fn with(way: Way, files: &Files, words: &[OsString]) -> Result<Bed> {
        let settings = TestbedSettings {
            beside: way != Way::Passed,
            spin: 100,
            nic_cores: Vec::new(),
            agent_core: None,
            slots: SLOTS as usize,
            ..TestbedSettings::default()
        };
        let (hosts, agent, tool) = if way == Way::Kernel {
            (Hosts::Without(testbed::without_baton(&settings)?), None, None)
        } else {
            let bed = Testbed::new(&settings)?;
            let (agent, tool) = ((way == Way::Offloaded).then(|| bed.socket()), bed.tool()?);
            (Hosts::Baton(Box::new(bed)), agent, Some(tool))
        };
        let [host_a, host_b] = hosts.both();
        let mut server = Server::start(host_a, words, files.root(), agent.as_deref())?;
        server.listens(host_b, address()).context("the program")?;
        Ok(Bed { parties: Parties { way, server, tool, moving: (0, 0) }, hosts })
    }

    /// The client's host.
    pub fn client(&self) -> &Namespace {
        self.hosts.both()[1]
    }

    /// Runs some traffic, and measures a stretch of it.
    ///
    /// # Errors
    /// If a connection breaks, or the program or the agent ends.
    pub fn measure(&mut self, traffic: &Traffic, seconds: f64) -> Result<Used> {
        let progress = Progress::default();
        let Bed { parties, hosts } = self;
        let [_, client] = hosts.both();
        std::thread::scope(|scope| {
            let running = scope.spawn(|| client.run(|| Ok(traffic.run(address(), &progress))));
            let measured = parties.stretch(traffic, &progress, seconds);
            progress.stop.store(true, Ordering::Relaxed);
            running.join().map_err(|_| anyhow::anyhow!("the client panicked"))???;
            measured
        })
    }
}

impl Parties {
    fn stretch(&mut self, traffic: &Traffic, progress: &Progress, seconds: f64) -> Result<Used> {
        let (mut most, mut since, begun) = (0, monotonic_micros(), self.moves()?);
        loop {
            let wanted = if self.way == Way::Offloaded { traffic.connections } else { 0 };
            let on_nic = match &mut self.tool {
                Some(tool) if wanted > 0 => tool.connections()?.iter().filter(|info| info.place == Place::Nic).count(),
                _ => 0,
            };
            if on_nic >= wanted && progress.done.load(Ordering::Relaxed) > 0 {
                break;
            }
            if on_nic > most {
                (most, since) = (on_nic, monotonic_micros());
            }
            ensure!(
                monotonic_micros() - since < (MOVING * 1e6) as u64,
                "{on_nic} of {wanted} connections are on the NIC, and no other comes in {MOVING} s; or nothing is answered"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        let (cpu, moves) = self.moves()?;
        self.moving = (self.moving.0 + cpu - begun.0, self.moving.1 + moves - begun.1);
        std::thread::sleep(Duration::from_secs_f64(WARMING));
        let mut kernel = process::KernelThreads::new();
        let before = self.snapshot(progress, &mut kernel)?;
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let after = self.snapshot(progress, &mut kernel)?;
        ensure!(after.done > before.done, "nothing was answered in {seconds} s");
        let done = (after.done - before.done) as f64;
        let each = |of: fn(&Snapshot) -> u64| of(&after).saturating_sub(of(&before)) as f64 / done;
        Ok(Used {
            done,
            peer: each(|one| one.peer),
            program: each(|one| one.program),
            own: each(|one| one.own),
            nic: each(|one| one.nic),
            others: each(|one| one.others),
            again: each(|one| one.again),
        })
    }

    fn snapshot(&mut self, progress: &Progress, kernel: &mut process::KernelThreads) -> Result<Snapshot> {
        let statistics = self.tool.as_mut().map(Tool::statistics).transpose()?;
        let cpu = |process: Option<u32>| process.and_then(process::cpu_nanos).unwrap_or(0);
        Ok(Snapshot {
            done: progress.done.load(Ordering::Relaxed),
            peer: process_nanos(),
            program: self.server.cpu().context("the program has ended")?,
            own: user_nanos(self.server.id()),
            nic: cpu(statistics.as_ref().map(|of| of.nic_process)),
            again: statistics.as_ref().map_or(0, |of| of.counters.get(Counter::Retransmitted as usize).copied().unwrap_or(0)),
            others: kernel.nanos() + cpu(statistics.as_ref().map(|of| of.agent_process)),
        })
    }

    /// CPU time that the agent has used so far in nanoseconds, and the moves that were done.
    fn moves(&mut self) -> Result<(u64, u64)> {
        let Some(tool) = &mut self.tool else { return Ok((0, 0)) };
        let statistics = tool.statistics()?;
        Ok((process::cpu_nanos(statistics.agent_process).unwrap_or(0), statistics.moves))
    }
}

/// What is exchanged in a measurement.
struct Point {
    connections: usize,
    request: f64,
    answer: f64,
    calls: u32,
}

const ALONE: Point = Point { connections: 1, ..SMALL };
const SMALL: Point = Point { connections: SOME, request: SIZES[0], answer: SIZES[0], calls: 0 };
/// Calls of a point that shows what one costs.
const CALLS: u32 = 8;
/// Connections that exchange large sizes: so many that what is under way does not fit the caches of a processor, as
/// with programs that do not send the same bytes again and again.
const FEW: usize = 8;

/// An exchange on a way, a cheap call on its sockets, and the program's own work, which is given if it is known.
fn exchange(bed: &mut Bed, own: Option<f64>, seconds: f64, progress: &dyn Fn(&str)) -> Result<(Exchange, f64, f64)> {
    let [small, middle, large, huge] = SIZES;
    let points = [
        ALONE,
        SMALL,
        Point { request: middle, ..SMALL },
        Point { request: large, connections: FEW, ..SMALL },
        Point { request: huge, connections: FEW, ..SMALL },
        Point { answer: middle, ..SMALL },
        Point { answer: large, connections: FEW, ..SMALL },
        Point { answer: huge, connections: FEW, ..SMALL },
        Point { calls: CALLS, ..SMALL },
    ];
    let together = points.each_ref().map(|point| point.connections as f64);
    let mut used = Vec::new();
    for Point { connections, request, answer, calls } in points {
        let what = format!("{:?}, {connections} connections, {request} and {answer} bytes, {calls} calls", bed.parties.way);
        let sizes = vec![Size { share: 1.0, request: request.max(small), answer }];
        let traffic = Traffic { connections, depth: 1, sizes, calls, fixed: None };
        let one = bed.measure(&traffic, seconds).with_context(|| what.clone())?;
        progress(&format!(
            "{what}: program {:.0} (own {:.0}), NIC {:.0}, peer {:.0} ns",
            one.program, one.own, one.nic, one.peer
        ));
        used.push(one);
    }
    // What the program does itself is what it does in user space with the kernel's calls, whatever the size is. The
    // kernel counts that in hundredths of a second, so only all small exchanges together say it.
    let all = |of: fn(&Used) -> f64| used[..3].iter().map(|one| one.done * of(one)).sum::<f64>();
    let own = own.unwrap_or_else(|| all(|one| one.own) / all(|_| 1.0));
    let line = |of: &dyn Fn(&Used) -> f64| {
        let value = |at: usize| of(&used[at]);
        let (alone, exchange) = parted(value(0), value(1));
        let curve = |first: usize| {
            let over = |at: usize| (value(at) - exchange - alone / together[at]).max(0.0);
            let small = over(first);
            let middle = over(first + 1).max(small);
            [small, middle, over(first + 2).max(middle)]
        };
        Line { exchange, alone, request: curve(2), answer: curve(5) }
    };
    let exchange = Exchange {
        program: line(&|one| (one.program - own).max(0.0)),
        peer: line(&|one| one.peer),
        nic: line(&|one| one.nic + one.others),
    };
    // An exchange is two calls at least, whatever has disturbed the measurement.
    let call = ((used[8].program - used[1].program) / f64::from(CALLS)).clamp(0.0, exchange.program.exchange / 2.0);
    Ok((exchange, call, own))
}

/// Splits an exchange's cost in nanoseconds into what a lone exchange pays for a wake-up, and the rest. `one` was
/// measured alone, `among_some` among [`SOME`] that share each wake-up, so that each of them still pays a part of it.
/// The rest is at least half of `among_some`: a lone NIC also polls while a busy machine keeps client and program
/// waiting, which makes `one` too large.
fn parted(one: f64, among_some: f64) -> (f64, f64) {
    let alone = (one - among_some).max(0.0) / (1.0 - 1.0 / SOME as f64);
    (alone, (among_some - alone / SOME as f64).max(among_some / 2.0))
}

/// Nanoseconds of each of `count` operations: the least mean of some tries, since whatever else runs here only adds.
fn least(count: u32, mut operation: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut least = f64::INFINITY;
    for _ in 0..5 {
        let begin = process_nanos();
        for _ in 0..count {
            operation()?;
        }
        least = least.min((process_nanos() - begin) as f64 / f64::from(count));
    }
    Ok(least)
}

/// Measures host and NIC, in some ten seconds. `progress` gets a line for each measurement.
///
/// # Errors
/// If this machine lacks something; the message says what to do.
pub fn measure(files: &Files, progress: &dyn Fn(&str)) -> Result<(Host, Nic)> {
    const SECONDS: f64 = 0.35;
    process::raise_descriptor_limit();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let at = listener.local_addr()?;
    let connection = least(200, || {
        let near = TcpStream::connect(at)?;
        let _far = listener.accept()?;
        baton_linux::socket::reset_on_close(std::os::fd::AsFd::as_fd(&near))?;
        Ok(())
    })?;
    let (from, mut to) = (vec![1u8; 1 << 20], vec![0u8; 1 << 20]);
    let copied = least(20, || {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        Ok(())
    })?;
    let mut bed = Bed::new(Way::Kernel, files)?;
    let (mut kernel, call, own) = exchange(&mut bed, None, SECONDS, progress)?;
    // Without a NIC the kernel's threads for frames are the program's and the peer's.
    kernel.nic = Line::default();
    drop(bed);
    let mut bed = Bed::new(Way::Offloaded, files)?;
    let (offloaded, on_nic, _) = exchange(&mut bed, Some(own), SECONDS, progress)?;
    let (agent, moves) = bed.parties.moves()?;
    drop(bed);
    let mut bed = Bed::new(Way::Passed, files)?;
    let (passed, _, _) = exchange(&mut bed, Some(own), SECONDS, progress)?;
    drop(bed);
    let host = Host {
        about: process::machine(),
        processors: process::cores(),
        call,
        copied_byte: copied / from.len() as f64,
        connection,
        kernel,
    };
    let nic = Nic {
        about: "a NIC process beside the kernel on a veth; for stateless offloads inline, on TAPs".into(),
        connections: SLOTS,
        moved: agent as f64 / moves.max(1) as f64,
        call: on_nic,
        offloaded,
        passed: Some(passed),
    };
    host.check()?;
    nic.check()?;
    Ok((host, nic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exchange_costs_something_on_a_busy_machine_too() {
        let rounded = |(alone, exchange): (f64, f64)| (alone.round(), exchange.round());
        assert_eq!(rounded(parted(8050.0, 2300.0)), (6000.0, 2050.0));
        // Measured beside other work: what a NIC polls for one exchange is more than 24 times what one of 24 costs.
        assert_eq!(rounded(parted(111_004.0, 4377.0)), (111_263.0, 2189.0));
        assert_eq!(rounded(parted(2000.0, 2300.0)), (0.0, 2300.0));
    }
}
