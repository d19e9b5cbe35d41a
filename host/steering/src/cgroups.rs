//! BPF programs that are attached to a control group, its ancestors' included: what they mean for the connections of
//! its sockets.

use crate::bpf::{bpf, owned};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

const PROGRAM_BY_ID: i32 = 13;
const MAP_BY_ID: i32 = 14;
const INFO: i32 = 15;
const PROGRAM_QUERY: i32 = 16;

/// Most programs that are read of one attach type, and most maps of one program.
const MOST: usize = 64;

/// Attach types of programs that judge a socket's packets: BPF_CGROUP_INET_INGRESS, BPF_CGROUP_INET_EGRESS.
const FILTERS: [u32; 2] = [0, 1];
/// BPF_CGROUP_SOCK_OPS: called for a connection's states and parameters.
const STATES: [u32; 1] = [3];
/// bind(2), and what follows it: BPF_CGROUP_INET{4,6}_BIND, BPF_CGROUP_INET{4,6}_POST_BIND.
const BINDS: [u32; 4] = [8, 9, 12, 13];
/// BPF_CGROUP_INET{4,6}_CONNECT.
const CONNECTS: [u32; 2] = [10, 11];
/// Those that change what a socket's options and names seem to be: BPF_CGROUP_{GET,SET}SOCKOPT,
/// BPF_CGROUP_INET{4,6}_GET{PEER,SOCK}NAME.
const CALLS: [u32; 6] = [21, 22, 29, 30, 31, 32];

/// Ids of the programs of a control group, by what they do.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Group {
    /// Those that judge packets: on the way in, a 0, on the way out, a 0.
    pub filters: Vec<u32>,
    /// Those that are called for a connection's states.
    pub states: Vec<u32>,
    /// Those that judge a bind(2).
    pub binds: Vec<u32>,
    /// Those that judge a connect(2).
    pub connects: Vec<u32>,
    /// Those that judge or change what the kernel is asked about a socket.
    pub calls: Vec<u32>,
}

impl Group {
    /// Why the connections of such a group's sockets have to be the kernel's, if they have to. Programs that judge a
    /// connect(2) are asked by a connect(2).
    pub fn keeps(&self) -> Option<&'static str> {
        if !self.states.is_empty() {
            return Some("that are called for a connection's states (sock_ops), and would see a new one at each move");
        }
        if !self.binds.is_empty() {
            return Some("that judge a bind(2), as a move would make one (SocketBindDeny= and the like)");
        }
        if !self.calls.is_empty() {
            return Some(
                "that judge or change what the kernel is asked about a socket (getsockopt, setsockopt, getpeername, getsockname)",
            );
        }
        let changing = self.filters.iter().filter(|id| **id != 0).any(|id| !is_constant(*id).unwrap_or(false));
        changing.then_some(
            "that judge its packets by a map, which may change at any time (IPAddressDeny=, IPAccounting= and the like)",
        )
    }
}

/// Reads the programs of a control group.
///
/// # Errors
/// The failed system call's; `ENOSPC` if there are more than 64 of one kind.
pub fn programs_of(group: BorrowedFd<'_>) -> io::Result<Group> {
    let mut filters = attached(group, FILTERS[0])?;
    filters.push(0);
    filters.extend(attached(group, FILTERS[1])?);
    filters.push(0);
    let all = |types: &[u32]| -> io::Result<Vec<u32>> {
        let mut programs = Vec::new();
        for attach in types {
            match attached(group, *attach) {
                Ok(found) => programs.extend(found),
                // This kernel does not know such programs.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(programs)
    };
    Ok(Group { filters, states: all(&STATES)?, binds: all(&BINDS)?, connects: all(&CONNECTS)?, calls: all(&CALLS)? })
}

/// Ids of the programs of one attach type.
fn attached(group: BorrowedFd<'_>, attach: u32) -> io::Result<Vec<u32>> {
    const EFFECTIVE: u32 = 1;
    let mut numbers = [0u32; MOST];
    let mut attributes = [0; 32];
    attributes[..3].copy_from_slice(&[group.as_raw_fd() as u32, attach, EFFECTIVE]);
    let address = numbers.as_mut_ptr() as u64;
    (attributes[4], attributes[5], attributes[6]) = (address as u32, (address >> 32) as u32, MOST as u32);
    bpf(PROGRAM_QUERY, &mut attributes)?;
    Ok(numbers[..(attributes[6] as usize).min(MOST)].to_vec())
}

fn by_id(command: i32, id: u32) -> io::Result<OwnedFd> {
    let mut attributes = [0; 32];
    attributes[0] = id;
    bpf(command, &mut attributes).map(owned)
}

/// Reads what the kernel says about a program or map into `info`.
fn describe(object: &OwnedFd, info: &mut [u8]) -> io::Result<()> {
    let mut attributes = [0; 32];
    let address = info.as_mut_ptr() as u64;
    attributes[..4].copy_from_slice(&[object.as_raw_fd() as u32, info.len() as u32, address as u32, (address >> 32) as u32]);
    bpf(INFO, &mut attributes).map(|_| ())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

/// Whether nothing that a program reads from its maps can change: it has none, or nobody can write to them any more.
/// Maps into which it only puts events are not read.
///
/// # Errors
/// If it cannot be found out: the rights for that are root's.
fn is_constant(program: u32) -> io::Result<bool> {
    // struct bpf_prog_info: nr_map_ids and map_ids.
    const COUNT: usize = 52;
    const MAPS: usize = 56;
    let program = by_id(PROGRAM_BY_ID, program)?;
    let mut maps = [0u8; 4 * MOST];
    let mut info = [0u8; 80];
    info[COUNT..COUNT + 4].copy_from_slice(&(MOST as u32).to_ne_bytes());
    info[MAPS..MAPS + 8].copy_from_slice(&(maps.as_mut_ptr() as u64).to_ne_bytes());
    describe(&program, &mut info)?;
    let count = word(&info, COUNT) as usize;
    if count > MOST {
        return Ok(false);
    }
    for at in 0..count {
        if !is_fixed(word(&maps, 4 * at))? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether nobody can change a map that a program reads.
fn is_fixed(map: u32) -> io::Result<bool> {
    /// BPF_MAP_TYPE_PERF_EVENT_ARRAY and BPF_MAP_TYPE_RINGBUF.
    const EVENTS: [u32; 2] = [4, 27];
    /// BPF_F_RDONLY: user space may not write; BPF_F_RDONLY_PROG: programs may not.
    const OF_USERS: u32 = 1 << 3;
    const OF_PROGRAMS: u32 = 1 << 7;
    // struct bpf_map_info: type first, flags.
    const FLAGS: usize = 20;
    let map = by_id(MAP_BY_ID, map)?;
    let mut info = [0u8; 80];
    describe(&map, &mut info)?;
    let flags = word(&info, FLAGS);
    if EVENTS.contains(&word(&info, 0)) {
        return Ok(true);
    }
    let frozen = || {
        let shown = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_raw_fd()))?;
        Ok::<bool, io::Error>(shown.lines().any(|line| line.split_whitespace().eq(["frozen:", "1"])))
    };
    Ok(flags & OF_PROGRAMS != 0 && (flags & OF_USERS != 0 || frozen()?))
}
