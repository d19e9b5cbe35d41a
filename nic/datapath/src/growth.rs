//! More memory for a connection whose path can hold more data than its memory, or whose program may queue more bytes
//! than fit there. The NIC notices that and asks the agent for memory. The agent takes it from the session's heap,
//! copies the contents while the connection is stopped, and resumes the connection in the new memory.

use crate::offloaded::{Memory, Offloaded, Pending};
use crate::posted::Receive;
use baton_abi::layout::{block, slot};
use baton_image::Image;
use baton_tcp::{Connection, Instant};

/// Microseconds before a connection asks again.
const RETRY: u64 = 50_000;

/// The memory of a connection, and its request for more.
#[derive(Clone, Debug, Default)]
pub(crate) struct Growth {
    /// Bytes of send memory.
    send: u32,
    /// [`slot::LIMITS`].
    limits: [u32; 2],
    /// Most bytes that the program may queue, as last read from its block.
    most_queued: u32,
    /// Congestion window in segments when the agent last computed that limit, 0 if it was not known then.
    reckoned: u32,
    asked_at: Option<Instant>,
    /// The request to the agent that has not been sent: bytes of receive and of send memory, 0 for no change.
    wanted: Option<(u32, u32)>,
}

impl Growth {
    /// `flags` are those of the connection's block.
    pub fn new(memory: Memory, limits: [u32; 2], flags: u32) -> Growth {
        let most_queued = block::most_queued(flags);
        Growth { send: memory.send_size, limits, most_queued, ..Growth::default() }
    }

    /// [`slot::LIMITS`].
    pub fn limits(&self) -> [u32; 2] {
        self.limits
    }

    /// Whether there is a request to be sent.
    #[inline(always)]
    pub fn has_request(&self) -> bool {
        self.wanted.is_some()
    }

    /// Takes the request: bytes of receive and of send memory.
    pub fn take_request(&mut self) -> Option<(u32, u32)> {
        self.wanted.take()
    }

    /// Makes a request if the connection could use more memory than it has.
    #[inline]
    pub fn consider(&mut self, tcp: &mut Connection, now: Instant) {
        let receive = if self.limits[0] & slot::MAY_GROW != 0 { tcp.wanted_receive_memory(now) } else { None };
        let send = if self.send < self.limits[1] { tcp.wanted_send_memory(self.send) } else { None };
        self.ask(receive, send, now);
    }

    /// Whether the program has queued as many bytes as it may, or as there is room for.
    #[inline(always)]
    fn is_full(&self, queued: u32) -> bool {
        queued >= self.send.min(self.most_queued)
    }

    /// Makes a request for a program that has filled its send memory, if it may queue more, or if the kernel would let
    /// it queue more because the congestion window has grown. `flags` are those of the connection's block.
    #[cold]
    fn consider_writer(&mut self, queued: u32, cwnd: u32, flags: u32, now: Instant) {
        self.most_queued = block::most_queued(flags);
        if !self.is_full(queued) {
            return;
        }
        if self.most_queued > self.send && flags >> block::QUEUE_SHIFT & block::QUEUE_MASK != 0 {
            self.ask(None, Some(self.most_queued), now);
        } else if self.most_queued < self.limits[1] && cwnd > self.reckoned.saturating_add(self.reckoned / 4) {
            // A request for a larger limit, without more memory.
            self.ask(None, Some(self.most_queued.min(self.send)), now);
        }
    }

    #[inline]
    fn ask(&mut self, receive: Option<u32>, send: Option<u32>, now: Instant) {
        if (receive.is_some() || send.is_some()) && self.asked_at.is_none_or(|at| now.since(at) >= RETRY) {
            self.asked_at = Some(now);
            self.wanted = Some((receive.unwrap_or(0), send.unwrap_or(0)));
        }
    }
}

/// The largest window that a connection with these [`slot::LIMITS`] may advertise.
pub(crate) fn largest_window(limits: [u32; 2]) -> Option<u32> {
    Some(limits[0] & !slot::MAY_GROW).filter(|most| *most > 0)
}

impl Offloaded {
    /// Requests more memory, or a larger limit for the program's queue, if the connection could use it.
    #[inline]
    pub fn consider_growth(&mut self, now: Instant) {
        self.growth.consider(&mut self.tcp, now);
        let queued = self.tcp.unacknowledged();
        if self.growth.is_full(queued) {
            let flags = self.flags_of_block();
            self.growth.consider_writer(queued, self.tcp.cwnd(), flags, now);
        }
    }

    /// Moves the connection to other memory, to which its contents have been copied. False if it does not lie in the
    /// session's.
    pub fn move_into(&mut self, memory: Memory, limits: [u32; 2], image: &Image) -> bool {
        let Some(circle) = self.session_memory.circle(memory.receive_base, memory.receive_size) else { return false };
        self.receive = Receive::new(circle, &self.posts_table());
        self.replace_send_queue(image, memory);
        self.growth = Growth { reckoned: self.tcp.cwnd(), ..Growth::new(memory, limits, self.flags_of_block()) };
        // The pending events are dropped: the agent has written their effect to the connection's block.
        self.pending = Pending::default();
        self.tcp.set_receive_memory(memory.receive_size, largest_window(limits).unwrap_or(u32::MAX));
        true
    }
}
