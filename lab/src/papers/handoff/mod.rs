//! The evaluation of "TCP offload through connection handoff" (sections 2 and 5), repeated on a model of the paper's
//! machines: the real TCP and the real NIC say what happens when, the model which layer touches whose state then.

mod agenda;
mod cache;
mod counted;
mod firmware;
mod host;
mod live;
mod memory;
mod microbenchmark;
mod nic;
mod numbers;
mod prototype;
mod report;
mod simulated;
mod timers;
mod web;

use crate::papers::Document;
use crate::papers::sabotage::Sabotage;

pub use counted::workload;

/// The document.
pub const DOCUMENT: Document = Document {
    word: "handoff",
    figures: 9,
    tables: 2,
    quick: report::run,
    live: live::run,
    needs: None,
    sabotages: &[Sabotage::LargeState, Sabotage::LookupMisses],
};
