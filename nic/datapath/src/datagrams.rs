//! Programs' UDP sockets on the NIC: which socket receives a datagram, the sockets' rings, and the routes to the hosts
//! that they send to.

use baton_abi::layout::datagrams::MOST_HOSTS;
use baton_datagrams::{Direction, Place, Reader, Wish, Writer};
use baton_shm::Region;
use baton_wire::frame::Link;
use baton_wire::{Endpoint, Flow};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// A UDP socket, as the agent describes it.
#[derive(Clone, Debug)]
pub struct DatagramSettings {
    /// Its number with the agent.
    pub id: u32,
    /// The session of its program.
    pub session: u32,
    /// Its rings in session memory.
    pub place: Place,
    /// Most bytes in its receive ring at a time.
    pub limit: u32,
    /// The addresses and ports that it receives at.
    pub endpoints: Vec<Endpoint>,
    /// The peer, from which alone it receives, if it is connected.
    pub peer: Option<Endpoint>,
    /// MAC address of the host's interface.
    pub host: [u8; 6],
}

/// The route of a socket's datagrams to a host.
#[derive(Clone, Copy, Debug)]
pub struct DatagramWay {
    /// The address that they come from.
    pub source: [u8; 16],
    /// Their link header.
    pub link: Link,
    /// Bytes of the longest IP packet.
    pub mtu: u32,
}

/// A socket that the front worker serves.
pub(crate) struct Socket {
    pub settings: DatagramSettings,
    pub memory: Arc<Region>,
    pub receive: Writer,
    pub send: Reader,
    pub program_wish: Wish,
    pub own_wish: Wish,
    pub ways: BTreeMap<[u8; 16], DatagramWay>,
    /// It is in the list of sockets with datagrams to send.
    pub listed: bool,
}

impl Socket {
    fn new(settings: DatagramSettings, memory: &Arc<Region>) -> Option<Socket> {
        let place = settings.place;
        Some(Socket {
            receive: Writer::new(memory, &place, Direction::Receive, settings.limit)?,
            send: Reader::new(memory, &place, Direction::Send)?,
            program_wish: Wish::new(memory, &place, Direction::Receive),
            own_wish: Wish::new(memory, &place, Direction::Send),
            memory: memory.clone(),
            settings,
            ways: BTreeMap::new(),
            listed: false,
        })
    }

    /// Sets or removes the route to a host. False if there are too many.
    pub fn set_way(&mut self, host: [u8; 16], way: Option<DatagramWay>) -> bool {
        match way {
            None => _ = self.ways.remove(&host),
            Some(_) if self.ways.len() >= MOST_HOSTS && !self.ways.contains_key(&host) => return false,
            Some(way) => _ = self.ways.insert(host, way),
        }
        true
    }
}

/// Which socket receives at which address and port. Every worker has this; the front worker has the sockets, too.
#[derive(Default)]
pub(crate) struct Datagrams {
    at: BTreeMap<Endpoint, Vec<(Option<Endpoint>, u32)>>,
    pub sockets: BTreeMap<u32, Socket>,
    /// Sockets with datagrams to send, in turn.
    pub ready: VecDeque<u32>,
    /// Sockets whose programs' doorbells are to be rung.
    pub ringing: Vec<u32>,
    /// Identification of the next IPv4 packet (RFC 6864): the NIC's packets may be fragmented on their way.
    pub ident: u16,
}

impl Datagrams {
    pub fn is_empty(&self) -> bool {
        self.at.is_empty()
    }

    /// Records the addresses and ports at which a socket receives.
    pub fn note(&mut self, id: u32, endpoints: &[Endpoint], peer: Option<Endpoint>) {
        self.forget(id);
        for endpoint in endpoints {
            self.at.entry(*endpoint).or_default().push((peer, id));
        }
    }

    pub fn forget(&mut self, id: u32) {
        self.at.retain(|_, sockets| {
            sockets.retain(|(_, other)| *other != id);
            !sockets.is_empty()
        });
    }

    /// Whether a socket may receive at this address and port.
    pub fn receives_at(&self, local: &Endpoint) -> bool {
        self.at.contains_key(local)
    }

    /// The socket that gets a datagram: the one that is connected to its sender, else one that is not connected.
    pub fn receiver(&self, flow: &Flow) -> Option<u32> {
        let sockets = self.at.get(&flow.local)?;
        let with = |peer: Option<Endpoint>| sockets.iter().find(|(other, _)| *other == peer).map(|(_, id)| *id);
        with(Some(flow.remote)).or_else(|| with(None))
    }

    /// Adds a socket, or changes its settings. False if its rings are not inside of its session's memory.
    pub fn add(&mut self, settings: DatagramSettings, memory: &Arc<Region>) -> bool {
        let id = settings.id;
        let ways = self.sockets.remove(&id).map(|socket| socket.ways).unwrap_or_default();
        self.ready.retain(|other| *other != id);
        let Some(socket) = Socket::new(settings, memory) else { return false };
        self.sockets.insert(id, Socket { ways, listed: true, ..socket });
        // Listed at once, since a NIC that has died may have left datagrams in the send ring.
        self.ready.push_back(id);
        true
    }

    pub fn remove(&mut self, id: u32) -> Option<Socket> {
        self.forget(id);
        self.ready.retain(|other| *other != id);
        self.sockets.remove(&id)
    }

    /// The numbers of a session's sockets.
    pub fn of_session(&self, session: u32) -> Vec<u32> {
        self.sockets.values().filter(|socket| socket.settings.session == session).map(|socket| socket.settings.id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connected_socket_comes_before_one_that_is_not() {
        let (local, a, b) = (Endpoint::v4([10, 0, 0, 1], 7), Endpoint::v4([10, 0, 0, 2], 8), Endpoint::v4([10, 0, 0, 2], 9));
        let mut datagrams = Datagrams::default();
        datagrams.note(1, &[local], Some(a));
        let from = |remote| Flow { local, remote, device: 0 };
        assert_eq!((datagrams.receiver(&from(a)), datagrams.receiver(&from(b))), (Some(1), None));
        datagrams.note(2, &[local], None);
        assert_eq!((datagrams.receiver(&from(a)), datagrams.receiver(&from(b))), (Some(1), Some(2)));
        datagrams.note(1, &[local], Some(b));
        assert_eq!((datagrams.receiver(&from(a)), datagrams.receiver(&from(b))), (Some(2), Some(1)));
        datagrams.forget(1);
        datagrams.forget(2);
        assert!(datagrams.is_empty() && !datagrams.receives_at(&local));
    }
}
