//! A connection with its memory: the bytes that `protocols/tcp` names by their sequence numbers.

use crate::packet::CookieOption;
use crate::socket::SocketId;
use baton_tcp::segment::Transmit;
use baton_tcp::seq::{at_or_before, before};
use baton_tcp::{Connection, Received, State};
use baton_wire::{Flags, Flow};
use std::collections::VecDeque;

/// Bytes of receive memory of every connection; no window is larger.
const RECEIVE_MEMORY: usize = 1 << 24;

/// Largest window in bytes: Linux begins with it and lets it grow with what comes.
pub const FIRST_WINDOW: u32 = 65_535;

/// A write whose completion its program wants to be notified of.
#[derive(Clone, Debug)]
pub struct Watched {
    /// Sequence number behind its last byte.
    pub end: u32,
    /// What it wants to be notified of.
    pub what: Watch,
}

/// What a program wants to be notified of about a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// MSG_ZEROCOPY: the number of the send.
    ZeroCopy(u32),
    /// SO_TIMESTAMPING: when it was acknowledged; the byte's number in the stream.
    Acknowledged(u32),
    /// SO_TIMESTAMPING: when it was given to the device's queue.
    Queued(u32),
    /// SO_TIMESTAMPING: when it left.
    Sent(u32),
}

/// A piece of the send queue.
#[derive(Clone, Copy, Debug)]
struct Piece {
    end: u32,
    /// Nothing is put behind its last byte (MSG_EOR).
    closed: bool,
}

/// Bytes that a piece costs beside its own (Linux's SKB_TRUESIZE of an empty buffer).
const PIECE: u32 = 1280;

/// Microseconds for which a connection had data to send, and what it waited for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chrono {
    /// With data to send, in whatever way it waited.
    pub busy: u64,
    /// Waiting for the peer's window.
    pub window_limited: u64,
    /// Waiting for the program, which waits for room in the send buffer.
    pub buffer_limited: u64,
    since: u64,
    state: Waits,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Waits {
    #[default]
    Idle,
    Network,
    Window,
    Buffer,
}

/// A connection and what belongs to it.
pub struct Stream {
    /// The protocol.
    pub tcp: Connection,
    /// Its 4-tuple.
    pub flow: Flow,
    /// The listener that it came to, until it is accepted.
    pub parent: Option<SocketId>,
    /// It was put into its listener's queue.
    pub queued: bool,
    /// What follows the last byte that left, and the last segment's acknowledgement and window, none for a SYN's, which
    /// is not scaled.
    last_sent: (u32, u32, Option<u16>),
    /// The connection has just moved: the acknowledgement that goes with it has not left yet.
    pub moved: bool,
    /// It has been on a NIC: the modelled kernel, which makes every connection, has moved it.
    pub offloaded: bool,
    /// As a client: the handshake is over.
    pub established: bool,
    /// connect() has reported success.
    pub connect_reported: bool,
    /// The Fast Open option for the SYN, or the SYN-ACK.
    pub cookie: Option<CookieOption>,
    /// The SYN that left carried data, and all of it was acknowledged with the SYN; or one that came did.
    pub syn_data_acked: bool,
    /// It was opened with Fast Open as a client.
    pub fast_opened: bool,
    /// Bytes of data that the SYN carried.
    pub syn_data: u32,
    /// Path MTU in bytes that it began with.
    pub mtu: u32,
    /// Bytes of the largest segment that came.
    pub largest_received: u32,
    /// What it spent its time with.
    pub chrono: Chrono,
    /// Sequence number behind the last write that asked for no more to come (MSG_MORE does).
    pub pushed: u32,
    /// Writes whose completion is waited for.
    pub watched: Vec<Watched>,
    /// When data last came.
    pub last_data_received: u64,
    /// Sequence number of the first byte of data.
    pub first_sent: u32,
    /// Ends of the pieces in which the send queue lies, as Linux's socket buffers: what is written goes behind the last
    /// one while that is unsent, and into a new one when it is full.
    pieces: VecDeque<Piece>,
    /// The program has closed its sending side.
    closing: bool,
    send: VecDeque<u8>,
    send_base: u32,
    memory: Vec<u8>,
}

impl Stream {
    /// A connection whose first byte to be sent will have sequence number `first`.
    pub fn new(mut tcp: Connection, flow: Flow, first: u32, now: u64) -> Stream {
        tcp.limit_window(FIRST_WINDOW);
        Stream {
            tcp,
            flow,
            parent: None,
            queued: false,
            last_sent: (0, 0, None),
            moved: false,
            offloaded: false,
            established: false,
            connect_reported: false,
            cookie: None,
            syn_data_acked: false,
            fast_opened: false,
            mtu: 1500,
            largest_received: 0,
            chrono: Chrono { since: now, ..Chrono::default() },
            pushed: first,
            syn_data: 0,
            watched: Vec::new(),
            last_data_received: now,
            first_sent: first,
            pieces: VecDeque::new(),
            closing: false,
            send: VecDeque::new(),
            send_base: first,
            memory: vec![0; RECEIVE_MEMORY],
        }
    }

    /// Bytes queued and not acknowledged.
    pub fn queued_bytes(&self) -> u32 {
        self.send.len() as u32
    }

    /// Bytes queued and not sent.
    pub fn unsent(&self) -> u32 {
        let nxt = self.tcp.snd_nxt().wrapping_sub(self.send_base);
        let sent = if (nxt as i32) < 0 { 0 } else { nxt };
        self.queued_bytes().saturating_sub(sent)
    }

    /// Bytes that the send queue takes, its bookkeeping counted.
    pub fn queue_cost(&self) -> u32 {
        self.queued_bytes() + PIECE * self.pieces.len() as u32
    }

    /// Bytes of a full piece (Linux's size goal): no more than half of the largest window.
    fn goal(&self) -> u32 {
        let mss = self.tcp.segment_size();
        let half = (self.tcp.largest_window() / 2).clamp(mss, 65_000);
        half - half % mss
    }

    /// Bytes that fit behind the last piece, if that is still open and not all sent.
    pub fn tail_room(&self) -> u32 {
        let Some(last) = self.pieces.back().filter(|last| !last.closed) else { return 0 };
        let count = self.pieces.len();
        let start = if count > 1 { self.pieces[count - 2].end } else { self.send_base };
        let sent = self.tcp.snd_nxt();
        if at_or_before(last.end, sent) {
            return 0;
        }
        self.goal().saturating_sub(last.end.wrapping_sub(start))
    }

    /// Bytes that a new piece holds.
    pub fn fresh_room(&self) -> u32 {
        self.goal()
    }

    /// Queues bytes, behind the last piece as far as they fit there, else in a new one. Whether sending is still open.
    pub fn write(&mut self, bytes: &[u8], closes: bool) -> bool {
        let open = self.can_send();
        if open {
            let extends = self.tail_room() >= bytes.len() as u32;
            self.send.extend(bytes);
            let end = self.send_base.wrapping_add(self.queued_bytes());
            match self.pieces.back_mut().filter(|_| extends) {
                Some(last) => *last = Piece { end, closed: closes },
                None => self.pieces.push_back(Piece { end, closed: closes }),
            }
        }
        open
    }

    /// Gives the protocol what was written, up to the end of the next piece behind which nothing may be put (MSG_EOR):
    /// no segment crosses that. What is in front of it does not wait for more.
    pub fn feed(&mut self, nodelay: bool) {
        let fed = self.tcp.snd_end();
        let held = self.pieces.iter().any(|piece| piece.closed && piece.end == fed);
        if held && before(self.tcp.snd_nxt(), fed) {
            return;
        }
        let written = self.send_base.wrapping_add(self.queued_bytes());
        let stop = self.pieces.iter().find(|piece| piece.closed && before(fed, piece.end)).map_or(written, |piece| piece.end);
        if before(fed, stop) {
            self.tcp.queue(stop.wrapping_sub(fed));
        }
        self.tcp.set_nodelay(nodelay || stop != written);
        if self.closing && stop == written {
            self.tcp.shutdown();
        }
    }

    /// Whether a segment is the acknowledgement that every move sends, and has nothing new for the peer: it is not put
    /// on the wire, where scripts do not know when a move took place.
    pub fn repeats_itself(&mut self, transmit: &Transmit) -> bool {
        let (syn, fin) = (transmit.flags.contains(Flags::SYN), transmit.flags.contains(Flags::FIN));
        let end = transmit.seq.wrapping_add(transmit.length + u32::from(syn) + u32::from(fin));
        let window = (!syn).then_some(transmit.window);
        // What is sent again does not take the sequence number of the next acknowledgement back.
        let end = if before(end, self.last_sent.0) && !syn { self.last_sent.0 } else { end };
        let last = std::mem::replace(&mut self.last_sent, (end, transmit.ack, window));
        let bare = transmit.length == 0 && transmit.flags == Flags::ACK && transmit.options.sack.is_empty();
        // The edge may lie within a unit of the window's scale.
        let same = last.2.is_none_or(|last| last.abs_diff(transmit.window) <= 1);
        bare && std::mem::take(&mut self.moved) && (last.0, last.1) == (end, transmit.ack) && same
    }

    /// Takes PSH off a single segment whose last byte is not the last of a write that asked for it.
    pub fn without_early_push(&self, mut transmit: Transmit) -> Transmit {
        let end = transmit.seq.wrapping_add(transmit.length);
        // What leaves in spite of a cork was pushed by its timer.
        let forced = self.tcp.is_corked() && transmit.length < self.tcp.segment_size();
        if transmit.length > 0 && transmit.segment_size == 0 && before(self.pushed, end) && !forced {
            transmit.flags = Flags(transmit.flags.0 & !Flags::PSH.0);
        }
        transmit
    }

    /// Closes the sending side behind what was written.
    pub fn shutdown(&mut self) {
        self.closing = true;
        self.feed(false);
        let written = self.send_base.wrapping_add(self.queued_bytes());
        if self.tcp.snd_end() == written {
            self.tcp.shutdown();
        }
    }

    /// Payload bytes that leave in one burst (Linux's tcp_tso_autosize): about a millisecond of the pacing rate, more
    /// where the round trip is short, at least `least` segments.
    pub fn burst(&self, least: u32) -> u32 {
        let info = self.tcp.info();
        let mss = u64::from(info.snd_mss);
        let ratio = if info.cwnd < info.ssthresh / 2 { 200 } else { 120 };
        let rate = mss * u64::from(info.cwnd) * ratio * 10_000;
        let rate = rate.checked_div(u64::from(info.srtt)).unwrap_or(u64::MAX);
        let shift = info.min_rtt >> 9;
        let short = if info.min_rtt > 0 && shift < 17 { 65_536 >> shift } else { 0 };
        let bytes = (rate >> 10).min(65_000) + short;
        let segments = (bytes / mss).max(u64::from(least)) as u32;
        (segments * info.snd_mss).min(self.goal())
    }

    /// A segment that ends within a piece splits it.
    pub fn split_at(&mut self, end: u32) {
        let at = self.pieces.partition_point(|piece| before(piece.end, end));
        if self.pieces.get(at).is_some_and(|piece| piece.end != end) {
            self.pieces.insert(at, Piece { end, closed: false });
        }
    }

    /// The payload of a segment that leaves.
    pub fn payload(&self, transmit: &Transmit) -> Vec<u8> {
        let syn = u32::from(transmit.flags.contains(Flags::SYN));
        let from = transmit.seq.wrapping_add(syn).wrapping_sub(self.send_base) as usize;
        let length = transmit.length as usize;
        if length == 0 { Vec::new() } else { self.send.range(from..from + length).copied().collect() }
    }

    /// Does what an inbound segment asks of the memory.
    pub fn apply(&mut self, received: &Received, payload: &[u8], now: u64) {
        let bytes = &payload[received.skip as usize..][..received.place as usize];
        let mask = RECEIVE_MEMORY - 1;
        for (at, byte) in bytes.iter().enumerate() {
            self.memory[received.place_seq.wrapping_add(at as u32) as usize & mask] = *byte;
        }
        if received.place > 0 {
            self.last_data_received = now;
            self.largest_received = self.largest_received.max(payload.len() as u32);
        }
        let acked = (received.acked as usize).min(self.send.len());
        self.send.drain(..acked);
        self.send_base = self.send_base.wrapping_add(acked as u32);
        while self.pieces.front().is_some_and(|piece| at_or_before(piece.end, self.send_base)) {
            self.pieces.pop_front();
        }
    }

    /// Accounts for the time since the last call. `no_space` says that the program waits for room.
    pub fn account(&mut self, now: u64, no_space: bool) {
        let c = &mut self.chrono;
        let elapsed = now.saturating_sub(c.since);
        c.since = now;
        c.busy += if c.state == Waits::Idle { 0 } else { elapsed };
        c.window_limited += if c.state == Waits::Window { elapsed } else { 0 };
        c.buffer_limited += if c.state == Waits::Buffer { elapsed } else { 0 };
        let info = self.tcp.info();
        let flight = self.tcp.snd_nxt().wrapping_sub(self.tcp.snd_una());
        let next = self.unsent().min(info.snd_mss);
        self.chrono.state = if self.queued_bytes() == 0 {
            Waits::Idle
        } else if self.unsent() > 0 && info.unacked < info.cwnd && flight + next > info.snd_wnd {
            Waits::Window
        } else if self.unsent() == 0 && no_space {
            Waits::Buffer
        } else {
            Waits::Network
        };
    }

    /// The first `length` readable bytes, `skip` bytes in; fewer if there are fewer.
    pub fn peek(&self, skip: u32, length: usize) -> Vec<u8> {
        let length = (self.tcp.readable().saturating_sub(skip)).min(length as u32);
        let seq = self.tcp.rcv_read().wrapping_add(skip);
        (0..length).map(|at| self.memory[seq.wrapping_add(at) as usize & (RECEIVE_MEMORY - 1)]).collect()
    }

    /// Whether the handshake is over, well or not.
    pub fn connect_is_over(&self) -> bool {
        !matches!(self.tcp.state(), State::SynSent | State::SynReceived | State::Closed)
    }

    /// Whether the program may still send.
    pub fn can_send(&self) -> bool {
        match self.tcp.state() {
            State::Established | State::CloseWait | State::SynSent => !self.closing,
            State::SynReceived => !self.closing && !self.tcp.fin_queued(),
            _ => false,
        }
    }

    /// Sequence number behind the last queued byte, and its number in the stream from 0.
    pub fn write_end(&self) -> (u32, u32) {
        let end = self.send_base.wrapping_add(self.queued_bytes());
        (end, end.wrapping_sub(self.first_sent).wrapping_sub(1))
    }
}
