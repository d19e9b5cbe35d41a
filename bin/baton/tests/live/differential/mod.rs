//! The same random peer is played to two sockets of the kernel's and to a connection on the NIC, thousands at a time
//! through one TAP: the NIC's answers and what its program sees are the kernel's, but for the differences in `meant`.
//!
//! Where the kernel's two answers differ the script depends on the moment, and is not judged. `BATON_SCRIPTS` sets how
//! many are played, `BATON_FIRST_SCRIPT` the number of the first.

mod broken;
mod judge;
mod listening;
mod meant;
mod peer;
mod script;
mod stage;

use baton_fuzz::setting;
use baton_wire::Flags;
use broken::Broken;
use judge::Tally;
use meant::MEANT;
use script::{Script, Segment, Step};
use stage::{BATCH, LANES, NIC, Stage};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Stages that play at once, each with a TAP of its own: a step waits most of the time.
const STAGES: usize = 3;

/// The NIC answers any peer as the kernel does, and its program sees the same, but for the list of differences.
#[test]
fn a_random_peer_is_answered_as_by_the_kernel() {
    let (first, count) = (setting("BATON_FIRST_SCRIPT", 0), setting("BATON_SCRIPTS", BATCH as u64));
    let next = AtomicU64::new(first);
    let (tally, suspects) = (Mutex::new(Tally::default()), Mutex::new(Vec::new()));
    let play = || {
        let mut stage = Stage::new();
        loop {
            let from = next.fetch_add(BATCH as u64, Ordering::Relaxed);
            let numbers: Vec<u64> = (from..(from + BATCH as u64).min(first + count)).collect();
            if numbers.is_empty() {
                return;
            }
            let differing = stage.judge(&numbers, &tally);
            suspects.lock().expect("a list").extend(differing);
        }
    };
    let stages = count.div_ceil(BATCH as u64).min(STAGES as u64);
    std::thread::scope(|scope| (0..stages).for_each(|_| drop(scope.spawn(play))));
    // What differs once may be a frame that a busy machine has lost; what is a difference differs again.
    let suspects = suspects.into_inner().expect("a list");
    if !suspects.is_empty() {
        let once = tally.lock().expect("a tally").forget_differences();
        let mut stage = Stage::new();
        let again: usize = suspects.chunks(BATCH).map(|numbers| stage.judge(numbers, &tally).len()).sum();
        println!("{once} differed, {again} of them again");
    }
    let tally = tally.into_inner().expect("a tally");
    println!("{tally}");
    assert!(tally.holds(), "the NIC differs from the kernel:\n{tally}");
}

/// Each difference that is meant names its RFC, and the document has the same list.
#[test]
fn the_document_lists_what_is_meant() {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/internals/conformance.md");
    let document = std::fs::read_to_string(document).expect("the document");
    let table = document.split("The differences that are meant").nth(1).expect("the table");
    let table = table.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    let rows: Vec<&str> = table.take_while(|line| line.starts_with('|')).collect();
    let listed: Vec<String> = MEANT.iter().map(|meant| meant.row()).collect();
    assert_eq!(rows, listed, "the rows are to be:\n{}\n", listed.join("\n"));
    assert!(MEANT.iter().all(|meant| meant.rfc.starts_with("RFC ") && meant.rfc.contains(" section")), "each names its RFC");
}

/// Where the NIC makes a listener's connections its SYN-ACKs offer what the kernel's do, for whatever the peer offers,
/// also as SYN cookies, and the connections have what was agreed on.
#[test]
fn a_syn_is_answered_as_by_the_kernel() {
    let segment = |at, flags, length| Step::Segment(Segment { at, length, flags, ack: 0, window: 65_535, clock: 0, bare: false });
    let data = Flags::ACK | Flags::PSH;
    let steps = [
        segment(0, data, 500),
        Step::Read(100_000),
        Step::Write(2000),
        segment(0, Flags::ACK, 0),
        // A gap, which SACK blocks report, and what fills it.
        segment(100, data, 1000),
        segment(0, data, 100),
        segment(1000, Flags::ACK | Flags::FIN, 0),
        Step::Read(100_000),
    ];
    let mut scripts = Vec::new();
    for bits in 0..2 * 2 * 2 * 2 * 3 * 3usize {
        // The NIC remembers a number of handshakes before it sends cookies: those come last.
        let (cookie, rest) = (bits >= 72, bits % 72);
        let offer = script::Offer {
            mss: [Some(1460), Some(536), None][rest % 3],
            scale: [None, Some(0), Some(4)][rest / 3 % 3],
            sack: rest / 9 % 2 == 1,
            timestamps: rest / 18 % 2 == 1,
        };
        let ipv6 = rest / 36 == 1;
        scripts.push(Script { ipv6, offer, cookie, receive_buffer: None, steps: steps.to_vec(), broken: None });
    }
    let mut tally = Tally::default();
    let outcomes = Stage::listening().play_undisturbed(&scripts, 1);
    for ((number, script), lanes) in (0..).zip(&scripts).zip(outcomes.chunks(LANES)) {
        tally.judge(number, script, [&lanes[0], &lanes[1], &lanes[NIC]]);
    }
    assert!(tally.holds(), "the NIC differs from the kernel:\n{tally}");
}

/// A NIC that breaks a rule is found: the comparison looks at what it claims to look at.
#[test]
fn a_broken_rule_is_found() {
    const EACH: usize = BATCH / Broken::ALL.len();
    let mut numbered = Vec::new();
    for (broken, _) in Broken::ALL {
        let scripts = (0..200_000).map(|number| (number, Script { broken: Some(broken), ..Script::new(number) }));
        numbered.extend(scripts.filter(|(_, script)| broken.concerns(script)).take(EACH));
    }
    let (numbers, scripts): (Vec<u64>, Vec<Script>) = numbered.into_iter().unzip();
    assert_eq!(scripts.len(), EACH * Broken::ALL.len(), "each rule is of enough scripts");
    let outcomes = Stage::new().play_undisturbed(&scripts, 1);
    let mut unfound = Vec::new();
    for (broken, parts) in Broken::ALL {
        let mut tally = Tally::default();
        for ((number, script), lanes) in numbers.iter().zip(&scripts).zip(outcomes.chunks(LANES)) {
            if script.broken == Some(broken) {
                tally.judge(*number, script, [&lanes[0], &lanes[1], &lanes[NIC]]);
            }
        }
        let found = tally.differing(parts);
        println!("{broken:?}: {found} of {EACH} scripts");
        if found < 5 {
            unfound.push(format!("{broken:?} is found in {found} scripts:\n{tally}"));
        }
    }
    assert!(unfound.is_empty(), "{}", unfound.join("\n"));
}

/// The peer ends the connection while it closes its window, after the program has: the program reads the end, though
/// the connection is restored with both FINs, of which the kernel sends its own again.
#[test]
fn an_end_with_a_closed_window_is_read() {
    let acknowledge = Segment { at: 0, length: 0, flags: Flags::ACK, ack: 0, window: 65_535, clock: 0, bare: false };
    let end = Segment { flags: Flags::ACK | Flags::FIN, window: 0, ..acknowledge };
    let scripts: Vec<Script> = [false, true]
        .into_iter()
        .map(|ipv6| {
            let offer = script::Offer { mss: Some(1460), scale: Some(0), sack: true, timestamps: true };
            let steps = vec![Step::Shutdown, Step::Segment(acknowledge), Step::Segment(end), Step::Read(100)];
            Script { ipv6, offer, cookie: false, receive_buffer: None, steps, broken: None }
        })
        .collect();
    let outcomes = Stage::new().play_undisturbed(&scripts, 1);
    assert!(outcomes.iter().all(|lane| lane.last().is_some_and(|last| last.program.end)), "{outcomes:?}");
}

/// The connection is reset with or without data in the segment, with or without data that was not sent or read, before
/// the peer's end and behind it: the program sees what it sees with the kernel.
#[test]
fn a_reset_is_seen_as_in_the_kernel() {
    let segment = |at, flags, length, window| Step::Segment(Segment { at, length, flags, ack: 0, window, clock: 0, bare: false });
    let mut scripts = Vec::new();
    // Behind the end: with the next number, or once more with that of the FIN.
    for (ended, at) in [(false, 0), (true, -1), (true, 0)] {
        for (flags, length) in [(Flags::RST, 0), (Flags::RST, 500), (Flags::RST | Flags::ACK, 0), (Flags::RST | Flags::ACK, 500)]
        {
            for (window, unread) in [(65_535, 0), (65_535, 700), (0, 0), (0, 700)] {
                let offer = script::Offer { mss: Some(1460), scale: Some(4), sack: true, timestamps: true };
                let received = if ended { Flags::ACK | Flags::FIN } else { Flags::ACK };
                let steps = vec![
                    segment(0, received, unread, window),
                    Step::Write(4000),
                    segment(at, flags, length, window),
                    Step::Read(100),
                    Step::Read(100_000),
                    Step::Write(1),
                    Step::Shutdown,
                ];
                scripts.push(Script { ipv6: false, offer, cookie: false, receive_buffer: None, steps, broken: None });
            }
        }
    }
    let mut stage = Stage::new();
    let mut tally = Tally::default();
    let outcomes = stage.play_undisturbed(&scripts, 1);
    for ((number, script), lanes) in (0..).zip(&scripts).zip(outcomes.chunks(LANES)) {
        tally.judge(number, script, [&lanes[0], &lanes[1], &lanes[NIC]]);
    }
    assert!(tally.holds(), "the NIC differs from the kernel:\n{tally}");
}
