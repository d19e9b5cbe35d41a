//! The program's signal handlers.
//!
//! The kernel's handler of each signal that the program handles is this library's, with the program's mask and flags.
//! It calls the program's, unless it interrupts a part of the library that must stay whole ([`crate::whole`]): then the
//! signal is sent to this thread once more, as it was, and all signals are blocked until the end of that part. So the
//! kernel delivers it there, on the stack and with the mask that the program has asked for. A real-time signal would be
//! queued behind later ones of its number; so the thread keeps it, and calls the handler itself at the end of the part.
//! It does the same with a signal for which the kernel's queue has no room. sigaction shows the program's own action.
//!
//! This does not apply to the signals that report faults ([`FAULTS`]), whose handlers run at once and, except those in
//! [`crate::faults`], are set in the kernel directly; nor to handlers that the program sets by a system call of its
//! own.

use crate::whole::{self, Here, Whole};
use crate::{cancelling, leaving, process, real, sections, thread};
use baton_ring::give_way;
use libc::{c_int, c_long, c_void, sigaction, siginfo_t};
use std::mem::{MaybeUninit, zeroed};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Signals that report faults of the thread itself.
const FAULTS: [c_int; 7] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT, libc::SIGSYS];

const SIGNALS: usize = 65;

/// The program's handler of each signal for which the kernel has this library's: its address, with [`TAKES_INFO`] and
/// [`RESTARTS`]. An entry stays when the program changes the action to one without a handler, since the signal may have
/// been deferred before.
static HANDLERS: [AtomicU64; SIGNALS] = [const { AtomicU64::new(0) }; SIGNALS];

/// SA_SIGINFO, which the kernel's action always has.
const TAKES_INFO: u64 = 1 << 63;
/// SA_RESTART.
const RESTARTS: u64 = 1 << 62;

/// A thread is changing an action: kernel and [`HANDLERS`] may differ.
static CHANGING: AtomicBool = AtomicBool::new(false);

/// The first real-time signal of the kernel's.
const FIRST_REAL_TIME: c_int = 32;

/// Bytes of the kernel's signal sets.
const SET_BYTES: c_long = 8;

/// The signals that are blocked while one is deferred: all but those that report faults, and those that the C library
/// uses itself.
const fn blocked() -> u64 {
    let (mut set, mut at) = (!(0b11 << 31), 0);
    while at < FAULTS.len() {
        set &= !(1 << (FAULTS[at] - 1));
        at += 1;
    }
    set
}

/// Handles the signals that were deferred, and sets the mask that the thread had before.
pub(crate) fn deliver(here: &Here, mask: u64) {
    let kept = here.kept.swap(0, Ordering::Relaxed);
    if kept != 0 {
        // If the kernel had run the handler, it would have run before the C library sets errno: keep errno as it is
        // now.
        let errno = thread::errno();
        // SAFETY: `keep` has filled it.
        let mut info = unsafe { (*here.description.get()).assume_init_read() };
        // SAFETY: the description belongs to this signal.
        unsafe { run_kept(kept, &mut info, mask) };
        thread::set_errno(errno);
    }
    set_mask(mask);
}

/// Blocks the signals that are deferred, in a set.
pub(crate) fn block_deferrable(set: &mut libc::sigset_t) {
    // SAFETY: the kernel uses the first word of a set.
    unsafe { *std::ptr::from_mut(set).cast::<u64>() |= blocked() };
}

/// The signal mask of the code that a handler has interrupted.
///
/// # Safety
/// The handler's argument.
pub(crate) unsafe fn mask_in(context: *mut c_void) -> u64 {
    // SAFETY: the kernel's context: its first word of the mask is what the kernel uses.
    unsafe { (&raw const (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>().read() }
}

/// Sets the mask that the thread has in this action's handler, if its mask was `before`.
pub(crate) fn mask_as_in_handler(signal: c_int, action: &sigaction, before: u64) {
    let itself = if action.sa_flags & libc::SA_NODEFER == 0 { 1 << (signal - 1) } else { 0 };
    // SAFETY: the kernel uses the first word of a set, and a set is aligned to a word.
    set_mask(before | itself | unsafe { (&raw const action.sa_mask).cast::<u64>().read() });
}

fn set_mask(mask: u64) {
    let errno = thread::errno();
    // SAFETY: a live set of the kernel's size, and no place for the last one.
    unsafe { real::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK.into(), (&raw const mask) as c_long, 0, SET_BYTES, 0, 0) };
    thread::set_errno(errno);
}

fn is_handler(action: &sigaction) -> bool {
    action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN
}

fn ours() -> usize {
    on_signal as *const () as usize
}

/// What the kernel gets for an action of the program's.
fn instead(programs: &sigaction) -> sigaction {
    sigaction { sa_sigaction: ours(), sa_flags: programs.sa_flags | libc::SA_SIGINFO, ..*programs }
}

/// The entry in [`HANDLERS`] for an action of the program's.
fn entry(programs: &sigaction) -> u64 {
    let flag = |flag, bit| if programs.sa_flags & flag != 0 { bit } else { 0 };
    programs.sa_sigaction as u64 | flag(libc::SA_SIGINFO, TAKES_INFO) | flag(libc::SA_RESTART, RESTARTS)
}

/// The program's own action, if the kernel has this one.
fn programs(kernels: &sigaction, entry: u64) -> sigaction {
    if kernels.sa_sigaction != ours() {
        return *kernels;
    }
    let flags = if entry & TAKES_INFO != 0 { kernels.sa_flags } else { kernels.sa_flags & !libc::SA_SIGINFO };
    sigaction { sa_sigaction: (entry & !(TAKES_INFO | RESTARTS)) as usize, sa_flags: flags, ..*kernels }
}

/// Keeps other threads from changing an action.
struct Changing;

impl Changing {
    fn begin() -> Changing {
        let mut round = 0u32;
        while CHANGING.swap(true, Ordering::Acquire) {
            give_way(round);
            round = round.saturating_add(1);
        }
        Changing
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        CHANGING.store(false, Ordering::Release);
    }
}

/// In a child: another thread's change of an action has ended with that thread, and the signal that is kept is the
/// parent's.
pub(crate) fn forget_inherited() {
    CHANGING.store(false, Ordering::Release);
    whole::here().kept.store(0, Ordering::Relaxed);
}

/// sigaction(2).
///
/// # Safety
/// As sigaction(2).
pub(crate) unsafe fn change(signal: c_int, new: *const sigaction, old: *mut sigaction) -> c_int {
    let known = HANDLERS.get(signal as usize).filter(|_| signal > 0 && !FAULTS.contains(&signal));
    let (Some(known), false) = (known, sections::is_withdrawn()) else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::sigaction(signal, new, old) };
    };
    // A bad pointer raises SIGSEGV here or at the end, as in the C library: nothing is held then that its handler
    // needs.
    // SAFETY: the program's own action (`# Safety`).
    let next = unsafe { new.as_ref() }.copied();
    let whole = Whole::begin();
    // A child of vfork has actions of its own, but its parent's memory.
    let here = process::plan().is_some() && !process::is_borrowed();
    let changing = here.then(Changing::begin);
    let before = known.load(Ordering::Relaxed);
    // The program may have read the kernel's action by a system call of its own, and pass it here.
    let next = next.map(|next| programs(&next, before));
    let handler = next.filter(|next| here && is_handler(next));
    if let Some(handler) = &handler {
        known.store(entry(handler), Ordering::Relaxed);
    }
    let kernels = handler.as_ref().map(instead).or(next);
    let mut last = MaybeUninit::uninit();
    // SAFETY: an action that lives, or none, and room for one.
    let done =
        unsafe { real::sigaction(signal, kernels.as_ref().map_or(std::ptr::null(), std::ptr::from_ref), last.as_mut_ptr()) };
    if done < 0 {
        known.store(before, Ordering::Relaxed);
    }
    drop(changing);
    drop(whole);
    if done == 0 && !old.is_null() {
        // SAFETY: the call has just filled `last`; the program's own place for an action (`# Safety`).
        unsafe { old.write(programs(last.assume_init_ref(), before)) };
    }
    done
}

/// Gives the kernel the program's own actions: the library withdraws.
pub(crate) fn end() {
    for signal in 1..SIGNALS as c_int {
        let mut action = MaybeUninit::uninit();
        // SAFETY: room for an action, which the kernel fills in; then an action that lives.
        unsafe {
            let known = real::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0;
            if known && action.assume_init_ref().sa_sigaction == ours() {
                let own = programs(action.assume_init_ref(), HANDLERS[signal as usize].load(Ordering::Relaxed));
                real::sigaction(signal, &own, std::ptr::null_mut());
            }
        }
    }
}

extern "C-unwind" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let here = whole::here();
    // SAFETY: the kernel's arguments.
    if here.is_inside() && unsafe { defer(here, signal, info, context) } {
        return;
    }
    // SAFETY: the kernel's context.
    let is_early = !FAULTS.contains(&signal) && unsafe { cancelling::is_beginning(context, mask_in(context), ours()) };
    // SAFETY: the kernel's arguments.
    if is_early && unsafe { put_off(signal, info, context) } {
        return;
    }
    // SAFETY: the kernel's context.
    let stack = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_stack };
    here.stack[0].store(stack.ss_sp as usize, Ordering::Relaxed);
    here.stack[1].store(stack.ss_size, Ordering::Relaxed);
    // SAFETY: the kernel's arguments.
    unsafe { run(signal, info, context) };
}

/// Calls the program's handler. Nothing may follow the call: the handler may leave by longjmp, or by ending its thread.
///
/// # Safety
/// The arguments of a handler.
unsafe fn run(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let handler = HANDLERS[signal as usize % SIGNALS].load(Ordering::Relaxed);
    note(if handler & RESTARTS == 0 { 0 } else { libc::SA_RESTART });
    let address = (handler & !(TAKES_INFO | RESTARTS)) as usize;
    if address == 0 {
        return;
    }
    // SAFETY: the program's handler, of the type that its flags say.
    unsafe {
        if handler & TAKES_INFO != 0 {
            let handler: extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void) = std::mem::transmute(address);
            handler(signal, info, context);
        } else {
            let handler: extern "C-unwind" fn(c_int) = std::mem::transmute(address);
            handler(signal);
        }
    }
}

/// Sends the signal to this thread once more, or keeps it, and blocks all signals until the interrupted part has ended.
/// False if it cannot be sent, because the program has reached its limit of pending signals, and cannot be kept,
/// because another signal is.
///
/// # Safety
/// The arguments of a handler.
unsafe fn defer(here: &Here, signal: c_int, info: *mut siginfo_t, context: *mut c_void) -> bool {
    let errno = thread::errno();
    // SAFETY: the kernel's context: its first word of the mask is what the kernel uses.
    let mask = unsafe { &mut *(&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>() };
    let mut during = 0u64;
    let all = blocked();
    // SAFETY: two live sets of the kernel's size; the signal's description.
    let deferred = unsafe {
        let (set, old) = ((&raw const all) as c_long, (&raw mut during) as c_long);
        real::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK.into(), set, old, SET_BYTES, 0, 0);
        // Real-time signals have to be handled in the order in which they were sent, and others may be queued already.
        signal >= FIRST_REAL_TIME && keep(here, signal, info) || send_again(signal, info) || keep(here, signal, info)
    };
    if deferred {
        here.note_deferred(*mask);
        *mask |= all;
    } else {
        set_mask(during);
    }
    thread::set_errno(errno);
    deferred
}

/// Sends the signal to this thread once more and blocks it until the handler that it has interrupted has returned.
/// False if it cannot be sent.
///
/// # Safety
/// The arguments of a handler.
unsafe fn put_off(signal: c_int, info: *const siginfo_t, context: *mut c_void) -> bool {
    let (errno, itself) = (thread::errno(), 1u64 << (signal - 1));
    let mut during = 0u64;
    // SAFETY: two live sets of the kernel's size; the signal's description; the kernel's context, of whose mask it uses
    // the first word.
    let sent = unsafe {
        let (set, old) = ((&raw const itself) as c_long, (&raw mut during) as c_long);
        real::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK.into(), set, old, SET_BYTES, 0, 0);
        let sent = send_again(signal, info);
        if sent {
            *(&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>() |= itself;
        } else {
            set_mask(during);
        }
        sent
    };
    thread::set_errno(errno);
    sent
}

/// Sends the signal to this thread once more. False if the kernel's queue has no room for it.
///
/// # Safety
/// The arguments of a handler.
unsafe fn send_again(signal: c_int, info: *const siginfo_t) -> bool {
    // SAFETY: the signal's description, of which the kernel makes a copy.
    unsafe {
        let (process, thread) = (libc::getpid().into(), real::syscall(libc::SYS_gettid, 0, 0, 0, 0, 0, 0));
        let sent = real::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal.into(), info as c_long, 0, 0) == 0;
        if sent {
            arm_again(signal);
        }
        sent
    }
}

/// Keeps the signal in this thread until the end of the part. False if another signal is kept.
///
/// # Safety
/// The arguments of a handler.
unsafe fn keep(here: &Here, signal: c_int, info: *const siginfo_t) -> bool {
    let is_free = here.kept.load(Ordering::Relaxed) == 0;
    if is_free {
        // SAFETY: the signal's description. The place is this thread's, and free.
        unsafe { (*here.description.get()).write(info.read()) };
        here.kept.store(signal, Ordering::Relaxed);
    }
    is_free
}

/// Calls the handler of a signal that was kept as the kernel would, but on the thread's present stack. `mask` is the
/// thread's.
///
/// # Safety
/// `info` is the signal's description.
#[cold]
unsafe fn run_kept(signal: c_int, info: &mut siginfo_t, mask: u64) {
    let mut action = MaybeUninit::<sigaction>::uninit();
    // SAFETY: zero is a value of ucontext_t; room for an action and for a context, which the calls fill in; the kernel
    // uses the first word of a mask.
    unsafe {
        let mut context: libc::ucontext_t = zeroed();
        libc::getcontext(&mut context);
        (&raw mut context.uc_sigmask).cast::<u64>().write(mask);
        let known = real::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0;
        let action = if known { action.assume_init() } else { zeroed() };
        mask_as_in_handler(signal, &action, mask);
        run(signal, info, (&raw mut context).cast());
    }
}

/// Sets an action with SA_RESETHAND again: the kernel has reset it, but the signal was only deferred.
///
/// # Safety
/// `signal` is a signal with a handler.
unsafe fn arm_again(signal: c_int) {
    let mut action = MaybeUninit::<sigaction>::uninit();
    // SAFETY: room for an action, which the kernel fills in; then an action that lives.
    unsafe {
        if real::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0 {
            let action = action.assume_init_mut();
            if action.sa_flags & libc::SA_RESETHAND != 0 && action.sa_sigaction == libc::SIG_DFL {
                action.sa_sigaction = ours();
                real::sigaction(signal, action, std::ptr::null_mut());
            }
        }
    }
}

/// Counts a handler of the program's that is about to run in this thread, with its action's flags.
pub(crate) fn note(flags: c_int) {
    let here = whole::here();
    here.handled.fetch_add(1, Ordering::Relaxed);
    here.interrupted.fetch_add(u32::from(flags & libc::SA_RESTART == 0), Ordering::Relaxed);
}

/// How many handlers had run in this thread when a call began, or when it fell asleep. A sleeping call continues or
/// fails by the flags of the handler that has run (SA_RESTART), and ppoll(2) only says that some handler has run.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    handled: u32,
    interrupted: u32,
}

impl Mark {
    /// The counts at this moment.
    #[inline]
    pub fn now() -> Mark {
        let here = whole::here();
        Mark { handled: here.handled.load(Ordering::Relaxed), interrupted: here.interrupted.load(Ordering::Relaxed) }
    }

    /// Whether a handler that ends the call with EINTR has run since: any handler, or, if the call may be `restarted`,
    /// one without SA_RESTART.
    pub fn is_over(self, restarted: bool) -> bool {
        let now = Mark::now();
        if restarted { now.interrupted != self.interrupted } else { now.handled != self.handled }
    }

    /// Ignores the handlers with SA_RESTART that have run so far, since the call has been restarted.
    pub fn restart(&mut self) {
        let now = Mark::now();
        if now.interrupted == self.interrupted {
            *self = now;
        }
    }

    /// As [`Mark::is_over`], after the kernel has returned EINTR: a handler has run, perhaps one that this library does
    /// not count.
    pub fn is_over_by_kernel(self, restarted: bool) -> bool {
        let restarts = || if self.is_over(false) { !self.is_over(true) } else { uncounted_restart() };
        leaving::is_leaving() || !restarted || !restarts()
    }
}

/// Whether all handlers that this library does not count, since the program has set them by a system call of its own,
/// have SA_RESTART.
#[cold]
fn uncounted_restart() -> bool {
    (1..SIGNALS as c_int).all(|signal| {
        let mut action = MaybeUninit::uninit();
        // SAFETY: room for an action, which the kernel fills in.
        let known = unsafe { real::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } == 0;
        // SAFETY: the call has filled it in.
        let action: Option<&sigaction> = known.then(|| unsafe { action.assume_init_ref() });
        action.is_none_or(|one| !is_handler(one) || one.sa_sigaction == ours() || one.sa_flags & libc::SA_RESTART != 0)
    })
}
