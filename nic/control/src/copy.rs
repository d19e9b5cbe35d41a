//! The copy engine's thread, which writes the frames of all workers to the kernel, and the workers' ends of it.
//!
//! On a card the engine is hardware that the workers share. Here every worker can write to the kernel by itself, and
//! does so if it has a queue there. With one queue for all, or if configured, one thread writes for all, in the order
//! of [`baton_copy`].

use anyhow::{Context, Result};
use baton_backends::{Kernel, VnetDevice};
use baton_copy::{CopySettings, Engine, Kind};
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

/// Largest number of a worker's frames that the engine holds. At this limit the worker receives no more from the wire.
const CREDIT: usize = 128;
/// Number of frames written before the engine takes new frames from the workers.
const BATCH: usize = 4;

/// The engine's counters for a worker.
#[derive(Default)]
struct Progress {
    /// Frames written; frames of these that the kernel did not accept; SYNs written before other frames that had waited
    /// longer.
    done: AtomicU64,
    failed: AtomicU64,
    syns_first: AtomicU64,
    /// Nanoseconds spent writing them.
    nanos: AtomicU64,
}

/// The state that the engine and the workers share.
struct Shared {
    progress: Vec<Progress>,
    sleeping: AtomicU32,
    bell: Doorbell,
}

/// A worker's end of the engine, which is the worker's device to the kernel.
pub(crate) struct EngineClient {
    kernel: Kernel,
    me: usize,
    to: Producer<Frame>,
    back: Consumer<Frame>,
    /// Frames that the engine has no room for yet.
    overflow: VecDeque<Frame>,
    /// Number of buffers that may still be allocated.
    buffers_left: usize,
    /// Frames accepted from the worker.
    sent: u64,
    /// Value of `failed` when it was last read.
    failed_seen: u64,
    shared: Arc<Shared>,
}

impl EngineClient {
    /// A free buffer: one that the engine has returned, or a new one.
    fn spare(&mut self) -> Option<Frame> {
        while let Ok(frame) = self.back.pop() {
            if frame.capacity() >= MAX_FRAME {
                return Some(frame);
            }
        }
        self.buffers_left = self.buffers_left.checked_sub(1)?;
        Some(Frame::with_capacity(MAX_FRAME))
    }

    /// Number of frames that the engine holds.
    fn under_way(&self) -> u64 {
        self.sent - self.overflow.len() as u64 - self.shared.progress[self.me].done.load(Ordering::Acquire)
    }

    /// Passes waiting frames to the engine, as many as it has room for.
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

    /// Frames that the kernel did not accept since the last call.
    fn failed(&mut self) -> u64 {
        let failed = self.shared.progress[self.me].failed.load(Ordering::Relaxed);
        failed - std::mem::replace(&mut self.failed_seen, failed)
    }
}

impl Device for EngineClient {
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
        // The engine does not depend on this thread, and has a bounded number of frames to write.
        while self.shared.progress[self.me].done.load(Ordering::Acquire) != self.sent {
            self.push();
            std::thread::yield_now();
        }
    }
}

/// A worker's device to the kernel.
pub(crate) enum Host {
    /// The worker writes itself; with the nanoseconds spent writing so far.
    Direct(Kernel, u64),
    /// The copy engine writes.
    Engine(Box<EngineClient>),
}

impl Host {
    /// The descriptor, to be polled for frames.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Host::Direct(kernel, _) => kernel.fd(),
            Host::Engine(engine) => engine.kernel.fd(),
        }
    }

    /// Nanoseconds spent writing to the kernel, and SYNs sent before frames that had waited longer.
    pub fn write_statistics(&self) -> [u64; 2] {
        match self {
            Host::Direct(_, nanos) => [*nanos, 0],
            Host::Engine(engine) => {
                let progress = &engine.shared.progress[engine.me];
                [progress.nanos.load(Ordering::Relaxed), progress.syns_first.load(Ordering::Relaxed)]
            }
        }
    }

    /// Frames that the kernel did not accept although [`Device::transmit`] had returned true, since the last call.
    pub fn failed(&mut self) -> u64 {
        match self {
            Host::Direct(..) => 0,
            Host::Engine(engine) => engine.failed(),
        }
    }
}

impl Device for Host {
    fn capabilities(&self) -> Capabilities {
        match self {
            Host::Direct(kernel, _) => kernel.capabilities(),
            Host::Engine(engine) => engine.capabilities(),
        }
    }

    #[inline]
    fn receive(&mut self, frame: &mut Frame) -> bool {
        match self {
            Host::Direct(kernel, _) => kernel.receive(frame),
            Host::Engine(engine) => engine.receive(frame),
        }
    }

    #[inline]
    fn transmit(&mut self, frame: &mut Frame) -> bool {
        match self {
            Host::Direct(kernel, nanos) => {
                let started = monotonic_nanos();
                let sent = kernel.transmit(frame);
                *nanos += monotonic_nanos() - started;
                sent
            }
            Host::Engine(engine) => engine.transmit(frame),
        }
    }

    #[inline]
    fn is_ready(&mut self) -> bool {
        match self {
            Host::Direct(..) => true,
            Host::Engine(engine) => engine.is_ready(),
        }
    }

    fn settle(&mut self) {
        match self {
            Host::Direct(..) => {}
            Host::Engine(engine) => engine.settle(),
        }
    }
}

/// The engine's end of one worker.
struct Lane {
    from: Consumer<Frame>,
    back: Producer<Frame>,
    kernel: VnetDevice,
}

/// The copy engine.
pub(crate) struct CopyEngine {
    engine: Engine<Frame>,
    lanes: Vec<Lane>,
    shared: Arc<Shared>,
    poller: Poller,
    spin: u64,
}

impl CopyEngine {
    /// Puts an engine between workers and the kernel. It writes to duplicates of the workers' descriptors.
    ///
    /// # Errors
    /// The system's error, if it gives no descriptor.
    pub fn between(kernels: Vec<Kernel>, segmentation: bool, spin: u64) -> Result<(CopyEngine, Vec<Host>)> {
        let bell = Doorbell::new()?;
        let poller = Poller::new()?;
        poller.add(bell.as_fd(), 0, Trigger::Readable)?;
        let progress = kernels.iter().map(|_| Progress::default()).collect();
        let shared = Arc::new(Shared { progress, sleeping: AtomicU32::new(0), bell });
        let (mut lanes, mut hosts) = (Vec::new(), Vec::new());
        for (me, kernel) in kernels.into_iter().enumerate() {
            let (to, from) = RingBuffer::new(CREDIT);
            let (back, returned) = RingBuffer::new(2 * CREDIT);
            let own = kernel.fd().try_clone_to_owned().context("a descriptor for the copy engine")?;
            lanes.push(Lane { from, back, kernel: VnetDevice::new(own, segmentation) });
            hosts.push(Host::Engine(Box::new(EngineClient {
                kernel,
                me,
                to,
                back: returned,
                overflow: VecDeque::with_capacity(CREDIT),
                buffers_left: CREDIT,
                sent: 0,
                failed_seen: 0,
                shared: shared.clone(),
            })));
        }
        let engine = Engine::new(lanes.len(), CopySettings { room: CREDIT, ..CopySettings::default() });
        Ok((CopyEngine { engine, lanes, shared, poller, spin }, hosts))
    }

    /// Takes new frames from the workers.
    fn take_in(&mut self) {
        for (worker, lane) in self.lanes.iter_mut().enumerate() {
            while self.engine.has_room(worker)
                && let Ok(frame) = lane.from.pop()
            {
                let (bytes, kind) = (frame.length(), Kind::of(frame.bytes()));
                let _ = self.engine.push(worker, frame, bytes, kind);
            }
        }
    }

    /// Writes a few frames, in turn. Returns whether there were any.
    fn round(&mut self) -> bool {
        self.take_in();
        for count in 0..BATCH {
            let Some((worker, mut frame)) = self.engine.pop() else { return count > 0 };
            let (lane, progress) = (&mut self.lanes[worker], &self.shared.progress[worker]);
            let started = monotonic_nanos();
            if !lane.kernel.transmit(&mut frame) {
                progress.failed.fetch_add(1, Ordering::Relaxed);
            }
            progress.nanos.fetch_add(monotonic_nanos() - started, Ordering::Relaxed);
            progress.syns_first.store(self.engine.counters(worker).syns_first, Ordering::Relaxed);
            // A buffer that does not fit into the ring is more than the worker's share, and is freed.
            let _ = lane.back.push(frame);
            progress.done.fetch_add(1, Ordering::Release);
        }
        true
    }

    /// Runs the engine as long as the process lives, on core `core` if one is given.
    ///
    /// # Errors
    /// The system's error, if waiting fails.
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

    /// A kernel device for the engine to write to, and the end at which the frames arrive.
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
