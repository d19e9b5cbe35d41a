//! "An evaluation of an attempt at offloading TCP/IP protocol processing onto an i960RN-based iNIC" (Ang, 2001): TTCP
//! over message sizes with nothing, everything and the fast path offloaded.
//!
//! What is at hand of the report is its summary; its figures and tables are not, so every figure here is of our own.

mod live;
mod machine;

use crate::bars::Bar;
use crate::papers::report::{Absent, Comparison, Contradiction, Curve, Figure, Parameter, Report, Shape, Source};
use crate::papers::sabotage::Sabotage;
use crate::papers::{Document, Run};
use anyhow::Result;
use machine::{Outcome, Settings, Way, run};

/// The document.
pub const DOCUMENT: Document = Document {
    word: "inic",
    figures: 0,
    tables: 0,
    quick,
    live: live::run,
    needs: None,
    sabotages: &[Sabotage::NoNagle, Sabotage::NoHandshake],
};

/// Sizes of messages, bytes.
const SIZES: [u32; 15] = [1, 4, 16, 64, 128, 256, 512, 768, 1024, 1460, 2048, 4096, 8192, 16_384, 65_536];
/// A run sends so many messages, but so many bytes at least (20,000 messages if those are fewer) and at most: TTCP's
/// 2048 of 8192.
const MESSAGES: u64 = 4_000;
const LEAST: u64 = 500_000;
const MOST: u64 = 16 << 20;
/// The ways that are compared.
const WAYS: [(&str, Way); 4] = [
    ("native", Way::Native),
    ("full offload", Way::Full),
    ("partial, without Nagle", Way::Partial { nagle: false }),
    ("partial, with Nagle", Way::Partial { nagle: true }),
];
/// Cycles of the card for a packet of the largest size, and for one of 940 messages of one byte (summary of results).
const PACKET: f64 = 17_000.0;
const SMALL: (f64, f64) = (4_500_000.0, 940.0);
/// Cycles in a microsecond.
const CLOCK: f64 = 100.0;
/// Bytes of data in the largest packet.
const SEGMENT: f64 = 1460.0;
/// The host's accesses of the card for a message, by I2O's queues: it reads the number of a free frame, writes the
/// frame of ten words and its number, reads the number of the answer, finds by two reads that there is no other answer,
/// and gives the answer's frame back. So does Linux's driver for I2O.
const READS: f64 = 4.0;
const WRITES: f64 = 12.0;
/// Microseconds of a read over PCI, for which the processor waits, and of a write of one word: five clocks at 33 MHz.
const READ: f64 = 2.0;
const WRITE: f64 = 0.15;

fn settings(sabotage: Option<Sabotage>) -> Settings {
    let handshake = (SMALL.0 - PACKET) / SMALL.1 / CLOCK;
    Settings {
        call: 2.0,
        copy: 7.5 / 1460.0,
        host_packet: 13.1,
        interrupt: 8.0,
        switch: 3.8,
        access: READS * READ + WRITES * WRITE,
        handshake: if sabotage == Some(Sabotage::NoHandshake) { 0.0 } else { handshake },
        nic_packet: PACKET / CLOCK,
        link: 100.0,
        framing: 78,
        delay: 10.0,
        buffer: 16 << 10,
        nagle: sabotage != Some(Sabotage::NoNagle),
    }
}

fn parameters(settings: &Settings) -> Vec<Parameter> {
    use Source::{Assumed, Calibrated, Paper};
    let pentium = "as measured or calibrated for a 500 MHz Pentium III (baton lab rmpp)";
    vec![
        Parameter::new("card's clock", CLOCK, "MHz", Paper("abstract")),
        Parameter::new("wire", settings.link, "Mb/s", Paper("abstract")),
        Parameter::new("card, a packet", settings.nic_packet * CLOCK, "cycles", Calibrated("17,000 cycles an MTU packet (1.1)")),
        Parameter::new(
            "card, a message's handshake",
            settings.handshake * CLOCK,
            "cycles",
            Calibrated("4.5 million cycles for 940 messages of one byte (1.1)"),
        ),
        Parameter::new("framing", settings.framing.into(), "bytes", Assumed("Ethernet, IP and TCP headers, preamble and gap")),
        Parameter::new("host, a call", settings.call, "µs", Assumed("1,000 cycles at 500 MHz")),
        Parameter::new("host, copy of 1460 bytes", settings.copy * SEGMENT, "µs", Assumed(pentium)),
        Parameter::new("host, a packet", settings.host_packet, "µs", Assumed(pentium)),
        Parameter::new("host, an interrupt", settings.interrupt, "µs", Assumed(pentium)),
        Parameter::new("host, a switch of threads", settings.switch, "µs", Assumed("Li, Ding and Shen 2007; two a handshake")),
        Parameter::new(
            "host, accesses of the card",
            settings.access,
            "µs",
            Assumed("I2O's queues over PCI: four reads of 2 µs, twelve words written of 0.15 µs"),
        ),
        Parameter::new("socket buffer", settings.buffer.into(), "bytes", Assumed("4.4BSD's 16 KB")),
        Parameter::new("one way", settings.delay, "µs", Assumed("a switch")),
    ]
}

/// Where two curves over these sizes cross: the size from which on the second one is the lower, between two sizes on a
/// logarithmic scale.
fn crossover(sizes: &[f64], above: &[f64], below: &[f64]) -> f64 {
    let ratio = |at: usize| (below[at] / above[at]).ln();
    let found = (1..sizes.len().min(above.len()).min(below.len())).rev().find(|at| ratio(at - 1) > 0.0 && ratio(*at) <= 0.0);
    let Some(at) = found else { return f64::NAN };
    let share = ratio(at - 1) / (ratio(at - 1) - ratio(at));
    let [from, to] = [sizes[at - 1], sizes[at]].map(f64::ln);
    (from + share * (to - from)).exp()
}

/// The runs of each way, by size.
type Runs = [Vec<Outcome>; WAYS.len()];

fn figures(runs: &Runs, report: &mut Report) {
    let curve = |at: usize, of: fn(&Outcome) -> f64| {
        let points = SIZES.iter().zip(&runs[at]).map(|(size, one)| (f64::from(*size), of(one)));
        Curve::new(WAYS[at].0, points.collect())
    };
    let all = |of: fn(&Outcome) -> f64| (0..WAYS.len()).map(|at| curve(at, of)).collect::<Vec<_>>();
    let figure = |title: &str, y, shape, curves| Figure {
        title: title.into(),
        x: "message, bytes",
        y,
        shape,
        curves,
        note: String::new(),
    };
    report.figures.push(figure("Bandwidth (ours)", "Mb/s", Shape::LogLines, all(|one| one.megabits)));
    report.figures.push(figure("Host's processor (ours)", "ms a MB", Shape::LogLogLines, all(|one| one.host)));
    report.figures.push(figure("Interrupts of the host (ours)", "a MB", Shape::LogLogLines, all(|one| one.interrupts)));
    let mut cycles = curve(1, |one| one.cycles);
    cycles.paper = vec![(1.0, SMALL.0 / 1000.0), (8192.0, PACKET / 1000.0)];
    let title = "Card's cycles for a packet, full offload (ours)";
    report.figures.push(figure(title, "1000 cycles", Shape::LogLogLines, vec![cycles]));
    let mut packet = curve(1, |one| one.packet);
    packet.paper = vec![(1.0, SMALL.1)];
    report.figures.push(figure("Data in a packet, full offload (ours)", "bytes", Shape::LogLines, vec![packet]));
}

fn comparisons(settings: &Settings, runs: &Runs, report: &mut Report) {
    let [native, full, partial, joined] = runs;
    let last = SIZES.len() - 1;
    let of = |runs: &[Outcome], of: fn(&Outcome) -> f64| runs.iter().map(of).collect::<Vec<_>>();
    let packets = (SEGMENT + f64::from(settings.framing)) * 8.0 / settings.link;
    let wire = SEGMENT * 8.0 / packets;
    let sizes = SIZES.map(f64::from);
    let processor = crossover(&sizes, &of(native, |one| one.host), &of(full, |one| one.host));
    let interrupts = crossover(&sizes, &of(native, |one| one.interrupts), &of(full, |one| one.interrupts));
    let one = Comparison::new("inic.cpu_crossover", "from this size on the host works less (1.1)", "bytes", 1000.0, processor);
    report.compare(one.because("the host's costs are those of another machine of the time"), 0.3);
    let what = "from this size on the host has fewer interrupts";
    report.show(Comparison::ours("inic.interrupts_crossover_bytes", what, "bytes", interrupts));
    report.bar(Bar::most("inic.interrupts_crossover", 1.0, interrupts / processor));
    // "The number of interrupts is reduced by a much more significant percentage than the reduction in host processor
    // utilization".
    let kept = |of: fn(&Outcome) -> f64| of(&full[last]) / of(&native[last]);
    report.bar(Bar::most("inic.interrupts_reduced_more", 1.0, kept(|one| one.interrupts) / kept(|one| one.host)));
    let share = full[last].megabits / wire;
    let why = "a packet of 17,000 cycles is 170 µs, and 123 µs on the wire: see the contradiction";
    report.show(Comparison::new("inic.transmit", "transmit, share of the wire (abstract)", "", 0.8, share).because(why));
    report.bar(Bar::most("inic.transmit_points", 10.0, 100.0 * (share - 0.8).abs()));
    let one = Comparison::new(
        "inic.packet",
        "card's cycles for an MTU packet (1.1)",
        "1000 cycles",
        PACKET / 1000.0,
        full[last].cycles,
    );
    report
        .compare(one.because("65,536 bytes are not a whole number of packets, and a handshake goes with each").calibrated(), 0.1);
    let why =
        "our TCP, as Linux's, lets a small segment go while no other small one is unacknowledged; BSD's only while nothing is";
    let one =
        Comparison::new("inic.small_packet", "data in a packet of one-byte messages (1.1)", "bytes", SMALL.1, full[0].packet);
    report.show(one.because(why));
    let message = 1000.0 * full[0].cycles / full[0].packet;
    let one =
        Comparison::new("inic.message", "card's cycles for a message of one byte (1.1)", "cycles", SMALL.0 / SMALL.1, message);
    report.compare(one.calibrated(), 0.1);
    report.bar(Bar::least("inic.partial_wire", 0.9, partial[last].megabits / wire));
    report.bar(Bar::most("inic.partial_below_native", 1.0, partial[last].host / native[last].host));
    report.bar(Bar::least("inic.partial_above_full", 1.0, partial[last].host / full[last].host));
    let below = SIZES.iter().take_while(|size| **size < 2048).count();
    let worst = (0..below).map(|at| partial[at].megabits / native[at].megabits).fold(0.0, f64::max);
    report.bar(Bar::most("inic.without_nagle", 1.0, worst));
    let with = (0..below).map(|at| joined[at].megabits / partial[at].megabits).fold(f64::INFINITY, f64::min);
    report.bar(Bar::least("inic.nagle_helps", 1.0, with));
    // A pure acknowledgement for every second packet; the cost of a received packet is assumed.
    let received = (7_000.0 + 10_000.0 / 2.0) / CLOCK;
    let one = Comparison::new("inic.receive", "receive, share of the wire (abstract)", "", 1.0, (packets / received).min(1.0));
    report.show(one.because("7,000 cycles a received packet are assumed; 10,000 an acknowledgement are the report's"));
}

fn quick(how: Run) -> Result<Report> {
    let settings = settings(how.sabotage);
    let of_way = |(_, way): (&str, Way)| -> Vec<Outcome> {
        let bytes = |size: u32| (MESSAGES * u64::from(size)).clamp(LEAST.min(20_000 * u64::from(size)), MOST);
        SIZES.iter().map(|size| run(settings, way, *size, bytes(*size))).collect()
    };
    let runs = WAYS.map(of_way);
    let one = |place, printed: &str, but: &str| Contradiction { place, printed: printed.into(), but: but.into() };
    let mut report = Report {
        word: "inic",
        title: "An evaluation of an attempt at offloading TCP/IP protocol processing onto an i960RN-based iNIC (2001)",
        about: "Host and card as two processors in virtual time. Our TCP runs on the host (native), on the card behind a handshake for each \
                message (full), or behind whole messages that the card cuts (partial, in Alacritech's way).",
        parameters: parameters(&settings),
        contradictions: vec![
            one(
                "abstract",
                "transmit sustains some 80 % of wire speed",
                "17,000 cycles at 100 MHz are 170 µs a packet, 72 % of the wire's 123 µs",
            ),
            one(
                "1.1",
                "940 one-byte messages are 4.5 million cycles",
                "that is 4,787 cycles a message: more than a quarter of an MTU packet",
            ),
        ],
        absent: vec![
            Absent {
                what: "the report's figures and tables, sections 2 to 6",
                why: "only its first five pages, up to the summary, are at hand",
            },
            Absent {
                what: "buffering strategies (3.4)",
                why: "baton ttcp --costs compares them: send queues below the real TCP, our NIC's own among them",
            },
        ],
        ..Report::default()
    };
    figures(&runs, &mut report);
    comparisons(&settings, &runs, &mut report);
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_cross_between_two_sizes() {
        // One curve is level; the other falls with the size and meets it at 1000.
        let level = [1.0; SIZES.len()];
        let falling = SIZES.map(|size| 1000.0 / f64::from(size));
        let sizes = SIZES.map(f64::from);
        assert!((crossover(&sizes, &level, &falling) - 1000.0).abs() < 1.0);
        assert!(crossover(&sizes, &falling, &level).is_nan(), "it rises above");
    }
}
