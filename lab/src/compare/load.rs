//! The loads of each bench, and the figures of theirs that have bounds.

use super::Column;
use super::way::Way;
use crate::bars::Bar;

/// Connections to redis-server, as redis-benchmark has.
const REDIS_CONNECTIONS: usize = 50;

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// A web server (nginx, or a small one of ours) and a file of 256 bytes, at 64 and 512 connections, of our own
    /// client and of wrk.
    Http,
    /// redis-server, GET on 50 connections, one request at a time and 16.
    Redis,
    /// One connection in bulk, into a program and out of it.
    Bulk,
    /// Messages of 64 bytes to a program that echoes them, on 64 and 1024 connections, one at a time on each.
    Rpc,
    /// The same on one connection, between two programs that never sleep. Those of the kernel and of smoltcp have a
    /// core each. Baton's NIC never sleeps either and has a core, so that both programs share the other one, and offer
    /// it to each other.
    PingPong,
}

/// Who asks a web server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WebClient {
    /// [`crate::closed_loop`].
    Own,
    /// wrk, with which people measure.
    Wrk,
}

/// What a client does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Traffic {
    Http {
        connections: usize,
        client: WebClient,
    },
    /// This many requests at once on each connection.
    Redis {
        depth: usize,
    },
    Bulk {
        into: bool,
    },
    Rpc {
        connections: usize,
    },
    PingPong,
}

impl Traffic {
    pub(super) fn connections(self) -> usize {
        match self {
            Traffic::Http { connections, .. } | Traffic::Rpc { connections } => connections,
            Traffic::Redis { .. } => REDIS_CONNECTIONS,
            Traffic::Bulk { .. } | Traffic::PingPong => 1,
        }
    }

    /// Whether bytes count, and not requests.
    pub(super) fn is_bulk(self) -> bool {
        matches!(self, Traffic::Bulk { .. })
    }

    /// Whether it is measured if only one of the web servers' clients is.
    pub(super) fn is_of(self, only: Option<WebClient>) -> bool {
        match self {
            Traffic::Http { client, .. } => only.is_none_or(|only| only == client),
            _ => true,
        }
    }

    /// Whether its client is wrk.
    pub(super) fn is_by_wrk(self) -> bool {
        matches!(self, Traffic::Http { client: WebClient::Wrk, .. })
    }
}

/// Loads whose cost is measured in the kernel and on the NIC, and then assumed of loads that are like them.
pub(super) const TYPICAL: [(&str, Traffic); 3] = [
    ("64 connections with a request of 64 bytes each", Traffic::Rpc { connections: 64 }),
    ("bulk data in", Traffic::Bulk { into: true }),
    ("bulk data out", Traffic::Bulk { into: false }),
];

/// A figure that has a bound: its name, whose it is, which it is, of what kind the bound is, and the bound.
pub(super) type Figure = (&'static str, Way, fn(&Column) -> f64, fn(&'static str, f64, f64) -> Bar, f64);

/// Names of the bars of placement by measured gain: rate, CPU time, kept gain, 99th percentile of the waiting times.
pub(super) type GainNames = [&'static str; 4];

macro_rules! gain {
    ($load:literal) => {
        [concat!("gain.rate_", $load), concat!("gain.machine_", $load), concat!("gain.kept_", $load), concat!("gain.p99_", $load)]
    };
}

pub(super) struct Load {
    pub name: &'static str,
    pub traffic: Traffic,
    pub bars: Vec<Figure>,
    pub gain: GainNames,
}

impl Load {
    /// The ways on which there is a server for this load, in the order in which they take turns.
    pub(super) fn ways(&self) -> &'static [Way] {
        match self.traffic {
            Traffic::Http { .. } | Traffic::Redis { .. } => &[Way::Kernel, Way::Beside, Way::Gain, Way::Inline, Way::Attached],
            Traffic::Rpc { .. } => &[Way::Kernel, Way::Beside, Way::Gain, Way::Library, Way::Inline, Way::Attached, Way::Smoltcp],
            Traffic::Bulk { into: true } => &[Way::Kernel, Way::Beside, Way::Gain, Way::Inline, Way::Attached, Way::Smoltcp],
            Traffic::Bulk { into: false } => {
                &[Way::Kernel, Way::Beside, Way::Gain, Way::Library, Way::Buffers, Way::Inline, Way::Attached, Way::Smoltcp]
            }
            Traffic::PingPong => &[Way::Kernel, Way::Beside, Way::Inline, Way::Attached, Way::Smoltcp],
        }
    }
}

/// The loads of a bench; with `gain` those, too, that only placement by measured gain has bars for.
pub(super) fn loads(what: What, gain: bool) -> Vec<Load> {
    let (rate, p99, machine) = (|of: &Column| of.rate_ratio, |of: &Column| of.p99_ratio, |of: &Column| of.machine_ratio);
    let (p50, host) = (|of: &Column| of.p50_ratio, |of: &Column| of.host_ratio);
    let load = |name, traffic, gain, bars: &[Figure]| Load { name, traffic, bars: bars.to_vec(), gain };
    let mut loads = match what {
        What::Http => vec![
            load(
                "http, 64 connections",
                Traffic::Http { connections: 64, client: WebClient::Own },
                gain!("http_64"),
                &[
                    ("http.machine_ratio_64", Way::Beside, machine, Bar::most, 0.8),
                    ("http.rate_ratio_64", Way::Beside, rate, Bar::least, 1.15),
                ],
            ),
            load(
                "http, 512 connections",
                Traffic::Http { connections: 512, client: WebClient::Own },
                gain!("http_512"),
                &[
                    ("http.machine_ratio_512", Way::Beside, machine, Bar::most, 0.8),
                    ("http.rate_ratio_512", Way::Beside, rate, Bar::least, 1.15),
                    ("http.p99_ratio_512", Way::Beside, p99, Bar::most, 1.0),
                ],
            ),
        ],
        What::Redis => vec![
            load(
                "redis GET",
                Traffic::Redis { depth: 1 },
                gain!("redis_p1"),
                &[("redis.machine_ratio_p1", Way::Beside, machine, Bar::most, 0.8)],
            ),
            load(
                "redis GET, pipelined by 16",
                Traffic::Redis { depth: 16 },
                gain!("redis_p16"),
                &[("redis.machine_ratio_p16", Way::Beside, machine, Bar::most, 0.9)],
            ),
        ],
        What::Bulk => vec![
            load(
                "bulk in",
                Traffic::Bulk { into: true },
                gain!("bulk_in"),
                &[
                    ("bulk_in.rate_ratio", Way::Beside, rate, Bar::least, 1.0),
                    ("bulk_in.machine_ratio", Way::Beside, machine, Bar::most, 1.0),
                ],
            ),
            load(
                "bulk out",
                Traffic::Bulk { into: false },
                gain!("bulk_out"),
                &[
                    ("bulk_out.rate_ratio", Way::Beside, rate, Bar::least, 1.0),
                    ("bulk_out.machine_ratio", Way::Beside, machine, Bar::most, 0.9),
                    ("bulk_out.host_ratio_buffers", Way::Buffers, host, Bar::most, 0.1),
                ],
            ),
        ],
        What::Rpc => vec![
            load(
                "rpc, 64 connections",
                Traffic::Rpc { connections: 64 },
                gain!("rpc_64"),
                &[("rpc.machine_ratio_64", Way::Beside, machine, Bar::most, 0.65)],
            ),
            load(
                "rpc, 1024 connections",
                Traffic::Rpc { connections: 1024 },
                gain!("rpc_1024"),
                &[
                    ("rpc.machine_ratio_1024", Way::Beside, machine, Bar::most, 0.65),
                    ("rpc.host_ratio_1024", Way::Library, host, Bar::most, 0.1),
                ],
            ),
        ],
        What::PingPong => {
            vec![load(
                "ping-pong",
                Traffic::PingPong,
                gain!("pingpong"),
                &[("pingpong.p50_ratio", Way::Beside, p50, Bar::most, 0.6)],
            )]
        }
    };
    if what == What::Http {
        let http = |connections, client| Traffic::Http { connections, client };
        let many = || load("http, 1024 connections", http(1024, WebClient::Own), gain!("http_1024"), &[]);
        loads.extend(gain.then(many));
        loads.push(load("http by wrk, 64 connections", http(64, WebClient::Wrk), gain!("http_wrk_64"), &[]));
        loads.push(load("http by wrk, 512 connections", http(512, WebClient::Wrk), gain!("http_wrk_512"), &[]));
        loads.push(load("http by wrk, 1024 connections", http(1024, WebClient::Wrk), gain!("http_wrk_1024"), &[]));
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrk_asks_over_as_many_connections_as_people_measure() {
        let by_wrk = loads(What::Http, false).into_iter().map(|load| load.traffic).filter(|traffic| traffic.is_by_wrk());
        assert_eq!(by_wrk.map(Traffic::connections).collect::<Vec<_>>(), [64, 512, 1024]);
    }
}
