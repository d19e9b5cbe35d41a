//! A copy without a call, for payload.

/// Copies `length` bytes as `copy_nonoverlapping` does. Up to 2 KB are copied without a function call, and with wide
/// registers where this is inlined into [`crate::Wide::run`]. Bytes in the middle may be written twice.
///
/// # Safety
/// That of `copy_nonoverlapping`.
#[inline(always)]
pub(crate) unsafe fn copy_inline(from: *const u8, to: *mut u8, length: usize) {
    /// Bytes behind 1024 that a segment of a usual Ethernet frame has at most: whole registers that cover 1448
    /// and 1460.
    const MOST_FULL: usize = 448;
    /// Copies `N` bytes at an offset: at most 256, since for more the compiler makes a function call.
    ///
    /// # Safety
    /// They must lie in both areas.
    #[inline(always)]
    unsafe fn piece<const N: usize>(from: *const u8, to: *mut u8, at: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if N <= 256 {
                *to.add(at).cast::<[u8; N]>() = *from.add(at).cast::<[u8; N]>();
            } else if N == MOST_FULL {
                *to.add(at).cast::<[u8; 256]>() = *from.add(at).cast::<[u8; 256]>();
                *to.add(at + 256).cast::<[u8; MOST_FULL - 256]>() = *from.add(at + 256).cast::<[u8; MOST_FULL - 256]>();
            } else {
                *to.add(at).cast::<[u8; 256]>() = *from.add(at).cast::<[u8; 256]>();
                *to.add(at + 256).cast::<[u8; 256]>() = *from.add(at + 256).cast::<[u8; 256]>();
            }
        }
    }
    let left = length;
    // SAFETY: each piece lies in the caller's `length` bytes, of which there are at least as many as lie before the end
    // of a piece that is copied at a fixed place, and as a piece has that is copied up to their end.
    unsafe {
        if left > 128 {
            if left > 1024 && left <= 1024 + MOST_FULL {
                piece::<512>(from, to, 0);
                piece::<512>(from, to, 512);
                piece::<MOST_FULL>(from, to, left - MOST_FULL);
            } else if left > 1024 {
                if left > 2048 {
                    return copy_long(from, to, left);
                }
                piece::<512>(from, to, 0);
                piece::<512>(from, to, 512);
                piece::<512>(from, to, left - 1024);
                piece::<512>(from, to, left - 512);
            } else if left > 512 {
                piece::<512>(from, to, 0);
                piece::<512>(from, to, left - 512);
            } else if left > 256 {
                piece::<256>(from, to, 0);
                piece::<256>(from, to, left - 256);
            } else {
                piece::<128>(from, to, 0);
                piece::<128>(from, to, left - 128);
            }
        } else if left > 64 {
            piece::<64>(from, to, 0);
            piece::<64>(from, to, left - 64);
        } else if left > 32 {
            piece::<32>(from, to, 0);
            piece::<32>(from, to, left - 32);
        } else if left >= 16 {
            piece::<16>(from, to, 0);
            piece::<16>(from, to, left - 16);
        } else if left >= 8 {
            piece::<8>(from, to, 0);
            piece::<8>(from, to, left - 8);
        } else if left >= 4 {
            piece::<4>(from, to, 0);
            piece::<4>(from, to, left - 4);
        } else if left > 0 {
            piece::<1>(from, to, 0);
            piece::<1>(from, to, left / 2);
            piece::<1>(from, to, left - 1);
        }
    }
}

/// Copies more bytes than a frame of the usual size has, with a function call.
///
/// # Safety
/// That of `copy_nonoverlapping`.
#[cold]
#[inline(never)]
unsafe fn copy_long(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { core::ptr::copy_nonoverlapping(from, to, length) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Wide;

    /// Copies all lengths up to some, and checks that nothing around is written.
    fn check_all_lengths() {
        let from: Vec<u8> = (0..3100).map(|at: u32| (at * 7 + 1) as u8).collect();
        for length in 0..3072 {
            let mut to = vec![0u8; length + 2];
            // SAFETY: `from` has 3100 bytes, of which none is in `to`, which has `length` behind its first one.
            unsafe { copy_inline(from.as_ptr(), to.as_mut_ptr().add(1), length) };
            assert_eq!(to[1..=length], from[..length]);
            assert_eq!((to[0], to[length + 1]), (0, 0));
        }
    }

    #[test]
    fn all_lengths_are_copied_whole() {
        check_all_lengths();
        if let Some(wide) = Wide::detect() {
            wide.run(check_all_lengths);
        }
    }
}
