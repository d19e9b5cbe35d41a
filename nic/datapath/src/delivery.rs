//! The delivery of frames to the kernel. Frames wait, in order, as long as moderation says, and are written in one
//! burst, so that the receiver is woken once for many. Writing to the kernel's interface takes the place of a network
//! card's interrupt.

use crate::counters::Counters;
use baton_abi::layout::Counter;
use baton_device::{Device, Frame, MAX_FRAME};
use baton_moderation::{Mode, Moderator};
use std::collections::VecDeque;

/// Largest number of waiting frames.
const MAX_WAITING: usize = 64;

/// The frames that wait for the kernel.
pub(crate) struct Delivery {
    moderator: Moderator,
    waiting: VecDeque<Frame>,
    /// Free buffers.
    spares: Vec<Frame>,
}

impl Delivery {
    pub fn new(mode: Mode) -> Delivery {
        let mut delivery =
            Delivery { moderator: Moderator::new(mode), waiting: VecDeque::with_capacity(MAX_WAITING), spares: Vec::new() };
        delivery.set(mode);
        delivery
    }

    /// Changes the moderation; no frame may be waiting. Buffers are kept, since settings that have changed once may
    /// change again.
    pub fn set(&mut self, mode: Mode) {
        self.moderator = Moderator::new(mode);
        if self.moderator.is_on() {
            self.spares.resize_with(MAX_WAITING, || Frame::with_capacity(MAX_FRAME));
        }
    }

    /// Delivers a frame to the kernel, now or soon. `frame` is another buffer afterwards.
    pub fn deliver<H: Device>(&mut self, frame: &mut Frame, host: &mut H, counters: &Counters, now: u64) {
        if !self.moderator.is_on() {
            counters.add(Counter::Interrupts, 1);
            return transmit(frame, host, counters);
        }
        let full = self.moderator.queued(frame.length(), now);
        match self.spares.pop() {
            Some(mut spare) if frame.capacity() >= MAX_FRAME => {
                core::mem::swap(&mut spare, frame);
                self.waiting.push_back(spare);
            }
            spare => {
                // The frame cannot wait, since there is no spare buffer to exchange for its own, or its own is too
                // small for that. It must not overtake the waiting frames, so those are sent first.
                self.spares.extend(spare);
                self.flush(host, counters, now);
                return transmit(frame, host, counters);
            }
        }
        if full || self.spares.is_empty() {
            self.flush(host, counters, now);
        }
    }

    /// Sends all waiting frames.
    pub fn flush<H: Device>(&mut self, host: &mut H, counters: &Counters, now: u64) {
        while let Some(mut frame) = self.waiting.pop_front() {
            transmit(&mut frame, host, counters);
            // A device may have exchanged the buffer for one of its own.
            self.spares.push(if frame.capacity() < MAX_FRAME { Frame::with_capacity(MAX_FRAME) } else { frame });
        }
        if self.moderator.due().is_some() {
            counters.add(Counter::Interrupts, 1);
        }
        self.moderator.signalled(now);
    }

    /// Until when the waiting frames have to be sent, in microseconds; `u64::MAX` if none waits.
    #[inline]
    pub fn due(&self) -> u64 {
        self.moderator.due().unwrap_or(u64::MAX)
    }
}

/// Sends a frame to the kernel at once.
pub(crate) fn transmit<H: Device>(frame: &mut Frame, host: &mut H, counters: &Counters) {
    let sent = host.transmit(frame);
    counters.add(if sent { Counter::HostSent } else { Counter::Dropped }, 1);
}
