//! The figures as one HTML file with its plots inside.

use super::report::{Comparison, Figure, RmppReport};
use crate::rmpp::Parameter;
use anyhow::{Result, anyhow};
use baton_bed::axis::tick;
use plotters::prelude::*;

const COLOURS: [RGBColor; 8] = [
    RGBColor(0x8a, 0x8f, 0x98),
    RGBColor(0x1f, 0x6f, 0xeb),
    RGBColor(0x1a, 0x7f, 0x37),
    RGBColor(0xb3, 0x26, 0x1e),
    RGBColor(0x8a, 0x3f, 0xfc),
    RGBColor(0xd9, 0x73, 0x0d),
    RGBColor(0x00, 0x8b, 0x8b),
    RGBColor(0x1b, 0x1f, 0x24),
];

/// A figure: our lines, and the paper's points as crosses or, where it names only a level, at the right edge.
fn plot(figure: &Figure) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (480, 320)).into_drawing_area();
        let fail = |error: DrawingAreaErrorKind<std::io::Error>| anyhow!("drawing: {error}");
        root.fill(&WHITE).map_err(fail)?;
        let points = || figure.curves.iter().flat_map(|curve| &curve.points);
        let (left, right) = points().fold((f64::INFINITY, 0f64), |(low, high), (x, _)| (low.min(*x), high.max(*x)));
        let papers = figure.curves.iter().flat_map(|curve| &curve.papers).map(|point| point.1).filter(|y| y.is_finite());
        let top = points().map(|point| point.1).chain(papers).fold(0.0, f64::max) * 1.1;
        let mut chart = ChartBuilder::on(&root)
            .caption(figure.title, ("sans-serif", 14))
            .margin(8)
            // Half of the last label of the x axis lies behind the plot.
            .margin_right(32)
            .x_label_area_size(34)
            .y_label_area_size(52)
            .build_cartesian_2d((left..right * 1.05).log_scale(), 0.0..top)
            .map_err(fail)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_labels(6).x_label_formatter(&|x| tick(*x)).x_desc(figure.x).y_desc(figure.y).draw().map_err(fail)?;
        for (curve, colour) in figure.curves.iter().zip(COLOURS.iter().cycle()) {
            chart.draw_series(LineSeries::new(curve.points.iter().copied(), colour)).map_err(fail)?;
            let marks = curve.papers.iter().filter(|point| point.1.is_finite());
            let place = |(x, y): &(f64, f64)| (if x.is_nan() { right } else { *x }, *y);
            chart.draw_series(marks.map(|point| Cross::new(place(point), 5, colour.stroke_width(2)))).map_err(fail)?;
        }
        root.present().map_err(fail)?;
    }
    Ok(svg)
}

/// The colours' meaning.
fn key(figure: &Figure) -> String {
    let entries = figure.curves.iter().zip(COLOURS.iter().cycle());
    entries
        .map(|(curve, RGBColor(r, g, b))| {
            format!("<span style='white-space:nowrap'><i style='background:rgb({r},{g},{b})'></i>{}</span> ", curve.name)
        })
        .collect()
}

/// The report as one self-contained HTML document.
///
/// # Errors
/// If a plot cannot be drawn.
pub fn html(report: &RmppReport) -> Result<String> {
    let mut figures = String::new();
    for figure in &report.figures {
        figures += &format!("<figure>{}<p class=key>{}</p></figure>\n", plot(figure)?, key(figure));
    }
    let results = report.results.iter().map(|Comparison { name, ours, papers, unit }| {
        format!("<tr><th>{name}</th><td>{ours:.2}</td><td>{papers:.2}</td><td>{unit}</td><td>{:.3}</td></tr>\n", ours / papers)
    });
    let parameters = report.parameters.iter().map(|Parameter { name, value, unit, source }| {
        format!("<tr><th>{name}</th><td>{value:.1}</td><td>{unit}</td><td>{source}</td></tr>\n")
    });
    Ok(format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Baton: RMPP</title>
<meta name=viewport content='width=device-width'>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:1020px;margin:2rem auto;padding:0 1rem;color:#1b1f24}}
table{{border-collapse:collapse;margin:1rem 0}}th,td{{padding:.2rem .9rem;border-bottom:1px solid #d0d7de;text-align:right}}
th:first-child{{text-align:left;font-weight:500}}figure{{display:inline-block;margin:.3rem;vertical-align:top}}
.key{{font-size:12px;max-width:460px}}.key i{{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 .8em}}</style>
<h1>RMPP: the paper's evaluation on a model of its machines</h1>
<p>The real protocol code in virtual time. Lines are ours, crosses the paper's text; one at the right edge is the level that a
curve reaches.</p>
{figures}
<table><tr><th></th><th>ours</th><th>paper</th><th></th><th>ratio</th></tr>
{}</table><table><tr><th>the model's numbers</th><th></th><th></th><th></th></tr>
{}</table></html>\n",
        results.collect::<String>(),
        parameters.collect::<String>()
    ))
}
