//! Where listeners are.

use super::{Listener, Listeners};
use baton_wire::Endpoint;
use std::net::SocketAddr;

impl Listeners {
    /// Whether a program has a listener that accepts connections to an endpoint of this host.
    pub fn accept_at(&self, local: Endpoint) -> bool {
        let (address, port) = (SocketAddr::from(local).ip(), local.port);
        let is_there = |one: &Listener| one.listening.local.port() == port && one.listening.accepts(address);
        self.by_id.values().any(|listener| !listener.sessions.is_empty() && is_there(listener))
    }
}
