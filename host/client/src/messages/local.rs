//! The data half, or a part of it, in this process, and its UDP socket.

use super::counted::Counted;
use baton_rmpp::{Data, DataConfig, Disposition};
use baton_wire::Endpoint;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

/// Packets that are received before the policy sees what they brought.
const BURST: usize = 64;

/// Longest datagram.
const LONGEST: usize = 1 << 16;

/// The data half and its socket.
pub struct Local {
    pub data: Data,
    socket: UdpSocket,
    buffer: Vec<u8>,
    /// Packets that were received and used, and that were sent.
    pub packets: [u64; 2],
}

impl Local {
    pub fn new(config: DataConfig, socket: UdpSocket) -> Local {
        Local { data: Data::new(config), socket, buffer: vec![0; LONGEST], packets: [0; 2] }
    }

    /// Takes packets from the socket, as long as there is room for what they bring. Returns how many there were.
    pub fn receive(&mut self, memory: &mut Counted) -> usize {
        let mut count = 0;
        while count < BURST && self.data.has_room() {
            match self.socket.recv_from(&mut self.buffer) {
                Ok((length, from)) => {
                    memory.add(length as u64);
                    let taken = self.data.input(&Endpoint::from(from), &self.buffer[..length], memory);
                    self.packets[0] += u64::from(taken == Disposition::Done);
                }
                // A pending error of an earlier datagram; the next call has the datagrams behind it.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(_) => break,
            }
            count += 1;
        }
        count
    }

    /// Sends what the data half has to send. What the socket does not take is lost, as in any full queue. Returns how many
    /// packets there were.
    pub fn transmit(&mut self, memory: &Counted) -> usize {
        let mut count = 0;
        while let Some(outbound) = self.data.poll_transmit(memory, &mut self.buffer) {
            let _ = self.socket.send_to(&self.buffer[..outbound.length], SocketAddr::from(outbound.to));
            memory.add(outbound.length as u64);
            count += 1;
        }
        self.packets[1] += count as u64;
        count
    }

    /// Makes the kernel look for the neighbour that leads to a host, with an empty datagram, which is no packet.
    pub fn probe(socket: &UdpSocket, to: SocketAddr) {
        let _ = socket.send_to(&[], to);
    }
}

impl AsFd for Local {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
