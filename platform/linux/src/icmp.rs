//! ICMP messages that a packet was too big (RFC 1191, RFC 8201), as they reach this host. They change the kernel's
//! route exceptions without a netlink notification, so the routes must be looked up again after one.

use crate::socket::set_bytes;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, ipproto};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A raw socket that receives nothing but these messages.
#[derive(Debug)]
pub struct TooBig {
    fd: OwnedFd,
    v6: bool,
}

impl TooBig {
    /// Opens one in the calling thread's network namespace.
    ///
    /// # Errors
    /// The failed system call's; `EPERM` without CAP_NET_RAW.
    pub fn listen(v6: bool) -> io::Result<TooBig> {
        /// SOL_RAW's ICMP_FILTER, and IPPROTO_ICMPV6's ICMP6_FILTER: a set bit filters a type out.
        const FILTER: i32 = 1;
        const SOL_RAW: i32 = 255;
        const UNREACHABLE: u32 = 3;
        const PACKET_TOO_BIG: u32 = 2;
        let (family, protocol) = if v6 { (AddressFamily::INET6, ipproto::ICMPV6) } else { (AddressFamily::INET, ipproto::ICMP) };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(family, SocketType::RAW, flags, Some(protocol))?;
        if v6 {
            let mut filter = [0xffu8; 32];
            filter[..4].copy_from_slice(&(!(1u32 << PACKET_TOO_BIG)).to_ne_bytes());
            set_bytes(fd.as_fd(), libc::IPPROTO_ICMPV6, FILTER, &filter)?;
        } else {
            set_bytes(fd.as_fd(), SOL_RAW, FILTER, &(!(1u32 << UNREACHABLE)).to_ne_bytes())?;
        }
        Ok(TooBig { fd, v6 })
    }

    /// Reads the waiting messages, at most a queue's worth, and passes each destination for which a packet was too big
    /// to `each`.
    pub fn receive(&self, mut each: impl FnMut(IpAddr)) {
        const MOST: usize = 1024;
        let mut buffer = [0u8; 256];
        for _ in 0..MOST {
            let message = match rustix::net::recv(&self.fd, &mut buffer, RecvFlags::DONTWAIT) {
                Ok((got, _)) => &buffer[..got],
                Err(Errno::WOULDBLOCK) => return,
                Err(_) => &[],
            };
            let destination = if self.v6 { destination_v6(message) } else { destination_v4(message) };
            destination.into_iter().for_each(&mut each);
        }
    }
}

/// The destination of the packet that an ICMPv4 message is about. The socket returns the IP header in front of the
/// message as well.
fn destination_v4(packet: &[u8]) -> Option<IpAddr> {
    const FRAGMENTATION_NEEDED: u8 = 4;
    let header = usize::from(packet.first()? & 15) * 4;
    let message = packet.get(header..)?;
    let inner: [u8; 4] = message.get(8 + 16..8 + 20)?.try_into().ok()?;
    (message[1] == FRAGMENTATION_NEEDED).then(|| inner.into())
}

fn destination_v6(message: &[u8]) -> Option<IpAddr> {
    let inner: [u8; 16] = message.get(8 + 24..8 + 40)?.try_into().ok()?;
    Some(inner.into())
}

impl AsFd for TooBig {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_destination_is_read_and_nothing_beyond_the_message() {
        let mut packet = vec![0u8; 20 + 8 + 20];
        (packet[0], packet[20], packet[21]) = (0x45, 3, 4);
        packet[44..48].copy_from_slice(&[10, 0, 0, 9]);
        assert_eq!(destination_v4(&packet), Some(IpAddr::from([10, 0, 0, 9])));
        packet[21] = 1;
        assert_eq!(destination_v4(&packet), None, "another reason");
        let mut message = vec![0u8; 48];
        message[47] = 9;
        assert_eq!(destination_v6(&message), Some(IpAddr::from([0, 0, 0, 0, 0, 0, 0, 9])));
        for length in 0..48 {
            assert!(destination_v4(&packet[..length]).is_none() && destination_v6(&message[..length]).is_none());
        }
    }
}
