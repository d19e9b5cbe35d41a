//! The subscriber of `tracing` that writes the log lines of a process.

use crate::entry::Entry;
use crate::journal::Journal;
use crate::level::Level;
use crate::limit::Limiter;
use baton_linux::events::monotonic_micros;
use baton_linux::report::write_now;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// This process's log, once it has begun.
static LOG: OnceLock<Log> = OnceLock::new();

/// Begins this process's log: before this, no lines are written. `part` is the process's role in Baton, such as
/// `agent`; empty for a command. To be called before the process gives up its rights. A second call does nothing.
pub fn begin(part: &'static str, level: Level) {
    let log = LOG.get_or_init(|| {
        let coloured = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
        Log::new(part, level, Journal::of_standard_error(), coloured)
    });
    let _ = tracing::subscriber::set_global_default(Front(log));
}

/// Writes the counts of left out lines that are due. Logging a line does this as well. If no count is due it costs only
/// a read of one word.
pub fn settle() {
    if let Some(log) = LOG.get()
        && log.next.load(Ordering::Relaxed) != u64::MAX
    {
        log.settle(monotonic_micros());
    }
}

/// Writes all counts of left out lines. To be called when the process ends.
pub fn finish() {
    if let Some(log) = LOG.get() {
        log.settle(u64::MAX);
    }
}

#[derive(Debug)]
struct Log {
    part: &'static str,
    level: Level,
    journal: Option<Journal>,
    coloured: bool,
    limiter: Mutex<Limiter>,
    /// [`Limiter::next`], for a look without the lock.
    next: AtomicU64,
}

impl Log {
    fn new(part: &'static str, level: Level, journal: Option<Journal>, coloured: bool) -> Log {
        Log { part, level, journal, coloured, limiter: Mutex::new(Limiter::new()), next: AtomicU64::new(u64::MAX) }
    }

    /// The lock is held for a moment only: nothing is formatted or written meanwhile.
    fn limited<T>(&self, work: impl FnOnce(&mut Limiter) -> T) -> T {
        let mut limiter = self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
        let done = work(&mut limiter);
        self.next.store(limiter.next(), Ordering::Relaxed);
        done
    }

    fn settle(&self, now: u64) {
        if now < self.next.load(Ordering::Relaxed) {
            return;
        }
        let counts = self.limited(|limiter| limiter.take(now));
        counts.into_iter().for_each(|left_out| self.write(&Entry::counting(left_out)));
    }

    fn log(&self, event: &Event<'_>) {
        let (metadata, now) = (event.metadata(), monotonic_micros());
        self.settle(now);
        let site = (metadata.file().unwrap_or_default(), metadata.line().unwrap_or_default());
        if !self.limited(|limiter| limiter.admits(site, now)) {
            return;
        }
        let entry = Entry::of(event);
        self.limited(|limiter| limiter.remember(site, entry.level, &entry.message));
        self.write(&entry);
    }

    /// An entry that the journal does not take at once goes to standard error, if that takes it without waiting.
    fn write(&self, entry: &Entry) {
        let taken = self.journal.as_ref().is_some_and(|journal| journal.send(&entry.for_journal(self.part)));
        if !taken {
            write_now(entry.for_person(self.part, self.coloured).as_bytes());
        }
    }
}

/// The log as tracing calls it. Baton has no spans.
struct Front(&'static Log);

impl Subscriber for Front {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.0.level.filter()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.0.level.filter())
    }

    fn event(&self, event: &Event<'_>) {
        self.0.log(event);
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::tests::connected;
    use std::os::unix::net::UnixDatagram;

    /// A log that lives as long as the tests.
    fn log(level: Level, name: &str) -> (&'static Log, UnixDatagram) {
        let (journal, receiver) = connected(name);
        (Box::leak(Box::new(Log::new("agent", level, Some(journal), false))), receiver)
    }

    /// The entries that have arrived at the receiver.
    fn entries(receiver: &UnixDatagram) -> Vec<String> {
        let (mut bytes, mut all) = ([0; 4096], Vec::new());
        while let Ok(length) = receiver.recv(&mut bytes) {
            all.push(String::from_utf8_lossy(&bytes[..length]).into_owned());
        }
        all
    }

    #[test]
    fn an_entry_has_text_level_and_fields_and_is_one_line() {
        let (log, receiver) = log(Level::Info, "fields");
        tracing::subscriber::with_default(Front(log), || {
            let (flow, error) = ("10.0.0.1:80 -> 10.0.0.2:4711", "first\nPRIORITY=0");
            crate::warning!([connection = %flow, session = 3_u32, user = "a\nb"] "{flow} stays: {error}"; "read page {}", 80);
            crate::debug!([] "this is left out at the level info");
            crate::info!([] "{}", 7);
        });
        let all = entries(&receiver);
        assert_eq!(all.len(), 2, "{all:?}");
        let lines: Vec<&str> = all[0].lines().collect();
        assert_eq!(lines[0], "MESSAGE=agent: 10.0.0.1:80 -> 10.0.0.2:4711 stays: first\\nPRIORITY=0: read page 80");
        assert_eq!(lines[1..3], ["PRIORITY=4", "SYSLOG_IDENTIFIER=baton"]);
        assert!(lines[3].starts_with("CODE_FILE=") && lines[3].ends_with("log.rs"), "{}", lines[3]);
        assert_eq!(lines[5..], ["CONNECTION=10.0.0.1:80 -> 10.0.0.2:4711", "SESSION=3", "USER=a\\nb"]);
        assert!(all[1].starts_with("MESSAGE=agent: 7\nPRIORITY=6\n"), "{}", all[1]);
    }

    /// Each line of a flood is written or counted.
    #[test]
    fn a_flood_is_counted() {
        let (log, receiver) = log(Level::Warning, "flood");
        let mut all = Vec::new();
        tracing::subscriber::with_default(Front(log), || {
            for number in 0..1000 {
                crate::warning!([] "line {number}"; "nothing");
                all.extend(entries(&receiver));
            }
            log.settle(u64::MAX);
            all.extend(entries(&receiver));
        });
        let counted = |entry: &String| entry.lines().find_map(|line| line.strip_prefix("LEFT_OUT=")?.parse::<usize>().ok());
        let (counts, written): (Vec<String>, Vec<String>) = all.into_iter().partition(|entry| counted(entry).is_some());
        let left_out: usize = counts.iter().filter_map(counted).sum();
        assert_eq!(written.len() + left_out, 1000);
        assert!(left_out > 0 && counts[0].contains("more like this were left out) line "), "{counts:?}");
    }
}
