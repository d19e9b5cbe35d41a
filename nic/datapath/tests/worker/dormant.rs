//! Connections that carry nothing become dormant, and wake up when something concerns them.

use crate::stage::{BUFFER, Stage, flow};
use baton_abi::layout::{Counter, nic, session, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_device::Device;
use baton_tcp::Instant;
use baton_wire::TcpFrame;
use std::sync::atomic::Ordering;

const VICTIM: Cid = Cid::new(0, 1);

fn dormant(stage: &Stage) -> u64 {
    stage.nic_memory.words(nic::counters(0), Counter::Dormant as usize + 1)[Counter::Dormant as usize].load(Ordering::Relaxed)
}

/// Lets time pass until both connections are dormant, and nothing is due soon.
fn fall_asleep(stage: &mut Stage) {
    let end = stage.now.after(10_000_000);
    while dormant(stage) < 2 {
        let due = stage.worker.next_timeout().expect("it looks for idle connections");
        stage.now = Instant(due.max(stage.now.0));
        assert!(stage.now < end, "{} sleep", dormant(stage));
        while stage.worker.poll(stage.now) {}
        while stage.far.receive(&mut stage.frame) {}
    }
    let marks = [0, 1].map(|of| stage.nic_memory.word32(nic::slot(of) + slot::DORMANT).load(Ordering::Relaxed));
    assert_eq!(marks, [1, 1]);
    let (end, mut woken) = (stage.now.0 + 1_000_000, 0);
    while let Some(due) = stage.worker.next_timeout().filter(|due| *due < end) {
        (stage.now, woken) = (Instant(due.max(stage.now.0)), woken + 1);
        assert!(woken < 4, "the worker does not sleep");
        while stage.worker.poll(stage.now) {}
    }
}

/// Payload bytes of the victim's frames that have arrived at the wire's far end, and how many frames these are.
fn sent_by_victim(stage: &mut Stage) -> (usize, usize) {
    let (mut bytes, mut frames) = (0, 0);
    while stage.far.receive(&mut stage.frame) {
        if let Ok(parsed) = TcpFrame::parse(stage.frame.bytes(), 0)
            && parsed.flow.reversed() == flow(0)
        {
            (bytes, frames) = (bytes + parsed.payload_length, frames + 1);
        }
    }
    (bytes, frames)
}

#[test]
fn a_frame_wakes_its_connection() {
    let mut stage = Stage::new();
    for round in 0..3 {
        stage.victim_goes_on(100 + round);
        fall_asleep(&mut stage);
        stage.victim_goes_on(BUFFER as usize / 64);
        assert_eq!(dormant(&stage), 1, "the other one sleeps on");
    }
}

#[test]
fn its_programs_message_wakes_it_and_another_programs_does_not() {
    let mut stage = Stage::new();
    fall_asleep(&mut stage);
    let message = Message::new(Operation::NicSend, VICTIM, session::HEAP as u32 + BUFFER, 300);
    for (program, woken) in [(1, 2), (0, 1)] {
        let commands = &mut stage.programs[program].commands;
        commands.push(message.to_words()).unwrap();
        commands.publish();
        while stage.worker.poll(stage.now) {}
        assert_eq!(dormant(&stage), woken);
        assert_eq!(sent_by_victim(&mut stage).0, if program == 0 { 300 } else { 0 });
    }
}

#[test]
fn keep_alive_goes_on_in_its_sleep() {
    const ON: u32 = 1 << 31;
    let mut stage = Stage::new();
    let keepalive = Message::control(Operation::NicControl, Control::KeepAlive, VICTIM, ON | 20, 5 | 9 << 16);
    stage.programs[0].commands.push(keepalive.to_words()).unwrap();
    stage.programs[0].commands.publish();
    while stage.worker.poll(stage.now) {}
    let begun = stage.now;
    for _ in 0..3 {
        fall_asleep(&mut stage);
        let due = stage.worker.next_timeout().expect("the probe");
        stage.now = Instant(due);
        while stage.worker.poll(stage.now) {}
        while sent_by_victim(&mut stage).1 == 0 {
            // The timer looks when the last segment came, and waits for the rest of the time.
            stage.now = Instant(stage.worker.next_timeout().expect("the probe").max(stage.now.0 + 1));
            assert!(stage.now < begun.after(200_000_000), "no probe");
            while stage.worker.poll(stage.now) {}
        }
        // The peer answers.
        stage.send_to_victim(stage.seq, &[]);
        while stage.worker.poll(stage.now) {}
    }
    let seconds = stage.now.since(begun) / 1_000_000;
    assert!((60..90).contains(&seconds), "three probes in {seconds} s");
}

#[test]
fn a_connection_whose_session_has_ended_can_be_restored() {
    let mut stage = Stage::new();
    fall_asleep(&mut stage);
    stage.command(Message::control(Operation::NicControl, Control::Detach, Cid(0), 0, 0));
    assert_eq!(dormant(&stage), 1, "it keeps its memory");
    stage.agent.push(Message::new(Operation::NicRestore, VICTIM, 0, 0).to_words()).unwrap();
    stage.agent.publish();
    while stage.worker.poll(stage.now) {}
    let mut answers = std::iter::from_fn(|| stage.events.pop()).filter_map(Message::from_words);
    assert!(answers.any(|answer| answer.cid == VICTIM && answer.kind == Control::Done as u16), "it rests");
}
