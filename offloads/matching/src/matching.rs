//! Posted receives and unexpected messages.

use crate::classes::{CLASSES, Class, Classes, example};
use crate::groups::Groups;
use crate::list::List;
use crate::{Criteria, Full, Message};
use alloc::boxed::Box;
use alloc::vec::Vec;

/// Identifies a posted receive. A number is reused only with another generation, so that an old id cancels nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PostedId {
    entry: u32,
    generation: u32,
}

/// The result of posting a receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Post {
    /// It waits for a message.
    Posted(PostedId),
    /// The unexpected message with this value was waiting for it, and is taken.
    Matched(u32),
}

/// The result of a message's arrival.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// The posted receive with this value was waiting for it, and is taken.
    Matched(u32),
    /// It waits for a receive, at this place: see [`Matching::discard`].
    Unexpected(u32),
}

/// A posted receive. `order` says which of two was posted first.
#[derive(Clone, Copy, Debug)]
struct Posted {
    order: u64,
    value: u32,
    generation: u32,
    /// The class in which it is hashed; [`CLASSES`] if it is in the list of receives that are not hashed.
    class: u8,
    waiting: bool,
    criteria: Criteria,
}

/// Posted receives and unexpected messages of one endpoint. A *value* is a number by which the caller knows the receive
/// or message.
pub struct Matching {
    classes: Classes,
    posted: Box<[Posted]>,
    free_posted: Vec<u32>,
    posted_groups: Groups,
    /// Receives of a kind for which no class was left.
    unhashed: List,
    unhashed_count: u32,
    orders: u64,
    /// The unexpected messages with their values; None where there is none.
    unexpected: Box<[(Message, Option<u32>)]>,
    free_unexpected: Vec<u32>,
    /// Node `entry * CLASSES + class` is the message in that class.
    unexpected_groups: Groups,
    arrivals: List,
}

impl Matching {
    /// Room for so many posted receives and unexpected messages. `hash_key` must be random: peers choose their
    /// messages' tags.
    pub fn new(posted: usize, unexpected: usize, hash_key: [u64; 4]) -> Matching {
        let criteria = Criteria { source: None, context: 0, tag: 0, ignore: 0 };
        let unused = Posted { order: 0, value: 0, generation: 0, class: 0, waiting: false, criteria };
        let nothing = Message { source: 0, context: 0, tag: 0 };
        Matching {
            classes: Classes::new(),
            posted: alloc::vec![unused; posted].into(),
            free_posted: (0..posted as u32).rev().collect(),
            posted_groups: Groups::new(posted, hash_key),
            unhashed: List::new(posted),
            unhashed_count: 0,
            orders: 0,
            unexpected: alloc::vec![(nothing, None); unexpected].into(),
            free_unexpected: (0..unexpected as u32).rev().collect(),
            unexpected_groups: Groups::new(unexpected * CLASSES, hash_key),
            arrivals: List::new(unexpected),
        }
    }

    /// Number of posted receives.
    pub fn posted(&self) -> usize {
        self.posted.len() - self.free_posted.len()
    }

    /// Number of unexpected messages.
    pub fn unexpected(&self) -> usize {
        self.unexpected.len() - self.free_unexpected.len()
    }

    /// Posts a receive, or gives it the oldest unexpected message that it accepts.
    ///
    /// # Errors
    /// If nothing matches and there is no room for another receive.
    pub fn post(&mut self, criteria: Criteria, value: u32) -> Result<Post, Full> {
        let class = self.class_of(&criteria);
        if let Some(entry) = self.find_unexpected(class, &criteria) {
            return Ok(Post::Matched(self.take_unexpected(entry)));
        }
        let entry = self.free_posted.pop().ok_or(Full)?;
        let generation = self.posted[entry as usize].generation.wrapping_add(1);
        self.orders += 1;
        self.posted[entry as usize] =
            Posted { order: self.orders, value, generation, class: class.unwrap_or(CLASSES) as u8, waiting: true, criteria };
        match class {
            Some(class) => {
                self.classes.posted[class] += 1;
                self.posted_groups.push(&self.classes.key(class, &example(&criteria)), entry);
            }
            None => {
                self.unhashed.push(entry);
                self.unhashed_count += 1;
            }
        }
        Ok(Post::Posted(PostedId { entry, generation }))
    }

    /// Whether a receive like this one would be hashed: matching it takes no search.
    pub fn hashes(&self, criteria: &Criteria) -> bool {
        self.classes.has_room_for(criteria)
    }

    /// Number of posted receives that are not hashed.
    pub fn unhashed(&self) -> usize {
        self.unhashed_count as usize
    }

    /// Criteria and values of the posted receives, oldest first.
    pub fn posted_in_order(&self) -> Vec<(Criteria, u32)> {
        let mut waiting: Vec<&Posted> = self.posted.iter().filter(|posted| posted.waiting).collect();
        waiting.sort_unstable_by_key(|posted| posted.order);
        waiting.into_iter().map(|posted| (posted.criteria, posted.value)).collect()
    }

    /// The unexpected messages with their values, oldest first.
    pub fn unexpected_in_order(&self) -> impl Iterator<Item = (Message, u32)> {
        self.arrivals.iter().filter_map(|entry| {
            let (message, value) = self.unexpected[entry as usize];
            Some((message, value?))
        })
    }

    /// Takes a posted receive back. Returns its value; None if it has been matched or cancelled before.
    pub fn cancel(&mut self, id: PostedId) -> Option<u32> {
        let posted = self.posted.get(id.entry as usize)?;
        (posted.waiting && posted.generation == id.generation).then(|| self.take_posted(id.entry))
    }

    /// Gives a message that has arrived the oldest posted receive that accepts it, or keeps it as unexpected.
    ///
    /// # Errors
    /// If nothing matches and there is no room for another unexpected message.
    pub fn arrive(&mut self, message: Message, value: u32) -> Result<Arrival, Full> {
        if let Some(entry) = self.find_posted(&message) {
            return Ok(Arrival::Matched(self.take_posted(entry)));
        }
        let entry = self.free_unexpected.pop().ok_or(Full)?;
        self.unexpected[entry as usize] = (message, Some(value));
        self.arrivals.push(entry);
        for (class, wildcards) in self.classes.used() {
            self.unexpected_groups.push(&wildcards.key_of(class, &message), node(entry, class));
        }
        Ok(Arrival::Unexpected(entry))
    }

    /// The oldest unexpected message that these criteria accept, which stays (MPI_Probe). Returns its value.
    pub fn peek(&mut self, criteria: &Criteria) -> Option<u32> {
        let class = self.class_of(criteria);
        self.find_unexpected(class, criteria).and_then(|entry| self.unexpected[entry as usize].1)
    }

    /// Takes the oldest unexpected message that these criteria accept (MPI_Mprobe). Returns its value.
    pub fn claim(&mut self, criteria: &Criteria) -> Option<u32> {
        let class = self.class_of(criteria);
        self.find_unexpected(class, criteria).map(|entry| self.take_unexpected(entry))
    }

    /// Forgets an unexpected message (its sender has ended), given its place and its value. False if it is not there
    /// any more.
    pub fn discard(&mut self, place: u32, value: u32) -> bool {
        let waits = self.unexpected.get(place as usize).is_some_and(|(_, waiting)| *waiting == Some(value));
        if waits {
            self.take_unexpected(place);
        }
        waits
    }

    /// The class in which receives like this one are hashed. A new one makes the unexpected messages be hashed for it.
    fn class_of(&mut self, criteria: &Criteria) -> Option<usize> {
        match self.classes.find(criteria) {
            Class::Known(class) => Some(class),
            Class::TooMany => None,
            Class::New(class) => {
                for entry in self.arrivals.iter() {
                    let key = self.classes.key(class, &self.unexpected[entry as usize].0);
                    self.unexpected_groups.remove(node(entry, class));
                    self.unexpected_groups.push(&key, node(entry, class));
                }
                Some(class)
            }
        }
    }

    fn find_posted(&self, message: &Message) -> Option<u32> {
        let mut oldest: Option<(u64, u32)> = None;
        for (class, wildcards) in self.classes.used() {
            if self.classes.posted[class] > 0
                && let Some(entry) = self.posted_groups.first(&wildcards.key_of(class, message))
            {
                let order = self.posted[entry as usize].order;
                if oldest.is_none_or(|(least, _)| order < least) {
                    oldest = Some((order, entry));
                }
            }
        }
        if self.unhashed_count > 0 {
            let found = self.unhashed.iter().find(|entry| self.posted[*entry as usize].criteria.accepts(message));
            let found = found.map(|entry| (self.posted[entry as usize].order, entry));
            oldest = oldest.into_iter().chain(found).min();
        }
        oldest.map(|(_, entry)| entry)
    }

    fn take_posted(&mut self, entry: u32) -> u32 {
        let posted = &mut self.posted[entry as usize];
        posted.waiting = false;
        let (class, value) = (usize::from(posted.class), posted.value);
        if class < CLASSES {
            self.classes.posted[class] -= 1;
            self.posted_groups.remove(entry);
        } else {
            self.unhashed.remove(entry);
            self.unhashed_count -= 1;
        }
        self.free_posted.push(entry);
        value
    }

    fn find_unexpected(&self, class: Option<usize>, criteria: &Criteria) -> Option<u32> {
        match class {
            Some(class) => {
                let key = self.classes.key(class, &example(criteria));
                self.unexpected_groups.first(&key).map(|node| node / CLASSES as u32)
            }
            None => self.arrivals.iter().find(|entry| criteria.accepts(&self.unexpected[*entry as usize].0)),
        }
    }

    fn take_unexpected(&mut self, entry: u32) -> u32 {
        for class in 0..CLASSES {
            self.unexpected_groups.remove(node(entry, class));
        }
        self.arrivals.remove(entry);
        self.free_unexpected.push(entry);
        self.unexpected[entry as usize].1.take().expect("a message in a queue has a value")
    }
}

fn node(entry: u32, class: usize) -> u32 {
    entry * CLASSES as u32 + class as u32
}
