//! The connections of a session, found by number and by 4-tuple.

use crate::connection::Connection;
use crate::slab::Slab;
use baton_wire::Flow;
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::ops::{Deref, DerefMut};

/// Connections of a session. Dereferences to the slice of its places, some of which are empty.
#[derive(Default)]
pub(crate) struct Connections {
    places: Slab<Connection>,
    /// The number of the connection with a 4-tuple, by the tuple's hash. Of several with the same hash, the last one.
    by_flow: HashMap<u64, u32, BuildHasherDefault<DefaultHasher>>,
}

impl Connections {
    /// Returns the lowest free number.
    pub fn vacant(&mut self) -> u32 {
        self.places.vacant()
    }

    /// Puts a connection at its number.
    pub fn put(&mut self, connection: Connection) {
        self.by_flow.insert(hash(&connection.flow), connection.number);
        self.places.put(connection.number, connection);
    }

    /// Removes a connection and frees its number.
    pub fn remove(&mut self, number: u32) -> Option<Connection> {
        let connection = self.places.remove(number)?;
        let hash = hash(&connection.flow);
        if self.by_flow.get(&hash) == Some(&number) {
            self.by_flow.remove(&hash);
        }
        Some(connection)
    }

    /// Returns the connection with a 4-tuple.
    pub fn with_flow(&self, flow: &Flow) -> Option<&Connection> {
        self.places.get(*self.by_flow.get(&hash(flow))? as usize)?.as_ref().filter(|connection| connection.flow == *flow)
    }
}

fn hash(flow: &Flow) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(flow)
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
