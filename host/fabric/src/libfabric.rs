//! The libfabric that has loaded us: its version and its log.
//!
//! A process may have several libfabrics, whose symbols need not be visible here: a plug-in of an MPI library may have
//! loaded its own. So the right one is found by the address of the caller, and its functions by name.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// fi_log() of `rdma/providers/fi_log.h`.
type Log = unsafe extern "C" fn(*const c_void, c_int, c_int, *const c_char, c_int, *const c_char, ...);
/// fi_log_enabled().
type LogEnabled = unsafe extern "C" fn(*const c_void, c_int, c_int) -> c_int;
type Version = unsafe extern "C" fn() -> u32;

/// Of enum fi_log_level: errors are always printed.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Level {
    Warn = 0,
    Info = 2,
}

/// FI_LOG_CORE.
const SUBSYSTEM: c_int = 0;
/// FI_VERSION(1, 17): what the headers say that this is written from.
const WRITTEN_FOR: u32 = 1 << 16 | 17;

struct Functions {
    version: Option<Version>,
    log: Option<Log>,
    log_enabled: Option<LogEnabled>,
}

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Finds the libfabric that calls. To be called by the first function that it calls.
pub fn find() {
    FUNCTIONS.get_or_init(|| {
        let library = caller();
        let find = |name: &CStr| {
            // SAFETY: a handle of dlopen() that is not closed, or null, which stands for RTLD_DEFAULT; a C string.
            let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
            (!symbol.is_null()).then_some(symbol)
        };
        // SAFETY: functions of these names have these types in every libfabric (its ABI is versioned, and they are of
        // its first).
        unsafe {
            Functions {
                version: find(c"fi_version").map(|found| std::mem::transmute::<*mut c_void, Version>(found)),
                log: find(c"fi_log").map(|found| std::mem::transmute::<*mut c_void, Log>(found)),
                log_enabled: find(c"fi_log_enabled").map(|found| std::mem::transmute::<*mut c_void, LogEnabled>(found)),
            }
        }
    });
}

/// The library of the nearest caller that is not this one, as dlopen() gives it; null if it is not found.
fn caller() -> *mut c_void {
    let mut frames = [std::ptr::null_mut::<c_void>(); 32];
    // SAFETY: room for 32 pointers.
    let count = unsafe { libc::backtrace(frames.as_mut_ptr(), 32) };
    let ours = library_of((caller as fn() -> *mut c_void) as *const c_void);
    let theirs =
        frames[..count.max(0) as usize].iter().filter_map(|frame| library_of(*frame)).find(|name| Some(name) != ours.as_ref());
    theirs.map_or(std::ptr::null_mut(), |name| {
        // SAFETY: a C string. RTLD_NOLOAD: only a library that is loaded is opened.
        unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }
    })
}

/// The file of the library that has this address.
fn library_of(address: *const c_void) -> Option<CString> {
    // SAFETY: Dl_info is plain data, for which zero is a value; dladdr() takes any address, and gives a C string that
    // lives as long as the library.
    unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        let known = libc::dladdr(address, &mut found) != 0 && !found.dli_fname.is_null();
        known.then(|| CStr::from_ptr(found.dli_fname).to_owned())
    }
}

/// fi_version(), with which a provider shows that it fits.
pub fn version() -> u32 {
    // SAFETY: fi_version() takes nothing.
    FUNCTIONS.get().and_then(|functions| functions.version).map_or(WRITTEN_FOR, |version| unsafe { version() })
}

/// Writes to libfabric's log, if it listens at this level (FI_LOG_LEVEL).
pub fn log(level: Level, text: &str) {
    let Some(Functions { log: Some(log), log_enabled: Some(enabled), .. }) = FUNCTIONS.get() else { return };
    let provider = crate::provider().cast();
    let Ok(text) = CString::new(text) else { return };
    // SAFETY: our provider, numbers of fi_log.h's enums, and C strings; "%s\n" asks for one.
    unsafe {
        if enabled(provider, level as c_int, SUBSYSTEM) != 0 {
            log(provider, level as c_int, SUBSYSTEM, c"rmpp".as_ptr(), 0, c"%s\n".as_ptr(), text.as_ptr());
        }
    }
}
