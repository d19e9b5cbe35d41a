//! The host's TCP as the agent sees it: the process that goes on with connections of partial offload when they leave their fast path
//! (docs/inic.md). It is started for the first session that asks for that, and ends with its NIC.

use crate::session::OpenSession;
use anyhow::{Context, Result, bail};
use baton_abi::layout::host_tcp;
use baton_linux::control::Channel;
use baton_linux::events::Doorbell;
use baton_linux::process;
use baton_protocol::nic::{NicSettings, ToAgent, ToNic};
use baton_shm::Region;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Child, Command};

/// What the NIC and the host's TCP share.
pub(crate) struct Shared {
    memory: Region,
    bell: Doorbell,
}

impl Shared {
    /// Makes it for a NIC with `slots` slots.
    ///
    /// # Errors
    /// The system's.
    pub fn new(slots: usize) -> Result<Shared> {
        let bytes = host_tcp::bytes(slots).next_multiple_of(4096);
        let memory = Region::create("baton-host-tcp", bytes).context("the memory that NIC and host's TCP share")?;
        Ok(Shared { memory, bell: Doorbell::new()? })
    }

    /// Descriptors of the memory and of the doorbell of the host's TCP.
    pub fn descriptors(&self) -> Result<[BorrowedFd<'_>; 2]> {
        Ok([self.memory.fd().context("shared memory has a descriptor")?, self.bell.as_fd()])
    }
}

/// The process.
pub(crate) struct HostTcp {
    child: Child,
    channel: Channel,
    bell: Doorbell,
}

impl HostTcp {
    /// Starts the process, after the NIC has been given what both share.
    ///
    /// # Errors
    /// If it cannot be started, or does not become ready.
    pub fn start(shared: &Shared, nic_memory: &Region, nic_bell: &Doorbell, settings: &NicSettings) -> Result<HostTcp> {
        let (ours, theirs) = Channel::pair()?;
        baton_protocol::send_settings(&ours, settings)?;
        let [memory, bell] = shared.descriptors()?;
        let nic_memory = nic_memory.fd().context("NIC memory is shared memory")?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("host-tcp-process");
        process::inherit(&mut command, &[nic_memory, memory, nic_bell.as_fd(), bell, theirs.as_fd()], true);
        process::with_sharing_priority(&mut command);
        let child = command.spawn().context("starting the host's TCP")?;
        drop(theirs);
        let host_tcp = HostTcp { child, channel: ours, bell: shared.bell.try_clone()? };
        match host_tcp.channel.receive::<ToAgent>() {
            Ok((ToAgent::Ready, _)) => Ok(host_tcp),
            Ok((other, _)) => bail!("the host's TCP answers {other:?} instead of being ready"),
            Err(error) => bail!("the host's TCP did not start ({error})"),
        }
    }

    /// Gives it a session.
    ///
    /// # Errors
    /// Why it cannot have it, or that it has died.
    pub fn attach(&self, session: u32, open: &OpenSession) -> Result<()> {
        let memory = open.memory.fd().context("session memory is shared memory")?;
        self.send(&ToNic::Attach { session, messages: None }, &[memory])?;
        match self.channel.receive::<ToAgent>()?.0 {
            ToAgent::Attached => Ok(()),
            other => bail!("the host's TCP did not attach the session: {other:?}"),
        }
    }

    /// Ends a session.
    pub fn detach(&self, session: u32) {
        // If it has died, the session is gone with it.
        let _ = self.send(&ToNic::Detach(session), &[]);
    }

    fn send(&self, message: &ToNic, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        self.channel.send(message, descriptors)?;
        self.bell.ring();
        Ok(())
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// The control connection: readable when the process has died.
    pub fn channel_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Whether the process has ended.
    pub fn is_dead(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends the process, and waits until it is gone.
    pub fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
