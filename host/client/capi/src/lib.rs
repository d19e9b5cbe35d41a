//! libbaton: the client library for C. `include/baton.h` documents it. This file translates C's pointers and errno into
//! calls of [`baton_client::Session`].
//!
//! Every function must be called as the header says: with a session from `baton_open` that has not ended and is used by
//! one thread at a time, and with buffers of the given lengths.

use baton_client::{Buffer, Session, agent_socket};
use baton_protocol::program::Place;
use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// A session, and the connections that were ready but did not fit into the caller's array.
pub struct CSession {
    session: Session,
    ready: Vec<u32>,
}

/// The errno for an error.
fn number_of(error: &io::Error) -> c_int {
    error.raw_os_error().unwrap_or(match error.kind() {
        // The agent does not answer at the moment, or another thread is waiting for its answer.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::ResourceBusy => libc::EAGAIN,
        io::ErrorKind::NotFound => libc::EBADF,
        io::ErrorKind::InvalidInput => libc::EINVAL,
        io::ErrorKind::OutOfMemory => libc::ENOMEM,
        io::ErrorKind::InvalidData => libc::EPROTO,
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => libc::ECONNRESET,
        _ => libc::EOPNOTSUPP,
    })
}

fn fail(error: &io::Error) -> c_int {
    let number = number_of(error);
    LAST_ERROR.with(|last| *last.borrow_mut() = CString::new(error.to_string().replace('\0', " ")).unwrap_or_default());
    // SAFETY: `__errno_location` returns a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = number };
    -1
}

fn answer<T>(result: io::Result<T>, value: impl FnOnce(T) -> c_int) -> c_int {
    match result {
        Ok(found) => value(found),
        Err(error) => fail(&error),
    }
}

fn count(result: io::Result<usize>) -> isize {
    match result {
        Ok(count) => count as isize,
        Err(error) => fail(&error) as isize,
    }
}

/// The session behind a pointer.
///
/// # Safety
/// It must be null, or from [`baton_open`] and not ended, and no other thread may use it meanwhile.
unsafe fn session<'a>(pointer: *mut CSession) -> io::Result<&'a mut CSession> {
    // SAFETY: this function's `# Safety`.
    unsafe { pointer.as_mut() }.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the session is NULL"))
}

/// See `baton.h`.
///
/// # Safety
/// `path` must be null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_open(path: *const c_char) -> *mut CSession {
    let path = if path.is_null() {
        agent_socket()
    } else {
        // SAFETY: a non-null `path` is a C string (`# Safety`).
        PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()))
    };
    match Session::connect(&path) {
        Ok(session) => Box::into_raw(Box::new(CSession { session, ready: Vec::new() })),
        Err(error) => {
            fail(&error);
            std::ptr::null_mut()
        }
    }
}

/// See `baton.h`.
///
/// # Safety
/// See the module; the session must not be used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_end(pointer: *mut CSession) {
    if !pointer.is_null() {
        // SAFETY: it came from `baton_open`, and is not used afterwards (`# Safety`).
        drop(unsafe { Box::from_raw(pointer) });
    }
}

/// See `baton.h`.
///
/// # Safety
/// See the module; `fd` must be a descriptor of the caller's, who gives it up, unless errno is EAGAIN then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_adopt(pointer: *mut CSession, fd: c_int) -> c_int {
    if fd < 0 {
        return fail(&io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the session is valid and the descriptor is given up (`# Safety`); it is given back with EAGAIN.
    let (session, fd) = unsafe { (session(pointer), OwnedFd::from_raw_fd(fd)) };
    let session = match session {
        Ok(session) => session,
        Err(error) => return fail(&error),
    };
    match session.session.try_adopt(fd) {
        Ok(id) => id as c_int,
        Err((error, fd)) => {
            if number_of(&error) == libc::EAGAIN {
                // The descriptor stays the caller's.
                let _ = fd.into_raw_fd();
            } else {
                // Dropped before errno is set, since closing may change errno.
                drop(fd);
            }
            fail(&error)
        }
    }
}

/// See `baton.h`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_move(pointer: *mut CSession, connection: c_int, to: c_int) -> c_int {
    let to = match to {
        0 => Place::Kernel,
        1 => Place::Nic,
        _ => return fail(&io::Error::new(io::ErrorKind::InvalidInput, "a connection moves to BATON_KERNEL or to BATON_NIC")),
    };
    // SAFETY: the session is valid (`# Safety`).
    answer(unsafe { session(pointer) }.and_then(|s| s.session.move_to(connection as u32, to)), |()| 0)
}

/// See `baton.h`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_place(pointer: *mut CSession, connection: c_int) -> c_int {
    // SAFETY: the session is valid (`# Safety`).
    answer(unsafe { session(pointer) }.map(|s| s.session.place(connection as u32)), |place| match place {
        Some(Place::Kernel) => 0,
        Some(Place::Nic) => 1,
        None => 2,
    })
}

/// See `baton.h`.
///
/// # Safety
/// See the module; `bytes` must point at `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_send(pointer: *mut CSession, connection: c_int, bytes: *const c_void, length: usize) -> isize {
    if bytes.is_null() && length > 0 {
        return fail(&io::Error::from_raw_os_error(libc::EFAULT)) as isize;
    }
    // SAFETY: the session is valid and `bytes` has `length` bytes (`# Safety`); with no bytes the pointer is not used.
    let (session, bytes) = unsafe {
        let bytes: &[u8] = if length == 0 { &[] } else { std::slice::from_raw_parts(bytes.cast(), length) };
        (session(pointer), bytes)
    };
    count(session.and_then(|s| s.session.send(connection as u32, bytes)))
}

/// See `baton.h`.
///
/// # Safety
/// See the module; `bytes` must point at room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_receive(pointer: *mut CSession, connection: c_int, bytes: *mut c_void, length: usize) -> isize {
    if bytes.is_null() && length > 0 {
        return fail(&io::Error::from_raw_os_error(libc::EFAULT)) as isize;
    }
    // SAFETY: the session is valid and `bytes` has room for `length` bytes (`# Safety`), for which every value is
    // valid.
    let (session, bytes) = unsafe {
        let bytes: &mut [u8] = if length == 0 { &mut [] } else { std::slice::from_raw_parts_mut(bytes.cast(), length) };
        (session(pointer), bytes)
    };
    count(session.and_then(|s| s.session.receive(connection as u32, bytes)))
}

fn boxed<T>(result: io::Result<T>) -> *mut T {
    match result {
        Ok(value) => Box::into_raw(Box::new(value)),
        Err(error) => {
            fail(&error);
            std::ptr::null_mut()
        }
    }
}

/// See `baton.h`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_buffer_new(pointer: *mut CSession, length: usize) -> *mut Buffer {
    // SAFETY: the session is valid (`# Safety`).
    boxed(unsafe { session(pointer) }.and_then(|s| s.session.buffer(length)))
}

/// See `baton.h`.
///
/// # Safety
/// `buffer` must be null or a buffer of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_buffer_bytes(buffer: *const Buffer) -> *const c_void {
    // SAFETY: `buffer` is null or valid (`# Safety`).
    unsafe { buffer.as_ref() }.map_or(std::ptr::null(), |buffer| buffer.bytes().as_ptr().cast())
}

/// See `baton.h`.
///
/// # Safety
/// `buffer` must be null or a buffer of the caller's, who gives it up.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_buffer_free(buffer: *mut Buffer) {
    if !buffer.is_null() {
        // SAFETY: it came from `boxed`, and is not used afterwards (`# Safety`).
        drop(unsafe { Box::from_raw(buffer) });
    }
}

/// See `baton.h`.
///
/// # Safety
/// See the module; `buffer` must be null or a buffer of the caller's, who gives it up.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_post(pointer: *mut CSession, connection: c_int, buffer: *mut Buffer) -> c_int {
    if buffer.is_null() {
        return fail(&io::Error::from_raw_os_error(libc::EFAULT));
    }
    // SAFETY: the session is valid (`# Safety`); the buffer came from `boxed`, and is given up.
    let (session, buffer) = unsafe { (session(pointer), Box::from_raw(buffer)) };
    answer(session.and_then(|s| s.session.post(connection as u32, *buffer)), |()| 0)
}

/// See `baton.h`.
///
/// # Safety
/// See the module; `length` must point at a number, `placed` too or be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_take_posted(
    pointer: *mut CSession,
    connection: c_int,
    length: *mut usize,
    placed: *mut usize,
) -> *mut Buffer {
    // SAFETY: the session is valid, and both pointers are valid or null (`# Safety`).
    let (session, length, placed) = unsafe { (session(pointer), length.as_mut(), placed.as_mut()) };
    let Some(length) = length else {
        fail(&io::Error::from_raw_os_error(libc::EFAULT));
        return std::ptr::null_mut();
    };
    boxed(session.and_then(|s| s.session.take_posted(connection as u32)).map(|filled| {
        *length = filled.length;
        if let Some(placed) = placed {
            *placed = filled.placed;
        }
        filled.buffer
    }))
}

/// See `baton.h`.
///
/// # Safety
/// `buffer` must be null or a buffer of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_buffer_memory(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: `buffer` is null or valid (`# Safety`).
    let bytes = unsafe { buffer.as_ref() }.map(Buffer::bytes);
    // Atomics may be written through a shared reference.
    bytes.map_or(std::ptr::null_mut(), |bytes| bytes.as_ptr().cast_mut().cast())
}

/// See `baton.h`.
///
/// # Safety
/// See the module; `buffer` must be null or a buffer of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_send_buffer(
    pointer: *mut CSession,
    connection: c_int,
    buffer: *const Buffer,
    offset: usize,
    length: usize,
) -> isize {
    // SAFETY: the session is valid, and `buffer` is null or valid (`# Safety`).
    let (session, buffer) = unsafe { (session(pointer), buffer.as_ref()) };
    let Some(buffer) = buffer else { return fail(&io::Error::from_raw_os_error(libc::EFAULT)) as isize };
    let range = offset..offset.saturating_add(length);
    count(session.and_then(|s| s.session.send_buffer(connection as u32, buffer, range)))
}

/// See `baton.h`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_take_sent(pointer: *mut CSession, connection: c_int) -> c_int {
    // SAFETY: the session is valid (`# Safety`).
    answer(unsafe { session(pointer) }.and_then(|s| s.session.take_sent(connection as u32)), |parts| parts as c_int)
}

/// See `baton.h`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_shutdown(pointer: *mut CSession, connection: c_int) -> c_int {
    // SAFETY: the session is valid (`# Safety`).
    answer(unsafe { session(pointer) }.and_then(|s| s.session.shutdown(connection as u32)), |()| 0)
}

/// See `baton.h`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_set_option(
    pointer: *mut CSession,
    connection: c_int,
    level: c_int,
    option: c_int,
    value: c_int,
) -> c_int {
    // SAFETY: the session is valid (`# Safety`).
    answer(unsafe { session(pointer) }.and_then(|s| s.session.set_option(connection as u32, level, option, value)), |()| 0)
}

/// See `baton.h`.
///
/// # Safety
/// See the module; `value` must point at an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_get_option(
    pointer: *mut CSession,
    connection: c_int,
    level: c_int,
    option: c_int,
    value: *mut c_int,
) -> c_int {
    // SAFETY: the session and `value` are valid (`# Safety`).
    let (session, value) = unsafe { (session(pointer), value.as_mut()) };
    let Some(value) = value else { return fail(&io::Error::from_raw_os_error(libc::EFAULT)) };
    answer(session.and_then(|s| s.session.option(connection as u32, level, option)), |found| {
        *value = found;
        0
    })
}

/// See `baton.h`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_node(pointer: *mut CSession, connection: c_int) -> c_int {
    // SAFETY: the session is valid (`# Safety`).
    let node = unsafe { session(pointer) }.and_then(|s| s.session.node(connection as u32));
    let node = node.and_then(|node| node.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODATA)));
    answer(node, |node| node as c_int)
}

/// See `baton.h`.
///
/// # Safety
/// See the module; `fd` must be open while the session lasts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_watch(pointer: *mut CSession, fd: c_int) -> c_int {
    if fd < 0 {
        return fail(&io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the session is valid, and `fd` stays open (`# Safety`).
    let (session, fd) = unsafe { (session(pointer), BorrowedFd::borrow_raw(fd)) };
    answer(session.and_then(|s| s.session.watch(fd)), |()| 0)
}

/// See `baton.h`.
///
/// # Safety
/// See the module; `ready` must point at room for `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_poll(pointer: *mut CSession, timeout: c_int, ready: *mut u32, count: usize) -> c_int {
    if ready.is_null() || count == 0 {
        return fail(&io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: the session is valid and `ready` has room for `count` numbers (`# Safety`), for which every value is
    // valid.
    let (session, out) = unsafe { (session(pointer), std::slice::from_raw_parts_mut(ready, count)) };
    let waited = session.and_then(|s| {
        let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
        // If connections are left over from the last call, poll for more without waiting.
        let timeout = if s.ready.is_empty() { timeout } else { Some(Duration::ZERO) };
        s.session.poll(timeout, &mut s.ready)?;
        let taken = s.ready.len().min(out.len());
        for (place, id) in out.iter_mut().zip(s.ready.drain(..taken)) {
            *place = id;
        }
        Ok(taken)
    });
    answer(waited, |taken| taken as c_int)
}

/// See `baton.h`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_release(pointer: *mut CSession, connection: c_int) -> c_int {
    // SAFETY: the session is valid (`# Safety`).
    answer(unsafe { session(pointer) }.and_then(|s| s.session.release(connection as u32)), IntoRawFd::into_raw_fd)
}

/// See `baton.h`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_close(pointer: *mut CSession, connection: c_int) -> c_int {
    // SAFETY: the session is valid (`# Safety`).
    answer(unsafe { session(pointer) }.and_then(|s| s.session.close(connection as u32)), |()| 0)
}

/// See `baton.h`.
#[unsafe(no_mangle)]
pub extern "C" fn baton_error() -> *const c_char {
    LAST_ERROR.with(|last| last.borrow().as_ptr())
}
