//! Frames that are not TCP segments cross the NIC in both directions unchanged and in order, with all settings of the
//! offloads, also while these change. Frames with wrong headers are counted, and nothing panics.

use baton_abi::layout::{Counter, nic};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{Worker, WorkerOffloads, WorkerSettings};
use baton_device::{Capabilities, Checksum, Device, Frame, MAX_FRAME, Segmentation};
use baton_lro::Mode;
use baton_moderation::Mode as Moderation;
use baton_shm::Region;
use baton_sim::frames::{ipv4, of_every_kind};
use baton_tcp::Instant;
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const MODES: [Mode; 3] = [Mode::Off, Mode::InOrder, Mode::Reorder];
const MODERATIONS: [Moderation; 3] = [Moderation::Off, Moderation::Static { time: 20, frames: 7 }, Moderation::Adaptive];

struct Stage {
    worker: Worker<MemoryDevice, MemoryDevice>,
    far: MemoryDevice,
    kernel: MemoryDevice,
    memory: Arc<Region>,
    now: Instant,
}

impl Stage {
    fn new(mode: Mode, moderation: Moderation) -> Stage {
        let capabilities = Capabilities { checksum: false, segmentation: 0 };
        let (wire, far) = memory_pair(256, MAX_FRAME, capabilities);
        let (host, kernel) = memory_pair(256, MAX_FRAME, capabilities);
        let memory = Arc::new(Region::private(nic::bytes(4)).unwrap());
        let lro = baton_lro::LroSettings { mode, ..Default::default() };
        let settings = WorkerSettings { slots: 4, hash_key: [1, 2, 3, 4], lro, moderation, ..WorkerSettings::default() };
        let now = Instant(1_000_000);
        let mut worker = Worker::new(host, wire, memory.clone(), settings, now);
        worker.start(now);
        Stage { worker, far, kernel, memory, now }
    }

    /// Lets time pass until nothing waits.
    fn settle(&mut self) {
        for _ in 0..400 {
            self.now = Instant(self.now.0 + 16);
            self.worker.poll(self.now);
        }
    }

    fn count(&self, counter: Counter) -> u64 {
        self.memory.words(nic::COUNTERS, baton_abi::layout::COUNTERS)[counter as usize].load(Ordering::Relaxed)
    }

    /// The frames that come out at a device.
    fn out(device: &mut MemoryDevice) -> Vec<Vec<u8>> {
        let mut frame = Frame::with_capacity(MAX_FRAME);
        let mut all = Vec::new();
        while device.receive(&mut frame) {
            all.push(frame.bytes().to_vec());
        }
        all
    }
}

#[test]
fn other_frames_cross_unchanged() {
    for mode in MODES {
        for moderation in MODERATIONS {
            let mut stage = Stage::new(mode, moderation);
            let expected: Vec<Vec<u8>> = of_every_kind().into_iter().cycle().take(100).collect();
            let mut frame = Frame::with_capacity(MAX_FRAME);
            let (mut at_kernel, mut at_wire) = (Vec::new(), Vec::new());
            for (number, bytes) in expected.iter().enumerate() {
                frame.fill(bytes);
                assert!(stage.far.transmit(&mut frame));
                frame.fill(bytes);
                assert!(stage.kernel.transmit(&mut frame));
                stage.now = Instant(stage.now.0 + number as u64 % 9);
                stage.worker.poll(stage.now);
                if number % 10 == 9 {
                    let next = MODES[number / 10 % 3];
                    let lro = baton_lro::LroSettings { mode: next, ..Default::default() };
                    let (moderation, active_ack) = (MODERATIONS[number / 30 % 3], number / 20 % 2 == 0);
                    stage.worker.set_offloads(
                        &WorkerOffloads { lro, moderation, doorbells: moderation, active_ack, ..WorkerOffloads::default() },
                        stage.now,
                    );
                }
                at_kernel.extend(Stage::out(&mut stage.kernel));
                at_wire.extend(Stage::out(&mut stage.far));
            }
            stage.settle();
            at_kernel.extend(Stage::out(&mut stage.kernel));
            at_wire.extend(Stage::out(&mut stage.far));
            assert!(at_kernel == expected, "{mode:?}, {moderation:?}: to the kernel");
            assert!(at_wire == expected, "{mode:?}, {moderation:?}: to the wire");
        }
    }
}

proptest! {
    /// Frames of the kernel's that claim to be large, with any sizes, and frames of the wire's with any bytes.
    #[test]
    fn wrong_headers_are_counted(
        frames in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 14..200), any::<u16>(), any::<u16>(), any::<bool>(), 0usize..30), 1..30),
        mode in 0usize..3,
    ) {
        let mut stage = Stage::new(MODES[mode], Moderation::Adaptive);
        let mut frame = Frame::with_capacity(MAX_FRAME);
        let (mut large, mut plain) = (0, 0);
        for (bytes, size, headers, ipv6, kind) in &frames {
            // Some are almost valid: a TCP segment with a few bytes changed.
            let mut bytes = bytes.clone();
            if *kind < 10 {
                let mut segment = ipv4(6, 0x4000, &[&[0, 80, 1, 1, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0, 0, 0, 0, 0][..], &bytes].concat());
                let at = 14 + usize::from(*headers) % 40;
                segment[at] = segment[at].wrapping_add((*size % 3) as u8);
                bytes = segment;
            }
            frame.fill(&bytes);
            frame.segmentation = Some(Segmentation { size: *size % 2000, headers: *headers, ipv6: *ipv6, ecn: false, udp: false });
            frame.checksum = Checksum::Partial { start: *headers, offset: *size };
            prop_assert!(stage.kernel.transmit(&mut frame));
            large += 1;
            frame.fill(&bytes);
            prop_assert!(stage.far.transmit(&mut frame));
            plain += 1;
            stage.now = Instant(stage.now.0 + 3);
            stage.worker.poll(stage.now);
            while stage.far.receive(&mut frame) {}
        }
        stage.settle();
        prop_assert_eq!(stage.count(Counter::Cut) + stage.count(Counter::Uncut), large);
        let delivered = Stage::out(&mut stage.kernel).len() as u64;
        prop_assert!(delivered >= 1 && delivered <= plain);
        prop_assert_eq!(delivered, stage.count(Counter::HostSent));
    }
}
