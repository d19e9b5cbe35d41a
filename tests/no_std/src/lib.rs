//! Builds only if none of these crates brings in std: std has a panic handler of its own, and there can be but one.
#![no_std]

extern crate alloc;

pub use {baton_abi, baton_device, baton_image, baton_tcp, baton_wire};

use core::alloc::{GlobalAlloc, Layout};

struct Nothing;

// SAFETY: it never returns memory, which an allocator may do.
unsafe impl GlobalAlloc for Nothing {
    // SAFETY: see above.
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        core::ptr::null_mut()
    }

    // SAFETY: nothing was ever handed out.
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static ALLOCATOR: Nothing = Nothing;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
