//! Cost of a received segment: receive it in order, put it into the program's memory, notify the program, acknowledge
//! it. The wire is memory, timestamps are on, there is one acknowledgement per segment, the device computes checksums.
//!
//! Instructions are counted by callgrind, exactly and repeatably. The same work is run with N and with 3N segments, and
//! the difference is divided by 2N. Layers are distinguished by source file ([`crate::ttcp::cost`] has a finer
//! division).

use crate::callgrind;
use crate::status::StatusLine;
use anyhow::{Context, Result, bail};
use baton_abi::layout::{nic, scratch, session, slot};
use baton_abi::{Cid, Control, MORE, Message, Operation};
use baton_backends::{MemoryDevice, memory_pair};
use baton_datapath::{Worker, WorkerSettings};
use baton_device::{Capabilities, Checksum, Device, Frame};
use baton_image::{Image, MAX_ENCODED};
use baton_linux::events::monotonic_nanos;
use baton_ring::{Consumer, Producer};
use baton_shm::{Region, RingWords};
use baton_tcp::Instant;
use baton_wire::frame::{Header, Link, MAX_HEADER, TCP_CHECKSUM, Template, finish_checksum};
use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
use serde::Serialize;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::Command;
use std::sync::Arc;

/// Bytes of receive and of send memory of a connection.
const BUFFER: u32 = 1 << 16;
/// Bytes of a frame's buffer.
const FRAME: usize = 2048;

/// One workload.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Workload {
    /// Connections, served in turn.
    pub connections: u32,
    /// Payload bytes of a segment.
    pub size: u32,
    /// Segments that wait when the worker looks.
    pub burst: u32,
}

/// Figures of one workload.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The workload.
    #[serde(flatten)]
    pub workload: Workload,
    /// Segments per second of wall time, of the worker alone.
    pub packets_per_second: f64,
    /// Time-stamp counter cycles per segment.
    pub cycles_per_packet: f64,
    /// Instructions per segment.
    pub instructions_per_packet: f64,
    /// Instructions per segment by layer.
    pub layers: BTreeMap<String, f64>,
}

/// A figure that has a bound.
#[derive(Clone, Debug, Serialize)]
pub struct Bar {
    /// Its name.
    pub name: String,
    /// What was measured.
    pub value: f64,
    /// Unit of the value.
    pub unit: &'static str,
}

/// The whole bench.
#[derive(Clone, Debug, Serialize)]
pub struct DatapathReport {
    /// All workloads.
    pub workloads: Vec<Measured>,
    /// The figures that have a bound.
    pub bars: Vec<Bar>,
}

/// A worker with offloaded connections, and the other ends of its rings and wire.
pub(crate) struct Bench {
    worker: Worker<MemoryDevice, MemoryDevice>,
    far: MemoryDevice,
    /// Bytes of receive and of send memory of a connection.
    buffer: u32,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    nic_events: Consumer<RingWords>,
    peers: Vec<Peer>,
    frame: Frame,
    /// The sequence number behind the last byte that the first connection's program has queued.
    queued: u32,
    now: Instant,
    /// The device verifies checksums.
    verifies: bool,
}

struct Peer {
    cid: Cid,
    template: Template,
    seq: u32,
    /// Next sequence number expected from the NIC.
    ack: u32,
}

impl Bench {
    /// A worker with this many connections.
    ///
    /// # Errors
    /// If the NIC refuses one.
    pub(crate) fn new(connections: u32) -> Result<Bench> {
        Bench::with_buffers(connections, BUFFER)
    }

    /// A worker with this many connections, each with `buffer` bytes of receive and of send memory, a power of two.
    ///
    /// # Errors
    /// If the NIC refuses one.
    pub(crate) fn with_buffers(connections: u32, buffer: u32) -> Result<Bench> {
        Bench::with_device(connections, buffer, Capabilities { checksum: true, segmentation: 0 })
    }

    /// The same with a device that has these offloads. One that computes no checksums delivers frames with unverified
    /// ones, which the worker checks.
    ///
    /// # Errors
    /// If the NIC refuses one.
    pub(crate) fn with_device(connections: u32, buffer: u32, capabilities: Capabilities) -> Result<Bench> {
        let (wire, far) = memory_pair(256, FRAME, capabilities);
        let (host, _) = memory_pair(256, FRAME, capabilities);
        let slots = connections as usize;
        let nic_memory = Arc::new(Region::private(nic::bytes(slots))?);
        nic::many_slots(slots).for_each(|slots| nic_memory.advise_huge(slots));
        let heap = session::HEAP + slots * 2 * buffer as usize;
        let memory = Arc::new(Region::private(heap)?);
        let now = Instant(1_000_000);
        let settings = WorkerSettings {
            slots,
            hash_key: [1, 2, 3, 4],
            batch: 32,
            frame_bytes: FRAME,
            quick_ack: true,
            ..WorkerSettings::default()
        };
        let mut worker = Worker::new(host, wire, nic_memory.clone(), settings, now);
        worker.start(now);
        worker.attach(0, memory.clone());
        let mut bench = Bench {
            worker,
            far,
            buffer,
            commands: Producer::new(memory.ring(session::COMMANDS)),
            events: Consumer::new(memory.ring(session::EVENTS)),
            nic_events: Consumer::new(nic_memory.ring(nic::EVENTS)),
            peers: Vec::new(),
            frame: Frame::with_capacity(FRAME),
            queued: 1,
            now,
            verifies: capabilities.checksum,
        };
        let mut agent = Producer::new(nic_memory.ring(nic::COMMANDS));
        for at in 0..connections {
            bench.offload(&nic_memory, &mut agent, at)?;
        }
        Ok(bench)
    }

    /// Does what the agent does: mirror, steal, hand off.
    fn offload(&mut self, nic_memory: &Region, agent: &mut Producer<RingWords>, at: u32) -> Result<()> {
        let remote = Endpoint::v4([10, 1 + (at >> 16) as u8, (at >> 8) as u8, at as u8], 1024 + at as u16);
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote, device: 0 };
        let cid = Cid::new(at, 1);
        let base = nic::slot(at);
        let (buffer, memory) = (self.buffer, session::HEAP as u32 + at * 2 * self.buffer);
        for (word, value) in [0, memory, buffer, memory + buffer, buffer].into_iter().enumerate() {
            nic_memory.word32(base + slot::PARAMETERS + 4 * word).store(value, std::sync::atomic::Ordering::Relaxed);
        }
        let mut bytes = [0u8; MAX_ENCODED];
        let image = Image::open(flow);
        let window = (image.rcv_adv - image.rcv_nxt).min(buffer / 2);
        Image { rcv_adv: image.rcv_nxt + window, ..image }.encode(&mut bytes).context("encoding an image")?;
        if nic_memory.write(base + slot::FLOW, &flow.to_bytes()).is_err()
            || nic_memory.write(nic::scratch(at) + scratch::IMAGE, &bytes).is_err()
        {
            bail!("the slot lies outside NIC memory");
        }
        for message in [
            Message::control(Operation::NicControl, Control::Mirror, cid, 0, 0),
            Message::control(Operation::NicControl, Control::Steal, cid, 0, 0),
            Message::new(Operation::NicHandoff, cid, 0, 0),
        ] {
            let _ = agent.push(message.to_words());
            agent.publish();
            self.worker.poll(self.now);
        }
        let link = Link { ttl: 64, ..Link::default() };
        self.peers.push(Peer { cid, template: Template::new(&flow.reversed(), &link, true), seq: 1, ack: 1 });
        self.settle();
        let mut refused = 0;
        while let Some(words) = self.nic_events.pop() {
            refused += u32::from(Message::from_words(words).is_some_and(|message| message.kind == Control::Refused as u16));
        }
        self.nic_events.release();
        if refused > 0 {
            bail!("the NIC refused connection {at}");
        }
        Ok(())
    }

    /// Removes what the worker has sent and reported.
    fn settle(&mut self) -> (u32, u32) {
        let (mut acks, mut announced) = (0, 0);
        while self.far.receive(&mut self.frame) {
            acks += u32::from(TcpFrame::parse(self.frame.bytes(), 0).is_ok());
        }
        while let Some(words) = self.events.pop() {
            if let Some(Message { operation: Operation::OsRecv, length, .. }) = Message::from_words(words) {
                announced += length;
            }
        }
        self.events.release();
        (acks, announced)
    }

    /// Puts the next segment of connection `at` on the wire.
    fn send(&mut self, at: usize, size: u32) {
        let peer = &mut self.peers[at];
        let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
        let flags = Flags::ACK | Flags::PSH;
        let header = Header { seq: peer.seq, ack: peer.ack, flags, window: 512, options: &options, ecn: 0, ident: 0 };
        self.frame.set_length(MAX_HEADER + size as usize);
        let headers = peer.template.emit(&header, size as usize, self.frame.bytes_mut());
        self.frame.set_length(headers + size as usize);
        self.frame.checksum = if self.verifies { Checksum::Verified } else { Checksum::Unknown };
        if !self.verifies {
            finish_checksum(self.frame.bytes_mut(), peer.template.tcp_offset(), TCP_CHECKSUM);
        }
        peer.seq = peer.seq.wrapping_add(size);
        self.far.transmit(&mut self.frame);
    }

    /// Acts as the program that has read the segment.
    fn read(&mut self, at: usize, size: u32) {
        let message = Message::new(Operation::NicRecvd, self.peers[at].cid, 0, size);
        let _ = self.commands.push(message.to_words());
    }

    /// The first connection's program queues `count` messages of a segment's size. They leave, and the peer
    /// acknowledges every second one, or the only one. All of it is measured.
    ///
    /// # Errors
    /// If not exactly these segments leave.
    pub(crate) fn send_segments(&mut self, count: u32, size: u32) -> Result<()> {
        self.queue(count, size);
        self.now = self.now.after(3);
        self.take_all();
        let (segments, _) = self.settle();
        if segments != count {
            bail!("{segments} segments left for {count} messages of {size} bytes");
        }
        for _ in 0..count.div_ceil(2) {
            self.peers[0].ack = self.peers[0].ack.wrapping_add(size * count.min(2));
            self.send(0, 0);
        }
        measured_poll(&mut self.worker, self.now);
        self.settle();
        Ok(())
    }

    /// Sends `messages` messages, each acknowledged, as fast as the congestion window allows, so that it grows. Nothing
    /// is measured.
    pub(crate) fn open_window(&mut self, messages: u32, size: u32) {
        self.queue(messages, size);
        self.worker.poll(self.now);
        loop {
            let (segments, _) = self.settle();
            if segments == 0 {
                return;
            }
            self.peers[0].ack = self.peers[0].ack.wrapping_add(segments * size);
            self.send(0, 0);
            self.now = self.now.after(3);
            self.worker.poll(self.now);
        }
    }

    /// The first connection's program queues `count` messages of one byte while a byte is in flight; then the peer
    /// acknowledges that, and all of them leave as one segment, which the peer acknowledges. All but the byte before is
    /// measured.
    ///
    /// # Errors
    /// If anything but one segment leaves.
    pub(crate) fn send_small_messages(&mut self, count: u32) -> Result<()> {
        self.queue(1, 1);
        self.worker.poll(self.now);
        self.settle();
        self.queue(count, 1);
        self.now = self.now.after(3);
        self.take_all();
        let mut segments = self.settle().0;
        for acknowledged in [1, count] {
            self.peers[0].ack = self.peers[0].ack.wrapping_add(acknowledged);
            self.send(0, 0);
            measured_poll(&mut self.worker, self.now);
            segments += self.settle().0;
        }
        if segments != 1 {
            bail!("{segments} segments left for {count} messages of one byte");
        }
        Ok(())
    }

    /// Rounds, measured, until the worker has taken all messages of the program.
    fn take_all(&mut self) {
        while !self.commands.is_released(self.commands.position()) {
            measured_poll(&mut self.worker, self.now);
        }
    }

    /// Turns Nagle's rule on for the first connection, as sockets have it without TCP_NODELAY.
    pub(crate) fn use_nagle(&mut self) {
        let message = Message::control(Operation::NicControl, Control::NoDelay, self.peers[0].cid, 0, 0);
        let _ = self.commands.push(message.to_words());
        self.commands.publish();
        self.worker.poll(self.now);
    }

    /// The first connection receives `count` segments of one byte that wait together, and acknowledges each. That is
    /// measured.
    ///
    /// # Errors
    /// If it does not.
    pub(crate) fn acknowledge(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            self.send(0, 1);
        }
        self.now = self.now.after(3);
        measured_poll(&mut self.worker, self.now);
        if self.settle() != (count, count) {
            bail!("{count} segments of one byte were not each acknowledged");
        }
        self.read(0, count);
        self.commands.publish();
        self.worker.poll(self.now);
        self.settle();
        Ok(())
    }

    /// Queues messages of the first connection's program; their bytes lie in its send memory at their sequence numbers.
    fn queue(&mut self, count: u32, size: u32) {
        let base = session::HEAP as u32 + self.buffer;
        for _ in 0..count {
            let length = size.min(self.buffer - (self.queued & (self.buffer - 1)));
            for (at, length) in [(self.queued, length), (self.queued.wrapping_add(length), size - length)] {
                if length > 0 {
                    let more = if length < size && at == self.queued { MORE } else { 0 };
                    let message = Message::new(Operation::NicSend, self.peers[0].cid, base + (at & (self.buffer - 1)), length);
                    let _ = self.commands.push(Message { kind: more, ..message }.to_words());
                }
            }
            self.queued = self.queued.wrapping_add(size);
        }
        self.commands.publish();
    }

    /// A burst of segments, for connections at distances of `stride` beginning with `next`. Returns nanoseconds spent
    /// in the worker.
    ///
    /// # Errors
    /// If the results are not as expected.
    pub(crate) fn round(&mut self, workload: Workload, stride: usize, next: &mut usize) -> Result<u64> {
        let members: Vec<usize> = (0..workload.burst as usize).map(|n| (*next + n * stride) % self.peers.len()).collect();
        *next = (*next + workload.burst as usize * stride) % self.peers.len();
        for at in &members {
            self.send(*at, workload.size);
        }
        self.now = self.now.after(3);
        let started = cycles();
        measured_poll(&mut self.worker, self.now);
        let spent = cycles() - started;
        let (acks, announced) = self.settle();
        if acks != workload.burst || announced != workload.burst * workload.size {
            bail!("{acks} acknowledgements and {announced} bytes for {} segments", workload.burst);
        }
        for at in members {
            self.read(at, workload.size);
        }
        self.commands.publish();
        self.worker.poll(self.now);
        self.settle();
        Ok(spent)
    }
}

/// The measured part: a round of the worker, nothing else. Callgrind finds it by its name.
#[inline(never)]
fn measured_poll(worker: &mut Worker<MemoryDevice, MemoryDevice>, now: Instant) {
    black_box(worker.poll(now));
}

/// Nanoseconds as cycles of a counter that every machine has.
fn cycles() -> u64 {
    monotonic_nanos()
}

/// Runs a workload once. Returns nanoseconds spent in the worker.
///
/// # Errors
/// If the results are not as expected.
pub fn run_workload(workload: Workload, segments: u64) -> Result<u64> {
    let mut bench = Bench::new(workload.connections)?;
    let mut next = 0;
    let mut spent = 0;
    for _ in 0..segments / u64::from(workload.burst) {
        spent += bench.round(workload, 1, &mut next)?;
    }
    Ok(spent)
}

/// Instructions of a workload by layer.
fn count_workload(workload: Workload, segments: u64) -> Result<BTreeMap<String, u64>> {
    let Workload { connections, size, burst } = workload;
    let numbers =
        [("--connections", connections.into()), ("--size", size.into()), ("--burst", burst.into()), ("--segments", segments)];
    let arguments = numbers.into_iter().flat_map(|(name, value): (&str, u64)| [name.to_owned(), value.to_string()]);
    let arguments: Vec<String> = ["bench-workload".to_owned()].into_iter().chain(arguments).collect();
    count("*measured_poll*", &arguments, layer)
}

/// Instructions of the functions that `measured` names, in this program run with these arguments, by `group`.
///
/// # Errors
/// If valgrind is missing, or the program fails.
pub(crate) fn count(
    measured: &str,
    arguments: &[String],
    group: impl Fn(&Source) -> &'static str,
) -> Result<BTreeMap<String, u64>> {
    Ok(by_source(&callgrind::profile(Command::new("valgrind"), measured, arguments)?, group))
}

/// Where an instruction comes from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    /// The source file of its line, which may have been inlined.
    pub file: String,
    /// The function that contains it, after inlining, and that function's source file.
    pub function: String,
    pub function_file: String,
}

/// Sums the self cost of every line of a callgrind file by the `group` of its source.
fn by_source(text: &str, group: impl Fn(&Source) -> &'static str) -> BTreeMap<String, u64> {
    // Files and functions are numbered, and named where they first appear, which may be as the target of a call.
    let (mut files, mut functions) = (BTreeMap::new(), BTreeMap::new());
    let mut sums = BTreeMap::new();
    let mut source = Source::default();
    let mut current = group(&source);
    let mut skip = false;
    for line in text.lines() {
        if let Some((key @ ("fl" | "fi" | "fe" | "cfi" | "cfl" | "fn" | "cfn"), value)) = line.split_once('=') {
            let names = if key.ends_with("fn") { &mut functions } else { &mut files };
            let (id, name) = value.split_once(' ').unwrap_or((value, ""));
            if !name.is_empty() {
                names.insert(id, name);
            }
            let name = names.get(id).copied().unwrap_or_default().to_owned();
            match key {
                "fl" | "fi" | "fe" => source.file = name,
                // It is in the file that was named last, which is not repeated.
                "fn" => (source.function, source.function_file) = (name, source.file.clone()),
                _ => continue,
            }
            current = group(&source);
        } else if line.starts_with("calls=") {
            // The next line has the callee's cost.
            skip = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || first == '+' || first == '-' || first == '*')
            && !std::mem::take(&mut skip)
            && let Some(cost) = line.split_whitespace().nth(1).and_then(|cost| cost.parse::<u64>().ok())
        {
            *sums.entry(current.to_owned()).or_insert(0) += cost;
        }
    }
    sums
}

/// The layer that a source belongs to: that of its file.
pub(crate) fn layer(source: &Source) -> &'static str {
    let layers = [
        ("wire/src", "wire"),
        ("protocols/tcp", "tcp"),
        ("offloads/tables", "lookup"),
        ("nic/datapath", "datapath"),
        ("interface/ring", "ring and memory"),
        ("interface/abi", "ring and memory"),
        ("platform/shm/src/copy", "copying"),
        // What runs in its wide form.
        ("platform/shm/src/wide", "datapath"),
        ("platform/shm", "ring and memory"),
        ("platform/backends", "device"),
        ("platform/device", "device"),
        ("mem", "copying"),
    ];
    layers.iter().find(|(part, _)| source.file.contains(part)).map_or("library", |(_, layer)| layer)
}

/// Measures one workload.
///
/// # Errors
/// If valgrind is missing, or the results are not as expected.
pub fn measure(workload: Workload) -> Result<Measured> {
    let segments = 4096;
    let (few, many) = (count_workload(workload, segments)?, count_workload(workload, 3 * segments)?);
    let mut layers = BTreeMap::new();
    for (layer, sum) in &many {
        let difference = sum - few.get(layer).copied().unwrap_or(0).min(*sum);
        layers.insert(layer.clone(), difference as f64 / (2 * segments) as f64);
    }
    let timed = 200_000;
    let nanos = run_workload(workload, timed)? as f64 / timed as f64;
    Ok(Measured {
        workload,
        packets_per_second: 1e9 / nanos,
        cycles_per_packet: nanos * cycles_per_nano(),
        instructions_per_packet: layers.values().sum(),
        layers,
    })
}

/// Cycles of the core's nominal clock per nanosecond.
fn cycles_per_nano() -> f64 {
    crate::ntttcp::frequency().unwrap_or(1e9) / 1e9
}

/// The whole bench.
///
/// # Errors
/// See [`measure`].
pub fn run() -> Result<DatapathReport> {
    let (mut workloads, status) = (Vec::new(), StatusLine::new());
    for (size, burst) in [(1448, 1), (64, 16), (1448, 16)] {
        for connections in [1, 1024] {
            let done = workloads.len();
            status.show(format_args!("workload {} of 6: {connections} connections, {size} bytes, bursts of {burst}", done + 1));
            workloads.push(measure(Workload { connections, size, burst })?);
        }
    }
    let bar = |name: &str, at: usize| Bar {
        name: name.into(),
        value: (workloads[at].instructions_per_packet * 10.0).round() / 10.0,
        unit: "instructions",
    };
    let bars = vec![
        bar("datapath.instr_per_segment_1", 0),
        bar("datapath.instr_per_segment_1024", 1),
        bar("datapath.instr_per_segment_64", 2),
        bar("datapath.instr_per_segment_64_1024", 3),
    ];
    Ok(DatapathReport { workloads, bars })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function's own lines, lines that were inlined into it, and a call, whose cost belongs to the callee.
    const PROFILE: &str = "\
events: Ir
fl=(1) a/input.rs
fn=(1) input
10 5
fi=(2) core/num.rs
+3 7
fe=(1)
* 1
cfi=(3) b/output.rs
cfn=(2) output
calls=2 40
12 1000
fi=(3)
13 2
fn=(2)
40 900
41 100
";

    #[test]
    fn a_profile_is_summed_by_source() {
        let by_file = by_source(PROFILE, |source| if source.file == "core/num.rs" { "library" } else { "ours" });
        assert_eq!(by_file, BTreeMap::from([("ours".into(), 5 + 1 + 2 + 1000), ("library".into(), 7)]));
        let by_function = by_source(PROFILE, |source| match (&*source.function, &*source.function_file) {
            ("input", "a/input.rs") => "input",
            ("output", "b/output.rs") => "output",
            _ => "?",
        });
        assert_eq!(by_function, BTreeMap::from([("input".into(), 15), ("output".into(), 1000)]));
    }
}
