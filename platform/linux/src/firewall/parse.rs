//! Reads the rules over netlink.

use super::{Chain, Firewall, Load, Set, Step, Table, Verdict};
use crate::netlink::{DUMP, Netlink, Request, attributes};
use std::collections::HashMap;
use std::io;

const NFTABLES: u16 = 10 << 8;
const GETCHAIN: u16 = NFTABLES | 4;
const GETRULE: u16 = NFTABLES | 7;
const GETSET: u16 = NFTABLES | 10;
const GETSETELEM: u16 = NFTABLES | 13;
/// Bytes of `struct nfgenmsg`, whose first byte is the family.
const HEADER: usize = 4;

/// Number of sets whose elements are read.
const MOST_SETS: usize = 256;

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).trim_end_matches('\0').to_owned()
}

fn number(value: &[u8]) -> u32 {
    value.try_into().map_or(0, u32::from_be_bytes)
}

fn of(body: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(body, 0).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

fn number_of(body: &[u8], wanted: u16) -> Option<u32> {
    of(body, wanted).map(number)
}

fn name(body: &[u8], at: [u16; 2]) -> Option<(Table, String)> {
    let [table, name] = at.map(|at| of(body.get(HEADER..)?, at).map(text));
    Some(((*body.first()?, table?), name?))
}

pub(super) fn read(netlink: &Netlink) -> io::Result<Firewall> {
    let mut all = Firewall::default();
    netlink.ask(Request::new(GETCHAIN, DUMP, &[0; HEADER]), |body| {
        let Some(key) = name(body, [1, 3]) else { return };
        let attributes = &body[HEADER..];
        let hook = of(attributes, 4).and_then(|hook| number_of(hook, 1));
        let kind = of(attributes, 7).map(text).unwrap_or_default();
        all.chains.insert(key, Chain { base: hook.map(|hook| (hook, kind)), rules: Vec::new() });
    })?;
    netlink.ask(Request::new(GETSET, DUMP, &[0; HEADER]), |body| {
        const INTERVAL: u32 = 4;
        const TIMEOUT: u32 = 0x10;
        const EVAL: u32 = 0x20;
        const ANONYMOUS: u32 = 1;
        let Some(key) = name(body, [1, 2]) else { return };
        let flags = number_of(&body[HEADER..], 3).unwrap_or(0);
        let known = flags & ANONYMOUS != 0 && flags & INTERVAL == 0;
        let elements = known.then(HashMap::new);
        all.sets.insert(key, Set { changes: flags & (TIMEOUT | EVAL) != 0, elements });
    })?;
    netlink.ask(Request::new(GETRULE, DUMP, &[0; HEADER]), |body| {
        let Some(key) = name(body, [1, 2]) else { return };
        let rule = of(&body[HEADER..], 4).map(steps).unwrap_or_default();
        all.chains.entry(key).or_default().rules.push(rule);
    })?;
    let sets = &all.sets;
    let changes = |table: &Table, step: &Step| match step {
        Step::Changing(_)
        | Step::Zone
        | Step::Marks
        | Step::Verdict(Verdict::Queue)
        | Step::Load { what: Load::Changing(_), .. } => true,
        Step::Lookup { set, .. } => sets.get(&(table.clone(), set.clone())).is_some_and(|set| set.changes),
        _ => false,
    };
    all.matters = all.chains.iter().any(|((table, _), chain)| chain.rules.iter().flatten().any(|step| changes(table, step)));
    if all.matters {
        read_elements(netlink, &mut all)?;
    }
    Ok(all)
}

/// Reads the elements of sets that are part of a rule (anonymous sets).
fn read_elements(netlink: &Netlink, all: &mut Firewall) -> io::Result<()> {
    let known = all.sets.iter_mut().filter(|(_, set)| set.elements.is_some());
    for (at, ((table, set_name), set)) in known.enumerate() {
        if at >= MOST_SETS {
            set.elements = None;
            continue;
        }
        let mut elements = HashMap::new();
        let request = Request::new(GETSETELEM, DUMP, &[table.0, 0, 0, 0]);
        let terminated = |name: &str| [name.as_bytes(), &[0]].concat();
        let request = request.attribute(1, &terminated(&table.1)).attribute(2, &terminated(set_name));
        netlink.ask(request, |body| {
            let list = body.get(HEADER..).and_then(|body| of(body, 3)).unwrap_or_default();
            for (_, element) in attributes(list, 0) {
                let key = of(element, 1).and_then(|data| of(data, 1)).map(<[u8]>::to_vec);
                let verdict = of(element, 2).and_then(verdict);
                if let Some(key) = key {
                    elements.insert(key, verdict);
                }
            }
        })?;
        set.elements = Some(elements);
    }
    Ok(())
}

/// A verdict in data (NFTA_DATA_VERDICT).
fn verdict(data: &[u8]) -> Option<Verdict> {
    let verdict = of(data, 2)?;
    let chain = || of(verdict, 2).map(text).unwrap_or_default();
    Some(match number_of(verdict, 1)? as i32 {
        0 => Verdict::Drop,
        1 => Verdict::Accept,
        -3 => Verdict::Jump(chain()),
        -4 => Verdict::Goto(chain()),
        -5 => Verdict::Return,
        code if code & 0xff == 3 => Verdict::Queue,
        _ => return None,
    })
}

fn steps(expressions: &[u8]) -> Vec<Step> {
    let one = |(_, expression)| {
        let name = of(expression, 1).map(text).unwrap_or_default();
        step(&name, of(expression, 2).unwrap_or_default())
    };
    attributes(expressions, 0).map(one).collect()
}

fn step(name: &str, data: &[u8]) -> Step {
    let register = |at| number_of(data, at).unwrap_or(0);
    let bytes = |at| of(data, at).and_then(|data| of(data, 1)).unwrap_or_default().to_vec();
    // A conversion from one register into another, whose result cannot be compared.
    let converted = || Step::Mask { from: register(1), to: register(2), mask: Vec::new(), xor: Vec::new() };
    match name {
        "meta" => {
            let key = register(2);
            let (to, sets) = (number_of(data, 1), number_of(data, 3).is_some());
            match (key, to) {
                (3, None) if sets => Step::Marks,
                (_, None) => Step::Nothing,
                (15, Some(to)) => Step::Load { to, what: Load::Family },
                (16, Some(to)) => Step::Load { to, what: Load::Protocol },
                (24, Some(to)) => Step::Load { to, what: Load::Changing("chance (meta random)") },
                (30..=32, Some(to)) => Step::Load { to, what: Load::Changing("the time of day (meta time)") },
                (_, Some(to)) => Step::Load { to, what: Load::Unknown },
            }
        }
        "payload" => {
            let (base, at, length) = (register(2), register(3) as usize, register(4) as usize);
            match number_of(data, 1) {
                None => Step::Marks,
                Some(to) => {
                    let what = match base {
                        1 => Load::Network(at, length),
                        2 => Load::Transport(at, length),
                        _ => Load::Unknown,
                    };
                    Step::Load { to, what }
                }
            }
        }
        "ct" => match (register(2), number_of(data, 1)) {
            // NFT_CT_ZONE.
            (17, None) => Step::Zone,
            (_, None) => Step::Nothing,
            (0, Some(to)) => Step::Load { to, what: Load::State },
            (5 | 14..=16, Some(to)) => Step::Load { to, what: Load::Changing("a count of packets or bytes (ct)") },
            (_, Some(to)) => Step::Load { to, what: Load::Unknown },
        },
        "cmp" => Step::Compare { from: register(1), how: register(2), with: bytes(3) },
        "bitwise" => match number_of(data, 6).unwrap_or(0) {
            0 => Step::Mask { from: register(1), to: register(2), mask: bytes(4), xor: bytes(5) },
            _ => converted(),
        },
        "byteorder" => converted(),
        "lookup" => Step::Lookup {
            from: register(2),
            set: of(data, 1).map(text).unwrap_or_default(),
            inverted: register(5) & 1 != 0,
            verdicts: number_of(data, 3) == Some(0),
        },
        "immediate" => match of(data, 2).and_then(verdict) {
            Some(verdict) => Step::Verdict(verdict),
            None if register(1) == 0 => Step::Nothing,
            None => Step::Load { to: register(1), what: Load::Unknown },
        },
        "limit" => Step::Changing("a rate (limit)"),
        "quota" => Step::Changing("a quota"),
        "connlimit" => Step::Changing("a count of connections (ct count)"),
        "dynset" => Step::Changing("a set that packets change"),
        "numgen" => Step::Load { to: register(1), what: Load::Changing("a number from packet to packet (numgen)") },
        "queue" => Step::Verdict(Verdict::Queue),
        "reject" => Step::Verdict(Verdict::Drop),
        "counter" | "log" | "last" | "notrack" | "objref" | "flow_offload" => Step::Nothing,
        "match" => of_xtables(&of(data, 1).map(text).unwrap_or_default(), of(data, 3).unwrap_or_default()),
        "target" => target(&of(data, 1).map(text).unwrap_or_default(), of(data, 3).unwrap_or_default()),
        // Expressions that write a value into a register, which a later expression compares.
        "fib" | "rt" | "socket" | "osf" | "hash" | "exthdr" | "tunnel" | "xfrm" => {
            Step::Load { to: register(1), what: Load::Unknown }
        }
        _ => Step::Perhaps,
    }
}

/// A match of iptables'.
fn of_xtables(name: &str, info: &[u8]) -> Step {
    match name {
        "conntrack" | "state" => {
            const ESTABLISHED: u16 = 2;
            let half = |at: usize| info.get(at..at + 2).map_or(0, |half| u16::from_ne_bytes([half[0], half[1]]));
            // struct xt_conntrack_mtinfo3: which conditions are set, which are inverted, the states; struct
            // xt_state_info: the states only.
            let (asked, inverted, states) = if name == "state" { (1, 0, half(0)) } else { (half(146), half(148), half(150)) };
            let excluded = asked & 1 != 0 && (states & ESTABLISHED != 0) == (inverted & 1 != 0);
            match (excluded, asked) {
                (true, _) => Step::Never,
                (false, 1) => Step::Nothing,
                _ => Step::Perhaps,
            }
        }
        "tcp" if info.len() >= 12 => {
            // struct xt_tcp: ports, an option, flags and their mask, which conditions are inverted.
            let ports = std::array::from_fn(|at| u16::from_ne_bytes([info[2 * at], info[2 * at + 1]]));
            Step::Ports { ports, inverted: info[11], alone: info[8] == 0 && info[9] == 0 }
        }
        "limit" | "hashlimit" => Step::Changing("a rate (-m limit, -m hashlimit)"),
        "recent" => Step::Changing("a list that packets change (-m recent)"),
        "connlimit" => Step::Changing("a count of connections (-m connlimit)"),
        "connbytes" | "quota" => Step::Changing("a count of bytes (-m connbytes, -m quota)"),
        "statistic" => Step::Changing("chance (-m statistic)"),
        "time" => Step::Changing("the time of day (-m time)"),
        "set" => Step::Changing("an ipset (-m set), whose changes cannot be observed"),
        "comment" => Step::Nothing,
        _ => Step::Perhaps,
    }
}

/// A target of iptables'.
fn target(name: &str, info: &[u8]) -> Step {
    match name {
        // struct xt_ct_target_info: flags, the zone.
        "CT" if info.get(2..4).is_some_and(|zone| zone != [0; 2]) => Step::Zone,
        "NFQUEUE" => Step::Verdict(Verdict::Queue),
        "MARK" | "CONNMARK" | "TOS" | "DSCP" => Step::Marks,
        "LOG" | "NFLOG" | "TCPMSS" | "CLASSIFY" | "CT" | "NOTRACK" | "CHECKSUM" | "TRACE" | "AUDIT" | "SET" | "TTL" | "HL" => {
            Step::Nothing
        }
        "ACCEPT" => Step::Verdict(Verdict::Accept),
        _ => Step::Verdict(Verdict::Drop),
    }
}
