//! A program's session as the agent holds it.

use crate::connection::Memory;
use crate::connections::Connections;
use baton_abi::layout::session as at;
use baton_client::heap::Heap;
use baton_linux::bell::SessionBell;
use baton_linux::control::Channel;
use baton_protocol::program::{Answer, Opening};
use baton_ring::Consumer;
use baton_shm::Region;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(crate) struct Session {
    pub channel: Channel,
    pub process: u32,
    pub user: u32,
    /// How it was opened.
    pub opening: Opening,
    /// None until the program has opened its session (a tool never does).
    pub open: Option<OpenSession>,
    pub connections: Connections,
}

/// Why a session ends whose program lets answers pile up.
pub(crate) const DEAF: &str = "it does not read its answers";

/// What became of a message to a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sent {
    /// It is on its way, or its program is gone, which is found out by the channel.
    Done,
    /// There is no room: the program does not read.
    Full,
}

impl Session {
    /// Sends a message to the program. It never waits for that to read.
    pub fn send(&self, answer: &Answer, descriptors: &[BorrowedFd<'_>]) -> Sent {
        match self.channel.try_send(answer, descriptors) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Sent::Full,
            _ => Sent::Done,
        }
    }

    /// One whose program has not opened it yet.
    pub fn new(channel: Channel) -> io::Result<Session> {
        let (process, user) = (channel.peer_process()?, channel.peer_user()?);
        Ok(Session { channel, process, user, opening: Opening::alone(), open: None, connections: Connections::default() })
    }
}

pub(crate) struct OpenSession {
    pub memory: Arc<Region>,
    /// The NIC's and this agent's end: what is rung here the program hears.
    pub bell: SessionBell,
    pub heap: Heap,
    /// Memory of connections that ended on the NIC: the program may still read it until it forgets them.
    pub ended: BTreeMap<u32, Memory>,
}

impl OpenSession {
    /// One with new memory, and the program's end of its doorbells.
    pub fn new(bytes: usize) -> io::Result<(OpenSession, SessionBell)> {
        let (ours, theirs) = SessionBell::pair()?;
        Ok((Self::with_memory(Arc::new(Region::create("baton-session", bytes)?), ours), theirs))
    }

    /// Memory that a session has already.
    pub fn with_memory(memory: Arc<Region>, bell: SessionBell) -> OpenSession {
        OpenSession { heap: Heap::new(at::HEAP, at::heap_end(memory.len())), memory, bell, ended: BTreeMap::new() }
    }

    /// Tells the program that a connection has moved, or that any may have ([`at::ANY`]).
    pub fn announce_move(&self, number: u32) {
        self.note_move(number);
        self.bell.ring();
    }

    /// The same, for when the program looks next.
    pub fn note_move(&self, number: u32) {
        let moves = self.memory.word32(at::MOVES);
        let entry = moves.load(Ordering::Acquire) % at::MOVED_ENTRIES;
        self.memory.word32(at::MOVED + 4 * entry as usize).store(number, Ordering::Release);
        moves.fetch_add(1, Ordering::AcqRel);
    }

    /// Drops commands that the program gave to a NIC that has died: what they said is in the connections' blocks, too.
    pub fn forget_commands(&self) {
        Consumer::new(self.memory.ring(at::COMMANDS)).skip_all();
    }
}
