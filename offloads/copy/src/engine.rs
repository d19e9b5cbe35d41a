//! The queues, and the choice of the next frame.

use crate::Kind;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// How the workers share the engine.
#[derive(Clone, Copy, Debug)]
pub struct CopySettings {
    /// Bytes that a queue sends in its turn. At least the length of the largest frame, so that each turn is one frame
    /// or more.
    pub turn: usize,
    /// Most SYNs that are sent in a row while other frames wait, so that a flood of SYNs does not stop the other
    /// frames.
    pub set_ups: usize,
    /// Number of frames that a queue has room for.
    pub room: usize,
}

impl Default for CopySettings {
    fn default() -> Self {
        CopySettings { turn: 64 << 10, set_ups: 16, room: 256 }
    }
}

/// Counters of one worker's frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Frames sent.
    pub frames: u64,
    /// SYNs sent before frames that had waited longer.
    pub syns_first: u64,
}

/// A frame in a queue, and its number in the order of arrival.
struct QueuedFrame<T> {
    item: T,
    bytes: usize,
    number: u64,
}

/// The frames of one worker.
struct Queue<T> {
    /// SYNs, and the later frames of their connections.
    first: VecDeque<(u32, QueuedFrame<T>)>,
    /// All other frames.
    rest: VecDeque<QueuedFrame<T>>,
    /// Connections of the frames in `rest`, in the same order.
    connections: VecDeque<u32>,
    /// Bytes left of its turn.
    left: usize,
    counters: Counters,
}

impl<T> Queue<T> {
    fn new(room: usize) -> Queue<T> {
        Queue {
            first: VecDeque::with_capacity(room),
            rest: VecDeque::with_capacity(room),
            connections: VecDeque::with_capacity(room),
            left: 0,
            counters: Counters::default(),
        }
    }

    fn len(&self) -> usize {
        self.first.len() + self.rest.len()
    }

    /// Whether a frame goes before the frames in `rest`. No frame overtakes a waiting frame of its own connection.
    fn goes_first(&self, kind: Kind) -> bool {
        if kind.sets_up {
            !self.connections.contains(&kind.connection)
        } else {
            kind.connection != 0 && self.first.iter().any(|(connection, _)| *connection == kind.connection)
        }
    }
}

/// The copy engine: takes frames from each worker, and chooses the next one to send.
pub struct Engine<T> {
    settings: CopySettings,
    queues: Vec<Queue<T>>,
    /// The queue whose turn it is for SYNs, and for all other frames.
    first_turn: usize,
    turn: usize,
    set_ups_in_row: usize,
    waiting: usize,
    pushed: u64,
}

impl<T> Engine<T> {
    /// Makes an engine for `workers` workers, with all its memory.
    pub fn new(workers: usize, settings: CopySettings) -> Engine<T> {
        let queues = (0..workers).map(|_| Queue::new(settings.room)).collect();
        Engine { settings, queues, first_turn: 0, turn: 0, set_ups_in_row: 0, waiting: 0, pushed: 0 }
    }

    /// Whether a worker's queue has room for another frame.
    pub fn has_room(&self, worker: usize) -> bool {
        self.queues[worker].len() < self.settings.room
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// The counters of a worker's frames.
    pub fn counters(&self, worker: usize) -> Counters {
        self.queues[worker].counters
    }

    /// Queues a worker's frame of `bytes` bytes.
    ///
    /// # Errors
    /// The frame, if the worker's queue is full.
    pub fn push(&mut self, worker: usize, item: T, bytes: usize, kind: Kind) -> Result<(), T> {
        if !self.has_room(worker) {
            return Err(item);
        }
        let queue = &mut self.queues[worker];
        self.pushed += 1;
        let entry = QueuedFrame { item, bytes, number: self.pushed };
        if queue.goes_first(kind) {
            queue.first.push_back((kind.connection, entry));
        } else {
            queue.rest.push_back(entry);
            queue.connections.push_back(kind.connection);
        }
        self.waiting += 1;
        Ok(())
    }

    /// Takes the next frame to be sent, with its worker's number.
    pub fn pop(&mut self) -> Option<(usize, T)> {
        if self.waiting == 0 {
            return None;
        }
        let next = if self.set_ups_in_row < self.settings.set_ups {
            self.pop_first().or_else(|| self.pop_rest())
        } else {
            self.pop_rest().or_else(|| self.pop_first())
        };
        self.waiting -= usize::from(next.is_some());
        next
    }

    fn pop_first(&mut self) -> Option<(usize, T)> {
        let count = self.queues.len();
        let worker = (0..count).map(|step| (self.first_turn + step) % count).find(|at| !self.queues[*at].first.is_empty())?;
        self.first_turn = (worker + 1) % count;
        let (_, entry) = self.queues[worker].first.pop_front()?;
        let overtakes = self.queues.iter().any(|queue| queue.rest.front().is_some_and(|older| older.number < entry.number));
        self.set_ups_in_row += 1;
        let counters = &mut self.queues[worker].counters;
        counters.frames += 1;
        counters.syns_first += u64::from(overtakes);
        Some((worker, entry.item))
    }

    fn pop_rest(&mut self) -> Option<(usize, T)> {
        self.set_ups_in_row = 0;
        // In one round every queue that has frames gets a turn, which covers one frame at least.
        for _ in 0..=self.queues.len() {
            let count = self.queues.len();
            let queue = &mut self.queues[self.turn];
            match queue.rest.front() {
                Some(entry) if entry.bytes <= queue.left => {
                    queue.left -= entry.bytes;
                    queue.counters.frames += 1;
                    queue.connections.pop_front();
                    return queue.rest.pop_front().map(|entry| (self.turn, entry.item));
                }
                // An empty queue does not save up bytes for later turns.
                None => queue.left = 0,
                Some(_) => {}
            }
            self.turn = (self.turn + 1) % count;
            let next = &mut self.queues[self.turn];
            if let Some(entry) = next.rest.front() {
                next.left = (next.left + self.settings.turn).max(entry.bytes);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    const DATA: Kind = Kind { sets_up: false, connection: 1 };

    fn data(connection: u32) -> Kind {
        Kind { sets_up: false, connection }
    }

    fn syn(connection: u32) -> Kind {
        Kind { sets_up: true, connection }
    }

    fn drain<T>(engine: &mut Engine<T>) -> Vec<(usize, T)> {
        core::iter::from_fn(|| engine.pop()).collect()
    }

    #[test]
    fn queues_take_turns_by_bytes() {
        let mut engine = Engine::new(3, CopySettings { turn: 3000, ..CopySettings::default() });
        for number in 0..30 {
            engine.push(0, number, 1500, DATA).unwrap();
            engine.push(2, number, 500, DATA).unwrap();
        }
        let first: Vec<_> = (0..24).filter_map(|_| engine.pop()).map(|(worker, _)| worker).collect();
        let of = |worker| first.iter().filter(|at| **at == worker).count();
        assert_eq!((of(0), of(2)), (6, 18), "three small ones for each large one: {first:?}");
        let numbers: Vec<_> =
            drain(&mut engine).into_iter().filter(|(worker, _)| *worker == 0).map(|(_, number)| number).collect();
        assert!(numbers.is_sorted(), "first in, first out");
        assert!(engine.is_empty());
    }

    #[test]
    fn a_frame_larger_than_a_turn_goes_in_its_turn() {
        let mut engine = Engine::new(2, CopySettings { turn: 100, ..CopySettings::default() });
        engine.push(0, 'a', 60_000, DATA).unwrap();
        engine.push(1, 'b', 60_000, DATA).unwrap();
        assert_eq!(drain(&mut engine).len(), 2);
    }

    #[test]
    fn set_ups_go_first_but_not_for_ever() {
        let mut engine = Engine::new(2, CopySettings { set_ups: 4, ..CopySettings::default() });
        for number in 0..20 {
            engine.push(0, "data", 1500, data(1)).unwrap();
            engine.push(1, "set-up", 74, syn(100 + number)).unwrap();
        }
        let order: Vec<_> = drain(&mut engine).into_iter().map(|(_, what)| what).collect();
        let expected: Vec<_> = (0..20).map(|at| if at % 5 == 4 { "data" } else { "set-up" }).collect();
        assert_eq!(order[..20], expected, "four to one");
        assert_eq!(engine.counters(1).syns_first, 20);
    }

    #[test]
    fn nothing_overtakes_its_own_connection() {
        let mut engine = Engine::new(1, CopySettings::default());
        // The last segment of an old connection, and the first of a new one with the same 4-tuple, with data at once.
        for (number, kind) in [(0, data(7)), (1, data(8)), (2, syn(7)), (3, syn(9)), (4, data(9)), (5, data(7))].into_iter() {
            engine.push(0, number, 100, kind).unwrap();
        }
        let order: Vec<_> = drain(&mut engine).into_iter().map(|(_, number)| number).collect();
        assert_eq!(order, vec![3, 4, 0, 1, 2, 5]);
    }

    #[test]
    fn a_full_queue_says_so() {
        let mut engine = Engine::new(2, CopySettings { room: 2, ..CopySettings::default() });
        engine.push(0, 'a', 1, DATA).unwrap();
        engine.push(0, 'b', 1, syn(3)).unwrap();
        assert_eq!(engine.push(0, 'c', 1, DATA), Err('c'));
        assert!(engine.has_room(1));
    }
}
