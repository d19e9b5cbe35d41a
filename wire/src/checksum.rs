//! The Internet checksum (RFC 1071).

/// A running one's-complement sum over 16-bit big-endian words.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sum(u64);

impl Sum {
    /// An empty sum.
    pub const fn new() -> Self {
        Sum(0)
    }

    /// Adds bytes. An odd length is padded with one zero byte, so only the last part of a message may have an odd
    /// length.
    #[must_use]
    pub fn bytes(mut self, data: &[u8]) -> Self {
        let mut words = data.chunks_exact(4);
        for word in &mut words {
            self.0 += u64::from(u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
        }
        let rest = words.remainder();
        let mut last = [0u8; 4];
        last[..rest.len()].copy_from_slice(rest);
        self.0 += u64::from(u32::from_be_bytes(last));
        self
    }

    /// Adds one 16-bit word.
    #[must_use]
    pub fn word(mut self, word: u16) -> Self {
        self.0 += u64::from(word);
        self
    }

    /// The sum folded to 16 bits, not complemented: the value that the checksum field of a partial checksum holds.
    pub fn folded(self) -> u16 {
        let mut sum = self.0;
        while sum >> 16 != 0 {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    /// The checksum as the header carries it: folded and complemented.
    pub fn finish(self) -> u16 {
        !self.folded()
    }
}

/// The sum over the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1) of a packet of `protocol` with `length`
/// bytes, its transport header included.
pub fn pseudo_header(source: &[u8], destination: &[u8], protocol: u8, length: usize) -> Sum {
    Sum::new().bytes(source).bytes(destination).word(u16::from(protocol)).word((length >> 16) as u16).word(length as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 1071 section 3.
    #[test]
    fn rfc_1071_example() {
        let data = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Sum::new().bytes(&data).folded(), 0xddf2);
        assert_eq!(Sum::new().bytes(&data).finish(), !0xddf2);
    }

    #[test]
    fn odd_tail_is_padded() {
        assert_eq!(Sum::new().bytes(&[0xab]).folded(), 0xab00);
        assert_eq!(Sum::new().bytes(&[1, 2, 3, 4, 5]).folded(), 0x0102 + 0x0304 + 0x0500);
    }
}
