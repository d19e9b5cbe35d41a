//! Frame formats: Ethernet, ARP, IPv4, IPv6, neighbour discovery, TCP, RMPP, refusals, and the Internet checksum.
//!
//! Nothing here allocates or blocks, and every length that came from the wire is checked before it is used.
#![no_std]
#![forbid(unsafe_code)]

pub mod arp;
pub mod checksum;
pub mod flow;
pub mod frame;
pub mod glance;
pub mod neighbour;
pub mod offset;
pub mod plain;
pub mod refusal;
pub mod rmpp;
pub mod tcp;

pub use arp::{Arp, Malformed};
pub use flow::{Endpoint, Flow, FlowKey};
pub use frame::{FrameError, TcpFrame};
pub use glance::Glance;
pub use neighbour::Neighbour;
pub use plain::{Acknowledgement, Fields, Plain, Usual};
pub use tcp::{Flags, SackBlocks, TcpOptions};
