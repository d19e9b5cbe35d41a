//! Decisions of whoever supervises a process: when the process counts as hung ([`Watchdog`]), when a connection is
//! tried on the NIC again ([`Retry`]), and how long connections keep away from a NIC that dies again and again
//! ([`CrashLoop`]).
//!
//! There is no I/O and no clock here: times are arguments, microseconds of a clock that does not run back. Agent,
//! keeper and simulator use the same code.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod crash_loop;
mod retry;
mod watchdog;

pub use crash_loop::{CrashLoop, LONGEST_WAIT, SHORTEST_WAIT};
pub use retry::{FIRST_RETRY, LONGEST_RETRY, Retry};
pub use watchdog::{Cause, LATE, Limits, Process, Sample, Verdict, Watchdog, Worker};
