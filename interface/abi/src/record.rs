//! The recovery record: the state from which a connection continues after the NIC has died.
//!
//! Payload is not in the record: it lies in session memory at its sequence number. The positions up to which the
//! program has read and queued are in its connection block.
//!
//! A slot holds two copies of the record, each a cache line, and in its last word the number of the publication: the
//! greater one is valid. The NIC writes the other copy, and then publishes it by storing its number, which is the next
//! one. So a crash at any time leaves a complete record, and a publication touches one cache line. No segment is sent
//! that the published record does not cover.

/// Words of 8 bytes in one copy: a cache line, the number included.
pub const WORDS: usize = 8;
/// The word with the number of the publication; 0 means that the copy never was published.
pub const NUMBER: usize = 7;
/// The first words, which nearly every segment changes; the others change seldom.
pub const PREDICTED: usize = 3;

/// The difference of two consecutive numbers: the bytes of a copy, so that one bit of the number says which of the two
/// copies it is.
pub const STEP: u64 = 8 * WORDS as u64;

/// Offset in words of the copy with this number from the first one.
#[inline(always)]
pub const fn copy(number: u64) -> usize {
    (number / 8) as usize & WORDS
}

/// The number of the valid copy, given those of both; 0 if there is none.
pub const fn valid(numbers: [u64; 2]) -> u64 {
    if numbers[0] > numbers[1] { numbers[0] } else { numbers[1] }
}

/// The state that a recovery needs. Sequence numbers are modulo 2³².
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Record {
    /// Oldest unacknowledged sequence number.
    pub snd_una: u32,
    /// Next sequence number to send; all bytes before it may have been sent.
    pub snd_nxt: u32,
    /// Sequence number behind the last byte that the NIC has accepted from the program.
    pub snd_end: u32,
    /// The peer's window in bytes.
    pub snd_wnd: u32,
    /// Sequence number of the segment that last updated the peer's window.
    pub snd_wl1: u32,
    /// Largest window in bytes that the peer has advertised.
    pub max_window: u32,
    /// Next sequence number expected.
    pub rcv_nxt: u32,
    /// Right edge of the advertised window.
    pub rcv_adv: u32,
    /// Sequence number of the first byte that the program has not read, as of its last `nic_recvd`.
    pub rcv_read: u32,
    /// The peer's timestamp to echo (TS.Recent, RFC 7323 section 4.3).
    pub ts_recent: u32,
    /// Our timestamp clock when the record was written, milliseconds.
    pub ts_clock: u32,
    /// State, numbered as in the image.
    pub state: u8,
    /// Which of the slot's two tables of out-of-order ranges is valid: 0 or 1.
    pub ranges_table: u8,
    /// Number of ranges in that table.
    pub ranges: u8,
    /// Congestion window in segments.
    pub cwnd: u32,
    /// Smoothed round-trip time, microseconds.
    pub srtt: u32,
}

/// Two fields of 32 bits as a word.
#[inline(always)]
pub const fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

impl Record {
    /// Encodes the record as shared memory holds it, without the number.
    #[inline]
    pub fn to_words(&self) -> [u64; NUMBER] {
        // No `..`: a new field breaks this line until it has a place.
        let Record {
            snd_una,
            snd_nxt,
            snd_end,
            snd_wnd,
            snd_wl1,
            max_window,
            rcv_nxt,
            rcv_adv,
            rcv_read,
            ts_recent,
            ts_clock,
            state,
            ranges_table,
            ranges,
            cwnd,
            srtt,
        } = *self;
        [
            pair(rcv_nxt, rcv_adv),
            pair(snd_wl1, ts_recent),
            pair(ts_clock, snd_una),
            pair(snd_nxt, snd_end),
            pair(snd_wnd, max_window),
            pair(rcv_read, srtt),
            u64::from(state) | u64::from(ranges_table) << 8 | u64::from(ranges) << 16 | u64::from(cwnd) << 32,
        ]
    }

    /// Decodes a record from shared memory.
    pub fn from_words(words: [u64; NUMBER]) -> Record {
        let low = |at: usize| words[at] as u32;
        let high = |at: usize| (words[at] >> 32) as u32;
        Record {
            rcv_nxt: low(0),
            rcv_adv: high(0),
            snd_wl1: low(1),
            ts_recent: high(1),
            ts_clock: low(2),
            snd_una: high(2),
            snd_nxt: low(3),
            snd_end: high(3),
            snd_wnd: low(4),
            max_window: high(4),
            rcv_read: low(5),
            srtt: high(5),
            state: words[6] as u8,
            ranges_table: (words[6] >> 8) as u8,
            ranges: (words[6] >> 16) as u8,
            cwnd: (words[6] >> 32) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_their_words() {
        let record = Record {
            snd_una: 1,
            snd_nxt: 2,
            snd_end: 3,
            snd_wnd: 4,
            snd_wl1: 5,
            max_window: 6,
            rcv_nxt: 7,
            rcv_adv: 8,
            rcv_read: 9,
            ts_recent: 10,
            ts_clock: 11,
            state: 13,
            ranges_table: 1,
            ranges: 14,
            cwnd: 17,
            srtt: 18,
        };
        assert_eq!(Record::from_words(record.to_words()), record);
    }
}
