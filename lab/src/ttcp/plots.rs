//! The figures: one metric each, message size on a logarithmic axis.

use super::program::Direction;
use super::{Cell, Figures, TtcpReport, WAYS};
use anyhow::{Result, anyhow};
use baton_bed::axis::tick;
use plotters::coord::Shift;
use plotters::prelude::*;

/// Colours of the ways, in their order.
const COLOURS: [RGBColor; WAYS.len()] = [
    RGBColor(0x8a, 0x8f, 0x98),
    RGBColor(0x1a, 0x7f, 0x37),
    RGBColor(0x1f, 0x6f, 0xeb),
    RGBColor(0xb3, 0x26, 0x1e),
    RGBColor(0xe5, 0x9a, 0x93),
    RGBColor(0x8a, 0x3f, 0xfc),
    RGBColor(0xd9, 0x73, 0x0d),
    RGBColor(0x00, 0x8b, 0x8b),
    RGBColor(0x1b, 0x1f, 0x24),
    RGBColor(0xbf, 0x39, 0x89),
    RGBColor(0x6f, 0x8e, 0x23),
];

/// One figure's metric: its title, its unit, and its value.
type Metric = (&'static str, &'static str, fn(&Cell) -> f64);

/// A figure per byte of payload, in nanoseconds.
fn per_byte(cell: &Cell, milliseconds: fn(&Figures) -> f64) -> f64 {
    milliseconds(&cell.figures) * 1e6 / cell.bytes.max(1) as f64
}

/// A figure per megabyte of payload.
fn per_megabyte(cell: &Cell, count: fn(&Figures) -> f64) -> f64 {
    count(&cell.figures) * 1e6 / cell.bytes.max(1) as f64
}

const METRICS: [Metric; 8] = [
    ("Bandwidth", "Mb/s", |cell| cell.figures.megabits),
    ("Host CPU", "ns per byte", |cell| per_byte(cell, |f| f.host_ms)),
    ("Host CPU over the kernel's", "ratio", |cell| cell.host_ratio),
    ("NIC CPU in rounds with work", "ns per byte", |cell| per_byte(cell, |f| f.nic_busy_ms)),
    ("Wake-ups of the host", "per MB", |cell| per_megabyte(cell, |f| f.events)),
    ("Messages to the NIC", "per MB", |cell| per_megabyte(cell, |f| f.messages)),
    ("Doorbells to the program", "per MB", |cell| per_megabyte(cell, |f| f.doorbells)),
    ("Packets", "per MB", |cell| per_megabyte(cell, |f| f.packets)),
];

/// Width and height of one plot.
const SIZE: (u32, u32) = (560, 360);

/// All metrics of one direction in one SVG document.
///
/// # Errors
/// If a plot cannot be drawn.
pub fn svg(report: &TtcpReport, direction: Direction) -> Result<String> {
    let cells: Vec<&Cell> = report.cells.iter().filter(|cell| cell.direction == direction).collect();
    let mut svg = String::new();
    {
        let rows = METRICS.len().div_ceil(2);
        let root = SVGBackend::with_string(&mut svg, (2 * SIZE.0, rows as u32 * SIZE.1)).into_drawing_area();
        root.fill(&WHITE).map_err(|error| anyhow!("drawing: {error}"))?;
        let crossover = report.crossover_handshake_bytes.filter(|_| direction == Direction::Transmit);
        for (area, metric) in root.split_evenly((rows, 2)).iter().zip(METRICS) {
            plot(area, metric, &cells, crossover)?;
        }
        root.present().map_err(|error| anyhow!("drawing: {error}"))?;
    }
    Ok(svg)
}

/// The least and the greatest of some values, for a logarithmic axis.
fn span(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values
        .filter(|value| *value > 0.0)
        .fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), value| (low.min(value), high.max(value)));
    if low < high { (low / 1.5, high * 1.5) } else { (0.5, 2.0) }
}

/// One metric. Ways without a value above zero are left out: the axis is logarithmic.
fn plot(area: &DrawingArea<SVGBackend<'_>, Shift>, metric: Metric, cells: &[&Cell], crossover: Option<f64>) -> Result<()> {
    let fail = |error: DrawingAreaErrorKind<std::io::Error>| anyhow!("drawing: {error}");
    let (title, unit, value) = metric;
    let (left, right) = span(cells.iter().map(|cell| cell.size as f64));
    let (low, high) = span(cells.iter().map(|cell| value(cell)));
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16))
        .margin(8)
        .margin_right(24)
        .x_label_area_size(36)
        .y_label_area_size(60)
        .build_cartesian_2d((left..right).log_scale().base(4.0), (low..high).log_scale())
        .map_err(fail)?;
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT).x_label_formatter(&|x| format!("{x:.0}")).y_label_formatter(&|y| tick(*y));
    mesh.x_desc("message size, bytes").y_desc(unit).draw().map_err(fail)?;
    if let Some(bytes) = crossover {
        let style = BLACK.mix(0.4).stroke_width(1);
        chart.draw_series(LineSeries::new([(bytes, low), (bytes, high)], style)).map_err(fail)?;
        let text = Text::new(format!("crossover {bytes:.0} B"), (bytes * 1.1, high / 1.1), ("sans-serif", 11));
        chart.draw_series([text]).map_err(fail)?;
    }
    for (way, colour) in WAYS.iter().zip(COLOURS) {
        let of = cells.iter().filter(|cell| cell.way == way.name);
        let points: Vec<(f64, f64)> = of.map(|cell| (cell.size as f64, value(cell))).filter(|point| point.1 > 0.0).collect();
        if points.is_empty() {
            continue;
        }
        let line = LineSeries::new(points.clone(), colour.stroke_width(2));
        chart
            .draw_series(line)
            .map_err(fail)?
            .label(way.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        chart.draw_series(points.into_iter().map(|point| Circle::new(point, 3, colour.filled()))).map_err(fail)?;
    }
    let mut labels = chart.configure_series_labels();
    // Where the curves are not: these two rise.
    let rises = ["Bandwidth", "Host CPU over the kernel's"].contains(&title);
    let corner = if rises { SeriesLabelPosition::LowerRight } else { SeriesLabelPosition::LowerLeft };
    labels.position(corner).background_style(WHITE.mix(0.8)).border_style(BLACK.mix(0.3)).draw().map_err(fail)
}
