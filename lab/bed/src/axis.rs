//! Labels of figures' axes.

/// A tick's label: whole numbers from 10 on, else four digits behind the point at most, without zeros at the end.
#[must_use]
pub fn tick(value: f64) -> String {
    if value.abs() >= 10.0 {
        return format!("{value:.0}");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::tick;

    #[test]
    fn ticks_have_no_more_digits_than_they_need() {
        let ticks = [1_000_000.0, 10.0, 1.0, 2.5, 3.0 * 0.1, 0.6 + f64::EPSILON, 0.01, 0.0];
        assert_eq!(ticks.map(tick), ["1000000", "10", "1", "2.5", "0.3", "0.6", "0.01", "0"]);
    }
}
