//! Section V.C: a download through large receive that waits for 64 KB and knows no time-out, with the real active
//! acknowledgements off and on. Our TCP is both the sender and the receiving kernel. Virtual time in microseconds.

use super::frames::{template, write};
use baton_active_ack::{ActiveAck, ENTRY_BYTES, Store};
use baton_device::{Frame, MAX_FRAME};
use baton_lro::{Lro, LroSettings, Mode, Push};
use baton_tcp::{Config, Connection, Instant, Segment, Transmit};
use baton_wire::frame::{Header, MAX_HEADER, Template};
use baton_wire::{Endpoint, Flow, TcpFrame};
use std::cell::RefCell;
use std::collections::VecDeque;

/// Large receive's waits: longer than the run.
const NEVER: u64 = 600_000_000;
/// The run ends at the latest after so long.
const LONGEST: u64 = 120_000_000;

/// Memory that survives the NIC: one connection's.
struct Memory(RefCell<Vec<u8>>);

impl Store for Memory {
    fn buffers(&self) -> usize {
        1
    }

    fn write(&self, buffer: usize, at: usize, bytes: &[u8]) {
        self.0.borrow_mut()[buffer * ENTRY_BYTES + at..][..bytes.len()].copy_from_slice(bytes);
    }

    fn read(&self, buffer: usize, at: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.0.borrow()[buffer * ENTRY_BYTES + at..][..out.len()]);
    }

    fn publish(&self, buffer: usize, at: usize, word: u64) {
        self.write(buffer, at, &word.to_le_bytes());
    }
}

/// Numbers of the model.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Bytes to be sent.
    pub bytes: u32,
    /// Microseconds of the wire, one way.
    pub delay: u64,
    /// Bits per microsecond of the wire.
    pub link: u64,
    /// Whether the NIC acknowledges.
    pub active: bool,
    /// Whether segments are merged.
    pub merges: bool,
}

/// What came of a download.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Segments that were sent again. None was ever lost.
    pub spurious: u64,
    /// Mb/s.
    pub megabits: f64,
    /// Bytes that the receiving program has got, by milliseconds.
    pub progress: Vec<(f64, f64)>,
    /// Acknowledgements that the NIC has sent.
    pub by_nic: u64,
}

/// A direction of the wire.
struct Way {
    frames: VecDeque<(u64, Frame)>,
    free: u64,
}

impl Way {
    fn push(&mut self, frame: Frame, now: u64, settings: &Settings) {
        self.free = self.free.max(now) + frame.length() as u64 * 8 / settings.link;
        self.frames.push_back((self.free + settings.delay, frame));
    }

    fn next(&self) -> u64 {
        self.frames.front().map_or(u64::MAX, |(at, _)| *at)
    }

    fn pop(&mut self, now: u64) -> Option<Frame> {
        self.frames.front().filter(|(at, _)| *at <= now)?;
        self.frames.pop_front().map(|(_, frame)| frame)
    }
}

fn frame_of(template: &Template, transmit: &Transmit) -> Frame {
    let Transmit { seq, ack, flags, window, ref options, ecn, .. } = *transmit;
    let mut frame = Frame::with_capacity(MAX_HEADER + transmit.length as usize);
    write(template, &Header { seq, ack, flags, window, options, ecn, ident: 0 }, transmit.length as usize, &mut frame);
    frame
}

/// The receiving host: its kernel, and the NIC in front of it.
struct Host {
    kernel: Connection,
    template: Template,
    lro: Lro,
    active: ActiveAck<Memory>,
    received: u64,
}

impl Host {
    fn take(&mut self, frames: Vec<Frame>, now: u64) {
        for frame in frames {
            let parsed = TcpFrame::parse(frame.bytes(), 0).expect("a segment");
            self.kernel.input(&Segment::from(&parsed), Instant(now));
            let readable = self.kernel.readable();
            if readable > 0 {
                assert!(self.kernel.consumed(readable));
                self.received += u64::from(readable);
            }
        }
    }

    /// A frame from the wire.
    fn arrives(&mut self, mut frame: Frame, now: u64, settings: &Settings, out: &mut Way) {
        self.active.from_wire(&frame, now, &mut |ack| out.push(ack.clone(), now, settings));
        let mut up = Vec::new();
        self.lro.receive(&mut frame, now, &mut |frame| up.push(frame.clone()));
        self.take(up, now);
    }

    /// What is due at `now`, and what the kernel sends.
    fn run(&mut self, now: u64, settings: &Settings, out: &mut Way) {
        let mut up = Vec::new();
        self.lro.expire(now, &mut |frame| up.push(frame.clone()));
        self.active.expire(now, &mut |ack| out.push(ack.clone(), now, settings), &mut |frame| up.push(frame.clone()));
        self.take(up, now);
        if self.kernel.next_timeout().0 <= now {
            self.kernel.on_timeout(Instant(now));
        }
        while let Some(transmit) = self.kernel.poll_transmit(Instant(now), 0) {
            let mut frame = frame_of(&self.template, &transmit);
            let mut again = Vec::new();
            self.active.from_kernel(&mut frame, now, &mut |frame| again.push(frame.clone()));
            out.push(frame, now, settings);
            self.take(again, now);
        }
    }

    fn next(&self) -> u64 {
        let waits = [self.lro.next_expiry(), self.active.next_expiry()];
        waits.into_iter().flatten().min().unwrap_or(u64::MAX).min(self.kernel.next_timeout().0)
    }
}

/// Runs a download.
pub fn run(settings: Settings) -> Outcome {
    let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 40_000), remote: Endpoint::v4([10, 0, 0, 2], 21), device: 0 };
    let config = Config { receive_buffer: 4 << 20, ..Config::default() };
    let lro = LroSettings {
        mode: if settings.merges { Mode::Reorder } else { Mode::Off },
        push: Push::Ignore,
        quiet: (NEVER, NEVER),
        age: NEVER,
        connections: 1,
        aggregates: 4,
        ..LroSettings::default()
    };
    let start = 1_000_000;
    let memory = Memory(RefCell::new(vec![0; ENTRY_BYTES]));
    let mut host = Host {
        kernel: Connection::connect(config, 1, 0, Instant(start)),
        template: template(&flow),
        lro: Lro::new(lro, start),
        active: ActiveAck::new(memory, &[0], [1, 2, 3, 4], settings.active, start),
        received: 0,
    };
    let (mut server, server_template): (Option<Connection>, _) = (None, template(&flow.reversed()));
    let mut ways = [(); 2].map(|()| Way { frames: VecDeque::new(), free: 0 });
    let (mut now, mut progress, mut ended) = (start, vec![(0.0, 0.0)], start);
    while host.received < u64::from(settings.bytes) && now < start + LONGEST {
        let [up, down] = &mut ways;
        host.run(now, &settings, up);
        while let Some(frame) = up.pop(now) {
            let segment = Segment::from(&TcpFrame::parse(frame.bytes(), 0).expect("a segment"));
            match &mut server {
                Some(server) => _ = server.input(&segment, Instant(now)),
                None => {
                    let mut made = Connection::accept(config, &segment, 7, 0, Instant(now)).expect("a SYN");
                    assert!(made.queue(settings.bytes));
                    made.shutdown();
                    server = Some(made);
                }
            }
        }
        if let Some(server) = &mut server {
            if server.next_timeout().0 <= now {
                server.on_timeout(Instant(now));
            }
            while let Some(transmit) = server.poll_transmit(Instant(now), 0) {
                down.push(frame_of(&server_template, &transmit), now, &settings);
            }
        }
        let before = host.received;
        while let Some(small) = down.pop(now) {
            let mut frame = Frame::with_capacity(MAX_FRAME);
            frame.copy_from(&small);
            host.arrives(frame, now, &settings, up);
        }
        host.run(now, &settings, up);
        if host.received > before {
            ended = now;
            progress.push(((now - start) as f64 / 1000.0, host.received as f64));
        }
        let timer = server.as_ref().map_or(u64::MAX, |server| server.next_timeout().0);
        now = ways[0].next().min(ways[1].next()).min(timer).min(host.next()).max(now + 1);
    }
    let megabits = host.received as f64 * 8.0 / (ended - start) as f64;
    let spurious = server.map_or(0, |server| server.retransmissions());
    Outcome { spurious, megabits, progress, by_nic: host.active.counters().sent }
}
