//! What carries an endpoint's packets: UDP, or raw Ethernet frames.

use super::endpoint::Settings;
use baton_linux::datagrams::{Datagrams, Received};
use baton_linux::frames::Frames;
use baton_wire::rmpp::envelope::ETHERTYPE_RMPP;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

/// Bytes of the socket's buffers that are asked for.
const BUFFER: usize = 4 << 20;

/// The socket of an endpoint.
pub enum Carrier {
    Udp(Datagrams),
    Ethernet(Frames),
}

impl Carrier {
    pub fn bind(settings: &Settings) -> io::Result<Carrier> {
        let longest = settings.packet.into();
        Ok(match &settings.ethernet {
            None => Carrier::Udp(Datagrams::bind(settings.address, BUFFER, longest)?),
            Some(device) => Carrier::Ethernet(Frames::bind(device, ETHERTYPE_RMPP, BUFFER, longest)?),
        })
    }

    pub fn address(&self) -> SocketAddr {
        match self {
            Carrier::Udp(socket) => socket.address(),
            Carrier::Ethernet(socket) => socket.address(),
        }
    }

    pub fn receive(&mut self, each: &mut dyn FnMut(Received<'_>)) -> usize {
        match self {
            Carrier::Udp(socket) => socket.receive(each),
            Carrier::Ethernet(socket) => socket.receive(each),
        }
    }

    pub fn room(&mut self) -> &mut [u8] {
        match self {
            Carrier::Udp(socket) => socket.room(),
            Carrier::Ethernet(socket) => socket.room(),
        }
    }

    pub fn push(&mut self, to: SocketAddr, length: usize) {
        match self {
            Carrier::Udp(socket) => socket.push(to, length),
            Carrier::Ethernet(socket) => socket.push(to, length),
        }
    }

    pub fn flush(&mut self) {
        if let Carrier::Udp(socket) = self {
            socket.flush();
        }
    }

    /// Makes the kernel look for the neighbours that lead to these hosts, with empty datagrams, which are no packets.
    pub fn probe(&self, hosts: &[IpAddr]) {
        if let Ok(socket) = self.as_fd().try_clone_to_owned().map(UdpSocket::from) {
            for host in hosts {
                // Whatever becomes of it, the way is asked for again later.
                let _ = socket.send_to(&[], SocketAddr::new(*host, self.address().port()));
            }
        }
    }
}

impl AsFd for Carrier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Carrier::Udp(socket) => socket.as_fd(),
            Carrier::Ethernet(socket) => socket.as_fd(),
        }
    }
}
