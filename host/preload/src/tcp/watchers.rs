//! The threads that wait for a socket, and the epoll sets that contain it, which are notified of its events.

use super::{Tcp, locked};
use crate::epoll::Set;
use crate::few::Few;
use crate::waiter::Waiter;
use libc::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

impl Tcp {
    /// Notifies the socket's waiters and sets of an event. The caller may hold the lock of the session's events.
    #[inline]
    pub fn changed(&self) {
        if self.watchers.load(Ordering::SeqCst) > 0 {
            self.notify_watchers();
        }
    }

    pub(super) fn notify_watchers(&self) {
        // The lists are copied and unlocked: a woken thread takes their locks, and may run at once.
        let waiters: Few<_> = locked(&self.waiters).iter().cloned().collect();
        waiters.iter().for_each(|waiter| waiter.wake());
        let sets: Few<_> = locked(&self.sets).iter().copied().collect();
        sets.iter().for_each(|(set, slot)| set.mark(*slot));
    }

    /// Makes all of the socket's pending events count as new, so that edge-triggered registrations report them again.
    pub fn rearm(&self) {
        self.rearms.fetch_add(1, Ordering::AcqRel);
        self.changed();
    }

    /// As [`Tcp::rearm`], after a connect(2) in the kernel. Wakes the socket's waiters only if the agent manages it:
    /// otherwise the kernel reports its events itself.
    pub fn note_connect(&self) {
        self.rearms.fetch_add(1, Ordering::AcqRel);
        if self.is_managed() {
            self.changed();
        }
    }

    /// Adds a waiter, which is woken at each event.
    pub fn add_waiter(&self, waiter: &Arc<Waiter>) {
        locked(&self.waiters).push(waiter.clone());
        self.watchers.fetch_add(1, Ordering::SeqCst);
    }

    /// Undoes [`Tcp::add_waiter`].
    pub fn remove_waiter(&self, waiter: &Arc<Waiter>) {
        let mut waiters = locked(&self.waiters);
        // Only one entry: another thread may sleep on the same waiter for this socket.
        if let Some(at) = waiters.iter().position(|other| Arc::ptr_eq(other, waiter)) {
            waiters.swap_remove(at);
            self.watchers.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Adds an epoll set that it is in, and its slot there.
    pub fn add_set(&self, set: &'static Set, slot: u32) {
        locked(&self.sets).push((set, slot));
        self.watchers.fetch_add(1, Ordering::AcqRel);
    }

    /// Undoes [`Tcp::add_set`].
    pub fn remove_set(&self, set: &'static Set, slot: u32) {
        self.remove_watchers(&self.sets, |(other, at)| std::ptr::eq(*other, set) && *at == slot);
    }

    /// Adds a descriptor of this library's beside this socket in all of its sets, with the events of the program's
    /// registration.
    pub fn watch_beside(&'static self, ours: c_int) {
        // Not with the list locked: the lock order is set first, then list.
        let sets = locked(&self.sets).clone();
        sets.iter().for_each(|(set, slot)| set.watch_beside(*slot, self, ours));
    }

    /// Undoes [`Tcp::watch_beside`].
    pub fn stop_watching_beside(&self, ours: c_int) {
        let sets = locked(&self.sets).clone();
        sets.iter().for_each(|(set, _)| set.stop_watching_beside(ours));
    }

    pub(super) fn remove_watchers<T>(&self, list: &Mutex<Vec<T>>, which: impl Fn(&T) -> bool) -> Vec<T> {
        let removed: Vec<T> = locked(list).extract_if(.., |watcher| which(watcher)).collect();
        self.watchers.fetch_sub(removed.len() as u32, Ordering::AcqRel);
        removed
    }
}
