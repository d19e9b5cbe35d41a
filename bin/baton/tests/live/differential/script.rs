//! Scripts: what a random peer sends and what the program does meanwhile. The same number gives the same script.

use super::broken::Broken;
use baton_netem::Rng;
use baton_wire::Flags;
use std::fmt;

/// Most bytes of a segment that is no large frame, and of those that a large one stands for.
pub const SEGMENT: u16 = 1400;

/// What a peer offers in its SYN.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    pub mss: Option<u16>,
    pub scale: Option<u8>,
    pub sack: bool,
    pub timestamps: bool,
}

/// A segment of the peer's. Sequence numbers are relative to what it would send next, acknowledgements to all that it
/// has seen.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub at: i32,
    pub length: u16,
    pub flags: Flags,
    pub ack: i32,
    pub window: u16,
    /// Added to the peer's clock, in its ticks.
    pub clock: i32,
    /// Without the timestamps that were agreed on.
    pub bare: bool,
}

impl Segment {
    /// It is one of an open connection: neither SYN nor RST.
    pub fn is_plain(&self) -> bool {
        self.flags.contains(Flags::ACK) && !self.flags.intersects(Flags::SYN | Flags::RST)
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?} seq{:+} len {} ack{:+} win {}", self.flags, self.at, self.length, self.ack, self.window)?;
        if self.clock != 0 {
            write!(out, " clock{:+}", self.clock)?;
        }
        if self.bare { write!(out, " without timestamps") } else { Ok(()) }
    }
}

/// One step: the peer sends a segment, or the program makes a call.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    Segment(Segment),
    Write(u32),
    Read(u32),
    Shutdown,
}

#[derive(Clone, Debug)]
pub struct Script {
    pub ipv6: bool,
    pub offer: Offer,
    /// The kernel answers the SYN with a cookie, and makes the connection from what the peer's acknowledgement brings
    /// back.
    pub cookie: bool,
    /// SO_RCVBUF of the program's socket, if it sets that.
    pub receive_buffer: Option<i32>,
    pub steps: Vec<Step>,
    /// The rule that the NIC seems to break.
    pub broken: Option<Broken>,
}

impl Script {
    /// The script of this number.
    pub fn new(number: u64) -> Script {
        let mut rng = Rng::new(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xba70);
        let offer = Offer {
            mss: [Some(1460), Some(1460), Some(536), Some(300), None][rng.below(5) as usize],
            scale: [None, Some(0), Some(0), Some(4)][rng.below(4) as usize],
            sack: rng.chance(700_000),
            timestamps: rng.chance(600_000),
        };
        let receive_buffer = [None, None, None, Some(2304), Some(5000), Some(20_000)][rng.below(6) as usize];
        let count = 3 + rng.below(5) as usize;
        let mut steps: Vec<Step> = (0..count).flat_map(|_| followed(step(&mut rng), &mut rng)).collect();
        let ipv6 = rng.chance(300_000);
        // By numbers of its own, so that the other scripts stay as they are.
        let mut rng = Rng::new(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1a26e);
        let cookie = rng.chance(125_000);
        if rng.chance(125_000) {
            enlarge(&mut steps, &mut rng);
        }
        Script { ipv6, offer, cookie, receive_buffer, steps, broken: None }
    }

    /// The peer's segments.
    pub fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.steps.iter().filter_map(|step| match step {
            Step::Segment(segment) => Some(segment),
            _ => None,
        })
    }

    /// What the connection has of the offer: the timestamps of a cookie hold window scale and SACK.
    pub fn agreed(&self) -> Offer {
        if self.cookie && !self.offer.timestamps { Offer { scale: None, sack: false, ..self.offer } } else { self.offer }
    }
}

/// What the program sends is acknowledged, mostly: without, the script is soon about retransmissions alone.
fn followed(step: Step, rng: &mut Rng) -> impl Iterator<Item = Step> + use<> {
    let sends = matches!(step, Step::Write(_) | Step::Shutdown) && rng.chance(900_000);
    let window = [65_535, 65_535, 20_000][rng.below(3) as usize];
    let acknowledge = Segment { at: 0, length: 0, flags: Flags::ACK, ack: 0, window, clock: 0, bare: false };
    std::iter::once(step).chain(sends.then_some(Step::Segment(acknowledge)))
}

fn step(rng: &mut Rng) -> Step {
    match rng.below(20) {
        0..3 => Step::Write([1, 100, 700, 2000, 4000][rng.below(5) as usize]),
        3..5 => Step::Read([1, 500, 100_000][rng.below(3) as usize]),
        5 => Step::Shutdown,
        _ => Step::Segment(segment(rng)),
    }
}

/// Makes some of the segments large frames, one at least.
fn enlarge(steps: &mut Vec<Step>, rng: &mut Rng) {
    let mut any = false;
    for step in steps.iter_mut() {
        if let Step::Segment(segment) = step
            && segment.is_plain()
            && rng.chance(300_000)
        {
            *segment = large(segment, rng);
            any = true;
        }
    }
    if !any {
        let plain = Segment { at: 0, length: 0, flags: Flags::ACK, ack: 0, window: 65_535, clock: 0, bare: false };
        steps.insert(rng.below(steps.len() as u64 + 1) as usize, Step::Segment(large(&plain, rng)));
    }
}

/// The same segment as a large frame: in order, overlapping, ahead, beyond the window.
fn large(segment: &Segment, rng: &mut Rng) -> Segment {
    let length = [2921, 2921, 16_000, 16_000, 60_000][rng.below(5) as usize];
    let at = match rng.below(20) {
        0..11 => 0,
        11..13 => -i32::from(length),
        13..15 => -i32::from(length / 2),
        15..18 => [1, 1400, 3000, 20_000][rng.below(4) as usize],
        _ => -([1, 1000][rng.below(2) as usize]),
    };
    Segment { at, length, flags: segment.flags | Flags::PSH, ..*segment }
}

fn segment(rng: &mut Rng) -> Segment {
    let length = [0, 0, 1, 1, 10, 100, 500, 1000, 1400][rng.below(9) as usize];
    // Beyond any window.
    let far = [i32::MAX, i32::MIN, 1 << 30, -(1 << 30), 1 << 25, -100_000][rng.below(6) as usize];
    let at = match rng.below(20) {
        0..10 => 0,
        10..12 => -i32::from(length),
        12..14 => -i32::from(length / 2),
        14..17 => [1, 10, 500, 1400, 3000][rng.below(5) as usize],
        17..19 => -([1, 2, 100, 1000][rng.below(4) as usize]),
        _ => far,
    };
    let flags = match rng.below(40) {
        0..30 => Flags::ACK | if length > 0 { Flags::PSH } else { Flags(0) },
        30..33 => Flags::ACK | Flags::FIN,
        33 => Flags::RST,
        34 => Flags::RST | Flags::ACK,
        35 => Flags::SYN,
        36 => Flags::SYN | Flags::ACK,
        37 => Flags(0),
        38 => Flags::FIN,
        _ => Flags::ACK | Flags::SYN | Flags::FIN,
    };
    let ack = match rng.below(20) {
        0..13 => 0,
        13..15 => -([1, 100, 1000][rng.below(3) as usize]),
        15..17 => [1, 100, 100_000][rng.below(3) as usize],
        17 => far,
        _ => -10_000_000,
    };
    Segment {
        at,
        length,
        flags,
        ack,
        window: [65_535, 65_535, 8000, 1000, 500, 100, 1, 0][rng.below(8) as usize],
        clock: if rng.chance(100_000) { [-1, -1000, -100_000, 100_000][rng.below(4) as usize] } else { 0 },
        bare: rng.chance(40_000),
    }
}
