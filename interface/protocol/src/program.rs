//! The messages that programs and tools exchange with the agent over its socket.

use crate::address::AddressInfo;
use crate::events::{EventList, ProgramCounts};
use crate::native::Native;
use baton_offloads::Offloads;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

/// Version of these messages.
pub const VERSION: u32 = 24;

/// Where a connection is, or is to go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// In the kernel.
    Kernel,
    /// On the NIC.
    Nic,
}

/// Bit of a tag: the program may withdraw the request as long as the agent has not taken it up (see
/// `baton_abi::layout::session::ASKED`).
pub const MAY_WITHDRAW: u32 = 1 << 31;

/// A request; every answer carries its tag.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the caller.
    pub tag: u32,
    /// The request itself.
    pub body: Ask,
}

/// Requests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Opens a session: the answer carries its memory, and the program's end of its doorbells.
    Open(Opening),
    /// A client that connected to another agent's listener (same user or root); its control connection comes along.
    Admit,
    /// Makes a group, which programs join when they open their sessions. If a descriptor comes along, it is the file
    /// for the group's report, on a disk or in memory.
    Group {
        /// How its connections are moved there and back at random, if at all.
        flip: Option<Flip>,
    },
    /// Registers the connection whose descriptor comes along; it stays where it is.
    Register {
        /// Other processes may hold the same socket: it is moved only when none does.
        inherited: bool,
        /// Process id of the connection's program, if that is not the sender: for lists.
        process: Option<u32>,
    },
    /// Moves one of this session's connections. In an attacher's session its descriptor comes along, and the program
    /// stands still.
    Move {
        /// The connection.
        connection: u32,
        /// Where to.
        to: Place,
    },
    /// Restores a connection to the kernel, since the program uses something that only the kernel can do. In an
    /// attacher's session its descriptor comes along, and the program stands still.
    GiveBack {
        /// The connection.
        connection: u32,
        /// Why.
        reason: String,
        /// When it may move again.
        until: Until,
    },
    /// From an attacher, after [`Reply::Fetch`]: the descriptor of a connection, while its program stands still.
    Lend {
        /// The connection.
        connection: u32,
    },
    /// From an attacher: the program has closed the connection's socket, and everything that it sent has been queued.
    /// The connection is to end as it would have in the kernel.
    Closed {
        /// The connection.
        connection: u32,
        /// The kernel would have reset it.
        abort: bool,
    },
    /// Whether the NIC can make connections itself: [`Reply::Done`], or [`Reply::Stayed`] with the reason.
    MakesConnections,
    /// Whether the NIC can keep only the fast path of connections: [`Reply::Done`], or [`Reply::Stayed`] with the
    /// reason.
    KeepsFastPath,
    /// The NIC makes the connections of a listening socket from now on; its descriptor comes along. Repeated when the
    /// program has changed the socket's options.
    Listen,
    /// Takes the next connection that the NIC has made for a listener.
    Accept {
        /// The listener, from [`Reply::Listening`].
        listener: u32,
    },
    /// The NIC opens a connection from the socket whose descriptor comes along. The answer, [`Reply::Registered`],
    /// comes before the connection is open.
    Connect {
        /// The peer.
        peer: SocketAddr,
    },
    /// The program has closed the listener.
    StopListening {
        /// The listener.
        listener: u32,
    },
    /// The NIC receives and sends the datagrams of a UDP socket from now on. Its descriptor comes along, then the end
    /// of a doorbell that the NIC rings. Repeated when the program has connected the socket or changed its options.
    Datagrams {
        /// Where its rings are: in session memory, behind the part from which the agent allocates.
        rings: Rings,
    },
    /// The route of a socket's datagrams to a host, as the kernel would choose it now: [`Reply::Way`].
    Way {
        /// The socket, from [`Reply::Datagrams`].
        socket: u32,
        /// The host.
        host: IpAddr,
    },
    /// The kernel gets a UDP socket back.
    EndDatagrams {
        /// The socket.
        socket: u32,
        /// Unread datagrams go to the kernel, in order.
        replay: bool,
    },
    /// From a session for messages: lets the NIC send to this host, by the route that the kernel would choose now.
    Reach {
        /// Its address.
        host: IpAddr,
    },
    /// Lists the attachers.
    Attachers,
    /// The program exits. The answer comes after its activity is in its group's report.
    Goodbye,
    /// As [`Ask::Goodbye`], but the program runs on without Baton.
    Withdraw {
        /// Why.
        why: Native,
    },
    /// The sender, a program that it is about to execute, or one of its connections is served natively: for `baton ls`.
    Native {
        /// The program's name, if that is not the session's.
        program: Option<String>,
        /// Why.
        why: Native,
    },
    /// From a child of vfork(2), which can use nothing of its parent's session: the descriptor of a socket comes along
    /// that the program which it executes is to have. If it is the connection with this number of its parent's, or of
    /// another ancestor's whose child made it by vfork(2), too, it is restored, and moves again when no other process
    /// holds it. The answer is [`Reply::Done`] also if it is none.
    Inherit {
        /// The connection, in the ancestor's session.
        connection: u32,
    },
    /// The program takes its connection back, to close or to keep. It is in the kernel afterwards, and the agent
    /// forgets it. A descriptor that comes with it is closed once agent and keeper have closed theirs of the socket.
    Forget {
        /// The connection.
        connection: u32,
    },
    /// The state of one of this session's connections on the NIC.
    Detail {
        /// The connection.
        connection: u32,
    },
    /// Moves any connection (a tool's request, same user or root).
    MoveAny {
        /// The session.
        session: u32,
        /// The connection.
        connection: u32,
        /// Where to.
        to: Place,
        /// The NIC, regardless of the device of the connection's route; None: the NIC that has this device.
        nic: Option<u32>,
    },
    /// Lists connections, as many as fit into one answer, from this session and number on.
    List {
        /// Session and number of the first.
        from: (u32, u32),
    },
    /// Describes these connections (session and number): the answer is [`Reply::Connections`], with as many as fit into
    /// it. At most [`Ask::MOST_DESCRIBED`].
    Describe {
        /// Session and number of each.
        connections: Vec<(u32, u32)>,
    },
    /// The traffic of connections, as many as fit into one answer, from this session and number on: cheaper than
    /// [`Ask::List`].
    Traffic {
        /// Session and number of the first.
        from: (u32, u32),
    },
    /// The last events of these connections (session and number), as many as fit into one answer: [`Reply::Events`]. At
    /// most [`Ask::MOST_DESCRIBED`].
    Events {
        /// Session and number of each.
        connections: Vec<(u32, u32)>,
    },
    /// The counters of programs, as many as fit into one answer, from this place in the list on.
    Counts {
        /// How many are left out.
        from: u32,
    },
    /// The NIC's counters and the agent's.
    Statistics,
    /// Measurements of classes of connections in both places: [`Reply::Gain`].
    Gain,
    /// A NIC's offloads.
    Offloads {
        /// The NIC's number.
        nic: u32,
    },
    /// Sets a NIC's offloads (the agent's user or root).
    SetOffloads {
        /// The NIC's number.
        nic: u32,
        /// Its offloads from now on.
        offloads: Box<Offloads>,
    },
    /// The NIC's own addresses: [`Reply::Addresses`].
    Addresses {
        /// Answer only when the probing for all of them has ended.
        settled: bool,
    },
    /// Captures the frames that pass the NICs' wires, for a tool of root, until its connection is closed:
    /// [`Reply::Capturing`]. At most `baton_capture::MOST_CAPTURES` at a time.
    Capture {
        /// Most bytes of a frame; None for its headers.
        bytes: Option<u32>,
        /// The kernel's frames, too: those that pass the NICs, or the devices beside which these are.
        kernel: bool,
    },
}

impl Ask {
    /// Most connections that one [`Ask::Describe`] or [`Ask::Events`] names.
    pub const MOST_DESCRIBED: usize = 128;
}

/// Where a UDP socket's rings lie in session memory: a page of words, the receive ring, the send ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Rings {
    /// Offset of the page.
    pub base: u32,
    /// Bytes of the receive ring, a power of two.
    pub receive: u32,
    /// Bytes of the send ring, a power of two.
    pub send: u32,
}

/// When a connection that was restored may be offloaded again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Until {
    /// At once.
    Again,
    /// When no other process holds its socket.
    Alone,
    /// Never.
    Never,
}

/// Settings of a session that is opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// Must be [`VERSION`].
    pub version: u32,
    /// The group that it belongs to, from [`Reply::Grouped`]; 0 for none.
    pub group: u64,
    /// The program's name, for lists; for an attacher, its target.
    pub program: String,
    /// The session is an attacher's, whose connections belong to other processes: the agent has their descriptors only
    /// during a move.
    pub attacher: bool,
    /// Partial offload, if possible: the NIC runs only the fast path of its connections, and the host's TCP the rest.
    pub fast_path: bool,
    /// The session is for messages (RMPP) instead of connections. The UDP socket whose packets the NIC is to handle
    /// comes along.
    pub messages: Option<Messages>,
}

/// The endpoint of a session for messages. The NIC checks it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Messages {
    /// Address of the endpoint. The agent reads it from the socket, and ignores the program's value. In raw Ethernet it
    /// is the MAC address, as `baton_wire::rmpp::envelope::ethernet_address` writes it, with port 0.
    pub address: SocketAddr,
    /// Raw Ethernet frames carry the packets: the socket is a packet socket, bound to RMPP's type and the NIC's
    /// interface.
    pub ethernet: bool,
    /// Number of the endpoint.
    pub endpoint: u16,
    /// The NIC has the receiving half.
    pub receiving: bool,
    /// The NIC has the sending half.
    pub sending: bool,
    /// Peers.
    pub peers: u16,
    /// Messages that are received at the same time.
    pub incoming: u16,
    /// Messages that are sent at the same time.
    pub outgoing: u16,
    /// Offset in session memory of the buffers for RTS packets.
    pub buffers: u64,
    /// Number of these buffers.
    pub buffer_count: u16,
    /// Bytes of one of them.
    pub buffer_size: u16,
    /// Bytes of RMPP packet that a frame carries.
    pub packet: u16,
    /// How many receives may be posted on the NIC, if it is to match messages; 0 if only the program matches.
    pub posted: u16,
    /// Unexpected messages that the NIC has room for, if it matches.
    pub unexpected: u16,
    /// Number of slots for the program's handles of receives, if the NIC matches.
    pub receives: u32,
}

impl Messages {
    /// Most peers, and most messages in each direction.
    pub const MOST: u16 = 8192;
    /// Most receives that may be posted on the NIC, slots of their handles, and unexpected messages there. A new kind
    /// of wildcard makes the NIC hash all unexpected messages once more.
    pub const MOST_POSTED: u16 = 16_384;
    const MOST_RECEIVES: u32 = 1 << 16;
    /// See [`Messages::MOST_POSTED`].
    pub const MOST_UNEXPECTED: u16 = 1024;
    /// Longest and shortest packet.
    pub const PACKET: std::ops::RangeInclusive<u16> = 128..=9216;

    /// # Errors
    /// With the reason, if a NIC cannot serve such an endpoint in `memory` bytes of session memory, whose heap begins
    /// at `heap`.
    pub fn check(&self, heap: u64, memory: u64) -> Result<(), String> {
        let most = Messages::MOST;
        if [self.peers, self.incoming, self.outgoing].iter().any(|count| *count == 0 || *count > most) {
            return Err(format!("an endpoint has 1 to {most} peers, and as many messages in each direction"));
        }
        if !Messages::PACKET.contains(&self.packet) {
            return Err(format!("packets of {} bytes: 128 to 9216 are possible", self.packet));
        }
        let end = self.buffers.checked_add(u64::from(self.buffer_count) * u64::from(self.buffer_size));
        if self.buffers < heap || end.is_none_or(|end| end > memory) {
            return Err("the buffers for RTS packets lie outside the session's heap".into());
        }
        let Messages { posted, unexpected, receives, .. } = *self;
        if posted > 0 && (posted > Messages::MOST_POSTED || u32::from(posted) > receives || receives > Messages::MOST_RECEIVES) {
            return Err(format!("a NIC matches at most {} posted receives", Messages::MOST_POSTED));
        }
        if posted > 0 && !(1..=Messages::MOST_UNEXPECTED).contains(&unexpected) {
            return Err(format!("a NIC that matches keeps 1 to {} unexpected messages", Messages::MOST_UNEXPECTED));
        }
        if !self.receiving {
            return Err("the NIC has no sending half without the receiving one".into());
        }
        Ok(())
    }
}

impl Opening {
    /// For a program that belongs to no group.
    pub fn alone() -> Opening {
        let program = std::env::args_os().next().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Opening { version: VERSION, group: 0, program, attacher: false, fast_path: false, messages: None }
    }
}

/// Random moves: each connection moves there and back at random intervals for as long as it lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Flip {
    /// Shortest interval, microseconds.
    pub min: u64,
    /// Longest interval, microseconds.
    pub max: u64,
    /// Seed of the intervals.
    pub seed: u64,
}

impl Flip {
    /// The longest interval, microseconds: eleven days.
    pub const LONGEST: u64 = 1_000_000_000_000;

    /// # Errors
    /// With the reason, if these intervals cannot be used.
    pub fn check(&self) -> Result<(), String> {
        let Flip { min, max, .. } = *self;
        if min >= 1 && min <= max && max <= Flip::LONGEST {
            return Ok(());
        }
        let longest = Flip::LONGEST;
        Err(format!(
            "moves at intervals of {min} to {max} us: the shortest must be at least 1 and at most the longest, and the longest at most {longest}"
        ))
    }
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The request's tag.
    pub tag: u32,
    /// The answer itself.
    pub body: Reply,
}

/// Answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The session is open; descriptors come along.
    Opened {
        /// Its number.
        session: u32,
    },
    /// The group is made.
    Grouped {
        /// Its id: hard to guess, since any process that knows it may join.
        group: u64,
    },
    /// The connection is registered.
    Registered {
        /// Its number.
        connection: u32,
    },
    /// The NIC makes the listener's connections. With a socket from which one byte can be read for each connection that
    /// waits to be accepted.
    Listening {
        /// Its number.
        listener: u32,
    },
    /// A connection that the NIC has made, and its descriptor.
    Accepted {
        /// Its number.
        connection: u32,
    },
    /// The NIC has the socket's datagrams.
    Datagrams {
        /// Its number.
        socket: u32,
    },
    /// The NIC sends to the host.
    Way {
        /// Bytes of the longest IP packet.
        mtu: u32,
    },
    /// The request was carried out.
    Done,
    /// The connection stays where it was.
    Stayed {
        /// Why.
        reason: String,
        /// Trying again later may work.
        transient: bool,
    },
    /// The request was rejected.
    Failed {
        /// Why.
        reason: String,
    },
    /// Sent without a request by an agent that has taken over from one that died: unanswered requests must be repeated.
    Restarted {
        /// How many times that has happened to this session.
        starts: u32,
    },
    /// Sent without a request to an attacher: this connection should be moved.
    Wanted {
        /// The connection.
        connection: u32,
        /// Where to.
        to: Place,
    },
    /// Sent without a request to an attacher: it must keep its programs stopped until [`Reply::Returned`] or
    /// [`Reply::Restarted`] comes, and the agent needs the descriptors of these connections ([`Ask::Lend`],
    /// [`Ask::Closed`]). The connections are in the kernel afterwards.
    Fetch {
        /// The connections.
        connections: Vec<u32>,
    },
    /// Sent without a request to an attacher: the connections whose descriptors it has lent are in the kernel.
    Returned,
    /// Attachers: process id and target of each.
    Attachers(Vec<(u32, String)>),
    /// A connection on the NIC.
    Detail(Detail),
    /// Connections; empty at the end of the list.
    Connections(Vec<ConnectionInfo>),
    /// The traffic of connections; empty at the end of the list.
    Traffic(Vec<Load>),
    /// Events of connections.
    Events(EventList),
    /// The counters of programs; empty at the end of the list.
    Counts(Vec<ProgramCounts>),
    /// Statistics.
    Statistics(Box<Statistics>),
    /// The NIC's offloads.
    Offloads(Box<Offloads>),
    /// The NIC's own addresses.
    Addresses(Vec<AddressInfo>),
    /// Classes of connections that are placed by measured gain, ordered by traffic, most first.
    Gain(Vec<ClassInfo>),
    /// Frames are captured. For each NIC the memory of its rings comes along (the crate `baton_capture`); then, if the
    /// NICs are beside the kernel and its frames are wanted, a packet socket on the devices.
    Capturing {
        /// Number of NICs.
        nics: u32,
        /// Workers of each.
        workers: u32,
    },
}

impl Reply {
    /// Applies `plain`, which escapes characters that a terminal would act on, to all texts for people.
    #[must_use]
    pub fn with_plain_texts(mut self, plain: fn(&str) -> String) -> Reply {
        match &mut self {
            Reply::Stayed { reason, .. } | Reply::Failed { reason } => *reason = plain(reason),
            Reply::Attachers(list) => list.iter_mut().for_each(|(_, what)| *what = plain(what)),
            Reply::Connections(list) => {
                for text in
                    list.iter_mut().flat_map(|info| [&mut info.program, &mut info.local, &mut info.peer, &mut info.reason])
                {
                    *text = plain(text);
                }
            }
            Reply::Events(list) => list.reasons.iter_mut().for_each(|reason| *reason = plain(reason)),
            Reply::Counts(list) => {
                for counts in list {
                    counts.program = plain(&counts.program);
                    for reasons in [&mut counts.refused, &mut counts.returned, &mut counts.lost] {
                        *reasons = std::mem::take(reasons).into_iter().map(|(reason, count)| (plain(&reason), count)).collect();
                    }
                }
            }
            Reply::Gain(list) => list.iter_mut().for_each(|class| class.program = plain(&class.program)),
            Reply::Statistics(statistics) => {
                statistics.nics.iter_mut().flat_map(|nic| &mut nic.devices).for_each(|device| *device = plain(device));
                for Withdrawn { program, reason, .. } in &mut statistics.withdrawn {
                    (*program, *reason) = (plain(program), plain(reason));
                }
            }
            _ => {}
        }
        self
    }
}

/// One connection in a list.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ConnectionInfo {
    /// Its session.
    pub session: u32,
    /// Its number in the session.
    pub connection: u32,
    /// The program's process id.
    pub process: u32,
    /// The program's name.
    pub program: String,
    /// Local address.
    pub local: String,
    /// Peer's address.
    pub peer: String,
    /// Where it is.
    pub place: Place,
    /// On a NIC: the NIC's number.
    pub nic: Option<u32>,
    /// Who made it.
    pub made_by: Place,
    /// Number of its moves.
    pub moves: u32,
    /// With partial offload, on the NIC: how many times the connection was lent to the host's TCP, and whether it is
    /// lent now.
    pub lent: Option<(u32, bool)>,
    /// On the NIC, and dormant: it has carried nothing for a while, and the NIC keeps its state in few bytes.
    pub dormant: bool,
    /// Microseconds since its last move.
    pub for_us: u64,
    /// State of its path and queues.
    pub detail: Detail,
    /// The reason why it stayed, or was last restored.
    pub reason: String,
}

/// A class of connections: those of one program over one service, which are placed together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClassInfo {
    /// Address and port of the service.
    pub service: String,
    /// The service is on this host: the program's listener. Else it is a peer.
    pub listens: bool,
    /// The program's name.
    pub program: String,
    /// Its user.
    pub user: u32,
    /// Connections in the kernel, and on NICs.
    pub connections: (u32, u32),
    /// Where the class belongs, as far as measured.
    pub place: Place,
    /// It is being measured in both places now.
    pub trial: bool,
    /// How many times it has changed its place.
    pub switches: u32,
    /// The last measurement.
    pub measured: Option<Measured>,
    /// Why it belongs there.
    pub reason: String,
    /// Microseconds until it may be measured again.
    pub next_us: u64,
}

/// The measured costs and rates of a class in both places.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// Pairs of turns, one in each place.
    pub pairs: u32,
    /// CPU seconds for each GB (10⁹ bytes), in the kernel and on the NIC: of the program, the NICs and interrupts.
    pub cost: (f64, f64),
    /// Bytes a second, in the kernel and on the NIC.
    pub rate: (f64, f64),
    /// Nanoseconds of the program for a byte, in the kernel and on the NIC.
    pub program: (f64, f64),
}

/// State of a connection, from its recovery record on the NIC, or from the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detail {
    /// State, numbered as Linux does.
    pub state: u8,
    /// Smoothed round-trip time, microseconds.
    pub srtt: u32,
    /// Congestion window, segments.
    pub cwnd: u32,
    /// Bytes sent and not acknowledged.
    pub in_flight: u32,
    /// Bytes not sent yet.
    pub unsent: u32,
    /// Bytes received and not read by the program, as far as the NIC knows.
    pub unread: u32,
    /// The peer's window, bytes.
    pub send_window: u32,
    /// Segments retransmitted in total, as far as known.
    pub retransmitted: u32,
    /// Largest segment, bytes.
    pub mss: u32,
    /// Bytes that the peer has acknowledged since the agent has the connection. None if that is not known, as for
    /// another user's connection in the kernel.
    pub sent: Option<u64>,
    /// Bytes received since the agent has the connection, or None as for `sent`.
    pub received: Option<u64>,
}

/// The traffic of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Its session.
    pub session: u32,
    /// Its number in the session.
    pub connection: u32,
    /// Tells it from a later connection of the same number, as long as the agent lives.
    pub serial: u64,
    /// Where it is.
    pub place: Place,
    /// On a NIC: the NIC's number.
    pub nic: Option<u32>,
    /// Number of its moves.
    pub moves: u32,
    /// Bytes sent and received since the agent has it ([`Detail::sent`]). Also None in the middle of a move.
    pub carried: Option<(u64, u64)>,
}

impl Detail {
    /// Writes these fields into a `struct tcp_info` (Linux, include/uapi/linux/tcp.h), as far as it is long enough.
    pub fn overlay(&self, info: &mut [u8]) {
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(place) = info.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        };
        let mss = self.mss.max(1);
        put(0, &[self.state]);
        // tcpi_snd_mss, tcpi_unacked, tcpi_rtt, tcpi_snd_cwnd, tcpi_total_retrans, tcpi_notsent_bytes, tcpi_snd_wnd.
        for (at, value) in [
            (16, mss),
            (24, self.in_flight.div_ceil(mss)),
            (68, self.srtt),
            (80, self.cwnd),
            (100, self.retransmitted),
            (144, self.unsent),
            (228, self.send_window),
        ] {
            put(at, &value.to_ne_bytes());
        }
        // tcpi_bytes_acked, tcpi_bytes_received.
        put(120, &self.sent.unwrap_or_default().to_ne_bytes());
        put(128, &self.received.unwrap_or_default().to_ne_bytes());
    }
}

/// Counters of one NIC.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct NicStatistics {
    /// Its process number.
    pub process: u32,
    /// Names of its devices, if there are several NICs.
    pub devices: Vec<String>,
    /// Its counters, in the order of the layout.
    pub counters: Vec<u64>,
    /// The same counters of each of its workers.
    pub workers: Vec<Vec<u64>>,
    /// Times that one of its workers wanted to run and got no processor.
    pub starved: u64,
    /// Times that the agent has ended a NIC with this number because it hung.
    pub hung: u64,
    /// Deaths of NICs with this number, by cause: [`DEATHS`].
    pub deaths: BTreeMap<String, u64>,
    /// Bytes that peers have acknowledged to its connections, in the agent's life.
    pub sent: u64,
    /// Bytes that its connections have received, in the agent's life.
    pub received: u64,
}

/// Causes of a NIC's death: it was stopped, one of its workers spun or got stuck in a system call, the agent ended it
/// since it broke its contract, it crashed, it was killed by a signal.
pub const DEATHS: [&str; 6] = ["stopped", "spun", "stuck", "ended", "crashed", "killed"];

/// A program that runs without Baton, or a program's connections that are not registered with the agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Withdrawn {
    /// Its process id.
    pub process: u32,
    /// Distinguishes that process from a later one with the same id (`baton_linux::process::identity`).
    pub identity: u64,
    /// Its name.
    pub program: String,
    /// Why.
    pub reason: String,
    /// Number of connections that the reason applies to; 0 if it applies to the whole program.
    pub connections: u64,
}

/// Counters of agent and NICs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Statistics {
    /// Process number of the first NIC.
    pub nic_process: u32,
    /// Process number of the first NIC's host's TCP, 0 if there is none.
    pub host_tcp_process: u32,
    /// Process number of the agent.
    pub agent_process: u32,
    /// Microseconds since the agent's start.
    pub for_us: u64,
    /// Number of times that a NIC was started.
    pub nic_starts: u32,
    /// Control connections, this one included.
    pub sessions: u32,
    /// The programs that left last, and run without Baton.
    pub withdrawn: VecDeque<Withdrawn>,
    /// Moves done.
    pub moves: u64,
    /// Moves that failed and lost the connection: must stay 0.
    pub failed_moves: u64,
    /// Moves given up for a transient reason.
    pub deferred: u64,
    /// Moves of these that were given up since the NIC was full.
    pub full: u64,
    /// Connections restored from a full NIC, since other connections carried more.
    pub colder: u64,
    /// Connections on a NIC that were reset because the NIC was full or their route changed, if the NIC is set to do
    /// so.
    pub dropped: u64,
    /// Connections restored after the NIC's death.
    pub recovered: u64,
    /// Connections lost at the NIC's death: must stay 0.
    pub lost: u64,
    /// The NICs' counters, added up, in the order of the layout.
    pub counters: Vec<u64>,
    /// The same counters of each worker, NIC by NIC.
    pub workers: Vec<Vec<u64>>,
    /// The counters of each NIC.
    pub nics: Vec<NicStatistics>,
}
