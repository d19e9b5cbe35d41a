//! One connection over a path of 1 Gb/s and 100 ms, in virtual time.

use baton_sim::Impairments;
use baton_sim::pair::Pair;
use baton_tcp::{Config, State};

const SECOND: u64 = 1_000_000;

/// Mb/s of each second, and segments sent again for each that the full buffer dropped.
fn rates(link: Impairments, seconds: u64) -> (Vec<f64>, f64) {
    let config = Config { receive_buffer: 1 << 25, ..Config::default() };
    let mut pair = Pair::new([config; 2], link, 5);
    assert!(pair.run_until(SECOND, |pair| pair.ends[0].connection.state() == State::Established));
    pair.ends[0].send(1 << 33, false);
    let mut before = 0;
    let rates = (0..seconds)
        .map(|_| {
            let end = pair.now.after(SECOND);
            pair.run_until(SECOND, |pair| pair.now >= end);
            let bytes = pair.ends[1].verified - std::mem::replace(&mut before, pair.ends[1].verified);
            bytes as f64 * 8.0 / 1e6
        })
        .collect();
    let again = pair.ends[0].connection.retransmissions() as f64 / pair.counters(0).overflowed.max(1) as f64;
    (rates, again)
}

/// Slow start reaches the path's rate, and a buffer of one round trip is enough to keep it.
#[test]
fn a_long_path_is_filled() {
    let link = Impairments { rate: 1_000_000_000, delay: 50_000, buffer: 12_500_000, ..Impairments::default() };
    let (rates, _) = rates(link, 2);
    assert!(rates[1] > 850.0, "{rates:.0?}");
}

/// A buffer of 4 ms overflows before slow start ends, and every other segment of a window is lost. The receiver keeps
/// those that arrive behind the holes.
#[test]
fn a_window_full_of_holes_is_kept() {
    let link = Impairments { rate: 1_000_000_000, delay: 50_000, buffer: 500_000, ..Impairments::default() };
    let (rates, again) = rates(link, 4);
    assert!(again < 1.1, "{again:.2} segments were sent again for each that was lost, {rates:.0?}");
}
