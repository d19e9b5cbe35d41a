//! Receive → lookup → TCP → transmit. One worker, run to completion, no locks, no type of the operating system's: the simulator
//! runs this as it is.
//!
//! A [`Worker`] stands between two devices, the *host* (the kernel's interface) and the *wire*. Frames of connections that it does
//! not own cross it untouched. For those that it owns it is the TCP: it puts payload straight into the program's memory, takes
//! payload from there, and talks to the program through rings.
#![forbid(unsafe_code)]

mod acknowledged;
mod among;
mod backlog;
mod balance;
mod commands;
mod counters;
mod custody;
mod delivery;
mod fragments;
mod growth;
mod held;
mod icmp;
mod offloaded;
mod peers;
mod posted;
mod program;
mod transmit;
mod worker;

pub use custody::Refusal;
pub use peers::{Peers, Registers, crossbar};
pub use worker::{Offloads, Settings, Worker};
