//! When a program is woken, and how messages are sent of a program that waits for each to be taken.

use crate::stage::{BUFFER, Stage, flow};
use baton_abi::layout::{COUNTERS, Counter, RING_MESSAGES, block, nic, session, slot};
use baton_abi::{ANSWER, Cid, Control, Message, OF_ALL, Operation};
use baton_datapath::WorkerOffloads;
use baton_device::Device;
use baton_moderation::{LOAD, LULL, Mode};
use baton_ring::{clear_rung, count_sleeper};
use baton_tcp::Instant;
use baton_wire::TcpFrame;
use std::sync::atomic::Ordering;

/// Sets when doorbells are rung.
fn set(stage: &mut Stage, doorbells: Mode) {
    stage.worker.set_offloads(&WorkerOffloads { doorbells, ..WorkerOffloads::default() }, stage.now);
}

/// A sleeping program's doorbell is rung after a time or a number of bytes; a program that is awake gets none.
#[test]
fn doorbells_are_moderated() {
    let mut stage = Stage::new();
    let asleep = |stage: &Stage, asleep: u32| {
        stage.programs[0].memory.word32(session::PROGRAM_SLEEPING).store(asleep, Ordering::SeqCst);
    };
    let rung = |stage: &mut Stage| {
        let mut rung = Vec::new();
        stage.worker.doorbells(stage.now, |session, _| rung.push(session));
        clear_rung(stage.programs[0].memory.word32(session::PROGRAM_SLEEPING));
        rung
    };
    asleep(&stage, 1);
    rung(&mut stage);
    stage.victim_goes_on(100);
    assert_eq!(rung(&mut stage), [0], "at once, where nothing is set");
    assert_eq!(rung(&mut stage), [0u32; 0], "and once");

    set(&mut stage, Mode::Static { time: 500, frames: 3 });
    stage.victim_goes_on(100);
    assert_eq!(rung(&mut stage), [0u32; 0]);
    let due = stage.worker.next_timeout().expect("it is due some time");
    assert!(due <= stage.now.0 + 500, "{due}");
    stage.now = Instant(due);
    assert_eq!(rung(&mut stage), [0], "its time is up");

    for _ in 0..2 {
        stage.victim_goes_on(100);
        assert_eq!(rung(&mut stage), [0u32; 0]);
    }
    stage.victim_goes_on(100);
    assert_eq!(rung(&mut stage), [0], "the third");

    asleep(&stage, 0);
    stage.victim_goes_on(100);
    assert_eq!(rung(&mut stage), [0u32; 0]);
    stage.now = stage.now.after(10_000);
    assert_eq!(rung(&mut stage), [0u32; 0], "it was awake");

    // What it got while it was awake counts for the load, under which a burst is waited for.
    set(&mut stage, Mode::Burst);
    asleep(&stage, 1);
    stage.victim_goes_on(100);
    assert_eq!(rung(&mut stage), [0], "no load");
    asleep(&stage, 0);
    for _ in 0..LOAD {
        stage.victim_goes_on(100);
        assert_eq!(rung(&mut stage), [0u32; 0]);
    }
    asleep(&stage, 1);
    stage.victim_goes_on(100);
    assert_eq!(rung(&mut stage), [0u32; 0], "more may come");
    assert_eq!(stage.worker.next_timeout(), Some(stage.now.0 + LULL));
    stage.now = stage.now.after(LULL);
    assert_eq!(rung(&mut stage), [0], "nothing more has come");
    stage.victim_goes_on(100);
    assert_eq!(rung(&mut stage), [0], "the load has ended");
}

/// The agent's doorbell is rung at once for what comes after a while, and once for all that comes shortly after that.
#[test]
fn the_agents_doorbell_is_moderated() {
    let mut stage = Stage::new();
    // A command that is refused, and whether the doorbell is rung for the answer.
    let asked = |stage: &mut Stage| {
        stage.command(Message::new(Operation::NicRestore, Cid::new(5, 1), 0, 0));
        stage.worker.doorbells(stage.now, |_, _| {})
    };
    assert!(asked(&mut stage) && asked(&mut stage), "at once, where nothing is set");
    assert!(!stage.worker.doorbells(stage.now, |_, _| {}), "and once");
    set(&mut stage, Mode::Burst);
    stage.now = stage.now.after(1000);
    assert!(asked(&mut stage), "the first one in a while");
    let began = stage.now;
    assert_eq!([asked(&mut stage), asked(&mut stage)], [false, false]);
    assert!(stage.worker.next_timeout().is_some_and(|due| due <= began.0 + 20), "the worker does not sleep for longer");
    stage.now = began.after(19);
    assert!(!asked(&mut stage));
    stage.now = began.after(20);
    assert!(stage.worker.doorbells(stage.now, |_, _| {}), "for all of them");
    assert!(!stage.worker.doorbells(stage.now.after(100), |_, _| {}), "once");
    let counters = stage.nic_memory.words(nic::counters(0), COUNTERS);
    assert_eq!(counters[Counter::AgentDoorbells as usize].load(Ordering::Relaxed), 4);
}

/// The processor of a program that is woken is what it has said last.
#[test]
fn the_programs_processor_is_told() {
    let mut stage = Stage::new();
    let memory = stage.programs[0].memory.clone();
    memory.word32(session::PROGRAM_SLEEPING).store(1, Ordering::SeqCst);
    for (said, told) in [(0, None), (1, Some(0)), (8, Some(7)), (u32::MAX, Some(u32::MAX as usize - 1))] {
        memory.word32(session::PROGRAM_PROCESSOR).store(said, Ordering::SeqCst);
        stage.victim_goes_on(100);
        let mut rung = Vec::new();
        stage.worker.doorbells(stage.now, |session, processor| rung.push((session, processor)));
        assert_eq!(rung, [(0, told)]);
        clear_rung(memory.word32(session::PROGRAM_SLEEPING));
    }
    for _ in 0..40 {
        stage.victim_goes_on(1000);
    }
    let mut rung = Vec::new();
    stage.worker.doorbells(stage.now, |session, processor| rung.push((session, processor)));
    assert_eq!(rung, [(0, None)], "it is woken for bulk data");
}

/// A sleeping program that waits for room is not woken by acknowledgements that free less, but by the one that frees
/// enough, and by data.
#[test]
fn acknowledgements_that_free_too_little_wake_nobody() {
    let mut stage = Stage::new();
    let memory = stage.programs[0].memory.clone();
    let store = |at: usize, value: u32| memory.word32(at).store(value, Ordering::SeqCst);
    store(session::PROGRAM_SLEEPING, 1);
    store(session::block(0) + block::QUEUED_SEQ, 1 + 3 * 1448);
    store(session::block(0) + block::QUIET_ABOVE, 1448);
    let message = Message::new(Operation::NicSend, Cid::new(0, 1), session::HEAP as u32 + BUFFER + 1, 3 * 1448);
    stage.programs[0].commands.push(message.to_words()).unwrap();
    stage.programs[0].commands.publish();
    stage.worker.poll(stage.now);
    let mut rung = |seq: u32, ack: u32, payload: &[u8]| {
        stage.send_segment(seq, ack, payload);
        stage.worker.poll(stage.now);
        let mut rung = 0;
        stage.worker.doorbells(stage.now, |_, _| rung += 1);
        clear_rung(memory.word32(session::PROGRAM_SLEEPING));
        let mut acked = 0;
        while let Some(words) = stage.programs[0].events.pop() {
            let message = Message::from_words(words).expect("an event");
            acked += if message.operation == Operation::OsAck { message.length } else { 0 };
        }
        (rung, acked)
    };
    assert_eq!(rung(1, 1 + 1448, &[]), (0, 1448), "two segments are left");
    assert_eq!(rung(1, 1 + 2 * 1448, &[]), (1, 1448), "one is left");
    store(session::block(0) + block::QUIET_ABOVE, 1);
    assert_eq!(rung(1, 1 + 2 * 1448, b"data"), (1, 0));
    assert_eq!(rung(5, 1 + 3 * 1448 - 10, &[]), (0, 1438), "ten bytes are left");
    store(session::block(0) + block::QUIET_ABOVE, 0);
    assert_eq!(rung(5, 1 + 3 * 1448, &[]), (1, 10), "each one shall");
}

/// On a short path the doorbell waits for half of send memory, but not for an acknowledgement that need not come.
#[test]
fn a_sender_on_a_short_path_is_woken_for_half_of_its_memory() {
    // Bytes queued, segments of them sent, and for how many segments' acknowledgement the doorbell rings first.
    for (queued, sent, rings_at) in [(35_000, 3, 2), (40_000, 3, 3), (40_000, 6, 5)] {
        let mut stage = Stage::new();
        let memory = stage.programs[0].memory.clone();
        let store = |at: usize, value: u32| memory.word32(at).store(value, Ordering::SeqCst);
        store(session::PROGRAM_SLEEPING, 1);
        store(session::block(0) + block::QUEUED_SEQ, 1 + queued);
        store(session::block(0) + block::QUIET_ABOVE, BUFFER - BUFFER / 3);
        let message = Message::new(Operation::NicSend, Cid::new(0, 1), session::HEAP as u32 + BUFFER + 1, sent * 1448);
        stage.programs[0].commands.push(message.to_words()).unwrap();
        stage.programs[0].commands.publish();
        stage.worker.poll(stage.now);
        let first = (1..=sent).find(|segments| {
            stage.send_segment(1, 1 + segments * 1448, &[]);
            stage.worker.poll(stage.now);
            let mut rung = false;
            stage.worker.doorbells(stage.now, |_, _| rung = true);
            rung
        });
        assert_eq!(first, Some(rings_at), "{queued} bytes queued, {sent} segments sent");
    }
}

/// However many events a program gets while it wakes up, its doorbell is rung once; and again for those after it has
/// looked at its ring.
#[test]
fn a_program_that_wakes_up_is_rung_once() {
    let mut stage = Stage::new();
    let memory = stage.programs[0].memory.clone();
    let flag = memory.word32(session::PROGRAM_SLEEPING);
    count_sleeper(flag);
    let rung = |stage: &mut Stage| {
        stage.victim_goes_on(100);
        let mut rung = 0;
        stage.worker.doorbells(stage.now, |_, _| rung += 1);
        rung
    };
    assert_eq!([rung(&mut stage), rung(&mut stage), rung(&mut stage)], [1, 0, 0]);
    clear_rung(flag);
    assert_eq!([rung(&mut stage), rung(&mut stage)], [1, 0]);
    // A second thread looks at the ring before it sleeps, so what was rung for does not count any more.
    count_sleeper(flag);
    assert_eq!([rung(&mut stage), rung(&mut stage)], [1, 0]);
}

/// A program that waits for each of its messages to be taken, and bytes that it sends.
struct Waits {
    stage: Stage,
    sent: u32,
}

impl Waits {
    fn new() -> Waits {
        let mut waits = Waits { stage: Stage::new(), sent: 0 };
        count_sleeper(waits.stage.programs[0].memory.word32(session::PROGRAM_SLEEPING));
        waits.events();
        waits
    }

    fn events(&mut self) -> usize {
        let events = &mut self.stage.programs[0].events;
        let count = std::iter::from_fn(|| events.pop()).count();
        events.release();
        count
    }

    /// Sends a message of 100 bytes, `after` microseconds. It must be answered at once. Returns the payloads of the
    /// frames that left with it.
    fn send(&mut self, after: u64) -> Vec<usize> {
        self.queue();
        let left = self.pass(after);
        assert!(self.events() > 0, "not answered");
        left
    }

    fn queue(&mut self) {
        let address = session::HEAP as u32 + BUFFER + 1 + self.sent;
        let message = Message::new(Operation::NicSend, Cid::new(0, 1), address, 100);
        let program = &mut self.stage.programs[0];
        program.commands.push(Message { kind: ANSWER, ..message }.to_words()).unwrap();
        program.commands.publish();
        self.sent += 100;
    }

    /// Lets microseconds pass, and a round of the worker behind them.
    fn pass(&mut self, micros: u64) -> Vec<usize> {
        self.stage.now = self.stage.now.after(micros);
        self.stage.worker.poll(self.stage.now);
        let mut payloads = Vec::new();
        while self.stage.far.receive(&mut self.stage.frame) {
            payloads.push(TcpFrame::parse(self.stage.frame.bytes(), 0).expect("a segment").payload_length);
        }
        payloads
    }
}

/// Messages that follow each other are answered at once, and leave together; the last of them after a short time.
#[test]
fn messages_of_a_stream_leave_together() {
    let mut waits = Waits::new();
    assert_eq!(waits.send(10), [100], "nothing came before it");
    assert_eq!([waits.send(20), waits.send(20), waits.send(20)], [[0usize; 0]; 3]);
    assert_eq!(waits.pass(30), [0usize; 0]);
    assert_eq!(waits.pass(20), [300]);
    assert_eq!(waits.send(1000), [100], "what comes as late is no stream");
}

/// A message after data from the peer is probably an answer or the next request, and does not wait.
#[test]
fn an_answer_does_not_wait() {
    let mut waits = Waits::new();
    assert_eq!(waits.send(10), [100]);
    waits.stage.send_segment(1, 101, b"request");
    assert_eq!(waits.pass(10).len(), 1, "an acknowledgement");
    assert_eq!(waits.send(10), [100]);
    assert_eq!(waits.send(10), [0usize; 0], "but a second one may");
}

/// A sleeping program whose message has not been taken is not woken for acknowledgements, but for the answer.
#[test]
fn acknowledgements_do_not_wake_who_waits_for_an_answer() {
    let mut waits = Waits::new();
    waits.send(10);
    let rings = |waits: &mut Waits| {
        let mut rung = 0;
        waits.stage.worker.doorbells(waits.stage.now, |_, _| rung += 1);
        clear_rung(waits.stage.programs[0].memory.word32(session::PROGRAM_SLEEPING));
        rung
    };
    assert_eq!(rings(&mut waits), 1);
    waits.stage.send_segment(1, 51, &[]);
    waits.pass(10);
    assert_eq!((waits.events(), rings(&mut waits)), (1, 1), "nothing else will wake it");
    // A frame comes first, and then the programs' messages have their turn.
    waits.queue();
    waits.stage.send_segment(1, 101, &[]);
    waits.pass(10);
    assert_eq!((waits.events(), rings(&mut waits)), (1, 0), "reported, and not rung for");
    waits.pass(10);
    assert_eq!((waits.events(), rings(&mut waits)), (1, 1), "answered");
}

/// A second connection of the victim's program is in slot 2.
fn with_two_connections() -> Stage {
    let mut stage = Stage::new();
    stage.prepare(2, flow(2));
    stage.nic_memory.word32(nic::slot(2) + slot::PARAMETERS).store(0, Ordering::Relaxed);
    stage.hand_off(2);
    stage
}

/// Queues a message of a byte on the connection in a slot, which is to be answered.
fn queue_one(stage: &mut Stage, of: u32, sent: u32) {
    let address = session::HEAP as u32 + BUFFER + 1 + sent;
    let message = Message::new(Operation::NicSend, Cid::new(of, 1), address, 1);
    let program = &mut stage.programs[0];
    program.commands.push(Message { kind: ANSWER, ..message }.to_words()).unwrap();
    program.commands.publish();
}

/// The slots of the connections whose messages were answered since the last call, and what else the answers say.
fn answered(stage: &mut Stage) -> Vec<(u32, u32)> {
    let events = &mut stage.programs[0].events;
    let all = std::iter::from_fn(|| events.pop()).filter_map(Message::from_words);
    let answers = all.filter(|message| message.kind == Control::Taken as u16 && message.operation == Operation::OsControl);
    let answers = answers.map(|message| (message.cid.slot(), message.address)).collect();
    events.release();
    answers
}

/// Messages of several connections are taken together, and each is answered: another thread may wait for each.
#[test]
fn each_message_that_is_waited_for_is_answered() {
    let mut stage = with_two_connections();
    answered(&mut stage);
    for of in [0, 2, 0] {
        queue_one(&mut stage, of, 0);
    }
    stage.worker.poll(stage.now);
    assert_eq!(answered(&mut stage), [(0, 0), (2, 0), (0, 0)]);
}

/// A program does not read its events until there is no room for answers. When it has read them it soon gets the
/// event that some were lost, though it sends nothing more, and once.
#[test]
fn an_answer_without_room_is_made_up_for() {
    let mut stage = with_two_connections();
    answered(&mut stage);
    for sent in 0..RING_MESSAGES as u32 {
        queue_one(&mut stage, 0, sent);
        stage.worker.poll(stage.now);
    }
    queue_one(&mut stage, 2, 0);
    queue_one(&mut stage, 0, RING_MESSAGES as u32);
    stage.worker.poll(stage.now);
    assert!(answered(&mut stage).iter().all(|answer| *answer == (0, 0)));
    let until = stage.now.after(10_000);
    let answers = loop {
        let due = stage.worker.next_timeout().expect("it is tried again");
        assert!(due <= until.0, "{due}");
        stage.now = Instant(due.max(stage.now.0 + 1));
        stage.worker.poll(stage.now);
        stage.worker.doorbells(stage.now, |_, _| ());
        let answers = answered(&mut stage);
        if !answers.is_empty() {
            break answers;
        }
    };
    assert_eq!(answers, [(0, OF_ALL)]);
    stage.worker.doorbells(until, |_, _| ());
    assert_eq!(answered(&mut stage), []);
}
