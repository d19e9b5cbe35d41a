//! The state of each address, and the frames that are sent for it.

use crate::limit::Limit;
use crate::timing::Timing;
use alloc::vec::Vec;
use baton_wire::arp::Arp;
use baton_wire::neighbour::{Kind, NEIGHBOUR_FRAME, Neighbour, UNSPECIFIED};
use core::net::IpAddr;

/// Most addresses of a NIC.
pub const MOST_ADDRESSES: usize = 16;

/// Whether an address may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It is being probed for.
    Probing,
    /// It is in use.
    Used,
    /// Another host has this address, so it is not used here.
    Taken,
}

/// Counters of events of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Probes sent.
    pub probes: u64,
    /// Announcements sent, defences included.
    pub announcements: u64,
    /// Questions answered.
    pub answers: u64,
    /// Questions not answered, since their sender asks too often.
    pub unanswered: u64,
    /// Frames by which another host claimed the address.
    pub conflicts: u64,
}

/// An address of the NIC's.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    /// The address.
    pub address: IpAddr,
    /// Whether it may be used.
    pub state: State,
    /// The address's counters.
    pub counters: Counters,
    /// MAC address of the host that claimed it last; zeros if none has.
    pub rival: [u8; 6],
    /// Probes or announcements sent in this state.
    sent: u32,
    /// When the next one is due, in microseconds; `u64::MAX` if none is.
    due: u64,
    /// When it may be defended next.
    defence: u64,
}

impl Own {
    /// An address in this state, for which something is due at `due` microseconds.
    fn begin(address: IpAddr, state: State, due: u64) -> Own {
        let counters = Counters::default();
        Own { address, state, counters, rival: [0; 6], sent: 0, due, defence: 0 }
    }
}

/// What kind of frame was received from the link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Received {
    /// No ARP and no neighbour discovery, or not about an address of the NIC's: it is the kernel's.
    Other,
    /// It was about an address of the NIC's, and has been dealt with.
    Own,
    /// No host may use it: it is dropped.
    Malformed,
}

/// Which part of the host answers questions for the addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Speaker {
    /// This end of the link.
    Here,
    /// The kernel, which has the addresses as well. The resolver then only probes for them, announces and defends them.
    Kernel,
}

/// The addresses of a NIC on one link.
pub struct Resolver {
    mac: [u8; 6],
    speaker: Speaker,
    timing: Timing,
    own: Vec<Own>,
    limit: Limit,
    /// State of the generator of random delays.
    random: u64,
    /// An address has changed its state, or was defended, since [`Resolver::take_changed`].
    changed: bool,
    /// Earliest time at which something is due, in microseconds.
    due: u64,
}

impl Resolver {
    /// Without addresses yet. `mac`: the MAC address that they are to be found at. `seed`: a random number.
    pub fn new(mac: [u8; 6], speaker: Speaker, timing: Timing, seed: u64) -> Resolver {
        let (own, limit, random) = (Vec::new(), Limit::new(seed), seed | 1);
        Resolver { mac, speaker, timing, own, limit, random, changed: false, due: u64::MAX }
    }

    /// Adds an address, unless it is entered already or there are too many. If an earlier NIC has `used` the address,
    /// it is announced at once; otherwise it is probed for first.
    pub fn add(&mut self, address: IpAddr, used: bool, now: u64) {
        if self.own.len() == MOST_ADDRESSES || self.own.iter().any(|own| own.address == address) {
            return;
        }
        let one = match used {
            true => Own::begin(address, State::Used, now),
            false => Own::begin(address, State::Probing, now.saturating_add(self.delay(0, self.timing.first_probe))),
        };
        self.due = self.due.min(one.due);
        self.own.push(one);
    }

    /// Makes the counters of an address go on from these, which an earlier NIC has counted.
    pub fn continue_counting(&mut self, address: IpAddr, counters: Counters) {
        if let Some(own) = self.own.iter_mut().find(|own| own.address == address) {
            own.counters = counters;
        }
    }

    /// Removes all addresses that are not in `wanted`.
    pub fn keep_only(&mut self, wanted: &[IpAddr]) {
        self.own.retain(|own| wanted.contains(&own.address));
        self.set_due();
    }

    /// Sets the MAC address of all addresses, and announces it if it has changed.
    pub fn set_mac(&mut self, mac: [u8; 6], now: u64) {
        if core::mem::replace(&mut self.mac, mac) == mac {
            return;
        }
        for own in self.own.iter_mut().filter(|own| own.state == State::Used) {
            (own.sent, own.due) = (0, now);
        }
        self.set_due();
    }

    /// The addresses.
    pub fn own(&self) -> &[Own] {
        &self.own
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.own.is_empty()
    }

    /// Whether an address has changed its state, or was defended, since the last call.
    pub fn take_changed(&mut self) -> bool {
        core::mem::take(&mut self.changed)
    }

    /// When [`Resolver::poll`] is to be called next, in microseconds; `u64::MAX` if not at all.
    pub fn due(&self) -> u64 {
        self.due
    }

    fn set_due(&mut self) {
        self.due = self.own.iter().map(|own| own.due).min().unwrap_or(u64::MAX);
    }

    /// A time between `least` and `most`, at random (a xorshift generator).
    fn delay(&mut self, least: u64, most: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        least + self.random % (most - least).saturating_add(1)
    }

    /// Sends the probes and announcements that are due.
    pub fn poll(&mut self, now: u64, send: &mut impl FnMut(&[u8])) {
        for index in 0..self.own.len() {
            if self.own[index].due <= now {
                self.advance(index, now, send);
            }
        }
        self.set_due();
    }

    /// Sends the frames that are due for one address, and schedules the next ones.
    fn advance(&mut self, index: usize, now: u64, send: &mut impl FnMut(&[u8])) {
        let Timing { probes, between_probes, settle, announcements, between_announcements, .. } = self.timing;
        let between = self.delay(between_probes, 2 * between_probes);
        let (mac, own) = (self.mac, &mut self.own[index]);
        if own.state == State::Probing && own.sent < probes {
            own.sent += 1;
            own.counters.probes += 1;
            own.due = now + if own.sent < probes { between } else { settle };
            return emit_probe(own.address, mac, send);
        }
        if own.state == State::Probing {
            (own.state, own.sent, self.changed) = (State::Used, 0, true);
        }
        own.due = u64::MAX;
        if own.state == State::Used && own.sent < announcements {
            own.sent += 1;
            own.counters.announcements += 1;
            if own.sent < announcements {
                own.due = now + between_announcements;
            }
            emit_announcement(own.address, mac, send);
        }
    }

    /// Takes a frame from the link. `verified`: a device has verified its checksum. The answer, if there is one, goes
    /// to `send`.
    pub fn receive(&mut self, frame: &[u8], verified: bool, now: u64, send: &mut impl FnMut(&[u8])) -> Received {
        if let Some(arp) = Arp::parse(frame) {
            return arp.map_or(Received::Malformed, |arp| self.on_arp(&arp, now, send));
        }
        match Neighbour::parse(frame, verified) {
            Some(Ok(neighbour)) => self.on_neighbour(&neighbour, now, send),
            Some(Err(_)) => Received::Malformed,
            None => Received::Other,
        }
    }

    /// Index of an address that is probed for or in use.
    fn find(&self, address: IpAddr) -> Option<usize> {
        self.own.iter().position(|own| own.address == address && own.state != State::Taken)
    }

    fn on_arp(&mut self, arp: &Arp, now: u64, send: &mut impl FnMut(&[u8])) -> Received {
        let claimed = self.find(IpAddr::from(arp.sender));
        // A reply to such an address answers the kernel, which asks from it.
        let asked = self.find(IpAddr::from(arp.target)).filter(|_| arp.is_request);
        let Some(index) = claimed.or(asked) else { return Received::Other };
        // The link has a loop, so a frame sent by this host comes back.
        if arp.sender_mac == self.mac {
            return Received::Own;
        }
        let state = self.own[index].state;
        // While this host probes for the address, another host's probe for it counts as a claim as well (RFC 5227
        // section 2.1.1).
        let also_probes = arp.sender == [0; 4] && state == State::Probing;
        if claimed.is_some() || also_probes {
            self.conflict(index, arp.sender_mac, now, send);
        } else if state == State::Used && self.may_answer(index, arp.sender_mac, now) {
            send(&arp.answer(self.mac).emit());
        }
        Received::Own
    }

    fn on_neighbour(&mut self, neighbour: &Neighbour, now: u64, send: &mut impl FnMut(&[u8])) -> Received {
        let Some(index) = self.find(IpAddr::from(neighbour.target)) else { return Received::Other };
        let sender = neighbour.link_address.unwrap_or(neighbour.source_mac);
        if sender == self.mac || neighbour.source_mac == self.mac {
            return Received::Own;
        }
        let state = self.own[index].state;
        match neighbour.kind {
            Kind::Advertisement { .. } => self.conflict(index, sender, now, send),
            // Another host probes for it, too (RFC 4862 section 5.4.3).
            Kind::Solicitation if neighbour.source == UNSPECIFIED && state == State::Probing => {
                self.conflict(index, sender, now, send);
            }
            Kind::Solicitation if state == State::Used && self.may_answer(index, sender, now) => {
                let mut out = [0; NEIGHBOUR_FRAME];
                let length = neighbour.answer(self.mac).emit(sender, &mut out);
                send(&out[..length]);
            }
            Kind::Solicitation => {}
        }
        Received::Own
    }

    /// Whether a question is answered here, which is counted.
    fn may_answer(&mut self, index: usize, to: [u8; 6], now: u64) -> bool {
        if self.speaker == Speaker::Kernel {
            return false;
        }
        let may = self.limit.admits(to, now);
        let counters = &mut self.own[index].counters;
        *if may { &mut counters.answers } else { &mut counters.unanswered } += 1;
        may
    }

    /// Handles another host's claim to an address. An address that is still being probed for is given up. An address in
    /// use is kept, since connections are bound to it, and defended; but not more often than the timing says, since two
    /// hosts that defend at every claim would go on for ever (RFC 5227 section 2.4 (c)).
    fn conflict(&mut self, index: usize, rival: [u8; 6], now: u64, send: &mut impl FnMut(&[u8])) {
        let mac = self.mac;
        let own = &mut self.own[index];
        own.counters.conflicts += 1;
        own.rival = rival;
        if own.state == State::Probing {
            (own.state, own.due, self.changed) = (State::Taken, u64::MAX, true);
            self.set_due();
        } else if own.defence <= now {
            own.defence = now + self.timing.between_defences;
            own.counters.announcements += 1;
            self.changed = true;
            emit_announcement(own.address, mac, send);
        }
    }
}

fn emit_probe(address: IpAddr, mac: [u8; 6], send: &mut impl FnMut(&[u8])) {
    match address {
        IpAddr::V4(v4) => send(&Arp::probe(mac, v4.octets()).emit()),
        IpAddr::V6(v6) => emit_neighbour(&Neighbour::probe(mac, v6.octets()), send),
    }
}

fn emit_announcement(address: IpAddr, mac: [u8; 6], send: &mut impl FnMut(&[u8])) {
    match address {
        IpAddr::V4(v4) => send(&Arp::announcement(mac, v4.octets()).emit()),
        IpAddr::V6(v6) => emit_neighbour(&Neighbour::announcement(mac, v6.octets()), send),
    }
}

/// Sends a message to a group.
fn emit_neighbour(neighbour: &Neighbour, send: &mut impl FnMut(&[u8])) {
    let mut out = [0; NEIGHBOUR_FRAME];
    let length = neighbour.emit([0xff; 6], &mut out);
    send(&out[..length]);
}
