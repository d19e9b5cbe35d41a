//! The state of the NIC's own addresses, as the NIC writes it to NIC memory (see [`crate::layout::nic::ADDRESSES`]).

/// Whether the NIC uses one of its addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum AddressState {
    /// There is no address in this entry.
    #[default]
    None = 0,
    /// It is being probed for.
    Probing = 1,
    /// It is in use.
    Used = 2,
    /// Another host has it; it is not used.
    Taken = 3,
}

impl AddressState {
    fn from_number(number: u8) -> AddressState {
        use AddressState::*;
        [Probing, Used, Taken].into_iter().find(|state| *state as u8 == number).unwrap_or(None)
    }
}

/// An address of the NIC's, and its counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AddressEntry {
    /// The address; IPv4 addresses are IPv4-mapped.
    pub address: [u8; 16],
    /// Whether it is used.
    pub state: AddressState,
    /// MAC address of the host that claimed it last; zeros if none has.
    pub rival: [u8; 6],
    /// Probes sent.
    pub probes: u64,
    /// Announcements sent.
    pub announcements: u64,
    /// ARP requests and neighbour solicitations answered.
    pub answers: u64,
    /// Requests not answered, since their sender asks too often.
    pub unanswered: u64,
    /// Frames by which another host claimed it.
    pub conflicts: u64,
}

impl AddressEntry {
    /// 8-byte words of an entry.
    pub const WORDS: usize = 8;

    /// The entry as words.
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let [high, low] = [0, 8].map(|at: usize| u64::from_be_bytes(core::array::from_fn(|n| self.address[at + n])));
        let [a, b, c, d, e, f] = self.rival;
        let state = u64::from_be_bytes([a, b, c, d, e, f, 0, self.state as u8]);
        [high, low, state, self.probes, self.announcements, self.answers, self.unanswered, self.conflicts]
    }

    /// The entry in these words.
    pub fn from_words(words: [u64; Self::WORDS]) -> AddressEntry {
        let [high, low, state, probes, announcements, answers, unanswered, conflicts] = words;
        let mut address = [0; 16];
        address[..8].copy_from_slice(&high.to_be_bytes());
        address[8..].copy_from_slice(&low.to_be_bytes());
        let [a, b, c, d, e, f, _, state] = state.to_be_bytes();
        let (rival, state) = ([a, b, c, d, e, f], AddressState::from_number(state));
        AddressEntry { address, state, rival, probes, announcements, answers, unanswered, conflicts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        let entry = AddressEntry {
            address: core::array::from_fn(|n| n as u8 + 1),
            state: AddressState::Taken,
            rival: [9, 8, 7, 6, 5, 4],
            probes: 1,
            announcements: 2,
            answers: 3,
            unanswered: u64::MAX,
            conflicts: 5,
        };
        assert_eq!(AddressEntry::from_words(entry.to_words()), entry);
        assert_eq!(AddressEntry::from_words([0; AddressEntry::WORDS]), AddressEntry::default());
        assert_eq!(AddressEntry::from_words([0, 0, 0xff, 0, 0, 0, 0, 0]).state, AddressState::None);
    }
}
