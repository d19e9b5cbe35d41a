//! The keeper: holds what must survive agent and NIC (device descriptors, NIC memory, doorbells), starts the agent, and the next one
//! when that dies. It decides nothing, so that it has no reason to die.
#![forbid(unsafe_code)]

mod launch;

use anyhow::{Context, Result, bail};
use baton_abi::layout::nic;
use baton_agent::{AgentSettings, Kept};
use baton_kernel::control::Channel;
use baton_kernel::events::Doorbell;
use baton_kernel::process;
use baton_ring::Region;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command};

pub use launch::{BesideDevices, Devices, launch};

/// Descriptors that a keeper inherits from whoever made the devices, in this order from 3 on.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Descriptor {
    /// The TAP that is the kernel's interface.
    Host = 3,
    /// The wire.
    Wire = 4,
    /// The connection to whoever started the keeper.
    Parent = 5,
}

/// Behind those, for a NIC beside the kernel: the injector, the link of its program, the steering; for one with several queues: the card's.
/// Last, for a keeper that lingers: the
/// process (a pidfd) whose end it waits for.
const FURTHER: i32 = Descriptor::Parent as i32 + 1;

/// Agents that die before they are ready are not replaced more than so many times in a row.
const HASTY_DEATHS: u32 = 3;

/// Runs a keeper until its parent is gone.
///
/// # Errors
/// If a descriptor is missing, or agents die as soon as they start.
pub fn run(settings: &AgentSettings) -> Result<()> {
    let take = |descriptor: Descriptor| {
        process::inherited(descriptor as i32).with_context(|| format!("descriptor {descriptor:?} for the keeper"))
    };
    let (host, wire) = (take(Descriptor::Host)?, take(Descriptor::Wire)?);
    let parent = Channel::from_fd(take(Descriptor::Parent)?);
    let mut further = (FURTHER..).map(|number| process::inherited(number).with_context(|| format!("descriptor {number}")));
    let mut next = || further.next().context("descriptors have no end")?;
    let beside = if settings.nic.beside { Some(Beside::inherit(&mut next)?) } else { None };
    let card = (0..settings.nic.card_descriptors()).map(|_| next()).collect::<Result<Vec<OwnedFd>>>()?;
    let end = End { parent, process: if settings.lingers { Some(next()?) } else { None } };
    let memory = Region::create("baton-nic", nic::bytes(settings.nic.slots)).context("NIC memory")?;
    let (nic_bell, agent_bell) = (Doorbell::new()?, Doorbell::new()?);
    let mut announced = false;
    let mut held = Vec::new();
    let mut deaths = 0;
    loop {
        let (ours, theirs) = Channel::pair()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("agent-process").arg("--settings").arg(serde_json::to_string(settings)?);
        let region = memory.fd().context("NIC memory is shared memory")?;
        let mut descriptors = vec![host.as_fd(), wire.as_fd(), region, nic_bell.as_fd(), agent_bell.as_fd(), theirs.as_fd()];
        if let Some(beside) = &beside {
            descriptors.push(beside.injector.as_fd());
            descriptors.extend(beside.steering.iter().map(AsFd::as_fd));
        }
        descriptors.extend(card.iter().map(AsFd::as_fd));
        process::inherit(&mut command, &descriptors, false);
        let mut agent = command.spawn().context("starting the agent")?;
        drop(theirs);
        let mut ready = false;
        // An agent that has died already is found out below.
        let _ = hand_over(&ours, &held);
        if watch(&mut agent, ours, &end, &mut held, &mut ready, &mut announced)? {
            // A directory that was made for the agent's socket alone is empty now; any other stays.
            if let Some(directory) = settings.socket.parent() {
                let _ = std::fs::remove_dir(directory);
            }
            return Ok(());
        }
        deaths = if ready { 0 } else { deaths + 1 };
        if deaths >= HASTY_DEATHS {
            bail!("{deaths} agents in a row died before they were ready; see their messages above");
        }
    }
}

/// What a NIC beside the kernel needs.
struct Beside {
    injector: OwnedFd,
    /// Its program is there as long as this is open.
    _injector_link: OwnedFd,
    steering: [OwnedFd; baton_steering::DESCRIPTORS],
}

impl Beside {
    fn inherit(next: &mut impl FnMut() -> Result<OwnedFd>) -> Result<Beside> {
        Ok(Beside { injector: next()?, _injector_link: next()?, steering: [next()?, next()?, next()?] })
    }
}

/// What ends a keeper.
struct End {
    /// Whoever started it is gone.
    parent: Channel,
    /// Or, instead, this process.
    process: Option<OwnedFd>,
}

impl End {
    fn fd(&self) -> BorrowedFd<'_> {
        self.process.as_ref().map_or(self.parent.as_fd(), AsFd::as_fd)
    }
}

/// What is held for the next agent: what it is, and its descriptors.
type Held = Vec<(Kept, Vec<OwnedFd>)>;

/// Gives an agent what its predecessor has left.
fn hand_over(agent: &Channel, held: &Held) -> Result<()> {
    for (kept, descriptors) in held {
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        agent.send(kept, &descriptors)?;
    }
    Ok(agent.send(&Kept::Ready, &[])?)
}

/// Holds what the agent gives, until its end or the parent's. True if the parent is gone: the agent then gives everything back and ends.
fn watch(
    agent: &mut Child,
    channel: Channel,
    end: &End,
    held: &mut Held,
    ready: &mut bool,
    announced: &mut bool,
) -> Result<bool> {
    let poller = baton_kernel::events::Poller::new()?;
    poller.add(channel.as_fd(), 0, baton_kernel::events::Trigger::Readable)?;
    poller.add(end.fd(), 1, baton_kernel::events::Trigger::Readable)?;
    let mut tokens = Vec::new();
    let mut over = false;
    loop {
        // Programs that the watched process has left behind keep their connections.
        let sessions = held.iter().any(|(kept, _)| matches!(kept, Kept::Session(_)));
        if over && !(end.process.is_some() && sessions) {
            drop(channel);
            agent.wait()?;
            return Ok(true);
        }
        poller.wait(None, &mut tokens)?;
        for token in tokens.drain(..) {
            if token == 1 {
                over = true;
                poller.remove(end.fd())?;
                continue;
            }
            match channel.try_receive::<Kept>() {
                Ok((Kept::Ready, _)) => {
                    *ready = true;
                    if !std::mem::replace(announced, true) {
                        end.parent.send(&true, &[])?;
                    }
                }
                Ok((kept, descriptors)) => {
                    held.retain(|(other, _)| !kept.drops(other));
                    if kept.holds() {
                        held.push((kept, descriptors));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    agent.wait()?;
                    return Ok(false);
                }
            }
        }
    }
}
