//! A connection's stay in the kernel, between a restore and the next offload. TCP_REPAIR neither accepts nor shows
//! congestion state and the state of segments in flight. So the agent keeps the state that the NIC wrote when it gave
//! the connection up, and completes the kernel's image with the parts that are still valid.

use crate::nic::{Receiving, SendTimer};
use crate::{Image, NicState, Silence, State};

/// The least part of a retransmission time-out that is added to the round-trip time, in microseconds (Linux's
/// TCP_RTO_MIN).
const LEAST_VARIATION: u64 = 200_000;

/// The NIC's state of a connection that was restored.
#[derive(Clone, Copy, Debug)]
pub struct Stay {
    /// The image with which the kernel's stay began.
    image: Image,
    nic: Option<NicState>,
    /// When the image was written, in microseconds of the caller's clock.
    since: u64,
}

impl Stay {
    /// Begins a stay at `since` (microseconds). `nic` is `None` if the NIC died: its record has less.
    pub fn new(image: Image, nic: Option<NicState>, since: u64) -> Stay {
        Stay { image, nic, since }
    }

    /// Whether the kernel has nothing to send when the stay begins: all sent bytes are acknowledged, all received bytes
    /// are acknowledged and read, and the advertised window is still valid.
    pub fn is_idle(&self) -> bool {
        let image = &self.image;
        let is_acknowledged = self.nic.is_some_and(|NicState { receiving, sending, .. }| {
            let Receiving { unacked, last_ack, ack_due, duplicate, .. } = receiving;
            !ack_due && !sending.probe_due && unacked == 0 && duplicate.is_none() && last_ack == image.rcv_nxt
        });
        is_acknowledged && image.state == State::Established && image.snd_una == image.snd_end && image.unread == 0
    }

    /// Completes an image that was `exported` from the kernel, and returns the NIC's own state if it is still valid,
    /// since nothing was sent and nothing acknowledged meanwhile. `retransmitted` is the number of segments that the
    /// kernel has retransmitted since it got the connection, `now` is in microseconds of the clock of [`Stay::new`].
    ///
    /// The congestion window and the round-trip times are taken from the NIC's state until the kernel has measured a
    /// round trip itself: it starts as after a handshake. TS.Recent, which the kernel does not show, is taken from the
    /// NIC's state, with its age, if nothing was received meanwhile; else PAWS starts again (RFC 7323 section 5.2).
    pub fn complete(&self, exported: &mut Image, retransmitted: u32, now: u64) -> Option<NicState> {
        self.add_silence(exported, now);
        let kept = if retransmitted == 0 && self.sent_nothing(exported) { self.nic } else { None };
        if kept.is_some() || exported.srtt == 0 && self.image.srtt != 0 {
            let Image { cwnd, ssthresh, srtt, rttvar, min_rtt, .. } = self.image;
            *exported = Image { cwnd, ssthresh, srtt, rttvar, min_rtt, ..*exported };
        }
        let mut state = kept?;
        if exported.ts_recent == 0 {
            exported.ts_recent = self.image.ts_recent;
        }
        exported.reordering_seen |= self.image.reordering_seen;
        state.age(now.saturating_sub(self.since));
        state.receiving.take_from_kernel(exported.rcv_nxt != self.image.rcv_nxt, exported.rcv_nxt);
        let Silence { unanswered_for, backoff, probes, heard_ago, received: _ } = exported.silence;
        state.congestion.backoff = backoff.max(state.congestion.backoff);
        state.receiving.silent_for = heard_ago;
        state.timers.unanswered_for = unanswered_for;
        if self.image.state.fin_queued() {
            state.flight.sent_again_last();
        }
        state.timers.take_from_kernel(state.flight.runs().is_empty(), probes);
        Some(state)
    }

    /// When the connection ends by TCP_USER_TIMEOUT if its peer stays silent, in microseconds of the clock of
    /// [`Stay::new`]. The kernel would end it seconds later: it starts counting at the import, and has measured no
    /// round trip yet.
    pub fn gives_up_at(&self) -> Option<u64> {
        let limit = u64::from(self.image.user_timeout) * 1000;
        self.unanswered_since().filter(|_| limit > 0).map(|since| since.saturating_add(limit))
    }

    /// When the first unanswered retransmission or probe was sent, or will be, if anything waits for the peer's answer.
    fn unanswered_since(&self) -> Option<u64> {
        let Image { snd_una, snd_nxt, snd_end, snd_wnd, srtt, rttvar, sent_ago, state, .. } = self.image;
        let waits = snd_nxt != snd_una || snd_wnd == 0 && snd_end != snd_una;
        if !waits || matches!(state, State::Closed | State::TimeWait) || state.fin_acknowledged() {
            return None;
        }
        let timers = self.nic.map(|nic| nic.timers).unwrap_or_default();
        if let Some(age) = self.silence().unanswered_for {
            return Some(self.since.saturating_sub(age));
        }
        let left = match (timers.send, timers.send_in) {
            (SendTimer::Retransmit | SendTimer::Persist, Some(left)) => u64::from(left),
            _ => {
                let time_out = u64::from(srtt) + (4 * u64::from(rttvar)).max(LEAST_VARIATION);
                time_out.saturating_sub(sent_ago.unwrap_or(0).into())
            }
        };
        Some(self.since + left)
    }

    /// How long the peer had been silent when the stay began. Without a NIC's state the image is one that was exported
    /// before: its move was undone.
    fn silence(&self) -> Silence {
        self.nic.map_or(self.image.silence, |nic| Silence {
            unanswered_for: nic.timers.unanswered_for,
            backoff: nic.congestion.backoff,
            probes: nic.timers.probes,
            heard_ago: nic.receiving.silent_for,
            received: 0,
        })
    }

    /// Adds the silence before the stay to the silence that the kernel shows, if the peer has still not answered.
    fn add_silence(&self, exported: &mut Image, now: u64) {
        let (was, silence, before) = (&self.image, &mut exported.silence, self.silence());
        // The first segment that the kernel received was the NIC's replay of the peer's last header.
        let heard = silence.received > 1 || exported.rcv_nxt != was.rcv_nxt;
        let still_waits = exported.snd_una == was.snd_una && (exported.snd_nxt != exported.snd_una || exported.snd_wnd == 0);
        if still_waits && let Some(ran) = self.unanswered_since().and_then(|since| now.checked_sub(since)) {
            silence.unanswered_for = silence.unanswered_for.max(Some(ran));
            silence.backoff = silence.backoff.max(before.backoff);
        }
        if !heard {
            silence.heard_ago = before.heard_ago.saturating_add(now.saturating_sub(self.since));
            silence.probes = silence.probes.saturating_add(before.probes);
        }
    }

    /// Whether the send queue's numbers are still the NIC's.
    fn sent_nothing(&self, exported: &Image) -> bool {
        let (was, is) = (&self.image, exported);
        let same_fin =
            (was.state.fin_queued(), was.state.fin_acknowledged()) == (is.state.fin_queued(), is.state.fin_acknowledged());
        same_fin && (was.snd_una, was.snd_nxt) == (is.snd_una, is.snd_nxt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::nic::{Congestion, EVER, Flight, Newest, Recovery, SendTimer, Sending, Timers};
    use crate::tests::sample;

    fn rested() -> (Image, NicState) {
        let image = Image { ts_recent: 5, cwnd: 33, ssthresh: 22, ..sample() };
        let mut flight = Flight::default();
        flight.push(10, false, 100, EVER);
        flight.push(6, false, u32::MAX - 10, 0);
        let state = NicState {
            flight,
            newest: Some(Newest { age: 50, end: 3, rtt: 900 }),
            congestion: Congestion { w_max: 77, epoch_age: Some(10), min_rtt_age: 20, ..Congestion::default() },
            recovery: Recovery { reordering: 5, sent_age: Some(100), ..Recovery::default() },
            receiving: Receiving { unacked: 7, last_ack: 70, duplicate: Some((1, 2)), quick_acks: 3, ..Receiving::default() },
            timers: Timers { send: SendTimer::Retransmit, send_in: Some(900), keepalive_in: Some(4), ..Timers::default() },
            ..NicState::default()
        };
        (image, state)
    }

    /// The kernel's export of a connection that was just imported from an image.
    fn exported(image: &Image) -> Image {
        let ts_clock = image.ts_clock.wrapping_add(2);
        Image { ts_recent: 0, ts_clock, cwnd: 10, ssthresh: u32::MAX, srtt: 0, rttvar: 0, min_rtt: 0, ..*image }
    }

    #[test]
    fn a_stay_in_which_nothing_happened_leaves_the_connection_as_it_was() {
        let (image, state) = rested();
        let mut shown = exported(&image);
        let kept = Stay::new(image, Some(state), 1000).complete(&mut shown, 0, 1400).expect("it holds");
        assert_eq!(shown, Image { ts_clock: image.ts_clock.wrapping_add(2), silence: shown.silence, ..image });
        assert_eq!((shown.silence.heard_ago, shown.silence.probes), (400, 0), "for a NIC that refuses it after all");
        let ages: [u32; 2] = core::array::from_fn(|at| kept.flight.runs()[at].age);
        assert_eq!(ages, [500, u32::MAX], "segments are as much older as the stay was long");
        assert_eq!((kept.newest.map(|newest| newest.age), kept.recovery.sent_age), (Some(450), Some(500)));
        assert_eq!((kept.congestion.epoch_age, kept.congestion.min_rtt_age), (Some(410), 420));
        assert_eq!((kept.congestion.w_max, kept.recovery.reordering), (77, 5));
        assert_eq!((kept.timers.send_in, kept.timers.keepalive_in), (Some(500), None));
        assert!(kept.receiving.ack_due, "the peer learns the window");
        assert_eq!(kept.check(&shown), Ok(()));
        let late = Stay::new(image, Some(state), 1000).complete(&mut exported(&image), 0, 9999).expect("it holds");
        assert_eq!(late.timers.send_in, Some(0), "a time-out that has passed is due");
    }

    #[test]
    fn an_idle_connection_has_nothing_to_say() {
        let image = Image { snd_nxt: 7, snd_una: 7, snd_end: 7, unread: 0, ..sample() };
        let (_, state) = rested();
        let receiving = Receiving { unacked: 0, last_ack: image.rcv_nxt, duplicate: None, ack_due: false, ..state.receiving };
        let state = NicState { receiving, sending: Sending::default(), ..state };
        let is_idle = |image: Image, receiving: Receiving| Stay::new(image, Some(NicState { receiving, ..state }), 0).is_idle();
        assert!(is_idle(image, receiving));
        for busy in [
            Image { snd_end: 8, ..image },
            Image { snd_una: 6, ..image },
            Image { unread: 1, ..image },
            Image { rcv_nxt: image.rcv_nxt.wrapping_add(1), ..image },
            Image { state: State::FinWait1, ..image },
        ] {
            assert!(!is_idle(busy, receiving), "{busy:?}");
        }
        for owing in [
            Receiving { unacked: 1, ..receiving },
            Receiving { ack_due: true, ..receiving },
            Receiving { duplicate: Some((1, 2)), ..receiving },
        ] {
            assert!(!is_idle(image, owing), "{owing:?}");
        }
        assert!(!Stay::new(image, None, 0).is_idle(), "nobody knows what a NIC that died has said");
    }

    #[test]
    fn what_the_kernel_sent_or_saw_acknowledged_ends_it() {
        let (image, state) = rested();
        let stay = Stay::new(image, Some(state), 0);
        let queued = |state| Image { state, ..image };
        let changed = [
            Image { snd_una: image.snd_una.wrapping_add(1), ..image },
            Image { snd_nxt: image.snd_nxt.wrapping_add(1), ..image },
            queued(State::FinWait1),
        ];
        for image in changed {
            let mut shown = exported(&image);
            assert_eq!(stay.complete(&mut shown, 0, 1), None);
            assert_eq!(
                (shown.cwnd, shown.srtt, shown.ts_recent),
                (33, 1000, 0),
                "the path is the NIC's as long as it is unmeasured"
            );
        }
        assert_eq!(stay.complete(&mut exported(&image), 1, 1), None, "sent again");
        let mut measured = Image { srtt: 55, cwnd: 12, snd_una: 0, ..exported(&image) };
        assert_eq!(stay.complete(&mut measured, 0, 1), None);
        assert_eq!((measured.cwnd, measured.srtt), (12, 55), "what the kernel has measured counts");
        assert_eq!(Stay::new(image, None, 0).complete(&mut exported(&image), 0, 1), None, "a NIC that died wrote nothing");
    }

    /// The kernel accepts no FIN in repair mode: it retransmits the FIN, whose acknowledgement then gives no round-trip
    /// sample (Karn).
    #[test]
    fn a_fin_in_flight_was_sent_again() {
        let (image, state) = rested();
        let fin = Image { state: State::FinWait1, ..image };
        let kept = Stay::new(fin, Some(state), 0).complete(&mut exported(&fin), 0, 1).expect("it holds");
        let fates: [u8; 2] = core::array::from_fn(|at| kept.flight.runs()[at].fate);
        assert_eq!((state.flight.runs()[1].fate, fates), (0, [EVER, EVER]));
    }

    /// The kernel counts silence from the import on: the silence before it is added, unless the peer has answered.
    #[test]
    fn silence_goes_on_over_a_stay() {
        let (image, state) = rested();
        let image = Image { user_timeout: 2000, ..image };
        let timers = Timers { unanswered_for: Some(700_000), probes: 2, ..state.timers };
        let receiving = Receiving { silent_for: 900_000, ..state.receiving };
        let stay = Stay::new(image, Some(NicState { timers, receiving, ..state }), 1_000_000);
        assert_eq!(stay.gives_up_at(), Some(2_300_000));
        // The kernel has retransmitted: the NIC's state of the segments is no longer valid, but the peer has still not
        // answered.
        let mut shown = Image { silence: Silence { probes: 1, ..Silence::default() }, ..exported(&image) };
        assert_eq!(stay.complete(&mut shown, 1, 1_500_000), None);
        let ran = Silence { unanswered_for: Some(1_200_000), probes: 3, heard_ago: 1_400_000, ..Silence::default() };
        assert_eq!(shown.silence, ran);
        let kept = stay.complete(&mut exported(&image), 0, 1_500_000).expect("it holds");
        assert_eq!((kept.timers.unanswered_for, kept.timers.probes, kept.receiving.silent_for), (Some(1_200_000), 2, 1_400_000));
        // A move that was undone after that: the time continues from its image.
        let undone = Image { silence: ran, ..image };
        let stay = Stay::new(undone, None, 1_500_000);
        assert_eq!(stay.gives_up_at(), Some(2_300_000));
        let mut shown = exported(&image);
        assert_eq!(stay.complete(&mut shown, 0, 1_600_000), None);
        let more = Silence { unanswered_for: Some(1_300_000), heard_ago: 1_500_000, ..ran };
        assert_eq!(shown.silence, more);
        // The peer has sent or acknowledged something: the silence starts again.
        let heard = Silence { heard_ago: 100, received: 2, ..Silence::default() };
        let mut shown = Image { silence: heard, snd_una: image.snd_una.wrapping_add(1), ..exported(&image) };
        assert_eq!(stay.complete(&mut shown, 1, 1_500_000), None);
        assert_eq!(shown.silence, heard);
        // Before the first time-out nothing has run; nothing is given up without a limit or without anything that
        // waits.
        let due = Timers { send: SendTimer::Retransmit, send_in: Some(900), ..Timers::default() };
        let gives_up_at = |image, timers| Stay::new(image, Some(NicState { timers, ..state }), 1_000_000).gives_up_at();
        assert_eq!(gives_up_at(image, due), Some(3_000_900));
        assert_eq!(gives_up_at(Image { user_timeout: 0, ..image }, due), None);
        assert_eq!(gives_up_at(Image { snd_nxt: image.snd_una, ..image }, due), None);
        let unknown = Image { srtt: 1000, rttvar: 100, sent_ago: Some(50_000), ..image };
        assert_eq!(Stay::new(unknown, None, 1_000_000).gives_up_at(), Some(3_151_000));
    }

    #[test]
    fn what_the_kernel_received_is_acknowledged_as_the_kernel_did() {
        let (image, state) = rested();
        let mut shown = exported(&Image { rcv_nxt: image.rcv_nxt.wrapping_add(100), ..image });
        let kept = Stay::new(image, Some(state), 0).complete(&mut shown, 0, 1).expect("nothing was sent");
        let receiving =
            Receiving { unacked: 0, last_ack: shown.rcv_nxt, duplicate: None, ack_due: true, silent_for: 0, ..state.receiving };
        assert_eq!(kept.receiving, receiving);
    }
}
