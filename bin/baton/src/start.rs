//! What `run` and `attach` share: the Baton that they use or start, and random moves of connections.

use crate::addresses::{self, AddressArguments};
use crate::nics::NicsArguments;
use crate::numbers::MOST_SPIN;
use crate::placement::{self, Where};
use crate::run_directory;
use anyhow::{Context, Result, anyhow, bail};
use baton_agent::{AgentSettings, Choose};
use baton_client::rules::{RUN_VARIABLE, Run};
use baton_client::tool::Tool;
use baton_keeper::Devices;
use baton_linux::control::Channel;
use baton_linux::events::{Poller, Trigger};
use baton_linux::{files, process};
use baton_log::Level;
use baton_offloads::MOST_CONNECTIONS;
use baton_protocol::nic::{LinkSettings, NicSettings, STANDARD_PROBES};
use baton_protocol::program::{Answer, Ask, Flip, Reply, Request};
use clap::Args;
use std::fs::File;
use std::io::ErrorKind::{ConnectionRefused, NotADirectory, NotFound};
use std::io::{self, PipeReader, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

#[derive(Args)]
pub struct StartArguments {
    /// Path of the socket of an agent that runs already. Without it: the one at BATON_SOCKET, or at
    /// /run/baton/agent.sock, if there is one.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// If a Baton is started: microseconds that its NIC polls without work before it sleeps.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(..=MOST_SPIN))]
    spin: u64,
    #[command(flatten)]
    addresses: AddressArguments,
    /// If a Baton is started: file for its messages.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// If a Baton is started: the least that is in that file: error, warning, info or debug.
    #[arg(long, value_name = "LEVEL", env = baton_log::VARIABLE, hide_env_values = true, default_value_t = Level::Info)]
    log_level: Level,
    #[command(flatten)]
    nics: NicsArguments,
}

#[derive(Args)]
pub struct FlipArguments {
    /// Move every connection there and back at random intervals of MIN to MAX milliseconds, for as long as it lives.
    /// For tests.
    #[arg(long, value_name = "MIN..MAX", value_parser = interval)]
    flip: Option<(u64, u64)>,
    /// Seed of the intervals.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// File for one line of JSON with what happened to the connections.
    #[arg(long, value_name = "FILE")]
    flip_report: Option<PathBuf>,
}

fn interval(text: &str) -> Result<(u64, u64), String> {
    let wrong = || format!("{text:?} is not an interval: write for example 1..50, in milliseconds");
    let (min, max) = text.split_once("..").ok_or_else(wrong)?;
    let millis = |text: &str| {
        let number = text.trim_start_matches('=').parse::<f64>().ok().filter(|number| (0.0..1e9).contains(number));
        number.map(|number| (number * 1000.0) as u64)
    };
    match (millis(min), millis(max)) {
        (Some(min), Some(max)) if min <= max && max > 0 => Ok((min, max)),
        _ => Err(wrong()),
    }
}

impl StartArguments {
    /// The Baton that runs already, or one that is started now and ends with this process and those that use it. Then
    /// binds this process to the processors that `place` asks for.
    pub fn agent(&self, place: Where) -> Result<(PathBuf, Channel)> {
        let found = match self.running()? {
            Some((path, _)) if self.addresses.any() => bail!(
                "--address is for a Baton that is started, and one runs already at {}: give it to that one (baton up --address)",
                path.display()
            ),
            Some((path, _)) if self.nics.is_given() => bail!(
                "--nics, --device, --choose and --nic-… are for a Baton that is started, and one runs already at {}: give them to that one (baton up)",
                path.display()
            ),
            Some(found) => found,
            None => self.start(place)?,
        };
        if place == Where::NearNic {
            placement::go_near(&found.0).context("--place near-nic")?;
        }
        Ok(found)
    }

    /// Why there is no Baton that runs already; None if there is one.
    pub fn why_none(&self) -> Option<String> {
        match self.running() {
            Ok(Some(_)) => None,
            Ok(None) => Some("none is up".into()),
            Err(error) => Some(format!("{error:#}")),
        }
    }

    fn running(&self) -> Result<Option<(PathBuf, Channel)>> {
        if let Some(path) = &self.socket {
            let channel = Channel::connect(path).with_context(|| format!("no agent at {}", path.display()))?;
            return Ok(Some((path.clone(), channel)));
        }
        let named = baton_client::named_socket();
        if let Some(path) = &named {
            match Channel::connect(path) {
                Ok(channel) => return Ok(Some((path.clone(), channel))),
                // The agent that listened there has ended.
                Err(error) if matches!(error.kind(), NotFound | ConnectionRefused | NotADirectory) => {}
                Err(error) => bail!("the agent at {}, which BATON_SOCKET names: {error}", path.display()),
            }
        }
        if let Some(outer) = Self::outer() {
            return Ok(Some(outer));
        }
        if named.is_some() {
            return Ok(None);
        }
        let path = PathBuf::from(baton_client::DEFAULT_SOCKET);
        Ok(Channel::connect(&path).ok().map(|channel| (path, channel)))
    }

    /// The socket of an outer `baton run`, whose process has become this one.
    fn outer() -> Option<(PathBuf, Channel)> {
        let run: Run = serde_json::from_str(process::variable(RUN_VARIABLE)?.to_str()?).ok()?;
        Channel::connect(&run.socket).ok().map(|channel| (run.socket, channel))
    }

    fn start(&self, place: Where) -> Result<(PathBuf, Channel)> {
        self.nics.check()?;
        let devices = Devices::beside(SLOTS, self.nics.count()).context("starting a Baton")?;
        let directory = run_directory::make()?;
        // After a failure the directory is removed. One in which a Baton runs is not empty; that Baton removes it.
        self.start_in(&directory, place, &devices).inspect_err(|_| drop(std::fs::remove_dir(&directory)))
    }

    fn start_in(&self, directory: &Path, place: Where, devices: &Devices) -> Result<(PathBuf, Channel)> {
        let socket = directory.join("agent.sock");
        let mut settings = self.nics.apply(beside_settings(socket.clone(), true, self.spin)?);
        settings.nic.addresses = self.addresses.addresses()?;
        settings.nic.between_probes = self.addresses.between_probes();
        if place == Where::NearNic
            && let Some(cores) = placement::own_cores(self.nics.count())?
        {
            settings.nic.cores = cores;
        }
        let me = process::open_process(std::process::id()).context("pidfd_open")?;
        let mut command = Command::new(std::env::current_exe()?);
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
        command.env(baton_log::VARIABLE, self.log_level.to_string());
        // Without a file for them its messages are read until it is up; later ones are lost.
        let (messages, written) = std::io::pipe().context("a pipe")?;
        command.stderr(match &self.log {
            Some(path) => Stdio::from(File::create(path).with_context(|| format!("making {}", path.display()))?),
            None => Stdio::from(written),
        });
        let (mut starter, _) = baton_keeper::launch(command, &settings, devices, Some(me.as_fd())).map_err(|error| {
            let said = match &self.log {
                Some(path) => std::fs::read_to_string(path).unwrap_or_default(),
                None => final_messages(messages).unwrap_or_default(),
            };
            with_what_was_said(error, &said)
        })?;
        let _ = starter.wait();
        if self.addresses.any() {
            addresses::settle(&mut Tool::connect(&socket)?)?;
        }
        let channel = Channel::connect(&socket).context("the agent that was just started")?;
        Ok((socket, channel))
    }
}

impl FlipArguments {
    /// Whether connections move at random.
    pub fn is_on(&self) -> bool {
        self.flip.is_some()
    }

    pub fn flip(&self) -> Option<Flip> {
        self.flip.map(|(min, max)| Flip { min: min.max(1), max: max.max(1), seed: self.seed })
    }

    /// Makes a group for a program's connections at the agent, with random moves and report.
    pub fn make_group(&self, channel: &Channel) -> Result<u64> {
        let file = match &self.flip_report {
            Some(path) => Some(File::create(path).with_context(|| format!("making {}", path.display()))?),
            None => None,
        };
        // The agent does not wait for the file, and so does not notice.
        if file.as_ref().is_some_and(|file| !files::is_plain(file.as_fd()).unwrap_or(false)) {
            bail!("the report goes into a file on a disk or in memory, not into a pipe or the like");
        }
        let descriptors: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        // The agent may die before it answers. The next one says so (`Restarted`), and is asked again.
        for tag in 1..=AGENTS {
            channel.send(&Request { tag, body: Ask::Group { flip: self.flip() } }, &descriptors)?;
            match channel.receive::<Answer>()?.0.body {
                Reply::Grouped { group } => return Ok(group),
                Reply::Failed { reason } => bail!(reason),
                Reply::Restarted { .. } => {}
                other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
            }
        }
        bail!("{AGENTS} agents have died, one after the other, before they answered")
    }
}

/// All that the processes of a Baton that did not start have written to this pipe. They may end a little later than its
/// keeper closes its connection.
fn final_messages(mut messages: PipeReader) -> io::Result<String> {
    let poller = Poller::new()?;
    poller.add(messages.as_fd(), 0, Trigger::Readable)?;
    let (mut bytes, mut part, mut tokens) = (Vec::new(), [0; 4096], Vec::new());
    loop {
        poller.wait(Some(PATIENCE), &mut tokens)?;
        // A process that lives on has the pipe, or all have ended.
        if tokens.drain(..).count() == 0 {
            break;
        }
        match messages.read(&mut part)? {
            0 => break,
            read => bytes.extend_from_slice(&part[..read]),
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// An error with the last log lines, which name its cause.
fn with_what_was_said(error: anyhow::Error, said: &str) -> anyhow::Error {
    let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    match &lines[lines.len().saturating_sub(SAID)..] {
        // The system names the cause.
        [] if error.root_cause().downcast_ref::<io::Error>().is_some_and(|cause| cause.raw_os_error().is_some()) => {
            error.context("starting a Baton")
        }
        [] => error.context("no message says why (`baton doctor` names what is missing here)"),
        last => anyhow!("{error:#}; it has said: {}", last.join(" | ")),
    }
}

/// Settings of a Baton beside the kernel.
pub fn beside_settings(socket: PathBuf, lingers: bool, spin: u64) -> Result<AgentSettings> {
    let mut key = [0u8; 32];
    process::random(&mut key).context("random numbers")?;
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|n| key[8 * at + n]));
    Ok(AgentSettings {
        socket,
        interface: None,
        session_bytes: SESSION_BYTES,
        lingers,
        core: None,
        limits: Default::default(),
        patience: 500_000,
        crash: None,
        choose: Choose::default(),
        measured: Vec::new(),
        nics: 1,
        devices: Vec::new(),
        nic: NicSettings {
            number: 0,
            slots: SLOTS,
            cores: Vec::new(),
            workers: 1,
            card: false,
            copy_engine: false,
            spin,
            segmentation: true,
            offloads: Default::default(),
            beside: true,
            owned: false,
            addresses: Vec::new(),
            between_probes: STANDARD_PROBES,
            link: LinkSettings::default(),
            hash_key: std::array::from_fn(word),
        },
    })
}

/// Number of connections that a NIC can hold.
pub const SLOTS: usize = MOST_CONNECTIONS as usize;
/// Bytes of memory that a session may use; memory that it does not use is not taken from the system.
const SESSION_BYTES: usize = 3 << 30;

/// How long processes of a Baton that did not start are waited for, which write why.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most lines of theirs that are shown.
const SAID: usize = 3;

/// How many agents are asked for a group, each after the death of the one before.
const AGENTS: u32 = 5;
