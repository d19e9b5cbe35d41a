//! Queues that are short most of the time.

use alloc::collections::VecDeque;

/// Takes the first entry. A queue that this empties begins again at the start of its memory: one that has room for
/// thousands, and is used by a few at a time, would else go through all of it, and each entry would come from a farther
/// cache.
pub fn take_first<T>(queue: &mut VecDeque<T>) -> Option<T> {
    let first = queue.pop_front();
    if queue.is_empty() {
        queue.clear();
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_used_by_few_at_a_time_stays_at_its_start() {
        let mut queue = VecDeque::with_capacity(1000);
        let start = {
            queue.push_back(0);
            core::ptr::from_ref(&queue[0])
        };
        for value in 0..5000 {
            queue.push_back(value + 1);
            assert_eq!(take_first(&mut queue), Some(value));
            if value % 7 == 0 {
                assert_eq!((take_first(&mut queue), take_first(&mut queue)), (Some(value + 1), None));
                queue.push_back(value + 1);
                assert_eq!(core::ptr::from_ref(&queue[0]), start);
            }
        }
    }
}
