//! The agent: decides and moves connections, supervises the NIC.

#![forbid(unsafe_code)]

mod agent;
mod back;
mod connection;
mod forth;
mod heap;
mod nic;
mod recovery;
mod session;
mod settings;
mod step;

pub use agent::run;
pub use settings::{AgentSettings, Descriptor};
pub use step::Step;
