//! The programs' listening sockets on the NIC, and the handshakes with their clients. Both are bounded: a SYN for which
//! the table of handshakes has no room is answered with a SYN cookie, and not remembered.

use baton_abi::Cid;
use baton_tables::Lookup;
use baton_tcp::{Config, Connection, Instant, Secret};
use baton_wire::frame::Link;
use baton_wire::{Endpoint, Flow, FlowKey};
use std::collections::BTreeMap;

/// Most handshakes that are remembered at a time.
const MOST_HANDSHAKES: usize = 512;

/// Retransmissions of a SYN-ACK before the handshake is given up (Linux's tcp_synack_retries).
const SYN_ACK_RETRIES: u8 = 5;

/// Microseconds for which acknowledgements of SYN cookies are accepted after the last one was sent, or after the start
/// of a NIC with a predecessor, whose handshakes it continues. No valid cookie is older.
const COOKIES_LAST: u64 = 134_000_000;

/// Bytes of receive memory that a connection has until it is handed off: its first window, which is not scaled.
pub(crate) const FIRST_WINDOW: u32 = 1 << 16;

/// Microseconds by which a handshake's time-out may be late, so that a flood causes few checks of the table.
const LATENESS: u64 = 10_000;

/// A listening socket, as the agent describes it.
#[derive(Clone, Debug)]
pub struct ListenerSettings {
    /// Its number with the agent.
    pub id: u32,
    /// The addresses and ports that it listens on.
    pub endpoints: Vec<Endpoint>,
    /// Bytes that the receive memory of its connections may grow to; decides the window scale.
    pub receive_limit: u32,
    /// MTU of the path to its clients, in bytes.
    pub mtu: u32,
    /// Time to live of its answers.
    pub ttl: u8,
}

/// A listener and the slots in which the NIC may make connections for it: as many as its accept queue has room for.
pub(crate) struct Listener {
    pub settings: ListenerSettings,
    pub granted: Vec<Cid>,
    /// It has been granted slots. Until then the kernel answers its clients.
    pub open: bool,
}

impl Listener {
    /// Accepts a slot.
    pub fn grant(&mut self, cid: Cid) {
        self.granted.push(cid);
        self.open = true;
    }

    /// The configuration of a connection with a client.
    pub fn config(&self, v4: bool) -> Config {
        Config {
            receive_buffer: FIRST_WINDOW,
            receive_limit: self.settings.receive_limit,
            mtu: self.settings.mtu,
            ip_header: if v4 { 20 } else { 40 },
            syn_retries: SYN_ACK_RETRIES,
            ..Config::default()
        }
    }
}

/// A connection whose handshake is under way.
pub(crate) struct Opening {
    pub tcp: Connection,
    pub flow: Flow,
    pub link: Link,
}

/// A handshake with a client.
pub(crate) struct Handshake {
    key: FlowKey,
    pub listener: u32,
    pub opening: Opening,
    /// It was entered because the acknowledgement of its SYN cookie found the accept queue full.
    pub by_cookie: bool,
}

/// The listeners of a worker and their handshakes.
pub(crate) struct Listeners {
    pub secret: Secret,
    listeners: BTreeMap<u32, Listener>,
    by_endpoint: BTreeMap<Endpoint, u32>,
    handshakes: Vec<Option<Handshake>>,
    free: Vec<u32>,
    lookup: Lookup,
    /// Microseconds: when the handshakes' time-outs are checked next; `u64::MAX` without any.
    due: u64,
    /// Microseconds: until when acknowledgements of SYN cookies are accepted.
    cookies_until: u64,
}

impl Listeners {
    /// Without any listeners. `succeeds`: an earlier NIC may have answered SYNs.
    pub fn new(hash_key: [u64; 4], succeeds: bool, now: u64) -> Listeners {
        Listeners {
            secret: Secret::new([hash_key[0] ^ hash_key[2].rotate_left(32), hash_key[1] ^ hash_key[3].rotate_left(32)]),
            listeners: BTreeMap::new(),
            by_endpoint: BTreeMap::new(),
            handshakes: Vec::new(),
            free: Vec::new(),
            lookup: Lookup::new(MOST_HANDSHAKES, hash_key),
            due: u64::MAX,
            cookies_until: if succeeds { now + COOKIES_LAST } else { 0 },
        }
    }

    pub fn is_empty(&self) -> bool {
        self.listeners.is_empty()
    }

    /// Adds a listener, or changes its settings. Handshakes in progress at endpoints that it keeps continue, since
    /// their clients were answered already.
    pub fn add(&mut self, settings: ListenerSettings) {
        let (granted, open) = self.take(settings.id).map_or((Vec::new(), false), |listener| (listener.granted, listener.open));
        self.forget_all(settings.id, &settings.endpoints);
        for endpoint in &settings.endpoints {
            self.by_endpoint.insert(*endpoint, settings.id);
        }
        self.listeners.insert(settings.id, Listener { settings, granted, open });
    }

    /// Removes a listener and its handshakes. The kernel answers further segments of their clients.
    pub fn remove(&mut self, id: u32) -> Option<Listener> {
        let removed = self.take(id)?;
        self.forget_all(id, &[]);
        Some(removed)
    }

    fn take(&mut self, id: u32) -> Option<Listener> {
        let removed = self.listeners.remove(&id)?;
        self.by_endpoint.retain(|_, listener| *listener != id);
        Some(removed)
    }

    /// Forgets a listener's handshakes, but for those at the endpoints `kept`.
    fn forget_all(&mut self, id: u32, kept: &[Endpoint]) {
        for index in 0..self.handshakes.len() as u32 {
            let ends = |one: &Handshake| one.listener == id && !kept.contains(&one.opening.flow.local);
            if self.handshakes[index as usize].as_ref().is_some_and(ends) {
                self.forget(index);
            }
        }
    }

    /// The listener at an endpoint.
    pub fn at(&self, endpoint: &Endpoint) -> Option<&Listener> {
        self.listeners.get(self.by_endpoint.get(endpoint)?)
    }

    pub fn get_mut(&mut self, id: u32) -> Option<&mut Listener> {
        self.listeners.get_mut(&id)
    }

    /// The handshake with a client.
    pub fn find(&self, frame: &FlowKey) -> Option<u32> {
        let admits = |index| matches!(self.handshakes.get(index as usize), Some(Some(found)) if found.key.admits(frame));
        self.lookup.find(frame, admits)
    }

    pub fn handshake(&mut self, index: u32) -> Option<&mut Handshake> {
        self.handshakes.get_mut(index as usize)?.as_mut()
    }

    /// Whether one more handshake can be remembered. If not, its SYN-ACK must be a SYN cookie.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty() || self.handshakes.len() < MOST_HANDSHAKES
    }

    /// Remembers a handshake. None if the table is full.
    pub fn remember(&mut self, listener: u32, opening: Opening, now: Instant) -> Option<u32> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.handshakes.len() < MOST_HANDSHAKES => {
                self.handshakes.push(None);
                self.handshakes.len() as u32 - 1
            }
            None => {
                self.cookies_until = now.0 + COOKIES_LAST;
                return None;
            }
        };
        let key = FlowKey::from(&opening.flow);
        self.lookup.insert(&key, index);
        self.due = self.due.min(opening.tcp.next_timeout().0.saturating_add(LATENESS));
        self.handshakes[index as usize] = Some(Handshake { key, listener, opening, by_cookie: false });
        Some(index)
    }

    /// Removes a handshake from the table.
    pub fn forget(&mut self, index: u32) -> Option<Handshake> {
        let handshake = self.handshakes.get_mut(index as usize)?.take()?;
        let handshakes = &self.handshakes;
        let key_of = |other: u32| handshakes[other as usize].as_ref().map_or(handshake.key, |found| found.key);
        self.lookup.remove(&handshake.key, index, key_of);
        self.free.push(index);
        Some(handshake)
    }

    /// Whether the acknowledgement of a SYN cookie may be one of this NIC's or its predecessor's.
    pub fn accepts_cookies(&self, now: Instant) -> bool {
        now.0 < self.cookies_until
    }

    /// When handshakes are to be checked next, in microseconds; `u64::MAX` without any.
    pub fn due(&self) -> u64 {
        self.due
    }

    /// The handshakes whose time has run out. The caller handles each, then calls [`Listeners::set_due`].
    pub fn expired(&self, now: Instant) -> Vec<u32> {
        let late = |handshake: &Handshake| handshake.opening.tcp.next_timeout() <= now;
        let found = self.handshakes.iter().enumerate().filter(|(_, handshake)| handshake.as_ref().is_some_and(late));
        found.map(|(index, _)| index as u32).collect()
    }

    /// Works out when the next handshake is due.
    pub fn set_due(&mut self) {
        let next = self.handshakes.iter().flatten().map(|handshake| handshake.opening.tcp.next_timeout().0).min();
        self.due = next.map_or(u64::MAX, |next| next.saturating_add(LATENESS));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_tcp::Segment;
    use baton_wire::Flags;

    fn endpoint(last: u8) -> Endpoint {
        Endpoint::v4([10, 0, 0, last], 80)
    }

    fn settings(id: u32, at: u8) -> ListenerSettings {
        ListenerSettings { id, endpoints: vec![endpoint(at)], receive_limit: 1 << 20, mtu: 1500, ttl: 64 }
    }

    fn opening(listeners: &Listeners, port: u16, now: Instant) -> Opening {
        let flow = Flow { local: endpoint(1), remote: Endpoint::v4([10, 0, 0, 9], port), device: 0 };
        let syn = Segment { seq: 7, flags: Flags::SYN, ..Segment::default() };
        let config = listeners.at(&endpoint(1)).expect("a listener").config(true);
        let numbers = listeners.secret.answer(&flow, &syn, &config, now);
        let mut tcp = Connection::accept(config, &syn, numbers.isn, numbers.ts_offset, now).expect("a SYN");
        assert!(tcp.poll_transmit(now, 0).is_some_and(|answer| answer.flags.contains(Flags::SYN | Flags::ACK)));
        Opening { tcp, flow, link: Link::default() }
    }

    #[test]
    fn a_full_table_remembers_no_more() {
        let now = Instant(1);
        assert!(Listeners::new([1, 2, 3, 4], true, now.0).accepts_cookies(now), "those of the NIC before it");
        let mut listeners = Listeners::new([1, 2, 3, 4], false, now.0);
        listeners.add(settings(5, 1));
        for port in 0..MOST_HANDSHAKES as u16 {
            let opening = opening(&listeners, port, now);
            assert!(listeners.remember(5, opening, now).is_some());
        }
        assert!(!listeners.accepts_cookies(now), "none was sent");
        let one_more = opening(&listeners, 60000, now);
        assert!(listeners.remember(5, one_more, now).is_none());
        let later = Instant(now.0 + COOKIES_LAST / 2);
        let one_more = opening(&listeners, 60000, later);
        assert!(listeners.remember(5, one_more, later).is_none());
        assert!(listeners.accepts_cookies(Instant(now.0 + COOKIES_LAST)));
        assert_eq!(listeners.expired(now), []);
        assert_eq!(listeners.expired(Instant(listeners.due())).len(), MOST_HANDSHAKES, "a SYN-ACK is due once more");
        let first =
            listeners.find(&FlowKey::from(&Flow { local: endpoint(1), remote: Endpoint::v4([10, 0, 0, 9], 0), device: 0 }));
        assert!(listeners.forget(first.expect("the first")).is_some() && listeners.free.len() == 1);
        listeners.remove(5);
        assert!(listeners.is_empty() && listeners.handshakes.iter().all(Option::is_none));
    }

    #[test]
    fn a_changed_listener_keeps_its_handshakes() {
        let now = Instant(1);
        let mut listeners = Listeners::new([0; 4], false, 0);
        listeners.add(settings(1, 1));
        let one = opening(&listeners, 5000, now);
        let key = FlowKey::from(&one.flow);
        assert!(listeners.remember(1, one, now).is_some());
        listeners.add(ListenerSettings { mtu: 1400, endpoints: vec![endpoint(2), endpoint(1)], ..settings(1, 1) });
        assert!(listeners.find(&key).is_some());
        listeners.add(settings(1, 2));
        assert!(listeners.find(&key).is_none(), "the kernel has what comes to this endpoint now");
    }

    #[test]
    fn a_changed_listener_keeps_its_slots() {
        let mut listeners = Listeners::new([0; 4], false, 0);
        listeners.add(settings(1, 1));
        listeners.get_mut(1).expect("it").grant(Cid::new(3, 1));
        listeners.add(settings(1, 2));
        assert!(listeners.at(&endpoint(1)).is_none());
        assert_eq!(listeners.at(&endpoint(2)).expect("it").granted, [Cid::new(3, 1)]);
    }
}
