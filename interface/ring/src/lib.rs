//! Single-producer single-consumer rings, and the sleep flags behind doorbells.
//!
//! Whoever is at the other side may write anything at any time: every index is bounded before it is used, and every value is
//! copied once and then checked.

#[cfg(not(loom))]
mod lock;
mod ring;
mod sync;

#[cfg(not(loom))]
pub use lock::{Held, Lock, Token};
pub use ring::{Consumer, Full, Producer, count_sleeper, go_to_sleep, needs_doorbell, uncount_sleeper, wake_up};
