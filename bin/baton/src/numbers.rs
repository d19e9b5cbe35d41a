//! Ranges of numbers on the command line for which clap has none: of numbers with fractions, and of sizes.

/// Most microseconds that a NIC polls without work before it sleeps: a minute.
pub const MOST_SPIN: u64 = 60_000_000;

/// Reads a number from `least` to `most`.
pub fn between(least: f64, most: f64) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text: &str| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("write a number from {least} to {most}"))
    }
}

/// Reads a whole number from `least` to `most`.
pub fn whole(least: usize, most: usize) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    move |text: &str| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("write a whole number from {least} to {most}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_out_of_range_or_no_number_is_refused() {
        let (between, whole) = (between(0.1, 86_400.0), whole(1, 1000));
        assert_eq!((between("0.1"), between("86400"), whole("1")), (Ok(0.1), Ok(86_400.0), Ok(1)));
        for text in ["0", "-1", "nan", "inf", "1e9", "", "x"] {
            assert!(between(text).is_err_and(|why| why.contains("from 0.1 to 86400")), "{text}");
        }
        for text in ["0", "-1", "1001", "1.5", "", "x"] {
            assert!(whole(text).is_err_and(|why| why.contains("from 1 to 1000")), "{text}");
        }
    }
}
