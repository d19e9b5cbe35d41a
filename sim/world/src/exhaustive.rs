//! One connection, and every crash after every action of its move there and back, and every pair of crashes; and a NIC
//! that dies before and after every frame that it sends meanwhile.

use crate::program::{Opening, Plan};
use crate::scenario::{Offloads, Placed, Scenario, address};
use crate::world::World;
use crate::{Outcome, finish};
use baton_sim::Impairments;
use baton_tcp::Config;
use baton_wire::Endpoint;
use std::fmt;
use std::str::FromStr;

/// Who dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// The NIC.
    Nic,
    /// The agent, and its NIC with it.
    Agent,
    /// The NIC, at a point counted from the beginning of the move: 0 and 1 are before and after the first frame that it
    /// sends.
    NicAtFrame,
}

/// A crash after this many actions of the host's agents (or, for [`Crash::NicAtFrame`], at this point).
pub type Planned = (u64, Crash);

/// A state in which the connection is while it moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Traffic {
    /// Both ends send.
    BothWays,
    /// Both ends send, and segments are lost and overtake each other.
    Disordered,
    /// The peer's FIN was received before the move.
    FinReceived,
    /// Our FIN was acknowledged before the move.
    FinAcknowledged,
}

/// All of them.
pub const TRAFFIC: [Traffic; 4] = [Traffic::BothWays, Traffic::Disordered, Traffic::FinReceived, Traffic::FinAcknowledged];

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Traffic::BothWays => "both-ways",
            Traffic::Disordered => "disordered",
            Traffic::FinReceived => "fin-received",
            Traffic::FinAcknowledged => "fin-acknowledged",
        })
    }
}

/// A run of one connection: its traffic and its crashes. As text `both-ways,7:nic,12:agent` or `fin-received,3:frame`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Walk {
    /// The state of the connection.
    pub traffic: Traffic,
    /// Who dies when.
    pub crashes: Vec<Planned>,
}

const CRASHES: [(Crash, &str); 3] = [(Crash::Nic, "nic"), (Crash::Agent, "agent"), (Crash::NicAtFrame, "frame")];

impl fmt::Display for Walk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.traffic)?;
        for (at, crash) in &self.crashes {
            let name = CRASHES.iter().find(|(other, _)| other == crash).map_or("", |(_, name)| name);
            write!(f, ",{at}:{name}")?;
        }
        Ok(())
    }
}

impl FromStr for Walk {
    type Err = String;

    fn from_str(text: &str) -> Result<Walk, String> {
        let wrong = |part: &str| {
            format!("{part} is none of both-ways, disordered, fin-received, fin-acknowledged, N:nic, N:agent, N:frame")
        };
        let mut parts = text.split(',');
        let first = parts.next().unwrap_or_default();
        let traffic = TRAFFIC.into_iter().find(|traffic| traffic.to_string() == first).ok_or_else(|| wrong(first))?;
        let crash = |part: &str| {
            let (at, name) = part.split_once(':')?;
            let (crash, _) = CRASHES.iter().find(|(_, other)| *other == name)?;
            Some((at.parse().ok()?, *crash))
        };
        let crashes = parts.map(|part| crash(part).ok_or_else(|| wrong(part))).collect::<Result<_, _>>()?;
        Ok(Walk { traffic, crashes })
    }
}

/// What an exhaustive run has walked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Walked {
    /// Crashes after an action.
    pub crashes: u64,
    /// Pairs of such crashes.
    pub pairs: u64,
    /// Crashes before or after a frame.
    pub points: u64,
    /// Runs in which something did not hold, and what.
    pub failures: Vec<(Walk, String)>,
}

/// Bytes that an end sends.
const AMOUNT: u64 = 40_000;
/// Mean time between two moves, microseconds.
const INTERVAL: u64 = 1_500;
/// Until when the connection moves, microseconds.
const END: u64 = 60_000;

fn scenario(traffic: Traffic, crashes: &[Planned]) -> Scenario {
    let disorder = traffic == Traffic::Disordered;
    let (sends, receives) = match traffic {
        Traffic::BothWays | Traffic::Disordered => (AMOUNT, AMOUNT),
        Traffic::FinReceived => (AMOUNT, 0),
        Traffic::FinAcknowledged => (0, AMOUNT),
    };
    let plan = |opening, sends, expects, key, peer_key| Plan {
        opening,
        sends,
        expects,
        key,
        peer_key,
        chunk: 1_500,
        think: 600,
        aborts_at: None,
        fork: None,
    };
    let port = 1000;
    let programs = vec![
        Placed {
            host: 1,
            session: 0,
            plan: plan(Opening::Connect(Endpoint::v6(address(0, false), port)), receives, sends, 1, 2),
        },
        Placed { host: 0, session: 0, plan: plan(Opening::Accept(port), sends, receives, 2, 1) },
    ];
    Scenario {
        seed: 1,
        hosts: vec![true, false],
        ipv6: false,
        impairments: Impairments {
            delay: 100,
            loss: if disorder { 30_000 } else { 0 },
            reorder: if disorder { 200_000 } else { 0 },
            hold: 700,
            ..Impairments::default()
        },
        config: Config { receive_buffer: 1 << 16, nodelay: true, ..Config::default() },
        offloads: Offloads::NONE,
        programs,
        moves_every: INTERVAL,
        end_of_faults: END,
        faults: Vec::new(),
        crashes: crashes.to_vec(),
    }
}

/// Runs one connection with these crashes. `readable`: with an account of what happened.
pub fn run_walk(walk: &Walk, readable: bool) -> Outcome {
    finish(World::new(scenario(walk.traffic, &walk.crashes), readable), 0)
}

/// Walks crashes and pairs of crashes. Of the second crashes of a pair every `stride`th is walked; 1 for all.
pub fn exhaustive(stride: u64) -> Walked {
    let mut walked = Walked::default();
    for traffic in TRAFFIC {
        walked.walk(traffic, stride.max(1));
    }
    walked
}

impl Walked {
    fn walk(&mut self, traffic: Traffic, stride: u64) {
        let Some(calm) = self.run(traffic, &[]) else { return };
        let (begin, end) = calm.round_trip(0);
        for first in begin..=end {
            for crash in [Crash::Nic, Crash::Agent] {
                self.crashes += 1;
                let Some(once) = self.run(traffic, &[(first, crash)]) else { continue };
                let (_, last) = once.round_trip(first);
                for second in (first + 1..=last).step_by(stride as usize) {
                    for other in [Crash::Nic, Crash::Agent] {
                        self.pairs += 1;
                        self.run(traffic, &[(first, crash), (second, other)]);
                    }
                }
            }
        }
        for point in 0..calm.frames_of_nic.min(MOST_POINTS) {
            self.points += 1;
            self.run(traffic, &[(point, Crash::NicAtFrame)]);
        }
    }

    fn run(&mut self, traffic: Traffic, crashes: &[Planned]) -> Option<Outcome> {
        let walk = Walk { traffic, crashes: crashes.to_vec() };
        let outcome = run_walk(&walk, false);
        match &outcome.failure {
            None => Some(outcome),
            Some(what) => {
                self.failures.push((walk, what.clone()));
                None
            }
        }
    }
}

/// Points at which the NIC dies, at most.
const MOST_POINTS: u64 = 400;
/// Moves that a crash is followed by: the way to the kernel, there, and back.
const MOVES: usize = 3;

impl Outcome {
    /// The first action after `from`, and the last one of a move there and back that begins after it.
    fn round_trip(&self, from: u64) -> (u64, u64) {
        let after: Vec<u64> = self.concluded.iter().copied().filter(|at| *at > from).collect();
        let last = after.get(MOVES - 1).or(after.last()).copied().unwrap_or(from);
        (from + 1, last)
    }
}
