//! BPF's ring buffer: records from programs in the kernel to this process.

use crate::bpf;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Bytes of the ring: a power of two, and whole pages.
const BYTES: usize = 1 << 18;
const BUSY: u32 = 1 << 31;
const DISCARDED: u32 = 1 << 30;
const HEADER: usize = 8;

/// Bytes of a record.
pub(crate) const RECORD: usize = 16;

/// The ring, mapped: the consumer's page, which this process writes, and the producer's page followed by the data,
/// which is mapped twice in a row.
#[derive(Debug)]
pub(crate) struct RingBuffer {
    fd: OwnedFd,
    page: usize,
    consumer: NonNull<u8>,
    producer: NonNull<u8>,
    /// There was no room for another record at some time.
    overrun: bool,
}

// SAFETY: the pointers are to mappings that live as long as this; the positions in them are atomics.
unsafe impl Send for RingBuffer {}

fn map(fd: BorrowedFd<'_>, offset: usize, length: usize, protection: i32) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let raw =
        unsafe { libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, fd.as_raw_fd(), offset as libc::off_t) };
    if raw == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(NonNull::new(raw.cast()).expect("a mapping")) }
}

impl RingBuffer {
    pub fn new() -> io::Result<RingBuffer> {
        // SAFETY: no pointers are involved.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let fd = bpf::create_map_of(bpf::MapKind::RingBuffer, 0, 0, BYTES as u32)?;
        let consumer = map(fd.as_fd(), 0, page, libc::PROT_READ | libc::PROT_WRITE)?;
        let producer = map(fd.as_fd(), page, page + 2 * BYTES, libc::PROT_READ)?;
        Ok(RingBuffer { fd, page, consumer, producer, overrun: false })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether records may have been lost since the last call.
    pub fn take_overrun(&mut self) -> bool {
        std::mem::take(&mut self.overrun)
    }

    fn position(&self, page: NonNull<u8>) -> &AtomicU64 {
        // SAFETY: both pages begin with an aligned position of eight bytes, which kernel and process access atomically.
        unsafe { page.cast::<AtomicU64>().as_ref() }
    }

    /// The next record.
    pub fn next(&mut self) -> Option<[u8; RECORD]> {
        loop {
            let at = self.position(self.consumer).load(Ordering::Relaxed);
            let end = self.position(self.producer).load(Ordering::Acquire);
            if at >= end {
                return None;
            }
            // A record is lost if it does not fit, and only what follows here makes room.
            self.overrun |= (end - at) as usize + HEADER + RECORD >= BYTES;
            let offset = self.page + (at as usize & (BYTES - 1));
            // SAFETY: the position is within the data, which is mapped twice in a row; headers are aligned.
            let header = unsafe { self.producer.add(offset).cast::<AtomicU32>().as_ref() }.load(Ordering::Acquire);
            if header & BUSY != 0 {
                return None;
            }
            let length = (header & !(BUSY | DISCARDED)) as usize;
            let mut record = [0; RECORD];
            if header & DISCARDED == 0 && length == RECORD {
                // SAFETY: the record's bytes lie after its header, within the doubled mapping; the kernel does not
                // write them until the consumer's position has passed.
                unsafe { self.producer.add(offset + HEADER).as_ptr().copy_to_nonoverlapping(record.as_mut_ptr(), RECORD) };
            }
            let whole = (HEADER + length).next_multiple_of(8) as u64;
            self.position(self.consumer).store(at + whole, Ordering::Release);
            if header & DISCARDED == 0 && length == RECORD {
                return Some(record);
            }
        }
    }
}

impl Drop for RingBuffer {
    fn drop(&mut self) {
        // SAFETY: the two mappings were made in `new`, and are not used any more.
        unsafe {
            libc::munmap(self.consumer.as_ptr().cast(), self.page);
            libc::munmap(self.producer.as_ptr().cast(), self.page + 2 * BYTES);
        }
    }
}
