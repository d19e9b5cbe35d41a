//! An offloaded connection: its TCP, its memory, its recovery record.

use crate::growth::Growth;
use crate::icmp::MIN_MTU;
use crate::partial::Path;
use crate::posted::{Receive, Table};
use crate::send_queue::{Pair, References};
use baton_abi::layout::{self, slot as at};
use baton_abi::record::{STEP, WORDS, copy};
use baton_device::Payload;
use baton_image::Image;
use baton_recovery::{Post, gather, published};
use baton_shm::{Pool, Region, Shared, WordArray, prefetch};
use baton_tcp::Connection;
use baton_wire::frame::Template;
use core::mem::offset_of;
use core::sync::atomic::Ordering;
use std::sync::Arc;

mod record;
mod tcp;

pub(crate) use tcp::Tcp;

/// As long as so many bytes are queued, a short path stays busy until a program has woken up: 80 us at 25 Gb/s.
const LASTS: u32 = 1 << 18;

/// The events that have not been sent to the program.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pending {
    /// Bytes received, and the offset in session memory of the first of them.
    pub received: u32,
    pub received_at: u32,
    /// Bytes acknowledged by the peer.
    pub acked: u32,
    pub fin: bool,
    pub closed: bool,
    /// Linux's error number, with `closed`.
    pub error: u32,
    /// The answers to posts, in order: the sequence numbers at which the buffers begin.
    pub posted: [u32; layout::POSTS_UNANSWERED],
    pub answers: u8,
}

impl Pending {
    /// Appends later events.
    pub fn add(&mut self, later: &Pending) {
        if self.received == 0 {
            self.received_at = later.received_at;
        }
        self.received += later.received;
        self.acked += later.acked;
        self.fin |= later.fin;
        self.closed |= later.closed;
        self.error |= later.error;
        let room = layout::POSTS_UNANSWERED - usize::from(self.answers);
        // A program that posts without reading the answers loses some of them, and harms only itself.
        let answers = usize::from(later.answers).min(room);
        self.posted[usize::from(self.answers)..][..answers].copy_from_slice(&later.posted[..answers]);
        self.answers += answers as u8;
    }

    /// Notes that `length` bytes of receive memory from sequence number `seq` on have become readable.
    #[inline(always)]
    pub fn note_delivered(&mut self, receive: &Receive, seq: u32, length: u32) {
        if self.received == 0 {
            self.received_at = receive.offset_of(seq);
        }
        self.received += length;
    }

    /// Whether there are events other than received and acknowledged bytes.
    #[inline(always)]
    pub fn has_rare(&self) -> bool {
        self.fin | self.closed | (self.answers > 0)
    }

    /// Whether there is any event.
    #[inline(always)]
    pub fn any(&self) -> bool {
        (self.received | self.acked) > 0 || self.has_rare()
    }
}

/// An offloaded connection. A predicted segment needs three cache lines of it: what comes before the template, the
/// beginning of that, and [`Connection::USUAL`].
#[repr(C)]
pub(crate) struct Offloaded {
    /// The two copies of the record.
    record: WordArray<{ 2 * WORDS }>,
    /// Number of the next publication of the record.
    next: u64,
    pub receive: Receive,
    pub session: u32,
    /// The valid table of out-of-order ranges, and its length.
    ranges_table: u8,
    ranges: u8,
    /// The program announces with one message what it has queued so far ([`baton_abi::FETCH`]).
    pub fetches: bool,
    /// Its program has closed it, and is sent no more events.
    pub closing: bool,
    pub template: Template,
    pub tcp: Tcp,
    /// Where its TCP runs.
    pub path: Path,
    pub image: Image,
    pub session_memory: Arc<Region>,
    pub pending: Pending,
    /// IPv4 identification of the next segment.
    pub ident: u16,
    pub growth: Growth,
    /// In the host's TCP: segments of the fast path since the last other one; [`u32::MAX`] once it has offered to give
    /// the connection back.
    pub in_order: u32,
    pub memory: Memory,
    queue: References,
    /// Offset and size of send memory, and offset of the word up to which the program has filled it.
    send_base: u32,
    send_size: u32,
    queued_offset: usize,
    nic_memory: Arc<Region>,
    /// Number of its slot.
    slot: u32,
    /// Offset in session memory of the word with the processor, for the program.
    processor_offset: usize,
    /// Offset in session memory of [`layout::block::QUIET_ABOVE`].
    quiet_offset: usize,
}

const _: () = {
    assert!(
        align_of::<Offloaded>() == 64 && offset_of!(Offloaded, template) == 64,
        "a cache line, and the template begins another one"
    );
    assert!(Template::HOT <= 64 && offset_of!(Offloaded, tcp).is_multiple_of(64));
    assert!(Connection::USUAL.start.is_multiple_of(64) && Connection::USUAL.end - Connection::USUAL.start == 64);
};

/// The offloaded connections: close to each other, since the state of many is what a NIC's memory accesses are for.
static OFFLOADED: Pool<Offloaded> = Pool::new();

impl Shared for Offloaded {
    fn pool() -> &'static Pool<Offloaded> {
        &OFFLOADED
    }
}

/// The location of a connection's memory and block, to be checked against the session's memory before it is used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub receive_base: u32,
    pub receive_size: u32,
    pub send_base: u32,
    pub send_size: u32,
    pub block: u32,
}

impl Memory {
    /// Whether both areas have a power of two as size and lie inside the session's heap, and the block exists.
    pub fn fits(&self, session: &Region) -> bool {
        let inside = |base: u32, size: u32| {
            size.is_power_of_two() && base as usize >= layout::session::HEAP && base as usize + size as usize <= session.len()
        };
        let has_block = (self.block as usize) < layout::session::MAX_CONNECTIONS;
        inside(self.receive_base, self.receive_size) && inside(self.send_base, self.send_size) && has_block
    }

    /// Whether there is room for the queues of an image, and for the window that it has advertised.
    pub fn holds(&self, image: &Image) -> bool {
        let window_end = u64::from(image.unread) + u64::from(image.rcv_adv.wrapping_sub(image.rcv_nxt));
        window_end <= u64::from(self.receive_size) && image.send_queue() <= self.send_size
    }
}

impl Offloaded {
    /// Makes an offloaded connection of the one that was made from an image. None if its memory does not lie in the
    /// session's.
    pub fn new(
        tcp: Connection,
        image: &Image,
        memory: Memory,
        session: u32,
        session_memory: Arc<Region>,
        nic_memory: Arc<Region>,
        slot: u32,
    ) -> Option<Self> {
        let receive = session_memory.circle(memory.receive_base, memory.receive_size)?;
        let record = nic_memory.shared_array(layout::nic::slot(slot) + at::RECORDS);
        let mut offloaded = Offloaded {
            tcp: Tcp::new(tcp),
            next: published(&*record) + STEP,
            record,
            path: Path::default(),
            template: Template::new(&image.flow, &image.link, image.timestamps),
            image: *image,
            session,
            receive: Receive::new(receive, &Table::new(nic_memory.clone(), slot)),
            pending: Pending::default(),
            ident: image.snd_nxt as u16,
            growth: Growth::default(),
            in_order: 0,
            memory,
            closing: false,
            queue: References::default(),
            send_base: memory.send_base,
            send_size: memory.send_size,
            queued_offset: layout::session::block(memory.block) + layout::block::QUEUED_SEQ,
            fetches: false,
            session_memory,
            nic_memory,
            slot,
            processor_offset: layout::session::block(memory.block) + layout::block::PROCESSOR,
            quiet_offset: layout::session::block(memory.block) + layout::block::QUIET_ABOVE,
            ranges_table: 0,
            ranges: 0,
        };
        offloaded.adopt_send_queue(image, memory);
        offloaded.set_mtu(image.mtu);
        Some(offloaded)
    }

    /// Sets the path MTU of what is sent. The smallest one may be more than the path has: then routers may cut the
    /// packets, as those of a Linux route whose MTU is locked.
    pub fn set_mtu(&mut self, mtu: u32) {
        self.image.mtu = mtu;
        self.template.allow_fragments(mtu <= MIN_MTU);
    }

    /// Prefetches the part of the connection's state that a predicted segment uses.
    #[inline(always)]
    pub fn prefetch(&self) {
        prefetch(self, 0, offset_of!(Offloaded, template) + Template::HOT);
        let tcp = offset_of!(Offloaded, tcp);
        prefetch(self, tcp + Connection::USUAL.start, tcp + Connection::USUAL.end);
    }

    /// Prefetches other memory that a predicted segment uses, once the state is in the cache: the recovery record that
    /// is published next, and the place of the next bytes to be received.
    #[inline(always)]
    pub fn prefetch_memory(&self) {
        prefetch(&self.record[copy(self.next)], 0, 8);
        self.receive.prefetch(self.tcp.rcv_nxt());
    }

    /// Writes the processor's number plus one to the connection's block, for the program.
    pub fn publish_processor(&self, processor: u32) {
        self.session_memory.word32(self.processor_offset).store(processor, Ordering::Relaxed);
    }

    /// Bytes that fill more than half of send memory, but not all of it.
    pub fn most_of_send_memory(&self) -> u32 {
        self.send_size / 8 * 5
    }

    /// Whether a thread of the program seems to be inside an operation on the connection.
    pub fn is_entered(&self) -> bool {
        let busy = layout::session::block(self.memory.block) + layout::block::BUSY;
        self.session_memory.word32(busy).load(Ordering::Relaxed) != 0
    }

    /// The flags of the connection's block, which the program may write.
    pub fn flags_of_block(&self) -> u32 {
        self.session_memory.word32(layout::session::block(self.memory.block) + layout::block::FLAGS).load(Ordering::Acquire)
    }

    /// Whether acknowledgements so far free too little send memory to wake a sleeping program: less than it waits for
    /// (see [`layout::block::QUIET_ABOVE`]) or, on a short path, less than most of the memory, as long as another
    /// acknowledgement must come. On a short path the queued bytes last until the program has woken up; on a long path
    /// the size of send memory may limit the rate.
    pub fn frees_too_little(&self) -> bool {
        let most = self.session_memory.word32(self.quiet_offset).load(Ordering::Relaxed);
        let queued = self.session_memory.word32(self.queued_offset).load(Ordering::Acquire);
        let left = queued.wrapping_sub(self.tcp.snd_una());
        let goes_on = self.tcp.snd_una() != self.tcp.snd_nxt() && !self.tcp.is_long_path();
        most != 0 && (left > most || goes_on && left > LASTS.min(self.send_size / 2))
    }

    /// Fills the send queue with the bytes that came with the image. They are in send memory at their sequence numbers,
    /// as one pair, or two if they wrap around the end.
    fn adopt_send_queue(&mut self, image: &Image, memory: Memory) {
        let mut seq = image.snd_una;
        let mut left = image.send_queue();
        while left > 0 {
            let offset = seq & (memory.send_size - 1);
            let length = left.min(memory.send_size - offset);
            self.queue.add(memory.send_base + offset, length, seq);
            seq = seq.wrapping_add(length);
            left -= length;
        }
    }

    /// Replaces the send queue by one in other memory.
    pub fn replace_send_queue(&mut self, image: &Image, memory: Memory) {
        self.memory = memory;
        self.queue.clear();
        (self.send_base, self.send_size) = (memory.send_base, memory.send_size);
        self.adopt_send_queue(image, memory);
    }

    /// Moves bytes of the send queue that are in the program's own buffers to send memory, before the connection leaves
    /// the NIC or continues in other memory. They fit, since no more bytes are queued than send memory has room for.
    pub fn gather_sends(&self) {
        // A pair that begins in send memory may extend into a buffer behind it.
        let inside = |pair: &Pair| u64::from(pair.address.wrapping_sub(self.send_base)) + u64::from(pair.length);
        let outside = self.queue.pairs().filter(|pair| inside(pair) > u64::from(self.send_size));
        let sends: Vec<Post> = outside.map(|Pair { address, length, seq }| Post { seq, length, address }).collect();
        if !sends.is_empty()
            && let Some(circle) = self.session_memory.circle(self.send_base, self.send_size)
        {
            gather(&sends, &self.session_memory, &circle, self.tcp.snd_una());
        }
    }

    /// Sets the network interface that its frames leave through.
    pub fn set_interface(&mut self, interface: u32) {
        self.image.link.interface = interface;
        self.template.set_interface(interface);
    }

    /// Appends bytes to the send queue. False if it is full.
    pub fn add_pair(&mut self, address: u32, length: u32, seq: u32) -> bool {
        self.queue.add(address, length, seq)
    }

    /// Whether send memory has room for `length` bytes beside those that the peer has not acknowledged. A program's
    /// numbers are differences modulo 2³², so a step backwards is a large one. Bytes that do not fit into send memory
    /// could not be restored to the kernel.
    pub fn has_room_to_send(&self, length: u32) -> bool {
        self.tcp.unacknowledged().checked_add(length).is_some_and(|all| all <= self.send_size)
    }

    /// Appends the bytes to the send queue that the program has put into send memory so far. False, with nothing
    /// appended, if the program claims more than fits there, or sending is closed.
    pub fn take_queued(&mut self) -> bool {
        let queued = self.session_memory.word32(self.queued_offset).load(Ordering::Acquire);
        let mut seq = self.tcp.snd_end();
        let mut left = queued.wrapping_sub(seq);
        if left == 0 {
            return true;
        }
        if !self.has_room_to_send(left) || !self.tcp.queue(left) {
            return false;
        }
        while left > 0 {
            let offset = seq & (self.send_size - 1);
            let length = left.min(self.send_size - offset);
            // At most one pair ends at the end of send memory at a time, so there is always room.
            self.queue.add(self.send_base + offset, length, seq);
            seq = seq.wrapping_add(length);
            left -= length;
        }
        true
    }

    /// Removes acknowledged bytes from the send queue.
    pub fn drop_acked_pairs(&mut self) {
        self.queue.drop_acked(self.tcp.snd_una());
    }

    /// The IPv4 identification of the next segment.
    #[inline(always)]
    pub fn next_ident(&mut self) -> u16 {
        let ident = self.ident;
        self.ident = ident.wrapping_add(1);
        ident
    }

    /// Copies `out.len()` bytes of the send queue from sequence number `seq` on, see [`References::fetch`].
    #[inline(always)]
    pub fn fetch(&mut self, seq: u32, out: &mut [u8]) -> bool {
        self.queue.fetch(&self.session_memory, seq, out)
    }

    /// [`Offloaded::fetch`] from however many pairs the bytes lie in.
    pub fn fetch_pieces(&self, seq: u32, out: &mut [u8]) -> bool {
        self.queue.fetch_pieces(&self.session_memory, seq, out)
    }

    /// The places of the `length` bytes of the send queue from sequence number `seq` on, see [`References::places`].
    pub fn places(&self, seq: u32, length: u32) -> Option<Payload<'_>> {
        self.queue.places(&self.session_memory, seq, length)
    }

    /// `nic_post`: a buffer for the bytes that follow those of earlier buffers; if the NIC is `short` of memory they go
    /// to receive memory. False if the limit of unsent answers is reached.
    pub fn post(&mut self, address: u32, length: u32, short: bool) -> bool {
        let waiting = usize::from(self.pending.answers);
        if waiting == layout::POSTS_UNANSWERED {
            return false;
        }
        let most = if short { 0 } else { layout::POSTS };
        let free = self.tcp.out_of_order().next_back().map_or(self.tcp.rcv_nxt(), |(_, right)| right);
        // What is posted is not where predicted segments go.
        self.tcp.disable_prediction();
        let read = self.tcp.rcv_read();
        self.pending.posted[waiting] =
            self.receive.post((address, length), read, free, most, &self.session_memory, self.posts_table());
        self.pending.answers += 1;
        true
    }

    /// The slot's table of posted buffers.
    pub fn posts_table(&self) -> Table {
        Table::new(self.nic_memory.clone(), self.slot)
    }

    /// Whether it has nothing pending for its program, the wire or the agent, and no buffer is posted.
    pub fn is_idle(&self) -> bool {
        let queued = self.session_memory.word32(self.queued_offset).load(Ordering::Acquire);
        let taken_up = !self.fetches || queued == self.tcp.snd_end();
        let waits = self.closing || self.pending.any() || self.growth.has_request() || self.has_ranges();
        taken_up && !waits && !self.receive.has_posts()
    }

    /// Number of the connection's slot.
    pub fn slot(&self) -> u32 {
        self.slot
    }
}
