//! A BPF assembler, with the part of the instruction set that the programs here need (RFC 9669). With it the build
//! needs no BPF compiler.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd};

/// A register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum R {
    /// Return value.
    R0,
    /// First argument; on entry, the context.
    R1,
    R2,
    R3,
    R4,
    R5,
    /// Preserved across calls.
    R6,
    /// Preserved across calls.
    R7,
    /// Preserved across calls.
    R8,
    /// Top of the stack.
    R10,
}

impl R {
    fn number(self) -> u8 {
        match self {
            R::R6 => 6,
            R::R7 => 7,
            R::R8 => 8,
            R::R10 => 10,
            low => low as u8,
        }
    }
}

/// Sizes of memory accesses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Size {
    Word = 0x00,
    Half = 0x08,
    Byte = 0x10,
    Double = 0x18,
}

/// The kernel's helper functions.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Helper {
    MapLookup = 1,
    MapUpdate = 2,
    MonotonicNanoseconds = 5,
    CurrentProcessor = 8,
    StoreBytes = 9,
    CurrentProcess = 14,
    CurrentName = 16,
    Redirect = 23,
    LoadBytes = 26,
    SocketCookie = 46,
    RedirectMap = 51,
    MessageRedirectHash = 71,
    SocketRelease = 86,
    ConnectionLookup = 99,
    RingBufferOutput = 130,
    RedirectNeighbour = 152,
    XdpLength = 188,
    XdpLoadBytes = 189,
}

/// A program under construction. Jumps go forward to labels only.
#[derive(Default)]
pub(crate) struct Assembler {
    code: Vec<[u8; 8]>,
    labels: HashMap<&'static str, usize>,
    jumps: Vec<(usize, &'static str)>,
}

impl Assembler {
    fn push(&mut self, opcode: u8, destination: R, source: R, offset: i16, immediate: i32) -> &mut Self {
        let mut raw = [0u8; 8];
        raw[0] = opcode;
        raw[1] = destination.number() | source.number() << 4;
        raw[2..4].copy_from_slice(&offset.to_le_bytes());
        raw[4..].copy_from_slice(&immediate.to_le_bytes());
        self.code.push(raw);
        self
    }

    pub fn mov(&mut self, to: R, from: R) -> &mut Self {
        self.push(0xbf, to, from, 0, 0)
    }

    pub fn set(&mut self, to: R, value: i32) -> &mut Self {
        self.push(0xb7, to, R::R0, 0, value)
    }

    pub fn add(&mut self, to: R, value: i32) -> &mut Self {
        self.push(0x07, to, R::R0, 0, value)
    }

    pub fn and(&mut self, to: R, value: i32) -> &mut Self {
        self.push(0x57, to, R::R0, 0, value)
    }

    pub fn and_register(&mut self, to: R, from: R) -> &mut Self {
        self.push(0x5f, to, from, 0, 0)
    }

    pub fn shift_left(&mut self, to: R, bits: i32) -> &mut Self {
        self.push(0x67, to, R::R0, 0, bits)
    }

    pub fn shift_right(&mut self, to: R, bits: i32) -> &mut Self {
        self.push(0x77, to, R::R0, 0, bits)
    }

    pub fn shift_right_signed(&mut self, to: R, bits: i32) -> &mut Self {
        self.push(0xc7, to, R::R0, 0, bits)
    }

    pub fn add_register(&mut self, to: R, from: R) -> &mut Self {
        self.push(0x0f, to, from, 0, 0)
    }

    pub fn subtract_register(&mut self, from: R, what: R) -> &mut Self {
        self.push(0x1f, from, what, 0, 0)
    }

    pub fn multiply(&mut self, to: R, value: i32) -> &mut Self {
        self.push(0x27, to, R::R0, 0, value)
    }

    pub fn xor_register(&mut self, to: R, from: R) -> &mut Self {
        self.push(0xaf, to, from, 0, 0)
    }

    /// Swaps the lowest two bytes if the machine's byte order is not the network's.
    pub fn swap_half(&mut self, register: R) -> &mut Self {
        self.push(0xdc, register, R::R0, 0, 16)
    }

    /// Adds atomically to eight bytes in memory.
    pub fn atomic_add(&mut self, base: R, offset: i16, from: R) -> &mut Self {
        self.push(0xdb, base, from, offset, 0)
    }

    pub fn load(&mut self, size: Size, to: R, base: R, offset: i16) -> &mut Self {
        self.push(0x61 | size as u8, to, base, offset, 0)
    }

    pub fn store(&mut self, size: Size, base: R, offset: i16, from: R) -> &mut Self {
        self.push(0x63 | size as u8, base, from, offset, 0)
    }

    /// Stores a constant. Into the context it must be stored through a register, since the verifier demands that.
    pub fn store_word(&mut self, base: R, offset: i16, value: i32) -> &mut Self {
        self.push(0x62, base, R::R0, offset, value)
    }

    /// Loads the address of a map.
    pub fn map(&mut self, to: R, map: BorrowedFd<'_>) -> &mut Self {
        // The source register marks the immediate as a map's descriptor.
        self.push(0x18, to, R::R1, 0, map.as_raw_fd());
        self.push(0, R::R0, R::R0, 0, 0)
    }

    /// Loads the address of a byte in the only value of an array map.
    pub fn map_value(&mut self, to: R, map: BorrowedFd<'_>, offset: i32) -> &mut Self {
        // The source register marks the immediates as a map's descriptor and an offset in its value.
        self.push(0x18, to, R::R2, 0, map.as_raw_fd());
        self.push(0, R::R0, R::R0, 0, offset)
    }

    pub fn call(&mut self, helper: Helper) -> &mut Self {
        self.push(0x85, R::R0, R::R0, 0, helper as i32)
    }

    /// Calls a function of the kernel's by the id of its type.
    pub fn call_function(&mut self, id: u32) -> &mut Self {
        // The source register marks the immediate as a function's type.
        self.push(0x85, R::R0, R::R2, 0, id as i32)
    }

    pub fn exit(&mut self) -> &mut Self {
        self.push(0x95, R::R0, R::R0, 0, 0)
    }

    pub fn jump(&mut self, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0x05, R::R0, R::R0, 0, 0)
    }

    pub fn jump_if(&mut self, register: R, value: i32, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0x15, register, R::R0, 0, value)
    }

    pub fn jump_unless(&mut self, register: R, value: i32, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0x55, register, R::R0, 0, value)
    }

    pub fn jump_if_equal(&mut self, register: R, other: R, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0x1d, register, other, 0, 0)
    }

    pub fn jump_unless_equal(&mut self, register: R, other: R, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0x5d, register, other, 0, 0)
    }

    /// Jumps unless the register, as a signed number, is greater than zero.
    pub fn jump_unless_positive(&mut self, register: R, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0xd5, register, R::R0, 0, 0)
    }

    /// Jumps if the register, as a signed number, is greater than the value.
    pub fn jump_if_greater(&mut self, register: R, value: i32, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0x65, register, R::R0, 0, value)
    }

    /// Jumps if the register, as a signed number, is less than the value.
    pub fn jump_if_less(&mut self, register: R, value: i32, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0xc5, register, R::R0, 0, value)
    }

    pub fn jump_if_above(&mut self, register: R, value: i32, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0x25, register, R::R0, 0, value)
    }

    pub fn jump_unless_below_register(&mut self, register: R, other: R, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0x3d, register, other, 0, 0)
    }

    pub fn jump_if_below(&mut self, register: R, value: i32, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0xa5, register, R::R0, 0, value)
    }

    pub fn jump_if_not_below(&mut self, register: R, value: i32, label: &'static str) -> &mut Self {
        self.jumps.push((self.code.len(), label));
        self.push(0x35, register, R::R0, 0, value)
    }

    pub fn label(&mut self, label: &'static str) -> &mut Self {
        self.labels.insert(label, self.code.len());
        self
    }

    /// The program's instructions.
    ///
    /// # Panics
    /// If a label is missing.
    pub fn finish(mut self) -> Vec<u8> {
        for (at, label) in self.jumps {
            let offset = self.labels[label] - at - 1;
            self.code[at][2..4].copy_from_slice(&(offset as i16).to_le_bytes());
        }
        self.code.concat()
    }
}
