//! An address of the NIC's own, as it is written by users: `10.1.0.50`, `10.1.0.50/24`, `fd00::50/64`.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An address that the NIC is to have, and the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnAddress {
    /// The address.
    pub address: IpAddr,
    /// Length of its network's prefix in bits; that of the whole address if it is not known.
    pub prefix: u8,
}

impl OwnAddress {
    /// # Errors
    /// With the reason, if no host can have this address for itself.
    pub fn check(&self) -> Result<(), String> {
        let OwnAddress { address, prefix } = *self;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        if prefix == 0 || prefix > bits {
            return Err(format!("{address}/{prefix}: a prefix has 1 to {bits} bits here"));
        }
        let why = match address {
            _ if address.is_unspecified() => "is no host's address",
            _ if address.is_loopback() => "is a loopback address, which is not on any link",
            _ if address.is_multicast() => "is a multicast address",
            IpAddr::V4(v4) => why_not_v4(v4, prefix),
            IpAddr::V6(v6) => why_not_v6(v6, prefix),
        };
        if why.is_empty() { Ok(()) } else { Err(format!("{address} {why}")) }
    }
}

/// The reason why no host can have this address; empty if a host can.
fn why_not_v4(address: Ipv4Addr, prefix: u8) -> &'static str {
    let host_bits = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
    let host = u32::from(address) & host_bits;
    if address.octets()[0] >= 240 || address.octets()[0] == 0 {
        return "is a reserved address";
    }
    // A network of two addresses has no broadcast address (RFC 3021).
    match host {
        _ if prefix >= 31 => "",
        0 => "is the address of its network, not of a host",
        _ if host == host_bits => "is the broadcast address of its network",
        _ => "",
    }
}

fn why_not_v6(address: Ipv6Addr, prefix: u8) -> &'static str {
    let host_bits = u128::MAX.checked_shr(prefix.into()).unwrap_or(0);
    if address.to_ipv4_mapped().is_some() {
        return "is an IPv4 address in another form";
    }
    if address.is_unicast_link_local() {
        return "is link-local: connections of such addresses stay in the kernel";
    }
    if prefix < 127 && u128::from(address) & host_bits == 0 {
        return "is the address of its network's routers (RFC 4291 section 2.6.1)";
    }
    ""
}

impl FromStr for OwnAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<OwnAddress, String> {
        let wrong = || format!("{text:?} is not an address: write for example 10.1.0.50/24 or fd00::50/64");
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix.parse().map_err(|_| wrong())?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let parsed = OwnAddress { address, prefix: prefix.unwrap_or(if address.is_ipv4() { 32 } else { 128 }) };
        parsed.check().map(|()| parsed)
    }
}

impl fmt::Display for OwnAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)
    }
}

/// The state of an address of the NIC's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// It is being probed for.
    Probing,
    /// It is in use.
    Used,
    /// Another host has it, so it is not used.
    Taken,
    /// It cannot be used here.
    Refused,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Standing::Probing => "probing",
            Standing::Used => "used",
            Standing::Taken => "taken",
            Standing::Refused => "refused",
        })
    }
}

/// An address of the NIC's in a list.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AddressInfo {
    /// The address.
    pub address: IpAddr,
    /// Name of the device by which it is reached; empty if there is none.
    pub device: String,
    /// Its state.
    pub standing: Standing,
    /// Why it is not used, or which host also claims it; empty if neither.
    pub reason: String,
    /// Probes sent.
    pub probes: u64,
    /// Announcements sent.
    pub announcements: u64,
    /// ARP requests and neighbour solicitations that the NIC has answered.
    pub answers: u64,
    /// Requests that it has not answered, since their sender asks too often.
    pub unanswered: u64,
    /// Frames by which another host claimed it.
    pub conflicts: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_hosts_are_taken() {
        for (text, prefix) in
            [("10.1.0.50/24", 24), ("10.1.0.50", 32), ("10.1.0.0/31", 31), ("fd00::50/64", 64), ("fd00::50", 128)]
        {
            let parsed: OwnAddress = text.parse().expect(text);
            assert_eq!((parsed.prefix, text.starts_with(&parsed.to_string())), (prefix, true), "{text}");
        }
    }

    #[test]
    fn others_are_refused_with_the_reason() {
        for (text, why) in [
            ("", "is not an address"),
            ("10.1.0", "is not an address"),
            ("10.1.0.50/x", "is not an address"),
            ("10.1.0.50/300", "is not an address"),
            ("10.1.0.50/33", "1 to 32 bits"),
            ("10.1.0.50/0", "1 to 32 bits"),
            ("fd00::50/129", "1 to 128 bits"),
            ("localhost", "is not an address"),
            ("0.0.0.0", "no host's"),
            ("::", "no host's"),
            ("127.0.0.9/8", "loopback"),
            ("::1", "loopback"),
            ("224.0.0.1", "multicast"),
            ("ff02::1", "multicast"),
            ("255.255.255.255", "reserved"),
            ("10.1.0.255/24", "broadcast"),
            ("10.1.0.0/24", "of its network"),
            ("fd00::/64", "routers"),
            ("fe80::1", "link-local"),
            ("::ffff:10.1.0.50", "IPv4"),
        ] {
            let error = text.parse::<OwnAddress>().expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
