//! For how long the peer has not answered. TCP_REPAIR neither shows nor accepts that, but it can be computed from
//! TCP_INFO.

use crate::ImageError;
use crate::codec::{Field, Reader, Writer, fields};

/// Time for which a peer has not answered, in microseconds at the moment of the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Silence {
    /// Since the first unanswered retransmission, or probe of a closed window; `None` if there was none.
    pub unanswered_for: Option<u64>,
    /// Time-outs in a row, each of which doubled the next one.
    pub backoff: u8,
    /// Keep-alive or window probes without an answer.
    pub probes: u8,
    /// Since the peer's last segment.
    pub heard_ago: u64,
    /// Segments that the kernel has received since it got the connection. At a restore the NIC's replay is the first
    /// one.
    pub received: u32,
}
fields!(Silence { unanswered_for, backoff, probes, heard_ago, received });
