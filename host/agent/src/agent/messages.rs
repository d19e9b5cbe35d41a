//! Sessions for messages (RMPP): admission of their endpoints, and the ways to the hosts that they send to.

use super::Agent;
use crate::answers::{After, Caller};
use crate::calls::outsider;
use crate::ground::{Ground, Shape};
use crate::session::{Host, OpenSession, Session};
use anyhow::{Context, Result, bail};
use baton_abi::layout::session;
use baton_handoff::examine::system;
use baton_linux::foreign::{self, Foreign};
use baton_linux::{frames, rtnetlink, socket};
use baton_moves::Refusal;
use baton_protocol::nic::ToNic;
use baton_protocol::program::{Messages, Opening, Reply};
use baton_steering::{FURTHER, Path, Steer, messages_flow};
use baton_wire::rmpp::envelope::{ETHERTYPE_RMPP, ethernet_address};
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::ops::Bound::{Excluded, Unbounded};
use std::os::fd::{AsFd, BorrowedFd};

/// Hosts whose ways are looked up again before the agent turns to others.
const HOSTS_AT_ONCE: usize = 64;

impl Agent {
    /// Checks the endpoint that a session is to be opened with. The address is that of the socket: who can bind a port
    /// may have its packets, and nobody else.
    pub(super) fn examine_messages(
        &self,
        number: u32,
        opening: &Opening,
        socket: Option<&(Foreign, Bound)>,
    ) -> Result<Option<Messages>> {
        let Some(asked) = &opening.messages else { return Ok(None) };
        if opening.attacher {
            bail!("an attacher's session is for connections");
        }
        if matches!(self.shape, Shape::Beside { .. }) && asked.receiving != asked.sending {
            bail!("beside the kernel the NIC has both halves of the data half, or none: a device may merge packets for either");
        }
        let (socket, bound) = socket.context("a session for messages needs a UDP socket")?;
        self.has_room_for(Some(number), socket.as_fd(), 0).map_err(anyhow::Error::new)?;
        let address = match *bound {
            Bound::Udp(address) => address,
            Bound::Frames(binding) => self.ethernet_address(binding)?,
        };
        let opening = |session: &Session| {
            session.begun.as_ref().map_or(session.opening.messages.clone(), |begun| begun.opening.messages.clone())
        };
        let used = self.sessions.iter().flatten().filter_map(opening);
        // The NIC tells sessions apart by address and port, not by a link-local address's scope.
        let ends = |address: SocketAddr| (address.ip().to_canonical(), address.port());
        if used.into_iter().any(|other| ends(other.address) == ends(address)) {
            bail!("another session has the messages for {address}");
        }
        let messages = Messages { address, ..asked.clone() };
        messages.check(session::HEAP as u64, self.settings.session_bytes as u64).map_err(anyhow::Error::msg)?;
        Ok(Some(messages))
    }

    /// The address of an endpoint that raw Ethernet frames come to. Who may open a packet socket of RMPP's type at the
    /// NIC's interface may have its frames.
    fn ethernet_address(&self, binding: Option<(u16, u32)>) -> Result<SocketAddr> {
        let Shape::Inline { interface } = &self.shape else {
            bail!("messages in raw Ethernet frames need a NIC between kernel and wire; this one is beside the kernel");
        };
        if binding != Some((ETHERTYPE_RMPP, *interface)) {
            bail!(
                "messages in raw Ethernet frames need a packet socket bound to type {ETHERTYPE_RMPP:#x} and the NIC's interface"
            );
        }
        let link = rtnetlink::link_at(&self.routes, *interface).context("the NIC's interface")?;
        Ok(SocketAddr::from(ethernet_address(link.address)))
    }

    /// Polls the sockets of the next sessions for messages, `most` at most: one whose program has disconnected it has
    /// lost the port that the kernel had chosen. Such a session is ended. Returns where to go on, and whether there are
    /// any.
    pub(crate) fn look_at_messages(&mut self, from: u32, most: usize) -> (u32, bool) {
        let turn = next_with_socket(&self.sessions, from, most);
        let next = turn.last().map_or(0, |last| last + 1);
        for number in turn.iter().copied() {
            let Some(Some(session)) = self.sessions.get_mut(number as usize) else { continue };
            let (Some(messages), Some(open)) = (&session.opening.messages, &mut session.open) else { continue };
            let Some(socket) = open.socket.clone() else { continue };
            if std::mem::replace(&mut open.is_polled, true) {
                continue;
            }
            let (address, local) = (messages.address, |fd: BorrowedFd<'_>| socket::local_address(fd).ok());
            self.on_shared(number, &socket, local, move |agent, local| {
                if local != Some(address) {
                    agent.cut_off.push((number, "its UDP socket does not have its address any more"));
                }
                let open = agent.sessions.get_mut(number as usize).and_then(|session| session.as_mut()?.open.as_mut());
                open.into_iter().for_each(|open| open.is_polled = false);
            });
        }
        (next, !turn.is_empty())
    }

    /// Beside the kernel: lets the NIC, and not the kernel, receive the datagrams to an endpoint's address.
    pub(super) fn steal_messages(&mut self, address: SocketAddr, open: &OpenSession) -> Result<(), Refusal> {
        let path = path_of(open)?;
        self.shape.steer(&messages_flow(address.into()), &path, Steer::Steal)
    }

    /// Lets a session for messages send to a host.
    /// None if the answer comes when the NIC knows the way.
    pub(super) fn reach(&mut self, number: u32, tag: u32, host: IpAddr) -> Option<Reply> {
        let failed = |reason: String| Some(Reply::Failed { reason });
        let caller = self.caller(number, tag);
        let Some((mut ground, session)) = self.split(number) else { return failed("open the session first".into()) };
        let (Some(messages), Some(open)) = (&session.opening.messages, &mut session.open) else {
            return failed("this session is not for messages".into());
        };
        if messages.ethernet {
            return failed("raw Ethernet needs no way to a host".into());
        }
        if open.hosts.len() >= session::MOST_HOSTS && !open.hosts.contains_key(&host) {
            return failed(format!("the session sends to {} hosts already", session::MOST_HOSTS));
        }
        match ground.find_host(number, messages.address, open, host, caller) {
            Ok(asked) => (!asked).then_some(Reply::Done),
            Err(refusal) => Some(Reply::Stayed { transient: refusal.is_transient(), reason: refusal.to_string() }),
        }
    }

    /// Has the ways to those hosts looked up again for which `of` is true, a bounded number in each round of the agent.
    /// Packets to a host without a way are dropped, as the kernel would drop them, until it has one again.
    pub(crate) fn follow_hosts(&mut self, of: impl Fn(&Host) -> bool) {
        let open = self.sessions.iter_mut().flatten().filter_map(|session| session.open.as_mut());
        for host in open.flat_map(|open| open.hosts.values_mut()).filter(|host| of(host)) {
            host.stale = true;
            self.looks.hosts = true;
        }
    }

    /// Looks up the ways to the next hosts for which that is due. Returns whether there may be more.
    pub(crate) fn follow_next_hosts(&mut self) -> bool {
        let turn = next_stale_hosts(&self.sessions, self.looks.hosts_from, HOSTS_AT_ONCE);
        for (number, host) in turn.iter().copied() {
            self.looks.hosts_from = number + 1;
            let Some((mut ground, session)) = self.split(number) else { continue };
            let (Some(messages), Some(open)) = (&session.opening.messages, &mut session.open) else { continue };
            open.last_host = host;
            open.hosts.entry(host).and_modify(|host| host.stale = false);
            // Why there is no way is not kept: a request for this host asks the kernel again, and its answer says why.
            let _ = ground.find_host(number, messages.address, open, host, None);
        }
        turn.len() == HOSTS_AT_ONCE
    }
}

impl Ground<'_> {
    /// Looks up the way to a host and gives it to the NIC, if it is another one than before. Returns whether the NIC's
    /// answer is awaited.
    fn find_host(
        &mut self,
        number: u32,
        local: SocketAddr,
        open: &mut OpenSession,
        host: IpAddr,
        caller: Caller,
    ) -> Result<bool, Refusal> {
        let Some(socket) = open.socket.as_ref() else { return Err(Refusal::NoRoute) };
        let found = self.way_to(socket.as_fd(), local, host);
        let before = open.hosts.get(&host).copied();
        if before.is_none() && found.is_err() {
            return found.map(|_| false);
        }
        let (way, next) = match &found {
            Ok((hop, next)) => (Some(*hop), *next),
            Err(_) => (None, before.map_or(host, |before| before.next)),
        };
        open.hosts.insert(host, Host { way, next, stale: false });
        let asks = before.and_then(|before| before.way) != way;
        if asks {
            if way.is_some() {
                let steered = path_of(open).and_then(|path| self.shape.steer(&messages_flow(local.into()), &path, Steer::Steal));
                steered.inspect_err(|_| _ = open.hosts.insert(host, Host { way: None, next, stale: false }))?;
            }
            let message = ToNic::Reach { session: number, host, hop: way };
            self.nic().request(message, &[], Some(After::Reach(host, caller.filter(|_| way.is_some()))));
        }
        if matches!(found, Err(Refusal::NoNeighbour))
            && let Some(socket) = open.socket.as_ref()
        {
            // The kernel looks for the neighbour, and reports it when it has an answer. Whatever becomes of it, nobody
            // waits.
            let (socket, to) = (socket.clone(), SocketAddr::new(host, local.port()));
            let send = move || _ = socket::send_empty(socket.as_fd(), to);
            match outsider(self.user, self.process, None) {
                None => send(),
                Some(user) if foreign::has_many_calls(user) => {}
                Some(user) => foreign::call_for(user, send),
            }
        }
        found.map(|_| asks)
    }
}

/// The numbers of up to `most` sessions for messages that have a UDP socket, in turn: those from `from` on, then those
/// before it.
fn next_with_socket(sessions: &[Option<Session>], from: u32, most: usize) -> Vec<u32> {
    let has_socket = |number: &u32| {
        let session = sessions.get(*number as usize).and_then(Option::as_ref).filter(|session| !session.ends);
        session.is_some_and(|session| session.opening.messages.as_ref().is_some_and(|messages| !messages.ethernet))
            && session.and_then(|session| session.open.as_ref()).is_some_and(|open| open.socket.is_some())
    };
    let (all, from) = (sessions.len() as u32, from.min(sessions.len() as u32));
    (from..all).chain(0..from).filter(has_socket).take(most).collect()
}

/// Up to `most` hosts whose ways are to be looked up again, each with its session's number, in turn: those of the
/// sessions from `from` on, then of those before it. Those of one session are in turn, too.
fn next_stale_hosts(sessions: &[Option<Session>], from: u32, most: usize) -> Vec<(u32, IpAddr)> {
    let (all, from) = (sessions.len() as u32, from.min(sessions.len() as u32));
    let hosts_of = |number: u32| {
        let session = sessions[number as usize].as_ref().filter(|session| session.opening.messages.is_some());
        let hosts = session.and_then(|session| session.open.as_ref()).into_iter().flat_map(hosts_in_turn);
        hosts.filter(|(_, host)| host.stale).map(move |(address, _)| (number, *address))
    };
    (from..all).chain(0..from).flat_map(hosts_of).take(most).collect()
}

/// A session's hosts, beginning behind the one whose way was looked up again last.
fn hosts_in_turn(open: &OpenSession) -> impl Iterator<Item = (&IpAddr, &Host)> {
    open.hosts.range((Excluded(open.last_host), Unbounded)).chain(open.hosts.range(..=open.last_host))
}

/// What the socket of a session for messages is bound to.
#[derive(Clone, Copy)]
pub(super) enum Bound {
    Udp(SocketAddr),
    /// Type of frame and interface, if it is a packet socket of this network namespace.
    Frames(Option<(u16, u32)>),
}

impl Bound {
    /// Reads it. Waits for the socket's lock.
    pub fn read(socket: BorrowedFd<'_>, ethernet: bool) -> Result<Bound> {
        if ethernet {
            let ours = socket::is_of_this_namespace(socket).unwrap_or(false);
            return Ok(Bound::Frames(frames::binding(socket).ok().filter(|_| ours)));
        }
        if !socket::is_udp(socket) {
            bail!("a session for messages needs a UDP socket");
        }
        let address = socket::local_address(socket).context("the socket's address")?;
        if address.ip().to_canonical().is_unspecified() || address.port() == 0 {
            bail!("bind the UDP socket to an address of this host and a port: a packet's checksum covers both");
        }
        Ok(Bound::Udp(address))
    }
}

/// The devices at which a session's datagrams are received: the one that its socket is bound to; or else those by which
/// its own leave, and all that the kernel accepts packets at whose answers leave by others.
fn path_of(open: &OpenSession) -> Result<Path, Refusal> {
    let socket = open.socket.as_ref().ok_or(Refusal::NoRoute)?;
    let bound = socket::device(socket.as_fd()).map_err(|error| system("SO_BINDTOIFINDEX", &error))?;
    if bound != 0 {
        return Ok(Path { leaves_by: bound, ..Path::default() });
    }
    let devices: BTreeSet<u32> = open.hosts.values().filter_map(|host| Some(host.way?.interface)).collect();
    if devices.len() > FURTHER + 1 {
        return Err(Refusal::ManyPaths(devices.len()));
    }
    let mut path = Path { anywhere: true, ..Path::default() };
    for (at, device) in devices.into_iter().enumerate() {
        match at {
            0 => path.leaves_by = device,
            _ => path.also_at[at - 1] = device,
        }
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_linux::control::Channel;
    use std::net::UdpSocket;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;

    /// A session for messages, or another one.
    fn session(messages: bool) -> Session {
        let mut session = Session::new(Channel::pair().expect("two sockets").0.into()).expect("a session");
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let messages = messages.then(|| Messages {
            address: socket.local_addr().expect("its address"),
            ethernet: false,
            endpoint: 1,
            receiving: true,
            sending: true,
            peers: 1,
            incoming: 1,
            outgoing: 1,
            buffers: session::HEAP as u64,
            buffer_count: 1,
            buffer_size: 1024,
            packet: 1024,
            posted: 0,
            unexpected: 0,
            receives: 0,
        });
        let (open, _) = OpenSession::new(session::HEAP + (1 << 20), 1).expect("memory");
        session.opening = Opening { messages, ..Opening::alone() };
        session.open = Some(OpenSession { socket: Some(Arc::new(Foreign::from(OwnedFd::from(socket)))), ..open });
        session
    }

    /// A session whose ways change all the time does not keep those of others from being looked up, nor its first hosts
    /// the others of its own.
    #[test]
    fn hosts_of_sessions_are_looked_up_in_turn() {
        let mut sessions = [Some(session(true)), None, Some(session(false)), Some(session(true))];
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        for session in sessions.iter_mut().flatten() {
            let hosts = &mut session.open.as_mut().expect("it is open").hosts;
            hosts.extend([1, 2, 3].map(|last| (address(last), Host { way: None, next: address(last), stale: last != 2 })));
        }
        assert_eq!(next_stale_hosts(&sessions, 0, 2), [(0, address(1)), (0, address(3))]);
        assert_eq!(next_stale_hosts(&sessions, 1, 3), [(3, address(1)), (3, address(3)), (0, address(1))]);
        assert_eq!(next_stale_hosts(&sessions, 9, 9).len(), 4, "the last sessions have ended");
        let open = sessions[0].as_mut().and_then(|session| session.open.as_mut()).expect("it is open");
        open.last_host = address(1);
        assert_eq!(next_stale_hosts(&sessions, 0, 3), [(0, address(3)), (0, address(1)), (3, address(1))]);
    }

    /// However many there are, some are polled at a time, and each has its turn.
    #[test]
    fn sessions_for_messages_are_polled_in_turn() {
        let mut sessions = [Some(session(true)), None, Some(session(false)), Some(session(true)), Some(session(true))];
        assert_eq!(next_with_socket(&sessions, 0, 2), [0, 3]);
        assert_eq!(next_with_socket(&sessions, 4, 2), [4, 0]);
        assert_eq!(next_with_socket(&sessions, 9, 9), [0, 3, 4], "the last sessions have ended");
        sessions[3].as_mut().expect("a session").ends = true;
        assert_eq!(next_with_socket(&sessions, 3, 9), [4, 0]);
    }
}
