//! What an agent begins with: its NICs' hardware and the devices beside the kernel.

use super::STEERING;
use crate::devices::Devices;
use crate::ground::Mirrors;
use crate::nic::Hardware;
use crate::settings::AgentSettings;
use anyhow::{Context, Result};
use baton_core::Dealing;
use baton_linux::events::Doorbell;
use baton_linux::netlink::Netlink;
use baton_linux::process;
use baton_protocol::nic::Descriptor;
use baton_shm::Region;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Adds what the NICs after the first one have. They share the agent's doorbell.
pub(super) fn of_further_nics(first: Hardware, nics: usize) -> Result<Vec<Hardware>> {
    let mut numbers = STEERING + baton_steering::DESCRIPTORS as i32 + 1..;
    let mut next = || process::inherited(numbers.next().unwrap_or_default()).context("a descriptor of a further NIC");
    let mut all = vec![first];
    for _ in 1..nics {
        all.push(Hardware {
            host: next()?,
            wire: next()?,
            card: Vec::new(),
            memory: Arc::new(Region::map(next()?)?),
            nic_bell: Doorbell::from_fd(next()?),
            agent_bell: all[0].agent_bell.try_clone()?,
        });
    }
    Ok(all)
}

pub(super) fn mirrors(hardware: &[Hardware]) -> io::Result<Vec<Mirrors>> {
    hardware.iter().map(|hardware| Mirrors::new(hardware.host.try_clone()?)).collect()
}

/// The devices, those that an earlier agent has attached to among them, each with its NIC.
pub(super) fn devices(
    hardware: &[Hardware],
    attached: HashMap<u32, Vec<OwnedFd>>,
    injector: u32,
    settings: &AgentSettings,
    routes: &Netlink,
) -> Result<Devices> {
    let sockets = hardware.iter().flat_map(|hardware| [&hardware.host, &hardware.wire]);
    let sockets = sockets.map(OwnedFd::try_clone).collect::<io::Result<Vec<_>>>()?;
    let dealing = Dealing::new(settings.nics, settings.devices.clone());
    let mut devices = Devices::inherited(attached, injector, sockets, dealing);
    devices.deal(routes).context("the NICs' devices")?;
    Ok(devices)
}

/// The descriptor that the keeper has made this one.
pub(super) fn inherited_as(descriptor: Descriptor) -> Result<OwnedFd> {
    process::inherited(descriptor as i32)
        .with_context(|| format!("descriptor {descriptor:?}; the keeper starts this process, not a person"))
}
