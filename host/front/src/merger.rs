//! Segments in, aggregates out: large receive between the two directions of the TAP.

use crate::status::Figures;
use baton_backends::VnetDevice;
use baton_device::{Checksum, Device, Frame, MAX_FRAME};
use baton_linux::process;
use baton_lro::{Lro, LroSettings};
use baton_steering::front::PAUSE;
use baton_wire::checksum::pseudo_header;
use baton_wire::frame::{ETHERNET, IPV4, IPV6, PROTOCOL_TCP, TCP_CHECKSUM};
use baton_wire::offset::{ipv4, ipv6};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// A connection that was idle for so long, in microseconds, may have passed meanwhile. The process reads a segment some
/// time after the filter has seen it.
const IDLE: u64 = PAUSE / 1000 * 3 / 4;

/// Frames that are given to the kernel together at most.
const TOGETHER: usize = 4;
/// Bytes of a large frame: more is likely to follow at once.
const LARGE: usize = 60_000;

/// Large receive, and the way to the kernel.
pub(crate) struct Merger {
    lro: Lro,
    frame: Frame,
    out: Out,
    /// Whether checksums may be partial without a word of it.
    partial: bool,
    taken: u64,
}

/// The way to the kernel. Large frames of one batch wait here for each other: given one by one, each would interrupt
/// the processor that receives it, and wake its reader.
struct Out {
    tap: VnetDevice,
    /// The first `waiting` of them wait, the others are free.
    frames: [Frame; TOGETHER],
    waiting: usize,
    given: u64,
    refused: u64,
}

impl Out {
    fn new(tap: OwnedFd) -> Out {
        let frames = std::array::from_fn(|_| Frame::with_capacity(MAX_FRAME));
        Out { tap: VnetDevice::new(tap, true), frames, waiting: 0, given: 0, refused: 0 }
    }

    /// Takes a frame, whose buffer is exchanged for another.
    #[inline]
    fn take(&mut self, frame: &mut Frame) {
        let large = frame.length() >= LARGE;
        if frame.capacity() < MAX_FRAME {
            self.frames[self.waiting].copy_from(frame);
        } else {
            std::mem::swap(&mut self.frames[self.waiting], frame);
        }
        self.waiting += 1;
        if !large || self.waiting == TOGETHER {
            self.give();
        }
    }

    /// Gives what waits to the kernel.
    fn give(&mut self) {
        for frame in &mut self.frames[..self.waiting] {
            let accepted = self.tap.transmit(frame);
            *(if accepted { &mut self.given } else { &mut self.refused }) += 1;
        }
        self.waiting = 0;
    }
}

impl Merger {
    /// With `partial`, a checksum field that holds the sum of the pseudo-header counts as one that is left to the
    /// receiver.
    pub fn new(mut settings: LroSettings, tap: OwnedFd, partial: bool, now: u64) -> io::Result<Merger> {
        let mut key = [0u8; 32];
        process::random(&mut key)?;
        for (word, bytes) in settings.hash_key.iter_mut().zip(key.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
        }
        Ok(Merger {
            lro: Lro::new(settings, now).missing_some_after(IDLE),
            frame: Frame::with_capacity(MAX_FRAME),
            out: Out::new(tap),
            partial,
            taken: 0,
        })
    }

    /// The TAP, to be polled for frames.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.out.tap.fd()
    }

    /// Takes the next frame at `now` microseconds. False if none waits.
    #[inline]
    pub fn receive(&mut self, now: u64) -> bool {
        let Merger { lro, frame, out, partial, taken } = self;
        if !out.tap.receive(frame) {
            return false;
        }
        if is_tcp(frame) {
            *taken += 1;
            if *partial && let Some(checksum) = partial_checksum(frame) {
                frame.checksum = checksum;
            }
            lro.receive(frame, now, &mut |frame| out.take(frame));
        }
        true
    }

    /// Gives to the kernel whatever has waited long enough, and what has only waited for the rest of its batch.
    #[inline]
    pub fn expire(&mut self, now: u64) {
        let Merger { lro, out, .. } = self;
        if lro.next_tick() <= now {
            lro.expire(now, &mut |frame| out.take(frame));
        }
        out.give();
    }

    /// When an aggregate has waited long enough, in microseconds; None if none waits.
    pub fn next_expiry(&self) -> Option<u64> {
        self.lro.next_expiry()
    }

    /// Gives everything to the kernel.
    pub fn flush(&mut self, now: u64) {
        let Merger { lro, out, .. } = self;
        lro.flush_all(now, &mut |frame| out.take(frame));
        out.give();
    }

    /// Forgets everything that waits. Returns how many frames that were.
    pub fn forget(&mut self, now: u64) -> u64 {
        let mut forgotten = self.out.waiting as u64;
        self.out.waiting = 0;
        while self.out.tap.receive(&mut self.frame) {
            forgotten += 1;
        }
        self.lro.flush_all(now, &mut |_| forgotten += 1);
        forgotten
    }

    pub fn figures(&self) -> Figures {
        let (counters, out) = (self.lro.counters(), &self.out);
        Figures {
            taken: self.taken,
            given: out.given,
            refused: out.refused,
            merged: counters.merged,
            aggregates: counters.aggregates,
            aggregate_bytes: counters.bytes,
            ..Figures::default()
        }
    }
}

/// The state of a segment's checksum if its field holds the sum of the pseudo-header: what the sending kernel leaves to
/// a card, and nobody did. A whole checksum is this number by chance only, as that of a damaged segment is right.
#[inline]
fn partial_checksum(frame: &Frame) -> Option<Checksum> {
    let bytes = frame.bytes();
    let v4 = bytes[12..14] == [0x08, 0x00];
    let start = ETHERNET + if v4 { IPV4 } else { IPV6 };
    let ip = &bytes[ETHERNET..];
    let (source, destination) = if v4 {
        (ip.get(ipv4::SOURCE..)?, ip.get(ipv4::DESTINATION..)?)
    } else {
        (ip.get(ipv6::SOURCE..)?, ip.get(ipv6::DESTINATION..)?)
    };
    let size = if v4 { 4 } else { 16 };
    let sum = pseudo_header(source.get(..size)?, destination.get(..size)?, PROTOCOL_TCP, bytes.len().checked_sub(start)?);
    let field = bytes.get(start + TCP_CHECKSUM..start + TCP_CHECKSUM + 2)?;
    (field == sum.folded().to_be_bytes()).then_some(Checksum::Partial { start: start as u16, offset: TCP_CHECKSUM as u16 })
}

/// Whether the filter can have taken a frame. What else is sent by the TAP comes from some program on this host that
/// uses every device.
#[inline]
fn is_tcp(frame: &Frame) -> bool {
    let bytes = frame.bytes();
    let protocol = match bytes.get(12..14) {
        Some([0x08, 0x00]) => bytes.get(ETHERNET + ipv4::PROTOCOL),
        Some([0x86, 0xdd]) => bytes.get(ETHERNET + ipv6::NEXT_HEADER),
        _ => None,
    };
    protocol == Some(&PROTOCOL_TCP)
}
