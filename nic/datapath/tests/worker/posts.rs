//! Buffers that a program posts: how many the NIC fills, and what becomes of them while it is short of memory.

use crate::stage::{BUFFER, Stage};
use baton_abi::layout::{POSTS, session};
use baton_abi::{Cid, Control, Message, Operation};
use baton_datapath::{Limits, WorkerOffloads};

const LENGTH: u32 = 100;

/// Where a buffer lies in the victim's session memory.
fn address(number: u32) -> u32 {
    session::HEAP as u32 + 2 * BUFFER + LENGTH * number
}

/// The victim's program posts a buffer. Returns the sequence number of the first byte that goes there, as the NIC says.
fn post(stage: &mut Stage, number: u32) -> u32 {
    let message = Message::new(Operation::NicPost, Cid::new(0, 1), address(number), LENGTH);
    stage.programs[0].commands.push(message.to_words()).expect("room");
    stage.programs[0].commands.publish();
    stage.worker.poll(stage.now);
    let mut answer = None;
    while let Some(words) = stage.programs[0].events.pop() {
        let event = Message::from_words(words).expect("a message");
        if event.operation == Operation::OsControl && event.kind == Control::Posted as u16 {
            answer = Some(event.address);
        }
    }
    stage.programs[0].events.release();
    answer.expect("an answer")
}

fn buffer(stage: &Stage, number: u32, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    stage.programs[0].memory.read(address(number) as usize, &mut bytes).expect("its memory");
    bytes
}

fn limit(stage: &mut Stage, limits: Limits) {
    stage.worker.set_offloads(&WorkerOffloads { limits, ..WorkerOffloads::default() }, stage.now);
}

#[test]
fn many_buffers_are_filled_in_their_order() {
    let mut stage = Stage::new();
    let most = POSTS as u32;
    for number in 0..most {
        assert_eq!(post(&mut stage, number), 1 + LENGTH * number);
    }
    assert_eq!(post(&mut stage, most), 1 + LENGTH * (most + 1), "the end of one that is too many");
    let bytes: Vec<u8> = (0..LENGTH * (most + 1)).map(|at| (at % 251) as u8).collect();
    for (at, piece) in bytes.chunks(1100).enumerate() {
        stage.send_segment(1 + 1100 * at as u32, 1, piece);
        stage.worker.poll(stage.now);
    }
    let placed = (LENGTH * most) as usize;
    assert_eq!(buffer(&stage, 0, placed), bytes[..placed]);
    assert_eq!(buffer(&stage, most, LENGTH as usize), [0; LENGTH as usize]);
}

#[test]
fn without_memory_what_is_posted_is_left_alone() {
    let mut stage = Stage::new();
    limit(&mut stage, Limits { pages: 0, ..Limits::default() });
    assert_eq!(post(&mut stage, 0), 1 + LENGTH, "its end");
    limit(&mut stage, Limits::default());
    assert_eq!(post(&mut stage, 1), 1 + LENGTH);
    let bytes: Vec<u8> = (1..=200).collect();
    stage.send_segment(1, 1, &bytes);
    stage.worker.poll(stage.now);
    assert_eq!(buffer(&stage, 0, 100), [0; 100]);
    assert_eq!(buffer(&stage, 1, 100), bytes[100..]);
    let mut received = [0; 100];
    stage.programs[0].memory.read(session::HEAP + 1, &mut received).expect("receive memory");
    assert_eq!(received, bytes[..100]);
}
