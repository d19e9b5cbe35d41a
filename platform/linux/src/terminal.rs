//! Terminals, and texts for them.

use std::os::fd::AsFd;

/// Columns of a terminal. None if the descriptor is no terminal's, or the terminal does not report them.
pub fn columns(fd: impl AsFd) -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(fd).ok()?;
    (size.ws_col > 0).then_some(usize::from(size.ws_col))
}

/// The text with control characters, and characters that change the direction of writing, escaped: a terminal would act
/// on them, or show a text that differs from the actual one.
pub fn plain(text: &str) -> String {
    let acts =
        |c: char| c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if !text.contains(acts) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if acts(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_told_nothing() {
        assert_eq!(plain("nginx: größer\u{2603}"), "nginx: größer\u{2603}");
        assert_eq!(plain("\u{1b}[2Jx\r\n\u{9b}31m\u{202e}"), "\\u{1b}[2Jx\\r\\n\\u{9b}31m\\u{202e}");
    }
}
