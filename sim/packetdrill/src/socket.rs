//! A socket: what it is at the moment, and what its program has set.

use crate::errors::Answer;
use crate::listen::Listener;
use crate::stream::Stream;
use baton_wire::Endpoint;
use std::collections::VecDeque;

/// Number of a socket in the world.
pub type SocketId = usize;

/// What a socket is.
pub enum Kind {
    /// Neither listens nor connects yet.
    Fresh,
    /// Listens.
    Listener(Listener),
    /// A connection, in whatever state.
    Stream(Box<Stream>),
}

/// An entry of the error queue (MSG_ERRQUEUE): an extended error, and a time stamp where one goes with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedError {
    /// `ee_errno`.
    pub errno: u32,
    /// `ee_origin`.
    pub origin: u8,
    /// `ee_code`.
    pub code: u8,
    /// `ee_info`.
    pub info: u32,
    /// `ee_data`.
    pub data: u32,
    /// Microseconds of the stack's clock, for SCM_TIMESTAMPING.
    pub stamp: Option<u64>,
}

/// What setsockopt has set; -1 or `None` where nothing was.
#[derive(Clone, Debug)]
pub struct Options {
    pub reuse_address: i32,
    pub keepalive: bool,
    pub keepalive_times: [u32; 3],
    pub send_buffer: u32,
    pub receive_buffer: u32,
    pub fixed_receive_buffer: bool,
    pub fixed_send_buffer: bool,
    pub nodelay: bool,
    pub cork: bool,
    pub user_timeout: u32,
    pub max_segment: u32,
    pub syn_retries: u8,
    pub notsent_lowat: u32,
    pub linger: Option<u32>,
    pub tos: u8,
    pub zerocopy: bool,
    pub inq: bool,
    pub timestamping: u32,
    pub fastopen_queue: u32,
    pub fastopen_connect: bool,
    pub deferred: Option<Endpoint>,
    pub fastopen_no_cookie: bool,
    pub fastopen_keys: Vec<[u8; 16]>,
    pub defer_accept: u32,
    pub receive_timeout: u64,
    pub send_timeout: u64,
    pub mark: u32,
}

/// A socket.
pub struct Socket {
    /// AF_INET or AF_INET6.
    pub domain: i32,
    /// What it is.
    pub kind: Kind,
    /// Address it is bound to.
    pub local: Option<Endpoint>,
    /// O_NONBLOCK.
    pub nonblocking: bool,
    /// What its program has set.
    pub options: Options,
    /// SO_ERROR.
    pub error: i32,
    /// An error that was only noted (ICMP), for when time-outs end the connection.
    pub soft_error: i32,
    /// shutdown(SHUT_RD) was called.
    pub shut_read: bool,
    /// A descriptor refers to it.
    pub open: bool,
    /// Entries of the error queue.
    pub errors: VecDeque<QueuedError>,
    /// Number of the next MSG_ZEROCOPY send.
    pub zerocopy_sends: u32,
    /// Counts what wakes an edge-triggered epoll set.
    pub wakeups: u64,
    /// The program has got the answer that there is no room to write.
    pub no_space: bool,
}

impl Socket {
    /// Takes SO_ERROR.
    pub fn take_error(&mut self) -> Answer<()> {
        match std::mem::take(&mut self.error) {
            0 => Ok(()),
            error => Err(error),
        }
    }

    /// The connection, if the socket is one.
    pub fn stream(&self) -> Option<&Stream> {
        match &self.kind {
            Kind::Stream(stream) => Some(stream),
            _ => None,
        }
    }

    /// The same, to change it.
    pub fn stream_mut(&mut self) -> Option<&mut Stream> {
        match &mut self.kind {
            Kind::Stream(stream) => Some(stream),
            _ => None,
        }
    }

    /// Adds to the error queue, and wakes who waits for it.
    pub fn queue_error(&mut self, error: QueuedError) {
        self.errors.push_back(error);
        self.wakeups += 1;
    }
}
