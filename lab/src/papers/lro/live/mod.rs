//! What sections V.B and V.C report, with the kernels of two hosts on this machine.

mod download;
mod set_up;

use super::requests::Order;
use super::{DOWNLOADS, SET_UP_TIMES, SET_UPS, set_up_figures};
use crate::bars::Bar;
use crate::papers::Run;
use crate::papers::report::Report;
use anyhow::{Context, Result};

/// Bytes of a download, and of one in a short run.
const BYTES: u64 = 8 << 20;
const SHORT: u64 = 1 << 20;

/// Sets connections up with a stack and with queues in turn, downloads without and with active acknowledgements, one
/// after the other, for half a minute at most, and reports it.
///
/// # Errors
/// If the hosts cannot be made, or a connection breaks.
pub fn run(report: &mut Report, how: Run, say: &mut dyn FnMut(&str)) -> Result<()> {
    let mut times = Vec::new();
    for (name, order) in Order::BOTH {
        say(&format!("lro: connections are set up, {name}"));
        times.push(set_up::run(order).context(name)?);
    }
    let mut downloads = Vec::new();
    for (name, active) in [("active ACK off", false), ("active ACK on", true)] {
        say(&format!("lro: a download, {name}"));
        downloads.push(download::run(active, if how.short { SHORT } else { BYTES }).context(name)?);
    }
    add(report, &times, &downloads);
    Ok(())
}

/// Adds the times of connections for each order, and the figures of each download, to a report.
fn add(report: &mut Report, times: &[Vec<Option<u64>>], downloads: &[download::Outcome]) {
    let set_ups: Vec<Vec<f64>> = times.iter().map(|all| set_up_figures(all).into()).collect();
    report.measured_rows(SET_UPS, &set_ups);
    let figure = report.figures.iter_mut().find(|figure| figure.title == SET_UP_TIMES);
    for (curve, all) in figure.into_iter().flat_map(|figure| &mut figure.curves).zip(times) {
        let points = all.iter().enumerate().filter_map(|(at, one)| Some((at as f64 + 1.0, (*one)? as f64 / 1e3)));
        curve.live = points.collect();
    }
    let figures = |one: &download::Outcome| vec![one.spurious as f64, one.by_nic as f64, one.megabits];
    report.measured_rows(DOWNLOADS, &downloads.iter().map(figures).collect::<Vec<_>>());
    if let ([stack, turns], [off, on]) = (&set_ups[..], downloads) {
        report.bar(Bar::least("lro.live.stack_late_over_turns", 1.0, stack[0] - turns[0]));
        report.bar(Bar::least("lro.live.spurious_off_over_on", 1.0, off.spurious as f64 - on.spurious as f64));
        report.bar(Bar::least("lro.live.goodput_on_over_off", 1.0, on.megabits / off.megabits));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::papers::report::{Cell, Curve, Figure, Row, Table};

    #[test]
    fn what_was_measured_is_in_the_report() {
        let rows = || ["one", "two"].map(|name| Row { name: name.into(), cells: [0.0; 3].map(Cell::model).into() }).to_vec();
        let table = |title: &str| Table { title: title.into(), rows: rows(), ..Table::default() };
        let curves = vec![Curve::new("one", Vec::new()), Curve::new("two", Vec::new())];
        let mut report = Report {
            tables: vec![table(SET_UPS), table(DOWNLOADS)],
            figures: vec![Figure { title: SET_UP_TIMES.into(), curves, ..Figure::default() }],
            ..Report::default()
        };
        let times = [vec![Some(1000), Some(1_000_500), None], vec![Some(1000), Some(2000), Some(3000)]];
        let outcome = |spurious, by_nic, megabits| download::Outcome { spurious, by_nic, megabits };
        add(&mut report, &times, &[outcome(20, 0, 5.0), outcome(1, 300, 900.0)]);
        let live =
            |at: usize, row: usize| report.tables[at].rows[row].cells.iter().filter_map(|cell| cell.live).collect::<Vec<_>>();
        assert_eq!((live(0, 0), live(0, 1)), (vec![2.0, 1.0, 1000.5], vec![0.0, 0.0, 3.0]));
        assert_eq!((live(1, 0), live(1, 1)), (vec![20.0, 0.0, 5.0], vec![1.0, 300.0, 900.0]));
        assert_eq!(report.figures[0].curves[0].live, [(1.0, 1.0), (2.0, 1000.5)]);
        assert!(report.holds() && report.bars.len() == 3, "{:?}", report.bars);
    }
}
