//! What is woken when something has happened to a socket: threads that wait for it, and epoll sets that it is in.

use super::{Tcp, locked};
use crate::epoll::Set;
use crate::few::Few;
use crate::waiter::Waiter;
use libc::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

impl Tcp {
    /// Notifies waiters and sets that something has happened to it. The caller may hold the lock of the session's
    /// events.
    #[inline]
    pub fn changed(&self) {
        if self.watchers.load(Ordering::SeqCst) > 0 {
            self.notify_watchers();
        }
    }

    pub(super) fn notify_watchers(&self) {
        // Not with the lists locked: who is woken needs them, and the system may go on with him at once.
        let waiters: Few<_> = locked(&self.waiters).iter().cloned().collect();
        waiters.iter().for_each(|waiter| waiter.wake());
        let sets: Few<_> = locked(&self.sets).iter().copied().collect();
        sets.iter().for_each(|(set, slot)| set.mark(*slot));
    }

    /// Makes all that the socket is ready for count as new, so that edge-triggered registrations report it again.
    pub fn rearm(&self) {
        self.rearms.fetch_add(1, Ordering::AcqRel);
        self.changed();
    }

    /// As [`Tcp::rearm`], of a socket that the kernel has just connected, or begun to: what it reports of that it
    /// reports by itself, as long as the connection is there.
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
        // One entry only: another thread may sleep on the same one for this socket.
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

    /// Has every set that it is in watch a descriptor of this library's, too, with the program's own registration of
    /// this socket.
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
