//! Loss detection and recovery: RACK-TLP (RFC 8985), proportional rate reduction (RFC 6937), and undoing spurious
//! recoveries (RFC 2883 with 3708, RFC 3522, RFC 5682), in Linux's phases.

use crate::congestion::{MOST_WINDOW, threshold, window};
use crate::connection::{Connection, Due, State};
use crate::scoreboard::Sample;
use crate::seq::{at_or_before, before};
use crate::time::Instant;
use crate::timers::SendTimer;
use baton_image::nic;

/// Duplicate acknowledgements that mean loss while no reordering was seen (RFC 5681).
pub(crate) const DUPLICATE_THRESHOLD: u32 = 3;
/// Reordering by more segments is not believed (Linux's tcp_max_reordering).
const MOST_REORDERING: u32 = 300;

/// Most steps by which RACK's reordering window grows, and recoveries for which it stays grown (RFC 8985 section 6.2,
/// step 4).
const MOST_STEPS: u32 = 255;
const RECOVERIES_KEPT: u32 = 16;
/// Segments that an image may count since a reduction.
const MOST_COUNTED: u32 = 1 << 24;

pub(crate) use baton_image::nic::Phase;

#[derive(Clone, Debug, Default)]
pub(crate) struct Recovery {
    pub phase: Phase,
    /// The phase ends when this is acknowledged.
    pub high_seq: u32,
    /// Undo is possible: the window before, the threshold before.
    undo: Option<(u32, u32)>,
    /// Retransmissions that no duplicate report has covered; undo when it reaches 0.
    undo_retransmits: u32,
    undo_counted: bool,
    /// The peer's latest echo of our timestamp clock.
    pub last_echo: Option<u32>,
    /// Our timestamp clock when the first retransmission left (Eifel, RFC 3522).
    first_retransmit: Option<u32>,
    prior_cwnd: u32,
    prr_delivered: u32,
    prr_out: u32,
    /// Forward RTO-recovery (RFC 5682) is being tried.
    forward_rto: bool,
    pub reordering_seen: bool,
    /// By how many segments the network was seen to reorder, 0 for never.
    pub reordering: u32,
    /// RACK's reordering window in quarters of the smallest round-trip time, and how many recoveries it is kept for.
    reorder_steps: u32,
    reorder_persist: u32,
    reorder_round: Option<u32>,
    /// End of a tail loss probe that is in flight, and whether it was a retransmission.
    probe: Option<(u32, bool)>,
    /// The last segment goes out again as a probe.
    pub tail_probe_pending: bool,
    /// Duplicate acknowledgements of a peer without SACK.
    duplicates: u32,
    /// How well the window was used in the round trip that ends with `usage_end`: whether it was the limit, and the
    /// most segments out.
    limited: bool,
    most_out: u32,
    usage_end: u32,
    pub retransmissions: u64,
    /// Segments acknowledged or SACKed so far, the SYN counted.
    pub delivered: u32,
    pub last_sent: Instant,
}

impl Recovery {
    /// Begins anew after the handshake: losses during the handshake say nothing about the data that follows.
    pub fn begin(&mut self, acknowledged: u32) {
        self.phase = Phase::Open;
        self.high_seq = acknowledged;
        self.undo = None;
        self.forward_rto = false;
    }

    /// Whether a tail loss probe is in flight, or about to be sent.
    pub fn probes(&self) -> bool {
        self.probe.is_some() || self.tail_probe_pending
    }

    /// Microseconds since data was last sent; `None` for never.
    pub fn sent_age(&self, now: Instant) -> Option<u64> {
        (self.last_sent != Instant(0)).then(|| now.since(self.last_sent))
    }

    /// The state for an image, beside the image's own fields.
    pub fn to_image(&self, now: Instant) -> nic::Recovery {
        let Recovery {
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
            reordering_seen: _,
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
            last_sent: _,
        } = *self;
        nic::Recovery {
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
            reorder_steps: reorder_steps.min(MOST_STEPS) as u8,
            reorder_persist: reorder_persist.min(RECOVERIES_KEPT) as u8,
            reorder_round,
            probe,
            tail_probe_pending,
            duplicates,
            limited,
            most_out,
            usage_end,
            retransmissions: u32::try_from(retransmissions).unwrap_or(u32::MAX),
            delivered,
            sent_age: self.sent_age(now),
        }
    }

    /// Takes the state from an image, as far as it is possible: `within` bounds sequence numbers to those in flight, of
    /// `out` segments.
    pub fn from_image(
        image: &nic::Recovery,
        reordering_seen: bool,
        out: u32,
        within: impl Fn(u32) -> u32,
        now: Instant,
    ) -> Recovery {
        let nic::Recovery {
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
        } = *image;
        Recovery {
            phase,
            high_seq: within(high_seq),
            undo: undo.map(|(cwnd, ssthresh)| (window(cwnd), threshold(ssthresh))),
            undo_retransmits: undo_retransmits.min(MOST_COUNTED),
            undo_counted,
            last_echo,
            first_retransmit,
            prior_cwnd: prior_cwnd.min(MOST_WINDOW),
            prr_delivered: prr_delivered.min(MOST_COUNTED),
            prr_out: prr_out.min(MOST_COUNTED),
            forward_rto,
            reordering_seen,
            reordering: reordering.min(MOST_REORDERING),
            reorder_steps: reorder_steps.into(),
            reorder_persist: reorder_persist.into(),
            reorder_round: reorder_round.map(&within),
            probe: probe.map(|(end, again)| (within(end), again)),
            tail_probe_pending: tail_probe_pending && out > 0,
            duplicates: duplicates.min(out),
            limited,
            most_out: most_out.min(MOST_WINDOW),
            usage_end: within(usage_end),
            retransmissions: retransmissions.into(),
            delivered,
            last_sent: sent_age.map_or(Instant(0), |age| now.ago(age)),
        }
    }
}

impl Connection {
    /// Segments in the network. Without SACK each duplicate acknowledgement says that one segment has left the network
    /// (RFC 5681 section
    /// 3.2, RFC 3042).
    pub(crate) fn in_flight(&self) -> u32 {
        self.scoreboard.in_flight().saturating_sub(self.recovery.duplicates)
    }

    pub(crate) fn reducing(&self) -> bool {
        matches!(self.recovery.phase, Phase::Reduced | Phase::Recovery)
    }

    /// Runs the state machine after an acknowledgement.
    pub(crate) fn advance_recovery(&mut self, sample: &Sample, advanced: bool, now: Instant) {
        self.note_reordering(sample);
        self.check_probe(sample, advanced);
        if self.recovery.phase != Phase::Open && at_or_before(self.recovery.high_seq, self.send.una) && advanced {
            self.leave_phase();
        }
        if !self.agreed.sack {
            self.count_duplicate(sample, advanced);
        }
        self.try_undo(sample, advanced);
        let (newly_lost, wait) = self.detect(now);
        let losing = self.scoreboard.lost > 0;
        match self.recovery.phase {
            Phase::Recovery | Phase::Loss => {}
            Phase::Open | Phase::Disorder | Phase::Reduced if losing => self.enter_recovery(),
            Phase::Open if self.scoreboard.sacked > 0 => self.enter_disorder(),
            Phase::Disorder if self.scoreboard.sacked == 0 => self.recovery.phase = Phase::Open,
            _ => {}
        }
        if self.reducing() {
            self.proportional_rate(sample, newly_lost, advanced);
        } else if sample.delivered > 0 && (advanced || self.recovery.reordering_seen) {
            self.grow(sample, now);
        }
        if let Some(wait) = wait {
            self.arm(SendTimer::Reordering, now.after(wait.max(1)));
        }
    }

    /// Data has left, or could not for the congestion window's sake.
    pub(crate) fn note_usage(&mut self, limited: bool) {
        let out = self.scoreboard.len();
        let r = &mut self.recovery;
        if limited || !before(self.send.una, r.usage_end) || !r.limited && out > r.most_out {
            r.limited = limited;
            r.most_out = out;
            r.usage_end = self.send.nxt;
        }
    }

    fn grow(&mut self, sample: &Sample, now: Instant) {
        let r = &self.recovery;
        // RFC 7661 section 4.3, as Linux does it: in slow start half of the window in use is enough.
        if r.limited || self.congestion.in_slow_start() && self.congestion.cwnd < 2 * r.most_out {
            self.congestion.on_ack(sample.delivered, self.rtt.min, now);
        }
    }

    fn enter_disorder(&mut self) {
        self.recovery.phase = Phase::Disorder;
        self.recovery.high_seq = self.send.nxt;
    }

    fn note_reordering(&mut self, sample: &Sample) {
        let r = &mut self.recovery;
        r.reordering_seen |= sample.reordered;
        if sample.reordered {
            let segments = sample.reordered_by.div_ceil(self.send.mss);
            r.reordering = r.reordering.max(segments).min(MOST_REORDERING);
        }
        if sample.duplicate {
            // One step a round trip (RFC 8985 section 6.2, step 4).
            if r.reorder_round.is_none_or(|round| at_or_before(round, self.send.una)) {
                r.reorder_steps = (r.reorder_steps.max(1) + 1).min(MOST_STEPS);
                r.reorder_round = Some(self.send.nxt);
            }
            r.reordering_seen = true;
            r.reorder_persist = RECOVERIES_KEPT;
        }
    }

    fn reordering_window(&self) -> u64 {
        let r = &self.recovery;
        if !r.reordering_seen
            && (matches!(r.phase, Phase::Recovery | Phase::Loss) || self.scoreboard.sacked >= DUPLICATE_THRESHOLD)
        {
            return 0;
        }
        let quarter = u64::from(self.rtt.min / 4) * u64::from(r.reorder_steps.max(1));
        quarter.min(u64::from(self.rtt.smoothed))
    }

    fn detect(&mut self, now: Instant) -> (u32, Option<u64>) {
        if !self.agreed.sack {
            return (0, None);
        }
        // Only behind something that was delivered out of order, or after a retransmission, can there be a loss.
        if self.scoreboard.sacked == 0 && self.scoreboard.retransmitted == 0 {
            return (0, None);
        }
        let window = self.reordering_window();
        self.scoreboard.detect_loss(window, now)
    }

    pub(crate) fn on_reordering_timeout(&mut self, now: Instant) {
        let (newly_lost, wait) = self.detect(now);
        if newly_lost > 0 && !matches!(self.recovery.phase, Phase::Recovery | Phase::Loss) {
            self.enter_recovery();
            self.proportional_rate(&Sample::default(), newly_lost, false);
        }
        match wait {
            Some(wait) => self.arm(SendTimer::Reordering, now.after(wait.max(1))),
            None => self.rearm_retransmission(now),
        }
    }

    /// The retransmission timer counted from the oldest segment in flight, as after a probe or a reordering time-out.
    pub(crate) fn rearm_retransmission(&mut self, now: Instant) {
        match self.scoreboard.front() {
            Some(first) => {
                let at = first.sent_at.after(self.rtt.timeout()).max(now.after(1000));
                self.arm(SendTimer::Retransmit, at);
            }
            None => self.rearm_send_timer(now),
        }
    }

    /// Duplicate acknowledgements without SACK (RFC 5681 and 6582).
    fn count_duplicate(&mut self, sample: &Sample, advanced: bool) {
        if advanced {
            // One of those acknowledged filled the hole, the others had caused duplicates.
            let left = self.recovery.duplicates.saturating_sub(sample.delivered.saturating_sub(1));
            self.recovery.duplicates = left.min(self.scoreboard.len().saturating_sub(1));
            if self.recovery.phase == Phase::Recovery {
                self.scoreboard.mark_first_lost();
            }
        } else if sample.sacked == 0 && !self.scoreboard.is_empty() {
            self.recovery.duplicates += 1;
            if self.recovery.duplicates == DUPLICATE_THRESHOLD && self.recovery.phase != Phase::Recovery {
                self.scoreboard.mark_first_lost();
            }
        }
    }

    fn begin_undo(&mut self) {
        let r = &mut self.recovery;
        r.undo = Some((self.congestion.cwnd, self.congestion.ssthresh));
        r.undo_retransmits = self.scoreboard.retransmitted;
        r.undo_counted = self.scoreboard.retransmitted > 0;
        r.first_retransmit = None;
    }

    fn begin_reduction(&mut self, phase: Phase) {
        if !self.reducing() {
            self.begin_undo();
            let cwnd = self.congestion.cwnd;
            self.congestion.ssthresh = self.congestion.reduce();
            self.recovery.prior_cwnd = cwnd;
            self.recovery.prr_delivered = 0;
            self.recovery.prr_out = 0;
        }
        self.recovery.phase = phase;
        self.recovery.high_seq = self.send.nxt;
        self.send.cwr_pending = self.agreed.ecn;
    }

    fn enter_recovery(&mut self) {
        self.begin_reduction(Phase::Recovery);
    }

    /// ECN echo (RFC 3168 section 6.1.2), or a loss that a probe repaired: the window shrinks, nothing is
    /// retransmitted.
    pub(crate) fn enter_reduced(&mut self) {
        if matches!(self.recovery.phase, Phase::Open | Phase::Disorder) {
            self.begin_reduction(Phase::Reduced);
        }
    }

    /// RFC 6937 with Linux's slow start reduction bound.
    fn proportional_rate(&mut self, sample: &Sample, newly_lost: u32, advanced: bool) {
        let r = &mut self.recovery;
        if sample.delivered == 0 && newly_lost == 0 {
            return;
        }
        r.prr_delivered += sample.delivered;
        let in_flight = self.scoreboard.in_flight();
        let ssthresh = self.congestion.ssthresh;
        let send = if in_flight > ssthresh {
            let allowed = (u64::from(ssthresh) * u64::from(r.prr_delivered)).div_ceil(u64::from(r.prior_cwnd.max(1)));
            (allowed as u32).saturating_sub(r.prr_out)
        } else {
            let mut send = r.prr_delivered.saturating_sub(r.prr_out).max(sample.delivered);
            send += u32::from(advanced && newly_lost == 0);
            send.min(ssthresh - in_flight)
        };
        let send = send.max(u32::from(r.prr_out == 0));
        self.congestion.cwnd = in_flight + send;
    }

    pub(crate) fn count_sent_in_recovery(&mut self, segments: u32) {
        if self.reducing() {
            self.recovery.prr_out += segments;
        }
    }

    pub(crate) fn count_retransmission(&mut self, now: Instant) {
        let clock = self.ts_now(now);
        let r = &mut self.recovery;
        r.retransmissions += 1;
        r.undo_retransmits += 1;
        r.undo_counted = true;
        r.first_retransmit.get_or_insert(clock);
    }

    fn leave_phase(&mut self) {
        let phase = self.recovery.phase;
        if matches!(phase, Phase::Recovery | Phase::Reduced) && self.congestion.ssthresh < u32::MAX {
            self.congestion.cwnd = self.congestion.ssthresh;
        }
        if phase == Phase::Recovery && self.recovery.reorder_persist > 0 {
            self.recovery.reorder_persist -= 1;
            if self.recovery.reorder_persist == 0 {
                self.recovery.reorder_steps = 1;
            }
        }
        self.recovery.phase = Phase::Open;
        self.recovery.forward_rto = false;
    }

    /// Takes back a reduction that turned out to be for nothing.
    fn try_undo(&mut self, sample: &Sample, advanced: bool) {
        let Some((cwnd, ssthresh)) = self.recovery.undo else { return };
        let r = &self.recovery;
        let spurious_timeout = r.phase == Phase::Loss && r.forward_rto && sample.original_delivered;
        let all_duplicates = sample.duplicate && r.undo_counted && r.undo_retransmits == 0;
        let original_came = advanced && self.eifel_says_original();
        if !(spurious_timeout || all_duplicates || original_came) {
            return;
        }
        self.congestion.cwnd = self.congestion.cwnd.max(cwnd);
        self.congestion.ssthresh = self.congestion.ssthresh.max(ssthresh);
        self.scoreboard.forget_losses();
        self.recovery.undo = None;
        self.recovery.forward_rto = false;
        if self.recovery.phase != Phase::Open {
            self.recovery.phase = Phase::Open;
        }
        self.recovery.reordering_seen |= !spurious_timeout;
    }

    /// The peer echoes a timestamp from before the first retransmission: it answers the original (RFC 3522).
    fn eifel_says_original(&self) -> bool {
        match (self.recovery.first_retransmit, self.recovery.last_echo) {
            (Some(first), Some(echo)) => before(echo, first),
            _ => false,
        }
    }

    /// A duplicate of ours was reported: one retransmission was needless.
    pub(crate) fn count_duplicate_report(&mut self) {
        self.recovery.undo_retransmits = self.recovery.undo_retransmits.saturating_sub(1);
    }

    /// The retransmission time-out expired.
    pub(crate) fn enter_loss(&mut self) {
        let first_time = self.recovery.phase != Phase::Loss;
        if first_time {
            if !self.reducing() {
                self.begin_undo();
                self.congestion.ssthresh = self.congestion.reduce();
            }
            self.recovery.high_seq = self.send.nxt;
        }
        // The peer SACKed the data behind the first segment long ago and still lacks this segment, so it may have
        // dropped the SACKed data (RFC 2018 section 8).
        let forget = self.scoreboard.front().is_some_and(|first| first.flags & crate::scoreboard::SACKED != 0);
        self.scoreboard.mark_all_lost(forget);
        self.congestion.cwnd = self.scoreboard.in_flight() + 1;
        self.recovery.forward_rto = first_time;
        self.recovery.phase = Phase::Loss;
        self.recovery.probe = None;
    }

    /// How long until a tail loss probe, if one may be sent (RFC 8985 section 7.2).
    pub(crate) fn tail_loss_timeout(&self) -> Option<u64> {
        let wanted = self.agreed.sack
            && matches!(self.recovery.phase, Phase::Open | Phase::Reduced)
            && self.scoreboard.sacked == 0
            && self.recovery.probe.is_none()
            && self.rtt.smoothed > 0
            && self.rtt.backoff == 0
            && !matches!(self.state, State::SynSent | State::SynReceived);
        if !wanted {
            return None;
        }
        let delayed_ack = if self.scoreboard.len() == 1 { 200_000 } else { 2_000 };
        Some((2 * u64::from(self.rtt.smoothed) + delayed_ack).min(self.rtt.timeout()))
    }

    pub(crate) fn send_tail_loss_probe(&mut self, now: Instant) {
        let unsent = self.has_unsent() && before(self.send.nxt, self.send.una.wrapping_add(self.send.wnd));
        self.due |= Due::FORCE;
        self.recovery.probe = Some((self.send.nxt, !unsent));
        if !unsent {
            self.recovery.tail_probe_pending = true;
        }
        // RFC 8985 section 7.3: the retransmission time-out runs from the probe on.
        self.arm(SendTimer::Retransmit, now.after(self.rtt.timeout()));
    }

    /// Whether a tail loss probe has repaired a loss (RFC 8985 section 7.4).
    fn check_probe(&mut self, sample: &Sample, advanced: bool) {
        let Some((end, retransmitted)) = self.recovery.probe else { return };
        if !retransmitted {
            if advanced && at_or_before(end, self.send.una) {
                self.recovery.probe = None;
            }
            return;
        }
        if sample.duplicate {
            self.recovery.probe = None;
        } else if advanced && at_or_before(end, self.send.una) {
            self.recovery.probe = None;
            if !self.eifel_says_original() {
                self.enter_reduced();
                self.recovery.high_seq = self.send.una;
                self.leave_phase();
            }
        }
    }
}
