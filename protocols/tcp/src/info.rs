//! The data that a program can query about its connection: the TCP part of Linux's TCP_INFO.

use crate::connection::{Connection, State};
use crate::recovery::{DUPLICATE_THRESHOLD, Phase};
use crate::time::Instant;

/// Linux's congestion states, numbered as in TCP_INFO.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum CongestionPhase {
    /// Nothing unusual.
    Open = 0,
    /// Something arrived out of order.
    Disorder = 1,
    /// The window shrinks without a loss (ECN).
    Reduced = 2,
    /// Fast recovery.
    Recovery = 3,
    /// After a retransmission time-out.
    Loss = 4,
}

/// A view of a connection's state. Times are microseconds, amounts segments, unless a field says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Info {
    /// The connection's state.
    pub state: State,
    /// The state of congestion control.
    pub phase: CongestionPhase,
    /// Time-outs without progress.
    pub backoff: u8,
    /// Window or keep-alive probes without an answer.
    pub probes: u8,
    /// Timestamps were agreed on.
    pub timestamps: bool,
    /// SACK was agreed on.
    pub sack: bool,
    /// ECN was agreed on.
    pub ecn: bool,
    /// Shift of the peer's windows.
    pub snd_wscale: u8,
    /// Shift of our windows.
    pub rcv_wscale: u8,
    /// Retransmission time-out with its back-off.
    pub rto: u64,
    /// Bytes of payload in a full segment.
    pub snd_mss: u32,
    /// Segments sent and not acknowledged.
    pub unacked: u32,
    /// Of the segments in flight, the SACKed ones.
    pub sacked: u32,
    /// Of the segments in flight, the ones that count as lost.
    pub lost: u32,
    /// Retransmissions in flight.
    pub retrans: u32,
    /// Retransmissions in all.
    pub total_retrans: u64,
    /// Segments that the peer has acknowledged or SACKed, the SYN counted.
    pub delivered: u32,
    /// Smoothed round-trip time.
    pub srtt: u32,
    /// Variation of the round-trip time.
    pub rttvar: u32,
    /// Smallest round-trip time.
    pub min_rtt: u32,
    /// Slow start threshold.
    pub ssthresh: u32,
    /// Congestion window.
    pub cwnd: u32,
    /// By how many segments the network is known to reorder, at least the threshold of duplicates.
    pub reordering: u32,
    /// Bytes of the peer's window.
    pub snd_wnd: u32,
    /// When the last segment of the peer arrived.
    pub last_heard: Instant,
    /// When data was last sent, 0 for never.
    pub last_sent: Instant,
}

impl Connection {
    /// The connection as a program sees it with TCP_INFO.
    pub fn info(&self) -> Info {
        Info {
            state: self.state,
            phase: match self.recovery.phase {
                Phase::Open => CongestionPhase::Open,
                Phase::Disorder => CongestionPhase::Disorder,
                Phase::Reduced => CongestionPhase::Reduced,
                Phase::Recovery => CongestionPhase::Recovery,
                Phase::Loss => CongestionPhase::Loss,
            },
            backoff: self.rtt.backoff,
            probes: self.timers.probes,
            timestamps: self.agreed.timestamps,
            sack: self.agreed.sack,
            ecn: self.agreed.ecn,
            snd_wscale: self.send.wscale,
            rcv_wscale: self.receive.wscale,
            rto: self.rtt.timeout(),
            snd_mss: self.send.mss,
            unacked: self.scoreboard.len(),
            sacked: self.scoreboard.sacked,
            lost: self.scoreboard.lost,
            retrans: self.scoreboard.retransmitted,
            total_retrans: self.recovery.retransmissions,
            delivered: self.recovery.delivered,
            srtt: self.rtt.smoothed,
            rttvar: self.rtt.variation,
            min_rtt: self.rtt.min,
            ssthresh: self.congestion.ssthresh,
            cwnd: self.congestion.cwnd,
            reordering: self.recovery.reordering.max(DUPLICATE_THRESHOLD),
            snd_wnd: self.send.wnd,
            last_heard: self.receive.last_at,
            last_sent: self.recovery.last_sent,
        }
    }
}
