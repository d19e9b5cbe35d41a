//! How much memory a connection can use: as much as its path can have in flight. The receiver sees that its window will
//! be the limit when half of it is read within a round trip: in slow start the next one brings twice as much (Linux's
//! dynamic right-sizing keeps the window at twice of what was read, too). The sender sees it when its congestion window
//! outgrows what the program may queue
//! (Linux's tcp_sndbuf_expand). The caller has the memory: it asks now and then, and gives the connection more if it
//! can.

use crate::connection::{Connection, Due};
use crate::time::Instant;

/// Round trips in microseconds that are shorter are those of a short path: 256 KB fill one of 4 Gb/s. What limits the
/// rate there is how long NIC and programs need to take notice of each other, which is in no round-trip time.
const SHORT: u32 = 500;
/// Most bytes of receive memory that a connection on a short path can use: see [`Tuning::windows`].
const SHORT_RECEIVE: u32 = 1 << 21;
/// The same for send memory, which grows if the program fills it: the more there is, the less often the program has to
/// be woken to fill it again.
const SHORT_SEND: u32 = 1 << 22;
/// On a short path, receive memory grows after the peer has used up this many windows in a row, and send memory after
/// the program has filled it this many times. Each growth stops the connection for a moment.
const USED_UP: u8 = 4;
/// Memory grows by this factor, so that slow start is not waited for.
const FACTOR: u32 = 4;
/// No connection needs more.
const MOST: u32 = 1 << 30;

/// When the program had read the last two quarters of a window, the later first, and where it was then.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tuning {
    quarters: [Instant; 2],
    read: u32,
    /// Where the program was when it had read the last whole window, and what was seen since then: that the peer had
    /// used up most of the window, and that the program had read most of what came.
    window_read: u32,
    full: bool,
    empty: bool,
    /// Windows one after the other in which both were seen: peer and program could do more, and wait for each other. A
    /// program that does not keep up with its peer never empties its memory, and would gain nothing by more.
    windows: u8,
    /// Where the peer's acknowledgements were when the program had filled send memory on a short path for the first
    /// time.
    filled_at: Option<u32>,
}

impl Connection {
    /// Bytes of receive memory that the connection could use, if that is more than it has.
    pub fn wanted_receive_memory(&mut self, now: Instant) -> Option<u32> {
        let (read, window) = (self.receive.read, self.receive.capacity);
        if read.wrapping_sub(self.tuning.read) < window / 4 {
            return None;
        }
        let [last, before_last] = self.tuning.quarters;
        (self.tuning.quarters, self.tuning.read) = ([now, last], read);
        let took = now.since(before_last);
        let round = u64::from(self.rtt.smoothed);
        if window >= 65535 << self.receive.wscale {
            return None;
        }
        if !self.is_long_path() {
            let more = self.waits_for_window() && window < SHORT_RECEIVE / 2;
            return more.then(|| window.saturating_mul(FACTOR).min(SHORT_RECEIVE));
        }
        (took <= round + round / 4).then(|| window.saturating_mul(FACTOR).min(MOST))
    }

    /// Called when the program has read: notes how much of the window, of which `offered` bytes are left, the peer and
    /// the program have used.
    #[inline]
    pub(crate) fn note_window(&mut self, offered: u32) {
        let few = self.receive.capacity / 4;
        self.tuning.full |= offered < few;
        self.tuning.empty |= self.readable() < few;
    }

    /// Whether the window has been the limit for some time although the program reads all that comes. To be asked at
    /// each quarter.
    fn waits_for_window(&mut self) -> bool {
        let (read, window) = (self.receive.read, self.receive.capacity);
        let tuning = &mut self.tuning;
        if read.wrapping_sub(tuning.window_read) >= window {
            let both = tuning.full && tuning.empty;
            tuning.windows = if both { tuning.windows.saturating_add(1) } else { 0 };
            (tuning.window_read, tuning.full, tuning.empty) = (read, false, false);
        }
        tuning.windows >= USED_UP
    }

    /// Bytes of send memory that the connection could use, if that is more than the `size` that it has.
    #[inline]
    pub fn wanted_send_memory(&mut self, size: u32) -> Option<u32> {
        let queued = self.unacknowledged();
        let window = self.congestion.cwnd.saturating_mul(self.send.mss);
        if queued <= size / 2 || window <= size / 2 {
            return None;
        }
        if !self.is_long_path() {
            let una = self.send.una;
            let used = una.wrapping_sub(*self.tuning.filled_at.get_or_insert(una));
            let more = size < SHORT_SEND && used >= size * u32::from(USED_UP);
            return more.then(|| size.saturating_mul(FACTOR).min(SHORT_SEND));
        }
        // Twice the window, so that the program refills one while the other is in flight.
        Some(window.saturating_mul(FACTOR).min(MOST))
    }

    /// Whether the path's round trip is long enough to need more memory. The smallest one counts: a busy host makes
    /// others longer.
    pub fn is_long_path(&self) -> bool {
        let rtt = if self.rtt.min == 0 { self.rtt.smoothed } else { self.rtt.min };
        rtt >= SHORT
    }

    /// The connection has this much receive memory now, which holds all that it held. The window opens as far as that
    /// allows, and is no larger than `most`.
    pub fn set_receive_memory(&mut self, bytes: u32, most: u32) {
        self.receive.memory = bytes;
        self.limit_window(most);
        self.due |= Due::ACK;
    }

    /// Gives back memory of lists that were longer than they are: of what is in flight, and of what is out of order.
    pub fn shrink(&mut self) {
        self.scoreboard.shrink();
        self.reassembly.shrink();
    }

    /// Windows that are advertised from now on are no larger than `most`.
    pub fn limit_window(&mut self, most: u32) {
        let shift = self.receive.wscale;
        // One unit is left free, so that a window can be rounded up; without a scale nothing is rounded.
        let unit = if shift == 0 { 0 } else { 1 << shift };
        // Less than a unit could not be advertised at all.
        self.receive.capacity = self.receive.memory.saturating_sub(unit).min(65535 << shift).min(most.max(unit));
        self.set_window_step();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::{Config, State};
    use crate::segment::Segment;
    use baton_wire::{Flags, TcpOptions};

    /// Bytes of a segment.
    const PIECE: u32 = 16_384;

    /// An open connection with 256 KB of receive memory, whose peer scales its window as far as is allowed.
    fn open() -> Connection {
        let options = TcpOptions { window_scale: Some(8), mss: Some(1448), ..TcpOptions::default() };
        let syn = Segment { seq: 0, flags: Flags::SYN, window: 1000, options, ..Segment::default() };
        let config = Config { receive_limit: 8 << 20, ..Config::default() };
        let mut tcp = Connection::accept(config, &syn, 100, 0, Instant(0)).expect("a plain SYN");
        send_all(&mut tcp);
        tcp.input(&Segment { seq: 1, ack: 101, flags: Flags::ACK, window: 1000, ..Segment::default() }, Instant(0));
        tcp
    }

    fn send_all(tcp: &mut Connection) {
        while tcp.poll_transmit(Instant(0), 0).is_some() {}
    }

    /// The peer sends as much as the window allows but `spared` bytes, then the program reads all but `left` bytes,
    /// `rounds` times. Returns the memory that is wanted at last.
    fn exchange(tcp: &mut Connection, rounds: u32, spared: u32, left: u32) -> Option<u32> {
        let mut wanted = None;
        for _ in 0..rounds {
            while tcp.receive.adv.wrapping_sub(tcp.receive.nxt) >= PIECE + spared {
                let segment = Segment {
                    seq: tcp.receive.nxt,
                    ack: 101,
                    flags: Flags::ACK,
                    window: 1000,
                    length: PIECE,
                    ..Segment::default()
                };
                tcp.input(&segment, Instant(0));
                send_all(tcp);
            }
            while tcp.readable() > left {
                assert!(tcp.consumed(PIECE.min(tcp.readable() - left)));
                wanted = tcp.wanted_receive_memory(Instant(0)).or(wanted);
                send_all(tcp);
            }
        }
        wanted
    }

    #[test]
    fn a_short_path_gets_more_memory_when_peer_and_program_wait_for_each_other() {
        let mut tcp = open();
        assert!(!tcp.is_long_path());
        assert_eq!(exchange(&mut tcp, u32::from(USED_UP) - 1, 0, 0), None, "a few bursts need none");
        for memory in [1 << 20, SHORT_RECEIVE] {
            let wanted = exchange(&mut tcp, 2 * u32::from(USED_UP), 0, 0).expect("more");
            assert_eq!(wanted.next_power_of_two(), memory);
            tcp.set_receive_memory(memory, 8 << 20);
        }
        assert_eq!(exchange(&mut tcp, 20, 0, 0), None, "no more than that");
    }

    /// Queues and sends the whole of 32 KB of send memory, `times` times. Returns the memory that is wanted at last.
    fn send(tcp: &mut Connection, times: u32) -> Option<u32> {
        const SIZE: u32 = 1 << 15;
        let mut wanted = None;
        for _ in 0..times {
            tcp.queue(SIZE);
            wanted = tcp.wanted_send_memory(SIZE).or(wanted);
            for _ in 0..10 {
                send_all(tcp);
                let acknowledgement =
                    Segment { seq: 1, ack: tcp.send.nxt, flags: Flags::ACK, window: 1000, ..Segment::default() };
                tcp.input(&acknowledgement, Instant(0));
            }
            assert_eq!(tcp.send.una, tcp.send.end);
        }
        wanted
    }

    #[test]
    fn a_program_that_fills_its_send_memory_now_and_then_gets_no_more_at_once() {
        let mut tcp = open();
        assert_eq!(send(&mut tcp, u32::from(USED_UP)), None);
        assert_eq!(send(&mut tcp, 3), Some(1 << 17));
    }

    /// The FIN has a sequence number of its own, behind the last byte that the program has queued.
    #[test]
    fn a_fin_is_neither_unsent_nor_unacknowledged_data() {
        let mut tcp = open();
        tcp.queue(100);
        tcp.shutdown();
        send_all(&mut tcp);
        assert_eq!((tcp.unsent(), tcp.unacknowledged()), (0, 100));
        let acknowledgement = Segment { seq: 1, ack: tcp.send.nxt, flags: Flags::ACK, window: 1000, ..Segment::default() };
        // On a long path, so that send memory would grow at once.
        tcp.rtt.min = 2 * SHORT;
        tcp.input(&acknowledgement, Instant(1_000_000));
        assert_eq!(tcp.state(), State::FinWait2);
        assert_eq!((tcp.unsent(), tcp.unacknowledged()), (0, 0));
        assert_eq!(tcp.wanted_send_memory(1 << 14), None, "nothing is to be sent any more");
    }

    #[test]
    fn it_gets_none_when_either_does_not_keep_up() {
        assert_eq!(exchange(&mut open(), 50, 1 << 17, 0), None, "the window is never used up");
        assert_eq!(exchange(&mut open(), 50, 0, 1 << 17), None, "the program is behind");
    }
}
