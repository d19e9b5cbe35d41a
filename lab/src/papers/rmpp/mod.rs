//! The evaluation of "Experience in Offloading Protocol Processing to a Programmable NIC" (section 5), repeated: the
//! real protocol code on a model of the paper's machines, in virtual time.

mod cable;
mod hardware;
mod live;
mod machine;
mod programs;
mod report;

use crate::messages::check_mpi;
use crate::papers::Document;
use crate::papers::sabotage::Sabotage;

pub use hardware::{Hardware, JUMBO, STANDARD};
pub use programs::{Availability, Latency, MB, Step, availability, ping_pong};

/// The document.
pub const DOCUMENT: Document = Document {
    word: "rmpp",
    figures: 12,
    tables: 0,
    quick: report::run,
    live: live::run,
    needs: Some(check_mpi),
    sabotages: &[Sabotage::NoCtsBatch],
};
