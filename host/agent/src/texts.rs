//! Texts that programs say: names and reasons. What is kept of them is short, since lists of many must fit into a message.

/// Bytes of a text that are kept.
const LONGEST: usize = 160;

/// What is kept of a text.
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
