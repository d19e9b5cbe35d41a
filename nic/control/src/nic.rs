//! The NIC's main loop.

use crate::emulated::EmulatedWire;
use anyhow::{Context, Result};
use baton_abi::layout::{Counter, nic};
use baton_backends::{BesideKernel, Kernel, PacketDevice, VnetDevice, Wire};
use baton_datapath::{Settings, Worker};
use baton_kernel::control::Channel;
use baton_kernel::events::{Doorbell, Poller, Trigger, monotonic_micros, monotonic_nanos};
use baton_kernel::process;
use baton_offloads::Offloads;
use baton_ring::Region;
use baton_sim::Impairments;
use baton_tcp::Instant;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The emulated link in front of the wire, the same both ways. Times in microseconds, probabilities in parts per million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkSettings {
    /// Bits per second, 0 for no limit.
    pub rate: u64,
    /// One-way delay.
    pub delay: u64,
    /// Bytes of buffer.
    pub buffer: u64,
    /// Frames lost.
    pub loss: u32,
    /// Frames held back by `hold`.
    pub reorder: u32,
    /// How long.
    pub hold: u64,
    /// Frames doubled.
    pub duplicate: u32,
    /// Frames damaged.
    pub corrupt: u32,
    /// Only what the NIC sends is lost, held back, doubled or damaged; what it receives is merely delayed.
    pub one_way: bool,
    /// Seed of the faults.
    pub seed: u64,
}

impl LinkSettings {
    /// As the link wants them.
    pub fn impairments(&self) -> Impairments {
        let LinkSettings { rate, delay, buffer, loss, reorder, hold, duplicate, corrupt, one_way: _, seed: _ } = *self;
        Impairments { rate, delay, buffer, loss, reorder, hold, duplicate, corrupt }
    }
}

/// What a NIC process is told when it starts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NicSettings {
    /// Connections that it can hold.
    pub slots: usize,
    /// Core that it runs on, if it is bound to one.
    pub core: Option<usize>,
    /// Microseconds that it polls without work before it sleeps.
    pub spin: u64,
    /// The wire takes frames of up to 64 KB.
    pub segmentation: bool,
    /// What it does for the kernel's own connections; not beside the kernel, where their frames never come here.
    #[serde(default)]
    pub offloads: Offloads,
    /// Frames that come during a move are dropped, not kept for the connection's next owner.
    #[serde(default)]
    pub drop_during_moves: bool,
    /// The NIC hears and speaks on the kernel's own devices, instead of sitting between the kernel and the wire.
    #[serde(default)]
    pub beside: bool,
    /// The emulated link.
    pub link: LinkSettings,
    /// Key of the lookup table.
    pub hash_key: [u64; 4],
}

/// Descriptors that a NIC process inherits from its agent, and an agent from its keeper, in this order from 3 on.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Descriptor {
    /// The TAP that is the kernel's interface; beside the kernel, the packet socket that hears what it sends.
    Host = 3,
    /// The wire; beside the kernel, the packet socket on all devices.
    Wire = 4,
    /// NIC memory.
    Memory = 5,
    /// The NIC's doorbell.
    NicBell = 6,
    /// The agent's doorbell.
    AgentBell = 7,
    /// The control connection to whoever started the process.
    Channel = 8,
    /// Beside the kernel: the TAP through which it is given frames.
    Injector = 9,
}

/// How the source address of a frame for the injector begins: the interface's index follows. As in baton_steering.
pub const INJECT: [u8; 2] = [0x02, 0xba];

/// What the agent sends over the control connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToNic {
    /// A session; its memory and the program's doorbell come along.
    Attach {
        /// Its number.
        session: u32,
    },
    /// Frames may flow.
    Start,
    /// Other offloads from now on.
    Offloads(Box<Offloads>),
}

/// What the NIC answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToAgent {
    /// It is ready.
    Ready,
    /// The session is attached.
    Attached,
    /// The offloads are as they were asked for.
    Set,
    /// It is not, because.
    Failed(String),
}

type NicWorker = Worker<Kernel, EmulatedWire<Wire>>;

struct Nic {
    worker: NicWorker,
    memory: Arc<Region>,
    channel: Channel,
    bell: Doorbell,
    agent_bell: Doorbell,
    program_bells: HashMap<u32, Doorbell>,
    channel_seen: u32,
    busy_nanos: u64,
}

fn take(descriptor: Descriptor) -> Result<OwnedFd> {
    process::inherited(descriptor as i32)
        .with_context(|| format!("descriptor {descriptor:?}; the agent starts this process, not a person"))
}

/// Runs a NIC until the agent is gone.
///
/// # Errors
/// If a descriptor is missing or the system refuses something that it needs.
pub fn run(settings: &NicSettings) -> Result<()> {
    if let Some(core) = settings.core {
        process::pin(0, core);
    }
    let (host, wire) = (take(Descriptor::Host)?, take(Descriptor::Wire)?);
    let (host, wire) = if settings.beside {
        let host = BesideKernel::new(host, take(Descriptor::Injector)?, INJECT);
        (Kernel::Beside(host), Wire::Beside(PacketDevice::new(wire, settings.segmentation)))
    } else {
        let host = VnetDevice::new(host, settings.segmentation);
        (Kernel::Inline(host), Wire::Inline(VnetDevice::new(wire, settings.segmentation)))
    };
    let memory = Arc::new(Region::map(take(Descriptor::Memory)?)?);
    let channel = Channel::from_fd(take(Descriptor::Channel)?);
    let bell = Doorbell::from_fd(take(Descriptor::NicBell)?);
    let agent_bell = Doorbell::from_fd(take(Descriptor::AgentBell)?);
    process::drop_capabilities().context("giving up capabilities")?;

    let poller = Poller::new()?;
    for (token, fd) in [host.fd(), wire.fd(), bell.as_fd(), channel.as_fd()].into_iter().enumerate() {
        poller.add(fd, token as u64, Trigger::Readable)?;
    }
    let out = settings.link.impairments();
    let back =
        if settings.link.one_way { Impairments { rate: out.rate, delay: out.delay, ..Impairments::default() } } else { out };
    let wire = EmulatedWire::new(wire, out, back, settings.link.seed);
    let drop_during_moves = settings.drop_during_moves;
    let worker_settings = Settings {
        slots: settings.slots,
        hash_key: settings.hash_key,
        drop_during_moves,
        lro: baton_lro::Settings { hash_key: settings.hash_key, ..settings.offloads.lro },
        moderation: settings.offloads.moderation,
        beside: settings.beside,
        ..Settings::default()
    };
    let now = Instant(monotonic_micros());
    let worker = Worker::new(host, wire, memory.clone(), worker_settings, now);
    let channel_seen = memory.word32(nic::CHANNEL).load(Ordering::Acquire);
    let mut nic = Nic { worker, memory, channel, bell, agent_bell, program_bells: HashMap::new(), channel_seen, busy_nanos: 0 };
    nic.channel.send(&ToAgent::Ready, &[])?;
    nic.main_loop(settings, &poller)
}

impl Nic {
    fn main_loop(&mut self, settings: &NicSettings, poller: &Poller) -> Result<()> {
        let mut tokens = Vec::new();
        let mut idle_since = monotonic_micros();
        loop {
            let started = monotonic_nanos();
            let now = Instant(started / 1000);
            self.memory.words(nic::HEARTBEAT, 1)[0].store(now.0, Ordering::Relaxed);
            self.worker.wire().tick(now.0);
            let worked = self.worker.poll(now);
            self.ring_doorbells();
            if self.memory.word32(nic::CHANNEL).load(Ordering::Acquire) != self.channel_seen {
                self.serve_channel()?;
            }
            if worked {
                idle_since = now.0;
                self.busy_nanos += monotonic_nanos() - started;
                self.publish_counters();
            } else if now.0 - idle_since > settings.spin && self.worker.prepare_sleep() {
                let next = [self.worker.next_timeout(), self.worker.wire().next_arrival()].into_iter().flatten().min();
                let limit = next.map_or(1_000_000, |at| at.saturating_sub(now.0)).min(1_000_000);
                let waited = poller.wait(Some(Duration::from_micros(limit)), &mut tokens);
                self.worker.end_sleep();
                self.bell.clear();
                waited?;
                if tokens.drain(..).any(|token| token == 3) {
                    self.serve_channel()?;
                }
                idle_since = monotonic_micros();
            }
        }
    }

    fn ring_doorbells(&mut self) {
        let bells = &self.program_bells;
        let agent = self.worker.doorbells(|session| {
            if let Some(bell) = bells.get(&session) {
                bell.ring();
            }
        });
        if agent {
            self.agent_bell.ring();
        }
    }

    fn publish_counters(&mut self) {
        let words = self.memory.words(nic::COUNTERS, baton_abi::layout::COUNTERS);
        words[Counter::BusyNanoseconds as usize].store(self.busy_nanos, Ordering::Relaxed);
        let [out, back] = self.worker.wire().counters();
        words[Counter::LinkLost as usize].store(out.lost + back.lost, Ordering::Relaxed);
        words[Counter::LinkOverflowed as usize].store(out.overflowed + back.overflowed, Ordering::Relaxed);
    }

    /// Serves the control connection. When the agent is gone, so is this process's reason to be.
    fn serve_channel(&mut self) -> Result<()> {
        self.channel_seen = self.memory.word32(nic::CHANNEL).load(Ordering::Acquire);
        loop {
            match self.channel.try_receive::<ToNic>() {
                Ok((ToNic::Attach { session }, descriptors)) => {
                    let answer = match self.attach(session, descriptors) {
                        Ok(()) => ToAgent::Attached,
                        Err(error) => ToAgent::Failed(format!("{error:#}")),
                    };
                    self.channel.send(&answer, &[])?;
                }
                Ok((ToNic::Start, _)) => self.worker.start(),
                Ok((ToNic::Offloads(set), _)) => {
                    self.worker.set_offloads(set.lro, set.moderation, Instant(monotonic_micros()));
                    self.channel.send(&ToAgent::Set, &[])?;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(_) => std::process::exit(0),
            }
        }
    }

    fn attach(&mut self, session: u32, descriptors: Vec<OwnedFd>) -> Result<()> {
        let [memory, bell] =
            <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| anyhow::anyhow!("two descriptors belong to a session"))?;
        self.worker.attach(session, Arc::new(Region::map(memory)?));
        self.program_bells.insert(session, Doorbell::from_fd(bell));
        Ok(())
    }
}
