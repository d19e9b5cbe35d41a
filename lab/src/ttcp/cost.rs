//! Instructions of the NIC for a packet, by function: a segment of an MTU, a pure acknowledgement, and a segment of
//! aggregated 1-byte messages. Counted as in [`crate::datapath`]; rounds of the worker that find no work are not
//! counted.

use crate::datapath::{self, Bench, Source};
use anyhow::{Context, Result};
use baton_device::Capabilities;
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
/// Bytes of the connection's send memory, and of its receive memory.
const BUFFER: u32 = 1 << 16;

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packet {
    /// A message of an MTU's payload, sent as one segment: one of 16 that were queued together. The peer acknowledges
    /// every second one.
    Mtu,
    /// The same, alone: the worker looks for one message, and then for the acknowledgement of this one segment.
    LoneMtu,
    /// As [`Packet::Mtu`], with a device that computes no checksums.
    MtuChecksum,
    /// A segment that is received, and the acknowledgement that answers it: one of 16 that wait together.
    PureAck,
    /// The same, alone.
    LonePureAck,
    /// 940 messages of one byte that arrive while data is in flight, and leave as one segment when the acknowledgement
    /// comes.
    OneByte,
}

impl Packet {
    /// All of them.
    pub const ALL: [Packet; 6] =
        [Packet::Mtu, Packet::LoneMtu, Packet::MtuChecksum, Packet::PureAck, Packet::LonePureAck, Packet::OneByte];

    /// Its name as an argument.
    pub fn name(self) -> &'static str {
        match self {
            Packet::Mtu => "mtu",
            Packet::LoneMtu => "lone-mtu",
            Packet::MtuChecksum => "mtu-checksum",
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
    /// Instructions by function, which are all of them: see [`FUNCTIONS`].
    pub functions: BTreeMap<String, f64>,
}

/// The functions of the paper, in its order, and what belongs to none of them.
pub const FUNCTIONS: [&str; 7] = [BUFFERS, OUTPUT, INPUT, CHECKSUM, INTERFACE, COPY, OTHER];

/// Frames' buffers, the send queue's list, receive memory, growth.
const BUFFERS: &str = "buffer management";
/// What to send, and its headers.
const OUTPUT: &str = "tcp_output";
/// Parsing, the lookup of the connection, segments and acknowledgements.
const INPUT: &str = "tcp_input";
/// Checksums.
const CHECKSUM: &str = "checksum";
/// Messages and events of the rings, and the recovery record, which is written for the host.
const INTERFACE: &str = "interface";
/// Payload, from and to the programs' memory.
const COPY: &str = "copy";
/// The worker's loop and its counters.
const OTHER: &str = "other";

/// Source files of one function.
const FILES: [(&str, &str); 17] = [
    ("platform/shm/src/copy", COPY),
    // What it runs in its wide form is the way of the usual frame.
    ("platform/shm/src/wide", INPUT),
    ("wire/src/checksum", CHECKSUM),
    ("protocols/tcp/src/output", OUTPUT),
    ("nic/datapath/src/transmit", OUTPUT),
    ("wire/src/frame", OUTPUT),
    ("protocols/tcp/src/input", INPUT),
    ("protocols/tcp/src/ack", INPUT),
    ("protocols/tcp/src/reassembly", INPUT),
    ("nic/datapath/src/worker/frames", INPUT),
    ("offloads/tables", INPUT),
    ("interface/", INTERFACE),
    ("nic/datapath/src/worker/programs", INTERFACE),
    ("nic/datapath/src/offloaded/record", INTERFACE),
    ("nic/datapath/src/worker", OTHER),
    ("nic/datapath/src/counters", OTHER),
    ("nic/datapath/src/", BUFFERS),
];

/// Source files of several functions: their lines belong to the function that they were inlined into, or called from,
/// as far as that says; else to this one.
const SHARED: [(&str, &str); 4] = [
    ("platform/", BUFFERS),
    // Parses segments and, where it is inlined into their writer, describes acknowledgements.
    ("wire/src", INPUT),
    // The record is made by the protocol.
    ("protocols/tcp/src/info", INTERFACE),
    // What acknowledgements change: scoreboard, round trips, congestion window, timers.
    ("protocols/tcp", INPUT),
];

/// The function that an instruction belongs to.
fn function(source: &Source) -> &'static str {
    if source.function.contains("memcpy") || source.function.contains("memmove") {
        return COPY;
    }
    let of = |table: &[(&str, &'static str)], file: &str| table.iter().find(|(part, _)| file.contains(part)).map(|found| found.1);
    of(&FILES, &source.file)
        .or_else(|| of(&FILES, &source.function_file))
        .or_else(|| of(&SHARED, &source.file))
        .or_else(|| of(&SHARED, &source.function_file))
        .unwrap_or(OTHER)
}

/// The work of `packets` packets.
///
/// # Errors
/// If the results are not as expected.
pub fn workload(name: &str, packets: u64) -> Result<()> {
    let packet = Packet::ALL.into_iter().find(|packet| packet.name() == name).context("no such packet")?;
    let capabilities = Capabilities { checksum: packet != Packet::MtuChecksum, segmentation: 0 };
    let mut bench = Bench::with_device(1, BUFFER, capabilities)?;
    bench.use_nagle();
    let stream = matches!(packet, Packet::Mtu | Packet::MtuChecksum);
    let burst = if stream || packet == Packet::PureAck { BURST } else { 1 };
    if stream {
        bench.open_window(2 * BURST, MTU_PAYLOAD);
    }
    for _ in 0..packets / u64::from(burst) {
        match packet {
            Packet::Mtu | Packet::LoneMtu | Packet::MtuChecksum => bench.send_segments(burst, MTU_PAYLOAD)?,
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
    let functions = difference(packet.name(), PACKETS, function)?;
    Ok(Cost { packet, instructions: functions.values().sum(), functions })
}

/// Instructions for one packet of a workload by `group`: the difference of two runs, of `packets` packets and of three
/// times as many.
pub(super) fn difference(workload: &str, packets: u64, group: impl Fn(&Source) -> &'static str) -> Result<BTreeMap<String, f64>> {
    let count = |packets: u64| {
        datapath::count("*measured_*", &["ttcp-workload".to_owned(), workload.to_owned(), packets.to_string()], &group)
    };
    let (few, many) = (count(packets)?, count(3 * packets)?);
    let one = |(group, sum): (String, u64)| {
        let before = few.get(&group).copied().unwrap_or(0).min(sum);
        (group, (sum - before) as f64 / (2 * packets) as f64)
    };
    Ok(many.into_iter().map(one).collect())
}

/// A table of all costs, a line of text for each packet.
pub fn table(costs: &[Cost]) -> String {
    let mut text = format!("{:<14} {:>8}", "NIC, for a", "all");
    FUNCTIONS.iter().for_each(|function| text += &format!(" {function:>17}"));
    for cost in costs {
        text += &format!("\n{:<14} {:>8.0}", cost.packet.name(), cost.instructions);
        for function in FUNCTIONS {
            text += &format!(" {:>17.1}", cost.functions.get(function).copied().unwrap_or(0.0));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(file: &str, function: &str, function_file: &str) -> Source {
        let path = |file: &str| format!("/somewhere/{file}.rs");
        Source { file: path(file), function: function.into(), function_file: path(function_file) }
    }

    #[test]
    fn lines_belong_to_the_function_that_they_are_inlined_into() {
        let cases = [
            (source("protocols/tcp/src/output", "poll_transmit", "protocols/tcp/src/output"), OUTPUT),
            (source("core/src/num/mod", "poll_transmit", "protocols/tcp/src/output"), OUTPUT),
            (source("protocols/tcp/src/scoreboard", "poll_transmit", "protocols/tcp/src/output"), OUTPUT),
            (source("protocols/tcp/src/scoreboard", "acknowledge", "protocols/tcp/src/scoreboard"), INPUT),
            (source("wire/src/checksum", "send_all", "nic/datapath/src/transmit"), CHECKSUM),
            (source("interface/ring/src/ring", "poll_session", "nic/datapath/src/worker/programs"), INTERFACE),
            (source("nic/datapath/src/offloaded/record", "send_all", "nic/datapath/src/transmit"), INTERFACE),
            (source("nic/datapath/src/offloaded", "send_all", "nic/datapath/src/transmit"), BUFFERS),
            (source("nic/datapath/src/worker", "poll", "nic/datapath/src/worker"), OTHER),
            (source("string/memmove", "__memcpy_avx_unaligned_erms", "string/memmove"), COPY),
            (source("unknown", "measured_poll", "lab/src/datapath"), OTHER),
        ];
        for (source, expected) in cases {
            assert_eq!(function(&source), expected, "{source:?}");
        }
    }
}
