//! Messages (RMPP). Without MPI: a program on host A, whose data half is in the program, in part on the NIC, or wholly
//! there, and a peer on host B that always has both halves in its own process. The figures are host A's. With MPI
//! (`mpi.rs`): a program over the libfabric provider, against TCP.

mod availability;
mod bed;
mod bench;
mod mpi;
mod pingpong;
mod soak;

pub use availability::{Availability, availability};
pub use bed::{Conditions, Offload};
pub use bench::{BenchReport, bench};
pub use mpi::{Carrier, MpiCell};
pub(crate) use mpi::{Load, MpiHosts, check as check_mpi};
pub use pingpong::{PingPong, ping_pong};
pub use soak::{SoakReport, SoakSettings, soak};
