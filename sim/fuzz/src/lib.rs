//! Fuzzing on the stable compiler, without instrumentation: a seed gives scripts, a script is a list of words, and a
//! word says all that happens in one step of a [`World`], by way of a generator that it is the seed of ([`Choice`]). So
//! every list of words is a script, also one that words have been taken out of, which is how a script that fails is
//! made small.
//!
//! | variable | |
//! |---|---|
//! | `BATON_FUZZ_SECONDS` | how long a fuzzer runs (1) |
//! | `BATON_FUZZ_SEED` | where it begins (1) |
//! | `BATON_FUZZ_SCRIPT` | one script, that is played instead, and said what happens in it |
//!
//! A fuzzer first plays its corpus: a file with the scripts that have failed once, one a line.
#![forbid(unsafe_code)]

mod choice;
mod minimize;
mod run;

pub use choice::Choice;
pub use run::{Fuzzer, is_told, setting};

/// What is fuzzed, with the model that it is compared with. It panics where both differ.
pub trait World: Sized {
    /// Words of the longest script.
    const LONGEST: u64;

    /// Times that scripts are played in search of a smaller one that fails.
    const PLAYS: usize = 4000;

    /// The world that the first word of a script makes.
    fn new(word: u64) -> Self;

    /// One step. False if the script ends here, since nothing can follow.
    fn step(&mut self, word: u64) -> bool;

    /// What must come of it when nothing disturbs any more.
    fn end(self);
}

/// Says what happens, if one script is played for a reader.
#[macro_export]
macro_rules! note {
    ($($what:tt)*) => {
        if $crate::is_told() {
            eprintln!($($what)*);
        }
    };
}
