//! Imports a connection into the kernel, on the same descriptor.

use crate::shell::{self, Beginning, Leave, Queue, Saved};
use baton_image::Image;
use baton_linux::buffers::{Buffer, Side};
use baton_linux::socket::{self, Pieces};
use baton_linux::tcp_info::TcpInfo;
use baton_moves::Refusal;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

const TCP_REPAIR_OPTIONS: i32 = 22;
const TCP_TIMESTAMP: i32 = 24;
const TCP_REPAIR_WINDOW: i32 = 29;

/// The step of an import that a policy of the host's may refuse: bind(2) and connect(2). It may be tried again.
pub const RECONNECT: &str = "reconnect";

/// A failed step of an import.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {error}")]
pub struct ImportError {
    /// The call that failed.
    pub step: &'static str,
    /// The kernel's error.
    pub error: io::Error,
}

impl From<ImportError> for Refusal {
    fn from(failed: ImportError) -> Refusal {
        Refusal::Lost(failed.step, failed.error.to_string())
    }
}

trait Step<T> {
    fn step(self, step: &'static str) -> Result<T, ImportError>;
}

impl<T> Step<T> for io::Result<T> {
    fn step(self, step: &'static str) -> Result<T, ImportError> {
        self.map_err(|error| ImportError { step, error })
    }
}

/// A connection that is in the kernel again and receives, but does not send yet.
pub struct Importer {
    image: Image,
    /// Bytes at the front of the send queue that the kernel has already.
    given: usize,
    saved: Saved,
    /// The size of the socket's send buffer, if it was too small for the queue's bytes: it gets that back.
    send: Option<Buffer>,
}

impl Importer {
    /// Turns the shell back into a connection: numbers, options, unread bytes, bytes in flight. After that it receives,
    /// so frames may flow, and [`Importer::finish`] lets it send.
    ///
    /// With `measure` and bytes in flight the kernel learns the round trip from the peer's last header, which is
    /// replayed to it: TCP_REPAIR cannot set it, and without one it would wait 1 to 3 s before it sends anything again
    /// (Linux, TCP_TIMEOUT_INIT, TCP_TIMEOUT_FALLBACK). It takes a round trip only from an acknowledgement of something
    /// new (RFC 7323 section 4.1), so the byte before those in flight, which the peer has acknowledged, counts as in
    /// flight, too. Its value does not matter: the peer takes it for what it has already.
    ///
    /// # Errors
    /// The step that the kernel refused.
    pub fn begin(
        fd: BorrowedFd<'_>,
        image: &Image,
        (local, peer): (SocketAddr, SocketAddr),
        unread: &Pieces<'_>,
        unacknowledged: &Pieces<'_>,
        saved: &Saved,
        measure: bool,
    ) -> Result<Importer, ImportError> {
        let saved = &saved.with_reuse_of_shell(fd);
        shell::repair(fd).step("TCP_REPAIR")?;
        // The peer's FIN is not imported, but replayed to the kernel. Ours is sent again by a shutdown, unless the peer
        // has acknowledged it.
        let rcv_data_end = image.rcv_nxt.wrapping_sub(u32::from(image.state.fin_received()));
        let snd_start = if image.state.fin_acknowledged() { image.snd_end } else { image.snd_una };
        let first_unread = rcv_data_end.wrapping_sub(unread.length() as u32);
        let measured = u32::from(measure && image.timestamps && unacknowledged.length() > 0 && image.snd_nxt != snd_start);
        // An IPv6 socket works out its segment size when it connects, and cannot be set later.
        let mss = (!image.flow.is_v4()).then_some(image.mss);
        let beginning = Beginning { snd: snd_start.wrapping_sub(measured), rcv: first_unread, scaled: is_scaled(image) };
        shell::reassociate(fd, local, peer, beginning, mss).step(RECONNECT)?;
        write_options(fd, image).step("TCP_REPAIR_OPTIONS")?;
        let receive = Buffer::make_room(fd, Side::Receive, unread.length(), 2).step("SO_RCVBUFFORCE")?;
        let send = Buffer::make_room(fd, Side::Send, unacknowledged.length(), 1).step("SO_SNDBUFFORCE")?;
        refill(fd, Queue::Receive, unread).step("receive queue")?;
        if let Some(receive) = receive {
            // Before the kernel sends anything: with the larger buffer it would advertise a larger window.
            receive.put_back(fd).step("SO_RCVBUFFORCE")?;
        }
        if measured > 0 {
            refill(fd, Queue::Send, &unacknowledged.front(1)).step("send queue")?;
            // By itself: a part of a segment that is acknowledged does not count.
            count_as_sent(fd).step("send queue")?;
        }
        let sent = image.snd_nxt.wrapping_sub(snd_start).min(unacknowledged.length() as u32) as usize;
        refill(fd, Queue::Send, &unacknowledged.front(sent)).step("send queue")?;
        count_as_sent(fd).step("send queue")?;
        if image.state.fin_acknowledged() {
            import_fin(fd).step("shutdown")?;
        }
        shell::select(fd, Queue::None).step("TCP_REPAIR_QUEUE")?;
        write_window(fd, image, rcv_data_end, measured).step("TCP_REPAIR_WINDOW")?;
        if image.flow.is_v4() {
            // The kernel works out the segment size anew when IP options change; setting none is enough.
            let _ = socket::set_bytes(fd, libc::IPPROTO_IP, libc::IP_OPTIONS, &[]);
        }
        saved.remember(fd);
        shell::unblock_input(fd, saved).step("SO_DETACH_FILTER")?;
        Ok(Importer { image: *image, given: sent, saved: saved.clone(), send })
    }

    /// Leaves repair mode, sends what was unsent, and shuts down what was shut down. `unacknowledged` is the send queue
    /// as it was when the import began. An `idle` connection ([`baton_image::Stay::is_idle`]) says nothing to its peer;
    /// any other sends an acknowledgement.
    ///
    /// # Errors
    /// The step that the kernel refused.
    pub fn finish(self, fd: BorrowedFd<'_>, unacknowledged: &Pieces<'_>, idle: bool) -> Result<(), ImportError> {
        let leave = if idle { Leave::Silently } else { Leave::Probing };
        self.saved.leave_repair(fd, leave).step("TCP_REPAIR")?;
        let mut unsent = unacknowledged.skip(self.given);
        while unsent.length() > 0 && !is_reset(fd) {
            let sent = match socket::send_pieces(fd, &unsent, libc::MSG_DONTWAIT) {
                Ok(sent) => sent,
                // The peer has reset the connection since the line above.
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) => return Ok(()),
                Err(error) => return Err(ImportError { step: "unsent data", error }),
            };
            unsent = unsent.skip(sent);
        }
        if let Some(send) = self.send {
            send.put_back(fd).step("SO_SNDBUFFORCE")?;
        }
        if self.image.state.fin_queued() {
            match socket::shutdown_write(fd) {
                // The peer has reset it meanwhile, or acknowledged our FIN and closed.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
                other => other.step("shutdown")?,
            }
        }
        Ok(())
    }
}

/// Whether the peer has reset the connection: with a frame that was held during the move, say. The socket keeps the
/// error until a call fails with it, and it is the program's call that has to: so nothing is sent then.
fn is_reset(fd: BorrowedFd<'_>) -> bool {
    /// Linux's number of the state.
    const CLOSE: u8 = 7;
    TcpInfo::read(fd).is_ok_and(|info| info.state == CLOSE)
}

/// Completes an [`Importer::finish`] whose process died in the middle, as far as the socket itself shows what is
/// missing.
///
/// # Errors
/// The step that the kernel refused.
pub fn resume_sending(fd: BorrowedFd<'_>, image: &Image, unacknowledged: &Pieces<'_>, saved: &Saved) -> Result<(), ImportError> {
    shell::repair(fd).step("TCP_REPAIR")?;
    shell::select(fd, Queue::Send).step("TCP_REPAIR_QUEUE")?;
    let written = shell::queue_seq(fd).step("TCP_QUEUE_SEQ")?;
    shell::select(fd, Queue::None).step("TCP_REPAIR_QUEUE")?;
    let given = (written.wrapping_sub(image.snd_una) as usize).min(unacknowledged.length());
    Importer { image: *image, given, saved: saved.clone(), send: None }.finish(fd, unacknowledged, false)
}

pub(crate) fn is_scaled(image: &Image) -> bool {
    image.snd_wscale != 0 || image.rcv_wscale != 0
}

fn write_options(fd: BorrowedFd<'_>, image: &Image) -> io::Result<()> {
    let mut raw = Vec::with_capacity(32);
    let mut option = |code: u32, value: u32| {
        raw.extend_from_slice(&code.to_ne_bytes());
        raw.extend_from_slice(&value.to_ne_bytes());
    };
    option(2, u32::from(image.mss));
    if is_scaled(image) {
        option(3, u32::from(image.rcv_wscale) << 16 | u32::from(image.snd_wscale));
    }
    if image.sack {
        option(4, 0);
    }
    if image.timestamps {
        option(8, 0);
    }
    socket::set_bytes(fd, libc::IPPROTO_TCP, TCP_REPAIR_OPTIONS, &raw)?;
    if image.timestamps {
        // Bit 0 would select the microsecond clock; the next even value keeps the clock from running backwards.
        let clock = image.ts_clock.wrapping_add(1) & !1;
        socket::set(fd, libc::IPPROTO_TCP, TCP_TIMESTAMP, clock as i32)?;
    }
    Ok(())
}

fn write_window(fd: BorrowedFd<'_>, image: &Image, rcv_nxt: u32, measured: u32) -> io::Result<()> {
    let edge = image.rcv_adv.wrapping_sub(rcv_nxt);
    // A FIN that was acknowledged is sent again, or a byte: the window begins one earlier, and has room for it also
    // where the peer has closed it.
    let send = image.snd_wnd.saturating_add(u32::from(image.state.fin_acknowledged()) + measured);
    let words = [image.snd_wl1, send, image.max_window.max(send), edge, rcv_nxt];
    let raw: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    socket::set_bytes(fd, libc::IPPROTO_TCP, TCP_REPAIR_WINDOW, &raw)
}

/// Everything in the send queue was sent before, and must count so: an acknowledgement of more than the kernel knows to
/// be sent would be ignored for ever. While frames of the socket still wait at its device, autocorking leaves the end
/// of the queue uncounted; TCP_NODELAY pushes it.
fn count_as_sent(fd: BorrowedFd<'_>) -> io::Result<()> {
    if socket::queue_bytes(fd, socket::SIOCOUTQNSD)? == 0 {
        return Ok(());
    }
    let nodelay = socket::get(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY)?;
    socket::set(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    socket::set(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, nodelay)?;
    match socket::queue_bytes(fd, socket::SIOCOUTQNSD)? {
        0 => Ok(()),
        left => Err(io::Error::other(format!("{left} bytes in flight count as unsent"))),
    }
}

/// Makes our FIN count as sent, which the peer has acknowledged. In repair mode that is so at once. Otherwise the
/// kernel may send it later (pacing), and until then it ignores every segment that acknowledges it, the peer's FIN too.
fn import_fin(fd: BorrowedFd<'_>) -> io::Result<()> {
    shell::select(fd, Queue::Send)?;
    socket::shutdown_write(fd)?;
    match socket::queue_bytes(fd, socket::SIOCOUTQNSD)? {
        0 => Ok(()),
        _ => Err(io::Error::other("our FIN counts as unsent")),
    }
}

fn refill(fd: BorrowedFd<'_>, queue: Queue, pieces: &Pieces<'_>) -> io::Result<()> {
    let mut left = *pieces;
    if left.length() == 0 {
        return Ok(());
    }
    shell::select(fd, queue)?;
    while left.length() > 0 {
        let sent = socket::send_pieces(fd, &left, libc::MSG_DONTWAIT)?;
        left = left.skip(sent);
    }
    Ok(())
}
