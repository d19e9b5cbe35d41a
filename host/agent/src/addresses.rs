//! The NIC's own addresses, as far as they concern the host: which of them it can have, and that the kernel has them as
//! well, as long as the NIC uses them. The kernel owns their ports, its sockets are bound to them, and it answers
//! pings.
//!
//! Between kernel and wire the NIC probes, announces and answers. Beside the kernel, which receives every frame and
//! answers for all of its addresses, the agent probes and announces ([`beside`]).

mod beside;

use crate::agent::Agent;
use crate::connection::Asker;
use crate::ground::Shape;
use baton_abi::layout::nic;
use baton_abi::{AddressEntry, AddressState};
use baton_linux::events::monotonic_micros;
use baton_linux::resolution::{self, Released};
use baton_linux::{interface, route, rtnetlink};
use baton_log::{info, warning};
use baton_protocol::address::{AddressInfo, OwnAddress, Standing};
use baton_protocol::keeper::Kept;
use baton_protocol::program::Reply;
use baton_shm::Region;
use baton_wire::Endpoint;
use beside::Prober;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Tools that may wait at a time until no address is being probed for.
const MOST_WAITING: usize = 64;

/// The addresses, in the order of the NIC's settings.
#[derive(Default)]
pub(crate) struct Addresses {
    own: Vec<Own>,
    /// MAC address at which the NIC has them.
    mac: [u8; 6],
    /// Tools that wait until no address is being probed for.
    waiting: Vec<Asker>,
}

/// One of the addresses.
struct Own {
    wanted: OwnAddress,
    /// Index of the device by which it is reached.
    interface: u32,
    /// Why this host cannot have it.
    refused: Option<String>,
    /// A socket whose name says that a Baton of this network namespace has the address. It vanishes with the Baton's
    /// processes, so that what they leave can be told from what another has.
    claim: Option<OwnedFd>,
    /// Keeps this host in the multicast group in which others ask for an IPv6 address.
    group: Option<OwnedFd>,
    /// The kernel has it.
    in_kernel: bool,
    /// Claims by other hosts that have been logged.
    conflicts_seen: u64,
    /// Beside the kernel.
    prober: Option<Prober>,
}

/// What the NIC says about an address.
fn entry_of(memory: &Region, address: IpAddr) -> AddressEntry {
    let wanted = Endpoint::from(SocketAddr::new(address, 0)).address;
    let read = |at| {
        let words = memory.words(nic::address(at), AddressEntry::WORDS);
        AddressEntry::from_words(std::array::from_fn(|n| words[n].load(Ordering::Relaxed)))
    };
    let mut entries = (0..nic::MOST_ADDRESSES).map(read);
    entries.find(|entry| entry.state != AddressState::None && entry.address == wanted).unwrap_or_default()
}

/// A MAC address as it is usually written.
fn shown([a, b, c, d, e, f]: [u8; 6]) -> String {
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

impl Own {
    fn entry(&self, memory: &Region) -> AddressEntry {
        match &self.prober {
            Some(prober) => prober.entry(),
            None => entry_of(memory, self.wanted.address),
        }
    }

    fn standing(&self, memory: &Region) -> Standing {
        if self.refused.is_some() {
            return Standing::Refused;
        }
        match self.entry(memory).state {
            AddressState::Taken => Standing::Taken,
            AddressState::Used if self.in_kernel => Standing::Used,
            _ => Standing::Probing,
        }
    }

    fn info(&self, memory: &Region) -> AddressInfo {
        let (entry, standing) = (self.entry(memory), self.standing(memory));
        let claimed = || format!("the host with MAC address {} has it", shown(entry.rival));
        let reason = match standing {
            Standing::Refused => self.refused.clone().unwrap_or_default(),
            Standing::Taken => claimed(),
            Standing::Used if entry.conflicts > 0 => format!("{}, too", claimed()),
            Standing::Used | Standing::Probing => String::new(),
        };
        AddressInfo {
            address: self.wanted.address,
            device: interface::name_of(self.interface).unwrap_or_default(),
            standing,
            reason,
            probes: entry.probes,
            announcements: entry.announcements,
            answers: entry.answers,
            unanswered: entry.unanswered,
            conflicts: entry.conflicts,
        }
    }
}

impl Agent {
    /// Finds out which of the NIC's addresses this host can have. Those that the kernel has already because of a Baton
    /// before this one are taken over, or removed.
    pub(crate) fn begin_addresses(&mut self, mut inherited: Vec<(OwnAddress, u32, Option<OwnedFd>)>) {
        for wanted in self.nics[0].own_addresses().to_vec() {
            let known = inherited.iter().position(|(address, ..)| *address == wanted);
            let known = known.map(|at| inherited.swap_remove(at));
            let own = match known {
                Some((_, interface, claim)) => Own { interface, claim, in_kernel: true, ..Own::new(wanted) },
                None => self.claim_address(wanted),
            };
            self.addresses.own.push(own);
        }
        self.remove_leftovers();
        for at in 0..self.addresses.own.len() {
            let begun = self.addresses.own[at].join_group().and_then(|()| self.begin_probing(at));
            if let Err(error) = begun {
                self.addresses.own[at].refused = Some(format!("what others ask for it cannot be received: {error}"));
            }
        }
    }

    /// Checks that this host can have an address.
    fn claim_address(&self, wanted: OwnAddress) -> Own {
        let own = Own::new(wanted);
        let claim = match resolution::claim(wanted.address) {
            Ok(claim) => claim,
            Err(error) => {
                let why = if error.kind() == std::io::ErrorKind::AddrInUse {
                    "another Baton of this network namespace has it".into()
                } else {
                    format!("it cannot be claimed: {error}")
                };
                return Own { refused: Some(why), ..own };
            }
        };
        let left = rtnetlink::own_addresses(&self.routes).unwrap_or_default();
        let left = left.into_iter().find(|(_, address)| *address == wanted.address);
        if let Some((interface, _)) = left
            && self.reaches(interface)
        {
            // Its lifetime may be limited.
            let _ = rtnetlink::add_own_address(&self.routes, interface, wanted.address);
            self.keep(&Kept::Address(wanted, interface), &[claim.as_fd()]);
            return Own { interface, claim: Some(claim), in_kernel: true, ..own };
        }
        match self.device_of_address(wanted) {
            Ok(interface) => Own { interface, claim: Some(claim), ..own },
            Err(why) => Own { refused: Some(why), ..own },
        }
    }

    /// Whether the NIC has the frames of a device.
    fn reaches(&self, index: u32) -> bool {
        match self.shape {
            Shape::Inline { interface } => interface == index,
            Shape::Beside { .. } => {
                rtnetlink::link_at(&self.routes, index).is_ok_and(|link| link.kind == rtnetlink::ETHERNET && link.up)
            }
        }
    }

    /// The device on whose link an address is.
    fn device_of_address(&self, wanted: OwnAddress) -> Result<u32, String> {
        let network = if wanted.prefix < 32 {
            format!(" (its network is said to have a prefix of {} bits)", wanted.prefix)
        } else {
            String::new()
        };
        let no_device =
            || format!("no device of this host leads to its link{network}: give one an address of that network first");
        let route = route::to(&self.routes, wanted.address).map_err(|_| no_device())?;
        if route.local {
            return Err("it is this host's already: choose another one, or remove it there (ip address del)".into());
        }
        if route.gateway.is_some() || route.encapsulated {
            return Err(no_device());
        }
        if !self.reaches(route.interface) {
            let name = interface::name_of(route.interface).unwrap_or_default();
            return Err(format!("it is on the link of {name}, where the NIC is not"));
        }
        Ok(route.interface)
    }

    /// Removes the NIC's addresses that a killed Baton has left in the kernel, and those that are not wanted any more.
    fn remove_leftovers(&self) {
        for (interface, address) in rtnetlink::own_addresses(&self.routes).unwrap_or_default() {
            let ours = self.addresses.own.iter().any(|own| own.wanted.address == address && own.claim.is_some());
            if !ours && resolution::claim(address).is_ok() {
                let _ = resolution::release(&self.routes, &self.diagnosis, interface, address);
                self.keep(&Kept::AddressGone(address), &[]);
            }
        }
    }

    /// Gives the addresses that this host can have to a NIC that was just started, before frames flow.
    pub(crate) fn give_addresses_to_nic(&mut self) {
        let Shape::Inline { interface } = self.shape else { return };
        if self.addresses.own.is_empty() {
            return;
        }
        let usable = self.addresses.own.iter().filter(|own| own.refused.is_none());
        let usable: Vec<IpAddr> = usable.map(|own| own.wanted.address).collect();
        match rtnetlink::link_at(&self.routes, interface) {
            Ok(link) => {
                self.addresses.mac = link.address;
                self.nics[0].set_addresses(link.address, usable);
            }
            Err(error) => {
                warning!(
                    [] "the NIC does not have its addresses: {error}";
                    "see that its interface is there (`ip link`), and restart Baton"
                );
            }
        }
    }

    /// Handles a changed state of an address: the kernel gets one that is in use.
    pub(crate) fn addresses_changed(&mut self) {
        for at in 0..self.addresses.own.len() {
            let entry = self.addresses.own[at].entry(&self.hardware[0].memory);
            let own = &mut self.addresses.own[at];
            let new_conflict = entry.conflicts > own.conflicts_seen;
            own.conflicts_seen = entry.conflicts;
            let (address, rival) = (own.wanted.address, shown(entry.rival));
            match entry.state {
                AddressState::Used => {
                    self.add_to_kernel(at);
                    if new_conflict {
                        warning!(
                            [] "the host with MAC address {rival} uses {address}, the NIC's, too";
                            "give one of the two another address"
                        );
                    }
                }
                AddressState::Taken => {
                    if new_conflict {
                        warning!(
                            [] "the NIC does not use {address}: the host with MAC address {rival} has it";
                            "give one of the two another address"
                        );
                    }
                    self.remove_from_kernel(at);
                }
                AddressState::Probing | AddressState::None => {}
            }
        }
        self.answer_if_settled();
    }

    /// Has the kernel have an address, too.
    fn add_to_kernel(&mut self, at: usize) {
        let Some(own) = self.addresses.own.get_mut(at).filter(|own| !own.in_kernel && own.refused.is_none()) else { return };
        let (wanted, interface) = (own.wanted, own.interface);
        match rtnetlink::add_own_address(&self.routes, interface, wanted.address) {
            Ok(()) => own.in_kernel = true,
            Err(error) => {
                own.refused = Some(format!("the kernel does not take it: {error}"));
                self.give_addresses_to_nic();
            }
        }
        let own = &self.addresses.own[at];
        if let (Some(claim), true) = (&own.claim, own.in_kernel) {
            self.keep(&Kept::Address(wanted, interface), &[claim.as_fd()]);
        }
    }

    fn remove_from_kernel(&mut self, at: usize) {
        let Some(own) = self.addresses.own.get_mut(at).filter(|own| own.in_kernel) else { return };
        own.in_kernel = false;
        let (address, interface) = (own.wanted.address, own.interface);
        if let Err(error) = rtnetlink::delete_own_address(&self.routes, interface, address) {
            warning!(
                [] "the kernel keeps {address}, the NIC's: {error}";
                "remove it with `ip address delete` if nothing uses it"
            );
        }
        self.keep(&Kept::AddressGone(address), &[]);
    }

    /// Removes the addresses from the kernel, since this Baton ends. One to which programs' sockets are bound stays:
    /// their connections are in the kernel, which goes on to answer for it.
    pub(crate) fn release_addresses(&mut self) {
        for own in self.addresses.own.iter_mut().filter(|own| own.in_kernel) {
            let address = own.wanted.address;
            match resolution::release(&self.routes, &self.diagnosis, own.interface, address) {
                Ok(Released::Removed | Released::Expires) => {}
                Ok(Released::Stays) => {
                    info!([] "the kernel keeps {address}, the NIC's, which programs use");
                }
                Err(error) => {
                    warning!(
                        [] "the kernel keeps {address}, the NIC's: {error}";
                        "remove it with `ip address delete` if nothing uses it"
                    );
                }
            }
        }
    }

    /// Handles changed devices and addresses: the NIC follows the MAC address of its device, and the kernel gets an
    /// address again that it has lost, as IPv6's are when a device goes down.
    pub(crate) fn follow_addresses(&mut self) {
        if self.addresses.own.is_empty() {
            return;
        }
        if let Shape::Inline { interface } = self.shape
            && rtnetlink::link_at(&self.routes, interface).is_ok_and(|link| link.address != self.addresses.mac)
        {
            self.give_addresses_to_nic();
        }
        for own in self.addresses.own.iter_mut().filter(|own| own.in_kernel) {
            let (interface, address) = (own.interface, own.wanted.address);
            let Ok(link) = rtnetlink::link_at(&self.routes, interface) else { continue };
            if let Some(prober) = &mut own.prober {
                prober.set_mac(link.address, monotonic_micros());
            }
            // Not looked for by Baton's mark, which kernels before Linux 5.18 do not keep.
            let lost = link.up && matches!(route::is_local(&self.routes, address), Ok(false));
            if lost && let Err(error) = rtnetlink::add_own_address(&self.routes, interface, address) {
                warning!(
                    [] "the kernel has lost {address}, the NIC's, and does not take it again: {error}";
                    "restart Baton when its device can have the address"
                );
            }
        }
    }

    /// Lists the addresses for a tool; None if it waits until they are settled.
    pub(crate) fn ask_for_addresses(&mut self, asker: Asker, settled: bool) -> Option<Reply> {
        if !settled || self.are_settled() {
            return Some(self.list_addresses());
        }
        if self.addresses.waiting.len() >= MOST_WAITING {
            return Some(Reply::Failed { reason: "too many tools wait for the NIC's addresses".into() });
        }
        self.addresses.waiting.push(asker);
        None
    }

    /// Forgets what a session that has ended was waiting for.
    pub(crate) fn forget_address_asker(&mut self, session: u32) {
        self.addresses.waiting.retain(|(asker, _)| *asker != session);
    }

    fn list_addresses(&self) -> Reply {
        let list = self.addresses.own.iter().map(|own| own.info(&self.hardware[0].memory));
        Reply::Addresses(list.collect())
    }

    fn are_settled(&self) -> bool {
        self.addresses.own.iter().all(|own| own.standing(&self.hardware[0].memory) != Standing::Probing)
    }

    fn answer_if_settled(&mut self) {
        if self.addresses.waiting.is_empty() || !self.are_settled() {
            return;
        }
        let reply = self.list_addresses();
        for (session, tag) in std::mem::take(&mut self.addresses.waiting) {
            self.answer(session, tag, reply.clone(), &[]);
        }
    }
}

impl Own {
    /// Joins the group in which others ask for an IPv6 address.
    fn join_group(&mut self) -> std::io::Result<()> {
        if let (IpAddr::V6(v6), None) = (self.wanted.address, &self.refused) {
            self.group = Some(resolution::join_group(self.interface, v6)?);
        }
        Ok(())
    }

    fn new(wanted: OwnAddress) -> Own {
        Own { wanted, interface: 0, refused: None, claim: None, group: None, in_kernel: false, conflicts_seen: 0, prober: None }
    }
}

impl Addresses {
    /// Time until a probe or an announcement is due that the agent sends, if one is.
    pub fn wait(&self) -> Option<Duration> {
        let due = self.own.iter().filter_map(|own| own.prober.as_ref()).map(Prober::due).min();
        let due = due.filter(|due| *due != u64::MAX)?;
        Some(Duration::from_micros(due.saturating_sub(monotonic_micros())))
    }
}
