//! The keeper: what survives an agent besides memory. It learns of connections late, and starts the next agent only
//! when it has received everything that the last one had sent.

use crate::kernel::Descriptor;
use baton_wire::Flow;
use std::collections::{BTreeMap, VecDeque};

/// A connection's descriptor, kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    pub session: u32,
    pub descriptor: Descriptor,
    pub flow: Flow,
    /// When it may be offloaded.
    pub until: Until,
}

/// When a connection may be offloaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Until {
    Now,
    /// When no other process holds its socket.
    Alone,
    Never,
}

/// What an agent sends the keeper.
enum Message {
    Registered(u32, Kept),
    Forgotten(u32),
}

#[derive(Default)]
pub(crate) struct Keeper {
    /// Messages on their way, each with the time of its arrival.
    inbox: VecDeque<(u64, Message)>,
    kept: BTreeMap<u32, Kept>,
    /// How long a message takes, microseconds.
    pub delay: u64,
}

impl Keeper {
    pub fn registered(&mut self, number: u32, kept: Kept, now: u64) {
        self.inbox.push_back((now + self.delay, Message::Registered(number, kept)));
    }

    pub fn forgotten(&mut self, number: u32, now: u64) {
        self.inbox.push_back((now + self.delay, Message::Forgotten(number)));
    }

    /// Takes in what has arrived.
    pub fn run(&mut self, now: u64) {
        while let Some((due, _)) = self.inbox.front()
            && *due <= now
        {
            match self.inbox.pop_front() {
                Some((_, Message::Registered(number, kept))) => {
                    self.kept.insert(number, kept);
                }
                Some((_, Message::Forgotten(number))) => {
                    self.kept.remove(&number);
                }
                None => {}
            }
        }
    }

    /// When everything that was sent has arrived, microseconds.
    pub fn complete_at(&self) -> u64 {
        self.inbox.back().map_or(0, |(due, _)| *due)
    }

    pub fn kept(&self) -> &BTreeMap<u32, Kept> {
        &self.kept
    }
}
