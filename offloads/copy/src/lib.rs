//! The copy engine of a NIC: the order in which the frames of several workers reach the host.
//!
//! The paper's NIC kept requests in a stack: while a few connections kept its engine busy, the SYNs of others were
//! buried under their data and timed out (Li, Chen and Su, "Implementation of TCP Large Receive Offload on Multi-core
//! NPU Platform", section V.B). Here each worker has a queue, first in, first out. The queues take turns of
//! [`CopySettings::turn`] bytes (deficit round robin, Shreedhar and Varghese 1995). SYNs go before all other frames, as
//! long as the others get their share.
//!
//! No I/O and no clock.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod engine;
mod kind;

pub use engine::{CopySettings, Counters, Engine};
pub use kind::Kind;
