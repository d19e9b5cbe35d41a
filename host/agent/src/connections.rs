//! The connections of a session, found by number and by 4-tuple.

use crate::connection::Connection;
use crate::slab::Slab;
use baton_wire::Flow;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::ops::{Deref, DerefMut};

/// Connections of a session. Dereferences to the slice of its places, some of which are empty.
#[derive(Default)]
pub(crate) struct Connections {
    places: Slab<Connection>,
    by_flow: HashMap<Flow, u32, BuildHasherDefault<DefaultHasher>>,
}

impl Connections {
    /// Returns the lowest free number.
    pub fn vacant(&mut self) -> u32 {
        self.places.vacant()
    }

    /// Puts a connection at its number.
    pub fn put(&mut self, connection: Connection) {
        self.by_flow.insert(connection.flow, connection.number);
        self.places.put(connection.number, connection);
    }

    /// Removes a connection and frees its number.
    pub fn remove(&mut self, number: u32) -> Option<Connection> {
        let connection = self.places.remove(number)?;
        if self.by_flow.get(&connection.flow) == Some(&number) {
            self.by_flow.remove(&connection.flow);
        }
        Some(connection)
    }

    /// Returns the connection with a 4-tuple.
    pub fn with_flow(&self, flow: &Flow) -> Option<&Connection> {
        self.places.get(*self.by_flow.get(flow)? as usize)?.as_ref()
    }
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
