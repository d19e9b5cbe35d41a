//! The frames of several sources in the order of their times, each once.

use baton_capture::Seen;
use baton_linux::device_frames::DeviceFrame;
use baton_wire::glance::Packet;
use baton_wire::{Endpoint, Glance};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher, Hasher};

/// The ends of a connection, the smaller one first.
pub type Flow = [Endpoint; 2];

type Hashed = BuildHasherDefault<DefaultHasher>;

/// Nanoseconds for which a frame is remembered, since another source may show it as well: a frame that a NIC held
/// during a move comes to a device once more when it is replayed.
const REMEMBERED: u64 = 5_000_000_000;

/// Most frames that wait for earlier frames of other sources.
const MOST_WAITING: usize = 200_000;

/// Index of the loopback device in every network namespace.
const LOOPBACK: u32 = 1;

/// The flow between two ends.
pub fn flow(one: Endpoint, other: Endpoint) -> Flow {
    let key = |end: &Endpoint| (end.address, end.port);
    if key(&one) <= key(&other) { [one, other] } else { [other, one] }
}

/// Where a frame was seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// At a NIC's wire, as a frame of one of the NIC's connections.
    Nic,
    /// At a NIC's wire, as a frame of the kernel's.
    Kernel,
    /// At a device beside which the NIC is.
    Device,
}

/// A captured frame.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Nanoseconds since 1970.
    pub at: u64,
    pub source: Source,
    pub out: bool,
    /// Length of the frame on the wire, and the bytes that were captured.
    pub length: u32,
    pub bytes: Vec<u8>,
    /// Index of the device, if that is known.
    pub interface: u32,
    pub packet: Option<Packet>,
    /// A hash of the fields that are the same at all sources.
    hash: u64,
}

impl Frame {
    /// A frame that a NIC has seen, and when.
    pub fn of_nic(seen: &Seen, at: u64, bytes: Vec<u8>) -> Frame {
        let source = if seen.kernel { Source::Kernel } else { Source::Nic };
        Frame::new((at, source, seen.out), (seen.length, seen.interface), bytes)
    }

    /// A frame that a device has shown. Only its first `most` bytes are wanted, or its headers.
    pub fn of_device(seen: &DeviceFrame, bytes: &[u8], most: Option<u32>) -> Frame {
        let headers = || Glance::at(bytes, seen.length as usize).headers;
        let most = most.map_or_else(headers, |most| most as usize).min(bytes.len());
        Frame::new((seen.at, Source::Device, seen.out), (seen.length, seen.interface), bytes[..most].to_vec())
    }

    fn new((at, source, out): (u64, Source, bool), (length, interface): (u32, u32), bytes: Vec<u8>) -> Frame {
        let glance = Glance::at(&bytes, length as usize);
        let mut hasher = DefaultHasher::new();
        hasher.write_u32(length);
        // Behind the link's header, which differs where a frame is replayed. Checksums may not be filled in yet.
        let network = glance.network.unwrap_or(0);
        let v4 = bytes.get(network).is_some_and(|first| first >> 4 == 4);
        let headers = &bytes[network.min(bytes.len())..glance.headers];
        let transport = if v4 { usize::from(headers.first().map_or(0, |first| first & 15)) * 4 } else { 40 };
        for (place, byte) in headers.iter().enumerate() {
            let is_checksum = v4 && (place == 10 || place == 11) || place == transport + 16 || place == transport + 17;
            hasher.write_u8(if is_checksum { 0 } else { *byte });
        }
        Frame { at, source, out, length, bytes, interface, packet: glance.packet, hash: hasher.finish() }
    }

    /// Its connection.
    pub fn flow(&self) -> Option<Flow> {
        self.packet.map(|packet| flow(packet.source, packet.destination))
    }
}

/// Frames that wait.
#[derive(Default)]
pub struct Merge {
    waiting: BTreeMap<(u64, u64), Frame>,
    count: u64,
    /// Frames of NICs, and frames of devices that came out: by their hash the time, and the device.
    seen: HashMap<u64, (u64, Option<u32>), Hashed>,
    order: VecDeque<(u64, u64)>,
    /// The time of the last frame that came out.
    last: u64,
}

impl Merge {
    /// Adds a frame. A frame that is older than the last one that came out comes out next.
    pub fn add(&mut self, frame: Frame) {
        if frame.source != Source::Device && frame.interface != LOOPBACK {
            self.note(frame.hash, frame.at, None);
        }
        self.count += 1;
        self.waiting.insert((frame.at, self.count), frame);
    }

    fn note(&mut self, hash: u64, at: u64, interface: Option<u32>) {
        self.seen.insert(hash, (at, interface));
        self.order.push_back((at, hash));
    }

    /// Takes the next frame, none of which is younger than `until`.
    pub fn next(&mut self, until: u64) -> Option<Frame> {
        loop {
            let (&(at, _), _) = self.waiting.first_key_value()?;
            if at > until && self.waiting.len() <= MOST_WAITING {
                return None;
            }
            let (_, mut frame) = self.waiting.pop_first()?;
            self.forget(frame.at);
            if self.is_twice(&frame) {
                continue;
            }
            frame.at = frame.at.max(self.last);
            self.last = frame.at;
            return Some(frame);
        }
    }

    /// Whether a frame has come out, or will, as another source has seen it.
    fn is_twice(&mut self, frame: &Frame) -> bool {
        let known = self.seen.get(&frame.hash).copied();
        if frame.interface == LOOPBACK {
            // One end sends a frame and the other receives it, and the NIC may have both ends.
            let twice = known.is_some();
            if !twice {
                self.note(frame.hash, frame.at, Some(LOOPBACK));
            }
            return twice;
        }
        if frame.source != Source::Device {
            return false;
        }
        match known {
            Some((_, None)) => return true,
            Some((_, Some(interface))) if interface != frame.interface => return true,
            _ => {}
        }
        self.note(frame.hash, frame.at, Some(frame.interface));
        false
    }

    fn forget(&mut self, now: u64) {
        while let Some((at, hash)) = self.order.front().copied()
            && at + REMEMBERED < now
        {
            self.order.pop_front();
            if self.seen.get(&hash).is_some_and(|(last, _)| *last == at) {
                self.seen.remove(&hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A segment of IPv4 with this identification.
    fn bytes(ident: u8) -> Vec<u8> {
        let mut bytes = vec![0; 54];
        bytes[12..15].copy_from_slice(&[8, 0, 0x45]);
        (bytes[19], bytes[23], bytes[46]) = (ident, 6, 0x50);
        bytes
    }

    fn of_nic(at: u64, ident: u8, kernel: bool) -> Frame {
        Frame::of_nic(&Seen { at: 0, length: 54, out: false, kernel, interface: 3 }, at, bytes(ident))
    }

    fn of_device(at: u64, ident: u8, interface: u32) -> Frame {
        let mut bytes = bytes(ident);
        // Another address of the link, and another checksum.
        (bytes[0], bytes[24], bytes[50]) = (7, 7, 7);
        Frame::of_device(&DeviceFrame { at, length: 54, out: false, interface }, &bytes, None)
    }

    fn out(merge: &mut Merge, until: u64) -> Vec<(u64, Source)> {
        std::iter::from_fn(|| merge.next(until)).map(|frame| (frame.at, frame.source)).collect()
    }

    #[test]
    fn frames_come_in_the_order_of_their_times() {
        let mut merge = Merge::default();
        for (at, ident) in [(30, 1), (10, 2), (20, 3), (99, 4)] {
            merge.add(of_nic(at, ident, false));
        }
        assert_eq!(out(&mut merge, 50).iter().map(|(at, _)| *at).collect::<Vec<_>>(), [10, 20, 30]);
        merge.add(of_nic(5, 5, true));
        assert_eq!(out(&mut merge, 50), [(30, Source::Kernel)], "a late one does not go back in time");
        assert_eq!(out(&mut merge, 100).len(), 1);
    }

    #[test]
    fn a_devices_frame_that_a_nic_has_is_left_out() {
        let mut merge = Merge::default();
        merge.add(of_device(10, 1, 3));
        merge.add(of_device(11, 2, 3));
        // The NIC's frames come later, and the device sees them once more when they are replayed.
        merge.add(of_nic(12, 1, false));
        merge.add(of_device(13, 1, 3));
        assert_eq!(out(&mut merge, 50), [(11, Source::Device), (12, Source::Nic)]);
        merge.add(of_device(60, 1, 3));
        assert_eq!(out(&mut merge, 60), []);
        merge.add(of_device(61 + REMEMBERED, 1, 3));
        assert_eq!(out(&mut merge, u64::MAX).len(), 1, "after a while it is another one");
    }

    #[test]
    fn a_frame_that_passes_two_devices_is_there_once_and_one_sent_again_twice() {
        let mut merge = Merge::default();
        for (at, interface) in [(10, 3), (11, 4), (12, 3)] {
            merge.add(of_device(at, 1, interface));
        }
        assert_eq!(out(&mut merge, 50), [(10, Source::Device), (12, Source::Device)]);
        // On loopback each is seen when it is sent, and when it is received.
        for at in [20, 21] {
            merge.add(of_device(at, 2, LOOPBACK));
        }
        assert_eq!(out(&mut merge, 50), [(20, Source::Device)]);
    }
}
