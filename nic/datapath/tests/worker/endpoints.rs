//! Connections that the worker makes and closes, with smoltcp as the peer, in virtual time: handshakes, half close,
//! both ends at once, TIME-WAIT.

use baton_abi::layout::{RING_MESSAGES, nic, pulse, scratch, session, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{ListenerSettings, Worker, WorkerSettings};
use baton_device::{Capabilities, Checksum, Device as _, Frame};
use baton_image::{Image, MAX_ENCODED};
use baton_ring::{Consumer, Producer};
use baton_shm::{Region, RingWords};
use baton_tcp::Instant;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
use smoltcp::iface::{Config as InterfaceConfig, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp;
use smoltcp::time::Instant as SmolInstant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const FRAME: usize = 2048;
const ETHERNET: usize = 14;
const BUFFER: u32 = 1 << 16;
const SLOTS: usize = 8;
const MINUTE: u64 = 60_000_000;

fn flow() -> Flow {
    Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 }
}

/// The worker, with a cooperative program and agent.
struct Nic {
    worker: Worker<MemoryDevice, MemoryDevice>,
    kernel: MemoryDevice,
    nic_memory: Arc<Region>,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    memory: Arc<Region>,
    program: Producer<RingWords>,
    program_events: Consumer<RingWords>,
    /// The agent's notifications.
    seen: Vec<(Cid, Control)>,
    /// Number of times that it asked to have a connection restored.
    restores: u32,
    /// Why connections could not be opened.
    errors: Vec<u32>,
    /// TCP_SYNCNT of connections that are opened.
    syn_retries: u32,
    /// The program reads its events.
    reads: bool,
    received: Vec<u8>,
    fin: bool,
    sent: u32,
}

impl Nic {
    /// `succeeds`: an earlier NIC was there, and has died.
    fn new(succeeds: bool, now: Instant) -> (Nic, MemoryDevice) {
        let capabilities = Capabilities { checksum: false, segmentation: 0 };
        let (wire, far) = memory_pair(256, FRAME, capabilities);
        let (host, kernel) = memory_pair(256, FRAME, capabilities);
        let nic_memory = Arc::new(Region::private(nic::bytes(SLOTS)).unwrap());
        nic_memory.words(nic::pulse(0) + pulse::ROUNDS, 1)[0].store(u64::from(succeeds), Ordering::Relaxed);
        let settings = WorkerSettings { slots: SLOTS, hash_key: [1, 2, 3, 4], frame_bytes: FRAME, ..WorkerSettings::default() };
        let mut worker = Worker::new(host, wire, nic_memory.clone(), settings, now);
        worker.start(now);
        let memory = Arc::new(Region::private(session::HEAP + 4 * BUFFER as usize).unwrap());
        worker.attach(0, memory.clone());
        let (program, program_events) =
            (Producer::new(memory.ring(session::COMMANDS)), Consumer::new(memory.ring(session::EVENTS)));
        let (commands, events) = (Producer::new(nic_memory.ring(nic::COMMANDS)), Consumer::new(nic_memory.ring(nic::EVENTS)));
        let (seen, received) = (Vec::new(), Vec::new());
        let nic = Nic {
            worker,
            kernel,
            nic_memory,
            commands,
            events,
            memory,
            program,
            program_events,
            seen,
            restores: 0,
            errors: Vec::new(),
            syn_retries: 0,
            reads: true,
            received,
            fin: false,
            sent: 0,
        };
        (nic, far)
    }

    fn command(&mut self, control: Control, cid: Cid, value: u32) {
        self.commands.push(Message::control(Operation::NicControl, control, cid, value, 0).to_words()).unwrap();
        self.commands.publish();
    }

    fn listen(&mut self) {
        let endpoints = vec![flow().local];
        self.worker.listen(ListenerSettings { id: 1, endpoints, receive_limit: BUFFER, mtu: 1500, ttl: 64 });
    }

    fn connect(&mut self, cid: Cid) {
        let link = Link { ttl: 64, ..Link::default() };
        let mut bytes = [0u8; MAX_ENCODED];
        Image { link, mtu: 1500, ..Image::open(flow()) }.encode(&mut bytes).unwrap();
        self.nic_memory.write(nic::scratch(cid.slot()) + scratch::IMAGE, &bytes).unwrap();
        self.command(Control::Connect, cid, self.syn_retries);
    }

    /// Hands a connection off that the worker has made.
    fn hand_off(&mut self, cid: Cid) {
        let heap = session::HEAP as u32;
        for (word, value) in [0, heap, BUFFER, heap + BUFFER, BUFFER, 0].into_iter().enumerate() {
            self.nic_memory.word32(nic::slot(cid.slot()) + slot::PARAMETERS + 4 * word).store(value, Ordering::Relaxed);
        }
        self.commands.push(Message::new(Operation::NicHandoff, cid, 0, 0).to_words()).unwrap();
        self.commands.publish();
    }

    fn send(&mut self, cid: Cid, bytes: &[u8]) {
        let address = session::HEAP as u32 + BUFFER + self.sent;
        self.memory.write(address as usize, bytes).unwrap();
        self.sent += bytes.len() as u32;
        self.program.push(Message::new(Operation::NicSend, cid, address, bytes.len() as u32).to_words()).unwrap();
        self.program.publish();
    }

    fn shut_down(&mut self, cid: Cid) {
        self.asked_by_program(Control::Shutdown, cid);
    }

    fn asked_by_program(&mut self, control: Control, cid: Cid) {
        self.program.push(Message::control(Operation::NicControl, control, cid, 0, 0).to_words()).unwrap();
        self.program.publish();
    }

    /// The program has read so many bytes more.
    fn read(&mut self, cid: Cid, bytes: u32) {
        self.program.push(Message::new(Operation::NicRecvd, cid, 0, bytes).to_words()).unwrap();
        self.program.publish();
    }

    /// Closes the connection in the program's name, after it has read all bytes.
    fn close(&mut self, cid: Cid, first: u32) {
        self.command(Control::Close, cid, first.wrapping_add(self.received.len() as u32));
    }

    fn poll(&mut self, now: Instant) {
        self.worker.poll(now);
        while let Some(words) = self.events.pop() {
            let message = Message::from_words(words).expect("a valid message");
            self.restores += u32::from(message.operation == Operation::OsRestore);
            if let Some(control) = Control::from_number(message.kind).filter(|_| message.operation == Operation::OsControl) {
                assert_ne!(control, Control::Refused, "{message:?}");
                if control == Control::NotMade {
                    self.errors.push(message.address);
                }
                if control != Control::Done {
                    self.seen.push((message.cid, control));
                }
            }
        }
        self.events.release();
        while self.reads
            && let Some(words) = self.program_events.pop()
        {
            let message = Message::from_words(words).expect("a valid message");
            match (message.operation, Control::from_number(message.kind)) {
                (Operation::OsRecv, _) => {
                    let mut bytes = vec![0; message.length as usize];
                    self.memory.read(message.address as usize, &mut bytes).unwrap();
                    self.received.extend(bytes);
                }
                (Operation::OsControl, Some(Control::Fin)) => self.fin = true,
                _ => {}
            }
        }
        self.program_events.release();
    }

    fn saw(&self, cid: Cid, control: Control) -> bool {
        self.seen.contains(&(cid, control))
    }
}

/// smoltcp's device: what is on the wire behind the Ethernet header.
struct Wire {
    far: MemoryDevice,
    frame: Frame,
    /// Frames do not arrive at smoltcp.
    cut: bool,
}

struct Incoming(Vec<u8>);
struct Outgoing<'a>(&'a mut Wire);

impl RxToken for Incoming {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, work: F) -> R {
        work(&self.0)
    }
}

impl TxToken for Outgoing<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, work: F) -> R {
        let mut bytes = vec![0; ETHERNET + length];
        bytes[12..14].copy_from_slice(&0x0800u16.to_be_bytes());
        let result = work(&mut bytes[ETHERNET..]);
        self.0.transmit_frame(&bytes);
        result
    }
}

impl Wire {
    fn transmit_frame(&mut self, bytes: &[u8]) {
        self.frame.fill(bytes);
        self.frame.checksum = Checksum::Unknown;
        self.far.transmit(&mut self.frame);
    }
}

impl Device for Wire {
    type RxToken<'a> = Incoming;
    type TxToken<'a> = Outgoing<'a>;

    fn receive(&mut self, _: SmolInstant) -> Option<(Incoming, Outgoing<'_>)> {
        if self.cut || !self.far.receive(&mut self.frame) {
            return None;
        }
        Some((Incoming(self.frame.bytes()[ETHERNET..].to_vec()), Outgoing(self)))
    }

    fn transmit(&mut self, _: SmolInstant) -> Option<Outgoing<'_>> {
        Some(Outgoing(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = 1500;
        capabilities
    }
}

/// The NIC and its peer.
struct Pair {
    nic: Nic,
    wire: Wire,
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    now: Instant,
}

fn smol(now: Instant) -> SmolInstant {
    SmolInstant::from_micros(now.0 as i64)
}

impl Pair {
    fn new() -> Pair {
        Pair::with(false)
    }

    /// `succeeds`: an earlier NIC was there, and has died.
    fn with(succeeds: bool) -> Pair {
        let now = Instant(5_000_000);
        let (nic, far) = Nic::new(succeeds, now);
        let mut wire = Wire { far, frame: Frame::with_capacity(FRAME), cut: false };
        let mut interface = Interface::new(InterfaceConfig::new(HardwareAddress::Ip), &mut wire, smol(now));
        interface.update_ip_addrs(|addresses| addresses.push(IpCidr::new(IpAddress::v4(10, 0, 0, 2), 24)).expect("room"));
        let buffer = || tcp::SocketBuffer::new(vec![0; BUFFER as usize]);
        let mut sockets = SocketSet::new(Vec::new());
        let handle = sockets.add(tcp::Socket::new(buffer(), buffer()));
        Pair { nic, wire, interface, sockets, handle, now }
    }

    fn peer(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    fn peer_connects(&mut self) {
        let socket = self.sockets.get_mut::<tcp::Socket>(self.handle);
        socket.connect(self.interface.context(), (IpAddress::v4(10, 0, 0, 1), 80), 4000).expect("connect");
    }

    /// Exchanges frames for so many microseconds.
    fn run(&mut self, micros: u64) {
        let end = self.now.after(micros);
        while self.now < end {
            for _ in 0..4 {
                self.interface.poll(smol(self.now), &mut self.wire, &mut self.sockets);
                self.nic.poll(self.now);
            }
            self.now = self.now.after(micros.clamp(1, 1000));
        }
    }

    /// The NIC's next sequence number to receive, and to send: those of the image of a connection that it has made.
    fn numbers(&self, cid: Cid) -> (u32, u32) {
        let mut bytes = [0u8; MAX_ENCODED];
        self.nic.nic_memory.read(nic::scratch(cid.slot()) + scratch::IMAGE, &mut bytes).unwrap();
        let image = Image::decode(&bytes).expect("an image");
        (image.rcv_nxt, image.snd_nxt)
    }

    /// A connection that the peer has opened: its cid, and the first sequence number of what the peer sends.
    fn accepted(&mut self) -> (Cid, u32) {
        let cid = Cid::new(0, 1);
        self.nic.listen();
        self.nic.command(Control::Grant, cid, 1);
        self.nic.poll(self.now);
        self.peer_connects();
        self.run(5000);
        assert!(self.nic.saw(cid, Control::Made));
        let first = self.numbers(cid).0;
        self.nic.hand_off(cid);
        self.run(2000);
        assert_eq!(self.peer().state(), tcp::State::Established);
        (cid, first)
    }

    /// Sends bytes both ways.
    fn exchange(&mut self, cid: Cid) {
        self.peer().send_slice(b"a request").expect("room");
        self.nic.send(cid, b"an answer");
        self.run(10_000);
        assert_eq!(self.nic.received, b"a request");
        let mut answer = [0; 9];
        assert_eq!(self.peer().recv_slice(&mut answer), Ok(9));
        assert_eq!(&answer, b"an answer");
    }

    /// The agent takes the slot of a connection that has ended on the NIC.
    fn agent_vacates(&mut self, cid: Cid) {
        assert!(self.nic.saw(cid, Control::Closed), "{:?}", self.nic.seen);
        self.nic.command(Control::Cancel, cid, 0);
        // Entries of its timers pass.
        self.run(2_000_000);
    }

    /// A segment of the peer's that smoltcp did not send. Returns the NIC's answers.
    fn inject(&mut self, header: &Header<'_>, from_kernel: bool) -> Vec<(Flags, u32, u32)> {
        self.inject_to(&flow(), header, from_kernel)
    }

    /// The same for any connection.
    fn inject_to(&mut self, flow: &Flow, header: &Header<'_>, from_kernel: bool) -> Vec<(Flags, u32, u32)> {
        while self.wire.far.receive(&mut self.wire.frame) {}
        let of = if from_kernel { *flow } else { flow.reversed() };
        let template = Template::new(&of, &Link { ttl: 64, ..Link::default() }, false);
        let mut bytes = vec![0; MAX_HEADER];
        let length = template.emit(header, 0, &mut bytes);
        bytes.truncate(length);
        assert!(baton_wire::frame::finish_checksum(&mut bytes, template.tcp_offset(), 16));
        if from_kernel {
            self.wire.frame.fill(&bytes);
            self.nic.kernel.transmit(&mut self.wire.frame);
        } else {
            self.wire.transmit_frame(&bytes);
        }
        self.nic.poll(self.now);
        let mut answers = Vec::new();
        while self.wire.far.receive(&mut self.wire.frame) {
            let parsed = TcpFrame::parse(self.wire.frame.bytes(), 0).expect("TCP");
            answers.push((parsed.flags, parsed.seq, parsed.ack));
        }
        answers
    }
}

fn header(seq: u32, ack: u32, flags: Flags, options: &TcpOptions) -> Header<'_> {
    Header { seq, ack, flags, window: 500, options, ecn: 0, ident: 0 }
}

/// A client whose SYN comes before the listener has slots is answered by the kernel, at once. Later, when all slots are
/// taken, it is answered when it sends its SYN again, as by Linux.
#[test]
fn clients_that_come_before_the_first_slot_are_the_kernels() {
    let mut pair = Pair::new();
    let none = TcpOptions::default();
    let seen_by_kernel = |pair: &mut Pair| {
        let mut seen = 0;
        while pair.nic.kernel.receive(&mut pair.wire.frame) {
            seen += 1;
        }
        seen
    };
    pair.nic.listen();
    assert_eq!(pair.inject(&header(7, 0, Flags::SYN, &none), false), []);
    assert_eq!(seen_by_kernel(&mut pair), 1);
    pair.nic.command(Control::Grant, Cid::new(0, 1), 1);
    pair.nic.poll(pair.now);
    let answers = pair.inject(&header(7, 0, Flags::SYN, &none), false);
    let [(_, isn, 8)] = answers[..] else { panic!("{answers:?}") };
    pair.inject(&header(8, isn.wrapping_add(1), Flags::ACK, &none), false);
    pair.nic.poll(pair.now);
    assert!(pair.nic.saw(Cid::new(0, 1), Control::Made));
    pair.nic.listen();
    let other = Flow { remote: Endpoint { port: 4001, ..flow().remote }, ..flow() };
    assert_eq!(pair.inject_to(&other, &header(7, 0, Flags::SYN, &none), false), []);
    assert_eq!(seen_by_kernel(&mut pair), 0);
}

/// The last segment of a handshake that an earlier NIC has answered, which comes before this one has slots: the kernel
/// would reset it.
#[test]
fn a_cookie_waits_for_a_slot() {
    let mut first = Pair::new();
    let none = TcpOptions::default();
    first.nic.listen();
    first.nic.command(Control::Grant, Cid::new(0, 1), 1);
    first.nic.poll(first.now);
    let answers = first.inject(&header(7, 0, Flags::SYN, &none), false);
    let [(_, isn, 8)] = answers[..] else { panic!("{answers:?}") };
    let last = header(8, isn.wrapping_add(1), Flags::ACK, &none);

    let mut next = Pair::with(true);
    next.nic.listen();
    assert_eq!(next.inject(&last, false), []);
    assert!(!next.nic.kernel.receive(&mut next.wire.frame), "it is not given to the kernel");
    next.nic.command(Control::Grant, Cid::new(0, 1), 1);
    next.nic.poll(next.now);
    next.inject(&last, false);
    next.nic.poll(next.now);
    assert!(next.nic.saw(Cid::new(0, 1), Control::Made));
}

/// RFC 9293 section 3.8.6.1: a peer that acknowledges and takes nothing more keeps neither slot nor memory of what the
/// program has closed; the kernel's orphan ends after some minutes, too.
#[test]
fn a_peer_that_reads_nothing_does_not_keep_a_closed_connection() {
    let mut pair = Pair::new();
    let (cid, first) = pair.accepted();
    for _ in 0..2 {
        pair.nic.sent = 0;
        pair.nic.send(cid, &[7; 40_000]);
        pair.run(100_000);
    }
    pair.run(1_000_000);
    assert_eq!(pair.peer().recv_queue(), BUFFER as usize, "its window is closed");
    pair.nic.close(cid, first);
    let closed_at = pair.now;
    while !pair.nic.saw(cid, Control::Closed) {
        assert!(pair.now.since(closed_at) < 10 * MINUTE, "it has not ended");
        pair.run(100);
        pair.now = pair.now.after(100_000);
    }
    assert!(pair.now.since(closed_at) > MINUTE, "the peer had a while");
    pair.agent_vacates(cid);
}

/// The NIC closes first; the peer goes on sending nothing, and closes later: a half close.
#[test]
fn a_server_closes_first() {
    let mut pair = Pair::new();
    let (cid, first) = pair.accepted();
    pair.exchange(cid);
    pair.nic.close(cid, first);
    pair.run(5000);
    assert_eq!(pair.peer().state(), tcp::State::CloseWait);
    pair.agent_vacates(cid);
    pair.run(1_000_000);
    pair.peer().close();
    pair.run(5000);
    assert_eq!(pair.peer().state(), tcp::State::Closed, "its FIN was acknowledged without a slot");
    assert!(pair.nic.worker.next_timeout().is_some(), "TIME-WAIT");
    pair.run(2 * MINUTE);
    assert_eq!(pair.nic.worker.next_timeout(), None, "it is over");
}

#[test]
fn the_peer_closes_first() {
    let mut pair = Pair::new();
    let (cid, first) = pair.accepted();
    pair.exchange(cid);
    pair.peer().close();
    pair.run(5000);
    assert!(pair.nic.fin);
    pair.nic.close(cid, first);
    pair.run(5000);
    assert_eq!(pair.peer().state(), tcp::State::TimeWait);
    pair.agent_vacates(cid);
    assert_eq!(pair.nic.worker.next_timeout(), None, "only the peer waits");
}

#[test]
fn both_close_at_once() {
    let mut pair = Pair::new();
    let (cid, first) = pair.accepted();
    pair.exchange(cid);
    pair.wire.cut = true;
    pair.nic.close(cid, first);
    pair.nic.poll(pair.now);
    pair.peer().close();
    pair.run(1000);
    pair.wire.cut = false;
    pair.run(10_000);
    assert_eq!(pair.peer().state(), tcp::State::TimeWait);
    pair.agent_vacates(cid);
    assert!(pair.nic.worker.next_timeout().is_some(), "both wait");
}

#[test]
fn the_nic_connects() {
    let mut pair = Pair::new();
    let cid = Cid::new(0, 1);
    pair.peer().listen(4000).expect("listen");
    pair.nic.connect(cid);
    pair.run(5000);
    assert!(pair.nic.saw(cid, Control::Made), "{:?}", pair.nic.seen);
    let first = pair.numbers(cid).0;
    pair.nic.hand_off(cid);
    pair.run(2000);
    pair.exchange(cid);
    pair.nic.close(cid, first);
    pair.run(5000);
    pair.peer().close();
    pair.run(5000);
    assert_eq!(pair.peer().state(), tcp::State::Closed);
    pair.agent_vacates(cid);
}

#[test]
fn both_open_at_once() {
    let mut pair = Pair::new();
    let cid = Cid::new(0, 1);
    pair.wire.cut = true;
    pair.nic.connect(cid);
    pair.nic.poll(pair.now);
    pair.peer_connects();
    pair.run(1000);
    pair.wire.cut = false;
    pair.run(5000);
    assert!(pair.nic.saw(cid, Control::Made), "{:?}", pair.nic.seen);
    // smoltcp does not take the acknowledgement in the NIC's SYN-ACK; it repeats its own, and is answered.
    pair.nic.hand_off(cid);
    pair.run(3_000_000);
    assert_eq!(pair.peer().state(), tcp::State::Established);
    pair.exchange(cid);
}

/// Data that can no longer be read resets the peer.
#[test]
fn data_behind_a_close_is_refused() {
    for before in [true, false] {
        let mut pair = Pair::new();
        let (cid, first) = pair.accepted();
        pair.exchange(cid);
        pair.nic.close(cid, first);
        pair.run(5000);
        if !before {
            pair.agent_vacates(cid);
        }
        pair.peer().send_slice(b"more").expect("room");
        pair.run(5000);
        assert_eq!(pair.peer().state(), tcp::State::Closed, "it was reset");
        if before {
            pair.agent_vacates(cid);
        }
        let none = TcpOptions::default();
        assert_eq!(pair.inject(&header(first, 1, Flags::FIN | Flags::ACK, &none), false), [], "nothing is left");
    }
}

/// A program that closes with unread data resets its peer.
#[test]
fn unread_data_resets_the_peer() {
    let mut pair = Pair::new();
    let (cid, first) = pair.accepted();
    pair.exchange(cid);
    pair.peer().send_slice(b"more").expect("room");
    pair.run(5000);
    pair.nic.received.truncate(3);
    pair.nic.close(cid, first);
    pair.run(5000);
    assert_eq!(pair.peer().state(), tcp::State::Closed);
    pair.agent_vacates(cid);
    assert_eq!(pair.nic.worker.next_timeout(), None);
}

/// In TIME-WAIT: a FIN that comes again is acknowledged, a RST changes nothing (RFC 1337), an old SYN gets an
/// acknowledgement, the kernel cannot open the 4-tuple, and a SYN that is later than all that was received begins the
/// next connection (RFC 6191).
#[test]
fn time_wait_protects_the_next_connection() {
    let mut pair = Pair::new();
    let (cid, first) = pair.accepted();
    pair.exchange(cid);
    let sent = pair.numbers(cid).1.wrapping_add(b"an answer".len() as u32 + 1);
    pair.nic.close(cid, first);
    pair.run(5000);
    pair.agent_vacates(cid);
    pair.peer().close();
    pair.run(5000);
    let fin = first.wrapping_add(b"a request".len() as u32);
    let end = fin.wrapping_add(1);
    let none = TcpOptions::default();
    let again = pair.inject(&header(fin, sent, Flags::FIN | Flags::ACK, &none), false);
    assert_eq!(again, [(Flags::ACK, sent, end)]);
    assert_eq!(pair.inject(&header(end, 0, Flags::RST, &none), false), []);
    pair.run(1_000_000);
    assert_eq!(pair.inject(&header(fin, 0, Flags::SYN, &none), false), [(Flags::ACK, sent, end)], "an old SYN");
    assert_eq!(pair.inject(&header(7, 0, Flags::SYN, &none), true), [], "the kernel's SYN");
    pair.nic.command(Control::Grant, Cid::new(1, 1), 1);
    pair.run(1000);
    let later = end.wrapping_add(100_000);
    let answers = pair.inject(&header(later, 0, Flags::SYN, &none), false);
    let [(flags, isn, ack)] = answers[..] else { panic!("{answers:?}") };
    assert_eq!((flags, ack), (Flags::SYN | Flags::ACK, later.wrapping_add(1)));
    assert!(isn.wrapping_sub(sent) < 1 << 31, "behind what was sent");
    pair.inject(&header(later.wrapping_add(1), isn.wrapping_add(1), Flags::ACK, &none), false);
    pair.nic.poll(pair.now);
    assert!(pair.nic.saw(Cid::new(1, 1), Control::Made));
}

/// RFC 9293 section 3.10.7.4: a FIN that comes again in TIME-WAIT makes it last a minute from then on. Nothing else
/// does.
#[test]
fn a_repeated_fin_makes_time_wait_last() {
    const SECOND: u64 = MINUTE / 60;
    let mut pair = Pair::new();
    let (cid, first) = pair.accepted();
    pair.exchange(cid);
    let sent = pair.numbers(cid).1.wrapping_add(b"an answer".len() as u32 + 1);
    let end = first.wrapping_add(b"a request".len() as u32 + 1);
    pair.nic.close(cid, first);
    pair.run(5000);
    pair.agent_vacates(cid);
    pair.peer().close();
    pair.run(5000);
    let none = TcpOptions::default();
    let (syn, again) = (header(7, 0, Flags::SYN, &none), header(end.wrapping_sub(1), sent, Flags::FIN | Flags::ACK, &none));
    for _ in 0..2 {
        pair.run(40 * SECOND);
        assert_eq!(pair.inject(&again, false), [(Flags::ACK, sent, end)], "it has ended");
    }
    pair.run(30 * SECOND);
    assert_eq!(pair.inject(&header(end, sent, Flags::ACK, &none), false), []);
    pair.run(25 * SECOND);
    assert_eq!(pair.inject(&syn, true), [], "the kernel's SYN has to wait");
    pair.run(6 * SECOND);
    assert_eq!(pair.inject(&syn, true), [(Flags::SYN, 7, 0)], "a minute is over");
}

/// A connection that has ended in order, whose program still reads what has arrived: nothing is sent to the peer, which
/// has forgotten the connection and would answer with a reset, and a reset changes nothing.
#[test]
fn a_program_reads_after_the_end_in_peace() {
    let mut pair = Pair::new();
    let (cid, first) = pair.accepted();
    let sent = pair.numbers(cid).1.wrapping_add(1);
    let most = vec![7; BUFFER as usize * 3 / 4];
    pair.peer().send_slice(&most).expect("room");
    pair.run(10_000);
    pair.nic.shut_down(cid);
    pair.run(10_000);
    assert_eq!((pair.nic.received.len(), pair.peer().state()), (most.len(), tcp::State::CloseWait));
    pair.peer().close();
    pair.run(10_000);
    assert_eq!((pair.nic.fin, pair.peer().state()), (true, tcp::State::Closed));
    let end = first.wrapping_add(most.len() as u32 + 1);
    pair.nic.seen.clear();
    pair.nic.restores = 0;
    pair.nic.read(cid, most.len() as u32);
    let none = TcpOptions::default();
    assert_eq!(pair.inject(&header(end, sent, Flags::RST, &none), false), [], "a window update");
    pair.run(10_000);
    assert!(pair.nic.seen.is_empty() && pair.nic.restores == 0, "{:?}", pair.nic.seen);
}

/// A connection that both sides have ended, the peer first, is the kernel's: its program may not have read everything.
#[test]
fn what_both_sides_have_ended_leaves_the_nic() {
    let mut pair = Pair::new();
    let (cid, _) = pair.accepted();
    pair.peer().send_slice(b"not read yet").expect("room");
    pair.peer().close();
    pair.run(10_000);
    pair.nic.shut_down(cid);
    pair.run(10_000);
    assert_eq!(pair.peer().state(), tcp::State::TimeWait);
    assert_eq!((pair.nic.restores, pair.nic.saw(cid, Control::Closed)), (1, false), "{:?}", pair.nic.seen);
    pair.nic.commands.push(Message::new(Operation::NicRestore, cid, 0, 0).to_words()).unwrap();
    pair.nic.commands.publish();
    pair.run(10_000);
    let mut bytes = [0u8; MAX_ENCODED];
    pair.nic.nic_memory.read(nic::scratch(cid.slot()) + scratch::IMAGE, &mut bytes).unwrap();
    let image = Image::decode(&bytes).expect("an image");
    assert_eq!((image.state, image.unread), (baton_image::State::TimeWait, 12));
}

/// A program that is slow to read its events gets the last ones of a connection, too: the agent, which takes the slot
/// of one that has ended, is notified after the program.
#[test]
fn the_program_is_notified_of_the_end_before_the_agent() {
    let mut pair = Pair::new();
    let (cid, _) = pair.accepted();
    pair.peer().set_nagle_enabled(false);
    pair.nic.reads = false;
    let bytes = RING_MESSAGES + 100;
    for _ in 0..bytes {
        pair.peer().send_slice(b"x").expect("room");
        pair.run(1);
    }
    pair.peer().close();
    pair.run(10_000);
    pair.nic.asked_by_program(Control::Abort, cid);
    pair.run(10_000);
    assert_eq!(pair.peer().state(), tcp::State::Closed);
    assert!(!pair.nic.saw(cid, Control::Closed), "the program has not been notified");
    pair.nic.reads = true;
    pair.run(10_000);
    assert_eq!((pair.nic.received.len(), pair.nic.fin), (bytes, true));
    pair.agent_vacates(cid);
}

/// The first bytes of a SYN in an ICMP message, which says that it did not reach the peer.
fn unreachable(code: u8, quoted: &[u8]) -> Vec<u8> {
    let mut message = vec![3, code, 0, 0, 0, 0, 0, 0];
    message.extend_from_slice(&quoted[ETHERNET..ETHERNET + 28]);
    let sum = baton_wire::checksum::Sum::new().bytes(&message).finish();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut frame = vec![0; ETHERNET];
    frame[12] = 8;
    let total = (20 + message.len()) as u16;
    frame.extend_from_slice(&[0x45, 0, (total >> 8) as u8, total as u8, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 9, 10, 0, 0, 1]);
    frame.extend_from_slice(&message);
    frame
}

/// What ends a SYN-SENT connection: an ICMP message about its SYN, with the error that Linux has for the code; one
/// about another segment changes nothing.
#[test]
fn icmp_ends_a_connection_that_is_opened() {
    for (code, error) in [(0, 101), (1, 113), (3, 111), (13, 113)] {
        let mut pair = Pair::new();
        let cid = Cid::new(0, 1);
        pair.nic.connect(cid);
        pair.nic.poll(pair.now);
        assert!(pair.wire.far.receive(&mut pair.wire.frame), "the SYN");
        let syn = pair.wire.frame.bytes().to_vec();
        let mut other = syn.clone();
        other[ETHERNET + 20 + 7] ^= 1;
        pair.wire.transmit_frame(&unreachable(code, &other));
        pair.nic.poll(pair.now);
        assert!(!pair.nic.saw(cid, Control::NotMade));
        pair.wire.transmit_frame(&unreachable(code, &syn));
        pair.nic.poll(pair.now);
        assert_eq!(pair.nic.errors, [error]);
    }
}

/// A SYN is sent again as often as the program wants (TCP_SYNCNT).
#[test]
fn a_syn_is_sent_again_as_often_as_wanted() {
    let mut pair = Pair::new();
    let cid = Cid::new(0, 1);
    pair.wire.cut = true;
    pair.nic.syn_retries = 2;
    pair.nic.connect(cid);
    pair.run(MINUTE);
    assert_eq!(pair.nic.errors, [110]);
    let mut syns = 0;
    while pair.wire.far.receive(&mut pair.wire.frame) {
        syns += 1;
    }
    assert_eq!(syns, 3);
}

/// After TIME-WAIT the kernel's SYN passes.
#[test]
fn the_kernel_opens_the_4_tuple_after_time_wait() {
    let mut pair = Pair::new();
    let (cid, first) = pair.accepted();
    pair.exchange(cid);
    pair.nic.close(cid, first);
    pair.run(5000);
    pair.agent_vacates(cid);
    pair.peer().close();
    pair.run(5000);
    let none = TcpOptions::default();
    assert_eq!(pair.inject(&header(7, 0, Flags::SYN, &none), true), []);
    pair.run(MINUTE + 1_000_000);
    assert_eq!(pair.inject(&header(7, 0, Flags::SYN, &none), true), [(Flags::SYN, 7, 0)]);
}
