//! Active acknowledgements: their memory, and their place in the worker.

use crate::counters::Counters;
use crate::delivery;
use crate::worker::Worker;
use baton_abi::layout::{Counter, nic};
use baton_active_ack::{Active, ENTRY_BYTES, Entry, Store};
use baton_device::Device;
use baton_ring::Region;
use baton_tcp::Instant;
use baton_wire::Name;
use core::sync::atomic::Ordering;
use std::sync::Arc;

const _: () = assert!(nic::ACKNOWLEDGED_BYTES == ENTRY_BYTES);

/// The places in NIC memory.
pub(crate) struct Places {
    memory: Arc<Region>,
    base: usize,
}

/// Places that a worker has to begin with. What another NIC has left is the first one's, as every bucket is then: it goes to its owner with
/// its bucket. To be asked of all workers before any of them runs.
fn share(places: &Places, worker: usize, workers: usize) -> Vec<usize> {
    let of = |worker: usize| worker * nic::ACKNOWLEDGED / workers;
    let own = of(worker)..of(worker + 1);
    (0..nic::ACKNOWLEDGED)
        .filter(|place| {
            if worker == 0 { own.contains(place) || places.holds(*place) } else { own.contains(place) && !places.holds(*place) }
        })
        .collect()
}

impl Places {
    fn at(&self, place: usize, at: usize) -> usize {
        self.base + place * ENTRY_BYTES + at
    }
}

impl Store for Places {
    fn places(&self) -> usize {
        nic::ACKNOWLEDGED
    }

    fn write(&self, place: usize, at: usize, bytes: &[u8]) {
        // The layout lies inside the region: it has as many slots as the worker.
        let _ = self.memory.write(self.at(place, at), bytes);
    }

    fn read(&self, place: usize, at: usize, out: &mut [u8]) {
        let _ = self.memory.read(self.at(place, at), out);
    }

    fn publish(&self, place: usize, at: usize, word: u64) {
        self.memory.words(self.at(place, at), 1)[0].store(word, Ordering::Release);
    }
}

/// Counts what was done since.
fn count(active: &Active<Places>, counters: &Counters) {
    counters.set(Counter::Acknowledged, active.counters().sent);
    counters.set(Counter::GivenAgain, active.counters().again);
}

impl<H: Device, W: Device> Worker<H, W> {
    fn places(&self) -> Places {
        Places { memory: self.nic_memory.clone(), base: nic::acknowledged(self.slots.len()) }
    }

    /// Takes its places, and what another NIC has left in them.
    pub(crate) fn take_places(&mut self, worker: usize, workers: usize, now: Instant) {
        self.own_places = share(&self.places(), worker, workers);
        self.set_active_ack(self.settings.active_ack, now);
    }

    /// Acknowledges for the kernel from now on, or no longer. What another NIC has acknowledged is taken up in any case.
    pub(crate) fn set_active_ack(&mut self, on: bool, now: Instant) {
        if let Some(active) = &mut self.active {
            return active.set(on);
        }
        let places = self.places();
        if on || self.own_places.iter().any(|place| places.holds(*place)) {
            let active = Active::new(places, &self.own_places, self.settings.hash_key, on, now.0);
            self.active = Some(Box::new(active));
            self.wake_at(now.0);
        }
    }

    /// A frame from the wire that is the kernel's.
    pub(crate) fn acknowledge_actively(&mut self, now: Instant) {
        let Some(active) = &mut self.active else { return };
        let (output, counters) = (&mut self.output, &self.counters);
        active.from_wire(&self.frame, now.0, &mut |frame| output.forward(frame, counters));
        count(active, counters);
        let due = active.next_tick();
        self.wake_at(due);
    }

    /// A frame of the kernel's, before it goes to the wire.
    pub(crate) fn hear_kernels_acknowledgement(&mut self, now: Instant) {
        let Some(active) = &mut self.active else { return };
        let (host, counters) = (&mut self.host, &self.counters);
        active.from_kernel(&mut self.frame, now.0, &mut |frame| delivery::transmit(frame, host, counters));
        let due = active.next_tick();
        self.wake_at(due);
    }

    pub(crate) fn expire_acknowledgements(&mut self, now: Instant) {
        let Some(active) = &mut self.active else { return };
        let (host, output, counters) = (&mut self.host, &mut self.output, &self.counters);
        active
            .expire(now.0, &mut |frame| output.forward(frame, counters), &mut |frame| delivery::transmit(frame, host, counters));
        count(active, counters);
    }

    /// The connection is about to leave the kernel. False if that lacks something that its peer was told it had.
    pub(crate) fn end_active_ack(&mut self, name: &Name) -> bool {
        self.active.as_mut().is_none_or(|active| active.end(name))
    }

    /// Connections for another worker.
    pub(crate) fn take_acknowledged(&mut self, which: impl FnMut(&Entry) -> bool) -> Vec<Entry> {
        self.active.as_mut().map(|active| active.take(which)).unwrap_or_default()
    }

    /// Another worker's connections.
    pub(crate) fn adopt_acknowledged(&mut self, entries: Vec<Entry>, now: Instant) {
        if entries.is_empty() {
            return;
        }
        self.set_active_ack(true, now);
        if let Some(active) = &mut self.active {
            active.set(self.settings.active_ack);
            active.adopt(entries);
            let due = active.next_tick();
            self.wake_at(due);
        }
    }
}
