//! The TCP header's flags and options (RFC 9293 section 3.1, RFC 7323, RFC 2018).

/// TCP header flags, as the low eight bits of the 13th and 14th header bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(pub u8);

impl Flags {
    /// No more data from the sender.
    pub const FIN: Flags = Flags(0x01);
    /// Synchronise sequence numbers.
    pub const SYN: Flags = Flags(0x02);
    /// Reset the connection.
    pub const RST: Flags = Flags(0x04);
    /// Push.
    pub const PSH: Flags = Flags(0x08);
    /// The acknowledgement field is significant.
    pub const ACK: Flags = Flags(0x10);
    /// The urgent pointer is significant.
    pub const URG: Flags = Flags(0x20);
    /// ECN echo (RFC 3168).
    pub const ECE: Flags = Flags(0x40);
    /// Congestion window reduced (RFC 3168).
    pub const CWR: Flags = Flags(0x80);

    /// Whether all flags of `other` are set.
    #[inline]
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// The flags of both.
    #[inline]
    pub const fn union(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// Whether any flag of `other` is set.
    #[inline]
    pub const fn intersects(self, other: Flags) -> bool {
        self.0 & other.0 != 0
    }
}

impl core::ops::BitOr for Flags {
    type Output = Flags;
    #[inline]
    fn bitor(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

impl core::fmt::Debug for Flags {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for (bit, name) in "FSRPAUEC".chars().enumerate() {
            if self.0 >> bit & 1 == 1 {
                write!(f, "{name}")?;
            }
        }
        Ok(())
    }
}

/// Up to four SACK blocks (RFC 2018 section 3), as (left edge, right edge): the sequence number of the first byte and
/// of the byte behind the last one.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct SackBlocks {
    blocks: [(u32, u32); 4],
    count: u8,
}

impl SackBlocks {
    /// Appends a block. A fifth one is ignored: 40 bytes of options hold no more than four.
    pub fn push(&mut self, left: u32, right: u32) {
        if usize::from(self.count) < self.blocks.len() {
            self.blocks[usize::from(self.count)] = (left, right);
            self.count += 1;
        }
    }

    /// The blocks present.
    #[inline]
    pub fn as_slice(&self) -> &[(u32, u32)] {
        &self.blocks[..usize::from(self.count)]
    }

    /// Whether there is no block.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Keeps the first `count` blocks.
    pub fn truncate(&mut self, count: usize) {
        self.count = self.count.min(count as u8);
    }
}

/// The options of one TCP header.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct TcpOptions {
    /// Maximum segment size in bytes (SYN only).
    pub mss: Option<u16>,
    /// Window scale shift (SYN only, RFC 7323 section 2).
    pub window_scale: Option<u8>,
    /// SACK permitted (SYN only).
    pub sack_permitted: bool,
    /// Timestamp value and echo reply (RFC 7323 section 3).
    pub timestamps: Option<(u32, u32)>,
    /// SACK blocks.
    pub sack: SackBlocks,
}

// Option kinds (RFC 9293 section 3.2, RFC 7323, RFC 2018).
const END: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const SACK: u8 = 5;
const TIMESTAMPS: u8 = 8;
/// Length field of the timestamps option in bytes.
const TIMESTAMPS_LENGTH: u8 = 10;
/// Largest shift of a window; a larger one in a SYN is taken for this (RFC 7323 section 2.3).
const MAX_WINDOW_SCALE: u8 = 14;

impl TcpOptions {
    /// Whether there is no option but, perhaps, timestamps.
    #[inline(always)]
    pub fn has_timestamps_at_most(&self) -> bool {
        self.mss.is_none() && self.window_scale.is_none() && !self.sack_permitted && self.sack.is_empty()
    }

    /// Reads the options area of a TCP header. A malformed option ends the reading, the options before it stay valid
    /// (RFC 9293 section 3.2, MUST-7).
    #[inline]
    pub fn parse(area: &[u8]) -> Self {
        // The layout of nearly every segment of a connection with timestamps (RFC 7323 appendix A): NOP, NOP,
        // timestamps.
        if let [NOP, NOP, TIMESTAMPS, TIMESTAMPS_LENGTH, v0, v1, v2, v3, e0, e1, e2, e3] = *area {
            let timestamps = Some((u32::from_be_bytes([v0, v1, v2, v3]), u32::from_be_bytes([e0, e1, e2, e3])));
            return TcpOptions { timestamps, ..TcpOptions::default() };
        }
        Self::parse_any(area)
    }

    fn parse_any(mut area: &[u8]) -> Self {
        let mut options = TcpOptions::default();
        while let [kind, rest @ ..] = area {
            match *kind {
                END => break,
                NOP => area = rest,
                kind => {
                    let Some(&length) = rest.first() else { break };
                    let length = usize::from(length);
                    if length < 2 || length > area.len() {
                        break;
                    }
                    options.read(kind, &area[2..length]);
                    area = &area[length..];
                }
            }
        }
        options
    }

    fn read(&mut self, kind: u8, value: &[u8]) {
        match (kind, value) {
            (MSS, [a, b]) => self.mss = Some(u16::from_be_bytes([*a, *b])),
            (WINDOW_SCALE, [shift]) => self.window_scale = Some((*shift).min(MAX_WINDOW_SCALE)),
            (SACK_PERMITTED, []) => self.sack_permitted = true,
            (TIMESTAMPS, v) if v.len() == 8 => self.timestamps = Some((be32(&v[..4]), be32(&v[4..]))),
            (SACK, v) if v.len() % 8 == 0 => {
                for block in v.chunks_exact(8) {
                    self.sack.push(be32(&block[..4]), be32(&block[4..]));
                }
            }
            _ => {}
        }
    }

    /// Number of bytes that [`TcpOptions::emit`] writes: a multiple of four, at most 40.
    #[inline]
    pub fn length(&self) -> usize {
        let mut length = 0;
        if self.mss.is_some() {
            length += 4;
        }
        if self.window_scale.is_some() {
            length += 4;
        }
        if self.sack_permitted {
            length += 4;
        }
        if self.timestamps.is_some() {
            length += 12;
        }
        if !self.sack.is_empty() {
            length += 4 + 8 * self.sack.as_slice().len();
        }
        length
    }

    /// Writes the options, each padded with NOPs in front so that its values are aligned, and returns the number of
    /// bytes written.
    ///
    /// # Panics
    /// If `out` is shorter than [`TcpOptions::length`].
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut at = 0;
        if let Some((value, echo)) = self.timestamps {
            out[..4].copy_from_slice(&[NOP, NOP, TIMESTAMPS, TIMESTAMPS_LENGTH]);
            out[4..8].copy_from_slice(&value.to_be_bytes());
            out[8..12].copy_from_slice(&echo.to_be_bytes());
            at = 12;
        }
        if let Some(mss) = self.mss {
            out[at..at + 2].copy_from_slice(&[MSS, 4]);
            out[at + 2..at + 4].copy_from_slice(&mss.to_be_bytes());
            at += 4;
        }
        if let Some(shift) = self.window_scale {
            out[at..at + 4].copy_from_slice(&[NOP, WINDOW_SCALE, 3, shift]);
            at += 4;
        }
        if self.sack_permitted {
            out[at..at + 4].copy_from_slice(&[NOP, NOP, SACK_PERMITTED, 2]);
            at += 4;
        }
        let blocks = self.sack.as_slice();
        if !blocks.is_empty() {
            out[at..at + 4].copy_from_slice(&[NOP, NOP, SACK, 2 + 8 * blocks.len() as u8]);
            at += 4;
            for (left, right) in blocks {
                out[at..at + 4].copy_from_slice(&left.to_be_bytes());
                out[at + 4..at + 8].copy_from_slice(&right.to_be_bytes());
                at += 8;
            }
        }
        at
    }
}

#[inline]
fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_survive_a_round_trip() {
        let mut options = TcpOptions { timestamps: Some((7, 9)), ..TcpOptions::default() };
        options.sack.push(1, 2);
        options.sack.push(u32::MAX, 5);
        options.sack.push(30, 40);
        let mut out = [0u8; 40];
        let length = options.emit(&mut out);
        assert_eq!(length, options.length());
        assert_eq!(TcpOptions::parse(&out[..length]), options);

        let syn = TcpOptions {
            mss: Some(1460),
            window_scale: Some(7),
            sack_permitted: true,
            timestamps: Some((1, 0)),
            ..TcpOptions::default()
        };
        let length = syn.emit(&mut out);
        assert_eq!(length, syn.length());
        assert_eq!(TcpOptions::parse(&out[..length]), syn);
    }

    /// Option lengths of zero, of one and beyond the end neither loop nor read outside the area.
    #[test]
    fn malformed_options_end_the_reading() {
        for area in [&[8u8, 0][..], &[8, 1, 1], &[5, 10, 0, 0], &[2], &[1, 1, 8, 10, 0, 0], &[5, 40, 1]] {
            assert_eq!(TcpOptions::parse(area), TcpOptions::default(), "{area:?}");
        }
        let good_then_bad = [2, 4, 5, 180, 3, 0];
        assert_eq!(TcpOptions::parse(&good_then_bad).mss, Some(1460));
    }
}
