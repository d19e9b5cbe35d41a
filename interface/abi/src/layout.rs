//! The layout of shared memory. There are two kinds of region.
//!
//! *NIC memory* is shared by agent and NIC, not by programs: a header, the two control rings, one slot per connection.
//! *Session memory* is shared by one program, the agent and the NIC: a header, the two rings, one block per connection,
//! the heap with the send and receive memory. The program can write all of its session memory, so the NIC checks
//! everything that it reads there.

/// Messages that a ring holds.
pub const RING_MESSAGES: usize = 4096;

/// After every so many of a program's messages the NIC reports that it has read them, so that a program that found the
/// ring full can sleep until then.
pub const ANSWERED: u64 = 1024;
/// 8-byte words of a ring: producer's index, consumer's index and the consumer's sleep flag on a cache line each, then
/// the messages.
pub const RING_WORDS: usize = 24 + 2 * RING_MESSAGES;
/// Bytes of a ring, rounded up to a page.
pub const RING_BYTES: usize = (RING_WORDS * 8).next_multiple_of(4096);

/// NIC memory.
pub mod nic {
    use super::RING_BYTES;

    /// 4-byte word: nonzero while the NIC sleeps, so that the sender of a message must ring its doorbell.
    pub const SLEEPING: usize = 0;
    /// 4-byte word: incremented by the agent when it has sent a message on the control connection (a socket), so that a
    /// NIC that does not sleep looks there.
    pub const CHANNEL: usize = 32;
    /// The agent's sign of life ([`crate::layout::pulse`]), for the keeper.
    pub const AGENT_PULSE: usize = ADDRESSES + 8 * crate::AddressEntry::WORDS * MOST_ADDRESSES;
    /// The workers' signs of life, for the agent.
    pub const PULSES: usize = AGENT_PULSE + super::pulse::BYTES;
    /// 4-byte word for tests that kill the NIC or the agent after a certain step: how many times that step was made.
    pub const CHAOS: usize = 96;
    /// 4-byte word, written by the agent: the number of slots, counted from the first, that have ever had a connection.
    /// The memory of the others was never touched.
    pub const SLOTS_USED: usize = 100;
    /// 4-byte word, written by the agent: the number, plus one, of the session whose requests it is serving, or 0. The
    /// keeper reads it after the agent has died, to find a session that makes agents die.
    pub const ATTENDED: usize = 104;
    /// The counters: per worker a block of 8-byte words, one for each [`crate::layout::Counter`].
    pub const COUNTERS: usize = 128;
    /// Bytes of a worker's block of counters.
    pub const COUNTERS_BYTES: usize = 768;
    /// Largest number of workers.
    pub const MAX_WORKERS: usize = 16;
    /// The NIC's own addresses, which the NIC writes: entries of [`crate::AddressEntry::WORDS`] words of 8 bytes. The
    /// next NIC reads which of them the last one used.
    pub const ADDRESSES: usize = counters(MAX_WORKERS);
    /// Number of entries.
    pub const MOST_ADDRESSES: usize = 16;
    /// Largest number of NICs that one agent has; each has NIC memory of its own.
    pub const MAX_NICS: usize = 4;
    /// Ring of commands from the agent to the NIC.
    pub const COMMANDS: usize = 16_384;
    /// Ring of messages from the NIC to the agent.
    pub const EVENTS: usize = COMMANDS + RING_BYTES;
    /// The slots, one per connection, in groups: first the slots of a group, close to each other, then a page of
    /// scratch for each.
    pub const SLOTS: usize = (EVENTS + RING_BYTES).next_multiple_of(HUGE_PAGE);
    /// Bytes of a slot.
    pub const SLOT_BYTES: usize = 448;
    /// Bytes of a slot's scratch: a page, so that it can be returned to the system by itself.
    pub const SCRATCH_BYTES: usize = 4096;
    /// Slots of a group: as many as a huge page has room for.
    pub const GROUP: usize = HUGE_PAGE / SLOT_BYTES;
    const GROUP_BYTES: usize = HUGE_PAGE + GROUP * SCRATCH_BYTES;
    const HUGE_PAGE: usize = 2 << 20;

    /// Number of active-acknowledgement buffers, which lie behind the slots. Each holds the data of one kernel
    /// connection that the NIC has acknowledged and the kernel has not.
    pub const ACKNOWLEDGED: usize = 256;
    /// Bytes of such a buffer: 256 KiB of data behind a header of one page.
    pub const ACKNOWLEDGED_BYTES: usize = (256 << 10) + 4096;

    /// Bytes of room for frames that are forwarded (`nic_forward`): for several of the longest ones, 64 KB.
    pub const FORWARD_BYTES: usize = 256 << 10;

    /// Bytes of NIC memory with `slots` slots.
    pub const fn bytes(slots: usize) -> usize {
        forward(slots) + FORWARD_BYTES
    }

    /// Offset of the room for frames that are forwarded. A frame may be overwritten once its message has been answered.
    pub const fn forward(slots: usize) -> usize {
        acknowledged(slots) + ACKNOWLEDGED * ACKNOWLEDGED_BYTES
    }

    /// Offset of the active-acknowledgement buffers.
    pub const fn acknowledged(slots: usize) -> usize {
        SLOTS + slots.div_ceil(GROUP) * GROUP_BYTES
    }

    /// The slots of each group but the first, for which agent and NIC want huge pages: with few connections none is
    /// used.
    pub fn many_slots(slots: usize) -> impl Iterator<Item = core::ops::Range<usize>> {
        (1..slots.div_ceil(GROUP)).map(|group| SLOTS + group * GROUP_BYTES).map(|at| at..at + HUGE_PAGE)
    }

    /// Offset of a worker's counters.
    pub const fn counters(worker: usize) -> usize {
        COUNTERS + worker * COUNTERS_BYTES
    }

    /// Offset of a worker's sign of life.
    pub const fn pulse(worker: usize) -> usize {
        PULSES + worker * super::pulse::BYTES
    }

    /// Offset of the entry of one of the NIC's own addresses.
    pub const fn address(entry: usize) -> usize {
        ADDRESSES + entry * crate::AddressEntry::WORDS * 8
    }

    /// Offset of a slot.
    pub const fn slot(slot: u32) -> usize {
        let slot = slot as usize;
        SLOTS + slot / GROUP * GROUP_BYTES + slot % GROUP * SLOT_BYTES
    }

    /// Offset of a slot's scratch.
    pub const fn scratch(slot: u32) -> usize {
        let slot = slot as usize;
        SLOTS + slot / GROUP * GROUP_BYTES + HUGE_PAGE + slot % GROUP * SCRATCH_BYTES
    }
}

/// A sign of life, by which a supervisor sees whether a worker makes progress. Offsets are in bytes from its beginning;
/// it has a cache line of its own.
pub mod pulse {
    /// 8-byte word: rounds that the worker, and those before it at this place, have made.
    pub const ROUNDS: usize = 0;
    /// 4-byte word: number of the worker's thread, 0 while there is none.
    pub const THREAD: usize = 8;
    /// 4-byte word: nonzero while the worker sleeps, or waits for something with a limit of its own.
    pub const ASLEEP: usize = 12;
    /// Bytes that it takes.
    pub const BYTES: usize = 64;
}

/// Memory shared by the NIC and the host's TCP, to which the NIC lends connections that leave their fast path.
pub mod host_tcp {
    use super::RING_BYTES;

    /// 4-byte word: nonzero while the host's TCP sleeps, so that the NIC must ring its doorbell.
    pub const SLEEPING: usize = 0;
    /// 4-byte word, written by the NIC: the largest number of payload bytes in a frame that its wire accepts for
    /// segmentation.
    pub const SEGMENTATION: usize = 64;
    /// Its sign of life ([`super::pulse`]), for the agent.
    pub const PULSE: usize = 128;
    /// Ring of messages from the NIC: connections lent and recalled, and what their programs have sent.
    pub const COMMANDS: usize = 4096;
    /// Ring of messages to the NIC.
    pub const EVENTS: usize = COMMANDS + RING_BYTES;
    /// Ring of frames from the NIC: those of the connections lent.
    pub const FRAMES_IN: usize = EVENTS + RING_BYTES;
    /// Ring of frames to the NIC: those to be sent.
    pub const FRAMES_OUT: usize = FRAMES_IN + FRAMES_BYTES;
    /// For each slot of the NIC the state of its connection, while that changes hands.
    pub const STATES: usize = FRAMES_OUT + FRAMES_BYTES;
    /// Bytes of a state.
    pub const STATE_BYTES: usize = 1024;

    /// Bytes of a ring of frames: two indices on a cache line each, in a page of their own, then the frames.
    pub const FRAMES_BYTES: usize = 4096 + FRAMES_DATA;
    /// Bytes of the frames, a power of two.
    pub const FRAMES_DATA: usize = 1 << 21;

    /// Bytes of this memory, for a NIC with `slots` slots.
    pub const fn bytes(slots: usize) -> usize {
        STATES + slots * STATE_BYTES
    }

    /// Offset of the state of a slot's connection.
    pub const fn state(slot: u32) -> usize {
        STATES + slot as usize * STATE_BYTES
    }
}

/// A slot of NIC memory: the part of a connection's state that exists as long as it is on the NIC. Offsets are in bytes
/// from the slot's beginning.
pub mod slot {
    /// Parameters of a handoff, words of 4 bytes: session, receive base, receive size, send base, send size, number of
    /// the connection's block.
    pub const PARAMETERS: usize = 8;
    /// 4-byte word, written by the agent: the [`crate::Cid`] of the slot's next occupant, 0 for the first one.
    pub const NEXT_CID: usize = 32;
    /// 4-byte word: the mirroring NIC sets it to 1 while its copy covers the bytes that the kernel holds out of order,
    /// else to 0.
    pub const COVERED: usize = 36;
    /// Parameters of a handoff, continued: the largest window in bytes that it may advertise, 0 for all of its receive
    /// memory, plus [`MAY_GROW`]; then the most bytes of send memory that it may grow to.
    pub const LIMITS: usize = 40;
    /// Bit of the first of [`LIMITS`]: the connection may get more receive memory, and a larger window, if it could use
    /// them.
    pub const MAY_GROW: u32 = 1 << 31;
    /// 4-byte word: sequence number of the first byte that the program has not read, at the time of
    /// [`crate::Control::Resume`].
    pub const READ: usize = 48;
    /// 4-byte word, written by the NIC for a connection of partial offload: twice the number of times that the
    /// connection was lent to the host's TCP (see [`super::host_tcp`]), plus 1 while it is lent.
    pub const LENT: usize = 52;
    /// 4-byte word, written by the NIC: 1 while the connection is dormant, else 0.
    pub const DORMANT: usize = 56;
    /// 4-byte word, written by the NIC: 1 while there may be entries in [`super::scratch::POSTS`], else 0.
    pub const POSTED: usize = 60;
    /// The two copies of the record.
    pub const RECORDS: usize = 64;
    /// The encoded flow: local address, remote address, local port, remote port, index of its device (40 bytes, numbers
    /// little-endian).
    pub const FLOW: usize = 192;
    /// Written by the agent: memory that the connection has grown into, which replaces that of the journal. A 4-byte
    /// word that says which of two copies is valid, 0 for none; then the copies of [`GROWN_WORDS`] words.
    pub const GROWN: usize = 232;
    /// 4-byte words of one such copy: cid, receive base and size, send base and size.
    pub const GROWN_WORDS: usize = 5;
    /// The agent's journal of a move: phase, length, entry. An entry that is too long is in [`super::scratch::JOURNAL`]
    /// instead.
    pub const JOURNAL: usize = 276;
    /// Bytes of the journal.
    pub const JOURNAL_BYTES: usize = super::nic::SLOT_BYTES - JOURNAL;
}

/// The part of a connection's state that is needed while it moves, or has data out of order. Offsets are in bytes from
/// the beginning of a slot's scratch.
pub mod scratch {
    /// The encoded connection image.
    pub const IMAGE: usize = 0;
    /// Bytes of room for it.
    pub const IMAGE_BYTES: usize = RANGES - IMAGE;
    /// Two tables of out-of-order ranges, each of [`MOST_RANGES`] pairs of sequence numbers (8 bytes).
    /// [`crate::Record`] says which one is valid. If a connection has more ranges, only the first ones are here.
    pub const RANGES: usize = 768;
    /// Bytes of one table of ranges.
    pub const RANGES_BYTES: usize = 8 * MOST_RANGES;
    /// Most ranges in a table.
    pub const MOST_RANGES: usize = 64;
    /// An entry of the agent's journal that is too long for the slot.
    pub const JOURNAL: usize = RANGES + 2 * RANGES_BYTES;
    /// Bytes of room for it.
    pub const JOURNAL_BYTES: usize = 1024;
    /// The buffers that the program has posted, for the recovery after the NIC's death: 16 bytes each (sequence number,
    /// address, length, 0). They count while [`super::slot::POSTED`] is set.
    pub const POSTS: usize = JOURNAL + JOURNAL_BYTES;
    /// Bytes of that table.
    pub const POSTS_BYTES: usize = 16 * super::POSTS;
}

/// Number of (address, length) pairs that a connection's send queue holds; a power of two.
pub const PAIRS: usize = 16;

/// Posted buffers that the NIC fills on one connection at a time.
pub const POSTS: usize = 32;

/// Posted buffers that may wait for the NIC's answer on one connection at a time.
pub const POSTS_UNANSWERED: usize = 4;

/// Sends from buffers of the program's own that may be unacknowledged on one connection at a time. Between two of them
/// there is at most one run of bytes in send memory, and one of the runs may wrap around its end.
pub const BUFFERS_SENT: usize = 7;
const _: () = assert!(2 * BUFFERS_SENT + 2 <= PAIRS);

/// Session memory.
///
/// It begins with an area for each NIC that may serve the session ([`area`]): a page of words and two rings. The words
/// that are not a NIC's own are in the first area only.
pub mod session {
    use super::RING_BYTES;
    use super::nic::MAX_NICS;

    /// 4-byte word of a NIC's area: nonzero while the NIC sleeps and wants its doorbell rung.
    pub const NIC_SLEEPING: usize = 0;
    /// 4-byte word of a NIC's area: nonzero while the NIC sends the program's bytes and does not read its messages.
    pub const NIC_SENDING: usize = 4;
    /// 4-byte word: number of the program's sleeping threads, and in its highest bit whether a NIC has rung its
    /// doorbell since the program last looked at its rings. Nonzero without that bit: a NIC must ring.
    pub const PROGRAM_SLEEPING: usize = 64;
    /// 4-byte word: number plus one of the processor of the thread that went to sleep last; 0 if it is not known.
    pub const PROGRAM_PROCESSOR: usize = 68;
    /// 4-byte word: number of moves that the agent has finished. A change makes the program look at its connections'
    /// owners again.
    pub const MOVES: usize = 128;
    /// 4-byte words: numbers of the connections that moved last. The connection of move `n` (counted by [`MOVES`] from
    /// 0) is at `n` modulo [`MOVED_ENTRIES`]; [`ANY`] stands for all connections.
    pub const MOVED: usize = 2048;
    /// Number of words of that table; a power of two.
    pub const MOVED_ENTRIES: u32 = 256;
    /// Not the number of any connection.
    pub const ANY: u32 = u32::MAX;
    /// 4-byte word: number of times that an agent has taken the session over from one that died.
    pub const AGENT_STARTS: usize = 192;
    /// 4-byte word: tag of the request that the program waits for and may still withdraw. The agent replaces it by 0
    /// (compare and exchange) when it takes the request up, and the program when it withdraws the request; the one that
    /// no longer finds the tag is too late.
    pub const ASKED: usize = 196;
    /// 4-byte word: number plus one of the connection that the agent has last given the program for an accept. The
    /// agent writes it before the keeper holds the connection. The program writes 0 when it has received the answer,
    /// before it asks for the next connection. An agent that finds a number other than 0 when it is asked for a
    /// connection gives that connection again: the answer was lost with an earlier agent, or the request was read
    /// twice.
    pub const GIVEN: usize = 204;
    /// 4-byte word, written by the program: offset of its table of sends from buffers of its own, 0 if it has none. For
    /// each connection it has [`super::BUFFERS_SENT`] entries and an unused one, of 16 bytes each: sequence number,
    /// address, length, 0. An entry is valid while the length is not 0: these bytes of the send queue are at the
    /// entry's address, and not in send memory. The program writes it before it queues the bytes, and clears it when
    /// they are acknowledged or the connection has moved. The agent reads it when it restores the connection of a dead
    /// NIC.
    pub const BUFFERS_SENT: usize = 200;
    /// Bytes of that table for one connection.
    pub const BUFFERS_SENT_BYTES: usize = 16 * (super::BUFFERS_SENT + 1);
    /// 4-byte word of a session for messages, written by the agent: how many NICs the session was given to.
    pub const NIC_STARTS: usize = 256;
    /// Most hosts that a session for messages may send to; agent and program keep to the same limit.
    pub const MOST_HOSTS: usize = 8192;
    /// 8-byte words of a session for messages, written by the NIC: packets received and sent, data packets placed,
    /// packets refused or dropped, since the program began to use this NIC.
    pub const PACKETS: usize = 320;
    /// Number of these words.
    pub const PACKETS_WORDS: usize = 4;
    /// Behind them: number of messages of which the NIC has state.
    pub const MESSAGES: usize = PACKETS + 8 * PACKETS_WORDS;
    /// In a NIC's area: ring of commands from the program to the NIC.
    pub const COMMANDS: usize = 4096;
    /// In a NIC's area: ring of messages from the NIC to the program.
    pub const EVENTS: usize = COMMANDS + RING_BYTES;
    /// 4-byte words in the second NIC's area, written by the agent, and by a program that suggests a move: a bit for
    /// each connection, set while the connection is wanted on the NIC. The next agent reads them.
    pub const WISHES: usize = area(1) + 2048;
    /// Bytes of a NIC's area.
    pub const AREA_BYTES: usize = EVENTS + RING_BYTES;
    /// The connection blocks.
    pub const BLOCKS: usize = MAX_NICS * AREA_BYTES;
    /// Bytes of a connection block.
    pub const BLOCK_BYTES: usize = 64;
    /// Connection blocks of a session.
    pub const MAX_CONNECTIONS: usize = 16384;
    /// 4-byte words behind the blocks, one for each connection, written by the program before it suggests a move: bytes
    /// per second that the connection has to carry to be on the NIC; 0 if its traffic does not matter. The agent writes
    /// 0 when it gives the number to a connection, and when a user requests the connection on the NIC. The next agent
    /// reads them.
    pub const HOT_FROM: usize = BLOCKS + MAX_CONNECTIONS * BLOCK_BYTES;
    /// The heap: send and receive memory, and buffers of the program's own.
    pub const HEAP: usize = HOT_FROM + MAX_CONNECTIONS * 4;

    /// End of the part of the heap that holds the connections' send and receive memory. The rest of session memory is
    /// for buffers of the program's own.
    pub const fn heap_end(bytes: usize) -> usize {
        (bytes - bytes / 4) & !4095
    }

    /// Offset of the area of the NIC with this number.
    pub const fn area(nic: usize) -> usize {
        nic * AREA_BYTES
    }

    /// Offset of a connection block.
    pub const fn block(connection: u32) -> usize {
        BLOCKS + connection as usize * BLOCK_BYTES
    }

    /// Offset of a connection's word of [`HOT_FROM`].
    pub const fn hot_from(connection: u32) -> usize {
        HOT_FROM + connection as usize * 4
    }
}

/// A connection block of session memory. Offsets are those of 4-byte words, in bytes from the block's beginning.
pub mod block {
    /// The connection's owner, see [`super::Owner`]. Written by the agent.
    pub const OWNER: usize = 0;
    /// Nonzero while a thread of the program is inside an operation on the connection. Written by the program.
    pub const BUSY: usize = 4;
    /// Number of moves that this connection has made. Written by the agent, before it changes the owner.
    pub const MOVES: usize = 8;
    /// The connection's [`crate::Cid`] while the NIC has it.
    pub const CID: usize = 12;
    /// Offset of the receive memory in session memory.
    pub const RECEIVE_BASE: usize = 16;
    /// Size of the receive memory in bytes, a power of two. A byte lies at its sequence number modulo this.
    pub const RECEIVE_SIZE: usize = 20;
    /// Offset of the send memory in session memory.
    pub const SEND_BASE: usize = 24;
    /// Size of the send memory in bytes, a power of two. A byte lies at its sequence number modulo this.
    pub const SEND_SIZE: usize = 28;
    /// Sequence number of the first byte that the program has not read. Written by the agent at a handoff, then by the
    /// program.
    pub const READ_SEQ: usize = 32;
    /// Next sequence number expected at the handoff, a received FIN not counted.
    pub const RECEIVE_SEQ: usize = 36;
    /// Oldest unacknowledged sequence number at the handoff.
    pub const ACKED_SEQ: usize = 40;
    /// Sequence number behind the last byte queued. Written by the agent at a handoff, then by the program.
    pub const QUEUED_SEQ: usize = 44;
    /// The bits [`FLAG_FIN_RECEIVED`], [`FLAG_SHUT_DOWN`], [`FLAG_KEEPALIVE`], [`FLAG_OPENING`], [`FLAG_CORK`],
    /// [`FLAG_CLOSED`], [`FLAG_NODELAY`], [`FLAG_SHARED`] and [`FLAG_RECEIVING_SHUT`], and from [`QUEUE_SHIFT`] and
    /// [`REPORT_SHIFT`] on a number. Written by the agent at a handoff, then by the program, and by the agent again
    /// after the program has closed the connection.
    pub const FLAGS: usize = 48;
    /// The processor that the connection's worker runs on, plus one, while the NIC owns the connection; 0 if not known.
    /// Written by the NIC.
    pub const PROCESSOR: usize = 52;
    /// The same word while the kernel owns the connection: a count of bytes that the program sends and receives, modulo
    /// 2³², which does not begin at 0. Written by the program.
    pub const TRAFFIC: usize = PROCESSOR;

    /// Linux's number of the error for which the NIC could not open the connection, 0 for none. [`ended_on_nic`] when
    /// the connection has ended on the NIC, whose last event says how. Written by the agent.
    pub const ERROR: usize = 56;
    /// A value of [`ERROR`] that is no error's number: the connection has ended without leaving the NIC, and its end
    /// counts as the move with this number ([`MOVES`]). It is written before the count, so a reader that still sees an
    /// earlier count sees that the value does not match it.
    pub const fn ended_on_nic(moves: u32) -> u32 {
        ENDED_ON_NIC | moves
    }
    /// Bit of [`ERROR`]: see [`ended_on_nic`].
    pub const ENDED_ON_NIC: u32 = 1 << 31;
    /// Written by the program: while more than this many bytes are queued or unacknowledged, an acknowledgement does
    /// not ring the doorbell, since no thread waits for so little room; 0 if each acknowledgement is to ring it.
    pub const QUIET_ABOVE: usize = 60;

    /// Bit of [`FLAGS`]: the peer's FIN had been received at the handoff.
    pub const FLAG_FIN_RECEIVED: u32 = 1;
    /// Bit of [`FLAGS`]: the program has shut down its sending side.
    pub const FLAG_SHUT_DOWN: u32 = 1 << 1;
    /// Bit of [`FLAGS`]: SO_KEEPALIVE is on.
    pub const FLAG_KEEPALIVE: u32 = 1 << 2;
    /// Bit of [`FLAGS`]: the NIC is opening the connection.
    pub const FLAG_OPENING: u32 = 1 << 3;
    /// Bit of [`FLAGS`]: TCP_CORK is on.
    pub const FLAG_CORK: u32 = 1 << 4;
    /// Bit of [`FLAGS`]: the program has closed the connection, which is forgotten when it is in the kernel, or when
    /// the NIC has closed it in order. Written by the program before it asks the agent to forget it, and by the agent
    /// when the NIC closes it.
    pub const FLAG_CLOSED: u32 = 1 << 5;
    /// Bit of [`FLAGS`]: TCP_NODELAY is on.
    pub const FLAG_NODELAY: u32 = 1 << 6;
    /// The bits of [`FLAGS`] from this one on: the most bytes that the program may queue, in units of 1024,
    /// [`QUEUE_MASK`] of them; 0 if that is all of its send memory. The program changes it when it sets SO_SNDBUF.
    pub const QUEUE_SHIFT: u32 = 7;
    /// Greatest value of these bits.
    pub const QUEUE_MASK: u32 = (1 << 17) - 1;
    /// The bits of [`FLAGS`] from this one on: log2 of the bytes that the program may read before it reports them to
    /// the NIC, if that is less than usual because SO_RCVBUF makes the window small; else 0.
    pub const REPORT_SHIFT: u32 = 24;
    /// Greatest value of these bits.
    pub const REPORT_MASK: u32 = 31;
    /// Bit of [`FLAGS`]: other processes may have the connection's socket, since its program has forked while the
    /// kernel had the connection. Written by the program after it has forked, at the end of the operation that it was
    /// inside during the fork; the agent clears it when it begins to search for such processes.
    pub const FLAG_SHARED: u32 = 1 << 29;
    /// Bit of [`FLAGS`]: the program has shut down receiving, and the connection could not leave the NIC for that. The
    /// kernel's socket is shut down when the connection is restored.
    pub const FLAG_RECEIVING_SHUT: u32 = 1 << 31;

    /// What [`FLAGS`] has for a program that may queue `bytes`.
    pub const fn queue_bits(bytes: u32) -> u32 {
        let units = bytes.div_ceil(1024);
        (if units > QUEUE_MASK { QUEUE_MASK } else { units }) << QUEUE_SHIFT
    }

    /// The most bytes that a program with these [`FLAGS`] may queue, [`u32::MAX`] if only its send memory limits them.
    pub const fn most_queued(flags: u32) -> u32 {
        match flags >> QUEUE_SHIFT & QUEUE_MASK {
            0 => u32::MAX,
            units => units * 1024,
        }
    }
}

/// The page of words in front of a UDP socket's rings, in session memory. Offsets are those of 4-byte words.
pub mod datagrams {
    /// 1 while the NIC has the socket's datagrams, else 0. Written by the agent.
    pub const ON_NIC: usize = 0;
    /// Counts changes of the routes to the hosts that the socket sends to; after a change the program asks for them
    /// again. Written by the agent.
    pub const WAYS: usize = 4;
    /// [`held`] as long as a NIC may use the rings, so that their memory must not be used for anything else. With any
    /// other value, also that of a dead agent, no NIC uses them, and the agent no longer writes here. Written by the
    /// agent.
    pub const HELD: usize = 8;
    /// Position behind the last datagram in the receive ring. Written by the NIC.
    pub const RECEIVE_HEAD: usize = 64;
    /// Position behind the last datagram that the program has read.
    pub const RECEIVE_TAIL: usize = 128;
    /// Nonzero while the program wants its doorbell rung for the next datagram.
    pub const RECEIVE_WISH: usize = 192;
    /// Position behind the last datagram in the send ring. Written by the program.
    pub const SEND_HEAD: usize = 256;
    /// Position behind the last datagram that the NIC has sent.
    pub const SEND_TAIL: usize = 320;
    /// Nonzero while the NIC wants a message ([`crate::Control::Datagrams`]) for the next datagram.
    pub const SEND_WISH: usize = 384;
    /// Bytes of the page.
    pub const BYTES: usize = 4096;

    /// Most hosts that a socket has routes to; NIC, agent and program keep to the same limit.
    pub const MOST_HOSTS: usize = 4096;

    /// The value of [`HELD`] while a NIC may use the rings, written by an agent that has read `starts` from
    /// [`super::session::AGENT_STARTS`].
    pub const fn held(starts: u32) -> u32 {
        starts.wrapping_add(1)
    }
}

/// The owner of a connection, as [`block::OWNER`] holds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Owner {
    /// The block is free.
    Nobody = 0,
    /// The kernel: operations go to the socket's descriptor.
    Kernel = 1,
    /// The NIC: operations go through the rings.
    Nic = 2,
    /// The connection is moving: operations wait.
    Moving = 3,
}

impl Owner {
    /// The owner with this number; an unknown number means a free block.
    pub fn from_number(number: u32) -> Owner {
        match number {
            1 => Owner::Kernel,
            2 => Owner::Nic,
            3 => Owner::Moving,
            _ => Owner::Nobody,
        }
    }
}

/// The counters of a worker, in the order in which they lie in NIC memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Counter {
    /// Frames received from the wire.
    WireReceived,
    /// Frames sent to the wire.
    WireSent,
    /// Frames received from the kernel.
    HostReceived,
    /// Frames sent to the kernel.
    HostSent,
    /// Segments received for offloaded connections.
    Segments,
    /// Frames of the kernel's that were dropped because the NIC owns their connection.
    Silenced,
    /// Segments of offloaded connections dropped for a wrong checksum.
    BadChecksum,
    /// Messages from programs that were malformed or not allowed.
    BadMessages,
    /// Frames that were dropped because a device or a queue was full.
    Dropped,
    /// Segments of offloaded connections that were retransmitted.
    Retransmitted,
    /// Offloaded connections at present.
    Connections,
    /// Nanoseconds spent in rounds that found work.
    BusyNanoseconds,
    /// Frames that the emulated link lost.
    LinkLost,
    /// Frames that found the emulated link's buffer full.
    LinkOverflowed,
    /// Large frames of the kernel's that were cut into segments.
    Cut,
    /// Segments that large frames were cut into.
    CutSegments,
    /// Large frames of the kernel's that could not be cut and were dropped.
    Uncut,
    /// Segments merged into aggregates for the kernel.
    Merged,
    /// Aggregates sent to the kernel.
    Aggregates,
    /// Bytes of the aggregates' IP packets.
    AggregateBytes,
    /// Segments that large receive has put in order for the kernel.
    Reordered,
    /// Segments that large receive holds out of order at present.
    Held,
    /// Bursts of frames to the kernel: each stands for an interrupt of a network card.
    Interrupts,
    /// Frames that one worker received and another one owns: forwarded to that worker.
    Redirected,
    /// Buckets of the indirection table that this worker has handed over to another.
    Buckets,
    /// Data segments of offloaded connections that arrived ahead of a gap.
    Disordered,
    /// Acknowledgements that the NIC has sent for the kernel's connections (active acknowledgements).
    Acknowledged,
    /// Segments sent to the kernel again because it had not acknowledged data that the NIC had acknowledged for it.
    Redelivered,
    /// Doorbells rung for sleeping programs.
    Doorbells,
    /// SYN segments that the copy engine sent to the kernel before frames that had waited longer.
    SynPrioritized,
    /// Nanoseconds spent writing frames to the kernel: the first half of an interrupt (the deferred half runs in the
    /// kernel).
    InterruptNanoseconds,
    /// Nanoseconds spent ringing programs' doorbells.
    DoorbellNanoseconds,
    /// Connections that the NIC has made: handshakes that it has completed.
    Made,
    /// SYNs answered without remembering them, since the table of handshakes was full (SYN cookies).
    SynCookies,
    /// SYNs and last segments of handshakes that were dropped because the listener's accept queue was full.
    AcceptQueueFull,
    /// Times that a connection left its fast path and was lent to the host's TCP.
    Lent,
    /// Times that a lent connection came back.
    TakenBack,
    /// Segments passed to the host's TCP, for connections that were lent to it.
    LentSegments,
    /// Datagrams received for programs' UDP sockets.
    DatagramsReceived,
    /// Datagrams sent for programs' UDP sockets.
    DatagramsSent,
    /// Datagrams dropped because a socket's receive ring was full, or because there was no route to their destination.
    DatagramsDropped,
    /// Messages of programs that announce bytes to send (`nic_send`).
    ProgramSend,
    /// Frames of ARP and neighbour discovery that no host may use, dropped while the NIC has addresses of its own.
    BadResolution,
    /// Offloaded connections that are dormant at present.
    Dormant,
    /// Announcements of free room (`os_resource`).
    Announcements,
    /// The agent's commands that exceeded the announced room, and were refused.
    Exceeded,
    /// Times that the NIC began to announce no room since its processor was too busy.
    TooBusy,
    /// Messages of programs that report bytes which they have read (`nic_recvd`).
    ProgramRecvd,
    /// Messages of programs that post buffers (`nic_post`).
    ProgramPost,
    /// Messages of programs with other commands (`nic_ctrl`).
    ProgramControl,
    /// Messages to programs about received bytes (`os_recv`).
    ToProgramRecv,
    /// Messages to programs about acknowledged bytes (`os_ack`).
    ToProgramAck,
    /// Messages to programs with other events (`os_ctrl`).
    ToProgramControl,
    /// Messages of the agent that hand a connection over (`nic_handoff`).
    AgentHandoff,
    /// Messages of the agent that restore a connection (`nic_restore`).
    AgentRestore,
    /// Messages of the agent with a frame that reached the host (`nic_forward`).
    AgentForward,
    /// Messages of the agent with other commands (`nic_ctrl`).
    AgentControl,
    /// Messages to the agent with answers and events (`os_ctrl`).
    ToAgentControl,
    /// Messages that ask the agent to take a connection back (`os_restore`). (Messages about free room are counted in
    /// [`Counter::Announcements`].)
    ToAgentRestore,
    /// Plain segments of offloaded connections that header prediction did not expect, though they were the next in
    /// order.
    Unpredicted,
    /// Connections that the host was asked to take back since their peer's FIN had come.
    PeerFins,
    /// Aggregates or single segments that large receive gave to the kernel since they had no room for another segment.
    EndedFull,
    /// The same, since its last segment had FIN.
    EndedFin,
    /// The same, since its last segment had PSH.
    EndedPush,
    /// The same, since its last segment was shorter than the others.
    EndedShort,
    /// The same, since the connection's next frame could not be appended.
    EndedOther,
    /// The same, since no segment came for a while, or it had waited for the longest time.
    EndedTimeout,
    /// The same, since the settings changed or the connection went to the NIC.
    EndedRequested,
    /// Data segments that large receive gave to the kernel alone.
    Alone,
    /// Segments whose data large receive had given to the kernel before, or held already.
    Old,
    /// Missing segments for which large receive stopped waiting.
    Gaps,
    /// Segments for which large receive had no descriptor, buffer or room.
    Unhoused,
    /// Frames that large receive passed on unchanged, since each was made of several segments already.
    PassedLarge,
    /// The same, since they were not IP.
    PassedNotIp,
    /// The same, since they were not TCP.
    PassedNotTcp,
    /// The same, since they were fragments.
    PassedFragment,
    /// The same, since a length or an offset in them was wrong.
    PassedMalformed,
    /// The same, since they had IPv4 options.
    PassedIpOptions,
    /// The same, since bytes followed the IP packet.
    PassedPadded,
    /// The same, since a checksum was wrong.
    PassedChecksum,
    /// The same, since they had SYN, RST, URG or CWR, or no ACK.
    PassedFlags,
    /// The same, since they carried no data.
    PassedNoData,
    /// Doorbells rung for the agent.
    AgentDoorbells,
}

/// Number of counters.
pub const COUNTERS: usize = 83;

const _: () = {
    assert!(COUNTERS * 8 <= nic::COUNTERS_BYTES && nic::pulse(nic::MAX_WORKERS) <= nic::COMMANDS);
    assert!(nic::address(nic::MOST_ADDRESSES) <= nic::AGENT_PULSE && nic::PULSES.is_multiple_of(64));
    assert!(slot::PARAMETERS + 24 <= slot::NEXT_CID && slot::LIMITS + 8 <= slot::READ && slot::POSTED + 4 <= slot::RECORDS);
    assert!(slot::RECORDS.is_multiple_of(64) && slot::RECORDS + 2 * crate::record::WORDS * 8 <= slot::FLOW);
    assert!(slot::FLOW + 40 <= slot::GROWN && slot::GROWN + 4 + 8 * slot::GROWN_WORDS <= slot::JOURNAL);
    assert!(nic::SLOT_BYTES.is_multiple_of(64), "records lie in cache lines of their own");
    assert!(scratch::POSTS + scratch::POSTS_BYTES <= nic::SCRATCH_BYTES);
    assert!(host_tcp::FRAMES_DATA.is_power_of_two());
    assert!(session::HEAP.is_multiple_of(4096) && 2048 + session::MAX_CONNECTIONS / 8 <= session::COMMANDS);
    assert!(block::QUIET_ABOVE + 4 <= session::BLOCK_BYTES);
    assert!(block::REPORT_MASK << block::REPORT_SHIFT < block::FLAG_SHARED && block::FLAG_SHARED < block::FLAG_RECEIVING_SHUT);
    assert!(block::FLAG_NODELAY < 1 << block::QUEUE_SHIFT && block::QUEUE_MASK << block::QUEUE_SHIFT < 1 << block::REPORT_SHIFT);
};
