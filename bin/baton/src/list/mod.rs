//! `baton ls`: the connections of every Baton on this machine.

pub mod columns;
pub mod events;
pub mod expression;
pub mod lines;
pub mod looks;
pub mod row;

use crate::numbers::between;
use crate::tools::{NO_BATON, SocketArgument};
use anyhow::{Result, anyhow, bail};
use baton_protocol::program::ConnectionInfo;
use clap::Args;
use events::Event;
use expression::Expression;
use lines::Shown;
use looks::Seen;
use row::{Row, Sort};
use serde::Serialize;
use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

const EXAMPLES: &str = "Examples:
  baton ls
  baton ls -ip sport = :443
  baton ls -e place = kernel
  baton ls 'place = kernel and not ( dst 10.0.0.0/8 or program = ssh )'
  baton ls --watch=5 --sort rate
  baton ls --json | jq '.[] | select(.place == \"nic\")'";

/// The end of `baton ls --help`.
pub fn help() -> String {
    format!("{EXAMPLES}\n\n{}", expression::HELP)
}

/// The arguments of `baton ls`.
#[derive(Args)]
pub struct ListArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Print one JSON array; with --watch one a look, each on a line.
    #[arg(long)]
    json: bool,
    /// A second line for each: state, round-trip time, windows, queues, bytes.
    #[arg(short = 'i', long = "info")]
    info: bool,
    /// The last 32 events of each: moves and how long they took, refusals, deaths of its NIC, growth of its memory.
    #[arg(short = 'e', long = "events")]
    events: bool,
    /// Process and program.
    #[arg(short = 'p', long = "processes")]
    processes: bool,
    /// Only counts: by place, state, program and reason.
    #[arg(short = 's', long = "summary", conflicts_with_all = ["json", "events"])]
    summary: bool,
    /// By what the list is sorted.
    #[arg(long, value_name = "KEY", default_value = "number")]
    sort: Sort,
    /// Look again and again, every second or as often as said, and show rates.
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "1",
        require_equals = true,
        value_parser = between(0.1, 86_400.0)
    )]
    watch: Option<f64>,
    /// Only connections that this filter matches.
    #[arg(value_name = "FILTER", trailing_var_arg = true, allow_hyphen_values = false)]
    filter: Vec<String>,
}

/// What `baton ls --json` prints of a connection: also where its agent listens, for `--socket`.
#[derive(Serialize)]
struct Listed<'a> {
    socket: &'a Path,
    #[serde(flatten)]
    info: &'a ConnectionInfo,
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<&'a [Event]>,
}

/// `baton ls`.
pub fn list(arguments: &ListArguments) -> Result<bool> {
    let filter = match arguments.filter.join(" ") {
        none if none.trim().is_empty() => None,
        text => Some(text.parse::<Expression>().map_err(|why| anyhow!("the filter `{text}`: {why} (`baton ls --help`)"))?),
    };
    if arguments.sort == Sort::Rate && arguments.watch.is_none() {
        bail!("rates need two looks: `baton ls --watch --sort rate`");
    }
    let mut earlier = HashMap::new();
    loop {
        let looked = looks::look_at_all(&arguments.socket, arguments.events);
        let seen = match (looked, arguments.watch) {
            (Err(error), None) => return Err(error),
            (Err(error), Some(_)) => {
                eprintln!("baton: {error:#}");
                Some(Vec::new())
            }
            (Ok(None), None) => {
                if arguments.json {
                    println!("[]");
                }
                bail!(NO_BATON)
            }
            (Ok(looked), _) => looked,
        };
        let any = seen.is_some();
        let seen = with_rates(seen.unwrap_or_default(), &mut earlier);
        print(arguments, filter.as_ref(), &seen, any)?;
        let Some(seconds) = arguments.watch else { return Ok(true) };
        std::thread::sleep(Duration::from_secs_f64(seconds));
    }
}

/// What tells a connection from all others, from look to look.
type Known = (PathBuf, u32, u32);

/// Adds the rates since the earlier look.
fn with_rates(mut seen: Vec<Seen>, earlier: &mut HashMap<Known, Row>) -> Vec<Seen> {
    let mut now = HashMap::new();
    for Seen { baton, rows, .. } in &mut seen {
        for row in rows {
            let known = (baton.socket.clone(), row.info.session, row.info.connection);
            if let Some(before) = earlier.get(&known) {
                row.follow(before);
            }
            now.insert(known, row.clone());
        }
    }
    *earlier = now;
    seen
}

/// Prints a look, at once: a terminal is not to show half of it.
fn print(arguments: &ListArguments, filter: Option<&Expression>, seen: &[Seen], any: bool) -> Result<()> {
    let is_meant = |row: &&Row| filter.is_none_or(|filter| filter.matches(row));
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let each = seen.iter().flat_map(|seen| {
            let mut rows: Vec<&Row> = seen.rows.iter().filter(is_meant).collect();
            arguments.sort.apply(&mut rows);
            rows.into_iter().map(|row| Listed {
                socket: &seen.baton.socket,
                info: &row.info,
                events: arguments.events.then_some(&row.events),
            })
        });
        writeln!(out, "{}", serde_json::to_string(&each.collect::<Vec<_>>())?)?;
        return Ok(());
    }
    let width = baton_linux::terminal::columns(&out);
    let text = text(arguments, filter, seen, any, width).join("\n");
    match arguments.watch {
        // Home, and everything below is erased.
        Some(_) if std::io::stdout().is_terminal() => writeln!(out, "\x1b[H\x1b[J{text}")?,
        Some(_) => writeln!(out, "{text}\n")?,
        None => writeln!(out, "{text}")?,
    }
    out.flush()?;
    Ok(())
}

/// The lines of a look.
fn text(arguments: &ListArguments, filter: Option<&Expression>, seen: &[Seen], any: bool, width: Option<usize>) -> Vec<String> {
    let is_meant = |row: &&Row| filter.is_none_or(|filter| filter.matches(row));
    let mut lines = Vec::new();
    if !any {
        lines.push(NO_BATON.into());
    }
    for (number, Seen { baton, rows, .. }) in seen.iter().enumerate() {
        if seen.len() > 1 {
            lines.extend((number > 0).then(String::new));
            lines.push(baton.socket.display().to_string());
        }
        let mut rows: Vec<&Row> = rows.iter().filter(is_meant).collect();
        arguments.sort.apply(&mut rows);
        if arguments.summary {
            lines.extend(lines::summary(&rows));
        } else {
            let shown = Shown {
                process: arguments.processes,
                details: arguments.info,
                events: arguments.events,
                rates: arguments.watch.is_some(),
                numbers: baton.nics > 1,
            };
            lines.extend(lines::connections(&rows, shown, width));
        }
        if filter.is_none() {
            lines.extend(seen[number].withdrawn().map(lines::withdrawn));
        }
    }
    lines
}
