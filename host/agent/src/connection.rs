//! A connection as the agent holds it, and what both directions of a move share.

use baton_abi::Cid;
use baton_abi::layout::{Owner, block as layout, session};
use baton_client::protocol::Place;
use baton_image::Image;
use baton_kernel::events;
use baton_kernel::examine::Stay;
use baton_kernel::shell::Saved;
use baton_ring::Region;
use baton_wire::Flow;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// Microseconds that a program may take to leave an operation on a connection that is to be moved.
const QUIESCE_LIMIT: u64 = 20_000;

/// A waiting request for a move: session of the asker, its tag.
pub(crate) type Asker = (u32, u32);

/// Where a connection is in its life with the agent.
pub(crate) enum Stage {
    /// In the kernel.
    Kernel,
    /// In the kernel, the NIC is copying; since when, who asked, and whether the kernel has been asked for its SACK blocks.
    Mirroring { since: u64, cid: Cid, askers: Vec<Asker>, asked: bool },
    /// On the NIC.
    Nic(Box<OnNic>),
    /// It ended while it was on the NIC; only the shell is left.
    Ended(Cid),
}

/// What the agent remembers of a connection on the NIC.
pub(crate) struct OnNic {
    pub cid: Cid,
    /// As it was handed off.
    pub image: Image,
    pub saved: Saved,
    pub memory: Memory,
    /// Microseconds of the monotonic clock just before the handoff.
    pub handed_off_at: u64,
    /// There is no route to its peer: nothing of it leaves the NIC.
    pub muted: bool,
}

/// What is known of a connection's path.
#[derive(Clone, Copy)]
pub(crate) struct Path {
    cwnd: u32,
    ssthresh: u32,
    srtt: u32,
    rttvar: u32,
    min_rtt: u32,
}

impl Path {
    pub fn of(image: &Image) -> Path {
        let Image { cwnd, ssthresh, srtt, rttvar, min_rtt, .. } = *image;
        Path { cwnd, ssthresh, srtt, rttvar, min_rtt }
    }

    /// Puts it into the image of a connection whose kernel has measured nothing since it came back.
    pub fn remember(self, image: &mut Image) {
        if image.srtt == 0 && self.srtt != 0 {
            let Path { cwnd, ssthresh, srtt, rttvar, min_rtt } = self;
            (image.cwnd, image.ssthresh, image.srtt, image.rttvar, image.min_rtt) = (cwnd, ssthresh, srtt, rttvar, min_rtt);
        }
    }
}

/// Send and receive memory of a connection: (offset, size).
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub receive: (u32, u32),
    pub send: (u32, u32),
}

pub(crate) struct Connection {
    pub number: u32,
    /// None while an attacher's program has it alone.
    pub fd: Option<OwnedFd>,
    /// An attacher's: what its program sets on the socket is not seen.
    pub attached: bool,
    /// The process whose connection it is.
    pub process: u32,
    /// The control group whose programs its packets meet.
    pub cgroup: Option<crate::cgroups::Name>,
    pub flow: Flow,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub stage: Stage,
    /// Counts changes of what its block says; the program looks again when it does.
    pub moves: u32,
    /// Moves made.
    pub made: u32,
    /// When it came to where it is, microseconds of the monotonic clock.
    pub since: u64,
    /// Which connection this is, of all that were ever registered with this agent.
    pub serial: u64,
    /// Why it stayed or went back last.
    pub reason: String,
    /// What the NIC had learnt of the path when the connection went back: the kernel takes none of it.
    pub path: Option<Path>,
    /// Other processes may hold its socket: it may go to the NIC only if none does.
    pub inherited: bool,
    /// It stays in the kernel for good.
    pub stays: bool,
    /// It was asked to be on the NIC, and goes there again when it can.
    pub wanted: bool,
    /// The firewall has changed: what had been acknowledged and received then. It moves when traffic has passed.
    pub unproved: Option<(u64, u64)>,
    /// Why it has to leave the NIC as soon as it can, if it has.
    pub must_return: Option<&'static str>,
    /// Its program has closed it; a socket of the agent's own stands for it.
    pub closed: bool,
    pub block: Block,
}

impl Connection {
    /// One that is in the kernel.
    pub fn new(number: u32, fd: Option<OwnedFd>, flow: Flow, local: SocketAddr, peer: SocketAddr, block: Block) -> Connection {
        Connection {
            number,
            fd,
            attached: false,
            process: 0,
            cgroup: None,
            flow,
            local,
            peer,
            stage: Stage::Kernel,
            moves: block.load(layout::MOVES),
            made: 0,
            since: events::monotonic_micros(),
            serial: 0,
            reason: String::new(),
            path: None,
            inherited: false,
            stays: false,
            wanted: false,
            unproved: None,
            must_return: None,
            closed: false,
            block,
        }
    }

    /// Its descriptor.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Stay> {
        self.fd.as_ref().map(AsFd::as_fd).ok_or(Stay::Elsewhere)
    }

    pub fn place(&self) -> Place {
        match self.stage {
            Stage::Nic(_) | Stage::Ended(_) => Place::Nic,
            Stage::Kernel | Stage::Mirroring { .. } => Place::Kernel,
        }
    }

    pub fn cid(&self) -> Option<Cid> {
        match &self.stage {
            Stage::Kernel => None,
            Stage::Mirroring { cid, .. } | Stage::Ended(cid) => Some(*cid),
            Stage::Nic(on_nic) => Some(on_nic.cid),
        }
    }
}

/// The agent's view of a connection's block in session memory.
#[derive(Clone)]
pub(crate) struct Block {
    memory: Arc<Region>,
    base: usize,
}

impl Block {
    pub fn new(memory: Arc<Region>, connection: u32) -> Block {
        Block { memory, base: session::block(connection) }
    }

    /// Which of the session's it is.
    pub fn number(&self) -> u32 {
        ((self.base - session::BLOCKS) / session::BLOCK_BYTES) as u32
    }

    pub fn load(&self, field: usize) -> u32 {
        self.memory.word32(self.base + field).load(Ordering::Acquire)
    }

    pub fn store(&self, field: usize, value: u32) {
        self.memory.word32(self.base + field).store(value, Ordering::Release);
    }

    /// Whoever waits for the end of a move goes on.
    pub fn set_owner(&self, owner: Owner) {
        self.store(layout::OWNER, owner as u32);
        if owner != Owner::Moving {
            events::wake_all(self.memory.word32(self.base + layout::OWNER));
        }
    }

    /// Keeps the program out of the connection. False if it does not leave an operation in time; it then keeps the connection.
    pub fn quiesce(&self, owner: Owner) -> bool {
        self.set_owner(Owner::Moving);
        fence(Ordering::SeqCst);
        let busy = self.memory.word32(self.base + layout::BUSY);
        let deadline = events::monotonic_micros() + QUIESCE_LIMIT;
        loop {
            let holder = busy.load(Ordering::Acquire);
            if holder == 0 {
                break;
            }
            if events::monotonic_micros() > deadline {
                self.set_owner(owner);
                return false;
            }
            events::wait_while(busy, holder, Duration::from_millis(1));
        }
        true
    }
}
