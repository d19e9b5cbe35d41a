//! The evaluation of "Experience in Offloading Protocol Processing to a Programmable NIC" (section 5), repeated: the
//! real protocol code on a model of the paper's machines, in virtual time.

mod cable;
mod hardware;
mod machine;
mod plots;
mod programs;
mod report;

pub use hardware::{Hardware, JUMBO, Parameter, STANDARD};
pub use plots::html;
pub use programs::{Availability, Latency, MB, Step, availability, ping_pong};
pub use report::{Curve, Figure, RmppReport, run, table};
