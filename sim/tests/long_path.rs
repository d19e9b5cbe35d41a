//! One connection over a path of 1 Gb/s and 100 ms, in virtual time.

use baton_sim::Impairments;
use baton_sim::pair::Pair;
use baton_tcp::{Config, State};

const SECOND: u64 = 1_000_000;

/// Mb/s of each second.
fn rates(link: Impairments, seconds: u64) -> Vec<f64> {
    let config = Config { receive_buffer: 1 << 25, ..Config::default() };
    let mut pair = Pair::new([config; 2], link, 5);
    assert!(pair.run_until(SECOND, |pair| pair.ends[0].connection.state() == State::Established));
    pair.ends[0].send(1 << 33, false);
    let mut before = 0;
    (0..seconds)
        .map(|_| {
            let end = pair.now.after(SECOND);
            pair.run_until(SECOND, |pair| pair.now >= end);
            let bytes = pair.ends[1].verified - std::mem::replace(&mut before, pair.ends[1].verified);
            bytes as f64 * 8.0 / 1e6
        })
        .collect()
}

/// Slow start reaches the path's rate, and a buffer of one round trip is enough to keep it.
#[test]
fn a_long_path_is_filled() {
    let link = Impairments { rate: 1_000_000_000, delay: 50_000, buffer: 12_500_000, ..Impairments::default() };
    let rates = rates(link, 2);
    assert!(rates[1] > 850.0, "{rates:.0?}");
}
