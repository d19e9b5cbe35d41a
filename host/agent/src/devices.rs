//! Network devices to which the steering's programs are attached, beside the kernel. These are all devices by which the
//! kernel would accept a connection's packets, since the peer's may arrive by another than the one by which ours leave.

use baton_core::Dealing;
use baton_handoff::examine::system;
use baton_linux::control::Channel;
use baton_linux::interface;
use baton_linux::netlink::Netlink;
use baton_linux::rtnetlink::{self, LinkInfo, Master};
use baton_log::warning;
use baton_moves::Refusal;
use baton_protocol::keeper::Kept;
use baton_steering::{Accepts, Attached, Steering};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Values of rp_filter: off, which accepts every packet, and loose (RFC 3704), which accepts those whose source has any
/// route.
const NONE: u32 = 0;
const LOOSE: u32 = 2;

/// How far the programs are attached for the first move. From [`Progress::UnderWay`] on new devices are attached to as
/// they appear.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Progress {
    /// No move has needed a device yet.
    #[default]
    NotBegun,
    /// A thread attaches to the devices.
    UnderWay,
    /// Attaching has succeeded or failed at every device that existed at the first move.
    Complete,
}

/// Devices with the steering's programs attached.
#[derive(Default)]
pub(crate) struct Devices {
    /// Attached devices by index, with their BPF links. The links also outlive the keeper, until the connections are
    /// restored.
    attached: HashMap<u32, Vec<OwnedFd>>,
    /// Index of the injector, the device through which the kernel is given frames.
    injector: u32,
    /// Contents of the steering's map of devices: which packets are accepted there, and the device's link address.
    accepts: HashMap<u32, (Accepts, [u8; 6])>,
    /// Devices that a move has needed besides those by which all connections are received: loopback.
    wanted: HashSet<u32>,
    /// Why attaching to a device has failed. The next move that needs the device is refused with it, and the one after
    /// that tries again.
    refused: HashMap<u32, io::Error>,
    /// Devices whose failure has been logged: once each.
    reported: HashSet<u32>,
    /// The NIC's packet sockets, until they receive: while it has no connection, they cost the host's frames nothing.
    deaf: Vec<OwnedFd>,
    progress: Progress,
    /// Which NIC's they are.
    dealing: Dealing,
}

impl Devices {
    /// Takes over the devices that an earlier agent attached to. `sockets`: the NICs' packet sockets.
    pub fn inherited(attached: HashMap<u32, Vec<OwnedFd>>, injector: u32, sockets: Vec<OwnedFd>, dealing: Dealing) -> Devices {
        let progress = if attached.is_empty() { Progress::NotBegun } else { Progress::Complete };
        Devices { progress, attached, injector, deaf: sockets, dealing, ..Devices::default() }
    }

    /// Gives each device that is there a NIC. Called when links have changed.
    pub fn deal(&mut self, routes: &Netlink) -> io::Result<()> {
        if self.dealing.is_trivial() {
            return Ok(());
        }
        let links = rtnetlink::links(routes)?;
        let named: Vec<Option<u32>> =
            self.dealing.names().iter().map(|name| rtnetlink::link(routes, name).ok().map(|link| link.index)).collect();
        let existing: Vec<u32> = links.iter().map(|link| link.index).collect();
        let mut usable: Vec<u32> = links.iter().filter(|link| self.receives(link)).map(|link| link.index).collect();
        usable.sort_unstable();
        self.dealing.deal(&named, &existing, &usable);
        Ok(())
    }

    /// Number of a device's NIC. The loopback device, and one that is not known yet, are the first one's.
    pub fn nic_of(&self, index: u32) -> usize {
        self.dealing.nic_of(index).unwrap_or(0)
    }

    /// Whether a device that a connection needs has no NIC yet.
    pub fn is_undealt(&self, link: &LinkInfo) -> bool {
        self.receives(link) && self.dealing.nic_of(link.index).is_none()
    }

    /// Names of a NIC's devices.
    pub fn of_nic(&self, nic: usize) -> Vec<String> {
        self.dealing.devices_of(nic).filter_map(|index| interface::name_of(index).ok()).collect()
    }

    /// Checks that a connection can use the device with this index: attaching is complete, and the programs are at this
    /// device.
    ///
    /// # Errors
    /// [`Refusal::Attaching`] if attaching to it is still to be done, which
    /// [`Agent::attach_devices`](crate::agent::Agent) then does; or why it has failed.
    pub fn check(&mut self, index: u32) -> Result<(), Refusal> {
        if self.are_complete() && self.attached.contains_key(&index) {
            return Ok(());
        }
        if let Some(error) = self.refused.remove(&index) {
            return Err(system("tcx", &error));
        }
        self.wanted.insert(index);
        Err(Refusal::Attaching)
    }

    /// Whether attaching has succeeded or failed at every device that existed at the first move.
    pub fn are_complete(&self) -> bool {
        self.progress == Progress::Complete
    }

    /// Whether [`Self::are_complete`], and attaching to the device `also` has succeeded or failed. If not, the next
    /// [`Agent::attach_devices`](crate::agent::Agent) attaches to it.
    pub fn are_tried(&mut self, also: Option<u32>) -> bool {
        let untried = also.filter(|index| !self.attached.contains_key(index) && !self.refused.contains_key(index));
        self.wanted.extend(untried);
        self.are_complete() && untried.is_none()
    }

    /// The devices to which the programs are attached.
    pub fn attached(&self) -> impl Iterator<Item = u32> {
        self.attached.keys().copied()
    }

    /// Whether no move has needed a device yet.
    pub fn is_new(&self) -> bool {
        self.progress == Progress::NotBegun
    }

    /// Returns the indices of the devices to attach to, and forgets devices that do not exist any more. The NICs'
    /// packet sockets receive from now on.
    pub fn missing(&mut self, routes: &Netlink, keeper: &Channel) -> io::Result<BTreeSet<u32>> {
        if self.is_new() {
            self.progress = Progress::UnderWay;
        }
        self.deaf.iter().try_for_each(|socket| interface::receive_at(socket.as_fd(), 0))?;
        self.deaf.clear();
        let links = rtnetlink::links(routes)?;
        let existing: HashSet<u32> = links.iter().map(|link| link.index).collect();
        self.refused.retain(|index, _| existing.contains(index));
        for index in self.wanted.extract_if(|index| !existing.contains(index)) {
            self.refused.insert(index, io::Error::new(io::ErrorKind::NotFound, "it is gone"));
        }
        self.reported.retain(|index| existing.contains(index));
        for index in self.attached.extract_if(|index, _| !existing.contains(index)).map(|(index, _)| index) {
            let _ = keeper.send(&Kept::DeviceGone(index), &[]);
        }
        let needed = links.iter().filter(|link| self.receives(link) || self.wanted.contains(&link.index));
        let missing = needed.map(|link| link.index).filter(|index| !self.attached.contains_key(index));
        Ok(missing.filter(|index| !self.refused.contains_key(index)).collect())
    }

    /// Stores the BPF links of the programs at a device, or why attaching has failed. The keeper gets the links as
    /// well, so they outlive this agent.
    pub fn take(&mut self, keeper: &Channel, index: u32, attached: io::Result<Attached>) {
        let kept = attached.and_then(|attached| {
            keeper.send(&Kept::Device(index), &attached.links.each_ref().map(AsFd::as_fd))?;
            Ok(attached)
        });
        match kept {
            Ok(attached) => _ = self.attached.insert(index, attached.links.into()),
            Err(error) => {
                // Segments that arrive there reach the shell, whose drop counter shows them.
                if self.reported.insert(index) {
                    warning!(
                        [] "the NIC does not receive at interface {index}: {error}";
                        "connections over it stay in the kernel; `baton doctor` names what is missing"
                    );
                }
                self.refused.insert(index, error);
            }
        }
    }

    /// Notes that attaching has succeeded or failed at every device.
    pub fn have_been_tried(&mut self) {
        self.progress = Progress::Complete;
    }

    /// Updates the steering's map. Called when links or their settings have changed, and when devices have been
    /// attached to.
    pub fn follow(&mut self, routes: &Netlink, steering: &Steering) -> io::Result<()> {
        // A device without IPv4 has no rp_filter, and accepts nothing.
        let filters: HashMap<u32, u32> = rtnetlink::reverse_path_filters(routes).unwrap_or_default().into_iter().collect();
        let addressed = rtnetlink::with_ipv4_address(routes)?;
        let mut now = HashMap::new();
        for link in rtnetlink::links(routes)?.iter().filter(|link| self.receives(link) && self.attached.contains_key(&link.index))
        {
            // At a device without an address even a loose filter accepts only packets whose answers would leave by that
            // device.
            let v4 = match filters.get(&link.index) {
                Some(&NONE) => true,
                Some(&LOOSE) => addressed.contains(&link.index),
                _ => false,
            };
            now.insert(link.index, (Accepts { v4, v6: true }, link.address));
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

    /// Whether the kernel may accept packets at a link at which the NIC receives none.
    pub fn passes_nic_by(&self, link: &LinkInfo) -> bool {
        let other = link.kind != rtnetlink::ETHERNET && link.kind != rtnetlink::LOOPBACK;
        link.up && (other || self.receives(link) && !self.attached.contains_key(&link.index))
    }

    /// Whether packets that arrive at a link count as received by it, and the NIC can receive there. Packets that
    /// arrive at a port of a bridge or bond are received at the bridge or bond; connections in a VRF do not move.
    pub fn receives(&self, link: &LinkInfo) -> bool {
        link.up && link.kind == rtnetlink::ETHERNET && link.master == Master::None && !link.vrf && link.index != self.injector
    }
}
