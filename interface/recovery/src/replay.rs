//! Segments that the kernel receives when a connection is restored to it, as if the peer sent them: the peer's last header, the data behind
//! a hole (which TCP_REPAIR cannot carry), its FIN.

use baton_device::{Checksum, Device, Frame};
use baton_image::Image;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Flags, TcpOptions};

/// Payload of a replayed segment at most: what every device takes.
const PIECE: u32 = 1200;

/// What is replayed to the kernel.
pub struct Replay<'a> {
    /// The connection as it was given back.
    pub image: &'a Image,
    /// Ranges received out of order.
    pub ranges: &'a [(u32, u32)],
    /// Sequence number of a FIN behind a hole.
    pub fin_behind_hole: Option<u32>,
}

impl Replay<'_> {
    /// Sends the kernel the peer's last header, everything out of order, and the FIN, in that order. `fetch` reads received bytes by
    /// sequence number. Returns how many frames went and how many the device had no room for.
    pub fn say<H: Device>(&self, host: &mut H, fetch: impl Fn(u32, &mut [u8])) -> (u64, u64) {
        let image = self.image;
        let link = Link { source: image.link.destination, destination: image.link.source, ..image.link };
        let template = Template::new(&image.flow.reversed(), &link, image.timestamps);
        let timestamps = image.timestamps.then_some((image.ts_recent, image.ts_clock));
        let options = TcpOptions { timestamps, ..TcpOptions::default() };
        let window = (image.snd_wnd >> image.snd_wscale).min(65535) as u16;
        let mut frame = Frame::with_capacity(MAX_HEADER + PIECE as usize);
        let (mut sent, mut dropped) = (0, 0);
        let mut send = |seq: u32, flags: Flags, length: u32| {
            let header = Header { seq, ack: image.snd_una, flags, window, options: &options, ecn: 0, ident: 0 };
            frame.set_length(MAX_HEADER + length as usize);
            let headers = template.emit(&header, length as usize, frame.bytes_mut());
            frame.set_length(headers + length as usize);
            fetch(seq, &mut frame.bytes_mut()[headers..]);
            frame.checksum = Checksum::Partial { start: template.tcp_offset() as u16, offset: 16 };
            frame.segmentation = None;
            frame.interface = image.link.interface;
            if host.transmit(&mut frame) { sent += 1 } else { dropped += 1 }
        };
        let in_order = image.rcv_nxt.wrapping_sub(u32::from(image.state.fin_received()));
        // In one segment with all else: a kernel that answered before it knows of the FIN would ask a peer that may be gone, and be reset.
        if image.state.fin_received() {
            send(in_order, Flags::ACK | Flags::FIN, 0);
            return (sent, dropped);
        }
        // Without the peer's timestamp there is nothing to learn from it, except that our FIN is acknowledged.
        if image.ts_recent != 0 || !image.timestamps || image.state.fin_acknowledged() {
            send(in_order, Flags::ACK, 0);
        }
        for (left, right) in self.ranges {
            let mut seq = *left;
            while seq != *right {
                let length = right.wrapping_sub(seq).min(PIECE);
                send(seq, Flags::ACK, length);
                seq = seq.wrapping_add(length);
            }
        }
        if let Some(fin) = self.fin_behind_hole {
            send(fin, Flags::ACK | Flags::FIN, 0);
        }
        (sent, dropped)
    }
}
