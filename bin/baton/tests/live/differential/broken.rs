//! Rules that the NIC seems to break. A NIC built wrong would take minutes to build: instead its connection is sent
//! that with which it does what a wrong one would do with the peer's segment, or its answers are not shown.

use super::script::{SEGMENT, Script, Segment, Step};
use baton_wire::Flags;

/// A rule that the NIC seems to break. The comparison has to find that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// RFC 9293 section 3.10.7.4: what lies outside of the window is acknowledged. It is not.
    OutsideTheWindow,
    /// RFC 5961 sections 4.2 and 5.2: a SYN, and an acknowledgement of what was never sent, are challenged. They are
    /// not.
    Challenge,
    /// RFC 5961 section 3.2: only a reset at RCV.NXT counts. Any one in the window does.
    ResetInTheWindow,
    /// RFC 9293 section 3.10.7.4: a reset at RCV.NXT ends the connection. None does.
    Reset,
    /// RFC 9293 section 3.10.7.4: data is taken in order. Data ahead of a gap is taken as the next.
    Gap,
    /// RFC 9293 section 3.10.7.4: what was received is not taken again. It is taken as the next.
    OldData,
    /// RFC 5961 section 5.2: an acknowledgement of what was never sent is not taken, nor what comes with it. It is
    /// believed.
    NeverSent,
    /// RFC 9293 section 3.8.6: nothing is sent beyond the peer's window. All is sent.
    PeersWindow,
    /// RFC 7323 section 5.3: what has an old timestamp is not taken (PAWS). It is.
    OldTimestamp,
    /// RFC 2018 section 4: what is held is reported. It is not.
    Sack,
    /// RFC 9293 section 3.10.7.4: a FIN is acknowledged, and ends the stream. It does not.
    Fin,
    /// All segments of a large frame are taken. Only the first one is.
    LargeFrame,
}

/// Sequence numbers ahead of RCV.NXT that lie in every window of a script.
const AHEAD: std::ops::RangeInclusive<i32> = 1..=20_000;

impl Broken {
    /// All of them, and the parts in which each shows.
    pub const ALL: [(Broken, &'static [&'static str]); 12] = [
        (Broken::OutsideTheWindow, &["answered"]),
        (Broken::Challenge, &["answered"]),
        (Broken::ResetInTheWindow, &["error", "reset"]),
        (Broken::Reset, &["error", "reset"]),
        (Broken::Gap, &["acknowledged", "wrong"]),
        (Broken::OldData, &["acknowledged", "wrong"]),
        (Broken::NeverSent, &["acknowledged", "answered"]),
        (Broken::PeersWindow, &["sent"]),
        (Broken::OldTimestamp, &["acknowledged"]),
        (Broken::Sack, &["sacked"]),
        (Broken::Fin, &["acknowledged", "end"]),
        (Broken::LargeFrame, &["acknowledged"]),
    ];

    /// Whether the answer to this segment obeys the rule, and is not shown.
    pub fn hides(self, segment: &Segment) -> bool {
        let has = |flags| segment.flags.intersects(flags);
        match self {
            Broken::OutsideTheWindow => segment.at.unsigned_abs() >= 100_000 && !has(Flags::SYN | Flags::RST),
            Broken::Challenge => segment.at == 0 && !has(Flags::RST) && (has(Flags::SYN) || has(Flags::ACK) && segment.ack > 0),
            _ => false,
        }
    }

    /// What the NIC's connection is sent instead of a segment of the peer's, with the data of that one; None if
    /// nothing. RCV.NXT is `next`, relative to what the peer would send next.
    pub fn instead(self, segment: &Segment, next: i32) -> Option<Segment> {
        let has = |flags| segment.flags.intersects(flags);
        let is_data = segment.is_plain() && segment.length > 0;
        let ahead = segment.at.wrapping_sub(next);
        let without_fin = Flags(segment.flags.0 & !Flags::FIN.0);
        match self {
            Broken::ResetInTheWindow if has(Flags::RST) && AHEAD.contains(&ahead) => {
                Some(Segment { at: next, length: 0, ..*segment })
            }
            Broken::Reset if has(Flags::RST) => None,
            Broken::Gap if is_data && AHEAD.contains(&ahead) => Some(Segment { at: next, ..*segment }),
            Broken::OldData if is_data && (-100_000..=-i32::from(segment.length)).contains(&ahead) => {
                Some(Segment { at: next, ..*segment })
            }
            Broken::NeverSent if has(Flags::ACK) && (1..=100_000).contains(&segment.ack) => Some(Segment { ack: 0, ..*segment }),
            Broken::PeersWindow if segment.is_plain() => Some(Segment { window: u16::MAX, ..*segment }),
            Broken::OldTimestamp => Some(Segment { clock: segment.clock.max(0), ..*segment }),
            Broken::Fin if segment.is_plain() => Some(Segment { flags: without_fin, ..*segment }),
            Broken::LargeFrame if segment.length > SEGMENT => Some(Segment { length: SEGMENT, flags: without_fin, ..*segment }),
            _ => Some(*segment),
        }
    }

    /// Whether it should show in this script: the peer, which is in order with all it has sent, sends what the rule is
    /// about.
    pub fn concerns(self, script: &Script) -> bool {
        let is_next = |segment: &Segment| segment.is_plain() && segment.at == 0 && segment.ack == 0;
        match self {
            Broken::Reset => script.segments().any(|segment| segment.flags.intersects(Flags::RST) && segment.at == 0),
            Broken::Sack => {
                let is_ahead = |segment: &Segment| segment.is_plain() && segment.length > 0 && AHEAD.contains(&segment.at);
                script.agreed().sack && script.segments().any(is_ahead)
            }
            Broken::OldTimestamp => {
                // The NIC knows the peer's timestamp by then.
                let mut rest = script.segments().skip_while(|segment| !is_next(segment) || segment.clock != 0 || segment.bare);
                let is_old = |segment: &Segment| is_next(segment) && segment.length > 0 && segment.clock < -1 && !segment.bare;
                script.offer.timestamps && rest.any(is_old)
            }
            Broken::PeersWindow => script.steps.windows(2).any(|pair| {
                let [Step::Segment(segment), Step::Write(length)] = pair else { return false };
                let window = u32::from(segment.window) << script.agreed().scale.unwrap_or(0);
                is_next(segment) && segment.clock == 0 && window < *length
            }),
            _ => script.segments().any(|segment| self.hides(segment) || self.instead(segment, 0).as_ref() != Some(segment)),
        }
    }
}
