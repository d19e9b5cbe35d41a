//! The matrix: every intercepted call that takes a socket or a set, with each flag alone and in pairs, blocking or not,
//! with and without a time limit, with bad pointers, lengths and counts, on connections that have been through this and
//! that (`c/matrix.c`). Result, errno, bytes and events are the kernel's, where the connection is in the kernel under
//! the library, on the NIC, and while it moves; but for the differences in `judge`.
//!
//! The kernel's own are played three times in the same run: what comes of a case in one of them counts. What differs is
//! played a second time, by itself, and counts only if it differs again. `make test` plays cases that have differed
//! once. `make conformance` plays a sample, drawn from `BATON_FUZZ_SEED`, or as many cases as `BATON_CASES` says (all),
//! from `BATON_FIRST_CASE` on.

mod judge;

use crate::compiled::compile;
use crate::library::set_up_loopback;
use crate::scratch::{Scratch, text};
use baton_linux::namespace::Namespace;
use baton_netem::Rng;
use judge::{Answer, Found, Tally};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Cases of each call in a sample.
const SAMPLE: usize = 8;
/// Cases that one process plays.
const BATCH: usize = 500;
/// Batches that are played at once: most of the time a case waits for a move.
const AT_ONCE: usize = 3;
/// How often each case is played natively.
const NATIVELY: usize = 3;

/// Where connections are: the word for the program, and the arguments of `baton run`.
struct Column {
    name: &'static str,
    word: &'static str,
    arguments: &'static [&'static str],
}

const NATIVE: Column = Column { name: "native", word: "kernel", arguments: &[] };
const COLUMNS: [Column; 3] = [
    Column { name: "library", word: "kernel", arguments: &["--rule", "never"] },
    Column { name: "nic", word: "nic", arguments: &["--rule", "established", "--eager"] },
    Column { name: "moving", word: "moving", arguments: &["--flip", "0..1"] },
];

/// A case's number, and how often its peer acts natively until the call returns, if that is known and always the same.
#[derive(Clone, Copy)]
struct Case {
    number: u32,
    acts: Option<u8>,
}

/// The program, and temporary files for a process of it.
struct Stage {
    program: PathBuf,
    scratch: Scratch,
}

impl Stage {
    fn new(program: &Path) -> Stage {
        Stage { program: program.to_owned(), scratch: Scratch::new("matrix-stage") }
    }

    /// Starts the program for these cases. Returns what it has printed, a line each, and how it has ended if it has not
    /// played all.
    fn run(&self, column: &Column, cases: &[Case]) -> (Vec<Answer>, String) {
        let list = self.scratch.file("cases");
        let mut lines = File::create(&list).expect("a file");
        for case in cases {
            writeln!(lines, "{} {}", case.number, case.acts.map_or(-1, i32::from)).expect("a line");
        }
        let namespace = Namespace::new().expect("a namespace");
        let log = self.scratch.file("log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        if column.arguments.is_empty() {
            set_up_loopback(&namespace);
            command = Command::new(&self.program);
        } else {
            command.args(["run", "--log", &log]).args(column.arguments).arg("--").arg(&self.program);
        }
        command.arg(column.word).env("TMPDIR", &self.scratch.0).env_remove("BATON_SOCKET");
        command.stdin(File::open(&list).expect("the list")).stdout(Stdio::piped()).stderr(Stdio::piped());
        let ran = namespace.spawn(&mut command).expect("a program").wait_with_output().expect("its output");
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        assert!(log.is_empty(), "{}: {log}", column.name);
        let answers = text(&ran.stdout).lines().filter_map(Answer::parse).collect();
        (answers, format!("dies: {} {}", ran.status, text(&ran.stderr).trim()))
    }

    /// What comes of these cases, in their order. A case that ends the program has that as its answer, and the others
    /// go on in a new one.
    fn play(&self, column: &Column, cases: &[Case]) -> Vec<Answer> {
        let mut all = Vec::new();
        while all.len() < cases.len() {
            let left = &cases[all.len()..];
            let (answers, end) = self.run(column, left);
            let played = answers.len();
            assert!(answers.iter().zip(left).all(|(answer, case)| answer.number == case.number));
            all.extend(answers);
            if let Some(case) = left.get(played)
                && !all.last().is_some_and(|last| played > 0 && last.has("hangs"))
            {
                all.push(Answer::of(case.number, &end));
            }
        }
        all
    }

    /// Plays cases natively, then in these columns. Returns those that differ.
    fn judge(&self, numbers: &[u32], columns: &[&Column]) -> Vec<Found> {
        let unknown: Vec<_> = numbers.iter().map(|number| Case { number: *number, acts: None }).collect();
        let native: Vec<_> = (0..NATIVELY).map(|_| self.play(&NATIVE, &unknown)).collect();
        let ways = |at: usize| native.iter().map(|run| run[at].clone()).collect::<Vec<_>>();
        let acts =
            |at: usize| ways(at).iter().map(|answer| answer.acts).reduce(|one, other| one.filter(|_| one == other)).flatten();
        let cases: Vec<_> = unknown.iter().enumerate().map(|(at, case)| Case { acts: acts(at), ..*case }).collect();
        let mut found = Vec::new();
        for column in columns {
            for (at, ours) in self.play(column, &cases).into_iter().enumerate() {
                let native = ways(at);
                if !native.iter().any(|native| native.what == ours.what) {
                    found.push(Found { column: column.name, native, ours });
                }
            }
        }
        found
    }
}

/// The numbers of all cases, by calls: each begins where the one before it ends.
fn calls(program: &Path) -> Vec<std::ops::Range<u32>> {
    let listed = Command::new(program).arg("calls").output().expect("the program");
    let mut end = 0;
    let counts = text(&listed.stdout)
        .lines()
        .map(|line| line.rsplit(' ').next().and_then(|count| count.parse().ok()).expect(line))
        .collect::<Vec<u32>>();
    counts
        .into_iter()
        .map(|count| {
            end += count;
            end - count..end
        })
        .collect()
}

/// The cases that are to be played.
fn drawn(program: &Path) -> Vec<u32> {
    let setting = |name| std::env::var(name).ok();
    let Some(count) = setting("BATON_CASES") else { return mended(program) };
    let calls = calls(program);
    if count == "sample" {
        let mut rng = Rng::new(baton_fuzz::setting("BATON_FUZZ_SEED", 1));
        let of_each = calls.iter().flat_map(|range| std::iter::repeat_n(range, SAMPLE));
        let sample: BTreeSet<_> =
            of_each.map(|range| range.start + rng.below(u64::from(range.end - range.start)) as u32).collect();
        return sample.into_iter().collect();
    }
    let total = calls.last().expect("calls").end;
    let first: u32 = setting("BATON_FIRST_CASE").map_or(0, |first| first.parse().expect("BATON_FIRST_CASE: a number"));
    let count = if count == "all" { total } else { count.parse().expect("BATON_CASES: a number, sample or all") };
    (first..total.min(first.saturating_add(count))).collect()
}

/// Cases that have differed, as the program names them.
const MENDED: [&str; 13] = [
    "readv; second hole; short-limit; a part and FIN",
    "shutdown RD; usual; blocking; nothing",
    "readv; empty pieces; long-limit; nothing, FIN comes",
    "readv; empty pieces; low-water; RST",
    "recvfrom PEEK; length 0; long-limit; nothing, RST comes",
    "recvmsg CLOEXEC; usual; non-blocking; a part, more comes",
    "recvmmsg; usual; blocking; a part and RST",
    "recvmmsg; usual; non-blocking; RST",
    "recvmmsg; count 0; blocking; a part and RST",
    "recvmmsg; message hole; non-blocking; a part and RST",
    "select except; usual; short-limit; RST",
    "select except; usual; blocking; nothing, RST comes",
    "getsockopt TCP_REPAIR; usual; blocking; a part",
];

/// Their numbers.
fn mended(program: &Path) -> Vec<u32> {
    let listed = Command::new(program).arg("cases").output().expect("the program");
    let listed = text(&listed.stdout);
    let numbers: BTreeMap<&str, u32> = listed
        .lines()
        .filter_map(|line| line.trim_end_matches(" |").split_once(' '))
        .map(|(number, case)| (case, number.parse().expect("a number")))
        .collect();
    MENDED.iter().map(|case| *numbers.get(case).unwrap_or_else(|| panic!("no case is {case:?}"))).collect()
}

#[test]
fn calls_do_what_they_do_natively() {
    let scratch = Scratch::new("matrix");
    let program = compile("matrix", &scratch);
    play(&program, &drawn(&program));
}

/// Plays these cases, and fails if any differs twice.
fn play(program: &Path, numbers: &[u32]) {
    let batches: Vec<_> = numbers.chunks(BATCH).collect();
    let (next, suspects) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        let stage = Stage::new(program);
        while let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = stage.judge(batch, &COLUMNS.each_ref());
            suspects.lock().expect("a list").extend(found);
        }
    };
    std::thread::scope(|scope| (0..AT_ONCE.min(batches.len())).for_each(|_| drop(scope.spawn(work))));
    let suspects = suspects.into_inner().expect("a list");
    let mut tally = Tally::new(numbers.len(), suspects.len());
    let stage = Stage::new(program);
    for column in &COLUMNS {
        let numbers: Vec<_> =
            suspects.iter().filter(|found| found.column == column.name).map(|found| found.ours.number).collect();
        for batch in numbers.chunks(BATCH) {
            stage.judge(batch, &[column]).into_iter().for_each(|found| tally.note(found));
        }
    }
    println!("{tally}");
    assert!(tally.holds(), "calls differ from the kernel's:\n{tally}");
}
