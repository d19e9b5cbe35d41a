//! Tables for terminals: columns as wide as what is in them, and lines that fit.

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Its heading.
    pub name: &'static str,
    /// Numbers stand at the right.
    pub right: bool,
    /// How far it may be shortened where lines do not fit, or None if not at all.
    pub shortest: Option<usize>,
    /// It is left out where there is less room than that.
    pub optional: bool,
}

impl Column {
    /// Text that is never shortened.
    pub const fn text(name: &'static str) -> Column {
        Column { name, right: false, shortest: None, optional: false }
    }

    /// A number.
    pub const fn number(name: &'static str) -> Column {
        Column { name, right: true, shortest: None, optional: false }
    }

    /// Text that may be shortened.
    pub const fn cut(name: &'static str, shortest: usize) -> Column {
        Column { name, right: false, shortest: Some(shortest), optional: false }
    }

    /// Text that may be shortened, and left out.
    pub const fn optional(name: &'static str, shortest: usize) -> Column {
        Column { name, right: false, shortest: Some(shortest), optional: true }
    }
}

/// What stands between two columns.
const GAP: usize = 1;
/// Marks where a text was shortened.
const CUT: char = '…';

/// A table's heading and lines. With a width, no line is longer: columns at the right are shortened before those at the
/// left of them. Without one, nothing is shortened.
pub fn table(columns: &[Column], rows: &[Vec<String>], width: Option<usize>) -> Vec<String> {
    let wide = |text: &str| text.chars().count();
    let mut widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(at, column)| {
            rows.iter().map(|row| row.get(at).map_or(0, |text| wide(text))).max().unwrap_or(0).max(wide(column.name))
        })
        .collect();
    let mut shown: Vec<usize> = (0..columns.len()).collect();
    if let Some(width) = width {
        fit(columns, &mut widths, &mut shown, width);
    }
    let heading: Vec<String> = columns.iter().map(|column| column.name.to_owned()).collect();
    std::iter::once(&heading)
        .chain(rows)
        .map(|row| {
            let cells: Vec<String> = shown
                .iter()
                .map(|&at| {
                    let text = shortened(row.get(at).map_or("", String::as_str), widths[at]);
                    let room = " ".repeat(widths[at] - wide(&text));
                    if columns[at].right { room + &text } else { text + &room }
                })
                .collect();
            let line = cells.join(&" ".repeat(GAP));
            shortened(line.trim_end(), width.unwrap_or(usize::MAX))
        })
        .collect()
}

/// Shortens columns from the right until a line fits, and then leaves out columns that may be left out.
fn fit(columns: &[Column], widths: &mut [usize], shown: &mut Vec<usize>, width: usize) {
    let total = |widths: &[usize], shown: &[usize]| {
        shown.iter().map(|&at| widths[at]).sum::<usize>() + GAP * shown.len().saturating_sub(1)
    };
    for at in (0..columns.len()).rev() {
        let excess = total(widths, shown).saturating_sub(width);
        if excess == 0 {
            return;
        }
        let Some(shortest) = columns[at].shortest else { continue };
        let least = shortest.max(columns[at].name.chars().count()).min(widths[at]);
        if columns[at].optional && widths[at] < least + excess {
            shown.retain(|one| *one != at);
        } else {
            widths[at] = widths[at].saturating_sub(excess).max(least);
        }
    }
}

/// A text in this many columns, with a mark where it was shortened.
pub fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut out: String = text.chars().take(width.saturating_sub(1)).collect();
    if width > 0 {
        out.push(CUT);
    }
    out
}

/// A number of bytes in at most five columns, with a factor of 1000.
pub fn bytes(count: f64) -> String {
    const UNITS: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let (mut value, mut unit) = (count.max(0.0), 0);
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit > 0 && value < 9.95 { format!("{value:.1}{}", UNITS[unit]) } else { format!("{value:.0}{}", UNITS[unit]) }
}

/// A duration in few columns.
pub fn duration(micros: u64) -> String {
    match micros {
        0..1_000 => format!("{micros}us"),
        1_000..10_000 => format!("{:.1}ms", micros as f64 / 1e3),
        10_000..1_000_000 => format!("{}ms", micros / 1_000),
        1_000_000..60_000_000 => format!("{:.1}s", micros as f64 / 1e6),
        60_000_000..3_600_000_000 => format!("{}min", micros / 60_000_000),
        3_600_000_000..172_800_000_000 => format!("{}h", micros / 3_600_000_000),
        _ => format!("{}d", micros / 86_400_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 4] =
        [Column::text("NUMBER"), Column::number("MOVES"), Column::cut("LOCAL", 9), Column::optional("WHY", 5)];

    fn rows() -> Vec<Vec<String>> {
        let row = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
        vec![
            row(["0.1", "7", "10.0.0.1:443", "asked to"]),
            row(["0.12", "12345", "[fd00::1234]:443", "the program has set an option"]),
        ]
    }

    #[test]
    fn without_a_width_nothing_is_shortened() {
        let lines = table(&COLUMNS, &rows(), None);
        assert_eq!(
            lines,
            [
                "NUMBER MOVES LOCAL            WHY",
                "0.1        7 10.0.0.1:443     asked to",
                "0.12   12345 [fd00::1234]:443 the program has set an option",
            ]
        );
    }

    #[test]
    fn lines_fit() {
        for width in 1..80 {
            let lines = table(&COLUMNS, &rows(), Some(width));
            assert!(lines.iter().all(|line| line.chars().count() <= width), "{width}: {lines:#?}");
        }
        assert_eq!(table(&COLUMNS, &rows(), Some(40))[2], "0.12   12345 [fd00::1234]:443 the progr…");
        assert_eq!(table(&COLUMNS, &rows(), Some(30))[2], "0.12   12345 [fd00::1234]:443", "WHY is left out first");
        assert_eq!(table(&COLUMNS, &rows(), Some(24))[2], "0.12   12345 [fd00::123…", "what is cut is marked");
        assert_eq!(table(&COLUMNS, &[], Some(80)), ["NUMBER MOVES LOCAL WHY"]);
    }

    #[test]
    fn figures_are_short() {
        let cases = [
            (0.0, "0"),
            (999.0, "999"),
            (999.7, "1.0k"),
            (1500.0, "1.5k"),
            (9960.0, "10k"),
            (123_456.0, "123k"),
            (1e9, "1.0G"),
            (2.5e13, "25T"),
        ];
        cases.iter().for_each(|(count, text)| assert_eq!(bytes(*count), *text, "{count}"));
        let cases = [
            (0, "0us"),
            (1_500, "1.5ms"),
            (12_345, "12ms"),
            (1_500_000, "1.5s"),
            (61_000_000, "1min"),
            (7_200_000_000, "2h"),
            (200_000_000_000, "2d"),
        ];
        cases.iter().for_each(|(micros, text)| assert_eq!(duration(*micros), *text, "{micros}"));
    }
}
