//! Devices at which the steering's programs are, beside the kernel: all by which the kernel would accept a connection's packets, since the
//! peer's may come by another than that by which ours leave.

use baton_linux::control::Channel;
use baton_linux::netlink::Netlink;
use baton_linux::rtnetlink::{self, LinkInfo, Master};
use baton_protocol::keeper::Kept;
use baton_steering::{Accepts, Steering};
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Reverse path filters that take every packet, or every one from somewhere that there is a route to.
const NONE: u32 = 0;
const LOOSE: u32 = 2;

/// Devices with programs.
#[derive(Default)]
pub(crate) struct Devices {
    /// With their links, which outlive the keeper, too, until the connections are back.
    attached: HashMap<u32, Vec<OwnedFd>>,
    /// The injector, through which the kernel is given frames.
    injector: u32,
    /// What the map of devices says.
    accepts: HashMap<u32, (Accepts, [u8; 6])>,
    /// Devices that could not be had, of which it has been said.
    refused: HashSet<u32>,
    /// Somebody has needed a device: from now on all are kept up with.
    followed: bool,
}

impl Devices {
    /// Those that an earlier agent has left.
    pub fn inherited(attached: HashMap<u32, Vec<OwnedFd>>, injector: u32) -> Devices {
        Devices { followed: !attached.is_empty(), attached, injector, ..Devices::default() }
    }

    /// Puts the programs at a device, if they are not there. The keeper holds the links, too: they outlive this agent.
    pub fn attach(&mut self, steering: &Steering, keeper: &Channel, index: u32) -> io::Result<()> {
        if self.attached.contains_key(&index) {
            return Ok(());
        }
        let attached = steering.attach(index)?;
        keeper.send(&Kept::Device(index), &attached.links.each_ref().map(AsFd::as_fd))?;
        self.attached.insert(index, attached.links.into());
        Ok(())
    }

    /// Whether the devices are to be kept up with, and have not been looked at yet.
    pub fn is_new(&self) -> bool {
        !self.followed
    }

    /// Links, or their settings, have changed, or a device is needed for the first time.
    pub fn follow(&mut self, routes: &Netlink, steering: &Steering, keeper: &Channel) -> io::Result<()> {
        self.followed = true;
        let links = rtnetlink::links(routes)?;
        // A device without IPv4 has no filter, and takes nothing.
        let filters: HashMap<u32, u32> = rtnetlink::reverse_path_filters(routes).unwrap_or_default().into_iter().collect();
        let addressed = rtnetlink::with_ipv4_address(routes)?;
        let mut gone = std::mem::take(&mut self.attached);
        let mut now = HashMap::new();
        for link in &links {
            if let Some(links) = gone.remove(&link.index) {
                self.attached.insert(link.index, links);
            }
            if !self.receives(link) {
                continue;
            }
            if let Err(error) = self.attach(steering, keeper, link.index) {
                // Segments that come there reach the shell, which tells on them.
                if self.refused.insert(link.index) {
                    eprintln!("baton agent: the NIC does not hear at interface {}: {error}", link.index);
                }
                continue;
            }
            // A loose filter, too, takes nothing at a device without an address but what answers to it.
            let v4 = match filters.get(&link.index) {
                Some(&NONE) => true,
                Some(&LOOSE) => addressed.contains(&link.index),
                _ => false,
            };
            now.insert(link.index, (Accepts { v4, v6: true }, link.address));
        }
        for index in gone.into_keys() {
            let _ = keeper.send(&Kept::DeviceGone(index), &[]);
        }
        for index in self.accepts.keys().filter(|index| !now.contains_key(index)) {
            steering.forget_device(*index)?;
        }
        for (index, known) in &now {
            if self.accepts.get(index) != Some(known) {
                steering.accept_at(*index, known.0, known.1)?;
            }
        }
        self.accepts = now;
        Ok(())
    }

    /// Whether the kernel may take packets at a link at which the NIC does not hear.
    pub fn is_deaf_at(&self, link: &LinkInfo) -> bool {
        let other = link.kind != rtnetlink::ETHERNET && link.kind != rtnetlink::LOOPBACK;
        link.up && (other || self.receives(link) && !self.attached.contains_key(&link.index))
    }

    /// Whether packets that come to a link count as received by it, and the NIC can hear there. What comes to a port of a bridge or bond
    /// is heard at that; of a VRF nothing moves.
    fn receives(&self, link: &LinkInfo) -> bool {
        link.up && link.kind == rtnetlink::ETHERNET && link.master == Master::None && !link.vrf && link.index != self.injector
    }
}
