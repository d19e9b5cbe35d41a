//! What loads were measured to cost in both places of this machine: where a class of connections begins of which
//! nothing else is known. Loads are told apart by what a byte costs their program: bulk data costs little, requests
//! much.

use crate::pairs::EQUAL;
use alloc::vec::Vec;

/// As many loads are kept.
const MOST: usize = 32;
/// Loads are alike if a byte costs their programs the same but for this factor: they count as one.
const ALIKE: f64 = 1.4;
/// What a further measurement of a load counts for.
const FRESH: f64 = 0.3;

/// What was measured of a load.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Start {
    /// Nanoseconds of its program for a byte: in the kernel, and on the NIC.
    pub program: [f64; 2],
    /// All CPU time for a byte on the NIC, over the kernel's.
    pub cost: f64,
    /// Bytes a second on the NIC, over the kernel's.
    pub rate: f64,
}

impl Start {
    fn values(&mut self) -> [&mut f64; 4] {
        let [kernel, nic] = &mut self.program;
        [kernel, nic, &mut self.cost, &mut self.rate]
    }

    /// Whether the NIC is the better place: as trials decide that, but for the confidence.
    fn is_better_on_nic(&self) -> bool {
        let is_faster = self.rate > 1.0 + EQUAL && self.cost < 1.0 + EQUAL;
        self.cost < 1.0 - EQUAL && self.rate > 1.0 - EQUAL || is_faster
    }
}

/// By which factor two numbers differ.
fn factor(one: f64, other: f64) -> f64 {
    (one / other).max(other / one)
}

/// The loads that were measured.
#[derive(Clone, Default, Debug)]
pub struct Starts(Vec<Start>);

impl Starts {
    /// Those that were measured before, by this agent or another one.
    pub fn new(measured: impl IntoIterator<Item = Start>) -> Starts {
        let mut starts = Starts::default();
        measured.into_iter().for_each(|start| starts.note(start));
        starts
    }

    /// All of them, the one that was measured last at the end.
    pub fn all(&self) -> &[Start] {
        &self.0
    }

    /// Adds what was measured of a load, or renews what is known of one like it. Figures that make no sense are
    /// ignored.
    pub fn note(&mut self, mut measured: Start) {
        if measured.values().iter().any(|value| !value.is_finite() || **value <= 0.0) {
            return;
        }
        if let Some(at) = self.nearest(0, measured.program[0]) {
            let mut known = self.0.remove(at);
            for (known, measured) in known.values().into_iter().zip(measured.values()) {
                *measured = FRESH * *measured + (1.0 - FRESH) * *known;
            }
        } else if self.0.len() >= MOST {
            self.0.remove(0);
        }
        self.0.push(measured);
    }

    /// Whether a load belongs on the NIC, of which a byte costs the program so many nanoseconds in one place (0: the
    /// kernel, 1: the NIC). None if nothing like it was measured.
    pub fn belongs_on_nic(&self, place: usize, program: f64) -> Option<bool> {
        self.nearest(place, program).map(|at| self.0[at].is_better_on_nic())
    }

    fn nearest(&self, place: usize, program: f64) -> Option<usize> {
        let far = self.0.iter().map(|start| factor(start.program[place], program));
        let alike = far.enumerate().filter(|(_, factor)| *factor < ALIKE);
        alike.min_by(|(_, one), (_, other)| one.total_cmp(other)).map(|(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BULK: Start = Start { program: [0.4, 0.2], cost: 1.2, rate: 0.8 };
    const REQUESTS: Start = Start { program: [20.0, 10.0], cost: 0.7, rate: 1.1 };

    #[test]
    fn a_load_begins_where_one_like_it_belongs() {
        let starts = Starts::new([BULK, REQUESTS]);
        let answers = [0.1, 0.3, 0.5, 2.0, 17.0, 25.0, 40.0].map(|program| starts.belongs_on_nic(0, program));
        assert_eq!(answers, [None, Some(false), Some(false), None, Some(true), Some(true), None]);
        assert_eq!([0.2, 10.0].map(|program| starts.belongs_on_nic(1, program)), [Some(false), Some(true)]);
        assert_eq!(Starts::default().belongs_on_nic(0, 1.0), None);
    }

    #[test]
    fn what_is_neither_cheaper_nor_faster_stays_in_the_kernel() {
        let of = |cost, rate| Start { cost, rate, ..BULK }.is_better_on_nic();
        assert!(of(0.9, 1.0) && of(1.0, 1.1) && of(0.9, 0.98));
        assert!(!of(1.0, 1.0) && !of(0.8, 0.9) && !of(1.1, 1.2));
    }

    #[test]
    fn a_load_that_is_measured_again_is_renewed() {
        let mut starts = Starts::new([BULK, REQUESTS]);
        for _ in 0..20 {
            starts.note(Start { program: [0.45, 0.2], cost: 0.6, rate: 1.2 });
        }
        assert_eq!(starts.all().len(), 2);
        assert_eq!(starts.belongs_on_nic(0, 0.45), Some(true));
    }

    #[test]
    fn few_are_kept_and_nonsense_is_not() {
        let mut program = 0.001;
        let mut starts = Starts::new((0..40).map(|_| {
            program *= 2.0;
            Start { program: [program, 1.0], ..BULK }
        }));
        assert_eq!(starts.all().len(), MOST);
        let wrong = [f64::NAN, f64::INFINITY, 0.0, -1.0];
        wrong.into_iter().for_each(|cost| starts.note(Start { program: [1e30, 1.0], cost, rate: 1.0 }));
        assert_eq!(starts.belongs_on_nic(0, 1e30), None);
    }
}
