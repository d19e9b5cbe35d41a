//! Two RMPP endpoints that send and receive over links with every fault, forged packets among them, while NICs die and
//! endpoints begin anew.
//!
//! A step is an arrival or time-out of the world, a call of a program's, a forged packet, a death, or a change of
//! faults.

use crate::schedule::{FORGED, Schedule};
use crate::worlds::readable;
use baton_fuzz::{Choice, World};
use baton_sim::Rng;
use baton_wire::rmpp::{Body, Cts, Header, Kind, PacketFlags, Rts, append_data, emit};

struct Pair(Schedule);

impl Pair {
    /// A packet with a good CRC of somebody who does not know the sender's incarnation.
    fn forge(&mut self, choice: &mut Choice) {
        let at = choice.below(2) as usize;
        let incarnation = |at: usize| self.0.configs[at].incarnation;
        let kind = choice.of(&Kind::ALL);
        // Further from it than any that the endpoint will have.
        let far = 1 << 20 | choice.number();
        let from = if choice.one_in(2) { incarnation(at).wrapping_sub(far >> 1) } else { incarnation(at).wrapping_add(far >> 1) };
        let to = if choice.one_in(4) { choice.number() } else { incarnation(1 - at) };
        let mut header = Header::new(kind, [at as u16, 1 - at as u16], [from, if kind == Kind::Hello { 0 } else { to }]);
        let handle = choice.of(&[0, 0x1_0000, 0x1_0001, 0x2_0000, choice.clone().number()]);
        (header.message, header.handle, header.packet) = (choice.magnitude(4), handle, choice.magnitude(4));
        (header.grant, header.count) = (choice.magnitude(4) as u16, choice.magnitude(8) as u16);
        if choice.one_in(2) {
            header.flags = PacketFlags::RSM;
        }
        if !choice.one_in(8) {
            header = readable(header);
        }
        let length = u64::from(choice.magnitude(32));
        let fragment = choice.magnitude(11) as u16;
        let rts = Rts { length, tag: choice.below(3), data: FORGED, context: 0, handle: 1 + choice.magnitude(4), fragment };
        let body = match kind {
            Kind::Rts => Body::Rts(rts, &[]),
            Kind::Cts => Body::Cts(Cts { handle, ..Cts::default() }),
            Kind::Data => Body::Data(&[]),
            _ => Body::Empty,
        };
        let data = if matches!(kind, Kind::Rts | Kind::Data) { choice.below(length.min(300) + 1) as usize } else { 0 };
        let mut packet = vec![0; 1446];
        let written = emit(&header, &body, &mut packet);
        let world = &mut self.0.world;
        let addresses = [world.address(at), world.address(1 - at)];
        let length = append_data(&mut packet, written, &vec![1; data], &addresses[0], &addresses[1]);
        packet.truncate(length);
        if choice.one_in(8) {
            packet.truncate(choice.below(length as u64) as usize);
        }
        let frame = world.frame(at, 1 - at, &packet);
        world.nodes[1 - at].receive(&frame);
        world.settle();
        self.0.collect();
    }
}

impl World for Pair {
    const LONGEST: u64 = 2000;

    fn new(word: u64) -> Pair {
        let streams = Choice::new(word).one_in(4);
        Pair(Schedule::new(word, streams))
    }

    fn step(&mut self, word: u64) -> bool {
        let mut choice = Choice::new(word);
        match choice.below(20) {
            0..2 => {
                self.0.rng = Rng::new(choice.word());
                self.0.act();
            }
            2 => self.forge(&mut choice),
            _ => {
                self.0.world.step();
                self.0.collect();
            }
        }
        true
    }

    fn end(mut self) {
        self.0.finish();
    }
}

#[test]
fn each_message_is_delivered_once_or_ends_in_an_error() {
    crate::fuzzer!("rmpp").run::<Pair>();
}
