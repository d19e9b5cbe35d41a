//! A line of the log, for a person and for the journal.

use crate::level::Level;
use crate::limit::LeftOut;
use baton_linux::terminal::plain;
use std::fmt::Debug;
use tracing::Event;
use tracing::field::{Field, Visit};

/// A line: its text and its fields, without control characters.
#[derive(Debug)]
pub(crate) struct Entry {
    pub level: Level,
    pub message: String,
    pub fields: Vec<(&'static str, String)>,
    /// File and line of the source.
    pub file: &'static str,
    pub line: u32,
}

impl Entry {
    pub fn of(event: &Event<'_>) -> Entry {
        let metadata = event.metadata();
        let mut entry = Entry {
            level: Level::of(metadata.level()),
            message: String::new(),
            fields: Vec::new(),
            file: metadata.file().unwrap_or_default(),
            line: metadata.line().unwrap_or_default(),
        };
        event.record(&mut entry);
        entry
    }

    /// The count of lines that were left out.
    pub fn counting(left_out: LeftOut) -> Entry {
        let LeftOut { site: (file, line), level, count, like } = left_out;
        let message = format!("({count} more like this were left out) {like}");
        Entry { level, message, fields: vec![("left_out", count.to_string())], file, line }
    }

    /// The line for a person. `part` is the part of Baton that writes it, such as `agent`; empty for a command.
    pub fn for_person(&self, part: &str, coloured: bool) -> String {
        let space = if part.is_empty() { "" } else { " " };
        let (level, colour) = match self.level {
            Level::Error => ("error: ", "\x1b[1;31m"),
            Level::Warning => ("warning: ", "\x1b[1;33m"),
            Level::Info => ("", ""),
            Level::Debug => ("debug: ", "\x1b[2m"),
        };
        let (colour, end) = if coloured && !colour.is_empty() { (colour, "\x1b[0m") } else { ("", "") };
        format!("baton{space}{part}: {colour}{level}{end}{}\n", self.message)
    }

    /// The entry in the journal's own protocol (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL>): a line for each field,
    /// which is enough for values without line breaks.
    pub fn for_journal(&self, part: &str) -> Vec<u8> {
        let space = if part.is_empty() { "" } else { ": " };
        let mut text = format!("MESSAGE={part}{space}{}\nPRIORITY={}\n", self.message, self.level.priority());
        text += &format!("SYSLOG_IDENTIFIER=baton\nCODE_FILE={}\nCODE_LINE={}\n", self.file, self.line);
        for (name, value) in &self.fields {
            text += &format!("{}={value}\n", name.to_ascii_uppercase());
        }
        text.into_bytes()
    }
}

impl Visit for Entry {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let value = plain(&format!("{value:?}"));
        match field.name() {
            "message" => self.message = value,
            name => self.fields.push((name, value)),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(level: Level) -> Entry {
        let fields = vec![("connection", "10.0.0.1:80 -> 10.0.0.2:4711".into()), ("nic", "1".into())];
        Entry { level, message: "it is late: wait".into(), fields, file: "a.rs", line: 7 }
    }

    #[test]
    fn a_person_gets_a_line_without_colour_unless_on_a_terminal() {
        let levels = [
            (Level::Error, "error: ", "\x1b[1;31merror: \x1b[0m"),
            (Level::Warning, "warning: ", "\x1b[1;33mwarning: \x1b[0m"),
            (Level::Info, "", ""),
            (Level::Debug, "debug: ", "\x1b[2mdebug: \x1b[0m"),
        ];
        for (level, usual, on_terminal) in levels {
            let lines = [false, true].map(|coloured| entry(level).for_person("agent", coloured));
            assert_eq!(lines, [usual, on_terminal].map(|word| format!("baton agent: {word}it is late: wait\n")));
        }
        assert_eq!(entry(Level::Info).for_person("", false), "baton: it is late: wait\n");
    }

    #[test]
    fn the_journal_gets_a_field_in_each_line() {
        let entry = entry(Level::Warning);
        let text = String::from_utf8(entry.for_journal("agent")).expect("UTF-8");
        let fields: Vec<&str> = text.lines().collect();
        let expected = [
            "MESSAGE=agent: it is late: wait",
            "PRIORITY=4",
            "SYSLOG_IDENTIFIER=baton",
            "CODE_FILE=a.rs",
            "CODE_LINE=7",
            "CONNECTION=10.0.0.1:80 -> 10.0.0.2:4711",
            "NIC=1",
        ];
        assert_eq!(fields, expected);
        assert!(entry.for_journal("").starts_with(b"MESSAGE=it is late"));
    }

    #[test]
    fn a_count_says_which_lines_were_left_out() {
        let left_out = LeftOut { site: ("a.rs", 7), level: Level::Warning, count: 15, like: "it is late: wait".into() };
        let entry = Entry::counting(left_out);
        let line = "baton agent: warning: (15 more like this were left out) it is late: wait\n";
        assert_eq!(entry.for_person("agent", false), line);
        assert!(String::from_utf8_lossy(&entry.for_journal("agent")).ends_with("LEFT_OUT=15\n"));
    }
}
