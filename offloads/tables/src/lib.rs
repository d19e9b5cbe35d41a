//! What every worker's connections are found by: a table of names, and a wheel of time-outs.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod lookup;
mod wheel;

pub use lookup::Lookup;
pub use wheel::Wheel;
