//! The messages of the rings, 16 bytes each.

use crate::layout::nic::MAX_NICS;

/// Connection identifier: the number of the NIC that has the connection, its slot there, and a generation, so that a
/// message for an earlier occupant of the slot is recognised. Generations begin at 1; the default value identifies no
/// connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Cid(pub u32);

impl Cid {
    /// Enough for a million connections.
    const SLOT_BITS: u32 = 20;
    const GENERATION_BITS: u32 = 10;
    const NIC_SHIFT: u32 = Self::SLOT_BITS + Self::GENERATION_BITS;
    const GENERATIONS: u32 = (1 << Self::GENERATION_BITS) - 1;

    /// Makes the identifier for a slot of the first NIC and a generation (modulo 2¹⁰).
    pub const fn new(slot: u32, generation: u32) -> Cid {
        Cid((slot & ((1 << Self::SLOT_BITS) - 1)) | (generation & Self::GENERATIONS) << Self::SLOT_BITS)
    }

    /// The same slot and generation on the NIC with this number, which is less than [`MAX_NICS`].
    pub const fn on(self, nic: usize) -> Cid {
        Cid(self.0 & ((1 << Self::NIC_SHIFT) - 1) | (nic as u32) << Self::NIC_SHIFT)
    }

    /// Number of the NIC, less than [`MAX_NICS`].
    #[inline(always)]
    pub const fn nic(self) -> usize {
        (self.0 >> Self::NIC_SHIFT) as usize
    }

    /// The slot's number.
    pub const fn slot(self) -> u32 {
        self.0 & ((1 << Self::SLOT_BITS) - 1)
    }

    /// The generation, modulo 2¹⁰. That of an occupant is not 0.
    pub const fn generation(self) -> u32 {
        (self.0 >> Self::SLOT_BITS) & Self::GENERATIONS
    }

    /// The identifier of the slot's next occupant.
    pub const fn next_generation(self) -> Cid {
        // Modulo 2¹⁰, without 0.
        let next = (self.generation() + 1) & Self::GENERATIONS;
        Cid::new(self.slot(), if next == 0 { 1 } else { next }).on(self.nic())
    }
}

const _: () = assert!(1 << (32 - Cid::NIC_SHIFT) == MAX_NICS);

/// The operation of a message. The first seven are commands to the NIC (Figure 4), the others go to the host (Figure
/// 5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Operation {
    /// `nic_handoff(connection)`: the image and parameters lie in the connection's slot. The length field names the
    /// announcement under which the host makes it (see [`crate::resource`]), as in [`Control::Mirror`],
    /// [`Control::Connect`] and [`Control::Resume`].
    NicHandoff = 1,
    /// `nic_restore(cid)`: stop the connection, write its image, and hold the frames that arrive from then on.
    NicRestore = 2,
    /// `nic_send(cid, address, length, flags)`: queue `length` bytes at `address` for sending.
    NicSend = 3,
    /// `nic_recvd(cid, length)`: the program has read `length` bytes.
    NicRecvd = 4,
    /// `nic_ctrl(cid, command)`: see [`Control`].
    NicControl = 5,
    /// `nic_forward(cid, address, length)`: process a frame that reached the host as if it had come from the wire. The
    /// address is that in the room which NIC memory has for such frames ([`crate::layout::nic::forward`]).
    NicForward = 6,
    /// `nic_post(cid, address, length)`: receive into this memory.
    NicPost = 7,
    /// `os_recv(cid, address, length, flags)`: `length` bytes have become readable.
    OsRecv = 17,
    /// `os_ack(cid, length)`: the peer has acknowledged `length` bytes; their send memory is free.
    OsAck = 18,
    /// `os_ctrl(cid, command)`: the connection's state has changed, or a command has completed.
    OsControl = 19,
    /// `os_resource(type, number)`: the NIC's free room, see [`crate::resource`].
    OsResource = 20,
    /// `os_restore(cid)`: the NIC asks the host to take the connection back; see [`RestoreCause`].
    OsRestore = 21,
}

impl Operation {
    #[inline]
    fn from_number(number: u8) -> Option<Operation> {
        use Operation::*;
        [
            NicHandoff, NicRestore, NicSend, NicRecvd, NicControl, NicForward, NicPost, OsRecv, OsAck, OsControl, OsResource,
            OsRestore,
        ]
        .into_iter()
        .find(|operation| *operation as u8 == number)
    }
}

/// The command or event of a control message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Control {
    /// Mirror: copy the connection's frames while the kernel still receives them.
    Mirror = 1,
    /// Steal: from now on only the NIC receives the connection's frames, and no segment of the kernel's leaves.
    Steal = 2,
    /// The kernel owns the connection again: replay and held frames go to it.
    Release = 3,
    /// Undo a mirror or a steal; the held frames go to the kernel. [`LOST_QUEUE`] in the address field says that the
    /// kernel has lost its out-of-order queue: then the mirrored frames go to the kernel, too. [`RESET_PEER`] says that
    /// a connection that the NIC has made will not be accepted: its peer is reset, and the held frames are dropped.
    Cancel = 4,
    /// The program has shut down its sending side.
    Shutdown = 5,
    /// End the connection with a RST. Also from the agent, when the socket has lost the connection.
    Abort = 6,
    /// TCP_NODELAY; the value is in the address field.
    NoDelay = 7,
    /// TCP_CORK; the value is in the address field.
    Cork = 8,
    /// Keep-alive. Address field: bit 31 on or off, idle time in seconds below. Length field: interval in seconds in
    /// the low 16 bits, number of probes above.
    KeepAlive = 9,
    /// TCP_USER_TIMEOUT in milliseconds, in the address field.
    UserTimeout = 10,
    /// The path MTU in bytes, in the address field.
    Mtu = 11,
    /// To the NIC: the session in the address field has ended, and its memory is unmapped. To the host: the NIC has
    /// stopped reading the session in the address field, since its program broke the ring's rules; the host has to take
    /// its connections back.
    Detach = 12,
    /// The connection's frames leave through the interface with the index in the address field from now on; 2³²-1: they
    /// are dropped.
    Interface = 13,
    /// A connection stopped by `nic_restore` goes on, in the memory of its slot's parameters and with the [`Cid`] in
    /// the address field.
    Resume = 14,
    /// The slot is free for a connection that the NIC makes for the listener in the address field.
    Grant = 15,
    /// Open the connection whose 4-tuple and image (for link, MTU and options) lie in the slot. Address field: most
    /// retransmissions of the SYN (TCP_SYNCNT), 0 for the default. The NIC answers with [`Control::Made`] or
    /// [`Control::NotMade`].
    Connect = 16,
    /// Close the connection, whose program has closed it and has read the bytes before the sequence number in the
    /// address field. [`Control::Closed`] follows when its peer has acknowledged the FIN, or the connection has ended
    /// otherwise; the rest of its life (TIME-WAIT) needs neither slot nor memory.
    Close = 17,
    /// From a program: the UDP socket whose number is in the address field has datagrams to send, or its program wants
    /// its doorbell rung if there are some to read.
    Datagrams = 18,
    /// To the host: the command has been carried out; its result is in the address field.
    Done = 32,
    /// To the host: the command was refused; the reason's number is in the address field.
    Refused = 33,
    /// To the host: the peer's FIN has been received in order.
    Fin = 34,
    /// To the host: the connection has ended; the address field has the error number, 0 for none.
    Closed = 35,
    /// To the host: a posted buffer has been accepted. Address field: the sequence number of the first byte that goes
    /// into it; bytes before that stay in receive memory.
    Posted = 36,
    /// To the host: the connection could use more memory. Address field: bytes of receive memory wanted; length field:
    /// bytes of send memory wanted; 0 for no change.
    Grow = 37,
    /// To the host: the NIC has made a connection for the listener in the address field, 0 for one that it has opened;
    /// its image is in the slot, and its frames are held. Length field: 1 if it was made from a SYN cookie, else 0.
    Made = 38,
    /// To the host: a connection could not be opened; Linux's error number is in the address field. Its slot is free.
    NotMade = 39,
    /// From the host's TCP to the NIC: the connection has been quiet for a while and can be on its fast path again.
    Quiet = 40,
    /// From the host's TCP to the NIC, before [`Control::Returned`]: a range received behind a hole; its first sequence
    /// number is in the address field, the one behind it in the length field.
    Range = 41,
    /// From the host's TCP to the NIC, before [`Control::Returned`]: a FIN was received behind a hole, with the
    /// sequence number in the address field.
    FinBehindHole = 42,
    /// From the host's TCP to the NIC: a connection comes back. Address field: 1 if its state lies in
    /// [`crate::layout::host_tcp`]'s memory, 0 if it has ended.
    Returned = 43,
    /// To the program: the NIC has read messages up to one with [`ANSWER`], or another [`crate::layout::ANSWERED`] of
    /// them. Address field: [`OF_ALL`] if the program has missed an answer before, else 0.
    Taken = 44,
    /// To the host: one of the NIC's own addresses has changed its state, or was claimed by another host (see
    /// [`crate::layout::nic::ADDRESSES`]).
    Addresses = 45,
}

impl Control {
    /// The control command with this number.
    pub fn from_number(number: u16) -> Option<Control> {
        use Control::*;
        [
            Mirror,
            Steal,
            Release,
            Cancel,
            Shutdown,
            Abort,
            NoDelay,
            Cork,
            KeepAlive,
            UserTimeout,
            Mtu,
            Detach,
            Interface,
            Resume,
            Grant,
            Connect,
            Close,
            Datagrams,
            Done,
            Refused,
            Fin,
            Closed,
            Posted,
            Grow,
            Made,
            NotMade,
            Quiet,
            Range,
            FinBehindHole,
            Returned,
            Taken,
            Addresses,
        ]
        .into_iter()
        .find(|control| *control as u16 == number)
    }
}

/// The reason of an `os_restore`, in the address field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum RestoreCause {
    /// Both sides have closed the connection.
    Ended = 0,
    /// The peer has reset the connection.
    Reset = 1,
    /// The peer sends urgent data, which the NIC does not handle.
    Urgent = 2,
    /// The peer's FIN has come, and the NIC is set to give such connections back.
    PeerFin = 3,
}

/// Reason of a refusal after which the same command may succeed a moment later.
pub const NOT_YET: u32 = 8;

/// Reason of a refusal: the connection has ended, which is reported when there is room for its last events in its
/// program's ring.
pub const ENDED: u32 = 9;

/// Reason of a refusal: the command exceeds the NIC's announced room (see [`crate::resource`]).
pub const EXCEEDED: u32 = 10;

/// Reason of a refusal: the NIC has a connection with the same 4-tuple. It may be one that it has made from a SYN
/// cookie a moment ago, which the agent is about to drop.
pub const ALREADY_HERE: u32 = 6;

/// Address field of [`Control::Cancel`]: see there.
pub const LOST_QUEUE: u32 = 1;

/// Address field of [`Control::Cancel`]: see there.
pub const RESET_PEER: u32 = 2;

/// Flag of `nic_send`: the next message holds more bytes of the same send call, so no segment needs to leave before it
/// (as MSG_MORE).
pub const MORE: u16 = 1;

/// Bit of the kind of a message that the host's TCP sends through the NIC to the agent.
pub const FOR_AGENT: u16 = 1 << 15;
/// Flag of `nic_send`: the NIC answers with [`Control::Taken`] once it has read the message.
pub const ANSWER: u16 = 2;

/// Address field of [`Control::Taken`]: there was no room for an earlier answer, which may have been any connection's.
pub const OF_ALL: u32 = 1;

/// Flag of `nic_send`: the message stands for all bytes up to the block's [`crate::layout::block::QUEUED_SEQ`],
/// whatever its address and length. From then on the NIC looks there itself whenever it has reported an acknowledgement
/// of the peer's, or has released such a message.
pub const FETCH: u16 = 4;

/// Flag of `nic_send`: the program has more to send (MSG_MORE). A part that does not fill a segment waits for more
/// bytes, for 200 ms at most.
pub const HOLD: u16 = 8;

/// One message, 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    /// The operation.
    pub operation: Operation,
    /// The [`Control`] number of a control message; [`MORE`], [`ANSWER`], [`FETCH`] and [`HOLD`] in `nic_send`;
    /// else 0.
    pub kind: u16,
    /// The connection.
    pub cid: Cid,
    /// An offset in the session's memory, or a value.
    pub address: u32,
    /// A length in bytes, or a value.
    pub length: u32,
}

const _: () = assert!(size_of::<[u64; 2]>() == 16);

impl Message {
    /// Makes a message whose kind is 0.
    pub const fn new(operation: Operation, cid: Cid, address: u32, length: u32) -> Message {
        Message { operation, kind: 0, cid, address, length }
    }

    /// Makes a control message.
    pub const fn control(operation: Operation, control: Control, cid: Cid, address: u32, length: u32) -> Message {
        Message { operation, kind: control as u16, cid, address, length }
    }

    /// Encodes the message as a ring holds it.
    #[inline]
    pub const fn to_words(self) -> [u64; 2] {
        [
            self.operation as u64 | (self.kind as u64) << 16 | (self.cid.0 as u64) << 32,
            self.address as u64 | (self.length as u64) << 32,
        ]
    }

    /// Decodes a message; None if its operation is unknown.
    #[inline]
    pub fn from_words(words: [u64; 2]) -> Option<Message> {
        Some(Message {
            operation: Operation::from_number(words[0] as u8)?,
            kind: (words[0] >> 16) as u16,
            cid: Cid((words[0] >> 32) as u32),
            address: words[1] as u32,
            length: (words[1] >> 32) as u32,
        })
    }
}

/// Whether the length field of a message with this first word is a number of bytes (`os_recv`, `os_ack`). Several such
/// messages with the same first word can be merged by adding their lengths modulo 2³².
#[inline(always)]
pub const fn counts_bytes(first: u64) -> bool {
    first as u8 == Operation::OsRecv as u8 || first as u8 == Operation::OsAck as u8
}

/// Adds the length field of the second word `more` to that of `second`.
#[inline(always)]
pub const fn add_length(second: u64, more: u64) -> u64 {
    second.wrapping_add(more & !0xffff_ffff)
}

/// Whether a message with this first word is a `nic_send` without flags.
#[inline(always)]
pub const fn is_plain_send(first: u64) -> bool {
    first as u32 == Operation::NicSend as u32
}

/// The second word of a `nic_send` of the bytes of two, given their second words. None if the second one's bytes are
/// not directly behind the first one's, or there are none.
#[inline(always)]
pub const fn join_sends(one: u64, next: u64) -> Option<u64> {
    let (address, length) = (one as u32, (one >> 32) as u32);
    let (Some(end), Some(sum)) = (address.checked_add(length), length.checked_add((next >> 32) as u32)) else { return None };
    if end == next as u32 && sum > length { Some(address as u64 | (sum as u64) << 32) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sends_are_joined_if_their_bytes_are_neighbours() {
        let send = |address, length| Message::new(Operation::NicSend, Cid::new(77, 3), address, length).to_words();
        assert!(is_plain_send(send(1, 1)[0]));
        assert!(!is_plain_send(Message { kind: MORE, ..Message::new(Operation::NicSend, Cid(7), 0, 1) }.to_words()[0]));
        assert!(!is_plain_send(Message::new(Operation::NicRecvd, Cid(7), 0, 1).to_words()[0]));
        assert_eq!(join_sends(send(100, 20)[1], send(120, 3)[1]), Some(send(100, 23)[1]));
        for (one, next) in [((100, 20), (121, 3)), ((100, 20), (119, 3)), ((100, 20), (120, 0)), ((u32::MAX, 2), (1, 3))] {
            assert_eq!(join_sends(send(one.0, one.1)[1], send(next.0, next.1)[1]), None, "{one:?} {next:?}");
        }
        assert_eq!(join_sends(send(0, 2)[1], send(2, u32::MAX)[1]), None);
    }

    #[test]
    fn lengths_are_added() {
        let message = |length| Message::new(Operation::OsAck, Cid::new(77, 3), 9, length);
        let [first, second] = message(u32::MAX).to_words();
        assert!(
            counts_bytes(first)
                && !counts_bytes(Message::control(Operation::OsControl, Control::Fin, Cid(1), 0, 0).to_words()[0])
        );
        assert_eq!(Message::from_words([first, add_length(second, message(3).to_words()[1])]), Some(message(2)));
    }

    #[test]
    fn messages_survive_their_words() {
        let message = Message::control(Operation::NicControl, Control::Cork, Cid::new(77, 3), 1, u32::MAX);
        assert_eq!(Message::from_words(message.to_words()), Some(message));
        assert_eq!(Message::from_words([0, 0]), None);
        assert_eq!(Message::from_words([99, 0]), None);
        assert_eq!(Control::from_number(8), Some(Control::Cork));
        assert_eq!(Control::from_number(99), None);
    }

    #[test]
    fn a_generation_changes_the_cid_and_keeps_the_slot() {
        for nic in 0..MAX_NICS {
            let cid = Cid::new(5, Cid::GENERATIONS).on(nic);
            assert_eq!(cid.next_generation(), Cid::new(5, 1).on(nic), "no generation is 0");
            assert_eq!(cid.next_generation().next_generation(), Cid::new(5, 2).on(nic));
            assert_eq!((cid.slot(), cid.nic()), (5, nic));
        }
    }
}
