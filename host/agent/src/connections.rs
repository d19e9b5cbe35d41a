//! The connections of a session, found by number and by 4-tuple.

use crate::connection::Connection;
use crate::slab::Slab;
use baton_wire::Flow;
use std::collections::BTreeSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::ops::{Deref, DerefMut};

/// Most connections with the same hash that are compared: a program that chooses its 4-tuples for their hash gets no more time.
const MOST_WITH_HASH: usize = 16;

/// Connections of a session. Dereferences to the slice of its places, some of which are empty.
#[derive(Default)]
pub(crate) struct Connections {
    places: Slab<Connection>,
    /// Hash of a connection's 4-tuple, and its number. A tree, which does not double when it grows.
    by_flow: BTreeSet<(u32, u32)>,
}

impl Connections {
    /// Returns the lowest free number.
    pub fn vacant(&mut self) -> u32 {
        self.places.vacant()
    }

    /// Puts a connection at its number.
    pub fn put(&mut self, connection: Connection) {
        self.by_flow.insert((hash(&connection.flow), connection.number()));
        self.places.put(connection.number(), connection);
    }

    /// Removes a connection and frees its number.
    pub fn remove(&mut self, number: u32) -> Option<Connection> {
        let connection = self.places.remove(number)?;
        self.by_flow.remove(&(hash(&connection.flow), number));
        Some(connection)
    }

    /// Returns the connection with a 4-tuple.
    pub fn with_flow(&self, flow: &Flow) -> Option<&Connection> {
        let hash = hash(flow);
        let with_hash = self.by_flow.range((hash, 0)..=(hash, u32::MAX)).rev().take(MOST_WITH_HASH);
        let mut with_flow = with_hash.filter_map(|(_, number)| self.places.get(*number as usize)?.as_ref());
        with_flow.find(|connection| connection.flow == *flow)
    }
}

fn hash(flow: &Flow) -> u32 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(flow) as u32
}

impl Deref for Connections {
    type Target = [Option<Connection>];

    fn deref(&self) -> &[Option<Connection>] {
        &self.places
    }
}

impl DerefMut for Connections {
    fn deref_mut(&mut self) -> &mut [Option<Connection>] {
        &mut self.places
    }
}
