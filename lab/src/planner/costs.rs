//! What small operations cost on a host and with a NIC: the planner's parameters, as `baton plan --save` writes them.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// Sizes in bytes between which a cost is interpolated. Behind the last it goes on in a straight line.
pub const SIZES: [f64; 4] = [64.0, 4096.0, 65_536.0, 524_288.0];

/// CPU time of one party for an exchange, which is a request in one write and its answer in one write, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// Of an exchange of 64 bytes each way, one of many that are under way.
    pub exchange: f64,
    /// More if it is the only one that is under way: each party is woken for it, and nothing is done together.
    pub alone: f64,
    /// More if the request has 4096, 65,536, 524,288 bytes.
    pub request: [f64; 3],
    /// The same of the answer.
    pub answer: [f64; 3],
}

/// The value at `bytes` of a curve that is 0 at 64 bytes and has these values at the other [`SIZES`].
fn curve(values: [f64; 3], bytes: f64) -> f64 {
    let [none, small, middle, large] = SIZES;
    let between = |(from, low): (f64, f64), (to, high): (f64, f64)| low + (high - low) * (bytes - from) / (to - from);
    let points = [(none, 0.0), (small, values[0]), (middle, values[1]), (large, values[2])];
    match bytes {
        _ if bytes <= none => 0.0,
        _ if bytes <= small => between(points[0], points[1]),
        _ if bytes <= middle => between(points[1], points[2]),
        _ => between(points[2], points[3]),
    }
}

impl Line {
    /// Nanoseconds of an exchange with so many bytes each way, where `together` exchanges are under way at once.
    pub fn of(&self, request: f64, answer: f64, together: f64) -> f64 {
        let bytes = curve(self.request, request) + curve(self.answer, answer);
        (self.exchange + self.alone / together.max(1.0) + bytes).max(0.0)
    }

    fn check(&self, what: &str) -> Result<()> {
        let all = [self.exchange, self.alone].into_iter().chain(self.request).chain(self.answer);
        ensure!(all.into_iter().all(f64::is_finite), "{what}: a cost is not a number");
        ensure!(self.exchange >= 0.0, "{what}: an exchange costs less than nothing ({} ns)", self.exchange);
        for (name, costs) in [("request", self.request), ("answer", self.answer)] {
            for (at, pair) in costs.windows(2).enumerate() {
                ensure!(
                    pair[1] >= pair[0],
                    "{what}: {} bytes of {name} cost less ({} ns more than 64 bytes) than {} ({} ns)",
                    SIZES[at + 2],
                    pair[1],
                    SIZES[at + 1],
                    pair[0]
                );
            }
            ensure!(costs[0] + self.exchange >= 0.0, "{what}: an exchange with 4096 bytes of {name} costs less than nothing");
        }
        Ok(())
    }
}

/// What an exchange costs on one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exchange {
    /// The program's process without its own work: its calls, their share of TCP, and what runs in their context.
    pub program: Line,
    /// The peer's, with the kernel's TCP.
    pub peer: Line,
    /// The NIC's process, polling included; nothing without a NIC.
    pub nic: Line,
}

impl Exchange {
    fn check(&self, what: &str) -> Result<()> {
        self.program.check(&format!("{what}, program"))?;
        self.peer.check(&format!("{what}, peer"))?;
        self.nic.check(&format!("{what}, nic"))
    }
}

/// A host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// What it is, in words.
    pub about: String,
    /// Its processors.
    pub processors: usize,
    /// A cheap call on a socket, nanoseconds.
    pub call: f64,
    /// A copied byte, nanoseconds.
    pub copied_byte: f64,
    /// A connection is made, accepted and closed: both ends, nanoseconds.
    pub connection: f64,
    /// An exchange over the kernel's TCP.
    pub kernel: Exchange,
}

/// A NIC.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// What it is, in words.
    pub about: String,
    /// Most connections that it holds.
    pub connections: u32,
    /// A move of a connection to the NIC, all processes, nanoseconds.
    pub moved: f64,
    /// A cheap call on a socket whose connection is on the NIC, nanoseconds.
    pub call: f64,
    /// An exchange on a connection that is on the NIC.
    pub offloaded: Exchange,
    /// An exchange on a connection of the kernel's whose frames pass the NIC (stateless offloads), if it can be inline.
    pub passed: Option<Exchange>,
}

impl Host {
    /// Checks that it does not contradict itself.
    ///
    /// # Errors
    /// What does.
    pub fn check(&self) -> Result<()> {
        ensure!((1..=65_536).contains(&self.processors), "the host has {} processors", self.processors);
        positive("host", &[("call", self.call), ("copied_byte", self.copied_byte), ("connection", self.connection)])?;
        self.kernel.check("host.kernel")?;
        ensure!(self.kernel.nic == Line::default(), "host.kernel.nic: without a NIC an exchange costs none");
        ensure!(
            self.kernel.program.exchange >= self.call,
            "host: an exchange, which is two calls at least, costs the program {} ns, and one call {} ns",
            self.kernel.program.exchange,
            self.call
        );
        Ok(())
    }
}

impl Nic {
    /// Checks that it does not contradict itself.
    ///
    /// # Errors
    /// What does.
    pub fn check(&self) -> Result<()> {
        ensure!(self.connections > 0, "nic.connections: a NIC without room for a connection cannot be planned with");
        positive("nic", &[("moved", self.moved), ("call", self.call)])?;
        self.offloaded.check("nic.offloaded")?;
        ensure!(self.offloaded.nic.exchange > 0.0, "nic.offloaded.nic.exchange: an exchange on the NIC costs the NIC something");
        self.passed.iter().try_for_each(|passed| passed.check("nic.passed"))
    }
}

fn positive(of: &str, values: &[(&str, f64)]) -> Result<()> {
    for (name, value) in values {
        ensure!(value.is_finite() && *value >= 0.0, "{of}.{name} is {value}: it is a time in nanoseconds");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cost_is_interpolated_between_sizes_and_goes_on_behind_the_last() {
        let line = Line { exchange: 1000.0, alone: 500.0, request: [0.0; 3], answer: [200.0, 3200.0, 40_000.0] };
        let at = |bytes| line.of(64.0, bytes, 1e9);
        assert_eq!([64.0, 4096.0, 65_536.0].map(|bytes| at(bytes).round()), [1000.0, 1200.0, 4200.0]);
        assert_eq!(at(524_288.0 + 458_752.0).round(), 1000.0 + 40_000.0 + 36_800.0);
        assert_eq!(at(1.0), at(64.0));
        assert_eq!(line.of(64.0, 64.0, 1.0), 1500.0);
        assert_eq!(line.of(64.0, 64.0, 5.0), 1100.0);
    }

    #[test]
    fn what_contradicts_itself_is_refused_by_name() {
        let exchange = Exchange { program: Line { exchange: 900.0, ..Line::default() }, ..Exchange::default() };
        let host = Host { processors: 2, call: 100.0, kernel: exchange, ..Host::default() };
        host.check().unwrap();
        let error = Host { call: 1000.0, ..host.clone() }.check().unwrap_err().to_string();
        assert!(error.contains("900 ns") && error.contains("1000 ns"), "{error}");
        let falling = Line { exchange: 900.0, answer: [500.0, 100.0, 900.0], ..Line::default() };
        let kernel = Exchange { program: falling, ..exchange };
        let error = Host { kernel, ..host }.check().unwrap_err().to_string();
        assert!(error.starts_with("host.kernel, program: 65536 bytes of answer"), "{error}");
        let nic = Nic { connections: 10, ..Nic::default() };
        assert!(nic.check().unwrap_err().to_string().contains("costs the NIC something"));
    }
}
