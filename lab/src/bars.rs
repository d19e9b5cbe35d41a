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

    /// A figure that must be at least `bound`.
    pub fn least(name: &'static str, bound: f64, value: f64) -> Bar {
        Bar { name, value, bound, holds: value >= bound }
    }
}
