//! The data half in this process, and the UDP socket that it sends and receives by.

use crate::arena::{Arena, Buffer};
use crate::settings::Settings;
use baton_linux::datagrams::{Datagrams, Received};
use baton_rmpp::{Data, DataConfig, Halves};
use baton_wire::Endpoint;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

/// Events that the data half may keep for the policy.
const EVENTS: u16 = 4096;
/// Packets that are received before the policy sees what they brought.
const BURST: usize = 64;

/// The data half and its socket.
pub struct Local {
    pub data: Data,
    socket: Datagrams,
}

impl Local {
    /// A data half for so many incoming messages, with so many buffers for RTS packets of so many bytes.
    pub fn new(settings: &Settings, incoming: u16, [buffer_count, buffer_size]: [u16; 2]) -> io::Result<Local> {
        let socket = Datagrams::bind(settings.address, settings.socket_buffer, settings.packet.into())?;
        let config = DataConfig {
            halves: Halves::BOTH,
            endpoint: 0,
            address: Endpoint::from(socket.address()),
            peers: settings.peers,
            incoming,
            outgoing: settings.sends,
            buffers: 0,
            buffer_count,
            buffer_size,
            packet: settings.packet,
            events: EVENTS,
            matching: None,
        };
        Ok(Local { data: Data::new(config), socket })
    }

    /// Address at which it receives.
    pub fn address(&self) -> SocketAddr {
        self.socket.address()
    }

    /// Bytes that the kernel keeps of what was received.
    pub fn receive_buffer(&self) -> usize {
        self.socket.receive_buffer()
    }

    /// Packets that the socket did not take.
    pub fn unsent(&self) -> u64 {
        self.socket.dropped()
    }

    /// Takes packets from the socket, as long as there is room for what they bring. Returns how many there were.
    pub fn receive<B: Buffer>(&mut self, memory: &mut Arena<B>) -> usize {
        let mut count = 0;
        while count < BURST && self.data.has_room() {
            let data = &mut self.data;
            let taken = self.socket.receive(&mut |Received { from, bytes }| {
                data.input(&Endpoint::from(from), bytes, memory);
            });
            if taken == 0 {
                break;
            }
            count += taken;
        }
        count
    }

    /// Sends what the data half has to send, as far as the socket takes it. Returns how many packets went.
    pub fn transmit<B: Buffer>(&mut self, memory: &Arena<B>) -> usize {
        let mut count = 0;
        while let Some(outbound) = self.data.poll_transmit(memory, self.socket.room()) {
            self.socket.push(SocketAddr::from(outbound.to), outbound.length);
            count += 1;
        }
        self.socket.flush();
        count
    }
}

impl AsFd for Local {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
