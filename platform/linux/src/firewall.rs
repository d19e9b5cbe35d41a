//! The firewall's rules (nftables, and iptables on top of it). They are searched for rules that a packet of an
//! established connection may reach and whose verdict changes from packet to packet, or comes from another program.
//! The kernel does not notify Baton of such changes, so the connection stays in the kernel.
//!
//! The rules are walked as the kernel would walk them, once for an outgoing and once for an incoming packet. Known of
//! these packets are addresses, ports, protocol, and that the connection is established. Any other condition may match
//! or not.

mod parse;

use crate::netlink::Netlink;
use baton_wire::Flow;
use std::collections::HashMap;
use std::io;

/// Most rules that are walked for one packet. If a packet may meet more, the connection stays in the kernel.
const MOST_RULES: u32 = 20_000;
/// Greatest nesting of chains, as in the kernel.
const MOST_DEPTH: u32 = 16;

/// One expression of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Loads a property of the packet into a register; its value may be unknown.
    Load {
        to: u32,
        what: Load,
    },
    Compare {
        from: u32,
        how: u32,
        with: Vec<u8>,
    },
    Mask {
        from: u32,
        to: u32,
        mask: Vec<u8>,
        xor: Vec<u8>,
    },
    /// Looks a key up in a set, and whether the set is a verdict map.
    Lookup {
        from: u32,
        set: String,
        inverted: bool,
        verdicts: bool,
    },
    Verdict(Verdict),
    /// iptables' match of ports: lowest and highest source and destination, which of the two are inverted, and whether
    /// the match has no other conditions.
    Ports {
        ports: [u16; 4],
        inverted: u8,
        alone: bool,
    },
    /// Matches or not: unknown.
    Perhaps,
    /// Matches only if the connection is not established.
    Never,
    /// Matches or not, and can change from packet to packet or without a notification.
    Changing(&'static str),
    /// Sets the zone in which the connection tracker has the connection's entry.
    Zone,
    /// Changes the packet's mark, or another property that its route depends on.
    Marks,
    /// Always matches, and does nothing that counts here.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    Family,
    Protocol,
    State,
    Network(usize, usize),
    Transport(usize, usize),
    Unknown,
    Changing(&'static str),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Accept,
    Drop,
    Jump(String),
    Goto(String),
    Return,
    /// The verdict is another program's (NFQUEUE).
    Queue,
}

#[derive(Clone, Debug, Default)]
struct Chain {
    /// Hook and type of a base chain; None for a chain that only jumps reach.
    base: Option<(u32, String)>,
    rules: Vec<Vec<Step>>,
}

#[derive(Clone, Debug, Default)]
struct Set {
    /// Packets add elements, or elements expire.
    changes: bool,
    /// The map's elements with their verdicts, if they are known.
    elements: Option<HashMap<Vec<u8>, Option<Verdict>>>,
}

/// A table: family and name.
type Table = (u8, String);

/// The rules of a network namespace.
#[derive(Clone, Debug, Default)]
pub struct Firewall {
    chains: HashMap<(Table, String), Chain>,
    sets: HashMap<(Table, String), Set>,
    /// Whether any rule can make a connection stay, so that the walk is needed at all.
    matters: bool,
}

/// Known properties of a packet of an established connection.
struct Packet {
    v4: bool,
    network: Vec<u8>,
    ports: [u8; 4],
}

impl Packet {
    fn of(flow: &Flow) -> Packet {
        let v4 = flow.is_v4();
        let (length, protocol, source) = if v4 { (20, 9, 12) } else { (40, 6, 8) };
        let mut network = vec![0; length];
        network[protocol] = 6;
        let addresses = if v4 {
            [flow.local.v4_bytes().as_slice(), &flow.remote.v4_bytes()].concat()
        } else {
            [flow.local.address, flow.remote.address].concat()
        };
        network[source..].copy_from_slice(&addresses);
        let [a, b] = flow.local.port.to_be_bytes();
        let [c, d] = flow.remote.port.to_be_bytes();
        Packet { v4, network, ports: [a, b, c, d] }
    }

    fn load(&self, what: Load) -> Option<Vec<u8>> {
        const NFPROTO_IPV4: u8 = 2;
        const NFPROTO_IPV6: u8 = 10;
        const ESTABLISHED: u32 = 2;
        match what {
            Load::Family => Some(vec![if self.v4 { NFPROTO_IPV4 } else { NFPROTO_IPV6 }]),
            Load::Protocol => Some(vec![6]),
            Load::State => Some(ESTABLISHED.to_ne_bytes().to_vec()),
            Load::Network(at, length) => {
                let known = if self.v4 { at == 9 && length == 1 || at >= 12 } else { at == 6 && length == 1 || at >= 8 };
                self.network.get(at..at + length).filter(|_| known).map(<[u8]>::to_vec)
            }
            Load::Transport(at, length) => self.ports.get(at..at + length).map(<[u8]>::to_vec),
            Load::Unknown | Load::Changing(_) => None,
        }
    }
}

/// Whether a rule matches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Match {
    Yes,
    No,
    Perhaps,
}

/// How a chain ends for a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// With a verdict, in any case.
    Decided,
    /// The calling chain may go on.
    GoesOn,
}

/// The rule in words, for the user.
type Reason = String;

impl Firewall {
    /// Reads all rules. `netlink` is of family [`crate::netlink::NETFILTER`].
    ///
    /// # Errors
    /// The failed system call's.
    pub fn read(netlink: &Netlink) -> io::Result<Firewall> {
        parse::read(netlink)
    }

    /// The reason why the kernel must judge a connection's packets one by one, if there is one.
    pub fn judge(&self, flow: &Flow) -> Option<Reason> {
        if !self.matters {
            return None;
        }
        // Hooks of the IP families: prerouting and input, output and postrouting; of devices: ingress, egress.
        let ways = [(flow.reversed(), [0, 1], 0), (*flow, [3, 4], 1)];
        ways.iter().find_map(|(packet, hooks, of_device)| {
            let packet = Packet::of(packet);
            let mut budget = MOST_RULES;
            self.chains.iter().find_map(|((table, name), chain)| {
                const INET: u8 = 1;
                const IPV4: u8 = 2;
                const NETDEV: u8 = 5;
                const IPV6: u8 = 10;
                let (hook, kind) = chain.base.as_ref()?;
                // A connection's first packet decides on translation.
                let met = kind != "nat"
                    && match table.0 {
                        INET => hooks.contains(hook) || *hook == 5 && *of_device == 0,
                        IPV4 => packet.v4 && hooks.contains(hook),
                        IPV6 => !packet.v4 && hooks.contains(hook),
                        NETDEV => hook == of_device,
                        _ => false,
                    };
                if !met {
                    return None;
                }
                let reroutes = kind == "route";
                let walk = self.walk(table, name, &packet, reroutes, 0, &mut budget);
                walk.err().map(|what| format!("{what} in table {} chain {name}", table.1))
            })
        })
    }

    /// Whether a connection's first packet may meet any chain on its way in, or its answer on its way out: the chain
    /// may stop or translate it.
    pub fn judges_openings(&self) -> bool {
        self.chains.values().any(|chain| chain.base.is_some())
    }

    fn walk(
        &self,
        table: &Table,
        name: &str,
        packet: &Packet,
        reroutes: bool,
        depth: u32,
        budget: &mut u32,
    ) -> Result<End, &'static str> {
        let Some(chain) = self.chains.get(&(table.clone(), name.to_owned())) else { return Ok(End::GoesOn) };
        if depth > MOST_DEPTH {
            return Err("chains nested too deeply to follow");
        }
        for rule in &chain.rules {
            *budget = budget.checked_sub(1).ok_or("more rules than can be followed")?;
            let (matches, verdict) = self.run(table, rule, packet, reroutes)?;
            let certain = matches == Match::Yes;
            if matches == Match::No {
                continue;
            }
            match verdict {
                None => {}
                Some(Verdict::Queue) => return Err("another program's verdict (queue)"),
                Some(Verdict::Accept | Verdict::Drop) if certain => return Ok(End::Decided),
                Some(Verdict::Return) if certain => return Ok(End::GoesOn),
                Some(Verdict::Accept | Verdict::Drop | Verdict::Return) => {}
                Some(Verdict::Jump(to)) => {
                    let end = self.walk(table, &to, packet, reroutes, depth + 1, budget)?;
                    if certain && end == End::Decided {
                        return Ok(End::Decided);
                    }
                }
                Some(Verdict::Goto(to)) => {
                    let end = self.walk(table, &to, packet, reroutes, depth + 1, budget)?;
                    if certain {
                        return Ok(end);
                    }
                }
            }
        }
        Ok(End::GoesOn)
    }

    /// Walks every chain of a table that only jumps reach.
    fn walk_all(&self, table: &Table, packet: &Packet, reroutes: bool) -> Result<(), &'static str> {
        let others = self.chains.iter().filter(|((of, _), chain)| of == table && chain.base.is_none());
        for rule in others.flat_map(|(_, chain)| &chain.rules) {
            // This loop also walks the chains to which this chain jumps.
            self.run(table, rule, packet, reroutes)?;
        }
        Ok(())
    }

    /// Whether a rule matches, and its verdict.
    fn run(
        &self,
        table: &Table,
        rule: &[Step],
        packet: &Packet,
        reroutes: bool,
    ) -> Result<(Match, Option<Verdict>), &'static str> {
        let mut registers: HashMap<u32, Option<Vec<u8>>> = HashMap::new();
        let mut changing_registers: HashMap<u32, &'static str> = HashMap::new();
        let (mut matches, mut changing) = (Match::Yes, None);
        let mut verdict = None;
        for step in rule {
            match step {
                Step::Load { to, what } => {
                    changing_registers.remove(to);
                    if let Load::Changing(why) = what {
                        changing_registers.insert(*to, why);
                    }
                    registers.insert(*to, packet.load(*what));
                }
                Step::Mask { from, to, mask, xor } => {
                    let masked = registers.get(from).cloned().flatten().map(|value| {
                        let bits = value.iter().zip(mask).zip(xor);
                        bits.map(|((value, mask), xor)| value & mask ^ xor).collect::<Vec<u8>>()
                    });
                    if let Some(why) = changing_registers.get(from).copied() {
                        changing_registers.insert(*to, why);
                    }
                    registers.insert(*to, masked);
                }
                Step::Compare { from, how, with } => {
                    changing = changing.or(changing_registers.get(from).copied());
                    match registers.get(from).cloned().flatten() {
                        Some(value) if value.len() >= with.len() => {
                            let order = value[..with.len()].cmp(with.as_slice());
                            let holds = match how {
                                0 => order.is_eq(),
                                1 => order.is_ne(),
                                2 => order.is_lt(),
                                3 => order.is_le(),
                                4 => order.is_gt(),
                                _ => order.is_ge(),
                            };
                            if !holds {
                                return Ok((Match::No, None));
                            }
                        }
                        _ => matches = Match::Perhaps,
                    }
                }
                Step::Lookup { from, set, inverted, verdicts } => {
                    let set = self.sets.get(&(table.clone(), set.clone()));
                    if set.is_some_and(|set| set.changes) {
                        changing = changing.or(Some("a set that packets or time change"));
                    }
                    changing = changing.or(changing_registers.get(from).copied());
                    let elements = set.and_then(|set| set.elements.as_ref());
                    let key = registers.get(from).cloned().flatten();
                    // If the key concatenates several fields, only the first is known here.
                    let comparable = |of: &(&HashMap<Vec<u8>, _>, Vec<u8>)| of.0.keys().all(|other| other.len() == of.1.len());
                    match elements.zip(key).filter(comparable) {
                        Some((elements, key)) => match (elements.get(&key), *verdicts) {
                            (Some(found), true) => verdict.clone_from(found),
                            (None, true) => return Ok((Match::No, None)),
                            (found, false) if found.is_some() == *inverted => return Ok((Match::No, None)),
                            _ => {}
                        },
                        None if *verdicts => {
                            matches = Match::Perhaps;
                            // It may jump to any of its chains.
                            for other in elements.into_iter().flat_map(HashMap::values).flatten() {
                                if let Verdict::Jump(to) | Verdict::Goto(to) = other {
                                    self.walk(table, to, packet, reroutes, 1, &mut MOST_RULES.clone())?;
                                }
                            }
                            if elements.is_none() {
                                self.walk_all(table, packet, reroutes)?;
                            }
                        }
                        None => matches = Match::Perhaps,
                    }
                }
                Step::Verdict(found) => verdict = Some(found.clone()),
                Step::Ports { ports: [low, high, to_low, to_high], inverted, alone } => {
                    let [a, b, c, d] = packet.ports;
                    let (source, destination) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
                    let of_source = (*low..=*high).contains(&source) != (inverted & 1 != 0);
                    let of_destination = (*to_low..=*to_high).contains(&destination) != (inverted & 2 != 0);
                    match (of_source && of_destination, alone) {
                        (false, _) => return Ok((Match::No, None)),
                        (true, true) => {}
                        (true, false) => matches = Match::Perhaps,
                    }
                }
                Step::Perhaps => matches = Match::Perhaps,
                Step::Never => return Ok((Match::No, None)),
                Step::Changing(why) => changing = changing.or(Some(why)),
                Step::Marks if reroutes => return Err("a route by mark (a chain of type route)"),
                // The tracker does not find an entry in a zone by the connection's addresses and ports alone, so Baton
                // could not renew it.
                Step::Zone => return Err("a zone of the connection tracker (ct zone, -j CT --zone)"),
                Step::Marks | Step::Nothing => {}
            }
        }
        if let Some(why) = changing {
            if verdict.is_some() {
                return Err(why);
            }
            matches = Match::Perhaps;
        }
        Ok((matches, verdict))
    }
}
