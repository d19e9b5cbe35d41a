//! The filter's messages: between the owner of a NIC, the NIC, the agent and tools. Rules travel as text
//! (`baton_filter::parse`), so that each process checks them itself.

use crate::nic::NicSettings;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Most rules in one message: as many as fit into a message of a control connection.
pub const RULES_PER_MESSAGE: usize = 200;
/// Most bytes of a rule's text.
pub const MAX_RULE: usize = 256;

/// The settings that an owner gets from the process that starts it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OwnerSettings {
    /// Path of the socket at which tools change the rules.
    pub socket: PathBuf,
    /// The key that a tool must present.
    pub key: Vec<u8>,
    /// The first rules.
    pub rules: Vec<String>,
    /// The NIC's settings. The agent chooses `offloads`, `slots` and `hash_key`, nothing else.
    pub nic: NicSettings,
}

/// The descriptors that an owner inherits: in this order from 3 on. Those of a card follow.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum OwnerDescriptor {
    /// The TAP that is the kernel's interface.
    Host = 3,
    /// The wire.
    Wire = 4,
    /// The connection at whose other end agents ask for NICs.
    Agents = 5,
    /// The control connection to the process that started the owner.
    Parent = 6,
    /// First descriptor of a card, see [`NicSettings::card_descriptors`].
    Card = 7,
}

/// From an agent to the owner, with a number that the answer repeats: successive agents share one connection, and one
/// that died may have left an answer there.
pub type AgentRequest = (u64, ToOwner);

/// The answer.
pub type AgentAnswer = (u64, FromOwner);

/// Requests of an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToOwner {
    /// Start a NIC, in place of any other. With the descriptors of NIC memory and both doorbells.
    Start(Box<NicSettings>),
    /// End the NIC.
    End,
}

/// Answers to an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromOwner {
    /// The NIC runs as this process, in the owner's PID namespace. With the agent's end of its control connection.
    Started(u32),
    /// No NIC runs.
    Ended,
    /// The request failed, for this reason.
    Failed(String),
}

/// From the owner to its NIC.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToFilter {
    /// Rules, each with the slot of its counters; the first ones come first.
    Rules(Vec<(u16, String)>),
    /// All rules were sent: put them in force. The key of the flows' hashes and the number of this set of rules.
    Apply {
        /// Random; the same for as long as the memory of the flows.
        key: [u64; 4],
        /// Differs from that of the last sets.
        generation: u32,
    },
}

/// From the NIC to its owner.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromFilter {
    /// The rules apply to every frame from now on.
    InForce,
    /// They cannot be compiled, for this reason; the last ones stay in force.
    Failed(String),
}

/// A request of a tool to the owner.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FilterRequest {
    /// The key that was given when the owner was started.
    pub key: Vec<u8>,
    /// The request.
    pub ask: FilterAsk,
}

/// Requests of a tool to the owner.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FilterAsk {
    /// Add a rule, at the end or before another one.
    Add {
        /// The rule.
        rule: String,
        /// Number of the rule before which it is put.
        before: Option<u32>,
    },
    /// Delete the rule with this number.
    Delete(u32),
    /// A part of the rules that are to replace all others.
    Load {
        /// The rules.
        rules: Vec<String>,
        /// It is the last part: now replace.
        last: bool,
    },
    /// List the rules from this one on, counted from 0.
    List(usize),
}

/// The counters of a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleCounters {
    /// Frames that it matched.
    pub packets: u64,
    /// Bytes of those frames, Ethernet header included.
    pub bytes: u64,
    /// Frames of these that its limit has dropped.
    pub over: u64,
}

/// A rule in force.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ListedRule {
    /// Its number, which no other rule gets.
    pub number: u32,
    /// Its text.
    pub rule: String,
    /// Its counters.
    pub counters: RuleCounters,
}

/// The owner's answer to a tool.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FilterReply {
    /// It is done, and in force.
    Done,
    /// The rule has this number, and is in force.
    Added(u32),
    /// Rules.
    Rules {
        /// As many as fit into a message.
        rules: Vec<ListedRule>,
        /// Number of all rules.
        total: usize,
        /// Frames that no rule decided about, which pass.
        unmatched: RuleCounters,
        /// Frames that were dropped since they cannot be judged.
        unreadable: RuleCounters,
    },
    /// It is refused, for this reason.
    Failed(String),
}
