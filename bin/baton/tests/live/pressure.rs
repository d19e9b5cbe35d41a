//! What a program can queue for a peer that never reads: as much as natively, wherever the connection is and however often it has moved.

use crate::scratch::{Scratch, script, text};
use baton_linux::namespace::Namespace;
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Bytes that one write has.
const WRITES: [u32; 3] = [4096, 16_384, 65_536];

/// What is taken natively, by SO_SNDBUF and length of a write: the median of five runs.
static NATIVELY: Mutex<BTreeMap<(u32, u32), u64>> = Mutex::new(BTreeMap::new());

/// What `pressure.py` prints: the bytes taken in all; of one socket SO_SNDBUF, what is not acknowledged, and what is not sent.
struct Taken {
    bytes: u64,
    buffer: u64,
    queued: u64,
    unsent: u64,
}

/// One run of the program.
#[derive(Clone, Copy)]
struct Trial {
    place: &'static str,
    sndbuf: u32,
    write: u32,
    moves: u32,
    both: bool,
}

impl Trial {
    fn run(self, natively: bool) -> Taken {
        let scratch = Scratch::new("pressure");
        let baton = env!("CARGO_BIN_EXE_baton");
        let mut command = Command::new(if natively { "python3" } else { baton });
        if !natively {
            let rule = if self.both { "established" } else { "accepted" };
            command.args(["run", "--rule", rule, "--eager", "--log", &scratch.file("log"), "--", "python3"]);
        }
        command.arg(script("pressure.py")).args([if natively { "-" } else { baton }, self.place]);
        command.args(
            [self.sndbuf, self.write, if natively { 0 } else { self.moves }, u32::from(self.both), 1]
                .map(|number| number.to_string()),
        );
        command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
        let host = Namespace::new().expect("a namespace");
        host.run(|| baton_linux::rtnetlink::set_up(&baton_linux::rtnetlink::open()?, 1, None, None))
            .expect("the loopback device");
        let ran = host.spawn(&mut command).expect("the program").wait_with_output().expect("its output");
        assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
        let numbers: Vec<u64> = text(&ran.stdout).split_whitespace().filter_map(|number| number.parse().ok()).collect();
        let [bytes, buffer, queued, unsent] = numbers[..] else { panic!("four numbers: {}", text(&ran.stdout)) };
        Taken { bytes, buffer, queued, unsent }
    }

    fn natively(self) -> u64 {
        let mut medians = NATIVELY.lock().unwrap_or_else(PoisonError::into_inner);
        *medians.entry((self.sndbuf, self.write)).or_insert_with(|| {
            let mut taken = [(); 5].map(|()| self.run(true).bytes);
            taken.sort_unstable();
            taken[2]
        })
    }

    /// Compares what is taken with the kernel's median of five runs.
    fn compare(self) {
        let (median, moved) = (self.natively(), self.run(false));
        let ratio = moved.bytes as f64 / median as f64;
        let Trial { place, sndbuf, write, moves, both } = self;
        let what = format!("from {place}, SO_SNDBUF {sndbuf}, writes of {write}, {moves} moves, both ends {both}");
        println!("{what}: {} bytes, natively {median}: {ratio:.3}; SO_SNDBUF {} at last", moved.bytes, moved.buffer);
        // The last buffer of the kernel's queue may take up to 64 KB more after a restore.
        let most = if both { 1.2 } else { 1.1 };
        // The peer's kernel counts small segments for more than their payload: of those that the NIC sends it may take 64 KB, not 128.
        let least = if place == "nic" && sndbuf == 65_536 { 0.8 } else { 0.9 };
        assert!((least..=most).contains(&ratio), "{what}: {} bytes, natively {median}", moved.bytes);
        assert!(sndbuf == 0 || moved.buffer == u64::from(2 * sndbuf), "{what}: SO_SNDBUF is {}", moved.buffer);
        assert_eq!(moved.unsent, moved.queued, "{what}: with a closed window nothing is in flight");
    }
}

/// All sizes of buffers and writes.
fn compare_all(place: &'static str, moves: u32, both: bool) {
    for sndbuf in [0, 65_536, 1 << 20] {
        for write in WRITES {
            Trial { place, sndbuf, write, moves, both }.compare();
        }
    }
}

#[test]
fn as_much_is_queued_in_the_kernel_and_on_the_nic() {
    compare_all("kernel", 0, false);
    compare_all("nic", 0, false);
}

#[test]
fn as_much_is_queued_after_moves() {
    compare_all("kernel", 1, false);
    compare_all("nic", 1, false);
    for sndbuf in [0, 65_536, 1 << 20] {
        Trial { place: "kernel", sndbuf, write: 16_384, moves: 10, both: false }.compare();
    }
    Trial { place: "kernel", sndbuf: 65_536, write: 16_384, moves: 100, both: false }.compare();
}

/// The peer's receive buffer holds no more either.
#[test]
fn as_much_is_queued_when_both_ends_move() {
    for sndbuf in [0, 65_536, 1 << 20] {
        Trial { place: "kernel", sndbuf, write: 16_384, moves: 10, both: true }.compare();
    }
}
