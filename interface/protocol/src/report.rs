//! The report on a group's connections and their moves.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The reason of a connection without any other reason: no move was due.
pub const NOT_ASKED: &str = "nothing has asked for a move";

/// What happened to the connections of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Connections that were registered.
    pub connections: u64,
    /// Moves made, either way.
    pub moves: u64,
    /// Connections by the number of moves that they made.
    pub connections_by_moves: BTreeMap<u32, u64>,
    /// Connections that never moved: the longest life in milliseconds, by the reason why they stayed.
    pub unmoved: BTreeMap<String, u64>,
    /// Restores that the program caused, by cause.
    pub given_back: BTreeMap<String, u64>,
    /// Moves that did not take place, by reason.
    pub stayed: BTreeMap<String, u64>,
    /// Connections that were lost in a move.
    pub resets: u64,
    /// Moves that a system call refused.
    pub errors: u64,
}
