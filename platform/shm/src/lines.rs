//! Memory that is used all over: prefetched ahead of its use, and in huge pages.

use core::mem::MaybeUninit;

/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes of a huge page.
pub(crate) const HUGE: usize = 2 << 20;

/// Most bytes that are loaded ahead at once: copying more takes longer than the first of them.
const MOST: u32 = 512;

/// Calls `act` for each cache line of the `length` bytes at an address, of [`MOST`] bytes at most.
#[inline(always)]
pub(crate) fn each_line(at: *const u8, length: u32, act: impl Fn(*const u8)) {
    let before = at.addr() % LINE;
    let lines = (before + length.min(MOST) as usize).div_ceil(LINE);
    (0..lines).for_each(|line| act(at.wrapping_sub(before).wrapping_add(line * LINE)));
}

/// Begins to load the bytes of `value` from offset `from` to offset `to` into the cache, as far as `value` reaches. The
/// thread does not wait for them.
#[inline(always)]
pub fn prefetch<T: ?Sized>(value: &T, from: usize, to: usize) {
    let base = core::ptr::from_ref(value).cast::<u8>();
    let end = base.addr() + to.min(size_of_val(value));
    let mut at = base.wrapping_add(from);
    at = at.wrapping_sub(at.addr() % LINE);
    while at.addr() < end {
        prefetch_line(at);
        at = at.wrapping_add(LINE);
    }
}

/// Begins to load the line at an address, which may be any, into the second-level cache: a core can wait for more lines
/// there than in its first-level cache, and from there they are near enough.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn prefetch_line(at: *const u8) {
    use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch has no effect that the program could see, and a prefetch of an address that is not mapped does
    // nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(crate) fn prefetch_line(_: *const u8) {}

/// Begins to load the line at an address, which may be any, to be written: other processors give it up.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn prefetch_line_to_write(at: *const u8) {
    // SAFETY: a prefetch has no effect that the program could see, and a prefetch of an address that is not mapped does
    // nothing. Processors that do not know the instruction do nothing.
    unsafe { core::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly)) };
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(crate) fn prefetch_line_to_write(_: *const u8) {}

/// Asks for huge pages for memory that is not used yet, for each whole huge page in it. So a large table with accesses
/// all over needs few entries of the processor's address translation. Does nothing where the system has no huge pages.
pub fn advise_huge<T>(unused: &mut [MaybeUninit<T>]) {
    advise(unused.as_mut_ptr().cast(), size_of_val(unused));
}

/// Asks for huge pages for each whole huge page among the `length` bytes at `base`.
pub(crate) fn advise(base: *mut u8, length: usize) {
    let skipped = base.addr().next_multiple_of(HUGE) - base.addr();
    let whole = length.saturating_sub(skipped) / HUGE * HUGE;
    if whole > 0 {
        // SAFETY: the range lies inside the caller's memory. The advice changes how it is mapped, not what it holds; it
        // may fail, which leaves ordinary pages.
        unsafe { libc::madvise(base.wrapping_add(skipped).cast(), whole, libc::MADV_HUGEPAGE) };
    }
}

/// Gives pages of memory back to the system. They are zero when they are used again.
///
/// # Safety
/// The memory must be private and consist of whole pages, and its content must not be needed any more.
pub(crate) unsafe fn discard(base: *mut u8, length: usize) {
    // SAFETY: the caller's promise. The call may fail, which leaves them as they are.
    unsafe { libc::madvise(base.cast(), length, libc::MADV_DONTNEED) };
}
