//! Large receive's counters: why frames went to the kernel as they did.

use crate::stage::flow;
use baton_abi::layout::{COUNTERS, Counter, nic};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{Worker, WorkerOffloads, WorkerSettings};
use baton_device::{Capabilities, Checksum, Device, Frame, MAX_FRAME};
use baton_lro::{LroSettings, Mode};
use baton_shm::Region;
use baton_sim::frames::ipv4;
use baton_tcp::Instant;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Flags, TcpOptions};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A worker whose large receive puts segments in order.
struct Merging {
    worker: Worker<MemoryDevice, MemoryDevice>,
    far: MemoryDevice,
    kernel: MemoryDevice,
    memory: Arc<Region>,
    frame: Frame,
    /// Sequence number of the connection's next segment.
    seq: u32,
    now: Instant,
}

impl Merging {
    fn new() -> Merging {
        let capabilities = Capabilities { checksum: false, segmentation: 0 };
        let (wire, far) = memory_pair(256, MAX_FRAME, capabilities);
        let (host, kernel) = memory_pair(256, MAX_FRAME, capabilities);
        let memory = Arc::new(Region::private(nic::bytes(4)).unwrap());
        let lro = LroSettings { mode: Mode::Reorder, ..LroSettings::default() };
        let settings = WorkerSettings { slots: 4, hash_key: [1, 2, 3, 4], lro, ..WorkerSettings::default() };
        let now = Instant(1_000_000);
        let mut worker = Worker::new(host, wire, memory.clone(), settings, now);
        worker.start(now);
        Merging { worker, far, kernel, memory, frame: Frame::with_capacity(MAX_FRAME), seq: 1000, now }
    }

    fn poll(&mut self, micros: u64) {
        self.now = Instant(self.now.0 + micros);
        self.worker.poll(self.now);
        while self.kernel.receive(&mut self.frame) {}
    }

    /// A segment of a connection of the kernel's arrives, `ahead` bytes behind the next one.
    fn segment(&mut self, ahead: u32, length: usize, flags: Flags) {
        let template = Template::new(&flow(0).reversed(), &Link { ttl: 64, ..Link::default() }, true);
        let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
        let seq = self.seq.wrapping_add(ahead);
        let header = Header { seq, ack: 1, flags: Flags::ACK | flags, window: 512, options: &options, ecn: 0, ident: 0 };
        self.frame.set_length(MAX_HEADER + length);
        let headers = template.emit(&header, length, self.frame.bytes_mut());
        self.frame.set_length(headers + length);
        self.frame.segmentation = None;
        self.frame.checksum = Checksum::Verified;
        assert!(self.far.transmit(&mut self.frame));
        if ahead == 0 {
            self.seq = self.seq.wrapping_add(length as u32);
        }
        self.poll(1);
    }

    /// Lets time pass until nothing waits.
    fn settle(&mut self) {
        (0..400).for_each(|_| self.poll(16));
    }

    fn count(&self, counter: Counter) -> u64 {
        self.memory.words(nic::counters(0), COUNTERS)[counter as usize].load(Ordering::Relaxed)
    }
}

const NONE: Flags = Flags(0);

#[test]
fn what_is_given_to_the_kernel_is_counted_by_why_it_went() {
    use Counter::*;
    const ENDED: [Counter; 7] = [EndedFull, EndedFin, EndedPush, EndedShort, EndedOther, EndedTimeout, EndedRequested];
    let mut stage = Merging::new();
    // How many more went for each reason, and alone, after what `arrives` does.
    let mut grown = |arrives: &dyn Fn(&mut Merging)| {
        let before = [ENDED.map(|counter| stage.count(counter)).to_vec(), vec![stage.count(Alone)]].concat();
        arrives(&mut stage);
        stage.settle();
        let after = [ENDED.map(|counter| stage.count(counter)).to_vec(), vec![stage.count(Alone)]].concat();
        after.iter().zip(before).map(|(after, before)| after - before).collect::<Vec<_>>()
    };
    let several = |stage: &mut Merging, segments: usize| (0..segments).for_each(|_| stage.segment(0, 1448, NONE));
    // 45 of them are as large as a packet can be.
    assert_eq!(grown(&|stage| several(stage, 45)), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(
        grown(&|stage| [NONE, Flags::PSH].into_iter().for_each(|flags| stage.segment(0, 100, flags))),
        [0, 0, 1, 0, 0, 0, 0, 0]
    );
    assert_eq!(grown(&|stage| [100, 50].into_iter().for_each(|length| stage.segment(0, length, NONE))), [0, 0, 0, 1, 0, 0, 0, 0]);
    // An acknowledgement follows, which does not overtake what waits.
    assert_eq!(grown(&|stage| [100, 0].into_iter().for_each(|length| stage.segment(0, length, NONE))), [0, 0, 0, 0, 1, 0, 0, 1]);
    assert_eq!(grown(&|stage| several(stage, 2)), [0, 0, 0, 0, 0, 1, 0, 0]);
    assert_eq!(
        grown(&|stage| [NONE, Flags::FIN].into_iter().for_each(|flags| stage.segment(0, 100, flags))),
        [0, 1, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!((stage.count(Aggregates), stage.count(Merged)), (5, 45 + 2 + 2 + 2 + 2));
}

#[test]
fn frames_that_are_passed_on_are_counted_by_why() {
    use Counter::*;
    let mut stage = Merging::new();
    stage.segment(0, 0, NONE);
    stage.segment(0, 0, Flags::SYN);
    for (protocol, fragment) in [(17, 0x4000), (6, 0x2000)] {
        stage.frame.fill(&ipv4(protocol, fragment, &[7; 100]));
        assert!(stage.far.transmit(&mut stage.frame));
        stage.poll(1);
    }
    stage.frame.fill(&[1; 60]);
    assert!(stage.far.transmit(&mut stage.frame));
    stage.settle();
    let passed = [PassedNoData, PassedFlags, PassedNotTcp, PassedFragment, PassedNotIp, PassedMalformed, PassedLarge];
    assert_eq!(passed.map(|counter| stage.count(counter)), [1, 1, 1, 1, 1, 0, 0]);
    // A segment comes again, and another one whose predecessor does not come.
    stage.segment(0, 100, NONE);
    stage.seq -= 100;
    stage.segment(0, 100, NONE);
    stage.segment(100, 100, NONE);
    stage.settle();
    assert_eq!([Old, Gaps, Reordered, Unhoused].map(|counter| stage.count(counter)), [1, 1, 1, 0]);
}

/// The counters say what there is also when large receive is off, where nothing of it is due any more.
#[test]
fn nothing_is_held_once_it_is_off() {
    let mut stage = Merging::new();
    stage.segment(0, 100, Flags::PSH);
    stage.segment(100, 100, NONE);
    stage.poll(32);
    assert_eq!(stage.count(Counter::Held), 1);
    stage.worker.set_offloads(&WorkerOffloads::default(), stage.now);
    stage.settle();
    assert_eq!((stage.count(Counter::Held), stage.count(Counter::EndedRequested)), (0, 1));
}
