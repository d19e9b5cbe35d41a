//! The bypass for programs that run already, into which no library can be loaded. Their sockets are in a map of
//! sockets, and what a program sends is put into the receive queue of another socket, its *engine*, and the reverse.
//! None of it goes through TCP.
//!
//! One map holds both: its key is a socket's own addresses, its value the socket that gets what is sent there. Three
//! programs at tracepoints report what else is needed: how much a program has read (nothing else limits what is put
//! into its queue), when it closes a socket, and when an unwatched socket has carried a given number of bytes. A fourth
//! one reports that a program reads a socket by splice(2), which does not find what was put into the queue.

use crate::assembler::{Assembler, Helper, R, Size};
use crate::bpf::{self, MapKind, ProgramKind};
use crate::programs::ENDS;
use crate::ring_buffer::{RECORD, RingBuffer};
use crate::{btf, ends};
use baton_shm::Region;
use baton_wire::Flow;
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of unwatched sockets whose bytes are counted.
const UNWATCHED_SOCKETS: u32 = 1 << 16;

/// Bytes that a program reads from one report to the next: a power of two, far below the least receive buffer of a
/// socket (2304), since the peer waits for a window that nobody reports. An event for each short message would wake
/// this process for nothing.
pub const READ_EVERY: u32 = 1 << 9;

/// An event of a socket, which is identified by its cookie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SocketEvent {
    /// Its program has read a further [`READ_EVERY`] bytes, after [`SocketBypass::watch`] asked for that event.
    Read(u64),
    /// It has entered this state (numbered as in Linux): its program has closed it, or shut it down.
    State(u64, u8),
    /// An unwatched socket has carried the given number of bytes; the second number is the process id that used it.
    Unwatched(u64, u32),
    /// Its program has tried to read it by splice(2), for the first time since [`SocketBypass::join`].
    Spliced(u64),
}

const READ: i32 = 1;
const STATE: i32 = 2;
const UNWATCHED: i32 = 3;
const SPLICED: i32 = 4;

/// The maps and programs. Dropping this removes them.
#[derive(Debug)]
pub struct SocketBypass {
    sockets: OwnedFd,
    /// Keys of the programs' sockets in it.
    joined: HashSet<[u8; ENDS]>,
    known: Known,
    _unwatched: OwnedFd,
    ring: RingBuffer,
    _links: Vec<OwnedFd>,
}

/// Offsets in `struct sk_msg_md`.
mod message {
    pub const FAMILY: i16 = 16;
    pub const REMOTE_V4: i16 = 20;
    pub const LOCAL_V4: i16 = 24;
    pub const REMOTE_V6: i16 = 28;
    pub const LOCAL_V6: i16 = 44;
    pub const REMOTE_PORT: i16 = 60;
    pub const LOCAL_PORT: i16 = 64;
}

impl SocketBypass {
    /// Makes it for `sockets` sockets. Unwatched ones are reported after this many bytes (1: at once).
    ///
    /// # Errors
    /// The failed system call's. If this process may not load BPF programs, or this kernel lacks something, the message
    /// says what to do.
    pub fn new(sockets: u32, unwatched_after: u32) -> io::Result<SocketBypass> {
        let map = bpf::create_map_of(MapKind::SocketHash, ENDS as u32, 8, 2 * sockets)?;
        let known = Known::new(2 * sockets)?;
        let unwatched = bpf::create_map_of(MapKind::LeastRecentlyUsedHash, 8, 8, UNWATCHED_SOCKETS)?;
        let ring = RingBuffer::new()?;
        let verdict = bpf::load(ProgramKind::SocketMessage, &redirect(map.as_fd()))?;
        bpf::attach_to_map(verdict.as_fd(), map.as_fd())?;
        let maps = Maps { known: known.places.as_fd(), read: known.read.as_fd(), unwatched: unwatched.as_fd(), ring: ring.fd() };
        let links = [
            ("sock_recv_length", transferred(&maps, unwatched_after, true)),
            ("sock_send_length", transferred(&maps, unwatched_after, false)),
            ("inet_sock_set_state", changed_state(&maps)),
            ("tcp_rcv_space_adjust", looked(&maps)),
        ]
        .map(|(name, program)| bpf::attach_to_tracepoint(btf::tracepoint(name)?, &program));
        let links = links.into_iter().collect::<io::Result<Vec<_>>>()?;
        Ok(SocketBypass { sockets: map, joined: HashSet::new(), known, _unwatched: unwatched, ring, _links: links })
    }

    /// Makes what the program sends on its socket go to `engine`, and what is sent on `engine` go to the program. No
    /// thread of the program may be inside a call on the socket. Both must be ESTABLISHED.
    ///
    /// # Errors
    /// The failed system call's; `EADDRINUSE` if a socket with the same addresses and ports is joined. (Devices may
    /// tell the two apart, and this map does not.)
    pub fn join(&mut self, cookie: u64, program: (&Flow, BorrowedFd<'_>), engine: (&Flow, BorrowedFd<'_>)) -> io::Result<()> {
        if !self.joined.insert(ends(program.0)) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        self.put(cookie, program, engine).inspect_err(|_| self.part(cookie, program.0, engine.0))
    }

    /// Checks that a program's socket is in no other map, without leaving it in this one. Nothing may be sent on it
    /// meanwhile.
    ///
    /// # Errors
    /// The failed system call's: `EBUSY` if it is in another map, of a process that is attached to the same program;
    /// `EADDRINUSE` as for [`SocketBypass::join`].
    pub fn may_join(&self, flow: &Flow, socket: BorrowedFd<'_>) -> io::Result<()> {
        // The one that is joined would lose its place.
        if self.joined.contains(&ends(flow)) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        bpf::update(self.sockets.as_fd(), &ends(flow), &(socket.as_raw_fd() as u64).to_ne_bytes())?;
        bpf::delete(self.sockets.as_fd(), &ends(flow))
    }

    fn put(&mut self, cookie: u64, program: (&Flow, BorrowedFd<'_>), engine: (&Flow, BorrowedFd<'_>)) -> io::Result<()> {
        self.watch(cookie)?;
        self.known.set_joined(cookie, true)?;
        let put =
            |at: &Flow, to: BorrowedFd<'_>| bpf::update(self.sockets.as_fd(), &ends(at), &(to.as_raw_fd() as u64).to_ne_bytes());
        // The engine first, so that the program's bytes have a destination at every moment.
        put(program.0, engine.1).and_then(|()| put(engine.0, program.1))
    }

    /// Undoes [`SocketBypass::join`]. Bytes in the program's queue that it has not read are dropped.
    pub fn part(&mut self, cookie: u64, program: &Flow, engine: &Flow) {
        self.joined.remove(&ends(program));
        let _ = self.known.set_joined(cookie, false);
        for at in [engine, program] {
            // A closed socket is not in the map any more.
            let _ = bpf::delete(self.sockets.as_fd(), &ends(at));
        }
    }

    /// Reports a socket's reads and states from now on.
    ///
    /// # Errors
    /// The failed system call's; `E2BIG` if there are too many.
    pub fn watch(&mut self, cookie: u64) -> io::Result<()> {
        self.known.add(cookie)
    }

    /// Stops reporting them.
    pub fn forget(&mut self, cookie: u64) {
        self.known.remove(cookie);
    }

    /// Bytes that the program has read since it was joined. Costs no system call.
    pub fn read_by(&self, cookie: u64) -> u64 {
        self.known.place_of.get(&cookie).map_or(0, |place| self.known.count(*place).load(Ordering::Relaxed))
    }

    /// Bytes that the program has read and sent on a watched socket. A join sets it back. Costs no system call.
    pub fn carried_by(&self, cookie: u64) -> u64 {
        let of = |place: &u32| self.known.count(*place).load(Ordering::Relaxed) + self.known.sent(*place).load(Ordering::Relaxed);
        self.known.place_of.get(&cookie).map_or(0, of)
    }

    /// The next event, in order. Events for which the ring has no room are lost: see [`SocketBypass::has_lost`].
    pub fn next_event(&mut self) -> Option<SocketEvent> {
        loop {
            let record = self.ring.next()?;
            let cookie = u64::from_ne_bytes(std::array::from_fn(|at| record[at]));
            let value = u32::from_ne_bytes(std::array::from_fn(|at| record[12 + at]));
            match i32::from_ne_bytes(std::array::from_fn(|at| record[8 + at])) {
                READ => return Some(SocketEvent::Read(cookie)),
                STATE => return Some(SocketEvent::State(cookie, value as u8)),
                UNWATCHED => return Some(SocketEvent::Unwatched(cookie, value)),
                SPLICED => return Some(SocketEvent::Spliced(cookie)),
                _ => {}
            }
        }
    }

    /// Whether events may have been lost since the last call.
    pub fn has_lost(&mut self) -> bool {
        self.ring.take_overrun()
    }

    /// A descriptor that is readable when there are events.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.ring.fd()
    }
}

/// The sockets that are watched, each with a place for the numbers of bytes that its program has read, and sent.
#[derive(Debug)]
struct Known {
    /// From a socket's cookie to its place.
    places: OwnedFd,
    /// An array of the numbers, which is mapped.
    read: OwnedFd,
    mapped: Region,
    /// The same as in `places`, where a socket's place is the lower half of its entry.
    place_of: HashMap<u64, u32>,
    /// The one that has been free for longest is taken first, since a call that is just ending may still add to it.
    free: VecDeque<u32>,
}

/// The entry of a socket with this place, and whether it is joined ([`JOINED`]).
fn entry(place: u32, joined: bool) -> [u8; 8] {
    let mut entry = [0; 8];
    entry[..JOINED as usize].copy_from_slice(&place.to_ne_bytes());
    entry[JOINED as usize..].copy_from_slice(&u32::from(joined).to_ne_bytes());
    entry
}

/// Bytes of a place: first the number of those that were read, then that of those that were sent.
const PLACE: usize = 16;
const SENT: usize = 8;

impl Known {
    fn new(most: u32) -> io::Result<Known> {
        let read = bpf::create_mappable_array(PLACE as u32, most)?;
        let mapped = Region::map_fixed(read.try_clone()?, PLACE * most as usize)?;
        let places = bpf::create_map(8, 8, most)?;
        Ok(Known { places, read, mapped, place_of: HashMap::new(), free: (0..most).collect() })
    }

    fn count(&self, place: u32) -> &AtomicU64 {
        &self.mapped.words(place as usize * PLACE, 1)[0]
    }

    fn sent(&self, place: u32) -> &AtomicU64 {
        &self.mapped.words(place as usize * PLACE + SENT, 1)[0]
    }

    /// Adds a socket, or has one begin anew.
    fn add(&mut self, cookie: u64) -> io::Result<()> {
        if let Some(place) = self.place_of.get(&cookie) {
            self.count(*place).store(0, Ordering::Relaxed);
            return Ok(());
        }
        let place = self.free.pop_front().ok_or(io::Error::from_raw_os_error(libc::E2BIG))?;
        self.count(place).store(0, Ordering::Relaxed);
        self.sent(place).store(0, Ordering::Relaxed);
        let added = bpf::update(self.places.as_fd(), &cookie.to_ne_bytes(), &entry(place, false));
        match added {
            Ok(()) => drop(self.place_of.insert(cookie, place)),
            Err(_) => self.free.push_front(place),
        }
        added
    }

    /// Notes whether a socket is joined.
    fn set_joined(&self, cookie: u64, joined: bool) -> io::Result<()> {
        let Some(place) = self.place_of.get(&cookie) else { return Ok(()) };
        bpf::update(self.places.as_fd(), &cookie.to_ne_bytes(), &entry(*place, joined))
    }

    fn remove(&mut self, cookie: u64) {
        if let Some(place) = self.place_of.remove(&cookie) {
            let _ = bpf::delete(self.places.as_fd(), &cookie.to_ne_bytes());
            self.free.push_back(place);
        }
    }
}

struct Maps<'a> {
    known: BorrowedFd<'a>,
    read: BorrowedFd<'a>,
    unwatched: BorrowedFd<'a>,
    ring: BorrowedFd<'a>,
}

/// Program at a send on a socket of the map: redirects what is sent to the map's value for the sender's own addresses.
/// It must never refuse: the refusal would stick to the socket.
fn redirect(sockets: BorrowedFd<'_>) -> Vec<u8> {
    const KEY: i16 = -40;
    const INTERNET: i32 = 2;
    let mut a = Assembler::default();
    a.mov(R::R6, R::R1);
    a.load(Size::Word, R::R1, R::R6, message::FAMILY).jump_if(R::R1, INTERNET, "v4");
    for word in 0..4 {
        for (from, to) in [(message::LOCAL_V6, KEY), (message::REMOTE_V6, KEY + 16)] {
            a.load(Size::Word, R::R1, R::R6, from + 4 * word).store(Size::Word, R::R10, to + 4 * word, R::R1);
        }
    }
    a.jump("ports").label("v4").set(R::R1, 0);
    for (from, to) in [(message::LOCAL_V4, KEY), (message::REMOTE_V4, KEY + 16)] {
        a.set(R::R1, 0).store(Size::Double, R::R10, to, R::R1);
        a.store_word(R::R10, to + 8, i32::from_ne_bytes([0, 0, 0xff, 0xff]));
        a.load(Size::Word, R::R1, R::R6, from).store(Size::Word, R::R10, to + 12, R::R1);
    }
    // The local port is in host order, the peer's in network order, in the upper half on this (little-endian) machine.
    a.label("ports").load(Size::Word, R::R1, R::R6, message::LOCAL_PORT).swap_half(R::R1);
    a.store(Size::Half, R::R10, KEY + 32, R::R1);
    a.load(Size::Word, R::R1, R::R6, message::REMOTE_PORT)
        .shift_right(R::R1, if cfg!(target_endian = "little") { 16 } else { 0 });
    a.store(Size::Half, R::R10, KEY + 34, R::R1);
    a.mov(R::R1, R::R6).map(R::R2, sockets).mov(R::R3, R::R10).add(R::R3, i32::from(KEY)).set(R::R4, TO_INGRESS);
    a.call(Helper::MessageRedirectHash).set(R::R0, PASS).exit();
    a.finish()
}

const TO_INGRESS: i32 = 1;
const PASS: i32 = 1;

/// Stack offsets of the programs at tracepoints.
const COOKIE: i16 = -16;
const KIND: i16 = -8;
const VALUE: i16 = -4;
const COUNT: i16 = -24;

/// Keeps the tracepoint's arguments in R6, and the socket's cookie on the stack.
fn note_cookie(a: &mut Assembler) {
    a.mov(R::R6, R::R1).load(Size::Double, R::R1, R::R6, 0).call(Helper::SocketCookie).store(Size::Double, R::R10, COOKIE, R::R0);
}

/// Looks up the cookie. R0 points to its value; without one, jumps to `absent`.
fn look_up(a: &mut Assembler, map: BorrowedFd<'_>, absent: &'static str) {
    look_up_at(a, map, COOKIE, absent);
}

/// The same with the key at another place of the stack.
fn look_up_at(a: &mut Assembler, map: BorrowedFd<'_>, key: i16, absent: &'static str) {
    a.map(R::R1, map).mov(R::R2, R::R10).add(R::R2, i32::from(key)).call(Helper::MapLookup).jump_if(R::R0, 0, absent);
}

fn submit(a: &mut Assembler, maps: &Maps<'_>, kind: i32) {
    a.store_word(R::R10, KIND, kind);
    a.map(R::R1, maps.ring).mov(R::R2, R::R10).add(R::R2, i32::from(COOKIE)).set(R::R3, RECORD as i32).set(R::R4, 0);
    a.call(Helper::RingBufferOutput);
}

/// Program at the end of a receive or a send, whose arguments are (socket, result, flags).
fn transferred(maps: &Maps<'_>, unwatched_after: u32, receive: bool) -> Vec<u8> {
    const PEEK: i32 = 2;
    let mut a = Assembler::default();
    note_cookie(&mut a);
    // The result is an int; if it is positive it is a number of bytes.
    a.load(Size::Double, R::R7, R::R6, 8).shift_left(R::R7, 32).shift_right_signed(R::R7, 32);
    a.jump_unless_positive(R::R7, "done");
    if receive {
        a.load(Size::Double, R::R1, R::R6, 16).and(R::R1, PEEK).jump_unless(R::R1, 0, "done");
    }
    look_up(&mut a, maps.known, "stranger");
    a.load(Size::Word, R::R1, R::R0, 0).store(Size::Word, R::R10, COUNT, R::R1);
    look_up_at(&mut a, maps.read, COUNT, "done");
    if receive {
        a.load(Size::Double, R::R1, R::R0, 0).atomic_add(R::R0, 0, R::R7);
        // Whether a multiple lies between. Two calls at once may each miss it; the next multiple is seen.
        a.and(R::R1, READ_EVERY as i32 - 1).add_register(R::R1, R::R7).jump_if_below(R::R1, READ_EVERY as i32, "done");
        a.store_word(R::R10, VALUE, 0);
        submit(&mut a, maps, READ);
    } else {
        a.atomic_add(R::R0, SENT as i16, R::R7);
    }
    a.jump("done").label("stranger");
    look_up(&mut a, maps.unwatched, "new");
    a.load(Size::Double, R::R1, R::R0, 0).atomic_add(R::R0, 0, R::R7);
    // Only the call that reaches the number reports it.
    a.jump_if_not_below(R::R1, unwatched_after as i32, "done").add_register(R::R1, R::R7);
    a.jump_if_below(R::R1, unwatched_after as i32, "done").jump("submit");
    a.label("new").store(Size::Double, R::R10, COUNT, R::R7);
    a.map(R::R1, maps.unwatched).mov(R::R2, R::R10).add(R::R2, i32::from(COOKIE));
    a.mov(R::R3, R::R10).add(R::R3, i32::from(COUNT)).set(R::R4, 0).call(Helper::MapUpdate);
    a.jump_if_below(R::R7, unwatched_after as i32, "done");
    a.label("submit").call(Helper::CurrentProcess).shift_right(R::R0, 32).store(Size::Word, R::R10, VALUE, R::R0);
    submit(&mut a, maps, UNWATCHED);
    a.label("done").set(R::R0, 0).exit();
    a.finish()
}

/// Offset, in a watched socket's entry, of the word that says whether it is joined: 1 until a splice has been reported,
/// then 2.
const JOINED: i16 = 4;

/// Program at the end of a look into TCP's own receive queue, whose argument is the socket. The queue of a joined
/// socket is empty, and receives that find what was put into the other one do not come here: this one reads by
/// splice(2). Each is reported once, since a proxy makes many such calls.
fn looked(maps: &Maps<'_>) -> Vec<u8> {
    let mut a = Assembler::default();
    note_cookie(&mut a);
    look_up(&mut a, maps.known, "done");
    a.load(Size::Word, R::R1, R::R0, JOINED).jump_unless(R::R1, 1, "done").store_word(R::R0, JOINED, 2);
    a.store_word(R::R10, VALUE, 0);
    submit(&mut a, maps, SPLICED);
    a.label("done").set(R::R0, 0).exit();
    a.finish()
}

/// Program at a socket's change of state, whose arguments are (socket, old state, new state).
fn changed_state(maps: &Maps<'_>) -> Vec<u8> {
    let mut a = Assembler::default();
    note_cookie(&mut a);
    look_up(&mut a, maps.known, "done");
    a.load(Size::Double, R::R1, R::R6, 16).store(Size::Word, R::R10, VALUE, R::R1);
    submit(&mut a, maps, STATE);
    a.label("done").set(R::R0, 0).exit();
    a.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    fn flow(socket: &TcpStream) -> Flow {
        Flow { local: socket.local_addr().unwrap().into(), remote: socket.peer_addr().unwrap().into(), device: 0 }
    }

    fn cookie(socket: &TcpStream) -> u64 {
        let mut cookie = [0u8; 8];
        let mut length = 8;
        // SAFETY: `cookie` has room for eight bytes.
        let done = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, 57, cookie.as_mut_ptr().cast(), &mut length) };
        assert_eq!(done, 0);
        u64::from_ne_bytes(cookie)
    }

    fn pair(address: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        near.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        (near, listener.accept().unwrap().0)
    }

    /// Needs the right to load BPF programs.
    #[test]
    fn places_are_used_again_and_are_limited() {
        if let Err(error) = crate::supported() {
            eprintln!("skipped: {error}");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return;
        }
        let mut bypass = SocketBypass::new(1, 100).unwrap();
        let (mut near, mut far) = pair("127.0.0.1:0");
        let known = cookie(&near);
        bypass.watch(known).unwrap();
        far.write_all(&[1; 10]).unwrap();
        near.read_exact(&mut [0; 10]).unwrap();
        assert_eq!(bypass.read_by(known), 10);
        near.write_all(&[1; 7]).unwrap();
        assert_eq!((bypass.read_by(known), bypass.carried_by(known)), (10, 17));
        bypass.watch(known + 1).unwrap();
        assert_eq!(bypass.watch(known + 2).unwrap_err().raw_os_error(), Some(libc::E2BIG));
        bypass.forget(known);
        bypass.watch(known + 2).unwrap();
        assert_eq!([known, known + 2].map(|cookie| (bypass.read_by(cookie), bypass.carried_by(cookie))), [(0, 0); 2]);
        far.write_all(&[1; 10]).unwrap();
        near.read_exact(&mut [0; 10]).unwrap();
        assert_eq!(bypass.read_by(known + 2), 0, "a forgotten socket's reads count for nobody");
    }

    /// Reads what there is, at most 100 bytes, by splice(2). The error's number if that fails.
    fn splice(socket: &TcpStream, pipe: &OwnedFd) -> Result<usize, Option<i32>> {
        // SAFETY: live descriptors, no offsets.
        let moved = unsafe {
            libc::splice(
                socket.as_raw_fd(),
                std::ptr::null_mut(),
                pipe.as_raw_fd(),
                std::ptr::null_mut(),
                100,
                libc::SPLICE_F_NONBLOCK,
            )
        };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error().raw_os_error())
    }

    /// Needs the right to load BPF programs. splice(2) does not find what is in the queue, which is why it is reported.
    #[test]
    fn splices_of_joined_sockets_are_reported_once() {
        if let Err(error) = crate::supported() {
            eprintln!("skipped: {error}");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return;
        }
        let mut bypass = SocketBypass::new(8, 100).unwrap();
        let (mut program, mut peer) = pair("127.0.0.1:0");
        let (mut engine, _sink) = pair("127.0.0.1:0");
        program.set_nonblocking(true).unwrap();
        let known = cookie(&program);
        let (_read, pipe) = std::io::pipe().unwrap();
        let pipe = OwnedFd::from(pipe);
        let reported = |bypass: &mut SocketBypass| {
            std::iter::from_fn(|| bypass.next_event()).filter(|event| *event == SocketEvent::Spliced(known)).count()
        };
        peer.write_all(b"seen").unwrap();
        assert_eq!(splice(&program, &pipe), Ok(4));
        bypass.watch(known).unwrap();
        peer.write_all(b"seen").unwrap();
        assert_eq!(program.read(&mut [0; 16]).unwrap(), 4);
        assert_eq!(reported(&mut bypass), 0, "it is not joined");
        bypass.join(known, (&flow(&program), program.as_fd()), (&flow(&engine), engine.as_fd())).unwrap();
        engine.write_all(b"hidden").unwrap();
        assert_eq!(splice(&program, &pipe), Err(Some(libc::EAGAIN)));
        assert_eq!(splice(&program, &pipe), Err(Some(libc::EAGAIN)));
        assert_eq!(reported(&mut bypass), 1);
        assert_eq!(program.read(&mut [0; 16]).unwrap(), 6);
        assert_eq!(bypass.read_by(known), 6);
        // A receive, also one that finds nothing, is no splice.
        bypass.part(known, &flow(&program), &flow(&engine));
        bypass.join(known, (&flow(&program), program.as_fd()), (&flow(&engine), engine.as_fd())).unwrap();
        engine.write_all(b"found").unwrap();
        assert_eq!(program.read(&mut [0; 16]).unwrap(), 5);
        assert_eq!(program.read(&mut [0; 16]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(reported(&mut bypass), 0);
    }

    /// Needs the right to load BPF programs.
    #[test]
    fn bytes_bypass_tcp_and_events_are_reported() {
        if let Err(error) = crate::supported() {
            eprintln!("skipped: {error}");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return;
        }
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let mut bypass = SocketBypass::new(8, 100).unwrap();
            let (mut program, mut peer) = pair(address);
            let (mut engine, _sink) = pair("127.0.0.1:0");
            let known = cookie(&program);
            program.write_all(&[1; 60]).unwrap();
            program.write_all(&[1; 60]).unwrap();
            peer.read_exact(&mut [0; 120]).unwrap();
            let me = std::process::id();
            let events_of = |bypass: &mut SocketBypass| std::iter::from_fn(|| bypass.next_event()).collect::<Vec<_>>();
            let unwatched = events_of(&mut bypass);
            assert!(unwatched.contains(&SocketEvent::Unwatched(known, me)), "{unwatched:?}");
            bypass.join(known, (&flow(&program), program.as_fd()), (&flow(&engine), engine.as_fd())).unwrap();
            let mut buffer = [0; 16];
            program.write_all(b"to the engine").unwrap();
            assert_eq!(engine.read(&mut buffer).unwrap(), 13);
            engine.write_all(&[0; READ_EVERY as usize + 4]).unwrap();
            program.read_exact(&mut [0; READ_EVERY as usize - 1]).unwrap();
            assert_eq!(bypass.read_by(known), u64::from(READ_EVERY) - 1);
            assert!(!events_of(&mut bypass).contains(&SocketEvent::Read(known)), "it has not read much yet");
            assert_eq!(program.read(&mut buffer[..1]).unwrap(), 1);
            assert_eq!(bypass.read_by(known), READ_EVERY.into());
            assert!(events_of(&mut bypass).contains(&SocketEvent::Read(known)));
            bypass.watch(known).unwrap();
            assert_eq!(bypass.read_by(known), 0, "it begins anew");
            bypass.part(known, &flow(&program), &flow(&engine));
            program.write_all(b"to the peer").unwrap();
            assert_eq!(peer.read(&mut buffer).unwrap(), 11);
            bypass.join(known, (&flow(&program), program.as_fd()), (&flow(&engine), engine.as_fd())).unwrap();
            drop(program);
            let states = events_of(&mut bypass);
            assert!(states.iter().any(|event| matches!(event, SocketEvent::State(of, 4) if *of == known)), "{states:?}");
        }
    }

    /// Needs the right to load BPF programs. A connection on another device may have the same addresses and ports: the
    /// question whether it may be joined does the first one no harm.
    #[test]
    fn a_joined_socket_stays_so_when_another_is_asked_about() {
        if let Err(error) = crate::supported() {
            eprintln!("skipped: {error}");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return;
        }
        let mut bypass = SocketBypass::new(8, 100).unwrap();
        let (mut program, _peer) = pair("127.0.0.1:0");
        let (mut engine, _sink) = pair("127.0.0.1:0");
        let (other, _its_peer) = pair("127.0.0.1:0");
        let known = cookie(&program);
        bypass.join(known, (&flow(&program), program.as_fd()), (&flow(&engine), engine.as_fd())).unwrap();
        let refused = bypass.may_join(&flow(&program), other.as_fd()).map_err(|error| error.kind());
        assert_eq!(refused, Err(io::ErrorKind::AddrInUse));
        let mut buffer = [0; 16];
        program.write_all(b"to the engine").unwrap();
        assert_eq!(engine.read(&mut buffer).unwrap(), 13);
    }
}
