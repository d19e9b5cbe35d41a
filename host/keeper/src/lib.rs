//! The keeper: holds what must survive agent and NIC (device descriptors, NIC memory, doorbells), starts the agent, and the next one
//! when that dies. It decides nothing, so that it has no reason to die.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail};
use baton_abi::layout::nic;
use baton_agent::AgentSettings;
use baton_kernel::control::Channel;
use baton_kernel::events::Doorbell;
use baton_kernel::process;
use baton_ring::Region;
use std::os::fd::AsFd;
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

/// Agents that die sooner than this many seconds after their start are not replaced more than [`HASTY_DEATHS`] times in a row.
const HASTY: u64 = 5;
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
    let mut deaths = 0;
    loop {
        let started = baton_kernel::events::monotonic_micros();
        let (ours, theirs) = Channel::pair()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("agent-process").arg("--settings").arg(serde_json::to_string(settings)?);
        let region = memory.fd().context("NIC memory is shared memory")?;
        let descriptors = [host.as_fd(), wire.as_fd(), region, nic_bell.as_fd(), agent_bell.as_fd(), theirs.as_fd()];
        process::inherit(&mut command, &descriptors, false);
        let mut agent = command.spawn().context("starting the agent")?;
        drop(theirs);
        if let Ok((true, _)) = ours.receive::<bool>()
            && !announced
        {
            parent.send(&true, &[])?;
            announced = true;
        }
        if watch(&mut agent, ours, &parent)? {
            // A directory that was made for the agent's socket alone is empty now; any other stays.
            if let Some(directory) = settings.socket.parent() {
                let _ = std::fs::remove_dir(directory);
            }
            return Ok(());
        }
        let lived = (baton_kernel::events::monotonic_micros() - started) / 1_000_000;
        deaths = if lived < HASTY { deaths + 1 } else { 0 };
        if deaths >= HASTY_DEATHS {
            bail!("the agent died {deaths} times within {HASTY} s of its start; see its messages above");
        }
    }
}

/// Waits for the end of the agent or of the parent. True if the parent is gone: the agent then gives everything back and ends.
fn watch(agent: &mut Child, channel: Channel, parent: &Channel) -> Result<bool> {
    let poller = baton_kernel::events::Poller::new()?;
    poller.add(channel.as_fd(), 0, baton_kernel::events::Trigger::Readable)?;
    poller.add(parent.as_fd(), 1, baton_kernel::events::Trigger::Readable)?;
    let mut tokens = Vec::new();
    loop {
        poller.wait(None, &mut tokens)?;
        if let Some(token) = tokens.drain(..).next() {
            match token {
                0 => {
                    agent.wait()?;
                    return Ok(false);
                }
                _ => {
                    drop(channel);
                    agent.wait()?;
                    return Ok(true);
                }
            }
        }
    }
}
