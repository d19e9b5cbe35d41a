//! Frames on their way to the kernel: they wait, in their order, as long as moderation says, and go in one burst, so that its receiver is
//! woken once for many. Writing to the kernel's interface is what the interrupt is for a card.

use crate::counters::Counters;
use baton_abi::layout::Counter;
use baton_device::{Device, Frame, MAX_FRAME};
use baton_moderation::{Mode, Moderator};
use std::collections::VecDeque;

/// Frames that wait at most.
const MOST: usize = 64;

pub(crate) struct Delivery {
    moderator: Moderator,
    waiting: VecDeque<Frame>,
    spares: Vec<Frame>,
}

impl Delivery {
    pub fn new(mode: Mode) -> Delivery {
        let mut delivery =
            Delivery { moderator: Moderator::new(mode), waiting: VecDeque::with_capacity(MOST), spares: Vec::new() };
        delivery.set(mode);
        delivery
    }

    /// Other moderation; nothing may be waiting. Buffers are kept, since whoever changes settings does so again.
    pub fn set(&mut self, mode: Mode) {
        self.moderator = Moderator::new(mode);
        if self.moderator.is_on() {
            self.spares.resize_with(MOST, || Frame::with_capacity(MAX_FRAME));
        }
    }

    /// A frame goes to the kernel, now or soon; it is another buffer afterwards.
    pub fn give<H: Device>(&mut self, frame: &mut Frame, host: &mut H, counters: &Counters, now: u64) {
        if !self.moderator.is_on() {
            counters.add(Counter::Interrupts, 1);
            return transmit(frame, host, counters);
        }
        let tell = self.moderator.queued(frame.bytes().len(), now);
        match self.spares.pop() {
            Some(mut spare) if frame.capacity() >= MAX_FRAME => {
                core::mem::swap(&mut spare, frame);
                self.waiting.push_back(spare);
            }
            spare => {
                // Nothing overtakes what waits.
                self.spares.extend(spare);
                self.flush(host, counters, now);
                return transmit(frame, host, counters);
            }
        }
        if tell || self.spares.is_empty() {
            self.flush(host, counters, now);
        }
    }

    /// Everything that waits goes.
    pub fn flush<H: Device>(&mut self, host: &mut H, counters: &Counters, now: u64) {
        while let Some(mut frame) = self.waiting.pop_front() {
            transmit(&mut frame, host, counters);
            // A device may have exchanged it for one of its own.
            self.spares.push(if frame.capacity() < MAX_FRAME { Frame::with_capacity(MAX_FRAME) } else { frame });
        }
        if self.moderator.due().is_some() {
            counters.add(Counter::Interrupts, 1);
        }
        self.moderator.told(now);
    }

    /// When what waits has to go, in microseconds.
    #[inline]
    pub fn due(&self) -> u64 {
        self.moderator.due().unwrap_or(u64::MAX)
    }
}

/// A frame to the kernel at once.
pub(crate) fn transmit<H: Device>(frame: &mut Frame, host: &mut H, counters: &Counters) {
    let sent = host.transmit(frame);
    counters.add(if sent { Counter::HostSent } else { Counter::Dropped }, 1);
}
