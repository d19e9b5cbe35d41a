//! Exports a connection from the kernel: its numbers, then its queues, then the purge that leaves a shell.

use crate::examine::system;
use crate::import::is_scaled;
use crate::shell::{self, Beginning, Leave, Queue, Saved};
use baton_image::{Image, MIN_MSS, Silence, State};
use baton_linux::socket::{self, Pieces};
use baton_linux::tcp_info::{self, TcpInfo};
use baton_moves::Refusal;
use baton_wire::Flow;
use baton_wire::frame::Link;
use rustix::net::RecvFlags;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

const TCP_REPAIR_WINDOW: i32 = 29;
const TCP_TIMESTAMP: i32 = 24;
/// Linux's default of tcp_retries2. Whoever exports a connection knows its namespace's, and whether there is slow start
/// after idle times.
const RETRIES: u8 = 15;
/// Microseconds after which the kernel tries to send again what it could not send (TCP_RESOURCE_PROBE_INTERVAL).
const LOCAL_AGAIN: u64 = 500_000;

/// A connection in repair mode whose numbers have been read. Each of its operations is given the same descriptor again.
pub struct Exporter {
    image: Image,
    local: SocketAddr,
    peer: SocketAddr,
    write_seq: u32,
    counted: Counted,
    saved: Saved,
}

/// What the kernel has counted of a connection since its socket was connected, or reconnected by an import.
#[derive(Clone, Copy)]
struct Counted {
    /// Segments sent again.
    retransmitted: u32,
    /// Bytes acknowledged by the peer, and received.
    bytes: (u64, u64),
}

trait Step<T> {
    fn step(self, name: &'static str) -> Result<T, Refusal>;
}

impl<T> Step<T> for io::Result<T> {
    fn step(self, name: &'static str) -> Result<T, Refusal> {
        self.map_err(|error| system(name, &error))
    }
}

/// Options that are in the image.
struct Options {
    nodelay: bool,
    cork: bool,
    idle: u32,
    interval: u32,
    count: u32,
    user_timeout: u32,
}

fn options(fd: BorrowedFd<'_>) -> io::Result<Options> {
    let tcp = |option| socket::get(fd, libc::IPPROTO_TCP, option);
    Ok(Options {
        nodelay: tcp(libc::TCP_NODELAY)? != 0,
        cork: tcp(libc::TCP_CORK)? != 0,
        idle: tcp(libc::TCP_KEEPIDLE)? as u32,
        interval: tcp(libc::TCP_KEEPINTVL)? as u32,
        count: tcp(libc::TCP_KEEPCNT)? as u32,
        user_timeout: tcp(libc::TCP_USER_TIMEOUT)? as u32,
    })
}

/// The TTL and class that the socket's packets carry.
///
/// # Errors
/// The failed system call's.
pub fn link_settings(fd: BorrowedFd<'_>, v4: bool) -> io::Result<(u8, u8)> {
    let (ttl, tos) = if v4 {
        (socket::get(fd, libc::IPPROTO_IP, libc::IP_TTL)?, socket::get(fd, libc::IPPROTO_IP, libc::IP_TOS)?)
    } else {
        let hops = socket::get(fd, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS)?;
        (hops, socket::get(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS)?)
    };
    Ok((if ttl <= 0 { 64 } else { ttl as u8 }, tos.max(0) as u8))
}

impl Exporter {
    /// Blocks the socket's input by a filter, enters repair mode and reads the sequence numbers twice: they
    /// must not change. Frames must already be stolen, and `saved` read from the socket. On an error the socket is
    /// unchanged.
    ///
    /// # Errors
    /// Why the connection stays.
    pub fn begin(fd: BorrowedFd<'_>, flow: Flow, link: Link, saved: &Saved) -> Result<Exporter, Refusal> {
        let exporter = Self::read(fd, flow, link, saved);
        if exporter.is_err() {
            let _ = undo(fd, saved);
        }
        exporter
    }

    fn read(fd: BorrowedFd<'_>, flow: Flow, link: Link, saved: &Saved) -> Result<Exporter, Refusal> {
        // Segments that the kernel got before the steal may still wait for its receive thread. The NIC has copies of
        // them.
        shell::block_input(fd).step("SO_ATTACH_FILTER")?;
        shell::repair(fd).step("TCP_REPAIR")?;
        let first = Numbers::read(fd)?;
        let (image, numbers, counted) = read_image(fd, flow, link, saved)?;
        if numbers != first {
            return Err(Refusal::Unsettled);
        }
        let local = socket::local_address(fd).step("getsockname")?;
        // Fails if the peer has ended or reset the connection meanwhile.
        let peer = socket::peer_address(fd).step("getpeername")?;
        Ok(Exporter { image, local, peer, write_seq: numbers.write_seq, counted, saved: saved.clone() })
    }

    /// The image that was read.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Segments that the kernel has sent again since the socket was connected, or reconnected by an import.
    pub fn retransmitted(&self) -> u32 {
        self.counted.retransmitted
    }

    /// Bytes that the peer has acknowledged and bytes that have arrived since the socket was connected, or reconnected
    /// by an import.
    pub fn carried(&self) -> (u64, u64) {
        self.counted.bytes
    }

    /// Copies the queues' bytes: unread ones, then those in flight and unsent. The pieces must be exactly as long as
    /// the image says.
    ///
    /// # Errors
    /// Why the connection stays; the caller then calls [`Exporter::abandon`].
    pub fn copy_queues(&self, fd: BorrowedFd<'_>, unread: &Pieces<'_>, unacknowledged: &Pieces<'_>) -> Result<(), Refusal> {
        for (queue, pieces, name) in [(Queue::Receive, unread, "receive queue"), (Queue::Send, unacknowledged, "send queue")] {
            if pieces.length() == 0 {
                continue;
            }
            shell::select(fd, queue).step("TCP_REPAIR_QUEUE")?;
            let got = socket::receive_pieces(fd, pieces, libc::MSG_PEEK | libc::MSG_DONTWAIT).step(name)?;
            if got > pieces.length() {
                copy_tail(fd, pieces, got).step(name)?;
            } else if got < pieces.length() {
                return Err(system(name, &io::ErrorKind::UnexpectedEof.into()));
            }
        }
        shell::select(fd, Queue::None).step("TCP_REPAIR_QUEUE")
    }

    /// Leaves repair mode; the connection goes on in the kernel.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn abandon(self, fd: BorrowedFd<'_>) -> io::Result<()> {
        undo(fd, &self.saved)
    }

    /// Purges the kernel's state: the socket becomes a shell. Returns what must be put back on import.
    ///
    /// # Errors
    /// If the kernel refuses a step; the connection must then be imported from its image at once.
    pub fn purge(self, fd: BorrowedFd<'_>) -> Result<Saved, (Saved, Refusal)> {
        let steps = || -> Result<(), Refusal> {
            socket::set(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 0).step("SO_KEEPALIVE")?;
            let beginning = Beginning { snd: self.write_seq, rcv: self.image.rcv_nxt, scaled: is_scaled(&self.image) };
            shell::reassociate(fd, self.local, self.peer, beginning, None).step("reconnect")?;
            self.saved.remember(fd);
            // The shell stays in repair mode, which sets SO_REUSEADDR. The program's value is put back for programs
            // that read the option or bind the port.
            self.saved.write_reuse(fd).step("SO_REUSEADDR")
        };
        match steps() {
            Ok(()) => Ok(self.saved),
            Err(stay) => Err((self.saved, stay)),
        }
    }
}

/// Copies the last bytes of a queue into pieces that are shorter than what is `shown` of it: the kernel keeps a segment
/// until all of it is acknowledged, and repair mode then returns its acknowledged front, too.
fn copy_tail(fd: BorrowedFd<'_>, pieces: &Pieces<'_>, shown: usize) -> io::Result<()> {
    let mut all = vec![0u8; shown];
    let (_, got) = rustix::net::recv(fd, &mut all, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    if got != shown {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    pieces.write(&all[shown - pieces.length()..]);
    Ok(())
}

/// Writes the options of a socket into the image of the connection that the NIC has made for it.
///
/// # Errors
/// The failed system call's.
pub fn take_options(fd: BorrowedFd<'_>, saved: &Saved, image: &mut Image) -> io::Result<()> {
    let options = options(fd)?;
    image.nodelay = options.nodelay;
    image.cork = options.cork;
    image.keepalive = saved.keepalive();
    image.keepalive_idle = options.idle;
    image.keepalive_interval = options.interval;
    image.keepalive_count = options.count;
    image.user_timeout = options.user_timeout;
    Ok(())
}

/// Undoes [`Exporter::begin`]: the connection receives and sends again, in the kernel.
///
/// # Errors
/// The failed system call's.
pub fn undo(fd: BorrowedFd<'_>, saved: &Saved) -> io::Result<()> {
    shell::unblock_input(fd, saved)?;
    // What is in flight may have been acknowledged while the input was blocked.
    let waits = socket::queue_bytes(fd, socket::SIOCOUTQ).map_or(true, |bytes| bytes > 0);
    saved.leave_repair(fd, if waits { Leave::Probing } else { Leave::Silently })
}

/// Sequence numbers and queues of a socket in repair mode.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Numbers {
    /// The number behind the send queue; a queued FIN counts.
    write_seq: u32,
    /// Bytes of the send queue, and those of them that were never sent.
    queued: u32,
    unsent: u32,
    rcv_nxt: u32,
    /// Bytes of the receive queue.
    unread: u32,
}

impl Numbers {
    fn read(fd: BorrowedFd<'_>) -> Result<Numbers, Refusal> {
        shell::select(fd, Queue::Send).step("TCP_REPAIR_QUEUE")?;
        let write_seq = shell::queue_seq(fd).step("TCP_QUEUE_SEQ")?;
        let queued = socket::queue_bytes(fd, socket::SIOCOUTQ).step("SIOCOUTQ")?;
        let unsent = socket::queue_bytes(fd, socket::SIOCOUTQNSD).step("SIOCOUTQNSD")?;
        shell::select(fd, Queue::Receive).step("TCP_REPAIR_QUEUE")?;
        let rcv_nxt = shell::queue_seq(fd).step("TCP_QUEUE_SEQ")?;
        let unread = socket::queue_bytes(fd, socket::SIOCINQ).step("SIOCINQ")?;
        Ok(Numbers { write_seq, queued, unsent, rcv_nxt, unread })
    }
}

/// The peer's MSS option, of a socket in repair mode: if the route limits the segments now, what the peer takes (Linux,
/// tcp_getsockopt, `mss_clamp`), since the route may change, and while an IPv6 connection's own address is gone it has
/// room for 48 bytes. Otherwise what makes the kernel's present segments: it has them for good.
fn peer_mss(fd: BorrowedFd<'_>, info: &TcpInfo, headers: u32) -> Result<u16, Refusal> {
    let options = if info.options & tcp_info::OPTION_TIMESTAMPS != 0 { 12 } else { 0 };
    let present = info.snd_mss + options;
    let mss = match present + headers >= info.pmtu {
        true => socket::get(fd, libc::IPPROTO_TCP, libc::TCP_MAXSEG).step("TCP_MAXSEG")? as u32,
        false => present,
    };
    Ok(mss.clamp(MIN_MSS.into(), u16::MAX.into()) as u16)
}

/// The image, the numbers that are in it, and what the kernel has counted.
fn read_image(fd: BorrowedFd<'_>, flow: Flow, link: Link, saved: &Saved) -> Result<(Image, Numbers, Counted), Refusal> {
    let info = TcpInfo::read(fd).step("TCP_INFO")?;
    // It may have arrived since the connection was examined.
    crate::examine::check_urgent(fd)?;
    let state = State::from_number(info.state).ok_or(Refusal::State(crate::examine::state_name(info.state)))?;
    let options = options(fd).step("getsockopt")?;
    let numbers @ Numbers { write_seq, queued, unsent, rcv_nxt, unread } = Numbers::read(fd)?;
    shell::select(fd, Queue::None).step("TCP_REPAIR_QUEUE")?;
    let window = read_window(fd)?;
    let timestamps = info.options & tcp_info::OPTION_TIMESTAMPS != 0;
    let ts_clock = if timestamps { socket::get(fd, libc::IPPROTO_TCP, TCP_TIMESTAMP).step("TCP_TIMESTAMP")? as u32 } else { 0 };
    if timestamps && info.options & tcp_info::OPTION_MICROSECONDS != 0 {
        return Err(Refusal::MicrosecondClock);
    }
    // From Linux 6.7 on the kernel clears the lowest bit of the value that it returns: a segment may have carried one
    // more.
    let ts_clock = ts_clock.wrapping_add(1);
    let fin = u32::from(state.fin_queued());
    let image = Image {
        flow,
        snd_wscale: info.snd_wscale,
        rcv_wscale: info.rcv_wscale,
        sack: info.options & tcp_info::OPTION_SACK != 0,
        timestamps,
        ecn: info.options & tcp_info::OPTION_ECN != 0,
        mss: peer_mss(fd, &info, if flow.is_v4() { 40 } else { 60 })?,
        link,
        mtu: info.pmtu.max(68),
        nodelay: options.nodelay,
        cork: options.cork,
        keepalive: saved.keepalive(),
        keepalive_idle: options.idle,
        keepalive_interval: options.interval,
        keepalive_count: options.count,
        user_timeout: options.user_timeout,
        retries: RETRIES,
        slow_start_after_idle: true,
        state,
        snd_una: write_seq.wrapping_sub(queued),
        snd_nxt: write_seq.wrapping_sub(unsent),
        snd_end: write_seq.wrapping_sub(fin),
        snd_wnd: window[1],
        snd_wl1: window[0],
        max_window: window[2].max(window[1]),
        rcv_nxt,
        rcv_adv: window[4].wrapping_add(window[3]),
        unread,
        ts_recent: 0,
        ts_clock,
        cwnd: info.snd_cwnd,
        ssthresh: info.snd_ssthresh,
        srtt: info.rtt,
        rttvar: info.rttvar / 4,
        min_rtt: if info.min_rtt == u32::MAX { 0 } else { info.min_rtt },
        reordering_seen: info.reord_seen > 0,
        sent_ago: Some(info.last_data_sent.saturating_mul(1000)),
        silence: silence(&info, unsent),
    };
    image.check().map_err(|_| Refusal::Unsettled)?;
    let counted = Counted { retransmitted: info.total_retrans, bytes: (info.bytes_acked, info.bytes_received) };
    Ok((image, numbers, counted))
}

/// How long the peer has not answered. The kernel shows how often it has sent again, and when it did so last: the
/// time-outs before that doubled up to the present one.
fn silence(info: &TcpInfo, unsent: u32) -> Silence {
    let millis = |millis: u32| u64::from(millis) * 1000;
    let heard = millis(info.last_received[0].min(info.last_received[1]));
    // Of time-outs that doubled up to `last`, the sum of all but the first.
    let doubled = |first: u64, last: u64| 2 * last.saturating_sub(first);
    let rto = u64::from(info.rto);
    let base = (rto >> info.backoff.min(31)).max(1);
    let unanswered_for = if info.unacked > 0 && info.retransmits > 0 {
        // Some could not be sent, which doubles nothing.
        let local = u64::from(info.retransmits.saturating_sub(info.backoff.max(1))) * LOCAL_AGAIN;
        Some(millis(info.last_data_sent) + local + doubled(base, rto >> 1))
    } else if info.unacked == 0 && unsent > 0 && info.backoff > 0 {
        // Window probes: here the time-out shown is the first one's. Each is answered at once, if at all.
        let last = rto << (info.backoff - 1).min(16);
        Some(doubled(rto, last) + heard.min(2 * last))
    } else {
        None
    };
    Silence { unanswered_for, backoff: info.backoff, probes: info.probes, heard_ago: heard, received: info.segs_in }
}

/// {snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup}.
fn read_window(fd: BorrowedFd<'_>) -> Result<[u32; 5], Refusal> {
    let mut raw = [0u8; 20];
    socket::get_bytes(fd, libc::IPPROTO_TCP, TCP_REPAIR_WINDOW, &mut raw).step("TCP_REPAIR_WINDOW")?;
    Ok(std::array::from_fn(|at| u32::from_ne_bytes([raw[4 * at], raw[4 * at + 1], raw[4 * at + 2], raw[4 * at + 3]])))
}
