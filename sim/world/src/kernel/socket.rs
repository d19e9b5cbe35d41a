//! One socket: a connection with its queues, and the system calls of its program.

use super::{SEND_BUFFER, build, link};
use crate::port::Lane;
use baton_image::Image;
use baton_tcp::{Connection, EndReason, Events, Instant, Segment, State};
use baton_wire::frame::Template;
use baton_wire::{Flags, Flow, TcpFrame};
use std::collections::VecDeque;

/// Why a system call fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Errno {
    /// EAGAIN.
    WouldBlock,
    /// ECONNRESET.
    Reset,
    /// EPIPE.
    Pipe,
    /// ETIMEDOUT.
    TimedOut,
}

/// What the socket is to a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// It receives and sends.
    Live,
    /// Exported: deaf and in repair mode, whole. Repair mode stops neither acknowledgements nor retransmissions.
    Exported,
    /// Established, empty, deaf, silent.
    Shell,
    /// Imported: it receives, and does not send yet.
    Imported,
    /// Closed in silence.
    Gone,
}

/// A socket.
pub(crate) struct Socket {
    pub(super) flow: Flow,
    pub(super) tcp: Connection,
    pub(super) place: Place,
    pub(super) template: Template,
    /// A received byte lies at its sequence number modulo the length, a power of two.
    pub(super) receive: Vec<u8>,
    pub(super) send: VecDeque<u8>,
    /// Sequence number of the first byte of `send`.
    pub(super) send_seq: u32,
    /// Something arrived out of order since the socket was (re)connected.
    pub(super) had_disorder: bool,
    /// Until when it sends nothing, in microseconds; 0 if it is not paced.
    pub(super) paced_until: u64,
    ident: u16,
    error: Option<Errno>,
    /// Processes that have a descriptor of it.
    holders: u32,
    /// One of them has closed it with SO_LINGER and no time: the last one's close resets the peer.
    aborts: bool,
}

impl Socket {
    pub fn new(flow: Flow, tcp: Connection, isn: u32) -> Socket {
        Socket {
            flow,
            template: Template::new(&flow, &link(), true),
            receive: vec![0; tcp.receive_memory().next_power_of_two() as usize],
            tcp,
            place: Place::Live,
            send: VecDeque::new(),
            send_seq: isn.wrapping_add(1),
            had_disorder: false,
            paced_until: 0,
            ident: 0,
            error: None,
            holders: 1,
            aborts: false,
        }
    }

    /// A child of its process has inherited the descriptor.
    pub fn inherit(&mut self) {
        self.holders += 1;
    }

    /// Processes that have a descriptor of it.
    pub fn holders(&self) -> u32 {
        self.holders
    }

    pub fn flow(&self) -> Flow {
        self.flow
    }

    pub fn state(&self) -> State {
        self.tcp.state()
    }

    pub fn is_established(&self) -> bool {
        !matches!(self.tcp.state(), State::SynSent | State::SynReceived | State::Closed)
    }

    /// Whether nobody has a use for the socket any more.
    pub fn is_over(&self) -> bool {
        self.holders == 0 && (self.place == Place::Gone || self.place == Place::Live && self.tcp.state() == State::Closed)
    }

    pub fn next_timeout(&self) -> u64 {
        match self.place {
            Place::Live | Place::Exported if self.paced_until > 0 => self.paced_until,
            Place::Live | Place::Exported => self.tcp.next_timeout().0,
            _ => u64::MAX,
        }
    }

    pub fn set_mtu(&mut self, mtu: u32, now: Instant) {
        if matches!(self.place, Place::Live | Place::Exported | Place::Imported) {
            self.tcp.on_mtu_change(mtu, now);
        }
    }

    pub(super) fn input(&mut self, parsed: &TcpFrame, payload: &[u8], now: Instant) {
        if !matches!(self.place, Place::Live | Place::Imported) {
            return;
        }
        // Linux's socket is not in TIME-WAIT any more: a separate entry is, which a reset does not take unread data
        // from.
        if parsed.flags.contains(Flags::RST) && self.tcp.state() == State::TimeWait {
            return;
        }
        let segment = Segment::from(parsed);
        let received = self.tcp.input(&segment, now);
        self.place_bytes(received.place_seq, &payload[received.skip as usize..][..received.place as usize]);
        self.had_disorder |= self.tcp.has_out_of_order();
        self.acknowledged(received.acked as usize);
        self.note(received.events);
    }

    fn place_bytes(&mut self, seq: u32, bytes: &[u8]) {
        let mask = self.receive.len() - 1;
        for (at, byte) in bytes.iter().enumerate() {
            self.receive[seq.wrapping_add(at as u32) as usize & mask] = *byte;
        }
    }

    fn acknowledged(&mut self, bytes: usize) {
        let bytes = bytes.min(self.send.len());
        self.send.drain(..bytes);
        self.send_seq = self.send_seq.wrapping_add(bytes as u32);
    }

    fn note(&mut self, events: Events) {
        if events.contains(Events::ABORTED) {
            self.error = Some(match self.tcp.end_reason() {
                Some(EndReason::TimedOut) => Errno::TimedOut,
                _ => Errno::Reset,
            });
        }
    }

    /// Runs timers and sends what can be sent.
    pub(super) fn run(&mut self, now: Instant, outgoing: &Lane) {
        if !matches!(self.place, Place::Live | Place::Exported) {
            return;
        }
        if self.tcp.next_timeout() <= now {
            let events = self.tcp.on_timeout(now);
            self.note(events);
        }
        if now.0 < self.paced_until {
            return;
        }
        self.paced_until = 0;
        while let Some(transmit) = self.tcp.poll_transmit(now, 0) {
            let from = transmit.seq.wrapping_sub(self.send_seq) as usize;
            self.ident = self.ident.wrapping_add(1);
            let send = &self.send;
            let frame = build(&self.template, &transmit, self.ident, |_, out| {
                // A SYN lies before the first byte.
                if !out.is_empty() {
                    out.iter_mut().zip(send.range(from..)).for_each(|(byte, queued)| *byte = *queued);
                }
            });
            outgoing.push(frame);
        }
    }

    /// `send`: queues as many bytes as there is room for.
    pub fn send(&mut self, bytes: &[u8]) -> Result<usize, Errno> {
        assert_eq!(self.place, Place::Live, "a program's system call reached a socket that is not its connection");
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        if self.tcp.state() == State::Closed || self.tcp.fin_queued() {
            return Err(Errno::Pipe);
        }
        let length = bytes.len().min(SEND_BUFFER.saturating_sub(self.send.len()));
        if length == 0 {
            return Err(Errno::WouldBlock);
        }
        self.send.extend(&bytes[..length]);
        self.tcp.queue(length as u32);
        Ok(length)
    }

    /// `recv`: 0 at the end of the stream.
    pub fn receive(&mut self, out: &mut [u8]) -> Result<usize, Errno> {
        assert_eq!(self.place, Place::Live, "a program's system call reached a socket that is not its connection");
        let length = out.len().min(self.tcp.readable() as usize);
        if length == 0 {
            return match self.error.take() {
                Some(error) => Err(error),
                None if self.tcp.fin_received() || self.tcp.state() == State::Closed => Ok(0),
                None => Err(Errno::WouldBlock),
            };
        }
        self.copy_received(self.tcp.rcv_read(), &mut out[..length]);
        self.tcp.consumed(length as u32);
        Ok(length)
    }

    pub(super) fn copy_received(&self, seq: u32, out: &mut [u8]) {
        let mask = self.receive.len() - 1;
        for (at, byte) in out.iter_mut().enumerate() {
            *byte = self.receive[seq.wrapping_add(at as u32) as usize & mask];
        }
    }

    /// `shutdown(SHUT_WR)`.
    pub fn shutdown(&mut self) {
        assert_eq!(self.place, Place::Live, "a program's system call reached a socket that is not its connection");
        self.tcp.shutdown();
    }

    /// `close`. That of the last process sends a FIN; or a RST if there is unread data (RFC 1122 section 4.2.2.13), or
    /// if one has asked for it: `abort`.
    pub fn close(&mut self, abort: bool) {
        self.holders -= 1;
        self.aborts |= abort;
        if self.holders > 0 {
            return;
        }
        if self.place != Place::Live {
            self.place = Place::Gone;
        } else if self.aborts || self.tcp.readable() > 0 {
            self.tcp.abort();
        } else {
            self.tcp.shutdown();
        }
    }

    /// An image with what the host knows of the connection.
    pub(super) fn hosts_part(&self) -> Image {
        Image { link: link(), ..Image::open(self.flow) }
    }
}
