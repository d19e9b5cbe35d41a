//! What a move needs besides the connection: the NIC, the steering beside the kernel, routes and links.

use crate::calls::Calls;
use crate::cgroups::Cgroups;
use crate::chaos::Chaos;
use crate::devices::Devices;
use crate::guards::Guards;
use crate::holders::Searches;
use crate::known::Known;
use crate::nic::{Hardware, NicProcess};
use crate::tracker::Tracker;
use baton_backends::{BesideKernel, Kernel, PacketDevice, VnetDevice};
use baton_handoff::examine::system;
use baton_linux::interface;
use baton_linux::netlink::{Changes, Netlink};
use baton_log::{error, warning};
use baton_moves::{Refusal, Step};
use baton_shm::Region;
use baton_steering::{Path, Steer, Steering, listener_flow, messages_flow};
use baton_wire::{Endpoint, Flow};
use std::collections::{BTreeSet, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// How the NIC shares the host's network with the kernel.
pub(crate) enum Shape {
    /// The kernel's interface is a TAP behind the NIC.
    Inline {
        /// That interface's index.
        interface: u32,
    },
    /// The kernel keeps its devices, the NIC receives and sends beside it.
    Beside {
        steering: Steering,
        /// Of each NIC.
        mirrors: Vec<Mirrors>,
        devices: Box<Devices>,
        injector: OwnedFd,
        claims: Claims,
        /// Keeps the injector's BPF program attached.
        _injector_link: OwnedFd,
    },
}

/// Flows of connections that no NIC has, and that are not the kernel's alone.
#[derive(Default)]
pub(crate) struct Claims {
    /// Those that are to go to a NIC and are not steered yet.
    coming: HashSet<Flow>,
    /// Those that are steered still since an agent has died: its NICs had made them for listeners, and no program had
    /// accepted them. A NIC makes each again when its client sends something.
    unaccepted: HashSet<Flow>,
    /// Endpoints that no NIC serves any more, whose handshakes are not forgotten yet: see [`Shape::forget_handshakes`].
    pub gone: BTreeSet<Endpoint>,
    /// No listener is served, and no handshake is known.
    pub serves_none: bool,
}

/// What becomes of a flow with which an agent that has died has left the steering.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    Owned,
    Unaccepted,
    /// No NIC has it any more, and none will.
    Nobodys,
}

impl Left {
    /// `is_clients` says whether it is stolen, and its local end a listener's.
    fn of(flow: &Flow, owned: &HashSet<Flow>, is_clients: impl FnOnce() -> bool) -> Left {
        // Listeners are served anew, and what is made for them is bound to no device.
        let is_connection = *flow != listener_flow(flow.local) && *flow != messages_flow(flow.local);
        match () {
            () if owned.contains(flow) => Left::Owned,
            () if is_connection && flow.device == 0 && is_clients() => Left::Unaccepted,
            () => Left::Nobodys,
        }
    }
}

impl Shape {
    /// Returns the device through which the kernel is given frames.
    pub fn kernel(&self, host: &OwnedFd) -> io::Result<Kernel> {
        let host = host.try_clone()?;
        Ok(match self {
            Shape::Inline { .. } => Kernel::Inline(VnetDevice::new(host, false)),
            Shape::Beside { injector, .. } => {
                let host = PacketDevice::new(host, false);
                Kernel::Beside(BesideKernel::new(host, injector.try_clone()?))
            }
        })
    }

    /// Claims a flow for a connection that goes to a NIC. Returns false if another connection there gets some of its
    /// frames: one with the same 4-tuple, if either is bound to no device or both are to the same. (The kernel gives
    /// such frames to either of them.)
    #[must_use]
    pub fn claim(&mut self, flow: &Flow) -> bool {
        let Shape::Beside { steering, claims: Claims { coming, .. }, devices, .. } = self else { return true };
        let taken = |flow: Flow| coming.contains(&flow) || steering.has(&flow);
        let elsewhere = || flow.device != 0 && taken(flow.by(0));
        let bound = || flow.device == 0 && steering.has_bound() && devices.attached().any(|device| taken(flow.by(device)));
        let free = !taken(*flow) && !elsewhere() && !bound();
        free && coming.insert(*flow)
    }

    /// Gives up a claim, if it is not steered yet.
    pub fn give_up_claim(&mut self, flow: &Flow) {
        if let Shape::Beside { claims, .. } = self {
            claims.coming.remove(flow);
        }
    }

    /// Removes the flows with which an agent that has died has left the steering, but for the `owned` ones. What their
    /// peers send is the kernel's then, which resets them; and another connection can have the 4-tuple, of which the
    /// kernel could send nothing before. Those that a NIC makes again stay while their listener is served; `listens`
    /// says whether there is one at an endpoint.
    pub fn keep_only(&mut self, owned: &HashSet<Flow>, listens: impl Fn(Endpoint) -> bool) {
        let Shape::Beside { steering, claims, .. } = self else { return };
        for flow in steering.flows() {
            let is_clients = || listens(flow.local) && steering.steer_of(&flow) == Some(Steer::Steal);
            match Left::of(&flow, owned, is_clients) {
                Left::Owned => {}
                Left::Unaccepted => _ = claims.unaccepted.insert(flow),
                Left::Nobodys => {
                    if let Err(error) = steering.remove(&flow) {
                        still_steered(&flow, &error);
                    }
                }
            }
        }
    }

    /// Removes those flows at a local end that were to be made again: its listener is the kernel's now.
    pub fn forget_unaccepted(&mut self, local: Endpoint) {
        let Shape::Beside { claims, .. } = self else { return };
        let gone: Vec<Flow> = claims.unaccepted.iter().filter(|flow| flow.local == local).copied().collect();
        gone.iter().for_each(|flow| self.unsteer(flow));
    }

    /// Sets what the steering does with a connection's frames, beside the kernel.
    pub fn steer(&mut self, flow: &Flow, path: &Path, steer: Steer) -> Result<(), Refusal> {
        match self {
            Shape::Inline { .. } => Ok(()),
            Shape::Beside { steering, mirrors, claims, .. } => {
                claims.unaccepted.remove(flow);
                for (nic, mirrors) in (0..).zip(mirrors) {
                    mirrors.set(flow, steer == Steer::Mirror && nic == path.nic);
                }
                steering.set(flow, path, steer).map_err(|error| system("steering", &error))
            }
        }
    }

    /// Removes a connection from the steering: the kernel receives and sends its frames again.
    pub fn unsteer(&mut self, flow: &Flow) {
        if let Shape::Beside { steering, .. } = self
            && let Err(error) = steering.forget_handshake(flow)
        {
            still_steered(flow, &error);
        }
        self.end(flow);
    }

    /// Removes a connection that has ended on the NIC. If the NIC made it for a listener, it goes on to get what its
    /// peer sends, as in the handshake, and waits for the peer's FIN.
    pub fn end(&mut self, flow: &Flow) {
        if let Shape::Beside { steering, mirrors, claims, .. } = self {
            claims.unaccepted.remove(flow);
            mirrors.iter_mut().for_each(|mirrors| mirrors.set(flow, false));
            if let Err(error) = steering.remove(flow) {
                still_steered(flow, &error);
            }
        }
    }

    /// Steals a connection's frames after a NIC's death, so that none reaches the kernel, whatever stage its move had
    /// reached.
    pub fn steal_again(&mut self, flow: &Flow, path: &Path) {
        if let Err(refusal) = self.steer(flow, path, Steer::Steal) {
            warning!(
                [connection = %flow] "frames of {flow} may reach the kernel before it is restored: {refusal}";
                "if that resets it, its program has to connect again"
            );
        }
    }
}

fn still_steered(flow: &Flow, error: &io::Error) {
    error!(
        [connection = %flow] "{flow} is still kept from the kernel: {error}";
        "restart Baton, so that the kernel has it"
    );
}

/// The flows of one NIC that are being mirrored. Only while there are some the NIC's second packet socket is shown what
/// the kernel sends: that costs every frame of the host, the NIC's own too, a copy of its description.
pub(crate) struct Mirrors {
    outgoing: OwnedFd,
    flows: HashSet<Flow>,
}

impl Mirrors {
    /// None is mirrored yet. `outgoing` is the packet socket.
    pub fn new(outgoing: OwnedFd) -> io::Result<Mirrors> {
        interface::ignore_outgoing(outgoing.as_fd(), true)?;
        Ok(Mirrors { outgoing, flows: HashSet::new() })
    }

    fn set(&mut self, flow: &Flow, mirrored: bool) {
        let changed = if mirrored { self.flows.insert(*flow) } else { self.flows.remove(flow) };
        if changed
            && self.flows.len() == usize::from(mirrored)
            && let Err(error) = interface::ignore_outgoing(self.outgoing.as_fd(), !mirrored)
        {
            warning!(
                [] "the packet socket for what the kernel sends cannot be switched: {error}";
                "restart Baton if connections do not move"
            );
        }
    }
}

/// What a move needs.
pub(crate) struct Ground<'a> {
    pub nics: &'a mut [NicProcess],
    pub hardware: &'a [Hardware],
    /// Number of the connection's NIC, and that NIC's memory: see [`Ground::choose`].
    pub chosen: usize,
    pub nic_memory: &'a Region,
    /// The kernel's interface, through which the agent gives frames to the kernel itself.
    pub host: &'a OwnedFd,
    pub shape: &'a mut Shape,
    pub chaos: &'a Chaos,
    pub routes: &'a Netlink,
    pub diagnosis: &'a Netlink,
    pub guards: &'a mut Guards,
    pub known: &'a mut Known,
    pub tracker: &'a mut Tracker,
    pub cgroups: &'a mut Cgroups,
    pub searches: &'a mut Searches,
    /// Notifications about routes, addresses, devices and neighbours.
    pub changes: &'a Changes,
    /// Serial number of the connection that was registered last.
    pub latest: u64,
    /// No other move is under way: nothing waits while this one's answer is looked for.
    pub alone: bool,
    /// Number of the process whose connection is moved, and the user that has opened its session.
    pub process: u32,
    pub user: u32,
    pub calls: &'a Calls,
}

impl Ground<'_> {
    /// Makes the NIC with this number the connection's.
    pub fn choose(&mut self, nic: usize) {
        if let Some(hardware) = self.hardware.get(nic) {
            (self.chosen, self.nic_memory, self.host) = (nic, &hardware.memory, &hardware.host);
        }
    }

    /// The connection's NIC.
    pub fn nic(&mut self) -> &mut NicProcess {
        &mut self.nics[self.chosen]
    }

    /// Called after each step of a move; for tests, it may end the NIC or the agent.
    pub fn passed(&mut self, step: Step) {
        if self.chaos.strikes(step, self.nic().process()) {
            self.nic().end();
        }
    }

    /// The socket for requests to the connection tracker, if that may have an entry of the connection of this serial
    /// number.
    pub fn tracker_of(&mut self, serial: u64) -> Option<&Netlink> {
        let netfilter = self.guards.netfilter()?;
        (!self.known.is_untracked(netfilter, serial, self.latest)).then_some(netfilter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_has_and_no_nic_makes_again_is_cleared() {
        let local = Endpoint::v4([10, 0, 0, 1], 80);
        let flow = |port| Flow { local, remote: Endpoint::v4([10, 0, 0, 2], port), device: 0 };
        let owned = HashSet::from([flow(1000), messages_flow(local)]);
        let left = |flow: Flow, is_clients| Left::of(&flow, &owned, || is_clients);
        for is_clients in [false, true] {
            assert_eq!((left(flow(1000), is_clients), left(messages_flow(local), is_clients)), (Left::Owned, Left::Owned));
            let others = [flow(1000).by(7), listener_flow(local), messages_flow(Endpoint { port: 81, ..local })];
            assert_eq!(others.map(|one| left(one, is_clients)), [Left::Nobodys; 3]);
        }
        assert_eq!((left(flow(1001), true), left(flow(1001), false)), (Left::Unaccepted, Left::Nobodys));
    }
}
