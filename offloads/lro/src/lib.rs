//! Large receive offload: puts the segments of a connection in order and merges them before the kernel receives them
//! (Li, Chen and Su, "Implementation of TCP Large Receive Offload on Multi-core NPU Platform").
//!
//! No I/O, clock or randomness: frames come in with the time, and go out through a closure, at once or later. The
//! frames of a connection go out in the order in which they came in, except where [`Mode::Reorder`] puts them in order.
//! Nothing is ever dropped, and a frame that is not merged goes out unchanged. Each [`Lro`] belongs to one worker, with
//! descriptors and buffers of its own, and without locks.
//!
//! Differences from the paper: out-of-order segments are in an ordered tree with a cap, where the paper walks a list
//! that an attacker can make long. Time-outs are in a timing wheel, where the paper has a thread that looks at every
//! descriptor. The mean interval between segments is taken over some eight arrivals, since frames come in bursts.
//! Segments with data that went out already are passed on, where the paper drops them, so that the kernel can answer
//! them.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod aggregate;
mod counters;
mod descriptor;
mod filter;
mod lro;
mod out_of_order;

pub use counters::{Counters, Reason};
pub use filter::Test;
pub use lro::Lro;

use serde::{Deserialize, Serialize};

/// Which segments are aggregated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// None.
    #[default]
    Off,
    /// Segments that come in order, by the rules of Linux's GRO.
    InOrder,
    /// Segments in any order, within [`LroSettings::gap`] and the caps. Acknowledgement numbers, windows and timestamps
    /// may differ between merged segments.
    Reorder,
}

/// The effect of PSH.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Push {
    /// The aggregate goes out at once, as in GRO.
    #[default]
    Flush,
    /// As `Flush`, except in a bulk transfer, whose sender sets PSH wherever its writes end: there the time-out
    /// decides.
    Bulk,
    /// None, as in the paper: small messages wait for the time-out, too.
    Ignore,
}

/// The settings of large receive. Times are in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LroSettings {
    /// Which segments are aggregated.
    pub mode: Mode,
    /// The effect of PSH.
    pub push: Push,
    /// Number of connection descriptors: connections that can be aggregated at a time.
    pub connections: usize,
    /// Number of aggregates that can be open at a time, 64 KB of memory each.
    pub aggregates: usize,
    /// Largest IP packet of an aggregate in bytes, up to 65535.
    pub most: usize,
    /// Shortest and longest time without a segment after which an aggregate goes out. Between these limits it is ten
    /// times the mean interval between segments.
    pub quiet: (u64, u64),
    /// Time after which an aggregate goes out, however fast segments arrive.
    pub age: u64,
    /// Time for which a missing segment is waited for.
    pub gap: u64,
    /// Number of segments that one connection may hold out of order.
    pub held_segments: usize,
    /// Number of bytes that all connections together may hold out of order.
    pub held_bytes: usize,
    /// Key of the hash of the connection table; it must be random.
    #[serde(skip)]
    pub hash_key: [u64; 4],
}

impl Default for LroSettings {
    fn default() -> Self {
        LroSettings {
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
