//! Connections that the NIC opens for a program (connect(2)).
//!
//! The program's socket is bound first: the kernel chooses the port (RFC 6056) and keeps it from others. While the NIC
//! opens the connection its block counts as the NIC's, with no room to send and nothing to read. Once it is open the
//! socket becomes its shell, and it is handed off like one that the NIC has made for a listener. If the NIC or the
//! agent dies before, or the program wants the connection in the kernel, the kernel opens it.
//!
//! Each of these calls waits for the socket's lock, which its program may hold: see [`crate::calls`].

use crate::agent::Agent;
use crate::connection::{Asker, Connection};
use crate::journal;
use crate::listening::make_shell;
use crate::memory::Limits;
use crate::nic::NicProcess;
use crate::record::{read_image, unpublish};
use crate::way::Way;
use baton_abi::layout::{Owner, block, nic, scratch, slot};
use baton_abi::{Control, Message, Operation};
use baton_core::Stage;
use baton_handoff::examine::system;
use baton_handoff::{listening, shell};
use baton_image::{Image, MAX_ENCODED};
use baton_linux::foreign::Foreign;
use baton_linux::{diagnosis, socket};
use baton_log::warning;
use baton_moves::{Event, Refusal};
use baton_protocol::keeper::Kept;
use baton_protocol::program::{Place, Reply, Until};
use baton_steering::Steer;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

/// Linux's error number of a connection that was given up (ECONNABORTED).
pub(crate) const ABORTED: u32 = 103;

/// Bytes that count as queued while the connection is opened: more than send memory ever holds.
const NO_ROOM: u32 = 1 << 28;

/// The address from which the kernel would send to a peer.
pub(crate) fn source_for(peer: SocketAddr) -> std::io::Result<IpAddr> {
    let any: SocketAddr = if peer.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let probe = UdpSocket::bind(any)?;
    probe.connect(peer)?;
    Ok(probe.local_addr()?.ip())
}

/// What a socket says that is to be connected.
struct Unconnected {
    bound: SocketAddr,
    patience: Patience,
}

/// How long a handshake is tried.
#[derive(Clone, Copy)]
struct Patience {
    /// Times that the SYN is repeated (TCP_SYNCNT).
    retries: u32,
    /// TCP_USER_TIMEOUT in milliseconds, 0 for none.
    user_timeout: u32,
}

impl Unconnected {
    fn read(fd: BorrowedFd<'_>) -> Result<Unconnected, Refusal> {
        listening::check_unconnected(fd)?;
        let bound = socket::local_address(fd).map_err(|error| system("getsockname", &error))?;
        let retries = socket::syn_retries(fd).map_err(|error| system("TCP_SYNCNT", &error))?;
        let user_timeout = socket::user_timeout(fd).map_err(|error| system("TCP_USER_TIMEOUT", &error))?;
        Ok(Unconnected { bound, patience: Patience { retries, user_timeout } })
    }
}

/// How the NIC is to open a connection.
struct Plan {
    /// Its own end; the port may still be 0.
    local: SocketAddr,
    peer: SocketAddr,
    way: Way,
    patience: Patience,
}

fn answer(begun: Result<u32, Refusal>) -> Reply {
    match begun {
        Ok(connection) => Reply::Registered { connection },
        Err(refusal) => Reply::Stayed { transient: refusal.is_transient(), reason: refusal.to_string() },
    }
}

/// Forgets connections of this socket that have ended. An agent that died may have begun to open one whose number the
/// program never received. If it stayed, the next agent would disconnect the socket on its account.
fn forget_earlier(agent: &mut Agent, session: u32, fd: BorrowedFd<'_>) {
    let Ok(cookie) = socket::cookie(fd) else { return };
    let known = agent.sessions.get(session as usize).and_then(Option::as_ref).map(|session| session.connections.iter().flatten());
    let ended = known.into_iter().flatten().filter(|one| one.cookie == cookie && one.stage() == Stage::Ended);
    for number in ended.map(Connection::number).collect::<Vec<_>>() {
        agent.finish_forgetting(session, number);
    }
}

impl Agent {
    /// Makes the NIC open a connection of a session's program. The answer comes before the handshake is over; None if
    /// it comes when the socket has been looked at, and bound.
    pub(crate) fn connect(&mut self, asker: Asker, fd: Foreign, peer: SocketAddr) -> Option<Reply> {
        if let Err(refusal) = self.can_open() {
            return Some(answer(Err(refusal)));
        }
        self.on_sent(asker, (fd, None), Unconnected::read, move |agent, fd, found| {
            match found.and_then(|found| agent.plan_connecting(asker.0, fd, peer, found)) {
                Ok((fd, plan)) if plan.local.port() != 0 => Some(answer(agent.begin_connecting(asker.0, fd, plan))),
                Ok((fd, plan)) => agent.bind_and_connect(asker, fd, plan),
                Err(refusal) => Some(answer(Err(refusal))),
            }
        })
    }

    /// Checks whether the NIC can open a connection, before anything of its socket is changed.
    fn plan_connecting(
        &mut self,
        session: u32,
        fd: Foreign,
        peer: SocketAddr,
        Unconnected { bound, patience }: Unconnected,
    ) -> Result<(Foreign, Plan), Refusal> {
        self.can_open()?;
        if bound.port() != 0 && bound.ip().is_unspecified() {
            // The kernel keeps such a port for all addresses, and gives the socket one when it connects.
            return Err(Refusal::Option("a port without an address"));
        }
        let address = if bound.ip().is_unspecified() { source_for(peer).map_err(|_| Refusal::NoRoute)? } else { bound.ip() };
        let local = SocketAddr::new(address, bound.port());
        self.has_room_for(Some(session), fd.as_fd(), 0)?;
        let mut connection = self.new_connection(session, fd, local, peer)?;
        self.cgroups.let_go(connection.cgroup.as_ref(), peer)?;
        let way = self.split(session).ok_or(Refusal::NoRoom)?.0.way_of(&connection)?;
        let fd = connection.fd.take().ok_or(Refusal::Elsewhere)?;
        Ok((fd, Plan { local, peer, way, patience }))
    }

    /// From here on the port is this connection's.
    fn bind_and_connect(&mut self, asker: Asker, fd: Foreign, plan: Plan) -> Option<Reply> {
        let local = plan.local;
        let bind = move |fd: BorrowedFd<'_>| {
            socket::bind_now(fd, local).map_err(|error| system("bind", &error))?;
            socket::local_address(fd).map_err(|error| system("getsockname", &error))
        };
        self.on_sent(asker, (fd, None), bind, move |agent, fd, bound| {
            Some(answer(bound.and_then(|local| agent.begin_connecting(asker.0, fd, Plan { local, ..plan }))))
        })
    }

    fn begin_connecting(&mut self, session: u32, fd: Foreign, plan: Plan) -> Result<u32, Refusal> {
        let Plan { local, peer, way, patience } = plan;
        forget_earlier(self, session, fd.as_fd());
        let mut connection = self.new_connection(session, fd, local, peer)?;
        // First: nothing fails any more once the NIC has the command to connect.
        let kept = Foreign::duplicate(connection.fd()?).map_err(|error| system("dup", &error))?;
        let nic = way.path.nic as usize;
        connection.flow.device = way.device();
        if !self.shape.claim(&connection.flow) {
            return Err(Refusal::Twin);
        }
        // Steered at once.
        self.shape.give_up_claim(&connection.flow);
        let cid = self.nics.get_mut(nic).and_then(NicProcess::take_slot).ok_or(Refusal::NoRoom)?;
        if let Err(refusal) = self.shape.steer(&connection.flow, &way.path, Steer::Steal) {
            self.nics[nic].give_slot(cid);
            return Err(refusal);
        }
        connection.cid = Some(cid);
        connection.opening = true;
        let Patience { retries, user_timeout } = patience;
        let image = Image { link: way.link, mtu: way.mtu, user_timeout, ..Image::open(connection.flow) };
        self.write_opening(session, &connection, &image);
        let command = Message::control(Operation::NicControl, Control::Connect, cid, retries, 0);
        let begun = self.nics[nic].post_within(command);
        // If the NIC refuses it, the kernel opens the connection.
        if let Err(refusal) = begun {
            self.nics[nic].give_slot(cid);
            self.shape.unsteer(&connection.flow);
            return Err(refusal);
        }
        let (number, serial) = (connection.number(), connection.serial);
        self.sessions[session as usize].as_mut().ok_or(Refusal::NoRoom)?.connections.put(connection);
        self.keep(&Kept::Connection(session, number, Until::Again), &[kept.as_fd()]);
        self.note_registered(session, number, serial);
        Ok(number)
    }

    /// Writes what the NIC needs to open a connection into its slot, and what the program sees meanwhile into its
    /// block.
    fn write_opening(&mut self, session: u32, connection: &Connection, image: &Image) {
        let Some(cid) = connection.cid else { return };
        let limits = connection.fd().map(|fd| Limits::of(fd, &mut self.known)).unwrap_or_default();
        let (memory, base) = (&self.hardware[cid.nic()].memory, nic::slot(cid.slot()));
        unpublish(memory, cid.slot());
        let mut bytes = [0u8; MAX_ENCODED];
        let _ = image.encode(&mut bytes);
        let _ = memory.write(nic::scratch(cid.slot()) + scratch::IMAGE, &bytes);
        let _ = memory.write(base + slot::FLOW, &connection.flow.to_bytes());
        journal::note_occupant(memory, cid, (session, connection.number()));
        limits.write(limits.receive, memory, cid);
        let b = &connection.block;
        for field in [block::RECEIVE_SIZE, block::SEND_SIZE, block::READ_SEQ, block::RECEIVE_SEQ] {
            b.store(field, 0);
        }
        b.store(block::ACKED_SEQ, 0);
        b.store(block::QUEUED_SEQ, NO_ROOM);
        b.store(block::ERROR, 0);
        b.store(block::CID, cid.0);
        b.store(block::FLAGS, block::FLAG_OPENING);
        b.store(block::MOVES, 1);
        b.set_owner(Owner::Nic);
    }

    /// Handles the NIC's message that a connection which it was to open is open: its socket becomes the shell.
    pub(crate) fn opened(&mut self, session: u32, number: u32) {
        let Some(connection) = self.connection_ref(session, number).filter(|connection| connection.is_only_opening()) else {
            return;
        };
        let (Some(cid), ends) = (connection.cid, (connection.local(), connection.peer())) else { return };
        let Ok(image) = read_image(&self.hardware[cid.nic()].memory, cid) else { return self.open_in_kernel(session, number) };
        let by = self.nics[cid.nic()].process();
        let make = move |fd: BorrowedFd<'_>| {
            let made = diagnosis::with_own(|diagnosis| Ok(make_shell(diagnosis, fd, ends, &image)));
            made.map_err(|error| system("socket diagnosis", &error))?
        };
        let made = self.on_resting(session, number, make, move |agent, session, number, saved| {
            let same = agent.nics[cid.nic()].process() == by;
            let saved = saved.and_then(|saved| if same { Ok(saved) } else { Err(Refusal::NicGone) });
            agent.finish_opening(session, number, image, saved);
        });
        if let Err(refusal) = made {
            self.finish_opening(session, number, image, Err(refusal));
        }
    }

    /// Hands off a connection that the NIC has opened, now that its socket is the shell.
    fn finish_opening(&mut self, session: u32, number: u32, image: Image, saved: Result<shell::Saved, Refusal>) {
        let Some(connection) = self.connection(session, number) else { return };
        connection.opening = false;
        connection.block.read_moves();
        match saved.and_then(|saved| self.take_in_opened(session, number, image, &saved)) {
            Ok(()) => {
                self.drive(session, number, Event::Tick);
                if let Some(connection) = self.connection(session, number) {
                    connection.reason = "the NIC made it".into();
                }
            }
            Err(refusal) => {
                warning!(
                    [session = session] "a connection that the NIC has opened is given up: {refusal}";
                    "its program has to connect again"
                );
                if let Some(cid) = self.connection(session, number).and_then(|connection| connection.cid.take()) {
                    self.nics[cid.nic()].reset_connection(cid);
                }
                self.fail_opening(session, number, ABORTED);
            }
        }
    }

    fn take_in_opened(&mut self, session: u32, number: u32, image: Image, saved: &shell::Saved) -> Result<(), Refusal> {
        let connection = self.connection_ref(session, number).ok_or(Refusal::Ended)?;
        let flags = connection.block.load(block::FLAGS);
        // The program may have set them while the NIC opened the connection.
        let set = |flag, before| before || flags & flag != 0;
        let saved = saved.with_programs(set(block::FLAG_KEEPALIVE, saved.keepalive()), set(block::FLAG_CORK, saved.cork()));
        let (ground, entry) = self.split(session).ok_or(Refusal::NoRoom)?;
        let connection = entry.connections.get(number as usize).and_then(Option::as_ref).ok_or(Refusal::Ended)?;
        let limits = Limits::of(connection.fd()?, ground.known);
        self.prepare_handoff(session, number, image, saved, limits)
    }

    /// Handles the NIC's message that a connection could not be opened, or gives one up: the program sees the error.
    pub(crate) fn fail_opening(&mut self, session: u32, number: u32, error: u32) {
        if let Some(flow) = self.connection(session, number).map(|connection| connection.flow) {
            self.shape.unsteer(&flow);
        }
        let Some((_, entry)) = self.split(session) else { return };
        let (Some(open), Some(Some(connection))) = (&entry.open, entry.connections.get_mut(number as usize)) else { return };
        connection.opening = false;
        connection.block.read_moves();
        connection.block.count_move();
        connection.reason = "it could not be opened".into();
        connection.block.store(block::ERROR, error);
        connection.block.set_flags(0);
        connection.block.note_moves();
        open.announce_move(number);
        if let Some(cid) = connection.cid.take() {
            self.nics[cid.nic()].give_slot(cid);
        }
    }

    /// Lets the kernel open a connection that the NIC has not opened yet. Does nothing for another one.
    pub(crate) fn open_in_kernel(&mut self, session: u32, number: u32) {
        let Some(connection) = self.connection(session, number).filter(|connection| connection.is_only_opening()) else { return };
        connection.block.read_moves();
        let (cid, flow, peer) = (connection.cid.take(), connection.flow, connection.peer());
        // First, since the NIC drops what the kernel sends of a connection that it has itself.
        if let Some(cid) = cid {
            self.drop_made(cid);
        }
        self.shape.unsteer(&flow);
        let begin = move |fd: BorrowedFd<'_>| socket::begin_connecting(fd, peer).is_ok();
        if self.on_resting(session, number, begin, Agent::opened_in_kernel).is_err() {
            self.fail_opening(session, number, ABORTED);
        }
    }

    fn opened_in_kernel(&mut self, session: u32, number: u32, begun: bool) {
        if !begun {
            return self.fail_opening(session, number, ABORTED);
        }
        let Some((_, entry)) = self.split(session) else { return };
        if let (Some(open), Some(Some(connection))) = (&entry.open, entry.connections.get_mut(number as usize)) {
            connection.opening = false;
            connection.block.set_flags(0);
            connection.made_by = Place::Kernel;
            crate::perform::hand_to_kernel(open, connection);
        }
    }

    /// Lets the kernel open all connections that NICs are opening.
    pub(crate) fn open_all_in_kernel(&mut self) {
        for (session, number) in self.all_connections() {
            self.open_in_kernel(session, number);
        }
    }

    /// Lets the kernel open all connections that a NIC which has died was opening.
    pub(crate) fn open_in_kernel_instead_of(&mut self, nic: usize) {
        for (session, number) in self.all_connections() {
            if self.nic_of(session, number) == Some(nic) {
                self.open_in_kernel(session, number);
            }
        }
    }
}
