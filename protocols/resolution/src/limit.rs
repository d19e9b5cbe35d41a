//! A bound on the answers to each neighbour. A neighbour that asks too often uses up its own share, so that others are
//! still answered.

/// Number of shares. A hash of a neighbour's MAC address selects its share.
pub const SOURCES: usize = 256;
/// Most answers to the neighbours of one share in a second.
pub const MOST_ANSWERS: u8 = 10;
/// Microseconds of a second.
const SECOND: u64 = 1_000_000;

/// The part of a share that has been used.
#[derive(Clone, Copy, Default)]
struct Share {
    /// The second in which it was used last, counted from any moment.
    second: u64,
    answers: u8,
}

/// The shares of all neighbours.
pub(crate) struct Limit {
    shares: [Share; SOURCES],
    /// Key of the hash that gives a neighbour its share.
    key: u64,
}

impl Limit {
    pub fn new(key: u64) -> Limit {
        Limit { shares: [Share::default(); SOURCES], key }
    }

    /// Whether a neighbour may be answered now; if so, that is counted.
    pub fn admits(&mut self, mac: [u8; 6], now: u64) -> bool {
        let [a, b, c, d, e, f] = mac;
        // A multiplication spreads every bit to the highest bits. Because of the key, a neighbour cannot choose whose
        // share it uses up.
        let mixed =
            (u64::from_be_bytes([0, 0, a, b, c, d, e, f]) ^ self.key).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ (self.key << 1));
        let share = &mut self.shares[(mixed >> 56) as usize % SOURCES];
        let second = now / SECOND;
        if share.second != second {
            *share = Share { second, answers: 0 };
        }
        let admitted = share.answers < MOST_ANSWERS;
        share.answers += u8::from(admitted);
        admitted
    }
}
