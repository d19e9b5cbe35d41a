//! A ring of 16-byte messages between one producer and one consumer.
//!
//! Words 0, 8 and 16 are the producer's index, the consumer's index and the consumer's sleep flag, each on a cache line of its
//! own; messages begin at word 24. Indices count without wrapping at the ring's size.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

const HEAD: usize = 0;
const TAIL: usize = 8;
const SLOTS: usize = 24;

/// The ring has no room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// The ring's size in messages less one. Where the number of words is fixed, so is this.
#[inline(always)]
fn mask(words: &[AtomicU64]) -> u64 {
    ((words.len() - SLOTS) / 2 - 1) as u64
}

fn check_size(words: &[AtomicU64]) {
    assert!((mask(words) + 1).is_power_of_two(), "a ring's size is a power of two");
}

/// The producing end.
#[derive(Debug)]
pub struct Producer<W> {
    words: W,
    head: u64,
    /// How far `head` may go before the consumer's index has to be looked at again.
    limit: u64,
}

impl<W: AsRef<[AtomicU64]>> Producer<W> {
    /// Takes the producing end; goes on where the last producer published.
    pub fn new(words: W) -> Self {
        check_size(words.as_ref());
        let [head, tail] = [HEAD, TAIL].map(|at| words.as_ref()[at].load(Ordering::Acquire));
        let mut producer = Producer { words, head, limit: head };
        producer.see_room(tail);
        producer
    }

    /// Writes a message; the consumer sees it after [`Producer::publish`].
    ///
    /// # Errors
    /// [`Full`] if the consumer has not made room.
    #[inline(always)]
    pub fn push(&mut self, message: [u64; 2]) -> Result<(), Full> {
        if self.head == self.limit && !self.finds_room(1) {
            return Err(Full);
        }
        let words = self.words.as_ref();
        let at = SLOTS + 2 * (self.head & mask(words)) as usize;
        words[at + 1].store(message[1], Ordering::Relaxed);
        words[at].store(message[0], Ordering::Relaxed);
        self.head = self.head.wrapping_add(1);
        Ok(())
    }

    /// Whether `count` messages fit. Looks at the consumer's index only if what was last seen of it does not suffice.
    #[inline(always)]
    pub fn has_room(&mut self, count: u64) -> bool {
        self.limit.wrapping_sub(self.head) >= count || self.finds_room(count)
    }

    #[cold]
    fn finds_room(&mut self, count: u64) -> bool {
        let tail = self.words.as_ref()[TAIL].load(Ordering::Acquire);
        self.see_room(tail);
        self.limit.wrapping_sub(self.head) >= count
    }

    /// A lying consumer can make its own messages be overwritten, or get none any more.
    fn see_room(&mut self, tail: u64) {
        let size = mask(self.words.as_ref()) + 1;
        let used = self.head.wrapping_sub(tail).min(size);
        self.limit = self.head.wrapping_add(size - used);
    }

    /// Lets the consumer see what was pushed.
    #[inline]
    pub fn publish(&mut self) {
        self.words.as_ref()[HEAD].store(self.head, Ordering::Release);
    }

    /// Index behind the last message pushed.
    pub fn position(&self) -> u64 {
        self.head
    }
}

/// The consuming end.
#[derive(Debug)]
pub struct Consumer<W> {
    words: W,
    tail: u64,
    /// The producer's index as last seen.
    head: u64,
    /// The producer's index was once further away than the ring is long.
    lied: bool,
}

impl<W: AsRef<[AtomicU64]>> Consumer<W> {
    /// Takes the consuming end; goes on where the last consumer released.
    pub fn new(words: W) -> Self {
        check_size(words.as_ref());
        let tail = words.as_ref()[TAIL].load(Ordering::Acquire);
        Consumer { words, tail, head: tail, lied: false }
    }

    /// The next message, copied once. None for ever after the producer has claimed more messages than the ring holds: see
    /// [`Consumer::has_lied`].
    #[inline]
    pub fn pop(&mut self) -> Option<[u64; 2]> {
        let words = self.words.as_ref();
        let mask = mask(words);
        if self.head == self.tail {
            self.head = self.words.as_ref()[HEAD].load(Ordering::Acquire);
            if self.head.wrapping_sub(self.tail) > mask + 1 {
                self.lied = true;
            }
            if self.lied {
                self.head = self.tail;
            }
            if self.head == self.tail {
                return None;
            }
        }
        let at = SLOTS + 2 * (self.tail & mask) as usize;
        let message = [words[at].load(Ordering::Relaxed), words[at + 1].load(Ordering::Relaxed)];
        self.tail = self.tail.wrapping_add(1);
        Some(message)
    }

    /// Whether the producer has claimed more messages than the ring holds. No producer that follows the interface does: nothing that it
    /// says later can be relied on.
    pub fn has_lied(&self) -> bool {
        self.lied
    }

    /// Forgets every message that waits, however many the producer claims, and gives their room back.
    pub fn skip_all(&mut self) {
        self.head = self.words.as_ref()[HEAD].load(Ordering::Acquire);
        self.tail = self.head;
        self.release();
    }

    /// Takes the messages that follow with this first word, of those that were there when [`Consumer::pop`] last looked. `take` gets
    /// their second words.
    #[inline(always)]
    pub fn pop_like(&mut self, first: u64, mut take: impl FnMut(u64)) {
        let words = self.words.as_ref();
        let mut tail = self.tail;
        while tail != self.head {
            let at = SLOTS + 2 * (tail & mask(words)) as usize;
            if words[at].load(Ordering::Relaxed) != first {
                break;
            }
            take(words[at + 1].load(Ordering::Relaxed));
            tail = tail.wrapping_add(1);
        }
        self.tail = tail;
    }

    /// Gives the room of the messages popped back to the producer.
    #[inline]
    pub fn release(&mut self) {
        self.words.as_ref()[TAIL].store(self.tail, Ordering::Release);
    }

    /// Index of the next message.
    #[inline]
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Whether a message waits.
    #[inline]
    pub fn has_message(&self) -> bool {
        // What was seen before and not taken is behind this, too; a producer that takes it back harms itself.
        self.words.as_ref()[HEAD].load(Ordering::Acquire) != self.tail
    }
}

/// The consumer is about to sleep. It must look for messages once more after this, and sleep only if there are none.
pub fn go_to_sleep(flag: &AtomicU32) {
    flag.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// The consumer is awake.
pub fn wake_up(flag: &AtomicU32) {
    flag.store(0, Ordering::Relaxed);
}

/// As [`go_to_sleep`], where several threads may sleep: each is counted.
pub fn count_sleeper(flag: &AtomicU32) {
    flag.fetch_add(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// A counted sleeper is awake.
pub fn uncount_sleeper(flag: &AtomicU32) {
    flag.fetch_sub(1, Ordering::Relaxed);
}

/// Asked by the producer after publishing: whether the consumer sleeps and its doorbell must be rung.
#[inline]
pub fn needs_doorbell(flag: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    flag.load(Ordering::Relaxed) != 0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn ring(messages: usize) -> std::sync::Arc<[AtomicU64]> {
        (0..SLOTS + 2 * messages).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn messages_come_in_order_and_a_full_ring_refuses() {
        let words = ring(4);
        let (mut producer, mut consumer) = (Producer::new(words.clone()), Consumer::new(words));
        for round in 0..10u64 {
            for n in 0..4 {
                assert_eq!(producer.push([round, n]), Ok(()));
            }
            assert_eq!(producer.push([9, 9]), Err(Full));
            assert_eq!(consumer.pop(), None, "nothing is seen before it is published");
            producer.publish();
            for n in 0..4 {
                assert_eq!(consumer.pop(), Some([round, n]));
            }
            assert_eq!(consumer.pop(), None);
            assert_eq!(producer.push([9, 9]), Err(Full), "room comes with release");
            consumer.release();
        }
    }

    #[test]
    fn like_messages_are_taken_together() {
        let words = ring(4);
        let (mut producer, mut consumer) = (Producer::new(words.clone()), Consumer::new(words));
        for message in [[7, 1], [7, 2], [8, 3]] {
            producer.push(message).unwrap();
        }
        producer.publish();
        let mut taken = Vec::new();
        consumer.pop_like(7, |second| taken.push(second));
        assert!(taken.is_empty(), "nobody has looked yet");
        assert_eq!(consumer.pop(), Some([7, 1]));
        consumer.pop_like(7, |second| taken.push(second));
        assert_eq!(taken, [2]);
        assert_eq!(consumer.pop(), Some([8, 3]));
    }

    /// Room that the consumer has made is found even while the last seen index leaves some, but not enough.
    #[test]
    fn room_for_several_is_found() {
        let words = ring(4);
        let (mut producer, mut consumer) = (Producer::new(words.clone()), Consumer::new(words));
        for n in 0..3 {
            producer.push([n, n]).unwrap();
        }
        producer.publish();
        assert!(producer.has_room(1) && !producer.has_room(2));
        assert!(consumer.pop().is_some() && consumer.pop().is_some());
        consumer.release();
        assert!(producer.has_room(3) && !producer.has_room(4));
    }

    #[test]
    fn a_producer_that_lies_is_not_heard_again() {
        for lie in [5, 1 << 40, u64::MAX] {
            let words = ring(4);
            let mut producer = Producer::new(words.clone());
            producer.push([1, 1]).unwrap();
            words[HEAD].store(lie, Ordering::Relaxed);
            let mut consumer = Consumer::new(words.clone());
            assert_eq!((consumer.pop(), consumer.has_lied()), (None, true), "{lie}");
            producer.publish();
            assert_eq!(consumer.pop(), None, "it lied once");
            consumer.skip_all();
            assert!(!consumer.has_message());
        }
        let words = ring(4);
        words[HEAD].store(4, Ordering::Relaxed);
        let mut consumer = Consumer::new(words);
        assert_eq!(std::iter::from_fn(|| consumer.pop()).count(), 4, "a full ring is no lie");
        assert!(!consumer.has_lied());
    }

    #[test]
    fn both_ends_go_on_after_a_restart() {
        let words = ring(4);
        let mut producer = Producer::new(words.clone());
        producer.push([1, 1]).unwrap();
        producer.push([2, 2]).unwrap();
        producer.publish();
        let mut consumer = Consumer::new(words.clone());
        assert_eq!(consumer.pop(), Some([1, 1]));
        consumer.release();
        let mut next = Consumer::new(words.clone());
        assert_eq!(next.pop(), Some([2, 2]));
        assert_eq!(Producer::new(words).position(), 2);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// `Arc<Vec>` as the slice that a ring wants.
    #[derive(Clone)]
    struct Shared(Arc<Vec<AtomicU64>>);

    impl AsRef<[AtomicU64]> for Shared {
        fn as_ref(&self) -> &[AtomicU64] {
            &self.0
        }
    }

    fn ring(messages: usize) -> Shared {
        Shared(Arc::new((0..SLOTS + 2 * messages).map(|_| AtomicU64::new(0)).collect()))
    }

    /// In every interleaving the consumer sees whole messages, in order, none twice.
    #[test]
    fn no_message_is_lost_or_torn() {
        loom::model(|| {
            let words = ring(2);
            let mut producer = Producer::new(words.clone());
            let sender = thread::spawn(move || {
                let mut sent = 0u64;
                for _ in 0..6 {
                    if sent < 3 && producer.push([sent, !sent]).is_ok() {
                        producer.publish();
                        sent += 1;
                    }
                    thread::yield_now();
                }
            });
            let mut consumer = Consumer::new(words);
            let mut expected = 0u64;
            for _ in 0..3 {
                if let Some(message) = consumer.pop() {
                    assert_eq!(message, [expected, !expected]);
                    expected += 1;
                    consumer.release();
                }
                thread::yield_now();
            }
            sender.join().unwrap();
        });
    }

    /// Either the consumer sees the message before it sleeps, or the producer sees that it sleeps: no lost wake-up.
    #[test]
    fn no_wake_up_is_lost() {
        loom::model(|| {
            let words = ring(2);
            let flag = Arc::new(AtomicU32::new(0));
            let mut producer = Producer::new(words.clone());
            let seen_by_producer = {
                let flag = flag.clone();
                thread::spawn(move || {
                    producer.push([1, 1]).unwrap();
                    producer.publish();
                    needs_doorbell(&flag)
                })
            };
            let consumer = Consumer::new(words);
            go_to_sleep(&flag);
            let sees_message = consumer.has_message();
            let rung = seen_by_producer.join().unwrap();
            assert!(sees_message || rung, "asleep with a message waiting");
        });
    }
}
