//! Single-producer single-consumer rings, and the sleep flags behind doorbells.
//!
//! The process at the other end may write anything at any time. So every index is bounded before it is used, and every
//! value is copied once and then checked.

#[cfg(not(loom))]
mod lock;
mod ring;
mod sync;

#[cfg(not(loom))]
pub use lock::{Lock, LockGuard, MOST_TOKEN, Token, give_way};
pub use ring::{
    Consumer, Full, Producer, clear_rung, count_sleeper, go_to_sleep, has_sleeper, must_ring, needs_doorbell, note_rung,
    seems_asleep, uncount_sleeper, wake_up, wants_ring, was_rung,
};
