//! From an image and back to one.

use crate::congestion::{threshold, window};
use crate::connection::{Agreed, Config, Connection, Due, NOT_PREDICTED, Receive, Send, State};
use crate::rtt::RTO_MAX;
use crate::time::Instant;
use baton_abi::Record;
use baton_abi::record::{PREDICTED, pair};
use baton_image::{Image, NicState, Silence, State as ImageState};

impl From<ImageState> for State {
    fn from(state: ImageState) -> State {
        match state {
            ImageState::Established => State::Established,
            ImageState::FinWait1 => State::FinWait1,
            ImageState::FinWait2 => State::FinWait2,
            ImageState::CloseWait => State::CloseWait,
            ImageState::LastAck => State::LastAck,
            ImageState::Closing => State::Closing,
            ImageState::TimeWait => State::TimeWait,
            ImageState::Closed => State::Closed,
        }
    }
}

impl State {
    /// The state as an image holds it; None while the connection opens.
    pub fn to_image(self) -> Option<ImageState> {
        Some(match self {
            State::SynSent | State::SynReceived => return None,
            State::Established => ImageState::Established,
            State::FinWait1 => ImageState::FinWait1,
            State::FinWait2 => ImageState::FinWait2,
            State::CloseWait => ImageState::CloseWait,
            State::LastAck => ImageState::LastAck,
            State::Closing => ImageState::Closing,
            State::TimeWait => ImageState::TimeWait,
            State::Closed => ImageState::Closed,
        })
    }
}

impl Connection {
    /// Takes a connection over. `receive_buffer` is the receive memory in bytes, which must hold the unread bytes and
    /// all of the window that was advertised. `nic` is the state that the last owner had beside the image, if that was
    /// a NIC; it must have been decoded with the image, which checks it. Without it, an acknowledgement goes out at
    /// once, so that the peer learns our window, and data in flight counts as sent when data was last sent.
    pub fn from_image(image: &Image, nic: Option<&NicState>, receive_buffer: u32, now: Instant) -> Connection {
        let agreed = Agreed { sack: image.sack, timestamps: image.timestamps, ecn: image.ecn, mss: image.mss };
        let config = Config {
            receive_buffer,
            mtu: image.mtu,
            ip_header: if image.flow.is_v4() { 20 } else { 40 },
            nodelay: image.nodelay,
            keepalive: image.keepalive,
            keepalive_idle: image.keepalive_idle,
            keepalive_interval: image.keepalive_interval,
            keepalive_count: image.keepalive_count,
            user_timeout: image.user_timeout,
            retries: image.retries,
            slow_start_after_idle: image.slow_start_after_idle,
            ecn: image.ecn,
            ..Config::default()
        };
        let mut connection = Connection::new(config, agreed, now);
        connection.state = image.state.into();
        connection.cork = image.cork;
        connection.send = Send {
            una: image.snd_una,
            nxt: image.snd_nxt,
            end: image.snd_end,
            wnd: image.snd_wnd,
            max_wnd: image.max_window.max(image.snd_wnd),
            small_end: image.snd_una,
            mss: connection.send.mss,
            wscale: image.snd_wscale,
            fin_queued: image.state.fin_queued(),
            cwr_pending: false,
        };
        connection.receive = Receive {
            nxt: image.rcv_nxt,
            adv: image.rcv_adv,
            read: image.read_seq(),
            wscale: image.rcv_wscale,
            fin: image.state.fin_received(),
            wl1: image.snd_wl1,
            ts_recent: image.ts_recent,
            predicted: NOT_PREDICTED,
            ts_offset: image.ts_clock.wrapping_sub(now.millis()),
            ..connection.receive
        };
        connection.limit_window(u32::MAX);
        let believed = |micros: u32| micros.min(RTO_MAX as u32);
        connection.rtt.smoothed = believed(image.srtt);
        connection.rtt.variation = believed(image.rttvar);
        connection.rtt.min = believed(image.min_rtt);
        connection.congestion.cwnd = window(image.cwnd);
        connection.congestion.ssthresh = threshold(image.ssthresh);
        connection.recovery.reordering_seen = image.reordering_seen;
        match nic {
            Some(nic) => connection.take_up(nic, now),
            None => connection.assume(image, now),
        }
        connection
    }

    /// Goes on from an image alone, as the kernel gives it: for the state that it leaves out, the least harmful values
    /// are assumed.
    fn assume(&mut self, image: &Image, now: Instant) {
        // PAWS starts from the first segment seen: the kernel does not show its ts_recent, only the timestamp that it
        // echoed last. The peer's next segments are acknowledged at once, as at the start: its view of the window is
        // refreshed soon.
        (self.receive.last_ack, self.receive.pushed) = (image.rcv_nxt, image.rcv_nxt);
        self.due = Due::ACK;
        self.rtt.min_at = now.0;
        self.congestion.cwnd = self.congestion.cwnd.max(2);
        self.congestion.round_end = image.snd_nxt;
        self.recovery.high_seq = image.snd_una;
        let sent_at = now.ago(image.sent_ago.unwrap_or(0).into());
        self.adopt_in_flight(sent_at);
        self.note_usage(self.scoreboard.len() >= image.cwnd);
        self.rearm_send_timer(if self.scoreboard.is_empty() { now } else { sent_at });
        match image.sent_ago {
            Some(_) => self.recovery.last_sent = sent_at,
            None => self.probe_what_was_adopted(now),
        }
        self.take_up_silence(&image.silence, sent_at, now);
        if image.state == ImageState::TimeWait {
            self.enter_time_wait(now);
        }
    }

    /// Writes the connection down. Fields that the host has fixed or caches come from `template`: the image with which
    /// the connection came, or an empty image with its flow and link filled in. None while the connection opens.
    pub fn to_image(&self, template: &Image, now: Instant) -> Option<Image> {
        Some(Image {
            flow: template.flow,
            snd_wscale: self.send.wscale,
            rcv_wscale: self.receive.wscale,
            sack: self.agreed.sack,
            timestamps: self.agreed.timestamps,
            ecn: self.agreed.ecn,
            mss: self.peer_mss(),
            link: template.link,
            mtu: self.config.mtu,
            nodelay: self.config.nodelay,
            cork: self.cork,
            keepalive: self.config.keepalive,
            keepalive_idle: self.config.keepalive_idle,
            keepalive_interval: self.config.keepalive_interval,
            keepalive_count: self.config.keepalive_count,
            user_timeout: self.config.user_timeout,
            retries: self.config.retries,
            slow_start_after_idle: self.config.slow_start_after_idle,
            state: self.state.to_image()?,
            snd_una: self.send.una,
            snd_nxt: self.send.nxt,
            snd_end: self.send.end,
            snd_wnd: self.send.wnd,
            snd_wl1: self.receive.wl1,
            max_window: self.send.max_wnd,
            rcv_nxt: self.receive.nxt,
            rcv_adv: self.receive.adv,
            unread: self.readable(),
            ts_recent: self.recent_timestamp(now),
            ts_clock: self.ts_now(now),
            cwnd: self.congestion.cwnd,
            ssthresh: self.congestion.ssthresh,
            srtt: self.rtt.smoothed,
            rttvar: self.rtt.variation,
            min_rtt: self.rtt.min,
            reordering_seen: self.recovery.reordering_seen,
            sent_ago: self.recovery.sent_age(now).map(|age| u32::try_from(age).unwrap_or(u32::MAX)),
            silence: Silence::default(),
        })
    }

    /// The record of the connection for recovery after the NIC's death; the caller adds where out-of-order ranges are
    /// kept.
    #[inline(always)]
    pub fn record(&self, now: Instant) -> Record {
        self.record_with(self.ts_now(now))
    }

    /// The words of [`Connection::record_with`] that a predicted segment changes: the first ones.
    #[inline(always)]
    pub fn predicted_record(&self, ts_clock: u32) -> [u64; PREDICTED] {
        let (send, receive) = (&self.send, &self.receive);
        [pair(receive.nxt, receive.adv), pair(receive.wl1, receive.ts_recent), pair(ts_clock, send.una)]
    }

    /// [`Connection::record`] at a moment of the connection's timestamp clock.
    #[inline(always)]
    pub fn record_with(&self, ts_clock: u32) -> Record {
        Record {
            snd_una: self.send.una,
            snd_nxt: self.send.nxt,
            snd_end: self.send.end,
            snd_wnd: self.send.wnd,
            snd_wl1: self.receive.wl1,
            max_window: self.send.max_wnd,
            rcv_nxt: self.receive.nxt,
            rcv_adv: self.receive.adv,
            rcv_read: self.receive.read,
            ts_recent: self.receive.ts_recent,
            ts_clock,
            state: self.state as u8,
            ranges_table: 0,
            ranges: 0,
            cwnd: self.congestion.cwnd,
            srtt: self.rtt.smoothed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record holds the state by its number, which recovery reads as an image's.
    #[test]
    fn states_are_numbered_as_in_an_image() {
        for number in 0..=u8::MAX {
            if let Some(image) = ImageState::from_number(number) {
                assert_eq!(State::from(image) as u8, number);
                assert_eq!(State::from(image).to_image(), Some(image));
            }
        }
        assert_eq!(ImageState::from_number(State::SynSent as u8), None);
        assert_eq!(ImageState::from_number(State::SynReceived as u8), None);
    }
}
