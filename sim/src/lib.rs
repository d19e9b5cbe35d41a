//! A world of two endpoints with a clock and a seed. No I/O.
#![forbid(unsafe_code)]

pub mod frames;
pub mod pair;
pub mod rmpp;
pub mod rmpp_streams;
pub mod stream;

pub use baton_netem::{Impairments, Link, Rng, link};
