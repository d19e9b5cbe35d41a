//! The interface to a wire: frames with their offload state, and the trait of the devices that send and receive them.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

use alloc::boxed::Box;
use alloc::vec;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::AtomicU8;

/// Bytes in front of every frame's data in its buffer, where a backend may put its own header.
pub const HEADROOM: usize = 16;
/// Capacity for the largest frame: an IP packet of 64 KB and its Ethernet header, and 100 bytes to spare, since
/// segments are written before the length of their options is known.
pub const MAX_FRAME: usize = 65_535 + 14 + 100;

/// Interface of a frame that no wire accepts.
pub const NOWHERE: u32 = u32::MAX;

/// Bytes of a large frame that are copied when it is shown: enough for the headers of every ordinary segment.
pub const BEGINNING: usize = 128;

/// Payload in memory that other processes may write at any time. It has up to two pieces, since a circular buffer may
/// wrap.
pub type Payload<'a> = [&'a [AtomicU8]; 2];

/// The state of a frame's TCP or UDP checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Checksum {
    /// The field holds a full checksum that has not been verified.
    #[default]
    Unknown,
    /// A device has verified it.
    Verified,
    /// The field holds the sum of the pseudo-header. The device that puts the frame on a real wire completes it: it
    /// sums from `start` to the end and stores the result at `start + offset`.
    Partial {
        /// Offset in the frame at which the sum begins.
        start: u16,
        /// Offset of the checksum field from `start`.
        offset: u16,
    },
}

/// Segmentation offload of a frame that stands for several TCP segments or, with `udp`, UDP datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segmentation {
    /// Payload bytes of each segment but the last.
    pub size: u16,
    /// Bytes of headers in front of the payload, Ethernet included.
    pub headers: u16,
    /// IPv6 instead of IPv4.
    pub ipv6: bool,
    /// The CWR flag belongs to the first segment only (RFC 3168 section 6.1.2).
    pub ecn: bool,
    /// UDP instead of TCP.
    pub udp: bool,
}

/// A frame and its offload state. It moves as one pointer; its buffer is allocated once and moves with it.
#[derive(Debug)]
pub struct Frame(Box<Parts>);

/// The contents of a [`Frame`].
#[derive(Debug)]
pub struct Parts {
    buffer: Box<[u8]>,
    length: u32,
    /// State of the TCP or UDP checksum.
    pub checksum: Checksum,
    /// Present if the frame stands for several segments.
    pub segmentation: Option<Segmentation>,
    /// Index of the interface that the frame came from or goes to, on a wire that covers several; else 0. [`NOWHERE`]:
    /// no wire accepts it.
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
    /// Makes an empty frame with room for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> Frame {
        assert!(capacity <= u32::MAX as usize);
        let buffer = vec![0; HEADROOM + capacity].into();
        Frame(Box::new(Parts { buffer, length: 0, checksum: Checksum::Unknown, segmentation: None, interface: 0 }))
    }
}

impl Parts {
    /// The frame's data.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[HEADROOM..HEADROOM + self.length as usize]
    }

    /// The frame's data, to be changed.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[HEADROOM..HEADROOM + self.length as usize]
    }

    /// The frame's length in bytes.
    #[inline]
    pub fn length(&self) -> usize {
        self.length as usize
    }

    /// The first `N` bytes of the frame's room, whatever its length: for headers that are written as a whole.
    ///
    /// # Panics
    /// If the capacity is smaller than `N`.
    #[inline(always)]
    pub fn front_mut<const N: usize>(&mut self) -> &mut [u8; N] {
        let front = self.buffer.get_mut(HEADROOM..HEADROOM + N).and_then(|front| front.first_chunk_mut());
        front.expect("a frame has room for its headers")
    }

    /// Sets the frame's length, at most `N`, and gives its first `N` bytes, to be written.
    ///
    /// # Panics
    /// If the capacity is smaller than `N`, or `N` than the length.
    #[inline(always)]
    pub fn begin<const N: usize>(&mut self, length: usize) -> &mut [u8; N] {
        assert!(length <= N);
        self.length = length as u32;
        self.front_mut()
    }

    /// The whole buffer, headroom first, for a backend.
    #[inline]
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Largest length of the frame in bytes.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.buffer.len() - HEADROOM
    }

    /// Sets the frame's length in bytes. Bytes that this adds have any value.
    ///
    /// # Panics
    /// If it exceeds the capacity.
    #[inline]
    pub fn set_length(&mut self, length: usize) {
        assert!(length <= self.capacity());
        self.length = length as u32;
    }

    /// Replaces the data with a copy of `bytes`, without offload state.
    ///
    /// # Panics
    /// If they exceed the capacity.
    pub fn fill(&mut self, bytes: &[u8]) {
        self.set_length(bytes.len());
        self.bytes_mut().copy_from_slice(bytes);
        self.checksum = Checksum::Unknown;
        self.segmentation = None;
    }

    /// Replaces data and offload state with a copy of another frame's.
    ///
    /// # Panics
    /// If the other frame is longer than the capacity.
    pub fn copy_from(&mut self, other: &Parts) {
        self.fill(other.bytes());
        self.checksum = other.checksum;
        self.segmentation = other.segmentation;
        self.interface = other.interface;
    }
}

impl Clone for Frame {
    /// Makes a copy whose capacity is the frame's length.
    fn clone(&self) -> Self {
        let mut copy = Frame::with_capacity(self.length());
        copy.copy_from(self);
        copy
    }
}

/// The offloads that a device supports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// It completes partial checksums.
    pub checksum: bool,
    /// Largest number of payload bytes in a frame that it cuts into segments; 0 if it cuts none.
    pub segmentation: u32,
}

/// The answer of a device that was asked for a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// No frame waits.
    Nothing,
    /// A frame, which was received.
    Frame,
    /// A large frame waits, and its beginning is shown.
    Large,
    /// A frame waits that is longer than its headers can say (BIG TCP). `frame` shows its headers, changed to those of
    /// a segment without payload; this many bytes of payload follow them. Its checksum has been verified by a device,
    /// or will be completed by one.
    Huge(u32),
}

/// A device that sends and receives frames.
pub trait Device {
    /// The offloads that it supports.
    fn capabilities(&self) -> Capabilities;

    /// Whether the device also cuts frames that stand for several UDP datagrams. A device may notice only when it sends
    /// such a frame that it cannot cut it; that frame is lost.
    fn cuts_datagrams(&self) -> bool {
        false
    }

    /// Receives one frame into `frame`, whose buffer may be exchanged for another of the same size. False if no frame
    /// waits.
    fn receive(&mut self, frame: &mut Frame) -> bool;

    /// Receives one frame as [`Device::receive`] does, or shows a large frame: the large frame goes on waiting, and
    /// `frame` gets its length, its offload state and its first [`BEGINNING`] bytes; the bytes behind them are
    /// undefined. Of a huge frame, `frame` gets the headers only. [`Device::receive_apart`] or [`Device::receive`] then
    /// takes the shown frame; the latter may return a huge one as several frames.
    #[inline]
    fn receive_or_show(&mut self, frame: &mut Frame) -> Arrival {
        if self.receive(frame) { Arrival::Frame } else { Arrival::Nothing }
    }

    /// Number of frames taken from the device, and number of frames that have arrived at it so far: frames that arrive
    /// later come after those. A device that does not know returns `u64::MAX` for the latter.
    fn taken_and_come(&self) -> (u64, u64) {
        (0, u64::MAX)
    }

    /// Receives the payload of the frame that is being shown: all bytes behind its first `headers` bytes (at most
    /// [`BEGINNING`]). `payload` must have exactly that length. Returns false if the frame is lost; the content of
    /// `payload` is then undefined.
    fn receive_apart(&mut self, headers: usize, payload: Payload<'_>) -> bool {
        let _ = (headers, payload);
        false
    }

    /// Whether the device can send a frame whose payload lies in other memory than the frame.
    #[inline]
    fn transmits_apart(&self) -> bool {
        false
    }

    /// As [`Device::transmit`], for a frame whose headers are in `frame` and whose payload lies in `payload`. Only for
    /// a device that [`Device::transmits_apart`].
    fn transmit_apart(&mut self, frame: &mut Frame, payload: Payload<'_>) -> bool {
        let _ = (frame, payload);
        false
    }

    /// Sends a frame, whose buffer may be exchanged. False if the device had no room: then the frame is lost, as on any
    /// wire.
    fn transmit(&mut self, frame: &mut Frame) -> bool;

    /// Sends the frames that it has accepted and not sent yet: a device may gather some, and send them together.
    /// Returns how many of them are lost. To be called after every batch.
    #[inline]
    fn flush(&mut self) -> u64 {
        0
    }

    /// Whether the device would send frames without waiting. A device that is not ready still accepts frames, but
    /// callers should give it only those that cannot be postponed.
    #[inline]
    fn is_ready(&mut self) -> bool {
        true
    }

    /// Blocks until all frames that it has accepted have reached their destination.
    fn settle(&mut self) {}
}

impl<D: Device + ?Sized> Device for Box<D> {
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }

    fn cuts_datagrams(&self) -> bool {
        (**self).cuts_datagrams()
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        (**self).receive(frame)
    }

    fn receive_or_show(&mut self, frame: &mut Frame) -> Arrival {
        (**self).receive_or_show(frame)
    }

    fn taken_and_come(&self) -> (u64, u64) {
        (**self).taken_and_come()
    }

    fn receive_apart(&mut self, headers: usize, payload: Payload<'_>) -> bool {
        (**self).receive_apart(headers, payload)
    }

    fn transmits_apart(&self) -> bool {
        (**self).transmits_apart()
    }

    fn transmit_apart(&mut self, frame: &mut Frame, payload: Payload<'_>) -> bool {
        (**self).transmit_apart(frame, payload)
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        (**self).transmit(frame)
    }

    fn flush(&mut self) -> u64 {
        (**self).flush()
    }

    fn is_ready(&mut self) -> bool {
        (**self).is_ready()
    }

    fn settle(&mut self) {
        (**self).settle();
    }
}
