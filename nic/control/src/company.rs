//! Which processor a worker runs on that was not given one: that of the program that it wakes.
//!
//! To wake a program on another processor is dear, above all in a virtual machine, where it takes an interrupt that leaves the machine.
//! So the worker moves to the processor of the program that it wakes most often. It is not bound to it: where another processor is
//! idle the kernel wakes the program there, as it should. Then the worker tries less and less often.

/// Microseconds between two looks: at first, and at most. Each look after which the worker has to move doubles them.
const LEAST_PAUSE: u64 = 5_000;
const MOST_PAUSE: u64 = 1_280_000;
/// Wakes a second that are a reason to move.
const OFTEN: u64 = 1_000;

/// Where the programs ran that a worker has woken. Times are in microseconds.
#[derive(Debug)]
pub(crate) struct Company {
    /// Wakes since the last look, for each processor.
    wakes: Vec<u32>,
    /// When the last look was, and how long after it the next one is.
    looked: u64,
    pause: u64,
}

impl Company {
    /// For processors with numbers below `processors`.
    pub fn new(processors: usize) -> Company {
        Company { wakes: vec![0; processors], looked: 0, pause: LEAST_PAUSE }
    }

    /// Counts a wake at `now` of a program that says it ran on `processor`. Returns the processor to which the worker, which runs on
    /// `mine`, should move: where at least three of four such programs ran. Wakes on other numbers than there are do not count.
    pub fn woke(&mut self, processor: usize, mine: usize, now: u64) -> Option<usize> {
        *self.wakes.get_mut(processor)? += 1;
        let passed = now.saturating_sub(self.looked);
        if passed < self.pause {
            return None;
        }
        let all: u64 = self.wakes.iter().map(|wakes| u64::from(*wakes)).sum();
        let (most, wakes) = self.wakes.iter().copied().enumerate().max_by_key(|(_, wakes)| *wakes)?;
        let moves = most != mine && all * 1_000_000 >= OFTEN * passed && 4 * u64::from(wakes) >= 3 * all;
        self.wakes.fill(0);
        self.looked = now;
        self.pause = if moves { (2 * self.pause).min(MOST_PAUSE) } else { LEAST_PAUSE };
        moves.then_some(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The moves of a worker in a second in which it wakes a program every `interval` microseconds, on the processors that `ran`
    /// gives for each wake and the worker's processor. It begins on processor 0.
    fn moves(interval: usize, ran: impl Fn(usize, usize) -> usize) -> Vec<usize> {
        let (mut company, mut mine, mut moves) = (Company::new(4), 0, Vec::new());
        for now in (1_000_000..2_000_000).step_by(interval) {
            if let Some(to) = company.woke(ran(now / interval, mine), mine, now as u64) {
                mine = to;
                moves.push(to);
            }
        }
        moves
    }

    #[test]
    fn it_goes_where_it_wakes_programs_and_stays() {
        assert_eq!(moves(50, |_, _| 3), [3]);
        assert_eq!(moves(50, |_, _| 0), []);
    }

    #[test]
    fn it_stays_for_few_wakes_several_programs_and_nonsense() {
        assert_eq!(moves(2000, |_, _| 3), []);
        assert_eq!(moves(50, |count, _| count % 4), []);
        assert_eq!(moves(50, |_, _| 4), []);
    }

    #[test]
    fn a_program_that_leaves_is_followed_less_and_less() {
        // After 5 ms, 10, 20 and so on: the eighth would be 1.3 seconds after the first.
        assert_eq!(moves(50, |_, mine| (mine + 1) % 4).len(), 7);
    }
}
