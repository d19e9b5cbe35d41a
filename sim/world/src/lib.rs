//! The whole machine in virtual time: hosts with a model of the kernel's sockets, the NIC's real datapath, the real
//! machine of moves performed by a modelled agent, the real records and their replay, programs, links and faults; and
//! what must hold of all of it.
//!
//! A run is a function of its seed. There is no I/O, and the only clock is the world's, in microseconds.
#![forbid(unsafe_code)]

mod agent;
mod block;
mod client;
mod exhaustive;
mod fault;
mod fork;
mod heap;
mod icmp;
mod journal;
mod keeper;
mod kernel;
mod machine;
mod network;
mod nic;
mod port;
mod program;
mod scenario;
mod seeds;
mod stop;
mod trace;
mod watch;
mod world;

use scenario::Scenario;
use std::panic::{AssertUnwindSafe, catch_unwind};
use world::World;

pub use exhaustive::{Crash, Planned, TRAFFIC, Traffic, Walk, Walked, exhaustive, run_walk};
pub use seeds::{Summary, run_seeds};
pub use world::Counts;

/// What has come of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// What did not hold, if anything.
    pub failure: Option<String>,
    /// What the run has done.
    pub counts: Counts,
    /// Numbers of the actions of the first host's agents after which a move was concluded.
    pub concluded: Vec<u64>,
    /// Points before and after the frames that the first host's NICs have sent since the first move began.
    pub frames_of_nic: u64,
    /// A hash over everything that happened: the same on every machine.
    pub hash: u64,
    /// Everything that happened, if it was asked for.
    pub lines: Vec<String>,
}

/// Runs the scenario of a seed. `readable`: with an account of what happened.
pub fn run(seed: u64, readable: bool) -> Outcome {
    finish(World::new(Scenario::of(seed), readable), seed)
}

fn finish(mut world: World, seed: u64) -> Outcome {
    // An assertion of the product's or of a model's is a failure of the run.
    let ran = catch_unwind(AssertUnwindSafe(|| world.run()));
    let failure = match ran {
        Ok(()) => world.failure.take(),
        Err(payload) => Some(nic::message(&*payload)),
    };
    let (concluded, frames_of_nic) = world.walked();
    Outcome {
        seed,
        failure,
        counts: world.counts,
        concluded,
        frames_of_nic,
        hash: world.trace.hash(),
        lines: world.trace.into_lines(),
    }
}
