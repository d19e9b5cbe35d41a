//! Which connections are on a NIC that has not room for all of them. There is no I/O and no clock here: what
//! connections have carried, and times, are arguments.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod budget;
mod heat;

pub use heat::{Choice, Demand, Heat, Place, Sample};
