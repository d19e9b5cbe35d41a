//! Queues of nodes with equal keys, found by hash. Each queue is in the order in which its nodes were added.

use crate::NONE;
use ahash::RandomState;
use alloc::boxed::Box;
use alloc::vec;

/// The key that all nodes of a queue share.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub class: u32,
    pub source: u32,
    pub context: u32,
    pub tag: u64,
}

/// A queue. Its nodes are linked by [`Node`]s; queues with the same hash by `next`.
#[derive(Clone, Copy, Debug)]
struct Group {
    key: Key,
    first: u32,
    last: u32,
    next: u32,
}

/// A node's place in its queue. `group` is NONE for a node that is in none.
#[derive(Clone, Copy, Debug)]
struct Node {
    group: u32,
    previous: u32,
    next: u32,
}

/// Queues of nodes by key. There are as many groups as nodes, so that there is always one for a new key.
pub(crate) struct Groups {
    buckets: Box<[u32]>,
    mask: usize,
    groups: Box<[Group]>,
    /// Head of the unused groups, linked by `next`.
    free: u32,
    nodes: Box<[Node]>,
    hasher: RandomState,
}

impl Groups {
    /// Empty queues for nodes numbered below `nodes`.
    pub fn new(nodes: usize, hash_key: [u64; 4]) -> Groups {
        let size = (nodes * 2).next_power_of_two().max(16);
        let key = Key { class: 0, source: 0, context: 0, tag: 0 };
        let unused = |at: usize| Group { key, first: NONE, last: NONE, next: if at + 1 < nodes { at as u32 + 1 } else { NONE } };
        Groups {
            buckets: vec![NONE; size].into(),
            mask: size - 1,
            groups: (0..nodes).map(unused).collect(),
            free: if nodes == 0 { NONE } else { 0 },
            nodes: vec![Node { group: NONE, previous: NONE, next: NONE }; nodes].into(),
            hasher: RandomState::with_seeds(hash_key[0], hash_key[1], hash_key[2], hash_key[3]),
        }
    }

    fn bucket(&self, key: &Key) -> usize {
        self.hasher.hash_one(key) as usize & self.mask
    }

    fn find(&self, bucket: usize, key: &Key) -> u32 {
        let mut at = self.buckets[bucket];
        while at != NONE && self.groups[at as usize].key != *key {
            at = self.groups[at as usize].next;
        }
        at
    }

    /// The oldest node with this key.
    pub fn first(&self, key: &Key) -> Option<u32> {
        let group = self.find(self.bucket(key), key);
        (group != NONE).then(|| self.groups[group as usize].first)
    }

    /// Adds a node, which must be in no queue yet, behind the other nodes with its key.
    pub fn push(&mut self, key: &Key, node: u32) {
        let bucket = self.bucket(key);
        let mut at = self.find(bucket, key);
        if at == NONE {
            at = self.free;
            let group = &mut self.groups[at as usize];
            self.free = group.next;
            *group = Group { key: *key, first: NONE, last: NONE, next: self.buckets[bucket] };
            self.buckets[bucket] = at;
        }
        let group = &mut self.groups[at as usize];
        self.nodes[node as usize] = Node { group: at, previous: group.last, next: NONE };
        if group.last == NONE {
            group.first = node;
        } else {
            self.nodes[group.last as usize].next = node;
        }
        group.last = node;
    }

    /// Takes a node out of its queue, if it is in one.
    pub fn remove(&mut self, node: u32) {
        let Node { group: at, previous, next } = self.nodes[node as usize];
        if at == NONE {
            return;
        }
        self.nodes[node as usize].group = NONE;
        match previous {
            NONE => self.groups[at as usize].first = next,
            previous => self.nodes[previous as usize].next = next,
        }
        match next {
            NONE => self.groups[at as usize].last = previous,
            next => self.nodes[next as usize].previous = previous,
        }
        if self.groups[at as usize].first == NONE {
            self.free_group(at);
        }
    }

    /// Takes an empty group out of its bucket. Buckets hold one group on average, so the search for its predecessor is
    /// short.
    fn free_group(&mut self, at: u32) {
        let bucket = self.bucket(&self.groups[at as usize].key);
        let next = self.groups[at as usize].next;
        if self.buckets[bucket] == at {
            self.buckets[bucket] = next;
        } else {
            let mut before = self.buckets[bucket];
            while self.groups[before as usize].next != at {
                before = self.groups[before as usize].next;
            }
            self.groups[before as usize].next = next;
        }
        self.groups[at as usize].next = self.free;
        self.free = at;
    }
}
