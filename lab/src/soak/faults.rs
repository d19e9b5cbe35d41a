//! Faults far enough apart that what follows each can be seen: for how long connections carry nothing, and whether
//! those that are wanted on the NIC are there again.

use super::{Mover, Shared, SoakReport};
use crate::status::StatusLine;
use anyhow::{Result, bail};
use baton_bed::statistics::{Percentiles, quantile};
use baton_client::tool::Tool;
use baton_linux::events::monotonic_micros;
use baton_linux::process;
use baton_protocol::program::{Ask, ConnectionInfo, Place, Statistics};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Least microseconds between two faults.
const APART: u64 = 4_000_000;
/// Microseconds after a fault at which connections are to be on the NIC again, and at which the gaps are read.
const BACK: u64 = 3_000_000;
const GAPS: u64 = 3_500_000;
/// Microseconds that the next NIC or agent may take to be there.
const NEXT: u64 = 20_000_000;
/// Microseconds that a connection that kills the NIC may go on to do so.
const POISONED: u64 = 120_000_000;
/// Connections that never move, with which the others are compared.
pub(super) const UNMOVED: usize = 2;

const SIGKILL: i32 = 9;
const SIGSEGV: i32 = 11;
const SIGSTOP: i32 = 19;

/// What happens to whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    KillNic,
    StopNic,
    KillAgent,
}

/// The gaps after all faults, microseconds.
#[derive(Default)]
struct Gaps {
    moving: Vec<f64>,
    unmoved: Vec<f64>,
    /// Connections that were wanted on the NIC, and those of them that were there.
    wanted: usize,
    back: usize,
}

impl Shared {
    /// Begins to look for the largest gap of each connection.
    fn forget_gaps(&self) {
        self.to_a.iter().chain(&self.to_b).for_each(|direction| direction.gap.store(0, Ordering::Relaxed));
    }

    /// The largest gap of a connection, in either direction, one that lasts still among them.
    fn gap(&self, at: usize, now: u64) -> f64 {
        let of = |direction: &super::Direction| {
            let lasts = now.saturating_sub(direction.moved_at.load(Ordering::Relaxed));
            direction.gap.load(Ordering::Relaxed).max(lasts)
        };
        of(&self.to_a[at]).max(of(&self.to_b[at])) as f64
    }
}

impl Mover<'_> {
    /// Makes moves, with faults in between. `observer` sees what the agent does while answers to `tool` are due.
    pub(super) fn run_with_faults(&mut self, tool: &mut Tool, observer: &mut Tool, report: &mut SoakReport) -> Result<()> {
        let settings = self.settings;
        let mut faults = [
            vec![Fault::KillNic; settings.kill_nic as usize],
            vec![Fault::StopNic; settings.stop_nic as usize],
            vec![Fault::KillAgent; settings.kill_agent as usize],
        ]
        .concat();
        let each = settings.moves / (faults.len() as u64 + 1);
        let (status, mut gaps, mut done) = (StatusLine::new(), Gaps::default(), 0);
        while !faults.is_empty() {
            done += self.make_moves(tool, report, each)?;
            let fault = faults.swap_remove(self.rng.below(faults.len() as u64) as usize);
            // With moves under way, or without; an agent that dies does not answer any more.
            if fault != Fault::KillAgent && self.rng.below(2) == 0 {
                self.ask_some(tool, self.movable())?;
            } else {
                std::thread::sleep(Duration::from_micros(self.rng.below(500_000)));
            }
            let before = observer.statistics()?;
            self.shared.forget_gaps();
            let struck = monotonic_micros();
            self.strike(fault, &before, report)?;
            done += self.take_all_answers(tool, report)?;
            await_next(fault, &before, observer)?;
            report.faults += 1;
            report.kills += u32::from(fault != Fault::StopNic);
            wait_until(struck + BACK);
            self.look(observer, &mut gaps)?;
            wait_until(struck + GAPS);
            let now = monotonic_micros();
            let movable = self.movable();
            gaps.moving.extend((0..movable).map(|at| self.shared.gap(at, now)));
            gaps.unmoved.extend((movable..self.ids.len()).map(|at| self.shared.gap(at, now)));
            wait_until(struck + APART);
            if settings.progress {
                status.show(format_args!("{done} moves, {} faults, {} to come", report.faults, faults.len()));
            }
        }
        status.clear();
        done += self.make_moves(tool, report, settings.moves.saturating_sub(done))?;
        report.moves = done;
        report.in_flight_share = self.both_ways as f64 / done.max(1) as f64;
        report.min_moves_per_connection = self.moves[..self.movable()].iter().copied().min().unwrap_or(0);
        let usual = quantile(&mut gaps.unmoved, 0.5);
        report.unmoved_gap_us = Percentiles::of(gaps.unmoved);
        report.blackout_us = Percentiles::of(gaps.moving.into_iter().map(|gap| (gap - usual).max(0.0)).collect());
        report.back_on_nic = Some(gaps.back as f64 / gaps.wanted.max(1) as f64);
        Ok(())
    }

    /// Connections that move: all but the last ones.
    fn movable(&self) -> usize {
        self.ids.len().saturating_sub(UNMOVED).max(1)
    }

    /// Asks for moves of some of the first `among` connections.
    pub(super) fn ask_some(&mut self, tool: &mut Tool, among: usize) -> Result<()> {
        while self.asked.len() < among.min(self.settings.at_once) {
            self.ask_one(tool, among)?;
        }
        Ok(())
    }

    fn make_moves(&mut self, tool: &mut Tool, report: &mut SoakReport, moves: u64) -> Result<u64> {
        let mut done = 0;
        while done < moves {
            self.ask_some(tool, self.movable())?;
            done += u64::from(self.take_answer(tool, report)?);
        }
        Ok(done + self.take_all_answers(tool, report)?)
    }

    /// Waits for the answers to all moves that were asked for. Returns how many were done.
    pub(super) fn take_all_answers(&mut self, tool: &mut Tool, report: &mut SoakReport) -> Result<u64> {
        let mut done = 0;
        while !self.asked.is_empty() {
            done += u64::from(self.take_answer(tool, report)?);
        }
        Ok(done)
    }

    /// Kills or stops one process.
    fn strike(&mut self, fault: Fault, before: &Statistics, report: &mut SoakReport) -> Result<()> {
        let victim = self.rng.below(before.nics.len() as u64) as usize;
        match fault {
            Fault::KillNic => process::signal(before.nics[victim].process, SIGKILL)?,
            Fault::StopNic => process::signal(before.nics[victim].process, SIGSTOP)?,
            Fault::KillAgent => {
                // Its counters die with it.
                report.count(before);
                report.count_transitions(before);
                process::signal(before.agent_process, SIGKILL)?;
            }
        }
        Ok(())
    }

    /// Notes where the connections are, and how many of those that are wanted on the NIC.
    fn look(&mut self, observer: &mut Tool, gaps: &mut Gaps) -> Result<()> {
        let list = observer.connections()?;
        for at in 0..self.movable() {
            self.places[at] = self.info(&list, at).and_then(|info| info.nic);
            gaps.wanted += usize::from(self.wished[at]);
            gaps.back += usize::from(self.wished[at] && self.places[at].is_some());
            if self.wished[at] && self.places[at].is_none() {
                let reason = self.info(&list, at).map(|info| info.reason.as_str());
                eprintln!("connection {at} is not on the NIC again: {reason:?}");
            }
        }
        Ok(())
    }

    pub(super) fn info<'a>(&self, list: &'a [ConnectionInfo], at: usize) -> Option<&'a ConnectionInfo> {
        list.iter().find(|info| info.session == self.session && info.connection == self.ids[at])
    }

    /// All connections are wanted on the NIC, which crashes whenever the first one is there. It goes on until that one
    /// stays in the kernel and the others are on the NIC.
    pub(super) fn run_poisoned(&mut self, tool: &mut Tool, report: &mut SoakReport) -> Result<()> {
        let (session, deadline) = (self.session, monotonic_micros() + POISONED);
        for connection in self.ids {
            tool.ask(Ask::MoveAny { session, connection: *connection, to: Place::Nic, nic: None })?;
        }
        loop {
            let nic = tool.statistics()?.nic_process;
            let list = tool.connections()?;
            let Some(poison) = self.info(&list, 0) else { bail!("the connection that kills the NIC is gone") };
            let there =
                (1..self.ids.len()).filter(|at| self.info(&list, *at).is_some_and(|info| info.place == Place::Nic)).count();
            if poison.place == Place::Nic {
                // Already dead if it is not the one that had it.
                report.kills += u32::from(process::signal(nic, SIGSEGV).is_ok());
            }
            report.back_on_nic = Some(there as f64 / (self.ids.len() - 1).max(1) as f64);
            report.poison_stays = Some(poison.reason.contains("died each time"));
            if report.poison_stays == Some(true) && there == self.ids.len() - 1 {
                return Ok(());
            }
            if monotonic_micros() > deadline {
                bail!("after {} deaths the connection that kills the NIC is not found: {list:?}", report.kills);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Waits until there is another NIC or agent.
fn await_next(fault: Fault, before: &Statistics, observer: &mut Tool) -> Result<()> {
    let deadline = monotonic_micros() + NEXT;
    loop {
        let now = observer.statistics()?;
        let is_there = match fault {
            Fault::KillAgent => now.agent_process != before.agent_process,
            Fault::KillNic | Fault::StopNic => now.nic_starts != before.nic_starts,
        };
        if is_there {
            return Ok(());
        }
        if monotonic_micros() > deadline {
            bail!("{fault:?}: {} s later there is no other one", NEXT / 1_000_000);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn wait_until(at: u64) {
    std::thread::sleep(Duration::from_micros(at.saturating_sub(monotonic_micros())));
}
