//! Handles: a slot's number and a generation in 32 bits, never 0. A handle of an earlier occupant of the slot is
//! recognised.

/// Most slots that handles can name.
pub const SLOTS: usize = 1 << 16;

/// The handle of a slot. Generations begin at 1.
pub const fn new(slot: usize, generation: u16) -> u32 {
    slot as u32 | (generation as u32) << 16
}

/// The slot of a handle.
pub const fn slot(handle: u32) -> usize {
    (handle & 0xffff) as usize
}

/// The generation behind this one; 0 is left out.
pub const fn next_generation(generation: u16) -> u16 {
    match generation.wrapping_add(1) {
        0 => 1,
        next => next,
    }
}
