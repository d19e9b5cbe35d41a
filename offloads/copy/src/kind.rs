//! What the engine has to know of a frame.

use baton_wire::frame::ETHERNET;

const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
const TCP: u8 = 6;
const SYN: u8 = 2;
/// More fragments, or an offset.
const FRAGMENT: u16 = 0x3fff;

/// Whether a frame sets up a connection, and which.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kind {
    /// It is a TCP segment with SYN set.
    pub sets_up: bool,
    /// The same for all segments of a connection one way, and nearly always another for others; 0 for what is not TCP.
    pub connection: u32,
}

impl Kind {
    /// Of a frame that need be neither whole nor true: what it says of itself is all that is asked.
    #[inline]
    pub fn of(frame: &[u8]) -> Kind {
        Kind::of_tcp(frame).unwrap_or(Kind { sets_up: false, connection: 0 })
    }

    #[inline]
    fn of_tcp(frame: &[u8]) -> Option<Kind> {
        let ip = frame.get(ETHERNET..)?;
        let kind: [u8; 2] = frame[ETHERNET - 2..ETHERNET].try_into().ok()?;
        let (addresses, tcp) = match kind {
            IPV4 if *ip.get(9)? == TCP && u16::from_be_bytes([ip[6], ip[7]]) & FRAGMENT == 0 => {
                (ip.get(12..20)?, ip.get(usize::from(ip[0] & 15) * 4..)?)
            }
            IPV6 if *ip.get(6)? == TCP => (ip.get(8..40)?, ip.get(40..)?),
            _ => return None,
        };
        let (ports, flags) = (tcp.first_chunk::<4>()?, *tcp.get(13)?);
        let words = addresses.chunks_exact(4).filter_map(|word| word.first_chunk::<4>()).chain([ports]);
        // An odd multiplier and a rotation for each word: a wrong match costs a turn, nothing else.
        let mixed = words.fold(0u32, |sum, word| (sum.rotate_left(5) ^ u32::from_ne_bytes(*word)).wrapping_mul(0x9e37_79b1));
        Some(Kind { sets_up: flags & SYN != 0, connection: mixed | 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn v4(flags: u8, client_port: u16, fragment: u16) -> Vec<u8> {
        let mut frame = [0; 12].to_vec();
        frame.extend([8, 0, 0x45, 0, 0, 40, 0, 1]);
        frame.extend(fragment.to_be_bytes());
        frame.extend([64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend(client_port.to_be_bytes());
        frame.extend([0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags]);
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
        frame.extend([0, 80, 9, 9, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, SYN]);
        assert!(Kind::of(&frame).sets_up);
        frame[20] = 0;
        assert!(!Kind::of(&frame).sets_up, "an extension header");
    }
}
