//! Memory shared between processes. The process at the other side may write anything at any time, so every value is
//! copied once and then checked.

pub mod address_space;
mod copy;
pub mod guarded;
mod lines;
mod pieces;
mod pool;
mod pulse;
mod region;
mod thin;
mod wide;

pub use lines::{advise_huge, prefetch};
pub use pieces::keep_unlocked;
pub use pool::{Pool, Pooled, Shared};
pub use pulse::{Pulse, Reading};
pub use region::{Circle, MovableCircle, MovableParts, OutOfRegion, Region, RingWords, WordArray, node_mask};
pub use thin::ThinBytes;
pub use wide::Wide;
