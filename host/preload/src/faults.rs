//! Access to the program's memory by pointers that may be invalid.
//!
//! A call with a bad pointer fails with EFAULT, as in the kernel. To ask the kernel before each access would cost a
//! system call, so the library just makes the access ([`guarded`]), and its handler for SIGSEGV and SIGBUS ends a copy
//! that fails. Every other SIGSEGV or SIGBUS goes to the program's handler. The actions that the program sets and reads
//! are kept here ([`change`]). A signal that the program ignores stays ignored in the kernel, since executed programs
//! inherit that.
//!
//! In a thread that blocks these signals, and after the program has set an action by a system call of its own, a bad
//! pointer ends the program, if the connection is on the NIC or the library has to read what the pointer names.

use crate::sections::Section;
use crate::{process, real, signals, thread};
use baton_client::guarded;
use baton_linux::process::Undisturbed;
use baton_ring::give_way;
use libc::{c_int, c_void, siginfo_t};
use std::cell::UnsafeCell;
use std::mem::{MaybeUninit, size_of};
use std::sync::atomic::{AtomicBool, Ordering};

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// The program's actions, in the order of [`SIGNALS`]. The kernel has this library's handler instead, unless the
/// program ignores the signal.
struct Actions {
    taken: AtomicBool,
    of: UnsafeCell<[MaybeUninit<libc::sigaction>; 2]>,
}

// SAFETY: `of` is only used by the thread that has set `taken`.
unsafe impl Sync for Actions {}

static ACTIONS: Actions = Actions { taken: AtomicBool::new(false), of: UnsafeCell::new([MaybeUninit::zeroed(); 2]) };

/// Whether the kernel has this library's handlers.
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Calls `body` with the program's actions. The caller has blocked signals, or is this library's handler, which runs
/// with signals blocked.
fn with_actions<T>(body: impl FnOnce(&mut [MaybeUninit<libc::sigaction>; 2]) -> T) -> T {
    let mut round = 0u32;
    while ACTIONS.taken.swap(true, Ordering::Acquire) {
        give_way(round);
        round = round.saturating_add(1);
    }
    // SAFETY: this thread has set `taken`.
    let result = body(unsafe { &mut *ACTIONS.of.get() });
    ACTIONS.taken.store(false, Ordering::Release);
    result
}

fn place(signal: c_int) -> Option<usize> {
    SIGNALS.iter().position(|one| *one == signal)
}

fn is_handler(action: &libc::sigaction) -> bool {
    action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN
}

/// The action that the kernel gets in place of the program's: this library's handler, with the program's flags. It
/// blocks all signals: a handler that interrupted it would find the library in the middle of an operation, and this
/// handler's mask in place of the thread's. The program's handler runs with the program's mask.
fn instead(programs: &libc::sigaction) -> libc::sigaction {
    let mut action = *programs;
    if programs.sa_sigaction == libc::SIG_IGN {
        return action;
    }
    action.sa_sigaction = on_fault as *const () as usize;
    action.sa_flags = (action.sa_flags | libc::SA_SIGINFO) & !libc::SA_RESETHAND;
    signals::block_deferrable(&mut action.sa_mask);
    if !is_handler(programs) {
        action.sa_flags |= libc::SA_ONSTACK | libc::SA_RESTART;
    }
    action
}

/// Takes the signals over, before the first descriptor is tracked.
pub(crate) fn begin() {
    if INSTALLED.load(Ordering::Acquire) || !cfg!(target_arch = "x86_64") {
        return;
    }
    let _undisturbed = Undisturbed::begin();
    with_actions(|actions| {
        if INSTALLED.load(Ordering::Acquire) {
            return;
        }
        for (signal, programs) in SIGNALS.into_iter().zip(actions) {
            // SAFETY: room for an action, which the kernel fills in; then an action that lives.
            unsafe {
                real::sigaction(signal, std::ptr::null(), programs.as_mut_ptr());
                real::sigaction(signal, &instead(programs.assume_init_ref()), std::ptr::null_mut());
            }
        }
        INSTALLED.store(true, Ordering::Release);
    });
}

/// Gives the signals back: the library withdraws.
pub(crate) fn end() {
    let _undisturbed = Undisturbed::begin();
    with_actions(|actions| {
        if INSTALLED.swap(false, Ordering::AcqRel) {
            for (signal, programs) in SIGNALS.into_iter().zip(actions) {
                // SAFETY: `begin` has read it; an action that lives.
                unsafe { real::sigaction(signal, programs.assume_init_ref(), std::ptr::null_mut()) };
            }
        }
    });
}

/// sigaction(2). None if this library has no handler for the signal.
///
/// # Safety
/// As sigaction(2).
pub(crate) unsafe fn change(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> Option<c_int> {
    let at = place(signal)?;
    // A child of vfork has actions of its own, but its parent's memory.
    if !INSTALLED.load(Ordering::Acquire) || !process::is_mine() {
        return None;
    }
    // A bad pointer raises SIGSEGV here or at the end, as in the C library. No lock that the handler needs is held at
    // either place.
    // SAFETY: the program's own action (`# Safety`).
    let next = unsafe { new.as_ref() }.copied();
    let section = Section::enter()?;
    let undisturbed = Undisturbed::begin();
    let changed = with_actions(|actions| {
        let programs = &mut actions[at];
        // SAFETY: `begin` has read it.
        let before = unsafe { *programs.assume_init_ref() };
        if let Some(next) = next {
            // SAFETY: an action that lives.
            if unsafe { real::sigaction(signal, &instead(&next), std::ptr::null_mut()) } < 0 {
                return Err(thread::errno());
            }
            *programs = MaybeUninit::new(next);
        }
        Ok(before)
    });
    drop(undisturbed);
    drop(section);
    match changed {
        Err(number) => {
            thread::set_errno(number);
            return Some(-1);
        }
        // SAFETY: the program's own place for an action (`# Safety`).
        Ok(before) if !old.is_null() => unsafe { old.write(before) },
        Ok(_) => {}
    }
    Some(0)
}

extern "C-unwind" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let errno = thread::errno();
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: the kernel passes a context, whose registers count when the handler returns, and the signal's
        // description.
        let (registers, raised, address) = unsafe {
            let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
            (registers, (*info).si_code > 0, (*info).si_addr() as usize)
        };
        let stack = registers[libc::REG_RSP as usize] as usize;
        // SAFETY: the thread itself has raised it, with its stack in use.
        if raised && let Some((next, stack)) = unsafe { guarded::resume(address, stack) } {
            registers[libc::REG_RIP as usize] = next as i64;
            registers[libc::REG_RSP as usize] = stack as i64;
            registers[libc::REG_RAX as usize] = guarded::FAILED;
            return;
        }
    }
    let action = place(signal).map(|at| {
        with_actions(|actions| {
            // SAFETY: `begin` has read it.
            let action = unsafe { *actions[at].assume_init_ref() };
            if action.sa_flags & libc::SA_RESETHAND != 0 {
                // SAFETY: sigaction is plain data, for which zero is a value: the default action.
                actions[at] = MaybeUninit::zeroed();
            }
            action
        })
    });
    thread::set_errno(errno);
    match action {
        Some(action) if is_handler(&action) => {
            signals::note(action.sa_flags);
            // SAFETY: the kernel's context, and the program's handler, of the type that its flags say.
            unsafe {
                signals::mask_as_in_handler(signal, &action, signals::mask_in(context));
                if action.sa_flags & libc::SA_SIGINFO != 0 {
                    let handler: extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void) =
                        std::mem::transmute(action.sa_sigaction);
                    handler(signal, info, context);
                } else {
                    let handler: extern "C-unwind" fn(c_int) = std::mem::transmute(action.sa_sigaction);
                    handler(signal);
                }
            }
        }
        // SAFETY: `info` is the kernel's description of the signal.
        _ => unsafe { end_by(signal, info) },
    }
}

/// Ends the process by a signal without a handler.
///
/// # Safety
/// `info` is the signal's description.
unsafe fn end_by(signal: c_int, info: *const siginfo_t) {
    // SAFETY: zero is a value of sigaction: the default action. The calling thread exists.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        real::sigaction(signal, &default, std::ptr::null_mut());
        if (*info).si_code <= 0 {
            // The signal came from kill(2) or the like, so it has to be sent again. A fault repeats when the thread
            // repeats its instruction.
            libc::pthread_kill(libc::pthread_self(), signal);
        }
    }
}

/// Whether an address is null, or of an element of an array at null. Many valid calls pass null. An access would raise
/// a signal where the program natively gets none, and its threads may share one alternate stack for signals, on which
/// only one of them can be at a time.
fn is_null<T>(address: *const T) -> bool {
    /// Bytes at null at which no memory is mapped (`vm.mmap_min_addr`).
    const PAGE: usize = 4096;
    address.addr() < PAGE
}

/// A value at an address of the program's. None if there is no such memory.
pub(crate) fn read<T: Plain>(from: *const T) -> Option<T> {
    if is_null(from) {
        return None;
    }
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: room for a value, of a type for which any bytes are one.
    unsafe { guarded::copy(from.cast(), value.as_mut_ptr().cast(), size_of::<T>()).then(|| value.assume_init()) }
}

/// Copies values of the program's, as many as there is room for. False if there is no such memory.
#[must_use]
pub(crate) fn read_all<T: Plain>(from: *const T, values: &mut [T]) -> bool {
    // SAFETY: `values` has room, and its type has no invalid bytes.
    values.is_empty() || !is_null(from) && unsafe { guarded::copy(from.cast(), values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Writes a value at an address of the program's. False if there is no such memory.
///
/// # Safety
/// If there is memory it must be the program's, for such a value.
#[must_use]
pub(crate) unsafe fn write<T: Plain>(to: *mut T, value: T) -> bool {
    // SAFETY: `value` lives; the caller's promise.
    !is_null(to) && unsafe { guarded::copy((&raw const value).cast(), to.cast(), size_of::<T>()) }
}

/// As [`write`], for several values.
///
/// # Safety
/// As there.
#[must_use]
pub(crate) unsafe fn write_all<T: Plain>(to: *mut T, values: &[T]) -> bool {
    // SAFETY: `values` live; the caller's promise.
    values.is_empty() || !is_null(to) && unsafe { guarded::copy(values.as_ptr().cast(), to.cast(), size_of_val(values)) }
}

/// Types of which any bytes are a value.
///
/// # Safety
/// They must be.
pub(crate) unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($type:ty),*) => {$(
        // SAFETY: it consists of integers and raw pointers.
        unsafe impl Plain for $type {}
    )*};
}

plain!(
    u8,
    u16,
    c_int,
    u32,
    u64,
    i64,
    usize,
    libc::iovec,
    libc::msghdr,
    libc::mmsghdr,
    libc::pollfd,
    libc::epoll_event,
    libc::timespec,
    libc::timeval
);
