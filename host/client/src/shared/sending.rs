//! A program's sends, shutdowns and socket options, as commands to the NIC.

use super::{Lane, RELAXED, Shared, bad_address, broken_pipe, would_block};
use crate::connection::{Connection, Inside};
use crate::rules::{Interface, Nagle};
use baton_abi::layout::{ANSWERED, Owner, block};
use baton_abi::{ANSWER, Control, FETCH, HOLD, MORE, Message, Operation};
use baton_handoff::send_buffer::queue_limit;
use baton_linux::process;
use baton_ring::{LockGuard, Producer, Token};
use baton_shm::RingWords;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{Ordering, fence};

/// Most bytes that are joined on the host before a command announces them to the NIC.
const JOINED: u32 = 16 << 10;

/// So many bytes, about a segment, Nagle's rule on the host does not keep back. If the connection's segments are
/// smaller, the NIC's TCP cuts the bytes; if they are larger, it applies the same rule.
const SEGMENT: u32 = 1448;

/// How many times a thread polls for the NIC's answer before it sleeps or its call fails. That takes about as long as
/// going to sleep and being woken, so the wait costs at most twice the optimum.
const ANSWER_LOOKS: u32 = 200;

impl Lane {
    /// Whether `count` commands fit into the ring. If not, an event ([`Control::Taken`]) will concern all of this NIC's
    /// connections when the ring has room again.
    #[inline(always)]
    fn has_room(&self, commands: &mut Producer<RingWords>, count: u64) -> bool {
        commands.has_room(count) || self.is_full(commands, count)
    }

    #[cold]
    fn is_full(&self, commands: &mut Producer<RingWords>, count: u64) -> bool {
        // Up to the command whose reading the NIC reports when a quarter of the ring is still unread.
        self.full_until.store(commands.position().saturating_sub(ANSWERED) / ANSWERED * ANSWERED, RELAXED);
        // The NIC may have read that command, and another thread its event, just before this was stored: check once
        // more.
        fence(Ordering::SeqCst);
        commands.has_room(count)
    }

    /// Queues a message.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full.
    pub(super) fn put(&self, commands: &mut Producer<RingWords>, message: Message) -> io::Result<()> {
        if !self.has_room(commands, 1) {
            return Err(would_block());
        }
        commands.push(message.to_words()).map_err(|_| would_block())
    }
}

impl Shared {
    /// Queues bytes for sending, as many as there is room for. Returns how many. The caller has entered the connection,
    /// which is on the NIC.
    ///
    /// # Errors
    /// `WouldBlock` if there is no room, EFAULT if the bytes cannot be read ([`baton_shm::guarded`]), else the error
    /// that ended the connection.
    #[inline]
    pub fn send(&self, connection: &Connection, token: Token, bytes: &[u8]) -> io::Result<usize> {
        self.send_pieces(connection, token, (bytes.len(), false), std::iter::once(bytes))
    }

    /// As [`Shared::send`], for `total` bytes in pieces, which leave as if they were one. With `held` (MSG_MORE) the
    /// last part, which does not fill a segment, waits for more bytes, if there was room for all.
    ///
    /// # Errors
    /// See there.
    pub fn send_pieces<'a>(
        &self,
        connection: &Connection,
        token: Token,
        (total, held): (usize, bool),
        pieces: impl Iterator<Item = &'a [u8]>,
    ) -> io::Result<usize> {
        if connection.is_stopped() {
            return Err(self.send_error(connection));
        }
        let mut length = total.min(connection.room() as usize);
        if length < total {
            self.catch_up(token);
            length = total.min(connection.room() as usize);
            if length == 0 {
                return Err(would_block());
            }
        }
        if length == 0 {
            return Ok(0);
        }
        if !self.takes(connection, token) {
            return Err(would_block());
        }
        let memory = connection.send_memory();
        let queued = connection.queued.load(RELAXED);
        let mut left = length;
        for piece in pieces {
            let piece = &piece[..piece.len().min(left)];
            if !memory.write(queued.wrapping_add((length - left) as u32), piece) {
                return Err(bad_address());
            }
            left -= piece.len();
        }
        let (length, end) = (length as u32, queued.wrapping_add(length as u32));
        let first = length.min(memory.length() - (queued & (memory.length() - 1)));
        let lane = self.lane(connection);
        let Some(mut commands) = lane.commands.lock(token) else { return Err(would_block()) };
        if !lane.has_room(&mut commands, 2) {
            return Err(would_block());
        }
        if self.joins() {
            let announced = self.join(connection, connection.inside(), token, &mut commands, end);
            drop(commands);
            if announced {
                lane.ring_nic();
            }
            return Ok(length as usize);
        }
        let held = if held && length as usize == total { HOLD } else { 0 };
        let answer = held | if self.interface == Interface::Handshake { ANSWER } else { 0 };
        let mut push = |seq: u32, length: u32, kind: u16| {
            let message = Message::new(Operation::NicSend, connection.cid(), memory.offset_of(seq), length);
            let _ = commands.push(Message { kind, ..message }.to_words());
        };
        if first < length {
            // Around the end of send memory: two messages, but the NIC sends the bytes as one piece.
            push(queued, first, MORE);
            push(queued.wrapping_add(first), length - first, answer);
        } else {
            push(queued, length, answer);
        }
        connection.given.store(commands.position(), RELAXED);
        connection.note_queued(connection.inside(), end);
        commands.publish();
        drop(commands);
        lane.ring_nic();
        Ok(length as usize)
    }

    /// Whether another command of the connection can be queued now: the ring is not full, and with the interface
    /// *handshake* the NIC has acknowledged the last one. When this becomes true there is an event.
    pub fn takes(&self, connection: &Connection, token: Token) -> bool {
        let lane = self.lane(connection);
        let full_until = lane.full_until.load(RELAXED);
        let handshake = self.interface == Interface::Handshake;
        if !handshake && full_until == 0 {
            return true;
        }
        let Some(commands) = lane.commands.lock(token) else { return true };
        commands.is_released(full_until) && (!handshake || commands.is_released(connection.given.load(RELAXED)))
    }

    /// Polls for the NIC's answer to the connection's last command for a few microseconds, before the thread sleeps or
    /// its call fails. Returns whether it has come. Looks only once on the NIC's own processor, where polling would
    /// keep the NIC from answering, and while the NIC is sending.
    pub fn await_answer(&self, connection: &Connection, token: Token) -> bool {
        let may = self.interface == Interface::Handshake && connection.owner() == Owner::Nic;
        if !may || connection.room() == 0 {
            return false;
        }
        let elsewhere = connection.processor() != u32::try_from(process::current_cpu()).ok();
        let sending = self.memory.word32(self.lane(connection).nic_sending);
        let comes = |_| {
            std::hint::spin_loop();
            self.takes(connection, token)
        };
        self.takes(connection, token) || elsewhere && (0..ANSWER_LOOKS).take_while(|_| sending.load(RELAXED) == 0).any(comes)
    }

    /// Whether small sends may be kept back, so that one message stands for several.
    fn joins(&self) -> bool {
        self.interface == Interface::Aggregated || self.nagle == Nagle::Host
    }

    /// Queues bytes that lie in send memory up to `end`. With Nagle's rule on the host (RFC 9293 section 3.7.4) the NIC
    /// is notified if the peer has acknowledged all bytes before them, if many have been joined since the last time, or
    /// if the program wants no delay. With the rule on the NIC it is notified once it has read the last message, or if
    /// many have been joined. If the NIC is not notified, it finds the bytes when it has read that message, and when it
    /// has reported the next acknowledgement. Returns whether it was notified. The ring must have room for a command.
    #[inline]
    fn join(
        &self,
        connection: &Connection,
        block: Inside<'_>,
        token: Token,
        commands: &mut Producer<RingWords>,
        end: u32,
    ) -> bool {
        let before = connection.queued.load(RELAXED);
        connection.note_queued(block, end);
        // The NIC reports acknowledgements, or releases messages, first and then looks for queued bytes: one side sees
        // the other's.
        fence(Ordering::SeqCst);
        if self.nagle == Nagle::Host && !connection.is_quiet(before) && self.has_events(token) {
            self.catch_up(token);
        }
        let most = if self.interface == Interface::Aggregated { JOINED } else { SEGMENT };
        let goes = match self.nagle {
            Nagle::Host => connection.is_quiet(before) || connection.nodelay(),
            Nagle::Nic => commands.is_released(connection.given.load(RELAXED)),
        };
        let due = goes || end.wrapping_sub(connection.announced.load(RELAXED)) >= most || !connection.announces.load(RELAXED);
        if due {
            let answer = if self.interface == Interface::Handshake { ANSWER } else { 0 };
            let message = Message::new(Operation::NicSend, connection.cid(), 0, 0);
            let _ = commands.push(Message { kind: FETCH | answer, ..message }.to_words());
            connection.given.store(commands.position(), RELAXED);
            commands.publish();
            connection.announced.store(end, RELAXED);
            connection.announces.store(true, RELAXED);
        }
        due
    }

    /// Fast path of [`Shared::enter`], [`Shared::send`] and leaving: the NIC has the connection, no other thread is
    /// inside, and there is room for all bytes, of which there are some. False, with nothing sent, in any other case.
    #[inline(always)]
    pub fn send_at_once(&self, connection: &Connection, token: Token, bytes: &[u8]) -> bool {
        if !self.sends_plainly {
            return self.join_at_once(connection, token, bytes);
        }
        let Some(block) = connection.step_in(token) else { return false };
        let lane = self.lane(connection);
        let Some(commands) = put_at_once(lane, connection, block, token, bytes) else {
            block.leave_unserved();
            return false;
        };
        block.step_out();
        // A full barrier, which both the doorbell and a mover that waits for this operation to end need.
        commands.unlock();
        lane.ring_nic_after_barrier();
        block.wake_mover();
        true
    }

    /// [`Shared::send_at_once`] for the other interfaces: bytes are joined, and the NIC is notified only if it is due.
    /// A send that needs an acknowledged command (*handshake*) is not served here.
    #[inline(never)]
    fn join_at_once(&self, connection: &Connection, token: Token, bytes: &[u8]) -> bool {
        if self.interface == Interface::Handshake {
            return false;
        }
        let Some(block) = connection.step_in(token) else { return false };
        let lane = self.lane(connection);
        let joined = self.put_and_join(lane, connection, block, token, bytes);
        block.step_out();
        match joined {
            Some(true) => lane.ring_nic(),
            // A full barrier, for an agent that waits for this operation to end.
            _ => fence(Ordering::SeqCst),
        }
        block.wake_mover();
        joined.is_some()
    }

    /// Whether the NIC was notified; None, with nothing sent, if there is no room.
    #[inline(always)]
    fn put_and_join(&self, lane: &Lane, connection: &Connection, block: Inside<'_>, token: Token, bytes: &[u8]) -> Option<bool> {
        if !fits(connection, bytes) {
            return None;
        }
        let queued = connection.queued.load(RELAXED);
        connection.send_memory().write_straight(queued, bytes)?;
        let mut commands = lane.commands.lock(token)?;
        commands.has_room(1).then(|| self.join(connection, block, token, &mut commands, queued.wrapping_add(bytes.len() as u32)))
    }

    #[cold]
    pub(super) fn send_error(&self, connection: &Connection) -> io::Error {
        match connection.take_error() {
            0 => broken_pipe(),
            error => io::Error::from_raw_os_error(error as i32),
        }
    }

    /// Shuts down the sending side. The caller has entered the connection, which is on the NIC.
    ///
    /// # Errors
    /// `WouldBlock` if the ring is full, `ResourceBusy` in a signal handler that interrupted another command.
    pub fn shutdown(&self, connection: &Connection, token: Token) -> io::Result<()> {
        let message = Message::control(Operation::NicControl, Control::Shutdown, connection.cid(), 0, 0);
        let lane = self.lane(connection);
        let Some(mut commands) = lane.commands.lock(token) else { return Err(io::ErrorKind::ResourceBusy.into()) };
        lane.put(&mut commands, message)?;
        // Set only when the command has found room, and before the NIC can act on it: if the NIC dies, the flag alone
        // says so.
        connection.set_shut(true);
        connection.set_flag(block::FLAG_SHUT_DOWN, true);
        commands.publish();
        drop(commands);
        lane.ring_nic();
        Ok(())
    }

    pub(super) fn control(
        &self,
        connection: &Connection,
        token: Token,
        control: Control,
        address: u32,
        length: u32,
    ) -> io::Result<()> {
        if self.has_ended() {
            return Ok(());
        }
        let message = Message::control(Operation::NicControl, control, connection.cid(), address, length);
        let lane = self.lane(connection);
        let Some(mut commands) = lane.commands.lock(token) else { return Err(io::ErrorKind::ResourceBusy.into()) };
        lane.put(&mut commands, message)?;
        commands.publish();
        drop(commands);
        lane.ring_nic();
        Ok(())
    }

    /// Reports to the NIC, if it acts on the option, that a socket option has been set on the descriptor of a
    /// connection that it has. SO_KEEPALIVE must not be set on the descriptor, since the shell would send probes; its
    /// value is `keepalive`.
    ///
    /// # Errors
    /// As [`Shared::shutdown`], else the failed system call's.
    pub fn option_was_set(
        &self,
        connection: &Connection,
        token: Token,
        fd: BorrowedFd<'_>,
        (level, option): (i32, i32),
        value: i32,
    ) -> io::Result<()> {
        let get = |option| baton_linux::socket::get(fd, 6, option).map(|value| value as u32);
        match (level, option) {
            (6, 1) => {
                connection.set_flag(block::FLAG_NODELAY, value != 0);
                self.control(connection, token, Control::NoDelay, value as u32, 0)
            }
            (6, 3) => {
                // The flag is set also on a connection that has ended, as in the kernel.
                connection.set_flag(block::FLAG_CORK, value != 0);
                self.control(connection, token, Control::Cork, value as u32, 0)
            }
            (6, 18) => self.control(connection, token, Control::UserTimeout, value as u32, 0),
            (1, 9) | (6, 4..=6) => {
                if (level, option) == (1, 9) {
                    connection.set_flag(block::FLAG_KEEPALIVE, value != 0);
                }
                let on = connection.keepalive();
                let (idle, interval, count) = (get(4)?, get(5)?, get(6)?);
                let (first, second) = (idle | u32::from(on) << 31, interval | count << 16);
                self.control(connection, token, Control::KeepAlive, first, second)
            }
            _ if limits_queue(level, option) => {
                // The value as the kernel has changed it.
                let most = baton_linux::socket::get(fd, 1, 7)?;
                connection.limit_queue(queue_limit(most.max(0) as u32));
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Whether the NIC can take bytes from where a message says that they are: by the other interfaces it looks in send
/// memory for what has been queued.
pub(crate) fn takes_buffers(shared: &Shared) -> bool {
    !shared.joins() && shared.interface != Interface::Handshake
}

/// Queues bytes that lie at this place in session memory, as many as there is room for. Returns how many. `note` gets
/// the sequence number of the first byte and their number, before any reader can see that they are queued. The caller
/// has entered the connection, which is on the NIC, and [`takes_buffers`].
///
/// # Errors
/// As [`Shared::send`].
pub(crate) fn send_from(
    shared: &Shared,
    connection: &Connection,
    token: Token,
    (address, length): (u32, usize),
    note: impl FnOnce(u32, u32),
) -> io::Result<usize> {
    if connection.is_stopped() {
        return Err(shared.send_error(connection));
    }
    let mut most = length.min(connection.room() as usize) as u32;
    if (most as usize) < length {
        shared.catch_up(token);
        most = length.min(connection.room() as usize) as u32;
    }
    if most == 0 || !shared.takes(connection, token) {
        return Err(would_block());
    }
    let lane = shared.lane(connection);
    let Some(mut commands) = lane.commands.lock(token) else { return Err(would_block()) };
    if !lane.has_room(&mut commands, 1) {
        return Err(would_block());
    }
    let queued = connection.queued.load(RELAXED);
    note(queued, most);
    let _ = commands.push(Message::new(Operation::NicSend, connection.cid(), address, most).to_words());
    connection.given.store(commands.position(), RELAXED);
    connection.note_queued(connection.inside(), queued.wrapping_add(most));
    commands.publish();
    drop(commands);
    lane.ring_nic();
    Ok(most as usize)
}

/// Whether a socket option limits the bytes that may be queued for sending: SO_SNDBUF and SO_SNDBUFFORCE.
pub fn limits_queue(level: i32, option: i32) -> bool {
    level == 1 && matches!(option, 7 | 32)
}

/// Whether they can be sent, and there is room for all of them. Not meaningful for no bytes, or for more than a call
/// takes.
#[inline(always)]
fn fits(connection: &Connection, bytes: &[u8]) -> bool {
    bytes.len() as isize <= connection.room_unless_stopped() as isize
}

/// Part of [`Shared::send_at_once`]: the lock of the command ring, which is still held; None if nothing was sent.
#[inline(always)]
fn put_at_once<'a>(
    lane: &'a Lane,
    connection: &Connection,
    block: Inside<'_>,
    token: Token,
    bytes: &[u8],
) -> Option<LockGuard<'a, Producer<RingWords>>> {
    if !fits(connection, bytes) {
        return None;
    }
    let queued = connection.queued.load(RELAXED);
    let address = connection.send_memory().write_straight(queued, bytes)?;
    let message = Message::new(Operation::NicSend, connection.cid(), address, bytes.len() as u32);
    let mut commands = lane.commands.lock(token)?;
    // Loaded again, so that the compiler does not keep it across the copy.
    let end = connection.queued.load(RELAXED).wrapping_add(bytes.len() as u32);
    commands.push_and_publish(message.to_words(), || connection.note_queued(block, end)).ok()?;
    Some(commands)
}

#[cfg(test)]
mod tests {
    use super::super::Listener;
    use super::*;
    use baton_abi::Cid;
    use baton_abi::layout::session as at;
    use baton_linux::bell::SessionBell;
    use baton_linux::control::Channel;
    use baton_ring::Consumer;
    use baton_shm::Region;
    use std::sync::{Arc, Mutex};

    /// A session with two NICs and a handshake for each message, and the numbers that its listener is called with.
    fn with_handshakes() -> (Shared, Arc<Region>, Arc<Mutex<Vec<u32>>>) {
        let memory = Arc::new(Region::private(at::HEAP + 16384).expect("memory"));
        let notified = Arc::new(Mutex::new(Vec::new()));
        let note = notified.clone();
        let listener = Listener(Box::new(move |number| note.lock().expect("numbers").push(number)));
        let (channel, _agent) = Channel::pair().expect("a channel");
        let bell = || SessionBell::pair().expect("a doorbell").0;
        let mut shared = Shared::new(0, Arc::new(channel), memory.clone(), bell(), vec![bell()], listener);
        shared.use_interface(Interface::Handshake, Nagle::Nic);
        (shared, memory, notified)
    }

    /// An answer is for its connection, but for all if others were lost.
    #[test]
    fn answers_that_were_lost_are_made_up_for() {
        let (shared, memory, notified) = with_handshakes();
        let connections = [on_nic(&shared, 0), on_nic(&shared, 1)];
        let mut events = Producer::<RingWords>::new(memory.ring(at::EVENTS));
        for (whose, expected) in [(0, vec![0]), (baton_abi::OF_ALL, vec![0, 1])] {
            notified.lock().expect("numbers").clear();
            let taken = Message::control(Operation::OsControl, Control::Taken, connections[0].cid(), whose, 0);
            events.push(taken.to_words()).expect("room");
            events.publish();
            shared.catch_up(1);
            let mut numbers = notified.lock().expect("numbers").clone();
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers, expected);
        }
    }

    /// A message whose NIC has not answered is of no concern to the next NIC that the connection is on, nor to the
    /// kernel.
    #[test]
    fn a_handshake_ends_with_a_move() {
        let (shared, memory, _) = with_handshakes();
        let connection = on_nic(&shared, 0);
        let set = |field, value: u32| memory.word32(at::block(0) + field).store(value, RELAXED);
        shared.send(&connection, 1, b"a").expect("room");
        assert!(!shared.takes(&connection, 1) && !shared.await_answer(&connection, 1));
        set(block::OWNER, Owner::Kernel as u32);
        set(block::MOVES, 2);
        shared.with_events(1, |round| round.refresh(&connection)).expect("the lock");
        assert!(!shared.await_answer(&connection, 1), "the kernel answers no message");
        set(block::OWNER, Owner::Nic as u32);
        set(block::CID, Cid::new(0, 1).on(1).0);
        set(block::MOVES, 3);
        shared.with_events(1, |round| round.refresh(&connection)).expect("the lock");
        assert!(shared.takes(&connection, 1) && shared.await_answer(&connection, 1));
        assert_eq!(shared.send(&connection, 1, b"b").expect("room"), 1);
    }

    /// A connection that can send nothing has the room that it had. SO_SNDBUF changes nothing about that, nor do more
    /// queued bytes than it allows.
    #[test]
    fn nothing_is_sent_at_once_where_nothing_can_be_sent() {
        let (mut shared, _memory, _) = with_handshakes();
        shared.use_interface(Interface::Batched, Nagle::Nic);
        let connection = on_nic(&shared, 0);
        assert!(shared.send_at_once(&connection, 1, &[7; 2000]));
        for most in [0, 4096, 1024] {
            connection.limit_queue(most);
            let room = connection.room();
            connection.set_shut(true);
            assert!(!shared.send_at_once(&connection, 1, b"a"));
            connection.limit_queue(most);
            assert!(!shared.send_at_once(&connection, 1, b"a"));
            assert_eq!((connection.is_stopped(), connection.room()), (true, room));
            assert_eq!(shared.send(&connection, 1, b"a").expect_err("it is shut").kind(), io::ErrorKind::BrokenPipe);
            connection.set_shut(false);
            assert_eq!(shared.send_at_once(&connection, 1, b"a"), room > 0, "{most} bytes may be queued: room for {room}");
        }
    }

    /// The NIC's connection of this number in a session, with 4096 bytes of memory each way, all of it unread.
    fn on_nic(shared: &Shared, number: u32) -> Arc<Connection> {
        let heap = at::HEAP as u32 + 8192 * number;
        let memories = [(block::RECEIVE_BASE, heap), (block::RECEIVE_SIZE, 4096), (block::SEND_BASE, heap + 4096)];
        let fields = [(block::OWNER, Owner::Nic as u32), (block::CID, Cid::new(number, 1).0), (block::MOVES, 1)];
        for (field, value) in memories.into_iter().chain(fields).chain([(block::SEND_SIZE, 4096), (block::RECEIVE_SEQ, 4096)]) {
            shared.memory().word32(at::block(number) + field).store(value, RELAXED);
        }
        let connection = shared.unregistered();
        shared.represent(&connection, number);
        shared.with_events(1, |round| round.refresh(&connection)).expect("the lock");
        connection
    }

    /// A call that finds the ring full fails with `WouldBlock`, although its connection has room or bytes. No event of
    /// its own will wake that connection. So it is reported ready, once, when the NIC has read the other connections'
    /// commands, even if those connections are gone by then.
    #[test]
    fn who_finds_the_ring_full_is_notified_when_it_is_not() {
        let calls: [fn(&Shared, &Connection) -> io::Result<usize>; 3] = [
            |shared, connection| shared.send(connection, 1, b"b"),
            |shared, connection| shared.receive(connection, 1, &mut [0; 4096]),
            |shared, connection| shared.shutdown(connection, 1).map(|()| 0),
        ];
        for (call, is_gone) in calls.into_iter().flat_map(|call| [(call, false), (call, true)]) {
            let memory = Arc::new(Region::private(at::HEAP + 16384).expect("memory"));
            let notified = Arc::new(Mutex::new(Vec::new()));
            let note = notified.clone();
            let listener = Listener(Box::new(move |number| note.lock().expect("numbers").push(number)));
            let (channel, _agent) = Channel::pair().expect("a channel");
            let (bell, _other) = SessionBell::pair().expect("a doorbell");
            let shared = Shared::new(0, Arc::new(channel), memory.clone(), bell, Vec::new(), listener);
            let (busy, waiting) = (on_nic(&shared, 0), on_nic(&shared, 1));
            let filler = Message::control(Operation::NicControl, Control::NoDelay, busy.cid(), 0, 0);
            {
                let mut commands = shared.first.commands.lock(1).expect("the lock");
                while commands.push(filler.to_words()).is_ok() {}
                commands.publish();
            }
            assert_eq!(call(&shared, &waiting).expect_err("it is full").kind(), io::ErrorKind::WouldBlock);
            let mut nic = Consumer::<RingWords>::new(memory.ring(at::COMMANDS));
            let mut events = Producer::<RingWords>::new(memory.ring(at::EVENTS));
            // Whether the NIC's event concerns the other connection.
            let mut is_notified = || {
                notified.lock().expect("numbers").clear();
                let last = if is_gone { Cid::new(0, 9) } else { busy.cid() };
                let taken = Message::control(Operation::OsControl, Control::Taken, last, 0, 0);
                events.push(taken.to_words()).expect("room");
                events.publish();
                shared.catch_up(1);
                let numbers = notified.lock().expect("numbers");
                assert!(is_gone || numbers.contains(&0));
                numbers.contains(&1)
            };
            loop {
                nic.pop().expect("a message");
                nic.release();
                if nic.position().is_multiple_of(ANSWERED) {
                    let takes = shared.takes(&waiting, 1);
                    assert_eq!(is_notified(), takes, "{}", nic.position());
                    if takes {
                        break;
                    }
                }
            }
            assert!(!is_notified(), "once is enough");
            call(&shared, &waiting).expect("there is room");
        }
    }
}
