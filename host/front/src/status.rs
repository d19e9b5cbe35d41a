//! What runs where: every attached process answers at a name of its network namespace, which vanishes with it.

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
    /// The device, by the name that it had at the beginning.
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

fn ask(index: u32) -> Result<Status> {
    let channel = connect(index)?;
    let process = channel.peer_process()?;
    if !is_readable(&channel, PATIENCE)? {
        bail!("process {process}, which is attached to device {index}, does not answer: it is stopped (`kill -CONT {process}`)");
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

/// Everything that is attached in this network namespace. A process that ends meanwhile is left out.
///
/// # Errors
/// If one does not answer.
pub fn list() -> Result<Vec<Status>> {
    let mut all = Vec::new();
    for index in indices()? {
        match ask(index) {
            Ok(status) => all.push(status),
            Err(error) if connect(index).is_ok() => return Err(error),
            Err(_) => {}
        }
    }
    Ok(all)
}

/// Ends what is attached to a device, and returns when it has ended. The device may be named as it is now.
///
/// # Errors
/// If there is no such device, nothing is attached to it, this user may not end it, or it does not end.
pub fn detach(device: &str) -> Result<u32> {
    let netlink = rtnetlink::open()?;
    let index = rtnetlink::link(&netlink, device)
        .with_context(|| {
            format!("there is no device {device} in this network namespace; `baton nic attach --list` shows what is attached")
        })?
        .index;
    let Some(number) = process_at(index) else {
        bail!("nothing is attached to {device}; `baton nic attach --list` shows what is attached")
    };
    let process = process::open_process(number).with_context(|| format!("process {number}"))?;
    process::signal(number, TERM).with_context(|| format!("ending process {number}, which is attached to {device}"))?;
    if !is_readable(&process, PATIENCE)? {
        bail!(
            "process {number}, which is attached to {device}, does not end: it is stopped (`kill -CONT {number}`, or `kill -KILL {number}`)"
        );
    }
    Ok(number)
}

/// SIGTERM.
const TERM: i32 = 15;
