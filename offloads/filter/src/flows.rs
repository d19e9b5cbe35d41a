//! The flows of TCP and UDP, and fragmented datagrams: in which directions frames of each flow have been accepted, and
//! which rule decided last.
//!
//! A flow of TCP lasts as long as this host keeps sending. Frames from the wire may come from any host, so they neither
//! keep a flow alive nor end it by an RST. It ends soon after FINs in both directions, or an RST of this host, unless
//! this host goes on.
//!
//! A flow is found by a keyed hash of 64 bits of its addresses, protocol and ports. The hash stands for the flow: two
//! flows with the same hash are taken for one. With a full table that happens once in 2^45 new flows, and an attacker
//! who does not know the key cannot provoke it. An entry is four words, written and read one at a time by any worker:
//!
//! | word | |
//! |---|---|
//! | 0 | the hash; 0 if the entry is free |
//! | 1, lower half | bits 0, 1: accepted in, out; 2: TCP; 3, 4: FIN in, out; 5: RST out; 6 to 31: last seen, seconds |
//! | 1, upper half | upper half of the hash |
//! | 2, 3 | in, out: rule that decided plus one (16 bits), the table's generation (24), lower bits of the hash (24) |
//!
//! Words 1 to 3 repeat bits of the hash, so that an entry which another worker replaces between two reads does not
//! count.

use crate::packet::{Direction, Step};
use crate::words::{FIRST_FLOW, FLOW, FLOWS};
use core::sync::atomic::{AtomicU64, Ordering};

/// Entries among which a flow can be.
const WAYS: usize = 8;
/// Seconds after which a flow of UDP, or of TCP, that nothing has been seen of is forgotten.
const UDP_IDLE: u32 = 180;
const TCP_IDLE: u32 = 3 * 3600;
/// Idle time after which a flow ends once FINs have passed in both directions (TIME-WAIT lasts 60 s), and after an RST
/// of this host.
const CLOSED_IDLE: u32 = 120;
const RESET_IDLE: u32 = 10;
const SEEN: u64 = 3;
const TCP_BIT: u64 = 4;
const FINS_AT: u32 = 3;
const FINS: u64 = 3 << FINS_AT;
const RESET: u64 = 1 << 5;
const SECONDS_AT: u32 = 6;
const SECONDS_MASK: u64 = (1 << 26) - 1;

/// The kind of a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Tcp,
    Udp,
    /// A fragmented datagram; it lasts as long as a flow of UDP.
    Datagram,
}

/// The flows, in words that workers share.
pub(crate) struct Flows<'a>(pub &'a [AtomicU64]);

/// An entry as it was found.
#[derive(Clone, Copy)]
pub(crate) struct Found {
    at: usize,
    hash: u64,
    state: u64,
}

fn bit(direction: Direction) -> u64 {
    1 << direction as u64
}

fn idle(state: u64, second: u32) -> u32 {
    second.wrapping_sub((state >> SECONDS_AT & SECONDS_MASK) as u32) & SECONDS_MASK as u32
}

/// Seconds of silence after which a flow is forgotten.
fn patience(state: u64) -> u32 {
    match state {
        state if state & TCP_BIT == 0 => UDP_IDLE,
        state if state & RESET != 0 => RESET_IDLE,
        state if state & FINS == FINS => CLOSED_IDLE,
        _ => TCP_IDLE,
    }
}

fn is_over(state: u64, second: u32) -> bool {
    idle(state, second) > patience(state)
}

impl Found {
    /// Whether frames have been accepted in the direction opposite to this one.
    pub fn is_answer(&self, direction: Direction) -> bool {
        self.state & (bit(Direction::In) | bit(Direction::Out)) & !bit(direction) != 0
    }
}

impl Flows<'_> {
    fn word(&self, at: usize, word: usize) -> &AtomicU64 {
        &self.0[FIRST_FLOW + at * FLOW + word]
    }

    fn set_of(hash: u64) -> usize {
        hash as usize % (FLOWS / WAYS) * WAYS
    }

    /// Finds a flow that was seen not too long before `second`. `hash` is not 0.
    #[inline]
    pub fn find(&self, hash: u64, second: u32) -> Option<Found> {
        let first = Self::set_of(hash);
        let at = (first..first + WAYS).find(|at| self.word(*at, 0).load(Ordering::Relaxed) == hash)?;
        let state = self.word(at, 1).load(Ordering::Acquire);
        (state >> 32 == hash >> 32 && !is_over(state, second)).then_some(Found { at, hash, state })
    }

    /// The rule that decided about the last frame of a flow in this direction, if it did so in this generation of the
    /// table.
    #[inline]
    pub fn decided(&self, found: &Found, direction: Direction, generation: u32) -> Option<Option<u16>> {
        let word = self.word(found.at, 2 + direction as usize).load(Ordering::Relaxed);
        let (rule, of, tag) = (word as u16, word >> 16 & 0xff_ffff, word >> 40);
        (word != 0 && of == u64::from(generation & 0xff_ffff) && tag == found.hash & 0xff_ffff).then(|| rule.checked_sub(1))
    }

    /// Notes the rule that decided (None: no rule matched).
    pub fn decide(&self, found: &Found, direction: Direction, generation: u32, rule: Option<u16>) {
        let rule = rule.map_or(0, |rule| u64::from(rule) + 1);
        let word = rule | u64::from(generation & 0xff_ffff) << 16 | (found.hash & 0xff_ffff) << 40;
        self.word(found.at, 2 + direction as usize).store(word, Ordering::Relaxed);
    }

    /// Notes that a frame has been accepted. An opening segment is the first of a new flow, even if an entry with its
    /// hash exists.
    #[inline]
    pub fn accepted(&self, hash: u64, found: Option<Found>, direction: Direction, step: Step, kind: Kind, second: u32) -> Found {
        let now = (u64::from(second) & SECONDS_MASK) << SECONDS_AT;
        let known = found.filter(|_| step != Step::Opens).map(|found| found.state);
        let (ours, tcp) = (direction == Direction::Out, kind == Kind::Tcp);
        let mut bits = known.unwrap_or(0) & (SEEN | FINS | RESET) | bit(direction) | if tcp { TCP_BIT } else { 0 };
        match step {
            Step::Closes => bits |= bit(direction) << FINS_AT,
            Step::Resets if ours => bits |= RESET,
            _ if ours => bits &= !RESET,
            _ => {}
        }
        // The first RST begins the time that is left.
        let keeps = !tcp || ours && (step != Step::Resets || known.is_none_or(|state| state & RESET == 0));
        let seen = known.filter(|_| !keeps).map_or(now, |state| state & SECONDS_MASK << SECONDS_AT);
        let state = bits | seen | hash >> 32 << 32;
        let Some(found) = found else { return self.insert(hash, state, second) };
        if found.state != state {
            // If another worker has replaced the entry since, it stays as it is.
            let _ = self.word(found.at, 1).compare_exchange(found.state, state, Ordering::Release, Ordering::Relaxed);
        }
        Found { state, ..found }
    }

    /// Enters a flow in place of the entry that is needed least.
    fn insert(&self, hash: u64, state: u64, second: u32) -> Found {
        let first = Self::set_of(hash);
        let need = |at: &usize| {
            let (of, state) = (self.word(*at, 0).load(Ordering::Relaxed), self.word(*at, 1).load(Ordering::Relaxed));
            if of == 0 || of == hash || is_over(state, second) {
                return (0, 0);
            }
            // Flows that were answered stay longest: a flood of forged first packets only displaces its like.
            (1 + u32::from(state & SEEN == SEEN && patience(state) != CLOSED_IDLE), u32::MAX - idle(state, second))
        };
        let at = (first..first + WAYS).min_by_key(need).unwrap_or(first);
        self.word(at, 1).store(0, Ordering::Relaxed);
        (2..FLOW).for_each(|word| self.word(at, word).store(0, Ordering::Relaxed));
        self.word(at, 0).store(hash, Ordering::Relaxed);
        self.word(at, 1).store(state, Ordering::Release);
        Found { at, hash, state }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::WORDS;
    use alloc::vec::Vec;
    use core::iter::repeat_with;

    fn words() -> Vec<AtomicU64> {
        repeat_with(|| AtomicU64::new(0)).take(WORDS).collect()
    }

    #[test]
    fn a_flow_is_established_once_it_was_answered() {
        let words = words();
        let flows = Flows(&words);
        assert!(flows.find(77, 10).is_none());
        flows.accepted(77, None, Direction::Out, Step::Opens, Kind::Tcp, 10);
        let found = flows.find(77, 10).expect("entered");
        assert!(found.is_answer(Direction::In) && !found.is_answer(Direction::Out));
        flows.accepted(77, Some(found), Direction::In, Step::Continues, Kind::Tcp, 11);
        let found = flows.find(77, 11).expect("entered");
        assert!(found.is_answer(Direction::In) && found.is_answer(Direction::Out));
        assert_eq!(flows.decided(&found, Direction::In, 1), None);
        flows.decide(&found, Direction::In, 1, Some(4));
        flows.decide(&found, Direction::Out, 1, None);
        assert_eq!(flows.decided(&found, Direction::In, 1), Some(Some(4)));
        assert_eq!(flows.decided(&found, Direction::Out, 1), Some(None));
        assert_eq!(flows.decided(&found, Direction::In, 2), None, "another table");
        // Another SYN: a new flow.
        flows.accepted(77, Some(found), Direction::In, Step::Opens, Kind::Tcp, 12);
        assert!(!flows.find(77, 12).expect("entered").is_answer(Direction::In));
        assert!(flows.find(77, 12 + TCP_IDLE).is_some() && flows.find(77, 13 + TCP_IDLE).is_none());
    }

    struct Talk {
        words: Vec<AtomicU64>,
    }

    impl Talk {
        /// An established flow, last seen in second 1.
        fn new() -> Talk {
            let talk = Talk { words: words() };
            talk.say(Direction::Out, Step::Opens, 1);
            talk.say(Direction::In, Step::Continues, 1);
            talk
        }

        fn say(&self, direction: Direction, step: Step, second: u32) {
            let flows = Flows(&self.words);
            flows.accepted(77, flows.find(77, second), direction, step, Kind::Tcp, second);
        }

        fn lives_at(&self, second: u32) -> bool {
            Flows(&self.words).find(77, second).is_some_and(|found| found.is_answer(Direction::In))
        }
    }

    #[test]
    fn a_flow_lasts_as_long_as_this_host_sends() {
        let talk = Talk::new();
        (2..TCP_IDLE).step_by(100).for_each(|second| talk.say(Direction::In, Step::Continues, second));
        assert!(talk.lives_at(1 + TCP_IDLE) && !talk.lives_at(2 + TCP_IDLE), "frames from the wire do not keep it");
        let talk = Talk::new();
        talk.say(Direction::Out, Step::Continues, TCP_IDLE);
        assert!(talk.lives_at(2 * TCP_IDLE));
    }

    #[test]
    fn fins_in_both_directions_and_a_reset_of_this_host_end_a_flow() {
        use Direction::{In, Out};
        let talk = Talk::new();
        talk.say(In, Step::Resets, 2);
        talk.say(In, Step::Closes, 2);
        assert!(talk.lives_at(1 + TCP_IDLE), "anybody can send those");
        talk.say(Out, Step::Closes, 10);
        assert!(talk.lives_at(10 + CLOSED_IDLE) && !talk.lives_at(11 + CLOSED_IDLE));
        let talk = Talk::new();
        talk.say(Out, Step::Closes, 10);
        assert!(talk.lives_at(10 + TCP_IDLE), "one half goes on");
        talk.say(In, Step::Closes, 20);
        talk.say(Out, Step::Continues, 100);
        assert!(talk.lives_at(100 + CLOSED_IDLE), "this host goes on");

        let talk = Talk::new();
        talk.say(Out, Step::Resets, 10);
        assert!(talk.lives_at(10 + RESET_IDLE) && !talk.lives_at(11 + RESET_IDLE));
        let talk = Talk::new();
        talk.say(Out, Step::Resets, 10);
        talk.say(Out, Step::Resets, 15);
        talk.say(In, Step::Continues, 16);
        assert!(!talk.lives_at(11 + RESET_IDLE), "neither its resets nor what they answer keep it");
        let talk = Talk::new();
        talk.say(Out, Step::Resets, 10);
        talk.say(Out, Step::Continues, 11);
        assert!(talk.lives_at(11 + TCP_IDLE), "it has begun anew, or that was another's");
    }

    #[test]
    fn a_flood_of_first_packets_displaces_its_like() {
        let words = words();
        let flows = Flows(&words);
        let step = (FLOWS / WAYS) as u64;
        let established = 5 + (1 << 40);
        let found = flows.accepted(established, None, Direction::Out, Step::Opens, Kind::Tcp, 1);
        flows.accepted(established, Some(found), Direction::In, Step::Continues, Kind::Tcp, 1);
        for number in 1..100 {
            flows.accepted(5 + number * step, None, Direction::In, Step::Opens, Kind::Tcp, 2 + number as u32);
        }
        assert!(flows.find(established, 110).is_some_and(|found| found.is_answer(Direction::In)));
        assert!(flows.find(5 + 99 * step, 110).is_some() && flows.find(5 + step, 110).is_none());
    }
}
