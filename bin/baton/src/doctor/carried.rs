//! How much the kernel's connections have carried, by socket diagnosis: the program itself is not touched.

use baton_linux::namespace::Namespace;
use baton_linux::netlink::{Netlink, Request, SOCK_DIAG, attributes};
use baton_linux::reading;
use std::collections::HashMap;
use std::io;
use std::time::Duration;

/// How long a look may take: the kernel waits for each socket's lock, which a program can hold.
const PATIENCE: Duration = Duration::from_secs(2);

/// Counters of a connection since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes that came, and that the peer has acknowledged.
    pub bytes: [u64; 2],
    /// Segments with data that came, and that went.
    pub segments: [u64; 2],
}

impl Counters {
    /// The difference to the earlier counters `then`.
    pub fn since(&self, then: &Counters) -> Counters {
        let less = |now: [u64; 2], then: [u64; 2]| [0, 1].map(|at| now[at].wrapping_sub(then[at]));
        // The kernel counts segments in 32 bits.
        let segments = less(self.segments, then.segments).map(|count| count & u64::from(u32::MAX));
        Counters { bytes: less(self.bytes, then.bytes), segments }
    }
}

/// Counters of all connections in the network namespace of a process, by their sockets' inodes. None if they are not to
/// be had in time, or at all.
pub fn look(process: u32) -> Option<HashMap<u64, Counters>> {
    reading::within(process, PATIENCE, move || {
        // The reader is a thread of its own, so it can enter the namespace for good.
        Namespace::of_process(process).and_then(|namespace| namespace.enter()).and_then(|()| dump())
    })?
    .ok()
}

fn dump() -> io::Result<HashMap<u64, Counters>> {
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    /// NLM_F_ROOT and NLM_F_MATCH.
    const DUMP: u16 = 0x300;
    const INFO: u8 = 1 << 1;
    /// ESTABLISHED, FIN-WAIT-1, FIN-WAIT-2, CLOSE-WAIT, LAST-ACK.
    const STATES: u32 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9;
    let (netlink, mut all) = (Netlink::open(SOCK_DIAG)?, HashMap::new());
    for family in [libc::AF_INET, libc::AF_INET6] {
        let mut header = vec![family as u8, libc::IPPROTO_TCP as u8, INFO, 0];
        header.extend_from_slice(&STATES.to_ne_bytes());
        header.extend_from_slice(&[0; 48]);
        netlink.ask(Request::new(SOCK_DIAG_BY_FAMILY, DUMP, &header), |body| all.extend(counters(body)))?;
    }
    Ok(all)
}

/// Inode and counters in a `struct inet_diag_msg` and what follows it.
fn counters(body: &[u8]) -> Option<(u64, Counters)> {
    const MESSAGE: usize = 72;
    const INODE: usize = 68;
    const INET_DIAG_INFO: u16 = 2;
    let (_, info) = attributes(body, MESSAGE).find(|(kind, _)| *kind == INET_DIAG_INFO)?;
    let word = |of: &[u8], at: usize| Some(u64::from(u32::from_ne_bytes(*of.get(at..)?.first_chunk()?)));
    let long = |at: usize| Some(word(info, at)? | word(info, at + 4)? << 32);
    // `struct tcp_info`: bytes_acked, bytes_received, data_segs_in, data_segs_out.
    let counters = Counters { bytes: [long(128)?, long(120)?], segments: [word(info, 152)?, word(info, 156)?] };
    Some((word(body, INODE)?, counters))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn bytes_and_segments_of_a_connection_are_counted() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let mut near = std::net::TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (mut far, _) = listener.accept().expect("its other end");
        let inode = baton_linux::socket::inode(near.as_fd()).expect("an inode");
        let at = || *look(std::process::id()).expect("socket diagnosis").get(&inode).expect("the connection");
        let before = at();
        for _ in 0..3 {
            far.write_all(&[1; 100]).expect("sent");
            near.read_exact(&mut [0; 100]).expect("received");
            near.write_all(&[1; 10]).expect("sent");
            far.read_exact(&mut [0; 10]).expect("received");
        }
        far.write_all(&[1]).expect("sent, with the acknowledgement");
        near.read_exact(&mut [0]).expect("received");
        assert_eq!(at().since(&before), Counters { bytes: [301, 30], segments: [4, 3] });
    }

    #[test]
    fn counters_of_segments_wrap() {
        let of = |segments| Counters { segments: [segments, 0], ..Counters::default() };
        assert_eq!(of(5).since(&of(0xffff_fffe)).segments, [7, 0]);
    }
}
