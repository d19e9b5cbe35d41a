//! The cost of a match with few and with many posted receives. `--nocapture` shows it:
//! `cargo test --profile checked -p baton-matching --test cost -- --nocapture`

use baton_matching::{Arrival, Criteria, Matching, Message};
use baton_netem::Rng;

/// Nanoseconds of a message's arrival and the posting of a receive in its place, with `posted` receives posted. Every
/// tenth receive has a wildcard, and messages match any of them.
fn nanoseconds(posted: u64) -> f64 {
    let mut matching = Matching::new(posted as usize, 16, [1, 2, 3, 4]);
    let mut rng = Rng::new(9);
    let criteria = |value: u32| match value % 10 {
        0 => Criteria { source: None, context: 0, tag: value.into(), ignore: 0 },
        1 => Criteria { source: Some(value % 16), context: 1, tag: u64::from(value) << 8, ignore: 0xff },
        _ => Criteria { source: Some(value % 16), context: 0, tag: value.into(), ignore: 0 },
    };
    let message = |value: u32| {
        let (context, tag) = if value % 10 == 1 { (1, u64::from(value) << 8) } else { (0, value.into()) };
        Message { source: value % 16, context, tag }
    };
    for value in 0..posted as u32 {
        matching.post(criteria(value), value).unwrap();
    }
    const ROUNDS: u32 = 300_000;
    let order: Vec<u32> = (0..ROUNDS).map(|_| rng.below(posted) as u32).collect();
    #[expect(clippy::disallowed_methods, reason = "this measures time")]
    let begin = std::time::Instant::now();
    for value in &order {
        assert_eq!(matching.arrive(message(*value), 0), Ok(Arrival::Matched(*value)));
        matching.post(criteria(*value), *value).unwrap();
    }
    // Waits: nothing; compared below, with room for a disturbed machine.
    begin.elapsed().as_nanos() as f64 / f64::from(ROUNDS)
}

#[test]
fn ten_thousand_posted_receives_cost_what_ten_do() {
    let mut ratios: Vec<(f64, f64, f64)> = (0..9)
        .map(|_| {
            let (few, many) = (nanoseconds(10), nanoseconds(10_000));
            (many / few, few, many)
        })
        .collect();
    ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (ratio, few, many) = ratios[4];
    println!("match and post: {few:.0} ns with 10 posted, {many:.0} ns with 10,000: {ratio:.2} times (median of nine pairs)");
    // 1.1 to 1.6 with the caches of this processor to itself. A search along a list would take a thousand times as
    // long.
    assert!(ratio <= 10.0);
}
