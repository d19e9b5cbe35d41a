//! Queues that are short most of the time.

use alloc::collections::VecDeque;

/// Takes the first entry. A queue that becomes empty begins again at the start of its memory. Otherwise a queue with
/// room for thousands that holds only a few entries at a time would cycle through all of its memory, and each entry
/// would come from a slower cache.
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
