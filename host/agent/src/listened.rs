//! The part of listening that is the steering's, beside the kernel: clients' segments to a listener reach the NIC, from
//! their first SYN on, and those of connections that the kernel has do not.

use crate::ground::Shape;
use baton_handoff::examine::system;
use baton_linux::netlink::Netlink;
use baton_linux::rtnetlink::{self, LinkInfo};
use baton_log::error;
use baton_moves::Refusal;
use baton_steering::{LOOPBACK, Path, Steer, listener_flow};
use baton_wire::{Endpoint, Flow};
use std::collections::BTreeMap;
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
        let Shape::Beside { steering, .. } = self else { return Ok(()) };
        for (address, nic) in now {
            steering
                .set(&listener_flow((*address).into()), &Path { nic: *nic, ..FROM_ANYWHERE }, Steer::Steal)
                .map_err(|error| system("steering", &error))?;
        }
        if now.is_empty() { Ok(()) } else { steering.set_listening(true).map_err(|error| system("steering", &error)) }
    }

    /// The kernel gets what clients send to these endpoints, but for connections that the NIC has.
    fn leave_to_kernel(&mut self, locals: &[Endpoint]) {
        for local in locals {
            self.unsteer(&listener_flow(*local));
            self.forget_unaccepted(*local);
        }
        if let Shape::Beside { steering, .. } = self
            && !locals.is_empty()
        {
            steering.forget_handshakes(locals);
        }
    }

    /// No listener is served any more.
    pub fn serve_none(&mut self) {
        if let Shape::Beside { steering, .. } = self
            && let Err(error) = steering.set_listening(false)
        {
            error!(
                [] "handshakes are still kept from the kernel: {error}";
                "restart Baton, so that the kernel has them"
            );
        }
    }

    /// The NIC keeps a connection that it has made, from any device, until its way is known. Its handshake stays in the
    /// steering: a segment that is looked up meanwhile is found in one of the two maps, and the peer's FIN after the
    /// connection's end, too.
    pub fn keep_made(&mut self, flow: &Flow, interface: u32, nic: usize) -> Result<(), Refusal> {
        self.steer(flow, &Path { leaves_by: interface, nic: nic as u32, ..FROM_ANYWHERE }, Steer::Steal)
    }
}
