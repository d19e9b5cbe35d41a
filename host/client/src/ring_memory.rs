//! The memory of datagram rings. A NIC that is slow may use rings for longer than the program. So memory that the
//! program gives up is free only when the agent has recorded that no NIC uses it ([`datagrams::HELD`]).

use crate::heap::Heap;
use baton_abi::layout::{datagrams, session};
use baton_datagrams::Place;
use baton_shm::Region;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most rings that were given up and may still be used by a NIC. Above that, further sockets get no rings and stay in
/// the kernel. Each takes a third of a MiB at least.
const MOST_AWAITED: usize = 64;

/// The source of rings: a session's heap.
#[derive(Clone, Debug)]
pub(crate) struct RingMemory {
    memory: Arc<Region>,
    heap: Arc<Mutex<Heap>>,
    /// Rings that the program has given up and a NIC may use.
    awaited: Arc<Mutex<Vec<Place>>>,
}

/// Rings in session memory. After the drop they return to the heap as soon as no NIC uses them.
#[derive(Debug)]
pub(crate) struct RingBlock {
    source: RingMemory,
    place: Place,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn out_of_memory() -> io::Error {
    io::ErrorKind::OutOfMemory.into()
}

impl RingMemory {
    /// The source of a session's rings.
    pub fn new(memory: &Arc<Region>, heap: &Arc<Mutex<Heap>>) -> RingMemory {
        RingMemory { memory: memory.clone(), heap: heap.clone(), awaited: Arc::default() }
    }

    /// Takes memory for rings of these sizes in bytes, and clears the words in front of them.
    ///
    /// # Errors
    /// `OutOfMemory` if there is none, or too many rings that were given up may be used by a NIC still.
    pub fn take(&self, receive: u32, send: u32) -> io::Result<RingBlock> {
        if self.reclaim() >= MOST_AWAITED {
            return Err(out_of_memory());
        }
        let mut place = Place { base: 0, receive, send };
        (place.base, _) = locked(&self.heap).take(place.bytes()).ok_or_else(out_of_memory)?;
        if self.memory.write(place.base as usize, &[0; datagrams::BYTES]).is_err() {
            self.give(&place);
            return Err(out_of_memory());
        }
        Ok(RingBlock { source: self.clone(), place })
    }

    fn give(&self, place: &Place) {
        locked(&self.heap).give(place.base, place.bytes().next_power_of_two());
    }

    /// Whether a NIC may use these rings. No NIC uses the rings of an agent that has died, since its NIC has ended,
    /// too.
    fn is_held(&self, place: &Place) -> bool {
        let load = |word: usize| self.memory.word32(word).load(Ordering::Acquire);
        load(place.base as usize + datagrams::HELD) == datagrams::held(load(session::AGENT_STARTS))
    }

    /// Returns rings to the heap that no NIC uses any more. Returns how many are left.
    fn reclaim(&self) -> usize {
        let mut awaited = locked(&self.awaited);
        awaited.retain(|place| {
            let held = self.is_held(place);
            if !held {
                self.give(place);
            }
            held
        });
        awaited.len()
    }
}

impl RingBlock {
    /// Where they are.
    pub fn place(&self) -> &Place {
        &self.place
    }
}

impl Drop for RingBlock {
    fn drop(&mut self) {
        locked(&self.source.awaited).push(self.place);
        self.source.reclaim();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source() -> RingMemory {
        let memory = Arc::new(Region::private(session::HEAP + (64 << 20)).expect("memory"));
        let heap = Heap::new(session::heap_end(memory.len()), memory.len());
        RingMemory::new(&memory, &Arc::new(Mutex::new(heap)))
    }

    fn free(source: &RingMemory) -> u64 {
        locked(&source.heap).free_bytes()
    }

    fn starts(source: &RingMemory) -> u32 {
        source.memory.word32(session::AGENT_STARTS).load(Ordering::Acquire)
    }

    fn set_held(source: &RingMemory, base: u32, held: u32) {
        source.memory.word32(base as usize + datagrams::HELD).store(held, Ordering::Release);
    }

    /// Takes rings, lets a NIC have them, and gives them up.
    fn give_up(source: &RingMemory) -> io::Result<u32> {
        let block = source.take(4096, 4096)?;
        set_held(source, block.place().base, datagrams::held(starts(source)));
        Ok(block.place().base)
    }

    #[test]
    fn rings_wait_for_their_nic() {
        let source = source();
        let all = free(&source);
        drop(source.take(4096, 4096).expect("rings"));
        assert_eq!(free(&source), all, "no NIC has had them");
        let base = give_up(&source).expect("rings");
        assert_eq!((source.reclaim(), free(&source)), (1, all - 16384));
        set_held(&source, base, 0);
        assert_eq!((source.reclaim(), free(&source)), (0, all));
    }

    #[test]
    fn only_so_many_wait() {
        let source = source();
        let all = free(&source);
        let bases: Vec<u32> = (0..MOST_AWAITED).map(|_| give_up(&source).expect("rings")).collect();
        let refused = source.take(4096, 4096).expect_err("too many wait");
        assert_eq!(refused.kind(), io::ErrorKind::OutOfMemory);
        set_held(&source, bases[7], 0);
        let next = source.take(4096, 4096).expect("one waits no more");
        bases.iter().for_each(|base| set_held(&source, *base, 0));
        drop(next);
        assert_eq!(free(&source), all);
    }

    #[test]
    fn the_next_agent_has_no_nic_of_the_last_one() {
        let source = source();
        let all = free(&source);
        give_up(&source).expect("rings");
        source.memory.word32(session::AGENT_STARTS).fetch_add(1, Ordering::AcqRel);
        assert_eq!((source.reclaim(), free(&source)), (0, all));
        give_up(&source).expect("rings");
        assert_eq!(source.reclaim(), 1, "its own NIC has them");
    }
}
