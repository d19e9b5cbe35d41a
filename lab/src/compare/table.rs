//! A load's result as text.

use super::{Column, Round, Row};
use std::fmt::Write;

/// A load's result as a table: for each way its figures, then those over the kernel's, and below them whose CPU time it
/// was.
pub fn text(row: &Row) -> String {
    let (unit, cost) = if row.bulk { ("Gb/s", "s/GB") } else { ("per second", "CPU µs") };
    let mut text = format!("{:<30}{unit:>10}{:>10}{:>10}{cost:>9}  │", row.load, "p50 ms", "p99 ms");
    text += &format!("{:>7}{:>7}{:>7}{:>7}{:>16}{:>10}\n", "rate", "p50", "p99", "CPU", "least, most", "server's");
    for column in &row.columns {
        text += &line(column, row.bulk);
        let _ = writeln!(text, "      {}", parts(column));
    }
    for (way, error) in &row.failures {
        let _ = writeln!(text, "  {:<10}did not run: {error}", way.name());
    }
    text
}

fn line(column: &Column, bulk: bool) -> String {
    let Column { way, medians, rate_ratio, p50_ratio, p99_ratio, machine_ratio, machine_spread, host_ratio, .. } = column;
    // Nobody waits for an answer to bulk data.
    let wait = |time: f64| if bulk { format!("{:>10}", "–") } else { format!("{time:>10.4}") };
    let ratio = |of: &f64| if bulk { format!("{:>7}", "–") } else { format!("{of:>7.2}") };
    let (decimals, [least, most]) = (if bulk { 2 } else { 0 }, machine_spread);
    let mut line = format!("  {:<28}{:>10.decimals$}{}{}", way.name(), medians.rate, wait(medians.p50), wait(medians.p99));
    line += &format!("{:>9.3}  │{rate_ratio:>7.2}{}{}{machine_ratio:>7.2}", medians.machine, ratio(p50_ratio), ratio(p99_ratio));
    line += &format!("{:>16}{host_ratio:>10.2}\n", format!("{least:.2}, {most:.2}"));
    line
}

/// The parts of the CPU time that are not nothing, and what the NIC had.
fn parts(column: &Column) -> String {
    let Column { way, medians, .. } = column;
    let parts = Round::PARTS.iter().filter(|(_, part)| part(medians) >= 0.0005);
    let mut text = parts.map(|(name, part)| format!("{name} {:.3}", part(medians))).collect::<Vec<_>>().join(", ");
    if way.has_nic() {
        text += &format!(" (busy {:.3}); {:.0} on the NIC", medians.nic_busy, medians.on_nic);
    }
    text
}
