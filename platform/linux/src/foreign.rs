//! Descriptors that came from another user's process. Nothing is known of the file behind such a descriptor: closing
//! the descriptor, or any call on the file, may take as long as that user likes.
//!
//! A TCP socket with SO_LINGER and unsent data waits for its peer, a file of FUSE or NFS for its server. A Unix socket
//! may wait for either: descriptors in its queue that were not received are closed with the socket, by the thread that
//! closes it. So the thread that drops a [`Foreign`] closes it only if that is known not to wait; otherwise threads
//! that work for its user close it. A descriptor that is stuck delays only other descriptors of the same user: each
//! user has at most one thread of each kind. There are as many threads as users that have work waiting, up to a number
//! that costs the machine little.

use crate::socket;
use rustix::io::Errno;
use rustix::net::AddressFamily;
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Bound;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

mod trace;

thread_local! {
    /// The user on whose behalf this thread works.
    static USER: Cell<u32> = const { Cell::new(u32::MAX) };
}

/// While this lives, its thread works on behalf of a user: each [`Foreign`] that the thread drops is counted as that
/// user's. Holds the number of the user for whom the thread worked before; dropping this makes the thread work for that
/// user again.
#[derive(Debug)]
pub struct OnBehalf(u32);

/// Makes this thread work on behalf of a user until the result is dropped.
#[must_use]
pub fn on_behalf_of(user: u32) -> OnBehalf {
    OnBehalf(USER.replace(user))
}

impl Drop for OnBehalf {
    fn drop(&mut self) {
        USER.set(self.0);
    }
}

/// Number of kinds of threads: one for each [`Lane`].
const LANES: usize = 4;
/// Most threads of each kind: for closing sockets, closing other files, calls on sockets, and closing Unix sockets. A
/// socket that lingers keeps a thread for [`PATIENCE`] at most, so a few threads are enough for all users. A user can
/// keep its thread of each other kind as long as it likes: another user waits only if as many users as there are
/// threads do that. Such a thread costs Baton some 40 KB, and costs the user who holds it up a blocked thread of its
/// own.
const THREADS: [usize; LANES] = [8, 1024, 1024, 1024];
/// Calls on sockets that a user may have waiting before it is turned away.
const MOST_CALLS: usize = 256;
/// Time after which a thread that makes calls on sockets or closes Unix sockets, and has nothing to do, ends.
const LINGERS: Duration = Duration::from_secs(2);
/// Descriptors other than sockets that a user may have waiting to be closed before it is turned away.
const MOST_STUCK: usize = 32;
/// Most Unix sockets of a user that may wait to be closed; a user with more is turned away. It is more than a user has
/// when all of its programs end at once, so only a user with a socket that does not close reaches it.
const MOST_UNCLOSED: usize = 4096;
/// The reason that is given when a user is turned away because of [`is_stuck`].
pub const STUCK: &str = "the files whose descriptors this user has sent do not close";
/// Time after which a close that lingers is interrupted, in nanoseconds.
const PATIENCE: i64 = 2_000_000;

/// A descriptor that came from another user's process.
#[derive(Debug)]
#[repr(transparent)]
pub struct Foreign(ManuallyDrop<OwnedFd>);

/// The kind of a descriptor, as far as it is known without a call on its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Closing it does not wait.
    Plain,
    /// A socket that lingers.
    Lingering,
    /// A Unix socket, in whose queue any descriptors may be.
    Queue,
    /// Anything else: a file that may be on FUSE or NFS.
    Other,
}

fn kind(fd: BorrowedFd<'_>) -> Kind {
    // The socket layer answers: for a descriptor of something else it returns ENOTSOCK without a call on the file.
    match rustix::net::sockopt::socket_domain(fd) {
        Ok(AddressFamily::UNIX) => Kind::Queue,
        Ok(AddressFamily::INET | AddressFamily::INET6) => match rustix::net::sockopt::socket_linger(fd) {
            Ok(Some(time)) if !time.is_zero() => Kind::Lingering,
            _ => Kind::Plain,
        },
        // Only files in memory have seals.
        Err(_) if rustix::fs::fcntl_get_seals(fd).is_ok() => Kind::Plain,
        Ok(_) | Err(_) => Kind::Other,
    }
}

impl Foreign {
    /// Duplicates a descriptor that another user's process has sent.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn duplicate(fd: BorrowedFd<'_>) -> io::Result<Foreign> {
        fd.try_clone_to_owned().map(Foreign::from)
    }

    /// Closes this descriptor, and then `other`: the process at the other end of `other` sees by this when the first
    /// one has been closed.
    pub fn close_before(self, other: Foreign) {
        let fd = self.into_inner();
        close(fd, Some(other));
    }

    /// Closes the descriptor in this thread. The caller knows that this does not wait.
    pub(crate) fn close_here(self) {
        drop(self.into_inner());
    }

    /// Its descriptor, not closed.
    fn into_inner(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, so its descriptor is taken once.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }

    /// Whether it is a socket.
    pub fn is_socket(&self) -> bool {
        rustix::net::sockopt::socket_type(self) != Err(Errno::NOTSOCK)
    }

    /// Whether it is a file in memory, which closes at once.
    pub fn is_memory(&self) -> bool {
        rustix::fs::fcntl_get_seals(self).is_ok()
    }

    /// Whether it is a file with a path, however slow its server may be. A socket, a pipe or an anonymous file is not
    /// one: it may hold other descriptors, for example the other end of a control connection. This makes no call on the
    /// file itself.
    pub fn has_path(&self) -> bool {
        let link = format!("/proc/self/fd/{}", self.as_fd().as_raw_fd());
        std::fs::read_link(link).is_ok_and(|target| target.is_absolute())
    }

    /// Itself, if it is a Unix socket, as this process's end of a connection to another user's process.
    ///
    /// # Errors
    /// `InvalidInput` if it is something else.
    pub fn into_unix(self) -> io::Result<Foreign> {
        if rustix::net::sockopt::socket_domain(&self) != Ok(AddressFamily::UNIX) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a Unix socket"));
        }
        trace::note(self.as_fd(), trace::OWN);
        Ok(self)
    }

    /// A Unix socket that this process has made, or accepted from a listener of its own: another user's process may be
    /// at its other end. Calls on it wait for nobody, but closing it may.
    pub(crate) fn own_end(fd: OwnedFd) -> Foreign {
        Foreign(ManuallyDrop::new(fd))
    }
}

impl From<OwnedFd> for Foreign {
    fn from(fd: OwnedFd) -> Foreign {
        trace::note(fd.as_fd(), trace::FOREIGN);
        Foreign(ManuallyDrop::new(fd))
    }
}

impl AsFd for Foreign {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: taken once, since `self` is used no more.
        let fd = unsafe { ManuallyDrop::take(&mut self.0) };
        close(fd, None);
    }
}

/// Closes a descriptor, in another thread if that may take long, and drops another one afterwards.
fn close(fd: OwnedFd, then: Option<Foreign>) {
    match kind(fd.as_fd()) {
        Kind::Plain => drop(fd),
        // A socket is asked for its owner without waiting.
        Kind::Lingering => {
            let user = socket::owner(fd.as_fd()).unwrap_or(u32::MAX);
            return do_elsewhere((Lane::Sockets, user), Job::Close(fd, then));
        }
        // Its queue holds the messages, and descriptors, that the process at its other end has sent.
        Kind::Queue => {
            let user = socket::peer_user(fd.as_fd()).ok().filter(|user| *user != u32::MAX).unwrap_or(USER.get());
            return do_elsewhere((Lane::Queues, user), Job::Close(fd, then));
        }
        Kind::Other => return do_elsewhere((Lane::Files, USER.get()), Job::Close(fd, then)),
    }
    drop(then);
}

/// The kinds of work, each of which has its own threads: a descriptor that is stuck in one kind does not delay the
/// other kinds. Calls on sockets are a kind as well: they wait for the socket's lock, which its program can hold as
/// long as it likes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Lane {
    Sockets,
    Files,
    Calls,
    Queues,
}

impl Lane {
    /// Whether sockets that linger are closed in it: then closing is interrupted after [`PATIENCE`].
    fn may_linger(self) -> bool {
        matches!(self, Lane::Sockets | Lane::Queues)
    }

    /// Whether its threads wait a while for more work before they end, since work of this kind comes often.
    fn rests(self) -> bool {
        matches!(self, Lane::Calls | Lane::Queues)
    }
}

/// One piece of work for a thread.
enum Job {
    /// Close the descriptor, and then drop the other one.
    Close(OwnedFd, Option<Foreign>),
    Run(Box<dyn FnOnce() + Send>),
}

impl Job {
    fn run(self) {
        match self {
            Job::Close(fd, then) => {
                drop(fd);
                drop(then);
            }
            Job::Run(act) => act(),
        }
    }
}

/// Runs `act`, which uses a file of a user's, on a thread for that user, after the work that waits already for that
/// user.
pub fn run_for(user: u32, act: impl FnOnce() + Send + 'static) {
    let act = move || {
        let _user = on_behalf_of(user);
        act();
    };
    do_elsewhere((Lane::Files, user), Job::Run(Box::new(act)));
}

/// Runs `act`, which makes calls on a socket of a user's, on a thread for that user, after the work that waits already
/// for that user. A call that is stuck delays only that user's work.
pub fn call_for(user: u32, act: impl FnOnce() + Send + 'static) {
    let act = move || {
        let _user = on_behalf_of(user);
        act();
    };
    do_elsewhere((Lane::Calls, user), Job::Run(Box::new(act)));
}

/// Whether so many calls on a user's sockets wait that no more are to be made for it.
pub fn has_many_calls(user: u32) -> bool {
    closing().queues.get(&(Lane::Calls, user)).is_some_and(|queue| queue.waiting.len() >= MOST_CALLS)
}

/// Whether a call on a user's sockets waits, or is being made.
pub fn has_calls(user: u32) -> bool {
    closing().queues.contains_key(&(Lane::Calls, user))
}

/// Waits until all that was to be done is done, or for this time.
pub fn finish(limit: Duration) {
    let is_busy = |closing: &mut Closing| !closing.queues.is_empty();
    drop(DONE.wait_timeout_while(closing(), limit, is_busy).unwrap_or_else(PoisonError::into_inner));
}

static DONE: Condvar = Condvar::new();
/// There is something to do for threads of this kind that rest.
static WORK: [Condvar; LANES] = [const { Condvar::new() }; LANES];

/// The work that waits, and the threads for it.
struct Closing {
    /// The work that waits, by kind and user. For an entry without work, a thread is busy with the last piece.
    queues: BTreeMap<(Lane, u32), Queue>,
    /// Threads of each kind.
    threads: [usize; LANES],
    /// Threads of each kind without work: they have just been started, or rest.
    idle: [usize; LANES],
    /// The user of each kind that was served last.
    served: [u32; LANES],
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// A thread works on this queue. Never do two, so that a user whose descriptors are stuck takes one thread.
    busy: bool,
}

impl Queue {
    /// Whether it has something to do for a thread.
    fn is_ready(&self) -> bool {
        !self.busy && !self.waiting.is_empty()
    }
}

static CLOSING: Mutex<Closing> = Mutex::new(Closing::new());

fn closing() -> std::sync::MutexGuard<'static, Closing> {
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether so many of a user's descriptors wait to be closed that Baton takes no more from this user.
pub fn is_stuck(user: u32) -> bool {
    let closing = closing();
    let waits = |lane| closing.queues.get(&(lane, user)).map_or(0, |queue| queue.waiting.len());
    waits(Lane::Files) >= MOST_STUCK || waits(Lane::Queues) >= MOST_UNCLOSED
}

/// Number of a user's Unix sockets that wait to be closed, each of which takes a descriptor of this process until then.
pub fn unclosed(user: u32) -> u64 {
    let closing = closing();
    let queue = closing.queues.get(&(Lane::Queues, user));
    queue.map_or(0, |queue| queue.waiting.len() as u64 + u64::from(queue.busy))
}

fn do_elsewhere(at: (Lane, u32), job: Job) {
    let (mut closing, lane) = (closing(), at.0);
    closing.queues.entry(at).or_default().waiting.push_back(job);
    if closing.ready(lane) <= closing.idle[lane as usize] {
        // A thread that rests or has just been started takes this work, or the user's own thread takes it after its
        // current work.
        WORK[lane as usize].notify_one();
    } else if closing.threads[lane as usize] < THREADS[lane as usize] {
        closing.count_new(lane, true);
        let (name, stack) = if lane == Lane::Calls { ("caller", 256 << 10) } else { ("closer", 64 << 10) };
        let started = std::thread::Builder::new().name(name.into()).stack_size(stack).spawn(move || close_all(lane));
        if started.is_err() {
            // The next thread that there is does it.
            closing.count_new(lane, false);
        }
    }
}

impl Closing {
    const fn new() -> Closing {
        Closing { queues: BTreeMap::new(), threads: [0; LANES], idle: [0; LANES], served: [0; LANES] }
    }

    /// Counts a thread that is being started, or takes back the count of one that could not be started.
    fn count_new(&mut self, lane: Lane, starts: bool) {
        for count in [&mut self.threads, &mut self.idle] {
            let count = &mut count[lane as usize];
            *count = if starts { *count + 1 } else { *count - 1 };
        }
    }

    /// Users that have something to do, and no thread that does it.
    fn ready(&self, lane: Lane) -> usize {
        self.queues.range((lane, 0)..=(lane, u32::MAX)).filter(|(_, queue)| queue.is_ready()).count()
    }

    /// Takes the next piece of work of a user for whom no thread works now. Users take turns, so that a user who always
    /// has work is not served before others.
    fn take(&mut self, lane: Lane) -> Option<((Lane, u32), Job)> {
        let served = (lane, self.served[lane as usize]);
        let later = self.queues.range((Bound::Excluded(served), Bound::Included((lane, u32::MAX))));
        let (at, _) = later.chain(self.queues.range((lane, 0)..=served)).find(|(_, queue)| queue.is_ready())?;
        let at = *at;
        self.served[lane as usize] = at.1;
        let queue = self.queues.get_mut(&at)?;
        queue.busy = true;
        Some((at, queue.waiting.pop_front()?))
    }

    fn done(&mut self, at: (Lane, u32)) {
        if let Some(queue) = self.queues.get_mut(&at) {
            queue.busy = false;
            if queue.waiting.is_empty() {
                self.queues.remove(&at);
                DONE.notify_all();
            }
        }
    }
}

/// A thread's loop: takes work of users for whom no other thread works, and ends when none is left.
fn close_all(lane: Lane) {
    // No signal interrupts the wait for a socket's lock.
    let alarm = lane.may_linger().then(Alarm::new).flatten();
    let mut guard = closing();
    guard.idle[lane as usize] -= 1;
    loop {
        let Some((at, job)) = guard.take(lane) else {
            if lane.rests() {
                guard.idle[lane as usize] += 1;
                let rests = |closing: &mut Closing| closing.ready(lane) == 0;
                let work = &WORK[lane as usize];
                let (woken, _) = work.wait_timeout_while(guard, LINGERS, rests).unwrap_or_else(PoisonError::into_inner);
                guard = woken;
                guard.idle[lane as usize] -= 1;
                if guard.ready(lane) > 0 {
                    continue;
                }
            }
            guard.threads[lane as usize] -= 1;
            return;
        };
        drop(guard);
        if let Some(alarm) = &alarm {
            alarm.set(PATIENCE);
        }
        job.run();
        if let Some(alarm) = &alarm {
            alarm.set(0);
        }
        guard = closing();
        guard.done(at);
    }
}

/// A timer that interrupts this thread's system call. A close that lingers has sent its FIN by then, and returns when a
/// signal comes; the kernel goes on with the socket without a descriptor, as after the end of its program.
struct Alarm(libc::timer_t);

extern "C" fn nothing(_: libc::c_int) {}

impl Alarm {
    fn new() -> Option<Alarm> {
        let signal = libc::SIGRTMAX();
        // SAFETY: all three structs may be zero; `nothing` may run in any thread at any time; the timer is this
        // thread's own.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            if libc::sigaction(signal, &action, std::ptr::null_mut()) != 0 {
                return None;
            }
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer: libc::timer_t = std::mem::zeroed();
            (libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) == 0).then_some(Alarm(timer))
        }
    }

    /// Makes it ring every so many nanoseconds; never with 0.
    fn set(&self, nanos: i64) {
        let time = libc::timespec { tv_sec: 0, tv_nsec: nanos };
        let setting = libc::itimerspec { it_interval: time, it_value: time };
        // SAFETY: the timer exists until `self` is dropped.
        unsafe { libc::timer_settime(self.0, 0, &setting, std::ptr::null_mut()) };
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: it is deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::sync::{Arc, mpsc};
    use std::time::Instant;

    /// User numbers that no process of this machine has.
    const USERS: std::ops::Range<u32> = 4_000_000_100..4_000_000_200;
    const OTHER: u32 = 4_000_000_900;

    /// Sockets and files of a hundred users are stuck: each user takes one thread of each kind, and the work of a
    /// further user is still done.
    #[test]
    fn users_whose_own_is_stuck_hold_up_no_other() {
        let gate = Arc::new(Mutex::new(()));
        let held = gate.lock().expect("no panic");
        for user in USERS {
            for _ in 0..3 {
                let [calls, files] = [gate.clone(), gate.clone()];
                call_for(user, move || drop(calls.lock()));
                run_for(user, move || drop(files.lock()));
            }
        }
        let (done, is_done) = mpsc::channel();
        let also = done.clone();
        call_for(OTHER, move || _ = done.send(Lane::Calls));
        run_for(OTHER, move || _ = also.send(Lane::Files));
        let next = || is_done.recv_timeout(Duration::from_secs(60)).expect("what is another user's is done");
        let mut lanes = [next(), next()];
        lanes.sort_unstable();
        assert_eq!(lanes, [Lane::Files, Lane::Calls]);
        // No other test has calls made.
        let threads = closing().threads[Lane::Calls as usize];
        assert!(threads <= USERS.len() + 1, "{threads} threads for {} users and another one", USERS.len());
        let mut users = USERS;
        assert!(users.all(|user| has_calls(user) && !has_many_calls(user)));
        drop(held);
    }

    /// Descriptors that are dropped for another user in between are counted for that user only.
    #[test]
    fn a_thread_works_for_its_earlier_user_again() {
        let outer = on_behalf_of(OTHER);
        drop(on_behalf_of(USERS.start));
        assert_eq!(USER.get(), OTHER);
        drop(outer);
        assert_eq!(USER.get(), u32::MAX);
    }

    /// A user who always has work is not served before others.
    #[test]
    fn users_are_served_in_turn() {
        let mut closing = Closing::new();
        for user in [1, 2, 1, u32::MAX, 1, 2] {
            let job = Job::Run(Box::new(|| ()));
            closing.queues.entry((Lane::Sockets, user)).or_default().waiting.push_back(job);
        }
        assert_eq!((closing.ready(Lane::Sockets), closing.ready(Lane::Files)), (3, 0));
        let served: Vec<u32> = std::iter::from_fn(|| {
            let (at, _) = closing.take(Lane::Sockets)?;
            closing.done(at);
            Some(at.1)
        })
        .collect();
        assert_eq!(served, [1, 2, u32::MAX, 1, 2, 1]);
        assert!(closing.queues.is_empty());
    }

    /// A connection with SO_LINGER whose peer does not read, with as much unsent data as there is room for.
    fn lingering(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let ours = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (theirs, _) = listener.accept().expect("a connection");
        ours.set_nonblocking(true).expect("a socket");
        while (&ours).write(&[7; 65536]).is_ok() {}
        let linger = libc::linger { l_onoff: 1, l_linger: 1000 };
        // SAFETY: a linger has no padding.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const linger).cast::<u8>(), size_of_val(&linger)) };
        socket::set_bytes(ours.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, bytes).expect("SO_LINGER");
        (ours, theirs)
    }

    /// Sockets that linger for a thousand seconds delay neither the thread that drops them nor each other: every peer
    /// gets all bytes and the FIN.
    #[test]
    fn sockets_that_linger_hold_up_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let pairs: Vec<_> = (0..200).map(|_| lingering(&listener)).collect();
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        #[expect(clippy::disallowed_methods, reason = "a test measures real time")]
        let begun = Instant::now();
        ours.into_iter().for_each(|ours| drop(Foreign::from(OwnedFd::from(ours))));
        assert!(begun.elapsed() < Duration::from_secs(10), "dropping them took {:?}", begun.elapsed());
        for mut peer in theirs {
            peer.set_read_timeout(Some(Duration::from_secs(60))).expect("a time-out");
            let mut bytes = Vec::new();
            peer.read_to_end(&mut bytes).expect("everything, and the end");
            assert!(bytes.len() >= 65536 && bytes.iter().all(|byte| *byte == 7));
        }
    }

    /// Leaves a descriptor in the queue of the socket at the other end.
    fn leave(from: &UnixStream, fd: OwnedFd) {
        crate::control::try_send_bytes(from.as_fd(), &[0], &[fd.as_fd()]).expect("room");
    }

    /// Sockets that linger and were not received are closed with the socket in whose queue they are; one of them is in
    /// the queue of a socket that is itself in that queue. They delay no thread.
    #[test]
    fn what_nobody_has_received_holds_up_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let pairs: Vec<_> = (0..4).map(|_| lingering(&listener)).collect();
        let (mut ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let (from, to) = UnixStream::pair().expect("two sockets");
        let (inner_from, inner_to) = UnixStream::pair().expect("two sockets");
        leave(&inner_from, ours.pop().expect("a socket").into());
        leave(&from, inner_to.into());
        ours.into_iter().for_each(|ours| leave(&from, ours.into()));
        #[expect(clippy::disallowed_methods, reason = "a test measures real time")]
        let begun = Instant::now();
        drop(Foreign::from(OwnedFd::from(to)));
        assert!(begun.elapsed() < Duration::from_secs(10), "dropping it took {:?}", begun.elapsed());
        for mut peer in theirs {
            peer.set_read_timeout(Some(Duration::from_secs(60))).expect("a time-out");
            let mut bytes = Vec::new();
            peer.read_to_end(&mut bytes).expect("everything, and the end");
            assert!(bytes.len() >= 65536 && bytes.iter().all(|byte| *byte == 7));
        }
    }

    /// Unix sockets that do not close are counted for the user at their other end. When there are too many, that user
    /// is turned away.
    #[test]
    fn a_user_has_a_bounded_number_of_unclosed_sockets() {
        const ITS: u32 = 4_000_000_950;
        let gate = Arc::new(Mutex::new(()));
        let held = gate.lock().expect("no panic");
        let stuck = |count: usize| {
            for _ in 0..count {
                let gate = gate.clone();
                do_elsewhere((Lane::Queues, ITS), Job::Run(Box::new(move || drop(gate.lock()))));
            }
        };
        stuck(MOST_UNCLOSED);
        assert_eq!((unclosed(ITS), unclosed(OTHER)), (MOST_UNCLOSED as u64, 0));
        stuck(1);
        assert!(is_stuck(ITS) && !is_stuck(OTHER));
        drop(held);
    }

    /// A user whose sockets do not close may connect, and is turned away, as often as it likes: that takes no
    /// descriptor, whatever the client has asked for, and whether or not it has closed its end. Only a connection on
    /// which it has sent a descriptor waits to be closed.
    #[test]
    fn who_is_turned_away_does_not_wait_behind_what_is_stuck() {
        use crate::control::{Channel, PeerChannel};
        let what = |number: i32| std::fs::read_link(format!("/proc/self/fd/{number}")).ok();
        let file = std::fs::File::open("/dev/null").expect("a file");
        let gate = Arc::new(Mutex::new(()));
        let held = gate.lock().expect("no panic");
        let user = crate::process::user();
        let stuck = gate.clone();
        do_elsewhere((Lane::Queues, user), Job::Run(Box::new(move || drop(stuck.lock()))));
        for (empty, messages, descriptors, gone) in
            [(0, 0, 0, false), (2, 0, 0, false), (1, 3, 0, true), (0, 0, 1, false), (1, 1, 1, true)]
        {
            let (ours, theirs) = Channel::pair().expect("two sockets");
            (0..empty).for_each(|_| theirs.try_send(&(), &[]).expect("room"));
            (0..messages).for_each(|_| theirs.try_send(&7u8, &[]).expect("room"));
            (0..descriptors).for_each(|_| theirs.try_send(&(), &[file.as_fd()]).expect("room"));
            // It goes with this unread.
            ours.try_send(&7u8, &[]).expect("room");
            let theirs = Some(theirs).filter(|_| !gone);
            let number = ours.as_fd().as_raw_fd();
            let before = what(number);
            PeerChannel::from(ours).turn_away();
            let waits = what(number) == before;
            assert_eq!(waits, descriptors > 0, "{empty} empty messages, {messages} others, {descriptors} descriptors");
            drop(theirs);
        }
        drop(held);
    }

    #[test]
    fn kinds_are_told_apart_without_asking_the_file() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let (ours, _theirs) = lingering(&listener);
        let (unix, _) = UnixStream::pair().expect("two sockets");
        let file = std::fs::File::open("/dev/null").expect("a file");
        assert_eq!(kind(ours.as_fd()), Kind::Lingering);
        assert_eq!(kind(listener.as_fd()), Kind::Plain);
        assert_eq!(kind(unix.as_fd()), Kind::Queue);
        assert_eq!(kind(file.as_fd()), Kind::Other);
        let file = Foreign::from(OwnedFd::from(file));
        assert!(!file.is_socket() && !file.is_memory());
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
        assert_eq!(kind(memory.as_fd()), Kind::Plain);
        assert!(Foreign::from(memory).is_memory());
        assert!(Foreign::from(OwnedFd::from(unix)).into_unix().is_ok());
        assert!(Foreign::from(OwnedFd::from(listener)).into_unix().is_err());
    }
}
