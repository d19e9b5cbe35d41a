//! Reacts to changes on the host while connections are on the NIC: routes, addresses, neighbours, IPsec policies,
//! firewall rules, and BPF programs at control groups. Connections that a change affects, or may affect, are restored
//! to the kernel, which applies it.

use crate::agent::Agent;
use crate::calls::{Calls, Completion, outsider};
use crate::connection::{Connection, OnNic};
use crate::ground::{Ground, Shape};
use crate::moves::named;
use crate::session::{Host, Session};
use baton_abi::{Control, Message, Operation};
use baton_core::{ELSEWHERE, Stage};
use baton_device::NOWHERE;
use baton_image::Image;
use baton_linux::foreign::{self, Foreign};
use baton_linux::icmp::TooBig;
use baton_linux::netlink::{Changes, NETFILTER, ROUTE, ROUTE_CHANGES, RULE_CHANGES};
use baton_linux::rtnetlink;
use baton_linux::tcp_info::TcpInfo;
use baton_log::warning;
use baton_moves::{Custody, Refusal};
use baton_offloads::RouteChange;
use baton_steering::Steer;
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

/// Netlink and ICMP sockets on which the agent receives notifications of changes.
pub(crate) struct Watched {
    pub routes: Changes,
    /// None where the kernel has no nftables.
    pub rules: Option<Changes>,
    /// ICMP "fragmentation needed" and ICMPv6 "packet too big" messages, where this process may receive them.
    pub too_big: Vec<TooBig>,
}

impl Watched {
    pub fn open() -> io::Result<Watched> {
        let routes = Changes::listen(ROUTE, ROUTE_CHANGES)?;
        let too_big = [false, true].into_iter().filter_map(|v6| TooBig::listen(v6).ok()).collect();
        Ok(Watched { routes, rules: Changes::listen(NETFILTER, RULE_CHANGES).ok(), too_big })
    }
}

/// Summary of the notifications read from the route socket.
#[derive(Default)]
struct RouteChanges {
    /// Links, their settings or their addresses changed.
    links: bool,
    /// Routes, rules, addresses or links changed, or notifications were lost.
    routes: bool,
    /// Changed neighbours, by address and device: the link address, or None if the kernel would use none.
    neighbours: BTreeMap<(IpAddr, u32), Option<[u8; 6]>>,
}

impl RouteChanges {
    fn collect(changes: &Changes) -> RouteChanges {
        const RTM_NEWLINK: u16 = 16;
        const RTM_DELLINK: u16 = 17;
        const RTM_NEWADDR: u16 = 20;
        const RTM_DELADDR: u16 = 21;
        const RTM_NEWNEIGH: u16 = 28;
        const RTM_DELNEIGH: u16 = 29;
        const RTM_NEWNETCONF: u16 = 80;
        const RTM_DELNETCONF: u16 = 81;
        let mut changed = RouteChanges::default();
        changes.each(|kind, body| match kind {
            RTM_NEWNETCONF | RTM_DELNETCONF => changed.links = true,
            RTM_NEWNEIGH | RTM_DELNEIGH => match rtnetlink::parse_neighbour(body) {
                Some((device, address, found)) => {
                    changed.neighbours.insert((address, device), found.filter(|_| kind == RTM_NEWNEIGH));
                }
                None => changed.routes = true,
            },
            _ => {
                changed.links |= matches!(kind, RTM_NEWLINK | RTM_DELLINK | RTM_NEWADDR | RTM_DELADDR | 0);
                changed.routes = true;
            }
        });
        changed
    }

    /// Whether the changes may alter the device, next hop or header of a connection's frames.
    fn touches(&self, on_nic: &OnNic) -> bool {
        let Some(way) = &on_nic.way else { return true };
        let link = &way.link;
        // Inline there is one device, whose index in the image is 0.
        self.routes || self.links || on_nic.muted || self.changes_neighbour(way.hop, link.interface, Some(link.destination))
    }

    /// Whether the changes may alter the way to a host that a session for messages or a UDP socket sends to.
    fn touches_host(&self, host: &Host) -> bool {
        let (interface, known) = host.way.map_or((0, None), |way| (way.interface, Some(way.destination)));
        self.routes || self.links || self.changes_neighbour(host.next, interface, known)
    }

    /// Whether the link address of a next hop is another one now than `known`. Inline there is one device, whose index
    /// is 0.
    fn changes_neighbour(&self, hop: IpAddr, interface: u32, known: Option<[u8; 6]>) -> bool {
        let (first, last) = if interface == 0 { (0, u32::MAX) } else { (interface, interface) };
        self.neighbours.range((hop, first)..=(hop, last)).any(|(_, found)| *found != known)
    }
}

/// Placeholder for counters that could not be read; they are read at the connection's next move.
pub(crate) const UNKNOWN: (u64, u64) = (u64::MAX, u64::MAX);

/// The bytes acknowledged, and those received, beyond which a connection in the kernel has shown that the present rules
/// let its packets pass both ways. What is in flight now may have been sent before the rules changed; and as much as
/// our window has room for the peer sends though no acknowledgement of ours reaches it.
pub(crate) fn proved_beyond(info: &TcpInfo) -> (u64, u64) {
    let in_flight = u64::from(info.unacked) * u64::from(info.snd_mss);
    (info.bytes_acked + in_flight, info.bytes_received + u64::from(info.rcv_wnd))
}

/// The same of a connection that comes from the NIC, which has sent past the rules what this image has in flight, and
/// has announced so much room to the peer.
pub(crate) fn prove_beyond(connection: &mut Connection, image: &Image) {
    if let Some((acked, received)) = connection.extra.as_mut().and_then(|extra| extra.unproved.as_mut()) {
        *acked = acked.saturating_add(image.snd_nxt.wrapping_sub(image.snd_una).into());
        *received = received.saturating_add(image.rcv_adv.wrapping_sub(image.rcv_nxt).into());
    }
}

/// Records the bytes acknowledged and received so far. The connection may leave the kernel again only after these have
/// grown, which shows that the new rules let its packets pass ([`proved_beyond`]). Of a socket whose lock others may
/// hold they are read elsewhere, by one call at a time: rules may change as often as somebody likes while a user's
/// calls are held up. `user` has opened its session, which is the one `at` this number.
fn doubt(user: u32, at: u32, connection: &mut Connection, calls: &Calls) {
    let counted = |fd: BorrowedFd<'_>| TcpInfo::read(fd).map_or(UNKNOWN, |info| proved_beyond(&info));
    let Some(user) = outsider(user, connection.process, connection.fd.as_ref().map(AsFd::as_fd)) else {
        connection.extra().unproved = Some(connection.fd().map_or(UNKNOWN, counted));
        return;
    };
    let before = connection.extra().unproved.replace(UNKNOWN);
    if before == Some(UNKNOWN) || foreign::has_many_calls(user) {
        return;
    }
    let key = (at, connection.number(), connection.serial);
    let Some(fd) = connection.fd().ok().and_then(|fd| Foreign::duplicate(fd).ok()) else { return };
    calls.make(user, move || -> Completion {
        let counted = counted(fd.as_fd());
        Box::new(move |agent| {
            let connection = named(&mut agent.sessions, key).filter(|connection| connection.unproved() == Some(UNKNOWN));
            connection.into_iter().for_each(|connection| connection.extra().unproved = Some(counted));
        })
    });
}

/// Connections whose ways are looked up again before the agent turns to others.
const WAYS_AT_ONCE: usize = 64;

/// Why a connection is restored whose frames would leave by the device of another NIC now.
const ANOTHER_NIC: &str = "its route leads to another NIC";

/// Why one is reset instead, where that is set.
const DROPPED: &str = "its route leads to another device (route-change=drop)";

/// Why a connection has to leave its NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Leaving {
    why: &'static str,
    /// Its frames would leave by another device.
    by_device: bool,
}

impl Leaving {
    fn by_device(why: &'static str) -> Leaving {
        Leaving { why, by_device: true }
    }
}

impl From<&'static str> for Leaving {
    fn from(why: &'static str) -> Leaving {
        Leaving { why, by_device: false }
    }
}

/// Applies a changed route to a connection on the NIC. Without a route the connection is muted, as it would be in the
/// kernel, and unmuted when it has one again; path MTU and the devices at which its frames are received follow the
/// route. An error, the reason, if its frames need another device or header: then it has to be restored to the kernel.
fn follow_way(ground: &mut Ground<'_>, connection: &mut Connection) -> Result<(), Leaving> {
    let (Some(cid), true) = (connection.cid, connection.running().is_some()) else { return Ok(()) };
    let now = ground.way_of(connection);
    let Some(exported) = connection.exported(ground.nic_memory) else { return Ok(()) };
    let (link, device) = (exported.image.link, connection.flow.device);
    let Some(on_nic) = connection.running() else { return Ok(()) };
    let (muted, interface) = match &now {
        Ok(now) if now.path.nic as usize != cid.nic() => return Err(Leaving::by_device(ANOTHER_NIC)),
        // Its flow would be another one.
        Ok(now) if now.device() != device => return Err(ELSEWHERE.into()),
        Ok(now) if now.leads_as(&link) => (false, link.interface),
        Ok(now) if now.link.interface != link.interface => return Err(Leaving::by_device(ELSEWHERE)),
        Err(refusal) if refusal.is_unreachable() => (true, NOWHERE),
        Err(Refusal::OtherInterface(_) | Refusal::NotEthernet(_)) => return Err(Leaving::by_device(ELSEWHERE)),
        Err(Refusal::Policy) => return Err("an IPsec policy covers it".into()),
        Err(Refusal::Rules(_) | Refusal::LegacyRules | Refusal::Filtered(_)) => {
            return Err("rules that change from packet to packet may judge it".into());
        }
        Err(Refusal::Marked(_)) => return Err("its program has set SO_MARK".into()),
        _ => return Err(ELSEWHERE.into()),
    };
    let command = |control, value| Message::control(Operation::NicControl, control, cid, value, 0);
    if muted != on_nic.muted && ground.nic().post_in_time(command(Control::Interface, interface)).is_ok() {
        on_nic.muted = muted;
        connection.reason = now.as_ref().map_or_else(|refusal| refusal.to_string().into(), |_| "its route is there again".into());
    }
    let (Ok(now), Some(on_nic)) = (now, connection.running()) else { return Ok(()) };
    let now = ground.known.shared(now);
    let was = on_nic.way.replace(now.clone());
    if was.as_ref().is_some_and(|was| was.path != now.path) {
        ground.shape.steer(&connection.flow, &now.path, Steer::Steal).map_err(|_| ELSEWHERE)?;
    }
    if was.is_some_and(|was| was.mtu != now.mtu) {
        // If the NIC refuses it, the connection is restored.
        ground.nic().post_in_time(command(Control::Mtu, now.mtu)).map_err(|_| ELSEWHERE)?;
    }
    Ok(())
}

/// Handles tables of iptables-legacy that have come or gone. Connections that these do not judge stay where they are.
pub(crate) fn tables_changed(agent: &mut Agent) {
    agent.known.discard();
    agent.follow_listeners();
    agent.follow_datagrams();
    agent.open_all_in_kernel();
    agent.follow_ways(|_| true);
    agent.follow_hosts(|_| true);
    agent.follow_datagram_ways(|_| true);
}

impl Agent {
    /// Handles changes of routes, addresses, neighbours or links: connections whose frames would now leave another way
    /// are restored to the kernel, those without a route are muted.
    pub(crate) fn routes_changed(&mut self) {
        let changed = RouteChanges::collect(&self.watched.routes);
        if changed.links || changed.routes {
            self.known.discard();
        } else {
            self.known.forget_neighbours(changed.neighbours.keys().map(|(address, device)| (*device, *address)));
        }
        if changed.links {
            if let Shape::Beside { devices, .. } = &mut self.shape
                && let Err(error) = devices.deal(&self.routes)
            {
                warning!(
                    [] "devices have changed, and could not be looked at: {error}";
                    "devices that are new stay without the NIC until the next change; `baton doctor` names what is missing"
                );
            }
            self.follow_devices();
            self.find_devices_without_nic();
            self.follow_addresses();
            self.follow_listeners();
            self.follow_datagrams();
        }
        self.follow_ways(|connection| connection.on_nic.as_ref().is_some_and(|on_nic| changed.touches(on_nic)));
        self.follow_hosts(|host| changed.touches_host(host));
        self.follow_datagram_ways(|host| changed.touches_host(host));
    }

    /// Handles changed IPsec policies: connections that they now cover are restored to the kernel, which makes the
    /// connections of listeners, opens others, and has datagrams, while there are any.
    pub(crate) fn policies_changed(&mut self) {
        if self.guards.policies_changed() {
            self.known.discard();
            self.follow_listeners();
            self.follow_datagrams();
            self.open_all_in_kernel();
            self.follow_ways(|_| true);
            self.follow_hosts(|_| true);
            self.follow_datagram_ways(|_| true);
        }
    }

    /// Handles changed traffic-control filters: connections at devices that now have one are restored to the kernel.
    pub(crate) fn filters_changed(&mut self) {
        if self.guards.traffic_changed() {
            self.known.discard();
            self.follow_ways(|_| true);
            self.follow_hosts(|_| true);
            self.follow_datagram_ways(|_| true);
        }
    }

    /// Checks a connection that has just come to the NIC again, if something has changed since it was checked:
    /// notifications are handled for connections that are there already.
    pub(crate) fn catch_up(&mut self, session: u32, number: u32) {
        let Some((mut ground, entry)) = self.split_at(session, number) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        let changes = ground.known.changes();
        let Some(way) = connection.running().and_then(|on_nic| on_nic.way.clone()) else { return };
        // A client may have come to an address of another NIC than the one that its answers leave by.
        let of_device = ground.shape.nic_of(way.path.leaves_by);
        let elsewhere = connection.asked_nic.is_none() && connection.cid.is_some_and(|cid| cid.nic() != of_device);
        if way.as_of == changes && !elsewhere {
            return;
        }
        let followed = match connection.unproved() {
            Some(_) => Err("the firewall has changed".into()),
            // Its client has come to an address of another NIC: no route has changed.
            None if elsewhere => Err(ANOTHER_NIC.into()),
            None => follow_way(&mut ground, connection),
        };
        if let Err(leaving) = followed {
            self.leave_nic(session, number, leaving);
        }
    }

    /// Queues a connection that has to leave its NIC. If its route has changed, it may lead to another NIC: the
    /// connection goes on there. Or it is reset, if the NIC is set to that.
    fn leave_nic(&mut self, session: u32, number: u32, Leaving { why, by_device }: Leaving) {
        let nic = self.nic_of(session, number).and_then(|nic| self.nics.get(nic));
        if by_device && nic.is_some_and(|nic| nic.settings().offloads.route_change == RouteChange::Drop) {
            let is_first = self.cut(session, number, DROPPED);
            self.statistics.dropped += u64::from(is_first);
            return;
        }
        let several = self.nics.len() > 1;
        if let Some(connection) = self.connection(session, number).filter(|_| several && [ELSEWHERE, ANOTHER_NIC].contains(&why))
        {
            connection.want(true);
            connection.onward = true;
        }
        self.return_soon(session, number, why);
    }

    /// Has the routes of those connections on the NIC looked up again for which `of` is true, a bounded number in each
    /// round of the agent.
    pub(crate) fn follow_ways(&mut self, of: impl Fn(&Connection) -> bool) {
        let connections = self.sessions.iter_mut().flatten().flat_map(|session| session.connections.iter_mut().flatten());
        for connection in connections.filter(|connection| connection.stage() == Stage::Nic && of(connection)) {
            if let Some(on_nic) = &mut connection.on_nic {
                on_nic.stale = true;
                self.looks.ways = true;
            }
        }
    }

    /// Looks up the routes of the next connections for which that is due. Returns whether there may be more.
    pub(crate) fn follow_next_ways(&mut self) -> bool {
        let turn = next_stale(&self.sessions, self.looks.ways_from, WAYS_AT_ONCE);
        for (session, number) in turn.iter().copied() {
            self.looks.ways_from = (session, number + 1);
            let Some((mut ground, entry)) = self.split_at(session, number) else { continue };
            let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { continue };
            if let Some(on_nic) = &mut connection.on_nic {
                on_nic.stale = false;
            }
            if let Err(leaving) = follow_way(&mut ground, connection) {
                self.leave_nic(session, number, leaving);
            }
        }
        turn.len() == WAYS_AT_ONCE
    }

    /// Handles changed firewall rules. Only the kernel knows which connections the new rules would stop, so all are
    /// restored to it; each may move again once its traffic has passed them.
    pub(crate) fn rules_changed(&mut self) {
        if !self.watched.rules.as_ref().is_some_and(Changes::any) {
            return;
        }
        self.guards.forget_rules();
        self.known.discard();
        self.follow_listeners();
        self.follow_datagrams();
        self.open_all_in_kernel();
        for (session, number) in self.on_nic() {
            self.must_return(session, number, "the firewall has changed");
        }
        self.doubt_all(|_| true);
        self.follow_hosts(|_| true);
        self.follow_datagram_ways(|_| true);
    }

    /// Handles BPF programs attached to or detached from control groups: as [`Self::rules_changed`], for the
    /// connections of those groups.
    pub(crate) fn programs_changed(&mut self) {
        let changed = self.cgroups.changed();
        if changed.is_empty() {
            return;
        }
        let touches = |connection: &Connection| connection.cgroup.as_ref().is_some_and(|group| changed.contains(group));
        for (session, number) in self.on_nic() {
            let connection =
                self.sessions[session as usize].as_ref().and_then(|entry| entry.connections[number as usize].as_ref());
            if connection.is_some_and(touches) {
                self.must_return(session, number, "the programs of its control group have changed");
            }
        }
        self.known.discard();
        self.follow_listeners();
        self.doubt_all(touches);
    }

    /// Doubts that packets of those connections pass for which `of` is true.
    fn doubt_all(&mut self, of: impl Fn(&Connection) -> bool) {
        for (at, session) in self.sessions.iter_mut().enumerate() {
            let Some(session) = session else { continue };
            let doubtful = session.connections.iter_mut().flatten().filter(|connection| of(connection));
            doubtful.for_each(|connection| doubt(session.user, at as u32, connection, &self.calls));
        }
    }

    pub(crate) fn on_nic(&self) -> Vec<(u32, u32)> {
        self.on_nic_from((0, 0)).collect()
    }

    /// Up to `most` connections on the NIC, in turn: those from `from` on, then those before it.
    pub(crate) fn next_on_nic(&self, from: (u32, u32), most: usize) -> Vec<(u32, u32)> {
        self.on_nic_from(from).chain(self.on_nic_from((0, 0)).take_while(|at| *at < from)).take(most).collect()
    }

    /// Session and number of the connections on the NIC, from these on.
    pub(crate) fn on_nic_from(&self, from: (u32, u32)) -> impl Iterator<Item = (u32, u32)> {
        on_nic_from(&self.sessions, from).map(|(session, connection)| (session, connection.number()))
    }
}

/// The connections on the NIC, each with its session's number, from this session and number on.
fn on_nic_from(sessions: &[Option<Session>], (first, number): (u32, u32)) -> impl Iterator<Item = (u32, &Connection)> {
    let sessions = sessions.iter().enumerate().skip(first as usize);
    sessions.filter_map(|(at, session)| Some((at as u32, session.as_ref()?))).flat_map(move |(at, session)| {
        let skipped = if at == first { number as usize } else { 0 };
        let on_nic = session.connections.iter().skip(skipped).flatten().filter(|connection| connection.stage() == Stage::Nic);
        on_nic.map(move |connection| (at, connection))
    })
}

/// Session and number of up to `most` connections on the NIC whose ways are to be looked up again, in turn: those from
/// `from` on, then those before it. Not of those that stand still: their turn comes when they go on
/// ([`Agent::conclude`]).
fn next_stale(sessions: &[Option<Session>], from: (u32, u32), most: usize) -> Vec<(u32, u32)> {
    let is_due = |connection: &Connection| {
        connection.step.custody() == Custody::Nic && connection.on_nic.as_ref().is_some_and(|on_nic| on_nic.stale)
    };
    let stale_from = |from: (u32, u32)| {
        let stale = on_nic_from(sessions, from).filter(move |(_, connection)| is_due(connection));
        stale.map(|(session, connection)| (session, connection.number()))
    };
    stale_from(from).chain(stale_from((0, 0)).take_while(|at| *at < from)).take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Block;
    use crate::connection::Memory;
    use baton_abi::layout::session;
    use baton_linux::control::Channel;
    use baton_moves::Step;
    use baton_protocol::nic::Hop;
    use baton_shm::Region;
    use baton_wire::{Endpoint, Flow};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::sync::{Arc, mpsc};

    /// Nobody's number, so that the user's calls are made elsewhere.
    const USER: u32 = 4_000_000_001;

    /// A session with so many connections, on the NIC.
    fn with_connections(count: u32) -> Session {
        let mut session = Session::new(Channel::pair().expect("two sockets").0.into()).expect("a session");
        let memory = Arc::new(Region::private(session::HEAP).expect("memory"));
        let flow = |port: u32| {
            let end = |host| Endpoint::v4([10, 0, 0, host], port as u16);
            Flow { local: end(1), remote: end(2), device: 0 }
        };
        for number in 0..count {
            let (flow, block) = (flow(number), Block::new(memory.clone(), number));
            let mut connection = Connection::new(None, flow, flow.local.into(), flow.remote.into(), block);
            let parts = Memory { receive: (0, 4096), send: (4096, 4096) };
            connection.on_nic = OnNic::new(&Image::open(flow), parts, None).map(Box::new);
            connection.step = Step::Nic;
            session.connections.put(connection);
        }
        session
    }

    /// However many connections a change may concern, only some are looked at before the agent turns to others; and
    /// each has its turn.
    #[test]
    fn some_connections_are_looked_at_at_a_time() {
        let mut sessions = [Some(with_connections(3)), None, Some(with_connections(2))];
        let of = |sessions: &[Option<Session>], from| next_stale(sessions, from, 2);
        assert!(of(&sessions, (0, 0)).is_empty(), "nothing has changed");
        let all = sessions.iter_mut().flatten().flat_map(|session| session.connections.iter_mut().flatten());
        all.filter(|one| one.number() != 1).for_each(|one| one.on_nic.as_mut().expect("on the NIC").stale = true);
        assert_eq!(of(&sessions, (0, 0)), [(0, 0), (0, 2)]);
        assert_eq!(of(&sessions, (0, 3)), [(2, 0), (0, 0)]);
        assert_eq!(of(&sessions, (2, 1)), [(0, 0), (0, 2)]);
    }

    /// What changes while a connection stands still, since its memory grows, counts when it goes on.
    #[test]
    fn what_stands_still_is_looked_at_later() {
        let mut sessions = [Some(with_connections(1))];
        let mut stale_at = |step| {
            for connection in sessions.iter_mut().flatten().flat_map(|session| session.connections.iter_mut().flatten()) {
                connection.step = step;
                connection.on_nic.as_mut().expect("on the NIC").stale = true;
            }
            next_stale(&sessions, (0, 0), 2)
        };
        for still in [Step::Rested, Step::Grown] {
            assert!(stale_at(still).is_empty(), "{still:?}");
        }
        assert_eq!(stale_at(Step::Nic), [(0, 0)]);
    }

    /// Only ways by a neighbour that has another link address now are looked up again.
    #[test]
    fn neighbours_concern_the_ways_that_lead_by_them() {
        let host = |interface, last, next: u8| {
            let hop = Hop { source: [1; 6], destination: [last; 6], ttl: 64, interface };
            Host { way: Some(hop), next: IpAddr::from([10, 0, 0, next]), stale: false }
        };
        let neighbour = |last: u8, found| ((IpAddr::from([10, 0, 0, last]), 7), found);
        let neighbours = BTreeMap::from([neighbour(1, Some([3; 6])), neighbour(2, None)]);
        let changed = RouteChanges { neighbours, ..RouteChanges::default() };
        let touches = |interface, last, next| changed.touches_host(&host(interface, last, next));
        assert!(touches(7, 4, 1) && touches(7, 3, 2) && touches(0, 4, 1), "inline there is one device");
        assert!(!touches(7, 3, 1) && !touches(8, 4, 1) && !touches(7, 4, 3) && !touches(0, 3, 1));
        let touches_lost = |next| changed.touches_host(&Host { way: None, ..host(0, 0, next) });
        assert!(touches_lost(1) && !touches_lost(2));
    }

    #[test]
    fn one_call_for_a_connection_waits_however_often_the_rules_change() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let socket = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (local, peer) = (socket.local_addr().expect("an address"), socket.peer_addr().expect("an address"));
        let flow = Flow { local: local.into(), remote: peer.into(), device: 0 };
        let block = Block::new(Arc::new(Region::private(session::HEAP).expect("memory")), 0);
        let fd = Foreign::from(OwnedFd::from(socket));
        let mut connection = Connection::new(Some(fd), flow, local, peer, block);
        let calls = Calls::new().expect("a doorbell");
        // The user's calls are held up until the other end is dropped.
        let (held, holds) = mpsc::channel::<()>();
        foreign::call_for(USER, move || _ = holds.recv());
        (0..1000).for_each(|_| doubt(USER, 0, &mut connection, &calls));
        assert_eq!(connection.unproved(), Some(UNKNOWN));
        assert!(!foreign::has_many_calls(USER));
        drop(held);
    }
}
