//! The copy engine at work: a thread that writes every worker's frames to the kernel, and a worker's end of it.
//!
//! A card's engine is silicon that its workers share. Here every worker can write to the kernel by itself, and does so where it has a queue
//! there; with one queue for all, or where it is wished, one thread does it for all, in the order of [`baton_copy`].

use anyhow::{Context, Result};
use baton_backends::{Kernel, VnetDevice};
use baton_copy::{Engine, Kind, Settings};
use baton_device::{Capabilities, Device, Frame, MAX_FRAME};
use baton_linux::events::{Doorbell, Poller, Trigger, monotonic_micros, monotonic_nanos};
use baton_linux::process;
use baton_ring::{go_to_sleep, needs_doorbell, wake_up};
use rtrb::{Consumer, Producer, RingBuffer};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// A worker's frames that the engine holds at most; beyond that the worker takes nothing from the wire.
const CREDIT: usize = 128;
/// Frames written before the engine looks at what has come meanwhile.
const BATCH: usize = 4;

/// What the engine tells a worker.
#[derive(Default)]
struct Told {
    /// Frames written, those of them that the kernel did not take, and set-ups that went before others' frames.
    done: AtomicU64,
    failed: AtomicU64,
    went_before: AtomicU64,
    /// Nanoseconds that writing them took.
    nanos: AtomicU64,
}

/// What both sides see.
struct Shared {
    told: Vec<Told>,
    sleeping: AtomicU32,
    bell: Doorbell,
}

/// A worker's end: the kernel to it.
pub(crate) struct Through {
    kernel: Kernel,
    me: usize,
    to: Producer<Frame>,
    back: Consumer<Frame>,
    /// What the engine has no room for.
    overflow: VecDeque<Frame>,
    /// Buffers that may still be made.
    unmade: usize,
    sent: u64,
    failed_seen: u64,
    shared: Arc<Shared>,
}

impl Through {
    fn spare(&mut self) -> Option<Frame> {
        while let Ok(frame) = self.back.pop() {
            if frame.capacity() >= MAX_FRAME {
                return Some(frame);
            }
        }
        self.unmade = self.unmade.checked_sub(1)?;
        Some(Frame::with_capacity(MAX_FRAME))
    }

    /// Frames that the engine has.
    fn under_way(&self) -> u64 {
        self.sent - self.overflow.len() as u64 - self.shared.told[self.me].done.load(Ordering::Acquire)
    }

    /// Hands over what there is room for.
    fn push(&mut self) {
        while self.under_way() < CREDIT as u64
            && let Some(frame) = self.overflow.pop_front()
        {
            if let Err(rtrb::PushError::Full(frame)) = self.to.push(frame) {
                self.overflow.push_front(frame);
                break;
            }
        }
        if needs_doorbell(&self.shared.sleeping) {
            self.shared.bell.ring();
        }
    }

    fn failed(&mut self) -> u64 {
        let failed = self.shared.told[self.me].failed.load(Ordering::Relaxed);
        failed - std::mem::replace(&mut self.failed_seen, failed)
    }
}

impl Device for Through {
    fn capabilities(&self) -> Capabilities {
        self.kernel.capabilities()
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        self.kernel.receive(frame)
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        let leaves = match self.spare() {
            Some(spare) if frame.capacity() >= MAX_FRAME => std::mem::replace(frame, spare),
            Some(mut spare) => {
                spare.copy_from(frame);
                spare
            }
            None => frame.clone(),
        };
        self.sent += 1;
        self.overflow.push_back(leaves);
        self.push();
        true
    }

    fn is_ready(&mut self) -> bool {
        if !self.overflow.is_empty() {
            self.push();
        }
        self.overflow.is_empty()
    }

    fn settle(&mut self) {
        // The engine needs nothing of this thread, and has a bounded number of frames to write.
        while self.shared.told[self.me].done.load(Ordering::Acquire) != self.sent {
            self.push();
            std::thread::yield_now();
        }
    }
}

/// How a worker reaches the kernel.
pub(crate) enum Host {
    /// By itself, in so many nanoseconds up to now.
    Own(Kernel, u64),
    /// Through the engine.
    Through(Box<Through>),
}

impl Host {
    /// The descriptor, to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Host::Own(kernel, _) => kernel.fd(),
            Host::Through(through) => through.kernel.fd(),
        }
    }

    /// Nanoseconds that writing to the kernel took, and set-ups that went before frames that had waited longer.
    pub fn figures(&self) -> [u64; 2] {
        match self {
            Host::Own(_, nanos) => [*nanos, 0],
            Host::Through(through) => {
                let told = &through.shared.told[through.me];
                [told.nanos.load(Ordering::Relaxed), told.went_before.load(Ordering::Relaxed)]
            }
        }
    }

    /// Frames that the kernel did not take after all, since this was asked last.
    pub fn failed(&mut self) -> u64 {
        match self {
            Host::Own(..) => 0,
            Host::Through(through) => through.failed(),
        }
    }
}

impl Device for Host {
    fn capabilities(&self) -> Capabilities {
        match self {
            Host::Own(kernel, _) => kernel.capabilities(),
            Host::Through(through) => through.capabilities(),
        }
    }

    #[inline]
    fn receive(&mut self, frame: &mut Frame) -> bool {
        match self {
            Host::Own(kernel, _) => kernel.receive(frame),
            Host::Through(through) => through.receive(frame),
        }
    }

    #[inline]
    fn transmit(&mut self, frame: &mut Frame) -> bool {
        match self {
            Host::Own(kernel, nanos) => {
                let started = monotonic_nanos();
                let sent = kernel.transmit(frame);
                *nanos += monotonic_nanos() - started;
                sent
            }
            Host::Through(through) => through.transmit(frame),
        }
    }

    #[inline]
    fn is_ready(&mut self) -> bool {
        match self {
            Host::Own(..) => true,
            Host::Through(through) => through.is_ready(),
        }
    }

    fn settle(&mut self) {
        match self {
            Host::Own(..) => {}
            Host::Through(through) => through.settle(),
        }
    }
}

/// What the engine has of one worker.
struct Lane {
    from: Consumer<Frame>,
    back: Producer<Frame>,
    kernel: VnetDevice,
}

/// The engine.
pub(crate) struct CopyEngine {
    engine: Engine<Frame>,
    lanes: Vec<Lane>,
    shared: Arc<Shared>,
    poller: Poller,
    spin: u64,
}

impl CopyEngine {
    /// Puts an engine between workers and the kernel. It writes to descriptors of its own.
    ///
    /// # Errors
    /// The system's.
    pub fn between(kernels: Vec<Kernel>, segmentation: bool, spin: u64) -> Result<(CopyEngine, Vec<Host>)> {
        let bell = Doorbell::new()?;
        let poller = Poller::new()?;
        poller.add(bell.as_fd(), 0, Trigger::Readable)?;
        let told = kernels.iter().map(|_| Told::default()).collect();
        let shared = Arc::new(Shared { told, sleeping: AtomicU32::new(0), bell });
        let (mut lanes, mut hosts) = (Vec::new(), Vec::new());
        for (me, kernel) in kernels.into_iter().enumerate() {
            let (to, from) = RingBuffer::new(CREDIT);
            let (back, returned) = RingBuffer::new(2 * CREDIT);
            let own = kernel.fd().try_clone_to_owned().context("a descriptor for the copy engine")?;
            lanes.push(Lane { from, back, kernel: VnetDevice::new(own, segmentation) });
            hosts.push(Host::Through(Box::new(Through {
                kernel,
                me,
                to,
                back: returned,
                overflow: VecDeque::with_capacity(CREDIT),
                unmade: CREDIT,
                sent: 0,
                failed_seen: 0,
                shared: shared.clone(),
            })));
        }
        let engine = Engine::new(lanes.len(), Settings { room: CREDIT, ..Settings::default() });
        Ok((CopyEngine { engine, lanes, shared, poller, spin }, hosts))
    }

    fn take_in(&mut self) {
        for (worker, lane) in self.lanes.iter_mut().enumerate() {
            while self.engine.has_room(worker)
                && let Ok(frame) = lane.from.pop()
            {
                let (bytes, kind) = (frame.bytes().len(), Kind::of(frame.bytes()));
                let _ = self.engine.push(worker, frame, bytes, kind);
            }
        }
    }

    /// A few frames, in turn. Whether there were any.
    fn round(&mut self) -> bool {
        self.take_in();
        for count in 0..BATCH {
            let Some((worker, mut frame)) = self.engine.pop() else { return count > 0 };
            let (lane, told) = (&mut self.lanes[worker], &self.shared.told[worker]);
            let started = monotonic_nanos();
            if !lane.kernel.transmit(&mut frame) {
                told.failed.fetch_add(1, Ordering::Relaxed);
            }
            told.nanos.fetch_add(monotonic_nanos() - started, Ordering::Relaxed);
            told.went_before.store(self.engine.counters(worker).went_before, Ordering::Relaxed);
            // One that does not fit was made beyond the worker's share.
            let _ = lane.back.push(frame);
            told.done.fetch_add(1, Ordering::Release);
        }
        true
    }

    /// Works as long as the process lives.
    ///
    /// # Errors
    /// The system's.
    pub fn run(&mut self, core: Option<usize>) -> Result<()> {
        if let Some(core) = core {
            process::pin(0, core);
        }
        let mut tokens = Vec::new();
        let mut idle_since = monotonic_micros();
        loop {
            if self.round() {
                idle_since = monotonic_micros();
                continue;
            }
            if monotonic_micros() - idle_since <= self.spin {
                std::hint::spin_loop();
                continue;
            }
            go_to_sleep(&self.shared.sleeping);
            if self.lanes.iter().all(|lane| lane.from.is_empty()) {
                self.poller.wait(Some(Duration::from_secs(1)), &mut tokens)?;
                tokens.clear();
            }
            wake_up(&self.shared.sleeping);
            self.shared.bell.clear();
            idle_since = monotonic_micros();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    /// The kernel, as far as the engine sees it: somewhere to write frames to.
    fn lane() -> (Kernel, UnixDatagram) {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Kernel::Inline(VnetDevice::new(ours.into(), true)), theirs)
    }

    fn frame(number: u32) -> Frame {
        let mut frame = Frame::with_capacity(MAX_FRAME);
        frame.fill(&[&[0; 60][..], &number.to_be_bytes()].concat());
        frame
    }

    #[test]
    fn a_worker_waits_for_an_engine_that_is_behind() {
        let (kernel, _theirs) = lane();
        let (mut engine, mut hosts) = CopyEngine::between(vec![kernel], true, 0).unwrap();
        let host = &mut hosts[0];
        let mut given = 0;
        while host.is_ready() {
            assert!(host.transmit(&mut frame(given)));
            given += 1;
        }
        assert_eq!(given as usize, CREDIT + 1, "the last one waits at the worker");
        while engine.round() {}
        assert!(host.is_ready());
        while engine.round() {}
        host.settle();
    }

    #[test]
    fn everything_is_there_when_it_has_settled() {
        let (kernel, theirs) = lane();
        let (mut engine, mut hosts) = CopyEngine::between(vec![kernel], true, 50).unwrap();
        std::thread::spawn(move || engine.run(None));
        theirs.set_nonblocking(true).unwrap();
        let mut buffer = [0; 100];
        for round in 0..200 {
            for number in 0..round % 7 + 1 {
                hosts[0].transmit(&mut frame(number));
            }
            hosts[0].settle();
            for number in 0..round % 7 + 1 {
                assert_eq!(theirs.recv(&mut buffer).unwrap(), 74);
                assert_eq!(buffer[70..74], number.to_be_bytes());
            }
        }
    }
}
