//! A thread that a signal handler ends, by pthread_exit(3), while it is in one of the library's functions.
//!
//! The C library then unwinds the stack from the instruction at which the signal came (a forced unwind). That may be any, for example the
//! last one of a function, after all parts that must stay whole ([`crate::whole`]). Rust lists the instructions of a function at which
//! something may unwind, its calls; at another one its personality routine ends the process without a word. There is nothing to clean up
//! there, since what must be undone is held in such parts only: the unwind goes on.
//!
//! The linker puts this routine in the place of Rust's (build.rs, `--wrap`).

use std::ffi::c_int;

/// Of the unwinder's actions: the unwind is forced (Itanium C++ ABI, `_UA_FORCE_UNWIND`).
const FORCED: c_int = 8;
/// Of a personality routine's answers: `_URC_FATAL_PHASE2_ERROR` and `_URC_CONTINUE_UNWIND`.
const FATAL: c_int = 2;
const GOES_ON: c_int = 8;

std::arch::global_asm!(
    ".pushsection .text.baton_personality, \"ax\", @progbits",
    // Missing where this crate is linked into a Rust program, which nothing preloads.
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
