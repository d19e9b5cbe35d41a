//! The state of one connection, and the calls of its program.

use crate::congestion::Cubic;
use crate::open::Opening;
use crate::reassembly::Reassembly;
use crate::recovery::Recovery;
use crate::rtt::Rtt;
use crate::scoreboard::Scoreboard;
use crate::segment::Events;
use crate::seq::{before, left};
use crate::time::Instant;
use crate::timers::Timers;
use crate::tuning::Tuning;
use baton_wire::Fields;
use bitflags::bitflags;
use core::mem::offset_of;

/// Connection states (RFC 9293 section 3.3.2), numbered as in an image; LISTEN has no connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum State {
    /// Open both ways.
    #[default]
    Established = 1,
    /// Our SYN is out.
    SynSent = 2,
    /// A SYN came and ours is out.
    SynReceived = 3,
    /// We closed.
    FinWait1 = 4,
    /// Our FIN is acknowledged.
    FinWait2 = 5,
    /// Waiting out old segments.
    TimeWait = 6,
    /// Gone.
    Closed = 7,
    /// The peer closed.
    CloseWait = 8,
    /// The peer closed, then we did.
    LastAck = 9,
    /// Both closed at once.
    Closing = 11,
}

/// Why a connection ended early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EndReason {
    /// The peer sent a RST (ECONNRESET).
    Reset,
    /// The peer sent a RST in answer to our SYN (ECONNREFUSED).
    Refused,
    /// Retransmissions, probes or keep-alives went unanswered (ETIMEDOUT).
    TimedOut,
    /// The program aborted it.
    Aborted,
}

/// The settings of a host; the defaults are Linux's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Receive memory in bytes.
    pub receive_buffer: u32,
    /// Path MTU, bytes of IP packet.
    pub mtu: u32,
    /// Bytes of IP header.
    pub ip_header: u32,
    /// Disable Nagle's algorithm.
    pub nodelay: bool,
    /// Send keep-alive probes.
    pub keepalive: bool,
    /// Seconds before the first probe.
    pub keepalive_idle: u32,
    /// Seconds between probes.
    pub keepalive_interval: u32,
    /// Unanswered probes that end the connection.
    pub keepalive_count: u32,
    /// TCP_USER_TIMEOUT in milliseconds (RFC 5482), 0 for none.
    pub user_timeout: u32,
    /// Negotiate ECN (RFC 3168) when opening.
    pub ecn: bool,
    /// Bytes that receive memory may grow to: it decides the window scale (RFC 7323 section 2.3). 0 for
    /// `receive_buffer`.
    pub receive_limit: u32,
    /// Offer or accept timestamps (RFC 7323 section 3) when opening.
    pub timestamps: bool,
    /// Offer or accept selective acknowledgements (RFC 2018) when opening.
    pub sack: bool,
    /// Offer or accept window scaling (RFC 7323 section 2) when opening.
    pub window_scaling: bool,
    /// Largest segment in bytes that is sent and announced (TCP_MAXSEG), 0 for what the path MTU allows.
    pub max_segment: u32,
    /// Retransmissions of a SYN or SYN-ACK before the connection is given up (TCP_SYNCNT).
    pub syn_retries: u8,
    /// How long data is sent again without TCP_USER_TIMEOUT, and how often a closed window is probed (Linux's
    /// tcp_retries2).
    pub retries: u8,
    /// Wear the congestion window down while nothing is sent (RFC 2861; Linux's tcp_slow_start_after_idle).
    pub slow_start_after_idle: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            receive_buffer: 1 << 18,
            mtu: 1500,
            ip_header: 20,
            nodelay: false,
            keepalive: false,
            keepalive_idle: 7200,
            keepalive_interval: 75,
            keepalive_count: 9,
            user_timeout: 0,
            ecn: false,
            receive_limit: 0,
            timestamps: true,
            sack: true,
            window_scaling: true,
            max_segment: 0,
            syn_retries: 6,
            retries: 15,
            slow_start_after_idle: true,
        }
    }
}

/// Send sequence space (RFC 9293 section 3.3.1). From `mss` on it lies in the cache line of [`Connection::USUAL`].
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub(crate) struct Send {
    pub nxt: u32,
    /// Behind the last byte that the program has queued.
    pub end: u32,
    pub wnd: u32,
    pub max_wnd: u32,
    /// Behind the last segment shorter than the MSS (Minshall's variant of Nagle).
    pub small_end: u32,
    pub wscale: u8,
    pub fin_queued: bool,
    /// An ECN reaction was made: the next data carries CWR.
    pub cwr_pending: bool,
    /// Payload bytes of a full segment, options subtracted.
    pub mss: u32,
    /// In front of [`Receive::nxt`], so that both numbers of a predicted segment are compared at once.
    pub una: u32,
}

/// In place of [`Fields::control`]: no segment is predicted.
pub(crate) const NOT_PREDICTED: u32 = Fields::PSH;

/// Receive sequence space. Up to `last_at` it lies in the cache line of [`Connection::USUAL`].
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub(crate) struct Receive {
    pub nxt: u32,
    /// Right edge of the advertised window; never moves back.
    pub adv: u32,
    /// SND.WL1: sequence number of the segment that last updated the peer's window.
    pub wl1: u32,
    pub ts_recent: u32,
    /// First byte that the program has not read.
    pub read: u32,
    /// Bytes of receive memory.
    pub memory: u32,
    /// Bytes of receive memory that the window may use.
    pub capacity: u32,
    /// Bytes by which the window's edge moves at least: see [`Connection::set_window_step`].
    pub step: u32,
    /// Acknowledgement number of the last segment sent.
    pub last_ack: u32,
    /// Added to the time in milliseconds gives our timestamp clock.
    pub ts_offset: u32,
    /// [`Fields::control`] of a predicted segment, or [`NOT_PREDICTED`]: see [`Connection::enable_prediction`].
    pub predicted: u32,
    pub wscale: u8,
    /// [`INTERACTIVE`] or [`ONE_WAY`], or above that by how many segments are still acknowledged at once, as Linux does
    /// at the start; [`ALWAYS`] for all.
    pub quick_acks: u8,
    pub fin: bool,
    pub ts_known: bool,
    /// When the last acceptable segment came.
    pub last_at: Instant,
    /// Bytes received since the last acknowledgement went out.
    pub unacked: u32,
    /// Sequence number behind the last segment that ended a write of the peer's and was not acknowledged at once. One
    /// is not acknowledged yet if this is beyond `last_ack`.
    pub pushed: u32,
}

impl Receive {
    /// Whether a segment is acknowledged at once because it is one of the first. If so, counts it.
    #[inline(never)]
    pub fn takes_quick_ack(&mut self) -> bool {
        let takes = self.quick_acks > ONE_WAY;
        self.quick_acks -= u8::from(takes);
        takes
    }

    /// An acknowledgement was delayed in vain: the program does not answer.
    pub fn expect_no_answer(&mut self) {
        self.quick_acks = self.quick_acks.max(ONE_WAY);
    }
}

/// The program answers what comes, so acknowledgements may wait for its answers (Linux's ping-pong mode; RFC 9293
/// section 3.8.6.3).
pub(crate) const INTERACTIVE: u8 = 0;
/// The program does not answer what comes.
pub(crate) const ONE_WAY: u8 = 1;
/// Segments that are acknowledged at once at the start (Linux's TCP_MAX_QUICKACKS).
pub(crate) const QUICK_ACKS: u8 = 16;
/// As many quick acknowledgements as there are segments.
pub(crate) const ALWAYS: u8 = u8::MAX;

/// The options on which both ends have agreed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Agreed {
    /// The peer's MSS option.
    pub mss: u16,
    pub sack: bool,
    pub timestamps: bool,
    pub ecn: bool,
}

bitflags! {
    /// What has to be sent beside data, by itself or with the next segment.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub(crate) struct Due: u8 {
        /// An acknowledgement, at once.
        const ACK = 1;
        /// Congestion was experienced: echo that until the peer sends CWR.
        const ECHO = 2;
        /// A duplicate is to be reported (RFC 2883).
        const DUPLICATE = 4;
        /// A window or keep-alive probe.
        const PROBE = 8;
        /// A tail loss probe, or a corked or probing byte, may leave although nothing else allows it.
        const FORCE = 16;
        /// A RST.
        const RESET = 32;
    }
}

impl Due {
    /// Whether something was due; it no longer is.
    #[inline]
    pub fn take(&mut self, what: Due) -> bool {
        let was = self.contains(what);
        self.remove(what);
        was
    }
}

/// A TCP connection. The fields that ordinary segments need come first and fill three cache lines; a predicted segment
/// needs only the second of these ([`Connection::predict_data`]).
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub struct Connection {
    pub(crate) challenge_at: Instant,
    pub(crate) rtt: Rtt,
    pub(crate) agreed: Agreed,
    pub(crate) state: State,
    pub(crate) due: Due,
    pub(crate) send: Send,
    pub(crate) receive: Receive,
    pub(crate) timers: Timers,
    pub(crate) reassembly: Reassembly,
    pub(crate) cork: bool,
    /// See [`Connection::hold_back`].
    pub(crate) held: bool,
    /// See [`Connection::close`].
    pub(crate) orphan: bool,
    pub(crate) end_reason: Option<EndReason>,
    pub(crate) scoreboard: Scoreboard,
    pub(crate) config: Config,
    pub(crate) congestion: Cubic,
    pub(crate) recovery: Recovery,
    pub(crate) tuning: Tuning,
    pub(crate) opening: Opening,
}

const _: () = {
    assert!(offset_of!(Connection, send) + offset_of!(Send, mss) == Connection::USUAL.start);
    assert!(
        offset_of!(Connection, receive) + offset_of!(Receive, unacked) == Connection::USUAL.end,
        "what a predicted segment needs is one cache line"
    );
    assert!(offset_of!(Connection, receive) == offset_of!(Connection, send) + offset_of!(Send, una) + 4);
    assert!(offset_of!(Connection, reassembly) + Reassembly::HOT <= 192, "what others need, three");
};

/// TCP and option bytes that every segment of a connection with timestamps carries.
pub(crate) const TIMESTAMP_BYTES: u32 = 12;

impl Connection {
    /// The bytes that a predicted segment needs: a cache line.
    pub const USUAL: core::ops::Range<usize> = 64..128;

    pub(crate) fn new(config: Config, agreed: Agreed, now: Instant) -> Self {
        let mut connection = Connection {
            state: State::Closed,
            agreed,
            cork: false,
            held: false,
            orphan: false,
            send: Send::default(),
            receive: Receive {
                quick_acks: ONE_WAY + QUICK_ACKS,
                last_at: now,
                memory: config.receive_buffer,
                predicted: NOT_PREDICTED,
                ..Receive::default()
            },
            timers: Timers::default(),
            scoreboard: Scoreboard::default(),
            recovery: Recovery::default(),
            congestion: Cubic::new(),
            rtt: Rtt::default(),
            reassembly: Reassembly::default(),
            config,
            end_reason: None,
            due: Due::empty(),
            challenge_at: Instant(0),
            tuning: Tuning::default(),
            opening: Opening::default(),
        };
        connection.set_mtu(config.mtu);
        connection
    }

    /// Sets the path MTU (bytes of IP packet) from the route or from ICMP, and with it the segment size.
    pub fn set_mtu(&mut self, mtu: u32) {
        self.config.mtu = mtu;
        let room = mtu.saturating_sub(self.config.ip_header + 20);
        let options = if self.agreed.timestamps { TIMESTAMP_BYTES } else { 0 };
        let mss = u32::from(self.peer_mss());
        let mss = if self.config.max_segment == 0 { mss } else { mss.min(self.config.max_segment) };
        self.send.mss = room.min(mss).saturating_sub(options).max(36);
        self.set_window_step();
    }

    /// The peer's maximum segment size; the default if it sent no option (RFC 9293 MUST-15).
    pub(crate) fn peer_mss(&self) -> u16 {
        if self.agreed.mss == 0 { 536 } else { self.agreed.mss }
    }

    /// Limits the segments that are sent to `bytes` (TCP_MAXSEG), 0 for what the path MTU allows.
    pub fn set_max_segment(&mut self, bytes: u32) {
        self.config.max_segment = bytes;
        self.set_mtu(self.config.mtu);
    }

    /// The limit set by [`Connection::set_max_segment`] or the configuration.
    pub fn max_segment(&self) -> u32 {
        self.config.max_segment
    }

    /// The state.
    #[inline]
    pub fn state(&self) -> State {
        self.state
    }

    /// Why the connection ended early, if it did.
    pub fn end_reason(&self) -> Option<EndReason> {
        self.end_reason
    }

    /// Payload bytes of a full segment.
    pub fn segment_size(&self) -> u32 {
        self.send.mss
    }

    /// Oldest unacknowledged sequence number.
    #[inline]
    pub fn snd_una(&self) -> u32 {
        self.send.una
    }

    /// Next sequence number to send.
    #[inline]
    pub fn snd_nxt(&self) -> u32 {
        self.send.nxt
    }

    /// Sequence number behind the last queued byte.
    #[inline]
    pub fn snd_end(&self) -> u32 {
        self.send.end
    }

    /// Number of queued bytes that have not been sent.
    #[inline]
    pub fn unsent(&self) -> u32 {
        left(self.send.nxt, self.send.end)
    }

    /// Number of queued bytes that have not been acknowledged.
    #[inline]
    pub fn unacknowledged(&self) -> u32 {
        left(self.send.una, self.send.end)
    }

    /// Next sequence number expected.
    #[inline]
    pub fn rcv_nxt(&self) -> u32 {
        self.receive.nxt
    }

    /// Right edge of the advertised window.
    #[inline]
    pub fn rcv_adv(&self) -> u32 {
        self.receive.adv
    }

    /// First sequence number that the program has not read.
    #[inline]
    pub fn rcv_read(&self) -> u32 {
        self.receive.read
    }

    /// Whether a FIN from the peer came in order.
    #[inline]
    pub fn fin_received(&self) -> bool {
        self.receive.fin
    }

    /// Whether there are received bytes behind a hole.
    #[inline]
    pub fn has_out_of_order(&self) -> bool {
        !self.reassembly.is_empty()
    }

    /// Ranges received behind a hole, in order.
    pub fn out_of_order(&self) -> impl DoubleEndedIterator<Item = (u32, u32)> + ExactSizeIterator + '_ {
        self.reassembly.ranges()
    }

    /// Sequence number of a FIN that came behind a hole.
    pub fn fin_behind_hole(&self) -> Option<u32> {
        self.reassembly.fin_at().filter(|_| !self.receive.fin)
    }

    /// Segments retransmitted so far.
    pub fn retransmissions(&self) -> u64 {
        self.recovery.retransmissions
    }

    /// Congestion window in segments.
    pub fn cwnd(&self) -> u32 {
        self.congestion.cwnd
    }

    /// Queues `length` more bytes of send memory. Returns false when sending is closed.
    #[inline]
    pub fn queue(&mut self, length: u32) -> bool {
        if self.send.fin_queued || matches!(self.state, State::Closed | State::TimeWait) {
            return false;
        }
        self.send.end = self.send.end.wrapping_add(length);
        true
    }

    /// The program has read `length` bytes. Returns false, and does nothing, if there are not that many.
    #[inline]
    pub fn consumed(&mut self, length: u32) -> bool {
        if length > self.readable() {
            return false;
        }
        self.receive.read = self.receive.read.wrapping_add(length);
        self.after_read();
        true
    }

    /// Bytes in order and unread.
    #[inline]
    pub fn readable(&self) -> u32 {
        self.receive.nxt.wrapping_sub(u32::from(self.receive.fin)).wrapping_sub(self.receive.read)
    }

    /// The program closes its sending side: a FIN follows the queued bytes.
    pub fn shutdown(&mut self) {
        if self.send.fin_queued {
            return;
        }
        self.state = match self.state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            State::SynSent => State::Closed,
            // The state changes when our SYN is acknowledged (section 3.10.4, SYN-RECEIVED).
            other => other,
        };
        if self.state == State::Closed {
            self.stop_timers(Timers::default());
        }
        self.send.fin_queued = matches!(self.state, State::SynReceived | State::FinWait1 | State::LastAck);
    }

    /// The program closes the connection and gives it up. Does [`Connection::shutdown`]; in addition, from now on the
    /// connection waits only for a limited time for the peer's acknowledgements and for an open window (Linux's
    /// orphans, RFC 9293 section 3.8.6.1).
    pub fn close(&mut self) {
        self.set_cork(false);
        self.orphan = true;
        self.shutdown();
    }

    /// The program aborts: a RST goes out, the connection is gone.
    pub fn abort(&mut self) -> Events {
        let announce = !matches!(self.state, State::Closed | State::TimeWait | State::SynSent);
        let events = self.end(EndReason::Aborted);
        self.due.set(Due::RESET, announce);
        events
    }

    /// Drops a RST that waits to be sent: the connection is gone without a word, as after an ICMP error.
    pub fn forget_reset(&mut self) {
        self.due.remove(Due::RESET);
    }

    /// Whether a FIN is queued or sent.
    pub fn fin_queued(&self) -> bool {
        self.send.fin_queued
    }

    /// How often the SYN or SYN-ACK was sent again because its time had run out.
    pub fn retransmissions_of_syn(&self) -> u8 {
        self.opening.syn_retransmissions
    }

    /// Whether data of a SYN was taken and the handshake is not over (RFC 7413).
    pub fn is_fast_open(&self) -> bool {
        self.opening.fast && self.state == State::SynReceived
    }

    /// Whether partial segments are held back.
    pub fn is_corked(&self) -> bool {
        self.cork
    }

    /// Largest window that the peer ever advertised, in bytes.
    pub fn largest_window(&self) -> u32 {
        self.send.max_wnd
    }

    /// Bytes of receive memory.
    pub fn receive_memory(&self) -> u32 {
        self.receive.memory
    }

    /// Turns Nagle's algorithm off or on. When it is turned off, data that is held back goes out at once, even under a
    /// cork (as in Linux).
    pub fn set_nodelay(&mut self, nodelay: bool) {
        self.config.nodelay = nodelay;
        if nodelay {
            self.held = false;
            if self.cork && self.has_unsent() && self.in_flight() < self.congestion.cwnd {
                self.due |= Due::FORCE;
            }
        }
    }

    /// Holds partial segments back, or lets them go.
    pub fn set_cork(&mut self, cork: bool) {
        self.cork = cork;
        self.held = false;
    }

    /// Sets whether the partial segment that ends with the last queued bytes is held back (MSG_MORE): no longer than by
    /// a cork, and only until the peer acknowledges data or sends something unusual. An acknowledgement of this end
    /// does not take the held data along (both as in Linux, where tcp_data_snd_check pushes waiting data).
    #[inline]
    pub fn hold_back(&mut self, held: bool) {
        self.held = held;
    }

    /// Acknowledges every segment at once, or as where the program answers (both as by Linux's TCP_QUICKACK): the next
    /// one may wait for the answer, whatever came before.
    pub fn set_quick_ack(&mut self, always: bool) {
        self.receive.quick_acks = if always { ALWAYS } else { INTERACTIVE };
        self.receive.pushed = self.receive.last_ack;
    }

    /// Sets TCP_USER_TIMEOUT in milliseconds, 0 for none.
    pub fn set_user_timeout(&mut self, millis: u32) {
        self.config.user_timeout = millis;
    }

    /// Ends the connection with an error.
    pub(crate) fn end(&mut self, reason: EndReason) -> Events {
        self.state = State::Closed;
        self.end_reason = Some(reason);
        self.stop_timers(Timers::default());
        self.scoreboard.clear();
        self.reassembly.clear();
        Events::ABORTED
    }

    /// Our timestamp clock (RFC 7323 section 4.1), in milliseconds.
    #[inline]
    pub(crate) fn ts_now(&self, now: Instant) -> u32 {
        now.millis().wrapping_add(self.receive.ts_offset)
    }

    /// Sequence number behind everything there is to send, a queued FIN counted.
    #[inline]
    pub(crate) fn send_limit(&self) -> u32 {
        self.send.end.wrapping_add(u32::from(self.send.fin_queued))
    }

    /// Whether something waits to be sent for the first time.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        before(self.send.nxt, self.send_limit())
    }
}
