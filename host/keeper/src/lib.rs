//! The keeper: holds what must survive agent and NIC (device descriptors, NIC memory, doorbells), starts the agent, and the next one
//! when that dies. It decides nothing, so that it has no reason to die.
#![forbid(unsafe_code)]

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
        let descriptors = [host.as_fd(), wire.as_fd(), region, nic_bell.as_fd(), agent_bell.as_fd(), theirs.as_fd()];
        process::inherit(&mut command, &descriptors, false);
        let mut agent = command.spawn().context("starting the agent")?;
        drop(theirs);
        let mut ready = false;
        // An agent that has died already is found out below.
        let _ = hand_over(&ours, &held);
        if watch(&mut agent, ours, &parent, &mut held, &mut ready, &mut announced)? {
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
    parent: &Channel,
    held: &mut Held,
    ready: &mut bool,
    announced: &mut bool,
) -> Result<bool> {
    let poller = baton_kernel::events::Poller::new()?;
    poller.add(channel.as_fd(), 0, baton_kernel::events::Trigger::Readable)?;
    poller.add(parent.as_fd(), 1, baton_kernel::events::Trigger::Readable)?;
    let mut tokens = Vec::new();
    loop {
        poller.wait(None, &mut tokens)?;
        for token in tokens.drain(..) {
            if token == 1 {
                drop(channel);
                agent.wait()?;
                return Ok(true);
            }
            match channel.try_receive::<Kept>() {
                Ok((Kept::Ready, _)) => {
                    *ready = true;
                    if !std::mem::replace(announced, true) {
                        parent.send(&true, &[])?;
                    }
                }
                Ok((kept, descriptors)) if kept.holds() => held.push((kept, descriptors)),
                Ok((kept, _)) => held.retain(|(other, _)| !kept.drops(other)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    agent.wait()?;
                    return Ok(false);
                }
            }
        }
    }
}
