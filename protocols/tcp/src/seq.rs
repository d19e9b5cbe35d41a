//! Sequence number arithmetic modulo 2³² (RFC 9293 section 3.4).

/// Whether `a` comes before `b`.
#[inline]
pub const fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// Whether `a` is `b` or comes before it.
#[inline]
pub const fn at_or_before(a: u32, b: u32) -> bool {
    !before(b, a)
}

/// The later of two sequence numbers.
#[inline]
pub const fn later(a: u32, b: u32) -> u32 {
    if before(a, b) { b } else { a }
}

/// The earlier of two sequence numbers.
#[inline]
pub const fn earlier(a: u32, b: u32) -> u32 {
    if before(a, b) { a } else { b }
}

/// Number of sequence numbers from `first` on that come before `end`; 0 if `end` has been passed.
#[inline]
pub const fn left(first: u32, end: u32) -> u32 {
    if before(first, end) { end.wrapping_sub(first) } else { 0 }
}

/// The sequence number in `[first, last]` that is nearest to `seq`.
pub const fn clamp(seq: u32, first: u32, last: u32) -> u32 {
    earlier(later(seq, first), last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_wraps() {
        assert!(before(u32::MAX, 0));
        assert!(!before(0, u32::MAX));
        assert!(at_or_before(5, 5));
        assert_eq!(later(u32::MAX - 1, 3), 3);
        assert_eq!(earlier(u32::MAX - 1, 3), u32::MAX - 1);
        assert_eq!((left(u32::MAX, 3), left(3, 3), left(4, 3)), (4, 0, 0));
    }
}
