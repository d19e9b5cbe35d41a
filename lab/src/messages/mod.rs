//! Messages (RMPP) without MPI: a program on host A, whose data half is in the program, in part on the NIC, or wholly there, and
//! a peer on host B that always has both halves in its own process. The figures are host A's.

mod availability;
mod bed;
mod bench;
mod pingpong;
mod soak;

pub use availability::{Availability, availability};
pub use bed::{Conditions, Offload};
pub use bench::{BenchReport, bench};
pub use pingpong::{PingPong, ping_pong};
pub use soak::{SoakReport, SoakSettings, soak};
