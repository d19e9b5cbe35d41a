//! poll(2), select(2) and their variants, for sockets that may be on the NIC.

use crate::epoll::Set;
use crate::few::Few;
use crate::process::Session;
use crate::sections::{self, Section};
use crate::signals::Mark;
use crate::tcp::Tcp;
use crate::thread::{errno, fail};
use crate::waiter::Waiters;
use crate::whole::Whole;
use crate::{epoll, faults, leaving, listening, process, readiness, real, table, thread, udp, wait};
use baton_abi::layout::Owner;
use libc::{POLLERR, POLLHUP, c_int, fd_set, pollfd, sigset_t};

/// Those of the program's descriptors that this library tracks, each with its index.
struct Watched {
    sockets: Few<(usize, &'static Tcp)>,
    sets: Few<(usize, &'static Set)>,
}

impl Watched {
    fn among(fds: &[pollfd]) -> Watched {
        let mut watched = Watched { sockets: Few::new(), sets: Few::new() };
        for (at, entry) in fds.iter().enumerate() {
            match table::get(entry.fd) {
                Some(table::File::Tcp(tcp)) if is_watched(tcp) => watched.sockets.push((at, tcp)),
                // The kernel alone reports a set that several processes share.
                Some(table::File::Set(set)) if !set.is_inherited() => watched.sets.push((at, set)),
                _ => {}
            }
        }
        watched
    }

    fn is_empty(&self) -> bool {
        self.sockets.is_empty() && self.sets.is_empty()
    }

    /// Whether completions of sends wait for any of the sockets, wherever it is.
    fn has_completions(&self) -> bool {
        self.sockets.iter().any(|(_, tcp)| tcp.completions.are_pending())
    }

    /// Fills in the results of sockets on the NIC and of sets with such sockets, and removes the sockets' descriptors
    /// from `asked`, the entries for the kernel. Returns how many are ready.
    fn answer(&self, fds: &mut [pollfd], asked: &mut [pollfd]) -> usize {
        let mut ready = 0;
        for (at, tcp) in &self.sockets {
            if tcp.settled_owner() != Some(Owner::Nic) {
                asked[*at].fd = fds[*at].fd;
                // The kernel does not know of them: `merge` reports them.
                ready += usize::from(tcp.completions.are_pending());
                continue;
            }
            asked[*at].fd = -1;
            let wanted = fds[*at].events as u16 as u32 | (POLLERR | POLLHUP) as u32;
            fds[*at].revents = (readiness::events(tcp) & wanted) as i16;
            ready += usize::from(fds[*at].revents != 0);
        }
        ready
            + self
                .sets
                .iter()
                .filter(|(at, set)| readiness::of_set(set, &mut readiness::Doubt::default()) & fds[*at].events as u32 != 0)
                .count()
    }

    /// Each socket's generation and number of moves: an answer of the kernel counts only if both are unchanged.
    fn versions(&self) -> Few<(u32, Option<u32>)> {
        self.sockets.iter().map(|(_, tcp)| (tcp.generation(), tcp.moves())).collect()
    }

    /// Whether anything has moved since `versions` were read and the sets were looked at.
    fn has_changed(&self, session: Option<&Session>, versions: &[(u32, Option<u32>)]) -> bool {
        self.versions()[..] != *versions || self.sets.iter().any(|(_, set)| readiness::is_marked(set, session))
    }

    /// Copies the kernel's results into `fds`, but not those of sockets that have moved since `versions` were read, nor
    /// those of sets whose only events are this library's. Returns how many entries are ready, and what could not be
    /// determined of the sets.
    fn merge(&self, fds: &mut [pollfd], asked: &[pollfd], versions: &[(u32, Option<u32>)]) -> (usize, readiness::Doubt) {
        for (entry, answer) in fds.iter_mut().zip(asked) {
            if answer.fd >= 0 {
                entry.revents = answer.revents;
            }
        }
        for ((at, tcp), (generation, moves)) in self.sockets.iter().zip(versions) {
            if tcp.generation() != *generation {
                // Another thread has closed the socket (POLLNVAL), or given it to the kernel, which is asked again.
                fds[*at].revents = if tcp.is_left(*generation) { 0 } else { libc::POLLNVAL };
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
                // The answer may be from the middle of a move, when the socket is disconnected for a moment: ask again.
                moves = now;
                // SAFETY: one live pollfd.
                unsafe { real::poll(&mut fds[*at], 1, 0) };
            }
        }
        for ((at, tcp), version) in self.sockets.iter().zip(versions) {
            // Not for a socket that has moved: its other events have to be asked for again first.
            if tcp.completions.are_pending() && (tcp.generation(), tcp.moves()) == *version {
                fds[*at].revents |= POLLERR;
            }
        }
        let mut doubt = readiness::Doubt::default();
        for (at, set) in &self.sets {
            let entry = &mut fds[*at];
            if entry.revents & !libc::POLLNVAL != 0 && !readiness::in_kernel(set, &mut doubt) {
                entry.revents = 0;
            }
            entry.revents |= readiness::of_set(set, &mut doubt) as i16 & entry.events;
        }
        (fds.iter().filter(|entry| entry.revents != 0).count(), doubt)
    }
}

/// The result of a poll.
pub(crate) enum Polled {
    /// The call's result.
    Done(c_int),
    /// Nothing here concerns this library: the caller makes the program's own call, with this limit in microseconds.
    Kernel(Option<u64>),
}

/// ppoll(2) with a limit in microseconds. Listeners are ready, too, when the NIC has made a connection for them.
pub(crate) fn poll(fds: &mut [pollfd], limit: Option<u64>, mask: *const sigset_t) -> Polled {
    let Some(_section) = Section::enter() else { return Polled::Kernel(limit) };
    const READABLE: i16 = libc::POLLIN | libc::POLLRDNORM;
    let (given, deadline, mut left) = (fds.len(), limit.map(wait::after), limit);
    loop {
        let mut queues = listening::queues(fds);
        queues.extend(udp::bells(fds));
        if queues.is_empty() {
            let watched = Watched::among(fds);
            return if watched.is_empty() { Polled::Kernel(left) } else { poll_sockets(&watched, fds, given, left, mask) };
        }
        let mut all = fds.to_vec();
        all.extend(queues.iter().map(|(at, queue)| pollfd { fd: *queue, events: fds[*at].events & READABLE, revents: 0 }));
        let got = match poll_sockets(&Watched::among(&all), &mut all, given, left, mask) {
            Polled::Done(got) if got >= 0 => got,
            over => return over,
        };
        let (own, of_queues) = all.split_at(given);
        fds.copy_from_slice(own);
        let has_hung_up = |queue: &pollfd| queue.revents & POLLHUP != 0;
        for ((at, _), queue) in queues.iter().zip(of_queues) {
            if !has_hung_up(queue) {
                fds[*at].revents |= queue.revents & READABLE;
            } else if let Some(tcp) = table::tcp(fds[*at].fd) {
                // A queue that has hung up is readable, too, although no connection waits.
                listening::leave_ended(tcp);
            }
        }
        let ready = fds.iter().filter(|entry| entry.revents != 0).count();
        if ready > 0 || got == 0 {
            return Polled::Done(ready as c_int);
        }
        // A queue may have hung up because the agent has ended: then the session is left, and only the kernel makes
        // connections.
        if let Some(session) = process::session() {
            session.leave_if_over();
        }
        left = left_until(deadline);
        if !of_queues.iter().any(has_hung_up) {
            // Another thread has closed one.
            return poll_sockets(&Watched::among(fds), fds, given, left, mask);
        }
    }
}

/// Microseconds until a deadline.
fn left_until(deadline: Option<u64>) -> Option<u64> {
    deadline.map(|deadline| deadline.saturating_sub(wait::now()))
}

/// ppoll(2) for sockets that may be on the NIC. The program's own call has `given` entries.
fn poll_sockets(watched: &Watched, fds: &mut [pollfd], given: usize, limit: Option<u64>, mask: *const sigset_t) -> Polled {
    let deadline = limit.map(wait::after);
    let sockets: Few<&Tcp> = watched.sockets.iter().map(|(_, tcp)| *tcp).collect();
    let sets: Few<&Waiters> = watched.sets.iter().map(|(_, set)| readiness::waiters(set)).collect();
    let mut asked: Few<pollfd> = fds.iter().copied().collect();
    let generations: Few<u32> = sockets.iter().map(|tcp| tcp.generation()).collect();
    let (mut rounds, begun) = (0, Mark::now());
    loop {
        if sections::is_withdrawn() {
            return Polled::Kernel(left_until(deadline));
        }
        if sockets.iter().zip(&generations).any(|(tcp, generation)| tcp.is_left(*generation)) {
            // Another thread has given a connection to the kernel for good. For the program nothing has changed:
            // continue without that socket.
            let (watched, limit) = (Watched::among(fds), left_until(deadline));
            let is_kernels = watched.is_empty() && fds.len() == given;
            return if is_kernels { Polled::Kernel(limit) } else { poll_sockets(&watched, fds, given, limit, mask) };
        }
        let (session, owner) = (process::session(), process::owner());
        if let Some(session) = session {
            session.shared.catch_up(thread::token());
            if limit == Some(0) && session.shared.notice_end_sometimes(thread::token()) {
                session.leave();
            }
        }
        fds.iter_mut().chain(asked.iter_mut()).for_each(|entry| entry.revents = 0);
        let versions: Few<_> =
            watched.versions().into_iter().zip(&generations).map(|((_, moves), generation)| (*generation, moves)).collect();
        let ready = watched.answer(fds, &mut asked);
        let got = if ready > 0 || limit == Some(0) {
            let mut ask = || wait::ask_kernel(&mut asked, given, Some(&libc::timespec { tv_sec: 0, tv_nsec: 0 }), mask);
            // With a mask it lets signals in.
            if mask.is_null() { ask() } else { leaving::asleep(ask) }
        } else {
            let changed = || {
                sections::is_withdrawn()
                    || watched.versions() != versions
                    || watched.has_completions()
                    || watched.sockets.iter().any(|(at, tcp)| {
                        let wanted = fds[*at].events as u16 as u32 | (POLLERR | POLLHUP) as u32;
                        asked_of_nic(tcp) && readiness::events(tcp) & wanted != 0
                    })
                    || watched
                        .sets
                        .iter()
                        .any(|(at, set)| readiness::of_set(set, &mut readiness::Doubt::default()) & fds[*at].events as u32 != 0)
            };
            match wait::sleep(
                session,
                wait::Watched { sockets: &sockets, sets: &sets },
                (&mut asked, given),
                deadline,
                mask,
                changed,
            ) {
                Ok(got) => got,
                Err(number) => fail(number) as c_int,
            }
        };
        if got >= 0 && !process::is_still(owner) {
            // A signal handler has forked and this is the child: the entries that were asked for are the parent's.
            return Polled::Done(fail(libc::EINTR) as c_int);
        }
        // EINVAL: too many entries, which the kernel refuses before it looks at any.
        if got < 0 && (ready == 0 || errno() == libc::EINVAL) {
            return Polled::Done(got);
        }
        let errno = errno();
        let (total, doubt) = watched.merge(fds, &asked, &versions);
        fail(errno);
        if total > 0 {
            return Polled::Done(total as c_int);
        }
        if let (Some(tcp), true) = (doubt.moving, limit != Some(0) || rounds < epoll::SETTLING_ROUNDS) {
            rounds += 1;
            tcp.wait_a_little();
        } else if limit == Some(0)
            && (rounds >= epoll::SETTLING_ROUNDS || !doubt.renewed && !watched.has_changed(session, &versions))
        {
            return Polled::Done(0);
        } else {
            rounds += 1;
        }
        if limit != Some(0) && deadline.is_some_and(|deadline| wait::now() >= deadline) {
            return Polled::Done(0);
        }
        if begun.is_over(false) {
            // A signal handler has run while this thread was awake to handle another socket's events.
            return Polled::Done(fail(libc::EINTR) as c_int);
        }
    }
}

/// Whether a socket may have events that the kernel does not know of.
fn is_watched(tcp: &Tcp) -> bool {
    tcp.may_leave_kernel() || tcp.completions.are_ours() == Some(true)
}

fn asked_of_nic(tcp: &Tcp) -> bool {
    tcp.managed().is_some_and(|(connection, _)| connection.owner() == Owner::Nic)
}

/// A copy of one of select's sets, as many bits as the kernel looks at. Empty if there is no set.
struct Bits {
    /// The bits of a set of the usual size, so that such a call allocates nothing.
    usual: [usize; USUAL],
    longer: Vec<usize>,
    words: usize,
}

const BITS: usize = usize::BITS as usize;
const USUAL: usize = libc::FD_SETSIZE / BITS;

impl Bits {
    /// The first `count` bits of a set of the program's. None if there is no such memory.
    fn read(set: *const fd_set, count: c_int) -> Option<Bits> {
        let words = if set.is_null() { 0 } else { (count as usize).div_ceil(BITS) };
        let longer = if words > USUAL { vec![0; words] } else { Vec::new() };
        let mut bits = Bits { usual: [0; USUAL], longer, words };
        faults::read_all(set.cast(), bits.words_mut()).then_some(bits)
    }

    fn words(&self) -> &[usize] {
        if self.words > USUAL { &self.longer } else { &self.usual[..self.words] }
    }

    fn words_mut(&mut self) -> &mut [usize] {
        if self.words > USUAL { &mut self.longer } else { &mut self.usual[..self.words] }
    }

    fn has(&self, fd: c_int) -> bool {
        self.words().get(fd as usize / BITS).is_some_and(|word| word >> (fd as usize % BITS) & 1 != 0)
    }

    fn insert(&mut self, fd: c_int) {
        if let Some(word) = self.words_mut().get_mut(fd as usize / BITS) {
            *word |= 1 << (fd as usize % BITS);
        }
    }

    fn descriptors(&self) -> impl Iterator<Item = c_int> {
        let bits = |(at, word): (usize, &usize)| {
            let word = *word;
            (0..BITS).filter(move |bit| word >> bit & 1 != 0).map(move |bit| (at * BITS + bit) as c_int)
        };
        self.words().iter().enumerate().filter(|(_, word)| **word != 0).flat_map(bits)
    }
}

/// Whether any of these sets contains a descriptor that this library tracks.
fn concerns(count: c_int, sets: &[*mut fd_set; 3]) -> bool {
    let end = table::end().max(udp::end()).min(count.max(0) as usize) as c_int;
    let is_tracked = |fd| fd < end && (table::get(fd).is_some() || udp::of(fd).is_some());
    // Larger sets are copied to the heap.
    let _whole = Whole::begin();
    end > 0 && sets.iter().any(|set| Bits::read(*set, end).is_some_and(|bits| bits.descriptors().any(is_tracked)))
}

/// Number of bits that the kernel looks at: at most as many as its table of descriptors has entries. A program may pass
/// more, such as getdtablesize(3), with a set that is shorter than that.
fn looked_at(count: c_int) -> c_int {
    const USUAL: c_int = libc::FD_SETSIZE as c_int;
    if count <= USUAL {
        return count;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")?.trim().parse().ok());
    // If the size cannot be read: the table has at least so many entries.
    count.min(size.unwrap_or(USUAL.max(table::end() as c_int)))
}

/// For each of select(2)'s three sets: the poll events that it waits for, and those that count as ready (Linux,
/// fs/select.c).
const SELECT: [(i16, i16); 3] = [
    (libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND, libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND | POLLHUP | POLLERR),
    (libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND, libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND | POLLERR),
    (libc::POLLPRI, libc::POLLPRI),
];

/// pselect(2) with a limit in microseconds.
///
/// # Safety
/// As pselect(2).
pub(crate) unsafe fn select(count: c_int, sets: [*mut fd_set; 3], limit: Option<u64>, mask: *const sigset_t) -> Polled {
    if count < 0 || !concerns(count, &sets) {
        return Polled::Kernel(limit);
    }
    let _whole = Whole::begin_cancelable();
    let count = looked_at(count);
    let copies = sets.map(|set| Bits::read(set, count));
    let [Some(read), Some(write), Some(except)] = copies else { return Polled::Kernel(limit) };
    let mut copies = [read, write, except];
    let mut fds = Vec::new();
    for fd in 0..count {
        let wanted = copies.iter().zip(SELECT).filter(|(set, _)| set.has(fd)).map(|(_, (wanted, _))| wanted);
        let events = wanted.fold(0, |all, wanted| all | wanted);
        if events != 0 {
            fds.push(pollfd { fd, events, revents: 0 });
        }
    }
    let deadline = limit.map(wait::after);
    let of_sets = |fd: c_int| copies.iter().zip(SELECT).filter(move |(set, _)| set.has(fd)).map(|(_, (_, counts))| counts);
    let mut left = limit;
    let total = loop {
        match poll(&mut fds, left, mask) {
            Polled::Done(got) if got >= 0 => {}
            over => return over,
        }
        if fds.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
            return Polled::Done(fail(libc::EBADF) as c_int);
        }
        let counted = |entry: &pollfd| of_sets(entry.fd).filter(|counts| entry.revents & counts != 0).count();
        let total: usize = fds.iter().map(counted).sum();
        left = left_until(deadline);
        if total > 0 || fds.iter().all(|entry| entry.revents == 0) || left == Some(0) {
            break total;
        }
        // Only POLLHUP or the like is reported, which counts for none of the three sets. Such a descriptor is removed:
        // it has no other event to come.
        fds.retain(|entry| entry.revents == 0);
    };
    for (set, (_, counts)) in copies.iter_mut().zip(SELECT) {
        let ready: Vec<c_int> =
            fds.iter().filter(|entry| entry.revents & counts != 0 && set.has(entry.fd)).map(|entry| entry.fd).collect();
        set.words_mut().fill(0);
        ready.into_iter().for_each(|fd| set.insert(fd));
    }
    for (set, copy) in sets.into_iter().zip(&copies) {
        // SAFETY: the program's own set (`# Safety`).
        if !unsafe { faults::write_all(set.cast(), copy.words()) } {
            return Polled::Done(fail(libc::EFAULT) as c_int);
        }
    }
    Polled::Done(total as c_int)
}
