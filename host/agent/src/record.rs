//! Readers of a connection's recovery record, of its block and of the image in its slot.

use crate::connection::{Connection, Memory, OnNic};
use baton_abi::layout::{block, nic, slot};
use baton_abi::{Cid, Record, record};
use baton_image::{Image, ImageError, MAX_ENCODED, State};
use baton_linux::events::monotonic_micros;
use baton_linux::socket::Pieces;
use baton_shm::Region;
use std::sync::atomic::Ordering;

/// Returns the valid record, if the NIC ever published one. `base` is the offset of the connection's slot.
pub(crate) fn read_record(nic_memory: &Region, base: usize) -> Option<Record> {
    let published = nic_memory.words(base + slot::PUBLISHED, 1)[0].load(Ordering::Acquire);
    if published == 0 {
        return None;
    }
    let copy = base + slot::RECORDS + (published & 1) as usize * record_bytes();
    let words = nic_memory.words(copy, record::WORDS);
    Some(Record::from_words(std::array::from_fn(|at| words[at].load(Ordering::Relaxed))))
}

const fn record_bytes() -> usize {
    record::WORDS * 8
}

/// Invalidates the record in a slot.
pub(crate) fn unpublish(nic_memory: &Region, at: u32) {
    nic_memory.words(nic::slot(at) + slot::PUBLISHED, 1)[0].store(0, Ordering::Release);
}

/// Returns the sequence ranges that the NIC had received out of order: first sequence number, and the one behind the last.
pub(crate) fn read_ranges(nic_memory: &Region, base: usize, record: &Record) -> Vec<(u32, u32)> {
    let table = base + slot::RANGES + usize::from(record.ranges_table & 1) * slot::RANGES_BYTES;
    let count = usize::from(record.ranges).min(slot::MOST_RANGES);
    let words = nic_memory.words(table, count);
    words.iter().map(|word| word.load(Ordering::Relaxed)).map(|word| (word as u32, (word >> 32) as u32)).collect()
}

/// Reads the image in a slot.
pub(crate) fn read_image(nic_memory: &Region, cid: Cid) -> Result<Image, ImageError> {
    let mut bytes = [0u8; MAX_ENCODED];
    let _ = nic_memory.read(nic::slot(cid.slot()) + slot::IMAGE, &mut bytes);
    Image::decode(&bytes)
}

/// Makes the image of a connection at its NIC's death. What the program did is in its block, which is believed only as far as it
/// can be true.
pub(crate) fn image_at_death(on_nic: &OnNic, record: &Record, connection: &Connection) -> Option<Image> {
    let handed = &on_nic.image;
    let mut state = State::from_number(record.state)?;
    let flags = connection.block.load(block::FLAGS);
    if flags & 2 != 0 {
        state = match state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            other => other,
        };
    }
    let acked_all = state.fin_acknowledged();
    let queued = connection.block.load(block::QUEUED_SEQ);
    let plausible = queued.wrapping_sub(record.snd_una) <= on_nic.memory.send.1 && queued.wrapping_sub(record.snd_end) < 1 << 31;
    let snd_end = if acked_all || !plausible { record.snd_end } else { queued };
    let data_end = record.rcv_nxt.wrapping_sub(u32::from(state.fin_received()));
    let unread = unread_by_program(connection, data_end, data_end.wrapping_sub(record.rcv_read));
    let elapsed = (monotonic_micros() - on_nic.handed_off_at) / 1000;
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
        ts_clock: handed.ts_clock.wrapping_add(elapsed as u32 + 1),
        cwnd: record.cwnd,
        srtt: record.srtt,
        ..*handed
    })
}

/// Returns the bytes that the program has not read, where the NIC believes that `told` are left before `data_end`: the NIC is
/// notified of reads late.
pub(crate) fn unread_by_program(connection: &Connection, data_end: u32, told: u32) -> u32 {
    data_end.wrapping_sub(connection.block.load(block::READ_SEQ)).min(told)
}

/// Returns the memory pieces of an image's unread and unacknowledged bytes.
pub(crate) fn queues<'a>(region: &'a Region, memory: Memory, image: &Image) -> Option<(Pieces<'a>, Pieces<'a>)> {
    let unread = Pieces::of(region, memory.receive, image.read_seq(), image.unread)?;
    let unacknowledged = Pieces::of(region, memory.send, image.snd_una, image.send_queue())?;
    Some((unread, unacknowledged))
}
