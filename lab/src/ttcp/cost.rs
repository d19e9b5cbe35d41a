//! Instructions of the NIC for a packet that it sends, by layer, counted as in [`crate::datapath`]: a segment of an MTU, a pure
//! acknowledgement, and a segment of aggregated 1-byte messages. Rounds of the worker that find no work are not counted.

use crate::datapath::{self, Bench};
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;

/// Messages of one byte in the packet of the paper's extreme case.
const AGGREGATED: u32 = 940;
/// Packets of the smaller run; a multiple of [`BURST`].
const PACKETS: u64 = 512;
/// Packets that wait when the worker looks, as in a stream of data.
const BURST: u32 = 16;
/// Payload of a segment of an MTU.
const MTU_PAYLOAD: u32 = 1448;

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packet {
    /// A message of an MTU's payload, sent as one segment: one of 16 that were queued together. The peer acknowledges every second
    /// one.
    Mtu,
    /// The same, alone: the worker looks for one message, and then for the acknowledgement of this one segment.
    LoneMtu,
    /// A segment that is received, and the acknowledgement that answers it: one of 16 that wait together.
    PureAck,
    /// The same, alone.
    LonePureAck,
    /// 940 messages of one byte that arrive while data is in flight, and leave as one segment when the acknowledgement comes.
    OneByte,
}

impl Packet {
    /// All of them.
    pub const ALL: [Packet; 5] = [Packet::Mtu, Packet::LoneMtu, Packet::PureAck, Packet::LonePureAck, Packet::OneByte];

    /// Its name as an argument.
    pub fn name(self) -> &'static str {
        match self {
            Packet::Mtu => "mtu",
            Packet::LoneMtu => "lone-mtu",
            Packet::PureAck => "pure-ack",
            Packet::LonePureAck => "lone-pure-ack",
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
    let packet = Packet::ALL.into_iter().find(|packet| packet.name() == name).context("no such packet")?;
    let mut bench = Bench::new(1)?;
    bench.use_nagle();
    let burst = if matches!(packet, Packet::Mtu | Packet::PureAck) { BURST } else { 1 };
    if packet == Packet::Mtu {
        bench.open_window(2 * BURST, MTU_PAYLOAD);
    }
    for _ in 0..packets / u64::from(burst) {
        match packet {
            Packet::Mtu | Packet::LoneMtu => bench.send_segments(burst, MTU_PAYLOAD)?,
            Packet::PureAck | Packet::LonePureAck => bench.acknowledge(burst)?,
            Packet::OneByte => bench.send_small_messages(AGGREGATED)?,
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
    format!("NIC, {:<13} {:>9.0} instructions{}", cost.packet.name(), cost.instructions, layers.collect::<String>())
}
