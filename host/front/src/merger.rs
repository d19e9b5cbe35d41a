//! Segments in, aggregates out: large receive between the filter's ring and the TAP.

use crate::status::Figures;
use baton_backends::VnetDevice;
use baton_device::{Checksum, Device, Frame, MAX_FRAME, Segmentation};
use baton_linux::process;
use baton_lro::{Lro, LroSettings};
use baton_steering::front::{Summed, Taken};
use baton_wire::frame::TCP_CHECKSUM;
use baton_wire::{Flags, FlowKey, TcpFrame};
use std::io;
use std::os::fd::OwnedFd;

/// Offset of the flags in a TCP header.
const FLAGS: usize = 13;

/// Large receive, and the way to the kernel.
pub(crate) struct Merger {
    lro: Lro,
    tap: VnetDevice,
    frame: Frame,
    figures: Figures,
}

impl Merger {
    pub fn new(mut settings: LroSettings, tap: OwnedFd, now: u64) -> io::Result<Merger> {
        let mut key = [0u8; 32];
        process::random(&mut key)?;
        for (word, bytes) in settings.hash_key.iter_mut().zip(key.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
        }
        Ok(Merger {
            lro: Lro::new(settings, now),
            tap: VnetDevice::new(tap, true),
            frame: Frame::with_capacity(MAX_FRAME),
            figures: Figures::default(),
        })
    }

    /// Takes a frame at `now` microseconds.
    #[inline]
    pub fn receive(&mut self, taken: Taken<'_>, now: u64) {
        let Merger { lro, tap, frame, figures } = self;
        fill(frame, &taken);
        figures.taken += 1;
        if taken.starts
            && let Ok(parsed) = TcpFrame::parse(taken.bytes)
        {
            // The connection's segments since the last one here have gone another way: no gap is to be waited for.
            lro.flush(&FlowKey::from(&parsed.flow), now, &mut |frame| give(tap, figures, frame));
        }
        lro.receive(frame, now, &mut |frame| give(tap, figures, frame));
    }

    /// Gives to the kernel whatever has waited long enough.
    #[inline]
    pub fn expire(&mut self, now: u64) {
        if self.lro.next_tick() <= now {
            let Merger { lro, tap, figures, .. } = self;
            lro.expire(now, &mut |frame| give(tap, figures, frame));
        }
    }

    /// When [`Merger::expire`] has something to do, in microseconds; None if nothing waits.
    pub fn next_expiry(&self) -> Option<u64> {
        self.lro.next_expiry()
    }

    /// Gives everything to the kernel.
    pub fn flush(&mut self, now: u64) {
        let Merger { lro, tap, figures, .. } = self;
        lro.flush_all(now, &mut |frame| give(tap, figures, frame));
    }

    /// Forgets everything that waits. Returns how many frames that were.
    pub fn forget(&mut self, now: u64) -> u64 {
        let mut forgotten = 0;
        self.lro.flush_all(now, &mut |_| forgotten += 1);
        forgotten
    }

    pub fn figures(&self) -> Figures {
        let counters = self.lro.counters();
        Figures { merged: counters.merged, aggregates: counters.aggregates, aggregate_bytes: counters.bytes, ..self.figures }
    }
}

#[inline]
fn give(tap: &mut VnetDevice, figures: &mut Figures, frame: &mut Frame) {
    if tap.transmit(frame) {
        figures.given += 1;
    } else {
        figures.refused += 1;
    }
}

/// Copies a frame and its offload state.
#[inline]
fn fill(frame: &mut Frame, taken: &Taken<'_>) {
    frame.fill(taken.bytes);
    frame.checksum = match taken.summed {
        Summed::Unknown => Checksum::Unknown,
        Summed::Verified => Checksum::Verified,
        Summed::Partial => Checksum::Partial { start: taken.tcp_at, offset: TCP_CHECKSUM as u16 },
    };
    if taken.segment_size > 0 {
        let flags = taken.bytes.get(usize::from(taken.tcp_at) + FLAGS).copied().unwrap_or(0);
        frame.segmentation = Some(Segmentation {
            size: taken.segment_size,
            headers: taken.payload_at,
            ipv6: taken.bytes.get(12..14) == Some(&[0x86, 0xdd]),
            ecn: Flags(flags).contains(Flags::CWR),
            udp: false,
        });
    }
}
