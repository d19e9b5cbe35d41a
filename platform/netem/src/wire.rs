//! A wire with an emulated link in it: rate, delay and faults in both directions, where the kernel has no netem.

use crate::link::{Carried, Counters, Impairments, Link};
use baton_device::{Capabilities, Checksum, Device, Frame};
use baton_wire::frame::finish_checksum;

#[derive(Clone)]
struct Flying(Frame);

impl Carried for Flying {
    fn size(&self) -> usize {
        // Preamble, frame check sequence and gap are not on this wire.
        self.0.bytes().len()
    }

    fn corrupt(&mut self, random: u64) {
        let bytes = self.0.bytes_mut();
        // Not the Ethernet header: a real link's frame check sequence guards that, and only that far.
        let bits = (bytes.len().saturating_sub(14)) as u64 * 8;
        if bits > 0 {
            let bit = 14 * 8 + (random % bits) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

/// A wire behind an emulated link. Its time is what [`EmulatedWire::tick`] last said.
pub struct EmulatedWire<W> {
    wire: W,
    outgoing: Link<Flying>,
    incoming: Link<Flying>,
    now: u64,
    scratch: Frame,
}

impl<W: Device> EmulatedWire<W> {
    /// Puts a link in front of a wire: `outgoing` for what is sent, `incoming` for what is received.
    pub fn new(wire: W, outgoing: Impairments, incoming: Impairments, seed: u64) -> Self {
        EmulatedWire {
            wire,
            outgoing: Link::new(outgoing, seed),
            incoming: Link::new(incoming, seed ^ 0x9e37_79b9),
            now: 0,
            scratch: Frame::with_capacity(baton_device::MAX_FRAME),
        }
    }

    /// Sets the time, moves frames that have arrived on the far side of the outgoing link, and takes in what the wire has.
    pub fn tick(&mut self, now: u64) {
        self.now = now;
        while let Some(mut flying) = self.outgoing.pop(now) {
            // What the real wire drops here is lost as on any wire.
            self.wire.transmit(&mut flying.0);
        }
        for _ in 0..64 {
            if !self.wire.receive(&mut self.scratch) {
                break;
            }
            complete(&mut self.scratch);
            self.incoming.push(Flying(self.scratch.clone()), now);
        }
    }

    /// When the next frame arrives, in microseconds.
    pub fn next_arrival(&self) -> Option<u64> {
        self.outgoing.next_arrival().into_iter().chain(self.incoming.next_arrival()).min()
    }

    /// Counters of both directions.
    pub fn counters(&self) -> [Counters; 2] {
        [self.outgoing.counters(), self.incoming.counters()]
    }
}

/// A link carries frames with whole checksums, so that corruption shows.
fn complete(frame: &mut Frame) {
    if let Checksum::Partial { start, offset } = frame.checksum {
        finish_checksum(frame.bytes_mut(), usize::from(start), usize::from(offset));
    }
    frame.checksum = Checksum::Unknown;
}

impl<W: Device> Device for EmulatedWire<W> {
    fn capabilities(&self) -> Capabilities {
        Capabilities { checksum: true, segmentation: 0 }
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        match self.incoming.pop(self.now) {
            Some(flying) => {
                frame.fill(flying.0.bytes());
                true
            }
            None => false,
        }
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        complete(frame);
        self.outgoing.push(Flying(frame.clone()), self.now);
        true
    }
}
