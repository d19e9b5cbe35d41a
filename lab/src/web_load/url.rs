//! Where a server is, as a URL says it.

use anyhow::{Context, Result};
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// `http://HOST[:PORT][/PATH]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Url {
    /// Host and port as the header `Host` has them.
    pub authority: String,
    /// The path without a slash at its end; empty for the root.
    pub prefix: String,
    host: String,
    port: u16,
}

/// What is wrong with every text that is no such URL.
const FORM: &str = "a server is named as http://HOST[:PORT][/PATH]";

impl FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Url, String> {
        let wrong = |what: &str| Err(format!("{what}: {FORM}"));
        if text.starts_with("https://") {
            return wrong("only HTTP without TLS is known");
        }
        let Some(rest) = text.strip_prefix("http://") else { return wrong("it does not begin with http://") };
        if rest.chars().any(|character| !character.is_ascii_graphic()) {
            return wrong("spaces and letters outside of ASCII are written with %");
        }
        if rest.contains(['?', '#', '@']) {
            return wrong("it has a query, a fragment or a user");
        }
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        let (host, port) = match authority.strip_prefix('[') {
            // An IPv6 address.
            Some(inner) => inner.split_once(']').unwrap_or(("", "")),
            None => authority.find(':').map_or((authority, ""), |at| authority.split_at(at)),
        };
        if host.is_empty() {
            return wrong("it has no host");
        }
        let port = match port {
            "" => 80,
            _ => match port.strip_prefix(':').and_then(|number| number.parse::<u16>().ok()) {
                None | Some(0) => return wrong("its port is no number from 1 to 65535"),
                Some(port) => port,
            },
        };
        let prefix = path.trim_end_matches('/').to_owned();
        Ok(Url { authority: authority.to_owned(), prefix, host: host.to_owned(), port })
    }
}

impl fmt::Display for Url {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "http://{}{}", self.authority, self.prefix)
    }
}

impl Url {
    /// The server's address: the first one of its name.
    ///
    /// # Errors
    /// If it has none.
    pub fn resolve(&self) -> Result<SocketAddr> {
        let mut found = (self.host.as_str(), self.port).to_socket_addrs().with_context(|| format!("looking up {}", self.host))?;
        found.next().with_context(|| format!("{} has no address", self.host))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read() {
        let read = |text: &str| {
            let url: Url = text.parse().unwrap();
            (url.authority.clone(), url.host.clone(), url.port, url.prefix.clone(), url.to_string())
        };
        let of = |authority: &str, host: &str, port, prefix: &str, text: &str| {
            (authority.to_owned(), host.to_owned(), port, prefix.to_owned(), text.to_owned())
        };
        assert_eq!(read("http://10.0.0.1:8080"), of("10.0.0.1:8080", "10.0.0.1", 8080, "", "http://10.0.0.1:8080"));
        assert_eq!(read("http://a.example/"), of("a.example", "a.example", 80, "", "http://a.example"));
        assert_eq!(read("http://[fd00::1]:81/x/y/"), of("[fd00::1]:81", "fd00::1", 81, "/x/y", "http://[fd00::1]:81/x/y"));
        assert_eq!(read("http://[::1]"), of("[::1]", "::1", 80, "", "http://[::1]"));
        assert_eq!("http://[::1]:81".parse::<Url>().unwrap().resolve().unwrap(), "[::1]:81".parse::<SocketAddr>().unwrap());
    }

    #[test]
    fn other_texts_are_refused() {
        for (text, why) in [
            ("https://a", "without TLS"),
            ("10.0.0.1:80", "does not begin with http://"),
            ("http://", "no host"),
            ("http://:80", "no host"),
            ("http://[::1", "no host"),
            ("http://a:0", "no number from 1"),
            ("http://a:65536", "no number from 1"),
            ("http://[::1]81", "no number from 1"),
            ("http://a/b c", "spaces"),
            ("http://a/\r\nX: y", "spaces"),
            ("http://a/?q", "a query"),
            ("http://me@a/", "a user"),
        ] {
            let said = text.parse::<Url>().unwrap_err();
            assert!(said.contains(why) && said.contains(FORM), "{text}: {said}");
        }
    }
}
