//! The agent's journal: written before each step of a move, it holds what the next agent could not find out by itself.
//! An entry lies in the connection's slot, which programs do not see; its first word is written last.

use crate::connection::{Exported, Handoff, Memory, OnNic};
use baton_abi::layout::{nic, scratch, slot};
use baton_abi::{Cid, Message};
use baton_core::Notice;
use baton_handoff::shell::Saved;
use baton_image::{Image, MAX_ENCODED, MAX_SHORT};
use baton_moves::Phase;
use baton_ring::Consumer;
use baton_shm::{Region, RingWords};
use baton_wire::Flow;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;

/// In place of a phase: the NIC has made the connection for a listener, and no program has accepted it. What [`Made`]
/// holds follows; image and flow are the NIC's, in scratch and slot.
const MADE: u32 = Phase::Sending as u32 + 1;

/// A connection that waits to be accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Made {
    pub cid: Cid,
    pub listener: u32,
    /// The NIC has made it from a SYN cookie, and it has not been found out whether the kernel has it already.
    pub by_cookie: bool,
}

/// What an entry begins with: all that matters while the connection's socket is being read. Session, connection, cid,
/// and the socket's settings.
type Beginning = (u32, u32, u32, Saved);

/// An entry of the journal: the fields of [`Beginning`] first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub session: u32,
    pub connection: u32,
    pub cid: u32,
    pub saved: Saved,
    /// Send and receive memory: offset and size each.
    pub memory: [u32; 4],
    /// The image that was handed off, in its short form; its 4-tuple is the slot's.
    image: Vec<u8>,
    #[serde(skip)]
    pub flow: Option<Flow>,
    pub handed_off_at: u64,
}

impl Entry {
    pub fn new(session: u32, connection: u32, cid: Cid, saved: Saved) -> Entry {
        Entry { session, connection, cid: cid.0, saved, memory: [0; 4], image: Vec::new(), flow: None, handed_off_at: 0 }
    }

    /// Whether the other one has the same [`Beginning`].
    fn begins_as(&self, other: &Entry) -> bool {
        let names = |entry: &Entry| (entry.session, entry.connection, entry.cid);
        names(self) == names(other) && self.saved == other.saved
    }

    /// Completes the entry of a connection whose bytes have been copied.
    pub fn copied(mut self, image: &Image, memory: Memory, at: u64) -> Entry {
        let mut bytes = [0u8; MAX_SHORT];
        let length = image.shorten(None, &mut bytes).unwrap_or(0);
        (self.image, self.flow) = (bytes[..length].to_vec(), Some(image.flow));
        self.memory = [memory.receive.0, memory.receive.1, memory.send.0, memory.send.1];
        self.handed_off_at = at;
        self
    }

    /// The device of the connection's flow.
    pub fn device(&self) -> u32 {
        self.flow.map_or(0, |flow| flow.device)
    }

    pub fn memory(&self) -> Memory {
        let [receive, receive_size, send, send_size] = self.memory;
        Memory { receive: (receive, receive_size), send: (send, send_size) }
    }

    /// Returns what the connection came with. None if the entry is damaged.
    fn exported(&self) -> Option<Exported> {
        let (image, _) = Image::lengthen(&self.image, self.flow?).ok()?;
        // The NIC can write here.
        if !self.saved.is_plausible() {
            return None;
        }
        Some(Exported { image, handed_off_at: self.handed_off_at, saved: self.saved.clone() })
    }

    /// Returns the agent's state of a connection on the NIC, and what it was handed off with. None if the entry is
    /// damaged.
    pub fn on_nic(&self) -> Option<(OnNic, Handoff)> {
        let exported = self.exported()?;
        Some((OnNic::new(&exported.image, self.memory(), None)?, Handoff::new(exported)))
    }
}

fn place(at: u32) -> usize {
    nic::slot(at) + slot::JOURNAL
}

/// Offset of an entry of this many bytes: in the slot if it fits there.
fn entry_at(at: u32, length: usize) -> usize {
    if length <= slot::JOURNAL_BYTES - 8 { place(at) + 8 } else { nic::scratch(at) + scratch::JOURNAL }
}

/// Returns the pages of a slot's scratch to the system, if neither the journal nor posted buffers use them. For a
/// connection that rests, whose image was read, and with nothing out of order.
pub(crate) fn return_scratch(nic_memory: &Region, at: u32) {
    let length = nic_memory.word32(place(at) + 4).load(Ordering::Acquire) as usize;
    let posted = nic_memory.word32(nic::slot(at) + slot::POSTED).load(Ordering::Acquire) != 0;
    if length <= slot::JOURNAL_BYTES - 8 && !posted {
        nic_memory.discard(nic::scratch(at), nic::SCRATCH_BYTES);
    }
}

/// Writes an entry, and who has its slot: whoever goes on with the move by the entry asks the NIC. Returns false if it
/// is too long, which only a huge socket filter of the program can cause.
#[must_use]
pub(crate) fn write(nic_memory: &Region, phase: Phase, entry: &Entry) -> bool {
    let base = place(Cid(entry.cid).slot());
    let Some(length) = put(nic_memory, entry) else { return false };
    nic_memory.word32(base + 4).store(length, Ordering::Release);
    nic_memory.word32(base).store(phase as u32, Ordering::Release);
    true
}

/// Writes an entry's bytes, which count as soon as length and phase say so. Returns how many they are; None if they are
/// too many. What says that the connection's socket is being read counts until then: without it nobody would know of a
/// socket that is in repair mode. Its bytes that matter ([`Beginning`]) are the first ones of this entry, too, or lie
/// elsewhere. No other entry counts meanwhile, so that a half-written one is not read.
fn put(nic_memory: &Region, entry: &Entry) -> Option<u32> {
    let cid = Cid(entry.cid);
    note_occupant(nic_memory, cid, (entry.session, entry.connection));
    let bytes = postcard::to_stdvec(entry).ok().filter(|bytes| bytes.len() <= scratch::JOURNAL_BYTES)?;
    let before = read(nic_memory, cid.nic(), cid.slot());
    let goes_on = before.is_some_and(|(phase, before)| phase == Phase::Reading && before.begins_as(entry));
    if !goes_on {
        nic_memory.word32(place(cid.slot())).store(0, Ordering::Release);
        nic_memory.word32(grown_at(cid.slot())).store(0, Ordering::Release);
    }
    nic_memory.write(entry_at(cid.slot(), bytes.len()), &bytes).ok()?;
    Some(bytes.len() as u32)
}

fn grown_at(at: u32) -> usize {
    nic::slot(at) + slot::GROWN
}

fn grown_copy(at: u32, copy: u32) -> usize {
    grown_at(at) + 4 + (copy as usize - 1) * slot::GROWN_WORDS * 4
}

/// Updates cid and memory of an entry, whose other fields stay valid.
pub(crate) fn grown(nic_memory: &Region, at: u32, cid: Cid, memory: Memory) {
    let counts = nic_memory.word32(grown_at(at));
    // The copy that is not valid is written, and becomes valid after that.
    let copy = if counts.load(Ordering::Acquire) == 1 { 2 } else { 1 };
    let words = [cid.0, memory.receive.0, memory.receive.1, memory.send.0, memory.send.1];
    for (word, value) in words.into_iter().enumerate() {
        nic_memory.word32(grown_copy(at, copy) + 4 * word).store(value, Ordering::Relaxed);
    }
    counts.store(copy, Ordering::Release);
}

/// Advances an entry to the phase `Sending`. `image` is the one from which the kernel continues.
pub(crate) fn sending(nic_memory: &Region, cid: Cid, image: &Image) {
    let mut bytes = [0u8; MAX_ENCODED];
    if image.encode(&mut bytes).is_ok() {
        let _ = nic_memory.write(nic::scratch(cid.slot()) + scratch::IMAGE, &bytes);
        nic_memory.word32(place(cid.slot())).store(Phase::Sending as u32, Ordering::Release);
    }
}

/// Sets an entry back to the phase `Reading`: the socket is whole, and the next agent must not change its bytes.
pub(crate) fn reading(nic_memory: &Region, cid: Cid) {
    nic_memory.word32(place(cid.slot())).store(Phase::Reading as u32, Ordering::Release);
}

/// Notes that a connection which the NIC has made for a listener waits to be accepted. Its first entry replaces this.
pub(crate) fn note_made(nic_memory: &Region, made: Made) {
    let base = place(made.cid.slot());
    nic_memory.word32(base).store(0, Ordering::Release);
    for (at, value) in [(4, made.listener), (8, made.cid.0), (12, made.by_cookie.into())] {
        nic_memory.word32(base + at).store(value, Ordering::Release);
    }
    nic_memory.word32(base).store(MADE, Ordering::Release);
}

/// The connection that the NIC has made for a listener, if the message says that.
fn made_for_listener(message: &Message) -> Option<Made> {
    let Some(Notice::Made { listener, by_cookie }) = Notice::of(message) else { return None };
    Some(Made { cid: message.cid, listener, by_cookie })
}

/// Takes the next message out of the ring of a NIC, whose number and slots are given. An agent takes all that are
/// there, and may die before it has handled them. That a connection has been made for a listener is said by its message
/// alone, so it is noted before that is gone.
pub(crate) fn take_message(ring: &mut Consumer<RingWords>, memory: &Region, (nic, slots): (usize, usize)) -> Option<Message> {
    loop {
        let message = Message::from_words(ring.pop()?);
        let made = message.as_ref().and_then(made_for_listener);
        if let Some(made) = made.filter(|made| made.cid.nic() == nic && (made.cid.slot() as usize) < slots) {
            note_made(memory, made);
        }
        ring.release();
        if message.is_some() {
            return message;
        }
    }
}

/// The connection in a slot of NIC `nic` that waits to be accepted.
pub(crate) fn made(nic_memory: &Region, nic: usize, at: u32) -> Option<Made> {
    let word = |offset: usize| nic_memory.word32(place(at) + offset).load(Ordering::Acquire);
    let (is_made, cid) = (word(0) == MADE, Cid(word(8)));
    (is_made && cid.slot() == at && cid.nic() == nic).then(|| Made { cid, listener: word(4), by_cookie: word(12) != 0 })
}

/// Clears an entry: the move is over.
pub(crate) fn clear(nic_memory: &Region, cid: Cid) {
    nic_memory.word32(place(cid.slot())).store(0, Ordering::Release);
}

/// Reads the entry of a slot of NIC `nic`.
pub(crate) fn read(nic_memory: &Region, nic: usize, at: u32) -> Option<(Phase, Entry)> {
    let base = place(at);
    let phase = Phase::from_number(nic_memory.word32(base).load(Ordering::Acquire))?;
    let length = nic_memory.word32(base + 4).load(Ordering::Acquire) as usize;
    let mut bytes = vec![0u8; length.min(scratch::JOURNAL_BYTES)];
    nic_memory.read(entry_at(at, bytes.len()), &mut bytes).ok()?;
    let mut entry: Entry = match phase {
        // What follows may be of the next phase's entry, as far as that has been written.
        Phase::Reading => {
            let (session, connection, cid, saved) = postcard::from_bytes::<Beginning>(&bytes).ok()?;
            Entry::new(session, connection, Cid(cid), saved)
        }
        Phase::Copied | Phase::Sending => postcard::from_bytes(&bytes).ok()?,
    };
    let mut flow = [0; Flow::BYTES];
    nic_memory.read(nic::slot(at) + slot::FLOW, &mut flow).ok()?;
    entry.flow = Some(Flow::from_bytes(&flow));
    if let copy @ 1..=2 = nic_memory.word32(grown_at(at)).load(Ordering::Acquire) {
        let words = grown_copy(at, copy);
        let [cid, memory @ ..] = std::array::from_fn::<u32, { slot::GROWN_WORDS }, _>(|word| {
            nic_memory.word32(words + 4 * word).load(Ordering::Relaxed)
        });
        (entry.cid, entry.memory) = (cid, memory);
    }
    let cid = Cid(entry.cid);
    (cid.slot() == at && cid.nic() == nic).then_some((phase, entry))
}

/// Returns what the connection in the slot of this cid came with.
pub(crate) fn exported(nic_memory: &Region, cid: Cid) -> Option<Exported> {
    read(nic_memory, cid.nic(), cid.slot())?.1.exported()
}

/// Notes session and number of the connection that gets the slot of this cid. By these the NIC's answers find it, so
/// they are noted before the NIC is asked for anything that is waited for.
pub(crate) fn note_occupant(nic_memory: &Region, cid: Cid, (session, connection): (u32, u32)) {
    for (at, value) in [(0, session), (5, connection)] {
        nic_memory.word32(nic::slot(cid.slot()) + slot::PARAMETERS + 4 * at).store(value, Ordering::Release);
    }
}

/// Returns session and number of the connection that had the slot of this cid last.
pub(crate) fn occupant(nic_memory: &Region, slots: usize, cid: Cid) -> Option<(u32, u32)> {
    if cid.slot() as usize >= slots {
        return None;
    }
    let parameter = |at: usize| nic_memory.word32(nic::slot(cid.slot()) + slot::PARAMETERS + 4 * at).load(Ordering::Acquire);
    Some((parameter(0), parameter(5)))
}

/// Returns the cid of the next occupant of a slot of NIC `nic`. It is kept in NIC memory, so that no agent uses a cid
/// that another has used.
pub(crate) fn next_name(nic_memory: &Region, nic: usize, at: u32) -> Cid {
    let word = nic_memory.word32(nic::slot(at) + slot::NEXT_CID).load(Ordering::Acquire);
    // The NIC can write here: only the generation is taken from it.
    Cid::new(at, Cid(word).generation().max(1)).on(nic)
}

/// Returns the number of slots that ever had a connection; these are the first ones.
pub(crate) fn slots_used(nic_memory: &Region, slots: u32) -> u32 {
    nic_memory.word32(nic::SLOTS_USED).load(Ordering::Acquire).min(slots)
}

/// Stores the number of slots that have had a connection. Called before the last of them gets one.
pub(crate) fn note_slots_used(nic_memory: &Region, used: u32) {
    nic_memory.word32(nic::SLOTS_USED).store(used, Ordering::Release);
}

/// Stores the cid of a slot's next occupant.
pub(crate) fn note_next_name(nic_memory: &Region, name: Cid) {
    nic_memory.word32(nic::slot(name.slot()) + slot::NEXT_CID).store(name.0, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::{Control, Operation};
    use baton_image::State;
    use baton_ring::Producer;
    use baton_wire::Endpoint;
    use baton_wire::frame::Link;
    use std::sync::Arc;

    /// An image with values that do not happen to be short.
    fn image() -> Image {
        let flow =
            Flow { local: Endpoint::v4([192, 168, 27, 100], 65001), remote: Endpoint::v4([203, 0, 113, 77], 50123), device: 0 };
        let link =
            Link { source: [2, 3, 4, 5, 6, 7], destination: [8, 9, 10, 11, 12, 13], ttl: 64, interface: 3, ..Link::default() };
        Image {
            link,
            rcv_wscale: 10,
            mss: 1448,
            keepalive: true,
            keepalive_idle: 300,
            snd_una: 0x8899_aabb,
            snd_nxt: 0x8899_aabb,
            snd_end: 0x8899_aabb,
            rcv_nxt: 0x1122_3344,
            rcv_adv: 0x1122_3344 + 3_145_728,
            snd_wl1: 0x1122_3000,
            snd_wnd: 3_000_320,
            max_window: 3_145_728,
            ts_recent: 0xabcd_ef01,
            ts_clock: 0x7654_3210,
            cwnd: 310,
            ssthresh: 217,
            srtt: 23_456,
            rttvar: 5_678,
            min_rtt: 21_987,
            sent_ago: Some(123_456),
            state: State::Established,
            ..Image::open(flow)
        }
    }

    fn entry(saved: Saved) -> Entry {
        let memory = Memory { receive: (0x3fed_0000, 1 << 22), send: (0x3fad_0000, 1 << 22) };
        Entry::new(12_345, 16_000, Cid::new(1_048_575, 900), saved).copied(&image(), memory, 40 << 40)
    }

    fn written(entry: &Entry) -> (Region, usize) {
        let region = Region::private(nic::bytes(1).next_multiple_of(4096)).unwrap();
        let entry = Entry { cid: Cid::new(0, 7).0, ..entry.clone() };
        region.write(nic::slot(0) + slot::FLOW, &image().flow.to_bytes()).unwrap();
        assert!(write(&region, Phase::Copied, &entry));
        let length = region.word32(place(0) + 4).load(Ordering::Acquire) as usize;
        (region, length)
    }

    #[test]
    fn what_waits_to_be_accepted_is_no_entry() {
        assert_eq!(Phase::from_number(MADE), None);
        let region = Region::private(nic::bytes(2).next_multiple_of(4096)).unwrap();
        let cid = Cid::new(1, 7).on(2);
        for by_cookie in [true, false] {
            let one = Made { cid, listener: u32::MAX, by_cookie };
            note_made(&region, one);
            assert_eq!(made(&region, 2, 1), Some(one));
        }
        assert!(made(&region, 2, 0).is_none() && made(&region, 1, 1).is_none());
        assert!(read(&region, 2, 1).is_none());
        assert!(write(&region, Phase::Copied, &Entry { cid: cid.0, ..entry(Saved::default()) }));
        assert!(made(&region, 2, 1).is_none() && read(&region, 2, 1).is_some());
        note_made(&region, Made { cid, listener: 3, by_cookie: false });
        clear(&region, cid);
        assert!(made(&region, 2, 1).is_none() && read(&region, 2, 1).is_none());
    }

    /// The agent dies with messages that it has taken and not handled: the next one finds what the NIC has made.
    #[test]
    fn what_was_made_is_noted_when_its_message_leaves_the_ring() {
        const SLOTS: usize = 4;
        let memory = Arc::new(Region::private(nic::bytes(SLOTS).next_multiple_of(4096)).unwrap());
        let mut ring = Producer::new(memory.ring(nic::EVENTS));
        let cid = |slot| Cid::new(slot, 3).on(1);
        let said = |control, cid, listener, by_cookie| Message::control(Operation::OsControl, control, cid, listener, by_cookie);
        let all = [
            said(Control::Made, cid(0), 7, 1),
            said(Control::Made, cid(1), 8, 0),
            said(Control::Made, cid(2), 0, 0),
            said(Control::Done, cid(3), 7, 0),
            said(Control::Made, Cid::new(3, 3), 7, 0),
            said(Control::Made, cid(SLOTS as u32), 7, 0),
        ];
        all.iter().for_each(|message| ring.push(message.to_words()).unwrap());
        ring.publish();
        let mut taken = Consumer::new(memory.ring(nic::EVENTS));
        for message in all {
            assert_eq!(take_message(&mut taken, &memory, (1, SLOTS)), Some(message));
        }
        assert_eq!(take_message(&mut taken, &memory, (1, SLOTS)), None);
        assert!(Consumer::new(memory.ring(nic::EVENTS)).pop().is_none(), "the next agent finds no message");
        let noted: Vec<_> = (0..SLOTS as u32).map(|slot| made(&memory, 1, slot)).collect();
        let is_made = |slot, listener, by_cookie| Some(Made { cid: cid(slot), listener, by_cookie });
        assert_eq!(noted, [is_made(0, 7, true), is_made(1, 8, false), None, None]);
    }

    #[test]
    fn a_usual_entry_lies_in_the_slot_and_says_all() {
        let entry = entry(Saved::default());
        let (region, length) = written(&entry);
        // The options that a disconnect resets take four bytes each.
        assert!(length + 16 + 8 <= slot::JOURNAL_BYTES, "{length} bytes of {}", slot::JOURNAL_BYTES);
        let (_, read) = read(&region, 0, 0).expect("an entry");
        assert_eq!(read.exported().map(|exported| exported.image), Some(image()));
        assert_eq!((read.session, read.connection, read.handed_off_at), (12_345, 16_000, 40 << 40));
        assert!(read.memory() == entry.memory());
    }

    /// The agent dies while it writes that a socket's bytes have been copied: by what the journal said before, the next
    /// one ends the socket's repair mode.
    #[test]
    fn what_says_that_a_socket_is_read_counts_until_the_next_entry_is_whole() {
        let mut places = Vec::new();
        for filter in (0..slot::JOURNAL_BYTES).step_by(8) {
            let settings = (0i32, 1i32, 0i32, vec![7u8; filter], Vec::<(i32, i32, i32)>::new());
            let saved: Saved = postcard::from_bytes(&postcard::to_stdvec(&settings).unwrap()).unwrap();
            let reading = Entry::new(12_345, 16_000, Cid::new(0, 7), saved);
            let copied = reading.clone().copied(&image(), Memory { receive: (1 << 20, 4096), send: (1 << 21, 8192) }, 40 << 40);
            let bytes = postcard::to_stdvec(&copied).unwrap();
            let lengths = [&reading, &copied].map(|entry| postcard::to_stdvec(entry).unwrap().len());
            places.push(lengths.map(|length| entry_at(0, length) == place(0) + 8));
            let region = Region::private(nic::bytes(1).next_multiple_of(4096)).unwrap();
            let counts = || matches!(read(&region, 0, 0), Some((Phase::Reading, entry)) if entry.begins_as(&reading));
            for written in 0..bytes.len() {
                assert!(write(&region, Phase::Reading, &reading) && counts());
                region.write(entry_at(0, bytes.len()), &bytes[..written]).unwrap();
                assert!(counts(), "{written} bytes of {}", bytes.len());
            }
            let length = put(&region, &copied).expect("it is not too long");
            assert!(counts(), "without its length");
            region.word32(place(0) + 4).store(length, Ordering::Release);
            assert!(counts(), "without its phase");
            assert!(write(&region, Phase::Copied, &copied));
            let (phase, entry) = read(&region, 0, 0).expect("an entry");
            assert!(phase == Phase::Copied && entry.begins_as(&copied) && entry.memory() == copied.memory());
        }
        for both in [[true, true], [true, false], [false, false]] {
            assert!(places.contains(&both), "in the slot: {both:?}");
        }
    }

    /// The NIC's answers find a connection of which there is an entry, whatever the slot's last occupant was: the next
    /// agent may ask before the connection has been handed off.
    #[test]
    fn the_connection_of_an_entry_is_found_by_its_cid() {
        let (region, _) = written(&entry(Saved::default()));
        assert_eq!(occupant(&region, 1, Cid::new(0, 7)), Some((12_345, 16_000)));
    }
}
