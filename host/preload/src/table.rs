//! Maps a descriptor to what this library knows of it. Every intercepted call looks here, so it takes no lock.
//!
//! Entries are never freed, only reused for another descriptor. So a thread that still uses a descriptor which another thread
//! has closed reads a valid entry, and can harm only its own program.

use crate::epoll::Set;
use crate::tcp::Tcp;
use libc::c_int;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// What a descriptor refers to.
#[derive(Clone, Copy)]
pub(crate) enum File {
    /// A TCP socket.
    Tcp(&'static Tcp),
    /// An epoll set that holds TCP sockets.
    Set(&'static Set),
}

/// Number of descriptors that can be tracked; higher ones stay the kernel's.
const SIZE: usize = 1 << 20;

/// One pointer per descriptor; the lowest bit is set for a TCP socket (both types are aligned to more than 2). Pages are only
/// allocated for numbers in use.
static TABLE: [AtomicPtr<u8>; SIZE] = [const { AtomicPtr::new(std::ptr::null_mut()) }; SIZE];

/// One more than the highest descriptor ever tracked.
static END: AtomicUsize = AtomicUsize::new(0);

/// The TCP socket behind a descriptor.
#[inline(always)]
pub(crate) fn tcp(fd: c_int) -> Option<&'static Tcp> {
    as_tcp(TABLE.get(fd as u32 as usize)?.load(Ordering::Acquire))
}

/// What `look` finds in the TCP socket behind a descriptor: fewer instructions than `tcp(fd).and_then(look)`.
#[inline(always)]
pub(crate) fn in_tcp<T>(fd: c_int, look: impl FnOnce(&'static Tcp) -> Option<T>) -> Option<T> {
    let found = TABLE.get(fd as u32 as usize)?.load(Ordering::Acquire);
    if found as usize & 1 == 0 {
        return None;
    }
    // SAFETY: as in `as_tcp`.
    look(unsafe { &*found.wrapping_byte_sub(1).cast::<Tcp>() })
}

#[inline(always)]
fn as_tcp(found: *mut u8) -> Option<&'static Tcp> {
    if found as usize & 1 == 0 {
        return None;
    }
    // SAFETY: `put` stores only pointers from `&'static` references, tagged with the lowest bit for `Tcp`; nothing is ever
    // freed.
    Some(unsafe {
        std::hint::assert_unchecked(found as usize > 1);
        &*found.wrapping_byte_sub(1).cast::<Tcp>()
    })
}

/// What a descriptor refers to, if it is tracked.
#[inline(always)]
pub(crate) fn get(fd: c_int) -> Option<File> {
    let found = TABLE.get(fd as u32 as usize)?.load(Ordering::Acquire);
    if found.is_null() {
        return None;
    }
    if let Some(tcp) = as_tcp(found) {
        return Some(File::Tcp(tcp));
    }
    // SAFETY: as in `as_tcp`; the lowest bit is clear, so `put` stored a `&'static Set`.
    Some(File::Set(unsafe { &*found.cast::<Set>() }))
}

/// The set behind a descriptor.
pub(crate) fn set_of(fd: c_int) -> Option<&'static Set> {
    match get(fd)? {
        File::Set(set) => Some(set),
        File::Tcp(_) => None,
    }
}

/// Sets what a descriptor refers to; None if it is not tracked.
pub(crate) fn put(fd: c_int, file: Option<File>) {
    let value = match file {
        None => std::ptr::null_mut(),
        Some(File::Tcp(tcp)) => std::ptr::from_ref(tcp).cast_mut().cast::<u8>().wrapping_byte_add(1),
        Some(File::Set(set)) => std::ptr::from_ref(set).cast_mut().cast::<u8>(),
    };
    if let Some(slot) = TABLE.get(fd as u32 as usize) {
        if file.is_some() {
            END.fetch_max(fd as usize + 1, Ordering::AcqRel);
        }
        slot.store(value, Ordering::Release);
    }
}

/// One more than the highest descriptor ever tracked.
pub(crate) fn end() -> usize {
    END.load(Ordering::Relaxed)
}

/// All tracked descriptors from `first` to `last`.
pub(crate) fn known(first: u32, last: u32) -> impl Iterator<Item = (c_int, File)> {
    let end = END.load(Ordering::Acquire).min(last as usize + 1);
    (first as usize..end).filter_map(|at| Some((at as c_int, get(at as c_int)?)))
}
