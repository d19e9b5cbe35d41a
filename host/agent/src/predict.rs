//! Says of a socket that no agent has whether its connection could go to a NIC beside the kernel, as a move would find
//! out: for `baton doctor`. The checks are those of a move, in the same order (`perform/offload.rs`, `way.rs`), as far
//! as they need nothing of an agent: what the NIC has is not known here.

use crate::cgroups::Cgroups;
use crate::guards::Guards;
use baton_handoff::examine::{self, system};
use baton_handoff::unenforced;
use baton_linux::netlink::Netlink;
use baton_linux::route::{self, Routing};
use baton_linux::rtnetlink::{self, LinkInfo, Master};
use baton_linux::tcp_info::TcpInfo;
use baton_linux::xfrm::Verdict;
use baton_linux::{conntrack, diagnosis, socket};
use baton_moves::Refusal;
use baton_steering::FURTHER;
use baton_wire::Flow;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

/// Looks through a socket's state and options: whether its connection may move.
pub(crate) fn look_through(fd: BorrowedFd<'_>, namespace: u64, flow: &Flow) -> Result<TcpInfo, Refusal> {
    let info = examine::examine(fd, namespace)?;
    unenforced::check(fd)?;
    let device = socket::device(fd).map_err(|error| system("SO_BINDTOIFINDEX", &error))?;
    match diagnosis::with_own(|netlink| diagnosis::has_md5_key(netlink, &flow.by(device))) {
        Ok(true) => Err(Refusal::Signed),
        _ => Ok(info),
    }
}

/// What would become of a socket's connection.
pub enum Judged {
    /// There is no connection of TCP.
    NoConnection,
    /// It would go to the NIC.
    Moves,
    /// It would stay in the kernel: why.
    Stays(String),
}

/// Judges sockets of the calling thread's network namespace.
pub struct Predictor {
    routes: Netlink,
    guards: Guards,
    cgroups: Cgroups,
    namespace: u64,
    /// Rules of the firewall and the like are not looked at.
    without_rules: bool,
}

impl Predictor {
    /// `without_rules`: the caller may not read the firewall's rules and IPsec's policies.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn new(without_rules: bool) -> io::Result<Predictor> {
        let (routes, namespace) = (rtnetlink::open()?, socket::own_namespace()?);
        Ok(Predictor { routes, guards: Guards::new(), cgroups: Cgroups::default(), namespace, without_rules })
    }

    /// Whether the connection of a process's socket could go to the NIC now. Calls on the socket wait for its lock.
    /// `shared`: another process holds it, too.
    pub fn judge(&mut self, fd: BorrowedFd<'_>, process: u32, shared: bool) -> Judged {
        match self.check(fd, process) {
            Ok(()) if shared => Judged::Stays(Refusal::Shared.to_string()),
            Ok(()) => Judged::Moves,
            Err(Refusal::NotTcp | Refusal::Closed(_)) => Judged::NoConnection,
            Err(refusal) => Judged::Stays(refusal.to_string()),
        }
    }

    fn check(&mut self, fd: BorrowedFd<'_>, process: u32) -> Result<(), Refusal> {
        // Without a connection there are no ends.
        examine::examine(fd, self.namespace)?;
        let local = socket::local_address(fd).map_err(|error| system("getsockname", &error))?;
        let peer = socket::peer_address(fd).map_err(|error| system("getpeername", &error))?;
        let flow = Flow { local: local.into(), remote: peer.into(), device: 0 };
        look_through(fd, self.namespace, &flow)?;
        let group = self.cgroups.of(process);
        if let Some(refusal) = group.and_then(|group| self.cgroups.keeps(&group)) {
            return Err(refusal);
        }
        let netfilter = self.guards.netfilter();
        if netfilter.is_some_and(|netfilter| matches!(conntrack::find(netfilter, &flow), Ok(Some(entry)) if entry.translated)) {
            return Err(Refusal::Translated);
        }
        self.judge_way(fd, &flow, local, peer)
    }

    fn judge_way(&mut self, fd: BorrowedFd<'_>, flow: &Flow, local: SocketAddr, peer: SocketAddr) -> Result<(), Refusal> {
        let routing = Routing::of(fd, flow.is_v4(), peer).map_err(|error| system("getsockopt", &error))?;
        let own = local.ip().to_canonical();
        if !route::is_local(&self.routes, own).map_err(|error| system("RTM_GETROUTE", &error))? {
            return Err(Refusal::SourceGone(own));
        }
        let route = route::of_connection(&self.routes, local, peer, &routing).map_err(|_| Refusal::NoRoute)?;
        if routing.on_link && route.gateway.is_some() {
            return Err(Refusal::NoRoute);
        }
        if routing.mark != 0 {
            return Err(Refusal::Marked(routing.mark));
        }
        if route.encapsulated {
            return Err(Refusal::Encapsulated);
        }
        if routing.device != 0 && routing.device != route.interface {
            let vrf = rtnetlink::link_at(&self.routes, routing.device).is_ok_and(|bound| bound.vrf);
            return Err(if vrf { Refusal::Vrf(routing.device) } else { Refusal::Bound(routing.device, route.interface) });
        }
        let interface = rtnetlink::link_at(&self.routes, route.interface).map_err(|error| system("RTM_GETLINK", &error))?;
        if interface.kind != rtnetlink::ETHERNET && interface.kind != rtnetlink::LOOPBACK {
            return Err(Refusal::NotEthernet(interface.index));
        }
        if flow.is_link_local() && routing.device == 0 {
            return Err(Refusal::NoLink);
        }
        if interface.vrf || interface.master == Master::Vrf {
            return Err(Refusal::Vrf(interface.index));
        }
        if !self.without_rules {
            self.judge_rules(flow, &interface, routing.mark)?;
        }
        if interface.kind == rtnetlink::LOOPBACK {
            return Ok(());
        }
        let hop = route.gateway.unwrap_or(peer.ip().to_canonical());
        if rtnetlink::neighbour(&self.routes, route.interface, hop).ok().flatten().is_none() {
            return Err(if interface.carrier { Refusal::NoNeighbour } else { Refusal::NoCarrier });
        }
        self.judge_paths(&interface, local, peer, &routing)
    }

    fn judge_rules(&mut self, flow: &Flow, interface: &LinkInfo, mark: u32) -> Result<(), Refusal> {
        self.guards.pass(&self.routes, flow, interface.index)?;
        if interface.kind == rtnetlink::LOOPBACK {
            return Ok(());
        }
        match self.guards.verdict(flow, interface.index, mark)? {
            Verdict::Clear => Ok(()),
            Verdict::Covered => Err(Refusal::Policy),
            Verdict::BlockedOut => Err(Refusal::PolicyBlocks),
        }
    }

    fn judge_paths(&self, interface: &LinkInfo, local: SocketAddr, peer: SocketAddr, routing: &Routing) -> Result<(), Refusal> {
        if routing.device != 0 {
            return Ok(());
        }
        let mut others = route::paths(&self.routes, local, peer, routing).unwrap_or_default();
        others.retain(|index| *index != interface.index);
        others.sort_unstable();
        others.dedup();
        if others.len() > FURTHER { Err(Refusal::ManyPaths(others.len() + 1)) } else { Ok(()) }
    }
}
