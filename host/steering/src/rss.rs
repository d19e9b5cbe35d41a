//! Receive-side scaling by the kernel's TAP driver, in place of a card: a program at the interface hashes each frame
//! and looks up its queue. Its tables are in a map that can be mapped into memory: the card's registers, in the layout
//! of `baton_datapath::Registers`.

use crate::assembler::{Assembler, Helper, R, Size};
use crate::bpf;
use baton_rss::{BUCKETS, From};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Stack offsets.
const SMALL: i16 = -8;
const HEADER: i16 = -48;

const ETHERNET: i32 = 14;
const TCP: i32 = 6;

/// Makes the registers of a card, for [`distribute`].
///
/// # Errors
/// The failed system call's. If this process may not use BPF, the message says what to do.
pub fn registers(bytes: usize) -> io::Result<OwnedFd> {
    bpf::create_mappable_array(bytes as u32, 1)
}

/// Makes the program that selects the queue of each frame that the kernel sends through a TAP, for TUNSETSTEERINGEBPF.
/// `from`: whether the frames are the host's own or come to it.
///
/// # Errors
/// The failed system call's.
pub fn distribute(registers: BorrowedFd<'_>, from: From) -> io::Result<OwnedFd> {
    bpf::load(bpf::ProgramKind::Socket, &program(registers, from))
}

fn load_bytes(a: &mut Assembler, at: i16, length: i32, otherwise: &'static str) {
    a.mov(R::R1, R::R6).mov(R::R3, R::R10).add(R::R3, i32::from(at)).set(R::R4, length).call(Helper::LoadBytes);
    a.jump_unless(R::R0, 0, otherwise);
}

/// Adds bytes on the stack to the hash in R7; `place` is the position in the hash's input.
fn hash(a: &mut Assembler, registers: BorrowedFd<'_>, place: &mut i32, from: i16, count: i16) {
    for at in from..from + count {
        for high in [true, false] {
            a.load(Size::Byte, R::R1, R::R10, at);
            if high {
                a.shift_right(R::R1, 4);
            } else {
                a.and(R::R1, 15);
            }
            a.shift_left(R::R1, 2);
            a.map_value(R::R2, registers, 4 * (BUCKETS as i32 + 16 * *place));
            a.add_register(R::R2, R::R1).load(Size::Word, R::R2, R::R2, 0).xor_register(R::R7, R::R2);
            *place += 1;
        }
    }
}

/// Hashes the input of `baton_rss::Input`: addresses, the peer's first, and the ports of a whole TCP segment.
fn program(registers: BorrowedFd<'_>, from: From) -> Vec<u8> {
    let mut a = Assembler::default();
    let order = |source: i16, destination: i16| match from {
        From::Wire => [source, destination],
        From::Host => [destination, source],
    };
    a.mov(R::R6, R::R1).set(R::R7, 0).set(R::R2, 12);
    load_bytes(&mut a, SMALL, 2, "done");
    a.load(Size::Half, R::R1, R::R10, SMALL);
    a.jump_if(R::R1, i32::from(0x0800u16.to_be()), "v4").jump_if(R::R1, i32::from(0x86ddu16.to_be()), "v6").jump("done");

    a.label("v4").set(R::R2, ETHERNET);
    load_bytes(&mut a, HEADER, 20, "done");
    let mut place = 0;
    for address in order(HEADER + 12, HEADER + 16) {
        hash(&mut a, registers, &mut place, address, 4);
    }
    a.load(Size::Byte, R::R1, R::R10, HEADER + 9).jump_unless(R::R1, TCP, "done");
    a.load(Size::Half, R::R1, R::R10, HEADER + 6).and(R::R1, i32::from(0x3fffu16.to_be())).jump_unless(R::R1, 0, "done");
    a.load(Size::Byte, R::R2, R::R10, HEADER).and(R::R2, 15).shift_left(R::R2, 2).add(R::R2, ETHERNET);
    load_bytes(&mut a, SMALL, 4, "done");
    for port in order(SMALL, SMALL + 2) {
        hash(&mut a, registers, &mut place, port, 2);
    }
    a.jump("done");

    a.label("v6").set(R::R2, ETHERNET);
    load_bytes(&mut a, HEADER, 40, "done");
    place = 0;
    for address in order(HEADER + 8, HEADER + 24) {
        hash(&mut a, registers, &mut place, address, 16);
    }
    a.load(Size::Byte, R::R1, R::R10, HEADER + 6).jump_unless(R::R1, TCP, "done").set(R::R2, ETHERNET + 40);
    load_bytes(&mut a, SMALL, 4, "done");
    for port in order(SMALL, SMALL + 2) {
        hash(&mut a, registers, &mut place, port, 2);
    }

    a.label("done").and(R::R7, BUCKETS as i32 - 1).shift_left(R::R7, 2).map_value(R::R2, registers, 0);
    a.add_register(R::R2, R::R7).load(Size::Word, R::R0, R::R2, 0).exit();
    a.finish()
}

/// Whether [`registers`] and [`distribute`] work here.
///
/// # Errors
/// Why not.
pub fn supported() -> io::Result<()> {
    let registers = registers(4 * (BUCKETS + 16 * baton_rss::NIBBLES))?;
    distribute(registers.as_fd(), From::Wire).map(|_| ())
}
