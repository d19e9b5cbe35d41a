//! Percentiles of samples.

use serde::Serialize;

/// Percentiles of a set of samples, in their unit.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Percentiles {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest.
    pub max: f64,
}

/// The `share` (0 to 1) quantile of samples, 0 if there are none. Sorts them.
pub fn quantile(samples: &mut [f64], share: f64) -> f64 {
    if samples.is_empty() {
        return 0.0;
    }
    samples.sort_by(f64::total_cmp);
    let at = ((samples.len() - 1) as f64 * share).round() as usize;
    samples[at]
}

impl Percentiles {
    /// Percentiles of these samples. Sorts them.
    pub fn of(mut samples: Vec<f64>) -> Percentiles {
        Percentiles { p50: quantile(&mut samples, 0.5), p99: quantile(&mut samples, 0.99), max: quantile(&mut samples, 1.0) }
    }

    /// These percentiles minus another set's, at least 0.
    #[must_use]
    pub fn less(self, other: Percentiles) -> Percentiles {
        let less = |a: f64, b: f64| (a - b).max(0.0);
        Percentiles { p50: less(self.p50, other.p50), p99: less(self.p99, other.p99), max: less(self.max, other.max) }
    }
}
