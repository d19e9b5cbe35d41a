//! The settings of receive-side scaling.

use crate::{BUCKETS, Key, MOST_WORKERS, Table, even};
use core::fmt;
use core::str::FromStr;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Largest number of entries of a pattern.
const PATTERN: usize = 64;

/// The contents of the indirection table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Indirection {
    /// The same number of buckets for each worker at first, then balanced by load.
    #[default]
    Balanced,
    /// The same number of buckets for each worker.
    Even,
    /// These workers, repeated over the table.
    Pattern {
        /// The workers, of which the first `length` count.
        workers: [u8; PATTERN],
        /// Number of workers in the pattern.
        length: u8,
    },
}

/// Error of parsing an [`Indirection`]: the text is not `balanced`, `even`, or up to 64 hexadecimal digits, each a
/// worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoIndirection;

impl FromStr for Indirection {
    type Err = NoIndirection;

    fn from_str(text: &str) -> Result<Indirection, NoIndirection> {
        match text {
            "balanced" => return Ok(Indirection::Balanced),
            "even" => return Ok(Indirection::Even),
            _ => {}
        }
        if text.is_empty() || text.chars().count() > PATTERN {
            return Err(NoIndirection);
        }
        let mut workers = [0; PATTERN];
        for (worker, digit) in workers.iter_mut().zip(text.chars()) {
            *worker = digit.to_digit(16).ok_or(NoIndirection)? as u8;
        }
        Ok(Indirection::Pattern { workers, length: text.len() as u8 })
    }
}

impl fmt::Display for Indirection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Indirection::Balanced => f.write_str("balanced"),
            Indirection::Even => f.write_str("even"),
            Indirection::Pattern { workers, length } => {
                workers[..usize::from(*length)].iter().try_for_each(|worker| write!(f, "{worker:x}"))
            }
        }
    }
}

/// Implements Serialize and Deserialize by the type's text.
macro_rules! as_text {
    ($kind:ty, $expected:literal) => {
        impl Serialize for $kind {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $kind {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;
                impl serde::de::Visitor<'_> for Text {
                    type Value = $kind;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expected)
                    }
                    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<$kind, E> {
                        text.parse().map_err(|_| E::invalid_value(serde::de::Unexpected::Str(text), &self))
                    }
                }
                deserializer.deserialize_str(Text)
            }
        }
    };
}

as_text!(Indirection, "balanced, even, or up to 64 hexadecimal digits, each a worker");
as_text!(Key, "microsoft, symmetric, or 40 bytes in hexadecimal with colons between them");

/// How frames are spread over the workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RssSettings {
    /// Number of workers that get frames; 0 for all.
    pub queues: u8,
    /// The hash key; None for a random one.
    pub key: Option<Key>,
    /// The indirection table.
    pub indirection: Indirection,
}

impl RssSettings {
    /// Number of workers that get frames, if there are `workers`.
    pub fn active(&self, workers: usize) -> usize {
        let most = workers.clamp(1, MOST_WORKERS);
        if self.queues == 0 { most } else { most.min(usize::from(self.queues)) }
    }

    /// The indirection table to begin with. In a pattern, the number of a worker that does not exist counts modulo the
    /// number that get frames.
    pub fn table(&self, workers: usize) -> Table {
        let active = self.active(workers);
        match self.indirection {
            Indirection::Balanced | Indirection::Even => even(active),
            Indirection::Pattern { workers, length } => {
                let length = usize::from(length).clamp(1, PATTERN);
                core::array::from_fn::<u8, BUCKETS, _>(|bucket| workers[bucket % length] % active as u8)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn a_pattern_is_repeated_and_names_workers_that_are_there() {
        let settings = RssSettings { indirection: "0012".parse().unwrap(), ..RssSettings::default() };
        assert_eq!(settings.table(4)[..6], [0, 0, 1, 2, 0, 0]);
        assert_eq!(settings.table(2)[..6], [0, 0, 1, 0, 0, 0]);
        assert_eq!(RssSettings { queues: 3, ..RssSettings::default() }.table(8)[..5], [0, 1, 2, 0, 1]);
        assert_eq!(RssSettings { queues: 9, ..RssSettings::default() }.active(4), 4);
    }

    #[test]
    fn text_survives() {
        for text in ["balanced", "even", "0", "0123456789abcdef"] {
            assert_eq!(text.parse::<Indirection>().unwrap().to_string(), text);
        }
        for wrong in ["", "0,1", "g", "é", &"0".repeat(65)] {
            assert_eq!(wrong.parse::<Indirection>(), Err(NoIndirection), "{wrong}");
        }
    }
}
