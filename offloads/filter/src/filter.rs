//! The filter of one worker: a table applied to frames.

use crate::flows::{Flows, Kind};
use crate::packet::{Direction, Packet, Part, Step};
use crate::rule::{Action, State};
use crate::table::{Table, flow_hash};
use crate::words::{self, UNMATCHED, UNREADABLE};
use ahash::RandomState;
use alloc::sync::Arc;
use baton_wire::frame::PROTOCOL_TCP;
use core::sync::atomic::AtomicU64;

/// What the caller has to do with a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It passes.
    Pass,
    /// It passes at this time, in microseconds, and not before frames that have to wait shorter.
    Later(u64),
    /// It is dropped.
    Drop,
    /// It is dropped, and its sender is to get an answer.
    Reject,
}

/// A worker's filter.
pub struct Filter {
    table: Arc<Table>,
    hasher: RandomState,
}

impl Filter {
    /// Applies a table. `key` is random, and the same for all filters that share [`words`].
    pub fn new(table: Arc<Table>, key: [u64; 4]) -> Filter {
        Filter { table, hasher: RandomState::with_seeds(key[0], key[1], key[2], key[3]) }
    }

    /// The table.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Judges a frame that stands for `packets` frames of `bytes` bytes in all, at `now` microseconds. The verdict can
    /// be [`Verdict::Later`] only if the frame `can_wait`.
    ///
    /// A later fragment gets the verdict of its datagram's first fragment; if that is not known, it is dropped.
    pub fn judge(
        &self,
        words: &[AtomicU64],
        direction: Direction,
        frame: &[u8],
        (packets, bytes): (u64, u64),
        (now, can_wait): (u64, bool),
    ) -> Verdict {
        let Ok(packet) = Packet::parse(frame) else {
            words::count(words, UNREADABLE, packets, bytes);
            return Verdict::Drop;
        };
        let (flows, second, generation) = (Flows(words), (now / 1_000_000) as u32, self.table.generation());
        let datagram = self.datagram(direction, &packet);
        if let (Part::Later(_), Some(hash)) = (packet.part, datagram) {
            let found = flows.find(hash, second);
            let Some(rule) = found.and_then(|found| flows.decided(&found, direction, generation)) else {
                words::count(words, UNREADABLE, packets, bytes);
                return Verdict::Drop;
            };
            return self.apply(words, rule, (packets, bytes), (now, can_wait));
        }
        let hash = if packet.has_flow() { self.flow(direction, &packet) } else { 0 };
        let found = if hash != 0 { flows.find(hash, second) } else { None };
        let answer = packet.step != Step::Opens && found.is_some_and(|found| found.is_answer(direction));
        let state = (hash != 0).then_some(if answer { State::Established } else { State::New });
        let cached = found.filter(|_| answer).and_then(|found| flows.decided(&found, direction, generation));
        let rule = cached.unwrap_or_else(|| self.table.find(direction, &packet, state));
        self.table.counting(direction, &packet, state, rule, |slot| words::count(words, slot.into(), packets, bytes));
        let verdict = self.apply(words, rule, (packets, bytes), (now, can_wait));
        if matches!(verdict, Verdict::Pass | Verdict::Later(_)) {
            if hash != 0 {
                let kind = if packet.protocol == Some(PROTOCOL_TCP) { Kind::Tcp } else { Kind::Udp };
                let found = flows.accepted(hash, found, direction, packet.step, kind, second);
                if answer && cached.is_none() {
                    flows.decide(&found, direction, generation, rule);
                }
            }
            if let Some(hash) = datagram {
                let found = flows.accepted(hash, flows.find(hash, second), direction, Step::Opens, Kind::Datagram, second);
                flows.decide(&found, direction, generation, rule);
            }
        }
        verdict
    }

    /// Counts a frame for the rule that decides, and applies the rule's action.
    #[inline]
    fn apply(
        &self,
        words: &[AtomicU64],
        rule: Option<u16>,
        (packets, bytes): (u64, u64),
        (now, can_wait): (u64, bool),
    ) -> Verdict {
        let Some(installed) = rule.and_then(|rule| self.table.rules().get(usize::from(rule))) else {
            words::count(words, UNMATCHED, packets, bytes);
            return Verdict::Pass;
        };
        let slot = usize::from(installed.slot);
        words::count(words, slot, packets, bytes);
        match installed.rule.action {
            Action::Accept | Action::Count => Verdict::Pass,
            Action::Drop => Verdict::Drop,
            Action::Reject => Verdict::Reject,
            Action::Limit(limit) => match limit.admit(words::bucket(words, slot), packets, bytes, now, can_wait) {
                Some(at) if at <= now => Verdict::Pass,
                Some(at) => Verdict::Later(at),
                None => {
                    words::count_over(words, slot, packets);
                    Verdict::Drop
                }
            },
        }
    }

    /// The hash of a packet's flow, the same in both directions.
    #[inline]
    fn flow(&self, direction: Direction, packet: &Packet) -> u64 {
        let (local, remote) = match direction {
            Direction::In => ((packet.destination, packet.destination_port), (packet.source, packet.source_port)),
            Direction::Out => ((packet.source, packet.source_port), (packet.destination, packet.destination_port)),
        };
        let rest = u64::from(local.1) << 48 | u64::from(remote.1) << 32 | self.kind(packet, 0);
        flow_hash(&self.hasher, local.0, remote.0, rest)
    }

    /// The hash of the datagram that a fragment belongs to. None for a packet that is no fragment.
    fn datagram(&self, direction: Direction, packet: &Packet) -> Option<u64> {
        let (Part::First(ident) | Part::Later(ident)) = packet.part else { return None };
        let rest = u64::from(ident) << 32 | self.kind(packet, 1 + direction as u64);
        Some(flow_hash(&self.hasher, packet.source, packet.destination, rest))
    }

    /// The part of a hash that keeps protocols, address families, flows and datagrams apart.
    fn kind(&self, packet: &Packet, what: u64) -> u64 {
        let class = u64::from(packet.class == crate::rule::Class::V6);
        u64::from(packet.protocol.unwrap_or(0)) << 8 | class << 4 | what
    }
}
