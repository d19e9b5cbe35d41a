//! Parts of this library that no signal handler interrupts.
//!
//! A handler may call any function that is a system call in the C library. It must not do so in the middle of an operation on a connection,
//! nor while its thread holds a lock or is in malloc. So each thread counts how many such parts it is in, and a signal that comes meanwhile
//! is handled at the end of the outermost one ([`crate::signals`]). Entering one costs an addition to memory of the thread's own. Where
//! the thread sleeps it is in none ([`open`]).

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const RELAXED: Ordering = Ordering::Relaxed;

/// What the library knows of a thread.
#[repr(C, align(64))]
pub(crate) struct Here {
    /// Twice the number of parts that it is in, and [`DEFERRED`].
    depth: AtomicU32,
    /// Number of handlers that it has run (wraps), and of those without SA_RESTART.
    pub handled: AtomicU32,
    pub interrupted: AtomicU32,
    /// Its signal mask, while signals are blocked since one was deferred.
    mask: AtomicU64,
}

/// Bit of [`Here::depth`]: a signal was deferred, and all are blocked.
const DEFERRED: u32 = 1;
const ONE: u32 = 2;

// In the part of a thread's memory that is there from its start, so that a signal handler can use it.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .tbss.baton_here, \"awT\", @nobits",
    ".balign 64",
    ".hidden baton_here",
    ".globl baton_here",
    ".type baton_here, @object",
    ".size baton_here, {size}",
    "baton_here:",
    ".zero {size}",
    ".popsection",
    size = const size_of::<Here>(),
);

/// Where the calling thread's [`Here`] is, relative to its control block.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn offset() -> usize {
    let at: usize;
    // SAFETY: reads an entry of the global offset table, which never changes.
    unsafe {
        std::arch::asm!("mov {}, qword ptr [rip + baton_here@GOTTPOFF]", out(reg) at, options(nostack, preserves_flags, readonly, pure));
    }
    at
}

/// That of the calling thread.
#[cfg(target_arch = "x86_64")]
pub(crate) fn here<'a>() -> &'a Here {
    let at: usize;
    // SAFETY: the first word of the thread control block is its own address (System V ABI for x86-64, TLS variant II).
    unsafe { std::arch::asm!("mov {}, qword ptr fs:0", out(reg) at, options(nostack, preserves_flags, readonly, pure)) };
    // SAFETY: the thread's memory for `baton_here`, of this type, which is zero at first and lives as long as the thread.
    unsafe { &*std::ptr::with_exposed_provenance::<Here>(at.wrapping_add(offset())) }
}

/// That of the calling thread.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn here<'a>() -> &'a Here {
    thread_local!(static HERE: Here = const { Here {
        depth: AtomicU32::new(0),
        handled: AtomicU32::new(0),
        interrupted: AtomicU32::new(0),
        mask: AtomicU64::new(0),
    } });
    // SAFETY: it lives as long as the thread, and has no destructor.
    HERE.with(|here| unsafe { &*std::ptr::from_ref(here) })
}

/// Enters a part; [`end`] must follow.
#[inline(always)]
pub(crate) fn begin() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the thread's own `Here::depth`, which comes first.
    unsafe {
        std::arch::asm!("add dword ptr fs:[{}], {one}", in(reg) offset(), one = const ONE, options(nostack));
    }
    #[cfg(not(target_arch = "x86_64"))]
    here().depth.fetch_add(ONE, RELAXED);
}

/// Leaves a part.
#[inline(always)]
pub(crate) fn end() {
    // One instruction: a signal that comes before it is deferred, and one that comes after it is not.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in `begin`.
    unsafe {
        std::arch::asm!(
            "sub dword ptr fs:[{}], {one}",
            "jnz {rest}",
            in(reg) offset(),
            one = const ONE,
            rest = label { deliver() },
            options(nostack)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    if here().depth.fetch_sub(ONE, RELAXED) != ONE {
        deliver();
    }
}

/// Handles what was deferred, unless the thread is in another part.
#[cold]
#[inline(never)]
fn deliver() {
    let here = here();
    if here.depth.load(RELAXED) == DEFERRED {
        here.depth.store(0, RELAXED);
        crate::signals::unblock(here.mask.load(RELAXED));
    }
}

/// A part that the thread is in until this is dropped.
pub(crate) struct Whole(PhantomData<*const ()>);

impl Whole {
    #[inline]
    pub fn begin() -> Whole {
        begin();
        Whole(PhantomData)
    }
}

impl Drop for Whole {
    #[inline]
    fn drop(&mut self) {
        end();
    }
}

/// Makes a call that may sleep: meanwhile signals are handled as they come, also those that were deferred. The caller holds no lock.
pub(crate) fn open<T>(call: impl FnOnce() -> T) -> T {
    let here = here();
    let depth = here.depth.swap(0, RELAXED);
    if depth & DEFERRED != 0 {
        crate::signals::unblock(here.mask.load(RELAXED));
    }
    let done = call();
    here.depth.store(depth & !DEFERRED, RELAXED);
    done
}

impl Here {
    /// Whether the thread is in a part that no handler may interrupt.
    pub fn is_inside(&self) -> bool {
        self.depth.load(RELAXED) != 0
    }

    /// Notes that a signal is deferred, and all are blocked in place of this mask.
    pub fn note_deferred(&self, mask: u64) {
        self.mask.store(mask, RELAXED);
        self.depth.fetch_or(DEFERRED, RELAXED);
    }
}
