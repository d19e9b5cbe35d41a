//! How long connections keep away from a NIC that dies again and again, and which of them makes it die.
//!
//! Only deaths that the NIC has brought about itself count: what somebody has killed or stopped from outside does not
//! die of what it was given. After three in a minute the wait before connections go back doubles with each further one.
//! Connections that the NIC had at *each* of these deaths are suspects: they go back when the others are there, one at
//! a time. The suspect on trial goes first after the next death, so that it meets the NIC without the other suspects;
//! and if the NIC dies again, with no other suspect on it, that connection stays in the kernel.

use alloc::collections::{BTreeSet, VecDeque};

/// Microseconds within which deaths count together.
const PERIOD: u64 = 60_000_000;
/// Deaths in a period that make a loop.
const MANY: usize = 3;
/// Microseconds before connections go back to a NIC that does not die again and again.
pub const SHORTEST_WAIT: u64 = 50_000;
/// Most microseconds before they go back.
pub const LONGEST_WAIT: u64 = 60_000_000;
/// Least microseconds between the returns of two suspects, and before the first one's.
const TRIAL: u64 = 500_000;

/// The recent deaths of one NIC, and the connections that may be their cause, by numbers that are never used twice.
#[derive(Clone, Default, Debug)]
pub struct CrashLoop {
    /// Times of the deaths of the last period.
    deaths: VecDeque<u64>,
    /// Connections that the NIC had at each of those.
    suspects: BTreeSet<u64>,
    /// When connections may go back.
    open_at: u64,
    /// The suspect that went back last, and until when no other one goes.
    trial: Option<(u64, u64)>,
    /// The suspect that is to go first, and until when it is waited for.
    first: Option<(u64, u64)>,
    /// How often the wait has doubled.
    doublings: u32,
}

impl CrashLoop {
    /// The NIC has died at `now`. `by_itself`: nobody has killed or stopped it; `present`: what it had, or was about to
    /// get. Returns the connection of which it dies, if that is certain now.
    pub fn died(&mut self, now: u64, by_itself: bool, present: impl IntoIterator<Item = u64>) -> Option<u64> {
        self.forget_old(now);
        if !by_itself {
            self.open_at = self.open_at.max(now + self.wait());
            self.trial = None;
            return None;
        }
        let present: BTreeSet<u64> = present.into_iter().collect();
        self.suspects.retain(|suspect| present.contains(suspect));
        if self.suspects.is_empty() {
            // The first death, or an earlier one had another cause.
            self.suspects = present;
        }
        self.deaths.push_back(now);
        if self.deaths.len() > MANY {
            self.deaths.pop_front();
        }
        self.doublings = if self.is_loop() { self.doublings + 1 } else { 0 };
        self.open_at = now + self.wait();
        let tried = self.trial.take().map(|(suspect, _)| suspect).filter(|suspect| self.suspects.contains(suspect));
        self.first = None;
        if let (Some(tried), 1) = (tried, self.suspects.len()) {
            self.suspects.clear();
            return Some(tried);
        }
        self.first = tried.map(|suspect| (suspect, self.open_at + 2 * self.between_trials()));
        None
    }

    /// Until when this connection may not go to the NIC, microseconds: ask again then. None: it may at `now`, and goes.
    pub fn ask(&mut self, connection: u64, now: u64) -> Option<u64> {
        self.forget_old(now);
        if now < self.open_at {
            return Some(self.open_at);
        }
        if !self.is_loop() || !self.suspects.contains(&connection) {
            return None;
        }
        // The others go first.
        let begin = self.open_at + self.between_trials();
        match (self.trial, self.first) {
            _ if now < begin => Some(begin),
            // It may go again if it has not got there.
            (Some((on_trial, until)), _) if now < until && on_trial != connection => Some(until),
            (_, Some((first, until))) if now < until && first != connection => Some(until),
            _ => {
                self.trial = Some((connection, now + self.between_trials()));
                self.first = None;
                None
            }
        }
    }

    /// Whether the NIC dies again and again.
    pub fn is_loop(&self) -> bool {
        self.deaths.len() >= MANY
    }

    fn wait(&self) -> u64 {
        (SHORTEST_WAIT << self.doublings.min(16)).min(LONGEST_WAIT)
    }

    fn between_trials(&self) -> u64 {
        self.wait().max(TRIAL)
    }

    /// A NIC that has served connections for a period without dying is no suspect's victim. While connections wait it
    /// has not served them.
    fn forget_old(&mut self, now: u64) {
        let since = self.trial.map_or(self.open_at, |(_, until)| until.max(self.open_at));
        let over = self.deaths.back().is_none_or(|last| now >= last + PERIOD) && now >= since + PERIOD;
        if over {
            *self = CrashLoop { open_at: self.open_at, ..CrashLoop::default() };
        } else if self.doublings == 0 {
            while self.deaths.front().is_some_and(|first| now >= first + PERIOD) {
                self.deaths.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const SECOND: u64 = 1_000_000;

    /// A NIC with connections, one of which kills it some time after it has come. Returns the waits after each death,
    /// and what was convicted when.
    fn run(connections: u64, killer: u64, after: u64) -> (Vec<u64>, u64, u64) {
        let mut crash_loop = CrashLoop::default();
        let (mut there, mut now, mut waits) = (BTreeSet::new(), SECOND, Vec::new());
        let mut kills_at = None;
        while waits.len() < 100 {
            for connection in 0..connections {
                if !there.contains(&connection) && crash_loop.ask(connection, now).is_none() {
                    there.insert(connection);
                    if connection == killer {
                        kills_at = Some(now + after);
                    }
                }
            }
            if kills_at.is_some_and(|at| now >= at) {
                kills_at = None;
                if let Some(guilty) = crash_loop.died(now, true, core::mem::take(&mut there)) {
                    return (waits, guilty, now);
                }
                let Some(until) = crash_loop.ask(connections, now) else { panic!("nobody has to wait") };
                waits.push(until - now);
            }
            now += 5000;
        }
        panic!("nobody is convicted: {waits:?}");
    }

    #[test]
    fn a_connection_that_kills_the_nic_at_once_is_found_soon() {
        for (connections, killer) in [(1, 0), (8, 0), (8, 3), (8, 7), (64, 40)] {
            let (waits, guilty, now) = run(connections, killer, 0);
            assert_eq!(guilty, killer);
            assert!(waits.len() <= 5 && now < connections * SECOND + 4 * SECOND, "{waits:?} {now}");
        }
    }

    /// However long it takes to kill the NIC, no other connection is taken for it.
    #[test]
    fn a_connection_that_kills_the_nic_after_a_while_is_found() {
        for after in [SECOND / 10, SECOND, 3 * SECOND, 10 * SECOND, 20 * SECOND] {
            for killer in 0..4 {
                let (waits, guilty, _) = run(4, killer, after);
                assert_eq!(guilty, killer, "{after}: {waits:?}");
            }
        }
    }

    #[test]
    fn after_three_deaths_in_a_minute_the_wait_doubles_up_to_a_minute() {
        let mut crash_loop = CrashLoop::default();
        let mut now = SECOND;
        let waits: Vec<u64> = (0..16)
            .map(|_| {
                now += 10_000;
                crash_loop.died(now, true, []);
                let Some(until) = crash_loop.ask(1, now) else { panic!("it does not wait") };
                let wait = until - now;
                now = until;
                wait / 1000
            })
            .collect();
        assert_eq!(waits[..6], [50, 50, 100, 200, 400, 800]);
        assert_eq!(waits[10..], [25_600, 51_200, 60_000, 60_000, 60_000, 60_000]);
    }

    #[test]
    fn a_nic_that_is_killed_from_outside_is_in_no_loop() {
        let mut crash_loop = CrashLoop::default();
        for at in 1..100 {
            crash_loop.died(at * SECOND, false, 0..8);
            assert_eq!(crash_loop.ask(1, at * SECOND), Some(at * SECOND + SHORTEST_WAIT));
            assert_eq!(crash_loop.ask(1, at * SECOND + SHORTEST_WAIT), None);
        }
        assert!(!crash_loop.is_loop());
    }

    #[test]
    fn deaths_far_apart_are_no_loop_and_a_loop_ends() {
        let mut crash_loop = CrashLoop::default();
        for at in 1..10 {
            crash_loop.died(at * 25 * SECOND, true, [7]);
            crash_loop.forget_old(at * 25 * SECOND);
        }
        assert!(crash_loop.is_loop(), "three in 50 s");
        let mut crash_loop = CrashLoop::default();
        for at in 1..10 {
            crash_loop.died(at * 31 * SECOND, true, [7]);
            assert!(!crash_loop.is_loop(), "two in a minute");
        }
        for _ in 0..3 {
            crash_loop.died(400 * SECOND, true, [7]);
        }
        assert!(crash_loop.is_loop());
        assert_eq!(crash_loop.ask(7, 480 * SECOND), None);
        assert!(!crash_loop.is_loop(), "a minute without a death");
        crash_loop.died(481 * SECOND, true, [7]);
        assert_eq!(crash_loop.ask(7, 481 * SECOND), Some(481 * SECOND + SHORTEST_WAIT));
    }

    #[test]
    fn a_nic_that_dies_without_connections_makes_no_suspect() {
        let mut crash_loop = CrashLoop::default();
        for at in 1..6 {
            assert_eq!(crash_loop.died(at * SECOND, true, [1, 2].into_iter().filter(|_| at == 1)), None);
        }
        let late = 10 * SECOND;
        assert_eq!([1, 2].map(|connection| crash_loop.ask(connection, late)), [None; 2]);
    }
}
