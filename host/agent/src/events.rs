//! The last events of each connection: moves, refusals, deaths of its NIC, growth. They are always recorded, so an
//! event has 24 bytes, and a connection has at most [`MOST`] of them.

use baton_protocol::events::{EventList, Happened, What};
use std::borrow::Borrow;
use std::collections::{HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Most events of a connection; the oldest is dropped.
pub(crate) const MOST: usize = 32;

/// Events for which a list of several has room at first. It doubles up to [`MOST`].
const FIRST: usize = 4;

/// Reasons from which on those that no event has any more are freed.
const MOST_REASONS: usize = 256;

/// Why a connection has moved that nobody has asked for, and one that somebody has.
pub(crate) const AT_RANDOM: &str = "at random";
pub(crate) const ASKED_TO: &str = "asked to";

/// Why a connection has moved to the NIC with its class.
pub(crate) const BY_GAIN: &str = "its class is on the NIC now (baton nic gain)";

/// Why a connection has moved to the NIC that has to be hot enough, and why it has left it.
pub(crate) const BY_HEAT: &str = "it is hot enough (rule hot)";
pub(crate) const GONE_COLD: &str = "it has not been hot enough for some seconds (rule hot)";

/// Why a connection on the NIC is ended whose socket does not have it any more.
pub(crate) const SOCKET_GONE: &str = "its socket was disconnected, closed or destroyed (ss --kill)";

/// Why a connection is in the kernel after a death, or that makes NICs die.
pub(crate) const NIC_DIED: &str = "the NIC died";
pub(crate) const AGENT_DIED: &str = "the agent died";
pub(crate) const KILLS_NIC: &str = "the NIC died each time that it was there";

/// Why a connection is in the kernel that its program has closed.
pub(crate) const CLOSED: &str = "its program has closed it";

/// A reason, shared by all events that have it. A thin pointer: there may be very many events.
#[derive(Clone, Debug)]
pub(crate) struct Reason(Arc<Box<str>>);

impl Reason {
    fn text(&self) -> &str {
        &self.0
    }
}

impl PartialEq for Reason {
    fn eq(&self, other: &Reason) -> bool {
        self.text() == other.text()
    }
}

impl Eq for Reason {}

impl Hash for Reason {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text().hash(state);
    }
}

impl Borrow<str> for Reason {
    fn borrow(&self) -> &str {
        self.text()
    }
}

/// The reasons of all events.
#[derive(Default)]
pub(crate) struct Reasons {
    all: HashSet<Reason>,
    /// Number at which unused ones are freed.
    free_at: usize,
}

impl Reasons {
    /// The shared copy of a reason.
    pub fn shared(&mut self, text: &str) -> Reason {
        if let Some(known) = self.all.get(text) {
            return known.clone();
        }
        if self.all.len() >= self.free_at.max(MOST_REASONS) {
            self.all.retain(|reason| Arc::strong_count(&reason.0) > 1);
            self.free_at = 2 * self.all.len();
        }
        let reason = Reason(Arc::new(text.into()));
        self.all.insert(reason.clone());
        reason
    }
}

/// An event.
pub(crate) struct Event {
    /// Microseconds of the monotonic clock.
    at: u64,
    reason: Option<Reason>,
    /// How long it took, in microseconds; of refusals, how often it came.
    figure: u32,
    what: What,
    /// The NIC's number, or [`NO_NIC`].
    nic: u8,
}

/// No NIC has this number.
const NO_NIC: u8 = u8::MAX;

/// Two events or more, at most [`MOST`].
pub(crate) struct Ring(VecDeque<Event>);

/// The last events of a connection. Most connections move once and stay: those need no memory of their own for that.
#[derive(Default)]
pub(crate) enum Events {
    #[default]
    None,
    One(Event),
    Many(Box<Ring>),
}

// There is one of these for each connection, and there may be 32 times as many events.
const _: () = assert!(size_of::<Event>() <= 24 && size_of::<Events>() <= 24);

impl Events {
    /// Records what has happened at `now`, microseconds of the monotonic clock. `took`: since when it was under way.
    pub fn note(&mut self, now: u64, what: What, nic: Option<u8>, reason: Option<Reason>, took: u64) {
        let nic = nic.unwrap_or(NO_NIC);
        // What is tried again and again, and refused for the same reason, must not push out everything else.
        if what.repeats()
            && let Some(last) = self.newest()
            && last.what == what
            && last.reason == reason
            && last.nic == nic
        {
            (last.at, last.figure) = (now, last.figure.saturating_add(1));
            return;
        }
        let figure = if what.repeats() { 1 } else { u32::try_from(took).unwrap_or(u32::MAX) };
        self.push(Event { at: now, reason, figure, what, nic });
    }

    fn push(&mut self, event: Event) {
        match std::mem::take(self) {
            Events::None => *self = Events::One(event),
            Events::One(first) => {
                let mut many = VecDeque::with_capacity(FIRST);
                many.extend([first, event]);
                *self = Events::Many(Box::new(Ring(many)));
            }
            Events::Many(mut ring) => {
                if ring.0.len() >= MOST {
                    ring.0.pop_front();
                }
                ring.0.push_back(event);
                *self = Events::Many(ring);
            }
        }
    }

    fn newest(&mut self) -> Option<&mut Event> {
        match self {
            Events::None => None,
            Events::One(event) => Some(event),
            Events::Many(ring) => ring.0.back_mut(),
        }
    }

    fn all(&self) -> impl DoubleEndedIterator<Item = &Event> {
        let (one, many) = match self {
            Events::None => (None, None),
            Events::One(event) => (Some(event), None),
            Events::Many(ring) => (None, Some(ring.0.iter())),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }

    /// What happened last.
    pub fn last(&self) -> Option<What> {
        self.all().next_back().map(|event| event.what)
    }

    /// The events, oldest first, at `now`. Their reasons are put behind those that are there.
    pub fn list(&self, now: u64, all: &mut EventList) -> Vec<Happened> {
        let happened = |event: &Event| Happened {
            ago_us: now.saturating_sub(event.at),
            what: event.what,
            nic: Some(event.nic).filter(|nic| *nic != NO_NIC),
            reason: event.reason.as_ref().map(|reason| all.number_of(reason.text())),
            figure: event.figure,
        };
        self.all().map(happened).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(events: &Events, now: u64) -> Vec<(u64, What, String, u32)> {
        let mut all = EventList::default();
        let list = events.list(now, &mut all);
        let reason = |at: Option<u32>| at.map_or(String::new(), |at| all.reasons[at as usize].clone());
        list.into_iter().map(|one| (one.ago_us, one.what, reason(one.reason), one.figure)).collect()
    }

    #[test]
    fn events_stand_in_order() {
        let (mut events, mut reasons) = (Events::default(), Reasons::default());
        assert_eq!(events.last(), None);
        events.note(100, What::ToNic, Some(0), Some(reasons.shared("asked to")), 40);
        events.note(200, What::NicDied, Some(0), Some(reasons.shared("it crashed")), 0);
        events.note(300, What::ToKernel, Some(0), Some(reasons.shared("the NIC died")), 90);
        assert_eq!(events.last(), Some(What::ToKernel));
        assert_eq!(
            texts(&events, 1300),
            [
                (1200, What::ToNic, "asked to".into(), 40),
                (1100, What::NicDied, "it crashed".into(), 0),
                (1000, What::ToKernel, "the NIC died".into(), 90),
            ]
        );
    }

    #[test]
    fn only_the_last_ones_are_kept() {
        let (mut events, mut reasons) = (Events::default(), Reasons::default());
        for at in 0..1000 {
            let what = if at % 2 == 0 { What::ToNic } else { What::ToKernel };
            events.note(at, what, None, Some(reasons.shared("at random")), 1);
        }
        let list = texts(&events, 1000);
        assert_eq!(list.len(), MOST);
        assert_eq!((list[0].0, list[MOST - 1].0), (MOST as u64, 1));
        let Events::Many(ring) = &events else { panic!("one event") };
        assert_eq!(ring.0.capacity(), MOST);
    }

    #[test]
    fn refusals_that_repeat_are_counted() {
        let (mut events, mut reasons) = (Events::default(), Reasons::default());
        events.note(0, What::ToNic, None, None, 5);
        for at in 1..=70 {
            events.note(at, What::StayedInKernel, None, Some(reasons.shared("it is full")), 0);
        }
        events.note(71, What::StayedInKernel, None, Some(reasons.shared("it is busy")), 0);
        let list = texts(&events, 80);
        assert_eq!(list[1], (10, What::StayedInKernel, "it is full".into(), 70));
        assert_eq!(list[2], (9, What::StayedInKernel, "it is busy".into(), 1));
        assert_eq!(list.len(), 3);
    }

    /// Reasons may be programs' own texts: those that no event has any more are freed.
    #[test]
    fn unused_reasons_are_freed() {
        let mut reasons = Reasons::default();
        let kept = reasons.shared("kept");
        for at in 0..10_000 {
            let _ = reasons.shared(&format!("reason {at}"));
        }
        assert!(reasons.all.len() <= MOST_REASONS, "{}", reasons.all.len());
        assert!(Arc::ptr_eq(&kept.0, &reasons.shared("kept").0));
    }
}
