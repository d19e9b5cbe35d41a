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
/// After what comes first (the last expression, which gets the function's first arguments) control jumps to the C
/// library's function, with stack and registers unchanged.
#[cfg(target_arch = "x86_64")]
macro_rules! jumps {
    ($($name:ident = $symbol:literal, $at:ident, $prepare:ident($($argument:ident: $type:ty),*), $first:expr;)*) => {$(
        static $at: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

        extern "C" fn $prepare($($argument: $type),*) {
            $first;
            $at.store($crate::real::address($symbol), std::sync::atomic::Ordering::Relaxed);
        }

        /// Intercepts the C library's function of this name.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub extern "C" fn $name() {
            // Saves six argument registers, al, which says how many vector registers have arguments, and those; then
            // the stack is as it was.
            std::arch::naked_asm!(
                "push rax", "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
                "sub rsp, 128",
                "movups [rsp + 0], xmm0",
                "movups [rsp + 16], xmm1",
                "movups [rsp + 32], xmm2",
                "movups [rsp + 48], xmm3",
                "movups [rsp + 64], xmm4",
                "movups [rsp + 80], xmm5",
                "movups [rsp + 96], xmm6",
                "movups [rsp + 112], xmm7",
                "call {prepare}",
                "movups xmm0, [rsp + 0]",
                "movups xmm1, [rsp + 16]",
                "movups xmm2, [rsp + 32]",
                "movups xmm3, [rsp + 48]",
                "movups xmm4, [rsp + 64]",
                "movups xmm5, [rsp + 80]",
                "movups xmm6, [rsp + 96]",
                "movups xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi", "pop rax",
                "jmp qword ptr [rip + {at}]",
                prepare = sym $prepare,
                at = sym $at,
            )
        }
    )*};
}
#[cfg(target_arch = "x86_64")]
pub(crate) use jumps;
