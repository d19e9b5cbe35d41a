//! What offloading messages is worth, with bars. All modes are measured in turn, several times over, so that each meets
//! the same disturbances.

use super::availability::{Availability, availability};
use super::bed::{Conditions, Offload};
use super::mpi::{Carrier, Load, MpiCell, MpiHosts};
use super::pingpong::{PingPong, ping_pong};
use crate::bars::Bar;
use anyhow::Result;
use baton_bed::statistics::quantile;
use baton_protocol::nic::LinkSettings;
use serde::Serialize;

/// Bytes of the messages whose cost is measured.
const SIZE: u64 = 1_000_000;
/// Bytes of those with which availability is, and microseconds of work between polls.
const AVAILABILITY: (u64, u64) = (100_000, 100);
/// Round trips of a measurement.
const ROUND_TRIPS: u32 = 30;
/// MPI programs: messages whose latency, bandwidth and cost are measured. The cost is that beside 100 us of work
/// between polls.
const LATENCY: Load = Load { size: 8, rounds: 5000, work: 0 };
const BANDWIDTH: Load = Load { size: 1_000_000, rounds: 200, work: 0 };
const COST: Load = Load { size: 1_000_000, rounds: 100, work: 100 };
/// Leads that are tried against lead 0.
const LEADS: [u8; 5] = [0, 4, 8, 12, 15];
/// The link for these: bits per second, and microseconds one way.
const LINK: (u64, u64) = (1_000_000_000, 50);

/// All measurements, and the bars.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// Messages of 1 MB, nothing or both halves offloaded.
    pub ping_pong: Vec<PingPong>,
    /// Messages of 1 MB over a link of 1 Gb/s with 100 microseconds of round trip, by lead.
    pub leads: Vec<PingPong>,
    /// Availability.
    pub availability: Vec<Availability>,
    /// An MPI program over the provider and over TCP.
    pub mpi: Vec<MpiCell>,
    /// The lead with the best median, and its bandwidth in Mb/s.
    pub best_lead: Option<(u8, f64)>,
    /// The encapsulation of RMPP with the greatest bandwidth for an MPI program whose data half is in its process.
    pub best_encapsulation: Option<&'static str>,
    /// Bandwidth with lead 0.
    pub lead_0: Option<f64>,
    /// Figures and their bounds.
    pub bars: Vec<Bar>,
}

impl BenchReport {
    /// Bytes that were wrong.
    pub fn mismatches(&self) -> u64 {
        self.ping_pong.iter().chain(&self.leads).map(|cell| cell.mismatches).sum()
    }
}

fn of<T>(cells: &[T], wanted: impl Fn(&T) -> bool, figure: impl Fn(&T) -> f64) -> f64 {
    quantile(&mut cells.iter().filter(|cell| wanted(cell)).map(figure).collect::<Vec<f64>>(), 0.5)
}

/// Measures everything in `rounds` rounds, or with `only_mpi` what MPI programs get.
///
/// # Errors
/// If a test bed cannot be made, or a message is lost.
pub fn bench(rounds: u32, only_mpi: bool, progress: &dyn Fn(&str)) -> Result<BenchReport> {
    let mpi = mpi(rounds, progress)?;
    let best = best_carrier(&mpi);
    progress(&format!("MPI, {} bytes: the faster encapsulation is {}", BANDWIDTH.size, best.encapsulation()));
    let report = BenchReport {
        ping_pong: vec![],
        leads: vec![],
        availability: vec![],
        bars: mpi_bars(&mpi, best),
        mpi,
        best_lead: None,
        best_encapsulation: Some(best.encapsulation()),
        lead_0: None,
    };
    if only_mpi { Ok(report) } else { without_mpi(report, rounds, progress) }
}

/// Adds to a report what is measured without MPI.
fn without_mpi(mut report: BenchReport, rounds: u32, progress: &dyn Fn(&str)) -> Result<BenchReport> {
    let link = LinkSettings { rate: LINK.0, delay: LINK.1, buffer: 8 << 20, ..LinkSettings::default() };
    for round in 0..rounds {
        for offload in [Offload::None, Offload::Receive, Offload::Both] {
            progress(&format!("round {round}: {offload:?}"));
            let conditions = Conditions { offload, ..Conditions::plain() };
            report.ping_pong.push(ping_pong(&conditions, SIZE, ROUND_TRIPS)?);
            report.availability.push(availability(&conditions, AVAILABILITY.0, AVAILABILITY.1, 3 * ROUND_TRIPS)?);
        }
        for lead in LEADS {
            progress(&format!("round {round}: lead {lead}"));
            let conditions = Conditions { offload: Offload::Both, lead, link, ..Conditions::plain() };
            report.leads.push(ping_pong(&conditions, SIZE, ROUND_TRIPS)?);
        }
    }
    let BenchReport { ping_pong: pings, leads, availability: available, .. } = &report;
    let cpu = |offload| of(pings, |cell| cell.offload == offload, |cell| cell.host_cpu_ms_per_mb);
    let events = of(pings, |cell| cell.offload == Offload::Both, |cell| cell.events_per_packet);
    let both = of(available, |cell| cell.offload == Offload::Both, |cell| cell.availability);
    let bandwidth = |lead| of(leads, |cell| cell.lead == lead, |cell| cell.megabits);
    let best =
        LEADS.into_iter().skip(1).map(|lead| (lead, bandwidth(lead))).max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0));
    let lead_0 = bandwidth(0);
    let bars = [
        Bar::most("rmpp.host_cpu_both_over_none", 0.35, cpu(Offload::Both) / cpu(Offload::None)),
        Bar::most("rmpp.events_per_packet_both", 0.1, events),
        Bar::least("rmpp.availability_both", 0.9, both),
        Bar::least("rmpp.lead_gain", 1.2, best.1 / lead_0),
    ];
    report.bars.splice(0..0, bars);
    Ok(BenchReport { best_lead: Some(best), lead_0: Some(lead_0), ..report })
}

/// What carries messages of 1 MB fastest, of what a program can choose without a NIC.
fn best_carrier(cells: &[MpiCell]) -> Carrier {
    let rate = |carrier| ratio(cells, false, BANDWIDTH, carrier, |cell| cell.mb_per_s);
    if rate(Carrier::RmppPackets) > rate(Carrier::RmppHost) { Carrier::RmppPackets } else { Carrier::RmppHost }
}

/// What MPI programs get over the provider, against TCP.
fn mpi_bars(cells: &[MpiCell], best: Carrier) -> Vec<Bar> {
    vec![
        Bar::most("rmpp.host_cpu_over_tcp", 0.35, ratio(cells, true, COST, Carrier::RmppNic, |cell| cell.host_cpu_ms_per_mb)),
        Bar::least("rmpp.bandwidth_over_tcp", 1.0, ratio(cells, false, BANDWIDTH, best, |cell| cell.mb_per_s)),
        Bar::most("rmpp.latency_over_tcp", 1.0, ratio(cells, false, LATENCY, Carrier::RmppHost, |cell| cell.median_us)),
    ]
}

/// The MPI program over each carrier in turn: on a link between two kernels, and with a NIC on host A.
fn mpi(rounds: u32, progress: &dyn Fn(&str)) -> Result<Vec<MpiCell>> {
    let mut cells = Vec::new();
    let jobs = [
        (false, &[LATENCY][..], &[Carrier::RmppHost, Carrier::Tcp][..]),
        (false, &[BANDWIDTH], &[Carrier::RmppHost, Carrier::RmppPackets, Carrier::Tcp]),
        (true, &[COST], &[Carrier::RmppNic, Carrier::Tcp]),
    ];
    for (nic, loads, carriers) in jobs {
        let hosts = MpiHosts::new(nic)?;
        for (round, load, carrier) in (0..rounds)
            .flat_map(|round| loads.iter().flat_map(move |load| carriers.iter().map(move |carrier| (round, load, *carrier))))
        {
            progress(&format!("round {round}: MPI, {} bytes, {carrier:?} ({})", load.size, carrier.encapsulation()));
            cells.push(hosts.run(carrier, load)?);
        }
    }
    Ok(cells)
}

/// A carrier over TCP, with the same messages on the same link: the median of the rounds' ratios, since a machine's
/// speed changes between rounds more than within one.
fn ratio(cells: &[MpiCell], nic: bool, load: Load, ours: Carrier, figure: impl Fn(&MpiCell) -> f64 + Copy) -> f64 {
    let of =
        |carrier| cells.iter().filter(move |cell| (cell.nic, cell.size, cell.carrier) == (nic, load.size, carrier)).map(figure);
    let mut ratios: Vec<f64> = of(ours).zip(of(Carrier::Tcp)).map(|(ours, tcp)| ours / tcp).collect();
    quantile(&mut ratios, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round in which the machine was slow for both counts as any other.
    #[test]
    fn rounds_are_compared_one_by_one() {
        let cell = |carrier: Carrier, mb_per_s: f64| MpiCell {
            carrier,
            encapsulation: carrier.encapsulation(),
            nic: false,
            size: BANDWIDTH.size,
            median_us: 0.0,
            least_us: 0.0,
            mean_us: 0.0,
            most_us: 0.0,
            mb_per_s,
            host_cpu_ms_per_mb: 0.0,
            kernel_cpu_ms_per_mb: 0.0,
            nic_cpu_ms_per_mb: 0.0,
            availability: None,
        };
        let rounds = [(2.0, 1.0), (200.0, 100.0), (200.0, 100.0), (3.0, 100.0), (50.0, 25.0)];
        let cells: Vec<MpiCell> =
            rounds.iter().flat_map(|(ours, tcp)| [cell(Carrier::RmppHost, *ours), cell(Carrier::Tcp, *tcp)]).collect();
        assert_eq!(ratio(&cells, false, BANDWIDTH, Carrier::RmppHost, |cell| cell.mb_per_s), 2.0);
    }
}
