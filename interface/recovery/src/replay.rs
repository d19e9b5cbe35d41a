//! The replay: segments sent to the kernel when it gets a connection back, as if the peer had sent them. They carry the
//! state that an import cannot set: the peer's last acknowledgement and timestamp, the data behind a hole, its FIN.

use baton_device::{Checksum, Device, Frame};
use baton_image::Image;
use baton_wire::frame::{Header, Link, MAX_HEADER, TCP_CHECKSUM, Template};
use baton_wire::{Flags, TcpOptions};

/// Largest payload of a replayed segment, which every device accepts.
const MAX_PAYLOAD: u32 = 1200;

/// The data from which a replay is made.
pub struct Replay<'a> {
    /// The image that the kernel has imported.
    pub image: &'a Image,
    /// Ranges received out of order.
    pub ranges: &'a [(u32, u32)],
    /// Sequence number of a FIN behind a hole.
    pub fin_behind_hole: Option<u32>,
}

impl Replay<'_> {
    /// Sends the peer's last header, the out-of-order data, and the FIN to the kernel, in that order. `fetch` reads
    /// received bytes by sequence number. Returns the numbers of frames sent and of frames that the device did not
    /// accept.
    pub fn send<H: Device>(&self, host: &mut H, fetch: impl Fn(u32, &mut [u8])) -> (u64, u64) {
        let image = self.image;
        let link = Link { source: image.link.destination, destination: image.link.source, ..image.link };
        let template = Template::new(&image.flow.reversed(), &link, image.timestamps);
        // The kernel may take a round-trip sample from the echo: it is chosen so that the sample is the last known
        // round trip.
        let echo = image.ts_clock.wrapping_sub(image.srtt.div_ceil(1000));
        let timestamps = image.timestamps.then_some((image.ts_recent, echo));
        let options = TcpOptions { timestamps, ..TcpOptions::default() };
        let window = (image.snd_wnd >> image.snd_wscale).min(65535) as u16;
        let mut frame = Frame::with_capacity(MAX_HEADER + MAX_PAYLOAD as usize);
        let (mut sent, mut dropped) = (0, 0);
        let mut transmit = |seq: u32, flags: Flags, length: u32| {
            let header = Header { seq, ack: image.snd_una, flags, window, options: &options, ecn: 0, ident: 0 };
            frame.set_length(MAX_HEADER + length as usize);
            let headers = template.emit(&header, length as usize, frame.bytes_mut());
            frame.set_length(headers + length as usize);
            fetch(seq, &mut frame.bytes_mut()[headers..]);
            frame.checksum = Checksum::Partial { start: template.tcp_offset() as u16, offset: TCP_CHECKSUM as u16 };
            frame.segmentation = None;
            frame.interface = image.link.interface;
            if host.transmit(&mut frame) { sent += 1 } else { dropped += 1 }
        };
        let in_order = image.rcv_nxt.wrapping_sub(u32::from(image.state.fin_received()));
        // One segment carries both: if the kernel answered before it knew of the FIN, it would send to a peer that may
        // have closed, and be reset.
        if image.state.fin_received() && !cfg!(feature = "sabotage-forget-fin") {
            transmit(in_order, Flags::ACK | Flags::FIN, 0);
            return (sent, dropped);
        }
        // Without the peer's timestamp this segment would change nothing in the kernel, except that our FIN is
        // acknowledged.
        if image.ts_recent != 0 || !image.timestamps || image.state.fin_acknowledged() {
            transmit(in_order, Flags::ACK, 0);
        }
        for (left, right) in self.ranges {
            let mut seq = *left;
            while seq != *right {
                let length = right.wrapping_sub(seq).min(MAX_PAYLOAD);
                transmit(seq, Flags::ACK, length);
                seq = seq.wrapping_add(length);
            }
        }
        if let Some(fin) = self.fin_behind_hole {
            transmit(fin, Flags::ACK | Flags::FIN, 0);
        }
        (sent, dropped)
    }
}
