//! Partial offload beside the others: an unmodified program on host A sends and receives in bulk over a lossy link,
//! with all of its connection on the NIC (handed off, or made there) and with the fast path alone. Both ends compare
//! every byte.
//!
//! The host's CPU is that of the program, of the agent and of the host's TCP; the NIC's is not counted.

use anyhow::{Context, Result, ensure};
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings, address_a};
use baton_linux::events::monotonic_micros;
use baton_linux::process;
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::Statistics;
use serde::Serialize;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// What the program runs: it sends as many bytes as it is asked for, then receives as many, and answers whether they
/// were right.
const PROGRAM: &str = "
import socket
listener = socket.create_server(('', 7000))
block = memoryview(bytes((31 * at + 7) & 255 for at in range(251)) * 2100)
while True:
    connection, _ = listener.accept()
    amount = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), 'big')
    sent = 0
    while sent < amount:
        at = sent % 251
        sent += connection.send(block[at:at + min(65536, amount - sent)])
    received, right = 0, True
    while received < amount and (data := connection.recv(262144)):
        at = received % 251
        right = right and data == block[at:at + len(data)]
        received += len(data)
    connection.sendall(b'+' if right and received == amount else b'-')
    connection.close()
";

/// The values of `baton run --offload` that are compared.
const OFFLOADS: [&str; 3] = ["handoff", "full", "fast-path"];
/// Frames lost each way, in parts per million.
const LOSSES: [u32; 3] = [0, 1_000, 10_000];
/// One-way delay in microseconds.
const DELAY: u64 = 1_000;

/// One transfer each way.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// Value of `--offload`.
    pub offload: &'static str,
    /// Frames lost each way, in percent.
    pub loss_percent: f64,
    /// Megabits per second out of the program, and into it.
    pub goodput_out: f64,
    /// The same into the program.
    pub goodput_in: f64,
    /// Nanoseconds of the host's CPU per kilobyte: program, agent and host's TCP.
    pub host_ns_per_kb: f64,
    /// Those of the host's TCP alone.
    pub host_tcp_ns_per_kb: f64,
    /// Share of the connection's received segments that the NIC processed itself.
    pub fast_path_share: f64,
    /// Times that the connection was lent to the host's TCP.
    pub lent: u64,
    /// Times that it came back.
    pub taken_back: u64,
}

/// Measures all cells with `megabytes` each way, `rounds` times in turn. Returns the medians by goodput.
///
/// # Errors
/// If the test bed cannot be made, the program fails, or a byte is wrong.
pub fn run(megabytes: u32, rounds: usize) -> Result<Vec<Cell>> {
    let mut all: Vec<Vec<Cell>> = vec![Vec::new(); LOSSES.len() * OFFLOADS.len()];
    for round in 0..rounds.max(1) {
        for (at, cells) in all.iter_mut().enumerate() {
            let (loss, offload) = (LOSSES[at / OFFLOADS.len()], OFFLOADS[at % OFFLOADS.len()]);
            let cell = measure(offload, loss, u64::from(megabytes) << 20, round as u64 + 1)?;
            eprintln!("{cell:?}");
            cells.push(cell);
        }
    }
    let median = |mut cells: Vec<Cell>| {
        cells.sort_by(|a, b| (a.goodput_in + a.goodput_out).total_cmp(&(b.goodput_in + b.goodput_out)));
        cells.swap_remove(cells.len() / 2)
    };
    Ok(all.into_iter().map(median).collect())
}

/// The program on host A, which ends with this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn measure(offload: &'static str, loss: u32, bytes: u64, seed: u64) -> Result<Cell> {
    let link = LinkSettings { delay: DELAY, loss, seed, ..LinkSettings::default() };
    let bed = Testbed::new(&TestbedSettings { link, seed, ..TestbedSettings::default() })?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("run").arg("--socket").arg(bed.socket()).args(["--offload", offload, "--rule", "established", "--eager", "--"]);
    command.args(["python3", "-c", PROGRAM]).stdin(Stdio::null()).stdout(Stdio::null());
    let program = Running(bed.host_a.spawn(&mut command).context("starting the program")?);
    // The first transfer starts what has to be started, and brings the program's connections to the NIC.
    transfer(&bed, 1 << 20)?;
    let mut tool = bed.tool()?;
    let before = tool.statistics()?;
    let cpu = |statistics: &Statistics| {
        let of = |process: u32| if process == 0 { 0 } else { process::cpu_nanos(process).unwrap_or(0) };
        [of(program.0.id()) + of(statistics.agent_process), of(statistics.host_tcp_process)]
    };
    let cpu_before = cpu(&before);
    let [out, into] = transfer(&bed, bytes)?;
    let after = tool.statistics()?;
    let cpu_after = cpu(&after);
    let count = |counter: Counter| (after.counters[counter as usize] - before.counters[counter as usize]) as f64;
    let per_kb = |nanos: u64| nanos as f64 / (2.0 * bytes as f64 / 1024.0);
    let [others, host_tcp] = [0, 1].map(|at| cpu_after[at] - cpu_before[at]);
    let (fast, slow) = (count(Counter::Segments), count(Counter::LentSegments));
    Ok(Cell {
        offload,
        loss_percent: f64::from(loss) / 10_000.0,
        goodput_out: bytes as f64 * 8.0 / out,
        goodput_in: bytes as f64 * 8.0 / into,
        host_ns_per_kb: per_kb(others + host_tcp),
        host_tcp_ns_per_kb: per_kb(host_tcp),
        fast_path_share: fast / (fast + slow).max(1.0),
        lent: count(Counter::Lent) as u64,
        taken_back: count(Counter::TakenBack) as u64,
    })
}

/// Has the program send `bytes`, then sends it as many. Returns the microseconds that each took.
fn transfer(bed: &Testbed, bytes: u64) -> Result<[f64; 2]> {
    let address = SocketAddr::new(address_a(false), 7000);
    let deadline = monotonic_micros() + 20_000_000;
    let mut stream = loop {
        match bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(5))) {
            Ok(stream) => break stream,
            Err(error) if monotonic_micros() > deadline => return Err(error).context("the program does not listen"),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let block: Vec<u8> = (0..251u32).map(|at| (31 * at + 7) as u8).cycle().take(251 * 600).collect();
    let started = monotonic_micros();
    stream.write_all(&bytes.to_be_bytes())?;
    let (mut received, mut buffer) = (0u64, vec![0; 1 << 17]);
    while received < bytes {
        let got = stream.read(&mut buffer).context("receiving from the program")?;
        ensure!(got > 0, "the program closed after {received} of {bytes} bytes");
        let at = (received % 251) as usize;
        ensure!(buffer[..got] == block[at..at + got], "wrong bytes behind byte {received}");
        received += got as u64;
    }
    let between = monotonic_micros();
    let mut sent = 0u64;
    while sent < bytes {
        let at = (sent % 251) as usize;
        let amount = (bytes - sent).min(1 << 16) as usize;
        stream.write_all(&block[at..at + amount])?;
        sent += amount as u64;
    }
    let mut answer = [0];
    stream.read_exact(&mut answer).context("the program's answer")?;
    ensure!(answer == *b"+", "the program received wrong bytes");
    Ok([(between - started) as f64, (monotonic_micros() - between) as f64])
}
