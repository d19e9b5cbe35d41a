//! Whether processes other than its program hold a socket, as far as /proc shows their descriptors to this process.
//!
//! A process can block the thread that reads the links of its descriptors (see [`crate::reading::apart`]). So a thread
//! reads one process after another; if one process blocks it, another thread goes on with the next process, and the
//! first thread's findings are used if they come in time. A process that could not be read matters only for sockets
//! that it can have inherited.
//!
//! A process may fork and end while the search runs, before it is read; so may its child, and so on. So the processes
//! are listed again after those of the last listing have been read, and the new ones are read, until a listing has none
//! that has not been read. Let there be at each moment a process that holds the socket, each but the first a child of
//! an earlier one, and none that is read while it lives:
//!
//! - The last listing is the second one or a later one. The holder that lives when it begins is not in the listing
//!   before: it would have been read since, alive. So that one had begun when this holder was made.
//! - So it and all holders after it have got their numbers since then, and the kernel counts up: each has a greater
//!   number than its parent. It also lists processes in the order of their numbers. When it has come past the greatest
//!   number that has been given since then, the holder of that moment has a smaller one, and did not get it after the
//!   listing had come past it: so it is in the last listing.
//! - But all of the last listing have been read before it began, so this one has, while it lived.
//!
//! That does not hold if the numbers start again at the lowest one (`pid_max`) during the last two listings: then such
//! a holder is missed if its parent ends before the last listing has come to it, and the holder itself got a number
//! that the listing was past. If each listing has new processes, the search ends with those of the last one unread.
//!
//! Of each process the descriptors of its first thread are read, once. A thread that has a table of its own
//! (CLONE_FILES of unshare(2)), and a process that gives the socket another number meanwhile, can hide it.

use crate::events::monotonic_micros;
use crate::process;
use crate::reading::Reading;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time that the search waits for one process before another thread goes on with the next.
const GLANCE: Duration = Duration::from_millis(50);

/// Time that the search waits at its end for processes that are still being read and may have inherited one of the
/// sockets. Even a process with some hundred thousand descriptors has been read by then.
const PATIENCE: Duration = Duration::from_millis(250);

/// Most ancestors of a process that are looked at.
const MOST_ANCESTORS: usize = 1000;

/// Most listings whose processes are read. If the next one has new processes still, these are left unread.
const MOST_ROUNDS: u32 = 8;

/// A socket, and those who may hold it.
#[derive(Clone, Debug)]
pub struct Question {
    /// The socket's inode.
    pub inode: u64,
    /// The process whose socket it is.
    pub program: u32,
    /// Processes that may hold it, the program among them.
    pub except: Vec<u32>,
}

/// Which processes hold a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Held {
    /// Only the processes that are expected to.
    Alone,
    /// Another process, too.
    ByAnother,
    /// A process that may have inherited it does not let anybody look, or processes come and go faster than they are
    /// read.
    Unknown,
}

/// The result of a search.
#[derive(Debug)]
pub struct Answers {
    /// Of each question, in order.
    pub held: Vec<Held>,
    /// Microseconds of work: without the time for which processes were waited for.
    pub took: u64,
}

/// Searches all processes. The more processes there are, the longer it takes, and processes may block it: so a loop for
/// which others wait must not call it.
pub fn search(questions: &[Question]) -> Answers {
    let search = Search {
        list: process::listed,
        sockets_of: process::sockets_of,
        may_inherit: may_have_inherited,
        glance: GLANCE,
        patience: PATIENCE,
    };
    search.run(questions)
}

/// A process in a listing: its number, and what tells it from a later process with this number ([`process::listed`]).
type Listed = (u32, u64);

/// How processes are searched.
struct Search {
    list: fn() -> Vec<Listed>,
    sockets_of: fn(u32) -> Vec<(i32, u64)>,
    /// Whether the first process can have inherited a socket of the second one.
    may_inherit: fn(u32, u32) -> bool,
    glance: Duration,
    patience: Duration,
}

/// Processes, each with a program of which it, or a process that descends from it, can have inherited a socket.
type Heirs = BTreeSet<(Listed, u32)>;

/// The state that the threads of a search share.
struct Shared {
    sockets_of: fn(u32) -> Vec<(i32, u64)>,
    inodes: BTreeSet<u64>,
    progress: Mutex<Progress>,
    changed: Condvar,
}

struct Progress {
    queue: VecDeque<Listed>,
    /// Processes that have not been read, and those of them that a thread of this search reads now.
    unread: BTreeSet<Listed>,
    being_read: BTreeSet<Listed>,
    /// The processes that hold one of the inodes.
    holders: BTreeMap<u64, Vec<u32>>,
    /// Number of the thread that takes processes from the queue. An earlier thread ends after the process that it is
    /// reading.
    thread: u32,
    /// The queue has been read.
    ended: bool,
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for this time, or until something has changed. Returns whether the time is over, too.
    fn wait<'a>(&self, progress: MutexGuard<'a, Progress>, limit: Duration) -> (MutexGuard<'a, Progress>, bool) {
        let (progress, result) = self.changed.wait_timeout(progress, limit).unwrap_or_else(PoisonError::into_inner);
        (progress, result.timed_out())
    }

    /// Reads the processes of the queue, until another thread does.
    fn read(&self, thread: u32) {
        while let Some(process) = self.next(thread) {
            let (number, _) = process;
            // Without it an earlier reading of this process has not come to its end, or too many have not.
            let Some(reading) = Reading::begin(number) else { continue };
            self.progress().being_read.insert(process);
            let sockets = (self.sockets_of)(number);
            drop(reading);
            let mut progress = self.progress();
            progress.unread.remove(&process);
            progress.being_read.remove(&process);
            for (_, inode) in sockets.into_iter().filter(|(_, inode)| self.inodes.contains(inode)) {
                progress.holders.entry(inode).or_default().push(number);
            }
        }
        self.changed.notify_all();
    }

    fn next(&self, thread: u32) -> Option<Listed> {
        let mut progress = self.progress();
        if progress.thread != thread {
            return None;
        }
        let next = progress.queue.pop_front();
        progress.ended = next.is_none();
        next
    }
}

impl Search {
    fn run(&self, questions: &[Question]) -> Answers {
        let begun = monotonic_micros();
        let shared = Arc::new(Shared {
            sockets_of: self.sockets_of,
            inodes: questions.iter().map(|question| question.inode).collect(),
            progress: Mutex::new(Progress {
                queue: VecDeque::new(),
                unread: BTreeSet::new(),
                being_read: BTreeSet::new(),
                holders: BTreeMap::new(),
                thread: 0,
                ended: false,
            }),
            changed: Condvar::new(),
        });
        let (glance, patience) = (self.glance.as_micros() as u64, self.patience.as_micros() as u64);
        let (mut known, mut held_up, mut waited) = (BTreeSet::new(), 0, 0);
        let mut rounds = 0..MOST_ROUNDS;
        let unread = loop {
            // A process that is read only after the last listing may have made others and ended.
            let mut unread = shared.progress().unread.clone();
            let new: Vec<Listed> = (self.list)().into_iter().filter(|process| known.insert(*process)).collect();
            if new.is_empty() || rounds.next().is_none() {
                unread.extend(new);
                break unread;
            }
            held_up += self.read_all(&shared, new);
            let left = shared.progress().unread.clone();
            waited += self.await_heirs(&shared, &self.heirs(left, questions), patience.saturating_sub(waited));
        };
        let heirs = self.heirs(unread, questions);
        let took = (monotonic_micros() - begun).saturating_sub(glance * u64::from(held_up) + waited);
        let progress = shared.progress();
        Answers { held: questions.iter().map(|question| held(&progress, &heirs, question)).collect(), took }
    }

    /// Reads these processes, by as many threads as are held up, and one more. Returns how many are held up.
    fn read_all(&self, shared: &Arc<Shared>, processes: Vec<Listed>) -> u32 {
        let start = |number: u32| {
            let shared = shared.clone();
            let read = move || shared.read(number);
            std::thread::Builder::new().name("reader".into()).stack_size(256 << 10).spawn(read).is_ok()
        };
        let mut progress = shared.progress();
        progress.unread.extend(&processes);
        progress.queue.extend(processes);
        progress.thread += 1;
        progress.ended = false;
        let first = progress.thread;
        let mut goes_on = start(first);
        while goes_on && !progress.ended {
            let before = (progress.queue.len(), progress.unread.len());
            let (guard, is_over) = shared.wait(progress, self.glance);
            progress = guard;
            if is_over && !progress.ended && (progress.queue.len(), progress.unread.len()) == before {
                progress.thread += 1;
                goes_on = start(progress.thread);
            }
        }
        progress.thread - first
    }

    /// Those of the processes that have not been read that can have inherited sockets of the questions' programs, each
    /// with the program. One that has ended counts for none: where processes are made all the time, such as by a
    /// compiler's driver, there is always one of them.
    fn heirs(&self, unread: BTreeSet<Listed>, questions: &[Question]) -> Heirs {
        let programs: BTreeSet<u32> = questions.iter().map(|question| question.program).collect();
        let pairs = unread.into_iter().flat_map(|process| programs.iter().map(move |program| (process, *program)));
        pairs.filter(|((number, _), program)| number != program && (self.may_inherit)(*number, *program)).collect()
    }

    /// Waits a while for those of these processes that are being read, this many microseconds at most. Returns how many
    /// it has waited.
    fn await_heirs(&self, shared: &Shared, heirs: &Heirs, limit: u64) -> u64 {
        let begun = monotonic_micros();
        let mut progress = shared.progress();
        loop {
            let waited = monotonic_micros() - begun;
            if waited >= limit || !heirs.iter().any(|(process, _)| progress.being_read.contains(process)) {
                return waited;
            }
            progress = shared.wait(progress, Duration::from_micros(limit - waited)).0;
        }
    }
}

/// The answer to a question, as far as the search has come, with the heirs that had not been read at the last listing.
fn held(progress: &Progress, heirs: &Heirs, question: &Question) -> Held {
    let other = |process: &u32| !question.except.contains(process);
    let may_hold = |((process, _), program): &(Listed, u32)| *program == question.program && other(process);
    if progress.holders.get(&question.inode).is_some_and(|holders| holders.iter().any(other)) {
        Held::ByAnother
    } else if heirs.iter().any(may_hold) {
        Held::Unknown
    } else {
        Held::Alone
    }
}

/// Whether a process can have inherited a descriptor from a program, or the program from it: the process runs as one of
/// the program's users, belongs to its session, or descends from the program or the program's parent. A process of
/// another user that shares neither the session nor the parent can have got a descriptor only by a message from a
/// process that held it.
fn may_have_inherited(process: u32, program: u32) -> bool {
    // One that has ended holds nothing itself.
    let Some(users) = process::users(process) else { return false };
    let (Some(its), Some(parent)) = (process::users(program), process::parent(program)) else { return true };
    let session = process::session(process);
    if users.iter().any(|user| its.contains(user)) || session.is_some() && session == process::session(program) {
        return true;
    }
    // Everything descends from the first process.
    let family = [program, parent].into_iter().filter(|one| *one > 1).collect::<Vec<_>>();
    let parent = |of: &u32| process::parent(*of).filter(|parent| *parent > 1);
    std::iter::successors(Some(process), parent).take(MOST_ANCESTORS).any(|ancestor| family.contains(&ancestor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::fd::{AsFd, OwnedFd};
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    /// Numbers that no process has.
    const STUCK: u32 = u32::MAX - 11;
    const SLOW: u32 = u32::MAX - 12;
    const HOLDER: u32 = u32::MAX - 13;
    const PROGRAM: u32 = u32::MAX - 14;

    static MAY_END: Mutex<bool> = Mutex::new(false);
    static CHANGED: Condvar = Condvar::new();

    fn wait_for_end() {
        drop(CHANGED.wait_while(MAY_END.lock().expect("no panic"), |may| !*may).expect("no panic"));
    }

    fn sockets_of(process: u32) -> Vec<(i32, u64)> {
        if process == STUCK {
            wait_for_end();
        }
        if process == HOLDER { vec![(3, 7)] } else { vec![(3, process.into())] }
    }

    fn question(inode: u64) -> Question {
        Question { inode, program: PROGRAM, except: vec![PROGRAM] }
    }

    /// A process that blocks its reader does not delay the reading of other processes, in this search or later ones; it
    /// matters only if it may have inherited the socket.
    #[test]
    fn a_process_that_holds_up_its_reader_is_unknown_alone() {
        // Waits: the reader is blocked, and no value ever comes. The other processes have to be read meanwhile.
        let glance = Duration::from_millis(500);
        let heirs = Search {
            list: || vec![(PROGRAM, 1), (STUCK, 1), (HOLDER, 1)],
            sockets_of,
            may_inherit: |process, _| process == STUCK,
            glance,
            patience: Duration::ZERO,
        };
        let strangers = Search { may_inherit: |_, _| false, patience: Duration::from_secs(60), ..heirs };
        for _ in 0..2 {
            let held = |search: &Search| search.run(&[question(7), question(8), question(PROGRAM.into())]).held;
            assert_eq!(held(&strangers), [Held::ByAnother, Held::Alone, Held::Alone]);
            assert_eq!(held(&heirs), [Held::ByAnother, Held::Unknown, Held::Unknown]);
        }
        *MAY_END.lock().expect("no panic") = true;
        CHANGED.notify_all();
    }

    static SLOW_BEGAN: Mutex<bool> = Mutex::new(false);

    /// A finding that comes after another thread has gone on with the next process is used.
    #[test]
    fn what_comes_late_is_used() {
        fn slow(process: u32) -> Vec<(i32, u64)> {
            if process == SLOW {
                // Only the next thread reads the other process.
                while !*SLOW_BEGAN.lock().expect("no panic") {
                    std::thread::yield_now();
                }
                return vec![(3, 9)];
            }
            *SLOW_BEGAN.lock().expect("no panic") = true;
            Vec::new()
        }
        let search = Search {
            list: || vec![(SLOW, 1), (PROGRAM, 1)],
            sockets_of: slow,
            may_inherit: |_, _| true,
            // Waits: the process is late, however long it is waited for.
            glance: Duration::from_millis(1),
            patience: Duration::from_secs(60),
        };
        assert_eq!(search.run(&[question(9)]).held, [Held::ByAnother]);
    }

    /// A search in which no process holds up its reader, or can have inherited anything.
    fn of_ended(list: fn() -> Vec<Listed>, sockets_of: fn(u32) -> Vec<(i32, u64)>) -> Search {
        let (glance, patience) = (Duration::from_secs(60), Duration::ZERO);
        Search { list, sockets_of, may_inherit: |_, _| false, glance, patience }
    }

    /// The first process of a chain of processes, each of which ends when its child has been made.
    const CHAIN: u32 = u32::MAX - 1000;

    /// A process that makes another one and ends before it is read holds nothing, but the last of such a chain does.
    #[test]
    fn the_last_of_a_chain_of_processes_that_end_is_found() {
        const LAST: u32 = CHAIN + MOST_ROUNDS - 1;
        static ALIVE: AtomicU32 = AtomicU32::new(CHAIN);
        fn sockets_of(process: u32) -> Vec<(i32, u64)> {
            if process == LAST {
                return vec![(3, 7)];
            }
            ALIVE.store(process + 1, Relaxed);
            Vec::new()
        }
        let search = of_ended(|| vec![(ALIVE.load(Relaxed), 1)], sockets_of);
        assert_eq!(search.run(&[question(7), question(8)]).held, [Held::ByAnother, Held::Alone]);
    }

    /// While there are new processes each time, one of which the search knows nothing may hold the socket; one that
    /// cannot have inherited it makes no difference.
    #[test]
    fn a_chain_of_processes_without_end_is_unknown_if_they_may_be_heirs() {
        static ALIVE: AtomicU32 = AtomicU32::new(CHAIN + 100);
        let strangers = of_ended(|| vec![(ALIVE.fetch_add(1, Relaxed), 1)], |_| Vec::new());
        let heirs = Search { may_inherit: |_, _| true, ..strangers };
        let held = |search: &Search| search.run(&[question(7)]).held;
        assert_eq!([held(&strangers), held(&heirs)].concat(), [Held::Alone, Held::Unknown]);
    }

    /// A process that has got the number of one that has been read is read, too.
    #[test]
    fn a_later_process_with_the_same_number_is_read() {
        const REUSED: u32 = CHAIN + 200;
        static READ: AtomicU32 = AtomicU32::new(0);
        fn sockets_of(_: u32) -> Vec<(i32, u64)> {
            if READ.fetch_add(1, Relaxed) == 0 { Vec::new() } else { vec![(3, 7)] }
        }
        let search = of_ended(|| vec![(REUSED, u64::from(READ.load(Relaxed).min(1)))], sockets_of);
        assert_eq!(search.run(&[question(7)]).held, [Held::ByAnother]);
        assert_eq!(READ.load(Relaxed), 2, "once each");
    }

    /// A listing tells a process from others, and takes it for the same one the next time: unless the kernel has been
    /// short of memory in between.
    #[test]
    fn a_listing_tells_processes_apart() {
        let ours = |list: &[Listed]| list.iter().find(|(process, _)| *process == std::process::id()).copied();
        let mut listings = (0..100).map(|_| (process::listed(), process::listed()));
        assert!(listings.any(|(first, second)| ours(&first).is_some() && ours(&first) == ours(&second)));
        let list = process::listed();
        let (_, inode) = ours(&list).expect("this process");
        assert_eq!(list.iter().filter(|(_, other)| *other == inode).count(), 1);
    }

    /// A child that has a copy of a socket is found.
    #[test]
    fn a_child_with_a_copy_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let inode = crate::socket::inode(listener.as_fd()).expect("its inode");
        let program = std::process::id();
        let copy: OwnedFd = listener.as_fd().try_clone_to_owned().expect("a copy");
        let mut child = Command::new("sleep").arg("600").stdin(Stdio::from(copy)).spawn().expect("sleep");
        let kin = may_have_inherited(child.id(), program) && may_have_inherited(program, child.id());
        let answers = search(&[Question { inode, program, except: vec![program] }]);
        child.kill().expect("our child");
        child.wait().expect("its end");
        assert_eq!(answers.held, [Held::ByAnother]);
        assert!(kin && !may_have_inherited(STUCK, program), "there is no such process as the last one");
    }
}
