//! Wires: memory, TAP and AF_PACKET.

pub mod memory;
pub mod vnet;

pub use memory::{MemoryDevice, memory_pair};
pub use vnet::VnetDevice;
