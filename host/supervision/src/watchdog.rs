//! When a process counts as hung, from samples of its workers.
//!
//! Each worker publishes how many rounds it has made, and whether it sleeps. A worker that does not sleep makes rounds,
//! unless
//!
//! - it *spins*: it uses processor time of its own without completing a round. That does not depend on how busy the
//!   machine is;
//! - it is *stuck*: it neither runs nor wants to, in a system call, for a long time;
//! - its process is *stopped* (SIGSTOP);
//! - it is *starved*: it wants to run and gets no processor. That is the machine's fault, and passes;
//! - somebody *traces* it (a debugger), who stops it for as long as he likes.
//!
//! Only the first three are a reason to end the process. The last two of those go by time that passes, so they count
//! only over samples that were taken on time: whoever took one late may have been stopped together with the process, or
//! starved like it.
//!
//! A process that others are stopped with (the agent, by whom its NIC would be ended) can be *resumed* first, once:
//! after that both are as before, and nothing is ended. It is harmless, so samples that are late count for it.

use alloc::vec::Vec;

/// Microseconds after which something counts as hung.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Of the worker's own processor time without a round.
    pub spinning: u64,
    /// In a system call.
    pub stuck: u64,
    /// Stopped.
    pub stopped: u64,
    /// Stopped, after which it is resumed, once; None: it is not.
    pub resumed: Option<u64>,
}

impl Limits {
    /// Of a NIC, and of the host's TCP: programs wait for them.
    pub const OF_NIC: Limits = Limits { spinning: 100_000, stuck: 1_000_000, stopped: 150_000, resumed: None };

    /// Of an agent. It has longer than a NIC: a round of its loop may be about all connections, and programs do not
    /// wait for it. One that is stopped is resumed soon: its NIC may be stopped, too, and then nobody else ends that.
    pub const OF_AGENT: Limits = Limits { spinning: 2_000_000, stuck: 5_000_000, stopped: 2_000_000, resumed: Some(150_000) };
}

/// By how many microseconds a sample may be late.
pub const LATE: u64 = 50_000;

/// What a process or a thread does, as the system reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Process {
    /// It runs, or could.
    Runs,
    /// It waits in a system call, or sleeps.
    Waits,
    /// It is stopped.
    Stopped,
    /// Somebody traces it.
    Traced,
    /// It has ended, or the system does not report it.
    Unknown,
}

/// One worker at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Worker {
    /// Rounds that it has made.
    pub rounds: u64,
    /// It sleeps until there is something to do, and says so itself.
    pub asleep: bool,
    /// What its thread does.
    pub thread: Process,
    /// Microseconds of processor time that its thread has used; None if nobody has looked, or the system does not
    /// report it.
    pub used: Option<u64>,
}

/// A process at one time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sample {
    /// When the sample was taken, and when it was to be taken; microseconds.
    pub at: u64,
    /// See `at`.
    pub due: u64,
    /// What the process does.
    pub process: Process,
    /// Its workers.
    pub workers: Vec<Worker>,
}

/// Why a process counts as hung.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// It is stopped.
    Stopped,
    /// This worker uses processor time and completes no round.
    Spins(usize),
    /// This worker is stuck in a system call.
    Stuck(usize),
}

impl Cause {
    /// Whether the process has brought it about itself: whoever stops it does so from outside.
    pub fn is_its_own(self) -> bool {
        self != Cause::Stopped
    }
}

impl core::fmt::Display for Cause {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Cause::Stopped => write!(f, "it is stopped (SIGSTOP)"),
            Cause::Spins(worker) => write!(f, "worker {worker} uses processor time and completes no round"),
            Cause::Stuck(worker) => write!(f, "worker {worker} does not come back from a system call"),
        }
    }
}

/// What a sample shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing is wrong, or it is not certain yet.
    Well,
    /// A worker wants to run and gets no processor.
    Starved,
    /// Somebody traces the process.
    Traced,
    /// The process is stopped, and to be resumed (SIGCONT).
    Resume,
    /// The process is to be ended.
    Hung(Cause),
}

/// Since when a worker has made no progress.
#[derive(Clone, Copy, Debug)]
struct Still {
    rounds: u64,
    /// Processor time that it had used then, or when it was first looked at since; and at the last sample.
    used: Option<u64>,
    last_used: Option<u64>,
    /// Since when, as far as samples were on time, it has waited in a system call; None if it has run since the last
    /// sample.
    waits_since: Option<u64>,
    starved: bool,
}

/// The state of the decision about one process.
#[derive(Clone, Debug)]
pub struct Watchdog {
    limits: Limits,
    workers: Vec<Option<Still>>,
    /// Since when it has been stopped, as far as samples were on time.
    stopped_since: Option<u64>,
    /// When it was first seen stopped; None if it has not been since the last sample.
    stopped_at: Option<u64>,
    /// It has been resumed since then.
    resumed: bool,
    /// Number of times that a worker has begun to starve.
    starved: u64,
    /// When the process was last seen starved or traced.
    excused_at: Option<u64>,
}

impl Watchdog {
    /// Of a process that has just been started.
    pub fn new(limits: Limits) -> Watchdog {
        Watchdog {
            limits,
            workers: Vec::new(),
            stopped_since: None,
            stopped_at: None,
            resumed: false,
            starved: 0,
            excused_at: None,
        }
    }

    /// Number of times that a worker has begun to starve.
    pub fn starved(&self) -> u64 {
        self.starved
    }

    /// Whether the process has been starved or traced in the last `period` microseconds: what it has not done by then
    /// is not its fault.
    pub fn is_excused(&self, now: u64, period: u64) -> bool {
        self.excused_at.is_some_and(|at| now < at + period)
    }

    /// Takes a sample in.
    pub fn judge(&mut self, sample: &Sample) -> Verdict {
        let late = sample.at > sample.due + LATE && cfg!(not(feature = "sabotage-punctual-watchdog"));
        if cfg!(feature = "sabotage-blind-watchdog") {
            return Verdict::Well;
        }
        if late {
            // Nobody knows what happened meanwhile.
            self.stopped_since = None;
            self.workers.iter_mut().flatten().for_each(|still| still.waits_since = None);
        }
        let traced = |process: Process| process == Process::Traced;
        if traced(sample.process) || sample.workers.iter().any(|worker| traced(worker.thread)) {
            self.workers.clear();
            self.excused_at = Some(sample.at);
            self.runs();
            return Verdict::Traced;
        }
        if sample.process == Process::Stopped {
            self.workers.clear();
            return self.judge_stopped(sample.at);
        }
        self.runs();
        self.workers.resize(sample.workers.len(), None);
        let mut verdict = Verdict::Well;
        for (number, worker) in sample.workers.iter().enumerate() {
            match self.judge_worker(number, worker, sample.at) {
                Verdict::Hung(cause) => return Verdict::Hung(cause),
                Verdict::Well => {}
                other => verdict = other,
            }
        }
        if verdict == Verdict::Starved {
            self.excused_at = Some(sample.at);
        }
        verdict
    }

    /// It is not stopped.
    fn runs(&mut self) {
        (self.stopped_since, self.stopped_at, self.resumed) = (None, None, false);
    }

    fn judge_stopped(&mut self, at: u64) -> Verdict {
        let since = *self.stopped_since.get_or_insert(at);
        let first = *self.stopped_at.get_or_insert(at);
        if at - since >= self.limits.stopped {
            return Verdict::Hung(Cause::Stopped);
        }
        let limit = self.limits.resumed.filter(|_| cfg!(not(feature = "sabotage-stern-watchdog")));
        let is_due = limit.is_some_and(|limit| at - first >= limit);
        if is_due && !core::mem::replace(&mut self.resumed, true) { Verdict::Resume } else { Verdict::Well }
    }

    fn judge_worker(&mut self, number: usize, worker: &Worker, at: u64) -> Verdict {
        let Worker { rounds, used, .. } = *worker;
        let Some(still) = self.workers[number].as_mut().filter(|still| still.rounds == rounds) else {
            self.workers[number] = Some(Still { rounds, used, last_used: used, waits_since: None, starved: false });
            return Verdict::Well;
        };
        // Without a figure it is not known to stand still.
        let has_run = used.is_none() || still.last_used.is_none() || used > still.last_used;
        still.last_used = used.or(still.last_used);
        still.used = still.used.or(used);
        if worker.thread == Process::Runs && !has_run {
            // Also one that sleeps, as it says: it was woken, and does not come to say otherwise.
            still.waits_since = None;
            self.starved += u64::from(!core::mem::replace(&mut still.starved, true));
            if cfg!(feature = "sabotage-hasty-watchdog") {
                return Verdict::Hung(Cause::Stuck(number));
            }
            return Verdict::Starved;
        }
        still.starved = false;
        if worker.asleep {
            // What it uses to go to sleep and to wake up belongs to no round.
            (still.used, still.waits_since) = (used, None);
            return Verdict::Well;
        }
        let own = used.zip(still.used).map_or(0, |(used, before)| used.saturating_sub(before));
        if own >= self.limits.spinning {
            return Verdict::Hung(Cause::Spins(number));
        }
        if worker.thread != Process::Waits || has_run {
            still.waits_since = None;
            return Verdict::Well;
        }
        let since = *still.waits_since.get_or_insert(at);
        if at - since >= self.limits.stuck { Verdict::Hung(Cause::Stuck(number)) } else { Verdict::Well }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Process::{Runs, Stopped, Traced, Waits};

    const LIMITS: Limits = Limits::OF_NIC;
    /// Microseconds between two samples.
    const PACE: u64 = 50_000;

    fn uses(worker: &mut Worker, micros: u64) {
        worker.used = worker.used.map(|used| used + micros);
    }

    /// A process with one worker.
    struct Scene {
        watchdog: Watchdog,
        now: u64,
        process: Process,
        worker: Worker,
    }

    impl Scene {
        fn new() -> Scene {
            let worker = Worker { rounds: 1, asleep: false, thread: Runs, used: Some(0) };
            Scene { watchdog: Watchdog::new(LIMITS), now: 1_000_000, process: Waits, worker }
        }

        /// The next sample, this much late.
        fn sample(&mut self, late: u64) -> Verdict {
            let due = self.now + PACE;
            self.now = due + late;
            self.watchdog.judge(&Sample { at: self.now, due, process: self.process, workers: [self.worker].into() })
        }

        /// Samples on time for this long, before each of which `step` happens. The first verdict that is none of
        /// `Well`, and after how many microseconds.
        fn run(&mut self, micros: u64, mut step: impl FnMut(&mut Worker)) -> (Verdict, u64) {
            let begun = self.now;
            while self.now < begun + micros {
                step(&mut self.worker);
                let verdict = self.sample(0);
                if verdict != Verdict::Well {
                    return (verdict, self.now - begun);
                }
            }
            (Verdict::Well, micros)
        }
    }

    #[test]
    fn a_worker_that_makes_rounds_is_well_however_busy_it_is() {
        let mut scene = Scene::new();
        let busy =
            |worker: &mut Worker| (worker.rounds, worker.used) = (worker.rounds + 1, worker.used.map(|used| used + 49_000));
        assert_eq!(scene.run(10_000_000, busy).0, Verdict::Well);
        // One that polls has used more in its last round than the limit, all in all.
        assert_eq!(scene.run(10_000_000, |worker| worker.rounds += 1000).0, Verdict::Well);
    }

    #[test]
    fn an_endless_loop_is_found_by_its_own_processor_time() {
        let mut scene = Scene::new();
        scene.sample(0);
        let (verdict, after) = scene.run(10_000_000, |worker| uses(worker, 50_000));
        assert_eq!(verdict, Verdict::Hung(Cause::Spins(0)));
        assert_eq!(after, 100_000);
        // On a busy machine it takes longer, and so does the verdict.
        let mut scene = Scene::new();
        scene.sample(0);
        assert_eq!(scene.run(10_000_000, |worker| uses(worker, 1_000)), (Verdict::Hung(Cause::Spins(0)), 5_000_000));
        // Even if the observer is always late.
        let mut scene = Scene::new();
        let verdicts: Vec<Verdict> = (0..4)
            .map(|_| {
                uses(&mut scene.worker, 40_000);
                scene.sample(10 * LATE)
            })
            .collect();
        assert_eq!(verdicts[3], Verdict::Hung(Cause::Spins(0)));
    }

    #[test]
    fn a_worker_that_is_stuck_in_a_system_call_is_hung_and_one_that_sleeps_is_not() {
        let mut scene = Scene::new();
        scene.worker.thread = Waits;
        scene.sample(0);
        let (verdict, after) = scene.run(10_000_000, |_| ());
        assert_eq!(verdict, Verdict::Hung(Cause::Stuck(0)));
        assert!((LIMITS.stuck..=LIMITS.stuck + 2 * PACE).contains(&after), "{after}");
        let mut scene = Scene::new();
        (scene.worker.thread, scene.worker.asleep) = (Waits, true);
        assert_eq!(scene.run(100_000_000, |_| ()).0, Verdict::Well);
        // The processor time of sleeping and waking up is not that of a round.
        assert_eq!(scene.run(100_000_000, |worker| uses(worker, 60_000)).0, Verdict::Well);
    }

    #[test]
    fn what_gets_no_processor_is_counted_and_never_ended() {
        let mut scene = Scene::new();
        scene.sample(0);
        for _ in 0..1000 {
            assert_eq!(scene.sample(0), Verdict::Starved);
        }
        assert_eq!(scene.watchdog.starved(), 1);
        assert!(scene.watchdog.is_excused(scene.now, 1) && !scene.watchdog.is_excused(scene.now + 100, 100));
        scene.worker.rounds += 1;
        assert_eq!(scene.sample(0), Verdict::Well);
        // Woken, and has not run since.
        (scene.worker.asleep, scene.worker.thread) = (true, Runs);
        assert_eq!([scene.sample(0), scene.sample(0)], [Verdict::Starved; 2]);
        assert_eq!(scene.watchdog.starved(), 2);
        // A tenth of a processor: it runs now and then, and makes rounds.
        for number in 0..1000 {
            scene.worker = Worker { rounds: number / 3, asleep: false, thread: Runs, used: Some(5_000 * (number / 2)) };
            assert!(matches!(scene.sample(0), Verdict::Well | Verdict::Starved));
        }
    }

    #[test]
    fn a_stopped_process_is_hung_unless_its_observer_was_stopped_too() {
        let mut scene = Scene::new();
        scene.process = Stopped;
        scene.sample(0);
        assert_eq!(scene.run(10_000_000, |_| ()), (Verdict::Hung(Cause::Stopped), LIMITS.stopped));
        // Both are stopped for a second, together, and again.
        let mut scene = Scene::new();
        for _ in 0..100 {
            scene.process = Stopped;
            assert_eq!([scene.sample(0), scene.sample(1_000_000), scene.sample(0)], [Verdict::Well; 3]);
            scene.process = Runs;
            scene.worker.rounds += 1;
            assert_eq!(scene.sample(0), Verdict::Well);
        }
        // The same with a worker that is in a system call.
        let mut scene = Scene::new();
        scene.worker.thread = Waits;
        assert!((0..1000).all(|_| scene.sample(1_000_000) == Verdict::Well));
    }

    /// Whoever is late may have been stopped, too: that ends nothing, and does not keep it from resuming.
    #[test]
    fn a_stopped_process_is_resumed_once_before_it_is_ended() {
        for late in [0, 10 * LATE] {
            let mut scene = Scene::new();
            scene.watchdog = Watchdog::new(Limits { stopped: 2_000_000, resumed: Some(120_000), ..LIMITS });
            for _ in 0..3 {
                scene.process = Stopped;
                let verdicts: Vec<_> = (0..30).map(|_| scene.sample(late)).collect();
                let resumed = verdicts.iter().position(|verdict| *verdict == Verdict::Resume).expect("it is resumed");
                assert_eq!(resumed, if late == 0 { 3 } else { 1 });
                assert!(verdicts.iter().enumerate().all(|(at, verdict)| at == resumed || *verdict == Verdict::Well));
                // It goes on, and is stopped again later.
                scene.process = Waits;
                scene.worker.rounds += 1;
                assert_eq!(scene.sample(0), Verdict::Well);
            }
            // Somebody stops it again at once, each time.
            scene.process = Stopped;
            let verdicts: Vec<_> = (0..100).map(|_| scene.sample(late)).collect();
            assert_eq!(verdicts.iter().filter(|verdict| **verdict == Verdict::Resume).count(), 1);
            assert_eq!(verdicts.contains(&Verdict::Hung(Cause::Stopped)), late == 0);
        }
        // Who traces it may stop it.
        let mut scene = Scene::new();
        scene.watchdog = Watchdog::new(Limits { resumed: Some(0), ..LIMITS });
        scene.process = Traced;
        assert!((0..100).all(|_| scene.sample(0) == Verdict::Traced));
    }

    #[test]
    fn what_somebody_traces_is_never_ended() {
        let mut scene = Scene::new();
        scene.sample(0);
        (scene.process, scene.worker.thread) = (Traced, Traced);
        for _ in 0..1000 {
            uses(&mut scene.worker, 60_000);
            assert_eq!(scene.sample(0), Verdict::Traced);
        }
        // What it did meanwhile does not count afterwards.
        (scene.process, scene.worker.thread) = (Waits, Runs);
        assert_eq!(scene.sample(0), Verdict::Well);
    }

    #[test]
    fn each_worker_counts() {
        let mut watchdog = Watchdog::new(LIMITS);
        let verdicts: Vec<Verdict> = (1..10)
            .map(|at: u64| {
                let good = Worker { rounds: at, asleep: false, thread: Runs, used: Some(at * PACE) };
                let bad = Worker { rounds: 7, ..good };
                watchdog.judge(&Sample { at: at * PACE, due: at * PACE, process: Waits, workers: [good, bad].into() })
            })
            .collect();
        assert_eq!(verdicts[1..3], [Verdict::Well, Verdict::Hung(Cause::Spins(1))]);
    }

    /// A tracer, a late observer and a lack of processors, in any order, with a worker that is slow but not hung: it is
    /// not ended.
    #[test]
    fn no_mixture_of_excuses_is_hung() {
        let mut seed = 1u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        let mut scene = Scene::new();
        let mut own = 0;
        for _ in 0..200_000 {
            match random(5) {
                0 => (scene.process, scene.worker.thread) = (Traced, Traced),
                1 => (scene.process, scene.worker.thread) = (Stopped, Stopped),
                _ => (scene.process, scene.worker.thread) = (Waits, if random(2) == 0 { Runs } else { Waits }),
            }
            // It has used less than the limit since its last round.
            let step = random(30_000);
            uses(&mut scene.worker, step);
            own += step;
            if own >= 90_000 || random(10) == 0 {
                (scene.worker.rounds, own) = (scene.worker.rounds + 1, 0);
            }
            scene.worker.asleep = random(3) == 0;
            // It is never stopped for long while the observer is on time.
            let late = if scene.process == Stopped { LATE + 1 + random(1_000_000) } else { random(LATE) };
            let verdict = scene.sample(late);
            assert!(!matches!(verdict, Verdict::Hung(_)), "{verdict:?} {:?}", scene.worker);
        }
    }
}
