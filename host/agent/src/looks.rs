//! Polls state of which the kernel sends no notification, while connections are on the NIC: options that a program set on its
//! socket without the library's knowledge, segments that arrived where the NIC does not receive (at the shell, whose input is blocked), and route
//! exceptions, which ICMP messages of too big packets create.

use crate::agent::Agent;
use crate::connection::{Connection, OnNic, Wants};
use crate::ground::Shape;
use baton_abi::Cid;
use baton_linux::diagnosis;
use baton_linux::events::monotonic_micros;
use baton_linux::netlink::Netlink;
use baton_linux::{route::Routing, rtnetlink, socket};
use baton_moves::Event;
use std::collections::HashSet;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::Duration;

/// Polling period, in microseconds.
const PERIOD: u64 = 200_000;
/// Connections polled at a time; the others follow in the next period. And connections of which it is found out whether they are idle,
/// which needs no system call.
const MOST: usize = 256;
const MOST_IDLE: usize = 1024;
/// Connections whose pages are returned in one period: each stands still for a moment, and the agent is busy for as long.
const MOST_RETURNED: usize = 32;
/// Time after a handoff during which segments that the kernel had already may still reach the shell, in microseconds.
const SETTLING: u64 = 100_000;
/// Time that the kernel is given to make a route exception of a message that was received, in microseconds.
const SOON: u64 = 5_000;
/// Destinations whose routes are looked up one by one; if there are more, all are.
const MOST_DESTINATIONS: usize = 64;

/// Times of the next polls, and what they cover.
#[derive(Default)]
pub(crate) struct Looks {
    /// Time of the next poll, in microseconds of the monotonic clock; 0 while nothing is on the NIC.
    due: u64,
    /// Whether there are devices at which the kernel may receive and the NIC does not.
    pub passed_by: bool,
    /// Session and connection at which the next poll begins.
    from: (u32, u32),
    /// The same for idle connections. The next period goes on behind the last one whose pages were returned, however many wait.
    idle_from: (u32, u32),
    /// Destinations for which packets were too big, and the time at which their routes are looked up.
    destinations: HashSet<IpAddr>,
    routes_due: u64,
    /// Ways of sessions for messages are to be looked up again.
    pub hosts: bool,
}

impl Looks {
    /// Time until the next poll. None if nothing is on the NIC.
    pub fn wait(&self) -> Option<Duration> {
        if self.hosts {
            return Some(Duration::ZERO);
        }
        let due = [self.due, self.routes_due].into_iter().filter(|due| *due != 0).min()?;
        Some(Duration::from_micros(due.saturating_sub(monotonic_micros())))
    }

    /// Starts polling when a connection moves to the NIC. True if it is the first.
    pub fn begin(&mut self) -> bool {
        let first = self.due == 0;
        if first {
            self.due = monotonic_micros() + PERIOD;
        }
        first
    }
}

/// State of a shell, read from the kernel.
struct Shown {
    routing: Routing,
    /// Segments that the socket dropped.
    dropped: u32,
}

fn shown(connection: &Connection, netlink: &Netlink) -> Option<Shown> {
    const SOL_SOCKET: i32 = 1;
    const SO_MEMINFO: i32 = 55;
    const DROPS: usize = 8;
    let Some(fd) = &connection.fd else {
        let (routing, dropped) = diagnosis::routing_and_drops(netlink, &connection.flow).ok()?;
        return Some(Shown { routing, dropped });
    };
    let mut memory = [0u8; 4 * (DROPS + 1)];
    let length = socket::get_bytes(fd.as_fd(), SOL_SOCKET, SO_MEMINFO, &mut memory).ok()?;
    let dropped = memory.get(4 * DROPS..length)?.try_into().ok().map(u32::from_ne_bytes)?;
    let routing = Routing::of(fd.as_fd(), connection.flow.is_v4(), connection.peer()).ok()?;
    Some(Shown { routing, dropped })
}

/// Why a connection has to leave the NIC, if it has, and whether it then stays in the kernel for good.
fn judge(connection: &mut OnNic, strays: bool, shown: &Shown) -> Option<(&'static str, bool)> {
    let way = connection.way.as_ref()?;
    let (was, is) = (way.routing, shown.routing);
    if (was.mark, was.device, was.user) != (is.mark, is.device, is.user) {
        return Some(("its program has set an option by which it is routed (SO_MARK, SO_BINDTODEVICE)", false));
    }
    if !strays {
        return None;
    }
    if !std::mem::replace(&mut connection.polled, true) {
        connection.dropped = shown.dropped;
    }
    (connection.dropped != shown.dropped)
        .then_some(("segments of its peer come by a device at which the NIC does not hear", true))
}

impl Agent {
    /// Runs the polls that are due.
    pub(crate) fn look(&mut self) {
        let now = monotonic_micros();
        if std::mem::take(&mut self.looks.hosts) {
            self.looks.hosts = self.follow_next_hosts();
        }
        if self.looks.routes_due != 0 && now >= self.looks.routes_due {
            self.looks.routes_due = 0;
            self.known.discard();
            let destinations = std::mem::take(&mut self.looks.destinations);
            let all = destinations.len() > MOST_DESTINATIONS;
            self.follow_ways(|connection| all || destinations.contains(&connection.peer().ip().to_canonical()));
        }
        if self.looks.due == 0 || now < self.looks.due {
            return;
        }
        if self.guards.legacy_appeared() {
            self.known.discard();
            self.follow_ways(|_| true);
            self.follow_hosts(|_| true);
        }
        let turn = self.next_on_nic(self.looks.from, MOST);
        self.looks.due = if turn.is_empty() { 0 } else { now + PERIOD };
        for (session, number) in turn {
            self.looks.from = (session, number + 1);
            self.look_at(session, number);
        }
        self.return_idle_pages(now);
    }

    /// Returns the pages of the next connections that are idle.
    fn return_idle_pages(&mut self, now: u64) {
        let mut left = MOST_RETURNED;
        for (session, number) in self.next_on_nic(self.looks.idle_from, MOST_IDLE) {
            if left == 0 {
                break;
            }
            self.looks.idle_from = (session, number + 1);
            left -= usize::from(self.return_pages_if_idle(session, number, now));
        }
    }

    /// Determines again whether there are devices at which the NIC does not receive.
    pub(crate) fn find_devices_without_nic(&mut self) {
        let links = rtnetlink::links(&self.routes).unwrap_or_default();
        self.looks.passed_by = links.iter().any(|link| match &self.shape {
            Shape::Inline { interface } => link.up && link.kind != rtnetlink::LOOPBACK && link.index != *interface,
            Shape::Beside { devices, .. } => devices.passes_nic_by(link),
        });
    }

    /// Polls one connection.
    fn look_at(&mut self, session: u32, number: u32) {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        let Some(shown) = shown(connection, &self.diagnosis) else { return };
        // Beside the kernel, datagrams reassembled from fragments reach the shell, too: they mean nothing where the NIC receives
        // at all devices.
        let strays = self.looks.passed_by && monotonic_micros().saturating_sub(connection.since) > SETTLING;
        let Some(on_nic) = connection.running() else { return };
        if let Some((why, for_good)) = judge(on_nic, strays, &shown) {
            connection.stays |= for_good;
            self.return_soon(session, number, why);
        }
    }

    /// Returns the pages of one connection if it is idle. Returns whether it is.
    fn return_pages_if_idle(&mut self, session: u32, number: u32, now: u64) -> bool {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return false };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return false };
        let Some(hardware) = self.hardware.get(connection.cid.map_or(0, Cid::nic)) else { return false };
        if !connection.is_idle(&hardware.memory, now) {
            return false;
        }
        connection.extra().wants = Wants::NoPages;
        self.drive(session, number, Event::Grow);
        true
    }

    /// Handles ICMP messages of too big packets: their destinations' routes are looked up when the kernel has had time to make an
    /// exception.
    pub(crate) fn packets_were_too_big(&mut self) {
        let destinations = &mut self.looks.destinations;
        for listener in &self.watched.too_big {
            listener.receive(|destination| {
                if destinations.len() <= MOST_DESTINATIONS {
                    destinations.insert(destination);
                }
            });
        }
        if !destinations.is_empty() && self.looks.routes_due == 0 {
            self.looks.routes_due = monotonic_micros() + SOON;
        }
    }
}
