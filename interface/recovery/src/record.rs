//! Readers of a connection's recovery record, of the image in its slot, and of how far its program has come.

use baton_abi::layout::{block, nic, session, slot};
use baton_abi::{Cid, Record, record};
use baton_image::{Image, ImageError, MAX_ENCODED, State};
use baton_shm::Region;
use core::sync::atomic::Ordering;

const RECORD_BYTES: usize = record::WORDS * 8;

/// Returns the valid record, if the NIC ever published one. `base` is the offset of the connection's slot.
pub fn read_record(nic_memory: &Region, base: usize) -> Option<Record> {
    let published = nic_memory.words(base + slot::PUBLISHED, 1)[0].load(Ordering::Acquire);
    if published == 0 {
        return None;
    }
    let copy = base + slot::RECORDS + (published & 1) as usize * RECORD_BYTES;
    let words = nic_memory.words(copy, record::WORDS);
    Some(Record::from_words(std::array::from_fn(|at| words[at].load(Ordering::Relaxed))))
}

/// Invalidates the record in a slot.
pub fn unpublish(nic_memory: &Region, at: u32) {
    nic_memory.words(nic::slot(at) + slot::PUBLISHED, 1)[0].store(0, Ordering::Release);
}

/// Returns the sequence ranges that the NIC had received out of order: first sequence number, and the one behind the last.
pub fn read_ranges(nic_memory: &Region, base: usize, record: &Record) -> Vec<(u32, u32)> {
    let table = base + slot::RANGES + usize::from(record.ranges_table & 1) * slot::RANGES_BYTES;
    let count = usize::from(record.ranges).min(slot::RANGES_BYTES / 8);
    let words = nic_memory.words(table, count);
    words.iter().map(|word| word.load(Ordering::Relaxed)).map(|word| (word as u32, (word >> 32) as u32)).collect()
}

/// Reads the image in a slot.
///
/// # Errors
/// What is wrong with its bytes.
pub fn read_image(nic_memory: &Region, cid: Cid) -> Result<Image, ImageError> {
    let mut bytes = [0u8; MAX_ENCODED];
    let _ = nic_memory.read(nic::slot(cid.slot()) + slot::IMAGE, &mut bytes);
    Image::decode(&bytes)
}

/// How far a program has come with a connection, as the connection's block says. The program can write there whatever it likes.
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

    /// Returns the bytes that the program has not read, where the NIC believes that `told` are left before `data_end`: the NIC is
    /// notified of reads late.
    pub fn unread(&self, data_end: u32, told: u32) -> u32 {
        data_end.wrapping_sub(self.read).min(told)
    }
}

/// Makes the image of a connection at its NIC's death, `elapsed` microseconds after its handoff with the image `handed` and
/// `send_memory` bytes of send memory. The program's progress is believed only as far as it can be true. None if the record has
/// no state that an image can have.
pub fn image_at_death(handed: &Image, send_memory: u32, elapsed: u64, record: &Record, program: &Progress) -> Option<Image> {
    let mut state = State::from_number(record.state)?;
    if program.flags & block::FLAG_SHUT_DOWN != 0 {
        state = match state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            other => other,
        };
    }
    let acked_all = state.fin_acknowledged();
    let queued = program.queued;
    let plausible = queued.wrapping_sub(record.snd_una) <= send_memory && queued.wrapping_sub(record.snd_end) < 1 << 31;
    let snd_end = if acked_all || !plausible { record.snd_end } else { queued };
    let data_end = record.rcv_nxt.wrapping_sub(u32::from(state.fin_received()));
    let unread = program.unread(data_end, data_end.wrapping_sub(record.rcv_read));
    Some(Image {
        state,
        snd_una: record.snd_una,
        snd_nxt: record.snd_nxt,
        snd_end,
        snd_wnd: record.snd_wnd,
        snd_wl1: record.snd_wl1,
        max_window: record.max_window,
        rcv_nxt: record.rcv_nxt,
        rcv_adv: record.rcv_adv,
        unread,
        ts_recent: record.ts_recent,
        // A timestamp later than any that the NIC can have sent.
        ts_clock: handed.ts_clock.wrapping_add((elapsed / 1000) as u32 + 1),
        cwnd: record.cwnd,
        srtt: record.srtt,
        ..*handed
    })
}
