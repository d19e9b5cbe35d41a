//! Offsets of header fields in bytes, each from the beginning of its own header.

/// The Ethernet header.
pub mod ethernet {
    /// Source MAC address, behind the destination's.
    pub const SOURCE: usize = 6;
    /// EtherType.
    pub const TYPE: usize = 12;
}

/// The IPv4 header (RFC 791 section 3.1), behind its byte of version and header length.
pub mod ipv4 {
    /// Type of service, with the ECN bits.
    pub const TOS: usize = 1;
    /// Total length of the packet.
    pub const LENGTH: usize = 2;
    /// Identification.
    pub const IDENT: usize = 4;
    /// Fragment flags and offset.
    pub const FRAGMENT: usize = 6;
    /// Time to live.
    pub const TTL: usize = 8;
    /// Protocol.
    pub const PROTOCOL: usize = 9;
    /// Header checksum.
    pub const CHECKSUM: usize = 10;
    /// Source address.
    pub const SOURCE: usize = 12;
    /// Destination address.
    pub const DESTINATION: usize = 16;
}

/// The IPv6 header (RFC 8200 section 3), behind its word of version, traffic class and flow label.
pub mod ipv6 {
    /// Length of what follows the header.
    pub const LENGTH: usize = 4;
    /// Next header.
    pub const NEXT_HEADER: usize = 6;
    /// Hop limit.
    pub const HOP_LIMIT: usize = 7;
    /// Source address.
    pub const SOURCE: usize = 8;
    /// Destination address.
    pub const DESTINATION: usize = 24;
}

/// The TCP header (RFC 9293 section 3.1), behind its ports.
pub mod tcp {
    /// Sequence number.
    pub const SEQ: usize = 4;
    /// Acknowledgement number.
    pub const ACK: usize = 8;
    /// Data offset (upper half of the byte) and reserved bits.
    pub const DATA_OFFSET: usize = 12;
    /// Flags.
    pub const FLAGS: usize = 13;
    /// Window.
    pub const WINDOW: usize = 14;
    /// Checksum.
    pub const CHECKSUM: usize = 16;
    /// Urgent pointer.
    pub const URGENT: usize = 18;
}
