//! The bpf system call, the part that is needed here.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const MAP_CREATE: i32 = 0;
const MAP_LOOKUP: i32 = 1;
const MAP_UPDATE: i32 = 2;
const MAP_DELETE: i32 = 3;
const PROGRAM_LOAD: i32 = 5;
const PROGRAM_ATTACH: i32 = 8;
const RAW_TRACEPOINT_OPEN: i32 = 17;
const MAP_TAKE: i32 = 21;
const MAP_LOOKUP_BATCH: i32 = 24;
const LINK_CREATE: i32 = 28;
/// BPF_SK_MSG_VERDICT.
const MESSAGE_VERDICT: u32 = 7;
/// BPF_TRACE_RAW_TP.
const TRACEPOINT: u32 = 23;

/// Kind of a map.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum MapKind {
    Hash = 1,
    Array = 2,
    LeastRecentlyUsedHash = 9,
    Devices = 14,
    SocketHash = 18,
    RingBuffer = 27,
}

/// Where a program runs.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum ProgramKind {
    /// As a socket's filter.
    Socket = 1,
    /// At a device's tc hook.
    Device = 3,
    /// In a device's driver, before there is a packet of the kernel's (XDP).
    Driver = 6,
    /// At a send on a socket in a map of sockets.
    SocketMessage = 16,
    /// At a tracepoint.
    Tracing = 26,
}

/// Hook of a device.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum Hook {
    /// BPF_TCX_INGRESS.
    Ingress = 46,
    /// BPF_TCX_EGRESS.
    Egress = 47,
}

/// Calls bpf(2) with attributes that were written as words of 4 bytes.
pub(crate) fn bpf(command: i32, attributes: &mut [u32; 32]) -> io::Result<i32> {
    // SAFETY: the attributes are 128 bytes; every pointer in them was made from a borrow that outlives this call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_mut_ptr(), size_of_val(attributes)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

pub(crate) fn owned(raw: i32) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for this process, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(raw) }
}

/// Writes a pointer to what the kernel reads into the attributes, as two words.
fn point(attributes: &mut [u32; 32], at: usize, bytes: &[u8]) {
    let address = bytes.as_ptr() as u64;
    attributes[at] = address as u32;
    attributes[at + 1] = (address >> 32) as u32;
}

/// The same of what the kernel writes.
fn point_to_room(attributes: &mut [u32; 32], at: usize, bytes: &mut [u8]) {
    let address = bytes.as_mut_ptr() as u64;
    attributes[at] = address as u32;
    attributes[at + 1] = (address >> 32) as u32;
}

fn explain(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EPERM) => io::Error::new(
            io::ErrorKind::PermissionDenied,
            "no right to load BPF programs: run as root (CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN), or in a container use the \
             host's Baton (`baton up` on the host, -v /run/baton:/run/baton for the container)",
        ),
        // Where a capability is missing, the kernel says EPERM.
        Some(libc::EACCES) => io::Error::new(
            io::ErrorKind::PermissionDenied,
            "a security module (SELinux, AppArmor) or a filter of system calls forbids BPF: see `journalctl -k`",
        ),
        Some(libc::ENOSYS) => io::Error::new(io::ErrorKind::Unsupported, "this kernel has no BPF (CONFIG_BPF_SYSCALL)"),
        _ => error,
    }
}

pub(crate) fn create_map(key: u32, value: u32, entries: u32) -> io::Result<OwnedFd> {
    create_map_of(MapKind::Hash, key, value, entries)
}

pub(crate) fn create_map_of(kind: MapKind, key: u32, value: u32, entries: u32) -> io::Result<OwnedFd> {
    let mut attributes = [0; 32];
    attributes[..4].copy_from_slice(&[kind as u32, key, value, entries]);
    bpf(MAP_CREATE, &mut attributes).map(owned).map_err(explain)
}

/// Makes an array map of values that start as zero.
pub(crate) fn create_array(value: u32, entries: u32) -> io::Result<OwnedFd> {
    create_map_of(MapKind::Array, 4, value, entries)
}

/// Makes an array map that can be mapped into memory, where its values follow each other in steps of eight bytes.
pub(crate) fn create_mappable_array(value: u32, entries: u32) -> io::Result<OwnedFd> {
    const MAPPABLE: u32 = 1 << 10;
    let mut attributes = [0; 32];
    attributes[..5].copy_from_slice(&[MapKind::Array as u32, 4, value, entries, MAPPABLE]);
    bpf(MAP_CREATE, &mut attributes).map(owned).map_err(explain)
}

pub(crate) fn update(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<()> {
    let mut attributes = [0; 32];
    attributes[0] = map.as_raw_fd() as u32;
    point(&mut attributes, 2, key);
    point(&mut attributes, 4, value);
    bpf(MAP_UPDATE, &mut attributes).map(|_| ())
}

/// Whether a map has a key. `value` is the number of bytes of its values.
pub(crate) fn has(map: BorrowedFd<'_>, key: &[u8], value: usize) -> bool {
    read(map, key, &mut vec![0u8; value])
}

/// Reads a value of a map, which is as long as `found`. False if the map does not have the key.
pub(crate) fn read(map: BorrowedFd<'_>, key: &[u8], found: &mut [u8]) -> bool {
    find(MAP_LOOKUP, map, key, found)
}

/// As [`read`], and deletes the entry of a hash map, so that no program adds to it in between.
pub(crate) fn take(map: BorrowedFd<'_>, key: &[u8], found: &mut [u8]) -> bool {
    find(MAP_TAKE, map, key, found)
}

fn find(command: i32, map: BorrowedFd<'_>, key: &[u8], found: &mut [u8]) -> bool {
    let mut attributes = [0; 32];
    attributes[0] = map.as_raw_fd() as u32;
    point(&mut attributes, 2, key);
    point_to_room(&mut attributes, 4, found);
    bpf(command, &mut attributes).is_ok()
}

pub(crate) fn delete(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<()> {
    let mut attributes = [0; 32];
    attributes[0] = map.as_raw_fd() as u32;
    point(&mut attributes, 2, key);
    match bpf(MAP_DELETE, &mut attributes) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other.map(|_| ()),
    }
}

/// Deletes the entries of a hash map whose keys `matches` accepts.
pub(crate) fn clear(map: BorrowedFd<'_>, bytes: (usize, usize), mut matches: impl FnMut(&[u8]) -> bool) {
    let mut chosen = Vec::new();
    for_each_key(map, bytes, |key| {
        if matches(key) {
            chosen.push(key.to_vec());
        }
    });
    // One that is gone already is no concern.
    chosen.iter().for_each(|key| _ = delete(map, key));
}

/// The number of entries of a hash map.
pub(crate) fn count(map: BorrowedFd<'_>, bytes: (usize, usize)) -> usize {
    let mut count = 0;
    for_each_key(map, bytes, |_| count += 1);
    count
}

/// Entries of a hash map that the kernel is asked for at a time: far more than one of its buckets has.
const BATCH: usize = 4096;

/// Shows all keys of a hash map, whose keys and values have so many bytes. The kernel goes from bucket to bucket: each
/// is looked at once, whatever others add and delete meanwhile. (Asked for the next key, it begins anew if the last one
/// has been deleted; and with a system call for each key a large map takes many times as long.)
pub(crate) fn for_each_key(map: BorrowedFd<'_>, (key_bytes, value_bytes): (usize, usize), mut visit: impl FnMut(&[u8])) {
    let (mut keys, mut values) = (vec![0u8; BATCH * key_bytes], vec![0u8; BATCH * value_bytes]);
    let mut place: Option<[u8; 4]> = None;
    loop {
        let (mut attributes, mut next) = ([0; 32], [0u8; 4]);
        if let Some(place) = &place {
            point(&mut attributes, 0, place);
        }
        point_to_room(&mut attributes, 2, &mut next);
        point_to_room(&mut attributes, 4, &mut keys);
        point_to_room(&mut attributes, 6, &mut values);
        (attributes[8], attributes[9]) = (BATCH as u32, map.as_raw_fd() as u32);
        let is_last = match bpf(MAP_LOOKUP_BATCH, &mut attributes) {
            Ok(_) => false,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
            Err(_) => return,
        };
        let shown = (attributes[8] as usize).min(BATCH);
        keys[..shown * key_bytes].chunks_exact(key_bytes).for_each(&mut visit);
        if is_last {
            return;
        }
        place = Some(next);
    }
}

/// Loads a program, with the name `baton`, which `ip link show` and bpftool print. The verifier's messages are in the
/// error.
pub(crate) fn load(kind: ProgramKind, instructions: &[u8]) -> io::Result<OwnedFd> {
    load_for(kind, Purpose::default(), instructions)
}

/// Loads a program for the driver of one device. It may call functions that the driver has, and takes frames in several
/// pieces.
///
/// # Errors
/// As [`load`]'s; `Unsupported` if the driver runs no such programs.
pub(crate) fn load_for_driver(device: u32, instructions: &[u8]) -> io::Result<OwnedFd> {
    const FRAGMENTS: u32 = 1 << 5;
    const ONE_DEVICE: u32 = 1 << 6;
    load_for(ProgramKind::Driver, Purpose { flags: FRAGMENTS | ONE_DEVICE, device, ..Purpose::default() }, instructions)
        .map_err(|error| if error.kind() == io::ErrorKind::Unsupported { io::Error::new(error.kind(), NO_XDP) } else { error })
}

const NO_XDP: &str = "its driver has no native XDP";

/// What a program is loaded for.
#[derive(Clone, Copy, Default)]
struct Purpose {
    /// `expected_attach_type`, `attach_btf_id`, `prog_flags` and `prog_ifindex`.
    attach: u32,
    target: u32,
    flags: u32,
    device: u32,
}

fn load_for(kind: ProgramKind, purpose: Purpose, instructions: &[u8]) -> io::Result<OwnedFd> {
    let attempt = |log: &mut [u8]| {
        let mut attributes = [0; 32];
        attributes[0] = kind as u32;
        attributes[1] = (instructions.len() / 8) as u32;
        point(&mut attributes, 2, instructions);
        point(&mut attributes, 4, b"GPL\0");
        if !log.is_empty() {
            attributes[6] = 1;
            attributes[7] = log.len() as u32;
            point(&mut attributes, 8, log);
        }
        (attributes[11], attributes[16]) = (purpose.flags, purpose.device);
        (attributes[12], attributes[13]) = (u32::from_ne_bytes(*b"bato"), u32::from_ne_bytes(*b"n\0\0\0"));
        (attributes[17], attributes[27]) = (purpose.attach, purpose.target);
        bpf(PROGRAM_LOAD, &mut attributes).map(owned)
    };
    attempt(&mut []).map_err(|error| match error.raw_os_error() {
        // The verifier's answers: only it has more to say.
        Some(libc::EACCES | libc::EINVAL | libc::E2BIG) => {
            let mut log = vec![0u8; 65536];
            let _ = attempt(&mut log);
            let text = log.split(|byte| *byte == 0).next().unwrap_or_default();
            if text.is_empty() && error.raw_os_error() == Some(libc::EACCES) {
                return explain(error);
            }
            let text = String::from_utf8_lossy(text);
            io::Error::new(error.kind(), format!("the kernel refuses a BPF program ({error}): {text}"))
        }
        _ => explain(error),
    })
}

/// Attaches a program to a device, behind those that are there, until the returned descriptor is closed everywhere.
pub(crate) fn attach_to_device(program: BorrowedFd<'_>, interface: u32, hook: Hook) -> io::Result<OwnedFd> {
    attach_at(program, interface, hook, 0)
}

/// As [`attach_to_device`], before those that are there.
pub(crate) fn attach_to_device_first(program: BorrowedFd<'_>, interface: u32, hook: Hook) -> io::Result<OwnedFd> {
    const BEFORE: u32 = 1 << 3;
    attach_at(program, interface, hook, BEFORE)
}

fn attach_at(program: BorrowedFd<'_>, interface: u32, hook: Hook, flags: u32) -> io::Result<OwnedFd> {
    let mut attributes = [0; 32];
    attributes[..4].copy_from_slice(&[program.as_raw_fd() as u32, interface, hook as u32, flags]);
    bpf(LINK_CREATE, &mut attributes).map(owned).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => {
            io::Error::new(io::ErrorKind::Unsupported, "this kernel has no tcx links: Linux 6.6 or later has (`baton doctor`)")
        }
        _ => error,
    })
}

/// Attaches a program to a device's driver, which must have no other, until the returned descriptor is closed
/// everywhere.
///
/// # Errors
/// The failed system call's, in words where what it means is known.
pub(crate) fn attach_to_driver(program: BorrowedFd<'_>, interface: u32) -> io::Result<OwnedFd> {
    const XDP: u32 = 37;
    const IN_DRIVER: u32 = 1 << 2;
    let mut attributes = [0; 32];
    attributes[..4].copy_from_slice(&[program.as_raw_fd() as u32, interface, XDP, IN_DRIVER]);
    bpf(LINK_CREATE, &mut attributes).map(owned).map_err(|error| {
        let why = match error.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => "another XDP program is attached (`ip link show` names it)",
            Some(libc::EOPNOTSUPP) => NO_XDP,
            Some(libc::ERANGE) => "its MTU, or its peer's, is larger than its driver allows with XDP",
            Some(libc::ENOSPC) => "its peer sends by more queues than it receives by (`ethtool -L`)",
            _ => return error,
        };
        io::Error::new(error.kind(), why)
    })
}

/// Attaches a program to the sends on the sockets of a map.
pub(crate) fn attach_to_map(program: BorrowedFd<'_>, map: BorrowedFd<'_>) -> io::Result<()> {
    let mut attributes = [0; 32];
    attributes[..3].copy_from_slice(&[map.as_raw_fd() as u32, program.as_raw_fd() as u32, MESSAGE_VERDICT]);
    bpf(PROGRAM_ATTACH, &mut attributes).map(|_| ())
}

/// Loads a program and attaches it to a tracepoint, by its type id, until the returned descriptor is closed.
pub(crate) fn attach_to_tracepoint(target: u32, instructions: &[u8]) -> io::Result<OwnedFd> {
    let program = load_for(ProgramKind::Tracing, Purpose { attach: TRACEPOINT, target, ..Purpose::default() }, instructions)?;
    let mut attributes = [0; 32];
    attributes[2] = program.as_raw_fd() as u32;
    bpf(RAW_TRACEPOINT_OPEN, &mut attributes).map(owned)
}

pub(crate) fn attach_to_socket(program: &OwnedFd, socket: BorrowedFd<'_>) -> io::Result<()> {
    let raw = program.as_raw_fd();
    // SAFETY: the option takes one int, which lives through the call.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_BPF,
            (&raw const raw).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether this process may use BPF here, and this kernel has it.
///
/// # Errors
/// The reason, and what to do.
pub fn supported() -> io::Result<()> {
    create_map(4, 4, 1).map(|_| ())
}
