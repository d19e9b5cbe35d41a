//! fork(2): lent memory is shared, so parent and child would see each other's writes. A child gets copies of the blocks
//! in use instead, before fork(2) returns in either process. vfork(2) and posix_spawn(3), whose children only execute
//! another program, need none.

use crate::lent::{Blocks, Lent, shared};
use rustix::fs::SeekFrom;
use std::cell::RefCell;
use std::io::{PipeReader, PipeWriter, Read};
use std::os::fd::BorrowedFd;
use std::sync::MutexGuard;

/// Held from before a fork until after it, so that the blocks stay as they are.
struct Forking {
    blocks: MutexGuard<'static, Blocks>,
    /// A pipe whose writing end only the child has once the parent has closed its own: the parent waits until it is
    /// closed. Without a pipe the parent does not wait, and the child may see the parent's writes of the first
    /// microseconds.
    pipe: Option<(PipeReader, PipeWriter)>,
}

thread_local! {
    /// From `prepare` to `parent` or `child`, which run in the thread that forks.
    static FORKING: RefCell<Option<Forking>> = const { RefCell::new(None) };
}

/// Makes forks of this process copy the blocks. False if that is not possible.
pub fn watch() -> bool {
    // SAFETY: three functions that live as long as this library, which is never unloaded, since it was preloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) == 0 }
}

extern "C" fn prepare() {
    let Some(lent) = shared() else { return };
    // Before the lock is taken, since this may allocate.
    let pipe = std::io::pipe().ok();
    let forking = Forking { blocks: lent.lock(), pipe };
    FORKING.with(|place| *place.borrow_mut() = Some(forking));
}

extern "C" fn parent() {
    let Some(Forking { blocks, pipe }) = FORKING.with(|place| place.borrow_mut().take()) else { return };
    if let Some((mut reading, writing)) = pipe {
        drop(writing);
        // It returns when the child is done, or has ended.
        while matches!(reading.read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::Interrupted) {}
    }
    drop(blocks);
}

extern "C" fn child() {
    let Some(Forking { blocks, pipe }) = FORKING.with(|place| place.borrow_mut().take()) else { return };
    if let Some(lent) = shared() {
        lent.close();
        for (place, length, at) in lent.used(&blocks) {
            if !make_private(lent, place, length, at) {
                // The child would write into its parent's memory.
                std::process::abort();
            }
        }
    }
    drop(pipe);
    drop(blocks);
}

/// Replaces a block by a copy. Pages that nobody has written to are not copied: they are zero in both.
fn make_private(lent: &Lent, place: *mut u8, length: usize, at: u64) -> bool {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: new memory at an address that the kernel chooses. The copies go from the block into it, inside both. Then
    // it takes the block's place, which no other thread sees: there is none.
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
    // lseek(2) moves the descriptor's position, which no code uses.
    let seek = move |to: fn(u64) -> SeekFrom, from: usize| match rustix::fs::seek(fd, to(at + from as u64)) {
        Ok(found) => usize::try_from(found.saturating_sub(at)).unwrap_or(length).min(length),
        Err(_) => length,
    };
    let mut next = 0;
    std::iter::from_fn(move || {
        let from = seek(SeekFrom::Data, next);
        next = seek(SeekFrom::Hole, from);
        (from < length).then_some((from, next))
    })
}
