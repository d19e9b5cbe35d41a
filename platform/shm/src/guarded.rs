//! Copies between shared memory and a program's own memory, at addresses that have not been checked.
//!
//! A check would cost a system call. Instead the copy is tried: where no memory is mapped it raises SIGSEGV, and the
//! process's handler of that signal makes the copy return with a failure ([`resume`]). In a process without such a
//! handler the signal ends the process, as with any other copy.

/// For each guarded copy: where the C library's function returns to, relative to the entry's own address. The linker
/// collects them.
#[cfg(target_arch = "x86_64")]
type Entry = i32;

// An entry that fits no copy, so that the list exists in every program.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection baton_guarded, \"aR\"",
    ".balign 4",
    ".long 0",
    ".popsection",
    ".hidden __start_baton_guarded",
    ".hidden __stop_baton_guarded",
);

/// Copies `length` bytes, to another place than null. Returns false if there is no such memory; then any part of it may
/// have been copied.
///
/// # Safety
/// Where there is memory at `from` and `to`, it must be valid for a copy, as for `copy_nonoverlapping`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[must_use]
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) -> bool {
    let copied: usize;
    // SAFETY: the C library's function keeps to its calling convention, and returns `to`. Where it faults, `resume`
    // lets it return 0.
    unsafe {
        core::arch::asm!(
            "call qword ptr [rip + memcpy@GOTPCREL]",
            "2:",
            ".pushsection baton_guarded, \"aR\"",
            ".balign 4",
            ".long 2b - .",
            ".popsection",
            inlateout("rdi") to => _,
            inlateout("rsi") from => _,
            inlateout("rdx") length => _,
            lateout("rax") copied,
            clobber_abi("C"),
        );
    }
    copied != 0
}

/// Copies `length` bytes. On this architecture copies are not guarded.
///
/// # Safety
/// That of `copy_nonoverlapping`.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
#[must_use]
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { core::ptr::copy_nonoverlapping(from, to, length) };
    true
}

/// Bytes next to the stack's end in which a fault may mean that the stack is full: then its memory is not read before
/// the kernel has.
const STACK: usize = 1 << 16;

/// The result of a guarded copy that failed.
pub const FAILED: i64 = 0;

/// Where a thread that has raised SIGSEGV at `address` goes on (instruction pointer, stack pointer), with [`FAILED`] in
/// its register for results. None if the fault was in no guarded copy.
///
/// # Safety
/// The thread's stack must be mapped, unless `address` is close to its pointer.
#[cfg(target_arch = "x86_64")]
#[must_use]
pub unsafe fn resume(address: usize, stack: usize) -> Option<(usize, usize)> {
    let is_near = address.wrapping_sub(stack).wrapping_add(STACK) < 2 * STACK;
    if !stack.is_multiple_of(8) || is_near && !is_readable(stack) {
        return None;
    }
    // SAFETY: the caller's promise. The C library's functions for copies have no frame: the address that they return to
    // comes first.
    let returns = unsafe { core::ptr::with_exposed_provenance::<usize>(stack).read() };
    entries().any(|entry| entry == returns).then(|| (returns, stack + size_of::<usize>()))
}

/// Whether there are eight bytes to read: rt_sigprocmask(2) reads a mask before it finds that nothing is to be done
/// with it.
#[cfg(target_arch = "x86_64")]
fn is_readable(address: usize) -> bool {
    const SYS_RT_SIGPROCMASK: isize = 14;
    let failed: isize;
    // SAFETY: the system call only reads there, and changes nothing, since there is no such operation as -1. It is made
    // here, since the C library's function may be another library's.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") SYS_RT_SIGPROCMASK => failed,
            in("rdi") -1isize,
            in("rsi") address,
            in("rdx") 0usize,
            in("r10") 8usize,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    failed != -(libc::EFAULT as isize)
}

/// The addresses that all guarded copies return to.
#[cfg(target_arch = "x86_64")]
fn entries() -> impl Iterator<Item = usize> {
    let (start, end): (*const Entry, *const Entry);
    // SAFETY: reads two addresses that the linker defines.
    unsafe {
        core::arch::asm!(
            "lea {start}, [rip + __start_baton_guarded]",
            "lea {end}, [rip + __stop_baton_guarded]",
            start = out(reg) start,
            end = out(reg) end,
            options(nomem, nostack, preserves_flags),
        );
    }
    let count = (end as usize - start as usize) / size_of::<Entry>();
    (0..count).map(move |at| {
        // SAFETY: the linker has put `count` entries there, which are never written.
        let (entry, offset) = unsafe { (start.add(at), start.add(at).read()) };
        (entry as usize).wrapping_add_signed(offset as isize)
    })
}
