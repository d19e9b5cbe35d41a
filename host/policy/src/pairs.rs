//! Paired measurements of two places, and what can be said of them with confidence.

/// Two places count as equal while they differ by less than this part.
pub(crate) const EQUAL: f64 = 0.03;

/// What is assumed of the differences' variance before there are any, and how many degrees of freedom that is worth:
/// few pairs can be alike, or unlike, by chance.
const VARIANCE: f64 = 0.0036;
const WORTH: f64 = 4.0;

/// Fewest pairs that say anything.
const FEWEST: u32 = 3;

/// Squares of Student's t for [`FEWEST`] pairs and more at 99 %, two-sided. The question is asked after each pair: at
/// 95 % one of eight trials of two equal places would find a difference.
const T_SQUARED: [f64; 8] = [13.7, 12.2, 11.3, 10.6, 10.0, 9.7, 9.3, 9.1];

/// Differences of pairs: twice the difference over the sum, which is about the logarithm of the ratio.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Pairs {
    count: u32,
    sum: f64,
    squares: f64,
}

impl Pairs {
    /// Adds a pair. Positive: `one` is larger than `other`.
    pub fn add(&mut self, one: f64, other: f64) {
        let difference = if one + other > 0.0 { 2.0 * (one - other) / (one + other) } else { 0.0 };
        self.count += 1;
        self.sum += difference;
        self.squares += difference * difference;
    }

    pub fn mean(&self) -> f64 {
        self.sum / f64::from(self.count.max(1))
    }

    /// Whether the difference is above `limit` with confidence.
    pub fn is_above(&self, limit: f64) -> bool {
        self.is_beyond(self.mean() - limit)
    }

    /// Whether the difference is below `limit` with confidence.
    pub fn is_below(&self, limit: f64) -> bool {
        self.is_beyond(limit - self.mean())
    }

    /// Whether `distance` from the mean is more than the interval reaches.
    fn is_beyond(&self, distance: f64) -> bool {
        let Some(at) = self.count.checked_sub(FEWEST) else { return false };
        let t_squared = T_SQUARED[(at as usize).min(T_SQUARED.len() - 1)];
        let count = f64::from(self.count);
        let scatter = (self.squares - self.sum * self.sum / count).max(0.0);
        let variance = (WORTH * VARIANCE + scatter) / (WORTH + count - 1.0);
        distance > 0.0 && distance * distance * count > t_squared * variance
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_or_unlike_pairs_say_nothing() {
        let mut pairs = Pairs::default();
        (0..2).for_each(|_| pairs.add(2.0, 1.0));
        assert!(!pairs.is_above(0.0));
        pairs.add(2.0, 1.0);
        assert!(pairs.is_above(0.03) && !pairs.is_above(0.6) && !pairs.is_below(0.0));
        let mut unlike = Pairs::default();
        [3.0, 0.4, 1.5, 0.7, 2.2].into_iter().for_each(|one| unlike.add(one, 1.0));
        assert!(!unlike.is_above(0.0) && !unlike.is_below(0.0));
    }

    #[test]
    fn both_directions_are_alike() {
        let (mut one, mut other) = (Pairs::default(), Pairs::default());
        for (a, b) in [(1.0, 1.3), (1.1, 1.5), (0.9, 1.2), (1.0, 1.3)] {
            one.add(a, b);
            other.add(b, a);
        }
        assert!(one.is_below(-0.03) && other.is_above(0.03) && (one.mean() + other.mean()).abs() < 1e-9);
    }
}
