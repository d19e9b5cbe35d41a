//! The account of a run: a hash over everything that happened, which is the same on every machine, and readable lines
//! if wanted.

use baton_moves::Step;
use baton_wire::{Flags, Flow};
use std::fmt;
use std::hash::{Hash, Hasher};

/// Something that happened.
#[derive(Hash)]
pub(crate) enum Happening<'a> {
    /// A host sent a segment.
    Sent { flow: Flow, seq: u32, ack: u32, flags: u8, window: u16, length: u32 },
    /// A move has come to a step.
    Reached { connection: u32, step: Step },
    /// A fault, or the end of one.
    Fault(&'a str),
    /// Somebody died, or was started.
    Life(&'a str),
    /// A program did something.
    Program { connection: u32, did: &'a str, amount: u64 },
}

impl fmt::Display for Happening<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Happening::Sent { flow, seq, ack, flags, window, length } => {
                write!(f, "{} > {} seq {seq} ack {ack} ", flow.local, flow.remote)?;
                for (bit, name) in [(Flags::SYN, 'S'), (Flags::FIN, 'F'), (Flags::RST, 'R'), (Flags::PSH, 'P')] {
                    if Flags(*flags).contains(bit) {
                        write!(f, "{name}")?;
                    }
                }
                write!(f, " win {window} len {length}")
            }
            Happening::Reached { connection, step } => write!(f, "connection {connection} is {step:?}"),
            Happening::Fault(what) => write!(f, "fault: {what}"),
            Happening::Life(what) => write!(f, "{what}"),
            Happening::Program { connection, did, amount } => write!(f, "program of {connection} {did} {amount}"),
        }
    }
}

/// A hash of bytes (FNV-1a, 64 bits) that does not depend on the machine's byte order or word size.
struct Stable(u64);

impl Hasher for Stable {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    fn write_u16(&mut self, value: u16) {
        self.write(&value.to_le_bytes());
    }

    fn write_u32(&mut self, value: u32) {
        self.write(&value.to_le_bytes());
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_isize(&mut self, value: isize) {
        self.write_u64(value as i64 as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The account.
pub(crate) struct Trace {
    hash: Stable,
    lines: Option<Vec<String>>,
}

impl Trace {
    pub fn new(readable: bool) -> Trace {
        Trace { hash: Stable(0xcbf2_9ce4_8422_2325), lines: readable.then(Vec::new) }
    }

    /// Notes what happened on a host at a time in microseconds.
    pub fn note(&mut self, now: u64, host: usize, what: &Happening<'_>) {
        (now, host).hash(&mut self.hash);
        what.hash(&mut self.hash);
        self.explain(now, host, || what.to_string());
    }

    /// Adds a line for readers, which the hash does not cover.
    pub fn explain(&mut self, now: u64, host: usize, what: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{:>5}.{:06} host {host} {}", now / 1_000_000, now % 1_000_000, what()));
        }
    }

    pub fn hash(&self) -> u64 {
        self.hash.finish()
    }

    pub fn into_lines(self) -> Vec<String> {
        self.lines.unwrap_or_default()
    }
}
