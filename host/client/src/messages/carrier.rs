//! The transport of an endpoint's packets: UDP, or raw Ethernet frames.

use super::endpoint::Settings;
use baton_linux::datagrams::{Datagrams, Received};
use baton_linux::frames::Frames;
use baton_wire::rmpp::envelope::ETHERTYPE_RMPP;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

/// Requested size of the socket's buffers in bytes.
const BUFFER: usize = 4 << 20;

/// The socket of an endpoint.
pub enum Carrier {
    /// UDP datagrams.
    Udp(Datagrams),
    /// Raw Ethernet frames.
    Ethernet(Frames),
}

impl Carrier {
    /// Opens the socket that the settings ask for.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn bind(settings: &Settings) -> io::Result<Carrier> {
        let longest = settings.packet.into();
        Ok(match &settings.ethernet {
            None => Carrier::Udp(Datagrams::bind(settings.address, BUFFER, longest)?),
            Some(device) => Carrier::Ethernet(Frames::bind(device, ETHERTYPE_RMPP, BUFFER, longest)?),
        })
    }

    /// Address at which it receives.
    pub fn address(&self) -> SocketAddr {
        match self {
            Carrier::Udp(socket) => socket.address(),
            Carrier::Ethernet(socket) => socket.address(),
        }
    }

    /// Receives packets that have arrived, passes each to `each`, and returns how many there were.
    pub fn receive(&mut self, each: &mut dyn FnMut(Received<'_>)) -> usize {
        match self {
            Carrier::Udp(socket) => socket.receive(each),
            Carrier::Ethernet(socket) => socket.receive(each),
        }
    }

    /// Most packets of one length to one address that can be written at once.
    pub fn longest_run(&self) -> usize {
        match self {
            Carrier::Udp(_) => Datagrams::MOST,
            Carrier::Ethernet(_) => 1,
        }
    }

    /// The buffer into which the next packets are written.
    pub fn room(&mut self) -> &mut [u8] {
        match self {
            Carrier::Udp(socket) => socket.room(),
            Carrier::Ethernet(socket) => socket.room(),
        }
    }

    /// Queues the packets in that buffer, `length` bytes in all, each of `segment` bytes except the last, which may be
    /// shorter. They leave at the latest with [`Carrier::flush`].
    pub fn push(&mut self, to: SocketAddr, length: usize, segment: usize) {
        match self {
            Carrier::Udp(socket) => socket.push(to, length, segment),
            Carrier::Ethernet(socket) => socket.push(to, length),
        }
    }

    /// Sends what was pushed.
    pub fn flush(&mut self) {
        if let Carrier::Udp(socket) = self {
            socket.flush();
        }
    }

    /// The sockets by which packets arrive, for a poller.
    pub fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let partner = match self {
            Carrier::Udp(socket) => socket.partner(),
            Carrier::Ethernet(_) => None,
        };
        [Some(self.as_fd()), partner].into_iter().flatten()
    }

    /// Notes that one of the carrier's sockets has become readable.
    pub fn look_at_all(&mut self) {
        if let Carrier::Udp(socket) = self {
            socket.look_at_all();
        }
    }

    /// Packets that the socket did not take.
    pub fn dropped(&self) -> u64 {
        match self {
            Carrier::Udp(socket) => socket.dropped(),
            Carrier::Ethernet(socket) => socket.dropped(),
        }
    }

    /// Makes the kernel resolve the neighbours on the routes to these hosts, by empty datagrams, which are no RMPP
    /// packets.
    pub fn probe(&self, hosts: &[IpAddr]) {
        if let Ok(socket) = self.as_fd().try_clone_to_owned().map(UdpSocket::from) {
            for host in hosts {
                // The result does not matter: the route is asked for again later.
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
