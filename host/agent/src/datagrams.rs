//! UDP sockets whose datagrams the NIC receives and sends (`--offload full`).
//!
//! The program's socket stays the kernel's, so that address and port are taken there, and the kernel receives and sends
//! whatever the NIC does not: datagrams of the same host, fragments, multicast, errors. So nothing is refused to a
//! program, and a socket goes back to the kernel by no more than the NIC's ceasing to take its datagrams.
//!
//! What waits for a socket's lock is asked elsewhere if its program may hold that: see [`crate::calls`].

use crate::agent::Agent;
use crate::answers::{After, Caller};
use crate::connecting::source_for;
use crate::connection::Asker;
use crate::ground::Shape;
use crate::nic_requests::Answered;
use crate::numbers::{Numbers, turn};
use crate::session::Host;
use baton_abi::layout::{datagrams, session as layout};
use baton_core::Taken;
use baton_handoff::examine::system;
use baton_linux::events::monotonic_micros;
use baton_linux::foreign::Foreign;
use baton_linux::{rtnetlink, socket};
use baton_moves::Refusal;
use baton_protocol::nic::{DatagramSocket, DatagramWay, ToNic};
use baton_protocol::program::{Reply, Rings};
use baton_shm::Region;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Ways that are looked up again before the agent turns to others.
const WAYS_AT_ONCE: usize = 64;

/// Most UDP sockets of a session on the NIC: each takes two of the agent's descriptors.
const MAX_SOCKETS: usize = 1024;

/// Longest IPv6 packet that the NIC sends, in bytes: what every path carries (RFC 8200 section 5). The kernel, which
/// follows the path's MTU, sends longer ones.
const MTU_V6: u32 = 1280;

/// Level and number of options with which only the kernel can serve a socket, unless they are 0: SO_REUSEPORT,
/// SO_BINDTODEVICE, SO_TIMESTAMP, SO_TIMESTAMPNS, SO_MARK, SO_TIMESTAMPING, SO_RXQ_OVFL, SO_TXTIME; UDP_CORK,
/// UDP_ENCAP, UDP_SEGMENT, UDP_GRO; IP_TOS, IP_RECVOPTS, IP_RETOPTS, IP_PKTINFO, IP_RECVERR, IP_RECVTTL, IP_RECVTOS,
/// IP_TRANSPARENT, IP_RECVORIGDSTADDR, IP_MINTTL, IP_CHECKSUM; IPV6_RECVERR, IPV6_RECVPKTINFO, IPV6_RECVHOPLIMIT,
/// IPV6_RECVTCLASS, IPV6_TCLASS, IPV6_MINHOPCOUNT, IPV6_RECVORIGDSTADDR.
const KERNEL_ONLY: [(i32, &[i32]); 4] = [
    (1, &[15, 25, 29, 35, 36, 37, 40, 61]),
    (17, &[1, 100, 103, 104]),
    (0, &[1, 6, 7, 8, 11, 12, 13, 19, 20, 21, 23]),
    (41, &[25, 49, 51, 66, 67, 73, 74]),
];

/// SO_REUSEADDR, SO_RCVBUF, SO_GET_FILTER, SO_PEEK_OFF; IP_MTU_DISCOVER and its values that let packets be fragmented.
const REUSEADDR: i32 = 2;
const RCVBUF: i32 = 8;
const GET_FILTER: i32 = 26;
const PEEK_OFF: i32 = 42;
const MTU_DISCOVER: i32 = 10;
const MAY_FRAGMENT: std::ops::RangeInclusive<i32> = 0..=1;
/// IPV6_V6ONLY.
const V6ONLY: i32 = 26;

/// What the NIC has to know of a socket.
#[derive(Clone, Copy)]
struct Seen {
    /// Its address, and its peer's if it is connected.
    local: SocketAddr,
    peer: Option<SocketAddr>,
    /// IPV6_V6ONLY.
    only_v6: bool,
    /// SO_RCVBUF.
    limit: Option<u32>,
}

/// A UDP socket of a program.
struct Socket {
    session: u32,
    fd: Arc<Foreign>,
    cookie: u64,
    rings: Rings,
    place: Arc<Place>,
    /// The end of its doorbell that the NIC rings.
    bell: Arc<Foreign>,
    /// The descriptors of both, counted as its user's.
    _taken: Taken,
    /// What was seen of it last.
    seen: Seen,
    /// Its address is being asked for, and what else [`examine`] asks for.
    is_polled: bool,
    is_examined: bool,
    /// Its address as last sent to the NIC.
    local: Option<SocketAddr>,
    /// The hosts to which the program has asked for a way.
    ways: BTreeMap<IpAddr, Destination>,
    /// Requests to serve it that the NIC has not answered.
    unanswered: u32,
}

/// A host that a program sends datagrams to.
#[derive(Clone, Copy)]
struct Destination {
    /// None while there is none.
    way: Option<DatagramWay>,
    /// The next hop, as last known.
    next: IpAddr,
}

/// Where a program sees whether the NIC has a socket's datagrams: in front of rings that a NIC may use. The socket has
/// it, and so has each request to end it that is not answered. When all have dropped it no NIC uses the rings, and
/// their program may use their memory for something else: nothing is written there any more.
pub(crate) struct Place {
    memory: Arc<Region>,
    base: usize,
    /// What the program has sent to its own doorbell, descriptors too, is closed with the last descriptor of that. So
    /// that this is not the NIC's, the agent has one until the NIC has closed its own.
    _bell: Option<Arc<Foreign>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        // An agent that fails has not ended its NIC yet; the next one shows that it has.
        if !std::thread::panicking() {
            self.memory.word32(self.base + datagrams::HELD).store(0, Ordering::Release);
        }
    }
}

impl Place {
    /// That of rings which a NIC is about to get. None if an earlier socket had the same ones and its NIC may use them
    /// still. A program that writes into the word itself harms its own rings only.
    fn lend(memory: &Arc<Region>, base: u32, bell: Option<Arc<Foreign>>) -> Option<Arc<Place>> {
        let base = base as usize;
        let held = datagrams::held(memory.word32(layout::AGENT_STARTS).load(Ordering::Acquire));
        let before = memory.word32(base + datagrams::HELD).swap(held, Ordering::AcqRel);
        (before != held).then(|| Arc::new(Place { memory: memory.clone(), base, _bell: bell }))
    }

    /// Shows whether the NIC has them, and that their ways may have changed.
    pub fn publish(&self, on_nic: bool) {
        let word = |offset: usize| self.memory.word32(self.base + offset);
        word(datagrams::ON_NIC).store(u32::from(on_nic), Ordering::Release);
        word(datagrams::WAYS).fetch_add(1, Ordering::AcqRel);
    }
}

/// The UDP sockets by number.
pub(crate) struct Datagrams {
    by_id: BTreeMap<u32, Socket>,
    numbers: Numbers,
    stale: Stale,
}

/// Ways of sockets, by host, that are to be looked up again: something has changed on which they may depend.
struct Stale {
    all: BTreeSet<(u32, IpAddr)>,
    /// The one with which the next turn begins.
    from: (u32, IpAddr),
}

impl Stale {
    /// Takes up to `most` of them, in turn.
    fn take(&mut self, most: usize) -> Vec<(u32, IpAddr)> {
        let in_turn = self.all.range(self.from..).chain(self.all.range(..self.from));
        let turn: Vec<(u32, IpAddr)> = in_turn.take(most).copied().collect();
        turn.iter().for_each(|way| _ = self.all.remove(way));
        self.from = turn.last().copied().unwrap_or(self.from);
        turn
    }
}

impl Datagrams {
    pub fn new() -> Datagrams {
        let stale = Stale { all: BTreeSet::new(), from: (0, IpAddr::from([0; 4])) };
        Datagrams { by_id: BTreeMap::new(), numbers: Numbers::new(), stale }
    }
}

fn stayed(refusal: &Refusal) -> Reply {
    Reply::Stayed { transient: refusal.is_transient(), reason: refusal.to_string() }
}

/// Checks whether the NIC can have a socket's datagrams. Waits for the socket's lock.
///
/// # Errors
/// Why only the kernel can.
fn examine(fd: BorrowedFd<'_>) -> Result<Seen, Refusal> {
    if !socket::is_udp(fd) || !socket::is_of_this_namespace(fd).map_err(|error| system("SO_NETNS_COOKIE", &error))? {
        return Err(Refusal::OtherNamespace);
    }
    let get = |level, option| socket::get(fd, level, option).ok();
    let set =
        |(level, options): &(i32, &[i32])| options.iter().any(|option| get(*level, *option).is_some_and(|value| value != 0));
    if KERNEL_ONLY.iter().any(set) {
        return Err(Refusal::Option("a socket option that only the kernel has"));
    }
    if get(1, GET_FILTER).is_some_and(|length| length > 0) || get(1, PEEK_OFF).is_some_and(|offset| offset >= 0) {
        return Err(Refusal::Option("a socket filter or SO_PEEK_OFF"));
    }
    if get(0, MTU_DISCOVER).is_some_and(|value| !MAY_FRAGMENT.contains(&value)) {
        return Err(Refusal::Option("IP_MTU_DISCOVER"));
    }
    // Another socket may be bound to the same port, and which of them gets a datagram is the kernel's choice.
    let peer = socket::peer_address(fd).ok();
    if get(1, REUSEADDR) == Some(1) && peer.is_none() {
        return Err(Refusal::Option("SO_REUSEADDR"));
    }
    let local = socket::local_address(fd).map_err(|error| system("getsockname", &error))?;
    if local.port() == 0 {
        return Err(Refusal::Option("no port"));
    }
    let limit = get(1, RCVBUF).and_then(|bytes| u32::try_from(bytes).ok());
    Ok(Seen { local, peer, only_v6: get(41, V6ONLY) == Some(1), limit })
}

impl Agent {
    /// Makes the NIC have a UDP socket's datagrams, or serves it anew when its peer or its options have changed.
    /// None if the answer comes when the NIC has them.
    pub(crate) fn take_datagrams(&mut self, asker: Asker, rings: Rings, descriptors: Vec<Foreign>) -> Option<Reply> {
        let Ok([fd, bell]) = <[Foreign; 2]>::try_from(descriptors) else {
            return Some(Reply::Failed { reason: "a UDP socket and its doorbell are two descriptors".into() });
        };
        self.on_sent(asker, (fd, None), examine, move |agent, fd, seen| {
            let begun = seen.and_then(|seen| agent.begin_datagrams(asker, rings, seen, fd, bell));
            begun.err().map(|refusal| stayed(&refusal))
        })
    }

    fn begin_datagrams(
        &mut self,
        (session, tag): Asker,
        rings: Rings,
        seen: Seen,
        fd: Foreign,
        bell: Foreign,
    ) -> Result<(), Refusal> {
        let cookie = socket::cookie(fd.as_fd()).map_err(|error| system("SO_COOKIE", &error))?;
        let known = self.datagrams.by_id.iter().find(|(_, socket)| socket.cookie == cookie);
        let id = match known.map(|(id, socket)| (*id, socket.session)) {
            // The kernel divides its datagrams between the processes that have it.
            Some((_, owner)) if owner != session => return Err(Refusal::Elsewhere),
            Some((id, _)) => id,
            None => {
                self.has_room_for(Some(session), fd.as_fd(), 1)?;
                let of_session = self.datagrams.by_id.values().filter(|socket| socket.session == session).count();
                if of_session >= MAX_SOCKETS {
                    return Err(Refusal::NoRoom);
                }
                let bell = bell.into_unix().map_err(|_| Refusal::Option("a doorbell that is none"))?;
                let (fd, bell) = (Arc::new(fd), Arc::new(bell));
                let place = self.lend_rings(session, &rings, &bell).ok_or(Refusal::NoRoom)?;
                let user = self.user_of(session);
                let socket = Socket {
                    session,
                    fd,
                    cookie,
                    rings,
                    place,
                    bell,
                    _taken: self.users.take(user, 2),
                    seen,
                    is_polled: false,
                    is_examined: false,
                    local: None,
                    ways: BTreeMap::new(),
                    unanswered: 0,
                };
                let Datagrams { by_id, numbers, .. } = &mut self.datagrams;
                let id = numbers.next(|id| by_id.contains_key(&id));
                by_id.insert(id, socket);
                id
            }
        };
        let caller = self.caller(session, tag);
        self.serve_datagrams(id, seen, caller).inspect_err(|_| _ = self.end_datagrams(session, Some(id), false, None))
    }

    /// Handles the NIC's answer to the request to serve a socket.
    pub(crate) fn datagrams_answered(&mut self, id: u32, caller: Caller, answer: Answered) {
        let known = self.datagrams.by_id.get_mut(&id).map(|socket| {
            socket.unanswered = socket.unanswered.saturating_sub(1);
            (socket.session, socket.unanswered == 0)
        });
        match (known, answer) {
            (Some(_), Ok(())) => {
                self.publish_datagrams(id, true);
                self.answer_caller(caller, Reply::Datagrams { socket: id }, &[]);
            }
            (Some((session, _)), Err(_)) if caller.is_some() => {
                let _ = self.end_datagrams(session, Some(id), false, None);
                self.answer_caller(caller, stayed(&Refusal::NicGone), &[]);
            }
            (Some((_, true)), Err(_)) => self.return_datagrams(id),
            // The next NIC has been asked.
            (Some(_), Err(_)) => {}
            (None, _) => self.answer_caller(caller, stayed(&Refusal::Ended), &[]),
        }
    }

    /// Lets a NIC have rings. None if they do not lie in the part of session memory of which the agent gives out
    /// nothing, or see [`Place::lend`].
    fn lend_rings(&self, session: u32, rings: &Rings, bell: &Arc<Foreign>) -> Option<Arc<Place>> {
        let memory = &self.sessions.get(session as usize)?.as_ref()?.open.as_ref()?.memory;
        let sizes = [rings.receive, rings.send].map(|size| size as usize);
        let fit = rings.base.is_multiple_of(4096)
            && rings.base as usize >= layout::heap_end(memory.len())
            && sizes.iter().all(|size| size.is_power_of_two() && *size >= 4096)
            && rings.base as usize + datagrams::BYTES + sizes[0] + sizes[1] <= memory.len();
        if fit { Place::lend(memory, rings.base, Some(bell.clone())) } else { None }
    }

    /// Shows a socket's program whether the NIC has its datagrams, and that the ways of these may have changed.
    fn publish_datagrams(&self, id: u32, on_nic: bool) {
        if let Some(socket) = self.datagrams.by_id.get(&id) {
            socket.place.publish(on_nic);
        }
    }

    /// Makes the NIC leave a socket's datagrams to the kernel, and then shows that to the program. With `replay` the
    /// kernel gets what is unread as well.
    fn ask_to_end_datagrams(&mut self, id: u32, place: Arc<Place>, replay: bool, caller: Caller) {
        let after = After::EndDatagrams(place, caller);
        self.nics[0].request(ToNic::EndDatagrams { id, replay }, &[], Some(after));
    }

    /// Gives a socket to the kernel until the NIC can have it.
    fn return_datagrams(&mut self, id: u32) {
        let Some(socket) = self.datagrams.by_id.get_mut(&id) else { return };
        socket.local = None;
        let place = socket.place.clone();
        self.ask_to_end_datagrams(id, place, false, None);
    }

    /// Describes a socket to the NIC, as it was `seen` just now. Its program is shown that the NIC has it when that has
    /// answered.
    fn serve_datagrams(&mut self, id: u32, seen: Seen, caller: Caller) -> Result<(), Refusal> {
        self.can_open()?;
        let Shape::Inline { interface } = self.shape else { return Err(Refusal::CannotOpen) };
        let link = rtnetlink::link_at(&self.routes, interface).map_err(|error| system("RTM_GETLINK", &error))?;
        let own = rtnetlink::addresses(&self.routes).map_err(|error| system("RTM_GETADDR", &error))?;
        let Some(socket) = self.datagrams.by_id.get_mut(&id) else { return Err(Refusal::Ended) };
        socket.seen = seen;
        let Seen { local, peer, only_v6, limit } = seen;
        let receives = |address: &IpAddr| match local.ip() {
            IpAddr::V4(any) if any.is_unspecified() => address.is_ipv4(),
            IpAddr::V6(any) if any.is_unspecified() => address.is_ipv6() || !only_v6,
            bound => bound.to_canonical() == *address,
        };
        let outside =
            |address: &IpAddr| !address.is_loopback() && !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let own = own.into_iter().filter(|address| outside(address) && receives(address));
        let addresses: Vec<SocketAddr> = own.map(|address| SocketAddr::new(address, local.port())).collect();
        if addresses.is_empty() {
            return Err(Refusal::OtherInterface(0));
        }
        let (session, rings) = (socket.session, socket.rings);
        let limit = limit.unwrap_or(rings.receive);
        let description = DatagramSocket { id, session, rings, limit, addresses, peer, host: link.address };
        let (message, after) = (ToNic::Datagrams(description), After::Datagrams(id, caller));
        self.nics[0].request(message, &[socket.bell.as_fd()], Some(after));
        socket.unanswered += 1;
        socket.local = Some(local);
        self.looks.begin_sockets();
        Ok(())
    }

    /// Examines a socket anew, and gives it to the NIC, or to the kernel until the NIC can have it. If calls for that
    /// wait still, they will do: what the host has is looked at after them.
    fn examine_datagrams(&mut self, id: u32) {
        let Some(socket) = self.datagrams.by_id.get_mut(&id).filter(|socket| !socket.is_examined) else { return };
        socket.is_examined = true;
        let (session, fd) = (socket.session, socket.fd.clone());
        self.on_shared(session, &fd, examine, move |agent, seen| {
            let Some(socket) = agent.datagrams.by_id.get_mut(&id) else { return };
            socket.is_examined = false;
            let served = seen.and_then(|seen| {
                let served = agent.serve_datagrams(id, seen, None);
                agent.looks.unread.note(&served, monotonic_micros());
                served
            });
            if served.is_err() {
                agent.return_datagrams(id);
            }
        });
    }

    /// Polls the addresses of the next UDP sockets, `most` at most: a socket whose program has disconnected it has lost
    /// the port that the kernel had chosen, and another one may have it. Returns where to go on, and whether the NIC
    /// has any socket.
    pub(crate) fn look_at_datagrams(&mut self, from: u32, most: usize) -> (u32, bool) {
        let (ids, next) = turn(&self.datagrams.by_id, from, most, |_| true);
        ids.into_iter().for_each(|id| self.poll_datagrams(id));
        (next, self.datagrams.by_id.values().any(|socket| socket.local.is_some()))
    }

    fn poll_datagrams(&mut self, id: u32) {
        let due = |socket: &&mut Socket| socket.local.is_some() && !socket.is_polled;
        let Some(socket) = self.datagrams.by_id.get_mut(&id).filter(due) else { return };
        socket.is_polled = true;
        let (session, fd) = (socket.session, socket.fd.clone());
        let local = |fd: BorrowedFd<'_>| socket::local_address(fd).ok();
        self.on_shared(session, &fd, local, move |agent, local| {
            let Some(socket) = agent.datagrams.by_id.get_mut(&id) else { return };
            socket.is_polled = false;
            if socket.local.is_some() && socket.local != local {
                agent.examine_datagrams(id);
            }
        });
    }

    /// Looks up the way of a socket's datagrams to a host, for its program. None if the answer comes when the NIC knows
    /// it.
    pub(crate) fn find_datagram_way(&mut self, session: u32, tag: u32, id: u32, host: IpAddr) -> Option<Reply> {
        let Some(socket) = self.datagrams.by_id.get(&id).filter(|socket| socket.session == session) else {
            return Some(Reply::Failed { reason: format!("there is no UDP socket {id}") });
        };
        if socket.ways.len() >= datagrams::MOST_HOSTS && !socket.ways.contains_key(&host) {
            return Some(stayed(&Refusal::NoRoom));
        }
        let (before, caller) = (socket.ways.get(&host).and_then(|to| to.way), self.caller(session, tag));
        match self.follow_datagram_way(id, host, caller) {
            Ok(way) if Some(way) == before => Some(Reply::Way { mtu: way.mtu }),
            Ok(_) => None,
            Err(refusal) => Some(stayed(&refusal)),
        }
    }

    /// Handles the NIC's answer to a way that it was given, with this MTU.
    pub(crate) fn datagram_way_answered(&mut self, id: u32, mtu: u32, caller: Caller, answer: Answered) {
        let reply = match answer {
            Ok(()) => Reply::Way { mtu },
            Err(_) => stayed(&Refusal::NicGone),
        };
        if let (Reply::Stayed { .. }, Some(socket)) = (&reply, self.datagrams.by_id.get_mut(&id)) {
            // The program asks again.
            socket.ways.clear();
        }
        self.answer_caller(caller, reply, &[]);
    }

    /// Looks up the way of a socket's datagrams to a host, and gives it to the NIC if it is another one than before.
    fn follow_datagram_way(&mut self, id: u32, host: IpAddr, caller: Caller) -> Result<DatagramWay, Refusal> {
        let Some(socket) = self.datagrams.by_id.get(&id) else { return Err(Refusal::Ended) };
        let (session, fd, bound) = (socket.session, socket.fd.clone(), socket.seen.local);
        let found = self.way_of_datagrams(session, fd.as_fd(), bound, host.to_canonical());
        let Some(socket) = self.datagrams.by_id.get_mut(&id) else { return Err(Refusal::Ended) };
        let before = socket.ways.get(&host).copied();
        let (way, next) = match &found {
            Ok((way, next)) => (Some(*way), *next),
            Err(_) => (None, before.map_or(host, |before| before.next)),
        };
        if before.is_some() || way.is_some() {
            socket.ways.insert(host, Destination { way, next });
        }
        if way != before.and_then(|before| before.way) {
            let host = host.to_canonical();
            let after = After::DatagramWay(id, way.map_or(0, |way| way.mtu), caller.filter(|_| way.is_some()));
            self.nics[0].request(ToNic::DatagramWay { id, host, way }, &[], Some(after));
        }
        found.map(|(way, _)| way)
    }

    fn way_of_datagrams(
        &mut self,
        session: u32,
        fd: BorrowedFd<'_>,
        bound: SocketAddr,
        host: IpAddr,
    ) -> Result<(DatagramWay, IpAddr), Refusal> {
        let Shape::Inline { interface } = self.shape else { return Err(Refusal::CannotOpen) };
        let link = rtnetlink::link_at(&self.routes, interface).map_err(|error| system("RTM_GETLINK", &error))?;
        let any = bound.ip().to_canonical().is_unspecified();
        let source =
            if any { source_for(SocketAddr::new(host, bound.port())).map_err(|_| Refusal::NoRoute)? } else { bound.ip() };
        let local = SocketAddr::new(source.to_canonical(), bound.port());
        let (mut ground, _) = self.split(session).ok_or(Refusal::Ended)?;
        let (hop, next) = ground.way_to(fd, local, host)?;
        let mtu = if host.is_ipv4() { link.mtu } else { link.mtu.min(MTU_V6) };
        Ok((DatagramWay { source: local.ip(), hop, mtu }, next))
    }

    /// Has those ways looked up again for which `of` is true, since routes, neighbours or policies have changed: a
    /// bounded number in each round of the agent.
    pub(crate) fn follow_datagram_ways(&mut self, of: impl Fn(&Host) -> bool) {
        let Datagrams { by_id, stale, .. } = &mut self.datagrams;
        for (id, socket) in by_id {
            let of = |to: &Destination| of(&Host { way: to.way.map(|way| way.hop), next: to.next, stale: false });
            stale.all.extend(socket.ways.iter().filter(|(_, to)| of(to)).map(|(host, _)| (*id, *host)));
        }
        self.looks.datagram_ways |= !stale.all.is_empty();
    }

    /// Looks up the next ways for which that is due. Returns whether there are more.
    pub(crate) fn follow_next_datagram_ways(&mut self) -> bool {
        for (id, host) in self.datagrams.stale.take(WAYS_AT_ONCE) {
            // The program may not use it any more.
            let Some(before) = self.datagrams.by_id.get(&id).and_then(|socket| socket.ways.get(&host)).copied() else { continue };
            if self.follow_datagram_way(id, host, None).ok() != before.way {
                self.publish_datagrams(id, true);
            }
        }
        !self.datagrams.stale.all.is_empty()
    }

    /// Examines all sockets anew, since the host's addresses or rules have changed, there is another NIC, or Baton
    /// ends: those that the NIC cannot have are the kernel's until it can.
    pub(crate) fn follow_datagrams(&mut self) {
        let can = self.can_open();
        for id in self.datagrams.by_id.keys().copied().collect::<Vec<_>>() {
            self.looks.unread.note(&can, monotonic_micros());
            if can.is_ok() {
                self.examine_datagrams(id);
            } else {
                self.return_datagrams(id);
            }
            if let Some(socket) = self.datagrams.by_id.get_mut(&id) {
                // The program asks for those that it still uses.
                socket.ways.clear();
            }
        }
    }

    /// Gives one of a session's sockets, or all of them, to the kernel. None if the answer to the request with that tag
    /// comes when that is done. Their rings are free when the NIC has answered, however late: see [`Place`].
    pub(crate) fn end_datagrams(&mut self, session: u32, only: Option<u32>, replay: bool, tag: Option<u32>) -> Option<Reply> {
        let mut caller = tag.and_then(|tag| self.caller(session, tag));
        let its = |socket: &Socket, id: u32| socket.session == session && only.is_none_or(|only| only == id);
        let ids: Vec<u32> = self.datagrams.by_id.iter().filter(|(id, socket)| its(socket, **id)).map(|(id, _)| *id).collect();
        for id in ids {
            if let Some(socket) = self.datagrams.by_id.remove(&id) {
                self.ask_to_end_datagrams(id, socket.place, replay, caller.take());
            }
        }
        (tag.is_none() || caller.is_some()).then_some(Reply::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nic_requests::Requests;
    use baton_linux::control::Channel;
    use baton_protocol::nic::ToAgent;

    const BASE: u32 = 8192;

    fn held(memory: &Region) -> bool {
        let starts = memory.word32(layout::AGENT_STARTS).load(Ordering::Acquire);
        memory.word32(BASE as usize + datagrams::HELD).load(Ordering::Acquire) == datagrams::held(starts)
    }

    fn memory() -> Arc<Region> {
        Arc::new(Region::private(1 << 16).expect("memory"))
    }

    /// A socket goes to the kernel for a while, and then for good, and the NIC answers to neither in time: its rings
    /// are its program's when both answers have come.
    #[test]
    fn rings_are_held_until_the_last_end_is_answered() {
        let memory = memory();
        let (ours, theirs) = Channel::pair().expect("two sockets");
        let mut requests = Requests::new(ours);
        let place = Place::lend(&memory, BASE, None).expect("nobody has them");
        for place in [place.clone(), place] {
            let after = Some(After::EndDatagrams(place, None));
            assert!(requests.send(ToNic::EndDatagrams { id: 1, replay: false }, &[], after).is_ok());
        }
        assert_eq!(requests.become_late(u64::MAX).count(), 2);
        for is_last in [false, true] {
            assert!(held(&memory));
            theirs.send(&ToAgent::Served, &[]).expect("an answer");
            let Some((After::EndDatagrams(place, _), Ok(()))) = requests.receive() else { panic!("another answer") };
            place.publish(false);
            drop(place);
            assert_eq!(held(&memory), !is_last);
        }
    }

    /// Each has its turn, also where the first ones change again and again.
    #[test]
    fn some_ways_are_looked_up_at_a_time() {
        let ways = [(1, 1), (1, 2), (3, 1), (3, 9)].map(|(id, host): (u32, u8)| (id, IpAddr::from([10, 0, 0, host])));
        let mut stale = Stale { all: BTreeSet::new(), from: (0, IpAddr::from([0; 4])) };
        stale.all.extend(ways);
        assert_eq!(stale.take(2), [ways[0], ways[1]]);
        stale.all.extend([ways[0]]);
        assert_eq!(stale.take(2), [ways[2], ways[3]]);
        assert_eq!(stale.take(2), [ways[0]]);
        assert!(stale.take(2).is_empty() && stale.all.is_empty());
    }

    /// What a NIC that has ended was asked is answered by its end.
    #[test]
    fn a_nic_that_has_ended_holds_no_rings() {
        let memory = memory();
        let (ours, theirs) = Channel::pair().expect("two sockets");
        let mut requests = Requests::new(ours);
        let after = After::EndDatagrams(Place::lend(&memory, BASE, None).expect("nobody has them"), None);
        assert!(requests.send(ToNic::EndDatagrams { id: 1, replay: false }, &[], Some(after)).is_ok());
        drop(theirs);
        assert!(requests.receive().is_none() && held(&memory));
        drop(requests.take_all());
        assert!(!held(&memory));
    }

    /// Rings that a NIC may use get no second socket, whose end would free them under the first one's NIC. What an
    /// agent that has died has left there does not count.
    #[test]
    fn rings_are_lent_once() {
        let memory = memory();
        let first = Place::lend(&memory, BASE, None).expect("nobody has them");
        assert!(Place::lend(&memory, BASE, None).is_none() && held(&memory));
        drop(first);
        std::mem::forget(Place::lend(&memory, BASE, None).expect("nobody has them"));
        memory.word32(layout::AGENT_STARTS).fetch_add(1, Ordering::AcqRel);
        assert!(!held(&memory));
        let second = Place::lend(&memory, BASE, None).expect("that agent has died");
        assert!(held(&memory));
        drop(second);
        assert!(!held(&memory));
    }
}
