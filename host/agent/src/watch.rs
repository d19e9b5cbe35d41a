//! Watches over NICs, and the host's TCP: one that hangs is ended, and its connections go on in the kernel until the
//! next one is there.

use crate::agent::Agent;
use crate::nic::NicProcess;
use baton_abi::layout::{host_tcp, nic};
use baton_linux::events::monotonic_micros;
use baton_linux::tasks::{self, Activity};
use baton_log::{info, warning};
use baton_shm::{Pulse, Reading, Region};
use baton_supervision::{Cause, Limits, Missed, Process, Sample, Verdict, Watchdog, Worker};
use std::time::Duration;

/// Microseconds between two looks while there are sessions, and without.
const PACE: u64 = 50_000;
const SLOW_PACE: u64 = 1_000_000;

/// Takes samples of one process.
pub struct Sampler {
    process: u32,
    watchdog: Watchdog,
    /// The rounds that each worker had made at the last sample.
    rounds: Vec<u64>,
}

impl Sampler {
    /// Of a process that has just been started, whose workers publish their signs of life in `memory`.
    pub fn new(process: u32, limits: Limits) -> Sampler {
        Sampler { process, watchdog: Watchdog::new(limits), rounds: Vec::new() }
    }

    /// Takes the sample that was due at `due`, of the workers whose signs of life are at these places. While they all
    /// make rounds that costs no system call.
    pub fn look(&mut self, memory: &Region, places: impl Iterator<Item = usize>, due: u64) -> Verdict {
        let readings: Vec<_> = places.map(|at| Pulse::read(memory, at)).collect();
        let goes_on = self.rounds.len() == readings.len()
            && self.rounds.iter().zip(&readings).all(|(before, now)| now.rounds != *before && now.thread != 0);
        self.rounds = readings.iter().map(|reading| reading.rounds).collect();
        let workers: Vec<Worker> = readings.iter().map(|reading| self.worker(reading, goes_on)).collect();
        let process = match workers.first() {
            Some(_) if goes_on => Process::Runs,
            // The first worker is the process's first thread.
            Some(first) if readings[0].thread == self.process => first.thread,
            _ => process_of(tasks::activity(self.process, self.process)),
        };
        let suspicious = process == Process::Stopped || workers.iter().any(|worker| !worker.asleep && !goes_on);
        let process = if suspicious && tasks::is_traced(self.process) { Process::Traced } else { process };
        self.watchdog.judge(&Sample { at: monotonic_micros(), due, process, workers })
    }

    /// What a worker does. One that has not begun, or has just ended, counts as asleep.
    fn worker(&self, reading: &Reading, goes_on: bool) -> Worker {
        let Reading { rounds, thread, asleep } = *reading;
        if goes_on || thread == 0 {
            return Worker { rounds, asleep: asleep || thread == 0, thread: Process::Unknown, used: None };
        }
        let activity = process_of(tasks::activity(self.process, thread));
        Worker { rounds, asleep, thread: activity, used: tasks::used_micros(self.process, thread) }
    }
}

fn process_of(activity: Activity) -> Process {
    match activity {
        Activity::Runs => Process::Runs,
        Activity::Waits => Process::Waits,
        Activity::Stopped => Process::Stopped,
        Activity::Traced => Process::Traced,
        Activity::Unknown => Process::Unknown,
    }
}

/// What is known of one NIC, and of its host's TCP.
#[derive(Default)]
struct Watched {
    nic: Option<Sampler>,
    host_tcp: Option<Sampler>,
    /// Times that one of the NICs of this number was starved, or was ended since it hung.
    starved: u64,
    hung: u64,
    /// Why the present one is ended.
    cause: Option<(u32, Cause)>,
}

/// The NICs' watch.
#[derive(Default)]
pub(crate) struct Watch {
    of_nics: Vec<Watched>,
    /// When they are looked at next, microseconds.
    due: u64,
    missed: Missed,
}

/// The sampler of the process with this number, which may be another one than at the last look.
fn sampler_of(sampler: &mut Option<Sampler>, process: u32) -> &mut Sampler {
    if sampler.as_ref().is_none_or(|sampler| sampler.process != process) {
        *sampler = None;
    }
    sampler.get_or_insert_with(|| Sampler::new(process, Limits::OF_NIC))
}

impl Watched {
    /// Looks at a NIC and its host's TCP. Returns the process that hangs, and why.
    fn look(&mut self, of: &NicProcess, memory: &Region, due: u64) -> Option<(u32, Cause)> {
        let places = (0..of.settings().workers).map(nic::pulse);
        let mut verdicts = Vec::new();
        if let Some(process) = of.visible_process() {
            verdicts.push((process, look_at(&mut self.nic, process, memory, places, due, &mut self.starved)));
        }
        if let Some(host_tcp) = of.host_tcp() {
            let (process, place) = (host_tcp.process(), std::iter::once(host_tcp::PULSE));
            verdicts.push((process, look_at(&mut self.host_tcp, process, host_tcp.memory(), place, due, &mut self.starved)));
        }
        verdicts
            .into_iter()
            .find_map(|(process, verdict)| if let Verdict::Hung(cause) = verdict { Some((process, cause)) } else { None })
    }
}

fn look_at(
    sampler: &mut Option<Sampler>,
    process: u32,
    memory: &Region,
    places: impl Iterator<Item = usize>,
    due: u64,
    starved: &mut u64,
) -> Verdict {
    let sampler = sampler_of(sampler, process);
    let before = sampler.watchdog.starved();
    let verdict = sampler.look(memory, places, due);
    *starved += sampler.watchdog.starved() - before;
    verdict
}

impl Watch {
    /// Times that NICs of this number were starved, and were ended since they hung.
    pub fn counts(&self, nic: usize) -> (u64, u64) {
        self.of_nics.get(nic).map_or((0, 0), |watched| (watched.starved, watched.hung))
    }

    /// Why the present NIC of this number was ended, if that was here.
    pub fn cause(&self, nic: usize, process: u32) -> Option<Cause> {
        let (ended, cause) = self.of_nics.get(nic)?.cause?;
        (ended == process).then_some(cause)
    }

    /// Whether a NIC, or its host's TCP, had no chance to answer in the last `period` microseconds.
    pub fn excuses(&self, nic: usize, now: u64, period: u64) -> bool {
        let samplers = self.of_nics.get(nic).into_iter().flat_map(|watched| [&watched.nic, &watched.host_tcp]);
        samplers.flatten().any(|sampler| sampler.watchdog.is_excused(now, period))
    }

    /// Microseconds that this process is overdue with its next look at the NICs, because it was stopped or got no
    /// processor. Each microsecond is returned by one call only.
    pub fn take_missed(&mut self) -> u64 {
        // 0: no look has been planned yet.
        if self.due == 0 { 0 } else { self.missed.take(monotonic_micros(), self.due) }
    }

    /// Time until the next look.
    pub fn wait(&self) -> Option<Duration> {
        Some(Duration::from_micros(self.due.saturating_sub(monotonic_micros())))
    }
}

impl Agent {
    /// Looks at all NICs, if it is time. One that hangs is ended and its connections recovered.
    ///
    /// # Errors
    /// If the next NIC does not start.
    pub(crate) fn watch_nics(&mut self) -> anyhow::Result<()> {
        let now = monotonic_micros();
        if now < self.watch.due {
            return Ok(());
        }
        let pace = if self.sessions.iter().flatten().any(|session| session.open.is_some()) { PACE } else { SLOW_PACE };
        let due = std::mem::replace(&mut self.watch.due, now + pace);
        self.watch.of_nics.resize_with(self.nics.len(), Watched::default);
        for number in 0..self.nics.len() {
            let hung = self.watch.of_nics[number].look(&self.nics[number], &self.hardware[number].memory, due.max(1));
            let Some((process, cause)) = hung else { continue };
            warning!(
                [nic = number] "NIC {number} (process {process}) hangs and is ended: {cause}";
                "if it comes again, send what `baton report` writes"
            );
            info!([nic = number] "what the threads of NIC {number} were doing: {}", tasks::account(process));
            self.watch.of_nics[number].hung += 1;
            self.watch.of_nics[number].cause = Some((self.nics[number].process(), cause));
            self.recover(number)?;
        }
        Ok(())
    }
}
