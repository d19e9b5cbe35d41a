//! The wire behind the filter: frames that the filter drops are neither processed nor sent. Captures see the frames
//! that pass.

use crate::captures::Captures;
use crate::counters::Counters;
use baton_abi::layout::Counter;
use baton_device::{Checksum, Device, Frame, Payload};
use baton_filter::words::WORDS;
use baton_filter::{Direction, Filter, Verdict};
use baton_shm::WordArray;
use baton_wire::refusal::{MAX_REFUSAL, refuse};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Most frames that wait, because of a limit or as an answer to a rejected frame. Further ones are dropped.
const MAX_HELD: usize = 512;

/// The checks on frames between the worker and the wire.
#[derive(Default)]
pub enum Gate {
    /// All frames pass.
    #[default]
    Open,
    /// No frame passes, since the rules are not known yet.
    Closed,
    /// The filter decides which frames pass. Its counters and flows are in the words.
    Filtered(Box<Filter>, WordArray<WORDS>),
}

/// A frame that waits.
struct Held {
    /// When it passes, in microseconds; and its order among frames with the same time.
    at: (u64, u64),
    direction: Direction,
    /// It is sent for the kernel.
    kernel: bool,
    frame: Frame,
}

/// The first to pass is the greatest.
impl Ord for Held {
    fn cmp(&self, other: &Held) -> Ordering {
        other.at.cmp(&self.at)
    }
}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Held) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Held {
    fn eq(&self, other: &Held) -> bool {
        self.at == other.at
    }
}

impl Eq for Held {}

/// A wire and its gate.
pub(crate) struct GatedWire<W> {
    pub device: W,
    gate: Gate,
    /// Whether frames need a check: the gate is not open, or there is a capture.
    gated: bool,
    pub captures: Captures,
    /// The time of this round, in microseconds.
    now: u64,
    /// The answer that is being sent to a host on the wire.
    answer: Frame,
    /// Frames that wait, and buffers for more.
    held: BinaryHeap<Held>,
    spares: Vec<Frame>,
    /// Number of frames that have waited.
    count: u64,
    frame_bytes: usize,
}

/// How many frames on the wire a (large) frame becomes, and their bytes.
fn extent(frame: &Frame) -> (u64, u64) {
    let length = frame.length();
    let Some(segmentation) = frame.segmentation else { return (1, length as u64) };
    let headers = usize::from(segmentation.headers).min(length);
    let segments = (length - headers).div_ceil(usize::from(segmentation.size.max(1))).max(1);
    (segments as u64, (length + (segments - 1) * headers) as u64)
}

impl<W: Device> GatedWire<W> {
    pub fn new(device: W, gate: Gate, frame_bytes: usize) -> GatedWire<W> {
        let answer = Frame::with_capacity(MAX_REFUSAL);
        let (held, spares) = (BinaryHeap::new(), Vec::new());
        let captures = Captures::default();
        let gated = false;
        let mut wire =
            GatedWire { device, gate: Gate::Open, gated, captures, now: 0, answer, held, spares, count: 0, frame_bytes };
        wire.set(gate);
        wire
    }

    /// Changes the gate. Frames that wait are dropped, since these rules have not been applied to them.
    pub fn set(&mut self, gate: Gate) {
        if matches!(gate, Gate::Filtered(..)) && self.held.capacity() == 0 {
            self.held.reserve(MAX_HELD);
            self.spares.resize_with(MAX_HELD, || Frame::with_capacity(self.frame_bytes));
        }
        self.spares.extend(self.held.drain().map(|held| held.frame));
        self.gate = gate;
        self.note_gated();
    }

    /// To be called when the gate or the captures have changed.
    pub fn note_gated(&mut self) {
        self.gated = !matches!(self.gate, Gate::Open) || self.captures.any();
    }

    /// Sends a frame of the NIC's, if it may pass.
    #[inline(always)]
    pub fn transmit(&mut self, frame: &mut Frame, counters: &Counters) {
        if self.is_gated() && !self.lets_out(frame, false) {
            return;
        }
        self.send(frame, counters);
    }

    /// Sends a frame of the kernel's, if it may pass.
    #[inline(always)]
    pub fn forward(&mut self, frame: &mut Frame, counters: &Counters) {
        if self.is_gated() && !self.lets_out(frame, true) {
            return;
        }
        self.send(frame, counters);
    }

    /// Whether a frame may be sent now; if so, captures see it. `kernel`: it is the kernel's.
    #[inline(never)]
    fn lets_out(&mut self, frame: &mut Frame, kernel: bool) -> bool {
        let passes = self.judge(Direction::Out, frame, kernel);
        if passes {
            self.captures.sends(frame, kernel, self.now);
        }
        passes
    }

    /// Shows captures a received frame that has passed the gate. It counts as the NIC's until [`Captures::is_kernels`]
    /// is called.
    #[cold]
    pub fn note_received(&mut self, frame: &Frame) {
        self.captures.receives(frame, self.now);
    }

    /// Sends a frame, which has passed.
    #[inline(always)]
    fn send(&mut self, frame: &mut Frame, counters: &Counters) {
        let sent = self.device.transmit(frame);
        counters.add(if sent { Counter::WireSent } else { Counter::Dropped }, 1);
    }

    /// Whether frames whose payload is outside of the frame's buffer can be sent: not with a filter, which has to see
    /// the payload.
    pub fn transmits_apart(&self) -> bool {
        !self.is_gated() && self.device.transmits_apart()
    }

    /// Sends a frame whose payload is outside of its buffer.
    pub fn transmit_apart(&mut self, frame: &mut Frame, payload: Payload<'_>, counters: &Counters) {
        let sent = self.device.transmit_apart(frame, payload);
        counters.add(if sent { Counter::WireSent } else { Counter::Dropped }, 1);
    }

    /// Whether a frame that was received may pass now. If not, the caller must not use it: `frame` is another buffer
    /// afterwards.
    #[inline(always)]
    pub fn admits(&mut self, frame: &mut Frame) -> bool {
        !self.is_gated() || self.judge(Direction::In, frame, true)
    }

    #[inline(never)]
    fn judge(&mut self, direction: Direction, frame: &mut Frame, kernel: bool) -> bool {
        let can_wait = !self.spares.is_empty();
        let verdict = match &self.gate {
            Gate::Open => Verdict::Pass,
            Gate::Closed => Verdict::Drop,
            Gate::Filtered(filter, words) => {
                filter.judge(&words[..], direction, frame.bytes(), extent(frame), (self.now, can_wait))
            }
        };
        match verdict {
            Verdict::Pass => return true,
            Verdict::Drop => {}
            Verdict::Later(at) => {
                if let Some(spare) = self.spares.pop() {
                    self.hold(at, direction, kernel, std::mem::replace(frame, spare));
                }
            }
            Verdict::Reject => self.answer(direction, frame),
        }
        false
    }

    fn hold(&mut self, at: u64, direction: Direction, kernel: bool, frame: Frame) {
        self.count += 1;
        self.held.push(Held { at: (at, self.count), direction, kernel, frame });
    }

    /// Answers a rejected frame. The answer to a frame of this host waits for the next round.
    #[cold]
    fn answer(&mut self, direction: Direction, rejected: &Frame) {
        let mut bytes = [0; MAX_REFUSAL];
        let Some(length) = refuse(rejected.bytes(), &mut bytes) else { return };
        let fill = |answer: &mut Frame| {
            answer.fill(&bytes[..length]);
            answer.checksum = Checksum::Unknown;
            answer.segmentation = None;
            answer.interface = rejected.interface;
        };
        if direction == Direction::In {
            fill(&mut self.answer);
            self.captures.sends(&self.answer, false, self.now);
            self.device.transmit(&mut self.answer);
        } else if let Some(mut answer) = self.spares.pop() {
            fill(&mut answer);
            self.hold(0, Direction::In, true, answer);
        }
    }

    /// Whether frames are filtered or captured. Then each round has to set the time and to pass the frames that wait.
    #[inline(always)]
    pub fn is_gated(&self) -> bool {
        self.gated
    }

    /// Sets the time of this round, in microseconds, and makes the last round's captured frames visible to the tools.
    pub fn set_time(&mut self, now: u64) {
        self.now = now;
        self.captures.show();
    }

    /// When the next waiting frame passes, in microseconds.
    pub fn next_passing(&self) -> Option<u64> {
        self.held.peek().map(|held| held.at.0)
    }

    /// Releases the frames whose time has come: sends those to the wire, up to the first one from the wire, which is
    /// put into `frame`. False if there is no such frame.
    pub fn pass_held(&mut self, frame: &mut Frame, counters: &Counters) -> bool {
        while self.next_passing().is_some_and(|at| at <= self.now) {
            let Some(mut held) = self.held.pop() else { return false };
            if held.direction == Direction::In {
                frame.copy_from(&held.frame);
                self.spares.push(held.frame);
                return true;
            }
            self.captures.sends(&held.frame, held.kernel, self.now);
            self.send(&mut held.frame, counters);
            self.spares.push(held.frame);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::layout::nic;
    use baton_backends::{MemoryDevice, memory_pair};
    use baton_device::Capabilities;
    use baton_filter::{Installed, Table, parse_all};
    use baton_shm::Region;
    use baton_wire::frame::{Header, Link, MAX_HEADER, Template, finish_checksum};
    use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
    use std::sync::Arc;

    const FRAME: usize = 2048;

    struct Stage {
        wire: GatedWire<MemoryDevice>,
        far: MemoryDevice,
        counters: Counters,
        words: WordArray<WORDS>,
    }

    impl Stage {
        fn new() -> Stage {
            let (wire, far) = memory_pair(64, FRAME, Capabilities { checksum: true, segmentation: 0 });
            let memory = Arc::new(Region::private(nic::bytes(1)).expect("memory"));
            let words = Arc::new(Region::private(8 * WORDS).expect("memory")).shared_array(0);
            Stage { wire: GatedWire::new(wire, Gate::Closed, FRAME), far, counters: Counters::new(&memory), words }
        }

        fn set(&mut self, rules: &str) {
            let rules = parse_all(rules).expect("rules").into_iter().enumerate();
            let rules = rules.map(|(slot, rule)| Installed { rule, slot: slot as u16 }).collect();
            let table = Arc::new(Table::new(rules, 1, [1; 4]).expect("a table"));
            self.wire.set(Gate::Filtered(Box::new(Filter::new(table, [1; 4])), self.words.clone()));
        }

        /// Sends a frame, and returns the number of frames that the other end of the wire has received since the last
        /// call.
        fn send(&mut self) -> usize {
            self.wire.transmit(&mut segment(), &self.counters);
            self.arrived()
        }

        fn arrived(&mut self) -> usize {
            let mut frame = Frame::with_capacity(FRAME);
            std::iter::from_fn(|| self.far.receive(&mut frame).then_some(())).count()
        }

        /// The next frame for the host that has waited, at this time.
        fn passed(&mut self, now: u64) -> Option<Frame> {
            self.wire.set_time(now);
            let mut frame = Frame::with_capacity(FRAME);
            self.wire.pass_held(&mut frame, &self.counters).then_some(frame)
        }
    }

    /// A segment of 125 bytes, Ethernet header included.
    fn segment() -> Frame {
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40000), device: 0 };
        let template = Template::new(&flow, &Link { ttl: 64, ..Link::default() }, false);
        let options = TcpOptions::default();
        let mut frame = Frame::with_capacity(FRAME);
        frame.set_length(MAX_HEADER + 71);
        let header = Header { seq: 1, ack: 7, flags: Flags::ACK, window: 9, options: &options, ecn: 0, ident: 0 };
        let headers = template.emit(&header, 71, frame.bytes_mut());
        frame.set_length(headers + 71);
        finish_checksum(frame.bytes_mut(), template.tcp_offset(), 16);
        frame
    }

    #[test]
    fn nothing_passes_before_there_are_rules() {
        let mut stage = Stage::new();
        assert!(stage.send() == 0 && !stage.wire.admits(&mut segment()));
        stage.wire.set(Gate::Open);
        assert!(stage.send() == 1 && stage.wire.admits(&mut segment()));
    }

    /// 1000 segments a second, of which two pass at once, and two wait.
    #[test]
    fn frames_over_a_limit_pass_when_their_time_comes() {
        let mut stage = Stage::new();
        stage.set("out limit 1mbit burst 250b");
        stage.wire.set_time(1_000_000);
        let at_once: usize = (0..10).map(|_| stage.send()).sum();
        assert_eq!((at_once, stage.wire.next_passing()), (2, Some(1_000_001)));
        assert!(stage.passed(1_000_001).is_none(), "none of them is for the host");
        assert_eq!(stage.arrived(), 1);
        assert!(stage.passed(1_001_000).is_none() && stage.arrived() == 0);
        assert!(stage.passed(1_001_001).is_none() && stage.arrived() == 1);
        assert_eq!((stage.wire.next_passing(), stage.wire.spares.len()), (None, MAX_HELD));
        // What waits when the rules change is dropped.
        assert_eq!((stage.send(), stage.wire.held.len()), (0, 1));
        stage.set("out accept");
        assert_eq!((stage.wire.held.len(), stage.wire.spares.len()), (0, MAX_HELD));
    }

    #[test]
    fn the_sender_of_a_rejected_frame_is_answered() {
        let mut stage = Stage::new();
        stage.set("reject");
        assert_eq!(stage.send(), 0);
        let answer = stage.passed(1).expect("a reset for the host");
        let answer = TcpFrame::parse(answer.bytes(), 0).expect("a segment");
        assert_eq!((answer.flags, answer.seq, answer.flow.local.port), (Flags::RST, 7, 80));
        assert!(!stage.wire.admits(&mut segment()));
        assert_eq!(stage.arrived(), 1, "a reset for the other side");
        // More than fit wait for no answer.
        (0..2 * MAX_HELD).for_each(|_| assert_eq!(stage.send(), 0));
        assert_eq!((stage.wire.held.len(), stage.wire.spares.len()), (MAX_HELD, 0));
    }
}
