//! Endpoints for tests.

use crate::{Access, Channel, Endpoint, Incoming, Kind, Outgoing, Payload, Regions, Selector, Settings};
use baton_linux::events::monotonic_micros;
use std::time::{Duration, Instant};

struct Nothing;

impl Regions<Vec<u8>> for Nothing {
    fn find(&self, _: u64, _: u64, _: u64, _: Access) -> Option<Vec<u8>> {
        None
    }
}

/// One with these settings.
pub fn with(settings: &Settings) -> Endpoint<Vec<u8>> {
    Endpoint::new(settings, Box::new(Nothing), [7; 32], monotonic_micros()).expect("an endpoint")
}

/// One that has room for so many receives.
pub fn endpoint(receives: u16) -> Endpoint<Vec<u8>> {
    with(&Settings { receives, stream: false, ..Settings::default() })
}

/// Sends messages of `length` bytes from each end to the other, some at a time. `disturb` is called in every round.
pub fn exchange(ends: &mut [Endpoint<Vec<u8>>; 2], length: usize, mut disturb: impl FnMut(&mut [Endpoint<Vec<u8>>; 2])) {
    const MESSAGES: u64 = 6;
    let now = monotonic_micros();
    let addresses = [ends[0].address(), ends[1].address()];
    for at in 0..2 {
        let peer = ends[at].peer(addresses[1 - at], |_| true).unwrap();
        for tag in 0..MESSAGES {
            let selector = Selector { peer: None, channel: Channel::Tagged, tag, ignore: 0 };
            ends[at].receive(Incoming { selector, buffer: vec![0; length], token: tag }, now).unwrap();
            let payload = Payload::Borrowed(vec![tag as u8 + 1; length]);
            ends[at].send(Outgoing { peer, channel: Channel::Tagged, tag, data: 0, payload, token: Some(tag) }, now).unwrap();
        }
    }
    let limit = Instant::now() + Duration::from_secs(20);
    let mut left = [2 * MESSAGES; 2];
    while left != [0; 2] {
        assert!(Instant::now() < limit, "messages that have not come: {left:?}, {}", ends[1].report());
        disturb(ends);
        for (end, left) in ends.iter_mut().zip(&mut left) {
            end.progress(monotonic_micros());
            while let Some(completion) = end.poll_completion() {
                let delivered = completion.result.expect("it is delivered");
                assert!(completion.kind == Kind::Send || delivered.placed == length as u64);
                *left -= 1;
            }
        }
    }
}
