//! The agent: decides where connections run, moves them, and supervises the NIC.

#![forbid(unsafe_code)]

mod addresses;
mod adoption;
mod agent;
mod answers;
mod attached;
mod calls;
mod cgroups;
mod changes;
mod chaos;
mod closing;
mod complaints;
mod connecting;
mod connection;
mod connections;
mod datagrams;
mod dealing;
mod devices;
mod ending;
mod flips;
mod ground;
mod group;
mod guards;
mod host_tcp;
mod identity;
mod idle;
mod journal;
mod known;
mod listened;
mod listening;
mod looks;
mod memory;
mod moves;
mod nic;
mod nic_requests;
mod owned;
mod perform;
mod record;
mod recovery;
mod released;
mod session;
mod settings;
mod silence;
mod slab;
mod texts;
mod tracker;
mod users;
mod watch;
mod way;

pub use agent::{STEERING, run};
pub use baton_moves::Step;
pub use chaos::{Crash, Fault};
pub use settings::AgentSettings;
pub use users::Limits;
pub use watch::Sampler;
