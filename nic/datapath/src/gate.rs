//! The wire behind the filter: no frame that the filter drops is processed, or sent.

use crate::counters::Counters;
use baton_abi::layout::Counter;
use baton_device::{Checksum, Device, Frame};
use baton_filter::words::WORDS;
use baton_filter::{Direction, Filter, Verdict};
use baton_shm::WordArray;
use baton_wire::refusal::{MAX_REFUSAL, refuse};

/// Most answers to the host that wait for the next round. Further rejected frames are dropped without one.
const MAX_ANSWERS: usize = 32;

/// What frames have to pass between the worker and the wire.
#[derive(Default)]
pub enum Gate {
    /// All frames pass.
    #[default]
    Open,
    /// None passes: the rules are not known yet.
    Closed,
    /// Those pass that the filter lets pass. Its counters and flows are in the words.
    Filtered(Box<Filter>, WordArray<WORDS>),
}

/// A wire and its gate.
pub(crate) struct GatedWire<W> {
    pub device: W,
    gate: Gate,
    /// The time of this round, in microseconds.
    now: u64,
    /// The answer that is being sent to a host on the wire.
    answer: Frame,
    /// Answers to rejected frames of this host, to be processed as if they came from the wire; and buffers for more.
    answers: Vec<Frame>,
    spares: Vec<Frame>,
}

/// How many frames a frame stands for on the wire, and their bytes.
fn extent(frame: &Frame) -> (u64, u64) {
    let length = frame.bytes().len();
    let Some(segmentation) = frame.segmentation else { return (1, length as u64) };
    let headers = usize::from(segmentation.headers).min(length);
    let segments = (length - headers).div_ceil(usize::from(segmentation.size.max(1))).max(1);
    (segments as u64, (length + (segments - 1) * headers) as u64)
}

impl<W: Device> GatedWire<W> {
    pub fn new(device: W, gate: Gate) -> GatedWire<W> {
        let answer = Frame::with_capacity(MAX_REFUSAL);
        let mut wire = GatedWire { device, gate: Gate::Open, now: 0, answer, answers: Vec::new(), spares: Vec::new() };
        wire.set(gate);
        wire
    }

    /// Changes what may pass.
    pub fn set(&mut self, gate: Gate) {
        if matches!(gate, Gate::Filtered(..)) && self.answers.capacity() == 0 {
            self.answers.reserve(MAX_ANSWERS);
            self.spares.resize_with(MAX_ANSWERS, || Frame::with_capacity(MAX_REFUSAL));
        }
        self.gate = gate;
    }

    /// Sends a frame, if it may pass.
    #[inline(always)]
    pub fn transmit(&mut self, frame: &mut Frame, counters: &Counters) {
        if self.is_gated() && !self.judge(Direction::Out, frame) {
            return;
        }
        let sent = self.device.transmit(frame);
        counters.add(if sent { Counter::WireSent } else { Counter::Dropped }, 1);
    }

    /// Whether a frame that was received may pass. If not, nothing else must be done with it.
    #[inline(always)]
    pub fn admits(&mut self, frame: &Frame) -> bool {
        !self.is_gated() || self.judge(Direction::In, frame)
    }

    #[inline(never)]
    fn judge(&mut self, direction: Direction, frame: &Frame) -> bool {
        let verdict = match &self.gate {
            Gate::Open => Verdict::Pass,
            Gate::Closed => Verdict::Drop,
            Gate::Filtered(filter, words) => filter.judge(&words[..], direction, frame.bytes(), extent(frame), self.now),
        };
        match verdict {
            Verdict::Pass => return true,
            Verdict::Drop => {}
            Verdict::Reject => self.answer(direction, frame),
        }
        false
    }

    /// Answers a rejected frame.
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
            self.device.transmit(&mut self.answer);
        } else if let Some(mut answer) = self.spares.pop() {
            fill(&mut answer);
            self.answers.push(answer);
        }
    }

    /// Whether frames are judged: then the time must be set in each round, and answers taken.
    #[inline(always)]
    pub fn is_gated(&self) -> bool {
        !matches!(self.gate, Gate::Open)
    }

    /// Sets the time of this round, in microseconds.
    pub fn set_time(&mut self, now: u64) {
        self.now = now;
    }

    /// Takes an answer to this host, and puts it into `frame`. False if none waits.
    pub fn take_answer(&mut self, frame: &mut Frame) -> bool {
        let Some(answer) = self.answers.pop() else { return false };
        frame.copy_from(&answer);
        self.spares.push(answer);
        true
    }
}
