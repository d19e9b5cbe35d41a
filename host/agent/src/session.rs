//! A program's session as the agent holds it.

use crate::connection::{Connection, Memory};
use baton_abi::layout::session as at;
use baton_client::heap::Heap;
use baton_client::protocol::Opening;
use baton_kernel::control::Channel;
use baton_kernel::events::Doorbell;
use baton_ring::{Consumer, Region};
use std::io;
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
    pub connections: Vec<Option<Connection>>,
}

impl Session {
    /// One whose program has not opened it yet.
    pub fn new(channel: Channel) -> io::Result<Session> {
        let (process, user) = (channel.peer_process()?, channel.peer_user()?);
        Ok(Session { channel, process, user, opening: Opening::alone(), open: None, connections: Vec::new() })
    }
}

pub(crate) struct OpenSession {
    pub memory: Arc<Region>,
    pub bell: Doorbell,
    pub heap: Heap,
    /// Memory of connections that ended on the NIC: the program may still read it until it forgets them.
    pub ended: Vec<(u32, Memory)>,
}

impl OpenSession {
    pub fn new(bytes: usize) -> io::Result<OpenSession> {
        Ok(Self::with_memory(Arc::new(Region::create("baton-session", bytes)?), Doorbell::new()?))
    }

    /// Memory that a session has already.
    pub fn with_memory(memory: Arc<Region>, bell: Doorbell) -> OpenSession {
        OpenSession { heap: Heap::new(at::HEAP, at::heap_end(memory.len())), memory, bell, ended: Vec::new() }
    }

    /// Tells the program that something has moved.
    pub fn announce_move(&self) {
        self.memory.word32(at::MOVES).fetch_add(1, Ordering::AcqRel);
        self.bell.ring();
    }

    /// Drops commands that the program gave to a NIC that has died: what they said is in the connections' blocks, too.
    pub fn forget_commands(&self) {
        let mut commands = Consumer::new(self.memory.ring(at::COMMANDS));
        while commands.pop().is_some() {}
        commands.release();
    }
}
