//! Receive memory: a circular buffer, and buffers that the program has posted (`nic_post`, Figure 4), which take the
//! bytes of certain sequence numbers instead.

use baton_abi::layout::{self, nic, scratch, slot};
use baton_device::Payload;
use baton_recovery::{Post, gather, pieces};
use baton_shm::{Circle, Region};
use core::sync::atomic::Ordering;
use std::sync::Arc;

/// The receive memory of a connection.
#[derive(Debug)]
pub(crate) struct Receive {
    circle: Circle,
    /// Present from the first buffer that the program posts until the connection rests.
    posted: Option<Box<Posted>>,
}

/// Buffers that the program has posted.
#[derive(Debug)]
struct Posted {
    /// Buffers that are not full, in order: the first `count` entries are valid.
    posts: [Post; layout::POSTS],
    count: usize,
    /// Sequence number behind the last byte of all posted buffers; None when the program has read up to there.
    to: Option<u32>,
    session: Arc<Region>,
    table: Table,
}

/// A slot's table of posts in NIC memory, for the recovery after the NIC's death.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    nic_memory: Arc<Region>,
    slot: u32,
}

impl Receive {
    /// Receive memory without posted buffers.
    pub fn new(circle: Circle, table: &Table) -> Receive {
        table.store(&[]);
        Receive { circle, posted: None }
    }

    /// Offset in session memory of the byte with this sequence number, in the circular buffer.
    #[inline(always)]
    pub fn offset_of(&self, seq: u32) -> u32 {
        self.circle.offset_of(seq)
    }

    /// Prefetches the place of the bytes from sequence number `seq` on.
    #[inline(always)]
    pub fn prefetch(&self, seq: u32) {
        self.circle.prefetch(seq);
    }

    /// Writes received bytes from sequence number `seq` on.
    #[inline(always)]
    pub fn write(&self, seq: u32, bytes: &[u8]) {
        match self.scattered() {
            None => self.circle.write(seq, bytes),
            Some(posted) => self.scatter(posted, seq, bytes),
        }
    }

    /// [`Receive::write`] with fewer instructions, if [`Receive::is_plain`].
    #[inline(always)]
    pub fn write_plain(&self, seq: u32, bytes: &[u8]) {
        debug_assert!(self.is_plain());
        self.circle.write_inline(seq, bytes);
    }

    /// The places of the `length` bytes from sequence number `seq` on. None where buffers are posted.
    pub fn places(&self, seq: u32, length: u32) -> Option<Payload<'_>> {
        if self.scattered().is_none() { self.circle.places(seq, length) } else { None }
    }

    /// Whether all bytes go to the circular buffer.
    pub fn is_plain(&self) -> bool {
        self.scattered().is_none()
    }

    /// Whether the program has posted buffers since the connection last rested.
    pub fn has_posts(&self) -> bool {
        self.posted.is_some()
    }

    /// The posted buffers, if bytes are expected for any.
    #[inline(always)]
    fn scattered(&self) -> Option<&Posted> {
        self.posted.as_deref().filter(|posted| posted.count > 0)
    }

    /// Writes received bytes where buffers are posted.
    #[cold]
    fn scatter(&self, posted: &Posted, seq: u32, bytes: &[u8]) {
        pieces(posted.valid(), seq, bytes.len(), |piece, address| match address {
            // Cannot fail: the buffer was checked when it was posted.
            Some(address) => drop(posted.session.write(address as usize, &bytes[piece])),
            None => self.circle.write(seq.wrapping_add(piece.start as u32), &bytes[piece]),
        });
    }

    /// Reads received bytes that lie in the circular buffer; see [`Receive::gather`] for the others.
    pub fn read(&self, seq: u32, out: &mut [u8]) {
        self.circle.read(seq, out);
    }

    /// Posts a buffer of `length` bytes at `address` in session memory for the bytes that follow those of earlier
    /// buffers. `read` is the first unread sequence number. Bytes before `free` have been received, and stay in the
    /// circular buffer. Returns the sequence number of the first byte that goes into the buffer; that of its end if as
    /// many as `most` buffers are posted already.
    pub fn post(&mut self, buffer: (u32, u32), read: u32, free: u32, most: usize, session: &Arc<Region>, table: Table) -> u32 {
        let nothing =
            || Box::new(Posted { posts: [Post::default(); layout::POSTS], count: 0, to: None, session: session.clone(), table });
        self.posted.get_or_insert_with(nothing).post(buffer, read, free, most.min(layout::POSTS))
    }

    /// Drops the buffers whose bytes the program has read, up to sequence number `read`: the program may use them
    /// again.
    #[inline(always)]
    pub fn forget_before(&mut self, read: u32) {
        if let Some(posted) = &mut self.posted {
            posted.forget_before(read);
        }
    }

    /// Moves the bytes in posted buffers from `read` on to the circular buffer, and drops all buffers, before the
    /// connection leaves the NIC.
    pub fn gather(&mut self, read: u32) {
        if let Some(posted) = self.posted.take() {
            gather(posted.valid(), &posted.session, &self.circle, read);
            posted.table.store(&[]);
        }
    }
}

impl Posted {
    fn valid(&self) -> &[Post] {
        &self.posts[..self.count]
    }

    /// See [`Receive::post`].
    fn post(&mut self, (address, length): (u32, u32), read: u32, free: u32, most: usize) -> u32 {
        let first = self.to.unwrap_or(read);
        let end = first.wrapping_add(length);
        self.to = Some(end);
        let late = free.wrapping_sub(first);
        let skip = if late < 1 << 31 { late.min(length) } else { 0 };
        if skip == length || self.count >= most {
            return end;
        }
        let start = first.wrapping_add(skip);
        self.posts[self.count] = Post { seq: start, length: length - skip, address: address + skip };
        self.count += 1;
        self.table.store(self.valid());
        start
    }

    /// See [`Receive::forget_before`].
    #[cold]
    fn forget_before(&mut self, read: u32) {
        let passed = |end: u32| read.wrapping_sub(end) < 1 << 31;
        self.to = self.to.filter(|end| !passed(*end));
        let done = self.valid().iter().take_while(|post| passed(post.end())).count();
        if done > 0 {
            self.posts.copy_within(done..self.count, 0);
            self.count -= done;
            self.table.store(self.valid());
        }
    }
}

impl Table {
    /// The table of a slot of NIC memory.
    pub fn new(nic_memory: Arc<Region>, slot: u32) -> Table {
        Table { nic_memory, slot }
    }

    /// Writes the buffers that are posted.
    #[cold]
    fn store(&self, posts: &[Post]) {
        // Without buffers the table is not touched, since its page may have been given back to the system.
        let posted = self.nic_memory.word32(nic::slot(self.slot) + slot::POSTED);
        if posts.is_empty() && posted.load(Ordering::Relaxed) == 0 {
            return;
        }
        posted.store(1, Ordering::Release);
        let words = self.nic_memory.words(nic::scratch(self.slot) + scratch::POSTS, scratch::POSTS_BYTES / 8);
        for (at, entry) in words.chunks_exact(2).enumerate() {
            let Post { seq, length, address } = posts.get(at).copied().unwrap_or_default();
            let (place, length) = (u64::from(seq) | u64::from(address) << 32, u64::from(length));
            // An entry that does not change stays valid throughout; a buffer that moves towards the front is written
            // there before its old entry is cleared.
            if (entry[0].load(Ordering::Relaxed), entry[1].load(Ordering::Relaxed)) != (place, length) {
                // While it is being written an entry has length 0, which means that there is none.
                entry[1].store(0, Ordering::Release);
                entry[0].store(place, Ordering::Release);
                entry[1].store(length, Ordering::Release);
            }
        }
        posted.store(u32::from(!posts.is_empty()), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_recovery::posts_of;

    const SIZE: u32 = 1 << 12;
    const BUFFERS: u32 = 2 * SIZE;

    /// Receive memory, and the memory that it lies in.
    struct Stage {
        receive: Receive,
        session: Arc<Region>,
        nic: Arc<Region>,
    }

    impl Stage {
        fn new() -> Stage {
            let session = Arc::new(Region::private(1 << 16).unwrap());
            let nic = Arc::new(Region::private(nic::bytes(2).next_multiple_of(4096)).unwrap());
            let receive = Receive::new(session.circle(0, SIZE).unwrap(), &Table::new(nic.clone(), 1));
            Stage { receive, session, nic }
        }

        fn post(&mut self, address: u32, length: u32, read: u32, free: u32) -> u32 {
            self.post_of(address, length, (read, free), layout::POSTS)
        }

        fn post_of(&mut self, address: u32, length: u32, (read, free): (u32, u32), most: usize) -> u32 {
            self.receive.post((address, length), read, free, most, &self.session, Table::new(self.nic.clone(), 1))
        }

        fn posts(&self) -> &[Post] {
            self.receive.posted.as_ref().map_or(&[], |posted| posted.valid())
        }

        fn buffer(&self, at: u32, length: usize) -> Vec<u8> {
            let mut out = vec![0; length];
            self.session.read((BUFFERS + at) as usize, &mut out).unwrap();
            out
        }
    }

    /// Bytes go to their buffers across the edges of these, in whatever order they arrive, and around 2³².
    #[test]
    fn bytes_find_their_buffers_and_come_back() {
        for read in [0, 1000, u32::MAX - 70] {
            let mut stage = Stage::new();
            // Ten bytes have been received; two buffers follow each other, then the circular buffer.
            stage.receive.write(read, &[1; 10]);
            assert_eq!(stage.post(BUFFERS, 100, read, read.wrapping_add(10)), read.wrapping_add(10));
            assert_eq!(stage.post(BUFFERS + 1000, 50, read, read.wrapping_add(10)), read.wrapping_add(100));
            let bytes: Vec<u8> = (0..=255).collect();
            stage.receive.write(read.wrapping_add(140), &bytes[140..200]);
            stage.receive.write(read.wrapping_add(10), &bytes[10..140]);
            assert_eq!(stage.buffer(10, 90), bytes[10..100]);
            assert_eq!(stage.buffer(1000, 50), bytes[100..150]);
            let mut out = [0; 200];
            stage.receive.read(read, &mut out);
            assert!(out[10..150].iter().all(|byte| *byte == 0) && out[150..] == bytes[150..200]);
            assert_eq!(posts_of(&stage.nic, 1), stage.posts());
            // The first buffer has been read; the rest moves to the circular buffer.
            stage.receive.forget_before(read.wrapping_add(100));
            assert_eq!(stage.posts().len(), 1);
            stage.receive.gather(read.wrapping_add(100));
            stage.receive.read(read, &mut out);
            assert!(out[10..100].iter().all(|byte| *byte == 0) && out[100..] == bytes[100..200]);
            assert!(posts_of(&stage.nic, 1).is_empty());
        }
    }

    /// Bytes received before, and bytes for which there is no buffer, stay in the circular buffer.
    #[test]
    fn buffers_that_come_late_or_are_too_many_are_left_alone() {
        let mut stage = Stage::new();
        assert_eq!(stage.post(BUFFERS, 100, 5, 205), 105, "all of its bytes have come");
        assert_eq!(stage.post(BUFFERS, 100, 5, 205), 205, "so have those of the next one");
        assert_eq!(stage.posts().len(), 0);
        stage.receive.forget_before(205);
        for number in 0..layout::POSTS as u32 {
            assert_eq!(stage.post(BUFFERS + 100 * number, 100, 205, 205), 205 + 100 * number);
        }
        let end = 205 + 100 * layout::POSTS as u32;
        assert_eq!(stage.post(BUFFERS + 5000, 100, 205, 205), end + 100);
        stage.receive.write(end, &[9; 100]);
        assert_eq!(stage.buffer(5000, 100), [0; 100]);
        // Each of the others has its bytes, also after the NIC's death.
        let bytes: Vec<u8> = (0..100 * layout::POSTS).map(|at| (at / 100) as u8).collect();
        stage.receive.write(205, &bytes);
        assert!((0..layout::POSTS).all(|number| stage.buffer(100 * number as u32, 100) == [number as u8; 100]));
        assert_eq!((posts_of(&stage.nic, 1).len(), &posts_of(&stage.nic, 1)[..]), (layout::POSTS, stage.posts()));
    }

    /// Without memory for it a buffer is left alone, between others that are not.
    #[test]
    fn a_nic_that_is_short_of_memory_leaves_buffers_alone() {
        let mut stage = Stage::new();
        assert_eq!(stage.post_of(BUFFERS, 100, (5, 5), layout::POSTS), 5);
        assert_eq!(stage.post_of(BUFFERS + 1000, 100, (5, 5), 0), 205, "its end");
        assert_eq!(stage.post_of(BUFFERS + 2000, 100, (5, 5), layout::POSTS), 205);
        let bytes: Vec<u8> = (0..250).collect();
        stage.receive.write(5, &bytes);
        assert_eq!((stage.buffer(0, 100), stage.buffer(1000, 100)), (bytes[..100].to_vec(), vec![0; 100]));
        assert_eq!(stage.buffer(2000, 50), bytes[200..]);
        let mut out = [0; 100];
        stage.receive.read(105, &mut out);
        assert_eq!(out, bytes[100..200]);
    }
}
