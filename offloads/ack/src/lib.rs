//! Active acknowledgements (Li, Chen and Su, "Implementation of TCP Large Receive Offload on Multi-core NPU Platform",
//! section V.C): the NIC acknowledges data of the kernel's connections as soon as it has received it, so that the
//! sender goes on while large receive still waits for more.
//!
//! The paper's NIC acknowledges data that it may still lose, and advertises a window that no receiver has granted. Here
//! - acknowledged data stays in memory that survives the NIC until the kernel has acknowledged it itself; to a kernel
//!   that did not take it, it is delivered again, also by the next NIC ([`Store`]);
//! - nothing is acknowledged beyond the right edge of a window that the kernel has advertised, scaled as the two ends
//!   agreed;
//! - the kernel's segments go on to the peer with the greater acknowledgement and with the right edge of their window
//!   unchanged, so that no window update, SACK block or ECE is lost, and none contradicts the acknowledgement;
//! - the NIC's acknowledgements carry the kernel's last timestamp value, so that its next one is not older.
//!
//! Connections whose handshake was seen take part once the kernel has sent something after it, with plain data that
//! arrives in order: no FIN, no urgent data, no packet marked "congestion experienced", which the kernel has to echo,
//! no options but timestamps and SACK. Segments that the kernel will not accept change nothing ([`AckEntry`]). No I/O,
//! clock or randomness.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod active;
mod entry;
mod rewrite;
mod store;

/// Whether sequence number, or timestamp, `a` comes before `b`.
fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

pub use active::{ActiveAck, Counters};
pub use entry::AckEntry;
pub use store::{ENTRY_BYTES, RING, Store};
