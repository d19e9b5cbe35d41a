//! `baton capture`: the frames that a NIC sends and receives, in a file for Wireshark or in lines.

mod comments;
mod file;
mod merge;
mod updates;

use crate::tools::SocketArgument;
use anyhow::{Context, Result, bail};
use baton_capture::Reader;
use baton_client::tool::Tool;
use baton_linux::device_frames::DeviceFrames;
use baton_linux::events::{Poller, Trigger, monotonic_micros, realtime_nanos};
use baton_linux::pcap_filter::PcapFilter;
use baton_linux::{process, terminal};
use clap::Args;
use comments::Comments;
use file::{Output, Sink};
use merge::{Flow, Frame, Merge, Source};
use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;
use updates::Update;

pub const EXAMPLES: &str = "Examples:
  baton capture                                    a line for each frame of the NIC's connections
  baton capture -w nic.pcapng tcp port 443         to a file for Wireshark, with a filter as tcpdump's
  baton capture -w both.pcapng --kernel            with the kernel's frames of the same programs: a move from end to end
  baton capture -w - --seconds 10 | tshark -r -    to another program
  baton capture -w all.pcapng --payload -c 1000    1000 whole frames

Moves, deaths and refusals are comments on the next frame of their connection. It needs root, and libpcap for a filter. What the
filter does not match is dropped by this command, not by the NIC. Times of day are UTC.";

/// The arguments of `baton capture`.
#[derive(Args)]
pub struct CaptureArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Write pcapng to this file, or to the standard output (`-`), instead of a line for each frame.
    #[arg(short, long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// The kernel's frames of connections of Baton's programs, too, as a second interface.
    #[arg(long)]
    kernel: bool,
    /// Whole frames, not only their headers.
    #[arg(long, conflicts_with = "snaplen")]
    payload: bool,
    /// This many bytes of each frame.
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(14..=262_144))]
    snaplen: Option<u32>,
    /// End after so many frames.
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// End after so many seconds.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    seconds: Option<u64>,
    /// Only frames that this matches, in the syntax of pcap-filter(7), as `tcp port 443 and host 10.0.0.2`.
    #[arg(value_name = "FILTER", trailing_var_arg = true)]
    filter: Vec<String>,
}

/// Microseconds for which a frame waits for earlier frames of other sources, and for the agent's list of
/// events of its connection.
const HOLD: u64 = 400_000;

/// Time between two polls of the rings.
const PERIOD: Duration = Duration::from_millis(5);

/// Microseconds between two lines of progress, and after which a file has what was captured.
const PROGRESS: u64 = 500_000;

/// Most frames that are taken from one source before the other sources have their turn.
const TURN: usize = 65_536;

/// Microseconds for which the successor of an agent that has ended is waited for.
const SUCCESSOR: u64 = 5_000_000;

/// Microseconds for which an agent's last word is waited for.
const LAST_LOOK: u64 = 1_500_000;

/// Bytes of the longest frame.
const LONGEST: usize = 1 << 18;

const STOP: u64 = 0;

/// The sources of frames.
struct Sources {
    tool: Tool,
    rings: Vec<Reader>,
    devices: Option<DeviceFrames>,
}

impl Sources {
    fn begin(socket: &Path, arguments: &CaptureArguments) -> Result<Sources> {
        let mut tool = Tool::connect(socket)?;
        let (rings, devices) = tool.capture(arguments.most(), arguments.kernel)?;
        Ok(Sources { tool, rings, devices: devices.map(DeviceFrames::from_fd) })
    }

    /// Frames that were dropped since this was not fast enough: by the NICs, and by the kernel.
    fn dropped(&mut self) -> (u64, u64) {
        (self.rings.iter().map(Reader::dropped).sum(), self.devices.as_mut().map_or(0, DeviceFrames::dropped))
    }
}

impl CaptureArguments {
    /// Most bytes of a frame; None for its headers.
    fn most(&self) -> Option<u32> {
        if self.payload { Some(LONGEST as u32) } else { self.snaplen }
    }

    /// The output, and its name.
    fn open(&self) -> Result<(Output, String)> {
        let buffered = |sink: Box<dyn Write>| -> Sink { BufWriter::with_capacity(1 << 16, sink) };
        let (sink, name): (Box<dyn Write>, String) = match &self.write {
            None => return Ok((Output::Lines(buffered(Box::new(std::io::stdout()))), "the standard output".into())),
            Some(path) if path.as_os_str() == "-" => (Box::new(std::io::stdout()), "the standard output".into()),
            Some(path) => {
                // Only this user may read the captured frames.
                let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
                (Box::new(file.with_context(|| format!("writing {}", path.display()))?), path.display().to_string())
            }
        };
        let filter = self.filter.join(" ");
        let filter = Some(filter.as_str()).filter(|filter| !filter.is_empty());
        let output = Output::pcapng(buffered(sink), self.most().unwrap_or(LONGEST as u32), self.kernel, filter);
        let output = output.with_context(|| format!("writing {name}"))?;
        Ok((output, name))
    }
}

/// A capture that runs.
struct Capture<'a> {
    arguments: &'a CaptureArguments,
    filter: Option<PcapFilter>,
    output: Output,
    merge: Merge,
    comments: Comments,
    /// Connections of Baton's.
    known: HashSet<Flow>,
    updates: Receiver<Update>,
    last_look: Sender<()>,
    /// The difference between nanoseconds since 1970 and the monotonic clock.
    clock: u64,
    /// Frames written: the NICs', and the kernel's.
    captured: [u64; 2],
    /// Frames that earlier agents' NICs and the kernel have dropped.
    dropped: (u64, u64),
    buffer: Vec<u8>,
}

impl Capture<'_> {
    /// Takes the frames that have come. Returns whether there may be more.
    fn take(&mut self, sources: &mut Sources) -> Result<bool> {
        let mut more = false;
        let mut bytes = Vec::new();
        for ring in &mut sources.rings {
            for count in 0..TURN {
                let Some(seen) = ring.next(&mut bytes)? else { break };
                let at = self.clock + seen.at * 1000;
                self.merge.add(Frame::of_nic(&seen, at, bytes.clone()));
                more |= count + 1 == TURN;
            }
        }
        for count in 0..sources.devices.as_ref().map_or(0, |_| TURN) {
            let Some(devices) = &sources.devices else { break };
            let Some(seen) = devices.next(&mut self.buffer).context("reading the devices' frames")? else { break };
            let there = self.buffer.len().min(seen.length as usize);
            self.merge.add(Frame::of_device(&seen, &self.buffer[..there], self.arguments.most()));
            more |= count + 1 == TURN;
        }
        Ok(more)
    }

    /// Writes the frames whose time has come: all of them at the `end`. Returns whether there are as many as are
    /// wanted.
    fn write(&mut self, end: bool) -> Result<bool> {
        while let Ok(update) = self.updates.try_recv() {
            self.take_update(update);
        }
        let until = if end { u64::MAX } else { self.clock + monotonic_micros().saturating_sub(HOLD) * 1000 };
        while let Some(frame) = self.merge.next(until) {
            let flow = frame.flow();
            match frame.source {
                // A connection that has just ended is not in any list.
                Source::Nic => self.known.extend(flow),
                _ if flow.is_none_or(|flow| !self.known.contains(&flow)) => continue,
                _ => {}
            }
            if self.filter.as_ref().is_some_and(|filter| !filter.matches(&frame.bytes, frame.length)) {
                continue;
            }
            self.output.write(&frame, &self.comments.of(&frame))?;
            self.captured[usize::from(frame.source != Source::Nic)] += 1;
            if self.arguments.count.is_some_and(|count| self.captured.iter().sum::<u64>() >= count) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn take_update(&mut self, update: Update) {
        match update {
            Update::Has(flow) => _ = self.known.insert(flow),
            Update::Happened(flow, at, text) => self.comments.add(flow, at, text),
            Update::Last => {}
        }
    }

    /// Writes all frames that are left, with the events of their connections that the agent lists now.
    fn finish(&mut self, sources: &mut Sources) -> Result<()> {
        self.take(sources)?;
        // If the thread has ended, there is nothing to wait for.
        let _ = self.last_look.send(());
        let until = monotonic_micros() + LAST_LOOK;
        loop {
            let left = Duration::from_micros(until.saturating_sub(monotonic_micros()));
            match self.updates.recv_timeout(left) {
                Ok(Update::Last) | Err(_) => break,
                Ok(update) => self.take_update(update),
            }
        }
        self.write(true).map(drop)
    }

    fn run(&mut self, socket: &Path, sources: &mut Sources, signals: &OwnedFd, progress: bool) -> Result<()> {
        let poller = Poller::new()?;
        poller.add(signals.as_fd(), STOP, Trigger::Readable)?;
        let ends_at = self.arguments.seconds.map_or(u64::MAX, |seconds| monotonic_micros() + seconds * 1_000_000);
        let (mut tokens, mut shown) = (Vec::new(), monotonic_micros());
        loop {
            // This is read first, so that the frames that the last agent's NICs have captured are in the rings by then.
            let ended = sources.tool.has_ended();
            let more = self.take(sources)?;
            if self.write(false)? {
                return Ok(());
            }
            let now = monotonic_micros();
            if !tokens.is_empty() || now >= ends_at {
                return self.finish(sources);
            }
            if ended {
                self.write(true)?;
                self.output.flush()?;
                self.go_on(socket, sources)?;
            }
            if self.arguments.write.is_none() {
                self.output.flush()?;
            }
            if now >= shown + PROGRESS {
                shown = now;
                self.output.flush()?;
                if progress {
                    let dropped = self.all_dropped(sources);
                    eprint!("\r{} frames, {} dropped ", self.captured.iter().sum::<u64>(), dropped.0 + dropped.1);
                }
            }
            poller.wait(Some(if more { Duration::ZERO } else { PERIOD }), &mut tokens)?;
        }
    }

    /// Goes on with the next agent, if the last one's keeper starts one.
    fn go_on(&mut self, socket: &Path, sources: &mut Sources) -> Result<()> {
        let (nics, kernel) = sources.dropped();
        let deadline = monotonic_micros() + SUCCESSOR;
        *sources = loop {
            match Sources::begin(socket, self.arguments) {
                Ok(next) => break next,
                Err(_) if monotonic_micros() < deadline && socket.exists() => std::thread::sleep(PERIOD),
                Err(_) => bail!("the Baton has ended"),
            }
        };
        self.dropped = (self.dropped.0 + nics, self.dropped.1 + kernel);
        eprintln!("baton: the agent has ended; the capture goes on with the next one");
        Ok(())
    }

    fn all_dropped(&self, sources: &mut Sources) -> (u64, u64) {
        let (nics, kernel) = sources.dropped();
        (self.dropped.0 + nics, self.dropped.1 + kernel)
    }
}

/// Runs a capture until it is ended.
///
/// # Errors
/// If there is no Baton, the filter is wrong, or the output cannot be written.
pub fn run(arguments: &CaptureArguments) -> Result<()> {
    let text = arguments.filter.join(" ");
    let compiled = |text: &str| PcapFilter::compile(text).map_err(|why| anyhow::anyhow!("the filter {text:?}: {why}"));
    let filter = if text.is_empty() { None } else { Some(compiled(&text)?) };
    let socket = arguments.socket.only()?;
    let signals = process::signal_descriptor(&process::ENDING)?;
    let mut sources = Sources::begin(&socket, arguments)?;
    let (output, name) = arguments.open()?;
    let (updates, last_look) = updates::watch(socket.clone())?;
    let clock = realtime_nanos() - monotonic_micros() * 1000;
    let to_file = arguments.write.as_ref().is_some_and(|path| path.as_os_str() != "-");
    let progress = to_file && terminal::columns(std::io::stderr()).is_some();
    let comments = Comments::new(filter.is_some());
    let (merge, known, captured, dropped) = (Merge::default(), HashSet::new(), [0; 2], (0, 0));
    let buffer = vec![0; LONGEST];
    let mut capture =
        Capture { arguments, filter, output, merge, comments, known, updates, last_look, clock, captured, dropped, buffer };
    if to_file {
        eprintln!("capturing to {name}; Ctrl-C ends it");
    }
    let ran = capture.run(&socket, &mut sources, &signals, progress);
    let dropped = capture.all_dropped(&mut sources);
    drop(sources);
    let counts = [(capture.captured[0], dropped.0), (capture.captured[1], dropped.1)];
    let counts = &counts[..1 + usize::from(arguments.kernel)];
    let ended = capture.output.end(realtime_nanos(), counts);
    if progress {
        eprintln!();
    }
    for text in capture.comments.rest() {
        eprintln!("without a frame behind it: {text}");
    }
    eprintln!("{} frames captured", capture.captured.iter().sum::<u64>());
    eprintln!("{} frames dropped by the NIC, since this command was slower", dropped.0);
    if arguments.kernel {
        eprintln!("{} frames dropped by the kernel", dropped.1);
    }
    match ran.and(ended) {
        Err(error) if file::is_broken_pipe(&error) => Ok(()),
        other => other.with_context(|| format!("capturing to {name}")),
    }
}
