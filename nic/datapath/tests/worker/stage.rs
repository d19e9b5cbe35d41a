//! A worker on memory wires, its agent, and two programs with a connection each.

use baton_abi::layout::{nic, scratch, session, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{Worker, WorkerSettings};
use baton_device::{Capabilities, Checksum, Device, Frame};
use baton_image::{Image, MAX_ENCODED};
use baton_ring::{Consumer, Producer};
use baton_shm::{Region, RingWords};
use baton_tcp::Instant;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub const FRAME: usize = 2048;
pub const BUFFER: u32 = 1 << 16;
pub const SLOTS: usize = 8;

/// A program's end of a session.
pub struct Program {
    pub memory: Arc<Region>,
    pub commands: Producer<RingWords>,
    pub events: Consumer<RingWords>,
}

pub struct Stage {
    pub worker: Worker<MemoryDevice, MemoryDevice>,
    pub far: MemoryDevice,
    pub kernel: MemoryDevice,
    pub nic_memory: Arc<Region>,
    pub agent: Producer<RingWords>,
    pub events: Consumer<RingWords>,
    pub programs: Vec<Program>,
    pub frame: Frame,
    pub now: Instant,
    /// The victim's peer: its next sequence number, and the number of bytes that the victim's program was sent events
    /// for.
    pub seq: u32,
    pub delivered: u32,
}

pub fn flow(of: u32) -> Flow {
    Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2 + of as u8], 40_000), device: 0 }
}

impl Stage {
    /// Connection and session 0 are the victim's, connection and session 1 the attacker's.
    pub fn new() -> Stage {
        Stage::with(true, WorkerSettings::default().many)
    }

    /// With every segment acknowledged at once, or as segments of one batch are; frames are received ahead from `many`
    /// connections on.
    pub fn with(quick_ack: bool, many: u64) -> Stage {
        let mut stage = Stage::empty(WorkerSettings { many, quick_ack, ..WorkerSettings::default() });
        for of in 0..2 {
            stage.offload(of, flow(of));
        }
        stage
    }

    /// Without connections.
    pub fn empty(settings: WorkerSettings) -> Stage {
        let capabilities = Capabilities { checksum: true, segmentation: 0 };
        let (wire, far) = memory_pair(256, FRAME, capabilities);
        let (host, kernel) = memory_pair(256, FRAME, capabilities);
        let nic_memory = Arc::new(Region::private(nic::bytes(SLOTS)).unwrap());
        let now = Instant(1_000_000);
        let (hash_key, frame_bytes) = ([1, 2, 3, 4], FRAME);
        let settings = WorkerSettings { slots: SLOTS, hash_key, frame_bytes, ..settings };
        let mut worker = Worker::new(host, wire, nic_memory.clone(), settings, now);
        worker.start(now);
        let programs = (0..2)
            .map(|id| {
                let memory = Arc::new(Region::private(session::HEAP + 4 * BUFFER as usize).unwrap());
                worker.attach(id, memory.clone());
                let (commands, events) =
                    (Producer::new(memory.ring(session::COMMANDS)), Consumer::new(memory.ring(session::EVENTS)));
                Program { memory, commands, events }
            })
            .collect();
        let (agent, events) = (Producer::new(nic_memory.ring(nic::COMMANDS)), Consumer::new(nic_memory.ring(nic::EVENTS)));
        let frame = Frame::with_capacity(FRAME);
        Stage { worker, far, kernel, nic_memory, agent, events, programs, frame, now, seq: 1, delivered: 0 }
    }

    pub fn command(&mut self, message: Message) {
        self.agent.push(message.to_words()).unwrap();
        self.agent.publish();
        self.worker.poll(self.now);
        while self.events.pop().is_some() {}
        self.events.release();
    }

    /// Writes the parameters of a handoff, and the image of an open connection, into slot `of`.
    pub fn prepare(&mut self, of: u32, flow: Flow) {
        let base = nic::slot(of);
        let heap = session::HEAP as u32;
        for (word, value) in [of, heap, BUFFER, heap + BUFFER, BUFFER].into_iter().enumerate() {
            self.nic_memory.word32(base + slot::PARAMETERS + 4 * word).store(value, Ordering::Relaxed);
        }
        self.nic_memory.write(base + slot::FLOW, &flow.to_bytes()).unwrap();
        self.write_image(of, &Image::open(flow));
    }

    fn write_image(&self, of: u32, image: &Image) {
        let mut bytes = [0u8; MAX_ENCODED];
        image.encode(&mut bytes).unwrap();
        self.nic_memory.write(nic::scratch(of) + scratch::IMAGE, &bytes).unwrap();
    }

    pub fn offload(&mut self, of: u32, flow: Flow) {
        self.offload_as(of, &Image::open(flow));
    }

    /// Hands over a connection with this image.
    pub fn offload_as(&mut self, of: u32, image: &Image) {
        self.prepare(of, image.flow);
        self.write_image(of, image);
        self.hand_off(of);
    }

    /// Hands off the connection that was prepared in this slot.
    pub fn hand_off(&mut self, of: u32) {
        let cid = Cid::new(of, 1);
        for control in [Control::Mirror, Control::Steal] {
            self.command(Message::control(Operation::NicControl, control, cid, 0, 0));
        }
        self.command(Message::new(Operation::NicHandoff, cid, 0, 0));
        while self.far.receive(&mut self.frame) {}
    }

    /// The victim's peer sends a segment without data.
    pub fn send_bare(&mut self, seq: u32, flags: Flags) {
        let template = Template::new(&flow(0).reversed(), &Link { ttl: 64, ..Link::default() }, true);
        let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
        self.frame.set_length(MAX_HEADER);
        let header = Header { seq, ack: 1, flags, window: 512, options: &options, ecn: 0, ident: 0 };
        let headers = template.emit(&header, 0, self.frame.bytes_mut());
        self.frame.set_length(headers);
        self.frame.checksum = Checksum::Verified;
        self.far.transmit(&mut self.frame);
        self.now = self.now.after(10);
        self.worker.poll(self.now);
    }

    /// The victim's peer sends a segment with these bytes.
    pub fn send_to_victim(&mut self, seq: u32, payload: &[u8]) {
        self.send_segment(seq, 1, payload);
    }

    pub fn send_segment(&mut self, seq: u32, ack: u32, payload: &[u8]) {
        self.send_of(flow(0), seq, ack, payload);
    }

    /// The peer of a flow sends a segment, which comes by the flow's device.
    pub fn send_of(&mut self, flow: Flow, seq: u32, ack: u32, payload: &[u8]) {
        let length = payload.len();
        let template = Template::new(&flow.reversed(), &Link { ttl: 64, ..Link::default() }, true);
        let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
        let flags = Flags::ACK | Flags::PSH;
        let header = Header { seq, ack, flags, window: 512, options: &options, ecn: 0, ident: 0 };
        self.frame.set_length(MAX_HEADER + length);
        let headers = template.emit(&header, length, self.frame.bytes_mut());
        self.frame.set_length(headers + length);
        self.frame.bytes_mut()[headers..].copy_from_slice(payload);
        self.frame.checksum = Checksum::Verified;
        self.frame.interface = flow.device;
        self.far.transmit(&mut self.frame);
    }

    /// The victim's peer sends a segment. It must be acknowledged, announced to the victim's program, and lie in the
    /// victim's memory.
    pub fn victim_goes_on(&mut self, length: usize) {
        let payload: Vec<u8> = (0..length).map(|at| (self.seq as usize + at) as u8).collect();
        self.send_to_victim(self.seq, &payload);
        let mut acknowledged = false;
        // Commands that an attacker has queued are run first, for a bounded number of rounds.
        for _ in 0..200 {
            self.now = self.now.after(10);
            self.worker.poll(self.now);
            while self.far.receive(&mut self.frame) {
                if let Ok(parsed) = TcpFrame::parse(self.frame.bytes(), 0)
                    && parsed.flow.local == flow(0).remote
                {
                    acknowledged |= parsed.ack == self.seq.wrapping_add(length as u32);
                }
            }
            while self.kernel.receive(&mut self.frame) {}
            if acknowledged {
                break;
            }
        }
        assert!(acknowledged, "the victim's segment was not acknowledged");
        let victim = &mut self.programs[0];
        while let Some(words) = victim.events.pop() {
            let message = Message::from_words(words).expect("the NIC sends valid messages");
            assert_eq!((message.operation, message.cid), (Operation::OsRecv, Cid::new(0, 1)), "the victim got {message:?}");
            self.delivered += message.length;
        }
        victim.events.release();
        self.seq = self.seq.wrapping_add(length as u32);
        assert_eq!(self.delivered, self.seq - 1);
        for (at, byte) in payload.iter().enumerate() {
            let place = (self.seq as usize - length + at) % BUFFER as usize;
            let mut found = [0u8];
            victim.memory.read(session::HEAP + place, &mut found).unwrap();
            assert_eq!(found[0], *byte);
        }
        victim.commands.push(Message::new(Operation::NicRecvd, Cid::new(0, 1), 0, length as u32).to_words()).unwrap();
        victim.commands.publish();
    }
}
