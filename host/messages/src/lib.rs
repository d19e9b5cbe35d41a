//! Messages between programs over RMPP: the policy half, the data half, an ordinary UDP socket, and a thread that keeps
//! them going while the program computes. The data half is on the NIC if there is one (step 2 of the paper), or its
//! receiving half (step 1), else in the program's process, too (step 0). It needs no privilege.
//!
//! | file | what |
//! |---|---|
//! | `endpoint.rs` | sends, receives, probes; the program's operations and their completions |
//! | `opening.rs` | what an endpoint is made of, with a NIC and without |
//! | `half.rs` | the data half, here or on the NIC |
//! | `streams.rs` | TCP connections that carry the data of long messages |
//! | `arena.rs` | the memory that messages are sent from and received into |
//! | `staging.rs` | the part of it that the NIC reaches |
//! | `multiple.rs` | buffers that receive one message after the other |
//! | `spill.rs` | unexpected messages, when many wait |
//! | `rma.rs` | reads and writes of another program's memory, made of messages |
//! | `driver.rs` | an endpoint shared by threads, and the thread that drives it |
#![forbid(unsafe_code)]

mod arena;
mod driver;
mod endpoint;
mod half;
mod multiple;
mod opening;
mod rma;
mod settings;
mod spill;
mod staging;
mod streams;
#[cfg(test)]
mod testing;

pub use arena::{Buffer, MAX_LENGTH};
pub use baton_rmpp::{Delivered, Error, Limit, PeerId};
pub use driver::{Driven, Driver};
pub use endpoint::{Channel, Claim, Completion, Endpoint, Found, Incoming, Kind, Outgoing, Payload, Selector, Token};
pub use rma::{Access, Regions, Remote, Transfer};
pub use settings::{Halves, Lend, MAX_AHEAD, MAX_GRANT, Settings, Use};
