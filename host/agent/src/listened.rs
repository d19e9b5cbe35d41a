//! The part of listening that is the steering's, beside the kernel: clients' segments to a listener reach the NIC, from
//! their first SYN on, and those of connections that the kernel has do not.

use crate::ground::Shape;
use baton_handoff::examine::system;
use baton_linux::netlink::Netlink;
use baton_linux::rtnetlink::{self, LinkInfo};
use baton_log::error;
use baton_moves::Refusal;
use baton_steering::{LOOPBACK, Path, Steer, Steering, listener_flow};
use baton_wire::{Endpoint, Flow};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

/// Endpoints of which NICs get the clients' segments, each with the NIC's number.
pub(crate) type Steered = BTreeMap<SocketAddr, u32>;

/// The devices at which a client may send: all by which the kernel accepts packets whose answers it may send by others,
/// and loopback.
const FROM_ANYWHERE: Path = Path { leaves_by: LOOPBACK, anywhere: true, also_at: [0; baton_steering::FURTHER], nic: 0 };

impl Shape {
    /// The largest packet that the NIC's answers to SYNs promise to take, by any device by which clients may reach it.
    pub fn mtu_of_listeners(&self, routes: &Netlink) -> Result<u32, Refusal> {
        let failed = |error: std::io::Error| system("RTM_GETLINK", &error);
        match self {
            Shape::Inline { interface } => rtnetlink::link_at(routes, *interface).map(|link| link.mtu).map_err(failed),
            Shape::Beside { devices, .. } => {
                let reaches = |link: &LinkInfo| devices.receives(link);
                let links = rtnetlink::links(routes).map_err(failed)?;
                let least = links.iter().filter(|link| reaches(link)).map(|link| link.mtu).min();
                Ok(least.unwrap_or(65_535).clamp(576, 65_535))
            }
        }
    }

    /// Number of the NIC whose clients send to an address of this device.
    pub fn nic_of(&self, device: u32) -> usize {
        if let Shape::Beside { devices, .. } = self { devices.nic_of(device) } else { 0 }
    }

    /// Gives the NICs what a listener's clients send to the endpoints `now`, and no more what they send to the others
    /// of `before`.
    pub fn serve(&mut self, before: &Steered, now: &Steered) -> Result<(), Refusal> {
        let Shape::Beside { devices, .. } = self else { return Ok(()) };
        if !now.is_empty() {
            devices.check(LOOPBACK)?;
        }
        let gone =
            before.iter().filter(|(address, nic)| now.get(address) != Some(nic)).map(|(address, _)| Endpoint::from(*address));
        self.leave_to_kernel(&gone.collect::<Vec<_>>());
        let Shape::Beside { steering, claims, .. } = self else { return Ok(()) };
        if is_served_again(&claims.gone, now) {
            // What the clients of an earlier listener send is not this one's.
            forget(steering, &mut claims.gone);
        }
        claims.serves_none &= now.is_empty();
        for (address, nic) in now {
            steering
                .set(&listener_flow((*address).into()), &Path { nic: *nic, ..FROM_ANYWHERE }, Steer::Steal)
                .map_err(|error| system("steering", &error))?;
        }
        if now.is_empty() { Ok(()) } else { steering.set_listening(true).map_err(|error| system("steering", &error)) }
    }

    /// The kernel gets what clients send to these endpoints, but for connections that the NIC has; from handshakes that
    /// are under way once they are forgotten.
    fn leave_to_kernel(&mut self, locals: &[Endpoint]) {
        for local in locals {
            self.unsteer(&listener_flow(*local));
            self.forget_unaccepted(*local);
        }
        if let Shape::Beside { claims, .. } = self {
            claims.gone.extend(locals);
        }
    }

    /// Forgets the handshakes at endpoints that no NIC serves any more. All that are known are looked at for that,
    /// however few the endpoints are: for each listener of a program that ends it would take the agent seconds. So the
    /// agent's loop does it in each round, for all that have ended in it.
    pub fn forget_handshakes(&mut self) {
        if let Shape::Beside { steering, claims, .. } = self {
            forget(steering, &mut claims.gone);
        }
    }

    /// No listener is served any more.
    pub fn serve_none(&mut self) {
        let Shape::Beside { steering, claims, .. } = self else { return };
        if claims.serves_none {
            return;
        }
        claims.gone.clear();
        match steering.set_listening(false) {
            Ok(()) => claims.serves_none = true,
            Err(error) => {
                error!(
                    [] "handshakes are still kept from the kernel: {error}";
                    "restart Baton, so that the kernel has them"
                );
            }
        }
    }

    /// The NIC keeps a connection that it has made, from any device, until its way is known. Its handshake stays in the
    /// steering: a segment that is looked up meanwhile is found in one of the two maps, and the peer's FIN after the
    /// connection's end, too.
    pub fn keep_made(&mut self, flow: &Flow, interface: u32, nic: usize) -> Result<(), Refusal> {
        self.steer(flow, &Path { leaves_by: interface, nic: nic as u32, ..FROM_ANYWHERE }, Steer::Steal)
    }
}

/// Whether any of the endpoints `now` is one whose handshakes are not forgotten yet.
fn is_served_again(gone: &BTreeSet<Endpoint>, now: &Steered) -> bool {
    !gone.is_empty() && now.keys().any(|address| gone.contains(&Endpoint::from(*address)))
}

/// Forgets the handshakes at these endpoints.
fn forget(steering: &Steering, gone: &mut BTreeSet<Endpoint>) {
    if !gone.is_empty() {
        let locals: Vec<Endpoint> = std::mem::take(gone).into_iter().collect();
        steering.forget_handshakes(&locals);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::Devices;
    use crate::ground::Claims;
    use std::fs::File;
    use std::os::fd::OwnedFd;

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], port))
    }

    #[test]
    fn an_endpoint_that_is_served_again_has_no_handshakes_of_before() {
        let gone = BTreeSet::from([80, 81].map(|port| Endpoint::from(at(port))));
        let again = |ports: &[u16]| is_served_again(&gone, &ports.iter().map(|port| (at(*port), 0)).collect());
        assert!(again(&[7, 81]) && !again(&[7]) && !again(&[]));
        assert!(!is_served_again(&BTreeSet::new(), &Steered::from([(at(80), 0)])));
    }

    /// Needs the right to load BPF programs. A program with many listeners ends: their handshakes are forgotten
    /// together, and when no listener is left nothing is looked at again for those that go.
    #[test]
    fn handshakes_of_many_listeners_are_forgotten_together() {
        if let Err(error) = baton_steering::supported() {
            eprintln!("skipped: {error}");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return;
        }
        let nothing = || OwnedFd::from(File::open("/dev/null").expect("a file"));
        let mut shape = Shape::Beside {
            steering: Steering::new(8).expect("a steering"),
            mirrors: Vec::new(),
            devices: Box::new(Devices::default()),
            injector: nothing(),
            claims: Claims::default(),
            _injector_link: nothing(),
        };
        let gone = |shape: &Shape| match shape {
            Shape::Beside { claims, .. } => (claims.gone.len(), claims.serves_none),
            Shape::Inline { .. } => (0, true),
        };
        (1..=1024).for_each(|port| shape.serve(&Steered::from([(at(port), 0)]), &Steered::new()).expect("the kernel's"));
        assert_eq!(gone(&shape), (1024, false));
        shape.forget_handshakes();
        assert_eq!(gone(&shape), (0, false));
        shape.serve(&Steered::from([(at(80), 0)]), &Steered::new()).expect("the kernel's");
        shape.serve_none();
        assert_eq!(gone(&shape), (0, true), "all are forgotten then");
    }
}
