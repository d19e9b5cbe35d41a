//! A UDP socket for many datagrams: runs of equal length to one address leave in one system call (UDP_SEGMENT) and arrive in one
//! (UDP_GRO), which udp(7) describes. Needs no privilege.

use crate::socket::{RawAddress, check_size, get, set};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Datagrams that one system call sends at most: the kernel's UDP_MAX_SEGMENTS was 64 before Linux 6.9.
const MOST: usize = 64;
/// Bytes that one system call moves at most: an IP packet's length field, less headers of IPv6 and UDP.
const MOST_BYTES: usize = 65_535 - 48;
/// How long a full send buffer is waited for, in milliseconds. A datagram that does not go then is dropped, as by any full queue.
const PATIENCE: i32 = 2;

/// A datagram that was received.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// Its sender.
    pub from: SocketAddr,
    /// Its payload.
    pub bytes: &'a [u8],
}

/// A control message with room for one integer: its alignment is that of cmsghdr.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// A UDP socket with a run of datagrams that are to be sent.
#[derive(Debug)]
pub struct Datagrams {
    socket: UdpSocket,
    address: SocketAddr,
    /// The run, and behind it room for one more datagram.
    out: Vec<u8>,
    /// Bytes of the run, of each of its datagrams but the last, and their number.
    length: usize,
    segment: usize,
    count: usize,
    to: SocketAddr,
    /// The last datagram of the run is shorter: none can follow it.
    closed: bool,
    /// The kernel or the device refuses runs.
    single: bool,
    input: Vec<u8>,
    /// Datagrams that were dropped since the socket's send buffer stayed full, or no route led to their destination.
    dropped: u64,
}

impl Datagrams {
    /// A socket bound to `address`, with at least `buffer` bytes of receive buffer if the system allows it, for datagrams of up to
    /// `longest` bytes.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn bind(address: SocketAddr, buffer: usize, longest: usize) -> io::Result<Datagrams> {
        let socket = UdpSocket::bind(address)?;
        socket.set_nonblocking(true)?;
        let wanted = i32::try_from(buffer).unwrap_or(i32::MAX);
        set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, wanted)?;
        set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, wanted)?;
        // Without it datagrams arrive one by one, which is slower and nothing else.
        let _ = set(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1);
        let address = socket.local_addr()?;
        Ok(Datagrams {
            socket,
            address,
            out: vec![0; MOST_BYTES + longest],
            length: 0,
            segment: 0,
            count: 0,
            to: address,
            closed: false,
            single: false,
            input: vec![0; 1 << 16],
            dropped: 0,
        })
    }

    /// Address that it is bound to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes of receive buffer, as the kernel counts them: with its own overhead.
    pub fn receive_buffer(&self) -> usize {
        get(self.socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF).map_or(0, |bytes| bytes.max(0) as usize)
    }

    /// Datagrams that could not be sent.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Receives what one system call brings, and hands each datagram to `each`. Returns how many there were; 0 if none waits.
    pub fn receive(&mut self, each: &mut dyn FnMut(Received<'_>)) -> usize {
        let Ok((length, from, segment)) = receive_run(self.socket.as_fd(), &mut self.input) else { return 0 };
        let segment = if segment == 0 { length.max(1) } else { segment };
        let mut count = 0;
        for bytes in self.input[..length].chunks(segment) {
            each(Received { from, bytes });
            count += 1;
        }
        // An empty datagram is one too: there may be more behind it.
        count.max(1)
    }

    /// Room for the next datagram, of up to `longest` bytes as given to [`Datagrams::bind`]. [`Datagrams::push`] follows.
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.out[self.length..]
    }

    /// Adds the datagram of `length` bytes that was written to [`Datagrams::room`]. It leaves with the run that it belongs to, at
    /// the latest with [`Datagrams::flush`].
    pub fn push(&mut self, to: SocketAddr, length: usize) {
        let fits = self.count < MOST && self.length + length <= MOST_BYTES;
        let follows = self.to == to && !self.closed && length <= self.segment && fits && !self.single;
        if self.count > 0 && !follows {
            let (start, end) = (self.length, self.length + length);
            self.flush();
            self.out.copy_within(start..end, 0);
        }
        if self.count == 0 {
            (self.to, self.segment) = (to, length);
        }
        self.closed = length < self.segment;
        self.length += length;
        self.count += 1;
    }

    /// Sends the datagrams that were pushed.
    pub fn flush(&mut self) {
        let (length, count) = (std::mem::take(&mut self.length), std::mem::take(&mut self.count));
        self.closed = false;
        if count == 0 {
            return;
        }
        if count > 1 {
            match self.send(0, length, self.segment) {
                Ok(()) => return,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.dropped += count as u64;
                    return;
                }
                // EIO, EINVAL, EMSGSIZE: no segmentation here, or the datagrams are longer than the device's frames.
                Err(_) => self.single = true,
            }
        }
        for start in (0..length).step_by(self.segment.max(1)) {
            let end = length.min(start + self.segment);
            if self.send(start, end, 0).is_err() {
                self.dropped += 1;
            }
        }
    }

    /// Sends bytes of the run, cut into datagrams of `segment` bytes unless that is 0.
    fn send(&self, start: usize, end: usize, segment: usize) -> io::Result<()> {
        let fd = self.socket.as_fd();
        let mut outcome = send_run(fd, &self.out[start..end], &self.to, segment);
        // A pending ICMP error of another datagram is reported once; a signal may interrupt.
        for _ in 0..3 {
            match &outcome {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait_writable(fd),
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::Interrupted) => {}
                _ => break,
            }
            outcome = send_run(fd, &self.out[start..end], &self.to, segment);
        }
        outcome
    }
}

impl AsFd for Datagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn wait_writable(fd: BorrowedFd<'_>) {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: one live pollfd. Whether it became writable shows at the next send.
    unsafe { libc::poll(&mut poll, 1, PATIENCE) };
}

fn send_run(fd: BorrowedFd<'_>, bytes: &[u8], to: &SocketAddr, segment: usize) -> io::Result<()> {
    let address = RawAddress::new(*to);
    let (name, name_length) = address.as_parts();
    let mut vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 64]);
    // SAFETY: msghdr is plain data, for which zero is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = name.cast_mut().cast();
    message.msg_namelen = name_length;
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    if segment > 0 {
        message.msg_control = (&raw mut control).cast();
        // SAFETY: CMSG_SPACE and CMSG_LEN only calculate; the control buffer of 64 bytes is aligned for a cmsghdr and has room for
        // one with two bytes of data, so CMSG_FIRSTHDR and CMSG_DATA point into it.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(2) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_UDP;
            (*header).cmsg_type = libc::UDP_SEGMENT;
            (*header).cmsg_len = libc::CMSG_LEN(2) as _;
            libc::CMSG_DATA(header).cast::<u16>().write_unaligned(segment as u16);
        }
    }
    // SAFETY: the address, the vector, the bytes behind it and the control buffer live for the call, which only reads them.
    check_size(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }).map(|_| ())
}

/// Receives one datagram or a run of them. Returns the bytes, the sender, and the length of each datagram but the last, 0 for one.
fn receive_run(fd: BorrowedFd<'_>, out: &mut [u8]) -> io::Result<(usize, SocketAddr, usize)> {
    // SAFETY: sockaddr_storage and msghdr are plain data, for which zero is a value.
    let (mut storage, mut message): (libc::sockaddr_storage, libc::msghdr) = unsafe { std::mem::zeroed() };
    let mut vector = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
    let mut control = Control([0; 64]);
    message.msg_name = (&raw mut storage).cast();
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    loop {
        message.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        message.msg_controllen = size_of::<Control>() as _;
        // SAFETY: every pointer of the message is to a live buffer of the length that it gives.
        match check_size(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) }) {
            Ok(length) => return Ok((length, RawAddress::parse(&storage)?, segment_of(&message))),
            // An ICMP error of something sent before: the datagrams behind it are still there.
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The length of each datagram of a run, from the control message that came with it.
fn segment_of(message: &libc::msghdr) -> usize {
    // SAFETY: the kernel has filled the control buffer, which is live, and set its length; the macros stay inside. The kernel
    // writes an int behind a UDP_GRO header.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(found) = header.as_ref() {
            if found.cmsg_level == libc::SOL_UDP && found.cmsg_type == libc::UDP_GRO {
                return usize::try_from(libc::CMSG_DATA(header).cast::<libc::c_int>().read_unaligned()).unwrap_or(0);
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Datagrams, Datagrams) {
        let bind = || Datagrams::bind(SocketAddr::from(([127, 0, 0, 1], 0)), 1 << 20, 9000).unwrap();
        (bind(), bind())
    }

    fn collect(socket: &mut Datagrams) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while socket.receive(&mut |datagram| all.push(datagram.bytes.to_vec())) > 0 {}
        all
    }

    #[test]
    fn runs_arrive_as_the_datagrams_they_were() {
        let (mut a, mut b) = pair();
        let lengths = [1000, 1000, 1000, 300, 1000, 9000, 9000, 1, 1, 2];
        for (value, length) in lengths.iter().enumerate() {
            a.room()[..*length].fill(value as u8);
            a.push(b.address(), *length);
        }
        a.flush();
        let received = collect(&mut b);
        let expected: Vec<Vec<u8>> = lengths.iter().enumerate().map(|(value, length)| vec![value as u8; *length]).collect();
        assert_eq!(received, expected);
        assert_eq!(a.dropped(), 0);
    }

    #[test]
    fn more_than_a_system_call_takes() {
        let (mut a, mut b) = pair();
        for value in 0..200u8 {
            a.room()[..1400].fill(value);
            a.push(b.address(), 1400);
        }
        a.flush();
        let received = collect(&mut b);
        assert_eq!(received.len(), 200);
        assert!(received.iter().enumerate().all(|(value, bytes)| bytes.len() == 1400 && bytes[0] == value as u8));
    }

    #[test]
    fn a_port_without_listener_does_not_stop_the_others() {
        let (mut a, mut b) = pair();
        let nobody = pair().0.address();
        for to in [nobody, b.address(), nobody, b.address()] {
            a.room()[..10].fill(7);
            a.push(to, 10);
            a.flush();
        }
        assert_eq!(collect(&mut b).len(), 2);
        assert_eq!(collect(&mut a).len(), 0);
    }
}
