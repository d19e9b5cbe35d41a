//! Readers of a connection's recovery record, of the image in its slot, and of its program's progress.

use baton_abi::layout::{block, nic, scratch, session, slot};
use baton_abi::{Cid, Record, record, resource};
use baton_image::{Image, ImageError, MAX_ENCODED, NicState, Silence, State, TS_RECENT_LASTS};
use baton_shm::Region;
use core::sync::atomic::{AtomicU64, Ordering};

const _: () = assert!(MAX_ENCODED <= scratch::IMAGE_BYTES);

/// Returns the valid record, if the NIC ever published one. `base` is the offset of the connection's slot.
pub fn read_record(nic_memory: &Region, base: usize) -> Option<Record> {
    let words = nic_memory.words(base + slot::RECORDS, 2 * record::WORDS);
    let published = published(words);
    let copy = &words[record::copy(published)..];
    (published > 0).then(|| Record::from_words(std::array::from_fn(|at| copy[at].load(Ordering::Relaxed))))
}

/// Pages of the memory that the parameters in a slot name (see [`baton_abi::resource`]).
pub fn pages_of(nic_memory: &Region, at: u32) -> u32 {
    let size = |word: usize| nic_memory.word32(nic::slot(at) + slot::PARAMETERS + 4 * word).load(Ordering::Acquire);
    resource::pages(size(2), size(4))
}

/// Invalidates the record in a slot.
pub fn unpublish(nic_memory: &Region, at: u32) {
    clear_records(nic_memory.words(nic::slot(at) + slot::RECORDS, 2 * record::WORDS));
}

/// The number of the valid record, of which `words` are both copies; 0 if there is none.
pub fn published(words: &[AtomicU64]) -> u64 {
    record::valid([0, record::STEP].map(|number| words[record::copy(number) + record::NUMBER].load(Ordering::Acquire)))
}

/// Invalidates a record, of which `words` are both copies: the valid copy last, so that the other copy never counts as
/// valid.
pub fn clear_records(words: &[AtomicU64]) {
    let published = published(words);
    for copy in [published + record::STEP, published] {
        words[record::copy(copy) + record::NUMBER].store(0, Ordering::Release);
    }
}

/// Returns the sequence ranges that the NIC had received out of order: first sequence number, and the one behind the
/// last. `at` is the number of the connection's slot.
pub fn read_ranges(nic_memory: &Region, at: u32, record: &Record) -> Vec<(u32, u32)> {
    let table = nic::scratch(at) + scratch::RANGES + usize::from(record.ranges_table & 1) * scratch::RANGES_BYTES;
    let count = usize::from(record.ranges).min(scratch::MOST_RANGES);
    let words = nic_memory.words(table, count);
    words.iter().map(|word| word.load(Ordering::Relaxed)).map(|word| (word as u32, (word >> 32) as u32)).collect()
}

/// Reads the image in a slot.
///
/// # Errors
/// What is wrong with its bytes.
pub fn read_image(nic_memory: &Region, cid: Cid) -> Result<Image, ImageError> {
    Image::decode(&image_bytes(nic_memory, cid))
}

/// As [`read_image`], with the NIC's own state.
///
/// # Errors
/// What is wrong with its bytes.
pub fn read_image_with(nic_memory: &Region, cid: Cid) -> Result<(Image, Option<NicState>), ImageError> {
    Image::decode_with(&image_bytes(nic_memory, cid))
}

/// Writes an image into a connection's slot, with the NIC's own state if there is any.
///
/// # Errors
/// [`ImageError::Truncated`], which an image with a checked state never is.
pub fn write_image(nic_memory: &Region, cid: Cid, image: &Image, nic: Option<&NicState>) -> Result<(), ImageError> {
    let mut bytes = [0u8; MAX_ENCODED];
    image.encode_with(nic, &mut bytes)?;
    let _ = nic_memory.write(nic::scratch(cid.slot()) + scratch::IMAGE, &bytes);
    Ok(())
}

fn image_bytes(nic_memory: &Region, cid: Cid) -> [u8; MAX_ENCODED] {
    let mut bytes = [0u8; MAX_ENCODED];
    let _ = nic_memory.read(nic::scratch(cid.slot()) + scratch::IMAGE, &mut bytes);
    bytes
}

/// A program's progress on a connection, from the connection's block. The program can write any values there.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// [`block::FLAGS`].
    pub flags: u32,
    /// Sequence number behind the last byte that it has queued.
    pub queued: u32,
    /// Sequence number of the first byte that it has not read.
    pub read: u32,
}

impl Progress {
    /// Reads the block of a connection by its number in the session.
    pub fn of(session_memory: &Region, connection: u32) -> Progress {
        let load = |field| session_memory.word32(session::block(connection) + field).load(Ordering::Acquire);
        Progress { flags: load(block::FLAGS), queued: load(block::QUEUED_SEQ), read: load(block::READ_SEQ) }
    }

    /// Returns the number of bytes that the program has not read. By the NIC's count `counted` are unread before
    /// `data_end`; the NIC learns of reads late, so that is an upper bound.
    pub fn unread(&self, data_end: u32, counted: u32) -> u32 {
        data_end.wrapping_sub(self.read).min(counted)
    }
}

/// Whether the receive memory and the send memory of a connection that rests with this image contain no bytes that are
/// still needed. `unread`: bytes that the program has not read; `ranges`: ranges received out of order, None if they
/// are not known.
pub fn empty_memory(image: &Image, unread: u32, ranges: Option<&[(u32, u32)]>) -> (bool, bool) {
    (unread == 0 && ranges.is_some_and(<[_]>::is_empty), image.send_queue() == 0)
}

/// Makes the image of a connection at its NIC's death, `elapsed` microseconds after its handoff with the image `handed`
/// and `send_memory` bytes of send memory. The program's progress is used only as far as it is plausible. None if the
/// record has no state that an image can have.
pub fn image_at_death(handed: &Image, send_memory: u32, elapsed: u64, record: &Record, program: &Progress) -> Option<Image> {
    let mut state = State::from_number(record.state)?;
    // The connection has ended in order, and the agent has not got that event yet. The kernel sends our FIN once more,
    // and the peer acknowledges it in TIME-WAIT; so the program gets the unread bytes and the end of the stream.
    let ended = state == State::Closed && record.snd_una == record.snd_end.wrapping_add(1);
    let snd_una = if ended { record.snd_end } else { record.snd_una };
    if ended {
        state = State::LastAck;
    }
    if program.flags & block::FLAG_SHUT_DOWN != 0 {
        state = match state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            other => other,
        };
    }
    let acked_all = ended || state.fin_acknowledged();
    let queued = program.queued;
    let plausible = queued.wrapping_sub(snd_una) <= send_memory && queued.wrapping_sub(record.snd_end) < 1 << 31;
    let snd_end = if acked_all || !plausible { record.snd_end } else { queued };
    let data_end = record.rcv_nxt.wrapping_sub(u32::from(state.fin_received()));
    let unread = program.unread(data_end, data_end.wrapping_sub(record.rcv_read));
    // A timestamp that is later than any that the NIC can have sent.
    let ts_clock = handed.ts_clock.wrapping_add((elapsed / 1000) as u32 + 1);
    // The next owner takes TS.Recent as fresh, so an old one is dropped.
    let recent = u64::from(ts_clock.wrapping_sub(record.ts_clock)) * 1000 < TS_RECENT_LASTS;
    Some(Image {
        state,
        snd_una,
        snd_nxt: record.snd_nxt,
        snd_end,
        snd_wnd: record.snd_wnd,
        snd_wl1: record.snd_wl1,
        max_window: record.max_window,
        rcv_nxt: record.rcv_nxt,
        rcv_adv: record.rcv_adv,
        unread,
        ts_recent: if recent { record.ts_recent } else { 0 },
        ts_clock,
        cwnd: record.cwnd,
        srtt: record.srtt,
        // The record does not have this.
        silence: Silence::default(),
        ..*handed
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_wire::{Endpoint, Flow};

    fn at_death(record: &Record, program: &Progress) -> Option<Image> {
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 };
        image_at_death(&Image::open(flow), 1 << 16, 3_000, record, program)
    }

    /// Publishes as a connection's owner does.
    fn publish(memory: &Region, number: u64, rcv_nxt: u32) {
        let words = memory.words(nic::slot(0) + slot::RECORDS, 2 * record::WORDS);
        let copy = &words[record::copy(number)..];
        let record = Record { rcv_nxt, ..Record::default() };
        copy.iter().zip(record.to_words()).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        copy[record::NUMBER].store(number, Ordering::Release);
    }

    #[test]
    fn the_record_with_the_greater_number_is_valid_until_it_is_cleared() {
        let memory = Region::private(nic::bytes(1)).unwrap();
        let read = || read_record(&memory, nic::slot(0)).map(|record| record.rcv_nxt);
        assert_eq!(read(), None);
        for nth in 1..10 {
            publish(&memory, u64::from(nth) * record::STEP, nth);
            assert_eq!(read(), Some(nth));
        }
        // The other copy is being written.
        memory.words(nic::slot(0) + slot::RECORDS + 8 * record::copy(10 * record::STEP), 1)[0].store(77, Ordering::Relaxed);
        assert_eq!(read(), Some(9));
        unpublish(&memory, 0);
        assert_eq!(read(), None);
    }

    /// Memory that has, or may have, bytes that are still needed is not empty.
    #[test]
    fn only_memory_that_nobody_needs_is_empty() {
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 };
        let idle = Image::open(flow);
        assert_eq!(empty_memory(&idle, 0, Some(&[])), (true, true));
        assert_eq!(empty_memory(&idle, 1, Some(&[])), (false, true), "the program has a byte to read");
        assert_eq!(empty_memory(&idle, 0, Some(&[(7, 8)])), (false, true), "a byte has come out of order");
        assert_eq!(empty_memory(&idle, 0, None), (false, true), "one may have");
        let sending = Image { snd_end: idle.snd_una.wrapping_add(1), ..idle };
        assert_eq!(empty_memory(&sending, 0, Some(&[])), (true, false), "a byte is not acknowledged");
    }

    /// A connection has ended in order before the agent has got that event: the program still gets the unread bytes,
    /// and the acknowledged FIN is sent again.
    #[test]
    fn the_end_of_a_connection_does_not_take_unread_bytes_with_it() {
        let record = Record {
            state: State::Closed as u8,
            snd_una: 501,
            snd_nxt: 501,
            snd_end: 500,
            rcv_nxt: 1001,
            rcv_adv: 9000,
            rcv_read: 100,
            ..Record::default()
        };
        let program = Progress { flags: block::FLAG_SHUT_DOWN, queued: 500, read: 400 };
        let image = at_death(&record, &program).expect("an image");
        assert_eq!(image.check(), Ok(()));
        assert_eq!((image.state, image.unread, image.read_seq()), (State::LastAck, 600, 400));
        assert_eq!((image.snd_una, image.snd_nxt, image.snd_end, image.send_queue()), (500, 501, 500, 0));
    }

    /// A connection that was given up with unacknowledged bytes cannot be revived like that.
    #[test]
    fn a_connection_that_timed_out_stays_closed() {
        let record = Record { state: State::Closed as u8, snd_una: 7, snd_nxt: 9, snd_end: 9, ..Record::default() };
        let program = Progress { flags: 0, queued: 9, read: 0 };
        assert_eq!(at_death(&record, &program).map(|image| image.state), Some(State::Closed));
    }

    /// The kernel takes the replay's timestamp as fresh. If the peer has sent nothing for weeks, its next segment would
    /// be refused by that old timestamp.
    #[test]
    fn a_timestamp_of_long_ago_is_forgotten() {
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 };
        let handed = Image { ts_clock: u32::MAX - 5, ..Image::open(flow) };
        let program = Progress { flags: 0, queued: 1, read: 1 };
        let ends = Record { state: State::Established as u8, snd_una: 1, snd_nxt: 1, snd_end: 1, ..Record::default() };
        const DAY: u64 = 86_400_000_000;
        for (published_at, died_at, known) in [(0, 60_000_000, true), (0, 25 * DAY, false), (40 * DAY, 40 * DAY + 9, true)] {
            let ts_clock = handed.ts_clock.wrapping_add((published_at / 1000) as u32);
            let record = Record { ts_recent: 77, ts_clock, rcv_nxt: 1, rcv_adv: 9, rcv_read: 1, ..ends };
            let image = image_at_death(&handed, 1 << 16, died_at, &record, &program).expect("an image");
            assert_eq!(image.ts_recent == 77, known, "published at {published_at} µs, dead at {died_at}");
        }
    }

    /// The program's numbers count only as far as they are plausible.
    #[test]
    fn an_implausible_program_is_not_believed() {
        let record = Record {
            state: State::Established as u8,
            snd_una: 7,
            snd_nxt: 9,
            snd_end: 9,
            rcv_nxt: 50,
            rcv_adv: 90,
            rcv_read: 40,
            ..Record::default()
        };
        for (queued, read, snd_end, unread) in [(12, 45, 12, 5), (3, 49, 9, 1), (7 + (1 << 16) + 1, 51, 9, 10)] {
            let image = at_death(&record, &Progress { flags: 0, queued, read }).expect("an image");
            assert_eq!((image.snd_end, image.unread), (snd_end, unread));
        }
    }
}
