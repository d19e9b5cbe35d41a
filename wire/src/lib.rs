//! Frame formats: Ethernet, IPv4, IPv6, TCP, and the Internet checksum.
//!
//! Nothing here allocates, blocks or trusts a length that came from the wire.
#![no_std]
#![forbid(unsafe_code)]

pub mod checksum;
pub mod flow;
pub mod frame;
pub mod tcp;

pub use flow::{Endpoint, Flow};
pub use frame::{FrameError, TcpFrame};
pub use tcp::{Flags, SackBlocks, TcpOptions};
