//! A connection as the agent holds it, and what both directions of a move share.

use crate::journal::Entry;
use crate::memory::Limits;
use crate::way::Way;
use baton_abi::Cid;
use baton_abi::layout::{Owner, block as layout, session};
use baton_handoff::shell::Saved;
use baton_image::Image;
use baton_linux::events;
use baton_moves::{Custody, Move, Refusal, Step};
use baton_protocol::program::{Place, Until};
use baton_shm::Region;
use baton_wire::Flow;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// How often a program's busy word is looked at again at once: most operations are over within a microsecond.
const GLANCES: u32 = 200;

/// A waiting request for a move: session of the asker, its tag.
pub(crate) type Asker = (u32, u32);

/// What a program waits for when it has asked for something that a connection has to be in the kernel for.
pub(crate) enum Then {
    /// The connection is forgotten.
    Forget(Asker),
    /// The kernel has it, and why; when it may move again.
    GiveBack { asker: Asker, reason: String, until: Until },
}

impl Then {
    pub fn asker(&self) -> Asker {
        match self {
            Then::Forget(asker) | Then::GiveBack { asker, .. } => *asker,
        }
    }
}

/// Who waits for the end of a connection's move.
#[derive(Default)]
pub(crate) struct Waiting {
    /// They are told how it ended.
    pub askers: Vec<Asker>,
    /// What is to be done then, and how often the connection has been tried to be brought into the kernel for that.
    pub then: Vec<(Then, u8)>,
}

/// Where a connection is in its life with the agent: a view of its step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// In the kernel.
    Kernel,
    /// On its way to the NIC, which waits for the NIC's copy or for the program.
    Offloading,
    /// On the NIC, or on its way from there.
    Nic,
    /// It ended while it was on the NIC; only the shell is left.
    Ended,
}

/// A growth under way.
pub(crate) struct Growing {
    /// The name before it: the NIC knows the connection by that until it goes on.
    pub cid: Cid,
    /// Memory of the connection's that is not in use: the larger one, until the old one's bytes have been copied; then the old one.
    pub unused: [Option<(u32, u32)>; 2],
    /// The larger memory.
    pub larger: Memory,
}

/// What the agent remembers of a connection on the NIC.
pub(crate) struct OnNic {
    /// As it was handed off.
    pub image: Image,
    pub saved: Saved,
    pub memory: Memory,
    /// What its memory may grow to.
    pub limits: Limits,
    /// Microseconds of the monotonic clock just before the handoff.
    pub handed_off_at: u64,
    /// There is no route to its peer: nothing of it leaves the NIC.
    pub muted: bool,
    /// Where its frames go and come from, as was found last. None after a death: it is on its way to the kernel.
    pub way: Option<Way>,
    /// Segments that its shell had dropped when that was looked at first.
    pub dropped: Option<u32>,
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

impl Memory {
    /// Whether it lies in the heap of a session.
    pub fn fits(&self, session: &Region) -> bool {
        let inside = |(offset, size): (u32, u32)| {
            let end = offset as usize + size as usize;
            size.is_power_of_two() && offset as usize >= session::HEAP && end <= session::heap_end(session.len())
        };
        inside(self.receive) && inside(self.send)
    }
}

pub(crate) struct Connection {
    pub number: u32,
    /// None while an attacher's program has it alone.
    pub fd: Option<Arc<OwnedFd>>,
    /// An attacher's: what its program sets on the socket is not seen.
    pub attached: bool,
    /// The process whose connection it is.
    pub process: u32,
    /// The control group whose programs its packets meet.
    pub cgroup: Option<crate::cgroups::Name>,
    pub flow: Flow,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// How far it has come between kernel and NIC, and its move if one is under way.
    pub machine: Move,
    /// Its name on the NIC, while it has a slot there.
    pub cid: Option<Cid>,
    /// What the agent remembers of it from the moment that its bytes are in session memory.
    pub on_nic: Option<Box<OnNic>>,
    /// Bytes of receive and of send memory that the NIC could use for it, 0 for no more.
    pub wants: (u32, u32),
    pub growing: Option<Growing>,
    /// The journal's entry, of one whose agent has died, until it is in the kernel.
    pub journalled: Option<Box<Entry>>,
    pub waiting: Waiting,
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
    /// It could not go to the kernel when it had to.
    pub given_up: bool,
    /// Its program has closed it; a socket of the agent's own stands for it.
    pub closed: bool,
    /// Its program has ended, or is about to: nobody waits for it.
    pub abandoned: bool,
    /// Its program goes on when its agent has ended.
    pub outlives_agent: bool,
    /// It is in the list of moves that wait, and in that of moves that are suggested.
    pub under_way: bool,
    pub suggested: bool,
    pub block: Block,
}

impl Connection {
    /// One that is in the kernel.
    pub fn new(number: u32, fd: Option<OwnedFd>, flow: Flow, local: SocketAddr, peer: SocketAddr, block: Block) -> Connection {
        Connection {
            number,
            fd: fd.map(Arc::new),
            attached: false,
            process: 0,
            cgroup: None,
            flow,
            local,
            peer,
            machine: Move::new(),
            cid: None,
            on_nic: None,
            wants: (0, 0),
            growing: None,
            journalled: None,
            waiting: Waiting::default(),
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
            given_up: false,
            closed: false,
            abandoned: false,
            outlives_agent: false,
            under_way: false,
            suggested: false,
            block,
        }
    }

    /// Its descriptor.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Refusal> {
        self.fd.as_ref().map(AsFd::as_fd).ok_or(Refusal::Elsewhere)
    }

    /// Whether a move waits for the program to leave an operation. An attacher is in none while it asks for a move.
    pub fn waits_for_program(&self) -> bool {
        !self.attached && !self.abandoned
    }

    /// Whether no move of it is to be begun now.
    pub fn is_put_off(&self) -> bool {
        self.machine.is_put_off(events::monotonic_micros())
    }

    pub fn stage(&self) -> Stage {
        match self.machine.step() {
            Step::Ended => Stage::Ended,
            step if step.is_on_nic() => Stage::Nic,
            Step::Kernel if self.machine.goal().is_none() => Stage::Kernel,
            _ => Stage::Offloading,
        }
    }

    /// What the agent remembers of it, while the NIC runs it.
    pub fn running(&mut self) -> Option<&mut OnNic> {
        if self.machine.step().custody() == Custody::Nic { self.on_nic.as_deref_mut() } else { None }
    }

    pub fn place(&self) -> Place {
        match self.stage() {
            Stage::Nic | Stage::Ended => Place::Nic,
            Stage::Kernel | Stage::Offloading => Place::Kernel,
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

    /// Keeps the program out of the connection from now on. False if it is still inside an operation: then [`Block::is_left`] tells when
    /// it has left.
    pub fn keep_out(&self) -> bool {
        self.set_owner(Owner::Moving);
        fence(Ordering::SeqCst);
        (0..GLANCES).any(|_| {
            let left = self.is_left();
            std::hint::spin_loop();
            left
        })
    }

    /// Whether the program, which is kept out, has left the operation that it was in.
    pub fn is_left(&self) -> bool {
        self.load(layout::BUSY) == 0
    }
}
