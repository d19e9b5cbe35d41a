//! Sleeping in a system call, which a signal handler may leave by longjmp(3), and in which the thread may be cancelled.
//!
//! A thread that sleeps has registered itself with sockets and sets, and holds memory. So a jump out of the call has to
//! undo that, like a return: it first goes to where the thread fell asleep, as if the call were interrupted; the
//! library's functions return one after the other; and when the outermost of them is done, with nothing left to undo,
//! the jump goes on to its target. The end of a thread does the same.

use crate::whole::{self, Here};
use crate::{real, sections, thread};
use libc::{c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

const RELAXED: Ordering = Ordering::Relaxed;

/// A buffer of setjmp(3) without a signal mask, and of pthread_cleanup_push(3) (glibc, `__pthread_unwind_buf_t`).
#[repr(C, align(16))]
pub(crate) struct Buffer {
    registers: [usize; 8],
    has_mask: usize,
    /// The next buffer, with which the unwinding at a thread's end continues.
    next: *mut c_void,
    rest: [usize; 6],
}

impl Buffer {
    const fn new(next: *mut c_void) -> Buffer {
        Buffer { registers: [0; 8], has_mask: 0, next, rest: [0; 6] }
    }
}

/// A call in which a thread sleeps.
#[repr(C)]
pub(crate) struct Sleep {
    buffer: Buffer,
    /// The sleep that a signal handler has interrupted, in whose code this one began.
    outer: *mut Sleep,
    /// How many parts that stay whole the thread is in: it is in none while it sleeps, and in these again afterwards.
    parts: u32,
}

/// The target of a thread that is leaving: longjmp's arguments, or with [`ENDS`] the buffer with which its unwinding
/// continues.
pub(crate) struct Exit {
    to: AtomicPtr<c_void>,
    value: AtomicI32,
    how: AtomicI32,
}

const JUMPS: i32 = 0;
const ENDS: i32 = 1;

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    // extern "C-unwind" fn baton_sleep(buffer, call, argument) -> c_int: 0, or 1 if the call was left.
    ".pushsection .text.baton_sleep, \"ax\", @progbits",
    ".hidden baton_sleep",
    ".globl baton_sleep",
    ".type baton_sleep, @function",
    "baton_sleep:",
    ".cfi_startproc",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "push rbx",
    "push r12",
    ".cfi_offset rbx, -24",
    ".cfi_offset r12, -32",
    "push r13",
    "push r14",
    ".cfi_offset r13, -40",
    ".cfi_offset r14, -48",
    "mov rbx, rdi",
    "mov r12, rsi",
    "mov r13, rdx",
    "xor esi, esi",
    "call qword ptr [rip + __sigsetjmp@GOTPCREL]",
    "mov r14d, eax",
    "test eax, eax",
    "jnz 2f",
    "mov rdi, rbx",
    "call qword ptr [rip + __pthread_register_cancel@GOTPCREL]",
    "mov rdi, r13",
    "call r12",
    "2:",
    "mov rdi, rbx",
    "call qword ptr [rip + __pthread_unregister_cancel@GOTPCREL]",
    "mov eax, r14d",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbx",
    "pop rbp",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_endproc",
    ".size baton_sleep, . - baton_sleep",
    ".popsection",
);

#[cfg(target_arch = "x86_64")]
unsafe extern "C-unwind" {
    fn baton_sleep(buffer: *mut Buffer, call: extern "C-unwind" fn(*mut c_void), argument: *mut c_void) -> c_int;
    /// Continues a thread's unwinding after the clean-up that this buffer stands for (glibc, pthread_cleanup_push).
    fn __pthread_unwind_next(buffer: *mut Buffer) -> !;
}

/// A call, and its result once it has one.
struct Made<F, T> {
    here: &'static Here,
    sleep: *mut Sleep,
    /// If true, the call is not made when a deferred signal's handler has just run.
    goes_on: bool,
    call: Option<F>,
    result: T,
}

extern "C-unwind" fn make<F: FnOnce() -> T, T>(made: *mut c_void) {
    // SAFETY: `asleep` passes one that lives, and uses it again when this has ended.
    let made = unsafe { &mut *made.cast::<Made<F, T>>() };
    // SAFETY: so does this.
    let parts = unsafe { (*made.sleep).parts };
    made.here.sleep.store(made.sleep, RELAXED);
    let handled = made.here.handled.load(RELAXED);
    made.here.open();
    if made.goes_on && made.here.handled.load(RELAXED) != handled {
        thread::set_errno(libc::EINTR);
    } else if let Some(call) = made.call.take() {
        made.result = call();
    }
    made.here.close(parts);
}

/// Makes the program's own call, which may sleep. During it signal handlers run at once, first those of deferred
/// signals. The caller holds no lock, and is in a [`whole::Whole`]. If a handler leaves the call the result is -1 with
/// EINTR, and [`is_leaving`] is true.
pub(crate) fn asleep<T: From<i8>>(call: impl FnOnce() -> T) -> T {
    make_asleep(false, call)
}

/// As [`asleep`], for a call that may continue an earlier sleep of the same call of the program's: it fails with EINTR
/// also if a deferred signal was handled just before it.
pub(crate) fn asleep_again<T: From<i8>>(call: impl FnOnce() -> T) -> T {
    make_asleep(true, call)
}

#[cfg(target_arch = "x86_64")]
fn make_asleep<F: FnOnce() -> T, T: From<i8>>(goes_on: bool, call: F) -> T {
    let here = whole::here();
    if here.is_leaving() {
        // The caller is a loop that has not seen yet that the thread is leaving. Another sleep would overwrite the
        // target.
        thread::set_errno(libc::EINTR);
        return T::from(-1);
    }
    if sections::is_withdrawn() {
        // After a withdrawal a sleeping thread has registered nothing, so there is nothing to undo.
        let parts = here.parts();
        here.open();
        let result = call();
        here.close(parts);
        return result;
    }
    let outer = here.sleep.load(RELAXED);
    let mut sleep = Sleep { buffer: Buffer::new(std::ptr::null_mut()), outer, parts: here.parts() };
    let mut made = Made { here, sleep: &raw mut sleep, goes_on, call: Some(call), result: T::from(-1) };
    // SAFETY: both live until the call has returned, once: `leave` lets it return with 1 before or after that.
    let left = unsafe { baton_sleep(&raw mut sleep.buffer, make::<F, T>, (&raw mut made).cast()) };
    here.sleep.store(outer, RELAXED);
    if left != 0 {
        if !here.is_leaving() {
            // The thread is cancelled, or a handler ends it.
            here.exit.to.store(sleep.buffer.next, RELAXED);
            here.exit.how.store(ENDS, RELAXED);
            here.close_to_end(sleep.parts);
        }
        thread::set_errno(libc::EINTR);
        return T::from(-1);
    }
    made.result
}

/// As on x86-64, but a jump does not undo what the call has registered.
#[cfg(not(target_arch = "x86_64"))]
fn make_asleep<T: From<i8>>(_goes_on: bool, call: impl FnOnce() -> T) -> T {
    let here = whole::here();
    let parts = here.parts();
    here.open();
    let result = call();
    here.close(parts);
    result
}

/// Whether the calling thread is on its way out of a function that the program has called.
pub(crate) fn is_leaving() -> bool {
    whole::here().is_leaving()
}

impl Exit {
    #[cfg(not(target_arch = "x86_64"))]
    pub const fn new() -> Exit {
        Exit { to: AtomicPtr::new(std::ptr::null_mut()), value: AtomicI32::new(0), how: AtomicI32::new(JUMPS) }
    }

    /// Jumps to the target, or continues the thread's end.
    #[cold]
    pub fn go(&self) {
        #[cfg(target_arch = "x86_64")]
        if self.how.load(RELAXED) == ENDS {
            // SAFETY: the buffer that was registered before that of the call in which the thread slept.
            unsafe { __pthread_unwind_next(&mut Buffer::new(self.to.load(RELAXED))) }
        }
        // SAFETY: longjmp's arguments, as the program has passed them; the functions that they go past are left.
        unsafe { jump(self.to.load(RELAXED), self.value.load(RELAXED), false) }
    }
}

/// The stack pointer in a buffer of setjmp(3), which the C library has encoded.
///
/// # Safety
/// The buffer is filled.
#[cfg(target_arch = "x86_64")]
unsafe fn stack_of(buffer: *const c_void) -> usize {
    const STACK: usize = 6;
    let guard: usize;
    // SAFETY: glibc's pointer guard, in the thread control block (tcbhead_t), and the caller's promise.
    unsafe {
        std::arch::asm!("mov {}, qword ptr fs:0x30", out(reg) guard, options(nostack, preserves_flags, readonly, pure));
        buffer.cast::<usize>().add(STACK).read().rotate_right(17) ^ guard
    }
}

/// Whether a jump to this stack pointer goes past the call in which the thread sleeps.
#[cfg(target_arch = "x86_64")]
fn goes_past(here: &Here, sleep: *mut Sleep, to: usize) -> bool {
    let [start, length] = [&here.stack[0], &here.stack[1]].map(|word| word.load(RELAXED));
    let on_other = |address: usize| address.wrapping_sub(start) < length;
    match (on_other(sleep as usize), on_other(to)) {
        // The target is on the signal stack and the sleep is not: the jump stays within the handler.
        (false, true) => false,
        (true, false) => true,
        _ => to > sleep as usize,
    }
}

/// longjmp(3); `checked`: as with _FORTIFY_SOURCE.
///
/// # Safety
/// As longjmp(3).
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn jump(to: *mut c_void, value: c_int, checked: bool) -> ! {
    let here = whole::here();
    let sleep = here.sleep.load(RELAXED);
    // SAFETY: a call in which the thread sleeps is in its stack, whose frames end after it. The program's buffer
    // (`# Safety`).
    unsafe {
        if sleep.is_null() || !goes_past(here, sleep, stack_of(to)) {
            if checked { real::longjmp_checked(to, value) } else { real::siglongjmp(to, value) }
        }
        here.exit.to.store(to, RELAXED);
        here.exit.value.store(value, RELAXED);
        here.exit.how.store(JUMPS, RELAXED);
        here.close_to_leave((*sleep).parts);
        real::siglongjmp((&raw mut (*sleep).buffer).cast(), 1)
    }
}

/// longjmp(3).
///
/// # Safety
/// As longjmp(3).
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn jump(to: *mut c_void, value: c_int, _checked: bool) -> ! {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { real::siglongjmp(to, value) }
}
