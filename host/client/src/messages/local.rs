//! The data half, or a part of it, in this process: its packets arrive and leave by the endpoint's socket.

use super::carrier::Carrier;
use baton_linux::datagrams::Received;
use baton_rmpp::{Data, DataConfig, Disposition, Memory};
use baton_wire::Endpoint;
use std::net::SocketAddr;

/// Most packets that are received before the policy handles their events.
const BURST: usize = 64;

/// The data half.
pub struct Local {
    /// The protocol's part.
    pub data: Data,
    /// Packets that were received and used, and that were sent.
    pub packets: [u64; 2],
    /// Bytes that the kernel has copied between this process and the socket.
    pub copied: u64,
}

impl Local {
    /// A data half, or a part of one, without messages.
    pub fn new(config: DataConfig) -> Local {
        Local { data: Data::new(config), packets: [0; 2], copied: 0 }
    }

    /// Receives packets from the socket, as long as there is room for their effects and until there is an event for the
    /// policy: a program that waits for a short message then does not also wait for the system call that finds the
    /// socket empty. Returns how many there were.
    pub fn receive(&mut self, socket: &mut Carrier, memory: &mut impl Memory) -> usize {
        let mut count = 0;
        while count < BURST && self.data.has_room() {
            let Local { data, packets, copied } = self;
            let taken = socket.receive(&mut |Received { from, bytes }| {
                *copied += bytes.len() as u64;
                packets[0] += u64::from(data.input(&Endpoint::from(from), bytes, memory) == Disposition::Done);
            });
            count += taken;
            if taken == 0 || self.data.has_event() {
                break;
            }
        }
        count
    }

    /// Sends the data half's packets. Packets that the socket does not take are lost, as in any full queue. Returns how
    /// many packets there were.
    pub fn transmit(&mut self, socket: &mut Carrier, memory: &impl Memory) -> usize {
        let count = self.emit(socket, memory);
        socket.flush();
        count
    }

    /// Gives the data half's packets to the socket; they leave at the latest with [`Carrier::flush`]. Returns how many
    /// packets there were.
    pub fn emit(&mut self, socket: &mut Carrier, memory: &impl Memory) -> usize {
        let mut count = 0;
        let most = socket.longest_run();
        while let Some(run) = self.data.poll_run(memory, socket.room(), most) {
            socket.push(SocketAddr::from(run.to), run.length, run.segment);
            self.copied += run.length as u64;
            count += run.packets;
        }
        self.packets[1] += count as u64;
        count
    }
}
