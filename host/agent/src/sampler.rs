//! What a process does whose workers publish their signs of life in shared memory.

use baton_linux::events::monotonic_micros;
use baton_linux::tasks::{self, Activity};
use baton_shm::{Pulse, Reading, Region};
use baton_supervision::{Process, Sample, Worker};

/// Takes samples of one process.
#[derive(Default)]
pub struct Sampler {
    /// The rounds that each worker had made at the last sample.
    rounds: Vec<u64>,
}

impl Sampler {
    /// Takes the sample of `process` that was due at `due`: of the workers whose signs of life are at these places.
    /// While they all make rounds that costs no system call.
    pub fn look(&mut self, process: u32, memory: &Region, places: impl Iterator<Item = usize>, due: u64) -> Sample {
        let readings: Vec<_> = places.map(|at| Pulse::read(memory, at)).collect();
        let goes_on = self.rounds.len() == readings.len()
            && self.rounds.iter().zip(&readings).all(|(before, now)| now.rounds != *before && now.thread != 0);
        self.rounds = readings.iter().map(|reading| reading.rounds).collect();
        let workers: Vec<Worker> = readings.iter().map(|reading| worker(process, reading, goes_on)).collect();
        let does = match workers.first() {
            Some(_) if goes_on => Process::Runs,
            // The first worker is the process's first thread.
            Some(first) if readings[0].thread == process => first.thread,
            _ => process_of(tasks::activity(process, process)),
        };
        let suspicious = does == Process::Stopped || workers.iter().any(|worker| !worker.asleep && !goes_on);
        let does = if suspicious && tasks::is_traced(process) { Process::Traced } else { does };
        Sample { at: monotonic_micros(), due, process: does, workers }
    }
}

/// What a worker does. One that has not begun, or has just ended, counts as asleep.
fn worker(process: u32, reading: &Reading, goes_on: bool) -> Worker {
    let Reading { rounds, thread, asleep } = *reading;
    if goes_on || thread == 0 {
        return Worker { rounds, asleep: asleep || thread == 0, thread: Process::Unknown, used: None };
    }
    let activity = process_of(tasks::activity(process, thread));
    Worker { rounds, asleep, thread: activity, used: tasks::used_micros(process, thread) }
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
