//! Instructions of the NIC for a packet that it sends, by layer, counted as in [`crate::datapath`]: a segment of an MTU, a pure
//! acknowledgement, and a segment of aggregated 1-byte messages.

use crate::datapath::{self, Bench};
use anyhow::Result;
use serde::Serialize;
use std::collections::BTreeMap;

/// Messages of one byte in the packet of the paper's extreme case.
const AGGREGATED: u32 = 940;
/// Packets of the smaller run.
const PACKETS: u64 = 512;

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packet {
    /// A message of an MTU's payload, sent as one segment, and the peer's acknowledgement of it.
    Mtu,
    /// A segment that is received, and the acknowledgement that answers it.
    PureAck,
    /// 940 messages of one byte that arrive while data is in flight, and leave as one segment when the acknowledgement comes.
    OneByte,
}

impl Packet {
    /// All of them.
    pub const ALL: [Packet; 3] = [Packet::Mtu, Packet::PureAck, Packet::OneByte];

    /// Its name as an argument.
    pub fn name(self) -> &'static str {
        match self {
            Packet::Mtu => "mtu",
            Packet::PureAck => "pure-ack",
            Packet::OneByte => "one-byte",
        }
    }
}

/// Instructions of one packet.
#[derive(Clone, Debug, Serialize)]
pub struct Cost {
    /// The packet.
    pub packet: Packet,
    /// Instructions.
    pub instructions: f64,
    /// Instructions by layer.
    pub layers: BTreeMap<String, f64>,
}

/// The work of `packets` packets.
///
/// # Errors
/// If the results are not as expected.
pub fn workload(name: &str, packets: u64) -> Result<()> {
    let mut bench = Bench::new(1)?;
    bench.use_nagle();
    for _ in 0..packets {
        match name {
            "mtu" => bench.send_messages(1, 1448)?,
            "pure-ack" => bench.acknowledge()?,
            _ => bench.send_messages(AGGREGATED, 1)?,
        }
    }
    Ok(())
}

/// Counts all packets.
///
/// # Errors
/// If valgrind is missing, or the workload fails.
pub fn measure() -> Result<Vec<Cost>> {
    Packet::ALL.into_iter().map(cost).collect()
}

fn cost(packet: Packet) -> Result<Cost> {
    let count = |packets: u64| {
        datapath::count("*measured_poll*", &["ttcp-workload".to_owned(), packet.name().to_owned(), packets.to_string()])
    };
    let (few, many) = (count(PACKETS)?, count(3 * PACKETS)?);
    let layers: BTreeMap<String, f64> = many
        .into_iter()
        .map(|(layer, sum)| {
            let before = few.get(&layer).copied().unwrap_or(0).min(sum);
            (layer, (sum - before) as f64 / (2 * PACKETS) as f64)
        })
        .collect();
    Ok(Cost { packet, instructions: layers.values().sum(), layers })
}

/// A cost in a few lines of text.
pub fn line(cost: &Cost) -> String {
    let layers = cost.layers.iter().map(|(layer, instructions)| format!("\n      {layer:<16} {instructions:>9.1}"));
    format!("NIC, {:<9} {:>9.0} instructions{}", cost.packet.name(), cost.instructions, layers.collect::<String>())
}
