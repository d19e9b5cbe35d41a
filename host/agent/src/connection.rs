//! State that the agent keeps of a connection, shared by both directions of a move.

use crate::block::Block;
use crate::calls::Call;
use crate::counts::{Counted, Counts, Still};
use crate::events::{AGENT_DIED, ASKED_TO, AT_RANDOM, BY_GAIN, BY_HEAT, CLOSED, Events, KILLS_NIC, NIC_DIED, Reasons};
use crate::fin::ReplayedFin;
use crate::identity::{Identity, mapped};
use crate::idle::Idleness;
use crate::journal::{self, Entry};
use crate::memory::Growing;
use crate::packed::PackedMemory;
use crate::traffic::Traffic;
use crate::way::Way;
use baton_abi::Cid;
use baton_core::{Refused, Stage};
use baton_handoff::export::Exporter;
use baton_handoff::import::Importer;
use baton_handoff::shell::Saved;
use baton_image::{Image, NicState, Stay};
use baton_linux::foreign::Foreign;
use baton_linux::{events, socket};
use baton_moves::{Barrier, Conclusion, Custody, Goal, Move, Refusal, Step};
use baton_protocol::events::What;
use baton_protocol::program::{Place, Until};
use baton_shm::Region;
use baton_supervision::Retry;
use baton_wire::Flow;
use std::borrow::Cow;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

pub(crate) use crate::packed::Memory;

/// A request for a move that waits for its answer: session of the asker, and tag.
pub(crate) type Asker = (u32, u32);

/// An operation that needs the connection in the kernel, and waits for its move there.
pub(crate) enum Then {
    /// Remove the connection.
    Forget(Asker),
    /// Offload the connection again, to the NIC that was asked for.
    Offload(Asker),
    /// Leave the connection in the kernel, for `reason`, until it may move again.
    GiveBack { asker: Asker, reason: String, until: Until },
}

impl Then {
    pub fn asker(&self) -> Asker {
        match self {
            Then::Forget(asker) | Then::Offload(asker) | Then::GiveBack { asker, .. } => *asker,
        }
    }
}

/// Requests that wait for the end of a connection's move.
#[derive(Default)]
pub(crate) struct Waiting {
    /// Receive the move's result.
    pub askers: Vec<Asker>,
    /// Have asked for the NIC while it was on its way to the kernel: it goes there again.
    pub again: Vec<Asker>,
    /// Operations to do afterwards, each with the number of attempts to restore the connection for it.
    pub then: Vec<(Then, u8)>,
}

/// Most requests that wait for the end of one move: programs and tools ask one at a time.
const MOST_WAITING: usize = 256;

impl Waiting {
    /// Whether so many wait that whoever asks once more breaks a rule.
    pub fn is_full(&self) -> bool {
        self.askers.len() + self.again.len() + self.then.len() >= MOST_WAITING
    }

    fn is_empty(&self) -> bool {
        self.askers.is_empty() && self.again.is_empty() && self.then.is_empty()
    }
}

/// What a connection on the NIC rests for, to go on with other memory or with the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wants {
    /// Bytes of receive and of send memory that the NIC requests for it, 0 for no more.
    Larger(u32, u32),
    /// The pages of its memory, as far as that is empty, are to go back to the system.
    NoPages,
}

impl Default for Wants {
    fn default() -> Wants {
        Wants::Larger(0, 0)
    }
}

/// State of a move while it waits for the program or the NIC.
#[derive(Default)]
pub(crate) struct Carried {
    pub way: Option<Way>,
    /// Its entry in the journal; that of the agent before, if that had restored the connection.
    pub entry: Option<Entry>,
    /// An import into the kernel's socket that is not finished, and the image of which it is made.
    pub importer: Option<Importer>,
    pub image: Option<Image>,
    /// An export from the kernel's socket that is not finished.
    pub exporter: Option<Exporter>,
    /// Who may hold the socket's lock, once that has been looked up for this move: see [`crate::calls::outsider`].
    pub outsider: Option<Option<u32>>,
}

/// What is needed again when a connection leaves the NIC.
#[derive(Clone, PartialEq)]
pub(crate) struct Exported {
    /// The image that was handed off.
    pub image: Image,
    /// Microseconds of the monotonic clock just before the handoff.
    pub handed_off_at: u64,
    pub saved: Saved,
}

/// What a connection is handed off with.
pub(crate) struct Handoff {
    pub exported: Exported,
    /// What an earlier NIC knew beside it, if that holds after the connection's stay in the kernel.
    pub nic: Option<NicState>,
    /// Bytes that the kernel has counted as acknowledged and as received, until they are added to the connection's
    /// [`Traffic`].
    pub carried: Option<(u64, u64)>,
}

impl Handoff {
    /// Of a connection of which nothing is known but this.
    pub fn new(exported: Exported) -> Handoff {
        Handoff { exported, nic: None, carried: None }
    }
}

/// State that the agent keeps of a connection on the NIC.
pub(crate) struct OnNic {
    memory: PackedMemory,
    /// Its way, as found last. None after its agent died: it is being restored.
    pub way: Option<Arc<Way>>,
    /// What it has carried, and since when nothing more.
    pub idleness: Idleness,
    /// Segments that its shell had dropped at the first poll, and whether that was.
    pub dropped: u32,
    pub polled: bool,
    /// There is no route to its peer: the NIC sends nothing of it.
    pub muted: bool,
    /// Something has changed since, on which its way may depend: that is to be looked up again.
    pub stale: bool,
}

// With the allocator's 8 bytes it takes 48.
const _: () = assert!(size_of::<OnNic>() <= 40);

impl OnNic {
    /// Of a connection that is handed off with this image. None if `memory` is none of a session's heap, which has
    /// whole pages.
    pub fn new(image: &Image, memory: Memory, way: Option<Arc<Way>>) -> Option<OnNic> {
        let (memory, idleness) = (PackedMemory::new(memory)?, Idleness::new(image));
        Some(OnNic { memory, way, idleness, dropped: 0, polled: false, muted: false, stale: false })
    }

    pub fn memory(&self) -> Memory {
        self.memory.unpacked()
    }

    /// Notes that the connection goes on in other memory. False, and nothing has changed, if that is none of a
    /// session's heap.
    #[must_use]
    pub fn move_to(&mut self, memory: Memory) -> bool {
        PackedMemory::new(memory).map(|packed| self.memory = packed).is_some()
    }
}

/// What few connections have at a time: while they move, while they stay in the kernel after a time on the NIC, or by
/// exception.
#[derive(Default)]
pub(crate) struct Extra {
    /// Its state machine, while that does not rest.
    pub machine: Option<Box<Move>>,
    /// What it was handed off with, until the NIC has it; then that is in the journal, see [`Connection::exported`].
    pub handoff: Option<Box<Handoff>>,
    /// What its move goes on with after it has waited.
    pub carried: Option<Box<Carried>>,
    pub waiting: Waiting,
    /// What its next growth is for.
    pub wants: Wants,
    pub growing: Option<Growing>,
    /// The peer's FIN that is on its way to the kernel's socket.
    fin: Option<Box<ReplayedFin>>,
    /// The agent has shut its receiving side down, since that FIN did not get there.
    pub fin_lost: bool,
    /// What the NIC knew when it gave the connection to the kernel, which takes none of it.
    pub stay: Option<Box<Stay>>,
    /// Since the firewall has changed: bytes acknowledged and received, beyond which traffic has passed both ways. It
    /// may move then.
    pub unproved: Option<(u64, u64)>,
    /// Why it has to leave the NIC as soon as possible, if it has to.
    pub must_return: Option<&'static str>,
    /// When it is tried on the NIC again.
    pub retry: Retry,
    /// It goes to the NIC, where it is not wanted, to end there: its peer has been silent for longer than
    /// TCP_USER_TIMEOUT.
    pub overdue: bool,
    /// The NIC that died when it was there last, whose crash loop says when it may go back.
    pub nic_that_died: u8,
    /// The kernel has refused to take it back, and is asked again.
    pub refused: Option<Refused>,
    /// When the move that is under way was due at random, in microseconds of the monotonic clock, if it was.
    pub drawn: Option<u64>,
    /// Local address and peer as its socket names them, if that is neither as the 4-tuple does nor as addresses of IPv4
    /// mapped to IPv6: with the scope of link-local addresses, or otherwise.
    addresses: Option<Box<(SocketAddr, SocketAddr)>>,
    /// Of an attacher: since when no program is known to have its socket, in microseconds of the monotonic clock.
    pub unheld_since: Option<u64>,
    /// The call that is made on its socket for its move. Its descriptor is away meanwhile.
    pub call: Option<Box<Call>>,
    /// When the move that is under way began, in microseconds of the monotonic clock; 0 before the first.
    pub began: u64,
    /// Since when it stands still for that move, in microseconds of the monotonic clock; 0 if it does not.
    pub still_since: u64,
    /// Closed after its socket's descriptor: its program has the other end, and learns from it that the agent has none.
    pub closed: Option<Foreign>,
    /// What it has carried on the NIC with this number and is not counted for its program yet.
    pub uncounted: (usize, Traffic),
    /// Its socket was destroyed while it was on the NIC: it is destroyed again when it is in the kernel.
    pub cut: bool,
}

impl Extra {
    /// Since when the connection stands still, and what it has carried and is not counted: neither any more.
    pub fn take_counts(&mut self) -> (u64, (usize, Traffic)) {
        (std::mem::take(&mut self.still_since), std::mem::take(&mut self.uncounted))
    }

    /// Whether there is nothing that has to be kept. What a growth wants is set just before it begins.
    fn is_empty(&self) -> bool {
        let Extra {
            machine,
            handoff,
            carried,
            waiting,
            growing,
            fin,
            fin_lost,
            stay,
            unproved,
            must_return,
            retry,
            overdue,
            nic_that_died,
            refused,
            drawn,
            addresses,
            unheld_since,
            call,
            closed,
            cut,
            wants: _,
            began: _,
            still_since: _,
            uncounted: _,
        } = self;
        let of_move = machine.is_none() && handoff.is_none() && carried.is_none() && waiting.is_empty() && growing.is_none();
        let of_stay =
            stay.is_none() && unproved.is_none() && retry.is_clear() && *nic_that_died == 0 && drawn.is_none() && !overdue;
        let of_return = fin.is_none() && !fin_lost && must_return.is_none() && refused.is_none() && !cut;
        let of_socket = addresses.is_none() && unheld_since.is_none() && call.is_none() && closed.is_none();
        of_move && of_stay && of_return && of_socket
    }
}

/// State that the agent keeps of a connection. There may be very many: what few of them have is in [`Extra`].
pub(crate) struct Connection {
    /// Its descriptor. None while an attacher's program has it alone.
    pub fd: Option<Foreign>,
    /// It belongs to an attacher: options that its program sets on the socket are not seen.
    pub attached: bool,
    /// Number of the process that has the connection.
    pub process: u32,
    /// The control group whose BPF programs its packets pass.
    pub cgroup: Option<crate::cgroups::Name>,
    pub flow: Flow,
    /// The kernel's number of its socket, whatever that is connected to (SO_COOKIE).
    pub cookie: u64,
    /// Its socket names addresses of IPv4 as such of IPv6.
    pub mapped: bool,
    /// The last step that it has completed: its place between kernel and NIC.
    pub step: Step,
    /// Its cid, while it has a slot on a NIC; it says on which.
    pub cid: Option<Cid>,
    /// The NIC that was asked for, whatever device its route leads to.
    pub asked_nic: Option<u8>,
    /// It has left a NIC because its route leads elsewhere, perhaps to another NIC: it is to be offloaded again soon.
    pub onward: bool,
    /// Set from the moment that its bytes are in session memory.
    pub on_nic: Option<Box<OnNic>>,
    /// What few connections have.
    pub extra: Option<Box<Extra>>,
    /// Who made it.
    pub made_by: Place,
    /// The NIC is opening it: it has a slot there, and no move.
    pub opening: bool,
    /// Number of completed moves.
    pub made: u32,
    /// Time of its last move, in microseconds of the monotonic clock.
    pub since: u64,
    /// What it has carried, up to a point that [`Connection::carried`] knows.
    pub traffic: Traffic,
    /// Serial number, unique among all connections that were ever registered with this agent.
    pub serial: u64,
    /// Reason why it last stayed, moved or was restored.
    pub reason: Cow<'static, str>,
    /// What has happened to it.
    pub events: Events,
    /// Other processes may hold its socket: it may go to the NIC only if none does.
    pub inherited: bool,
    /// It stays in the kernel for good.
    pub stays: bool,
    /// It is wanted on the NIC, by a rule or a request, and goes there whenever that is possible. Changed by
    /// [`Connection::want`] alone, which notes it for the next agent.
    pub wanted: bool,
    /// Its class was sent to the NIC by what was measured.
    pub by_gain: bool,
    /// It could not be restored when it had to be.
    pub given_up: bool,
    /// The NIC dies of it, time and again.
    pub kills_nic: bool,
    /// Its program has closed it; a socket of the agent's stands in for it.
    pub closed: bool,
    /// Its program has ended, or is being ended: moves do not wait for it.
    pub abandoned: bool,
    /// Its program continues after its agent has ended.
    pub outlives_agent: bool,
    /// Whether it is in the queue of moves that wait, and in that of suggested moves.
    pub under_way: bool,
    pub suggested: bool,
    pub block: Block,
}

const _: () = assert!(size_of::<Option<Connection>>() <= 208);

impl Connection {
    /// Makes a connection that is in the kernel.
    pub fn new(fd: Option<Foreign>, flow: Flow, local: SocketAddr, peer: SocketAddr, mut block: Block) -> Connection {
        block.read_moves();
        let cookie = fd.as_ref().and_then(|fd| socket::cookie(fd.as_fd()).ok()).unwrap_or_default();
        let mut connection = Connection {
            fd,
            attached: false,
            process: 0,
            cgroup: None,
            flow,
            cookie,
            mapped: false,
            step: Step::Kernel,
            cid: None,
            asked_nic: None,
            onward: false,
            on_nic: None,
            extra: None,
            made_by: Place::Kernel,
            opening: false,
            made: 0,
            since: events::monotonic_micros(),
            traffic: Traffic::default(),
            serial: 0,
            reason: Cow::default(),
            events: Events::default(),
            inherited: false,
            stays: false,
            kills_nic: false,
            by_gain: false,
            wanted: false,
            given_up: false,
            closed: false,
            abandoned: false,
            outlives_agent: false,
            under_way: false,
            suggested: false,
            block,
        };
        connection.name_ends(local, peer);
        connection
    }

    /// Its number in its session.
    pub fn number(&self) -> u32 {
        self.block.number()
    }

    /// Whether it is wanted on the NIC: the last request or rule was for that.
    pub fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Notes whether it is wanted on the NIC. That outlives NIC and agent.
    pub fn want(&mut self, wanted: bool) {
        self.wanted = wanted;
        self.block.note_wish(wanted);
    }

    /// Whether it may be moved to the NIC although nobody asks for that now. `flips`: its group has random moves.
    pub fn goes_by_itself(&self, flips: bool) -> bool {
        !self.stays && (flips || self.wanted)
    }

    /// Takes over what the last agent has noted.
    pub fn inherit_wish(&mut self) {
        self.wanted = self.block.wish();
    }

    /// Notes how its socket names the ends of its 4-tuple.
    fn name_ends(&mut self, local: SocketAddr, peer: SocketAddr) {
        let plain: (SocketAddr, SocketAddr) = (self.flow.local.into(), self.flow.remote.into());
        self.mapped = (local, peer) != plain && (local, peer) == (mapped(plain.0), mapped(plain.1));
        if !self.mapped && (local, peer) != plain {
            self.extra().addresses = Some(Box::new((local, peer)));
        } else if let Some(extra) = &mut self.extra {
            extra.addresses = None;
        }
    }

    /// Whether the kernel has refused to take it back, and is not to be asked again yet.
    pub fn was_refused_just_now(&self, now: u64) -> bool {
        self.extra.as_ref().and_then(|extra| extra.refused).is_some_and(|refused| refused.is_recent(now))
    }

    /// Notes that the kernel has not refused to take it back, or is not asked again.
    pub fn was_taken_back(&mut self) {
        if let Some(extra) = &mut self.extra {
            extra.refused = None;
        }
    }

    /// Notes that the kernel has refused to take it back. Returns whether it is asked again, a moment later: what is
    /// held of the connection waits, and its program, too.
    pub fn tries_again(&mut self, why: &str, now: u64) -> bool {
        let is_over = self.closed || self.abandoned || self.outlives_agent || self.is_to_be_forgotten();
        self.extra().refused = Refused::again(self.extra().refused, !is_over, now);
        self.reason = format!("the kernel refuses to take it back, and is asked again: {why}").into();
        self.extra().refused.is_some()
    }

    /// The local address and the peer's, as its socket names them.
    fn ends(&self) -> (SocketAddr, SocketAddr) {
        let plain: (SocketAddr, SocketAddr) = (self.flow.local.into(), self.flow.remote.into());
        match self.extra.as_ref().and_then(|extra| extra.addresses.as_deref()) {
            Some(both) => *both,
            None if self.mapped => (mapped(plain.0), mapped(plain.1)),
            None => plain,
        }
    }

    /// The address of its socket's end.
    pub fn local(&self) -> SocketAddr {
        self.ends().0
    }

    /// The address of its peer, as its socket names it.
    pub fn peer(&self) -> SocketAddr {
        self.ends().1
    }

    /// Whether the NIC is opening it, and no call is made on its socket for that.
    pub fn is_only_opening(&self) -> bool {
        self.opening && self.call().is_none()
    }

    /// What few connections have, to change it.
    pub fn extra(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }

    /// Frees [`Extra`] if nothing in it has to be kept. Called whenever its move has come to a rest.
    pub fn drop_empty_extra(&mut self) {
        self.extra.take_if(|extra| extra.is_empty());
    }

    /// A copy of its state machine.
    pub fn machine(&self) -> Move {
        self.moving().cloned().unwrap_or_else(|| Move::resting_at(self.step))
    }

    pub fn set_machine(&mut self, machine: Move) {
        self.step = machine.step();
        if machine.rests_at().is_none() {
            self.extra().machine = Some(Box::new(machine));
        } else if let Some(extra) = &mut self.extra {
            extra.machine = None;
        }
    }

    /// Its state machine, while that does not rest.
    fn moving(&self) -> Option<&Move> {
        self.extra.as_ref()?.machine.as_deref()
    }

    pub fn step(&self) -> Step {
        self.step
    }

    pub fn goal(&self) -> Option<Goal> {
        self.moving().and_then(Move::goal)
    }

    /// Whether it is on its way to the kernel, or goes there next.
    pub fn is_leaving(&self) -> bool {
        self.moving().is_some_and(Move::is_leaving)
    }

    /// Whether its move waits for something.
    pub fn waits(&self) -> bool {
        self.moving().is_some_and(Move::waits)
    }

    pub fn barrier(&self) -> Option<Barrier> {
        self.moving().and_then(Move::barrier)
    }

    /// Whether the NIC has been sent a command that it has not answered.
    pub fn awaits_answer(&self) -> bool {
        self.moving().is_some_and(|machine| machine.awaits().is_some())
    }

    /// Takes what its move goes on with.
    pub fn take_carried(&mut self) -> Carried {
        let carried = self.extra.as_mut().and_then(|extra| extra.carried.take());
        carried.map(|carried| *carried).unwrap_or_default()
    }

    /// Takes the requests that wait for the end of its move.
    pub fn take_waiting(&mut self) -> Waiting {
        self.extra.as_mut().map(|extra| std::mem::take(&mut extra.waiting)).unwrap_or_default()
    }

    /// Whether its program has closed it, and it is removed after its move.
    pub fn is_to_be_forgotten(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| extra.waiting.then.iter().any(|(then, _)| matches!(then, Then::Forget(_))))
    }

    /// Whether an operation is to be done after its move.
    pub fn is_waited_for(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| !extra.waiting.then.is_empty())
    }

    /// Whether its program has closed it, or it is on its way to the kernel or to other memory: its socket need not be
    /// what it was.
    pub fn is_being_closed(&self) -> bool {
        self.closed || self.is_waited_for() || self.goal().is_some()
    }

    /// The call that is made on its socket for its move.
    pub fn call(&self) -> Option<&Call> {
        self.extra.as_ref()?.call.as_deref()
    }

    pub fn wants(&self) -> Wants {
        self.extra.as_ref().map(|extra| extra.wants).unwrap_or_default()
    }

    pub fn growing(&self) -> Option<&Growing> {
        self.extra.as_ref()?.growing.as_ref()
    }

    /// The peer's FIN that is on its way to the kernel's socket.
    pub fn fin(&self) -> Option<&ReplayedFin> {
        self.extra.as_ref()?.fin.as_deref()
    }

    pub fn expect_fin(&mut self, fin: Option<ReplayedFin>) {
        if fin.is_some() || self.fin().is_some() {
            self.extra().fin = fin.map(Box::new);
        }
    }

    pub fn stay(&self) -> Option<&Stay> {
        self.extra.as_ref()?.stay.as_deref()
    }

    pub fn forget_stay(&mut self) {
        if let Some(extra) = &mut self.extra {
            extra.stay = None;
        }
    }

    pub fn unproved(&self) -> Option<(u64, u64)> {
        self.extra.as_ref()?.unproved
    }

    pub fn must_return(&self) -> Option<&'static str> {
        self.extra.as_ref()?.must_return
    }

    pub fn take_must_return(&mut self) -> Option<&'static str> {
        self.extra.as_mut()?.must_return.take()
    }

    /// Returns its descriptor, or a refusal while the agent has none.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Refusal> {
        self.fd.as_ref().map(AsFd::as_fd).ok_or(Refusal::Elsewhere)
    }

    /// Checks that a descriptor is that of its socket, and that this has the connection which was registered. Whoever
    /// has a duplicate can disconnect the socket at any time, and connect it elsewhere; another socket may have its
    /// 4-tuple then.
    ///
    /// # Errors
    /// [`Refusal::Swapped`], or [`Refusal::Closed`] if the socket has no connection at all.
    pub fn check_socket(&self, fd: BorrowedFd<'_>) -> Result<(), Refusal> {
        self.identity().check(fd)
    }

    /// By what its socket is known.
    pub fn identity(&self) -> Identity {
        Identity { cookie: self.cookie, ends: self.ends() }
    }

    /// Its descriptor, if that still is its socket's ([`Connection::check_socket`]). Asked for right before anything is
    /// done by 4-tuple for the socket's sake.
    ///
    /// # Errors
    /// Those, or as [`Connection::fd`].
    pub fn own_fd(&self) -> Result<BorrowedFd<'_>, Refusal> {
        let fd = self.fd()?;
        self.check_socket(fd).map(|()| fd)
    }

    /// Whether a move waits for the program to leave an operation. An attacher is in none while it asks for a move.
    pub fn waits_for_program(&self) -> bool {
        !self.attached && !self.abandoned
    }

    /// For how many microseconds more no move of it may begin; 0 if one may now.
    pub fn put_off_for(&self) -> u64 {
        self.moving().map_or(0, |machine| machine.put_off_for(events::monotonic_micros()))
    }

    pub fn stage(&self) -> Stage {
        Stage::of(self.step, self.goal())
    }

    /// Returns what is needed of a connection on the NIC when it leaves that. None if the journal is damaged.
    pub fn exported(&self, nic_memory: &Region) -> Option<Exported> {
        self.on_nic.as_deref()?;
        match self.handoff() {
            Some(handoff) => Some(handoff.exported.clone()),
            None => journal::exported(nic_memory, self.cid?).filter(|exported| exported.image.flow == self.flow),
        }
    }

    /// Notes that its bytes are in session memory, and with what it is handed off.
    pub fn enter_nic(&mut self, on_nic: OnNic, handoff: Handoff) {
        self.on_nic = Some(Box::new(on_nic));
        self.extra().unheld_since = None;
        self.extra().handoff = Some(Box::new(handoff));
    }

    /// Undoes [`Self::enter_nic`], and returns its memory.
    pub fn leave_nic(&mut self) -> Option<Memory> {
        if let Some(extra) = &mut self.extra {
            extra.handoff = None;
        }
        self.on_nic.take().map(|on_nic| on_nic.memory())
    }

    /// What it is handed off with, until the NIC has it.
    pub fn handoff(&self) -> Option<&Handoff> {
        self.extra.as_ref()?.handoff.as_deref()
    }

    /// Returns its state on the NIC, while the NIC runs it.
    pub fn running(&mut self) -> Option<&mut OnNic> {
        if self.step.custody() == Custody::Nic { self.on_nic.as_deref_mut() } else { None }
    }

    pub fn place(&self) -> Place {
        match self.stage() {
            Stage::Nic | Stage::Ended => Place::Nic,
            Stage::Kernel | Stage::Offloading => Place::Kernel,
        }
    }
}

/// Why a connection moves for no other reason; whether nobody asked for it now.
pub(crate) fn usual_cause(connection: &Connection, unasked: bool) -> &'static str {
    match (unasked, connection.by_gain, connection.wanted) {
        // Whoever asks for it by hand does not ask that it be hot. An attacher is asked by the agent.
        (_, _, true) if connection.block.hot_from() > 0 => BY_HEAT,
        (true, true, _) => BY_GAIN,
        (true, false, false) => AT_RANDOM,
        _ => ASKED_TO,
    }
}

/// Why a connection that has moved did, as far as that is known before those who asked for it are answered.
fn cause(connection: &Connection) -> &str {
    let waiting = connection.extra.as_ref().map(|extra| &extra.waiting);
    let (then, askers) = waiting.map_or((&[][..], true), |waiting| (&waiting.then[..], waiting.askers.is_empty()));
    let given_back = then.iter().find_map(|(then, _)| match then {
        Then::GiveBack { reason, .. } if !reason.is_empty() => Some(reason.as_str()),
        Then::Forget(_) => Some(CLOSED),
        _ => None,
    });
    given_back.or(connection.must_return()).unwrap_or(usual_cause(connection, askers && then.is_empty()))
}

/// Records the end of a move in the connection's events, and counts it. `began`, `now`: microseconds of the
/// monotonic clock.
pub(crate) fn record(
    connection: &mut Connection,
    (user, program): (u32, &str),
    (counts, reasons): (&mut Counts, &mut Reasons),
    conclusion: &Conclusion,
    (began, now): (u64, u64),
) {
    let on_nic = connection.place() == Place::Nic;
    let (still_since, uncounted) = connection.extra.as_mut().map_or_else(Default::default, |extra| extra.take_counts());
    counts.note_carried(user, program, uncounted);
    match conclusion {
        Conclusion::Recovered => counts.note_still((user, program), Still::Recovery, now.saturating_sub(began)),
        // One that the NIC has made did not move.
        Conclusion::Moved if still_since != 0 => {
            let still = if on_nic { Still::ToNic } else { Still::ToKernel };
            counts.note_still((user, program), still, now.saturating_sub(still_since));
        }
        _ => {}
    }
    let nic = connection.cid.map(|cid| cid.nic() as u8);
    let made = connection.made_by == Place::Nic && connection.made == 0;
    let (what, counted, reason) = match conclusion {
        Conclusion::Moved if on_nic && made => (What::Made, Some(Counted::ToNic), None),
        Conclusion::Moved if on_nic => (What::ToNic, Some(Counted::ToNic), Some(cause(connection).into())),
        Conclusion::Moved => (What::ToKernel, Some(Counted::Returned), Some(cause(connection).into())),
        Conclusion::Recovered if connection.kills_nic => (What::ToKernel, Some(Counted::Returned), Some(KILLS_NIC.into())),
        Conclusion::Recovered if connection.events.last() == Some(What::AgentDied) => {
            (What::ToKernel, Some(Counted::Returned), Some(AGENT_DIED.into()))
        }
        Conclusion::Recovered => (What::ToKernel, Some(Counted::Returned), Some(NIC_DIED.into())),
        Conclusion::Lost(refusal, _) => (What::Lost, Some(Counted::Lost), Some(refusal.to_string())),
        Conclusion::Stays(Refusal::Ended) if connection.given_up => {
            (What::Lost, Some(Counted::Lost), Some(connection.reason.to_string()))
        }
        Conclusion::Stays(Refusal::Ended) => (What::Ended, None, None),
        // Recorded where it takes effect: most of these are about memory that stays the same.
        Conclusion::Grown => return,
        // Somebody else was faster, or it is tried again by itself in a moment.
        Conclusion::Stays(Refusal::CalledOff | Refusal::Attaching | Refusal::Searching) => return,
        Conclusion::Stays(refusal) if on_nic => (What::StayedOnNic, Some(Counted::Refused), Some(refusal.to_string())),
        Conclusion::Stays(refusal) => (What::StayedInKernel, Some(Counted::Refused), Some(refusal.to_string())),
    };
    if let Some(counted) = counted {
        counts.note(user, program, counted, reason.as_deref().unwrap_or_default());
    }
    let reason = reason.map(|reason: String| reasons.shared(&reason));
    connection.events.note(now, what, nic, reason, now.saturating_sub(began));
}
