//! The paper's figures 7, 8, 10, 11 and 12 as numbers, beside the paper's own.

use super::hardware::{Hardware, JUMBO, Parameter, STANDARD};
use super::programs::{Availability, Step, availability, ping_pong};
use crate::bars::Bar;
use serde::Serialize;

/// Lengths of the ping-pong test's messages, in bytes.
const LENGTHS: [u64; 14] =
    [1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 70_000, 100_000, 150_000, 200_000, 300_000, 500_000, 1_000_000];
/// The length at which the curves of bandwidth have levelled off.
const LONG: u64 = 1_000_000;
/// Length of the messages whose availability is measured.
const WORKING: u64 = 256 * 1024;
/// Bytes of message in a data packet of a 1500-byte frame.
const FRAGMENT: f64 = 1460.0;
/// Rounds of the ping-pong test. The model has no noise, so a few do.
const ROUNDS: u32 = 3;
/// Packets before the last that the RSM is sent, as Figure 8 has them.
const EARLY: [u8; 8] = [0, 1, 2, 5, 8, 11, 14, 15];

/// A line of a figure.
#[derive(Clone, Debug, Serialize)]
pub struct Curve {
    /// Its name, as in the paper.
    pub name: String,
    /// (x, y) of its points.
    pub points: Vec<(f64, f64)>,
    /// (x, y) of the points that the paper's text gives; x is NaN (null in JSON) where the text names only the level.
    pub papers: Vec<(f64, f64)>,
}

/// A figure of the paper.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Number and title.
    pub title: &'static str,
    /// What the x axis shows, and in which unit.
    pub x: &'static str,
    /// The same of the y axis.
    pub y: &'static str,
    /// Its lines.
    pub curves: Vec<Curve>,
}

/// A result of the paper, and ours.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Comparison {
    /// Name of the bar.
    pub name: &'static str,
    /// As the model has it.
    pub ours: f64,
    /// As the paper has it.
    pub papers: f64,
    /// Unit.
    pub unit: &'static str,
}

/// What `baton lab rmpp` reports.
#[derive(Clone, Debug, Serialize)]
pub struct RmppReport {
    /// The model's numbers.
    pub parameters: Vec<Parameter>,
    /// The figures.
    pub figures: Vec<Figure>,
    /// Results beside the paper's.
    pub results: Vec<Comparison>,
    /// Ours over the paper's.
    pub bars: Vec<Bar>,
}

const STEPS: [(&str, Step); 3] = [("none", Step::NONE), ("receive", Step::RECEIVE), ("both", Step::BOTH)];

/// Bandwidth over message length.
fn bandwidth_curve(name: String, hardware: Hardware, step: Step, papers: f64) -> Curve {
    let latency = |length: &u64| ping_pong(hardware, step, *length, ROUNDS);
    let points = LENGTHS.iter().map(latency).map(|latency| (latency.length as f64, latency.bandwidth())).collect();
    Curve { name, points, papers: vec![(f64::NAN, papers)] }
}

/// Bandwidth of long messages in MB/s, and the microseconds that each packet of them adds.
fn long(hardware: Hardware, step: Step) -> (f64, f64) {
    let [half, whole] = [LONG / 2, LONG].map(|length| ping_pong(hardware, step, length, ROUNDS));
    let packets = (whole.length - half.length) as f64 / FRAGMENT;
    (whole.bandwidth(), (whole.mean - half.mean) / packets)
}

/// Bandwidth and availability over the polling interval, from 10 µs to 100 ms.
fn availability_curve(hardware: Hardware, step: Step) -> Vec<Availability> {
    (0..=24)
        .map(|at| 10.0 * 10f64.powf(f64::from(at) / 6.0))
        .map(|interval| availability(hardware, step, WORKING, interval, 6))
        .collect()
}

/// Availability at this bandwidth, between the curve's points on both sides of it.
fn availability_at(curve: &[Availability], bandwidth: f64) -> f64 {
    let between = curve.windows(2).find(|pair| pair[0].bandwidth >= bandwidth && pair[1].bandwidth < bandwidth);
    let Some([fast, slow]) = between else { return f64::NAN };
    let share = (fast.bandwidth - bandwidth) / (fast.bandwidth - slow.bandwidth);
    fast.availability + share * (slow.availability - fast.availability)
}

/// Figures 7 and 8, and what the text says about them.
fn bandwidths(hardware: Hardware, figures: &mut Vec<Figure>, results: &mut Vec<Comparison>) {
    let (x, y) = ("message, bytes", "bandwidth, MB/s");
    let papers = [35.0, 50.0, 69.0];
    let curves = STEPS.iter().zip(papers).map(|((name, step), level)| bandwidth_curve((*name).into(), hardware, *step, level));
    figures.push(Figure { title: "Figure 7: bandwidth by what is offloaded", x, y, curves: curves.collect() });
    let level = |early| {
        if early == 0 {
            69.0
        } else if early >= 14 {
            88.0
        } else {
            f64::NAN
        }
    };
    let curves = EARLY.map(|early| bandwidth_curve(format!("Pre {early}"), hardware, Step::pre(early), level(early)));
    figures.push(Figure { title: "Figure 8: bandwidth by how early the RSM is sent", x, y, curves: curves.into() });
    let [none, receive, both, early] = [Step::NONE, Step::RECEIVE, Step::BOTH, Step::pre(15)].map(|step| long(hardware, step));
    let mut result = |name, ours, papers, unit| results.push(Comparison { name, ours, papers, unit });
    result("rmpp.model.bandwidth_none", none.0, 35.0, "MB/s");
    result("rmpp.model.bandwidth_receive", receive.0, 50.0, "MB/s");
    result("rmpp.model.bandwidth_both", both.0, 69.0, "MB/s");
    result("rmpp.model.bandwidth_early", early.0, 88.0, "MB/s");
    result("rmpp.model.packet_none", none.1, 40.0, "µs");
    result("rmpp.model.packet_receive", receive.1, 27.5, "µs");
    result("rmpp.model.packet_both", both.1, 20.0, "µs");
    result("rmpp.model.packet_early", early.1, 15.5, "µs");
    // An RSM and a CTS for every 16 packets: the paper's 16 · 4.5 (section 5.1).
    result("rmpp.model.bubble", 16.0 * (both.1 - early.1), 72.0, "µs");
}

/// Figures 10 and 11, and what the text says about them: the polling interval is not said, so availability is compared
/// at the paper's bandwidth.
fn availabilities(hardware: Hardware, figures: &mut Vec<Figure>, results: &mut Vec<Comparison>) {
    let papers = [(12.0, 0.72), (38.0, 0.58), (61.0, 0.92)];
    let names = [
        ("rmpp.model.availability_none", "rmpp.model.effective_none", 8.64),
        ("rmpp.model.availability_receive", "rmpp.model.effective_receive", 22.3),
        ("rmpp.model.availability_both", "rmpp.model.effective_both", 56.0),
    ];
    let (mut figure_10, mut figure_11) = (Vec::new(), Vec::new());
    for (((name, step), (bandwidth, share)), (of_share, of_product, product)) in STEPS.iter().zip(papers).zip(names) {
        let curve = availability_curve(hardware, *step);
        let ours = availability_at(&curve, bandwidth);
        results.push(Comparison { name: of_share, ours: 100.0 * ours, papers: 100.0 * share, unit: "%" });
        results.push(Comparison { name: of_product, ours: bandwidth * ours, papers: product, unit: "MB/s" });
        let line = |points, papers| Curve { name: (*name).into(), points, papers };
        let shares = curve.iter().map(|point| (point.bandwidth, point.availability)).collect();
        figure_10.push(line(shares, vec![(bandwidth, share)]));
        let products = curve.iter().map(|point| (point.interval, point.bandwidth * point.availability)).collect();
        figure_11.push(line(products, vec![(f64::NAN, product)]));
    }
    let title = "Figure 10: availability over bandwidth";
    figures.push(Figure { title, x: "bandwidth, MB/s", y: "availability", curves: figure_10 });
    let title = "Figure 11: effective bandwidth (bandwidth times availability)";
    figures.push(Figure { title, x: "polling interval, µs", y: "effective bandwidth, MB/s", curves: figure_11 });
}

/// Figure 12: offloading, coalescing and jumbo frames compared. Returns what coalescing gains.
fn comparison(figures: &mut Vec<Figure>, results: &mut Vec<Comparison>) -> f64 {
    let (standard, jumbo) = (Hardware::of_the_paper(STANDARD), Hardware::of_the_paper(JUMBO));
    let ways = [
        ("none", standard, Step::NONE, 280.0),
        ("coalescing", standard.with_coalescing(), Step::NONE, 280.0),
        ("offloaded", standard, Step::pre(15), 700.0),
        ("jumbo", jumbo, Step::NONE, 425.0),
        ("jumbo, coalescing", jumbo.with_coalescing(), Step::NONE, f64::NAN),
        ("jumbo, offloaded", jumbo, Step::pre(15), 840.0),
    ];
    let megabits = |curve: Curve| Curve { points: curve.points.into_iter().map(|(x, y)| (x, 8.0 * y)).collect(), ..curve };
    let curves: Vec<Curve> = ways
        .iter()
        .map(|(name, hardware, step, papers)| megabits(bandwidth_curve((*name).into(), *hardware, *step, *papers)))
        .collect();
    let ours = |at: usize| curves[at].points.last().map_or(f64::NAN, |point| point.1);
    let names = [
        (0, "rmpp.model.standard_none"),
        (2, "rmpp.model.standard_early"),
        (3, "rmpp.model.jumbo_none"),
        (5, "rmpp.model.jumbo_early"),
    ];
    results.extend(names.map(|(at, name)| Comparison { name, ours: ours(at), papers: ways[at].3, unit: "Mb/s" }));
    let gain = ours(1) / ours(0);
    let title = "Figure 12: offloading, coalescing and jumbo frames";
    figures.push(Figure { title, x: "message, bytes", y: "bandwidth, Mb/s", curves });
    gain
}

/// Runs the evaluation. It takes some seconds.
pub fn run() -> RmppReport {
    let hardware = Hardware::of_the_paper(STANDARD);
    let (mut figures, mut results) = (Vec::new(), Vec::new());
    bandwidths(hardware, &mut figures, &mut results);
    availabilities(hardware, &mut figures, &mut results);
    let gain = comparison(&mut figures, &mut results);
    let mut bars: Vec<Bar> = results.iter().map(|result| Bar::near_one(result.name, 0.1, result.ours / result.papers)).collect();
    // The paper has "no improvement from interrupt coalescing", and does not say how much worse it was.
    bars.push(Bar::most("rmpp.model.coalescing_gain", 1.1, gain));
    RmppReport { parameters: hardware.parameters(), figures, results, bars }
}

/// The report as text.
pub fn table(report: &RmppReport) -> String {
    let mut text = String::from("The model's numbers:\n");
    for Parameter { name, value, unit, source } in &report.parameters {
        text += &format!("  {name:<24}{value:>9.1} {unit:<8} {source}\n");
    }
    text += &format!("\n{:<34}{:>9}{:>9}{:>8}\n", "", "ours", "paper", "ratio");
    for Comparison { name, ours, papers, unit } in &report.results {
        text += &format!("{name:<34}{ours:>9.2}{papers:>9.2}{:>8.3}  {unit}\n", ours / papers);
    }
    for bar in report.bars.iter().skip(report.results.len()) {
        text += &format!("{:<34}{:>9.2} (at most {})\n", bar.name, bar.value, bar.bound);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every result of the paper's evaluation comes out of the model within 10 %.
    #[test]
    fn the_papers_results_come_out() {
        let report = run();
        let text = table(&report);
        println!("{text}");
        assert!(report.bars.len() > 19 && report.bars.iter().all(|bar| bar.holds), "{text}");
    }

    /// Section 4.4: an RSM that is sent early keeps the pipeline full, and five packets are early enough for a bubble
    /// of 72 µs.
    #[test]
    fn the_bubble_is_hidden_once_the_rsm_is_early_enough() {
        let hardware = Hardware::of_the_paper(STANDARD);
        let [late, early, earlier] = [0, 5, 15].map(|early| long(hardware, Step::pre(early)).1);
        assert!(late > 1.2 * early && (early / earlier - 1.0).abs() < 0.05, "{late} {early} {earlier}");
    }
}
