//! `baton stats`: how often connections moved, stayed and came back, by program and reason.

use crate::list::columns::duration;
use crate::list::looks::ask_all;
use crate::tools::{NO_BATON, SocketArgument};
use anyhow::{Result, bail};
use baton_client::tool::Tool;
use baton_protocol::events::ProgramCounts;
use baton_protocol::program::Statistics;
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub const EXAMPLES: &str = "Examples:
  baton stats
  baton stats --json | jq '.[].programs[] | select(.program == \"nginx\") | .refused'

Each try counts: a connection that is wanted on the NIC and refused is tried again, up to once a minute. The counts are those of the
agent's life; 64 programs (16 of a user) and 64 reasons of each kind are told apart, the others are counted together.";

#[derive(Args)]
pub struct StatsArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Print one JSON array, with an object for each agent.
    #[arg(long)]
    json: bool,
}

/// The counters of an agent.
#[derive(Serialize)]
pub struct Counted {
    socket: PathBuf,
    agent_process: u32,
    /// Since the agent's start.
    for_us: u64,
    nic_starts: u32,
    moves: u64,
    failed_moves: u64,
    deferred: u64,
    full: u64,
    colder: u64,
    dropped: u64,
    recovered: u64,
    lost: u64,
    programs: Vec<ProgramCounts>,
}

/// Reads the counters of the agent at a path.
///
/// # Errors
/// If it does not answer.
pub fn look(socket: &Path, process: Option<u32>) -> Result<Counted> {
    let mut tool = Tool::look(socket, process)?;
    let (programs, statistics) = (tool.counts()?, tool.statistics()?);
    Ok(Counted::new(socket, &statistics, programs))
}

impl Counted {
    fn new(socket: &Path, statistics: &Statistics, programs: Vec<ProgramCounts>) -> Counted {
        let &Statistics { agent_process, for_us, nic_starts, moves, failed_moves, deferred, .. } = statistics;
        let &Statistics { full, colder, dropped, recovered, lost, .. } = statistics;
        let socket = socket.to_owned();
        Counted {
            socket,
            agent_process,
            for_us,
            nic_starts,
            moves,
            failed_moves,
            deferred,
            full,
            colder,
            dropped,
            recovered,
            lost,
            programs,
        }
    }

    /// Its lines for people.
    fn lines(&self) -> Vec<String> {
        let Counted { for_us, moves, deferred, recovered, failed_moves, lost, nic_starts, .. } = self;
        let lost = failed_moves + lost;
        let mut lines = vec![format!(
            "in {}: {moves} moves, {deferred} put off, {recovered} restored after a death, {lost} lost; NICs started: {nic_starts}",
            duration(*for_us)
        )];
        let empty = |counts: &BTreeMap<String, u64>| counts.is_empty();
        for program in &self.programs {
            if program.to_nic == 0 && [&program.refused, &program.returned, &program.lost].into_iter().all(empty) {
                continue;
            }
            let user = program.user.map(|user| format!(" (user {user})")).unwrap_or_default();
            lines.push(format!("{}{user}: {} moves to the NIC", program.program, program.to_nic));
            for (what, counts) in [("refused", &program.refused), ("returned", &program.returned), ("lost", &program.lost)] {
                lines.extend(by_reason(counts).map(|(reason, count)| format!("  {count:>7} {what:<8}  {reason}")));
            }
        }
        lines
    }
}

/// The counts, largest first.
fn by_reason(counts: &BTreeMap<String, u64>) -> impl Iterator<Item = (&String, &u64)> {
    let mut counts: Vec<_> = counts.iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    counts.into_iter()
}

/// Prints the counters of all agents.
///
/// # Errors
/// If there is none, or the only one does not answer.
pub fn run(arguments: &StatsArguments) -> Result<()> {
    let all = ask_all(&arguments.socket, |_, socket, process| look(socket, process))?;
    if arguments.json {
        println!("{}", serde_json::to_string(all.as_deref().unwrap_or_default())?);
    }
    let Some(all) = all else { bail!(NO_BATON) };
    if arguments.json {
        return Ok(());
    }
    for (number, counted) in all.iter().enumerate() {
        if all.len() > 1 {
            println!("{}{}", if number > 0 { "\n" } else { "" }, counted.socket.display());
        }
        counted.lines().iter().for_each(|line| println!("{line}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_documented() {
        let document = include_str!("../../../docs/reference/json.md");
        let programs = vec![ProgramCounts::default()];
        let counted = Counted::new(Path::new("/run/baton/agent.sock"), &Statistics::default(), programs);
        let value = serde_json::to_value(counted).expect("JSON");
        for keys in [&value, &value["programs"][0], &value["programs"][0]["rtt"]] {
            for key in keys.as_object().expect("an object").keys() {
                assert!(document.contains(&format!("`{key}`")), "docs/reference/json.md does not name `{key}`");
            }
        }
    }

    #[test]
    fn reasons_stand_below_their_program() {
        let counts = |list: &[(&str, u64)]| list.iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect();
        let program = ProgramCounts {
            user: Some(33),
            program: "nginx".into(),
            to_nic: 120,
            refused: counts(&[
                ("it is in state CLOSE, only ESTABLISHED to LAST-ACK can be moved", 2),
                ("the NIC has no room for it", 17),
            ]),
            returned: counts(&[("fork", 1)]),
            lost: counts(&[]),
            ..ProgramCounts::default()
        };
        let statistics = Statistics { for_us: 7_300_000_000, moves: 121, nic_starts: 2, ..Statistics::default() };
        assert_eq!(
            Counted::new(Path::new("/run/baton/agent.sock"), &statistics, vec![program]).lines(),
            [
                "in 2h: 121 moves, 0 put off, 0 restored after a death, 0 lost; NICs started: 2",
                "nginx (user 33): 120 moves to the NIC",
                "       17 refused   the NIC has no room for it",
                "        2 refused   it is in state CLOSE, only ESTABLISHED to LAST-ACK can be moved",
                "        1 returned  fork",
            ]
        );
    }
}
