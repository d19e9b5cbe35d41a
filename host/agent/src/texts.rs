//! Texts from programs: names and reasons. They are shortened, since lists of many must fit into a message, and without
//! what a terminal or a log would act on.

use baton_linux::terminal::plain;

/// Most bytes of a text that are kept.
const LONGEST: usize = 160;

/// Returns a text shortened to what is kept of it, with control characters escaped.
pub(crate) fn shortened(text: &str) -> String {
    let mut end = text.len().min(LONGEST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let text = plain(&text[..end]);
    let mut end = text.len().min(LONGEST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_letters() {
        assert_eq!(shortened("nginx"), "nginx");
        assert_eq!(shortened(&"é".repeat(100)), "é".repeat(80));
        assert_eq!(shortened("a\u{1b}[2Jb"), "a\\u{1b}[2Jb");
        assert_eq!(shortened(&"\u{1b}".repeat(100)).len(), LONGEST);
        assert_eq!(shortened(&format!("x{}", "é".repeat(100))).len(), 159);
    }
}
