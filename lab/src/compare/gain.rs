//! What placement by measured gain has to reach: it is nowhere worse than the kernel, and keeps most of what the NIC
//! alone gains.

use super::load::GainNames;
use super::way::Way;
use super::{Column, Row};
use crate::bars::Bar;

/// Least rate and most CPU time over the kernel's.
const RATE: f64 = 0.97;
const MACHINE: f64 = 1.03;
/// Least share of the CPU time that the NIC alone saves, where it saves some.
const KEPT: f64 = 0.9;
/// Most that long waiting times may be over those of the chosen place alone.
const P99: f64 = 1.05;

/// The bars of a load, if it was run so. Each is judged by the end of its ratio's interval that is nearest to the
/// bound: what noise may have caused is not missed.
pub(super) fn bars(row: &Row, [rate, machine, kept, p99]: GainNames) -> Vec<Bar> {
    let column = |way| row.columns.iter().find(|column| column.way == way);
    let Some(gain) = column(Way::Gain) else { return Vec::new() };
    let mut bars = vec![Bar::least(rate, RATE, gain.rate_interval[1]), Bar::most(machine, MACHINE, gain.machine_interval[0])];
    let beside = column(Way::Beside);
    if let Some(beside) = beside.filter(|beside| gains(beside)) {
        let saved = (1.0 - gain.machine_interval[0]) / (1.0 - beside.machine_ratio);
        bars.push(Bar::least(kept, KEPT, saved));
    }
    if !row.bulk {
        let is_chosen = |beside: &&Column| 2.0 * gain.medians.on_nic > beside.medians.on_nic;
        let alone = beside.filter(is_chosen).map_or(1.0, |beside| beside.p99_ratio.max(1e-9));
        bars.push(Bar::most(p99, P99, gain.p99_interval[0] / alone));
    }
    bars
}

/// Whether the NIC is certain to save CPU time, and not slower.
fn gains(beside: &Column) -> bool {
    beside.machine_interval[1] < RATE && beside.rate_interval[1] >= RATE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Round;

    const NAMES: GainNames = ["rate", "machine", "kept", "p99"];

    fn column(way: Way, [rate, machine, p99]: [f64; 3], on_nic: f64) -> Column {
        let around = |ratio: f64| [ratio - 0.01, ratio + 0.01];
        Column {
            way,
            medians: Round { on_nic, ..Round::default() },
            rate_ratio: rate,
            machine_ratio: machine,
            p99_ratio: p99,
            rate_interval: around(rate),
            machine_interval: around(machine),
            p99_interval: around(p99),
            ..Column::default()
        }
    }

    fn judged(bulk: bool, beside: Column, gain: Column) -> Vec<(&'static str, bool)> {
        let columns = vec![Column::default(), beside, gain];
        let row = Row { load: "load", bulk, columns, failures: Vec::new() };
        bars(&row, NAMES).iter().map(|bar| (bar.name, bar.holds)).collect()
    }

    #[test]
    fn whoever_gains_on_the_nic_has_to_keep_that() {
        let beside = column(Way::Beside, [1.1, 0.8, 0.9], 64.0);
        let kept = column(Way::Gain, [1.1, 0.82, 0.92], 64.0);
        let all = judged(false, beside.clone(), kept);
        assert_eq!(all, [("rate", true), ("machine", true), ("kept", true), ("p99", true)]);
        let lost = judged(false, beside, column(Way::Gain, [1.0, 1.0, 1.0], 0.0));
        assert_eq!(lost, [("rate", true), ("machine", true), ("kept", false), ("p99", true)]);
    }

    #[test]
    fn where_the_nic_loses_the_kernel_is_to_be_matched() {
        let beside = column(Way::Beside, [0.7, 1.2, 1.5], 1.0);
        let in_kernel = judged(true, beside.clone(), column(Way::Gain, [0.98, 1.02, 1.0], 0.0));
        assert_eq!(in_kernel, [("rate", true), ("machine", true)]);
        let on_nic = judged(true, beside, column(Way::Gain, [0.7, 1.2, 1.5], 1.0));
        assert_eq!(on_nic, [("rate", false), ("machine", false)]);
    }

    #[test]
    fn other_ways_have_no_such_bars() {
        let row = Row { load: "load", bulk: true, columns: vec![Column::default()], failures: Vec::new() };
        assert!(bars(&row, NAMES).is_empty());
    }
}
