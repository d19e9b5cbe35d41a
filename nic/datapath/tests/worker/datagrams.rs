//! UDP sockets on the NIC: datagrams from the wire go to the right socket, a program's datagrams leave with its
//! socket's address only, and a program's memory cannot harm another program or the NIC.

use baton_abi::layout::{Counter, datagrams as page, nic, session};
use baton_abi::{Cid, Control, Message, Operation};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datagrams::{Direction, Place, Reader, Wish, Writer};
use baton_datapath::{DatagramSettings, DatagramWay, Worker, WorkerSettings};
use baton_device::{Capabilities, Checksum, Device, Frame};
use baton_ring::Producer;
use baton_shm::{Region, RingWords};
use baton_tcp::Instant;
use baton_wire::frame::Link;
use baton_wire::rmpp::envelope::{Envelope, Received};
use baton_wire::{Endpoint, Flow};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const FRAME: usize = 2048;
const PLACE: Place = Place { base: session::HEAP as u32, receive: 1 << 14, send: 1 << 14 };

fn local(of: u32) -> Endpoint {
    Endpoint::v4([10, 0, 0, 1], 7000 + of as u16)
}

fn peer() -> Endpoint {
    Endpoint::v4([10, 0, 0, 2], 9)
}

struct Bed {
    worker: Worker<MemoryDevice, MemoryDevice>,
    far: MemoryDevice,
    kernel: MemoryDevice,
    nic_memory: Arc<Region>,
    /// The memory of two programs, each with one socket.
    memory: Vec<Arc<Region>>,
    commands: Vec<Producer<RingWords>>,
    frame: Frame,
    now: Instant,
}

impl Bed {
    fn new() -> Bed {
        let capabilities = Capabilities { checksum: true, segmentation: 0 };
        let (wire, far) = memory_pair(256, FRAME, capabilities);
        let (host, kernel) = memory_pair(256, FRAME, capabilities);
        let nic_memory = Arc::new(Region::private(nic::bytes(1)).unwrap());
        let now = Instant(1_000_000);
        let settings = WorkerSettings { slots: 1, frame_bytes: FRAME, ..WorkerSettings::default() };
        let mut worker = Worker::new(host, wire, nic_memory.clone(), settings, now);
        worker.start(now);
        let (mut memory, mut commands) = (Vec::new(), Vec::new());
        for id in 0..2 {
            let region = Arc::new(Region::private(session::HEAP + (1 << 16)).unwrap());
            worker.attach(id, region.clone());
            assert!(worker.add_datagrams(Bed::settings(id)));
            let link = Link { source: [2; 6], destination: [3; 6], ttl: 64, ..Link::default() };
            let way = DatagramWay { source: local(id).address, link, mtu: 1500 };
            assert!(worker.set_datagram_way(id, peer().address, Some(way)));
            commands.push(Producer::new(region.ring(session::COMMANDS)));
            memory.push(region);
        }
        worker.poll(now);
        Bed { worker, far, kernel, nic_memory, memory, commands, frame: Frame::with_capacity(FRAME), now }
    }

    fn settings(id: u32) -> DatagramSettings {
        DatagramSettings { id, session: id, place: PLACE, limit: 1 << 13, endpoints: vec![local(id)], peer: None, host: [4; 6] }
    }

    fn arrive(&mut self, flow: &Flow, payload: &[u8]) {
        let envelope = Envelope::Udp(Link { ttl: 64, ..Link::default() }, *flow);
        let header = envelope.header();
        self.frame.set_length(header + payload.len());
        self.frame.bytes_mut()[header..].copy_from_slice(payload);
        envelope.emit(self.frame.bytes_mut());
        (self.frame.checksum, self.frame.segmentation) = (Checksum::Unknown, None);
        assert!(self.far.transmit(&mut self.frame));
        self.worker.poll(self.now);
    }

    fn reader(&self, of: u32) -> Reader {
        Reader::new(&self.memory[of as usize], &PLACE, Direction::Receive).unwrap()
    }

    fn send(&mut self, of: u32, to: &Endpoint, payload: &[u8]) {
        let mut writer = Writer::new(&self.memory[of as usize], &PLACE, Direction::Send, 1 << 14).unwrap();
        assert!(writer.push(to, [payload].into_iter()));
        self.announce(of, of);
    }

    fn announce(&mut self, of: u32, socket: u32) {
        let message = Message::control(Operation::NicControl, Control::Datagrams, Cid(0), socket, 0);
        let commands = &mut self.commands[of as usize];
        let _ = commands.push(message.to_words());
        commands.publish();
        (0..4).for_each(|_| _ = self.worker.poll(self.now));
    }

    fn count(&self, counter: Counter) -> u64 {
        self.nic_memory.words(nic::counters(0), counter as usize + 1)[counter as usize].load(Ordering::Relaxed)
    }

    /// The next frame on the wire: its flow, seen from here, and its datagram.
    fn on_wire(&mut self) -> Option<(Flow, Vec<u8>)> {
        if !self.far.receive(&mut self.frame) {
            return None;
        }
        let bytes = self.frame.bytes();
        let port = u16::from_be_bytes([bytes[36], bytes[37]]);
        let found = Received::parse(bytes, port).expect("a datagram with right checksums");
        let remote = Endpoint::v4(bytes[30..34].try_into().unwrap(), port);
        Some((Flow { local: found.source, remote, device: 0 }, bytes[found.offset..][..found.length].to_vec()))
    }
}

#[test]
fn datagrams_come_to_their_socket_until_it_is_full() {
    let mut bed = Bed::new();
    let from_peer = |to| Flow { local: peer(), remote: to, device: 0 };
    let wish = Wish::new(&bed.memory[1], &PLACE, Direction::Receive);
    wish.make();
    bed.arrive(&from_peer(local(1)), b"one");
    let mut rung = Vec::new();
    bed.worker.datagram_doorbells(|socket| rung.push(socket));
    bed.arrive(&from_peer(local(1)), b"");
    bed.worker.datagram_doorbells(|socket| rung.push(socket));
    assert_eq!(rung, [1], "for the first of them");
    bed.arrive(&from_peer(local(5)), b"kernel");
    assert!(bed.kernel.receive(&mut bed.frame), "of nobody's port");
    let mut reader = bed.reader(1);
    for expected in [&b"one"[..], b""] {
        let record = reader.peek().expect("a datagram");
        let mut bytes = vec![0; record.length as usize];
        reader.read(&record, 0, &mut bytes);
        assert_eq!((record.other, &bytes[..]), (peer(), expected));
        reader.pop(&record);
    }
    assert!(reader.peek().is_none() && bed.reader(0).peek().is_none());
    for _ in 0..100 {
        bed.arrive(&from_peer(local(1)), &[7; 1000]);
    }
    let counted = [Counter::DatagramsReceived, Counter::DatagramsDropped].map(|counter| bed.count(counter));
    assert_eq!(counted, [2 + 8, 92], "8 of 1024 bytes find room");
    // A connected socket comes first, and what is unread goes to the kernel in order.
    let connected = DatagramSettings { endpoints: vec![local(1)], peer: Some(peer()), ..Bed::settings(0) };
    assert!(bed.worker.add_datagrams(connected));
    for payload in [b"a", b"b", b"c"] {
        bed.arrive(&from_peer(local(1)), payload);
    }
    bed.worker.end_datagrams(0, true);
    for payload in [b"a", b"b", b"c"] {
        assert!(bed.kernel.receive(&mut bed.frame));
        let found = Received::parse(bed.frame.bytes(), local(1).port).expect("a datagram");
        assert_eq!((found.source, &bed.frame.bytes()[found.offset..]), (peer(), &payload[..]));
    }
    assert!(!bed.kernel.receive(&mut bed.frame));
}

#[test]
fn what_is_sent_has_the_sockets_address() {
    let mut bed = Bed::new();
    bed.send(0, &peer(), b"hello");
    assert_eq!(bed.on_wire(), Some((Flow { local: local(0), remote: peer(), device: 0 }, b"hello".to_vec())));
    bed.send(0, &Endpoint::v4([10, 0, 0, 3], 9), b"no way there");
    bed.send(0, &peer(), &[0; 1473]);
    assert_eq!((bed.on_wire(), bed.count(Counter::DatagramsDropped)), (None, 2));
    bed.send(0, &peer(), &[0; 1472]);
    assert!(bed.on_wire().is_some());
    bed.announce(0, 1);
    assert_eq!(bed.count(Counter::BadMessages), 1, "the socket is another program's");
    for _ in 0..3 {
        bed.send(0, &peer(), b"again");
        assert!(bed.on_wire().is_some());
    }
    bed.worker.end_datagrams(0, false);
    bed.announce(0, 0);
    assert_eq!(bed.on_wire(), None);
}

/// Most datagrams that are sent when a socket ends, and most of all sockets in one round.
const AT_END: u64 = 8192;
const A_ROUND: u64 = 512;

/// A wire at which, for a number of times, a program refills its ring for each datagram that leaves, as a program on
/// another processor can.
struct Refilling {
    memory: Arc<Region>,
    left: Arc<AtomicU64>,
}

impl Device for Refilling {
    fn capabilities(&self) -> Capabilities {
        Capabilities { checksum: true, segmentation: 0 }
    }

    fn receive(&mut self, _: &mut Frame) -> bool {
        false
    }

    fn transmit(&mut self, _: &mut Frame) -> bool {
        if self.left.load(Ordering::Relaxed) > 0 {
            self.left.fetch_sub(1, Ordering::Relaxed);
            let word = |offset: usize| self.memory.word32(PLACE.base as usize + offset);
            let tail = word(page::SEND_TAIL).load(Ordering::Relaxed);
            word(page::SEND_HEAD).store(tail.wrapping_add(PLACE.send), Ordering::Relaxed);
        }
        true
    }
}

/// A program fills its ring as long as the NIC empties it.
#[test]
fn a_socket_ends_although_its_program_goes_on_filling_its_ring() {
    const FILLED: u64 = 20 * AT_END;
    let (memory, left) = (Arc::new(Region::private(session::HEAP + (1 << 16)).unwrap()), Arc::new(AtomicU64::new(FILLED)));
    let (host, _kernel) = memory_pair(256, FRAME, Capabilities { checksum: true, segmentation: 0 });
    let nic_memory = Arc::new(Region::private(nic::bytes(1)).unwrap());
    let now = Instant(1_000_000);
    let settings = WorkerSettings { slots: 1, frame_bytes: FRAME, ..WorkerSettings::default() };
    let wire: Box<dyn Device> = Box::new(Refilling { memory: memory.clone(), left: left.clone() });
    let mut worker = Worker::new(host, wire, nic_memory, settings, now);
    worker.start(now);
    worker.attach(0, memory.clone());
    assert!(worker.add_datagrams(Bed::settings(0)));
    let link = Link { source: [2; 6], destination: [3; 6], ttl: 64, ..Link::default() };
    assert!(worker.set_datagram_way(0, peer().address, Some(DatagramWay { source: local(0).address, link, mtu: 1500 })));
    // A ring full of datagrams of eight bytes, each of which takes 32.
    let mut writer = Writer::new(&memory, &PLACE, Direction::Send, PLACE.send).unwrap();
    while writer.push(&peer(), [&[7u8; 8][..]].into_iter()) {}
    worker.end_datagrams(0, false);
    let sent = FILLED - left.load(Ordering::Relaxed);
    assert!((512..=AT_END).contains(&sent), "{sent} datagrams");
}

/// However many sockets a program has, and although all may have the same ring.
#[test]
fn many_sockets_do_not_hold_up_a_round() {
    let mut bed = Bed::new();
    let word =
        |bed: &Bed, offset: usize, value: u32| bed.memory[0].word32(PLACE.base as usize + offset).store(value, Ordering::Relaxed);
    for id in 10..1000 {
        assert!(bed.worker.add_datagrams(DatagramSettings { id, endpoints: Vec::new(), ..Bed::settings(0) }));
    }
    word(&bed, page::SEND_HEAD, PLACE.send);
    let before = bed.count(Counter::DatagramsDropped);
    bed.worker.poll(bed.now);
    let dropped = bed.count(Counter::DatagramsDropped) - before;
    assert!((1..=A_ROUND).contains(&dropped), "{dropped} datagrams in a round");
    // Another program's datagrams get their turn, since each socket has one turn.
    let mut writer = Writer::new(&bed.memory[1], &PLACE, Direction::Send, 1 << 14).unwrap();
    assert!(writer.push(&peer(), [&b"goes on"[..]].into_iter()));
    bed.announce(1, 1);
    for _ in 0..1000 / 8 {
        bed.worker.poll(bed.now);
    }
    assert_eq!(bed.on_wire(), Some((Flow { local: local(1), remote: peer(), device: 0 }, b"goes on".to_vec())));
    let before = bed.count(Counter::DatagramsDropped);
    bed.commands[0].push([u64::MAX; 2]).unwrap();
    bed.memory[0].words(session::COMMANDS, 1)[0].store(u64::MAX, Ordering::SeqCst);
    bed.worker.poll(bed.now);
    let dropped = bed.count(Counter::DatagramsDropped) - before;
    assert!((1..=AT_END).contains(&dropped), "{dropped} datagrams at the session's end");
}

proptest! {
    #![proptest_config(crate::drawn::cases(100))]

    /// Whatever a program writes into its memory, its frames have its own address, and the other program's datagrams go
    /// on.
    #[test]
    fn a_hostile_program_harms_itself_only(writes in proptest::collection::vec((any::<u16>(), any::<u32>(), 0u32..32), 1..60)) {
        let mut bed = Bed::new();
        for (n, (at, value, shift)) in writes.into_iter().enumerate() {
            // Half of them to the page of words, where the rings' positions are.
            let room = if n % 2 == 0 { 128 } else { PLACE.bytes() as usize / 4 };
            let word = if n % 4 == 0 { 16 * (1 + usize::from(at) % 6) } else { usize::from(at) % room };
            bed.memory[0].word32(PLACE.base as usize + 4 * word).store(value >> shift, Ordering::Relaxed);
            bed.announce(0, 0);
            bed.arrive(&Flow { local: peer(), remote: local(0), device: 0 }, &[1; 100]);
            bed.worker.datagram_doorbells(|_| {});
            let payload = [n as u8; 9];
            bed.send(1, &peer(), &payload);
            let victims = (Flow { local: local(1), remote: peer(), device: 0 }, payload.to_vec());
            let mut seen = 0;
            while let Some(sent) = bed.on_wire() {
                if sent == victims {
                    seen += 1;
                } else {
                    prop_assert_eq!(sent.0, Flow { local: local(0), remote: peer(), device: 0 });
                }
            }
            prop_assert_eq!(seen, 1);
        }
    }
}
