//! A connection as lists show it, and what it has carried since the last look.

use super::events::Event;
use baton_protocol::program::{ConnectionInfo, Load};
use clap::ValueEnum;
use std::cmp::Reverse;
use std::net::SocketAddr;
use std::path::PathBuf;

/// What tells a connection from all others: the Baton's number in the list, session, number.
pub type Key = (usize, u32, u32);

/// Bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rate {
    /// Acknowledged by the peer.
    pub sent: f64,
    /// Received.
    pub received: f64,
}

impl Rate {
    /// Both directions.
    pub fn sum(self) -> f64 {
        self.sent + self.received
    }
}

/// A connection.
#[derive(Clone, Debug)]
pub struct Row {
    /// Number of its Baton in the list.
    pub baton: usize,
    /// Tells it from a later connection of the same number; 0 if that is not known.
    pub serial: u64,
    /// The agent's information on the connection.
    pub info: ConnectionInfo,
    /// Name of its process.
    pub name: String,
    /// Its own address, and the peer's.
    pub local: Option<SocketAddr>,
    /// See `local`.
    pub peer: Option<SocketAddr>,
    /// Since the look before the last one.
    pub rate: Option<Rate>,
    /// The connection's events, if they were asked for.
    pub events: Vec<Event>,
    /// The time of the last look in microseconds of the monotonic clock, and the bytes that the connection had carried
    /// then.
    seen: Option<(u64, (u64, u64))>,
}

impl Row {
    /// Of a Baton's connection, whose process has this name.
    pub fn new(baton: usize, info: ConnectionInfo, name: String) -> Row {
        let (local, peer) = (info.local.parse().ok(), info.peer.parse().ok());
        Row { baton, serial: 0, info, name, local, peer, rate: None, events: Vec::new(), seen: None }
    }

    /// See [`Key`].
    pub fn key(&self) -> Key {
        (self.baton, self.info.session, self.info.connection)
    }

    /// Notes how many bytes the connection has carried at `now`, in microseconds of the monotonic clock.
    pub fn note(&mut self, now: u64, carried: Option<(u64, u64)>) {
        let Some(carried) = carried else { return };
        if let Some((before, last)) = self.seen.filter(|(before, _)| *before < now) {
            let seconds = (now - before) as f64 / 1e6;
            // Less than before: the agent has been replaced, and counts anew.
            let per_second = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
            self.rate = Some(Rate { sent: per_second(carried.0, last.0), received: per_second(carried.1, last.1) });
        }
        self.seen = Some((now, carried));
    }

    /// Takes the rates since an earlier look at the same connection.
    pub fn follow(&mut self, earlier: &Row) {
        let same = (&self.info.local, &self.info.peer) == (&earlier.info.local, &earlier.info.peer);
        if let Some((now, carried)) = self.seen.take().filter(|_| same) {
            (self.seen, self.rate) = (earlier.seen, earlier.rate);
            self.note(now, Some(carried));
        } else {
            self.seen = earlier.seen.filter(|_| same);
        }
    }

    /// Takes what changes from the short list.
    pub fn update(&mut self, now: u64, load: &Load) {
        (self.info.place, self.info.nic, self.info.moves) = (load.place, load.nic, load.moves);
        if let Some((sent, received)) = load.carried {
            (self.info.detail.sent, self.info.detail.received) = (Some(sent), Some(received));
        }
        self.note(now, load.carried);
    }

    /// Takes the information of a newer list, and keeps the rates.
    pub fn renew(&mut self, info: ConnectionInfo) {
        self.info = info;
    }
}

/// By what lists are sorted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Sort {
    /// Session and number
    Number,
    /// Bytes per second, most first
    Rate,
    /// Bytes sent and received, most first
    Bytes,
    /// Round-trip time, longest first
    Rtt,
    /// Number of moves, most first
    Moves,
    /// Bytes not sent yet, most first
    Unsent,
    /// Bytes not read yet, most first
    Unread,
    /// Retransmitted segments, most first
    Retransmitted,
    /// Time since its last move, longest first
    Age,
}

impl Sort {
    /// All, in the order in which they follow each other.
    pub const ALL: [Sort; 9] = [
        Sort::Number,
        Sort::Rate,
        Sort::Bytes,
        Sort::Rtt,
        Sort::Moves,
        Sort::Unsent,
        Sort::Unread,
        Sort::Retransmitted,
        Sort::Age,
    ];

    /// Its name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Sorts. Equal ones stay in the order of their numbers.
    pub fn apply<T: AsRef<Row>>(self, rows: &mut [T]) {
        let by = |row: &Row| {
            let detail = &row.info.detail;
            match self {
                Sort::Number => 0,
                Sort::Rate => row.rate.map_or(0, |rate| rate.sum() as u64),
                Sort::Bytes => detail.sent.unwrap_or(0).saturating_add(detail.received.unwrap_or(0)),
                Sort::Rtt => u64::from(detail.srtt),
                Sort::Moves => u64::from(row.info.moves),
                Sort::Unsent => u64::from(detail.unsent),
                Sort::Unread => u64::from(detail.unread),
                Sort::Retransmitted => u64::from(detail.retransmitted),
                Sort::Age => row.info.for_us,
            }
        };
        rows.sort_by_cached_key(|row| (Reverse(by(row.as_ref())), row.as_ref().key()));
    }
}

impl AsRef<Row> for Row {
    fn as_ref(&self) -> &Row {
        self
    }
}

/// A Baton in a list.
#[derive(Clone, Debug)]
pub struct Baton {
    /// Where its agent listens.
    pub socket: PathBuf,
    /// Its number of NICs.
    pub nics: usize,
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use baton_protocol::program::{Detail, Place};

    /// A connection in the kernel.
    pub fn row(local: &str, peer: &str) -> Row {
        let detail = Detail { state: 1, srtt: 1500, cwnd: 10, mss: 1448, ..Detail::default() };
        let info = ConnectionInfo {
            session: 0,
            connection: 3,
            process: 77,
            program: "/usr/bin/server".into(),
            local: local.into(),
            peer: peer.into(),
            place: Place::Kernel,
            nic: None,
            made_by: Place::Kernel,
            moves: 2,
            lent: None,
            dormant: false,
            for_us: 1_500_000,
            detail,
            reason: "asked to".into(),
        };
        Row::new(0, info, "server".into())
    }

    #[test]
    fn every_key_of_a_connection_is_documented() {
        let document = include_str!("../../../../docs/reference/json.md");
        let value = serde_json::to_value(row("10.0.0.1:1", "10.0.0.2:2").info).expect("JSON");
        for keys in [&value, &value["detail"]] {
            for key in keys.as_object().expect("an object").keys() {
                assert!(document.contains(&format!("`{key}`")), "docs/reference/json.md does not name `{key}`");
            }
        }
    }

    #[test]
    fn rates_are_differences() {
        let mut row = row("10.0.0.1:1", "10.0.0.2:2");
        row.note(1_000_000, Some((100, 50)));
        assert_eq!(row.rate, None);
        row.note(1_500_000, Some((600, 50)));
        assert_eq!(row.rate, Some(Rate { sent: 1000.0, received: 0.0 }));
        row.note(2_000_000, None);
        row.note(2_500_000, Some((700, 150)));
        assert_eq!(row.rate, Some(Rate { sent: 100.0, received: 100.0 }), "in the middle of a move nothing is known");
        row.note(3_500_000, Some((5, 5)));
        assert_eq!(row.rate, Some(Rate::default()), "another agent counts anew");
    }

    #[test]
    fn rows_are_sorted() {
        let mut rows: Vec<Row> = (0..4).map(|_| row("10.0.0.1:1", "10.0.0.2:2")).collect();
        for (at, row) in rows.iter_mut().enumerate() {
            row.info.connection = at as u32;
            row.info.moves = [1, 7, 7, 3][at];
            row.info.detail.srtt = [4, 3, 2, 1][at];
        }
        let order = |sort: Sort, rows: &mut Vec<Row>| {
            sort.apply(rows);
            rows.iter().map(|row| row.info.connection).collect::<Vec<_>>()
        };
        assert_eq!(order(Sort::Moves, &mut rows), [1, 2, 3, 0]);
        assert_eq!(order(Sort::Rtt, &mut rows), [0, 1, 2, 3]);
        assert_eq!(order(Sort::Number, &mut rows), [0, 1, 2, 3]);
    }
}
