//! Irregular handshakes with a listener's clients: forged segments, and more handshakes than are remembered.

use baton_abi::layout::{Counter, nic, pulse, scratch};
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
use std::sync::Arc;
use std::sync::atomic::Ordering;

const FRAME: usize = 2048;
const SLOTS: u32 = 64;
/// Handshakes that are remembered at a time.
const REMEMBERED: u16 = 512;
const CLIENT_ISN: u32 = 1000;

struct Bed {
    worker: Worker<MemoryDevice, MemoryDevice>,
    kernel: MemoryDevice,
    far: MemoryDevice,
    nic_memory: Arc<Region>,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    frame: Frame,
    now: Instant,
}

fn flow(client: u16) -> Flow {
    Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], client), device: 0 }
}

impl Bed {
    /// A NIC with a listener that has slots.
    fn new() -> Bed {
        let mut bed = Bed::before_start(false, false);
        bed.worker.start(bed.now);
        assert_eq!(bed.made(), []);
        bed
    }

    /// The same before frames flow, and before it has run the commands that grant the slots, behind one that gives a
    /// connection up. `succeeds`: an earlier NIC was there, and has died. `beside`: it is beside the kernel.
    fn before_start(succeeds: bool, beside: bool) -> Bed {
        Bed::with_slots(succeeds, beside, SLOTS)
    }

    /// The same with so many slots for the listener.
    fn with_slots(succeeds: bool, beside: bool, slots: u32) -> Bed {
        let now = Instant(5_000_000);
        let capabilities = Capabilities { checksum: true, segmentation: 0 };
        let (wire, far) = memory_pair(1024, FRAME, capabilities);
        let (host, kernel) = memory_pair(256, FRAME, capabilities);
        let nic_memory = Arc::new(Region::private(nic::bytes(SLOTS as usize)).unwrap());
        nic_memory.words(nic::pulse(0) + pulse::ROUNDS, 1)[0].store(u64::from(succeeds), Ordering::Relaxed);
        let settings = WorkerSettings { slots: SLOTS as usize, frame_bytes: FRAME, beside, ..WorkerSettings::default() };
        let mut worker = Worker::new(host, wire, nic_memory.clone(), settings, now);
        let endpoints = vec![flow(0).local];
        worker.listen(ListenerSettings { id: 1, endpoints, receive_limit: 1 << 22, mtu: 1500, ttl: 64 });
        let mut bed = Bed {
            worker,
            kernel,
            far,
            commands: Producer::new(nic_memory.ring(nic::COMMANDS)),
            events: Consumer::new(nic_memory.ring(nic::EVENTS)),
            nic_memory,
            frame: Frame::with_capacity(FRAME),
            now,
        };
        let gives_up = Message::control(Operation::NicControl, Control::Cancel, Cid::new(0, 2), 0, 0);
        bed.commands.push(gives_up.to_words()).unwrap();
        (0..slots).for_each(|slot| bed.grant(slot));
        bed.commands.publish();
        bed
    }

    fn grant(&mut self, slot: u32) {
        let grant = Message::control(Operation::NicControl, Control::Grant, Cid::new(slot, 1), 1, 0);
        self.commands.push(grant.to_words()).unwrap();
        self.commands.publish();
    }

    /// Images of the connections that the NIC has made since this was asked last.
    fn made(&mut self) -> Vec<Image> {
        let mut made = Vec::new();
        for _ in 0..20 {
            self.worker.poll(self.now);
            while let Some(words) = self.events.pop() {
                let message = Message::from_words(words).expect("a valid message");
                if (message.operation, message.kind) == (Operation::OsControl, Control::Made as u16) {
                    let mut bytes = [0u8; MAX_ENCODED];
                    self.nic_memory.read(nic::scratch(message.cid.slot()) + scratch::IMAGE, &mut bytes).unwrap();
                    made.push(Image::decode(&bytes).expect("an image"));
                }
            }
            self.events.release();
        }
        made
    }

    /// A client's segment waits on the wire.
    fn arrive(&mut self, client: u16, header: &Header<'_>) {
        self.arrive_with(client, header, 0);
    }

    /// The same with so many bytes of data.
    fn arrive_with(&mut self, client: u16, header: &Header<'_>, data: usize) {
        let template = Template::new(&flow(client).reversed(), &Link { ttl: 64, ..Link::default() }, false);
        self.frame.set_length(MAX_HEADER + data);
        let length = template.emit(header, data, self.frame.bytes_mut());
        self.frame.set_length(length + data);
        self.frame.checksum = Checksum::Verified;
        assert!(self.far.transmit(&mut self.frame));
    }

    /// A client's segment arrives. Returns the NIC's answers, and whether the kernel got the segment.
    fn inject(&mut self, client: u16, header: &Header<'_>) -> (Vec<TcpFrame>, bool) {
        self.arrive(client, header);
        self.worker.poll(self.now);
        let mut answers = Vec::new();
        while self.far.receive(&mut self.frame) {
            answers.push(TcpFrame::parse(self.frame.bytes(), 0).expect("TCP"));
        }
        (answers, self.kernel.receive(&mut self.frame))
    }

    /// A SYN with these options, and its answer.
    fn open(&mut self, client: u16, options: &TcpOptions) -> TcpFrame {
        let (answers, passed) = self.inject(client, &header(CLIENT_ISN, 0, Flags::SYN, options));
        assert!(!passed && answers.len() == 1, "{answers:?}");
        assert_eq!((answers[0].flags, answers[0].ack), (Flags::SYN | Flags::ACK, CLIENT_ISN + 1));
        answers[0]
    }
}

fn header(seq: u32, ack: u32, flags: Flags, options: &TcpOptions) -> Header<'_> {
    Header { seq, ack, flags, window: 500, options, ecn: 0, ident: 0 }
}

/// Anybody can send a segment that acknowledges anything. The kernel, whose socket listens, answers it with a RST (RFC
/// 9293 section 3.10.7.4), or it belongs to a connection that the kernel has; the handshake goes on.
#[test]
fn a_blind_acknowledgement_does_not_end_a_handshake() {
    let mut bed = Bed::new();
    let none = TcpOptions::default();
    let isn = bed.open(4000, &none).seq;
    for ack in [0, 1, isn, isn.wrapping_add(2), isn.wrapping_sub(70_000), isn ^ 1 << 31] {
        for flags in [Flags::ACK, Flags::ACK | Flags::PSH, Flags::ACK | Flags::FIN, Flags::ACK | Flags::RST] {
            let (answers, passed) = bed.inject(4000, &header(CLIENT_ISN + 1, ack, flags, &none));
            assert!(answers.is_empty() && passed, "{flags:?} {ack}: {answers:?}");
        }
    }
    assert_eq!(bed.made(), []);
    let (answers, passed) = bed.inject(4000, &header(CLIENT_ISN + 1, isn.wrapping_add(1), Flags::ACK, &none));
    assert!(answers.is_empty() && !passed);
    assert_eq!(bed.made().len(), 1, "the client's own acknowledgement still makes the connection");
}

/// RFC 9293 section 3.10.7.4: a segment outside of the window is answered with an acknowledgement, in SYN-RECEIVED as
/// well.
#[test]
fn a_segment_outside_of_the_window_is_answered_during_the_handshake() {
    let mut bed = Bed::new();
    let none = TcpOptions::default();
    let isn = bed.open(4000, &none).seq;
    let far_away = header(CLIENT_ISN + (1 << 20), isn.wrapping_add(1), Flags::ACK, &none);
    let (answers, passed) = bed.inject(4000, &far_away);
    assert!(!passed);
    let [answer] = answers[..] else { panic!("{answers:?}") };
    assert_eq!((answer.flags, answer.seq, answer.ack), (Flags::ACK, isn.wrapping_add(1), CLIENT_ISN + 1));
    assert_eq!(bed.inject(4000, &far_away).0.len(), 0, "not too often");
    bed.inject(4000, &header(CLIENT_ISN + 1, isn.wrapping_add(1), Flags::ACK, &none));
    assert_eq!(bed.made().len(), 1);
}

/// A client that an earlier NIC has answered has sent several segments by the time the next one starts. Only the first
/// shows that it belongs to a handshake, and makes the connection if there is a slot. So slots that were granted before
/// the start count from the first frame on: the kernel would reset the client for the other segments.
#[test]
fn slots_that_were_granted_before_the_start_count_from_the_first_frame_on() {
    let none = TcpOptions::default();
    let isn = Bed::new().open(4000, &none).seq;
    for beside in [false, true] {
        let mut next = Bed::before_start(true, beside);
        for behind in [0, 1448, 2896] {
            next.arrive(4000, &header(CLIENT_ISN + 1 + behind, isn.wrapping_add(1), Flags::ACK, &none));
        }
        next.worker.start(next.now);
        assert_eq!(next.made().len(), 1);
        assert!(!next.kernel.receive(&mut next.frame), "the kernel gets none of them");
    }
}

/// A client that an earlier NIC has answered continues while the accept queue is full: the kernel, which would reset
/// it, gets none of its segments, and the first free slot makes its connection. Meanwhile acknowledgements of a
/// connection of the kernel's with the same addresses and ports go to the kernel.
#[test]
fn a_client_of_an_earlier_nic_waits_until_the_queue_has_room() {
    let none = TcpOptions::default();
    let acknowledged = Bed::new().open(4000, &none).seq.wrapping_add(1);
    let mut next = Bed::with_slots(true, false, 0);
    next.worker.start(next.now);
    for behind in [0, 1448, 2896, 0] {
        let (answers, passed) = next.inject(4000, &header(CLIENT_ISN + 1 + behind, acknowledged, Flags::ACK, &none));
        assert!(answers.is_empty() && !passed, "{behind}: {answers:?}");
    }
    let others = header(CLIENT_ISN + 1 + 1448, acknowledged.wrapping_add(700), Flags::ACK, &none);
    assert!(next.inject(4000, &others).1);
    next.now = Instant(next.now.0 + 100_000);
    next.grant(0);
    assert_eq!(next.made(), [], "the client has to send something");
    let (answers, passed) = next.inject(4000, &header(CLIENT_ISN + 1, acknowledged, Flags::ACK, &none));
    assert!(answers.is_empty() && !passed);
    let made = next.made();
    let [image] = made[..] else { panic!("{} were made", made.len()) };
    assert_eq!((image.rcv_nxt, image.snd_nxt), (CLIENT_ISN + 1, acknowledged));
    assert_eq!(image.srtt, 0, "when it was answered is not known");
}

/// Clients send to a server that accepts no connection: for each the NIC holds the bytes that the window allows, and
/// nothing beyond that.
#[test]
fn a_client_that_nobody_accepts_fills_no_memory() {
    const MSS: usize = 1448;
    let mut bed = Bed::new();
    let none = TcpOptions::default();
    let acknowledged = bed.open(4000, &none).seq.wrapping_add(1);
    bed.inject(4000, &header(CLIENT_ISN + 1, acknowledged, Flags::ACK, &none));
    assert_eq!(bed.made().len(), 1);
    let dropped = |bed: &Bed| {
        let counters = bed.nic_memory.words(nic::counters(0), Counter::Dropped as usize + 1);
        counters[Counter::Dropped as usize].load(Ordering::Relaxed)
    };
    for at in (0..1 << 16).step_by(MSS) {
        bed.arrive_with(4000, &header(CLIENT_ISN + 1 + at, acknowledged, Flags::ACK, &none), MSS);
        bed.worker.poll(bed.now);
    }
    assert_eq!(dropped(&bed), 0, "a window");
    for _ in 0..2000 {
        let (answers, passed) = bed.inject(4000, &header(CLIENT_ISN + 1, acknowledged, Flags::ACK, &none));
        assert!(answers.is_empty() && !passed);
    }
    assert!(dropped(&bed) > 1000, "{} of 2000 were dropped", dropped(&bed));
}

/// A connection has exactly the options of its SYN-ACK, whatever the client's acknowledgement asks for; also if the
/// SYN-ACK was not remembered (RFC 4987 section 3.6).
#[test]
fn a_connection_has_what_its_syn_ack_said() {
    for flooded in [false, true] {
        let mut bed = Bed::new();
        for client in 0..if flooded { REMEMBERED } else { 0 } {
            bed.open(10_000 + client, &TcpOptions::default());
        }
        for bits in 0..3 * 2 * 2 * 2u16 {
            let (scale, sack, timestamps, mss) = (bits % 3, bits / 3 % 2 == 1, bits / 6 % 2 == 1, bits / 12 == 1);
            let options = TcpOptions {
                mss: mss.then_some(1460),
                window_scale: [None, Some(0), Some(9)][usize::from(scale)],
                sack_permitted: sack,
                timestamps: timestamps.then_some((77, 0)),
                ..TcpOptions::default()
            };
            let client = 4000 + bits;
            let said = bed.open(client, &options);
            let restorable = timestamps || !flooded;
            assert_eq!(said.options.sack_permitted, sack && restorable, "{options:?}, flooded {flooded}");
            assert_eq!(said.options.window_scale.is_some(), scale > 0 && restorable, "{options:?}, flooded {flooded}");
            assert_eq!(said.options.timestamps.is_some(), timestamps);
            let echo = said.options.timestamps.map(|(clock, _)| (78, clock));
            let options = TcpOptions { timestamps: echo, ..TcpOptions::default() };
            let last = header(CLIENT_ISN + 1, said.seq.wrapping_add(1), Flags::ACK, &options);
            assert_eq!(bed.inject(client, &last).1, false);
            let made = bed.made();
            let [image] = made[..] else { panic!("{} were made, {options:?}, flooded {flooded}", made.len()) };
            let scales = said.options.window_scale.is_some();
            assert_eq!((image.sack, image.timestamps), (said.options.sack_permitted, timestamps));
            assert_eq!(image.snd_wscale, if scales && scale == 2 { 9 } else { 0 }, "{options:?}, flooded {flooded}");
            assert_eq!(image.rcv_wscale, said.options.window_scale.unwrap_or(0), "{options:?}, flooded {flooded}");
        }
    }
}
