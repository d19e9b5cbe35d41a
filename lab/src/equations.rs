//! Equations 1 to 3 of Friedman's "Mainstream NUMA and the TCP/IP stack": the interrupts that a 10 Gb/s card needs, and
//! their cost to a processor. With the paper's numbers, and this machine's.

use crate::lro::{Cell, LroSettings, Way};
use crate::ntttcp::frequency;
use anyhow::{Context, Result};
use serde::Serialize;

/// Terms of an equation.
#[derive(Clone, Debug, Serialize)]
pub struct Load {
    /// Source of the numbers.
    pub name: String,
    /// Bytes per second.
    pub throughput: f64,
    /// Mean bytes of a packet.
    pub packet: f64,
    /// Share of the packets that are received.
    pub received: f64,
    /// Packets for each interrupt.
    pub per_interrupt: f64,
    /// Instructions or cycles of an interrupt, both halves together.
    pub path: f64,
    /// Unit of `path`.
    pub unit: &'static str,
}

impl Load {
    /// Interrupts per second.
    pub fn interrupts(&self) -> f64 {
        self.throughput / self.packet * self.received / self.per_interrupt
    }

    /// Instructions or cycles per second.
    pub fn cost(&self) -> f64 {
        self.interrupts() * self.path
    }
}

/// The paper's three loads.
pub fn of_the_paper() -> [Load; 3] {
    [("1", 10_000.0, "instructions"), ("2", 200_000.0, "cycles"), ("3", 175_000.0, "cycles")].map(|(number, path, unit)| Load {
        name: format!("equation {number}"),
        throughput: 1e9,
        packet: 1000.0,
        received: 0.5,
        per_interrupt: 1.0,
        path,
        unit,
    })
}

/// The same load on this machine: cycles of the receiving kernel and program for each frame from a NIC without
/// aggregation, then for each aggregate of large receive. All packets are received here.
///
/// # Errors
/// If it cannot be measured.
pub fn of_this_machine() -> Result<Vec<Load>> {
    let settings = LroSettings { connections: vec![1], reorder: vec![0.0], ..LroSettings::default() };
    let report = crate::lro::run(&settings, |_| ())?;
    let hertz = frequency().context("the system does not say how fast its processor is")?;
    let load = |cell: &Cell| {
        let frames_per_gigabyte = cell.frames_per_mb * 1000.0;
        let seconds = (cell.program_cpu + cell.kernel_cpu) / frames_per_gigabyte;
        Load {
            name: if cell.way == Way::Plain { "this machine, plain NIC" } else { "this machine, large receive" }.into(),
            throughput: 1e9,
            packet: 1e9 / frames_per_gigabyte,
            received: 1.0,
            per_interrupt: 1.0,
            path: seconds * hertz,
            unit: "cycles",
        }
    };
    let shown = [Way::Plain, Way::Reorder];
    Ok(report.cells.iter().filter(|cell| shown.contains(&cell.way)).map(load).collect())
}

/// A line of the calculation.
pub fn line(load: &Load) -> String {
    format!(
        "{:<28} {:>9.0} interrupts/s × {:>7.0} {:<12} = {:>7.2} · 10⁹ {}/s",
        load.name,
        load.interrupts(),
        load.path,
        load.unit,
        load.cost() / 1e9,
        load.unit
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_results_come_out() {
        let [one, two, three] = of_the_paper();
        assert_eq!((one.interrupts(), one.cost(), two.cost()), (500_000.0, 5e9, 1e11));
        // The paper rounds 87.5 up.
        assert_eq!(three.cost(), 87.5e9);
    }
}
