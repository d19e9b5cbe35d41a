//! Which connections are on a NIC that has not room for all of them. There is no I/O and no clock here: what
//! connections have carried, and times, are arguments.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod budget;
mod gain;
mod heat;
mod pairs;

pub use gain::{Figures, Gain, Row, Seen, Side, Used, Why};
pub use heat::{Choice, Demand, Heat, Place, Sample};
