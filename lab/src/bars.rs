//! Bars: figures that must keep a bound.

use serde::Serialize;

/// A figure and its bound.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Bar {
    /// Its name.
    pub name: &'static str,
    /// As measured.
    pub value: f64,
    /// The least or greatest allowed value.
    pub bound: f64,
    /// Whether the value keeps the bound.
    pub holds: bool,
}

impl Bar {
    /// A figure that may be at most `bound`.
    pub fn most(name: &'static str, bound: f64, value: f64) -> Bar {
        Bar { name, value, bound, holds: value <= bound }
    }

    /// A ratio that must be 1 but for `tolerance`, above or below. Its bound is the one on its side of 1.
    pub fn near_one(name: &'static str, tolerance: f64, value: f64) -> Bar {
        let bound = if value > 1.0 { 1.0 + tolerance } else { 1.0 - tolerance };
        Bar { name, value, bound, holds: (value - 1.0).abs() <= tolerance }
    }

    /// A figure that must be at least `bound`.
    pub fn least(name: &'static str, bound: f64, value: f64) -> Bar {
        Bar { name, value, bound, holds: value >= bound }
    }
}
