//! The host's TCP as the agent sees it: the process that goes on with connections of partial offload when they leave
//! their fast path (docs/internals/partial-offload.md). It is started for the first session that asks for that, and
//! ends with its NIC.

use crate::answers::After;
use crate::nic_requests::{Answered, Requests};
use crate::sampler::Sampler;
use crate::session::OpenSession;
use anyhow::{Context, Result};
use baton_abi::layout::host_tcp;
use baton_linux::control::Channel;
use baton_linux::events::Doorbell;
use baton_linux::{process, settings, starter};
use baton_protocol::nic::{NicSettings, ToNic};
use baton_shm::Region;
use baton_supervision::Sample;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::Child;
use std::sync::Arc;

/// What the NIC and the host's TCP share.
pub(crate) struct Shared {
    memory: Arc<Region>,
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
        Ok(Shared { memory: Arc::new(memory), bell: Doorbell::new()? })
    }

    /// Descriptors of the memory and of the doorbell of the host's TCP.
    pub fn descriptors(&self) -> Result<[BorrowedFd<'_>; 2]> {
        Ok([self.memory.fd().context("shared memory has a descriptor")?, self.bell.as_fd()])
    }
}

/// The process.
pub(crate) struct HostTcp {
    child: Child,
    sampler: Sampler,
    requests: Requests<After>,
    bell: Doorbell,
    memory: Arc<Region>,
    /// It has said that it has started.
    ready: bool,
}

impl HostTcp {
    /// Starts the process, after the NIC has been given what both share. Nobody waits until it is ready: its first
    /// answer says so.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(shared: &Shared, nic_memory: &Region, nic_bell: &Doorbell, settings: &NicSettings) -> Result<HostTcp> {
        let (ours, theirs) = Channel::pair()?;
        settings::send(&ours, baton_protocol::VERSION, settings)?;
        let [memory, bell] = shared.descriptors()?;
        let nic_memory = nic_memory.fd().context("NIC memory is shared memory")?;
        let descriptors = [nic_memory, memory, nic_bell.as_fd(), bell, theirs.as_fd()];
        let child = starter::start("host-tcp-process", &descriptors, true).context("starting the host's TCP")?;
        drop(theirs);
        let mut requests = Requests::new(ours);
        requests.expect(After::HostTcpReady);
        let (sampler, bell, memory) = (Sampler::default(), shared.bell.try_clone()?, shared.memory.clone());
        Ok(HostTcp { child, sampler, requests, bell, memory, ready: false })
    }

    /// Gives it a session.
    ///
    /// # Errors
    /// If the session lacks something.
    pub fn attach(&mut self, (session, name): (u32, u64), open: &OpenSession) -> Result<()> {
        let memory = open.memory.fd().context("session memory is shared memory")?;
        self.send(ToNic::Attach { session, messages: None }, &[memory], Some(After::Lent { session, name }));
        Ok(())
    }

    /// Ends a session.
    pub fn detach(&mut self, session: u32) {
        self.send(ToNic::Detach(session), &[], None);
    }

    /// If it has died, that is noticed, and what it was asked fails.
    fn send(&mut self, message: ToNic, descriptors: &[BorrowedFd<'_>], after: Option<After>) {
        match self.requests.send(message, descriptors, after) {
            Ok(true) => self.bell.ring(),
            Ok(false) => {}
            Err(after) => after.into_iter().for_each(|after| self.requests.expect(after)),
        }
    }

    /// Reads the answers that are there, and sends what has waited for them.
    pub fn receive_answers(&mut self, answered: &mut VecDeque<(After, Answered)>) {
        while let Some((after, answer)) = self.requests.receive() {
            match after {
                After::HostTcpReady => self.ready = true,
                after => answered.push_back((after, answer)),
            }
        }
        if self.requests.flush() {
            self.bell.ring();
        }
    }

    /// See [`Requests::late_at`].
    pub fn late_at(&self) -> Option<u64> {
        self.requests.late_at()
    }

    /// See [`Requests::become_late`].
    pub fn become_late(&mut self, now: u64) -> impl Iterator<Item = &mut After> {
        self.requests.become_late(now)
    }

    /// See [`Requests::awaits`].
    pub fn awaits(&self, of: impl Fn(&After) -> bool) -> bool {
        self.requests.awaits(of)
    }

    /// Takes the sample of the process that was due at `due`, with the process's number.
    pub fn sample(&mut self, due: u64) -> (u32, Sample) {
        let process = self.process();
        (process, self.sampler.look(process, &self.memory, std::iter::once(host_tcp::PULSE), due))
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// The control connection: readable when the process has died.
    pub fn channel_fd(&self) -> BorrowedFd<'_> {
        self.requests.channel().as_fd()
    }

    /// Whether the process has ended.
    pub fn is_dead(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Whether somebody has killed it.
    pub fn was_killed(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(status)) if process::is_killed(status))
    }

    /// Whether the process has ended before it was ready: the NIC goes on without it.
    pub fn has_failed_to_start(&mut self) -> bool {
        !self.ready && self.is_dead()
    }

    /// Ends the process, and waits until it is gone. Returns what it has not answered.
    pub fn end(mut self) -> Vec<After> {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.requests.take_all()
    }
}
