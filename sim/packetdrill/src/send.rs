//! What programs do with connections: connect, write, shutdown, close.

use crate::errors::{Answer, Attempt};
use crate::listen::config;
use crate::socket::{Kind, Socket, SocketId};
use crate::stream::{Stream, Watch, Watched};
use crate::world::{Object, World};
use baton_tcp::segment::Transmit;
use baton_tcp::seq::at_or_before;
use baton_tcp::{Connection, State};
use baton_wire::{Endpoint, Flow};

/// SO_TIMESTAMPING: stamps for what leaves, and for what is acknowledged.
const STAMP_SENT: u32 = 2 | 1 << 4;
const STAMP_SCHED: u32 = 1 << 8;
const STAMP_ACKED: u32 = 1 << 9;

/// How a socket connects.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// Bytes that may go with the SYN.
    pub data: Vec<u8>,
    /// Fast Open is asked for (MSG_FASTOPEN, TCP_FASTOPEN_CONNECT).
    pub fast: bool,
}

impl World {
    /// socket().
    pub fn new_socket(&mut self, domain: i32, kind: i32) -> Answer<i32> {
        self.refresh_sysctls();
        if !matches!(domain, libc::AF_INET | libc::AF_INET6) {
            return Err(libc::EAFNOSUPPORT);
        }
        if kind & 0xff != libc::SOCK_STREAM {
            return Err(libc::EPROTONOSUPPORT);
        }
        let id = self.fresh_id();
        let mut socket = self.blank_socket(domain);
        socket.nonblocking = kind & libc::SOCK_NONBLOCK != 0;
        self.sockets.insert(id, socket);
        self.describe(Object::Socket(id))
    }

    /// bind().
    pub fn bind(&mut self, fd: i32, endpoint: Endpoint) -> Answer<()> {
        let id = self.socket_of(fd)?;
        let socket = self.socket(id)?;
        if socket.local.is_some() {
            return Err(libc::EINVAL);
        }
        socket.local = Some(endpoint);
        Ok(())
    }

    /// connect(). `started` is the caller's to keep over its attempts.
    pub fn connect(&mut self, fd: i32, remote: Option<Endpoint>, started: &mut bool) -> Attempt<i32> {
        match self.try_connect(fd, remote, started) {
            Ok(true) => Attempt::Done(Ok(0)),
            Ok(false) => Attempt::Blocked(None),
            Err(error) => Attempt::Done(Err(error)),
        }
    }

    fn try_connect(&mut self, fd: i32, remote: Option<Endpoint>, started: &mut bool) -> Answer<bool> {
        let id = self.socket_of(fd)?;
        let Some(remote) = remote else { return self.disconnect(id).map(|()| true) };
        let socket = self.socket(id)?;
        let nonblocking = socket.nonblocking;
        match &mut socket.kind {
            Kind::Listener(_) => Err(libc::EISCONN),
            Kind::Fresh => {
                *started = true;
                if socket.options.fastopen_connect && self.defers_connect(id, remote) {
                    return Ok(true);
                }
                let fast = self.socket(id)?.options.fastopen_connect;
                self.open_stream(id, remote, &Opening { data: Vec::new(), fast })?;
                if nonblocking { Err(libc::EINPROGRESS) } else { Ok(false) }
            }
            Kind::Stream(stream) => match stream.tcp.state() {
                State::SynSent | State::SynReceived if !nonblocking => Ok(false),
                State::SynSent | State::SynReceived => Err(libc::EALREADY),
                State::Closed => {
                    socket.kind = Kind::Fresh;
                    socket.take_error()?;
                    Err(libc::ECONNABORTED)
                }
                _ if std::mem::replace(&mut stream.connect_reported, true) => Err(libc::EISCONN),
                _ => Ok(true),
            },
        }
    }

    fn disconnect(&mut self, id: SocketId) -> Answer<()> {
        if let Some(stream) = self.socket(id)?.stream_mut() {
            // Linux's tcp_need_reset: not in SYN-SENT, nor once all is said.
            stream.tcp.abort();
            self.flush(id);
        }
        let socket = self.socket(id)?;
        socket.kind = Kind::Fresh;
        socket.error = 0;
        Ok(())
    }

    /// A SYN leaves. Returns how many bytes of data it carries.
    pub fn open_stream(&mut self, id: SocketId, remote: Endpoint, opening: &Opening) -> Answer<usize> {
        self.refresh_sysctls();
        let (isn, ts) = (self.draw(), self.draw());
        let port = 32768 + (self.draw() % 20_000) as u16;
        let (now, sysctls) = (self.instant(), self.sysctls.clone());
        let v4 = remote.is_v4();
        let mtu = self.flags.mtu;
        let fallback = if v4 { Endpoint::v4([192, 168, 0, 1], port) } else { Endpoint::v6([0xfd; 16], port) };
        let socket = self.socket(id)?;
        let local = match socket.local {
            Some(bound) if bound.port != 0 => bound,
            Some(bound) => Endpoint { port, ..bound },
            None => fallback,
        };
        socket.local = Some(local);
        let config = config(&socket.options, &sysctls, mtu, v4, sysctls.ecn == 1, sysctls.syn_retries);
        let tcp = Connection::connect(config, isn, ts, now);
        let mut stream = Stream::new(tcp, Flow { local, remote, device: 0 }, isn.wrapping_add(1), now.0);
        stream.tcp.set_cork(socket.options.cork);
        stream.mtu = mtu;
        let carried = self.prepare_fast_open(id, &mut stream, opening)?;
        let socket = self.socket(id)?;
        socket.kind = Kind::Stream(Box::new(stream));
        self.flush(id);
        Ok(carried)
    }

    /// send() and its kin. `done` counts the bytes that were taken at earlier attempts.
    pub fn write(&mut self, fd: i32, bytes: &[u8], flags: i32, done: &mut usize, since: u64) -> Attempt<usize> {
        match self.try_write(fd, bytes, flags, done) {
            Ok(true) => Attempt::Done(Ok(*done)),
            Ok(false) => {
                let limit = self.socket_of(fd).ok().map_or(0, |id| self.sockets[&id].options.send_timeout);
                let deadline = (limit > 0).then(|| since + limit);
                match deadline {
                    Some(deadline) if self.now >= deadline && *done > 0 => Attempt::Done(Ok(*done)),
                    Some(deadline) if self.now >= deadline => Attempt::Done(Err(libc::EAGAIN)),
                    _ => Attempt::Blocked(deadline),
                }
            }
            // A SYN that was refused took nothing with it.
            Err(error) if *done == 0 || error == libc::ECONNREFUSED => Attempt::Done(Err(error)),
            Err(_) => Attempt::Done(Ok(*done)),
        }
    }

    /// Takes bytes as far as there is room. Whether the call is over.
    fn try_write(&mut self, fd: i32, bytes: &[u8], flags: i32, done: &mut usize) -> Answer<bool> {
        let id = self.socket_of(fd)?;
        if *done == 0
            && let Some(remote) = self.deferred(id)
        {
            return self.write_deferred(id, remote, bytes, flags, done);
        }
        let lowat = self.sysctls.notsent_lowat;
        let socket = self.socket(id)?;
        let wait = !socket.nonblocking && flags & libc::MSG_DONTWAIT == 0;
        let state = socket.stream().map_or(State::Closed, |stream| stream.tcp.state());
        if state == State::Closed {
            socket.take_error()?;
            return Err(libc::EPIPE);
        }
        let fast = socket.stream().is_some_and(|stream| stream.queued);
        if matches!(state, State::SynSent | State::SynReceived) && !fast {
            return if wait { Ok(false) } else { Err(libc::EAGAIN) };
        }
        socket.take_error()?;
        if !socket.stream().is_some_and(Stream::can_send) {
            return Err(libc::EPIPE);
        }
        loop {
            let socket = self.socket(id)?;
            let taken = (socket.room(lowat) as usize).min(bytes.len() - *done);
            if taken == 0 {
                break;
            }
            let last = *done + taken == bytes.len();
            socket.put(&bytes[*done..*done + taken], flags, last);
            *done += taken;
            self.flush(id);
        }
        if *done == bytes.len() {
            return Ok(true);
        }
        let socket = self.socket(id)?;
        socket.no_space = true;
        if let Some(stream) = socket.stream_mut() {
            stream.pushed = stream.write_end().0;
        }
        if wait {
            return Ok(false);
        }
        if *done > 0 { Ok(true) } else { Err(libc::EAGAIN) }
    }

    /// shutdown().
    pub fn shutdown(&mut self, fd: i32, how: i32) -> Answer<()> {
        let id = self.socket_of(fd)?;
        let socket = self.socket(id)?;
        if !(0..=2).contains(&how) {
            return Err(libc::EINVAL);
        }
        let Some(stream) = socket.stream_mut() else { return Err(libc::ENOTCONN) };
        if stream.tcp.state() == State::Closed {
            return Err(libc::ENOTCONN);
        }
        if how != libc::SHUT_RD {
            stream.tcp.set_cork(false);
            stream.shutdown();
        }
        socket.shut_read |= how != libc::SHUT_WR;
        socket.wakeups += 1;
        Ok(())
    }

    /// close(): what comes of the connection is its own business from here on (RFC 9293 section 3.10.4, RFC 1122
    /// section 4.2.2.13).
    pub fn close(&mut self, fd: i32) -> Answer<()> {
        let descriptor = self.descriptors.remove(&fd).ok_or(libc::EBADF)?;
        let id = match descriptor.object {
            Object::Socket(id) => id,
            Object::Epoll(id) => {
                self.sets.remove(&id);
                return Ok(());
            }
        };
        self.sets.values_mut().for_each(|set| set.forget(fd));
        let socket = self.socket(id)?;
        socket.open = false;
        let abortive = socket.options.linger == Some(0);
        match &mut socket.kind {
            Kind::Fresh => {}
            Kind::Listener(_) => self.close_listener(id),
            Kind::Stream(stream) => {
                let opening = stream.tcp.state() == State::SynSent;
                let unread = stream.tcp.readable() > 0;
                stream.tcp.set_cork(false);
                if opening {
                    self.sockets.remove(&id);
                } else if unread || abortive {
                    // RFC 2525 section 2.17: a RST shows the peer that what it sent was not read.
                    stream.tcp.abort();
                } else {
                    stream.shutdown();
                }
            }
        }
        Ok(())
    }
}

impl Socket {
    /// Bytes that go into one piece of the send queue now: behind the last one whatever the limits, in a new one if
    /// they allow it.
    pub fn room(&self, lowat: u32) -> u32 {
        let Some(stream) = self.stream() else { return 0 };
        match stream.tail_room() {
            0 if stream.queue_cost() < self.options.send_buffer && stream.unsent() < self.notsent_limit(lowat) => {
                stream.fresh_room()
            }
            room => room,
        }
    }

    fn notsent_limit(&self, lowat: u32) -> u32 {
        if self.options.notsent_lowat > 0 { self.options.notsent_lowat } else { lowat }
    }

    /// Whether a writer is woken, or gets the answer that it may write: a third of the buffer is free (Linux's
    /// sk_stream_is_writeable), and no more than TCP_NOTSENT_LOWAT waits to be sent.
    pub fn is_writable(&self, lowat: u32) -> bool {
        let Some(stream) = self.stream() else { return true };
        let queued = stream.queue_cost();
        let free = self.options.send_buffer.saturating_sub(queued);
        free >= queued / 2 && free > 0 && u64::from(stream.unsent()) * 2 < u64::from(self.notsent_limit(lowat))
    }

    /// Puts bytes into the send queue, and notes what the program wants to be notified of.
    pub fn put(&mut self, bytes: &[u8], flags: i32, last: bool) {
        let zerocopy = self.options.zerocopy && flags & libc::MSG_ZEROCOPY != 0 && last;
        let stamps = if last { self.options.timestamping } else { 0 };
        let number = self.zerocopy_sends;
        self.zerocopy_sends = number.wrapping_add(u32::from(zerocopy));
        let cork = self.options.cork || flags & libc::MSG_MORE != 0;
        let Some(stream) = self.stream_mut() else { return };
        stream.write(bytes, flags & libc::MSG_EOR != 0 && last);
        stream.tcp.set_cork(cork);
        let (end, byte) = stream.write_end();
        if flags & libc::MSG_MORE == 0 && last {
            stream.pushed = end;
        }
        let mut watch = |what| stream.watched.push(Watched { end, what });
        if zerocopy {
            watch(Watch::ZeroCopy(number));
        }
        if stamps & STAMP_SCHED != 0 {
            watch(Watch::Queued(byte));
        }
        if stamps & STAMP_SENT == STAMP_SENT {
            watch(Watch::Sent(byte));
        }
        if stamps & STAMP_ACKED != 0 {
            watch(Watch::Acknowledged(byte));
        }
    }

    /// Queues the stamps of writes whose last byte leaves with this segment.
    pub fn report_sent(&mut self, transmit: &Transmit, now: u64) {
        let Kind::Stream(stream) = &mut self.kind else { return };
        if stream.watched.is_empty() || transmit.length == 0 {
            return;
        }
        let end = transmit.seq.wrapping_add(transmit.length);
        let (done, rest) = std::mem::take(&mut stream.watched)
            .into_iter()
            .partition(|watched| matches!(watched.what, Watch::Queued(_) | Watch::Sent(_)) && at_or_before(watched.end, end));
        stream.watched = rest;
        self.report(done, now);
    }

    /// Lets the send buffer follow the congestion window unless the program has set it (Linux's tcp_sndbuf_expand):
    /// twice the window, each segment with its bookkeeping.
    pub fn expand_send_buffer(&mut self, most: u32) {
        let fixed = self.options.fixed_send_buffer;
        let Some(stream) = self.stream().filter(|_| !fixed) else { return };
        let segment = (stream.tcp.segment_size() + 640).next_power_of_two() + 256;
        let wanted = 2 * stream.tcp.cwnd().max(10) * segment;
        self.options.send_buffer = self.options.send_buffer.max(wanted.min(most));
    }

    /// Wakes a writer that waits, if it may write again.
    pub fn wake_writer(&mut self, lowat: u32) {
        if self.no_space && self.is_writable(lowat) {
            self.no_space = false;
            self.wakeups += 1;
        }
    }
}
