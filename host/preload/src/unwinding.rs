//! A thread that a signal handler ends, by pthread_exit(3), while it is in one of the library's functions.
//!
//! The C library then unwinds the stack from the interrupted instruction (a forced unwind). Rust's tables are made for
//! unwinding from calls: for a range of instructions around a call they name the landing pad that cleans up after it.
//! For any other instruction, for example `ret`, these entries are wrong. If no range contains it, Rust's personality
//! routine returns an error, and the C library aborts the process. If a range contains it, the landing pad is entered:
//! the compiler joins the ranges of calls that have the same one, with everything between them, even the end of a
//! function. There the landing pad cleans up values that were cleaned up before, with a wrong stack pointer.
//!
//! The routine here lets a forced unwind continue to the next frame instead, in both cases. Nothing has to be cleaned
//! up in an interrupted one: signals are deferred inside a [`crate::whole::Whole`], and values with a destructor exist
//! only inside one, but for `Start` in [`crate::forks`], in functions that no handler may leave (posix_spawn, popen).
//!
//! The linker replaces Rust's routine by this one (`--wrap`, build.rs).

use std::ffi::c_int;

/// Bit of the argument `actions`: the unwind is forced (Itanium C++ ABI, `_UA_FORCE_UNWIND`).
const FORCED: c_int = 8;
/// Results of a personality routine: `_URC_FATAL_PHASE2_ERROR` and `_URC_CONTINUE_UNWIND`.
const FATAL: c_int = 2;
const GOES_ON: c_int = 8;

std::arch::global_asm!(
    // extern "C" fn(version: c_int, actions: c_int, class: u64, exception: *mut c_void, context: *mut c_void) -> c_int
    ".pushsection .text.baton_personality, \"ax\", @progbits",
    // Undefined in Rust programs that link this crate: they are linked without `--wrap`.
    ".weak __real_rust_eh_personality",
    ".hidden __wrap_rust_eh_personality",
    ".globl __wrap_rust_eh_personality",
    ".type __wrap_rust_eh_personality, @function",
    "__wrap_rust_eh_personality:",
    ".cfi_startproc",
    "test esi, {forced}",
    "jnz 2f",
    "jmp qword ptr [rip + __real_rust_eh_personality@GOTPCREL]",
    "2:",
    "sub rsp, 56",
    ".cfi_def_cfa_offset 64",
    "mov qword ptr [rsp + 16], rdi",
    "mov qword ptr [rsp + 24], rsi",
    "mov qword ptr [rsp + 32], rdx",
    "mov qword ptr [rsp + 40], rcx",
    "mov qword ptr [rsp + 48], r8",
    // Says whether the frame was interrupted: its instruction is the next one then, and not behind a call.
    "mov rdi, r8",
    "lea rsi, [rsp + 8]",
    "call qword ptr [rip + _Unwind_GetIPInfo@GOTPCREL]",
    "cmp dword ptr [rsp + 8], 0",
    "jne 3f",
    "mov rdi, qword ptr [rsp + 16]",
    "mov rsi, qword ptr [rsp + 24]",
    "mov rdx, qword ptr [rsp + 32]",
    "mov rcx, qword ptr [rsp + 40]",
    "mov r8, qword ptr [rsp + 48]",
    "call qword ptr [rip + __real_rust_eh_personality@GOTPCREL]",
    // The tables say that this call does not unwind. It does now, since a signal handler has interrupted the function.
    "cmp eax, {fatal}",
    "jne 4f",
    "3:",
    "mov eax, {goes_on}",
    "4:",
    "add rsp, 56",
    ".cfi_def_cfa_offset 8",
    "ret",
    ".cfi_endproc",
    ".size __wrap_rust_eh_personality, . - __wrap_rust_eh_personality",
    ".popsection",
    forced = const FORCED,
    fatal = const FATAL,
    goes_on = const GOES_ON,
);

#[cfg(test)]
mod tests {
    use libc::{c_int, c_void};
    use std::mem::{MaybeUninit, zeroed};
    use std::ptr::null_mut;

    /// A thread's result if its end has passed over the frame below, and if it has entered the frame's landing pad.
    const PAST: usize = 7;
    const LANDED: usize = 9;

    std::arch::global_asm!(
        ".pushsection .text.baton_test_frame, \"ax\", @progbits",
        // As `--wrap` has it.
        ".weak __real_rust_eh_personality",
        ".type __real_rust_eh_personality, @function",
        "__real_rust_eh_personality:",
        "jmp qword ptr [rip + rust_eh_personality@GOTPCREL]",
        // extern "C" fn baton_test_frame(call: *mut c_void) -> *mut c_void: calls that unless it is null; then comes an
        // instruction that raises SIGILL. The tables have one landing pad for both.
        ".hidden baton_test_frame",
        ".globl baton_test_frame",
        ".type baton_test_frame, @function",
        "baton_test_frame:",
        ".Lbaton_test_frame:",
        ".cfi_startproc",
        ".cfi_personality 0x1b, __wrap_rust_eh_personality",
        ".cfi_lsda 0x1b, .Lbaton_test_table",
        "sub rsp, 8",
        ".cfi_def_cfa_offset 16",
        ".Lbaton_test_begin:",
        "test rdi, rdi",
        "jz 2f",
        "call rdi",
        "2:",
        "ud2",
        ".Lbaton_test_end:",
        "mov eax, {landed}",
        "add rsp, 8",
        ".cfi_def_cfa_offset 8",
        "ret",
        ".cfi_endproc",
        ".size baton_test_frame, . - baton_test_frame",
        ".popsection",
        // Offsets are from the start of the function; there are no types; the call sites are in ULEB128.
        ".pushsection .gcc_except_table.baton_test_frame, \"a\", @progbits",
        ".Lbaton_test_table:",
        ".byte 0xff, 0xff, 0x01",
        ".uleb128 .Lbaton_test_sites_end - .Lbaton_test_sites",
        ".Lbaton_test_sites:",
        // Begin, length, landing pad, and that it cleans up.
        ".uleb128 .Lbaton_test_begin - .Lbaton_test_frame",
        ".uleb128 .Lbaton_test_end - .Lbaton_test_begin",
        ".uleb128 .Lbaton_test_end - .Lbaton_test_frame",
        ".uleb128 0",
        ".Lbaton_test_sites_end:",
        ".popsection",
        landed = const LANDED,
    );

    unsafe extern "C" {
        safe fn baton_test_frame(call: *mut c_void) -> *mut c_void;
    }

    unsafe extern "C-unwind" {
        fn pthread_exit(result: *mut c_void) -> !;
    }

    /// A handler, and what the frame calls.
    extern "C-unwind" fn end_thread(_signal: c_int) {
        // SAFETY: it ends a thread of `result_of`, whose frames have nothing to undo.
        unsafe { pthread_exit(std::ptr::without_provenance_mut(PAST)) }
    }

    /// The result of a thread that ends in the frame.
    fn result_of(call: *mut c_void) -> usize {
        let (mut thread, mut result) = (MaybeUninit::uninit(), null_mut());
        // SAFETY: places for the thread and its result; the first call has filled the first of them.
        unsafe {
            assert_eq!(libc::pthread_create(thread.as_mut_ptr(), std::ptr::null(), baton_test_frame, call), 0);
            assert_eq!(libc::pthread_join(thread.assume_init(), &mut result), 0);
        }
        result.addr()
    }

    /// A handler ends a thread at an instruction that the tables count among those of a call: the landing pad is not
    /// entered. If the thread ends in that call it is.
    #[test]
    fn an_interrupted_frame_is_passed_over() {
        let ends = end_thread as *const ();
        let mut before = MaybeUninit::uninit();
        // SAFETY: zero is a value of sigaction; an action that lives, and room for one. No other test raises SIGILL.
        unsafe {
            let action = libc::sigaction { sa_sigaction: ends as usize, ..zeroed() };
            assert_eq!(libc::sigaction(libc::SIGILL, &action, before.as_mut_ptr()), 0);
        }
        let interrupted = result_of(null_mut());
        // SAFETY: the first call has filled the action.
        unsafe { libc::sigaction(libc::SIGILL, before.as_ptr(), null_mut()) };
        assert_eq!((interrupted, result_of(ends.cast_mut().cast())), (PAST, LANDED));
    }
}
