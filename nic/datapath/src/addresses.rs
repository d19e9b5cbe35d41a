//! The NIC's own addresses: their protocol (ARP, neighbour discovery), and their state in NIC memory for the agent and
//! the next NIC.

use baton_abi::layout::nic;
use baton_abi::{AddressEntry, AddressState};
use baton_resolution::{Own, Resolver, Speaker, State, Timing};
use baton_shm::Region;
use baton_wire::Endpoint;
use core::sync::atomic::Ordering;
use std::net::{IpAddr, SocketAddr};

const _: () = assert!(nic::MOST_ADDRESSES == baton_resolution::MOST_ADDRESSES, "each address has an entry");

/// The agent's settings for the NIC's own addresses.
#[derive(Clone, Debug)]
pub struct AddressSettings {
    /// MAC address that is announced for them.
    pub mac: [u8; 6],
    /// The addresses.
    pub addresses: Vec<IpAddr>,
    /// Microseconds between two probes, at least.
    pub between_probes: u64,
    /// A random number.
    pub seed: u64,
}

/// A worker's part in the addresses.
#[derive(Default)]
pub(crate) enum Addresses {
    /// There are none.
    #[default]
    None,
    /// The front worker has them, and this is another worker.
    Elsewhere,
    /// This worker has them.
    Here(Box<Resolver>),
}

impl Addresses {
    /// Whether there are none.
    #[inline]
    pub fn is_none(&self) -> bool {
        matches!(self, Addresses::None)
    }

    /// Time of the next action, in microseconds; `u64::MAX` for none.
    pub fn due(&self) -> u64 {
        if let Addresses::Here(resolver) = self { resolver.due() } else { u64::MAX }
    }

    /// Sets the addresses and their MAC address. An address that the previous NIC had in use counts as in use, and its
    /// counters continue.
    pub fn set(&mut self, settings: &AddressSettings, memory: &Region, now: u64) {
        if !matches!(self, Addresses::Here(_)) {
            let timing = Timing::in_proportion(settings.between_probes.max(1));
            *self = Addresses::Here(Box::new(Resolver::new(settings.mac, Speaker::Here, timing, settings.seed)));
        }
        let Addresses::Here(resolver) = self else { return };
        resolver.set_mac(settings.mac, now);
        resolver.keep_only(&settings.addresses);
        let before: Vec<AddressEntry> = (0..nic::MOST_ADDRESSES).map(|at| read(memory, at)).collect();
        for address in &settings.addresses {
            let entry = before.iter().find(|entry| entry.state != AddressState::None && entry.address == bytes(*address));
            resolver.add(*address, entry.is_some_and(|entry| entry.state == AddressState::Used), now);
            if let Some(entry) = entry {
                resolver.continue_counting(*address, counters(entry));
            }
        }
        publish(resolver, memory);
        for at in resolver.own().len()..nic::MOST_ADDRESSES {
            write(memory, at, &AddressEntry::default());
        }
        if resolver.is_empty() {
            *self = Addresses::None;
        }
    }
}

/// Writes the state of all addresses to NIC memory.
pub(crate) fn publish(resolver: &Resolver, memory: &Region) {
    for (at, own) in resolver.own().iter().enumerate() {
        write(memory, at, &entry(own));
    }
}

/// An address as sixteen bytes, IPv4 mapped to IPv6.
fn bytes(address: IpAddr) -> [u8; 16] {
    Endpoint::from(SocketAddr::new(address, 0)).address
}

fn entry(own: &Own) -> AddressEntry {
    let state = match own.state {
        State::Probing => AddressState::Probing,
        State::Used => AddressState::Used,
        State::Taken => AddressState::Taken,
    };
    let baton_resolution::Counters { probes, announcements, answers, unanswered, conflicts } = own.counters;
    let (address, rival) = (bytes(own.address), own.rival);
    AddressEntry { address, state, rival, probes, announcements, answers, unanswered, conflicts }
}

fn counters(entry: &AddressEntry) -> baton_resolution::Counters {
    let AddressEntry { probes, announcements, answers, unanswered, conflicts, .. } = *entry;
    baton_resolution::Counters { probes, announcements, answers, unanswered, conflicts }
}

fn read(memory: &Region, at: usize) -> AddressEntry {
    let words = memory.words(nic::address(at), AddressEntry::WORDS);
    AddressEntry::from_words(std::array::from_fn(|n| words[n].load(Ordering::Relaxed)))
}

fn write(memory: &Region, at: usize, entry: &AddressEntry) {
    let words = memory.words(nic::address(at), AddressEntry::WORDS);
    for (word, value) in words.iter().zip(entry.to_words()) {
        word.store(value, Ordering::Relaxed);
    }
}
