//! The seam to a wire: frames, what a device did or shall do to them, and the two calls that move them.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

use alloc::boxed::Box;
use alloc::vec;
use core::ops::{Deref, DerefMut};

/// Bytes in front of every frame where a backend may put its own header.
pub const HEADROOM: usize = 16;
/// Room for the largest frame, a 64 KB IP packet and its Ethernet header, with what a header may turn out to be shorter than.
pub const MAX_FRAME: usize = 65_535 + 14 + 100;

/// As a frame's interface: no wire takes it.
pub const NOWHERE: u32 = u32::MAX;

/// What is known about a frame's TCP or UDP checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Checksum {
    /// Nothing: the field holds a full checksum that nobody has verified.
    #[default]
    Unknown,
    /// A device has verified it.
    Verified,
    /// The field holds the pseudo-header's sum; who puts the frame on a real wire completes it, from `start`, at `start + offset`.
    Partial {
        /// Where summing starts.
        start: u16,
        /// Where the result goes, from `start`.
        offset: u16,
    },
}

/// A frame that stands for several: TCP segmentation offload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segmentation {
    /// Payload bytes of each segment.
    pub size: u16,
    /// Bytes of headers in front of the payload.
    pub headers: u16,
    /// IPv6 instead of IPv4.
    pub ipv6: bool,
    /// The CWR flag is for the first segment only (RFC 3168).
    pub ecn: bool,
}

/// A frame and what goes with it. It changes hands as one pointer; its buffer is allocated once and travels with it.
#[derive(Debug)]
pub struct Frame(Box<Parts>);

/// What a frame consists of.
#[derive(Debug)]
pub struct Parts {
    buffer: Box<[u8]>,
    length: usize,
    /// Checksum state.
    pub checksum: Checksum,
    /// Present on a frame that has to be, or was not yet, cut.
    pub segmentation: Option<Segmentation>,
    /// Index of the interface that it came from or goes to, for a wire that has several; 0 elsewhere. [`NOWHERE`]: no wire takes it.
    pub interface: u32,
}

impl Deref for Frame {
    type Target = Parts;
    #[inline(always)]
    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl DerefMut for Frame {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Parts {
        &mut self.0
    }
}

impl Frame {
    /// An empty frame with room for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> Frame {
        let buffer = vec![0; HEADROOM + capacity].into();
        Frame(Box::new(Parts { buffer, length: 0, checksum: Checksum::Unknown, segmentation: None, interface: 0 }))
    }
}

impl Parts {
    /// The frame's bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[HEADROOM..HEADROOM + self.length]
    }

    /// The frame's bytes, to be changed.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[HEADROOM..HEADROOM + self.length]
    }

    /// The first `N` bytes of the frame's room, whatever its length: for headers that are written as a whole.
    ///
    /// # Panics
    /// If the capacity is smaller.
    #[inline(always)]
    pub fn front_mut<const N: usize>(&mut self) -> &mut [u8; N] {
        self.buffer[HEADROOM..].first_chunk_mut().expect("a frame has room for its headers")
    }

    /// All the room there is, headroom first: for a backend.
    #[inline]
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Bytes that the frame may have.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.buffer.len() - HEADROOM
    }

    /// Sets the length.
    ///
    /// # Panics
    /// If it exceeds the capacity.
    #[inline]
    pub fn set_length(&mut self, length: usize) {
        assert!(length <= self.capacity());
        self.length = length;
    }

    /// Copies bytes in and forgets what was known.
    ///
    /// # Panics
    /// If they exceed the capacity.
    pub fn fill(&mut self, bytes: &[u8]) {
        self.set_length(bytes.len());
        self.bytes_mut().copy_from_slice(bytes);
        self.checksum = Checksum::Unknown;
        self.segmentation = None;
    }

    /// Becomes a copy of another frame, with all that is known of it.
    ///
    /// # Panics
    /// If its bytes exceed the capacity.
    pub fn copy_from(&mut self, other: &Parts) {
        self.fill(other.bytes());
        self.checksum = other.checksum;
        self.segmentation = other.segmentation;
        self.interface = other.interface;
    }
}

impl Clone for Frame {
    /// A copy with no more room than the bytes need.
    fn clone(&self) -> Self {
        let mut copy = Frame::with_capacity(self.length);
        copy.copy_from(self);
        copy
    }
}

/// What a device does by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// It completes partial checksums.
    pub checksum: bool,
    /// Payload bytes that it takes in one frame and cuts into segments; 0 if it does not.
    pub segmentation: u32,
}

/// A wire.
pub trait Device {
    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Receives one frame into `frame`, whose buffer may be exchanged for another of the same size. False if none waits.
    fn receive(&mut self, frame: &mut Frame) -> bool;

    /// Sends a frame, whose buffer may be exchanged. False if the device had no room: the frame is lost, as on any wire.
    fn transmit(&mut self, frame: &mut Frame) -> bool;

    /// Whether it takes frames without keeping them waiting. One that is not ready takes them still, but should be given no more than must be.
    #[inline]
    fn is_ready(&mut self) -> bool {
        true
    }

    /// Returns when everything that it has taken is where it was to go.
    fn settle(&mut self) {}
}

impl<D: Device + ?Sized> Device for Box<D> {
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        (**self).receive(frame)
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        (**self).transmit(frame)
    }

    fn is_ready(&mut self) -> bool {
        (**self).is_ready()
    }

    fn settle(&mut self) {
        (**self).settle();
    }
}
