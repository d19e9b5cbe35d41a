//! Every message between programs, agent, keeper and NIC, each once. Messages are encoded with postcard, which does not
//! say what it encodes: so each control connection begins with a version.
#![forbid(unsafe_code)]

pub mod address;
pub mod events;
pub mod filter;
pub mod keeper;
pub mod native;
pub mod nic;
pub mod program;
pub mod report;

/// Version of the messages between keeper, agent and NIC, and of the layout of NIC memory and session memory. Each is
/// started from the file that its starter runs (`baton_linux::starter::own_command`), whatever has taken that file's
/// place since, so they differ only if somebody starts one by hand. An agent takes the sessions of the last one over,
/// whose memory is as that has made it.
pub const VERSION: u32 = 12;
