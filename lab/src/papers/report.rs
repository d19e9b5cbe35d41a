//! What a document's run reports: its model's parameters, its figures and tables, numbers beside the paper's, where the
//! paper contradicts itself, and the bars.

use crate::bars::Bar;
use serde::Serialize;

/// The report of one document.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The document's word: what follows `baton lab`, and how the names of its bars begin.
    pub word: &'static str,
    /// The paper's title.
    pub title: &'static str,
    /// What runs on which model, in a few sentences.
    pub about: &'static str,
    /// Numbers of the model.
    pub parameters: Vec<Parameter>,
    /// Figures.
    pub figures: Vec<Figure>,
    /// Tables.
    pub tables: Vec<Table>,
    /// Numbers of the paper beside ours.
    pub comparisons: Vec<Comparison>,
    /// Where the paper contradicts itself.
    pub contradictions: Vec<Contradiction>,
    /// Figures and tables of the paper that have no twin here.
    pub absent: Vec<Absent>,
    /// Bars.
    pub bars: Vec<JudgedBar>,
}

impl Report {
    /// Whether every bar that counts holds, but for those of which it is known why they do not.
    pub fn holds(&self) -> bool {
        self.bars.iter().all(|judged| judged.bar.holds || !judged.counted || judged.known.is_some())
    }

    /// Adds a bar that counts: no calibrated value is in it.
    pub fn bar(&mut self, bar: Bar) {
        self.bars.push(JudgedBar { bar, counted: true, known: None });
    }

    /// Gives the reason why the bar with this name does not hold. It is reported as missed, and no run fails for it.
    pub fn explain(&mut self, name: &str, why: &'static str) {
        self.bars.iter_mut().filter(|judged| judged.bar.name == name).for_each(|judged| judged.known = Some(why));
    }

    /// Adds a comparison, and a bar of the model's number over the paper's, which must be 1 but for `tolerance`. The
    /// bar of a calibrated number does not count.
    pub fn compare(&mut self, comparison: Comparison, tolerance: f64) {
        let bar = comparison.ratio().map(|ratio| Bar::near_one(comparison.name, tolerance, ratio));
        self.bars.extend(bar.map(|bar| JudgedBar { bar, counted: !comparison.calibrated, known: None }));
        self.comparisons.push(comparison);
    }

    /// Adds a comparison without a bar.
    pub fn show(&mut self, comparison: Comparison) {
        self.comparisons.push(comparison);
    }

    /// Puts a live number beside the model's and the paper's, and says what is measured.
    pub fn measured(&mut self, name: &str, live: f64, what: &str) {
        for one in self.comparisons.iter_mut().filter(|one| one.name == name) {
            one.live = Some(live);
            let between = if one.why.is_empty() { "" } else { ". " };
            one.why += &format!("{between}Live: {what}");
        }
    }

    /// Puts live numbers into the table with this title, row by row.
    pub fn measured_rows(&mut self, title: &str, rows: &[Vec<f64>]) {
        let table = self.tables.iter_mut().find(|table| table.title == title);
        for (row, live) in table.into_iter().flat_map(|table| &mut table.rows).zip(rows) {
            row.cells.iter_mut().zip(live).for_each(|(cell, live)| cell.live = Some(*live));
        }
    }
}

/// A bar, and whether it counts.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct JudgedBar {
    /// The bar.
    #[serde(flatten)]
    pub bar: Bar,
    /// False if it only repeats a value that the model was calibrated at: it is printed, and nothing follows from it.
    pub counted: bool,
    /// Why it does not hold, if that is known.
    pub known: Option<&'static str>,
}

impl JudgedBar {
    /// What a reader has to know of it, if anything.
    pub fn remark(&self) -> String {
        match self.known {
            Some(why) => format!("known: {why}"),
            None if self.counted => String::new(),
            None => "does not count: calibrated".into(),
        }
    }
}

/// Where a parameter's value comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The paper says it, at this place.
    Paper(&'static str),
    /// Chosen so that this one value of the paper comes out; no other value was looked at.
    Calibrated(&'static str),
    /// Not in the paper: from where else, or why this value.
    Assumed(&'static str),
}

impl Source {
    /// The kind in a word, and the place, value or reason.
    pub fn words(&self) -> (&'static str, &'static str) {
        match self {
            Source::Paper(place) => ("paper", place),
            Source::Calibrated(value) => ("calibrated", value),
            Source::Assumed(reason) => ("assumed", reason),
        }
    }
}

/// A number of the model.
#[derive(Clone, Debug, Serialize)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: f64,
    /// Unit.
    pub unit: &'static str,
    /// Where it comes from.
    pub source: Source,
}

impl Parameter {
    /// A parameter.
    pub fn new(name: impl Into<String>, value: f64, unit: &'static str, source: Source) -> Parameter {
        Parameter { name: name.into(), value, unit, source }
    }
}

/// How a figure is drawn.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// Lines over a linear x axis.
    #[default]
    Lines,
    /// Lines over a logarithmic x axis.
    LogLines,
    /// Lines over two logarithmic axes.
    LogLogLines,
    /// A stack of bars for each of these names. A curve is one part of all stacks; its points' x is the stack's number.
    Stacks(Vec<String>),
}

/// A line of a figure, or one part of its stacks.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Curve {
    /// Its name.
    pub name: String,
    /// (x, y) of the model.
    pub points: Vec<(f64, f64)>,
    /// (x, y) of the paper, as far as it prints them.
    pub paper: Vec<(f64, f64)>,
    /// The y that the paper names without an x, as the level that the curve reaches.
    pub level: Option<f64>,
    /// (x, y) of a live run.
    pub live: Vec<(f64, f64)>,
}

impl Curve {
    /// The model's line alone.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Curve {
        Curve { name: name.into(), points, ..Curve::default() }
    }
}

/// A figure.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figure {
    /// The paper's number and title ("Figure 7: ..."), or a title of our own where the paper has only text.
    pub title: String,
    /// What the x axis shows, and its unit.
    pub x: &'static str,
    /// The same of the y axis.
    pub y: &'static str,
    /// How it is drawn.
    pub shape: Shape,
    /// Its lines or parts.
    pub curves: Vec<Curve>,
    /// What a reader has to know, if anything.
    pub note: String,
}

/// A table's cell: the paper's number, the model's, and the live one.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Cell {
    /// The paper's.
    pub paper: Option<f64>,
    /// The model's.
    pub model: Option<f64>,
    /// The live one.
    pub live: Option<f64>,
}

impl Cell {
    /// A number of the paper and the model's.
    pub fn both(paper: f64, model: f64) -> Cell {
        Cell { paper: Some(paper), model: Some(model), live: None }
    }

    /// A number of the paper that the model does not have.
    pub fn paper(paper: f64) -> Cell {
        Cell { paper: Some(paper), ..Cell::default() }
    }

    /// A number of the model that the paper does not have.
    pub fn model(model: f64) -> Cell {
        Cell { model: Some(model), ..Cell::default() }
    }

    /// A number of a live run alone.
    pub fn live(live: f64) -> Cell {
        Cell { live: Some(live), ..Cell::default() }
    }
}

/// A table's row.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What it is about.
    pub name: String,
    /// A cell for each column.
    pub cells: Vec<Cell>,
}

/// A table.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Table {
    /// The paper's number and title.
    pub title: String,
    /// Names of its columns, with units.
    pub columns: Vec<String>,
    /// Its rows.
    pub rows: Vec<Row>,
    /// What a reader has to know, if anything.
    pub note: String,
}

/// A number of the paper, ours, and why they differ.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The name of its bar.
    pub name: &'static str,
    /// What it is, and where the paper has it.
    pub what: String,
    /// Unit.
    pub unit: &'static str,
    /// The paper's.
    pub paper: Option<f64>,
    /// The model's.
    pub model: Option<f64>,
    /// The live one.
    pub live: Option<f64>,
    /// Why they differ; empty if nothing is known.
    pub why: String,
    /// Whether the model was calibrated at this value, or the value follows from calibrated ones alone.
    pub calibrated: bool,
}

impl Comparison {
    /// The paper's number and the model's, which was calibrated at no value in it.
    pub fn new(name: &'static str, what: impl Into<String>, unit: &'static str, paper: f64, model: f64) -> Comparison {
        let (paper, model) = (Some(paper), Some(model));
        Comparison { name, what: what.into(), unit, paper, model, live: None, why: String::new(), calibrated: false }
    }

    /// A number of the model that the paper does not print.
    pub fn ours(name: &'static str, what: impl Into<String>, unit: &'static str, model: f64) -> Comparison {
        Comparison { paper: None, ..Comparison::new(name, what, unit, f64::NAN, model) }
    }

    /// Says why the numbers differ.
    #[must_use]
    pub fn because(self, why: impl Into<String>) -> Comparison {
        Comparison { why: why.into(), ..self }
    }

    /// Marks a value that the model was calibrated at, or that follows from such values alone.
    #[must_use]
    pub fn calibrated(self) -> Comparison {
        Comparison { calibrated: true, ..self }
    }

    /// The model's number over the paper's.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.model? / self.paper?)
    }
}

/// A place where the paper contradicts itself.
#[derive(Clone, Debug, Serialize)]
pub struct Contradiction {
    /// Where.
    pub place: &'static str,
    /// What it prints there.
    pub printed: String,
    /// What follows from its other numbers, or what it prints elsewhere.
    pub but: String,
}

/// A figure or table of the paper without a twin.
#[derive(Clone, Debug, Serialize)]
pub struct Absent {
    /// Its number and title.
    pub what: &'static str,
    /// Why it has none.
    pub why: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_numbers_stand_beside_those_of_the_model() {
        let row = |model| Row { name: String::new(), cells: [model, 9.0].map(Cell::model).into() };
        let table = Table { title: "Table 1".into(), rows: vec![row(1.0), row(2.0)], ..Table::default() };
        let mut report = Report { tables: vec![table.clone(), Table { title: "Table 2".into(), ..table }], ..Report::default() };
        report.show(Comparison::new("a.one", "one", "%", 1.0, 2.0).because("a reason"));
        report.show(Comparison::new("a.two", "two", "%", 1.0, 2.0));
        report.measured("a.one", 3.0, "here");
        report.measured_rows("Table 1", &[vec![5.0], vec![6.0]]);
        let [one, two] = &report.comparisons[..] else { panic!("two comparisons") };
        assert_eq!((one.live, one.why.as_str(), two.live), (Some(3.0), "a reason. Live: here", None));
        let live = |at: usize| -> Vec<Option<f64>> {
            report.tables[at].rows.iter().flat_map(|row| &row.cells).map(|cell| cell.live).collect()
        };
        assert_eq!(live(0), [Some(5.0), None, Some(6.0), None]);
        assert_eq!(live(1), [None; 4]);
    }
}
