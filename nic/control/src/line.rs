//! A worker's wire: the device itself or, if the settings ask for that, an emulated link in front of it.

use baton_backends::Wire;
use baton_device::{Arrival, Capabilities, Device, Frame, Payload};
use baton_netem::link::Counters;
use baton_netem::{EmulatedWire, Impairments};
use baton_protocol::nic::LinkSettings;

pub(crate) enum Line {
    Device(Wire),
    Emulated(Box<EmulatedWire<Wire>>),
}

/// The link's outgoing direction.
fn impairments(link: &LinkSettings) -> Impairments {
    let LinkSettings { rate, delay, buffer, loss, reorder, hold, duplicate, corrupt, one_way: _, seed: _ } = *link;
    Impairments { rate, delay, buffer, loss, reorder, hold, duplicate, corrupt }
}

impl Line {
    /// The wire of worker `number`. Each worker's link has its own random seed for faults.
    pub fn new(wire: Wire, link: &LinkSettings, number: usize) -> Line {
        let out = impairments(link);
        if out.is_clean() {
            return Line::Device(wire);
        }
        let delayed = Impairments { rate: out.rate, delay: out.delay, ..Impairments::default() };
        let back = if link.one_way { delayed } else { out };
        Line::Emulated(Box::new(EmulatedWire::new(wire, out, back, link.seed.wrapping_add(number as u64))))
    }

    /// Sets the link's time, microseconds.
    pub fn tick(&mut self, now: u64) {
        if let Line::Emulated(link) = self {
            link.tick(now);
        }
    }

    /// When the link's next frame arrives, microseconds.
    pub fn next_arrival(&self) -> Option<u64> {
        match self {
            Line::Device(_) => None,
            Line::Emulated(link) => link.next_arrival(),
        }
    }

    /// The link's counters, both directions.
    pub fn counters(&self) -> [Counters; 2] {
        match self {
            Line::Device(_) => <[Counters; 2]>::default(),
            Line::Emulated(link) => link.counters(),
        }
    }
}

impl Device for Line {
    fn capabilities(&self) -> Capabilities {
        match self {
            Line::Device(wire) => wire.capabilities(),
            Line::Emulated(link) => link.capabilities(),
        }
    }

    fn cuts_datagrams(&self) -> bool {
        match self {
            Line::Device(wire) => wire.cuts_datagrams(),
            Line::Emulated(_) => false,
        }
    }

    #[inline]
    fn receive(&mut self, frame: &mut Frame) -> bool {
        match self {
            Line::Device(wire) => wire.receive(frame),
            Line::Emulated(link) => link.receive(frame),
        }
    }

    #[inline]
    fn receive_or_show(&mut self, frame: &mut Frame) -> Arrival {
        match self {
            Line::Device(wire) => wire.receive_or_show(frame),
            Line::Emulated(link) => link.receive_or_show(frame),
        }
    }

    fn taken_and_come(&self) -> (u64, u64) {
        match self {
            Line::Device(wire) => wire.taken_and_come(),
            Line::Emulated(link) => link.taken_and_come(),
        }
    }

    fn receive_apart(&mut self, headers: usize, payload: Payload<'_>) -> bool {
        match self {
            Line::Device(wire) => wire.receive_apart(headers, payload),
            Line::Emulated(link) => link.receive_apart(headers, payload),
        }
    }

    fn transmits_apart(&self) -> bool {
        match self {
            Line::Device(wire) => wire.transmits_apart(),
            Line::Emulated(link) => link.transmits_apart(),
        }
    }

    fn transmit_apart(&mut self, frame: &mut Frame, payload: Payload<'_>) -> bool {
        match self {
            Line::Device(wire) => wire.transmit_apart(frame, payload),
            Line::Emulated(link) => link.transmit_apart(frame, payload),
        }
    }

    #[inline]
    fn transmit(&mut self, frame: &mut Frame) -> bool {
        match self {
            Line::Device(wire) => wire.transmit(frame),
            Line::Emulated(link) => link.transmit(frame),
        }
    }

    #[inline]
    fn flush(&mut self) -> u64 {
        match self {
            Line::Device(wire) => wire.flush(),
            Line::Emulated(link) => link.flush(),
        }
    }
}
