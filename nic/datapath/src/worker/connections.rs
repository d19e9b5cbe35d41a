//! The connections of a worker: their slots, their lookup and their time-outs.

use super::dormant::Rounds;
use super::{Worker, peer_fin};
use crate::custody::{Custody, Slot};
use crate::offloaded::Pending;
use baton_abi::{Message, Operation, RestoreCause};
use baton_device::Device;
use baton_shm::advise_huge;
use baton_tables::Lookup;
use baton_tcp::{Events, Instant};
use baton_wire::FlowKey;

/// The timing wheel of the connections, with ticks of 128 microseconds.
pub(super) type Wheel = baton_tables::Wheel<128>;

/// The connections of a worker.
pub(super) struct Connections {
    pub slots: Vec<Option<Slot>>,
    pub lookup: Lookup,
    pub wheel: Wheel,
    /// Number of occupied slots.
    pub count: u64,
    /// The slots whose tick has come; empty between two rounds.
    pub expired: Vec<u32>,
    pub rounds: Rounds,
}

impl Connections {
    pub fn new(slots: usize, hash_key: [u64; 4], now: u64) -> Connections {
        let mut table = Vec::with_capacity(slots);
        advise_huge(table.spare_capacity_mut());
        table.resize_with(slots, || None);
        Connections {
            slots: table,
            lookup: Lookup::prepared(slots, hash_key, advise_huge),
            wheel: Wheel::new(now),
            count: 0,
            expired: Vec::new(),
            rounds: Rounds::NONE,
        }
    }

    /// The slot of the connection that receives frames with this key.
    #[inline(always)]
    pub fn find(&self, frame: &FlowKey) -> Option<u32> {
        self.lookup.find(frame, |slot| matches!(self.slots.get(slot as usize), Some(Some(found)) if found.has_key(frame)))
    }

    /// Whether there is a connection some of whose frames a connection with this key would receive as well.
    pub fn overlaps(&self, key: &FlowKey) -> bool {
        let overlaps = |slot| matches!(self.slots.get(slot as usize), Some(Some(found)) if found.key().overlaps(key));
        self.lookup.find(key, overlaps).is_some()
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// To be called after every change of a connection: enters its time-out into the wheel, lists it if it has events,
    /// and notifies the agent.
    #[inline]
    pub(super) fn follow_up(&mut self, index: u32, events: Events) {
        let Some(slot) = self.connections.slots[index as usize].as_mut() else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        let wanted = offloaded.tcp.next_timeout();
        if wanted != Instant::NEVER && Wheel::tick_of(wanted.0) < slot.scheduled {
            slot.scheduled = self.connections.wheel.enter(index, wanted.0);
        }
        if offloaded.closing {
            offloaded.pending = Pending::default();
        }
        if offloaded.pending.any() && !slot.dirty {
            slot.dirty = true;
            self.programs.dirty.push(index);
        }
        if offloaded.closing {
            return self.follow_closing(index, events);
        }
        let wants_memory = offloaded.growth.has_request();
        if events.intersects(Events::CLOSED | Events::ABORTED | Events::TIME_WAIT | Events::FIN) {
            let cid = slot.cid;
            if events.contains(Events::TIME_WAIT) {
                self.send_to_agent(Message::new(Operation::OsRestore, cid, RestoreCause::Ended as u32, 0));
            } else if events.intersects(Events::CLOSED | Events::ABORTED) {
                self.programs.ended.push(cid);
            } else {
                peer_fin::came(self, cid);
            }
        }
        if wants_memory {
            self.request_memory(index);
        }
    }

    /// Runs the time-out of the connection in slot `index`, if its entry in the wheel is the one of `tick`.
    pub(super) fn on_tick(&mut self, index: u32, tick: u64, now: Instant) {
        let Some(slot) = self.connections.slots[index as usize].as_mut() else { return };
        if slot.scheduled != tick {
            return;
        }
        slot.scheduled = u64::MAX;
        if let Custody::Opening(_) = slot.custody {
            return self.expire_opening(index, now);
        }
        if let Custody::Dormant(_) = slot.custody {
            self.wake_connection(index);
        }
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        if offloaded.is_on_fast_path() && offloaded.tcp.slow_timer_is_due(now) && self.lend(index, now) {
            return;
        }
        let Some(Some(slot)) = self.connections.slots.get_mut(index as usize) else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        let mut events = Events::empty();
        if offloaded.tcp.next_timeout() <= now {
            events = offloaded.tcp.on_timeout(now);
            offloaded.note_events(events);
            self.output.send_all(offloaded, &self.counters, now);
        }
        self.follow_up(index, events);
    }
}
