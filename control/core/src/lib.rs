//! What the agent decides, without I/O, clock or randomness: times are arguments, in microseconds of a clock that does
//! not run back. The agent performs it on sockets, memory and NICs; the simulator runs the same code on its models.
//!
//! A connection's move is a machine of its own (`baton-moves`). This crate decides about all connections together, and
//! what happens before and after a move:
//!
//! | | |
//! |---|---|
//! | in which order moves continue, and which timers are due | [`UnderWay`], [`Suggestions`], [`Timers`] |
//! | what follows the end of a move; moves without a request | [`follow`](fn@follow), [`unasked`] |
//! | what is done with a connection that is needed in the kernel | [`settle`](fn@settle) |
//! | events of a NIC; whether it hangs; the steps after its death | [`Notice`], [`Watch`], [`Recovery`] |
//! | how the next agent continues the last one's connections | [`Adopted`] |
//! | which connection gets which slot of a NIC; limits for each user | [`FreeSlots`], [`Gate`], [`Placement`],
//! [`Users`] |
//! | pauses and limits of waiting | [`Pause`], [`Refused`], [`Share`] |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod adoption;
mod dealing;
mod follow;
mod notice;
mod pauses;
mod placement;
mod recovery;
mod settle;
mod share;
mod slots;
mod stage;
mod suggestions;
mod timers;
mod under_way;
mod users;
mod watch;

pub use adoption::Adopted;
pub use dealing::Dealing;
pub use follow::{LATER, Next, Standing, Unasked, cannot_go, follow, unasked};
pub use notice::{ELSEWHERE, Notice};
pub use pauses::{Pause, Refused};
pub use placement::{Gate, Placement, Scene, wait_for_one};
pub use recovery::Recovery;
pub use settle::{ATTEMPTS, Settle, settle};
pub use share::Share;
pub use slots::FreeSlots;
pub use stage::Stage;
pub use suggestions::Suggestions;
pub use timers::Timers;
pub use under_way::{LOOK, UnderWay};
pub use users::{Limits, Taken, Users};
pub use watch::{PACE, Watch};

/// Identifies a connection: session, number, and serial number, since session and number are reused.
pub type Key = (u32, u32, u64);
