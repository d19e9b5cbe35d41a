//! Filters of connections, in the language of ss(8) where that has a word for it.

use super::row::Row;
use baton_handoff::examine::state_name;
use baton_protocol::program::Place;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// What a filter can be made of, for `--help`.
pub const HELP: &str = "Filters, as of ss(8), joined by `and`, `or`, `not` and parentheses:
  sport = :443, dport >= :1024       local and peer's port; = != < <= > >=
  src 10.0.0.0/8, dst [fd00::1]:80   local and peer's address, and port
  place = nic, nic = 1               where it is, nic or kernel; which NIC
  program = nginx, pid = 4711        name and number of the process
  state = established                its TCP state";

/// Deepest nesting of parentheses and `not`.
const DEEPEST: u32 = 64;

/// A filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expression {
    /// Both hold.
    And(Box<Expression>, Box<Expression>),
    /// One of them holds.
    Or(Box<Expression>, Box<Expression>),
    /// It does not hold.
    Not(Box<Expression>),
    /// A port compares so with a number.
    Port(End, Comparison, u16),
    /// An address is in this network, and has this port, if one is named.
    Address(End, Option<Network>, Option<u16>),
    /// It is there.
    Place(Place),
    /// It is on the NIC with this number.
    Nic(u32),
    /// The program's name.
    Program(String),
    /// The process.
    Process(u32),
    /// The TCP state, as Linux numbers it.
    State(u8),
}

/// One of a connection's ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The program's.
    Local,
    /// The other one.
    Peer,
}

/// How two numbers compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// =
    Equal,
    /// !=
    Other,
    /// <
    Less,
    /// <=
    AtMost,
    /// >
    Greater,
    /// >=
    AtLeast,
}

/// Addresses with a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    /// Bits of the prefix.
    length: u8,
}

impl Network {
    fn contains(&self, address: IpAddr) -> bool {
        let bits = |address: IpAddr| match address.to_canonical() {
            IpAddr::V4(v4) => (u128::from(v4.to_bits()) << 96, true),
            IpAddr::V6(v6) => (v6.to_bits(), false),
        };
        let ((ours, v4), (theirs, is_v4)) = (bits(self.address), bits(address));
        let differ = (ours ^ theirs).checked_shr(128 - u32::from(self.length)).unwrap_or(0);
        v4 == is_v4 && differ == 0
    }
}

impl Comparison {
    fn holds(self, left: u16, right: u16) -> bool {
        match self {
            Comparison::Equal => left == right,
            Comparison::Other => left != right,
            Comparison::Less => left < right,
            Comparison::AtMost => left <= right,
            Comparison::Greater => left > right,
            Comparison::AtLeast => left >= right,
        }
    }
}

impl Expression {
    /// Whether a connection is meant.
    pub fn matches(&self, row: &Row) -> bool {
        let end = |end: End| if end == End::Local { row.local } else { row.peer };
        match self {
            Expression::And(one, other) => one.matches(row) && other.matches(row),
            Expression::Or(one, other) => one.matches(row) || other.matches(row),
            Expression::Not(one) => !one.matches(row),
            Expression::Port(of, how, port) => end(*of).is_some_and(|address| how.holds(address.port(), *port)),
            Expression::Address(of, network, port) => end(*of).is_some_and(|address: SocketAddr| {
                network.is_none_or(|network| network.contains(address.ip())) && port.is_none_or(|port| port == address.port())
            }),
            Expression::Place(place) => row.info.place == *place,
            Expression::Nic(nic) => row.info.nic == Some(*nic),
            Expression::Program(name) => row.name == *name || row.info.program.rsplit('/').next() == Some(name),
            Expression::Process(process) => row.info.process == *process,
            Expression::State(state) => row.info.detail.state == *state,
        }
    }
}

impl FromStr for Expression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let tokens = tokens(text)?;
        let mut parser = Parser { tokens: &tokens, at: 0, depth: 0 };
        let whole = parser.any_of()?;
        match parser.peek() {
            None => Ok(whole),
            Some(")") => Err("there is one `)` too many".into()),
            Some(word) => Err(format!("{word:?} is unexpected; join terms by `and` or `or`")),
        }
    }
}

/// Words, operators and parentheses. A word in double quotes may have spaces.
fn tokens(text: &str) -> Result<Vec<String>, String> {
    const OPERATORS: [&str; 14] = ["!=", "<=", ">=", "==", "&&", "||", "(", ")", "!", "&", "|", "=", "<", ">"];
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let length = if let Some(quoted) = rest.strip_prefix('"') {
            let end = quoted.find('"').ok_or("a quotation mark is missing at the end")?;
            tokens.push(quoted[..end].to_owned());
            end + 2
        } else {
            let is_end = |c: char| c.is_whitespace() || "()!&|=<>\"".contains(c);
            let operator = OPERATORS.iter().find(|operator| rest.starts_with(**operator)).map(|operator| operator.len());
            let length = operator.unwrap_or_else(|| rest.find(is_end).unwrap_or(rest.len()));
            tokens.push(rest[..length].to_owned());
            length
        };
        rest = rest[length..].trim_start();
    }
    Ok(tokens)
}

struct Parser<'a> {
    tokens: &'a [String],
    at: usize,
    depth: u32,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.tokens.get(self.at).map(String::as_str)
    }

    /// Skips the next word if it is one of these.
    fn skip(&mut self, words: &[&str]) -> bool {
        let is = self.peek().is_some_and(|word| words.contains(&word));
        self.at += usize::from(is);
        is
    }

    fn word(&mut self, behind: &str, what: &str) -> Result<&'a str, String> {
        let word = self.peek().ok_or_else(|| format!("{what} is missing behind `{behind}`"))?;
        self.at += 1;
        Ok(word)
    }

    /// Terms joined by `or`.
    fn any_of(&mut self) -> Result<Expression, String> {
        let mut left = self.all_of()?;
        while self.skip(&["or", "|", "||"]) {
            left = Expression::Or(Box::new(left), Box::new(self.all_of()?));
        }
        Ok(left)
    }

    /// Terms joined by `and`, or by nothing.
    fn all_of(&mut self) -> Result<Expression, String> {
        let mut left = self.term()?;
        while self.skip(&["and", "&", "&&"]) || self.peek().is_some_and(|next| !["or", "|", "||", ")"].contains(&next)) {
            left = Expression::And(Box::new(left), Box::new(self.term()?));
        }
        Ok(left)
    }

    fn term(&mut self) -> Result<Expression, String> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err(format!("more than {DEEPEST} parentheses and `not` inside of each other"));
        }
        let term = if self.skip(&["not", "!"]) {
            Expression::Not(Box::new(self.term()?))
        } else if self.skip(&["("]) {
            let inner = self.any_of()?;
            if !self.skip(&[")"]) {
                return Err("a `)` is missing".into());
            }
            inner
        } else {
            self.comparison()?
        };
        self.depth -= 1;
        Ok(term)
    }

    fn comparison(&mut self) -> Result<Expression, String> {
        let Some(key) = self.peek() else { return Err("a term is missing at the end".into()) };
        self.at += 1;
        let known = ["sport", "dport", "src", "dst", "place", "nic", "program", "pid", "state"].contains(&key);
        if !known {
            return Err(format!("{key:?} is no filter: write sport, dport, src, dst, place, nic, program, pid or state"));
        }
        let how = self.operator();
        if let "sport" | "dport" = key {
            let end = if key == "sport" { End::Local } else { End::Peer };
            return Ok(Expression::Port(end, how.unwrap_or(Comparison::Equal), port(self.word(key, "a port")?)?));
        }
        let equal = match how {
            None | Some(Comparison::Equal) => true,
            Some(Comparison::Other) => false,
            Some(_) => return Err(format!("`{key}` can only be compared by = and !=")),
        };
        let term = self.value(key)?;
        Ok(if equal { term } else { Expression::Not(Box::new(term)) })
    }

    /// What stands behind a key and its operator.
    fn value(&mut self, key: &str) -> Result<Expression, String> {
        let number = |word: &str| word.parse::<u32>().map_err(|_| format!("{word:?} behind `{key}` is not a number"));
        let word = self.word(key, "a value")?;
        Ok(match key {
            "src" => address(End::Local, word)?,
            "dst" => address(End::Peer, word)?,
            "nic" => Expression::Nic(number(word)?),
            "pid" => Expression::Process(number(word)?),
            "program" => Expression::Program(word.to_owned()),
            "place" => match (word, word.strip_prefix("nic").map(str::parse)) {
                ("nic", _) => Expression::Place(Place::Nic),
                ("kernel", _) => Expression::Place(Place::Kernel),
                (_, Some(Ok(nic))) => Expression::Nic(nic),
                _ => return Err(format!("{word:?} is no place: write nic, kernel, or nic0, nic1, …")),
            },
            _ => {
                let number = (1..=11).find(|state| state_name(*state).eq_ignore_ascii_case(word)).ok_or_else(|| {
                    format!("{word:?} is no state: write established, fin-wait-1, fin-wait-2, close-wait, closing, last-ack, …")
                })?;
                Expression::State(number)
            }
        })
    }

    fn operator(&mut self) -> Option<Comparison> {
        let how = match self.peek()? {
            "=" | "==" | "eq" => Comparison::Equal,
            "!=" | "ne" | "neq" => Comparison::Other,
            "<" | "lt" => Comparison::Less,
            "<=" | "le" | "leq" => Comparison::AtMost,
            ">" | "gt" => Comparison::Greater,
            ">=" | "ge" | "geq" => Comparison::AtLeast,
            _ => return None,
        };
        self.at += 1;
        Some(how)
    }
}

fn port(word: &str) -> Result<u16, String> {
    let digits = word.strip_prefix(':').unwrap_or(word);
    digits.parse().map_err(|_| format!("{word:?} is not a port: write a number up to 65535, as `:443`"))
}

/// `ADDRESS`, `ADDRESS/LENGTH`, each with `:PORT` if wanted (then one of IPv6 in brackets); `:PORT` alone; `*` for any.
fn address(end: End, word: &str) -> Result<Expression, String> {
    let wrong = || format!("{word:?} is not an address: write 10.0.0.1, 10.0.0.0/8, 10.0.0.1:80, [fd00::1]:80 or :80");
    let (host, port_text) = match word.strip_prefix('[').map(|rest| rest.split_once(']')) {
        Some(inside) => {
            let (host, rest) = inside.ok_or_else(wrong)?;
            match rest.strip_prefix('/') {
                // [fd00::]/8, as ss(8) writes it.
                Some(length) => {
                    let (length, port) = length.split_once(':').map_or((length, None), |(length, port)| (length, Some(port)));
                    (format!("{host}/{length}"), port)
                }
                None if rest.is_empty() => (host.to_owned(), None),
                None => (host.to_owned(), Some(rest.strip_prefix(':').ok_or_else(wrong)?)),
            }
        }
        // More than one colon: an address of IPv6 without brackets and port.
        None if word.matches(':').count() > 1 => (word.to_owned(), None),
        None => match word.split_once(':') {
            Some((host, port)) => (host.to_owned(), Some(port)),
            None => (word.to_owned(), None),
        },
    };
    let port = port_text.filter(|port| *port != "*").map(port).transpose()?;
    if matches!(host.as_str(), "" | "*") {
        return if port.is_some() || host == "*" { Ok(Expression::Address(end, None, port)) } else { Err(wrong()) };
    }
    let (host, length) = host.split_once('/').map_or((host.as_str(), None), |(host, length)| (host, Some(length)));
    let address: IpAddr = host.parse().map_err(|_| wrong())?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    let length = match length {
        Some(text) => text.parse().ok().filter(|length| *length <= most).ok_or_else(wrong)?,
        None => most,
    };
    Ok(Expression::Address(end, Some(Network { address, length }), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::row::tests::row;

    fn matches(text: &str, row: &Row) -> bool {
        text.parse::<Expression>().unwrap_or_else(|why| panic!("{text}: {why}")).matches(row)
    }

    #[test]
    fn terms_match() {
        let mut row = row("10.1.2.3:443", "192.168.7.9:50000");
        row.name = "nginx".into();
        row.info.process = 4711;
        let (yes, no) = (
            [
                "sport = :443",
                "sport=443",
                "sport :443",
                "sport eq :443",
                "dport >= :50000",
                "dport gt 49999",
                "sport != :80",
                "src 10.1.2.3",
                "src 10.0.0.0/8",
                "src = 10.1.2.3:443",
                "src :443",
                "dst 192.168.0.0/16:50000",
                "dst *",
                "dst *:50000",
                "src 0.0.0.0/0",
                "place = kernel",
                "place != nic",
                "program = nginx",
                "program \"nginx\"",
                "pid = 4711",
                "state = established",
                "not dst 10.0.0.0/8",
                "! place = nic",
                "( sport = :443 or sport = :80 ) and dst 192.168.7.9",
                "sport = :80 or sport = :443 and pid 4711",
                "sport = :443 dport = :50000",
                "not (sport = :1 or sport = :2)",
                "dst [fd00::1] or src 10.1.2.3",
            ],
            [
                "sport = :80",
                "dport lt :50000",
                "src 11.0.0.0/8",
                "src 10.1.2.3:80",
                "dst ::/0",
                "place = nic",
                "nic = 0",
                "program = ngin",
                "pid = 1",
                "state = close-wait",
                "not sport = :443",
                "sport = :443 and sport = :80",
                "(sport = :443 or pid = 1) and pid = 2",
                "dst [::]/0",
            ],
        );
        yes.iter().for_each(|text| assert!(matches(text, &row), "{text}"));
        no.iter().for_each(|text| assert!(!matches(text, &row), "{text}"));
    }

    #[test]
    fn places_and_ipv6() {
        let mut row = row("[fd00::1]:80", "[::ffff:10.0.0.7]:9");
        (row.info.place, row.info.nic) = (Place::Nic, Some(1));
        let all = [
            "place = nic",
            "nic = 1",
            "place = nic1",
            "src fd00::/8",
            "src [fd00::1]:80",
            "src [fd00::]/8",
            "src [fd00::]/16:80",
            "dst 10.0.0.7",
        ];
        all.iter().for_each(|text| assert!(matches(text, &row), "{text}"));
        ["nic = 0", "place = nic0", "src fe00::/8"].iter().for_each(|text| assert!(!matches(text, &row), "{text}"));
    }

    #[test]
    fn errors_say_what_to_write() {
        let cases = [
            ("", "missing"),
            ("sprt = :1", "\"sprt\" is no filter: write sport"),
            ("sport = :99999", "up to 65535"),
            ("sport", "a port is missing"),
            ("(sport = :1", "`)` is missing"),
            ("sport = :1)", "too many"),
            ("dst 10.0.0.0/33", "is not an address"),
            ("dst [fd00::1", "is not an address"),
            ("place = card", "no place"),
            ("pid > 3", "only be compared by = and !="),
            ("program = \"x", "quotation mark"),
            ("sport = :1 or", "missing at the end"),
            ("state = open", "is no state"),
            ("nic x", "not a number"),
            ("dst :", "not a port"),
        ];
        for (text, says) in cases {
            let why = text.parse::<Expression>().expect_err(text);
            assert!(why.contains(says), "{text}: {why}");
        }
        let deep = "(".repeat(100_000);
        assert!(deep.parse::<Expression>().unwrap_err().contains("inside of each other"));
        let nots = "not ".repeat(100_000);
        assert!(nots.parse::<Expression>().is_err());
    }
}
