//! More memory for a connection whose path can hold more data than its memory. The NIC notices that and asks for memory. The
//! agent takes it from the session's heap, copies the contents while the connection is stopped, and resumes the connection in the
//! new memory.

use crate::custody::{Custody, Refusal};
use crate::offloaded::{Memory, Offloaded, Pending};
use crate::posted::Receive;
use crate::worker::Worker;
use baton_abi::layout::{nic, slot as at};
use baton_abi::{Cid, Control, Message, Operation};
use baton_device::Device;
use baton_image::Image;
use baton_tcp::{Connection, Instant};
use core::sync::atomic::Ordering;

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

    /// Whether there is a request to be sent.
    #[inline(always)]
    pub fn has_request(&self) -> bool {
        self.wanted.is_some()
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
    fn move_into(&mut self, memory: Memory, limits: [u32; 2], image: &Image) -> bool {
        let Some(circle) = self.session_memory.circle(memory.receive_base, memory.receive_size) else { return false };
        self.receive = Receive::new(circle, self.session_memory.clone(), self.nic_memory(), self.slot_offset());
        self.replace_send_queue(image, memory);
        self.growth = Growth::new(memory, limits);
        // The pending events are dropped: the agent has put what they said into the connection's block.
        self.pending = Pending::default();
        self.tcp.set_receive_memory(memory.receive_size, limits[0]);
        true
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Sends a connection's request for memory to the agent.
    #[cold]
    #[inline(never)]
    pub(crate) fn request_memory(&mut self, index: u32) {
        let Some(slot) = self.slots[index as usize].as_mut() else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        if let Some((receive, send)) = offloaded.growth.wanted.take() {
            let message = Message::control(Operation::OsControl, Control::Grow, slot.cid, receive, send);
            self.send_to_agent(message);
        }
    }

    /// The limits of receive and send memory in a slot's parameters.
    pub(crate) fn limits(&self, index: u32) -> [u32; 2] {
        let base = nic::slot(index) + at::LIMITS;
        core::array::from_fn(|word| self.nic_memory.word32(base + 4 * word).load(Ordering::Acquire))
    }

    /// Resumes a stopped connection in other memory and with another cid, so that the program can tell events that the agent has
    /// already put into the block from later ones.
    pub(crate) fn resume(&mut self, cid: Cid, next: Cid, now: Instant) -> Result<u32, Refusal> {
        let index = cid.slot();
        let [_, receive_base, receive_size, send_base, send_size, block] = self.parameters(index);
        let memory = Memory { receive_base, receive_size, send_base, send_size, block };
        let limits = self.limits(index);
        let read = self.nic_memory.word32(nic::slot(index) + at::READ).load(Ordering::Acquire);
        if next.slot() != index {
            return Err(Refusal::BadCommand);
        }
        let slot = self.occupant(cid)?;
        let Custody::Leaving(offloaded) = &mut slot.custody else { return Err(Refusal::WrongState) };
        let Some(image) = offloaded.tcp.to_image(&offloaded.image, now) else { return Err(Refusal::WrongState) };
        if !memory.fits(&offloaded.session_memory) || !memory.holds(&image) || !offloaded.move_into(memory, limits, &image) {
            return Err(Refusal::BadMemory);
        }
        // The program's `nic_recvd` lags behind what it has read. A program that gives a wrong number harms only itself.
        let _ = offloaded.tcp.consumed(read.wrapping_sub(offloaded.tcp.rcv_read()));
        let Custody::Leaving(offloaded) = std::mem::replace(&mut slot.custody, Custody::Held) else {
            return Err(Refusal::WrongState);
        };
        slot.custody = Custody::Active(offloaded);
        slot.cid = next;
        // It was removed from the list of slots with events while it was stopped.
        slot.dirty = false;
        self.run_held(index, now);
        Ok(0)
    }
}
