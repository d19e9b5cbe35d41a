//! Rules as text.
//!
//! ```text
//! [in|out] [ip|ip6|arp|ether TYPE] [tcp|udp|icmp|icmpv6|proto NUMBER] MATCH… ACTION
//!
//! MATCH   [ip|ip6] saddr|daddr ADDRESS[/LENGTH]    sport|dport PORT[-PORT]    [ct] state new|established
//! ACTION  accept   drop   reject   count   limit RATE [burst SIZE]
//! RATE    10mbit (also bit, kbit, gbit)   500kb (bytes a second; also b, mb)   1000pps
//! SIZE    64kb (also b, mb); for pps a number of packets. Default: what comes in a tenth of a second, at least 16 KB;
//!         least: what comes in a nanosecond
//! ```
//!
//! The order of matches does not matter. A file has a rule on each line, and comments that begin with `#`.

use crate::limit::{Limit, MOST, Unit};
use crate::packet::Direction;
use crate::rule::{Action, Class, ETHERTYPE_ARP, Matches, PROTOCOL_UDP, Ports, Prefix, Rule, State};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use baton_wire::frame::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP};
use core::fmt;
use core::net::IpAddr;
use hashbrown::HashMap;

/// Why a rule is no rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseError {
    /// Line of the text, from 1.
    pub line: usize,
    /// The line.
    pub text: String,
    /// Offset in the line, in bytes, of the word that is wrong.
    pub at: usize,
    /// What is wrong, and what to write instead.
    pub message: String,
}

/// The message, the line, and a mark below the word.
impl fmt::Display for ParseError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before = self.text.get(..self.at).map_or(0, |before| before.chars().count());
        write!(out, "line {}: {}\n  {}\n  {:before$}^", self.line, self.message, self.text, "")
    }
}

impl core::error::Error for ParseError {}

/// A message about the word at an offset.
type Wrong = (usize, String);

/// A word and its offset.
type Word<'a> = (usize, &'a str);

struct Words<'a> {
    words: core::iter::Peekable<alloc::vec::IntoIter<Word<'a>>>,
    end: usize,
}

impl<'a> Words<'a> {
    fn of(line: &'a str) -> Words<'a> {
        let offset = |word: &str| word.as_ptr() as usize - line.as_ptr() as usize;
        let words: Vec<Word<'a>> = line.split_ascii_whitespace().map(|word| (offset(word), word)).collect();
        Words { words: words.into_iter().peekable(), end: line.trim_end().len() }
    }

    fn next(&mut self) -> Option<Word<'a>> {
        self.words.next()
    }

    /// The word that must follow.
    fn expect(&mut self, what: &str) -> Result<Word<'a>, Wrong> {
        self.next().ok_or_else(|| (self.end, format!("{what} is missing at the end")))
    }
}

/// Sets a match that may be given once.
fn set<T: PartialEq>(field: &mut Option<T>, value: T, (at, word): Word<'_>) -> Result<(), Wrong> {
    match field {
        None => {
            *field = Some(value);
            Ok(())
        }
        Some(known) if *known == value => Err((at, format!("{word:?} is given twice"))),
        Some(_) => Err((at, format!("{word:?} contradicts what the rule says before: no frame matches both"))),
    }
}

/// Sets the kind of packet, which several matches may imply.
fn set_class(matches: &mut Matches, class: Class, (at, word): Word<'_>) -> Result<(), Wrong> {
    match matches.class {
        Some(other) if other != class => {
            Err((at, format!("{word:?} contradicts what the rule says before: no packet is of two families")))
        }
        _ => {
            matches.class = Some(class);
            Ok(())
        }
    }
}

fn number(word: &str) -> Option<u64> {
    word.bytes().all(|byte| byte.is_ascii_digit()).then(|| word.parse().ok()).flatten()
}

fn prefix((at, word): Word<'_>) -> Result<(Prefix, Class), Wrong> {
    let (address, length) = word.split_once('/').map_or((word, None), |(address, length)| (address, Some(length)));
    let wrong = || (at, format!("{word:?} is no address: write for example 10.0.0.0/8 or fd00::/16"));
    let (address, whole, class) = match address.parse().map_err(|_| wrong())? {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()) << 96, 32, Class::V4),
        IpAddr::V6(v6) => (v6.to_bits(), 128, Class::V6),
    };
    let length = match length.map(number) {
        None => whole,
        Some(Some(length)) if length <= whole => length,
        Some(_) => return Err((at, format!("{word:?}: the length of a prefix is 0 to {whole}"))),
    } as u8;
    if address & !Prefix::mask(length) != 0 {
        return Err((at, format!("{word:?} has bits behind its {length} bits of prefix: write them as 0")));
    }
    Ok((Prefix { address, length }, class))
}

fn ports((at, word): Word<'_>) -> Result<Ports, Wrong> {
    let (first, last) = word.split_once('-').unwrap_or((word, word));
    let port = |text: &str| number(text).and_then(|port| u16::try_from(port).ok());
    let wrong = || (at, format!("{word:?} is no port: write 22, or 1000-2000, each at most 65535"));
    let (first, last) = port(first).zip(port(last)).ok_or_else(wrong)?;
    if first > last {
        return Err((at, format!("{word:?} is empty: write the lower port first")));
    }
    Ok(Ports { first, last })
}

/// A number with a unit, in terms of that unit.
fn quantity(word: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = word.bytes().take_while(u8::is_ascii_digit).count();
    let (count, unit) = word.split_at(digits);
    let (_, size) = units.iter().find(|(name, _)| *name == unit)?;
    number(count).filter(|_| digits > 0)?.checked_mul(*size)
}

const BITS: [(&str, u64); 4] = [("bit", 1), ("kbit", 1000), ("mbit", 1_000_000), ("gbit", 1_000_000_000)];
const BYTES: [(&str, u64); 3] = [("b", 1), ("kb", 1000), ("mb", 1_000_000)];
/// Least burst if none is given, bytes.
const LEAST_BURST: u64 = 16_000;

fn limit(words: &mut Words<'_>) -> Result<Limit, Wrong> {
    let (mut at, mut word) = words.expect("the rate, for example 10mbit,")?;
    if word == "rate" {
        (at, word) = words.expect("the rate, for example 10mbit,")?;
    }
    let bytes = quantity(word, &BITS).map(|bits| bits / 8).or_else(|| quantity(word, &BYTES));
    let (unit, rate) = match bytes {
        Some(bytes) => (Unit::Bytes, bytes),
        None => (Unit::Packets, quantity(word, &[("pps", 1)]).unwrap_or(0)),
    };
    if rate == 0 || rate > MOST {
        return Err((at, format!("{word:?} is no rate: write for example 10mbit, 500kb (bytes a second) or 1000pps")));
    }
    let mut burst = if unit == Unit::Bytes { (rate / 10).max(LEAST_BURST) } else { (rate / 10).max(1) };
    if words.words.next_if(|(_, word)| *word == "burst").is_some() {
        let (at, word) = words.expect("the burst, for example 64kb,")?;
        let (units, example) = match unit {
            Unit::Bytes => (&BYTES[..], "64kb, as the rate is in bytes or bits"),
            Unit::Packets => (&[("", 1)][..], "100, as the rate is in packets"),
        };
        burst = quantity(word, units)
            .filter(|burst| (1..=MOST).contains(burst))
            .ok_or_else(|| (at, format!("{word:?} is no burst: write for example {example}")))?;
        let least = Limit::least_burst(rate);
        if burst < least {
            let what = if unit == Unit::Bytes { format!("{least}b") } else { least.to_string() };
            return Err((at, format!("{word:?} is less than this rate brings in a nanosecond: write at least {what}")));
        }
    }
    Ok(Limit { unit, rate, burst })
}

/// Reads one match. False if the word begins none.
fn read_match(matches: &mut Matches, word: Word<'_>, words: &mut Words<'_>) -> Result<bool, Wrong> {
    match word.1 {
        "in" => set(&mut matches.direction, Direction::In, word)?,
        "out" => set(&mut matches.direction, Direction::Out, word)?,
        "ip" => set_class(matches, Class::V4, word)?,
        "ip6" => set_class(matches, Class::V6, word)?,
        "arp" => set_class(matches, Class::Other(ETHERTYPE_ARP), word)?,
        "ether" => {
            let (at, text) = words.expect("the EtherType, for example 0x88b5,")?;
            let ethertype = text.strip_prefix("0x").and_then(|digits| u16::from_str_radix(digits, 16).ok());
            let class = match ethertype {
                Some(ETHERTYPE_IPV4) => Class::V4,
                Some(ETHERTYPE_IPV6) => Class::V6,
                Some(other) => Class::Other(other),
                None => return Err((at, format!("{text:?} is no EtherType: write for example 0x88b5"))),
            };
            set_class(matches, class, word)?;
        }
        "tcp" => set(&mut matches.protocol, PROTOCOL_TCP, word)?,
        "udp" => set(&mut matches.protocol, PROTOCOL_UDP, word)?,
        "icmp" => {
            set_class(matches, Class::V4, word)?;
            set(&mut matches.protocol, PROTOCOL_ICMP, word)?;
        }
        "icmpv6" => {
            set_class(matches, Class::V6, word)?;
            set(&mut matches.protocol, PROTOCOL_ICMPV6, word)?;
        }
        "proto" => {
            let (at, text) = words.expect("the number of the protocol")?;
            let wrong = || (at, format!("{text:?} is no IP protocol: write a number, 0 to 255"));
            let protocol = number(text).and_then(|number| u8::try_from(number).ok()).ok_or_else(wrong)?;
            set(&mut matches.protocol, protocol, word)?;
        }
        "saddr" | "daddr" => {
            let text = words.expect("an address")?;
            let (prefix, class) = prefix(text)?;
            set_class(matches, class, text)?;
            let field = if word.1 == "saddr" { &mut matches.source } else { &mut matches.destination };
            set(field, prefix, word)?;
        }
        "sport" | "dport" => {
            let ports = ports(words.expect("a port")?)?;
            let field = if word.1 == "sport" { &mut matches.source_ports } else { &mut matches.destination_ports };
            set(field, ports, word)?;
        }
        // As nftables has it: `ct state new`.
        "ct" => match words.next() {
            Some(state @ (_, "state")) => return read_match(matches, state, words),
            _ => return Err((word.0, "after \"ct\" write \"state new\" or \"state established\"".into())),
        },
        "state" => {
            let (at, text) = words.expect("new or established")?;
            let state = match text {
                "new" => State::New,
                "established" => State::Established,
                _ => return Err((at, format!("{text:?} is no state: write new or established"))),
            };
            set(&mut matches.state, state, word)?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn read(line: &str) -> Result<Rule, Wrong> {
    let mut words = Words::of(line);
    let mut matches = Matches::default();
    let action = loop {
        let word = words.expect("the action (accept, drop, reject, count, limit)")?;
        if read_match(&mut matches, word, &mut words)? {
            continue;
        }
        break match word.1 {
            "accept" => Action::Accept,
            "drop" => Action::Drop,
            "reject" => Action::Reject,
            "count" | "counter" => Action::Count,
            "limit" => Action::Limit(limit(&mut words)?),
            other => {
                let what = "a match (in, out, ip, ip6, arp, ether, tcp, udp, icmp, icmpv6, proto, saddr, daddr, sport, dport, state) nor an \
                            action (accept, drop, reject, count, limit)";
                return Err((word.0, format!("{other:?} is neither {what}")));
            }
        };
    };
    if let Some((at, word)) = words.next() {
        return Err((at, format!("{word:?} comes after the action, with which a rule ends")));
    }
    contradiction(&matches).map_or(Ok(Rule { matches, action }), |what| Err((0, what.into())))
}

/// Why no frame has all that a rule asks for.
fn contradiction(matches: &Matches) -> Option<&'static str> {
    let ports = matches.source_ports.is_some() || matches.destination_ports.is_some();
    let transport = matches!(matches.protocol, Some(PROTOCOL_TCP | PROTOCOL_UDP));
    if ports && !transport {
        return Some("ports need \"tcp\" or \"udp\" before them");
    }
    if matches.state.is_some() && !transport && matches.protocol.is_some() {
        return Some("only TCP and UDP have a state");
    }
    let of_ip = matches.protocol.is_some() || matches.state.is_some() || matches.source.is_some();
    (of_ip && matches!(matches.class, Some(Class::Other(_))))
        .then_some("frames without an IP packet have no protocol, address, port or state")
}

/// Parses one rule.
///
/// # Errors
/// The word that is wrong, and why.
pub fn parse(line: &str) -> Result<Rule, ParseError> {
    read(line).map_err(|(at, message)| ParseError { line: 1, text: line.to_string(), at, message })
}

/// Parses a file of rules.
///
/// # Errors
/// The first word that is wrong, its line and why; or a rule that can never match, because an earlier one has the same
/// matches.
pub fn parse_all(text: &str) -> Result<Vec<Rule>, ParseError> {
    let (mut rules, mut lines) = (Vec::new(), Vec::new());
    for (number, whole) in text.lines().enumerate() {
        let line = whole.split_once('#').map_or(whole, |(before, _)| before);
        if line.trim().is_empty() {
            continue;
        }
        let rule = read(line).map_err(|(at, message)| ParseError { line: number + 1, text: whole.into(), at, message })?;
        rules.push(rule);
        lines.push((number + 1, whole));
    }
    match check(&rules) {
        None => Ok(rules),
        Some((later, earlier)) => {
            let message = format!("this rule never matches: the one of line {} has the same matches", lines[earlier].0);
            Err(ParseError { line: lines[later].0, text: lines[later].1.into(), at: 0, message })
        }
    }
}

/// Finds a rule that can never decide, since an earlier rule has the same matches. Returns the numbers of both. A rule
/// that only counts hides no other.
pub fn check(rules: &[Rule]) -> Option<(usize, usize)> {
    let mut known: HashMap<(Matches, bool), usize, ahash::RandomState> =
        HashMap::with_hasher(ahash::RandomState::with_seeds(1, 2, 3, 4));
    rules.iter().enumerate().find_map(|(at, rule)| {
        let earlier = known.insert((rule.matches, rule.action == Action::Count), at);
        earlier.map(|earlier| (at, earlier))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_written_as_they_are_read() {
        for text in [
            "in tcp ip saddr 10.0.0.0/8 dport 22 limit 10mbit burst 64kb",
            "accept",
            "out drop",
            "arp accept",
            "ether 0x88b5 drop",
            "in ip drop",
            "ip6 proto 47 reject",
            "ip6 icmpv6 accept",
            "in ip6 tcp state established accept",
            "udp ip6 saddr fd00::1 ip6 daddr fd00::/16 sport 53 dport 1000-2000 state new count",
            "in udp limit 1000pps burst 50",
            "limit 8bit burst 1b",
        ] {
            let rule = parse(text).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(rule.to_string(), text.replace("ip6 icmpv6", "icmpv6"));
            assert_eq!(parse(&rule.to_string()), Ok(rule));
        }
        let nftables = parse("in tcp dport 22 ip saddr 10.0.0.0/8 ct state new limit rate 10mbit").expect("a rule");
        assert_eq!(nftables.to_string(), "in tcp ip saddr 10.0.0.0/8 dport 22 state new limit 10mbit burst 125kb");
    }

    #[test]
    fn errors_say_where_and_why() {
        for (text, at, part) in [
            ("", 0, "action"),
            ("in tcp dport", 12, "a port is missing"),
            ("in tcp dport 99999 drop", 13, "at most 65535"),
            ("in tcp dport 90-80 drop", 13, "lower port first"),
            ("in tcp dport 22 tcp drop", 16, "twice"),
            ("in out drop", 3, "contradicts"),
            ("tcp udp drop", 4, "contradicts"),
            ("ip saddr 10.0.0.0/8 ip6 daddr fd00::1 drop", 20, "two families"),
            ("ip saddr fd00::1 drop", 9, "two families"),
            ("ip saddr 10.0.0.1/8 drop", 9, "behind its 8 bits"),
            ("ip saddr 10.0.0.0/33 drop", 9, "0 to 32"),
            ("ip saddr ten drop", 9, "no address"),
            ("dport 22 drop", 0, "\"tcp\" or \"udp\""),
            ("icmp state new drop", 0, "only TCP and UDP"),
            ("arp tcp drop", 0, "without an IP packet"),
            ("icmp ip6 drop", 5, "two families"),
            ("tcp state old drop", 10, "new or established"),
            ("drop tcp", 5, "after the action"),
            ("frobnicate", 0, "neither a match"),
            ("limit 10", 6, "no rate"),
            ("limit 0mbit", 6, "no rate"),
            ("limit 10mbit burst 5", 19, "64kb"),
            ("limit 10pps burst 5kb", 18, "in packets"),
            ("limit 10gbit burst 1b", 19, "at least 2b"),
            ("limit 8000mb burst 7b", 19, "at least 8b"),
            ("limit 1000000000001pps burst 1000", 29, "at least 1001"),
            ("limit", 5, "rate"),
            ("ct drop", 0, "state new"),
            ("limit 99999999999999999999gbit", 6, "no rate"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.at == at && error.message.contains(part), "{text}: {error:?}");
        }
    }

    #[test]
    fn files_have_lines_and_comments() {
        let rules = parse_all("# first\n\nin tcp dport 22 accept # ssh\nin drop\n").expect("rules");
        assert_eq!(rules.len(), 2);
        let error = parse_all("in drop\n out sideways drop").expect_err("a wrong word");
        assert_eq!((error.line, error.at), (2, 5));
        assert!(error.to_string().ends_with("\n   out sideways drop\n       ^"), "{error}");
        let error = parse_all("in drop\nout drop\nin accept").expect_err("a rule that never matches");
        assert!(error.line == 3 && error.message.contains("line 1"), "{error}");
        assert!(parse_all("in count\nin drop").is_ok());
    }
}
