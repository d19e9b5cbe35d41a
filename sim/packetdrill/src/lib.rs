//! The NIC's TCP behind packetdrill's C interface (`--so_filename`): a socket layer over `protocols/tcp` in virtual
//! time.
//!
//! A script's packets come in through [`Interface::netdev_send`] and its answers are asked for with
//! [`Interface::netdev_receive`]; its system calls come as the other functions. The clock is the adapter's: it moves
//! when packetdrill sleeps, waits for a packet or asks for the time, so that a script takes no longer than its work and
//! always gives the same result.
//!
//! `--so_flags=move=N` ends the connection in an image and makes it anew from that before every N-th event.

mod addresses;
mod call;
mod epoll;
mod errors;
mod fastopen;
mod interface;
mod listen;
mod moves;
mod options;
mod packet;
mod poll;
mod preload;
mod receive;
mod send;
mod settings;
mod socket;
mod stream;
mod world;

pub use interface::{Interface, packetdrill_interface_init};
