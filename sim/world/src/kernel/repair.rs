//! Export and import in the kernel's terms (TCP_REPAIR): what it shows, what it does not, what it refuses.

use super::{Descriptor, Kernel, Place, Socket};
use baton_image::{Image, Silence, State};
use baton_moves::Refusal;
use baton_tcp::{Connection, Instant};

/// Congestion window in segments of a connection that starts anew (RFC 6928): the kernel takes no congestion state.
const INITIAL_WINDOW: u32 = 10;
/// Slow start threshold of such a connection.
const NO_THRESHOLD: u32 = u32::MAX;
/// Of so many imported sockets one is paced: for up to so many microseconds it sends nothing, as the kernel does if it
/// has sent faster before than the socket's congestion control likes (`tcp_wstamp_ns`).
const PACED: u64 = 4;
const PACED_FOR: u64 = 100_000;
/// Receive memory in bytes of an imported connection, unless more arrives with it.
const RECEIVE_BUFFER: u32 = 1 << 17;

fn lost(call: &'static str) -> Refusal {
    Refusal::Lost(call, "refused".into())
}

impl Kernel {
    /// Whether a socket may be exported: the states in which the kernel enters repair mode.
    pub fn examine(&mut self, descriptor: Descriptor, now: Instant) -> Result<(), Refusal> {
        if !self.routed {
            return Err(Refusal::NoRoute);
        }
        let socket = self.socket(descriptor);
        let state = socket.tcp.to_image(&socket.hosts_part(), now).map(|image| image.state);
        match state {
            Some(State::Established | State::CloseWait | State::FinWait1 | State::FinWait2 | State::LastAck) => Ok(()),
            _ => Err(Refusal::Ended),
        }
    }

    /// Makes the socket deaf, enters repair mode, and reads what it shows. The out-of-order queue and TS.Recent are not
    /// shown.
    pub fn export(&mut self, descriptor: Descriptor, now: Instant) -> Result<Image, Refusal> {
        self.examine(descriptor, now)?;
        let socket = self.socket(descriptor);
        let image = socket.tcp.to_image(&socket.hosts_part(), now).ok_or(Refusal::Ended)?;
        socket.place = Place::Exported;
        let silence = socket.tcp.silence(now);
        Ok(Image { ts_recent: 0, ts_clock: image.ts_clock.wrapping_add(1), silence, ..image })
    }

    /// Segments that a socket has sent again since it was connected, or imported.
    pub fn retransmitted(&mut self, descriptor: Descriptor) -> u32 {
        u32::try_from(self.socket(descriptor).tcp.info().total_retrans).unwrap_or(u32::MAX)
    }

    /// The bytes of both queues: unread ones, then those in flight and unsent.
    pub fn queues(&mut self, descriptor: Descriptor) -> (Vec<u8>, Vec<u8>) {
        let socket = self.socket(descriptor);
        let mut unread = vec![0; socket.tcp.readable() as usize];
        socket.copy_received(socket.tcp.rcv_read(), &mut unread);
        (unread, socket.send.iter().copied().collect())
    }

    /// Leaves repair mode; the connection goes on. Its out-of-order queue is as it was.
    pub fn abandon(&mut self, descriptor: Descriptor) {
        let socket = self.socket(descriptor);
        if socket.place == Place::Exported {
            socket.place = Place::Live;
        }
    }

    /// Makes the socket a shell.
    pub fn purge(&mut self, descriptor: Descriptor) -> Result<(), Refusal> {
        let socket = self.socket(descriptor);
        assert_eq!(socket.place, Place::Exported, "only what was exported is purged");
        assert_eq!(socket.holders(), 1, "a socket that two processes hold has become a shell");
        socket.place = Place::Shell;
        socket.send.clear();
        Ok(())
    }

    /// Makes a socket, whatever it is, the connection of an image. It receives then, and [`Kernel::finish`] lets it
    /// send.
    pub fn import(
        &mut self,
        at: Descriptor,
        image: &Image,
        unread: &[u8],
        unacknowledged: &[u8],
        now: Instant,
    ) -> Result<(), Refusal> {
        let routed = self.routed;
        let paced = if self.rng.below(PACED) == 0 { self.rng.below(PACED_FOR) } else { 0 };
        let socket = self.socket(at);
        if !routed {
            // ENETUNREACH, and the socket is closed for good.
            socket.place = Place::Gone;
            return Err(lost("reconnect"));
        }
        socket.import(image, unread, unacknowledged, now);
        socket.paced_until = if paced > 0 { now.after(paced).0 } else { 0 };
        Ok(())
    }

    /// Leaves repair mode, sends what was unsent, and shuts down what was shut down.
    pub fn finish(&mut self, at: Descriptor, image: &Image, unacknowledged: &[u8]) {
        let socket = self.socket(at);
        socket.place = Place::Live;
        let done = (socket.tcp.snd_end().wrapping_sub(image.snd_una) as usize).min(unacknowledged.len());
        // Without effect if the peer has reset the connection meanwhile.
        if socket.tcp.queue((unacknowledged.len() - done) as u32) {
            socket.send.extend(&unacknowledged[done..]);
        }
        if image.state.fin_queued() {
            socket.tcp.shutdown();
        }
    }

    /// Closes a shell without sending anything.
    pub fn end(&mut self, at: Descriptor) {
        self.socket(at).place = Place::Gone;
    }

    /// Whether the socket may hold data out of order.
    pub fn has_disorder(&mut self, at: Descriptor) -> bool {
        let socket = self.socket(at);
        socket.had_disorder && socket.tcp.has_out_of_order()
    }

    /// Makes the socket send an acknowledgement with its SACK blocks.
    pub fn acknowledge(&mut self, at: Descriptor, now: Instant) {
        self.socket(at).acknowledge(now);
    }
}

impl Socket {
    fn import(&mut self, image: &Image, unread: &[u8], unacknowledged: &[u8], now: Instant) {
        // The peer's FIN is not imported, but replayed; ours, if it has been acknowledged, counts as sent. Otherwise it
        // is sent again by shutdown.
        let data_end = image.rcv_nxt.wrapping_sub(u32::from(image.state.fin_received()));
        let start = if image.state.fin_acknowledged() { image.snd_end } else { image.snd_una };
        let sent = image.snd_nxt.wrapping_sub(start).min(unacknowledged.len() as u32);
        let fin = image.state.fin_acknowledged();
        let window = image.rcv_adv.wrapping_sub(data_end) + unread.len() as u32 + (1 << image.rcv_wscale);
        let kernels = Image {
            state: if fin { State::FinWait1 } else { State::Established },
            snd_una: start,
            snd_nxt: start.wrapping_add(sent + u32::from(fin)),
            snd_end: start.wrapping_add(sent),
            rcv_nxt: data_end,
            unread: unread.len() as u32,
            ts_recent: 0,
            cwnd: INITIAL_WINDOW,
            ssthresh: NO_THRESHOLD,
            srtt: 0,
            rttvar: 0,
            min_rtt: 0,
            reordering_seen: false,
            sent_ago: Some(0),
            silence: Silence::default(),
            ..*image
        };
        let memory = RECEIVE_BUFFER.max(window).next_power_of_two();
        self.tcp = Connection::from_image(&kernels, None, memory, now);
        self.place = Place::Imported;
        self.had_disorder = false;
        self.receive = vec![0; memory as usize];
        for (at, byte) in unread.iter().enumerate() {
            let seq = data_end.wrapping_sub(unread.len() as u32).wrapping_add(at as u32);
            self.receive[seq as usize & (memory as usize - 1)] = *byte;
        }
        self.send = unacknowledged[..sent as usize].iter().copied().collect();
        self.send_seq = start;
    }

    /// An acknowledgement is due at once: our TCP answers a keep-alive probe of the peer's with one (RFC 1122 section
    /// 4.2.3.6).
    fn acknowledge(&mut self, now: Instant) {
        let Some(image) = self.tcp.to_image(&self.hosts_part(), now) else { return };
        // Before the peer has sent a timestamp there is none to send the probe with, and nothing out of order either.
        if image.timestamps && image.ts_recent == 0 {
            return;
        }
        let timestamps = image.timestamps.then_some((image.ts_recent, 0));
        let probe = baton_tcp::Segment {
            seq: self.tcp.rcv_nxt().wrapping_sub(1),
            ack: self.tcp.snd_una(),
            flags: baton_wire::Flags::ACK,
            window: (image.snd_wnd >> image.snd_wscale) as u16,
            options: baton_wire::TcpOptions { timestamps, ..Default::default() },
            ..baton_tcp::Segment::default()
        };
        self.tcp.input(&probe, now);
    }
}
