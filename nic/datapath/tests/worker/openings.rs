//! Connections that several workers make, polled in any order, while the indirection table changes: each client of a
//! listener and each connection that the NIC opens gets exactly one, and no frame of theirs reaches the kernel.

use crate::drawn::Random;
use baton_abi::layout::{COUNTERS, Counter, nic, scratch, session, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{ListenerSettings, Registers, Worker, WorkerSettings, crossbar};
use baton_device::{Capabilities, Checksum, Device, Frame};
use baton_image::{Image, MAX_ENCODED};
use baton_ring::{Consumer, Producer};
use baton_rss::{BUCKETS, From, Input, Key};
use baton_shm::{Region, RingWords};
use baton_tcp::Instant;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const FRAME: usize = 2048;
const BUFFER: u32 = 1 << 16;
/// Number of the listener's clients, and of connections that the NIC opens.
const CLIENTS: u32 = 30;
const OPENED: u32 = 10;
const SLOTS: u32 = CLIENTS + OPENED;
const LISTENER: u32 = 7;
/// Bytes that each peer sends once its connection is established.
const DATA: u32 = 100;

/// A connection: first the clients', then those that the NIC opens.
fn flow(of: u32) -> Flow {
    let port = 40_000 + of as u16;
    let remote = Endpoint::v4([10, 0, of as u8, 2], if of < CLIENTS { port } else { 9 });
    Flow { local: Endpoint::v4([10, 0, 0, 1], if of < CLIENTS { 80 } else { port }), remote, device: 0 }
}

fn of(flow: &Flow) -> u32 {
    u32::from(flow.local.port.max(flow.remote.port)) - 40_000
}

/// A connection's far end.
#[derive(Clone, Copy, Default)]
struct Peer {
    /// The next sequence number expected of the NIC, once its SYN has arrived.
    expected: Option<u32>,
    /// Sequence number that the NIC has acknowledged.
    acked: u32,
}

struct Bed {
    workers: Vec<Worker<MemoryDevice, MemoryDevice>>,
    far: Vec<MemoryDevice>,
    kernel: Vec<MemoryDevice>,
    nic_memory: Arc<Region>,
    agent: Producer<RingWords>,
    agent_events: Consumer<RingWords>,
    program_events: Consumer<RingWords>,
    registers: Option<Arc<Region>>,
    random: Random,
    frame: Frame,
    now: Instant,
    peers: Vec<Peer>,
    /// The cid of each connection that has been made.
    made: Vec<Option<Cid>>,
    received: Vec<u32>,
}

impl Bed {
    fn new(workers: usize, card: bool, seed: u64) -> Bed {
        let nic_memory = Arc::new(Region::private(nic::bytes(SLOTS as usize)).unwrap());
        let registers = card.then(|| Arc::new(Region::private(Registers::BYTES.next_multiple_of(4096)).unwrap()));
        let now = Instant(1_000_000);
        let (mut far, mut kernel) = (Vec::new(), Vec::new());
        let peers = crossbar(workers, &Key::MICROSOFT, registers.clone().map(|memory| Registers::new(memory).unwrap()));
        let make = |peers| {
            let capabilities = Capabilities { checksum: true, segmentation: 0 };
            let (wire, there) = memory_pair(256, FRAME, capabilities);
            let (host, behind) = memory_pair(256, FRAME, capabilities);
            far.push(there);
            kernel.push(behind);
            let settings = WorkerSettings { slots: SLOTS as usize, frame_bytes: FRAME, batch: 4, ..WorkerSettings::default() };
            let mut worker = Worker::new(host, wire, nic_memory.clone(), settings, now);
            worker.join(peers, now);
            worker
        };
        let mut workers: Vec<_> = peers.into_iter().map(make).collect();
        let memory = Arc::new(Region::private(session::HEAP + SLOTS as usize * 2 * BUFFER as usize).unwrap());
        workers[0].start(now);
        workers[0].attach(0, memory.clone());
        let endpoints = vec![flow(0).local];
        workers[0].listen(ListenerSettings { id: LISTENER, endpoints, receive_limit: BUFFER, mtu: 1500, ttl: 64 });
        Bed {
            workers,
            far,
            kernel,
            agent: Producer::new(nic_memory.ring(nic::COMMANDS)),
            agent_events: Consumer::new(nic_memory.ring(nic::EVENTS)),
            program_events: Consumer::new(memory.ring(session::EVENTS)),
            nic_memory,
            registers,
            random: Random(seed | 1),
            frame: Frame::with_capacity(FRAME),
            now,
            peers: vec![Peer::default(); SLOTS as usize],
            made: vec![None; SLOTS as usize],
            received: vec![0; SLOTS as usize],
        }
    }

    fn command(&mut self, message: Message) {
        self.agent.push(message.to_words()).unwrap();
        self.agent.publish();
        for _ in 0..100_000 {
            self.poll_one();
            if self.agent_messages(Some(&message)) {
                return;
            }
        }
        panic!("no answer to {message:?}");
    }

    /// Handles the NIC's messages. Returns whether one of them answers `command`.
    fn agent_messages(&mut self, command: Option<&Message>) -> bool {
        let mut answered = false;
        while let Some(words) = self.agent_events.pop() {
            self.agent_events.release();
            let message = Message::from_words(words).unwrap();
            if message.operation != Operation::OsControl {
                continue;
            }
            if message.kind == Control::Made as u16 {
                let image = self.image(message.cid);
                let made = &mut self.made[of(&image.flow) as usize];
                assert_eq!(*made, None, "{} is made twice", image.flow.remote);
                *made = Some(message.cid);
            } else if command.is_some_and(|command| command.cid == message.cid) {
                assert_eq!(message.kind, Control::Done as u16, "{command:?}: {message:?}");
                answered = true;
            }
        }
        answered
    }

    fn image(&self, cid: Cid) -> Image {
        let mut bytes = [0u8; MAX_ENCODED];
        self.nic_memory.read(nic::scratch(cid.slot()) + scratch::IMAGE, &mut bytes).unwrap();
        Image::decode(&bytes).unwrap()
    }

    fn poll_one(&mut self) {
        let at = self.random.below(self.workers.len() as u64) as usize;
        self.now = self.now.after(self.random.below(40));
        self.workers[at].poll_with_peers(self.now);
        assert!(!self.kernel[at].receive(&mut self.frame), "a frame has reached the kernel");
        while self.far[at].receive(&mut self.frame) {
            let parsed = TcpFrame::parse(self.frame.bytes(), 0).unwrap();
            assert!(!parsed.flags.contains(Flags::RST));
            let peer = &mut self.peers[of(&parsed.flow) as usize];
            if parsed.flags.contains(Flags::SYN) {
                let expected = parsed.seq.wrapping_add(1);
                assert!(peer.expected.is_none_or(|before| before == expected), "the answer has another number");
                peer.expected = Some(expected);
            }
            if parsed.flags.contains(Flags::ACK) {
                peer.acked = peer.acked.max(parsed.ack);
            }
        }
        while let Some(words) = self.program_events.pop() {
            let message = Message::from_words(words).unwrap();
            if message.operation == Operation::OsRecv {
                let flow = self.image(message.cid).flow;
                self.received[of(&flow) as usize] += message.length;
            }
        }
        self.program_events.release();
    }

    /// A peer sends what its connection needs next: its SYN, or its acknowledgement and its data. Numbers begin with 1.
    fn peer_sends(&mut self, number: u32) {
        let peer = self.peers[number as usize];
        let (flags, seq, ack, length) = match peer.expected {
            None if number >= CLIENTS => return,
            None => (Flags::SYN, 1, 0, 0),
            Some(ack) if number >= CLIENTS && peer.acked < 2 => (Flags::SYN | Flags::ACK, 1, ack, 0),
            Some(ack) if self.random.below(2) == 0 => (Flags::ACK, 2, ack, 0),
            Some(ack) => (Flags::ACK, 2, ack, DATA as usize),
        };
        let template = Template::new(&flow(number).reversed(), &Link { ttl: 64, ..Link::default() }, false);
        let header = Header { seq, ack, flags, window: 512, options: &TcpOptions::default(), ecn: 0, ident: 0 };
        self.frame.set_length(MAX_HEADER + length);
        let headers = template.emit(&header, length, self.frame.bytes_mut());
        self.frame.set_length(headers + length);
        self.frame.checksum = Checksum::Verified;
        let queue = self.queue();
        self.far[queue].transmit(&mut self.frame);
    }

    /// The queue that the card delivers the frame to.
    fn queue(&self) -> usize {
        let Some(registers) = &self.registers else { return 0 };
        let word = |at: usize| registers.word32(4 * at).load(Ordering::SeqCst);
        let input = Input::of(self.frame.bytes(), From::Wire).unwrap();
        let halves = input.bytes().iter().flat_map(|byte| [byte >> 4, byte & 15]).enumerate();
        let hash = halves.fold(0, |hash, (place, half)| hash ^ word(BUCKETS + 16 * place + usize::from(half)));
        word(hash as usize % BUCKETS) as usize
    }

    fn rearrange(&mut self) {
        let workers = self.workers.len() as u64;
        let pattern: String = (0..24).map(|_| char::from(b'0' + self.random.below(workers) as u8)).collect();
        let settings = baton_rss::RssSettings { indirection: pattern.parse().unwrap(), ..baton_rss::RssSettings::default() };
        self.workers[0].set_rss(&settings, &Key::MICROSOFT);
    }

    /// Has the NIC open a connection.
    fn open(&mut self, number: u32) {
        let (cid, base) = (Cid::new(number, 1), nic::slot(number));
        let mut bytes = [0u8; MAX_ENCODED];
        Image::open(flow(number)).encode(&mut bytes).unwrap();
        self.nic_memory.write(base + slot::FLOW, &flow(number).to_bytes()).unwrap();
        self.nic_memory.write(nic::scratch(number) + scratch::IMAGE, &bytes).unwrap();
        self.command(Message::control(Operation::NicControl, Control::Connect, cid, 0, 0));
    }

    fn hand_off(&mut self, cid: Cid) {
        let heap = session::HEAP as u32 + cid.slot() * 2 * BUFFER;
        for (word, value) in [0, heap, BUFFER, heap + BUFFER, BUFFER, cid.slot()].into_iter().enumerate() {
            let at = nic::slot(cid.slot()) + slot::PARAMETERS + 4 * word;
            self.nic_memory.word32(at).store(value, Ordering::Relaxed);
        }
        self.command(Message::new(Operation::NicHandoff, cid, 0, 0));
    }

    fn count(&self, counter: Counter) -> u64 {
        let of = |worker| self.nic_memory.words(nic::counters(worker), COUNTERS)[counter as usize].load(Ordering::Relaxed);
        (0..self.workers.len()).map(of).sum()
    }
}

fn each_connection_is_made_once(workers: usize, card: bool, seed: u64) {
    let mut bed = Bed::new(workers, card, seed);
    for index in 0..CLIENTS {
        bed.command(Message::control(Operation::NicControl, Control::Grant, Cid::new(index, 1), LISTENER, 0));
    }
    let mut unopened = CLIENTS..SLOTS;
    for round in 0..8000 {
        if round % 100 == 0 {
            bed.rearrange();
        }
        if round % 200 == 0
            && let Some(number) = unopened.next()
        {
            bed.open(number);
        }
        if bed.random.below(4) == 0 {
            let number = bed.random.below(SLOTS.into()) as u32;
            bed.peer_sends(number);
        }
        bed.poll_one();
        bed.agent_messages(None);
        let number = bed.random.below(SLOTS.into()) as usize;
        if round > 2000
            && bed.received[number] == 0
            && let Some(cid) = bed.made[number]
            && bed.peers[number].acked < 2 + DATA
        {
            bed.received[number] = 1;
            bed.hand_off(cid);
        }
    }
    // What was not yet acknowledged is sent again.
    for _ in 0..40 {
        (0..SLOTS).for_each(|number| bed.peer_sends(number));
        (0..100 * workers).for_each(|_| bed.poll_one());
        bed.agent_messages(None);
        bed.now = bed.now.after(50_000);
        for number in 0..SLOTS as usize {
            if let Some(cid) = bed.made[number].filter(|_| bed.received[number] == 0) {
                bed.received[number] = 1;
                bed.hand_off(cid);
            }
        }
    }
    assert_eq!(bed.received, [1 + DATA; SLOTS as usize]);
    assert_eq!(bed.count(Counter::Made), u64::from(SLOTS));
    assert_eq!(bed.count(Counter::Connections), u64::from(SLOTS));
    assert!(bed.count(Counter::Buckets) > 100, "{} buckets moved", bed.count(Counter::Buckets));
    assert_eq!((bed.count(Counter::BadMessages), bed.count(Counter::AcceptQueueFull)), (0, 0));
}

with_both_cards!(each_connection_is_made_once);

/// A client's second acknowledgement was held for a bucket on its way to the front worker when its first one made the
/// connection.
#[test]
fn frames_that_are_held_already_come_behind_a_connection_that_is_made() {
    each_connection_is_made_once(5, false, 6_536_404_219_690_612_564);
}
