//! Random numbers for tests, and the number of random cases.

use proptest::prelude::ProptestConfig;

/// So many cases of a property, or as many as `BATON_FUZZ_CASES` says.
pub fn cases(usual: u32) -> ProptestConfig {
    ProptestConfig::with_cases(std::env::var("BATON_FUZZ_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(usual))
}

/// A small random generator, so that a failing case can be repeated.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
