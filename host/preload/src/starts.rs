//! Programs that the process executes: what each of them needs in its environment so that this library is there, and
//! those that it cannot be in.
//!
//! - A sanitizer's library must come before all others in LD_PRELOAD, but in that program alone. So the variable gets
//!   it when such a program is executed, and [`RESTORED`] keeps what it was; there [`restore`] puts it back before the
//!   program looks.
//! - A program of musl does not find the library under the name that `baton run` gives it ([`baton_client::preload`]),
//!   and a statically linked one does not look. Both run natively, which is said.
//! - After chroot(2), for example, the library's path may lead nowhere. Then the library is taken out of LD_PRELOAD:
//!   the dynamic linker of each program would write to standard error that it is missing.
//!
//! All of this may happen in a child of vfork, or of a process with threads: nothing here takes memory of the heap, or
//! a lock.

use crate::sections::{self, Section};
use crate::{filters, forks, messages, thread};
use baton_client::preload::{self, RESTORED, VARIABLE};
use baton_linux::executable::{self, Path, Start, Text};
use libc::{c_char, c_int};
use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

unsafe extern "C" {
    /// The C library's list of environment variables, ended by null.
    static mut environ: *mut *mut c_char;
}

/// A list of strings, ended by null.
pub(crate) type Strings = *const *const c_char;

/// This program's environment.
pub(crate) fn environment() -> Strings {
    // SAFETY: a read of a pointer, as the C library's functions do it.
    unsafe { environ }.cast_const().cast()
}

/// The file that is executed. The pointers are the program's.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    Path(*const c_char),
    /// Searched for in PATH.
    Name(*const c_char),
    File(c_int),
    /// As execveat(2).
    At(c_int, *const c_char, c_int),
}

/// The variables of a list.
///
/// # Safety
/// `list` must be null, or a list of strings that lives on.
unsafe fn variables<'a>(list: Strings) -> impl Iterator<Item = &'a CStr> {
    let count = if list.is_null() { 0 } else { usize::MAX };
    // SAFETY: the list ends with null (`# Safety`), where the iteration ends.
    (0..count).map_while(move |at| unsafe { (*list.add(at)).as_ref().map(|text| CStr::from_ptr(text)) })
}

/// The value of a variable.
fn value_of<'a>(variable: &'a CStr, name: &str) -> Option<&'a [u8]> {
    variable.to_bytes().strip_prefix(name.as_bytes())?.strip_prefix(b"=")
}

/// Executes a program, by `call` with the environment that it needs instead of the given one.
///
/// # Safety
/// `target` and `environment` are as the call needs them.
pub(crate) unsafe fn execute<T>(target: Target, environment: Strings, call: impl FnOnce(Strings) -> T) -> T {
    // A child of vfork(2) that is killed in a section would stay in it for its parent's thread.
    let section = if forks::is_child_of_vfork() { None } else { Section::enter() };
    if sections::is_withdrawn() || section.is_none() && !forks::is_child_of_vfork() {
        return call(environment);
    }
    let errno = thread::errno();
    // SAFETY: the program's own list (`# Safety`).
    let libraries = unsafe { variables(environment) }.find_map(|variable| value_of(variable, VARIABLE));
    let Some(libraries) = libraries.filter(|libraries| preload::contains(libraries)) else {
        // The program has taken it out.
        drop(section);
        return call(environment);
    };
    // SAFETY: `# Safety`.
    let (path, start) = unsafe { examine(target) };
    match start {
        Start::Musl(linker) => say_once(&path, &[b"it is linked with musl (", linker.as_bytes(), preload::MUSL.as_bytes()]),
        Start::Static => say_once(&path, &[preload::STATIC.as_bytes()]),
        Start::Go => say_once(&path, &[preload::GO.as_bytes()]),
        Start::Glibc | Start::Sanitized(_) | Start::Unknown => {}
    }
    let others = others_if_missing(libraries);
    let first = match &start {
        Start::Sanitized(name) if others.is_none() && !preload::names(libraries, name.as_bytes()) => Some(name),
        _ => None,
    };
    // glibc would make a system call for the token that it does not make natively.
    let is_plain = || !matches!(start, Start::Musl(_)) && filters::are_unknown();
    let changed = others.or_else(|| preload::around_token(libraries).filter(|_| is_plain()));
    let (before, after) = changed.unwrap_or((libraries, &b""[..]));
    thread::set_errno(errno);
    // A program that is executed does not come back, and a child of vfork leaves its parent's memory so.
    drop(section);
    match first {
        None if changed.is_none() => call(environment),
        // SAFETY: `# Safety`.
        None => unsafe { with_libraries(environment, &[before, after], None, call) },
        // SAFETY: `# Safety`.
        Some(name) => unsafe { with_libraries(environment, &[name.as_bytes(), b":", before, after], Some(libraries), call) },
    }
}

/// What else is in LD_PRELOAD, before and after this library, if this library's path leads nowhere from here.
fn others_if_missing(libraries: &[u8]) -> Option<(&[u8], &[u8])> {
    let (before, path, after) = preload::around_library(libraries)?;
    let path: Path = Text::new(path)?;
    executable::is_missing(path.as_c_str()).then_some((before, after))
}

/// How the target starts, and the path of what starts.
///
/// # Safety
/// The target's pointer is null or a string.
unsafe fn examine(target: Target) -> (Path, Start) {
    // SAFETY: `# Safety`.
    let text = |text: *const c_char| unsafe { if text.is_null() { c"" } else { CStr::from_ptr(text) } };
    // SAFETY: the program's own descriptor, which is open during its call; the kernel rejects others.
    let file = |fd: c_int| (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) });
    let open = |fd: c_int| (Text::new(b"a program"), file(fd).map_or((None, Start::Unknown), executable::of_file));
    let (path, (script, start)) = match target {
        Target::Path(path) | Target::At(libc::AT_FDCWD, path, _) => {
            (Text::new(text(path).to_bytes()), executable::of_path(None, text(path)))
        }
        Target::Name(name) => {
            // SAFETY: the program's own list, as the C library's function uses it.
            let path = unsafe { variables(environment()) }.find_map(|variable| value_of(variable, "PATH"));
            let found = executable::search(text(name), path);
            (found, found.map_or((None, Start::Unknown), |found| executable::of_path(None, found.as_c_str())))
        }
        Target::File(fd) => open(fd),
        Target::At(fd, path, flags) if flags & libc::AT_EMPTY_PATH != 0 && text(path).is_empty() => open(fd),
        Target::At(fd, path, _) => (
            Text::new(text(path).to_bytes()),
            file(fd).map_or((None, Start::Unknown), |at| executable::of_path(Some(at), text(path))),
        ),
    };
    (script.or(path).unwrap_or_default(), start)
}

/// Whether it has been said that a program runs without Baton. It is said once by a program and the children that it
/// forks, which share this, so that a shell does not say it for each command.
static SAID: AtomicPtr<AtomicBool> = AtomicPtr::new(std::ptr::null_mut());

/// As [`SAID`], for a process without it.
static SAID_HERE: AtomicBool = AtomicBool::new(false);

/// Has the children that are forked from now on share [`SAID`].
pub(crate) fn share() {
    if !SAID.load(Ordering::Acquire).is_null() {
        return;
    }
    let length = size_of::<AtomicBool>();
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return;
    }
    let page = page.cast::<AtomicBool>();
    // SAFETY: the mapping is as long as an AtomicBool, of zeroes, which is false, and stays.
    unsafe { (*page).store(SAID_HERE.load(Ordering::Relaxed), Ordering::Relaxed) };
    SAID.store(page, Ordering::Release);
}

/// Says that a program runs natively, and why, unless this was said. What may not be written here can be said later.
fn say_once(path: &Path, why: &[&[u8]]) {
    if !messages::may_be_written() {
        return;
    }
    // SAFETY: null, or the mapping of `share`, which stays.
    let said = unsafe { SAID.load(Ordering::Acquire).as_ref() }.unwrap_or(&SAID_HERE);
    if said.swap(true, Ordering::AcqRel) {
        return;
    }
    let mut line: Text<8192> = Text::default();
    let parts = [b"baton: ", path.as_bytes(), b" runs without Baton: "];
    let whole = parts.iter().chain(why).chain([&&b"\n"[..]]).all(|part| line.push(part));
    if whole && filters::are_unknown() {
        messages::say_under_filter(line.as_bytes());
    } else if whole {
        messages::say(line.as_bytes());
    }
}

/// Words of room on the stack for an environment.
const USUAL: usize = 1024;

/// Calls with room for so many words: on the stack, or in a mapping, which a child of vfork leaves to its parent.
fn with_room<T>(words: usize, call: impl FnOnce(&mut [usize]) -> T) -> T {
    if words <= USUAL {
        return call(&mut [0; USUAL]);
    }
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let bytes = words * size_of::<usize>();
    // SAFETY: a new mapping at an address of the kernel's choice.
    let room = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if room == libc::MAP_FAILED {
        return call(&mut []);
    }
    // SAFETY: the mapping has `words` words of zeroes, and nobody else uses it.
    let done = call(unsafe { std::slice::from_raw_parts_mut(room.cast(), words) });
    // SAFETY: the mapping that mmap(2) has made here, whose last use was the call.
    unsafe { libc::munmap(room, bytes) };
    done
}

/// Calls with an environment in which LD_PRELOAD is `value`, and which says that it was `before`.
///
/// # Safety
/// `environment` is a list of strings.
#[cold]
#[inline(never)]
unsafe fn with_libraries<T>(environment: Strings, value: &[&[u8]], before: Option<&[u8]>, call: impl FnOnce(Strings) -> T) -> T {
    let restored = [RESTORED.as_bytes(), b"=", VARIABLE.as_bytes()];
    let restored = if before.is_some() { &restored[..] } else { &[] };
    let length = |parts: &[&[u8]]| parts.iter().map(|part| part.len()).sum::<usize>();
    let bytes = VARIABLE.len() + length(value) + length(restored) + before.map_or(0, <[u8]>::len) + 4;
    // SAFETY: `# Safety`.
    let count = unsafe { variables(environment) }.count();
    // The variables, one more, and null; then the texts.
    let pointers = count + 2;
    let words = pointers + bytes.div_ceil(size_of::<usize>());
    with_room(words, |room| {
        if room.len() < words {
            return call(environment);
        }
        let (list, text) = room.split_at_mut(pointers);
        let mut free = text.as_mut_ptr().cast::<u8>();
        let mut put = |name: &[&[u8]], value: &[&[u8]]| {
            let begin = free as usize;
            for part in name.iter().chain(&[&b"="[..]]).chain(value) {
                // SAFETY: `bytes` counts both texts, and for each the sign and the NUL after it, which is there
                // already.
                unsafe {
                    std::ptr::copy_nonoverlapping(part.as_ptr(), free, part.len());
                    free = free.add(part.len());
                }
            }
            free = free.wrapping_add(1);
            begin
        };
        let libraries = put(&[VARIABLE.as_bytes()], value);
        // SAFETY: `# Safety`.
        for (place, variable) in list.iter_mut().zip(unsafe { variables(environment) }) {
            *place = if value_of(variable, VARIABLE).is_some() { libraries } else { variable.as_ptr() as usize };
        }
        if let Some(before) = before {
            list[count] = put(restored, &[before]);
        }
        call(list.as_ptr().cast())
    })
}

/// Puts LD_PRELOAD back as it was when this program was executed ([`with_libraries`]): its children are to have that.
pub(crate) fn restore() {
    // SAFETY: the program's list, before any other thread runs. An entry of it is a string that stays, so the tail of
    // one is, too.
    unsafe {
        let list = environ;
        let kept = |list| variables(list).position(|variable| value_of(variable, RESTORED).is_some());
        let Some(at) = kept(list.cast_const().cast()) else { return };
        let before = (*list.add(at)).add(RESTORED.len() + 1);
        if let Some(place) = variables(list.cast_const().cast()).position(|variable| value_of(variable, VARIABLE).is_some()) {
            *list.add(place) = before;
        }
        let mut next = at;
        while !(*list.add(next)).is_null() {
            *list.add(next) = *list.add(next + 1);
            next += 1;
        }
    }
}

/// Puts a variable, `NAME=value`, in place of the one that is there. It stays in use. Makes no system call.
pub(crate) fn replace(name: &str, variable: *mut c_char) {
    if variable.is_null() {
        return;
    }
    // SAFETY: the list ends with null, and each entry is a string. A thread that reads the entry meanwhile gets the old
    // one or the new one, which are never freed.
    unsafe {
        let list = environ;
        if let Some(at) = variables(list.cast_const().cast()).position(|variable| value_of(variable, name).is_some()) {
            (*AtomicPtr::from_ptr(list.add(at))).store(variable, Ordering::Release);
        }
    }
}
