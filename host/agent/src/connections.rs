//! The connections of a session, found by number and by 4-tuple.

use crate::connection::Connection;
use crate::memory;
use crate::slab::Slab;
use baton_abi::layout::session::{MAX_CONNECTIONS, hot_from};
use baton_core::Taken;
use baton_shm::Region;
use baton_wire::Flow;
use siphasher::sip::SipHasher13;
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

/// Connections of a session. Dereferences to the slice of its places, some of which are empty.
pub(crate) struct Connections {
    places: Slab<Connection>,
    /// Hash of a connection's 4-tuple, whatever its device, and its number. A tree, which does not double when it
    /// grows.
    by_flow: BTreeSet<(u32, u32)>,
    /// Key of that hash. It is secret, so that nobody can choose many 4-tuples with the same hash.
    key: [u64; 2],
    /// A descriptor for each.
    taken: Taken,
}

impl Connections {
    /// No connections. `key` must be secret and random.
    pub fn new(key: [u64; 2]) -> Connections {
        Connections { places: Slab::default(), by_flow: BTreeSet::new(), key, taken: Taken::default() }
    }

    /// Counts their descriptors, and those of what comes, as a user's.
    pub fn count_as(&mut self, mut taken: Taken) {
        taken.add(self.places.iter().flatten().count() as u64);
        self.taken = taken;
    }

    /// Returns the lowest free number whose block no thread of the program is inside of: one may be that is late with a
    /// connection which another thread has closed. It would leave the next connection in place of the thread that is
    /// inside then. None if there is none. The number's next connection does not have to be hot, whatever the last one
    /// had to.
    pub fn vacant(&mut self, memory: &Region) -> Option<u32> {
        let lowest = self.places.vacant();
        let is_free = |number: u32| matches!(self.places.get(number as usize), None | Some(None));
        let vacant = (lowest..MAX_CONNECTIONS as u32).find(|number| is_free(*number) && memory::is_left(memory, *number));
        vacant.inspect(|number| memory.word32(hot_from(*number)).store(0, Ordering::Release))
    }

    /// Puts a connection at its number.
    pub fn put(&mut self, connection: Connection) {
        self.by_flow.insert((self.hash(&connection.flow), connection.number()));
        let is_new = self.places.get(connection.number() as usize).is_none_or(Option::is_none);
        self.taken.add(u64::from(is_new));
        self.places.put(connection.number(), connection);
    }

    /// Removes a connection and frees its number.
    pub fn remove(&mut self, number: u32) -> Option<Connection> {
        let connection = self.places.remove(number)?;
        self.by_flow.remove(&(self.hash(&connection.flow), number));
        self.taken.take_away(1);
        Some(connection)
    }

    /// Returns the connections with the 4-tuple of a flow: one, unless devices tell them apart.
    pub fn with_ends(&self, flow: &Flow) -> impl Iterator<Item = &Connection> {
        let hash = self.hash(flow);
        let with_hash = self.by_flow.range((hash, 0)..=(hash, u32::MAX));
        let with_hash = with_hash.filter_map(|(_, number)| self.places.get(*number as usize)?.as_ref());
        with_hash.filter(move |connection| connection.flow.by(0) == flow.by(0))
    }

    fn hash(&self, flow: &Flow) -> u32 {
        let mut hasher = SipHasher13::new_with_keys(self.key[0], self.key[1]);
        flow.by(0).hash(&mut hasher);
        hasher.finish() as u32
    }
}

impl Deref for Connections {
    type Target = [Option<Connection>];

    fn deref(&self) -> &[Option<Connection>] {
        &self.places
    }
}

impl DerefMut for Connections {
    fn deref_mut(&mut self) -> &mut [Option<Connection>] {
        &mut self.places
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Block;
    use baton_abi::layout::{block as session_block, session};
    use baton_core::{Limits, Users};
    use baton_wire::Endpoint;
    use std::sync::Arc;

    /// Nobody's number.
    const USER: u32 = 4_000_000_002;

    fn flow(port: u16) -> Flow {
        Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], port), device: 0 }
    }

    fn connections(ports: std::ops::Range<u16>) -> Connections {
        let memory = Arc::new(Region::private(session::HEAP).expect("memory"));
        let mut all = Connections::new([1, 2]);
        for port in ports {
            let (flow, number) = (flow(port), all.vacant(&memory).expect("a number"));
            let block = Block::new(memory.clone(), number);
            all.put(Connection::new(None, flow, flow.local.into(), flow.remote.into(), block));
        }
        all
    }

    /// A thread is late with a connection that another one has closed: nobody gets its number before it has left.
    #[test]
    fn a_number_is_free_when_nobody_is_inside() {
        let memory = Region::private(session::HEAP).expect("memory");
        let mut all = connections(0..3);
        let busy = |number: u32, thread: u32| {
            memory.word32(session::block(number) + session_block::BUSY).store(thread, Ordering::Release);
        };
        all.remove(1).expect("a connection");
        busy(1, 7);
        assert_eq!(all.vacant(&memory), Some(3));
        all.remove(2).expect("a connection");
        assert_eq!(all.vacant(&memory), Some(2));
        busy(1, 0);
        assert_eq!(all.vacant(&memory), Some(1));
    }

    #[test]
    fn a_numbers_next_connection_does_not_have_to_be_hot() {
        let memory = Region::private(session::HEAP).expect("memory");
        let mut all = connections(0..1);
        memory.word32(session::hot_from(1)).store(1 << 20, Ordering::Release);
        assert_eq!(all.vacant(&memory), Some(1));
        assert_eq!(memory.word32(session::hot_from(1)).load(Ordering::Acquire), 0);
    }

    #[test]
    fn a_connection_is_found_however_many_have_the_same_hash() {
        let mut all = connections(0..100);
        for port in 0..100 {
            // As if all had this one's hash.
            let hash = all.hash(&flow(port));
            all.by_flow = (0..100).map(|number| (hash, number)).collect();
            assert_eq!(all.with_ends(&flow(port)).map(|found| found.number()).collect::<Vec<_>>(), [u32::from(port)]);
        }
        assert!(all.with_ends(&flow(100)).next().is_none());
    }

    #[test]
    fn a_connection_that_is_gone_is_not_found() {
        let mut all = connections(0..3);
        assert!(all.remove(1).is_some() && all.remove(1).is_none());
        assert_eq!([0, 1, 2].map(|port| all.with_ends(&flow(port)).next().is_some()), [true, false, true]);
    }

    /// Each connection takes a descriptor of its user's share, from when it is there until it is gone.
    #[test]
    fn connections_count_as_their_users() {
        let (mut users, mut all) = (Users::new(Limits::default(), 0, 1, (1024, 0)), connections(0..3));
        all.count_as(users.take(USER, 0));
        let has = |users: &Users, count: u64| users.may_take(USER, count).is_err() && users.may_take(USER, count + 1).is_ok();
        assert!(has(&users, 3));
        let one = all.remove(1).expect("a connection");
        assert!(has(&users, 2));
        all.put(one);
        assert!(has(&users, 3));
        drop(all);
        assert!(has(&users, 0));
    }

    #[test]
    fn hashes_depend_on_the_key() {
        let (first, second) = (Connections::new([1, 2]), Connections::new([1, 3]));
        let equal = (0..1000).filter(|port| first.hash(&flow(*port)) == second.hash(&flow(*port))).count();
        assert!(equal <= 1, "{equal} of 1000");
    }
}
