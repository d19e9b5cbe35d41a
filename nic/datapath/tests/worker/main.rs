//! Workers on memory wires. Here: one with a hostile program and hostile frames, where nothing panics, and another
//! session's connection goes on without a wrong byte; also ICMP.

/// A property of several workers: with a card that distributes frames, and with one queue for all.
macro_rules! with_both_cards {
    ($property:ident) => {
        proptest! {
            #![proptest_config(crate::drawn::cases(12))]

            #[test]
            fn with_a_card_that_distributes(workers in 2usize..6, seed in any::<u64>()) {
                $property(workers, true, seed);
            }

            #[test]
            fn with_one_queue_for_all(workers in 2usize..6, seed in any::<u64>()) {
                $property(workers, false, seed);
            }
        }
    };
}

mod addresses;
mod ahead;
mod apart;
mod bounds;
mod counted;
mod crossbar;
mod datagrams;
mod doorbells;
mod dormant;
mod drawn;
mod endpoints;
mod forged;
mod forwarded;
mod gated;
mod handshakes;
mod links;
mod merging;
mod openings;
mod other_traffic;
mod partial;
mod peer_fins;
mod posts;
mod predicted;
mod stage;

use baton_abi::layout::{nic, scratch, session, slot};
use baton_abi::{Cid, Control, ENDED, HOLD, MORE, Message, Operation, RestoreCause};
use baton_datapath::WorkerSettings;
use baton_device::{Checksum, Device};
use baton_image::{Image, MAX_ENCODED, NicState};
use baton_tcp::Instant;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Flags, TcpFrame, TcpOptions};
use proptest::prelude::*;
use stage::{BUFFER, Stage, flow};
use std::sync::atomic::Ordering;

/// An attacker's action in one round.
#[derive(Clone, Debug)]
enum Attack {
    /// Pushes any words to its own ring.
    Words(u64, u64),
    /// Pushes a well-formed message with any fields, for any connection.
    Message { operation: u8, kind: u16, cid: u32, address: u32, length: u32 },
    /// Overwrites a word of its session memory: indices, sleep flags, blocks, heap.
    Scribble { at: u32, value: u64 },
    /// A frame of any bytes from the wire or the kernel, perhaps with a plausible beginning.
    Frame { plausible: bool, from_kernel: bool, bytes: Vec<u8> },
    /// A valid frame of its own connection with one byte changed.
    Damaged { at: usize, value: u8, seq: u32, length: usize, flags: u8 },
    /// Lets time pass, in microseconds.
    Pause(u32),
    /// The agent restores its connection, for which all commands in its ring are run first.
    Leave,
}

fn attacks() -> impl Strategy<Value = Attack> {
    let numbers =
        prop_oneof![Just(0u32), Just(1), Just(u32::MAX), Just(1 << 20), Just((1 << 20) | 1), any::<u32>(), 0..1u32 << 22];
    prop_oneof![
        (any::<u64>(), any::<u64>()).prop_map(|(a, b)| Attack::Words(a, b)),
        (0u8..25, 0u16..40, numbers.clone(), numbers.clone(), numbers)
            .prop_map(|(operation, kind, cid, address, length)| Attack::Message { operation, kind, cid, address, length }),
        (0..(session::HEAP as u32 + 4 * BUFFER) / 8, any::<u64>()).prop_map(|(at, value)| Attack::Scribble { at: at * 8, value }),
        (any::<bool>(), any::<bool>(), proptest::collection::vec(any::<u8>(), 0..200))
            .prop_map(|(plausible, from_kernel, bytes)| Attack::Frame { plausible, from_kernel, bytes }),
        (0usize..120, any::<u8>(), 0u32..70_000, 0usize..1400, any::<u8>())
            .prop_map(|(at, value, seq, length, flags)| Attack::Damaged { at, value, seq, length, flags }),
        (0u32..2_000_000).prop_map(Attack::Pause),
        Just(Attack::Leave),
    ]
}

impl Stage {
    fn attack(&mut self, attack: &Attack) {
        match attack {
            Attack::Words(first, second) => {
                let _ = self.programs[1].commands.push([*first, *second]);
                self.programs[1].commands.publish();
            }
            Attack::Message { operation, kind, cid, address, length } => {
                let first = u64::from(*operation) | u64::from(*kind) << 16 | u64::from(*cid) << 32;
                let _ = self.programs[1].commands.push([first, u64::from(*address) | u64::from(*length) << 32]);
                self.programs[1].commands.publish();
            }
            Attack::Scribble { at, value } => {
                self.programs[1].memory.words(*at as usize, 1)[0].store(*value, Ordering::Relaxed);
            }
            Attack::Frame { plausible, from_kernel, bytes } => {
                let mut all = bytes.clone();
                if *plausible && all.len() > 40 {
                    all[12..15].copy_from_slice(&[8, 0, 0x45]);
                    all[23] = 6;
                }
                self.frame.fill(&all);
                let device = if *from_kernel { &mut self.kernel } else { &mut self.far };
                device.transmit(&mut self.frame);
            }
            Attack::Damaged { at, value, seq, length, flags } => {
                let template = Template::new(&flow(1).reversed(), &Link { ttl: 64, ..Link::default() }, true);
                let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
                let header = Header { seq: *seq, ack: 1, flags: Flags(*flags), window: 512, options: &options, ecn: 0, ident: 0 };
                self.frame.set_length(MAX_HEADER + length);
                let headers = template.emit(&header, *length, self.frame.bytes_mut());
                self.frame.set_length(headers + length);
                // Addresses and ports stay, so that the frame cannot be one of the victim's.
                if !(26..38).contains(at) && *at < headers + length {
                    self.frame.bytes_mut()[*at] = *value;
                }
                self.frame.checksum = Checksum::Verified;
                self.far.transmit(&mut self.frame);
            }
            Attack::Pause(micros) => self.now = self.now.after(u64::from(*micros)),
            Attack::Leave => self.command(Message::new(Operation::NicRestore, Cid::new(1, 1), 0, 0)),
        }
    }
}

proptest! {
    #![proptest_config(crate::drawn::cases(300))]

    #[test]
    fn an_attacker_harms_itself_only(attacks in proptest::collection::vec(attacks(), 1..60), many in 1u64..4) {
        let mut stage = Stage::with(true, many);
        for (round, attack) in attacks.iter().enumerate() {
            stage.attack(attack);
            if round % 4 == 0 {
                stage.victim_goes_on(1 + round * 37 % 1400);
            }
        }
        stage.victim_goes_on(1000);
        // The attacker's session ends, and leaves nothing behind.
        stage.command(Message::control(Operation::NicControl, Control::Cancel, Cid::new(1, 1), 0, 0));
        stage.command(Message::control(Operation::NicControl, Control::Detach, Cid(0), 1, 0));
        stage.victim_goes_on(1000);
    }
}

/// A command ring whose head is further ahead than the ring is long is not read any more; the agent is notified, and
/// can restore the connection.
#[test]
fn a_corrupt_ring_is_not_read_any_more() {
    for index in [1 << 40, 4097, u64::MAX] {
        let mut stage = Stage::new();
        stage.programs[1].memory.words(session::COMMANDS, 1)[0].store(index, Ordering::SeqCst);
        stage.worker.poll(stage.now);
        let events = std::iter::from_fn(|| stage.events.pop()).filter_map(Message::from_words);
        let cut = Message::control(Operation::OsControl, Control::Detach, Cid(0), 1, 0);
        assert_eq!(events.collect::<Vec<_>>(), [cut], "{index}");
        stage.events.release();
        assert!(!stage.worker.poll(stage.now), "it has no more work");
        stage.victim_goes_on(500);
        stage.worker.poll(stage.now);
        // What follows in the ring is not run, valid or not.
        stage.programs[1].memory.words(session::COMMANDS, 1)[0].store(1, Ordering::SeqCst);
        assert!(!stage.worker.poll(stage.now));
        stage.agent.push(Message::new(Operation::NicRestore, Cid::new(1, 1), 0, 0).to_words()).unwrap();
        stage.agent.publish();
        stage.worker.poll(stage.now);
        let done = std::iter::from_fn(|| stage.events.pop()).filter_map(Message::from_words).next().map(|answer| answer.kind);
        assert_eq!(done, Some(Control::Done as u16), "its connection can be restored");
    }
}

/// What one NIC had in flight, and what of it was SACKed, the next one knows: it sends again what the peer lacks, and
/// nothing else. An image whose segments in flight are not its own is refused.
#[test]
fn what_is_in_flight_moves_from_nic_to_nic() {
    let (cid, base, flow) = (Cid::new(2, 1), nic::slot(2), flow(2));
    let heap = session::HEAP as u32 + 2 * BUFFER;
    let take_up = |stage: &mut Stage, image: &[u8]| {
        for (word, value) in [1, heap, BUFFER, heap + BUFFER, BUFFER].into_iter().enumerate() {
            stage.nic_memory.word32(base + slot::PARAMETERS + 4 * word).store(value, Ordering::Relaxed);
        }
        stage.nic_memory.write(base + slot::FLOW, &flow.to_bytes()).unwrap();
        stage.nic_memory.write(nic::scratch(2) + scratch::IMAGE, image).unwrap();
        for control in [Control::Mirror, Control::Steal] {
            stage.command(Message::control(Operation::NicControl, control, cid, 0, 0));
        }
        stage.agent.push(Message::new(Operation::NicHandoff, cid, 0, 0).to_words()).unwrap();
        stage.agent.publish();
        stage.worker.poll(stage.now);
        let answers: Vec<Message> = std::iter::from_fn(|| stage.events.pop()).filter_map(Message::from_words).collect();
        stage.events.release();
        answers.iter().any(|answer| answer.kind == Control::Done as u16)
    };
    let sent = |stage: &mut Stage| {
        let mut sent = Vec::new();
        while stage.far.receive(&mut stage.frame) {
            let parsed = TcpFrame::parse(stage.frame.bytes(), 0).unwrap();
            sent.push((parsed.seq, parsed.payload_length));
        }
        sent
    };
    let sacks = |stage: &mut Stage, left: u32, right: u32| {
        let template = Template::new(&flow.reversed(), &Link { ttl: 64, ..Link::default() }, true);
        let mut options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
        options.sack.push(left, right);
        let header = Header { seq: 1, ack: 1, flags: Flags::ACK, window: 512, options: &options, ecn: 0, ident: 0 };
        stage.frame.set_length(MAX_HEADER);
        let headers = template.emit(&header, 0, stage.frame.bytes_mut());
        stage.frame.set_length(headers);
        stage.frame.checksum = Checksum::Verified;
        stage.far.transmit(&mut stage.frame);
        stage.now = stage.now.after(1000);
        stage.worker.poll(stage.now);
    };
    let mut bytes = [0u8; MAX_ENCODED];
    Image::open(flow).encode(&mut bytes).unwrap();
    let mut first = Stage::new();
    assert!(take_up(&mut first, &bytes));
    first.programs[1].commands.push(Message::new(Operation::NicSend, cid, heap + BUFFER + 1, 7240).to_words()).unwrap();
    first.programs[1].commands.publish();
    first.worker.poll(first.now);
    assert_eq!(sent(&mut first).iter().map(|(_, length)| length).sum::<usize>(), 7240);
    sacks(&mut first, 1449, 2897);
    first.command(Message::new(Operation::NicRestore, cid, 0, 0));
    first.nic_memory.read(nic::scratch(2) + scratch::IMAGE, &mut bytes).unwrap();

    let mut next = Stage::new();
    assert!(take_up(&mut next, &bytes));
    assert_eq!(sent(&mut next), [], "nothing is due");
    // Three segments behind the first have arrived: it is lost (RFC 8985 section 6.2), the second is not.
    sacks(&mut next, 2897, 5793);
    assert_eq!(sent(&mut next), [(1, 1448)]);

    let (image, state) = Image::decode_with(&bytes).unwrap();
    let other = NicState { flight: Default::default(), ..state.expect("the NIC's part") };
    image.encode_with(Some(&other), &mut bytes).unwrap();
    assert!(!take_up(&mut Stage::new(), &bytes));
}

/// Has the program send these messages, and returns the payload lengths of the frames that leave at once.
fn frames(stage: &mut Stage, messages: &[Message]) -> Vec<usize> {
    for message in messages {
        stage.programs[0].commands.push(message.to_words()).unwrap();
    }
    stage.programs[0].commands.publish();
    stage.worker.poll(stage.now);
    let mut lengths = Vec::new();
    while stage.far.receive(&mut stage.frame) {
        lengths.push(TcpFrame::parse(stage.frame.bytes(), 0).unwrap().payload_length);
    }
    lengths
}

/// What a program sends at once in two messages leaves in one segment, although Nagle's algorithm would hold back the
/// second.
#[test]
fn two_pieces_of_one_send_leave_together() {
    let mut stage = Stage::new();
    let cid = Cid::new(0, 1);
    let heap = session::HEAP as u32 + BUFFER;
    let send = |at: u32, length: u32| Message::new(Operation::NicSend, cid, heap + 1 + at, length);
    assert!(frames(&mut stage, &[Message::control(Operation::NicControl, Control::NoDelay, cid, 0, 0)]).is_empty());
    assert_eq!(frames(&mut stage, &[Message { kind: MORE, ..send(0, 500) }, send(500, 300)]), [800]);
    assert_eq!(frames(&mut stage, &[send(800, 10)]), [0usize; 0], "a small segment is unacknowledged");
}

/// Of what comes with MSG_MORE full segments leave. The rest leaves with what the program sends next, or after 200 ms.
#[test]
fn what_is_held_waits_for_more() {
    let cid = Cid::new(0, 1);
    let heap = session::HEAP as u32 + BUFFER;
    let send = |at: u32, length: u32| Message::new(Operation::NicSend, cid, heap + 1 + at, length);
    let held = |at: u32, length: u32| Message { kind: HOLD, ..send(at, length) };
    let mut stage = Stage::new();
    assert_eq!(frames(&mut stage, &[held(0, 500)]), [0usize; 0]);
    assert_eq!(frames(&mut stage, &[send(500, 300)]), [800], "with what comes next");
    let mut stage = Stage::new();
    assert_eq!(frames(&mut stage, &[held(0, 500), held(500, 600), send(1100, 10)]), [1110]);
    let mut stage = Stage::new();
    assert_eq!(frames(&mut stage, &[held(0, 2000)]), [1448], "what is full");
    assert_eq!(frames(&mut stage, &[send(2000, 10)]), [562]);
    let mut stage = Stage::new();
    assert_eq!(frames(&mut stage, &[send(0, 100), held(100, 100)]), [100], "what came before does not wait");
    let mut stage = Stage::new();
    assert_eq!(frames(&mut stage, &[held(0, 500)]), [0usize; 0]);
    for millis in [100, 199, 205] {
        let start = stage.now;
        stage.now = start.after(millis * 1000);
        let waits = frames(&mut stage, &[]);
        stage.now = start;
        assert_eq!(waits, if millis < 200 { vec![] } else { vec![500] }, "after {millis} ms");
    }
}

/// "Fragmentation needed" for a segment in flight: it is cut and sent again. One for what was never sent, or with a
/// wrong checksum, changes nothing.
#[test]
fn the_path_mtu_follows_icmp() {
    let mut stage = Stage::new();
    let cid = Cid::new(0, 1);
    let heap = session::HEAP as u32 + BUFFER;
    // Full-sized segments leave.
    let victim = &mut stage.programs[0];
    victim.commands.push(Message::new(Operation::NicSend, cid, heap + 1, 4000).to_words()).unwrap();
    victim.commands.publish();
    stage.worker.poll(stage.now);
    let mut sent = Vec::new();
    while stage.far.receive(&mut stage.frame) {
        sent.push(stage.frame.bytes().to_vec());
    }
    assert_eq!(
        sent.iter().map(|frame| TcpFrame::parse(frame, 0).unwrap().payload_length).collect::<Vec<_>>(),
        [1448, 1448, 1104]
    );
    let icmp = |inner: &[u8], mtu: u16, damage: u8| {
        let mut message = vec![3, 4, 0, 0, 0, 0, (mtu >> 8) as u8, mtu as u8];
        message.extend_from_slice(&inner[14..14 + 28]);
        let sum = baton_wire::checksum::Sum::new().bytes(&message).finish();
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        message[3] ^= damage;
        let mut frame = vec![0; 14];
        frame[12] = 8;
        let total = (20 + message.len()) as u16;
        frame.extend_from_slice(&[0x45, 0, (total >> 8) as u8, total as u8, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 9, 10, 0, 0, 1]);
        frame.extend_from_slice(&message);
        frame
    };
    let mut never_sent = sent[0].clone();
    never_sent[38] ^= 0x40;
    // Lengths of what it makes the worker send, and whether that may not be fragmented (DF).
    let lengths = |stage: &mut Stage, frame: &[u8]| {
        stage.frame.fill(frame);
        stage.far.transmit(&mut stage.frame);
        stage.worker.poll(stage.now);
        let mut lengths = Vec::new();
        while stage.far.receive(&mut stage.frame) {
            let length = TcpFrame::parse(stage.frame.bytes(), 0).unwrap().payload_length;
            lengths.push((length, stage.frame.bytes()[14 + 6] & 0x40 != 0));
        }
        lengths
    };
    assert!(lengths(&mut stage, &icmp(&sent[0], 600, 1)).is_empty());
    assert!(lengths(&mut stage, &icmp(&never_sent, 600, 0)).is_empty());
    let again = lengths(&mut stage, &icmp(&sent[0], 600, 0));
    // 20 bytes of IP, 20 of TCP, 12 of timestamps.
    assert!(!again.is_empty() && again.iter().all(|(length, whole)| (1..=548).contains(length) && *whole), "{again:?}");
    // No path has so little: segments stay as long as the smallest, and routers may fragment them.
    let fragmented = lengths(&mut stage, &icmp(&sent[0], 0, 0));
    let may_be = |(length, whole): &(usize, bool)| (1..=500).contains(length) && !whole;
    assert!(!fragmented.is_empty() && fragmented.iter().all(may_be), "{fragmented:?}");
}

/// The kernel has learned the path MTU by another connection's segment, and the agent sends it: the smallest means here
/// as well that routers may fragment segments, until the path has more again.
#[test]
fn the_path_mtu_follows_the_agent() {
    let mut stage = Stage::new();
    let cid = Cid::new(0, 1);
    let mut place = session::HEAP as u32 + BUFFER + 1;
    let mut sent = |stage: &mut Stage, mtu: u32| {
        stage.command(Message::control(Operation::NicControl, Control::Mtu, cid, mtu, 0));
        stage.programs[0].commands.push(Message::new(Operation::NicSend, cid, place, 600).to_words()).unwrap();
        stage.programs[0].commands.publish();
        place += 600;
        stage.worker.poll(stage.now);
        let mut frames = Vec::new();
        while stage.far.receive(&mut stage.frame) {
            let bytes = stage.frame.bytes();
            let sum = baton_wire::checksum::Sum::new().bytes(&bytes[14..34]).finish();
            frames.push((TcpFrame::parse(bytes, 0).unwrap().payload_length, bytes[14 + 6] & 0x40 != 0, sum));
        }
        assert!(!frames.is_empty(), "{mtu}");
        frames
    };
    assert!(sent(&mut stage, 600).iter().all(|(length, whole, sum)| *length <= 548 && *whole && *sum == 0));
    assert!(sent(&mut stage, 552).iter().all(|(length, whole, sum)| *length <= 500 && !*whole && *sum == 0));
    assert!(sent(&mut stage, 1500).iter().all(|(_, whole, sum)| *whole && *sum == 0));
}

/// What is queued at once leaves as a run of segments: of the full size but for the last one, which alone has PSH, with
/// the bytes in their order, also around pieces of send memory.
#[test]
fn a_run_of_segments_is_cut() {
    let mut stage = Stage::new();
    let cid = Cid::new(0, 1);
    let heap = session::HEAP as u32 + BUFFER;
    let bytes: Vec<u8> = (0..4 * 1448 + 100u32).map(|at| (at % 251) as u8).collect();
    let (first, second) = bytes.split_at(2000);
    let pieces = [(heap + 1, first), (heap + 30_000, second)];
    stage.programs[0].commands.push(Message::control(Operation::NicControl, Control::NoDelay, cid, 1, 0).to_words()).unwrap();
    for (nth, (at, piece)) in pieces.into_iter().enumerate() {
        stage.programs[0].memory.write(at as usize, piece).unwrap();
        let message = Message::new(Operation::NicSend, cid, at, piece.len() as u32);
        let message = Message { kind: if nth == 0 { MORE } else { 0 }, ..message };
        stage.programs[0].commands.push(message.to_words()).unwrap();
    }
    stage.programs[0].commands.publish();
    stage.worker.poll(stage.now);
    let (mut lengths, mut pushed, mut received) = (Vec::new(), Vec::new(), Vec::new());
    while stage.far.receive(&mut stage.frame) {
        let parsed = TcpFrame::parse(stage.frame.bytes(), 0).unwrap();
        assert_eq!(parsed.seq, 1 + received.len() as u32);
        assert_eq!(parsed.ack, 1);
        assert!(stage.frame.segmentation.is_none());
        lengths.push(parsed.payload_length);
        pushed.push(parsed.flags.contains(Flags::PSH));
        received.extend_from_slice(parsed.payload(stage.frame.bytes()));
    }
    assert_eq!(lengths, [1448, 1448, 1448, 1448, 100]);
    assert_eq!(pushed, [false, false, false, false, true]);
    assert_eq!(received, bytes);
}

/// A segment that announces urgent data is held, the agent is asked once to restore the connection, and the kernel gets
/// the segment. An old one, and one beyond the window, are answered as usual.
#[test]
fn urgent_data_goes_to_the_kernel() {
    let mut stage = Stage::new();
    let cid = Cid::new(0, 1);
    let send = |stage: &mut Stage, seq: u32, flags: Flags| {
        let template = Template::new(&flow(0).reversed(), &Link { ttl: 64, ..Link::default() }, true);
        let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
        let header = Header { seq, ack: 1, flags, window: 512, options: &options, ecn: 0, ident: 0 };
        stage.frame.set_length(MAX_HEADER + 10);
        let headers = template.emit(&header, 10, stage.frame.bytes_mut());
        stage.frame.set_length(headers + 10);
        stage.frame.checksum = Checksum::Verified;
        stage.far.transmit(&mut stage.frame);
        stage.worker.poll(stage.now);
        let mut asked = Vec::new();
        while let Some(words) = stage.events.pop() {
            let message = Message::from_words(words).unwrap();
            asked.push((message.operation, message.cid, message.address));
        }
        stage.events.release();
        asked
    };
    stage.victim_goes_on(100);
    let urgent = Flags::ACK | Flags::URG;
    assert_eq!(send(&mut stage, 50, urgent), []);
    let (first, second, beyond) = (stage.seq, stage.seq + 10, stage.seq.wrapping_add(2 * BUFFER));
    assert_eq!(send(&mut stage, beyond, urgent), []);
    assert_eq!(send(&mut stage, first, urgent), [(Operation::OsRestore, cid, RestoreCause::Urgent as u32)]);
    assert_eq!(send(&mut stage, second, urgent), []);
    assert_eq!(send(&mut stage, second + 10, Flags::ACK), [], "what follows is held out of order");
    let victim = &mut stage.programs[0];
    assert!(victim.events.pop().is_none(), "its program got an event");
    victim.events.release();
    stage.command(Message::new(Operation::NicRestore, cid, 0, 0));
    stage.command(Message::control(Operation::NicControl, Control::Release, cid, 0, 0));
    let mut at_kernel = Vec::new();
    while stage.kernel.receive(&mut stage.frame) {
        let parsed = TcpFrame::parse(stage.frame.bytes(), 0).unwrap();
        if parsed.payload_length > 0 {
            at_kernel.push((parsed.seq, parsed.flags.contains(Flags::URG)));
        }
    }
    assert_eq!(at_kernel, [(second + 10, false), (first, true), (second, true)]);
}

/// An agent that is slow to read loses no message, whenever its ring is full.
#[test]
fn a_slow_agent_loses_no_message() {
    let mut stage = Stage::new();
    let absurd = Message::new(Operation::NicRestore, Cid::new(3, 7), 0, 0);
    for _ in 0..4096 {
        stage.agent.push(absurd.to_words()).unwrap();
    }
    stage.agent.publish();
    // Two messages for each command: the answer, and the free room.
    stage.worker.poll(stage.now);
    let template = Template::new(&flow(0).reversed(), &Link { ttl: 64, ..Link::default() }, true);
    let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
    let flags = Flags::RST | Flags::ACK;
    let header = Header { seq: stage.seq, ack: 1, flags, window: 512, options: &options, ecn: 0, ident: 0 };
    for _ in 0..3 {
        stage.frame.set_length(MAX_HEADER);
        let headers = template.emit(&header, 0, stage.frame.bytes_mut());
        stage.frame.set_length(headers);
        stage.frame.checksum = Checksum::Verified;
        stage.far.transmit(&mut stage.frame);
        stage.worker.poll(stage.now);
    }
    assert!(!stage.worker.prepare_sleep(), "it sleeps with messages waiting");
    let (mut answers, mut returns) = (0, 0);
    for _ in 0..4 {
        while let Some(message) = stage.events.pop().and_then(Message::from_words) {
            answers += usize::from(message.operation == Operation::OsControl);
            returns += usize::from((message.operation, message.cid) == (Operation::OsRestore, Cid::new(0, 1)));
        }
        stage.events.release();
        stage.worker.poll(stage.now);
    }
    assert_eq!((answers, returns), (4096, 1));
}

/// A connection has ended whose program does not read its events: its end is reported only after the last of them, but
/// an agent that restores it learns that it has ended.
#[test]
fn an_end_that_cannot_be_reported_is_why_a_restore_is_refused() {
    let (mut stage, cid) = (Stage::new(), Cid::new(0, 1));
    // More segments than the program's ring has room for, each in a round of its own.
    for _ in 0..5000 {
        stage.send_to_victim(stage.seq, &[7]);
        stage.seq += 1;
        stage.worker.poll(stage.now);
        while stage.far.receive(&mut stage.frame) {}
    }
    stage.send_bare(stage.seq, Flags::FIN | Flags::ACK);
    // Not by both sides' ends, after which the kernel gets it.
    let commands = &mut stage.programs[0].commands;
    commands.push(Message::control(Operation::NicControl, Control::Abort, cid, 0, 0).to_words()).unwrap();
    commands.publish();
    stage.worker.poll(stage.now);
    let said = |stage: &mut Stage| {
        stage.worker.poll(stage.now);
        let all: Vec<_> = std::iter::from_fn(|| stage.events.pop()).filter_map(Message::from_words).collect();
        stage.events.release();
        let about = all.iter().filter(|message| message.operation == Operation::OsControl);
        about.map(|message| (message.cid, Control::from_number(message.kind), message.address)).collect::<Vec<_>>()
    };
    assert_eq!(said(&mut stage), [], "its program's ring is full");
    stage.agent.push(Message::new(Operation::NicRestore, cid, 0, 0).to_words()).unwrap();
    stage.agent.publish();
    assert_eq!(said(&mut stage), [(cid, Some(Control::Refused), ENDED)]);
    while stage.programs[0].events.pop().is_some() {}
    stage.programs[0].events.release();
    assert_eq!(said(&mut stage), [(cid, Some(Control::Closed), 0)]);
}

/// As Linux does for an aggregate: one acknowledgement of the last byte, not one for every second segment.
#[test]
fn segments_of_one_batch_are_acknowledged_together() {
    const LENGTH: usize = 1448;
    let mut stage = Stage::with(false, 1);
    let mut seq = stage.seq;
    for batch in [4, 20] {
        for _ in 0..batch {
            stage.send_to_victim(seq, &[7; LENGTH]);
            seq = seq.wrapping_add(LENGTH as u32);
        }
        stage.now = stage.now.after(10);
        stage.worker.poll(stage.now);
        let mut acknowledged = Vec::new();
        while stage.far.receive(&mut stage.frame) {
            acknowledged.push(TcpFrame::parse(stage.frame.bytes(), 0).unwrap().ack);
        }
        assert_eq!(acknowledged, [seq], "after {batch} segments");
    }
}

/// Of a program that has not sent for long, from the move on: by Nagle's rule its peer sends nothing until then.
#[test]
fn one_way_messages_are_acknowledged_at_once() {
    let mut stage = Stage::empty(WorkerSettings::default());
    stage.offload_as(0, &Image { sent_ago: Some(50_000), ..Image::open(flow(0)) });
    for _ in 0..100 {
        stage.now = stage.now.after(3000);
        stage.victim_goes_on(100);
    }
    assert!(stage.now < Instant(1_000_000).after(100 * 3100), "none waited");
}

/// While frames come, the other sources wait for a batch of them at most; they do not wait once there is none.
#[test]
fn other_sources_have_their_turn_after_a_batch_of_frames() {
    let mut stage = Stage::new();
    let batch = WorkerSettings::default().batch;
    stage.worker.poll(stage.now);
    for (frames, expected) in [(0, 1), (1, 2), (2 * batch, batch)] {
        let commands = &mut stage.programs[0].commands;
        commands.push(Message::control(Operation::NicControl, Control::NoDelay, Cid::new(0, 1), 1, 0).to_words()).unwrap();
        commands.publish();
        let position = commands.position();
        let mut rounds = 0;
        while !stage.programs[0].commands.is_released(position) {
            if rounds < frames {
                stage.send_to_victim(stage.seq, &[7]);
                stage.seq += 1;
            }
            stage.worker.poll(stage.now);
            rounds += 1;
        }
        assert_eq!(rounds, expected, "{frames} frames, one for each round");
    }
}

/// The segments of one batch are one message to the program, and none is lost while its ring is full.
#[test]
fn all_bytes_are_announced_to_a_program() {
    let mut stage = Stage::new();
    let announced = |stage: &mut Stage| {
        let events = &mut stage.programs[0].events;
        let messages: Vec<Message> = std::iter::from_fn(|| events.pop()).filter_map(Message::from_words).collect();
        events.release();
        assert!(messages.iter().all(|message| message.operation == Operation::OsRecv));
        messages.iter().map(|message| (message.address - session::HEAP as u32, message.length)).collect::<Vec<_>>()
    };
    stage.victim_goes_on(10);
    for _ in 0..5 {
        stage.send_to_victim(stage.seq, &[7; 100]);
        stage.seq += 100;
    }
    stage.worker.poll(stage.now);
    assert_eq!(announced(&mut stage), [(11, 500)]);
    // More segments than the ring has room for, each in a round of its own.
    for _ in 0..5000 {
        stage.send_to_victim(stage.seq, &[7]);
        stage.seq += 1;
        stage.worker.poll(stage.now);
        while stage.far.receive(&mut stage.frame) {}
    }
    let first = announced(&mut stage);
    stage.worker.poll(stage.now);
    let rest = announced(&mut stage);
    assert_eq!((first.len(), rest.len()), (baton_abi::layout::RING_MESSAGES, 1));
    let mut next = 511;
    for (at, length) in first.into_iter().chain(rest) {
        assert_eq!(at, next);
        next += length;
    }
    assert_eq!(next, 511 + 5000);
}
