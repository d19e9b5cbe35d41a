//! Control connections between Baton's processes: messages that may carry descriptors, over Unix sockets that keep
//! message boundaries. They are used in programs with signals of their own: calls that a signal interrupts are
//! repeated.

use crate::events::monotonic_micros;
use crate::foreign::Foreign;
use crate::socket::check_size;
use crate::trust;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Most bytes of a message.
const MAX_MESSAGE: usize = 65536;
/// Most descriptors of a message that these processes send.
pub(crate) const MAX_DESCRIPTORS: usize = 32;

/// Most descriptors of any message (Linux, SCM_MAX_FD). Receivers always provide room for as many: the kernel closes
/// descriptors that do not fit, in the thread that receives the message, and such a close may block.
pub const MOST_RECEIVED: usize = 253;

/// Bytes of a message's ancillary data with so many.
const ANCILLARY: usize = rustix::cmsg_space!(ScmRights(MOST_RECEIVED));

/// Most messages that are dropped of a client that is turned away: more than there is room for in a socket.
const MOST_DROPPED: usize = 1024;

/// Most bytes of a message of [`Channel::ask_briefly`].
const BRIEF: usize = 64;

/// A time limit of zero.
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// One end of a control connection.
#[derive(Debug)]
pub struct Channel {
    fd: OwnedFd,
}

fn unix_socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn unix_address(path: &Path) -> io::Result<SocketAddrUnix> {
    if path.as_os_str().len() > 107 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the socket's path is longer than 107 bytes"));
    }
    Ok(SocketAddrUnix::new(path)?)
}

/// Encodes a message that is sent with this many descriptors.
fn encode<T: Serialize>(message: &T, descriptors: usize) -> io::Result<Vec<u8>> {
    let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
    if bytes.len() > MAX_MESSAGE || descriptors > MAX_DESCRIPTORS {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "control message too long"));
    }
    Ok(bytes)
}

/// Sends any bytes and descriptors on a Unix socket, without waiting.
///
/// # Errors
/// The failed system call's: `WouldBlock` if the other end does not read; `InvalidInput` for more descriptors than a
/// message can carry.
pub fn try_send_bytes(fd: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_bytes(fd, bytes, descriptors, SendFlags::DONTWAIT)
}

fn send_bytes(fd: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
    let mut room = [MaybeUninit::uninit(); ANCILLARY];
    let mut ancillary = SendAncillaryBuffer::new(&mut room);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    let flags = flags | SendFlags::NOSIGNAL;
    retry_on_intr(|| rustix::net::sendmsg(fd, &[IoSlice::new(bytes)], &mut ancillary, flags))?;
    Ok(())
}

fn receive<T: DeserializeOwned, D: From<OwnedFd>>(fd: BorrowedFd<'_>, flags: RecvFlags) -> io::Result<(T, Vec<D>)> {
    let mut bytes = vec![0u8; MAX_MESSAGE];
    let mut room = [MaybeUninit::uninit(); ANCILLARY];
    let mut ancillary = RecvAncillaryBuffer::new(&mut room);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = retry_on_intr(|| {
        rustix::net::recvmsg(fd, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags).map(|got| got.bytes)
    })?;
    // All descriptors are taken, so that none leaks whatever the message contains.
    let descriptors = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    let descriptors: Vec<D> = descriptors.map(D::from).collect();
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((decode(&bytes[..got])?, descriptors))
}

fn is_hung_up(fd: BorrowedFd<'_>) -> bool {
    let mut ends = [PollFd::from_borrowed_fd(fd, PollFlags::empty())];
    let ready = rustix::event::poll(&mut ends, Some(&NOW));
    ready == Ok(1) && ends[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

fn peer_process(fd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut raw = [0u8; 12];
    crate::socket::get_bytes(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut raw)?;
    Ok(u32::from_ne_bytes([raw[0], raw[1], raw[2], raw[3]]))
}

/// The first message in a Unix socket's queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum First {
    Nothing,
    /// A message without descriptors, which may be empty.
    Bytes,
    Descriptors,
}

/// Looks at that without taking it, and without waiting, on a socket with SO_PASSCRED.
fn first(fd: BorrowedFd<'_>) -> io::Result<First> {
    // Each message brings its sender's credentials, which fill this: no descriptor of the message's is made here.
    let mut room = [0u64; 4];
    // SAFETY: null pointers and numbers.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = room.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&room) as _;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the message has no buffer, and room for control data that lives and is as long as it says.
    check_size(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, flags) })?;
    Ok(match (message.msg_flags & libc::MSG_CTRUNC, message.msg_controllen) {
        (0, 0) => First::Nothing,
        (0, _) => First::Bytes,
        _ => First::Descriptors,
    })
}

/// Drops the messages in the queue of a Unix socket to which no process can send any more, up to the first message with
/// descriptors. Returns whether the queue is empty then.
fn drop_messages(fd: BorrowedFd<'_>) -> bool {
    if rustix::net::sockopt::set_socket_passcred(fd, true).is_err() {
        return false;
    }
    for _ in 0..MOST_DROPPED {
        match first(fd) {
            Ok(First::Nothing) => return true,
            Ok(First::Descriptors) => return false,
            Ok(First::Bytes) => _ = rustix::net::recv(fd, &mut [0u8; 1][..], RecvFlags::DONTWAIT),
            // This error comes once, if the other end was closed with unread messages.
            Err(_) => {}
        }
    }
    false
}

/// The message in these bytes.
fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    postcard::from_bytes(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

impl Channel {
    /// Makes two connected ends.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn pair() -> io::Result<(Channel, Channel)> {
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Channel { fd: one }, Channel { fd: other }))
    }

    /// Connects to a listener that belongs to root or to this user. In a user namespace also to a listener outside of
    /// it, if the path shows that no process inside can have put it there.
    ///
    /// # Errors
    /// The failed system call's; `PermissionDenied` for a listener of another user.
    pub fn connect(path: &Path) -> io::Result<Channel> {
        Channel::connect_if_trusted(path, None)
    }

    /// As [`Channel::connect`], but `WouldBlock` if the listener's queue is full for this time.
    ///
    /// # Errors
    /// See there.
    pub fn connect_within(path: &Path, limit: Duration) -> io::Result<Channel> {
        Channel::connect_if_trusted(path, Some(limit))
    }

    fn connect_if_trusted(path: &Path, limit: Option<Duration>) -> io::Result<Channel> {
        let channel = Channel::connect_to_anybody(path, limit)?;
        let peer = channel.peer_user()?;
        if trust::is_known(peer) {
            return Ok(channel);
        }
        let refused = || {
            let text = format!("{} is listened at by user {peer}, who is neither root nor this program's user", path.display());
            io::Error::new(io::ErrorKind::PermissionDenied, text)
        };
        let named = trust::named_from_outside(path, peer).ok().flatten().ok_or_else(refused)?;
        // The listener at the path may have been exchanged since the check.
        let channel = Channel::connect_to_anybody(&named, limit)?;
        if channel.peer_user()? == peer { Ok(channel) } else { Err(refused()) }
    }

    /// Whether a process listens at a path.
    pub fn is_listened_at(path: &Path) -> bool {
        match Channel::try_connect_to_anybody(path) {
            // The queue is full: a process listens, and is slow to accept.
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            Ok(_) => true,
        }
    }

    /// Connects to a listener without checking which user's it is: the caller must send it nothing confidential, and
    /// must not trust its answers. Does not wait for a listener that does not accept.
    ///
    /// # Errors
    /// The failed system call's: `WouldBlock` if the listener's queue is full.
    pub fn try_connect_to_anybody(path: &Path) -> io::Result<Channel> {
        let fd = unix_socket()?;
        // Descriptors would be this process's to close, which may take as long as their sender likes.
        crate::socket::refuse_descriptors(fd.as_fd());
        rustix::io::ioctl_fionbio(&fd, true)?;
        let address = unix_address(path)?;
        retry_on_intr(|| rustix::net::connect(&fd, &address))?;
        rustix::io::ioctl_fionbio(&fd, false)?;
        Ok(Channel { fd })
    }

    fn connect_to_anybody(path: &Path, limit: Option<Duration>) -> io::Result<Channel> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        let fd = unix_socket()?;
        let address = unix_address(path)?;
        set_socket_timeout(&fd, Timeout::Send, limit)?;
        retry_on_intr(|| rustix::net::connect(&fd, &address))?;
        set_socket_timeout(&fd, Timeout::Send, None)?;
        Ok(Channel { fd })
    }

    /// Connects to a listener of [`Listener::bind_name`].
    ///
    /// # Errors
    /// The failed system call's: `ConnectionRefused` if no process listens, `WouldBlock` if the listener's queue is
    /// full.
    pub fn connect_name(name: &str) -> io::Result<Channel> {
        let fd = unix_socket()?;
        rustix::io::ioctl_fionbio(&fd, true)?;
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        retry_on_intr(|| rustix::net::connect(&fd, &address))?;
        rustix::io::ioctl_fionbio(&fd, false)?;
        Ok(Channel { fd })
    }

    /// An end that was inherited or received.
    pub fn from_fd(fd: OwnedFd) -> Channel {
        Channel { fd }
    }

    /// Sends a message and descriptors.
    ///
    /// # Errors
    /// The failed system call's; `InvalidInput` for a message that is too long.
    pub fn send<T: Serialize>(&self, message: &T, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        send_bytes(self.as_fd(), &encode(message, descriptors.len())?, descriptors, SendFlags::empty())
    }

    /// As [`Channel::send`], but `WouldBlock` if the other end does not read.
    ///
    /// # Errors
    /// See there.
    pub fn try_send<T: Serialize>(&self, message: &T, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        try_send_bytes(self.as_fd(), &encode(message, descriptors.len())?, descriptors)
    }

    /// Receives a message and its descriptors, waiting for one.
    ///
    /// # Errors
    /// `UnexpectedEof` when the other end is closed, `InvalidData` for bytes that are no message, else the system's.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<(T, Vec<OwnedFd>)> {
        receive(self.as_fd(), RecvFlags::empty())
    }

    /// As [`Channel::receive`], but `WouldBlock` if none waits.
    ///
    /// # Errors
    /// See there.
    pub fn try_receive<T: DeserializeOwned>(&self) -> io::Result<(T, Vec<OwnedFd>)> {
        receive(self.as_fd(), RecvFlags::DONTWAIT)
    }

    /// As [`Channel::receive`], but fails with `TimedOut` if no message comes within `limit`.
    ///
    /// # Errors
    /// See there.
    pub fn receive_within<T: DeserializeOwned>(&self, limit: Duration) -> io::Result<(T, Vec<OwnedFd>)> {
        self.until(limit, || self.try_receive())
    }

    /// As [`Channel::receive_within`], for a sender that should send no descriptors: descriptors that come with a
    /// message are not taken over. This process would have to close them, and the sender can make such a close take as
    /// long as it likes.
    ///
    /// # Errors
    /// See there.
    pub fn receive_message_within<T: DeserializeOwned>(&self, limit: Duration) -> io::Result<T> {
        self.until(limit, || {
            let mut bytes = vec![0u8; MAX_MESSAGE];
            let flags = RecvFlags::DONTWAIT;
            let got = retry_on_intr(|| rustix::net::recv(&self.fd, &mut bytes[..], flags).map(|(got, _)| got))?;
            if got == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { decode(&bytes[..got]) }
        })
    }

    /// Sends a request with a descriptor, and waits for the answer. Returns whether it is the expected one. Neither is
    /// longer than 64 bytes. Takes no memory of the heap: the caller may be a child of vfork(2).
    ///
    /// # Errors
    /// The failed system call's; `TimedOut` if there is no answer in this time.
    pub fn ask_briefly<Q: Serialize, A: Serialize>(
        &self,
        question: &Q,
        descriptor: BorrowedFd<'_>,
        expected: &A,
        limit: Duration,
    ) -> io::Result<bool> {
        let encoded =
            |error| io::Error::from(if error == postcard::Error::SerializeBufferFull { Errno::MSGSIZE } else { Errno::INVAL });
        let (mut question_room, mut expected_room) = ([0u8; BRIEF], [0u8; BRIEF]);
        let question = postcard::to_slice(question, &mut question_room).map_err(encoded)?;
        let expected = postcard::to_slice(expected, &mut expected_room).map_err(encoded)?;
        try_send_bytes(self.as_fd(), question, &[descriptor])?;
        self.until(limit, || {
            let mut bytes = [0u8; BRIEF];
            let got = retry_on_intr(|| rustix::net::recv(&self.fd, &mut bytes[..], RecvFlags::DONTWAIT).map(|(got, _)| got))?;
            if got == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes[..got] == *expected) }
        })
    }

    fn until<T>(&self, limit: Duration, receive: impl Fn() -> io::Result<T>) -> io::Result<T> {
        let deadline = monotonic_micros().saturating_add(limit.as_micros() as u64);
        loop {
            match receive() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::IN, deadline)?,
                received => return received,
            }
        }
    }

    /// Waits until the other end has sent something or closed (`IN`), or there is room to send (`OUT`).
    fn wait(&self, what: PollFlags, deadline: u64) -> io::Result<()> {
        let left = Duration::from_micros(deadline.saturating_sub(monotonic_micros()));
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let mut ends = [PollFd::new(&self.fd, what)];
        match rustix::event::poll(&mut ends, Some(&left)) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the other end is closed. Messages that were sent before may still wait here.
    pub fn is_hung_up(&self) -> bool {
        is_hung_up(self.as_fd())
    }

    /// User id of the process at the other end, from the kernel.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn peer_user(&self) -> io::Result<u32> {
        crate::socket::peer_user(self.fd.as_fd())
    }

    /// A descriptor of the process at the other end (pidfd), from the kernel: it stands for that process even after
    /// another process has got its number.
    ///
    /// # Errors
    /// The failed system call's: `ENOPROTOOPT` before Linux 6.5.
    pub fn peer_descriptor(&self) -> io::Result<OwnedFd> {
        const SO_PEERPIDFD: i32 = 77;
        let raw = crate::socket::get(self.fd.as_fd(), libc::SOL_SOCKET, SO_PEERPIDFD)?;
        // SAFETY: the kernel has just made this descriptor for this process.
        Ok(unsafe { OwnedFd::from_raw_fd(raw) })
    }

    /// Process id at the other end, from the kernel.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn peer_process(&self) -> io::Result<u32> {
        peer_process(self.as_fd())
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Channel> for OwnedFd {
    fn from(channel: Channel) -> OwnedFd {
        channel.fd
    }
}

/// One end of a control connection whose other end may belong to any user.
///
/// Any message may bring descriptors, and descriptors that were not received are closed with the connection, which may
/// block. So the connection is a [`Foreign`], and each descriptor that it brings is one, too.
#[derive(Debug)]
pub struct PeerChannel {
    fd: Foreign,
}

impl PeerChannel {
    /// An end that another user's process has sent, or that the keeper holds.
    ///
    /// # Errors
    /// `InvalidInput` if it is no Unix socket.
    pub fn from_foreign(fd: Foreign) -> io::Result<PeerChannel> {
        Ok(PeerChannel { fd: fd.into_unix()? })
    }

    /// As [`Channel::send`].
    ///
    /// # Errors
    /// See there.
    pub fn send<T: Serialize>(&self, message: &T, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        send_bytes(self.as_fd(), &encode(message, descriptors.len())?, descriptors, SendFlags::empty())
    }

    /// As [`Channel::try_send`].
    ///
    /// # Errors
    /// See there.
    pub fn try_send<T: Serialize>(&self, message: &T, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        try_send_bytes(self.as_fd(), &encode(message, descriptors.len())?, descriptors)
    }

    /// As [`Channel::try_receive`]: descriptors that do not belong to a message are not closed by this thread either,
    /// if that may wait.
    ///
    /// # Errors
    /// See there.
    pub fn try_receive_foreign<T: DeserializeOwned>(&self) -> io::Result<(T, Vec<Foreign>)> {
        receive(self.as_fd(), RecvFlags::DONTWAIT)
    }

    /// User id of the process at the other end, from the kernel.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn peer_user(&self) -> io::Result<u32> {
        crate::socket::peer_user(self.as_fd())
    }

    /// Process id at the other end, from the kernel.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn peer_process(&self) -> io::Result<u32> {
        peer_process(self.as_fd())
    }

    /// Ends the connection, also for other processes that have a descriptor of this end. The process at the other end
    /// sees that at once, however long closing takes, and can still receive messages that were sent before.
    pub fn end(self) {
        self.shut();
    }

    fn shut(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// As [`PeerChannel::end`], for a client that is not served, or not any more. Messages that it sent and that were
    /// not received are dropped. If they bring no descriptors, closing cannot block and happens at once: so any number
    /// of such connections takes no descriptor of this process, even while another connection of the same user does not
    /// close. A connection with unreceived descriptors waits to be closed. Until then they count as descriptors in
    /// flight, of which Linux allows a user as many as open files.
    pub fn turn_away(self) {
        self.shut();
        if drop_messages(self.as_fd()) {
            self.fd.close_here();
        }
    }
}

impl From<Channel> for PeerChannel {
    fn from(channel: Channel) -> PeerChannel {
        PeerChannel { fd: Foreign::own_end(channel.fd) }
    }
}

impl AsFd for PeerChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A listener for control connections. Dropping it removes its path, and connecting to it fails from then on.
#[derive(Debug)]
pub struct Listener {
    /// Clients that were not accepted may have sent descriptors, which are closed with the listener.
    fd: Foreign,
    /// None for a listener at an abstract name.
    path: Option<std::path::PathBuf>,
    /// Closed for a moment when this process has no other descriptor left, to turn a client away.
    spare: Mutex<Option<OwnedFd>>,
}

/// A descriptor that is kept in reserve.
fn spare() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").ok().map(Into::into)
}

impl Listener {
    /// Listens at a path that must not exist, or be a socket without a listener.
    ///
    /// # Errors
    /// `AddrInUse` if another process listens there, `AlreadyExists` if the path is something other than a socket, else
    /// the system's.
    pub fn bind(path: &Path) -> io::Result<Listener> {
        if let Ok(there) = std::fs::metadata(path) {
            if !there.file_type().is_socket() {
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, "what is there already is no socket"));
            }
            if Channel::is_listened_at(path) {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("another agent listens at {}", path.display())));
            }
            std::fs::remove_file(path)?;
        }
        let fd = unix_socket()?;
        rustix::net::bind(&fd, &unix_address(path)?)?;
        // Any process that can reach the path may connect: a program that changes its user keeps its connections. What
        // a client may do depends on what it sends.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
        rustix::net::listen(&fd, 64)?;
        Ok(Listener { fd: Foreign::own_end(fd), path: Some(path.to_owned()), spare: Mutex::new(spare()) })
    }

    /// Listens at an abstract name of the network namespace, without a file. So the name is free again as soon as the
    /// process has ended, however it ends.
    ///
    /// # Errors
    /// `AddrInUse` if another process listens there, else the system's.
    pub fn bind_name(name: &str) -> io::Result<Listener> {
        let fd = unix_socket()?;
        rustix::net::bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        rustix::net::listen(&fd, 64)?;
        Ok(Listener { fd: Foreign::own_end(fd), path: None, spare: Mutex::new(spare()) })
    }

    /// Refuses descriptors from all clients that connect from now on, if this kernel can.
    #[must_use]
    pub fn without_descriptors(self) -> Listener {
        crate::socket::refuse_descriptors(self.fd.as_fd());
        self
    }

    /// Waits for the next connection and accepts it. If this process has no descriptor left, the connection is closed
    /// instead, and an error returned.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn accept(&self) -> io::Result<PeerChannel> {
        let mut kept = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        // When this was tried after the last client was turned away, that client's connection may not have been closed
        // yet.
        if kept.is_none() {
            *kept = spare();
        }
        let accepted = self.accept_one();
        if matches!(accepted, Err(Errno::MFILE | Errno::NFILE)) {
            *kept = None;
            if let Ok(client) = self.accept_one() {
                client.turn_away();
            }
            *kept = spare();
        }
        Ok(accepted?)
    }

    fn accept_one(&self) -> Result<PeerChannel, Errno> {
        let accepted = retry_on_intr(|| rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC))?;
        Ok(PeerChannel { fd: Foreign::own_end(accepted) })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Another process's descriptor of a [`Listener`].
#[derive(Debug)]
pub struct Listening(Foreign);

impl Listening {
    /// The listener's, which its process has sent.
    ///
    /// # Errors
    /// `InvalidInput` if it is no Unix socket.
    pub fn from_foreign(fd: Foreign) -> io::Result<Listening> {
        Ok(Listening(fd.into_unix()?))
    }

    /// Turns away all clients that have connected or still connect, even if the process that has the listener takes a
    /// while to end.
    pub fn end(self) {
        turn_away(self.0.as_fd());
    }
}

/// Ends a listener for clients that connect later, and for clients that have connected and were not accepted: these
/// would wait until its last descriptor is closed.
fn turn_away(listener: BorrowedFd<'_>) {
    let _ = rustix::net::shutdown(listener, Shutdown::Both);
    // No client can connect any more, so this loop ends.
    while let Ok(client) = retry_on_intr(|| rustix::net::accept_with(listener, SocketFlags::CLOEXEC)) {
        PeerChannel { fd: Foreign::own_end(client) }.end();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Its descriptor is closed a moment later.
        turn_away(self.fd.as_fd());
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    /// Descriptors for which there is no room would be closed by the kernel, in the thread that receives the message.
    #[test]
    fn every_descriptor_of_a_message_is_received() {
        let (ours, theirs) = Channel::pair().expect("two sockets");
        let ours = PeerChannel::from(ours);
        let file = std::fs::File::open("/dev/null").expect("a file");
        let descriptors = [file.as_fd(); MOST_RECEIVED];
        try_send_bytes(theirs.as_fd(), &[7], &descriptors).expect("sent");
        let (number, received) = ours.try_receive_foreign::<u8>().expect("a message");
        assert_eq!((number, received.len()), (7, MOST_RECEIVED));
    }

    /// Another descriptor of the listener stays open, as if its process could not end.
    #[test]
    fn who_was_not_accepted_sees_the_end_of_a_listener() {
        let name = |way: &str| format!("baton-control-{way}-{}", std::process::id());
        let client = |name: &str| {
            let client = Channel::connect_name(name).expect("a client");
            client.send(&1u8, &[]).expect("room");
            client
        };
        let listeners = ["dropped", "ended"].map(|way| Listener::bind_name(&name(way)).expect("a listener"));
        let clients = ["dropped", "ended"].map(|way| client(&name(way)));
        let others = listeners.each_ref().map(|listener| listener.as_fd().try_clone_to_owned().expect("a descriptor"));
        let [dropped, _ended] = listeners;
        let [_kept, other] = others;
        drop(dropped);
        Listening::from_foreign(other.into()).expect("a Unix socket").end();
        for (client, way) in clients.iter().zip(["dropped", "ended"]) {
            let error = client.receive_message_within::<u8>(Duration::from_secs(60)).expect_err("nobody answers");
            assert_ne!(error.kind(), io::ErrorKind::TimedOut, "{way}: {error}");
            assert!(Channel::connect_name(&name(way)).is_err(), "{way}: somebody listens");
        }
    }

    /// A client that was not accepted has sent a socket that lingers for a thousand seconds.
    #[test]
    fn a_listener_ends_whatever_its_clients_have_sent() {
        let tcp = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let ours = TcpStream::connect(tcp.local_addr().expect("an address")).expect("a connection");
        let (mut theirs, _) = tcp.accept().expect("a connection");
        ours.set_nonblocking(true).expect("a socket");
        while (&ours).write(&[7; 65536]).is_ok() {}
        let linger = [1i32.to_ne_bytes(), 1000i32.to_ne_bytes()].concat();
        crate::socket::set_bytes(ours.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &linger).expect("SO_LINGER");
        let name = format!("baton-control-{}", std::process::id());
        let listener = Listener::bind_name(&name).expect("a listener");
        let client = Channel::connect_name(&name).expect("a client");
        client.send(&1u8, &[ours.as_fd()]).expect("room");
        drop(ours);
        let begun = monotonic_micros();
        drop(listener);
        let took = Duration::from_micros(monotonic_micros() - begun);
        assert!(took < Duration::from_secs(10), "dropping it took {took:?}");
        assert!(Channel::connect_name(&name).is_err(), "somebody listens");
        theirs.set_read_timeout(Some(Duration::from_secs(60))).expect("a time-out");
        let mut bytes = Vec::new();
        theirs.read_to_end(&mut bytes).expect("everything, and the end");
        assert!(!bytes.is_empty() && bytes.iter().all(|byte| *byte == 7));
    }
}
