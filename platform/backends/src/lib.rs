//! Devices: memory, TAP and packet sockets.

mod large;
pub mod memory;
pub mod packet;
mod ring;
pub mod vnet;

pub use memory::{MemoryDevice, memory_pair};
pub use packet::{BesideKernel, Kernel, PacketDevice, Wire};
pub use vnet::VnetDevice;
