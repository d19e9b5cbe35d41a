//! Functions that wait for events.

use crate::poll::{self as polling, Polled};
use crate::sections::Section;
use crate::thread::{self, fail};
use crate::whole::Whole;
use crate::{epoll, faults, io, listening, process, real, table, udp};
use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

/// Whether a poll's entries contain a descriptor that this library tracks. False if the kernel refuses the array.
fn is_concerned(fds: *const pollfd, count: nfds_t) -> bool {
    /// Arrays up to this length are not compared with RLIMIT_NOFILE, which would cost a system call.
    const USUAL: nfds_t = 1024;
    const PIECE: usize = 64;
    if table::end() == 0 && udp::end() == 0 || count > USUAL && count > process::most_descriptors() {
        return false;
    }
    let mut piece = [pollfd { fd: -1, events: 0, revents: 0 }; PIECE];
    let is_tracked = |entry: &pollfd| table::get(entry.fd).is_some() || udp::of(entry.fd).is_some();
    for at in (0..count as usize).step_by(PIECE) {
        let piece = &mut piece[..PIECE.min(count as usize - at)];
        if !faults::read_all(fds.wrapping_add(at), piece) {
            return false;
        }
        if piece.iter().any(is_tracked) {
            return true;
        }
    }
    false
}

/// poll(2) of entries of which at least one is a descriptor that this library tracks. All of the library's own state is
/// dropped before it returns, so the caller can make the program's call. None if there is no such entry, or if the
/// kernel refuses the array.
///
/// # Safety
/// As poll(2).
unsafe fn ask(fds: *mut pollfd, count: nfds_t, limit: Option<u64>, mask: *const sigset_t) -> Option<Polled> {
    if !is_concerned(fds, count) {
        return None;
    }
    let _whole = Whole::begin_cancelable();
    let mut entries = vec![pollfd { fd: -1, events: 0, revents: 0 }; count as usize];
    if !faults::read_all(fds, &mut entries) {
        return None;
    }
    Some(match polling::poll(&mut entries, limit, mask) {
        // Linux, in do_sys_poll: also after a signal, when there are no events.
        Polled::Done(result) if result < 0 && thread::errno() == libc::EINTR => {
            entries.iter_mut().for_each(|entry| entry.revents = 0);
            // SAFETY: the program's own array (`# Safety`).
            let written = unsafe { faults::write_all(fds, &entries) };
            Polled::Done(fail(if written { libc::EINTR } else { libc::EFAULT }) as c_int)
        }
        // SAFETY: the program's own array (`# Safety`).
        Polled::Done(result) => Polled::Done(unsafe { answered(fds, &entries, result) }),
        left => left,
    })
}

/// The result of a poll, after its answers are written.
///
/// # Safety
/// As poll(2).
unsafe fn answered(fds: *mut pollfd, entries: &[pollfd], result: c_int) -> c_int {
    // SAFETY: the program's own array (`# Safety`).
    if result < 0 || unsafe { faults::write_all(fds, entries) } { result } else { fail(libc::EFAULT) as c_int }
}

/// Whether the kernel can read a signal mask.
fn takes_mask(mask: *const sigset_t) -> bool {
    mask.is_null() || faults::read(mask.cast::<u64>()).is_some()
}

/// A time limit for poll: microseconds, rounded up to milliseconds.
fn to_millis(limit: Option<u64>) -> c_int {
    limit.map_or(-1, |limit| limit.div_ceil(1000).min(c_int::MAX as u64) as c_int)
}

fn timeval_of(micros: u64) -> timeval {
    timeval { tv_sec: (micros / 1_000_000) as i64, tv_usec: (micros % 1_000_000) as i64 }
}

/// Makes a call with a time limit in microseconds.
fn with_timespec<T>(limit: Option<u64>, call: impl FnOnce(*const timespec) -> T) -> T {
    let limit = limit.map(|limit| timespec { tv_sec: (limit / 1_000_000) as i64, tv_nsec: (limit % 1_000_000 * 1000) as i64 });
    call(limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref))
}

fn micros(limit: &timespec) -> Option<u64> {
    let valid = limit.tv_sec >= 0 && (0..1_000_000_000).contains(&limit.tv_nsec);
    valid.then(|| (limit.tv_sec as u64).saturating_mul(1_000_000).saturating_add((limit.tv_nsec as u64).div_ceil(1000)))
}

/// Intercepts the C library's `poll`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn poll(fds: *mut pollfd, count: nfds_t, limit: c_int) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe {
        match ask(fds, count, millis(limit), std::ptr::null()) {
            Some(Polled::Done(result)) => result,
            Some(Polled::Kernel(left)) => real::poll(fds, count, to_millis(left)),
            None => real::poll(fds, count, limit),
        }
    }
}

/// Intercepts the C library's `__poll_chk`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __poll_chk(fds: *mut pollfd, count: nfds_t, limit: c_int, _room: size_t) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { poll(fds, count, limit) }
}

/// Intercepts the C library's `ppoll`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ppoll(fds: *mut pollfd, count: nfds_t, limit: *const timespec, mask: *const sigset_t) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe {
        if !takes_mask(mask) || !is_concerned(fds, count) {
            return real::ppoll(fds, count, limit, mask);
        }
        match limit.as_ref().map(micros) {
            Some(None) => fail(libc::EINVAL) as c_int,
            asked => match ask(fds, count, asked.flatten(), mask) {
                Some(Polled::Done(result)) => result,
                Some(Polled::Kernel(left)) if left != asked.flatten() => {
                    with_timespec(left, |limit| real::ppoll(fds, count, limit, mask))
                }
                _ => real::ppoll(fds, count, limit, mask),
            },
        }
    }
}

/// Intercepts the C library's `__ppoll_chk`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    limit: *const timespec,
    mask: *const sigset_t,
    _room: size_t,
) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe { ppoll(fds, count, limit, mask) }
}

/// Intercepts the C library's `select`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    limit: *mut timeval,
) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe {
        let micros = match limit.as_ref() {
            None => None,
            Some(limit) if limit.tv_sec < 0 || limit.tv_usec < 0 => return fail(libc::EINVAL) as c_int,
            Some(limit) => Some((limit.tv_sec as u64).saturating_mul(1_000_000).saturating_add(limit.tv_usec as u64)),
        };
        let asked = micros;
        let started = asked.map(|_| crate::wait::now());
        let result = match polling::select(count, [read, write, except], micros, std::ptr::null()) {
            Polled::Done(result) => result,
            // Linux writes back the time that is left.
            Polled::Kernel(left) if left == asked => return real::select(count, read, write, except, limit),
            Polled::Kernel(left) => {
                let mut rest = left.map(timeval_of);
                let result =
                    real::select(count, read, write, except, rest.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut));
                if let (Some(limit), Some(rest)) = (limit.as_mut(), rest) {
                    *limit = rest;
                }
                return result;
            }
        };
        if let (Some(limit), Some(asked), Some(started)) = (limit.as_mut(), asked, started) {
            *limit = timeval_of(asked.saturating_sub(crate::wait::now() - started));
        }
        result
    }
}

/// Intercepts the C library's `pselect`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    limit: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`).
    unsafe {
        let micros = match limit.as_ref().map(micros) {
            Some(None) => return fail(libc::EINVAL) as c_int,
            limit => limit.flatten(),
        };
        if !takes_mask(mask) {
            return real::pselect(count, read, write, except, limit, mask);
        }
        match polling::select(count, [read, write, except], micros, mask) {
            Polled::Done(result) => result,
            Polled::Kernel(left) if left == micros => real::pselect(count, read, write, except, limit, mask),
            Polled::Kernel(left) => with_timespec(left, |limit| real::pselect(count, read, write, except, limit, mask)),
        }
    }
}

/// Intercepts the C library's `epoll_create`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn epoll_create(size: c_int) -> c_int {
    // SAFETY: no pointers are involved.
    epoll::created(unsafe { real::epoll_create(size) })
}

/// Intercepts the C library's `epoll_create1`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn epoll_create1(flags: c_int) -> c_int {
    // SAFETY: no pointers are involved.
    epoll::created(unsafe { real::epoll_create1(flags) })
}

/// Intercepts the C library's `epoll_ctl`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    let Some(_section) = Section::enter() else {
        // SAFETY: the program's own arguments (`# Safety`).
        return unsafe { real::epoll_ctl(set, operation, fd, event) };
    };
    // SAFETY: the program's own arguments (`# Safety`).
    let done = unsafe { epoll::control(set, operation, fd, event) };
    if done == 0 {
        // SAFETY: the program's own arguments (`# Safety`); the kernel has just accepted the event.
        unsafe {
            listening::watch(set, operation, fd, event);
            udp::watch(set, operation, fd, event);
        }
    }
    done
}

/// The variants of epoll_wait, for a set that this library tracks; else None. `limit` is in microseconds, and so is the
/// one with which `native` makes the program's own call.
///
/// # Safety
/// `events` must be null, or have room for `most` events.
unsafe fn wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    limit: Option<u64>,
    mask: *const sigset_t,
    native: impl Fn(&mut [epoll_event], Option<u64>) -> c_int,
) -> Option<c_int> {
    /// Most events that the kernel takes (Linux, EP_MAX_EVENTS).
    const MOST: c_int = c_int::MAX / size_of::<epoll_event>() as c_int;
    let known = table::set_of(set)?;
    let _whole = Whole::begin_cancelable();
    if !(1..=MOST).contains(&most) || io::is_outside(events.cast(), most as usize * size_of::<epoll_event>()) || !takes_mask(mask)
    {
        return None;
    }
    // SAFETY: the program's own arguments (`# Safety`).
    if !faults::read(events).is_some_and(|event| unsafe { faults::write(events, event) }) {
        // As in the kernel, the bad pointer is found only when there is an event to write.
        let nowhere = &mut [epoll_event { events: 0, u64: 0 }];
        let got = known.wait(set, nowhere, limit, mask, &native);
        return Some(if got > 0 { fail(libc::EFAULT) as c_int } else { got });
    }
    // SAFETY: `events` has room for `most` events (`# Safety`), the first of which could just be written.
    let events = unsafe { std::slice::from_raw_parts_mut(events, most as usize) };
    Some(known.wait(set, events, limit, mask, &native))
}

fn millis(limit: c_int) -> Option<u64> {
    (limit >= 0).then(|| limit as u64 * 1000)
}

/// Intercepts the C library's `epoll_wait`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_wait(set: c_int, events: *mut epoll_event, most: c_int, limit: c_int) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`); the events are those that it gave.
    unsafe {
        wait(set, events, most, millis(limit), std::ptr::null(), |events, left| {
            real::epoll_wait(set, events.as_mut_ptr(), events.len() as c_int, to_millis(left))
        })
        .unwrap_or_else(|| real::epoll_wait(set, events, most, limit))
    }
}

/// Intercepts the C library's `epoll_pwait`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    limit: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's own arguments (`# Safety`); the events are those that it gave.
    unsafe {
        wait(set, events, most, millis(limit), mask, |events, left| {
            real::epoll_pwait(set, events.as_mut_ptr(), events.len() as c_int, to_millis(left), mask)
        })
        .unwrap_or_else(|| real::epoll_pwait(set, events, most, limit, mask))
    }
}

/// Intercepts the C library's `epoll_pwait2`.
///
/// # Safety
/// As for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait2(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    limit: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let call = |events: *mut epoll_event, most: c_int, limit: *const timespec| {
        let [set, most] = [set, most].map(libc::c_long::from);
        let mask_bytes = 8;
        // SAFETY: the program's own arguments (`# Safety`).
        unsafe { real::syscall(libc::SYS_epoll_pwait2, set, events as _, most, limit as _, mask as _, mask_bytes) as c_int }
    };
    // SAFETY: the program's own arguments (`# Safety`); the events are those that it gave.
    unsafe {
        if table::set_of(set).is_none() {
            return call(events, most, limit);
        }
        let time = if limit.is_null() { None } else { Some(faults::read(limit).and_then(|limit| micros(&limit))) };
        if time == Some(None) {
            // The kernel refuses it.
            return call(events, most, limit);
        }
        let time = time.flatten();
        let native = |events: &mut [epoll_event], left| match left == time {
            true => call(events.as_mut_ptr(), events.len() as c_int, limit),
            false => with_timespec(left, |left| call(events.as_mut_ptr(), events.len() as c_int, left)),
        };
        wait(set, events, most, time, mask, native).unwrap_or_else(|| call(events, most, limit))
    }
}
