//! Rules that say when a program's connections go to the NIC. The first that matches a connection counts.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// When a connection that matches the rule goes to the NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum When {
    /// As soon as it is established.
    Established,
    /// As soon as the program has accepted it; never if it connected.
    Accepted,
    /// As soon as the program has connected it; never if it accepted.
    Connected,
    /// After this many bytes, sum of both directions.
    Bytes(u64),
    /// After this many requests: changes from receiving to sending.
    Requests(u64),
    /// While it carries at least this many bytes per second; it goes back when it carries much less.
    Hot(u32),
    /// Never.
    Never,
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            When::Established => f.write_str("established"),
            When::Accepted => f.write_str("accepted"),
            When::Connected => f.write_str("connected"),
            When::Bytes(count) => write!(f, "bytes {count}"),
            When::Requests(count) => write!(f, "requests {count}"),
            When::Hot(rate) => write!(f, "hot {rate}"),
            When::Never => f.write_str("never"),
        }
    }
}

impl From<When> for String {
    fn from(when: When) -> String {
        when.to_string()
    }
}

impl TryFrom<String> for When {
    type Error = String;

    fn try_from(text: String) -> Result<When, String> {
        text.parse()
    }
}

/// Bytes a second that a connection has to carry under the rule `hot` without a number.
const HOT_FROM: u32 = 1 << 20;

/// Parses a number of bytes a second, with K, M or G for their powers of 1024.
fn rate(text: &str) -> Result<u32, String> {
    let text = text.trim();
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|digits| digits.checked_mul(1 << shift));
    bytes.and_then(|bytes| u32::try_from(bytes).ok()).filter(|bytes| *bytes > 0).ok_or_else(|| {
        format!("{text:?} is not a number of bytes a second; write for example hot:500K or hot:20M (at least 1, less than 4G)")
    })
}

impl FromStr for When {
    type Err = String;

    fn from_str(text: &str) -> Result<When, String> {
        let number = |text: &str| text.trim().parse::<u64>().map_err(|_| format!("{:?} is not a number", text.trim()));
        match text {
            "established" => Ok(When::Established),
            "accepted" => Ok(When::Accepted),
            "connected" => Ok(When::Connected),
            "never" => Ok(When::Never),
            "hot" => Ok(When::Hot(HOT_FROM)),
            _ => match text.split_once([' ', ':']) {
                Some(("bytes", count)) => number(count).map(When::Bytes),
                Some(("requests", count)) => number(count).map(When::Requests),
                Some(("hot", bytes)) => rate(bytes).map(When::Hot),
                _ => Err(format!(
                    "{text:?} is not a known moment; use one of: established, accepted, connected, bytes:N, requests:N, hot[:RATE], never"
                )),
            },
        }
    }
}

/// Ports: `80`, `8000-8999`, or several of those with commas.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Ports(Vec<(u16, u16)>);

impl Ports {
    /// Whether it contains a port.
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&port))
    }
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Ports, String> {
        let port = |text: &str| match text.trim().parse::<u16>() {
            Ok(port) if port > 0 => Ok(port),
            _ => Err(format!("{:?} is not a port (1 to 65535)", text.trim())),
        };
        let range = |part: &str| match part.split_once('-') {
            Some((first, last)) => {
                let (first, last) = (port(first)?, port(last)?);
                if first > last {
                    Err(format!("the range {part:?} is empty: write the lower port first"))
                } else {
                    Ok((first, last))
                }
            }
            None => port(part).map(|port| (port, port)),
        };
        text.split(',').map(range).collect::<Result<_, _>>().map(Ports)
    }
}

impl From<Ports> for String {
    fn from(ports: Ports) -> String {
        let one = |(first, last): (u16, u16)| if first == last { first.to_string() } else { format!("{first}-{last}") };
        ports.0.into_iter().map(one).collect::<Vec<_>>().join(",")
    }
}

impl TryFrom<String> for Ports {
    type Error = String;

    fn try_from(text: String) -> Result<Ports, String> {
        text.parse()
    }
}

/// Addresses: `10.0.0.0/8`, or one address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    /// Whether it contains an address. IPv4-mapped ones count as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        let bits = |address: IpAddr| match address {
            IpAddr::V4(v4) => u128::from(v4.to_bits()) << 96,
            IpAddr::V6(v6) => v6.to_bits(),
        };
        let address = address.to_canonical();
        let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix)).unwrap_or(0);
        address.is_ipv4() == self.address.is_ipv4() && (bits(address) ^ bits(self.address)) & mask == 0
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Network, String> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let address: IpAddr = address.parse().map_err(|_| format!("{address:?} is not an IP address"))?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => most,
            Some(prefix) => prefix
                .parse()
                .ok()
                .filter(|prefix| *prefix <= most)
                .ok_or_else(|| format!("{prefix:?} is not a prefix length (0 to {most})"))?,
        };
        Ok(Network { address, prefix })
    }
}

impl From<Network> for String {
    fn from(network: Network) -> String {
        format!("{}/{}", network.address, network.prefix)
    }
}

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Network, String> {
        text.parse()
    }
}

/// A rule. A condition that is not set matches everything.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rule {
    /// When a connection goes to the NIC.
    pub when: When,
    /// Its local port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_port: Option<Ports>,
    /// The peer's port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_port: Option<Ports>,
    /// Its local address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<Network>,
    /// The peer's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<Network>,
    /// The program's name: the last part of its path, or the name by which it was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// The first part of its control group's path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
}

impl Rule {
    /// A rule that matches every connection.
    pub fn all(when: When) -> Rule {
        Rule { when, local_port: None, remote_port: None, local: None, remote: None, program: None, cgroup: None }
    }

    /// Whether the rule can match a program's connections.
    pub fn fits_program(&self, program: &str, cgroup: &str) -> bool {
        self.program.as_ref().is_none_or(|wanted| wanted == program)
            && self.cgroup.as_ref().is_none_or(|wanted| {
                cgroup.strip_prefix(wanted.trim_end_matches('/')).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
    }

    /// Whether it matches a connection of such a program.
    pub fn fits(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        self.local_port.as_ref().is_none_or(|ports| ports.contains(local.port()))
            && self.remote_port.as_ref().is_none_or(|ports| ports.contains(remote.port()))
            && self.local.is_none_or(|network| network.contains(local.ip()))
            && self.remote.is_none_or(|network| network.contains(remote.ip()))
    }

    /// Whether it needs a connection's addresses.
    pub fn needs_addresses(&self) -> bool {
        self.local_port.is_some() || self.remote_port.is_some() || self.local.is_some() || self.remote.is_some()
    }
}

impl FromStr for Rule {
    type Err = String;

    /// Parses `WHEN[,NAME=VALUE]…`. The ports of one rule are separated by `+` here.
    fn from_str(text: &str) -> Result<Rule, String> {
        let mut parts = text.split(',');
        let mut rule = Rule::all(parts.next().unwrap_or_default().trim().parse()?);
        for part in parts {
            let (name, value) =
                part.split_once('=').ok_or_else(|| format!("{part:?} is not a condition; write for example local-port=80"))?;
            let value = value.trim();
            match name.trim() {
                "local-port" => rule.local_port = Some(value.replace('+', ",").parse()?),
                "remote-port" => rule.remote_port = Some(value.replace('+', ",").parse()?),
                "local" => rule.local = Some(value.parse()?),
                "remote" => rule.remote = Some(value.parse()?),
                "program" => rule.program = Some(value.into()),
                "cgroup" => rule.cgroup = Some(value.into()),
                other => {
                    return Err(format!(
                        "{other:?} is not a known condition; use one of: local-port, remote-port, local, remote, program, cgroup"
                    ));
                }
            }
        }
        Ok(rule)
    }
}

/// Who makes a program's connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// The kernel; they move to the NIC by the rules.
    #[default]
    Handoff,
    /// The NIC, where it can; those that the kernel has made move by the rules.
    Full,
    /// The kernel; they move to the NIC by the rules, which keeps only their fast path.
    #[serde(rename = "fast-path")]
    FastPath,
}

impl Offload {
    /// Its name in `--offload`.
    pub fn name(self) -> &'static str {
        match self {
            Offload::Handoff => "handoff",
            Offload::Full => "full",
            Offload::FastPath => "fast-path",
        }
    }
}

/// How a program's sends cross to the NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Interface {
    /// One message, which the NIC acknowledges before the next is given to it, as with I2O.
    Handshake,
    /// Messages in a ring, which the NIC reads when it comes to them.
    #[default]
    Batched,
    /// Small sends are joined in memory while earlier ones wait for an acknowledgement, of the peer's or the NIC's (see
    /// [`Nagle`]); one message announces them all.
    Aggregated,
}

impl Interface {
    /// Its name in `--interface`.
    pub fn name(self) -> &'static str {
        match self {
            Interface::Handshake => "handshake",
            Interface::Batched => "batched",
            Interface::Aggregated => "aggregated",
        }
    }
}

/// Where Nagle's rule (RFC 9293 section 3.7.4) keeps a program's small sends back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Nagle {
    /// In the NIC's TCP: every send crosses to the NIC, which joins small ones.
    #[default]
    Nic,
    /// In the program: small sends stay in send memory until the peer has acknowledged the bytes before them, and cross
    /// as one.
    Host,
}

impl Nagle {
    /// Its name in `--nagle`.
    pub fn name(self) -> &'static str {
        match self {
            Nagle::Nic => "nic",
            Nagle::Host => "host",
        }
    }

    /// Where Nagle's rule is applied by default.
    pub fn usual(interface: Interface) -> Nagle {
        if interface == Interface::Aggregated { Nagle::Host } else { Nagle::Nic }
    }
}

/// Settings of a program that runs under Baton, in [`RUN_VARIABLE`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Path of the agent's socket.
    pub socket: std::path::PathBuf,
    /// The user, besides root, whose listener at that path is trusted.
    #[serde(default)]
    pub user: u32,
    /// The group that its sessions belong to.
    pub group: u64,
    /// When its connections go to the NIC.
    pub rules: Vec<Rule>,
    /// The agent moves them there and back at random.
    #[serde(default)]
    pub flips: bool,
    /// Connections are handed over as soon as their rule matches, even if the move does not pay.
    #[serde(default)]
    pub eager: bool,
    /// Who makes its connections.
    #[serde(default)]
    pub offload: Offload,
    /// How its sends cross to the NIC.
    #[serde(default)]
    pub interface: Interface,
    /// Where Nagle's rule keeps its small sends back.
    #[serde(default)]
    pub nagle: Nagle,
    /// Number of the process's seccomp filters that are known to let through the calls that the library needs.
    #[serde(default)]
    pub filters: u32,
    /// A system call that a further filter does not let through.
    #[serde(default)]
    pub refused: Option<String>,
    /// What standard error was when the program was started: the library writes there and nowhere else.
    #[serde(default)]
    pub error: Option<baton_linux::files::Identity>,
}

/// The environment variable that contains a [`Run`], as JSON.
pub const RUN_VARIABLE: &str = "BATON_RUN";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_and_fit() {
        let rule: Rule = "bytes 100,local-port=80+8000-8999,remote=10.0.0.0/8,cgroup=/web/".parse().unwrap();
        assert_eq!(rule.when, When::Bytes(100));
        let fits = |local: &str, remote: &str| rule.fits(local.parse().unwrap(), remote.parse().unwrap());
        assert!(fits("1.2.3.4:8080", "10.1.1.1:5") && fits("[::1]:80", "[::ffff:10.1.1.1]:5"));
        assert!(!fits("1.2.3.4:81", "10.1.1.1:5") && !fits("1.2.3.4:80", "11.1.1.1:5"));
        assert!(rule.fits_program("x", "/web/a") && rule.fits_program("x", "/web") && !rule.fits_program("x", "/website"));
        for wrong in ["soon", "bytes", "bytes x", "accepted,port=80", "accepted,local-port=0", "accepted,local-port=9-8"] {
            assert!(wrong.parse::<Rule>().is_err(), "{wrong}");
        }
        assert!("::/0".parse::<Network>().unwrap().contains("fe80::1".parse().unwrap()));
        assert!("1.2.3.4/33".parse::<Network>().is_err());
    }

    #[test]
    fn rules_survive_their_text() {
        for rule in ["requests 3,remote-port=1+2-3,local=::1,program=nginx", "hot", "hot:500K,local-port=80"] {
            let rule: Rule = rule.parse().unwrap();
            let text = serde_json::to_string(&rule).unwrap();
            assert_eq!(serde_json::from_str::<Rule>(&text).unwrap(), rule, "{text}");
        }
    }

    #[test]
    fn hot_has_a_number_of_bytes_a_second() {
        for (text, bytes) in [
            ("hot", 1 << 20),
            ("hot:1", 1),
            ("hot 500", 500),
            ("hot:500K", 500 << 10),
            ("hot: 20m", 20 << 20),
            ("hot:3G", 3 << 30),
            ("hot:4294967295", u32::MAX),
        ] {
            assert_eq!(text.parse::<When>(), Ok(When::Hot(bytes)), "{text}");
        }
        for wrong in
            ["hot:", "hot:0", "hot:0M", "hot:4G", "hot:99999999999G", "hot:-1", "hot:1.5M", "hot:fast", "hot:1MB", "hotter"]
        {
            let error = wrong.parse::<When>().unwrap_err();
            assert!(error.contains("hot"), "{wrong}: {error}");
        }
    }
}
