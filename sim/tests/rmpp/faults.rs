//! Any schedule of loss, duplication, reordering, corruption, silence, restarts of an endpoint and deaths of a NIC ends
//! in delivery or a clear error, each message is delivered at most once, and all state is given back.
//! `BATON_RMPP_SEEDS` sets how many schedules are run, `BATON_RMPP_SEED` runs one.

use crate::schedule::{Schedule, Seen};
use baton_rmpp::Error;

fn run(seed: u64, streams: bool) -> Seen {
    let mut schedule = Schedule::new(seed, streams);
    for _ in 0..150 {
        schedule.act();
    }
    schedule.finish();
    schedule.seen
}

/// Runs the schedules that the environment asks for; None if that is a single one.
fn run_all(streams: bool, usual: u64) -> Option<Seen> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("BATON_RMPP_SEED") {
        println!("{:?}", run(seed, streams));
        return None;
    }
    let mut all = Seen::default();
    for seed in 0..number("BATON_RMPP_SEEDS").unwrap_or(usual) {
        let seen = std::panic::catch_unwind(|| run(seed, streams)).unwrap_or_else(|_| panic!("BATON_RMPP_SEED={seed} fails"));
        all.delivered += seen.delivered;
        all.truncated += seen.truncated;
        all.nic_deaths += seen.nic_deaths;
        all.restarts += seen.restarts;
        all.refused += seen.refused;
        all.streams += seen.streams;
        all.streams_broken += seen.streams_broken;
        all.streamed += seen.streamed;
        for (error, count) in seen.errors {
            *all.errors.entry(error).or_default() += count;
        }
    }
    println!("{all:#?}");
    Some(all)
}

#[test]
fn every_schedule_ends_in_delivery_or_a_clear_error() {
    let Some(all) = run_all(false, 200) else { return };
    // The test has seen what it is for.
    assert!(all.delivered > 1000 && all.truncated > 0 && all.nic_deaths > 100 && all.restarts > 50 && all.refused > 100);
    for error in [Error::PeerDead, Error::PeerRestarted, Error::PeerClosed] {
        assert!(all.errors.contains_key(&format!("Send {error:?}")), "{error:?}");
    }
}

/// The same where long messages go by streams, which open late or not at all, break anywhere, and deliver in pieces.
#[test]
fn every_schedule_with_streams_ends_in_delivery_or_a_clear_error() {
    let Some(all) = run_all(true, 200) else { return };
    assert!(all.delivered > 1000 && all.truncated > 0 && all.restarts > 50);
    assert!(all.streams > 300 && all.streams_broken > 200 && all.streamed > 5_000_000);
}
