//! The shell: the kernel's socket while the NIC owns its connection. It is established and empty, on the same
//! descriptor; a filter drops all that it receives, and no timer makes it send.

use baton_linux::socket::{self, check};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

const TCP_REPAIR: i32 = 19;
const TCP_REPAIR_QUEUE: i32 = 20;
const TCP_QUEUE_SEQ: i32 = 21;
const IP_LOCAL_PORT_RANGE: i32 = 51;
const IP_PROTOCOL: i32 = 52;

/// The queues of repair mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub(crate) enum Queue {
    None = 0,
    Receive = 1,
    Send = 2,
}

pub(crate) fn repair(fd: BorrowedFd<'_>) -> io::Result<()> {
    socket::set(fd, libc::IPPROTO_TCP, TCP_REPAIR, 1)
}

/// How repair mode is left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leave {
    /// The kernel probes the peer's window, if the connection is established: the peer gets an acknowledgement and
    /// sends one.
    Probing,
    Silently,
}

/// Leaves repair mode and restores SO_REUSEADDR, which the kernel clears then. Until it is restored nobody can listen
/// on the connection's port. With [`Leave::Probing`] that lasts longer: the call returns after the window probe has
/// been sent, and received if the peer is on this machine.
pub(crate) fn leave_repair(fd: BorrowedFd<'_>, how: Leave, reuse: i32) -> io::Result<()> {
    let value = match how {
        Leave::Probing => 0,
        Leave::Silently => -1,
    };
    socket::set(fd, libc::IPPROTO_TCP, TCP_REPAIR, value)?;
    socket::set(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, reuse)
}

/// The program's SO_REUSEADDR, 0 or 1. In repair mode the kernel shows 2.
fn reuse_of(fd: BorrowedFd<'_>) -> io::Result<i32> {
    socket::get(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR).map(|reuse| reuse.min(1))
}

pub(crate) fn select(fd: BorrowedFd<'_>, queue: Queue) -> io::Result<()> {
    socket::set(fd, libc::IPPROTO_TCP, TCP_REPAIR_QUEUE, queue as i32)
}

pub(crate) fn queue_seq(fd: BorrowedFd<'_>) -> io::Result<u32> {
    socket::get(fd, libc::IPPROTO_TCP, TCP_QUEUE_SEQ).map(|seq| seq as u32)
}

pub(crate) fn set_queue_seq(fd: BorrowedFd<'_>, queue: Queue, seq: u32) -> io::Result<()> {
    select(fd, queue)?;
    socket::set(fd, libc::IPPROTO_TCP, TCP_QUEUE_SEQ, seq as i32)
}

/// Options that a disconnect resets: SO_PEEK_OFF, TCP_WINDOW_CLAMP, TCP_RTO_MIN_US, TCP_DELACK_MAX_US.
const FORGOTTEN: [(i32, i32); 4] = [(1, 42), (6, 10), (6, 45), (6, 46)];

/// Settings that a move changes on the socket temporarily, and must put back.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Saved {
    /// SO_REUSEADDR, which repair mode forces.
    reuse: i32,
    /// SO_KEEPALIVE, off on a shell.
    keepalive: i32,
    /// TCP_CORK, which the program sets for the NIC only while that has the connection.
    cork: i32,
    /// The program's own socket filter, as raw instructions.
    filter: Vec<u8>,
    /// Options that a disconnect resets: level, option, value.
    forgotten: Vec<(i32, i32, i32)>,
}

impl Saved {
    /// Reads the settings before a move.
    ///
    /// # Errors
    /// The failed system call's; a filter that cannot be read is one.
    pub fn read(fd: BorrowedFd<'_>) -> io::Result<Saved> {
        Ok(Saved {
            reuse: socket::get(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR)?,
            keepalive: socket::get(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE)?,
            cork: socket::get(fd, libc::IPPROTO_TCP, libc::TCP_CORK)?,
            filter: read_filter(fd)?,
            forgotten: FORGOTTEN
                .iter()
                .filter_map(|(level, option)| Some((*level, *option, socket::get(fd, *level, *option).ok()?)))
                .collect(),
        })
    }

    /// Whether it can have been read from a socket: it names no options but those that a disconnect resets. What lies
    /// in shared memory may have been changed there.
    pub fn is_plausible(&self) -> bool {
        self.forgotten.iter().all(|(level, option, _)| FORGOTTEN.contains(&(*level, *option)))
    }

    /// Whether the program wants keep-alive probes.
    pub fn keepalive(&self) -> bool {
        self.keepalive != 0
    }

    /// Whether the socket is corked.
    pub fn cork(&self) -> bool {
        self.cork != 0
    }

    /// A copy with other values of SO_KEEPALIVE and TCP_CORK: the program may have set them while the NIC had the
    /// connection.
    #[must_use]
    pub fn with_programs(&self, keepalive: bool, cork: bool) -> Saved {
        Saved { keepalive: i32::from(keepalive), cork: i32::from(cork), ..self.clone() }
    }

    /// A copy with the shell's SO_REUSEADDR: the program may have set it while the NIC had the connection. Two values
    /// are not the program's: repair mode's own, 2, and that of a socket outside repair mode, which has lost it.
    #[must_use]
    pub(crate) fn with_reuse_of_shell(&self, fd: BorrowedFd<'_>) -> Saved {
        let in_repair = socket::get(fd, libc::IPPROTO_TCP, TCP_REPAIR).is_ok_and(|repair| repair == 1);
        match socket::get(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR) {
            Ok(reuse @ 0..=1) if in_repair => Saved { reuse, ..self.clone() },
            _ => self.clone(),
        }
    }

    /// Puts back what a disconnect has reset. Values that did not change are not set.
    pub(crate) fn remember(&self, fd: BorrowedFd<'_>) {
        for (level, option, value) in &self.forgotten {
            if socket::get(fd, *level, *option).is_ok_and(|now| now != *value) {
                // Values that the kernel returned can be set; if one cannot, the default remains.
                let _ = socket::set(fd, *level, *option, *value);
            }
        }
    }

    /// Puts SO_REUSEADDR back, also on a shell, which stays in repair mode.
    pub(crate) fn write_reuse(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        socket::set(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, self.reuse)
    }

    /// Leaves repair mode and puts the settings back, except the filter, which [`unblock_input`] puts back.
    ///
    /// # Errors
    /// The failed system call's.
    pub(crate) fn leave_repair(&self, fd: BorrowedFd<'_>, how: Leave) -> io::Result<()> {
        leave_repair(fd, how, self.reuse)?;
        if socket::get(fd, libc::IPPROTO_TCP, libc::TCP_CORK)? != self.cork {
            socket::set(fd, libc::IPPROTO_TCP, libc::TCP_CORK, self.cork)?;
        }
        socket::set(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, self.keepalive)
    }
}

/// SO_GET_FILTER counts in instructions of eight bytes.
pub(crate) fn read_filter(fd: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut count: libc::socklen_t = 0;
    // SAFETY: with length 0 the call only returns the count.
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, std::ptr::null_mut(), &mut count)
    })?;
    if count == 0 {
        return Ok(Vec::new());
    }
    let mut filter = vec![0u8; count as usize * 8];
    // SAFETY: the buffer holds `count` instructions.
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, filter.as_mut_ptr().cast(), &mut count)
    })?;
    Ok(filter)
}

fn attach_filter(fd: BorrowedFd<'_>, instructions: &mut [libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: instructions.len() as u16, filter: instructions.as_mut_ptr() };
    // SAFETY: sock_fprog points at live instructions; the kernel copies them.
    let done = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    check(done).map(|_| ())
}

/// Blocks a socket's input: a filter drops every segment before TCP sees it.
///
/// # Errors
/// The failed system call's.
pub fn block_input(fd: BorrowedFd<'_>) -> io::Result<()> {
    // BPF_RET | BPF_K, 0.
    attach_filter(fd, &mut [libc::sock_filter { code: 6, jt: 0, jf: 0, k: 0 }])
}

/// Undoes [`block_input`]: puts the program's own filter back, or none.
///
/// # Errors
/// The failed system call's.
pub(crate) fn unblock_input(fd: BorrowedFd<'_>, saved: &Saved) -> io::Result<()> {
    if saved.filter.is_empty() {
        return match socket::set(fd, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, 0) {
            // It has no filter already.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other,
        };
    }
    let mut instructions: Vec<libc::sock_filter> = saved
        .filter
        .chunks_exact(8)
        .map(|raw| libc::sock_filter {
            code: u16::from_ne_bytes([raw[0], raw[1]]),
            jt: raw[2],
            jf: raw[3],
            k: u32::from_ne_bytes([raw[4], raw[5], raw[6], raw[7]]),
        })
        .collect();
    attach_filter(fd, &mut instructions)
}

/// Makes an unconnected socket the shell of a connection that the NIC has made, which has sent and received nothing
/// yet. `snd` and `rcv` are the next sequence numbers of both directions. Returns what must be put back when the
/// connection moves to the kernel.
///
/// # Errors
/// The failed system call's; `EADDRNOTAVAIL` if the kernel has a connection with the same 4-tuple, or waits one out
/// (TIME-WAIT).
pub fn make(fd: BorrowedFd<'_>, local: SocketAddr, peer: SocketAddr, snd: u32, rcv: u32) -> io::Result<Saved> {
    let saved = Saved::read(fd)?;
    if saved.keepalive() {
        socket::set(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 0)?;
    }
    block_input(fd)?;
    repair(fd)?;
    set_queue_seq(fd, Queue::Send, snd)?;
    set_queue_seq(fd, Queue::Receive, rcv)?;
    if socket::local_address(fd)? != local {
        socket::bind(fd, local)?;
    }
    socket::connect(fd, peer)?;
    select(fd, Queue::None)?;
    saved.write_reuse(fd)?;
    Ok(saved)
}

/// What a connection begins anew with when it is made without a handshake.
#[derive(Clone, Copy)]
pub(crate) struct Beginning {
    /// Next sequence numbers of both directions.
    pub snd: u32,
    pub rcv: u32,
    /// Whether its windows are scaled (RFC 7323 section 2).
    pub scaled: bool,
}

/// Dissolves the association and makes it anew from the beginning given, with empty queues. In repair mode, so nothing
/// is sent. `mss` is the peer's MSS option, if the segment size has to be worked out from it now.
///
/// # Errors
/// The failed system call's. The socket may then be closed: the caller checked route and source address before.
pub(crate) fn reassociate(
    fd: BorrowedFd<'_>,
    local: SocketAddr,
    peer: SocketAddr,
    beginning: Beginning,
    mss: Option<u16>,
) -> io::Result<()> {
    let segment = socket::get(fd, libc::IPPROTO_TCP, libc::TCP_MAXSEG)?;
    dissolve(fd, beginning)?;
    // While closed, the socket returns the limit that the program has set, if any.
    let shown = socket::get(fd, libc::IPPROTO_TCP, libc::TCP_MAXSEG)?;
    let limit = if shown == segment { 0 } else { shown };
    if let Some(mss) = mss {
        // TCP_MAXSEG takes no less and no more than this (Linux, TCP_MIN_MSS and MAX_TCP_WINDOW), though a peer may
        // take less, and loopback has larger segments.
        socket::set(fd, libc::IPPROTO_TCP, libc::TCP_MAXSEG, i32::from(mss.clamp(88, 32_767)))?;
    }
    // getsockname shows the port even if the socket no longer holds it; this shows the port that it holds.
    let kept_port = socket::get(fd, libc::IPPROTO_IP, IP_PROTOCOL).is_ok_and(|port| port == i32::from(local.port()));
    if kept_port || !connect_without_binding(fd, local, peer)? {
        if !kept_port {
            // The port belongs to a listener (an accepted connection): share it.
            dissolve(fd, beginning)?;
            socket::bind(fd, local)?;
        }
        socket::connect(fd, peer)?;
        if socket::local_address(fd)? != local {
            return Err(io::Error::from_raw_os_error(libc::EADDRNOTAVAIL));
        }
    }
    if mss.is_some() {
        socket::set(fd, libc::IPPROTO_TCP, libc::TCP_MAXSEG, limit)?;
    }
    select(fd, Queue::None)
}

/// Makes the kernel send an acknowledgement now, with its SACK blocks: it probes the peer's window when it leaves
/// repair mode. The program must be kept out of the connection meanwhile: in repair mode its calls would fail.
///
/// # Errors
/// The failed system call's.
pub fn acknowledge(fd: BorrowedFd<'_>) -> io::Result<()> {
    let reuse = reuse_of(fd)?;
    repair(fd)?;
    leave_repair(fd, Leave::Probing, reuse)
}

/// Takes a shell out of repair mode, in which a close leaves no trace. An observer of its state can then see whether it
/// was closed in order or reset. Somebody else must keep what it sends from leaving.
///
/// # Errors
/// The failed system call's.
pub fn show_closing(fd: BorrowedFd<'_>) -> io::Result<()> {
    leave_repair(fd, Leave::Silently, reuse_of(fd)?)
}

/// Closes the shell of a connection that has ended on the NIC, without sending anything: nothing is sent either when
/// its descriptor is closed.
///
/// # Errors
/// The failed system call's.
pub fn end(fd: BorrowedFd<'_>) -> io::Result<()> {
    let reuse = reuse_of(fd)?;
    repair(fd)?;
    socket::disconnect(fd)?;
    leave_repair(fd, Leave::Silently, reuse)
}

/// Tries the connect(2) that a move makes, on a socket that is good for nothing else: nothing is sent, and it is
/// unconnected again afterwards.
///
/// # Errors
/// The failed system call's; `EACCES` if a BPF program has the socket connect to somebody else.
pub fn try_connecting(probe: BorrowedFd<'_>, peer: SocketAddr) -> io::Result<()> {
    repair(probe)?;
    let connected = socket::connect(probe, peer).and_then(|()| match socket::peer_address(probe)? == peer {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EACCES)),
    });
    socket::disconnect(probe)?;
    connected
}

fn dissolve(fd: BorrowedFd<'_>, beginning: Beginning) -> io::Result<()> {
    socket::disconnect(fd)?;
    if !beginning.scaled {
        // The kernel chooses the shift of its windows when it connects, and only a handshake would show it
        // that the peer does not scale: with a window of 64 KB at most it chooses none.
        socket::set(fd, libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, i32::from(u16::MAX))?;
    }
    set_queue_seq(fd, Queue::Send, beginning.snd)?;
    set_queue_seq(fd, Queue::Receive, beginning.rcv)
}

/// Connects without binding, so that a port that the program did not bind stays one that connections to other peers may
/// share. Returns whether that gave the right port: one outside the host's ephemeral range cannot be had this way.
fn connect_without_binding(fd: BorrowedFd<'_>, local: SocketAddr, peer: SocketAddr) -> io::Result<bool> {
    let port = i32::from(local.port());
    if socket::set(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, port << 16 | port).is_err() {
        return Ok(false);
    }
    let connected = socket::connect(fd, peer);
    let _ = socket::set(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, 0);
    Ok(connected.is_ok() && socket::local_address(fd)? == local)
}
