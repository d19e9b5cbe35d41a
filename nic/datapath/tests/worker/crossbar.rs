//! Several workers, polled in any order. Whatever changes of the indirection table happen at whatever time, no
//! connection gets its segments out of order, and offloaded connections continue at any worker.

use crate::drawn::Random;
use baton_abi::layout::{Counter, block, nic, scratch, session, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{Registers, Worker, WorkerSettings, crossbar};
use baton_device::{Capabilities, Checksum, Device, Frame};
use baton_image::{Image, MAX_ENCODED};
use baton_ring::{Consumer, Producer};
use baton_rss::{BUCKETS, From, Input, Key};
use baton_shm::{Region, RingWords};
use baton_tcp::Instant;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const FRAME: usize = 2048;
const BUFFER: u32 = 1 << 16;
/// Number of offloaded connections; as many more are the kernel's.
const OFFLOADED: u32 = 12;
const FLOWS: u32 = 2 * OFFLOADED;
const SLOTS: usize = OFFLOADED as usize;

fn flow(of: u32) -> Flow {
    Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, of as u8, 2], 40_000 + of as u16), device: 0 }
}

/// The byte of a connection's stream at a sequence number.
fn byte(of: u32, seq: u32) -> u8 {
    (seq ^ seq >> 8 ^ of * 31) as u8
}

struct Bed {
    workers: Vec<Worker<MemoryDevice, MemoryDevice>>,
    far: Vec<MemoryDevice>,
    kernel: Vec<MemoryDevice>,
    nic_memory: Arc<Region>,
    memory: Arc<Region>,
    agent: Producer<RingWords>,
    agent_events: Consumer<RingWords>,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    /// The card's registers, if it distributes frames.
    registers: Option<Arc<Region>>,
    random: Random,
    frame: Frame,
    now: Instant,
    /// For each connection the next sequence number at the peer, and the next that arrived at this end.
    sent: Vec<u32>,
    received: Vec<u32>,
    /// Sequence numbers that the peer has acknowledged, and that the program has queued.
    acked: Vec<u32>,
    queued: Vec<u32>,
    /// The kernel's frames: next sequence number to be sent, and next on the wire.
    kernel_sent: Vec<u32>,
    kernel_passed: Vec<u32>,
    /// The connections are being restored to the kernel.
    ending: bool,
}

impl Bed {
    fn new(workers: usize, card: bool, seed: u64) -> Bed {
        let nic_memory = Arc::new(Region::private(nic::bytes(SLOTS)).unwrap());
        let registers = card.then(|| Arc::new(Region::private(Registers::BYTES.next_multiple_of(4096)).unwrap()));
        let key = Key::MICROSOFT;
        let now = Instant(1_000_000);
        let (mut far, mut kernel) = (Vec::new(), Vec::new());
        let peers = crossbar(workers, &key, registers.clone().map(|memory| Registers::new(memory).unwrap()));
        let make = |peers| {
            let capabilities = Capabilities { checksum: true, segmentation: 0 };
            let (wire, there) = memory_pair(256, FRAME, capabilities);
            let (host, behind) = memory_pair(256, FRAME, capabilities);
            far.push(there);
            kernel.push(behind);
            // Small batches, so that frames wait in the queues.
            let settings =
                WorkerSettings { slots: SLOTS, frame_bytes: FRAME, batch: 4, quick_ack: true, ..WorkerSettings::default() };
            let mut worker = Worker::new(host, wire, nic_memory.clone(), settings, now);
            worker.join(peers, now);
            worker.set_processor(far.len() - 1);
            worker
        };
        let mut workers: Vec<_> = peers.into_iter().map(make).collect();
        let memory = Arc::new(Region::private(session::HEAP + SLOTS * 2 * BUFFER as usize).unwrap());
        workers[0].start(now);
        workers[0].attach(0, memory.clone());
        let ones = || vec![1; FLOWS as usize];
        let mut bed = Bed {
            workers,
            far,
            kernel,
            agent: Producer::new(nic_memory.ring(nic::COMMANDS)),
            agent_events: Consumer::new(nic_memory.ring(nic::EVENTS)),
            commands: Producer::new(memory.ring(session::COMMANDS)),
            events: Consumer::new(memory.ring(session::EVENTS)),
            nic_memory,
            memory,
            registers,
            random: Random(seed | 1),
            frame: Frame::with_capacity(FRAME),
            now,
            sent: ones(),
            received: ones(),
            acked: ones(),
            queued: ones(),
            kernel_sent: ones(),
            kernel_passed: ones(),
            ending: false,
        };
        (0..OFFLOADED).for_each(|of| bed.offload(of));
        bed
    }

    /// Sends a command and waits for its answer.
    fn command(&mut self, message: Message) -> u32 {
        self.agent.push(message.to_words()).unwrap();
        self.agent.publish();
        for _ in 0..100_000 {
            self.poll_one();
            while let Some(words) = self.agent_events.pop() {
                self.agent_events.release();
                let answer = Message::from_words(words).unwrap();
                if answer.operation == Operation::OsControl && answer.cid == message.cid {
                    assert_eq!(answer.kind, Control::Done as u16, "{message:?}: {answer:?}");
                    return answer.address;
                }
            }
        }
        panic!("no answer to {message:?}");
    }

    fn control(&mut self, control: Control, cid: Cid) {
        self.command(Message::control(Operation::NicControl, control, cid, 0, 0));
    }

    fn offload(&mut self, of: u32) {
        let (cid, base, flow) = (Cid::new(of, 1), nic::slot(of), flow(of));
        let heap = session::HEAP as u32 + of * 2 * BUFFER;
        for (word, value) in [0, heap, BUFFER, heap + BUFFER, BUFFER, of].into_iter().enumerate() {
            self.nic_memory.word32(base + slot::PARAMETERS + 4 * word).store(value, Ordering::Relaxed);
        }
        let mut bytes = [0u8; MAX_ENCODED];
        Image::open(flow).encode(&mut bytes).unwrap();
        self.nic_memory.write(base + slot::FLOW, &flow.to_bytes()).unwrap();
        self.nic_memory.write(nic::scratch(of) + scratch::IMAGE, &bytes).unwrap();
        self.control(Control::Mirror, cid);
        self.control(Control::Steal, cid);
        self.command(Message::new(Operation::NicHandoff, cid, 0, 0));
    }

    /// Gives a random worker a round, then checks what came out of it.
    fn poll_one(&mut self) {
        let at = self.random.below(self.workers.len() as u64) as usize;
        self.now = self.now.after(self.random.below(40));
        self.workers[at].poll_with_peers(self.now);
        self.look(at);
    }

    /// Checks what a worker has sent to the kernel, to the wire and to the program.
    fn look(&mut self, at: usize) {
        while self.kernel[at].receive(&mut self.frame) {
            let parsed = TcpFrame::parse(self.frame.bytes(), 0).unwrap();
            let of = u32::from(parsed.flow.local.port.max(parsed.flow.remote.port)) - 40_000;
            if self.ending && of < OFFLOADED {
                continue; // The replay.
            }
            let received = &mut self.received[of as usize];
            assert!(of >= OFFLOADED, "the kernel got a segment of an offloaded connection");
            assert_eq!(parsed.seq, *received, "connection {of} at worker {at}");
            *received += parsed.payload_length as u32;
        }
        while self.far[at].receive(&mut self.frame) {
            let parsed = TcpFrame::parse(self.frame.bytes(), 0).unwrap();
            let of = u32::from(parsed.flow.local.port.max(parsed.flow.remote.port)) - 40_000;
            if of >= OFFLOADED {
                let kernel_passed = &mut self.kernel_passed[of as usize];
                assert_eq!(parsed.seq, *kernel_passed, "the kernel's frames of connection {of} at worker {at}");
                *kernel_passed += parsed.payload_length as u32;
            } else if parsed.payload_length > 0 {
                let payload = parsed.payload(self.frame.bytes());
                let right = payload.iter().enumerate().all(|(n, found)| *found == byte(of, parsed.seq + n as u32));
                assert!(right, "connection {of} sends other bytes");
                let acked = &mut self.acked[of as usize];
                if parsed.seq == *acked {
                    *acked += payload.len() as u32;
                }
            }
        }
        while let Some(words) = self.events.pop() {
            let message = Message::from_words(words).unwrap();
            if message.operation == Operation::OsRecv {
                let of = message.cid.slot();
                let received = self.received[of as usize];
                for n in 0..message.length {
                    let mut found = [0];
                    let place = session::HEAP + (of * 2 * BUFFER + (received + n) % BUFFER) as usize;
                    self.memory.read(place, &mut found).unwrap();
                    assert_eq!(found[0], byte(of, received + n), "connection {of} at {}", received + n);
                }
                self.received[of as usize] += message.length;
                let read = Message::new(Operation::NicRecvd, message.cid, 0, message.length);
                self.commands.push(read.to_words()).unwrap();
            }
        }
        self.events.release();
        self.commands.publish();
    }

    /// Fills the frame with a segment from the peer or from this host's kernel.
    fn fill(&mut self, of: u32, from: From, seq: u32, ack: u32, length: usize) {
        let flow = if from == From::Wire { flow(of).reversed() } else { flow(of) };
        let template = Template::new(&flow, &Link { ttl: 64, ..Link::default() }, true);
        let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
        let header = Header { seq, ack, flags: Flags::ACK, window: 512, options: &options, ecn: 0, ident: 0 };
        self.frame.set_length(MAX_HEADER + length);
        let headers = template.emit(&header, length, self.frame.bytes_mut());
        self.frame.set_length(headers + length);
        for (n, found) in self.frame.bytes_mut()[headers..].iter_mut().enumerate() {
            *found = byte(of, seq + n as u32);
        }
        self.frame.checksum = Checksum::Verified;
    }

    /// The queue that the card delivers the frame to.
    fn queue(&self, from: From) -> usize {
        let Some(registers) = &self.registers else { return 0 };
        let word = |at: usize| registers.word32(4 * at).load(Ordering::SeqCst);
        let input = Input::of(self.frame.bytes(), from).unwrap();
        let halves = input.bytes().iter().flat_map(|byte| [byte >> 4, byte & 15]).enumerate();
        let hash = halves.fold(0, |hash, (place, half)| hash ^ word(BUCKETS + 16 * place + usize::from(half)));
        word(hash as usize % BUCKETS) as usize
    }

    fn peer_sends(&mut self, of: u32) {
        let (seq, ack) = (self.sent[of as usize], self.acked[of as usize]);
        let length = 1 + self.random.below(300) as usize;
        // At most half of receive memory, which is always accepted.
        if of < OFFLOADED && seq + length as u32 - self.received[of as usize] > BUFFER / 2 {
            return;
        }
        self.fill(of, From::Wire, seq, ack, length);
        let queue = self.queue(From::Wire);
        if self.far[queue].transmit(&mut self.frame) {
            self.sent[of as usize] += length as u32;
        }
    }

    fn kernel_sends(&mut self, of: u32) {
        let seq = self.kernel_sent[of as usize];
        let length = 1 + self.random.below(300) as usize;
        self.fill(of, From::Host, seq, 1, length);
        let queue = self.queue(From::Host);
        if self.kernel[queue].transmit(&mut self.frame) {
            self.kernel_sent[of as usize] += length as u32;
        }
    }

    fn program_sends(&mut self, of: u32) {
        let at = of as usize;
        let length = 1 + self.random.below(200) as u32;
        let place = self.queued[at] % BUFFER;
        if self.queued[at] + length - self.acked[at] > 2000 || place + length > BUFFER {
            // At the end of its memory a program sends up to the end, once everything is acknowledged, and then begins
            // anew.
            if place + length > BUFFER && self.queued[at] == self.acked[at] {
                self.send(of, BUFFER - place);
            }
            return;
        }
        self.send(of, length);
    }

    fn send(&mut self, of: u32, length: u32) {
        let at = of as usize;
        let heap = session::HEAP as u32 + of * 2 * BUFFER + BUFFER + self.queued[at] % BUFFER;
        let bytes: Vec<u8> = (0..length).map(|n| byte(of, self.queued[at] + n)).collect();
        self.memory.write(heap as usize, &bytes).unwrap();
        self.commands.push(Message::new(Operation::NicSend, Cid::new(of, 1), heap, length).to_words()).unwrap();
        self.commands.publish();
        self.queued[at] += length;
    }

    fn act(&mut self) {
        match self.random.below(40) {
            0..12 => {
                let of = self.random.below(FLOWS.into()) as u32;
                self.peer_sends(of);
            }
            12..16 => {
                let of = OFFLOADED + self.random.below((FLOWS - OFFLOADED).into()) as u32;
                self.kernel_sends(of);
            }
            16..20 => {
                let of = self.random.below(OFFLOADED.into()) as u32;
                self.program_sends(of);
            }
            _ => self.poll_one(),
        }
    }

    fn rearrange(&mut self, key: bool) {
        let workers = self.workers.len() as u64;
        let pattern: String = (0..24).map(|_| char::from(b'0' + self.random.below(workers) as u8)).collect();
        let other = Key(core::array::from_fn(|_| self.random.below(256) as u8));
        let settings = baton_rss::RssSettings {
            key: key.then_some(other),
            indirection: pattern.parse().unwrap(),
            ..baton_rss::RssSettings::default()
        };
        self.workers[0].set_rss(&settings, &Key::MICROSOFT);
    }

    /// Lets time pass without new frames until everything has arrived.
    fn settle(&mut self) {
        for _ in 0..400 * self.workers.len() {
            self.now = self.now.after(200);
            self.poll_one();
        }
    }

    fn count(&self, counter: Counter) -> u64 {
        let of = |worker| self.nic_memory.words(nic::counters(worker), 32)[counter as usize].load(Ordering::Relaxed);
        (0..self.workers.len()).map(of).sum()
    }
}

/// All connections continue while the table changes again and again.
fn nothing_is_lost_or_overtaken(workers: usize, card: bool, seed: u64) {
    let mut bed = Bed::new(workers, card, seed);
    let mut tables = HashMap::new();
    for round in 0..6000 {
        if round % 300 == 0 {
            let key = round % 1500 == 1200;
            bed.rearrange(key);
        }
        bed.act();
        tables.insert(bed.workers[0].indirection(), ());
    }
    bed.settle();
    // Segments that were lost are sent again after their time-out.
    for _ in 0..200 {
        for of in 0..OFFLOADED {
            let (seq, ack) = (bed.sent[of as usize], bed.acked[of as usize]);
            bed.fill(of, From::Wire, seq, ack, 0);
            let queue = bed.queue(From::Wire);
            bed.far[queue].transmit(&mut bed.frame);
        }
        (0..40).for_each(|_| bed.poll_one());
        bed.now = bed.now.after(20_000);
    }
    for of in (0..OFFLOADED).filter(|_| card) {
        bed.fill(of, From::Wire, bed.sent[of as usize], bed.acked[of as usize], 0);
        let processor = bed.memory.word32(session::block(of) + block::PROCESSOR).load(Ordering::Relaxed);
        assert_eq!(processor as usize, bed.queue(From::Wire) + 1, "connection {of}'s block has the worker that owns it");
    }
    assert!(tables.len() > 10, "the table had only {} values", tables.len());
    assert_eq!(bed.count(Counter::Dropped), 0);
    assert_eq!(bed.received, bed.sent);
    assert_eq!(bed.kernel_passed, bed.kernel_sent);
    assert_eq!(bed.acked[..SLOTS], bed.queued[..SLOTS]);
    assert_eq!(bed.count(Counter::Connections), u64::from(OFFLOADED));
    assert!(bed.count(Counter::Buckets) > 500, "{} buckets moved", bed.count(Counter::Buckets));
    // The connections are restored, each from the worker that owns it at that time.
    bed.ending = true;
    for of in 0..OFFLOADED {
        bed.command(Message::new(Operation::NicRestore, Cid::new(of, 1), 0, 0));
        let mut bytes = [0u8; MAX_ENCODED];
        bed.nic_memory.read(nic::scratch(of) + scratch::IMAGE, &mut bytes).unwrap();
        let image = Image::decode(&bytes).unwrap();
        assert_eq!((image.rcv_nxt, image.snd_una), (bed.sent[of as usize], bed.queued[of as usize]));
        bed.control(Control::Release, Cid::new(of, 1));
    }
    assert_eq!((bed.count(Counter::Connections), bed.count(Counter::BadMessages)), (0, 0));
}

with_both_cards!(nothing_is_lost_or_overtaken);
