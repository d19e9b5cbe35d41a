//! The messages by which the keeper holds descriptors, with their names, for the next agent.

use crate::address::OwnAddress;
use crate::program::{Flip, Opening, Until};
use baton_offloads::Offloads;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// The argument with which a keeper starts an agent.
pub const AGENT_ARGUMENT: &str = "agent-process";

/// The name that an agent gives its process (`/proc/PID/comm`, 15 bytes at most), by which tools find it. Tools do not
/// read command lines, since that waits for the lock of the process's memory, which a process can hold for any time.
pub const AGENT_NAME: &str = "baton-agent";

/// The name that a keeper gives its process, likewise.
pub const KEEPER_NAME: &str = "baton-keeper";

/// Messages from an agent to the keeper, and from the keeper to the next agent, with descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kept {
    /// From the agent, with its listening socket: programs may connect. From the keeper: the last message of what it
    /// holds.
    Ready,
    /// From the keeper: the agent was stopped (SIGSTOP) and is resumed. The processes that it supervises may have been
    /// stopped with it.
    WasStopped,
    /// In either direction: the end was requested. Connections go to the kernel and stay there until the keeper ends.
    Ending,
    /// A session: the control connection.
    Session(u32),
    /// Its memory, and the program's doorbell; of a session for messages its socket, of another one the doorbells of
    /// the NICs after the first; how it was opened.
    Memory(u32, Opening),
    /// A group of sessions, and its user; the file for its report, if there is one. It is made before its first session
    /// opens, and stays for a while when the last has ended: a program's next process may belong to it.
    Group(u64, u32, Option<Flip>),
    /// The group has ended.
    GroupEnded(u64),
    /// A connection of a session: session, number, and when it may be offloaded; its descriptor. It replaces the one
    /// held under the same number.
    Connection(u32, u32, Until),
    /// A connection of an attacher: session, number, its program's process, its socket's cookie, its addresses. It
    /// comes without a descriptor.
    Attached(u32, u32, u32, u64, SocketAddr, SocketAddr),
    /// The programs beside the kernel are at a device, by its index: their two links.
    Device(u32),
    /// The device no longer exists.
    DeviceGone(u32),
    /// The offloads of the NIC with this number for the kernel's own connections, in place of the earlier ones.
    Offloads(usize, Box<Offloads>),
    /// A listener whose connections the NIC makes: its number, its sessions, and its encoded state from the agent; with
    /// both ends of its queue. It replaces the one held under the same number.
    Listener(u32, Vec<u32>, Vec<u8>),
    /// The listener has ended.
    ListenerGone(u32),
    /// An address of the NIC's that this host's kernel has, and the index of its device. With a descriptor by which
    /// other Batons see that the address is in use, and not left over.
    Address(OwnAddress, u32),
    /// The kernel does not have the address any more.
    AddressGone(IpAddr),
    /// The connection is the program's alone again. With the descriptor that came with the program's request, if one
    /// did: it is closed after the socket's.
    Forgotten(u32, u32),
    /// The session has ended, with all of its objects.
    Ended(u32),
}
