//! The attacher offloads connections of programs that run already and have no library of Baton. A program's sends are
//! redirected to a socket of the attacher's, and copied into session memory; bytes that the NIC receives go into the
//! program's receive queue.
//!
//! The program is stopped while one of its connections moves. Outside of moves only the program has its descriptors, so
//! closing one has its usual effect. If the attacher dies its connections are reset.
#![forbid(unsafe_code)]

mod batches;
mod memory;
mod moves;
mod relay;
mod searches;
mod target;
mod unfit;

use anyhow::{Context, Result};
use batches::{Stopped, Work};
use baton_abi::layout::session;
use baton_client::{Listener, Shared};
use baton_linux::events::{Poller, Trigger, monotonic_micros};
use baton_linux::freeze::Frozen;
use baton_linux::netlink::{self, Netlink};
use baton_linux::process;
use baton_protocol::program::{Answer, Ask, Flip, Opening, Reply, VERSION};
use baton_ring::Token;
use baton_steering::{SocketBypass, SocketEvent};
use memory::{Known, Pauses};
use relay::{Counting, Entry};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use target::Target;

/// Token of the attacher's one thread.
const ME: Token = 1;

const BELL: u64 = u64::MAX;
const CHANNEL: u64 = u64::MAX - 1;
const EVENTS: u64 = u64::MAX - 2;
const SIGNALS: u64 = u64::MAX - 3;
const TARGET: u64 = u64::MAX - 4;

/// Settings of an attacher.
#[derive(Clone, Debug)]
pub struct AttachSettings {
    /// Selects the connections to offload.
    pub target: Target,
    /// Bytes after which a later connection is moved.
    pub after: u32,
    /// Bytes per second that a connection has to carry to be on the NIC; 0 for all connections.
    pub hot_from: u32,
    /// Random moves there and back, if any.
    pub flip: Option<Flip>,
    /// The group of the sessions, from the agent; 0 for none.
    pub group: u64,
}

/// Figures of an attacher.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Connections that were registered with the agent.
    pub connections: u64,
    /// Moves made.
    pub moves: u64,
    /// Moves that did not take place, and connections that can never move, by cause.
    pub stayed: BTreeMap<String, u64>,
    /// Number of times that programs were stopped.
    pub pauses: u64,
    /// The median of the latest of these times, microseconds.
    pub pause_p50: u64,
    /// The 99th percentile.
    pub pause_p99: u64,
    /// The longest.
    pub pause_max: u64,
}

/// An attacher at work.
pub struct Attacher {
    settings: AttachSettings,
    shared: Arc<Shared>,
    notified: Arc<Mutex<Vec<u32>>>,
    bypass: SocketBypass,
    poller: Poller,
    signals: OwnedFd,
    target: Option<OwnedFd>,
    diagnosis: Netlink,
    entries: BTreeMap<u32, Entry>,
    by_cookie: BTreeMap<u64, u32>,
    /// Sockets that are registered, or are known not to be selected.
    known: Known,
    /// Processes that read sockets by splice(2).
    splicing: BTreeSet<u32>,
    /// State of the periodic check of sockets' modes.
    looks: unfit::Looks,
    counting: Counting,
    /// Work that waits until its process can be stopped.
    work: Work,
    /// The processes that are stopped now.
    frozen: Option<Stopped>,
    pauses: Pauses,
    next_tag: u32,
    /// Answers that arrived while another one was awaited.
    early_answers: Vec<Answer>,
    /// The agent did not accept a request in time, and has sent nothing since. Until it does, no program is stopped for
    /// a move.
    silent: bool,
    /// A signal has asked for the end, or the program has ended.
    ends: bool,
    /// Buffer for copies.
    piece: Vec<u8>,
    summary: Summary,
}

impl Attacher {
    /// Attaches to the programs; existing connections are moved now.
    ///
    /// # Errors
    /// If there is nothing to attach to, the caller may not attach, or this kernel lacks something; the message says
    /// what to do.
    pub fn attach(agent: &Path, settings: AttachSettings) -> Result<Attacher> {
        let processes = settings.target.processes();
        if let Some(absence) = settings.target.absence(&processes) {
            anyhow::bail!("{absence}");
        }
        // Without the right to stop a program the caller may not take its connections. A program that merely does not
        // stop now is tried again later.
        for process in &processes {
            match Frozen::freeze(&[*process]) {
                Err(error) if error.kind() != std::io::ErrorKind::TimedOut => return Err(explain(&settings.target, &error)),
                _ => {}
            }
        }
        let notified = Arc::new(Mutex::new(Vec::new()));
        let sink = notified.clone();
        let listener = Listener(Box::new(move |number| sink.lock().unwrap_or_else(PoisonError::into_inner).push(number)));
        let opening = Opening {
            version: VERSION,
            group: settings.group,
            program: settings.target.to_string(),
            attacher: true,
            fast_path: false,
            messages: None,
        };
        let shared = Arc::new(Shared::connect(agent, opening, listener)?);
        let after = if settings.flip.is_some() { 1 } else { settings.after.clamp(1, i32::MAX as u32) };
        let bypass = SocketBypass::new(session::MAX_CONNECTIONS as u32, after).context("the bypass of running programs")?;
        let poller = Poller::new()?;
        let signals = process::signal_descriptor(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])?;
        poller.add(shared.bell().as_fd(), BELL, Trigger::Readable)?;
        poller.add(bypass.events(), EVENTS, Trigger::Readable)?;
        poller.add(signals.as_fd(), SIGNALS, Trigger::Readable)?;
        {
            let channel = shared.channel().lock().unwrap_or_else(PoisonError::into_inner);
            poller.add(channel.as_fd(), CHANNEL, Trigger::Readable)?;
        }
        let target = match settings.target {
            Target::Process(number) => {
                let opened = process::open_process(number);
                Some(opened.map_err(|error| explain(&settings.target, &error))?)
            }
            _ => None,
        };
        if let Some(target) = &target {
            poller.add(target.as_fd(), TARGET, Trigger::Readable)?;
        }
        let mut attacher = Attacher {
            settings,
            shared,
            notified,
            bypass,
            poller,
            signals,
            target,
            diagnosis: Netlink::open(netlink::SOCK_DIAG)?,
            entries: BTreeMap::new(),
            by_cookie: BTreeMap::new(),
            known: Known::default(),
            splicing: BTreeSet::new(),
            looks: unfit::Looks::default(),
            counting: Counting::default(),
            work: Work::default(),
            frozen: None,
            pauses: Pauses::default(),
            next_tag: 2,
            early_answers: Vec::new(),
            silent: false,
            ends: false,
            piece: vec![0; relay::PIECE],
            summary: Summary::default(),
        };
        attacher.work.processes.extend(processes);
        attacher.work.begun = monotonic_micros();
        while !attacher.ends && attacher.is_starting() {
            attacher.round()?;
        }
        Ok(attacher)
    }

    /// Number of connections on the NIC, and of all registered ones.
    pub fn connections(&self) -> (usize, usize) {
        (self.entries.values().filter(|entry| entry.joined.is_some()).count(), self.entries.len())
    }

    /// Copies bytes and moves connections until a signal asks for the end, or the program has ended. All connections
    /// are in the kernel afterwards.
    ///
    /// # Errors
    /// If the agent has ended for good.
    pub fn run(mut self) -> Result<Summary> {
        while !self.ends {
            self.round()?;
        }
        self.detach()
    }

    /// Waits until something happens, and handles it.
    fn round(&mut self) -> Result<()> {
        let mut tokens = Vec::new();
        self.shared.count_sleeper();
        let notified = !self.notified.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        let limit = if notified || self.shared.has_events(ME) { Some(Duration::ZERO) } else { self.until_next_batch() };
        let waited = self.poller.wait(limit, &mut tokens);
        self.shared.uncount_sleeper();
        waited?;
        let mut due = BTreeSet::new();
        for token in tokens.drain(..) {
            match token {
                BELL => self.shared.clear_bell(),
                CHANNEL => self.receive_from_agent()?,
                EVENTS => {}
                SIGNALS => self.ends = true,
                // The program's connections end first, which their states show.
                TARGET => self.ends |= self.program_has_ended()?,
                engine => {
                    let number = engine as u32;
                    if let Some(joined) = self.entries.get_mut(&number).and_then(|entry| entry.joined.as_mut()) {
                        joined.sent = true;
                    }
                    due.insert(number);
                }
            }
        }
        self.read_socket_events(&mut due);
        self.shared.catch_up(ME);
        due.extend(std::mem::take(&mut *self.notified.lock().unwrap_or_else(PoisonError::into_inner)));
        for number in due {
            self.carry(number)?;
        }
        self.look_at_modes();
        self.counting.count(self.entries.values_mut(), &self.bypass);
        self.run_batch()
    }

    fn read_socket_events(&mut self, due: &mut BTreeSet<u32>) {
        let mut unwatched = BTreeSet::new();
        while let Some(event) = self.bypass.next_event() {
            match event {
                SocketEvent::Read(cookie) => due.extend(self.by_cookie.get(&cookie)),
                SocketEvent::State(cookie, _) => {
                    self.work.changed.extend(self.by_cookie.get(&cookie));
                }
                SocketEvent::Unwatched(_, process) => drop(unwatched.insert(process)),
                SocketEvent::Spliced(cookie) => self.note_splice(cookie),
            }
        }
        self.work.lost |= self.bypass.has_lost();
        unwatched.retain(|process| self.settings.target.covers(*process));
        self.work.processes.extend(unwatched);
    }

    fn program_has_ended(&mut self) -> Result<bool> {
        if let Some(target) = &self.target {
            let _ = self.poller.remove(target.as_fd());
        }
        self.read_socket_events(&mut BTreeSet::new());
        // Child processes of the program may still run.
        let left = self.settings.target.processes();
        self.target = left.iter().find_map(|process| process::open_process(*process).ok());
        if let Some(target) = &self.target {
            self.poller.add(target.as_fd(), TARGET, Trigger::Readable)?;
        }
        Ok(self.target.is_none())
    }

    fn detach(mut self) -> Result<Summary> {
        let _ = self.poller.remove(self.signals.as_fd());
        self.restore_everything()?;
        let _ = self.ask(&Ask::Goodbye, None)?;
        let [pause_p50, pause_p99] = self.pauses.percentiles([50, 99]);
        let (pauses, pause_max) = (self.pauses.count(), self.pauses.longest());
        Ok(Summary { pauses, pause_p50, pause_p99, pause_max, ..self.summary })
    }

    fn note_stay(&mut self, reason: &str) {
        *self.summary.stayed.entry(reason.into()).or_default() += 1;
    }
}

/// The error for a program that cannot be attached to, with what to do.
fn explain(target: &Target, error: &std::io::Error) -> anyhow::Error {
    match error.raw_os_error() {
        Some(libc::EPERM) => anyhow::anyhow!(
            "cannot attach to {target}: it belongs to another user, or a debugger is attached to it already. Run as its user or as root \
             (and see /proc/sys/kernel/yama/ptrace_scope)"
        ),
        Some(libc::ESRCH) => anyhow::anyhow!("cannot attach to {target}: it has ended"),
        _ => anyhow::anyhow!("cannot attach to {target}, since it does not stop: {error}"),
    }
}

fn stays(reply: &Reply) -> Option<&str> {
    match reply {
        Reply::Stayed { reason, .. } | Reply::Failed { reason } => Some(reason),
        _ => None,
    }
}
