//! Receive memory: a circle in which every byte has its place, and buffers that the program has posted (`nic_post`, Figure 4), into which
//! the bytes of certain sequence numbers go instead.

use baton_abi::layout::{self, slot as at};
use baton_recovery::{Post, gather, pieces};
use baton_shm::{Circle, Region};
use core::sync::atomic::Ordering;
use std::sync::Arc;

/// A connection's receive memory.
#[derive(Debug)]
pub(crate) struct Receive {
    circle: Circle,
    posts: [Post; layout::POSTS],
    count: usize,
    /// Behind the last byte that was posted for, until the program has read up to there.
    posted_to: Option<u32>,
    session: Arc<Region>,
    nic: Arc<Region>,
    /// Of the slot's table of posts.
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

    /// Where the byte of a sequence number lies in the circle.
    #[inline(always)]
    pub fn offset_of(&self, seq: u32) -> u32 {
        self.circle.offset_of(seq)
    }

    #[inline(always)]
    pub fn write(&self, seq: u32, bytes: &[u8]) {
        if self.count == 0 { self.circle.write(seq, bytes) } else { self.scatter(seq, bytes) }
    }

    #[cold]
    fn scatter(&self, seq: u32, bytes: &[u8]) {
        pieces(&self.posts[..self.count], seq, bytes.len(), |piece, address| match address {
            // The address was checked when it was posted.
            Some(address) => drop(self.session.write(address as usize, &bytes[piece])),
            None => self.circle.write(seq.wrapping_add(piece.start as u32), &bytes[piece]),
        });
    }

    /// Reads bytes back that lie in the circle: see [`Receive::gather`].
    pub fn read(&self, seq: u32, out: &mut [u8]) {
        self.circle.read(seq, out);
    }

    /// A buffer of `length` bytes is posted for the bytes that follow those posted for before, `read` being the first unread one. What has
    /// come before `free` stays where it is; that is how far the buffer's first bytes lie in the circle, and what is returned. All of it
    /// if there is no room for another buffer.
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

    /// The program has read up to here: buffers before that are its own again.
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

    /// The connection leaves: what lies in buffers from `read` on goes to its place in the circle, and nothing is posted any more.
    pub fn gather(&mut self, read: u32) {
        gather(&self.posts[..self.count], &self.session, &self.circle, read);
        (self.count, self.posted_to) = (0, None);
        self.store();
    }

    /// For whoever finds this NIC dead.
    #[cold]
    fn store(&self) {
        let words = self.nic.words(self.table, at::POSTS_BYTES / 8);
        for (at, entry) in words.chunks_exact(2).enumerate() {
            let Post { seq, length, address } = if at < self.count { self.posts[at] } else { Post::default() };
            let (place, length) = (u64::from(seq) | u64::from(address) << 32, u64::from(length));
            // One that stays where it was is there at any moment; what moves to the front is there before its old entry goes.
            if (entry[0].load(Ordering::Relaxed), entry[1].load(Ordering::Relaxed)) != (place, length) {
                // An entry without a length is none while it is being written.
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

    /// Bytes go where they belong, across the edges of buffers, whatever the order in which they come, and around 2³².
    #[test]
    fn bytes_find_their_buffers_and_come_back() {
        for read in [0, 1000, u32::MAX - 70] {
            let mut receive = receive();
            // Ten bytes are there already; two buffers follow each other, then the circle again.
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
            // The first buffer has been read; the rest comes back into the circle.
            receive.forget_before(read.wrapping_add(100));
            assert_eq!(receive.count, 1);
            receive.gather(read.wrapping_add(100));
            receive.read(read, &mut out);
            assert!(out[10..100].iter().all(|byte| *byte == 0) && out[100..] == bytes[100..200]);
            assert!(posts_of(&receive.nic, 4096).is_empty());
        }
    }

    /// What has come already, and what there is no room for, stays in the circle.
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
