//! Pages of session memory that connections have left. What an ordinary connection leaves is soon used again, by it or
//! by another one, so its pages stay for a second before they are returned to the system.

use crate::agent::Agent;
use crate::looks::PERIOD;
use crate::session::OpenSession;
use baton_linux::events::monotonic_micros;
use std::collections::{BTreeMap, BTreeSet};

/// Time that the pages of a free block stay, in microseconds.
const PATIENCE: u64 = 1_000_000;
/// Blocks whose pages are returned in one period: the agent is busy for as long.
const MOST: usize = 128;
/// Of a block that is not free as a whole, no pieces smaller than this are returned, in bytes.
const LEAST: u32 = 1 << 16;

/// Blocks of a session's heap that were freed and may have pages: size by offset, and the time at which that happened.
#[derive(Default)]
pub(crate) struct Released(BTreeMap<u32, (u32, u64)>);

impl Released {
    /// Notes that a block was freed.
    pub fn note(&mut self, (offset, size): (u32, u32)) {
        self.0.insert(offset, (size, monotonic_micros()));
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes up to `most` blocks that were freed long enough before `now`.
    fn take_due(&mut self, most: usize, now: u64) -> Vec<(u32, u32)> {
        let is_due = |since: u64| now.saturating_sub(since) >= PATIENCE;
        let due = self.0.iter().filter(|(_, (_, since))| is_due(*since)).take(most);
        let due: Vec<(u32, u32)> = due.map(|(offset, (size, _))| (*offset, *size)).collect();
        for (offset, _) in &due {
            self.0.remove(offset);
        }
        due
    }
}

impl OpenSession {
    /// Returns the pages of a block to the system, or of those parts of it that are still free.
    fn return_free(&mut self, offset: u32, size: u32) {
        if self.heap.reserve(offset, size) {
            self.memory.discard(offset as usize, size as usize);
            self.heap.give(offset, size);
        } else if size > LEAST {
            self.return_free(offset, size / 2);
            self.return_free(offset + size / 2, size / 2);
        }
    }
}

/// The sessions that have such blocks, and the time at which these are looked at, in microseconds of the monotonic
/// clock; 0 while there are none.
#[derive(Default)]
pub(crate) struct Returns {
    sessions: BTreeSet<u32>,
    pub due: u64,
}

impl Returns {
    /// Notes that a session has such blocks.
    pub fn note(&mut self, session: u32) {
        self.sessions.insert(session);
        if self.due == 0 {
            self.due = monotonic_micros() + PATIENCE;
        }
    }
}

impl Agent {
    /// Returns the pages of blocks that have been free for long enough.
    pub(crate) fn return_released_pages(&mut self, now: u64) {
        let mut left = MOST;
        for session in std::mem::take(&mut self.looks.returns.sessions) {
            let entry = self.sessions.get_mut(session as usize).and_then(Option::as_mut);
            let Some(open) = entry.and_then(|entry| entry.open.as_mut()) else { continue };
            let due = open.released.take_due(left, now);
            left -= due.len();
            for (offset, size) in due {
                open.return_free(offset, size);
            }
            if !open.released.is_empty() {
                self.looks.returns.sessions.insert(session);
            }
        }
        self.looks.returns.due = if self.looks.returns.sessions.is_empty() { 0 } else { now + PERIOD };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_due_a_second_after_it_was_freed_last() {
        let mut released =
            Released(BTreeMap::from([(4096, (65_536, 0)), (1 << 20, (1 << 18, 5_000)), (1 << 21, (4096, 2_000_000))]));
        assert_eq!(released.take_due(8, PATIENCE - 1), []);
        assert_eq!(released.take_due(8, PATIENCE), [(4096, 65_536)]);
        assert_eq!(released.take_due(0, 2_000_000), []);
        assert_eq!(released.take_due(8, 2_000_000), [(1 << 20, 1 << 18)]);
        assert!(!released.is_empty());
    }
}
