//! What the kernel has answered lately about routes, addresses, devices, neighbours, connection tracking and its
//! settings. Many connections share an answer, and one move needs the same answer several times, also while its
//! connection stands still.
//!
//! An answer is used for [`LIFETIME`] at most, and not after a notification of a change has been handled: then
//! [`Known::discard`] is called before the connections on the NIC are checked again. A change that is notified while a
//! move is under way is found by [`Known::changes`]. Only what was found is kept: errors, and neighbours or routes that
//! are not there, are asked for again.

use crate::way::Way;
use baton_linux::events::monotonic_micros;
use baton_linux::netlink::{Changes, Netlink};
use baton_linux::route::{self, Route, Routing};
use baton_linux::rtnetlink::{self, LinkInfo};
use baton_linux::{conntrack, socket};
use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Microseconds for which an answer is used. It bounds the age of what the kernel changes without a notification: its
/// settings, and the path MTU of a route.
const LIFETIME: u64 = 20_000;
/// Answers of one kind that are kept: a bound on memory, not reached unless moves are very fast.
const MOST: usize = 4096;

/// What a route depends on: local and remote address, and the socket's properties.
type Question = (SocketAddr, SocketAddr, Routing);

/// The kernel's latest answers.
#[derive(Default)]
pub(crate) struct Known {
    /// Time of the oldest answer, in microseconds of the monotonic clock; 0 if there is none.
    since: u64,
    changes: u64,
    own: HashSet<IpAddr>,
    routes: HashMap<Question, Route>,
    paths: HashMap<Question, Vec<u32>>,
    links: HashMap<u32, LinkInfo>,
    neighbours: HashMap<(u32, IpAddr), [u8; 6]>,
    /// No connection up to this serial number is tracked.
    untracked: Option<u64>,
    /// The greatest values of tcp_rmem and tcp_wmem, in bytes.
    buffers: Option<[Option<u32>; 2]>,
    /// The value of tcp_retries2.
    retries: Option<u8>,
    /// Whether tcp_slow_start_after_idle is set.
    slow_start_after_idle: Option<bool>,
    /// Whether tcp_notsent_lowat limits anything.
    limits_unsent: Option<bool>,
    /// The way that was found last: most connections have the same as the one before.
    last_way: Option<Arc<Way>>,
    /// The agent's network namespace, which it does not change.
    namespace: Option<u64>,
    /// Whether the agent may bind ports that not everybody may, which does not change.
    binds_low: Option<bool>,
    /// The value of ip_unprivileged_port_start.
    lowest: Option<u16>,
}

/// Returns the third field of a setting such as tcp_rmem: the greatest value.
fn greatest(setting: &str) -> Option<u32> {
    std::fs::read_to_string(format!("/proc/sys/net/ipv4/{setting}")).ok()?.split_whitespace().nth(2)?.parse().ok()
}

/// Whether this process may not bind a port, whether that is in use or not.
fn is_forbidden(port: u16) -> bool {
    let bound = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, port));
    bound.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

impl Known {
    /// Number of notifications of changes so far. Checks that were made at another number may not hold any more.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns the way, together with whoever has the same.
    pub fn shared(&mut self, way: Way) -> Arc<Way> {
        match &self.last_way {
            Some(last) if **last == way => last.clone(),
            _ => self.last_way.insert(Arc::new(way)).clone(),
        }
    }

    /// Discards all answers, since something has changed.
    pub fn discard(&mut self) {
        self.changes += 1;
        self.empty();
    }

    /// Discards what is known of these neighbours, by device and address, since they have changed. Any user's traffic
    /// changes some, and nothing else depends on them.
    pub fn forget_neighbours(&mut self, changed: impl Iterator<Item = (u32, IpAddr)>) {
        self.changes += 1;
        changed.for_each(|neighbour| _ = self.neighbours.remove(&neighbour));
    }

    fn empty(&mut self) {
        let Known { changes, namespace, binds_low, .. } = *self;
        *self = Known { changes, namespace, binds_low, ..Known::default() };
    }

    /// Discards answers that are more than half as old as they may become, or older than a notification that is waiting
    /// to be handled. Returns whether there were such. Called before a connection stands still, so that what it needs
    /// then has been asked for before: what changed earlier must not be found when the socket cannot be made any more.
    pub fn renew(&mut self, changes: &Changes) -> bool {
        if self.since != 0 && changes.are_waiting() {
            self.empty();
            return true;
        }
        self.expire(LIFETIME / 2)
    }

    fn expire(&mut self, age: u64) -> bool {
        self.expire_at(monotonic_micros(), age)
    }

    fn expire_at(&mut self, now: u64, age: u64) -> bool {
        let old = self.since != 0 && now.saturating_sub(self.since) > age;
        let old = old || self.routes.len() > MOST || self.paths.len() > MOST;
        if old {
            self.empty();
        }
        if self.since == 0 {
            self.since = now;
        }
        old
    }

    /// Whether an address is one of this host's.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn is_own(&mut self, netlink: &Netlink, address: IpAddr) -> io::Result<bool> {
        self.expire(LIFETIME);
        if self.own.contains(&address) {
            return Ok(true);
        }
        let own = route::is_local(netlink, address)?;
        if own {
            self.own.insert(address);
        }
        Ok(own)
    }

    /// The route of a connection's packets. See [`route::of_connection`].
    ///
    /// # Errors
    /// Those of [`route::of_connection`].
    pub fn route(&mut self, netlink: &Netlink, local: SocketAddr, peer: SocketAddr, routing: &Routing) -> io::Result<Route> {
        self.expire(LIFETIME);
        if let Some(known) = self.routes.get(&(local, peer, *routing)) {
            return Ok(*known);
        }
        let route = route::of_connection(netlink, local, peer, routing)?;
        self.routes.insert((local, peer, *routing), route);
        Ok(route)
    }

    /// Devices of all paths of a connection's route. See [`route::paths`].
    ///
    /// # Errors
    /// The failed system call's.
    pub fn paths(&mut self, netlink: &Netlink, local: SocketAddr, peer: SocketAddr, routing: &Routing) -> io::Result<Vec<u32>> {
        self.expire(LIFETIME);
        if let Some(known) = self.paths.get(&(local, peer, *routing)) {
            return Ok(known.clone());
        }
        let paths = route::paths(netlink, local, peer, routing)?;
        self.paths.insert((local, peer, *routing), paths.clone());
        Ok(paths)
    }

    /// A device by its index.
    ///
    /// # Errors
    /// `ENODEV` if there is none.
    pub fn link(&mut self, netlink: &Netlink, index: u32) -> io::Result<LinkInfo> {
        self.expire(LIFETIME);
        if let Some(known) = self.links.get(&index) {
            return Ok(*known);
        }
        let link = rtnetlink::link_at(netlink, index)?;
        self.links.insert(index, link);
        Ok(link)
    }

    /// The link address of a neighbour; None unless the kernel has one that it would use.
    pub fn neighbour(&mut self, netlink: &Netlink, device: u32, address: IpAddr) -> Option<[u8; 6]> {
        self.expire(LIFETIME);
        if let Some(known) = self.neighbours.get(&(device, address)) {
            return Some(*known);
        }
        let found = rtnetlink::neighbour(netlink, device, address).ok().flatten()?;
        self.neighbours.insert((device, address), found);
        Some(found)
    }

    /// Whether the connection tracker has no entry of a connection that was registered as `serial`, because it has no
    /// entries at all. `latest` is the serial number of the connection registered last: a later one may be tracked.
    pub fn is_untracked(&mut self, netfilter: &Netlink, serial: u64, latest: u64) -> bool {
        self.expire(LIFETIME);
        if self.untracked.is_none_or(|until| serial > until) {
            self.untracked = matches!(conntrack::entries(netfilter), Ok(0)).then_some(latest);
        }
        self.untracked.is_some_and(|until| serial <= until)
    }

    /// The greatest values of tcp_rmem and tcp_wmem, in bytes. None for one that cannot be read.
    pub fn buffers(&mut self) -> [Option<u32>; 2] {
        self.expire(LIFETIME);
        *self.buffers.get_or_insert_with(|| ["tcp_rmem", "tcp_wmem"].map(greatest))
    }

    /// How long data is sent again to a peer that does not answer (tcp_retries2).
    pub fn retries(&mut self) -> u8 {
        self.expire(LIFETIME);
        let read = || std::fs::read_to_string("/proc/sys/net/ipv4/tcp_retries2").ok()?.trim().parse().ok();
        *self.retries.get_or_insert_with(|| read().unwrap_or(15))
    }

    /// Whether congestion windows are worn down while nothing is sent (tcp_slow_start_after_idle).
    pub fn slow_start_after_idle(&mut self) -> bool {
        self.expire(LIFETIME);
        let read = || std::fs::read_to_string("/proc/sys/net/ipv4/tcp_slow_start_after_idle").ok()?.trim().parse().ok();
        *self.slow_start_after_idle.get_or_insert_with(|| read().is_none_or(|on: u32| on != 0))
    }

    /// Whether the host limits how many bytes its connections may have unsent (tcp_notsent_lowat).
    pub fn limits_unsent(&mut self) -> bool {
        self.expire(LIFETIME);
        let read = || std::fs::read_to_string("/proc/sys/net/ipv4/tcp_notsent_lowat").ok()?.trim().parse().ok();
        *self.limits_unsent.get_or_insert_with(|| read().is_some_and(|limit: u32| limit != u32::MAX))
    }

    /// Whether the agent may bind a port. A restored connection's socket gets its port again by that.
    pub fn may_bind(&mut self, port: u16) -> bool {
        self.expire(LIFETIME);
        let read = || std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start").ok()?.trim().parse().ok();
        let lowest = *self.lowest.get_or_insert_with(|| read().unwrap_or(1024));
        port >= lowest || *self.binds_low.get_or_insert_with(|| !is_forbidden(lowest - 1))
    }

    /// The cookie of the agent's network namespace.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn namespace(&mut self) -> io::Result<u64> {
        match self.namespace {
            Some(known) => Ok(known),
            None => socket::own_namespace().inspect(|found| self.namespace = Some(*found)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When answers were found that do not become too old in a test, however long that does not run.
    fn much_later() -> u64 {
        monotonic_micros() + 3_600_000_000
    }

    #[test]
    fn answers_are_used_until_something_changes() {
        let mut known = Known::default();
        let buffers = known.buffers();
        known.since = much_later();
        assert_eq!(buffers, ["tcp_rmem", "tcp_wmem"].map(greatest));
        known.buffers = Some([Some(1), Some(2)]);
        assert_eq!(known.buffers(), [Some(1), Some(2)]);
        known.discard();
        assert_eq!((known.buffers(), known.changes()), (buffers, 1));
    }

    /// Whoever sends to a host that nobody has sent to before changes a neighbour.
    #[test]
    fn neighbours_that_change_are_forgotten_and_nothing_else() {
        let neighbours = [1u8, 2].map(|host| (7, IpAddr::from([10, 0, 0, host])));
        let mut known = Known { buffers: Some([Some(1), Some(2)]), since: much_later(), ..Known::default() };
        known.neighbours.extend(neighbours.map(|neighbour| (neighbour, [2; 6])));
        known.forget_neighbours([neighbours[0], (8, neighbours[1].1)].into_iter());
        assert_eq!(known.neighbours.keys().collect::<Vec<_>>(), [&neighbours[1]]);
        assert_eq!(known.buffers, Some([Some(1), Some(2)]));
        assert_eq!(known.changes(), 1, "ways that are being found are checked again");
    }

    #[test]
    fn old_answers_are_not_used() {
        let mut known = Known::default();
        let buffers = known.buffers();
        known.since = 1_000;
        assert!(!known.expire_at(1_000 + LIFETIME, LIFETIME) && known.expire_at(1_001 + LIFETIME, LIFETIME));
        known.buffers = Some([Some(1), Some(2)]);
        known.since = monotonic_micros() - LIFETIME / 2 - 1;
        let quiet = Changes::listen(baton_linux::netlink::ROUTE, 0).expect("a socket");
        known.renew(&quiet);
        assert_eq!(known.buffers(), buffers, "it would become too old while the connection stands still");
        known.buffers = Some([Some(1), Some(2)]);
        known.since = monotonic_micros() - LIFETIME - 1;
        assert_eq!((known.buffers(), known.changes()), (buffers, 0));
    }

    #[test]
    fn a_later_connection_may_be_tracked() {
        let Ok(netfilter) = Netlink::open(baton_linux::netlink::NETFILTER) else { return };
        let mut known = Known { untracked: Some(7), since: much_later(), ..Known::default() };
        assert!(known.is_untracked(&netfilter, 7, 9));
        // Without the right to ask, nothing is known.
        let untracked = known.is_untracked(&netfilter, 8, 9);
        assert_eq!(known.untracked, untracked.then_some(9), "asked again");
    }
}
