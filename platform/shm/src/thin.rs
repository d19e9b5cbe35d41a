//! Bytes behind a pointer of one word.

use core::ops::Deref;
use core::ptr::NonNull;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

/// Bytes in a single allocation, which begins with their number: what holds them is one word, where a `Box<[u8]>` has two.
pub struct ThinBytes(NonNull<u8>);

/// Bytes in front of the bytes: their number.
const HEAD: usize = size_of::<u16>();

// SAFETY: it owns its bytes, as a Box does.
unsafe impl Send for ThinBytes {}
// SAFETY: as above; they never change.
unsafe impl Sync for ThinBytes {}

impl ThinBytes {
    /// Copies bytes. None if they are more than 65535.
    pub fn new(bytes: &[u8]) -> Option<ThinBytes> {
        let length = u16::try_from(bytes.len()).ok()?;
        let layout = Self::layout(length)?;
        // SAFETY: the layout's size is not 0.
        let place = unsafe { alloc(layout) };
        let Some(place) = NonNull::new(place) else { handle_alloc_error(layout) };
        // SAFETY: `place` is new memory for a u16, to which it is aligned, and as many bytes behind it as are copied.
        unsafe {
            place.cast::<u16>().write(length);
            place.add(HEAD).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len());
        }
        Some(ThinBytes(place))
    }

    fn layout(length: u16) -> Option<Layout> {
        Layout::from_size_align(HEAD + usize::from(length), align_of::<u16>()).ok()
    }

    fn length(&self) -> u16 {
        // SAFETY: `new` has written it there.
        unsafe { self.0.cast::<u16>().read() }
    }
}

impl Deref for ThinBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `new` has written as many bytes behind the length, and nobody else has them.
        unsafe { core::slice::from_raw_parts(self.0.add(HEAD).as_ptr(), self.length().into()) }
    }
}

impl Drop for ThinBytes {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.length()) {
            // SAFETY: `new` has allocated it with this layout.
            unsafe { dealloc(self.0.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_kept_behind_one_word() {
        for length in [0, 1, 2, 150, 65535] {
            let bytes: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let thin = ThinBytes::new(&bytes).expect("they are few enough");
            assert_eq!(*thin, *bytes);
        }
        assert!(ThinBytes::new(&[0; 65536]).is_none());
        assert_eq!(size_of::<Option<ThinBytes>>(), size_of::<usize>());
    }
}
