//! Figures as SVG. Colours are those of [`COLOURS`], [`INK`] and [`GRID`]; the page's style gives each of them a second
//! value for dark screens.

use super::report::{Curve, Figure, Shape};
use anyhow::{Result, anyhow};
use baton_bed::axis::tick;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;
use std::ops::Range;

/// A colour for each curve in turn: on light screens, on dark ones.
pub const COLOURS: [(RGBColor, &str); 8] = [
    (RGBColor(0x6e, 0x77, 0x81), "#9AA4B0"),
    (RGBColor(0x1f, 0x6f, 0xeb), "#6CA8FF"),
    (RGBColor(0x1a, 0x7f, 0x37), "#57C873"),
    (RGBColor(0xb3, 0x26, 0x1e), "#FF8A80"),
    (RGBColor(0x8a, 0x3f, 0xfc), "#BF95FF"),
    (RGBColor(0xc4, 0x65, 0x08), "#F2A65A"),
    (RGBColor(0x00, 0x7f, 0x7f), "#4FC9C9"),
    (RGBColor(0xbf, 0x39, 0x89), "#F58CC6"),
];
/// Axes and text.
pub const INK: (RGBColor, &str) = (RGBColor(0x1b, 0x1f, 0x24), "#E6EDF3");
/// The grid.
pub const GRID: (RGBColor, &str) = (RGBColor(0xd0, 0xd7, 0xde), "#30363D");

/// Width and height: a phone's width, so that the text keeps its size there.
pub const SIZE: (u32, u32) = (400, 290);

/// A colour as an attribute of SVG has it.
pub fn hexadecimal(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

fn fail<E: std::error::Error + Send + Sync>(error: DrawingAreaErrorKind<E>) -> anyhow::Error {
    anyhow!("drawing: {error}")
}

fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.filter(|value| value.is_finite()).fold((f64::INFINITY, 0.0), |(low, high), value| (low.min(value), high.max(value)))
}

/// All y of a figure: the model's, the paper's and the live ones.
fn heights(figure: &Figure) -> impl Iterator<Item = f64> + '_ {
    figure.curves.iter().flat_map(|curve| {
        let points = curve.points.iter().chain(&curve.paper).chain(&curve.live).map(|point| point.1);
        points.chain(curve.level)
    })
}

/// Draws the axes, and each curve: the model's as a line, the live one as dots, the paper's as crosses, one at the
/// right edge for a level.
fn lines<X, Y>(root: &Canvas<'_>, figure: &Figure, x: X, y: Y, right: f64) -> Result<()>
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut chart = ChartBuilder::on(root)
        .margin(6)
        // Half of the last label of the x axis lies behind the plot.
        .margin_right(24)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(x, y)
        .map_err(fail)?;
    let text = ("sans-serif", 12).into_font().color(&INK.0);
    let mut mesh = chart.configure_mesh();
    mesh.axis_style(INK.0).bold_line_style(GRID.0).light_line_style(TRANSPARENT).label_style(text.clone()).axis_desc_style(text);
    mesh.x_labels(5).y_labels(6).x_label_formatter(&|x| tick(*x)).y_label_formatter(&|y| tick(*y));
    mesh.x_desc(figure.x).y_desc(figure.y).draw().map_err(fail)?;
    for (curve, (colour, _)) in figure.curves.iter().zip(COLOURS.iter().cycle()) {
        let finite = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
            points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
        };
        chart.draw_series(LineSeries::new(finite(&curve.points), colour.stroke_width(2))).map_err(fail)?;
        chart.draw_series(finite(&curve.live).into_iter().map(|point| Circle::new(point, 3, colour.filled()))).map_err(fail)?;
        let level = curve.level.map(|level| (right, level));
        let crosses = finite(&curve.paper).into_iter().chain(level);
        chart.draw_series(crosses.map(|point| Cross::new(point, 5, colour.stroke_width(2)))).map_err(fail)?;
    }
    Ok(())
}

type Canvas<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// Whether names fit below as many stacks, in the plot's letters of about six points each.
fn fit(names: &[String]) -> bool {
    let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    names.len() * (6 * longest + 6) <= SIZE.0 as usize - 62
}

/// What the numbers below stacks stand for; None if there are names.
pub fn numbered(figure: &Figure) -> Option<String> {
    let Shape::Stacks(names) = &figure.shape else { return None };
    let list = names.iter().enumerate().map(|(at, name)| format!("{}: {name}", at + 1)).collect::<Vec<_>>();
    (!fit(names)).then(|| list.join("; "))
}

/// Draws a stack of bars for each name, with the name below, or its number where names are too long.
fn stacks(root: &Canvas<'_>, figure: &Figure, names: &[String]) -> Result<()> {
    let height = |at: usize, curves: &[Curve]| -> f64 {
        let of = curves.iter().flat_map(|curve| &curve.points).filter(|point| point.0 as usize == at);
        of.map(|point| point.1).sum()
    };
    let top = (0..names.len()).map(|at| height(at, &figure.curves)).fold(f64::MIN_POSITIVE, f64::max) * 1.05;
    let mut chart = ChartBuilder::on(root)
        .margin(6)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(-0.5..names.len() as f64 - 0.5, 0.0..top)
        .map_err(fail)?;
    let text = ("sans-serif", 12).into_font().color(&INK.0);
    let fit = fit(names);
    let label = |x: &f64| {
        let at = x.round() as usize;
        let name = names.get(at).filter(|_| (x - x.round()).abs() < 0.01);
        name.map(|name| if fit { name.clone() } else { (at + 1).to_string() }).unwrap_or_default()
    };
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh().axis_style(INK.0).bold_line_style(GRID.0).light_line_style(TRANSPARENT);
    mesh.label_style(text.clone()).axis_desc_style(text).x_labels(2 * names.len() + 1).y_labels(6).x_label_formatter(&label);
    mesh.y_label_formatter(&|y| tick(*y)).x_desc(figure.x).y_desc(figure.y).draw().map_err(fail)?;
    for (number, (curve, (colour, _))) in figure.curves.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let bars = curve.points.iter().map(|(x, y)| {
            let below = height(*x as usize, &figure.curves[..number]);
            Rectangle::new([(x - 0.35, below), (x + 0.35, below + y)], colour.filled())
        });
        chart.draw_series(bars).map_err(fail)?;
    }
    Ok(())
}

/// A figure as SVG, without its title and key.
///
/// # Errors
/// If it cannot be drawn.
pub fn svg(figure: &Figure) -> Result<String> {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        let points = || figure.curves.iter().flat_map(|curve| curve.points.iter().chain(&curve.live));
        let (left, right) = bounds(points().map(|point| point.0));
        let (low, high) = bounds(heights(figure).filter(|y| *y > 0.0));
        let top: Range<f64> = 0.0..(high * 1.1).max(f64::MIN_POSITIVE);
        // A logarithmic axis has no zero, and a range has two ends.
        let wide = left.max(f64::MIN_POSITIVE)..(right * 1.05).max(left * 2.0);
        match &figure.shape {
            Shape::Lines => lines(&root, figure, left.min(right)..right.max(left + 1.0), top, right)?,
            Shape::LogLines => lines(&root, figure, wide.log_scale(), top, right)?,
            Shape::LogLogLines => lines(&root, figure, wide.log_scale(), (low / 1.3..high * 1.3).log_scale(), right)?,
            Shape::Stacks(names) => stacks(&root, figure, names)?,
        }
        root.present().map_err(fail)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_do_not_fit_are_numbers() {
        let figure = |names: &[&str]| {
            let points = (0..names.len()).map(|at| (at as f64, 1.0)).collect();
            let curves = vec![Curve { name: "TCP".into(), points, ..Curve::default() }];
            Figure { shape: Shape::Stacks(names.iter().map(|name| (*name).to_string()).collect()), curves, ..Figure::default() }
        };
        let short = figure(&["A", "B", "C"]);
        assert_eq!(numbered(&short), None);
        assert!(svg(&short).expect("a plot").contains("\nB\n"));
        let long = figure(&["OS 256 // NIC 256"; 6]);
        assert!(numbered(&long).expect("a list").starts_with("1: OS 256 // NIC 256; 2: "));
        assert!(!svg(&long).expect("a plot").contains("OS 256"));
    }
}
