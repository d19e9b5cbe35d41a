//! The properties of a frame that decide its order.

use baton_wire::{Flags, TcpFrame};

/// Whether a frame sets up a connection, and which connection it belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kind {
    /// The frame is a TCP segment with SYN set.
    pub sets_up: bool,
    /// A hash of the 4-tuple: the same for all segments of one direction of a connection, and almost always different
    /// for other connections; 0 for a frame that is not TCP.
    pub connection: u32,
}

impl Kind {
    /// The kind of a frame, by its headers alone: checksums are not verified.
    #[inline]
    pub fn of(frame: &[u8]) -> Kind {
        let Ok(parsed) = TcpFrame::parse(frame, 0) else { return Kind { sets_up: false, connection: 0 } };
        let flow = parsed.flow.to_bytes();
        let words = flow.chunks_exact(4).filter_map(|word| word.first_chunk::<4>());
        // A rotation and an odd multiplier for each word. A collision costs a frame its precedence, and nothing else.
        let mixed = words.fold(0u32, |sum, word| (sum.rotate_left(5) ^ u32::from_ne_bytes(*word)).wrapping_mul(0x9e37_79b1));
        Kind { sets_up: parsed.flags.contains(Flags::SYN), connection: mixed | 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use baton_wire::checksum::Sum;

    const SYN: u8 = 2;

    fn v4(flags: u8, client_port: u16, fragment: u16) -> Vec<u8> {
        let mut frame = [0; 12].to_vec();
        frame.extend([8, 0, 0x45, 0, 0, 40, 0, 1]);
        frame.extend(fragment.to_be_bytes());
        frame.extend([64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        let sum = Sum::new().bytes(&frame[14..]).finish();
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        frame.extend(client_port.to_be_bytes());
        frame.extend([0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 1, 0, 0, 0, 0, 0]);
        frame
    }

    #[test]
    fn a_syn_sets_up_its_connection() {
        let (syn, data) = (Kind::of(&v4(SYN, 4000, 0x4000)), Kind::of(&v4(0x18, 4000, 0x4000)));
        assert!(syn.sets_up && !data.sets_up);
        assert_eq!(syn.connection, data.connection);
        assert_ne!(syn.connection, Kind::of(&v4(SYN, 4001, 0x4000)).connection);
        assert_eq!(Kind::of(&v4(SYN, 4000, 0x2000)), Kind { sets_up: false, connection: 0 }, "a fragment");
        assert_eq!(Kind::of(&v4(SYN, 4000, 0)[..40]).connection, 0, "half a header");
    }

    #[test]
    fn ipv6_too() {
        let mut frame = [0; 12].to_vec();
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, 6, 64]);
        frame.extend(0..32);
        frame.extend([0, 80, 9, 9, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, SYN, 1, 0, 0, 0, 0, 0]);
        assert!(Kind::of(&frame).sets_up);
        frame[20] = 0;
        assert!(!Kind::of(&frame).sets_up, "an extension header");
    }
}
