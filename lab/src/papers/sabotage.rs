//! Models made wrong on purpose. A report that does not change when its model does is not made by the model: `make lab`
//! checks that each sabotage changes at least two figures and tables of each document that has it.

use super::report::{Cell, Report};
use serde::Serialize;

/// What is wrong with a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sabotage {
    /// A CTS clears four packets instead of sixteen.
    NoCtsBatch,
    /// The NIC interrupts at each frame.
    NoModeration,
    /// An acknowledgement for every fourth segment instead of every second.
    AckEveryFourth,
    /// All connections' frames go to one worker.
    OneQueue,
    /// Segments are not merged.
    NoAggregation,
    /// The card does not join small messages.
    NoNagle,
    /// A message costs the card no handshake.
    NoHandshake,
    /// A connection's structures are twice as large.
    LargeState,
    /// The lookup finds a connection behind many others.
    LookupMisses,
}

impl Sabotage {
    /// Its name on the command line, and what it does.
    pub fn words(self) -> (&'static str, &'static str) {
        match self {
            Sabotage::NoCtsBatch => ("no-cts-batch", "a CTS for every four packets"),
            Sabotage::NoModeration => ("no-moderation", "an interrupt for each frame"),
            Sabotage::LargeState => ("large-state", "a connection's state twice as large"),
            Sabotage::LookupMisses => ("lookup-misses", "a lookup that looks at many other connections first"),
            Sabotage::AckEveryFourth => ("ack-every-fourth", "an acknowledgement for every fourth segment"),
            Sabotage::OneQueue => ("one-queue", "one worker for all connections"),
            Sabotage::NoAggregation => ("no-aggregation", "segments are not merged"),
            Sabotage::NoNagle => ("no-nagle", "small messages are not joined"),
            Sabotage::NoHandshake => ("no-handshake", "a message costs the card nothing"),
        }
    }
}

/// A relative change of at most this much is none.
const SAME: f64 = 0.01;

fn differs(one: f64, other: f64) -> bool {
    one.is_finite() != other.is_finite() || (one - other).abs() > SAME * one.abs().max(other.abs())
}

/// The model's numbers of each figure and table: its title, and the numbers in their order.
fn numbers(report: &Report) -> Vec<(&str, Vec<f64>)> {
    let figures = report.figures.iter().map(|figure| {
        let points = figure.curves.iter().flat_map(|curve| &curve.points).flat_map(|(x, y)| [*x, *y]);
        (figure.title.as_str(), points.collect())
    });
    let tables = report.tables.iter().map(|table| {
        let cells = table.rows.iter().flat_map(|row| &row.cells).filter_map(|Cell { model, .. }| *model);
        (table.title.as_str(), cells.collect())
    });
    figures.chain(tables).collect()
}

/// Titles of the figures and tables in which a number of the model differs between two reports by more than a
/// hundredth.
pub fn changed(whole: &Report, broken: &Report) -> Vec<String> {
    let (before, after) = (numbers(whole), numbers(broken));
    let differ =
        |one: &[f64], other: &[f64]| one.len() != other.len() || one.iter().zip(other).any(|(one, other)| differs(*one, *other));
    before
        .iter()
        .filter(|(title, values)| after.iter().find(|(other, _)| other == title).is_none_or(|(_, others)| differ(values, others)))
        .map(|(title, _)| (*title).to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::papers::report::{Curve, Figure, Row, Table};

    #[test]
    fn what_the_model_changes_is_counted_and_what_the_paper_prints_is_not() {
        let report = |y: f64, model: f64, paper: f64| {
            let figure = |title: &str, y| Figure {
                title: title.into(),
                curves: vec![Curve { level: Some(paper), ..Curve::new("", vec![(1.0, y)]) }],
                ..Figure::default()
            };
            let rows = vec![Row { name: "row".into(), cells: vec![Cell::both(paper, model)] }];
            let table = Table { title: "table".into(), columns: vec!["column".into()], rows, note: String::new() };
            Report { figures: vec![figure("one", y), figure("two", 1.0)], tables: vec![table], ..Report::default() }
        };
        assert_eq!(changed(&report(1.0, 1.0, 1.0), &report(1.005, 1.0, 9.0)), Vec::<String>::new());
        assert_eq!(changed(&report(1.0, 1.0, 1.0), &report(1.02, 1.0, 1.0)), ["one"]);
        assert_eq!(changed(&report(1.0, 1.0, 1.0), &report(2.0, f64::NAN, 1.0)), ["one", "table"]);
    }
}
