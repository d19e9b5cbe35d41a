//! More memory for a connection whose path holds more than its memory. The NIC sees that, and asks; the agent takes the memory from the
//! session's heap, copies what the old one holds while the connection rests, and lets it go on in the new one.

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

/// Microseconds before a connection asks again that was given nothing.
const PATIENCE: u64 = 50_000;

/// What memory a connection has, and could use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Growth {
    receive: u32,
    send: u32,
    most: [u32; 2],
    asked_at: Option<Instant>,
    /// What the agent is to be asked for: bytes of receive and of send memory, 0 for no more.
    wanted: Option<(u32, u32)>,
}

impl Growth {
    pub fn new(memory: Memory, most: [u32; 2]) -> Growth {
        Growth { receive: memory.receive_size, send: memory.send_size, most, asked_at: None, wanted: None }
    }

    /// Whether there is something to ask for.
    #[inline(always)]
    pub fn asks(&self) -> bool {
        self.wanted.is_some()
    }

    /// Looks whether the connection could use more than it has.
    #[inline]
    pub fn consider(&mut self, tcp: &mut Connection, now: Instant) {
        let receive = if self.receive < self.most[0] { tcp.wanted_receive_memory(now) } else { None };
        let send = if self.send < self.most[1] { tcp.wanted_send_memory(self.send) } else { None };
        if (receive.is_some() || send.is_some()) && self.asked_at.is_none_or(|at| now.since(at) >= PATIENCE) {
            self.asked_at = Some(now);
            self.wanted = Some((receive.unwrap_or(0), send.unwrap_or(0)));
        }
    }
}

impl Offloaded {
    /// Everything that the connection's memory held lies in this memory now. False if it is not the session's.
    fn move_into(&mut self, memory: Memory, most: [u32; 2], image: &Image) -> bool {
        let Some(circle) = self.session_memory.circle(memory.receive_base, memory.receive_size) else { return false };
        self.receive = Receive::new(circle, self.session_memory.clone(), self.nic_memory(), self.slot_offset());
        self.replace_send_queue(image, memory);
        self.growth = Growth::new(memory, most);
        // What its program was to be told is in its block.
        self.pending = Pending::default();
        self.tcp.set_receive_memory(memory.receive_size, most[0]);
        true
    }
}

impl<H: Device, W: Device> Worker<H, W> {
    /// Asks the agent for more memory for a connection.
    #[cold]
    #[inline(never)]
    pub(crate) fn ask_for_memory(&mut self, index: u32) {
        let Some(slot) = self.slots[index as usize].as_mut() else { return };
        let Custody::Active(offloaded) = &mut slot.custody else { return };
        if let Some((receive, send)) = offloaded.growth.wanted.take() {
            let message = Message::control(Operation::OsControl, Control::Grow, slot.cid, receive, send);
            self.tell_agent(message);
        }
    }

    /// The limits in a slot's parameters.
    pub(crate) fn limits(&self, index: u32) -> [u32; 2] {
        let base = nic::slot(index) + at::LIMITS;
        core::array::from_fn(|word| self.nic_memory.word32(base + 4 * word).load(Ordering::Acquire))
    }

    /// A connection that rests goes on in other memory, under another name: what its program is told from now on has not been told it by
    /// the agent.
    pub(crate) fn resume(&mut self, cid: Cid, next: Cid, now: Instant) -> Result<u32, Refusal> {
        let index = cid.slot();
        let [_, receive_base, receive_size, send_base, send_size, block] = self.parameters(index);
        let memory = Memory { receive_base, receive_size, send_base, send_size, block };
        let most = self.limits(index);
        let read = self.nic_memory.word32(nic::slot(index) + at::READ).load(Ordering::Acquire);
        if next.slot() != index {
            return Err(Refusal::BadCommand);
        }
        let slot = self.occupant(cid)?;
        let Custody::Leaving(offloaded) = &mut slot.custody else { return Err(Refusal::WrongState) };
        let Some(image) = offloaded.tcp.to_image(&offloaded.image, now) else { return Err(Refusal::WrongState) };
        if !memory.fits(&offloaded.session_memory) || !memory.holds(&image) || !offloaded.move_into(memory, most, &image) {
            return Err(Refusal::BadMemory);
        }
        // The NIC hears late of what has been read. A program that lies about it harms itself.
        let _ = offloaded.tcp.consumed(read.wrapping_sub(offloaded.tcp.rcv_read()));
        let Custody::Leaving(offloaded) = std::mem::replace(&mut slot.custody, Custody::Held) else {
            return Err(Refusal::WrongState);
        };
        slot.custody = Custody::Active(offloaded);
        slot.cid = next;
        // While it rested it dropped out of the list of those with something to tell.
        slot.dirty = false;
        self.run_held(index, now);
        Ok(0)
    }
}
