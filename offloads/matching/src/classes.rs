//! Classes of receives. All receives of a class have the same wildcards in their criteria.

use crate::groups::Key;
use crate::{Criteria, Message};

/// Most kinds of wildcards that are hashed at the same time. Class 0 is that without wildcards.
pub const CLASSES: usize = 8;

/// Which parts of a message the receives of a class compare.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Wildcards {
    any_source: bool,
    ignore: u64,
}

impl Wildcards {
    pub fn of(criteria: &Criteria) -> Wildcards {
        Wildcards { any_source: criteria.source.is_none(), ignore: criteria.ignore }
    }

    /// The key under which a message is found in class `class`.
    pub fn key_of(&self, class: usize, message: &Message) -> Key {
        let source = if self.any_source { 0 } else { message.source };
        Key { class: class as u32, source, context: message.context, tag: message.tag & !self.ignore }
    }
}

/// The classes in use.
#[derive(Clone, Debug)]
pub(crate) struct Classes {
    wildcards: [Wildcards; CLASSES],
    /// Posted receives of each class.
    pub posted: [u32; CLASSES],
    used: usize,
}

/// Where a receive's class was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    /// In use before.
    Known(usize),
    /// Taken into use now: unexpected messages are not hashed for it yet.
    New(usize),
    /// Every class has posted receives: no room for another kind.
    TooMany,
}

impl Classes {
    pub fn new() -> Classes {
        Classes { wildcards: [Wildcards::default(); CLASSES], posted: [0; CLASSES], used: 1 }
    }

    /// The classes in use.
    pub fn used(&self) -> impl Iterator<Item = (usize, &Wildcards)> {
        self.wildcards[..self.used].iter().enumerate()
    }

    /// Whether these criteria have a class, or can have one.
    pub fn has_room_for(&self, criteria: &Criteria) -> bool {
        let wanted = Wildcards::of(criteria);
        self.used < CLASSES || self.used().any(|(class, wildcards)| *wildcards == wanted || class > 0 && self.posted[class] == 0)
    }

    /// The class of these criteria. A new class may take the place of one that has no posted receives left.
    pub fn find(&mut self, criteria: &Criteria) -> Class {
        let wanted = Wildcards::of(criteria);
        if let Some((class, _)) = self.used().find(|(_, wildcards)| **wildcards == wanted) {
            return Class::Known(class);
        }
        let class = if self.used < CLASSES {
            self.used += 1;
            self.used - 1
        } else if let Some(idle) = (1..CLASSES).find(|class| self.posted[*class] == 0) {
            idle
        } else {
            return Class::TooMany;
        };
        self.wildcards[class] = wanted;
        Class::New(class)
    }

    /// The key of a receive or a message in a class.
    pub fn key(&self, class: usize, message: &Message) -> Key {
        self.wildcards[class].key_of(class, message)
    }
}

/// A message that these criteria accept, to compute their key from.
pub(crate) fn example(criteria: &Criteria) -> Message {
    Message { source: criteria.source.unwrap_or(0), context: criteria.context, tag: criteria.tag }
}
