//! What a program would save with its connections on a NIC, by the planner: for `baton doctor --plan`.

use super::plan;
use anyhow::{Context, Result};
use baton_lab::planner::record::{Carried, exchanges};
use baton_lab::planner::{self, Degree};
use serde::Serialize;
use std::path::Path;

/// A prediction. Processors are those of the program, of its connections' peers as if they were on this machine, and of
/// the NIC.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Saving {
    /// Percent of `before` that would be saved; less than nothing if it would cost more.
    pub percent: f64,
    /// Processors now.
    pub before: f64,
    /// With the connections on a NIC.
    pub after: f64,
    /// Of these, the NIC's.
    pub nic: f64,
    /// Connections that carried something.
    pub connections: u32,
    /// Requests a second, or pieces of bulk data.
    pub exchanges_per_second: f64,
}

/// Predicts from what each connection carried in so many seconds (bytes, and segments with data, in and out), and
/// nanoseconds of the program's CPU in that time.
/// `file`: what `baton plan --save` wrote.
///
/// # Errors
/// If the file is none, or nothing was carried.
pub fn predict(file: &Path, connections: &[([u64; 2], [u64; 2])], seconds: f64, program: u64) -> Result<Saving> {
    let (host, nic) = plan::parameters_in(file)?;
    let mut carried = Carried { seconds, program, ..Carried::default() };
    for ([received, sent], segments) in connections.iter().filter(|(bytes, _)| *bytes != [0; 2]) {
        carried.connections += 1;
        carried.received += received;
        carried.sent += sent;
        carried.exchanges += exchanges(*segments, received + sent);
    }
    let mut load = carried.load("watched", &host.kernel.program)?;
    load.peer_here = true;
    let rows = planner::plan(&host, &nic, &load, None)?;
    let row = |degree| rows.iter().find(|row| row.degree == degree).context("a row of each degree");
    let (none, handoff) = (row(Degree::None)?, row(Degree::Handoff)?);
    let rate = load.rate.unwrap_or(0.0);
    let of = |micros: f64| rate * micros / 1e6;
    Ok(Saving {
        percent: 100.0 * (1.0 - handoff.over_none),
        before: of(none.machine),
        after: of(handoff.machine),
        nic: of(handoff.nic),
        connections: carried.connections,
        exchanges_per_second: rate,
    })
}

impl Saving {
    /// A line for people.
    pub fn text(&self, file: &Path) -> String {
        let Saving { percent, before, after, nic, connections, exchanges_per_second } = self;
        let what = if *percent < 0.0 { format!("none: {:.0} % more", -percent) } else { format!("about {percent:.0} %") };
        format!(
            "{what}: {before:.2} processors now, {after:.2} with {connections} connections on a NIC, {nic:.2} of it the NIC's \
             ({exchanges_per_second:.0} exchanges/s; peers counted as if they were here; planned with {}: \
             `baton plan --check` tells how far that is off)",
            file.display()
        )
    }
}
