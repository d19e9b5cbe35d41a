//! What a move needs of the host besides the connection: the NIC, the steering beside the kernel, routes and links.

use crate::connection::{Connection, Stage};
use crate::kept::Kept;
use crate::nic::NicProcess;
use crate::step::{Chaos, Step};
use baton_abi::{Cid, Control};
use baton_backends::{BesideKernel, Kernel, VnetDevice};
use baton_kernel::control::Channel;
use baton_kernel::examine::Stay;
use baton_kernel::netlink::Netlink;
use baton_kernel::{export, process, rtnetlink, socket};
use baton_ring::Region;
use baton_steering::{Steer, Steering};
use baton_wire::Flow;
use baton_wire::frame::Link;
use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// How the NIC shares the host's network with the kernel.
pub(crate) enum Shape {
    /// The kernel's interface is a TAP behind the NIC.
    Inline {
        /// That interface.
        interface: rtnetlink::LinkInfo,
    },
    /// The kernel has its devices, the NIC hears and speaks beside it.
    Beside {
        steering: Steering,
        /// Devices at which the programs are, with their links.
        devices: HashSet<u32>,
        injector: OwnedFd,
    },
}

impl Shape {
    /// The device through which the kernel is given frames.
    pub fn kernel(&self, host: &OwnedFd) -> io::Result<Kernel> {
        let host = host.try_clone()?;
        Ok(match self {
            Shape::Inline { .. } => Kernel::Inline(VnetDevice::new(host, false)),
            Shape::Beside { injector, .. } => {
                Kernel::Beside(BesideKernel::new(host, injector.try_clone()?, baton_steering::INJECT))
            }
        })
    }

    /// Says what is done with a connection's frames beside the kernel.
    fn steer(&self, flow: &Flow, interface: u32, steer: Steer) -> Result<(), Stay> {
        match self {
            Shape::Inline { .. } => Ok(()),
            Shape::Beside { steering, .. } => {
                steering.set(flow, interface, steer).map_err(|error| Stay::System("steering", error))
            }
        }
    }

    /// The kernel hears and speaks for a connection again.
    pub fn unsteer(&self, flow: &Flow) {
        if let Shape::Beside { steering, .. } = self
            && let Err(error) = steering.remove(flow)
        {
            eprintln!("baton agent: {flow:?} is still kept from the kernel: {error}");
        }
    }

    /// After a NIC's death: nothing of the connection meets the kernel, whatever the last NIC had come to.
    pub fn steal_again(&self, flow: &Flow, interface: u32) {
        if let Err(stay) = self.steer(flow, interface, Steer::Steal) {
            eprintln!("baton agent: {flow:?}: {stay}");
        }
    }
}

/// What a move needs.
pub(crate) struct Ground<'a> {
    pub nic: &'a mut NicProcess,
    pub nic_memory: &'a Region,
    /// The kernel's interface, for what the agent has to say to it itself.
    pub host: &'a OwnedFd,
    pub shape: &'a mut Shape,
    pub keeper: &'a Channel,
    pub chaos: &'a Chaos,
    pub routes: &'a Netlink,
    pub diagnosis: &'a Netlink,
    /// The process whose connection is moved.
    pub process: u32,
}

impl Ground<'_> {
    /// A step of a move has been made.
    pub fn passed(&mut self, step: Step) {
        if self.chaos.strikes(step) {
            self.nic.end();
        }
    }

    /// Whether a process holds the connection's socket that is not its program, nor one of Baton's.
    pub fn others_hold(&self, connection: &Connection) -> bool {
        let ours = [self.process, std::process::id(), std::os::unix::process::parent_id()];
        connection
            .fd()
            .and_then(|fd| socket::inode(fd).map_err(|error| Stay::System("fstat", error)))
            .is_ok_and(|inode| process::others_hold(inode, &ours))
    }

    /// The link header of a connection's frames, if the NIC is on their way.
    pub fn link_of(&mut self, connection: &Connection) -> Result<Link, Stay> {
        let (local, peer) = (connection.local.ip().to_canonical(), connection.peer.ip().to_canonical());
        if !rtnetlink::is_local(self.routes, local).map_err(|error| Stay::System("RTM_GETADDR", error))? {
            return Err(Stay::SourceGone(local));
        }
        let route = rtnetlink::route_to(self.routes, peer, Some(local)).map_err(|_| Stay::NoRoute)?;
        let interface = self.device(route.interface)?;
        let neighbour = if interface.kind == rtnetlink::LOOPBACK {
            [0; 6]
        } else {
            let hop = route.gateway.unwrap_or(peer);
            rtnetlink::neighbour(self.routes, route.interface, hop).ok().flatten().ok_or(Stay::NoNeighbour)?
        };
        let (ttl, tos) = match (&connection.fd, &connection.stage) {
            (None, Stage::Nic(on_nic)) => (on_nic.image.link.ttl, on_nic.image.link.tos),
            _ => export::link_settings(connection.fd()?, connection.flow.is_v4())
                .map_err(|error| Stay::System("getsockopt", error))?,
        };
        let index = if matches!(self.shape, Shape::Beside { .. }) { interface.index } else { 0 };
        Ok(Link { source: interface.address, destination: neighbour, ttl, tos, flow_label: 0, interface: index })
    }

    /// The device of a route, if the NIC can be there. Beside the kernel the programs are put at it when it is first used.
    fn device(&mut self, index: u32) -> Result<rtnetlink::LinkInfo, Stay> {
        match self.shape {
            Shape::Inline { interface } if interface.index == index => Ok(*interface),
            Shape::Inline { .. } => Err(Stay::OtherInterface(index)),
            Shape::Beside { steering, devices, .. } => {
                let info = rtnetlink::link_at(self.routes, index).map_err(|error| Stay::System("RTM_GETLINK", error))?;
                if info.kind != rtnetlink::ETHERNET && info.kind != rtnetlink::LOOPBACK {
                    return Err(Stay::NotEthernet(index));
                }
                if !devices.contains(&index) {
                    let attached = steering.attach(index).map_err(|error| Stay::System("tcx", error))?;
                    let links = attached.links.each_ref().map(AsFd::as_fd);
                    // The keeper holds the links from now on: they outlive this agent, and vanish with the keeper.
                    self.keeper.send(&Kept::Device(index), &links).map_err(|error| Stay::System("keeper", error))?;
                    devices.insert(index);
                }
                Ok(info)
            }
        }
    }

    /// The NIC copies the connection's frames; its flow is in the slot.
    pub fn mirror(&mut self, cid: Cid, flow: &Flow, interface: u32) -> Result<(), Stay> {
        self.nic.control(Control::Mirror, cid, 0)?;
        self.shape.steer(flow, interface, Steer::Mirror)
    }

    /// The NIC gets the connection's frames alone.
    pub fn steal(&mut self, cid: Cid, flow: &Flow, interface: u32) -> Result<(), Stay> {
        self.nic.control(Control::Steal, cid, 0)?;
        self.shape.steer(flow, interface, Steer::Steal)
    }

    /// The NIC gives up what it holds of a connection that it does not run; see [`Control::Cancel`].
    pub fn cancel(&mut self, cid: Cid, flow: &Flow, forgotten: bool) {
        self.shape.unsteer(flow);
        let _ = self.nic.control(Control::Cancel, cid, u32::from(forgotten));
    }

    /// The NIC lets go of a connection that the kernel has again.
    pub fn release(&mut self, cid: Cid, flow: &Flow) -> Result<(), Stay> {
        self.shape.unsteer(flow);
        self.nic.control(Control::Release, cid, 0).map(|_| ())
    }
}
