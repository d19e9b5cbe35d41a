//! What comes in: packets for connections, ICMP errors, and what programs read.

use crate::errors::{Answer, Attempt};
use crate::packet::{self, IcmpError, IcmpKind, Inbound, TcpIn};
use crate::socket::{Kind, QueuedError, Socket, SocketId};
use crate::stream::{Stream, Watch};
use crate::world::World;
use baton_tcp::seq::{at_or_before, before};
use baton_tcp::{EndReason, Events, State};
use baton_wire::{Flags, Flow};

/// What a read gives beside its bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// How many there were (MSG_TRUNC may drop some).
    pub length: usize,
    /// Control messages: level, type, data.
    pub control: Vec<(i32, i32, Vec<u8>)>,
    /// `msg_flags`.
    pub flags: i32,
}

impl World {
    /// A packet comes in.
    pub fn input(&mut self, bytes: &[u8]) {
        match packet::parse(bytes) {
            Inbound::Tcp(tcp) => self.input_tcp(&tcp),
            Inbound::Icmp(error) => self.input_icmp(&error),
            Inbound::Other => {}
        }
    }

    fn stream_for(&self, flow: &Flow) -> Option<SocketId> {
        let is = |stream: &Stream| stream.flow == *flow && stream.tcp.state() != State::Closed;
        self.sockets.iter().find(|(_, socket)| socket.stream().is_some_and(is)).map(|(id, _)| *id)
    }

    fn input_tcp(&mut self, tcp: &TcpIn<'_>) {
        let syn = tcp.segment.flags.contains(Flags::SYN) && !tcp.segment.flags.contains(Flags::ACK);
        match self.stream_for(&tcp.flow) {
            // RFC 9293 section 3.6.1: a new connection may follow at once on one in TIME-WAIT if its numbers lie
            // behind.
            Some(id) if syn && self.can_replace(id, tcp) => {
                self.sockets.remove(&id);
                self.input_unknown(tcp);
            }
            Some(id) => self.input_stream(id, tcp),
            None => self.input_unknown(tcp),
        }
    }

    fn can_replace(&self, id: SocketId, tcp: &TcpIn<'_>) -> bool {
        let Some(stream) = self.sockets.get(&id).and_then(Socket::stream) else { return false };
        stream.tcp.state() == State::TimeWait
            && before(stream.tcp.rcv_nxt(), tcp.segment.seq)
            && self.listener_for(&tcp.flow.local).is_some()
    }

    fn input_unknown(&mut self, tcp: &TcpIn<'_>) {
        match self.listener_for(&tcp.flow.local) {
            Some(id) => self.input_listen(id, tcp),
            None => self.reset(tcp),
        }
    }

    fn input_stream(&mut self, id: SocketId, tcp: &TcpIn<'_>) {
        let now = self.instant();
        let (most, lowat) = (self.sysctls.wmem[2], self.sysctls.notsent_lowat);
        if self.must_wait_for_backlog(id, tcp) {
            return;
        }
        let Some(socket) = self.sockets.get_mut(&id) else { return };
        let (open, cork) = (socket.open, socket.options.cork);
        let Some(stream) = socket.stream_mut() else { return };
        // MSG_MORE holds back only until something else makes this end send.
        stream.tcp.set_cork(cork);
        // Nobody will read what comes for a closed socket (RFC 9293 section 3.6.1, RFC 1122 section 4.2.2.13).
        let end = tcp.segment.seq.wrapping_add(tcp.segment.length);
        let unwanted = !open && stream.parent.is_none() && before(stream.tcp.rcv_nxt(), end) && tcp.segment.length > 0;
        if unwanted && matches!(stream.tcp.state(), State::FinWait1 | State::FinWait2) {
            stream.tcp.abort();
            self.sockets.remove(&id);
            return self.reset(tcp);
        }
        stream.learn_cookie(tcp);
        let was_open = stream.tcp.state();
        let received = stream.tcp.input(&tcp.segment, now);
        stream.apply(&received, tcp.payload, now.0);
        if was_open == State::SynSent && received.events.contains(Events::ESTABLISHED) {
            stream.last_data_received = now.0;
            stream.established = true;
            stream.syn_data_acked = stream.syn_data > 0 && received.acked >= stream.syn_data;
        }
        let (acked, delivered) = (received.acked > 0, received.delivered > 0);
        if delivered {
            socket.wakeups += 1;
        }
        if acked {
            socket.report_acknowledged(now.0);
            socket.expand_send_buffer(most);
            socket.wake_writer(lowat);
        }
        if was_open == State::SynSent {
            self.remember_cookie(id, tcp);
        }
        self.handle_events(id, received.events);
    }

    /// Whether a segment would complete a handshake that its listener has no room for: it is dropped, as Linux does.
    fn must_wait_for_backlog(&self, id: SocketId, tcp: &TcpIn<'_>) -> bool {
        let Some(stream) = self.sockets.get(&id).and_then(Socket::stream) else { return false };
        let completes = stream.tcp.state() == State::SynReceived && !stream.queued && tcp.segment.flags.contains(Flags::ACK);
        match stream.parent {
            Some(parent) if completes && self.sockets.contains_key(&parent) => !self.has_backlog(parent),
            _ => false,
        }
    }

    /// Does what has happened to a connection to its socket.
    pub fn handle_events(&mut self, id: SocketId, events: Events) {
        let Some(socket) = self.sockets.get_mut(&id) else { return };
        let soft = socket.soft_error;
        if !events.is_empty() {
            socket.wakeups += 1;
        }
        if events.contains(Events::ABORTED) {
            let reason = socket.stream().and_then(|stream| stream.tcp.end_reason());
            let refused = socket.stream().is_some_and(|stream| !stream.established && !stream.queued && stream.parent.is_none());
            let half_closed = socket.stream().is_some_and(|stream| stream.tcp.fin_received());
            socket.error = match reason {
                Some(EndReason::Reset) if half_closed => libc::EPIPE,
                Some(EndReason::Reset) if !refused => libc::ECONNRESET,
                Some(EndReason::Refused | EndReason::Reset) => libc::ECONNREFUSED,
                Some(EndReason::TimedOut) if soft != 0 => soft,
                Some(EndReason::TimedOut) => libc::ETIMEDOUT,
                Some(EndReason::Aborted) | None => socket.error,
            };
        }
        let wants_queue = events.contains(Events::ESTABLISHED)
            && socket.stream().is_some_and(|stream| stream.parent.is_some() && !stream.queued);
        if wants_queue {
            self.enqueue(id);
        }
    }

    fn input_icmp(&mut self, error: &IcmpError) {
        let now = self.instant();
        let Some(id) = self.stream_for(&error.flow) else { return };
        let Some(socket) = self.sockets.get_mut(&id) else { return };
        let Some(stream) = socket.stream_mut() else { return };
        // RFC 5927 section 4.1: what quotes no segment in flight is forged or late.
        if before(error.seq, stream.tcp.snd_una()) || !at_or_before(error.seq, stream.tcp.snd_nxt()) {
            return;
        }
        let opening = matches!(stream.tcp.state(), State::SynSent | State::SynReceived);
        match error.what {
            IcmpKind::TooBig(mtu) => stream.tcp.on_mtu_change(mtu.max(552), now),
            IcmpKind::Hard(_) | IcmpKind::Soft(_) if opening && stream.parent.is_some() && !stream.queued => {
                self.sockets.remove(&id);
            }
            IcmpKind::Hard(errno) | IcmpKind::Soft(errno) if opening && stream.parent.is_none() => {
                stream.tcp.abort();
                stream.tcp.forget_reset();
                socket.error = errno;
                socket.wakeups += 1;
            }
            IcmpKind::Hard(errno) | IcmpKind::Soft(errno) => socket.soft_error = errno,
        }
    }

    /// recv() and its kin.
    pub fn receive(&mut self, fd: i32, length: usize, flags: i32, since: u64) -> Attempt<Message> {
        let id = match self.socket_of(fd) {
            Ok(id) => id,
            Err(error) => return Attempt::Done(Err(error)),
        };
        let now = self.now;
        let Some(socket) = self.sockets.get_mut(&id) else { return Attempt::Done(Err(libc::EBADF)) };
        if flags & libc::MSG_ERRQUEUE != 0 {
            return Attempt::Done(socket.take_queued_error());
        }
        match socket.try_receive(length, flags) {
            Ok(Some(message)) => Attempt::Done(Ok(message)),
            Err(error) => Attempt::Done(Err(error)),
            Ok(None) if socket.nonblocking || flags & libc::MSG_DONTWAIT != 0 => Attempt::Done(Err(libc::EAGAIN)),
            Ok(None) => {
                let limit = socket.options.receive_timeout;
                let deadline = (limit > 0).then(|| since + limit);
                if deadline.is_some_and(|deadline| now >= deadline) {
                    return Attempt::Done(Err(libc::EAGAIN));
                }
                Attempt::Blocked(deadline)
            }
        }
    }
}

impl Socket {
    fn take_queued_error(&mut self) -> Answer<Message> {
        let Some(error) = self.errors.pop_front() else { return Err(libc::EAGAIN) };
        let mut message = Message { flags: libc::MSG_ERRQUEUE, ..Message::default() };
        if let Some(stamp) = error.stamp {
            let mut data = Vec::new();
            data.extend(((stamp / 1_000_000) as i64).to_ne_bytes());
            data.extend(((stamp % 1_000_000 * 1000) as i64).to_ne_bytes());
            data.extend([0; 32]);
            message.control.push((libc::SOL_SOCKET, libc::SCM_TIMESTAMPING, data));
            message.flags |= libc::MSG_TRUNC;
        }
        let mut data = Vec::new();
        data.extend(error.errno.to_ne_bytes());
        data.extend([error.origin, 0, error.code, 0]);
        data.extend(error.info.to_ne_bytes());
        data.extend(error.data.to_ne_bytes());
        let v4 = self.domain == libc::AF_INET;
        // The address of the offender: none, in the family's size.
        data.resize(data.len() + if v4 { 16 } else { 28 }, 0);
        let level = if v4 { (libc::SOL_IP, libc::IP_RECVERR) } else { (libc::SOL_IPV6, libc::IPV6_RECVERR) };
        message.control.push((level.0, level.1, data));
        Ok(message)
    }

    /// What can be read now; None if there is nothing yet.
    fn try_receive(&mut self, length: usize, flags: i32) -> Answer<Option<Message>> {
        let inq = self.options.inq;
        let shut = self.shut_read;
        if matches!(self.kind, Kind::Fresh) && self.options.deferred.is_some() {
            return Ok(None);
        }
        let Some(stream) = self.stream_mut() else { return Err(libc::ENOTCONN) };
        let readable = stream.tcp.readable() as usize;
        if readable == 0 {
            let end = stream.tcp.fin_received() || shut;
            let state = stream.tcp.state();
            self.take_error()?;
            return Ok((end || state == State::Closed).then(Message::default));
        }
        let wanted = length.min(readable);
        if wanted < length && flags & libc::MSG_WAITALL != 0 && !stream.tcp.fin_received() {
            return Ok(None);
        }
        let bytes = stream.peek(0, wanted);
        if flags & libc::MSG_PEEK == 0 {
            stream.tcp.consumed(wanted as u32);
        }
        let mut message = Message { length: bytes.len(), bytes, ..Message::default() };
        if flags & libc::MSG_TRUNC != 0 {
            message.bytes.clear();
        }
        if inq {
            // A FIN behind the last byte counts as one, so that a program knows of it (Linux's tcp_inq_hint).
            let left = stream.tcp.readable();
            let left = if left == 0 && stream.tcp.fin_received() { 1 } else { left };
            message.control.push((libc::SOL_TCP, libc::TCP_CM_INQ, (left as i32).to_ne_bytes().to_vec()));
        }
        Ok(Some(message))
    }

    /// Reports writes that have been acknowledged by now.
    pub fn report_acknowledged(&mut self, now: u64) {
        let Kind::Stream(stream) = &mut self.kind else { return };
        let una = stream.tcp.snd_una();
        let (done, rest) = std::mem::take(&mut stream.watched)
            .into_iter()
            .partition(|watched| !matches!(watched.what, Watch::Queued(_) | Watch::Sent(_)) && at_or_before(watched.end, una));
        stream.watched = rest;
        self.report(done, now);
    }

    /// Queues what is to be said of writes; MSG_ZEROCOPY's are one entry where their numbers follow each other.
    pub fn report(&mut self, done: Vec<crate::stream::Watched>, now: u64) {
        for watched in done {
            let stamp = |info: u32, data: u32| QueuedError {
                errno: libc::ENOMSG as u32,
                origin: 4,
                code: 0,
                info,
                data,
                stamp: Some(now),
            };
            match watched.what {
                Watch::ZeroCopy(number) => self.report_zerocopy(number),
                Watch::Queued(byte) => self.queue_error(stamp(1, byte)),
                Watch::Sent(byte) => self.queue_error(stamp(0, byte)),
                Watch::Acknowledged(byte) => self.queue_error(stamp(2, byte)),
            }
        }
    }

    fn report_zerocopy(&mut self, number: u32) {
        self.wakeups += 1;
        if let Some(last) = self.errors.back_mut()
            && last.origin == 5
            && last.data.wrapping_add(1) == number
        {
            last.data = number;
            return;
        }
        self.queue_error(QueuedError { errno: 0, origin: 5, code: 1, info: number, data: number, stamp: None });
    }
}
