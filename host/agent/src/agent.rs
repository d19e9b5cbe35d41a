//! The agent's event loop: serves requests of programs and tools, handles the NIC's messages and advances moves.

mod hardware;
mod listing;
mod messages;
mod nic_messages;
mod opening;
mod requests;

use self::hardware::{devices, inherited_as, mirrors, of_further_nics};
use crate::addresses::Addresses;
use crate::adoption::Inherited;
use crate::answers::After;
use crate::calls::Calls;
use crate::captures::Captures;
use crate::cgroups::Cgroups;
use crate::changes::Watched;
use crate::chaos::Chaos;
use crate::connection::{Asker, Connection, usual_cause};
use crate::counts::Counts;
use crate::datagrams::Datagrams;
use crate::earlier::Earlier;
use crate::events::Reasons;
use crate::ground::{Claims, Ground, Shape};
use crate::group::Groups;
use crate::guards::Guards;
use crate::holders::Searches;
use crate::known::Known;
use crate::listening::Listeners;
use crate::looks::Looks;
use crate::moves::{Moves, excuse_what_was_missed};
use crate::nic::{Hardware, NicProcess};
use crate::session::{OpenSession, Session};
use crate::settings::AgentSettings;
use crate::slab::Slab;
use crate::tracker::Tracker;
use anyhow::{Context, Result};
use baton_abi::layout::{Owner, block, nic};
use baton_core::{Key, Share, Stage, Timers, Users, Watch};
use baton_linux::control::{Channel, Listener, MOST_RECEIVED, PeerChannel};
use baton_linux::events::{Doorbell, Poller, Trigger, monotonic_micros};
use baton_linux::foreign;
use baton_linux::netlink::Netlink;
use baton_linux::{interface, netlink, process, rtnetlink, settings, starter};
use baton_log::{debug, info, warning};
use baton_moves::Refusal;
use baton_protocol::keeper::{AGENT_NAME, Kept};
use baton_protocol::nic::{Descriptor, NicSettings, ToNic};
use baton_protocol::program::{Opening, Reply, Statistics};
use baton_shm::{Pulse, Region};
use baton_steering::{Steering, messages_flow};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const LISTENER: u64 = u64::MAX;
const NIC_BELL: u64 = u64::MAX - 1;
const NIC_CHANNEL: u64 = u64::MAX - 2;
const KEEPER: u64 = u64::MAX - 3;
const ROUTES: u64 = u64::MAX - 4;
const RULES: u64 = u64::MAX - 5;
const POLICIES: u64 = u64::MAX - 6;
const TOO_BIG: u64 = u64::MAX - 7;
const TRAFFIC: u64 = u64::MAX - 8;
const SIGNALS: u64 = u64::MAX - 9;
const RESOLUTION: u64 = u64::MAX - 10;
const CALLS: u64 = u64::MAX - 11;

/// Time that the last reports of an agent that ends may take.
const REPORT_LIMIT: Duration = Duration::from_secs(5);

/// Number of the first steering descriptor that an agent beside the kernel inherits. The steering's follow those of
/// [`Descriptor`]; then comes the link of the injector's program, and for each further NIC the host's and the wire's
/// socket, its memory and its doorbell.
pub const STEERING: i32 = Descriptor::Injector as i32 + 1;

pub(crate) struct Agent {
    pub settings: AgentSettings,
    /// Of each NIC, by its number.
    pub hardware: Vec<Hardware>,
    pub nics: Vec<NicProcess>,
    pub sessions: Slab<Session>,
    pub moves: Moves,
    pub statistics: Statistics,
    /// What is counted of each program and NIC.
    pub counts: Counts,
    /// What earlier NICs have counted.
    pub earlier: Earlier,
    /// The reasons of all events.
    pub reasons: Reasons,
    /// Its start, in microseconds of the monotonic clock.
    pub started: u64,
    pub(crate) chaos: Chaos,
    pub groups: Groups,
    pub schedule: Timers<Key>,
    /// Times at which failed moves are retried.
    pub retries: Timers<Key>,
    /// What it may use of a processor for random moves.
    pub share: Share,
    pub serials: u64,
    pub watched: Watched,
    pub cgroups: Cgroups,
    pub guards: Guards,
    pub known: Known,
    pub tracker: Tracker,
    pub searches: Searches,
    pub looks: Looks,
    pub watch: Watch,
    /// Its sign of life, for the keeper.
    pub pulse: Pulse,
    pub users: Users,
    pub calls: Calls,
    pub listeners: Listeners,
    pub datagrams: Datagrams,
    pub addresses: Addresses,
    pub captures: Captures,
    /// Sessions to be ended at the end of this round, each with the rule that its program broke.
    pub cut_off: Vec<(u32, &'static str)>,
    /// Sessions that have ended, with connections that are on their way to the kernel.
    leaving: Vec<u32>,
    pub shape: Shape,
    /// Shutdown was requested: connections stay in the kernel.
    pub draining: bool,
    pub keeper: Channel,
    pub routes: Netlink,
    pub diagnosis: Netlink,
    poller: Poller,
}

/// Runs an agent until the keeper closes its channel.
///
/// # Errors
/// If something that it needs is missing; the error names it.
pub fn run() -> Result<()> {
    let keeper = Channel::from_fd(inherited_as(Descriptor::Channel)?);
    let settings = settings::receive::<AgentSettings>(&keeper, baton_protocol::VERSION).context("the settings of its keeper")?;
    if let Some(core) = settings.core {
        process::pin(0, core);
    }
    // Who lists Batons finds it by this name. Without /proc nobody looks.
    let _ = process::set_name(AGENT_NAME);
    // A program waits for the agent while its connection moves, or is registered: with many threads that have the same
    // right to the processors that would be for seconds.
    process::raise_priority_in_own_session();
    let descriptors = process::raise_descriptor_limit();
    // Signals that ask for the end arrive through this descriptor, so that the agent shuts down in order. The NIC
    // inherits the blocked signals; it ends with its agent.
    let signals = process::signal_descriptor(&process::ENDING)?;
    starter::begin().context("the thread that starts NICs")?;
    let first = Hardware {
        host: inherited_as(Descriptor::Host)?,
        wire: inherited_as(Descriptor::Wire)?,
        card: (0..settings.nic.card_descriptors() as i32)
            .map(|at| process::inherited(Descriptor::Injector as i32 + at).context("a descriptor of the card"))
            .collect::<Result<_>>()?,
        memory: Arc::new(Region::map(inherited_as(Descriptor::Memory)?)?),
        nic_bell: Doorbell::from_fd(inherited_as(Descriptor::NicBell)?),
        agent_bell: Doorbell::from_fd(inherited_as(Descriptor::AgentBell)?),
    };
    let routes = rtnetlink::open()?;
    let diagnosis = Netlink::open(netlink::SOCK_DIAG)?;
    let watched = Watched::open().context("listening to changes of routes")?;
    let mut inherited = Inherited::receive(&keeper)?;
    let hardware = of_further_nics(first, settings.nics)?;
    for card in &hardware {
        nic::many_slots(settings.nic.slots).for_each(|slots| card.memory.advise_huge(slots));
    }
    let shape = match &settings.interface {
        Some(name) => {
            let interface = rtnetlink::link(&routes, name).with_context(|| format!("the NIC's interface {name:?}"))?;
            Shape::Inline { interface: interface.index }
        }
        None => {
            let steering_at = |at| process::inherited(STEERING + at).context("a descriptor of the steering");
            let injector = inherited_as(Descriptor::Injector)?;
            let steering = (0..baton_steering::DESCRIPTORS as i32).map(steering_at).collect::<Result<Vec<_>>>()?;
            let steering = Steering::from_fds(steering.try_into().ok().context("the descriptors of the steering")?);
            let name = interface::tap_name(injector.as_fd()).context("the injector's name")?;
            let index = rtnetlink::link(&routes, &name).context("the injector")?.index;
            let injector_link = steering_at(baton_steering::DESCRIPTORS as i32)?;
            Shape::Beside {
                steering,
                mirrors: mirrors(&hardware).context("the packet sockets for what the kernel sends")?,
                devices: Box::new(devices(&hardware, inherited.devices(), index, &settings, &routes)?),
                injector,
                claims: Claims::default(),
                _injector_link: injector_link,
            }
        }
    };
    let start = |(number, hardware): (usize, &Hardware)| {
        let of_nic = settings.of_nic(number);
        let offloads = inherited.offloads(number).unwrap_or(of_nic.offloads);
        NicProcess::start(hardware, &shape, &NicSettings { offloads, ..of_nic })
    };
    let nics = hardware.iter().enumerate().map(start).collect::<Result<Vec<_>>>()?;
    let listener = Listener::bind(&settings.socket)?;
    let poller = Poller::new()?;
    poller.add(listener.as_fd(), LISTENER, Trigger::Readable)?;
    poller.add(hardware[0].agent_bell.as_fd(), NIC_BELL, Trigger::Readable)?;
    poller.add(keeper.as_fd(), KEEPER, Trigger::Readable)?;
    for nic in &nics {
        poller.add(nic.channel_fd(), NIC_CHANNEL, Trigger::Readable)?;
    }
    poller.add(signals.as_fd(), SIGNALS, Trigger::Readable)?;
    let calls = Calls::new()?;
    poller.add(calls.bell(), CALLS, Trigger::Readable)?;
    poller.add(watched.routes.as_fd(), ROUTES, Trigger::Readable)?;
    if let Some(rules) = &watched.rules {
        poller.add(rules.as_fd(), RULES, Trigger::Readable)?;
    }
    let guards = Guards::new();
    if let Some(changes) = guards.policy_changes() {
        poller.add(changes.as_fd(), POLICIES, Trigger::Readable)?;
    }
    if let Some(changes) = guards.traffic_changes() {
        poller.add(changes.as_fd(), TRAFFIC, Trigger::Readable)?;
    }
    for listener in &watched.too_big {
        poller.add(listener.as_fd(), TOO_BIG, Trigger::Readable)?;
    }
    let statistics = Statistics { nic_starts: settings.nics as u32, ..Statistics::default() };
    let chaos = Chaos::new(settings.crash, hardware[0].memory.clone());
    let users = Users::new(settings.limits, process::user(), settings.nics, (descriptors, MOST_RECEIVED as u64));
    let (groups, schedule, moves) = (Groups::default(), Timers::default(), Moves::new(settings.choose, &settings.measured));
    let pulse = Pulse::begin(hardware[0].memory.clone(), nic::AGENT_PULSE, process::thread());
    let watch = Watch::new(nics.len());
    let mut agent = Agent {
        settings,
        hardware,
        nics,
        sessions: Slab::default(),
        moves,
        statistics,
        counts: Counts::default(),
        earlier: Earlier::default(),
        reasons: Reasons::default(),
        started: monotonic_micros(),
        chaos,
        groups,
        schedule,
        retries: Timers::default(),
        share: Share::default(),
        serials: 0,
        watched,
        cgroups: Cgroups::default(),
        guards,
        known: Known::default(),
        tracker: Tracker::default(),
        searches: Searches::default(),
        looks: Looks::default(),
        watch,
        pulse,
        cut_off: Vec::new(),
        leaving: Vec::new(),
        listeners: Listeners::new(),
        datagrams: Datagrams::new(),
        addresses: Addresses::default(),
        captures: Captures::default(),
        users,
        calls,
        shape,
        draining: inherited.draining(),
        keeper,
        routes,
        diagnosis,
        poller,
    };
    agent.take_over(inherited)?;
    agent.follow_devices();
    // Notifies the keeper that programs may connect.
    agent.keep(&Kept::Ready, &[listener.as_fd()]);
    if let Err(error) = agent.main_loop(&listener, &signals) {
        // The next agent continues from what the keeper and the journal hold.
        agent.nics.iter_mut().for_each(NicProcess::end);
        return Err(error);
    }
    // From here on connecting to the socket fails.
    drop(listener);
    agent.give_everything_back();
    // The last reports.
    foreign::finish(REPORT_LIMIT);
    if agent.settings.lingers
        && let Some(directory) = agent.settings.socket.parent()
    {
        // The directory was made for this agent's socket alone, and a keeper that was killed cannot remove it.
        let _ = std::fs::remove_dir(directory);
    }
    Ok(())
}

impl Agent {
    /// Runs the loop until the keeper's channel is closed.
    ///
    /// # Errors
    /// Those that no client, session or connection can cause: no NIC can be started, or epoll fails.
    fn main_loop(&mut self, listener: &Listener, signals: &OwnedFd) -> Result<()> {
        let mut tokens = Vec::new();
        loop {
            let watch = Duration::from_micros(self.watch.due().saturating_sub(monotonic_micros()));
            let polls = [self.cgroups.wait(), self.looks.wait(), self.tracker.wait(), Some(watch), self.answers_wait()];
            let limits = [self.moves.wait(), self.flips_wait(), self.addresses.wait(), self.fetch_wait()];
            let late = self.nics.iter().filter_map(NicProcess::late_wait).min();
            let waits = [self.unsent_wait(), self.searches.wait(), late];
            let limit = limits.into_iter().chain(polls).chain(waits).flatten().min();
            self.pulse.set_asleep(true);
            let waited = self.poller.wait(limit, &mut tokens);
            self.pulse.set_asleep(false);
            self.pulse.beat();
            waited?;
            baton_log::settle();
            excuse_what_was_missed(self);
            // First: an answer that is there is not late, however long this process did not run.
            self.handle_nic_messages();
            // Before requests that came later: they find what it leaves, in whatever order epoll reports both.
            if tokens.contains(&NIC_CHANNEL) && !self.recover_from_deaths(true)? {
                return Ok(());
            }
            if tokens.contains(&RESOLUTION) || self.addresses.wait() == Some(Duration::ZERO) {
                self.poll_addresses();
            }
            for token in std::mem::take(&mut tokens) {
                match token {
                    LISTENER => {
                        let admitted = listener.accept().map_err(Into::into).and_then(|channel| self.admit(channel));
                        // The client gets the reason, if it can be sent one.
                        if let Err(error) = admitted {
                            info!([] "a client is turned away: {error:#}");
                        }
                    }
                    NIC_BELL => self.hardware[0].agent_bell.clear(),
                    KEEPER => match self.keeper.try_receive::<Kept>() {
                        Ok((Kept::Ending, _)) => self.drain(),
                        Ok((Kept::WasStopped, _)) => self.nics.iter().for_each(NicProcess::resume),
                        Ok(_) => {}
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(_) => return Ok(()),
                    },
                    SIGNALS => {
                        process::take_signals(signals);
                        self.drain();
                    }
                    ROUTES => self.routes_changed(),
                    RULES => self.rules_changed(),
                    POLICIES => self.policies_changed(),
                    TRAFFIC => self.filters_changed(),
                    TOO_BIG => self.packets_were_too_big(),
                    // Their frames and deaths were dealt with above.
                    RESOLUTION | NIC_CHANNEL => {}
                    CALLS => self.finish_calls(),
                    session => {
                        let _ = self.serve(session as u32);
                        self.clear_attended();
                        // A connection that stands still waits for one request at most.
                        self.handle_nic_messages();
                    }
                }
            }
            self.handle_nic_messages();
            self.settle_answers();
            self.programs_changed();
            self.look();
            self.renew_tracked();
            self.work_on_moves();
            self.clear_attended();
            self.end_what_is_cut_off();
            self.remove_sessions();
            self.shape.forget_handshakes();
            if !self.recover_from_deaths(true)? {
                return Ok(());
            }
            excuse_what_was_missed(self);
            self.watch_nics()?;
        }
    }

    /// Refuses a new descriptor `fd` that would leave too few (plus `besides`) descriptors free, or that is for
    /// something of a session's whose user has its share.
    pub(crate) fn has_room_for(&self, session: Option<u32>, fd: BorrowedFd<'_>, besides: u64) -> Result<(), Refusal> {
        let left = self.users.descriptors_left(fd.as_raw_fd() as u64, besides)?;
        session.map_or(Ok(()), |session| self.users.may_take(self.user_of(session), left))
    }

    /// The user who has opened a session; if there is none, a number that nobody has.
    pub(crate) fn user_of(&self, session: u32) -> u32 {
        self.sessions.get(session as usize).and_then(Option::as_ref).map_or(u32::MAX, |session| session.user)
    }

    /// Makes a session of a client's, unless its user may have no other one: then the client gets the reason. Returns
    /// whether it has done so.
    fn admit(&mut self, channel: PeerChannel) -> Result<bool> {
        let number = self.sessions.vacant();
        let mut session = Session::new(channel)?;
        let left = match self.users.descriptors_left(session.channel.as_fd().as_raw_fd() as u64, 0) {
            Ok(left) => left,
            Err(why) => {
                session.turn_away(why.to_string());
                return Err(why.into());
            }
        };
        if foreign::is_stuck(session.user) {
            session.turn_away(foreign::STUCK.into());
            return Ok(false);
        }
        if let Err(why) = self.users.connects(session.user, left, foreign::unclosed(session.user)) {
            session.turn_away(why);
            return Ok(false);
        }
        session.connections.count_as(self.users.take(session.user, 0));
        self.watch(number, &session)?;
        self.keep(&Kept::Session(number), &[session.channel.as_fd()]);
        self.sessions.put(number, session);
        Ok(true)
    }

    /// Admits a client whose control connection another process received and passes on. Returns whether it is served.
    fn admit_another(&mut self, number: u32, channel: PeerChannel) -> Result<bool> {
        requests::only_ours(self.rights_of(number), "bring others")?;
        self.admit(channel)
    }

    /// Adds a session's control connection to the poller.
    pub(crate) fn watch(&self, number: u32, session: &Session) -> Result<()> {
        Ok(self.poller.add(session.channel.as_fd(), u64::from(number), Trigger::Readable)?)
    }

    /// Adds a socket for frames about one of the NIC's own addresses to the poller.
    pub(crate) fn watch_resolution(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.poller.add(socket, RESOLUTION, Trigger::Readable)
    }

    /// Sends the keeper a state change: something to hold for the next agent, or to drop.
    pub(crate) fn keep(&self, kept: &Kept, descriptors: &[BorrowedFd<'_>]) {
        if let Err(error) = self.keeper.send(kept, descriptors)
            // Without a keeper there is no next agent.
            && !matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
        {
            warning!(
                [] "the keeper does not receive {kept:?} ({error}), which would be lost with this agent";
                "restart Baton when its programs can do without the NIC for a moment"
            );
        }
    }

    /// Records that session `number` is being served: if the agent dies now, that session is taken to be the cause.
    pub(crate) fn attend(&self, number: u32) {
        self.hardware[0].memory.word32(nic::ATTENDED).store(number.wrapping_add(1), Ordering::Relaxed);
    }

    /// Records that no session is being served.
    pub(crate) fn clear_attended(&self) {
        self.hardware[0].memory.word32(nic::ATTENDED).store(0, Ordering::Relaxed);
    }

    /// As [`Agent::split`], with the NIC of a connection of the session, if it has one.
    pub(crate) fn split_at(&mut self, session: u32, number: u32) -> Option<(Ground<'_>, &mut Session)> {
        let nic = self.nic_of(session, number);
        let (mut ground, entry) = self.split(session)?;
        ground.choose(nic.unwrap_or(0));
        Some((ground, entry))
    }

    /// Borrows what a move needs of the agent, and session `session`. The NIC is the first until another one is chosen.
    pub(crate) fn split(&mut self, session: u32) -> Option<(Ground<'_>, &mut Session)> {
        // Each connection that is worked on is progress: there may be very many in a round.
        self.pulse.beat();
        let session = self.sessions.get_mut(session as usize)?.as_mut()?;
        let ground = Ground {
            nics: &mut self.nics,
            chosen: 0,
            nic_memory: &self.hardware[0].memory,
            host: &self.hardware[0].host,
            hardware: &self.hardware,
            shape: &mut self.shape,
            chaos: &self.chaos,
            routes: &self.routes,
            diagnosis: &self.diagnosis,
            guards: &mut self.guards,
            known: &mut self.known,
            tracker: &mut self.tracker,
            cgroups: &mut self.cgroups,
            searches: &mut self.searches,
            changes: &self.watched.routes,
            latest: self.serials,
            alone: self.moves.is_quiet(),
            process: session.process,
            user: session.user,
            calls: &self.calls,
        };
        Some((ground, session))
    }

    /// Counts a move that ended with `result`, records why on its connection, and answers the `askers`.
    pub(crate) fn note_end(&mut self, session: u32, number: u32, result: Result<(), Refusal>, askers: Vec<Asker>) {
        let reply = match &result {
            Ok(()) => {
                self.statistics.moves += 1;
                if self.looks.begin() {
                    self.find_devices_without_nic();
                }
                Reply::Done
            }
            Err(refusal) => {
                let transient = refusal.is_transient();
                self.statistics.deferred += u64::from(transient);
                self.statistics.full += u64::from(*refusal == Refusal::Full);
                Reply::Stayed { reason: refusal.to_string(), transient }
            }
        };
        if let Some(Some(session)) = self.sessions.get_mut(session as usize)
            && let Some(Some(connection)) = session.connections.get_mut(number as usize)
        {
            let group = self.groups.get(session.opening.group);
            match &result {
                Ok(()) => {
                    connection.made += 1;
                    connection.since = monotonic_micros();
                    let usual = usual_cause(connection, askers.is_empty());
                    connection.reason = connection.take_must_return().unwrap_or(usual).into();
                    group.into_iter().for_each(|group| group.report.moves += 1);
                }
                Err(refusal) => {
                    connection.reason = refusal.to_string().into();
                    group.into_iter().for_each(|group| group.stayed(refusal));
                }
            }
        }
        for (asker, tag) in askers {
            self.answer(asker, tag, reply.clone(), &[]);
        }
    }

    /// Removes a connection that is in the kernel, has ended or cannot be restored, and returns the answer for its
    /// program.
    pub(crate) fn finish_forgetting(&mut self, session: u32, number: u32) -> Reply {
        self.give_up(session, number);
        let Some(connection) = self.take(session, number) else {
            // It was removed by an earlier request whose answer was lost.
            return Reply::Done;
        };
        connection.block.set_owner(Owner::Nobody);
        match connection.given_up {
            true => Reply::Failed { reason: connection.reason.into() },
            false => Reply::Done,
        }
    }

    /// Removes a connection because this agent ends: it is in the kernel, has ended, or is lost with the NIC. In the
    /// last two cases the block keeps its contents, from which the program sees what happened.
    fn let_go(&mut self, session: u32, number: u32) {
        let ended = self.stage(session, number) == Some(Stage::Ended);
        if let Some(connection) = self.connection(session, number) {
            connection.outlives_agent = true;
        }
        self.give_up(session, number);
        if let Some(connection) = self.take(session, number)
            && !ended
            && !connection.given_up
        {
            connection.block.set_owner(Owner::Nobody);
        }
    }

    fn take(&mut self, session: u32, number: u32) -> Option<Connection> {
        let entry = self.sessions.get_mut(session as usize)?.as_mut()?;
        let mut connection = entry.connections.remove(number)?;
        if let Some(extra) = &mut connection.extra {
            self.counts.note_carried(entry.user, &entry.opening.program, extra.take_counts().1);
        }
        connection.block.note_closed(false);
        if let Some(group) = self.groups.get(entry.opening.group) {
            group.forgotten(&connection);
        }
        let closed = connection.extra.as_mut().and_then(|extra| extra.closed.take());
        self.keep(&Kept::Forgotten(session, number), closed.as_ref().map(AsFd::as_fd).as_slice());
        if let (Some(closed), Some(socket)) = (closed, connection.fd.take()) {
            socket.close_before(closed);
        }
        Some(connection)
    }

    /// Ends a session. If its program is gone, its connections go to the kernel, which closes them as it would have,
    /// and the session is removed when they are there. With `ending` the agent ends and the program continues.
    pub(crate) fn end_session(&mut self, number: u32, ending: bool) {
        if !ending && self.sessions.get(number as usize).and_then(Option::as_ref).is_none_or(|session| session.ends) {
            return;
        }
        self.end_connections(number, ending);
        self.stop_listening(number, None);
        let _ = self.end_datagrams(number, None, false, None);
        self.forget_address_asker(number);
        if let Some(id) = self.captures.end(number) {
            self.nics.iter_mut().for_each(|nic| nic.request(ToNic::EndCapture(id), &[], None));
        }
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return };
        if !std::mem::replace(&mut session.ends, true) {
            let _ = self.poller.remove(session.channel.as_fd());
        }
        self.cut_off.retain(|(other, _)| *other != number);
        self.leaving.push(number);
        self.remove_sessions();
    }

    /// Removes sessions that have ended and have no connections any more, and whose numbers the NIC does not know any
    /// more.
    pub(crate) fn remove_sessions(&mut self) {
        for number in std::mem::take(&mut self.leaving) {
            let Some(Some(session)) = self.sessions.get(number as usize) else { continue };
            let idle = session.begun.is_none() && session.connections.iter().flatten().next().is_none();
            let opened = session.open.is_some();
            if !idle || !self.ask_to_forget(number) {
                self.leaving.push(number);
            } else if !opened {
                self.remove_session(number);
            }
        }
        for nic in 0..self.nics.len() {
            while let Some(number) = self.nics[nic].take_detached() {
                self.forgotten_by(nic, number);
            }
        }
    }

    /// Makes the NICs that serve a session forget it. Returns whether all have been asked.
    fn ask_to_forget(&mut self, number: u32) -> bool {
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return true };
        let Some(open) = &session.open else { return true };
        for nic in self.nics.iter_mut() {
            let bit = 1 << nic.number();
            let due = open.nics() & bit & !session.asked_to_forget != 0 && !nic.is_attaching(number);
            if due && nic.detach(number).is_ok() {
                session.asked_to_forget |= bit;
            }
        }
        session.asked_to_forget == open.nics()
    }

    /// Removes a session when the last NIC has forgotten it.
    fn forgotten_by(&mut self, nic: usize, number: u32) {
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return };
        session.forgotten |= 1 << nic & session.asked_to_forget;
        if session.open.as_ref().is_some_and(|open| session.forgotten == open.nics()) {
            self.remove_session(number);
        }
    }

    fn remove_session(&mut self, number: u32) {
        // The NIC may have been asked to forget one that could not be opened, and goes on.
        if self.sessions.get(number as usize).and_then(Option::as_ref).is_none_or(|session| !session.ends) {
            return;
        }
        let Some(session) = self.sessions.remove(number) else { return };
        let (user, opened) = (session.user, session.open.is_some());
        if opened {
            self.groups.left(session.opening.group);
            if let Some(messages) = &session.opening.messages {
                self.shape.unsteer(&messages_flow(messages.address.into()));
            }
            self.nics.iter_mut().for_each(|nic| nic.forget_session(number));
            debug!([session = number, user = user] "session {number} has ended");
        }
        session.end(|| self.keep(&Kept::Ended(number), &[]));
        self.users.leaves(user, opened);
    }

    /// Ends the sessions of programs that broke a rule. Their connections are restored to the kernel and remain the
    /// programs'.
    pub(crate) fn end_what_is_cut_off(&mut self) {
        while let Some((number, why)) = self.cut_off.pop() {
            if let Some(Some(session)) = self.sessions.get(number as usize) {
                warning!(
                    [session = number, user = session.user]
                    "process {} of user {} is cut off: {why}", session.process, session.user;
                    "its connections go on in the kernel; to have them on the NIC start it again"
                );
                self.end_session(number, false);
            }
        }
    }

    /// Removes all connections of a session and writes its group's report.
    fn end_connections(&mut self, number: u32, ending: bool) {
        let Some(Some(session)) = self.sessions.get(number as usize) else { return };
        let Opening { group, attacher, .. } = session.opening;
        for connection in 0..session.connections.len() as u32 {
            let Some(Some(session)) = self.sessions.get_mut(number as usize) else { return };
            let Some(Some(entry)) = session.connections.get_mut(connection as usize) else { continue };
            if !ending {
                entry.abandoned = true;
                entry.block.store(block::BUSY, 0);
            }
            if attacher {
                self.leave_attached(number, connection);
            } else if ending {
                self.let_go(number, connection);
            } else {
                let _ = self.forget(number, connection, (number, 0));
            }
        }
        self.groups.write(group, None);
    }

    /// Starts the next NIC in place of one that has died, and attaches its sessions to it. Frames do not flow yet.
    pub(crate) fn start_next_nic(&mut self, nic: usize) -> Result<()> {
        self.earlier.take_over(nic, self.settings.nic.workers, &self.hardware[nic].memory);
        let mut next = self.start_nic_patiently(nic)?;
        next.inherit_slots(&mut self.nics[nic]);
        let served = |open: &OpenSession| open.nics() & 1 << nic != 0;
        for (number, session) in self.sessions.iter_mut().enumerate() {
            if let Some(Session { open: Some(open), .. }) = session
                && nic == 0
            {
                // The program asks the next NIC for its hosts again.
                open.hosts.clear();
            }
            if let Some(Session { begun: Some(begun), .. }) = session {
                begun.nic_died(nic);
            }
            if let Some(Session { name, open: Some(open), opening, ends: false, .. }) = session
                && served(open)
                && let Err(error) = next.attach((number as u32, *name), open, opening)
            {
                // Its connections are restored to the kernel nevertheless, and stay there.
                warning!(
                    [nic = nic, session = number] "the NIC cannot have session {number}: {error:#}";
                    "its connections stay in the kernel; to have them on the NIC start its program again"
                );
            }
        }
        for (request, memory) in self.captures.requests(nic, None) {
            next.request(request, &[memory], Some(After::Report("a capture does not go on")));
        }
        self.poller.add(next.channel_fd(), NIC_CHANNEL, Trigger::Readable)?;
        self.nics[nic] = next;
        self.watch.started(nic);
        self.watch_host_tcp();
        self.statistics.nic_starts += 1;
        Ok(())
    }

    /// Adds the host's TCP to the poller, if there is one: its death is the NIC's.
    pub(crate) fn watch_host_tcp(&self) {
        for host_tcp in self.nics.iter().filter_map(NicProcess::host_tcp) {
            // It may be there already.
            let _ = self.poller.add(host_tcp.channel_fd(), NIC_CHANNEL, Trigger::Readable);
        }
    }

    /// Starts a NIC, retrying with doubling pauses: a lack of memory or processes may be temporary.
    fn start_nic_patiently(&mut self, nic: usize) -> Result<NicProcess> {
        self.pulse.set_asleep(true);
        let started = self.keep_starting(nic);
        self.pulse.set_asleep(false);
        started
    }

    fn keep_starting(&self, nic: usize) -> Result<NicProcess> {
        let mut pause = Duration::from_millis(10);
        loop {
            match NicProcess::start(&self.hardware[nic], &self.shape, self.nics[nic].settings()) {
                Err(error) if pause < Duration::from_secs(1) => {
                    warning!(
                        [nic = nic] "the next NIC does not start: {error:#}";
                        "it is tried again; free memory, processes or descriptors if the error names them"
                    );
                    std::thread::sleep(pause);
                    pause *= 2;
                }
                started => return started,
            }
        }
    }
}
