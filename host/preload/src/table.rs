//! Maps a descriptor to what this library knows of it. Every intercepted call looks here, so it takes no lock.
//!
//! Entries are never freed, only reused for another descriptor. So a thread that still uses a descriptor which another
//! thread has closed reads a valid entry, and can harm only its own program.
//!
//! The kernel wipes the table in a child that has a copy of this memory. One that this library has seen coming takes it
//! back ([`restore`]). Any other one, made by instructions of the program's own for example, finds nothing tracked: all
//! its calls are the kernel's. It shares the memory of its parent's session, but uses none of it.
//!
//! A child of vfork(2) has this very table, its parent's, but descriptors of its own: it may close a number and open a
//! file that gets it. So nothing is tracked for it, and it changes nothing here. A socket of its parent's that it uses
//! or duplicates is restored first ([`forks`](crate::forks)).

use crate::epoll::Set;
use crate::rings::Ring;
use crate::tcp::Tcp;
use crate::{forks, whole};
use baton_ring::give_way;
use libc::c_int;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicUsize, Ordering};

/// What a descriptor refers to.
#[derive(Clone, Copy)]
pub(crate) enum File {
    /// A TCP socket.
    Tcp(&'static Tcp),
    /// An epoll set that holds TCP sockets.
    Set(&'static Set),
    /// A ring of io_uring(7).
    Ring(&'static Ring),
}

/// Number of descriptors that can be tracked; higher ones stay the kernel's.
const SIZE: usize = 1 << 20;

/// One pointer per descriptor; the lowest bit is set for a TCP socket, the next one for a ring, the one above while a
/// thread changes what the descriptor refers to (all types are aligned to more than 4). Pages are only allocated for
/// numbers in use.
type Entries = [AtomicPtr<u8>; SIZE];

/// Bit of an entry for a ring.
const RING: usize = 2;

/// Bit of an entry that is being changed ([`Change`]).
const CHANGING: usize = 4;

/// Pages of its own that the kernel wipes in a child.
#[repr(C, align(4096))]
struct Wiped {
    entries: Entries,
    /// They are as this process has written them.
    is_whole: AtomicBool,
}

static TABLE: Wiped = Wiped { entries: [const { AtomicPtr::new(std::ptr::null_mut()) }; SIZE], is_whole: AtomicBool::new(false) };

/// The same entries, in memory that is copied for a child.
static COPY: Entries = [const { AtomicPtr::new(std::ptr::null_mut()) }; SIZE];

/// Descriptors are tracked.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// What the number of a descriptor must be below for the fast path ([`TcpEntry`]): as many as can be tracked, less
/// [`CHILD`] for each vfork(2) of this process that is under way. While there is a child that has this memory, no
/// thread takes the fast path, which does not ask whose the descriptor is.
static FAST_END: AtomicI64 = AtomicI64::new(SIZE as i64);

/// More than there are descriptors.
const CHILD: i64 = 1 << 32;

/// One more than the highest descriptor ever tracked.
static END: AtomicUsize = AtomicUsize::new(0);

/// The TCP socket behind a descriptor.
#[inline(always)]
pub(crate) fn tcp(fd: c_int) -> Option<&'static Tcp> {
    as_tcp(entry(fd)?)
}

/// The entry of a descriptor, once no other thread is changing what it refers to.
#[inline(always)]
fn entry(fd: c_int) -> Option<*mut u8> {
    let slot = TABLE.entries.get(fd as u32 as usize)?;
    let found = slot.load(Ordering::Acquire);
    if !found.is_null() && forks::is_child_of_vfork() {
        // It waits for no thread of its parent's, which may have ended.
        forks::restore_for_child(fd, file(found));
        return None;
    }
    Some(if found as usize & CHANGING == 0 { found } else { settled(slot) })
}

/// An entry once no other thread is changing it. If this thread is, its own mark: the descriptor counts as untracked.
#[cold]
fn settled(slot: &AtomicPtr<u8>) -> *mut u8 {
    let mut round = 0;
    loop {
        let found = slot.load(Ordering::Acquire);
        if found as usize & CHANGING == 0 || found == mark() {
            return found;
        }
        give_way(round);
        round += 1;
    }
}

/// The entry of a descriptor that the calling thread is changing.
fn mark() -> *mut u8 {
    std::ptr::from_ref(whole::here()).cast_mut().cast::<u8>().wrapping_byte_add(CHANGING)
}

/// An entry that is a TCP socket's. Looking for this and then at the socket takes fewer instructions than [`tcp`].
#[derive(Clone, Copy)]
pub(crate) struct TcpEntry(NonNull<u8>);

impl TcpEntry {
    /// That of a descriptor. None also while another thread changes what the descriptor refers to, and while this
    /// process has a child of vfork(2).
    #[inline(always)]
    pub fn of(fd: c_int) -> Option<TcpEntry> {
        let at = i64::from(fd as u32);
        // As `at >= FAST_END.load(RELAXED)`, for which the compiler loads the number into a register first.
        #[cfg(target_arch = "x86_64")]
        // SAFETY: reads a number of this library's own.
        unsafe {
            std::arch::asm!(
                "cmp {}, qword ptr [rip + {}]",
                "jge {}",
                in(reg) at,
                sym FAST_END,
                label { return None },
                options(nostack)
            );
        }
        #[cfg(not(target_arch = "x86_64"))]
        if at >= FAST_END.load(Ordering::Relaxed) {
            return None;
        }
        // SAFETY: `FAST_END` is never more than the number of entries.
        let found = unsafe { TABLE.entries.get_unchecked(at as usize) }.load(Ordering::Acquire);
        // SAFETY: a pointer with the lowest bit set is not null.
        (found as usize & 1 != 0).then(|| TcpEntry(unsafe { NonNull::new_unchecked(found) }))
    }

    /// The socket.
    #[inline(always)]
    pub fn tcp(self) -> &'static Tcp {
        // SAFETY: `put` stores only pointers from `&'static` references, tagged with the lowest bit for `Tcp`; nothing
        // is ever freed.
        unsafe { &*self.0.as_ptr().wrapping_byte_sub(1).cast::<Tcp>() }
    }
}

#[inline(always)]
fn as_tcp(found: *mut u8) -> Option<&'static Tcp> {
    if found as usize & 1 == 0 {
        return None;
    }
    // SAFETY: `put` stores only pointers from `&'static` references, tagged with the lowest bit for `Tcp`; nothing is
    // ever freed.
    Some(unsafe {
        std::hint::assert_unchecked(found as usize > 1);
        &*found.wrapping_byte_sub(1).cast::<Tcp>()
    })
}

/// What a descriptor refers to, if it is tracked.
#[inline(always)]
pub(crate) fn get(fd: c_int) -> Option<File> {
    file(entry(fd)?)
}

#[inline(always)]
fn file(found: *mut u8) -> Option<File> {
    if found.is_null() || found as usize & CHANGING != 0 {
        return None;
    }
    if let Some(tcp) = as_tcp(found) {
        return Some(File::Tcp(tcp));
    }
    if found as usize & RING != 0 {
        // SAFETY: `put` stores only pointers from `&'static` references, and sets this bit for a `Ring` alone; nothing
        // is ever freed.
        return Some(File::Ring(unsafe { &*found.wrapping_byte_sub(RING).cast::<Ring>() }));
    }
    // SAFETY: `put` stores only pointers from `&'static` references; both bits are clear, so this one is of a `Set`;
    // nothing is ever freed.
    Some(File::Set(unsafe { &*found.cast::<Set>() }))
}

/// The set behind a descriptor.
pub(crate) fn set_of(fd: c_int) -> Option<&'static Set> {
    match get(fd)? {
        File::Set(set) => Some(set),
        File::Tcp(_) | File::Ring(_) => None,
    }
}

/// The ring behind a descriptor.
pub(crate) fn ring(fd: c_int) -> Option<&'static Ring> {
    match get(fd)? {
        File::Ring(ring) => Some(ring),
        File::Tcp(_) | File::Set(_) => None,
    }
}

/// Sets what a descriptor refers to; None if it is not tracked. Does nothing in a child of vfork(2).
pub(crate) fn put(fd: c_int, file: Option<File>) {
    if forks::is_child_of_vfork() {
        return;
    }
    let value = match file {
        None => std::ptr::null_mut(),
        Some(File::Tcp(tcp)) => std::ptr::from_ref(tcp).cast_mut().cast::<u8>().wrapping_byte_add(1),
        Some(File::Ring(ring)) => std::ptr::from_ref(ring).cast_mut().cast::<u8>().wrapping_byte_add(RING),
        Some(File::Set(set)) => std::ptr::from_ref(set).cast_mut().cast::<u8>(),
    };
    if let (Some(slot), Some(copy)) = (TABLE.entries.get(fd as u32 as usize), COPY.get(fd as u32 as usize)) {
        if file.is_some() {
            END.fetch_max(fd as usize + 1, Ordering::AcqRel);
        }
        copy.store(value, Ordering::Release);
        slot.store(value, Ordering::Release);
    }
}

/// Begins to track descriptors.
pub(crate) fn begin() {
    let length = size_of::<Wiped>();
    // SAFETY: whole pages of this library's own, which stay. Where the kernel cannot do it (before Linux 4.14) a child
    // has a copy.
    unsafe { libc::madvise(std::ptr::from_ref(&TABLE).cast_mut().cast(), length, libc::MADV_WIPEONFORK) };
    TABLE.is_whole.store(true, Ordering::Release);
    BEGUN.store(true, Ordering::Release);
}

/// Unlocks the tables, which mlockall(2) has locked as a whole with the program's memory.
pub(crate) fn unlock() {
    for (start, length) in [((&raw const TABLE).cast(), size_of::<Wiped>()), ((&raw const COPY).cast(), size_of::<Entries>())] {
        // SAFETY: this library's own memory, whose pages may be written to disk, which changes nothing of what they
        // hold.
        unsafe { libc::munlock(start, length) };
    }
}

/// Whether this process is a child that this library has not seen coming: it may take no lock, and has no plan.
pub(crate) fn is_wiped() -> bool {
    BEGUN.load(Ordering::Relaxed) && !TABLE.is_whole.load(Ordering::Relaxed)
}

/// Keeps all threads off the fast path until as many calls of [`allow_fast`] have followed: a child of vfork(2) will
/// have this memory.
pub(crate) fn forbid_fast() {
    FAST_END.fetch_sub(CHILD, Ordering::SeqCst);
}

/// Takes back so many calls of [`forbid_fast`].
pub(crate) fn allow_fast(times: u32) {
    FAST_END.fetch_add(i64::from(times) * CHILD, Ordering::SeqCst);
}

/// Takes the table back in a child. Takes no lock and no memory.
pub(crate) fn restore() {
    // A thread of the parent may have been in vfork(2).
    FAST_END.store(SIZE as i64, Ordering::SeqCst);
    for (slot, copy) in TABLE.entries.iter().zip(&COPY).take(end()) {
        slot.store(copy.load(Ordering::Acquire), Ordering::Release);
    }
    TABLE.is_whole.store(true, Ordering::Release);
}

/// One more than the highest descriptor ever tracked.
pub(crate) fn end() -> usize {
    END.load(Ordering::Relaxed)
}

/// All tracked descriptors from `first` to `last`, without those that are being changed. In a child of vfork(2): those
/// of its parent.
pub(crate) fn known(first: u32, last: u32) -> impl Iterator<Item = (c_int, File)> {
    let end = END.load(Ordering::Acquire).min(last as usize + 1);
    (first as usize..end).filter_map(|at| Some((at as c_int, file(TABLE.entries.get(at)?.load(Ordering::Acquire))?)))
}

/// Marks a descriptor's entry while the calling thread closes the descriptor, or replaces it by dup2(2). The kernel's
/// table and this one cannot change at the same time, so other threads that look the descriptor up wait until this is
/// dropped. Otherwise they could find no entry while the kernel still has the socket there, which may be a shell; or an
/// entry for a descriptor that is closed. If no new entry was put, the descriptor is not tracked afterwards.
///
/// Meanwhile no signal handler may run in this thread ([`whole`]). It may look up no other descriptor, and hold no lock
/// that a waiting thread may need: either could be a deadlock.
#[must_use]
pub(crate) struct Change {
    slot: &'static AtomicPtr<u8>,
    mark: *mut u8,
}

impl Change {
    /// Begins to change a descriptor. None if it cannot be tracked. Not for a child of vfork(2).
    pub fn begin(fd: c_int) -> Option<Change> {
        let slot = TABLE.entries.get(fd as u32 as usize)?;
        while !Change::replace(slot, settled(slot)) {}
        Some(Change::begun(fd, slot))
    }

    /// Begins to change a descriptor of this socket. None if it is not one any more.
    pub fn begin_of(fd: c_int, tcp: &'static Tcp) -> Option<Change> {
        let slot = TABLE.entries.get(fd as u32 as usize)?;
        let tagged = std::ptr::from_ref(tcp).cast_mut().cast::<u8>().wrapping_byte_add(1);
        Change::replace(slot, tagged).then(|| Change::begun(fd, slot))
    }

    fn replace(slot: &AtomicPtr<u8>, last: *mut u8) -> bool {
        slot.compare_exchange(last, mark(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn begun(fd: c_int, slot: &'static AtomicPtr<u8>) -> Change {
        // A child would wait for ever: there it is not tracked.
        if let Some(copy) = COPY.get(fd as u32 as usize) {
            copy.store(std::ptr::null_mut(), Ordering::Release);
        }
        Change { slot, mark: mark() }
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        let _ = self.slot.compare_exchange(self.mark, std::ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed);
    }
}
