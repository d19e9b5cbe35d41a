//! The Toeplitz hash.

use core::fmt;
use core::str::FromStr;

/// Bytes of a hash key: 36 for the input and 4 more.
pub const KEY_BYTES: usize = 40;
/// Number of half bytes (nibbles) of the longest input.
pub const NIBBLES: usize = 72;

/// A hash key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(pub [u8; KEY_BYTES]);

impl Key {
    /// The key of the verification suite in Microsoft's specification.
    pub const MICROSOFT: Key = Key([
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b, 0xcb,
        0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ]);

    /// A key that gives both directions of a connection the same hash (Woo and Park, "Scalable TCP Session Monitoring
    /// with Symmetric Receive-side Scaling"): 16 bits, repeated.
    pub const SYMMETRIC: Key = {
        let mut key = [0x6d; KEY_BYTES];
        let mut at = 1;
        while at < KEY_BYTES {
            key[at] = 0x5a;
            at += 2;
        }
        Key(key)
    };

    /// The 32 bits of the key that begin at bit `bit`.
    fn window(&self, bit: usize) -> u32 {
        let byte = |at: usize| u64::from(self.0.get(at).copied().unwrap_or(0));
        let five = (0..5).fold(0u64, |sum, at| sum << 8 | byte(bit / 8 + at));
        (five >> (8 - bit % 8)) as u32
    }
}

/// Writes the key as ethtool does: bytes in hexadecimal with colons between them.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if at == 0 { "" } else { ":" })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Error of parsing a [`Key`]: the text is not 40 bytes in hexadecimal with colons between them, `microsoft` or
/// `symmetric`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoKey;

impl FromStr for Key {
    type Err = NoKey;

    fn from_str(text: &str) -> Result<Key, NoKey> {
        match text {
            "microsoft" => return Ok(Key::MICROSOFT),
            "symmetric" => return Ok(Key::SYMMETRIC),
            _ => {}
        }
        let mut key = [0; KEY_BYTES];
        let mut parts = text.split(':');
        for byte in &mut key {
            let part = parts.next().filter(|part| part.len() == 2).ok_or(NoKey)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| NoKey)?;
        }
        if parts.next().is_some() { Err(NoKey) } else { Ok(Key(key)) }
    }
}

/// The hash with one key, as a table: what each value of each half byte of the input contributes.
#[derive(Clone)]
pub struct Toeplitz {
    tables: [[u32; 16]; NIBBLES],
}

impl Toeplitz {
    /// Makes the hash with this key.
    pub fn new(key: &Key) -> Toeplitz {
        let adds = |place: usize, value: usize| {
            (0..4).filter(|bit| value & 8 >> bit != 0).fold(0, |sum, bit| sum ^ key.window(place * 4 + bit))
        };
        Toeplitz { tables: core::array::from_fn(|place| core::array::from_fn(|value| adds(place, value))) }
    }

    /// Hashes up to 36 bytes; further ones are ignored.
    #[inline]
    pub fn hash(&self, input: &[u8]) -> u32 {
        let pairs = self.tables.chunks_exact(2);
        input
            .iter()
            .zip(pairs)
            .fold(0, |sum, (byte, pair)| sum ^ pair[0][usize::from(byte >> 4)] ^ pair[1][usize::from(byte & 15)])
    }

    /// The tables, for hardware that hashes in the same way: 16 words for each half byte.
    pub fn tables(&self) -> impl Iterator<Item = u32> + '_ {
        self.tables.iter().flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{IpAddr, SocketAddr};
    use proptest::prelude::*;
    use std::string::ToString;
    use std::vec::Vec;

    /// Microsoft's "Verifying the RSS hash calculation": destination, source, hash of addresses, hash with ports.
    const PUBLISHED: [(&str, &str, u32, u32); 8] = [
        ("161.142.100.80:1766", "66.9.149.187:2794", 0x323e_8fc2, 0x51cc_c178),
        ("65.69.140.83:4739", "199.92.111.2:14230", 0xd718_262a, 0xc626_b0ea),
        ("12.22.207.184:38024", "24.19.198.95:12898", 0xd2d0_a5de, 0x5c2b_394a),
        ("209.142.163.6:2217", "38.27.205.30:48228", 0x8298_9176, 0xafc7_327f),
        ("202.188.127.2:1303", "153.39.163.191:44251", 0x5d18_09c5, 0x10e8_28a2),
        ("[3ffe:2501:200:3::1]:1766", "[3ffe:2501:200:1fff::7]:2794", 0x2cc1_8cd5, 0x4020_7d3d),
        ("[ff02::1]:4739", "[3ffe:501:8::260:97ff:fe40:efab]:14230", 0x0f0c_461c, 0xdde5_1bbf),
        ("[fe80::200:f8ff:fe21:67cf]:38024", "[3ffe:1900:4545:3:200:f8ff:fe21:67cf]:44251", 0x4b61_e985, 0x02d1_feef),
    ];

    fn address(of: &SocketAddr) -> Vec<u8> {
        match of.ip() {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        }
    }

    #[test]
    fn all_published_hashes() {
        let toeplitz = Toeplitz::new(&Key::MICROSOFT);
        for (destination, source, addresses, with_ports) in PUBLISHED {
            let (destination, source): (SocketAddr, SocketAddr) = (destination.parse().unwrap(), source.parse().unwrap());
            let mut input = [address(&source), address(&destination)].concat();
            assert_eq!(toeplitz.hash(&input), addresses, "{source} to {destination}");
            input.extend([source.port().to_be_bytes(), destination.port().to_be_bytes()].concat());
            assert_eq!(toeplitz.hash(&input), with_ports, "{source} to {destination}, with ports");
        }
    }

    /// The hash by its definition, bit by bit.
    fn by_definition(key: &Key, input: &[u8]) -> u32 {
        let set = |bit: usize| input[bit / 8] & 0x80 >> (bit % 8) != 0;
        (0..input.len() * 8).filter(|bit| set(*bit)).fold(0, |sum, bit| sum ^ key.window(bit))
    }

    fn keys() -> impl Strategy<Value = Key> {
        proptest::collection::vec(any::<u8>(), KEY_BYTES).prop_map(|bytes| Key(bytes.try_into().unwrap()))
    }

    proptest! {
        #[test]
        fn tables_give_what_the_definition_does(key in keys(), input in proptest::collection::vec(any::<u8>(), 0..=36)) {
            prop_assert_eq!(Toeplitz::new(&key).hash(&input), by_definition(&key, &input));
        }

        #[test]
        fn a_symmetric_key_does_not_tell_directions(a in any::<[u8; 16]>(), b in any::<[u8; 16]>(), p in any::<[u8; 2]>(), q in any::<[u8; 2]>()) {
            let toeplitz = Toeplitz::new(&Key::SYMMETRIC);
            let there = [&a[..], &b, &p, &q].concat();
            let back = [&b[..], &a, &q, &p].concat();
            prop_assert_eq!(toeplitz.hash(&there), toeplitz.hash(&back));
            let there = [&a[..4], &b[..4], &p, &q].concat();
            let back = [&b[..4], &a[..4], &q, &p].concat();
            prop_assert_eq!(toeplitz.hash(&there), toeplitz.hash(&back));
        }

        #[test]
        fn keys_survive_their_text(key in keys()) {
            prop_assert_eq!(key.to_string().parse::<Key>(), Ok(key));
        }
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let whole = Key::MICROSOFT.to_string();
        for wrong in
            ["", "6d", "secret", &whole[3..], &std::format!("{whole}:00"), &whole.replace('6', "g"), &whole.replace(':', "")]
        {
            assert_eq!(wrong.parse::<Key>(), Err(NoKey), "{wrong}");
        }
        assert_eq!("microsoft".parse(), Ok(Key::MICROSOFT));
        assert_eq!("symmetric".parse(), Ok(Key::SYMMETRIC));
    }
}
