//! The messages between a host and its NIC by kind, as the paper on connection handoff counts them (its Figures 4, 5
//! and 8).

use baton_abi::layout::{Counter, scratch, slot};
use serde_json::{Value, json};

/// A kind of message: its operation, who sends it, who receives it, and the counter of a worker.
pub struct Kind {
    pub operation: &'static str,
    pub from: &'static str,
    pub to: &'static str,
    pub counter: Counter,
}

const fn kind(operation: &'static str, from: &'static str, to: &'static str, counter: Counter) -> Kind {
    Kind { operation, from, to, counter }
}

/// All kinds.
pub const KINDS: [Kind; 14] = [
    kind("nic_send", "program", "nic", Counter::ProgramSend),
    kind("nic_recvd", "program", "nic", Counter::ProgramRecvd),
    kind("nic_post", "program", "nic", Counter::ProgramPost),
    kind("nic_ctrl", "program", "nic", Counter::ProgramControl),
    kind("os_recv", "nic", "program", Counter::ToProgramRecv),
    kind("os_ack", "nic", "program", Counter::ToProgramAck),
    kind("os_ctrl", "nic", "program", Counter::ToProgramControl),
    kind("nic_handoff", "agent", "nic", Counter::AgentHandoff),
    kind("nic_restore", "agent", "nic", Counter::AgentRestore),
    kind("nic_forward", "agent", "nic", Counter::AgentForward),
    kind("nic_ctrl", "agent", "nic", Counter::AgentControl),
    kind("os_ctrl", "nic", "agent", Counter::ToAgentControl),
    kind("os_resource", "nic", "agent", Counter::Announcements),
    kind("os_restore", "nic", "agent", Counter::ToAgentRestore),
];

/// Bytes of a message in its ring. The bytes that it is about are moved by the NIC itself.
const BYTES: u64 = size_of::<[u64; 2]>() as u64;

/// Bytes that a restore has the NIC write to the connection's slot: the image.
const RESTORED: u64 = scratch::IMAGE_BYTES as u64;

/// Bytes that a handoff has it read there: parameters, limits, addresses and ports, the image.
const HANDED_OFF: u64 =
    (slot::NEXT_CID - slot::PARAMETERS + slot::READ - slot::LIMITS + slot::GROWN - slot::FLOW) as u64 + RESTORED;

impl Kind {
    /// Bytes of one such message, with what lies in the connection's slot for it.
    const fn bytes(&self) -> u64 {
        match self.counter {
            Counter::AgentHandoff => BYTES + HANDED_OFF,
            Counter::AgentRestore => BYTES + RESTORED,
            _ => BYTES,
        }
    }
}

fn count(counters: &[u64], kind: &Kind) -> u64 {
    counters.get(kind.counter as usize).copied().unwrap_or(0)
}

/// Prints those that there were: a line for each kind.
pub fn print(counters: &[u64]) {
    println!("\nmessage      from     to             number          bytes");
    for kind in KINDS.iter().filter(|kind| count(counters, kind) > 0) {
        let number = count(counters, kind);
        println!("{:<12} {:<8} {:<8} {number:>12} {:>14}", kind.operation, kind.from, kind.to, number * kind.bytes());
    }
}

/// All kinds.
pub fn to_json(counters: &[u64]) -> Value {
    let row = |kind: &Kind| {
        let number = count(counters, kind);
        json!({
            "operation": kind.operation, "from": kind.from, "to": kind.to, "messages": number,
            "bytes": number * kind.bytes(),
        })
    };
    KINDS.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::layout::COUNTERS;

    #[test]
    fn what_lies_in_the_slot_counts_for_handoffs_and_restores() {
        let shown = to_json(&[2; COUNTERS]);
        let rows = shown.as_array().expect("rows");
        let bytes = |operation: &str| {
            let row = rows.iter().find(|row| row["operation"] == operation).expect("a row");
            row["bytes"].as_u64().expect("a number")
        };
        assert_eq!(bytes("nic_send"), 2 * 16);
        assert_eq!(bytes("nic_restore"), 2 * (16 + 768));
        assert_eq!(bytes("nic_handoff"), 2 * (16 + 24 + 8 + 40 + 768));
        assert!(rows.iter().all(|row| row["messages"] == 2));
    }
}
