//! Receive-side scaling (Microsoft's RSS specification): the Toeplitz hash of a frame's addresses and ports selects a
//! *bucket*, an entry of the indirection table, which holds the number of the worker that the frame goes to.
//!
//! TCP segments are hashed with their ports. All other IP packets are hashed by their addresses alone, since the later
//! fragments of a datagram have no ports and must not overtake the first one. Frames that are not IP go to bucket 0.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod balance;
mod settings;
mod toeplitz;

pub use balance::{Move, next_move};
pub use settings::{Indirection, NoIndirection, RssSettings};
pub use toeplitz::{KEY_BYTES, Key, NIBBLES, Toeplitz};

use baton_wire::Flow;
use baton_wire::frame::{ETHERNET, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4, IPV4_FRAGMENT, IPV6, PROTOCOL_TCP};
use baton_wire::offset::{ethernet, ipv4, ipv6};

/// Number of entries of the indirection table.
pub const BUCKETS: usize = 128;
/// Largest number of workers.
pub const MOST_WORKERS: usize = 16;

/// The indirection table: the worker of each bucket.
pub type Table = [u8; BUCKETS];

/// The table that gives each of `workers` workers the same number of buckets, or one more.
pub fn even(workers: usize) -> Table {
    core::array::from_fn(|bucket| (bucket % workers.clamp(1, MOST_WORKERS)) as u8)
}

/// Where a frame comes from. Both directions of a connection get the same hash, computed as for frames that come from
/// the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum From {
    /// The wire: its source is the peer.
    Wire,
    /// This host: its destination is the peer.
    Host,
}

/// The input of the hash: remote and local address, then, for a TCP segment, remote and local port, in network order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Input {
    bytes: [u8; 36],
    length: usize,
}

impl Input {
    /// The bytes to be hashed.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    fn new(addresses: [&[u8]; 2], ports: Option<[&[u8]; 2]>) -> Input {
        let mut input = Input { bytes: [0; 36], length: 0 };
        for part in addresses.into_iter().chain(ports.into_iter().flatten()) {
            input.bytes[input.length..input.length + part.len()].copy_from_slice(part);
            input.length += part.len();
        }
        input
    }

    /// The input of a frame; None if it is no IP packet.
    #[inline]
    pub fn of(frame: &[u8], from: From) -> Option<Input> {
        let order = |source, destination| match from {
            From::Wire => [source, destination],
            From::Host => [destination, source],
        };
        let ports = |at: usize| Some(order(frame.get(at..at + 2)?, frame.get(at + 2..at + 4)?));
        match u16::from_be_bytes(*frame.get(ethernet::TYPE..)?.first_chunk()?) {
            ETHERTYPE_IPV4 => {
                let header = frame.get(ETHERNET..ETHERNET + IPV4)?;
                let whole = u16::from_be_bytes([header[ipv4::FRAGMENT], header[ipv4::FRAGMENT + 1]]) & IPV4_FRAGMENT == 0;
                let tcp = header[ipv4::PROTOCOL] == PROTOCOL_TCP && whole;
                let start = ETHERNET + usize::from(header[0] & 15) * 4;
                Some(Input::new(
                    order(&header[ipv4::SOURCE..ipv4::DESTINATION], &header[ipv4::DESTINATION..]),
                    tcp.then(|| ports(start)).flatten(),
                ))
            }
            ETHERTYPE_IPV6 => {
                let header = frame.get(ETHERNET..ETHERNET + IPV6)?;
                let tcp = header[ipv6::NEXT_HEADER] == PROTOCOL_TCP;
                Some(Input::new(
                    order(&header[ipv6::SOURCE..ipv6::DESTINATION], &header[ipv6::DESTINATION..]),
                    tcp.then(|| ports(ETHERNET + IPV6)).flatten(),
                ))
            }
            _ => None,
        }
    }

    /// The input of a connection's segments.
    pub fn of_flow(flow: &Flow) -> Input {
        let ports = [flow.remote.port.to_be_bytes(), flow.local.port.to_be_bytes()];
        let ports = Some([&ports[0][..], &ports[1][..]]);
        if flow.is_v4() {
            Input::new([&flow.remote.v4_bytes(), &flow.local.v4_bytes()], ports)
        } else {
            Input::new([&flow.remote.address, &flow.local.address], ports)
        }
    }
}

impl Toeplitz {
    /// The bucket of a frame.
    #[inline]
    pub fn bucket(&self, frame: &[u8], from: From) -> u8 {
        Input::of(frame, from).map_or(0, |input| self.bucket_of(&input))
    }

    /// The bucket of a hash input.
    #[inline]
    pub fn bucket_of(&self, input: &Input) -> u8 {
        (self.hash(input.bytes()) as usize % BUCKETS) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_wire::Endpoint;
    use std::vec::Vec;

    fn ipv4(protocol: u8, fragment: u16, options: usize) -> Vec<u8> {
        let mut frame = std::vec![0u8; 14 + 20 + options + 20];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45 + (options / 4) as u8;
        frame[20..22].copy_from_slice(&fragment.to_be_bytes());
        frame[23] = protocol;
        frame[26..30].copy_from_slice(&[10, 0, 0, 2]);
        frame[30..34].copy_from_slice(&[10, 0, 0, 1]);
        let ports = 34 + options;
        frame[ports..ports + 4].copy_from_slice(&[0x9c, 0x40, 0, 80]);
        frame
    }

    #[test]
    fn a_frame_and_its_connection_have_one_bucket() {
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40_000), device: 0 };
        let wanted = Input::of_flow(&flow);
        for options in [0, 4, 40] {
            assert_eq!(Input::of(&ipv4(6, 0x4000, options), From::Wire), Some(wanted));
        }
        let mut answer = ipv4(6, 0, 0);
        answer[26..34].rotate_left(4);
        answer[34..38].rotate_left(2);
        assert_eq!(Input::of(&answer, From::Host), Some(wanted));
    }

    #[test]
    fn fragments_and_other_protocols_have_no_ports() {
        for (protocol, fragment) in [(6, 0x2000), (6, 0x0010), (17, 0), (1, 0), (132, 0)] {
            let input = Input::of(&ipv4(protocol, fragment, 0), From::Wire).unwrap();
            assert_eq!(input.bytes(), [10, 0, 0, 2, 10, 0, 0, 1]);
        }
        assert_eq!(Input::of(&ipv4(6, 0, 0)[..36], From::Wire).unwrap().bytes().len(), 8, "a segment without its ports");
        for short in [0, 13, 20] {
            assert_eq!(Input::of(&ipv4(6, 0, 0)[..short], From::Wire), None);
        }
        let mut arp = ipv4(6, 0, 0);
        arp[13] = 6;
        assert_eq!(Toeplitz::new(&Key::MICROSOFT).bucket(&arp, From::Wire), 0);
    }
}
