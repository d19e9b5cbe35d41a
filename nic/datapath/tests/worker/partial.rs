//! Partial offload in virtual time: a NIC worker, a host's TCP, a program and a peer on a link with faults. Whatever is
//! lost, overtaken, doubled or damaged, and whenever the agent asks for the connection, both streams arrive as they
//! were sent; the connection leaves its fast path when it must, and is on it again when it is quiet.

use baton_abi::layout::{Counter, RING_MESSAGES, host_tcp, nic, scratch, session, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{HostWire, NoKernel, Worker, WorkerSettings};
use baton_device::{Capabilities, Checksum, Device, Frame};
use baton_image::{Image, MAX_ENCODED, State as ImageState};
use baton_ring::{Consumer, Producer};
use baton_shm::{Region, RingWords};
use baton_sim::{Impairments, Link, Rng, stream};
use baton_tcp::{Connection, Instant, Segment, State};
use baton_wire::frame::{Link as Way, MAX_HEADER, TCP_CHECKSUM, Template, finish_checksum};
use baton_wire::{Endpoint, Flow, TcpFrame};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const FRAME: usize = 2048;
const BUFFER: u32 = 1 << 16;
const SLOTS: usize = 8;
/// Keys of the streams to the peer and from it.
const OUT: u64 = 1;
const IN: u64 = 2;

fn flow() -> Flow {
    Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40_000), device: 0 }
}

/// The peer: an independent connection with the whole protocol, and its program.
struct Peer {
    tcp: Connection,
    memory: Vec<u8>,
    template: Template,
    sends: u32,
    queued: u32,
    received: u32,
    /// It does not close before it has received so many bytes.
    waits_for: u32,
}

impl Peer {
    fn new(sends: u32, now: Instant) -> Peer {
        let tcp = Connection::from_image(&Image::open(flow().reversed()), None, BUFFER, now);
        let template = Template::new(&flow().reversed(), &Way { ttl: 64, ..Way::default() }, true);
        Peer { tcp, memory: vec![0; BUFFER as usize], template, sends, queued: 0, received: 0, waits_for: 0 }
    }

    fn run_program(&mut self) {
        let readable = self.tcp.readable();
        for at in 0..readable {
            let value = self.memory[self.tcp.rcv_read().wrapping_add(at) as usize % BUFFER as usize];
            assert_eq!(value, stream::byte(OUT, u64::from(self.received + at)), "the peer's byte {}", self.received + at);
        }
        self.tcp.consumed(readable);
        self.received += readable;
        let room = BUFFER - self.tcp.snd_end().wrapping_sub(self.tcp.snd_una()).min(BUFFER);
        let amount = room.min(self.sends - self.queued).min(9000);
        if amount > 0 && self.tcp.queue(amount) {
            self.queued += amount;
        }
        if self.queued == self.sends && self.received >= self.waits_for {
            self.tcp.shutdown();
        }
    }

    fn receive(&mut self, frame: &Frame, now: Instant) {
        let Ok(parsed) = TcpFrame::parse(frame.bytes(), 0) else { return };
        if !parsed.checksum_holds(frame.bytes()) {
            return;
        }
        let received = self.tcp.input(&Segment::from(&parsed), now);
        let payload = parsed.payload(frame.bytes());
        for at in 0..received.place {
            let place = received.place_seq.wrapping_add(at) as usize % BUFFER as usize;
            self.memory[place] = payload[(received.skip + at) as usize];
        }
    }

    fn transmit(&mut self, frame: &mut Frame, now: Instant) -> bool {
        let Some(transmit) = self.tcp.poll_transmit(now, 0) else { return false };
        let length = transmit.length as usize;
        frame.set_length(MAX_HEADER + length);
        let headers = self.template.emit(&transmit.header(0), length, frame.bytes_mut());
        frame.set_length(headers + length);
        // The first byte has sequence number 1.
        stream::fill(IN, u64::from(transmit.seq - 1), &mut frame.bytes_mut()[headers..]);
        finish_checksum(frame.bytes_mut(), self.template.tcp_offset(), TCP_CHECKSUM);
        (frame.checksum, frame.segmentation) = (Checksum::Unknown, None);
        true
    }
}

/// The program whose connection is on the NIC.
struct Program {
    memory: Arc<Region>,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    sends: u32,
    queued: u32,
    acked: u32,
    received: u32,
    shut_down: bool,
    /// It does not close before it has received so many bytes.
    waits_for: u32,
    fin: bool,
    closed: Option<u32>,
}

impl Program {
    fn send(&mut self, message: Message) {
        self.commands.push(message.to_words()).expect("room in the ring");
        self.commands.publish();
    }

    fn handle_events(&mut self, cid: Cid) {
        while let Some(words) = self.events.pop() {
            let message = Message::from_words(words).expect("a message");
            if message.cid != cid {
                continue;
            }
            match (message.operation, Control::from_number(message.kind)) {
                (Operation::OsRecv, _) => {
                    assert_eq!(message.address, session::HEAP as u32 + (1 + self.received) % BUFFER);
                    self.read(cid, self.received + message.length);
                }
                (Operation::OsAck, _) => self.acked += message.length,
                (_, Some(Control::Fin)) => self.fin = true,
                (_, Some(Control::Closed)) => self.closed = Some(message.address),
                // Its messages have been read.
                (_, Some(Control::Taken)) => {}
                other => panic!("{other:?}"),
            }
        }
        self.events.release();
    }

    /// Reads and checks the bytes before position `end` of the stream.
    fn read(&mut self, cid: Cid, end: u32) {
        for at in self.received..end {
            let mut value = [0];
            self.memory.read(session::HEAP + ((1 + at) % BUFFER) as usize, &mut value).unwrap();
            assert_eq!(value[0], stream::byte(IN, at.into()), "the program's byte {at}");
        }
        if end > self.received {
            self.send(Message::new(Operation::NicRecvd, cid, 0, end - self.received));
        }
        self.received = end;
    }

    fn go_on(&mut self, cid: Cid) {
        self.handle_events(cid);
        let room = BUFFER - (self.queued - self.acked);
        let offset = (1 + self.queued) % BUFFER;
        let amount = room.min(self.sends - self.queued).min(7000).min(BUFFER - offset);
        if amount > 0 {
            let mut bytes = vec![0; amount as usize];
            stream::fill(OUT, self.queued.into(), &mut bytes);
            let address = session::HEAP as u32 + BUFFER + offset;
            self.memory.write(address as usize, &bytes).unwrap();
            self.send(Message::new(Operation::NicSend, cid, address, amount));
            self.queued += amount;
        }
        if self.queued == self.sends && self.received >= self.waits_for && !self.shut_down {
            self.shut_down = true;
            self.send(Message::control(Operation::NicControl, Control::Shutdown, cid, 0, 0));
        }
    }
}

struct World {
    nic: Worker<MemoryDevice, MemoryDevice>,
    host: Worker<NoKernel, HostWire>,
    far: MemoryDevice,
    kernel: MemoryDevice,
    nic_memory: Arc<Region>,
    agent: Producer<RingWords>,
    answers: Consumer<RingWords>,
    /// What the NIC has sent to the agent without being asked.
    notices: Vec<Message>,
    program: Program,
    peer: Peer,
    links: [Link<Vec<u8>>; 2],
    cid: Cid,
    frame: Frame,
    now: Instant,
}

impl World {
    /// The program sends and receives so many bytes. `fast_path`: the NIC keeps only the fast path.
    fn new(bytes: [u32; 2], impairments: Impairments, seed: u64, fast_path: bool) -> World {
        let now = Instant(1_000_000);
        let capabilities = Capabilities { checksum: false, segmentation: 0 };
        let (wire, far) = memory_pair(1024, FRAME, capabilities);
        let (host_device, kernel) = memory_pair(1024, FRAME, capabilities);
        let nic_memory = Arc::new(Region::private(nic::bytes(SLOTS)).unwrap());
        let settings = WorkerSettings { slots: SLOTS, hash_key: [1, 2, 3, 4], frame_bytes: FRAME, ..WorkerSettings::default() };
        let mut nic = Worker::new(host_device, wire, nic_memory.clone(), settings, now);
        nic.start(now);
        let shared = Arc::new(Region::private(host_tcp::bytes(SLOTS).next_multiple_of(4096)).unwrap());
        nic.set_host_tcp(shared.clone());
        let mut host = Worker::host_tcp(nic_memory.clone(), shared, settings, now);
        let memory = Arc::new(Region::private(session::HEAP + 4 * BUFFER as usize).unwrap());
        nic.attach(0, memory.clone());
        host.attach(0, memory.clone());
        let program = Program {
            commands: Producer::new(memory.ring(session::COMMANDS)),
            events: Consumer::new(memory.ring(session::EVENTS)),
            memory,
            sends: bytes[0],
            queued: 0,
            acked: 0,
            received: 0,
            shut_down: false,
            waits_for: 0,
            fin: false,
            closed: None,
        };
        let mut world = World {
            nic,
            host,
            far,
            kernel,
            agent: Producer::new(nic_memory.ring(nic::COMMANDS)),
            answers: Consumer::new(nic_memory.ring(nic::EVENTS)),
            notices: Vec::new(),
            nic_memory,
            program,
            peer: Peer::new(bytes[1], now),
            links: [Link::new(impairments, seed), Link::new(impairments, seed + 1)],
            cid: Cid::new(2, 1),
            frame: Frame::with_capacity(FRAME),
            now,
        };
        world.offload(fast_path);
        world
    }

    fn offload(&mut self, fast_path: bool) {
        let (cid, base) = (self.cid, nic::slot(2));
        let heap = session::HEAP as u32;
        for (word, value) in [0, heap, BUFFER, heap + BUFFER, BUFFER].into_iter().enumerate() {
            self.nic_memory.word32(base + slot::PARAMETERS + 4 * word).store(value, Ordering::Relaxed);
        }
        for word in 0..2 {
            self.nic_memory.word32(base + slot::LIMITS + 4 * word).store(BUFFER, Ordering::Relaxed);
        }
        assert!(!fast_path || self.nic.keep_fast_path(0));
        let mut bytes = [0u8; MAX_ENCODED];
        Image::open(flow()).encode(&mut bytes).unwrap();
        self.nic_memory.write(base + slot::FLOW, &flow().to_bytes()).unwrap();
        self.nic_memory.write(nic::scratch(2) + scratch::IMAGE, &bytes).unwrap();
        for control in [Control::Mirror, Control::Steal] {
            assert_eq!(self.command(Message::control(Operation::NicControl, control, cid, 0, 0)), Control::Done);
        }
        assert_eq!(self.command(Message::new(Operation::NicHandoff, cid, 0, 0)), Control::Done);
    }

    /// Sends an agent's command and waits for its answer.
    fn command(&mut self, message: Message) -> Control {
        self.agent.push(message.to_words()).unwrap();
        self.agent.publish();
        for _ in 0..100 {
            self.nic.poll(self.now);
            if let Some(answer) = self.take_notices() {
                return answer;
            }
            self.host.poll_lent(self.now);
        }
        panic!("no answer to {message:?}");
    }

    fn take_notices(&mut self) -> Option<Control> {
        let mut answer = None;
        while let Some(words) = self.answers.pop() {
            let message = Message::from_words(words).unwrap();
            match Control::from_number(message.kind) {
                Some(control @ (Control::Done | Control::Refused)) => answer = Some(control),
                _ if message.operation == Operation::OsResource => {}
                _ => self.notices.push(message),
            }
        }
        self.answers.release();
        answer
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.nic_memory.words(nic::counters(0), 64)[counter as usize].load(Ordering::Relaxed)
    }

    /// The agent stops the connection, and resumes it under another cid, as for a growth.
    fn stop_and_resume(&mut self) {
        if self.command(Message::new(Operation::NicRestore, self.cid, 0, 0)) != Control::Done {
            return;
        }
        let base = nic::slot(2);
        let mut bytes = [0u8; MAX_ENCODED];
        self.nic_memory.read(nic::scratch(2) + scratch::IMAGE, &mut bytes).unwrap();
        let image = Image::decode(&bytes).unwrap();
        // What is pending is dropped with the old cid: the agent has it from the image.
        self.program.handle_events(self.cid);
        let next = self.cid.next_generation();
        let fin = !matches!(image.state, ImageState::Established | ImageState::FinWait1 | ImageState::FinWait2);
        let delivered = image.rcv_nxt - 1 - u32::from(fin);
        self.program.fin |= fin;
        self.program.acked = (image.snd_una - 1).min(self.program.queued);
        for at in self.program.received..delivered {
            let mut value = [0];
            self.program.memory.read(session::HEAP + ((1 + at) % BUFFER) as usize, &mut value).unwrap();
            assert_eq!(value[0], stream::byte(IN, at.into()), "byte {at} at a stop");
        }
        self.program.received = delivered;
        self.nic_memory.word32(base + slot::READ).store(1 + delivered, Ordering::Relaxed);
        let resume = Message::control(Operation::NicControl, Control::Resume, self.cid, next.0, 0);
        assert_eq!(self.command(resume), Control::Done);
        self.cid = next;
    }

    /// Neither side closes before it has received everything.
    fn close_late(mut self) -> World {
        (self.program.waits_for, self.peer.waits_for) = (self.peer.sends, self.program.sends);
        self
    }

    /// Everything that there is to do at this time.
    fn settle(&mut self) {
        loop {
            self.program.go_on(self.cid);
            let mut worked = self.nic.poll(self.now);
            worked |= self.host.poll_lent(self.now);
            self.take_notices();
            while self.far.receive(&mut self.frame) {
                self.links[0].push(self.frame.bytes().to_vec(), self.now.0);
                worked = true;
            }
            while let Some(bytes) = self.links[0].pop(self.now.0) {
                self.frame.fill(&bytes);
                self.peer.receive(&self.frame, self.now);
                worked = true;
            }
            if self.peer.tcp.next_timeout() <= self.now {
                self.peer.tcp.on_timeout(self.now);
                worked = true;
            }
            self.peer.run_program();
            while self.peer.transmit(&mut self.frame, self.now) {
                self.links[1].push(self.frame.bytes().to_vec(), self.now.0);
                worked = true;
            }
            while let Some(bytes) = self.links[1].pop(self.now.0) {
                self.frame.fill(&bytes);
                self.far.transmit(&mut self.frame);
                worked = true;
            }
            // Frames that were damaged so that they are nobody's.
            while self.kernel.receive(&mut self.frame) {}
            if !worked {
                return;
            }
        }
    }

    /// Goes on to the next moment at which something happens. False if nothing ever will.
    fn advance(&mut self) -> bool {
        let timers = [self.nic.next_timeout(), self.host.next_timeout(), Some(self.peer.tcp.next_timeout().0)];
        let arrivals = [self.links[0].next_arrival(), self.links[1].next_arrival()];
        let next = timers.into_iter().chain(arrivals).flatten().min().unwrap_or(u64::MAX);
        self.now = Instant(next.max(self.now.0 + 1));
        next != u64::MAX
    }

    fn is_done(&self) -> bool {
        let program = &self.program;
        let peer_done = matches!(self.peer.tcp.state(), State::Closed | State::TimeWait | State::FinWait2);
        program.received == self.peer.sends && self.peer.received == program.sends && program.fin && peer_done
    }

    /// Runs until both streams have arrived. `stops` are the times between two stops by the agent.
    fn run(&mut self, mut stops: impl FnMut() -> Option<u64>) {
        let (limit, mut rounds) = (self.now.after(3_000_000_000), 0);
        let mut stop_at = stops().map(|wait| self.now.0 + wait);
        while !self.is_done() {
            self.settle();
            if stop_at.is_some_and(|at| at <= self.now.0) {
                self.stop_and_resume();
                stop_at = stops().map(|wait| self.now.0 + wait);
                continue;
            }
            let went_on = self.advance();
            rounds += 1;
            assert!(went_on && self.now < limit && rounds < 200_000, "stuck: {}", self.state());
        }
        assert!(matches!(self.program.closed, None | Some(0)), "it has ended with an error");
    }

    /// What is known, for a failure's message.
    fn state(&self) -> String {
        format!(
            "at {:?}: {} of {} bytes sent, {} of {} received, FIN {}, closed {:?}, peer {:?}, timers {:?} {:?} {:?}, {:?}, {:?}",
            self.now,
            self.peer.received,
            self.program.sends,
            self.program.received,
            self.peer.sends,
            self.program.fin,
            self.program.closed,
            self.peer.tcp.state(),
            self.nic.next_timeout(),
            self.host.next_timeout(),
            self.peer.tcp.next_timeout(),
            self.transitions(),
            self.notices,
        )
    }

    fn transitions(&self) -> (u64, u64) {
        (self.counter(Counter::Lent), self.counter(Counter::TakenBack))
    }
}

fn clean() -> Impairments {
    Impairments { rate: 100_000_000, delay: 500, buffer: 200_000, loss: 0, reorder: 0, hold: 0, duplicate: 0, corrupt: 0 }
}

/// Without faults only the end leaves the fast path.
#[test]
fn a_clean_connection_is_lent_at_its_end() {
    let mut world = World::new([300_000, 300_000], clean(), 1, true).close_late();
    while world.program.received < 200_000 {
        world.settle();
        world.advance();
    }
    assert_eq!(world.transitions(), (0, 0));
    world.run(|| None);
    assert_eq!(world.transitions(), (1, 0));
}

/// One lost segment in either direction: the connection is lent, and comes back.
#[test]
fn a_loss_lends_the_connection_and_quiet_brings_it_back() {
    for bytes in [[2_000_000, 0], [0, 2_000_000]] {
        let mut world = World::new(bytes, clean(), 1, true).close_late();
        let lossy = Impairments { loss: 20_000, ..clean() };
        while world.transitions().0 == 0 {
            world.links.iter_mut().for_each(|link| link.set_impairments(lossy));
            world.settle();
            world.advance();
        }
        world.links.iter_mut().for_each(|link| link.set_impairments(clean()));
        while world.transitions().1 == 0 {
            world.settle();
            assert!(world.advance(), "{}", world.state());
        }
        let segments = world.counter(Counter::LentSegments);
        assert!(segments > 8, "{segments}");
        world.run(|| None);
    }
}

/// A program whose connection is lent sends every kind of message that it has no right to send: it changes nothing.
#[test]
fn a_program_cannot_give_orders_to_the_host_tcp() {
    let mut world = World::new([2_000_000, 2_000_000], clean(), 1, true).close_late();
    world.links.iter_mut().for_each(|link| link.set_impairments(Impairments { loss: 20_000, ..clean() }));
    while world.transitions().0 == world.transitions().1 {
        world.settle();
        world.advance();
    }
    let before = world.transitions();
    // Operations of the agent's and of events, then controls that are none of a program's.
    for operation in [1, 2, 6, 7, 17, 18, 19, 20, 21] {
        let [first, second] = Message::new(Operation::NicSend, world.cid, 1, 1).to_words();
        world.program.commands.push([first & !0xff | operation, second]).unwrap();
    }
    for kind in (1..50).filter(|kind| !(5..=10).contains(kind)) {
        world.program.send(Message { kind, ..Message::new(Operation::NicControl, world.cid, 1, 1) });
    }
    world.nic.poll(world.now);
    world.host.poll_lent(world.now);
    assert!(!world.host.is_broken());
    assert_eq!(world.transitions(), before);
    assert!(world.counter(Counter::BadMessages) > 40);
    world.run(|| None);
}

/// A program whose connection is lent sends more than the host's TCP takes, which does not run for a while: the NIC
/// leaves what it has no room for in the program's ring, and everything arrives when the host's TCP goes on. A program
/// that has no connection there waits for nobody.
#[test]
fn a_program_fills_no_memory_while_the_host_tcp_is_behind() {
    let mut world = World::new([2_000_000, 2_000_000], clean(), 1, true).close_late();
    world.links.iter_mut().for_each(|link| link.set_impairments(Impairments { loss: 20_000, ..clean() }));
    while world.transitions().0 == world.transitions().1 {
        world.settle();
        world.advance();
    }
    world.links.iter_mut().for_each(|link| link.set_impairments(clean()));
    let push = Message::control(Operation::NicControl, Control::NoDelay, world.cid, 1, 0).to_words();
    // The ring to the host's TCP, the program's, and some batches.
    let most = 2 * RING_MESSAGES + 1000;
    let mut sent = 0;
    while sent < 2 * most && world.program.commands.push(push).is_ok() {
        sent += 1;
        if sent % 64 == 0 {
            world.program.commands.publish();
            world.nic.poll(world.now);
        }
    }
    assert!((RING_MESSAGES..most).contains(&sent), "{sent} messages were taken");
    world.program.commands.publish();
    let memory = Arc::new(Region::private(session::HEAP).unwrap());
    world.nic.attach(1, memory.clone());
    assert!(world.nic.keep_fast_path(1));
    let mut other = Producer::<RingWords>::new(memory.ring(session::COMMANDS));
    other.push(Message::control(Operation::NicControl, Control::NoDelay, Cid::new(3, 1), 1, 0).to_words()).unwrap();
    other.publish();
    world.nic.poll(world.now);
    assert!(other.is_released(other.position()), "the other program's message is read");
    assert!(!world.program.commands.has_room(1), "the first one's are not");
    let bad = world.counter(Counter::BadMessages);
    for _ in 0..1000 {
        world.nic.poll(world.now);
        world.host.poll_lent(world.now);
    }
    assert!(world.program.commands.has_room(RING_MESSAGES as u64 - 1), "the program goes on");
    assert_eq!(world.counter(Counter::BadMessages), bad);
    world.run(|| None);
}

fn impairments() -> impl Strategy<Value = Impairments> {
    let share = |most: u32| prop_oneof![Just(0), 0..most];
    (share(50_000), share(50_000), share(20_000), share(10_000), 0usize..3).prop_map(
        |(loss, reorder, duplicate, corrupt, speed)| Impairments {
            rate: [0, 10_000_000, 300_000_000][speed],
            delay: [20, 300, 5_000][speed],
            buffer: 300_000,
            loss,
            reorder,
            hold: 700,
            duplicate,
            corrupt,
        },
    )
}

proptest! {
    #![proptest_config(crate::drawn::cases(150))]

    /// Fast path and whole connection deliver the same streams, also when the agent takes the connection in the middle.
    #[test]
    fn both_streams_arrive_as_they_were_sent(
        faults in impairments(),
        seed in any::<u32>(),
        bytes in [0u32..400_000, 0u32..400_000],
        close_late in any::<bool>(),
        stops in prop_oneof![Just(0u64), 300..100_000u64],
    ) {
        for fast_path in [true, false] {
            let mut world = World::new(bytes, faults, seed.into(), fast_path);
            world = if close_late { world.close_late() } else { world };
            let mut rng = Rng::new(seed.into());
            world.run(|| (stops > 0).then(|| 1 + rng.below(stops)));
            prop_assert_eq!(world.transitions().0 > 0, fast_path);
        }
    }
}
