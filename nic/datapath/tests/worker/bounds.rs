//! A round's work is bounded, and a program's connection can be restored, even if the program writes hostile numbers.

use crate::stage::{BUFFER, FRAME, SLOTS, Stage};
use baton_abi::layout::{Counter, RING_MESSAGES, block, datagrams as page, nic, scratch, session};
use baton_abi::{ANSWER, Cid, Control, FETCH, MORE, Message, Operation};
use baton_backends::memory_pair;
use baton_datagrams::Place;
use baton_datapath::{DatagramSettings, DatagramWay, Worker, WorkerSettings};
use baton_device::{Capabilities, Device, Frame};
use baton_image::{Image, MAX_ENCODED};
use baton_ring::{Consumer, Producer};
use baton_shm::Region;
use baton_tcp::Instant;
use baton_wire::frame::Link;
use baton_wire::{Endpoint, Flags, TcpFrame};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The attacker's connection, and the offsets of its program's words.
const CID: Cid = Cid::new(1, 1);
const SEND: u32 = session::HEAP as u32 + BUFFER;
const RINGS: Place = Place { base: session::HEAP as u32 + 2 * BUFFER, receive: 4096, send: 4096 };
const SOCKET: u32 = 3;

/// Most datagrams and segments that the messages in the attacker's ring can cause at once.
const MOST_AT_ONCE: u64 = 2 * RING_MESSAGES as u64;

impl Stage {
    fn counted(&self, counters: &[Counter]) -> u64 {
        let word = |counter: Counter| &self.nic_memory.words(nic::counters(0), counter as usize + 1)[counter as usize];
        counters.iter().map(|counter| word(*counter).load(Ordering::Relaxed)).sum()
    }

    /// A round's work for programs, from the counters.
    fn work(&self) -> u64 {
        use Counter::{BadMessages, DatagramsDropped, DatagramsReceived, DatagramsSent, HostSent, WireSent};
        use Counter::{ProgramControl, ProgramPost, ProgramRecvd, ProgramSend};
        let messages = self.counted(&[ProgramSend, ProgramRecvd, ProgramPost, ProgramControl]);
        messages + self.counted(&[BadMessages, DatagramsDropped, DatagramsReceived, DatagramsSent, HostSent, WireSent])
    }

    fn attacker_sends(&mut self, message: Message) {
        let commands = &mut self.programs[1].commands;
        let _ = commands.push(message.to_words());
        commands.publish();
        self.worker.poll(self.now);
    }

    /// Has the agent stop the attacker's connection. Returns the bytes in its send queue, or None if the NIC refuses.
    fn leave(&mut self) -> Option<u32> {
        while self.events.pop().is_some() {}
        self.events.release();
        self.agent.push(Message::new(Operation::NicRestore, CID, 0, 0).to_words()).unwrap();
        self.agent.publish();
        self.worker.poll(self.now);
        let answers: Vec<Message> = std::iter::from_fn(|| self.events.pop()).filter_map(Message::from_words).collect();
        self.events.release();
        let done = answers.iter().any(|answer| answer.cid == CID && answer.kind == Control::Done as u16);
        let mut bytes = [0u8; MAX_ENCODED];
        self.nic_memory.read(nic::scratch(1) + scratch::IMAGE, &mut bytes).unwrap();
        done.then(|| Image::decode(&bytes).expect("the image that the NIC has written").send_queue())
    }
}

#[test]
fn a_program_that_takes_back_what_it_has_queued_is_refused() {
    let mut stage = Stage::new();
    let queued = session::block(0) + block::QUEUED_SEQ;
    let fetch = Message { kind: FETCH, ..Message::new(Operation::NicSend, CID, 0, 0) };
    for (value, refused) in [(3001u32, 0), (1001, 1), (0, 2), (u32::MAX, 3), (1 << 31, 4), (1 + BUFFER, 4), (2 + BUFFER, 5)] {
        stage.programs[1].memory.word32(queued).store(value, Ordering::SeqCst);
        stage.attacker_sends(fetch);
        assert_eq!(stage.counted(&[Counter::BadMessages]), refused, "{value}");
    }
    stage.victim_goes_on(700);
    assert_eq!(stage.leave(), Some(BUFFER), "it can go back to the kernel, with what fits into send memory");
}

#[test]
fn a_program_that_sends_more_than_its_memory_holds_is_refused() {
    let mut stage = Stage::new();
    for refused in [0, 0, 1, 2] {
        stage.attacker_sends(Message::new(Operation::NicSend, CID, SEND, BUFFER / 2));
        assert_eq!(stage.counted(&[Counter::BadMessages]), refused);
    }
    stage.victim_goes_on(700);
    assert_eq!(stage.leave(), Some(BUFFER));
}

#[test]
fn keep_alive_numbers_that_linux_refuses_are_refused() {
    const ON: u32 = 1 << 31;
    let mut stage = Stage::new();
    let bad = [(0, 1, 1), (32_768, 1, 1), (1, 0, 1), (1, 32_768, 1), (1, 1, 0), (1, 1, 128), (1, 1, 300)];
    for (number, (idle, interval, count)) in (1..).zip(bad) {
        stage.attacker_sends(Message::control(Operation::NicControl, Control::KeepAlive, CID, ON | idle, interval | count << 16));
        assert_eq!(stage.counted(&[Counter::BadMessages]), number, "{idle} {interval} {count}");
    }
    for (idle, interval, count) in [(1, 1, 1), (32_767, 32_767, 127)] {
        stage.attacker_sends(Message::control(Operation::NicControl, Control::KeepAlive, CID, ON | idle, interval | count << 16));
    }
    stage.attacker_sends(Message::control(Operation::NicControl, Control::UserTimeout, CID, 1 << 31, 0));
    assert_eq!(stage.counted(&[Counter::BadMessages]), bad.len() as u64 + 1);
    // An hour of silence: no more probes than seconds.
    stage.attacker_sends(Message::control(Operation::NicControl, Control::KeepAlive, CID, ON | 1, 1 | 127 << 16));
    let begun = stage.counted(&[Counter::WireSent]);
    for _ in 0..100_000 {
        stage.now = stage.now.after(36_000);
        stage.worker.poll(stage.now);
        while stage.far.receive(&mut stage.frame) {}
    }
    let probes = stage.counted(&[Counter::WireSent]) - begun;
    assert!((100..=130).contains(&probes), "{probes} probes, then it ends");
}

/// The agent ends a connection whose socket has lost it: the peer is reset, the program gets ECONNABORTED, the agent is
/// notified.
#[test]
fn a_connection_that_its_socket_has_lost_is_reset() {
    const ECONNABORTED: u32 = 103;
    let mut stage = Stage::new();
    let resets = |stage: &mut Stage| {
        let mut resets = 0;
        while stage.far.receive(&mut stage.frame) {
            resets += usize::from(TcpFrame::parse(stage.frame.bytes(), 0).is_ok_and(|parsed| parsed.flags.contains(Flags::RST)));
        }
        resets
    };
    for generation in [2, 1] {
        let abort = Message::control(Operation::NicControl, Control::Abort, Cid::new(1, generation), 0, 0);
        stage.agent.push(abort.to_words()).unwrap();
        stage.agent.publish();
        stage.worker.poll(stage.now);
        stage.worker.poll(stage.now);
        assert_eq!(resets(&mut stage), usize::from(generation == 1));
    }
    let ended = |events: &mut baton_ring::Consumer<baton_shm::RingWords>| {
        let all = std::iter::from_fn(|| events.pop()).filter_map(Message::from_words);
        all.filter(|event| (event.cid, event.kind) == (CID, Control::Closed as u16))
            .map(|event| event.address)
            .collect::<Vec<_>>()
    };
    assert_eq!(ended(&mut stage.programs[1].events), [ECONNABORTED]);
    assert_eq!(ended(&mut stage.events).len(), 1, "the agent takes the slot");
    stage.events.release();
    stage.victim_goes_on(700);
}

/// A wire on which three frames arrive for each that is taken, as a sender on another processor can do.
struct Endless {
    taken: Rc<Cell<u64>>,
    tells: bool,
}

impl Device for Endless {
    fn capabilities(&self) -> Capabilities {
        Capabilities { checksum: true, segmentation: 0 }
    }

    fn receive(&mut self, frame: &mut Frame) -> bool {
        frame.fill(&[0; 64]);
        self.taken.set(self.taken.get() + 1);
        true
    }

    fn taken_and_come(&self) -> (u64, u64) {
        let taken = self.taken.get();
        if self.tells { (taken, 100 + 3 * taken) } else { (0, u64::MAX) }
    }

    fn transmit(&mut self, _: &mut Frame) -> bool {
        true
    }
}

/// Before the NIC gives connections up it receives the frames that wait on the wire: once for all of them, and without
/// those that arrive meanwhile.
#[test]
fn many_connections_are_given_up_in_a_round_although_frames_go_on_coming() {
    for tells in [true, false] {
        let taken = Rc::new(Cell::new(0));
        let wire: Box<dyn Device> = Box::new(Endless { taken: taken.clone(), tells });
        let (host, _kernel) = memory_pair(256, FRAME, Capabilities { checksum: true, segmentation: 0 });
        let nic_memory = Arc::new(Region::private(nic::bytes(SLOTS)).unwrap());
        let now = Instant(1_000_000);
        let settings = WorkerSettings { slots: SLOTS, frame_bytes: FRAME, beside: true, ..WorkerSettings::default() };
        let (mut worker, batch) = (Worker::new(host, wire, nic_memory.clone(), settings, now), settings.batch as u64);
        worker.start(now);
        let mut agent = Producer::new(nic_memory.ring(nic::COMMANDS));
        let mut events = Consumer::new(nic_memory.ring(nic::EVENTS));
        for number in 0..1000 {
            let cid = Cid::new(number % SLOTS as u32, 1);
            agent.push(Message::control(Operation::NicControl, Control::Cancel, cid, 0, 0).to_words()).unwrap();
        }
        agent.publish();
        let waiting = 100 + 3 * batch;
        worker.poll(now);
        let most = if tells { waiting + batch } else { 256 * batch } + batch;
        assert!((waiting..=most).contains(&taken.get()), "{} frames", taken.get());
        let messages = std::iter::from_fn(|| events.pop()).filter_map(Message::from_words);
        let answers = messages.filter(|message| message.kind == Control::Refused as u16);
        assert_eq!(answers.count(), 1000, "all are answered");
    }
}

/// A word that the attacker's program can write, and the values that it gives it.
#[derive(Clone, Debug)]
enum Step {
    /// A word of its session memory: rings, blocks, UDP rings, send memory.
    Word { place: u8, at: u16, value: u64 },
    /// A message with any fields, mostly for its own connection.
    Message { operation: u8, kind: u16, own: bool, address: u32, length: u32 },
    /// Time passes, in microseconds.
    Pause(u32),
}

/// Numbers at and next to limits and wrap-arounds.
fn numbers() -> impl Strategy<Value = u32> {
    prop_oneof![
        Just(0u32),
        Just(1),
        Just(BUFFER),
        Just(BUFFER + 1),
        Just(1 << 31),
        Just(u32::MAX),
        Just(SEND),
        Just(SOCKET),
        0..1u32 << 18,
        any::<u32>()
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    let kinds = prop_oneof![Just(0u16), Just(FETCH), Just(FETCH | ANSWER), Just(ANSWER), Just(MORE), 0u16..40, any::<u16>()];
    prop_oneof![
        4 => (0u8..7, any::<u16>(), numbers(), numbers()).prop_map(|(place, at, low, high)| {
            Step::Word { place, at, value: u64::from(low) | u64::from(high) << 32 }
        }),
        4 => (0u8..25, kinds, proptest::bool::weighted(0.9), numbers(), numbers())
            .prop_map(|(operation, kind, own, address, length)| Step::Message { operation, kind, own, address, length }),
        1 => (0u32..2_000_000).prop_map(Step::Pause),
    ]
}

impl Stage {
    /// Gives the attacker's session a UDP socket.
    fn add_socket(&mut self) {
        let local = Endpoint::v4([10, 0, 0, 1], 7000);
        let settings = DatagramSettings {
            id: SOCKET,
            session: 1,
            place: RINGS,
            limit: 4096,
            endpoints: vec![local],
            peer: None,
            host: [4; 6],
        };
        assert!(self.worker.add_datagrams(settings));
        let link = Link { source: [2; 6], destination: [3; 6], ttl: 64, ..Link::default() };
        // Rings of zeros hold datagrams for nobody; this is a way for them.
        let way = DatagramWay { source: local.address, link, mtu: 1500 };
        assert!(self.worker.set_datagram_way(SOCKET, [0; 16], Some(way)));
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Word { place, at, value } => {
                let (base, words) = match place {
                    0 => (session::COMMANDS, 24),
                    1 => (session::EVENTS, 24),
                    2 => (0, session::HEAP / 8),
                    3 => (session::block(0), session::BLOCK_BYTES / 8),
                    4 => (RINGS.base as usize, page::BYTES / 8),
                    5 => (RINGS.base as usize, RINGS.bytes() as usize / 8),
                    _ => (session::block(0) + block::QUEUED_SEQ & !7, 1),
                };
                // A ring's index that is too large ends the session, so most values here are not.
                let value = if place == 0 && at % 8 != 0 { value & 7 } else { value };
                self.programs[1].memory.words(base, words)[usize::from(at) % words].store(value, Ordering::SeqCst);
            }
            Step::Message { operation, kind, own, address, length } => {
                let cid = if own { CID } else { Cid(address ^ length) };
                let first = u64::from(operation) | u64::from(kind) << 16 | u64::from(cid.0) << 32;
                let commands = &mut self.programs[1].commands;
                let _ = commands.push([first, u64::from(address) | u64::from(length) << 32]);
                commands.publish();
            }
            Step::Pause(micros) => self.now = self.now.after(u64::from(micros)),
        }
    }
}

/// Runs the steps, and gives the attacker's connection to the kernel.
fn run(steps: &[Step]) -> Result<(), TestCaseError> {
    let mut stage = Stage::new();
    stage.add_socket();
    for (number, step) in steps.iter().enumerate() {
        stage.step(step);
        for _ in 0..3 {
            let before = stage.work();
            stage.worker.poll(stage.now);
            prop_assert!(stage.work() - before <= MOST_AT_ONCE, "{} after {step:?}", stage.work() - before);
            stage.worker.datagram_doorbells(|_| {});
            stage.worker.doorbells(stage.now, |_, _| {});
            while stage.far.receive(&mut stage.frame) {}
            while stage.kernel.receive(&mut stage.frame) {}
        }
        if number % 8 == 0 {
            stage.victim_goes_on(1 + number * 37 % 1400);
        }
    }
    let before = stage.work();
    stage.worker.end_datagrams(SOCKET, true);
    if let Some(queue) = stage.leave() {
        prop_assert!(queue <= BUFFER, "{queue} bytes would go to the kernel");
    }
    prop_assert!(stage.work() - before <= 4 * MOST_AT_ONCE);
    stage.victim_goes_on(1000);
    Ok(())
}

proptest! {
    #![proptest_config(crate::drawn::cases(200))]

    /// Random and extreme values in every word that a program can write: each round's work is bounded, the other
    /// program's connection goes on, and the attacker's own can be given to the kernel, with no more than its memory
    /// holds.
    #[test]
    fn a_rounds_work_is_bounded(steps in proptest::collection::vec(steps(), 1..80)) {
        run(&steps)?;
    }
}

/// The same for `BATON_FUZZ_SECONDS` (1), from `BATON_FUZZ_SEED` (1) on. Of steps that fail it prints the fewest and
/// smallest that it finds to fail as well.
#[test]
fn a_rounds_work_is_bounded_for_a_while() {
    let setting = |name: &str, default: u64| std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default);
    let (seconds, begun) = (setting("BATON_FUZZ_SECONDS", 1), std::time::Instant::now());
    let strategy = proptest::collection::vec(steps(), 1..80);
    for seed in setting("BATON_FUZZ_SEED", 1).. {
        if begun.elapsed().as_secs() >= seconds {
            return;
        }
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
        let tree = strategy.new_tree(&mut runner).expect("steps");
        if let Err(failed) = runner.run_one(tree, |steps| run(&steps)) {
            panic!("BATON_FUZZ_SEED={seed} repeats it: {failed}");
        }
    }
}
