//! What programs and tools say to the agent over its socket, and its answers.

use baton_offloads::Offloads;
use serde::{Deserialize, Serialize};

/// Version of these messages.
pub const VERSION: u32 = 5;

/// Where a connection is, or shall go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// In the kernel.
    Kernel,
    /// On the NIC.
    Nic,
}

/// A request; every answer carries its tag.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the caller.
    pub tag: u32,
    /// What is asked.
    pub body: Ask,
}

/// What can be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Opens a session: the answer carries its memory, and the program's end of its doorbells.
    Open(Opening),
    /// A client that came to somebody else's door (same user or root): its control connection comes along.
    Admit,
    /// Makes a group, which programs join when they open their sessions. A descriptor that comes along is the file for its report, on a disk
    /// or in memory.
    Group {
        /// How its connections are to be moved to and fro, if at all.
        flip: Option<Flip>,
    },
    /// Registers the connection whose descriptor comes along; it stays where it is.
    Register {
        /// Other processes may hold the same socket: it is moved only when none does.
        inherited: bool,
        /// The process whose connection it is, if not the one that asks: for lists.
        process: Option<u32>,
    },
    /// Moves one of this session's connections. In a session of an attacher its descriptor comes along, and the program stands still.
    Move {
        /// The connection.
        connection: u32,
        /// Where to.
        to: Place,
    },
    /// The connection goes to the kernel, since the program wants of it what only the kernel can do. In a session of an attacher its
    /// descriptor comes along, and the program stands still.
    GiveBack {
        /// The connection.
        connection: u32,
        /// Why.
        reason: String,
        /// When it may move again.
        until: Until,
    },
    /// From an attacher that was asked for it ([`Reply::Fetch`]): the descriptor of a connection, while its program stands still.
    Lend {
        /// The connection.
        connection: u32,
    },
    /// From an attacher: the program has closed the connection's socket, and everything that it sent has been queued. The connection
    /// is to end as it would have in the kernel.
    Closed {
        /// The connection.
        connection: u32,
        /// The kernel would have reset it.
        abort: bool,
    },
    /// The attachers that there are.
    Attachers,
    /// The program ends: what it did is in its group's report before the answer comes.
    Goodbye,
    /// The program takes its connection back, to close or to keep: it is in the kernel afterwards, and forgotten.
    Forget {
        /// The connection.
        connection: u32,
    },
    /// What is known of one of this session's connections on the NIC.
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
    },
    /// Lists connections, as many as fit into one answer, from this session and number on.
    List {
        /// Session and number of the first.
        from: (u32, u32),
    },
    /// The NIC's counters and the agent's.
    Statistics,
    /// The NIC's offloads.
    Offloads,
    /// Other offloads from now on (the agent's user or root).
    SetOffloads(Box<Offloads>),
}

/// When a connection that was given back may move again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Until {
    /// At once.
    Again,
    /// When no other process holds its socket.
    Alone,
    /// Never.
    Never,
}

/// How a session is opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// Must be [`VERSION`].
    pub version: u32,
    /// The group that it belongs to, as [`Reply::Grouped`] named it; 0 for none.
    pub group: u64,
    /// The program's name, for lists; of an attacher, what it is attached to.
    pub program: String,
    /// The session is that of an attacher, whose connections are other processes': the agent has their descriptors only during a move.
    pub attacher: bool,
}

impl Opening {
    /// Of a program that belongs to no group.
    pub fn alone() -> Opening {
        let program = std::env::args_os().next().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Opening { version: VERSION, group: 0, program, attacher: false }
    }
}

/// Connections that move to and fro for as long as they live, at random intervals.
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
    /// With what is wrong, if these are no intervals that anything can move at.
    pub fn check(&self) -> Result<(), String> {
        let Flip { min, max, .. } = *self;
        if min >= 1 && min <= max && max <= Flip::LONGEST {
            return Ok(());
        }
        let longest = Flip::LONGEST;
        Err(format!(
            "moves at intervals of {min} to {max} us: the shortest is at least 1 and not the longer, the longest at most {longest}"
        ))
    }
}

/// What became of the connections of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Connections that were registered.
    pub connections: u64,
    /// Moves made, either way.
    pub moves: u64,
    /// Connections by the number of moves that they made.
    pub connections_by_moves: std::collections::BTreeMap<u32, u64>,
    /// Of connections that never moved the longest life in milliseconds, by why they stayed; no word for those that never came to it.
    pub unmoved: std::collections::BTreeMap<String, u64>,
    /// Moves back that the program brought about, by cause.
    pub given_back: std::collections::BTreeMap<String, u64>,
    /// Moves that did not take place, by cause.
    pub stayed: std::collections::BTreeMap<String, u64>,
    /// Connections that were lost in a move.
    pub resets: u64,
    /// Moves that a system call refused.
    pub errors: u64,
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The request's tag.
    pub tag: u32,
    /// What is answered.
    pub body: Reply,
}

/// What can be answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The session is open; descriptors come along.
    Opened {
        /// Its number.
        session: u32,
    },
    /// The group is made.
    Grouped {
        /// Its name: hard to guess, for whoever knows it may join.
        group: u64,
    },
    /// The connection is registered.
    Registered {
        /// Its number.
        connection: u32,
    },
    /// It is where it was asked to be.
    Done,
    /// It stays where it was.
    Stayed {
        /// Why.
        reason: String,
        /// Trying again later may work.
        transient: bool,
    },
    /// The request made no sense.
    Failed {
        /// Why.
        reason: String,
    },
    /// Sent unasked by an agent that has taken over from one that died: what was asked before is to be asked again.
    Restarted {
        /// How often that has happened to this session.
        starts: u32,
    },
    /// Sent unasked to an attacher: this connection should be moved.
    Wanted {
        /// The connection.
        connection: u32,
        /// Where to.
        to: Place,
    },
    /// Sent unasked to an attacher: its programs are to stand still until [`Reply::Returned`] or [`Reply::Restarted`] comes, and these
    /// connections' descriptors are needed ([`Ask::Lend`], [`Ask::Closed`]). They will be in the kernel then.
    Fetch {
        /// The connections.
        connections: Vec<u32>,
    },
    /// Sent unasked to an attacher: what it has lent is in the kernel.
    Returned,
    /// Attachers: process number, and what each is attached to.
    Attachers(Vec<(u32, String)>),
    /// A connection on the NIC.
    Detail(Detail),
    /// Connections; none when there are no more.
    Connections(Vec<ConnectionInfo>),
    /// Statistics.
    Statistics(Box<Statistics>),
    /// The NIC's offloads.
    Offloads(Box<Offloads>),
}

/// One connection, as a list shows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ConnectionInfo {
    /// Its session.
    pub session: u32,
    /// Its number in the session.
    pub connection: u32,
    /// The program's process number.
    pub process: u32,
    /// The program's name.
    pub program: String,
    /// Local address.
    pub local: String,
    /// Peer's address.
    pub peer: String,
    /// Where it is.
    pub place: Place,
    /// How often it moved.
    pub moves: u32,
    /// For how long it has been where it is, microseconds.
    pub for_us: u64,
    /// What is known of its path and queues.
    pub detail: Detail,
    /// Why it stayed or went back last.
    pub reason: String,
}

/// A connection, as its recovery record on the NIC describes it, or the kernel.
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
    /// Segments retransmitted, ever, as far as it is known.
    pub retransmitted: u32,
    /// Largest segment, bytes.
    pub mss: u32,
}

impl Detail {
    /// Writes what is known into a `struct tcp_info` (Linux, include/uapi/linux/tcp.h), as far as that is long enough.
    pub fn overlay(&self, info: &mut [u8]) {
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(place) = info.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        };
        let mss = self.mss.max(1);
        put(0, &[self.state]);
        // tcpi_unacked, tcpi_rtt, tcpi_snd_cwnd, tcpi_total_retrans, tcpi_notsent_bytes, tcpi_snd_wnd.
        for (at, value) in [
            (24, self.in_flight.div_ceil(mss)),
            (68, self.srtt),
            (80, self.cwnd),
            (100, self.retransmitted),
            (144, self.unsent),
            (228, self.send_window),
        ] {
            put(at, &value.to_ne_bytes());
        }
    }
}

/// What agent and NIC have counted.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Statistics {
    /// Process number of the NIC.
    pub nic_process: u32,
    /// Process number of the agent.
    pub agent_process: u32,
    /// How often the NIC was started.
    pub nic_starts: u32,
    /// Control connections, this one among them.
    pub sessions: u32,
    /// Moves done.
    pub moves: u64,
    /// Moves that failed and lost the connection: must stay 0.
    pub failed_moves: u64,
    /// Moves called off for a transient reason.
    pub deferred: u64,
    /// Connections brought back after the NIC died.
    pub recovered: u64,
    /// Connections lost when the NIC died: must stay 0.
    pub lost: u64,
    /// The NIC's counters, in the order of the layout.
    pub counters: Vec<u64>,
    /// The same of each worker.
    pub workers: Vec<Vec<u64>>,
}
