//! Moves through the connection image: before every N-th event each connection ends in an image and is made anew from
//! it, from NIC to NIC or by a kernel in between.

use crate::socket::Socket;
use crate::stream::{FIRST_WINDOW, Stream};
use crate::world::World;
use baton_image::{Image, MAX_ENCODED, NicState, Stay};
use baton_tcp::{Connection, Instant};

/// Congestion window in segments with which a kernel begins (RFC 6928).
const INITIAL_WINDOW: u32 = 10;

impl World {
    /// An event begins: a call or a packet. Connections move if it is one of those before which they do.
    pub fn begin_event(&mut self) {
        self.events += 1;
        let every = u64::from(self.flags.move_every);
        if every == 0 || !self.events.is_multiple_of(every) {
            return;
        }
        let (now, by_kernel) = (self.instant(), self.flags.by_kernel);
        for stream in self.sockets.values_mut().filter_map(Socket::stream_mut) {
            if stream.pass_through_image(by_kernel, now) {
                // What the host has set is not in an image: it sets it anew.
                stream.tcp.limit_window(FIRST_WINDOW);
            }
        }
    }

    /// Deadlines that have passed are not timers any more: who waits sees the time itself.
    pub fn expire_deadlines(&mut self) {
        let now = self.now;
        self.deadlines.retain(|_, at| *at > now);
    }
}

impl Stream {
    /// Writes the connection down, encoded as between host and NIC, and goes on with what is made from that. A
    /// connection that is opening stays as it is, and false is returned.
    fn pass_through_image(&mut self, by_kernel: bool, now: Instant) -> bool {
        let Some(image) = self.tcp.to_image(&Image::open(self.flow), now) else { return false };
        let (mut image, mut nic) = encoded(&image, Some(&self.tcp.nic_state(now)));
        if by_kernel {
            let stay = self.offloaded.then(|| Stay::new(image, nic, now.0));
            image = shown_by_kernel(&image, self.offloaded);
            nic = stay.and_then(|stay| stay.complete(&mut image, 0, now.0));
            (image, nic) = encoded(&image, nic.as_ref());
        }
        self.offloaded = true;
        let (memory, segment) = (self.tcp.receive_memory(), self.tcp.max_segment());
        // What was received out of order goes beside the image; its bytes stay where they are.
        let ranges: Vec<(u32, u32)> = self.tcp.out_of_order().collect();
        let fin = self.tcp.fin_behind_hole();
        self.tcp = Connection::from_image(&image, nic.as_ref(), memory, now);
        self.tcp.hold(ranges.into_iter(), fin);
        self.tcp.set_max_segment(segment);
        self.moved = by_kernel;
        true
    }
}

/// An image and what a NIC knows beside it, as they are read from a slot.
fn encoded(image: &Image, nic: Option<&NicState>) -> (Image, Option<NicState>) {
    let mut bytes = [0; MAX_ENCODED];
    let length = image.encode_with(nic, &mut bytes).expect("an image fits its room");
    Image::decode_with(&bytes[..length]).expect("an image that was written reads back")
}

/// What a kernel shows of a connection: no TS.Recent, and a timestamp clock without its lowest bit, to which the export
/// adds one. If it has the connection from a NIC (`imported`), the clock was set to an even value, and congestion
/// control and the time since data was sent begin anew.
fn shown_by_kernel(image: &Image, imported: bool) -> Image {
    let clock = if imported { image.ts_clock.wrapping_add(1) } else { image.ts_clock };
    // The kernel's jiffies; an import counts as a moment of sending.
    let sent_ago = image.sent_ago.map(|ago| if imported { 0 } else { ago / 1000 * 1000 });
    let shown = Image { sent_ago, ts_recent: 0, ts_clock: (clock & !1).wrapping_add(1), ..*image };
    if !imported {
        return shown;
    }
    Image { cwnd: INITIAL_WINDOW, ssthresh: u32::MAX, srtt: 0, rttvar: 0, min_rtt: 0, reordering_seen: false, ..shown }
}
