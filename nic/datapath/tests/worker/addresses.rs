//! A worker with addresses of its own: it probes for them, answers in the kernel's place, passes other frames on, and
//! leaves the state in NIC memory with which the next worker continues.

use baton_abi::layout::{Counter, nic};
use baton_abi::{AddressEntry, AddressState, Control, Message, Operation};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{AddressSettings, Worker, WorkerSettings};
use baton_device::{Capabilities, Device, Frame, MAX_FRAME};
use baton_ring::Consumer;
use baton_shm::Region;
use baton_sim::frames::of_every_kind;
use baton_tcp::Instant;
use baton_wire::arp::Arp;
use baton_wire::neighbour::{NEIGHBOUR_FRAME, Neighbour};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 1];
const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 2];
const V4: [u8; 4] = [192, 0, 2, 50];
const V6: [u8; 16] = [0xfd, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x50];

struct Stage {
    worker: Worker<MemoryDevice, MemoryDevice>,
    far: MemoryDevice,
    kernel: MemoryDevice,
    memory: Arc<Region>,
    now: Instant,
}

impl Stage {
    fn new(memory: Arc<Region>, now: Instant) -> Stage {
        let capabilities = Capabilities { checksum: false, segmentation: 0 };
        let (wire, far) = memory_pair(256, MAX_FRAME, capabilities);
        let (host, kernel) = memory_pair(256, MAX_FRAME, capabilities);
        let settings = WorkerSettings { slots: 4, hash_key: [1, 2, 3, 4], ..WorkerSettings::default() };
        let mut worker = Worker::new(host, wire, memory.clone(), settings, now);
        let addresses = vec![IpAddr::from(V4), IpAddr::from(V6)];
        worker.set_addresses(&AddressSettings { mac: OURS, addresses, between_probes: 1000, seed: 7 }, now);
        Stage { worker, far, kernel, memory, now }
    }

    /// Lets 20 ms pass, polling at each time-out as a NIC's thread does. Returns the frames that were sent to the wire.
    fn pass(&mut self) -> Vec<Vec<u8>> {
        let (end, mut sent) = (self.now.0 + 20_000, Vec::new());
        while self.now.0 < end {
            self.worker.poll(self.now);
            sent.extend(out(&mut self.far));
            let next = self.worker.next_timeout().unwrap_or(end);
            self.now = Instant(next.clamp(self.now.0 + 1, end));
        }
        sent
    }

    /// The frames that the kernel gets, and those that are sent to the wire, for a frame from the wire.
    fn receive(&mut self, bytes: &[u8]) -> [Vec<Vec<u8>>; 2] {
        let mut frame = Frame::with_capacity(MAX_FRAME);
        frame.fill(bytes);
        assert!(self.far.transmit(&mut frame));
        self.worker.poll(self.now);
        self.worker.poll(self.now);
        [out(&mut self.kernel), out(&mut self.far)]
    }

    fn entries(&self) -> Vec<AddressEntry> {
        let read = |at| {
            let words = self.memory.words(nic::address(at), AddressEntry::WORDS);
            AddressEntry::from_words(std::array::from_fn(|n| words[n].load(Ordering::Relaxed)))
        };
        (0..nic::MOST_ADDRESSES).map(read).collect()
    }

    /// How many times the agent was notified that an address has changed.
    fn reports(&self) -> usize {
        let mut events = Consumer::new(self.memory.ring(nic::EVENTS));
        let messages = std::iter::from_fn(|| events.pop().inspect(|_| events.release())).filter_map(Message::from_words);
        let about = |message: &Message| (message.operation, Control::from_number(message.kind));
        messages.filter(|message| about(message) == (Operation::OsControl, Some(Control::Addresses))).count()
    }
}

fn out(device: &mut MemoryDevice) -> Vec<Vec<u8>> {
    let mut frame = Frame::with_capacity(MAX_FRAME);
    std::iter::from_fn(|| device.receive(&mut frame).then(|| frame.bytes().to_vec())).collect()
}

fn discovery(neighbour: &Neighbour) -> Vec<u8> {
    let mut frame = [0; NEIGHBOUR_FRAME];
    let length = neighbour.emit(THEIRS, &mut frame);
    frame[..length].to_vec()
}

fn memory() -> Arc<Region> {
    Arc::new(Region::private(nic::bytes(4)).expect("memory"))
}

#[test]
fn addresses_are_used_once_frames_flow_and_nobody_has_answered() {
    let mut stage = Stage::new(memory(), Instant(1_000_000));
    assert!(stage.pass().is_empty(), "nobody could be heard");
    stage.worker.start(stage.now);
    let sent = stage.pass();
    let of = |frame: Vec<u8>| sent.iter().filter(|sent| **sent == frame).count();
    assert_eq!(of(Arp::probe(OURS, V4).emit().to_vec()), 3);
    assert_eq!(of(Arp::announcement(OURS, V4).emit().to_vec()), 2);
    assert_eq!(of(discovery(&Neighbour::probe(OURS, V6))), 3);
    assert_eq!(of(discovery(&Neighbour::announcement(OURS, V6))), 2);
    assert_eq!(sent.len(), 10);
    let entries = stage.entries();
    assert!(entries[..2].iter().all(|entry| (entry.state, entry.probes) == (AddressState::Used, 3)), "{entries:?}");
    assert!(entries[2..].iter().all(|entry| *entry == AddressEntry::default()));
    assert_eq!(stage.reports(), 2);
}

#[test]
fn questions_are_answered_and_the_kernel_gets_all_else() {
    let mut stage = Stage::new(memory(), Instant(1_000_000));
    stage.worker.start(stage.now);
    stage.pass();
    let question = Arp { is_request: true, sender: [192, 0, 2, 9], ..Arp::probe(THEIRS, V4) };
    assert_eq!(stage.receive(&question.emit()), [vec![], vec![question.answer(OURS).emit().to_vec()]]);
    let question = Neighbour { source: [0xfd; 16], link_address: Some(THEIRS), ..Neighbour::probe(THEIRS, V6) };
    assert_eq!(stage.receive(&discovery(&question)), [vec![], vec![discovery(&question.answer(OURS))]]);
    let is_whole = |frame: &Vec<u8>| !matches!(Neighbour::parse(frame, false), Some(Err(_)));
    for frame in of_every_kind().into_iter().filter(is_whole).chain([Arp::probe(THEIRS, [192, 0, 2, 51]).emit().to_vec()]) {
        assert_eq!(stage.receive(&frame), [vec![frame], vec![]]);
    }
    let cut_off = &Arp::probe(THEIRS, V4).emit()[..40];
    assert!(stage.receive(cut_off).iter().all(Vec::is_empty));
    let bad =
        stage.memory.words(nic::COUNTERS, baton_abi::layout::COUNTERS)[Counter::BadResolution as usize].load(Ordering::Relaxed);
    assert_eq!((bad, stage.entries()[0].answers, stage.entries()[1].answers), (1, 1, 1));
}

#[test]
fn the_next_worker_announces_what_the_last_one_used() {
    let mut first = Stage::new(memory(), Instant(1_000_000));
    first.worker.start(first.now);
    first.pass();
    let mut next = Stage::new(first.memory.clone(), first.now);
    next.worker.start(next.now);
    let sent = next.pass();
    assert_eq!(sent.len(), 4);
    assert!(sent.contains(&Arp::announcement(OURS, V4).emit().to_vec()) && !sent.contains(&Arp::probe(OURS, V4).emit().to_vec()));
    assert!(next.entries()[..2].iter().all(|entry| (entry.probes, entry.announcements) == (3, 4)), "its counters go on");
    // Without addresses all frames go to the kernel.
    let none = AddressSettings { mac: OURS, addresses: Vec::new(), between_probes: 1000, seed: 7 };
    next.worker.set_addresses(&none, next.now);
    let question = Arp::probe(THEIRS, V4).emit().to_vec();
    assert_eq!(next.receive(&question), [vec![question.clone()], vec![]]);
    assert!(next.entries().iter().all(|entry| *entry == AddressEntry::default()));
}
