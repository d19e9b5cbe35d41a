//! The NIC's free room: accounting of the agent's commands that take some, and `os_resource`.

use super::Worker;
use crate::custody::{Refusal, Slot};
use baton_abi::layout::{Counter, nic};
use baton_abi::{Cid, Control, Message, Operation, Resource};
use baton_device::Device;
use baton_recovery::pages_of;
use baton_tcp::Instant;
use core::sync::atomic::Ordering;

/// Whether this worker has the rings to the agent. (The rings of the host's TCP go to its NIC.)
pub(super) fn serves_agent<H, W>(worker: &Worker<H, W>) -> bool {
    worker.lender.is_none() && worker.crossbar.as_ref().is_none_or(|crossbar| crossbar.peers.is_front())
}

/// Counts the resources that a command takes. Returns whether the announcement that it names allows it.
pub(super) fn admits<H: Device, W: Device>(worker: &mut Worker<H, W>, message: &Message) -> bool {
    let (cid, named) = (message.cid, message.length as u16);
    if worker.lender.is_some() || cid.slot() as usize >= worker.connections.slots.len() {
        return true;
    }
    let Some(resource) = Resource::taken_by(message) else { return true };
    let (amount, charge) = match resource {
        Resource::Connections => (1, 0),
        Resource::Memory => {
            let pages = pages_of(&worker.nic_memory, cid.slot());
            (pages.saturating_sub(worker.resources.charges.pages(cid.slot())), pages)
        }
        Resource::Pairs => return true,
    };
    let allowed = worker.resources.take(resource, amount, named);
    if allowed {
        worker.resources.charges.set(cid.slot(), charge);
    }
    allowed
}

/// Refuses a command that goes beyond what was announced.
#[cold]
pub(super) fn refuse<H: Device, W: Device>(worker: &mut Worker<H, W>, message: &Message) {
    worker.counters.add(Counter::Exceeded, 1);
    let (why, kind) = (Refusal::Exceeded as u32, u32::from(message.kind));
    worker.send_to_agent(Message::control(Operation::OsControl, Control::Refused, message.cid, why, kind));
    advertise(worker, false);
}

/// Removes a connection from its slot, and frees the slot.
pub(super) fn free_slot<H: Device, W: Device>(worker: &mut Worker<H, W>, cid: Cid) -> Option<Slot> {
    let slot = worker.remove_slot(cid)?;
    worker.resources.charges.end(cid.slot());
    Some(slot)
}

/// Uncharges a slot if it is empty, after a command for it was refused.
pub(super) fn uncharge_unless_occupied<H, W>(worker: &Worker<H, W>, cid: Cid) {
    if matches!(worker.connections.slots.get(cid.slot() as usize), Some(None)) {
        worker.resources.charges.end(cid.slot());
    }
}

/// `os_resource`: announces the free room to the agent: the resources whose room has changed, or all.
pub(super) fn advertise<H: Device, W: Device>(worker: &mut Worker<H, W>, all: bool) {
    for announcement in worker.resources.announcements(all) {
        worker.counters.add(Counter::Announcements, 1);
        worker.send_to_agent(announcement.to_message());
    }
}

/// Measures how busy the workers are; `busy` as [`Worker::review`] has it.
#[cold]
fn measure<H: Device, W: Device>(worker: &mut Worker<H, W>, now: Instant, busy: u64) {
    let (me, workers) = worker.crossbar.as_ref().map_or((0, 1), |crossbar| (crossbar.peers.me(), crossbar.peers.workers()));
    let of = |worker_number| {
        let counters = worker.nic_memory.words(nic::counters(worker_number), Counter::BusyNanoseconds as usize + 1);
        counters[Counter::BusyNanoseconds as usize].load(Ordering::Relaxed)
    };
    let others: u64 = (0..workers).filter(|number| *number != me).map(of).sum();
    if worker.resources.measure(now.0, (busy + others) / 1000, workers as u64) {
        worker.counters.add(Counter::TooBusy, 1);
    }
    advertise(worker, false);
}

/// See [`Worker::review`].
#[inline]
pub(super) fn review<H: Device, W: Device>(worker: &mut Worker<H, W>, now: Instant, busy: u64) {
    let is_new = !worker.resources.has_announced();
    if !is_new && worker.resources.due().is_none_or(|due| now.0 < due) || !serves_agent(worker) {
        return;
    }
    if worker.resources.repeats(now.0) || is_new { advertise(worker, true) } else { measure(worker, now, busy) }
}
