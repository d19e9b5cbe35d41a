//! Listening: SYNs, the queue of connections, accept.

use crate::addresses;
use crate::errors::{Answer, Attempt};
use crate::packet::{TcpIn, reset_for};
use crate::settings::Sysctls;
use crate::socket::{Kind, Options, Socket, SocketId};
use crate::stream::Stream;
use crate::world::{Object, World};
use baton_tcp::{Config, Connection, State};
use baton_wire::{Endpoint, Flags, Flow};
use std::collections::VecDeque;

/// A listening socket's state.
#[derive(Default)]
pub struct Listener {
    /// Connections that wait for accept.
    pub queue: VecDeque<SocketId>,
    /// listen()'s number.
    pub backlog: usize,
}

/// Whether an address that a socket is bound to covers `wanted`.
fn covers(bound: &Endpoint, wanted: &Endpoint) -> bool {
    let unspecified = bound.address == [0; 16] || bound.is_v4() && bound.v4_bytes() == [0; 4];
    bound.port == wanted.port && (unspecified || bound.address == wanted.address)
}

/// The protocol's configuration for a socket.
pub fn config(options: &Options, sysctls: &Sysctls, mtu: u32, v4: bool, ecn: bool, retries: u8) -> Config {
    let limit = if options.fixed_receive_buffer { options.receive_buffer } else { sysctls.rmem[2] };
    Config {
        // Linux begins with a window of 64 KB and lets it grow with what comes.
        receive_buffer: (options.receive_buffer / 2).min(1 << 17),
        receive_limit: limit,
        mtu,
        ip_header: if v4 { 20 } else { 40 },
        nodelay: options.nodelay,
        keepalive: options.keepalive,
        keepalive_idle: options.keepalive_times[0],
        keepalive_interval: options.keepalive_times[1],
        keepalive_count: options.keepalive_times[2],
        user_timeout: options.user_timeout,
        ecn,
        timestamps: sysctls.timestamps,
        sack: sysctls.sack,
        window_scaling: sysctls.window_scaling,
        max_segment: options.max_segment,
        syn_retries: if options.syn_retries > 0 { options.syn_retries } else { retries },
        retries: Config::default().retries,
        slow_start_after_idle: sysctls.slow_start_after_idle,
    }
}

impl World {
    /// listen().
    pub fn listen(&mut self, fd: i32, backlog: i32) -> Answer<()> {
        self.refresh_sysctls();
        let id = self.socket_of(fd)?;
        let fastopen = self.sysctls.fastopen;
        let socket = self.socket(id)?;
        match &mut socket.kind {
            Kind::Fresh => {
                // Mask 0x402: servers without a socket option of their own (Linux's ip-sysctl, tcp_fastopen).
                if fastopen & 0x402 == 0x402 && socket.options.fastopen_queue == 0 {
                    socket.options.fastopen_queue = backlog.max(0) as u32;
                }
                socket.kind = Kind::Listener(Listener { queue: VecDeque::new(), backlog: backlog.max(0) as usize });
                Ok(())
            }
            Kind::Listener(listener) => {
                listener.backlog = backlog.max(0) as usize;
                Ok(())
            }
            Kind::Stream(_) => Err(libc::EINVAL),
        }
    }

    /// The listener for a SYN to `wanted`.
    pub fn listener_for(&self, wanted: &Endpoint) -> Option<SocketId> {
        let matches = |socket: &Socket| {
            matches!(socket.kind, Kind::Listener(_)) && socket.local.is_some_and(|bound| covers(&bound, wanted))
        };
        self.sockets.iter().find(|(_, socket)| matches(socket)).map(|(id, _)| *id)
    }

    /// A segment for a listener (RFC 9293 section 3.10.7.2).
    pub fn input_listen(&mut self, id: SocketId, tcp: &TcpIn<'_>) {
        let segment = &tcp.segment;
        if segment.flags.contains(Flags::RST) {
            return;
        }
        if segment.flags.contains(Flags::ACK) {
            return self.reset(tcp);
        }
        self.refresh_sysctls();
        let (isn, ts) = (self.draw(), self.draw());
        let now = self.instant();
        let sysctls = self.sysctls.clone();
        let Some(socket) = self.sockets.get(&id) else { return };
        let config = config(&socket.options, &sysctls, self.flags.mtu, tcp.flow.is_v4(), sysctls.ecn > 0, sysctls.synack_retries);
        let Some(connection) = Connection::accept(config, segment, isn, ts, now) else { return };
        let mut stream = Stream::new(connection, tcp.flow, isn.wrapping_add(1), self.now);
        stream.parent = Some(id);
        stream.mtu = self.flags.mtu;
        let child = self.inherit(id, tcp.flow, stream);
        self.consider_fast_open(id, child, tcp);
    }

    /// A socket for a connection that came to listener `id`, with the listener's options.
    fn inherit(&mut self, id: SocketId, flow: Flow, stream: Stream) -> SocketId {
        let child = self.fresh_id();
        let mut socket = self.blank_socket(self.sockets[&id].domain);
        let options = self.sockets[&id].options.clone();
        socket.options = Options { fastopen_queue: 0, ..options };
        socket.local = Some(flow.local);
        socket.open = false;
        socket.kind = Kind::Stream(Box::new(stream));
        self.sockets.insert(child, socket);
        child
    }

    /// Puts a connection into its listener's queue. If that is full the connection is dropped as if its last segment
    /// had not come.
    pub fn enqueue(&mut self, child: SocketId) {
        let Some(parent) = self.sockets[&child].stream().and_then(|stream| stream.parent) else { return };
        let Some(listener) = self.sockets.get_mut(&parent) else { return };
        listener.wakeups += 1;
        if let Kind::Listener(listener) = &mut listener.kind {
            listener.queue.push_back(child);
        }
        if let Some(stream) = self.sockets.get_mut(&child).and_then(Socket::stream_mut) {
            stream.queued = true;
        }
    }

    /// Whether a listener's queue can take one more.
    pub fn has_backlog(&self, id: SocketId) -> bool {
        match &self.sockets[&id].kind {
            Kind::Listener(listener) => listener.queue.len() <= listener.backlog,
            _ => false,
        }
    }

    /// accept(): the new descriptor, and the peer's address.
    pub fn accept(&mut self, fd: i32) -> Attempt<(i32, Vec<u8>)> {
        let attempt = self.try_accept(fd);
        match attempt {
            Ok(Some(accepted)) => Attempt::Done(Ok(accepted)),
            Ok(None) => Attempt::Blocked(None),
            Err(error) => Attempt::Done(Err(error)),
        }
    }

    fn try_accept(&mut self, fd: i32) -> Answer<Option<(i32, Vec<u8>)>> {
        let id = self.socket_of(fd)?;
        let socket = self.socket(id)?;
        let nonblocking = socket.nonblocking;
        let domain = socket.domain;
        let Kind::Listener(listener) = &mut socket.kind else { return Err(libc::EINVAL) };
        let Some(child) = listener.queue.pop_front() else {
            return if nonblocking { Err(libc::EAGAIN) } else { Ok(None) };
        };
        let number = self.describe(Object::Socket(child))?;
        let socket = self.socket(child)?;
        socket.open = true;
        let stream = socket.stream_mut().ok_or(libc::EINVAL)?;
        stream.parent = None;
        stream.connect_reported = true;
        let remote = stream.flow.remote;
        Ok(Some((number, addresses::write(domain, remote))))
    }

    /// A listener is closed: who waits in its queue is reset, who is not that far is forgotten.
    pub fn close_listener(&mut self, id: SocketId) {
        let children: Vec<SocketId> = self
            .sockets
            .iter()
            .filter(|(_, socket)| socket.stream().is_some_and(|stream| stream.parent == Some(id)))
            .map(|(id, _)| *id)
            .collect();
        for child in children {
            let Some(stream) = self.sockets.get_mut(&child).and_then(Socket::stream_mut) else { continue };
            stream.parent = None;
            if stream.queued {
                stream.tcp.abort();
                self.flush(child);
            }
            if self.sockets[&child].stream().is_some_and(|stream| stream.tcp.state() == State::SynReceived) {
                self.sockets.remove(&child);
            }
        }
    }

    /// Answers a segment that is nobody's with a RST.
    pub fn reset(&mut self, tcp: &TcpIn<'_>) {
        if let Some(reset) = reset_for(&tcp.segment) {
            self.transmit(&tcp.flow, &reset, 0, None, &[]);
        }
    }
}
