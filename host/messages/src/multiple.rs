//! Buffers that receive one message after the other (libfabric: FI_MULTI_RECV).
//!
//! RMPP's receives take one message each. Of the buffers with the same selector the oldest has a receive posted, for
//! the part of it that is still empty; when that completes, the next one is posted.

use crate::arena::{Arena, Buffer, Slot};
use crate::endpoint::{Completion, Endpoint, Incoming, Kind, Purpose, Selector, Token};
use crate::spill::Taker;
use baton_rmpp::{Delivered, Error, PeerId, ReceiveId, Region};

/// What a buffer waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// An older buffer has the receive.
    Idle,
    /// A message, with a receive of RMPP.
    Posted(ReceiveId),
    /// The rest of a message that was taken out ([`crate::spill`]).
    Taking,
}

/// A buffer for several messages.
#[derive(Debug)]
struct Shared {
    token: Token,
    selector: Selector,
    /// Its place in the arena.
    slot: u32,
    length: u64,
    /// Bytes that are filled.
    filled: u64,
    /// With fewer bytes left, it is given back.
    minimum: u64,
    state: State,
}

/// Buffers for several messages, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Multiple {
    buffers: Vec<Shared>,
    /// A receive is to be posted.
    pub due: bool,
}

impl Multiple {
    /// The peers from which alone buffers receive.
    pub fn peers(&self) -> impl Iterator<Item = PeerId> {
        self.buffers.iter().filter_map(|buffer| buffer.selector.peer)
    }
}

impl<B: Buffer> Endpoint<B> {
    /// Gives a buffer for several messages. It is given back when fewer than `minimum` bytes of it are left.
    pub fn receive_multiple(&mut self, incoming: Incoming<B>, minimum: u64, now: u64) {
        let Incoming { selector, buffer, token } = incoming;
        let length = buffer.length();
        let slot = self.arena.insert(Slot::Program(buffer));
        let (minimum, state) = (minimum.max(1), State::Idle);
        self.multiple.buffers.push(Shared { token, selector, slot, length, filled: 0, minimum, state });
        self.multiple.due = true;
        self.exchange(now);
    }

    /// Posts the receives that are due. Returns whether any was posted or got a message.
    pub(crate) fn post_multiple(&mut self, now: u64) -> bool {
        if !std::mem::take(&mut self.multiple.due) {
            return false;
        }
        let mut any = false;
        let mut at = 0;
        while let Some((earlier, [buffer, ..])) = self.multiple.buffers.split_at_mut_checked(at) {
            at += 1;
            let Shared { selector, slot, length, filled, .. } = *buffer;
            if buffer.state != State::Idle || earlier.iter().any(|other| other.selector == selector) {
                continue;
            }
            buffer.state = State::Taking;
            if self.take_spilled(&selector, Taker::Part(slot)) {
                // The message is there already, and the buffer perhaps not any more; or it will be there later.
                (any, at) = (true, 0);
                continue;
            }
            let region = Arena::<B>::region(slot, filled, length - filled);
            let posted = self.post(selector, region, slot, now);
            let Some(buffer) = self.multiple.buffers.iter_mut().find(|buffer| buffer.slot == slot) else { continue };
            match posted {
                Ok(id) => {
                    buffer.state = State::Posted(id);
                    self.set_purpose(slot, Purpose::Part);
                    any = true;
                }
                // There is no room for a receive: again when others have ended.
                Err(_) => (buffer.state, self.multiple.due) = (State::Idle, true),
            }
        }
        any
    }

    /// What is not filled of the buffer at a place.
    pub(crate) fn rest_of_multiple(&self, slot: u32) -> Region {
        let buffer = self.multiple.buffers.iter().find(|buffer| buffer.slot == slot);
        let [filled, length] = buffer.map_or([0, 0], |buffer| [buffer.filled, buffer.length]);
        Arena::<B>::region(slot, filled, length - filled)
    }

    /// A message has come into the buffer at `slot`, or its receive has ended otherwise.
    pub(crate) fn finish_part(&mut self, slot: u32, result: Result<Delivered, Error>) {
        let Some(at) = self.multiple.buffers.iter().position(|buffer| buffer.slot == slot) else { return };
        let buffer = &mut self.multiple.buffers[at];
        let (token, begin) = (buffer.token, buffer.filled);
        buffer.state = State::Idle;
        buffer.filled += result.as_ref().map_or(0, |delivered| delivered.placed);
        let last = buffer.length - buffer.filled < buffer.minimum || matches!(result, Err(Error::Cancelled));
        if last {
            self.multiple.buffers.remove(at);
            self.arena.remove(slot);
        }
        self.completions.push_back(Completion { token, kind: Kind::Part { at: begin, last }, result });
        self.multiple.due = true;
    }

    /// Takes a buffer back, unless a message is coming into it.
    pub(crate) fn cancel_multiple(&mut self, token: Token) -> bool {
        let Some(at) = self.multiple.buffers.iter().position(|buffer| buffer.token == token) else { return false };
        let Shared { slot, state, filled, .. } = self.multiple.buffers[at];
        match state {
            State::Posted(id) => return self.policy.cancel(id),
            State::Taking => return false,
            State::Idle => {}
        }
        self.multiple.buffers.remove(at);
        self.arena.remove(slot);
        let kind = Kind::Part { at: filled, last: true };
        self.completions.push_back(Completion { token, kind, result: Err(Error::Cancelled) });
        true
    }
}
