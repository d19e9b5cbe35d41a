//! What changes on the host while connections are on the NIC: routes, addresses, neighbours, the firewall's rules, programs at control
//! groups. Connections that a change touches, or may touch, go back to the kernel, which knows what it means.

use crate::agent::Agent;
use crate::connection::{Connection, Stage};
use crate::ground::Ground;
use baton_abi::Control;
use baton_device::NOWHERE;
use baton_kernel::examine::Stay;
use baton_kernel::netlink::{Changes, NETFILTER, ROUTE, ROUTE_CHANGES, RULE_CHANGES};
use baton_kernel::tcp_info::TcpInfo;
use std::io;

/// What the agent listens to.
pub(crate) struct Watched {
    pub routes: Changes,
    /// None where the kernel has no nftables.
    pub rules: Option<Changes>,
}

impl Watched {
    pub fn open() -> io::Result<Watched> {
        let routes = Changes::listen(ROUTE, ROUTE_CHANGES)?;
        Ok(Watched { routes, rules: Changes::listen(NETFILTER, RULE_CHANGES).ok() })
    }
}

/// What has passed is known when the connection is to be moved next.
pub(crate) const UNKNOWN: (u64, u64) = (u64::MAX, u64::MAX);

/// Notes what has passed so far: more has to pass before the connection may leave the kernel again.
fn doubt(connection: &mut Connection) {
    let counted = |fd| TcpInfo::read(fd).map(|info| (info.bytes_acked, info.bytes_received)).unwrap_or_default();
    connection.unproved = Some(connection.fd().map_or(UNKNOWN, counted));
}

/// Mutes a connection on the NIC that has no route any more, as it would be in the kernel, and lets it speak when it has one again. False
/// if it has another one: that is the kernel's to follow.
fn follow_route(ground: &mut Ground<'_>, connection: &mut Connection) -> bool {
    let now = ground.link_of(connection);
    let Stage::Nic(on_nic) = &mut connection.stage else { return true };
    let link = on_nic.image.link;
    let (muted, interface) = match &now {
        Ok(now) if (now.interface, now.source, now.destination) == (link.interface, link.source, link.destination) => {
            (false, link.interface)
        }
        Err(Stay::NoRoute | Stay::SourceGone(_)) => (true, NOWHERE),
        _ => return false,
    };
    if muted != on_nic.muted && ground.nic.control(Control::Interface, on_nic.cid, interface).is_ok() {
        on_nic.muted = muted;
        connection.reason = now.map_or_else(|stay| stay.to_string(), |_| "its route is there again".into());
    }
    true
}

impl Agent {
    /// Routes, addresses or neighbours have changed: connections whose frames would go another way now go back, those that have none
    /// fall silent.
    pub(crate) fn routes_changed(&mut self) {
        if !self.watched.routes.any() {
            return;
        }
        for (session, number) in self.on_nic() {
            let Some((mut ground, entry)) = self.split(session) else { continue };
            let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { continue };
            if !follow_route(&mut ground, connection) {
                self.must_return(session, number, "its route has changed");
            }
        }
    }

    /// The firewall has changed. Whom the new rules would stop only the kernel can tell: every connection goes back, and moves again
    /// when its traffic has passed them.
    pub(crate) fn rules_changed(&mut self) {
        if !self.watched.rules.as_ref().is_some_and(Changes::any) {
            return;
        }
        for (session, number) in self.on_nic() {
            self.must_return(session, number, "the firewall has changed");
        }
        for session in self.sessions.iter_mut().flatten() {
            session.connections.iter_mut().flatten().for_each(doubt);
        }
    }

    /// Programs have been attached to control groups, or detached: as with the firewall, for the connections of those groups.
    pub(crate) fn programs_changed(&mut self) {
        let changed = self.cgroups.changed();
        if changed.is_empty() {
            return;
        }
        let touches = |connection: &Connection| connection.cgroup.as_ref().is_some_and(|group| changed.contains(group));
        for (session, number) in self.on_nic() {
            let connection =
                self.sessions[session as usize].as_ref().and_then(|entry| entry.connections[number as usize].as_ref());
            if connection.is_some_and(touches) {
                self.must_return(session, number, "the programs of its control group have changed");
            }
        }
        let all = self.sessions.iter_mut().flatten().flat_map(|session| session.connections.iter_mut().flatten());
        all.filter(|connection| touches(connection)).for_each(doubt);
    }

    fn on_nic(&self) -> Vec<(u32, u32)> {
        let sessions = self.sessions.iter().enumerate().filter_map(|(at, session)| Some((at as u32, session.as_ref()?)));
        sessions
            .flat_map(|(at, session)| session.connections.iter().flatten().map(move |connection| (at, connection)))
            .filter(|(_, connection)| matches!(connection.stage, Stage::Nic(_)))
            .map(|(at, connection)| (at, connection.number))
            .collect()
    }
}
