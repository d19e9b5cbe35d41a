//! When buckets change hands: as the settings say, and, if they are to be balanced, as the loads do.

use crate::peers::FRONT;
use baton_rss::{BUCKETS, Indirection, Key, Move, Settings, Table, next_move};

/// Microseconds between two looks at the loads; and where hardly anything comes.
const EVERY: u64 = 20_000;
const IDLE: u64 = 200_000;

/// Frames between two looks below which nothing is worth a move.
const FEW: u64 = 200;

/// Buckets that change hands at once.
const AT_ONCE: usize = 16;

/// What is to be done next.
pub(crate) enum Step {
    /// These buckets change hands.
    Moves(Vec<Move>),
    /// The key is another one; every bucket is the front's.
    Key(Key),
}

pub(crate) struct Balance {
    workers: usize,
    settings: Settings,
    /// The key that is to become the hash's.
    key: Option<Key>,
    /// The table is to be as the settings say.
    rearrange: bool,
    under_way: usize,
    due: u64,
    last: [u64; BUCKETS],
    /// Frames between two looks, smoothed.
    loads: [u64; BUCKETS],
}

impl Balance {
    pub fn new(workers: usize, now: u64) -> Balance {
        let settings = Settings::default();
        Balance { workers, settings, key: None, rearrange: true, under_way: 0, due: now, last: [0; BUCKETS], loads: [0; BUCKETS] }
    }

    /// Other settings; `random` is the key where they name none.
    pub fn set(&mut self, settings: &Settings, random: &Key) {
        if settings.key != self.settings.key {
            self.key = Some(settings.key.unwrap_or(*random));
        }
        self.settings = *settings;
        self.rearrange = true;
        self.due = 0;
    }

    /// A bucket has changed hands.
    pub fn done(&mut self) {
        self.under_way -= 1;
    }

    /// When to ask again, in microseconds.
    pub fn due(&self) -> u64 {
        if self.under_way > 0 { u64::MAX } else { self.due }
    }

    pub fn next(&mut self, now: u64, table: &Table, loads: impl FnOnce() -> [u64; BUCKETS]) -> Option<Step> {
        if self.under_way > 0 || now < self.due {
            return None;
        }
        self.due = now + EVERY;
        if let Some(key) = self.key {
            return self.begin(differences(table, &[FRONT as u8; BUCKETS])).or_else(|| {
                self.key = None;
                self.rearrange = true;
                self.due = now;
                Some(Step::Key(key))
            });
        }
        if std::mem::take(&mut self.rearrange) {
            let moves = self.begin(differences(table, &self.settings.table(self.workers)));
            if moves.is_some() {
                return moves;
            }
        }
        if self.settings.indirection != Indirection::Balanced || self.workers == 1 {
            return None;
        }
        self.look(now, loads());
        self.begin(self.moves(table))
    }

    fn begin(&mut self, moves: Vec<Move>) -> Option<Step> {
        self.under_way = moves.len();
        (!moves.is_empty()).then_some(Step::Moves(moves))
    }

    fn look(&mut self, now: u64, total: [u64; BUCKETS]) {
        let mut sum = 0;
        for ((load, last), total) in self.loads.iter_mut().zip(&mut self.last).zip(total) {
            let came = total - std::mem::replace(last, total);
            sum += came;
            // By thousands, so that smoothing does not round it away.
            *load = (*load + came * 1000) / 2;
        }
        if sum < FEW {
            self.loads = [0; BUCKETS];
            self.due = now + IDLE;
        }
    }

    fn moves(&self, table: &Table) -> Vec<Move> {
        let mut table = *table;
        let mut moves: Vec<Move> = Vec::new();
        while moves.len() < AT_ONCE
            && let Some(next) = next_move(&self.loads, &table, self.settings.active(self.workers))
            && moves.iter().all(|before| before.bucket != next.bucket)
        {
            table[usize::from(next.bucket)] = next.to;
            moves.push(next);
        }
        moves
    }
}

fn differences(now: &Table, wanted: &Table) -> Vec<Move> {
    let pairs = now.iter().zip(wanted).enumerate();
    let differ = pairs.filter(|(_, (now, wanted))| now != wanted);
    differ.map(|(bucket, (from, to))| Move { bucket: bucket as u8, from: *from, to: *to }).collect()
}
