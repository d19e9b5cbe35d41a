//! More memory for a connection whose path can hold more data than its memory. The NIC notices that and asks for memory. The
//! agent takes it from the session's heap, copies the contents while the connection is stopped, and resumes the connection in the
//! new memory.

use crate::offloaded::{Memory, Offloaded, Pending};
use crate::posted::Receive;
use baton_image::Image;
use baton_tcp::{Connection, Instant};

/// Microseconds before a connection asks again.
const RETRY: u64 = 50_000;

/// The memory of a connection, and what it wants.
#[derive(Clone, Debug, Default)]
pub(crate) struct Growth {
    /// Bytes of receive memory and of send memory.
    receive: u32,
    send: u32,
    /// Largest bytes of receive and of send memory.
    limits: [u32; 2],
    asked_at: Option<Instant>,
    /// The request to the agent that has not been sent: bytes of receive and of send memory, 0 for no change.
    wanted: Option<(u32, u32)>,
}

impl Growth {
    pub fn new(memory: Memory, limits: [u32; 2]) -> Growth {
        Growth { receive: memory.receive_size, send: memory.send_size, limits, asked_at: None, wanted: None }
    }

    /// Largest bytes of receive and of send memory.
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
        let receive = if self.receive < self.limits[0] { tcp.wanted_receive_memory(now) } else { None };
        let send = if self.send < self.limits[1] { tcp.wanted_send_memory(self.send) } else { None };
        if (receive.is_some() || send.is_some()) && self.asked_at.is_none_or(|at| now.since(at) >= RETRY) {
            self.asked_at = Some(now);
            self.wanted = Some((receive.unwrap_or(0), send.unwrap_or(0)));
        }
    }
}

impl Offloaded {
    /// Moves the connection to other memory, to which its contents have been copied. False if it does not lie in the session's.
    pub fn move_into(&mut self, memory: Memory, limits: [u32; 2], image: &Image) -> bool {
        let Some(circle) = self.session_memory.circle(memory.receive_base, memory.receive_size) else { return false };
        self.receive = Receive::new(circle, &self.posts_table());
        self.replace_send_queue(image, memory);
        self.growth = Growth::new(memory, limits);
        // The pending events are dropped: the agent has put what they said into the connection's block.
        self.pending = Pending::default();
        self.tcp.set_receive_memory(memory.receive_size, limits[0]);
        true
    }
}
