//! Connections that cannot be in the map of sockets, and stay in the kernel.
//!
//! In the kernel's receive function for sockets of a map any signal ends a wait with EAGAIN, which no program expects
//! of a socket in blocking mode. And splice(2) does not find bytes that were put into the queue: a program that reads
//! by it would wait for ever.

use crate::Attacher;
use anyhow::Result;
use baton_linux::events::monotonic_micros;
use baton_linux::{foreign, process};
use baton_protocol::program::{Ask, Place, Until};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Microseconds between two checks of sockets' modes, and number of connections in a check.
const LOOK: u64 = 100_000;
const LOOKS: usize = 256;

/// Why a connection stays in the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unfit {
    /// Its socket is in blocking mode, which may change.
    Blocking,
    /// Its process reads sockets by splice(2).
    Spliced,
    /// Another attacher has the connection.
    Attached,
}

impl Unfit {
    /// The text for the list of connections, and when the connection may move again.
    pub fn cause(self) -> (&'static str, Until) {
        match self {
            Unfit::Blocking => ("blocking socket", Until::Again),
            Unfit::Spliced => ("splice", Until::Never),
            Unfit::Attached => ("attached by another process, too", Until::Again),
        }
    }
}

impl Attacher {
    /// Why a connection must not be on the NIC, as far as can be seen while its program runs.
    pub(crate) fn unfit(&self, number: u32) -> Option<Unfit> {
        let entry = self.entries.get(&number)?;
        if self.splicing.contains(&entry.process) {
            return Some(Unfit::Spliced);
        }
        let blocks = match user_apart(entry.process) {
            None => process::blocks(entry.process, entry.fd, entry.inode) == Some(true),
            // The result of the last check: the move checks again, when the program is stopped.
            Some(_) => entry.declined == Some(Unfit::Blocking),
        };
        blocks.then_some(Unfit::Blocking)
    }

    /// Leaves a connection in the kernel, and reports the reason to the agent, once.
    pub(crate) fn decline(&mut self, number: u32, unfit: Unfit) -> Result<()> {
        let Some(entry) = self.entries.get_mut(&number) else { return Ok(()) };
        if entry.declined == Some(unfit) {
            return Ok(());
        }
        entry.declined = Some(unfit);
        let (reason, until) = unfit.cause();
        self.note_stay(reason);
        self.ask(&Ask::GiveBack { connection: number, reason: reason.into(), until }, None)?;
        Ok(())
    }

    /// A process reads one of its sockets by splice(2): all its connections leave the NIC for good.
    pub(crate) fn note_splice(&mut self, cookie: u64) {
        let Some(process) = self.by_cookie.get(&cookie).and_then(|number| self.entries.get(number)).map(|entry| entry.process)
        else {
            return;
        };
        self.splicing.insert(process);
        let of_it = self.entries.iter().filter(|(_, entry)| entry.process == process);
        for (number, entry) in of_it {
            if entry.joined.is_some() {
                self.work.postpone(*number, Unfit::Spliced.cause());
            } else {
                // It will be declined when its turn comes.
                self.work.wanted.insert(*number, Place::Nic);
            }
        }
    }

    /// Time of the next check of modes, in microseconds; None if there are no connections.
    pub(crate) fn next_look(&self) -> Option<u64> {
        (!self.entries.is_empty()).then_some(self.looks.due)
    }

    /// Checks the modes of sockets, of some at a time: a connection whose socket has become blocking leaves the NIC,
    /// and one whose socket is no longer blocking may move there.
    pub(crate) fn look_at_modes(&mut self) {
        let now = monotonic_micros();
        if now < self.looks.due {
            return;
        }
        let mut by_user: BTreeMap<Option<u32>, Vec<Socket>> = BTreeMap::new();
        let mut looked = 0;
        for (number, entry) in self.entries.range(self.looks.next..).take(LOOKS) {
            self.looks.next = number.wrapping_add(1);
            looked += 1;
            let socket = Socket { number: *number, process: entry.process, fd: entry.fd, inode: entry.inode };
            by_user.entry(user_apart(entry.process)).or_default().push(socket);
        }
        if looked < LOOKS {
            self.looks.next = 0;
        }
        for (user, sockets) in by_user {
            let seen = self.looks.seen.clone();
            let look = move || {
                let modes =
                    sockets.iter().filter_map(|of| Some((of.number, of.inode, process::blocks(of.process, of.fd, of.inode)?)));
                let modes: Vec<Mode> = modes.collect();
                seen.lock().unwrap_or_else(PoisonError::into_inner).extend(modes);
            };
            match user {
                None => look(),
                // The previous check of this user's programs has not ended: nothing changes for them now.
                Some(user) if foreign::has_calls(user) => {}
                Some(user) => foreign::call_for(user, look),
            }
        }
        let modes = std::mem::take(&mut *self.looks.seen.lock().unwrap_or_else(PoisonError::into_inner));
        modes.into_iter().for_each(|mode| self.follow_mode(mode));
        self.looks.due = monotonic_micros() + LOOK;
    }

    fn follow_mode(&mut self, (number, inode, blocks): Mode) {
        let Some(entry) = self.entries.get_mut(&number).filter(|entry| entry.inode == inode) else { return };
        match (blocks, entry.joined.is_some()) {
            (true, true) => {
                entry.declined = Some(Unfit::Blocking);
                self.work.postpone(number, Unfit::Blocking.cause());
            }
            (false, false) if entry.declined == Some(Unfit::Blocking) => {
                if user_apart(entry.process).is_some() {
                    entry.declined = None;
                }
                if self.settings.flip.is_none() {
                    self.work.wanted.insert(number, Place::Nic);
                }
            }
            _ => {}
        }
    }
}

/// The user of a process whose entries in /proc may delay the attacher: neither root nor the attacher's own. The
/// entries are then read by a thread for that user.
fn user_apart(process: u32) -> Option<u32> {
    process::user_of(process).ok().filter(|user| *user != 0 && *user != process::user())
}

/// A program's socket.
struct Socket {
    number: u32,
    process: u32,
    fd: i32,
    inode: u64,
}

/// A connection's number, its socket's inode, and whether the socket is in blocking mode.
type Mode = (u32, u64, bool);

/// The connection whose mode is checked next, and when.
#[derive(Default)]
pub(crate) struct Looks {
    next: u32,
    due: u64,
    /// What has been seen since the last look, by whichever thread.
    seen: Arc<Mutex<Vec<Mode>>>,
}
