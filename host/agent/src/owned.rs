//! A NIC that has an owner: the agent asks that for it.

use crate::nic::{Hardware, START_LIMIT};
use anyhow::{Context, Result, bail};
use baton_linux::control::Channel;
use baton_linux::events::monotonic_nanos;
use baton_linux::tasks;
use baton_protocol::filter::{AgentAnswer, FromOwner, ToOwner};
use baton_protocol::nic::NicSettings;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A NIC process that an owner has started.
pub(crate) struct OwnedNic {
    owner: Channel,
    process: u32,
    /// The owner counts processes as this one does.
    visible: bool,
}

/// Asks the owner for something, and waits for the answer, but not for ever.
fn ask(owner: &Channel, what: ToOwner, descriptors: &[BorrowedFd<'_>]) -> Result<(FromOwner, Vec<OwnedFd>)> {
    let tag = monotonic_nanos();
    owner.send(&(tag, what), descriptors).context("the NIC's owner has ended")?;
    loop {
        let ((answers, answer), descriptors) =
            owner.receive_within::<AgentAnswer>(START_LIMIT).context("the NIC's owner does not answer")?;
        // Others are for an agent that has died.
        if answers == tag {
            return Ok((answer, descriptors));
        }
    }
}

impl OwnedNic {
    /// Asks the owner for a NIC on this hardware. Returns it and its control connection.
    ///
    /// # Errors
    /// Why the owner refuses, or that it has ended.
    pub fn start(hardware: &Hardware, settings: &NicSettings) -> Result<(OwnedNic, Channel)> {
        let owner = Channel::from_fd(hardware.wire.try_clone()?);
        let memory = hardware.memory.fd().context("NIC memory is shared memory")?;
        let descriptors = [memory, hardware.nic_bell.as_fd(), hardware.agent_bell.as_fd()];
        let (answer, mut descriptors) = ask(&owner, ToOwner::Start(Box::new(settings.clone())), &descriptors)?;
        match (answer, descriptors.pop()) {
            (FromOwner::Started(process), Some(channel)) => {
                let visible = owner.peer_process().is_ok_and(tasks::shares_numbers);
                Ok((OwnedNic { owner, process, visible }, Channel::from_fd(channel)))
            }
            (FromOwner::Failed(reason), _) => bail!("the NIC's owner: {reason}"),
            (other, _) => bail!("the NIC's owner answers {other:?}"),
        }
    }

    /// Its process, in the owner's PID namespace.
    pub fn process(&self) -> u32 {
        self.process
    }

    /// The same number, if it means the same here.
    pub fn visible_process(&self) -> Option<u32> {
        self.visible.then_some(self.process)
    }

    /// Ends the NIC, and waits until it has ended.
    pub fn end(&self) {
        // An owner that has ended has no NIC.
        let _ = ask(&self.owner, ToOwner::End, &[]);
    }
}
