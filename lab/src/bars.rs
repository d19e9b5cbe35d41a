//! Figures that have a bound to keep.

use serde::Serialize;

/// A figure that has to hold.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Bar {
    /// Its name.
    pub name: &'static str,
    /// As measured.
    pub value: f64,
    /// The least or most that it may be.
    pub bound: f64,
    /// Whether it holds.
    pub holds: bool,
}

impl Bar {
    /// One that may be this much at most.
    pub fn most(name: &'static str, bound: f64, value: f64) -> Bar {
        Bar { name, value, bound, holds: value <= bound }
    }

    /// One that has to be this much at least.
    pub fn least(name: &'static str, bound: f64, value: f64) -> Bar {
        Bar { name, value, bound, holds: value >= bound }
    }
}
