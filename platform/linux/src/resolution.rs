//! Frames of ARP and neighbour discovery by which hosts claim one address on one link, for a host that probes for it
//! and announces it. It needs CAP_NET_RAW.

use crate::diagnosis::{self, Use};
use crate::frames::link_address;
use crate::netlink::Netlink;
use crate::rtnetlink;
use crate::socket::check;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A packet socket that receives only other hosts' claims to the address. It costs no frame of another EtherType
/// anything.
#[derive(Debug)]
pub struct ResolutionSocket(OwnedFd);

/// Offsets from the beginning of an Ethernet frame.
mod at {
    pub const ARP_SENDER: u32 = 14 + 14;
    pub const ARP_TARGET: u32 = 14 + 24;
    pub const NEXT_HEADER: u32 = 14 + 6;
    pub const SOURCE: u32 = 14 + 8;
    pub const ICMP_TYPE: u32 = 14 + 40;
    pub const TARGET: u32 = 14 + 40 + 8;
}

/// Instructions of classic BPF: load a byte or a word, compare with jumps over so many instructions, return.
fn byte(at: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: at }
}

fn word(at: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: at }
}

fn equal(value: u32, then: u8, or_else: u8) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt: then, jf: or_else, k: value }
}

fn accept(length: u32) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: length }
}

/// A socket filter that accepts ARP frames of hosts that have the address or probe for it. Ordinary questions for the
/// address do not pass: the kernel answers these, however many come.
fn claims_by_arp(address: u32) -> Vec<libc::sock_filter> {
    vec![
        word(at::ARP_SENDER),
        equal(address, 3, 0),
        equal(0, 0, 3),
        word(at::ARP_TARGET),
        equal(address, 0, 1),
        accept(u32::MAX),
        accept(0),
    ]
}

/// The same filter for neighbour discovery: it accepts an advertisement of the address, and a solicitation from the
/// unspecified address.
fn claims_by_discovery(address: [u8; 16]) -> Vec<libc::sock_filter> {
    const ICMPV6: u32 = 58;
    const ADVERTISEMENT: u32 = 136;
    /// Indices of the instructions that accept and refuse.
    const ACCEPT: usize = 20;
    const REFUSE: usize = ACCEPT + 1;
    let ahead = |from: usize, to: usize| (to - from - 1) as u8;
    let mut program = vec![byte(at::NEXT_HEADER), equal(ICMPV6, 0, ahead(1, REFUSE))];
    let compare = |program: &mut Vec<libc::sock_filter>, at: u32, sixteen: [u8; 16]| {
        for (n, four) in sixteen.chunks_exact(4).enumerate() {
            let value = four.iter().fold(0, |word, byte| word << 8 | u32::from(*byte));
            program.push(word(at + 4 * n as u32));
            program.push(equal(value, 0, ahead(program.len(), REFUSE)));
        }
    };
    compare(&mut program, at::TARGET, address);
    program.extend([byte(at::ICMP_TYPE), equal(ADVERTISEMENT, ahead(11, ACCEPT), 0)]);
    compare(&mut program, at::SOURCE, [0; 16]);
    program.extend([accept(u32::MAX), accept(0)]);
    program
}

fn attach(fd: BorrowedFd<'_>, program: &mut [libc::sock_filter]) -> io::Result<()> {
    let described = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: sock_fprog points at live instructions; the kernel copies them.
    check(unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const described).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    })
    .map(|_| ())
}

/// Claims an address of a NIC in this network namespace, by a socket with an abstract name: the claim vanishes with the
/// last process that has the descriptor. So an address that an ended Baton has left in the kernel can be told from an
/// address that a running one uses.
///
/// # Errors
/// `EADDRINUSE` if it is claimed.
pub fn claim(address: IpAddr) -> io::Result<OwnedFd> {
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // Any process may send to an abstract name, and descriptors that were sent would have to be closed with the socket.
    // After this nothing can be sent to it.
    rustix::net::shutdown(&fd, Shutdown::Read)?;
    rustix::net::bind(&fd, &SocketAddrUnix::new_abstract_name(name_of_claim(address).as_bytes())?)?;
    Ok(fd)
}

fn name_of_claim(address: IpAddr) -> String {
    format!("baton-address-{address}")
}

/// The result of releasing a NIC's address, which was to be removed from the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Released {
    /// It is removed.
    Removed,
    /// The kernel removes it when the connections that programs have closed have had time to end.
    Expires,
    /// It stays, since sockets of programs are bound to it.
    Stays,
}

/// Seconds that closed connections get to end.
const CLOSING: u32 = 60;

/// Removes an address of a NIC's from the kernel, unless connections would be lost.
///
/// # Errors
/// The failed system call's.
pub fn release(routes: &Netlink, diagnosis: &Netlink, interface: u32, address: IpAddr) -> io::Result<Released> {
    // If the sockets cannot be listed, the address counts as unused.
    match diagnosis::users_of(diagnosis, address).unwrap_or(Use::Nobody) {
        Use::Nobody => rtnetlink::delete_own_address(routes, interface, address).map(|()| Released::Removed),
        Use::Closing => rtnetlink::expire_own_address(routes, interface, address, CLOSING).map(|()| Released::Expires),
        Use::Programs => Ok(Released::Stays),
    }
}

/// Joins the multicast group to which other hosts send solicitations for an IPv6 address (RFC 4862 section 5.4.2
/// demands that before the first probe). The membership lasts as long as the returned socket.
///
/// # Errors
/// The failed system call's.
pub fn join_group(interface: u32, address: Ipv6Addr) -> io::Result<OwnedFd> {
    let fd = rustix::net::socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let group = baton_wire::neighbour::solicited_node(&address.octets());
    rustix::net::sockopt::set_ipv6_add_membership(&fd, &Ipv6Addr::from(group), interface)?;
    Ok(fd)
}

impl ResolutionSocket {
    /// Longest frame that is received whole.
    pub const LONGEST: usize = 512;

    /// Opens one at the device with this index.
    ///
    /// # Errors
    /// The failed system call's: EPERM without CAP_NET_RAW.
    pub fn open(interface: u32, address: IpAddr) -> io::Result<ResolutionSocket> {
        // With protocol 0 it receives nothing until it is bound.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
        let (ethertype, mut filter) = match address {
            IpAddr::V4(v4) => (libc::ETH_P_ARP, claims_by_arp(v4.into())),
            IpAddr::V6(v6) => (libc::ETH_P_IPV6, claims_by_discovery(v6.octets())),
        };
        attach(fd.as_fd(), &mut filter)?;
        let link = link_address(ethertype as u16, interface);
        // SAFETY: the pointer and length describe `link`.
        check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const link).cast(), size_of_val(&link) as libc::socklen_t) })?;
        Ok(ResolutionSocket(fd))
    }

    /// Receives a frame, and returns its length. None if none waits.
    pub fn receive(&self, frame: &mut [u8; Self::LONGEST]) -> Option<usize> {
        rustix::net::recv(&self.0, frame, rustix::net::RecvFlags::empty()).ok().map(|(length, _)| length)
    }

    /// Sends a frame. If the device does not take it, it is lost, as on any link.
    pub fn send(&self, frame: &[u8]) {
        let _ = rustix::net::send(&self.0, frame, rustix::net::SendFlags::empty());
    }
}

impl AsFd for ResolutionSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_wire::arp::Arp;
    use baton_wire::neighbour::{NEIGHBOUR_FRAME, Neighbour};
    use std::net::Ipv4Addr;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    /// An address can be claimed only once until the claim is dropped, and no process can send anything to the claim's
    /// socket.
    #[test]
    fn a_claim_takes_nothing() {
        let address = IpAddr::from(std::process::id().to_be_bytes());
        let claim = claim(address).expect("nobody has it");
        assert_eq!(super::claim(address).expect_err("it is claimed").kind(), io::ErrorKind::AddrInUse);
        let name = SocketAddr::from_abstract_name(name_of_claim(address)).expect("a name");
        let sender = UnixDatagram::unbound().expect("a socket");
        assert_eq!(sender.send_to_addr(b"x", &name).expect_err("it was taken").kind(), io::ErrorKind::BrokenPipe);
        drop(claim);
        assert!(super::claim(address).is_ok());
    }

    /// Runs a filter of loads, comparisons and returns on a frame as the kernel does: a load beyond the frame's end
    /// refuses the frame.
    fn accepts(program: &[libc::sock_filter], frame: &[u8]) -> bool {
        let (mut at, mut value) = (0, 0);
        loop {
            let libc::sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            match u32::from(code) {
                code if code == libc::BPF_RET | libc::BPF_K => return k != 0,
                code if code == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K => {
                    at += usize::from(if value == k { jt } else { jf })
                }
                code => {
                    let bytes = if code == libc::BPF_LD | libc::BPF_B | libc::BPF_ABS { 1 } else { 4 };
                    let Some(loaded) = frame.get(k as usize..k as usize + bytes) else { return false };
                    value = loaded.iter().fold(0, |all, byte| all << 8 | u32::from(*byte));
                }
            }
        }
    }

    #[test]
    fn claims_pass_and_questions_do_not() {
        const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
        let (v4, v6): (Ipv4Addr, Ipv6Addr) = ([10, 0, 0, 50].into(), "fd00::50".parse().expect("an address"));
        let discovery = |neighbour: Neighbour| {
            let mut frame = [0; NEIGHBOUR_FRAME];
            let length = neighbour.emit(MAC, &mut frame);
            frame[..length].to_vec()
        };
        let arp = |passes, arp: Arp| (passes, claims_by_arp(v4.into()), arp.emit().to_vec());
        let nd = |passes, neighbour| (passes, claims_by_discovery(v6.octets()), discovery(neighbour));
        let (other, other6) = ([10, 0, 0, 51], [0xfd; 16]);
        let question = Arp { sender: other, ..Arp::probe(MAC, v4.octets()) };
        let question6 = Neighbour { source: other6, link_address: Some(MAC), ..Neighbour::probe(MAC, v6.octets()) };
        for (passes, program, frame) in [
            arp(true, Arp::announcement(MAC, v4.octets())),
            arp(true, Arp::probe(MAC, v4.octets())),
            arp(true, question.answer(MAC)),
            arp(false, question),
            arp(false, Arp::probe(MAC, other)),
            arp(false, Arp::announcement(MAC, other)),
            nd(true, Neighbour::announcement(MAC, v6.octets())),
            nd(true, Neighbour::probe(MAC, v6.octets())),
            nd(true, question6.answer(MAC)),
            nd(false, question6),
            nd(false, Neighbour::probe(MAC, other6)),
            nd(false, Neighbour::announcement(MAC, other6)),
        ] {
            assert_eq!(accepts(&program, &frame), passes, "{frame:?}");
            (0..28).for_each(|cut| assert!(!accepts(&program, &frame[..cut])));
        }
    }
}
