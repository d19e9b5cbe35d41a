//! What a program can queue for a peer that never reads: as much as natively, wherever the connection is and however
//! often it has moved, and without more memory. A part of all combinations is tried, drawn from `BATON_FUZZ_SEED` (1);
//! all if `BATON_EVERY_CASE` is set.

use crate::scratch::{Scratch, script, text};
use baton_fuzz::setting;
use baton_linux::namespace::Namespace;
use baton_sim::Rng;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// What SO_SNDBUF is set to, 0 for nothing, and the bytes that one write has.
const BUFFERS: [u32; 3] = [0, 65_536, 1 << 20];
const WRITES: [u32; 3] = [4096, 16_384, 65_536];
/// Where a connection begins, how often it moves, and whether the peer's end moves, too.
const WAYS: [(&str, u32, bool); 7] = [
    ("kernel", 0, false),
    ("nic", 0, false),
    ("kernel", 1, false),
    ("nic", 1, false),
    ("kernel", 10, false),
    ("kernel", 100, false),
    ("kernel", 10, true),
];
/// Runs natively of which the median counts.
const NATIVELY: usize = 5;
/// Programs that run at once: they wait most of the time.
const AT_ONCE: usize = 10;
/// Connections whose memory is compared.
const MANY: u32 = 200;

/// What `pressure.py` prints: the bytes taken in all; of one socket SO_SNDBUF, what is not acknowledged, and what is
/// not sent; and the bytes of memory that all takes.
struct Taken {
    bytes: u64,
    buffer: u64,
    queued: u64,
    unsent: u64,
    memory: u64,
}

/// One run of the program.
#[derive(Clone, Copy)]
struct Trial {
    natively: bool,
    place: &'static str,
    sndbuf: u32,
    write: u32,
    moves: u32,
    both: bool,
    connections: u32,
    /// TCP_NOTSENT_LOWAT, 0 for none.
    lowat: u32,
}

impl Trial {
    fn natively(sndbuf: u32, write: u32, connections: u32) -> Trial {
        Trial { natively: true, place: "kernel", sndbuf, write, moves: 0, both: false, connections, lowat: 0 }
    }

    fn run(self) -> Taken {
        let scratch = Scratch::new("pressure");
        let baton = env!("CARGO_BIN_EXE_baton");
        let mut command = Command::new(if self.natively { "python3" } else { baton });
        if !self.natively {
            let rule = if self.both { "established" } else { "accepted" };
            command.args(["run", "--rule", rule, "--eager", "--log", &scratch.file("log"), "--", "python3"]);
        }
        command.arg(script("pressure.py")).args([if self.natively { "-" } else { baton }, self.place]);
        let numbers = [self.sndbuf, self.write, self.moves, u32::from(self.both), self.connections, self.lowat];
        command.args(numbers.map(|number| number.to_string()));
        command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
        let host = Namespace::new().expect("a namespace");
        host.run(|| baton_linux::rtnetlink::set_up(&baton_linux::rtnetlink::open()?, 1, None, None))
            .expect("the loopback device");
        let ran = host.spawn(&mut command).expect("the program").wait_with_output().expect("its output");
        assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
        let numbers: Vec<u64> = text(&ran.stdout).split_whitespace().filter_map(|number| number.parse().ok()).collect();
        let [bytes, buffer, queued, unsent, memory] = numbers[..] else { panic!("five numbers: {}", text(&ran.stdout)) };
        Taken { bytes, buffer, queued, unsent, memory }
    }

    /// Compares what is taken with the kernel's `median`.
    fn compare(self, taken: &Taken, median: u64) {
        let ratio = taken.bytes as f64 / median as f64;
        let Trial { place, sndbuf, write, moves, both, .. } = self;
        let what = format!("from {place}, SO_SNDBUF {sndbuf}, writes of {write}, {moves} moves, both ends {both}");
        println!("{what}: {} bytes, natively {median}: {ratio:.3}; SO_SNDBUF {} at last", taken.bytes, taken.buffer);
        // The last buffer of the kernel's queue may take up to 64 KB more after a restore.
        let most = if both { 1.2 } else { 1.1 };
        // The peer's kernel counts small segments for more than their payload: of those that the NIC sends it may take
        // 64 KB, not 128. With TCP_NOTSENT_LOWAT what the peer takes is nearly all there is.
        let least = if place == "nic" && (sndbuf == 65_536 || self.lowat > 0) { 0.8 } else { 0.9 };
        assert!((least..=most).contains(&ratio), "{what}: {} bytes, natively {median}", taken.bytes);
        assert!(sndbuf == 0 || taken.buffer == u64::from(2 * sndbuf), "{what}: SO_SNDBUF is {}", taken.buffer);
        assert_eq!(taken.unsent, taken.queued, "{what}: with a closed window nothing is in flight");
    }
}

/// Runs cases, some at once. Returns what each has taken.
fn run_all(cases: &[Trial]) -> Vec<Taken> {
    let (next, taken) = (Mutex::new(cases.iter().enumerate()), Mutex::new(BTreeMap::new()));
    let work = || {
        loop {
            let Some((number, trial)) = next.lock().expect("no panic there").next() else { return };
            let ran = trial.run();
            taken.lock().expect("no panic there").insert(number, ran);
        }
    };
    std::thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(work))));
    taken.into_inner().expect("no panic there").into_values().collect()
}

/// Whether all combinations are to be tried.
fn every() -> bool {
    std::env::var_os("BATON_EVERY_CASE").is_some()
}

/// The lengths of writes to be tried with each buffer, and the ways with each of them.
fn drawn() -> Vec<Trial> {
    let mut rng = Rng::new(setting("BATON_FUZZ_SEED", 1));
    let mut one_of = |all: u32| rng.below(all.into()) as u32;
    let (one_buffer, mut cases) = (one_of(3), Vec::new());
    for (buffer, sndbuf) in (0..).zip(BUFFERS) {
        let one_write = one_of(3);
        for (length, write) in (0..).zip(WRITES) {
            for (place, moves, both) in WAYS {
                // A hundred moves take a while.
                if every() || length == one_write && (moves < 100 || buffer == one_buffer) {
                    cases.push(Trial { natively: false, place, sndbuf, write, moves, both, connections: 1, lowat: 0 });
                }
            }
        }
    }
    cases
}

#[test]
fn as_much_is_queued_as_natively() {
    let moved = drawn();
    let mut combinations: Vec<(u32, u32)> = moved.iter().map(|trial| (trial.sndbuf, trial.write)).collect();
    combinations.dedup();
    let natively = combinations.iter().flat_map(|(sndbuf, write)| [Trial::natively(*sndbuf, *write, 1); NATIVELY]);
    // Those that take long begin first.
    let mut cases: Vec<Trial> = moved.into_iter().chain(natively).collect();
    cases.sort_by_key(|trial| std::cmp::Reverse(trial.moves));
    let taken = run_all(&cases);
    let median = |sndbuf, write| {
        let of = |trial: &Trial| trial.natively && (trial.sndbuf, trial.write) == (sndbuf, write);
        let mut bytes: Vec<u64> = cases.iter().zip(&taken).filter(|(trial, _)| of(trial)).map(|(_, taken)| taken.bytes).collect();
        bytes.sort_unstable();
        bytes[NATIVELY / 2]
    };
    for (trial, taken) in cases.iter().zip(&taken).filter(|(trial, _)| !trial.natively) {
        trial.compare(taken, median(trial.sndbuf, trial.write));
    }
}

/// With TCP_NOTSENT_LOWAT no more is unsent than natively, also if it is set while the connection is on the NIC.
#[test]
fn no_more_is_unsent_than_natively() {
    let natively = Trial { lowat: 16_384, ..Trial::natively(0, 4096, 1) };
    let moved = Trial { natively: false, place: "nic", ..natively };
    let cases: Vec<Trial> = std::iter::repeat_n(natively, NATIVELY).chain([moved]).collect();
    let taken = run_all(&cases);
    let mut bytes: Vec<u64> = taken[..NATIVELY].iter().map(|taken| taken.bytes).collect();
    bytes.sort_unstable();
    moved.compare(&taken[NATIVELY], bytes[NATIVELY / 2]);
}

/// The host's memory for many connections whose peers do not read: the sockets of both ends, Baton's shared memory, and
/// what program and Baton have for themselves.
#[test]
fn connections_whose_peers_do_not_read_take_no_more_memory() {
    for sndbuf in BUFFERS.into_iter().filter(|sndbuf| every() || *sndbuf == 1 << 20) {
        let natively = Trial::natively(sndbuf, 16_384, MANY);
        let moved = [("nic", 0), ("kernel", 2)].map(|(place, moves)| Trial { natively: false, place, moves, ..natively });
        let cases = [natively, moved[0], moved[1]];
        // At once they would take more than the kernel allows all sockets together, if the buffers are large.
        let taken = if sndbuf == 0 { cases.iter().map(|trial| trial.run()).collect() } else { run_all(&cases) };
        for (trial, one) in cases.iter().zip(&taken).skip(1) {
            let ratio = one.memory as f64 / taken[0].memory as f64;
            let what = format!("{MANY} connections from {}, {} moves, SO_SNDBUF {sndbuf}", trial.place, trial.moves);
            println!("{what}: {} bytes of memory, natively {}: {ratio:.3}", one.memory, taken[0].memory);
            // Small queues leave pages of their send memory unused, and Baton's processes are a tenth of all.
            let most = if sndbuf == 65_536 { 1.6 } else { 1.1 };
            assert!(ratio <= most, "{what}: {} bytes of memory, natively {}", one.memory, taken[0].memory);
        }
    }
}
