//! RMPP, the Reliable Message Passing Protocol, without I/O, clock or randomness: "Experience in Offloading Protocol
//! Processing to a Programmable NIC" (Maccabe et al. 2002).
//!
//! It comes in two halves, as the paper divides it (sections 3 and 4.1):
//!
//! - [`Policy`] decides: which receive a message belongs to, how much of it is cleared, what is sent again, when a peer
//!   is dead. It handles RTS, END, ACK and CLEANUP, and answers each request to send more (RSM).
//! - [`Data`] carries out: it cuts messages into packets, answers CTS with data, checks CRCs, places data where it
//!   belongs, and reports requests and gaps.
//!
//! They talk by [`Command`]s and [`Event`]s of a fixed size, through a queue in one process or a ring between host and
//! NIC. A [`Data`] has the receiving half, the sending half, or both ([`Halves`]); so the paper's steps are settings:
//!
//! | step | on the host | on the NIC |
//! |---|---|---|
//! | 0 | `Policy`, `Data` with both halves | – |
//! | 1 | `Policy`, `Data` with the sending half | `Data` with the receiving half |
//! | 2 | `Policy` | `Data` with both halves |
//! | 3 | as 2, with [`Config::early`] > 0 | as 2 |
//!
//! Times are microseconds since an origin of the caller's choice. Data that is sent and received lies in the caller's
//! memory ([`Memory`]) and is named by its offset. Handling a packet allocates no memory.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod counters;
pub mod data;
pub mod handle;
pub mod interface;
mod memory;
pub mod policy;
mod queue;

pub use counters::{Counters, Drop};
pub use data::{Data, DataConfig, Disposition, Halves, Intake, MatchConfig, Outflow, Run, StreamConfig, StreamId, StreamOrder};
pub use interface::{Arrived, Command, Event, Half, Matcher};
pub use memory::{Memory, Region};
pub use policy::{
    Completion, Config, Delivered, Error, Limit, MAX_AHEAD, Outgoing, PeerId, Policy, Probed, ReceiveId, Request, SetupError,
    Side,
};

/// Most messages between two endpoints that the receiver has not acknowledged: messages with higher numbers wait at the
/// sender, and the receiver refuses them. This bounds how much a receiver keeps for one peer.
pub const WINDOW: u32 = 64;

/// Whether number `a` comes before `b`, modulo 2³².
pub(crate) const fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}
