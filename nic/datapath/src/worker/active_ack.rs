//! Active acknowledgements in the worker, and their buffers in NIC memory.

use super::Worker;
use crate::counters::Counters;
use crate::delivery;
use baton_abi::layout::{Counter, nic};
use baton_active_ack::{AckEntry, ActiveAck, ENTRY_BYTES, Store};
use baton_device::Device;
use baton_shm::Region;
use baton_tcp::Instant;
use baton_wire::FlowKey;
use core::sync::atomic::Ordering;
use std::sync::Arc;

const _: () = assert!(nic::ACKNOWLEDGED_BYTES == ENTRY_BYTES);

/// The active-acknowledgement buffers in NIC memory.
pub(super) struct AckBuffers {
    memory: Arc<Region>,
    base: usize,
}

/// The buffers that a worker begins with. Buffers in which an earlier NIC has left data go to worker 0, which owns
/// every bucket at first; their connections later move to other workers with their buckets. To be called for all
/// workers before any of them runs.
fn share(buffers: &AckBuffers, worker: usize, workers: usize) -> Vec<usize> {
    let of = |worker: usize| worker * nic::ACKNOWLEDGED / workers;
    let own = of(worker)..of(worker + 1);
    (0..nic::ACKNOWLEDGED)
        .filter(|buffer| {
            if worker == 0 {
                own.contains(buffer) || buffers.holds(*buffer)
            } else {
                own.contains(buffer) && !buffers.holds(*buffer)
            }
        })
        .collect()
}

impl AckBuffers {
    fn at(&self, buffer: usize, at: usize) -> usize {
        self.base + buffer * ENTRY_BYTES + at
    }
}

impl Store for AckBuffers {
    fn buffers(&self) -> usize {
        nic::ACKNOWLEDGED
    }

    fn write(&self, buffer: usize, at: usize, bytes: &[u8]) {
        // Cannot fail: the region was made with as many slots as the worker has, and the buffers follow them.
        let _ = self.memory.write(self.at(buffer, at), bytes);
    }

    fn read(&self, buffer: usize, at: usize, out: &mut [u8]) {
        let _ = self.memory.read(self.at(buffer, at), out);
    }

    fn publish(&self, buffer: usize, at: usize, word: u64) {
        self.memory.words(self.at(buffer, at), 1)[0].store(word, Ordering::Release);
    }
}

/// Updates the worker's counters.
fn count(active: &ActiveAck<AckBuffers>, counters: &Counters) {
    counters.set(Counter::Acknowledged, active.counters().sent);
    counters.set(Counter::Redelivered, active.counters().redelivered);
}

impl<H: Device, W: Device> Worker<H, W> {
    fn ack_buffers(&self) -> AckBuffers {
        AckBuffers { memory: self.nic_memory.clone(), base: nic::acknowledged(self.connections.slots.len()) }
    }

    /// Takes worker `worker`'s share of the buffers, with the data that an earlier NIC has left in them.
    pub(super) fn take_ack_buffers(&mut self, worker: usize, workers: usize, now: Instant) {
        self.to_kernel.ack_buffers = share(&self.ack_buffers(), worker, workers);
        self.set_active_ack(self.settings.active_ack, now);
    }

    /// Turns active acknowledgements on or off. Data that an earlier NIC has acknowledged is taken over in any case.
    pub(super) fn set_active_ack(&mut self, on: bool, now: Instant) {
        if let Some(active) = &mut self.to_kernel.active_ack {
            return active.set(on);
        }
        let buffers = self.ack_buffers();
        if on || self.to_kernel.ack_buffers.iter().any(|buffer| buffers.holds(*buffer)) {
            let active = ActiveAck::new(buffers, &self.to_kernel.ack_buffers, self.settings.hash_key, on, now.0);
            self.to_kernel.active_ack = Some(Box::new(active));
            self.wake_at(now.0);
        }
    }

    /// Acknowledges the frame from the wire in the kernel's name, if it can.
    pub(super) fn acknowledge_for_kernel(&mut self, now: Instant) {
        let Some(active) = &mut self.to_kernel.active_ack else { return };
        let (output, counters) = (&mut self.output, &self.counters);
        active.from_wire(&self.frame, now.0, &mut |frame| output.forward(frame, counters));
        count(active, counters);
        let due = active.next_tick();
        self.wake_at(due);
    }

    /// Raises the acknowledgement of the kernel's frame to the NIC's, before it goes to the wire.
    pub(super) fn raise_kernel_acknowledgement(&mut self, now: Instant) {
        let Some(active) = &mut self.to_kernel.active_ack else { return };
        let (host, counters) = (&mut self.to_kernel.device, &self.counters);
        active.from_kernel(&mut self.frame, now.0, &mut |frame| delivery::transmit(frame, host, counters));
        let due = active.next_tick();
        self.wake_at(due);
    }

    /// Sends the acknowledgements that are due, and delivers data that the kernel has not acknowledged again.
    pub(super) fn expire_acknowledgements(&mut self, now: Instant) {
        let Some(active) = &mut self.to_kernel.active_ack else { return };
        let (host, output, counters) = (&mut self.to_kernel.device, &mut self.output, &self.counters);
        active
            .expire(now.0, &mut |frame| output.forward(frame, counters), &mut |frame| delivery::transmit(frame, host, counters));
        count(active, counters);
    }

    /// Ends the active acknowledgements of a connection that is about to leave the kernel. False while the kernel has
    /// not acknowledged everything that the NIC has.
    pub(super) fn end_active_ack(&mut self, key: &FlowKey) -> bool {
        self.to_kernel.active_ack.as_mut().is_none_or(|active| active.end(key))
    }

    /// Removes connections, for another worker.
    pub(super) fn take_acknowledged(&mut self, which: impl FnMut(&AckEntry) -> bool) -> Vec<AckEntry> {
        self.to_kernel.active_ack.as_mut().map(|active| active.take(which)).unwrap_or_default()
    }

    /// Inserts connections that another worker has removed.
    pub(super) fn adopt_acknowledged(&mut self, entries: Vec<AckEntry>, now: Instant) {
        if entries.is_empty() {
            return;
        }
        self.set_active_ack(true, now);
        if let Some(active) = &mut self.to_kernel.active_ack {
            active.set(self.settings.active_ack);
            active.adopt(entries);
            let due = active.next_tick();
            self.wake_at(due);
        }
    }
}
