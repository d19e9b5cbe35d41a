//! The programs. The one that takes segments is assembled for one of two places, with the same decisions.

use super::{CLEAR, CLOSE, COUNT, DEAD_AFTER, ENOUGH, FLOW_BITS, HEARTBEAT, LARGEST_MTU, LEAST};
use crate::assembler::{Assembler, Helper, R, Size};
use crate::{AGGREGATED, INJECTED};
use std::os::fd::BorrowedFd;

/// Offsets in `__sk_buff`.
const SKB_MARK: i16 = 8;
const TAGGED: i16 = 20;
const SEGMENT_SIZE: i16 = 176;

/// Offsets in `xdp_md`.
const DATA: i16 = 0;
const DATA_END: i16 = 4;

/// Stack offsets. The frame begins where the addresses of IPv4 are aligned.
const FRAME: i16 = -66;
const IPV4: i16 = FRAME + ETHERNET as i16;
const SEGMENT: i16 = IPV4 + 20;
const IPV6: i16 = -112;
const ENTRY: i16 = -120;
const TAG: i16 = -8;
const LARGE: i16 = -12;

/// Segments of a connection that pass after a frame that cannot be taken.
const AVOIDED: i32 = 1000;

/// `TCX_NEXT` and `XDP_PASS`; `BPF_F_INGRESS`, and the other direction.
const NEXT: i32 = -1;
const PASS: i32 = 2;
const TO_INGRESS: i32 = 1;
const TO_EGRESS: i32 = 0;

const ETHERNET: i32 = 14;
const TCP: i32 = 6;
/// TCP's flags.
const SYN: i32 = 2;
const FIN_RST_URG: i32 = 0x25;
/// Odd, with its bits spread: for the hash.
const SPREAD: i32 = 0x9e37_79b1_u32 as i32;

#[derive(Clone, Copy)]
pub(super) struct Maps<'a> {
    pub flows: BorrowedFd<'a>,
    pub shared: BorrowedFd<'a>,
}

/// Where the program that takes segments runs, and how they leave.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
    /// At the device's ingress (tc): to the TAP with this index.
    Ingress { tap: u32 },
    /// In the device's driver (XDP): to the only device in a map. `tag`: the function by which the driver reports
    /// a VLAN tag that it has taken out of the frame, if this kernel has it.
    Driver { devices: BorrowedFd<'a>, tag: Option<u32> },
}

impl Place<'_> {
    /// Begins the program, with the context in R6. Jumps to `pass` if the frame has a VLAN tag beside it, or must not
    /// be taken whatever it contains, and to `merged` if it has been taken before.
    fn begin(self, a: &mut Assembler) {
        a.mov(R::R6, R::R1);
        match self {
            Place::Ingress { .. } => {
                a.load(Size::Word, R::R2, R::R6, SKB_MARK);
                a.jump_if(R::R2, AGGREGATED as i32, "merged").jump_if(R::R2, INJECTED as i32, "pass");
                a.load(Size::Word, R::R1, R::R6, TAGGED).jump_unless(R::R1, 0, "pass");
            }
            Place::Driver { tag, .. } => {
                // A TAP takes no frame in several pieces. A longer one stands for several segments.
                a.call(Helper::XdpLength).load(Size::Word, R::R1, R::R6, DATA_END).load(Size::Word, R::R2, R::R6, DATA);
                a.subtract_register(R::R1, R::R2).set(R::R2, 1).jump_unless_equal(R::R0, R::R1, "length");
                a.jump_if_above(R::R0, ETHERNET + LARGEST_MTU as i32, "length").set(R::R2, 0);
                a.label("length").store(Size::Word, R::R10, LARGE, R::R2);
                if let Some(tag) = tag {
                    a.set(R::R1, 0).store(Size::Double, R::R10, TAG, R::R1).mov(R::R1, R::R6);
                    for (register, at) in [(R::R2, TAG), (R::R3, TAG + 4)] {
                        a.mov(register, R::R10).add(register, i32::from(at));
                    }
                    a.call_function(tag).jump_if(R::R0, 0, "pass");
                }
            }
        }
    }

    /// Loads bytes of the frame at the offset in R2 to the stack. Jumps to `pass` if there are none.
    fn load_bytes(self, a: &mut Assembler, at: i16, length: i32) {
        let helper = match self {
            Place::Ingress { .. } => Helper::LoadBytes,
            Place::Driver { .. } => Helper::XdpLoadBytes,
        };
        a.mov(R::R1, R::R6).mov(R::R3, R::R10).add(R::R3, i32::from(at)).set(R::R4, length).call(helper);
        a.jump_unless(R::R0, 0, "pass");
    }

    /// Jumps to `pass` with a frame that can never be taken. After it its connection, whose entry is at R0, is not
    /// taken for long: others like it would overtake what waits in the queue.
    fn refuse_large(self, a: &mut Assembler) {
        if let Place::Driver { .. } = self {
            a.load(Size::Word, R::R4, R::R10, LARGE).jump_if(R::R4, 0, "small").set(R::R3, -AVOIDED);
            a.store(Size::Double, R::R0, COUNT, R::R3).jump("pass").label("small");
        }
    }

    /// Jumps to `unlike` if the frame stands for several segments; to `pass` while its connection is not taken for
    /// long.
    fn refuse_merged(self, a: &mut Assembler) {
        match self {
            Place::Ingress { .. } => a.load(Size::Word, R::R4, R::R6, SEGMENT_SIZE).jump_unless(R::R4, 0, "unlike"),
            Place::Driver { .. } => {
                a.jump_if_greater(R::R3, -1, "ordinary").add(R::R3, 1).store(Size::Double, R::R0, COUNT, R::R3);
                a.jump("pass").label("ordinary")
            }
        };
    }

    /// Takes the frame, and ends.
    fn take(self, a: &mut Assembler) {
        match self {
            Place::Ingress { tap } => a.set(R::R1, tap as i32).set(R::R2, TO_EGRESS).call(Helper::Redirect).exit(),
            // Without the TAP it passes.
            Place::Driver { devices, .. } => {
                a.map(R::R1, devices).set(R::R2, 0).set(R::R3, PASS).call(Helper::RedirectMap).exit()
            }
        };
    }

    /// Passes the frame, and ends.
    fn pass(self, a: &mut Assembler) {
        match self {
            Place::Ingress { .. } => {
                a.label("merged").store_word(R::R6, SKB_MARK, 0);
                a.label("pass").set(R::R0, NEXT).exit()
            }
            Place::Driver { .. } => a.label("pass").set(R::R0, PASS).exit(),
        };
    }
}

/// Mixes four or eight bytes on the stack into the hash in R8.
fn mix(a: &mut Assembler, size: Size, at: i16) {
    a.load(size, R::R1, R::R10, at).xor_register(R::R8, R::R1).multiply(R::R8, SPREAD);
}

/// Reads the headers. Goes on with the hash in R8, the bytes behind the IP header in R7, and the TCP header on the
/// stack. Jumps to `pass` if the frame is no TCP segment, tagged for a VLAN, or a fragment, or has IP options.
fn read_network(a: &mut Assembler, place: Place<'_>) {
    a.set(R::R2, 0);
    // The headers of the shortest segment: one call.
    place.load_bytes(a, FRAME, ETHERNET + 20 + 20);
    a.set(R::R8, 0).load(Size::Half, R::R1, R::R10, FRAME + 12);
    a.jump_if(R::R1, i32::from(0x0800u16.to_be()), "v4").jump_if(R::R1, i32::from(0x86ddu16.to_be()), "v6").jump("pass");

    a.label("v4").load(Size::Byte, R::R1, R::R10, IPV4).jump_unless(R::R1, 0x45, "pass");
    a.load(Size::Byte, R::R1, R::R10, IPV4 + 9).jump_unless(R::R1, TCP, "pass");
    a.load(Size::Half, R::R1, R::R10, IPV4 + 6).and(R::R1, i32::from(0x3fffu16.to_be())).jump_unless(R::R1, 0, "pass");
    mix(a, Size::Double, IPV4 + 12);
    a.load(Size::Half, R::R7, R::R10, IPV4 + 2).swap_half(R::R7).add(R::R7, -20).jump("segment");

    a.label("v6").set(R::R2, ETHERNET);
    place.load_bytes(a, IPV6, 40);
    a.load(Size::Byte, R::R1, R::R10, IPV6 + 6).jump_unless(R::R1, TCP, "pass");
    for at in [8, 16, 24, 32] {
        mix(a, Size::Double, IPV6 + at);
    }
    a.set(R::R2, ETHERNET + 40);
    place.load_bytes(a, SEGMENT, 20);
    a.load(Size::Half, R::R7, R::R10, IPV6 + 4).swap_half(R::R7);
    a.label("segment");
}

/// Reads the TCP header. Goes on with the bytes of payload in R7, and the index of the connection's entry on the stack.
/// Jumps to `pass` if the segment sets up a connection, or is a pure acknowledgement.
fn read_segment(a: &mut Assembler) {
    mix(a, Size::Word, SEGMENT);
    a.shift_right(R::R8, 64 - FLOW_BITS).store(Size::Word, R::R10, ENTRY, R::R8);
    a.load(Size::Byte, R::R1, R::R10, SEGMENT + 12).shift_right(R::R1, 4).shift_left(R::R1, 2).subtract_register(R::R7, R::R1);
    a.load(Size::Byte, R::R2, R::R10, SEGMENT + 13).mov(R::R1, R::R2).and(R::R1, SYN).jump_unless(R::R1, 0, "pass");
    a.jump_if_greater(R::R7, 0, "data").set(R::R7, 0).and(R::R2, FIN_RST_URG).jump_if(R::R2, 0, "pass").label("data");
}

/// Decides whether the segment is taken: goes on if so, else jumps to `pass`.
fn decide(a: &mut Assembler, place: Place<'_>, maps: Maps<'_>) {
    a.call(Helper::MonotonicNanoseconds).mov(R::R8, R::R0);
    a.map_value(R::R1, maps.shared, HEARTBEAT as i32).load(Size::Double, R::R1, R::R1, 0);
    a.mov(R::R2, R::R8).subtract_register(R::R2, R::R1).jump_if_greater(R::R2, DEAD_AFTER as i32, "pass");
    a.map(R::R1, maps.flows).mov(R::R2, R::R10).add(R::R2, i32::from(ENTRY)).call(Helper::MapLookup).jump_if(R::R0, 0, "pass");
    // R1: when the last segment came. R2: how long ago that is. R3: how many came close together.
    a.load(Size::Double, R::R1, R::R0, 0).store(Size::Double, R::R0, 0, R::R8).load(Size::Double, R::R3, R::R0, COUNT);
    place.refuse_large(a);
    a.mov(R::R2, R::R8).subtract_register(R::R2, R::R1).jump_if_less(R::R3, ENOUGH, "counting");
    a.jump_if_above(R::R2, CLOSE, "paused").jump("take");
    a.label("paused").map_value(R::R4, maps.shared, CLEAR as i32).load(Size::Double, R::R4, R::R4, 0);
    a.jump_unless_below_register(R::R1, R::R4, "take").set(R::R3, 0);
    a.label("counting");
    place.refuse_merged(a);
    a.jump_if_below(R::R7, LEAST, "unlike").jump_if_above(R::R2, CLOSE, "first");
    a.add(R::R3, 1).store(Size::Double, R::R0, COUNT, R::R3).jump_if_below(R::R3, ENOUGH, "pass").jump("take");
    a.label("first").set(R::R3, 1).store(Size::Double, R::R0, COUNT, R::R3).jump("pass");
    // Merged already, or a small message.
    a.label("unlike").set(R::R3, 0).store(Size::Double, R::R0, COUNT, R::R3).jump("pass");
    a.label("take");
}

/// The program that takes segments.
pub(super) fn take(place: Place<'_>, maps: Maps<'_>) -> Vec<u8> {
    let mut a = Assembler::default();
    place.begin(&mut a);
    read_network(&mut a, place);
    read_segment(&mut a);
    decide(&mut a, place, maps);
    place.take(&mut a);
    place.pass(&mut a);
    a.finish()
}

/// Program at the TAP's ingress: the device has received the frame, with this mark.
pub(super) fn give(device: u32, mark: u32) -> Vec<u8> {
    let mut a = Assembler::default();
    a.store_word(R::R1, SKB_MARK, mark as i32).set(R::R1, device as i32).set(R::R2, TO_INGRESS);
    a.call(Helper::Redirect).exit();
    a.finish()
}
