//! Connections that their programs have closed and whose peers have acknowledged the FIN: those in FIN-WAIT-2 and
//! TIME-WAIT. They need neither a program's memory nor the agent. If the NIC dies they are forgotten, and the kernel
//! answers their peers with a RST.

use crate::listeners::Opening;
use baton_tables::Lookup;
use baton_tcp::{Instant, State};
use baton_wire::FlowKey;
use std::collections::VecDeque;

/// Most connections that wait here; above that, those that have waited longest are forgotten.
const MOST: usize = 4096;

/// Microseconds that a connection waits in FIN-WAIT-2 (Linux's tcp_fin_timeout), and in TIME-WAIT.
const PATIENCE: u64 = 60_000_000;

struct Entry {
    key: FlowKey,
    rest: Box<Opening>,
    /// When the entry is forgotten.
    until: u64,
}

/// The table of these connections.
pub(crate) struct Closed {
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    lookup: Lookup,
    /// Each entry once, with the time (microseconds) of its next check. Nearly in order of time, since all wait equally
    /// long.
    queue: VecDeque<(u64, u32)>,
    count: usize,
}

impl Closed {
    pub fn new(hash_key: [u64; 4]) -> Closed {
        let (entries, free, queue) = (Vec::new(), Vec::new(), VecDeque::new());
        Closed { entries, free, lookup: Lookup::new(MOST, hash_key), queue, count: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a connection in FIN-WAIT-2 or TIME-WAIT.
    pub fn add(&mut self, rest: Box<Opening>, now: Instant) {
        while self.queue.len() >= MOST {
            self.drop_first();
        }
        let (key, until) = (FlowKey::from(&rest.flow), now.0 + PATIENCE);
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.lookup.insert(&key, index);
        self.entries[index as usize] = Some(Entry { key, rest, until });
        self.queue.push_back((until, index));
        self.count += 1;
    }

    /// The connection that receives frames with this key.
    pub fn find(&self, frame: &FlowKey) -> Option<u32> {
        self.lookup.find(frame, |index| matches!(self.entries.get(index as usize), Some(Some(found)) if found.key.admits(frame)))
    }

    /// A connection some of whose frames a connection with this key would receive as well.
    pub fn overlapping(&self, key: &FlowKey) -> Option<u32> {
        self.lookup.find(key, |index| matches!(self.entries.get(index as usize), Some(Some(found)) if found.key.overlaps(key)))
    }

    pub fn get_mut(&mut self, index: u32) -> Option<&mut Opening> {
        self.entries.get_mut(index as usize)?.as_mut().map(|entry| &mut *entry.rest)
    }

    /// Starts an entry's wait again, since its peer has sent its FIN.
    pub fn wait_again(&mut self, index: u32, now: Instant) {
        if let Some(Some(entry)) = self.entries.get_mut(index as usize) {
            entry.until = now.0 + PATIENCE;
        }
    }

    /// Forgets a connection. Its index stays in the queue, and becomes free when the queue reaches it.
    pub fn remove(&mut self, index: u32) {
        let Some(entry) = self.entries.get_mut(index as usize).and_then(Option::take) else { return };
        let entries = &self.entries;
        let key_of = |other: u32| entries[other as usize].as_ref().map_or(entry.key, |found| found.key);
        self.lookup.remove(&entry.key, index, key_of);
        self.count -= 1;
    }

    fn drop_first(&mut self) {
        if let Some((_, index)) = self.queue.pop_front() {
            self.remove(index);
            self.free.push(index);
        }
    }

    /// When connections are to be looked at next, in microseconds; `u64::MAX` without any.
    pub fn due(&self) -> u64 {
        self.queue.front().map_or(u64::MAX, |(due, _)| *due)
    }

    /// Forgets the connections that have waited long enough.
    pub fn expire(&mut self, now: Instant) {
        while self.due() <= now.0 {
            let Some((_, index)) = self.queue.pop_front() else { return };
            match self.entries.get(index as usize) {
                Some(Some(entry)) if entry.until > now.0 => {
                    let until = entry.until;
                    self.queue.push_back((until, index));
                }
                _ => {
                    self.remove(index);
                    self.free.push(index);
                }
            }
        }
    }
}

/// Whether a connection in this state belongs into this table.
pub(crate) fn is_over(state: State) -> bool {
    matches!(state, State::FinWait2 | State::TimeWait)
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_tcp::{Config, Connection, Segment};
    use baton_wire::frame::Link;
    use baton_wire::{Endpoint, Flags, Flow};

    fn rest(port: u16) -> Box<Opening> {
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 9], port), device: 0 };
        let syn = Segment { seq: 7, flags: Flags::SYN, ..Segment::default() };
        let tcp = Connection::accept(Config::default(), &syn, 1, 0, Instant(1)).expect("a SYN");
        Box::new(Opening { tcp, flow, link: Link::default() })
    }

    fn key(port: u16) -> FlowKey {
        FlowKey::from(&rest(port).flow)
    }

    #[test]
    fn the_table_is_bounded_and_forgets() {
        let mut closed = Closed::new([1, 2, 3, 4]);
        for port in 0..MOST as u16 + 10 {
            closed.add(rest(port), Instant(u64::from(port)));
        }
        assert_eq!((closed.count, closed.entries.len()), (MOST, MOST));
        assert!(closed.find(&key(9)).is_none() && closed.find(&key(10)).is_some(), "the oldest have given way");
        let index = closed.find(&key(10)).expect("it");
        closed.wait_again(index, Instant(1_000_000));
        let removed = closed.find(&key(11)).expect("it");
        closed.remove(removed);
        assert!(closed.find(&key(11)).is_none());
        closed.expire(Instant(PATIENCE + MOST as u64 + 10));
        assert_eq!(closed.count, 1, "that which was made to wait again");
        assert!(closed.find(&key(10)).is_some());
        closed.expire(Instant(closed.due()));
        assert!(closed.is_empty() && closed.due() == u64::MAX && closed.free.len() == MOST);
    }
}
