//! What runs where: every attached process answers at a name of its network namespace, which vanishes with it.

use crate::is_gone;
use anyhow::{Context, Result, bail};
use baton_linux::control::{Channel, Listener};
use baton_linux::events::{Poller, Trigger};
use baton_linux::{process, rtnetlink};
use baton_lro::LroSettings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

/// Longest wait for an answer, and for a process to end.
const PATIENCE: Duration = Duration::from_secs(5);

const PREFIX: &str = "baton-nic-attach/";

/// The name at which the process at the device with this index answers.
pub(crate) fn name(index: u32) -> String {
    format!("{PREFIX}{index}")
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

/// Indices of the devices of this network namespace at which a process answers.
fn indices() -> Result<BTreeSet<u32>> {
    let sockets = std::fs::read_to_string("/proc/thread-self/net/unix").context("looking for attached processes")?;
    let names = sockets.lines().filter_map(|line| line.split_whitespace().last()?.strip_prefix('@')?.strip_prefix(PREFIX));
    Ok(names.filter_map(|index| index.parse().ok()).collect())
}

fn connect(index: u32) -> io::Result<Channel> {
    Channel::connect_name(&name(index))
}

/// The process at a device.
pub(crate) fn process_at(index: u32) -> Option<u32> {
    connect(index).ok()?.peer_process().ok()
}

fn ask(index: u32, device: &str) -> Result<Status> {
    let channel = connect(index)?;
    let process = channel.peer_process()?;
    if !is_readable(&channel, PATIENCE)? {
        bail!("process {process}, which is attached to {device}, does not answer: it is stopped (`kill -CONT {process}`)");
    }
    let (status, _) = channel.receive().with_context(|| format!("the answer of process {process}"))?;
    Ok(status)
}

fn is_readable(fd: &impl AsFd, most: Duration) -> io::Result<bool> {
    let poller = Poller::new()?;
    poller.add(fd.as_fd(), 0, Trigger::Readable)?;
    let mut ready = Vec::new();
    poller.wait(Some(most), &mut ready)?;
    Ok(!ready.is_empty())
}

/// Everything that is attached in this network namespace, and why a process cannot be listed. A process that ends meanwhile is left
/// out.
///
/// # Errors
/// If it cannot be found out what is attached.
pub fn list() -> Result<(Vec<Status>, Vec<anyhow::Error>)> {
    let netlink = rtnetlink::open()?;
    let (mut all, mut errors) = (Vec::new(), Vec::new());
    for index in indices()? {
        let name = rtnetlink::name_of(&netlink, index);
        match ask(index, name.as_deref().unwrap_or("a device that is gone")) {
            Ok(status) => all.push(Status { device: name.unwrap_or(status.device), ..status }),
            Err(error) if connect(index).is_ok() => errors.push(error),
            Err(_) => {}
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
    let Ok(channel) = connect(index) else { bail!("nothing is attached to {device}; {HINT}") };
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
