//! Which connections are on a NIC: that has not room for all of them (by heat), or that does not pay for all (by
//! measured gain). There is no I/O, clock or randomness here: what connections have carried and cost, times and seeds
//! are arguments.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod budget;
mod gain;
mod heat;
mod pairs;
mod starts;

pub use gain::{Figures, Gain, Row, Seen, Side, Used, Why};
pub use heat::{Choice, Demand, Heat, Place, Sample, WORTH};
pub use starts::{Start, Starts};
