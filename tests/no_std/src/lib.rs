//! Builds only if none of these crates brings in std: std has a panic handler of its own, and there can be only one.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub use {
    baton_abi, baton_core, baton_device, baton_filter, baton_image, baton_lro, baton_matching, baton_moderation, baton_moves, baton_offloads, baton_resolution, baton_rmpp,
    baton_policy, baton_supervision, baton_tables, baton_tcp, baton_tso, baton_wire,
};

/// The crates allocate, so a global allocator is needed. This one is never called.
#[global_allocator]
static ALLOCATOR: emballoc::Allocator<4096> = emballoc::Allocator::new();

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
