//! A frame that reached the host during the handoff is forwarded to the NIC (`nic_forward`), however long it is, and is
//! processed as if it had come from the wire.

use crate::stage::{SLOTS, Stage, flow};
use baton_abi::layout::{COUNTERS, Counter, nic, session};
use baton_abi::{Cid, Control, Message, Operation};
use baton_datapath::WorkerSettings;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Flags, TcpOptions};
use std::sync::atomic::Ordering;

/// Hands connection 1 off, whose peer's segment with this payload has reached the host and lies at `address` in the
/// room for such frames. Returns the answer to `nic_forward`, and the number of bytes that the program is sent events
/// for.
fn hand_off(stage: &mut Stage, address: usize, payload: &[u8]) -> (Option<Control>, usize) {
    let (cid, flow) = (Cid::new(1, 1), flow(1));
    stage.prepare(1, flow);
    for control in [Control::Mirror, Control::Steal] {
        stage.command(Message::control(Operation::NicControl, control, cid, 0, 0));
    }
    let template = Template::new(&flow.reversed(), &Link { ttl: 64, ..Link::default() }, true);
    let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
    let header = Header { seq: 1, ack: 1, flags: Flags::ACK, window: 512, options: &options, ecn: 0, ident: 0 };
    let mut frame = vec![0u8; MAX_HEADER + payload.len()];
    let headers = template.emit(&header, payload.len(), &mut frame);
    frame.truncate(headers + payload.len());
    frame[headers..].copy_from_slice(payload);
    // Beyond the room it cannot be written.
    let _ = stage.nic_memory.write(nic::forward(SLOTS) + address, &frame);
    let forward = Message::new(Operation::NicForward, cid, address as u32, frame.len() as u32);
    stage.agent.push(forward.to_words()).expect("room");
    stage.agent.publish();
    stage.worker.poll(stage.now);
    let answers: Vec<Message> = std::iter::from_fn(|| stage.events.pop()).filter_map(Message::from_words).collect();
    stage.events.release();
    let answer = answers.iter().find(|message| message.cid == cid).and_then(|message| Control::from_number(message.kind));
    stage.command(Message::new(Operation::NicHandoff, cid, 0, 0));
    let events = std::iter::from_fn(|| stage.programs[1].events.pop()).filter_map(Message::from_words);
    let received = events.filter(|message| (message.operation, message.cid) == (Operation::OsRecv, cid));
    (answer, received.map(|message| message.length as usize).sum())
}

#[test]
fn a_forwarded_frame_of_any_length_is_processed_after_the_handoff() {
    const LARGE: usize = 59_000;
    for (length, address) in [(5, 0), (8_948, 1_000), (LARGE, nic::FORWARD_BYTES - MAX_HEADER - LARGE)] {
        let mut stage = Stage::empty(WorkerSettings::default());
        let payload: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        assert_eq!(hand_off(&mut stage, address, &payload), (Some(Control::Done), length));
        let mut found = vec![0u8; length];
        stage.programs[1].memory.read(session::HEAP + 1, &mut found).expect("receive memory");
        assert!(found == payload, "{length} bytes");
    }
}

#[test]
fn a_frame_beyond_the_room_for_such_is_refused() {
    let mut stage = Stage::empty(WorkerSettings::default());
    assert_eq!(hand_off(&mut stage, nic::FORWARD_BYTES - 20, b"early"), (Some(Control::Refused), 0));
}

#[test]
fn where_frames_are_dropped_during_moves_forwarded_ones_are_too() {
    let mut stage = Stage::empty(WorkerSettings { drop_during_moves: true, ..WorkerSettings::default() });
    assert_eq!(hand_off(&mut stage, 0, b"early"), (Some(Control::Done), 0));
    let counters = stage.nic_memory.words(nic::counters(0), COUNTERS);
    assert_eq!(counters[Counter::Dropped as usize].load(Ordering::Relaxed), 1);
}
