//! The interest list and the ready list of epoll(7), for sockets whose events come from the kernel at one time and from
//! the NIC at another. Kernel and NIC are behind the trait [`World`], so that this file can be tested against a model
//! of both.
//!
//! The kernel's registration of a socket carries a *token* of this library's instead of the program's data. A token
//! stands for one call of epoll_ctl: each call makes a new one, and an event with an older one is dropped. Nothing is
//! lost by that, because the kernel checks the socket anew whenever it is registered or modified. So after each move
//! the library modifies the socket's registration, and events that the kernel reported during the move are dropped.
//!
//! While a connection is on the NIC, the kernel's registration has no events (it is *muted*), and what the socket is
//! ready for is computed from the NIC's events. For a socket in the kernel this library adds the events that the kernel
//! does not know of. Registrations to check are in a queue, each at most once; level-triggered ones that were reported
//! go to its end.
//!
//! A second descriptor, of this library's, may be watched *beside* a file: the events of both are reported as one event
//! of the file's registration.

use libc::{
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLERR, EPOLLET, EPOLLEXCLUSIVE, EPOLLHUP, EPOLLIN, EPOLLONESHOT, EPOLLOUT,
    EPOLLPRI, EPOLLRDHUP, EPOLLRDNORM, EPOLLWRNORM, c_int, epoll_event,
};
use std::collections::{BTreeMap, VecDeque};

/// The kernel reports these whether asked for or not.
const ALWAYS: u32 = (EPOLLERR | EPOLLHUP) as u32;
const EDGE: u32 = EPOLLET as u32;
const ONE_SHOT: u32 = EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = EPOLLEXCLUSIVE as u32;
const READABLE: u32 = (EPOLLIN | EPOLLRDNORM) as u32;
const WRITABLE: u32 = (EPOLLOUT | EPOLLWRNORM) as u32;
/// Events that end one direction or both. An error that ends a connection comes with EPOLLHUP.
const ENDS: u32 = (EPOLLRDHUP | EPOLLHUP) as u32;
const ERROR: u32 = EPOLLERR as u32;
/// The events and flags of a file's registration that a descriptor beside it is registered with.
const OF_BESIDE: u32 = READABLE | EDGE | ONE_SHOT | EXCLUSIVE;

/// The highest 23 bits of a token, with which neither an address of the program's nor a small number begins. Below
/// them: one bit that is set for a descriptor beside the file, 20 bits that count the calls of epoll_ctl, and 20 bits
/// for the slot.
const TAG: u64 = 0xba_702e << 40;
const TAG_BITS: u64 = 0xff_fffe << 40;
const BESIDE: u64 = 1 << 40;
const VERSION_BITS: u32 = 20;
const SLOT_BITS: u32 = 20;

/// Whether a kernel event's data is a token.
pub(crate) fn is_token(data: u64) -> bool {
    data & TAG_BITS == TAG
}

fn token(slot: u32, version: u32) -> u64 {
    TAG | u64::from(version) << SLOT_BITS | u64::from(slot)
}

fn next(version: u32) -> u32 {
    (version + 1) & ((1 << VERSION_BITS) - 1)
}

/// Where a watched file's events come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Kernel,
    Nic,
    /// In the middle of a move: the events of neither kernel nor NIC count.
    Moving,
    /// The file is an epoll set itself. The kernel reports when the kernel's part of it is to be checked; the library
    /// computes the rest, as for a connection on the NIC.
    Set,
}

/// Counters of what has happened on a socket. An edge-triggered registration reports again when one has changed since
/// its last report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Progress {
    /// Bytes that have arrived in total (wraps).
    pub received: u32,
    /// Number of sends that found no room.
    pub stuck: u32,
    /// Number of calls after which the kernel reports a socket's events again.
    pub rearms: u32,
    /// Completions of sends that this library has numbered in total (wraps).
    pub completions: u32,
}

/// What an interest list needs of kernel and NIC.
pub(crate) trait World {
    /// A watched file.
    type File: Copy + PartialEq;
    /// Where the file is, and how many moves it has begun or made. If a file is in the kernel and this number is the
    /// same as before, it has not left the kernel meanwhile.
    fn place(&mut self, file: Self::File) -> (Place, u32);
    /// Events that a file on the NIC is ready for; of a set, those due to connections on the NIC.
    fn on_nic(&mut self, file: Self::File) -> u32;
    /// Events that a file in the kernel is ready for and that the kernel does not know of.
    fn beside_kernel(&mut self, file: Self::File) -> u32;
    /// The file's [`Progress`].
    fn progress(&mut self, file: Self::File, fd: c_int) -> Progress;
    /// Whether the file may ever be on the NIC.
    fn may_move(&mut self, file: Self::File) -> bool;
    /// For a file that is a set: whether its kernel's set has anything to report.
    fn set_is_ready(&mut self, file: Self::File) -> bool;
    /// Events that the kernel's set reports now, as epoll_wait(2) without waiting. Returns how many.
    fn report(&mut self, out: &mut [epoll_event]) -> usize;
    /// epoll_ctl(2) on the kernel's set. Returns whether it succeeded.
    fn register(&mut self, operation: c_int, fd: c_int, events: u32, data: u64) -> bool;
}

/// Progress at the last report of an edge-triggered registration.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    received: Option<u32>,
    stuck: Option<u32>,
    completions: Option<u32>,
    rearms: u32,
    end: bool,
}

#[derive(Clone, Copy, Debug)]
struct Registration<F> {
    fd: c_int,
    file: F,
    events: u32,
    data: u64,
    /// A one-shot registration (EPOLLONESHOT) that has reported and is not armed again.
    spent: bool,
    /// The kernel's registration has no events.
    muted: bool,
    /// A kernel event was dropped that the kernel will not report again by itself.
    dropped: bool,
    /// The kernel was made to report again, perhaps an event that the program has got already.
    repeated: bool,
    seen: Seen,
    /// Progress at the last notification of those who watch this set from outside.
    noted: Seen,
    /// Moves that the connection had made when it was last registered in the kernel. If it has made more, what the
    /// kernel has reported since does not count.
    moves: u32,
    /// The round in which it was last reported, and its index in the program's array.
    reported: (u64, usize),
    /// The version of its slot when it was added.
    since: u32,
    /// The descriptor that is watched beside the file.
    beside: Option<c_int>,
}

#[derive(Debug)]
struct Slot<F> {
    version: u32,
    /// Whether the slot is in the queue; an unused slot may be.
    queued: bool,
    used: Option<Registration<F>>,
}

impl<F> Registration<F> {
    /// The events that the program's own registration would have in the kernel now.
    fn programs(&self) -> u32 {
        if self.spent { self.events & EDGE | ONE_SHOT } else { self.events }
    }
}

/// The interest list; see the module.
#[derive(Debug)]
pub(crate) struct Interest<F> {
    slots: Vec<Slot<F>>,
    free: Vec<u32>,
    /// Slots by descriptor, ordered so that nothing depends on hashing. If a descriptor was closed while its file
    /// stayed open, the registration keeps its slot but has no entry here.
    by_fd: BTreeMap<c_int, u32>,
    queue: VecDeque<u32>,
    /// Entries of the queue that this round has not checked yet.
    unseen: usize,
    round: u64,
    /// Whether the kernel's events came first the last time that there was room for one event only.
    kernel_first: bool,
    /// A file that was checked in this round and is being moved.
    pub moving: Option<F>,
    /// In this round a registration was changed to match its connection's place; the kernel may report its events only
    /// from now on.
    pub renewed: bool,
    /// Files whose descriptor beside them has hung up and is no longer counted. The caller handles the hang-up.
    pub ended: Vec<F>,
}

impl<F> Default for Interest<F> {
    fn default() -> Self {
        Interest {
            slots: Vec::new(),
            free: Vec::new(),
            by_fd: BTreeMap::new(),
            queue: VecDeque::new(),
            unseen: 0,
            round: 0,
            kernel_first: false,
            moving: None,
            renewed: false,
            ended: Vec::new(),
        }
    }
}

impl<F: Copy + PartialEq> Interest<F> {
    fn used(&mut self, slot: u32) -> Option<&mut Registration<F>> {
        self.slots.get_mut(slot as usize)?.used.as_mut()
    }

    fn take_slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { version: 0, queued: false, used: None });
            self.slots.len() as u32 - 1
        })
    }

    /// The slot registered under a descriptor, if it is this file's.
    pub fn find(&self, fd: c_int, file: F) -> Option<u32> {
        let slot = *self.by_fd.get(&fd)?;
        self.slots[slot as usize].used.as_ref().is_some_and(|known| known.file == file).then_some(slot)
    }

    /// Watches a descriptor of the caller's beside a file, unless the file has one already. If the descriptor is
    /// readable, the file counts as readable.
    pub fn watch_beside<W: World<File = F>>(&mut self, world: &mut W, slot: u32, file: F, ours: c_int) {
        let Some(known) = self.used(slot).filter(|known| known.file == file && known.beside.is_none()) else { return };
        if world.register(EPOLL_CTL_ADD, ours, known.programs() & OF_BESIDE, token(slot, known.since) | BESIDE) {
            known.beside = Some(ours);
        }
    }

    /// Undoes [`Interest::watch_beside`].
    pub fn stop_watching_beside<W: World<File = F>>(&mut self, world: &mut W, ours: c_int) {
        let all = self.slots.iter_mut().filter_map(|place| place.used.as_mut());
        all.filter(|known| known.beside == Some(ours)).for_each(|known| known.beside = None);
        world.register(EPOLL_CTL_DEL, ours, 0, 0);
    }

    /// All files in the set, with their slots.
    pub fn files(&self) -> impl Iterator<Item = (u32, F)> {
        let used = |(at, slot): (usize, &Slot<F>)| Some((at as u32, slot.used.as_ref()?.file));
        self.slots.iter().enumerate().filter_map(used)
    }

    /// EPOLL_CTL_ADD and EPOLL_CTL_MOD. Returns the slot, or None if the kernel refused.
    pub fn set<W: World<File = F>>(
        &mut self,
        world: &mut W,
        operation: c_int,
        fd: c_int,
        file: F,
        (events, data): (u32, u64),
    ) -> Option<u32> {
        let known = self.find(fd, file);
        let (place, moves) = world.place(file);
        let exclusive = (events | known.and_then(|slot| self.used(slot)).map_or(0, |known| known.events)) & EXCLUSIVE != 0;
        // The kernel refuses to modify an exclusive registration, so it is registered as asked first, and muted
        // afterwards.
        let muted = place == Place::Nic && !exclusive;
        let slot = known.unwrap_or_else(|| self.take_slot());
        let place_of = &mut self.slots[slot as usize];
        let stays = operation == EPOLL_CTL_MOD && muted && place_of.used.as_ref().is_some_and(|known| known.muted);
        if !stays {
            let version = next(place_of.version);
            if !world.register(operation, fd, if muted { EDGE } else { events }, token(slot, version)) {
                if known.is_none() {
                    self.free.push(slot);
                }
                return None;
            }
            place_of.version = version;
        }
        let seen = Seen { rearms: world.progress_if_edge(file, fd, events).rearms, ..Seen::default() };
        let added = ((0, 0), place_of.version, None);
        let (reported, since, beside) = place_of.used.as_ref().map_or(added, |known| (known.reported, known.since, known.beside));
        place_of.used = Some(Registration {
            fd,
            file,
            events,
            data,
            spent: false,
            muted,
            dropped: false,
            repeated: false,
            seen,
            noted: Seen::default(),
            moves,
            reported,
            since,
            beside,
        });
        if let Some(ours) = beside {
            world.register(EPOLL_CTL_MOD, ours, events & OF_BESIDE, token(slot, since) | BESIDE);
        }
        self.by_fd.insert(fd, slot);
        if place != Place::Kernel && place != Place::Set || world.beside_kernel(file) != 0 {
            self.enqueue(slot);
        }
        Some(slot)
    }

    /// EPOLL_CTL_DEL. Returns whether the kernel accepted, and the slot that is free now, if any.
    pub fn delete<W: World<File = F>>(&mut self, world: &mut W, fd: c_int, file: F) -> (bool, Option<u32>) {
        let done = world.register(EPOLL_CTL_DEL, fd, 0, 0);
        let slot = self.find(fd, file).filter(|_| done);
        let gone = slot.and_then(|slot| self.drop_slot(slot));
        if let Some(ours) = gone.and_then(|(gone, _)| gone.beside) {
            world.register(EPOLL_CTL_DEL, ours, 0, 0);
        }
        (done, slot)
    }

    /// Frees a slot. Returns its registration, and whether the registration's descriptor still refers to its file.
    fn drop_slot(&mut self, slot: u32) -> Option<(Registration<F>, bool)> {
        let place = self.slots.get_mut(slot as usize)?;
        let gone = place.used.take()?;
        place.version = next(place.version);
        self.free.push(slot);
        let numbered = self.by_fd.get(&gone.fd) == Some(&slot);
        if numbered {
            self.by_fd.remove(&gone.fd);
        }
        Some((gone, numbered))
    }

    /// As `drop_slot`, if the slot is this file's. None also if the descriptor refers to another file by now, since the
    /// kernel's registration then cannot be changed.
    fn drop_file(&mut self, slot: u32, file: F) -> Option<Registration<F>> {
        self.used(slot).filter(|known| known.file == file)?;
        self.drop_slot(slot).and_then(|(gone, numbered)| numbered.then_some(gone))
    }

    /// Removes a file whose last descriptor in this process is about to be closed. Another process may have it open
    /// (the agent does): then the kernel would keep its registration.
    pub fn forget<W: World<File = F>>(&mut self, world: &mut W, slot: u32, file: F) {
        if let Some(gone) = self.drop_file(slot, file) {
            world.register(EPOLL_CTL_DEL, gone.fd, 0, 0);
        }
    }

    /// Removes a file that will be closed without this library's knowledge: the kernel gets the program's own
    /// registration.
    pub fn release<W: World<File = F>>(&mut self, world: &mut W, slot: u32, file: F) {
        if let Some(gone) = self.drop_file(slot, file) {
            change(world, gone.fd, gone.events, gone.programs(), gone.data);
            if let Some(ours) = gone.beside {
                change(world, ours, gone.events, gone.programs() & OF_BESIDE, gone.data);
            }
        }
    }

    /// Gives the kernel the program's own registration of every file.
    pub fn release_all<W: World<File = F>>(&mut self, world: &mut W) {
        let files: Vec<(u32, F)> = self.files().collect();
        for (slot, file) in files {
            self.release(world, slot, file);
        }
    }

    /// Handles the closing of one of several descriptors of a file. Returns whether the file is registered under that
    /// descriptor. As in the kernel, such a registration stays in the set as long as the file is open, but can no
    /// longer be modified.
    pub fn remove_number(&mut self, slot: u32, fd: c_int) -> bool {
        let known = self.used(slot).is_some_and(|known| known.fd == fd);
        known && self.by_fd.get(&fd) == Some(&slot) && self.by_fd.remove(&fd).is_some()
    }

    /// Queues a slot for a check.
    pub fn enqueue(&mut self, slot: u32) {
        if let Some(place) = self.slots.get_mut(slot as usize)
            && place.used.is_some()
            && !place.queued
        {
            place.queued = true;
            self.queue.push_back(slot);
        }
    }

    /// Whether anything is queued for a check.
    pub fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Changes the kernel's registration to match where the connection is. Returns where it is.
    pub fn settle<W: World<File = F>>(&mut self, world: &mut W, slot: u32) -> Option<Place> {
        let place_of = self.slots.get_mut(slot as usize)?;
        let known = place_of.used.as_mut()?;
        let (place, moves) = world.place(known.file);
        let mute = match place {
            Place::Nic if !known.muted => true,
            Place::Kernel | Place::Set if known.muted || known.dropped || known.moves != moves => false,
            _ => return Some(place),
        };
        known.moves = moves;
        known.muted = mute;
        known.dropped = false;
        known.repeated = !mute;
        // A one-shot registration that has reported is silent until it is armed again. The kernel would report some
        // events nevertheless, but only once.
        let events = match () {
            // EPOLLEXCLUSIVE is kept, so that the kernel goes on refusing what it refuses.
            () if mute => EDGE | known.events & EXCLUSIVE,
            () if known.spent => known.events & EDGE | ONE_SHOT,
            () => known.events,
        };
        // Only if the descriptor still refers to this file: it may have been closed and reused.
        if self.by_fd.get(&known.fd) == Some(&slot) {
            place_of.version = next(place_of.version);
            change(world, known.fd, known.events, events, token(slot, place_of.version));
            self.renewed |= !mute;
        }
        Some(place)
    }

    /// Collects all events that can be reported without waiting. None if nothing on the NIC is ready: then the caller
    /// can wait for the kernel. Connections on the NIC and descriptors in the kernel get half of the room each, or take
    /// turns if there is room for one event; room that one side does not need goes to the other. `own` gets the data of
    /// events that may come from the caller's own descriptors, and returns whether they do. Returns the number of
    /// events.
    pub fn gather<W: World<File = F>>(&mut self, world: &mut W, out: &mut [epoll_event], own: impl FnMut(u64) -> bool) -> usize {
        self.begin();
        if self.queue.is_empty() {
            return 0;
        }
        let mut share = out.len().div_ceil(2);
        if out.len() == 1 {
            self.kernel_first = !self.kernel_first;
            share = usize::from(!self.kernel_first);
        }
        let first = self.collect(world, out, 0, share);
        if first == 0 && share > 0 {
            return 0;
        }
        let end = if first < out.len() { first + world.report(&mut out[first..]) } else { first };
        let second = self.sift(world, out, first, end, own);
        self.collect(world, out, second, usize::MAX)
    }

    /// Filters the kernel's `got` events in `out`, and adds what is ready on the NIC. Returns the number of events.
    pub fn take_in<W: World<File = F>>(
        &mut self,
        world: &mut W,
        out: &mut [epoll_event],
        got: usize,
        own: impl FnMut(u64) -> bool,
    ) -> usize {
        self.begin();
        let count = self.sift(world, out, 0, got, own);
        self.collect(world, out, count, usize::MAX)
    }

    /// Begins a round: all events that are collected and filtered until the next call go into one array of the
    /// program's.
    fn begin(&mut self) {
        self.round += 1;
        self.unseen = self.queue.len();
        self.moving = None;
        self.renewed = false;
    }

    /// Writes events that the kernel does not report after the first `filled` events of `out`, at most `most` of them.
    /// Returns the new number of events.
    fn collect<W: World<File = F>>(&mut self, world: &mut W, out: &mut [epoll_event], mut filled: usize, most: usize) -> usize {
        let end = out.len().min(filled.saturating_add(most));
        while filled < end && self.unseen > 0 {
            self.unseen -= 1;
            let Some(slot) = self.queue.pop_front() else { break };
            self.slots[slot as usize].queued = false;
            if self.used(slot).is_none_or(|known| known.spent && known.muted) {
                continue;
            }
            let place = match self.settle(world, slot) {
                // Its registration is changed when the move is over.
                Some(Place::Moving) => {
                    self.moving = self.used(slot).map(|known| known.file);
                    self.enqueue(slot);
                    continue;
                }
                Some(place) => place,
                None => continue,
            };
            let Some(known) = self.used(slot) else { continue };
            let events = world.unreported(place, known.file) & (known.events | ALWAYS);
            if known.spent || events == 0 || known.is_edge() && !known.has_edge(world, events) {
                continue;
            }
            known.note_reported(world, events);
            let (again, data, reported) = (!known.is_edge() && !known.spent, known.data, known.reported);
            if reported.0 == self.round {
                // The kernel has reported this file in this round as well, before it moved or without the events that
                // the kernel does not know of.
                out[reported.1].events |= events;
            } else {
                out[filled] = epoll_event { events, u64: data };
                self.note_place(slot, filled);
                filled += 1;
            }
            if again {
                self.enqueue(slot);
            }
        }
        filled
    }

    fn note_place(&mut self, slot: u32, at: usize) {
        let round = self.round;
        if let Some(known) = self.used(slot) {
            known.reported = (round, at);
        }
    }

    /// Filters the kernel's events in `out[first..end]`: drops those that do not count, and puts the program's data
    /// into the others. Returns the new number of events.
    fn sift<W: World<File = F>>(
        &mut self,
        world: &mut W,
        out: &mut [epoll_event],
        first: usize,
        end: usize,
        mut own: impl FnMut(u64) -> bool,
    ) -> usize {
        let mut filled = first;
        for at in first..end {
            let event = out[at];
            let data = event.u64;
            if !is_token(data) {
                if !own(data) {
                    out[filled] = event;
                    filled += 1;
                }
                continue;
            }
            let Some((slot, events, data)) = self.judge(world, data, event.events) else { continue };
            let reported = self.used(slot).map_or((0, 0), |known| known.reported);
            if reported.0 == self.round {
                out[reported.1].events |= events;
            } else {
                out[filled] = epoll_event { events, u64: data };
                self.note_place(slot, filled);
                filled += 1;
            }
        }
        filled
    }

    /// The slot of a token, unless a newer token was made for it.
    fn slot_of(&self, token: u64) -> Option<u32> {
        let (slot, version) = (token as u32 & ((1 << SLOT_BITS) - 1), (token >> SLOT_BITS) as u32 & ((1 << VERSION_BITS) - 1));
        let place = self.slots.get(slot as usize)?;
        let known = place.used.as_ref()?;
        let newest = if token & BESIDE == 0 { place.version } else { known.since };
        (newest == version).then_some(slot)
    }

    /// The program's data for a token, in a process that has inherited the kernel's set, and this list as it was at the
    /// fork.
    pub fn translate(&self, token: u64) -> Option<u64> {
        let slot = self.slot_of(token)?;
        self.slots[slot as usize].used.as_ref().map(|known| known.data)
    }

    /// Whether a descriptor is watched beside the file that is registered under this one. In a process that has
    /// inherited the kernel's set: whether that was so at the fork.
    pub fn has_beside(&self, fd: c_int) -> bool {
        let slot = self.by_fd.get(&fd).and_then(|slot| self.slots.get(*slot as usize));
        slot.and_then(|slot| slot.used.as_ref()).is_some_and(|known| known.beside.is_some())
    }

    /// The slot, events and data of a kernel event, without the events that do not count. None if none is left.
    fn judge<W: World<File = F>>(&mut self, world: &mut W, token: u64, events: u32) -> Option<(u32, u32, u64)> {
        let slot = self.slot_of(token)?;
        if token & BESIDE != 0 {
            return self.judge_beside(slot, events);
        }
        let known = self.used(slot)?;
        if known.muted {
            self.enqueue(slot);
            return None;
        }
        if known.spent {
            return None;
        }
        let mut events = events & (known.events | ALWAYS);
        let place = world.place(known.file);
        match place {
            (Place::Set, _) if !world.set_is_ready(known.file) => {
                known.dropped |= known.events & ONE_SHOT != 0;
                events = 0;
            }
            (Place::Set, _) => {}
            (Place::Kernel, moves) if moves == known.moves => events |= world.beside_kernel(known.file),
            (place, _) => {
                // The event may be from the middle of a move, when the socket is disconnected for a moment. If it is
                // true, the kernel reports it again when the registration is changed.
                events = 0;
                let file = known.file;
                known.dropped |= place == Place::Moving;
                if place == Place::Moving {
                    self.moving = Some(file);
                }
            }
        }
        if events == 0 {
            self.enqueue(slot);
            return None;
        }
        let known = self.used(slot)?;
        let is_repeated = std::mem::take(&mut known.repeated) && place.0 != Place::Set;
        if is_repeated && known.is_edge() && !known.has_edge(world, events) {
            known.dropped |= known.events & ONE_SHOT != 0;
            self.enqueue(slot);
            return None;
        }
        known.note_reported(world, events);
        Some((slot, events, known.data))
    }

    /// As `judge`, for an event of the descriptor beside a file.
    fn judge_beside(&mut self, slot: u32, events: u32) -> Option<(u32, u32, u64)> {
        let known = self.used(slot).filter(|known| known.beside.is_some())?;
        if events & EPOLLHUP as u32 != 0 {
            // A hang-up makes it readable, too.
            let file = known.file;
            self.ended.push(file);
            return None;
        }
        let events = events & known.events & READABLE;
        if known.spent || events == 0 {
            return None;
        }
        known.spent = known.events & ONE_SHOT != 0;
        Some((slot, events, known.data))
    }

    /// Whether there is an event to report that the kernel does not know of: of a connection on the NIC, of a set that
    /// contains one, or of a connection in the kernel. Sets `moving` if a file is being moved.
    pub fn is_ready<W: World<File = F>>(&mut self, world: &mut W) -> bool {
        self.moving = None;
        for slot in &self.queue {
            let Some(known) = self.slots[*slot as usize].used.as_ref().filter(|known| !known.spent) else { continue };
            let place = world.place(known.file).0;
            if place == Place::Moving {
                self.moving = Some(known.file);
            }
            let events = world.unreported(place, known.file) & (known.events | ALWAYS);
            if events != 0 && (!known.is_edge() || known.has_edge(world, events)) {
                return true;
            }
        }
        false
    }

    /// Whether a slot has had a new event since the last call: one that the kernel does not report, and that an
    /// edge-triggered registration of this set has to.
    pub fn has_new_events<W: World<File = F>>(&mut self, world: &mut W, slot: u32) -> bool {
        let Some(known) = self.used(slot).filter(|known| !known.spent) else { return false };
        let place = world.place(known.file).0;
        let events = world.unreported(place, known.file) & (known.events | ALWAYS);
        if place == Place::Moving || place == Place::Kernel && events == 0 {
            return false;
        }
        let now = world.progress(known.file, known.fd);
        let has_new_events = events != 0 && known.noted.lacks(now, events);
        known.noted.note(now, events);
        has_new_events
    }

    /// Changes the kernel's registrations of all files to match where they are. Returns whether any was changed, and a
    /// file that is being moved.
    pub fn settle_all<W: World<File = F>>(&mut self, world: &mut W) -> (bool, Option<F>) {
        let (mut is_changed, mut moving) = (false, None);
        for slot in 0..self.slots.len() as u32 {
            let Some(known) = self.used(slot) else { continue };
            let (file, before) = (known.file, (known.muted, known.moves));
            match world.place(file) {
                (Place::Set, _) => continue,
                (Place::Moving, _) => moving = Some(file),
                (_, moves) => {
                    self.settle(world, slot);
                    let Some(known) = self.used(slot) else { continue };
                    known.moves = moves;
                    is_changed |= before != (known.muted, moves);
                }
            }
        }
        (is_changed, moving)
    }
}

/// Changes a kernel registration that the program made with `asked` events.
fn change<W: World + ?Sized>(world: &mut W, fd: c_int, asked: u32, events: u32, data: u64) {
    if asked & EXCLUSIVE != 0 {
        // The kernel refuses to modify it.
        world.register(EPOLL_CTL_DEL, fd, 0, 0);
        world.register(EPOLL_CTL_ADD, fd, events, data);
    } else {
        world.register(EPOLL_CTL_MOD, fd, events, data);
    }
}

trait WorldExtension: World {
    /// Events that a file in this place is ready for and that the kernel does not report.
    fn unreported(&mut self, place: Place, file: Self::File) -> u32 {
        match place {
            Place::Nic | Place::Set => self.on_nic(file),
            Place::Kernel => self.beside_kernel(file),
            Place::Moving => 0,
        }
    }

    fn progress_if_edge(&mut self, file: Self::File, fd: c_int, events: u32) -> Progress {
        if events & EDGE != 0 && self.may_move(file) { self.progress(file, fd) } else { Progress::default() }
    }
}

impl<W: World + ?Sized> WorldExtension for W {}

impl<F: Copy + PartialEq> Registration<F> {
    fn is_edge(&self) -> bool {
        self.events & EDGE != 0
    }

    /// Whether an edge-triggered registration has something new to report.
    fn has_edge<W: World<File = F>>(&self, world: &mut W, events: u32) -> bool {
        self.seen.lacks(world.progress(self.file, self.fd), events)
    }

    fn note_reported<W: World<File = F>>(&mut self, world: &mut W, events: u32) {
        self.spent = self.events & ONE_SHOT != 0;
        if self.is_edge() && world.may_move(self.file) {
            self.seen.note(world.progress(self.file, self.fd), events);
        }
    }
}

impl Seen {
    /// Whether these events are new.
    fn lacks(&self, now: Progress, events: u32) -> bool {
        let end = events & ENDS != 0;
        if end && !self.end || self.rearms != now.rearms {
            return true;
        }
        if events & READABLE != 0 && self.received != Some(now.received) && !(end && self.end) {
            return true;
        }
        if events & ERROR != 0 && self.completions != Some(now.completions) {
            return true;
        }
        events & WRITABLE != 0 && self.stuck != Some(now.stuck)
    }

    fn note(&mut self, now: Progress, events: u32) {
        if self.rearms != now.rearms {
            // Earlier reports count no more: the end may have been that of an earlier connection.
            *self = Seen { rearms: now.rearms, ..Seen::default() };
        }
        if events & (READABLE | EPOLLPRI as u32) != 0 {
            self.received = Some(now.received);
        }
        self.end |= events & ENDS != 0;
        if events & ERROR != 0 {
            self.completions = Some(now.completions);
        }
        if events & WRITABLE != 0 {
            self.stuck = Some(now.stuck);
        }
    }
}
