//! The 16-byte messages.

/// A connection's name on one NIC: slot and generation, so that a message for an earlier tenant of the slot is recognised.
/// Generations begin at 1: the default names no connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Cid(pub u32);

impl Cid {
    const SLOT_BITS: u32 = 18;

    /// Makes a name from a slot and its generation (modulo 2¹⁴).
    pub const fn new(slot: u32, generation: u32) -> Cid {
        Cid((slot & ((1 << Self::SLOT_BITS) - 1)) | generation << Self::SLOT_BITS)
    }

    /// The slot.
    pub const fn slot(self) -> u32 {
        self.0 & ((1 << Self::SLOT_BITS) - 1)
    }

    /// The name for the slot's next tenant.
    pub const fn next_generation(self) -> Cid {
        // Modulo 2¹⁴, without 0.
        let next = ((self.0 >> Self::SLOT_BITS) + 1) & 0x3fff;
        Cid::new(self.slot(), if next == 0 { 1 } else { next })
    }
}

/// What a message asks or tells. The first seven are commands to the NIC (Figure 4), the others to the host (Figure 5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Operation {
    /// `nic_handoff(connection)`: the image and parameters lie in the connection's slot.
    NicHandoff = 1,
    /// `nic_restore(cid)`: write the image, hold what arrives, end.
    NicRestore = 2,
    /// `nic_send(cid, address, length, flags)`: queue this memory for sending.
    NicSend = 3,
    /// `nic_recvd(cid, length)`: the program has read this many bytes.
    NicRecvd = 4,
    /// `nic_ctrl(cid, command)`: see [`Control`].
    NicControl = 5,
    /// `nic_forward(cid, address, length)`: process this frame as if the wire had brought it.
    NicForward = 6,
    /// `nic_post(cid, address, length)`: memory to receive into.
    NicPost = 7,
    /// `os_recv(cid, address, length, flags)`: bytes became readable.
    OsRecv = 17,
    /// `os_ack(cid, length)`: bytes of send memory are free.
    OsAck = 18,
    /// `os_ctrl(cid, command)`: the connection's state has changed, or a command is done.
    OsControl = 19,
    /// `os_resource(type, number)`: how many of a resource are free.
    OsResource = 20,
    /// `os_restore(cid)`: the NIC wants to give the connection back.
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

/// What a control message is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Control {
    /// Copy the connection's frames while the kernel still gets them.
    Mirror = 1,
    /// From now on the connection's frames go to nobody but the NIC, and none of the kernel's leaves.
    Steal = 2,
    /// The kernel owns the connection again: what was held goes to it.
    Release = 3,
    /// Undo a mirror or a steal; what was held goes to the kernel. Nonzero in the address field: the kernel's copies are gone, so
    /// those that were mirrored go to it, too.
    Cancel = 4,
    /// The program has closed its sending side.
    Shutdown = 5,
    /// End the connection with a RST.
    Abort = 6,
    /// TCP_NODELAY; the value is in the address field.
    NoDelay = 7,
    /// TCP_CORK; the value is in the address field.
    Cork = 8,
    /// Keep-alive: on in bit 31 of the address field, idle seconds below; interval in the length's low 16 bits, count above.
    KeepAlive = 9,
    /// TCP_USER_TIMEOUT in milliseconds, in the address field.
    UserTimeout = 10,
    /// The path MTU, in the address field.
    Mtu = 11,
    /// A session ends: its memory is unmapped. To the host: the session in the address field is no longer read, since its program broke the
    /// ring's rules; its connections are to be taken back.
    Detach = 12,
    /// The connection's frames leave through the interface in the address field from now on; 2³²-1: they leave nowhere.
    Interface = 13,
    /// A connection that rests goes on, in the memory of its slot's parameters and under the name in the address field.
    Resume = 14,
    /// To the host: the command has been carried out.
    Done = 32,
    /// To the host: the command was refused; the reason is in the address field.
    Refused = 33,
    /// To the host: the peer's FIN has come.
    Fin = 34,
    /// To the host: the connection has ended; the address field has the error number, 0 for none.
    Closed = 35,
    /// A posted buffer was taken note of. Address field: the sequence number of the first byte that goes into it; those before it stay
    /// in receive memory.
    Posted = 36,
    /// To the host: the connection could use more memory: address field, bytes of receive memory; length, bytes of send memory; 0 for none.
    Grow = 37,
}

impl Control {
    /// The control command of this number.
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
            Done,
            Refused,
            Fin,
            Closed,
            Posted,
            Grow,
        ]
        .into_iter()
        .find(|control| *control as u16 == number)
    }
}

/// Of `os_restore`: why the NIC wants to give a connection back, in the address field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum RestoreCause {
    /// Both sides have closed.
    Ended = 0,
    /// The peer has reset it.
    Reset = 1,
    /// The peer sends urgent data.
    Urgent = 2,
}

/// In a refusal: the same command may succeed a moment later.
pub const NOT_YET: u32 = 8;

/// Of `nic_send`: the rest of what the program sends at once follows in the next message, and nothing has to leave before.
pub const MORE: u16 = 1;

/// One message, 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    /// What it asks or tells.
    pub operation: Operation,
    /// For control messages the [`Control`] number, for `nic_send` 0 or [`MORE`], else 0.
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
    /// A message without kind.
    pub const fn new(operation: Operation, cid: Cid, address: u32, length: u32) -> Message {
        Message { operation, kind: 0, cid, address, length }
    }

    /// A control message.
    pub const fn control(operation: Operation, control: Control, cid: Cid, address: u32, length: u32) -> Message {
        Message { operation, kind: control as u16, cid, address, length }
    }

    /// As it lies in a ring.
    #[inline]
    pub const fn to_words(self) -> [u64; 2] {
        [
            self.operation as u64 | (self.kind as u64) << 16 | (self.cid.0 as u64) << 32,
            self.address as u64 | (self.length as u64) << 32,
        ]
    }

    /// Reads a message; None if it is none.
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

/// Whether a message with this first word counts bytes: of several with the same one the lengths, modulo 2³², can be added.
#[inline(always)]
pub const fn counts_bytes(first: u64) -> bool {
    first as u8 == Operation::OsRecv as u8 || first as u8 == Operation::OsAck as u8
}

/// Adds the length of a second word to another.
#[inline(always)]
pub const fn add_length(second: u64, more: u64) -> u64 {
    second.wrapping_add(more & !0xffff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_generation_changes_the_name_and_keeps_the_slot() {
        let cid = Cid::new(5, 16383);
        assert_eq!(cid.next_generation(), Cid::new(5, 1), "no connection is ever named 0");
        assert_ne!(cid, cid.next_generation());
        assert_eq!(cid.next_generation().slot(), 5);
    }
}
