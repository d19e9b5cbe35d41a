//! Beside the kernel the agent probes for the NIC's addresses, announces and defends them. The kernel, which has them
//! and receives every frame, answers.

use crate::agent::Agent;
use crate::ground::Shape;
use baton_abi::{AddressEntry, AddressState};
use baton_linux::events::{monotonic_micros, monotonic_nanos};
use baton_linux::resolution::ResolutionSocket;
use baton_linux::rtnetlink;
use baton_resolution::{Counters, Own, Resolver, Speaker, State, Timing};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

/// Frames that are read in a row, so that a flood of them does not keep the agent from its other work.
const BATCH: usize = 64;

/// What the agent does for one address.
pub(super) struct Prober {
    socket: ResolutionSocket,
    resolver: Resolver,
}

impl Prober {
    /// Begins with an address on the link of a device. One that the kernel has already is announced.
    fn begin(
        address: IpAddr,
        (interface, mac): (u32, [u8; 6]),
        used: bool,
        between_probes: u64,
        seed: u64,
    ) -> io::Result<Prober> {
        let socket = ResolutionSocket::open(interface, address)?;
        let mut resolver = Resolver::new(mac, Speaker::Kernel, Timing::in_proportion(between_probes.max(1)), seed);
        resolver.add(address, used, monotonic_micros());
        Ok(Prober { socket, resolver })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// When something is due, in microseconds.
    pub fn due(&self) -> u64 {
        self.resolver.due()
    }

    pub fn set_mac(&mut self, mac: [u8; 6], now: u64) {
        self.resolver.set_mac(mac, now);
    }

    /// Reads what has come, and sends what is due. Returns whether the address has changed its state.
    fn poll(&mut self) -> bool {
        let (now, Prober { socket, resolver }) = (monotonic_micros(), self);
        let mut frame = [0; ResolutionSocket::LONGEST];
        for _ in 0..BATCH {
            let Some(length) = socket.receive(&mut frame) else { break };
            let mut answers = Vec::new();
            resolver.receive(&frame[..length], false, now, &mut |answer| answers.push(answer.to_vec()));
            answers.iter().for_each(|answer| socket.send(answer));
        }
        resolver.poll(now, &mut |frame| socket.send(frame));
        resolver.take_changed()
    }

    /// The address's state, in the form in which a NIC between kernel and wire writes it.
    pub fn entry(&self) -> AddressEntry {
        let Some(Own { state, counters, rival, .. }) = self.resolver.own().first() else { return AddressEntry::default() };
        let state = match state {
            State::Probing => AddressState::Probing,
            State::Used => AddressState::Used,
            State::Taken => AddressState::Taken,
        };
        let Counters { probes, announcements, answers, unanswered, conflicts } = *counters;
        AddressEntry { address: [0; 16], state, rival: *rival, probes, announcements, answers, unanswered, conflicts }
    }
}

impl Agent {
    /// Begins to probe for an address, beside the kernel.
    pub(super) fn begin_probing(&mut self, at: usize) -> io::Result<()> {
        let own = &self.addresses.own[at];
        if matches!(self.shape, Shape::Inline { .. }) || own.refused.is_some() {
            return Ok(());
        }
        let device = (own.interface, rtnetlink::link_at(&self.routes, own.interface)?.address);
        let (between, seed) = (self.nics[0].between_probes(), self.settings.nic.hash_key[3] ^ monotonic_nanos());
        let prober = Prober::begin(own.wanted.address, device, own.in_kernel, between, seed)?;
        self.watch_resolution(prober.fd())?;
        self.addresses.own[at].prober = Some(prober);
        Ok(())
    }

    /// Does what is due for the addresses, beside the kernel.
    pub(crate) fn poll_addresses(&mut self) {
        let probers = self.addresses.own.iter_mut().filter_map(|own| own.prober.as_mut());
        let changed = probers.map(Prober::poll).fold(false, |one, other| one | other);
        if changed {
            self.addresses_changed();
        }
    }
}
