//! Initial sequence numbers that are hard to guess (RFC 6528), and numbers that encode a SYN, so that it need not be
//! stored (SYN cookies, RFC 4987 section 3.6).

use crate::connection::Config;
use crate::segment::Segment;
use crate::time::Instant;
use baton_wire::{Flags, Flow, TcpOptions};
use core::hash::Hasher;
use siphasher::sip::SipHasher24;

/// MSS options that a cookie can stand for, ascending: those of common paths. A peer's option is rounded down to one of
/// them.
const SEGMENT_SIZES: [u16; 8] = [216, 536, 1220, 1360, 1400, 1440, 1460, 8960];
/// Stands in place of an index into these if the number is no cookie.
const NO_COOKIE: u32 = SEGMENT_SIZES.len() as u32;

/// The count in a cookie changes every 2^26 microseconds, which is 67 s.
const COUNT_BITS: u32 = 26;
/// Number of counts for which a cookie is accepted: it is at most 134 s old.
const COUNTS: u32 = 2;
/// Bits of a cookie below its count.
const VALUE_BITS: u32 = 24;
const VALUE: u32 = (1 << VALUE_BITS) - 1;

/// Low bits of the timestamp in a SYN-ACK that stand for the peer's options: window scale (15 for none), SACK, ECN.
const OPTION_BITS: u32 = 6;
const NO_SCALE: u32 = 15;
const SACK: u32 = 16;
const ECN: u32 = 32;

/// The purpose of a hash. It is hashed as well, so that a number of one purpose reveals nothing about the others.
#[repr(u8)]
enum Purpose {
    Sequence = 1,
    Cookie = 2,
    Clock = 3,
}

/// The key from which numbers are made. It must be random and secret. As long as it stays the same, cookies of an
/// earlier process can be checked.
#[derive(Clone, Copy, Debug)]
pub struct Secret([u64; 2]);

/// Numbers with which a SYN is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// Initial sequence number.
    pub isn: u32,
    /// Added to the time in milliseconds gives the timestamp clock.
    pub ts_offset: u32,
}

impl Config {
    /// The configuration for a SYN that is answered with a cookie: the answer may agree only to options that the peer's
    /// acknowledgement brings back. Window scale, SACK and ECN are encoded in its timestamp, so without timestamps
    /// there are none (as in Linux).
    #[must_use]
    pub fn of_cookie(self, syn: &Segment) -> Config {
        let holds = self.timestamps && syn.options.timestamps.is_some();
        let Config { window_scaling, sack, ecn, .. } = self;
        Config { window_scaling: window_scaling && holds, sack: sack && holds, ecn: ecn && holds, ..self }
    }

    /// Whether a SYN that is accepted so is answered with no more than a cookie holds.
    fn says_what_a_cookie_holds(&self, syn: &Segment) -> bool {
        let cookie = self.of_cookie(syn);
        let TcpOptions { window_scale, sack_permitted, .. } = syn.options;
        let asks_ecn = syn.flags.contains(Flags::ECE | Flags::CWR);
        let lost = |wanted: bool, here: bool, there: bool| wanted && here && !there;
        !(lost(window_scale.is_some(), self.window_scaling, cookie.window_scaling)
            || lost(sack_permitted, self.sack, cookie.sack)
            || lost(asks_ecn, self.ecn, cookie.ecn))
    }
}

impl Secret {
    /// Makes the key from random words.
    pub fn new(key: [u64; 2]) -> Secret {
        Secret(key)
    }

    fn hash(&self, purpose: Purpose, flow: &Flow, count: u32) -> u32 {
        let mut hasher = SipHasher24::new_with_keys(self.0[0], self.0[1]);
        hasher.write(&flow.to_bytes());
        hasher.write(&count.to_le_bytes());
        hasher.write(&[purpose as u8]);
        hasher.finish() as u32
    }

    /// Numbers for a connection that is opened actively: a clock that counts 4 µs, plus a keyed hash of the 4-tuple
    /// (RFC 6528 section 3). The timestamp clock of a 4-tuple never goes back either.
    pub fn numbers(&self, flow: &Flow, now: Instant) -> Numbers {
        let isn = self.hash(Purpose::Sequence, flow, 0).wrapping_add((now.0 / 4) as u32);
        Numbers { isn, ts_offset: self.hash(Purpose::Clock, flow, 0) }
    }

    /// Numbers with which a SYN is answered. If `config`, with which it is accepted, agrees on nothing else than
    /// [`Config::of_cookie`] allows they suffice to make the connection from the peer's acknowledgement
    /// ([`Secret::syn_of`]), so that the answer need not be remembered; else they are no cookie. Sequence numbers of a
    /// 4-tuple grow with the peer's and with the time.
    pub fn answer(&self, flow: &Flow, syn: &Segment, config: &Config, now: Instant) -> Numbers {
        let count = (now.0 >> COUNT_BITS) as u32;
        let size = SEGMENT_SIZES.iter().rposition(|size| *size <= syn.options.mss.unwrap_or(536)).unwrap_or(0) as u32;
        let size = if config.says_what_a_cookie_holds(syn) { size } else { NO_COOKIE };
        let value = self.hash(Purpose::Cookie, flow, count).wrapping_add(size) & VALUE;
        let isn =
            self.hash(Purpose::Sequence, flow, 0).wrapping_add(syn.seq).wrapping_add(count << VALUE_BITS).wrapping_add(value);
        let scale = syn.options.window_scale.map_or(NO_SCALE, |scale| u32::from(scale.min(14)));
        let ecn = syn.flags.contains(Flags::ECE | Flags::CWR);
        let options = scale | if syn.options.sack_permitted { SACK } else { 0 } | if ecn { ECN } else { 0 };
        let offset = self.hash(Purpose::Clock, flow, 0);
        let clock = now.millis().wrapping_add(offset);
        let marked = clock & !((1 << OPTION_BITS) - 1) | options;
        // Never ahead of the clock, which a connection made from the acknowledgement continues.
        let marked = if marked > clock { marked.wrapping_sub(1 << OPTION_BITS) } else { marked };
        Numbers { isn, ts_offset: marked.wrapping_sub(now.millis()) }
    }

    /// Restores the SYN whose answer a segment acknowledges, as far as its options were agreed to, and the numbers of
    /// that answer. None if no cookie of the last two minutes had that number. Without timestamps, the options that
    /// they encode are missing, and were not agreed to either.
    pub fn syn_of(&self, flow: &Flow, acknowledgement: &Segment, now: Instant) -> Option<(Segment, Numbers)> {
        let (isn, peer_isn) = (acknowledgement.ack.wrapping_sub(1), acknowledgement.seq.wrapping_sub(1));
        let rest = isn.wrapping_sub(self.hash(Purpose::Sequence, flow, 0)).wrapping_sub(peer_isn);
        let present = (now.0 >> COUNT_BITS) as u32;
        let size = (0..COUNTS).find_map(|age| {
            let count = present.wrapping_sub(age);
            let value = rest.wrapping_sub(count << VALUE_BITS);
            let size = value.wrapping_sub(self.hash(Purpose::Cookie, flow, count) & VALUE) & VALUE;
            let known = value <= VALUE && (size as usize) < SEGMENT_SIZES.len();
            known.then(|| SEGMENT_SIZES[size as usize])
        })?;
        let echoed = acknowledgement.options.timestamps.map(|(_, echo)| echo);
        let scale = echoed.map_or(NO_SCALE, |echo| echo & 15);
        let options = TcpOptions {
            mss: Some(size),
            window_scale: (scale != NO_SCALE).then_some(scale as u8),
            sack_permitted: echoed.is_some_and(|echo| echo & SACK != 0),
            timestamps: acknowledgement.options.timestamps.map(|(value, _)| (value, 0)),
            ..TcpOptions::default()
        };
        let flags = if echoed.is_some_and(|echo| echo & ECN != 0) { Flags::SYN | Flags::ECE | Flags::CWR } else { Flags::SYN };
        let syn = Segment { seq: peer_isn, flags, window: acknowledgement.window, options, ..Segment::default() };
        Some((syn, Numbers { isn, ts_offset: self.hash(Purpose::Clock, flow, 0) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Connection;
    use crate::segment::{Events, Transmit};
    use baton_wire::Endpoint;

    const SECRET: Secret = Secret([1, 2]);
    const MINUTE: u64 = 60_000_000;

    fn flow(port: u16) -> Flow {
        Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], port), device: 0 }
    }

    fn syn(seq: u32, mss: u16, scale: Option<u8>, sack: bool) -> Segment {
        let options = TcpOptions {
            mss: Some(mss),
            window_scale: scale,
            sack_permitted: sack,
            timestamps: Some((77, 0)),
            ..TcpOptions::default()
        };
        Segment { seq, flags: Flags::SYN, options, ..Segment::default() }
    }

    /// The acknowledgement of an answer that was sent at `then`.
    fn acknowledge(syn: &Segment, numbers: Numbers, then: Instant) -> Segment {
        let echo = then.millis().wrapping_add(numbers.ts_offset);
        let options = TcpOptions { timestamps: Some((78, echo)), ..TcpOptions::default() };
        Segment {
            seq: syn.seq.wrapping_add(1),
            ack: numbers.isn.wrapping_add(1),
            flags: Flags::ACK,
            options,
            ..Segment::default()
        }
    }

    #[test]
    fn an_acknowledgement_brings_its_syn_back() {
        for (at, seq) in [(0u64, 0u32), (5 * MINUTE, u32::MAX), (u64::from(u32::MAX) * 1000 - 1, 1 << 31), (1 << 40, 12345)] {
            for (mss, scale, sack) in [(1460, Some(7), true), (8960, None, false), (536, Some(0), true), (1448, Some(14), false)]
            {
                let (then, syn) = (Instant(at), syn(seq, mss, scale, sack));
                let numbers = SECRET.answer(&flow(1), &syn, &Config::default(), then);
                assert!(
                    numbers.ts_offset.wrapping_add(then.millis())
                        <= SECRET.numbers(&flow(1), then).ts_offset.wrapping_add(then.millis())
                );
                let ack = acknowledge(&syn, numbers, then);
                let (again, same) = SECRET.syn_of(&flow(1), &ack, Instant(at + MINUTE)).expect("the SYN");
                assert_eq!((again.seq, same.isn), (seq, numbers.isn));
                assert_eq!((again.options.window_scale, again.options.sack_permitted), (scale, sack));
                assert!(again.options.mss.is_some_and(|found| found <= mss && found + 60 > mss), "{:?}", again.options.mss);
                assert!(SECRET.syn_of(&flow(1), &ack, Instant(at + 3 * MINUTE)).is_none(), "too old");
                assert!(SECRET.syn_of(&flow(2), &ack, then).is_none(), "of another connection");
                assert!(Secret::new([1, 3]).syn_of(&flow(1), &ack, then).is_none(), "with another key");
                let later = Segment { seq: ack.seq.wrapping_add(100), ..ack };
                assert!(SECRET.syn_of(&flow(1), &later, then).is_none(), "not the first segment");
            }
        }
    }

    /// Every SYN that a client can send, answered with a cookie and by a stored connection: the SYN-ACK agrees only to
    /// options that the connection restored from the client's acknowledgement has; and a number that is no cookie makes
    /// no connection.
    #[test]
    fn a_cookie_promises_only_what_it_can_restore() {
        let then = Instant(11 * MINUTE);
        let flags = [Flags::SYN, Flags::SYN | Flags::ECE | Flags::CWR];
        let (mut cookies, mut others) = (0, 0);
        for bits in 0..4 * 4 * 2 * 2 * 2 * 32u32 {
            let one_of = |shift: u32, count: u32| (bits >> shift) % count;
            let options = TcpOptions {
                mss: [None, Some(536), Some(1460), Some(8960)][one_of(0, 4) as usize],
                window_scale: [None, Some(0), Some(7), Some(14)][one_of(2, 4) as usize],
                sack_permitted: one_of(4, 2) == 1,
                timestamps: (one_of(5, 2) == 1).then_some((77, 0)),
                ..TcpOptions::default()
            };
            let on = |shift| one_of(shift, 2) == 1;
            let config = Config {
                ecn: on(7),
                window_scaling: on(8),
                sack: on(9),
                timestamps: on(10),
                receive_limit: if on(11) { 1 << 20 } else { 0 },
                receive_buffer: 1 << 16,
                ..Config::default()
            };
            let syn = Segment { seq: 900, flags: flags[one_of(6, 2) as usize], options, window: 400, ..Segment::default() };
            for config in [config, config.of_cookie(&syn)] {
                let numbers = SECRET.answer(&flow(1), &syn, &config, then);
                let mut first = Connection::accept(config, &syn, numbers.isn, numbers.ts_offset, then).expect("a SYN");
                let said = first.poll_transmit(then, 0).expect("an answer");
                // The client's acknowledgement has timestamps if both ends have spoken of them.
                let timestamps = said.options.timestamps.map(|(clock, _)| (78, clock));
                let ack = Segment {
                    seq: 901,
                    ack: said.seq.wrapping_add(1),
                    flags: Flags::ACK,
                    window: 400,
                    options: TcpOptions { timestamps, ..TcpOptions::default() },
                    ..Segment::default()
                };
                let Some((again, numbers)) = SECRET.syn_of(&flow(1), &ack, then) else {
                    assert_ne!(config, config.of_cookie(&syn), "{syn:?}");
                    others += 1;
                    continue;
                };
                cookies += 1;
                let mut restored =
                    Connection::accept(config.of_cookie(&again), &again, numbers.isn, numbers.ts_offset, then).expect("a SYN");
                let repeated = restored.poll_transmit(then, 0).expect("an answer");
                let says = |transmit: &Transmit| {
                    let TcpOptions { window_scale, sack_permitted, timestamps, mss, .. } = transmit.options;
                    (transmit.seq, transmit.flags, window_scale, sack_permitted, timestamps.is_some(), mss)
                };
                assert_eq!(says(&repeated), says(&said), "{syn:?} {config:?}");
                assert_eq!(first.input(&ack, then).events, Events::ESTABLISHED);
                assert_eq!(restored.input(&ack, then).events, Events::ESTABLISHED);
                let has = |tcp: &Connection| (tcp.send.wscale, tcp.receive.wscale, tcp.send.wnd, tcp.agreed.sack, tcp.agreed.ecn);
                assert_eq!(has(&restored), has(&first), "{syn:?} {config:?}");
            }
        }
        assert!(cookies > 4000 && others > 500, "{cookies} {others}");
    }

    /// Of the 2³² numbers that an attacker without the key may try, sixteen are accepted.
    #[test]
    fn hardly_any_number_is_accepted_by_chance() {
        let (then, syn) = (Instant(7 * MINUTE), syn(1000, 1460, None, false));
        let ack = acknowledge(&syn, SECRET.answer(&flow(1), &syn, &Config::default(), then), then);
        let accepted = (0..1_000_000u32)
            .filter(|n| {
                let guess = Segment { ack: ack.ack.wrapping_add(n.wrapping_mul(4_294_967)), ..ack };
                SECRET.syn_of(&flow(1), &guess, then).is_some()
            })
            .count();
        assert!((1..4).contains(&accepted), "{accepted}");
    }

    /// RFC 6528: a new connection of the same 4-tuple begins behind an old one, and those of others give no hint of it.
    #[test]
    fn numbers_grow_with_time() {
        let first = SECRET.numbers(&flow(1), Instant(0));
        let later = SECRET.numbers(&flow(1), Instant(MINUTE));
        assert_eq!(later.isn.wrapping_sub(first.isn), 15_000_000);
        assert_ne!(SECRET.numbers(&flow(2), Instant(0)).isn, first.isn);
    }
}
