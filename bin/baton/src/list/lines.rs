//! The lines of `baton ls`.

use super::columns::{Column, bytes, duration, table};
use super::row::{Rate, Row};
use baton_handoff::examine::state_name;
use baton_protocol::program::{Place, Withdrawn};
use baton_protocol::report::NOT_ASKED;
use std::collections::BTreeMap;

/// What is shown of connections.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shown {
    /// Process and program.
    pub process: bool,
    /// A second line with the state.
    pub details: bool,
    /// A line for each event.
    pub events: bool,
    /// Bytes per second.
    pub rates: bool,
    /// The NICs are numbered.
    pub numbers: bool,
}

/// The name of a connection's place; with several NICs it has the NIC's number.
pub fn place(row: &Row, numbers: bool) -> String {
    match (row.info.place, row.info.nic) {
        (Place::Nic, Some(nic)) if numbers => format!("nic{nic}"),
        (Place::Nic, _) => "nic".into(),
        (Place::Kernel, _) => "kernel".into(),
    }
}

/// Bytes per second, or a dash while they are not known.
pub fn rate(rate: Option<Rate>, of: impl Fn(Rate) -> f64) -> String {
    rate.map_or_else(|| "-".into(), |rate| bytes(of(rate)))
}

/// A list of connections: a heading, then a line for each, and a second one with details if wanted.
pub fn connections(rows: &[&Row], shown: Shown, width: Option<usize>) -> Vec<String> {
    let mut columns = vec![Column::text("NUMBER"), Column::text("PLACE"), Column::number("MOVES"), Column::number("SINCE")];
    if shown.rates {
        columns.extend([Column::number("SENT/s"), Column::number("RECV/s")]);
    }
    columns.extend([Column::cut("LOCAL", 15), Column::cut("PEER", 15)]);
    if shown.process {
        columns.push(Column::cut("PROGRAM", 10));
    }
    let cells = |row: &&Row| {
        let info = &row.info;
        let mut cells = vec![
            format!("{}.{}", info.session, info.connection),
            place(row, shown.numbers),
            info.moves.to_string(),
            duration(info.for_us),
        ];
        if shown.rates {
            cells.extend([rate(row.rate, |rate| rate.sent), rate(row.rate, |rate| rate.received)]);
        }
        cells.extend([info.local.clone(), info.peer.clone()]);
        if shown.process {
            cells.push(format!("{}/{}", row.name, info.process));
        }
        cells
    };
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    let lines = table(&columns, &cells, width);
    let widest = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
    let room = width.unwrap_or(usize::MAX);
    let mut out = Vec::new();
    for (at, line) in lines.into_iter().enumerate() {
        let row = at.checked_sub(1).map(|at| rows[at]);
        let why = row.map_or("WHY", |row| &row.info.reason);
        // The reason is never cut: where it does not fit, it stands below.
        let fits = why.is_empty() || widest + 1 + why.chars().count() <= room;
        out.push(if fits { format!("{line:<widest$} {why}").trim_end().to_owned() } else { line });
        let Some(row) = row else { continue };
        let below = if fits { None } else { Some(format!("why: {why}")) };
        let details = if shown.details { details(row) } else { Vec::new() };
        let events = if shown.events { events(row, shown.numbers) } else { Vec::new() };
        out.extend(below.into_iter().chain(details).chain(events).flat_map(|line| wrapped(&line, width)));
    }
    out
}

/// Everything else that is known of a connection.
pub fn details(row: &Row) -> Vec<String> {
    let (info, d) = (&row.info, &row.info.detail);
    let carried = |count: Option<u64>| count.map_or_else(|| "?".into(), |count| bytes(count as f64));
    // Of another user's connection in the kernel these are not known; every other one has a largest segment.
    let known = |text: String| if d.mss == 0 { "?".into() } else { text };
    let mut lines = vec![format!(
        "{} rtt {}, cwnd {}, mss {}, window {}, retransmitted {}; unread {}, in flight {}, unsent {}; sent {}, received {}; \
         made by {}",
        state_name(d.state),
        known(format!("{:.3} ms", f64::from(d.srtt) / 1000.0)),
        known(d.cwnd.to_string()),
        known(d.mss.to_string()),
        known(d.send_window.to_string()),
        known(d.retransmitted.to_string()),
        d.unread,
        d.in_flight,
        d.unsent,
        carried(d.sent),
        carried(d.received),
        if info.made_by == Place::Nic { "nic" } else { "kernel" },
    )];
    if let Some((times, now)) = info.lent {
        let has = if now { "the host's TCP has it now" } else { "on its fast path" };
        lines.push(format!("partial offload: {has}, lent {times} times"));
    }
    if info.dormant {
        lines.push("dormant: it has carried nothing for a while, and the NIC keeps its state in few bytes".into());
    }
    lines
}

/// What has happened to a connection, oldest first.
fn events(row: &Row, numbers: bool) -> Vec<String> {
    if row.events.is_empty() {
        return vec!["nothing has happened to it yet".into()];
    }
    let now = row.events.iter().map(|event| duration(event.ago_us()).len()).max().unwrap_or(0);
    row.events.iter().map(|event| format!("{:>now$} ago: {}", duration(event.ago_us()), event.text(numbers))).collect()
}

/// An indented line, in several if it does not fit.
fn wrapped(line: &str, width: Option<usize>) -> Vec<String> {
    const INDENT: &str = "        ";
    let most = width.unwrap_or(usize::MAX).max(40);
    let mut lines = vec![INDENT.trim_end().to_owned()];
    for word in line.split(' ') {
        let last = lines.len() - 1;
        if lines[last].is_empty() {
            lines[last] = format!("{INDENT}{word}");
        } else if lines[last].chars().count() + 1 + word.chars().count() > most {
            lines.push(format!("{INDENT}{word}"));
        } else {
            lines[last] = format!("{} {word}", lines[last]);
        }
    }
    lines
}

/// The text on a program that runs without Baton, or has connections without Baton.
pub fn withdrawn(one: &Withdrawn) -> String {
    let Withdrawn { process, program, reason, connections, .. } = one;
    match connections {
        0 => format!("{program}/{process} runs without Baton: {reason}"),
        count => format!("{program}/{process} has connections that stay in the kernel (asked {count} times): {reason}"),
    }
}

/// Counts of a list: by place, by state, by program, and why connections are in the kernel.
pub fn summary(rows: &[&Row]) -> Vec<String> {
    let on_nic = rows.iter().filter(|row| row.info.place == Place::Nic).count();
    let moves: u64 = rows.iter().map(|row| u64::from(row.info.moves)).sum();
    let kernel = rows.len() - on_nic;
    let mut lines = vec![format!("{on_nic} on the NIC, {kernel} in the kernel, {moves} moves")];
    let mut add = |heading: &str, counts: BTreeMap<String, [usize; 2]>| {
        if counts.is_empty() {
            return;
        }
        let columns = [Column::number("NIC"), Column::number("KERNEL"), Column::text("")];
        let mut counts: Vec<_> = counts.into_iter().collect();
        counts.sort_by_key(|(name, counts)| (std::cmp::Reverse(counts[0] + counts[1]), name.clone()));
        let cells: Vec<_> =
            counts.into_iter().map(|(name, [nic, kernel])| vec![nic.to_string(), kernel.to_string(), name]).collect();
        let mut table = table(&columns, &cells, None);
        table[0] = format!("{} {heading}", table[0]);
        lines.push(String::new());
        lines.extend(table);
    };
    let count = |name: &dyn Fn(&Row) -> String| {
        let mut counts = BTreeMap::<String, [usize; 2]>::new();
        for row in rows {
            counts.entry(name(row)).or_default()[usize::from(row.info.place == Place::Kernel)] += 1;
        }
        counts
    };
    add("STATE", count(&|row| state_name(row.info.detail.state).into()));
    add("PROGRAM", count(&|row| row.name.clone()));
    add("WHY", count(&|row| if row.info.reason.is_empty() { NOT_ASKED.into() } else { row.info.reason.clone() }));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::row::tests::row;

    fn rows() -> [Row; 2] {
        let mut rows = [row("10.0.0.1:443", "10.0.0.2:50000"), row("[fd00:1:2:3:4:5:6:7]:443", "[fd00:1:2:3:4:5:6:8]:50000")];
        (rows[1].info.place, rows[1].info.nic, rows[1].info.connection) = (Place::Nic, Some(1), 4);
        (rows[1].info.detail.sent, rows[1].info.detail.received) = (Some(123_456_789), Some(17));
        rows
    }

    #[test]
    fn one_line_a_connection() {
        let rows = rows();
        let rows: Vec<&Row> = rows.iter().collect();
        let shown = Shown { process: true, numbers: true, ..Shown::default() };
        assert_eq!(
            connections(&rows, shown, None),
            [
                "NUMBER PLACE  MOVES SINCE LOCAL                    PEER                       PROGRAM   WHY",
                "0.3    kernel     2  1.5s 10.0.0.1:443             10.0.0.2:50000             server/77 asked to",
                "0.4    nic1       2  1.5s [fd00:1:2:3:4:5:6:7]:443 [fd00:1:2:3:4:5:6:8]:50000 server/77 asked to",
            ]
        );
        assert_eq!(
            connections(&rows, Shown::default(), Some(80)),
            [
                "NUMBER PLACE  MOVES SINCE LOCAL                    PEER",
                "0.3    kernel     2  1.5s 10.0.0.1:443             10.0.0.2:50000",
                "        why: asked to",
                "0.4    nic        2  1.5s [fd00:1:2:3:4:5:6:7]:443 [fd00:1:2:3:4:5:6:8]:50000",
                "        why: asked to",
            ]
        );
    }

    #[test]
    fn details_stand_below() {
        let mut rows = rows();
        rows[1].info.reason = String::new();
        let lines = connections(&[&rows[1]], Shown { details: true, ..Shown::default() }, Some(80));
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        let text = lines[2..].iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
        let says = "ESTABLISHED rtt 1.500 ms, cwnd 10, mss 1448, window 0, retransmitted 0; unread 0, in flight 0, unsent 0; sent 123M, received 17; made by kernel";
        assert_eq!(text, says);
    }

    #[test]
    fn a_summary_counts() {
        let rows = rows();
        let lines = summary(&rows.iter().collect::<Vec<_>>());
        assert_eq!(lines[0], "1 on the NIC, 1 in the kernel, 4 moves");
        assert_eq!(lines[1..4], ["", "NIC KERNEL STATE", "  1      1 ESTABLISHED"]);
        assert_eq!(lines[9], "  1      1 asked to");
    }
}
