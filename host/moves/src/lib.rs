//! A move of a connection between the kernel and the NIC, as a pure machine: a [`Step`] and an [`Event`] give the next
//! [`Action`].
//!
//! A connection is always at one [`Step`]. A move is a walk over the steps towards a [`Goal`]: an *offload* leads from
//! [`Step::Kernel`] to [`Step::Nic`], a *restore* back. A refusal turns the walk around, so each step has its inverse.
//! The death of the NIC or of the agent puts the connection at a defined step, from which the same walk leads to the
//! kernel.
//!
//! A move never waits for the NIC: a command goes out, its answer is an [`Event`], and so is that there was none in
//! time.
//!
//! Whoever performs the actions (the agent, the simulator, the model in the tests) implements [`World`]. There is no
//! I/O and no clock here: times are arguments, in microseconds.
//!
//! ```text
//! offload   Kernel ─ Reserved ─ Mirrored ─ Covered ─ Quiescing ─ Quiesced ─ Stolen ─ Reading ─ Read ─ Copied ─
//!           Recorded ─ Purged ─ HandedOff ─ Nic
//! restore   Nic ─ Leaving ─ Left ─ Rested ─ Imported ─ Sending ─ Released ─ Back ─ Cleared ─ Freed ─ Kernel
//! growth    Nic ─ Leaving ─ Left ─ Rested ─ Grown ─ HandedOff ─ Nic
//! recovery  Orphaned ─ Barred ─ Retaken ─ Vacated ─ Restored ─ Sending ─ Released ─ Back ─ Cleared ─ Freed ─ Kernel
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod action;
mod backoff;
mod inbox;
mod machine;
mod refusal;
mod room;
mod step;

pub use action::{Action, Conclusion, Outcome, Source, World};
pub use backoff::Backoff;
pub use inbox::{Arrived, Inbox};
pub use machine::{ANSWER_LIMIT, Barrier, Event, GROW_LIMIT, Goal, Move, QUIESCE_LIMIT, QUIET};
pub use refusal::Refusal;
pub use room::Room;
pub use step::{Custody, Death, Fate, Phase, Step};
