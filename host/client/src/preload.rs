//! The value of LD_PRELOAD that loads the library for unmodified programs.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The variable with the libraries that the dynamic linker loads first.
pub const VARIABLE: &str = "LD_PRELOAD";

/// The variable that keeps [`VARIABLE`] with its value, in a program for which a sanitizer's library was put in front.
pub const RESTORED: &str = "BATON_PRELOAD";

/// File name of the library.
pub const LIBRARY: &str = "libbaton_preload.so";

pub use baton_protocol::native::{GO, MUSL, STATIC};

/// What separates the libraries of a value of [`VARIABLE`].
fn is_separator(byte: &u8) -> bool {
    matches!(byte, b':' | b' ')
}

/// The libraries of a value of [`VARIABLE`].
fn entries(libraries: &[u8]) -> impl Iterator<Item = &[u8]> {
    libraries.split(is_separator).filter(|entry| !entry.is_empty())
}

fn file_name(entry: &[u8]) -> &[u8] {
    entry.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// Whether a library of this file name is among them.
pub fn names(libraries: &[u8], name: &[u8]) -> bool {
    entries(libraries).any(|entry| file_name(entry) == name)
}

/// Whether Baton's library is among them.
pub fn contains(libraries: &[u8]) -> bool {
    names(libraries, LIBRARY.as_bytes())
}

/// What precedes the library's path. glibc's dynamic linker replaces `$LIB` by the name of its library folder, which is
/// in the root or a few folders below. musl's dynamic linker finds no file under such a path and continues; if it found
/// the library, it could not load it and would end the program.
const FOR_GLIBC: &str = "/$LIB/../../../../../../../..";

/// The library's path in a form that only glibc finds.
fn for_glibc(library: &Path) -> OsString {
    let mut path = OsString::new();
    // Systems without this folder have their libraries elsewhere.
    if Path::new("/lib").is_dir() {
        path.push(FOR_GLIBC);
    }
    path.push(library);
    path
}

/// The parts of a value of [`VARIABLE`] before and after the part that only glibc understands. Joined, they give the
/// library's plain path.
pub fn around_token(libraries: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = libraries.windows(FOR_GLIBC.len()).position(|part| part == FOR_GLIBC.as_bytes())?;
    Some((&libraries[..at], &libraries[at + FOR_GLIBC.len()..]))
}

/// A value of [`VARIABLE`] without Baton's library, as the parts before and after it, and between them the library's
/// path. None if that does not begin at the root, or has something in it that only the dynamic linker replaces.
pub fn around_library(libraries: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let mut next = 0;
    let mut places = libraries.split(is_separator).map(|entry| {
        let begin = next;
        next += entry.len() + 1;
        (begin, entry)
    });
    let (begin, entry) = places.find(|(_, entry)| file_name(entry) == LIBRARY.as_bytes())?;
    let path = entry.strip_prefix(FOR_GLIBC.as_bytes()).unwrap_or(entry);
    if !path.starts_with(b"/") || path.contains(&b'$') {
        return None;
    }
    let (before, after) = (&libraries[..begin], &libraries[begin + entry.len()..]);
    Some(match after.split_first() {
        Some((_, after)) => (before, path, after),
        None => (before.strip_suffix(b":").unwrap_or(before), path, after),
    })
}

/// The value for a program: what it has already comes first, so that its own libraries see its calls.
pub fn value(before: Option<&OsStr>, library: &Path) -> OsString {
    let before = before.unwrap_or_default().as_bytes();
    let mut value = OsString::new();
    for entry in entries(before).filter(|entry| file_name(entry) != LIBRARY.as_bytes()) {
        value.push(OsStr::from_bytes(entry));
        value.push(":");
    }
    value.push(for_glibc(library));
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(parts: (&[u8], &[u8], &[u8])) -> [Vec<u8>; 3] {
        [parts.0.to_vec(), parts.1.to_vec(), parts.2.to_vec()]
    }

    #[test]
    fn what_is_there_comes_first() {
        let library = Path::new("/usr/lib/baton/libbaton_preload.so");
        let ours = for_glibc(library);
        let ours = ours.to_str().expect("a text");
        let value = |before: &str| value(Some(OsStr::new(before)), library).into_string().expect("a text");
        assert_eq!(value(""), ours);
        assert_eq!(value("/a/shim.so libother.so"), format!("/a/shim.so:libother.so:{ours}"));
        assert_eq!(value(&format!("shim.so:{ours}")), format!("shim.so:{ours}"), "once");
        if let Some((before, after)) = around_token(value("shim.so").as_bytes()) {
            assert_eq!([before, after].concat(), b"shim.so:/usr/lib/baton/libbaton_preload.so");
        }
        let path = &b"/usr/lib/baton/libbaton_preload.so"[..];
        let around = |before: &str, after: &str| around_library(format!("{before}{ours}{after}").as_bytes()).map(owned);
        assert_eq!(around("", ""), Some([b"".to_vec(), path.to_vec(), b"".to_vec()]));
        assert_eq!(around("a.so:", ""), Some([b"a.so".to_vec(), path.to_vec(), b"".to_vec()]));
        assert_eq!(around("a.so ", ":b.so"), Some([b"a.so ".to_vec(), path.to_vec(), b"b.so".to_vec()]));
        assert!(around_library(b"a.so:libbaton_preload.so").is_none() && around_library(b"/$LIB/libbaton_preload.so").is_none());
        assert!(
            contains(ours.as_bytes()) && names(b"shim.so:/x/libasan.so.8", b"libasan.so.8") && !names(b"libasan.so", b"asan")
        );
    }
}
