//! Decisions of whoever supervises a process: when the process counts as hung ([`Watchdog`]), when a connection is
//! tried on the NIC again ([`Retry`]), and how long connections keep away from a NIC that dies again and again
//! ([`CrashLoop`]). Time in which the supervisor did not run itself does not count ([`Missed`]).
//!
//! There is no I/O and no clock here: times are arguments, microseconds of a clock that does not run back. Agent,
//! keeper and simulator use the same code.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod crash_loop;
mod missed;
mod retry;
mod watchdog;

pub use crash_loop::{CrashLoop, LONGEST_WAIT, Leave, SHORTEST_WAIT};
pub use missed::Missed;
pub use retry::{FIRST_RETRY, LONGEST_RETRY, Retry};
pub use watchdog::{Cause, Limits, Process, Sample, Verdict, Watchdog, Worker};
