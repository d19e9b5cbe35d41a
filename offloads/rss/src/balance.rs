//! Load balance: which bucket moves from a busy worker to an idle one.

use crate::{BUCKETS, MOST_WORKERS, Table};

/// The move of a bucket from one worker to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// The bucket.
    pub bucket: u8,
    /// Its present worker.
    pub from: u8,
    /// Its next worker.
    pub to: u8,
}

/// Percentage by which a worker's load must exceed the mean before one of its buckets moves.
const SLACK: u64 = 4;

/// The most helpful move, given the load of each bucket in any unit (packets, nanoseconds): it goes from the busiest
/// worker to the idlest one, and moves the bucket that comes closest to making the two equal. None if the busiest is
/// near the mean, or if no bucket would lower the greater of the two loads: a bucket with a single large connection
/// stays where it is.
pub fn next_move(loads: &[u64; BUCKETS], table: &Table, workers: usize) -> Option<Move> {
    let workers = workers.clamp(1, MOST_WORKERS);
    let mut sums = [0u64; MOST_WORKERS];
    for (load, owner) in loads.iter().zip(table) {
        sums[usize::from(*owner) % MOST_WORKERS] += load;
    }
    let (busiest, most) = (0..workers).map(|worker| (worker, sums[worker])).max_by_key(|(_, sum)| *sum)?;
    let (idlest, least) = (0..workers).map(|worker| (worker, sums[worker])).min_by_key(|(_, sum)| *sum)?;
    let mean = sums[..workers].iter().sum::<u64>() / workers as u64;
    if most <= mean + mean * SLACK / 100 {
        return None;
    }
    let worse_after = |load: u64| (most - load).max(least + load);
    let (bucket, load) = (0..BUCKETS)
        .filter(|bucket| usize::from(table[*bucket]) == busiest && loads[*bucket] > 0)
        .map(|bucket| (bucket, loads[bucket]))
        .min_by_key(|(_, load)| worse_after(*load))?;
    (worse_after(load) < most).then_some(Move { bucket: bucket as u8, from: busiest as u8, to: idlest as u8 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::even;
    use proptest::prelude::*;

    fn worst(loads: &[u64; BUCKETS], table: &Table, workers: usize) -> (u64, u64) {
        let mut sums = [0u64; MOST_WORKERS];
        for (load, owner) in loads.iter().zip(table) {
            sums[usize::from(*owner)] += load;
        }
        (*sums[..workers].iter().max().unwrap(), sums.iter().sum::<u64>() / workers as u64)
    }

    fn settle(loads: &[u64; BUCKETS], table: &mut Table, workers: usize) -> usize {
        for moves in 0..10 * BUCKETS {
            let Some(Move { bucket, from, to }) = next_move(loads, table, workers) else { return moves };
            assert_eq!(table[usize::from(bucket)], from);
            table[usize::from(bucket)] = to;
        }
        panic!("the balance does not settle");
    }

    proptest! {
        #[test]
        fn it_comes_to_rest_and_never_makes_it_worse(
            loads in proptest::collection::vec(0u64..10_000, BUCKETS), workers in 1usize..=MOST_WORKERS,
        ) {
            let loads = loads.try_into().unwrap();
            let mut table = even(workers);
            let before = worst(&loads, &table, workers).0;
            settle(&loads, &mut table, workers);
            let (after, mean) = worst(&loads, &table, workers);
            prop_assert!(after <= before);
            prop_assert!(after <= mean + mean / 10, "{} of {} with {}", after, mean, workers);
        }
    }

    #[test]
    fn one_large_connection_is_left_alone_and_the_others_leave_it() {
        let mut loads = [1; BUCKETS];
        loads[0] = 1000;
        let mut table = even(4);
        settle(&loads, &mut table, 4);
        let beside = (1..BUCKETS).filter(|bucket| table[*bucket] == table[0]).count();
        assert_eq!((table[0], beside), (0, 0));
    }

    #[test]
    fn nothing_moves_where_nothing_comes_or_nobody_else_is() {
        assert_eq!(next_move(&[0; BUCKETS], &even(4), 4), None);
        assert_eq!(next_move(&[5; BUCKETS], &even(1), 1), None);
    }
}
