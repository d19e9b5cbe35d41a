//! The tables of a worker's connections: a lookup by 4-tuple, and a timing wheel.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod lookup;
mod wheel;

pub use lookup::{Lookup, NO_SLOT, Search};
pub use wheel::Wheel;
