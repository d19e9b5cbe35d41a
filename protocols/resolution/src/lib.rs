//! The NIC's own addresses on a link: they are probed for before they are used, announced, answered for, and defended
//! (ARP: RFC 826 and RFC 5227; neighbour discovery: RFC 4861 and RFC 4862).
//!
//! Without I/O, clock or randomness: the caller passes frames, times in microseconds and a seed. The work for a frame
//! is bounded, and so is the number of answers in a second.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod limit;
mod resolver;
mod timing;

pub use limit::{MOST_ANSWERS, SOURCES};
pub use resolver::{Counters, MOST_ADDRESSES, Own, Received, Resolver, Speaker, State};
pub use timing::Timing;
