//! The NIC of the paper: the real worker of Baton's NIC behind its real message interface, its connections' peers, and
//! a program's side that writes. In virtual time; wire and memory are this process's.

use super::numbers as n;
use anyhow::{Context, Result, bail};
use baton_abi::layout::{block, nic, scratch, session, slot};
use baton_abi::{Cid, Control, FETCH, MORE, Message, Operation};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{Worker, WorkerSettings};
use baton_device::{Capabilities, Checksum, Device, Frame};
use baton_image::{Image, MAX_ENCODED};
use baton_ring::{Consumer, Producer};
use baton_shm::{Region, RingWords};
use baton_sim::pair::arriving;
use baton_tcp::segment::Segment;
use baton_tcp::{Connection, Instant};
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Endpoint, Flow, TcpFrame};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes of a connection's receive and of its send memory.
const MEMORY: u32 = 64 << 10;
/// Bytes of a frame's buffer.
const FRAME: usize = 2048;
/// Bytes that one message without an address stands for at most (the client library's).
const JOINED: u32 = 16 << 10;

/// When messages are sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Messages {
    /// As the paper's: one for each write, and one when a page or more of the program's data is acknowledged. Until
    /// then no page is free. (Section 5.1 says that the NIC joins acknowledgements, and not how.)
    Each,
    /// As ours: one stands for all that is written until the NIC has read it, and for what is acknowledged in a round.
    Joined,
}

/// Messages of a kind that have crossed the interconnect.
pub type Counts = BTreeMap<&'static str, u64>;

/// The paper's name of a message.
fn name(operation: Operation) -> &'static str {
    match operation {
        Operation::NicHandoff => "ch_nic_handoff",
        Operation::NicRestore => "ch_nic_restore",
        Operation::NicSend => "ch_nic_send",
        Operation::NicRecvd => "ch_nic_recvd",
        Operation::NicControl => "ch_nic_ctrl",
        Operation::NicForward => "ch_nic_forward",
        Operation::NicPost => "ch_nic_post",
        Operation::OsRecv => "ch_os_recv",
        Operation::OsAck => "ch_os_ack",
        Operation::OsControl => "ch_os_ctrl",
        Operation::OsResource => "ch_os_resource",
        Operation::OsRestore => "ch_os_restore",
    }
}

/// A connection: its peer, and its program's view of it.
struct Far {
    peer: Connection,
    template: Template,
    cid: Cid,
    /// Sequence number behind what the program has written, and behind what it has announced.
    written: u32,
    announced: u32,
    /// Position of the last message in the ring.
    given: Option<u64>,
    /// Bytes written, of which the host does not know yet that they are acknowledged.
    pending: u32,
    /// Bytes acknowledged that the NIC has not reported to the host.
    unreported: u32,
}

/// An event for the program: its connection, and the bytes that the peer has acknowledged.
pub type Acknowledged = (usize, u32);

/// The NIC.
pub struct Nic {
    worker: Worker<MemoryDevice, MemoryDevice>,
    wire: MemoryDevice,
    memory: Arc<Region>,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    far: Vec<Far>,
    frame: Frame,
    messages: Messages,
    /// Messages that have crossed so far.
    pub counts: Counts,
    /// Segments that the NIC has sent and received.
    pub segments: [u64; 2],
    /// Until when the NIC's processor is busy, in microseconds.
    pub busy: u64,
}

/// Both ends of connection `at`, as the NIC sees them.
pub fn flow(at: usize) -> Flow {
    let remote = Endpoint::v4([10, 1, (at >> 8) as u8, at as u8], 1024 + at as u16);
    Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote, device: 0 }
}

/// A connection of the microbenchmark: segments of 1460 bytes, so no timestamps.
pub fn image(flow: Flow) -> Image {
    Image { timestamps: false, snd_wscale: 0, ..Image::open(flow) }
}

impl Nic {
    /// A NIC with this many connections, handed off by the interface's messages.
    ///
    /// # Errors
    /// If it refuses one.
    pub fn new(connections: usize, messages: Messages, now: u64) -> Result<Nic> {
        let capabilities = Capabilities { checksum: true, segmentation: 0 };
        let (wire, far) = memory_pair(8192, FRAME, capabilities);
        let (host, _) = memory_pair(64, FRAME, capabilities);
        let nic_memory = Arc::new(Region::private(nic::bytes(connections))?);
        let memory = Arc::new(Region::private(session::HEAP + connections * 2 * MEMORY as usize)?);
        let settings =
            WorkerSettings { slots: connections, hash_key: [1, 2, 3, 4], frame_bytes: FRAME, ..WorkerSettings::default() };
        let mut worker = Worker::new(host, wire, nic_memory.clone(), settings, Instant(now));
        worker.start(Instant(now));
        worker.attach(0, memory.clone());
        let (commands, events) = (Producer::new(memory.ring(session::COMMANDS)), Consumer::new(memory.ring(session::EVENTS)));
        let mut nic = Nic {
            worker,
            wire: far,
            memory,
            commands,
            events,
            far: Vec::new(),
            frame: Frame::with_capacity(FRAME),
            messages,
            counts: Counts::new(),
            segments: [0; 2],
            busy: now,
        };
        let mut agent = (Producer::new(nic_memory.ring(nic::COMMANDS)), Consumer::new(nic_memory.ring(nic::EVENTS)));
        for at in 0..connections {
            nic.hand_off(&nic_memory, &mut agent, at, now)?;
        }
        Ok(nic)
    }

    /// Mirror, steal, hand off.
    fn hand_off(
        &mut self,
        nic_memory: &Region,
        (commands, events): &mut (Producer<RingWords>, Consumer<RingWords>),
        at: usize,
        now: u64,
    ) -> Result<()> {
        let flow = flow(at);
        let cid = Cid::new(at as u32, 1);
        let (base, memory) = (nic::slot(at as u32), session::HEAP as u32 + at as u32 * 2 * MEMORY);
        for (word, value) in [0, memory, MEMORY, memory + MEMORY, MEMORY, at as u32].into_iter().enumerate() {
            nic_memory.word32(base + slot::PARAMETERS + 4 * word).store(value, Ordering::Relaxed);
        }
        let image = image(flow);
        self.memory.word32(session::block(at as u32) + block::QUEUED_SEQ).store(image.snd_end, Ordering::Relaxed);
        let mut bytes = [0u8; MAX_ENCODED];
        image.encode(&mut bytes).context("encoding an image")?;
        if nic_memory.write(base + slot::FLOW, &flow.to_bytes()).is_err()
            || nic_memory.write(nic::scratch(at as u32) + scratch::IMAGE, &bytes).is_err()
        {
            bail!("the slot lies outside NIC memory");
        }
        for message in [
            Message::control(Operation::NicControl, Control::Mirror, cid, 0, 0),
            Message::control(Operation::NicControl, Control::Steal, cid, 0, 0),
            Message::new(Operation::NicHandoff, cid, 0, 0),
        ] {
            let _ = commands.push(message.to_words());
            commands.publish();
            self.worker.poll(Instant(now));
            *self.counts.entry(name(message.operation)).or_default() += 1;
        }
        while let Some(words) = events.pop() {
            if Message::from_words(words).is_some_and(|message| message.kind == Control::Refused as u16) {
                bail!("the NIC refused connection {at}");
            }
        }
        events.release();
        let mut peer = Connection::from_image(&self::image(flow.reversed()), None, MEMORY, Instant(now));
        peer.set_quick_ack(true);
        let template = Template::new(&flow.reversed(), &Link { ttl: 64, ..Link::default() }, false);
        let written = image.snd_end;
        self.far.push(Far { peer, template, cid, written, announced: written, given: None, pending: 0, unreported: 0 });
        Ok(())
    }

    /// Whether the program may write `length` bytes to a connection: there is room in its socket, and for the messages.
    pub fn accepts(&mut self, at: usize, length: u32) -> bool {
        n::SEND_SPACE - self.far[at].pending >= length && self.commands.has_room(2)
    }

    /// The program writes `length` bytes. Returns the number of messages.
    pub fn write(&mut self, at: usize, length: u32) -> u64 {
        let base = session::HEAP as u32 + (2 * at as u32 + 1) * MEMORY;
        let far = &mut self.far[at];
        let from = far.written;
        far.written = from.wrapping_add(length);
        far.pending += length;
        let mut sent = 0;
        match self.messages {
            Messages::Each => {
                // Send memory is a circle, so a write across its end is two pieces.
                let first = length.min(MEMORY - (from & (MEMORY - 1)));
                for (seq, length, kind) in
                    [(from, first, if first < length { MORE } else { 0 }), (from.wrapping_add(first), length - first, 0)]
                {
                    if length > 0 {
                        let message = Message::new(Operation::NicSend, far.cid, base + (seq & (MEMORY - 1)), length);
                        let _ = self.commands.push(Message { kind, ..message }.to_words());
                        sent += 1;
                    }
                }
            }
            Messages::Joined => {
                self.memory.word32(session::block(at as u32) + block::QUEUED_SEQ).store(far.written, Ordering::Release);
                let released = far.given.is_none_or(|position| self.commands.is_released(position));
                if released || far.written.wrapping_sub(far.announced) >= JOINED {
                    let message = Message::new(Operation::NicSend, far.cid, 0, 0);
                    let _ = self.commands.push(Message { kind: FETCH, ..message }.to_words());
                    far.given = Some(self.commands.position());
                    far.announced = far.written;
                    sent += 1;
                }
            }
        }
        self.commands.publish();
        *self.counts.entry(name(Operation::NicSend)).or_default() += sent;
        sent
    }

    /// Lets the NIC, whose processor is free, do what there is. Puts what it sends for which connection into `out`, and
    /// what it reports into `events`.
    /// Returns whether there was anything to do.
    pub fn poll(&mut self, now: u64, out: &mut Vec<(usize, Segment)>, events: &mut Vec<Acknowledged>) -> bool {
        let before = self.segments;
        let frames = self.worker.frames();
        let worked = self.worker.poll(Instant(now));
        self.segments[1] += self.worker.frames() - frames;
        let sent = self.segments[0];
        while self.wire.receive(&mut self.frame) {
            let Ok(frame) = TcpFrame::parse(self.frame.bytes(), 0) else { continue };
            self.segments[0] += 1;
            // What the NIC sees as the remote end is the receiver.
            out.push((usize::from(frame.flow.local.port) - 1024, Segment::from(&frame)));
        }
        self.segments[1] -= self.segments[0] - sent;
        while let Some(words) = self.events.pop() {
            let Some(message) = Message::from_words(words) else { continue };
            if message.operation == Operation::OsAck {
                let at = message.cid.slot() as usize;
                let Some(bytes) = self.acknowledged(at, message.length) else { continue };
                events.push((at, bytes));
            }
            *self.counts.entry(name(message.operation)).or_default() += 1;
        }
        self.events.release();
        let segments = self.segments[0] + self.segments[1] - before[0] - before[1];
        let cycles = segments as f64 * n::CYCLES_PER_SEGMENT / 2.0;
        self.busy = now + (cycles / n::NIC_CLOCK * 1e6) as u64;
        worked
    }

    /// The peer has acknowledged `length` bytes more. Returns how many the NIC reports to the host now, if it
    /// does.
    fn acknowledged(&mut self, at: usize, length: u32) -> Option<u32> {
        let far = &mut self.far[at];
        far.unreported += length;
        let bytes = match self.messages {
            Messages::Each => far.unreported - far.unreported % n::PAGE as u32,
            Messages::Joined => far.unreported,
        };
        far.unreported -= bytes;
        far.pending -= bytes;
        (bytes > 0).then_some(bytes)
    }

    /// A connection's peer receives a segment, reads its data at once, and answers. The answers are on the wire to the
    /// NIC after [`Nic::deliver`].
    pub fn answer(&mut self, at: usize, segment: &Segment, now: u64) -> Vec<Segment> {
        answer(&mut self.far[at].peer, segment, now)
    }

    /// A segment of a connection's peer arrives at the NIC.
    pub fn deliver(&mut self, at: usize, segment: &Segment) {
        let header = Header {
            seq: segment.seq,
            ack: segment.ack,
            flags: segment.flags,
            window: segment.window,
            options: &segment.options,
            ecn: 0,
            ident: 0,
        };
        self.frame.set_length(MAX_HEADER);
        let length = self.far[at].template.emit(&header, 0, self.frame.bytes_mut());
        self.frame.set_length(length);
        self.frame.checksum = Checksum::Verified;
        self.wire.transmit(&mut self.frame);
    }
}

/// A connection receives a segment, its program reads the data at once, and what it has to send is returned.
pub fn answer(peer: &mut Connection, segment: &Segment, now: u64) -> Vec<Segment> {
    let received = peer.input(segment, Instant(now));
    if received.delivered > 0 {
        peer.consumed(received.delivered);
    }
    std::iter::from_fn(|| peer.poll_transmit(Instant(now), 0).map(|transmit| arriving(&transmit))).collect()
}
