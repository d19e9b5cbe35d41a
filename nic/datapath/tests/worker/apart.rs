//! Large frames whose payload never passes through a frame's buffer: a device that shows a frame's headers, and puts
//! the payload into receive memory, or takes it out of send memory.

use baton_abi::layout::{nic, scratch, session, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{Worker, WorkerSettings};
use baton_device::{Arrival, BEGINNING, Capabilities, Checksum, Device, Frame, Payload};
use baton_image::{Image, MAX_ENCODED};
use baton_ring::{Consumer, Producer};
use baton_shm::{Region, RingWords};
use baton_tcp::Instant;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const FRAME: usize = 20_000;
const BUFFER: u32 = 1 << 16;
/// Bytes of the headers of a segment with timestamps, and where the length of its packet is.
const HEADERS: usize = 66;
const IP_LENGTH: usize = 16;

/// What the device did, and what it is to do.
#[derive(Default)]
struct Log {
    received_apart: Cell<usize>,
    received_whole: Cell<usize>,
    sent_apart: Cell<usize>,
    loses: Cell<bool>,
    /// It shows large frames as huge ones: their headers alone, whatever their length.
    is_huge: Cell<bool>,
}

/// A device that shows large frames.
struct Showing {
    wire: MemoryDevice,
    /// The frame that is being shown.
    shown: Option<Frame>,
    log: Rc<Log>,
}

fn count(of: &Cell<usize>) {
    of.set(of.get() + 1);
}

impl Device for Showing {
    fn capabilities(&self) -> Capabilities {
        self.wire.capabilities()
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        match self.shown.take() {
            Some(shown) => {
                count(&self.log.received_whole);
                frame.copy_from(&shown);
                true
            }
            None => self.wire.receive(frame),
        }
    }

    fn receive_or_show(&mut self, frame: &mut Frame) -> Arrival {
        if self.shown.is_none() {
            if !self.wire.receive(frame) {
                return Arrival::Nothing;
            }
            if frame.length() <= BEGINNING {
                return Arrival::Frame;
            }
            self.shown = Some(frame.clone());
        }
        frame.copy_from(self.shown.as_ref().unwrap());
        if self.log.is_huge.get() {
            let payload = frame.length() - HEADERS;
            frame.set_length(HEADERS);
            frame.bytes_mut()[IP_LENGTH..][..2].copy_from_slice(&(HEADERS as u16 - 14).to_be_bytes());
            return Arrival::Huge(payload as u32);
        }
        frame.bytes_mut()[BEGINNING..].fill(0xee);
        Arrival::Large
    }

    fn receive_apart(&mut self, headers: usize, payload: Payload<'_>) -> bool {
        let shown = self.shown.take().expect("a frame is being shown");
        let rest = &shown.bytes()[headers..];
        assert_eq!(payload[0].len() + payload[1].len(), rest.len());
        let loses = self.log.loses.get();
        for (place, byte) in payload.into_iter().flatten().zip(rest) {
            place.store(if loses { 0xdd } else { *byte }, Ordering::Relaxed);
        }
        count(&self.log.received_apart);
        !loses
    }

    fn transmits_apart(&self) -> bool {
        true
    }

    fn transmit_apart(&mut self, frame: &mut Frame, payload: Payload<'_>) -> bool {
        count(&self.log.sent_apart);
        let headers = frame.length();
        frame.set_length(headers + payload[0].len() + payload[1].len());
        let places = payload.into_iter().flatten();
        places.zip(&mut frame.bytes_mut()[headers..]).for_each(|(place, byte)| *byte = place.load(Ordering::Relaxed));
        self.wire.transmit(frame)
    }

    fn transmit(&mut self, frame: &mut Frame) -> bool {
        self.wire.transmit(frame)
    }
}

/// A segment that the NIC has sent.
struct Sent {
    ack: u32,
    payload: Vec<u8>,
}

/// A worker with one connection, its program and its peer.
struct Stage {
    worker: Worker<MemoryDevice, Box<dyn Device>>,
    far: MemoryDevice,
    memory: Arc<Region>,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    log: Rc<Log>,
    frame: Frame,
    now: Instant,
}

const CID: Cid = Cid::new(0, 1);
const RECEIVE: usize = session::HEAP;
const SEND: usize = session::HEAP + BUFFER as usize;

fn flow() -> Flow {
    Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40_000), device: 0 }
}

impl Stage {
    fn new() -> Stage {
        Stage::with(WorkerSettings::default().batch, false)
    }

    /// One whose device shows large frames as such, and one whose device shows them as huge ones.
    fn both() -> [Stage; 2] {
        [false, true].map(|is_huge| Stage::with(WorkerSettings::default().batch, is_huge))
    }

    /// One whose worker takes so many frames in a round.
    fn with(batch: usize, is_huge: bool) -> Stage {
        let capabilities = Capabilities { checksum: true, segmentation: 16_000 };
        let (wire, far) = memory_pair(64, FRAME, capabilities);
        let (host, _) = memory_pair(64, FRAME, capabilities);
        let log = Rc::new(Log::default());
        log.is_huge.set(is_huge);
        // Boxed: the whole worker is compiled for each type of device.
        let wire: Box<dyn Device> = Box::new(Showing { wire, shown: None, log: log.clone() });
        let nic_memory = Arc::new(Region::private(nic::bytes(1)).unwrap());
        let now = Instant(1_000_000);
        let settings = WorkerSettings { slots: 1, frame_bytes: FRAME, batch, ..WorkerSettings::default() };
        let mut worker = Worker::new(host, wire, nic_memory.clone(), settings, now);
        worker.start(now);
        let memory = Arc::new(Region::private(session::HEAP + 2 * BUFFER as usize).unwrap());
        worker.attach(0, memory.clone());
        let base = nic::slot(0);
        for (word, value) in [0, RECEIVE as u32, BUFFER, SEND as u32, BUFFER].into_iter().enumerate() {
            nic_memory.word32(base + slot::PARAMETERS + 4 * word).store(value, Ordering::Relaxed);
        }
        let mut image = [0u8; MAX_ENCODED];
        Image::open(flow()).encode(&mut image).unwrap();
        nic_memory.write(base + slot::FLOW, &flow().to_bytes()).unwrap();
        nic_memory.write(nic::scratch(0) + scratch::IMAGE, &image).unwrap();
        let mut agent = Producer::new(nic_memory.ring(nic::COMMANDS));
        let moves = [Control::Mirror, Control::Steal].map(|control| Message::control(Operation::NicControl, control, CID, 0, 0));
        for message in moves.into_iter().chain([Message::new(Operation::NicHandoff, CID, 0, 0)]) {
            agent.push(message.to_words()).unwrap();
        }
        agent.publish();
        worker.poll(now);
        let (commands, events) = (Producer::new(memory.ring(session::COMMANDS)), Consumer::new(memory.ring(session::EVENTS)));
        let mut stage = Stage { worker, far, memory, commands, events, log, frame: Frame::with_capacity(FRAME), now };
        stage.round();
        stage
    }

    /// Makes the frame of a segment of the peer's, whose checksum a device has verified.
    fn segment(&mut self, seq: u32, ack: u32, payload: &[u8]) {
        let template = Template::new(&flow().reversed(), &Link { ttl: 64, ..Link::default() }, true);
        let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
        let header = Header { seq, ack, flags: Flags::ACK, window: 512, options: &options, ecn: 0, ident: 0 };
        self.frame.set_length(MAX_HEADER + payload.len());
        let headers = template.emit(&header, payload.len(), self.frame.bytes_mut());
        self.frame.set_length(headers + payload.len());
        self.frame.bytes_mut()[headers..].copy_from_slice(payload);
        self.frame.checksum = Checksum::Verified;
    }

    /// The peer sends a segment with the bytes of these sequence numbers, and the NIC runs a round.
    fn send(&mut self, seq: u32, length: usize) -> Vec<Sent> {
        self.segment(seq, 1, &bytes(seq, length));
        self.pass()
    }

    /// The peer's frame reaches the NIC, which runs a round. Returns what it has sent.
    fn pass(&mut self) -> Vec<Sent> {
        assert!(self.far.transmit(&mut self.frame));
        self.round()
    }

    /// Runs rounds until nothing is left to do. Returns what the NIC has sent.
    fn round(&mut self) -> Vec<Sent> {
        self.now = self.now.after(10);
        while self.worker.poll(self.now) {}
        self.sent()
    }

    /// What the NIC has sent since the last call.
    fn sent(&mut self) -> Vec<Sent> {
        let mut sent = Vec::new();
        while self.far.receive(&mut self.frame) {
            let parsed = TcpFrame::parse(self.frame.bytes(), 0).unwrap();
            sent.push(Sent { ack: parsed.ack, payload: parsed.payload(self.frame.bytes()).to_vec() });
        }
        sent
    }

    fn command(&mut self, message: Message) {
        self.commands.push(message.to_words()).unwrap();
        self.commands.publish();
    }

    /// The program reads all that was announced.
    fn read(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some(message) = self.events.pop().and_then(Message::from_words) {
            if message.operation == Operation::OsRecv {
                for at in 0..message.length {
                    let mut byte = [0];
                    let place = (message.address as usize - RECEIVE + at as usize) % BUFFER as usize;
                    self.memory.read(RECEIVE + place, &mut byte).unwrap();
                    all.push(byte[0]);
                }
            }
        }
        self.events.release();
        self.command(Message::new(Operation::NicRecvd, CID, 0, all.len() as u32));
        all
    }

    /// Numbers of frames received apart and whole.
    fn received(&self) -> [usize; 2] {
        [self.log.received_apart.get(), self.log.received_whole.get()]
    }
}

fn bytes(seq: u32, length: usize) -> Vec<u8> {
    (0..length).map(|at| ((seq as usize + at) % 251) as u8).collect()
}

#[test]
fn the_next_data_goes_straight_into_receive_memory() {
    for mut stage in Stage::both() {
        let mut seq = 1;
        // Three times around receive memory.
        for number in 1..=20 {
            let length = 10_000 + number;
            let sent = stage.send(seq, length);
            assert!(sent.iter().any(|sent| sent.ack == seq + length as u32));
            assert_eq!(stage.read(), bytes(seq, length));
            assert_eq!(stage.received(), [number, 0]);
            seq += length as u32;
        }
        stage.send(seq, 50);
        assert_eq!(stage.read(), bytes(seq, 50), "a small one, too");
    }
}

/// A huge frame takes the turn of several, so that its acknowledgement and its event do not wait for many of them.
#[test]
fn a_round_ends_after_few_huge_frames() {
    const LENGTH: usize = 17_000;
    for (is_huge, acknowledged) in [(false, vec![51_001]), (true, vec![34_001, 51_001])] {
        let mut stage = Stage::with(4, is_huge);
        for number in 0..3 {
            let seq = 1 + (number * LENGTH) as u32;
            stage.segment(seq, 1, &bytes(seq, LENGTH));
            assert!(stage.far.transmit(&mut stage.frame));
        }
        let mut acknowledgements = Vec::new();
        while stage.worker.poll(stage.now) {
            acknowledgements.extend(stage.sent().into_iter().map(|sent| sent.ack));
        }
        assert_eq!(acknowledgements, acknowledged, "huge: {is_huge}");
        assert_eq!((stage.received(), stage.read()), ([3, 0], bytes(1, 3 * LENGTH)));
    }
}

/// Out of order, seen before, not verified, or for a posted buffer: received whole.
#[test]
fn other_large_frames_are_received_whole() {
    for mut stage in Stage::both() {
        receive_whole(&mut stage);
    }
}

fn receive_whole(stage: &mut Stage) {
    stage.send(5001, 5000);
    assert_eq!((stage.received(), stage.read().len()), ([0, 1], 0));
    stage.send(1, 5000);
    assert_eq!((stage.received(), stage.read()), ([0, 2], bytes(1, 10_000)));
    stage.send(5001, 5000);
    assert_eq!((stage.received(), stage.read().len()), ([0, 3], 0));

    stage.segment(10_001, 1, &bytes(10_001, 5000));
    assert!(baton_wire::frame::finish_checksum(stage.frame.bytes_mut(), 34, 16));
    stage.frame.checksum = Checksum::Unknown;
    stage.pass();
    assert_eq!((stage.received(), stage.read()), ([0, 4], bytes(10_001, 5000)));

    let buffer = SEND as u32 + 100;
    stage.command(Message::new(Operation::NicPost, CID, buffer, 3000));
    stage.round();
    stage.send(15_001, 5000);
    assert_eq!(stage.received(), [0, 5]);
    let mut posted = vec![0; 3000];
    stage.memory.read(buffer as usize, &mut posted).unwrap();
    assert_eq!(posted, bytes(15_001, 3000));
}

/// A frame that the device loses while it receives it changes nothing but free memory.
#[test]
fn a_frame_that_is_lost_on_the_way_is_sent_again() {
    for mut stage in Stage::both() {
        stage.send(1, 5000);
        stage.log.loses.set(true);
        let sent = stage.send(5001, 5000);
        assert!(sent.iter().all(|sent| sent.ack <= 5001));
        assert_eq!(stage.received(), [2, 0]);
        assert_eq!(stage.read(), bytes(1, 5000));
        stage.log.loses.set(false);
        assert!(stage.send(5001, 5000).iter().any(|sent| sent.ack == 10_001));
        assert_eq!(stage.read(), bytes(5001, 5000));
    }
}

/// Headers that claim another length than the frame has.
#[test]
fn a_frame_of_another_length_is_not_received_apart() {
    for wrong in [60u16, 5051, 5053, u16::MAX] {
        let mut stage = Stage::new();
        stage.segment(1, 1, &bytes(1, 5000));
        stage.frame.bytes_mut()[IP_LENGTH..][..2].copy_from_slice(&wrong.to_be_bytes());
        stage.pass();
        assert_eq!(stage.received(), [0, 1], "{wrong}");
    }
}

#[test]
fn large_sends_leave_send_memory_straight() {
    const LENGTH: u32 = 10_000;
    let mut stage = Stage::new();
    let mut seq = 1;
    for _ in 0..8 {
        let payload = bytes(seq, LENGTH as usize);
        // Around the end of send memory, too.
        let offset = seq & (BUFFER - 1);
        let (first, second) = payload.split_at(LENGTH.min(BUFFER - offset) as usize);
        for (address, piece) in [(SEND + offset as usize, first), (SEND, second)] {
            if !piece.is_empty() {
                stage.memory.write(address, piece).unwrap();
                stage.command(Message::new(Operation::NicSend, CID, address as u32, piece.len() as u32));
            }
        }
        let sent: Vec<u8> = stage.round().into_iter().flat_map(|sent| sent.payload).collect();
        assert_eq!(sent, payload);
        seq += LENGTH;
        stage.segment(1, seq, &[]);
        stage.pass();
    }
    assert!(stage.log.sent_apart.get() >= 8);
}
