//! epoll: sets of descriptors, level and edge triggered, one-shot.

use crate::errors::{Answer, Attempt};
use crate::world::{Object, World};
use std::collections::BTreeMap;

const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;
const EDGE: u32 = libc::EPOLLET as u32;

/// A descriptor in a set.
#[derive(Clone, Copy, Debug)]
struct Interest {
    events: u32,
    data: u64,
    /// The socket's wakeups when it was last reported.
    seen: Option<u64>,
}

/// An epoll set.
#[derive(Default)]
pub struct Set {
    interests: BTreeMap<i32, Interest>,
}

impl Set {
    /// A descriptor was closed.
    pub fn forget(&mut self, fd: i32) {
        self.interests.remove(&fd);
    }
}

impl World {
    /// epoll_create().
    pub fn epoll_create(&mut self, size: i32) -> Answer<i32> {
        if size <= 0 {
            return Err(libc::EINVAL);
        }
        let id = self.fresh_id();
        self.sets.insert(id, Set::default());
        self.describe(Object::Epoll(id))
    }

    fn set(&mut self, fd: i32) -> Answer<&mut Set> {
        match self.descriptors.get(&fd).map(|descriptor| descriptor.object) {
            Some(Object::Epoll(id)) => self.sets.get_mut(&id).ok_or(libc::EBADF),
            Some(_) => Err(libc::EINVAL),
            None => Err(libc::EBADF),
        }
    }

    /// epoll_ctl().
    pub fn epoll_ctl(&mut self, set: i32, operation: i32, fd: i32, events: u32, data: u64) -> Answer<()> {
        self.socket_of(fd)?;
        let interests = &mut self.set(set)?.interests;
        let interest = Interest { events, data, seen: None };
        match (operation, interests.contains_key(&fd)) {
            (libc::EPOLL_CTL_ADD, false) | (libc::EPOLL_CTL_MOD, true) => {
                interests.insert(fd, interest);
                Ok(())
            }
            (libc::EPOLL_CTL_DEL, true) => {
                interests.remove(&fd);
                Ok(())
            }
            (libc::EPOLL_CTL_ADD, true) => Err(libc::EEXIST),
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, false) => Err(libc::ENOENT),
            _ => Err(libc::EINVAL),
        }
    }

    /// epoll_wait(): events with their data. `timeout` is in milliseconds, negative for ever.
    pub fn epoll_wait(&mut self, set: i32, most: usize, timeout: i32, since: u64) -> Attempt<Vec<(u32, u64)>> {
        let found = match self.collect(set, most) {
            Ok(found) => found,
            Err(error) => return Attempt::Done(Err(error)),
        };
        let deadline = (timeout >= 0).then(|| since + timeout as u64 * 1000);
        if !found.is_empty() || deadline.is_some_and(|deadline| self.now >= deadline) {
            return Attempt::Done(Ok(found));
        }
        Attempt::Blocked(deadline)
    }

    fn collect(&mut self, set: i32, most: usize) -> Answer<Vec<(u32, u64)>> {
        let interests: Vec<(i32, Interest)> = self.set(set)?.interests.iter().map(|(fd, interest)| (*fd, *interest)).collect();
        let mut found = Vec::new();
        for (fd, interest) in interests {
            let wakeups = self.socket_of(fd).ok().map_or(0, |id| self.sockets[&id].wakeups);
            let disarmed = interest.events & !(ONE_SHOT | EDGE) == 0;
            if found.len() == most || disarmed || interest.events & EDGE != 0 && interest.seen == Some(wakeups) {
                continue;
            }
            let always = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
            let events = self.events_of(fd)? as u16 as u32 & (interest.events | always);
            let wakeups = self.socket_of(fd).ok().map_or(0, |id| self.sockets[&id].wakeups);
            if let Some(kept) = self.set(set)?.interests.get_mut(&fd) {
                kept.seen = Some(wakeups);
                if events != 0 && kept.events & ONE_SHOT != 0 {
                    kept.events &= ONE_SHOT | EDGE;
                }
            }
            if events != 0 {
                found.push((events, interest.data));
            }
        }
        Ok(found)
    }
}
