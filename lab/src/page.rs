//! The benches' results on one page: every bar with its bound, and a plot of how near it is.

use crate::bars::Bar;
use crate::compare::{Column, Round, Row, Way};
use serde::Serialize;
use std::fmt::Write;

/// One bench's part of the page.
#[derive(Debug, Serialize)]
pub struct Section {
    /// The bench.
    pub name: &'static str,
    /// What was compared, in a sentence.
    pub about: &'static str,
    /// Its figures with bounds.
    pub bars: Vec<Bar>,
    /// The loads of which several ways are compared, if that is what it does. They are part of the report.
    #[serde(skip)]
    pub rows: Vec<Row>,
    /// Its whole report; an error instead if it did not run.
    pub report: serde_json::Value,
}

/// The page as one self-contained HTML document. Each bar is drawn against its bound, which is the line in the middle:
/// what is right of it is missed. `machine` is the one that was measured on, in a line.
pub fn html(machine: &str, sections: &[Section]) -> String {
    let mut body = String::new();
    let (held, all) = sections
        .iter()
        .flat_map(|section| &section.bars)
        .fold((0, 0), |(held, all), bar| (held + usize::from(bar.holds), all + 1));
    let _ = writeln!(body, "<p>{held} of {all} bars hold.</p>");
    for section in sections {
        let _ = writeln!(body, "<h2>baton bench {}</h2>\n<p>{}</p>\n<table>", section.name, section.about);
        if let Some(error) = section.report.get("error").and_then(|error| error.as_str()) {
            let _ = writeln!(body, "<tr><th>did not run</th><td class=missed>{}</td></tr>", escaped(error));
        }
        for bar in &section.bars {
            let (class, word) = if bar.holds { ("holds", "holds") } else { ("missed", "missed") };
            let _ = writeln!(
                body,
                "<tr><th>{}</th><td>{:.3}</td><td>{}</td><td class={class}>{word}</td><td><div class=plot><i class={class} style='width:{:.0}px'></i></div></td></tr>",
                bar.name,
                bar.value,
                bound(bar),
                150.0 * excess(bar).min(2.0),
            );
        }
        body += "</table>\n";
        for row in &section.rows {
            body += &ways(row);
        }
    }
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Baton: benches</title>
<meta name=viewport content='width=device-width'>
<style>:root{{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--line:#d0d7de;--ground:#eef1f4;--good:#1a7f37;--bad:#b3261e}}
@media(prefers-color-scheme:dark){{:root{{--ink:#e6edf3;--paper:#0d1117;--line:#30363d;--ground:#21262d;--good:#57c873;--bad:#ff8a80}}}}
body{{font:16px/1.5 system-ui,sans-serif;max-width:980px;margin:2rem auto;padding:0 1rem;color:var(--ink);background:var(--paper)}}
table{{border-collapse:collapse}}th,td{{padding:.2rem .9rem;border-bottom:1px solid var(--line);text-align:right}}
th{{text-align:left;font-weight:500}}th+th{{text-align:right;white-space:nowrap}}td.holds{{color:var(--good)}}td.missed{{color:var(--bad);font-weight:600}}
.plot{{width:300px;height:.9em;background:linear-gradient(var(--ink),var(--ink)) 150px 0/1px 100% no-repeat var(--ground)}}
.cost{{display:flex;width:300px;height:.9em}}.cost i{{height:100%}}.key i{{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}}
h3{{font-size:1rem;margin:1.2rem 0 .3rem}}{}
.plot i{{display:block;height:100%;opacity:.6}}i.holds{{background:var(--good)}}i.missed{{background:var(--bad)}}</style>
<h1>Baton: benches</h1>
<p>Kernel and Baton in turn on one machine; medians of the rounds' ratios, Baton over kernel, unless a line says otherwise. The line in a
plot is the bound, and what goes beyond it is missed; where more is better, bound over value is drawn.</p>
<p>Machine: {}.</p>
<p>The ways that are compared, each with hosts and a server of its own in each round. Bars are about <em>beside</em>, that of the program's CPU
time about <em>library</em>.</p>
<table>{}</table>
<p class=key>CPU time of all, by whose it is:{}</p>
{body}</html>\n",
        colours(),
        escaped(machine),
        ways_about(),
        legend()
    )
}

/// Colours of the parts of a CPU time, in the order of [`Round::PARTS`].
const COLOURS: [&str; Round::PARTS.len()] = ["#8c959f", "#0969da", "#bf8700", "#bc4c00", "#57606a", "#1a7f37"];

fn colours() -> String {
    COLOURS.iter().enumerate().map(|(at, colour)| format!(".part{at}{{background:{colour}}}")).collect()
}

fn legend() -> String {
    let parts = Round::PARTS.iter().enumerate();
    parts.map(|(at, (name, _))| format!("<i class=part{at}></i>{name}")).collect()
}

fn ways_about() -> String {
    Way::ALL
        .iter()
        .map(|way| format!("<tr><th>{}</th><td style='text-align:left'>{}</td></tr>", way.name(), way.about()))
        .collect()
}

/// A load's ways as a table, each with a plot of its CPU time.
fn ways(row: &Row) -> String {
    let (rate, cost) = if row.bulk { ("Gb/s", "CPU, s/GB") } else { ("per second", "CPU, µs") };
    let mut text = format!("<h3>{}</h3>\n<table><tr><th></th><th>{rate}</th><th>p50, ms</th><th>p99, ms</th>", escaped(row.load));
    let _ = writeln!(text, "<th>{cost}</th><th>over the kernel's</th><th></th></tr>");
    let most = row.columns.iter().map(|column| column.medians.machine).fold(0.0, f64::max);
    for column in &row.columns {
        let Column { way, medians, machine_ratio, .. } = column;
        let decimals = if row.bulk { 2 } else { 0 };
        let wait = |time: f64| if row.bulk { "–".into() } else { format!("{time:.3}") };
        let plot = Round::PARTS.iter().enumerate().map(|(at, (_, part))| {
            format!("<i class=part{at} style='width:{:.1}px'></i>", 300.0 * part(medians) / most.max(f64::MIN_POSITIVE))
        });
        let _ = writeln!(
            text,
            "<tr><th>{}</th><td>{:.decimals$}</td><td>{}</td><td>{}</td><td>{:.3}</td><td>{machine_ratio:.2}</td><td><div class=cost>{}</div></td></tr>",
            way.name(),
            medians.rate,
            wait(medians.p50),
            wait(medians.p99),
            medians.machine,
            plot.collect::<String>(),
        );
    }
    for (way, error) in &row.failures {
        let _ = writeln!(text, "<tr><th>{}</th><td class=missed colspan=6>did not run: {}</td></tr>", way.name(), escaped(error));
    }
    text + "</table>\n"
}

/// The bars as lines of text.
pub fn text(sections: &[Section]) -> String {
    let mut text = String::new();
    for section in sections {
        if let Some(error) = section.report.get("error").and_then(|error| error.as_str()) {
            let _ = writeln!(text, "{}: did not run: {error}", section.name);
        }
        for (row, (way, error)) in section.rows.iter().flat_map(|row| row.failures.iter().map(move |failure| (row, failure))) {
            let _ = writeln!(text, "{}, {}: did not run: {error}", row.load, way.name());
        }
        for bar in &section.bars {
            let word = if bar.holds { "holds" } else { "missed" };
            let _ = writeln!(text, "{:<34} {:>12.3}  {:>10}  {word}", bar.name, bar.value, bound(bar));
        }
    }
    text
}

/// Whether the value has to be at most the bound, as far as value and bound show it.
fn is_most(bar: &Bar) -> bool {
    bar.holds == (bar.value <= bar.bound)
}

fn bound(bar: &Bar) -> String {
    format!("{} {}", if is_most(bar) { "≤" } else { "≥" }, bar.bound)
}

/// The value over its bound, or the bound over the value where more is better: above 1 is missed.
fn excess(bar: &Bar) -> f64 {
    let ratio = if is_most(bar) { bar.value / bar.bound } else { bar.bound / bar.value };
    if ratio.is_finite() { ratio.max(0.0) } else { f64::from(u8::from(!bar.holds)) * 2.0 }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_bar_and_a_bench_that_failed_are_on_the_page() {
        let bars = vec![Bar::most("a.ratio", 0.8, 1.6), Bar::least("b.rate", 2.0, 4.0)];
        let column = |way, machine_ratio| {
            let medians = Round {
                machine: 10.0 * machine_ratio,
                client: 4.0 * machine_ratio,
                nic: 6.0 * machine_ratio,
                ..Round::default()
            };
            Column { way, medians, machine_ratio, ..Column::default() }
        };
        let columns = vec![column(Way::Kernel, 1.0), column(Way::Beside, 0.5)];
        let row = Row { load: "load", bulk: false, columns, failures: vec![(Way::Attached, "no <right>".into())] };
        let sections = [
            Section { name: "a", about: "A.", bars, rows: vec![row], report: serde_json::json!({}) },
            Section {
                name: "c",
                about: "C.",
                bars: Vec::new(),
                rows: Vec::new(),
                report: serde_json::json!({ "error": "no <nginx>" }),
            },
        ];
        let page = html("2 processors <x>", &sections);
        assert!(page.contains("Machine: 2 processors &lt;x>."), "{page}");
        assert!(page.contains("1 of 2 bars hold") && page.contains("≤ 0.8") && page.contains("≥ 2"), "{page}");
        assert!(page.contains("width:300px") && page.contains("width:75px") && page.contains("no &lt;nginx>"), "{page}");
        // The kernel's client, and the NIC's part of half of the kernel's sum.
        assert!(page.contains("part0 style='width:120.0px'") && page.contains("part5 style='width:90.0px'"), "{page}");
        assert!(page.contains("<td>0.50</td>") && page.contains("did not run: no &lt;right>"), "{page}");
        assert_eq!(text(&sections).lines().filter(|line| line.ends_with("missed")).count(), 1);
    }
}
