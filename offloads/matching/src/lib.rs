//! Matching of messages with receives by MPI's rules (MPI 4.1 section 3.5; the libfabric form with ignore bits): the
//! RMPP paper leaves this as future work (section 7). It can run on the host or on the NIC.
//!
//! A receive names a context (communicator), a source or any source, and a tag with bits to ignore. A message that
//! arrives is given the *oldest* posted receive that matches; a receive that is posted is given the *oldest* unexpected
//! message. Both are found by hashing, in time that does not depend on how many are posted or waiting: receives with
//! the same ignore bits form a *class*, in which a message can match only receives of one hash key. A lookup searches
//! each class in use once and takes the oldest match. Only if more than [`CLASSES`] kinds of wildcards are in use at
//! once are receives of further kinds searched one by one.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod classes;
mod groups;
mod list;
mod matching;

pub use classes::CLASSES;
pub use matching::{Arrival, Matching, Post, PostedId};

/// The fields of a message by which it is matched.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Message {
    /// Number of its sender.
    pub source: u32,
    /// Context (communicator).
    pub context: u32,
    /// Tag.
    pub tag: u64,
}

/// The criteria of a receive: which messages it matches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Criteria {
    /// Number of the sender; None for any (MPI_ANY_SOURCE).
    pub source: Option<u32>,
    /// Context (communicator).
    pub context: u32,
    /// Tag; its ignored bits do not matter.
    pub tag: u64,
    /// Bits of the tag that are not compared; all ones for MPI_ANY_TAG.
    pub ignore: u64,
}

impl Criteria {
    /// Whether a message fulfils these criteria.
    pub fn accepts(&self, message: &Message) -> bool {
        self.source.is_none_or(|source| source == message.source)
            && self.context == message.context
            && (self.tag ^ message.tag) & !self.ignore == 0
    }
}

/// All receives or unexpected messages that there is room for are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// In place of a number: none.
pub(crate) const NONE: u32 = u32::MAX;
