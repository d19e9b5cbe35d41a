//! Rewrites the kernel's segments so that they carry the NIC's acknowledgement.

use crate::before;
use crate::entry::AckEntry;
use baton_device::{Checksum, Frame};
use baton_wire::TcpFrame;
use baton_wire::checksum::Sum;
use baton_wire::frame::TCP;
use baton_wire::offset::tcp;

// Option kinds (RFC 9293 section 3.2, RFC 2018).
const NOP: u8 = 1;
const END: u8 = 0;
const SACK: u8 = 5;

/// Raises the acknowledgement of a frame of the kernel's that acknowledges less than the NIC has. The frame gets the
/// NIC's acknowledgement and the window field that keeps its right edge, and loses the SACK blocks that the
/// acknowledgement covers. Blocks below the kernel's own acknowledgement stay: they report duplicates (RFC 2883).
pub(crate) fn raise(frame: &mut Frame, parsed: &TcpFrame, entry: &AckEntry) {
    let start = parsed.tcp_offset;
    let partial = matches!(frame.checksum, Checksum::Partial { .. });
    let end = parsed.payload_offset;
    let old = Sum::new().bytes(&frame.bytes()[start..end]).folded();
    let window = entry.window_at(entry.acked);
    let header = &mut frame.bytes_mut()[start..end];
    header[tcp::ACK..tcp::DATA_OFFSET].copy_from_slice(&entry.acked.to_be_bytes());
    header[tcp::WINDOW..tcp::CHECKSUM].copy_from_slice(&window.to_be_bytes());
    filter_sack(&mut header[TCP..], parsed.ack, entry.acked);
    if !partial {
        // RFC 1624: the checksum changes by the difference of the headers' sums. Headers are even in length.
        let header = &mut frame.bytes_mut()[start..end];
        let sum = u16::from_be_bytes([header[tcp::CHECKSUM], header[tcp::CHECKSUM + 1]]);
        let new = Sum::new().bytes(header).folded();
        let sum = Sum::new().word(!sum).word(!old).word(new).finish();
        header[tcp::CHECKSUM..tcp::URGENT].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Removes the parts of SACK blocks that lie between the acknowledgements `low` and `high` from the options.
fn filter_sack(mut area: &mut [u8], low: u32, high: u32) {
    while let Some(kind) = area.first().copied() {
        let length = match kind {
            END => return,
            NOP => 1,
            _ => area.get(1).map_or(0, |length| usize::from(*length)),
        };
        if length == 0 || kind != NOP && length < 2 || length > area.len() {
            return;
        }
        let (option, rest) = area.split_at_mut(length);
        if kind == SACK && length % 8 == 2 {
            keep_blocks(option, low, high);
        }
        area = rest;
    }
}

/// Rewrites one SACK option for [`filter_sack`], and fills the rest of its room with NOPs.
fn keep_blocks(option: &mut [u8], low: u32, high: u32) {
    let four = |bytes: &[u8]| u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let mut kept = 2;
    for at in (2..option.len()).step_by(8) {
        let (left, right) = (four(&option[at..]), four(&option[at + 4..]));
        let duplicate = before(left, low);
        if !duplicate && !before(high, right) {
            continue;
        }
        let left = if !duplicate && before(left, high) { high } else { left };
        option[kept..kept + 4].copy_from_slice(&left.to_be_bytes());
        option[kept + 4..kept + 8].copy_from_slice(&right.to_be_bytes());
        kept += 8;
    }
    if kept == 2 {
        option.fill(NOP);
    } else {
        option[1] = kept as u8;
        option[kept..].fill(NOP);
    }
}
