//! A rule: its matches and its action.

use crate::limit::Limit;
use crate::packet::{Direction, Packet};
use baton_wire::frame::{PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP};
use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};

/// IP protocol number of UDP.
pub(crate) const PROTOCOL_UDP: u8 = 17;

/// The kind of packet that a frame carries.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Class {
    /// An IPv4 packet.
    V4,
    /// An IPv6 packet.
    V6,
    /// Anything else, by its EtherType.
    Other(u16),
}

/// EtherType of ARP.
pub(crate) const ETHERTYPE_ARP: u16 = 0x0806;

/// Whether a packet of TCP or UDP belongs to a flow that has had packets accepted in the opposite direction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// None has been, or this is a SYN.
    New,
    /// Some have been.
    Established,
}

/// An address prefix. The address is left-aligned in 128 bits, also an IPv4 one; bits behind the prefix are zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Prefix {
    /// The address.
    pub address: u128,
    /// Bits that count.
    pub length: u8,
}

impl Prefix {
    /// The mask of the first `length` bits.
    pub const fn mask(length: u8) -> u128 {
        if length == 0 { 0 } else { u128::MAX << (128 - length as u32) }
    }

    /// Whether an address has the prefix.
    pub fn contains(&self, address: u128) -> bool {
        address & Prefix::mask(self.length) == self.address
    }
}

/// A range of ports, both ends included.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ports {
    /// The lowest.
    pub first: u16,
    /// The highest.
    pub last: u16,
}

impl Ports {
    /// Whether a port is in the range.
    pub fn contains(&self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }
}

/// The matches of a rule: it matches a frame that fulfils all of these. None means "any".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Matches {
    /// From the wire, or to it.
    pub direction: Option<Direction>,
    /// Kind of packet.
    pub class: Option<Class>,
    /// IP protocol.
    pub protocol: Option<u8>,
    /// Source address.
    pub source: Option<Prefix>,
    /// Destination address.
    pub destination: Option<Prefix>,
    /// Source port.
    pub source_ports: Option<Ports>,
    /// Destination port.
    pub destination_ports: Option<Ports>,
    /// State of the flow.
    pub state: Option<State>,
}

impl Matches {
    /// Whether a packet in this direction, of a flow in this state, matches.
    pub fn matches(&self, direction: Direction, packet: &Packet, state: Option<State>) -> bool {
        self.direction.is_none_or(|wanted| wanted == direction)
            && self.class.is_none_or(|class| class == packet.class)
            && (self.protocol.is_none() || self.protocol == packet.protocol)
            && self.source.is_none_or(|prefix| prefix.contains(packet.source))
            && self.destination.is_none_or(|prefix| prefix.contains(packet.destination))
            && self.source_ports.is_none_or(|ports| ports.contains(packet.source_port))
            && self.destination_ports.is_none_or(|ports| ports.contains(packet.destination_port))
            && (self.state.is_none() || self.state == state)
    }

    /// Whether frames without an IP packet can match.
    pub(crate) fn any_class(&self) -> bool {
        let of_ip = self.protocol.is_some() || self.source.is_some() || self.destination.is_some() || self.state.is_some();
        !of_ip && !matches!(self.class, Some(Class::V4 | Class::V6))
    }
}

/// The action of a rule on a frame that it matches. The rule's counters count the frame in any case.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// It passes.
    Accept,
    /// It is dropped.
    Drop,
    /// It is dropped, and its sender gets a TCP reset or an ICMP message "administratively prohibited".
    Reject,
    /// It is only counted: the rules that follow decide.
    Count,
    /// It passes when the limit allows it; it is dropped if that is too late.
    Limit(Limit),
}

/// A rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// What it matches.
    pub matches: Matches,
    /// What it does.
    pub action: Action,
}

/// Writes a prefix of an address family as text.
struct PrefixText(Prefix, bool);

impl fmt::Display for PrefixText {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PrefixText(Prefix { address, length }, v4) = *self;
        let whole = if v4 { 32 } else { 128 };
        match v4 {
            true => write!(out, "{}", Ipv4Addr::from((address >> 96) as u32))?,
            false => write!(out, "{}", Ipv6Addr::from(address))?,
        }
        if length == whole { Ok(()) } else { write!(out, "/{length}") }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last { write!(out, "{}", self.first) } else { write!(out, "{}-{}", self.first, self.last) }
    }
}

/// The rule as [`crate::parse`] reads it.
impl fmt::Display for Rule {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Matches { direction, class, protocol, source, destination, source_ports, destination_ports, state } = self.matches;
        match direction {
            Some(Direction::In) => write!(out, "in ")?,
            Some(Direction::Out) => write!(out, "out ")?,
            None => {}
        }
        let family = if class == Some(Class::V6) { "ip6" } else { "ip" };
        match class {
            Some(Class::Other(ETHERTYPE_ARP)) => write!(out, "arp ")?,
            Some(Class::Other(other)) => write!(out, "ether {other:#06x} ")?,
            Some(_)
                if source.is_none() && destination.is_none() && !matches!(protocol, Some(PROTOCOL_ICMP | PROTOCOL_ICMPV6)) =>
            {
                write!(out, "{family} ")?
            }
            _ => {}
        }
        match protocol {
            Some(PROTOCOL_TCP) => write!(out, "tcp ")?,
            Some(PROTOCOL_UDP) => write!(out, "udp ")?,
            Some(PROTOCOL_ICMP) if class == Some(Class::V4) => write!(out, "icmp ")?,
            Some(PROTOCOL_ICMPV6) if class == Some(Class::V6) => write!(out, "icmpv6 ")?,
            Some(other) => write!(out, "proto {other} ")?,
            None => {}
        }
        for (name, prefix) in [("saddr", source), ("daddr", destination)] {
            if let Some(prefix) = prefix {
                write!(out, "{family} {name} {} ", PrefixText(prefix, class == Some(Class::V4)))?;
            }
        }
        for (name, ports) in [("sport", source_ports), ("dport", destination_ports)] {
            if let Some(ports) = ports {
                write!(out, "{name} {ports} ")?;
            }
        }
        match state {
            Some(State::New) => write!(out, "state new ")?,
            Some(State::Established) => write!(out, "state established ")?,
            None => {}
        }
        match self.action {
            Action::Accept => write!(out, "accept"),
            Action::Drop => write!(out, "drop"),
            Action::Reject => write!(out, "reject"),
            Action::Count => write!(out, "count"),
            Action::Limit(limit) => write!(out, "{limit}"),
        }
    }
}
