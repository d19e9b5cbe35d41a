//! ICMP messages that a packet was too big (RFC 1191, RFC 8201), as they reach this host. They change the kernel's route
//! exceptions without a netlink notification, so the routes must be looked up again after one.

use crate::socket::{check, set_bytes};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

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
        let (family, protocol) = if v6 { (libc::AF_INET6, libc::IPPROTO_ICMPV6) } else { (libc::AF_INET, libc::IPPROTO_ICMP) };
        // SAFETY: no pointers are involved.
        let raw = check(unsafe { libc::socket(family, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, protocol) })?;
        // SAFETY: the descriptor is new and ours.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        if v6 {
            let mut filter = [0xffu8; 32];
            filter[..4].copy_from_slice(&(!(1u32 << PACKET_TOO_BIG)).to_ne_bytes());
            set_bytes(fd.as_fd(), libc::IPPROTO_ICMPV6, FILTER, &filter)?;
        } else {
            set_bytes(fd.as_fd(), SOL_RAW, FILTER, &(!(1u32 << UNREACHABLE)).to_ne_bytes())?;
        }
        Ok(TooBig { fd, v6 })
    }

    /// Reads the waiting messages, at most a queue's worth, and passes each destination for which a packet was too big to
    /// `each`.
    pub fn receive(&self, mut each: impl FnMut(IpAddr)) {
        const MOST: usize = 1024;
        let mut buffer = [0u8; 256];
        for _ in 0..MOST {
            // SAFETY: the pointer and length describe the buffer.
            let got = unsafe { libc::recv(self.fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT) };
            if got < 0 && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock {
                return;
            }
            let message = &buffer[..got.max(0) as usize];
            let destination = if self.v6 { destination_v6(message) } else { destination_v4(message) };
            destination.into_iter().for_each(&mut each);
        }
    }
}

/// The destination of an IPv4 message. The socket returns the IP header as well.
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
