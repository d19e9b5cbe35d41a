//! The NIC's TCP: one connection with segments made by hand, two endpoints in virtual time, and beside another TCP.

mod answers;
mod held;
mod idle;
mod long_path;
mod moves;
mod opening;
mod persist;
mod small_buffers;
mod two_endpoints;
mod with_smoltcp;
