//! The paper's machines as numbers: what the paper prints, and what it leaves open. Only two are calibrated on the
//! prototype ([`calibrate`](super::microbenchmark::calibrate) and [`CYCLES_PER_SEGMENT`]) and two on the simulated
//! machine.

use super::cache::Geometry;

/// First level of Table 1.
pub const FIRST: Geometry = Geometry { bytes: 64 << 10, ways: 2 };
/// Second level of Table 1.
pub const SECOND: Geometry = Geometry { bytes: 256 << 10, ways: 16 };
/// Cycles until the first level has served an access (Table 1).
pub const FIRST_LATENCY: f64 = 3.0;
/// Cycles until the second level has (Table 1).
pub const SECOND_LATENCY: f64 = 17.0;
/// Cycles until memory has (Table 1).
pub const MEMORY_LATENCY: f64 = 240.0;

/// Instructions of a packet in configuration C (section 2).
pub const PACKET: u64 = 3000;
/// Instructions of TCP for a packet: the NIC's, which runs FreeBSD's TCP, too (Table 2, section 4.1).
pub const TCP: u64 = 1402;
/// Instructions of IP and Ethernet for a packet, the same way (Table 2).
pub const IP_AND_ETHERNET: u64 = 169;
/// Those of them that are IP's.
pub const IP: u64 = 100;
/// Instructions of a system call that writes or reads, without copying.
pub const SYSTEM_CALL: u64 = 500;
/// Instructions of the host's driver for a packet: what is left of [`PACKET`] with half a system call a packet.
pub const DRIVER: u64 = PACKET - TCP - IP_AND_ETHERNET - SYSTEM_CALL / 2;
/// Instructions of the bypass layer for a message (section 5.1: "less than 140" a packet).
pub const BYPASS: u64 = 140;
/// Instructions of the host's driver for a message: the NIC's end of the same interface has as many (Table 2, Handoff).
pub const DRIVER_MESSAGE: u64 = 413;
/// Data accesses of an instruction: half of 4600 micro-operations for 3000 instructions (section 2).
pub const ACCESSES: f64 = 0.5 * 4600.0 / 3000.0;
/// Bytes that an instruction of a copy or a checksum processes.
pub const WORD: u64 = 4;

/// Bytes of `struct socket` (section 2).
pub const SOCKET: u64 = 192;
/// Bytes of `struct inpcb` (section 2).
pub const INPCB: u64 = 176;
/// Bytes of `struct tcpcb` (section 2).
pub const TCPCB: u64 = 232;
/// Bytes of a `struct callout`: five are 120 (section 2).
pub const CALLOUT: u64 = 24;
/// Timers of a connection (section 2).
pub const CALLOUTS: u64 = 5;
/// Bytes of `struct file` and its place in the descriptor table.
pub const FILE: u64 = 64;
/// Bytes of a buffer's header that a layer looks at.
pub const BUFFER_HEADER: u64 = 64;
/// Bytes of a buffer (FreeBSD's MSIZE).
pub const BUFFER: u64 = 256;
/// Buckets of the table of connections (FreeBSD's TCBHASHSIZE).
pub const BUCKETS: u64 = 512;
/// Buckets of the wheel of timers.
pub const WHEEL: u64 = 8192;
/// Microseconds of a bucket of the wheel (FreeBSD's hz of 100).
pub const TICK: u64 = 10_000;
/// Seconds until a connection is probed (FreeBSD's tcp_keepidle). Each segment that arrives sets the timer anew.
pub const KEEP_IDLE: u64 = 7200;
/// Descriptors of a ring (section 5.1 has their sizes).
pub const RING: u64 = 512;
/// Bytes of a receive descriptor (section 5.1).
pub const RECEIVE_DESCRIPTOR: u64 = 32;
/// Bytes of a transmit descriptor (section 5.1).
pub const TRANSMIT_DESCRIPTOR: u64 = 16;
/// Bytes of a message (section 5.1).
pub const MESSAGE: u64 = 16;
/// Bytes of a page: a message announces no more (section 5.1).
pub const PAGE: u64 = 4096;
/// Instructions of select(2) for each connection that it is asked about.
pub const SELECT: u64 = 60;
/// Bytes of Ethernet, IP and TCP headers.
pub const HEADERS: u64 = 54;

/// Bytes of a message of the microbenchmark, and of a segment (section 2).
pub const SEGMENT: u32 = 1460;
/// Bits per second of the microbenchmark (section 2).
pub const RATE: f64 = 100e6;
/// Connections of a NIC (section 4.1).
pub const CONNECTIONS_OF_A_NIC: usize = 256;
/// One-way delay of the cable and of both ends' interrupts, in microseconds.
pub const DELAY: u64 = 50;
/// Bytes that may wait in a socket for sending (FreeBSD's tcp_sendspace).
pub const SEND_SPACE: u32 = 32 << 10;
/// Bytes that must be free before a program is notified of room (FreeBSD's low-water mark).
pub const LOW_WATER: u32 = 2048;

/// The NIC's clock in Hz (section 4.1).
pub const NIC_CLOCK: f64 = 88e6;
/// The NIC's throughput in bits per second, at which its cycles for a segment are calibrated (section 4.1).
pub const NIC_RATE: f64 = 110e6;
/// Cycles of the NIC for a segment and its acknowledgement.
pub const CYCLES_PER_SEGMENT: f64 = NIC_CLOCK * 8.0 * SEGMENT as f64 / NIC_RATE;
/// Table 2: cycles and instructions of a packet on the NIC: handoff, TCP, IP and Ethernet, other, and the totals as
/// printed.
pub const TABLE_2: [[f64; 5]; 2] = [[794.0, 4033.0, 529.0, 1417.0, 6773.0], [413.0, 1402.0, 169.0, 1130.0, 3144.0]];

/// The simulated host's clock in Hz (Table 1).
pub const HOST_CLOCK: f64 = 2e9;
/// The prototype's host's clock in Hz (section 4.1).
pub const ATHLON_CLOCK: f64 = 2.1e9;
/// Instructions per second of the simulated NIC (Table 1).
pub const NIC_INSTRUCTIONS: f64 = 450e6;
/// Bytes of an HTTP request, and of an answer's header.
pub const REQUEST: u32 = 350;
/// Bytes of an answer's header.
pub const ANSWER_HEADER: u64 = 250;
/// Frames that a NIC takes in one round (the worker's default).
pub const ROUND: usize = 32;
