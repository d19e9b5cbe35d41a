//! What `baton ttcp` reports: cells, bars, a table.

use super::buffering::Buffering;
use super::cost::{Cost, Packet};
use super::program::Direction;
use super::{Cell, WAYS};
use crate::bars::Bar;
use serde::Serialize;

/// Ratio of host CPU that batching must keep, by message size.
const HOST_BARS: [(&str, usize, f64); 4] = [
    ("ttcp.host_ratio_batched_1B", 1, 0.3),
    ("ttcp.host_ratio_batched_64B", 64, 0.3),
    ("ttcp.host_ratio_batched_1448B", 1448, 0.3),
    ("ttcp.host_ratio_batched_64KB", 65_536, 0.5),
];

/// Most instructions of the NIC for a packet.
const COST_BARS: [(&str, Packet, f64); 3] = [
    ("ttcp.nic_instr_mtu_packet", Packet::Mtu, 1500.0),
    ("ttcp.nic_instr_pure_ack", Packet::PureAck, 500.0),
    ("ttcp.nic_instr_1B_in_940B_packet", Packet::OneByte, 200_000.0),
];

/// A run's result.
#[derive(Clone, Debug, Serialize)]
pub struct TtcpReport {
    /// Every way at every message size, in the order of measurement.
    pub cells: Vec<Cell>,
    /// Message size from which on full offload with a handshake for each message costs the host less than the kernel
    /// does, by interpolation. The smallest size that was measured if it does at every size, as where system calls are
    /// dear. None if it does not at the largest.
    pub crossover_handshake_bytes: Option<f64>,
    /// Instructions of the NIC by packet, if they were counted.
    pub costs: Vec<Cost>,
    /// Instructions of the NIC for a message by buffering strategy, if they were counted.
    pub buffering: Vec<Buffering>,
    /// The figures with bounds, of those that were measured.
    pub bars: Vec<Bar>,
}

impl TtcpReport {
    /// The report of these cells and costs.
    pub fn new(cells: Vec<Cell>, costs: Vec<Cost>) -> TtcpReport {
        let crossover = crossover(&cells, "full-handshake");
        let at = |way: &str, size: usize| {
            cells.iter().find(|cell| cell.way == way && cell.size == size && cell.direction == Direction::Transmit)
        };
        let compared = cells.iter().any(|cell| cell.way == WAYS[0].name);
        let mut bars = Vec::new();
        let handshake = |sizes: fn(usize) -> bool| cells.iter().any(|cell| cell.way == "full-handshake" && sizes(cell.size));
        if compared && handshake(|size| size <= 64) && handshake(|size| size >= 8192) {
            bars.push(match crossover {
                Some(bytes) if bytes < 64.0 => Bar::least("ttcp.crossover_handshake_bytes", 64.0, bytes),
                // None up to the largest size that was measured counts as one that is too large.
                _ => Bar::most("ttcp.crossover_handshake_bytes", 8192.0, crossover.unwrap_or(f64::INFINITY)),
            });
        }
        if compared {
            let measured = HOST_BARS.iter().filter_map(|(name, size, bound)| Some((name, *bound, at("full", *size)?)));
            bars.extend(measured.map(|(name, bound, cell)| Bar::most(name, bound, cell.host_ratio)));
            bars.extend(at("full", 65_536).map(|cell| Bar::most("ttcp.events_ratio_64KB", 0.3, cell.events_ratio)));
        }
        let counted = |packet| costs.iter().find(|cost| cost.packet == packet).map(|cost| cost.instructions);
        let counted = COST_BARS.iter().filter_map(|(name, packet, bound)| Some(Bar::most(name, *bound, counted(*packet)?)));
        bars.extend(counted);
        TtcpReport { cells, costs, buffering: Vec::new(), crossover_handshake_bytes: crossover, bars }
    }
}

/// The message size at which a way's host CPU falls to the kernel's, when transmitting: the last such crossing,
/// interpolated on logarithmic axes. The smallest size if it lies below at every size; None if it does not stay there
/// up to the largest.
fn crossover(cells: &[Cell], way: &str) -> Option<f64> {
    let mut points: Vec<(f64, f64)> = cells
        .iter()
        .filter(|cell| cell.way == way && cell.direction == Direction::Transmit && cell.host_ratio > 0.0)
        .map(|cell| ((cell.size as f64).ln(), cell.host_ratio.ln()))
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points.last().filter(|last| last.1 <= 0.0)?;
    if points.iter().all(|point| point.1 <= 0.0) {
        return points.first().map(|first| first.0.exp());
    }
    let last = points.windows(2).rfind(|pair| pair[0].1 > 0.0 && pair[1].1 <= 0.0)?;
    let share = last[0].1 / (last[0].1 - last[1].1);
    Some((last[0].0 + share * (last[1].0 - last[0].0)).exp())
}

/// A cell in one line of text.
pub fn line(cell: &Cell) -> String {
    let f = &cell.figures;
    format!(
        "{:<9} {:<25} {:>6} B {:>9.1} Mb/s  host {:>8.2} ms ({:>5.2} of the kernel's)  NIC {:>8.2} ms, busy {:>8.2}  events {:>7.0}  \
         messages {:>7.0}  doorbells {:>6.0}  NIC woken {:>6.0}  packets {:>7.0}",
        format!("{:?}", cell.direction).to_lowercase(),
        cell.way,
        cell.size,
        f.megabits,
        f.host_ms,
        cell.host_ratio,
        f.nic_ms,
        f.nic_busy_ms,
        f.events,
        f.messages,
        f.doorbells,
        f.nic_wakeups,
        f.packets
    )
}

#[cfg(test)]
mod tests {
    use super::super::Figures;
    use super::*;

    fn cell(way: &'static str, size: usize, host_ratio: f64) -> Cell {
        let figures = Figures::default();
        Cell { way, direction: Direction::Transmit, size, bytes: 0, figures, host_ratio, events_ratio: 0.0 }
    }

    /// The crossing lies between the sizes around it, halfway on logarithmic axes if the ratios lie as far from 1.
    #[test]
    fn the_crossover_is_interpolated() {
        let cells = vec![cell("full-handshake", 1024, 0.5), cell("full-handshake", 256, 2.0), cell("none", 256, 1.0)];
        let found = TtcpReport::new(cells, Vec::new()).crossover_handshake_bytes;
        assert!(found.is_some_and(|bytes| (bytes - 512.0).abs() < 0.1), "{found:?}");
        assert_eq!(TtcpReport::new(vec![cell("full-handshake", 1, 2.0)], Vec::new()).crossover_handshake_bytes, None);
    }

    /// Where the handshake is always cheaper, that is said, and the bar asks for a crossover.
    #[test]
    fn a_handshake_that_is_cheaper_at_every_size_crosses_at_the_smallest() {
        let sizes = [1, 64, 8192];
        let cells = sizes.iter().flat_map(|size| [cell("full-handshake", *size, 0.5), cell("none", *size, 1.0)]).collect();
        let report = TtcpReport::new(cells, Vec::new());
        assert!(report.crossover_handshake_bytes.is_some_and(|bytes| (bytes - 1.0).abs() < 0.1));
        assert!(report.bars.iter().any(|bar| bar.name == "ttcp.crossover_handshake_bytes" && !bar.holds));
    }
}
