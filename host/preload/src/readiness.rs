//! What poll and epoll say of a connection on the NIC, as the kernel's tcp_poll would (Linux, net/ipv4/tcp.c).

use crate::tcp::Tcp;
use crate::thread;
use baton_client::Readiness;
use libc::{EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, EPOLLRDHUP, EPOLLRDNORM, EPOLLWRNORM};

/// Bytes that make a connection on the NIC readable: SO_RCVLOWAT, but no more than half of the receive memory, which is what the kernel
/// allows of its own (tcp_set_rcvlowat). More might never come.
pub(crate) fn least(tcp: &Tcp, state: &Readiness) -> u32 {
    tcp.lowat().min(state.receive_memory / 2).max(1)
}

/// Events of a connection on the NIC, as bits of epoll, which are those of poll.
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
    // Writable when a third is free (sk_stream_is_writeable).
    if ended || state.shut || state.room >= (state.send_memory / 3).max(1) {
        events |= EPOLLOUT | EPOLLWRNORM;
    }
    if state.ended.is_some_and(|error| error != 0) {
        events |= EPOLLERR;
    }
    events as u32
}
