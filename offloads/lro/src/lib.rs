//! Large receive offload: segments of a connection are put in order and made one, before the kernel sees them (Li, Chen and Su,
//! "Implementation of TCP Large Receive Offload on Multi-core NPU Platform").
//!
//! No I/O, clock or randomness: frames come in with the time, and go out through a closure, at once or later. A connection's frames go out in
//! the order in which they came, but for what [`Mode::Reorder`] puts in order; nothing is ever dropped, and what is not merged goes out as it
//! came, bit for bit. One [`Lro`] belongs to one worker: its descriptors and buffers are its own, and there are no locks.
//!
//! What the paper leaves open, and how it is here: held segments are in an ordered tree with a cap, where the paper walks a list that an
//! attacker can make long; time-outs are in a wheel, where the paper has a thread that looks at every descriptor; the mean interval is taken
//! over some eight arrivals, since frames come in bursts; what has been delivered already is passed on, where the paper drops it, so that the
//! kernel can answer it.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod aggregate;
mod counters;
mod filter;
mod flow;
mod held;
mod lro;

pub use counters::{Counters, Reason};
pub use filter::Test;
pub use lro::Lro;

use serde::{Deserialize, Serialize};

/// What is aggregated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Nothing.
    #[default]
    Off,
    /// Segments that come in order, by the rules of Linux's GRO.
    InOrder,
    /// Segments in whatever order they come, within [`Settings::gap`] and the caps. Acknowledgement numbers, windows and timestamps may differ
    /// between the merged ones.
    Reorder,
}

/// What PSH means.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Push {
    /// What came so far goes out at once, as in GRO.
    #[default]
    Flush,
    /// Not for a connection in the middle of a bulk transfer, whose sender sets PSH wherever its writes happened to end: there the time-out
    /// decides.
    Bulk,
    /// Nothing, as in the paper: small messages wait for the time-out, too.
    Ignore,
}

/// How much, and for how long. Times in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// What is aggregated.
    pub mode: Mode,
    /// What PSH means.
    pub push: Push,
    /// Connections that are known at a time.
    pub connections: usize,
    /// Aggregates that are open at a time, 64 KB of memory each.
    pub aggregates: usize,
    /// IP bytes of an aggregate at most, up to 65535.
    pub most: usize,
    /// Shortest and longest time without a segment after which an aggregate goes out; between them it is ten times the mean interval.
    pub quiet: (u64, u64),
    /// Time after which an aggregate goes out however fast segments come.
    pub age: u64,
    /// Time for which a missing segment is waited for.
    pub gap: u64,
    /// Segments that one connection may hold out of order.
    pub held_segments: usize,
    /// Bytes that all connections may hold out of order.
    pub held_bytes: usize,
    /// Key of the table's hash: random.
    #[serde(skip)]
    pub hash_key: [u64; 4],
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            mode: Mode::Off,
            push: Push::Flush,
            connections: 1024,
            aggregates: 64,
            most: 65_535,
            quiet: (30, 200),
            age: 500,
            gap: 1000,
            held_segments: 1024,
            held_bytes: 16 << 20,
            hash_key: [0; 4],
        }
    }
}
