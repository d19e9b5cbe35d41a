//! The filter of frames of some flows, whole, in fragments and damaged, in both directions, while rules change and time
//! passes, beside the plainest list of rules, flows and buckets.
//!
//! A step is a frame, another set of rules, or a time that passes.

use baton_filter::words::{SLOTS, UNMATCHED, UNREADABLE, WORDS, clear, counted};
use baton_filter::{
    Action, Class, Direction, Filter, Installed, Limit, MAX_COUNT_RULES, Matches, Packet, Part, Ports, Prefix, Rule, State, Step,
    Table, Unit, Verdict, parse,
};
use baton_fuzz::{Choice, World, note};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

const KEY: [u64; 4] = [1, 2, 3, 4];
const SECOND: u64 = 1_000_000;
/// Most rules at once; each set has slots of its own.
const RULES: usize = 24;

/// The two ends of a flow, this host's first, protocol and address family.
type FlowOf = ([(u128, u16); 2], u8, bool);

/// Source, destination, protocol, address family, identification, direction.
type Datagram = (u128, u128, u8, bool, u32, Direction);

#[derive(Clone, Copy, Default)]
struct Known {
    seen: [bool; 2],
    fins: [bool; 2],
    reset: bool,
    at: u64,
}

struct Plain {
    rules: Vec<Installed>,
    generation: u32,
    flows: HashMap<FlowOf, Known>,
    /// The rule that has decided about a first fragment, in which generation, and when.
    datagrams: HashMap<Datagram, (Option<usize>, u32, u64)>,
    /// Packets, bytes, packets over the limit, and when the bucket is full, of each slot.
    counts: HashMap<usize, ([u64; 3], u64)>,
}

struct Both {
    filter: Filter,
    words: Vec<AtomicU64>,
    plain: Plain,
    now: u64,
    /// Counters for damaged frames, of which the plain model says nothing.
    scrap: Vec<AtomicU64>,
}

fn words() -> Vec<AtomicU64> {
    std::iter::repeat_with(|| AtomicU64::new(0)).take(WORDS).collect()
}

fn address(v6: bool, number: u64) -> u128 {
    let (high, low) = (u128::from(number / 4), u128::from(number % 4));
    if v6 { 0xfd << 120 | high << 64 | low } else { (10 << 24 | high << 16 | low) << 96 }
}

fn rule(choice: &mut Choice) -> Rule {
    let class = choice.of(&[None, Some(Class::V4), Some(Class::V4), Some(Class::V6), Some(Class::Other(0x806))]);
    let ip = matches!(class, Some(Class::V4 | Class::V6));
    let v6 = class == Some(Class::V6);
    let mut prefix = || {
        let length = if v6 { choice.of(&[0u8, 8, 62, 64, 127, 128]) } else { choice.of(&[0u8, 8, 15, 16, 31, 32]) };
        let prefix = Prefix { address: address(v6, choice.below(8)) & Prefix::mask(length), length };
        (ip && choice.one_in(3)).then_some(prefix)
    };
    let (source, destination) = (prefix(), prefix());
    let protocol = (!matches!(class, Some(Class::Other(_))) && choice.one_in(2)).then(|| choice.of(&[6, 6, 17, 17, 47]));
    let transport = matches!(protocol, Some(6 | 17));
    let mut ports = || {
        let (one, other) = (choice.below(4) as u16, choice.of(&[0, 1, 2, 3, 65_535]));
        (transport && choice.one_in(3)).then(|| Ports { first: one.min(other), last: one.max(other) })
    };
    let (source_ports, destination_ports) = (ports(), ports());
    let state = (transport && choice.one_in(2)).then(|| choice.of(&[State::New, State::Established]));
    let direction = choice.of(&[None, Some(Direction::In), Some(Direction::Out)]);
    let rate = choice.of(&[1, 10, 1000, 1 << 20, 1 << 33]);
    let unit = choice.of(&[Unit::Bytes, Unit::Packets]);
    let limit = Limit { unit, rate, burst: choice.of(&[1, 100, 10_000]).max(rate.div_ceil(1_000_000_000)) };
    let actions =
        [Action::Accept, Action::Accept, Action::Accept, Action::Drop, Action::Reject, Action::Count, Action::Limit(limit)];
    let matches = Matches { direction, class, protocol, source, destination, source_ports, destination_ports, state };
    Rule { matches, action: choice.of(&actions) }
}

impl Plain {
    fn count(&mut self, slot: usize, (packets, bytes): (u64, u64)) {
        let count = &mut self.counts.entry(slot).or_default().0;
        count[0] += packets;
        count[1] += bytes;
    }

    fn apply(&mut self, rule: Option<usize>, amount: (u64, u64), (now, can_wait): (u64, bool)) -> Verdict {
        let Some(installed) = rule.map(|rule| self.rules[rule]) else {
            self.count(UNMATCHED, amount);
            return Verdict::Pass;
        };
        let slot = usize::from(installed.slot);
        self.count(slot, amount);
        let limit = match installed.rule.action {
            Action::Accept | Action::Count => return Verdict::Pass,
            Action::Drop => return Verdict::Drop,
            Action::Reject => return Verdict::Reject,
            Action::Limit(limit) => limit,
        };
        let nanos = |tokens: u64| (u128::from(tokens) * 1_000_000_000 / u128::from(limit.rate)) as u64;
        let cost = nanos(if limit.unit == Unit::Bytes { amount.1 } else { amount.0 });
        let (counts, full_at) = self.counts.entry(slot).or_default();
        let (now_nanos, burst) = (now * 1000, nanos(limit.burst).max(1));
        let lacking = full_at.saturating_sub(now_nanos);
        // Some tokens are there; or there will be before another burst has come.
        if lacking < burst || can_wait && lacking < 2 * burst {
            *full_at = now_nanos + lacking + cost;
            return if lacking < burst { Verdict::Pass } else { Verdict::Later(now + (lacking - burst) / 1000 + 1) };
        }
        counts[2] += amount.0;
        Verdict::Drop
    }

    fn judge(&mut self, direction: Direction, packet: &Packet, amount: (u64, u64), (now, can_wait): (u64, bool)) -> Verdict {
        let (second, v6, protocol) = (now / SECOND, packet.class == Class::V6, packet.protocol.unwrap_or(0));
        let datagram = match packet.part {
            Part::Whole => None,
            Part::First(ident) | Part::Later(ident) => Some((packet.source, packet.destination, protocol, v6, ident, direction)),
        };
        if matches!(packet.part, Part::Later(_)) {
            let known = datagram.and_then(|datagram| self.datagrams.get(&datagram));
            return match known {
                Some((rule, generation, at)) if *generation == self.generation && second - at <= 180 => {
                    self.apply(*rule, amount, (now, can_wait))
                }
                _ => {
                    self.count(UNREADABLE, amount);
                    Verdict::Drop
                }
            };
        }
        let tcp = protocol == 6;
        let (from, to) = ((packet.source, packet.source_port), (packet.destination, packet.destination_port));
        let ends = if direction == Direction::In { [to, from] } else { [from, to] };
        let flow = matches!(packet.protocol, Some(6 | 17)).then_some((ends, protocol, v6));
        let known = flow.and_then(|flow| self.flows.get(&flow)).copied().filter(|known| second - known.at <= known.lasts(tcp));
        let answer = packet.step != Step::Opens && known.is_some_and(|known| known.seen[1 - direction as usize]);
        let state = flow.map(|_| if answer { State::Established } else { State::New });
        let hits = |installed: &Installed| installed.rule.matches.matches(direction, packet, state);
        let rule = self.rules.iter().position(|installed| installed.rule.action != Action::Count && hits(installed));
        let before = rule.unwrap_or(self.rules.len());
        let counting: Vec<usize> = self.rules[..before]
            .iter()
            .filter(|installed| installed.rule.action == Action::Count && hits(installed))
            .map(|installed| installed.slot.into())
            .collect();
        counting.into_iter().for_each(|slot| self.count(slot, amount));
        let verdict = self.apply(rule, amount, (now, can_wait));
        if matches!(verdict, Verdict::Pass | Verdict::Later(_)) {
            if let Some(flow) = flow {
                let known = known.filter(|_| packet.step != Step::Opens);
                self.flows.insert(flow, Known::after(known, direction, packet.step, tcp, second));
            }
            if let Some(datagram) = datagram {
                self.datagrams.insert(datagram, (rule, self.generation, second));
            }
        }
        verdict
    }
}

impl Known {
    /// Seconds for which a flow is known that nothing is seen of.
    fn lasts(&self, tcp: bool) -> u64 {
        match self {
            _ if !tcp => 180,
            known if known.reset => 10,
            known if known.fins == [true; 2] => 120,
            _ => 3 * 3600,
        }
    }

    /// What is known when another frame has been accepted. Only what this host sends keeps a flow of TCP.
    fn after(before: Option<Known>, direction: Direction, step: Step, tcp: bool, second: u64) -> Known {
        let ours = direction == Direction::Out;
        let mut known = before.unwrap_or(Known { at: second, ..Known::default() });
        if !tcp || ours && !(step == Step::Resets && known.reset) {
            known.at = second;
        }
        known.seen[direction as usize] = true;
        match step {
            Step::Closes => known.fins[direction as usize] = true,
            Step::Resets => known.reset |= ours,
            _ => known.reset &= !ours,
        }
        known
    }
}

/// A frame, and what it says.
fn frame(choice: &mut Choice) -> (Vec<u8>, Direction, Packet) {
    let direction = choice.of(&[Direction::In, Direction::Out]);
    let class = choice.of(&[Class::V4, Class::V4, Class::V4, Class::V6, Class::V6, Class::Other(0x806), Class::Other(0x88b5)]);
    let mut frame = vec![2; 12];
    for _ in 0..choice.of(&[0, 0, 0, 1, 2]) {
        frame.extend(choice.of(&[0x8100u16, 0x88a8]).to_be_bytes());
        frame.extend([0, 5]);
    }
    let mut packet = Packet::empty(class);
    let v6 = match class {
        Class::Other(ethertype) => {
            frame.extend(ethertype.to_be_bytes());
            frame.extend([0; 46]);
            return (frame, direction, packet);
        }
        class => class == Class::V6,
    };
    let protocol = choice.of(&[6, 6, 6, 17, 17, 47]);
    // This host has two addresses, and there are four others.
    let (ours, theirs) =
        ((address(v6, choice.below(2)), choice.below(3) as u16), (address(v6, 2 + choice.below(4)), choice.below(3) as u16));
    let (from, to) = if direction == Direction::In { (theirs, ours) } else { (ours, theirs) };
    (packet.protocol, packet.source, packet.destination) = (Some(protocol), from.0, to.0);
    let ident = choice.below(4) as u32;
    let (part, offset) = match choice.below(8) {
        0 => (Part::First(ident), 0u16),
        1 => (Part::Later(ident), choice.of(&[24, 800])),
        _ => (Part::Whole, 0),
    };
    packet.part = part;
    let mut transport = Vec::new();
    if matches!(part, Part::Later(_)) || protocol == 47 {
        transport.extend([0xff; 40]);
    } else {
        (packet.source_port, packet.destination_port) = (from.1, to.1);
        transport.extend(from.1.to_be_bytes());
        transport.extend(to.1.to_be_bytes());
        transport.extend([0; 16]);
        if protocol == 6 {
            let (flags, step) = choice.of(&[
                (16, Step::Continues),
                (16, Step::Continues),
                (2, Step::Opens),
                (0xc2, Step::Opens),
                (18, Step::Continues),
                (17, Step::Closes),
                (4, Step::Resets),
                (0x17, Step::Resets),
            ]);
            transport[13] = flags;
            packet.step = step;
        }
    }
    let more = !matches!(part, Part::Whole) && offset != 800;
    if v6 {
        frame.extend(0x86ddu16.to_be_bytes());
        let mut headers = Vec::new();
        let mut next = protocol;
        if !matches!(part, Part::Whole) {
            headers.extend([next, 0]);
            headers.extend((offset | u16::from(more)).to_be_bytes());
            headers.extend(ident.to_be_bytes());
            next = 44;
        }
        if choice.one_in(4) {
            let kind = choice.of(&[0u8, 43, 60]);
            headers = [&[next, 0, 1, 4, 0, 0, 0, 0], &headers[..]].concat();
            next = kind;
        }
        frame.extend([0x60, 0, 0, 0]);
        frame.extend(((headers.len() + transport.len()) as u16).to_be_bytes());
        frame.extend([next, 64]);
        frame.extend(from.0.to_be_bytes());
        frame.extend(to.0.to_be_bytes());
        frame.extend(headers);
    } else {
        frame.extend([8, 0]);
        let options = choice.of(&[0usize, 0, 4, 40]);
        frame.extend([0x45 + (options / 4) as u8, 0]);
        frame.extend(((20 + options + transport.len()) as u16).to_be_bytes());
        frame.extend((ident as u16).to_be_bytes());
        frame.extend(((offset / 8) | if more { 0x2000 } else { 0x4000 * u16::from(part == Part::Whole) }).to_be_bytes());
        frame.extend([64, protocol, 0, 0]);
        frame.extend(((from.0 >> 96) as u32).to_be_bytes());
        frame.extend(((to.0 >> 96) as u32).to_be_bytes());
        frame.extend(vec![1; options]);
    }
    frame.extend(transport);
    (frame, direction, packet)
}

impl Both {
    fn set_rules(&mut self, choice: &mut Choice) {
        let generation = self.plain.generation + 1;
        let first = generation as usize % 2 * RULES;
        let mut rules: Vec<Rule> = (0..choice.below(RULES as u64 + 1)).map(|_| rule(choice)).collect();
        let mut counting = 0;
        rules.retain(|rule| {
            counting += usize::from(rule.action == Action::Count);
            rule.action != Action::Count || counting <= MAX_COUNT_RULES
        });
        for rule in &rules {
            note!("{rule}");
            // An address of no family, and a state of every family, cannot be written.
            let written = parse(&rule.to_string());
            assert_eq!(written.as_ref().map(|written| *written), Ok(*rule), "{rule} reads back otherwise");
        }
        let rules: Vec<Installed> =
            rules.into_iter().enumerate().map(|(at, rule)| Installed { rule, slot: (first + at) as u16 }).collect();
        for slot in first..first + RULES {
            clear(&self.words, slot);
            self.plain.counts.remove(&slot);
        }
        let table = Table::new(rules.clone(), generation, KEY).expect("few rules");
        self.filter = Filter::new(Arc::new(table), KEY);
        (self.plain.rules, self.plain.generation) = (rules, generation);
    }

    fn compare(&self) {
        for slot in (0..2 * RULES).chain([UNMATCHED, UNREADABLE]) {
            let is = counted(&self.words, slot);
            let should = self.plain.counts.get(&slot).copied().unwrap_or_default().0;
            assert_eq!([is.packets, is.bytes, is.over], should, "slot {slot} of {SLOTS}");
        }
    }
}

impl World for Both {
    const LONGEST: u64 = 20_000;

    fn new(word: u64) -> Both {
        let mut choice = Choice::new(word);
        // The seconds of some wrap in the words.
        let now = choice.of(&[SECOND, (1 << 26) * SECOND - 100 * SECOND, 1 << 50]) + choice.below(200 * SECOND);
        let table = Table::new(Vec::new(), 1, KEY).expect("no rules");
        let plain =
            Plain { rules: Vec::new(), generation: 1, flows: HashMap::new(), datagrams: HashMap::new(), counts: HashMap::new() };
        let mut both = Both { filter: Filter::new(Arc::new(table), KEY), words: words(), plain, now, scrap: words() };
        both.set_rules(&mut choice);
        both
    }

    fn step(&mut self, word: u64) -> bool {
        let mut choice = Choice::new(word);
        match choice.below(128) {
            0 if choice.one_in(2) => self.set_rules(&mut choice),
            1 => {
                self.compare();
                self.now += choice.of(&[10, 11, 120, 121, 180, 181, 3 * 3600, 3 * 3600 + 1, 86_400]) * SECOND;
            }
            2..12 => self.now += u64::from(choice.magnitude(22)),
            12..20 => {
                let (mut frame, direction, _) = frame(&mut choice);
                for _ in 0..=choice.below(3) {
                    let at = 12 + choice.below(frame.len() as u64 - 12) as usize;
                    frame[at] = choice.number() as u8;
                }
                frame.truncate(choice.below(2 * frame.len() as u64) as usize);
                self.filter.judge(&self.scrap, direction, &frame, (1, frame.len() as u64), (self.now, true));
            }
            _ => {
                let (frame, direction, packet) = frame(&mut choice);
                let amount = (choice.of(&[1, 1, 1, 40]), frame.len() as u64);
                let moment = (self.now, choice.one_in(2));
                let is = self.filter.judge(&self.words, direction, &frame, amount, moment);
                let should = self.plain.judge(direction, &packet, amount, moment);
                note!("{} {direction:?} {packet:?} {is:?}", self.now);
                assert_eq!(is, should, "{direction:?} {packet:?}");
            }
        }
        true
    }

    fn end(self) {
        self.compare();
    }
}

#[test]
fn frames_are_judged_as_by_a_plain_list() {
    crate::fuzzer!("filter").run::<Both>();
}
