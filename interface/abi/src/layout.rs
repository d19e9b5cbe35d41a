//! Where things lie in shared memory. Two kinds of region exist.
//!
//! *NIC memory*, shared by agent and NIC, not by programs: a header, the two control rings, one slot per connection.
//! *Session memory*, shared by one program, the agent and the NIC: a header, the two rings, one block per connection, the heap
//! with the send and receive memory. The program can write all of its session memory, so the NIC believes none of it.

/// Messages that a ring holds.
pub const RING_MESSAGES: usize = 4096;
/// 8-byte words of a ring: head, tail and the consumer's sleep flag on a cache line each, then the messages.
pub const RING_WORDS: usize = 24 + 2 * RING_MESSAGES;
/// Bytes of a ring, rounded up to a page.
pub const RING_BYTES: usize = (RING_WORDS * 8).next_multiple_of(4096);

/// NIC memory.
pub mod nic {
    use super::RING_BYTES;

    /// 4-byte word: nonzero while the NIC sleeps and wants its doorbell rung.
    pub const SLEEPING: usize = 0;
    /// 4-byte word that the agent counts up when something waits on the control connection.
    pub const CHANNEL: usize = 32;
    /// 8-byte word: the NIC's heartbeat, microseconds of its clock.
    pub const HEARTBEAT: usize = 64;
    /// 4-byte word for tests: how often a step after which somebody is to die has been made.
    pub const CHAOS: usize = 96;
    /// 4-byte word of the agent's: so many slots, the first ones, have ever had a connection. The others' memory was never touched.
    pub const SLOTS_USED: usize = 100;
    /// 4-byte word of the agent's: the number, plus one, of the session that it is seeing to, or 0. The keeper looks at it when it has died.
    pub const ATTENDED: usize = 104;
    /// 8-byte words of counters, see [`crate::layout::Counter`]: a block for each worker.
    pub const COUNTERS: usize = 128;
    /// Bytes of a worker's block of counters.
    pub const COUNTERS_BYTES: usize = 256;
    /// Workers that there may be.
    pub const MAX_WORKERS: usize = 16;
    /// Ring of commands from the agent.
    pub const COMMANDS: usize = 8192;
    /// Ring of messages to the agent.
    pub const EVENTS: usize = COMMANDS + RING_BYTES;
    /// The slots.
    pub const SLOTS: usize = EVENTS + RING_BYTES;
    /// Bytes of a slot.
    pub const SLOT_BYTES: usize = 4096;

    /// Places for data that the NIC has acknowledged for the kernel, behind the slots.
    pub const ACKNOWLEDGED: usize = 256;
    /// Bytes of such a place.
    pub const ACKNOWLEDGED_BYTES: usize = (256 << 10) + 4096;

    /// Bytes of NIC memory with this many slots.
    pub const fn bytes(slots: usize) -> usize {
        acknowledged(slots) + ACKNOWLEDGED * ACKNOWLEDGED_BYTES
    }

    /// Offset of the places for acknowledged data.
    pub const fn acknowledged(slots: usize) -> usize {
        SLOTS + slots * SLOT_BYTES
    }

    /// Offset of a worker's counters.
    pub const fn counters(worker: usize) -> usize {
        COUNTERS + worker * COUNTERS_BYTES
    }

    /// Offset of a slot.
    pub const fn slot(slot: u32) -> usize {
        SLOTS + slot as usize * SLOT_BYTES
    }
}

/// A slot of NIC memory; offsets are from the slot's beginning.
pub mod slot {
    /// 8-byte word: which copy of the record counts, and how often it was published (parity selects the copy; 0 for none).
    pub const PUBLISHED: usize = 0;
    /// The two copies of the record.
    pub const RECORDS: usize = 64;
    /// Parameters of a handoff, words of 4 bytes: session, receive base, receive size, send base, send size,
    /// number of the connection's block.
    pub const PARAMETERS: usize = 192;
    /// 4-byte word that a mirroring NIC sets to 1 once its copy covers what the kernel holds out of order, else 0.
    pub const COVERED: usize = PARAMETERS + 28;
    /// 4-byte word of the agent's: the [`crate::Cid`] of the slot's next tenant, 0 for the first.
    pub const NEXT_NAME: usize = PARAMETERS + 24;
    /// Parameters of a handoff, continued: bytes of receive memory, then of send memory, that the connection may have at most; 0 for no more
    /// than it is given.
    pub const LIMITS: usize = PARAMETERS + 32;
    /// 4-byte word: how far the program has read when [`crate::Control::Resume`] is commanded.
    pub const READ: usize = PARAMETERS + 40;
    /// The agent's: memory that the connection has instead of what the journal says. A word that says which of two copies counts, 0 for
    /// none; then the copies of [`GROWN_WORDS`] words.
    pub const GROWN: usize = 448;
    /// Words of 4 bytes of such a copy: cid, receive base and size, send base and size.
    pub const GROWN_WORDS: usize = 5;
    /// The encoded flow: local address, remote address, local port, remote port (36 bytes, ports little-endian).
    pub const FLOW: usize = 256;
    /// The buffers that the program has posted, for whoever finds the NIC dead: 16 bytes each (sequence number, address, length, 0).
    pub const POSTS: usize = 384;
    /// Bytes of that table.
    pub const POSTS_BYTES: usize = 16 * super::POSTS;
    /// The image.
    pub const IMAGE: usize = 512;
    /// The agent's journal of a move: phase, length, entry.
    pub const JOURNAL: usize = 2048;
    /// Bytes of the journal.
    pub const JOURNAL_BYTES: usize = FORWARD - JOURNAL;
    /// A frame to be forwarded (`nic_forward`).
    pub const FORWARD: usize = 3072;
    /// Two tables of out-of-order ranges, 64 × 8 bytes each.
    pub const RANGES: usize = 1024;
    /// Bytes of one table of ranges.
    pub const RANGES_BYTES: usize = 512;
}

/// (Address, length) pairs that a connection's send queue holds; a power of two.
pub const PAIRS: usize = 16;

/// Buffers that a program may have posted on one connection at a time.
pub const POSTS: usize = 4;

/// Session memory.
pub mod session {
    use super::RING_BYTES;

    /// 4-byte word: nonzero while the NIC sleeps and wants its doorbell rung.
    pub const NIC_SLEEPING: usize = 0;
    /// 4-byte word: nonzero while the program sleeps and wants its doorbell rung.
    pub const PROGRAM_SLEEPING: usize = 64;
    /// 4-byte word: counts the moves that the agent has finished, so that the program looks at its connections again.
    pub const MOVES: usize = 128;
    /// 4-byte words: numbers of the connections that moved last, each at the count of moves before its own, modulo [`MOVED_ENTRIES`].
    /// [`ANY`] stands for all of them.
    pub const MOVED: usize = 2048;
    /// Words of that table; a power of two.
    pub const MOVED_ENTRIES: u32 = 256;
    /// No connection's number.
    pub const ANY: u32 = u32::MAX;
    /// 4-byte word: how often an agent has taken the session over from one that died.
    pub const AGENT_STARTS: usize = 192;
    /// Ring of commands from the program.
    pub const COMMANDS: usize = 4096;
    /// Ring of messages to the program.
    pub const EVENTS: usize = COMMANDS + RING_BYTES;
    /// The connection blocks.
    pub const BLOCKS: usize = EVENTS + RING_BYTES;
    /// Bytes of a connection block.
    pub const BLOCK_BYTES: usize = 128;
    /// Connection blocks of a session.
    pub const MAX_CONNECTIONS: usize = 16384;
    /// The heap.
    pub const HEAP: usize = BLOCKS + MAX_CONNECTIONS * BLOCK_BYTES;

    /// Where the heap ends that connections have their memory in. The rest of session memory is for buffers of the program's own.
    pub const fn heap_end(bytes: usize) -> usize {
        (bytes - bytes / 4) & !4095
    }

    /// Offset of a connection block.
    pub const fn block(connection: u32) -> usize {
        BLOCKS + connection as usize * BLOCK_BYTES
    }
}

/// A connection block of session memory; offsets of 4-byte words from the block's beginning.
pub mod block {
    /// Who owns the connection, see [`super::Owner`]. Written by the agent.
    pub const OWNER: usize = 0;
    /// Nonzero while the program is inside an operation on the connection. Written by the program.
    pub const BUSY: usize = 4;
    /// Moves that this connection has made. Written by the agent, before the owner changes.
    pub const MOVES: usize = 8;
    /// The connection's [`crate::Cid`] while the NIC has it.
    pub const CID: usize = 12;
    /// Base of the receive memory.
    pub const RECEIVE_BASE: usize = 16;
    /// Size of the receive memory, a power of two. A byte lies at its sequence number modulo this.
    pub const RECEIVE_SIZE: usize = 20;
    /// Base of the send memory.
    pub const SEND_BASE: usize = 24;
    /// Size of the send memory, a power of two. A byte lies at its sequence number modulo this.
    pub const SEND_SIZE: usize = 28;
    /// At a handoff: sequence number of the first unread byte. Then the program's: how far it has read.
    pub const READ_SEQ: usize = 32;
    /// At a handoff: next sequence number expected, a received FIN not counted.
    pub const RECEIVE_SEQ: usize = 36;
    /// At a handoff: oldest unacknowledged sequence number.
    pub const ACKED_SEQ: usize = 40;
    /// At a handoff: sequence number behind the last byte queued. Then the program's: how far it has queued.
    pub const QUEUED_SEQ: usize = 44;
    /// At a handoff: bit 0 the peer's FIN has come. Then the program's: bit 1 it has shut its sending side, bit 2 SO_KEEPALIVE.
    pub const FLAGS: usize = 48;
    /// While the NIC has it: the processor that its worker runs on, plus one; 0 if that is not known. Written by the NIC.
    pub const PROCESSOR: usize = 52;
}

/// Owners of a connection, as [`block::OWNER`] holds them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Owner {
    /// The block is free.
    Nobody = 0,
    /// The kernel: the descriptor works as ever.
    Kernel = 1,
    /// The NIC: the rings are the way.
    Nic = 2,
    /// In between: operations wait.
    Moving = 3,
}

impl Owner {
    /// The owner of this number; anything unknown is a free block.
    pub fn from_number(number: u32) -> Owner {
        match number {
            1 => Owner::Kernel,
            2 => Owner::Nic,
            3 => Owner::Moving,
            _ => Owner::Nobody,
        }
    }
}

/// Counters of the NIC, in the order in which they lie in NIC memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Counter {
    /// Frames from the wire.
    WireReceived,
    /// Frames to the wire.
    WireSent,
    /// Frames from the kernel.
    HostReceived,
    /// Frames to the kernel.
    HostSent,
    /// Segments given to offloaded connections.
    Segments,
    /// Frames of the kernel's that were silenced because the NIC owns their connection.
    Silenced,
    /// Segments of offloaded connections dropped for a wrong checksum.
    BadChecksum,
    /// Messages from programs that made no sense.
    BadMessages,
    /// Frames that found a device or a holding queue full.
    Dropped,
    /// Segments retransmitted.
    Retransmitted,
    /// Connections on the NIC now.
    Connections,
    /// Nanoseconds of polls that found work.
    BusyNanoseconds,
    /// Frames that the emulated link lost.
    LinkLost,
    /// Frames that overflowed the emulated link's buffer.
    LinkOverflowed,
    /// Large frames of the kernel's that were cut.
    Cut,
    /// Segments that they were cut into.
    CutSegments,
    /// Large frames that could not be cut.
    Uncut,
    /// Segments that became part of an aggregate for the kernel.
    Merged,
    /// Aggregates.
    Aggregates,
    /// IP bytes of aggregates.
    AggregateBytes,
    /// Segments that were put in order for the kernel.
    Reordered,
    /// Segments that are held out of order now.
    Held,
    /// Bursts of frames to the kernel: what an interrupt is for a card.
    Interrupts,
    /// Frames that came to one worker and were another's.
    Passed,
    /// Buckets of connections that this worker has given to another.
    Buckets,
    /// Data segments of offloaded connections that came before others that were sent earlier.
    Disordered,
    /// Acknowledgements of the NIC's own for the kernel's connections.
    Acknowledged,
    /// Segments that the kernel was given again, since it had not acknowledged what the NIC had.
    GivenAgain,
    /// Doorbells rung for programs that slept.
    Doorbells,
    /// Segments that set up connections, and went to the kernel before frames that had waited longer.
    WentBefore,
    /// Nanoseconds of writing frames to the kernel: the first half of an interrupt. The deferred half is the kernel's.
    InterruptNanoseconds,
    /// Nanoseconds of ringing programs' doorbells.
    DoorbellNanoseconds,
}

/// How many counters there are.
pub const COUNTERS: usize = 32;

const _: () = {
    assert!(COUNTERS * 8 <= nic::COUNTERS_BYTES && nic::counters(nic::MAX_WORKERS) <= nic::COMMANDS);
    assert!(slot::RECORDS + 2 * crate::record::WORDS * 8 <= slot::PARAMETERS);
    assert!(slot::RANGES + 2 * slot::RANGES_BYTES <= slot::JOURNAL);
    assert!(slot::NEXT_NAME + 4 <= slot::COVERED && slot::COVERED + 4 <= slot::FLOW);
    assert!(slot::READ + 4 <= slot::FLOW && slot::POSTS + slot::POSTS_BYTES <= slot::GROWN);
    assert!(slot::GROWN + 4 + 8 * slot::GROWN_WORDS <= slot::IMAGE);
    assert!(slot::FORWARD < nic::SLOT_BYTES);
    assert!(session::HEAP.is_multiple_of(4096));
    assert!(block::PROCESSOR + 4 <= session::BLOCK_BYTES);
};
