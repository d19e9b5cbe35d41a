//! Texts from programs: names and reasons. They are shortened, since lists of many must fit into a message.

/// Most bytes of a text that are kept.
const LONGEST: usize = 160;

/// Returns a text shortened to what is kept of it.
pub(crate) fn shortened(text: &str) -> String {
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
        assert_eq!(shortened(&format!("x{}", "é".repeat(100))).len(), 159);
    }
}
