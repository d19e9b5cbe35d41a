//! Events of connections, written as comments on each connection's next frame.

use super::merge::{Flow, Frame};
use std::collections::{HashMap, VecDeque};

/// Nanoseconds after which something is said with any frame, if its connection has none.
const PATIENCE: u64 = 1_000_000_000;

/// Most things that wait to be said.
const MOST: usize = 4096;

/// Comments on connections that have not been written yet.
pub struct Comments {
    /// By connection, oldest first.
    waiting: HashMap<Flow, VecDeque<(u64, String)>>,
    count: usize,
    /// With a filter nothing is said with another connection's frame, which would be of something filtered out.
    only_own: bool,
}

impl Comments {
    /// None yet. `only_own`: there is a filter.
    pub fn new(only_own: bool) -> Comments {
        Comments { waiting: HashMap::new(), count: 0, only_own }
    }

    /// Notes an event of a connection; `at` is its time in nanoseconds since 1970.
    pub fn add(&mut self, flow: Flow, at: u64, text: String) {
        if self.count < MOST {
            self.count += 1;
            self.waiting.entry(flow).or_default().push_back((at, text));
        }
    }

    /// The comments that are to be written with this frame.
    pub fn of(&mut self, frame: &Frame) -> Vec<String> {
        if self.count == 0 {
            return Vec::new();
        }
        let (flow, only_own) = (frame.flow(), self.only_own);
        let mut said = Vec::new();
        self.waiting.retain(|of, events| {
            let own = flow == Some(*of);
            let due = if own { frame.at } else { frame.at.saturating_sub(PATIENCE) };
            while let Some((at, text)) = events.pop_front() {
                if at > due || only_own && !own {
                    events.push_front((at, text));
                    break;
                }
                said.push(text);
            }
            !events.is_empty()
        });
        self.count -= said.len();
        said
    }

    /// The comments for which no frame came.
    pub fn rest(&mut self) -> Vec<String> {
        let mut rest: Vec<_> = std::mem::take(&mut self.waiting).into_values().flatten().collect();
        (self.count, _) = (0, rest.sort());
        rest.into_iter().map(|(_, text)| text).collect()
    }
}
