//! Reports as pages of a repository: for each document a page in Markdown, and beside it a picture of each figure.

use super::page::{dark, escaped};
use super::plot::{COLOURS, INK, SIZE, hexadecimal, numbered, svg};
use super::report::{Figure, Report, Table};
use super::text::{cell, number};
use super::{Document, twins};
use anyhow::{Context, Result};
use std::fmt::Write;
use std::path::Path;

/// Columns of prose.
const COLUMNS: usize = 100;
/// Height of a line of a picture's key.
const LINE: u32 = 18;

/// A figure as a picture that stands alone: with its key below, and colours for light and dark screens.
fn picture(figure: &Figure) -> Result<String> {
    let (width, height) = SIZE;
    let whole = height + LINE * figure.curves.len() as u32 + 6;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{whole}\" viewBox=\"0 0 {width} {whole}\">\n<style>{}</style>\n{}\n",
        dark(),
        svg(figure)?
    );
    for (row, (curve, (colour, _))) in figure.curves.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let (top, colour, ink) = (height + LINE * row as u32, hexadecimal(*colour), hexadecimal(INK.0));
        let _ = writeln!(
            text,
            "<rect x=\"12\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>\
             <text x=\"28\" y=\"{}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"{ink}\">{}</text>",
            top + 4,
            top + 13,
            escaped(&curve.name)
        );
    }
    Ok(text + "</svg>\n")
}

/// Prose in lines of [`COLUMNS`] columns, the first behind `first`, the others behind `others`.
fn prose(text: &str, first: &str, others: &str) -> String {
    let (mut all, mut line, mut empty) = (String::new(), first.to_owned(), true);
    for word in text.split_whitespace() {
        if !empty && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            all += &(line + "\n");
            (line, empty) = (others.to_owned(), true);
        }
        if !empty {
            line.push(' ');
        }
        line += word;
        empty = false;
    }
    all + &line + "\n"
}

/// A paragraph, or nothing.
fn paragraph(text: &str) -> String {
    if text.is_empty() { String::new() } else { prose(text, "", "") + "\n" }
}

/// A row of a table.
fn row<'a>(cells: impl IntoIterator<Item = &'a str>) -> String {
    let cells: Vec<String> = cells.into_iter().map(|text| escaped(text).replace('|', "\\|")).collect();
    format!("| {} |\n", cells.join(" | "))
}

fn head<'a>(columns: impl IntoIterator<Item = &'a str>) -> String {
    let columns: Vec<&str> = columns.into_iter().collect();
    row(columns.iter().copied()) + &"|---".repeat(columns.len()) + "|\n"
}

fn table(table: &Table) -> String {
    let mut text = format!("### {}\n\n", escaped(&table.title));
    text += &head(std::iter::once("").chain(table.columns.iter().map(String::as_str)));
    for one in &table.rows {
        let cells: Vec<String> = one.cells.iter().map(cell).collect();
        text += &row(std::iter::once(one.name.as_str()).chain(cells.iter().map(String::as_str)));
    }
    text + "\n" + &paragraph(&table.note)
}

/// What of the paper is here, and what is not.
fn contents(document: &Document, report: &Report) -> String {
    let twins = twins::of(document, report);
    if twins.is_empty() {
        return String::new();
    }
    let mut text = String::from("## What of the paper is here\n\n") + &head(["the paper", "here"]);
    for twin in &twins {
        let here = match (twin.titles.is_empty(), twin.why) {
            (false, _) => twin.titles.join("; "),
            (true, Some(why)) => format!("nothing: {why}"),
            (true, None) => "nothing".to_owned(),
        };
        text += &row([twin.what.as_str(), &here]);
    }
    text + "\n"
}

fn numbers(report: &Report) -> String {
    let mut text = String::from("## Numbers\n\n") + &head(["number", "paper", "model", "live", "unit", "why they differ"]);
    for one in &report.comparisons {
        let [paper, model, live] = [one.paper, one.model, one.live].map(|value| value.map_or_else(|| "–".to_owned(), number));
        let why = if one.calibrated { format!("calibrated. {}", one.why) } else { one.why.clone() };
        text += &row([one.what.as_str(), &paper, &model, &live, one.unit, why.trim_end()]);
    }
    text += "\n## Bars\n\n";
    text += &head(["bar", "value", "bound", "holds", ""]);
    for judged in &report.bars {
        let bar = &judged.bar;
        let word = if bar.holds { "yes" } else { "**no**" };
        text += &row([bar.name, &number(bar.value), &number(bar.bound), word, &judged.remark()]);
    }
    text + "\n"
}

fn remarks(report: &Report) -> String {
    let mut text = String::new();
    if !report.contradictions.is_empty() {
        text += "## Where the paper contradicts itself\n\n";
        for one in &report.contradictions {
            text += &prose(&escaped(&format!("{}: {}; but {}", one.place, one.printed, one.but)), "- ", "  ");
        }
        text += "\n";
    }
    if !report.absent.is_empty() {
        text += "## Without a twin\n\n";
        for one in &report.absent {
            text += &prose(&escaped(&format!("{}: {}", one.what, one.why)), "- ", "  ");
        }
        text += "\n";
    }
    text += "## The model's numbers\n\n";
    text += &head(["number", "value", "unit", "from", ""]);
    for one in &report.parameters {
        let (kind, detail) = one.source.words();
        text += &row([one.name.as_str(), &number(one.value), one.unit, kind, detail]);
    }
    text
}

/// The page of a report, whose pictures are files with these names.
fn markdown(document: &Document, report: &Report, pictures: &[String]) -> String {
    let mut text = format!("# {}\n\n", escaped(report.title));
    text += "For people who know the paper and want its figures beside ours. `baton lab all --pictures` writes\n";
    text += "this page. Lines are the model's, crosses the paper's numbers, dots live runs.\n\n";
    text += &paragraph(&escaped(report.about));
    text += &contents(document, report);
    text += "## Figures\n\n";
    for (figure, picture) in report.figures.iter().zip(pictures) {
        let title = escaped(&figure.title);
        let _ = writeln!(text, "### {title}\n\n![{title}]({picture})\n");
        text += &paragraph(&numbered(figure).map(|names| escaped(&names)).unwrap_or_default());
        text += &paragraph(&escaped(&figure.note));
    }
    text += "## Tables\n\n";
    report.tables.iter().for_each(|one| text += &table(one));
    text + &numbers(report) + &remarks(report)
}

/// Writes a document's page and pictures into a folder, in place of those that are there.
///
/// # Errors
/// The system's, or if a figure cannot be drawn.
pub fn write(folder: &Path, document: &Document, report: &Report) -> Result<()> {
    let to = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    };
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let ours = format!("{}-", document.word);
    for entry in std::fs::read_dir(folder)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(&ours) && name.ends_with(".svg") {
            std::fs::remove_file(entry.path())?;
        }
    }
    let mut pictures = Vec::new();
    for (at, figure) in report.figures.iter().enumerate() {
        let name = format!("{ours}{}.svg", at + 1);
        to(&name, &picture(figure)?)?;
        pictures.push(name);
    }
    to(&format!("{}.md", document.word), &markdown(document, report, &pictures))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::Bar;
    use crate::papers::DOCUMENTS;
    use crate::papers::report::{Absent, Cell, Comparison, Curve, Row};
    use baton_bed::temporary::{Directory, Kind};

    fn report() -> Report {
        let curves = vec![Curve::new("a <curve>", vec![(1.0, 2.0), (8.0, 4.0)])];
        let note = "word ".repeat(60);
        let rows = vec![Row { name: "a|b".into(), cells: vec![Cell::both(1.0, 2.0)] }];
        let mut report = Report {
            word: "lro",
            title: "A paper",
            about: "About.",
            figures: vec![Figure { title: "Figure 13: a curve".into(), note, curves, ..Figure::default() }],
            tables: vec![Table { title: "A table (ours)".into(), columns: vec!["column".into()], rows, note: String::new() }],
            absent: vec![Absent { what: "Figures 1 to 12", why: "drawings" }],
            ..Report::default()
        };
        report.show(Comparison::new("lro.one", "one", "µs", 10.0, 12.0));
        report.bar(Bar::most("lro.two", 1.0, 2.0));
        report
    }

    #[test]
    fn a_page_has_all_of_a_report_and_its_pictures_beside_it() {
        let document = DOCUMENTS.iter().find(|document| document.word == "lro").unwrap();
        let directory = Directory::new(Kind::Files).unwrap();
        let folder = directory.path();
        for (name, kept) in [("lro-9.svg", false), ("rmpp-1.svg", true), ("lro.md", true)] {
            std::fs::write(folder.join(name), "old").unwrap();
            write(folder, document, &report()).unwrap();
            assert_eq!(folder.join(name).exists(), kept, "{name}");
        }
        let [page, picture] = ["lro.md", "lro-1.svg"].map(|name| std::fs::read_to_string(folder.join(name)).unwrap());
        assert!(page.contains("| Figure 12 | nothing: drawings |\n| Figure 13 | Figure 13: a curve |"), "{page}");
        assert!(page.contains("![Figure 13: a curve](lro-1.svg)"), "{page}");
        assert!(
            page.contains("| a\\|b | 2.00 (paper 1.00) |") && page.contains("| lro.two | 2.00 | 1.00 | **no** |  |"),
            "{page}"
        );
        let lines = page.lines().filter(|line| !line.starts_with('|'));
        assert!(lines.clone().all(|line| line.chars().count() <= COLUMNS) && lines.clone().any(|line| line.len() > 90), "{page}");
        assert_eq!((picture.matches("<svg").count(), picture.matches("</svg>").count()), (2, 2));
        assert!(picture.contains(">a &lt;curve></text>") && picture.contains("prefers-color-scheme:dark"), "{picture}");
    }
}
