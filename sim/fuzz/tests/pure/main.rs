//! What needs no kernel, under random scripts. Each file says what a step of its fuzzer is.

mod active_ack;
#[path = "../../../../offloads/ack/tests/common/memory.rs"]
mod active_ack_memory;
mod end;
mod filter;
mod lro;
mod rmpp;
#[path = "../../../tests/rmpp/schedule.rs"]
mod schedule;
mod tcp_pair;
mod tcp_peer;
#[path = "../../../tests/rmpp/worlds.rs"]
#[allow(dead_code, reason = "one fuzzer uses a part")]
mod worlds;

/// The fuzzer of a name, with its corpus.
macro_rules! fuzzer {
    ($name:literal) => {
        baton_fuzz::Fuzzer { name: $name, corpus: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/", $name, ".txt")) }
    };
}
pub(crate) use fuzzer;
