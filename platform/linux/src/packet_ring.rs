//! The memory that a packet socket shares with its user: a ring of slots into which the kernel puts received frames,
//! and behind it a ring of slots for frames to be sent (Linux, `Documentation/networking/packet_mmap.rst`, TPACKET_V2).
//! Taking a frame out needs no system call, and one system call sends all that wait.
//!
//! A received frame that is larger than a slot waits in the socket's queue as well, and its slot says so
//! (PACKET_COPY_THRESH).

use crate::socket;
use std::io;
use std::os::fd::BorrowedFd;

/// Number of slots for received frames: this many frames can wait before one is lost.
pub const SLOTS: usize = 4096;
/// Bytes of a slot. A frame of an Ethernet device fits with its header.
pub const SLOT: usize = 2048;
/// Number of slots for frames to be sent.
pub const SEND_SLOTS: usize = 512;
/// Offset of the slots for frames to be sent.
pub const SENDING: usize = SLOTS * SLOT;
/// Bytes of both rings.
pub const BYTES: usize = SENDING + SEND_SLOTS * SLOT;

/// Bytes between a slot's header and its frame that the kernel leaves to the reader.
const RESERVED: i32 = 16;
/// Offset in a slot of a word of 8 bytes that the kernel never writes.
pub const OWN_WORD: usize = 56;

/// Bytes that the kernel allocates at a time.
const BLOCK: usize = 1 << 16;

/// Gives a packet socket the ring for received frames, and with `sending` the one for frames to be sent, to be mapped
/// at offset 0 of its descriptor. Virtio headers must have been switched on before. A socket with a ring for frames to
/// be sent can send no others.
///
/// # Errors
/// The failed system call's: the socket then works as it did before the call.
pub fn set_up(socket: BorrowedFd<'_>, sending: bool) -> io::Result<()> {
    const PACKET_RX_RING: i32 = 5;
    const PACKET_COPY_THRESH: i32 = 7;
    const PACKET_VERSION: i32 = 10;
    const TPACKET_V2: i32 = 1;
    const PACKET_RESERVE: i32 = 12;
    const PACKET_TX_RING: i32 = 13;
    const PACKET_LOSS: i32 = 14;
    let set = |option, value| socket::set(socket, libc::SOL_PACKET, option, value);
    let make_ring = |option, slots: usize| {
        // struct tpacket_req.
        let request = [BLOCK, slots * SLOT / BLOCK, SLOT, slots].map(|number| (number as u32).to_ne_bytes());
        socket::set_bytes(socket, libc::SOL_PACKET, option, request.as_flattened())
    };
    set(PACKET_VERSION, TPACKET_V2)?;
    set(PACKET_RESERVE, RESERVED)?;
    set(PACKET_COPY_THRESH, 1)?;
    // A frame that cannot be sent does not stop the frames behind it.
    set(PACKET_LOSS, 1)?;
    make_ring(PACKET_RX_RING, SLOTS)?;
    if sending && let Err(error) = make_ring(PACKET_TX_RING, SEND_SLOTS) {
        // Without memory there is no ring at all.
        socket::set_bytes(socket, libc::SOL_PACKET, PACKET_RX_RING, &[0; 16])?;
        return Err(error);
    }
    Ok(())
}
