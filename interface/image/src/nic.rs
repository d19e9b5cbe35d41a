//! The state of a connection that only a NIC's TCP has: the kernel neither shows nor accepts it in repair mode. It
//! follows the image's fields if one NIC hands a connection to another, or if it is still valid after a stay in the
//! kernel, and is absent otherwise. A TCP that takes over a connection without it uses the safe assumptions of
//! `Connection::from_image`.
//!
//! Every field is *delegated* ([`crate::Class`]). Two NICs have different clocks, so a time is stored as an age, or as
//! the time that is left, in microseconds at the time of the image: the image has to be taken over at once. The new
//! owner trusts no number: it bounds each by what the image's own fields allow.

use crate::codec::{Field, Reader, Writer, fields};
use crate::{Image, ImageError};

/// The most runs of a [`Flight`].
pub const MOST_RUNS: usize = 24;

/// The segment was SACKed.
pub const SACKED: u8 = 1;
/// The segment counts as lost.
pub const LOST: u8 = 2;
/// A retransmission of the segment is in flight.
pub const RETRANSMITTED: u8 = 4;
/// The segment was retransmitted at some time: no round-trip sample (Karn).
pub const EVER: u8 = 8;
/// The segment carries PSH, also when it is retransmitted.
pub const PUSHED: u8 = 16;
/// An earlier owner sent the segment, and its time was not kept: no round-trip sample, but its order among the others
/// counts.
pub const UNTIMED: u8 = 32;

/// Records that a flight of any bytes may have: as many as a NIC keeps of small segments.
const MOST_SMALL: u32 = 1 << 17;
/// Bytes of the smallest segment that the path MTU ever makes.
const LEAST_SEGMENT: u32 = 36;

/// Congestion states, as Linux has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Phase {
    /// Nothing unusual.
    #[default]
    Open = 0,
    /// Something arrived out of order; nothing is known to be lost.
    Disorder = 1,
    /// The window shrinks because of ECN or a tail loss probe that repaired a loss.
    Reduced = 2,
    /// Fast recovery.
    Recovery = 3,
    /// After a retransmission time-out.
    Loss = 4,
}

/// The purpose of the sending side's only timer; at most one of these is needed at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum SendTimer {
    /// It does not run.
    #[default]
    Off = 0,
    /// Retransmission time-out (RFC 6298).
    Retransmit = 1,
    /// Tail loss probe (RFC 8985 section 7).
    TailLoss = 2,
    /// RACK's reordering window (RFC 8985 section 6.3).
    Reordering = 3,
    /// Zero window probe (RFC 9293 section 3.8.6.1), or a corked segment.
    Persist = 4,
}

macro_rules! numbered {
    ($type:ident: $($variant:ident),*) => {
        impl Field for $type {
            fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
                (*self as u8).write(out)
            }

            fn read(input: &mut Reader<'_>) -> Result<Self, ImageError> {
                let number = u8::read(input)?;
                [$($type::$variant),*].into_iter().find(|variant| *variant as u8 == number).ok_or(ImageError::Value)
            }
        }
    };
}
numbered!(Phase: Open, Disorder, Reduced, Recovery, Loss);
numbered!(SendTimer: Off, Retransmit, TailLoss, Reordering, Persist);

/// The sending side, without the segments in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sending {
    /// Sequence number behind the last segment that was shorter than the maximum (Minshall's variant of Nagle).
    pub small_end: u32,
    /// The next data carries CWR (RFC 3168).
    pub cwr_pending: bool,
    /// A window or keep-alive probe is to be sent.
    pub probe_due: bool,
    /// One segment may leave although nothing else allows it.
    pub forced: bool,
}
fields!(Sending { small_end, cwr_pending, probe_due, forced });

/// The receiving side.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Receiving {
    /// The peer's initial sequence number; 0 if unknown.
    pub peer_isn: u32,
    /// Bytes received since the last acknowledgement was sent.
    pub unacked: u32,
    /// Acknowledgement number of the last segment sent.
    pub last_ack: u32,
    /// 0 while the program answers what comes; else one more than the segments that are still acknowledged at once; 255
    /// for all.
    pub quick_acks: u8,
    /// TS.Recent is known, so that older timestamps are refused (RFC 7323 section 5).
    pub ts_known: bool,
    /// Microseconds since the last acceptable segment.
    pub silent_for: u64,
    /// An acknowledgement is to be sent at once.
    pub ack_due: bool,
    /// Congestion was experienced: echoed until the peer sends CWR (RFC 3168).
    pub echo: bool,
    /// A duplicate to be reported (RFC 2883).
    pub duplicate: Option<(u32, u32)>,
    /// Left edges of the out-of-order ranges that grew last, newest first (RFC 2018 section 4). The ranges go beside
    /// the image.
    pub recent: [u32; 4],
    /// Microseconds until a challenge acknowledgement (RFC 5961) may be sent again.
    pub challenge_in: u32,
}
fields!(Receiving {
    peer_isn,
    unacked,
    last_ack,
    quick_acks,
    ts_known,
    silent_for,
    ack_due,
    echo,
    duplicate,
    recent,
    challenge_in,
});

impl Receiving {
    /// Adapts the state after a stay in the kernel, which has acknowledged the bytes that it received up to `rcv_nxt`.
    /// An acknowledgement is due, since the kernel's last one may have been delayed, and to announce our window to the
    /// peer. If the kernel has received segments, it has seen timestamps that it does not show: compared with those the
    /// NIC's last one would count as no older, and after weeks as newer.
    pub(crate) fn take_from_kernel(&mut self, received: bool, rcv_nxt: u32) {
        self.ack_due = true;
        if received {
            self.ts_known = false;
            (self.unacked, self.last_ack, self.duplicate, self.silent_for) = (0, rcv_nxt, None, 0);
        }
    }
}

/// Timers: microseconds that are left, `None` for a timer that does not run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Timers {
    /// What the sending side's timer stands for.
    pub send: SendTimer,
    /// The sending side's timer.
    pub send_in: Option<u32>,
    /// Delayed acknowledgement.
    pub ack_in: Option<u32>,
    /// Keep-alive.
    pub keepalive_in: Option<u64>,
    /// The end of TIME-WAIT.
    pub time_wait_in: Option<u32>,
    /// Microseconds since the oldest unanswered probe or retransmission was sent.
    pub unanswered_for: Option<u64>,
    /// Keep-alive or window probes without an answer.
    pub probes: u8,
}
impl Timers {
    /// The keep-alive timer is computed again from the peer's silence and the number of probes, since the kernel ran
    /// its own meanwhile. Other probes continue.
    pub(crate) fn take_from_kernel(&mut self, nothing_in_flight: bool, probes: u8) {
        (self.keepalive_in, self.probes) = (None, probes);
        if nothing_in_flight && self.send != SendTimer::Persist {
            self.unanswered_for = None;
        }
    }
}
fields!(Timers { send, send_in, ack_in, keepalive_in, time_wait_in, unanswered_for, probes });

/// Congestion control (RFC 9438) and round-trip times. Windows with a fraction are segments · 1024.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Congestion {
    /// W_max, with a fraction.
    pub w_max: u32,
    /// Microseconds since the epoch began; `None` between a reduction and the first growth.
    pub epoch_age: Option<u64>,
    /// K in milliseconds.
    pub k: u32,
    /// The plateau of W_cubic in this epoch, with a fraction.
    pub origin: u32,
    /// W_est, with a fraction.
    pub w_est: u32,
    /// Growth that is not a whole segment yet, in 1/1024 segments.
    pub credit: u16,
    /// HyStart: smallest round-trip time of this round.
    pub round_min: u32,
    /// HyStart: smallest round-trip time of data.
    pub delay_min: u32,
    /// HyStart: samples of this round.
    pub round_samples: u8,
    /// HyStart: the sequence number whose acknowledgement ends the round.
    pub round_end: u32,
    /// Microseconds since the smallest round-trip time was measured.
    pub min_rtt_age: u32,
    /// Doublings of the time-out since the last progress.
    pub backoff: u8,
}
fields!(Congestion {
    w_max,
    epoch_age,
    k,
    origin,
    w_est,
    credit,
    round_min,
    delay_min,
    round_samples,
    round_end,
    min_rtt_age,
    backoff,
});

/// Loss recovery (RFC 8985, 6937, 5682, 3522).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Recovery {
    /// The congestion state.
    pub phase: Phase,
    /// The phase ends when this sequence number is acknowledged.
    pub high_seq: u32,
    /// Window and threshold, in segments, to return to if the reduction proves spurious.
    pub undo: Option<(u32, u32)>,
    /// Retransmissions that no duplicate report has covered.
    pub undo_retransmits: u32,
    /// There was a retransmission since the reduction.
    pub undo_counted: bool,
    /// The peer's latest echo of our timestamp clock.
    pub last_echo: Option<u32>,
    /// Our timestamp clock when the first retransmission left.
    pub first_retransmit: Option<u32>,
    /// The window before the reduction, in segments.
    pub prior_cwnd: u32,
    /// Segments delivered since the reduction.
    pub prr_delivered: u32,
    /// Segments sent since the reduction.
    pub prr_out: u32,
    /// Forward RTO-recovery is being tried.
    pub forward_rto: bool,
    /// By how many segments the network was seen to reorder.
    pub reordering: u32,
    /// The reordering window in quarters of the smallest round-trip time.
    pub reorder_steps: u8,
    /// Recoveries for which that is kept.
    pub reorder_persist: u8,
    /// The sequence number whose acknowledgement ends the round trip in which the window grew last.
    pub reorder_round: Option<u32>,
    /// End of a tail loss probe in flight, and whether it was a retransmission.
    pub probe: Option<(u32, bool)>,
    /// The last segment is to be retransmitted as a probe.
    pub tail_probe_pending: bool,
    /// Duplicate acknowledgements of a peer without SACK.
    pub duplicates: u32,
    /// The congestion window was the limit in this round trip.
    pub limited: bool,
    /// The most segments out in this round trip.
    pub most_out: u32,
    /// The sequence number whose acknowledgement ends this round trip.
    pub usage_end: u32,
    /// Segments retransmitted so far.
    pub retransmissions: u32,
    /// Segments delivered so far.
    pub delivered: u32,
    /// Microseconds since data was last sent; `None` for never.
    pub sent_age: Option<u64>,
}
fields!(Recovery {
    phase,
    high_seq,
    undo,
    undo_retransmits,
    undo_counted,
    last_echo,
    first_retransmit,
    prior_cwnd,
    prr_delivered,
    prr_out,
    forward_rto,
    reordering,
    reorder_steps,
    reorder_persist,
    reorder_round,
    probe,
    tail_probe_pending,
    duplicates,
    limited,
    most_out,
    usage_end,
    retransmissions,
    delivered,
    sent_age,
});

/// The newest segment known to be delivered, by time of sending (RFC 8985 section 6.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Newest {
    /// Microseconds since it was sent.
    pub age: u32,
    /// Sequence number behind it.
    pub end: u32,
    /// Its round-trip time in microseconds.
    pub rtt: u32,
}
fields!(Newest { age, end, rtt });

/// Consecutive segments in flight with the same state. All have the same length, but the last may be shorter, and may
/// carry the FIN beside its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Run {
    /// Sequence numbers of all of them; a FIN counts.
    pub length: u32,
    /// Bytes of each; 1 for a FIN alone.
    pub segment: u16,
    /// Microseconds since they were sent or retransmitted.
    pub age: u32,
    /// [`SACKED`] and the others.
    pub fate: u8,
}
fields!(Run { length, segment, age, fate });

impl Run {
    /// Whether the last segment is a full one, and without FIN.
    fn ends_full(&self) -> bool {
        self.length.is_multiple_of(u32::from(self.segment.max(1)))
    }
}

/// The sent bytes that are not acknowledged cumulatively, oldest first, as runs. If there are too many runs, the last
/// one stands for all remaining bytes, as sent last and neither SACKed nor lost: that is safe, since a peer may
/// withdraw a SACK anyway, and losses are detected again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flight {
    count: u8,
    runs: [Run; MOST_RUNS],
}

impl Flight {
    /// The runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs[..usize::from(self.count)]
    }

    /// Appends a segment of `data` bytes, and a FIN if `fin`, sent `age` microseconds ago.
    pub fn push(&mut self, data: u16, fin: bool, age: u32, fate: u8) {
        let length = u32::from(data) + u32::from(fin);
        let count = usize::from(self.count);
        if let Some(last) = self.runs[..count].last_mut() {
            let alike = last.ends_full() && (last.age, last.fate) == (age, fate);
            if alike && data > 0 && data <= last.segment {
                last.length += length;
                return;
            }
            if count == MOST_RUNS {
                let segment = last.segment.max(data);
                *last = Run { length: last.length + length, segment, age: last.age.min(age), fate: EVER | UNTIMED };
                return;
            }
        }
        self.runs[count] = Run { length, segment: data.max(1), age, fate };
        self.count += 1;
    }

    /// Marks the last segment as retransmitted: its run gives no round-trip sample.
    pub(crate) fn sent_again_last(&mut self) {
        if let Some(last) = self.runs[..usize::from(self.count)].last_mut() {
            last.fate |= EVER;
        }
    }

    /// Checks that the runs are exactly the `in_flight` sequence numbers of the image, in segments of which there are
    /// not too many.
    fn check(&self, in_flight: u32) -> Result<(), ImageError> {
        let fail = |what| Err(ImageError::Inconsistent(what));
        let mut segments = 0u64;
        for run in self.runs() {
            let counted = run.fate & SACKED != 0 && run.fate & (LOST | RETRANSMITTED) != 0;
            let known = run.fate & !(SACKED | LOST | RETRANSMITTED | EVER | PUSHED | UNTIMED) == 0;
            if run.length == 0 || run.segment == 0 || run.segment == u16::MAX || counted || !known {
                return fail("a run of segments in flight");
            }
            segments += u64::from(run.length.div_ceil(u32::from(run.segment)));
        }
        let length: u64 = self.runs().iter().map(|run| u64::from(run.length)).sum();
        if length != u64::from(in_flight) {
            return fail("the segments in flight do not fill [snd_una, snd_nxt]");
        }
        if segments > u64::from(in_flight / LEAST_SEGMENT + MOST_SMALL) {
            return fail("too many segments in flight");
        }
        Ok(())
    }
}

impl Field for Flight {
    fn write(&self, out: &mut Writer<'_>) -> Result<(), ImageError> {
        self.count.write(out)?;
        self.runs().iter().try_for_each(|run| run.write(out))
    }

    fn read(input: &mut Reader<'_>) -> Result<Self, ImageError> {
        let mut flight = Flight { count: u8::read(input)?, ..Flight::default() };
        let runs = flight.runs.get_mut(..usize::from(flight.count)).ok_or(ImageError::Value)?;
        for run in runs {
            *run = Run::read(input)?;
        }
        Ok(flight)
    }
}

/// The state of a connection that only a NIC's TCP has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NicState {
    /// The sending side.
    pub sending: Sending,
    /// The receiving side.
    pub receiving: Receiving,
    /// Timers.
    pub timers: Timers,
    /// Congestion control.
    pub congestion: Congestion,
    /// Loss recovery.
    pub recovery: Recovery,
    /// The newest segment known to be delivered.
    pub newest: Option<Newest>,
    /// The segments in flight; empty if the connection has ended.
    pub flight: Flight,
}
fields!(NicState { sending, receiving, timers, congestion, recovery, newest, flight });

impl NicState {
    /// Advances every age and every remaining time by `micros`.
    pub(crate) fn age(&mut self, micros: u64) {
        let short = u32::try_from(micros).unwrap_or(u32::MAX);
        let older = |age: &mut u32| *age = age.saturating_add(short);
        let nearer = |left: &mut u32| *left = left.saturating_sub(short);
        let Timers { send: _, send_in, ack_in, keepalive_in, time_wait_in, unanswered_for, probes: _ } = &mut self.timers;
        [send_in, ack_in, time_wait_in].into_iter().flatten().for_each(nearer);
        keepalive_in.iter_mut().for_each(|left| *left = left.saturating_sub(micros));
        nearer(&mut self.receiving.challenge_in);
        let long = [&mut self.congestion.epoch_age, &mut self.recovery.sent_age, unanswered_for];
        long.into_iter().flatten().chain([&mut self.receiving.silent_for]).for_each(|age| *age = age.saturating_add(micros));
        older(&mut self.congestion.min_rtt_age);
        self.newest.iter_mut().for_each(|newest| older(&mut newest.age));
        self.flight.runs[..usize::from(self.flight.count)].iter_mut().for_each(|run| older(&mut run.age));
    }

    /// Checks that the segments in flight are those of the image; the other numbers are bounded by the image's fields.
    pub(crate) fn check(&self, image: &Image) -> Result<(), ImageError> {
        let ended = image.state == crate::State::Closed;
        self.flight.check(if ended { 0 } else { image.snd_nxt.wrapping_sub(image.snd_una) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::sample;
    use crate::{MAX_ENCODED, State};

    fn run(length: u32, segment: u16, fate: u8) -> Run {
        Run { length, segment, age: 7, fate }
    }

    fn flight(runs: &[Run]) -> Flight {
        let mut flight = Flight { count: runs.len() as u8, ..Flight::default() };
        flight.runs[..runs.len()].copy_from_slice(runs);
        flight
    }

    /// As many runs as there are, and every optional field present: the longest encoding.
    fn longest(bytes: u32) -> NicState {
        let mut runs = [run(1, 1, PUSHED); MOST_RUNS];
        runs[0].length = bytes - (MOST_RUNS as u32 - 1);
        NicState {
            receiving: Receiving { duplicate: Some((1, 2)), recent: [1, 2, 3, 4], ..Receiving::default() },
            timers: Timers {
                send: SendTimer::Reordering,
                send_in: Some(1),
                ack_in: Some(2),
                keepalive_in: Some(3),
                time_wait_in: Some(4),
                unanswered_for: Some(5),
                probes: 6,
            },
            congestion: Congestion { epoch_age: Some(1 << 40), ..Congestion::default() },
            recovery: Recovery {
                phase: Phase::Loss,
                undo: Some((1, 2)),
                last_echo: Some(3),
                first_retransmit: Some(4),
                reorder_round: Some(5),
                probe: Some((6, true)),
                sent_age: Some(7),
                ..Recovery::default()
            },
            newest: Some(Newest { age: 1, end: 2, rtt: 3 }),
            flight: flight(&runs),
            ..NicState::default()
        }
    }

    #[test]
    fn the_longest_state_survives_its_encoding() {
        let (image, mut bytes) = (sample(), [0u8; MAX_ENCODED]);
        let state = longest(image.snd_nxt.wrapping_sub(image.snd_una).max(MOST_RUNS as u32));
        let image = Image { snd_nxt: image.snd_una.wrapping_add(MOST_RUNS as u32), ..image };
        let length = image.encode_with(Some(&state), &mut bytes).expect("room for it");
        assert_eq!(Image::decode_with(&bytes[..length]), Ok((image, Some(state))));
        assert_eq!(Image::decode(&bytes[..length]), Ok(image), "a host reads the image alone");
        for at in 0..length {
            let mut damaged = bytes;
            damaged[at] ^= 0x41;
            assert!(Image::decode_with(&damaged[..length]).is_err(), "byte {at}");
        }
        let short = image.encode(&mut bytes).expect("room for it");
        assert_eq!(Image::decode_with(&bytes[..short]), Ok((image, None)));
        assert!(short + 400 < length, "nobody pays for what is not there: {short} and {length} bytes");
    }

    #[test]
    fn alike_segments_share_a_run() {
        let mut flight = Flight::default();
        for at in 0..10 {
            flight.push(1000, false, 50, if at < 4 { LOST } else { 0 });
        }
        flight.push(300, false, 50, 0);
        flight.push(1000, false, 50, 0);
        flight.push(1000, true, 50, 0);
        let run = |length, fate| Run { length, segment: 1000, age: 50, fate };
        assert_eq!(flight.runs(), [run(4000, LOST), run(6300, 0), run(2001, 0)]);
        flight.push(0, true, 50, 0);
        assert_eq!(flight.runs()[3], Run { length: 1, segment: 1, age: 50, fate: 0 }, "a FIN alone joins no data");
    }

    /// Segments that have no room in the runs count as neither SACKed nor lost, and as sent last.
    #[test]
    fn the_last_run_stands_for_the_rest() {
        let mut flight = Flight::default();
        for at in 0..100u32 {
            flight.push(100 + at as u16, false, 1000 - at, if at % 2 == 0 { SACKED } else { LOST });
        }
        assert_eq!(flight.runs().len(), MOST_RUNS);
        let all: u32 = (0..100).map(|at| 100 + at).sum();
        assert_eq!(flight.check(all), Ok(()));
        let (exact, rest) = flight.runs().split_at(MOST_RUNS - 1);
        assert!(exact.iter().enumerate().all(|(at, run)| run.length == 100 + at as u32 && run.fate & (SACKED | LOST) != 0));
        assert_eq!((rest[0].segment, rest[0].age, rest[0].fate), (199, 901, EVER | UNTIMED));
    }

    #[test]
    fn a_flight_that_is_not_the_images_is_refused() {
        let refused = [
            (flight(&[]), 10),
            (flight(&[run(9, 3, 0)]), 10),
            (flight(&[run(11, 3, 0)]), 10),
            (flight(&[run(10, 0, 0)]), 10),
            (flight(&[run(10, 3, 0), run(0, 3, 0)]), 10),
            (flight(&[run(10, u16::MAX, 0)]), 10),
            (flight(&[run(10, 3, SACKED | LOST)]), 10),
            (flight(&[run(10, 3, 64)]), 10),
            // The sum wraps.
            (flight(&[run(u32::MAX, 60_000, 0), run(11, 3, 0)]), 10),
            // A record per byte.
            (flight(&[run(1 << 28, 1, 0)]), 1 << 28),
        ];
        for (flight, in_flight) in refused {
            assert!(flight.check(in_flight).is_err(), "{flight:?}");
        }
        assert_eq!(flight(&[run(10, 3, SACKED)]).check(10), Ok(()));
        // A connection that has ended has nothing in flight.
        let ended = Image { state: State::Closed, ..sample() };
        let state = NicState { flight: flight(&[run(16, 3, 0)]), ..NicState::default() };
        assert!(state.check(&ended).is_err());
        assert_eq!(state.check(&sample()), Ok(()));
    }
}
