//! fork(2): lent memory is shared, so a child would see what its parent writes, and the other way round. A child gets copies of the
//! blocks in use instead, before fork(2) returns in either process. vfork(2) and posix_spawn(3), whose children only execute another
//! program, need none.

use crate::lent::{Blocks, Lent, shared};
use std::cell::UnsafeCell;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::MutexGuard;

/// Held from before a fork until after it, so that the blocks stay as they are.
struct Forking {
    blocks: MutexGuard<'static, Blocks>,
    /// A pipe whose writing end only the child has once the parent has closed its own: the parent waits for its end.
    pipe: [i32; 2],
}

struct Cell(UnsafeCell<Option<Forking>>);

// SAFETY: only used between `prepare` and `parent` or `child`, by the thread that forks, which holds the lock of the blocks.
unsafe impl Sync for Cell {}

static FORKING: Cell = Cell(UnsafeCell::new(None));

/// Makes forks of this process copy the blocks. False if that is not possible.
pub fn watch() -> bool {
    // SAFETY: three functions that live as long as this library, which is never unloaded, since it was preloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) == 0 }
}

unsafe extern "C" fn prepare() {
    let Some(lent) = shared() else { return };
    let blocks = lent.lock();
    let mut pipe = [-1; 2];
    // SAFETY: room for two descriptors. Without a pipe the parent does not wait, and changes of the first microseconds may show.
    unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) };
    // SAFETY: this thread holds the lock.
    unsafe { *FORKING.0.get() = Some(Forking { blocks, pipe }) };
}

unsafe extern "C" fn parent() {
    // SAFETY: this thread holds the lock since `prepare`.
    let Some(Forking { blocks, pipe: [reading, writing] }) = (unsafe { (*FORKING.0.get()).take() }) else { return };
    let mut byte = 0u8;
    // SAFETY: descriptors of `prepare`, or -1; room for a byte. It returns when the child is done, or has ended.
    unsafe {
        libc::close(writing);
        while libc::read(reading, (&raw mut byte).cast(), 1) < 0 && *libc::__errno_location() == libc::EINTR {}
        libc::close(reading);
    }
    drop(blocks);
}

unsafe extern "C" fn child() {
    // SAFETY: as in `parent`; a child has only the thread that has forked.
    let Some(Forking { blocks, pipe: [reading, writing] }) = (unsafe { (*FORKING.0.get()).take() }) else { return };
    if let Some(lent) = shared() {
        lent.close();
        for (place, length, at) in lent.used(&blocks) {
            if !make_private(lent, place, length, at) {
                // It would write into its parent's memory.
                std::process::abort();
            }
        }
    }
    // SAFETY: descriptors of `prepare`, or -1.
    unsafe {
        libc::close(writing);
        libc::close(reading);
    }
    drop(blocks);
}

/// Replaces a block by a copy. Pages that nobody has written to are not copied: they are zero in both.
fn make_private(lent: &Lent, place: *mut u8, length: usize, at: u64) -> bool {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: new memory at an address that the kernel chooses. The copies go from the block into it, inside both. Then it takes the
    // block's place, which no other thread sees: there is none.
    unsafe {
        let copy = libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0);
        if copy == libc::MAP_FAILED {
            return false;
        }
        for (from, to) in data(lent.fd(), at, length) {
            std::ptr::copy_nonoverlapping(place.add(from), copy.cast::<u8>().add(from), to - from);
        }
        let moved = libc::mremap(copy, length, length, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, place);
        moved != libc::MAP_FAILED
    }
}

/// The parts of a block that have pages: where each begins and ends in it.
fn data(fd: BorrowedFd<'_>, at: u64, length: usize) -> impl Iterator<Item = (usize, usize)> {
    // SAFETY: the position of a shared memory's descriptor means nothing to anybody.
    let seek = move |from: usize, what| unsafe { libc::lseek(fd.as_raw_fd(), at as i64 + from as i64, what) };
    let inside = move |found: i64| usize::try_from(found - at as i64).unwrap_or(length).min(length);
    let mut next = 0;
    std::iter::from_fn(move || {
        let from = match seek(next, libc::SEEK_DATA) {
            found if found >= 0 => inside(found),
            _ => length,
        };
        next = inside(seek(from, libc::SEEK_HOLE));
        (from < length).then_some((from, next))
    })
}
