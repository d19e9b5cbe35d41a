//! Links with faults, and a world of two endpoints with a clock and a seed. No I/O: the same link runs in virtual time here
//! and in real time under the NIC's wire.
#![forbid(unsafe_code)]

pub mod frames;
pub mod link;
pub mod pair;
pub mod rng;
pub mod stream;

pub use link::{Impairments, Link};
pub use rng::Rng;
