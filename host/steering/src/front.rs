//! Large receive in front of a device that the kernel keeps: a program at the device's ingress takes the TCP segments that may be
//! merged off the kernel's path, and puts them into a ring for the NIC's process. What that process makes of them it writes to a
//! TAP, whose program gives each frame to the kernel as if the device had received it.
//!
//! **Which connections.** Only a connection whose segments come close together is taken: a request and its answer would wait for
//! the process, and win nothing. So the first segments of a burst pass.
//!
//! **Order.** Once a segment of a connection is in the ring, later ones must not overtake it. They all go through the ring, too,
//! until the process reports that everything that came before a given moment is with the kernel ([`Front::clear_until`]).
//! Connections are told apart by a hash alone: connections that share an entry are taken or left together, which is harmless.
//! Pure acknowledgements pass, since nothing in them depends on the data before them.
//!
//! **Death.** The process writes the time into memory shared with the program, its heartbeat. If that is [`DEAD_AFTER`] old, the
//! program passes everything. Until then segments go into the ring however late the process is. If the ring is full they are
//! dropped, as a card drops what does not fit its ring.

use crate::assembler::{Assembler, Helper, R, Size};
use crate::ring_buffer::RingBuffer;
use crate::{AGGREGATED, INJECTED, bpf, btf};
use baton_shm::Region;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Age of the heartbeat, in nanoseconds, from which on the process counts as dead.
pub const DEAD_AFTER: u64 = 70_000_000;

/// Bytes of the ring: some 20 000 segments of 1500 bytes.
const RING: usize = 32 << 20;
/// Entries of the table of connections, and the bits of their index.
const FLOWS: u32 = 1 << FLOW_BITS;
const FLOW_BITS: i32 = 14;
/// Bytes of an entry: when the last segment came; how many have come close together.
const FLOW: u32 = 16;
const COUNT: i16 = 8;
/// Segments that come close together before the next is taken.
const ENOUGH: i32 = 4;
/// Longest time between such segments, in nanoseconds.
const CLOSE: i32 = 1_000_000;
/// Least payload of such a segment, in bytes.
const LEAST: i32 = 256;

/// Memory shared with the process: the offsets of its words, on lines of their own where different sides write them.
const HEARTBEAT: usize = 0;
const CLEAR: usize = 8;
const SLEEPS: usize = 64;
const DROPPED: usize = 128;
const SHARED: usize = 4096;

/// Bytes in front of each frame in the ring: length (4), state of the checksum (4), size of the segments that the frame stands
/// for (2), offsets of the TCP header (2) and of the payload (2), whether earlier segments of the connection have passed (2).
const HEAD: i32 = 16;
/// Room for a frame in a record, the least that fits it: Ethernet's MTU and a tag, jumbo frames, whatever the kernel merges.
const ROOMS: [i32; 3] = [1520, 9216 + 32, 65_535 + 14];

/// Offsets in `__sk_buff`.
const LENGTH: i16 = 0;
const SKB_MARK: i16 = 8;
const TAGGED: i16 = 20;
const SEGMENT_SIZE: i16 = 176;

/// Stack offsets.
const SMALL: i16 = -8;
const HEADER: i16 = -48;
const SEGMENT: i16 = -72;
const CHECKSUM: i16 = -80;
const ENTRY: i16 = -88;
const TCP_AT: i16 = -92;
const PAYLOAD_AT: i16 = -96;
const BARRIER: i16 = -104;
const STARTS: i16 = -112;

/// `TCX_NEXT`, `TC_ACT_SHOT`, `BPF_F_INGRESS`.
const NEXT: i32 = -1;
const SHOT: i32 = 2;
const TO_INGRESS: i32 = 1;
/// `BPF_RB_NO_WAKEUP`, `BPF_RB_FORCE_WAKEUP`.
const NO_WAKEUP: i32 = 1;
const WAKEUP: i32 = 2;

const ETHERNET: i32 = 14;
const TCP: i32 = 6;
/// TCP's flags.
const SYN: i32 = 2;
const FIN_RST_URG: i32 = 0x25;
/// Odd, with its bits spread: for the hash.
const SPREAD: i32 = 0x9e37_79b1_u32 as i32;

/// What the kernel knows about a frame's TCP checksum (`ip_summed`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Summed {
    /// Nothing: it must be verified.
    Unknown,
    /// It is right.
    Verified,
    /// The field holds the sum of the pseudo-header: the sender has left the rest to its device, and the frame met none.
    Partial,
}

/// A frame that was taken off the kernel's path.
#[derive(Clone, Copy, Debug)]
pub struct Taken<'a> {
    /// The frame, from its Ethernet header on.
    pub bytes: &'a [u8],
    /// Its TCP checksum.
    pub summed: Summed,
    /// Bytes of payload of each segment that it stands for; 0 if it is one.
    pub segment_size: u16,
    /// Offset of the TCP header.
    pub tcp_at: u16,
    /// Offset of the payload.
    pub payload_at: u16,
    /// It is the first of its connection that is taken, since others have passed.
    pub starts: bool,
}

impl<'a> Taken<'a> {
    fn parse(record: &'a [u8]) -> Option<Taken<'a>> {
        let half = |at: usize| Some(u16::from_ne_bytes(record.get(at..at + 2)?.try_into().ok()?));
        let length = u32::from_ne_bytes(record.get(..4)?.try_into().ok()?) as usize;
        let summed = match record.get(4)? {
            1 => Summed::Verified,
            3 => Summed::Partial,
            // CHECKSUM_COMPLETE has the sum, and nobody has compared it.
            _ => Summed::Unknown,
        };
        let bytes = record.get(HEAD as usize..HEAD as usize + length)?;
        Some(Taken { bytes, summed, segment_size: half(8)?, tcp_at: half(10)?, payload_at: half(12)?, starts: half(14)? != 0 })
    }
}

/// The filter at a device, and the way back. Dropping this detaches both.
#[derive(Debug)]
pub struct Front {
    ring: RingBuffer,
    shared: Region,
    _taking: OwnedFd,
    _giving: OwnedFd,
}

impl Front {
    /// Puts it in front of `device`. Frames that `tap` receives count as received by the device. Nothing is taken before the first
    /// [`Front::beat`].
    ///
    /// # Errors
    /// If this process may not load BPF programs, or this kernel lacks something; the message says what to do.
    pub fn attach(device: u32, tap: u32) -> io::Result<Front> {
        let Loaded { ring, shared, take, give } = load(device)?;
        let shared = Region::map_fixed(shared, SHARED)?;
        let giving = bpf::attach_to_device(give.as_fd(), tap, bpf::Hook::Ingress)?;
        // Before Baton's steering: that recognizes frames by their mark which are not to be taken here, and removes it.
        let taking = bpf::attach_to_device_first(take.as_fd(), device, bpf::Hook::Ingress)?;
        Ok(Front { ring, shared, _taking: taking, _giving: giving })
    }

    /// Takes nothing any more, from this moment on: detaching the program can take the kernel tens of milliseconds. What is in the
    /// ring can still be received.
    pub fn stop(&self) {
        self.beat(0);
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.shared.words(at, 1)[0]
    }

    /// Hands the next frame to `read`. False if none waits.
    #[inline]
    pub fn receive(&mut self, read: impl FnOnce(Taken<'_>)) -> bool {
        self.ring.next_with(|record| Taken::parse(record).map(read)).is_some()
    }

    /// Whether no frame waits.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// Descriptor that is readable when frames wait, after [`Front::sleeps`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.ring.fd()
    }

    /// Publishes the time, in nanoseconds of the monotonic clock: the process is alive.
    #[inline]
    pub fn beat(&self, now: u64) {
        self.word(HEARTBEAT).store(now, Ordering::Release);
    }

    /// Reports that all frames that came before this moment are with the kernel.
    #[inline]
    pub fn clear_until(&self, moment: u64) {
        self.word(CLEAR).store(moment, Ordering::Release);
    }

    /// Announces that the process is about to sleep, so that the next frame wakes it. Returns false if a frame waits already.
    pub fn sleeps(&self) -> bool {
        self.word(SLEEPS).store(1, Ordering::SeqCst);
        // Either the program sees that the process sleeps, or the process sees the record: the program has such a barrier, too.
        fence(Ordering::SeqCst);
        let sleeps = self.is_empty();
        if !sleeps {
            self.wakes();
        }
        sleeps
    }

    /// Ends [`Front::sleeps`].
    pub fn wakes(&self) {
        self.word(SLEEPS).store(0, Ordering::Relaxed);
    }

    /// Frames that were dropped because the ring was full.
    pub fn dropped(&self) -> u64 {
        self.word(DROPPED).load(Ordering::Relaxed)
    }
}

/// Whether the kernel takes the programs of [`Front`].
///
/// # Errors
/// Why not.
pub fn supported() -> io::Result<()> {
    load(crate::LOOPBACK).map(drop)
}

/// Programs and maps that are attached nowhere yet.
struct Loaded {
    ring: RingBuffer,
    shared: OwnedFd,
    take: OwnedFd,
    give: OwnedFd,
}

fn load(device: u32) -> io::Result<Loaded> {
    let ring = RingBuffer::new(RING)?;
    let flows = bpf::create_array(FLOW, FLOWS)?;
    let shared = bpf::create_mappable_array(SHARED as u32)?;
    let summed = btf::field("sk_buff", "ip_summed")?;
    let program = take(Maps { ring: ring.fd(), flows: flows.as_fd(), shared: shared.as_fd() }, summed);
    let take = bpf::load(bpf::ProgramKind::Device, &program)?;
    let give = bpf::load(bpf::ProgramKind::Device, &give(device))?;
    Ok(Loaded { ring, shared, take, give })
}

#[derive(Clone, Copy)]
struct Maps<'a> {
    ring: BorrowedFd<'a>,
    flows: BorrowedFd<'a>,
    shared: BorrowedFd<'a>,
}

/// Loads bytes of the frame at the offset in R2 to the stack. Jumps to `pass` if there are none.
fn load_bytes(a: &mut Assembler, at: i16, length: i32) {
    a.mov(R::R1, R::R6).mov(R::R3, R::R10).add(R::R3, i32::from(at)).set(R::R4, length).call(Helper::LoadBytes);
    a.jump_unless(R::R0, 0, "pass");
}

/// Mixes four or eight bytes on the stack into the hash in R8.
fn mix(a: &mut Assembler, size: Size, at: i16) {
    a.load(size, R::R1, R::R10, at).xor_register(R::R8, R::R1).multiply(R::R8, SPREAD);
}

/// Reads the headers. Goes on with the hash in R8, the offset of the TCP header in R9 and that of the IP packet's end in R7. Jumps
/// to `pass` if the frame is no TCP segment, tagged for a VLAN, or a fragment.
fn read_network(a: &mut Assembler) {
    a.load(Size::Word, R::R1, R::R6, TAGGED).jump_unless(R::R1, 0, "pass").set(R::R2, 12);
    load_bytes(a, SMALL, 2);
    a.set(R::R8, 0).load(Size::Half, R::R1, R::R10, SMALL);
    a.jump_if(R::R1, i32::from(0x0800u16.to_be()), "v4").jump_if(R::R1, i32::from(0x86ddu16.to_be()), "v6").jump("pass");

    a.label("v4").set(R::R2, ETHERNET);
    load_bytes(a, HEADER, 20);
    a.load(Size::Byte, R::R1, R::R10, HEADER + 9).jump_unless(R::R1, TCP, "pass");
    a.load(Size::Half, R::R1, R::R10, HEADER + 6).and(R::R1, i32::from(0x3fffu16.to_be())).jump_unless(R::R1, 0, "pass");
    for at in [12, 16] {
        mix(a, Size::Word, HEADER + at);
    }
    a.load(Size::Byte, R::R9, R::R10, HEADER).and(R::R9, 15).shift_left(R::R9, 2).add(R::R9, ETHERNET);
    a.load(Size::Half, R::R7, R::R10, HEADER + 2).swap_half(R::R7).add(R::R7, ETHERNET).jump("segment");

    a.label("v6").set(R::R2, ETHERNET);
    load_bytes(a, HEADER, 40);
    a.load(Size::Byte, R::R1, R::R10, HEADER + 6).jump_unless(R::R1, TCP, "pass");
    for at in [8, 16, 24, 32] {
        mix(a, Size::Double, HEADER + at);
    }
    a.set(R::R9, ETHERNET + 40);
    a.load(Size::Half, R::R7, R::R10, HEADER + 4).swap_half(R::R7).add(R::R7, ETHERNET + 40);
    a.label("segment");
}

/// Reads the TCP header. Goes on with the bytes of payload in R7, and the index of the connection's entry on the stack. Jumps to
/// `pass` if the segment sets up a connection, or is a pure acknowledgement.
fn read_segment(a: &mut Assembler) {
    a.store(Size::Word, R::R10, TCP_AT, R::R9).mov(R::R2, R::R9);
    load_bytes(a, SEGMENT, 20);
    mix(a, Size::Word, SEGMENT);
    a.shift_right(R::R8, 64 - FLOW_BITS).store(Size::Word, R::R10, ENTRY, R::R8);
    a.load(Size::Byte, R::R1, R::R10, SEGMENT + 12).shift_right(R::R1, 4).shift_left(R::R1, 2).add_register(R::R9, R::R1);
    a.store(Size::Word, R::R10, PAYLOAD_AT, R::R9).subtract_register(R::R7, R::R9);
    a.load(Size::Byte, R::R2, R::R10, SEGMENT + 13).mov(R::R1, R::R2).and(R::R1, SYN).jump_unless(R::R1, 0, "pass");
    a.jump_if_greater(R::R7, 0, "data").set(R::R7, 0).and(R::R2, FIN_RST_URG).jump_if(R::R2, 0, "pass").label("data");
}

/// Decides whether the segment is taken: goes on if so, else jumps to `pass`.
fn decide(a: &mut Assembler, maps: Maps<'_>) {
    a.store_word(R::R10, STARTS, 0).call(Helper::MonotonicNanoseconds).mov(R::R8, R::R0);
    a.map_value(R::R1, maps.shared, HEARTBEAT as i32).load(Size::Double, R::R1, R::R1, 0);
    a.mov(R::R2, R::R8).subtract_register(R::R2, R::R1).jump_if_greater(R::R2, DEAD_AFTER as i32, "pass");
    a.map(R::R1, maps.flows).mov(R::R2, R::R10).add(R::R2, i32::from(ENTRY)).call(Helper::MapLookup).jump_if(R::R0, 0, "pass");
    // R1: when the last segment came. R2: how long ago that is. R3: how many came close together.
    a.load(Size::Double, R::R1, R::R0, 0).store(Size::Double, R::R0, 0, R::R8).load(Size::Double, R::R3, R::R0, COUNT);
    a.mov(R::R2, R::R8).subtract_register(R::R2, R::R1).jump_if_below(R::R3, ENOUGH, "counting");
    a.jump_if_above(R::R2, CLOSE, "paused").jump("take");
    a.label("paused").map_value(R::R4, maps.shared, CLEAR as i32).load(Size::Double, R::R4, R::R4, 0);
    a.jump_unless_below_register(R::R1, R::R4, "take").set(R::R3, 0);
    a.label("counting").load(Size::Word, R::R4, R::R6, SEGMENT_SIZE).jump_unless(R::R4, 0, "unlike");
    a.jump_if_below(R::R7, LEAST, "unlike").jump_if_above(R::R2, CLOSE, "first");
    a.add(R::R3, 1).store(Size::Double, R::R0, COUNT, R::R3).jump_if_below(R::R3, ENOUGH, "pass");
    a.store_word(R::R10, STARTS, 1).jump("take");
    a.label("first").set(R::R3, 1).store(Size::Double, R::R0, COUNT, R::R3).jump("pass");
    // Merged already, or a small message.
    a.label("unlike").set(R::R3, 0).store(Size::Double, R::R0, COUNT, R::R3).jump("pass");
    a.label("take");
}

/// Labels of the code for one size of records.
struct Labels {
    larger: &'static str,
    awake: &'static str,
    spoilt: &'static str,
}

const LABELS: [Labels; ROOMS.len()] = [
    Labels { larger: "larger 1", awake: "awake 1", spoilt: "spoilt 1" },
    Labels { larger: "larger 2", awake: "awake 2", spoilt: "spoilt 2" },
    Labels { larger: "pass", awake: "awake 3", spoilt: "spoilt 3" },
];

/// Puts the frame, whose length is in R8, into a record with `room` for it, and ends. Jumps to `larger` if it does not fit.
/// `summed`: bits in front of `ip_summed` in its byte.
fn put(a: &mut Assembler, maps: Maps<'_>, room: i32, summed: i32, labels: &Labels) {
    a.jump_if_above(R::R8, room, labels.larger);
    a.map(R::R1, maps.ring).set(R::R2, HEAD + room).set(R::R3, 0).call(Helper::RingBufferReserve).jump_if(R::R0, 0, "full");
    a.mov(R::R9, R::R0).store(Size::Word, R::R9, 0, R::R8);
    a.load(Size::Byte, R::R1, R::R10, CHECKSUM).shift_right(R::R1, summed).and(R::R1, 3).store(Size::Word, R::R9, 4, R::R1);
    a.load(Size::Word, R::R1, R::R6, SEGMENT_SIZE).store(Size::Half, R::R9, 8, R::R1);
    a.load(Size::Word, R::R1, R::R10, TCP_AT).store(Size::Half, R::R9, 10, R::R1);
    a.load(Size::Word, R::R1, R::R10, PAYLOAD_AT).store(Size::Half, R::R9, 12, R::R1);
    a.load(Size::Word, R::R1, R::R10, STARTS).store(Size::Half, R::R9, 14, R::R1);
    a.mov(R::R1, R::R6).set(R::R2, 0).mov(R::R3, R::R9).add(R::R3, HEAD).mov(R::R4, R::R8).call(Helper::LoadBytes);
    a.jump_unless(R::R0, 0, labels.spoilt);
    // See `Front::sleeps`.
    a.set(R::R1, 0).store(Size::Double, R::R10, BARRIER, R::R1).atomic_fetch_add(R::R10, BARRIER, R::R1);
    a.map_value(R::R1, maps.shared, SLEEPS as i32).load(Size::Double, R::R3, R::R1, 0).set(R::R2, NO_WAKEUP);
    a.jump_if(R::R3, 0, labels.awake).set(R::R3, 0).store(Size::Double, R::R1, 0, R::R3).set(R::R2, WAKEUP);
    a.label(labels.awake).mov(R::R1, R::R9).call(Helper::RingBufferSubmit).set(R::R0, SHOT).exit();
    a.label(labels.spoilt).mov(R::R1, R::R9).set(R::R2, NO_WAKEUP).call(Helper::RingBufferDiscard).jump("pass");
}

/// Program at the device's ingress. `summed`: offset of `ip_summed` in the kernel's `sk_buff`, in bits.
fn take(maps: Maps<'_>, summed: u32) -> Vec<u8> {
    let mut a = Assembler::default();
    a.mov(R::R6, R::R1).load(Size::Word, R::R2, R::R6, SKB_MARK);
    a.jump_if(R::R2, AGGREGATED as i32, "merged").jump_if(R::R2, INJECTED as i32, "pass");
    read_network(&mut a);
    read_segment(&mut a);
    decide(&mut a, maps);
    // The context's address is the sk_buff's.
    a.mov(R::R1, R::R10).add(R::R1, i32::from(CHECKSUM)).set(R::R2, 1).mov(R::R3, R::R6).add(R::R3, summed as i32 / 8);
    a.call(Helper::ReadKernel).jump_unless(R::R0, 0, "pass");
    a.load(Size::Word, R::R8, R::R6, LENGTH).jump_if_below(R::R8, ETHERNET, "pass");
    for (room, labels) in ROOMS.into_iter().zip(&LABELS) {
        put(&mut a, maps, room, summed as i32 % 8, labels);
        if labels.larger != "pass" {
            a.label(labels.larger);
        }
    }
    a.label("full").set(R::R1, 1).map_value(R::R2, maps.shared, DROPPED as i32).atomic_add(R::R2, 0, R::R1);
    a.set(R::R0, SHOT).exit();
    a.label("merged").store_word(R::R6, SKB_MARK, 0);
    a.label("pass").set(R::R0, NEXT).exit();
    a.finish()
}

/// Program at the TAP's ingress.
fn give(device: u32) -> Vec<u8> {
    let mut a = Assembler::default();
    a.store_word(R::R1, SKB_MARK, AGGREGATED as i32).set(R::R1, device as i32).set(R::R2, TO_INGRESS);
    a.call(Helper::Redirect).exit();
    a.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs the right to load BPF programs.
    #[test]
    fn the_kernel_takes_the_programs() {
        if let Err(error) = crate::supported() {
            eprintln!("skipped: {error}");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return;
        }
        supported().unwrap();
    }
}
