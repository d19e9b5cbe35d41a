//! The library's own memory. It is not the program's malloc: a signal handler that interrupts malloc may call recv(2),
//! and an allocation there would wait for malloc's lock, which the same thread holds. No signal handler runs while this
//! memory is changed ([`Surroundings::undisturbed`]), so a handler always finds it consistent.
//!
//! A fork holds its lock, so that the child finds it free. Meanwhile the forking thread uses the memory all the same. A
//! child that is made otherwise (clone) may find it in the middle of a change by another thread of its parent: it
//! leaves this memory as it is, and uses a new heap.

use baton_ring::{Lock, LockGuard, Token, give_way};
use dlmalloc::{Allocator, Dlmalloc};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the heap needs of the library.
pub(crate) trait Surroundings: Send + Sync {
    /// Runs `act` with signals blocked.
    fn undisturbed<T>(act: impl FnOnce() -> T) -> T;
    /// The calling thread.
    fn thread() -> Token;
    /// Whether pages may be given back by munmap(2): a seccomp filter of the program's may not allow it.
    fn may_unmap() -> bool;
}

/// Pages of the kernel's.
struct Pages<S>(PhantomData<S>);

// SAFETY: mapped pages are what the crate's allocator for Linux gives, too. What is not given back stays mapped.
unsafe impl<S: Surroundings> Allocator for Pages<S> {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let pages = unsafe { libc::mmap(ptr::null_mut(), size, access, kind, -1, 0) };
        if pages == libc::MAP_FAILED { (ptr::null_mut(), 0, 0) } else { (pages.cast(), size, 0) }
    }

    fn remap(&self, _pages: *mut u8, _old: usize, _new: usize, _can_move: bool) -> *mut u8 {
        ptr::null_mut()
    }

    fn free_part(&self, _pages: *mut u8, _old: usize, _new: usize) -> bool {
        false
    }

    fn free(&self, pages: *mut u8, size: usize) -> bool {
        // SAFETY: pages that `alloc` has mapped, and nobody uses.
        S::may_unmap() && unsafe { libc::munmap(pages.cast(), size) == 0 }
    }

    fn can_release_part(&self, _flags: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        4096
    }
}

type Memory<S> = Dlmalloc<Pages<S>>;

/// The allocator of this library's Rust.
pub(crate) struct Heap<S: 'static> {
    memory: Lock<Memory<S>>,
    /// The guard of `memory`'s lock, while a thread holds it for a fork.
    held: UnsafeCell<Option<LockGuard<'static, Memory<S>>>>,
    /// The heap of a child that was made without [`Heap::hold`]. Such a child frees nothing: the block may be of its
    /// parent's heap.
    of_child: Lock<Memory<S>>,
    is_such_a_child: AtomicBool,
}

// SAFETY: `held` is used by the thread that holds the lock alone.
unsafe impl<S: Surroundings> Sync for Heap<S> {}

const fn no_memory<S>() -> Lock<Memory<S>> {
    Lock::new(Dlmalloc::new_with_allocator(Pages(PhantomData)))
}

impl<S: Surroundings> Heap<S> {
    /// Without memory yet.
    pub const fn new() -> Heap<S> {
        Heap { memory: no_memory(), held: UnsafeCell::new(None), of_child: no_memory(), is_such_a_child: AtomicBool::new(false) }
    }

    fn is_such_a_child(&self) -> bool {
        self.is_such_a_child.load(Ordering::Relaxed)
    }

    fn with(&self, change: impl FnOnce(&mut Memory<S>) -> *mut u8) -> *mut u8 {
        let memory = if self.is_such_a_child() { &self.of_child } else { &self.memory };
        S::undisturbed(|| {
            for round in 0.. {
                if let Some(mut memory) = memory.lock(S::thread()) {
                    return change(&mut memory);
                }
                // SAFETY: if `held` is set, this thread holds the lock for a fork.
                if let Some(memory) = unsafe { &mut *self.held.get() } {
                    return change(memory);
                }
                // Among thousands of threads two may have the same token.
                give_way(round);
            }
            ptr::null_mut()
        })
    }

    /// Takes the heap's lock for a fork, until [`Heap::release`].
    pub fn hold(&'static self) {
        S::undisturbed(|| {
            if let Some(guard) = self.memory.lock(S::thread()) {
                // SAFETY: this thread holds the lock.
                unsafe { *self.held.get() = Some(guard) };
            }
        });
    }

    /// Releases the heap's lock, in the thread that has called [`Heap::hold`] or in its child.
    pub fn release(&self) {
        // SAFETY: this thread holds the lock. It leaves the place before it is released.
        S::undisturbed(|| drop(unsafe { (*self.held.get()).take() }));
    }

    /// Leaves the parent's heap as it is, in a child that was made without [`Heap::hold`].
    pub fn abandon(&self) {
        self.is_such_a_child.store(true, Ordering::Relaxed);
    }
}

// SAFETY: the crate's allocator, behind a lock. It gives null where there is no memory.
unsafe impl<S: Surroundings> GlobalAlloc for Heap<S> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: a layout's size and alignment.
        self.with(|memory| unsafe { memory.malloc(layout.size(), layout.align()) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: a layout's size and alignment.
        self.with(|memory| unsafe { memory.calloc(layout.size(), layout.align()) })
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if self.is_such_a_child() {
            return;
        }
        self.with(|memory| {
            // SAFETY: the caller's block, which has this layout.
            unsafe { memory.free(at, layout.size(), layout.align()) };
            at
        });
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if self.is_such_a_child() {
            // SAFETY: a size that is valid with the alignment; a new block, and the caller's, of which both have so
            // many bytes.
            return unsafe {
                let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
                if !new.is_null() {
                    ptr::copy_nonoverlapping(at, new, size.min(layout.size()));
                }
                new
            };
        }
        // SAFETY: the caller's block, which has this layout, and a size that is valid with its alignment.
        self.with(|memory| unsafe { memory.realloc(at, layout.size(), layout.align(), size) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads that cannot be told apart.
    struct Alike;

    impl Surroundings for Alike {
        fn undisturbed<T>(act: impl FnOnce() -> T) -> T {
            act()
        }

        fn thread() -> Token {
            7
        }

        fn may_unmap() -> bool {
            true
        }
    }

    /// Each block is its owner's, also where two threads have the same token, and after a fork's lock.
    #[test]
    fn blocks_are_their_owners() {
        static HEAP: Heap<Alike> = Heap::new();
        HEAP.hold();
        HEAP.release();
        let use_it = |mark: u8| {
            for round in 1..20_000 {
                let layout = Layout::from_size_align(1 + round % 700, 8).expect("a layout");
                // SAFETY: a block of this layout, whose bytes are all set before they are read.
                unsafe {
                    let block = HEAP.alloc(layout);
                    assert!(!block.is_null());
                    block.write_bytes(mark, layout.size());
                    assert!((0..layout.size()).all(|at| *block.add(at) == mark));
                    HEAP.dealloc(block, layout);
                }
            }
        };
        std::thread::scope(|scope| (1..=4).for_each(|mark| drop(scope.spawn(move || use_it(mark)))));
    }
}
