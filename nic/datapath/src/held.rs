//! The frames of a connection that are held while it moves. All operations take logarithmic time in the number of
//! frames, since the peer decides how many frames there are and how small they are.

use crate::listeners::FIRST_WINDOW;
use baton_device::Frame;
use baton_tcp::seq::before;
use baton_wire::{Flags, TcpFrame};
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of frames held for one connection, and of their bytes; further frames are dropped, as by any full
/// queue.
const HELD_FRAMES: usize = 4096;
const HELD_BYTES: usize = 8 << 20;
/// The limit in bytes for a connection that the NIC has made and that no program has accepted yet, which the program
/// may delay at will: as many bytes as its peer may send until then, with headers.
const MADE_BYTES: usize = 2 * FIRST_WINDOW as usize;
/// Bytes that a held frame counts in addition to its own, for its bookkeeping.
const BESIDE: usize = 256;

/// A sequence number as an offset, so that it can be ordered: from the first one seen, later from the kernel's
/// acknowledgement.
type SeqOffset = i32;

/// The frames held during a move; without any it takes no memory of its own.
#[derive(Default)]
pub(crate) struct HeldFrames(Option<Box<Frames>>);

/// Held frames, in order of arrival.
#[derive(Default)]
struct Frames {
    /// The frames by number of arrival, each with the end of the range that it covers.
    frames: BTreeMap<u64, (SeqOffset, Frame)>,
    /// The same frames, ordered by that end.
    ends: BTreeSet<(SeqOffset, u64)>,
    /// The ranges that the frames cover, as beginnings and ends; they neither touch nor overlap.
    covered: BTreeMap<SeqOffset, SeqOffset>,
    /// The sequence number from which offsets count, and whether it is the kernel's. The first frame may be forged by
    /// anyone who knows the addresses and ports, with a sequence number 2³¹ away: then the order would wrap around in
    /// the middle of the peer's frames.
    base: Option<u32>,
    is_kernels: bool,
    /// Number of frames that have arrived.
    arrivals: u64,
    /// Bytes that the held frames count.
    bytes: usize,
    /// The NIC has made the connection, and no program has accepted it.
    is_made: bool,
    /// Frames with an arrival number below this were received by the kernel, too.
    mirrored: u64,
    /// A frame was dropped, so that the frames do not cover everything that arrived.
    overflowed: bool,
}

impl HeldFrames {
    /// An empty queue for a connection that the NIC has made, with a lower limit, since any peer can cause the NIC to
    /// make connections.
    pub fn of_made() -> HeldFrames {
        HeldFrames(Some(Box::new(Frames { is_made: true, ..Frames::default() })))
    }

    /// Holds a copy of a frame. False, and the frame is to be dropped, if there is no room.
    pub fn push(&mut self, parsed: &TcpFrame, frame: &Frame) -> bool {
        self.0.get_or_insert_default().push(parsed, frame)
    }

    /// Whether no frame is held.
    pub fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(|held| held.frames.is_empty())
    }

    /// Whether a frame was dropped, so that the frames do not cover everything that arrived.
    pub fn overflowed(&self) -> bool {
        self.0.as_ref().is_some_and(|held| held.overflowed)
    }

    /// Drops the frames that lie before the kernel's acknowledgement `ack`.
    pub fn acknowledged(&mut self, ack: u32) {
        if let Some(held) = &mut self.0 {
            held.acknowledged(ack);
        }
    }

    /// Whether the frames cover the sequence numbers `left..right`.
    pub fn covers(&self, left: u32, right: u32) -> bool {
        !before(left, right) || self.0.as_ref().is_some_and(|held| held.covers(left, right))
    }

    /// Records the steal: the kernel does not receive frames that arrive from now on.
    pub fn mark_stolen(&mut self) {
        if let Some(held) = &mut self.0 {
            held.mirrored = held.arrivals;
        }
    }

    /// Drops the mirrored frames, which the kernel has received.
    pub fn drop_mirrored(&mut self) {
        if let Some(held) = &mut self.0 {
            held.frames = held.frames.split_off(&held.mirrored);
        }
    }

    /// Takes all frames.
    pub fn take(&mut self) -> impl Iterator<Item = Frame> + use<> {
        self.0.take().into_iter().flat_map(|held| held.frames.into_values()).map(|(_, frame)| frame)
    }
}

/// Bytes that a frame counts for while it is held.
fn cost(frame: &Frame) -> usize {
    frame.length() + BESIDE
}

impl Frames {
    /// The offset of a sequence number.
    fn offset(&self, seq: u32) -> SeqOffset {
        seq.wrapping_sub(self.base.unwrap_or(seq)) as SeqOffset
    }

    fn push(&mut self, parsed: &TcpFrame, frame: &Frame) -> bool {
        let fin = u32::from(parsed.flags.contains(Flags::FIN));
        let end = parsed.seq.wrapping_add(parsed.payload_length as u32).wrapping_add(fin);
        let most = if self.is_made { MADE_BYTES } else { HELD_BYTES };
        if self.frames.len() >= HELD_FRAMES || self.bytes + cost(frame) > most {
            self.overflowed = true;
            return false;
        }
        self.base.get_or_insert(parsed.seq);
        let (first, end) = (self.offset(parsed.seq), self.offset(end));
        self.cover(first, end);
        self.bytes += cost(frame);
        self.frames.insert(self.arrivals, (end, frame.clone()));
        self.ends.insert((end, self.arrivals));
        self.arrivals += 1;
        true
    }

    /// Adds a range to `covered`. Amortised over all calls each range is removed once.
    fn cover(&mut self, mut first: SeqOffset, mut end: SeqOffset) {
        if first >= end {
            return;
        }
        while let Some((start, stop)) = self.covered.range(..=end).next_back().map(|(start, stop)| (*start, *stop)) {
            if stop < first {
                break;
            }
            (first, end) = (first.min(start), end.max(stop));
            self.covered.remove(&start);
        }
        self.covered.insert(first, end);
    }

    /// Makes offsets count from a sequence number of the kernel's.
    fn count_from(&mut self, base: u32) {
        let before = self.base.replace(base).unwrap_or(base);
        let moved = |offset: SeqOffset| offset.wrapping_add(before.wrapping_sub(base) as SeqOffset);
        self.frames.values_mut().for_each(|(end, _)| *end = moved(*end));
        self.ends = std::mem::take(&mut self.ends).into_iter().map(|(end, arrival)| (moved(end), arrival)).collect();
        for (first, end) in std::mem::take(&mut self.covered) {
            self.cover(moved(first), moved(end));
        }
        self.is_kernels = true;
    }

    fn acknowledged(&mut self, ack: u32) {
        if !self.is_kernels {
            self.count_from(ack);
        }
        let ack = self.offset(ack);
        while let Some((_, arrival)) = self.ends.first().filter(|(end, _)| *end <= ack).copied() {
            self.ends.pop_first();
            if let Some((_, frame)) = self.frames.remove(&arrival) {
                self.bytes -= cost(&frame);
            }
        }
        while let Some((start, end)) = self.covered.first_key_value().map(|(start, end)| (*start, *end)) {
            if start >= ack {
                break;
            }
            self.covered.pop_first();
            if end > ack {
                self.covered.insert(ack, end);
            }
        }
    }

    fn covers(&self, left: u32, right: u32) -> bool {
        let (left, right) = (self.offset(left), self.offset(right));
        self.covered.range(..=left).next_back().is_some_and(|(_, end)| left < right && right <= *end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
    use baton_wire::{Endpoint, Flow, TcpOptions};
    use proptest::prelude::*;
    use std::time::Duration;

    fn frame(seq: u32, length: usize) -> Frame {
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 };
        let template = Template::new(&flow, &Link { ttl: 64, ..Link::default() }, false);
        let options = TcpOptions::default();
        let header = Header { seq, ack: 1, flags: Flags::ACK, window: 512, options: &options, ecn: 0, ident: 0 };
        let mut frame = Frame::with_capacity(MAX_HEADER + length);
        frame.set_length(MAX_HEADER + length);
        let headers = template.emit(&header, length, frame.bytes_mut());
        frame.set_length(headers + length);
        frame
    }

    fn push(held: &mut HeldFrames, seq: u32, length: usize) {
        let frame = frame(seq, length);
        let parsed = TcpFrame::parse(frame.bytes(), 0).expect("a segment");
        held.push(&parsed, &frame);
    }

    /// With a list of these frames one acknowledgement with a SACK block took 9.8 ms, and this test would take a
    /// minute.
    #[test]
    fn many_small_frames_cost_no_more_than_few() {
        let (done, finished) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut held = HeldFrames::default();
            for at in (0..HELD_FRAMES as u32).rev() {
                push(&mut held, 1 + at, 1);
            }
            for at in 0..HELD_FRAMES as u32 {
                held.acknowledged(at);
                assert!(held.covers(at + 1, 1 + HELD_FRAMES as u32));
                assert!(!held.covers(at + 1, 2 + HELD_FRAMES as u32));
            }
            done.send(held.take().count())
        });
        assert_eq!(finished.recv_timeout(Duration::from_secs(5)), Ok(2));
    }

    /// The first frame is forged, with a sequence number 2³¹ away from the peer's.
    #[test]
    fn a_forged_first_frame_changes_nothing_for_the_others() {
        let mut held = HeldFrames::default();
        push(&mut held, 1000 + (1 << 31), 1);
        push(&mut held, 992, 5);
        push(&mut held, 1000, 20);
        held.acknowledged(990);
        assert!(held.covers(992, 997) && held.covers(1000, 1020) && !held.covers(992, 1020));
        held.acknowledged(997);
        assert!(!held.covers(992, 997) && held.covers(1000, 1020));
        assert_eq!(held.take().count(), 1);
    }

    #[test]
    fn mirrored_frames_can_be_dropped() {
        let mut held = HeldFrames::default();
        push(&mut held, 10, 5);
        push(&mut held, 15, 5);
        held.mark_stolen();
        push(&mut held, 20, 7);
        held.drop_mirrored();
        assert_eq!(held.take().map(|frame| frame.length()).collect::<Vec<_>>(), [frame(20, 7).bytes().len()]);
        assert!(!held.covers(10, 11), "nothing is covered any more");
    }

    proptest! {
        /// The ranges agree with an examination of every byte.
        #[test]
        fn it_covers_what_its_frames_cover(
            base in any::<u32>(),
            steps in proptest::collection::vec((0u32..60, 0usize..12, 0u32..60, 0u32..20, any::<bool>()), 1..40),
        ) {
            let (mut held, mut bytes, mut acked) = (HeldFrames::default(), BTreeSet::new(), 0);
            // The first frame fixes the sequence number from which offsets are counted.
            push(&mut held, base, 0);
            for (seq, length, left, size, acknowledges) in steps {
                if acknowledges {
                    acked = acked.max(seq);
                    held.acknowledged(base.wrapping_add(acked));
                    bytes.retain(|byte| *byte >= acked);
                } else {
                    push(&mut held, base.wrapping_add(seq), length);
                    bytes.extend(seq..seq + length as u32);
                }
                let left = left.max(acked);
                let every = (left..left + size).all(|byte| bytes.contains(&byte));
                prop_assert_eq!(held.covers(base.wrapping_add(left), base.wrapping_add(left + size)), every);
            }
        }
    }
}
