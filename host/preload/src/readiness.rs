//! Events (poll, epoll) of a connection on the NIC, computed as the kernel's tcp_poll does (Linux, net/ipv4/tcp.c).

use crate::tcp::Tcp;
use crate::thread;
use baton_client::Readiness;
use libc::{EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, EPOLLRDHUP, EPOLLRDNORM, EPOLLWRNORM};

/// Bytes that make a connection on the NIC readable: SO_RCVLOWAT, capped at half of the receive memory as the kernel
/// caps it (tcp_set_rcvlowat), since more might never fit.
pub(crate) fn least(tcp: &Tcp, state: &Readiness) -> u32 {
    tcp.lowat().min(state.receive_memory / 2).max(1)
}

/// Pending events of a connection on the NIC, as epoll bits (equal to poll's).
pub(crate) fn events(tcp: &Tcp) -> u32 {
    let Some((connection, session)) = tcp.managed() else { return 0 };
    let state = session.shared.readiness(connection, thread::token());
    let mut events = 0;
    let ended = state.ended.is_some();
    if ended || state.fin && state.shut {
        events |= EPOLLHUP;
    }
    if ended || state.fin {
        events |= EPOLLIN | EPOLLRDNORM | EPOLLRDHUP;
    }
    if state.unread >= least(tcp, &state) {
        events |= EPOLLIN | EPOLLRDNORM;
    }
    if ended || state.shut || state.is_writable() {
        events |= EPOLLOUT | EPOLLWRNORM;
    }
    if state.ended.is_some_and(|error| error != 0) {
        events |= EPOLLERR;
    }
    events as u32
}
