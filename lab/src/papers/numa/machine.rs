//! Processor 0 of the paper's dual-core machine, its NIC, and a sender that fills the window, in virtual time. The real
//! moderation decides when the NIC interrupts; the two halves of an interrupt and the program share the processor.

use baton_moderation::{Mode, Moderator};
use baton_sim::Rng;
use std::collections::VecDeque;

/// The machine's numbers. Times in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// When the NIC interrupts.
    pub mode: Mode,
    /// The interrupt's first half (ISR).
    pub isr: f64,
    /// Its deferred half (DPC). The NIC is silent from the interrupt to its end.
    pub dpc: f64,
    /// The program's work for a frame.
    pub read: f64,
    /// Share of the processor that other processes, other devices' interrupts and the idle loop have.
    pub others: f64,
    /// A switch from one thread to another: two between two interrupts.
    pub switch: f64,
    /// Bytes of a frame.
    pub frame: f64,
    /// Bits per microsecond of the wire.
    pub link: f64,
    /// From an acknowledgement to the first frame that it releases, on the mean: between half and one and a half of it.
    pub round_trip: f64,
    /// Frames that an acknowledgement covers.
    pub per_ack: u32,
    /// Frames of a window.
    pub window: u32,
}

/// What the processor did, microseconds and counts.
#[derive(Clone, Copy, Default, Debug)]
pub struct Totals {
    /// Interrupts.
    pub interrupts: u64,
    /// Frames that the deferred halves have processed.
    pub frames: u64,
    /// Acknowledgements.
    pub acks: u64,
    /// Time of first halves.
    pub isr: f64,
    /// Time of deferred halves.
    pub dpc: f64,
    /// Time of the program.
    pub program: f64,
    /// Time of all others, switches included.
    pub others: f64,
}

impl Totals {
    /// What came since `before`.
    fn since(&self, before: &Totals) -> Totals {
        Totals {
            interrupts: self.interrupts - before.interrupts,
            frames: self.frames - before.frames,
            acks: self.acks - before.acks,
            isr: self.isr - before.isr,
            dpc: self.dpc - before.dpc,
            program: self.program - before.program,
            others: self.others - before.others,
        }
    }
}

/// The processor, the NIC and what is under way.
struct Machine {
    settings: Settings,
    moderator: Moderator,
    now: f64,
    /// When frames will reach the NIC.
    on_wire: VecDeque<f64>,
    /// Frames that wait for an interrupt, and those that wait for the program.
    queued: u64,
    readable: u64,
    /// Frames that the program has read and not acknowledged.
    unacknowledged: u32,
    /// Work of others that has come up, and has not been done.
    owed: f64,
    /// The same each time: it keeps sender and receiver out of step.
    random: Rng,
    totals: Totals,
}

impl Machine {
    fn new(settings: Settings) -> Machine {
        let mut machine = Machine {
            moderator: Moderator::new(settings.mode),
            now: 1.0,
            on_wire: VecDeque::new(),
            queued: 0,
            readable: 0,
            unacknowledged: 0,
            owed: 0.0,
            random: Rng::new(1),
            totals: Totals::default(),
            settings,
        };
        machine.send(settings.window);
        machine
    }

    /// The sender sends `frames` more: they come a round trip from now, or right behind those before them.
    fn send(&mut self, frames: u32) {
        let apart = self.settings.frame * 8.0 / self.settings.link;
        let turn = self.settings.round_trip * (0.5 + self.random.below(1000) as f64 / 1000.0);
        for _ in 0..frames {
            let first = self.now + turn;
            let at = self.on_wire.back().map_or(first, |last| first.max(last + apart));
            self.on_wire.push_back(at);
        }
    }

    /// Takes the frames that have come until now. Whether one of them asked for an interrupt.
    fn arrive(&mut self) -> bool {
        let mut signal = false;
        while let Some(at) = self.on_wire.front().copied().filter(|at| *at <= self.now) {
            self.on_wire.pop_front();
            self.queued += 1;
            signal |= self.moderator.queued(self.settings.frame as usize, at as u64);
        }
        signal
    }

    /// When the NIC interrupts at the earliest, if nothing more comes.
    fn due(&self) -> f64 {
        self.moderator.due().map_or(f64::INFINITY, |due| (due as f64).max(self.now))
    }

    /// Both halves of an interrupt. The deferred one processes what waited when it was raised.
    fn interrupt(&mut self) {
        let frames = std::mem::take(&mut self.queued);
        self.moderator.signalled(self.now as u64);
        self.now += self.settings.isr + self.settings.dpc;
        self.totals.interrupts += 1;
        self.totals.frames += frames;
        self.totals.isr += self.settings.isr;
        self.totals.dpc += self.settings.dpc;
        self.readable += frames;
    }

    /// Others and the program have the processor until the next interrupt. A frame that was half read is read on when
    /// the program has it again: the rest of its time is `left`.
    fn between(&mut self, left: &mut f64) {
        let mut ask = self.arrive();
        // A switch to the program, and one back; others' work of the whole time since the last interrupt.
        self.owed += 2.0 * self.settings.switch;
        loop {
            if ask || self.due() <= self.now {
                return;
            }
            let arrival = self.on_wire.front().copied().unwrap_or(f64::INFINITY);
            let until = arrival.min(self.due()).max(self.now);
            let (work, reading) = if self.owed > 0.0 {
                (self.owed, false)
            } else if self.readable > 0 {
                (*left, true)
            } else if until.is_finite() {
                // Nobody has anything to do.
                self.now = until;
                ask = self.arrive();
                continue;
            } else {
                return;
            };
            let spent = work.min(until - self.now);
            self.now += spent;
            if reading {
                self.totals.program += spent;
                *left -= spent;
                if *left <= 1e-9 {
                    *left = self.settings.read;
                    self.read();
                }
            } else {
                self.totals.others += spent;
                self.owed -= spent;
                if self.owed <= 1e-9 {
                    self.owed = 0.0;
                }
            }
            ask = self.arrive();
        }
    }

    /// The program has read a frame; it may be time for an acknowledgement, which opens the window.
    fn read(&mut self) {
        self.readable -= 1;
        self.unacknowledged += 1;
        if self.unacknowledged >= self.settings.per_ack {
            self.totals.acks += 1;
            let frames = std::mem::take(&mut self.unacknowledged);
            self.send(frames);
        }
    }
}

/// Runs for `seconds` after one that is not counted; the totals of each second.
pub fn run(settings: Settings, seconds: u32) -> Vec<Totals> {
    let mut machine = Machine::new(settings);
    let mut left = settings.read;
    let (mut all, mut before) = (Vec::new(), Totals::default());
    for second in 1..=seconds + 1 {
        while machine.now < f64::from(second) * 1e6 {
            let began = machine.now;
            machine.between(&mut left);
            machine.interrupt();
            machine.owed += settings.others * (machine.now - began);
        }
        if second > 1 {
            all.push(machine.totals.since(&before));
        }
        before = machine.totals;
    }
    all
}

/// The sum of some seconds.
pub fn sum(seconds: &[Totals]) -> Totals {
    seconds.iter().fold(Totals::default(), |sum, one| Totals {
        interrupts: sum.interrupts + one.interrupts,
        frames: sum.frames + one.frames,
        acks: sum.acks + one.acks,
        isr: sum.isr + one.isr,
        dpc: sum.dpc + one.dpc,
        program: sum.program + one.program,
        others: sum.others + one.others,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            mode: Mode::Static { time: 100, frames: 64 },
            isr: 3.0,
            dpc: 70.0,
            read: 10.0,
            others: 0.0,
            switch: 0.0,
            frame: 764.0,
            link: 1000.0,
            round_trip: 100.0,
            per_ack: 2,
            window: 85,
        }
    }

    /// Frames come back only as the program reads, so the queue cannot grow, and nobody waits while there is work.
    #[test]
    fn the_processor_is_never_idle_and_nothing_is_lost() {
        let seconds = run(settings(), 2);
        let all = sum(&seconds);
        let busy = all.isr + all.dpc + all.program + all.others;
        assert!((busy / 2e6 - 1.0).abs() < 0.01, "{all:?}");
        assert!(all.frames.abs_diff((all.program / 10.0) as u64) <= 85, "{all:?}");
        assert!(all.acks.abs_diff(all.frames / 2) <= 85, "{all:?}");
    }

    /// More delay: fewer interrupts, more frames for the program.
    #[test]
    fn delay_saves_interrupts() {
        let at = |time| sum(&run(Settings { mode: Mode::Static { time, frames: 64 }, ..settings() }, 1));
        let (short, long) = (at(80), at(200));
        assert!(long.interrupts < short.interrupts && long.frames > short.frames, "{short:?} {long:?}");
    }
}
