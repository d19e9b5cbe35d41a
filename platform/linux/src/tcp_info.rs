//! TCP_INFO (Linux, `include/uapi/linux/tcp.h`), the part that moves need.

use crate::socket;
use std::io;
use std::os::fd::BorrowedFd;

/// The kernel's state of a connection. Times in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpInfo {
    /// Linux's state number.
    pub state: u8,
    /// Negotiated options: 1 timestamps, 2 SACK, 4 window scaling, 8 ECN, 64 timestamps in microseconds.
    pub options: u8,
    /// Window shift of the peer's windows.
    pub snd_wscale: u8,
    /// Window shift of our windows.
    pub rcv_wscale: u8,
    /// Payload bytes of a full segment.
    pub snd_mss: u32,
    /// Path MTU in bytes of IP packet.
    pub pmtu: u32,
    /// Smoothed round-trip time.
    pub rtt: u32,
    /// Its mean deviation.
    pub rttvar: u32,
    /// Slow start threshold in segments.
    pub snd_ssthresh: u32,
    /// Congestion window in segments.
    pub snd_cwnd: u32,
    /// MSS that we advertise.
    pub advmss: u32,
    /// Milliseconds since data was last sent, or sent again; since the socket was connected if none was.
    pub last_data_sent: u32,
    /// Segments retransmitted.
    pub total_retrans: u32,
    /// Time-outs in a row without an answer.
    pub retransmits: u8,
    /// Keep-alive or window probes without an answer.
    pub probes: u8,
    /// Doublings of the retransmission time-out, or of the time between window probes.
    pub backoff: u8,
    /// The retransmission time-out, doublings included.
    pub rto: u32,
    /// Segments in flight.
    pub unacked: u32,
    /// Milliseconds since data, and since an acknowledgement, was last received.
    pub last_received: [u32; 2],
    /// Segments received since the socket was connected.
    pub segs_in: u32,
    /// Bytes that the peer has acknowledged since the socket was connected.
    pub bytes_acked: u64,
    /// Bytes that have arrived since the socket was connected.
    pub bytes_received: u64,
    /// Smallest round-trip time measured.
    pub min_rtt: u32,
    /// Duplicates that the peer reported: segments that we retransmitted needlessly (RFC 2883).
    pub dsack_dups: u32,
    /// Reordering events seen.
    pub reord_seen: u32,
    /// Segments that came out of order since the socket was connected.
    pub rcv_ooopack: u32,
    /// The peer's window, in bytes.
    pub snd_wnd: u32,
    /// Our window, in bytes.
    pub rcv_wnd: u32,
}

/// Negotiated: timestamps.
pub const OPTION_TIMESTAMPS: u8 = 1;
/// Negotiated: SACK.
pub const OPTION_SACK: u8 = 2;
/// Negotiated: ECN.
pub const OPTION_ECN: u8 = 8;
/// The timestamps' clock runs in microseconds (Linux 6.7 and later).
pub const OPTION_MICROSECONDS: u8 = 64;

impl TcpInfo {
    /// Reads it from the kernel.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn read(fd: BorrowedFd<'_>) -> io::Result<TcpInfo> {
        let mut raw = [0u8; 320];
        let length = socket::get_bytes(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut raw)?;
        if length < 228 {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel's TCP_INFO is too old"));
        }
        Ok(TcpInfo::parse(&raw))
    }

    /// Parses a `struct tcp_info`; fields that the kernel does not have are 0.
    pub fn parse(given: &[u8]) -> TcpInfo {
        let mut raw = [0u8; 236];
        let length = given.len().min(raw.len());
        raw[..length].copy_from_slice(&given[..length]);
        let word = |at: usize| u32::from_ne_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        TcpInfo {
            retransmits: raw[2],
            probes: raw[3],
            backoff: raw[4],
            rto: word(8),
            unacked: word(24),
            last_received: [word(52), word(56)],
            segs_in: word(140),
            bytes_acked: long(120),
            bytes_received: long(128),
            state: raw[0],
            options: raw[5],
            snd_wscale: raw[6] & 15,
            rcv_wscale: raw[6] >> 4,
            snd_mss: word(16),
            last_data_sent: word(44),
            pmtu: word(60),
            rtt: word(68),
            rttvar: word(72),
            snd_ssthresh: word(76),
            snd_cwnd: word(80),
            advmss: word(84),
            total_retrans: word(100),
            min_rtt: word(148),
            dsack_dups: word(216),
            reord_seen: word(220),
            rcv_ooopack: word(224),
            snd_wnd: word(228),
            rcv_wnd: word(232),
        }
    }
}
