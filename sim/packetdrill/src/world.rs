//! The world of one script: its clock, its sockets, and the packets that leave.

use crate::epoll::Set;
use crate::fastopen::Cache;
use crate::packet::{self, CookieOption};
use crate::settings::{Flags, Sysctls};
use crate::socket::{Kind, Options, Socket, SocketId};
use baton_tcp::segment::Transmit;
use baton_tcp::{Instant, State};
use baton_wire::Flow;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;

/// What a descriptor refers to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Object {
    /// A socket.
    Socket(SocketId),
    /// An epoll set.
    Epoll(usize),
}

/// A descriptor: a real one is held, so that its number is nobody else's.
pub struct Descriptor {
    /// What it refers to.
    pub object: Object,
    _held: File,
}

/// A packet that left, and when.
pub type Sent = (u64, Vec<u8>);

/// The world.
pub struct World {
    /// The time in microseconds.
    pub now: u64,
    /// The flags.
    pub flags: Flags,
    /// The sysctls as they were when a socket was last made or used to connect or listen.
    pub sysctls: Sysctls,
    /// Descriptors by number.
    pub descriptors: BTreeMap<i32, Descriptor>,
    /// Sockets, those of closed descriptors included while their connection lives.
    pub sockets: BTreeMap<SocketId, Socket>,
    /// Epoll sets.
    pub sets: BTreeMap<usize, Set>,
    /// Packets that have left and were not asked for yet.
    pub sent: VecDeque<Sent>,
    /// When calls that wait want to be looked at, by caller.
    pub deadlines: BTreeMap<u64, u64>,
    /// Fast Open cookies of servers.
    pub cookies: Cache,
    /// Events so far.
    pub events: u64,
    next_id: usize,
    random: u64,
}

impl World {
    /// An empty world.
    pub fn new(flags: Flags) -> World {
        World {
            now: 1_000_000_000,
            flags,
            sysctls: Sysctls::default(),
            descriptors: BTreeMap::new(),
            sockets: BTreeMap::new(),
            sets: BTreeMap::new(),
            sent: VecDeque::new(),
            deadlines: BTreeMap::new(),
            cookies: Cache::default(),
            events: 0,
            next_id: 1,
            random: 0x2545_f491_4f6c_dd1d,
        }
    }

    /// The time as the protocol takes it.
    pub fn instant(&self) -> Instant {
        Instant(self.now)
    }

    /// A number that is the same in every run (xorshift64*): nobody guesses here.
    pub fn draw(&mut self) -> u32 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// Reads the namespace's sysctls anew.
    pub fn refresh_sysctls(&mut self) {
        if !self.flags.no_sysctls {
            self.sysctls = Sysctls::read();
        }
    }

    /// A new number for a socket or a set.
    pub fn fresh_id(&mut self) -> usize {
        self.next_id += 1;
        self.next_id
    }

    /// A descriptor for an object.
    pub fn describe(&mut self, object: Object) -> Result<i32, i32> {
        use std::os::fd::AsRawFd;
        let held = File::open("/dev/null").map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))?;
        let number = held.as_raw_fd();
        self.descriptors.insert(number, Descriptor { object, _held: held });
        Ok(number)
    }

    /// The socket that a descriptor refers to.
    pub fn socket_of(&self, fd: i32) -> Result<SocketId, i32> {
        match self.descriptors.get(&fd).map(|descriptor| descriptor.object) {
            Some(Object::Socket(id)) => Ok(id),
            Some(Object::Epoll(_)) => Err(libc::ENOTSOCK),
            None => Err(libc::EBADF),
        }
    }

    /// The socket itself.
    pub fn socket(&mut self, id: SocketId) -> Result<&mut Socket, i32> {
        self.sockets.get_mut(&id).ok_or(libc::EBADF)
    }

    /// A socket with the defaults of the sysctls.
    pub fn blank_socket(&self, domain: i32) -> Socket {
        let s = &self.sysctls;
        let options = Options {
            reuse_address: 0,
            keepalive: false,
            keepalive_times: s.keepalive,
            send_buffer: s.wmem[1],
            receive_buffer: s.rmem[1],
            fixed_receive_buffer: false,
            fixed_send_buffer: false,
            nodelay: false,
            cork: false,
            user_timeout: 0,
            max_segment: 0,
            syn_retries: 0,
            notsent_lowat: 0,
            linger: None,
            tos: 0,
            zerocopy: false,
            inq: false,
            timestamping: 0,
            fastopen_queue: 0,
            fastopen_connect: false,
            deferred: None,
            fastopen_no_cookie: false,
            fastopen_keys: Vec::new(),
            defer_accept: 0,
            receive_timeout: 0,
            send_timeout: 0,
            mark: 0,
        };
        Socket {
            domain,
            kind: Kind::Fresh,
            local: None,
            nonblocking: false,
            options,
            error: 0,
            soft_error: 0,
            shut_read: false,
            open: true,
            errors: VecDeque::new(),
            zerocopy_sends: 0,
            wakeups: 0,
            no_space: false,
        }
    }

    /// A packet leaves.
    pub fn transmit(&mut self, flow: &Flow, transmit: &Transmit, tos: u8, cookie: Option<&CookieOption>, payload: &[u8]) {
        let packet = packet::emit(flow, transmit, tos, cookie, payload);
        self.sent.push_back((self.now, packet));
    }

    /// When the next timer or deadline is due.
    pub fn next_timer(&self) -> Option<u64> {
        let timers = self.sockets.values().filter_map(|socket| Some(socket.stream()?.tcp.next_timeout().0));
        timers.chain(self.deadlines.values().copied()).min().filter(|at| *at < u64::MAX)
    }

    /// Runs the timers that are due.
    pub fn run_timers(&mut self) {
        let now = self.instant();
        let ids: Vec<SocketId> = self.sockets.keys().copied().collect();
        for id in ids {
            let Some(stream) = self.sockets.get_mut(&id).and_then(Socket::stream_mut) else { continue };
            if stream.tcp.next_timeout() <= now {
                let events = stream.tcp.on_timeout(now);
                self.handle_events(id, events);
            }
        }
    }

    /// Sends what there is to send, and forgets connections that are over.
    pub fn settle(&mut self) {
        let ids: Vec<SocketId> = self.sockets.keys().copied().collect();
        let now = self.now;
        for id in ids {
            self.flush(id);
            let Some(socket) = self.sockets.get_mut(&id) else { continue };
            let no_space = socket.no_space;
            if let Some(stream) = socket.stream_mut() {
                stream.account(now, no_space);
            }
        }
        self.sockets.retain(|_, socket| {
            let alive = match &socket.kind {
                Kind::Stream(stream) => stream.tcp.state() != State::Closed || stream.parent.is_some() && stream.queued,
                _ => false,
            };
            socket.open || alive
        });
    }

    /// Sends what one connection has to send.
    pub fn flush(&mut self, id: SocketId) {
        let now = self.instant();
        let segments = self.sysctls.min_tso_segments.max(1);
        while let Some(socket) = self.sockets.get_mut(&id) {
            let (tos, nodelay) = (socket.options.tos, socket.options.nodelay);
            let Some(stream) = socket.stream_mut() else { return };
            stream.feed(nodelay);
            let most = stream.burst(segments);
            let Some(transmit) = stream.tcp.poll_transmit(now, most) else { return };
            let transmit = stream.without_early_push(transmit);
            if stream.repeats_itself(&transmit) {
                continue;
            }
            let payload = stream.payload(&transmit);
            let flow = stream.flow;
            let cookie = stream.cookie_for(&transmit);
            stream.note_sent(&transmit);
            if transmit.length > 0 {
                let syn = u32::from(transmit.flags.contains(baton_wire::Flags::SYN));
                stream.split_at(transmit.seq.wrapping_add(syn + transmit.length));
            }
            socket.report_sent(&transmit, now.0);
            self.transmit(&flow, &transmit, tos, cookie.as_ref(), &payload);
        }
    }
}
