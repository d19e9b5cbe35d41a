//! The interest list against a model of what it works with: sockets that move between a kernel and a NIC, the kernel's
//! own epoll set (Linux, fs/eventpoll.c), and a program whose threads wait and change the set at the same time.
//!
//! Properties: an event is reported only for a registration that is in the set now, at most once in a call, and only
//! with events that were asked for and are true; and whatever is ready is reported in the end. What only the library
//! knows of a socket, as completions of sends, it reports wherever the socket is.

#[path = "../src/interest.rs"]
#[allow(dead_code, unreachable_pub, missing_docs, reason = "the library's own")]
mod interest;

use interest::{Interest, Place, Progress, World};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, c_int, epoll_event};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const ERR: u32 = libc::EPOLLERR as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const ALWAYS: u32 = libc::EPOLLHUP as u32 | libc::EPOLLERR as u32;
const EDGE: u32 = libc::EPOLLET as u32;
const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
const PRIVATE: u32 = EDGE | ONE_SHOT | EXCLUSIVE;

/// Descriptors that the program uses.
const FDS: usize = 5;

#[derive(Clone, Debug)]
struct Socket {
    place: Place,
    moves: u32,
    arrived: u32,
    read: u32,
    full: bool,
    stuck: u32,
    rearms: u32,
    fin: bool,
    /// Sends that the library has completed, and completions that the program has read.
    completed: u32,
    noted: u32,
}

impl Socket {
    fn truth(&self) -> u32 {
        self.of_owner() | self.of_library()
    }

    /// What kernel or NIC know.
    fn of_owner(&self) -> u32 {
        let fin = if self.fin { IN | RDHUP } else { 0 };
        fin | if self.arrived > self.read { IN } else { 0 } | if self.full { 0 } else { OUT }
    }

    /// What the library alone knows.
    fn of_library(&self) -> u32 {
        if self.completed > self.noted { ERR } else { 0 }
    }

    fn state(&self) -> State {
        (self.arrived, 2 * self.stuck + u32::from(self.full), self.fin, self.completed)
    }

    /// What the kernel's socket is ready for: while the NIC has the connection it is an empty shell.
    fn in_kernel(&self) -> u32 {
        match self.place {
            Place::Kernel => self.of_owner(),
            Place::Nic => OUT,
            _ => IN | OUT | HUP | RDHUP,
        }
    }
}

/// A kernel registration, by descriptor and socket.
#[derive(Debug)]
struct Watch {
    mask: u32,
    data: u64,
    listed: bool,
}

type Key = (c_int, usize);

#[derive(Default, Debug)]
struct Model {
    /// All sockets that ever existed.
    sockets: Vec<Socket>,
    /// The socket behind each descriptor.
    open: BTreeMap<c_int, usize>,
    watches: BTreeMap<Key, Watch>,
    ready: VecDeque<Key>,
    /// Sockets to which something has happened on the NIC.
    marks: Vec<usize>,
}

impl Model {
    /// Something has happened to a socket in the kernel: wakes its registrations.
    fn callback(&mut self, socket: usize, events: u32) {
        for (key, watch) in self.watches.iter_mut().filter(|(key, _)| key.1 == socket) {
            if watch.mask & !PRIVATE & events != 0 && !watch.listed {
                watch.listed = true;
                self.ready.push_back(*key);
            }
        }
    }

    fn happened(&mut self, socket: usize, events: u32) {
        match self.sockets[socket].place {
            Place::Kernel => self.callback(socket, events),
            _ => self.marks.push(socket),
        }
    }
}

impl World for Model {
    type File = usize;

    fn place(&mut self, socket: usize) -> (Place, u32) {
        (self.sockets[socket].place, self.sockets[socket].moves)
    }

    fn on_nic(&mut self, socket: usize) -> u32 {
        self.sockets[socket].truth()
    }

    fn beside_kernel(&mut self, socket: usize) -> u32 {
        self.sockets[socket].of_library()
    }

    fn progress(&mut self, socket: usize, _: c_int) -> Progress {
        let socket = &self.sockets[socket];
        Progress { received: socket.arrived, stuck: socket.stuck, rearms: socket.rearms, completions: socket.completed }
    }

    fn may_move(&mut self, _: usize) -> bool {
        true
    }

    fn set_is_ready(&mut self, _: usize) -> bool {
        unreachable!("there are no sets in this set")
    }

    fn report(&mut self, out: &mut [epoll_event]) -> usize {
        let (mut count, mut again) = (0, Vec::new());
        while count < out.len() {
            let Some(key) = self.ready.pop_front() else { break };
            let Some(watch) = self.watches.get_mut(&key) else { continue };
            watch.listed = false;
            let events = self.sockets[key.1].in_kernel() & watch.mask & !PRIVATE;
            if events == 0 {
                continue;
            }
            out[count] = epoll_event { events, u64: watch.data };
            count += 1;
            if watch.mask & ONE_SHOT != 0 {
                watch.mask &= PRIVATE;
            } else if watch.mask & EDGE == 0 {
                watch.listed = true;
                again.push(key);
            }
        }
        self.ready.extend(again);
        count
    }

    fn register(&mut self, operation: c_int, fd: c_int, events: u32, data: u64) -> bool {
        let Some(socket) = self.open.get(&fd).copied() else { return false };
        let key = (fd, socket);
        let exclusive = self.watches.get(&key).map(|watch| watch.mask & EXCLUSIVE != 0);
        match (operation, exclusive) {
            (EPOLL_CTL_ADD, None) => {}
            (EPOLL_CTL_MOD, Some(false)) if events & EXCLUSIVE == 0 => {}
            (EPOLL_CTL_DEL, Some(_)) => {
                self.watches.remove(&key);
                self.ready.retain(|other| *other != key);
                return true;
            }
            _ => return false,
        }
        let listed = self.watches.get(&key).is_some_and(|watch| watch.listed);
        let watch = self.watches.entry(key).or_insert(Watch { mask: 0, data, listed });
        (watch.mask, watch.data) = (events | ALWAYS, data);
        if self.sockets[socket].in_kernel() & watch.mask & !PRIVATE != 0 && !watch.listed {
            watch.listed = true;
            self.ready.push_back(key);
        }
        true
    }
}

/// What the program expects of one of its registrations.
#[derive(Clone, Debug)]
struct Asked {
    socket: usize,
    events: u32,
    fired: bool,
    /// The state at the last report, and the state when the kernel made that report (earlier, if a thread was asleep).
    /// What the library alone knows may be reported by itself: then the rest is as at the report before.
    seen: Option<(State, State)>,
    /// What was reported of the latter state.
    noted: u32,
}

/// Bytes that have arrived, how often there was no room and there was again, whether the stream has ended, and sends
/// that were completed.
type State = (u32, u32, bool, u32);

#[derive(Clone, Copy, Debug)]
enum Step {
    Add(usize, u32),
    Modify(usize, u32),
    Delete(usize),
    /// Closes a descriptor, whose number goes to a new socket.
    Replace(usize),
    Arrive(usize),
    Read(usize),
    Fill(usize, bool),
    Fin(usize),
    Complete(usize),
    Note(usize),
    BeginMove(usize),
    EndMove(usize, bool),
    Wait(usize),
    /// A thread is woken in the kernel with this many events, and continues with them in `Wake`.
    Sleep(usize),
    Wake,
}

struct Program {
    model: Model,
    interest: Interest<usize>,
    /// By the data that it gave: a new number at each call of epoll_ctl.
    asked: BTreeMap<u64, Asked>,
    /// The data of what is in the set, by descriptor.
    current: BTreeMap<c_int, u64>,
    next: u64,
    asleep: Vec<epoll_event>,
    /// What every socket was ready for when the kernel woke the thread that is asleep: another thread may have read
    /// meanwhile.
    then: Vec<(u32, State)>,
}

impl Program {
    fn new() -> Program {
        let mut program = Program {
            model: Model::default(),
            interest: Interest::default(),
            asked: BTreeMap::new(),
            current: BTreeMap::new(),
            next: 0,
            asleep: Vec::new(),
            then: Vec::new(),
        };
        (0..FDS).for_each(|fd| program.open(fd));
        program
    }

    fn open(&mut self, fd: usize) {
        self.model.sockets.push(Socket {
            place: Place::Kernel,
            moves: 0,
            arrived: 0,
            read: 0,
            full: false,
            stuck: 0,
            rearms: 0,
            fin: false,
            completed: 0,
            noted: 0,
        });
        self.model.open.insert(fd as c_int, self.model.sockets.len() - 1);
    }

    fn socket(&self, fd: usize) -> usize {
        self.model.open[&(fd as c_int)]
    }

    fn set(&mut self, operation: c_int, fd: usize, events: u32) {
        let (socket, data) = (self.socket(fd), self.next);
        self.next += 1;
        let known = self.current.get(&(fd as c_int)).copied();
        let done = self.interest.set(&mut self.model, operation, fd as c_int, socket, (events, data)).is_some();
        let was_exclusive = known.is_some_and(|data| self.asked[&data].events & EXCLUSIVE != 0);
        let possible = match operation {
            EPOLL_CTL_ADD => known.is_none(),
            _ => known.is_some() && !was_exclusive && events & EXCLUSIVE == 0,
        };
        assert_eq!(done, possible, "the kernel's answer to epoll_ctl");
        if done {
            self.current.insert(fd as c_int, data);
            self.asked.insert(data, Asked { socket, events, fired: false, seen: None, noted: 0 });
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Add(fd, events) => self.set(EPOLL_CTL_ADD, fd, events),
            Step::Modify(fd, events) => self.set(EPOLL_CTL_MOD, fd, events),
            Step::Delete(fd) => {
                let socket = self.socket(fd);
                let (done, _) = self.interest.delete(&mut self.model, fd as c_int, socket);
                assert_eq!(done, self.current.remove(&(fd as c_int)).is_some());
            }
            Step::Replace(fd) => {
                let socket = self.socket(fd);
                if let Some(slot) = self.interest.find(fd as c_int, socket) {
                    self.interest.forget(&mut self.model, slot, socket);
                }
                self.current.remove(&(fd as c_int));
                self.open(fd);
            }
            Step::Arrive(fd) => {
                let socket = self.socket(fd);
                if !self.model.sockets[socket].fin {
                    self.model.sockets[socket].arrived += 1;
                    self.model.happened(socket, IN);
                }
            }
            Step::Read(fd) => {
                let socket = self.socket(fd);
                self.model.sockets[socket].read = self.model.sockets[socket].arrived;
            }
            Step::Fill(fd, full) => {
                let socket = self.socket(fd);
                let known = &mut self.model.sockets[socket];
                known.stuck += u32::from(full && !known.full);
                let emptied = known.full && !full;
                known.full = full;
                if emptied {
                    self.model.happened(socket, OUT);
                }
            }
            Step::Fin(fd) => {
                let socket = self.socket(fd);
                if !std::mem::replace(&mut self.model.sockets[socket].fin, true) {
                    self.model.happened(socket, IN | RDHUP);
                }
            }
            Step::Complete(fd) => {
                let socket = self.socket(fd);
                self.model.sockets[socket].completed += 1;
                // Wherever it is.
                self.model.marks.push(socket);
            }
            Step::Note(fd) => {
                let socket = self.socket(fd);
                self.model.sockets[socket].noted = self.model.sockets[socket].completed;
            }
            Step::BeginMove(fd) => {
                let socket = self.socket(fd);
                if self.model.sockets[socket].place != Place::Moving {
                    self.model.sockets[socket].place = Place::Moving;
                    self.model.callback(socket, IN | OUT | HUP);
                }
            }
            Step::EndMove(fd, to_nic) => {
                let socket = self.socket(fd);
                self.end_move(socket, to_nic);
            }
            Step::Wait(most) => drop(self.wait(most)),
            Step::Sleep(most) => {
                if self.asleep.is_empty() {
                    let mut out = vec![epoll_event { events: 0, u64: 0 }; most];
                    let count = self.model.report(&mut out);
                    out.truncate(count);
                    self.asleep = out;
                    self.then = self.model.sockets.iter().map(|socket| (socket.truth(), socket.state())).collect();
                }
            }
            Step::Wake => {
                let mut out = std::mem::take(&mut self.asleep);
                let got = out.len();
                let count = self.interest.take_in(&mut self.model, &mut out, got, |_| false);
                self.check(&out[..count]);
                self.then.clear();
            }
        }
    }

    fn end_move(&mut self, socket: usize, to_nic: bool) {
        if self.model.sockets[socket].place == Place::Moving {
            self.model.sockets[socket].moves += 1;
            self.model.sockets[socket].place = if to_nic { Place::Nic } else { Place::Kernel };
            self.model.callback(socket, IN | OUT | HUP);
            self.model.marks.push(socket);
        }
    }

    /// epoll_wait without waiting. Returns the data of what it reported.
    fn wait(&mut self, most: usize) -> Vec<u64> {
        for socket in std::mem::take(&mut self.model.marks) {
            let slots: Vec<u32> = self.interest.files().filter(|(_, file)| *file == socket).map(|(slot, _)| slot).collect();
            for slot in slots {
                self.interest.settle(&mut self.model, slot);
                self.interest.enqueue(slot);
            }
        }
        let mut out = vec![epoll_event { events: 0, u64: 0 }; most];
        let then = std::mem::take(&mut self.then);
        let mut count = self.interest.gather(&mut self.model, &mut out, |_| false);
        if count == 0 {
            let got = self.model.report(&mut out);
            count = self.interest.take_in(&mut self.model, &mut out, got, |_| false);
        }
        out.truncate(count);
        self.check(&out);
        self.then = then;
        out.iter().map(|event| event.u64).collect()
    }

    fn check(&mut self, reported: &[epoll_event]) {
        for (at, event) in reported.iter().enumerate() {
            let (data, events) = (event.u64, event.events);
            assert!(reported[..at].iter().all(|other| { other.u64 } != data), "twice in one call");
            assert!(self.current.values().any(|known| *known == data), "{data}: not in the set");
            let asked = self.asked.get_mut(&data).expect("the program's data");
            let socket = &self.model.sockets[asked.socket];
            assert_ne!(events, 0);
            assert_eq!(events & !(asked.events | ALWAYS), 0, "not asked for");
            let then = self.then.get(asked.socket).copied().unwrap_or((0, socket.state()));
            assert_eq!(events & !(socket.truth() | then.0), 0, "not true");
            assert!(!asked.fired, "one shot, fired twice");
            asked.fired = asked.events & ONE_SHOT != 0;
            if asked.events & EDGE != 0 {
                let now = socket.state();
                let changed = asked.seen.is_none_or(|seen| seen.1 != now);
                let is_new = changed || events & !asked.noted != 0;
                assert!(is_new || !self.then.is_empty(), "an edge without a change");
                let before = asked.seen.map_or((0, 0, false, 0), |seen| seen.0);
                let owners = if events & !ERR != 0 { now } else { before };
                let librarys = if events & ERR != 0 { now } else { before };
                asked.noted = if changed { events } else { asked.noted | events };
                asked.seen = Some(((owners.0, owners.1, owners.2, librarys.3), then.1));
            }
        }
    }

    /// Data of registrations that must be reported before the program can wait.
    fn missing(&self) -> Vec<u64> {
        let is_missing = |data: &&u64| {
            let asked = &self.asked[*data];
            let socket = &self.model.sockets[asked.socket];
            let new = match asked.seen {
                _ if asked.events & EDGE == 0 => true,
                None => true,
                // What has arrived or was completed since must be reported if it is still unread.
                Some(((arrived, .., completed), _)) => {
                    let arrives = asked.events & IN != 0 && socket.arrived > arrived && socket.arrived > socket.read;
                    arrives || socket.completed > completed && socket.of_library() != 0
                }
            };
            !asked.fired && new && socket.truth() & (asked.events | ALWAYS) != 0
        };
        self.current.values().filter(is_missing).copied().collect()
    }

    /// Ends all moves; everything that is ready must be reported, and no thread may wait for ever.
    fn end(&mut self, most: usize) {
        for socket in 0..self.model.sockets.len() {
            self.end_move(socket, false);
        }
        self.step(Step::Wake);
        let mut missing = self.missing();
        // Each call may report nothing but level-triggered events; each side rotates.
        for _ in 0..4 * FDS + 4 {
            let reported = self.wait(most);
            missing.retain(|data| !reported.contains(data));
        }
        assert!(missing.is_empty(), "never reported: {missing:?} {:?}", (&self.asked, &self.current, &self.model));
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let events = prop_oneof![Just(IN), Just(OUT), Just(IN | OUT), Just(IN | OUT | RDHUP)];
    let how = prop_oneof![5 => Just(0), 2 => Just(EDGE), 2 => Just(ONE_SHOT), 1 => Just(EDGE | ONE_SHOT), 1 => Just(EXCLUSIVE)];
    let asked = (events, how).prop_map(|(events, how)| if how == EXCLUSIVE { events & (IN | OUT) | how } else { events | how });
    let fd = || 0..FDS;
    let step = prop_oneof![
        3 => (fd(), asked.clone()).prop_map(|(fd, events)| Step::Add(fd, events)),
        3 => (fd(), asked).prop_map(|(fd, events)| Step::Modify(fd, events)),
        2 => fd().prop_map(Step::Delete),
        1 => fd().prop_map(Step::Replace),
        4 => fd().prop_map(Step::Arrive),
        3 => fd().prop_map(Step::Read),
        2 => (fd(), any::<bool>()).prop_map(|(fd, full)| Step::Fill(fd, full)),
        1 => fd().prop_map(Step::Fin),
        3 => fd().prop_map(Step::Complete),
        2 => fd().prop_map(Step::Note),
        3 => fd().prop_map(Step::BeginMove),
        5 => (fd(), any::<bool>()).prop_map(|(fd, to_nic)| Step::EndMove(fd, to_nic)),
        6 => (1..4usize).prop_map(Step::Wait),
        2 => (1..4usize).prop_map(Step::Sleep),
        2 => Just(Step::Wake),
    ];
    prop::collection::vec(step, 1..120)
}

/// What one call reports: data and events.
fn reported(model: &mut Model, interest: &mut Interest<usize>) -> Vec<(u64, u32)> {
    let mut out = [epoll_event { events: 0, u64: 0 }; 4];
    let got = model.report(&mut out);
    let count = interest.take_in(model, &mut out, got, |_| false);
    out[..count].iter().map(|event| (event.u64, event.events)).collect()
}

/// A listener, and beside it the queue of what the NIC makes for it, are one registration: both together are one event,
/// after which both are silent if it is for one event only. The end of the queue is no event, and goes to the caller.
#[test]
fn what_is_watched_beside_a_file_counts_as_the_file() {
    const DATA: u64 = 7;
    let (fd, queues_fd) = (0, 1);
    for how in [0, ONE_SHOT] {
        let mut program = Program::new();
        let (listener, queue) = (program.socket(0), program.socket(1));
        let Program { model, interest, .. } = &mut program;
        let slot = interest.set(model, EPOLL_CTL_ADD, fd, listener, (IN | OUT | how, DATA)).expect("a slot");
        interest.watch_beside(model, slot, listener, queues_fd);
        assert_eq!(model.watches[&(queues_fd, queue)].mask, IN | how | ALWAYS, "room in the queue is no event");
        assert_eq!(reported(model, interest), [(DATA, OUT)]);
        interest.set(model, EPOLL_CTL_MOD, fd, listener, (IN | how, DATA)).expect("a slot");
        assert!(reported(model, interest).is_empty());
        let arrive = |model: &mut Model, socket: usize| {
            model.sockets[socket].arrived += 1;
            model.happened(socket, IN);
        };
        arrive(model, queue);
        assert_eq!(reported(model, interest), [(DATA, IN)]);
        arrive(model, listener);
        arrive(model, queue);
        let both: &[(u64, u32)] = if how == 0 { &[(DATA, IN)] } else { &[] };
        assert_eq!(reported(model, interest), both);
        interest.set(model, EPOLL_CTL_MOD, fd, listener, (IN | how, DATA + 1)).expect("a slot");
        assert_eq!(reported(model, interest), [(DATA + 1, IN)]);
        model.sockets[listener].read = model.sockets[listener].arrived;
        interest.set(model, EPOLL_CTL_MOD, fd, listener, (IN | how, DATA)).expect("a slot");
        // It hangs up.
        model.sockets[queue].place = Place::Moving;
        model.callback(queue, HUP);
        assert!(reported(model, interest).is_empty());
        assert_eq!(std::mem::take(&mut interest.ended), [listener]);
        interest.stop_watching_beside(model, queues_fd);
        assert!(reported(model, interest).is_empty() && interest.ended.is_empty());
        assert_eq!(model.watches.len(), 1);
    }
}

/// What is watched beside a file goes with the file's registration, or becomes one of the program's own.
#[test]
fn what_is_watched_beside_a_file_goes_with_it() {
    const DATA: u64 = 7;
    for is_released in [false, true] {
        let mut program = Program::new();
        let listener = program.socket(0);
        let Program { model, interest, .. } = &mut program;
        let slot = interest.set(model, EPOLL_CTL_ADD, 0, listener, (IN, DATA)).expect("a slot");
        interest.watch_beside(model, slot, listener, 1);
        if is_released {
            interest.release_all(model);
            assert_eq!(model.watches.values().map(|watch| watch.data).collect::<Vec<_>>(), [DATA, DATA]);
        } else {
            assert_eq!(interest.delete(model, 0, listener), (true, Some(slot)));
            assert!(model.watches.is_empty());
        }
    }
}

/// A socket whose connection could not be opened, or has ended, gets another one: what was reported of the earlier one
/// keeps back nothing that happens to this one.
#[test]
fn another_connection_of_a_socket_reports_all_anew() {
    const DATA: u64 = 7;
    let mut program = Program::new();
    let socket = program.socket(0);
    let Program { model, interest, .. } = &mut program;
    model.sockets[socket].place = Place::Nic;
    model.sockets[socket].fin = true;
    let slot = interest.set(model, EPOLL_CTL_ADD, 0, socket, (IN | OUT | RDHUP | EDGE, DATA)).expect("a slot");
    let mut after = |change: fn(&mut Socket)| {
        change(&mut model.sockets[socket]);
        interest.enqueue(slot);
        reported(model, interest)
    };
    assert_eq!(after(|_| {}), [(DATA, IN | OUT | RDHUP)]);
    assert!(after(|_| {}).is_empty());
    let begins = |socket: &mut Socket| (socket.rearms, socket.fin, socket.full) = (socket.rearms + 1, false, true);
    assert!(after(begins).is_empty());
    assert_eq!(after(|socket| socket.full = false), [(DATA, OUT)]);
    assert!(after(|_| {}).is_empty());
    assert_eq!(after(|socket| socket.fin = true), [(DATA, IN | OUT | RDHUP)]);
    assert!(after(|_| {}).is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: std::env::var("BATON_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(2_000),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn what_is_reported_is_in_the_set_once_and_true(steps in steps(), most in 1..4usize) {
        let mut program = Program::new();
        for step in steps {
            program.step(step);
        }
        program.end(most);
    }
}
