//! Short forms of what `make sim` runs for longer.

// A sabotaged build fails these on purpose; tests/sabotage.rs is its test.
#![cfg(not(feature = "sabotaged"))]

use baton_world::{Walk, exhaustive, run, run_seeds, run_walk};

/// A run is a function of its seed: whether its account is wanted changes nothing.
#[test]
fn a_seed_is_a_run() {
    for seed in [4, 75] {
        let (first, second) = (run(seed, false), run(seed, true));
        assert_eq!((first.hash, first.counts), (second.hash, second.counts), "seed {seed}");
        assert!(first.lines.is_empty() && second.lines.len() > 1_000);
        assert_ne!(first.hash, run(seed + 1, false).hash);
    }
}

#[test]
fn some_seeds_hold_and_something_happens_in_them() {
    let summary = run_seeds(1_000..1_030, |_, _| {});
    assert_eq!(summary.failures, []);
    let counts = summary.counts;
    assert!(counts.deaths > 300 && counts.moves > 3_000 && counts.link_faults > 500, "{counts:?}");
    assert!(counts.connections > 50 && counts.bytes > 10_000_000, "{counts:?}");
}

#[test]
fn every_crash_and_some_pairs_have_their_outcome() {
    let walked = exhaustive(29);
    println!("{} crashes, {} pairs, {} deaths at a frame", walked.crashes, walked.pairs, walked.points);
    assert_eq!(walked.failures, []);
    assert!(walked.crashes > 200 && walked.pairs > 500 && walked.points > 300, "{walked:?}");
}

/// What `baton sim --exhaustive` prints of a run is what `--walk` reads.
#[test]
fn a_walk_has_a_name() {
    let walk: Walk = "fin-received,7:nic,12:agent".parse().expect("a walk");
    assert_eq!(walk.to_string(), "fin-received,7:nic,12:agent");
    let deaths = |walk: &Walk| run_walk(walk, false).counts.deaths;
    let calm = Walk { crashes: Vec::new(), ..walk.clone() };
    assert!(deaths(&walk) >= deaths(&calm) + 2);
    for wrong in ["", "both", "both-ways,7", "both-ways,7:cat", "both-ways,x:nic"] {
        assert!(wrong.parse::<Walk>().is_err(), "{wrong}");
    }
}
