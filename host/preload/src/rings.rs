//! Rings of io_uring(7), through which a program submits calls to the kernel.
//!
//! The entries that a program submits are in memory that it shares with the kernel. If the program submits them by the
//! C library's `syscall`, and no kernel thread polls the ring, the library sees each submission, and reads the entries
//! before the kernel does:
//!
//! - epoll_ctl(2) for a tracked socket or set is made here, so that the library's model of the set has it, and the
//!   entry becomes one that does nothing: its completion is that of a success. libuv (from 1.45 on) registers every
//!   descriptor so. One that fails is left for the kernel, which finds the same error, and is submitted before the next
//!   one is looked at.
//! - A connection that any other entry names, or that is registered with a ring, is restored and stays in the kernel.
//! - If the library cannot read a ring's entries, every connection of the process stays in the kernel, and `baton ls`
//!   says so.
//!
//! The program can write entries at any time, also after they were read here: that harms only itself. Its numbers are
//! bounded before they are used. No entry reaches the kernel unread: at most as many are submitted as were read, by one
//! thread at a time.

use crate::sections::Section;
use crate::table::{self, File};
use crate::{calls, faults, listening, process, real, thread, udp};
use baton_protocol::native::Native;
use baton_protocol::program::Until;
use baton_ring::Lock;
use libc::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

/// The cause for restoring connections, in lists.
const CAUSE: &str = "io_uring";

/// Flags with which a ring's submissions can be read here: all that Linux 6.18 knows except IORING_SETUP_SQPOLL,
/// SQ_AFF, NO_MMAP and REGISTERED_FD_ONLY.
const READABLE: u32 = 0x3_3ff9;
const SETUP_SUBMIT_ALL: u32 = 1 << 7;
const SETUP_SQE128: u32 = 1 << 10;
const SETUP_NO_SQARRAY: u32 = 1 << 16;
/// Needed features: IORING_FEAT_SINGLE_MMAP, NODROP, SUBMIT_STABLE.
const FEATURES: u32 = 7;
/// Most entries of a ring (Linux, IORING_MAX_ENTRIES).
const MOST_ENTRIES: u32 = 32768;
/// Offset at which a ring's entries are mapped.
const ENTRIES_AT: i64 = 0x1000_0000;

/// Flags of io_uring_enter(2).
const ENTER_GETEVENTS: u32 = 1;
const ENTER_REGISTERED_RING: u32 = 1 << 4;

/// io_uring_setup(2)'s parameters, as the kernel has filled them in.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Parameters {
    entries: u32,
    completions: u32,
    flags: u32,
    thread: [u32; 2],
    features: u32,
    unused: [u32; 4],
    submission: Offsets,
    completion: Offsets,
}

/// Where the words of a queue are. `last` is the array of the submissions' indices, or of the completions.
#[repr(C)]
#[derive(Clone, Copy)]
struct Offsets {
    head: u32,
    tail: u32,
    fixed: [u32; 3],
    counter: u32,
    last: [u32; 2],
    address: u64,
}

/// A submission.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Entry {
    opcode: u8,
    flags: u8,
    priority: u16,
    fd: c_int,
    offset: u64,
    address: u64,
    length: u32,
    options: u32,
    data: u64,
    buffer: u16,
    personality: u16,
    other: c_int,
    rest: [u64; 2],
}

const _: () = assert!(size_of::<Parameters>() == 120 && size_of::<Entry>() == 64);

// SAFETY: it consists of integers.
unsafe impl faults::Plain for Parameters {}

/// Flags of an entry.
const FIXED_FILE: u8 = 1;
const LINKS: u8 = 1 << 2 | 1 << 3;
const ASYNC: u8 = 1 << 4;
const SKIPS_SUCCESS: u8 = 1 << 6;

/// Operations.
const FILES_UPDATE: u8 = 20;
const CLOSE: u8 = 19;
const EPOLL_CTL: u8 = 29;
const SPLICES: [u8; 2] = [30, 33];
/// Flag of a splice: its source is a registered file.
const SPLICE_FROM_FIXED: u32 = 1 << 31;
/// Operations whose `fd` never names a connection: NOP, POLL_REMOVE, TIMEOUT and its relatives, ASYNC_CANCEL, buffers,
/// MSG_RING, SOCKET, WAITID, FUTEX, FIXED_FD_INSTALL.
const NAMELESS: [u8; 16] = [0, 7, 11, 12, 14, 15, 31, 32, 40, 45, 50, 51, 52, 53, 54, 20];

/// Operations of io_uring_register(2).
const REGISTER_FILES: u32 = 2;
const REGISTER_FILES_UPDATE: u32 = 6;
const REGISTER_FILES2: u32 = 13;
const REGISTER_FILES_UPDATE2: u32 = 14;
/// Operations of io_uring_register(2) that concern neither descriptors nor the way in which entries are submitted:
/// buffers, eventfds, probes, personalities, workers, cancellation.
const REGISTER_OTHERS: [u32; 28] =
    [0, 1, 3, 4, 5, 7, 8, 9, 10, 12, 15, 16, 17, 18, 19, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 34];
/// Most files of a ring (Linux, IORING_MAX_FIXED_FILES).
const MOST_FILES: usize = 1 << 20;

/// A mapping of a ring's, which the kernel and the program use, too.
struct Memory {
    base: *mut u8,
    length: usize,
}

impl Memory {
    fn map(fd: c_int, length: usize, offset: i64) -> Option<Memory> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, fd, offset) };
        (base != libc::MAP_FAILED).then(|| Memory { base: base.cast(), length })
    }

    /// The word at an offset, if it lies inside.
    fn word(&self, at: usize) -> Option<&AtomicU32> {
        let inside = at.is_multiple_of(4) && at.checked_add(4).is_some_and(|end| end <= self.length);
        // SAFETY: it lies in the mapping, which is aligned to a page and stays as long as its ring is open; others
        // write it as atomics do.
        inside.then(|| unsafe { &*self.base.add(at).cast::<AtomicU32>() })
    }

    fn unmap(&self) {
        // SAFETY: made by `map`; whoever closes a ring holds its lock, under which alone it is used.
        unsafe { libc::munmap(self.base.cast(), self.length) };
    }
}

/// A ring. Never freed.
#[repr(align(64))]
pub(crate) struct Ring {
    queue: Memory,
    entries: Memory,
    /// Offsets in `queue`.
    head: usize,
    tail: usize,
    completed_head: usize,
    completed_tail: usize,
    /// Offset of the array of indices; None if the kernel takes the entries in the order of the ring.
    array: Option<usize>,
    mask: u32,
    /// An entry with an error does not end a submission (IORING_SETUP_SUBMIT_ALL).
    submits_all: bool,
    /// log2 of an entry's bytes.
    shift: u32,
    /// Number of descriptors of this ring.
    names: AtomicU32,
    /// Whether it is open. Held while entries are read and submitted.
    open: Lock<bool>,
}

// SAFETY: the mappings are not bound to a thread. Their words are reached as atomics, and entries by copies, of any
// bytes.
unsafe impl Sync for Ring {}
// SAFETY: the mappings are not bound to a thread, and stay until the ring is closed, whichever thread does that.
unsafe impl Send for Ring {}

/// How an entry is handled.
enum Judged {
    /// The kernel gets it unchanged.
    Kernels,
    /// Its call was made here with success: the kernel gets an entry that does nothing in its place.
    Made,
    /// Its call was made here and failed: the kernel gets it unchanged, so that it reports the same error, before the
    /// next entry is handled.
    Failed,
    /// As `Failed`, with an error after which the kernel submits no further entries.
    Ends,
}

/// Whether this process's rings have to be read, since it may have connections on the NIC.
fn are_watched() -> bool {
    process::plan().is_some() && !process::is_closed_for_good() && process::is_mine()
}

/// io_uring_setup(2), by `call`, the program's own.
pub(crate) fn set_up(parameters: *const Parameters, call: impl FnOnce() -> c_long) -> c_long {
    let made = call();
    let Ok(fd) = c_int::try_from(made) else { return made };
    if fd < 0 || !are_watched() {
        return made;
    }
    let Some(_section) = Section::enter() else { return made };
    faults::begin();
    match faults::read(parameters).and_then(|parameters| Ring::of(fd, &parameters)) {
        Some(ring) => table::put(fd, Some(File::Ring(ring))),
        None => process::close_for_good(Native::IoUring),
    }
    made
}

/// io_uring_enter(2), by `call`, the program's own for so many entries, to wait for so many completions, with these
/// flags.
pub(crate) fn enter(fd: c_int, count: u32, least: u32, flags: u32, call: impl Fn(u32, u32, u32) -> c_long) -> c_long {
    if count == 0 || fd < 0 || !are_watched() {
        return call(count, least, flags);
    }
    let Some(section) = Section::enter() else { return call(count, least, flags) };
    let Some(ring) = table::ring(fd).filter(|_| flags & ENTER_REGISTERED_RING == 0) else {
        // SAFETY: F_GETFD takes no pointer.
        if flags & ENTER_REGISTERED_RING != 0 || unsafe { real::fcntl(fd, libc::F_GETFD, 0) } >= 0 {
            process::close_for_good(Native::IoUring);
        }
        drop(section);
        return call(count, least, flags);
    };
    // Submit without waiting; the wait for completions follows outside of the lock and the section.
    let submitted = ring.submit(count, |count, is_last| call(count, 0, if is_last { flags } else { flags & !ENTER_GETEVENTS }));
    drop(section);
    match submitted {
        None => call(count, least, flags),
        // As in the kernel: a call that has not submitted all entries does not wait.
        Some(done) if done != c_long::from(count) || flags & ENTER_GETEVENTS == 0 || ring.has_completed(least) => done,
        Some(done) => {
            call(0, least, flags);
            done
        }
    }
}

/// Handles what io_uring_register(2) is about to register.
pub(crate) fn register(operation: u32, argument: *const c_void, count: u32) {
    if !are_watched() {
        return;
    }
    let Some(_section) = Section::enter() else { return };
    // Words of 8 bytes: struct io_uring_files_update, io_uring_rsrc_register, io_uring_rsrc_update2.
    let word = |at: usize| faults::read(argument.cast::<u64>().wrapping_add(at)).unwrap_or(0);
    match operation {
        REGISTER_FILES => leave_all_to_kernel(argument.cast(), count),
        REGISTER_FILES_UPDATE => leave_all_to_kernel(word(1) as *const c_int, count),
        REGISTER_FILES2 => leave_all_to_kernel(word(2) as *const c_int, word(0) as u32),
        REGISTER_FILES_UPDATE2 => leave_all_to_kernel(word(1) as *const c_int, word(3) as u32),
        other if REGISTER_OTHERS.contains(&other) => {}
        // Any other operation, such as those by which a ring is entered without its descriptor, is resized, or may
        // refuse an entry that does nothing.
        _ => process::close_for_good(Native::IoUring),
    }
}

/// Restores the sockets of a list of descriptors, for good.
fn leave_all_to_kernel(list: *const c_int, count: u32) {
    const PIECE: usize = 64;
    let mut piece = [-1; PIECE];
    let count = (count as usize).min(MOST_FILES);
    for at in (0..count).step_by(PIECE) {
        let piece = &mut piece[..PIECE.min(count - at)];
        if !faults::read_all(list.wrapping_add(at), piece) {
            return;
        }
        piece.iter().copied().for_each(leave_to_kernel);
    }
}

/// Restores the socket of a descriptor for good, since the kernel will use it past this library.
fn leave_to_kernel(fd: c_int) {
    udp::give_back(fd);
    match table::get(fd) {
        Some(File::Tcp(tcp)) => {
            tcp.give_back(CAUSE, Until::Never);
            listening::leave_for_good(tcp);
        }
        Some(File::Set(set)) => {
            // The set is waited for in a ring, which this library cannot see.
            process::close_for_good(Native::IoUring);
            set.leave_to_kernel();
        }
        Some(File::Ring(_)) | None => {}
    }
}

/// Handles an entry that is about to be submitted. `follows`: it is linked to the entry before it, and runs after that.
fn judge(entry: &Entry, follows: bool) -> Judged {
    let is_named = entry.flags & FIXED_FILE == 0;
    match entry.opcode {
        EPOLL_CTL => return control(entry, follows),
        CLOSE if is_named && entry.other == 0 => close(entry.fd),
        FILES_UPDATE => leave_all_to_kernel(entry.address as *const c_int, entry.length),
        nameless if NAMELESS.contains(&nameless) => {}
        _ if is_named => leave_to_kernel(entry.fd),
        _ => {}
    }
    if SPLICES.contains(&entry.opcode) && entry.options & SPLICE_FROM_FIXED == 0 {
        leave_to_kernel(entry.other);
    }
    Judged::Kernels
}

/// Handles an entry that closes a descriptor. The library does not see when the kernel does so.
fn close(fd: c_int) {
    leave_to_kernel(fd);
    match table::get(fd) {
        Some(File::Tcp(tcp)) => tcp.forget_connection(),
        Some(File::Set(set)) => set.remove_fd(fd),
        Some(File::Ring(ring)) => ring.remove_fd(fd),
        None => {}
    }
}

/// An entry that is epoll_ctl(2).
fn control(entry: &Entry, follows: bool) -> Judged {
    let (set, fd) = (entry.fd, entry.offset as c_int);
    if table::get(fd).is_none() && udp::of(fd).is_none() {
        return Judged::Kernels;
    }
    let is_plain = entry.flags & !(ASYNC | SKIPS_SUCCESS | LINKS) == 0
        && (entry.priority, entry.buffer, entry.personality, entry.other) == (0, 0, 0, 0);
    if follows || !is_plain {
        // The kernel decides when the call is made, and whether.
        if let (Some(set), Some(tcp)) = (table::set_of(set), table::tcp(fd)) {
            set.release_number(fd, tcp);
        }
        leave_to_kernel(fd);
        return Judged::Kernels;
    }
    // SAFETY: the entry stands for the program's own call.
    match unsafe { calls::epoll_ctl(set, entry.length as c_int, fd, entry.address as *mut libc::epoll_event) } {
        0 => Judged::Made,
        // The kernel reads the event while it submits the entry; with EFAULT it submits no further entries.
        _ if thread::errno() == libc::EFAULT => Judged::Ends,
        _ => Judged::Failed,
    }
}

impl Ring {
    /// A ring that has just been made. None if its submissions cannot be read.
    fn of(fd: c_int, parameters: &Parameters) -> Option<&'static Ring> {
        let Parameters { entries, completions, flags, features, submission, completion, .. } = *parameters;
        let is_sane = entries.is_power_of_two() && entries <= MOST_ENTRIES && completions <= 2 * MOST_ENTRIES;
        if flags & !READABLE != 0 || features & FEATURES != FEATURES || !is_sane {
            return None;
        }
        let shift = if flags & SETUP_SQE128 != 0 { 7 } else { 6 };
        let array = (flags & SETUP_NO_SQARRAY == 0).then_some(submission.last[0] as usize);
        let words = [submission.head, submission.tail, completion.head, completion.tail].map(|at| at as usize);
        let ends = words.into_iter().map(|at| at + 4).chain(array.map(|at| at + 4 * entries as usize));
        let queue = Memory::map(fd, ends.max()?, 0)?;
        let Some(mapped) = Memory::map(fd, (entries as usize) << shift, ENTRIES_AT) else {
            queue.unmap();
            return None;
        };
        let [head, tail, completed_head, completed_tail] = words;
        Some(Box::leak(Box::new(Ring {
            queue,
            entries: mapped,
            head,
            tail,
            completed_head,
            completed_tail,
            array,
            mask: entries - 1,
            submits_all: flags & SETUP_SUBMIT_ALL != 0,
            shift,
            names: AtomicU32::new(1),
            open: Lock::new(true),
        })))
    }

    fn load(&self, at: usize) -> u32 {
        self.queue.word(at).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Whether so many completions wait to be read, so that the kernel need not be asked for them.
    fn has_completed(&self, least: u32) -> bool {
        let open = self.open.lock(thread::token());
        open.is_some_and(|open| *open && self.load(self.completed_tail).wrapping_sub(self.load(self.completed_head)) >= least)
    }

    /// The place of the entry at a position in the queue. None if the program's index is out of range: the kernel drops
    /// such an entry.
    fn place(&self, position: u32) -> Option<*mut Entry> {
        let slot = position & self.mask;
        let index = match self.array {
            None => slot,
            Some(array) => self.queue.word(array + 4 * slot as usize)?.load(Ordering::Relaxed),
        };
        // SAFETY: the mapping has `mask + 1` entries.
        (index <= self.mask).then(|| unsafe { self.entries.base.add((index as usize) << self.shift).cast() })
    }

    /// Handles the next `count` entries, and has the kernel submit them by `call`, whose arguments are a number of
    /// entries and whether these are the last. Returns how many were submitted, or -1 with errno. None in a signal
    /// handler that has interrupted this function.
    fn submit(&self, count: u32, call: impl Fn(u32, bool) -> c_long) -> Option<c_long> {
        let open = self.open.lock(thread::token())?;
        if !*open {
            return Some(call(count, true));
        }
        let head = self.load(self.head);
        let count = count.min(self.load(self.tail).wrapping_sub(head)).min(self.mask + 1);
        let (mut done, mut follows) = (0, false);
        for at in 0..count {
            let Some(place) = self.place(head.wrapping_add(at)) else { break };
            // SAFETY: an entry inside the mapping, of any bytes.
            let entry = unsafe { place.read_volatile() };
            match judge(&entry, follows) {
                Judged::Kernels => {}
                Judged::Made => {
                    let nothing = Entry { flags: entry.flags, fd: -1, data: entry.data, ..Entry::default() };
                    // SAFETY: an entry inside the mapping, which the program does not access between queueing and
                    // submission.
                    unsafe { place.write_volatile(nothing) };
                }
                judged @ (Judged::Failed | Judged::Ends) => {
                    let asked = at + 1 - done;
                    match call(asked, false) {
                        got if got == c_long::from(asked) => done += asked,
                        got if got < 0 && done == 0 => return Some(got),
                        got => return Some(c_long::from(done) + got.max(0)),
                    }
                    if matches!(judged, Judged::Ends) && !self.submits_all {
                        return Some(done.into());
                    }
                }
            }
            follows = entry.flags & LINKS != 0;
        }
        let got = call(count - done, true);
        Some(if got < 0 && done > 0 { done.into() } else { c_long::from(done) + got })
    }

    /// Adds another descriptor of the same ring.
    pub fn add_fd(&self) {
        self.names.fetch_add(1, Ordering::AcqRel);
    }

    /// Handles the closing of a descriptor, before it is closed. With the last one the mappings are removed, which
    /// would keep the ring open.
    pub fn remove_fd(&self, fd: c_int) {
        table::put(fd, None);
        if self.names.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(mut open) = self.open.lock(thread::token())
            && std::mem::take(&mut *open)
        {
            self.queue.unmap();
            self.entries.unmap();
        }
    }

    /// A new object for the same ring in a child of fork, since the old lock may have been held by another thread of
    /// the parent.
    fn inherited(&self) -> &'static Ring {
        let same = |memory: &Memory| Memory { base: memory.base, length: memory.length };
        Box::leak(Box::new(Ring {
            queue: same(&self.queue),
            entries: same(&self.entries),
            names: AtomicU32::new(self.names.load(Ordering::Acquire)),
            open: Lock::new(true),
            ..*self
        }))
    }
}

/// Takes the rings over in a child of fork.
pub(crate) fn inherit() {
    let mut known: Vec<(*const Ring, &'static Ring)> = Vec::new();
    for (fd, file) in table::known(0, u32::MAX) {
        let File::Ring(parents) = file else { continue };
        let same = known.iter().find(|(other, _)| std::ptr::eq(*other, parents)).map(|(_, ring)| *ring);
        let ring = same.unwrap_or_else(|| {
            let ring = parents.inherited();
            known.push((parents, ring));
            ring
        });
        table::put(fd, Some(File::Ring(ring)));
    }
}

/// Lets go of all rings: the library withdraws, and no other thread is inside.
pub(crate) fn forget_all() {
    for (fd, file) in table::known(0, u32::MAX) {
        if let File::Ring(ring) = file {
            ring.remove_fd(fd);
        }
    }
}
