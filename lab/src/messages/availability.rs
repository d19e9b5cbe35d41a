//! Processor availability (the paper's figure 9): how much of host A's processor a program has that works while
//! messages are on their way, and looks for their completion in intervals.

use super::bed::{Bed, Conditions, Offload};
use super::pingpong::{echo, receive, send};
use crate::closed_loop::SetsAtEnd;
use anyhow::{Context, Result, bail};
use baton_client::messages::Endpoint;
use baton_linux::events::{Doorbell, monotonic_micros, thread_nanos};
use baton_linux::process;
use baton_rmpp::{PeerId, Region, Side};
use serde::Serialize;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Tags of messages either way, as the peer has them.
const PING: u64 = 1;
const PONG: u64 = 2;
/// Microseconds of a round after which its message counts as lost.
const PATIENCE: u64 = 20_000_000;
/// Longest sleep of the endpoint's thread, in microseconds.
const LOOK: u64 = 20_000;

/// Availability at one polling interval.
#[derive(Clone, Debug, Serialize)]
pub struct Availability {
    /// Where the halves are.
    pub offload: Offload,
    /// Bytes of a message.
    pub size: u64,
    /// Microseconds of work between two polls.
    pub interval_us: u64,
    /// Megabytes per second, both directions.
    pub megabytes: f64,
    /// Share of the processor time used on host A that was the program's work: the rest went to its messages.
    pub availability: f64,
    /// Milliseconds of host A's CPU per MB, without the work.
    pub host_cpu_ms_per_mb: f64,
    /// Milliseconds of the NIC's CPU per MB.
    pub nic_cpu_ms_per_mb: f64,
    /// Packets that host A's program handled, and events of the NIC's, per packet.
    pub events_per_packet: f64,
    /// How often each byte of a message was copied by host A's processor.
    pub copies_per_byte: f64,
}

/// What the program and the endpoint's thread, which stands for the kernel and interrupts the program, share.
struct Shared {
    /// Rounds that the program has begun, and those whose reply has come.
    begun: AtomicU32,
    replied: AtomicU32,
    over: AtomicBool,
    bell: Doorbell,
}

impl Shared {
    /// Begins a round.
    fn begin(&self) {
        self.begun.fetch_add(1, Ordering::Release);
        self.bell.ring();
    }
}

/// The endpoint's thread. Returns how many nanoseconds of CPU it took.
fn serve(a: &mut Endpoint, peer: PeerId, size: u64, shared: &Shared) -> Result<u64> {
    let [heap, _] = a.heap();
    let [out, back] = [0, 1].map(|at| Region { offset: heap + at * size, length: size });
    a.watch(shared.bell.as_fd())?;
    let mut begun = 0;
    let mut since = None;
    while !shared.over.load(Ordering::Acquire) {
        let now = monotonic_micros();
        shared.bell.clear();
        if shared.begun.load(Ordering::Acquire) != begun {
            begun += 1;
            receive(a, PONG, back)?;
            send(a, peer, PING, out)?;
            // The first round, in which the endpoints meet, is not measured.
            if begun == 2 {
                since = Some(thread_nanos());
            }
        }
        a.progress(now).context("the endpoint")?;
        while let Some(completion) = a.poll_completion() {
            if let Err(error) = completion.result {
                bail!("a message failed: {error:?}");
            }
            if completion.side == Side::Receive {
                shared.replied.fetch_add(1, Ordering::Release);
            }
        }
        a.wait(monotonic_micros(), now + LOOK)?;
    }
    Ok(thread_nanos() - since.unwrap_or_else(thread_nanos))
}

/// Works for `interval` microseconds of processor time. Returns the nanoseconds that it was.
fn work(interval: u64) -> u64 {
    let begin = thread_nanos();
    loop {
        for _ in 0..64 {
            std::hint::spin_loop();
        }
        let worked = thread_nanos() - begin;
        if worked >= interval * 1000 {
            return worked;
        }
    }
}

/// Works until the reply to a round has come. Returns the nanoseconds of work.
fn work_until(shared: &Shared, round: u32, interval: u64) -> Result<u64> {
    let (begin, mut worked) = (monotonic_micros(), 0);
    shared.begin();
    while shared.replied.load(Ordering::Acquire) < round {
        worked += work(interval);
        if shared.over.load(Ordering::Acquire) || monotonic_micros() > begin + PATIENCE {
            bail!("a message did not come");
        }
    }
    Ok(worked)
}

/// Measures availability in a test bed of its own.
///
/// # Errors
/// If the bed cannot be made, or a message is lost.
pub fn availability(conditions: &Conditions, size: u64, interval: u64, rounds: u32) -> Result<Availability> {
    let mut bed = Bed::new(&Conditions { memory: conditions.memory.max(4 * size as usize + 4096), ..*conditions })?;
    let (testbed, a, b, napi) = bed.split();
    let (to_a, to_b) = (a.address(), b.address());
    let over = AtomicBool::new(false);
    let shared =
        Shared { begun: AtomicU32::new(0), replied: AtomicU32::new(0), over: AtomicBool::new(false), bell: Doorbell::new()? };
    let of_kernel = || -> Result<[u64; 2]> {
        let nic = testbed.tool()?.statistics()?.nic_process;
        let kernel = napi.iter().filter_map(|thread| process::cpu_nanos(*thread)).sum::<u64>();
        Ok([kernel, process::cpu_nanos(nic).context("the NIC has ended")?])
    };
    let measured = std::thread::scope(|scope| {
        let peer = scope.spawn(|| echo(b, to_a, size, &over));
        let endpoint = &mut *a;
        let served = scope.spawn(|| -> Result<(u64, baton_client::messages::Usage)> {
            let _over = SetsAtEnd(&shared.over);
            process::pin(0, process::cores() - 1);
            let peer = endpoint.peer(to_b).map_err(|limit| anyhow::anyhow!("{limit:?}"))?;
            let nanos = serve(endpoint, peer, size, &shared)?;
            Ok((nanos, endpoint.usage()))
        });
        let mine = {
            let (_over, _end) = (SetsAtEnd(&over), SetsAtEnd(&shared.over));
            let mine = || -> Result<(u64, [u64; 2], f64)> {
                process::pin(0, process::cores() - 1);
                work_until(&shared, 1, interval)?;
                let (before, begin) = (of_kernel()?, monotonic_micros());
                let worked = (0..rounds)
                    .try_fold(0, |sum, round| Ok::<u64, anyhow::Error>(sum + work_until(&shared, round + 2, interval)?))?;
                let (seconds, after) = ((monotonic_micros() - begin) as f64 / 1e6, of_kernel()?);
                Ok((worked, std::array::from_fn(|at| after[at] - before[at]), seconds))
            };
            mine()
        };
        shared.bell.ring();
        let served = served.join().map_err(|_| anyhow::anyhow!("the endpoint's thread panicked"))?;
        let theirs = peer.join().map_err(|_| anyhow::anyhow!("the peer panicked"))?;
        theirs.and(served).and_then(|served| mine.map(|mine| (served, mine)))
    });
    let ((program, usage), (worked, [kernel, nic], seconds)) = measured?;
    let megabytes = 2.0 * size as f64 * f64::from(rounds) / 1e6;
    let packets = usage.packets.max(1) as f64;
    Ok(Availability {
        offload: conditions.offload,
        size,
        interval_us: interval,
        megabytes: megabytes / seconds,
        availability: worked as f64 / (worked + program + kernel) as f64,
        host_cpu_ms_per_mb: (program + kernel) as f64 / 1e6 / megabytes,
        nic_cpu_ms_per_mb: nic as f64 / 1e6 / megabytes,
        events_per_packet: (usage.packets - usage.packets_on_nic + usage.events) as f64 / packets,
        copies_per_byte: usage.copied as f64 / (2.0 * size as f64 * f64::from(rounds + 1)),
    })
}
