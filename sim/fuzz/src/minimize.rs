//! Makes a script that fails small.

/// The script without the words that it fails without, too, as far as that shows when scripts are played `most` times.
/// The first word, which makes the world, stays.
pub(crate) fn minimize(mut script: Vec<u64>, most: usize, mut fails: impl FnMut(&[u64]) -> bool) -> Vec<u64> {
    let mut plays = 0;
    let mut piece = script.len().div_ceil(2);
    while piece > 0 {
        let (mut at, mut smaller) = (1, false);
        while at < script.len() && plays < most {
            let end = (at + piece).min(script.len());
            let without = [&script[..at], &script[end..]].concat();
            plays += 1;
            if fails(&without) {
                (script, smaller) = (without, true);
            } else {
                at = end;
            }
        }
        if plays >= most {
            break;
        }
        // Once more while single words fall out: one may have needed another.
        piece = if piece == 1 { usize::from(smaller) } else { piece / 2 };
    }
    script
}

#[cfg(test)]
mod tests {
    use super::minimize;

    #[test]
    fn what_is_not_needed_falls_out() {
        let script: Vec<u64> = (0..1000).collect();
        let needs = [3, 500, 501, 977];
        let found = minimize(script, 4000, |script| needs.iter().all(|word| script.contains(word)));
        assert_eq!(found, [0, 3, 500, 501, 977]);
    }

    #[test]
    fn pairs_that_need_each_other_fall_out_one_after_the_other() {
        // 7 may go only when 8 has gone.
        let found = minimize((0..20).collect(), 4000, |script| !script.contains(&8) || script.contains(&7));
        assert_eq!(found, [0]);
    }
}
