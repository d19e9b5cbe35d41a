//! TCP (RFC 9293) without I/O, clock or randomness.
//!
//! A [`Connection`] starts from a connection image, a SYN or a call to [`Connection::connect`], and ends in an image.
//! Its caller feeds it segments ([`Connection::input`]), program actions and the time, puts received payload where the
//! connection says, and asks it for segments to send ([`Connection::poll_transmit`]) until there is none. Payload is
//! never held here: sent and received bytes are named by their sequence numbers.
//!
//! The files follow Linux's split: input, ack, output, timers, recovery, congestion; one concern each.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod ack;
mod congestion;
mod connection;
mod fast;
mod info;
mod input;
mod isn;
mod keepalive;
mod nic_state;
mod open;
mod output;
mod persist;
mod reassembly;
mod recovery;
mod rtt;
mod scoreboard;
pub mod segment;
pub mod seq;
mod time;
mod time_wait;
mod timers;
mod tuning;
mod window;

pub use connection::{Config, Connection, EndReason, State};
pub use info::{CongestionPhase, Info};
pub use isn::{Numbers, Secret};
pub use reassembly::Reassembly;
pub use segment::{Events, Received, Segment, Transmit};
pub use time::Instant;
