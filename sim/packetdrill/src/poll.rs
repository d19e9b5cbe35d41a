//! Readiness: poll, and what epoll asks of a socket.

use crate::errors::{Answer, Attempt};
use crate::socket::{Kind, Socket};
use crate::world::World;
use baton_tcp::State;

const IN: i16 = libc::POLLIN | libc::POLLRDNORM;
const OUT: i16 = libc::POLLOUT | libc::POLLWRNORM;

impl Socket {
    /// The events that hold now (Linux's tcp_poll). `lowat` is the namespace's tcp_notsent_lowat.
    pub fn events(&mut self, lowat: u32) -> i16 {
        let error = if self.error != 0 || !self.errors.is_empty() { libc::POLLERR } else { 0 };
        let shut_read = self.shut_read;
        let stream = match &self.kind {
            Kind::Fresh => return error | libc::POLLOUT | libc::POLLWRNORM | libc::POLLHUP,
            Kind::Listener(listener) => return error | if listener.queue.is_empty() { 0 } else { IN },
            Kind::Stream(stream) => stream,
        };
        let state = stream.tcp.state();
        let closed = state == State::Closed;
        let shut_in = shut_read || stream.tcp.fin_received() || closed;
        let shut_out = stream.tcp.fin_queued() || closed;
        let mut events = error;
        if shut_in && shut_out {
            events |= libc::POLLHUP;
        }
        if shut_in {
            events |= IN | libc::POLLRDHUP;
        }
        if state == State::SynSent || state == State::SynReceived && !stream.queued {
            return events;
        }
        if stream.tcp.readable() > 0 {
            events |= IN;
        }
        if shut_out || self.is_writable(lowat) {
            events |= OUT;
        } else {
            self.no_space = true;
        }
        events
    }
}

impl World {
    /// The events of a descriptor.
    pub fn events_of(&mut self, fd: i32) -> Answer<i16> {
        let lowat = self.sysctls.notsent_lowat;
        let id = self.socket_of(fd)?;
        if self.deferred(id).is_some() {
            return Ok(OUT);
        }
        Ok(self.socket(id)?.events(lowat))
    }

    /// poll(): the number of descriptors with events. `timeout` is in milliseconds, negative for ever.
    pub fn poll(&mut self, wanted: &[(i32, i16)], found: &mut [i16], timeout: i32, since: u64) -> Attempt<usize> {
        let mut ready = 0;
        for (at, (fd, events)) in wanted.iter().enumerate() {
            let always = libc::POLLERR | libc::POLLHUP;
            found[at] = match self.events_of(*fd) {
                Ok(all) => all & (events | always),
                Err(_) => libc::POLLNVAL,
            };
            ready += usize::from(found[at] != 0);
        }
        let deadline = (timeout >= 0).then(|| since + timeout as u64 * 1000);
        if ready > 0 || deadline.is_some_and(|deadline| self.now >= deadline) {
            return Attempt::Done(Ok(ready));
        }
        Attempt::Blocked(deadline)
    }
}
