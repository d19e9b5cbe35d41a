//! Oracles on the wire: what must hold of every segment that leaves a host, whoever sends it.

use baton_abi::layout::{nic, slot};
use baton_abi::{Cid, Record};
use baton_recovery::read_record;
use baton_shm::Region;
use baton_tcp::seq::before;
use baton_wire::{Flags, Flow, TcpFrame};
use std::collections::BTreeMap;

/// What one end of a connection has said so far.
#[derive(Default)]
struct Said {
    /// Sequence number behind everything that it has sent.
    end: Option<u32>,
    /// Latest acknowledgement number, right edge of the window, timestamp.
    ack: Option<u32>,
    edge: Option<u32>,
    clock: Option<u32>,
    /// Shift of its window, from its SYN.
    shift: u8,
}

/// What is known of the connection that a segment is of.
pub(crate) struct About<'a> {
    /// Its program has closed it, or one of both resets it: a RST may be sent.
    pub may_reset: bool,
    /// NIC memory and cid, if the NIC owns the connection.
    pub on_nic: Option<(&'a Region, Cid)>,
}

#[derive(Default)]
pub(crate) struct Watch {
    said: BTreeMap<Flow, Said>,
}

impl Watch {
    /// Checks a segment that its sender, whose 4-tuple is `flow`, puts on the wire. Returns what is wrong.
    pub fn check(&mut self, flow: Flow, segment: &TcpFrame, about: &About<'_>) -> Option<String> {
        let said = self.said.entry(flow).or_default();
        if segment.flags.contains(Flags::RST) {
            return (!about.may_reset).then(|| format!("{flow:?}: a reset that no program has caused"));
        }
        if segment.flags.contains(Flags::SYN) {
            *said = Said { shift: segment.options.window_scale.unwrap_or(0), ..Said::default() };
            return None;
        }
        let clock = segment.options.timestamps.map(|(value, _)| value);
        let edge = segment.ack.wrapping_add(u32::from(segment.window) << said.shift);
        let wrong = said
            .retreat(segment.ack, edge, clock)
            .or_else(|| about.on_nic.and_then(|(memory, cid)| uncovered(memory, cid, segment, edge, said.shift)));
        (said.ack, said.clock) = (Some(segment.ack), clock);
        let end = end_of(segment);
        said.end = Some(said.end.filter(|last| before(end, *last)).unwrap_or(end));
        said.edge = Some(said.edge.filter(|last| before(edge, *last)).unwrap_or(edge));
        wrong.map(|wrong| format!("{flow:?}: {wrong}"))
    }
}

impl Watch {
    /// Checks the record of a connection whose NIC has died: it must cover everything that the host has said. Returns
    /// what is wrong.
    pub fn check_record(&self, flow: Flow, memory: &Region, cid: Cid) -> Option<String> {
        let said = self.said.get(&flow)?;
        let mut bytes = [0; Flow::BYTES];
        memory.read(nic::slot(cid.slot()) + slot::FLOW, &mut bytes).ok()?;
        if Flow::from_bytes(&bytes) != flow {
            // It has ended on the NIC, and the slot is another connection's.
            return None;
        }
        let record = read_record(memory, nic::slot(cid.slot()))?;
        let beyond = |value: Option<u32>, covered: u32| value.filter(|value| before(covered, *value));
        if let Some(end) = beyond(said.end, record.snd_nxt) {
            return Some(format!("{flow:?}: the NIC died after it had sent up to {end}, its record covers {}", record.snd_nxt));
        }
        beyond(said.ack, record.rcv_nxt)
            .map(|ack| format!("{flow:?}: the NIC died after it had acknowledged {ack}, its record covers {}", record.rcv_nxt))
    }
}

/// The sequence number behind a segment.
fn end_of(segment: &TcpFrame) -> u32 {
    let fin = u32::from(segment.flags.contains(Flags::FIN));
    segment.seq.wrapping_add(segment.payload_length as u32 + fin)
}

impl Said {
    /// An acknowledgement, a window's edge or a timestamp that goes back.
    fn retreat(&self, ack: u32, edge: u32, clock: Option<u32>) -> Option<String> {
        if let Some(last) = self.ack.filter(|last| before(ack, *last)) {
            return Some(format!("acknowledges {ack} after {last}"));
        }
        // An edge is a multiple of the window's unit ahead of the acknowledgement.
        if let Some(last) = self.edge.filter(|last| before(edge.wrapping_add(1 << self.shift), *last)) {
            return Some(format!("the window's edge is {edge} after {last}"));
        }
        match (clock, self.clock) {
            (Some(clock), Some(last)) if before(clock, last) => Some(format!("timestamp {clock} after {last}")),
            (None, Some(_)) => Some("no timestamp".into()),
            _ => None,
        }
    }
}

/// What a segment of a connection on the NIC says and the recovery record does not cover.
fn uncovered(memory: &Region, cid: Cid, segment: &TcpFrame, edge: u32, shift: u8) -> Option<String> {
    let Record { snd_nxt, rcv_nxt, rcv_adv, .. } = read_record(memory, nic::slot(cid.slot()))?;
    let end = end_of(segment);
    if before(snd_nxt, end) {
        return Some(format!("sends up to {end}, the record covers {snd_nxt}"));
    }
    if before(rcv_nxt, segment.ack) {
        return Some(format!("acknowledges {}, the record covers {rcv_nxt}", segment.ack));
    }
    let unit = (1u32 << shift) - 1;
    before(rcv_adv.wrapping_add(unit), edge).then(|| format!("opens the window to {edge}, the record covers {rcv_adv}"))
}
