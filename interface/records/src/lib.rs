//! The contents of a session for messages (RMPP), which has no connections: commands and events of 128 bytes in the
//! session's two rings, and the part of session memory that they refer to.
//!
//! | what | who writes it |
//! |---|---|
//! | [`begin`] | the program, first of all, to each NIC that the agent has given the session to |
//! | [`baton_rmpp::Command`] | the program: its policy half |
//! | [`baton_rmpp::Event`] | the NIC: its data half |
//!
//! The agent counts the NICs that a session was given to ([`baton_abi::layout::session::NIC_STARTS`]). A NIC ignores
//! commands before the [`begin`] with its own number: they were meant for a NIC that has died. It sends no event before
//! that either, so events that a program finds in the ring until then are the dead NIC's.
#![forbid(unsafe_code)]

mod memory;

pub use memory::SessionMemory;

use baton_ring::{Consumer, Full, Producer};
use baton_rmpp::interface::WORDS;
use baton_shm::RingWords;

/// Number of the ring's 16-byte messages that a record takes.
pub const SLOTS: u64 = WORDS as u64 / 2;

/// The first word of the record by which a program begins to use a NIC. No command and no event begins with it.
const BEGIN: u64 = 1 << 32;

/// A record.
pub type Record = [u64; WORDS];

/// A ring ends in the middle of a record: its producer does not follow the interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Torn;

/// The record by which a program begins to use the NIC with this number.
pub fn begin(starts: u32) -> Record {
    let mut record = [0; WORDS];
    (record[0], record[1]) = (BEGIN, starts.into());
    record
}

/// The number in a [`begin`] record; None if it is another record.
pub fn begins(record: &Record) -> Option<u32> {
    (record[0] == BEGIN).then(|| record[1] as u32)
}

/// Writes a record, which the consumer sees after [`Producer::publish`].
///
/// # Errors
/// [`Full`] if the whole record does not fit; then nothing is written.
pub fn push(ring: &mut Producer<RingWords>, record: &Record) -> Result<(), Full> {
    if !ring.has_room(SLOTS) {
        return Err(Full);
    }
    record.chunks_exact(2).try_for_each(|pair| ring.push([pair[0], pair[1]]))
}

/// Takes a record, copied once. None if there is none, or the ring is corrupt ([`Consumer::is_corrupt`]).
///
/// # Errors
/// [`Torn`] if only a part of one is there: records are published whole.
pub fn pop(ring: &mut Consumer<RingWords>) -> Result<Option<Record>, Torn> {
    let mut record = [0; WORDS];
    for (at, pair) in record.chunks_exact_mut(2).enumerate() {
        match ring.pop() {
            Some(message) => pair.copy_from_slice(&message),
            None if at == 0 => return Ok(None),
            None => return Err(Torn),
        }
    }
    Ok(Some(record))
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::layout::{RING_MESSAGES, session};
    use baton_shm::Region;
    use std::sync::Arc;

    fn ring() -> (Producer<RingWords>, Consumer<RingWords>) {
        let memory = Arc::new(Region::private(session::HEAP).unwrap());
        (Producer::new(memory.ring(session::COMMANDS)), Consumer::new(memory.ring(session::COMMANDS)))
    }

    #[test]
    fn records_pass_whole_and_in_order() {
        let (mut producer, mut consumer) = ring();
        for round in 0..3u64 {
            let records = RING_MESSAGES as u64 / SLOTS;
            for number in 0..records {
                let record = std::array::from_fn(|word| round << 32 | number << 8 | word as u64);
                assert_eq!(push(&mut producer, &record), Ok(()));
            }
            assert_eq!(push(&mut producer, &[0; WORDS]), Err(Full));
            assert_eq!(pop(&mut consumer), Ok(None), "nothing is seen before it is published");
            producer.publish();
            for number in 0..records {
                let record = std::array::from_fn(|word| round << 32 | number << 8 | word as u64);
                assert_eq!(pop(&mut consumer), Ok(Some(record)));
            }
            consumer.release();
        }
    }

    #[test]
    fn a_part_of_a_record_is_no_record() {
        let (mut producer, mut consumer) = ring();
        for _ in 1..SLOTS {
            producer.push([1, 2]).unwrap();
        }
        producer.publish();
        assert_eq!(pop(&mut consumer), Err(Torn));
    }

    #[test]
    fn the_first_record_says_which_nic_is_meant() {
        assert_eq!(begins(&begin(7)), Some(7));
        let command = baton_rmpp::Command::DropPeer { peer: 7 };
        assert_eq!(begins(&command.to_words()), None);
        assert_eq!(baton_rmpp::Command::from_words(&begin(7)), None);
        assert_eq!(baton_rmpp::Event::from_words(&begin(7)), None);
    }
}
