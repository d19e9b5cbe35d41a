//! The functions of the C library that this library intercepts, by family.

mod descriptors;
mod events;
mod longjmp;
mod memory;
mod processes;
mod signals;
mod splice;
mod stdio;
mod transfer;

pub(crate) use events::epoll_ctl;
pub(crate) use stdio::is_standard;

/// Intercepts functions that cannot be called from here: they return twice, or take a variable number of arguments.
/// The last expression of each line runs first, with the function's first arguments; then control jumps to the C
/// library's function, with stack and registers unchanged.
#[cfg(target_arch = "x86_64")]
macro_rules! jumps {
    ($($name:ident = $symbol:literal, $at:ident, $prepare:ident($($argument:ident: $type:ty),*), $first:expr;)*) => {$(
        static $at: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

        extern "C-unwind" fn $prepare($($argument: $type),*) {
            $first;
            $at.store($crate::real::address($symbol), std::sync::atomic::Ordering::Relaxed);
        }

        /// Intercepts the C library's function of this name.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub extern "C" fn $name() {
            // Saves six argument registers, al, which says how many vector registers have arguments, and those; then
            // the stack is as it was. An unwinder, such as that of pthread_exit, can continue from each instruction.
            std::arch::naked_asm!(
                ".cfi_startproc",
                "sub rsp, 184",
                ".cfi_adjust_cfa_offset 184",
                "movups [rsp + 0], xmm0",
                "movups [rsp + 16], xmm1",
                "movups [rsp + 32], xmm2",
                "movups [rsp + 48], xmm3",
                "movups [rsp + 64], xmm4",
                "movups [rsp + 80], xmm5",
                "movups [rsp + 96], xmm6",
                "movups [rsp + 112], xmm7",
                "mov [rsp + 128], rax",
                "mov [rsp + 136], rdi",
                "mov [rsp + 144], rsi",
                "mov [rsp + 152], rdx",
                "mov [rsp + 160], rcx",
                "mov [rsp + 168], r8",
                "mov [rsp + 176], r9",
                "call {prepare}",
                "movups xmm0, [rsp + 0]",
                "movups xmm1, [rsp + 16]",
                "movups xmm2, [rsp + 32]",
                "movups xmm3, [rsp + 48]",
                "movups xmm4, [rsp + 64]",
                "movups xmm5, [rsp + 80]",
                "movups xmm6, [rsp + 96]",
                "movups xmm7, [rsp + 112]",
                "mov rax, [rsp + 128]",
                "mov rdi, [rsp + 136]",
                "mov rsi, [rsp + 144]",
                "mov rdx, [rsp + 152]",
                "mov rcx, [rsp + 160]",
                "mov r8, [rsp + 168]",
                "mov r9, [rsp + 176]",
                "add rsp, 184",
                ".cfi_adjust_cfa_offset -184",
                "jmp qword ptr [rip + {at}]",
                ".cfi_endproc",
                prepare = sym $prepare,
                at = sym $at,
            )
        }
    )*};
}
#[cfg(target_arch = "x86_64")]
pub(crate) use jumps;
