//! Bytes behind a pointer of one word.

use crate::pool::Pool;
use core::ops::Deref;
use core::ptr::NonNull;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

/// Bytes in a single allocation, which begins with their number. So the handle is one word, where a `Box<[u8]>` has
/// two.
///
/// Up to a few hundred bytes lie in a pool of their size class, apart from short-lived allocations. So long-lived bytes
/// do not keep pages in use that short-lived allocations have left, and these pages can go back to the system.
pub struct ThinBytes(NonNull<u8>);

/// Bytes in front of the bytes: their number.
const HEAD: usize = size_of::<u16>();

macro_rules! pools {
    ($($name:ident: $bytes:literal),*) => {
        $(
            static $name: Pool<[u16; $bytes / 2]> = Pool::new();
        )*

        /// A place for this many bytes, aligned to a `u16`. None if no pool has such places.
        fn take(bytes: usize) -> Option<NonNull<u8>> {
            $(
                if bytes <= $bytes {
                    return Some($name.take().cast());
                }
            )*
            None
        }

        /// Gives back a place that [`take`] has returned for this many bytes. False if no pool has such places.
        fn give_back(place: NonNull<u8>, bytes: usize) -> bool {
            $(
                if bytes <= $bytes {
                    $name.give_back(place.cast());
                    return true;
                }
            )*
            false
        }
    };
}
pools!(P64: 64, P96: 96, P112: 112, P128: 128, P144: 144, P160: 160, P176: 176, P192: 192, P224: 224, P256: 256, P320: 320);

// SAFETY: it owns its bytes, as a Box does.
unsafe impl Send for ThinBytes {}
// SAFETY: the bytes never change after `new` has written them, so that threads may read them at once.
unsafe impl Sync for ThinBytes {}

impl ThinBytes {
    /// Copies bytes. None if they are more than 65535.
    pub fn new(bytes: &[u8]) -> Option<ThinBytes> {
        let length = u16::try_from(bytes.len()).ok()?;
        let layout = Self::layout(length)?;
        // SAFETY: the layout's size is not 0.
        let place = take(layout.size()).or_else(|| NonNull::new(unsafe { alloc(layout) }));
        let Some(place) = place else { handle_alloc_error(layout) };
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
        // SAFETY: `new` has written as many bytes behind the length, and they belong to this handle alone.
        unsafe { core::slice::from_raw_parts(self.0.add(HEAD).as_ptr(), self.length().into()) }
    }
}

impl Drop for ThinBytes {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.length())
            && !give_back(self.0, layout.size())
        {
            // SAFETY: no pool has places of this size, so `new` has allocated it with this layout.
            unsafe { dealloc(self.0.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_kept_behind_one_word() {
        for length in [0, 1, 2, 62, 63, 150, 318, 319, 65535] {
            let bytes: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let thin = ThinBytes::new(&bytes).expect("they are few enough");
            assert_eq!(*thin, *bytes);
        }
        assert!(ThinBytes::new(&[0; 65536]).is_none());
        assert_eq!(size_of::<Option<ThinBytes>>(), size_of::<usize>());
    }

    #[test]
    fn bytes_of_about_the_same_number_lie_close_to_each_other() {
        let thin: Vec<_> = (0..100).map(|n| ThinBytes::new(&[n; 120]).expect("they are few enough")).collect();
        let places = thin.iter().map(|bytes| bytes.0.addr().get());
        let (first, last) = (places.clone().min().unwrap(), places.max().unwrap());
        assert_eq!(last - first, 99 * 128);
        assert!(thin.iter().zip(0..).all(|(bytes, n)| **bytes == [n; 120]));
    }
}
