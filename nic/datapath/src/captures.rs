//! Captures: a tool gets the beginnings of the frames that pass between a worker and the wire in a ring. A slow tool
//! never holds up the worker.

use baton_capture::{MOST_CAPTURES, Place, Seen, Writer};
use baton_device::Parts;
use baton_shm::Region;
use baton_wire::Glance;
use std::sync::Arc;

/// Settings of a capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CaptureSettings {
    /// Its number.
    pub id: u32,
    /// Most bytes of a frame; None for its headers.
    pub bytes: Option<u32>,
    /// Whether frames of the kernel's that pass the NIC are captured, too.
    pub kernel: bool,
}

/// A capture, as a worker serves it.
struct Capture {
    settings: CaptureSettings,
    ring: Writer,
    /// The frame that was received last, while it is being processed.
    received: Option<Place>,
}

impl Capture {
    fn push(&mut self, frame: &Parts, seen: &Seen) -> Option<Place> {
        let bytes = frame.bytes();
        let most = match self.settings.bytes {
            Some(most) => most as usize,
            None => Glance::at(bytes, bytes.len()).headers,
        };
        self.ring.push(seen, &bytes[..bytes.len().min(most)])
    }
}

/// The captures of a worker.
#[derive(Default)]
pub(crate) struct Captures(Vec<Capture>);

fn seen(frame: &Parts, out: bool, kernel: bool, at: u64) -> Seen {
    Seen { at, length: frame.length() as u32, out, kernel, interface: frame.interface }
}

impl Captures {
    /// Whether there is any.
    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Begins a capture with a ring in `memory` for this worker. False if there are too many captures, or the memory
    /// has no such ring.
    pub fn begin(&mut self, settings: CaptureSettings, memory: &Arc<Region>, worker: usize) -> bool {
        self.end(settings.id);
        let Some(ring) = Writer::new(memory, worker).filter(|_| self.0.len() < MOST_CAPTURES) else { return false };
        self.0.push(Capture { settings, ring, received: None });
        true
    }

    /// Ends the capture with this number.
    pub fn end(&mut self, id: u32) {
        self.0.retain(|capture| capture.settings.id != id);
    }

    /// Captures a frame that is about to be sent. `kernel`: it is the kernel's.
    pub fn sends(&mut self, frame: &Parts, kernel: bool, now: u64) {
        let seen = seen(frame, true, kernel, now);
        for capture in self.0.iter_mut().filter(|capture| capture.settings.kernel || !kernel) {
            capture.push(frame, &seen);
        }
    }

    /// Captures a frame that was received and is about to be processed.
    pub fn receives(&mut self, frame: &Parts, now: u64) {
        let seen = seen(frame, false, false, now);
        for capture in &mut self.0 {
            capture.received = capture.push(frame, &seen);
        }
    }

    /// Marks the frame that is being processed as one for the kernel.
    pub fn is_kernels(&mut self) {
        for capture in &mut self.0 {
            if let Some(place) = capture.received.take() {
                capture.ring.is_kernels(place, !capture.settings.kernel);
            }
        }
    }

    /// To be called when the frame that was received last has been processed.
    pub fn processed(&mut self) {
        self.0.iter_mut().for_each(|capture| capture.received = None);
    }

    /// Makes the captured frames visible to the tools.
    pub fn show(&mut self) {
        self.0.iter_mut().for_each(|capture| capture.ring.show());
    }
}
