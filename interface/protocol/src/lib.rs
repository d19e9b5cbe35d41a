//! All messages between programs, agent, keeper and NIC. They are encoded with postcard, whose encoding does not
//! describe itself: so each control connection begins with a version.
#![forbid(unsafe_code)]

pub mod address;
pub mod events;
pub mod filter;
pub mod keeper;
pub mod native;
pub mod nic;
pub mod program;
pub mod report;

/// Version of the messages between keeper, agent and NIC, and of the layout of NIC memory and session memory. Each
/// process is started from the file that its starter runs (`baton_linux::starter::own_command`), even if that file was
/// replaced since, so versions differ only if a process is started by hand. An agent takes over the sessions of the
/// last one, with the memory layout of that agent.
pub const VERSION: u32 = 12;
