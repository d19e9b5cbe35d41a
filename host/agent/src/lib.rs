//! The agent: decides and moves connections, supervises the NIC.

#![forbid(unsafe_code)]

mod adoption;
mod agent;
mod attached;
mod back;
mod cgroups;
mod changes;
mod connection;
mod flips;
mod forth;
mod ground;
mod group;
mod journal;
mod kept;
mod nic;
mod recovery;
mod session;
mod settings;
mod step;

pub use agent::{STEERING, run};
pub use kept::Kept;
pub use settings::AgentSettings;
pub use step::{Crash, Step};
