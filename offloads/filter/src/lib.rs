//! A filter for the frames that a NIC receives and sends: rules with nftables-like matches. The first rule that matches
//! decides.
//!
//! [`Rule`]s are parsed from text, and compiled into a [`Table`], which finds the rule of a packet in a time that does
//! not grow with the number of rules. A [`Filter`] applies a table to frames. State that outlives a table (counters,
//! token buckets, flows) is in [`words`] of the caller's memory, which several workers may share. Time is an argument,
//! in microseconds.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod filter;
mod flows;
mod limit;
mod packet;
mod rule;
mod table;
mod text;
pub mod words;

pub use filter::{Filter, Verdict};
pub use limit::{Limit, Unit};
pub use packet::{Direction, Packet, Part, Step};
pub use rule::{Action, Class, Matches, Ports, Prefix, Rule, State};
pub use table::{Installed, MAX_COUNT_RULES, MAX_ENTRIES, MAX_TUPLES, Refused, Table};
pub use text::{ParseError, check, parse, parse_all};
