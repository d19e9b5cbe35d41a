//! Messages are counted by kind: each message of a ring once, also if several are run together.

use crate::stage::{BUFFER, Stage};
use baton_abi::layout::{COUNTERS, Counter, nic, session};
use baton_abi::{Cid, Control, Message, Operation};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

fn count(stage: &Stage, counter: Counter) -> u64 {
    stage.nic_memory.words(nic::counters(0), COUNTERS)[counter as usize].load(Ordering::Relaxed)
}

/// Takes what lies in the rings of events: the number of messages by operation, those to the program first.
fn taken(stage: &mut Stage) -> [BTreeMap<u8, u64>; 2] {
    [&mut stage.programs[0].events, &mut stage.events].map(|ring| {
        let mut kinds = BTreeMap::new();
        while let Some(words) = ring.pop() {
            *kinds.entry(Message::from_words(words).expect("a message").operation as u8).or_default() += 1;
        }
        ring.release();
        kinds
    })
}

#[test]
fn messages_are_counted_by_kind() {
    use Counter::*;
    let mut stage = Stage::new();
    assert_eq!([AgentHandoff, AgentControl, AgentRestore].map(|counter| count(&stage, counter)), [2, 4, 0]);
    let before = [ToProgramRecv, ToProgramAck, ToProgramControl, ToAgentControl, ToAgentRestore, Announcements]
        .map(|counter| (counter, count(&stage, counter)));
    assert_eq!(before[3].1, 6, "an answer to each command");
    taken(&mut stage);

    // Three sends, of which the first two follow each other in memory and are run as one.
    let (cid, send_memory) = (Cid::new(0, 1), session::HEAP as u32 + BUFFER);
    let send = |at: u32, length: u32| Message::new(Operation::NicSend, cid, send_memory + at, length);
    let no_delay = Message::control(Operation::NicControl, Control::NoDelay, cid, 1, 0);
    let post = Message::new(Operation::NicPost, cid, session::HEAP as u32 + 2 * BUFFER, 64);
    for message in [send(1, 100), send(101, 100), no_delay, send(201, 50), post] {
        stage.programs[0].commands.push(message.to_words()).expect("room");
    }
    stage.programs[0].commands.publish();
    stage.worker.poll(stage.now);
    stage.send_segment(1, 251, b"twelve bytes");
    stage.worker.poll(stage.now);
    let recvd = Message::new(Operation::NicRecvd, cid, 0, 12);
    stage.programs[0].commands.push(recvd.to_words()).expect("room");
    stage.programs[0].commands.publish();
    stage.worker.poll(stage.now);
    assert_eq!([ProgramSend, ProgramRecvd, ProgramPost, ProgramControl].map(|counter| count(&stage, counter)), [3, 1, 1, 1]);

    // One that is not allowed is a message, too.
    stage.programs[0].commands.push(Message::new(Operation::NicRecvd, cid, 0, 1 << 30).to_words()).expect("room");
    stage.programs[0].commands.publish();
    stage.agent.push(Message::new(Operation::NicRestore, cid, 0, 0).to_words()).expect("room");
    stage.agent.publish();
    stage.worker.poll(stage.now);
    assert_eq!([ProgramRecvd, BadMessages, AgentRestore].map(|counter| count(&stage, counter)), [2, 1, 1]);

    let [program, agent] = taken(&mut stage);
    let of = |kinds: &BTreeMap<u8, u64>, operation: Operation| kinds.get(&(operation as u8)).copied().unwrap_or(0);
    let seen = [
        of(&program, Operation::OsRecv),
        of(&program, Operation::OsAck),
        of(&program, Operation::OsControl),
        of(&agent, Operation::OsControl),
        of(&agent, Operation::OsRestore),
        of(&agent, Operation::OsResource),
    ];
    assert_eq!(before.map(|(counter, earlier)| count(&stage, counter) - earlier), seen);
    assert!(seen[0] > 0 && seen[1] > 0 && seen[3] > 0, "{seen:?}");
}
