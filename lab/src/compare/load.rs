//! The loads of each bench, and the figures of theirs that have bounds.

use super::Column;
use super::way::Way;
use crate::bars::Bar;

/// Connections to redis-server, as redis-benchmark has.
const REDIS_CONNECTIONS: usize = 50;

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// A web server (nginx, or a small one of ours) and a file of 256 bytes, at 64 and 512 connections.
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

/// What a client does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Traffic {
    Http {
        connections: usize,
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
            Traffic::Http { connections } | Traffic::Rpc { connections } => connections,
            Traffic::Redis { .. } => REDIS_CONNECTIONS,
            Traffic::Bulk { .. } | Traffic::PingPong => 1,
        }
    }

    /// Whether bytes count, and not requests.
    pub(super) fn is_bulk(self) -> bool {
        matches!(self, Traffic::Bulk { .. })
    }
}

/// A figure that has a bound: its name, whose it is, which it is, of what kind the bound is, and the bound.
pub(super) type Figure = (&'static str, Way, fn(&Column) -> f64, fn(&'static str, f64, f64) -> Bar, f64);

pub(super) struct Load {
    pub name: &'static str,
    pub traffic: Traffic,
    pub bars: Vec<Figure>,
}

impl Load {
    /// The ways on which there is a server for this load, in the order in which they take turns.
    pub(super) fn ways(&self) -> &'static [Way] {
        match self.traffic {
            Traffic::Http { .. } | Traffic::Redis { .. } => &[Way::Kernel, Way::Beside, Way::Inline, Way::Attached],
            Traffic::Rpc { .. } => &[Way::Kernel, Way::Beside, Way::Library, Way::Inline, Way::Attached, Way::Smoltcp],
            Traffic::Bulk { .. } | Traffic::PingPong => &[Way::Kernel, Way::Beside, Way::Inline, Way::Attached, Way::Smoltcp],
        }
    }
}

/// The loads of a bench.
pub(super) fn loads(what: What) -> Vec<Load> {
    let (rate, p99, machine) = (|of: &Column| of.rate_ratio, |of: &Column| of.p99_ratio, |of: &Column| of.machine_ratio);
    let (p50, host) = (|of: &Column| of.p50_ratio, |of: &Column| of.host_ratio);
    let load = |name, traffic, bars: &[Figure]| Load { name, traffic, bars: bars.to_vec() };
    match what {
        What::Http => vec![
            load(
                "http, 64 connections",
                Traffic::Http { connections: 64 },
                &[
                    ("http.machine_ratio_64", Way::Beside, machine, Bar::most, 0.8),
                    ("http.rate_ratio_64", Way::Beside, rate, Bar::least, 1.15),
                ],
            ),
            load(
                "http, 512 connections",
                Traffic::Http { connections: 512 },
                &[
                    ("http.machine_ratio_512", Way::Beside, machine, Bar::most, 0.8),
                    ("http.rate_ratio_512", Way::Beside, rate, Bar::least, 1.15),
                    ("http.p99_ratio_512", Way::Beside, p99, Bar::most, 1.0),
                ],
            ),
        ],
        What::Redis => vec![
            load("redis GET", Traffic::Redis { depth: 1 }, &[("redis.machine_ratio_p1", Way::Beside, machine, Bar::most, 0.8)]),
            load(
                "redis GET, pipelined by 16",
                Traffic::Redis { depth: 16 },
                &[("redis.machine_ratio_p16", Way::Beside, machine, Bar::most, 0.9)],
            ),
        ],
        What::Bulk => vec![
            load(
                "bulk in",
                Traffic::Bulk { into: true },
                &[
                    ("bulk_in.rate_ratio", Way::Beside, rate, Bar::least, 1.0),
                    ("bulk_in.machine_ratio", Way::Beside, machine, Bar::most, 1.0),
                ],
            ),
            load(
                "bulk out",
                Traffic::Bulk { into: false },
                &[
                    ("bulk_out.rate_ratio", Way::Beside, rate, Bar::least, 1.0),
                    ("bulk_out.machine_ratio", Way::Beside, machine, Bar::most, 0.9),
                ],
            ),
        ],
        What::Rpc => vec![
            load(
                "rpc, 64 connections",
                Traffic::Rpc { connections: 64 },
                &[("rpc.machine_ratio_64", Way::Beside, machine, Bar::most, 0.65)],
            ),
            load(
                "rpc, 1024 connections",
                Traffic::Rpc { connections: 1024 },
                &[
                    ("rpc.machine_ratio_1024", Way::Beside, machine, Bar::most, 0.65),
                    ("rpc.host_ratio_1024", Way::Library, host, Bar::most, 0.1),
                ],
            ),
        ],
        What::PingPong => {
            vec![load("ping-pong", Traffic::PingPong, &[("pingpong.p50_ratio", Way::Beside, p50, Bar::most, 0.6)])]
        }
    }
}
