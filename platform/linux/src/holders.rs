//! Whether processes other than its program hold a socket, as far as /proc shows their descriptors to this process.
//!
//! A process can hold up whoever reads the links of its descriptors (see [`crate::reading::apart`]). So a thread reads
//! one process after another; if it does not get on, another thread goes on with the next process, and what the first
//! one finds is used if it comes in time. A process that is not read at all makes a difference only for the sockets
//! that it can have inherited.

use crate::events::monotonic_micros;
use crate::process;
use crate::reading::Reading;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time that one process is waited for before another thread goes on with the next.
const GLANCE: Duration = Duration::from_millis(50);

/// Time that processes are waited for at the end which are still being read and may have inherited one of the sockets.
/// Even one with some hundred thousand descriptors has been read by then.
const PATIENCE: Duration = Duration::from_millis(250);

/// Most ancestors of a process that are looked at.
const MOST_ANCESTORS: usize = 1000;

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

/// Who holds a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Held {
    /// Only those who may.
    Alone,
    /// Another process, too.
    ByAnother,
    /// A process that may have inherited it does not let anybody look.
    Unknown,
}

/// What a search has found.
#[derive(Debug)]
pub struct Answers {
    /// Of each question, in order.
    pub held: Vec<Held>,
    /// Microseconds of work: without the time for which processes were waited for.
    pub took: u64,
}

/// Searches all processes. Takes as long as there are many, and waits for those that hold it up: not for a loop that
/// others wait for.
pub fn search(questions: &[Question]) -> Answers {
    let search = Search { sockets_of: process::sockets_of, may_inherit: may_have_inherited, glance: GLANCE, patience: PATIENCE };
    search.run(process::all(), questions)
}

/// How processes are searched.
struct Search {
    sockets_of: fn(u32) -> Vec<(i32, u64)>,
    /// Whether the first process can have inherited a socket of the second one.
    may_inherit: fn(u32, u32) -> bool,
    glance: Duration,
    patience: Duration,
}

/// Processes, each with a program of which it can have inherited a socket.
type Heirs = BTreeSet<(u32, u32)>;

/// What the threads of a search share.
struct Shared {
    sockets_of: fn(u32) -> Vec<(i32, u64)>,
    inodes: BTreeSet<u64>,
    progress: Mutex<Progress>,
    changed: Condvar,
}

struct Progress {
    queue: VecDeque<u32>,
    /// Processes that have not been read, and those of them that a thread of this search reads now.
    unread: BTreeSet<u32>,
    being_read: BTreeSet<u32>,
    /// The processes that hold one of the inodes.
    holders: BTreeMap<u64, Vec<u32>>,
    /// Number of the thread that takes from the queue. Earlier ones end with the process that they read.
    thread: u32,
    /// The queue has been read.
    ended: bool,
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for this time, or until something has changed.
    fn wait<'a>(&self, progress: MutexGuard<'a, Progress>, limit: Duration) -> MutexGuard<'a, Progress> {
        self.changed.wait_timeout(progress, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Reads the processes of the queue, until another thread does.
    fn read(&self, thread: u32) {
        while let Some(process) = self.next(thread) {
            // Without it an earlier reading of this process has not come to its end, or too many have not.
            let Some(reading) = Reading::begin(process) else { continue };
            self.progress().being_read.insert(process);
            let sockets = (self.sockets_of)(process);
            drop(reading);
            let mut progress = self.progress();
            progress.unread.remove(&process);
            progress.being_read.remove(&process);
            for (_, inode) in sockets.into_iter().filter(|(_, inode)| self.inodes.contains(inode)) {
                progress.holders.entry(inode).or_default().push(process);
            }
        }
        self.changed.notify_all();
    }

    fn next(&self, thread: u32) -> Option<u32> {
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
    fn run(&self, processes: Vec<u32>, questions: &[Question]) -> Answers {
        let begun = monotonic_micros();
        let shared = Arc::new(Shared {
            sockets_of: self.sockets_of,
            inodes: questions.iter().map(|question| question.inode).collect(),
            progress: Mutex::new(Progress {
                unread: processes.iter().copied().collect(),
                being_read: BTreeSet::new(),
                queue: processes.into(),
                holders: BTreeMap::new(),
                thread: 0,
                ended: false,
            }),
            changed: Condvar::new(),
        });
        let held_up = self.read_all(&shared);
        let heirs = self.heirs(&shared, questions);
        let glances = self.glance.as_micros() as u64 * u64::from(held_up);
        let took = (monotonic_micros() - begun).saturating_sub(glances);
        self.await_heirs(&shared, &heirs);
        let progress = shared.progress();
        Answers { held: questions.iter().map(|question| held(&progress, &heirs, question)).collect(), took }
    }

    /// Reads the queue, by as many threads as are held up, and one more. Returns how many are held up.
    fn read_all(&self, shared: &Arc<Shared>) -> u32 {
        let start = |number: u32| {
            let shared = shared.clone();
            let read = move || shared.read(number);
            std::thread::Builder::new().name("reader".into()).stack_size(256 << 10).spawn(read).is_ok()
        };
        let mut goes_on = start(0);
        let mut progress = shared.progress();
        while goes_on && !progress.ended {
            let before = (progress.queue.len(), progress.unread.len());
            progress = shared.wait(progress, self.glance);
            if !progress.ended && (progress.queue.len(), progress.unread.len()) == before {
                progress.thread += 1;
                goes_on = start(progress.thread);
            }
        }
        progress.thread
    }

    /// The processes that have not been read, each with the programs whose sockets it can have inherited.
    fn heirs(&self, shared: &Shared, questions: &[Question]) -> Heirs {
        let unread = shared.progress().unread.clone();
        let programs: BTreeSet<u32> = questions.iter().map(|question| question.program).collect();
        let pairs = unread.into_iter().flat_map(|process| programs.iter().map(move |program| (process, *program)));
        pairs.filter(|(process, program)| process != program && (self.may_inherit)(*process, *program)).collect()
    }

    /// Waits a while for those of these processes that are being read.
    fn await_heirs(&self, shared: &Shared, heirs: &Heirs) {
        let until = monotonic_micros() + self.patience.as_micros() as u64;
        let mut progress = shared.progress();
        loop {
            let left = until.saturating_sub(monotonic_micros());
            if left == 0 || !heirs.iter().any(|(process, _)| progress.being_read.contains(process)) {
                return;
            }
            progress = shared.wait(progress, Duration::from_micros(left));
        }
    }
}

/// The answer to a question, as far as the search has come.
fn held(progress: &Progress, heirs: &Heirs, question: &Question) -> Held {
    let other = |process: &u32| !question.except.contains(process);
    let may_hold = |process: &u32| other(process) && heirs.contains(&(*process, question.program));
    if progress.holders.get(&question.inode).is_some_and(|holders| holders.iter().any(other)) {
        Held::ByAnother
    } else if progress.unread.iter().any(may_hold) {
        Held::Unknown
    } else {
        Held::Alone
    }
}

/// Whether a process can have inherited a descriptor of a program's, or the program one of its: it runs as one of the
/// program's users, belongs to its session, or descends from the program or the program's parent. Another user's
/// process that neither shares the session nor the parent cannot have got a descriptor without a holder's passing it on
/// by a message.
fn may_have_inherited(process: u32, program: u32) -> bool {
    // One that has ended holds nothing.
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

    /// A process that holds up its reader holds up no other one, and makes a difference only if it may have inherited
    /// the socket; that does not keep later searches from reading the others.
    #[test]
    fn a_process_that_holds_up_its_reader_is_unknown_alone() {
        // Waits: for what never comes, once. The other processes are to be read meanwhile.
        let glance = Duration::from_millis(500);
        let heirs = Search { sockets_of, may_inherit: |process, _| process == STUCK, glance, patience: Duration::ZERO };
        let strangers = Search { sockets_of, may_inherit: |_, _| false, glance, patience: Duration::from_secs(60) };
        for _ in 0..2 {
            let processes = || vec![PROGRAM, STUCK, HOLDER];
            let held = |search: &Search| search.run(processes(), &[question(7), question(8), question(PROGRAM.into())]).held;
            assert_eq!(held(&strangers), [Held::ByAnother, Held::Alone, Held::Alone]);
            assert_eq!(held(&heirs), [Held::ByAnother, Held::Unknown, Held::Unknown]);
        }
        *MAY_END.lock().expect("no panic") = true;
        CHANGED.notify_all();
    }

    static SLOW_BEGAN: Mutex<bool> = Mutex::new(false);

    /// What comes after another thread has gone on is used.
    #[test]
    fn what_comes_late_is_used() {
        fn slow(process: u32) -> Vec<(i32, u64)> {
            if process == SLOW {
                // The other one is read by the next thread only.
                while !*SLOW_BEGAN.lock().expect("no panic") {
                    std::thread::yield_now();
                }
                return vec![(3, 9)];
            }
            *SLOW_BEGAN.lock().expect("no panic") = true;
            Vec::new()
        }
        let search = Search {
            sockets_of: slow,
            may_inherit: |_, _| true,
            // Waits: the process is late, however long it is waited for.
            glance: Duration::from_millis(1),
            patience: Duration::from_secs(60),
        };
        assert_eq!(search.run(vec![SLOW, PROGRAM], &[question(9)]).held, [Held::ByAnother]);
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
