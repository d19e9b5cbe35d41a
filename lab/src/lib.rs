//! Test beds, loads, measurement, report.
#![forbid(unsafe_code)]

pub mod probe;
pub mod soak;
pub mod statistics;
pub mod testbed;
