//! Replaces addresses in texts by numbers: the same address by the same number, so that what belongs together can be
//! seen.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Replaces addresses.
pub struct Hider {
    hides: bool,
    known: HashMap<String, usize>,
}

/// What an address can be made of.
fn is_part(letter: char) -> bool {
    letter.is_ascii_hexdigit() || letter == ':' || letter == '.'
}

/// Addresses that every host has say nothing.
fn is_everyones(address: IpAddr) -> bool {
    let address = address.to_canonical();
    address.is_loopback() || address.is_unspecified()
}

impl Hider {
    /// `hides`: otherwise texts stay as they are.
    pub fn new(hides: bool) -> Hider {
        Hider { hides, known: HashMap::new() }
    }

    /// How many addresses were replaced, each once.
    pub fn count(&self) -> usize {
        self.known.len()
    }

    /// The text with numbers in place of addresses.
    pub fn hide(&mut self, text: &str) -> String {
        if !self.hides {
            return text.to_owned();
        }
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        let mut before = ' ';
        while let Some(letter) = rest.chars().next() {
            let length = rest.find(|letter: char| !is_part(letter)).unwrap_or(rest.len());
            if length > 0 && !(before.is_alphanumeric() || before == '_') {
                // What is behind it decides whether it is a word of its own.
                let follows = rest[length..].chars().next().unwrap_or(' ');
                let word = &rest[..length];
                let word =
                    if follows.is_alphanumeric() || follows == '_' { word.trim_end_matches(char::is_alphanumeric) } else { word };
                out.push_str(&self.hide_word(word));
                out.push_str(&rest[word.len()..length]);
            } else if length > 0 {
                out.push_str(&rest[..length]);
            } else {
                out.push(letter);
            }
            let taken = length.max(if length == 0 { letter.len_utf8() } else { 0 });
            before = rest[..taken].chars().next_back().unwrap_or(' ');
            rest = &rest[taken..];
        }
        out
    }

    /// Replaces the address in a word of the letters that addresses have: alone, with a port, with a sign at its end.
    fn hide_word(&mut self, word: &str) -> String {
        let bare = word.trim_end_matches(['.', ':']);
        // An address of IPv6 may end with two colons, and have a further one behind it.
        for candidate in [word, word.strip_suffix([':', '.']).unwrap_or(word), bare] {
            let address =
                candidate.parse::<Ipv4Addr>().map(IpAddr::from).or_else(|_| candidate.parse::<Ipv6Addr>().map(IpAddr::from));
            if let Ok(address) = address {
                let shown =
                    if is_everyones(address) { candidate.to_owned() } else { self.number(&address.to_canonical().to_string()) };
                return shown + &word[candidate.len()..];
            }
        }
        if let Some((address, port)) = bare.split_once(':')
            && let Ok(address) = address.parse::<Ipv4Addr>()
            && port.parse::<u16>().is_ok()
        {
            return format!("{}:{port}{}", self.hide_word(&address.to_string()), &word[bare.len()..]);
        }
        let groups: Vec<&str> = bare.split(':').collect();
        if groups.len() == 6 && groups.iter().all(|group| group.len() == 2 && u8::from_str_radix(group, 16).is_ok()) {
            return self.number(&bare.to_lowercase()) + &word[bare.len()..];
        }
        word.to_owned()
    }

    fn number(&mut self, address: &str) -> String {
        let next = self.known.len() + 1;
        format!("address-{}", self.known.entry(address.to_owned()).or_insert(next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_become_numbers() {
        let mut hider = Hider::new(true);
        let cases = [
            ("10.77.0.1:8080 to 10.77.0.2:50000.", "address-1:8080 to address-2:50000."),
            ("[fd00::1]:443, fd00::1 and fe80::1%eth0", "[address-3]:443, address-3 and address-4%eth0"),
            ("::ffff:10.77.0.1", "address-1"),
            ("its source address 10.77.0.1 is", "its source address address-1 is"),
            ("10.0.0.0/8", "address-5/8"),
            ("02:42:ac:11:00:02 has it", "address-6 has it"),
            ("fd00::: gone, fd00::1: too", "address-7: gone, address-3: too"),
            ("\"local\":\"10.77.0.2:1\"", "\"local\":\"address-2:1\""),
        ];
        for (text, hidden) in cases {
            assert_eq!(hider.hide(text), hidden, "{text}");
        }
        assert_eq!(hider.count(), 7);
    }

    #[test]
    fn other_texts_stay() {
        let mut hider = Hider::new(true);
        for text in [
            "6.12.38+deb13-amd64",
            "at 12:30:45.123, 2026-11-28",
            "baton::list::dead, std::fade",
            "127.0.0.1:80 and [::1]:80, 0.0.0.0, ::",
            "0.4 s; 1.2.3; face; café: é",
            "deadbeefcafe 1e9 {\"a\":[1,2,3.5]}",
        ] {
            assert_eq!(hider.hide(text), text);
        }
        assert_eq!(hider.count(), 0);
        assert_eq!(Hider::new(false).hide("10.77.0.1"), "10.77.0.1");
    }
}
