//! Frames received ahead, by a worker with many connections. The connections' state is not in the processor's caches,
//! so each access waits for memory. So the memory that several frames need is prefetched together, step by step, before
//! the first of them is processed.

use super::Worker;
use super::connections::Connections;
use crate::custody::Custody;
use crate::worker::programs::Unannounced;
use baton_device::{Arrival, Checksum, Device, Frame};
use baton_shm::prefetch;
use baton_tables::{NO_SLOT, Search};
use baton_tcp::Instant;
use baton_wire::Usual;

/// Most frames that are received ahead: their prefetches are as many memory accesses as a core can have outstanding.
const AHEAD: usize = 16;

/// A frame that was received ahead, and the slot in which its connection seems to be.
struct Early {
    frame: Frame,
    /// The result of [`Connections::lookup`] for its 4-tuple; [`NO_SLOT`] unless it is a usual frame. Only a hint,
    /// since the frames before it may change the table.
    search: Search,
    slot: u32,
}

/// Room for the frames of a batch; made when it is first needed.
#[derive(Default)]
pub(super) struct Ahead(Vec<Early>);

impl Ahead {
    /// Takes part of a batch of at most `most` frames from a device. Returns how many there are, and how it ended: if
    /// the next frame is a large one, the frame behind them shows its headers.
    #[inline(always)]
    fn receive(&mut self, device: &mut impl Device, most: usize, frame_bytes: usize) -> (usize, Arrival) {
        while self.0.len() < AHEAD {
            self.0.push(Early { frame: Frame::with_capacity(frame_bytes), search: Search::default(), slot: NO_SLOT });
        }
        for (count, early) in self.0.iter_mut().take(most).enumerate() {
            match device.receive_or_show(&mut early.frame) {
                Arrival::Frame => {}
                other => return (count, other),
            }
        }
        (most.min(AHEAD), Arrival::Frame)
    }

    /// Prefetches the memory that the first `count` frames need. Each step prefetches what the next step reads.
    #[inline(always)]
    fn load(&mut self, count: usize, connections: &Connections) {
        let batch = &mut self.0[..count];
        for early in &mut *batch {
            early.slot = NO_SLOT;
            if early.frame.checksum != Checksum::Unknown
                && let Some(usual) = Usual::parse(early.frame.bytes())
            {
                early.search = connections.lookup.begin(&usual.key(early.frame.interface));
                early.slot = 0;
                prefetch(connections.lookup.memory_of(&early.search), 0, 8);
            }
        }
        for early in batch.iter_mut().filter(|early| early.slot != NO_SLOT) {
            early.slot = connections.lookup.end(early.search);
            if let Some(slot) = connections.slots.get(early.slot as usize) {
                prefetch(slot, 0, 1);
            }
        }
        let offloaded = |early: &Early| match connections.slots.get(early.slot as usize)?.as_ref()?.custody {
            Custody::Active(ref offloaded) => Some(offloaded),
            _ => None,
        };
        for offloaded in batch.iter().filter_map(offloaded) {
            offloaded.prefetch();
        }
        for offloaded in batch.iter().filter_map(offloaded) {
            offloaded.prefetch_memory();
        }
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Whether there are so many connections that frames are received ahead.
    pub(super) fn has_many(&self) -> bool {
        self.connections.count >= self.settings.many
    }

    /// [`Worker::poll_usual_wire`] with many connections.
    #[inline(always)]
    pub(super) fn poll_ahead(&mut self, now: Instant) -> bool {
        let begun = self.turn;
        let mut unannounced = Unannounced::NONE;
        while self.turn > 0 {
            let most = self.turn.min(AHEAD);
            let (count, next) = self.ahead.receive(&mut self.output.wire.device, most, self.settings.frame_bytes);
            self.ahead.load(count, &self.connections);
            self.process_ahead(count, &mut unannounced, now);
            match next {
                Arrival::Frame => {}
                Arrival::Large | Arrival::Huge(_) => {
                    std::mem::swap(&mut self.frame, &mut self.ahead.0[count].frame);
                    self.receive_other(next, &mut unannounced, now);
                    self.turn -= 1;
                }
                Arrival::Nothing => break,
            }
        }
        if unannounced.any() {
            self.announce(&unannounced, now);
        }
        self.turn < begun
    }

    /// Processes the first `count` frames received ahead, in order.
    #[inline(always)]
    fn process_ahead(&mut self, count: usize, unannounced: &mut Unannounced, now: Instant) {
        let clock = now.millis();
        for at in 0..count {
            let early = &mut self.ahead.0[at];
            std::mem::swap(&mut self.frame, &mut early.frame);
            let found = Some(early.slot).filter(|slot| *slot != NO_SLOT);
            if !self.receive_usual(found, unannounced, now, clock) {
                self.receive_other(Arrival::Frame, unannounced, now);
            }
        }
        self.turn -= count;
    }
}
