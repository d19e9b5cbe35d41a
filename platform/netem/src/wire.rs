//! A wire behind an emulated link with rate, delay and faults in both directions, for machines whose kernel has no
//! netem.

use crate::link::{Carried, Counters, Impairments, Link};
use baton_device::{Capabilities, Checksum, Device, Frame};
use baton_wire::frame::finish_checksum;

/// A frame in flight on the link.
#[derive(Clone)]
struct InFlight(Frame);

impl Carried for InFlight {
    fn size(&self) -> usize {
        // Preamble, frame check sequence and inter-frame gap are not counted.
        self.0.bytes().len()
    }

    fn corrupt(&mut self, random: u64) {
        let bytes = self.0.bytes_mut();
        // The Ethernet header stays intact: on a real link the frame check sequence protects it, but not the packet
        // beyond the link.
        let bits = (bytes.len().saturating_sub(14)) as u64 * 8;
        if bits > 0 {
            let bit = 14 * 8 + (random % bits) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

/// A wire behind an emulated link, whose time is set by [`EmulatedWire::tick`].
pub struct EmulatedWire<W> {
    wire: W,
    outgoing: Link<InFlight>,
    incoming: Link<InFlight>,
    now: u64,
    scratch: Frame,
}

impl<W: Device> EmulatedWire<W> {
    /// Puts a link in front of a wire: `outgoing` for sent frames, `incoming` for received ones. Without impairments
    /// the links change nothing.
    pub fn new(wire: W, outgoing: Impairments, incoming: Impairments, seed: u64) -> Self {
        EmulatedWire {
            wire,
            outgoing: Link::new(outgoing, seed),
            incoming: Link::new(incoming, seed ^ 0x9e37_79b9),
            now: 0,
            scratch: Frame::with_capacity(baton_device::MAX_FRAME),
        }
    }

    /// Sets the time, moves frames that have crossed the outgoing link to the wire, and puts what the wire has received
    /// on the incoming link.
    pub fn tick(&mut self, now: u64) {
        self.now = now;
        while let Some(mut in_flight) = self.outgoing.pop(now) {
            // A frame that the wire does not accept is lost, as on any wire.
            self.wire.transmit(&mut in_flight.0);
        }
        for _ in 0..64 {
            if !self.wire.receive(&mut self.scratch) {
                break;
            }
            complete(&mut self.scratch);
            self.incoming.push(InFlight(self.scratch.clone()), now);
        }
    }

    /// When the next frame has crossed the link, in microseconds.
    pub fn next_arrival(&self) -> Option<u64> {
        self.outgoing.next_arrival().into_iter().chain(self.incoming.next_arrival()).min()
    }

    /// Counters of the outgoing and the incoming link.
    pub fn counters(&self) -> [Counters; 2] {
        [self.outgoing.counters(), self.incoming.counters()]
    }
}

/// Completes a partial checksum, so that corruption on the link is detected.
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
            Some(in_flight) => {
                frame.fill(in_flight.0.bytes());
                true
            }
            None => false,
        }
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        complete(frame);
        self.outgoing.push(InFlight(frame.clone()), self.now);
        true
    }

    fn flush(&mut self) -> u64 {
        self.wire.flush()
    }
}
