//! What the keeper holds for the next agent: descriptors, under names.

use crate::address::OwnAddress;
use crate::program::{Flip, Opening, Until};
use baton_offloads::Offloads;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// The argument with which a keeper starts an agent.
pub const AGENT_ARGUMENT: &str = "agent-process";

/// The name that an agent gives its process (`/proc/PID/comm`, 15 bytes at most), by which tools find it. They do not
/// read command lines: that waits for the lock of the process's memory, which a process can hold as long as it likes.
pub const AGENT_NAME: &str = "baton-agent";

/// The name that a keeper gives its process, likewise.
pub const KEEPER_NAME: &str = "baton-keeper";

/// What an agent sends the keeper, and the keeper the next agent. Descriptors come along.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kept {
    /// From the agent, with the socket that it listens at: programs may come. From the keeper: that was all.
    Ready,
    /// From the keeper: the agent was stopped (SIGSTOP) and is resumed. What it watches may have been stopped with it.
    WasStopped,
    /// Either way: the end has been asked for. Connections go to the kernel and stay there until the keeper ends.
    Ending,
    /// A session: the control connection.
    Session(u32),
    /// Its memory, and the program's doorbell; of a session for messages its socket, of another one the doorbells of
    /// the NICs after the first; how it was opened.
    Memory(u32, Opening),
    /// A group of sessions, and its user; the file for its report, if there is one. It is made before its first session
    /// opens, and stays for a while when the last has ended: a program's next process may belong to it.
    Group(u64, u32, Option<Flip>),
    /// The group is no more.
    GroupEnded(u64),
    /// A connection of a session: session, number, and when it may be offloaded; its descriptor. It takes the place of
    /// what was held under the same number.
    Connection(u32, u32, Until),
    /// A connection of an attacher: session, number, its program's process, its socket's cookie, its addresses. It
    /// comes without a descriptor.
    Attached(u32, u32, u32, u64, SocketAddr, SocketAddr),
    /// The programs beside the kernel are at a device, by its index: their two links.
    Device(u32),
    /// There is no such device any more.
    DeviceGone(u32),
    /// What the NIC with this number does for the kernel's own connections, in place of what it did before.
    Offloads(usize, Box<Offloads>),
    /// A listener whose connections the NIC makes: its number, its sessions, what the agent has written down of it;
    /// both ends of its queue. It takes the place of what was held under the same number.
    Listener(u32, Vec<u32>, Vec<u8>),
    /// The listener is no more.
    ListenerGone(u32),
    /// An address of the NIC's that this host's kernel has, and the index of its device. With a descriptor that shows
    /// other Batons that it is no leftover.
    Address(OwnAddress, u32),
    /// The kernel does not have the address any more.
    AddressGone(IpAddr),
    /// The connection is the program's alone again. With the descriptor that came with the program's request, if one
    /// did: it is closed after the socket's.
    Forgotten(u32, u32),
    /// The session has ended, with all that is its.
    Ended(u32),
}
