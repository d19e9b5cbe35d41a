//! Reports as one self-contained HTML page: plots inside, light and dark, readable at a phone's width.

use super::plot::{COLOURS, GRID, INK, hexadecimal, numbered, svg};
use super::report::{Figure, Report};
use super::text::{cell, number};
use anyhow::Result;
use std::fmt::Write;

const STYLE: &str = "
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--line:#d0d7de;--faint:#57606a;--good:#1a7f37;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--line:#30363d;--faint:#9aa4b0;--good:#57c873;--bad:#ff8a80}}
body{font:16px/1.5 system-ui,sans-serif;max-width:1280px;margin:0 auto;padding:1rem;color:var(--ink);background:var(--paper)}
h1{font-size:1.5rem}h2{font-size:1.3rem;margin-top:2.5rem}h3{font-size:1rem;margin:1.5rem 0 .3rem}p{max-width:50rem;margin:.4rem 0}
a{color:inherit}.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
th,td{padding:.2rem .7rem .2rem 0;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}
th{font-weight:500}th:first-child,.text{text-align:left}.faint{color:var(--faint)}.holds{color:var(--good)}.missed{color:var(--bad);font-weight:600}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:1rem}figure{margin:0}
figcaption{font-weight:500}svg{width:100%;height:auto;max-width:560px;display:block}
.key{font-size:.85rem}.key span{white-space:nowrap;margin-right:.8em}.key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}
";

/// A rule for each colour of the plots, which gives it its value on a dark screen.
pub fn dark() -> String {
    let rules = COLOURS.iter().chain([&INK, &GRID]).map(|(light, dark)| {
        let light = hexadecimal(*light);
        format!("[fill='{light}']{{fill:{dark}}}[stroke='{light}']{{stroke:{dark}}}")
    });
    let swatches = COLOURS.iter().enumerate().map(|(at, (_, dark))| format!(".c{at}{{background:{dark}}}"));
    format!("@media(prefers-color-scheme:dark){{{}}}\n", rules.chain(swatches).collect::<String>())
}

fn swatches() -> String {
    COLOURS.iter().enumerate().map(|(at, (light, _))| format!(".c{at}{{background:{}}}", hexadecimal(*light))).collect()
}

/// Text without what HTML takes for tags.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

fn note(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("<p class=faint>{}</p>", escaped(text)) }
}

fn figure(figure: &Figure) -> Result<String> {
    let key: String = figure
        .curves
        .iter()
        .enumerate()
        .map(|(at, curve)| format!("<span><i class=c{}></i>{}</span> ", at % COLOURS.len(), escaped(&curve.name)))
        .collect();
    let (title, plot, note) = (escaped(&figure.title), svg(figure)?, note(&figure.note));
    let below = numbered(figure).map(|names| self::note(&names)).unwrap_or_default();
    Ok(format!("<figure><figcaption>{title}</figcaption>{plot}<p class=key>{key}</p>{below}{note}</figure>\n"))
}

fn head(columns: &[&str]) -> String {
    let cells: String = columns.iter().map(|column| format!("<th>{}</th>", escaped(column))).collect();
    format!("<div class=wide><table><tr>{cells}</tr>\n")
}

fn bars(report: &Report) -> String {
    let mut text = String::from("<h3>Bars</h3>\n") + &head(&["bar", "value", "bound", "", ""]);
    for judged in &report.bars {
        let bar = &judged.bar;
        let word = if bar.holds { "holds" } else { "missed" };
        let remark = escaped(&judged.remark());
        let (name, value, bound) = (bar.name, number(bar.value), number(bar.bound));
        let _ = writeln!(
            text,
            "<tr><th>{name}</th><td>{value}</td><td>{bound}</td><td class={word}>{word}</td><td class='text faint'>{remark}</td></tr>"
        );
    }
    text + "</table></div>\n"
}

fn comparisons(report: &Report) -> String {
    let columns = ["number", "paper", "model", "live", "unit", "model over paper", "why"];
    let mut text = String::from("<h3>Numbers</h3>\n") + &head(&columns);
    for one in &report.comparisons {
        let [paper, model, live, ratio] =
            [one.paper, one.model, one.live, one.ratio()].map(|value| value.map_or_else(|| "–".into(), number));
        let calibrated = if one.calibrated { "calibrated. " } else { "" };
        let _ = writeln!(
            text,
            "<tr><th>{}</th><td>{paper}</td><td>{model}</td><td>{live}</td><td class=text>{}</td><td>{ratio}</td><td class='text faint'>{calibrated}{}</td></tr>",
            escaped(&one.what),
            one.unit,
            escaped(&one.why),
        );
    }
    text + "</table></div>\n"
}

fn tables(report: &Report) -> String {
    let mut text = String::new();
    for table in &report.tables {
        let columns: Vec<&str> = std::iter::once("").chain(table.columns.iter().map(String::as_str)).collect();
        let _ = writeln!(text, "<h3>{}</h3>\n{}", escaped(&table.title), head(&columns));
        for row in &table.rows {
            let cells: String = row.cells.iter().map(|one| format!("<td>{}</td>", escaped(&cell(one)))).collect();
            let _ = writeln!(text, "<tr><th>{}</th>{cells}</tr>", escaped(&row.name));
        }
        text += "</table></div>\n";
        text += &note(&table.note);
    }
    text
}

fn parameters(report: &Report) -> String {
    let mut text = String::from("<h3>The model's numbers</h3>\n") + &head(&["", "value", "unit", "from", ""]);
    for one in &report.parameters {
        let (kind, detail) = one.source.words();
        let (name, value, detail) = (escaped(&one.name), number(one.value), escaped(detail));
        let _ = writeln!(
            text,
            "<tr><th>{name}</th><td>{value}</td><td class=text>{}</td><td class=text>{kind}</td><td class='text faint'>{detail}</td></tr>",
            one.unit
        );
    }
    text + "</table></div>\n"
}

/// What the paper contradicts, and what has no twin.
fn remarks(report: &Report) -> String {
    let mut text = String::new();
    if !report.contradictions.is_empty() {
        text += "<h3>Where the paper contradicts itself</h3>\n<ul>";
        for one in &report.contradictions {
            let _ = writeln!(text, "<li>{}: {}; but {}</li>", one.place, escaped(&one.printed), escaped(&one.but));
        }
        text += "</ul>\n";
    }
    if !report.absent.is_empty() {
        text += "<h3>Without a twin</h3>\n<ul>";
        for one in &report.absent {
            let _ = writeln!(text, "<li>{}: {}</li>", escaped(one.what), escaped(one.why));
        }
        text += "</ul>\n";
    }
    text
}

fn section(report: &Report) -> Result<String> {
    let figures = report.figures.iter().map(figure).collect::<Result<String>>()?;
    let (counted, held) = report
        .bars
        .iter()
        .filter(|judged| judged.counted)
        .fold((0, 0), |(all, held), judged| (all + 1, held + usize::from(judged.bar.holds)));
    let (title, about) = (escaped(report.title), escaped(report.about));
    Ok(format!(
        "<h2 id={}>{title}</h2>\n<p>{about}</p>\n<p>{held} of {counted} bars that count hold.</p>\n<div class=figures>{figures}</div>\n{}{}{}{}{}",
        report.word,
        tables(report),
        comparisons(report),
        remarks(report),
        bars(report),
        parameters(report),
    ))
}

/// The page of these reports.
///
/// # Errors
/// If a figure cannot be drawn.
pub fn html(reports: &[Report]) -> Result<String> {
    let sections = reports.iter().map(section).collect::<Result<String>>()?;
    let links: String =
        reports.iter().map(|report| format!("<li><a href='#{}'>{}</a></li>", report.word, escaped(report.title))).collect();
    let contents = if reports.len() > 1 { format!("<ul>{links}</ul>") } else { String::new() };
    Ok(format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Baton: the papers</title>
<meta name=viewport content='width=device-width,initial-scale=1'>
<style>{STYLE}{}{}</style>
<h1>Baton: the papers' figures and ours</h1>
<p>Lines are the model's: the real code in virtual time. Crosses are the paper's numbers; one at the right edge is the level that a
curve reaches. Dots are live runs.</p>
{contents}
{sections}</html>\n",
        swatches(),
        dark(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::Bar;
    use crate::papers::report::{Absent, Cell, Comparison, Contradiction, Curve, Parameter, Row, Shape, Source, Table};

    fn report() -> Report {
        let live = vec![(1.0, 2.5), (8.0, 3.5)];
        let curve =
            Curve { paper: vec![(2.0, 3.0)], level: Some(4.0), live, ..Curve::new("a <curve>", vec![(1.0, 2.0), (8.0, 4.0)]) };
        let figure = |shape| Figure { title: "Figure 1".into(), shape, curves: vec![curve.clone()], ..Figure::default() };
        let part = Curve::new("part", vec![(0.0, 1.0), (1.0, 3.0)]);
        let stacks = Figure { curves: vec![part.clone(), part], ..figure(Shape::Stacks(vec!["one".into(), "two".into()])) };
        let rows = vec![Row { name: "row".into(), cells: vec![Cell::both(1.0, 2.0)] }];
        let mut report = Report {
            word: "a",
            title: "A",
            about: "About.",
            parameters: vec![Parameter::new("p", 1.5, "µs", Source::Calibrated("Table 9"))],
            figures: vec![figure(Shape::Lines), figure(Shape::LogLines), figure(Shape::LogLogLines), stacks],
            tables: vec![Table { title: "Table 1".into(), columns: vec!["column".into()], rows, note: String::new() }],
            contradictions: vec![Contradiction { place: "Table 1", printed: "22.3".into(), but: "22.04 follows".into() }],
            absent: vec![Absent { what: "Figure 9", why: "a drawing" }],
            ..Report::default()
        };
        report.compare(Comparison::new("a.one", "one", "µs", 10.0, 12.0), 0.1);
        report.compare(Comparison::new("a.two", "two", "µs", 10.0, 10.0).calibrated(), 0.1);
        report.bar(Bar::most("a.three", 1.0, 0.5));
        report
    }

    #[test]
    fn everything_of_a_report_is_on_its_page_and_in_its_text() {
        let report = report();
        let page = html(std::slice::from_ref(&report)).unwrap();
        let text = crate::papers::text::table(&report);
        for part in ["Figure 1", "Table 1", "Table 9", "2 (paper 1)", "22.04 follows", "Figure 9", "a.three", "calibrated"] {
            let part_of_the_text = part.replace("2 (paper 1)", "2.00 (paper 1.00)");
            assert!(page.contains(&part_of_the_text) && text.contains(&part_of_the_text), "{part}: {text}");
        }
        assert!(page.contains("a &lt;curve>") && page.contains("1 of 2 bars that count hold"), "{page}");
        assert_eq!(page.matches("<svg").count(), 4);
        assert!(text.contains("; live 2.50 at 1.00 … 3.50 at 8.00; paper"), "{text}");
        assert_eq!(page.matches("class=missed>missed").count(), 1);
    }

    /// A colour that the style does not know would be the same on a dark screen.
    #[test]
    fn every_colour_of_a_plot_has_a_dark_value() {
        let page = html(&[report()]).unwrap();
        let style = page.split("</style>").next().unwrap();
        for attribute in ["fill=\"#", "stroke=\"#"] {
            for found in page.split(attribute).skip(1) {
                let colour = &found[..6];
                assert!(style.contains(&format!("='#{colour}']")), "{colour}");
            }
        }
    }

    #[test]
    fn only_bars_that_count_decide() {
        let mut report = report();
        assert!(!report.holds());
        report.bars.retain(|judged| judged.bar.holds);
        report.bars.push(crate::papers::report::JudgedBar { bar: Bar::most("a.four", 1.0, 2.0), counted: false, known: None });
        assert!(report.holds());
    }
}
