//! Moves that attachers are asked for. An attacher that is stopped, or busy, does not read its messages for a while:
//! what cannot be sent then is sent later, unless the connection has moved meanwhile.

use crate::agent::Agent;
use crate::connection::Connection;
use crate::moves::named;
use crate::session::{Sent, Session};
use baton_core::{Pause, Stage};
use baton_linux::events::monotonic_micros;
use baton_linux::socket;
use baton_protocol::program::{Answer, Place, Reply};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::Duration;

/// Bytes of messages, with what the kernel needs to keep them, that an attacher may have unread when a move is asked
/// for. This leaves room for messages that come once: an attacher whose channel has no room for such a one is cut off.
const MOST_UNREAD: u32 = 64 << 10;

/// A move that an attacher has not been asked for yet. The serial number and the count of moves show whether it
/// is the same connection, and has not moved since.
struct Unsent {
    serial: u64,
    made: u32,
    to: Place,
}

impl Unsent {
    fn is_of_use(&self, connection: &Connection) -> bool {
        let elsewhere = match self.to {
            Place::Nic => connection.stage() == Stage::Kernel,
            Place::Kernel => connection.stage() == Stage::Nic,
        };
        elsewhere && connection.serial == self.serial && connection.made == self.made
    }
}

/// The moves that one attacher has not been asked for yet: one for a connection at most.
pub(crate) struct Requests {
    by_number: BTreeMap<u32, Unsent>,
    /// When they are sent again.
    pause: Pause,
}

impl Session {
    /// Requests its attacher to move a connection. False if it has too much to read.
    fn ask_to_move(&self, connection: u32, to: Place) -> bool {
        let unread = socket::queue_bytes(self.channel.as_fd(), socket::SIOCOUTQ).unwrap_or(0);
        unread <= MOST_UNREAD && self.send(&Answer { tag: 0, body: Reply::Wanted { connection, to } }, &[]) == Sent::Done
    }
}

impl Agent {
    /// Requests an attacher to move a connection, now or as soon as it reads its messages.
    pub(crate) fn want(&mut self, session: u32, number: u32, to: Place) {
        let Some(Some(entry)) = self.sessions.get(session as usize) else { return };
        let Some(Some(connection)) = entry.connections.get(number as usize) else { return };
        // Those that wait are sent first.
        let waits = self.moves.unsent.contains_key(&session);
        if !waits && entry.ask_to_move(number, to) {
            return;
        }
        let unsent = Unsent { serial: connection.serial, made: connection.made, to };
        let first = || Requests { by_number: BTreeMap::new(), pause: Pause::begin(monotonic_micros()) };
        self.moves.unsent.entry(session).or_insert_with(first).by_number.insert(number, unsent);
    }

    /// Time until requests are sent again that attachers had no room for.
    pub(crate) fn unsent_wait(&self) -> Option<Duration> {
        let due = self.moves.unsent.values().map(|requests| requests.pause.due()).min()?;
        Some(Duration::from_micros(due.saturating_sub(monotonic_micros())))
    }

    /// Sends the requests that attachers had no room for, as far as they have it now.
    pub(crate) fn send_unsent(&mut self) {
        if self.moves.unsent.is_empty() {
            return;
        }
        let now = monotonic_micros();
        let mut unsent = std::mem::take(&mut self.moves.unsent);
        unsent.retain(|session, requests| requests.pause.due() > now || self.send_again(*session, requests, now));
        self.moves.unsent = unsent;
    }

    /// Returns whether some are left.
    fn send_again(&mut self, session: u32, requests: &mut Requests, now: u64) -> bool {
        let before = requests.by_number.len();
        while let Some((number, unsent)) = requests.by_number.first_key_value() {
            let connection = named(&mut self.sessions, (session, *number, unsent.serial));
            let of_use = connection.is_some_and(|connection| unsent.is_of_use(connection));
            let asks = |entry: &Session| entry.ask_to_move(*number, unsent.to);
            if of_use && !self.sessions.get(session as usize).and_then(Option::as_ref).is_some_and(asks) {
                break;
            }
            requests.by_number.pop_first();
        }
        requests.pause.tried(requests.by_number.len() < before, now);
        !requests.by_number.is_empty()
    }
}
