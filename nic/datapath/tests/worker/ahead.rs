//! Frames that are received ahead are processed exactly as others.

use super::stage::{Stage, flow};
use baton_abi::Message;
use baton_device::{Checksum, Device};
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Flags, TcpOptions};
use proptest::prelude::*;

/// A segment for one of the two connections, or for a connection that the NIC does not have.
#[derive(Clone, Copy, Debug)]
struct Arriving {
    of: u32,
    /// How far ahead of the next byte it begins.
    ahead: u32,
    length: usize,
    fin: bool,
    verified: bool,
}

fn arriving() -> impl Strategy<Value = Arriving> {
    let (of, ahead) = (0u32..3, prop_oneof![9 => Just(0u32), 1 => Just(100)]);
    let (fin, verified) = (prop::bool::weighted(0.02), prop::bool::weighted(0.95));
    (of, ahead, 0usize..300, fin, verified).prop_map(|(of, ahead, length, fin, verified)| Arriving {
        of,
        ahead,
        length,
        fin,
        verified,
    })
}

/// All frames, events and messages that leave a worker which receives these batches of segments.
#[derive(Debug, Default, PartialEq, Eq)]
struct Left {
    wire: Vec<Vec<u8>>,
    kernel: Vec<Vec<u8>>,
    /// Per program.
    events: [Vec<[u64; 2]>; 2],
    agent: Vec<Option<Message>>,
}

fn run(batches: &[Vec<Arriving>], quick_ack: bool, many: u64) -> Left {
    let mut stage = Stage::with(quick_ack, many);
    let (mut next, mut left) = ([1u32; 3], Left::default());
    for batch in batches {
        for arriving in batch {
            let next = &mut next[arriving.of as usize];
            let template = Template::new(&flow(arriving.of).reversed(), &Link { ttl: 64, ..Link::default() }, true);
            let options = TcpOptions { timestamps: Some((2, 1)), ..TcpOptions::default() };
            let flags = if arriving.fin { Flags::ACK | Flags::FIN } else { Flags::ACK };
            let seq = next.wrapping_add(arriving.ahead);
            let header = Header { seq, ack: 1, flags, window: 512, options: &options, ecn: 0, ident: 0 };
            stage.frame.set_length(MAX_HEADER + arriving.length);
            let headers = template.emit(&header, arriving.length, stage.frame.bytes_mut());
            stage.frame.set_length(headers + arriving.length);
            // A segment that the device has not verified has a wrong checksum.
            stage.frame.checksum = if arriving.verified { Checksum::Verified } else { Checksum::Unknown };
            stage.far.transmit(&mut stage.frame);
            if arriving.verified && arriving.ahead == 0 {
                *next = next.wrapping_add(arriving.length as u32);
            }
        }
        stage.now = stage.now.after(3);
        for _ in 0..4 {
            stage.worker.poll(stage.now);
        }
        while stage.far.receive(&mut stage.frame) {
            left.wire.push(stage.frame.bytes().to_vec());
        }
        while stage.kernel.receive(&mut stage.frame) {
            left.kernel.push(stage.frame.bytes().to_vec());
        }
        for (program, events) in stage.programs.iter_mut().zip(&mut left.events) {
            events.extend(std::iter::from_fn(|| program.events.pop()));
            program.events.release();
        }
        left.agent.extend(std::iter::from_fn(|| stage.events.pop()).map(Message::from_words));
        stage.events.release();
    }
    left
}

proptest! {
    #[test]
    fn whatever_arrives_what_leaves_is_the_same(
        batches in proptest::collection::vec(proptest::collection::vec(arriving(), 1..40), 1..12),
        quick_ack in any::<bool>(),
    ) {
        let left = run(&batches, quick_ack, u64::MAX);
        prop_assert_eq!(&run(&batches, quick_ack, 1), &left);
        let in_order = |arriving: &Arriving| arriving.verified && arriving.ahead == 0 && arriving.length > 0;
        let any = quick_ack && batches.iter().flatten().any(|arriving| arriving.of == 0 && in_order(arriving));
        prop_assert!(!any || !left.wire.is_empty(), "something is acknowledged");
    }
}
