//! The log of Baton's own processes: a line for each event on standard error, or an entry with fields in systemd's
//! journal; levels; limits by call site. Nothing here waits. `baton run` does not use it, it writes with
//! `baton_linux::report!`; nor does the library that it preloads; and no datapath logs.
//!
//! A line is written by [`error!`], [`warning!`], [`info!`] or [`debug!`]: fields in brackets, then a text with its
//! arguments. An error and a warning also say what to do: a second text behind a semicolon, without which they do not
//! compile.
//!
//! ```text
//! warning!([nic = number, connection = %flow] "{flow} stays: {error}"; "free some memory");
//! ```
#![forbid(unsafe_code)]

mod entry;
mod journal;
mod level;
mod limit;
mod log;

pub use level::{Level, VARIABLE};
pub use log::{begin, finish, settle};

#[doc(hidden)]
pub use tracing;

/// Logs that something is lost or does not work any more, and how to remedy that.
#[macro_export]
macro_rules! error {
    ([$($field:tt)*] $what:literal $(, $value:expr)*; $advice:literal $(, $more:expr)*) => {
        $crate::tracing::event!(
            $crate::tracing::Level::ERROR,
            { $($field)* },
            "{}: {}",
            ::std::format_args!($what $(, $value)*),
            ::std::format_args!($advice $(, $more)*)
        )
    };
}

/// Logs that something is not as it should be, and how to remedy that.
#[macro_export]
macro_rules! warning {
    ([$($field:tt)*] $what:literal $(, $value:expr)*; $advice:literal $(, $more:expr)*) => {
        $crate::tracing::event!(
            $crate::tracing::Level::WARN,
            { $($field)* },
            "{}: {}",
            ::std::format_args!($what $(, $value)*),
            ::std::format_args!($advice $(, $more)*)
        )
    };
}

/// Logs an event that the operator of the host may want to know of, and that needs no action.
#[macro_export]
macro_rules! info {
    ([$($field:tt)*] $what:literal $(, $value:expr)*) => {
        $crate::tracing::event!($crate::tracing::Level::INFO, { $($field)* }, $what $(, $value)*)
    };
}

/// Logs a detail that helps to find a fault.
#[macro_export]
macro_rules! debug {
    ([$($field:tt)*] $what:literal $(, $value:expr)*) => {
        $crate::tracing::event!($crate::tracing::Level::DEBUG, { $($field)* }, $what $(, $value)*)
    };
}
