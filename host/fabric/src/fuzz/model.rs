//! What a program may expect: which operations are under way, and how each may end.

use super::side::Target;
use crate::abi::{CqEntry, caps, errno, flags};
use std::ffi::{c_int, c_void};

/// Bits of a tag that say nothing of the message's number.
pub const CLASS: u64 = 0xff;
/// What a buffer holds where nothing was received.
pub const UNTOUCHED: u8 = 0xee;
/// Bytes that must be left in a buffer for several messages.
pub const MINIMUM: usize = 64;

/// A message that was sent.
#[derive(Debug)]
pub struct Message {
    pub from: (usize, u32),
    pub to: Target,
    pub tag: Option<u64>,
    pub length: usize,
    /// The order of what has taken it, 0 for its sender; and that was no buffer for several messages.
    pub taken: Option<(u64, bool)>,
}

/// What messages an operation is for.
#[derive(Clone, Copy, Debug)]
pub struct Selector {
    pub source: Option<Target>,
    /// Tag and the bits of it to ignore.
    pub tag: Option<(u64, u64)>,
}

impl Selector {
    pub fn accepts(&self, message: &Message) -> bool {
        let from = Target::Side(message.from.0, message.from.1);
        let tags = match (self.tag, message.tag) {
            (Some((tag, ignore)), Some(has)) => (tag ^ has) & !ignore == 0,
            (None, None) => true,
            _ => false,
        };
        tags && self.source.is_none_or(|source| source == from)
    }
}

#[derive(Clone, Copy, Debug)]
pub enum What {
    Send {
        to: Target,
        message: usize,
    },
    Receive {
        capacity: usize,
        filled: usize,
        several: bool,
    },
    /// FI_PEEK: `takes` with FI_CLAIM or FI_DISCARD.
    Peek {
        claim: bool,
        takes: bool,
    },
    /// The message that was claimed, which nobody has asked for yet.
    Claimed(usize),
    /// FI_CLAIM without FI_PEEK: the message goes into this buffer, or is dropped.
    Claim {
        message: usize,
        capacity: usize,
        discard: bool,
    },
}

#[derive(Debug)]
pub struct Operation {
    pub side: (usize, u32),
    pub what: What,
    pub selector: Selector,
    /// Its memory. It stays where it is.
    pub buffer: Vec<u8>,
    /// Success is reported.
    pub reported: bool,
    pub ended: bool,
    pub cancelled: bool,
    pub order: u64,
}

#[derive(Default)]
pub struct Model {
    pub messages: Vec<Message>,
    /// By context less one.
    pub operations: Vec<Operation>,
    /// An endpoint was closed: what had to do with it may fail.
    pub is_broken: bool,
    pub order: u64,
}

/// The context of an operation.
pub fn context(operation: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(operation + 1)
}

/// The byte of a message at a place.
pub fn byte(message: usize, at: usize) -> u8 {
    ((message * 31 + at * 7 + (at >> 8) * 13) & 0xff) as u8
}

impl Model {
    pub fn enter(&mut self, side: (usize, u32), what: What, selector: Selector, buffer: Vec<u8>, reported: bool) -> usize {
        self.order += 1;
        let order = self.order;
        self.operations.push(Operation { side, what, selector, buffer, reported, ended: false, cancelled: false, order });
        self.operations.len() - 1
    }

    /// A completion of a side's queue. `failed`: its error, and the bytes that had no room.
    pub fn complete(
        &mut self,
        side: (usize, u32),
        entry: &CqEntry,
        source: (u64, Option<Target>),
        failed: Option<(c_int, usize)>,
    ) {
        let at = entry.op_context.addr().wrapping_sub(1);
        let operation = self.operations.get_mut(at).unwrap_or_else(|| panic!("no operation has this context: {entry:?}"));
        baton_fuzz::note!("  {at} ends: {entry:?} {failed:?}");
        assert_eq!(operation.side, side, "whose operation {at} is");
        assert!(!operation.ended, "{at} ends twice: {entry:?} {failed:?}, {:?}", operation.what);
        assert!(operation.reported || failed.is_some(), "{at} is reported without being asked for: {:?}", operation.what);
        let kind = if operation.selector.tag.is_some() { caps::TAGGED } else { caps::MSG };
        let direction = if matches!(operation.what, What::Send { .. }) { caps::SEND } else { caps::RECV };
        assert_eq!(entry.flags & !(flags::REMOTE_CQ_DATA | caps::MULTI_RECV), kind | direction, "{at}");
        match failed {
            Some((error, _)) if error != errno::ETRUNC => return self.fail(at, error, entry.flags),
            // What came into a buffer for several messages before may not have been read yet.
            _ => {
                let several = matches!(operation.what, What::Receive { several: true, .. });
                assert!(!operation.cancelled || several, "{at} was cancelled, and ends as if not: {entry:?}");
            }
        }
        match operation.what {
            What::Send { .. } => operation.ended = true,
            What::Receive { capacity, filled, several } => {
                let taken = self.received(at, entry, source, failed, (filled, capacity - filled));
                self.messages[taken].taken = Some((self.operations[at].order, !several));
                let operation = &mut self.operations[at];
                let filled = filled + entry.len;
                operation.what = What::Receive { capacity, filled, several };
                operation.ended = !several || capacity - filled < MINIMUM;
                assert_eq!(entry.flags & caps::MULTI_RECV != 0, several && operation.ended, "{at}: FI_MULTI_RECV");
            }
            What::Peek { claim, takes } => {
                let found = self.number(at, entry);
                assert_eq!(entry.len, self.messages[found].length, "{at}: what was looked for");
                self.operations[at].ended = !claim;
                if claim {
                    self.operations[at].what = What::Claimed(found);
                }
                if takes {
                    self.messages[found].taken = Some((self.operations[at].order, true));
                }
            }
            What::Claim { discard: true, .. } => operation.ended = true,
            What::Claim { message, capacity, .. } => {
                self.messages[message].taken = None;
                let taken = self.received(at, entry, source, failed, (0, capacity));
                assert_eq!(taken, message, "{at}: what was claimed");
                self.messages[message].taken = Some((self.operations[at].order, true));
                self.operations[at].ended = true;
            }
            What::Claimed(_) => panic!("{at}: nobody has asked for what was claimed"),
        }
    }

    fn fail(&mut self, at: usize, error: c_int, entry_flags: u64) {
        let broken = self.is_broken;
        let operation = &mut self.operations[at];
        let lost = matches!(error, errno::ETIMEDOUT | errno::ECONNRESET | errno::ECONNABORTED);
        let to_nobody =
            matches!(operation.what, What::Send { to: Target::Nobody, .. }) || operation.selector.source == Some(Target::Nobody);
        let allowed = match operation.what {
            What::Peek { .. } => error == errno::ENOMSG,
            _ if error == errno::ECANCELED => operation.cancelled,
            // What has failed in a buffer for several messages before may not have been read yet.
            What::Receive { several: true, .. } => lost && (broken || to_nobody),
            _ => !operation.cancelled && lost && (broken || to_nobody),
        };
        assert!(allowed, "{at} fails with {error}: {:?}, cancelled {}", operation.what, operation.cancelled);
        operation.ended = match operation.what {
            // A buffer for several messages goes on after one that did not come to its end, if it has room for another.
            What::Receive { capacity, filled, several: true } => error == errno::ECANCELED || capacity - filled < MINIMUM,
            _ => true,
        };
        let given_back = operation.ended && matches!(operation.what, What::Receive { several: true, .. });
        assert_eq!(entry_flags & caps::MULTI_RECV != 0, given_back, "{at}: FI_MULTI_RECV of a failure");
    }

    /// The message that a completion is for. It is one for this operation that nothing has taken.
    fn number(&self, at: usize, entry: &CqEntry) -> usize {
        let operation = &self.operations[at];
        let number = if operation.selector.tag.is_some() { entry.tag >> 8 } else { entry.data } as usize;
        let message = self.messages.get(number).unwrap_or_else(|| panic!("{at}: no message has number {number}"));
        assert!(message.taken.is_none(), "{at}: {number} is there twice, {message:?}");
        assert!(operation.selector.accepts(message), "{at}, {:?}: got {message:?}", operation.selector);
        assert_eq!(message.to, Target::Side(operation.side.0, operation.side.1), "{at}: whose message {number} is");
        assert!(message.tag.is_none_or(|tag| tag == entry.tag), "{at}: the tag of {number}");
        number
    }

    /// A message has come to `begin` of an operation's buffer, where there is `room`. Returns its number.
    fn received(
        &mut self,
        at: usize,
        entry: &CqEntry,
        (place, source): (u64, Option<Target>),
        failed: Option<(c_int, usize)>,
        (begin, room): (usize, usize),
    ) -> usize {
        let number = self.number(at, entry);
        let (operation, message) = (&self.operations[at], &self.messages[number]);
        let from = Target::Side(message.from.0, message.from.1);
        assert!(place == u64::MAX || source.is_none_or(|source| source == from), "{at}: {source:?} is the source of {message:?}");
        let placed = message.length.min(room);
        assert_eq!(
            (entry.len, failed.map(|(_, lost)| lost)),
            (placed, Some(message.length - placed).filter(|lost| *lost > 0)),
            "{at}"
        );
        let buffer = &operation.buffer;
        // A buffer of no parts is nowhere.
        let lies = room == 0 && entry.buf.is_null() || entry.buf.addr() == buffer.as_ptr().addr() + begin;
        assert!(lies, "{at}: where {number} lies");
        assert!((0..placed).all(|byte_at| buffer[begin + byte_at] == byte(number, byte_at)), "{at}: the bytes of {number}");
        let several = matches!(operation.what, What::Receive { several: true, .. });
        assert!(
            several || buffer[begin + placed..].iter().take(4096).all(|byte| *byte == UNTOUCHED),
            "{at}: bytes behind {number}"
        );
        number
    }

    /// A message that is taken before one that was sent earlier, although what took it would have had that one.
    pub fn check_order(&self) {
        for (at, later) in self.messages.iter().enumerate() {
            let Some((order, true)) = later.taken else { continue };
            let Some(taker) = self.operations.iter().find(|operation| operation.order == order) else { continue };
            let earlier = self.messages[..at].iter().filter(|message| message.from == later.from && message.to == later.to);
            for earlier in earlier.filter(|message| taker.selector.accepts(message)) {
                let before = earlier.taken.is_some_and(|(taken, _)| taken < order);
                assert!(before, "{later:?} has overtaken {earlier:?}");
            }
        }
    }
}
