//! Plays scripts, and names the one that fails.

use crate::minimize::minimize;
use crate::{Choice, World};
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

/// Seconds after which a script that has not come to its end counts as one that never will.
const PATIENCE: u64 = 300;

thread_local! {
    static TOLD: Cell<bool> = const { Cell::new(false) };
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread plays a script for a reader.
#[inline]
pub fn is_told() -> bool {
    TOLD.get()
}

/// A number from the environment.
pub fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

/// A fuzzer and the scripts that it has found.
pub struct Fuzzer {
    /// Its name, that of its corpus.
    pub name: &'static str,
    /// The text of its corpus, one script a line: its words in hexadecimal, or `seed` and the seed that it is drawn
    /// from. Behind `#` are comments.
    pub corpus: &'static str,
}

impl Fuzzer {
    /// Plays the corpus, then random scripts until the time is over.
    ///
    /// # Panics
    /// If a script fails. The message holds the smallest that was found.
    #[expect(clippy::disallowed_methods, reason = "how long a fuzzer runs is no part of a script")]
    pub fn run<W: World>(&self) {
        if let Ok(script) = std::env::var("BATON_FUZZ_SCRIPT") {
            TOLD.set(true);
            play::<W>(&parse::<W>(&script));
            return;
        }
        for line in self.corpus.lines().map(|line| line.split('#').next().unwrap_or_default()) {
            let script = parse::<W>(line);
            if !script.is_empty() {
                self.judge::<W>(&script, "a script of the corpus");
            }
        }
        let begun = Instant::now();
        let (time, seed) = (Duration::from_secs(setting("BATON_FUZZ_SECONDS", 1)), setting("BATON_FUZZ_SEED", 1));
        let guard = Guard::new(self.name);
        let (mut steps, mut scripts, mut script) = (0, 0u64, Vec::new());
        while begun.elapsed() < time {
            let seed = seed.wrapping_add(scripts);
            guard.begins(seed);
            draw::<W>(seed, &mut script);
            steps += self.judge::<W>(&script, &format!("BATON_FUZZ_SEED={seed}"));
            scripts += 1;
        }
        let rate = steps as f64 / begun.elapsed().as_secs_f64();
        println!("{}: {steps} steps of {scripts} scripts from seed {seed}, {rate:.0} a second", self.name);
    }

    /// Plays a script, and panics with a smaller one if it fails. Returns the steps.
    fn judge<W: World>(&self, script: &[u64], origin: &str) -> u64 {
        let failed = match quietly(|| play::<W>(script)) {
            Ok(steps) => return steps,
            Err(failure) => {
                // A world with threads may not fail again.
                let text = failure.downcast_ref::<String>().map(String::as_str).or(failure.downcast_ref::<&str>().copied());
                eprintln!("{}, {origin}: {}", self.name, text.unwrap_or("a failure without a text"));
                minimize(script.to_vec(), W::PLAYS, |script| quietly(|| play::<W>(script)).is_err())
            }
        };
        let words: Vec<String> = failed.iter().map(|word| format!("{word:x}")).collect();
        eprintln!("{}, {origin}: a script of {} steps fails, of which these are enough.", self.name, script.len() - 1);
        eprintln!(
            "They belong into the corpus (or, if they are many, the seed); BATON_FUZZ_SCRIPT plays them:\n{}",
            words.join(" ")
        );
        TOLD.set(true);
        play::<W>(&failed);
        panic!("the script failed once, and not again: the world depends on something else");
    }
}

/// Plays a script to its end. Returns the steps.
fn play<W: World>(script: &[u64]) -> u64 {
    let mut world = W::new(script[0]);
    let (mut steps, mut words) = (0, script[1..].iter());
    loop {
        let Some(word) = words.next() else {
            world.end();
            return steps;
        };
        steps += 1;
        if !world.step(*word) {
            return steps;
        }
    }
}

/// The script of a seed: its length is as likely short as long.
fn draw<W: World>(seed: u64, script: &mut Vec<u64>) {
    let mut choice = Choice::new(seed);
    let most = W::LONGEST >> choice.below(3);
    let length = 1 + choice.below(most);
    script.clear();
    script.extend((0..=length).map(|_| choice.word()));
}

fn parse<W: World>(line: &str) -> Vec<u64> {
    if let Some(seed) = line.strip_prefix("seed ") {
        let mut script = Vec::new();
        draw::<W>(seed.trim().parse().unwrap_or_else(|_| panic!("{seed} is no seed")), &mut script);
        return script;
    }
    line.split_whitespace().map(|word| u64::from_str_radix(word, 16).unwrap_or_else(|_| panic!("{word} is no word"))).collect()
}

/// Runs this without the message of a panic.
fn quietly<R>(run: impl FnOnce() -> R) -> std::thread::Result<R> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let otherwise = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                otherwise(info);
            }
        }));
    });
    QUIET.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(run));
    QUIET.set(false);
    result
}

/// Ends the process if a script does not come to its end, and says which.
struct Guard(Arc<Watched>);

#[derive(Default)]
struct Watched {
    seed: AtomicU64,
    is_over: AtomicBool,
}

impl Guard {
    fn new(name: &'static str) -> Guard {
        let shared = Arc::new(Watched::default());
        let watched = shared.clone();
        std::thread::spawn(move || {
            let (mut last, mut seconds) = (0, 0);
            while !watched.is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_secs(1));
                let seed = watched.seed.load(Ordering::Relaxed);
                seconds = if seed == last { seconds + 1 } else { 0 };
                last = seed;
                if seconds > PATIENCE {
                    eprintln!("{name}: the script of BATON_FUZZ_SEED={seed} has not ended for {seconds} seconds");
                    std::process::abort();
                }
            }
        });
        Guard(shared)
    }

    fn begins(&self, seed: u64) {
        self.0.seed.store(seed, Ordering::Relaxed);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}
