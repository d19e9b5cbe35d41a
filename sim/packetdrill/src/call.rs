//! Calls from packetdrill's two threads in virtual time.
//!
//! packetdrill runs scripts on its main thread, and each call that may block on a second one. Time only moves by the
//! main thread, which sleeps, waits for packets or asks for the time. After everything that happens it lets waiting
//! calls look whether they can end, and waits for their answer, so that a call ends at a certain moment of virtual time
//! and not when its thread is scheduled.

use crate::errors::{Answer, Attempt};
use crate::settings::Flags;
use crate::world::World;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// The world and the turns that threads take on it.
pub struct Adapter {
    turn: Mutex<Turn>,
    changed: Condvar,
    main: ThreadId,
}

/// What the lock protects.
pub struct Turn {
    /// The world.
    pub world: World,
    /// Calls that wait.
    waiting: usize,
    /// How often they were asked to look, and how many have not answered yet.
    asked: u64,
    unanswered: usize,
    /// Number of the next call that waits.
    calls: u64,
    /// When a thread's blocking call ended, until that thread asks for the time.
    ended: BTreeMap<u64, u64>,
    /// Threads whose blocking call has ended since the last sleep.
    returning: Vec<u64>,
}

/// A number for the calling thread.
fn thread_number() -> u64 {
    // SAFETY: gettid has no arguments and cannot fail.
    unsafe { libc::gettid() as u64 }
}

impl Adapter {
    /// A new world; the calling thread is the one that moves its time.
    pub fn new(flags: Flags) -> Adapter {
        let turn = Turn {
            world: World::new(flags),
            waiting: 0,
            asked: 0,
            unanswered: 0,
            calls: 0,
            ended: BTreeMap::new(),
            returning: Vec::new(),
        };
        Adapter { turn: Mutex::new(turn), changed: Condvar::new(), main: thread::current().id() }
    }

    /// The world, for as long as nobody else has it.
    pub fn lock(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call that never waits.
    pub fn now<T>(&self, act: impl FnOnce(&mut World) -> T) -> T {
        let mut turn = self.lock();
        turn.world.begin_event();
        let result = act(&mut turn.world);
        drop(self.settle(turn));
        result
    }

    /// A call that may have to wait: `attempt` is made until it is over.
    pub fn call<T>(&self, mut attempt: impl FnMut(&mut World) -> Attempt<T>) -> Answer<T> {
        let mut turn = self.lock();
        turn.world.begin_event();
        let own = thread::current().id() == self.main;
        let mut registered = None;
        loop {
            match attempt(&mut turn.world) {
                Attempt::Done(answer) => {
                    if let Some(number) = registered {
                        self.finish(&mut turn, number);
                        turn.world.settle();
                        return answer;
                    }
                    drop(self.settle(turn));
                    return answer;
                }
                Attempt::Blocked(deadline) if own => {
                    turn.world.settle();
                    let next = turn.world.next_timer().into_iter().chain(deadline).min();
                    // Nothing will ever happen again.
                    let Some(next) = next else { return Err(libc::EDEADLK) };
                    turn = self.advance(turn, next);
                }
                Attempt::Blocked(deadline) => {
                    turn.world.settle();
                    turn = self.wait(turn, &mut registered, deadline);
                }
            }
        }
    }

    fn wait<'a>(
        &'a self,
        mut turn: MutexGuard<'a, Turn>,
        registered: &mut Option<u64>,
        deadline: Option<u64>,
    ) -> MutexGuard<'a, Turn> {
        match *registered {
            Some(_) => self.answer(&mut turn),
            None => {
                turn.calls += 1;
                turn.waiting += 1;
                *registered = Some(turn.calls);
            }
        }
        if let (Some(number), Some(deadline)) = (*registered, deadline) {
            turn.world.deadlines.insert(number, deadline);
        }
        let asked = turn.asked;
        while turn.asked == asked {
            turn = self.changed.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        turn
    }

    fn answer(&self, turn: &mut Turn) {
        turn.unanswered = turn.unanswered.saturating_sub(1);
        self.changed.notify_all();
    }

    fn finish(&self, turn: &mut Turn, number: u64) {
        turn.waiting -= 1;
        turn.world.deadlines.remove(&number);
        let now = turn.world.now;
        turn.ended.insert(thread_number(), now);
        turn.returning.push(thread_number());
        self.answer(turn);
    }

    /// Sends what there is to send and lets waiting calls look.
    fn settle<'a>(&'a self, mut turn: MutexGuard<'a, Turn>) -> MutexGuard<'a, Turn> {
        turn.world.settle();
        if turn.waiting > 0 {
            turn.asked += 1;
            turn.unanswered = turn.waiting;
            self.changed.notify_all();
            while turn.unanswered > 0 {
                turn = self.changed.wait(turn).unwrap_or_else(PoisonError::into_inner);
            }
            turn.world.settle();
        }
        turn
    }

    /// Moves the time to `to`, and runs what is due on the way.
    fn advance<'a>(&'a self, mut turn: MutexGuard<'a, Turn>, to: u64) -> MutexGuard<'a, Turn> {
        while let Some(next) = turn.world.next_timer().filter(|next| *next <= to) {
            turn.world.now = turn.world.now.max(next);
            turn.world.expire_deadlines();
            turn.world.run_timers();
            turn = self.settle(turn);
        }
        turn.world.now = turn.world.now.max(to);
        turn
    }

    /// Sleeps for `micros`. A thread whose blocking call has ended gets home first: packetdrill's own bookkeeping of it
    /// would otherwise come at some later virtual time.
    pub fn sleep(&self, micros: u64) {
        let threads: Vec<u64> = std::mem::take(&mut self.lock().returning);
        for thread in threads {
            self.let_home(thread);
        }
        let turn = self.lock();
        let to = turn.world.now + micros;
        drop(self.advance(turn, to));
    }

    /// Waits until a thread has asked when its call ended and sleeps again, which packetdrill itself watches for in the
    /// same way. Bounded, should it never.
    fn let_home(&self, thread: u64) {
        let asleep = || {
            let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
            stat.rsplit(')').next().is_none_or(|rest| rest.trim_start().starts_with('S'))
        };
        for _ in 0..10_000 {
            if !self.lock().ended.contains_key(&thread) && asleep() {
                return;
            }
            thread::yield_now();
        }
    }

    /// The time in microseconds. It moves by one with each question, since packetdrill spins until its moment has come.
    /// A thread whose blocking call has ended is given the time of that first.
    pub fn time(&self) -> u64 {
        let mut turn = self.lock();
        if let Some(ended) = turn.ended.remove(&thread_number()) {
            return ended;
        }
        let to = turn.world.now + 1;
        self.advance(turn, to).world.now
    }

    /// The next packet that leaves, however long that takes. None if none will.
    pub fn next_packet(&self) -> Option<(u64, Vec<u8>)> {
        let mut turn = self.settle(self.lock());
        loop {
            if let Some(sent) = turn.world.sent.pop_front() {
                return Some(sent);
            }
            let next = turn.world.next_timer()?;
            turn = self.advance(turn, next);
        }
    }
}
