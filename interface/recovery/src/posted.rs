//! The table of posted buffers in a slot (`nic_post`, Figure 4 of the handoff paper): which received bytes are in a
//! program's buffer instead of the circular buffer. The NIC writes it; the agent reads it when it restores the
//! connection of a dead NIC.

use baton_abi::layout::{nic, scratch, slot};
use baton_shm::{Circle, Region};
use core::sync::atomic::Ordering;

/// A posted buffer, or the part of it that the NIC fills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Post {
    /// Sequence number of its first byte.
    pub seq: u32,
    /// Bytes.
    pub length: u32,
    /// Offset of its first byte in session memory.
    pub address: u32,
}

impl Post {
    /// The sequence number behind its last byte.
    pub fn end(&self) -> u32 {
        self.seq.wrapping_add(self.length)
    }
}

/// Splits the bytes `seq..seq + length` by the memory that they belong to. `each` gets the parts as offsets from `seq`,
/// with the address in a posted buffer, or None for the circular buffer.
pub fn pieces(posts: &[Post], seq: u32, length: usize, mut each: impl FnMut(core::ops::Range<usize>, Option<u32>)) {
    let mut done = 0;
    while done < length {
        let here = seq.wrapping_add(done as u32);
        let inside = posts.iter().find(|post| here.wrapping_sub(post.seq) < post.length);
        let (most, address) = match inside {
            Some(post) => {
                let offset = here.wrapping_sub(post.seq);
                (post.length - offset, Some(post.address + offset))
            }
            // Up to the next posted buffer; earlier ones are far away modulo 2³².
            None => (posts.iter().map(|post| post.seq.wrapping_sub(here)).min().unwrap_or(u32::MAX), None),
        };
        let next = done + (length - done).min(most as usize);
        each(done..next, address);
        done = next;
    }
}

/// The buffers that were posted on a slot's connection when its NIC died.
pub fn posts_of(nic_memory: &Region, at: u32) -> Vec<Post> {
    if nic_memory.word32(nic::slot(at) + slot::POSTED).load(Ordering::Acquire) == 0 {
        return Vec::new();
    }
    let words = nic_memory.words(nic::scratch(at) + scratch::POSTS, scratch::POSTS_BYTES / 8);
    let entries = words.chunks_exact(2).map(|entry| (entry[0].load(Ordering::Acquire), entry[1].load(Ordering::Acquire)));
    let posts = entries.map(|(place, length)| Post { seq: place as u32, address: (place >> 32) as u32, length: length as u32 });
    posts.filter(|post| post.length > 0).collect()
}

/// Copies bytes from posted buffers to the circular buffer, if they may have been received and are unread.
pub fn gather(posts: &[Post], session: &Region, circle: &Circle, read: u32) {
    let mut bytes = [0; 4096];
    if posts.is_empty() {
        return;
    }
    pieces(posts, read, circle.length() as usize, |piece, address| {
        let Some(address) = address else { return };
        for start in piece.clone().step_by(bytes.len()) {
            let part = &mut bytes[..(piece.end - start).min(4096)];
            if session.read(address as usize + (start - piece.start), part).is_ok() {
                circle.write(read.wrapping_add(start as u32), part);
            }
        }
    });
}
