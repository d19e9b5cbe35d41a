//! The papers that Baton began with, repeated: models that run the real code in virtual time, and every figure and
//! table beside the paper's (`baton lab`).
//!
//! A document is a module here with a function that makes a [`Report`], and a line in [`DOCUMENTS`]. The rest is the
//! frame's: text, JSON, the page, and the check that a sabotaged model changes what is reported.

pub mod handoff;
pub mod inic;
pub mod lro;
pub mod numa;
pub mod page;
pub mod pictures;
mod plot;
pub mod report;
pub mod rmpp;
pub mod sabotage;
pub mod text;
pub mod twins;

use anyhow::{Context, Result, bail};
use baton_linux::process;
use report::Report;
use sabotage::Sabotage;

/// Adds a live run's numbers to a report of the model. It calls the function with a line on what it does.
pub type Live = fn(&mut Report, Run, &mut dyn FnMut(&str)) -> Result<()>;

/// How a document's models are run, and its live run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Run {
    /// What is wrong with them on purpose.
    pub sabotage: Option<Sabotage>,
    /// Fewer points and shorter runs, where a document's models or its live run take long: enough for what a sabotage
    /// changes, too few for the bars.
    pub short: bool,
    /// What a document counts of our own code is counted, too. That needs valgrind.
    pub callgrind: bool,
}

/// A document.
#[derive(Clone, Copy, Debug)]
pub struct Document {
    /// What follows `baton lab`, and how the names of its bars begin.
    pub word: &'static str,
    /// How many figures the paper numbers.
    pub figures: u8,
    /// How many tables the paper numbers.
    pub tables: u8,
    /// Runs its models. The same each time: no clock, no randomness but seeds.
    pub quick: fn(Run) -> Result<Report>,
    /// Its live run.
    pub live: Live,
    /// Checks what that needs beside root, if anything.
    pub needs: Option<fn() -> Result<()>>,
    /// Sabotages that its models know.
    pub sabotages: &'static [Sabotage],
}

impl Document {
    /// Checks that a live run is possible, before anything else runs.
    ///
    /// # Errors
    /// If something is missing, or callgrind runs, whose cost would be measured. The numbers of a short run mean
    /// nothing.
    pub fn check_live(&self, how: Run) -> Result<()> {
        self.needs.map_or(Ok(()), |needs| needs()).with_context(|| format!("the live run of {}", self.word))?;
        match process::processes(|name| name.starts_with("callgrind")).first() {
            Some(process) if !how.short => {
                bail!("callgrind runs (process {process}), and takes the processors that are measured: wait for its end")
            }
            _ => Ok(()),
        }
    }

    /// Adds the live run's numbers to a report of the model.
    ///
    /// # Errors
    /// If it is not possible, or fails.
    pub fn add_live(&self, report: &mut Report, how: Run, say: &mut dyn FnMut(&str)) -> Result<()> {
        self.check_live(how)?;
        (self.live)(report, how, say).with_context(|| format!("the live run of {}", self.word))
    }
}

/// Every document.
pub const DOCUMENTS: &[Document] = &[handoff::DOCUMENT, rmpp::DOCUMENT, numa::DOCUMENT, inic::DOCUMENT, lro::DOCUMENT];

/// What a sabotage changes in a document's report.
#[derive(Clone, Debug)]
pub struct Change {
    /// The document.
    pub word: &'static str,
    /// What is wrong with its model.
    pub sabotage: Sabotage,
    /// Titles of the figures and tables that change.
    pub changed: Vec<String>,
}

/// The least number of figures and tables that a sabotage has to change.
pub const CHANGES: usize = 2;

/// Runs a document's models with each of its sabotages, and compares with the report of the models as they are, which
/// were run as long.
///
/// # Errors
/// If a model cannot run.
pub fn sabotage(document: &Document, whole: &Report, short: bool) -> Result<Vec<Change>> {
    let change = |sabotage: &Sabotage| {
        let changed = sabotage::changed(whole, &(document.quick)(Run { sabotage: Some(*sabotage), short, ..Run::default() })?);
        Ok(Change { word: document.word, sabotage: *sabotage, changed })
    };
    document.sabotages.iter().map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What holds of every document: its bars, of one whole run; and of short runs that two are equal, and that its
    /// sabotages show.
    #[test]
    fn each_document_holds_repeats_itself_and_shows_its_sabotages() {
        for document in DOCUMENTS {
            let report = (document.quick)(Run::default()).unwrap();
            let text = text::table(&report);
            println!("{text}");
            assert!(report.holds(), "{text}");
            let names = || report.bars.iter().map(|judged| judged.bar.name);
            assert!(names().all(|name| name.strip_prefix(document.word).is_some_and(|rest| rest.starts_with('.'))), "{text}");
            assert!(report.bars.iter().filter(|judged| judged.counted).count() >= 3, "{text}");
            // What the paper numbers is here, or it is said why not.
            for twin in twins::of(document, &report) {
                assert!(twin.titles.is_empty() == twin.why.is_some(), "{}: {twin:?}", document.word);
            }
            // A reason that is not needed any more is taken away.
            assert!(report.bars.iter().all(|judged| judged.known.is_none() || !judged.bar.holds), "{text}");
            assert!(!document.sabotages.is_empty(), "{}", document.word);
            let [short, again] = [(); 2].map(|()| (document.quick)(Run { short: true, ..Run::default() }).unwrap());
            assert_eq!(serde_json::to_string(&short).unwrap(), serde_json::to_string(&again).unwrap(), "{}", document.word);
            for change in sabotage(document, &short, true).unwrap() {
                println!("{change:?}");
                assert!(change.changed.len() >= CHANGES, "{}: {change:?}", document.word);
            }
        }
    }
}
