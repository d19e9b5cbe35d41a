//! The kernel's wheel of timers: a list for each moment, so that setting or stopping a timer also writes to those
//! before and behind it.

/// No timer.
const NONE: usize = usize::MAX;

/// The wheel.
#[derive(Clone, Debug)]
pub struct Wheel {
    /// First and last timer of each bucket.
    ends: Vec<[usize; 2]>,
    /// The timers before and behind each, and its bucket.
    links: Vec<[usize; 2]>,
    bucket: Vec<usize>,
}

impl Wheel {
    /// A wheel of `buckets` buckets for `timers` timers, none of which runs.
    pub fn new(buckets: usize, timers: usize) -> Wheel {
        Wheel { ends: vec![[NONE; 2]; buckets], links: vec![[NONE; 2]; timers], bucket: vec![NONE; timers] }
    }

    /// Puts a timer behind the others of a bucket, or nowhere. Returns the other timers whose links changed: the two
    /// neighbours that it had, and its new predecessor.
    pub fn set(&mut self, timer: usize, bucket: Option<usize>) -> [Option<usize>; 3] {
        let [before, behind] = std::mem::replace(&mut self.links[timer], [NONE; 2]);
        let old = std::mem::replace(&mut self.bucket[timer], bucket.unwrap_or(NONE));
        if old != NONE {
            if before == NONE {
                self.ends[old][0] = behind
            } else {
                self.links[before][1] = behind
            }
            if behind == NONE { self.ends[old][1] = before } else { self.links[behind][0] = before }
        }
        let last = bucket.map_or(NONE, |bucket| {
            let last = std::mem::replace(&mut self.ends[bucket][1], timer);
            self.links[timer][0] = last;
            if last == NONE {
                self.ends[bucket][0] = timer
            } else {
                self.links[last][1] = timer
            }
            last
        });
        [before, behind, last].map(|timer| (timer != NONE).then_some(timer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_a_timer_touches_its_neighbours() {
        let mut wheel = Wheel::new(4, 5);
        assert_eq!(wheel.set(0, Some(1)), [None; 3]);
        assert_eq!(wheel.set(1, Some(1)), [None, None, Some(0)]);
        assert_eq!(wheel.set(2, Some(1)), [None, None, Some(1)]);
        // The one in the middle goes elsewhere, then the last is behind the first.
        assert_eq!(wheel.set(1, Some(2)), [Some(0), Some(2), None]);
        assert_eq!(wheel.set(2, None), [Some(0), None, None]);
        assert_eq!(wheel.set(3, Some(1)), [None, None, Some(0)]);
        assert_eq!(wheel.set(0, Some(1)), [None, Some(3), Some(3)]);
    }
}
