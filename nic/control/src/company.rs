//! Chooses the processor of a worker that was not given one: that of the program that it wakes, if that pays.
//!
//! Waking a program on another processor is expensive, above all in a virtual machine, where it takes an interrupt that
//! exits the machine. But a program that keeps a processor busy needs it for itself. The worker finds out by trying
//! which of the two counts more: it moves to the processor of the program that it wakes most often, and goes back if it
//! does not handle more frames there. It is moved, not bound: the kernel may wake the program on an idle processor at
//! any time.

/// Microseconds over which frames are counted before and after a move. A move that does not pay delays frames, so it is
/// tried for a short time.
const PERIOD: u64 = 20_000;
const TRYING_PERIOD: u64 = 10_000;
/// For how long a move that has paid is repeated at once if the kernel moves worker or program apart, and the worker's
/// interval of checks meanwhile.
const PAYS_FOR: u64 = 2_000_000;
const PAYING_PERIOD: u64 = 5_000;
/// Microseconds until the next try after one that has not paid: the first value, and the largest. Each failure doubles
/// the pause.
const LEAST_PAUSE: u64 = 1_000_000;
const MOST_PAUSE: u64 = 64_000_000;
/// Wakes per second from which on a move is tried.
const OFTEN: u64 = 1_500;
/// A move pays if the rate of frames grows by more than one part in this many.
const MORE: u64 = 32;

#[derive(Clone, Copy, Debug)]
enum State {
    /// The worker counts on which processors programs run.
    Looking,
    /// It has moved away from processor `home`, where it handled `before` frames per second.
    Trying { home: usize, before: u64 },
    /// The move has paid.
    Paying { until: u64 },
}

/// On which processors the programs ran that a worker has woken. Times are in microseconds.
#[derive(Debug)]
pub(crate) struct Company {
    state: State,
    /// Wakes since the last look, for each processor.
    wakes: Vec<u32>,
    /// When the last look was, and the number of frames then.
    looked: u64,
    frames: u64,
    pause: u64,
    next_try: u64,
}

impl Company {
    /// For processors with numbers below `processors`.
    pub fn new(processors: usize) -> Company {
        let wakes = vec![0; processors];
        Company { state: State::Looking, wakes, looked: 0, frames: 0, pause: LEAST_PAUSE, next_try: 0 }
    }

    /// Counts a wake at `now` of a program that says it ran on `processor`. `frames` is the number of frames that the
    /// worker has handled so far. Returns the processor to which the worker, which runs on `mine`, should move. Numbers
    /// of processors that there are not do not count.
    pub fn woke(&mut self, processor: usize, mine: usize, frames: u64, now: u64) -> Option<usize> {
        *self.wakes.get_mut(processor)? += 1;
        let passed = now.saturating_sub(self.looked);
        let period = match self.state {
            State::Looking => PERIOD,
            State::Trying { .. } => TRYING_PERIOD,
            State::Paying { .. } => PAYING_PERIOD,
        };
        if passed < period {
            return None;
        }
        let rate = frames.wrapping_sub(self.frames).saturating_mul(1_000_000) / passed;
        let apart = self.most_woken(passed).filter(|most| *most != mine);
        self.wakes.fill(0);
        (self.looked, self.frames) = (now, frames);
        if passed > 2 * PERIOD {
            // After a pause the count says nothing about the rate.
            self.state = State::Looking;
            return None;
        }
        match self.state {
            State::Looking => {
                let to = apart.filter(|_| now >= self.next_try)?;
                self.state = State::Trying { home: mine, before: rate };
                Some(to)
            }
            State::Trying { before, .. } if rate > before + before / MORE => {
                (self.state, self.pause) = (State::Paying { until: now + PAYS_FOR }, LEAST_PAUSE);
                None
            }
            State::Trying { home, .. } => {
                (self.state, self.next_try) = (State::Looking, now + self.pause);
                self.pause = (2 * self.pause).min(MOST_PAUSE);
                Some(home).filter(|home| *home != mine)
            }
            State::Paying { until } if now >= until => {
                self.state = State::Looking;
                None
            }
            State::Paying { .. } => apart,
        }
    }

    /// The processor on which at least three of four woken programs ran, of those woken in the `passed` microseconds
    /// since the last look, if there were enough wakes.
    fn most_woken(&self, passed: u64) -> Option<usize> {
        let all: u64 = self.wakes.iter().map(|wakes| u64::from(*wakes)).sum();
        let (most, wakes) = self.wakes.iter().copied().enumerate().max_by_key(|(_, wakes)| *wakes)?;
        (all * 1_000_000 >= OFTEN * passed && 4 * u64::from(wakes) >= 3 * all).then_some(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The moves of a worker in ten seconds in which it wakes a program every `interval` microseconds, on the
    /// processors that `ran` gives for each wake and the worker's processor. With a program on its own processor it
    /// handles `together` frames for each wake, otherwise 100. It begins on processor 0. Also how much of the time it
    /// ran there.
    fn moves(interval: usize, together: u64, ran: impl Fn(usize, usize) -> usize) -> (Vec<usize>, f64) {
        let (mut company, mut mine, mut moves, mut frames, mut at_home) = (Company::new(4), 0, Vec::new(), 0, 0);
        let times = (1_000_000..11_000_000).step_by(interval);
        for now in times.clone() {
            let program = ran(now / interval, mine);
            frames += if program == mine { together } else { 100 };
            at_home += usize::from(mine == 0);
            if let Some(to) = company.woke(program, mine, frames, now as u64) {
                mine = to;
                moves.push(to);
            }
        }
        (moves, at_home as f64 / times.len() as f64)
    }

    #[test]
    fn it_goes_where_it_wakes_programs_and_stays() {
        assert_eq!(moves(50, 110, |_, _| 3).0, [3]);
        assert_eq!(moves(50, 110, |_, _| 0).0, []);
    }

    #[test]
    fn a_move_that_does_not_pay_is_taken_back_and_tried_less_and_less() {
        for together in [80, 100, 102] {
            let (moves, at_home) = moves(50, together, |_, _| 3);
            // After 0, 1, 3 and 7 seconds.
            assert_eq!(moves, [3, 0].repeat(4));
            assert!(at_home > 0.995, "{at_home}");
        }
    }

    #[test]
    fn where_it_pays_it_follows_the_program() {
        // The kernel wakes the program on the next processor after each 1000 wakes, 50 ms.
        let (moves, _) = moves(50, 110, |count, _| count / 1000 % 4);
        assert!(moves.len() > 150, "{}", moves.len());
    }

    #[test]
    fn it_stays_for_few_wakes_several_programs_and_nonsense() {
        assert_eq!(moves(2000, 110, |_, _| 3).0, []);
        assert_eq!(moves(50, 110, |count, _| count % 4).0, []);
        assert_eq!(moves(50, 110, |_, _| 4).0, []);
    }
}
