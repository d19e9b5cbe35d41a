//! Renews the connection tracker's entries of connections on a NIC: their segments bypass the tracker, whose entries
//! would run out, and after a restore the firewall would take the connection for an unknown one.
//!
//! An entry is renewed only if its connection has carried segments since; that of an idle connection runs out, as if
//! the kernel had the connection. Whether it has, its record shows, which the NIC publishes anew for each segment: no
//! connection is woken up for that.

use crate::agent::Agent;
use crate::connection::Connection;
use baton_abi::layout::{nic, slot};
use baton_abi::{Cid, record};
use baton_linux::conntrack::{self, Entry, MOST_RENEWED, Timeouts};
use baton_linux::events::monotonic_micros;
use baton_linux::netlink::Netlink;
use baton_log::warning;
use baton_recovery::published;
use baton_shm::Region;
use baton_wire::Flow;
use std::time::Duration;

/// Share of a time-out after which an entry is renewed. It is also renewed for so much longer, and for the time until
/// the next visit: what is carried just after a visit is found at the next one only, and the NIC may die before it.
const SHARE: u32 = 4;
/// Microseconds between two visits of a connection: at least and at most.
const VISITS: (u64, u64) = (250_000, 8_000_000);
/// Connections visited in one round of the agent's loop, and microseconds between two such rounds.
const MOST: usize = 4 * MOST_RENEWED;
const PAUSE: u64 = 2_000;

/// What is kept of a connection on a NIC that has an entry, by its slot there.
#[derive(Clone, Copy, Default)]
struct Tracked {
    /// The lowest bits of the connection's serial number; 0 of none.
    serial: u32,
    /// Number of its record's publication when the entry was renewed last.
    published: u32,
    /// When that was, in milliseconds of the monotonic clock modulo 2³².
    renewed: u32,
    /// Seconds that the entry had left when the kernel had the connection: a rule may give it a longer time-out than is
    /// usual.
    left: u32,
}

/// Entries of the connections on all NICs.
#[derive(Default)]
pub(crate) struct Tracker {
    /// Of each NIC, by slot. As long as the greatest slot of a connection with an entry.
    entries: Vec<Vec<Tracked>>,
    /// Time of the next round, in microseconds of the monotonic clock; 0 while nothing is tracked.
    due: u64,
    /// Session and connection at which it begins, and when the visits of all that are being made have begun.
    from: (u32, u32),
    began: u64,
    /// Connections with an entry that the visits have met so far.
    met: usize,
    timeouts: Option<Timeouts>,
}

fn millis(micros: u64) -> u32 {
    (micros / 1000) as u32
}

/// The low bits of a serial number that name a connection; never 0.
fn name(serial: u64) -> u32 {
    (serial as u32).max(1)
}

/// Seconds for which the entry of a connection in a state is renewed.
fn seconds(timeouts: &Timeouts, state: u8, left: u32) -> u32 {
    const ESTABLISHED: u8 = 1;
    let usual = timeouts.of(state);
    let longer = if state == ESTABLISHED { usual.max(left) } else { usual };
    let until_next_visit = period(timeouts).div_ceil(1_000_000) as u32 + 1;
    longer.saturating_add(longer.div_ceil(SHARE)).saturating_add(until_next_visit)
}

/// Microseconds between two visits, with these time-outs.
fn period(timeouts: &Timeouts) -> u64 {
    (u64::from(timeouts.shortest()) * 1_000_000 / u64::from(SHARE)).clamp(VISITS.0, VISITS.1)
}

/// Number of the latest publication of a connection's record, which counts its segments.
fn publications(memory: &Region, at: u32) -> u32 {
    (published(memory.words(nic::slot(at) + slot::RECORDS, 2 * record::WORDS)) / record::STEP) as u32
}

impl Tracker {
    /// Time until the next round. None if nothing is tracked.
    pub fn wait(&self) -> Option<Duration> {
        (self.due != 0).then(|| Duration::from_micros(self.due.saturating_sub(monotonic_micros())))
    }

    fn tracked(&mut self, cid: Cid, serial: u64) -> Option<&mut Tracked> {
        let found = self.entries.get_mut(cid.nic())?.get_mut(cid.slot() as usize)?;
        (found.serial == name(serial)).then_some(found)
    }

    /// Notes the entry of a connection that has just taken a slot on a NIC.
    pub fn note(&mut self, cid: Cid, serial: u64, entry: Entry) {
        let (nic, slot) = (cid.nic(), cid.slot() as usize);
        if self.entries.len() <= nic {
            self.entries.resize(nic + 1, Vec::new());
        }
        if self.entries[nic].len() <= slot {
            self.entries[nic].resize(slot + 1, Tracked::default());
        }
        let renewed = millis(monotonic_micros());
        self.entries[nic][slot] = Tracked { serial: name(serial), published: 0, renewed, left: entry.left };
    }

    /// Prepares a connection's entry for its stay on a NIC, if it has one: windows that the tracker has not seen do not
    /// count as invalid, and the entry is there until the first visit. `state` is numbered as in TCP_INFO.
    pub fn enter(&mut self, netfilter: &Netlink, cid: Cid, serial: u64, flow: &Flow, state: u8) {
        let Some(Tracked { left, .. }) = self.tracked(cid, serial).copied() else { return };
        self.timeouts = self.timeouts.or_else(Timeouts::read);
        let Some(timeouts) = self.timeouts else { return };
        if !conntrack::be_liberal(netfilter, flow, seconds(&timeouts, state, left)).unwrap_or(true)
            && let Some(tracked) = self.tracked(cid, serial)
        {
            *tracked = Tracked::default();
            return;
        }
        // Those that are being visited may have been passed already.
        self.met += 1;
        if self.due == 0 {
            self.due = monotonic_micros() + period(&timeouts);
        }
    }

    /// Notes that a connection has ended on its NIC: the tracker's entry has not been shown its FINs.
    pub fn end(&mut self, netfilter: Option<&Netlink>, cid: Cid, serial: u64, flow: &Flow) {
        let Some(tracked) = self.tracked(cid, serial) else { return };
        *tracked = Tracked::default();
        if let (Some(netfilter), Some(timeouts)) = (netfilter, &self.timeouts) {
            // Otherwise it runs out by itself, later.
            let _ = conntrack::end(netfilter, flow, timeouts.after_end());
        }
    }

    /// The time-out of a connection's entry if that is to be renewed now.
    fn is_due(&mut self, memory: &Region, connection: &Connection, now: u64) -> Option<u32> {
        let (cid, timeouts) = (connection.cid?, self.timeouts?);
        let tracked = self.tracked(cid, connection.serial)?;
        let published = publications(memory, cid.slot());
        let (state, left) = (baton_recovery::read_record(memory, nic::slot(cid.slot()))?.state, tracked.left);
        let seconds = seconds(&timeouts, state, left);
        let age = millis(now).wrapping_sub(tracked.renewed);
        let due = tracked.published != published && u64::from(age) >= u64::from(timeouts.of(state)) * 1000 / u64::from(SHARE);
        if due {
            (tracked.published, tracked.renewed) = (published, millis(now));
        }
        self.met += 1;
        due.then_some(seconds)
    }
}

impl Agent {
    /// Renews the entries of the next connections, if their turn has come.
    pub(crate) fn renew_tracked(&mut self) {
        let now = monotonic_micros();
        if self.tracker.due == 0 || now < self.tracker.due {
            return;
        }
        if self.tracker.from == (0, 0) {
            self.tracker.timeouts = Timeouts::read();
            (self.tracker.began, self.tracker.met) = (now, 0);
        }
        let turn: Vec<(u32, u32)> = self.on_nic_from(self.tracker.from).take(MOST).collect();
        let mut renewed = Vec::with_capacity(MOST_RENEWED);
        for at in &turn {
            self.tracker.from = (at.0, at.1 + 1);
            let Some(Some(entry)) = self.sessions.get(at.0 as usize) else { continue };
            let Some(Some(connection)) = entry.connections.get(at.1 as usize) else { continue };
            let Some(hardware) = self.hardware.get(connection.cid.map_or(0, Cid::nic)) else { continue };
            if let Some(seconds) = self.tracker.is_due(&hardware.memory, connection, now) {
                renewed.push((connection.flow, seconds));
            }
            if renewed.len() == MOST_RENEWED {
                self.renew_entries(&mut renewed);
            }
        }
        self.renew_entries(&mut renewed);
        let all = turn.len() < MOST;
        self.tracker.due = match (all, self.tracker.timeouts) {
            (false, _) => now + PAUSE,
            // Nothing is left, or the tracker is.
            (true, None) => 0,
            (true, Some(_)) if self.tracker.met == 0 => 0,
            (true, Some(timeouts)) => (self.tracker.began + period(&timeouts)).max(now + PAUSE),
        };
        if all {
            self.tracker.from = (0, 0);
        }
    }

    fn renew_entries(&mut self, entries: &mut Vec<(Flow, u32)>) {
        // One that is not there any more has been deleted: the kernel's next segment makes it anew, if the firewall
        // lets it.
        if let Some(netfilter) = self.guards.netfilter()
            && let Err(error) = conntrack::renew(netfilter, entries, |_| ())
        {
            warning!(
                [] "{} entries of the connection tracker are not renewed: {error}", entries.len();
                "raise net.netfilter.nf_conntrack_tcp_timeout_established, or the firewall may drop their connections"
            );
        }
        entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a connection carries at the end of its time-out is found before its entry runs out, however the visits
    /// fall.
    #[test]
    fn an_entry_lives_until_the_next_visit_finds_what_was_carried() {
        let Some(timeouts) = Timeouts::read() else {
            eprintln!("skipped: this kernel has no connection tracker");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return;
        };
        for state in [1, 4, 5, 8, 9, 11] {
            let usual = u64::from(timeouts.of(state)) * 1_000_000;
            let renewed_for = u64::from(seconds(&timeouts, state, 0)) * 1_000_000;
            // It is renewed at the first visit after a share of the time-out, and what is carried last before that
            // counts from then.
            assert!(renewed_for >= usual + usual / u64::from(SHARE) + period(&timeouts), "state {state}");
        }
        assert!(seconds(&timeouts, 1, u32::MAX / 2) >= u32::MAX / 2, "a rule's own time-out counts");
    }

    /// A slot's next occupant is not taken for the last one.
    #[test]
    fn entries_belong_to_connections() {
        let (mut tracker, cid) = (Tracker::default(), Cid(5));
        tracker.note(cid, 7, Entry::default());
        assert!(tracker.tracked(cid, 7).is_some() && tracker.tracked(cid, 8).is_none());
        tracker.end(None, cid, 8, &Flow { local: LOCAL, remote: LOCAL, device: 0 });
        assert!(tracker.tracked(cid, 7).is_some());
        tracker.end(None, cid, 7, &Flow { local: LOCAL, remote: LOCAL, device: 0 });
        assert!(tracker.tracked(cid, 7).is_none());
    }

    const LOCAL: baton_wire::Endpoint = baton_wire::Endpoint { address: [0; 16], port: 1 };
}
