//! Whether other processes hold the sockets of programs that have forked, or started others. A connection whose socket
//! another process holds stays in the kernel, which alone serves both.
//!
//! Threads search all of /proc, which takes long on a host with many processes, and longer if one of them holds that
//! up. Moves that need to know it wait here meanwhile, at rest in the kernel: their programs go on. One search serves
//! all that wait when it begins.

use crate::agent::Agent;
use crate::calls::Completion;
use crate::connection::Asker;
use crate::ground::Ground;
use crate::moves::{MANY_WAITING, named};
use baton_core::Key;
use baton_linux::events::monotonic_micros;
use baton_linux::holders::{self, Answers, Held, Question};
use baton_linux::socket;
use baton_log::warning;
use baton_moves::Refusal;
use baton_protocol::program::Reply;
use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

/// Limit of requests that wait for the search for one connection's socket. A program can ask without end.
const MOST: usize = 64;

/// Searches take one part in this many of the time at most: any user may have many processes.
const PART: u64 = 10;

/// Shortest time between two searches, in microseconds.
const PAUSE: u64 = 1_000;

/// Time for which an answer is used, in microseconds. It is forgotten earlier when the program forks.
const FRESH: u64 = 5_000_000;

/// Time after which a search is begun again for which no thread could be started, in microseconds.
const AGAIN: u64 = 100_000;

/// Connections whose sockets are searched for, each with the requests to answer then; none for a move that nobody has
/// asked for.
type Waiting = BTreeMap<Key, Vec<Asker>>;

/// Searches for holders of sockets.
#[derive(Default)]
pub(crate) struct Searches {
    /// Those that wait for the next search.
    waiting: Waiting,
    /// Those that the search serves which is under way, if one is.
    under_way: Option<Waiting>,
    /// What has been found, and when.
    found: BTreeMap<Key, (Held, u64)>,
    /// Time before which no search begins, in microseconds of the monotonic clock.
    next: u64,
}

impl Searches {
    /// Takes what has been found of a connection's socket.
    fn take(&mut self, key: Key, now: u64) -> Option<Held> {
        let (held, since) = self.found.remove(&key)?;
        (now.saturating_sub(since) < FRESH).then_some(held)
    }

    /// What holds up a connection's move, if that waits here.
    pub fn trouble(&self, key: Key) -> Option<&'static str> {
        let waits = self.waiting.contains_key(&key) || self.under_way.as_ref().is_some_and(|these| these.contains_key(&key));
        waits.then_some("it is being found out whether another process holds its socket")
    }

    /// Time until a search begins.
    pub fn wait(&self) -> Option<Duration> {
        let waits = self.under_way.is_none() && !self.waiting.is_empty();
        waits.then(|| Duration::from_micros(self.next.saturating_sub(monotonic_micros())))
    }

    /// Takes those that a search serves which begins now. None if there are none, one is under way, or it is too early.
    fn begin(&mut self, now: u64) -> Option<&Waiting> {
        if self.under_way.is_some() || self.waiting.is_empty() || now < self.next {
            return None;
        }
        Some(self.under_way.insert(std::mem::take(&mut self.waiting)))
    }

    /// Notes that the search has ended which took this many microseconds, and returns those that it serves.
    fn end(&mut self, took: u64, now: u64) -> Waiting {
        self.next = now + ((PART - 1) * took).max(PAUSE);
        self.found.retain(|_, (_, since)| now.saturating_sub(*since) < FRESH);
        self.under_way.take().unwrap_or_default()
    }
}

impl Ground<'_> {
    /// Its program has forked since: what has been found of a connection's socket does not count.
    pub fn forget_found(&mut self, key: Key) {
        self.searches.found.remove(&key);
    }

    /// Checks that no process other than its program and Baton's own holds a connection's socket.
    ///
    /// # Errors
    /// [`Refusal::Shared`]; [`Refusal::Unsearched`] if it cannot be found out now; [`Refusal::Searching`] if it has to
    /// be, for which the move is to wait ([`Agent::move_when_searched`]).
    pub fn held_alone(&mut self, key: Key) -> Result<(), Refusal> {
        match self.searches.take(key, monotonic_micros()) {
            Some(Held::Alone) => Ok(()),
            Some(Held::ByAnother) => Err(Refusal::Shared),
            Some(Held::Unknown) => Err(Refusal::Unsearched),
            None => Err(Refusal::Searching),
        }
    }
}

impl Agent {
    /// Queues a connection's move to a NIC until its socket has been searched for. Requests beyond the limit are
    /// answered that they have to be made again.
    pub(crate) fn move_when_searched(&mut self, session: u32, number: u32, askers: Vec<Asker>) {
        let Some(serial) = self.connection_ref(session, number).map(|connection| connection.serial) else { return };
        let waiting = self.searches.waiting.entry((session, number, serial)).or_default();
        let room = MOST.saturating_sub(waiting.len());
        let mut askers = askers.into_iter();
        waiting.extend(askers.by_ref().take(room));
        let reply = || Reply::Stayed { reason: MANY_WAITING.into(), transient: true };
        askers.for_each(|(asker, tag)| self.answer(asker, tag, reply(), &[]));
    }

    /// Begins the search for what waits, if it is time.
    pub(crate) fn begin_search(&mut self) {
        let now = monotonic_micros();
        let Some(waiting) = self.searches.begin(now) else { return };
        let keys: Vec<Key> = waiting.keys().copied().collect();
        let questions: Vec<(Key, Question)> = keys.into_iter().filter_map(|key| Some((key, self.question(key)?))).collect();
        if questions.is_empty() {
            return self.searched(Vec::new(), Answers { held: Vec::new(), took: 0 });
        }
        let calls = self.calls.clone();
        let search = move || {
            let (keys, questions): (Vec<Key>, Vec<Question>) = questions.into_iter().unzip();
            let answers = holders::search(&questions);
            let completion: Completion = Box::new(move |agent| agent.searched(keys, answers));
            calls.complete(completion);
        };
        if let Err(error) = thread::Builder::new().name("search".into()).spawn(search) {
            warning!(
                [] "the processes could not be searched for holders of sockets: {error}";
                "it is tried again; free memory or processes if the error names them"
            );
            self.searches.waiting = self.searches.end(0, now);
            self.searches.next = now + AGAIN;
        }
    }

    /// What is to be searched for a connection. None if it is gone.
    fn question(&mut self, key: Key) -> Option<Question> {
        take_note_of_fork(self, key);
        let program = self.sessions.get(key.0 as usize)?.as_ref()?.process;
        let inode = socket::inode(named(&mut self.sessions, key)?.fd().ok()?).ok()?;
        let except = vec![program, std::process::id(), std::os::unix::process::parent_id()];
        Some(Question { inode, program, except })
    }

    /// Goes on with the moves that have waited for a search.
    fn searched(&mut self, keys: Vec<Key>, answers: Answers) {
        let now = monotonic_micros();
        let served = self.searches.end(answers.took, now);
        let found = keys.into_iter().zip(answers.held).filter(|(key, _)| served.contains_key(key));
        self.searches.found.extend(found.map(|(key, held)| (key, (held, now))));
        for (key, mut askers) in served {
            // Nobody waits for the answer to a suggestion.
            askers.retain(|(_, tag)| *tag != 0);
            if !askers.is_empty() {
                self.attend(key.0);
                self.move_now(key, askers);
            } else if named(&mut self.sessions, key).is_some() {
                // There may be very many: they are moved in slices.
                self.look_again(key.0, key.1, 0);
            }
        }
    }

    /// Its program has shared a connection's socket with others, or may have: what a search finds that has begun
    /// already does not count.
    pub(crate) fn forget_search(&mut self, session: u32, number: u32) {
        let Some(serial) = self.connection_ref(session, number).map(|connection| connection.serial) else { return };
        let key = (session, number, serial);
        self.searches.found.remove(&key);
        let askers = self.searches.under_way.as_mut().and_then(|these| these.remove(&key));
        if let Some(askers) = askers {
            self.move_when_searched(session, number, askers);
        }
    }
}

/// Notes, for the next agent, too, that other processes may have a connection's socket, if its program has noted in the
/// connection's block that it has forked. A search for them begins after this.
fn take_note_of_fork(agent: &mut Agent, key: Key) {
    let forked = named(&mut agent.sessions, key).filter(|connection| connection.block.is_shared());
    let Some(connection) = forked else { return };
    connection.inherited = true;
    agent.searches.found.remove(&key);
    agent.keep_connection(key.0, key.1);
    if let Some(connection) = named(&mut agent.sessions, key) {
        connection.block.take_shared_away();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Key = (1, 2, 3);
    const OTHER: Key = (1, 3, 4);

    /// Whoever asks again and again does not keep the machine busy, and all who ask meanwhile are served by the next
    /// search.
    #[test]
    fn one_search_at_a_time_serves_all_that_wait_in_a_tenth_of_the_time() {
        let mut searches = Searches::default();
        assert!(searches.begin(1_000).is_none(), "nobody waits");
        searches.waiting.insert(ONE, Vec::new());
        assert!(searches.begin(1_000).is_some_and(|these| these.contains_key(&ONE)));
        searches.waiting.insert(OTHER, Vec::new());
        assert!(searches.begin(2_000).is_none(), "one is under way");
        assert!(searches.trouble(ONE).is_some() && searches.trouble(OTHER).is_some());
        assert_eq!(searches.end(5_000, 6_000).into_keys().collect::<Vec<_>>(), [ONE]);
        assert!(searches.begin(50_999).is_none(), "it is too early");
        assert!(searches.begin(51_000).is_some_and(|these| these.contains_key(&OTHER)));
    }

    #[test]
    fn what_was_found_is_used_once_and_soon() {
        let mut searches = Searches::default();
        searches.found.insert(ONE, (Held::Alone, 1_000));
        assert_eq!((searches.take(ONE, 2_000), searches.take(ONE, 2_000)), (Some(Held::Alone), None));
        searches.found.insert(ONE, (Held::Alone, 1_000));
        assert_eq!(searches.take(ONE, 1_000 + FRESH), None);
        searches.found.insert(OTHER, (Held::Alone, 1_000));
        searches.end(0, 1_000 + FRESH);
        assert!(searches.found.is_empty());
    }
}
