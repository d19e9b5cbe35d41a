//! How often probes and announcements are sent.

/// Times in microseconds, and numbers of frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// The first probe is sent at a random time within this one, so that hosts that start together do not all probe at
    /// once.
    pub first_probe: u64,
    /// Number of probes.
    pub probes: u32,
    /// Least time between two probes; the most is twice that.
    pub between_probes: u64,
    /// Time after the last probe without an answer after which the address is used.
    pub settle: u64,
    /// Number of announcements.
    pub announcements: u32,
    /// Time between two announcements.
    pub between_announcements: u64,
    /// Least time between two defences of an address that another host uses, too.
    pub between_defences: u64,
}

impl Timing {
    /// The time between two probes of RFC 5227 section 1.1 (PROBE_MIN), in microseconds. IPv6's probes use the same
    /// times: RFC 4862 section 5.1 wants at least one probe (DupAddrDetectTransmits), and a second behind it
    /// (RetransTimer).
    pub const STANDARD: u64 = 1_000_000;

    /// The times of RFC 5227 section 1.1, in proportion to the least time between two probes.
    pub fn in_proportion(between_probes: u64) -> Timing {
        Timing {
            first_probe: between_probes,
            probes: 3,
            between_probes,
            settle: 2 * between_probes,
            announcements: 2,
            between_announcements: 2 * between_probes,
            between_defences: 10 * between_probes,
        }
    }
}

impl Default for Timing {
    fn default() -> Self {
        Timing::in_proportion(Timing::STANDARD)
    }
}
