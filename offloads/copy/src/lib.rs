//! The copy engine of a NIC, which brings the frames of several workers to the host: in what order.
//!
//! The paper's NIC kept requests in a stack, so that while a few connections kept its engine busy the SYNs of others were buried under their
//! data, and timed out (Li, Chen and Su, "Implementation of TCP Large Receive Offload on Multi-core NPU Platform", section V.B). Here each
//! worker has a queue, first in, first out. Queues take turns, so many bytes each ([`Settings::turn`]; deficit round robin, Shreedhar and
//! Varghese 1995), and segments that set up connections go before everything else, as long as they leave others their share.
//!
//! No I/O and no clock.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod engine;
mod kind;

pub use engine::{Counters, Engine, Settings};
pub use kind::Kind;
