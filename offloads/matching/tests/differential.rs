//! Matching against the plainest form of MPI's rules: two lists that are searched from the front.

use baton_matching::{Arrival, Criteria, Full, Matching, Message, Post, PostedId};
use baton_netem::Rng;

/// Receives and messages in order, searched one by one.
#[derive(Default)]
struct Lists {
    posted: Vec<(Criteria, u32)>,
    unexpected: Vec<(Message, u32)>,
}

impl Lists {
    fn post(&mut self, criteria: Criteria, value: u32, room: usize) -> Result<Option<u32>, Full> {
        if let Some(at) = self.unexpected.iter().position(|(message, _)| criteria.accepts(message)) {
            return Ok(Some(self.unexpected.remove(at).1));
        }
        if self.posted.len() == room {
            return Err(Full);
        }
        self.posted.push((criteria, value));
        Ok(None)
    }

    fn arrive(&mut self, message: Message, value: u32, room: usize) -> Result<Option<u32>, Full> {
        if let Some(at) = self.posted.iter().position(|(criteria, _)| criteria.accepts(&message)) {
            return Ok(Some(self.posted.remove(at).1));
        }
        if self.unexpected.len() == room {
            return Err(Full);
        }
        self.unexpected.push((message, value));
        Ok(None)
    }

    fn peek(&self, criteria: &Criteria) -> Option<u32> {
        self.unexpected.iter().find(|(message, _)| criteria.accepts(message)).map(|(_, value)| *value)
    }
}

/// More kinds of wildcard than there are classes, so that receives are searched one by one, too.
const IGNORED: [u64; 10] = [0, u64::MAX, 1, 2, 3, 4, 5, 6, 7, 0xff00];

fn criteria(rng: &mut Rng) -> Criteria {
    let source = (rng.below(3) > 0).then(|| rng.below(4) as u32);
    // Most receives have no ignored bits or all of them, as MPI's have.
    let kinds = if rng.below(4) == 0 { IGNORED.len() as u64 } else { 2 };
    let ignore = IGNORED[rng.below(kinds) as usize];
    Criteria { source, context: rng.below(2) as u32, tag: rng.below(8), ignore }
}

#[test]
fn every_operation_answers_as_the_lists_do() {
    let operations: u32 = std::env::var("BATON_MATCHING_OPERATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(50_000);
    const ROOM: usize = 64;
    let mut rng = Rng::new(7);
    let mut matching = Matching::new(ROOM, ROOM, [1, 2, 3, 4]);
    let mut lists = Lists::default();
    let mut ids: Vec<(PostedId, u32)> = Vec::new();
    let mut places: Vec<(u32, u32)> = Vec::new();
    let (mut matched, mut full, mut cancelled, mut discarded) = (0, 0, 0, 0);
    for value in 0..operations {
        // The balance between receives and messages shifts, so that both queues fill up and drain.
        let leaning = if value / 300 % 2 == 0 { 50 } else { 30 };
        match rng.below(100) {
            kind if kind < leaning => {
                let asked = criteria(&mut rng);
                let expected = lists.post(asked, value, ROOM);
                let got = matching.post(asked, value);
                if let Ok(Post::Posted(id)) = got {
                    ids.push((id, value));
                }
                let got = got.map(|post| if let Post::Matched(value) = post { Some(value) } else { None });
                assert_eq!(got, expected, "operation {value}");
                (matched, full) = (matched + u32::from(matches!(got, Ok(Some(_)))), full + u32::from(got.is_err()));
            }
            kind if kind < 80 => {
                let message = Message { source: rng.below(4) as u32, context: rng.below(2) as u32, tag: rng.below(8) };
                let expected = lists.arrive(message, value, ROOM);
                let got = matching.arrive(message, value);
                if let Ok(Arrival::Unexpected(place)) = got {
                    places.push((place, value));
                }
                let got = got.map(|arrival| if let Arrival::Matched(value) = arrival { Some(value) } else { None });
                assert_eq!(got, expected, "operation {value}");
                (matched, full) = (matched + u32::from(matches!(got, Ok(Some(_)))), full + u32::from(got.is_err()));
            }
            kind if kind < 82 && !places.is_empty() => {
                let (place, value) = places.swap_remove(rng.below(places.len() as u64) as usize);
                let waits = lists.unexpected.iter().any(|(_, waiting)| *waiting == value);
                lists.unexpected.retain(|(_, waiting)| *waiting != value);
                assert_eq!(matching.discard(place, value), waits);
                discarded += u32::from(waits);
            }
            kind if kind < 90 && !ids.is_empty() => {
                let (id, value) = ids.swap_remove(rng.below(ids.len() as u64) as usize);
                let at = lists.posted.iter().position(|(_, posted)| *posted == value);
                let expected = at.map(|at| lists.posted.remove(at).1);
                assert_eq!(matching.cancel(id), expected);
                cancelled += u32::from(expected.is_some());
            }
            kind => {
                let asked = criteria(&mut rng);
                let expected = lists.peek(&asked);
                assert_eq!(matching.peek(&asked), expected);
                if kind % 2 == 0 {
                    assert_eq!(matching.claim(&asked), expected);
                    lists.unexpected.retain(|(_, value)| Some(*value) != expected);
                }
            }
        }
        assert_eq!((matching.posted(), matching.unexpected()), (lists.posted.len(), lists.unexpected.len()));
    }
    // The test has covered the cases for which it was written.
    assert!(matched > operations / 10 && full > 0 && cancelled > 0 && discarded > 0, "{matched} {full} {cancelled} {discarded}");
}

#[test]
fn a_number_used_again_cancels_nothing() {
    let mut matching = Matching::new(1, 1, [1, 2, 3, 4]);
    let asked = Criteria { source: Some(1), context: 0, tag: 5, ignore: 0 };
    let Ok(Post::Posted(first)) = matching.post(asked, 10) else { panic!("there is room") };
    assert_eq!(matching.cancel(first), Some(10));
    let Ok(Post::Posted(second)) = matching.post(asked, 11) else { panic!("there is room") };
    assert_eq!(matching.cancel(first), None);
    assert_eq!(matching.cancel(second), Some(11));
}
