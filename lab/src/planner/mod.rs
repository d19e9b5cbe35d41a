//! The planner: what each degree of offload brings for a host, a NIC and a load (`baton plan`). Pure but for
//! `measure`, `check` and the two programs of theirs.
//!
//! All is CPU time in nanoseconds. A connection sends `depth` requests in a write, which the program reads together
//! and answers in a write: an *exchange*. With `q` and `r` bytes each way and `n` connections, on a way `w` (kernel,
//! passed, offloaded) a request costs
//!
//! ```text
//! program = own + (w.program(depth·q, depth·r, n) + calls·call) / depth
//! NIC     = w.nic(depth·q, depth·r, n) / depth
//! peer    = own + w.peer(depth·q, depth·r, n) / depth
//! ```
//!
//! where `w.program` and so on are [`Line`](costs::Line)s: measured at few sizes, one exchange alone and some
//! together. Divided offload is the mean of two ways, by the connections that each has.

pub mod check;
pub mod costs;
pub mod load;
pub mod measure;
pub mod record;
mod server;
mod traffic;

pub use server::run as serve;

use anyhow::Result;
use costs::{Exchange, Host, Nic};
use load::Load;
use serde::Serialize;

/// A degree of offload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Degree {
    /// Everything is in the kernel.
    None,
    /// The kernel's connections, their frames through the NIC.
    Stateless,
    /// The NIC has the fast path of each connection that it has room for.
    Partial,
    /// The NIC has as many connections as it has room for.
    Handoff,
    /// The same, and it makes them.
    Full,
}

impl Degree {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Degree::None => "none",
            Degree::Stateless => "stateless",
            Degree::Partial => "partial",
            Degree::Handoff => "handoff",
            Degree::Full => "full",
        }
    }
}

/// What a degree costs. Times are CPU microseconds of a request.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The degree.
    pub degree: Degree,
    /// Connections on the NIC.
    pub on_nic: u32,
    /// The program's process.
    pub program: f64,
    /// The NIC's processes.
    pub nic: f64,
    /// The peer, if it is on this machine; else 0.
    pub peer: f64,
    /// All of them.
    pub machine: f64,
    /// Over the kernel's: below 1 something is saved.
    pub over_none: f64,
    /// Requests a second: the load's, or as many as the processors have time for.
    pub rate: f64,
    /// Processors that are busy at that rate.
    pub processors: f64,
    /// What has to be known to read it.
    pub note: String,
}

/// Nanoseconds of a request: program, NIC, peer.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    program: f64,
    nic: f64,
    peer: f64,
}

fn cost(way: &Exchange, call: f64, load: &Load) -> Cost {
    let (depth, together) = (load.depth, f64::from(load.connections));
    let each = |line: &costs::Line| load.mean(|size| line.of(depth * size.request, depth * size.answer, together)) / depth;
    Cost {
        program: load.program + each(&way.program) + load.calls * call / depth,
        nic: each(&way.nic),
        peer: if load.peer_here { load.peer + each(&way.peer) } else { 0.0 },
    }
}

impl Cost {
    /// The mean of two, `share` being the first's.
    fn mixed(self, other: Cost, share: f64) -> Cost {
        let mean = |one: f64, two: f64| share * one + (1.0 - share) * two;
        Cost { program: mean(self.program, other.program), nic: mean(self.nic, other.nic), peer: mean(self.peer, other.peer) }
    }

    fn sum(self) -> f64 {
        self.program + self.nic + self.peer
    }
}

/// Plans `load` with as many connections on the NIC as it has room for, or with at most `most`.
///
/// # Errors
/// If one of the three contradicts itself, or the load is more than the host can do.
pub fn plan(host: &Host, nic: &Nic, load: &Load, most: Option<u32>) -> Result<Vec<Row>> {
    host.check()?;
    nic.check()?;
    load.check()?;
    let on_nic = load.connections.min(nic.connections).min(most.unwrap_or(u32::MAX));
    let share = f64::from(on_nic) / f64::from(load.connections);
    // What a connection costs in its life is spread over its requests.
    let life = |nanos: f64| load.requests.map_or(0.0, |requests| nanos / requests);
    let mut kernel = cost(&host.kernel, host.call, load);
    kernel.program += life(host.connection);
    let mut offloaded = cost(&nic.offloaded, nic.call, load);
    offloaded.program += life(host.connection);
    let mut moved = offloaded;
    moved.nic += life(nic.moved);
    let divided = moved.mixed(kernel, share);
    let room =
        if on_nic < load.connections { format!("the NIC has room for {on_nic} of {}", load.connections) } else { String::new() };
    let mut rows = vec![(Degree::None, 0, kernel, String::new())];
    if let Some(passed) = &nic.passed {
        let mut passed = cost(passed, host.call, load);
        passed.program += life(host.connection);
        rows.push((Degree::Stateless, 0, passed, String::new()));
    }
    rows.push((Degree::Partial, on_nic, divided, join(&room, "without loss; what is lost costs the host's TCP")));
    rows.push((Degree::Handoff, on_nic, divided, room.clone()));
    let making = load.requests.map_or("", |_| "what making a connection costs the NIC is taken to be what it costs the kernel");
    rows.push((Degree::Full, on_nic, offloaded.mixed(kernel, share), join(&room, making)));
    let none = kernel.sum();
    let made = |(degree, on_nic, cost, note): (Degree, u32, Cost, String)| {
        // No party is faster than one processor, and all together not faster than all processors.
        let slowest = cost.program.max(cost.nic).max(cost.peer).max(cost.sum() / host.processors as f64);
        let most = 1e9 / slowest;
        let rate = load.rate.unwrap_or(most);
        let note = if rate > most { join(&note, &format!("at most {most:.0} requests/s are possible")) } else { note };
        Row {
            degree,
            on_nic,
            program: cost.program / 1e3,
            nic: cost.nic / 1e3,
            peer: cost.peer / 1e3,
            machine: cost.sum() / 1e3,
            over_none: cost.sum() / none,
            rate,
            processors: rate * cost.sum() / 1e9,
            note,
        }
    };
    Ok(rows.into_iter().map(made).collect())
}

fn join(one: &str, other: &str) -> String {
    [one, other].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use costs::Line;

    fn line(exchange: f64) -> Line {
        Line { exchange, alone: 1000.0, request: [500.0, 9000.0, 70_000.0], answer: [600.0, 12_000.0, 90_000.0] }
    }

    fn host() -> Host {
        let kernel = Exchange { program: line(8000.0), peer: line(8000.0), nic: Line::default() };
        Host { about: String::new(), processors: 4, call: 300.0, copied_byte: 0.1, connection: 40_000.0, kernel }
    }

    fn nic() -> Nic {
        let offloaded = Exchange { program: line(2000.0), peer: line(7000.0), nic: line(5000.0) };
        let passed = Some(Exchange { program: line(8000.0), peer: line(7000.0), nic: line(3000.0) });
        Nic { about: String::new(), connections: 256, moved: 100_000.0, call: 50.0, offloaded, passed }
    }

    fn machine(rows: &[Row], degree: Degree) -> f64 {
        rows.iter().find(|row| row.degree == degree).expect("a row for each degree").machine
    }

    #[test]
    fn no_connection_on_the_nic_costs_what_none_costs_and_more_of_them_never_more() {
        let load = Load { requests: Some(1000.0), program: 3000.0, ..Load::closed("a", 1024, 1.0, 64.0, 256.0) };
        let rows = |most| plan(&host(), &nic(), &load, Some(most)).unwrap();
        let none = rows(0);
        assert!((machine(&none, Degree::Handoff) - machine(&none, Degree::None)).abs() < 1e-9);
        let costs: Vec<f64> = [0, 1, 64, 255, 256].map(|most| machine(&rows(most), Degree::Handoff)).into();
        assert!(costs.windows(2).all(|pair| pair[1] < pair[0]), "{costs:?}");
        // The NIC has no room for more.
        assert_eq!(machine(&rows(1024), Degree::Handoff), costs[4]);
        assert!(rows(1024).iter().any(|row| row.note.contains("room for 256 of 1024")));
    }

    #[test]
    fn more_bytes_own_work_and_shorter_lives_cost_more_and_depth_costs_less() {
        let base = Load::closed("a", 64, 1.0, 64.0, 256.0);
        let handoff = |load: &Load| machine(&plan(&host(), &nic(), load, None).unwrap(), Degree::Handoff);
        let at = handoff(&base);
        assert!(handoff(&Load::closed("a", 64, 1.0, 64.0, 1e6)) > at);
        assert!((handoff(&Load { program: 1000.0, ..base.clone() }) - at - 1.0).abs() < 1e-9, "a microsecond more");
        assert!(handoff(&Load { requests: Some(10.0), ..base.clone() }) > at);
        assert!(handoff(&Load { depth: 16.0, ..base.clone() }) < at / 2.0);
        assert!(handoff(&Load { peer_here: false, ..base.clone() }) < at);
        assert!(handoff(&Load { connections: 1, ..base }) > at, "nothing is done together");
    }

    #[test]
    fn a_rate_that_the_host_has_no_time_for_is_said() {
        let load = Load { rate: Some(1e7), ..Load::closed("a", 64, 1.0, 64.0, 256.0) };
        let rows = plan(&host(), &nic(), &load, None).unwrap();
        assert!(rows.iter().all(|row| row.note.contains("requests/s are possible")), "{rows:?}");
        let closed = plan(&host(), &nic(), &Load { rate: None, ..load }, None).unwrap();
        // The slowest party's processor is busy, and no more than all are.
        assert!(closed.iter().all(|row| row.processors <= 4.0 + 1e-9 && row.rate > 0.0), "{closed:?}");
    }
}
