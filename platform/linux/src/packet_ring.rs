//! The memory that a packet socket shares with its reader: a ring of slots into which the kernel puts frames as they come
//! (Linux, `Documentation/networking/packet_mmap.rst`, TPACKET_V2). Taking a frame out of it needs no system call.
//!
//! A frame that is larger than a slot waits in the socket's queue as well, and its slot says so (PACKET_COPY_THRESH).

use crate::socket;
use std::io;
use std::os::fd::BorrowedFd;

/// Number of slots: as many frames wait before one is lost.
pub const SLOTS: usize = 4096;
/// Bytes of a slot. A frame of an Ethernet device fits with its header.
pub const SLOT: usize = 2048;
/// Bytes of the whole ring.
pub const BYTES: usize = SLOTS * SLOT;

/// Bytes between a slot's header and its frame that the kernel leaves to the reader.
const RESERVED: i32 = 16;
/// Offset in a slot of a word that the kernel never writes.
pub const OWN_WORD: usize = 56;

/// Bytes that the kernel allocates at a time.
const BLOCK: usize = 1 << 16;

/// Makes a packet socket put what it receives into a ring of its own, to be mapped at offset 0 of its descriptor. Virtio headers
/// must have been switched on before.
///
/// # Errors
/// The failed system call's: the socket then works as before.
pub fn set_up(socket: BorrowedFd<'_>) -> io::Result<()> {
    const PACKET_RX_RING: i32 = 5;
    const PACKET_COPY_THRESH: i32 = 7;
    const PACKET_VERSION: i32 = 10;
    const TPACKET_V2: i32 = 1;
    const PACKET_RESERVE: i32 = 12;
    let set = |option, value| socket::set(socket, libc::SOL_PACKET, option, value);
    set(PACKET_VERSION, TPACKET_V2)?;
    set(PACKET_RESERVE, RESERVED)?;
    set(PACKET_COPY_THRESH, 1)?;
    // struct tpacket_req.
    let request = [BLOCK, BYTES / BLOCK, SLOT, SLOTS].map(|number| (number as u32).to_ne_bytes());
    socket::set_bytes(socket, libc::SOL_PACKET, PACKET_RX_RING, request.as_flattened())
}
