//! Frame formats: Ethernet, IPv4, IPv6, TCP, and the Internet checksum.
//!
//! Nothing here allocates, blocks or trusts a length that came from the wire.
#![no_std]
#![forbid(unsafe_code)]

pub mod checksum;
pub mod flow;
pub mod frame;
pub mod plain;
pub mod tcp;

pub use flow::{Endpoint, Flow, Name};
pub use frame::{FrameError, TcpFrame};
pub use plain::{Acknowledgement, Plain};
pub use tcp::{Flags, SackBlocks, TcpOptions};
