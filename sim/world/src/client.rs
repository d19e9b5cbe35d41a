//! A program's side of a session's memory: the operations on a connection while the NIC has it.

use crate::block::Block;
use crate::kernel::Errno;
use baton_abi::layout::{block, session};
use baton_abi::{Cid, Control, MORE, Message, Operation};
use baton_ring::{Consumer, Producer};
use baton_shm::{Circle, Region, RingWords};
use std::collections::VecDeque;
use std::sync::Arc;

/// Linux's ETIMEDOUT.
const ETIMEDOUT: u32 = 110;

/// The rings of a session.
pub(crate) struct Client {
    pub memory: Arc<Region>,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    /// The latest commands.
    queued: VecDeque<Message>,
}

/// Commands that are remembered, to be repeated.
const REMEMBERED: usize = 64;

/// A connection's numbers since its last move.
pub(crate) struct View {
    block: Block,
    moves: u32,
    cid: Cid,
    receive: Option<Circle>,
    send: Option<Circle>,
    read: u32,
    reported: u32,
    received: u32,
    queued: u32,
    room_ends: u32,
    fin: bool,
    shut: bool,
    /// It has ended, with Linux's error number or 0.
    ended: Option<u32>,
}

impl View {
    pub fn new(block: Block) -> View {
        View {
            moves: 0,
            cid: Cid(0),
            receive: None,
            send: None,
            read: 0,
            reported: 0,
            received: 0,
            queued: 0,
            room_ends: 0,
            fin: false,
            shut: false,
            ended: None,
            block,
        }
    }

    fn has_moved(&self) -> bool {
        self.block.load(block::MOVES) != self.moves
    }

    /// Reads the block again, after a move.
    pub fn refresh(&mut self) {
        let b = &self.block;
        let moves = b.load(block::MOVES);
        let memory = |base, size| b.memory.circle(b.load(base), b.load(size));
        self.cid = Cid(b.load(block::CID));
        self.receive = memory(block::RECEIVE_BASE, block::RECEIVE_SIZE);
        self.send = memory(block::SEND_BASE, block::SEND_SIZE);
        self.read = b.load(block::READ_SEQ);
        self.reported = self.read;
        self.received = b.load(block::RECEIVE_SEQ);
        self.queued = b.load(block::QUEUED_SEQ);
        self.room_ends = b.load(block::ACKED_SEQ).wrapping_add(b.load(block::SEND_SIZE));
        let flags = b.load(block::FLAGS);
        (self.fin, self.shut) = (flags & block::FLAG_FIN_RECEIVED != 0, flags & block::FLAG_SHUT_DOWN != 0);
        self.moves = moves;
    }

    /// Refreshes the view if the connection has moved.
    pub fn enter(&mut self) {
        if self.has_moved() {
            self.refresh();
        }
    }

    fn take(&mut self, message: &Message) {
        match (message.operation, Control::from_number(message.kind)) {
            (Operation::OsRecv, _) => self.received = self.received.wrapping_add(message.length),
            (Operation::OsAck, _) => self.room_ends = self.room_ends.wrapping_add(message.length),
            (Operation::OsControl, Some(Control::Fin)) => self.fin = true,
            (Operation::OsControl, Some(Control::Closed)) => self.ended = Some(message.address),
            _ => {}
        }
    }

    fn error(&self) -> Option<Errno> {
        match self.ended {
            None | Some(0) => None,
            Some(ETIMEDOUT) => Some(Errno::TimedOut),
            Some(_) => Some(Errno::Reset),
        }
    }
}

impl Client {
    pub fn new(memory: Arc<Region>) -> Client {
        Client {
            commands: Producer::new(memory.ring(session::COMMANDS)),
            events: Consumer::new(memory.ring(session::EVENTS)),
            memory,
            queued: VecDeque::new(),
        }
    }

    fn push(&mut self, message: Message) -> bool {
        let pushed = self.commands.push(message.to_words()).is_ok();
        if pushed {
            self.queued.push_back(message);
            if self.queued.len() > REMEMBERED {
                self.queued.pop_front();
            }
        }
        pushed
    }

    /// Repeats the remembered commands whose cid is none of `current`, which no connection has any more.
    pub fn repeat(&mut self, current: &[Cid]) {
        let stale: Vec<_> = self.queued.iter().filter(|message| !current.contains(&message.cid)).copied().collect();
        for message in stale {
            let _ = self.commands.push(message.to_words());
        }
        self.commands.publish();
    }

    /// Takes in the NIC's events for all connections of the session.
    pub fn catch_up(&mut self, views: &mut [&mut View]) {
        while let Some(message) = self.events.pop().map(Message::from_words) {
            let Some(message) = message else { continue };
            if !views.iter().any(|view| view.cid == message.cid) {
                views.iter_mut().filter(|view| view.has_moved()).for_each(|view| view.refresh());
            }
            if let Some(view) = views.iter_mut().find(|view| view.cid == message.cid) {
                view.take(&message);
            }
        }
        self.events.release();
    }

    /// Queues as many bytes as there is room for.
    pub fn send(&mut self, view: &mut View, bytes: &[u8]) -> Result<usize, Errno> {
        if let Some(error) = view.error() {
            return Err(error);
        }
        if view.ended.is_some() || view.shut {
            return Err(Errno::Pipe);
        }
        let room = view.room_ends.wrapping_sub(view.queued) as i32;
        let length = bytes.len().min(room.max(0) as usize);
        let Some(memory) = view.send.clone().filter(|_| length > 0) else { return Err(Errno::WouldBlock) };
        if !self.commands.has_room(2) {
            return Err(Errno::WouldBlock);
        }
        memory.write(view.queued, &bytes[..length]);
        let first = (length as u32).min(memory.length() - (view.queued & (memory.length() - 1)));
        let mut push = |seq: u32, length: u32, more: u16| {
            let message = Message::new(Operation::NicSend, view.cid, memory.offset_of(seq), length);
            self.push(Message { kind: more, ..message });
        };
        if first < length as u32 {
            push(view.queued, first, MORE);
            push(view.queued.wrapping_add(first), length as u32 - first, 0);
        } else {
            push(view.queued, first, 0);
        }
        view.queued = view.queued.wrapping_add(length as u32);
        // Before the NIC can act on it: after the NIC's death only the block is left.
        view.block.store(block::QUEUED_SEQ, view.queued);
        self.commands.publish();
        Ok(length)
    }

    /// Receives bytes; 0 at the end of the stream.
    pub fn receive(&mut self, view: &mut View, out: &mut [u8]) -> Result<usize, Errno> {
        let unread = view.received.wrapping_sub(view.read) as usize;
        let length = out.len().min(unread);
        let Some(memory) = view.receive.clone().filter(|_| length > 0) else {
            return match view.error() {
                Some(error) => Err(error),
                None if view.fin || view.ended.is_some() => Ok(0),
                None => Err(Errno::WouldBlock),
            };
        };
        memory.read(view.read, &mut out[..length]);
        let read = view.read.wrapping_add(length as u32);
        // A small part of the memory opens no window.
        let unreported = read.wrapping_sub(view.reported);
        if unreported >= memory.length() / 8 {
            let message = Message::new(Operation::NicRecvd, view.cid, 0, unreported);
            if !self.push(message) {
                return Err(Errno::WouldBlock);
            }
            self.commands.publish();
            view.reported = read;
        }
        view.read = read;
        view.block.store(block::READ_SEQ, read);
        Ok(length)
    }

    /// Shuts down the sending side. False if the ring is full.
    pub fn shutdown(&mut self, view: &mut View) -> bool {
        let message = Message::control(Operation::NicControl, Control::Shutdown, view.cid, 0, 0);
        if !self.push(message) {
            return false;
        }
        view.shut = true;
        view.block.store(block::FLAGS, view.block.load(block::FLAGS) | block::FLAG_SHUT_DOWN);
        self.commands.publish();
        true
    }

    /// A command of any content, as a hostile program may queue it.
    pub fn push_words(&mut self, words: [u64; 2]) {
        let _ = self.commands.push(words);
        self.commands.publish();
    }
}
