//! Messages between programs over RMPP, all of it in the program's own process (step 0 of the paper): the policy half, the data
//! half, an ordinary UDP socket, and a thread that keeps them going while the program computes. It needs no NIC and no privilege.
//!
//! | file | what |
//! |---|---|
//! | `endpoint.rs` | sends, receives, probes; the program's operations and their completions |
//! | `local.rs` | the data half and its socket: what a ring to the NIC takes the place of in steps 1 to 3 |
//! | `arena.rs` | the memory that messages are sent from and received into |
//! | `multiple.rs` | buffers that receive one message after the other |
//! | `spill.rs` | unexpected messages, when many wait |
//! | `rma.rs` | reads and writes of another program's memory, made of messages |
//! | `driver.rs` | an endpoint shared by threads, and the thread that drives it |
#![forbid(unsafe_code)]

mod arena;
mod driver;
mod endpoint;
mod local;
mod multiple;
mod rma;
mod settings;
mod spill;

pub use arena::{Buffer, MAX_LENGTH};
pub use baton_rmpp::{Delivered, Error, Limit, PeerId};
pub use driver::{Driven, Driver};
pub use endpoint::{Channel, Claim, Completion, Endpoint, Found, Incoming, Kind, Outgoing, Payload, Selector, Token};
pub use rma::{Access, Regions, Remote, Transfer};
pub use settings::Settings;
