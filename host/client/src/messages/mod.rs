//! Messages (RMPP). An [`Endpoint`] has the policy half. The data half is in two parts, sending and receiving: each is
//! either in this process, over a UDP socket, or on the NIC, through a session for messages.
//!
//! | file | what |
//! |---|---|
//! | `endpoint.rs` | the policy half, and the passing of commands and events |
//! | `carrier.rs` | its socket: UDP or raw Ethernet |
//! | `local.rs` | the data half, or a part of it, in this process |
//! | `link.rs` | the session: rings, another NIC after one has died, hosts that can be reached |
//! | `counted.rs` | memory that counts what this process copies |

mod carrier;
mod counted;
mod endpoint;
mod link;
mod local;

pub use carrier::Carrier;
pub use endpoint::{Endpoint, Settings, Usage, request};
pub use link::Link;
pub use local::Local;
