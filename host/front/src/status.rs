//! What runs where: every attached process answers at a name of its network namespace. The name is at random, since
//! anybody may listen at any, and the alias of the process's TAP contains it: only who may make devices can set that.
//! Both vanish with the process.

use crate::is_gone;
use anyhow::{Context, Result, bail};
use baton_linux::control::{Channel, Listener};
use baton_linux::events::{Poller, Trigger};
use baton_linux::netlink::Netlink;
use baton_linux::{process, rtnetlink};
use baton_lro::LroSettings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

/// Longest wait for an answer, and for a process to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// Such a name is this, the index of the device, and a random number.
const PREFIX: &str = "baton-nic-attach/";

/// Listens, and lets the alias of this process's TAP say where.
///
/// # Errors
/// The failed system call's.
pub(crate) fn listen(netlink: &Netlink, index: u32, tap: u32) -> io::Result<Listener> {
    let mut random = [0; 8];
    process::random(&mut random)?;
    let name = format!("{PREFIX}{index}/{:016x}", u64::from_ne_bytes(random));
    let listener = Listener::bind_name(&name)?.without_descriptors();
    rtnetlink::set_alias(netlink, tap, &name)?;
    Ok(listener)
}

/// What a process has done. All counts only grow.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Frames that were taken off the kernel's path.
    pub taken: u64,
    /// Frames that were given to the kernel.
    pub given: u64,
    /// Segments in aggregates of more than one.
    pub merged: u64,
    /// Such aggregates.
    pub aggregates: u64,
    /// Bytes of their IP packets.
    pub aggregate_bytes: u64,
    /// Frames that found the queue full, and were lost.
    pub dropped: u64,
    /// Frames that the kernel did not accept, and that were lost.
    pub refused: u64,
    /// Times that the process was so late that frames passed it by.
    pub lapses: u64,
    /// Frames that were out of date after that, and were lost.
    pub lost: u64,
}

/// What a process answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// The device, by the name that it has now.
    pub device: String,
    /// The TAP by which merged segments come back to it.
    pub tap: String,
    /// Where segments are taken: `xdp`, or `tc` and why.
    pub path: String,
    /// Process id.
    pub process: u32,
    /// Settings of large receive.
    pub settings: LroSettings,
    /// What it has done.
    pub figures: Figures,
}

/// The clients of a process. It never waits for one: each is answered as soon as it is accepted.
pub(crate) struct Clients {
    listener: Listener,
}

impl Clients {
    pub fn new(listener: Listener, poller: &Poller, token: u64) -> io::Result<Clients> {
        poller.add(listener.as_fd(), token, Trigger::Readable)?;
        Ok(Clients { listener })
    }

    /// Answers the next client, which need not ask: the answer fits an empty socket's buffer.
    pub fn serve(&mut self, status: &Status) {
        if let Ok(client) = self.listener.accept() {
            let _ = client.try_send(status, &[]);
        }
    }
}

/// The names at which processes of this network namespace answer, by the indices of their devices.
fn names(netlink: &Netlink) -> io::Result<BTreeMap<u32, String>> {
    let index = |name: &str| name.strip_prefix(PREFIX)?.split_once('/')?.0.parse().ok();
    Ok(rtnetlink::aliases(netlink)?.into_iter().filter_map(|name| Some((index(&name)?, name))).collect())
}

/// The process at a device.
pub(crate) fn process_at(netlink: &Netlink, index: u32) -> Option<u32> {
    Channel::connect_name(names(netlink).ok()?.get(&index)?).ok()?.peer_process().ok()
}

/// A connection to the process at a device. None if it has ended.
fn connect(name: &str, device: &str) -> Result<Option<Channel>> {
    match Channel::connect_name(name) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            bail!("the process that is attached to {device} does not answer: it is stopped (`ss -xlp` shows it at @{name})")
        }
        other => Ok(Some(other.with_context(|| format!("asking the process that is attached to {device}"))?)),
    }
}

/// What the process at a device answers. None if it has just ended.
fn ask(name: &str, device: &str) -> Result<Option<Status>> {
    let Some(channel) = connect(name, device)? else { return Ok(None) };
    let process = channel.peer_process()?;
    if !is_readable(&channel, PATIENCE)? {
        bail!("process {process}, which is attached to {device}, does not answer: it is stopped (`kill -CONT {process}`)");
    }
    match channel.receive() {
        Ok((status, _)) => Ok(Some(status)),
        Err(_) if Channel::connect_name(name).is_err() => Ok(None),
        Err(error) => Err(error).with_context(|| format!("the answer of process {process}")),
    }
}

fn is_readable(fd: &impl AsFd, most: Duration) -> io::Result<bool> {
    let poller = Poller::new()?;
    poller.add(fd.as_fd(), 0, Trigger::Readable)?;
    let mut ready = Vec::new();
    poller.wait(Some(most), &mut ready)?;
    Ok(!ready.is_empty())
}

/// Everything that is attached in this network namespace, and why a process cannot be listed. A process that ends
/// meanwhile is left out.
///
/// # Errors
/// If it cannot be found out what is attached.
pub fn list() -> Result<(Vec<Status>, Vec<anyhow::Error>)> {
    let netlink = rtnetlink::open()?;
    let (mut all, mut errors) = (Vec::new(), Vec::new());
    for (index, name) in names(&netlink).context("looking for attached processes")? {
        let device = rtnetlink::name_of(&netlink, index);
        match ask(&name, device.as_deref().unwrap_or("a device that is gone")) {
            Ok(Some(status)) => all.push(Status { device: device.unwrap_or(status.device), ..status }),
            Ok(None) => {}
            Err(error) => errors.push(error),
        }
    }
    Ok((all, errors))
}

/// Ends what is attached to a device, and returns when it has ended. The device may be named as it is now.
///
/// # Errors
/// If there is no such device, nothing is attached to it, this user may not end it, or it does not end.
pub fn detach(device: &str) -> Result<u32> {
    const HINT: &str = "`baton nic attach --list` shows what is attached";
    let netlink = rtnetlink::open()?;
    let index = match rtnetlink::link(&netlink, device) {
        Err(error) if is_gone(&error) => bail!("there is no device {device} in this network namespace; {HINT}"),
        other => other.with_context(|| format!("looking up {device}"))?.index,
    };
    let names = names(&netlink).context("looking for attached processes")?;
    let channel = names.get(&index).map_or(Ok(None), |name| connect(name, device))?;
    let Some(channel) = channel else { bail!("nothing is attached to {device}; {HINT}") };
    let number = channel.peer_process()?;
    let what = || format!("process {number}, which is attached to {device}");
    // Its number may be another process's by now, if one that has ended left its socket to others.
    let process = channel.peer_descriptor().with_context(what)?;
    match process::signal_at(process.as_fd(), TERM) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            bail!("{} is another user's: run as root, or as the user that attached it", what())
        }
        Err(error) if error.raw_os_error() == Some(NO_PROCESS) => {
            bail!("{} has ended, but others hold its socket (`ss -xlp` lists them)", what())
        }
        other => other.with_context(|| format!("ending {}", what()))?,
    }
    if !is_readable(&process, PATIENCE)? {
        bail!(
            "process {number}, which is attached to {device}, does not end: it is stopped (`kill -CONT {number}`, or `kill -KILL {number}`)"
        );
    }
    Ok(number)
}

/// SIGTERM.
const TERM: i32 = 15;
/// ESRCH.
const NO_PROCESS: i32 = 3;
