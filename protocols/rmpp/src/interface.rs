//! The interface between the halves: [`Command`]s from the policy to the data half, [`Event`]s back.
//!
//! Both have one fixed size, [`WORDS`] words, so that they can cross a ring in shared memory. Words that are read from
//! a ring are checked field by field: the other process may be an untrusted program, or may have died while it was
//! writing.

use crate::memory::Region;
use baton_wire::Endpoint;
use baton_wire::rmpp::{Header, Kind, PacketFlags, Rts};

/// 64-bit words of a command or event: two cache lines.
pub const WORDS: usize = 16;

/// A half of [`crate::Data`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Half {
    /// Places data, reads RTS and control packets.
    Receiving,
    /// Answers CTS with data, sends RTS and control packets.
    Sending,
}

/// What the policy orders the data half to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// Enters a peer under a number: its address and endpoint, our incarnation and its own. Both halves get it.
    SetPeer {
        /// Number of the peer.
        peer: u16,
        /// Its address.
        address: Endpoint,
        /// Its endpoint.
        endpoint: u16,
        /// Our incarnation towards it.
        local: u32,
        /// Its incarnation.
        remote: u32,
        /// Number of its next message to be matched.
        next: u32,
        /// The lowest number that it may send again.
        floor: u32,
    },
    /// Forgets a peer. Its messages have been released before.
    DropPeer {
        /// Number of the peer.
        peer: u16,
    },
    /// Gives the receiving half a buffer for one RTS packet's data.
    PostBuffer {
        /// Number of the buffer.
        buffer: u16,
    },
    /// Enters a message to send, or enters it again, and sends its RTS.
    Send {
        /// Our handle of the message.
        handle: u32,
        /// Whom it is for.
        peer: u16,
        /// Its number.
        message: u32,
        /// Where it lies.
        region: Region,
        /// Bytes of it that the RTS carries.
        first: u16,
        /// What the RTS says.
        rts: Rts,
        /// How many data packets before the last cleared one the RSM is sent: the paper's k (section 4.4).
        early: u8,
        /// Lowest message number to this peer that is not acknowledged.
        floor: u32,
    },
    /// Sends the RTS of a message again if no CTS has answered it, or nothing was sent of it since the last Resend; its
    /// END if all of it was sent.
    Resend {
        /// Our handle of the message.
        handle: u32,
        /// Lowest message number to this peer that is not acknowledged.
        floor: u32,
        /// The receiver asks for the RTS again: packets that it has cleared before do not count as cleared any more.
        anew: bool,
    },
    /// Enters a message to receive if it is new, clears packets of it, and sends the CTS.
    Clear {
        /// Our handle of the message.
        handle: u32,
        /// The sender.
        peer: u16,
        /// Its number.
        message: u32,
        /// The sender's handle of it.
        sender: u32,
        /// Where the bytes behind the RTS's go. It may be shorter than they are: then the rest is not placed.
        region: Region,
        /// Bytes of the message behind the RTS's.
        rest: u64,
        /// Bytes of each data packet but the last.
        fragment: u16,
        /// Number of wanted data packets: packets whose data reaches into the region.
        packets: u32,
        /// First packet cleared.
        first: u32,
        /// Packets cleared by this CTS.
        count: u16,
        /// Number of packets behind these that the data half may clear by itself when the RSM comes, with further CTS
        /// of up to `count` packets.
        ahead: u32,
        /// Number of the grant. Further CTS get the numbers behind it.
        grant: u16,
    },
    /// Forgets a message. With `confirm`, [`Event::Released`] follows; after that event the data half does not access
    /// the message's memory.
    Release {
        /// Our handle of the message.
        handle: u32,
        /// The half that has the message.
        half: Half,
        /// Whether to answer.
        confirm: bool,
    },
    /// Sends a packet without a body.
    Control {
        /// Address that it goes to.
        to: Endpoint,
        /// The packet.
        header: Header,
    },
    /// Sets which half matches. [`Event::Matcher`] follows, except after [`Matcher::Data`].
    SetMatcher {
        /// Which half matches from now on.
        matcher: Matcher,
    },
    /// Posts a receive to a data half that matches. It takes the oldest unexpected message that it accepts, as the
    /// policy's own matching does.
    Post {
        /// Our handle of the receive.
        receive: u32,
        /// Peer that it accepts messages of; None for any.
        source: Option<u16>,
        /// Context.
        context: u32,
        /// Tag.
        tag: u64,
        /// Bits of the tag that are not compared.
        ignore: u64,
        /// Where the message goes.
        region: Region,
    },
    /// Takes a posted receive back; [`Event::Cancelled`] follows.
    Cancel {
        /// The receive.
        receive: u32,
    },
    /// Enters an unexpected message that the policy knows already.
    Unexpected {
        /// Our handle of the message.
        handle: u32,
        /// Whom it came from.
        peer: u16,
        /// Its context.
        context: u32,
        /// Its tag.
        tag: u64,
    },
    /// Forgets an unexpected message that was claimed or given up.
    Discard {
        /// The message.
        handle: u32,
    },
    /// Lends the data half a handle for a message that it takes up by itself.
    Place {
        /// The handle.
        handle: u32,
    },
    /// Lets the data half clear this many more packets by itself.
    Credit {
        /// Packets.
        packets: u32,
    },
}

/// Which half gives messages to receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Matcher {
    /// The policy: each RTS is reported.
    Policy,
    /// Neither half: each RTS is dropped, as if lost, until the data half knows all receives and unexpected messages.
    Nobody,
    /// The data half.
    Data,
}

impl Matcher {
    fn number(self) -> u64 {
        match self {
            Matcher::Policy => 0,
            Matcher::Nobody => 1,
            Matcher::Data => 2,
        }
    }

    fn from_number(number: u64) -> Option<Matcher> {
        [Matcher::Policy, Matcher::Nobody, Matcher::Data].into_iter().find(|matcher| matcher.number() == number)
    }
}

/// A message that a data half has matched, or keeps as unexpected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrived {
    /// Its sender.
    pub peer: u16,
    /// The data half's view of our incarnation towards the sender, and of the sender's own.
    pub incarnations: [u32; 2],
    /// Number of the message.
    pub message: u32,
    /// The sender's floor.
    pub floor: u32,
    /// The lent handle that it has taken.
    pub handle: u32,
    /// The receive that it was given to; None if it is unexpected.
    pub receive: Option<u32>,
    /// The content of its RTS.
    pub rts: Rts,
    /// Bytes of it that the RTS carried.
    pub first: u16,
    /// The buffer that holds these bytes, if the message is unexpected. Otherwise they are in the receive's region.
    pub buffer: u16,
    /// Packets that were cleared, in grant 1.
    pub count: u16,
}

impl Command {
    /// The half that carries the command out; None for both.
    pub fn half(&self) -> Option<Half> {
        match self {
            Command::SetPeer { .. } | Command::DropPeer { .. } => None,
            Command::PostBuffer { .. }
            | Command::Clear { .. }
            | Command::SetMatcher { .. }
            | Command::Post { .. }
            | Command::Cancel { .. }
            | Command::Unexpected { .. }
            | Command::Discard { .. }
            | Command::Place { .. }
            | Command::Credit { .. } => Some(Half::Receiving),
            Command::Send { .. } | Command::Resend { .. } | Command::Control { .. } => Some(Half::Sending),
            Command::Release { half, .. } => Some(*half),
        }
    }
}

/// What the data half reports to the policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// An RTS came; the message's first bytes are in a buffer, which belongs to the policy now.
    Rts {
        /// Address that it came from.
        from: Endpoint,
        /// Its header.
        header: Header,
        /// What it says.
        rts: Rts,
        /// The buffer.
        buffer: u16,
        /// Bytes in it.
        length: u16,
    },
    /// Another packet without data came.
    Control {
        /// Address that it came from.
        from: Endpoint,
        /// Its header.
        header: Header,
    },
    /// A packet of another version of RMPP came.
    OtherVersion {
        /// Address that it came from.
        from: Endpoint,
        /// Its sender's endpoint.
        source: u16,
        /// Its sender's incarnation.
        incarnation: u32,
        /// It begins an association.
        hello: bool,
    },
    /// The sender asks for the next CTS (RSM).
    More {
        /// The message.
        handle: u32,
        /// All packets before this one have been placed.
        placed: u32,
    },
    /// A packet has come while an earlier one is missing (section 4.2).
    Gap {
        /// The message.
        handle: u32,
        /// All packets before this one have been placed.
        placed: u32,
    },
    /// All packets of the message have been placed.
    Placed {
        /// The message.
        handle: u32,
    },
    /// A message was released; its memory is not touched any more.
    Released {
        /// The message.
        handle: u32,
        /// The half that had the message.
        half: Half,
    },
    /// The data half, which matches, has taken up a message.
    Arrived(Arrived),
    /// A receive is not posted any more. Unless a message that was reported before has got it, it has none.
    Cancelled {
        /// The receive.
        receive: u32,
    },
    /// Answers [`Command::SetMatcher`]: events before this one belong to the previous matcher.
    Matcher(Matcher),
}

/// Writes fields into words, one field a word but for addresses and headers.
struct Writer {
    words: [u64; WORDS],
    at: usize,
}

impl Writer {
    fn new(kind: u64) -> Writer {
        let mut writer = Writer { words: [0; WORDS], at: 0 };
        writer.put(kind);
        writer
    }

    fn put(&mut self, word: u64) -> &mut Self {
        self.words[self.at] = word;
        self.at += 1;
        self
    }

    fn pair(&mut self, low: u32, high: u32) -> &mut Self {
        self.put(u64::from(low) | u64::from(high) << 32)
    }

    fn quad(&mut self, parts: [u16; 4]) -> &mut Self {
        self.put(parts.iter().rev().fold(0, |word, part| word << 16 | u64::from(*part)))
    }

    fn endpoint(&mut self, endpoint: &Endpoint) -> &mut Self {
        let (low, high) = endpoint.address.split_at(8);
        for half in [low, high] {
            self.put(u64::from_le_bytes(half.try_into().expect("eight bytes")));
        }
        self.put(endpoint.port.into())
    }

    fn header(&mut self, header: &Header) -> &mut Self {
        self.quad([header.kind as u16, header.flags.bits(), header.source, header.destination]);
        self.pair(header.from, header.to).pair(header.message, header.packet);
        self.quad([header.grant, header.count, 0, 0]).put(header.handle.into())
    }

    fn rts(&mut self, rts: &Rts) -> &mut Self {
        self.put(rts.length).put(rts.tag).put(rts.data).pair(rts.context, rts.handle)
    }
}

/// Reads fields from words, and notes whether a field was out of range.
struct Reader<'a> {
    words: &'a [u64; WORDS],
    at: usize,
}

impl Reader<'_> {
    fn word(&mut self) -> u64 {
        self.at += 1;
        self.words[self.at - 1]
    }

    fn pair(&mut self) -> (u32, u32) {
        let word = self.word();
        (word as u32, (word >> 32) as u32)
    }

    fn quad(&mut self) -> [u16; 4] {
        let word = self.word();
        core::array::from_fn(|part| (word >> (16 * part)) as u16)
    }

    fn endpoint(&mut self) -> Endpoint {
        let mut address = [0; 16];
        address[..8].copy_from_slice(&self.word().to_le_bytes());
        address[8..].copy_from_slice(&self.word().to_le_bytes());
        Endpoint { address, port: self.word() as u16 }
    }

    fn header(&mut self) -> Option<Header> {
        let [kind, flags, source, destination] = self.quad();
        let kind = Kind::from_number(u8::try_from(kind).ok()?)?;
        let flags = PacketFlags::from_bits(flags)?;
        let ((from, to), (message, packet)) = (self.pair(), self.pair());
        let [grant, count, ..] = self.quad();
        let handle = self.word() as u32;
        Some(Header { kind, flags, source, destination, from, to, message, grant, packet, count, handle })
    }

    fn rts(&mut self, fragment: u16) -> Rts {
        let (length, tag, data) = (self.word(), self.word(), self.word());
        let (context, handle) = self.pair();
        Rts { length, tag, data, context, handle, fragment }
    }
}

fn half_number(half: Half) -> u32 {
    match half {
        Half::Receiving => 0,
        Half::Sending => 1,
    }
}

fn half_from(number: u32) -> Option<Half> {
    match number {
        0 => Some(Half::Receiving),
        1 => Some(Half::Sending),
        _ => None,
    }
}

impl Command {
    /// The command as words.
    pub fn to_words(&self) -> [u64; WORDS] {
        let mut writer;
        match self {
            Command::SetPeer { peer, address, endpoint, local, remote, next, floor } => {
                writer = Writer::new(1);
                writer.quad([*peer, *endpoint, 0, 0]).endpoint(address).pair(*local, *remote).pair(*next, *floor);
            }
            Command::DropPeer { peer } => {
                writer = Writer::new(2);
                writer.put((*peer).into());
            }
            Command::PostBuffer { buffer } => {
                writer = Writer::new(3);
                writer.put((*buffer).into());
            }
            Command::Send { handle, peer, message, region, first, rts, early, floor } => {
                writer = Writer::new(4);
                writer.pair(*handle, *message).quad([*peer, *first, rts.fragment, (*early).into()]).pair(*floor, 0);
                writer.put(region.offset).put(region.length).rts(rts);
            }
            Command::Resend { handle, floor, anew } => {
                writer = Writer::new(5);
                writer.pair(*handle, *floor).put((*anew).into());
            }
            Command::Clear { handle, peer, message, sender, region, rest, fragment, packets, first, count, ahead, grant } => {
                writer = Writer::new(6);
                writer.pair(*handle, *message).pair(*sender, *packets).quad([*peer, *fragment, *count, *grant]);
                writer.pair(*first, *ahead).put(region.offset).put(region.length).put(*rest);
            }
            Command::Release { handle, half, confirm } => {
                writer = Writer::new(7);
                writer.pair(*handle, half_number(*half)).put((*confirm).into());
            }
            Command::Control { to, header } => {
                writer = Writer::new(8);
                writer.endpoint(to).header(header);
            }
            Command::SetMatcher { matcher } => {
                writer = Writer::new(9);
                writer.put(matcher.number());
            }
            Command::Post { receive, source, context, tag, ignore, region } => {
                writer = Writer::new(10);
                writer.pair(*receive, *context).quad([source.unwrap_or(0), source.is_none().into(), 0, 0]);
                writer.put(*tag).put(*ignore).put(region.offset).put(region.length);
            }
            Command::Cancel { receive } => {
                writer = Writer::new(11);
                writer.put((*receive).into());
            }
            Command::Unexpected { handle, peer, context, tag } => {
                writer = Writer::new(12);
                writer.pair(*handle, *context).put((*peer).into()).put(*tag);
            }
            Command::Discard { handle } => {
                writer = Writer::new(13);
                writer.put((*handle).into());
            }
            Command::Place { handle } => {
                writer = Writer::new(14);
                writer.put((*handle).into());
            }
            Command::Credit { packets } => {
                writer = Writer::new(15);
                writer.put((*packets).into());
            }
        }
        writer.words
    }

    /// The command in these words; None if they hold none.
    pub fn from_words(words: &[u64; WORDS]) -> Option<Command> {
        let mut reader = Reader { words, at: 1 };
        Some(match words[0] {
            1 => {
                let [peer, endpoint, ..] = reader.quad();
                let address = reader.endpoint();
                let ((local, remote), (next, floor)) = (reader.pair(), reader.pair());
                Command::SetPeer { peer, address, endpoint, local, remote, next, floor }
            }
            2 => Command::DropPeer { peer: reader.word() as u16 },
            3 => Command::PostBuffer { buffer: reader.word() as u16 },
            4 => {
                let (handle, message) = reader.pair();
                let [peer, first, fragment, early] = reader.quad();
                let (floor, _) = reader.pair();
                let region = Region { offset: reader.word(), length: reader.word() };
                let rts = reader.rts(fragment);
                Command::Send { handle, peer, message, region, first, rts, early: u8::try_from(early).ok()?, floor }
            }
            5 => {
                let (handle, floor) = reader.pair();
                Command::Resend { handle, floor, anew: reader.word() == 1 }
            }
            6 => {
                let ((handle, message), (sender, packets)) = (reader.pair(), reader.pair());
                let [peer, fragment, count, grant] = reader.quad();
                let (first, ahead) = reader.pair();
                let region = Region { offset: reader.word(), length: reader.word() };
                let rest = reader.word();
                Command::Clear { handle, peer, message, sender, region, rest, fragment, packets, first, count, ahead, grant }
            }
            7 => {
                let (handle, half) = reader.pair();
                Command::Release { handle, half: half_from(half)?, confirm: reader.word() == 1 }
            }
            8 => Command::Control { to: reader.endpoint(), header: reader.header()? },
            9 => Command::SetMatcher { matcher: Matcher::from_number(reader.word())? },
            10 => {
                let (receive, context) = reader.pair();
                let [source, any, ..] = reader.quad();
                let (tag, ignore) = (reader.word(), reader.word());
                let region = Region { offset: reader.word(), length: reader.word() };
                Command::Post { receive, source: (any == 0).then_some(source), context, tag, ignore, region }
            }
            11 => Command::Cancel { receive: reader.word() as u32 },
            12 => {
                let (handle, context) = reader.pair();
                Command::Unexpected { handle, context, peer: reader.word() as u16, tag: reader.word() }
            }
            13 => Command::Discard { handle: reader.word() as u32 },
            14 => Command::Place { handle: reader.word() as u32 },
            15 => Command::Credit { packets: reader.word() as u32 },
            _ => return None,
        })
    }
}

impl Event {
    /// The event as words.
    pub fn to_words(&self) -> [u64; WORDS] {
        let mut writer;
        match self {
            Event::Rts { from, header, rts, buffer, length } => {
                writer = Writer::new(1);
                writer.endpoint(from).header(header).rts(rts).quad([*buffer, *length, rts.fragment, 0]);
            }
            Event::Control { from, header } => {
                writer = Writer::new(2);
                writer.endpoint(from).header(header);
            }
            Event::More { handle, placed } => {
                writer = Writer::new(3);
                writer.pair(*handle, *placed);
            }
            Event::Gap { handle, placed } => {
                writer = Writer::new(4);
                writer.pair(*handle, *placed);
            }
            Event::Placed { handle } => {
                writer = Writer::new(5);
                writer.put((*handle).into());
            }
            Event::Released { handle, half } => {
                writer = Writer::new(6);
                writer.pair(*handle, half_number(*half));
            }
            Event::Arrived(arrived) => {
                let Arrived { peer, incarnations: [local, remote], message, floor, handle, receive, rts, .. } = arrived;
                writer = Writer::new(7);
                writer.quad([*peer, arrived.first, rts.fragment, arrived.buffer]).pair(*local, *remote).pair(*message, *floor);
                // No handle is 0.
                writer.pair(*handle, receive.unwrap_or(0)).put(arrived.count.into()).rts(rts);
            }
            Event::Cancelled { receive } => {
                writer = Writer::new(8);
                writer.put((*receive).into());
            }
            Event::Matcher(matcher) => {
                writer = Writer::new(9);
                writer.put(matcher.number());
            }
            Event::OtherVersion { from, source, incarnation, hello } => {
                writer = Writer::new(10);
                writer.endpoint(from).quad([*source, (*hello).into(), 0, 0]).pair(*incarnation, 0);
            }
        }
        writer.words
    }

    /// The event in these words; None if they hold none.
    pub fn from_words(words: &[u64; WORDS]) -> Option<Event> {
        let mut reader = Reader { words, at: 1 };
        Some(match words[0] {
            1 => {
                let (from, header) = (reader.endpoint(), reader.header()?);
                let mut rts = reader.rts(0);
                let [buffer, length, fragment, _] = reader.quad();
                rts.fragment = fragment;
                if header.kind != Kind::Rts || fragment == 0 || u64::from(length) > rts.length {
                    return None;
                }
                Event::Rts { from, header, rts, buffer, length }
            }
            2 => Event::Control { from: reader.endpoint(), header: reader.header()? },
            3 | 4 => {
                let (handle, placed) = reader.pair();
                if words[0] == 3 { Event::More { handle, placed } } else { Event::Gap { handle, placed } }
            }
            5 => Event::Placed { handle: reader.word() as u32 },
            6 => {
                let (handle, half) = reader.pair();
                Event::Released { handle, half: half_from(half)? }
            }
            7 => {
                let [peer, first, fragment, buffer] = reader.quad();
                let ((local, remote), (message, floor)) = (reader.pair(), reader.pair());
                let ((handle, receive), count) = (reader.pair(), reader.word() as u16);
                let rts = reader.rts(fragment);
                if fragment == 0 || u64::from(first) > rts.length {
                    return None;
                }
                let receive = (receive != 0).then_some(receive);
                Event::Arrived(Arrived {
                    peer,
                    incarnations: [local, remote],
                    message,
                    floor,
                    handle,
                    receive,
                    rts,
                    first,
                    buffer,
                    count,
                })
            }
            8 => Event::Cancelled { receive: reader.word() as u32 },
            9 => Event::Matcher(Matcher::from_number(reader.word())?),
            10 => {
                let from = reader.endpoint();
                let [source, hello, ..] = reader.quad();
                let (incarnation, _) = reader.pair();
                Event::OtherVersion { from, source, incarnation, hello: hello == 1 }
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let mut header = Header::new(Kind::Rts, [1, 2], [3, 4]);
        (header.message, header.grant, header.packet, header.count, header.handle) = (5, 6, 7, 8, 9);
        header
    }

    #[test]
    fn commands_read_back() {
        let (address, region) = (Endpoint::v4([10, 0, 0, 1], 7), Region { offset: 1 << 40, length: 12 });
        let rts = Rts { length: 1 << 33, tag: 2, data: 3, context: 4, handle: 5, fragment: 6 };
        let commands = [
            Command::SetPeer { peer: 1, address, endpoint: 2, local: 3, remote: 4, next: 5, floor: 6 },
            Command::DropPeer { peer: 5 },
            Command::PostBuffer { buffer: 6 },
            Command::Send { handle: 1, peer: 2, message: 3, region, first: 4, rts, early: 5, floor: 6 },
            Command::Resend { handle: 1, floor: 2, anew: true },
            Command::Clear {
                handle: 1,
                peer: 2,
                message: 3,
                sender: 4,
                region,
                rest: 1 << 35,
                fragment: 5,
                packets: 6,
                first: 7,
                count: 8,
                ahead: 10,
                grant: 9,
            },
            Command::Release { handle: 1, half: Half::Receiving, confirm: true },
            Command::Release { handle: 1, half: Half::Sending, confirm: false },
            Command::Control { to: address, header: header() },
            Command::SetMatcher { matcher: Matcher::Nobody },
            Command::Post { receive: 1, source: Some(2), context: 3, tag: 4, ignore: 5, region },
            Command::Post { receive: 1, source: None, context: 3, tag: 4, ignore: u64::MAX, region },
            Command::Cancel { receive: 7 },
            Command::Unexpected { handle: 1, peer: 2, context: 3, tag: 4 },
            Command::Discard { handle: 8 },
            Command::Place { handle: 9 },
            Command::Credit { packets: 10 },
        ];
        for command in commands {
            assert_eq!(Command::from_words(&command.to_words()), Some(command));
        }
    }

    #[test]
    fn events_read_back() {
        let from = Endpoint::v6([7; 16], 8);
        let rts = Rts { length: 1 << 33, tag: 2, data: 3, context: 4, handle: 5, fragment: 6 };
        let events = [
            Event::Rts { from, header: header(), rts, buffer: 1, length: 2 },
            Event::Control { from, header: header() },
            Event::More { handle: 1, placed: 2 },
            Event::Gap { handle: 1, placed: 2 },
            Event::Placed { handle: 1 },
            Event::Released { handle: 1, half: Half::Sending },
            Event::Arrived(Arrived {
                peer: 1,
                incarnations: [2, 3],
                message: 4,
                floor: 5,
                handle: 6,
                receive: Some(7),
                rts,
                first: 8,
                buffer: 9,
                count: 10,
            }),
            Event::Cancelled { receive: 1 },
            Event::Matcher(Matcher::Policy),
        ];
        for event in events {
            assert_eq!(Event::from_words(&event.to_words()), Some(event));
        }
    }

    #[test]
    fn words_that_hold_nothing_are_refused() {
        assert_eq!((Command::from_words(&[0; WORDS]), Event::from_words(&[0; WORDS])), (None, None));
        let mut words = Command::Release { handle: 1, half: Half::Sending, confirm: true }.to_words();
        words[1] |= 1 << 40;
        assert_eq!(Command::from_words(&words), None);
        let mut words = Event::Control { from: Endpoint::v4([1; 4], 1), header: header() }.to_words();
        words[4] |= 0xff;
        assert_eq!(Event::from_words(&words), None);
    }
}
