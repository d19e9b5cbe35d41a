//! What a look at agents has found, as metric families. Names are by Prometheus' rules: base units, which stand at the
//! end, and `_total` behind what only grows.

use crate::nic_messages::KINDS;
use crate::nic_receive::{ENDED, PASSED, Reason};
use baton_abi::layout::Counter;
use baton_protocol::events::{Histogram, ProgramCounts};
use baton_protocol::program::{DEATHS, NicStatistics, Statistics};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Number(u64),
    Seconds(f64),
    Times(Histogram),
}

/// The labels of a value, in order.
pub type Labels = Vec<(&'static str, String)>;

/// What a metric is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Only grows, as long as an agent lives.
    Counter,
    Gauge,
    Histogram,
}

/// Units, which are the end of the name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Measure {
    None,
    Bytes,
    Seconds,
}

impl Measure {
    /// The end of a name.
    pub fn suffix(self) -> &'static str {
        match self {
            Measure::None => "",
            Measure::Bytes => "_bytes",
            Measure::Seconds => "_seconds",
        }
    }
}

/// A metric family.
#[derive(Clone, Debug)]
pub struct Family {
    /// Without prefix, unit and `_total`: [`Family::full_name`].
    pub name: &'static str,
    pub measure: Measure,
    pub kind: Kind,
    pub help: &'static str,
    pub values: Vec<(Labels, Value)>,
}

impl Family {
    fn new(name: &'static str, kind: Kind, measure: Measure, help: &'static str) -> Family {
        Family { name, measure, kind, help, values: Vec::new() }
    }

    fn counter(name: &'static str, help: &'static str) -> Family {
        Family::new(name, Kind::Counter, Measure::None, help)
    }

    fn gauge(name: &'static str, help: &'static str) -> Family {
        Family::new(name, Kind::Gauge, Measure::None, help)
    }

    fn in_bytes(self) -> Family {
        Family { measure: Measure::Bytes, ..self }
    }

    fn in_seconds(self) -> Family {
        Family { measure: Measure::Seconds, ..self }
    }

    fn times(name: &'static str, help: &'static str) -> Family {
        Family::new(name, Kind::Histogram, Measure::Seconds, help)
    }

    /// As OpenMetrics names it.
    pub fn full_name(&self) -> String {
        format!("baton_{}{}", self.name, self.measure.suffix())
    }

    fn with(mut self, values: impl IntoIterator<Item = (Labels, Value)>) -> Family {
        self.values.extend(values);
        self
    }
}

/// A label's value as both formats want it: the encoder writes it as it is.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// All families of a look.
#[derive(Debug)]
pub struct Families(pub Vec<Family>);

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        for family in self.0.iter().filter(|family| !family.values.is_empty()) {
            let unit = match family.measure {
                Measure::None => None,
                Measure::Bytes => Some(Unit::Bytes),
                Measure::Seconds => Some(Unit::Seconds),
            };
            let kind = match family.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
            };
            let mut metric = encoder.encode_descriptor(family.name, family.help, unit.as_ref(), kind)?;
            for (labels, value) in &family.values {
                // The encoder would write an empty pair of braces.
                if labels.is_empty() {
                    encode(&mut metric, family.kind, value)?;
                    continue;
                }
                let labels: Labels = labels.iter().map(|(name, text)| (*name, escaped(text))).collect();
                encode(&mut metric.encode_family(&labels)?, family.kind, value)?;
            }
        }
        Ok(())
    }
}

fn encode(metric: &mut MetricEncoder, kind: Kind, value: &Value) -> Result<(), fmt::Error> {
    match (kind, value) {
        (Kind::Counter, Value::Number(number)) => metric.encode_counter::<NoLabelSet, _, f64>(number, None),
        (Kind::Counter, Value::Seconds(seconds)) => metric.encode_counter::<NoLabelSet, _, f64>(seconds, None),
        (_, Value::Number(number)) => metric.encode_gauge(number),
        (_, Value::Seconds(seconds)) => metric.encode_gauge(seconds),
        (_, Value::Times(times)) => {
            let bounds = Histogram::BOUNDS.iter().map(|micros| *micros as f64 / 1e6).chain([f64::MAX]);
            let buckets: Vec<_> = bounds.zip(times.buckets).collect();
            metric.encode_histogram::<NoLabelSet>(times.sum_us as f64 / 1e6, times.count(), &buckets, None)
        }
    }
}

/// The answer of one agent, or that it did not answer.
#[derive(Clone, Debug)]
pub struct Baton {
    /// Where it listens.
    pub socket: PathBuf,
    /// None if it did not answer.
    pub answer: Option<(Statistics, Vec<ProgramCounts>)>,
}

/// Metrics of the exporter itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Own {
    /// How long the look took, seconds.
    pub took: f64,
    /// Batons that were left out, since there were too many.
    pub left_out: usize,
    /// Clients that were cut off: they were too slow, or others needed the room.
    pub cut_off: u64,
    /// Requests that were refused.
    pub refused: u64,
}

/// Nanoseconds as seconds.
fn seconds(nanos: u64) -> Value {
    Value::Seconds(nanos as f64 / 1e9)
}

type OfWorker = (Counter, &'static str, Measure, &'static str);

/// The workers' counters that only grow.
const WORKER_COUNTERS: [OfWorker; 49] = {
    use Counter as C;
    use Measure::{Bytes as B, None as N, Seconds as S};
    [
        (C::WireReceived, "nic_wire_received_frames", N, "Frames received from the wire."),
        (C::WireSent, "nic_wire_sent_frames", N, "Frames sent to the wire."),
        (C::HostReceived, "nic_kernel_received_frames", N, "Frames received from the kernel."),
        (C::HostSent, "nic_kernel_sent_frames", N, "Frames sent to the kernel."),
        (C::Segments, "nic_segments", N, "Segments received for offloaded connections."),
        (
            C::Unpredicted,
            "nic_unpredicted_segments",
            N,
            "Segments received in order for offloaded connections that header prediction did not expect.",
        ),
        (C::PeerFins, "nic_peer_fins", N, "Connections given back to the kernel since their peer's FIN had come (peer-fin)."),
        (C::Silenced, "nic_silenced_frames", N, "Frames of the kernel that were dropped because the NIC owns their connection."),
        (C::BadChecksum, "nic_bad_checksum_segments", N, "Segments of offloaded connections dropped for a wrong checksum."),
        (C::BadMessages, "nic_bad_messages", N, "Messages from programs that were malformed or not allowed."),
        (C::Dropped, "nic_dropped_frames", N, "Frames that were dropped because a device or a queue was full."),
        (C::Retransmitted, "nic_retransmitted_segments", N, "Segments of offloaded connections that were retransmitted."),
        (
            C::BusyNanoseconds,
            "nic_busy",
            S,
            "Time in which the worker found work: the rest of a second it polled in vain or slept.",
        ),
        (C::LinkLost, "nic_link_lost_frames", N, "Frames that the emulated link lost."),
        (C::LinkOverflowed, "nic_link_overflowed_frames", N, "Frames that found the emulated link's buffer full."),
        (C::Cut, "nic_cut_frames", N, "Large frames of the kernel that were cut into segments."),
        (C::CutSegments, "nic_cut_segments", N, "Segments that large frames were cut into."),
        (C::Uncut, "nic_uncut_frames", N, "Large frames of the kernel that could not be cut and were dropped."),
        (C::Merged, "nic_merged_segments", N, "Segments merged into aggregates for the kernel."),
        (C::Aggregates, "nic_aggregates", N, "Aggregates sent to the kernel."),
        (C::AggregateBytes, "nic_aggregate", B, "Bytes of the IP packets of aggregates."),
        (C::Reordered, "nic_reordered_segments", N, "Segments that large receive has put in order for the kernel."),
        (C::Alone, "nic_unmerged_segments", N, "Data segments that large receive gave to the kernel alone."),
        (C::Old, "nic_old_segments", N, "Segments whose data large receive had given to the kernel before, or held already."),
        (C::Gaps, "nic_receive_gaps", N, "Missing segments that large receive did not wait for any longer."),
        (C::Unhoused, "nic_unhoused_segments", N, "Segments for which large receive had no descriptor, buffer or room."),
        (C::Interrupts, "nic_interrupts", N, "Bursts of frames to the kernel: each stands for an interrupt of a network card."),
        (C::Redirected, "nic_redirected_frames", N, "Frames that one worker received and another one owns."),
        (C::Buckets, "nic_buckets_given", N, "Buckets of the indirection table that this worker has handed over to another."),
        (C::Disordered, "nic_disordered_segments", N, "Data segments of offloaded connections that arrived ahead of a gap."),
        (
            C::Acknowledged,
            "nic_active_acknowledgements",
            N,
            "Acknowledgements that the NIC has sent for connections of the kernel.",
        ),
        (C::Redelivered, "nic_redelivered_segments", N, "Segments sent to the kernel again, which had not acknowledged them."),
        (C::Doorbells, "nic_doorbells", N, "Doorbells rung for sleeping programs."),
        (C::AgentDoorbells, "nic_agent_doorbells", N, "Doorbells rung for the agent."),
        (
            C::SynPrioritized,
            "nic_prioritized_syns",
            N,
            "SYN segments that were sent to the kernel before frames that had waited longer.",
        ),
        (C::InterruptNanoseconds, "nic_interrupt", S, "Time spent writing frames to the kernel."),
        (C::DoorbellNanoseconds, "nic_doorbell", S, "Time spent ringing doorbells of programs."),
        (C::Made, "nic_connections_made", N, "Connections that the NIC has made (full offload)."),
        (C::SynCookies, "nic_syn_cookies", N, "SYNs answered with a cookie, since the table of handshakes was full."),
        (C::AcceptQueueFull, "nic_accept_queue_drops", N, "SYNs and last segments of handshakes dropped at a full accept queue."),
        (C::Lent, "nic_lent_connections", N, "Times that a connection left its fast path and was lent to the TCP of the host."),
        (C::TakenBack, "nic_taken_back_connections", N, "Times that a lent connection came back."),
        (C::LentSegments, "nic_lent_segments", N, "Segments given to the TCP of the host."),
        (C::DatagramsReceived, "nic_received_datagrams", N, "Datagrams received for UDP sockets of programs."),
        (C::DatagramsSent, "nic_sent_datagrams", N, "Datagrams sent for UDP sockets of programs."),
        (
            C::DatagramsDropped,
            "nic_dropped_datagrams",
            N,
            "Datagrams dropped at a full socket, or without a way to their destination.",
        ),
        (C::BadResolution, "nic_bad_resolution_frames", N, "Frames of ARP and neighbour discovery that no host may use."),
        (C::Exceeded, "nic_exceeded_commands", N, "Commands of the agent beyond what was announced."),
        (C::TooBusy, "nic_too_busy", N, "Times that the NIC began to announce no room since its processor was too busy."),
    ]
};

/// The workers' counters that say how much there is at present.
const WORKER_GAUGES: [(Counter, &str, &str); 3] = [
    (Counter::Connections, "nic_connections", "Connections on the NIC at present."),
    (Counter::Held, "nic_held_segments", "Segments that large receive holds out of order at present."),
    (
        Counter::Dormant,
        "nic_dormant_connections",
        "Connections on the NIC that are dormant at present: idle, their state in few bytes.",
    ),
];

/// A worker's counters, or the sums of several workers', by their names here without `nic_`: `wire_received_frames`,
/// `aggregate_bytes`; those of time in nanoseconds, as `busy_ns`. For `baton nic show --json`.
pub fn by_name(counters: &[u64]) -> impl Iterator<Item = (String, u64)> {
    let growing = WORKER_COUNTERS.into_iter().map(|(counter, name, measure, _)| (counter, name, measure));
    let present = WORKER_GAUGES.into_iter().map(|(counter, name, _)| (counter, name, Measure::None));
    growing.chain(present).map(move |(counter, name, measure)| {
        let unit = match measure {
            Measure::Seconds => "_ns",
            Measure::None | Measure::Bytes => measure.suffix(),
        };
        let name = name.strip_prefix("nic_").unwrap_or(name);
        (format!("{name}{unit}"), counters.get(counter as usize).copied().unwrap_or(0))
    })
}

type OfAgent = (&'static str, &'static str, fn(&Statistics) -> u64);

const AGENT_COUNTERS: [OfAgent; 9] = [
    ("moves", "Moves of connections, either way.", |of| of.moves),
    ("moves_failed", "Moves that failed and lost the connection: must stay 0.", |of| of.failed_moves),
    ("moves_deferred", "Moves given up for a transient reason; they may be tried again.", |of| of.deferred),
    ("moves_nic_full", "Moves given up since the NIC was full.", |of| of.full),
    ("connections_colder", "Connections returned from a NIC that was full, since others carried more.", |of| of.colder),
    ("connections_dropped", "Connections reset since a NIC was full or a route changed, where that is set.", |of| of.dropped),
    ("connections_recovered", "Connections restored to the kernel after the death of their NIC.", |of| of.recovered),
    ("connections_lost", "Connections lost at the death of their NIC: must stay 0.", |of| of.lost),
    ("nic_starts", "NICs started, the first ones included.", |of| of.nic_starts.into()),
];

type Reasons = fn(&ProgramCounts) -> &BTreeMap<String, u64>;

const BY_CAUSE: [(&str, &str, Reasons); 3] = [
    ("program_refusals", "Moves that did not take place, either way, by cause. Each try counts.", |of| &of.refused),
    ("program_returns", "Connections that came back to the kernel, by cause.", |of| &of.returned),
    ("program_losses", "Connections that were lost in a move, by cause.", |of| &of.lost),
];

/// What was found, as families. `only` is the user whose programs are listed, or None for all. Sums over several users
/// belong to no single user.
pub fn families(batons: &[Baton], own: Own, only: Option<u32>) -> Vec<Family> {
    let name = |baton: &Baton| ("baton", baton.socket.to_string_lossy().into_owned());
    let up = |baton: &Baton| (vec![name(baton)], Value::Number(baton.answer.is_some().into()));
    let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    let mut all = vec![
        Family::gauge("build_info", "The version of the exporter.").with([(version, Value::Number(1))]),
        Family::gauge("up", "Whether the agent of this Baton answers.").with(batons.iter().map(up)),
    ];
    let answers: Vec<_> = batons.iter().filter_map(|baton| Some((name(baton), baton.answer.as_ref()?))).collect();
    let answers = || answers.iter().map(|(name, (statistics, programs))| (name, statistics, programs));
    let uptime = |of: &Statistics| Value::Seconds(of.for_us as f64 / 1e6);
    all.push(
        Family::gauge("agent_uptime", "Time since the start of the agent: counters begin there.")
            .in_seconds()
            .with(answers().map(|(name, of, _)| (vec![name.clone()], uptime(of)))),
    );
    let clients = |of: &Statistics| Value::Number(of.sessions.into());
    all.push(
        Family::gauge("agent_clients", "Programs and tools that are connected to the agent, the exporter included.")
            .with(answers().map(|(name, of, _)| (vec![name.clone()], clients(of)))),
    );
    for (metric, help, get) in AGENT_COUNTERS {
        let values = answers().map(|(name, of, _)| (vec![name.clone()], Value::Number(get(of))));
        all.push(Family::counter(metric, help).with(values));
    }
    let nics = || answers().flat_map(|(name, of, _)| of.nics.iter().enumerate().map(move |(nic, of)| (name, nic, of)));
    of_nics(&mut all, &nics);
    of_workers(&mut all, &nics);
    let programs = || {
        let listed = move |one: &&ProgramCounts| only.is_none_or(|only| one.user.is_none_or(|user| user == only));
        answers().flat_map(move |(name, _, all)| all.iter().filter(listed).map(move |one| (name, one)))
    };
    of_programs(&mut all, &programs);
    of_exporter(&mut all, own);
    all
}

type Name = (&'static str, String);

fn of_nics<'a, I: Iterator<Item = (&'a Name, usize, &'a NicStatistics)>>(all: &mut Vec<Family>, nics: &impl Fn() -> I) {
    let labels = |name: &Name, nic: usize| vec![name.clone(), ("nic", nic.to_string())];
    let each = |get: fn(&NicStatistics) -> u64| nics().map(move |(name, nic, of)| (labels(name, nic), Value::Number(get(of))));
    all.push(
        Family::counter("nic_sent", "Bytes that peers have acknowledged to connections on the NIC.")
            .in_bytes()
            .with(each(|of| of.sent)),
    );
    all.push(
        Family::counter("nic_received", "Bytes that connections on the NIC have received.")
            .in_bytes()
            .with(each(|of| of.received)),
    );
    all.push(
        Family::counter("nic_starved", "Times that a worker of the NIC wanted to run and got no processor.")
            .with(each(|of| of.starved)),
    );
    let mut deaths =
        Family::counter("nic_deaths", "Deaths of NICs, by cause: crashed, killed, stopped, stuck, spun, ended by the agent.");
    for (name, nic, of) in nics() {
        for cause in DEATHS {
            let labels = [labels(name, nic), vec![("cause", cause.to_owned())]].concat();
            deaths.values.push((labels, Value::Number(of.deaths.get(cause).copied().unwrap_or(0))));
        }
    }
    all.push(deaths);
}

fn of_workers<'a, I: Iterator<Item = (&'a Name, usize, &'a NicStatistics)>>(all: &mut Vec<Family>, nics: &impl Fn() -> I) {
    let each = |counter: Counter| {
        nics().flat_map(move |(name, nic, of)| {
            let labels = move |worker: usize| vec![name.clone(), ("nic", nic.to_string()), ("worker", worker.to_string())];
            let count = move |counters: &Vec<u64>| counters.get(counter as usize).copied().unwrap_or(0);
            of.workers.iter().enumerate().map(move |(worker, counters)| (labels(worker), count(counters)))
        })
    };
    for (counter, name, measure, help) in WORKER_COUNTERS {
        let value = |count| if measure == Measure::Seconds { seconds(count) } else { Value::Number(count) };
        let values = each(counter).map(|(labels, count)| (labels, value(count)));
        all.push(Family::new(name, Kind::Counter, measure, help).with(values));
    }
    let mut messages = Family::counter("nic_messages", "Messages between the host and the NIC, by kind, sender and receiver.");
    for kind in &KINDS {
        messages = messages.with(each(kind.counter).map(|(mut labels, count)| {
            let of_kind = [("operation", kind.operation), ("from", kind.from), ("to", kind.to)];
            labels.extend(of_kind.map(|(name, value)| (name, value.to_string())));
            (labels, Value::Number(count))
        }));
    }
    all.push(messages);
    let by_reason: [(&str, &str, &[Reason]); 2] = [
        ("nic_receive_ends", "What waited in large receive and went to the kernel, by why it went.", &ENDED),
        ("nic_receive_passed_frames", "Frames that large receive passed on unchanged, by why.", &PASSED),
    ];
    for (name, help, reasons) in by_reason {
        let mut family = Family::counter(name, help);
        for reason in reasons {
            family = family.with(each(reason.counter).map(|(mut labels, count)| {
                labels.push(("reason", reason.name.to_owned()));
                (labels, Value::Number(count))
            }));
        }
        all.push(family);
    }
    for (counter, name, help) in WORKER_GAUGES {
        let values = each(counter).map(|(labels, count)| (labels, Value::Number(count)));
        all.push(Family::gauge(name, help).with(values));
    }
}

fn of_programs<'a, I: Iterator<Item = (&'a Name, &'a ProgramCounts)>>(all: &mut Vec<Family>, programs: &impl Fn() -> I) {
    let labels = |name: &Name, of: &ProgramCounts| {
        let user = of.user.map(|user| user.to_string()).unwrap_or_default();
        vec![name.clone(), ("program", of.program.clone()), ("user", user)]
    };
    let each = |get: fn(&ProgramCounts) -> u64| programs().map(move |(name, of)| (labels(name, of), Value::Number(get(of))));
    let mut present = Family::gauge("program_connections", "Connections of the program at present, by where they are.");
    for (name, of) in programs() {
        for (place, count) in [("kernel", of.connections.0), ("nic", of.connections.1)] {
            let labels = [labels(name, of), vec![("place", place.to_owned())]].concat();
            present.values.push((labels, Value::Number(count.into())));
        }
    }
    all.push(present);
    all.push(Family::counter("program_moves_to_nic", "Moves of connections of the program to a NIC.").with(each(|of| of.to_nic)));
    all.push(
        Family::counter("program_sent", "Bytes that peers have acknowledged to connections of the program on NICs.")
            .in_bytes()
            .with(each(|of| of.sent)),
    );
    all.push(
        Family::counter("program_received", "Bytes that connections of the program have received on NICs.")
            .in_bytes()
            .with(each(|of| of.received)),
    );
    for (metric, help, get) in BY_CAUSE {
        let mut family = Family::counter(metric, help);
        for (name, of) in programs() {
            for (cause, count) in get(of) {
                let labels = [labels(name, of), vec![("cause", cause.clone())]].concat();
                family.values.push((labels, Value::Number(*count)));
            }
        }
        all.push(family);
    }
    // By program these would be 19 lines each.
    let mut sums: BTreeMap<&Name, [Histogram; 4]> = BTreeMap::new();
    for (name, of) in programs() {
        let [to_nic, to_kernel, recovery, rtt] = sums.entry(name).or_default();
        to_nic.add(&of.to_nic_blackout);
        to_kernel.add(&of.to_kernel_blackout);
        recovery.add(&of.recovery_blackout);
        rtt.add(&of.rtt);
    }
    let mut blackout = Family::times("move_blackout", "How long connections stood still for a move, by where it led.");
    let mut recovery = Family::times("recovery_blackout", "How long connections stood still since their NIC had died.");
    let mut rtt = Family::times(
        "rtt",
        "Smoothed round-trip times of connections on NICs, of each whenever it is found to have carried something.",
    );
    for (name, [to_nic, to_kernel, after_death, times]) in sums {
        for (to, times) in [("nic", to_nic), ("kernel", to_kernel)] {
            blackout.values.push((vec![name.clone(), ("to", to.to_owned())], Value::Times(times)));
        }
        recovery.values.push((vec![name.clone()], Value::Times(after_death)));
        rtt.values.push((vec![name.clone()], Value::Times(times)));
    }
    all.extend([blackout, recovery, rtt]);
}

fn of_exporter(all: &mut Vec<Family>, own: Own) {
    let one = |value| [(Vec::new(), value)];
    all.push(
        Family::gauge("exporter_look", "How long the agents took to answer.").in_seconds().with(one(Value::Seconds(own.took))),
    );
    all.push(
        Family::gauge("exporter_batons_left_out", "Batons that are not listed, since there are too many.")
            .with(one(Value::Number(own.left_out as u64))),
    );
    all.push(
        Family::counter("exporter_clients_cut_off", "Clients that were cut off: they were too slow, or others needed the room.")
            .with(one(Value::Number(own.cut_off))),
    );
    all.push(
        Family::counter("exporter_requests_refused", "Requests that were not understood.").with(one(Value::Number(own.refused))),
    );
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use baton_abi::layout::COUNTERS;

    /// What a Baton with two workers and two programs says.
    pub fn baton() -> Baton {
        let workers: Vec<Vec<u64>> = (1..=2).map(|worker| (0..COUNTERS as u64).map(|at| worker * (at + 1)).collect()).collect();
        let deaths = [("crashed".to_owned(), 2)].into();
        let nic = NicStatistics { workers, deaths, sent: 1 << 40, received: 7, starved: 3, ..NicStatistics::default() };
        let statistics = Statistics { for_us: 1_500_000, moves: 9, nic_starts: 3, nics: vec![nic], ..Statistics::default() };
        let mut rtt = Histogram::default();
        [120, 9_000_000].into_iter().for_each(|micros| rtt.note(micros));
        let refused = [("it says \"no\" \\ and\nmore".to_owned(), 4), ("fork".to_owned(), 1)].into();
        let one = ProgramCounts { user: Some(33), program: "nginx".into(), to_nic: 5, refused, rtt, ..ProgramCounts::default() };
        let other = ProgramCounts { user: Some(0), program: "redis".into(), connections: (1, 2), ..ProgramCounts::default() };
        let shared = ProgramCounts { user: None, program: "other programs".into(), ..ProgramCounts::default() };
        Baton { socket: "/run/baton/agent.sock".into(), answer: Some((statistics, vec![one, other, shared])) }
    }

    fn of<'a>(families: &'a [Family], name: &str) -> &'a Family {
        families.iter().find(|family| family.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    /// A counter that is added to the layout is in one of the tables.
    #[test]
    fn every_counter_of_a_worker_is_there_once() {
        let mut places: Vec<usize> = WORKER_COUNTERS.iter().map(|(counter, ..)| *counter as usize).collect();
        places.extend(KINDS.iter().map(|kind| kind.counter as usize));
        places.extend(ENDED.iter().chain(&PASSED).map(|reason| reason.counter as usize));
        places.extend(WORKER_GAUGES.iter().map(|(counter, ..)| *counter as usize));
        places.sort_unstable();
        assert_eq!(places, (0..COUNTERS).collect::<Vec<_>>());
        let families = families(&[baton()], Own::default(), None);
        let mut names: Vec<_> = families.iter().map(|family| family.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), families.len(), "a name is used twice");
    }

    #[test]
    fn by_name_each_counter_is_there_with_its_unit() {
        let counters: Vec<u64> = (0..COUNTERS as u64).collect();
        let named: BTreeMap<String, u64> = by_name(&counters).collect();
        assert_eq!(named.len(), WORKER_COUNTERS.len() + WORKER_GAUGES.len());
        assert_eq!(named["wire_received_frames"], Counter::WireReceived as u64);
        assert_eq!(named["busy_ns"], Counter::BusyNanoseconds as u64);
        assert_eq!(named["aggregate_bytes"], Counter::AggregateBytes as u64);
        assert_eq!(named["connections"], Counter::Connections as u64);
    }

    #[test]
    fn an_ordinary_user_sees_programs_of_its_own() {
        let programs = |only| {
            let families = families(&[baton()], Own::default(), only);
            let moves = &of(&families, "program_moves_to_nic").values;
            moves.iter().map(|(labels, _)| labels[1].1.clone()).collect::<Vec<_>>()
        };
        assert_eq!(programs(None), ["nginx", "redis", "other programs"]);
        assert_eq!(programs(Some(33)), ["nginx", "other programs"]);
    }

    #[test]
    fn an_agent_that_does_not_answer_is_down() {
        let down = Baton { answer: None, ..baton() };
        let families = families(&[down], Own::default(), None);
        assert_eq!(of(&families, "up").values[0].1, Value::Number(0));
        assert!(of(&families, "moves").values.is_empty());
    }
}
