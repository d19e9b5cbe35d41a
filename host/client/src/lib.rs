//! A program's side of the interface: it uses a connection the same way wherever the connection is.
//!
//! A [`Session`] belongs to one thread. It adopts connections that the program has accepted or connected, and the agent
//! moves them, on request or by itself; sending, receiving and waiting work the same wherever they are. The program
//! needs no privilege.
//!
//! Below it is [`Shared`], for any number of threads, which leaves the kernel's part of every operation to its caller.
#![forbid(unsafe_code)]

mod buffer;
mod connection;
mod datagrams;
pub mod discovery;
mod ending;
pub mod heap;
mod inherited;
mod kernel_hold;
pub mod messages;
pub mod preload;
mod ring_memory;
pub mod rules;
mod sent;
mod session;
mod shared;
pub mod tool;

pub use baton_shm::{address_space, guarded, keep_unlocked};
pub use buffer::{Buffer, Filled};
pub use connection::{Connection, Entered, Readiness};
pub use datagrams::Datagrams;
pub use inherited::Child;
pub use kernel_hold::{KernelHold, is_in_kernel};
pub use session::{ConnectionId, Session};
pub use shared::{
    DESCRIPTORS, LIMIT, Listener, PORT_LIMIT, Received, Shared, catch_up_for_others, give_back_each, limits_queue, note_hot_from,
};

/// The agent's socket, unless BATON_SOCKET names another.
pub const DEFAULT_SOCKET: &str = "/run/baton/agent.sock";

/// The path of the agent's socket: BATON_SOCKET, or [`DEFAULT_SOCKET`].
pub fn agent_socket() -> std::path::PathBuf {
    named_socket().unwrap_or_else(|| DEFAULT_SOCKET.into())
}

/// The path that BATON_SOCKET names.
pub fn named_socket() -> Option<std::path::PathBuf> {
    baton_linux::process::variable("BATON_SOCKET").map(Into::into)
}
