//! The operations of an endpoint, and the completion entries that report their ends.

use crate::abi::{CqEntry, caps, errno, flags};
use crate::buffer::ProgramBuffer;
use crate::completion_queue::{Event, NOBODY, QueueShared, failed};
use crate::counter::CounterShared;
use crate::libfabric::{Level, log};
use crate::vector::Addresses;
use baton_messages::{Claim, Completion, Delivered, Driven, Endpoint, Error, Kind, PeerId, Token};
use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

/// In RMPP's 64 bits of data: there is remote CQ data, in the lower 32 bits.
pub const HAS_DATA: u64 = 1 << 63;

/// Keys that this process makes itself need no secret.
pub type Keys = BuildHasherDefault<DefaultHasher>;

/// An operation that has not ended.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    pub context: *mut c_void,
    /// The message's buffer.
    pub buffer: *mut c_void,
    /// Flags of its completion, which say what kind of operation it is.
    pub flags: u64,
    /// Whether success is reported by a completion entry; an error always is.
    pub reported: bool,
    /// The endpoint's number of a posted receive, for fi_cancel().
    pub number: u32,
}

/// The queue in which operations of one direction report their ends.
#[derive(Default)]
pub struct Sink {
    pub queue: Option<Arc<QueueShared>>,
    /// FI_SELECTIVE_COMPLETION: only operations that ask for it are reported.
    pub selective: bool,
}

/// Counters by what they count: fi_endpoint(3), fi_ep_bind().
#[derive(Default)]
pub struct Counters(pub Vec<(u64, Arc<CounterShared>)>);

impl Counters {
    fn count(&self, kind: u64, well: bool) {
        for (kinds, counter) in &self.0 {
            if kinds & kind != 0 {
                counter.count(well);
            }
        }
    }
}

/// An endpoint's state behind its lock.
pub struct State {
    pub endpoint: Endpoint<ProgramBuffer>,
    pub addresses: Option<Arc<Addresses>>,
    /// Peers by their place in the address vector, as far as they were used since an address was last removed from it.
    pub peers: Vec<Option<PeerId>>,
    /// Number of addresses that had been removed then.
    pub removals: u64,
    pub operations: HashMap<Token, Operation, Keys>,
    pub next: Token,
    /// Claimed messages by the context with which they were claimed.
    pub claims: HashMap<usize, Claim, Keys>,
    pub transmit: Sink,
    pub receive: Sink,
    pub counters: Counters,
    /// FI_RMA_EVENT: reads and writes of peers are counted.
    pub rma_events: bool,
}

// SAFETY: the pointers inside are the program's contexts and buffers, which it gets back and nobody follows here.
unsafe impl Send for State {}

impl Driven for State {
    type Buffer = ProgramBuffer;

    fn endpoint(&mut self) -> &mut Endpoint<ProgramBuffer> {
        &mut self.endpoint
    }

    fn deliver(&mut self) {
        while let Some(completion) = self.endpoint.poll_completion() {
            self.end(&completion);
        }
    }
}

impl State {
    /// Enters an operation under a new name.
    pub fn enter(&mut self, operation: Operation) -> Token {
        self.next += 1;
        self.operations.insert(self.next, operation);
        self.next
    }

    /// Whether the success of an operation with these flags is reported.
    pub fn is_reported(sink: &Sink, flags: u64) -> bool {
        !sink.selective || flags & flags::COMPLETION != 0
    }

    /// Reports an operation that has ended well at once.
    pub fn end_at_once(&mut self, operation: &Operation) {
        let entry =
            CqEntry { op_context: operation.context, flags: operation.flags, len: 0, buf: std::ptr::null_mut(), data: 0, tag: 0 };
        self.report(operation, Event::Done(entry, NOBODY));
    }

    /// Reports an operation that could not be carried out, by an error in the completion queue.
    pub fn fail(&mut self, operation: &Operation, error: c_int) {
        let entry =
            CqEntry { op_context: operation.context, flags: operation.flags, len: 0, buf: operation.buffer, data: 0, tag: 0 };
        self.report(operation, failed(entry, 0, error, 0));
    }

    /// Counts the end of an operation, and puts it into its completion queue if it is to be reported.
    pub fn report(&mut self, operation: &Operation, event: Event) {
        let well = matches!(event, Event::Done(..));
        let kinds = caps::SEND | caps::RECV | caps::READ | caps::WRITE | caps::REMOTE_READ | caps::REMOTE_WRITE;
        self.counters.count(operation.flags & kinds, well);
        let sending = operation.flags & (caps::SEND | caps::READ | caps::WRITE) != 0;
        let sink = if sending { &self.transmit } else { &self.receive };
        if let Some(queue) = sink.queue.as_ref().filter(|_| operation.reported || !well) {
            queue.push(event);
        }
    }

    fn end(&mut self, completion: &Completion) {
        let operation = match completion.kind {
            Kind::Part { last: false, .. } => self.operations.get(&completion.token).copied(),
            Kind::Written => {
                let brings_data = completion.result.is_ok_and(|delivered| delivered.data & HAS_DATA != 0);
                self.by_peer(caps::REMOTE_WRITE, brings_data)
            }
            Kind::WasRead => self.by_peer(caps::REMOTE_READ, false),
            _ => self.operations.remove(&completion.token),
        };
        let Some(mut operation) = operation else { return };
        if let Kind::Part { at, last } = completion.kind {
            operation.buffer = operation.buffer.wrapping_byte_add(at as usize);
            operation.flags |= if last { caps::MULTI_RECV } else { 0 };
        }
        let event = match completion.result {
            Ok(delivered) => self.done(&operation, &delivered),
            Err(error) => {
                let error = cause(error, operation.flags);
                let text = error_text(number_of(error)).to_string_lossy();
                log(Level::Info, &format!("endpoint at {}: an operation has failed: {text}", self.endpoint.address()));
                let entry = CqEntry {
                    op_context: operation.context,
                    flags: operation.flags,
                    len: 0,
                    buf: operation.buffer,
                    data: 0,
                    tag: 0,
                };
                failed(entry, 0, error_number(error), number_of(error))
            }
        };
        self.report(&operation, event);
    }

    /// A peer's read or write of our memory is reported if it brings data, and counted if the program wants that.
    fn by_peer(&self, direction: u64, reported: bool) -> Option<Operation> {
        (reported || self.rma_events).then_some(Operation {
            context: std::ptr::null_mut(),
            buffer: std::ptr::null_mut(),
            flags: caps::RMA | direction,
            reported,
            number: 0,
        })
    }

    fn done(&self, operation: &Operation, delivered: &Delivered) -> Event {
        let has_data = delivered.data & HAS_DATA != 0 && operation.flags & (caps::SEND | caps::READ | caps::WRITE) == 0;
        let entry = CqEntry {
            op_context: operation.context,
            flags: operation.flags | if has_data { flags::REMOTE_CQ_DATA } else { 0 },
            len: delivered.placed as usize,
            buf: operation.buffer,
            data: if has_data { delivered.data & 0xffff_ffff } else { 0 },
            tag: if operation.flags & caps::TAGGED != 0 { delivered.tag } else { 0 },
        };
        let lost = delivered.length.saturating_sub(delivered.placed);
        if lost > 0 && operation.flags & caps::RECV != 0 {
            return failed(entry, lost as usize, errno::ETRUNC, TRUNCATED);
        }
        Event::Done(entry, self.place_of(delivered.peer))
    }

    /// The fi_addr_t of a peer.
    pub fn place_of(&self, peer: PeerId) -> u64 {
        let place = || self.addresses.as_ref()?.find(&self.endpoint.peer_address(peer)?);
        place().unwrap_or(NOBODY)
    }

    /// The peer at a place of the address vector.
    pub fn peer(&mut self, place: u64) -> Result<PeerId, c_int> {
        let at = usize::try_from(place).map_err(|_| errno::EINVAL)?;
        let addresses = self.addresses.as_ref().ok_or(errno::EOPBADSTATE)?;
        let removals = addresses.removals();
        if removals != self.removals {
            // A place may have another address now.
            self.peers.clear();
            self.removals = removals;
        }
        if let Some(Some(peer)) = self.peers.get(at) {
            return Ok(*peer);
        }
        let address = addresses.get(place).ok_or(errno::EINVAL)?;
        // Peers of removed addresses give up their places.
        let known = &self.peers;
        let peer = self.endpoint.peer(address, |peer| known.contains(&Some(peer))).map_err(|_| errno::ENOMEM)?;
        if self.peers.len() <= at {
            self.peers.resize(at + 1, None);
        }
        self.peers[at] = Some(peer);
        Ok(peer)
    }
}

/// Our number of a receive that was too short, for fi_cq_strerror().
const TRUNCATED: c_int = 7;

/// Why an operation of this kind has failed. For a read or write `Aborted` means that it was refused; a message is
/// aborted only if its receiver has given it up because no more packets came.
fn cause(error: Error, kind: u64) -> Error {
    match error {
        Error::Aborted if kind & caps::RMA == 0 => Error::NoProgress,
        other => other,
    }
}

fn number_of(error: Error) -> c_int {
    match error {
        Error::PeerDead => 1,
        Error::PeerRestarted => 2,
        Error::PeerClosed => 3,
        Error::Aborted => 4,
        Error::NoProgress => 5,
        Error::Cancelled => 6,
        Error::OtherVersion => 8,
    }
}

fn error_number(error: Error) -> c_int {
    match error {
        Error::PeerDead => errno::ETIMEDOUT,
        Error::PeerRestarted => errno::ECONNRESET,
        Error::PeerClosed => errno::ECONNABORTED,
        Error::Aborted => errno::EKEYREJECTED,
        Error::NoProgress => errno::EIO,
        Error::Cancelled => errno::ECANCELED,
        Error::OtherVersion => errno::EPROTONOSUPPORT,
    }
}

/// What a number in `prov_errno` means.
pub fn error_text(number: c_int) -> &'static CStr {
    match number {
        1 => c"the peer does not answer: its process or host has ended, or the network between has (FI_RMPP_DEAD_MS)",
        2 => c"the peer has been restarted and does not know of this message",
        3 => c"the peer has closed its endpoint",
        4 => c"the peer does not allow this: no such key, or not that address, length or access",
        5 => c"the peer lives, but the message does not get on: packets are lost, or the peers' packets differ (FI_RMPP_PACKET)",
        6 => c"the program has cancelled it",
        8 => c"the peer uses another version of RMPP: install the same Baton on both hosts",
        TRUNCATED => c"the message was longer than the buffer",
        _ => c"no further information",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If a receiver gives up a message, both sides get an error that says so, not one about a missing key.
    #[test]
    fn only_reads_and_writes_are_refused() {
        let number = |kind| error_number(cause(Error::Aborted, kind));
        for kind in [caps::SEND | caps::MSG, caps::SEND | caps::TAGGED, caps::RECV | caps::TAGGED] {
            assert_eq!(number(kind), errno::EIO);
        }
        assert_eq!((number(caps::RMA | caps::WRITE), number(caps::RMA | caps::READ)), (errno::EKEYREJECTED, errno::EKEYREJECTED));
    }
}
