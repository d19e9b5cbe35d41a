//! Polls state of which the kernel sends no notification, while connections are on the NIC: options that a program set
//! on its socket without the library's knowledge, segments that arrived where the NIC does not receive (at the shell,
//! whose input is blocked), sockets that have lost what the NIC does for them, and route exceptions, which ICMP
//! messages of too big packets create.

use crate::agent::Agent;
use crate::calls::{check_unlocked, outsider};
use crate::changes::tables_changed;
use crate::connection::{Connection, OnNic, Wants};
use crate::events::SOCKET_GONE;
use crate::ground::Shape;
use crate::released::Returns;
use crate::traffic::Traffic;
use baton_abi::{Cid, Control, Message, Operation};
use baton_linux::diagnosis;
use baton_linux::events::monotonic_micros;
use baton_linux::netlink::Netlink;
use baton_linux::{route::Routing, rtnetlink, socket};
use baton_moves::{Event, Refusal};
use baton_supervision::Retry;
use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Linux's error numbers for a socket that is not there, and for another one in its place.
const ENOENT: i32 = 2;
const ESTALE: i32 = 116;

/// Polling period, in microseconds.
pub(crate) const PERIOD: u64 = 200_000;
/// Connections, UDP sockets, listeners and sessions for messages polled at a time; the others follow in the next
/// period. And connections of which it is found out whether they are idle, which needs no system call.
const MOST: usize = 256;
const MOST_IDLE: usize = 1024;
/// Connections whose pages are returned in one period: each stands still for a moment, and the agent is busy for as
/// long.
const MOST_RETURNED: usize = 32;
/// Time after a handoff during which segments that the kernel had already may still reach the shell, in microseconds.
const SETTLING: u64 = 100_000;
/// Time that the kernel is given to make a route exception of a message that was received, in microseconds.
const SOON: u64 = 5_000;
/// Destinations whose routes are looked up one by one; if there are more, all are.
const MOST_DESTINATIONS: usize = 64;
/// Looking them up takes one part in this many of the time at most: whoever can send a message to this host can claim
/// that packets to many destinations were too big.
const ROUTES_PART: u64 = 10;
/// Longest time without such lookups, in microseconds: routes that change all the time take the agent's time, too, and
/// connections would go on sending packets that are too big.
const LONGEST_ROUTES_REST: u64 = 60_000_000;

/// Longest pause before rules and addresses that could not be read are read again, and the time without such a failure
/// after which pauses are short again; in microseconds.
const LONGEST_UNREAD: u64 = 10_000_000;
const FORGIVEN: u64 = 60_000_000;

/// Whether the kernel's rules and addresses could not be read when listeners and UDP sockets were examined. The kernel
/// has these meanwhile, and no notification says that reading would succeed: they are examined again after pauses that
/// double.
#[derive(Default)]
pub(crate) struct Unread {
    /// Time of the next try; 0 if none is due. And of the last failure.
    due: u64,
    failed: u64,
    pauses: Retry,
}

impl Unread {
    /// Notes what an examination has found. The kernel's refusal of a call says nothing of what the call asks for.
    pub fn note(&mut self, found: &Result<(), Refusal>, now: u64) {
        if self.due != 0 || !matches!(found, Err(Refusal::System(..))) {
            return;
        }
        if now.saturating_sub(self.failed) > FORGIVEN {
            self.pauses.clear();
        }
        self.failed = now;
        self.due = now + self.pauses.refused(LONGEST_UNREAD);
    }

    /// Takes the next try, if it is due.
    fn take(&mut self, now: u64) -> bool {
        let is_due = self.due != 0 && now >= self.due;
        if is_due {
            self.due = 0;
        }
        is_due
    }
}

/// Times of the next polls, and what they cover.
#[derive(Default)]
pub(crate) struct Looks {
    /// Time of the next poll, in microseconds of the monotonic clock; 0 while nothing is on the NIC.
    due: u64,
    /// Whether there are devices at which the kernel may receive and the NIC does not.
    pub passed_by: bool,
    /// Session and connection at which the next poll begins.
    from: (u32, u32),
    /// The same for idle connections. The next period goes on behind the last one whose pages were returned, however
    /// many wait.
    idle_from: (u32, u32),
    /// Destinations for which packets were too big, and the time at which their routes are looked up; 0 while there are
    /// none. And the time before which none are.
    destinations: HashSet<IpAddr>,
    routes_due: u64,
    routes_rest: u64,
    /// Ways of connections are to be looked up again, beginning with the one of this session and number.
    pub ways: bool,
    pub ways_from: (u32, u32),
    /// Ways of sessions for messages, beginning with this session, and of UDP sockets are to be looked up again.
    pub hosts: bool,
    pub hosts_from: u32,
    pub datagram_ways: bool,
    /// Time of the next poll of UDP sockets, listeners and sessions for messages; 0 while there are none. And the UDP
    /// socket, the listener and the session at which it begins.
    sockets_due: u64,
    sockets_from: u32,
    listeners_from: u32,
    messages_from: u32,
    /// Pages to be returned that no connection has any more.
    pub returns: Returns,
    pub unread: Unread,
}

impl Looks {
    /// Time until the next poll. None if nothing is on the NIC, and nothing is to be returned.
    pub fn wait(&self) -> Option<Duration> {
        if self.ways || self.hosts || self.datagram_ways {
            return Some(Duration::ZERO);
        }
        let due = [self.due, self.routes_due, self.sockets_due, self.returns.due, self.unread.due];
        let first = due.into_iter().filter(|due| *due != 0).min()?;
        Some(Duration::from_micros(first.saturating_sub(monotonic_micros())))
    }

    /// Starts polling when a connection moves to the NIC. True if it is the first.
    pub fn begin(&mut self) -> bool {
        let first = self.due == 0;
        if first {
            self.due = monotonic_micros() + PERIOD;
        }
        first
    }

    /// Plans to look up the routes to destinations for which packets were too big.
    fn plan_routes(&mut self, now: u64) {
        if self.routes_due == 0 {
            self.routes_due = (now + SOON).max(self.routes_rest);
        }
    }

    /// Notes that routes have been looked up, of some connections.
    fn note_routes(&mut self, begun: u64, ended: u64) {
        let rest = ended.max(self.routes_rest) + (ROUTES_PART - 1) * ended.saturating_sub(begun);
        self.routes_rest = rest.min(ended + LONGEST_ROUTES_REST);
    }
}

/// Time that an attacher gets to report that its program has closed a socket, in microseconds.
const UNHELD: u64 = 3_000_000;

/// What the kernel says about a connection's socket.
enum Found {
    Shown(Shown),
    /// It does not have the connection any more: destroyed by an administrator (`ss --kill`), disconnected by its
    /// program past the library, or closed without its attacher's saying so. The NIC has the 4-tuple for nobody.
    Lost,
    /// Nothing that can be used.
    Nothing,
}

impl Looks {
    /// Starts polling UDP sockets and listeners.
    pub fn begin_sockets(&mut self) {
        if self.sockets_due == 0 {
            self.sockets_due = monotonic_micros() + PERIOD;
        }
    }
}

/// State of a shell, read from the kernel.
struct Shown {
    routing: Routing,
    /// Segments that the socket dropped.
    dropped: u32,
}

/// `user` has opened the connection's session.
fn find(user: u32, connection: &mut Connection, netlink: &Netlink, now: u64) -> Found {
    let Some(fd) = &connection.fd else { return find_attached(connection, netlink, now) };
    if outsider(user, connection.process, Some(fd.as_fd())).is_some() {
        return match check_unlocked(connection, fd.as_fd(), netlink) {
            Ok(found) => Found::Shown(Shown { routing: found.routing, dropped: found.drops }),
            Err(Refusal::Swapped | Refusal::Closed(_)) => Found::Lost,
            Err(_) => Found::Nothing,
        };
    }
    if connection.check_socket(fd.as_fd()).is_err() {
        return Found::Lost;
    }
    shown(connection, fd.as_fd()).map_or(Found::Nothing, Found::Shown)
}

/// Of a connection whose descriptor the agent does not have.
fn find_attached(connection: &mut Connection, netlink: &Netlink, now: u64) -> Found {
    let unknown = |error: &io::Error| matches!(error.raw_os_error(), Some(ENOENT | ESTALE));
    match diagnosis::describe(netlink, &connection.flow, connection.cookie) {
        Ok(found) if found.held => {
            if let Some(extra) = &mut connection.extra {
                extra.unheld_since = None;
            }
            return Found::Shown(Shown { routing: found.routing, dropped: found.drops });
        }
        Err(error) if !unknown(&error) => return Found::Nothing,
        Ok(_) | Err(_) => {}
    }
    let since = *connection.extra().unheld_since.get_or_insert(now);
    if now.saturating_sub(since) > UNHELD { Found::Lost } else { Found::Nothing }
}

fn shown(connection: &Connection, fd: BorrowedFd<'_>) -> Option<Shown> {
    const SOL_SOCKET: i32 = 1;
    const SO_MEMINFO: i32 = 55;
    const DROPS: usize = 8;
    let mut memory = [0u8; 4 * (DROPS + 1)];
    let length = socket::get_bytes(fd, SOL_SOCKET, SO_MEMINFO, &mut memory).ok()?;
    let dropped = memory.get(4 * DROPS..length)?.try_into().ok().map(u32::from_ne_bytes)?;
    let routing = Routing::of(fd, connection.flow.is_v4(), connection.peer()).ok()?;
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
        if std::mem::take(&mut self.looks.datagram_ways) {
            self.looks.datagram_ways |= self.follow_next_datagram_ways();
        }
        if self.looks.routes_due != 0 && now >= self.looks.routes_due {
            self.looks.routes_due = 0;
            self.known.discard();
            let destinations = std::mem::take(&mut self.looks.destinations);
            let all = destinations.len() > MOST_DESTINATIONS;
            self.follow_ways(|connection| all || destinations.contains(&connection.peer().ip().to_canonical()));
        }
        if std::mem::take(&mut self.looks.ways) {
            let begun = monotonic_micros();
            self.looks.ways |= self.follow_next_ways();
            self.looks.note_routes(begun, monotonic_micros());
        }
        if self.looks.unread.take(now) {
            self.follow_listeners();
            self.follow_datagrams();
        }
        let is_due = |at: u64| at != 0 && now >= at;
        // Also while there are only listeners: the NIC makes connections for them.
        if (is_due(self.looks.due) || is_due(self.looks.sockets_due)) && self.guards.tables_changed() {
            tables_changed(self);
        }
        if is_due(self.looks.sockets_due) {
            let (next, any) = self.look_at_datagrams(self.looks.sockets_from, MOST);
            self.looks.sockets_from = next;
            let (next, listening) = self.look_at_listeners(self.looks.listeners_from, MOST);
            self.looks.listeners_from = next;
            let (next, messages) = self.look_at_messages(self.looks.messages_from, MOST);
            self.looks.messages_from = next;
            let any = any || listening || messages;
            self.looks.sockets_due = if any { now + PERIOD } else { 0 };
        }
        if self.looks.returns.due != 0 && now >= self.looks.returns.due {
            self.return_released_pages(now);
        }
        if !is_due(self.looks.due) {
            return;
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

    /// Determines again whether there are devices at which the NIC does not receive. If they cannot be read, what was
    /// found before counts.
    pub(crate) fn find_devices_without_nic(&mut self) {
        let Ok(links) = rtnetlink::links(&self.routes) else { return };
        self.looks.passed_by = links.iter().any(|link| match &self.shape {
            Shape::Inline { interface } => link.up && link.kind != rtnetlink::LOOPBACK && link.index != *interface,
            Shape::Beside { devices, .. } => devices.passes_nic_by(link),
        });
    }

    /// Polls one connection.
    fn look_at(&mut self, session: u32, number: u32) {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return };
        let user = entry.user;
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
        if connection.running().is_none() || connection.is_being_closed() {
            return;
        }
        let shown = match find(user, connection, &self.diagnosis, monotonic_micros()) {
            Found::Shown(shown) => shown,
            Found::Lost => {
                self.cut(session, number, SOCKET_GONE);
                return;
            }
            Found::Nothing => return,
        };
        // Beside the kernel, datagrams reassembled from fragments reach the shell, too: they mean nothing where the NIC
        // receives at all devices.
        let strays = self.looks.passed_by && monotonic_micros().saturating_sub(connection.since) > SETTLING;
        let Some(on_nic) = connection.running() else { return };
        if let Some((why, for_good)) = judge(on_nic, strays, &shown) {
            connection.stays |= for_good;
            self.return_soon(session, number, why);
        }
    }

    /// Ends a connection on the NIC, as the kernel ends one that is destroyed: its peer is reset, and its program gets
    /// ECONNABORTED. Returns false if the same was done before, and the connection has not ended yet.
    pub(crate) fn cut(&mut self, session: u32, number: u32, why: &'static str) -> bool {
        let Some(connection) = self.connection(session, number) else { return false };
        let is_first = connection.reason != why;
        connection.reason = why.into();
        if connection.attached {
            self.leave_attached(session, number);
        } else if let Some(cid) = connection.cid {
            // If the NIC has died, its connections are looked at again.
            let _ = self.nics[cid.nic()].post_in_time(Message::control(Operation::NicControl, Control::Abort, cid, 0, 0));
        }
        is_first
    }

    /// Returns the pages of one connection if it is idle. Returns whether it is.
    fn return_pages_if_idle(&mut self, session: u32, number: u32, now: u64) -> bool {
        let Some(Some(entry)) = self.sessions.get_mut(session as usize) else { return false };
        let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return false };
        let Some(hardware) = self.hardware.get(connection.cid.map_or(0, Cid::nic)) else { return false };
        let mut carried = (Traffic::default(), 0);
        let idle = connection.is_idle(&hardware.memory, now, &mut carried);
        let (traffic, rtt) = carried;
        if let Some(cid) = connection.cid.filter(|_| traffic != Traffic::default()) {
            self.counts.note_carried(entry.user, &entry.opening.program, (cid.nic(), traffic));
            self.counts.of(entry.user, &entry.opening.program).rtt.note(rtt.into());
        }
        if !idle {
            return false;
        }
        connection.extra().wants = Wants::NoPages;
        self.drive(session, number, Event::Grow);
        true
    }

    /// Handles ICMP messages of too big packets: their destinations' routes are looked up when the kernel has had time
    /// to make an exception.
    pub(crate) fn packets_were_too_big(&mut self) {
        let destinations = &mut self.looks.destinations;
        for listener in &self.watched.too_big {
            listener.receive(|destination| {
                if destinations.len() <= MOST_DESTINATIONS {
                    destinations.insert(destination);
                }
            });
        }
        if !destinations.is_empty() {
            self.looks.plan_routes(monotonic_micros());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel has could not be read: it is tried again, each time after twice as long while that goes on. What
    /// was read, and forbids something, changes with a notification.
    #[test]
    fn what_could_not_be_read_is_tried_again() {
        let failed = || Err(Refusal::System("XFRM_MSG_GETPOLICY", "Interrupted system call".into()));
        let mut unread = Unread::default();
        unread.note(&Ok(()), 1_000);
        unread.note(&Err(Refusal::Policy), 1_000);
        assert!(!unread.take(u64::MAX), "all was read");
        let (mut now, mut pauses) = (1_000, Vec::new());
        for _ in 0..11 {
            // Of several listeners.
            unread.note(&failed(), now);
            unread.note(&failed(), now + 1);
            pauses.push((unread.due - now) / 1_000);
            assert!(!unread.take(unread.due - 1));
            now = unread.due;
            assert!(unread.take(now) && !unread.take(now));
        }
        assert_eq!(pauses, [20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10_000, 10_000]);
        now += FORGIVEN;
        unread.note(&failed(), now);
        assert_eq!(unread.due, now + 20_000, "it is another failure");
    }

    /// However often somebody says that packets were too big, others are served for nine tenths of the time.
    #[test]
    fn routes_are_looked_up_in_a_tenth_of_the_time() {
        let mut looks = Looks::default();
        looks.plan_routes(1_000);
        looks.plan_routes(2_000);
        assert_eq!(looks.routes_due, 1_000 + SOON);
        looks.routes_due = 0;
        looks.note_routes(1_000_000, 1_100_000);
        looks.plan_routes(1_100_001);
        assert_eq!(looks.routes_due, 2_000_000);
        looks.routes_due = 0;
        looks.plan_routes(3_000_000);
        assert_eq!(looks.routes_due, 3_000_000 + SOON);
        // Of some connections at a time.
        (0..10).for_each(|at| looks.note_routes(4_000_000 + 10_000 * at, 4_010_000 + 10_000 * at));
        looks.routes_due = 0;
        looks.plan_routes(4_100_000);
        assert_eq!(looks.routes_due, 4_010_000 + 10 * 90_000);
        // Routes change all the time for two minutes.
        (5..125).for_each(|second| looks.note_routes(second * 1_000_000, (second + 1) * 1_000_000));
        looks.routes_due = 0;
        looks.plan_routes(125_000_000);
        assert_eq!(looks.routes_due, 125_000_000 + LONGEST_ROUTES_REST);
    }
}
