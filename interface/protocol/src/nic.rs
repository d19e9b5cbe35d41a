//! Between the agent and the NIC process that it starts: descriptors, settings, requests.

use crate::address::OwnAddress;
use crate::program::{Messages, Rings};
use baton_offloads::Offloads;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

fn one() -> usize {
    1
}

fn standard_probes() -> u64 {
    STANDARD_PROBES
}

/// Microseconds between two probes of RFC 5227 (PROBE_MIN).
pub const STANDARD_PROBES: u64 = 1_000_000;

/// The emulated link in front of the wire, the same in both directions. Times are in microseconds, probabilities in
/// parts per million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkSettings {
    /// Bits per second, 0 for no limit.
    pub rate: u64,
    /// Delay in each direction.
    pub delay: u64,
    /// Bytes of buffer in each direction.
    pub buffer: u64,
    /// Probability that a frame is lost.
    pub loss: u32,
    /// Probability that a frame is held back by `hold`, so that later ones overtake it.
    pub reorder: u32,
    /// How long such a frame is held back.
    pub hold: u64,
    /// Probability that a frame is duplicated.
    pub duplicate: u32,
    /// Probability that a bit of a frame is changed.
    pub corrupt: u32,
    /// Faults affect only frames that the NIC sends; received frames are only delayed.
    pub one_way: bool,
    /// Seed of the random faults.
    pub seed: u64,
}

/// The settings of a NIC process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NicSettings {
    /// Number of the NIC among the agent's NICs.
    #[serde(default)]
    pub number: usize,
    /// Largest number of offloaded connections.
    pub slots: usize,
    /// Number of workers, each a thread with queues of its own. Beside the kernel there is one.
    #[serde(default = "one")]
    pub workers: usize,
    /// Cores that the workers are bound to, in order; workers without one are not bound.
    #[serde(default)]
    pub cores: Vec<usize>,
    /// The host's interface and the wire have a queue for each worker, and registers (an indirection table) that say
    /// which frame goes to which queue. Without them the first worker receives all frames and forwards those of the
    /// others.
    #[serde(default)]
    pub card: bool,
    /// One thread, the copy engine, writes the frames of all workers to the kernel, in turn; else each worker writes
    /// its own. The engine's core is the one after the workers' in `cores`, if there is one. Not used beside the
    /// kernel, where there is one worker.
    #[serde(default)]
    pub copy_engine: bool,
    /// Microseconds for which a worker polls without work before it sleeps.
    pub spin: u64,
    /// The wire accepts frames of up to 64 KB.
    pub segmentation: bool,
    /// The offloads for the kernel's own connections. Not used beside the kernel, where their frames do not pass
    /// through the NIC.
    #[serde(default)]
    pub offloads: Offloads,
    /// The NIC receives and sends on the kernel's own network devices, instead of standing between the kernel and the
    /// wire.
    #[serde(default)]
    pub beside: bool,
    /// The NIC has an owner, which starts it for the agent and sets the rules of its filter: see [`crate::filter`].
    #[serde(default)]
    pub owned: bool,
    /// Addresses that are the NIC's own. For a NIC with an owner, the owner chooses them.
    #[serde(default)]
    pub addresses: Vec<OwnAddress>,
    /// Microseconds between two probes for such an address, at least; other times are in proportion (RFC 5227 section
    /// 1.1).
    #[serde(default = "standard_probes")]
    pub between_probes: u64,
    /// The emulated link.
    pub link: LinkSettings,
    /// Key of the hashes of lookup tables; random.
    pub hash_key: [u64; 4],
}

impl NicSettings {
    /// First of the two descriptors that a NIC with an owner has after all others: the connection to the owner, and the
    /// memory of the filter's counters and flows.
    pub fn owner_descriptors(&self) -> i32 {
        Descriptor::Injector as i32 + self.card_descriptors() as i32
    }

    /// Number of descriptors for a card with several queues: its registers, then, for each worker but the first, a
    /// queue of the host's interface and one of the wire's.
    pub fn card_descriptors(&self) -> usize {
        if self.card { 1 + 2 * (self.workers - 1) } else { 0 }
    }
}

/// The descriptors that a NIC process inherits from its agent, and an agent from its keeper: in this order from 3 on.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Descriptor {
    /// Inline: the TAP that is the kernel's interface. Beside the kernel: the packet socket that receives what the
    /// kernel sends.
    Host = 3,
    /// Inline: the wire. Beside the kernel: the packet socket on all devices. For an agent whose NIC has an owner: the
    /// connection to that.
    Wire = 4,
    /// NIC memory.
    Memory = 5,
    /// The NIC's doorbell.
    NicBell = 6,
    /// The agent's doorbell.
    AgentBell = 7,
    /// The control connection to the process that started this one.
    Channel = 8,
    /// Beside the kernel: the TAP through which frames are injected into it. Else the first descriptor of a card, see
    /// [`NicSettings::card_descriptors`].
    Injector = 9,
}

/// The route to a host: the contents of its frames' headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hop {
    /// Source MAC address.
    pub source: [u8; 6],
    /// Destination MAC address.
    pub destination: [u8; 6],
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// Beside the kernel: index of the device by which its frames leave; else 0.
    pub interface: u32,
}

/// A listener's settings for the NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listen {
    /// Its number.
    pub id: u32,
    /// The addresses and ports that it listens on.
    pub addresses: Vec<SocketAddr>,
    /// Bytes that the receive memory of its connections may grow to.
    pub receive_limit: u32,
    /// MTU of the path to its clients, in bytes.
    pub mtu: u32,
    /// Time to live, or hop limit, of its answers.
    pub ttl: u8,
}

/// A program's UDP socket, with its settings for the NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatagramSocket {
    /// Its number.
    pub id: u32,
    /// Its session.
    pub session: u32,
    /// Where its rings lie in session memory.
    pub rings: Rings,
    /// Most bytes in its receive ring at a time.
    pub limit: u32,
    /// The addresses and ports that it receives at.
    pub addresses: Vec<SocketAddr>,
    /// The peer, from which alone it receives, if it is connected.
    pub peer: Option<SocketAddr>,
    /// MAC address of the host's interface, for datagrams that the NIC passes on to the kernel.
    pub host: [u8; 6],
}

/// The route of a UDP socket's datagrams to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatagramWay {
    /// The address that they come from.
    pub source: IpAddr,
    /// The contents of their headers.
    pub hop: Hop,
    /// Bytes of the longest IP packet; the kernel sends longer ones.
    pub mtu: u32,
}

/// Messages from the agent on the control connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToNic {
    /// A new session. The descriptors of its memory and of the program's doorbell come with it; then, to any NIC but
    /// the first, the doorbell by which the program wakes this one.
    Attach {
        /// The session's number.
        session: u32,
        /// Its endpoint, and the number of this NIC for it (see the layout of session memory), if it is for messages.
        messages: Option<(Messages, u32)>,
    },
    /// A session for messages may send to a host by this route; with None it may not.
    Reach {
        /// The session's number.
        session: u32,
        /// The host.
        host: IpAddr,
        /// The way there.
        hop: Option<Hop>,
    },
    /// The NIC makes the connections of this listener from now on, in slots that it is granted.
    Listen(Listen),
    /// The NIC makes no more connections of the listener with this number.
    StopListening(u32),
    /// There is a host's TCP, to which connections can be lent. The descriptors of the memory that the NIC shares with
    /// it, and of its doorbell, come along.
    HostTcp,
    /// The NIC keeps only the fast path of this session's connections, and lends them to the host's TCP when they leave
    /// it.
    FastPath(u32),
    /// To the host's TCP: the session has ended.
    Detach(u32),
    /// The NIC receives and sends the datagrams of a UDP socket from now on, or the socket's settings have changed.
    /// With the doorbell that the NIC rings for the program.
    Datagrams(DatagramSocket),
    /// The route of a socket's datagrams to a host; None while there is none.
    DatagramWay {
        /// The socket's number.
        id: u32,
        /// The host.
        host: IpAddr,
        /// The way there.
        way: Option<DatagramWay>,
    },
    /// The kernel has the socket again.
    EndDatagrams {
        /// The socket's number.
        id: u32,
        /// Unread datagrams go to the kernel, in order.
        replay: bool,
    },
    /// From now on the NIC uses these of the addresses in its settings, at this MAC address.
    Addresses {
        /// The MAC address of the kernel's interface.
        mac: [u8; 6],
        /// The addresses.
        addresses: Vec<IpAddr>,
    },
    /// Begin to receive frames.
    Start,
    /// Change the offloads.
    Offloads(Box<Offloads>),
    /// Begin a capture: each worker writes the frames that pass the wire into a ring of its own. With the memory of the
    /// rings (the crate `baton_capture`).
    Capture(Capture),
    /// End the capture with this number.
    EndCapture(u32),
}

/// The settings of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capture {
    /// Its number.
    pub id: u32,
    /// Most bytes of a frame; None for its headers.
    pub bytes: Option<u32>,
    /// Frames of the kernel's that pass the NIC, too.
    pub kernel: bool,
}

/// The descriptors that the host's TCP inherits from its agent, in this order from 3 on.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum HostTcpDescriptor {
    /// NIC memory.
    Memory = 3,
    /// The memory that it shares with the NIC.
    Shared = 4,
    /// The NIC's doorbell.
    NicBell = 5,
    /// Its own doorbell.
    Bell = 6,
    /// The control connection to the agent.
    Channel = 7,
}

/// Messages to the agent on the control connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToAgent {
    /// Before [`ToAgent::Ready`]: the addresses of the NIC's own in its settings, which may be from its owner.
    OwnAddresses {
        /// The addresses.
        addresses: Vec<OwnAddress>,
        /// Microseconds between two probes for one, at least.
        between_probes: u64,
    },
    /// The process is ready.
    Ready,
    /// The session is attached.
    Attached,
    /// The route to the host was set.
    Reached,
    /// The listener has been added, or removed.
    Listening,
    /// The UDP socket, or its route, was set, or the socket's end was noted.
    Served,
    /// The offloads have been changed.
    Set,
    /// The request failed, for this reason.
    Failed(String),
}
