//! Filters of frames in the syntax of pcap-filter(7), by libpcap, which is loaded when it is needed.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};

/// Link-layer type of Ethernet (DLT_EN10MB), and the longest frame.
const ETHERNET: c_int = 1;
const LONGEST: c_int = 1 << 18;
/// No netmask is known (PCAP_NETMASK_UNKNOWN).
const NO_NETMASK: c_uint = u32::MAX;

/// struct bpf_program.
#[repr(C)]
struct Program {
    length: c_uint,
    instructions: *mut c_void,
}

/// struct pcap_pkthdr.
#[repr(C)]
struct Header {
    at: libc::timeval,
    captured: u32,
    length: u32,
}

type OpenDead = unsafe extern "C" fn(c_int, c_int) -> *mut c_void;
type Compile = unsafe extern "C" fn(*mut c_void, *mut Program, *const c_char, c_int, c_uint) -> c_int;
type GetError = unsafe extern "C" fn(*mut c_void) -> *const c_char;
type Close = unsafe extern "C" fn(*mut c_void);
type FreeCode = unsafe extern "C" fn(*mut Program);
type OfflineFilter = unsafe extern "C" fn(*const Program, *const Header, *const u8) -> c_int;

/// A filter.
pub struct PcapFilter {
    program: Program,
    filter: OfflineFilter,
    free: FreeCode,
}

/// Loads the library. It stays loaded.
fn load() -> Option<NonNull<c_void>> {
    [c"libpcap.so.1", c"libpcap.so.0.8"].into_iter().find_map(|name| {
        // SAFETY: the name is a string that ends with a zero; the library's initialisers do nothing that concerns us.
        NonNull::new(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) })
    })
}

fn symbol(library: NonNull<c_void>, name: &CStr) -> Result<NonNull<c_void>, String> {
    // SAFETY: the handle belongs to a loaded library, and the name ends with a zero.
    let found = NonNull::new(unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) });
    found.ok_or_else(|| format!("this libpcap has no {}", name.to_string_lossy()))
}

impl PcapFilter {
    /// Compiles a filter for Ethernet frames.
    ///
    /// # Errors
    /// A text that says what is wrong with the filter, or which package is missing.
    pub fn compile(text: &str) -> Result<PcapFilter, String> {
        let library = load().ok_or(
            "a filter needs libpcap, which is not installed: `apt install libpcap0.8` (libpcap on Fedora, Arch and Alpine)",
        )?;
        let text = CString::new(text).map_err(|_| "a filter with a zero byte")?;
        let names = [c"pcap_open_dead", c"pcap_compile", c"pcap_geterr", c"pcap_close", c"pcap_freecode", c"pcap_offline_filter"];
        let [open, compile, error, close, free, filter] = names.map(|name| symbol(library, name));
        // SAFETY: libpcap's functions of these names have these types (pcap.h), and pointers to functions the size of
        // others.
        let (open, compile, error, close, free, filter) = unsafe {
            (
                std::mem::transmute::<NonNull<c_void>, OpenDead>(open?),
                std::mem::transmute::<NonNull<c_void>, Compile>(compile?),
                std::mem::transmute::<NonNull<c_void>, GetError>(error?),
                std::mem::transmute::<NonNull<c_void>, Close>(close?),
                std::mem::transmute::<NonNull<c_void>, FreeCode>(free?),
                std::mem::transmute::<NonNull<c_void>, OfflineFilter>(filter?),
            )
        };
        let mut program = Program { length: 0, instructions: null_mut() };
        // SAFETY: `handle` is closed after its last use, and checked; `program` and `text` live for the call that gets
        // them; the error's text lies in the handle and is copied before that is closed.
        unsafe {
            let handle = open(ETHERNET, LONGEST);
            if handle.is_null() {
                return Err("libpcap has no memory".into());
            }
            let compiled = compile(handle, &raw mut program, text.as_ptr(), 1, NO_NETMASK);
            let failed = (compiled != 0).then(|| CStr::from_ptr(error(handle)).to_string_lossy().into_owned());
            close(handle);
            if let Some(why) = failed {
                return Err(why);
            }
        }
        Ok(PcapFilter { program, filter, free })
    }

    /// Whether a frame of `length` bytes matches, of which `bytes` holds the beginning.
    pub fn matches(&self, bytes: &[u8], length: u32) -> bool {
        let at = libc::timeval { tv_sec: 0, tv_usec: 0 };
        let header = Header { at, captured: bytes.len() as u32, length };
        // SAFETY: the program was compiled, and is freed in `drop` only; the header says how many bytes `bytes` has.
        unsafe { (self.filter)(&raw const self.program, &raw const header, bytes.as_ptr()) != 0 }
    }
}

impl Drop for PcapFilter {
    fn drop(&mut self) {
        // SAFETY: libpcap has made the program, and it is not used any more.
        unsafe { (self.free)(&raw mut self.program) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame of IPv4 with ports.
    fn frame(from: u16, to: u16) -> Vec<u8> {
        let mut frame = vec![0; 54];
        frame[12..15].copy_from_slice(&[8, 0, 0x45]);
        frame[23] = 6;
        frame[34..36].copy_from_slice(&from.to_be_bytes());
        frame[36..38].copy_from_slice(&to.to_be_bytes());
        frame
    }

    #[test]
    fn filters_are_those_of_pcap() {
        let filter = match PcapFilter::compile("tcp port 80 and not src port 81") {
            Ok(filter) => filter,
            // Without libpcap there is nothing else to try.
            Err(why) => return assert!(why.contains("apt install libpcap0.8"), "{why}"),
        };
        for (from, to, matches) in [(80, 1, true), (1, 80, true), (81, 80, false), (1, 2, false)] {
            assert_eq!(filter.matches(&frame(from, to), 1514), matches, "{from} > {to}");
        }
        assert!(!filter.matches(&frame(80, 1)[..20], 54), "what is not there does not match");
        let why = PcapFilter::compile("tcp prot 80").err().expect("no filter");
        assert!(why.contains("syntax error"), "{why}");
    }
}
