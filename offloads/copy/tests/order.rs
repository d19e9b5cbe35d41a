//! Every frame comes out once, no frame comes out before an earlier one of its connection, and every queue gets its
//! turn.

use baton_copy::{CopySettings, Engine, Kind};
use proptest::prelude::*;

const WORKERS: usize = 4;

#[derive(Clone, Debug)]
enum Step {
    Push { connection: u32, sets_up: bool, bytes: usize },
    Pop,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..12u32, any::<bool>(), 60..66_000usize).prop_map(|(connection, sets_up, bytes)| Step::Push { connection, sets_up, bytes }),
        2 => Just(Step::Pop),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn order_is_kept(steps in prop::collection::vec(step(), 1..300), room in 1..40usize, turn in 100..100_000usize) {
        let mut engine = Engine::new(WORKERS, CopySettings { turn, set_ups: 3, room });
        let (mut pushed, mut popped) = (vec![Vec::new(); 12], vec![Vec::new(); 12]);
        let (mut waiting, mut number) = ([0usize; WORKERS], 0);
        let mut bypassed = [0u32; WORKERS];
        let mut pop = |engine: &mut Engine<(u32, u32)>, waiting: &mut [usize; WORKERS]| {
            let Some((worker, (connection, number))) = engine.pop() else { return false };
            popped[connection as usize].push(number);
            waiting[worker] -= 1;
            bypassed[worker] = 0;
            for other in (0..WORKERS).filter(|other| *other != worker && waiting[*other] > 0) {
                bypassed[other] += 1;
            }
            true
        };
        for step in steps {
            match step {
                Step::Push { connection, sets_up, bytes } => {
                    let worker = connection as usize % WORKERS;
                    prop_assert_eq!(engine.has_room(worker), waiting[worker] < room);
                    number += 1;
                    let taken = engine.push(worker, (connection, number), bytes, Kind { sets_up, connection });
                    prop_assert_eq!(taken.is_ok(), waiting[worker] < room);
                    if taken.is_ok() {
                        waiting[worker] += 1;
                        pushed[connection as usize].push(number);
                    }
                }
                Step::Pop => {
                    let was_empty = engine.is_empty();
                    prop_assert_eq!(pop(&mut engine, &mut waiting), !was_empty);
                }
            }
        }
        while pop(&mut engine, &mut waiting) {}
        prop_assert_eq!(pushed, popped);
        prop_assert_eq!(waiting, [0; WORKERS]);
        prop_assert!(engine.is_empty());
    }

    /// While every queue has frames to send, their bytes sent differ by a turn and a frame at most.
    #[test]
    fn bytes_are_shared_evenly(sizes in prop::collection::vec(60..66_000usize, WORKERS), turn in 66_000..200_000usize) {
        let mut engine = Engine::new(WORKERS, CopySettings { turn, ..CopySettings::default() });
        let mut got = [0usize; WORKERS];
        for _ in 0..2000 {
            for (worker, bytes) in sizes.iter().enumerate() {
                while engine.has_room(worker) {
                    engine.push(worker, (), *bytes, Kind { sets_up: false, connection: 1 }).unwrap();
                }
            }
            let (worker, ()) = engine.pop().unwrap();
            got[worker] += sizes[worker];
            let (least, most) = (got.iter().min().unwrap(), got.iter().max().unwrap());
            prop_assert!(most - least <= 2 * turn, "{got:?} of frames of {sizes:?}");
        }
    }

    #[test]
    fn any_bytes_have_a_kind(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        Kind::of(&bytes);
    }
}
