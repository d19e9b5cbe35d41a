//! The demonstration's report: one HTML file with its plots inside.

use crate::axis::tick;
use crate::demo::{Both, DemoReport, change};
use anyhow::{Result, anyhow};
use baton_protocol::program::Place;
use plotters::prelude::*;

const KERNEL: RGBColor = RGBColor(0x8a, 0x8f, 0x98);
const NIC: RGBColor = RGBColor(0x1f, 0x6f, 0xeb);

/// Bars of kernel and NIC, one pair per round.
fn plot(report: &DemoReport, title: &str, figure: fn(&crate::demo::Round) -> f64) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (460, 260)).into_drawing_area();
        let fail = |error: DrawingAreaErrorKind<std::io::Error>| anyhow!("drawing: {error}");
        root.fill(&WHITE).map_err(fail)?;
        let top = report.rounds.iter().map(figure).fold(0.0, f64::max) * 1.15;
        let pairs = report.rounds.len() / 2;
        let mut chart = ChartBuilder::on(&root)
            .caption(title, ("sans-serif", 16))
            .margin(8)
            .x_label_area_size(28)
            .y_label_area_size(52)
            .build_cartesian_2d(0.5..pairs.max(1) as f64 + 0.5, 0.0..top.max(1e-9))
            .map_err(fail)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(pairs.max(1))
            .x_label_formatter(&|x| tick(*x))
            .y_label_formatter(&|y| tick(*y))
            .x_desc("round")
            .draw()
            .map_err(fail)?;
        for (place, colour, shift) in [(Place::Kernel, KERNEL, -0.38), (Place::Nic, NIC, 0.02)] {
            let rounds = report.rounds.iter().filter(|round| round.place == place).enumerate();
            chart
                .draw_series(rounds.map(|(at, round)| {
                    let left = (at + 1) as f64 + shift;
                    Rectangle::new([(left, 0.0), (left + 0.36, figure(round))], colour.filled())
                }))
                .map_err(fail)?;
        }
        root.present().map_err(fail)?;
    }
    Ok(svg)
}

fn row(label: &str, both: Both<f64>, digits: usize) -> String {
    let (kernel, nic) = (both.kernel, both.nic);
    format!("<tr><th>{label}</th><td>{kernel:.digits$}</td><td>{nic:.digits$}</td><td>{}</td></tr>\n", change(both))
}

/// The report as one self-contained HTML document.
///
/// # Errors
/// If a plot cannot be drawn.
pub fn html(r: &DemoReport) -> Result<String> {
    let plots = [
        plot(r, "Requests per second", |round| round.requests_per_second)?,
        plot(r, "Server CPU per request, µs", |round| round.server_cpu_us)?,
        plot(r, "Machine CPU per request, µs", |round| round.machine_cpu_us)?,
        plot(r, "Latency p99, µs", |round| round.p99_us)?,
    ];
    let mut table = String::new();
    table += &row("requests/s", r.requests_per_second, 0);
    table += &row("server CPU per request, µs", r.server_cpu_us_per_request, 2);
    table += &row("NIC CPU per request, µs", r.nic_cpu_us_per_request, 2);
    table += &row("machine CPU per request, µs", r.machine_cpu_us_per_request, 2);
    table += &row("latency p50, µs", r.latency_us.p50, 0);
    table += &row("latency p99, µs", r.latency_us.p99, 0);
    let verdict = if r.failures.is_empty() {
        "<p class=good>Every check held.</p>".to_string()
    } else {
        format!("<p class=bad>Checks failed: {}</p>", r.failures.join("; "))
    };
    let b = r.blackout_us;
    let server = &r.server;
    let figures: String = plots.iter().map(|svg| format!("<figure>{svg}</figure>\n")).collect();
    Ok(format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Baton: demonstration</title>
<meta name=viewport content='width=device-width'>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:980px;margin:2rem auto;padding:0 1rem;color:#1b1f24}}
table{{border-collapse:collapse;margin:1rem 0}}th,td{{padding:.3rem .9rem;border-bottom:1px solid #d0d7de;text-align:right}}
th:first-child{{text-align:left;font-weight:500}}figure{{display:inline-block;margin:.3rem}}.good{{color:#1a7f37;font-weight:600}}
.bad{{color:#b3261e;font-weight:600}}.key i{{display:inline-block;width:.9em;height:.9em;vertical-align:-.1em;margin:0 .3em 0 1em}}</style>
<h1>Baton: demonstration</h1>
<p>Compared: {server} on a Linux host with a veth link and no Baton at all (<em>kernel</em>), and the same {server} under
<code>baton run</code> behind a NIC, to which it gives the connections that the kernel accepted (<em>NIC</em>). Later these moved to
the kernel and back under load. Clients on the links' other hosts checked every byte.</p>{verdict}
<table><tr><th></th><th>kernel</th><th>NIC</th><th>change</th></tr>
{table}</table>
<p>{} moves, {} bytes verified, {} wrong, {} connections broken, {} recovered when the NIC was killed.
Blackout of a move: p50 {:.0} µs, p99 {:.0} µs, max {:.0} µs. {}</p>
<p class=key><i style='background:#8a8f98'></i>kernel<i style='background:#1f6feb'></i>NIC</p>
{figures}
<p>Medians of {} interleaved rounds each. The machine's CPU is the busy time of all its processors: kernel, server, NIC, agent and
clients. MTU, offloads and congestion control are the same.</p></html>\n",
        r.moves,
        r.bytes_verified,
        r.mismatches,
        r.resets_seen_by_peer,
        r.connections_recovered,
        b.p50,
        b.p99,
        b.max,
        r.http_client.as_ref().map_or_else(String::new, |text| format!("{text}.")),
        r.rounds.len() / 2,
    ))
}
