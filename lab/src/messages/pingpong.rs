//! The ping-pong test (the paper's figure 6): half a round trip of messages of one size, and what it costs host A.

use super::bed::{Bed, Conditions, Offload, Used};
use crate::closed_loop::SetsAtEnd;
use anyhow::{Context, Result, bail};
use baton_client::messages::Endpoint;
use baton_linux::events::monotonic_micros;
use baton_linux::process;
use baton_rmpp::{Completion, Memory, Outgoing, PeerId, Region, Request, Side};
use serde::Serialize;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Microseconds after which a message that has not come counts as lost.
const PATIENCE: u64 = 20_000_000;
/// Longest sleep of a peer that looks whether it is to end, in microseconds.
const LOOK: u64 = 20_000;
/// Tags of messages either way.
const PING: u64 = 1;
const PONG: u64 = 2;

/// Messages of one size under one set of conditions.
#[derive(Clone, Debug, Serialize)]
pub struct PingPong {
    /// Where the halves are.
    pub offload: Offload,
    /// Packets before the last cleared one that the RSM is sent.
    pub lead: u8,
    /// MTU of both hosts.
    pub mtu: u16,
    /// Bytes of a message.
    pub size: u64,
    /// Round trips that were measured.
    pub rounds: u32,
    /// Half the shortest round trip, microseconds.
    pub min_us: f64,
    /// Half the mean round trip.
    pub mean_us: f64,
    /// Half the longest round trip.
    pub max_us: f64,
    /// Megabits per second, from the mean.
    pub megabits: f64,
    /// Milliseconds of host A's CPU per MB sent and received: the program's and its kernel's. The NIC's is not among
    /// them.
    pub host_cpu_ms_per_mb: f64,
    /// Milliseconds of the NIC's CPU per MB.
    pub nic_cpu_ms_per_mb: f64,
    /// Packets of host A, sent and received.
    pub packets: u64,
    /// Of these, those that the NIC handled.
    pub packets_on_nic: u64,
    /// Packets that host A's program handled, and events of the NIC's, per packet.
    pub events_per_packet: f64,
    /// How often each byte of a message was copied by host A's processor.
    pub copies_per_byte: f64,
    /// Interrupts of host A per packet: bursts of frames, and doorbells of a program that slept.
    pub interrupts_per_packet: f64,
    /// Bytes that were compared.
    pub bytes_verified: u64,
    /// Bytes that were wrong.
    pub mismatches: u64,
}

/// The byte at an offset of a message.
pub fn pattern(round: u64, at: u64) -> u8 {
    (round.wrapping_mul(31).wrapping_add(at.wrapping_mul(7)).wrapping_add(at >> 8)) as u8
}

/// Writes a message's pattern.
pub fn fill(endpoint: &mut Endpoint, region: Region, round: u64) {
    let bytes: Vec<u8> = (0..region.length).map(|at| pattern(round, at)).collect();
    endpoint.memory().write(region.offset, &bytes);
}

/// Bytes of a message that are not as [`fill`] wrote them.
pub fn compare(endpoint: &mut Endpoint, region: Region, round: u64) -> u64 {
    let mut bytes = vec![0; region.length as usize];
    if !endpoint.memory().read(region.offset, &mut bytes) {
        return region.length;
    }
    bytes.iter().enumerate().filter(|(at, byte)| **byte != pattern(round, *at as u64)).count() as u64
}

/// Waits for a completion of one side.
///
/// # Errors
/// If it failed, or did not come in time.
pub fn wait_for(endpoint: &mut Endpoint, side: Side) -> Result<Completion> {
    let deadline = monotonic_micros() + PATIENCE;
    loop {
        let now = monotonic_micros();
        endpoint.progress(now).context("the endpoint")?;
        while let Some(completion) = endpoint.poll_completion() {
            if let Err(error) = completion.result {
                bail!("a message failed: {error:?}");
            }
            if completion.side == side {
                return Ok(completion);
            }
        }
        if now > deadline {
            bail!("a message did not come within {} s", PATIENCE / 1_000_000);
        }
        endpoint.wait(now, now + LOOK)?;
    }
}

/// Sends, and receives, the message of a tag in `region`.
pub fn send(endpoint: &mut Endpoint, peer: PeerId, tag: u64, region: Region) -> Result<()> {
    let outgoing = Outgoing { peer, context: 0, tag, data: 0, region, token: tag };
    endpoint.send(outgoing, monotonic_micros()).map_err(|limit| anyhow::anyhow!("a message cannot be sent: {limit:?}"))
}

pub fn receive(endpoint: &mut Endpoint, tag: u64, region: Region) -> Result<()> {
    let request = Request { source: None, context: 0, tag, ignore: 0, region, token: tag };
    let posted = endpoint.receive(request, monotonic_micros());
    posted.map(drop).map_err(|limit| anyhow::anyhow!("a receive cannot be posted: {limit:?}"))
}

/// The peer: sends each message back as it came, until `over`.
pub fn echo(endpoint: &mut Endpoint, to: SocketAddr, size: u64, over: &AtomicBool) -> Result<()> {
    let [heap, _] = endpoint.heap();
    let regions = [0, 1].map(|at| Region { offset: heap + at * size, length: size });
    let peer = endpoint.peer(to).map_err(|limit| anyhow::anyhow!("{limit:?}"))?;
    receive(endpoint, PING, regions[0])?;
    let mut round = 0;
    while !over.load(Ordering::Relaxed) {
        let now = monotonic_micros();
        endpoint.progress(now)?;
        while let Some(completion) = endpoint.poll_completion() {
            if completion.result.is_err() && !over.load(Ordering::Relaxed) {
                bail!("the peer: {:?}", completion.result);
            }
            if completion.side == Side::Receive {
                // The next ping can come before this pong has been acknowledged: it goes into the other half.
                receive(endpoint, PING, regions[(round + 1) % 2])?;
                send(endpoint, peer, PONG, regions[round % 2])?;
                round += 1;
            }
        }
        endpoint.wait(monotonic_micros(), now + LOOK)?;
    }
    Ok(())
}

/// Round trips of host A.
struct Rounds {
    /// Microseconds of each.
    times: Vec<f64>,
    used: Used,
    verified: u64,
    mismatches: u64,
}

/// Measures messages of one size in a test bed of their own.
///
/// # Errors
/// If the bed cannot be made, or a message is lost.
pub fn ping_pong(conditions: &Conditions, size: u64, rounds: u32) -> Result<PingPong> {
    let mut bed = Bed::new(&Conditions { memory: conditions.memory.max(4 * size as usize + 4096), ..*conditions })?;
    let (testbed, a, b, napi) = bed.split();
    let (to_a, to_b) = (a.address(), b.address());
    let over = AtomicBool::new(false);
    let done = std::thread::scope(|scope| {
        let peer = scope.spawn(|| echo(b, to_a, size, &over));
        let mine = {
            let _ending = SetsAtEnd(&over);
            let mut mine = || -> Result<Rounds> {
                // Beside the NIC's worker, which has the first core.
                process::pin(0, process::cores() - 1);
                let peer = a.peer(to_b).map_err(|limit| anyhow::anyhow!("{limit:?}"))?;
                drive(a, peer, size, rounds, &|endpoint| Bed::used(testbed, napi, endpoint))
            };
            mine()
        };
        let theirs = peer.join().map_err(|_| anyhow::anyhow!("the peer panicked"))?;
        mine.and_then(|mine| theirs.map(|()| mine))
    })?;
    Ok(report(conditions, size, &done))
}

fn drive(a: &mut Endpoint, peer: PeerId, size: u64, rounds: u32, used: &dyn Fn(&Endpoint) -> Result<Used>) -> Result<Rounds> {
    let [heap, _] = a.heap();
    let [out, back] = [0, 1].map(|at| Region { offset: heap + at * size, length: size });
    let mut done = Rounds { times: Vec::new(), used: Used::default(), verified: 0, mismatches: 0 };
    let trip = |a: &mut Endpoint| -> Result<f64> {
        let begin = monotonic_micros();
        receive(a, PONG, back)?;
        send(a, peer, PING, out)?;
        wait_for(a, Side::Receive)?;
        Ok((monotonic_micros() - begin) as f64)
    };
    // The first round trip, in which the endpoints meet, and the last one are compared and not measured.
    fill(a, out, 1);
    trip(a)?;
    done.mismatches += compare(a, back, 1);
    let before = used(a)?;
    for _ in 0..rounds {
        done.times.push(trip(a)?);
    }
    done.used = used(a)?.since(&before);
    fill(a, out, 2);
    trip(a)?;
    done.mismatches += compare(a, back, 2);
    done.verified = 2 * size;
    Ok(done)
}

fn report(conditions: &Conditions, size: u64, done: &Rounds) -> PingPong {
    let rounds = done.times.len() as f64;
    let half = |time: f64| time / 2.0;
    let mean = half(done.times.iter().sum::<f64>() / rounds);
    let megabytes = 2.0 * size as f64 * rounds / 1e6;
    let usage = &done.used.endpoint;
    let packets = usage.packets.max(1) as f64;
    let per_megabyte = |nanos: u64| if size == 0 { 0.0 } else { nanos as f64 / 1e6 / megabytes };
    PingPong {
        offload: conditions.offload,
        lead: conditions.lead,
        mtu: conditions.mtu,
        size,
        rounds: done.times.len() as u32,
        min_us: half(done.times.iter().copied().fold(f64::INFINITY, f64::min)),
        mean_us: mean,
        max_us: half(done.times.iter().copied().fold(0.0, f64::max)),
        megabits: size as f64 * 8.0 / mean,
        host_cpu_ms_per_mb: per_megabyte(done.used.program + done.used.kernel),
        nic_cpu_ms_per_mb: per_megabyte(done.used.nic),
        packets: usage.packets,
        packets_on_nic: usage.packets_on_nic,
        events_per_packet: (usage.packets - usage.packets_on_nic + usage.events) as f64 / packets,
        copies_per_byte: if size == 0 { 0.0 } else { usage.copied as f64 / (megabytes * 1e6) },
        interrupts_per_packet: done.used.interrupts as f64 / packets,
        bytes_verified: done.verified,
        mismatches: done.mismatches,
    }
}
