//! Parts of this library that no signal handler interrupts.
//!
//! A handler may call any function that is a system call in the C library. It must not do so in the middle of an
//! operation on a connection, nor while its thread holds a lock or is in malloc. So each thread counts how many such
//! parts it is in, and a signal that comes meanwhile is handled at the end of the outermost one ([`crate::signals`]).
//! Entering one costs an addition to memory of the thread's own. Where the thread sleeps it is in none
//! ([`crate::leaving`]).

use crate::forks::Vfork;
use crate::heap::{Heap, Surroundings};
use crate::leaving::{Exit, Sleep};
use crate::{sections, thread};
use baton_ring::Token;
use libc::{c_int, siginfo_t};
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

const RELAXED: Ordering = Ordering::Relaxed;

/// What the library knows of a thread.
#[repr(C, align(64))]
pub(crate) struct Here {
    /// [`ONE`] for each part that it is in, and the bits below.
    depth: AtomicU32,
    /// Number of handlers that it has run (wraps), and of those without SA_RESTART.
    pub handled: AtomicU32,
    pub interrupted: AtomicU32,
    /// Its signal mask, while signals are blocked since one was deferred.
    mask: AtomicU64,
    /// What it has to do before anything goes past the call in which it sleeps; null if it does not sleep.
    pub sleep: AtomicPtr<Sleep>,
    /// Its cancellation type, with [`CANCELLED_LATER`].
    cancel_kind: AtomicI32,
    /// Whether the thread could be cancelled when that was last forbidden.
    cancel_state: AtomicI32,
    /// Where it is to go when the outermost part ends, with [`LEAVING`].
    pub exit: Exit,
    /// Its alternate signal stack when it last ran a handler: address and length.
    pub stack: [AtomicUsize; 2],
    /// Number of sections that it is in ([`crate::sections`]).
    pub sections: AtomicU32,
    /// Number of locks that it has or waits for ([`crate::short_lock`]).
    pub short_locks: AtomicU32,
    /// How many vfork(2) of this thread, or of its children by it, are under way: while it is not 0 what runs here is a
    /// child, which uses the thread's memory ([`crate::forks`]).
    pub vforks: AtomicU32,
    /// The last one of them.
    pub vfork: AtomicPtr<Vfork>,
    /// The number of a deferred signal that is kept here instead of in the kernel's queue, or 0, and its description.
    pub kept: AtomicI32,
    pub description: UnsafeCell<MaybeUninit<siginfo_t>>,
}

/// Bit of [`Here::depth`]: a signal was deferred, and all are blocked.
const DEFERRED: u32 = 1;
/// Bit of [`Here::depth`]: the thread leaves the function that it has called: see [`crate::leaving`].
const LEAVING: u32 = 2;
/// Bit of [`Here::depth`]: the thread can be cancelled, but not now: system calls in the middle of a part must return.
const CANCELLED_LATER: u32 = 4;
const ONE: u32 = 8;

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
    // SAFETY: the thread's memory for `baton_here`, of this type, which is zero at first and lives as long as the
    // thread.
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
        sleep: AtomicPtr::new(std::ptr::null_mut()),
        cancel_kind: AtomicI32::new(AT_CALLS),
        cancel_state: AtomicI32::new(DISABLED),
        exit: Exit::new(),
        stack: [const { AtomicUsize::new(0) }; 2],
        sections: AtomicU32::new(0),
        short_locks: AtomicU32::new(0),
        vforks: AtomicU32::new(0),
        vfork: AtomicPtr::new(std::ptr::null_mut()),
        kept: AtomicI32::new(0),
        description: UnsafeCell::new(MaybeUninit::uninit()),
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
    // SAFETY: the thread's own `Here::depth`, which comes first.
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
    if here.depth.load(RELAXED) >= ONE {
        return;
    }
    if here.resume() & LEAVING != 0 {
        here.exit.go();
    }
}

unsafe extern "C-unwind" {
    /// As a thread is cancelled that has asked for that at any time, it ends in here.
    fn pthread_setcancelstate(state: c_int, last: *mut c_int) -> c_int;
    fn pthread_setcanceltype(kind: c_int, last: *mut c_int) -> c_int;
    fn pthread_testcancel();
}

/// PTHREAD_CANCEL_ENABLE and PTHREAD_CANCEL_DISABLE.
const ENABLED: c_int = 0;
const DISABLED: c_int = 1;
/// PTHREAD_CANCEL_DEFERRED.
const AT_CALLS: c_int = 0;

/// A part that the thread is in until this is dropped.
pub(crate) struct Whole(PhantomData<*const ()>);

impl Whole {
    #[inline]
    pub fn begin() -> Whole {
        begin();
        let here = here();
        // A signal may have been deferred since.
        if here.depth.load(RELAXED) & !DEFERRED == ONE && !thread::is_alone() {
            here.hold_cancellation();
        }
        Whole(PhantomData)
    }

    /// As [`Whole::begin`], for a function in which a thread is cancelled that was asked to end before (POSIX,
    /// cancellation points).
    #[inline]
    pub fn begin_cancelable() -> Whole {
        if !thread::is_alone() {
            // SAFETY: no arguments. The caller has nothing to undo yet.
            unsafe { pthread_testcancel() };
        }
        Whole::begin()
    }
}

/// The library's memory, which changes in such parts.
#[global_allocator]
pub(crate) static MEMORY: Heap<Parts> = Heap::new();

/// What the memory has to know.
pub(crate) struct Parts;

impl Surroundings for Parts {
    fn undisturbed<T>(act: impl FnOnce() -> T) -> T {
        let _whole = Whole::begin();
        act()
    }

    fn thread() -> Token {
        thread::token()
    }

    fn may_unmap() -> bool {
        !sections::is_withdrawn()
    }
}

impl Drop for Whole {
    #[inline]
    fn drop(&mut self) {
        end();
    }
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

    #[inline(never)]
    fn hold_cancellation(&self) {
        if self.forbid_cancellation() {
            self.depth.fetch_or(CANCELLED_LATER, RELAXED);
        } else if self.cancel_kind.load(RELAXED) != AT_CALLS {
            // SAFETY: no place for the last type.
            unsafe { pthread_setcanceltype(self.cancel_kind.load(RELAXED), std::ptr::null_mut()) };
        }
    }

    /// Lets the thread not be cancelled. Returns whether it could be.
    fn forbid_cancellation(&self) -> bool {
        // Not into variables on the stack: AddressSanitizer checks what these functions write to, and at the very start
        // of a thread it still has its notes about the last thread with the same stack.
        // SAFETY: room for the last type and the last state, which nobody but this thread uses.
        unsafe {
            // glibc's signal may be under way, which does not look at the state (2.36).
            pthread_setcanceltype(AT_CALLS, self.cancel_kind.as_ptr());
            pthread_setcancelstate(DISABLED, self.cancel_state.as_ptr());
        }
        self.cancel_state.load(RELAXED) == ENABLED
    }

    /// Is in no part any more, and handles what came meanwhile: signals, and cancellation
    /// ([`Here::forbid_cancellation`]). Returns what [`Here::depth`] was. The caller has nothing to undo.
    fn resume(&self) -> u32 {
        let is_cancelable = self.depth.load(RELAXED) & CANCELLED_LATER != 0;
        // A handler may use the place.
        let kind = self.cancel_kind.load(RELAXED);
        if is_cancelable {
            // While signals are deferred, since a handler may jump. It ends no thread, whose type is AT_CALLS now.
            // SAFETY: no place for the last state.
            unsafe { pthread_setcancelstate(ENABLED, std::ptr::null_mut()) };
        }
        // Up to here a signal may be deferred: while any bit is set.
        let depth = self.depth.swap(0, RELAXED);
        if depth & DEFERRED != 0 {
            crate::signals::deliver(self, self.mask.load(RELAXED));
        }
        if is_cancelable && kind != AT_CALLS {
            // SAFETY: no place for the last type.
            unsafe {
                // glibc forgets the thread's result where a change of the type ends it (2.36).
                pthread_testcancel();
                pthread_setcanceltype(kind, std::ptr::null_mut());
            }
        }
        depth
    }

    /// The parts that the thread is in.
    pub fn parts(&self) -> u32 {
        self.depth.load(RELAXED) & !(DEFERRED | LEAVING)
    }

    /// Is in no part until [`Here::close`]: signals are handled as they come, also those that were deferred, and the
    /// thread can be cancelled.
    pub fn open(&self) {
        self.resume();
    }

    /// Is in these parts again.
    pub fn close(&self, parts: u32) {
        self.depth.store(parts, RELAXED);
        if parts & CANCELLED_LATER != 0 {
            self.forbid_cancellation();
        }
    }

    /// As [`Here::close`], and nothing but the way out is to be done in them.
    pub fn close_to_leave(&self, parts: u32) {
        self.close(parts | LEAVING);
    }

    /// As [`Here::close_to_leave`], in a thread that ends.
    pub fn close_to_end(&self, parts: u32) {
        self.close((parts | LEAVING) & !CANCELLED_LATER);
    }

    /// Whether nothing but the way out is to be done.
    pub fn is_leaving(&self) -> bool {
        self.depth.load(RELAXED) & LEAVING != 0
    }
}
