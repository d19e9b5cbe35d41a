//! Decides which buckets move to which worker: by the settings and, if balancing is on, by load.

use crate::peers::FRONT;
use baton_rss::{BUCKETS, Indirection, Key, Move, RssSettings, Table, next_move};

/// Microseconds between two measurements of the loads; the second while there is hardly any load.
const INTERVAL: u64 = 20_000;
const IDLE_INTERVAL: u64 = 200_000;

/// Number of frames between two measurements below which no bucket moves.
const MIN_FRAMES: u64 = 200;

/// Largest number of buckets that move at once.
const MAX_MOVES: usize = 16;

/// The next change of the indirection.
pub(crate) enum Step {
    /// These buckets move.
    Moves(Vec<Move>),
    /// The hash key changes; every bucket is worker 0's.
    Key(Key),
}

/// The state of the balance, in worker 0.
pub(crate) struct Balance {
    workers: usize,
    settings: RssSettings,
    /// The hash key to change to.
    key: Option<Key>,
    /// The table has to be changed to match the settings.
    rearrange: bool,
    /// Number of buckets that are moving.
    moving: usize,
    /// Time of the next decision, in microseconds.
    due: u64,
    /// Total frames of each bucket at the last measurement.
    last: [u64; BUCKETS],
    /// Frames of each bucket between two measurements, smoothed, in thousandths.
    loads: [u64; BUCKETS],
}

impl Balance {
    pub fn new(workers: usize, now: u64) -> Balance {
        let settings = RssSettings::default();
        Balance { workers, settings, key: None, rearrange: true, moving: 0, due: now, last: [0; BUCKETS], loads: [0; BUCKETS] }
    }

    /// Changes the settings; `random` is the hash key if they have none.
    pub fn set(&mut self, settings: &RssSettings, random: &Key) {
        if settings.key != self.settings.key {
            self.key = Some(settings.key.unwrap_or(*random));
        }
        self.settings = *settings;
        self.rearrange = true;
        self.due = 0;
    }

    /// Records that a bucket has moved.
    pub fn done(&mut self) {
        self.moving -= 1;
    }

    /// Time of the next decision in microseconds; `u64::MAX` while buckets are moving.
    pub fn due(&self) -> u64 {
        if self.moving > 0 { u64::MAX } else { self.due }
    }

    /// Decides at `now` on the next change, if one is due. `loads` gives the frames of each bucket so far.
    pub fn next(&mut self, now: u64, table: &Table, loads: impl FnOnce() -> [u64; BUCKETS]) -> Option<Step> {
        if self.moving > 0 || now < self.due {
            return None;
        }
        self.due = now + INTERVAL;
        if let Some(key) = self.key {
            return self.start(differences(table, &[FRONT as u8; BUCKETS])).or_else(|| {
                self.key = None;
                self.rearrange = true;
                self.due = now;
                Some(Step::Key(key))
            });
        }
        if std::mem::take(&mut self.rearrange) {
            let moves = self.start(differences(table, &self.settings.table(self.workers)));
            if moves.is_some() {
                return moves;
            }
        }
        if self.settings.indirection != Indirection::Balanced || self.workers == 1 {
            return None;
        }
        self.measure(now, loads());
        self.start(self.moves(table))
    }

    fn start(&mut self, moves: Vec<Move>) -> Option<Step> {
        self.moving = moves.len();
        (!moves.is_empty()).then_some(Step::Moves(moves))
    }

    /// Updates the loads.
    fn measure(&mut self, now: u64, total: [u64; BUCKETS]) {
        let mut sum = 0;
        for ((load, last), total) in self.loads.iter_mut().zip(&mut self.last).zip(total) {
            let frames = total - std::mem::replace(last, total);
            sum += frames;
            // In thousandths, so that smoothing does not round small loads away.
            *load = (*load + frames * 1000) / 2;
        }
        if sum < MIN_FRAMES {
            self.loads = [0; BUCKETS];
            self.due = now + IDLE_INTERVAL;
        }
    }

    /// The moves that the loads suggest.
    fn moves(&self, table: &Table) -> Vec<Move> {
        let mut table = *table;
        let mut moves: Vec<Move> = Vec::new();
        while moves.len() < MAX_MOVES
            && let Some(next) = next_move(&self.loads, &table, self.settings.active(self.workers))
            && moves.iter().all(|before| before.bucket != next.bucket)
        {
            table[usize::from(next.bucket)] = next.to;
            moves.push(next);
        }
        moves
    }
}

/// The moves that lead from one table to another.
fn differences(now: &Table, wanted: &Table) -> Vec<Move> {
    let pairs = now.iter().zip(wanted).enumerate();
    let differ = pairs.filter(|(_, (now, wanted))| now != wanted);
    differ.map(|(bucket, (from, to))| Move { bucket: bucket as u8, from: *from, to: *to }).collect()
}
