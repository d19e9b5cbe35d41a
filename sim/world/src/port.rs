//! Queues of frames between kernel, NIC and wire, and the NIC's devices on them.

use baton_device::{Arrival, BEGINNING, Capabilities, Checksum, Device, Frame, Payload};
use baton_wire::TcpFrame;
use baton_wire::frame::{ETHERNET, IPV6};
use baton_wire::offset::{ipv4, ipv6};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// A bounded queue of frames. It belongs to the device, so it outlives every NIC process.
#[derive(Clone)]
pub(crate) struct Lane {
    frames: Rc<RefCell<VecDeque<Frame>>>,
    depth: usize,
}

impl Lane {
    pub fn new(depth: usize) -> Lane {
        Lane { frames: Rc::default(), depth }
    }

    /// Appends a frame. False if the queue is full: then the frame is lost.
    pub fn push(&self, frame: Frame) -> bool {
        let mut frames = self.frames.borrow_mut();
        let room = frames.len() < self.depth;
        if room {
            frames.push_back(frame);
        }
        room
    }

    pub fn pop(&self) -> Option<Frame> {
        self.frames.borrow_mut().pop_front()
    }

    /// A copy of the next frame, which stays in the queue, if it is `wanted`.
    pub fn front(&self, wanted: impl Fn(&Frame) -> bool) -> Option<Frame> {
        self.frames.borrow().front().filter(|frame| wanted(frame)).cloned()
    }

    pub fn is_empty(&self) -> bool {
        self.frames.borrow().is_empty()
    }
}

/// What unwinds from a worker's round when the NIC is killed in the middle of it.
pub(crate) struct Killed;

/// Kills the NIC just before or just after it sends a frame.
#[derive(Clone, Default)]
pub(crate) struct Fuse {
    left: Rc<Cell<Option<u32>>>,
    passed: Rc<Cell<u64>>,
}

impl Fuse {
    /// Lets the NIC die at a point counted from now: points 0 and 1 are before and after the next frame that it sends,
    /// and so on.
    pub fn light(&self, points: u32) {
        self.left.set(Some(points));
    }

    pub fn put_out(&self) {
        self.left.set(None);
    }

    /// Points that were passed so far.
    pub fn passed(&self) -> u64 {
        self.passed.get()
    }

    /// Passes a point. Ends the round by unwinding if it is the one.
    fn pass(&self) {
        self.passed.set(self.passed.get() + 1);
        match self.left.get() {
            Some(0) => {
                self.left.set(None);
                // Without the panic hook: this is no failure of the code that runs.
                resume_unwind(Box::new(Killed));
            }
            Some(left) => self.left.set(Some(left - 1)),
            None => {}
        }
    }
}

/// A device of the NIC's: what it receives comes from one lane, what it sends goes into another.
#[derive(Clone)]
pub(crate) struct Port {
    pub incoming: Lane,
    pub outgoing: Lane,
    pub fuse: Fuse,
}

impl Port {
    /// The same device for a worker that receives nothing from it.
    pub fn sending_only(&self) -> Port {
        Port { incoming: Lane::new(0), ..self.clone() }
    }
}

impl Device for Port {
    fn capabilities(&self) -> Capabilities {
        // The worker completes checksums, so that damage on a link is noticed as on a real one.
        Capabilities { checksum: false, segmentation: 0 }
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        let Some(next) = self.incoming.pop() else { return false };
        frame.copy_from(&next);
        true
    }

    fn receive_or_show(&mut self, frame: &mut Frame) -> Arrival {
        let Some(mut next) = self.incoming.front(is_shown) else {
            return if self.receive(frame) { Arrival::Frame } else { Arrival::Nothing };
        };
        next.bytes_mut()[BEGINNING..].fill(0xee);
        frame.copy_from(&next);
        frame.checksum = Checksum::Verified;
        show_as_huge(frame).map_or(Arrival::Large, Arrival::Huge)
    }

    fn receive_apart(&mut self, headers: usize, payload: Payload<'_>) -> bool {
        let Some(next) = self.incoming.pop() else { return false };
        let places = payload.into_iter().flatten();
        places.zip(&next.bytes()[headers..]).for_each(|(place, byte)| place.store(*byte, Ordering::Relaxed));
        true
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        self.fuse.pass();
        let sent = self.outgoing.push(frame.clone());
        self.fuse.pass();
        sent
    }
}

/// Whether the device has checked a frame, and shows it before it gives it away: those of every second stretch of
/// sequence numbers, if they are large and their checksum is right.
fn is_shown(frame: &Frame) -> bool {
    let bytes = frame.bytes();
    bytes.len() > BEGINNING
        && TcpFrame::parse(bytes, 0).is_ok_and(|parsed| parsed.seq >> 12 & 1 == 0 && parsed.checksum_holds(bytes))
}

/// Makes a frame that is shown what a device shows of a huge one, its headers alone, in every second stretch of the
/// sequence numbers of which frames are shown. Returns the bytes of its payload; None, and nothing is done, for others.
fn show_as_huge(frame: &mut Frame) -> Option<u32> {
    let parsed = TcpFrame::parse(frame.bytes(), 0).ok().filter(|parsed| parsed.seq >> 13 & 1 == 0)?;
    let (headers, payload) = (parsed.payload_offset, parsed.payload_length);
    if headers + payload != frame.length() {
        return None;
    }
    frame.set_length(headers);
    let ip = &mut frame.bytes_mut()[ETHERNET..];
    let (at, length) = match ip[0] >> 4 {
        4 => (ipv4::LENGTH, ip.len()),
        _ => (ipv6::LENGTH, ip.len() - IPV6),
    };
    ip[at..][..2].copy_from_slice(&(length as u16).to_be_bytes());
    Some(payload as u32)
}
