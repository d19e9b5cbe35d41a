//! What a paper numbers, its figures and tables, and what each is here: its twins, or the reason why it has none.

use super::Document;
use super::report::Report;

/// A figure or table of a paper.
#[derive(Clone, Debug)]
pub struct Twin<'a> {
    /// `Figure 7`.
    pub what: String,
    /// Titles of the figures and tables here that repeat it.
    pub titles: Vec<&'a str>,
    /// Why there is none.
    pub why: Option<&'static str>,
}

/// The numbers at the start of a title: `Figures 2, 3 and 6`, `Figure 1 and Figures 3 to 6`, `Table 1: …`.
fn named(text: &str, kind: &str) -> Vec<u8> {
    let (mut numbers, mut counts, mut range) = (Vec::new(), false, false);
    // What follows a colon is the title.
    let names = text.split(':').next().unwrap_or_default();
    for word in names.split_whitespace() {
        let word = word.trim_end_matches(',');
        match word.parse::<u8>() {
            Ok(number) if counts => {
                let from = numbers.last().copied().filter(|_| range).map_or(number, |last: u8| last + 1);
                numbers.extend(from..=number);
                range = false;
            }
            Ok(_) => {}
            Err(_) => match word {
                "and" => {}
                "to" => range = true,
                "Figure" | "Figures" | "Table" | "Tables" => counts = word.trim_end_matches('s') == kind,
                _ => break,
            },
        }
    }
    numbers
}

/// All figures and tables of a document's paper, with what a report has of them.
pub fn of<'a>(document: &Document, report: &'a Report) -> Vec<Twin<'a>> {
    let all = (1..=document.figures).map(|number| ("Figure", number));
    let all = all.chain((1..=document.tables).map(|number| ("Table", number)));
    all.map(|(kind, number)| {
        let titles = report.figures.iter().map(|figure| &figure.title).chain(report.tables.iter().map(|table| &table.title));
        let names = |text: &str| named(text, kind).contains(&number);
        Twin {
            what: format!("{kind} {number}"),
            titles: titles.map(String::as_str).filter(|title| names(title)).collect(),
            why: report.absent.iter().find(|absent| names(absent.what)).map(|absent| absent.why),
        }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_people_write_them() {
        for (text, figures, tables) in [
            ("Figure 7: 64 connections", &[7][..], &[][..]),
            ("Figures 2, 3 and 6", &[2, 3, 6], &[]),
            ("Figure 1 and Figures 3 to 6", &[1, 3, 4, 5, 6], &[]),
            ("Figures 1 to 3 and 9", &[1, 2, 3, 9], &[]),
            ("Tables 2 to 4, live: processor 0", &[], &[2, 3, 4]),
            ("Table 1: NTttcp for 120 s", &[], &[1]),
            ("Section V.B: Figure 3", &[], &[]),
            ("64 connections", &[], &[]),
        ] {
            assert_eq!((named(text, "Figure"), named(text, "Table")), (figures.to_vec(), tables.to_vec()), "{text}");
        }
    }
}
