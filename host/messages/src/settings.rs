//! Settings of an endpoint.

pub use baton_rmpp::{Halves, MAX_AHEAD};
pub use baton_wire::rmpp::MAX_CLEARED as MAX_GRANT;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::ptr::NonNull;

/// Whether a NIC has the data half.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// This host has it.
    Never,
    /// The NIC has it, if there is one that takes it.
    Auto,
    /// The NIC has it; without one there is no endpoint.
    Always,
}

/// Lends so many bytes of memory that the NIC reaches to the program: a part of the shared memory behind a descriptor,
/// from an offset on. What is sent from there, or received there, is not copied. False: the program does not take it;
/// else it has the part until the process ends.
pub type Lend = fn(NonNull<u8>, usize, BorrowedFd<'_>, u64) -> bool;

/// Settings of an endpoint. Sizes are bytes, times microseconds.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it receives. Port 0: the kernel chooses one.
    pub address: SocketAddr,
    /// Bytes of RMPP packet in a datagram. All endpoints that talk to each other should have the same.
    pub packet: u16,
    /// Most packets that one CTS clears: [`MAX_GRANT`] at most. The paper's cards had room for 16.
    pub grant: u16,
    /// Packets before the last cleared one that the RSM is sent: the paper's k, less than [`MAX_GRANT`].
    pub early: u8,
    /// Packets of a message that the data half may clear by itself behind a CTS, [`MAX_AHEAD`] at most: 0 if each CTS
    /// is the policy's, as in the paper. None: many, where the data half is on the NIC or streams carry long messages.
    pub ahead: Option<u32>,
    /// Most packets that are cleared and have not come, of all messages: what the paper's NIC has buffers for. None: as
    /// many as the NIC takes, or the socket's receive buffer holds.
    pub nic_buffers: Option<u32>,
    /// Most bytes of the program's memory that are cleared and have not come: what the paper pins. At least a packet.
    pub pinned: u64,
    /// Peers.
    pub peers: u16,
    /// Messages that are sent or wait to be sent.
    pub sends: u16,
    /// Posted receives.
    pub receives: u16,
    /// Bytes of the socket's receive buffer that are asked for.
    pub socket_buffer: usize,
    /// Silence of a peer with unfinished messages, or of one by which nothing is under way and whose place others may
    /// need, after which it is dead.
    pub dead: u64,
    /// Whether a NIC has the data half.
    pub nic: Use,
    /// Which of its halves the NIC has then, and this host the others. A NIC beside the kernel has both.
    pub halves: Halves,
    /// Whether the NIC, if it has both halves, matches as well.
    pub match_on_nic: bool,
    /// Whether the data of long messages goes by TCP connections, where neither side's data half is on a NIC.
    pub stream: bool,
    /// Bytes of the shortest message whose data does.
    pub stream_least: u32,
    /// The socket of the NIC's agent: where BATON_SOCKET says, or the usual place.
    pub agent: PathBuf,
    /// How a part of the session's memory is lent to the program, if it takes any.
    pub lend: Option<Lend>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            packet: 1472,
            grant: MAX_GRANT,
            early: 64,
            ahead: None,
            nic_buffers: None,
            pinned: 1 << 30,
            peers: 1024,
            sends: 16_384,
            receives: 16_384,
            socket_buffer: 4 << 20,
            dead: 5_000_000,
            nic: Use::Never,
            halves: Halves::BOTH,
            match_on_nic: false,
            stream: true,
            stream_least: 16 << 10,
            agent: baton_client::agent_socket(),
            lend: None,
        }
    }
}
