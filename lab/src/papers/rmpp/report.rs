//! The paper's figures 7, 8, 10, 11 and 12 as numbers, beside the paper's own.

use super::hardware::{Hardware, JUMBO, STANDARD};
use super::programs::{Availability, Step, availability, ping_pong};
use crate::bars::Bar;
use crate::papers::Run;
use crate::papers::report::{Absent, Comparison, Contradiction, Curve, Figure, Report, Shape};
use crate::papers::sabotage::Sabotage;
use anyhow::Result;

/// Lengths of the ping-pong test's messages, in bytes.
const LENGTHS: [u64; 14] =
    [1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 70_000, 100_000, 150_000, 200_000, 300_000, 500_000, 1_000_000];
/// The length at which the curves of bandwidth have levelled off.
const LONG: u64 = 1_000_000;
/// Length of the messages whose availability is measured.
pub const WORKING: u64 = 256 * 1024;
/// Bytes of message in a data packet of a 1500-byte frame.
const FRAGMENT: f64 = 1460.0;
/// Rounds of the ping-pong test. The model has no noise, so a few do.
const ROUNDS: u32 = 3;
/// A short run takes every so manyth length and polling interval.
const SHORT: usize = 6;
/// Packets before the last that the RSM is sent, as Figure 8 has them.
const EARLY: [u8; 8] = [0, 1, 2, 5, 8, 11, 14, 15];

/// Packets to a CTS if the model is sabotaged.
const FEW: u16 = 4;

/// Titles of the figures that a live run adds to.
pub const FIGURE_7: &str = "Figure 7: bandwidth by what is offloaded";
pub const FIGURE_8: &str = "Figure 8: bandwidth by how early the RSM is sent";
pub const FIGURE_10: &str = "Figure 10: availability over bandwidth";
pub const FIGURE_11: &str = "Figure 11: effective bandwidth (bandwidth times availability)";

const STEPS: [(&str, Step); 3] = [("none", Step::NONE), ("receive", Step::RECEIVE), ("both", Step::BOTH)];

/// Bandwidth over every `each`-th message length, and the level that the paper names.
fn bandwidth_curve(name: String, hardware: Hardware, step: Step, level: Option<f64>, each: usize) -> Curve {
    let latency = |length: &u64| ping_pong(hardware, step, *length, ROUNDS);
    let points = LENGTHS.iter().step_by(each).map(latency).map(|latency| (latency.length as f64, latency.bandwidth())).collect();
    Curve { level, ..Curve::new(name, points) }
}

/// A figure whose x axis is logarithmic.
fn figure(title: &str, x: &'static str, y: &'static str, curves: Vec<Curve>) -> Figure {
    Figure { title: title.into(), x, y, shape: Shape::LogLines, curves, note: String::new() }
}

/// Bandwidth of long messages in MB/s, and the microseconds that each packet of them adds.
fn long(hardware: Hardware, step: Step) -> (f64, f64) {
    let [half, whole] = [LONG / 2, LONG].map(|length| ping_pong(hardware, step, length, ROUNDS));
    let packets = (whole.length - half.length) as f64 / FRAGMENT;
    (whole.bandwidth(), (whole.mean - half.mean) / packets)
}

/// Bandwidth and availability over every `each`-th polling interval, from 10 µs to 100 ms.
fn availability_curve(hardware: Hardware, step: Step, each: usize) -> Vec<Availability> {
    (0..=24)
        .step_by(each)
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

/// A bar of a comparison allows a tenth.
const TENTH: f64 = 0.1;

/// Figures 7 and 8, and what the text says about them. Bandwidth of long messages is the time of a packet in another
/// unit, so it does not count where that was calibrated.
fn bandwidths(hardware: Hardware, each: usize, report: &mut Report) {
    let (x, y) = ("message, bytes", "bandwidth, MB/s");
    let levels = [35.0, 50.0, 69.0];
    let curve = |((name, step), level): (&(&str, Step), f64)| bandwidth_curve((*name).into(), hardware, *step, Some(level), each);
    let curves = STEPS.iter().zip(levels).map(curve).collect();
    report.figures.push(figure(FIGURE_7, x, y, curves));
    let level = |early| match early {
        0 => Some(69.0),
        14.. => Some(88.0),
        _ => None,
    };
    let curves = EARLY.map(|early| bandwidth_curve(format!("Pre {early}"), hardware, Step::pre(early), level(early), each));
    report.figures.push(figure(FIGURE_8, x, y, curves.into()));
    let [none, receive, both, early] = [Step::NONE, Step::RECEIVE, Step::BOTH, Step::pre(15)].map(|step| long(hardware, step));
    let rate = |name, what, paper, model| Comparison::new(name, format!("bandwidth, {what} (Figure 7)"), "MB/s", paper, model);
    let packet = |name, what, paper, model| Comparison::new(name, format!("a packet, {what} (5.1)"), "µs", paper, model);
    // An RSM and a CTS for every 16 packets: the paper's 16 · 4.5 (section 5.1).
    let bubble = f64::from(hardware.grant) * (both.1 - early.1);
    let copies = "the model's copy of what the CPU still sends waits for DMA more often than the paper's";
    for one in [
        rate("rmpp.model.bandwidth_none", "nothing offloaded", 35.0, none.0).calibrated(),
        rate("rmpp.model.bandwidth_receive", "receiving offloaded", 50.0, receive.0).because(copies),
        rate("rmpp.model.bandwidth_both", "both offloaded", 69.0, both.0).calibrated(),
        rate("rmpp.model.bandwidth_early", "RSM early", 88.0, early.0).calibrated(),
        packet("rmpp.model.packet_none", "nothing offloaded", 40.0, none.1).calibrated(),
        packet("rmpp.model.packet_receive", "receiving offloaded", 27.5, receive.1).because(copies),
        packet("rmpp.model.packet_both", "both offloaded", 20.0, both.1).calibrated(),
        packet("rmpp.model.packet_early", "RSM early", 15.5, early.1).calibrated(),
        Comparison::new("rmpp.model.bubble", "the bubble (5.1)", "µs", 72.0, bubble).calibrated(),
    ] {
        report.compare(one, TENTH);
    }
}

/// Section 2's arithmetic: how soon a frame follows another, and what an interrupt takes of that.
fn arithmetic(hardware: Hardware, report: &mut Report) {
    let apart = |mtu: u16| f64::from(mtu) * 8.0 / hardware.link;
    let share = 100.0 * hardware.interrupt / apart(STANDARD);
    report.show(Comparison::new(
        "rmpp.arithmetic.apart",
        "frames of 1500 bytes are apart (section 2)",
        "µs",
        12.0,
        apart(STANDARD),
    ));
    report.show(Comparison::new("rmpp.arithmetic.overhead", "overhead of an interrupt each (section 2)", "%", 67.0, share));
    report.show(Comparison::new(
        "rmpp.arithmetic.apart_jumbo",
        "frames of 9000 bytes are apart (section 2)",
        "µs",
        72.0,
        apart(JUMBO),
    ));
}

/// Figures 10 and 11, and what the text says about them: the polling interval is not said, so availability is compared
/// at the paper's bandwidth.
fn availabilities(hardware: Hardware, each: usize, report: &mut Report) {
    let papers = [(12.0, 0.72), (38.0, 0.58), (61.0, 0.92)];
    let names = [
        ("rmpp.model.availability_none", "rmpp.model.effective_none", 8.64),
        ("rmpp.model.availability_receive", "rmpp.model.effective_receive", 22.3),
        ("rmpp.model.availability_both", "rmpp.model.effective_both", 56.0),
    ];
    let (mut figure_10, mut figure_11) = (Vec::new(), Vec::new());
    for (((name, step), (bandwidth, share)), (of_share, of_product, product)) in STEPS.iter().zip(papers).zip(names) {
        let curve = availability_curve(hardware, *step, each);
        let ours = availability_at(&curve, bandwidth);
        let what = format!("availability at {bandwidth} MB/s, {name} (Figure 10)");
        report.compare(Comparison::new(of_share, what, "%", 100.0 * share, 100.0 * ours), TENTH);
        let what = format!("effective bandwidth at {bandwidth} MB/s, {name} (Figure 11)");
        let why = "it is the availability above, times the bandwidth";
        report.compare(Comparison::new(of_product, what, "MB/s", product, bandwidth * ours).because(why), TENTH);
        let shares = curve.iter().map(|point| (point.bandwidth, point.availability)).collect();
        figure_10.push(Curve { paper: vec![(bandwidth, share)], ..Curve::new(*name, shares) });
        let products = curve.iter().map(|point| (point.interval, point.bandwidth * point.availability)).collect();
        figure_11.push(Curve { level: Some(product), ..Curve::new(*name, products) });
    }
    report.figures.push(Figure { shape: Shape::Lines, ..figure(FIGURE_10, "bandwidth, MB/s", "availability", figure_10) });
    report.figures.push(figure(FIGURE_11, "polling interval, µs", "effective bandwidth, MB/s", figure_11));
}

/// Figure 12: offloading, coalescing and jumbo frames compared.
fn comparison(grant: u16, each: usize, report: &mut Report) {
    let [standard, jumbo] = [STANDARD, JUMBO].map(|mtu| Hardware::of_the_paper(mtu).with_grant(grant));
    let ways = [
        ("none", standard, Step::NONE, Some(280.0)),
        ("coalescing", standard.with_coalescing(), Step::NONE, Some(280.0)),
        ("offloaded", standard, Step::pre(15), Some(700.0)),
        ("jumbo", jumbo, Step::NONE, Some(425.0)),
        ("jumbo, coalescing", jumbo.with_coalescing(), Step::NONE, None),
        ("jumbo, offloaded", jumbo, Step::pre(15), Some(840.0)),
    ];
    let megabits = |curve: Curve| Curve { points: curve.points.into_iter().map(|(x, y)| (x, 8.0 * y)).collect(), ..curve };
    let curves: Vec<Curve> = ways
        .iter()
        .map(|(name, hardware, step, level)| megabits(bandwidth_curve((*name).into(), *hardware, *step, *level, each)))
        .collect();
    let ours = |at: usize| curves[at].points.last().map_or(f64::NAN, |point| point.1);
    // Two of the four are the calibrated bandwidths above.
    for (at, name, calibrated) in [
        (0, "rmpp.model.standard_none", true),
        (2, "rmpp.model.standard_early", true),
        (3, "rmpp.model.jumbo_none", false),
        (5, "rmpp.model.jumbo_early", false),
    ] {
        let (way, _, _, level) = ways[at];
        let what = format!("bandwidth, {way} (Figure 12)");
        let one = Comparison { paper: level, ..Comparison::new(name, what, "Mb/s", f64::NAN, ours(at)) };
        report.compare(if calibrated { one.calibrated() } else { one }, TENTH);
    }
    // The paper has "no improvement from interrupt coalescing", and does not say how much worse it was.
    report.bar(Bar::most("rmpp.model.coalescing_gain", 1.1, ours(1) / ours(0)));
    let title = "Figure 12: offloading, coalescing and jumbo frames";
    report.figures.push(figure(title, "message, bytes", "bandwidth, Mb/s", curves));
}

/// Runs the evaluation. It takes some seconds.
///
/// # Errors
/// None; documents can fail in general.
pub fn run(how: Run) -> Result<Report> {
    let each = if how.short { SHORT } else { 1 };
    let paper = Hardware::of_the_paper(STANDARD);
    let grant = if how.sabotage == Some(Sabotage::NoCtsBatch) { FEW } else { paper.grant };
    let hardware = paper.with_grant(grant);
    let mut report = Report {
        word: "rmpp",
        title: "Experience in offloading protocol processing to a programmable NIC (2002)",
        about: "The real RMPP code on a model of two 500 MHz hosts with a programmable NIC each, in virtual time. A copy by the processor \
                and a DMA exclude each other. MB are 2²⁰ bytes: then the paper's bandwidths agree with its times for a packet.",
        parameters: hardware.parameters(),
        ..Report::default()
    };
    arithmetic(hardware, &mut report);
    bandwidths(hardware, each, &mut report);
    availabilities(hardware, each, &mut report);
    comparison(grant, each, &mut report);
    let printed = "effective bandwidth with receiving offloaded is printed as 22.3 MB/s".into();
    let but = "38 MB/s at an availability of 58 % are 22.04".into();
    report.contradictions.push(Contradiction { place: "section 5.2", printed, but });
    report.absent.push(Absent { what: "Figures 1 to 6 and 9", why: "drawings of the protocol and listings of the programs" });
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Section 4.4: an RSM that is sent early keeps the pipeline full, and five packets are early enough for a bubble
    /// of 72 µs.
    #[test]
    fn the_bubble_is_hidden_once_the_rsm_is_early_enough() {
        let hardware = Hardware::of_the_paper(STANDARD);
        let [late, early, earlier] = [0, 5, 15].map(|early| long(hardware, Step::pre(early)).1);
        assert!(late > 1.2 * early && (early / earlier - 1.0).abs() < 0.05, "{late} {early} {earlier}");
    }
}
