//! The path to the kernel: active acknowledgements, large receive, delivery.

use super::active_ack::AckBuffers;
use crate::counters::Counters;
use crate::delivery::{self, Delivery};
use baton_abi::layout::Counter;
use baton_active_ack::ActiveAck;
use baton_device::{Device, Frame};
use baton_lro::{Lro, LroSettings, Reason, Test};
use baton_moderation::Mode as Moderation;
use baton_wire::FlowKey;

/// The counters of what large receive gives to the kernel, by [`Reason`], in its order.
const ENDED: [Counter; Reason::COUNT] = [
    Counter::EndedFull,
    Counter::EndedFin,
    Counter::EndedPush,
    Counter::EndedShort,
    Counter::EndedOther,
    Counter::EndedTimeout,
    Counter::EndedRequested,
];

/// The counters of frames that it passes on, by the [`Test`] that they fail, in its order.
const PASSED: [Counter; Test::COUNT] = [
    Counter::PassedLarge,
    Counter::PassedNotIp,
    Counter::PassedNotTcp,
    Counter::PassedFragment,
    Counter::PassedMalformed,
    Counter::PassedIpOptions,
    Counter::PassedPadded,
    Counter::PassedChecksum,
    Counter::PassedFlags,
    Counter::PassedNoData,
];

/// A worker's state for the frames that go to the kernel. Times are in microseconds.
pub(super) struct ToKernel<H> {
    /// The kernel's interface.
    pub device: H,
    pub lro: Lro,
    pub delivery: Delivery,
    /// Present if active acknowledgements are on, or were on since the start.
    pub active_ack: Option<Box<ActiveAck<AckBuffers>>>,
    /// This worker's active-acknowledgement buffers.
    pub ack_buffers: Vec<usize>,
}

impl<H: Device> ToKernel<H> {
    pub fn new(device: H, lro: LroSettings, moderation: Moderation, now: u64) -> ToKernel<H> {
        let (lro, delivery) = (Lro::new(lro, now), Delivery::new(moderation));
        ToKernel { device, lro, delivery, active_ack: None, ack_buffers: Vec::new() }
    }

    /// Gives a frame to large receive, which delivers it, alone or in an aggregate, now or later. `frame` is another
    /// buffer afterwards.
    pub fn receive(&mut self, frame: &mut Frame, counters: &Counters, now: u64) {
        let ToKernel { device, lro, delivery, .. } = self;
        lro.receive(frame, now, &mut |frame| delivery.deliver(frame, device, counters, now));
    }

    /// Sends a frame without delay.
    pub fn transmit(&mut self, frame: &mut Frame, counters: &Counters) {
        delivery::transmit(frame, &mut self.device, counters);
    }

    /// Ends a connection's aggregate, and sends its frames and all others that wait for delivery.
    pub fn flush_connection(&mut self, key: &FlowKey, counters: &Counters, now: u64) {
        let ToKernel { device, lro, delivery, .. } = self;
        lro.flush(key, now, &mut |frame| delivery.deliver(frame, device, counters, now));
        delivery.flush(device, counters, now);
    }

    /// Sends all frames that wait.
    pub fn flush(&mut self, counters: &Counters, now: u64) {
        let ToKernel { device, lro, delivery, .. } = self;
        lro.flush_all(now, &mut |frame| delivery.deliver(frame, device, counters, now));
        delivery.flush(device, counters, now);
    }

    /// Changes the settings, after sending all frames that wait.
    pub fn set(&mut self, settings: LroSettings, moderation: Moderation, counters: &Counters, now: u64) {
        let ToKernel { device, lro, delivery, .. } = self;
        lro.set(settings, now, &mut |frame| delivery.deliver(frame, device, counters, now));
        delivery.flush(device, counters, now);
        delivery.set(moderation);
        // While large receive is off it has no timers, so its counters are published here.
        self.publish(counters);
    }

    /// Delivers the aggregates that are due, and updates large receive's counters.
    pub fn expire_aggregates(&mut self, counters: &Counters, now: u64) {
        let ToKernel { device, lro, delivery, .. } = self;
        lro.expire(now, &mut |frame| delivery.deliver(frame, device, counters, now));
        self.publish(counters);
    }

    /// Puts large receive's counters into NIC memory.
    fn publish(&self, counters: &Counters) {
        let done = self.lro.counters();
        counters.set(Counter::Merged, done.merged);
        counters.set(Counter::Aggregates, done.aggregates);
        counters.set(Counter::AggregateBytes, done.bytes);
        counters.set(Counter::Reordered, done.reordered);
        counters.set(Counter::Held, done.held);
        counters.set(Counter::Alone, done.alone);
        counters.set(Counter::Old, done.old);
        counters.set(Counter::Gaps, done.gaps);
        counters.set(Counter::Unhoused, done.short_of_memory);
        ENDED.iter().zip(done.flushed).for_each(|(counter, count)| counters.set(*counter, count));
        PASSED.iter().zip(done.failed).for_each(|(counter, count)| counters.set(*counter, count));
    }

    /// Sends the frames whose delivery is due.
    pub fn expire_delivery(&mut self, counters: &Counters, now: u64) {
        if self.delivery.due() <= now {
            self.delivery.flush(&mut self.device, counters, now);
        }
    }
}
