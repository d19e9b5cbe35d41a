//! Receive memory: a circular buffer, and buffers that the program has posted (`nic_post`, Figure 4), which take the bytes of
//! certain sequence numbers instead.

use baton_abi::layout::{self, slot as at};
use baton_device::Payload;
use baton_recovery::{Post, gather, pieces};
use baton_shm::{Circle, Region, Straight};
use core::sync::atomic::Ordering;
use std::sync::Arc;

/// The receive memory of a connection.
#[derive(Debug)]
pub(crate) struct Receive {
    circle: Circle,
    /// The posted buffers, of which the first `count` are valid, in order.
    posts: [Post; layout::POSTS],
    count: usize,
    /// Sequence number behind the last byte of all posted buffers, until the program has read up to there.
    posted_to: Option<u32>,
    session: Arc<Region>,
    nic: Arc<Region>,
    /// Offset of the slot's table of posts in NIC memory.
    table: usize,
}

impl Receive {
    pub fn new(circle: Circle, session: Arc<Region>, nic: Arc<Region>, slot_offset: usize) -> Receive {
        let receive = Receive {
            circle,
            posts: [Post::default(); layout::POSTS],
            count: 0,
            posted_to: None,
            session,
            nic,
            table: slot_offset + at::POSTS,
        };
        receive.store();
        receive
    }

    /// Offset in session memory of the byte with this sequence number, in the circular buffer.
    #[inline(always)]
    pub fn offset_of(&self, seq: u32) -> u32 {
        self.circle.offset_of(seq)
    }

    /// Writes received bytes from sequence number `seq` on.
    #[inline(always)]
    pub fn write(&self, seq: u32, bytes: &[u8]) {
        if self.count == 0 { self.circle.write(seq, bytes) } else { self.scatter(seq, bytes) }
    }

    /// The place of the `length` bytes from sequence number `seq` on, if they lie in one piece in the circular buffer.
    #[inline(always)]
    pub fn straight(&self, seq: u32, length: u32) -> Option<Straight<'_>> {
        if self.count == 0 { self.circle.straight(seq, length) } else { None }
    }

    /// The places of the `length` bytes from sequence number `seq` on. None where buffers are posted.
    pub fn places(&self, seq: u32, length: u32) -> Option<Payload<'_>> {
        if self.count == 0 { self.circle.places(seq, length) } else { None }
    }

    /// Writes received bytes where buffers are posted.
    #[cold]
    fn scatter(&self, seq: u32, bytes: &[u8]) {
        pieces(&self.posts[..self.count], seq, bytes.len(), |piece, address| match address {
            // Cannot fail: the buffer was checked when it was posted.
            Some(address) => drop(self.session.write(address as usize, &bytes[piece])),
            None => self.circle.write(seq.wrapping_add(piece.start as u32), &bytes[piece]),
        });
    }

    /// Reads received bytes that lie in the circular buffer; see [`Receive::gather`] for the others.
    pub fn read(&self, seq: u32, out: &mut [u8]) {
        self.circle.read(seq, out);
    }

    /// Posts a buffer of `length` bytes at `address` for the bytes that follow those of earlier buffers. `read` is the first
    /// unread sequence number. Bytes before `free` have been received, and stay in the circular buffer. Returns the sequence
    /// number of the first byte that goes into the buffer; that of its end if there is no room for another buffer.
    pub fn post(&mut self, address: u32, length: u32, read: u32, free: u32) -> u32 {
        let first = self.posted_to.unwrap_or(read);
        let end = first.wrapping_add(length);
        self.posted_to = Some(end);
        let late = free.wrapping_sub(first);
        let skip = if late < 1 << 31 { late.min(length) } else { 0 };
        if skip == length || self.count == layout::POSTS {
            return end;
        }
        let start = first.wrapping_add(skip);
        self.posts[self.count] = Post { seq: start, length: length - skip, address: address + skip };
        self.count += 1;
        self.store();
        start
    }

    /// Drops the buffers whose bytes the program has read, up to sequence number `read`: they are the program's again.
    #[inline(always)]
    pub fn forget_before(&mut self, read: u32) {
        if self.posted_to.is_some() {
            self.drop_posts_before(read);
        }
    }

    #[cold]
    fn drop_posts_before(&mut self, read: u32) {
        let passed = |end: u32| read.wrapping_sub(end) < 1 << 31;
        self.posted_to = self.posted_to.filter(|end| !passed(*end));
        let done = self.posts[..self.count].iter().take_while(|post| passed(post.end())).count();
        if done > 0 {
            self.posts.copy_within(done..self.count, 0);
            self.count -= done;
            self.store();
        }
    }

    /// Moves the bytes in posted buffers from `read` on to the circular buffer, and drops all buffers, before the connection
    /// leaves the NIC.
    pub fn gather(&mut self, read: u32) {
        gather(&self.posts[..self.count], &self.session, &self.circle, read);
        (self.count, self.posted_to) = (0, None);
        self.store();
    }

    /// Writes the table of posts to the slot, for the recovery after the NIC's death.
    #[cold]
    fn store(&self) {
        let words = self.nic.words(self.table, at::POSTS_BYTES / 8);
        for (at, entry) in words.chunks_exact(2).enumerate() {
            let Post { seq, length, address } = if at < self.count { self.posts[at] } else { Post::default() };
            let (place, length) = (u64::from(seq) | u64::from(address) << 32, u64::from(length));
            // An entry that does not change stays valid throughout; one that moves towards the front is written there before its
            // old entry is cleared.
            if (entry[0].load(Ordering::Relaxed), entry[1].load(Ordering::Relaxed)) != (place, length) {
                // While it is being written an entry has length 0, which means that there is none.
                entry[1].store(0, Ordering::Release);
                entry[0].store(place, Ordering::Release);
                entry[1].store(length, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_recovery::posts_of;

    const SIZE: u32 = 1 << 12;
    const BUFFERS: u32 = 2 * SIZE;

    fn receive() -> Receive {
        let session = Arc::new(Region::private(1 << 16).unwrap());
        let nic = Arc::new(Region::private(1 << 16).unwrap());
        Receive::new(session.circle(0, SIZE).unwrap(), session, nic, 4096)
    }

    fn buffer(receive: &Receive, at: u32, length: usize) -> Vec<u8> {
        let mut out = vec![0; length];
        receive.session.read((BUFFERS + at) as usize, &mut out).unwrap();
        out
    }

    /// Bytes go to their buffers across the edges of these, in whatever order they arrive, and around 2³².
    #[test]
    fn bytes_find_their_buffers_and_come_back() {
        for read in [0, 1000, u32::MAX - 70] {
            let mut receive = receive();
            // Ten bytes have been received; two buffers follow each other, then the circular buffer.
            receive.write(read, &[1; 10]);
            assert_eq!(receive.post(BUFFERS, 100, read, read.wrapping_add(10)), read.wrapping_add(10));
            assert_eq!(receive.post(BUFFERS + 1000, 50, read, read.wrapping_add(10)), read.wrapping_add(100));
            let bytes: Vec<u8> = (0..=255).collect();
            receive.write(read.wrapping_add(140), &bytes[140..200]);
            receive.write(read.wrapping_add(10), &bytes[10..140]);
            assert_eq!(buffer(&receive, 10, 90), bytes[10..100]);
            assert_eq!(buffer(&receive, 1000, 50), bytes[100..150]);
            let mut out = [0; 200];
            receive.read(read, &mut out);
            assert!(out[10..150].iter().all(|byte| *byte == 0) && out[150..] == bytes[150..200]);
            assert_eq!(posts_of(&receive.nic, 4096), receive.posts[..2]);
            // The first buffer has been read; the rest moves to the circular buffer.
            receive.forget_before(read.wrapping_add(100));
            assert_eq!(receive.count, 1);
            receive.gather(read.wrapping_add(100));
            receive.read(read, &mut out);
            assert!(out[10..100].iter().all(|byte| *byte == 0) && out[100..] == bytes[100..200]);
            assert!(posts_of(&receive.nic, 4096).is_empty());
        }
    }

    /// Bytes received before, and bytes for which there is no buffer, stay in the circular buffer.
    #[test]
    fn buffers_that_come_late_or_are_too_many_are_left_alone() {
        let mut receive = receive();
        assert_eq!(receive.post(BUFFERS, 100, 5, 205), 105, "all of its bytes have come");
        assert_eq!(receive.post(BUFFERS, 100, 5, 205), 205, "so have those of the next one");
        assert_eq!(receive.count, 0);
        receive.forget_before(205);
        for number in 0..layout::POSTS as u32 {
            assert_eq!(receive.post(BUFFERS + 100 * number, 100, 205, 205), 205 + 100 * number);
        }
        let end = 205 + 100 * layout::POSTS as u32;
        assert_eq!(receive.post(BUFFERS + 2000, 100, 205, 205), end + 100);
        receive.write(end, &[9; 100]);
        assert_eq!(buffer(&receive, 2000, 100), [0; 100]);
    }
}
