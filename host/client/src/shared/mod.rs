//! A program's side of the interface, for any number of threads: the session with the agent, and the operations on a
//! connection while the NIC has it. No operation waits for the network.

use crate::connection::{Connection, Entered, Readiness};
use crate::ending::Ending;
use crate::heap::Heap;
use crate::ring_memory::RingMemory;
use crate::rules::{Interface, Nagle};
use baton_abi::layout::Owner;
use baton_abi::layout::nic::MAX_NICS;
use baton_abi::layout::session as at;
use baton_abi::{Message, Operation};
use baton_linux::bell::SessionBell;
use baton_linux::control::Channel;
use baton_linux::process::current_cpu;
use baton_protocol::program::{Opening, Request};
use baton_ring::{Lock, Producer, Token, clear_rung, count_sleeper, must_ring, needs_doorbell, seems_asleep, uncount_sleeper};
use baton_shm::{MovableParts, Region, RingWords};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

mod events;
mod opening;
mod receiving;
mod requests;
mod sending;

pub use events::catch_up_for_others;
pub(crate) use events::{Changes, Events};
pub use receiving::Received;
use requests::protocol_error;
pub use requests::{LIMIT, PORT_LIMIT, give_back_each, note_hot_from};
pub use sending::limits_queue;
pub(crate) use sending::{send_from, takes_buffers};

const RELAXED: Ordering = Ordering::Relaxed;

/// Time limit for the agent to open a session for a program that cannot run without one.
const OPEN_LIMIT: Duration = Duration::from_secs(20);

/// Descriptors that a session has at most: see [`Shared::descriptors`].
pub const DESCRIPTORS: usize = 2 + MAX_NICS;

/// How many times a connection's numbers are read again because it has moved meanwhile. A signal handler whose thread
/// holds the lock of the session's events cannot refresh the connection, and must not try for ever.
const READINESS_ATTEMPTS: u32 = 8;

/// A session with the agent.
#[derive(Debug)]
pub struct Shared {
    /// The session's number, as tools show it.
    pub number: u32,
    memory: Arc<Region>,
    channel: Mutex<Arc<Channel>>,
    /// The control connection again, for threads that only check whether it has hung up.
    pub(crate) line: Arc<Channel>,
    pub(crate) ending: Ending,
    /// The first NIC's ring, and those of further NICs.
    first: Lane,
    further: Vec<Lane>,
    pub(crate) events: Lock<Events>,
    changes: Changes,
    /// The thread that handles the events has handled those of other threads for a long time, and is to be relieved.
    tired: AtomicBool,
    next_tag: AtomicU32,
    /// After a request that the agent has not taken up in time: until when (microseconds of the monotonic clock) the
    /// agent is not waited for, unless an answer arrives.
    silent_until: AtomicU64,
    /// Requests without an answer for which the control connection had no room.
    unsent: Mutex<VecDeque<Request>>,
    moves_seen: AtomicU32,
    moves: MovableParts<1, 0>,
    /// Whether a connection had moved before the program knew its number.
    early: AtomicBool,
    pub(crate) listener: Listener,
    /// The heap in the part of session memory from which the agent allocates nothing.
    pub(crate) buffers: Arc<Mutex<Heap>>,
    /// The source of datagram rings, which are allocated from `buffers`.
    pub(crate) rings: RingMemory,
    interface: Interface,
    nagle: Nagle,
    /// Every send is a command of its own, and none waits for an acknowledgement.
    sends_plainly: bool,
    /// Threads that wait for room to send wait until the connection is writable.
    patient: bool,
}

/// What a program shares with one NIC to send it commands.
#[derive(Debug)]
struct Lane {
    commands: Lock<Producer<RingWords>>,
    nic_sleeping: MovableParts<1, 0>,
    /// Offset of [`at::NIC_SENDING`] in session memory.
    nic_sending: usize,
    /// The doorbell that wakes the NIC. The first NIC's doorbell also wakes the program, for events of any NIC.
    bell: SessionBell,
    /// Index in the command ring up to which the NIC has to read before threads that found the ring full try again; 0
    /// if all of them were notified since. Set under the lock of the commands, cleared under that of the events.
    full_until: AtomicU64,
}

impl Lane {
    /// The lane of the NIC with this number.
    fn new(memory: &Arc<Region>, nic: usize, bell: SessionBell) -> Lane {
        let area = at::area(nic);
        Lane {
            commands: Lock::new(Producer::new(memory.ring(area + at::COMMANDS))),
            nic_sleeping: MovableParts::new(memory.clone(), area + at::NIC_SLEEPING),
            nic_sending: area + at::NIC_SENDING,
            bell,
            full_until: AtomicU64::new(0),
        }
    }

    /// Wakes the NIC if it sleeps. Contains a full barrier.
    #[inline(always)]
    fn ring_nic(&self) {
        if needs_doorbell(&self.nic_sleeping.words()[0]) {
            self.wake_nic();
        }
    }

    /// As [`Lane::ring_nic`], after a full barrier.
    #[inline(always)]
    fn ring_nic_after_barrier(&self) {
        if seems_asleep(&self.nic_sleeping.words()[0]) {
            self.wake_nic();
        }
    }

    #[cold]
    #[inline(never)]
    fn wake_nic(&self) {
        if must_ring(&self.nic_sleeping.words()[0]) {
            self.bell.ring();
        }
    }
}

/// Called with the number of each connection that may have become readable or writable. It may be called with the
/// session's events locked, so it must not call the session.
pub struct Listener(pub Box<dyn Fn(u32) + Send + Sync>);

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listener")
    }
}

/// Connections by number.
pub(crate) type Connections = Vec<Option<Arc<Connection>>>;

fn bad_address() -> io::Error {
    io::Error::from_raw_os_error(14)
}

fn would_block() -> io::Error {
    io::ErrorKind::WouldBlock.into()
}

fn broken_pipe() -> io::Error {
    io::Error::from_raw_os_error(32)
}

impl Shared {
    /// Opens a session with the agent that listens at `path`.
    ///
    /// # Errors
    /// If no agent listens there, or it is of another version.
    pub fn connect(path: &Path, opening: Opening, listener: Listener) -> io::Result<Shared> {
        Self::open(path, opening, None, listener, OPEN_LIMIT, Region::map, Ok)
    }

    /// As [`Shared::connect`], for a program that goes on without a session if the agent does not answer within a
    /// second (`TimedOut` or `WouldBlock`), and maps only the parts of the session's memory that its connections use. A
    /// connection whose part cannot be mapped is [`Connection::is_unmapped`]. Each of the session's descriptors is
    /// passed through `renumber`, in the order of [`Shared::descriptors`].
    ///
    /// # Errors
    /// See there.
    pub fn connect_with(
        path: &Path,
        opening: Opening,
        listener: Listener,
        renumber: impl FnMut(OwnedFd) -> io::Result<OwnedFd>,
    ) -> io::Result<Shared> {
        let map = |memory| Region::map_by_pieces(memory, at::HEAP);
        Self::open(path, opening, None, listener, requests::LIMIT, map, renumber)
    }

    /// Opens a session for messages, whose packets come to `socket`.
    ///
    /// # Errors
    /// If no agent listens at `path`, or it refuses; with the reason.
    pub(crate) fn connect_for_messages(path: &Path, opening: Opening, socket: BorrowedFd<'_>) -> io::Result<Shared> {
        Self::open(path, opening, Some(socket), Listener(Box::new(|_| {})), OPEN_LIMIT, Region::map, Ok)
    }

    fn open(
        path: &Path,
        opening: Opening,
        socket: Option<BorrowedFd<'_>>,
        listener: Listener,
        limit: Duration,
        map: impl FnOnce(OwnedFd) -> io::Result<Region>,
        mut renumber: impl FnMut(OwnedFd) -> io::Result<OwnedFd>,
    ) -> io::Result<Shared> {
        let opened = opening::ask(path, opening, socket, limit, &mut renumber)?;
        let opening::Opened { channel, session: number, descriptors } = opened;
        let channel = Arc::new(channel);
        let descriptors = descriptors.into_iter().map(renumber).collect::<io::Result<Vec<_>>>()?;
        let mut descriptors = descriptors.into_iter();
        let (Some(memory), Some(bell)) = (descriptors.next(), descriptors.next()) else {
            return Err(protocol_error("descriptors are missing"));
        };
        let further: Vec<SessionBell> = descriptors.map(SessionBell::from_fd).collect();
        if further.len() >= MAX_NICS {
            return Err(protocol_error("there are too many NICs"));
        }
        let memory = Arc::new(map(memory)?);
        memory.exclude_from_dumps(at::HEAP);
        Ok(Shared::new(number, channel, memory, SessionBell::from_fd(bell), further, listener))
    }

    fn new(
        number: u32,
        channel: Arc<Channel>,
        memory: Arc<Region>,
        bell: SessionBell,
        further: Vec<SessionBell>,
        listener: Listener,
    ) -> Shared {
        let (changes, taken) = Changes::new();
        let buffers = Arc::new(Mutex::new(Heap::new(at::heap_end(memory.len()), memory.len())));
        let further: Vec<Lane> = (1..).zip(further).map(|(nic, bell)| Lane::new(&memory, nic, bell)).collect();
        Shared {
            number,
            line: channel.clone(),
            ending: Ending::default(),
            channel: Mutex::new(channel),
            rings: RingMemory::new(&memory, &buffers),
            buffers,
            first: Lane::new(&memory, 0, bell),
            events: Lock::new(Events::new(&memory, 1 + further.len(), taken)),
            further,
            moves: MovableParts::new(memory.clone(), at::MOVES),
            memory,
            changes,
            tired: AtomicBool::new(false),
            next_tag: AtomicU32::new(2),
            silent_until: AtomicU64::new(0),
            unsent: Mutex::default(),
            moves_seen: AtomicU32::new(0),
            early: AtomicBool::new(false),
            listener,
            interface: Interface::default(),
            nagle: Nagle::default(),
            sends_plainly: true,
            patient: false,
        }
    }

    /// Sets how sends cross to the NIC and where small ones are kept back. To be called before the first send.
    pub fn use_interface(&mut self, interface: Interface, nagle: Nagle) {
        (self.interface, self.nagle) = (interface, nagle);
        self.sends_plainly = interface == Interface::Batched && nagle == Nagle::Nic;
    }

    /// Promises that threads that wait for room to send wait until [`Readiness::is_writable`], so that acknowledgements
    /// that free less do not wake a sleeping program. To be called before there are connections.
    pub fn wait_until_writable(&mut self) {
        self.patient = true;
    }

    /// A session on private memory, without an agent.
    #[cfg(test)]
    pub(crate) fn on(memory: Arc<Region>) -> Shared {
        let (channel, _) = Channel::pair().expect("two sockets");
        let (bell, _) = SessionBell::pair().expect("two sockets");
        Shared::new(0, Arc::new(channel), memory, bell, Vec::new(), Listener(Box::new(|_| {})))
    }

    /// All descriptors of the session: the control connection, the memory, a doorbell for each NIC. -1 in place of a
    /// missing one.
    pub fn descriptors(&self) -> [i32; DESCRIPTORS] {
        use std::os::fd::AsRawFd;
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner).as_fd().as_raw_fd();
        let memory = self.memory.fd().map_or(-1, |fd| fd.as_raw_fd());
        let mut all = [-1; DESCRIPTORS];
        let bells = [&self.first].into_iter().chain(&self.further).map(|lane| lane.bell.as_fd().as_raw_fd());
        for (place, fd) in all.iter_mut().zip([channel, memory].into_iter().chain(bells)) {
            *place = fd;
        }
        all
    }

    /// Unlocks the session's memory, which mlockall(2) has locked with the program's.
    pub fn unlock_memory(&self) {
        self.memory.unlock();
    }

    /// The lane of a connection's NIC.
    #[inline(always)]
    fn lane(&self, connection: &Connection) -> &Lane {
        match connection.cid().nic() {
            0 => &self.first,
            nic => self.further.get(nic - 1).unwrap_or(&self.first),
        }
    }

    /// The control connection, for a session to which the agent also sends messages that are no answers. No other
    /// thread may send requests then; tags are from [`Shared::begin_withdrawable`] or below those.
    pub fn channel(&self) -> &Mutex<Arc<Channel>> {
        &self.channel
    }

    /// Enters an operation on a connection. None while the connection is being moved (see
    /// [`Connection::wait_until_settled`]), if this thread is inside already, or if another thread is closing it.
    #[inline(always)]
    pub fn enter<'a>(&self, connection: &'a Connection, token: Token) -> Option<Entered<'a>> {
        let entered = connection.enter(token)?;
        if connection.has_moved() {
            self.note_move(connection, token);
            // The block may be the next connection's by now, so NIC as the owner does not count. (In the kernel the
            // descriptor decides.)
            if entered.owner == Owner::Nic && connection.is_leaving() {
                return None;
            }
        }
        Some(entered)
    }

    /// What can be done with a connection that the NIC has, as of its last move.
    #[inline]
    pub fn readiness(&self, connection: &Connection, token: Token) -> Readiness {
        for _ in 0..READINESS_ATTEMPTS {
            if connection.has_moved() && connection.owner() != Owner::Moving {
                self.note_move(connection, token);
            }
            let before = connection.moves.load(Ordering::Acquire);
            let readiness = connection.readiness();
            fence(Ordering::Acquire);
            // Another thread may have refreshed the connection after a move meanwhile. Numbers from before and after
            // the move must not be mixed.
            if connection.moves.load(RELAXED) == before && !connection.has_moved() {
                return readiness;
            }
            if connection.owner() == Owner::Moving {
                // With the lock, since another thread may be refreshing the connection.
                return self.with_events(token, |_| connection.readiness()).unwrap_or_else(|| connection.readiness());
            }
        }
        connection.readiness()
    }

    /// `nic_post`: posts this place in session memory for the next bytes: those after the ones that other buffers are
    /// posted for, or else the first unread ones. The caller has entered the connection, which is on the NIC.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full.
    pub(crate) fn post(&self, connection: &Connection, token: Token, address: u32, length: u32) -> io::Result<()> {
        self.report_all_read(connection, token)?;
        let lane = self.lane(connection);
        let Some(mut commands) = lane.commands.lock(token) else { return Err(would_block()) };
        lane.put(&mut commands, Message::new(Operation::NicPost, connection.cid(), address, length))?;
        commands.publish();
        drop(commands);
        lane.ring_nic();
        Ok(())
    }

    /// Reports to the NIC how far the program has read, however little that is.
    pub(crate) fn report_all_read(&self, connection: &Connection, token: Token) -> io::Result<()> {
        let read = connection.read.load(RELAXED);
        if read == connection.reported_read.load(RELAXED) { Ok(()) } else { self.report_read(connection, token, read) }
    }

    pub(crate) fn memory(&self) -> &Arc<Region> {
        &self.memory
    }

    /// The doorbell, which rings when there are events while a thread sleeps.
    pub fn bell(&self) -> &SessionBell {
        &self.first.bell
    }

    /// Clears the doorbell. The caller must check for events afterwards, since it is not rung again for those in the
    /// ring. In rare cases it was rung twice (also by the agent); then the next wait ends at once.
    pub fn clear_bell(&self) {
        self.first.bell.take();
        clear_rung(self.memory.word32(at::PROGRAM_SLEEPING));
    }

    /// Counts a thread that is about to sleep. If it then calls [`Shared::has_events`] and gets false, the doorbell
    /// wakes it.
    pub fn count_sleeper(&self) {
        self.memory.word32(at::PROGRAM_PROCESSOR).store(current_cpu() as u32 + 1, Ordering::Relaxed);
        count_sleeper(self.memory.word32(at::PROGRAM_SLEEPING));
    }

    /// Undoes [`Shared::count_sleeper`].
    pub fn uncount_sleeper(&self) {
        uncount_sleeper(self.memory.word32(at::PROGRAM_SLEEPING));
    }
}

#[cfg(test)]
mod tests {
    use super::events::Known;
    use super::*;
    use baton_abi::layout::{ANSWERED, RING_MESSAGES, block};
    use baton_abi::{Cid, Control};
    use baton_ring::Consumer;

    /// A connection may have moved before its program knows the number under which it was registered.
    #[test]
    fn an_early_move_is_seen() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let connection = Connection::unregistered(memory.clone(), false);
        connection.set_number(3);
        assert!(!connection.has_moved());
        memory.word32(at::block(3) + block::MOVES).store(1, RELAXED);
        connection.set_number(3);
        assert!(connection.has_moved());
    }

    /// A late thread reads the block while another one makes the object represent the next connection: the result is of
    /// one connection, never a mixture.
    #[test]
    fn a_connection_that_represents_the_next_one_is_not_mixed_with_it() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let connection = Connection::unregistered(memory.clone(), false);
        let cids = [Cid::new(5, 1), Cid::new(6, 1)];
        for (number, cid) in (0..).zip(cids) {
            memory.word32(at::block(number) + block::CID).store(cid.0, RELAXED);
            memory.word32(at::block(number) + block::MOVES).store(1, RELAXED);
        }
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let late = scope.spawn(|| {
                // Waits: for nothing; this thread goes on until the other one has ended, or has failed.
                while !ended.load(RELAXED) {
                    connection.refresh();
                }
            });
            while connection.has_moved() {
                std::thread::yield_now();
            }
            for round in 0..200_000 {
                let number = round % 2;
                connection.set_number(number);
                // A short delay, so that the late thread makes progress.
                (0..round % 64).for_each(|_| std::hint::spin_loop());
                if !connection.has_moved() && connection.cid() != cids[number as usize] {
                    ended.store(true, RELAXED);
                    panic!("round {round}: {:?} counts as up to date", connection.cid());
                }
            }
            ended.store(true, RELAXED);
            late.join().unwrap();
        });
    }

    /// RECEIVE_SEQ is written at the handoff only, and READ_SEQ whenever the program reads. A thread that reads both
    /// just after the connection has returned to the kernel must not take the difference for unread bytes.
    #[test]
    fn nothing_is_unread_on_the_nic_when_a_connection_has_returned() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let shared = Shared::on(memory.clone());
        let connection = shared.unregistered();
        shared.represent(&connection, 3);
        let fields = [(block::RECEIVE_SEQ, 1000), (block::READ_SEQ, 1100), (block::OWNER, Owner::Kernel as u32)];
        for (field, value) in fields.into_iter().chain([(block::MOVES, 1)]) {
            memory.word32(at::block(3) + field).store(value, RELAXED);
        }
        assert_eq!(shared.readiness(&connection, 1).unread, 0);
    }

    /// Another thread reads the events of a connection while this one is accepting it: before the connection's number
    /// is known, and after. All of them count.
    #[test]
    fn events_of_a_connection_that_is_being_accepted_count() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let mut nic = Producer::<RingWords>::new(memory.ring(at::EVENTS));
        let mut receive = |cid, length| {
            nic.push(Message::new(Operation::OsRecv, cid, 0, length).to_words()).unwrap();
            nic.publish();
        };
        let shared = Shared::on(memory.clone());
        let (connection, cid) = (shared.unregistered(), Cid::new(5, 1));
        shared.begin_accepting();
        receive(cid, 10);
        shared.catch_up(2);
        memory.word32(at::block(3) + block::CID).store(cid.0, RELAXED);
        memory.word32(at::block(3) + block::MOVES).store(1, RELAXED);
        memory.word32(at::MOVED).store(3, RELAXED);
        memory.word32(at::MOVES).store(1, Ordering::Release);
        shared.represent(&connection, 3);
        receive(cid, 100);
        shared.catch_up(2);
        shared.end_accepting(Some(connection.clone()), 1);
        receive(cid, 1000);
        shared.catch_up(2);
        assert_eq!(connection.received.load(RELAXED), 1110);
    }

    /// A connection is closed, and the next one gets its number and its object, while another thread is handling the
    /// NIC's events. The new connection's events count, whether that thread has seen the first one's removal or not,
    /// and by whichever list it learns of the move.
    #[test]
    fn events_of_a_connection_that_takes_anothers_place_count() {
        for (is_known, moved) in [(true, 3), (false, 3), (true, at::ANY), (false, at::ANY)] {
            let memory = Arc::new(Region::private(at::HEAP).unwrap());
            let mut nic = Producer::<RingWords>::new(memory.ring(at::EVENTS));
            let mut receive = |cid, length| {
                nic.push(Message::new(Operation::OsRecv, cid, 0, length).to_words()).unwrap();
                nic.publish();
            };
            let shared = Shared::on(memory.clone());
            let (connection, cid) = (shared.unregistered(), Cid::new(5, 1));
            shared.represent(&connection, 3);
            shared.catch_up(2);
            connection.begin_leaving();
            shared.with_events(2, |round| {
                if is_known {
                    shared.let_go(&connection);
                }
                shared.begin_accepting();
                memory.word32(at::block(3) + block::CID).store(cid.0, RELAXED);
                memory.word32(at::block(3) + block::MOVES).store(1, RELAXED);
                memory.word32(at::MOVED).store(moved, RELAXED);
                memory.word32(at::MOVES).store(1, Ordering::Release);
                memory.word32(at::block(3) + block::OWNER).store(Owner::Nic as u32, RELAXED);
                receive(cid, 10);
                round.handle();
            });
            assert!(shared.enter(&connection, 2).is_none(), "a late thread must not use the next one's block");
            if !is_known {
                shared.let_go(&connection);
            }
            shared.represent(&connection, 3);
            receive(cid, 100);
            shared.end_accepting(Some(connection.clone()), 1);
            assert_eq!(connection.received.load(RELAXED), 110, "known: {is_known}, moved: {moved}");
        }
    }

    /// While connections are registered all the time, events of others that have left the NIC come, too: more than are
    /// kept. A new connection's own events count.
    #[test]
    fn events_of_connections_that_have_left_displace_no_new_ones() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let mut nic = Producer::<RingWords>::new(memory.ring(at::EVENTS));
        let shared = Shared::on(memory.clone());
        let mut receive = |cid| {
            nic.push(Message::new(Operation::OsRecv, cid, 0, 1).to_words()).unwrap();
            nic.publish();
            shared.catch_up(2);
        };
        let (connection, cid) = (shared.unregistered(), Cid::new(5, 1));
        shared.begin_accepting();
        (0..30_000).for_each(|other| receive(Cid::new(6 + other % 100, 1)));
        receive(cid);
        memory.word32(at::block(3) + block::CID).store(cid.0, RELAXED);
        memory.word32(at::block(3) + block::MOVES).store(1, RELAXED);
        shared.represent(&connection, 3);
        shared.end_accepting(Some(connection.clone()), 1);
        assert_eq!(connection.received.load(RELAXED), 1);
    }

    /// Buffers to post and rings for datagrams are allocated from the same part of session memory, and never overlap.
    #[test]
    fn buffers_and_datagrams_share_their_memory() {
        let shared = Shared::on(Arc::new(Region::private(at::HEAP + (1 << 20)).unwrap()));
        let store = crate::buffer::Store::new(&shared);
        let all = shared.buffers.lock().unwrap().free_bytes();
        let buffer = store.buffer(4096).unwrap();
        assert_eq!(shared.buffers.lock().unwrap().free_bytes(), all - 4096);
        drop(buffer);
        assert_eq!(shared.buffers.lock().unwrap().free_bytes(), all);
    }

    /// With no room in the ring the connection is not shut down, and a later attempt shuts it down.
    #[test]
    fn shutting_down_waits_for_room() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let mut nic = Consumer::<RingWords>::new(memory.ring(at::COMMANDS));
        let shared = Shared::on(memory);
        let connection = shared.unregistered();
        connection.set_number(0);
        let filler = Message::control(Operation::NicControl, Control::NoDelay, Cid::new(0, 1), 0, 0);
        {
            let mut commands = shared.first.commands.lock(1).unwrap();
            while commands.push(filler.to_words()).is_ok() {}
            commands.publish();
        }
        let refused = shared.shutdown(&connection, 1).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        assert!(!shared.readiness(&connection, 1).shut);
        while nic.pop().is_some() {}
        nic.release();
        shared.shutdown(&connection, 1).unwrap();
        assert!(shared.readiness(&connection, 1).shut);
        let sent = Message::from_words(nic.pop().unwrap()).unwrap();
        assert_eq!((sent.operation, sent.kind), (Operation::NicControl, Control::Shutdown as u16));
    }

    /// A session and a connection of it that the NIC has, with 4096 bytes of send memory and nothing in flight.
    fn session_that_sends(interface: Interface, nagle: Nagle) -> (Shared, Connection, Arc<Region>) {
        let memory = Arc::new(Region::private(at::HEAP + 8192).unwrap());
        let mut shared = Shared::on(memory.clone());
        shared.use_interface(interface, nagle);
        let connection = Connection::unregistered(memory.clone(), false);
        connection.set_number(0);
        let fields = [(block::OWNER, Owner::Nic as u32), (block::CID, Cid::new(0, 1).0)];
        let heap = at::HEAP as u32;
        let memories = [(block::RECEIVE_BASE, heap), (block::RECEIVE_SIZE, 4096), (block::SEND_BASE, heap + 4096)];
        for (field, value) in fields.into_iter().chain(memories).chain([(block::SEND_SIZE, 4096)]) {
            memory.word32(at::block(0) + field).store(value, RELAXED);
        }
        connection.refresh();
        (shared, connection, memory)
    }

    /// A connection that the NIC opens has the same cid before and after. Bytes that arrive at once are counted on the
    /// numbers that it has when it is open, also if their event is read before the program has noticed that it is.
    #[test]
    fn bytes_on_a_connection_that_has_just_opened_count() {
        let (shared, _, memory) = session_that_sends(Interface::Batched, Nagle::Nic);
        let connection = shared.unregistered();
        shared.represent(&connection, 0);
        shared.with_events(1, |round| round.refresh(&connection)).unwrap();
        memory.word32(at::block(0) + block::RECEIVE_SEQ).store(1000, RELAXED);
        memory.word32(at::block(0) + block::MOVES).store(1, RELAXED);
        memory.word32(at::MOVES).store(1, Ordering::Release);
        let mut nic = Producer::<RingWords>::new(memory.ring(at::EVENTS));
        nic.push(Message::new(Operation::OsRecv, Cid::new(0, 1), 0, 10).to_words()).unwrap();
        nic.publish();
        // The thread that has read the list of moves has not checked this connection yet.
        shared.moves_seen.store(1, RELAXED);
        shared.with_events(1, |round| round.events.between.push(0)).unwrap();
        shared.catch_up(1);
        assert!(!connection.has_moved());
        assert_eq!(connection.received.load(RELAXED), 1010);
    }

    /// A send of nothing is no message: the NIC ends the session of a program that sends one.
    #[test]
    fn a_send_of_nothing_is_no_message() {
        for (interface, nagle) in [(Interface::Batched, Nagle::Nic), (Interface::Aggregated, Nagle::Host)] {
            let (shared, connection, memory) = session_that_sends(interface, nagle);
            let mut nic = Consumer::<RingWords>::new(memory.ring(at::COMMANDS));
            assert!(!shared.send_at_once(&connection, 1, b""));
            assert_eq!(shared.send(&connection, 1, b"").unwrap(), 0);
            assert!(nic.pop().is_none(), "{interface:?}");
        }
    }

    /// With a handshake for each message, the next one has to wait until the NIC has read the last one.
    #[test]
    fn a_handshake_admits_one_message() {
        let (shared, connection, memory) = session_that_sends(Interface::Handshake, Nagle::Nic);
        let mut nic = Consumer::<RingWords>::new(memory.ring(at::COMMANDS));
        assert!(!shared.send_at_once(&connection, 1, b"a"), "the fast path does not wait");
        assert_eq!(shared.send(&connection, 1, b"a").unwrap(), 1);
        assert_eq!(shared.send(&connection, 1, b"b").unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(!shared.takes(&connection, 1));
        assert_eq!(Message::from_words(nic.pop().unwrap()).unwrap().kind, baton_abi::ANSWER);
        assert!(!shared.takes(&connection, 1), "read, but not released");
        nic.release();
        assert!(shared.takes(&connection, 1));
        assert_eq!(shared.send(&connection, 1, b"b").unwrap(), 1);
    }

    /// Small sends are joined while data is in flight: one message stands for them. The NIC is notified when nothing is
    /// in flight, when the program wants no delay, and never of the same bytes by length.
    #[test]
    fn small_sends_are_joined() {
        let (shared, connection, memory) = session_that_sends(Interface::Aggregated, Nagle::Host);
        let mut nic = Consumer::<RingWords>::new(memory.ring(at::COMMANDS));
        let mut messages = || std::iter::from_fn(|| nic.pop()).filter_map(Message::from_words).collect::<Vec<_>>();
        assert!(shared.send_at_once(&connection, 1, b"a"));
        assert_eq!(messages().iter().map(|message| message.kind).collect::<Vec<_>>(), [baton_abi::FETCH]);
        assert!(shared.send_at_once(&connection, 1, b"b") && shared.send(&connection, 1, b"c").is_ok());
        assert!(messages().is_empty(), "a byte is in flight");
        assert_eq!(memory.word32(at::block(0) + block::QUEUED_SEQ).load(RELAXED), 3, "the NIC finds them");
        connection.room_ends.fetch_add(3, RELAXED);
        assert!(shared.send_at_once(&connection, 1, b"d"));
        assert_eq!(messages().len(), 1, "nothing was in flight");
        connection.set_flag(block::FLAG_NODELAY, true);
        assert!(shared.send_at_once(&connection, 1, b"e"));
        assert_eq!(messages().len(), 1, "no delay");
    }

    /// With Nagle's rule on the host one command with a handshake stands for all bytes that were kept back; bytes that
    /// are kept back need no command.
    #[test]
    fn a_handshake_is_for_what_the_host_lets_go() {
        let (shared, connection, memory) = session_that_sends(Interface::Handshake, Nagle::Host);
        let mut nic = Consumer::<RingWords>::new(memory.ring(at::COMMANDS));
        assert_eq!(shared.send(&connection, 1, b"a").unwrap(), 1);
        assert_eq!(Message::from_words(nic.pop().unwrap()).unwrap().kind, baton_abi::FETCH | baton_abi::ANSWER);
        assert_eq!(shared.send(&connection, 1, b"b").unwrap_err().kind(), io::ErrorKind::WouldBlock);
        nic.release();
        for piece in [b"b", b"c"] {
            assert_eq!(shared.send(&connection, 1, piece).unwrap(), 1);
        }
        assert!(nic.pop().is_none(), "a byte is in flight");
        connection.room_ends.fetch_add(3, RELAXED);
        assert_eq!(shared.send(&connection, 1, b"d").unwrap(), 1);
        assert!(nic.pop().is_some() && nic.pop().is_none());
    }

    /// With Nagle's rule on the NIC sends are joined while it has not read the last message, whatever the peer has
    /// acknowledged. A segment's worth is no reason for another message, but much is.
    #[test]
    fn sends_are_joined_while_the_nic_is_busy() {
        let (shared, connection, memory) = session_that_sends(Interface::Aggregated, Nagle::Nic);
        let mut nic = Consumer::<RingWords>::new(memory.ring(at::COMMANDS));
        assert!(shared.send_at_once(&connection, 1, b"a") && nic.pop().is_some());
        assert!(shared.send_at_once(&connection, 1, &[0; 2000]) && nic.pop().is_none(), "read, but not released");
        nic.release();
        assert!(shared.send_at_once(&connection, 1, b"b") && nic.pop().is_some(), "a byte is in flight");
        connection.room_ends.fetch_add(2002, RELAXED);
        assert!(shared.send_at_once(&connection, 1, b"c") && nic.pop().is_none());
    }

    /// With Nagle's rule on the host a segment's worth crosses at once, unless more is to be joined.
    #[test]
    fn the_host_keeps_back_less_than_a_segment() {
        for (interface, crosses) in [(Interface::Batched, true), (Interface::Aggregated, false)] {
            let (shared, connection, memory) = session_that_sends(interface, Nagle::Host);
            let mut nic = Consumer::<RingWords>::new(memory.ring(at::COMMANDS));
            assert!(shared.send_at_once(&connection, 1, b"a") && nic.pop().is_some());
            assert!(shared.send_at_once(&connection, 1, &[0; 1000]) && nic.pop().is_none(), "{interface:?}");
            assert!(shared.send_at_once(&connection, 1, &[0; 1000]));
            assert_eq!(nic.pop().is_some(), crosses, "{interface:?}");
        }
    }

    /// A program that found the ring full sleeps until the NIC has read a part of it that it reports.
    #[test]
    fn a_full_ring_is_waited_for() {
        let (shared, connection, memory) = session_that_sends(Interface::Batched, Nagle::Nic);
        let mut nic = Consumer::<RingWords>::new(memory.ring(at::COMMANDS));
        let mut sent = 0;
        while shared.send(&connection, 1, b"a").is_ok() {
            connection.room_ends.fetch_add(1, RELAXED);
            sent += 1;
        }
        assert!(sent >= RING_MESSAGES - 2);
        assert!(!shared.takes(&connection, 1));
        // Until a quarter of the ring is left, at a command whose reading the NIC reports.
        while !(shared.takes(&connection, 1) && nic.position().is_multiple_of(ANSWERED)) {
            assert!(nic.position() <= RING_MESSAGES as u64 - ANSWERED, "the ring is nearly empty");
            nic.pop().unwrap();
            nic.release();
        }
        assert!(shared.takes(&connection, 1) && shared.send(&connection, 1, b"a").is_ok());
    }

    /// A connection that has left the NIC is checked later than the next one in its slot: the next one's events still
    /// reach it.
    #[test]
    fn slots_are_reused() {
        let memory = Arc::new(Region::private(at::HEAP).unwrap());
        let connection = |number, cid: Cid| {
            let connection = Connection::unregistered(memory.clone(), false);
            connection.set_number(number);
            memory.word32(at::block(number) + block::CID).store(cid.0, RELAXED);
            connection.refresh();
            Some(Arc::new(connection))
        };
        let (first, next) = (Cid::new(5, 1), Cid::new(5, 2));
        let connections = [connection(0, first), connection(1, next)];
        let mut known = Known::default();
        connections.iter().for_each(|connection| known.connections.push(connection.clone()));
        let number = |found: Option<&Connection>| found.map(Connection::number);
        for late in [1, 0] {
            known.note(connections[late].as_ref().unwrap());
        }
        assert_eq!(number(known.find(next)), None);
        assert_eq!(number(known.search(next)), Some(1));
        assert_eq!(number(known.find(next)), Some(1));
        assert_eq!(number(known.search(Cid::new(5, 3))), None);
    }
}
