//! Active acknowledgements (Li, Chen and Su, "Implementation of TCP Large Receive Offload on Multi-core NPU Platform", section V.C): data is
//! acknowledged when the NIC has it, so that its sender goes on while large receive still waits for more.
//!
//! The paper's NIC acknowledges what it may yet lose, with a window that nobody has granted. Here
//! - what is acknowledged lies in memory that survives the NIC until the kernel has acknowledged it itself; a kernel that did not take it is
//!   given it again, by the next NIC too ([`Store`]);
//! - nothing is acknowledged behind the right edge of a window that the kernel has advertised, scaled as the two ends agreed;
//! - what the kernel says goes on to the peer with the greater acknowledgement and the window's own edge, so that no window update, SACK
//!   block or ECE is lost, and none contradicts the acknowledgement;
//! - a timestamp value is the kernel's last, so that its next is not older.
//!
//! Connections whose handshake was seen take part, for plain data that comes in order: not FIN, not urgent data, nothing that is marked
//! "congestion experienced", whose echo is the kernel's business. No I/O, clock or randomness.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod active;
mod entry;
mod rewrite;
mod store;

pub use active::{Active, Counters};
pub use entry::Entry;
pub use store::{ENTRY_BYTES, RING, Store};
