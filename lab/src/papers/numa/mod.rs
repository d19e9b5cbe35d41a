//! "Mainstream NUMA and the TCP/IP stack" (Friedman): its measurement of what an interrupt costs, Table 1, Figure 2 and
//! Tables 2 to 4, on a model of its machine whose NIC the real moderation drives.

mod live;
mod machine;

use crate::bars::Bar;
use crate::equations;
use crate::papers::report::{Absent, Cell, Comparison, Contradiction, Curve, Figure, Parameter, Report, Row, Source, Table};
use crate::papers::sabotage::Sabotage;
use crate::papers::{Document, Run};
use anyhow::Result;
use baton_moderation::Mode;
use machine::{Settings, Totals, run, sum};

/// The document.
pub const DOCUMENT: Document = Document {
    word: "numa",
    figures: 6,
    tables: 4,
    quick,
    live: live::run,
    needs: None,
    sabotages: &[Sabotage::NoModeration, Sabotage::AckEveryFourth],
};

/// Titles of the figure and the tables that a live run adds to.
const FIGURE_2: &str = "Figure 2: processor 0, per second of the trace";
const SUMMARY: &str = "Table 1: NTttcp for 120 s";
const DEFERRED: &str = "Table 2: deferred halves by module";
const FIRST: &str = "Table 3: first halves by module";
const PROCESSES_TABLE: &str = "Table 4: processor time by process";

/// Seconds of the trace.
const TRACE: u32 = 52;
/// Bytes of a frame, and Mb/s (Table 1).
const FRAME: f64 = 764.394;
const THROUGHPUT: f64 = 131.804;
/// Frames a second of Table 1, and for each of its interrupts: the table prints 2.
const FRAMES: f64 = THROUGHPUT * 1e6 / (FRAME * 8.0);
const FRAMES_EACH: f64 = 2_586_923.0 / (9_494.04 * 120.0);
/// The program's share of processor 0: Table 4's 10.97 % are of both.
const PROGRAM: f64 = 2.0 * 0.1097;
/// The other processes that Table 4 prints, all on processor 0, since the idle process has 50.4 % of both; and what is
/// idle of processor 0.
const PROCESSES: f64 = 2.0 * (0.9 + 0.57 + 0.46 + 0.4 + 0.26 + 0.25 + 0.22 + 0.17 + 0.14 + 0.12 + 0.11) / 100.0;
const IDLE: f64 = 2.0 * 0.004;
/// Milliseconds of the other devices' interrupts, both halves (Tables 2 and 3).
const DEVICES: f64 = 98.1 + 39.8 + 39.0 + 18.4 + 120.2 + 40.0 + 33.6 + 25.4;
/// The NIC interrupts at so many frames, or after so many microseconds.
const AT_FRAMES: u32 = 2;
const DELAY: u32 = 125;

fn settings(sabotage: Option<Sabotage>) -> Settings {
    let moderated = Mode::Static { time: DELAY, frames: AT_FRAMES };
    Settings {
        mode: if sabotage == Some(Sabotage::NoModeration) { Mode::Off } else { moderated },
        isr: 3.173,
        dpc: 75.376,
        read: PROGRAM * 1e6 / FRAMES,
        others: PROCESSES + IDLE + DEVICES / 1e3 / f64::from(TRACE),
        switch: 3.8,
        frame: FRAME,
        link: 1000.0,
        round_trip: 28.0,
        per_ack: if sabotage == Some(Sabotage::AckEveryFourth) { 4 } else { 2 },
        window: 85,
    }
}

fn parameters(settings: &Settings) -> Vec<Parameter> {
    use Source::{Assumed, Calibrated, Paper};
    let li = "Li, Ding and Shen 2007: 3.8 µs on a Xeon at 2.0 GHz; two for each interrupt";
    vec![
        Parameter::new("processor", 2.2, "GHz", Paper("Part 1")),
        Parameter::new("wire", settings.link, "Mb/s", Paper("Part 1")),
        Parameter::new("frame", FRAME, "bytes", Paper("Table 1")),
        Parameter::new("first half (ISR)", settings.isr, "µs", Paper("Table 3, ntkrnlpa.exe")),
        Parameter::new("deferred half (DPC)", settings.dpc, "µs", Paper("Table 2, ndis.sys")),
        Parameter::new("program, a frame", settings.read, "µs", Paper("Table 4: 10.97 % of two processors, at Table 1's frames")),
        Parameter::new("others", 100.0 * settings.others, "%", Paper("Tables 2 to 4: other processes, devices, idle")),
        Parameter::new("a switch of threads", settings.switch, "µs", Assumed(li)),
        Parameter::new("frames to an acknowledgement", 2.0, "frames", Paper("Table 1: sent over received")),
        Parameter::new("round trip", settings.round_trip, "µs", Calibrated("2.27 frames an interrupt (Table 1)")),
        Parameter::new("window", f64::from(settings.window), "frames", Assumed("64 KB, without scale")),
        Parameter::new("interrupt at", f64::from(AT_FRAMES), "frames", Paper("Table 1: packets received/int")),
        Parameter::new("interrupt after", f64::from(DELAY), "µs", Assumed("8000 interrupts/s, a usual limit of such NICs")),
    ]
}

/// Share of the time, in per cent.
fn share(time: f64, seconds: u32) -> f64 {
    time / f64::from(seconds) / 1e4
}

fn figures(settings: Settings, seconds: &[Totals], report: &mut Report) {
    let line = |name: &str, of: fn(&Totals) -> f64, level: f64| {
        let points = seconds.iter().enumerate().map(|(at, one)| (at as f64, share(of(one), 1))).collect();
        Curve { level: Some(level), ..Curve::new(name, points) }
    };
    let curves = vec![
        line("processor", |one| one.isr + one.dpc + one.program + one.others, 100.0),
        line("deferred half", |one| one.dpc, 61.6),
        line("first half", |one| one.isr, 2.6),
    ];
    let note = "The paper's lines are a picture; the levels are those of its text and of Tables 2 and 3 over 52 s.".into();
    report.figures.push(Figure { title: FIGURE_2.into(), x: "s", y: "% of processor 0", curves, note, ..Figure::default() });
    let limits = [1, 2, 3, 4, 6, 8, 12, 16];
    let mode = |frames| if settings.mode == Mode::Off { Mode::Off } else { Mode::Static { time: DELAY, frames } };
    let swept: Vec<_> =
        limits.iter().map(|frames| (*frames, sum(&run(Settings { mode: mode(*frames), ..settings }, 1)))).collect();
    let over = |of: fn(&Totals) -> f64| swept.iter().map(|(frames, one)| (f64::from(*frames), of(one))).collect();
    let megabits: Vec<(f64, f64)> = over(|one| one.frames as f64 * FRAME * 8.0 / 1e6);
    let interrupts: Vec<(f64, f64)> = over(|one| one.interrupts as f64 / 1000.0);
    let (first, last) = (interrupts[0].1, interrupts[limits.len() - 1].1);
    if settings.mode != Mode::Off {
        report.bar(Bar::most("numa.moderation.interrupts_fall", 1.0, last / first));
        report.bar(Bar::least("numa.moderation.throughput_rises", 1.0, megabits[limits.len() - 1].1 / megabits[0].1));
    }
    let own = |title: &str, y, curves| Figure {
        title: title.into(),
        x: "frames at which the NIC interrupts",
        y,
        curves,
        ..Figure::default()
    };
    let curves = vec![Curve::new("interrupts", interrupts)];
    report.figures.push(own("Interrupts by moderation (ours)", "1000 a second", curves));
    report.figures.push(own("Throughput by moderation (ours)", "Mb/s", vec![Curve::new("throughput", megabits)]));
}

fn tables(all: &Totals, report: &mut Report) {
    let seconds = f64::from(TRACE);
    let row = |name: &str, cells: Vec<Cell>| Row { name: name.into(), cells };
    let table = |title: &str, columns: &[&str], rows, note: &str| Table {
        title: title.into(),
        columns: columns.iter().map(|column| (*column).into()).collect(),
        rows,
        note: note.into(),
    };
    let rate = all.frames as f64 / seconds;
    let one = |name, paper, model| row(name, vec![Cell::both(paper, model)]);
    let of_120 = 120.0 / seconds;
    report.tables.push(table(
        SUMMARY,
        &["value"],
        vec![
            one("throughput, KB/s", 16_475.553, rate * FRAME / 1000.0),
            one("throughput, Mb/s", THROUGHPUT, rate * FRAME * 8.0 / 1e6),
            row("frame, bytes", vec![Cell::paper(FRAME)]),
            one("packets sent", 1_309_892.0, all.acks as f64 * of_120),
            one("packets received", 2_586_923.0, all.frames as f64 * of_120),
            one("packets received/int", 2.0, all.frames as f64 / all.interrupts as f64),
            one("interrupts/s", 9_494.04, all.interrupts as f64 / seconds),
            one("cycles/byte", 129.3, 2.2e9 / (rate * FRAME)),
        ],
        "Ours are 52 s, times 120/52. KB are 1000 bytes. The paper's cycles a byte are of some processor time that it does not name: 2.2 GHz \
         over its throughput are 133.5.",
    ));
    let columns = ["count", "longest, ms", "mean, ms", "sum, ms"];
    let half = |name, paper: [f64; 4], mean: f64| {
        let model = [Some(all.interrupts as f64), Some(mean), Some(mean), Some(all.interrupts as f64 * mean)];
        row(name, paper.iter().zip(model).map(|(paper, model)| Cell { paper: Some(*paper), model, live: None }).collect())
    };
    let other = |name, paper: [f64; 4]| row(name, paper.map(Cell::paper).into());
    report.tables.push(table(
        DEFERRED,
        &columns,
        vec![
            half("ndis.sys", [425_125.0, 1.116595, 0.075376, 32_044.45], 0.075376),
            other("USBPORT.SYS", [8312.0, 0.064506, 0.011802, 98.100399]),
            other("tcpip.sys", [4_154.0, 0.551394, 0.009585, 39.817004]),
            other("dxgkrnl.sys", [3_039.0, 0.528346, 0.012848, 39.047187]),
            other("iastor.sys", [1_221.0, 0.033546, 0.015061, 18.390545]),
        ],
        "The model's halves all take the mean. Other modules are in its share of others.",
    ));
    report.tables.push(table(
        FIRST,
        &columns,
        vec![
            half("ntkrnlpa.exe", [423_803.0, 0.023875, 0.003173, 1_345.15], 0.003173),
            other("dxgkrnl.sys", [3_040.0, 0.096759, 0.039523, 120.151742]),
            other("USBPORT.SYS", [5_529.0, 0.040038, 0.007241, 40.038229]),
            other("pcmcia.sys", [4_968.0, 0.02401, 0.006754, 33.558272]),
            other("iastor.sys", [4_968.0, 0.016345, 0.005103, 25.353482]),
        ],
        "",
    ));
    report.tables.push(table(
        PROCESSES_TABLE,
        &["% of both processors"],
        vec![
            row("idle, and processor 1", vec![Cell::paper(50.4)]),
            row("NTttcp.exe", vec![Cell::both(10.97, share(all.program, TRACE) / 2.0)]),
            row("all other rows", vec![Cell::paper(50.0 * PROCESSES)]),
            row(
                "not in the table",
                vec![Cell::both(100.0 - 50.4 - 10.97 - 50.0 * PROCESSES, share(all.isr + all.dpc, TRACE) / 2.0)],
            ),
        ],
        "What the table does not list is taken for the interrupts.",
    ));
}

fn comparisons(all: &Totals, report: &mut Report) {
    let seconds = f64::from(TRACE);
    let (rate, interrupts) = (all.frames as f64 / seconds, all.interrupts as f64 / seconds);
    let (deferred, first) = (share(all.dpc, TRACE), share(all.isr, TRACE));
    let throughput = rate * FRAME * 8.0 / 1e6;
    let why = "the round trip is in whole microseconds";
    let each = Comparison::new("numa.trace.frames_each", "frames an interrupt (Table 1)", "", FRAMES_EACH, rate / interrupts);
    report.compare(each.because(why).calibrated(), 0.05);
    let why = "the tables' times for processor 0 add up to less than all of it; the rest, switches, is assumed";
    let of_trace = 423_803.0 / seconds;
    report.compare(
        Comparison::new("numa.trace.throughput", "throughput (Table 1)", "Mb/s", THROUGHPUT, throughput).because(why),
        0.15,
    );
    let one = Comparison::new("numa.trace.interrupts", "interrupts of the trace (Table 3, 52 s)", "1/s", of_trace, interrupts);
    report.compare(one.because(why), 0.15);
    let one = Comparison::new("numa.table1.interrupts", "interrupts without the trace (Table 1)", "1/s", 9_494.04, interrupts);
    report.show(one.because("the trace has 8,150 a second at the same throughput, less 2 %"));
    report
        .show(Comparison::new("numa.trace.deferred", "deferred half's share (Table 2, 52 s)", "%", 61.6, deferred).because(why));
    report.show(Comparison::new("numa.trace.first", "first half's share (Table 3, 52 s)", "%", 2.6, first).because(why));
    report.bar(Bar::most("numa.trace.deferred_points", 2.0, (deferred - 61.6).abs()));
    report.bar(Bar::most("numa.trace.first_points", 0.5, (first - 2.6).abs()));
    let path = 2200.0 * (all.isr + all.dpc) / all.interrupts as f64;
    let [one, two, three] = equations::of_the_paper().map(|load| load.cost() / 1e9);
    report.show(Comparison::new("numa.equation.1", "equation 1", "10⁹ instructions/s", 5.0, one));
    report.show(Comparison::new("numa.equation.2", "equation 2", "10⁹ cycles/s", 100.0, two));
    report.show(Comparison::new("numa.equation.3", "equation 3", "10⁹ cycles/s", 88.0, three).because("the paper rounds"));
    report.show(Comparison::new("numa.equation.path", "cycles of both halves (175,000)", "cycles", 175_000.0, path));
}

fn contradictions() -> Vec<Contradiction> {
    let one = |place, printed: &str, but: &str| Contradiction { place, printed: printed.into(), but: but.into() };
    vec![
        one(
            "Table 1",
            "9,494 interrupts/s",
            "Table 3 has 423,803 in some 52 s: 8,150 a second, at a throughput that is 2 % lower",
        ),
        one("Table 1", "2 packets an interrupt", "2,586,923 packets over 9,494 interrupts/s for 120 s are 2.27"),
        one(
            "text on Figure 2",
            "a little less than 4 % in interrupts",
            "Table 3's first halves are 1,345 ms of 52 s, 2.6 %; all modules' 3.0 %",
        ),
        one(
            "text on Table 4",
            "61 %, 4 % and 11 % account for the 100 %",
            "they are 76 %; Table 4's 10.97 % are of both processors, 21.9 % of one",
        ),
        one("Table 4", "7,120.5 ms are 10.97 %", "then all is 64.9 s, 32.5 s of each processor; the trace lasted 52 s"),
        one("equation 2", "220,000 cycles an interrupt", "it goes on with 200,000"),
        one("equation 3", "88 · 10⁹", "500,000 · 175,000 are 87.5 · 10⁹"),
    ]
}

fn quick(how: Run) -> Result<Report> {
    let settings = settings(how.sabotage);
    let seconds = run(settings, TRACE);
    let all = sum(&seconds);
    let mut report = Report {
        word: "numa",
        title: "Mainstream NUMA and the TCP/IP stack",
        about: "Processor 0 of the paper's machine in virtual time: a sender with a full window, a NIC whose interrupts our moderation decides, \
                both halves of an interrupt, the program and the others. The paper's times go in; how many interrupts and how much data \
                the processor has time for comes out.",
        parameters: parameters(&settings),
        contradictions: contradictions(),
        absent: vec![Absent {
            what: "Figure 1 and Figures 3 to 6",
            why: "drawings of the stack and of machines with several nodes",
        }],
        ..Report::default()
    };
    figures(settings, &seconds, &mut report);
    tables(&all, &mut report);
    comparisons(&all, &mut report);
    Ok(report)
}
