//! From a descriptor to what this library knows of it. Looked at by every call, so it takes no lock.
//!
//! What is found lives for ever: it is used again for another descriptor, never freed, so that a thread that is late with a closed
//! descriptor does harm to its own program alone.

use crate::epoll::Set;
use crate::tcp::Tcp;
use libc::c_int;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// What a descriptor stands for.
#[derive(Clone, Copy)]
pub(crate) enum File {
    /// A TCP socket.
    Tcp(&'static Tcp),
    /// An epoll set that holds TCP sockets.
    Set(&'static Set),
}

/// Descriptors that this library can know; the others stay the kernel's.
const SIZE: usize = 1 << 20;

/// An address for each descriptor; the lowest bit says that a TCP socket is meant. Both types are aligned to more than that. Only the
/// pages of the numbers in use take memory.
static TABLE: [AtomicPtr<u8>; SIZE] = [const { AtomicPtr::new(std::ptr::null_mut()) }; SIZE];

/// Above every descriptor that was ever known.
static END: AtomicUsize = AtomicUsize::new(0);

/// The TCP socket behind a descriptor.
#[inline(always)]
pub(crate) fn tcp(fd: c_int) -> Option<&'static Tcp> {
    as_tcp(TABLE.get(fd as u32 as usize)?.load(Ordering::Acquire))
}

#[inline(always)]
fn as_tcp(found: *mut u8) -> Option<&'static Tcp> {
    if found as usize & 1 == 0 {
        return None;
    }
    // SAFETY: what is in the table was put there by `put`, from a reference that lives for ever; the lowest bit says to what.
    Some(unsafe {
        std::hint::assert_unchecked(found as usize > 1);
        &*found.wrapping_byte_sub(1).cast::<Tcp>()
    })
}

/// What a descriptor stands for, if it is known.
#[inline(always)]
pub(crate) fn get(fd: c_int) -> Option<File> {
    let found = TABLE.get(fd as u32 as usize)?.load(Ordering::Acquire);
    if found.is_null() {
        return None;
    }
    if let Some(tcp) = as_tcp(found) {
        return Some(File::Tcp(tcp));
    }
    // SAFETY: see `as_tcp`; the lowest bit says which type it is.
    Some(File::Set(unsafe { &*found.cast::<Set>() }))
}

/// The set behind a descriptor.
pub(crate) fn set_of(fd: c_int) -> Option<&'static Set> {
    match get(fd)? {
        File::Set(set) => Some(set),
        File::Tcp(_) => None,
    }
}

/// Says what a descriptor stands for; None for nothing that matters here.
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

/// Every known descriptor from `first` to `last`.
pub(crate) fn known(first: u32, last: u32) -> impl Iterator<Item = (c_int, File)> {
    let end = END.load(Ordering::Acquire).min(last as usize + 1);
    (first as usize..end).filter_map(|at| Some((at as c_int, get(at as c_int)?)))
}
