//! The simulator finds nothing in the product, and finds each of the builds that are sabotaged on purpose. Each
//! sabotage is a feature of its own: `make sim` runs this test once for each.

/// Seeds within which a sabotage has to be found.
const SEEDS: u64 = 3_000;
/// Seeds of a build that is not sabotaged: as many as fit a test run.
const FEW_SEEDS: u64 = 60;

/// Every feature `sabotage-*` turns this one on.
const SABOTAGED: bool = cfg!(feature = "sabotaged");

#[test]
fn a_sabotaged_build_is_found_and_no_other() {
    let seeds = if SABOTAGED { SEEDS } else { FEW_SEEDS };
    let found = (0..seeds).find_map(|seed| baton_world::run(seed, false).failure.map(|failure| (seed, failure)));
    println!("{found:?}");
    assert_eq!(found.is_some(), SABOTAGED, "{found:?}");
}
