//! poll(2), select(2) and their variants, for sockets that may be on the NIC.

use crate::epoll::Set;
use crate::sections::{self, Section};
use crate::tcp::Tcp;
use crate::thread::{errno, fail};
use crate::{listening, process, readiness, real, table, thread, udp, wait};
use baton_abi::layout::Owner;
use libc::{POLLERR, POLLHUP, c_int, fd_set, pollfd, sigset_t};

/// Those of the program's descriptors that this library tracks, each with its index.
struct Watched {
    sockets: Vec<(usize, &'static Tcp)>,
    sets: Vec<(usize, &'static Set)>,
}

impl Watched {
    fn among(fds: &[pollfd]) -> Watched {
        let mut watched = Watched { sockets: Vec::new(), sets: Vec::new() };
        for (at, entry) in fds.iter().enumerate() {
            match table::get(entry.fd) {
                Some(table::File::Tcp(tcp)) if tcp.is_managed() || tcp.may_be_handed_over() => watched.sockets.push((at, tcp)),
                Some(table::File::Set(set)) => watched.sets.push((at, set)),
                _ => {}
            }
        }
        watched
    }

    fn is_empty(&self) -> bool {
        self.sockets.is_empty() && self.sets.is_empty()
    }

    /// Fills in results for sockets on the NIC, and takes their descriptors out of what the kernel is asked. Returns how many
    /// are ready.
    fn answer(&self, fds: &mut [pollfd], asked: &mut [pollfd]) -> usize {
        let mut ready = 0;
        for (at, tcp) in &self.sockets {
            if tcp.settled_owner() != Some(Owner::Nic) {
                asked[*at].fd = fds[*at].fd;
                continue;
            }
            asked[*at].fd = -1;
            let wanted = fds[*at].events as u16 as u32 | (POLLERR | POLLHUP) as u32;
            fds[*at].revents = (readiness::events(tcp) & wanted) as i16;
            ready += usize::from(fds[*at].revents != 0);
        }
        ready
    }

    /// Each socket's generation and number of moves: a kernel's answer only counts if both are unchanged.
    fn versions(&self) -> Vec<(u32, Option<u32>)> {
        self.sockets.iter().map(|(_, tcp)| (tcp.generation(), tcp.moves())).collect()
    }

    /// Takes over the kernel's results, except for sockets that have moved since `versions` were read, and for sets only if they
    /// really have events. Returns how many are ready.
    fn merge(&self, fds: &mut [pollfd], asked: &[pollfd], versions: &[(u32, Option<u32>)]) -> usize {
        for (entry, answer) in fds.iter_mut().zip(asked) {
            if answer.fd >= 0 {
                entry.revents = answer.revents;
            }
        }
        for ((at, tcp), (generation, moves)) in self.sockets.iter().zip(versions) {
            if tcp.generation() != *generation {
                // Another thread has closed it.
                fds[*at].revents = libc::POLLNVAL;
                continue;
            }
            if asked[*at].fd < 0 || fds[*at].revents == 0 {
                continue;
            }
            let mut moves = *moves;
            while fds[*at].revents != 0 {
                let owner = tcp.settled_owner();
                let now = tcp.moves();
                if owner == Some(Owner::Nic) {
                    fds[*at].revents = 0;
                }
                if now == moves {
                    break;
                }
                // During a move the socket is disconnected for a moment.
                moves = now;
                // SAFETY: one live pollfd.
                unsafe { real::poll(&mut fds[*at], 1, 0) };
            }
        }
        for (at, set) in &self.sets {
            if fds[*at].revents != 0 && !set.is_ready() {
                fds[*at].revents = 0;
            }
        }
        fds.iter().filter(|entry| entry.revents != 0).count()
    }
}

/// The result of a poll.
pub(crate) enum Polled {
    /// The call's result.
    Done(c_int),
    /// The kernel alone knows: the program's own call is to be made, with this limit in microseconds.
    Kernel(Option<u64>),
}

/// ppoll(2) with a limit in microseconds. Listeners are ready, too, when the NIC has made a connection for them.
pub(crate) fn poll(fds: &mut [pollfd], limit: Option<u64>, mask: *const sigset_t) -> Polled {
    let Some(_section) = Section::enter() else { return Polled::Kernel(limit) };
    let mut queues = listening::queues(fds);
    queues.extend(udp::bells(fds));
    let given = fds.len();
    if queues.is_empty() {
        let watched = Watched::among(fds);
        return if watched.is_empty() { Polled::Kernel(limit) } else { poll_sockets(&watched, fds, given, limit, mask) };
    }
    const READABLE: i16 = libc::POLLIN | libc::POLLRDNORM;
    let deadline = limit.map(|limit| wait::now() + limit);
    let mut all = fds.to_vec();
    all.extend(queues.iter().map(|(at, queue)| pollfd { fd: *queue, events: fds[*at].events & READABLE, revents: 0 }));
    let got = match poll_sockets(&Watched::among(&all), &mut all, given, limit, mask) {
        Polled::Done(got) if got >= 0 => got,
        over => return over,
    };
    let (own, of_queues) = all.split_at(fds.len());
    fds.copy_from_slice(own);
    for ((at, _), queue) in queues.iter().zip(of_queues) {
        fds[*at].revents |= queue.revents & READABLE;
    }
    let ready = fds.iter().filter(|entry| entry.revents != 0).count();
    if ready > 0 || got == 0 {
        return Polled::Done(ready as c_int);
    }
    // A queue has hung up, since the agent has ended: the kernel alone makes connections now.
    if let Some(session) = process::session() {
        session.leave_if_over();
    }
    poll_sockets(&Watched::among(fds), fds, given, left_until(deadline), mask)
}

/// Microseconds until a deadline.
fn left_until(deadline: Option<u64>) -> Option<u64> {
    deadline.map(|deadline| deadline.saturating_sub(wait::now()))
}

/// ppoll(2) for sockets that may be on the NIC. The program's own call has `given` entries.
fn poll_sockets(watched: &Watched, fds: &mut [pollfd], given: usize, limit: Option<u64>, mask: *const sigset_t) -> Polled {
    let deadline = limit.map(|limit| wait::now() + limit);
    let sockets: Vec<&Tcp> = watched.sockets.iter().map(|(_, tcp)| *tcp).collect();
    watched.sets.iter().for_each(|(_, set)| set.watch());
    let mut asked: Vec<pollfd> = fds.to_vec();
    let generations: Vec<u32> = sockets.iter().map(|tcp| tcp.generation()).collect();
    loop {
        if sections::is_withdrawn() {
            return Polled::Kernel(left_until(deadline));
        }
        let session = process::session();
        if let Some(session) = session {
            session.shared.catch_up(thread::token());
            if limit == Some(0) && session.shared.notice_end_sometimes(thread::token()) {
                session.leave();
            }
        }
        fds.iter_mut().chain(asked.iter_mut()).for_each(|entry| entry.revents = 0);
        let versions: Vec<_> =
            watched.versions().into_iter().zip(&generations).map(|((_, moves), generation)| (*generation, moves)).collect();
        let ready = watched.answer(fds, &mut asked);
        let got = if ready > 0 || limit == Some(0) {
            wait::ask_kernel(&mut asked, given, Some(&libc::timespec { tv_sec: 0, tv_nsec: 0 }), mask)
        } else {
            let changed = || {
                sections::is_withdrawn()
                    || watched.versions() != versions
                    || watched.sockets.iter().any(|(at, tcp)| {
                        let wanted = fds[*at].events as u16 as u32 | (POLLERR | POLLHUP) as u32;
                        asked_of_nic(tcp) && readiness::events(tcp) & wanted != 0
                    })
            };
            match wait::sleep(session, &sockets, (&mut asked, given), deadline, mask, changed) {
                Ok(got) => got,
                Err(number) => fail(number) as c_int,
            }
        };
        // Too many entries: the kernel says so before it looks at any.
        if got < 0 && (ready == 0 || errno() == libc::EINVAL) {
            return Polled::Done(got);
        }
        let errno = errno();
        let total = watched.merge(fds, &asked, &versions);
        fail(errno);
        if total > 0 {
            return Polled::Done(total as c_int);
        }
        if limit == Some(0) || deadline.is_some_and(|deadline| wait::now() >= deadline) {
            return Polled::Done(0);
        }
    }
}

fn asked_of_nic(tcp: &Tcp) -> bool {
    tcp.managed().is_some_and(|(connection, _)| connection.owner() == Owner::Nic)
}

/// Whether any of these sets contains a descriptor that this library tracks. The kernel reads all bits that are read here.
pub(crate) fn concerns(count: c_int, sets: &[*mut fd_set; 3]) -> bool {
    let end = table::end().max(udp::end()).min(count.max(0) as usize) as c_int;
    sets.iter().filter(|set| !set.is_null()).any(|set| {
        // SAFETY: `select`'s `# Safety`: non-null sets have `count` bits, or as many as there are descriptors.
        (0..end).any(|fd| unsafe { is_set(*set, fd) } && (table::get(fd).is_some() || udp::of(fd).is_some()))
    })
}

/// Number of bits that the kernel looks at: not more than its table of descriptors has entries. Programs say more, such as
/// getdtablesize(3), and their sets may end before.
fn looked_at(count: c_int) -> c_int {
    const USUAL: c_int = libc::FD_SETSIZE as c_int;
    if count <= USUAL {
        return count;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")?.trim().parse().ok());
    // Where that cannot be read it has at least these.
    count.min(size.unwrap_or(USUAL.max(table::end() as c_int)))
}

const BITS: usize = usize::BITS as usize;

/// FD_ISSET without FD_SETSIZE as a limit: programs allocate larger sets.
///
/// # Safety
/// `set` must have more than `fd` bits.
unsafe fn is_set(set: *const fd_set, fd: c_int) -> bool {
    // SAFETY: the word that contains bit `fd` is inside the set.
    unsafe { set.cast::<usize>().add(fd as usize / BITS).read_unaligned() >> (fd as usize % BITS) & 1 != 0 }
}

/// FD_SET and FD_CLR without FD_SETSIZE as a limit.
///
/// # Safety
/// `set` must have more than `fd` bits.
unsafe fn put(set: *mut fd_set, fd: c_int, on: bool) {
    let bit = 1usize << (fd as usize % BITS);
    // SAFETY: the word that contains bit `fd` is inside the set.
    unsafe {
        let word = set.cast::<usize>().add(fd as usize / BITS);
        let value = word.read_unaligned();
        word.write_unaligned(if on { value | bit } else { value & !bit });
    }
}

/// For each of select(2)'s three sets: the poll events that it waits for, and those that count as ready (Linux, fs/select.c).
const SELECT: [(i16, i16); 3] = [
    (libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND, libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND | POLLHUP | POLLERR),
    (libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND, libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND | POLLERR),
    (libc::POLLPRI, libc::POLLPRI),
];

/// pselect(2) with a limit in microseconds.
///
/// # Safety
/// The sets must have `count` bits, or as many as the kernel's table of descriptors has entries, or be null.
pub(crate) unsafe fn select(count: c_int, sets: [*mut fd_set; 3], limit: Option<u64>, mask: *const sigset_t) -> Polled {
    if count < 0 || !concerns(count, &sets) {
        return Polled::Kernel(limit);
    }
    let mut fds = Vec::new();
    for fd in 0..looked_at(count) {
        let mut events = 0;
        for (set, (wanted, _)) in sets.iter().zip(SELECT) {
            // SAFETY: this function's `# Safety`: a non-null set has these bits.
            if !set.is_null() && unsafe { is_set(*set, fd) } {
                events |= wanted;
            }
        }
        if events != 0 {
            fds.push(pollfd { fd, events, revents: 0 });
        }
    }
    match poll(&mut fds, limit, mask) {
        Polled::Done(got) if got >= 0 => {}
        over => return over,
    }
    if fds.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        return Polled::Done(fail(libc::EBADF) as c_int);
    }
    let mut total = 0;
    for entry in &fds {
        for (set, (wanted, counts)) in sets.iter().zip(SELECT) {
            // SAFETY: as above.
            if !set.is_null() && entry.events & wanted == wanted && unsafe { is_set(*set, entry.fd) } {
                let on = entry.revents & counts != 0;
                // SAFETY: as above.
                unsafe { put(*set, entry.fd, on) };
                total += c_int::from(on);
            }
        }
    }
    Polled::Done(total)
}
