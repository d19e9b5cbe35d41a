//! The agent: decides and moves connections, supervises the NIC.

#![forbid(unsafe_code)]

mod adoption;
mod agent;
mod attached;
mod back;
mod cgroups;
mod changes;
mod connection;
mod connections;
mod devices;
mod ending;
mod flips;
mod forth;
mod ground;
mod group;
mod grow;
mod guards;
mod journal;
mod looks;
mod memory;
mod moves;
mod nic;
mod recovery;
mod session;
mod settings;
mod slab;
mod step;
mod texts;
mod users;
mod way;

pub use agent::{STEERING, run};
pub use settings::AgentSettings;
pub use step::{Crash, Step};
pub use users::Limits;
