//! The classifier: finds the first rule that matches a packet by tuple space search (Srinivasan, Suri and Varghese,
//! "Packet classification using tuple space search", SIGCOMM 1999).
//!
//! Rules that compare the same bits of a packet share a *tuple*: a mask, and a hash table of the masked values that the
//! rules demand. A lookup probes each tuple once, tuples with earlier rules first, and ends when it has found a rule
//! that comes before all rules of the remaining tuples. So its time depends on how many kinds of rules there are, not
//! on how many rules. A range of ports is cut into prefixes.

use crate::packet::{Direction, Packet};
use crate::rule::{Action, Class, Matches, Ports, Prefix, Rule, State};
use crate::words::{RULES, SLOTS};
use ahash::RandomState;
use alloc::vec::Vec;
use core::fmt;
use core::hash::{Hash, Hasher};
use hashbrown::HashMap;

/// Most tuples of one direction and kind of packet.
pub const MAX_TUPLES: usize = 512;
/// Most entries of all hash tables; a rule with ranges of ports has several.
pub const MAX_ENTRIES: usize = 1 << 18;
/// Most rules that only count. Several of them can match one packet, so a lookup checks each of them.
pub const MAX_COUNT_RULES: usize = 16;

/// A rule and the slot of its counters, see [`crate::words`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Installed {
    /// The rule.
    pub rule: Rule,
    /// Its slot, below [`SLOTS`].
    pub slot: u16,
}

/// Why rules cannot be compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// More than [`RULES`] rules, or a slot that does not exist.
    TooManyRules,
    /// More than [`MAX_TUPLES`] combinations of matches and prefix lengths.
    TooManyTuples,
    /// More than [`MAX_ENTRIES`] entries.
    TooManyEntries,
    /// More than [`MAX_COUNT_RULES`] rules that only count.
    TooManyCounts,
}

impl fmt::Display for Refused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::TooManyRules => write!(out, "at most {RULES} rules fit: delete some"),
            Refused::TooManyTuples => write!(
                out,
                "the rules combine matches and prefix lengths in more than {MAX_TUPLES} ways: use fewer different prefix lengths"
            ),
            Refused::TooManyEntries => {
                write!(
                    out,
                    "the rules' ranges of ports need more than {MAX_ENTRIES} entries: use fewer, or ranges that begin and end at multiples of 16"
                )
            }
            Refused::TooManyCounts => write!(out, "at most {MAX_COUNT_RULES} rules may have the action count"),
        }
    }
}

impl core::error::Error for Refused {}

/// Fields of a packet, or bits of them, as the hash tables have them: source and destination address, and a word of
/// ports, protocol, state and EtherType.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Key {
    source: u128,
    destination: u128,
    rest: u64,
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write_u128(self.source);
        hasher.write_u128(self.destination);
        hasher.write_u64(self.rest);
    }
}

/// Places of the fields in [`Key::rest`].
const SOURCE_PORT: u32 = 48;
const DESTINATION_PORT: u32 = 32;
const PROTOCOL: u32 = 24;
const STATE: u32 = 16;

fn state_bits(state: Option<State>) -> u64 {
    match state {
        None => 0,
        Some(State::New) => 1,
        Some(State::Established) => 2,
    }
}

impl Key {
    #[inline(always)]
    fn of(packet: &Packet, state: Option<State>) -> Key {
        let ethertype = if let Class::Other(ethertype) = packet.class { ethertype } else { 0 };
        let rest = u64::from(packet.source_port) << SOURCE_PORT
            | u64::from(packet.destination_port) << DESTINATION_PORT
            | u64::from(packet.protocol.unwrap_or(0)) << PROTOCOL
            | state_bits(state) << STATE
            | u64::from(ethertype);
        Key { source: packet.source, destination: packet.destination, rest }
    }

    #[inline(always)]
    fn masked(&self, mask: &Key) -> Key {
        Key { source: self.source & mask.source, destination: self.destination & mask.destination, rest: self.rest & mask.rest }
    }
}

/// Rules that compare the same bits.
struct Tuple {
    mask: Key,
    /// The first of its rules.
    first: u16,
    /// The first rule that asks for each value.
    rules: HashMap<Key, u16, RandomState>,
}

/// Number of kinds of packets that are looked up separately, in each direction: IPv4, IPv6, all others.
const CLASSES: usize = 3;

fn class_index(class: Class) -> usize {
    match class {
        Class::V4 => 0,
        Class::V6 => 1,
        Class::Other(_) => 2,
    }
}

/// Rules, compiled. It does not change; another set of rules is another table.
pub struct Table {
    rules: Vec<Installed>,
    tuples: [[Vec<Tuple>; CLASSES]; 2],
    /// The rules that only count.
    counts: Vec<u16>,
    generation: u32,
}

impl Table {
    /// Compiles rules, the first of which has precedence. `generation` must differ from those of the last tables;
    /// `seeds` are random.
    ///
    /// # Errors
    /// If the rules need more memory, or more time in each lookup, than is allowed.
    pub fn new(rules: Vec<Installed>, generation: u32, seeds: [u64; 4]) -> Result<Table, Refused> {
        if rules.len() > RULES || rules.iter().any(|installed| usize::from(installed.slot) >= SLOTS) {
            return Err(Refused::TooManyRules);
        }
        let mut table = Table { rules, tuples: Default::default(), counts: Vec::new(), generation };
        let hasher = RandomState::with_seeds(seeds[0], seeds[1], seeds[2], seeds[3]);
        let mut entries = 0;
        for at in 0..table.rules.len() {
            let Rule { matches, action } = table.rules[at].rule;
            if action == Action::Count {
                table.counts.push(at as u16);
                continue;
            }
            for (mask, key) in keys(&matches) {
                for tuples in table.tuples_of(&matches) {
                    entries += 1;
                    enter(tuples, mask, key, at as u16, &hasher)?;
                }
                if entries > MAX_ENTRIES {
                    return Err(Refused::TooManyEntries);
                }
            }
        }
        if table.counts.len() > MAX_COUNT_RULES {
            return Err(Refused::TooManyCounts);
        }
        Ok(table)
    }

    /// The lists of tuples that a rule belongs to.
    fn tuples_of(&mut self, matches: &Matches) -> impl Iterator<Item = &mut Vec<Tuple>> {
        let wanted = |class: usize| match matches.class {
            Some(only) => class_index(only) == class,
            None => class != 2 || matches.any_class(),
        };
        let directions = [Direction::In, Direction::Out].map(|direction| matches.direction.is_none_or(|only| only == direction));
        let of_direction = self.tuples.iter_mut().zip(directions).filter(|(_, wanted)| *wanted);
        of_direction.flat_map(move |(classes, _)| {
            classes.iter_mut().enumerate().filter(move |(class, _)| wanted(*class)).map(|(_, tuples)| tuples)
        })
    }

    /// The rules.
    pub fn rules(&self) -> &[Installed] {
        &self.rules
    }

    /// Which of successive tables this is.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether there are no rules.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The number of the first rule that decides about a packet. Rules that only count do not.
    pub fn find(&self, direction: Direction, packet: &Packet, state: Option<State>) -> Option<u16> {
        let key = Key::of(packet, state);
        let mut best = u16::MAX;
        for tuple in &self.tuples[direction as usize][class_index(packet.class)] {
            if tuple.first >= best {
                break;
            }
            if let Some(rule) = tuple.rules.get(&key.masked(&tuple.mask)) {
                best = best.min(*rule);
            }
        }
        (best != u16::MAX).then_some(best)
    }

    /// Calls `each` with the slot of each rule before `decided` that counts a packet.
    #[inline]
    pub(crate) fn counting(
        &self,
        direction: Direction,
        packet: &Packet,
        state: Option<State>,
        decided: Option<u16>,
        mut each: impl FnMut(u16),
    ) {
        for at in &self.counts {
            let installed = &self.rules[usize::from(*at)];
            if decided.is_none_or(|decided| *at < decided) && installed.rule.matches.matches(direction, packet, state) {
                each(installed.slot);
            }
        }
    }
}

/// Enters a rule into the tuple of its mask. Rules come in order, so tuples are in the order of their first rules.
fn enter(tuples: &mut Vec<Tuple>, mask: Key, key: Key, rule: u16, hasher: &RandomState) -> Result<(), Refused> {
    let at = match tuples.iter().position(|tuple| tuple.mask == mask) {
        Some(at) => at,
        None if tuples.len() == MAX_TUPLES => return Err(Refused::TooManyTuples),
        None => {
            tuples.push(Tuple { mask, first: rule, rules: HashMap::with_hasher(hasher.clone()) });
            tuples.len() - 1
        }
    };
    tuples[at].rules.entry(key).or_insert(rule);
    Ok(())
}

/// The masks and values of a rule: several if it has ranges of ports.
fn keys(matches: &Matches) -> impl Iterator<Item = (Key, Key)> {
    let field = |value: Option<u64>, bits: u64, place: u32| value.map_or((0, 0), |value| (bits << place, value << place));
    let protocol = field(matches.protocol.map(u64::from), 0xff, PROTOCOL);
    let state = field(matches.state.map(|state| state_bits(Some(state))), 3, STATE);
    let ethertype = match matches.class {
        Some(Class::Other(ethertype)) => (0xffff, u64::from(ethertype)),
        _ => (0, 0),
    };
    let fixed = (protocol.0 | state.0 | ethertype.0, protocol.1 | state.1 | ethertype.1);
    let address = |prefix: Option<Prefix>| prefix.map_or((0, 0), |prefix| (Prefix::mask(prefix.length), prefix.address));
    let (source, destination) = (address(matches.source), address(matches.destination));
    let destinations = prefixes(matches.destination_ports);
    prefixes(matches.source_ports).into_iter().flat_map(move |from| {
        destinations.clone().into_iter().map(move |to| {
            let rest =
                |fixed: u64, from: u16, to: u16| fixed | u64::from(from) << SOURCE_PORT | u64::from(to) << DESTINATION_PORT;
            let mask = Key { source: source.0, destination: destination.0, rest: rest(fixed.0, from.0, to.0) };
            (mask, Key { source: source.1, destination: destination.1, rest: rest(fixed.1, from.1, to.1) })
        })
    })
}

/// Cuts a range of ports into masks and values: prefixes of 0, 4, 8, 12 or 16 bits, so that ranges have few kinds of
/// masks.
fn prefixes(ports: Option<Ports>) -> Vec<(u16, u16)> {
    let Some(Ports { first, last }) = ports else { return alloc::vec![(0, 0)] };
    let (mut from, end) = (u32::from(first), u32::from(last) + 1);
    let mut prefixes = Vec::new();
    while from < end {
        let sizes = [1u32 << 16, 1 << 12, 1 << 8, 1 << 4, 1];
        let size = sizes.into_iter().find(|size| from.is_multiple_of(*size) && from + size <= end).unwrap_or(1);
        prefixes.push(((!(size - 1)) as u16, from as u16));
        from += size;
    }
    prefixes
}

impl fmt::Debug for Table {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "table {} of {} rules", self.generation, self.rules.len())
    }
}

/// A hash of a flow, or of a fragmented datagram, that is not 0.
#[inline]
pub(crate) fn flow_hash(hasher: &RandomState, first: u128, second: u128, rest: u64) -> u64 {
    hasher.hash_one(Key { source: first, destination: second, rest }).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_prefixes() {
        for (first, last) in [(0, 65535), (1, 65534), (80, 80), (1024, 65535), (0, 0), (65535, 65535), (1000, 2000)] {
            let cut = prefixes(Some(Ports { first, last }));
            assert!(cut.len() <= 7 * 15);
            for port in 0..=u16::MAX {
                let hits = cut.iter().filter(|(mask, value)| port & mask == *value).count();
                assert_eq!(hits, usize::from((first..=last).contains(&port)), "{port} in {first}-{last}");
            }
        }
    }
}
