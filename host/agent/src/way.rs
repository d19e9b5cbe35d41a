//! A connection's way: the device by which its frames leave and those by which its peer's arrive, as the kernel would
//! route them; and the reasons why the NIC cannot follow it.

use crate::connection::Connection;
use crate::ground::{Ground, Shape};
use baton_handoff::examine::system;
use baton_handoff::export;
use baton_linux::diagnosis;
use baton_linux::route::{self, Route, Routing};
use baton_linux::rtnetlink::{self, LinkInfo, Master};
use baton_linux::xfrm::Verdict;
use baton_moves::Refusal;
use baton_protocol::nic::Hop;
use baton_steering::{FURTHER, Path};
use baton_wire::Flow;
use baton_wire::frame::Link;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

/// Route, header and devices of a connection's frames.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way {
    pub link: Link,
    /// Beside the kernel: the devices at which its frames are received.
    pub path: Path,
    /// The next hop.
    pub hop: IpAddr,
    /// Path MTU in bytes: of a route exception or the route if they have one, otherwise of the device.
    pub mtu: u32,
    /// Options of the socket on which the route depends.
    pub routing: Routing,
    /// Number of notifications of changes before it was looked up; see [`crate::known::Known::changes`].
    pub as_of: u64,
}

impl Way {
    /// The device of the connection's flow: the one that its socket is bound to, which is then the one that its frames
    /// leave by; inline, where there is one device, 0.
    pub fn device(&self) -> u32 {
        if self.path.anywhere { 0 } else { self.path.leaves_by }
    }

    /// Whether frames would have the same Ethernet header as `link` and leave by the same device.
    pub fn leads_as(&self, link: &Link) -> bool {
        (self.link.interface, self.link.source, self.link.destination) == (link.interface, link.source, link.destination)
    }
}

/// The flow label of a connection's packets (RFC 6437): the one that its program has chosen, or one made from its
/// addresses and ports, which differs from the kernel's own and is as constant.
fn flow_label(routing: &Routing, flow: &Flow) -> u32 {
    const LABEL: u32 = 0xf_ffff;
    let chosen = routing.flow_label & LABEL;
    if chosen != 0 || !routing.labels_itself {
        return chosen;
    }
    // FNV-1a, folded to 20 bits; 0 would be no label.
    let hash =
        flow.by(0).to_bytes().iter().fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    ((hash >> 20 ^ hash) & LABEL).max(1)
}

impl Ground<'_> {
    /// Returns the route that the kernel would choose now for the connection's socket.
    ///
    /// # Errors
    /// If the kernel could not send its packets either.
    pub fn route_of(&mut self, connection: &Connection) -> Result<(Routing, Route), Refusal> {
        let local = connection.local().ip().to_canonical();
        let routing = match (&connection.fd, &connection.on_nic) {
            (None, Some(_)) => {
                let described = diagnosis::describe(self.diagnosis, &connection.flow, connection.cookie);
                described.map_err(|error| system("socket diagnosis", &error))?.routing
            }
            _ => Routing::of(connection.fd()?, connection.flow.is_v4(), connection.peer())
                .map_err(|error| system("getsockopt", &error))?,
        };
        if !self.known.is_own(self.routes, local).map_err(|error| system("RTM_GETROUTE", &error))? {
            return Err(Refusal::SourceGone(local));
        }
        let found = self.known.route(self.routes, connection.local(), connection.peer(), &routing);
        let route = found.map_err(|_| Refusal::NoRoute)?;
        if routing.on_link && route.gateway.is_some() {
            return Err(Refusal::NoRoute);
        }
        if !route.local && self.guards.verdict(&connection.flow, route.interface, routing.mark)? == Verdict::BlockedOut {
            return Err(Refusal::PolicyBlocks);
        }
        Ok((routing, route))
    }

    /// Returns a connection's way, if the NIC can follow it.
    ///
    /// # Errors
    /// Those of [`Ground::route_of`], or why the NIC cannot.
    pub fn way_of(&mut self, connection: &Connection) -> Result<Way, Refusal> {
        let as_of = self.known.changes();
        let (routing, route) = self.route_of(connection)?;
        // As with TCP_NOTSENT_LOWAT: the program's side does not see how much the NIC has sent.
        if self.known.limits_unsent() {
            return Err(Refusal::Option("host's tcp_notsent_lowat"));
        }
        if routing.mark != 0 {
            return Err(Refusal::Marked(routing.mark));
        }
        if route.encapsulated {
            return Err(Refusal::Encapsulated);
        }
        if routing.device != 0 && routing.device != route.interface {
            let bound = rtnetlink::link_at(self.routes, routing.device);
            let vrf = bound.is_ok_and(|bound| bound.vrf);
            return Err(if vrf { Refusal::Vrf(routing.device) } else { Refusal::Bound(routing.device, route.interface) });
        }
        let interface = self.device(route.interface)?;
        // Two links may have the same addresses, and only the device shows which one a frame belongs to.
        if connection.flow.is_link_local() && routing.device == 0 && matches!(self.shape, Shape::Beside { .. }) {
            return Err(Refusal::NoLink);
        }
        if interface.vrf || interface.master == Master::Vrf {
            return Err(Refusal::Vrf(interface.index));
        }
        self.guards.pass(self.routes, &connection.flow, interface.index)?;
        if interface.kind != rtnetlink::LOOPBACK {
            match self.guards.verdict(&connection.flow, interface.index, routing.mark)? {
                Verdict::Clear => {}
                Verdict::Covered => return Err(Refusal::Policy),
                Verdict::BlockedOut => return Err(Refusal::PolicyBlocks),
            }
        }
        let hop = route.gateway.unwrap_or(connection.peer().ip().to_canonical());
        let neighbour = if interface.kind == rtnetlink::LOOPBACK {
            [0; 6]
        } else {
            // Without a carrier the kernel forgets its neighbours. It could not send either, and a connection that
            // moved to it now would have its time-outs anew.
            let unknown = if interface.carrier { Refusal::NoNeighbour } else { Refusal::NoCarrier };
            self.known.neighbour(self.routes, route.interface, hop).ok_or(unknown)?
        };
        let v4 = connection.flow.is_v4();
        let (ttl, tos, flow_label) = match (&connection.fd, &connection.on_nic) {
            (None, Some(_)) => {
                let link = connection.exported(self.nic_memory).ok_or(Refusal::NicGone)?.image.link;
                (link.ttl, link.tos, link.flow_label)
            }
            _ => {
                let (ttl, tos) = export::link_settings(connection.fd()?, v4).map_err(|error| system("getsockopt", &error))?;
                (ttl, tos, flow_label(&routing, &connection.flow))
            }
        };
        let of_device = if v4 || interface.mtu6 == 0 { interface.mtu } else { interface.mtu6 };
        let mtu = route.mtu.unwrap_or(of_device).clamp(68, 65535);
        let path = self.path_of(connection, &routing, &interface)?;
        let link = Link { source: interface.address, destination: neighbour, ttl, tos, flow_label, interface: path.leaves_by };
        Ok(Way { link, path, hop, mtu, routing, as_of })
    }

    /// Returns the way from `local` to a host for RMPP packets of the socket `fd`, as the kernel would choose it now,
    /// and the next hop.
    ///
    /// # Errors
    /// Why the kernel could not send there either, or why the NIC cannot.
    pub fn way_to(&mut self, fd: BorrowedFd<'_>, local: SocketAddr, host: IpAddr) -> Result<(Hop, IpAddr), Refusal> {
        let (host, peer) = (host.to_canonical(), SocketAddr::new(host.to_canonical(), local.port()));
        let v4 = local.ip().to_canonical().is_ipv4();
        if host.is_ipv4() != v4 || host.is_multicast() || host.is_unspecified() {
            return Err(Refusal::NoRoute);
        }
        let routing = Routing::of(fd, v4, peer).map_err(|error| system("getsockopt", &error))?;
        let route = route::of_connection(self.routes, local, peer, &routing).map_err(|_| Refusal::NoRoute)?;
        if (Flow { local: local.into(), remote: peer.into(), device: 0 }).is_link_local()
            && routing.device == 0
            && matches!(self.shape, Shape::Beside { .. })
        {
            return Err(Refusal::NoLink);
        }
        if route.local || routing.on_link && route.gateway.is_some() {
            return Err(Refusal::NoRoute);
        }
        if routing.mark != 0 {
            return Err(Refusal::Marked(routing.mark));
        }
        if route.encapsulated {
            return Err(Refusal::Encapsulated);
        }
        let interface = self.device(route.interface)?;
        // The firewall's and IPsec's rules are asked with the device.
        let flow = Flow { local: local.into(), remote: peer.into(), device: interface.index };
        self.guards.pass(self.routes, &flow, interface.index)?;
        match self.guards.verdict(&flow, interface.index, routing.mark)? {
            Verdict::Clear => {}
            Verdict::Covered => return Err(Refusal::Policy),
            Verdict::BlockedOut => return Err(Refusal::PolicyBlocks),
        }
        let hop = route.gateway.unwrap_or(host);
        let destination = rtnetlink::neighbour(self.routes, route.interface, hop).ok().flatten().ok_or(Refusal::NoNeighbour)?;
        let (ttl, _) = export::link_settings(fd, v4).map_err(|error| system("getsockopt", &error))?;
        let leaves_by = if matches!(self.shape, Shape::Inline { .. }) { 0 } else { interface.index };
        Ok((Hop { source: interface.address, destination, ttl, interface: leaves_by }, hop))
    }

    /// Returns the device by which the kernel is to receive the replay for a connection that is restored: the one its
    /// socket is bound to, or its route's, if the NIC can inject there; else the one that it came by `before`.
    pub fn device_of_replay(&mut self, before: u32, routing: &Routing, route: &Route) -> u32 {
        let wanted = if routing.device == 0 { route.interface } else { routing.device };
        if matches!(self.shape, Shape::Inline { .. }) || wanted == before {
            return before;
        }
        let link = self.known.link(self.routes, wanted);
        if link.is_ok_and(|link| link.up && link.kind == rtnetlink::ETHERNET) { wanted } else { before }
    }

    /// Returns the devices at which a connection's frames are received, beside the kernel, and by which NIC; inline
    /// there is one of each.
    fn path_of(&mut self, connection: &Connection, routing: &Routing, interface: &LinkInfo) -> Result<Path, Refusal> {
        let mut path = Path::default();
        let Shape::Beside { devices, .. } = &self.shape else { return Ok(path) };
        path.nic = connection.asked_nic.map_or(devices.nic_of(interface.index) as u32, u32::from);
        path.leaves_by = interface.index;
        path.anywhere = routing.device == 0;
        // A strict reverse path filter accepts packets by each of several equal-cost paths.
        if path.anywhere && interface.kind != rtnetlink::LOOPBACK {
            let paths = self.known.paths(self.routes, connection.local(), connection.peer(), routing).unwrap_or_default();
            let mut others: Vec<u32> = paths.into_iter().filter(|index| *index != interface.index).collect();
            others.sort_unstable();
            others.dedup();
            if others.len() > FURTHER {
                return Err(Refusal::ManyPaths(others.len() + 1));
            }
            path.also_at[..others.len()].copy_from_slice(&others);
        }
        Ok(path)
    }

    /// Returns the device of a route, if the NIC can use it.
    fn device(&mut self, index: u32) -> Result<LinkInfo, Refusal> {
        let (known, routes) = (&mut *self.known, self.routes);
        let mut info = || known.link(routes, index).map_err(|error| system("RTM_GETLINK", &error));
        match self.shape {
            Shape::Inline { interface } if *interface == index => info(),
            Shape::Inline { .. } => Err(Refusal::OtherInterface(index)),
            Shape::Beside { devices, .. } => {
                let info = info()?;
                if info.kind != rtnetlink::ETHERNET && info.kind != rtnetlink::LOOPBACK {
                    return Err(Refusal::NotEthernet(index));
                }
                devices.check(index)?;
                if devices.is_undealt(&info) {
                    devices.deal(self.routes).map_err(|error| system("RTM_GETLINK", &error))?;
                }
                Ok(info)
            }
        }
    }
}
