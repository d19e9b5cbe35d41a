//! The test bed for messages: two hosts, and an endpoint on each.

use anyhow::{Context, Result};
use baton_abi::layout::Counter;
use baton_bed::testbed::{self, Testbed, TestbedSettings};
use baton_client::messages::{Endpoint, Settings, Usage};
use baton_linux::events::{monotonic_micros, thread_nanos};
use baton_linux::process;
use baton_offloads::Offloads;
use baton_protocol::nic::LinkSettings;
use baton_rmpp::Halves;
use serde::Serialize;
use std::net::SocketAddr;

/// Bytes of headers in front of a packet: IPv4 and UDP.
const HEADERS: u16 = 28;
/// The same of IPv6.
const HEADERS_V6: u16 = 48;

/// Where the data half's halves are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// Both in the program: the paper's step 0.
    None,
    /// The receiving half on the NIC: step 1.
    Receive,
    /// Both on the NIC: step 2, and with a lead step 3.
    Both,
}

impl Offload {
    fn halves(self) -> Halves {
        Halves { receiving: self != Offload::None, sending: self == Offload::Both }
    }
}

/// Conditions of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Conditions {
    /// Where the halves are.
    pub offload: Offload,
    /// Packets before the last cleared one that the RSM is sent, 0 to 15.
    pub lead: u8,
    /// MTU of both hosts.
    pub mtu: u16,
    /// Interrupt coalescing.
    pub coalesce: bool,
    /// The link.
    pub link: LinkSettings,
    /// Bytes of memory for messages.
    pub memory: usize,
    /// Messages in each direction.
    pub messages: u16,
    /// Each host's work is accounted separately.
    pub accounted: bool,
    /// Receives that host A's NIC has room for, so that it matches; 0 if host A's program does.
    pub posted_on_nic: u16,
    /// Over IPv6 instead of IPv4.
    pub ipv6: bool,
    /// In raw Ethernet frames instead of UDP.
    pub ethernet: bool,
    /// The NIC is beside the kernel; then the link is not emulated.
    pub beside: bool,
    /// Number of the NIC's workers.
    pub workers: usize,
    /// Each worker has queues of its own.
    pub card: bool,
    /// A copy engine writes the workers' frames to the host.
    pub copy_engine: bool,
    /// Seed of keys and faults.
    pub seed: u64,
}

impl Conditions {
    /// Nothing is offloaded, frames of 1500 bytes, a clean link.
    pub fn plain() -> Conditions {
        Conditions {
            offload: Offload::None,
            lead: 0,
            mtu: 1500,
            coalesce: false,
            link: LinkSettings::default(),
            memory: 32 << 20,
            messages: 256,
            accounted: true,
            posted_on_nic: 0,
            ipv6: false,
            ethernet: false,
            beside: false,
            workers: 1,
            card: false,
            copy_engine: false,
            seed: 1,
        }
    }

    /// The settings of an endpoint of host A, or else of host B.
    pub fn endpoint(&self, bed: &Testbed, on_a: bool) -> Settings {
        let ip = if on_a { testbed::address_a(self.ipv6) } else { testbed::address_b(self.ipv6) };
        let on_nic = if on_a { self.offload.halves() } else { Offload::None.halves() };
        Settings {
            address: SocketAddr::new(ip, 0),
            on_nic,
            agent: bed.socket(),
            ethernet: self.ethernet.then(|| if on_a { testbed::INTERFACE_A } else { testbed::INTERFACE_B }.into()),
            packet: self.mtu
                - if self.ethernet {
                    0
                } else if self.ipv6 {
                    HEADERS_V6
                } else {
                    HEADERS
                },
            early: self.lead,
            nic_buffers: 256,
            memory: self.memory,
            messages: self.messages,
            posted_on_nic: if on_a { self.posted_on_nic } else { 0 },
            hash_key: std::array::from_fn(|word| self.seed.wrapping_add(word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            incarnation: (monotonic_micros() / 1000) as u32,
        }
    }
}

/// Two hosts with an endpoint each.
pub struct Bed {
    pub testbed: Testbed,
    pub a: Endpoint,
    pub b: Endpoint,
    /// Threads in which host A's kernel receives.
    napi: Vec<u32>,
}

/// What host A and the NIC have used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Used {
    /// Nanoseconds of the thread that drives the endpoint.
    pub program: u64,
    /// Nanoseconds in which the kernel received, and of the agent.
    pub kernel: u64,
    /// Nanoseconds of the NIC's process.
    pub nic: u64,
    /// Interrupts of host A: bursts of frames to its kernel, and doorbells of the program.
    pub interrupts: u64,
    /// Of the endpoint.
    pub endpoint: Usage,
}

impl Used {
    /// What was used since `before`.
    pub fn since(&self, before: &Used) -> Used {
        let usage = Usage {
            packets: self.endpoint.packets - before.endpoint.packets,
            packets_on_nic: self.endpoint.packets_on_nic - before.endpoint.packets_on_nic,
            events: self.endpoint.events - before.endpoint.events,
            copied: self.endpoint.copied - before.endpoint.copied,
            nic_deaths: self.endpoint.nic_deaths,
        };
        Used {
            program: self.program - before.program,
            kernel: self.kernel - before.kernel,
            nic: self.nic - before.nic,
            interrupts: self.interrupts - before.interrupts,
            endpoint: usage,
        }
    }
}

impl Bed {
    /// Makes the hosts and their endpoints.
    ///
    /// # Errors
    /// If something is missing; the message says what to do.
    pub fn new(conditions: &Conditions) -> Result<Bed> {
        let moderation = if conditions.coalesce { COALESCED } else { baton_moderation::Mode::Off };
        let testbed = Testbed::new(&TestbedSettings {
            mtu: conditions.mtu.into(),
            link: conditions.link,
            threaded_napi: conditions.accounted,
            offloads: Offloads { moderation, doorbells: moderation, ..Offloads::default() },
            seed: conditions.seed,
            // The NIC holds its packets back for nobody.
            peer_queue: Some(4096),
            beside: conditions.beside,
            workers: conditions.workers,
            card: conditions.card,
            copy_engine: conditions.copy_engine,
            ..TestbedSettings::default()
        })?;
        let endpoint = |on_a| {
            let host = if on_a { &testbed.host_a } else { &testbed.host_b };
            let settings = conditions.endpoint(&testbed, on_a);
            host.run(|| Endpoint::new(&settings))
                .with_context(|| format!("the endpoint of host {}", if on_a { "A" } else { "B" }))
        };
        let (a, b) = (endpoint(true)?, endpoint(false)?);
        let napi = process::napi_threads("baton0");
        Ok(Bed { testbed, a, b, napi })
    }

    /// Asks for what was used so far. To be called by the thread that drives host A's endpoint.
    ///
    /// # Errors
    /// If agent or NIC have ended.
    pub fn used(testbed: &Testbed, napi: &[u32], endpoint: &Endpoint) -> Result<Used> {
        let statistics = testbed.tool()?.statistics()?;
        let agent = process::cpu_nanos(statistics.agent_process).context("the agent has ended")?;
        let kernel = napi.iter().filter_map(|thread| process::cpu_nanos(*thread)).sum::<u64>();
        let nic = process::cpu_nanos(statistics.nic_process).context("the NIC has ended")?;
        let count = |counter: Counter| statistics.counters[counter as usize];
        Ok(Used {
            program: thread_nanos(),
            kernel: kernel + agent,
            nic,
            interrupts: count(Counter::Interrupts) + count(Counter::Doorbells),
            endpoint: endpoint.usage(),
        })
    }

    /// The hosts, the endpoints, and the threads in which host A's kernel receives.
    pub fn split(&mut self) -> (&Testbed, &mut Endpoint, &mut Endpoint, &[u32]) {
        (&self.testbed, &mut self.a, &mut self.b, &self.napi)
    }
}

/// The ACEnic driver's default, which the paper measured with.
const COALESCED: baton_moderation::Mode = baton_moderation::Mode::Static { time: 120, frames: 25 };
