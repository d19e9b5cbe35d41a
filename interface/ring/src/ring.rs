//! A ring of 16-byte messages with one producer and one consumer.
//!
//! Words 0, 8 and 16 hold the producer's index, the consumer's index and the consumer's sleep flag, each on a cache
//! line of its own; the messages begin at word 24. Indices count all messages ever passed; they do not wrap at the
//! ring's size.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

const HEAD: usize = 0;
const TAIL: usize = 8;
const SLOTS: usize = 24;

/// The ring has no room for another message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// The ring's size in messages, less one. It is a constant where the number of words is.
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
    /// Value of `head` at which the consumer's index has to be read again.
    limit: u64,
}

impl<W: AsRef<[AtomicU64]>> Producer<W> {
    /// Makes the producing end. It continues at the index that the last producer published.
    pub fn new(words: W) -> Self {
        check_size(words.as_ref());
        let [head, tail] = [HEAD, TAIL].map(|at| words.as_ref()[at].load(Ordering::Acquire));
        let mut producer = Producer { words, head, limit: head };
        producer.set_limit(tail);
        producer
    }

    /// Writes a message, which the consumer sees after [`Producer::publish`].
    ///
    /// # Errors
    /// [`Full`] if the consumer has not released enough messages.
    #[inline(always)]
    pub fn push(&mut self, message: [u64; 2]) -> Result<(), Full> {
        if self.head == self.limit && !self.reload_room(1) {
            return Err(Full);
        }
        let words = self.words.as_ref();
        let at = SLOTS + 2 * (self.head & mask(words)) as usize;
        words[at + 1].store(message[1], Ordering::Relaxed);
        words[at].store(message[0], Ordering::Relaxed);
        self.head = self.head.wrapping_add(1);
        Ok(())
    }

    /// As `push` and `publish`. `before` is called if there is room, before the consumer can see the message.
    #[inline(always)]
    pub fn push_and_publish(&mut self, message: [u64; 2], before: impl FnOnce()) -> Result<(), Full> {
        if self.head == self.limit && !self.reload_room(1) {
            return Err(Full);
        }
        let (words, head) = (self.words.as_ref(), self.head);
        let at = SLOTS + 2 * (head & mask(words)) as usize;
        words[at + 1].store(message[1], Ordering::Relaxed);
        words[at].store(message[0], Ordering::Relaxed);
        before();
        words[HEAD].store(head.wrapping_add(1), Ordering::Release);
        self.head = head.wrapping_add(1);
        Ok(())
    }

    /// Whether `count` messages fit. Reads the consumer's index only if its last known value does not suffice.
    #[inline(always)]
    pub fn has_room(&mut self, count: u64) -> bool {
        self.limit.wrapping_sub(self.head) >= count || self.reload_room(count)
    }

    #[cold]
    fn reload_room(&mut self, count: u64) -> bool {
        let tail = self.words.as_ref()[TAIL].load(Ordering::Acquire);
        self.set_limit(tail);
        self.limit.wrapping_sub(self.head) >= count
    }

    /// Sets `limit` from the consumer's index. A consumer that publishes a wrong index makes its own messages be
    /// overwritten, or gets no more of them.
    fn set_limit(&mut self, tail: u64) {
        let size = mask(self.words.as_ref()) + 1;
        let used = self.head.wrapping_sub(tail).min(size);
        self.limit = self.head.wrapping_add(size - used);
    }

    /// Makes the messages written so far visible to the consumer.
    #[inline]
    pub fn publish(&mut self) {
        self.words.as_ref()[HEAD].store(self.head, Ordering::Release);
    }

    /// Whether the consumer has released all messages before index `position`.
    #[inline]
    pub fn is_released(&self, position: u64) -> bool {
        self.words.as_ref()[TAIL].load(Ordering::Acquire).wrapping_sub(position) as i64 >= 0
    }

    /// Index behind the last message written.
    pub fn position(&self) -> u64 {
        self.head
    }
}

/// The consuming end.
#[derive(Debug)]
pub struct Consumer<W> {
    words: W,
    tail: u64,
    /// The producer's index as last read.
    head: u64,
    /// The producer's index was once further ahead than the ring is long.
    corrupt: bool,
}

impl<W: AsRef<[AtomicU64]>> Consumer<W> {
    /// Makes the consuming end. It continues at the index that the last consumer released.
    pub fn new(words: W) -> Self {
        check_size(words.as_ref());
        let tail = words.as_ref()[TAIL].load(Ordering::Acquire);
        Consumer { words, tail, head: tail, corrupt: false }
    }

    /// Takes the next message, copied once. Returns None for good once the producer has claimed more messages than the
    /// ring holds: see [`Consumer::is_corrupt`].
    #[inline]
    pub fn pop(&mut self) -> Option<[u64; 2]> {
        let words = self.words.as_ref();
        let mask = mask(words);
        if self.head == self.tail {
            self.head = self.words.as_ref()[HEAD].load(Ordering::Acquire);
            if self.head.wrapping_sub(self.tail) > mask + 1 {
                self.corrupt = true;
            }
            if self.corrupt {
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

    /// The message `further` messages after the next one, if it was there when [`Consumer::pop`] last read the
    /// producer's index. Only a hint: the producer may change it before it is taken.
    #[inline(always)]
    pub fn glance(&self, further: u64) -> Option<[u64; 2]> {
        let words = self.words.as_ref();
        let at = SLOTS + 2 * (self.tail.wrapping_add(further) & mask(words)) as usize;
        (further < self.head.wrapping_sub(self.tail))
            .then(|| [words[at].load(Ordering::Relaxed), words[at + 1].load(Ordering::Relaxed)])
    }

    /// Whether the producer has ever claimed more messages than the ring holds. A producer that follows the interface
    /// never does so; no later message of such a ring can be trusted.
    pub fn is_corrupt(&self) -> bool {
        self.corrupt
    }

    /// Discards all waiting messages, however many the producer claims, and releases their room.
    pub fn skip_all(&mut self) {
        self.head = self.words.as_ref()[HEAD].load(Ordering::Acquire);
        self.tail = self.head;
        self.release();
    }

    /// Takes the next messages as long as their first word is `first` and `take`, which gets their second word, accepts
    /// them. Only messages that were there when [`Consumer::pop`] last read the producer's index.
    #[inline(always)]
    pub fn pop_like(&mut self, first: u64, mut take: impl FnMut(u64) -> bool) {
        let words = self.words.as_ref();
        let mut tail = self.tail;
        while tail != self.head {
            // Up to the end of the ring they are contiguous.
            let (slots, _) = words[SLOTS..].as_chunks::<2>();
            let slots = &slots[(tail & mask(words)) as usize..];
            let here = &slots[..slots.len().min(self.head.wrapping_sub(tail) as usize)];
            let mut rest = here.iter();
            while let Some([one, more]) = rest.as_slice().first()
                && one.load(Ordering::Relaxed) == first
                && take(more.load(Ordering::Relaxed))
            {
                rest.next();
            }
            let refused = rest.len();
            tail = tail.wrapping_add((here.len() - refused) as u64);
            if refused > 0 {
                break;
            }
        }
        self.tail = tail;
    }

    /// Releases the room of the messages taken so far to the producer.
    #[inline]
    pub fn release(&mut self) {
        self.words.as_ref()[TAIL].store(self.tail, Ordering::Release);
    }

    /// Index of the next message to be taken.
    #[inline]
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Number of waiting messages, by the producer's index, which may be wrong.
    pub fn waiting(&self) -> u64 {
        self.words.as_ref()[HEAD].load(Ordering::Acquire).wrapping_sub(self.tail)
    }

    /// Whether a message waits.
    #[inline]
    pub fn has_message(&self) -> bool {
        // True also for messages that were seen before and not taken. A producer that sets its index back harms only
        // itself.
        self.words.as_ref()[HEAD].load(Ordering::Acquire) != self.tail
    }
}

/// Announces that the consumer is about to sleep. After this it must look for messages once more, and sleep only if
/// there are none.
pub fn go_to_sleep(flag: &AtomicU32) {
    flag.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Announces that the consumer is awake.
pub fn wake_up(flag: &AtomicU32) {
    flag.store(0, Ordering::Relaxed);
}

/// Bit of a counted flag: the doorbell was rung, and the consumer has not looked at its ring since. The other bits are
/// the number of sleeping threads.
const RUNG: u32 = 1 << 31;

/// As [`go_to_sleep`] for a consumer of several threads: counts one more sleeping thread.
pub fn count_sleeper(flag: &AtomicU32) {
    // This thread checks the ring next and sees the messages that were rung for, even if the doorbell itself was lost.
    if flag.fetch_add(1, Ordering::SeqCst) & RUNG != 0 {
        clear_rung(flag);
    }
    fence(Ordering::SeqCst);
}

/// Undoes [`count_sleeper`].
pub fn uncount_sleeper(flag: &AtomicU32) {
    flag.fetch_sub(1, Ordering::Relaxed);
}

/// Announces that a consumer of several threads checks its ring from now on, so that its doorbell is rung again for
/// later messages. To be called after the doorbell was cleared.
pub fn clear_rung(flag: &AtomicU32) {
    flag.fetch_and(!RUNG, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// Whether the doorbell was rung and no thread has checked the ring since.
pub fn was_rung(flag: &AtomicU32) -> bool {
    flag.load(Ordering::Relaxed) & RUNG != 0
}

/// As [`needs_doorbell`] for a consumer of several threads: whether a thread sleeps and the doorbell was not rung since
/// the ring was last checked. So it is rung once, however long waking up takes. The caller must call [`note_rung`]
/// before it rings.
#[inline]
pub fn wants_ring(flag: &AtomicU32) -> bool {
    needs_doorbell(flag) && flag.load(Ordering::Relaxed) & RUNG == 0
}

/// Whether a thread of a consumer of several threads seems to sleep. For decisions that may be wrong.
pub fn has_sleeper(flag: &AtomicU32) -> bool {
    flag.load(Ordering::Relaxed) & !RUNG != 0
}

/// Announces that the doorbell of a consumer of several threads is rung now.
pub fn note_rung(flag: &AtomicU32) {
    flag.fetch_or(RUNG, Ordering::SeqCst);
}

/// Whether the consumer sleeps, so that its doorbell must be rung. To be asked by the producer after publishing.
#[inline]
pub fn needs_doorbell(flag: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    flag.load(Ordering::Relaxed) != 0
}

/// As [`needs_doorbell`], for a producer that has passed a full barrier after publishing.
#[inline(always)]
pub fn seems_asleep(flag: &AtomicU32) -> bool {
    flag.load(Ordering::Relaxed) != 0
}

/// As [`needs_doorbell`] for a consumer of one thread: true once for each of its sleeps, so that the producers ring
/// once, however long the consumer takes to wake up. A caller that gets true must ring.
#[inline(always)]
pub fn must_ring(flag: &AtomicU32) -> bool {
    needs_doorbell(flag) && take_flag(flag)
}

#[cold]
#[inline(never)]
fn take_flag(flag: &AtomicU32) -> bool {
    flag.swap(0, Ordering::Relaxed) != 0
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
            assert_eq!(producer.push_and_publish([9, 9], || panic!("it is refused")), Err(Full));
            for n in 0..4 {
                assert_eq!(consumer.pop(), Some([round, n]));
                let next = (n < 3).then(|| [round, n + 1]);
                assert_eq!([0, 3 - n, u64::MAX].map(|further| consumer.glance(further)), [next, None, None]);
            }
            assert_eq!(consumer.pop(), None);
            assert_eq!(producer.push([9, 9]), Err(Full), "room comes with release");
            consumer.release();
            assert_eq!(producer.push_and_publish([round, 4], || ()), Ok(()));
            assert_eq!(consumer.pop(), Some([round, 4]));
            consumer.release();
        }
    }

    #[test]
    fn like_messages_are_taken_together() {
        let words = ring(4);
        let (mut producer, mut consumer) = (Producer::new(words.clone()), Consumer::new(words));
        for message in [[7, 1], [7, 2], [7, 9], [8, 3]] {
            producer.push(message).unwrap();
        }
        producer.publish();
        let mut taken = Vec::new();
        let mut take = |second| {
            let wanted = second < 9;
            taken.extend(wanted.then_some(second));
            wanted
        };
        consumer.pop_like(7, &mut take);
        assert_eq!(consumer.position(), 0, "the producer's index has not been read yet");
        assert_eq!(consumer.pop(), Some([7, 1]));
        consumer.pop_like(7, &mut take);
        assert_eq!(taken, [2]);
        assert_eq!(consumer.pop(), Some([7, 9]), "it was refused");
        consumer.pop_like(7, |_| true);
        assert_eq!(consumer.pop(), Some([8, 3]));
    }

    /// Released room is found even while the last known index leaves some room, but not enough.
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
    fn a_ring_with_an_impossible_index_is_not_read_again() {
        for index in [5, 1 << 40, u64::MAX] {
            let words = ring(4);
            let mut producer = Producer::new(words.clone());
            producer.push([1, 1]).unwrap();
            words[HEAD].store(index, Ordering::Relaxed);
            let mut consumer = Consumer::new(words.clone());
            assert_eq!((consumer.pop(), consumer.is_corrupt()), (None, true), "{index}");
            producer.publish();
            assert_eq!(consumer.pop(), None, "it stays corrupt");
            consumer.skip_all();
            assert!(!consumer.has_message());
        }
        let words = ring(4);
        words[HEAD].store(4, Ordering::Relaxed);
        let mut consumer = Consumer::new(words);
        assert_eq!(std::iter::from_fn(|| consumer.pop()).count(), 4, "a full ring is not corrupt");
        assert!(!consumer.is_corrupt());
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

    /// An `Arc<Vec>` as the slice that a ring takes.
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
        for at_once in [false, true] {
            loom::model(move || no_message_is_lost(at_once));
        }
    }

    fn no_message_is_lost(at_once: bool) {
        let words = ring(2);
        let mut producer = Producer::new(words.clone());
        let mut put = move |message| {
            if at_once {
                return producer.push_and_publish(message, || ()).is_ok();
            }
            let pushed = producer.push(message).is_ok();
            producer.publish();
            pushed
        };
        let sender = thread::spawn(move || {
            let mut sent = 0u64;
            for _ in 0..6 {
                if sent < 3 && put([sent, !sent]) {
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
    }

    /// Either the consumer sees the message before it sleeps, or the producer sees that the consumer sleeps: no wake-up
    /// is lost.
    #[test]
    fn no_wake_up_is_lost() {
        for asks in [needs_doorbell, must_ring, wants_ring] {
            loom::model(move || {
                let words = ring(2);
                let flag = Arc::new(AtomicU32::new(0));
                let mut producer = Producer::new(words.clone());
                let seen_by_producer = {
                    let flag = flag.clone();
                    thread::spawn(move || {
                        producer.push([1, 1]).unwrap();
                        producer.publish();
                        asks(&flag)
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

    /// A consumer whose doorbell was rung and that is about to sleep again sees a message that came meanwhile, or is
    /// rung for it.
    #[test]
    fn none_is_lost_between_two_sleeps() {
        loom::model(|| {
            let words = ring(2);
            let flag = Arc::new(AtomicU32::new(0));
            count_sleeper(&flag);
            note_rung(&flag);
            let mut producer = Producer::new(words.clone());
            let rung = {
                let flag = flag.clone();
                thread::spawn(move || {
                    producer.push([1, 1]).unwrap();
                    producer.publish();
                    wants_ring(&flag)
                })
            };
            uncount_sleeper(&flag);
            clear_rung(&flag);
            let consumer = Consumer::new(words);
            let seen = consumer.has_message();
            count_sleeper(&flag);
            let seen = seen || consumer.has_message();
            let rung = rung.join().unwrap();
            assert!(seen || rung, "asleep with a message waiting");
        });
    }
}
