//! A link with rate, delay and faults, where the kernel has no netem: in virtual time in the simulator, in real time in
//! front of the NIC's wire.
#![forbid(unsafe_code)]

pub mod link;
mod rng;
mod wire;

pub use link::{Impairments, Link};
pub use rng::Rng;
pub use wire::EmulatedWire;
