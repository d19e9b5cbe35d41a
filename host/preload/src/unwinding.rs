//! A thread that a signal handler ends, by pthread_exit(3), while it is in one of the library's functions.
//!
//! The C library then unwinds the stack from the interrupted instruction (a forced unwind). Rust's tables list only the
//! calls of a function as places from which it can unwind. At any other instruction, for example `ret`, Rust's
//! personality routine returns an error, and the C library aborts the process.
//!
//! The routine here lets a forced unwind continue to the next frame instead. Nothing has to be cleaned up in this one:
//! signals are deferred inside a [`crate::whole::Whole`], and values with a destructor exist only inside one.
//!
//! The linker replaces Rust's routine by this one (`--wrap`, build.rs).

use std::ffi::c_int;

/// Bit of the argument `actions`: the unwind is forced (Itanium C++ ABI, `_UA_FORCE_UNWIND`).
const FORCED: c_int = 8;
/// Results of a personality routine: `_URC_FATAL_PHASE2_ERROR` and `_URC_CONTINUE_UNWIND`.
const FATAL: c_int = 2;
const GOES_ON: c_int = 8;

std::arch::global_asm!(
    ".pushsection .text.baton_personality, \"ax\", @progbits",
    // Undefined in Rust programs that link this crate, such as its unit tests: they are linked without `--wrap`.
    ".weak __real_rust_eh_personality",
    ".hidden __wrap_rust_eh_personality",
    ".globl __wrap_rust_eh_personality",
    ".type __wrap_rust_eh_personality, @function",
    "__wrap_rust_eh_personality:",
    ".cfi_startproc",
    "push rbx",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbx, -16",
    "mov ebx, esi",
    "call qword ptr [rip + __real_rust_eh_personality@GOTPCREL]",
    "test ebx, {forced}",
    "jz 2f",
    "mov ecx, {goes_on}",
    "cmp eax, {fatal}",
    "cmove eax, ecx",
    "2:",
    "pop rbx",
    ".cfi_def_cfa_offset 8",
    "ret",
    ".cfi_endproc",
    ".size __wrap_rust_eh_personality, . - __wrap_rust_eh_personality",
    ".popsection",
    forced = const FORCED,
    fatal = const FATAL,
    goes_on = const GOES_ON,
);
