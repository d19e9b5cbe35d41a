//! Shared memory, single-producer single-consumer rings, and the sleep flags behind doorbells.
//!
//! The process at the other side may write anything at any time. So every index is bounded before it is used, and every value is
//! copied once and then checked.

#[cfg(not(loom))]
mod lock;
#[cfg(not(loom))]
mod region;
mod ring;
mod sync;

#[cfg(not(loom))]
pub use lock::{Lock, LockGuard, Token};
#[cfg(not(loom))]
pub use region::{Circle, MovableCircle, MovableWords, OutOfRegion, Region, RingWords, WordArray, node_mask};
pub use ring::{Consumer, Full, Producer, count_sleeper, go_to_sleep, needs_doorbell, uncount_sleeper, wake_up};
