//! Many seeds in a row.

use crate::{Counts, run};

/// What has come of some seeds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of seeds.
    pub seeds: u64,
    /// Sums over all of them.
    pub counts: Counts,
    /// Seeds at which something did not hold, and what.
    pub failures: Vec<(u64, String)>,
}

/// Runs the scenarios of these seeds, each of which is asked for when the one before has run. `ran` is called after
/// each with its failure, if there is one.
pub fn run_seeds(seeds: impl IntoIterator<Item = u64>, mut ran: impl FnMut(u64, Option<&str>)) -> Summary {
    let mut summary = Summary::default();
    for seed in seeds {
        let outcome = run(seed, false);
        ran(seed, outcome.failure.as_deref());
        summary.seeds += 1;
        summary.counts += outcome.counts;
        summary.failures.extend(outcome.failure.map(|failure| (seed, failure)));
    }
    summary
}
