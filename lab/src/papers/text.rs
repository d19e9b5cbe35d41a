//! A report as text.

use super::report::{Cell, Curve, Report};
use baton_bed::axis::tick;
use std::fmt::Write;

/// A number with as many digits as a reader needs.
pub fn number(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => "–".into(),
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => tick(value),
    }
}

fn or_dash(value: Option<f64>) -> String {
    value.map_or_else(|| "–".into(), number)
}

/// A cell in words: the model's number, then what is beside it.
pub fn cell(cell: &Cell) -> String {
    let live = cell.live.map(|live| format!("live {}", number(live)));
    let paper = cell.paper.map(|paper| format!("paper {}", number(paper)));
    let beside: Vec<String> = live.into_iter().chain(paper).collect();
    match (cell.model, beside.is_empty()) {
        (Some(model), true) => number(model),
        (Some(model), false) => format!("{} ({})", number(model), beside.join(", ")),
        (None, true) => String::new(),
        (None, false) => format!("({})", beside.join(", ")),
    }
}

/// A curve in a line: its ends, its greatest value, the live one's ends, and what the paper says.
fn curve(curve: &Curve) -> String {
    let mut line = format!("    {:<32} ", curve.name);
    if let (Some(first), Some(last)) = (curve.points.first(), curve.points.last()) {
        let most = curve.points.iter().map(|point| point.1).fold(f64::MIN, f64::max);
        let [first_x, first_y, last_x, last_y, most] = [first.0, first.1, last.0, last.1, most].map(number);
        let _ = write!(line, "{first_y} at {first_x} … {last_y} at {last_x}, at most {most}");
    }
    if let (Some(first), Some(last)) = (curve.live.first(), curve.live.last()) {
        let [first_x, first_y, last_x, last_y] = [first.0, first.1, last.0, last.1].map(number);
        let _ = write!(line, "; live {first_y} at {first_x} … {last_y} at {last_x}");
    }
    if let Some(level) = curve.level {
        let _ = write!(line, "; paper {}", number(level));
    }
    for (x, y) in &curve.paper {
        let _ = write!(line, "; paper {} at {}", number(*y), number(*x));
    }
    line + "\n"
}

/// The bars, one a line.
pub fn bars(report: &Report) -> String {
    let mut text = String::new();
    for judged in &report.bars {
        let bar = &judged.bar;
        let word = if bar.holds { "holds" } else { "missed" };
        let remark = judged.remark();
        let remark = if remark.is_empty() { remark } else { format!(" ({remark})") };
        let _ = writeln!(text, "  {:<40} {:>10}  bound {:>8}  {word}{remark}", bar.name, number(bar.value), number(bar.bound));
    }
    text
}

fn tables(text: &mut String, report: &Report) {
    for table in &report.tables {
        let _ = writeln!(text, "\n{}", table.title);
        let _ = writeln!(text, "  {:<24}{}", "", table.columns.iter().map(|column| format!("{column:>28}")).collect::<String>());
        for row in &table.rows {
            let cells: String = row.cells.iter().map(|one| format!("{:>28}", cell(one))).collect();
            let _ = writeln!(text, "  {:<24}{cells}", row.name);
        }
        if !table.note.is_empty() {
            let _ = writeln!(text, "  {}", table.note);
        }
    }
}

/// The whole report.
pub fn table(report: &Report) -> String {
    let mut text = format!("{}\n{}\n\nThe model's numbers\n", report.title, report.about);
    for parameter in &report.parameters {
        let (kind, detail) = parameter.source.words();
        let value = number(parameter.value);
        let _ = writeln!(text, "  {:<36}{value:>10} {:<14} {kind}: {detail}", parameter.name, parameter.unit);
    }
    for figure in &report.figures {
        let _ = writeln!(text, "\n{}\n  {} over {}", figure.title, figure.y, figure.x);
        figure.curves.iter().for_each(|one| text += &curve(one));
        if !figure.note.is_empty() {
            let _ = writeln!(text, "  {}", figure.note);
        }
    }
    tables(&mut text, report);
    let _ = writeln!(text, "\n{:<36}{:>12}{:>12}{:>12}{:>8}", "Numbers", "paper", "model", "live", "ratio");
    for one in &report.comparisons {
        let ratio = one.ratio().map_or_else(String::new, |ratio| format!("{ratio:.3}"));
        let [paper, model, live] = [one.paper, one.model, one.live].map(or_dash);
        let calibrated = if one.calibrated { ", calibrated" } else { "" };
        let _ = writeln!(text, "  {:<34}{paper:>12}{model:>12}{live:>12}{ratio:>8}  {}{calibrated}", one.name, one.unit);
        let _ = writeln!(text, "      {}{}{}", one.what, if one.why.is_empty() { "" } else { ": " }, one.why);
    }
    if !report.contradictions.is_empty() {
        text += "\nWhere the paper contradicts itself\n";
    }
    for one in &report.contradictions {
        let _ = writeln!(text, "  {}: {}; but {}", one.place, one.printed, one.but);
    }
    if !report.absent.is_empty() {
        text += "\nWithout a twin\n";
    }
    for one in &report.absent {
        let _ = writeln!(text, "  {}: {}", one.what, one.why);
    }
    let _ = write!(text, "\nBars\n{}", bars(report));
    text
}
