//! `baton doctor PROGRAM`: which of its connections a Baton would move, without touching anything.

#[cfg(feature = "lab")]
use super::carried::Counters;
use super::look::Line;
use super::subject::Subject;
use anyhow::{Context, Result, bail};
use baton_linux::events::{Poller, Trigger, monotonic_micros};
use baton_linux::{process, reading, tasks};
use serde::Serialize;
use std::collections::BTreeMap;
#[cfg(feature = "lab")]
use std::collections::HashMap;
use std::io::{BufRead, BufReader, IsTerminal};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

/// How long one socket may block the process that looks at it.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time in which a process's times are read.
const GLANCE: Duration = Duration::from_millis(100);
/// Most sockets that may block a looking process: each leaves such a process behind until the program releases it.
const MOST_HELD: usize = 4;
/// Pause between two checks for new findings.
const TICK: Duration = Duration::from_millis(50);

/// Why no saving is predicted.
const NOT_PREDICTED: &str = if cfg!(feature = "lab") {
    "not predicted: `baton plan --save FILE` measures this machine, then --plan FILE predicts"
} else {
    "not predicted: this Baton was compiled without the planner"
};
#[cfg(feature = "lab")]
type Saving = crate::lab::saving::Saving;
/// Without the planner there is never one.
#[cfg(not(feature = "lab"))]
type Saving = ();

/// Processor time, in processors.
#[derive(Serialize, Clone, Copy, Debug, Default, PartialEq)]
pub struct Used {
    /// In user space.
    user: f64,
    /// In the kernel: its system calls, of TCP and of everything else.
    system: f64,
    /// In soft interrupts of the whole machine, the receiving half of TCP of all programs among them.
    machine_softirq: f64,
}

/// What was found.
#[derive(Serialize, Debug, Default)]
pub struct Found {
    subject: String,
    processes: Vec<u32>,
    seconds: f64,
    /// Ctrl-C ended it before its time.
    interrupted: bool,
    /// Connections that were there while it watched.
    connections: usize,
    would_move: usize,
    /// How many of these have sockets in blocking mode, which an attacher leaves in the kernel.
    blocking: usize,
    /// By reason.
    would_stay: BTreeMap<String, usize>,
    /// Of which nothing could be found out.
    unknown: BTreeMap<String, usize>,
    processors: Used,
    /// None: it is not predicted.
    saving: Option<Saving>,
    /// The same in words, or why there is none.
    saving_note: String,
    notes: Vec<String>,
}

/// What is watched, and how.
pub struct Watch<'a> {
    /// As it was named.
    pub name: &'a str,
    /// What it is.
    pub subject: Subject,
    /// Only connections with this local port.
    pub port: Option<u16>,
    /// For so long.
    pub seconds: u32,
    /// Prints JSON.
    pub json: bool,
    /// What the machine's small operations cost, if the saving is to be predicted.
    #[cfg_attr(not(feature = "lab"), expect(dead_code, reason = "only the planner reads it"))]
    pub plan: Option<&'a Path>,
}

/// The process that looks.
struct Looker {
    child: Child,
    lines: Receiver<Line>,
    /// The socket that the process looks at now, and since when, in microseconds of the monotonic clock.
    at: Option<(u64, u64)>,
}

impl Looker {
    fn start(watch: &Watch<'_>, skip: &[u64], without_rules: bool) -> Result<Looker> {
        let mut command = Command::new(std::env::current_exe().context("finding this program's own path")?);
        command.arg("doctor-look").args(watch.subject.arguments());
        command.args(watch.port.iter().flat_map(|port| ["--port".to_owned(), port.to_string()]));
        command.args(without_rules.then_some("--without-rules"));
        if !skip.is_empty() {
            let list: Vec<String> = skip.iter().map(u64::to_string).collect();
            command.args(["--skip", &list.join(",")]);
        }
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("starting who looks")?;
        let out = child.stdout.take().context("its output")?;
        let (to, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(std::result::Result::ok) {
                let Ok(line) = serde_json::from_str(&line) else { return };
                if to.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Looker { child, lines, at: None })
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        // A process that is blocked by a program ends when the program releases it.
        let _ = self.child.try_wait();
    }
}

impl Looker {
    /// Whether the process only waits for a processor, which it gets when no other process wants it.
    fn wants_processor(&self) -> bool {
        matches!(tasks::activity(self.child.id(), self.child.id()), tasks::Activity::Runs)
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        self.end();
    }
}

/// Times of a process, in clock ticks: user, system. None if they are not to be had in time.
fn ticks(one: u32) -> Option<(u64, u64)> {
    reading::within(one, GLANCE, move || {
        let text = std::fs::read_to_string(format!("/proc/{one}/stat")).ok()?;
        times(&text)
    })?
}

/// User and system time in a line of /proc/PID/stat, whose second field may have any letters.
fn times(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// Ticks of soft interrupts on all processors.
fn softirq() -> u64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    text.lines().next().and_then(|line| line.split_whitespace().nth(7)?.parse().ok()).unwrap_or(0)
}

/// Time since then, in microseconds of the monotonic clock.
fn since(then: u64) -> Duration {
    Duration::from_micros(monotonic_micros().saturating_sub(then))
}

/// Watches, and prints the result.
///
/// # Errors
/// If the processes are another user's, or there are none.
pub fn run(watch: &Watch<'_>) -> Result<()> {
    let processes = watch.subject.processes();
    let Some(first) = processes.first() else { bail!("{} has no process", watch.name) };
    let (user, own) = (process::user_of(*first).unwrap_or(0), process::user());
    if own != 0 && user != own {
        bail!("process {first} belongs to user {user}: run baton doctor as root, or as that user");
    }
    let mut found = Found { subject: watch.name.to_owned(), saving_note: NOT_PREDICTED.into(), ..Found::default() };
    if own != 0 {
        let note = "the firewall's rules, IPsec's policies and filters were not looked at: that needs root";
        found.notes.push(note.into());
    }
    let before: BTreeMap<u32, (u64, u64)> = processes.iter().filter_map(|one| Some((*one, ticks(*one)?))).collect();
    #[cfg(feature = "lab")]
    let carried = watch.plan.and_then(|_| super::carried::look(*first));
    let (began, softirq_before) = (monotonic_micros(), softirq());
    let mut states = BTreeMap::new();
    observe(watch, own != 0, began, &mut found, &mut states)?;
    let seconds = since(began).as_secs_f64();
    found.seconds = seconds;
    found.processes = watch.subject.processes();
    let mut spent = (0, 0);
    for one in &found.processes {
        let (was, Some(is)) = (before.get(one).copied().unwrap_or((0, 0)), ticks(*one)) else { continue };
        spent = (spent.0 + is.0.saturating_sub(was.0), spent.1 + is.1.saturating_sub(was.1));
    }
    // USER_HZ, which is 100 wherever this runs.
    let of = |ticks: u64| ticks as f64 / 100.0 / seconds.max(0.01);
    let machine_softirq = of(softirq().saturating_sub(softirq_before));
    found.processors = Used { user: of(spent.0), system: of(spent.1), machine_softirq };
    #[cfg(feature = "lab")]
    if let Some(file) = watch.plan {
        // A tick is a hundredth of a second.
        predict(&mut found, file, carried.zip(super::carried::look(*first)), &states, (spent.0 + spent.1) * 10_000_000);
    }
    count(&mut found, states);
    if watch.json {
        println!("{}", serde_json::to_string(&found)?);
    } else {
        lines(&found).iter().for_each(|line| println!("{line}"));
    }
    Ok(())
}

/// Predicts what is saved if those connections are on a NIC that would move. Says why if it cannot.
#[cfg(feature = "lab")]
fn predict(
    found: &mut Found,
    file: &Path,
    carried: Option<(HashMap<u64, Counters>, HashMap<u64, Counters>)>,
    states: &BTreeMap<u64, State>,
    program: u64,
) {
    let Some((before, after)) = carried else {
        found.saving_note = "not predicted: the kernel did not say in time what the connections carry".into();
        return;
    };
    let moving = states.iter().filter(|(_, state)| matches!(state, State::Moves { .. }));
    let since = |inode| Some(after.get(inode)?.since(&before.get(inode).copied().unwrap_or_default()));
    let carried: Vec<_> = moving.filter_map(|(inode, _)| since(inode)).map(|one| (one.bytes, one.segments)).collect();
    match crate::lab::saving::predict(file, &carried, found.seconds, program) {
        Ok(saving) => (found.saving_note, found.saving) = (saving.text(file), Some(saving)),
        Err(error) => found.saving_note = format!("not predicted: {error:#}"),
    }
}

/// The findings on a connection.
enum State {
    Moves { blocking: bool },
    Stays(String),
    Unknown(String),
}

fn count(found: &mut Found, states: BTreeMap<u64, State>) {
    found.connections = states.len();
    for state in states.into_values() {
        match state {
            State::Moves { blocking } => {
                found.would_move += 1;
                found.blocking += usize::from(blocking);
            }
            State::Stays(why) => *found.would_stay.entry(why).or_default() += 1,
            State::Unknown(why) => *found.unknown.entry(why).or_default() += 1,
        }
    }
}

/// Looks until the time is over, or Ctrl-C.
fn observe(
    watch: &Watch<'_>,
    without_rules: bool,
    began: u64,
    found: &mut Found,
    states: &mut BTreeMap<u64, State>,
) -> Result<()> {
    // This comes before the other process starts, which has to leave Ctrl-C to this one.
    let signals = process::signal_descriptor(&[libc::SIGINT, libc::SIGTERM])?;
    let poller = Poller::new()?;
    poller.add(signals.as_fd(), 0, Trigger::Readable)?;
    let (mut skip, mut events) = (Vec::new(), Vec::new());
    let mut looker = Looker::start(watch, &skip, without_rules)?;
    let (limit, mut rounds) = (Duration::from_secs(u64::from(watch.seconds)), 0u64);
    // Numbers of sockets that were found and are still to be looked at, and of sockets that were closed before a look.
    let (mut ahead, mut gone) = (0usize, 0usize);
    let shows = std::io::stderr().is_terminal() && !watch.json;
    while (since(began) < limit || rounds == 0 && since(began) < limit + PATIENCE * 2) && !found.interrupted {
        poller.wait(Some(TICK), &mut events)?;
        found.interrupted = !events.is_empty();
        loop {
            match looker.lines.try_recv() {
                Ok(Line::New(number)) => ahead = number,
                Ok(Line::Begin(inode)) => {
                    ahead = ahead.saturating_sub(1);
                    looker.at = Some((inode, monotonic_micros()));
                }
                Ok(Line::Gone(_)) => {
                    looker.at = None;
                    gone += 1;
                }
                Ok(Line::Moves(inode, blocking)) => {
                    looker.at = None;
                    states.insert(inode, State::Moves { blocking });
                }
                Ok(Line::Stays(inode, why)) => {
                    looker.at = None;
                    states.insert(inode, State::Stays(why));
                }
                Ok(Line::Other) => looker.at = None,
                Ok(Line::Closed(process, why)) => {
                    looker.at = None;
                    let advice = "run baton doctor as root (kernel.yama.ptrace_scope may keep users from their own processes)";
                    found.notes.push(format!("process {process} does not show its sockets: {why}; {advice}"));
                }
                Ok(Line::Round) => rounds += 1,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) if watch.subject.processes().is_empty() => {
                    found.notes.push("the program has ended".into());
                    return Ok(());
                }
                Err(TryRecvError::Disconnected) => bail!("who looks at the sockets has ended: see the message above"),
            }
        }
        if let Some((inode, at)) = looker.at
            && since(at) >= PATIENCE
            && !looker.wants_processor()
        {
            let why = "its socket does not answer: its program holds it";
            states.insert(inode, State::Unknown(why.into()));
            skip.push(inode);
            if skip.len() >= MOST_HELD {
                found.notes.push("several sockets do not answer: the others were not looked at".into());
                break;
            }
            // Sockets that are known already need not be looked at again.
            let all: Vec<u64> = skip.iter().chain(states.keys()).copied().collect();
            looker = Looker::start(watch, &all, without_rules)?;
        }
        if shows {
            let seconds = since(began).as_secs().min(limit.as_secs());
            eprint!(
                "\r\x1b[Kwatching {}: {seconds} s of {}, {} connections (Ctrl-C: the result so far)",
                watch.name,
                limit.as_secs(),
                states.len()
            );
        }
    }
    if shows {
        eprint!("\r\x1b[K");
    }
    if ahead > 0 {
        found.notes.push(format!("{ahead} more sockets were not looked at in this time: give more --seconds"));
    }
    if gone > 0 {
        found.notes.push(format!("{gone} sockets were closed before they could be looked at"));
    }
    Ok(())
}

/// The result for people.
fn lines(found: &Found) -> Vec<String> {
    let Found { subject, processes, seconds, connections, would_move, would_stay, unknown, processors, .. } = found;
    let numbers: Vec<String> = processes.iter().take(8).map(u32::to_string).collect();
    let more = if processes.len() > numbers.len() { ", …" } else { "" };
    let early = if found.interrupted { ", until Ctrl-C" } else { "" };
    let mut lines = vec![
        format!(
            "{subject} (processes {}{more}), watched for {seconds:.1} s{early}: {connections} connections",
            numbers.join(", ")
        ),
        format!("{would_move:>7} would move (`baton run` moves those that carry more than 64 KiB, unless a rule says otherwise)"),
    ];
    if found.blocking > 0 {
        let blocking = found.blocking;
        lines.push(format!(
            "        {blocking:>7}  of them under `baton run` alone: `baton attach` leaves sockets in blocking mode in the kernel"
        ));
    }
    lines.push(format!("{:>7} would stay in the kernel", would_stay.values().sum::<usize>()));
    let by_reason = |reasons: &BTreeMap<String, usize>| {
        let mut reasons: Vec<_> = reasons.iter().map(|(why, count)| (*count, why.clone())).collect();
        reasons.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
        reasons.into_iter().map(|(count, why)| format!("        {count:>7}  {why}")).collect::<Vec<_>>()
    };
    lines.extend(by_reason(would_stay));
    if !unknown.is_empty() {
        lines.push(format!("{:>7} unknown", unknown.values().sum::<usize>()));
        lines.extend(by_reason(unknown));
    }
    let Used { user, system, machine_softirq } = processors;
    lines.push(format!(
        "processor time: {:.2} processors, {user:.2} of it in user space and {system:.2} in the kernel, for TCP and everything else",
        user + system
    ));
    lines.push(format!("soft interrupts of the whole machine, of all programs: {machine_softirq:.2} processors"));
    lines.push(format!("saving: {}", found.saving_note));
    lines.extend(found.notes.iter().map(|note| format!("note: {note}")));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_whatever_the_name_is() {
        let line = "77 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 120 45 0 0 20 0 1 0 5 6 7";
        assert_eq!(times(line), Some((120, 45)));
        assert_eq!(times("77 (x) S 1"), None);
    }

    #[test]
    fn a_result_says_what_moves_what_stays_and_that_no_saving_is_predicted() {
        let mut found = Found {
            subject: "nginx.service".into(),
            processes: vec![7, 8],
            seconds: 10.0,
            processors: Used { user: 0.3, system: 0.55, machine_softirq: 0.4 },
            saving_note: NOT_PREDICTED.into(),
            ..Found::default()
        };
        let states = [
            State::Moves { blocking: false },
            State::Moves { blocking: false },
            State::Stays("a".into()),
            State::Unknown("b".into()),
        ];
        count(&mut found, states.into_iter().enumerate().map(|(at, state)| (at as u64, state)).collect());
        let lines = lines(&found);
        assert_eq!(lines[0], "nginx.service (processes 7, 8), watched for 10.0 s: 4 connections");
        assert!(lines[1].starts_with("      2 would move") && lines[3].ends_with("      1  a"), "{lines:#?}");
        assert!(lines.iter().any(|line| line.starts_with("saving: not predicted")), "{lines:#?}");
        assert_eq!(serde_json::to_value(&found).expect("JSON")["saving"], serde_json::Value::Null);
    }
}
