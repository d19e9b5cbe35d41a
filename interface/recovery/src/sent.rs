//! The table of sends from a program's own buffers, in session memory: which bytes of the send queue are in a buffer
//! instead of send memory. The program writes it; the agent reads it when it restores the connection of a dead NIC.

use crate::posted::Post;
use baton_abi::layout::{BUFFERS_SENT, session};
use baton_shm::Region;

/// The sends from buffers of this connection. Wrong entries harm only the program's own bytes: an entry outside of the
/// memory is ignored.
pub fn sends_of(memory: &Region, connection: u32) -> Vec<Post> {
    let mut word = [0; 4];
    if memory.read(session::BUFFERS_SENT, &mut word).is_err() || u32::from_ne_bytes(word) == 0 {
        return Vec::new();
    }
    let table = u32::from_ne_bytes(word) as usize + connection as usize * session::BUFFERS_SENT_BYTES;
    let entry = |at: usize| {
        let mut bytes = [0; 12];
        memory.read(table + 16 * at, &mut bytes).ok()?;
        let [seq, address, length] =
            [0, 4, 8].map(|at| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
        (length > 0 && address as usize >= session::HEAP).then_some(Post { seq, length, address })
    };
    (0..BUFFERS_SENT).filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gather;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    #[test]
    fn bytes_in_buffers_come_into_the_circle() {
        let memory = Arc::new(Region::private(session::HEAP + (1 << 20)).expect("memory"));
        assert_eq!(sends_of(&memory, 2), []);
        let (table, circle, buffer) = (session::HEAP, session::HEAP + (512 << 10), session::HEAP + (640 << 10));
        memory.word32(session::BUFFERS_SENT).store(table as u32, Ordering::Release);
        let put = |connection: usize, entry: usize, words: [u32; 3]| {
            for (at, word) in words.into_iter().enumerate() {
                let at = table + connection * session::BUFFERS_SENT_BYTES + 16 * entry + 4 * at;
                memory.word32(at).store(word, Ordering::Release);
            }
        };
        let start = u32::MAX - 99;
        put(2, 0, [start.wrapping_add(50), buffer as u32, 100]);
        put(2, 3, [start.wrapping_add(200), u32::MAX - 3, 100]);
        put(2, 4, [0, 16, 100]);
        put(1, 0, [start, buffer as u32, 7]);
        memory.write(buffer, &[7; 100]).expect("bytes");
        let sends = sends_of(&memory, 2);
        assert_eq!(sends.len(), 2, "what lies before the heap is no buffer: {sends:?}");
        let circle = memory.circle(circle as u32, 4096).expect("a circle");
        circle.write(start, &[1; 250]);
        gather(&sends, &memory, &circle, start);
        let mut bytes = [0; 250];
        circle.read(start, &mut bytes);
        let expected: Vec<u8> = (0..250).map(|at| if (50..150).contains(&at) { 7 } else { 1 }).collect();
        assert_eq!(bytes[..], expected[..]);
        // A table outside of the memory is ignored.
        memory.word32(session::BUFFERS_SENT).store(u32::MAX, Ordering::Release);
        assert_eq!(sends_of(&memory, 2), []);
    }
}
