//! State that the agent keeps of a program's session.

use crate::connection::Memory;
use crate::connections::Connections;
use crate::fetching::Fetch;
use crate::nic::GONE;
use crate::released::Released;
use baton_abi::layout::session as at;
use baton_client::heap::Heap;
use baton_linux::bell::SessionBell;
use baton_linux::control::PeerChannel;
use baton_linux::foreign::Foreign;
use baton_linux::socket;
use baton_protocol::nic::Hop;
use baton_protocol::program::{Answer, MAY_WITHDRAW, Opening, Reply};
use baton_ring::Consumer;
use baton_shm::Region;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The last session's name.
static NAMES: AtomicU64 = AtomicU64::new(0);

pub(crate) struct Session {
    /// No other session has it, while numbers are used again.
    pub name: u64,
    pub channel: PeerChannel,
    pub process: u32,
    pub user: u32,
    /// Parameters with which it was opened.
    pub opening: Opening,
    /// None until the program has opened its session (a tool never does).
    pub open: Option<OpenSession>,
    /// It is being opened: the NICs have been asked to serve it.
    pub begun: Option<Box<Begun>>,
    pub connections: Connections,
    /// What its attacher has been asked for.
    pub fetch: Option<Box<Fetch>>,
    /// Its program is gone or cut off: it is removed when its connections are in the kernel and the NIC has forgotten
    /// it.
    pub ends: bool,
    /// When it ends: the NICs that have been asked to forget it, and those that have, a bit each.
    pub asked_to_forget: u8,
    pub forgotten: u8,
}

/// A session that is being opened.
pub(crate) struct Begun {
    pub open: OpenSession,
    /// The program's ends of the doorbells.
    pub theirs: Vec<SessionBell>,
    pub opening: Opening,
    /// Tag of the request; None when the program has got the error that there is no answer.
    pub tag: Option<u32>,
    /// The NICs that have not answered, and those that have the session, a bit each.
    pub awaited: u8,
    pub attached: u8,
    /// Why it cannot be opened.
    pub failed: Option<String>,
}

impl Begun {
    /// A NIC has died. If it was to serve the session, or does already, the next one does not know it.
    pub fn nic_died(&mut self, nic: usize) {
        if (self.awaited | self.attached) & 1 << nic != 0 {
            self.failed = Some(GONE.into());
        }
    }
}

/// Reason for ending a session whose program does not read its answers.
pub(crate) const NOT_READING: &str = "it does not read its answers";

/// Result of sending a message to a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sent {
    /// It was sent, or the program is gone, which the channel reports.
    Done,
    /// There is no room in the channel: the program does not read.
    Full,
}

impl Session {
    /// Whether its program may have listeners on the NIC.
    pub(crate) fn may_listen(&self) -> bool {
        self.open.is_some() && !self.opening.attacher && self.opening.messages.is_none()
    }

    /// Sends a message to the program, without waiting for the program to read.
    pub fn send(&self, answer: &Answer, descriptors: &[BorrowedFd<'_>]) -> Sent {
        match self.channel.try_send(answer, descriptors) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Sent::Full,
            _ => Sent::Done,
        }
    }

    /// Turns its program or tool away, which gets the reason.
    pub fn turn_away(self, reason: String) {
        let _ = self.send(&Answer { tag: 1, body: Reply::Failed { reason } }, &[]);
        self.end(|| ());
    }

    /// Ends it for good. A program that was cut off sees it now, and not only when what it has sent can be closed. Only
    /// then `notify` the keeper, which does the same with the same queue: between its look and its receive nobody else
    /// may take a message, since the next one may have descriptors.
    pub fn end(self, notify: impl FnOnce()) {
        self.channel.turn_away();
        notify();
    }

    /// Notifies the program that an agent has taken the session over for the `starts`th time: unanswered requests must
    /// be repeated. A program looks at its session's memory, too, at each message that it reads (`AGENT_STARTS` in the
    /// layout). So nothing is sent while one is unread: a program that asks for nothing reads none, however often
    /// agents die.
    pub fn report_restart(&self, starts: u32) -> Sent {
        let counts = self.open.is_some() && !self.opening.attacher;
        if counts && socket::queue_bytes(self.channel.as_fd(), socket::SIOCOUTQ).is_ok_and(|unread| unread > 0) {
            return Sent::Done;
        }
        self.send(&Answer { tag: 0, body: Reply::Restarted { starts } }, &[])
    }

    /// Takes up a request that its program can withdraw. Returns whether it has done so.
    pub fn has_withdrawn(&self, tag: u32) -> bool {
        let Some(open) = self.open.as_ref().filter(|_| tag & MAY_WITHDRAW != 0) else { return false };
        open.memory.word32(at::ASKED).compare_exchange(tag, 0, Ordering::AcqRel, Ordering::Acquire).is_err()
    }

    /// Makes a session that its program has not opened yet.
    pub fn new(channel: PeerChannel) -> io::Result<Session> {
        let (process, user) = (channel.peer_process()?, channel.peer_user()?);
        let mut key = [0; 16];
        baton_linux::process::random(&mut key)?;
        let (first, second) = key.split_at(8);
        let key = [first, second].map(|half| half.iter().fold(0, |word, byte| word << 8 | u64::from(*byte)));
        Ok(Session {
            name: NAMES.fetch_add(1, Ordering::Relaxed),
            channel,
            process,
            user,
            opening: Opening::alone(),
            open: None,
            begun: None,
            connections: Connections::new(key),
            fetch: None,
            ends: false,
            asked_to_forget: 0,
            forgotten: 0,
        })
    }
}

/// A host that a session for messages sends to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Host {
    /// The way to it; None while there is none, and the NIC drops what is sent there.
    pub way: Option<Hop>,
    /// The next hop, as last known.
    pub next: IpAddr,
    /// Something has changed since, on which the way may depend: it is to be looked up again.
    pub stale: bool,
}

pub(crate) struct OpenSession {
    pub memory: Arc<Region>,
    /// The first NIC's and this agent's end of the doorbells: ringing it wakes the program.
    pub bell: SessionBell,
    /// The ends by which the program wakes the further NICs.
    pub further: Vec<SessionBell>,
    pub heap: Heap,
    /// Blocks of the heap that were freed, and may still have pages.
    pub released: Released,
    /// In a session for messages: its UDP socket, held so that nobody else gets the port while the NIC takes its
    /// packets.
    pub socket: Option<Arc<Foreign>>,
    /// Its address is being asked for.
    pub is_polled: bool,
    /// In a session for messages: the hosts that its program has asked this NIC to reach.
    pub hosts: BTreeMap<IpAddr, Host>,
    /// The host whose way was looked up again last, at first one that is before all others.
    pub last_host: IpAddr,
    /// Memory of connections that ended on the NIC, by number: the program may read it until it forgets them.
    pub ended: BTreeMap<u32, Memory>,
    /// Memory of connections that are closed, by number: threads may still be inside operations on them.
    pub late: Vec<(u32, Memory)>,
}

impl OpenSession {
    /// Makes a session with new memory for this many NICs. Returns the program's ends of its doorbells as well.
    pub fn new(bytes: usize, nics: usize) -> io::Result<(OpenSession, Vec<SessionBell>)> {
        let (ours, first) = SessionBell::pair()?;
        let (mut theirs, mut further) = (vec![first], Vec::new());
        for _ in 1..nics {
            let (our, their) = SessionBell::pair()?;
            further.push(our);
            theirs.push(their);
        }
        let memory = Arc::new(Region::create("baton-session", bytes)?);
        Ok((OpenSession { further, ..Self::with_memory(memory, ours) }, theirs))
    }

    /// Makes a session for one NIC from memory that exists already.
    pub fn with_memory(memory: Arc<Region>, bell: SessionBell) -> OpenSession {
        memory.exclude_from_dumps(at::HEAP);
        let heap = Heap::new(at::HEAP, at::heap_end(memory.len()));
        let further = Vec::new();
        OpenSession {
            heap,
            released: Released::default(),
            memory,
            bell,
            further,
            socket: None,
            is_polled: false,
            hosts: BTreeMap::new(),
            last_host: Ipv4Addr::UNSPECIFIED.into(),
            ended: BTreeMap::new(),
            late: Vec::new(),
        }
    }

    /// The NICs that serve it, a bit each.
    pub fn nics(&self) -> u8 {
        (1 << (1 + self.further.len())) - 1
    }

    /// Notifies the program that a connection has moved, or that any may have ([`at::ANY`]).
    pub fn announce_move(&self, number: u32) {
        self.note_move(number);
        self.bell.ring();
    }

    /// Records a move without ringing: the program sees it when it looks next.
    pub fn note_move(&self, number: u32) {
        let moves = self.memory.word32(at::MOVES);
        let entry = moves.load(Ordering::Acquire) % at::MOVED_ENTRIES;
        self.memory.word32(at::MOVED + 4 * entry as usize).store(number, Ordering::Release);
        moves.fetch_add(1, Ordering::AcqRel);
    }

    /// The connection that the program was given when it accepted one, as long as it has not received it. The program
    /// may write any number there.
    pub fn given(&self) -> Option<u32> {
        self.memory.word32(at::GIVEN).load(Ordering::Acquire).checked_sub(1)
    }

    /// Notes that the program is given this connection, or that it is to get another one.
    pub fn note_given(&self, number: Option<u32>) {
        self.memory.word32(at::GIVEN).store(number.map_or(0, |number| number.wrapping_add(1)), Ordering::Release);
    }

    /// Drops commands that the program sent to a NIC that has died: their content is in the connections' blocks as
    /// well.
    pub fn forget_commands(&self, nic: usize) {
        Consumer::new(self.memory.ring(at::area(nic) + at::COMMANDS)).skip_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_linux::control::Channel;

    /// A NIC has the session, another one has not answered: without the first one it cannot be opened.
    #[test]
    fn a_session_is_not_opened_without_a_nic_that_was_to_serve_it() {
        for (nic, fails) in [(0, true), (1, true), (2, false)] {
            let (open, theirs) = OpenSession::new(at::HEAP + (1 << 20), 2).expect("memory");
            let opening = Opening::alone();
            let mut begun = Begun { open, theirs, opening, tag: None, awaited: 0b10, attached: 0b01, failed: None };
            begun.nic_died(nic);
            assert_eq!(begun.failed.is_some(), fails, "NIC {nic}");
        }
    }

    /// When the keeper gets the message that a session has ended, the session's queue is empty.
    #[test]
    fn a_session_is_ended_before_the_keeper_ends_it() {
        let (ours, theirs) = Channel::pair().expect("a channel");
        let keepers = Channel::from_fd(ours.as_fd().try_clone_to_owned().expect("a descriptor"));
        let session = Session::new(ours.into()).expect("a session");
        theirs.send(&7u8, &[]).expect("room");
        let mut is_notified = false;
        session.end(|| {
            is_notified = true;
            assert!(theirs.is_hung_up());
            assert!(keepers.try_receive::<u8>().is_err(), "the agent has left a message");
        });
        assert!(is_notified);
    }

    /// A program that asks for nothing reads nothing: it is not cut off, however often agents die, and learns of the
    /// last death.
    #[test]
    fn a_program_that_does_not_ask_outlives_any_number_of_agents() {
        let (ours, theirs) = Channel::pair().expect("a channel");
        let mut session = Session::new(ours.into()).expect("a session");
        session.open = Some(OpenSession::new(at::HEAP + (1 << 20), 1).expect("memory").0);
        for starts in 1..10_000 {
            assert_eq!(session.report_restart(starts), Sent::Done, "cut off after {starts} deaths");
        }
        let read = || theirs.try_receive::<Answer>().map(|(answer, _)| answer.body);
        assert!(matches!(read(), Ok(Reply::Restarted { starts: 1 })));
        assert!(read().is_err(), "there is no need for a second one");
        assert_eq!(session.report_restart(10_000), Sent::Done);
        assert!(matches!(read(), Ok(Reply::Restarted { starts: 10_000 })));
    }
}
