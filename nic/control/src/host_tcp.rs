//! The process of the host's TCP: a worker of the NIC's code, on a processor of the host. With partial offload it runs
//! the connections that leave their fast path. It has no device; its frames go through the NIC.

use crate::nic::take_number;
use crate::sandbox;
use anyhow::{Context, Result};
use baton_abi::layout::{host_tcp, session as session_layout};
use baton_datapath::{HostWire, NoKernel, Worker, WorkerSettings};
use baton_linux::control::Channel;
use baton_linux::events::{Doorbell, Poller, Trigger, monotonic_micros};
use baton_linux::{process, settings};
use baton_protocol::nic::{HostTcpDescriptor, NicSettings, ToAgent, ToNic};
use baton_shm::{Pulse, Region};
use baton_tcp::Instant;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Microseconds of polling without work before it sleeps: short, since it runs on the host's processors.
const SPIN: u64 = 20;
/// Rounds with work after which it looks at the control connection.
const ROUNDS: u32 = 256;

fn take(descriptor: HostTcpDescriptor) -> Result<OwnedFd> {
    take_number(descriptor as i32)
}

/// The process's state.
struct HostTcp {
    worker: Worker<NoKernel, HostWire>,
    channel: Channel,
    nic_bell: Doorbell,
    bell: Doorbell,
    poller: Poller,
    pulse: Pulse,
}

/// Runs the process until the agent ends.
///
/// # Errors
/// If a descriptor is missing or a system call fails.
pub fn run() -> Result<()> {
    let channel = Channel::from_fd(take(HostTcpDescriptor::Channel)?);
    let settings = settings::receive::<NicSettings>(&channel, baton_protocol::VERSION);
    let settings = settings.context("receiving the settings from the agent")?;
    let memory = Arc::new(Region::map(take(HostTcpDescriptor::Memory)?)?);
    let shared = Arc::new(Region::map(take(HostTcpDescriptor::Shared)?)?);
    let nic_bell = Doorbell::from_fd(take(HostTcpDescriptor::NicBell)?);
    let bell = Doorbell::from_fd(take(HostTcpDescriptor::Bell)?);
    // Signals that end processes are the agent's to handle; this process ends with it.
    process::signal_descriptor(&process::ENDING)?;
    process::raise_descriptor_limit();
    let poller = Poller::new()?;
    poller.add(bell.as_fd(), 0, Trigger::Readable)?;
    poller.add(channel.as_fd(), 1, Trigger::Readable)?;
    sandbox::drop_rights()?;
    let NicSettings { number: nic, slots, hash_key, .. } = settings;
    let worker_settings = WorkerSettings { nic, slots, hash_key, ..WorkerSettings::default() };
    let pulse = Pulse::begin(shared.clone(), host_tcp::PULSE, process::thread());
    let worker = Worker::host_tcp(memory, shared, worker_settings, Instant(monotonic_micros()));
    sandbox::restrict_system_calls()?;
    channel.send(&ToAgent::Ready, &[])?;
    HostTcp { worker, channel, nic_bell, bell, poller, pulse }.main_loop()
}

impl HostTcp {
    /// Polls the worker and sleeps while it has nothing to do.
    fn main_loop(&mut self) -> Result<()> {
        let (mut idle_since, mut rounds) = (monotonic_micros(), 0);
        loop {
            let now = Instant(monotonic_micros());
            self.pulse.beat();
            if self.worker.poll_lent(now) {
                anyhow::ensure!(!self.worker.is_broken(), "the NIC has lent a connection that cannot be taken");
                if self.worker.must_wake_nic() {
                    self.nic_bell.ring();
                }
                (idle_since, rounds) = (now.0, rounds + 1);
                if rounds % ROUNDS == 0 {
                    self.serve_channel()?;
                }
            } else if now.0 - idle_since > SPIN && self.worker.prepare_sleep_lent() {
                self.sleep(now)?;
                idle_since = monotonic_micros();
            }
        }
    }

    /// Sleeps until a timer is due, or something has been sent.
    fn sleep(&mut self, now: Instant) -> Result<()> {
        let due = self.worker.next_timeout().map_or(1_000_000, |at| at.saturating_sub(now.0)).min(1_000_000);
        self.pulse.set_asleep(true);
        let waited = self.poller.wait(Some(Duration::from_micros(due)), &mut Vec::new());
        self.pulse.set_asleep(false);
        self.worker.end_sleep_lent();
        self.bell.clear();
        waited?;
        self.serve_channel()
    }

    /// Serves the messages on the control connection. Ends the process when the agent has closed it.
    fn serve_channel(&mut self) -> Result<()> {
        loop {
            match self.channel.try_receive::<ToNic>() {
                Ok((ToNic::Attach { session, .. }, descriptors)) => {
                    let memory = descriptors.into_iter().next().context("a session needs its memory")?;
                    let memory = Region::map(memory)?;
                    memory.exclude_from_dumps(session_layout::HEAP);
                    self.worker.attach(session, Arc::new(memory));
                    self.channel.send(&ToAgent::Attached, &[])?;
                }
                Ok((ToNic::Detach(session), _)) => self.worker.detach_lent(session),
                Ok((other, _)) => anyhow::bail!("the host's TCP was sent {other:?}, which is for a NIC"),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(_) => std::process::exit(0),
            }
        }
    }
}
