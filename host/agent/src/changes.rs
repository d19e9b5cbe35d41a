//! What changes on the host while connections are on the NIC: routes, addresses, neighbours, IPsec's policies, the firewall's rules,
//! programs at control groups. Connections that a change touches, or may touch, go back to the kernel, which knows what it means.

use crate::agent::Agent;
use crate::connection::{Connection, OnNic, Stage};
use crate::ground::{Ground, Shape};
use baton_abi::Control;
use baton_device::NOWHERE;
use baton_linux::icmp::TooBig;
use baton_linux::netlink::{Changes, NETFILTER, ROUTE, ROUTE_CHANGES, RULE_CHANGES};
use baton_linux::rtnetlink;
use baton_linux::tcp_info::TcpInfo;
use baton_moves::Refusal;
use baton_steering::Steer;
use std::collections::HashMap;
use std::io;
use std::net::IpAddr;

/// What the agent listens to.
pub(crate) struct Watched {
    pub routes: Changes,
    /// None where the kernel has no nftables.
    pub rules: Option<Changes>,
    /// IPv4's and IPv6's messages of packets that were too big, where this process may hear them.
    pub too_big: Vec<TooBig>,
}

impl Watched {
    pub fn open() -> io::Result<Watched> {
        let routes = Changes::listen(ROUTE, ROUTE_CHANGES)?;
        let too_big = [false, true].into_iter().filter_map(|v6| TooBig::listen(v6).ok()).collect();
        Ok(Watched { routes, rules: Changes::listen(NETFILTER, RULE_CHANGES).ok(), too_big })
    }
}

/// What was told on the route socket.
#[derive(Default)]
struct Told {
    /// Links, their settings or addresses.
    links: bool,
    /// Routes, rules, addresses, links, or something that was lost.
    routes: bool,
    /// Neighbours: device, address, and the link address if the kernel would use one.
    neighbours: HashMap<(u32, IpAddr), Option<[u8; 6]>>,
}

impl Told {
    fn take_in(changes: &Changes) -> Told {
        const RTM_NEWLINK: u16 = 16;
        const RTM_DELLINK: u16 = 17;
        const RTM_NEWADDR: u16 = 20;
        const RTM_DELADDR: u16 = 21;
        const RTM_NEWNEIGH: u16 = 28;
        const RTM_DELNEIGH: u16 = 29;
        const RTM_NEWNETCONF: u16 = 80;
        const RTM_DELNETCONF: u16 = 81;
        let mut told = Told::default();
        changes.each(|kind, body| match kind {
            RTM_NEWNETCONF | RTM_DELNETCONF => told.links = true,
            RTM_NEWNEIGH | RTM_DELNEIGH => match rtnetlink::parse_neighbour(body) {
                Some((device, address, found)) => {
                    told.neighbours.insert((device, address), found.filter(|_| kind == RTM_NEWNEIGH));
                }
                None => told.routes = true,
            },
            _ => {
                told.links |= matches!(kind, RTM_NEWLINK | RTM_DELLINK | RTM_NEWADDR | RTM_DELADDR | 0);
                told.routes = true;
            }
        });
        told
    }

    /// Whether a connection's frames may have another way now.
    fn touches(&self, on_nic: &OnNic) -> bool {
        let Some(way) = &on_nic.way else { return true };
        let link = &on_nic.image.link;
        // Inline the only device has no number.
        let of_neighbour = |((device, address), found): (&(u32, IpAddr), &Option<[u8; 6]>)| {
            *address == way.hop && (link.interface == 0 || link.interface == *device) && *found != Some(link.destination)
        };
        self.routes || self.links || on_nic.muted || self.neighbours.iter().any(of_neighbour)
    }
}

/// What has passed is known when the connection is to be moved next.
pub(crate) const UNKNOWN: (u64, u64) = (u64::MAX, u64::MAX);

/// Notes what has passed so far: more has to pass before the connection may leave the kernel again.
fn doubt(connection: &mut Connection) {
    let counted = |fd| TcpInfo::read(fd).map(|info| (info.bytes_acked, info.bytes_received)).unwrap_or_default();
    connection.unproved = Some(connection.fd().map_or(UNKNOWN, counted));
}

/// Mutes a connection on the NIC that has no route any more, as it would be in the kernel, and lets it speak when it has one again; its
/// path's MTU, and the devices at which it is heard, follow the route. An error if it has to go another way: that is the kernel's to follow.
fn follow_way(ground: &mut Ground<'_>, connection: &mut Connection) -> Result<(), &'static str> {
    const ELSEWHERE: &str = "its route has changed";
    let (Some(cid), true) = (connection.cid, connection.running().is_some()) else { return Ok(()) };
    let now = ground.way_of(connection);
    let Some(on_nic) = connection.running() else { return Ok(()) };
    let link = on_nic.image.link;
    let (muted, interface) = match &now {
        Ok(now) if now.leads_as(&link) => (false, link.interface),
        Err(refusal) if refusal.is_unreachable() => (true, NOWHERE),
        Err(Refusal::Policy) => return Err("an IPsec policy covers it"),
        Err(Refusal::Rules(_) | Refusal::LegacyRules | Refusal::Filtered(_)) => {
            return Err("rules that change from packet to packet may judge it");
        }
        Err(Refusal::Marked(_)) => return Err("its program has set SO_MARK"),
        _ => return Err(ELSEWHERE),
    };
    if muted != on_nic.muted && ground.nic.control(Control::Interface, cid, interface).is_ok() {
        on_nic.muted = muted;
        connection.reason = now.as_ref().map_or_else(ToString::to_string, |_| "its route is there again".into());
    }
    let (Ok(now), Some(on_nic)) = (now, connection.running()) else { return Ok(()) };
    let was = on_nic.way.replace(now);
    if was.is_some_and(|was| was.path != now.path) {
        ground.shape.steer(&connection.flow, &now.path, Steer::Steal).map_err(|_| ELSEWHERE)?;
    }
    if was.is_some_and(|was| was.mtu != now.mtu) {
        ground.nic.control(Control::Mtu, cid, now.mtu).map_err(|_| ELSEWHERE)?;
    }
    Ok(())
}

impl Agent {
    /// Routes, addresses, neighbours or links have changed: connections whose frames would go another way now go back, those that have none
    /// fall silent.
    pub(crate) fn routes_changed(&mut self) {
        let told = Told::take_in(&self.watched.routes);
        if told.links
            && let Shape::Beside { steering, devices, .. } = &mut self.shape
            && !devices.is_new()
            && let Err(error) = devices.follow(&self.routes, steering, &self.keeper)
        {
            eprintln!("baton agent: devices have changed, and could not be looked at: {error}");
        }
        if told.links {
            self.count_deaf_devices();
        }
        self.follow_ways(|connection| connection.on_nic.as_ref().is_some_and(|on_nic| told.touches(on_nic)));
    }

    /// IPsec's policies have changed: connections that they cover now go back.
    pub(crate) fn policies_changed(&mut self) {
        if self.guards.policies_changed() {
            self.follow_ways(|_| true);
        }
    }

    /// Filters of traffic control have changed: where there are some now, connections go back.
    pub(crate) fn filters_changed(&mut self) {
        if self.guards.traffic_changed() {
            self.follow_ways(|_| true);
        }
    }

    /// Looks the ways of connections on the NIC up again.
    pub(crate) fn follow_ways(&mut self, of: impl Fn(&Connection) -> bool) {
        for (session, number) in self.on_nic() {
            let Some((mut ground, entry)) = self.split(session) else { continue };
            let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { continue };
            if of(connection)
                && let Err(why) = follow_way(&mut ground, connection)
            {
                self.return_soon(session, number, why);
            }
        }
    }

    /// The firewall has changed. Whom the new rules would stop only the kernel can tell: every connection goes back, and moves again
    /// when its traffic has passed them.
    pub(crate) fn rules_changed(&mut self) {
        if !self.watched.rules.as_ref().is_some_and(Changes::any) {
            return;
        }
        self.guards.forget_rules();
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

    pub(crate) fn on_nic(&self) -> Vec<(u32, u32)> {
        let sessions = self.sessions.iter().enumerate().filter_map(|(at, session)| Some((at as u32, session.as_ref()?)));
        sessions
            .flat_map(|(at, session)| session.connections.iter().flatten().map(move |connection| (at, connection)))
            .filter(|(_, connection)| connection.stage() == Stage::Nic)
            .map(|(at, connection)| (at, connection.number))
            .collect()
    }
}
