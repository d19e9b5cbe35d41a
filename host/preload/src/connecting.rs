//! connect(2) by the NIC (`--offload full`).
//!
//! While the NIC opens a connection its socket is managed like one on the NIC, with nothing to receive and no room to
//! send, so that every way of waiting for it works: the socket becomes writable when the connection is established, and
//! reports an error when it could not be established.

use crate::signals::Mark;
use crate::tcp::Tcp;
use crate::wait::{self, Wait, Want};
use crate::{faults, process};
use crate::{real, sections, thread};
use baton_abi::layout::Owner;
use baton_client::Connection;
use libc::{c_int, sockaddr, socklen_t};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::sync::atomic::Ordering;

/// Reads the program's address. None unless it is a unicast address that the NIC can send to.
pub(crate) fn parse(address: *const sockaddr, length: socklen_t) -> Option<SocketAddr> {
    let length = (length as usize).min(size_of::<libc::sockaddr_in6>());
    let mut storage = [0u64; size_of::<libc::sockaddr_in6>().div_ceil(8)];
    // SAFETY: the words have room for that many bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(storage.as_mut_ptr().cast::<u8>(), length) };
    if length < size_of::<libc::sockaddr_in>() || !faults::read_all(address.cast(), bytes) {
        return None;
    }
    let address = storage.as_ptr().cast::<sockaddr>();
    // SAFETY: a copy of the address; the family comes first, and the length is checked before more is read.
    let parsed: SocketAddr = unsafe {
        match c_int::from((*address).sa_family) {
            libc::AF_INET => {
                let v4 = address.cast::<libc::sockaddr_in>().read_unaligned();
                (Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)), u16::from_be(v4.sin_port)).into()
            }
            libc::AF_INET6 if length >= size_of::<libc::sockaddr_in6>() => {
                let v6 = address.cast::<libc::sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), 0, v6.sin6_scope_id).into()
            }
            _ => return None,
        }
    };
    let ip = parsed.ip().to_canonical();
    let link_local = matches!(ip, std::net::IpAddr::V6(v6) if v6.is_unicast_link_local());
    let reachable = !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast() && !link_local && parsed.port() != 0;
    reachable.then_some(parsed)
}

/// The family of an address. None if the kernel refuses the address before it looks at the socket.
pub(crate) fn family(address: *const sockaddr, length: socklen_t) -> Option<c_int> {
    let mut room = [0u8; size_of::<libc::sockaddr_storage>()];
    let bytes = room.get_mut(..length as usize)?;
    if !faults::read_all(address.cast::<u8>(), bytes) {
        return None;
    }
    let [first, second, ..] = bytes else { return None };
    Some(c_int::from(u16::from_ne_bytes([*first, *second])))
}

/// connect(2) by the NIC. None if the kernel has to do it. As in Linux (__inet_stream_connect), a failed attempt ends
/// when a connect(2) has reported it: with the connection's error, or ECONNABORTED if another call has taken the error.
/// The connect(2) after that begins a new connection.
///
/// # Safety
/// As connect(2).
pub(crate) unsafe fn connect(tcp: &'static Tcp, fd: c_int, address: *const sockaddr, length: socklen_t) -> Option<c_int> {
    if !process::plan().is_some_and(process::Plan::is_full) || tcp.listens() {
        return None;
    }
    // connect(2) with AF_UNSPEC, which ends the connection, succeeds, as in the kernel.
    let dissolves = family(address, length)? == libc::AF_UNSPEC;
    let errno = thread::errno();
    let mut goes_on = libc::EINPROGRESS;
    match tcp.managed() {
        Some((connection, _)) if connection.owner() == Owner::Nic && connection.is_opening() => {
            if dissolves {
                return None;
            }
            goes_on = libc::EALREADY;
        }
        Some((connection, session)) => {
            session.shared.catch_up(thread::token());
            if connection.owner() != Owner::Nic || !connection.was_not_opened() {
                return None;
            }
            let error = take_failure(tcp, connection);
            return (!dissolves).then(|| thread::fail(error) as c_int);
        }
        None => {
            if !tcp.open_by_nic(fd, parse(address, length)?) {
                thread::set_errno(errno);
                return None;
            }
        }
    }
    // SAFETY: F_GETFL takes no pointer.
    if unsafe { real::fcntl(fd, libc::F_GETFL, 0) } & libc::O_NONBLOCK != 0 {
        return Some(thread::fail(goes_on) as c_int);
    }
    let done = match finish(tcp, fd) {
        // SAFETY: this function's `# Safety` is connect(2)'s.
        Err(libc::EINTR) if sections::is_withdrawn() => match unsafe { real::connect(fd, address, length) } {
            -1 if thread::errno() == libc::EISCONN => 0,
            done => done,
        },
        Ok(()) => {
            thread::set_errno(errno);
            0
        }
        // As in Linux, after a time-out the connection attempt continues, and the call reports that.
        Err(libc::EAGAIN) => thread::fail(goes_on) as c_int,
        Err(number) => thread::fail(number) as c_int,
    };
    if done == 0 {
        tcp.connecting.store(false, Ordering::Relaxed);
    }
    Some(done)
}

/// Takes the error of a connection that the NIC could not open, for the connect(2) that reports it. After that the
/// socket can open another connection.
fn take_failure(tcp: &'static Tcp, connection: &Connection) -> c_int {
    let error = connection.take_error();
    tcp.forget_failed();
    if error != 0 { error as c_int } else { libc::ECONNABORTED }
}

/// Waits until a connection is open. Err with errno: EAGAIN after SO_SNDTIMEO.
fn finish(tcp: &'static Tcp, fd: c_int) -> Result<(), c_int> {
    let mut wait = Wait::new(wait::deadline(fd, libc::SO_SNDTIMEO), Mark::now());
    let generation = tcp.generation();
    loop {
        if sections::is_withdrawn() {
            // The library has withdrawn: the caller continues with the kernel's connect(2).
            return Err(libc::EINTR);
        }
        let Some(owner) = tcp.settled_owner() else {
            // `is_left`: this is a child of fork, made by a signal handler meanwhile; the kernel opens the connection
            // for parent and child.
            return Err(if tcp.is_left(generation) { libc::EINTR } else { libc::ECONNABORTED });
        };
        let Some((connection, session)) = tcp.managed() else { continue };
        session.shared.catch_up(thread::token());
        if owner == Owner::Nic {
            let readiness = session.shared.readiness(connection, thread::token());
            if connection.was_not_opened() {
                return Err(take_failure(tcp, connection));
            }
            if readiness.ended.is_some_and(|error| error != 0) {
                return Err(connection.take_error() as c_int);
            }
            if readiness.room > 0 || readiness.fin {
                return Ok(());
            }
        } else {
            // The kernel may be opening the connection instead of the NIC. It is not asked during a move, when the
            // socket is disconnected for a moment and has an error.
            let opened = tcp.undisturbed(|owner| {
                let is_open = owner != Some(Owner::Nic) && wait::reports_now(fd, libc::POLLOUT);
                is_open.then(|| crate::options::kernels(fd, libc::SOL_SOCKET, libc::SO_ERROR).unwrap_or(0))
            });
            match opened {
                Some(0) => return Ok(()),
                Some(error) => return Err(error),
                None => {}
            }
        }
        wait::block(tcp, fd, Want::Send, &mut wait)?;
    }
}
