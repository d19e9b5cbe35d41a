//! Section V.C: a download between two kernels, through a NIC whose large receive waits for 64 KB without a time-out.

use crate::lro::{Receiver, send};
use anyhow::{Result, anyhow, ensure};
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings, connect_pairs, counter};
use baton_linux::events::monotonic_micros;
use baton_linux::socket;
use baton_lro::{LroSettings, Mode, Push};
use baton_offloads::Offloads;
use baton_protocol::nic::LinkSettings;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Microseconds for which large receive waits: longer than a download.
const NEVER: u64 = 60_000_000;
/// Microseconds after which a download ends.
const LONGEST: u64 = 5_000_000;
/// Microseconds of the wire, one way, as in the model.
const DELAY: u64 = 250;
/// Frames that the sender's interface holds, and the sender's memory, which fits into that: nothing is lost there.
const QUEUE: u16 = 4096;
const SEND_MEMORY: &str = "4096 16384 700000";

/// What came of a download.
pub struct Outcome {
    /// Segments that the sender sent again. None was lost.
    pub spurious: u64,
    /// Acknowledgements of the NIC's own.
    pub by_nic: u64,
    /// Mb/s.
    pub megabits: f64,
}

/// Downloads so many bytes, or what comes in time.
///
/// # Errors
/// If the test bed cannot be made, or the connection breaks.
pub fn run(active: bool, bytes: u64) -> Result<Outcome> {
    let lro =
        LroSettings { mode: Mode::Reorder, push: Push::Ignore, quiet: (NEVER, NEVER), age: NEVER, ..LroSettings::default() };
    let bed = Testbed::new(&TestbedSettings {
        link: LinkSettings { delay: DELAY, ..LinkSettings::default() },
        offloads: Offloads { lro, active_ack: active, ..Offloads::default() },
        peer_queue: Some(QUEUE),
        peer_sysctls: vec![("ipv4/tcp_wmem", SEND_MEMORY.into())],
        ..TestbedSettings::default()
    })?;
    let (servers, clients) = connect_pairs(&bed, 1, false)?;
    let mut receiver = Receiver::new(&servers, false)?;
    // The NIC acknowledges for a kernel that has sent something since the handshake. This byte waits for the sender's
    // probe, which pushes it on.
    let (sender, deadline) = (clients[0].as_fd(), monotonic_micros() + LONGEST);
    ensure!(socket::send(sender, &[1])? == 1, "the first byte is not sent");
    while socket::queue_bytes(sender, socket::SIOCOUTQ)? > 0 {
        ensure!(monotonic_micros() < deadline, "the first byte is not acknowledged");
        std::thread::sleep(Duration::from_millis(1));
    }
    receiver.run(deadline, 1)?;
    let again = || counter(&bed.host_b, "snmp", "Tcp:", "RetransSegs");
    let acknowledged = || -> Result<u64> { Ok(bed.tool()?.statistics()?.counters[Counter::Acknowledged as usize]) };
    let before = (again()?, acknowledged()?);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| send(&clients, false, &over));
        let begun = monotonic_micros();
        let received = receiver.run(begun + LONGEST, 1 + bytes);
        let took = monotonic_micros() - begun;
        let after = again().and_then(|again| Ok((again, acknowledged()?)));
        over.store(true, Ordering::Relaxed);
        sending.join().map_err(|_| anyhow!("the sender panicked"))??;
        received?;
        let after = after?;
        let megabits = (receiver.total() - 1) as f64 * 8.0 / took as f64;
        Ok(Outcome { spurious: after.0 - before.0, by_nic: after.1 - before.1, megabits })
    })
}
