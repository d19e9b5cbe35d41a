//! A UDP socket for many datagrams: runs of equal length to one address leave in one system call (UDP_SEGMENT) and
//! arrive in one (UDP_GRO), which udp(7) describes. Needs no privilege.

use crate::partner::Partner;
use crate::raw_address::RawAddress;
use crate::socket::{check_size, get, set};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Datagrams that one system call sends at most: the kernel's UDP_MAX_SEGMENTS was 64 before Linux 6.9.
const MOST: usize = 64;
/// Bytes that one system call moves at most: an IP packet's length field, less headers of IPv6 and UDP.
const MOST_BYTES: usize = 65_535 - 48;
/// How often the socket that brought the latest datagrams is polled for each poll of the other socket.
const LOOKS: u32 = 8;
/// How long a full send buffer is waited for, in milliseconds. A datagram that does not go then is dropped, as by any
/// full queue.
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

/// A UDP socket with a run of datagrams that are to be sent, and if wanted a second one for the peer that most is sent
/// to.
#[derive(Debug)]
pub struct Datagrams {
    socket: UdpSocket,
    partner: Option<Partner>,
    /// The partner has brought something last.
    from_partner: bool,
    /// Polls that remain until the other socket is polled.
    looks: u32,
    address: SocketAddr,
    /// The run of datagrams to be sent, and behind it room for a further run.
    out: Vec<u8>,
    longest: usize,
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
    /// Datagrams that one system call sends at most.
    pub const MOST: usize = MOST;

    /// A socket bound to `address`, with at least `buffer` bytes of receive buffer if the system allows it, for
    /// datagrams of up to `longest` bytes.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn bind(address: SocketAddr, buffer: usize, longest: usize) -> io::Result<Datagrams> {
        let socket = UdpSocket::bind(address)?;
        socket.set_nonblocking(true)?;
        let wanted = i32::try_from(buffer).unwrap_or(i32::MAX);
        set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, wanted)?;
        set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, wanted)?;
        // Without this option datagrams arrive one by one, which is only slower.
        let _ = set(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1);
        let address = socket.local_addr()?;
        Ok(Datagrams {
            socket,
            partner: None,
            from_partner: false,
            looks: 0,
            address,
            out: vec![0; 2 * MOST_BYTES.max(longest)],
            longest,
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

    /// Adds a socket that is connected to one peer at a time and carries the datagrams from and to it, which is faster.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn add_partner(&mut self) -> io::Result<()> {
        let partner = Partner::new(self.address)?;
        for option in [libc::SO_RCVBUF, libc::SO_SNDBUF] {
            // The kernel doubles the value that it is given.
            let bytes = get(self.socket.as_fd(), libc::SOL_SOCKET, option)? / 2;
            set(partner.as_fd(), libc::SOL_SOCKET, option, bytes)?;
        }
        // As in `bind`.
        let _ = set(partner.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1);
        self.partner = Some(partner);
        Ok(())
    }

    /// The second socket, which the caller has to watch as well as the first.
    pub fn partner(&self) -> Option<BorrowedFd<'_>> {
        self.partner.as_ref().map(Partner::as_fd)
    }

    /// Makes the next [`Datagrams::receive`] look at both sockets: either may have made a poller ready.
    pub fn look_at_all(&mut self) {
        self.looks = 0;
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

    /// Receives datagrams with one system call, and passes each to `each`. Returns how many there were; 0 if none
    /// waits. With a second socket, the one that has brought nothing for a while is polled only now and then.
    pub fn receive(&mut self, each: &mut dyn FnMut(Received<'_>)) -> usize {
        let partner = self.partner.as_ref().filter(|partner| partner.is_bound()).map(Partner::as_fd);
        let sockets = [self.socket.as_fd(), partner.unwrap_or(self.socket.as_fd())];
        let likely = usize::from(self.from_partner);
        let mut run = None;
        if self.looks == 0 {
            self.looks = LOOKS;
            if partner.is_some() {
                run = receive_run(sockets[1 - likely], &mut self.input).ok();
                self.from_partner ^= run.is_some();
            }
        }
        self.looks -= 1;
        let Some((length, from, segment)) = run.or_else(|| receive_run(sockets[likely], &mut self.input).ok()) else { return 0 };
        let segment = if segment == 0 { length.max(1) } else { segment };
        let mut count = 0;
        for bytes in self.input[..length].chunks(segment) {
            each(Received { from, bytes });
            count += 1;
        }
        // An empty datagram counts as one: more may follow it.
        count.max(1)
    }

    /// Room for the next datagrams, for one of up to `longest` bytes as given to [`Datagrams::bind`] or for a run of
    /// [`Datagrams::MOST`] in as many bytes as one system call takes. [`Datagrams::push`] follows.
    pub fn room(&mut self) -> &mut [u8] {
        let bytes = MOST_BYTES.max(self.longest);
        &mut self.out[self.length..self.length + bytes]
    }

    /// Adds the `length` bytes that were written to [`Datagrams::room`]: datagrams of `segment` bytes each, of which
    /// the last may be shorter. They are sent with the run to which they belong, at the latest by [`Datagrams::flush`].
    pub fn push(&mut self, to: SocketAddr, length: usize, segment: usize) {
        let count = length.div_ceil(segment.max(1));
        let fits = self.count + count <= MOST && self.length + length <= MOST_BYTES;
        let even = segment == self.segment || count == 1 && length <= self.segment;
        let follows = self.to == to && !self.closed && even && fits && !self.single;
        if self.count > 0 && !follows {
            let (start, end) = (self.length, self.length + length);
            self.flush();
            self.out.copy_within(start..end, 0);
        }
        if self.count == 0 {
            (self.to, self.segment) = (to, segment);
        }
        self.closed = length < count * self.segment;
        self.length += length;
        self.count += count;
    }

    /// Sends the datagrams that were pushed.
    pub fn flush(&mut self) {
        let (length, count) = (std::mem::take(&mut self.length), std::mem::take(&mut self.count));
        self.closed = false;
        if count == 0 {
            return;
        }
        let partner = self.partner.as_mut().is_some_and(|partner| partner.sends_to(self.to, &self.socket));
        if count > 1 && !self.single {
            match self.send(partner, 0, length, self.segment) {
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
            if self.send(partner, start, end, 0).is_err() {
                self.dropped += 1;
            }
        }
    }

    /// Sends bytes of the run, cut into datagrams of `segment` bytes unless that is 0, by one of the sockets.
    fn send(&self, by_partner: bool, start: usize, end: usize, segment: usize) -> io::Result<()> {
        let (fd, to) = match &self.partner {
            Some(partner) if by_partner => (partner.as_fd(), None),
            _ => (self.socket.as_fd(), Some(&self.to)),
        };
        let bytes = &self.out[start..end];
        let send = || if segment > 0 { send_run(fd, bytes, to, segment) } else { send_one(fd, bytes, to) };
        let mut outcome = send();
        // A pending ICMP error of another datagram is reported once; a signal may interrupt.
        for _ in 0..3 {
            match &outcome {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait_writable(fd),
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::Interrupted) => {}
                _ => break,
            }
            outcome = send();
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

/// Sends one datagram to `to`, or to the peer that the socket is connected to. sendto(2) has less to copy than
/// sendmsg(2).
fn send_one(fd: BorrowedFd<'_>, bytes: &[u8], to: Option<&SocketAddr>) -> io::Result<()> {
    let address = to.map(|to| RawAddress::new(*to));
    let (name, name_length) = address.as_ref().map_or((std::ptr::null(), 0), RawAddress::as_parts);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let (start, length) = (bytes.as_ptr(), bytes.len());
    // SAFETY: sendto(2) by its number, since the C library's is a cancellation point of pthreads. The bytes and the
    // address live for the call, which only reads them.
    let sent = unsafe { libc::syscall(libc::SYS_sendto, fd.as_raw_fd(), start, length, flags, name, name_length) };
    check_size(sent as isize).map(|_| ())
}

/// Sends datagrams of `segment` bytes, the last of which may be shorter.
fn send_run(fd: BorrowedFd<'_>, bytes: &[u8], to: Option<&SocketAddr>, segment: usize) -> io::Result<()> {
    let address = to.map(|to| RawAddress::new(*to));
    let (name, name_length) = address.as_ref().map_or((std::ptr::null(), 0), RawAddress::as_parts);
    let mut vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 64]);
    // SAFETY: msghdr is plain data, for which zero is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = name.cast_mut().cast();
    message.msg_namelen = name_length;
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    // SAFETY: CMSG_SPACE and CMSG_LEN only calculate; the control buffer of 64 bytes is aligned for a cmsghdr and has
    // room for one with two bytes of data, so CMSG_FIRSTHDR and CMSG_DATA point into it.
    unsafe {
        message.msg_controllen = libc::CMSG_SPACE(2) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_UDP;
        (*header).cmsg_type = libc::UDP_SEGMENT;
        (*header).cmsg_len = libc::CMSG_LEN(2) as _;
        libc::CMSG_DATA(header).cast::<u16>().write_unaligned(segment as u16);
    }
    // SAFETY: the address, the vector, the bytes behind it and the control buffer live for the call, which only reads
    // them.
    check_size(unsafe { system_call(libc::SYS_sendmsg, fd, &raw mut message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) })
        .map(|_| ())
}

/// sendmsg(2) or recvmsg(2). The C library's functions are cancellation points of pthreads, which costs a process with
/// several threads two atomic operations per call; no thread is cancelled here.
///
/// # Safety
/// As those calls: every pointer of the message is to a live buffer of the length that it gives.
unsafe fn system_call(number: libc::c_long, fd: BorrowedFd<'_>, message: *mut libc::msghdr, flags: libc::c_int) -> isize {
    // SAFETY: this function's `# Safety`; the arguments are those of the two calls.
    unsafe { libc::syscall(number, fd.as_raw_fd(), message, flags) as isize }
}

/// Receives one datagram or a run of them. Returns the bytes, the sender, and the length of each datagram but the last,
/// 0 for one.
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
        match check_size(unsafe { system_call(libc::SYS_recvmsg, fd, &raw mut message, libc::MSG_DONTWAIT) }) {
            Ok(length) => return Ok((length, RawAddress::parse(&storage)?, segment_of(&message))),
            // An ICMP error of something sent before: the datagrams behind it are still there.
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The length of each datagram of a run, from the control message that came with it.
fn segment_of(message: &libc::msghdr) -> usize {
    // SAFETY: the kernel has filled the control buffer, which is live, and set its length; the macros stay inside. The
    // kernel writes an int behind a UDP_GRO header.
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
            a.push(b.address(), *length, *length);
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
            a.push(b.address(), 1400, 1400);
        }
        a.flush();
        let received = collect(&mut b);
        assert_eq!(received.len(), 200);
        assert!(received.iter().enumerate().all(|(value, bytes)| bytes.len() == 1400 && bytes[0] == value as u8));
    }

    #[test]
    fn a_peer_that_much_is_sent_to_gets_a_socket_of_its_own() {
        let ((mut a, mut b), (mut c, _)) = (pair(), pair());
        a.add_partner().unwrap();
        b.add_partner().unwrap();
        let send = |from: &mut Datagrams, to: SocketAddr, value: u8| {
            from.room()[..8].fill(value);
            from.push(to, 8, 8);
            from.flush();
        };
        // All datagrams arrive, by whichever socket they are sent, and come from the sender's address.
        let receive = |at: &mut Datagrams, from: SocketAddr, value: u8| {
            at.look_at_all();
            let mut got = Vec::new();
            let count = at.receive(&mut |datagram| got.push((datagram.from, datagram.bytes[0])));
            assert_eq!((count, got), (1, vec![(from, value)]));
        };
        let (at_a, at_b, at_c) = (a.address(), b.address(), c.address());
        for value in 0..200 {
            send(&mut a, at_b, value);
            receive(&mut b, at_a, value);
            send(&mut b, at_a, value);
            receive(&mut a, at_b, value);
            // In between another socket sends, and a answers it in every other round.
            send(&mut c, at_a, value);
            receive(&mut a, at_c, value);
            if value % 2 == 0 {
                send(&mut a, at_c, value);
                receive(&mut c, at_a, value);
            }
        }
        assert!(!a.partner.as_ref().unwrap().is_bound(), "a sends to both in turn");
        assert!(b.partner.as_ref().unwrap().is_bound());
        for to in [at_b, at_c, at_b] {
            for value in 0..100 {
                send(&mut a, to, value);
                receive(if to == at_b { &mut b } else { &mut c }, at_a, value);
                send(&mut c, at_a, value);
                receive(&mut a, at_c, value);
                send(&mut b, at_a, value);
                receive(&mut a, at_b, value);
            }
            assert!(a.partner.as_mut().unwrap().sends_to(to, &a.socket));
        }
        // No other socket can bind the address meanwhile.
        let other = Datagrams::bind(at_a, 1 << 16, 100);
        assert_eq!(other.unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn without_looking_at_all_sockets_each_has_its_turn() {
        let ((mut a, mut b), (mut c, _)) = (pair(), pair());
        a.add_partner().unwrap();
        let (at_a, at_b) = (a.address(), b.address());
        let mut from_b = |a: &mut Datagrams| {
            b.room()[..4].fill(2);
            b.push(at_a, 4, 4);
            b.flush();
            a.look_at_all();
        };
        for _ in 0..100 {
            a.room()[..4].fill(1);
            a.push(at_b, 4, 4);
            a.flush();
            from_b(&mut a);
            assert_eq!(a.receive(&mut |_| ()), 1);
        }
        (0..50).for_each(|_| from_b(&mut a));
        c.room()[..4].fill(3);
        c.push(at_a, 4, 4);
        c.flush();
        let mut from_c = None;
        for look in 0..100 {
            a.receive(&mut |datagram| from_c = from_c.or((datagram.bytes[0] == 3).then_some(look)));
        }
        assert!(from_c.is_some_and(|look| look < 2 * LOOKS), "{from_c:?}");
    }

    #[test]
    fn a_port_without_listener_does_not_stop_the_others() {
        let (mut a, mut b) = pair();
        let nobody = pair().0.address();
        for to in [nobody, b.address(), nobody, b.address()] {
            a.room()[..10].fill(7);
            a.push(to, 10, 10);
            a.flush();
        }
        assert_eq!(collect(&mut b).len(), 2);
        assert_eq!(collect(&mut a).len(), 0);
    }
}
