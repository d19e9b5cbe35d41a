//! Levels of lines, and which of them are written.

use std::fmt;
use std::str::FromStr;
use tracing::level_filters::LevelFilter;

/// The environment variable with the level. A process passes it to those that it starts.
pub const VARIABLE: &str = "BATON_LOG";

/// How much a line matters; as a setting, the least that is written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Level {
    /// Something is lost, or does not work any more.
    Error,
    /// Something is not as it should be, and there is something to do.
    Warning,
    /// Events that the operator of the host may want to know of.
    #[default]
    Info,
    /// Details that help to find a fault.
    Debug,
}

impl Level {
    /// The level that [`VARIABLE`] names, or else the default. Commands refuse a wrong name before they start other
    /// processes.
    pub fn of_environment() -> Level {
        baton_linux::process::variable(VARIABLE).and_then(|name| name.to_str()?.parse().ok()).unwrap_or_default()
    }

    pub(crate) fn of(level: &tracing::Level) -> Level {
        match *level {
            tracing::Level::ERROR => Level::Error,
            tracing::Level::WARN => Level::Warning,
            tracing::Level::INFO => Level::Info,
            _ => Level::Debug,
        }
    }

    /// As tracing compares it.
    pub(crate) fn filter(self) -> LevelFilter {
        match self {
            Level::Error => LevelFilter::ERROR,
            Level::Warning => LevelFilter::WARN,
            Level::Info => LevelFilter::INFO,
            Level::Debug => LevelFilter::DEBUG,
        }
    }

    /// As syslog and the journal number it (syslog(3)).
    pub(crate) fn priority(self) -> u8 {
        match self {
            Level::Error => 3,
            Level::Warning => 4,
            Level::Info => 6,
            Level::Debug => 7,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warning => "warning",
            Level::Info => "info",
            Level::Debug => "debug",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(name: &str) -> Result<Level, String> {
        let all = [Level::Error, Level::Warning, Level::Info, Level::Debug];
        let found = all.into_iter().find(|level| level.name() == name || name == "warn" && *level == Level::Warning);
        found.ok_or_else(|| format!("{name:?} is no level: write error, warning, info or debug"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_read_as_it_is_written() {
        for level in [Level::Error, Level::Warning, Level::Info, Level::Debug] {
            assert_eq!(level.to_string().parse::<Level>(), Ok(level));
        }
        assert_eq!("warn".parse::<Level>(), Ok(Level::Warning));
        for wrong in ["", "Info", "trace", "agent=debug", "4"] {
            let why = wrong.parse::<Level>().expect_err("it is wrong");
            assert!(why.contains("error, warning, info or debug"), "{why}");
        }
    }

    #[test]
    fn each_level_writes_those_that_matter_more() {
        let all = [tracing::Level::ERROR, tracing::Level::WARN, tracing::Level::INFO, tracing::Level::DEBUG];
        for (number, setting) in [Level::Error, Level::Warning, Level::Info, Level::Debug].into_iter().enumerate() {
            let written: Vec<bool> = all.iter().map(|level| *level <= setting.filter()).collect();
            let expected: Vec<bool> = (0..all.len()).map(|other| other <= number).collect();
            assert_eq!(written, expected, "{setting}");
            assert_eq!(Level::of(&all[number]), setting);
        }
        assert_eq!([Level::Error, Level::Warning, Level::Info, Level::Debug].map(Level::priority), [3, 4, 6, 7]);
    }
}
