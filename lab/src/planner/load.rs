//! What is asked of a host: connections, and what they carry.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// A size of exchange, and how often it occurs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Size {
    /// Its share, in any unit.
    #[serde(default = "one")]
    pub share: f64,
    /// Bytes of a request.
    pub request: f64,
    /// Bytes of its answer.
    pub answer: f64,
}

/// A load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// Connections at once.
    pub connections: u32,
    /// Requests that a client sends in one write, and whose answers it then waits for.
    #[serde(default = "one")]
    pub depth: f64,
    /// Requests a second of all connections; left out, each connection asks again as soon as it is answered.
    pub rate: Option<f64>,
    /// Sizes of requests and answers.
    pub sizes: Vec<Size>,
    /// The program's own CPU time for a request, in nanoseconds: all that is not a call on a socket.
    #[serde(default)]
    pub program: f64,
    /// The same of the peer.
    #[serde(default)]
    pub peer: f64,
    /// Calls on a socket for the requests of a write, more than one that reads them, one that finds nothing more, and
    /// one that writes the answers.
    #[serde(default)]
    pub calls: f64,
    /// Requests of a connection in its life; left out, it lives for ever.
    pub requests: Option<f64>,
    /// The peer is on this machine, and its CPU time counts.
    #[serde(default)]
    pub peer_here: bool,
}

fn one() -> f64 {
    1.0
}

impl Load {
    /// Requests of one size on so many connections, each asking again as soon as it is answered.
    pub fn closed(name: &str, connections: u32, depth: f64, request: f64, answer: f64) -> Load {
        Load {
            name: name.into(),
            connections,
            depth,
            rate: None,
            sizes: vec![Size { share: 1.0, request, answer }],
            program: 0.0,
            peer: 0.0,
            calls: 0.0,
            requests: None,
            peer_here: true,
        }
    }

    /// Checks that it can be.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check(&self) -> Result<()> {
        ensure!(self.connections > 0, "load.connections is 0: a load has a connection at least");
        ensure!(self.depth.is_finite() && self.depth >= 1.0, "load.depth is {}: a write has a request at least", self.depth);
        ensure!(!self.sizes.is_empty(), "load.sizes is empty: how many bytes a request and an answer have is not said");
        for size in &self.sizes {
            let Size { share, request, answer } = *size;
            ensure!(share.is_finite() && share > 0.0, "load.sizes: a share is {share}; leave out what does not occur");
            for (what, bytes) in [("request", request), ("answer", answer)] {
                ensure!((0.0..=1e12).contains(&bytes), "load.sizes: a {what} of {bytes} bytes cannot be");
            }
            ensure!(request + answer > 0.0, "load.sizes: an exchange without a byte is none");
        }
        for (what, nanos) in [("program", self.program), ("peer", self.peer)] {
            ensure!((0.0..=1e12).contains(&nanos), "load.{what} is {nanos}: it is a time in nanoseconds");
        }
        ensure!((0.0..=1e6).contains(&self.calls), "load.calls is {}", self.calls);
        if let Some(rate) = self.rate {
            ensure!(
                rate.is_finite() && rate > 0.0,
                "load.rate is {rate} requests a second: leave it out for as many as there can be"
            );
        }
        if let Some(requests) = self.requests {
            ensure!(
                requests.is_finite() && requests >= 1.0,
                "load.requests is {requests}: a connection carries a request at least"
            );
            ensure!(
                requests >= self.depth,
                "load.requests is {requests}, fewer than load.depth ({}), which a connection sends at once",
                self.depth
            );
        }
        Ok(())
    }

    /// The mean over all sizes of what `of` says about one.
    pub fn mean(&self, of: impl Fn(&Size) -> f64) -> f64 {
        let all: f64 = self.sizes.iter().map(|size| size.share).sum();
        self.sizes.iter().map(|size| size.share * of(size)).sum::<f64>() / all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_cannot_be_is_refused_by_name() {
        let whole = Load::closed("a", 64, 1.0, 64.0, 256.0);
        whole.check().unwrap();
        let says = |load: Load, what: &str| {
            let error = load.check().unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        says(Load { connections: 0, ..whole.clone() }, "load.connections");
        says(Load { depth: 0.5, ..whole.clone() }, "load.depth is 0.5");
        says(Load { sizes: Vec::new(), ..whole.clone() }, "load.sizes");
        says(Load { rate: Some(0.0), ..whole.clone() }, "load.rate");
        says(Load { depth: 16.0, requests: Some(4.0), ..whole.clone() }, "fewer than load.depth (16)");
        says(Load { sizes: vec![Size { share: 1.0, request: -1.0, answer: 1.0 }], ..whole }, "a request of -1 bytes");
    }
}
