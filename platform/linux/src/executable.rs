//! How an executable file becomes a program: which dynamic linker the kernel starts for it, if any, and whether that
//! has to load a sanitizer's library before all others.
//!
//! Nothing here allocates memory or takes a lock, since a child of vfork(2) calls it, too. It makes only system calls
//! that a dynamic linker makes as well: so a seccomp filter that lets the program start lets these calls through.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A text of less than `N` bytes, and NUL after it.
#[derive(Clone, Copy)]
pub struct Text<const N: usize> {
    bytes: [u8; N],
    length: usize,
}

impl<const N: usize> Text<N> {
    /// None if it is too long.
    pub fn new(text: &[u8]) -> Option<Text<N>> {
        let mut made = Text::default();
        made.push(text).then_some(made)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Up to the first NUL.
    pub fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }

    /// Appends as much of `more` as there is room for, and returns whether all of it fitted.
    pub fn push(&mut self, more: &[u8]) -> bool {
        let room = more.len().min(N - 1 - self.length);
        self.bytes[self.length..self.length + room].copy_from_slice(&more[..room]);
        self.length += room;
        room == more.len()
    }
}

impl<const N: usize> Default for Text<N> {
    fn default() -> Text<N> {
        Text { bytes: [0; N], length: 0 }
    }
}

/// A path (PATH_MAX).
pub type Path = Text<4096>;

/// Name of a shared library or of a dynamic linker.
pub type Name = Text<256>;

/// How a program starts.
#[derive(Clone, Copy)]
pub enum Start {
    /// By glibc's dynamic linker, without a sanitizer's library.
    Glibc,
    /// By glibc's dynamic linker, with a sanitizer's library, which must come before all others.
    Sanitized(Name),
    /// By musl's dynamic linker, of this path.
    Musl(Name),
    /// By itself: it is statically linked.
    Static,
    /// By glibc's dynamic linker, but it is a Go program: it makes most system calls itself.
    Go,
    /// Otherwise, or its file cannot be read.
    Unknown,
}

/// Most scripts that are each other's interpreters (Linux, fs/exec.c).
const MOST_SCRIPTS: usize = 5;

/// Bytes of a file's beginning that the kernel looks at (Linux, BINPRM_BUF_SIZE).
const BEGINNING: usize = 256;

/// How an open file starts. For a script it is its interpreter that starts, of the path that is returned.
pub fn of_file(file: BorrowedFd<'_>) -> (Option<Path>, Start) {
    let mut beginning = [0; BEGINNING];
    let length = rustix::io::pread(file, &mut beginning, 0).unwrap_or(0);
    match interpreter(&beginning[..length]) {
        None => (None, elf(&|at, buffer: &mut [u8]| rustix::io::pread(file, buffer, at).unwrap_or(0))),
        Some(path) => of_script(path),
    }
}

fn of_script(first: &[u8]) -> (Option<Path>, Start) {
    let mut path: Option<Path> = Text::new(first);
    for _ in 0..MOST_SCRIPTS {
        let Some(file) = path.and_then(|path| open(None, path.as_c_str()).ok()) else { break };
        let mut beginning = [0; BEGINNING];
        let length = rustix::io::pread(&file, &mut beginning, 0).unwrap_or(0);
        match interpreter(&beginning[..length]) {
            None => return (path, of_file(file.as_fd()).1),
            Some(next) => path = Text::new(next),
        }
    }
    (path, Start::Unknown)
}

/// How the file of this path starts, as [`of_file`]. A relative path begins at `directory`, or else at the current one.
pub fn of_path(directory: Option<BorrowedFd<'_>>, path: &CStr) -> (Option<Path>, Start) {
    match open(directory, path) {
        Ok(file) => of_file(file.as_fd()),
        Err(_) => (None, Start::Unknown),
    }
}

/// Whether no file is found under this path, or it may not be read. False where that stays unknown: this process may
/// have no descriptor left.
pub fn is_missing(path: &CStr) -> bool {
    matches!(open(None, path), Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP))
}

fn open(directory: Option<BorrowedFd<'_>>, path: &CStr) -> Result<OwnedFd, Errno> {
    // A pipe or a device that is named like a program holds nobody up.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    rustix::fs::openat(directory.unwrap_or(rustix::fs::CWD), path, flags, Mode::empty())
}

/// The file that execvp(3) finds for this name, with the PATH of the environment, unless a file of that name cannot be
/// executed.
pub fn search(name: &CStr, path: Option<&[u8]>) -> Option<Path> {
    let name = name.to_bytes();
    if name.contains(&b'/') || name.is_empty() {
        return Text::new(name);
    }
    path.unwrap_or(b"/bin:/usr/bin").split(|byte| *byte == b':').find_map(|directory| {
        // An empty entry is the current directory.
        let mut candidate: Path = Text::new(if directory.is_empty() { b"." } else { directory })?;
        let whole = candidate.push(b"/") && candidate.push(name);
        (whole && open(None, candidate.as_c_str()).is_ok()).then_some(candidate)
    })
}

/// The interpreter in the first line of a script.
fn interpreter(beginning: &[u8]) -> Option<&[u8]> {
    let line = beginning.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    line.split(|byte| matches!(byte, b' ' | b'\t' | 0)).find(|word| !word.is_empty())
}

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const DYNAMIC_ENTRY: usize = 16;
/// Most program headers, and entries of the dynamic section, that are looked at.
const MOST: usize = 1024;

const TYPE_EXECUTABLE: u16 = 2;
const TYPE_SHARED: u16 = 3;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_DYNAMIC: u32 = 2;
const SEGMENT_INTERPRETER: u32 = 3;
const SEGMENT_NOTE: u32 = 4;
/// A note's name and type with which Go's linker marks a program (cmd/link, elf.go, ELF_NOTE_GOBUILDID_TAG).
const GO_NOTE: (&[u8; 4], u32) = (b"Go\0\0", 4);
/// A note's header, with a name of four bytes.
const NOTE: usize = 16;
const DYNAMIC_END: u64 = 0;
const DYNAMIC_NEEDED: u64 = 1;
const DYNAMIC_STRINGS: u64 = 5;
const DYNAMIC_FLAGS: u64 = 0x6fff_fffb;
/// Flag of a position-independent executable, which a shared library has not, and the dynamic linker neither.
const FLAG_EXECUTABLE: u64 = 0x0800_0000;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// Reads a file at an offset; the number of bytes read.
type Read<'a> = &'a dyn Fn(u64, &mut [u8]) -> usize;

fn word<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|n| bytes[at + n])
}

/// A part of the file.
#[derive(Clone, Copy)]
struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    length: u64,
}

/// An ELF file of this machine.
struct Elf<'a> {
    read: Read<'a>,
    kind: u16,
    headers: u64,
    count: usize,
}

impl Elf<'_> {
    fn segments(&self) -> impl Iterator<Item = Segment> + '_ {
        (0..self.count.min(MOST)).map_while(|at| {
            let mut header = [0; PROGRAM_HEADER];
            let read = (self.read)(self.headers.saturating_add((at * PROGRAM_HEADER) as u64), &mut header);
            let field = |at| u64::from_le_bytes(word(&header, at));
            let kind = u32::from_le_bytes(word(&header, 0));
            (read == PROGRAM_HEADER).then(|| Segment { kind, offset: field(8), address: field(16), length: field(32) })
        })
    }

    fn segment(&self, kind: u32) -> Option<Segment> {
        self.segments().find(|segment| segment.kind == kind)
    }

    /// Tags and values of the dynamic section.
    fn dynamic(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let segment = self.segment(SEGMENT_DYNAMIC);
        let count = segment.map_or(0, |segment| segment.length as usize / DYNAMIC_ENTRY).min(MOST);
        let entry = move |at: usize| {
            let mut entry = [0; DYNAMIC_ENTRY];
            let read = (self.read)(segment?.offset.saturating_add((at * DYNAMIC_ENTRY) as u64), &mut entry);
            (read == DYNAMIC_ENTRY).then(|| (u64::from_le_bytes(word(&entry, 0)), u64::from_le_bytes(word(&entry, 8))))
        };
        (0..count).map_while(entry).take_while(|(tag, _)| *tag != DYNAMIC_END)
    }

    fn value(&self, wanted: u64) -> Option<u64> {
        self.dynamic().find_map(|(tag, value)| (tag == wanted).then_some(value))
    }

    /// The text that begins at an offset of the file and ends with NUL.
    fn text(&self, at: u64) -> Option<Name> {
        let mut bytes = [0; 256];
        let read = (self.read)(at, &mut bytes);
        Text::new(bytes[..read].split(|byte| *byte == 0).next()?)
    }

    /// Whether Go's linker has made it.
    fn is_go(&self) -> bool {
        self.segments().filter(|segment| segment.kind == SEGMENT_NOTE).any(|notes| self.has_note(notes, GO_NOTE))
    }

    /// Whether a note with this name and of this type is in a segment of notes.
    fn has_note(&self, notes: Segment, wanted: (&[u8; 4], u32)) -> bool {
        let mut at = 0u64;
        for _ in 0..MOST {
            let mut note = [0; NOTE];
            if at >= notes.length || (self.read)(notes.offset.saturating_add(at), &mut note) < NOTE {
                return false;
            }
            let field = |at| u32::from_le_bytes(word(&note, at));
            let (name, text) = (u64::from(field(0)), u64::from(field(4)));
            if (field(0), field(8)) == (wanted.0.len() as u32, wanted.1) && note.ends_with(wanted.0) {
                return true;
            }
            at += (NOTE - 4) as u64 + name.next_multiple_of(4) + text.next_multiple_of(4);
        }
        false
    }

    /// The offset in the file of the bytes that are loaded at an address.
    fn offset(&self, address: u64) -> Option<u64> {
        let contains = |segment: &Segment| segment.kind == SEGMENT_LOAD && address.wrapping_sub(segment.address) < segment.length;
        self.segments().find(contains).map(|segment| segment.offset.saturating_add(address - segment.address))
    }

    /// The sanitizer's library, if it is among the libraries that the program needs.
    fn sanitizer(&self) -> Option<Name> {
        let strings = self.offset(self.value(DYNAMIC_STRINGS)?)?;
        let needed = self.dynamic().filter(|(tag, _)| *tag == DYNAMIC_NEEDED);
        let mut names = needed.filter_map(|(_, at)| self.text(strings.saturating_add(at)));
        names.find(|name| SANITIZERS.iter().any(|begin| name.as_bytes().starts_with(begin)))
    }
}

/// How the names of sanitizers' libraries begin: these intercept the C library's functions, and demand or expect to be
/// loaded first.
const SANITIZERS: &[&[u8]] = &[
    b"libasan.so",
    b"libhwasan.so",
    b"liblsan.so",
    b"libtsan.so",
    b"libclang_rt.asan",
    b"libclang_rt.hwasan",
    b"libclang_rt.tsan",
];

fn elf(read: Read<'_>) -> Start {
    let mut header = [0; HEADER];
    let whole = read(0, &mut header) == HEADER;
    // 64 bits, little-endian.
    if !whole || !header.starts_with(b"\x7fELF\x02\x01") || u16::from_le_bytes(word(&header, 18)) != MACHINE {
        return Start::Unknown;
    }
    let elf = Elf {
        read,
        kind: u16::from_le_bytes(word(&header, 16)),
        headers: u64::from_le_bytes(word(&header, 32)),
        count: u16::from_le_bytes(word(&header, 56)).into(),
    };
    let Some(linker) = elf.segment(SEGMENT_INTERPRETER) else {
        let is_program = match elf.kind {
            TYPE_EXECUTABLE => true,
            // glibc's dynamic linker may be called as a program, and loads what LD_PRELOAD names.
            TYPE_SHARED => elf.value(DYNAMIC_FLAGS).is_some_and(|flags| flags & FLAG_EXECUTABLE != 0),
            _ => false,
        };
        return if is_program { Start::Static } else { Start::Unknown };
    };
    let Some(linker) = elf.text(linker.offset) else { return Start::Unknown };
    let name = linker.as_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    if name.starts_with(b"ld-musl-") {
        Start::Musl(linker)
    } else if name.starts_with(b"ld-linux") {
        let usual = if elf.is_go() { Start::Go } else { Start::Glibc };
        elf.sanitizer().map_or(usual, Start::Sanitized)
    } else {
        Start::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_a_program_of_glibc() {
        let (script, start) = of_path(None, c"/proc/self/exe");
        assert!(script.is_none() && matches!(start, Start::Glibc));
    }

    /// Go's note is found wherever it is among the notes.
    #[test]
    fn a_note_is_found_after_others() {
        let other = b"\x04\0\0\0\x05\0\0\0\x03\0\0\0GNU\0abcde\0\0\0";
        let go = b"\x04\0\0\0\x02\0\0\0\x04\0\0\0Go\0\0id\0\0";
        let endless = b"\0\0\0\0\xf4\xff\xff\xff\0\0\0\0\0\0\0\0";
        let found = |notes: &[&[u8]]| {
            let bytes = notes.concat();
            let read = |at: u64, buffer: &mut [u8]| {
                let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
                let count = rest.len().min(buffer.len());
                buffer[..count].copy_from_slice(&rest[..count]);
                count
            };
            let segment = Segment { kind: SEGMENT_NOTE, offset: 0, address: 0, length: bytes.len() as u64 };
            Elf { read: &read, kind: 0, headers: 0, count: 0 }.has_note(segment, GO_NOTE)
        };
        assert!(found(&[go]) && found(&[other, go]) && found(&[other, other, go, other]));
        assert!(!found(&[]) && !found(&[other, other]) && !found(&[endless, go]));
    }

    #[test]
    fn a_file_that_is_not_there_is_missing() {
        assert!(is_missing(c"/nowhere/at/all") && is_missing(c"/proc/self/exe/beneath"));
        assert!(!is_missing(c"/proc/self/exe"));
    }

    #[test]
    fn the_interpreter_is_in_a_scripts_first_line() {
        assert_eq!(interpreter(b"#!/bin/sh\necho"), Some(&b"/bin/sh"[..]));
        assert_eq!(interpreter(b"#! \t/usr/bin/env python3\n"), Some(&b"/usr/bin/env"[..]));
        assert_eq!(interpreter(b"#!/bin/sh"), Some(&b"/bin/sh"[..]));
        assert_eq!(interpreter(b"#!\n/bin/sh"), None);
        assert_eq!(interpreter(b"\x7fELF"), None);
    }

    #[test]
    fn a_name_is_searched_for_in_path() {
        let found = |name, path: &str| search(name, Some(path.as_bytes())).map(|path| path.as_bytes().to_vec());
        assert_eq!(found(c"sh", "/nowhere:/bin:/usr/bin"), Some(b"/bin/sh".to_vec()));
        assert_eq!(found(c"sh", "/nowhere"), None);
        assert_eq!(found(c"./sh", "/bin"), Some(b"./sh".to_vec()));
    }

    /// Whatever a file contains, reading it ends; at worst the result is that the kind is not known.
    #[test]
    fn damaged_files_are_unknown_at_worst() {
        let program = std::fs::read("/proc/self/exe").unwrap();
        let program = &program[..program.len().min(1 << 16)];
        let start = |bytes: &[u8]| {
            elf(&|at, buffer: &mut [u8]| {
                let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
                let count = rest.len().min(buffer.len());
                buffer[..count].copy_from_slice(&rest[..count]);
                count
            })
        };
        for length in 0..2048 {
            start(&program[..length]);
        }
        for at in 0..2048 {
            let mut damaged = program.to_vec();
            damaged[at] ^= 0xff;
            start(&damaged);
        }
        assert!(matches!(start(b"\x7fELF"), Start::Unknown));
    }
}
