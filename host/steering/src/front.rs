//! Large receive in front of a device that the kernel keeps: a program at the device's ingress takes the TCP segments that may be
//! merged off the kernel's path, and queues them at a TAP, where the NIC's process reads them. No byte of them is copied until then.
//! What that process makes of them it writes to the same TAP, whose program gives each frame to the kernel as if the device had
//! received it.
//!
//! **Which connections.** Only a connection whose segments come close together is taken: a request and its answer would wait for
//! the process, and win nothing. So the first segments of a burst pass.
//!
//! **Order.** Once a segment of a connection is in the queue, later ones must not overtake it. They all go through the queue, too,
//! until the process reports that everything that came before a given moment is with the kernel ([`Front::clear_until`]).
//! Connections are told apart by a hash alone: connections that share an entry are taken or left together, which is harmless.
//! Pure acknowledgements pass, since nothing in them depends on the data before them. A connection begins to pass only after
//! [`PAUSE`] without a segment: a process that has read none for so long can take the next one for the first.
//!
//! **Death.** The process writes the time into memory shared with the program, its heartbeat. If that is [`DEAD_AFTER`] old, the
//! program passes everything. Until then segments are queued however late the process is. If the queue is full the TAP drops them,
//! as a card drops what does not fit its ring, and counts them as dropped.

use crate::assembler::{Assembler, Helper, R, Size};
use crate::{AGGREGATED, INJECTED, bpf};
use baton_shm::Region;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Age of the heartbeat, in nanoseconds, from which on the process counts as dead.
pub const DEAD_AFTER: u64 = 70_000_000;

/// Time without a segment, in nanoseconds, after which segments of a connection may pass that was taken before.
pub const PAUSE: u64 = CLOSE as u64;

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
const SHARED: usize = 4096;

/// Offsets in `__sk_buff`.
const SKB_MARK: i16 = 8;
const TAGGED: i16 = 20;
const SEGMENT_SIZE: i16 = 176;

/// Stack offsets. The frame begins where the addresses of IPv4 are aligned.
const FRAME: i16 = -66;
const IPV4: i16 = FRAME + ETHERNET as i16;
const SEGMENT: i16 = IPV4 + 20;
const IPV6: i16 = -112;
const ENTRY: i16 = -120;

/// `TCX_NEXT`, `BPF_F_INGRESS`, and the other direction.
const NEXT: i32 = -1;
const TO_INGRESS: i32 = 1;
const TO_EGRESS: i32 = 0;

const ETHERNET: i32 = 14;
const TCP: i32 = 6;
/// TCP's flags.
const SYN: i32 = 2;
const FIN_RST_URG: i32 = 0x25;
/// Odd, with its bits spread: for the hash.
const SPREAD: i32 = 0x9e37_79b1_u32 as i32;

/// The filter at a device, and the way back. Dropping this detaches both.
#[derive(Debug)]
pub struct Front {
    shared: Region,
    _taking: OwnedFd,
    _giving: OwnedFd,
}

impl Front {
    /// Puts it in front of `device`. What is taken is sent by `tap`; frames that `tap` receives count as received by the device.
    /// Nothing is taken before the first [`Front::beat`].
    ///
    /// # Errors
    /// If this process may not load BPF programs, or this kernel lacks something; the message says what to do.
    pub fn attach(device: u32, tap: u32) -> io::Result<Front> {
        let Loaded { shared, take, give } = load(device, tap)?;
        let shared = Region::map_fixed(shared, SHARED)?;
        let giving = bpf::attach_to_device(give.as_fd(), tap, bpf::Hook::Ingress)?;
        // Before Baton's steering: that recognizes frames by their mark which are not to be taken here, and removes it.
        let taking = bpf::attach_to_device_first(take.as_fd(), device, bpf::Hook::Ingress)?;
        Ok(Front { shared, _taking: taking, _giving: giving })
    }

    /// Takes nothing any more, from this moment on: detaching the program can take the kernel tens of milliseconds. What is queued
    /// can still be read.
    pub fn stop(&self) {
        self.beat(0);
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.shared.words(at, 1)[0]
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
}

/// Whether the kernel takes the programs of [`Front`].
///
/// # Errors
/// Why not.
pub fn supported() -> io::Result<()> {
    load(crate::LOOPBACK, crate::LOOPBACK).map(drop)
}

/// The program that selects the queue of a TAP with one queue, for TUNSETSTEERINGEBPF: without one the TAP hashes the addresses of
/// each frame, on the processor that should be spared.
///
/// # Errors
/// The failed system call's.
pub fn only_queue() -> io::Result<OwnedFd> {
    let mut a = Assembler::default();
    a.set(R::R0, 0).exit();
    bpf::load(bpf::ProgramKind::Socket, &a.finish())
}

/// Programs and a map that are attached nowhere yet.
struct Loaded {
    shared: OwnedFd,
    take: OwnedFd,
    give: OwnedFd,
}

fn load(device: u32, tap: u32) -> io::Result<Loaded> {
    let flows = bpf::create_array(FLOW, FLOWS)?;
    let shared = bpf::create_mappable_array(SHARED as u32)?;
    let program = take(Maps { flows: flows.as_fd(), shared: shared.as_fd() }, tap);
    let take = bpf::load(bpf::ProgramKind::Device, &program)?;
    let give = bpf::load(bpf::ProgramKind::Device, &give(device))?;
    Ok(Loaded { shared, take, give })
}

#[derive(Clone, Copy)]
struct Maps<'a> {
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

/// Reads the headers. Goes on with the hash in R8, the bytes behind the IP header in R7, and the TCP header on the stack. Jumps to
/// `pass` if the frame is no TCP segment, tagged for a VLAN, or a fragment, or has IP options.
fn read_network(a: &mut Assembler) {
    a.load(Size::Word, R::R1, R::R6, TAGGED).jump_unless(R::R1, 0, "pass").set(R::R2, 0);
    // The headers of the shortest segment: one call.
    load_bytes(a, FRAME, ETHERNET + 20 + 20);
    a.set(R::R8, 0).load(Size::Half, R::R1, R::R10, FRAME + 12);
    a.jump_if(R::R1, i32::from(0x0800u16.to_be()), "v4").jump_if(R::R1, i32::from(0x86ddu16.to_be()), "v6").jump("pass");

    a.label("v4").load(Size::Byte, R::R1, R::R10, IPV4).jump_unless(R::R1, 0x45, "pass");
    a.load(Size::Byte, R::R1, R::R10, IPV4 + 9).jump_unless(R::R1, TCP, "pass");
    a.load(Size::Half, R::R1, R::R10, IPV4 + 6).and(R::R1, i32::from(0x3fffu16.to_be())).jump_unless(R::R1, 0, "pass");
    mix(a, Size::Double, IPV4 + 12);
    a.load(Size::Half, R::R7, R::R10, IPV4 + 2).swap_half(R::R7).add(R::R7, -20).jump("segment");

    a.label("v6").set(R::R2, ETHERNET);
    load_bytes(a, IPV6, 40);
    a.load(Size::Byte, R::R1, R::R10, IPV6 + 6).jump_unless(R::R1, TCP, "pass");
    for at in [8, 16, 24, 32] {
        mix(a, Size::Double, IPV6 + at);
    }
    a.set(R::R2, ETHERNET + 40);
    load_bytes(a, SEGMENT, 20);
    a.load(Size::Half, R::R7, R::R10, IPV6 + 4).swap_half(R::R7);
    a.label("segment");
}

/// Reads the TCP header. Goes on with the bytes of payload in R7, and the index of the connection's entry on the stack. Jumps to
/// `pass` if the segment sets up a connection, or is a pure acknowledgement.
fn read_segment(a: &mut Assembler) {
    mix(a, Size::Word, SEGMENT);
    a.shift_right(R::R8, 64 - FLOW_BITS).store(Size::Word, R::R10, ENTRY, R::R8);
    a.load(Size::Byte, R::R1, R::R10, SEGMENT + 12).shift_right(R::R1, 4).shift_left(R::R1, 2).subtract_register(R::R7, R::R1);
    a.load(Size::Byte, R::R2, R::R10, SEGMENT + 13).mov(R::R1, R::R2).and(R::R1, SYN).jump_unless(R::R1, 0, "pass");
    a.jump_if_greater(R::R7, 0, "data").set(R::R7, 0).and(R::R2, FIN_RST_URG).jump_if(R::R2, 0, "pass").label("data");
}

/// Decides whether the segment is taken: goes on if so, else jumps to `pass`.
fn decide(a: &mut Assembler, maps: Maps<'_>) {
    a.call(Helper::MonotonicNanoseconds).mov(R::R8, R::R0);
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
    a.add(R::R3, 1).store(Size::Double, R::R0, COUNT, R::R3).jump_if_below(R::R3, ENOUGH, "pass").jump("take");
    a.label("first").set(R::R3, 1).store(Size::Double, R::R0, COUNT, R::R3).jump("pass");
    // Merged already, or a small message.
    a.label("unlike").set(R::R3, 0).store(Size::Double, R::R0, COUNT, R::R3).jump("pass");
    a.label("take");
}

/// Program at the device's ingress.
fn take(maps: Maps<'_>, tap: u32) -> Vec<u8> {
    let mut a = Assembler::default();
    a.mov(R::R6, R::R1).load(Size::Word, R::R2, R::R6, SKB_MARK);
    a.jump_if(R::R2, AGGREGATED as i32, "merged").jump_if(R::R2, INJECTED as i32, "pass");
    read_network(&mut a);
    read_segment(&mut a);
    decide(&mut a, maps);
    a.set(R::R1, tap as i32).set(R::R2, TO_EGRESS).call(Helper::Redirect).exit();
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
