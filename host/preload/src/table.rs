//! From a descriptor to what this library knows of it. Looked at by every call, so it takes no lock.
//!
//! What is found lives for ever: it is used again for another descriptor, never freed, so that a thread that is late with a closed
//! descriptor does harm to its own program alone.

use crate::epoll::Set;
use crate::tcp::Tcp;
use libc::c_int;
use std::sync::atomic::{AtomicPtr, Ordering};

/// What a descriptor stands for.
#[derive(Clone, Copy)]
pub(crate) enum File {
    /// A TCP socket.
    Tcp(&'static Tcp),
    /// An epoll set that holds TCP sockets.
    Set(&'static Set),
}

const PAGE: usize = 1024;
const PAGES: usize = 1024;

/// A page holds addresses; the lowest bit says that a set is meant. Both types are aligned to more than that.
struct Page([AtomicPtr<u8>; PAGE]);

static TABLE: [AtomicPtr<Page>; PAGES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; PAGES];

#[inline(always)]
fn slot(fd: c_int) -> Option<&'static AtomicPtr<u8>> {
    let at = fd as u32 as usize;
    let page = TABLE.get(at / PAGE)?.load(Ordering::Acquire);
    if page.is_null() {
        return None;
    }
    // SAFETY: pages are made once and never freed; the index is within one.
    Some(unsafe { &(&(*page).0)[at % PAGE] })
}

/// The TCP socket behind a descriptor.
#[inline(always)]
pub(crate) fn tcp(fd: c_int) -> Option<&'static Tcp> {
    let found = slot(fd)?.load(Ordering::Acquire);
    if found.is_null() || found as usize & 1 != 0 {
        return None;
    }
    // SAFETY: what is in the table was put there by `set`, from a reference that lives for ever.
    Some(unsafe { &*found.cast::<Tcp>() })
}

/// What a descriptor stands for, if it is known.
#[inline(always)]
pub(crate) fn get(fd: c_int) -> Option<File> {
    let found = slot(fd)?.load(Ordering::Acquire);
    if found.is_null() {
        return None;
    }
    if found as usize & 1 == 0 {
        // SAFETY: see `tcp`.
        return Some(File::Tcp(unsafe { &*found.cast::<Tcp>() }));
    }
    // SAFETY: see `tcp`; the lowest bit says which type it is.
    Some(File::Set(unsafe { &*found.map_addr(|address| address & !1).cast::<Set>() }))
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
    let at = fd as u32 as usize;
    let Some(page) = TABLE.get(at / PAGE) else { return };
    if page.load(Ordering::Acquire).is_null() {
        if file.is_none() {
            return;
        }
        let made = Box::into_raw(Box::new(Page([const { AtomicPtr::new(std::ptr::null_mut()) }; PAGE])));
        if page.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: made above, and nobody else has seen it.
            drop(unsafe { Box::from_raw(made) });
        }
    }
    let value = match file {
        None => std::ptr::null_mut(),
        Some(File::Tcp(tcp)) => std::ptr::from_ref(tcp).cast_mut().cast::<u8>(),
        Some(File::Set(set)) => std::ptr::from_ref(set).cast_mut().cast::<u8>().map_addr(|address| address | 1),
    };
    if let Some(slot) = slot(fd) {
        slot.store(value, Ordering::Release);
    }
}

/// Every known descriptor from `first` to `last`.
pub(crate) fn known(first: u32, last: u32) -> impl Iterator<Item = (c_int, File)> {
    let last = (last as usize).min(PAGE * PAGES - 1);
    (first as usize / PAGE..=last / PAGE)
        .filter(|page| TABLE.get(*page).is_some_and(|page| !page.load(Ordering::Acquire).is_null()))
        .flat_map(|page| page * PAGE..(page + 1) * PAGE)
        .filter(move |at| (first as usize..=last).contains(at))
        .filter_map(|at| Some((at as c_int, get(at as c_int)?)))
}
