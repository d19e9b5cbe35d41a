//! The attacher: gives the connections of programs that run already, and know nothing of Baton, to the NIC, and stands between. What a
//! program sends is redirected to a socket of the attacher's and put into the NIC's memory, what the NIC receives goes into the
//! program's receive queue.
//!
//! The program stands still while one of its connections moves. Outside of moves nobody but the program has its descriptors, so that
//! closing one means what it always meant. If the attacher dies its connections are reset.
#![forbid(unsafe_code)]

mod batches;
mod moves;
mod relay;
mod target;

use anyhow::{Context, Result};
use batches::{Still, Work};
use baton_abi::layout::session;
use baton_client::{Listener, Shared};
use baton_linux::events::{Poller, Trigger};
use baton_linux::freeze::Frozen;
use baton_linux::netlink::{self, Netlink};
use baton_linux::process;
use baton_protocol::program::{Answer, Ask, Flip, Opening, Reply, VERSION};
use baton_ring::Token;
use baton_steering::{SocketBypass, SocketEvent};
use relay::Entry;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use target::Target;

/// The attacher is one thread.
const ME: Token = 1;

const BELL: u64 = u64::MAX;
const CHANNEL: u64 = u64::MAX - 1;
const EVENTS: u64 = u64::MAX - 2;
const SIGNALS: u64 = u64::MAX - 3;
const TARGET: u64 = u64::MAX - 4;

/// How programs are attached to.
#[derive(Clone, Debug)]
pub struct AttachSettings {
    /// To which.
    pub target: Target,
    /// Bytes after which a connection that is made later is worth moving.
    pub after: u32,
    /// Connections move to and fro at random.
    pub flip: Option<Flip>,
    /// The group of the sessions, as the agent named it; 0 for none.
    pub group: u64,
}

/// What an attacher did.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Connections that were the agent's to move.
    pub connections: u64,
    /// Moves made.
    pub moves: u64,
    /// Moves that did not take place, and connections that could never move, by cause.
    pub stayed: BTreeMap<String, u64>,
    /// Times that programs stood still.
    pub pauses: u64,
    /// For how long, microseconds: the median, of a hundred the longest but one, and the longest.
    pub pause_p50: u64,
    /// See above.
    pub pause_p99: u64,
    /// See above.
    pub pause_max: u64,
}

/// An attacher at work.
pub struct Attacher {
    settings: AttachSettings,
    shared: Arc<Shared>,
    heard: Arc<Mutex<Vec<u32>>>,
    bypass: SocketBypass,
    poller: Poller,
    signals: OwnedFd,
    target: Option<OwnedFd>,
    diagnosis: Netlink,
    entries: BTreeMap<u32, Entry>,
    by_cookie: BTreeMap<u64, u32>,
    processes: BTreeMap<u32, OwnedFd>,
    /// Sockets that are known, or known not to be meant.
    inodes: BTreeSet<u64>,
    /// What waits until its process can be stopped.
    work: Work,
    /// What stands still.
    frozen: Option<Still>,
    pauses: Vec<u32>,
    next_tag: u32,
    /// Answers that came while something else was waited for.
    early_answers: Vec<Answer>,
    /// A signal has asked for the end, or the program has ended.
    ends: bool,
    /// Room for bytes on their way.
    piece: Vec<u8>,
    summary: Summary,
}

impl Attacher {
    /// Attaches: the connections that there are move now.
    ///
    /// # Errors
    /// If there is nothing to attach to, the caller may not, or this kernel lacks something: with what to do.
    pub fn attach(agent: &Path, settings: AttachSettings) -> Result<Attacher> {
        let processes = settings.target.processes();
        if let Some(absence) = settings.target.absence(&processes) {
            anyhow::bail!("{absence}");
        }
        // Whoever may not stop a program may not take its connections. One that does not stop just now will do so later.
        for process in &processes {
            match Frozen::freeze(&[*process]) {
                Err(error) if error.kind() != std::io::ErrorKind::TimedOut => return Err(explain(&settings.target, &error)),
                _ => {}
            }
        }
        let heard = Arc::new(Mutex::new(Vec::new()));
        let sink = heard.clone();
        let listener = Listener(Box::new(move |number| sink.lock().unwrap_or_else(PoisonError::into_inner).push(number)));
        let opening = Opening { version: VERSION, group: settings.group, program: settings.target.to_string(), attacher: true };
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
            Target::Process(number) => Some(process::open_process(number).context("pidfd_open")?),
            _ => None,
        };
        if let Some(target) = &target {
            poller.add(target.as_fd(), TARGET, Trigger::Readable)?;
        }
        let mut attacher = Attacher {
            settings,
            shared,
            heard,
            bypass,
            poller,
            signals,
            target,
            diagnosis: Netlink::open(netlink::SOCK_DIAG)?,
            entries: BTreeMap::new(),
            by_cookie: BTreeMap::new(),
            processes: BTreeMap::new(),
            inodes: BTreeSet::new(),
            work: Work::default(),
            frozen: None,
            pauses: Vec::new(),
            next_tag: 2,
            early_answers: Vec::new(),
            ends: false,
            piece: vec![0; relay::PIECE],
            summary: Summary::default(),
        };
        attacher.work.processes.extend(processes);
        while !attacher.ends && attacher.has_begun_only() {
            attacher.round()?;
        }
        Ok(attacher)
    }

    /// Connections on the NIC, and all that are known.
    pub fn connections(&self) -> (usize, usize) {
        (self.entries.values().filter(|entry| entry.joined.is_some()).count(), self.entries.len())
    }

    /// Carries bytes and moves connections until a signal asks for the end, or the program has ended. Then everything is in the kernel.
    ///
    /// # Errors
    /// If the agent is gone for good.
    pub fn run(mut self) -> Result<Summary> {
        while !self.ends {
            self.round()?;
        }
        self.detach()
    }

    /// Waits until something happens, and does what follows.
    fn round(&mut self) -> Result<()> {
        let mut tokens = Vec::new();
        self.shared.count_sleeper();
        let heard = !self.heard.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        let limit = if heard || self.shared.has_events(ME) { Some(Duration::ZERO) } else { self.until_next_batch() };
        let waited = self.poller.wait(limit, &mut tokens);
        self.shared.uncount_sleeper();
        waited?;
        let mut due = BTreeSet::new();
        for token in tokens.drain(..) {
            match token {
                BELL => self.shared.bell().clear(),
                CHANNEL => self.hear_agent()?,
                EVENTS => {}
                SIGNALS => self.ends = true,
                // Its connections end first: their state tells.
                TARGET => self.ends |= self.program_is_gone()?,
                engine => drop(due.insert(engine as u32)),
            }
        }
        self.hear_kernel(&mut due);
        self.shared.catch_up(ME);
        due.extend(std::mem::take(&mut *self.heard.lock().unwrap_or_else(PoisonError::into_inner)));
        for number in due {
            self.carry(number)?;
        }
        self.do_a_batch()
    }

    fn hear_kernel(&mut self, due: &mut BTreeSet<u32>) {
        let mut strangers = BTreeSet::new();
        while let Some(event) = self.bypass.next_event() {
            match event {
                SocketEvent::Read(cookie) => due.extend(self.by_cookie.get(&cookie)),
                SocketEvent::State(cookie, _) => {
                    self.work.changed.extend(self.by_cookie.get(&cookie));
                }
                SocketEvent::Stranger(_, process) => drop(strangers.insert(process)),
            }
        }
        strangers.retain(|process| self.settings.target.covers(*process));
        self.work.processes.extend(strangers);
    }

    fn program_is_gone(&mut self) -> Result<bool> {
        if let Some(target) = &self.target {
            let _ = self.poller.remove(target.as_fd());
        }
        self.hear_kernel(&mut BTreeSet::new());
        // What it started may go on.
        let left = self.settings.target.processes();
        self.target = left.iter().find_map(|process| process::open_process(*process).ok());
        if let Some(target) = &self.target {
            self.poller.add(target.as_fd(), TARGET, Trigger::Readable)?;
        }
        Ok(self.target.is_none())
    }

    fn detach(mut self) -> Result<Summary> {
        let _ = self.poller.remove(self.signals.as_fd());
        self.bring_everything_back()?;
        let _ = self.ask(&Ask::Goodbye, None)?;
        self.pauses.sort_unstable();
        let at = |share: usize| self.pauses.get((self.pauses.len() * share / 100).min(self.pauses.len().saturating_sub(1)));
        let pause = |share| at(share).copied().unwrap_or(0).into();
        let (pause_p50, pause_p99, pause_max) = (pause(50), pause(99), pause(100));
        Ok(Summary { pauses: self.pauses.len() as u64, pause_p50, pause_p99, pause_max, ..self.summary })
    }

    fn note_stay(&mut self, reason: &str) {
        *self.summary.stayed.entry(reason.into()).or_default() += 1;
    }
}

/// Why a program cannot be attached to.
fn explain(target: &Target, error: &std::io::Error) -> anyhow::Error {
    match error.raw_os_error() {
        Some(libc::EPERM) => anyhow::anyhow!(
            "{target} is not yours to attach to: it belongs to another user, or a debugger is attached to it already. Run as its user or as \
             root (and see /proc/sys/kernel/yama/ptrace_scope)"
        ),
        _ => anyhow::anyhow!("{target} cannot be stopped for a moment: {error}"),
    }
}

fn stays(reply: &Reply) -> Option<&str> {
    match reply {
        Reply::Stayed { reason, .. } | Reply::Failed { reason } => Some(reason),
        _ => None,
    }
}
